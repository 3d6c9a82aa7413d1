//! What becomes of each record of a batch: pure decisions, between the statements that `dedup.rs` sends.
//!
//! In: decoded records, then what the claim, the look-up and the handler said. Out: rows to write and the records given back.
//!
//! Invariant: every record ends with one [`Fate`] that is not [`Fate::Open`], and only a record given back is not settled.

use std::collections::{HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, SystemTime};

use uuid::Uuid;

use crate::event::Money;
use crate::event::id::{unix_ms, unix_ms_of, version_seven};
use crate::handler::{Claimed, Event, EventDigest, Handler, HeldReason, Outcome, Rejection, Trace};
use crate::held::{Next, RetryPolicy};
use crate::pipeline::window::Buffered;
use crate::record::{Holds, KeyDigest, Offset, Record, RecordDigest, Skips, SourceId};
use crate::store::consumed_partitions::Doubt;
use crate::store::held_events::{HeldState, NewHeld};
use crate::store::processed_events::{ClaimRow, Seen};

// A panic in one record must be that record's outcome, in every profile.
const _: () = assert!(cfg!(panic = "unwind"), "the guards below need unwinding");

/// What becomes of one record.
#[derive(Debug, PartialEq, Eq)]
pub enum Fate {
    /// Not decided yet: to be claimed.
    Open,
    /// The same event stood earlier in this batch; it shares that one's fate.
    Repeat {
        /// The index of the first.
        of: usize,
    },
    /// Settled before, by us or by anybody of the group.
    Duplicate {
        /// By this very record: it was read again. Otherwise the event was produced more than once.
        same_record: bool,
    },
    /// An operator wanted it passed over: settled without effect, and not even claimed.
    Skipped,
    /// The effect happened and is written.
    Applied,
    /// A business "no" is written.
    Declined,
    /// Recorded with its reason.
    Held(Box<Hold>),
    /// Not settled: the claim goes, the record stays in the window.
    GivenBack {
        /// Not again before this.
        wait: Duration,
    },
}

/// What a held row says beyond its record.
#[derive(Debug, PartialEq, Eq)]
pub struct Hold {
    reason: HeldReason,
    error: String,
    state: HeldState,
    owns_claim: bool,
    charge_id: Option<String>,
    attempts: i32,
    next_attempt_in: Option<Duration>,
}

/// The records of one transaction with what is known of each.
#[derive(Debug)]
pub struct Batch<'a, E> {
    items: Vec<Item<'a, E>>,
    /// One of them is held before anybody is asked, and holds up those of its key.
    holds_up: bool,
}

#[derive(Debug)]
struct Item<'a, E> {
    record: &'a Buffered,
    event_id: Option<Uuid>,
    digest: Option<EventDigest>,
    /// Taken when it becomes a [`Claimed`].
    event: Option<E>,
    fate: Fate,
}

/// How many records met which fate, for the metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Effects written.
    pub applied: usize,
    /// Business refusals written.
    pub declined: usize,
    /// Settled before.
    pub duplicates: usize,
    /// Recorded with a reason.
    pub held: usize,
    /// Not settled.
    pub given_back: usize,
    /// Passed over.
    pub skipped: usize,
}

impl std::iter::Sum for Counts {
    fn sum<I: Iterator<Item = Self>>(counts: I) -> Self {
        counts.fold(Self::default(), |all, one| Self {
            applied: all.applied + one.applied,
            declined: all.declined + one.declined,
            duplicates: all.duplicates + one.duplicates,
            held: all.held + one.held,
            given_back: all.given_back + one.given_back,
            skipped: all.skipped + one.skipped,
        })
    }
}

impl Counts {
    /// All records of the batch.
    #[must_use]
    pub const fn sum(&self) -> usize {
        self.applied + self.declined + self.duplicates + self.held + self.given_back + self.skipped
    }
}

impl<'a, E: Event> Batch<'a, E> {
    /// Decodes every record, each under its own guard, and folds repeats. What cannot be decoded is held and stops nobody; what an
    /// operator has discarded stays so, whatever it would be today.
    pub fn decode<H: Handler<Event = E>>(
        handler: &H,
        records: impl Iterator<Item = &'a Buffered>,
        skips: &Skips,
        now: SystemTime,
        future_skew: Duration,
        discarded: &HashSet<(Offset, RecordDigest)>,
    ) -> Self {
        let mut items = Vec::<Item<'a, E>>::with_capacity(records.size_hint().0);
        for record in records {
            if skips.contain(record.offset) {
                items.push(Item { record, event_id: None, digest: None, event: None, fate: Fate::Skipped });
                continue;
            }
            if discarded.contains(&(record.offset, record.digest())) {
                items.push(Item { record, event_id: None, digest: None, event: None, fate: Fate::Duplicate { same_record: true } });
                continue;
            }
            let item = match decode_guarded(handler, record) {
                Err(rejection) => {
                    Item { record, event_id: rejection.event_id, digest: None, event: None, fate: held(Hold::parked(rejection)) }
                }
                Ok(event) => {
                    let (id, digest) = (event.id(), event.digest());
                    let fate = if is_future(id, now, future_skew) {
                        held(Hold::unclaimed(HeldReason::Future, FUTURE.to_owned()))
                    } else {
                        Fate::Open
                    };
                    Item { record, event_id: Some(id), digest: Some(digest), event: Some(event), fate }
                }
            };
            items.push(item);
        }
        fold_repeats(&mut items);
        Self { items, holds_up: false }
    }

