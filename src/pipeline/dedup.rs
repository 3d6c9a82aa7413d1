//! One batch, one transaction: fence, claim, effect, held rows, frontier, COMMIT (R-KFK-IDEM-3).
//!
//! In: a batch of a partition under an epoch. Out: what was settled, confirmed to the OffsetActor after COMMIT and never before. It owns
//! the transaction. If it dies here, the transaction rolls back or its outcome is unknown; both times the batch runs again, and the
//! claims tell.
//!
//! Invariant: after COMMIT every record of the batch is settled or given back, and the frontier has not passed one given back. A
//! transaction whose ownership row is not ours claims nothing.

use std::collections::HashSet;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use actix::prelude::*;
use futures_util::FutureExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tracing::{error, warn};
use uuid::Uuid;

use crate::handler::{Answers, BatchContext, Claimed, Event, Handler as Business, HeldReason, Outcome, StopFlag};
use crate::held::{Next, RetryPolicy};
use crate::metrics;
use crate::pipeline::batch::{Batch, Counts};
use crate::pipeline::offset::{Confirmed, OffsetActor};
use crate::pipeline::window::{Position, WindowBatch};
use crate::record::{Epoch, NextOffset, Offset, SourceId};
use crate::retention::Days;
use crate::status::Status;
use crate::store::held_events::{DueHeld, HeldUpdate};
use crate::store::{DbError, ErrorClass, Session, Store, TimeLimits, TransactionError};
use crate::store::{consumed_partitions, held_events, processed_events};

/// How often a missing day partition is made and the batch run again, before the partition stops.
const DAY_TRIES: usize = 3;

/// What all DedupActors of the process share.
#[derive(Debug)]
pub struct Engine<H> {
    /// The business.
    pub handler: H,
    /// The database.
    pub store: Store,
    /// The consumer group.
    pub group: Arc<str>,
    /// The topic.
    pub topic: String,
    /// Who we are, in `consumed_partition.owner`.
    pub owner: String,
    /// Of a batch's transaction.
    pub limits: TimeLimits,
    /// All calls of a transaction end within this, counted from its claim.
    pub effect_deadline: Duration,
    /// The most events in one transaction.
    pub batch_max: usize,
    /// Bounds of the automatic retries.
    pub retry: RetryPolicy,
    /// An id whose time lies further ahead is held.
    pub future_skew: Duration,
    /// The day partitions known to exist.
    pub days: Days,
    /// Partitions for people.
    pub status: Status,
}

/// What this owner may have written last into `consumed_partition.next_offset`: more than one value after an unknown COMMIT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// What is there, unless an unanswered COMMIT happened.
    pub surely: Option<NextOffset>,
    /// The most that an unanswered COMMIT can have written.
    pub perhaps: Option<NextOffset>,
}

/// The work of one transaction.
#[derive(Debug)]
pub enum Work {
    /// The first records of the window.
    Window(WindowBatch),
    /// The partition's held events that are due, at most so many.
    Due(usize),
}

/// Run one batch.
#[derive(Message, Debug)]
#[rtype(result = "Done")]
pub struct RunBatch<A> {
    /// The partition.
    pub partition: i32,
    /// Its row.
    pub source: SourceId,
    /// The owner's epoch.
    pub epoch: Epoch,
    /// What the fence must find.
    pub written: Written,
    /// What to do.
    pub work: Work,
    /// Answers of earlier tries.
    pub answers: Answers<A>,
    /// Raised: start no call.
    pub stop: StopFlag,
}

/// What became of a batch.
#[derive(Debug)]
pub enum Done {
    /// It has committed.
    Settled(Settled),
    /// The row is not ours any more; nothing was written.
    Fenced,
    /// It ran into an outage, or nobody knows whether it committed; run it again.
    Again(Again),
    /// A person must look; nothing was written.
    Stop(String),
}

/// A committed batch.
#[derive(Debug)]
pub struct Settled {
    /// The frontier that was written; `None` for held events, which do not move it.
    pub frontier: Option<Position>,
    /// Records that stay in the window.
    pub given_back: Vec<Offset>,
    /// Events whose effect was started.
    pub started: usize,
    /// Start nothing before this is over.
    pub wait: Option<Duration>,
    /// When the next held event is due, counted from now.
    pub next_due: Option<Duration>,
}

