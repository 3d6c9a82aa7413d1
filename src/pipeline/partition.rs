//! One partition: its window, its held events that are due, one batch in flight.
//!
//! In: records from the poll thread, the end of each batch. Out: batches for a DedupActor, and reports to the Supervisor when this actor
//! cannot go on; stopped, it does only what operators ask for. It owns the window. If it dies here, the Supervisor starts another at the frontier; the records are read again.
//!
//! Invariant: one batch is in flight, be it of the window or of held events, and no batch is taken once the stop flag is raised.

use std::sync::Arc;
use std::time::{Duration, Instant};

use actix::prelude::*;
use tokio::sync::{mpsc, oneshot};
use tracing::{error, info, warn};

use crate::crash::CrashPoint;
use crate::handler::{Answers, Handler as Business, StopFlag};
use crate::metrics;
use crate::pipeline::agenda::{Agenda, Next};
use crate::pipeline::command::Records;
use crate::pipeline::dedup::{Again, Done, RunBatch, Settled, Work, Written};
use crate::pipeline::form::{Claiming, Forms};
use crate::pipeline::lives::{Report, Reported, Wrote};
use crate::pipeline::refusal::Refusal;
use crate::pipeline::takeover::{Positioned, after_bump};
use crate::pipeline::window::{Refused, Window};
use crate::pipeline::workers::{Turn, Workers};
use crate::record::{Epoch, Holds, NextOffset, Skips, SourceId};
use crate::status::Turn as Shown;
use crate::store::DbError;
use crate::store::consumed_partitions::{self, Doubt, Ownership};
use crate::store::held_turns::OpenHeld;

/// Hand-overs that may wait; more makes the poll thread wait.
const MAILBOX: usize = 64;
/// The first batch has so many, and one after an interruption: troubles come in swarms, and what is done quickly is done before the next
/// one. After one that gave events back it is the least: the first may be refused for itself, and another must show it.
const PROBE_BATCH: usize = 8;
/// Beyond so many events a batch grows only where it is quick: what they save the database is little, and a rebalance, a lock and whoever
/// waits for an answer wait for all of it.
const ROOMY_BATCH: usize = 512;
/// A larger batch that takes longer is followed by a smaller one; it grows again when it takes less than half of this.
const LONG_BATCH: Duration = Duration::from_millis(500);
/// By what a batch shrinks after another transaction's lock: in three steps the event in question stands alone.
const CONTENDED_PART: usize = 8;
/// Waits between tries while the database is away: from the first to the longest.
const OUTAGE_BACKOFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
/// Once the database has answered again, waits go on as after so many outages, until a batch has committed.
const BACK: u32 = 2;

/// The actor.
#[derive(Debug)]
pub struct PartitionActor<H: Business> {
    workers: Arc<Workers<H>>,
    supervisor: mpsc::UnboundedSender<Reported>,
    /// Which start of this partition this is; reports of an earlier one are ignored.
    run: u64,
    partition: i32,
    source: SourceId,
    epoch: Epoch,
    written: Written,
    skips: Arc<Skips>,
    holds: Arc<Holds>,
    doubt: Doubt,
    replayed_below: Option<NextOffset>,
    wrote: Wrote,
    window: Window,
    answers: Answers<H::Answer>,
    forms: Forms,
    stop: StopFlag,
    batch_max: usize,
    /// When the last batch began.
    begun: Instant,
    agenda: Agenda,
    /// What was open when it was taken over, until the actor takes it in.
    opening: OpenHeld,
    /// An operator wants nothing of it consumed. Whoever changes that takes the epoch, and another actor comes.
    paused_by: Option<String>,
    /// The downstream is not to be called.
    paused: Option<String>,
    /// The downstream could not be called for what was given back.
    deferred: Option<String>,
    state: State,
    outages: u32,
    /// The last batch did not commit in a transaction that it shared, or at all, so the next one has its own.
    apart: bool,
    drained: Option<oneshot::Sender<()>>,
    /// Why it ends when the batch that is in flight has ended.
    ending: Option<Report>,
    timer: Option<SpawnHandle>,
    alive: DiedNotice,
}

/// What the actor does now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Nothing is in flight; a batch starts when there is work.
    Idle,
    /// A batch may start as soon as a DedupActor is free; nothing of it is in flight, so a drain does not wait for it.
    Queued,
    /// A batch is in flight, or waits for the database.
    Busy,
    /// Nothing starts any more.
    Ended,
}

/// Tells the Supervisor when the actor ends without having said why.
#[derive(Debug)]
struct DiedNotice {
    partition: i32,
    run: u64,
    supervisor: mpsc::UnboundedSender<Reported>,
    armed: bool,
}

