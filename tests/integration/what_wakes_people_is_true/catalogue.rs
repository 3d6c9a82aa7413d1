//! The metrics that there are, as `docs/METRICS.md` tells: a unit test holds it true to the code.

use std::collections::{BTreeMap, BTreeSet};

use onceward::handler::HeldReason;
use onceward::store::held_events::HeldState;

/// Where a series comes from; every scrape gives it these.
pub const TARGET: [&str; 2] = ["instance", "job"];

/// Every metric by name, a histogram by the names of its series.
pub struct Catalogue(BTreeMap<String, Metric>);

/// One metric.
pub struct Metric {
    /// It only grows.
    pub is_counter: bool,
    labels: BTreeMap<String, Vec<String>>,
}

impl Catalogue {
    /// From the document, with what Prometheus itself adds.
    pub fn read(document: &str) -> Self {
        let up = Metric { is_counter: false, labels: BTreeMap::new() };
        let mut all = BTreeMap::from([("up".to_owned(), up)]);
        for line in document.lines().filter(|line| line.starts_with("| `")) {
            let cells: Vec<&str> = line.split(" | ").map(|cell| cell.trim_matches(['|', ' '])).collect();
            let [name, kind, labels, ..] = cells[..] else { panic!("no row of a metric: {line}") };
            let name = name.trim_matches('`');
            let metric = |is_counter, more: &[&str]| {
                let more = more.iter().map(|label| ((*label).to_owned(), Vec::new()));
                Metric { is_counter, labels: labels_of(labels).into_iter().chain(more).collect() }
            };
            if kind == "histogram" {
                all.insert(format!("{name}_bucket"), metric(true, &["le"]));
                all.insert(format!("{name}_sum"), metric(true, &[]));
                all.insert(format!("{name}_count"), metric(true, &[]));
            } else {
                all.insert(name.to_owned(), metric(kind == "counter", &[]));
            }
        }
        Self(all)
    }

    pub fn get(&self, name: &str) -> Option<&Metric> {
        self.0.get(name)
    }
}

impl Metric {
    /// The labels of its series, once they are scraped.
    pub fn labels(&self) -> BTreeSet<String> {
        self.labels.keys().map(String::as_str).chain(TARGET).map(str::to_owned).collect()
    }

    /// Whether a label can have this value. What is no closed list can have any.
    pub fn can_have(&self, label: &str, value: &str) -> bool {
        match (label, self.labels.get(label)) {
            ("reason", Some(_)) => HeldReason::from_word(value).is_some(),
            ("state", Some(_)) => HeldState::from_word(value).is_some(),
            (_, Some(words)) => words.is_empty() || words.iter().any(|word| word == value),
            (_, None) => TARGET.contains(&label),
        }
    }
}

/// From `` `phase`: bump, drain; `other` ``.
fn labels_of(cell: &str) -> BTreeMap<String, Vec<String>> {
    let labels = cell.split("; ").filter(|label| !label.is_empty()).map(|label| {
        let (name, words) = label.split_once(": ").unwrap_or((label, ""));
        let words = words.split(", ").filter(|word| !word.is_empty()).map(str::to_owned);
        (name.trim_matches('`').to_owned(), words.collect())
    });
    labels.collect()
}
