//! What chaos came to, for people and for machines.
//!
//! Invariant: it is good only when the reconciler says so and nothing is left to be explained.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde_json::{Map, Value, json};

use crate::audit::{Report, grouped};

/// All of it.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The reckoning.
    pub report: Report,
    /// How often each kind of fault was made.
    pub faults: BTreeMap<&'static str, u64>,
    /// How often an engine was given partitions.
    pub rebalances: u64,
    /// The longest that a partition with work settled nothing while database, provider and an engine were there.
    pub longest_stall: Duration,
    /// What nobody had asked for, one sentence each.
    pub unexplained: Vec<String>,
}

impl Outcome {
    /// Nothing lost, nothing doubled, nothing unexplained.
    #[must_use]
    pub fn is_good(&self) -> bool {
        self.report.adds_up() && self.unexplained.is_empty()
    }

    /// The reckoning's object with what was done beside it.
    #[must_use]
    pub fn to_json(&self) -> String {
        let mut object: Map<String, Value> = serde_json::from_str(&self.report.to_json()).expect("the report is one object");
        object.insert("faults".to_owned(), json!(self.faults));
        object.insert("rebalances".to_owned(), json!(self.rebalances));
        object.insert("longest_stall_ms".to_owned(), json!(u64::try_from(self.longest_stall.as_millis()).unwrap_or(u64::MAX)));
        object.insert("unexplained".to_owned(), json!([&self.report.problems[..], &self.unexplained[..]].concat()));
        Value::Object(object).to_string()
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}\n", self.report)?;
        for (kind, count) in &self.faults {
            writeln!(f, "{kind:<24}{:>9}", grouped(*count))?;
        }
        writeln!(f, "{:<24}{:>9}   times an engine was given partitions", "rebalances", grouped(self.rebalances))?;
        write!(
            f,
            "{:<24}{:>9}   ms in which a partition could have gone on and did not",
            "longest stall",
            self.longest_stall.as_millis()
        )?;
        if !self.unexplained.is_empty() {
            write!(f, "\n\nUnexplained:")?;
            self.unexplained.iter().try_for_each(|sentence| write!(f, "\n  - {sentence}"))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome() -> Outcome {
        Outcome {
            report: Report { produced: Some(3), double_charges: Some(0), lost: Some(0), ..Report::default() },
            faults: BTreeMap::from([("kill", 2)]),
            rebalances: 5,
            longest_stall: Duration::from_millis(700),
            unexplained: Vec::new(),
        }
    }

    #[test]
    fn a_machine_gets_the_reckoning_and_what_was_done_in_one_object() {
        let object: Value = serde_json::from_str(&outcome().to_json()).unwrap();
        assert_eq!((&object["produced"], &object["lost"], &object["faults"]["kill"]), (&json!(3), &json!(0), &json!(2)));
        assert_eq!((&object["rebalances"], &object["longest_stall_ms"]), (&json!(5), &json!(700)));
    }

    #[test]
    fn anything_lost_doubled_or_unexplained_is_not_good() {
        assert!(outcome().is_good());
        let lost = Outcome { report: Report { lost: Some(1), ..outcome().report }, ..outcome() };
        let doubled = Outcome { report: Report { double_charges: Some(1), ..outcome().report }, ..outcome() };
        let unexplained = Outcome { unexplained: vec!["engine 1 ended by itself".to_owned()], ..outcome() };
        assert!([lost, doubled, unexplained].iter().all(|outcome| !outcome.is_good()));
    }
}
