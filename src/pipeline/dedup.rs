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
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use actix::prelude::*;
use futures_util::FutureExt;
use tracing::{info, warn};

use crate::crash::CrashPoint;
use crate::event::Money;
use crate::handler::{Answers, BatchContext, Claimed, Handler as Business, HeldReason, Outcome, StopFlag};
use crate::held::RetryPolicy;
use crate::metrics::{self, DuplicateCause};
use crate::pipeline::batch::{Batch, Counts};
use crate::pipeline::claim::{claim, fenced};
use crate::pipeline::due::{Which, run_held};
use crate::pipeline::form::{Claiming, Forms};
use crate::pipeline::horizon;
use crate::pipeline::offset::{Confirmed, OffsetActor};
use crate::pipeline::refusal::{Refusal, Try, row_error};
use crate::pipeline::requests::run_requests;
use crate::pipeline::window::{Position, WindowBatch};
use crate::record::{Epoch, Holds, NextOffset, Offset, RecordDigest, Skips, SourceId};
use crate::retention::Days;
use crate::spans::Spans;
use crate::status::{Duplicates, Status};
use crate::store::consumed_partitions::Doubt;
use crate::store::held_events::NewHeld;
use crate::store::held_turns::{self, OpenHeld};
use crate::store::processed_events::ClaimTable;
use crate::store::{DbError, ErrorClass, Form, PooledSession, Session, Store, TimeLimits, TransactionError};
use crate::store::{consumed_partitions, held_events};

/// How often a missing day partition is made and the batch run again, before the partition stops.
const DAY_TRIES: usize = 3;
/// A connection that has rested for longer goes back to the pool, which asks it whether it lives.
const KEEP: Duration = Duration::from_secs(1);

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
    /// With more open held events a partition pauses.
    pub held_max_open: usize,
    /// An id whose time lies further ahead is held.
    pub future_skew: Duration,
    /// How the table of claims is made.
    pub claims: ClaimTable,
    /// The day partitions known to exist.
    pub days: Days,
    /// Partitions for people.
    pub status: Status,
    /// Where spans go.
    pub spans: Spans,
}

/// What this owner may have written last into `consumed_partition.next_offset`: two values after an unknown COMMIT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// What is there, unless an unanswered COMMIT happened.
    pub surely: Option<NextOffset>,
    /// What an unanswered COMMIT would have written; lower than `surely` after a replay's start.
    pub perhaps: Option<NextOffset>,
}

/// The work of one transaction.
#[derive(Debug)]
pub enum Work {
    /// The first records of the window.
    Window(WindowBatch),
    /// What operators ask for.
    Requests,
    /// The partition's held events that can run.
    Held {
        /// The most of them.
        limit: usize,
        /// Only those that operators asked for.
        requested_only: bool,
    },
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
    /// Records that are settled without effect.
    pub skips: Arc<Skips>,
    /// Records that an operator wants held.
    pub holds: Arc<Holds>,
    /// Which new events may have been charged before the database went back in time.
    pub doubt: Doubt,
    /// Somebody has set the group back: what lies below this is read again because of that.
    pub replayed_below: Option<NextOffset>,
    /// What to do.
    pub work: Work,
    /// What is open of the partition's held events.
    pub held: Arc<OpenHeld>,
    /// Answers of earlier tries.
    pub answers: Answers<A>,
    /// The forms of the partition's batches.
    pub forms: Forms,
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
    /// The database is not in the state that this owner left it in; nothing was written.
    WentBack(String),
    /// It ran into an outage, or nobody knows whether it committed; run it again.
    Again(Again),
    /// Rows of one of its records are refused, and it is not known of which; nothing was written. Run it again in smaller parts.
    Refused(Refusal),
    /// The DedupActor died on it: nobody knows what it wrote.
    Died,
    /// A person must look; nothing was written.
    Stop {
        /// Why.
        reason: String,
        /// What operators ask for can be done meanwhile: neither the fence nor the schema is the cause.
        serves: bool,
    },
}

