//! The reconciler itself: every trace of every event in, one report out. No I/O, so that a test can plant any fault.
//!
//! In: records of the producer's log, rows of the database, lines of the provider's ledger, in any order. Out: a [`Report`]. It owns
//! some sixty bytes per event. If it dies here, nothing has been changed: it only reads.
//!
//! Invariant: what is lost is a set of ids, those that were produced and are in none of charged, declined and held; never a
//! subtraction of totals, in which a loss and a double would cancel out.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt;
use std::num::NonZeroU64;

use uuid::Uuid;
use xxhash_rust::xxh3::xxh3_64;

use super::report::Report;
use crate::event::{Currency, Money};
use crate::handler::HeldReason;
use crate::store::held_events::HeldState;
use crate::store::payments::PaymentStatus;

/// Order, amount and currency, as a hash: equal for equal values however the amount is spelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Content(NonZeroU64);

impl Content {
    /// `None` when the amount is none of its currency. `in_minor_units`: the text counts the smallest unit.
    pub(super) fn of(order: i64, amount: &str, currency: &str, in_minor_units: bool) -> Option<Self> {
        let currency = Currency::from_code(currency).ok()?;
        let money = if in_minor_units {
            Money::from_minor_units(amount.parse().ok()?, currency)
        } else {
            Money::from_decimal(amount, currency).ok()?
        };
        let mut bytes = [0; 19];
        bytes[..8].copy_from_slice(&order.to_le_bytes());
        bytes[8..16].copy_from_slice(&money.minor_units().to_le_bytes());
        bytes[16..].copy_from_slice(currency.code().as_bytes());
        NonZeroU64::new(xxh3_64(&bytes)).or(Some(NonZeroU64::MIN)).map(Self)
    }
}

/// What the provider's ledger says of one booking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Booking {
    /// Money moved.
    Charged,
    /// A business "no".
    Declined,
    /// No money moved.
    Failed,
}

/// What is known of one event id.
#[derive(Default)]
struct Traces {
    logged: Option<Logged>,
    /// The payment row's content.
    paid: Option<Content>,
    /// The content of its first charge.
    booked: Option<Content>,
    charges: u32,
    /// A set of the constants below.
    seen: u16,
}

struct Logged {
    digest: i64,
    content: Option<Content>,
}

const CLAIMED: u16 = 1;
const CLAIMED_ELSEWHERE: u16 = 1 << 1;
const CHARGED: u16 = 1 << 2;
const DECLINED: u16 = 1 << 3;
/// Held and not applied, for whatever reason but those of poison and conflicts.
const HELD: u16 = 1 << 4;
/// Held, and nobody can say whether it was charged.
const HELD_IN_DOUBT: u16 = 1 << 5;
const HELD_AS_CONFLICT: u16 = 1 << 6;
const HELD_APPLIED: u16 = 1 << 7;
const LEDGER_DECLINED: u16 = 1 << 8;
/// The log has it with more than one content.
const LOGGED_TWO_WAYS: u16 = 1 << 9;
const AMOUNTS_DIFFER: u16 = 1 << 10;
const UNREADABLE: u16 = 1 << 11;
/// The group has settled a record of it that is wanted, or says so: it must be somewhere.
const READ: u16 = 1 << 12;
/// The log has it somewhere that is not passed over.
const WANTED: u16 = 1 << 13;

impl Traces {
    const fn has(&self, any_of: u16) -> bool {
        self.seen & any_of != 0
    }

    const fn is_paid(&self) -> bool {
        self.has(CHARGED | DECLINED)
    }
}

/// Takes traces in, then reports.
#[derive(Default)]
pub(super) struct Reconciliation {
    events: HashMap<Uuid, Traces>,
    /// Further contents of events that the log has more than one way: one of them is charged, and any may be.
    other_contents: HashMap<Uuid, Vec<Option<Content>>>,
    has_log: bool,
    has_ledger: bool,
    /// How far the group had settled each partition before anything else was looked at.
    settled: BTreeMap<i32, i64>,
    records: u64,
    event_records: u64,
    /// Where records that are no event stand, and where such records are held.
    poison_logged: HashSet<(i32, i64)>,
    poison_held: HashSet<(i32, i64)>,
    /// One per row.
    conflicts_held: Vec<Uuid>,
    /// Charges under keys that are no canonical id.
    strange_charges: Vec<(String, Option<Content>)>,
}