/// Operators have asked for something.
#[derive(Message, Clone, Copy, Debug)]
#[rtype(result = "()")]
pub struct Requested;

/// Start nothing more, end what runs, and answer when it has ended.
#[derive(Message, Debug)]
#[rtype(result = "()")]
pub struct Drain;

impl<H: Business> PartitionActor<H> {
    /// An actor at its position. `stop` is shared with whoever may end it; `answers` outlive it.
    #[must_use]
    pub fn new(
        at: &Positioned,
        run: u64,
        workers: Arc<Workers<H>>,
        answers: Answers<H::Answer>,
        stop: StopFlag,
        supervisor: mpsc::UnboundedSender<Reported>,
    ) -> Self {
        let mut agenda = Agenda::new(workers.engine().held_max_open);
        if at.paused.is_some() {
            agenda.pause();
        }
        Self {
            run,
            partition: at.partition,
            source: at.source,
            epoch: at.epoch,
            written: at.written,
            skips: Arc::new(at.skips.clone()),
            holds: Arc::new(at.holds.clone()),
            doubt: at.doubt,
            replayed_below: at.replayed_below,
            wrote: at.wrote.clone(),
            window: at.witness.map_or_else(|| Window::positioned(at.base), Window::behind),
            answers,
            forms: Forms::default(),
            stop,
            batch_max: PROBE_BATCH.min(workers.engine().batch_max),
            begun: Instant::now(),
            agenda,
            workers,
            opening: at.held.clone(),
            paused_by: at.paused.as_ref().map(|paused| format!("paused {paused}")),
            paused: None,
            deferred: None,
            state: State::Idle,
            outages: 0,
            apart: false,
            drained: None,
            ending: None,
            timer: None,
            alive: DiedNotice { partition: at.partition, run, supervisor: supervisor.clone(), armed: true },
            supervisor,
        }
    }

    /// Starts a batch if nothing is in flight and something is to do.
    fn pump(&mut self, ctx: &mut Context<Self>) {
        if self.state != State::Idle {
            return;
        }
        if self.stop.is_raised() {
            self.end_if_draining(ctx);
            return;
        }
        if let Some(report) = self.ending.take() {
            self.end(report, ctx);
            return;
        }
        let next = self.agenda.next(self.window.is_empty(), Instant::now());
        match next {
            Next::Requests => {}
            Next::Held { .. } | Next::Window if self.pauses(ctx) => return,
            Next::Held { .. } | Next::Window => {}
            Next::Wait(wait) => return self.wake(wait, ctx),
            Next::Nothing => return,
        }
        self.state = State::Queued;
        self.show_turn(Shown::Queued(Instant::now()));
        let asked = Instant::now();
        let (workers, shares) = (Arc::clone(&self.workers), (next == Next::Window && self.shares()).then_some(self.window.len()));
        // The batch is taken once its turn has come: what arrives while waiting still joins it.
        let batch = async move { workers.turn(shares).await }.into_actor(self).then(move |turn, actor, _| {
            let batch = actor.next_batch(&turn);
            if batch.is_some() {
                metrics::stage(metrics::Stage::Wait, asked.elapsed());
            }
            actor.state = State::Busy;
            actor.show_turn(Shown::Running);
            actor.show_in_flight(batch.as_ref());
            let shares = actor.shares() && batch.as_ref().is_some_and(|batch| batch.window().is_some());
            async move {
                match batch {
                    Some(batch) => Some(turn.run(batch, shares).await),
                    None => None,
                }
            }
            .into_actor(actor)
        });
        ctx.spawn(batch.map(|done, actor, ctx| actor.take(done, ctx)));
    }

    /// While the downstream is not to be called, nothing is claimed for it either.
    fn pauses(&mut self, ctx: &mut Context<Self>) -> bool {
        let engine = self.workers.engine();
        let pause = engine.handler.pause().and_then(|pause| Some((pause.wait?, pause.reason)));
        let reason = pause.as_ref().map(|(_, reason)| reason.clone());
        if self.paused != reason {
            self.paused = reason;
            self.show_pause();
        }
        let Some((wait, _)) = pause else { return false };
        self.wake(wait, ctx);
        true
    }

    /// Whether the next batch may go with those of other partitions, if it is of the window: where all of it is likely to be new.
    fn shares(&self) -> bool {
        let allowed = self.workers.engine().handler.shares_transactions();
        allowed && !self.apart && self.forms.next() == Claiming::Optimistic
    }

