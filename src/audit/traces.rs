//! The judge: every trace of one event after another, one report out. No I/O but the sort by content, so that a test can plant any fault.
//!
//! In: [`Entry`]s in the order of their bytes. Out: a [`Report`]. It owns what is known of the event that is streaming by, and counts. If
//! it dies here, nothing has been changed: it only reads.
//!
//! Invariant: what is lost is a set of ids, those that were produced and are in none of charged, declined and held; never a
//! subtraction of totals, in which a loss and a double would cancel out.

use std::io;

use uuid::Uuid;

use super::entry::{
    AMOUNTS_DIFFER, BEGUN, BalanceBytes, Bytes, CHARGED, CLAIMED, CLAIMED_ELSEWHERE, CLAIMED_IN_RANGE, Content, DECLINED, Entry,
    HELD, HELD_APPLIED, HELD_AS_CONFLICT, HELD_IN_DOUBT, Kind, LEDGER_DECLINED, PAID_LATER, READ, Seen, Share, Subject, TWO_WAYS,
    UNREADABLE, WANTED, balance_bytes, from_balance_bytes,
};
use super::problems::{Problem, Problems};
use super::records::Frontier;
use super::report::Report;
use super::sorter::{Sorted, Sorter};
use super::unseen::Unseen;

/// What was asked, and so what may be judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Scope {
    /// Somebody tells what was produced.
    pub has_records: bool,
    /// It may be a part of all: rows and charges of other events are nobody's fault.
    pub is_range: bool,
    /// The provider tells what it has charged.
    pub has_ledger: bool,
}

/// Records that were read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct Counts {
    /// All of them.
    pub records: u64,
    /// Those that are events.
    pub events: u64,
}

/// What is known of one subject.
#[derive(Default)]
struct Traces {
    seen: Seen,
    /// The payment row's content.
    paid: Option<Content>,
    /// The content of its first charge.
    booked: Option<Content>,
    charges: u32,
    /// Held rows of the reason conflict.
    conflicts: u64,
    /// The last record's content.
    last_content: Option<Content>,
    /// The digest of the first record that is settled and wanted: of the others none need be held.
    settled_digest: Option<i64>,
    /// Where a record of it stands, one that is read if there is one: not read, partition, offset.
    stands: Option<(bool, i32, i64)>,
    /// A record has the payment row's content.
    is_paid_as_produced: bool,
    /// A record has the content of the first charge.
    is_booked_as_produced: bool,
}

impl Traces {
    const fn has(&self, any_of: Seen) -> bool {
        self.seen & any_of != 0
    }

    const fn is_paid(&self) -> bool {
        self.has(CHARGED | DECLINED)
    }

    const fn is_produced(&self) -> bool {
        self.stands.is_some()
    }

    /// For whoever has to go there.
    fn named(&self, id: Uuid) -> String {
        let (_, partition, offset) = self.stands.unwrap_or_default();
        format!("{id} (partition {partition} offset {offset})")
    }

    /// The rows and the ledger have been seen before the first record. Out: a content that no earlier record had.
    fn record(&mut self, entry: &Entry) -> Option<Content> {
        if entry.seen & READ != 0 {
            let first = *self.settled_digest.get_or_insert(entry.digest);
            self.seen |= if first == entry.digest { 0 } else { TWO_WAYS };
        }
        let stands = (entry.seen & READ == 0, entry.place.0, entry.place.1);
        self.stands = Some(self.stands.map_or(stands, |first| first.min(stands)));
        let last = std::mem::replace(&mut self.last_content, entry.content);
        let new = entry.content.filter(|_| last != entry.content)?;
        self.is_paid_as_produced |= self.paid == Some(new);
        self.is_booked_as_produced |= self.booked == Some(new);
        Some(new)
    }
}

/// Takes traces in, then reports.
pub(super) struct Judge {
    scope: Scope,
    /// Claims of older ids are forgotten, so that they need none.
    pub(super) floor: Option<Uuid>,
    /// The last entry, and what is known of its subject.
    current: Option<(Bytes, Traces)>,
    /// Who has which content.
    balance: Sorter<{ size_of::<BalanceBytes>() }>,
    report: Report,
    distinct: u64,
    lost: u64,
    unread: u64,
    double_charges: u64,
    problems: Problems,
}

/// The part of the bytes in which entries must come in order: subject and kind.
const ORDERED: usize = 18;
const SUBJECT: usize = 17;

