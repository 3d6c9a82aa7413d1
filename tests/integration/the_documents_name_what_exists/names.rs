//! Keys, variables and metrics that the documents name.

use std::collections::BTreeSet;

use onceward::config::{KEYS, SECTIONS};

use super::pages;

/// Settings of Kafka that look like keys of ours.
const OF_KAFKA: [&str; 1] = ["retention.ms"];
/// Variables that are no keys: of the tests, of Kubernetes, the configuration's place.
const VARIABLES: [&str; 6] = [
    "ONCEWARD_CONFIG",
    "ONCEWARD_CLAIM_FORM",
    "ONCEWARD_SERVICE_HOST",
    "ONCEWARD_PORT",
    "ONCEWARD_KAFKA_OPTIONS_",
    "ONCEWARD_TEST_",
];
/// Roles of the database.
const ROLES: [&str; 4] = ["onceward_owner", "onceward_service", "onceward_reader", "onceward_operator"];

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

#[test]
fn every_key_that_a_document_names_is_one() {
    let of_files = KEYS.iter().filter(|key| key.secret).map(|key| format!("{}_file", key.path()));
    let known: BTreeSet<String> = KEYS.iter().map(|key| key.path()).chain(of_files).collect();
    let (mut seen, mut unknown) = (0, Vec::new());
    for page in pages() {
        for code in page.code() {
            // `kafka.on_gap = "continue"` names one too.
            let name = code.split([' ', '=']).next().unwrap_or_default();
            let Some((section, key)) = name.split_once('.') else { continue };
            let is_ours =
                SECTIONS.iter().any(|(known, _)| *known == section) && key.chars().all(is_word) && key != "rs" && !key.is_empty();
            if is_ours && !OF_KAFKA.contains(&name) {
                seen += 1;
                if !known.contains(name) {
                    unknown.push(format!("{}: {name}", page.name));
                }
            }
        }
    }
    assert!(seen > 100 && unknown.is_empty(), "{seen} keys, of which are none:\n{}", unknown.join("\n"));
}

#[test]
fn every_variable_that_a_document_names_is_read() {
    let of_keys = KEYS.iter().flat_map(|key| [key.variable(), format!("{}_FILE", key.variable())]);
    let known: BTreeSet<String> = of_keys.collect();
    let (mut seen, mut unknown) = (0, Vec::new());
    for page in pages() {
        for (at, _) in page.text.match_indices("ONCEWARD_") {
            let name = page.text[at..].split(|c| !is_word(c)).next().unwrap_or_default();
            seen += 1;
            if !known.contains(name) && !VARIABLES.iter().any(|other| name.starts_with(other)) {
                unknown.push(format!("{}: {name}", page.name));
            }
        }
    }
    assert!(seen > 20 && unknown.is_empty(), "{seen} variables, of which nobody reads:\n{}", unknown.join("\n"));
}

#[test]
fn every_metric_that_a_document_names_is_there() {
    let pages = pages();
    let reference = pages.iter().find(|page| page.name == "docs/METRICS.md").expect("made from the code");
    let known: BTreeSet<&str> = reference.code().filter(|code| code.starts_with("onceward_")).collect();
    let (mut seen, mut unknown) = (0, Vec::new());
    for page in &pages {
        for (at, _) in page.text.match_indices("onceward_") {
            let name = page.text[at..].split(|c| !is_word(c)).next().unwrap_or_default();
            let series = ["_bucket", "_sum", "_count"].iter().find_map(|part| name.strip_suffix(part)).unwrap_or(name);
            seen += 1;
            if !known.contains(name) && !known.contains(series) && !ROLES.contains(&name) {
                unknown.push(format!("{}: {name}", page.name));
            }
        }
    }
    assert!(seen > 60 && unknown.is_empty(), "{seen} names, of which are no metrics:\n{}", unknown.join("\n"));
}