    /// The batch to run now; nothing once the stop flag is raised.
    fn next_batch(&mut self, turn: &Turn<H>) -> Option<RunBatch<H::Answer>> {
        if self.stop.is_raised() {
            return None;
        }
        let next = self.agenda.next(self.window.is_empty(), Instant::now());
        let work = match next {
            Next::Window => Work::Window(self.window.take(turn.take(self.batch_max.min(self.window.len())))?),
            // That came up while it waited. It asks again, for a transaction of its own.
            Next::Requests | Next::Held { .. } if turn.is_shared() => return None,
            Next::Requests => Work::Requests,
            Next::Held { requested_only } => Work::Held { limit: self.batch_max, requested_only },
            Next::Wait(_) | Next::Nothing => return None,
        };
        self.agenda.begun(next);
        self.begun = Instant::now();
        Some(RunBatch {
            partition: self.partition,
            source: self.source,
            epoch: self.epoch,
            written: self.written,
            skips: Arc::clone(&self.skips),
            holds: Arc::clone(&self.holds),
            doubt: self.doubt,
            replayed_below: self.replayed_below,
            work,
            held: self.agenda.held(),
            answers: self.answers.clone(),
            forms: self.forms.clone(),
            stop: self.stop.clone(),
        })
    }

    /// The end of a batch: the one place where it becomes a state.
    fn take(&mut self, done: Option<Done>, ctx: &mut Context<Self>) {
        self.state = State::Idle;
        self.show_turn(Shown::Resting);
        self.show_in_flight(None);
        match done {
            None => {}
            Some(Done::Settled(settled)) => self.settle(settled),
            Some(Done::Apart) => {
                self.window.abandon();
                self.apart = true;
            }
            Some(Done::Again(again)) => {
                self.window.abandon();
                self.recover(again, ctx);
            }
            Some(Done::Refused(refusal)) => self.halve(&refusal),
            Some(Done::Fenced) => self.end(Report::Fenced, ctx),
            Some(Done::WentBack(words)) => self.end(Report::WentBack(words), ctx),
            Some(Done::Died) => self.end(Report::Died, ctx),
            Some(Done::Stop { reason, serves }) => self.stop_here(reason, serves, ctx),
        }
        self.pump(ctx);
    }

    fn settle(&mut self, settled: Settled) {
        let now = Instant::now();
        if let Some(frontier) = settled.frontier {
            self.window.settle(&settled.given_back);
            assert_eq!(self.window.frontier().next_offset, frontier.next_offset, "the row and the window agree on the frontier");
            self.written = Written::known(Some(frontier.next_offset));
            self.wrote.note(frontier.next_offset);
            self.workers.engine().status.frontier(self.partition, self.epoch, frontier.next_offset);
        } else {
            self.workers.engine().status.progressed(self.partition, self.epoch);
        }
        self.show_window();
        self.agenda.settled(settled.wait, now);
        self.outages = 0;
        self.apart = false;
        self.deferred = settled.wait.map(|wait| {
            format!(
                "the downstream could not be called, and {} records wait, for {} ms",
                settled.given_back.len(),
                wait.as_millis()
            )
        });
        if let Some(held) = settled.held {
            self.know(held, now);
        }
        self.show_pause();
        // After events that were not started, or rows that were refused, the next batch is small, and grows again.
        let most = if settled.given_back.is_empty() {
            next_size(self.batch_max, self.begun.elapsed())
        } else {
            (2 * settled.started).max(PROBE_BATCH)
        };
        self.batch_max = most.min(self.workers.engine().batch_max);
    }

    /// Takes in what is open now. Too many: the partition pauses, and says so.
    fn know(&mut self, held: OpenHeld, now: Instant) {
        let paused = self.agenda.too_many().is_some();
        self.workers.engine().status.change(self.partition, self.epoch, |known| known.held_open = held.count);
        self.agenda.know(held, now);
        let too_many = self.agenda.too_many();
        match &too_many {
            Some(reason) if !paused => error!(partition = self.partition, reason, "the partition pauses"),
            None if paused => info!(partition = self.partition, "fewer held events are open: the partition goes on"),
            Some(_) | None => {}
        }
        self.show_pause();
    }

    /// Why nothing moves, for people and for the liveness probe.
    fn show_pause(&self) {
        let reason = self
            .paused_by
            .clone()
            .or_else(|| self.paused.clone())
            .or_else(|| self.agenda.too_many())
            .or_else(|| self.deferred.clone());
        self.workers.engine().status.partition_paused(self.partition, self.epoch, reason);
    }