/// A batch to be run again.
#[derive(Debug)]
pub struct Again {
    /// Why.
    pub error: String,
    /// Take a new epoch first, because the database may have gone back in time.
    pub rebump: bool,
    /// What the row may hold now, when the outcome of COMMIT is unknown.
    pub perhaps: Option<NextOffset>,
}

/// Why a transaction rolled back.
#[derive(Debug, thiserror::Error)]
enum BatchError {
    #[error("the ownership row is not ours")]
    Fenced,
    #[error("consumed_partition.next_offset is {found:?}, but this owner wrote {written:?}: the database went back in time")]
    WentBack { found: Option<NextOffset>, written: Written },
    #[error("no day partition takes these ids")]
    NoDay,
    #[error("{0} claimed ids are neither inserted nor found: a trigger or a foreign unique index swallows rows of processed_event")]
    Swallowed(usize),
    #[error("the handler panicked")]
    Panicked,
    #[error(transparent)]
    Database(#[from] DbError),
}

/// The actor: one batch at a time, because a worker is lent to one partition at a time.
#[derive(Debug)]
pub struct DedupActor<H: Business> {
    engine: Arc<Engine<H>>,
    offsets: Addr<OffsetActor>,
}

/// The DedupActors: `partition_concurrency` of them, lent out first come, first served.
#[derive(Debug)]
pub struct Workers<H: Business> {
    engine: Arc<Engine<H>>,
    offsets: Addr<OffsetActor>,
    free: Arc<Semaphore>,
    idle: Mutex<Vec<Addr<DedupActor<H>>>>,
}

/// A DedupActor on loan.
#[derive(Debug)]
pub struct Worker<H: Business> {
    workers: Arc<Workers<H>>,
    actor: Option<Addr<DedupActor<H>>>,
    _permit: OwnedSemaphorePermit,
}

impl Written {
    /// After a COMMIT that was answered, or a bump.
    #[must_use]
    pub const fn known(next_offset: Option<NextOffset>) -> Self {
        Self { surely: next_offset, perhaps: None }
    }

    /// Whether this owner can have written it.
    #[must_use]
    pub fn allows(self, found: Option<NextOffset>) -> bool {
        found == self.surely || (self.perhaps.is_some() && found > self.surely && found <= self.perhaps)
    }
}

impl<H: Business> Actor for DedupActor<H> {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.set_mailbox_capacity(1);
    }
}

impl<H: Business> Handler<RunBatch<H::Answer>> for DedupActor<H> {
    type Result = AtomicResponse<Self, Done>;

    fn handle(&mut self, batch: RunBatch<H::Answer>, _: &mut Self::Context) -> Self::Result {
        let run = run(Arc::clone(&self.engine), self.offsets.clone(), batch);
        AtomicResponse::new(Box::pin(run.into_actor(self)))
    }
}

/// Runs a batch to its end: with days made where they are missing, and confirmed after COMMIT.
async fn run<H: Business>(engine: Arc<Engine<H>>, offsets: Addr<OffsetActor>, batch: RunBatch<H::Answer>) -> Done {
    for _ in 0..DAY_TRIES {
        let mut session = match engine.store.claims.get().await {
            Ok(session) => session,
            Err(error) => return give_up(BatchError::Database(error.into())),
        };
        // What COMMIT would write, should its answer be lost.
        let mut perhaps = None;
        let result = match &batch.work {
            Work::Window(window) => run_window(&engine, &mut session, &batch, window, &mut perhaps).await,
            Work::Due(limit) => run_due(&engine, &mut session, &batch, *limit).await,
        };
        return match result {
            Ok(settled) => {
                if let Some(frontier) = settled.frontier {
                    let confirmed = Confirmed { partition: batch.partition, epoch: batch.epoch, next_offset: frontier.next_offset };
                    // An OffsetActor that is gone ends the process by its death notice.
                    let _ = offsets.send(confirmed).await;
                }
                Done::Settled(settled)
            }
            Err(TransactionError::Body(BatchError::NoDay)) => {
                engine.days.forget();
                continue;
            }
            Err(TransactionError::Body(error)) => give_up(error),
            Err(TransactionError::Begin(error)) => give_up(BatchError::Database(error)),
            Err(TransactionError::CommitUnknown(error)) => {
                warn!(partition = batch.partition, %error, "nobody knows whether COMMIT happened: the batch runs again and the claims tell");
                Done::Again(Again { error: error.to_string(), rebump: true, perhaps })
            }
        };
    }
    Done::Stop("a day partition of processed_event keeps missing although it was made".to_owned())
}