impl Judge {
    /// Sorts by content in `memory` bytes.
    pub(super) fn new(scope: Scope, memory: usize) -> Self {
        Self {
            scope,
            floor: None,
            current: None,
            balance: Sorter::new(memory),
            report: Report::default(),
            distinct: 0,
            lost: 0,
            unread: 0,
            double_charges: 0,
            problems: Problems::default(),
        }
    }

    /// A charge under a key that is no canonical id.
    pub(super) fn strange_charge(&mut self, key: &str, content: Option<Content>) -> io::Result<()> {
        self.problems.add(Problem::StrangeKey, key);
        self.weigh(content, Share::Charge, key)
    }

    /// What no record speaks for.
    pub(super) fn unseen(&mut self, unseen: Unseen, frontier: &Frontier) {
        unseen.tell(frontier, &mut self.problems);
    }

    /// The next trace.
    ///
    /// # Panics
    /// It does not come in order: half of an event would be judged as a whole one.
    pub(super) fn take(&mut self, bytes: &Bytes) -> io::Result<()> {
        if let Some((last, _)) = &self.current {
            assert!(last[..ORDERED] <= bytes[..ORDERED], "the traces are not in order");
        }
        if self.current.as_ref().is_none_or(|(last, _)| last[..SUBJECT] != bytes[..SUBJECT]) {
            self.judge()?;
            self.current = Some((*bytes, Traces::default()));
        }
        let (last, traces) = self.current.as_mut().expect("set above");
        *last = *bytes;
        let entry = Entry::from_bytes(bytes);
        traces.seen |= entry.seen;
        match entry.kind {
            Kind::Note => traces.conflicts += u64::from(entry.seen & HELD_AS_CONFLICT != 0),
            Kind::Payment => traces.paid = entry.content,
            Kind::Charge => {
                traces.seen |= if traces.charges > 0 && traces.booked != entry.content { AMOUNTS_DIFFER } else { 0 };
                traces.booked = if traces.charges == 0 { entry.content } else { traces.booked };
                traces.charges += 1;
            }
            Kind::Record => {
                let booked = traces.booked;
                let other = traces.record(&entry).filter(|new| booked != Some(*new));
                self.weigh(other, Share::Event, "")?;
            }
        }
        Ok(())
    }

    /// Everything has come.
    pub(super) fn report(mut self, counts: Counts) -> io::Result<Report> {
        self.judge()?;
        let Self { scope, mut report, mut problems, balance, .. } = self;
        let excess = charges_under_other_keys(balance.sorted()?, &mut problems)?;
        if scope.has_records {
            report.produced = Some(counts.records);
            report.distinct = Some(self.distinct);
            report.duplicates = Some(counts.events.saturating_sub(self.distinct + report.conflicts));
            report.lost = Some(self.lost);
            report.unread = Some(self.unread);
        }
        report.double_charges = scope.has_ledger.then_some(self.double_charges + excess);
        report.problems = problems.into_sentences();
        Ok(report)
    }

    /// All traces of the current subject have come.
    fn judge(&mut self) -> io::Result<()> {
        let Some((bytes, traces)) = self.current.take() else { return Ok(()) };
        match Entry::from_bytes(&bytes).subject {
            Subject::Place(partition, offset) => self.judge_poison(partition, offset, &traces),
            Subject::Event(id) => {
                self.judge_event(id, &traces);
                self.judge_rows(id, &traces);
                self.judge_money(id, &traces);
                self.weigh_charge(id, &traces)?;
            }
        }
        Ok(())
    }

    /// Each event counts once, so that the parts add up; rows of events that nobody produced are not counted, only checked.
    fn judge_event(&mut self, id: Uuid, traces: &Traces) {
        let produced = traces.is_produced();
        self.distinct += u64::from(produced);
        if produced || !self.scope.has_records {
            self.report.charged += u64::from(traces.has(CHARGED));
            self.report.declined += u64::from(traces.has(DECLINED));
            self.report.held += u64::from(!traces.is_paid() && traces.has(HELD));
            self.report.conflicts += traces.conflicts;
        }
        match produced && !traces.is_paid() && !traces.has(HELD) {
            true if !traces.has(WANTED) => self.report.passed_over += 1,
            true if traces.has(READ) => {
                self.lost += 1;
                self.problems.add(Problem::Lost, traces.named(id));
            }
            true => {
                self.unread += 1;
                self.problems.add(Problem::Unread, traces.named(id));
            }
            false => {}
        }
        self.double_charges += u64::from(traces.charges.saturating_sub(1));
    }

