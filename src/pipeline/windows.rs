//! One transaction of new records: of one partition's window, or of several that waited together and whose handler lets them share.
//!
//! In: batches under their epochs. Out: after COMMIT, what was settled of each. It owns nothing. If it dies here, the transaction rolls back
//! or its outcome is unknown.
//!
//! Invariant: a partition's frontier moves in the transaction that fences it, claims its events and writes their effects, and with it alone.

use std::collections::HashSet;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use futures_util::FutureExt;
use tracing::warn;

use crate::crash::CrashPoint;
use crate::event::Money;
use crate::handler::{BatchContext, Claimed, Handler as Business, HeldReason, Outcome};
use crate::metrics::{self, DuplicateCause};
use crate::pipeline::batch::{Batch, Counts};
use crate::pipeline::claim::{claim, claim_together, fenced};
use crate::pipeline::dedup::{BatchError, Engine, RunBatch, Settled};
use crate::pipeline::horizon;
use crate::pipeline::refusal::{Try, row_error};
use crate::pipeline::window::WindowBatch;
use crate::record::{NextOffset, Offset, RecordDigest};
use crate::spans::BatchSpans;
use crate::status::{Duplicates, Status};
use crate::store::consumed_partitions::{self, Advance};
use crate::store::held_events::{self, NewHeld};
use crate::store::held_turns;
use crate::store::{DbError, Session, TransactionError};

/// Runs the batches and their windows' records; several of them in the optimistic form only. Into `perhaps` goes what COMMIT would write.
pub(super) async fn run_windows<H: Business>(
    engine: &Engine<H>,
    session: &mut Session,
    (runs, windows): (&[&RunBatch<H::Answer>], &[&WindowBatch]),
    this: Try<'_>,
    perhaps: &mut Vec<NextOffset>,
) -> Result<Vec<Settled>, TransactionError<BatchError>> {
    let started = Instant::now();
    let mut spans: Vec<BatchSpans> = runs.iter().map(|run| engine.spans.batch(run.partition)).collect();
    let mut batches = Vec::with_capacity(runs.len());
    for (run, window) in runs.iter().zip(windows) {
        let discarded = discarded(session, run, window).await.map_err(TransactionError::Begin)?;
        let now = SystemTime::now();
        let mut batch = Batch::decode(&engine.handler, window.records(), &run.skips, now, engine.future_skew, &discarded);
        batch.hold(&run.holds);
        batches.push(batch);
    }
    metrics::stage(metrics::Stage::Decode, started.elapsed());
    CrashPoint::Decoded.passed();
    engine.days.ensure(&engine.store, batches.iter().flat_map(Batch::open_ids)).await.map_err(TransactionError::Begin)?;

    let (mut written, mut newly_held, mut all_new) = (started, Vec::new(), Vec::new());
    let records = windows.iter().map(|window| window.records().len()).sum();
    let error_of = |error| row_error(error, records, None, this);
    let claiming = Instant::now();
    let settled = fenced(engine, session, runs, "batch", async |tx, floor| {
        let claimed: Vec<_>;
        if let ([run], [batch]) = (runs, &mut batches[..]) {
            let (ids, new) = claim(engine, tx, run, this.claiming, floor, batch).await?;
            (claimed, all_new) = (vec![ids], vec![new]);
        } else {
            claimed = claim_together(engine, tx, runs, floor, &mut batches).await?;
            all_new = claimed.iter().map(|ids| (!ids.is_empty()).then_some(true)).collect();
        }
        metrics::stage(metrics::Stage::Claim, claiming.elapsed());
        let (mut events, mut counts) = (Vec::new(), Vec::with_capacity(runs.len()));
        for ((run, batch), spans) in runs.iter().zip(&mut batches).zip(&mut spans) {
            let mut own = batch.take_claimed(&run.doubt);
            spans.begin(&mut own);
            counts.push(own.len());
            // For one partition there is nothing to move.
            if events.is_empty() { events = own } else { events.append(&mut own) }
        }
        let mut outcomes = apply(engine, tx, runs[0], &events, this).await.map_err(error_of)?;
        for ((batch, spans), count) in batches.iter_mut().zip(&mut spans).zip(&counts).rev() {
            let own = outcomes.split_off(outcomes.len().saturating_sub(*count));
            spans.conclude(&own);
            batch.conclude(own, &engine.retry);
        }
        assert!(outcomes.is_empty(), "a handler returns one outcome for each claimed event");

        let settling = Instant::now();
        let (mut settled, mut advances) = (Vec::with_capacity(runs.len()), Vec::with_capacity(runs.len()));
        for (at, (run, batch)) in runs.iter().zip(&batches).enumerate() {
            let unclaim = batch.unclaim(&claimed[at]);
            if !unclaim.is_empty() {
                horizon::give_back(tx, &engine.group, &unclaim).await?;
            }
            let held = batch.held();
            let holds = !held.is_empty();
            if holds {
                newly_held.push((run.partition, by_reason(&held)));
                held_events::hold(tx, run.source, &held).await.map_err(|error| error_of(error.into()))?;
                CrashPoint::HeldWritten.passed();
            }
            let given_back = batch.given_back();
            let frontier = windows[at].frontier(&given_back);
            if Some(frontier.next_offset) != run.written.surely || run.written.perhaps.is_some() {
                let (source, epoch, safe_ms) = (run.source, run.epoch, windows[at].made_first());
                advances.push(Advance { source, epoch, next: frontier.next_offset, digest: frontier.last_record, safe_ms });
            }
            let held = if holds { Some(held_turns::open(tx, run.source).await?) } else { None };
            let started = counts[at].saturating_sub(given_back.len());
            settled.push(Settled { frontier: Some(frontier), given_back, started, wait: batch.wait(), held });
        }
        consumed_partitions::advance(tx, &advances);
        CrashPoint::BeforeCommit.passed();
        perhaps.extend(settled.iter().filter_map(|settled| Some(settled.frontier?.next_offset)));
        written = Instant::now();
        metrics::stage(metrics::Stage::Settle, written - settling);
        Ok::<_, BatchError>(settled)
    });
    let settled = settled.await?;
    metrics::stage(metrics::Stage::Commit, written.elapsed());
    CrashPoint::Committed.passed();
    spans.into_iter().for_each(BatchSpans::committed);
    if all_new.iter().any(Option::is_some) {
        metrics::claims(this.claiming.into());
    }
    for (run, all_new) in runs.iter().zip(all_new) {
        if let Some(all_new) = all_new {
            run.forms.committed(this.claiming, all_new);
        }
    }
    for (partition, held) in newly_held {
        warn!(partition, held, "not applied; `onceward held list` shows them");
    }
    for ((run, window), batch) in runs.iter().zip(windows).zip(&batches) {
        // Also those given back: what was learned of them is in their attempts' rows now.
        run.answers.forget(batch.ids());
        report_duplicates(&engine.status, run.replayed_below, batch.duplicates());
        report_age(window);
    }
    report(batches.iter().map(Batch::counts).sum());
    Ok(settled)
}