    /// One of the records is the offender: the next batch has half of them, until it stands alone and is held.
    fn halve(&mut self, refusal: &Refusal) {
        self.window.abandon();
        self.batch_max = (refusal.records / 2).max(1);
        if refusal.held_row.is_some() {
            self.agenda.again();
        }
        warn!(partition = self.partition, records = refusal.records, error = refusal.error, "rolled back; it runs again in halves");
    }

    /// After an outage: wait, take a new epoch where the database may have gone back, and go on with the same window.
    fn recover(&mut self, again: Again, ctx: &mut Context<Self>) {
        self.outages += 1;
        // It may have been too much for one transaction.
        self.apart = true;
        if self.outages == 1 {
            warn!(partition = self.partition, error = again.error, "waiting; the batch runs again");
        }
        self.written.perhaps = again.perhaps.or(self.written.perhaps);
        self.workers.engine().status.partition_paused(self.partition, self.epoch, Some(again.error));
        self.state = State::Busy;
        let wait = if again.contention {
            // It has waited for the lock already. What comes before the event that somebody else holds goes round it in a smaller batch.
            self.batch_max = (self.batch_max.min(self.window.len()) / CONTENDED_PART).max(1);
            OUTAGE_BACKOFF.0
        } else {
            self.batch_max = PROBE_BATCH.min(self.batch_max);
            OUTAGE_BACKOFF.0.saturating_mul(1 << self.outages.min(10)).min(OUTAGE_BACKOFF.1)
        };
        let (workers, source, epoch) = (Arc::clone(&self.workers), self.source, self.epoch);
        let recovered = async move {
            actix::clock::sleep(wait).await;
            if again.rebump { Some(take_new_epoch(&workers, source, epoch).await) } else { None }
        };
        ctx.spawn(recovered.into_actor(self).map(|recovered, actor, ctx| {
            actor.state = State::Idle;
            match recovered {
                None => {}
                Some(Ok(Some(taken))) => actor.go_on(taken, ctx),
                Some(Ok(None)) => actor.end(Report::Fenced, ctx),
                // A drain does not wait for the database.
                Some(Err(_)) if actor.drained.is_some() => {}
                Some(Err(error)) => {
                    actor.recover(Again { error: error.to_string(), rebump: true, contention: false, perhaps: None }, ctx);
                }
            }
            actor.pump(ctx);
        }));
    }

    fn go_on(&mut self, (ownership, held): (Ownership, OpenHeld), ctx: &mut Context<Self>) {
        if let Some(words) = ownership.went_back {
            self.end(Report::WentBack(words), ctx);
        } else if !self.written.allows(ownership.next_offset) {
            let words =
                format!("consumed_partition.next_offset is {:?}, but this owner wrote {:?}", ownership.next_offset, self.written);
            self.end(Report::WentBack(words), ctx);
        } else {
            info!(partition = self.partition, epoch = ownership.epoch.0, "took a new epoch after an outage");
            self.outages = self.outages.min(BACK);
            self.workers.engine().status.epoch(self.partition, self.epoch, ownership.epoch);
            self.epoch = ownership.epoch;
            self.written = Written::known(ownership.next_offset);
            self.skips = Arc::new(ownership.skips);
            self.holds = Arc::new(ownership.holds);
            self.doubt = ownership.doubt;
            self.know(held, Instant::now());
        }
    }

    /// A person must look. Unless the fence or the schema is the cause, what operators ask for is done meanwhile.
    fn stop_here(&mut self, reason: String, serves: bool, ctx: &mut Context<Self>) {
        if !serves || self.agenda.is_stopped() {
            self.end(Report::Stop(reason), ctx);
            return;
        }
        self.agenda.stop();
        self.ending = None;
        self.window = Window::positioned(self.window.frontier().next_offset);
        self.show_window();
        let _ = self.supervisor.send(Reported { partition: self.partition, run: self.run, report: Report::Stop(reason) });
    }

    fn end(&mut self, report: Report, ctx: &mut Context<Self>) {
        self.state = State::Ended;
        self.stop.raise();
        self.alive.armed = false;
        let _ = self.supervisor.send(Reported { partition: self.partition, run: self.run, report });
        self.end_if_draining(ctx);
        ctx.stop();
    }

    fn show_window(&self) {
        let (records, bytes, made_ms) = (self.window.len(), self.window.bytes(), self.window.first_made());
        self.workers.engine().status.window(self.partition, self.epoch, records, bytes, made_ms);
    }

