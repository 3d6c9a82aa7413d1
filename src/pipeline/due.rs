//! Held events that can run: the same transaction, with a locked row in place of a claim.
//!
//! In: a partition whose held events are due, have their turn, or were asked for by an operator. Out: each of them applied, held again
//! with a later time, or parked. It owns the rows it has locked, for the length of the transaction. If it dies here, the rows are as they
//! were.
//!
//! Invariant: an event is tried only while its row is locked, under the fence, and with its claim: a row without one claims first, and
//! a claim that is taken makes it a duplicate.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, SystemTime};

use uuid::Uuid;

use crate::crash::CrashPoint;
use crate::handler::{Claimed, Event, EventDigest, Handler as Business, HeldReason, Outcome, Rejection};
use crate::held::{Next, RetryPolicy};
use crate::pipeline::batch::{Counts, FUTURE, OTHER_CONTENT, decode_guarded, is_future};
use crate::pipeline::claim::{claim_rows, fenced};
use crate::pipeline::dedup::{BatchError, Engine, RunBatch, Settled};
use crate::pipeline::form::Claiming;
use crate::pipeline::horizon;
use crate::pipeline::refusal::{Refusal, Try, row_error};
use crate::pipeline::windows::{apply, report};
use crate::record::KeyDigest;
use crate::store::held_events::{self, HeldState, HeldUpdate};
use crate::store::held_turns::{self, DueHeld};
use crate::store::processed_events::ClaimRow;
use crate::store::{Form, Session, TransactionError, horizon_claims};

/// Which of the partition's held events run.
pub(super) struct Which<'a> {
    /// The most of them.
    pub limit: usize,
    /// Only those that operators asked for.
    pub requested_only: bool,
    /// The one that stands alone and whose rows were refused: it is held for that.
    pub refusal: Option<&'a Refusal>,
}

/// The partition's held events that can run: locked and read again instead of claimed, then the same effect. `days`: ids whose days a
/// former try has missed.
pub(super) async fn run_held<H: Business>(
    engine: &Engine<H>,
    session: &mut Session,
    run: &RunBatch<H::Answer>,
    which: Which<'_>,
    days: &mut Vec<Uuid>,
) -> Result<Settled, TransactionError<BatchError>> {
    engine.days.ensure(&engine.store, days.iter().copied()).await.map_err(TransactionError::Begin)?;
    let mut spans = engine.spans.batch(run.partition);
    let (settled, ids, counts) = fenced(engine, session, &[run], "held", async |tx, floor| {
        let limit = i64::try_from(which.limit).unwrap_or(i64::MAX);
        let rows = held_turns::lock_due(tx, run.source, limit, which.requested_only).await?;
        if !rows.is_empty() {
            CrashPoint::DueLocked.passed();
        }
        // Another row may have become due meanwhile, and it is not the one that was refused.
        let refusal = which.refusal.filter(|refusal| rows.len() == 1 && refusal.held_row == Some(rows[0].id));
        // What was tried before is not likely to be new.
        let this = Try { claiming: Claiming::OnConflict, refusal };
        let held_row = rows.first().map(|row| row.id);
        let error_of = |error| row_error(error, rows.len(), held_row, this);
        let mut batch = HeldBatch::decode(&engine.handler, &rows, SystemTime::now(), engine.future_skew);
        let claimed = claim(engine, tx, run, floor, &mut batch, days).await?;
        let mut events = batch.take_claimed();
        spans.begin(&mut events);
        let outcomes = apply(engine, tx, run, &events, this).await.map_err(error_of)?;
        spans.conclude(&outcomes);
        let ids: Vec<Uuid> = events.iter().map(|claimed| claimed.event().id()).collect();
        let (wait, counts) = batch.conclude(outcomes, &engine.retry);

        let conflicts = batch.conflicts();
        let (given_back, kept): (Vec<_>, Vec<_>) = claimed.into_iter().partition(|(row, _)| conflicts.contains(row));
        give_back(engine, tx, floor, given_back.into_iter().map(|(_, id)| id)).await?;
        held_events::owns_claim(tx, &kept.into_iter().map(|(row, _)| row).collect::<Vec<_>>()).await?;
        held_events::update(tx, &batch.updates()).await.map_err(|error| error_of(error.into()))?;
        let held = Some(held_turns::open(tx, run.source).await?);
        let settled = Settled { frontier: None, given_back: Vec::new(), started: ids.len(), wait, held };
        Ok::<_, BatchError>((settled, ids, counts))
    })
    .await?;
    CrashPoint::Committed.passed();
    spans.committed();
    run.answers.forget(ids);
    report(counts);
    Ok(settled)
}