    /// What an operator wants held is held, whatever it is, and claims nothing: a replay claims it. What is passed over or discarded stays so.
    pub fn hold(&mut self, holds: &Holds) {
        if holds.is_empty() {
            return;
        }
        for item in self.items.iter_mut().filter(|item| !matches!(item.fate, Fate::Skipped | Fate::Duplicate { .. })) {
            if let Some(words) = holds.get(&item.record.offset) {
                item.fate = held(Hold::unclaimed(HeldReason::Operator, words.clone()));
                // The id of what is no event says nothing.
                item.event_id = item.event_id.filter(|_| item.event.is_some());
                self.holds_up = true;
            }
        }
    }

    /// The ids to be claimed.
    pub fn open_ids(&self) -> impl Iterator<Item = Uuid> {
        self.items.iter().filter(|item| item.fate == Fate::Open).filter_map(|item| item.event_id)
    }

    /// Open events whose ids lie below the floor: they are never new.
    pub fn below(&self, floor: Uuid) -> Vec<&E> {
        self.items.iter().filter(|item| item.is_below(floor)).filter_map(|item| item.event.as_ref()).collect()
    }

    /// Takes what is known of the events below the floor: `settled` ids were settled before, by anything of this group but a claim;
    /// `seen` are claims whose day is still there; `traces` are the handler's own, in the order of [`Batch::below`]. Who is known to nobody
    /// is held.
    ///
    /// # Panics
    /// When there is not one trace for each.
    pub fn beyond_horizon(&mut self, floor: Uuid, source: SourceId, settled: &HashSet<Uuid>, seen: &[Seen], traces: &[Trace]) {
        let below = |item: &&mut Item<'_, E>| item.is_below(floor);
        let count = self.items.iter().filter(|item| item.is_below(floor)).count();
        assert_eq!(count, traces.len(), "a handler returns one trace for each event");
        let seen: HashMap<Uuid, &Seen> = seen.iter().map(|seen| (seen.event_id, seen)).collect();
        for (item, trace) in self.items.iter_mut().filter(below).zip(traces) {
            let (Some(id), Some(digest)) = (item.event_id, item.digest) else { continue };
            let claim = seen.get(&id);
            let contradicts = claim.is_some_and(|claim| claim.digest.is_some_and(|known| digest.contradicts(known)));
            item.fate = if *trace == Trace::OtherContent || contradicts {
                held(Hold::unclaimed(HeldReason::Conflict, OTHER_CONTENT.to_owned()))
            } else if let Some(claim) = claim {
                Fate::Duplicate { same_record: (claim.source, claim.offset) == (Some(source), Some(item.record.offset)) }
            } else if *trace == Trace::Applied || settled.contains(&id) {
                // Which record it was is not remembered; one that is as old as the event is taken for it.
                let made = item.record.timestamp_ms.filter(|ms| *ms >= 0);
                Fate::Duplicate { same_record: made.is_some_and(|ms| ms < unix_ms(floor)) }
            } else {
                held(Hold::unclaimed(HeldReason::BeyondHorizon, FORGOTTEN.to_owned()))
            };
        }
    }

    /// The rows to claim: those of all events that are still open.
    #[must_use]
    pub fn claims(&self) -> Vec<ClaimRow> {
        let open = self.items.iter().filter(|item| item.fate == Fate::Open);
        let row =
            |item: &Item<'_, E>| Some(ClaimRow { event_id: item.event_id?, digest: item.digest?, offset: item.record.offset });
        open.filter_map(row).collect()
    }

    /// Open events that the claim did not return and the look-up found: a duplicate, or another event under the same id. Out: the ids
    /// that neither statement returned, which nobody can explain.
    pub fn seen(&mut self, source: SourceId, claimed: &HashSet<Uuid>, seen: &[Seen]) -> Vec<Uuid> {
        let seen: HashMap<Uuid, &Seen> = seen.iter().map(|seen| (seen.event_id, seen)).collect();
        let mut unexplained = Vec::new();
        for item in self.items.iter_mut().filter(|item| item.fate == Fate::Open) {
            let (Some(id), Some(digest)) = (item.event_id, item.digest) else { continue };
            if claimed.contains(&id) {
                continue;
            }
            match seen.get(&id) {
                None => unexplained.push(id),
                Some(Seen { digest: Some(known), .. }) if digest.contradicts(*known) => {
                    item.fate = held(Hold::unclaimed(HeldReason::Conflict, OTHER_CONTENT.to_owned()));
                }
                Some(seen) => {
                    let same_record = (seen.source, seen.offset) == (Some(source), Some(item.record.offset));
                    item.fate = Fate::Duplicate { same_record };
                }
            }
        }
        unexplained
    }

