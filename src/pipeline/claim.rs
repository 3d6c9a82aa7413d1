//! The beginning of every batch's transaction: its fence, and the claims of its events.
//!
//! In: a decoded batch. Out: the ids that this transaction has claimed, and in the batch what became of the others. It owns nothing.
//!
//! Invariant: a transaction whose ownership row is not ours claims nothing, and an event that is not claimed has no effect.

use std::collections::HashSet;

use uuid::Uuid;

use crate::crash::CrashPoint;
use crate::handler::Handler as Business;
use crate::pipeline::batch::Batch;
use crate::pipeline::dedup::{BatchError, Engine, RunBatch};
use crate::pipeline::form::Claiming;
use crate::pipeline::horizon;
use crate::record::{Epoch, SourceId};
use crate::store::consumed_partitions::{self, Fence};
use crate::store::processed_events::ClaimRow;
use crate::store::{DbError, Form, Session, TransactionError};

/// A transaction that has locked its ownership rows. Its body gets the retention floor as of this transaction.
pub(super) async fn fenced<H: Business, T>(
    engine: &Engine<H>,
    session: &mut Session,
    runs: &[&RunBatch<H::Answer>],
    name: &'static str,
    body: impl AsyncFnOnce(&mut Session, Option<Uuid>) -> Result<T, BatchError>,
) -> Result<T, TransactionError<BatchError>> {
    let owners: Vec<(SourceId, Epoch)> = runs.iter().map(|run| (run.source, run.epoch)).collect();
    let words = engine.claims.opening();
    consumed_partitions::fenced(session, name, &engine.limits, words, &owners, async |tx: &mut Session, fences: Vec<_>| {
        let mut floor = None;
        for (run, fence) in runs.iter().zip(fences) {
            let fence: Fence = fence.ok_or(BatchError::Fenced)?;
            if !run.written.allows(fence.next_offset) {
                return Err(BatchError::WentBack { found: fence.next_offset, written: run.written });
            }
            floor = floor.max(fence.floor);
        }
        CrashPoint::Fenced.passed();
        body(tx, floor).await
    })
    .await
}

/// Claim, look up, wait behind what is held. Out: the ids claimed by this transaction, and whether that was all, if there were any to claim.
pub(super) async fn claim<H: Business>(
    engine: &Engine<H>,
    tx: &mut Session,
    run: &RunBatch<H::Answer>,
    claiming: Claiming,
    floor: Option<Uuid>,
    batch: &mut Batch<'_, H::Event>,
) -> Result<(Vec<Uuid>, Option<bool>), BatchError> {
    if let Some(floor) = floor {
        horizon::look(engine, tx, run.source, floor, batch).await?;
    }
    let (mut rows, mut claimed, mut all_new) = (batch.claims(), Vec::new(), None);
    if claiming == Claiming::LookFirst && !rows.is_empty() {
        let ids: Vec<Uuid> = rows.iter().map(|row| row.event_id).collect();
        let seen = engine.claims.look_up(tx, &engine.group, &ids).await?;
        all_new = Some(seen.is_empty());
        if !seen.is_empty() {
            // Who is not found is to be claimed like any other; that somebody else does it meanwhile, the plain INSERT says.
            batch.seen(run.source, &HashSet::new(), &seen);
            rows = batch.claims();
        }
    }
    if !rows.is_empty() {
        claimed = claim_rows(engine, tx, run.source, &rows, claiming.form()).await?;
        CrashPoint::Claimed.passed();
        all_new = all_new.or(Some(claimed.len() == rows.len()));
        if claimed.len() < rows.len() {
            let new: HashSet<Uuid> = claimed.iter().copied().collect();
            let missing: Vec<Uuid> = rows.iter().map(|row| row.event_id).filter(|id| !new.contains(id)).collect();
            let seen = engine.claims.look_up(tx, &engine.group, &missing).await?;
            let unexplained = batch.seen(run.source, &new, &seen);
            if !unexplained.is_empty() {
                // A claim that another session gave back meanwhile is free now: one more try tells it from a swallowed row.
                let again: Vec<_> = rows.into_iter().filter(|row| unexplained.contains(&row.event_id)).collect();
                let late = claim_rows(engine, tx, run.source, &again, Form::OnConflict).await?;
                if late.len() < again.len() {
                    return Err(BatchError::Swallowed(again.len() - late.len()));
                }
                claimed.extend(late);
            }
        }
    }
    batch.wait_behind(&run.held.sequences);
    Ok((claimed, all_new))
}

/// The same for several partitions, in one statement: all their events are new, or nothing happens. Out: the ids claimed for each.
pub(super) async fn claim_together<H: Business>(
    engine: &Engine<H>,
    tx: &mut Session,
    runs: &[&RunBatch<H::Answer>],
    floor: Option<Uuid>,
    batches: &mut [Batch<'_, H::Event>],
) -> Result<Vec<Vec<Uuid>>, BatchError> {
    let (mut rows, mut claimed) = (Vec::new(), Vec::with_capacity(runs.len()));
    for (run, batch) in runs.iter().zip(&mut *batches) {
        if let Some(floor) = floor {
            horizon::look(engine, tx, run.source, floor, batch).await?;
        }
        let claims = batch.claims();
        claimed.push(claims.iter().map(|row| row.event_id).collect());
        rows.extend(claims.into_iter().map(|row| (run.source, row)));
    }
    engine.claims.claim_together(tx, &engine.group, &rows).await.map_err(|error| claim_error(error, Form::Optimistic))?;
    if !rows.is_empty() {
        CrashPoint::Claimed.passed();
    }
    for (run, batch) in runs.iter().zip(batches) {
        batch.wait_behind(&run.held.sequences);
    }
    Ok(claimed)
}

/// The claims themselves, and whose fault it is if there are none.
pub(super) async fn claim_rows<H: Business>(
    engine: &Engine<H>,
    tx: &mut Session,
    source: SourceId,
    rows: &[ClaimRow],
    form: Form,
) -> Result<Vec<Uuid>, BatchError> {
    engine.claims.claim(tx, &engine.group, source, rows, form).await.map_err(|error| claim_error(error, form))
}

fn claim_error(error: DbError, form: Form) -> BatchError {
    match error.sqlstate() {
        // check_violation of the claim itself: no partition takes the row.
        Some("23514") => BatchError::NoDay,
        // Which key it was, its name does not say: each day has its own, and so has the table of another service. If it was not the
        // claim's, the other form will say so.
        Some(_) if form == Form::Optimistic && error.is_taken() => BatchError::Taken,
        Some(_) | None => BatchError::Database(error),
    }
}