/// The one place where a rolled-back batch's error becomes a decision.
fn give_up(error: BatchError) -> Done {
    let words = error.to_string();
    match error {
        BatchError::Fenced => Done::Fenced,
        BatchError::WentBack { .. } | BatchError::Swallowed(_) | BatchError::Panicked | BatchError::NoDay => Done::Stop(words),
        BatchError::Database(error) => match error.class() {
            ErrorClass::Connection => Done::Again(Again { error: words, rebump: true, perhaps: None }),
            ErrorClass::Retry => Done::Again(Again { error: words, rebump: false, perhaps: None }),
            ErrorClass::Data | ErrorClass::Schema | ErrorClass::Other => Done::Stop(words),
        },
    }
}

async fn run_window<H: Business>(
    engine: &Engine<H>,
    session: &mut Session,
    run: &RunBatch<H::Answer>,
    window: &WindowBatch,
    perhaps: &mut Option<NextOffset>,
) -> Result<Settled, TransactionError<BatchError>> {
    let mut batch = Batch::decode(&engine.handler, window.records(), SystemTime::now(), engine.future_skew);
    engine.days.ensure(&engine.store, batch.open_ids()).await.map_err(TransactionError::Begin)?;
    metrics::batch_size(window.records().len());

    let settled = session.transaction("batch", &engine.limits, async |tx: &mut Session| {
        let claimed = claim(engine, tx, run, &mut batch).await?;
        let events = batch.take_claimed();
        let outcomes = apply(engine, tx, run, &events).await?;
        batch.conclude(outcomes, &engine.retry);

        let unclaim = batch.unclaim(&claimed);
        if !unclaim.is_empty() {
            processed_events::give_back(tx, &engine.group, &unclaim).await?;
        }
        let held = batch.held();
        let holds = !held.is_empty();
        if holds {
            held_events::hold(tx, run.source, &held).await?;
        }
        let given_back = batch.given_back();
        let frontier = window.frontier(&given_back);
        if Some(frontier.next_offset) != run.written.surely || run.written.perhaps.is_some() {
            consumed_partitions::advance(tx, run.source, run.epoch, frontier.next_offset, frontier.last_record).await?;
        }
        *perhaps = Some(frontier.next_offset);
        let next_due = if holds { held_events::next_due(tx, run.source).await? } else { None };
        let started = events.len().saturating_sub(given_back.len());
        Ok::<_, BatchError>(Settled { frontier: Some(frontier), given_back, started, wait: batch.wait(), next_due })
    });
    let settled = settled.await?;
    run.answers.forget(batch.settled_ids());
    report(batch.counts());
    report_ages(window);
    Ok(settled)
}

/// Fence, claim, look up. Out: the ids claimed by this transaction.
async fn claim<H: Business>(
    engine: &Engine<H>,
    tx: &mut Session,
    run: &RunBatch<H::Answer>,
    batch: &mut Batch<'_, H::Event>,
) -> Result<HashSet<Uuid>, BatchError> {
    let started = Instant::now();
    let floor = fence(tx, run).await?;
    let rows = batch.claims(floor);
    let mut claimed = HashSet::new();
    if !rows.is_empty() {
        claimed = claim_rows(engine, tx, run.source, &rows).await?;
        let missing: Vec<Uuid> = rows.iter().map(|row| row.event_id).filter(|id| !claimed.contains(id)).collect();
        if !missing.is_empty() {
            let seen = processed_events::look_up(tx, &engine.group, &missing).await?;
            let unexplained = batch.seen(&claimed, &seen);
            if !unexplained.is_empty() {
                // A claim that another session gave back meanwhile is free now: one more try tells it from a swallowed row.
                let again: Vec<_> = rows.into_iter().filter(|row| unexplained.contains(&row.event_id)).collect();
                let late = claim_rows(engine, tx, run.source, &again).await?;
                if late.len() < again.len() {
                    return Err(BatchError::Swallowed(again.len() - late.len()));
                }
                claimed.extend(late);
            }
        }
    }
    metrics::stage(metrics::Stage::Claim, started.elapsed());
    Ok(claimed)
}