/// Claims for the rows that have none. Out: row and id of each claim that this transaction made.
async fn claim<H: Business>(
    engine: &Engine<H>,
    tx: &mut Session,
    run: &RunBatch<H::Answer>,
    floor: Option<Uuid>,
    batch: &mut HeldBatch<'_, H::Event>,
    days: &mut Vec<Uuid>,
) -> Result<Vec<(i64, Uuid)>, BatchError> {
    let wanted = batch.unclaimed();
    if wanted.is_empty() {
        return Ok(Vec::new());
    }
    let is_below = |row: &ClaimRow| floor.is_some_and(|floor| row.event_id < floor);
    let (below, above): (Vec<ClaimRow>, Vec<ClaimRow>) = wanted.iter().copied().partition(is_below);
    *days = above.iter().map(|row| row.event_id).collect();
    let new = claim_rows(engine, tx, run.source, &above, Form::OnConflict).await?;
    let mut new: HashSet<Uuid> = new.into_iter().collect();
    new.extend(horizon_claims::claim(tx, &engine.group, &below.iter().map(|row| row.event_id).collect::<Vec<_>>()).await?);
    // Also of those below the floor: their day may still be there.
    let ids: Vec<Uuid> = wanted.iter().map(|row| row.event_id).collect();
    let seen = engine.claims.look_up(tx, &engine.group, &ids).await?;
    let seen = seen.into_iter().map(|seen| (seen.event_id, seen.digest)).collect();
    Ok(batch.claim(&new, &seen, floor))
}

async fn give_back<H>(
    engine: &Engine<H>,
    tx: &mut Session,
    floor: Option<Uuid>,
    ids: impl Iterator<Item = Uuid>,
) -> Result<(), BatchError> {
    let (below, above): (Vec<Uuid>, Vec<Uuid>) = ids.partition(|id| floor.is_some_and(|floor| *id < floor));
    horizon::give_back(tx, &engine.group, &above).await?;
    horizon_claims::give_back(tx, &engine.group, &below).await?;
    Ok(())
}

/// The rows of one transaction with what is known of each.
struct HeldBatch<'a, E> {
    items: Vec<Item<'a, E>>,
}

struct Item<'a, E> {
    row: &'a DueHeld,
    id: Option<Uuid>,
    digest: Option<EventDigest>,
    /// Taken when it becomes a [`Claimed`].
    event: Option<E>,
    has_claim: bool,
    fate: Fate,
}

/// What becomes of a row.
#[derive(Debug, PartialEq, Eq)]
enum Fate {
    /// Not decided yet.
    Open,
    /// It is as it was.
    Stays,
    /// It changes.
    Becomes(HeldUpdate),
}