/// A committed batch.
#[derive(Debug)]
pub struct Settled {
    /// The frontier that was written; `None` for held events and requests, which do not move it.
    pub frontier: Option<Position>,
    /// Records that stay in the window.
    pub given_back: Vec<Offset>,
    /// Events whose effect was started.
    pub started: usize,
    /// Start nothing before this is over.
    pub wait: Option<Duration>,
    /// What is open of the held events now; `None` = as before.
    pub held: Option<OpenHeld>,
}

/// A batch to be run again.
#[derive(Debug)]
pub struct Again {
    /// Why.
    pub error: String,
    /// Take a new epoch first, because the database may have gone back in time.
    pub rebump: bool,
    /// Another transaction stood in the way, most often one that has claimed the same event and waits for the downstream: part of the
    /// batch can go round it.
    pub contention: bool,
    /// What the row may hold now, when the outcome of COMMIT is unknown.
    pub perhaps: Option<NextOffset>,
}

/// Why a transaction rolled back.
#[derive(Debug, thiserror::Error)]
pub(super) enum BatchError {
    #[error("the ownership row is not ours")]
    Fenced,
    #[error("consumed_partition.next_offset is {found:?}, but this owner wrote {written:?}: the database went back in time")]
    WentBack { found: Option<NextOffset>, written: Written },
    #[error("no day partition of processed_event takes these ids, although they were made, or one was taken away again and again")]
    NoDay,
    #[error("a key is taken that a plain INSERT has found free before")]
    Taken,
    #[error("{0} claimed ids are neither inserted nor found: a trigger or a foreign unique index swallows rows of processed_event")]
    Swallowed(usize),
    #[error("the handler panicked")]
    Panicked,
    #[error("rows of one of {} records are refused: {}", .0.records, .0.error)]
    Refused(Refusal),
    #[error(transparent)]
    Database(#[from] DbError),
}

/// The actor: one batch at a time, because a worker is lent to one partition at a time.
#[derive(Debug)]
pub struct DedupActor<H: Business> {
    engine: Arc<Engine<H>>,
    offsets: Addr<OffsetActor>,
    /// The connection of the last batch, and when that ended.
    kept: Option<(PooledSession, Instant)>,
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
        found == self.surely || (self.perhaps.is_some() && found == self.perhaps)
    }
}

impl<H: Business> DedupActor<H> {
    /// An actor that confirms to `offsets`.
    #[must_use]
    pub const fn new(engine: Arc<Engine<H>>, offsets: Addr<OffsetActor>) -> Self {
        Self { engine, offsets, kept: None }
    }

    /// The connection of the last batch, unless it has rested so long that it must be asked whether it is still there.
    fn kept(&mut self) -> Option<PooledSession> {
        let fresh = |(session, since): &(PooledSession, Instant)| since.elapsed() < KEEP && session.is_settled();
        self.kept.take().filter(fresh).map(|(session, _)| session)
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
        let run = run(Arc::clone(&self.engine), self.offsets.clone(), batch, self.kept());
        AtomicResponse::new(Box::pin(run.into_actor(self).map(|(done, session), actor, _| {
            actor.kept = session.map(|session| (session, Instant::now()));
            done
        })))
    }
}