    fn judge_poison(&mut self, partition: i32, offset: i64, traces: &Traces) {
        let (produced, held) = (traces.is_produced(), traces.has(HELD));
        self.report.poison += u64::from(held && (produced || !self.scope.has_records));
        if produced && !held {
            let problem = if traces.has(READ) { Problem::PoisonNotHeld } else { Problem::Unread };
            self.problems.add(problem, format_args!("partition {partition} offset {offset}"));
        }
    }

    /// Record, claim, payment row and held row must tell one story.
    fn judge_rows(&mut self, id: Uuid, traces: &Traces) {
        if traces.has(CLAIMED) && !traces.is_paid() && !traces.has(HELD | HELD_APPLIED) {
            self.problems.add(Problem::ClaimOnly, id);
        }
        if traces.is_paid() && !traces.has(CLAIMED | CLAIMED_ELSEWHERE) && self.floor.is_none_or(|floor| id >= floor) {
            self.problems.add(Problem::NoClaim, id);
        }
        if traces.has(CLAIMED_IN_RANGE) && !traces.is_produced() {
            self.problems.add(Problem::Orphaned, id);
        }
        if traces.has(HELD_APPLIED) && !traces.is_paid() {
            self.problems.add(Problem::AppliedWithoutPayment, id);
        }
        if traces.has(TWO_WAYS) && !traces.has(HELD_AS_CONFLICT) {
            self.problems.add(Problem::ConflictNotHeld, id);
        }
    }

    /// Record, payment row and ledger must name the same money.
    fn judge_money(&mut self, id: Uuid, traces: &Traces) {
        if traces.charges > 1 {
            self.problems.add(Problem::ChargedTwice, id);
        }
        if self.scope.has_ledger {
            self.judge_charge(id, traces);
        }
        if traces.has(UNREADABLE) {
            self.problems.add(Problem::Unreadable, id);
        }
        let other_than_produced = traces.is_produced()
            && (traces.paid.is_some() && !traces.is_paid_as_produced || traces.booked.is_some() && !traces.is_booked_as_produced);
        let other_than_paid = traces.paid.zip(traces.booked).is_some_and(|(paid, booked)| paid != booked);
        if other_than_produced || other_than_paid || traces.has(AMOUNTS_DIFFER) {
            self.problems.add(Problem::AmountsDiffer, id);
        }
    }

    /// Payment row and ledger must agree on whether money moved.
    fn judge_charge(&mut self, id: Uuid, traces: &Traces) {
        let booked = traces.charges > 0;
        let ledger_may_be_older = traces.has(PAID_LATER);
        if traces.has(CHARGED) && !booked && !ledger_may_be_older {
            self.problems.add(Problem::NotCharged, id);
        }
        if traces.has(DECLINED) && booked {
            self.problems.add(Problem::DeclinedYetCharged, id);
        }
        if traces.has(DECLINED) && !booked && !traces.has(LEDGER_DECLINED) && !ledger_may_be_older {
            self.problems.add(Problem::NotDeclined, id);
        }
        if booked && !traces.is_paid() && !traces.has(HELD_IN_DOUBT | BEGUN) {
            self.problems.add(Problem::ChargeWithoutPayment, id);
        }
    }

    /// A charge that is accounted for outside the range is nobody's twin inside it.
    fn weigh_charge(&mut self, id: Uuid, traces: &Traces) -> io::Result<()> {
        let is_explained = traces.is_paid() || traces.has(HELD_IN_DOUBT | BEGUN);
        let is_outside = self.scope.is_range && !traces.is_produced() && is_explained && !traces.has(CLAIMED_IN_RANGE);
        match traces.booked {
            Some(_) if is_outside => Ok(()),
            Some(_) if traces.is_booked_as_produced => self.weigh(traces.booked, Share::Both, &id.hyphenated().to_string()),
            booked => self.weigh(booked, Share::Charge, &id.hyphenated().to_string()),
        }
    }

    fn weigh(&mut self, content: Option<Content>, share: Share, key: &str) -> io::Result<()> {
        if let Some(content) = content.filter(|_| self.scope.has_records && self.scope.has_ledger) {
            self.balance.push(balance_bytes(content, share, key))?;
        }
        Ok(())
    }
}