impl<'a, E: Event> HeldBatch<'a, E> {
    fn decode<H: Business<Event = E>>(handler: &H, rows: &'a [DueHeld], now: SystemTime, future_skew: Duration) -> Self {
        let item = |row: &'a DueHeld| match decode_guarded(handler, &row.record) {
            Err(Rejection { reason, error, event_id: id }) => {
                let fate = Fate::Becomes(HeldUpdate::Parked { reason, error, charge_id: None });
                Item { row, id, digest: None, event: None, has_claim: row.owns_claim, fate }
            }
            Ok(event) => {
                let (id, digest) = (event.id(), event.digest());
                let too_early = !row.owns_claim && is_future(id, now, future_skew);
                let parked = HeldUpdate::Parked { reason: HeldReason::Future, error: FUTURE.to_owned(), charge_id: None };
                let fate = if too_early { Fate::Becomes(parked) } else { Fate::Open };
                Item { row, id: Some(id), digest: Some(digest), event: Some(event), has_claim: row.owns_claim, fate }
            }
        };
        Self { items: rows.iter().map(item).collect() }
    }

    /// What must be claimed before anything happens.
    fn unclaimed(&self) -> Vec<ClaimRow> {
        let open = self.items.iter().filter(|item| item.fate == Fate::Open && !item.has_claim);
        let row = |item: &Item<'_, E>| Some(ClaimRow { event_id: item.id?, digest: item.digest?, offset: item.row.record.offset });
        let mut ids = HashSet::new();
        open.filter_map(row).filter(|row| ids.insert(row.event_id)).collect()
    }

    /// Takes what the claims said: `new` ids are ours, of the others `seen` tells the content. Out: row and id of each new claim.
    fn claim(&mut self, new: &HashSet<Uuid>, seen: &HashMap<Uuid, Option<EventDigest>>, floor: Option<Uuid>) -> Vec<(i64, Uuid)> {
        let mut claimed = Vec::new();
        let mut taken = HashSet::new();
        for item in self.items.iter_mut().filter(|item| item.fate == Fate::Open && !item.has_claim) {
            let (Some(id), Some(digest)) = (item.id, item.digest) else { continue };
            let is_below = floor.is_some_and(|floor| id < floor);
            let known = seen.get(&id);
            let is_new = new.contains(&id) && !(is_below && known.is_some());
            let duplicate = HeldUpdate::Applied { note: Some("a duplicate: its id was claimed before") };
            match known {
                _ if is_new && taken.insert(id) => {
                    item.has_claim = true;
                    claimed.push((item.row.id, id));
                }
                // The same id twice in this batch: the next one tells what the first has become.
                _ if is_new => item.fate = Fate::Stays,
                Some(Some(known)) if digest.contradicts(*known) => {
                    let error = OTHER_CONTENT.to_owned();
                    item.fate = Fate::Becomes(HeldUpdate::Parked { reason: HeldReason::Conflict, error, charge_id: None });
                }
                Some(_) => item.fate = Fate::Becomes(duplicate),
                None if is_below => item.fate = Fate::Becomes(duplicate),
                // Somebody has given it back just now, so it is free.
                None => item.fate = Fate::Becomes(HeldUpdate::Later { wait: Duration::ZERO }),
            }
        }
        claimed
    }

    /// The only place where held events become [`Claimed`].
    fn take_claimed(&mut self) -> Vec<Claimed<E>> {
        let open = self.items.iter_mut().filter(|item| item.fate == Fate::Open);
        open.filter_map(|item| item.event.take().map(|event| Claimed::new(event, &item.row.record))).collect()
    }

    /// Takes the handler's outcomes, one for each claimed event, in the same order. Out: how long not to try, and what to count.
    ///
    /// # Panics
    /// When their number differs.
    fn conclude(&mut self, outcomes: Vec<Outcome>, retry: &RetryPolicy) -> (Option<Duration>, Counts) {
        let open = self.items.iter().filter(|item| item.fate == Fate::Open).count();
        assert_eq!(outcomes.len(), open, "a handler returns one outcome for each claimed event");
        let (mut outcomes, mut wait, mut counts) = (outcomes.into_iter(), None, Counts::default());
        // Keys of which an event of this batch stays open: whatever stands behind it has not had its turn.
        let mut held_up: HashSet<KeyDigest> = HashSet::new();
        for item in &mut self.items {
            let key = item.row.record.key_digest();
            if item.fate == Fate::Open {
                let Some(outcome) = outcomes.next() else { unreachable!("counted above") };
                count(&outcome, &mut counts);
                if let Outcome::NotStarted { wait: asked } = &outcome {
                    wait = wait.max(Some(*asked));
                }
                let is_behind = key.is_some_and(|key| held_up.contains(&key));
                item.fate = fate(item.row, outcome, is_behind, retry);
            } else {
                counts.duplicates += usize::from(matches!(item.fate, Fate::Becomes(HeldUpdate::Applied { .. })));
                counts.held += usize::from(matches!(item.fate, Fate::Becomes(HeldUpdate::Parked { .. })));
            }
            if item.fate.holds_up() {
                held_up.extend(key);
            }
        }
        (wait, counts)
    }

    /// Rows that end as a conflict: a claim that was made for one of them goes again.
    fn conflicts(&self) -> HashSet<i64> {
        let is_conflict =
            |item: &&Item<'_, E>| matches!(item.fate, Fate::Becomes(HeldUpdate::Parked { reason: HeldReason::Conflict, .. }));
        self.items.iter().filter(is_conflict).map(|item| item.row.id).collect()
    }

    fn updates(self) -> Vec<(i64, HeldUpdate)> {
        let changed = self.items.into_iter().filter_map(|item| match item.fate {
            Fate::Becomes(update) => Some((item.row.id, update)),
            Fate::Open | Fate::Stays => None,
        });
        changed.collect()
    }
}

impl Fate {
    const fn holds_up(&self) -> bool {
        match self {
            Self::Open | Self::Stays | Self::Becomes(HeldUpdate::Retrying { .. } | HeldUpdate::Later { .. }) => true,
            Self::Becomes(HeldUpdate::Parked { reason, .. }) => reason.holds_up(),
            Self::Becomes(HeldUpdate::Applied { .. }) => false,
        }
    }
}