/// Runs a batch to its end: with days made where they are missing, an offender that stands alone held, and confirmed after COMMIT. Out:
/// also the connection, when the next batch may begin on it.
async fn run<H: Business>(
    engine: Arc<Engine<H>>,
    offsets: Addr<OffsetActor>,
    batch: RunBatch<H::Answer>,
    mut kept: Option<PooledSession>,
) -> (Done, Option<PooledSession>) {
    let mut days_made = 0;
    let mut alone: Option<Refusal> = None;
    let mut days = Vec::new();
    // Only records of the window are likely to be new: what is held was tried before.
    let mut claiming = if matches!(batch.work, Work::Window(_)) { batch.forms.next() } else { Claiming::OnConflict };
    loop {
        let mut session = match kept.take() {
            Some(session) => session,
            None => match engine.store.claims.get().await {
                Ok(session) => session,
                Err(error) => return (give_up(BatchError::Database(error.into())), None),
            },
        };
        let begun = Instant::now();
        // What COMMIT would write, should its answer be lost.
        let mut perhaps = None;
        let result = match &batch.work {
            Work::Window(window) => {
                let this = Try { claiming, refusal: alone.as_ref() };
                run_window(&engine, &mut session, &batch, window, this, &mut perhaps).await
            }
            Work::Requests => run_requests(&engine, &mut session, &batch).await,
            Work::Held { limit, requested_only } => {
                let which = Which { limit: *limit, requested_only: *requested_only, refusal: alone.as_ref() };
                run_held(&engine, &mut session, &batch, which, &mut days).await
            }
        };
        let done = match result {
            Ok(settled) => {
                if let Some(frontier) = settled.frontier {
                    let confirmed = Confirmed { partition: batch.partition, epoch: batch.epoch, next_offset: frontier.next_offset };
                    // An OffsetActor that is gone ends the process by its death notice.
                    let _ = offsets.send(confirmed).await;
                    CrashPoint::Confirmed.passed();
                }
                return (Done::Settled(settled), Some(session));
            }
            // Nothing has happened but calls, whose answers are kept.
            Err(TransactionError::Body(error)) if claiming.form() == Form::Optimistic && shows_a_taken_key(&error) => {
                batch.forms.missed();
                metrics::claims(metrics::Claims::Taken);
                metrics::stage(metrics::Stage::Claim, begun.elapsed());
                CrashPoint::KeyTaken.passed();
                claiming = Claiming::OnConflict;
                kept = session.is_settled().then_some(session);
                continue;
            }
            Err(TransactionError::Body(BatchError::NoDay)) if days_made < DAY_TRIES => {
                info!(
                    partition = batch.partition,
                    "a day of ids is not there: it is made, unless it is forgotten, and the batch runs again"
                );
                metrics::stage(metrics::Stage::Claim, begun.elapsed());
                days_made += 1;
                engine.days.forget();
                continue;
            }
            Err(TransactionError::Body(BatchError::Refused(refusal))) if refusal.records == 1 && alone.is_none() => {
                warn!(partition = batch.partition, error = refusal.error, "this record's rows are refused: it is held");
                alone = Some(refusal);
                continue;
            }
            Err(TransactionError::Body(error)) => give_up(error),
            Err(TransactionError::Begin(error)) => give_up(BatchError::Database(error)),
            Err(TransactionError::CommitUnknown(error)) => {
                warn!(partition = batch.partition, %error, "nobody knows whether COMMIT happened: the batch runs again and the claims tell");
                Done::Again(Again { error: error.to_string(), rebump: true, contention: false, perhaps })
            }
        };
        return (done, None);
    }
}

/// Also where a key is deferred to COMMIT, or a handler has swallowed the error and only the aborted transaction tells.
fn shows_a_taken_key(error: &BatchError) -> bool {
    match error {
        BatchError::Taken => true,
        BatchError::Database(error) => error.is_taken() || error.sqlstate() == Some("25P02"),
        _ => false,
    }
}

/// The one place where a rolled-back batch's error becomes a decision.
fn give_up(error: BatchError) -> Done {
    let words = error.to_string();
    match error {
        BatchError::Fenced => Done::Fenced,
        BatchError::Refused(refusal) => Done::Refused(refusal),
        BatchError::WentBack { .. } => Done::WentBack(words),
        BatchError::Swallowed(_) => Done::Stop { reason: words, serves: false },
        BatchError::Panicked | BatchError::NoDay | BatchError::Taken => Done::Stop { reason: words, serves: true },
        BatchError::Database(error) => match error.class() {
            class @ (ErrorClass::Connection | ErrorClass::Retry) => {
                let (rebump, contention) = (class == ErrorClass::Connection, error.is_contention());
                Done::Again(Again { error: words, rebump, contention, perhaps: None })
            }
            ErrorClass::Data | ErrorClass::Other => Done::Stop { reason: words, serves: true },
            ErrorClass::Schema => Done::Stop { reason: words, serves: false },
        },
    }
}