/// The same order and amount charged under more keys than there are events with them: the same event under another id.
fn charges_under_other_keys(mut sorted: Sorted<{ size_of::<BalanceBytes>() }>, problems: &mut Problems) -> io::Result<u64> {
    let mut excess = 0;
    let mut current = (0, Balance::default());
    while let Some(bytes) = sorted.next()? {
        let (content, share, key) = from_balance_bytes(&bytes);
        if content != current.0 {
            excess += std::mem::replace(&mut current, (content, Balance::default())).1.excess(problems);
        }
        current.1.add(share, key);
    }
    Ok(excess + current.1.excess(problems))
}

/// Who has one content.
#[derive(Default)]
struct Balance {
    events: u64,
    charges: u64,
    /// The first few keys, first those of events, then the others, each in order.
    of_events: Vec<String>,
    of_others: Vec<String>,
}

impl Balance {
    fn add(&mut self, share: Share, key: String) {
        self.events += u64::from(share != Share::Charge);
        self.charges += u64::from(share != Share::Event);
        let keys = if share == Share::Both { &mut self.of_events } else { &mut self.of_others };
        if share != Share::Event && keys.len() < Problems::EXAMPLES {
            keys.push(key);
        }
    }

    /// How many charges are too many. A charge that no event has anything to do with is not judged here.
    fn excess(self, problems: &mut Problems) -> u64 {
        if self.events == 0 || self.charges <= self.events {
            return 0;
        }
        problems.add_some(Problem::ChargedUnderOtherKeys, self.charges, self.of_events.into_iter().chain(self.of_others));
        self.charges - self.events
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet, VecDeque};

    use proptest::prelude::*;

    use super::*;
    use crate::audit::entry::Booking;
    use crate::audit::streams::least;
    use crate::handler::HeldReason;
    use crate::store::held_events::HeldState;
    use crate::store::payments::PaymentStatus;

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

    /// Judges entries that may come in any order.
    fn judged(mut judge: Judge, entries: &[Entry], counts: Counts) -> Report {
        let mut bytes: Vec<Bytes> = entries.iter().map(|entry| entry.to_bytes()).collect();
        bytes.sort_unstable();
        bytes.iter().for_each(|entry| judge.take(entry).unwrap());
        judge.report(counts).unwrap()
    }

    impl World {
        fn report(&self) -> Report {
            let scope = Scope { has_records: self.is_log_known, is_range: false, has_ledger: self.is_ledger_known };
            self.report_in(scope, Vec::new())
        }

