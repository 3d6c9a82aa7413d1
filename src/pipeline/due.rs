//! Held events that are due again: the same transaction, with a locked row in place of a claim.
//!
//! In: a partition whose held events are due. Out: each of them applied, held again with a later time, or parked. It owns the rows it
//! has locked, for the length of the transaction. If it dies here, the rows are as they were and due still.
//!
//! Invariant: an event is tried only while its row is locked and says `retrying`, and only under the fence.

use uuid::Uuid;

use crate::handler::{Claimed, Event, Handler as Business, HeldReason, Outcome, Rejection};
use crate::held::{Next, RetryPolicy};
use crate::pipeline::batch::{Counts, decode_guarded};
use crate::pipeline::dedup::{BatchError, Engine, RunBatch, Settled, apply, fence, report};
use crate::pipeline::refusal::{Refusal, row_error};
use crate::store::held_events::{self, DueHeld, HeldUpdate};
use crate::store::{Session, TransactionError};

/// The partition's held events that are due: locked and read again instead of claimed, then the same effect.
pub(super) async fn run_due<H: Business>(
    engine: &Engine<H>,
    session: &mut Session,
    run: &RunBatch<H::Answer>,
    limit: usize,
    refusal: Option<&Refusal>,
) -> Result<Settled, TransactionError<BatchError>> {
    let (settled, ids, counts) = session
        .transaction("due", &engine.limits, async |tx: &mut Session| {
            fence(tx, run).await?;
            let rows = held_events::lock_due(tx, run.source, i64::try_from(limit).unwrap_or(i64::MAX)).await?;
            let mut updates = Vec::with_capacity(rows.len());
            let mut due = Vec::with_capacity(rows.len());
            let mut events = Vec::with_capacity(rows.len());
            for row in &rows {
                match decode_guarded(&engine.handler, &row.record) {
                    Ok(event) => {
                        due.push(row);
                        events.push(Claimed::new(event, row.record.offset));
                    }
                    Err(rejection) => {
                        let Rejection { reason, error, .. } = rejection;
                        updates.push((row.id, HeldUpdate::Parked { reason, error, charge_id: None }));
                    }
                }
            }
            // Another row may have become due meanwhile, and it is not the one that was refused.
            let refusal = refusal.filter(|refusal| rows.len() == 1 && refusal.held_row == Some(rows[0].id));
            let held_row = rows.first().map(|row| row.id);
            let error_of = |error| row_error(error, rows.len(), held_row, refusal);
            let outcomes = apply(engine, tx, run, &events, refusal).await.map_err(error_of)?;
            assert_eq!(outcomes.len(), due.len(), "a handler returns one outcome for each claimed event");
            let mut counts = Counts { held: updates.len(), ..Counts::default() };
            let mut wait = None;
            for (row, outcome) in due.into_iter().zip(outcomes) {
                if let Outcome::NotStarted { wait: asked } = &outcome {
                    wait = wait.max(Some(*asked));
                }
                updates.push((row.id, update(row, outcome, &engine.retry, &mut counts)));
            }
            held_events::update(tx, &updates).await.map_err(|error| error_of(error.into()))?;
            let next_due = held_events::next_due(tx, run.source).await?;
            let ids: Vec<Uuid> = events.iter().map(|claimed| claimed.event().id()).collect();
            let settled = Settled { frontier: None, given_back: Vec::new(), started: ids.len(), wait, next_due };
            Ok::<_, BatchError>((settled, ids, counts))
        })
        .await?;
    run.answers.forget(ids);
    report(counts);
    Ok(settled)
}

/// What a held row becomes after one more attempt.
fn update(row: &DueHeld, outcome: Outcome, retry: &RetryPolicy, counts: &mut Counts) -> HeldUpdate {
    let again = |wait| retry.after(u32::try_from(row.attempts).unwrap_or(u32::MAX).saturating_add(1), row.first_held_age, wait);
    let (applied, declined) = (matches!(outcome, Outcome::Applied), matches!(outcome, Outcome::Declined));
    counts.applied += usize::from(applied);
    counts.declined += usize::from(declined);
    counts.held += usize::from(!applied && !declined);
    let failed = |reason, error, next| match next {
        Next::Again(next_attempt_in) => HeldUpdate::Retrying { reason, error, next_attempt_in },
        Next::Park => HeldUpdate::Parked { reason, error, charge_id: None },
    };
    match outcome {
        Outcome::Applied | Outcome::Declined => HeldUpdate::Applied { note: None },
        Outcome::NotStarted { wait } => HeldUpdate::Later { wait: wait.max(retry.backoff_min) },
        Outcome::Retry { error, wait } => failed(HeldReason::Retryable, error, again(wait)),
        Outcome::Unknown { error, parked: true, .. } => failed(HeldReason::Unknown, error, Next::Park),
        Outcome::Unknown { error, wait, parked: false } => failed(HeldReason::Unknown, error, again(wait)),
        Outcome::Rejected { error } => failed(HeldReason::Rejected, error, Next::Park),
        Outcome::Conflict { error } => failed(HeldReason::Conflict, error, Next::Park),
        Outcome::Refused { error } => failed(HeldReason::Refused, error, Next::Park),
        Outcome::NotRecorded { error, charge_id } => {
            HeldUpdate::Parked { reason: HeldReason::ChargedNotRecorded, error, charge_id: Some(charge_id) }
        }
    }
}