    /// Open events whose key has an open sequence wait behind it, with their claim: they come after what is held already, or before them in
    /// this batch.
    pub fn wait_behind(&mut self, sequences: &HashSet<KeyDigest>) {
        if sequences.is_empty() && !self.holds_up {
            return;
        }
        let mut held_here = HashSet::new();
        for item in &mut self.items {
            if matches!(&item.fate, Fate::Held(hold) if hold.reason.holds_up()) {
                held_here.extend(item.record.key_digest());
            } else if item.fate == Fate::Open {
                let waits = |key| sequences.contains(&key) || held_here.contains(&key);
                if item.record.key_digest().is_some_and(waits) {
                    item.fate = held(Hold::waiting());
                }
            }
        }
    }

    /// Hands the claimed events out, in offset order: what is still open is claimed. This is the only place where a window's events
    /// become [`Claimed`].
    pub fn take_claimed(&mut self, doubt: &Doubt) -> Vec<Claimed<E>> {
        let open = self.items.iter_mut().filter(|item| item.fate == Fate::Open);
        let claimed = open.filter_map(|item| {
            let event = item.event.take()?;
            let in_doubt = doubt.covers(event.id(), item.record.offset);
            Some(Claimed::new(event, item.record).in_doubt_if(in_doubt))
        });
        claimed.collect()
    }

    /// Takes the handler's outcomes, one for each claimed event, in the same order.
    ///
    /// # Panics
    /// When their number differs: an event without an outcome must not be settled.
    pub fn conclude(&mut self, outcomes: Vec<Outcome>, retry: &RetryPolicy) {
        let open: Vec<usize> = (0..self.items.len()).filter(|index| self.items[*index].fate == Fate::Open).collect();
        assert_eq!(open.len(), outcomes.len(), "a handler returns one outcome for each claimed event");
        for (index, outcome) in open.into_iter().zip(outcomes) {
            self.items[index].fate = fate(outcome, retry);
        }
        for index in 0..self.items.len() {
            if let Fate::Repeat { of } = self.items[index].fate {
                self.items[index].fate = shared_fate(&self.items[of].fate);
            }
        }
    }

    /// The offsets that are not settled.
    #[must_use]
    pub fn given_back(&self) -> Vec<Offset> {
        self.items.iter().filter(|item| matches!(item.fate, Fate::GivenBack { .. })).map(|item| item.record.offset).collect()
    }

    /// The longest wait of what is given back.
    #[must_use]
    pub fn wait(&self) -> Option<Duration> {
        let waits = self.items.iter().filter_map(|item| if let Fate::GivenBack { wait } = item.fate { Some(wait) } else { None });
        waits.max()
    }

    /// The claims of `claimed` that must go again: of events given back, and of those that conflict with a payment or an attempt.
    #[must_use]
    pub fn unclaim(&self, claimed: &[Uuid]) -> Vec<Uuid> {
        let goes = |item: &&Item<'_, E>| match &item.fate {
            Fate::GivenBack { .. } => true,
            Fate::Held(hold) => !hold.owns_claim,
            Fate::Open | Fate::Repeat { .. } | Fate::Duplicate { .. } | Fate::Skipped | Fate::Applied | Fate::Declined => false,
        };
        if !self.items.iter().any(|item| goes(&item)) {
            return Vec::new();
        }
        // A conflicting repeat carries the id of a claim that stays: only ids all of whose records let go are let go.
        let stays: HashSet<Uuid> = self.items.iter().filter(|item| !goes(item)).filter_map(|item| item.event_id).collect();
        let goes: HashSet<Uuid> = self.items.iter().filter(goes).filter_map(|item| item.event_id).collect();
        claimed.iter().copied().filter(|id| goes.contains(id) && !stays.contains(id)).collect()
    }

    /// The held rows.
    #[must_use]
    pub fn held(&self) -> Vec<NewHeld<'_>> {
        self.items
            .iter()
            .filter_map(|item| match &item.fate {
                Fate::Held(hold) => Some(hold.row(item.record, item.event_id)),
                Fate::Open
                | Fate::Repeat { .. }
                | Fate::Duplicate { .. }
                | Fate::Skipped
                | Fate::Applied
                | Fate::Declined
                | Fate::GivenBack { .. } => None,
            })
            .collect()
    }

    /// Every event's id.
    pub fn ids(&self) -> impl Iterator<Item = Uuid> {
        self.items.iter().filter_map(|item| item.event_id)
    }

    /// What was settled before: where each record stands, whether it is the very one that was settled, and what it would have cost.
    pub fn duplicates(&self) -> impl Iterator<Item = (Offset, bool, Option<Money>)> {
        self.items.iter().filter_map(|item| match item.fate {
            Fate::Duplicate { same_record } => Some((item.record.offset, same_record, item.event.as_ref().and_then(Event::worth))),
            _ => None,
        })
    }

    /// How many met which fate.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let mut counts = Counts::default();
        for item in &self.items {
            match item.fate {
                Fate::Applied => counts.applied += 1,
                Fate::Declined => counts.declined += 1,
                Fate::Duplicate { .. } | Fate::Repeat { .. } => counts.duplicates += 1,
                Fate::Held(_) => counts.held += 1,
                Fate::Skipped => counts.skipped += 1,
                Fate::Open | Fate::GivenBack { .. } => counts.given_back += 1,
            }
        }
        counts
    }
}

