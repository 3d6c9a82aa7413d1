//! Events whose claims may be forgotten, and claims whose day goes.
//!
//! In: a batch in its transaction, behind the fence. Out: what is known of its events below the floor. It owns nothing: what outlives a claim
//! is read, never written.
//!
//! Invariant: an id below the floor is never claimed here; it is known by something, or held.

use std::panic::AssertUnwindSafe;

use futures_util::FutureExt;
use uuid::Uuid;

use crate::handler::{Event as _, Handler};
use crate::pipeline::batch::Batch;
use crate::pipeline::dedup::{BatchError, Engine};
use crate::record::SourceId;
use crate::store::{Session, horizon_claims, processed_events};

/// What is known of the events whose ids lie below the floor. A batch without any costs nothing here.
pub(super) async fn look<H: Handler>(
    engine: &Engine<H>,
    tx: &mut Session,
    source: SourceId,
    floor: Uuid,
    batch: &mut Batch<'_, H::Event>,
) -> Result<(), BatchError> {
    let events = batch.below(floor);
    if events.is_empty() {
        return Ok(());
    }
    let ids: Vec<Uuid> = events.iter().map(|event| event.id()).collect();
    let traces = AssertUnwindSafe(engine.handler.traces(tx, &events)).catch_unwind().await;
    let traces = traces.map_err(|_| BatchError::Panicked)?.map_err(|error| BatchError::Database(tx.db_error("traces", error)))?;
    let settled = horizon_claims::settled(tx, &engine.group, &ids).await?;
    // Between the rise of the floor and the drop of the day its claims are still there, and tell more than anything else.
    let seen = engine.claims.look_up(tx, &engine.group, &ids).await?;
    batch.beyond_horizon(floor, source, &settled, &seen, &traces);
    Ok(())
}

/// Deletes claims that this transaction has made.
pub(super) async fn give_back(tx: &mut Session, group: &str, ids: &[Uuid]) -> Result<(), BatchError> {
    // One that is not there any more went with its day, which lay below a floor that was raised meanwhile.
    if processed_events::give_back(tx, group, ids).await? < ids.len() { Err(BatchError::NoDay) } else { Ok(()) }
}
