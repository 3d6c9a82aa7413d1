//! What becomes of each record of a batch: pure decisions, between the statements that `dedup.rs` sends.
//!
//! In: decoded records, then what the claim, the look-up and the handler said. Out: rows to write and the records given back.
//!
//! Invariant: every record ends with one [`Fate`] that is not [`Fate::Open`], and only a record given back is not settled.

use std::collections::{HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, SystemTime};

use uuid::Uuid;

use crate::handler::{Claimed, Event, EventDigest, Handler, HeldReason, Outcome, Rejection};
use crate::held::{Next, RetryPolicy};
use crate::pipeline::window::Buffered;
use crate::record::{Offset, Record};
use crate::retention::unix_ms;
use crate::store::held_events::{HeldState, NewHeld};
use crate::store::processed_events::{ClaimRow, Seen};

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
    /// Applied before, by us or by anybody of the group.
    Duplicate,
    /// The effect happened and is written.
    Applied,
    /// A business "no" is written.
    Declined,
    /// Recorded with its reason.
    Held(Hold),
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
    attempts: i32,
    next_attempt_in: Option<Duration>,
}

/// The records of one transaction with what is known of each.
#[derive(Debug)]
pub struct Batch<'a, E> {
    items: Vec<Item<'a, E>>,
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
}

impl<'a, E: Event> Batch<'a, E> {
    /// Decodes every record, each under its own guard, and folds repeats. What cannot be decoded is held and stops nobody.
    pub fn decode<H: Handler<Event = E>>(
        handler: &H,
        records: impl Iterator<Item = &'a Buffered>,
        now: SystemTime,
        future_skew: Duration,
    ) -> Self {
        let latest = (now + future_skew).duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_millis());
        let mut firsts: HashMap<Uuid, usize> = HashMap::new();
        let mut items: Vec<Item<'a, E>> = Vec::with_capacity(records.size_hint().0);
        for record in records {
            let item = match decode_guarded(handler, record) {
                Err(rejection) => Item {
                    record,
                    event_id: rejection.event_id,
                    digest: None,
                    event: None,
                    fate: Fate::Held(Hold::parked(rejection)),
                },
                Ok(event) => {
                    let (id, digest) = (event.id(), event.digest());
                    let fate = if u128::from(unix_ms(id)) > latest {
                        Fate::Held(Hold::unclaimed(
                            HeldReason::Future,
                            "the id's time lies in the future beyond retention.future_skew_ms".to_owned(),
                        ))
                    } else {
                        let first = *firsts.entry(id).or_insert(items.len());
                        let first_digest = items.get(first).and_then(|first| first.digest);
                        repeat_of(first, first_digest, digest)
                    };
                    Item { record, event_id: Some(id), digest: Some(digest), event: Some(event), fate }
                }
            };
            items.push(item);
        }
        Self { items }
    }

    /// The ids to be claimed.
    pub fn open_ids(&self) -> impl Iterator<Item = Uuid> {
        self.items.iter().filter(|item| item.fate == Fate::Open).filter_map(|item| item.event_id)
    }

    /// Ids below the floor are never new: they are held. Out: the rows to claim.
    pub fn claims(&mut self, floor: Option<Uuid>) -> Vec<ClaimRow> {
        let mut rows = Vec::with_capacity(self.items.len());
        for item in self.items.iter_mut().filter(|item| item.fate == Fate::Open) {
            let (Some(event_id), Some(digest)) = (item.event_id, item.digest) else { continue };
            if floor.is_some_and(|floor| event_id < floor) {
                let error = "the id is older than the retention floor: whether it was applied is not remembered".to_owned();
                item.fate = Fate::Held(Hold::unclaimed(HeldReason::BeyondHorizon, error));
            } else {
                rows.push(ClaimRow { event_id, digest, offset: item.record.offset });
            }
        }
        rows
    }

    /// Open events that the claim did not return and the look-up found: a duplicate, or another event under the same id. Out: the ids
    /// that neither statement returned, which nobody can explain.
    pub fn seen(&mut self, claimed: &HashSet<Uuid>, seen: &[Seen]) -> Vec<Uuid> {
        let seen: HashMap<Uuid, Option<EventDigest>> = seen.iter().map(|seen| (seen.event_id, seen.digest)).collect();
        let mut unexplained = Vec::new();
        for item in self.items.iter_mut().filter(|item| item.fate == Fate::Open) {
            let (Some(id), Some(digest)) = (item.event_id, item.digest) else { continue };
            if claimed.contains(&id) {
                continue;
            }
            match seen.get(&id) {
                None => unexplained.push(id),
                Some(Some(known)) if digest.contradicts(*known) => {
                    item.fate =
                        Fate::Held(Hold::unclaimed(HeldReason::Conflict, "this id was applied with another content".to_owned()));
                }
                Some(_) => item.fate = Fate::Duplicate,
            }
        }
        unexplained
    }

    /// Hands the claimed events out, in offset order: what is still open is claimed. This is the only place where a window's events
    /// become [`Claimed`].
    pub fn take_claimed(&mut self) -> Vec<Claimed<E>> {
        let open = self.items.iter_mut().filter(|item| item.fate == Fate::Open);
        open.filter_map(|item| item.event.take().map(|event| Claimed::new(event, item.record.offset))).collect()
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
    pub fn unclaim(&self, claimed: &HashSet<Uuid>) -> Vec<Uuid> {
        let goes = |item: &&Item<'_, E>| match &item.fate {
            Fate::GivenBack { .. } => true,
            Fate::Held(hold) => !hold.owns_claim,
            Fate::Open | Fate::Repeat { .. } | Fate::Duplicate | Fate::Applied | Fate::Declined => false,
        };
        // A conflicting repeat carries the id of a claim that stays: only ids all of whose records let go are let go.
        let stays: HashSet<Uuid> = self.items.iter().filter(|item| !goes(item)).filter_map(|item| item.event_id).collect();
        let ids: HashSet<Uuid> = self.items.iter().filter(goes).filter_map(|item| item.event_id).collect();
        ids.into_iter().filter(|id| claimed.contains(id) && !stays.contains(id)).collect()
    }

    /// The held rows.
    #[must_use]
    pub fn held(&self) -> Vec<NewHeld<'_>> {
        self.items
            .iter()
            .filter_map(|item| match &item.fate {
                Fate::Held(hold) => Some(hold.row(item.record, item.event_id)),
                Fate::Open | Fate::Repeat { .. } | Fate::Duplicate | Fate::Applied | Fate::Declined | Fate::GivenBack { .. } => {
                    None
                }
            })
            .collect()
    }

    /// The ids that are settled, whose answers need not be kept any longer.
    pub fn settled_ids(&self) -> impl Iterator<Item = Uuid> {
        self.items.iter().filter(|item| !matches!(item.fate, Fate::GivenBack { .. })).filter_map(|item| item.event_id)
    }

    /// How many met which fate.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let mut counts = Counts::default();
        for item in &self.items {
            match item.fate {
                Fate::Applied => counts.applied += 1,
                Fate::Declined => counts.declined += 1,
                Fate::Duplicate | Fate::Repeat { .. } => counts.duplicates += 1,
                Fate::Held(_) => counts.held += 1,
                Fate::Open | Fate::GivenBack { .. } => counts.given_back += 1,
            }
        }
        counts
    }
}