impl<E> Item<'_, E> {
    fn is_below(&self, floor: Uuid) -> bool {
        self.fate == Fate::Open && self.event.is_some() && self.event_id.is_some_and(|id| id < floor)
    }
}

impl Hold {
    /// Held without a claim, for a person.
    fn parked(rejection: Rejection) -> Self {
        Self::unclaimed(rejection.reason, rejection.error)
    }

    fn unclaimed(reason: HeldReason, error: String) -> Self {
        Self { reason, error, state: HeldState::Parked, owns_claim: false, charge_id: None, attempts: 0, next_attempt_in: None }
    }

    fn claimed(reason: HeldReason, error: String, next: Next) -> Self {
        let (state, next_attempt_in) = match next {
            Next::Again(wait) => (HeldState::Retrying, Some(wait)),
            Next::Park => (HeldState::Parked, None),
        };
        Self { reason, error, state, owns_claim: true, charge_id: None, attempts: 1, next_attempt_in }
    }

    fn not_recorded(error: String, charge_id: String) -> Self {
        Self { charge_id: Some(charge_id), ..Self::claimed(HeldReason::ChargedNotRecorded, error, Next::Park) }
    }

    /// Claimed, and not begun: an earlier event of its key is held.
    fn waiting() -> Self {
        Self {
            reason: HeldReason::Behind,
            error: BEHIND.to_owned(),
            state: HeldState::Waiting,
            owns_claim: true,
            charge_id: None,
            attempts: 0,
            next_attempt_in: None,
        }
    }

    fn row<'a>(&'a self, record: &'a Buffered, event_id: Option<Uuid>) -> NewHeld<'a> {
        NewHeld {
            record,
            digest: record.digest(),
            event_id,
            reason: self.reason,
            error: &self.error,
            state: self.state,
            owns_claim: self.owns_claim,
            provider_charge_id: self.charge_id.as_deref(),
            attempts: self.attempts,
            next_attempt_in: self.next_attempt_in,
        }
    }
}

/// What a row says that waits for its turn.
pub(super) const BEHIND: &str = "an earlier event of its key is held";
/// What a row says whose id is not of this time.
pub(super) const FUTURE: &str = "the id's time lies in the future beyond retention.future_skew_ms";
/// What a row says whose id is not remembered.
const FORGOTTEN: &str = "the id is older than the retention floor, and nothing tells whether it was applied";
/// What a row says whose id has been claimed with another content.
pub(super) const OTHER_CONTENT: &str = "this id was applied with another content";

/// Whether an id's time lies further ahead than clocks may differ.
pub(super) fn is_future(id: Uuid, now: SystemTime, skew: Duration) -> bool {
    unix_ms(id) > unix_ms_of(now + skew)
}

/// Decodes under a guard: a panic is this record's fault and nobody else's. No handler can let an id pass that cannot be forgotten by age.
pub(super) fn decode_guarded<H: Handler>(handler: &H, record: &Record) -> Result<H::Event, Rejection> {
    let decoded = catch_unwind(AssertUnwindSafe(|| handler.decode(record))).unwrap_or_else(|_| {
        Err(Rejection { reason: HeldReason::Undecodable, error: "decoding this record panicked".to_owned(), event_id: None })
    })?;
    let id = decoded.id();
    match version_seven(id) {
        Ok(()) => Ok(decoded),
        Err(fault) => Err(Rejection { reason: HeldReason::Invalid, error: format!("its id is {fault}"), event_id: Some(id) }),
    }
}