impl Reconciliation {
    /// From here on an empty log means that nothing was produced, not that nobody knows.
    pub(super) const fn with_log(&mut self) {
        self.has_log = true;
    }

    /// The same for the ledger.
    pub(super) const fn with_ledger(&mut self) {
        self.has_ledger = true;
    }

    /// The first offset of a partition that is not settled; before the log. What stands there or beyond is not lost, only not read.
    pub(super) fn settled_below(&mut self, partition: i32, offset: i64) {
        self.settled.insert(partition, offset);
    }

    fn is_read(&self, (partition, offset): (i32, i64)) -> bool {
        self.settled.get(&partition).is_some_and(|below| offset < *below)
    }

    /// A record of the log that is an event.
    /// `wanted`: it does not stand where an operator wants records passed over.
    pub(super) fn logged_event(&mut self, place: (i32, i64), id: Uuid, digest: i64, content: Option<Content>, wanted: bool) {
        (self.records, self.event_records) = (self.records + 1, self.event_records + 1);
        let read = if self.is_read(place) { READ } else { 0 };
        let traces = self.events.entry(id).or_default();
        traces.seen |= if wanted { WANTED | read } else { 0 };
        match &traces.logged {
            None => traces.logged = Some(Logged { digest, content }),
            Some(first) if first.digest != digest => {
                traces.seen |= LOGGED_TWO_WAYS;
                self.other_contents.entry(id).or_default().push(content);
            }
            Some(_) => {}
        }
    }

    /// A record of the log that is none.
    pub(super) fn logged_poison(&mut self, partition: i32, offset: i64, wanted: bool) {
        self.records += 1;
        if wanted {
            self.poison_logged.insert((partition, offset));
        }
    }

    /// A claim, of the audited group or of another.
    pub(super) fn claim(&mut self, id: Uuid, of_group: bool) {
        self.events.entry(id).or_default().seen |= if of_group { CLAIMED } else { CLAIMED_ELSEWHERE };
    }

    pub(super) fn payment(&mut self, id: Uuid, status: PaymentStatus, content: Option<Content>) {
        let traces = self.events.entry(id).or_default();
        traces.seen |= match status {
            PaymentStatus::Charged => CHARGED,
            PaymentStatus::Declined => DECLINED,
        };
        traces.seen |= if content.is_none() { UNREADABLE } else { 0 };
        traces.paid = content;
    }

    pub(super) fn held(&mut self, id: Option<Uuid>, partition: i32, offset: i64, reason: HeldReason, state: HeldState) {
        let flags = match (reason, state) {
            (HeldReason::Undecodable | HeldReason::Invalid, _) => {
                self.poison_held.insert((partition, offset));
                return;
            }
            (HeldReason::Gap | HeldReason::Skipped, _) => return, // they stand for records, and are none
            (HeldReason::Conflict, _) => HELD_AS_CONFLICT,
            (_, HeldState::Applied) => HELD_APPLIED,
            (HeldReason::Retryable | HeldReason::Unknown | HeldReason::ChargedNotRecorded, _) => HELD | HELD_IN_DOUBT,
            (
                HeldReason::Rejected | HeldReason::BeyondHorizon | HeldReason::Future | HeldReason::Refused | HeldReason::Behind,
                _,
            ) => HELD,
        };
        let Some(id) = id else { return };
        self.events.entry(id).or_default().seen |= flags;
        if flags == HELD_AS_CONFLICT {
            self.conflicts_held.push(id);
        }
    }

    pub(super) fn booking(&mut self, key: &str, booking: Booking, content: Option<Content>) {
        let id = Uuid::try_parse(key).ok().filter(|id| id.hyphenated().to_string() == key);
        match (id, booking) {
            (_, Booking::Failed) => {}
            (None, Booking::Declined) => {}
            (None, Booking::Charged) => self.strange_charges.push((key.to_owned(), content)),
            (Some(id), Booking::Declined) => self.events.entry(id).or_default().seen |= LEDGER_DECLINED,
            (Some(id), Booking::Charged) => {
                let traces = self.events.entry(id).or_default();
                let differs = traces.charges > 0 && traces.booked != content;
                traces.seen |= if differs { AMOUNTS_DIFFER } else { 0 } | if content.is_none() { UNREADABLE } else { 0 };
                traces.booked = if traces.charges == 0 { content } else { traces.booked };
                traces.charges += 1;
            }
        }
    }