/// How many of which reason: `2 invalid, 1 unknown`.
fn by_reason(held: &[NewHeld<'_>]) -> String {
    let count = |reason: HeldReason| held.iter().filter(|held| held.reason == reason).count();
    let counts = HeldReason::ALL.into_iter().map(|reason| (count(reason), reason)).filter(|(count, _)| *count > 0);
    counts.map(|(count, reason)| format!("{count} {reason}")).collect::<Vec<_>>().join(", ")
}

/// What operators have discarded among records that are read again. There is nothing to ask while the partition moves ahead.
async fn discarded<A>(
    session: &mut Session,
    run: &RunBatch<A>,
    window: &WindowBatch,
) -> Result<HashSet<(Offset, RecordDigest)>, DbError> {
    let read_before = window.records().take_while(|record| run.held.last_discarded.is_some_and(|last| record.offset <= last));
    let read_before: Vec<_> = read_before.map(|record| (record.offset, record.digest())).collect();
    held_turns::discarded(session, run.source, &read_before).await
}

/// The effect, under a guard: a panic rolls the batch back and ends nothing else. After a `refusal` there is no effect.
pub(super) async fn apply<H: Business>(
    engine: &Engine<H>,
    tx: &mut Session,
    run: &RunBatch<H::Answer>,
    events: &[Claimed<H::Event>],
    this: Try<'_>,
) -> Result<Vec<Outcome>, BatchError> {
    if events.is_empty() {
        return Ok(Vec::new());
    }
    let started = Instant::now();
    let context = BatchContext {
        source: run.source,
        epoch: run.epoch,
        group: Arc::clone(&engine.group),
        form: this.claiming.form(),
        deadline: started + engine.effect_deadline,
        deadline_wall: SystemTime::now() + engine.effect_deadline,
        stop: run.stop.clone(),
        answers: run.answers.clone(),
    };
    let apply = async {
        let Some(refusal) = this.refusal else { return engine.handler.apply(tx, &context, events).await };
        let mut outcomes = Vec::with_capacity(events.len());
        for event in events {
            outcomes.push(engine.handler.refused(tx, &context, event, &refusal.error).await?);
        }
        Ok(outcomes)
    };
    let applied = AssertUnwindSafe(apply).catch_unwind().await;
    metrics::stage(metrics::Stage::Apply, started.elapsed());
    // A handler's own statements carry no SQLSTATE: the session knows the last one.
    applied.map_err(|_| BatchError::Panicked)?.map_err(|error| BatchError::Database(tx.db_error("apply", error)))
}

pub(super) fn report(counts: Counts) {
    metrics::batch_size(counts.sum());
    metrics::events(metrics::Outcome::Applied, counts.applied);
    metrics::events(metrics::Outcome::Declined, counts.declined);
    metrics::events(metrics::Outcome::Duplicate, counts.duplicates);
    metrics::events(metrics::Outcome::Held, counts.held);
    metrics::events(metrics::Outcome::GivenBack, counts.given_back);
    metrics::events(metrics::Outcome::Skipped, counts.skipped);
}

/// Why events came that were settled before, and what that would have cost.
fn report_duplicates(
    status: &Status,
    replayed_below: Option<NextOffset>,
    duplicates: impl Iterator<Item = (Offset, bool, Option<Money>)>,
) {
    let mut explained = Duplicates::default();
    for (offset, same_record, worth) in duplicates {
        let cause = match same_record {
            false => DuplicateCause::ProducedAgain,
            true if replayed_below.is_some_and(|below| offset.0 < below.0) => DuplicateCause::Replay,
            true => DuplicateCause::Redelivery,
        };
        explained.add(cause, worth);
    }
    for (cause, count) in explained.counts() {
        metrics::duplicates(cause, count);
    }
    status.duplicates(&explained);
}

/// The age of a batch's oldest record when it has committed.
fn report_age(window: &WindowBatch) {
    let Some(made) = window.records().next().and_then(|oldest| u64::try_from(oldest.timestamp_ms?).ok()) else { return };
    let made = SystemTime::UNIX_EPOCH + Duration::from_millis(made);
    // A clock that is behind the producer's makes it zero.
    metrics::record_age_at_commit(SystemTime::now().duration_since(made).unwrap_or_default());
}
