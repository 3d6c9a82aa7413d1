//! Faults rarely come alone. Here they come every few seconds, of every kind, on three engines that share a group, while orders arrive and
//! the provider lies on every tenth call: `onceward chaos`, as users run it. What it must find in the end is nothing.

use std::time::Duration;

use serde_json::{Value, json};

use crate::support::{brokers, run_onceward_within, times};

/// Long enough for a machine that does other things too.
const LIMIT: Duration = Duration::from_secs(600);

#[test]
fn a_minute_of_chaos_with_cooperative_sticky_loses_nothing_and_doubles_nothing() {
    chaos("cooperative-sticky", "1");
}

fn chaos(protocol: &str, seed: &str) {
    let (seconds, brokers) = (times(60, 180).to_string(), brokers());
    let arguments = ["--duration", &seconds, "--seed", seed, "--protocol", protocol, "--brokers", &brokers];
    // Few records, for this is not the only test that runs.
    let arguments = [&["chaos", "--format", "json", "--processes", "3", "--rate", "300"], &arguments[..]].concat();
    let output = run_onceward_within(LIMIT, &arguments, &[]);
    let (told, story) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let outcome: Value = told.lines().last().and_then(|line| serde_json::from_str(line).ok()).unwrap_or_else(|| panic!("{story}"));
    assert!(output.status.success(), "{outcome:#}\n{story}");
    assert_eq!((&outcome["lost"], &outcome["double_charges"], &outcome["unexplained"]), (&json!(0), &json!(0), &json!([])));
    assert!(outcome["charged"].as_u64() > Some(1_000), "{outcome:#}");
    let faults = outcome["faults"].as_object().expect("a map from kind to count");
    assert!(faults.len() >= 10 && outcome["rebalances"].as_u64() > Some(5), "it must be chaos: {outcome:#}");
    eprintln!("{outcome}"); // for whoever runs it with --nocapture
}
