//! One batch, one transaction: fence, claim, effect, held rows, frontier, COMMIT (R-KFK-IDEM-3). Small batches of several partitions may share one.
//!
//! In: a batch of a partition under an epoch. Out: what was settled, confirmed to the OffsetActor after COMMIT and never before. It owns
//! the transaction. If it dies here, the transaction rolls back or its outcome is unknown; both times the batch runs again, and the
//! claims tell.
//!
//! Invariant: after COMMIT every record of the batch is settled or given back, and the frontier has not passed one given back. A
//! transaction whose ownership row is not ours claims nothing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use actix::prelude::*;
use tracing::{debug, info, warn};

use crate::crash::CrashPoint;
use crate::handler::{Answers, Handler as Business, StopFlag};
use crate::held::RetryPolicy;
use crate::metrics;
use crate::pipeline::due::{Which, run_held};
use crate::pipeline::form::{Claiming, Forms};
use crate::pipeline::offset::{Confirmed, OffsetActor};
use crate::pipeline::refusal::{Refusal, Try};
use crate::pipeline::requests::run_requests;
use crate::pipeline::window::{Position, WindowBatch};
use crate::pipeline::windows::run_windows;
use crate::record::{Epoch, Holds, NextOffset, Offset, Skips, SourceId};
use crate::retention::Days;
use crate::spans::Spans;
use crate::status::Status;
use crate::store::consumed_partitions::Doubt;
use crate::store::held_turns::OpenHeld;
use crate::store::processed_events::ClaimTable;
use crate::store::{DbError, ErrorClass, Form, PooledSession, Store, TimeLimits, TransactionError};

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

/// Run the batches of several partitions' windows in one transaction. What became of each comes back in their order.
#[derive(Message, Debug)]
#[rtype(result = "Vec<Done>")]
pub struct RunTogether<A>(pub Vec<RunBatch<A>>);

/// What became of a batch.
#[derive(Debug)]
pub enum Done {
    /// It has committed.
    Settled(Settled),
    /// It could not share its transaction with other partitions; nothing was written. Run it again in one of its own.
    Apart,
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

/// The actor: one transaction at a time.
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

impl<A> RunBatch<A> {
    /// Its records, if they are of the window.
    #[must_use]
    pub const fn window(&self) -> Option<&WindowBatch> {
        match &self.work {
            Work::Window(window) => Some(window),
            Work::Requests | Work::Held { .. } => None,
        }
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

impl<H: Business> Handler<RunTogether<H::Answer>> for DedupActor<H> {
    type Result = AtomicResponse<Self, Vec<Done>>;

    fn handle(&mut self, RunTogether(batches): RunTogether<H::Answer>, _: &mut Self::Context) -> Self::Result {
        let run = run_together(Arc::clone(&self.engine), self.offsets.clone(), batches, self.kept());
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
        let mut session = match session(&engine, kept.take()).await {
            Ok(session) => session,
            Err(error) => return (give_up(BatchError::Database(error)), None),
        };
        let begun = Instant::now();
        // What COMMIT would write, should its answer be lost.
        let mut perhaps = Vec::new();
        let result = match &batch.work {
            Work::Window(window) => {
                let this = Try { claiming, refusal: alone.as_ref() };
                run_windows(&engine, &mut session, (&[&batch], &[window]), this, &mut perhaps).await.map(only)
            }
            Work::Requests => run_requests(&engine, &mut session, &batch).await,
            Work::Held { limit, requested_only } => {
                let which = Which { limit: *limit, requested_only: *requested_only, refusal: alone.as_ref() };
                run_held(&engine, &mut session, &batch, which, &mut days).await
            }
        };
        let done = match result {
            Ok(settled) => {
                confirm(&offsets, &batch, &settled).await;
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
                Done::Again(Again { error: error.to_string(), rebump: true, contention: false, perhaps: perhaps.pop() })
            }
        };
        return (done, None);
    }
}

/// Runs batches of several windows in one transaction, plainly. When it is rolled back, each of them runs alone; only the loss of the
/// connection and the unknown end of a COMMIT are everybody's.
async fn run_together<H: Business>(
    engine: Arc<Engine<H>>,
    offsets: Addr<OffsetActor>,
    batches: Vec<RunBatch<H::Answer>>,
    kept: Option<PooledSession>,
) -> (Vec<Done>, Option<PooledSession>) {
    let all = |done: &dyn Fn(usize) -> Done| (0..batches.len()).map(done).collect::<Vec<_>>();
    let again = |error: &DbError, rebump, perhaps: &[NextOffset]| {
        let error = error.to_string();
        all(&|at| {
            let (error, perhaps) = (error.clone(), perhaps.get(at).copied());
            Done::Again(Again { error, rebump, contention: false, perhaps })
        })
    };
    let mut session = match session(&engine, kept).await {
        Ok(session) => session,
        Err(error) => return (again(&error, error.class() == ErrorClass::Connection, &[]), None),
    };
    let windows: Vec<&WindowBatch> = batches.iter().filter_map(RunBatch::window).collect();
    assert_eq!(windows.len(), batches.len(), "only windows share a transaction");
    let mut perhaps = Vec::new();
    let this = Try { claiming: Claiming::Optimistic, refusal: None };
    let runs: Vec<&RunBatch<H::Answer>> = batches.iter().collect();
    match run_windows(&engine, &mut session, (&runs, &windows), this, &mut perhaps).await {
        Ok(settled) => {
            for (batch, settled) in batches.iter().zip(&settled) {
                confirm(&offsets, batch, settled).await;
            }
            (settled.into_iter().map(Done::Settled).collect(), Some(session))
        }
        Err(TransactionError::CommitUnknown(error)) => {
            let partitions = batches.len();
            warn!(partitions, %error, "nobody knows whether COMMIT happened: the batches run again and the claims tell");
            (again(&error, true, &perhaps), None)
        }
        Err(TransactionError::Begin(error) | TransactionError::Body(BatchError::Database(error)))
            if error.class() == ErrorClass::Connection && !error.is_contention() =>
        {
            (again(&error, true, &[]), None)
        }
        Err(error) => {
            debug!(partitions = batches.len(), %error, "rolled back: each partition goes on in a transaction of its own");
            if matches!(&error, TransactionError::Body(error) if shows_a_taken_key(error)) {
                metrics::claims(metrics::Claims::Taken);
            }
            (all(&|_| Done::Apart), session.is_settled().then_some(session))
        }
    }
}

/// The connection of the last batch, or another.
async fn session<H: Business>(engine: &Engine<H>, kept: Option<PooledSession>) -> Result<PooledSession, DbError> {
    match kept {
        Some(session) => Ok(session),
        None => Ok(engine.store.claims.get().await?),
    }
}

/// Tells the OffsetActor, after COMMIT.
async fn confirm<A>(offsets: &Addr<OffsetActor>, batch: &RunBatch<A>, settled: &Settled) {
    if let Some(frontier) = settled.frontier {
        let confirmed = Confirmed { partition: batch.partition, epoch: batch.epoch, next_offset: frontier.next_offset };
        // An OffsetActor that is gone ends the process by its death notice.
        let _ = offsets.send(confirmed).await;
        CrashPoint::Confirmed.passed();
    }
}

/// What became of the only one.
fn only(mut settled: Vec<Settled>) -> Settled {
    let Some(settled) = settled.pop() else { unreachable!("one for each batch") };
    settled
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