/// What a held row becomes after one more attempt; `is_behind`: an earlier event of its key is still open.
fn fate(row: &DueHeld, outcome: Outcome, is_behind: bool, retry: &RetryPolicy) -> Fate {
    let attempts = u32::try_from(row.attempts).unwrap_or(u32::MAX).saturating_add(1);
    let failed = |reason, error, next| match next {
        Next::Again(next_attempt_in) => HeldUpdate::Retrying { reason, error, next_attempt_in },
        Next::Park => HeldUpdate::Parked { reason, error, charge_id: None },
    };
    let again = |reason, error, wait| failed(reason, error, retry.after(attempts, row.first_tried_age, wait));
    Fate::Becomes(match outcome {
        Outcome::Applied | Outcome::Declined => HeldUpdate::Applied { note: None },
        // Its turn comes when the earlier one is settled.
        Outcome::NotStarted { .. } | Outcome::Behind if is_behind && row.state != HeldState::Retrying => return Fate::Stays,
        Outcome::NotStarted { wait } => HeldUpdate::Later { wait: wait.max(retry.backoff_min) },
        Outcome::Behind => HeldUpdate::Later { wait: retry.backoff_min },
        Outcome::Retry { error, wait } => again(HeldReason::Retryable, error, wait),
        Outcome::Unknown { error, parked: true, .. } => failed(HeldReason::Unknown, error, Next::Park),
        Outcome::Unknown { error, wait, parked: false } => again(HeldReason::Unknown, error, wait),
        Outcome::Rejected { error } => failed(HeldReason::Rejected, error, Next::Park),
        Outcome::Conflict { error } => failed(HeldReason::Conflict, error, Next::Park),
        Outcome::Refused { error } => failed(HeldReason::Refused, error, Next::Park),
        Outcome::NotRecorded { error, charge_id } => {
            HeldUpdate::Parked { reason: HeldReason::ChargedNotRecorded, error, charge_id: Some(charge_id) }
        }
    })
}