/// Locks the ownership row; out: the retention floor as of this transaction.
async fn fence<A>(tx: &mut Session, run: &RunBatch<A>) -> Result<Option<Uuid>, BatchError> {
    let fence = consumed_partitions::fence(tx, run.source, run.epoch).await?.ok_or(BatchError::Fenced)?;
    if !run.written.allows(fence.next_offset) {
        return Err(BatchError::WentBack { found: fence.next_offset, written: run.written });
    }
    Ok(fence.floor)
}

async fn claim_rows<H: Business>(
    engine: &Engine<H>,
    tx: &mut Session,
    source: SourceId,
    rows: &[processed_events::ClaimRow],
) -> Result<HashSet<Uuid>, BatchError> {
    processed_events::claim(tx, &engine.group, source, rows).await.map_err(|error| match error.sqlstate() {
        // check_violation of the claim itself: no partition takes the row.
        Some("23514") => BatchError::NoDay,
        Some(_) | None => BatchError::Database(error),
    })
}

/// The effect, under a guard: a panic rolls the batch back and ends nothing else.
async fn apply<H: Business>(
    engine: &Engine<H>,
    tx: &mut Session,
    run: &RunBatch<H::Answer>,
    events: &[Claimed<H::Event>],
) -> Result<Vec<Outcome>, BatchError> {
    if events.is_empty() {
        return Ok(Vec::new());
    }
    let started = Instant::now();
    let context = BatchContext {
        source: run.source,
        epoch: run.epoch,
        group: Arc::clone(&engine.group),
        deadline: started + engine.effect_deadline,
        deadline_wall: SystemTime::now() + engine.effect_deadline,
        stop: run.stop.clone(),
        answers: run.answers.clone(),
    };
    let applied = AssertUnwindSafe(engine.handler.apply(tx, &context, events)).catch_unwind().await;
    metrics::stage(metrics::Stage::Apply, started.elapsed());
    // A handler's own statements carry no SQLSTATE: the session knows the last one.
    applied.map_err(|_| BatchError::Panicked)?.map_err(|error| BatchError::Database(tx.db_error("apply", error)))
}