impl Hold {
    /// Held without a claim, for a person.
    fn parked(rejection: Rejection) -> Self {
        Self::unclaimed(rejection.reason, rejection.error)
    }

    fn unclaimed(reason: HeldReason, error: String) -> Self {
        Self { reason, error, state: HeldState::Parked, owns_claim: false, attempts: 0, next_attempt_in: None }
    }

    fn claimed(reason: HeldReason, error: String, next: Next) -> Self {
        let (state, next_attempt_in) = match next {
            Next::Again(wait) => (HeldState::Retrying, Some(wait)),
            Next::Park => (HeldState::Parked, None),
        };
        Self { reason, error, state, owns_claim: true, attempts: 1, next_attempt_in }
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
            provider_charge_id: None,
            attempts: self.attempts,
            next_attempt_in: self.next_attempt_in,
        }
    }
}

/// Decodes under a guard: a panic is this record's fault and nobody else's.
pub(super) fn decode_guarded<H: Handler>(handler: &H, record: &Record) -> Result<H::Event, Rejection> {
    catch_unwind(AssertUnwindSafe(|| handler.decode(record))).unwrap_or_else(|_| {
        Err(Rejection { reason: HeldReason::Undecodable, error: "decoding this record panicked".to_owned(), event_id: None })
    })
}

fn repeat_of(first: usize, first_digest: Option<EventDigest>, digest: EventDigest) -> Fate {
    match first_digest {
        None => Fate::Open, // it is the first itself
        Some(known) if digest.contradicts(known) => {
            Fate::Held(Hold::unclaimed(HeldReason::Conflict, "this id stands earlier in the batch with another content".to_owned()))
        }
        Some(_) => Fate::Repeat { of: first },
    }
}

/// The fate of a claimed event by its outcome, after its first attempt.
fn fate(outcome: Outcome, retry: &RetryPolicy) -> Fate {
    match outcome {
        Outcome::Applied => Fate::Applied,
        Outcome::Declined => Fate::Declined,
        Outcome::NotStarted { wait } => Fate::GivenBack { wait },
        Outcome::Retry { error, wait } => {
            Fate::Held(Hold::claimed(HeldReason::Retryable, error, retry.after(1, Duration::ZERO, wait)))
        }
        Outcome::Unknown { error, parked: true, .. } => Fate::Held(Hold::claimed(HeldReason::Unknown, error, Next::Park)),
        Outcome::Unknown { error, wait, parked: false } => {
            Fate::Held(Hold::claimed(HeldReason::Unknown, error, retry.after(1, Duration::ZERO, wait)))
        }
        Outcome::Rejected { error } => Fate::Held(Hold::claimed(HeldReason::Rejected, error, Next::Park)),
        Outcome::Conflict { error } => Fate::Held(Hold::unclaimed(HeldReason::Conflict, error)),
    }
}

/// A repeat is a duplicate of what its first became, unless the first is not settled or conflicts with what is known already.
fn shared_fate(first: &Fate) -> Fate {
    match first {
        Fate::GivenBack { wait } => Fate::GivenBack { wait: *wait },
        Fate::Held(hold) if !hold.owns_claim => Fate::Held(Hold::unclaimed(hold.reason, hold.error.clone())),
        Fate::Held(_) | Fate::Duplicate | Fate::Applied | Fate::Declined => Fate::Duplicate,
        Fate::Open | Fate::Repeat { .. } => unreachable!("the first of a repeat is decided before"),
    }
}
