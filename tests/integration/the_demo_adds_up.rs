//! The first thing that anybody sees of the engine is the demo, and it shows the whole promise: a lying provider, a kill while it charges, a
//! replay of everything. It runs on librdkafka's own mock cluster, where a group behaves in other ways than on a real broker.

use std::time::Duration;

use serde_json::{Value, json};

use crate::support::run_onceward_within;

/// Long enough for a machine that does other things too.
const LIMIT: Duration = Duration::from_secs(400);

#[test]
fn the_demo_ends_with_a_reckoning_that_adds_up() {
    let output = run_onceward_within(LIMIT, &["demo", "--format", "json"], &[]);
    let (told, story) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{told}\n{story}");
    let report: Value = told.lines().last().and_then(|line| serde_json::from_str(line).ok()).unwrap_or_else(|| panic!("{told}"));
    assert_eq!((&report["adds_up"], &report["problems"]), (&json!(true), &json!([])));
    assert_eq!((&report["produced"], &report["poison"]), (&json!(24_154), &json!(120)));
    // What it shows has happened.
    for shown in ["charged", "declined", "held", "duplicates", "conflicts"] {
        assert!(report[shown].as_u64() > Some(0), "{shown}: {report}");
    }
    assert!(story.contains("SIGKILL, with ") && story.contains("The provider was called 0 times meanwhile."), "{story}");
}