    fn show_in_flight(&self, batch: Option<&RunBatch<H::Answer>>) {
        // How many held events are due only their transaction will know.
        let events = batch.and_then(RunBatch::window).map_or(0, |window| window.records().len());
        self.workers.engine().status.in_flight(self.partition, self.epoch, events);
    }

    fn show_turn(&self, turn: Shown) {
        self.workers.engine().status.turn(self.partition, self.epoch, turn);
    }

    /// Looks again later; a newer look replaces the one that waits.
    fn wake(&mut self, after: Duration, ctx: &mut Context<Self>) {
        if let Some(timer) = self.timer.take() {
            ctx.cancel_future(timer);
        }
        self.timer = Some(ctx.run_later(after, |actor, ctx| {
            actor.timer = None;
            actor.pump(ctx);
        }));
    }

    fn end_if_draining(&mut self, ctx: &mut Context<Self>) {
        if self.state == State::Busy {
            return;
        }
        if let Some(drained) = self.drained.take() {
            self.state = State::Ended;
            self.alive.armed = false;
            // Whoever drains may have run out of patience.
            let _ = drained.send(());
            ctx.stop();
        }
    }
}

/// The most events of the batch after one that could have had `size` and took so long.
fn next_size(size: usize, took: Duration) -> usize {
    if size < ROOMY_BATCH || took < LONG_BATCH / 2 {
        2 * size
    } else if took > LONG_BATCH {
        (size / 2).max(ROOMY_BATCH)
    } else {
        size
    }
}

/// Compare-and-set on the epoch, then what every bump is followed by.
async fn take_new_epoch<H: Business>(
    workers: &Workers<H>,
    source: SourceId,
    epoch: Epoch,
) -> Result<Option<(Ownership, OpenHeld)>, DbError> {
    let engine = workers.engine();
    let mut session = engine.store.control.get().await.map_err(DbError::from)?;
    let Some(ownership) = consumed_partitions::rebump(&mut session, source, epoch, &engine.owner).await? else { return Ok(None) };
    let held = after_bump(&mut session, source).await?;
    Ok(Some((ownership, held)))
}

impl<H: Business> Actor for PartitionActor<H> {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.set_mailbox_capacity(MAILBOX);
        let opening = std::mem::take(&mut self.opening);
        self.know(opening, Instant::now());
        self.pump(ctx);
    }
}

impl<H: Business> Handler<Records> for PartitionActor<H> {
    type Result = ();

    fn handle(&mut self, Records(handed): Records, ctx: &mut Self::Context) {
        if self.ending.is_some() || self.stop.is_raised() || self.agenda.is_stopped() {
            return; // what is not settled is read again, by whoever comes next
        }
        match self.window.offer(handed) {
            Ok(()) => {
                self.show_window();
                CrashPoint::Windowed.passed();
            }
            Err(broken @ Refused::ChainBroken { .. }) => {
                error!(partition = self.partition, %broken, "records may be missing: the partition is read again from its frontier");
                self.ending = Some(Report::ChainBroken);
            }
            Err(other @ Refused::OtherRecord(_)) => self.ending = Some(Report::Stop(other.to_string())),
        }
        self.pump(ctx);
    }
}

impl<H: Business> Handler<Requested> for PartitionActor<H> {
    type Result = ();

    fn handle(&mut self, Requested: Requested, ctx: &mut Self::Context) {
        self.agenda.request();
        self.pump(ctx);
    }
}

impl<H: Business> Handler<Drain> for PartitionActor<H> {
    type Result = ResponseFuture<()>;

    fn handle(&mut self, Drain: Drain, ctx: &mut Self::Context) -> Self::Result {
        let (drained, ended) = oneshot::channel();
        self.stop.raise();
        self.drained = Some(drained);
        self.end_if_draining(ctx);
        Box::pin(async move {
            // An actor that dies while draining has ended too.
            let _ = ended.await;
        })
    }
}

impl Drop for DiedNotice {
    fn drop(&mut self) {
        if self.armed {
            let _ = self.supervisor.send(Reported { partition: self.partition, run: self.run, report: Report::Died });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_grows_beyond_the_roomy_size_only_while_it_is_quick_and_shrinks_no_further_for_being_slow() {
        let [quick, fair, slow] = [100, 400, 600].map(Duration::from_millis);
        assert_eq!([quick, fair, slow].map(|took| next_size(1_024, took)), [2_048, 1_024, 512]);
        assert_eq!(next_size(ROOMY_BATCH, slow), ROOMY_BATCH, "as many calls as may be open at once stay together");
        assert_eq!(next_size(PROBE_BATCH, slow), 2 * PROBE_BATCH, "it was small for another reason");
    }
}