/// The partition's held events that are due: locked and read again instead of claimed, then the same effect.
async fn run_due<H: Business>(
    engine: &Engine<H>,
    session: &mut Session,
    run: &RunBatch<H::Answer>,
    limit: usize,
) -> Result<Settled, TransactionError<BatchError>> {
    let (settled, ids, counts) = session
        .transaction("due", &engine.limits, async |tx: &mut Session| {
            fence(tx, run).await?;
            let rows = held_events::lock_due(tx, run.source, i64::try_from(limit).unwrap_or(i64::MAX)).await?;
            let mut updates = Vec::with_capacity(rows.len());
            let mut due = Vec::with_capacity(rows.len());
            let mut events = Vec::with_capacity(rows.len());
            for row in &rows {
                match engine.handler.decode(&row.record) {
                    Ok(event) => {
                        due.push(row);
                        events.push(Claimed::new(event, row.record.offset));
                    }
                    Err(rejection) => {
                        updates.push((row.id, HeldUpdate::Parked { reason: rejection.reason, error: rejection.error }))
                    }
                }
            }
            let outcomes = apply(engine, tx, run, &events).await?;
            assert_eq!(outcomes.len(), due.len(), "a handler returns one outcome for each claimed event");
            let mut counts = Counts { held: updates.len(), ..Counts::default() };
            let mut wait = None;
            for (row, outcome) in due.into_iter().zip(outcomes) {
                if let Outcome::NotStarted { wait: asked } = &outcome {
                    wait = wait.max(Some(*asked));
                }
                updates.push((row.id, update(row, outcome, &engine.retry, &mut counts)));
            }
            held_events::update(tx, &updates).await?;
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
        Next::Park => HeldUpdate::Parked { reason, error },
    };
    match outcome {
        Outcome::Applied | Outcome::Declined => HeldUpdate::Applied { note: None },
        Outcome::NotStarted { wait } => HeldUpdate::Later { wait: wait.max(retry.backoff_min) },
        Outcome::Retry { error, wait } => failed(HeldReason::Retryable, error, again(wait)),
        Outcome::Unknown { error, parked: true, .. } => failed(HeldReason::Unknown, error, Next::Park),
        Outcome::Unknown { error, wait, parked: false } => failed(HeldReason::Unknown, error, again(wait)),
        Outcome::Rejected { error } => failed(HeldReason::Rejected, error, Next::Park),
        Outcome::Conflict { error } => failed(HeldReason::Conflict, error, Next::Park),
    }
}

fn report(counts: Counts) {
    metrics::events(metrics::Outcome::Applied, counts.applied);
    metrics::events(metrics::Outcome::Declined, counts.declined);
    metrics::events(metrics::Outcome::Duplicate, counts.duplicates);
    metrics::events(metrics::Outcome::Held, counts.held);
    metrics::events(metrics::Outcome::GivenBack, counts.given_back);
}

/// The ages of the oldest and the newest record of a batch when it has committed: two samples a batch bound the rest.
fn report_ages(window: &WindowBatch) {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |now| now.as_millis());
    let mut records = window.records();
    for record in [records.next(), records.next_back()].into_iter().flatten() {
        if let Some(made) = record.timestamp_ms.and_then(|ms| u128::try_from(ms).ok()) {
            metrics::record_age_at_commit(Duration::from_millis(u64::try_from(now.saturating_sub(made)).unwrap_or(u64::MAX)));
        }
    }
}

impl<H: Business> Workers<H> {
    /// `count` DedupActors.
    #[must_use]
    pub fn start(engine: Arc<Engine<H>>, offsets: Addr<OffsetActor>, count: usize) -> Arc<Self> {
        let idle = (0..count).map(|_| DedupActor { engine: Arc::clone(&engine), offsets: offsets.clone() }.start()).collect();
        Arc::new(Self { engine, offsets, free: Arc::new(Semaphore::new(count)), idle: Mutex::new(idle) })
    }

    /// The next free DedupActor, in the order asked.
    ///
    /// # Panics
    /// Never: the semaphore is not closed, and holds as many permits as there are actors.
    pub async fn borrow(self: &Arc<Self>) -> Worker<H> {
        let permit = Arc::clone(&self.free).acquire_owned().await.expect("the semaphore is never closed");
        let actor = self.idle().pop().filter(Addr::connected);
        // One that has died on a batch is replaced here.
        let actor = actor.unwrap_or_else(|| DedupActor { engine: Arc::clone(&self.engine), offsets: self.offsets.clone() }.start());
        Worker { workers: Arc::clone(self), actor: Some(actor), _permit: permit }
    }

    /// What the actors share.
    #[must_use]
    pub fn engine(&self) -> &Engine<H> {
        &self.engine
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<Addr<DedupActor<H>>>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<H: Business> Worker<H> {
    /// Runs a batch. A DedupActor that dies on it leaves its outcome unknown.
    pub async fn run(self, batch: RunBatch<H::Answer>) -> Done {
        let Some(actor) = &self.actor else { unreachable!("the actor goes back only when the loan ends") };
        let perhaps = match &batch.work {
            Work::Window(window) => Some(window.frontier(&[]).next_offset),
            Work::Due(_) => None,
        };
        actor.send(batch).await.unwrap_or_else(|closed| {
            error!(%closed, "a DedupActor died on a batch");
            Done::Again(Again { error: "the DedupActor died".to_owned(), rebump: true, perhaps })
        })
    }
}

impl<H: Business> Drop for Worker<H> {
    fn drop(&mut self) {
        if let Some(actor) = self.actor.take() {
            self.workers.idle().push(actor);
        }
    }
}