const fn count(outcome: &Outcome, counts: &mut Counts) {
    match outcome {
        Outcome::Applied => counts.applied += 1,
        Outcome::Declined => counts.declined += 1,
        Outcome::NotStarted { .. }
        | Outcome::Behind
        | Outcome::Retry { .. }
        | Outcome::Unknown { .. }
        | Outcome::Rejected { .. }
        | Outcome::Conflict { .. }
        | Outcome::Refused { .. }
        | Outcome::NotRecorded { .. } => counts.held += 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handler::BatchContext;
    use crate::record::{Offset, Record};
    use crate::store::DbError;

    #[derive(Debug)]
    struct Told(Uuid);

    impl Event for Told {
        fn id(&self) -> Uuid {
            self.0
        }

        fn digest(&self) -> EventDigest {
            EventDigest::new(1, 1 << 8)
        }
    }

    /// A payload is the id's last byte.
    struct Tells;

    impl Business for Tells {
        type Event = Told;
        type Answer = ();

        fn decode(&self, record: &Record) -> Result<Told, Rejection> {
            Ok(Told(id(record.payload.as_deref().unwrap_or_default()[0])))
        }

        async fn apply(&self, _: &mut Session, _: &BatchContext<()>, _: &[Claimed<Told>]) -> Result<Vec<Outcome>, DbError> {
            unreachable!("these tests decide the outcomes themselves")
        }
    }

    const RETRY: RetryPolicy = RetryPolicy {
        max_attempts: 3,
        max_age: Duration::from_secs(9),
        backoff_min: Duration::from_secs(1),
        backoff_max: Duration::from_secs(2),
    };

    fn id(last: u8) -> Uuid {
        Uuid::from_u128((1_700_000_000_000_u128 << 80) | 0x7000_8000_0000_0000_0000 | u128::from(last))
    }

    fn row(last: u8, key: u8, state: HeldState) -> DueHeld {
        let offset = Offset(i64::from(last));
        let (key, payload) = (Some([key][..].into()), Some([last][..].into()));
        let record = Record { partition: 0, offset, timestamp_ms: None, key, headers: Box::default(), payload };
        DueHeld { id: i64::from(last), state, record, attempts: 1, first_tried_age: Duration::ZERO, owns_claim: true }
    }

    fn decoded(rows: &[DueHeld]) -> HeldBatch<'_, Told> {
        HeldBatch::decode(&Tells, rows, SystemTime::now(), Duration::from_secs(60))
    }

    fn not_started() -> Outcome {
        Outcome::NotStarted { wait: Duration::from_secs(3) }
    }

    #[test]
    fn what_has_had_no_turn_behind_an_open_head_stays_as_it_is() {
        let rows = [
            row(1, 7, HeldState::Retrying),
            row(2, 7, HeldState::Waiting),
            row(3, 7, HeldState::Queued),
            row(4, 8, HeldState::Waiting),
        ];
        let failed = || Outcome::Retry { error: "no".to_owned(), wait: None };
        let mut batch = decoded(&rows);
        batch.take_claimed();
        let (wait, counts) = batch.conclude(vec![failed(), Outcome::Behind, not_started(), Outcome::Applied], &RETRY);
        assert_eq!((wait, counts.applied, counts.held), (Some(Duration::from_secs(3)), 1, 3));
        let updates = batch.updates();
        assert!(matches!(&updates[..], [(1, HeldUpdate::Retrying { .. }), (4, HeldUpdate::Applied { note: None })]), "{updates:?}");
    }

    #[test]
    fn a_head_that_was_not_started_is_tried_later_and_costs_no_attempt_and_the_next_head_too() {
        let rows = [row(1, 7, HeldState::Queued), row(2, 8, HeldState::Waiting)];
        let mut batch = decoded(&rows);
        batch.take_claimed();
        batch.conclude(vec![not_started(), Outcome::Behind], &RETRY);
        let later = |seconds| HeldUpdate::Later { wait: Duration::from_secs(seconds) };
        assert_eq!(batch.updates(), [(1, later(3)), (2, later(1))], "a handler that is behind nobody is asked again");
    }

    #[test]
    fn a_row_without_a_claim_is_applied_with_it_and_a_taken_one_makes_it_a_duplicate() {
        let rows = [1, 2, 3, 4, 5].map(|last| DueHeld { owns_claim: false, ..row(last, last, HeldState::Queued) });
        let again = DueHeld { id: 6, ..rows[0].clone() };
        let rows: Vec<DueHeld> = rows.into_iter().chain([again]).collect();
        let mut batch = decoded(&rows);
        assert_eq!(batch.unclaimed().len(), 5, "an id is claimed once");
        let (same, other) = (EventDigest::new(1, 1 << 8), EventDigest::new(1, 2 << 8));
        let seen = HashMap::from([(id(1), Some(same)), (id(2), Some(same)), (id(3), Some(other)), (id(4), None)]);
        assert_eq!(batch.claim(&HashSet::from([id(1)]), &seen, None), [(1, id(1))]);
        assert_eq!(batch.take_claimed().len(), 1);
        let (_, counts) = batch.conclude(vec![Outcome::Applied], &RETRY);
        assert_eq!((counts.applied, counts.duplicates, counts.held), (1, 2, 1));
        let states: Vec<_> = batch.updates().into_iter().map(|(row, update)| (row, std::mem::discriminant(&update))).collect();
        let [applied, parked, later] = [
            HeldUpdate::Applied { note: None },
            HeldUpdate::Parked { reason: HeldReason::Conflict, error: String::new(), charge_id: None },
            HeldUpdate::Later { wait: Duration::ZERO },
        ]
        .map(|update| std::mem::discriminant(&update));
        assert_eq!(states, [(1, applied), (2, applied), (3, parked), (4, applied), (5, later)], "the sixth waits for the first");
    }

    #[test]
    fn below_the_floor_a_claim_that_is_not_new_is_a_duplicate_also_when_its_day_is_gone() {
        let rows = [1, 2].map(|last| DueHeld { owns_claim: false, ..row(last, last, HeldState::Queued) });
        let mut batch = decoded(&rows);
        let floor = Some(id(9));
        let seen = HashMap::from([(id(2), None)]);
        assert_eq!(batch.claim(&HashSet::from([id(2)]), &seen, floor), [], "a day that is still there tells more");
        batch.conclude(Vec::new(), &RETRY);
        assert!(batch.updates().iter().all(|(_, update)| matches!(update, HeldUpdate::Applied { note: Some(_) })));
    }

    #[test]
    fn a_conflict_found_downstream_lets_go_of_the_claim_that_was_made_for_it() {
        let rows = [DueHeld { owns_claim: false, ..row(1, 1, HeldState::Queued) }];
        let mut batch = decoded(&rows);
        batch.claim(&HashSet::from([id(1)]), &HashMap::new(), None);
        batch.take_claimed();
        batch.conclude(vec![Outcome::Conflict { error: "another amount".to_owned() }], &RETRY);
        assert_eq!(batch.conflicts(), HashSet::from([1]));
    }
}
