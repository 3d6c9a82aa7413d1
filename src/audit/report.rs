//! What the reconciler found, for people and for machines.
//!
//! Invariant: what nobody could know (there was no log, or no ledger) is shown as unknown, never as zero.

use std::fmt;

use serde::Serialize;

/// The counts and everything that does not add up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Records in the producer's log, or in what was read of the topic.
    pub produced: Option<u64>,
    /// Distinct ids of valid events among them.
    pub distinct: Option<u64>,
    /// Events with a payment row that says charged; where it is known what was produced, of those events, as the next two.
    pub charged: u64,
    /// Events with a payment row that says declined.
    pub declined: u64,
    /// Records that repeat an event with the same content.
    pub duplicates: Option<u64>,
    /// Events without a payment row that are held, for whatever reason.
    pub held: u64,
    /// Events that stand only where an operator wants records passed over.
    pub passed_over: u64,
    /// Records that are no event, and held.
    pub poison: u64,
    /// Records that repeat an id with another content, and held.
    pub conflicts: u64,
    /// Charges at the provider beyond one per event.
    pub double_charges: Option<u64>,
    /// Distinct ids among them that are in none of charged, declined, held, passed over.
    pub lost: Option<u64>,
    /// Distinct ids among them that are in none of them because the group has not read them yet.
    pub unread: Option<u64>,
    /// One sentence per kind of fault, with a count and some ids.
    pub problems: Vec<String>,
}

impl Report {
    /// Whether every event is where it should be, once, with one amount.
    #[must_use]
    pub fn adds_up(&self) -> bool {
        self.problems.is_empty() && [self.double_charges, self.lost, self.unread].into_iter().flatten().all(|count| count == 0)
    }

    /// One line of JSON; what is not known is `null`.
    #[must_use]
    pub fn to_json(&self) -> String {
        #[derive(Serialize)]
        struct Line<'a> {
            produced: Option<u64>,
            distinct: Option<u64>,
            charged: u64,
            declined: u64,
            duplicates: Option<u64>,
            held: u64,
            passed_over: u64,
            poison: u64,
            double_charges: Option<u64>,
            lost: Option<u64>,
            unread: Option<u64>,
            conflicts: u64,
            adds_up: bool,
            problems: &'a [String],
        }
        let Self {
            produced,
            distinct,
            charged,
            declined,
            duplicates,
            held,
            passed_over,
            poison,
            conflicts,
            double_charges,
            lost,
            unread,
            ref problems,
        } = *self;
        let adds_up = self.adds_up();
        let line = Line {
            produced,
            distinct,
            charged,
            declined,
            duplicates,
            held,
            passed_over,
            poison,
            double_charges,
            lost,
            unread,
            conflicts,
            adds_up,
            problems,
        };
        serde_json::to_string(&line).expect("numbers and texts can always be written")
    }
}

/// The table for a reader who has never seen it.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = [
            ("records produced", self.produced, "in the producer's log, or in what was read of the topic"),
            ("  distinct events", self.distinct, "valid, each id counted once; each must be in one of the next four"),
            ("    charged", Some(self.charged), "one payment row each"),
            ("    declined", Some(self.declined), "the provider said no; one payment row each"),
            ("    held", Some(self.held), "recorded with a reason, to be tried again or to be looked at"),
            ("    passed over", Some(self.passed_over), "an operator wanted it so: onceward offsets skip"),
            ("  duplicates", self.duplicates, "the same event again: nothing happened"),
            ("  conflicts", Some(self.conflicts), "a known id with another content: held, not applied"),
            ("  poison", Some(self.poison), "no valid event: held, not applied"),
            ("double charges", self.double_charges, "at the provider, beyond one per event: must be 0"),
            ("lost", self.lost, "distinct events that are neither charged, declined, held nor passed over: must be 0"),
        ];
        let unread = ("not read yet", self.unread, "distinct events that the group has still to come to");
        for (name, count, meaning) in rows.into_iter().chain(self.unread.is_some_and(|unread| unread > 0).then_some(unread)) {
            let count = count.map_or_else(|| "unknown".to_owned(), grouped);
            writeln!(f, "{name:<20}{count:>13}   {meaning}")?;
        }
        if self.adds_up() {
            return match (self.lost, self.double_charges) {
                (Some(_), Some(_)) => write!(f, "\nIt adds up."),
                (Some(_), None) => write!(f, "\nIt adds up, as far as was asked: without --ledger nobody knows of double charges."),
                (None, Some(_)) => write!(f, "\nIt adds up, as far as was asked: without topic and log nobody knows what is lost."),
                (None, None) => {
                    write!(
                        f,
                        "\nIt adds up, as far as was asked: without topic, log and --ledger nobody knows of losses and double charges."
                    )
                }
            };
        }
        write!(f, "\nIt does NOT add up:")?;
        self.problems.iter().try_for_each(|problem| write!(f, "\n  - {problem}"))
    }
}

/// `1234567` as `1,234,567`.
#[must_use]
pub fn grouped(count: u64) -> String {
    let digits = count.to_string();
    let mut grouped = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.char_indices() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        Report {
            produced: Some(1_234_567),
            distinct: Some(1_000_000),
            charged: 999_000,
            declined: 900,
            duplicates: Some(234_500),
            held: 100,
            passed_over: 0,
            poison: 60,
            conflicts: 7,
            double_charges: Some(0),
            lost: Some(0),
            unread: Some(0),
            problems: Vec::new(),
        }
    }

    #[test]
    fn a_machine_gets_one_line() {
        let line = r#"{"produced":1234567,"distinct":1000000,"charged":999000,"declined":900,"duplicates":234500,"held":100,"passed_over":0,"poison":60,"double_charges":0,"lost":0,"unread":0,"conflicts":7,"adds_up":true,"problems":[]}"#;
        assert_eq!(report().to_json(), line);
        assert!(Report::default().to_json().contains(r#""produced":null"#));
    }

    #[test]
    fn a_stranger_gets_a_table_with_a_verdict() {
        let table = report().to_string();
        assert!(
            table.starts_with("records produced        1,234,567   in the producer's log, or")
                && table.ends_with("\n\nIt adds up."),
            "{table}"
        );
        let wrong = Report { problems: vec!["1 charged more than once under its key: x".to_owned()], ..report() };
        assert!(wrong.to_string().ends_with("\n\nIt does NOT add up:\n  - 1 charged more than once under its key: x"));
        assert!(Report::default().to_string().contains("unknown   at the provider"));
        let half = Report { double_charges: None, ..report() }.to_string();
        assert!(half.ends_with("It adds up, as far as was asked: without --ledger nobody knows of double charges."), "{half}");
    }

    #[test]
    fn nothing_wrong_may_be_left_for_it_to_add_up() {
        assert!(report().adds_up());
        let wrong = [
            Report { lost: Some(1), ..report() },
            Report { double_charges: Some(1), ..report() },
            Report { unread: Some(1), ..report() },
            Report { problems: vec!["x".to_owned()], ..report() },
        ];
        assert!(wrong.iter().all(|report| !report.adds_up()));
    }
}