    /// `floor`: claims of older ids are forgotten, so that they need none.
    pub(super) fn report(self, floor: Option<Uuid>) -> Report {
        let mut problems = Problems::default();
        let mut report = Report::default();
        let (mut distinct, mut lost, mut unread, mut double_charges) = (0, 0, 0, 0);
        for (id, traces) in &self.events {
            let produced = traces.logged.is_some();
            distinct += u64::from(produced);
            // Each event counts once, so that the parts add up; rows of events that the log does not know are not counted, only checked.
            if produced || !self.has_log {
                report.charged += u64::from(traces.has(CHARGED));
                report.declined += u64::from(traces.has(DECLINED));
                report.held += u64::from(!traces.is_paid() && traces.has(HELD));
            }
            match produced && !traces.is_paid() && !traces.has(HELD) {
                true if !traces.has(WANTED) => report.passed_over += 1,
                true if traces.has(READ) => {
                    lost += 1;
                    problems.add(Problem::Lost, *id);
                }
                true => {
                    unread += 1;
                    problems.add(Problem::Unread, *id);
                }
                false => {}
            }
            double_charges += u64::from(traces.charges.saturating_sub(1));
            self.judge_rows(*id, traces, floor, &mut problems);
            self.judge_money(*id, traces, &mut problems);
        }
        for (key, _) in &self.strange_charges {
            problems.add(Problem::StrangeKey, key);
        }
        double_charges += self.charges_under_other_keys(&mut problems);
        for (partition, offset) in self.poison_logged.difference(&self.poison_held) {
            let problem = if self.is_read((*partition, *offset)) { Problem::PoisonNotHeld } else { Problem::Unread };
            problems.add(problem, format_args!("partition {partition} offset {offset}"));
        }
        let is_ours = |id: &&Uuid| !self.has_log || self.events.get(id).is_some_and(|traces| traces.logged.is_some());
        report.conflicts = self.conflicts_held.iter().filter(is_ours).count() as u64;
        report.poison =
            if self.has_log { self.poison_logged.intersection(&self.poison_held).count() } else { self.poison_held.len() } as u64;
        if self.has_log {
            report.produced = Some(self.records);
            report.distinct = Some(distinct);
            report.duplicates = Some(self.event_records.saturating_sub(distinct + report.conflicts));
            report.lost = Some(lost);
            report.unread = Some(unread);
        }
        report.double_charges = self.has_ledger.then_some(double_charges);
        report.problems = problems.into_sentences();
        report
    }

    /// Claim, payment row and held row must tell one story.
    fn judge_rows(&self, id: Uuid, traces: &Traces, floor: Option<Uuid>, problems: &mut Problems) {
        if traces.has(CLAIMED) && !traces.is_paid() && !traces.has(HELD | HELD_APPLIED) {
            problems.add(Problem::ClaimOnly, id);
        }
        if traces.is_paid() && !traces.has(CLAIMED | CLAIMED_ELSEWHERE) && floor.is_none_or(|floor| id >= floor) {
            problems.add(Problem::NoClaim, id);
        }
        if traces.has(HELD_APPLIED) && !traces.is_paid() {
            problems.add(Problem::AppliedWithoutPayment, id);
        }
        if traces.has(LOGGED_TWO_WAYS) && traces.has(READ) && !traces.has(HELD_AS_CONFLICT) {
            problems.add(Problem::ConflictNotHeld, id);
        }
    }