async fn run_window<H: Business>(
    engine: &Engine<H>,
    session: &mut Session,
    run: &RunBatch<H::Answer>,
    window: &WindowBatch,
    this: Try<'_>,
    perhaps: &mut Option<NextOffset>,
) -> Result<Settled, TransactionError<BatchError>> {
    let started = Instant::now();
    let mut spans = engine.spans.batch(run.partition);
    let discarded = discarded(session, run, window).await.map_err(TransactionError::Begin)?;
    let mut batch = Batch::decode(&engine.handler, window.records(), &run.skips, SystemTime::now(), engine.future_skew, &discarded);
    batch.hold(&run.holds);
    metrics::stage(metrics::Stage::Decode, started.elapsed());
    CrashPoint::Decoded.passed();
    engine.days.ensure(&engine.store, batch.open_ids()).await.map_err(TransactionError::Begin)?;

    let (mut written, mut newly_held, mut all_new) = (started, String::new(), None);
    let error_of = |error| row_error(error, window.records().len(), None, this);
    let claiming = Instant::now();
    let settled = fenced(engine, session, run, "batch", async |tx, floor| {
        let claimed;
        (claimed, all_new) = claim(engine, tx, run, this.claiming, floor, &mut batch).await?;
        metrics::stage(metrics::Stage::Claim, claiming.elapsed());
        let mut events = batch.take_claimed(&run.doubt);
        spans.begin(&mut events);
        let outcomes = apply(engine, tx, run, &events, this).await.map_err(error_of)?;
        spans.conclude(&outcomes);
        batch.conclude(outcomes, &engine.retry);

        let settling = Instant::now();
        let unclaim = batch.unclaim(&claimed);
        if !unclaim.is_empty() {
            horizon::give_back(tx, &engine.group, &unclaim).await?;
        }
        let held = batch.held();
        let holds = !held.is_empty();
        if holds {
            newly_held = by_reason(&held);
            held_events::hold(tx, run.source, &held).await.map_err(|error| error_of(error.into()))?;
            CrashPoint::HeldWritten.passed();
        }
        let given_back = batch.given_back();
        let frontier = window.frontier(&given_back);
        if Some(frontier.next_offset) != run.written.surely || run.written.perhaps.is_some() {
            let made = window.made_first();
            consumed_partitions::advance(tx, run.source, run.epoch, frontier.next_offset, frontier.last_record, made);
        }
        CrashPoint::BeforeCommit.passed();
        *perhaps = Some(frontier.next_offset);
        let held = if holds { Some(held_turns::open(tx, run.source).await?) } else { None };
        let started = events.len().saturating_sub(given_back.len());
        written = Instant::now();
        metrics::stage(metrics::Stage::Settle, written - settling);
        Ok::<_, BatchError>(Settled { frontier: Some(frontier), given_back, started, wait: batch.wait(), held })
    });
    let settled = settled.await?;
    metrics::stage(metrics::Stage::Commit, written.elapsed());
    CrashPoint::Committed.passed();
    spans.committed();
    if let Some(all_new) = all_new {
        run.forms.committed(this.claiming, all_new);
        metrics::claims(this.claiming.into());
    }
    if !newly_held.is_empty() {
        warn!(partition = run.partition, held = newly_held, "not applied; `onceward held list` shows them");
    }
    // Also those given back: what was learned of them is in their attempts' rows now.
    run.answers.forget(batch.ids());
    report(batch.counts());
    report_duplicates(&engine.status, run.replayed_below, batch.duplicates());
    report_age(window);
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