        /// With further entries.
        fn report_in(&self, scope: Scope, mut entries: Vec<Entry>) -> Report {
            let content = |order, amount| Content::of(order, amount, "EUR", false);
            let mut judge = Judge::new(scope, 1 << 10);
            judge.floor = self.floor;
            entries.extend(
                self.held
                    .iter()
                    .filter_map(|(id, partition, offset, reason, state)| Entry::held(*id, *partition, *offset, *reason, *state)),
            );
            entries.extend(
                self.payments.iter().map(|(id, status, order, amount)| Entry::payment(*id, *status, content(*order, amount), 0)),
            );
            entries.extend(self.claims.iter().map(|(id, of_group)| Entry::claim(*id, *of_group, 0)));
            for (key, booking, order, amount) in self.ledger.iter().filter(|_| self.is_ledger_known) {
                match Uuid::try_parse(key).ok().filter(|id| id.to_string() == *key) {
                    Some(id) => entries.extend(Entry::booking(id, *booking, content(*order, amount))),
                    None => judge.strange_charge(key, content(*order, amount)).unwrap(),
                }
            }
            let mut counts = Counts::default();
            if self.is_log_known {
                let seen = |offset: i64| if offset < self.settled { WANTED | READ } else { WANTED };
                for ((id, order, amount), offset) in self.log.iter().zip(1..) {
                    entries.push(Entry::event(
                        (0, offset),
                        *id,
                        i64::from(*amount != AMOUNT),
                        content(*order, amount),
                        seen(offset),
                    ));
                }
                entries.extend(self.poison.iter().map(|(partition, offset)| Entry::poison(*partition, *offset, seen(*offset))));
                counts = Counts { records: (self.log.len() + self.poison.len()) as u64, events: self.log.len() as u64 };
            }
            judged(judge, &entries, counts)
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
        assert_eq!(
            report.problems,
            [format!("1 lost: produced, and neither charged nor declined nor held: {} (partition 0 offset 7)", id(7))]
        );
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
    fn what_is_lost_is_named_with_a_place_that_was_read() {
        let record = |place, seen| Entry::event(place, id(77), 0, Content::of(77, AMOUNT, "EUR", false), seen);
        let report =
            world().report_in(RANGE, vec![record((0, 70), WANTED), record((1, 50), WANTED | READ), record((1, 60), WANTED | READ)]);
        let expected = format!("1 lost: produced, and neither charged nor declined nor held: {} (partition 1 offset 50)", id(77));
        assert_eq!(report.problems, [expected]);
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
    fn another_content_has_to_be_held_only_where_it_is_settled_and_wanted() {
        let mut world = world();
        world.log.pop(); // the other content of 2
        world.held.remove(2); // and its held row
        for (seen, is_wrong) in [(0, false), (WANTED, false), (WANTED | READ, true)] {
            let other = Entry::event((0, 13), id(2), 1, Content::of(2, "99.00", "EUR", false), seen);
            let expected = is_wrong.then(|| format!("1 produced with two contents, none of them held as a conflict: {}", id(2)));
            assert_eq!(world.report_in(RANGE, vec![other]).problems, Vec::from_iter(expected), "{seen:b}");
        }
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

    const RANGE: Scope = Scope { has_records: true, is_range: true, has_ledger: true };

    #[test]
    fn a_claim_from_a_place_that_was_read_must_have_its_event_there() {
        let mut world = world();
        world.claims.push((id(77), true));
        world.payments.push((id(77), PaymentStatus::Charged, 77, AMOUNT));
        world.ledger.push((id(77).to_string(), Booking::Charged, 77, AMOUNT));
        assert!(world.report_in(RANGE, Vec::new()).adds_up(), "it may stand outside the range");
        let report = world.report_in(RANGE, vec![Entry::claim(id(77), true, CLAIMED_IN_RANGE)]);
        let expected = format!("1 claimed from a place in the range that was read, where no record has this id: {}", id(77));
        assert_eq!(report.problems, [expected]);
        let own = world.report_in(RANGE, vec![Entry::claim(id(5), true, CLAIMED_IN_RANGE)]);
        assert!(own.adds_up(), "{own}");
    }

    #[test]
    fn a_charge_of_an_event_outside_the_range_is_nobody_s_twin_inside_it() {
        let mut world = world();
        world.claims.push((id(77), true));
        world.payments.push((id(77), PaymentStatus::Charged, 5, AMOUNT)); // the same order and amount as event 5
        world.ledger.push((id(77).to_string(), Booking::Charged, 5, AMOUNT));
        assert!(world.report_in(RANGE, Vec::new()).adds_up());
        assert_eq!(world.report().double_charges, Some(1), "a log has all events");
        world.payments.pop();
        world.claims.pop();
        let hidden = world.report_in(RANGE, Vec::new());
        assert_eq!(hidden.double_charges, Some(1), "nothing explains it: {hidden}");
    }

    #[test]
    fn what_happens_while_it_is_audited_is_no_contradiction() {
        // Charged after the ledger was read: new by then, or claimed long before, held, and tried again.
        let mut world = world();
        world.claims.push((id(77), true));
        for status in [PaymentStatus::Charged, PaymentStatus::Declined] {
            let payment = |seen| Entry::payment(id(77), status, Content::of(77, AMOUNT, "EUR", false), seen);
            assert!(world.report_in(RANGE, vec![payment(PAID_LATER)]).adds_up());
            assert!(!world.report_in(RANGE, vec![payment(0)]).adds_up(), "one that was paid before has to be there");
        }
        // Charged, and the batch is still open.
        let mut world = self::world();
        world.ledger.push((id(78).to_string(), Booking::Charged, 5, AMOUNT));
        let report = world.report_in(RANGE, vec![Entry::attempt(id(78))]);
        assert!(report.adds_up(), "{report}");
    }

    #[test]
    #[should_panic(expected = "not in order")]
    fn traces_that_are_not_in_order_are_not_judged() {
        let mut judge = Judge::new(RANGE, 1 << 10);
        for number in [2, 1] {
            judge.take(&Entry::attempt(id(number)).to_bytes()).unwrap();
        }
    }

    /// Few ids and contents, so that everything meets everything.
    fn entry() -> impl Strategy<Value = Entry> {
        let content = || prop::sample::select(vec![None, Content::of(1, "1", "EUR", false), Content::of(2, "1", "EUR", false)]);
        let id = || (0_u128..6).prop_map(id);
        prop_oneof![
            (id(), 0_u32..1 << 17).prop_map(|(id, seen)| Entry { seen, ..Entry::attempt(id) }),
            (id(), content()).prop_map(|(id, content)| Entry::payment(id, PaymentStatus::Charged, content, 0)),
            (id(), content()).prop_filter_map("", |(id, content)| Entry::booking(id, Booking::Charged, content)),
            (id(), 0_i64..2, content(), prop::sample::select(vec![0, WANTED, WANTED | READ]))
                .prop_map(|(id, digest, content, seen)| Entry::event((0, 0), id, digest, content, seen)),
            (0_i64..3, any::<bool>()).prop_map(|(offset, held)| {
                if held {
                    Entry::held(None, 0, offset, HeldReason::Invalid, HeldState::Parked).expect("a place")
                } else {
                    Entry::poison(0, offset, WANTED | READ)
                }
            }),
        ]
    }

    /// Lost, not read, and charged too often, computed from sets.
    fn naive(entries: &[Entry]) -> (u64, u64, u64) {
        let ids: BTreeSet<Uuid> =
            entries.iter().filter_map(|e| if let Subject::Event(id) = e.subject { Some(id) } else { None }).collect();
        let (mut lost, mut unread, mut double) = (0, 0, 0);
        let mut balance: BTreeMap<Content, (u64, u64)> = BTreeMap::new();
        for id in ids {
            let of_kind = |kind| entries.iter().filter(move |e| e.subject == Subject::Event(id) && e.kind == kind);
            let seen = entries.iter().filter(|e| e.subject == Subject::Event(id)).fold(0, |seen, entry| seen | entry.seen);
            let nowhere = of_kind(Kind::Record).count() > 0 && seen & (CHARGED | DECLINED | HELD) == 0 && seen & WANTED != 0;
            lost += u64::from(nowhere && seen & READ != 0);
            unread += u64::from(nowhere && seen & READ == 0);
            double += (of_kind(Kind::Charge).count() as u64).saturating_sub(1);
            let contents: BTreeSet<Content> = of_kind(Kind::Record).filter_map(|entry| entry.content).collect();
            contents.into_iter().for_each(|content| balance.entry(content).or_default().0 += 1);
            let booked = of_kind(Kind::Charge).map(|entry| entry.content).min().flatten();
            booked.into_iter().for_each(|content| balance.entry(content).or_default().1 += 1);
        }
        let excess: u64 =
            balance.values().filter(|(events, _)| *events > 0).map(|(events, keys)| keys.saturating_sub(*events)).sum();
        (lost, unread, double + excess)
    }

    proptest! {
        #[test]
        fn what_is_sorted_in_tiny_runs_and_merged_is_judged_as_what_is_in_memory(
            entries in prop::collection::vec((entry(), 0_usize..4), 0..80),
            run in 1_usize..6,
        ) {
            let scope = Scope { has_records: true, is_range: false, has_ledger: true };
            let all: Vec<Entry> = entries.iter().map(|(entry, _)| *entry).collect();
            let expected = judged(Judge::new(scope, 1 << 20), &all, Counts::default());
            let (lost, unread, double) = naive(&all);
            prop_assert_eq!((expected.lost, expected.unread, expected.double_charges), (Some(lost), Some(unread), Some(double)));

            // Two parts come from files and two in order, as in an audit.
            let of = |part: usize| entries.iter().filter(move |(_, of)| *of == part).map(|(entry, _)| entry.to_bytes());
            let sorted = |part: usize| {
                let mut sorter = Sorter::new(run * Entry::SIZE);
                of(part).for_each(|entry| drop(sorter.push(entry)));
                sorter.sorted().unwrap()
            };
            let in_order = |part: usize| {
                let mut entries: Vec<Bytes> = of(part).collect();
                entries.sort_unstable();
                VecDeque::from(entries)
            };
            let (mut files, mut tables) = ([sorted(0), sorted(1)], [in_order(2), in_order(3)]);
            let mut judge = Judge::new(scope, run * size_of::<BalanceBytes>());
            while let Some(part) = least([files[0].peek(), files[1].peek(), tables[0].front(), tables[1].front()]) {
                let entry = if part < 2 { files[part].next().unwrap() } else { tables[part - 2].pop_front() };
                judge.take(&entry.expect("it was seen")).unwrap();
            }
            prop_assert_eq!(judge.report(Counts::default()).unwrap(), expected);
        }
    }
}