    /// Log, payment row and ledger must name the same money.
    fn judge_money(&self, id: Uuid, traces: &Traces, problems: &mut Problems) {
        if traces.charges > 1 {
            problems.add(Problem::ChargedTwice, id);
        }
        if self.has_ledger {
            let booked = traces.charges > 0;
            if traces.has(CHARGED) && !booked {
                problems.add(Problem::NotCharged, id);
            }
            if traces.has(DECLINED) && booked {
                problems.add(Problem::DeclinedYetCharged, id);
            }
            if traces.has(DECLINED) && !booked && !traces.has(LEDGER_DECLINED) {
                problems.add(Problem::NotDeclined, id);
            }
            if booked && !traces.is_paid() && !traces.has(HELD_IN_DOUBT) {
                problems.add(Problem::ChargeWithoutPayment, id);
            }
        }
        if traces.has(UNREADABLE) {
            problems.add(Problem::Unreadable, id);
        }
        let logged_as = |content| match &traces.logged {
            Some(logged) => {
                logged.content == Some(content) || self.other_contents.get(&id).is_some_and(|other| other.contains(&Some(content)))
            }
            None => true,
        };
        let same = [traces.paid, traces.booked].into_iter().flatten().all(logged_as)
            && traces.paid.zip(traces.booked).is_none_or(|(paid, booked)| paid == booked);
        if !same || traces.has(AMOUNTS_DIFFER) {
            problems.add(Problem::AmountsDiffer, id);
        }
    }

    /// The same order and amount charged under more keys than the log has events with them: the same event under another id.
    fn charges_under_other_keys(&self, problems: &mut Problems) -> u64 {
        if !self.has_log {
            return 0;
        }
        let mut balance: HashMap<Content, (u32, u32)> = HashMap::new();
        for (id, traces) in &self.events {
            let others = self.other_contents.get(id).into_iter().flatten();
            for content in traces.logged.iter().map(|logged| &logged.content).chain(others).flatten() {
                balance.entry(*content).or_default().0 += 1;
            }
        }
        let strange = self.strange_charges.iter().filter_map(|(_, content)| *content);
        for content in self.events.values().filter_map(|traces| traces.booked).chain(strange) {
            if let Some((_, keys)) = balance.get_mut(&content) {
                *keys += 1;
            }
        }
        let excess: HashMap<Content, u32> = balance
            .into_iter()
            .filter(|(_, (events, keys))| keys > events)
            .map(|(content, (events, keys))| (content, keys - events))
            .collect();
        if !excess.is_empty() {
            let is_one = |content: Option<Content>| content.is_some_and(|content| excess.contains_key(&content));
            let of_events = self.events.iter().filter(|(_, traces)| is_one(traces.booked)).map(|(id, _)| id.to_string());
            let strange = self.strange_charges.iter().filter(|(_, content)| is_one(*content)).map(|(key, _)| key.clone());
            of_events.chain(strange).for_each(|key| problems.add(Problem::ChargedUnderOtherKeys, key));
        }
        excess.into_values().map(u64::from).sum()
    }
}

/// What can be wrong, the worst first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Problem {
    ChargedTwice,
    ChargedUnderOtherKeys,
    StrangeKey,
    DeclinedYetCharged,
    ChargeWithoutPayment,
    AmountsDiffer,
    Unreadable,
    Lost,
    NotCharged,
    NotDeclined,
    ClaimOnly,
    NoClaim,
    AppliedWithoutPayment,
    PoisonNotHeld,
    ConflictNotHeld,
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
            Self::NotCharged => "charged in the payment table, not at the provider",
            Self::NotDeclined => "declined in the payment table, unknown to the provider",
            Self::ClaimOnly => "claimed, with neither a payment row nor a held row",
            Self::NoClaim => "paid without a claim",
            Self::AppliedWithoutPayment => "noted as applied in its held row, without a payment row",
            Self::PoisonNotHeld => "no event, and not held",
            Self::ConflictNotHeld => "produced with two contents, none of them held as a conflict",
            Self::Unread => "not read yet by the group: audit again when it has caught up",
        }
    }
}

/// How many of each kind, and the first few by name, in an order that does not depend on chance.
#[derive(Default)]
struct Problems(BTreeMap<Problem, (u64, BTreeSet<String>)>);

impl Problems {
    const EXAMPLES: usize = 5;

    fn add(&mut self, problem: Problem, what: impl fmt::Display) {
        let (count, examples) = self.0.entry(problem).or_default();
        *count += 1;
        examples.insert(what.to_string());
        if examples.len() > Self::EXAMPLES {
            examples.pop_last();
        }
    }

