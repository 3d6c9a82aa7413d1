//! Everything that does not add up, by kind.
//!
//! Invariant: however much is wrong, what is kept of it is a count and a few names per kind, and the names do not depend on the order
//! in which it was found.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Deserialize, Serialize};

/// What can be wrong, the worst first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum Problem {
    ChargedTwice,
    ChargedUnderOtherKeys,
    StrangeKey,
    DeclinedYetCharged,
    ChargeWithoutPayment,
    AmountsDiffer,
    Unreadable,
    Lost,
    GoneUnread,
    Orphaned,
    NotCharged,
    NotDeclined,
    ClaimOnly,
    NoClaim,
    AppliedWithoutPayment,
    PoisonNotHeld,
    ConflictNotHeld,
    BeyondEnd,
    OutOfReach,
    NeverTaken,
    Unread,
}

impl Problem {
    const fn in_words(self) -> &'static str {
        match self {
            Self::ChargedTwice => "charged more than once under its key",
            Self::ChargedUnderOtherKeys => "charged for an order and amount that have more charges than events",
            Self::StrangeKey => "charged under a key that is no event's canonical id",
            Self::DeclinedYetCharged => "declined in the payment table, charged at the provider",
            Self::ChargeWithoutPayment => "charged at the provider, with neither a payment row nor a held row that is in doubt",
            Self::AmountsDiffer => "with another order, amount or currency in one of log, payment table and ledger",
            Self::Unreadable => "with an amount that its currency cannot have",
            Self::Lost => "lost: produced, and neither charged nor declined nor held",
            Self::GoneUnread => "gone from the log before the group had read them",
            Self::Orphaned => "claimed from a place in the range that was read, where no record has this id",
            Self::NotCharged => "charged in the payment table, not at the provider",
            Self::NotDeclined => "declined in the payment table, unknown to the provider",
            Self::ClaimOnly => "claimed, with neither a payment row nor a held row",
            Self::NoClaim => "paid without a claim",
            Self::AppliedWithoutPayment => "noted as applied in its held row, without a payment row",
            Self::PoisonNotHeld => "no event, and not held",
            Self::ConflictNotHeld => "produced with two contents, none of them held as a conflict",
            Self::BeyondEnd => "settled, and beyond the end of the log: was the topic made anew?",
            Self::OutOfReach => "gone from the log before they could be audited",
            Self::NeverTaken => "not settled, in partitions that the group has never taken over",
            Self::Unread => "not read yet by the group: audit again when it has caught up",
        }
    }
}

/// How many of each kind, and the first few by name.
#[derive(Default)]
pub(super) struct Problems(BTreeMap<Problem, OfKind>);

#[derive(Default)]
struct OfKind {
    count: u64,
    examples: BTreeSet<String>,
    /// There is more than what is named.
    has_more: bool,
}

impl Problems {
    /// As many are named.
    pub(super) const EXAMPLES: usize = 5;

    pub(super) fn add(&mut self, problem: Problem, what: impl fmt::Display) {
        self.add_all(problem, 1, what);
    }

    /// `count` at once, all of them under one name.
    pub(super) fn add_all(&mut self, problem: Problem, count: u64, what: impl fmt::Display) {
        self.0.entry(problem).or_default().add(count, what.to_string());
    }

    /// `count` at once, with the first few of their names.
    pub(super) fn add_some(&mut self, problem: Problem, count: u64, first: impl IntoIterator<Item = String>) {
        let of_kind = self.0.entry(problem).or_default();
        let named = first.into_iter().map(|name| of_kind.add(0, name)).count() as u64;
        of_kind.count += count;
        of_kind.has_more |= count > named;
    }

    pub(super) fn into_sentences(self) -> Vec<String> {
        let sentence = |(problem, OfKind { count, examples, has_more }): (Problem, OfKind)| {
            let listed = examples.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
            format!("{count} {}: {listed}{}", problem.in_words(), if has_more { ", …" } else { "" })
        };
        self.0.into_iter().map(sentence).collect()
    }
}

impl OfKind {
    fn add(&mut self, count: u64, name: String) {
        self.count += count;
        self.examples.insert(name);
        if self.examples.len() > Problems::EXAMPLES {
            self.examples.pop_last();
            self.has_more = true;
        }
    }
}