/// Gives each event whose id stands earlier in the batch its part in what becomes of the first.
fn fold_repeats<E>(items: &mut [Item<'_, E>]) {
    let open = items.iter().enumerate().filter(|(_, item)| item.fate == Fate::Open);
    let mut ids: Vec<(Uuid, usize)> = open.filter_map(|(index, item)| Some((item.event_id?, index))).collect();
    // Ids begin with their time, so that those of one partition often ascend, and else nearly.
    if ids.is_sorted_by(|(before, _), (id, _)| before < id) {
        return;
    }
    ids.sort();
    for same in ids.chunk_by(|(before, _), (id, _)| before == id) {
        let [(_, first), repeats @ ..] = same else { continue };
        for (_, repeat) in repeats {
            let contradicts =
                items[*first].digest.zip(items[*repeat].digest).is_some_and(|(known, digest)| digest.contradicts(known));
            items[*repeat].fate = if contradicts {
                held(Hold::unclaimed(HeldReason::Conflict, "this id stands earlier in the batch with another content".to_owned()))
            } else {
                Fate::Repeat { of: *first }
            };
        }
    }
}

/// Boxed, because few are held, and every other fate would be as large.
fn held(hold: Hold) -> Fate {
    Fate::Held(Box::new(hold))
}

/// The fate of a claimed event by its outcome, after its first attempt.
fn fate(outcome: Outcome, retry: &RetryPolicy) -> Fate {
    match outcome {
        Outcome::Applied => Fate::Applied,
        Outcome::Declined => Fate::Declined,
        Outcome::NotStarted { wait } => Fate::GivenBack { wait },
        Outcome::Retry { error, wait } => held(Hold::claimed(HeldReason::Retryable, error, retry.after(1, Duration::ZERO, wait))),
        Outcome::Unknown { error, parked: true, .. } => held(Hold::claimed(HeldReason::Unknown, error, Next::Park)),
        Outcome::Unknown { error, wait, parked: false } => {
            held(Hold::claimed(HeldReason::Unknown, error, retry.after(1, Duration::ZERO, wait)))
        }
        Outcome::Rejected { error } => held(Hold::claimed(HeldReason::Rejected, error, Next::Park)),
        Outcome::Conflict { error } => held(Hold::unclaimed(HeldReason::Conflict, error)),
        Outcome::Refused { error } => held(Hold::claimed(HeldReason::Refused, error, Next::Park)),
        Outcome::NotRecorded { error, charge_id } => held(Hold::not_recorded(error, charge_id)),
        Outcome::Behind => held(Hold::waiting()),
    }
}

/// A repeat is a duplicate of what its first became, unless the first is not settled or conflicts with what is known already.
fn shared_fate(first: &Fate) -> Fate {
    match first {
        Fate::GivenBack { wait } => Fate::GivenBack { wait: *wait },
        // One row of it is enough: a person decides about the event.
        Fate::Held(hold) if hold.reason == HeldReason::BeyondHorizon => Fate::Duplicate { same_record: false },
        Fate::Held(hold) if !hold.owns_claim => held(Hold::unclaimed(hold.reason, hold.error.clone())),
        Fate::Held(_) | Fate::Duplicate { .. } | Fate::Applied | Fate::Declined => Fate::Duplicate { same_record: false },
        Fate::Open | Fate::Repeat { .. } | Fate::Skipped => {
            unreachable!("the first of a repeat is decided before, and never passed over")
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::handler::BatchContext;
    use crate::pipeline::window::{Buffer, Handed, Share, Window, WindowBatch};
    use crate::record::NextOffset;
    use crate::store::{DbError, Session};

    #[derive(Debug)]
    struct Told {
        id: Uuid,
        content: u8,
    }

    impl Event for Told {
        fn id(&self) -> Uuid {
            self.id
        }

        fn digest(&self) -> EventDigest {
            EventDigest::new(1, u64::from(self.content) << 8)
        }
    }

    /// A payload is the id's last byte and the content; an empty one panics, and from a nought it makes an id that is of no version.
    struct Tells;

    impl Handler for Tells {
        type Event = Told;
        type Answer = ();

        fn decode(&self, record: &Record) -> Result<Told, Rejection> {
            let payload = record.payload.as_deref().unwrap_or_default();
            let id = if payload[0] == 0 { Uuid::nil() } else { id(payload[0]) };
            Ok(Told { id, content: payload[1] })
        }

        async fn apply(&self, _: &mut Session, _: &BatchContext<()>, _: &[Claimed<Told>]) -> Result<Vec<Outcome>, DbError> {
            unreachable!("these tests decide the outcomes themselves")
        }
    }

    fn id(last: u8) -> Uuid {
        Uuid::from_u128((1_700_000_000_000_u128 << 80) | 0x7000_8000_0000_0000_0000 | u128::from(last))
    }

    fn window(payloads: &[&[u8]]) -> WindowBatch {
        let buffer = Buffer::new(1 << 20, std::sync::mpsc::channel().0);
        let record = |(offset, payload): (usize, &&[u8])| -> Arc<Buffered> {
            let offset = Offset(i64::try_from(offset).unwrap());
            // The third byte is the key, where there is one.
            let (key, payload) = (payload.get(2).map(|key| [*key][..].into()), Some((*payload).into()));
            let record = Record { partition: 0, offset, timestamp_ms: None, key, headers: Box::default(), payload };
            buffer.admit(record, &Share::default())
        };
        let mut window = Window::positioned(NextOffset(0));
        window.offer(Handed { after: NextOffset(0), records: payloads.iter().enumerate().map(record).collect() }).unwrap();
        window.take(usize::MAX).unwrap()
    }

    fn decoded(window: &WindowBatch) -> Batch<'_, Told> {
        passing_over(window, Skips::default())
    }

    fn passing_over(window: &WindowBatch, skips: Skips) -> Batch<'_, Told> {
        Batch::decode(&Tells, window.records(), &skips, SystemTime::now(), Duration::from_secs(60), &HashSet::new())
    }

    const RETRY: RetryPolicy = RetryPolicy {
        max_attempts: 3,
        max_age: Duration::from_secs(9),
        backoff_min: Duration::from_secs(1),
        backoff_max: Duration::from_secs(2),
    };

    fn not_started() -> Outcome {
        Outcome::NotStarted { wait: Duration::from_secs(3) }
    }

    #[test]
    fn what_is_passed_over_is_settled_and_never_the_first_of_a_repeat() {
        let window = window(&[&[1, 1], &[1, 1], &[1, 2], &[2, 1]]);
        let mut batch = passing_over(&window, Skips::new(vec![(0, 1), (3, 4)]));
        assert_eq!(batch.claims().iter().map(|row| row.offset).collect::<Vec<_>>(), [Offset(1)]);
        assert_eq!(batch.take_claimed(&Doubt::default()).len(), 1);
        batch.conclude(vec![Outcome::Applied], &RETRY);
        assert_eq!(batch.given_back(), []);
        assert_eq!(batch.counts(), Counts { applied: 1, held: 1, skipped: 2, ..Counts::default() });
    }

    #[test]
    fn what_an_operator_wants_held_claims_nothing_and_later_events_of_its_key_wait_and_earlier_ones_do_not() {
        let (a, b) = (b'a', b'b');
        let window = window(&[&[1, 1, a], &[2, 1, a], &[3, 1, a], &[4, 1, b], &[], &[2, 1, b], &[5, 1, a]]);
        let mut batch = passing_over(&window, Skips::new(vec![(6, 7)]));
        let words = || "held by ann: odd".to_owned();
        batch.hold(&[1, 4, 6].map(|offset| (Offset(offset), words())).into());
        assert_eq!(batch.claims().iter().map(|row| row.offset.0).collect::<Vec<_>>(), [0, 2, 3]);
        batch.wait_behind(&HashSet::new());
        let begun: Vec<Uuid> = batch.take_claimed(&Doubt::default()).iter().map(|claimed| claimed.event().id()).collect();
        assert_eq!(begun, [id(1), id(4)]);
        batch.conclude(vec![Outcome::Applied, Outcome::Applied], &RETRY);
        let rows: Vec<_> = batch.held().iter().map(|row| (row.record.offset.0, row.reason, row.state, row.owns_claim)).collect();
        let parked = |offset| (offset, HeldReason::Operator, HeldState::Parked, false);
        let expected = [parked(1), (2, HeldReason::Behind, HeldState::Waiting, true), parked(4), parked(5)];
        assert_eq!(rows, expected, "also the same event once more, and what is no event");
        assert_eq!(batch.held()[0].error, "held by ann: odd");
        assert_eq!((batch.given_back(), batch.counts().skipped), (vec![], 1));
    }

    #[test]
    fn a_panic_while_decoding_is_that_records_outcome() {
        let window = window(&[&[1, 1], &[], &[2, 1]]);
        let mut batch = decoded(&window);
        assert_eq!(batch.take_claimed(&Doubt::default()).len(), 2);
        batch.conclude(vec![Outcome::Applied, Outcome::Applied], &RETRY);
        assert_eq!(batch.counts(), Counts { applied: 2, held: 1, ..Counts::default() });
        assert_eq!(batch.held()[0].reason, HeldReason::Undecodable);
    }

    // R-KFK-IDEM-1
    #[test]
    fn an_id_that_is_not_of_version_7_is_held_whatever_the_handler_says() {
        let window = window(&[&[1, 1], &[0, 1], &[2, 1]]);
        let mut batch = decoded(&window);
        assert_eq!(batch.claims().len(), 2);
        assert_eq!(batch.take_claimed(&Doubt::default()).len(), 2);
        batch.conclude(vec![Outcome::Applied, Outcome::Applied], &RETRY);
        let held = batch.held();
        assert_eq!(
            (held.len(), held[0].reason, held[0].error),
            (1, HeldReason::Invalid, "its id is the nil UUID, not one of version 7")
        );
    }

    // CASES D09: which ids are new is told by the ids that came back, never by their places.
    #[test]
    fn a_duplicate_inside_the_batch_and_one_from_before_change_nothing() {
        let window = window(&[&[1, 1], &[2, 1], &[1, 1], &[3, 1]]);
        let mut batch = decoded(&window);
        assert_eq!(batch.claims().len(), 3, "a repeat is not claimed");
        let claimed = [id(3), id(1)];
        let seen = Seen { event_id: id(2), digest: Some(EventDigest::new(1, 1 << 8)), source: None, offset: None };
        assert!(batch.seen(SourceId(1), &HashSet::from(claimed), &[seen]).is_empty());
        assert_eq!(batch.take_claimed(&Doubt::default()).len(), 2);
        batch.conclude(vec![Outcome::Applied, Outcome::Declined], &RETRY);
        assert_eq!(batch.counts(), Counts { applied: 1, declined: 1, duplicates: 2, ..Counts::default() });
        assert!(batch.unclaim(&claimed).is_empty() && batch.given_back().is_empty());
    }

    #[test]
    fn a_repeat_shares_its_firsts_fate_given_back_included() {
        let window = window(&[&[1, 1], &[1, 1], &[2, 1]]);
        let mut batch = decoded(&window);
        let claimed = [id(1), id(2)];
        batch.take_claimed(&Doubt::default());
        batch.conclude(vec![not_started(), Outcome::Applied], &RETRY);
        assert_eq!(batch.given_back(), [Offset(0), Offset(1)]);
        assert_eq!(batch.unclaim(&claimed), [id(1)]);
        assert_eq!(batch.wait(), Some(Duration::from_secs(3)));
        assert_eq!(window.frontier(&batch.given_back()).next_offset, NextOffset(0));
    }

    // CASES F03
    #[test]
    fn the_same_id_with_another_content_is_a_conflict_and_costs_the_first_nothing() {
        let window = window(&[&[1, 1], &[1, 9], &[2, 9]]);
        let mut batch = decoded(&window);
        let claimed = [id(1)];
        let seen = Seen { event_id: id(2), digest: Some(EventDigest::new(1, 1 << 8)), source: None, offset: None };
        assert!(batch.seen(SourceId(1), &HashSet::from(claimed), &[seen]).is_empty());
        batch.take_claimed(&Doubt::default());
        batch.conclude(vec![Outcome::Applied], &RETRY);
        assert_eq!(batch.counts(), Counts { applied: 1, held: 2, ..Counts::default() });
        assert!(batch.held().iter().all(|held| held.reason == HeldReason::Conflict && !held.owns_claim));
        assert!(batch.unclaim(&claimed).is_empty(), "the first keeps its claim");
    }

    #[test]
    fn an_event_that_conflicts_downstream_gives_its_claim_back_and_a_failed_one_keeps_it() {
        let window = window(&[&[1, 1], &[2, 1], &[3, 1]]);
        let mut batch = decoded(&window);
        let claimed = [id(1), id(2), id(3)];
        batch.take_claimed(&Doubt::default());
        let unknown = Outcome::Unknown { error: "no answer".into(), wait: None, parked: false };
        batch.conclude(
            vec![Outcome::Conflict { error: "another amount".into() }, unknown, Outcome::Rejected { error: "no".into() }],
            &RETRY,
        );
        assert_eq!(batch.unclaim(&claimed), [id(1)]);
        let held: Vec<_> =
            batch.held().iter().map(|held| (held.reason, held.state, held.owns_claim, held.next_attempt_in)).collect();
        assert_eq!(
            held,
            [
                (HeldReason::Conflict, HeldState::Parked, false, None),
                (HeldReason::Unknown, HeldState::Retrying, true, Some(Duration::from_secs(1))),
                (HeldReason::Rejected, HeldState::Parked, true, None),
            ]
        );
    }

    #[test]
    fn an_id_below_the_floor_or_in_the_future_is_never_claimed() {
        let window = window(&[&[1, 1], &[2, 1]]);
        let mut batch = decoded(&window);
        assert_eq!(batch.below(id(2)).len(), 1);
        batch.beyond_horizon(id(2), SourceId(1), &HashSet::new(), &[], &[Trace::None]);
        assert_eq!(batch.claims().len(), 1);
        batch.take_claimed(&Doubt::default());
        batch.conclude(vec![Outcome::Applied], &RETRY);
        assert_eq!(batch.held()[0].reason, HeldReason::BeyondHorizon);

        let before_all = SystemTime::UNIX_EPOCH + Duration::from_secs(1);
        let early = Batch::decode(&Tells, window.records(), &Skips::default(), before_all, Duration::ZERO, &HashSet::new());
        assert_eq!(early.open_ids().count(), 0);
        assert_eq!(early.held()[1].reason, HeldReason::Future);
    }

    // CASES F02
    #[test]
    fn below_the_floor_an_event_is_known_by_its_traces_and_what_nobody_knows_is_held_once() {
        let window = window(&[&[1, 1], &[2, 1], &[3, 1], &[4, 1], &[5, 1], &[6, 1], &[6, 1], &[7, 1]]);
        let mut batch = decoded(&window);
        assert_eq!(batch.below(id(7)).len(), 6, "a repeat shares the fate of its first");
        let claim = |last, hash: u64| Seen {
            event_id: id(last),
            digest: Some(EventDigest::new(1, hash << 8)),
            source: Some(SourceId(1)),
            offset: Some(Offset(2)),
        };
        let traces = [Trace::Applied, Trace::None, Trace::None, Trace::None, Trace::OtherContent, Trace::None];
        let settled = HashSet::from([id(2), id(5)]);
        batch.beyond_horizon(id(7), SourceId(1), &settled, &[claim(3, 1), claim(4, 9)], &traces);
        assert_eq!(batch.claims().iter().map(|row| row.event_id).collect::<Vec<_>>(), [id(7)]);
        batch.take_claimed(&Doubt::default());
        batch.conclude(vec![Outcome::Applied], &RETRY);
        let held: Vec<_> = batch.held().iter().map(|held| (held.event_id, held.reason, held.owns_claim)).collect();
        let parked = |last, reason| (Some(id(last)), reason, false);
        let (conflict, beyond) = (HeldReason::Conflict, HeldReason::BeyondHorizon);
        assert_eq!(held, [parked(4, conflict), parked(5, conflict), parked(6, beyond)]);
        let duplicates: Vec<_> = batch.duplicates().map(|(offset, same_record, _)| (offset.0, same_record)).collect();
        assert_eq!(duplicates, [(0, false), (1, false), (2, true), (6, false)]);
        assert_eq!(batch.counts(), Counts { applied: 1, duplicates: 4, held: 3, ..Counts::default() });
    }

    #[test]
    fn what_may_have_been_charged_before_the_database_went_back_is_in_doubt() {
        let window = window(&[&[1, 1], &[2, 1], &[3, 1]]);
        let doubted = |doubt: Doubt| {
            let claimed = decoded(&window).take_claimed(&doubt);
            claimed.iter().map(Claimed::is_in_doubt).collect::<Vec<_>>()
        };
        let ms = unix_ms(id(1));
        assert_eq!(doubted(Doubt::default()), [false; 3]);
        assert_eq!(doubted(Doubt { offset: Some(NextOffset(2)), before_ms: None }), [true, true, false]);
        assert_eq!(doubted(Doubt { offset: None, before_ms: Some(ms) }), [true; 3]);
        assert_eq!(doubted(Doubt { offset: Some(NextOffset(1)), before_ms: Some(ms - 1) }), [true, false, false]);
    }

    #[test]
    fn an_event_of_a_key_that_is_held_up_waits_with_its_claim_and_other_keys_flow() {
        let window = window(&[&[1, 1, 7], &[2, 1, 8], &[3, 1, 7], &[4, 1]]);
        let mut batch = decoded(&window);
        let held_up = window.records().next().and_then(|record| record.key_digest()).unwrap();
        batch.wait_behind(&HashSet::from([held_up]));
        let claimed = [id(1), id(2), id(3), id(4)];
        assert_eq!(
            batch.take_claimed(&Doubt::default()).iter().map(|claimed| claimed.event().id).collect::<Vec<_>>(),
            [id(2), id(4)]
        );
        batch.conclude(vec![Outcome::Applied, Outcome::Applied], &RETRY);
        let held: Vec<_> =
            batch.held().iter().map(|held| (held.event_id, held.reason, held.state, held.owns_claim, held.attempts)).collect();
        let waits = |last| (Some(id(last)), HeldReason::Behind, HeldState::Waiting, true, 0);
        assert_eq!(held, [waits(1), waits(3)]);
        assert!(batch.unclaim(&claimed).is_empty());
    }

    #[test]
    fn what_a_handler_did_not_begin_behind_a_failed_event_waits() {
        let window = window(&[&[1, 1, 7], &[2, 1, 7]]);
        let mut batch = decoded(&window);
        let events = batch.take_claimed(&Doubt::default());
        assert_eq!(events[0].sequence(), events[1].sequence());
        batch.conclude(vec![Outcome::Retry { error: "not now".into(), wait: None }, Outcome::Behind], &RETRY);
        assert_eq!(batch.held().iter().map(|held| held.state).collect::<Vec<_>>(), [HeldState::Retrying, HeldState::Waiting]);
    }

    #[test]
    fn records_without_a_key_stand_alone() {
        let window = window(&[&[1, 1], &[2, 1]]);
        let events = decoded(&window).take_claimed(&Doubt::default());
        assert_ne!(events[0].sequence(), events[1].sequence());
    }

    #[test]
    fn what_was_discarded_stays_so_whatever_it_would_be_today() {
        let window = window(&[&[1, 1], &[], &[1, 1]]);
        let discarded: HashSet<_> = window.records().take(2).map(|record| (record.offset, record.digest())).collect();
        let mut batch =
            Batch::decode(&Tells, window.records(), &Skips::default(), SystemTime::now(), Duration::from_secs(60), &discarded);
        assert_eq!(
            batch.take_claimed(&Doubt::default())[0].offset(),
            Offset(2),
            "the same event in another record is another matter"
        );
        batch.conclude(vec![Outcome::Applied], &RETRY);
        assert_eq!(batch.counts(), Counts { applied: 1, duplicates: 2, ..Counts::default() });
    }

    #[test]
    #[should_panic(expected = "one outcome for each claimed event")]
    fn a_handler_that_forgets_an_event_is_found_out() {
        let window = window(&[&[1, 1], &[2, 1]]);
        let mut batch = decoded(&window);
        batch.take_claimed(&Doubt::default());
        batch.conclude(vec![Outcome::Applied], &RETRY);
    }
}