    fn into_sentences(self) -> Vec<String> {
        let sentence = |(problem, (count, examples)): (Problem, (u64, BTreeSet<String>))| {
            let listed = examples.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
            let more = if count > examples.len() as u64 { ", …" } else { "" };
            format!("{count} {}: {listed}{more}", problem.in_words())
        };
        self.0.into_iter().map(sentence).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A world in which everything is right; a test breaks one thing in it.
    struct World {
        log: Vec<(Uuid, i64, &'static str)>,
        poison: Vec<(i32, i64)>,
        claims: Vec<(Uuid, bool)>,
        payments: Vec<(Uuid, PaymentStatus, i64, &'static str)>,
        held: Vec<(Option<Uuid>, i32, i64, HeldReason, HeldState)>,
        ledger: Vec<(String, Booking, i64, &'static str)>,
        floor: Option<Uuid>,
        is_log_known: bool,
        is_ledger_known: bool,
        /// The same for both partitions; the log's events stand in the first from offset 1 on.
        settled: i64,
    }

    const AMOUNT: &str = "10.00";

    fn id(number: u128) -> Uuid {
        Uuid::from_u128(0x0189_0a5d_ac96_774b_8000_0000_0000_0000 + number)
    }

    /// Of ten events: 1 to 7 charged, 8 declined, 9 and 10 held. 1 was sent three times, 2 also with another amount, and there are two
    /// records that are no event.
    fn world() -> World {
        let order = |number: u128| number as i64;
        let of = |number| (id(number), order(number));
        let mut log: Vec<_> = (1..=10).map(|number| (id(number), order(number), AMOUNT)).collect();
        log.extend([(id(1), 1, AMOUNT), (id(1), 1, AMOUNT), (id(2), 2, "99.00")]);
        let payment = |number| {
            let (id, order) = of(number);
            (id, if number == 8 { PaymentStatus::Declined } else { PaymentStatus::Charged }, order, AMOUNT)
        };
        let booking = |number| {
            let (id, order) = of(number);
            (id.to_string(), if number == 8 { Booking::Declined } else { Booking::Charged }, order, AMOUNT)
        };
        World {
            log,
            poison: vec![(0, 100), (1, 200)],
            claims: (1..=10).map(|number| (id(number), true)).collect(),
            payments: (1..=8).map(payment).collect(),
            held: vec![
                (Some(id(9)), 0, 9, HeldReason::Unknown, HeldState::Retrying),
                (Some(id(10)), 0, 10, HeldReason::Rejected, HeldState::Parked),
                (Some(id(2)), 0, 12, HeldReason::Conflict, HeldState::Parked),
                (None, 0, 100, HeldReason::Undecodable, HeldState::Parked),
                (Some(id(3)), 1, 200, HeldReason::Invalid, HeldState::Parked),
            ],
            ledger: (1..=9).map(booking).collect(),
            floor: Some(id(0)),
            is_log_known: true,
            is_ledger_known: true,
            settled: 1_000,
        }
    }

    impl World {
        fn report(&self) -> Report {
            let content = |order, amount| Content::of(order, amount, "EUR", false);
            let mut reconciliation = Reconciliation::default();
            // The order must not matter: the log comes last.
            self.held
                .iter()
                .for_each(|(id, partition, offset, reason, state)| reconciliation.held(*id, *partition, *offset, *reason, *state));
            self.payments
                .iter()
                .for_each(|(id, status, order, amount)| reconciliation.payment(*id, *status, content(*order, amount)));
            self.claims.iter().for_each(|(id, of_group)| reconciliation.claim(*id, *of_group));
            if self.is_ledger_known {
                reconciliation.with_ledger();
                self.ledger
                    .iter()
                    .for_each(|(key, booking, order, amount)| reconciliation.booking(key, *booking, content(*order, amount)));
            }
            if self.is_log_known {
                (0..2).for_each(|partition| reconciliation.settled_below(partition, self.settled));
                reconciliation.with_log();
                for ((id, order, amount), offset) in self.log.iter().zip(1..) {
                    reconciliation.logged_event((0, offset), *id, i64::from(*amount != AMOUNT), content(*order, amount), true);
                }
                self.poison.iter().for_each(|(partition, offset)| reconciliation.logged_poison(*partition, *offset, true));
            }
            reconciliation.report(self.floor)
        }
    }

    /// The report of a world with one thing broken.
    fn broken(plant: impl FnOnce(&mut World)) -> Report {
        let mut world = world();
        plant(&mut world);
        let report = world.report();
        assert!(!report.adds_up(), "nothing was noticed: {report}");
        report
    }

    #[test]
    fn a_world_in_order_adds_up() {
        let report = world().report();
        assert_eq!(report.problems, Vec::<String>::new());
        let expected = Report {
            passed_over: 0,
            produced: Some(15),
            distinct: Some(10),
            charged: 7,
            declined: 1,
            duplicates: Some(2),
            held: 2,
            poison: 2,
            conflicts: 1,
            double_charges: Some(0),
            lost: Some(0),
            unread: Some(0),
            problems: Vec::new(),
        };
        assert_eq!(report, expected);
        assert!(report.adds_up());
    }

    #[test]
    fn a_planted_double_charge_is_found() {
        let report = broken(|world| world.ledger.push(world.ledger[4].clone()));
        assert_eq!((report.double_charges, report.lost), (Some(1), Some(0)));
        assert!(report.problems.contains(&format!("1 charged more than once under its key: {}", id(5))), "{report}");
    }

    #[test]
    fn a_planted_double_charge_under_another_key_is_found() {
        for other_key in [id(77).to_string(), id(5).to_string().to_uppercase(), "order-5".to_owned()] {
            let report = broken(|world| world.ledger.push((other_key.clone(), Booking::Charged, 5, AMOUNT)));
            assert_eq!(report.double_charges, Some(1), "{other_key}");
            assert!(
                report.problems.iter().any(|problem| problem.contains("more charges than events") && problem.contains(&other_key)),
                "{report}"
            );
        }
    }

    #[test]
    fn two_events_of_one_order_and_amount_are_no_double_charge() {
        let mut world = world();
        world.log.push((id(11), 5, AMOUNT));
        world.claims.push((id(11), true));
        world.payments.push((id(11), PaymentStatus::Charged, 5, AMOUNT));
        world.ledger.push((id(11).to_string(), Booking::Charged, 5, AMOUNT));
        assert!(world.report().adds_up(), "{}", world.report());
    }

    #[test]
    fn a_planted_loss_is_found() {
        // As if an offset had been committed past an event that was never applied.
        let report = broken(|world| {
            world.claims.remove(6);
            world.payments.remove(6);
            world.ledger.remove(6);
        });
        assert_eq!((report.charged, report.lost, report.double_charges), (6, Some(1), Some(0)));
        assert_eq!(report.problems, [format!("1 lost: produced, and neither charged nor declined nor held: {}", id(7))]);
    }

    #[test]
    fn what_the_group_has_not_read_is_not_lost_and_does_not_add_up_yet() {
        let report = broken(|world| {
            world.claims.remove(6);
            world.payments.remove(6);
            world.ledger.remove(6);
            world.settled = 7; // event 7 stands at offset 7
            world.held.truncate(3); // the records that are no event stand at 100 and 200
        });
        assert_eq!((report.lost, report.unread), (Some(0), Some(1)));
        let [sentence] = &report.problems[..] else { panic!("{report}") };
        assert!(sentence.starts_with("3 not read yet by the group"), "{sentence}");
    }

    #[test]
    fn a_loss_and_a_stranger_do_not_cancel_out() {
        let report = broken(|world| {
            world.claims[6].0 = id(77);
            world.payments[6].0 = id(77);
            world.ledger[6].0 = id(77).to_string();
        });
        assert_eq!((report.charged, report.lost), (6, Some(1)));
    }

    #[test]
    fn neither_poison_nor_a_conflict_hides_a_loss_of_the_same_id() {
        for (event, row) in [(2, 1), (3, 2)] {
            let report = broken(|world| {
                world.claims.remove(row);
                world.payments.remove(row);
                world.ledger.remove(row);
            });
            assert_eq!(report.lost, Some(1), "event {event}");
        }
    }

    #[test]
    fn every_kind_of_contradiction_has_its_sentence() {
        type Plant = fn(&mut World);
        let plants: [(&str, Plant); 15] = [
            ("charged under a key that is no event's canonical id", |w| {
                w.ledger.push(("x".to_owned(), Booking::Charged, 88, AMOUNT))
            }),
            ("declined in the payment table, charged at the provider", |w| w.ledger[7].1 = Booking::Charged),
            ("declined in the payment table, unknown to the provider", |w| drop(w.ledger.remove(7))),
            ("charged in the payment table, not at the provider", |w| drop(w.ledger.remove(0))),
            ("charged in the payment table, not at the provider", |w| w.ledger[0].1 = Booking::Failed),
            ("neither a payment row nor a held row that is in doubt", |w| {
                w.ledger.push((id(10).to_string(), Booking::Charged, 10, AMOUNT))
            }),
            ("neither a payment row nor a held row that is in doubt", |w| {
                w.ledger.push((id(77).to_string(), Booking::Charged, 77, AMOUNT))
            }),
            ("with another order, amount or currency", |w| w.ledger[0].3 = "10.01"),
            ("with another order, amount or currency", |w| w.payments[0].3 = "10.01"),
            ("with another order, amount or currency", |w| w.payments[0].2 = 11),
            ("with an amount that its currency cannot have", |w| w.payments[0].3 = "10.001"),
            ("claimed, with neither a payment row nor a held row", |w| w.claims.push((id(77), true))),
            ("paid without a claim", |w| w.claims.truncate(7)),
            ("noted as applied in its held row, without a payment row", |w| w.held[0].4 = HeldState::Applied),
            ("no event, and not held: partition 1 offset 200", |w| w.held.truncate(4)),
        ];
        for (sentence, plant) in plants {
            let report = broken(plant);
            assert!(report.problems.iter().any(|problem| problem.contains(sentence)), "{sentence}: {report}");
        }
        let report = broken(|world| world.held[2].3 = HeldReason::Rejected);
        assert_eq!(report.problems, [format!("1 produced with two contents, none of them held as a conflict: {}", id(2))]);
    }

    #[test]
    fn either_content_of_a_conflict_may_be_the_one_that_is_charged() {
        let mut world = world();
        (world.payments[1].3, world.ledger[1].3) = ("99.00", "99.00");
        assert!(world.report().adds_up(), "{}", world.report());
    }

    #[test]
    fn a_charge_in_doubt_is_held_and_no_contradiction() {
        // Event 9 was charged, its answer was lost, and nobody has asked again yet.
        assert!(world().ledger.iter().any(|(key, ..)| *key == id(9).to_string()) && world().report().adds_up());
    }

    #[test]
    fn a_claim_may_be_forgotten_below_the_floor_or_be_another_group_s() {
        let mut world = world();
        world.claims[0].1 = false;
        assert!(world.report().adds_up());
        world.claims.remove(0);
        world.floor = Some(id(2));
        assert!(world.report().adds_up());
    }

    #[test]
    fn what_nobody_told_is_unknown_and_not_zero() {
        let report = World { is_log_known: false, ..world() }.report();
        assert_eq!((report.produced, report.distinct, report.duplicates, report.lost), (None, None, None, None));
        assert_eq!((report.charged, report.declined, report.held, report.poison, report.conflicts), (7, 1, 2, 2, 1));
        let report = World { is_ledger_known: false, ..world() }.report();
        assert_eq!((report.double_charges, report.adds_up()), (None, true));
    }

    #[test]
    fn an_empty_ledger_is_not_an_unknown_one() {
        let report = broken(|world| world.ledger.clear());
        assert_eq!(report.problems[0].split(':').next(), Some("7 charged in the payment table, not at the provider"));
        assert!(report.problems[0].ends_with(", …"));
    }

    #[test]
    fn amounts_are_compared_by_value_in_either_form() {
        let ten_euro = Content::of(1, "10.00", "EUR", false);
        assert_eq!(ten_euro, Content::of(1, "1e1", "EUR", false));
        assert_eq!(ten_euro, Content::of(1, "1000", "EUR", true));
        assert_ne!(ten_euro, Content::of(1, "10.00", "USD", false));
        assert_ne!(ten_euro, Content::of(2, "10.00", "EUR", false));
        assert_eq!((Content::of(1, "10.001", "EUR", false), Content::of(1, "10.00", "EUR", true)), (None, None));
    }
}
