//! A definition, its handles in the recorder, and its text where it is not counted but read.
//!
//! Invariant: a family has as many series as its label has words, from the first scrape to the last, and adding to one looks nothing up.

use std::fmt::{Display, Write as _};
use std::sync::OnceLock;

use metrics::{Counter, Gauge, Histogram, Key, Label, Level, Metadata, Recorder};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusRecorder};

/// What a metric is called and means.
#[derive(Debug)]
pub struct Definition {
    /// By Prometheus' conventions, unit last.
    pub name: &'static str,
    /// What it does over time.
    pub kind: Kind,
    /// Label names with their words; no words = not a closed list in this file.
    pub labels: &'static [(&'static str, &'static [&'static str])],
    /// One sentence.
    pub help: &'static str,
}

/// What a metric does over time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// Only grows.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Counts samples by size: the buckets' upper bounds.
    Histogram(&'static [f64]),
}

/// What every family can do.
pub trait Family: Sync {
    /// Name, kind, labels, help.
    fn definition(&self) -> &Definition;
    /// Makes every series exist, so that it is exported before its first change.
    fn register(&self);
}

/// The handles of one metric, one per word of its label.
pub struct Series<H> {
    definition: Definition,
    handles: OnceLock<Box<[H]>>,
}

/// What is changed: a counter, a gauge or a histogram.
pub trait Handle: Sized {
    /// The series' own handle.
    fn register(recorder: &PrometheusRecorder, key: &Key) -> Self;
}

const METADATA: Metadata<'static> = Metadata::new("onceward", Level::INFO, None);

/// A recorder that knows the buckets and the help of these metrics, and no series yet.
///
/// # Panics
/// When a histogram has no buckets.
pub fn recorder<'a>(definitions: impl Iterator<Item = &'a Definition> + Clone) -> PrometheusRecorder {
    let mut builder = PrometheusBuilder::new();
    for definition in definitions.clone() {
        if let Kind::Histogram(buckets) = definition.kind {
            let matcher = Matcher::Full(definition.name.to_owned());
            builder = builder.set_buckets_for_metric(matcher, buckets).expect("a histogram has buckets");
        }
    }
    let recorder = builder.build_recorder();
    for Definition { name, kind, help, .. } in definitions {
        match kind {
            Kind::Counter => recorder.describe_counter((*name).into(), None, (*help).into()),
            Kind::Gauge => recorder.describe_gauge((*name).into(), None, (*help).into()),
            Kind::Histogram(_) => recorder.describe_histogram((*name).into(), None, (*help).into()),
        }
    }
    recorder
}

impl<H: Handle> Series<H> {
    pub const fn new(definition: Definition) -> Self {
        assert!(definition.labels.len() <= 1, "one label at most");
        Self { definition, handles: OnceLock::new() }
    }

    /// The handle of the label's word; 0 without a label.
    pub fn at(&self, word: usize) -> &H {
        &self.handles()[word]
    }

    fn handles(&self) -> &[H] {
        self.handles.get_or_init(|| match self.definition.labels {
            [] => Box::new([self.definition.handle(&super::RECORDER, &[])]),
            [(label, words), ..] => {
                words.iter().map(|word| self.definition.handle(&super::RECORDER, &[(label, (*word).to_owned())])).collect()
            }
        })
    }
}

impl<H: Handle + Send + Sync> Family for Series<H> {
    fn definition(&self) -> &Definition {
        &self.definition
    }

    fn register(&self) {
        self.handles();
    }
}

impl Handle for Counter {
    fn register(recorder: &PrometheusRecorder, key: &Key) -> Self {
        recorder.register_counter(key, &METADATA)
    }
}

impl Handle for Gauge {
    fn register(recorder: &PrometheusRecorder, key: &Key) -> Self {
        recorder.register_gauge(key, &METADATA)
    }
}

impl Handle for Histogram {
    fn register(recorder: &PrometheusRecorder, key: &Key) -> Self {
        recorder.register_histogram(key, &METADATA)
    }
}

impl Definition {
    /// The handle of one series.
    pub fn handle<H: Handle>(&self, recorder: &PrometheusRecorder, labels: &[(&'static str, String)]) -> H {
        let labels: Vec<_> = labels.iter().map(|(label, word)| Label::new(*label, word.clone())).collect();
        H::register(recorder, &Key::from_parts(self.name, labels))
    }

    /// The text that Prometheus reads, of samples that are read elsewhere: the labels' values and the number. Nothing without samples.
    pub fn text<'a, V: Display>(&self, samples: impl IntoIterator<Item = (Vec<&'a str>, V)>) -> String {
        let mut text = String::new();
        for (values, number) in samples {
            let labels = self.labels.iter().zip(values).map(|((label, _), value)| format!("{label}=\"{}\"", escaped(value)));
            let labels = labels.collect::<Vec<_>>().join(",");
            let labels = if labels.is_empty() { labels } else { format!("{{{labels}}}") };
            writeln!(text, "{}{labels} {number}", self.name).expect("memory takes it");
        }
        if text.is_empty() {
            return text;
        }
        format!("# HELP {name} {}\n# TYPE {name} {}\n{text}\n", self.help, self.kind.word(), name = self.name)
    }

    /// The metric's row in the documentation.
    pub fn row(&self) -> String {
        let label = |(name, words): &(&str, &[&str])| match words.join(", ") {
            words if words.is_empty() => format!("`{name}`"),
            words => format!("`{name}`: {words}"),
        };
        let labels = self.labels.iter().map(label).collect::<Vec<_>>().join("; ");
        format!("| `{}` | {} | {labels} | {} |\n", self.name, self.kind.word(), self.help)
    }
}

/// A label's value may be any text.
fn escaped(value: &str) -> String {
    value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n")
}

impl Kind {
    const fn word(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram(_) => "histogram",
        }
    }
}
