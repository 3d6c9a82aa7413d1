//! The lives of the partitions: who owns what, since when, and what happens when that ends.
//!
//! In: what librdkafka asks for, and reports of PartitionActors that cannot go on. Out: actors at their positions, answers to the poll
//! thread. It owns the map from partition to actor. If it dies, the process ends.
//!
//! Invariant: epochs come from the database alone, and bumps of one partition are serial. An answer to an outdated assign, or of an
//! earlier start of a partition, changes nothing.

use std::collections::BTreeMap;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Weak};
use std::time::Duration;

use actix::prelude::*;
use futures_util::future::join_all;
use rdkafka::consumer::{BaseConsumer, Consumer};
use tokio::sync::{mpsc, oneshot};
use tracing::{error, info, warn};

use crate::app::{DeathNotice, Fatal};
use crate::config::Start;
use crate::handler::{Answers, Handler as Business, StopFlag};
use crate::metrics;
use crate::pipeline::command::{Command, PollEvent, Route};
use crate::pipeline::offset::{Confirmed, OffsetActor, Release, Track};
use crate::pipeline::partition::{Drain, PartitionActor, Positioned, Requested, Wrote};
use crate::pipeline::rebalance::{Rebalance, Rebalances};
use crate::pipeline::takeover::{Placed, Takeover};
use crate::pipeline::workers::Workers;
use crate::record::{Epoch, NextOffset, SourceId};
use crate::status::{Readiness, Status};
use crate::store::{DbError, held_requests};

/// The wait before a partition that could not go on is taken up again, so that a fault that repeats does not spin.
const RESTART_WAIT: Duration = Duration::from_millis(200);

/// How often the database is asked whether operators want something.
const REQUESTS: Duration = Duration::from_secs(1);

/// How often in a row actors may die on a partition that gets no further; then it stops.
const DEATHS: u32 = 5;

/// Why a PartitionActor ended by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Report {
    /// Its row is not ours any more.
    Fenced,
    /// The database is not in the state that it left it in.
    WentBack(String),
    /// Records may be missing.
    ChainBroken,
    /// It, or the DedupActor that ran its batch, panicked.
    Died,
    /// A person must look.
    Stop(String),
}

/// A report and who sent it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reported {
    /// The partition.
    pub partition: i32,
    /// Which start of it.
    pub run: u64,
    /// What happened.
    pub report: Report,
}

/// Drain everything, commit, leave the group. Answered when the consumer is closed.
#[derive(Message, Debug)]
#[rtype(result = "()")]
pub struct Shutdown;

/// What the Supervisor works with.
#[derive(Debug)]
pub struct Wiring<H: Business> {
    /// The DedupActors.
    pub workers: Arc<Workers<H>>,
    /// Who commits.
    pub offsets: Addr<OffsetActor>,
    /// To the poll thread.
    pub commands: Sender<Command>,
    /// For questions to the broker; the poll thread owns it.
    pub consumer: Weak<BaseConsumer<Rebalances>>,
    /// Where a new group starts.
    pub start: Start,
    /// How long a drain may take.
    pub drain: Duration,
    /// Partitions for people.
    pub status: Status,
    /// Latches for probes.
    pub readiness: Readiness,
    /// Where the end of the process is asked for.
    pub fatal: Fatal,
}

/// The actor.
#[derive(Debug)]
pub struct Supervisor<H: Business> {
    wiring: Wiring<H>,
    events: Option<mpsc::UnboundedReceiver<PollEvent>>,
    reports: (mpsc::UnboundedSender<Reported>, Option<mpsc::UnboundedReceiver<Reported>>),
    partitions: BTreeMap<i32, Owned<H>>,
    runs: u64,
    closed: Vec<oneshot::Sender<()>>,
    _death: DeathNotice,
}

#[derive(Debug)]
struct Owned<H: Business> {
    run: u64,
    life: Life<H>,
    /// Outlive the actors, so that nobody is called twice for want of a memory.
    answers: Answers<H::Answer>,
    wrote: Wrote,
    stop: StopFlag,
    /// Held while the partition is bumped: bumps of one partition are serial.
    bumping: Arc<tokio::sync::Mutex<()>>,
    /// Where it started last, and how often an actor has died since it last got further.
    deaths: (NextOffset, u32),
}

#[derive(Debug)]
enum Life<H: Business> {
    Starting,
    Running {
        actor: Addr<PartitionActor<H>>,
        source: SourceId,
        epoch: Epoch,
    },
    /// Waits for a person. If it was running, its actor may live on, for what operators ask for.
    Stopped {
        serving: Option<(Addr<PartitionActor<H>>, SourceId)>,
    },
}

impl<H: Business> Supervisor<H> {
    /// A Supervisor that listens to the poll thread.
    #[must_use]
    pub fn new(wiring: Wiring<H>, events: mpsc::UnboundedReceiver<PollEvent>, death: DeathNotice) -> Self {
        let (sender, receiver) = mpsc::unbounded_channel();
        Self {
            wiring,
            events: Some(events),
            reports: (sender, Some(receiver)),
            partitions: BTreeMap::new(),
            runs: 0,
            closed: Vec::new(),
            _death: death,
        }
    }

    fn rebalanced(&mut self, generation: u64, rebalance: Rebalance, ctx: &mut Context<Self>) {
        match rebalance {
            Rebalance::Assign(partitions) => {
                metrics::rebalance(metrics::Rebalance::Assign, partitions.len());
                self.assign(generation, partitions, ctx);
            }
            Rebalance::Revoke { partitions, lost } => {
                let kind = if lost { metrics::Rebalance::Lost } else { metrics::Rebalance::Revoke };
                metrics::rebalance(kind, partitions.len());
                let commands = self.wiring.commands.clone();
                let released = self.release(partitions, lost);
                ctx.spawn(released.into_actor(self).map(move |(), _, _| {
                    // A poll thread that is gone ends the process by its own death notice.
                    let _ = commands.send(Command::Unassign { generation });
                }));
            }
        }
    }

    /// Takes partitions over: bump, base, actor; then the poll thread is told to assign them all.
    fn assign(&mut self, generation: u64, partitions: Vec<i32>, ctx: &mut Context<Self>) {
        let takeovers: Vec<Takeover> = partitions.iter().map(|partition| self.begin(*partition, None)).collect();
        let placed = self.take_over(takeovers);
        ctx.spawn(placed.into_actor(self).map(move |placed, actor, _| {
            let Some(placed) = placed else { return }; // revoked meanwhile
            let routes = placed.into_iter().filter_map(|placed| actor.place(placed)).collect();
            let _ = actor.wiring.commands.send(Command::Assign { generation, routes });
            actor.wiring.readiness.set(Readiness::ASSIGNMENT);
        }));
    }

    /// Positions the partitions and makes them known to the OffsetActor; `None` when one was revoked meanwhile.
    fn take_over(&self, takeovers: Vec<Takeover>) -> impl Future<Output = Option<Vec<Placed>>> + use<H> {
        let (workers, consumer, start) = (Arc::clone(&self.wiring.workers), self.wiring.consumer.clone(), self.wiring.start);
        let offsets = self.wiring.offsets.clone();
        async move {
            let placed = Takeover::run_all(takeovers, workers.engine(), &consumer, start).await?;
            track(&offsets, &placed).await;
            Some(placed)
        }
    }

    /// Begins a start of the partition; `after` is the row and epoch that a compare-and-set must still find.
    fn begin(&mut self, partition: i32, after: Option<(SourceId, Epoch)>) -> Takeover {
        self.runs += 1;
        let run = self.runs;
        let stop = StopFlag::default();
        let owned = self.partitions.entry(partition).or_insert_with(|| Owned {
            run,
            life: Life::Starting,
            answers: Answers::default(),
            wrote: Wrote::default(),
            stop: stop.clone(),
            bumping: Arc::default(),
            deaths: (NextOffset(0), 0),
        });
        owned.run = run;
        owned.life = Life::Starting;
        owned.stop = stop.clone();
        Takeover { partition, run, after, wrote: owned.wrote.clone(), cancelled: stop, bumping: Arc::clone(&owned.bumping) }
    }

    /// Starts the actor of a partition that is positioned, or says why it stands still. Out: the partition's route.
    fn place(&mut self, placed: Placed) -> Option<(i32, NextOffset, Option<Route>)> {
        let Placed { partition, run, outcome, fallback } = placed;
        let owned = self.partitions.get_mut(&partition).filter(|owned| owned.run == run)?;
        match outcome {
            Ok(at) => {
                self.wiring.status.partition_owned(partition, at.epoch);
                self.wiring.status.frontier(partition, at.epoch, at.base);
                if owned.deaths.0 != at.base {
                    owned.deaths = (at.base, 0);
                }
                info!(partition, epoch = at.epoch.0, base = at.base.0, "partition taken over");
                let (workers, reports) = (Arc::clone(&self.wiring.workers), self.reports.0.clone());
                let actor = PartitionActor::new(&at, run, workers, owned.answers.clone(), owned.stop.clone(), reports).start();
                let route = actor.clone().recipient();
                owned.life = Life::Running { actor, source: at.source, epoch: at.epoch };
                Some((partition, at.base, Some(route)))
            }
            Err(reason) => {
                self.stop_partition(partition, &reason);
                Some((partition, fallback, None))
            }
        }
    }

    fn reported(&mut self, reported: Reported, ctx: &mut Context<Self>) {
        let Reported { partition, run, report } = reported;
        let Some(owned) = self.partitions.get_mut(&partition).filter(|owned| owned.run == run) else { return };
        let Life::Running { source, epoch, .. } = owned.life else { return };
        owned.deaths.1 += u32::from(report == Report::Died);
        let deaths = owned.deaths.1;
        let _ = self.wiring.commands.send(Command::Cut { partition });
        match report {
            Report::Stop(reason) => self.stop_partition(partition, &reason),
            Report::Died if deaths < DEATHS => {
                error!(partition, "an actor died on this partition; another takes its place");
                self.restart(partition, Some((source, epoch)), ctx);
            }
            Report::Died => {
                self.stop_partition(partition, &format!("actors died {DEATHS} times in a row on this partition; the log says why"))
            }
            Report::ChainBroken => self.restart(partition, Some((source, epoch)), ctx),
            Report::Fenced => {
                warn!(partition, "the ownership row has another epoch");
                self.ask_whether_ours(partition, run, ctx);
            }
            Report::WentBack(words) => {
                warn!(partition, words, "the database is not as this owner left it: the partition is taken over anew");
                self.ask_whether_ours(partition, run, ctx);
            }
        }
    }

    /// Somebody else has the row, or it is another row now. Only Kafka can say whether the partition is still ours.
    fn ask_whether_ours(&mut self, partition: i32, run: u64, ctx: &mut Context<Self>) {
        let (answer, answered) = oneshot::channel();
        let _ = self.wiring.commands.send(Command::Probe { partition, answer });
        ctx.spawn(answered.into_actor(self).map(move |ours, actor, ctx| {
            let current = actor.partitions.get(&partition).is_some_and(|owned| owned.run == run);
            if ours == Ok(true) && current {
                actor.restart(partition, None, ctx);
            }
        }));
    }

    /// Takes an assigned partition up again, at its frontier.
    fn restart(&mut self, partition: i32, after: Option<(SourceId, Epoch)>, ctx: &mut Context<Self>) {
        let takeover = self.begin(partition, after);
        let run = takeover.run;
        let taken_over = self.take_over(vec![takeover]);
        let placed = async move {
            actix::clock::sleep(RESTART_WAIT).await;
            taken_over.await
        };
        ctx.spawn(placed.into_actor(self).map(move |placed, actor, ctx| match placed {
            None => {} // revoked meanwhile
            Some(placed) if placed.is_empty() => actor.ask_whether_ours(partition, run, ctx),
            Some(placed) => {
                for (partition, base, route) in placed.into_iter().filter_map(|placed| actor.place(placed)).collect::<Vec<_>>() {
                    let _ = actor.wiring.commands.send(Command::Reposition { partition, base, route });
                }
            }
        }));
    }

    fn stop_partition(&mut self, partition: i32, reason: &str) {
        error!(partition, reason, "partition stopped: it waits for a person");
        if let Some(owned) = self.partitions.get_mut(&partition) {
            let serving = match std::mem::replace(&mut owned.life, Life::Starting) {
                Life::Running { actor, source, .. } => Some((actor, source)),
                Life::Starting | Life::Stopped { .. } => None,
            };
            owned.life = Life::Stopped { serving };
        }
        self.wiring.status.stopped(partition, reason);
        self.show_stopped();
    }

    /// Readiness is red while any partition of ours is stopped.
    fn show_stopped(&self) {
        let stopped: Vec<_> = self
            .partitions
            .iter()
            .filter(|(_, owned)| matches!(owned.life, Life::Stopped { .. }))
            .map(|(p, _)| p.to_string())
            .collect();
        if stopped.is_empty() {
            self.wiring.readiness.set(Readiness::PARTITIONS);
        } else {
            self.wiring.readiness.clear(Readiness::PARTITIONS, format!("stopped: {}; /status says why", stopped.join(", ")));
        }
    }

    /// Drains the partitions within the budget, commits what settled unless they are lost, and forgets them.
    fn release(&mut self, partitions: Vec<i32>, lost: bool) -> impl Future<Output = ()> + use<H> {
        let mut drains = Vec::new();
        for partition in &partitions {
            let Some(owned) = self.partitions.remove(partition) else { continue };
            owned.stop.raise();
            if let Some((actor, _)) = owned.life.actor() {
                let actor = actor.clone();
                drains.push(async move {
                    // An actor that has ended is drained.
                    let _ = actor.send(Drain).await;
                });
            }
        }
        self.show_stopped();
        let (offsets, consumer, status) = (self.wiring.offsets.clone(), self.wiring.consumer.clone(), self.wiring.status.clone());
        let budget = self.wiring.drain;
        async move {
            if lost {
                // Forgotten before the drain: nothing more is committed for them (CASES B04).
                let _ = offsets.send(Release { partitions: partitions.clone(), lost }).await;
            }
            if tokio::time::timeout(budget, join_all(drains)).await.is_err() {
                warn!(?partitions, "the drain took too long; what has not settled is left to the next owner");
            }
            let lost = lost || consumer.upgrade().is_none_or(|consumer| consumer.assignment_lost());
            let _ = offsets.send(Release { partitions: partitions.clone(), lost }).await;
            for partition in partitions {
                status.partition_gone(partition);
            }
        }
    }

    /// Tells the partitions for which there are requests. What cannot be asked or told now is a second later.
    fn look_for_requests(&self, ctx: &mut Context<Self>) {
        let workers = Arc::clone(&self.wiring.workers);
        let requested = async move {
            let engine = workers.engine();
            let mut session = engine.store.control.get().await.map_err(DbError::from)?;
            held_requests::requested(&mut session, &engine.group, &engine.topic).await
        };
        ctx.spawn(requested.into_actor(self).map(|requested, actor, ctx| {
            for source in requested.unwrap_or_default() {
                let lives = actor.partitions.values().filter_map(|owned| owned.life.actor());
                if let Some((address, _)) = lives.into_iter().find(|(_, of)| *of == source) {
                    let _ = address.try_send(Requested);
                }
            }
            ctx.run_later(REQUESTS, |actor, ctx| actor.look_for_requests(ctx));
        }));
    }

    fn out_of_range(&mut self, ctx: &mut Context<Self>) {
        warn!("an offset lies outside the log; every partition is positioned anew");
        let running: Vec<_> = self
            .partitions
            .iter()
            .filter_map(|(partition, owned)| match owned.life {
                Life::Running { source, epoch, .. } => Some((*partition, source, epoch)),
                Life::Starting | Life::Stopped { .. } => None,
            })
            .collect();
        for (partition, source, epoch) in running {
            if let Some(owned) = self.partitions.get(&partition) {
                owned.stop.raise();
            }
            let _ = self.wiring.commands.send(Command::Cut { partition });
            self.restart(partition, Some((source, epoch)), ctx);
        }
    }
}

/// OffsetActor knows a partition before its first record is handed on.
async fn track(offsets: &Addr<OffsetActor>, placed: &[Placed]) {
    for placed in placed {
        if let Ok(Positioned { partition, epoch, committed, base, written, .. }) = &placed.outcome {
            let _ = offsets.send(Track { partition: *partition, epoch: *epoch, committed: *committed }).await;
            // Settled before, and Kafka was never told: with no record to come, nobody else would tell it.
            if written.surely.is_some_and(|settled| *base <= settled) && *committed < Some(*base) {
                let _ = offsets.send(Confirmed { partition: *partition, epoch: *epoch, next_offset: *base }).await;
            }
        }
    }
}

impl<H: Business> Life<H> {
    /// The actor, and the row of its partition.
    fn actor(&self) -> Option<(&Addr<PartitionActor<H>>, SourceId)> {
        match self {
            Self::Running { actor, source, .. } => Some((actor, *source)),
            Self::Stopped { serving } => serving.as_ref().map(|(actor, source)| (actor, *source)),
            Self::Starting => None,
        }
    }
}

impl<H: Business> Actor for Supervisor<H> {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        if let Some(mut events) = self.events.take() {
            ctx.add_stream(futures_util::stream::poll_fn(move |cx| events.poll_recv(cx)));
        }
        if let Some(mut reports) = self.reports.1.take() {
            ctx.add_stream(futures_util::stream::poll_fn(move |cx| reports.poll_recv(cx)));
        }
        self.look_for_requests(ctx);
    }
}

impl<H: Business> StreamHandler<PollEvent> for Supervisor<H> {
    fn handle(&mut self, event: PollEvent, ctx: &mut Self::Context) {
        match event {
            PollEvent::Asked { generation, rebalance } => self.rebalanced(generation, rebalance, ctx),
            PollEvent::OutOfRange => self.out_of_range(ctx),
            PollEvent::Fatal(reason) => self.wiring.fatal.end(reason),
            PollEvent::Closed => {
                for closed in self.closed.drain(..) {
                    let _ = closed.send(());
                }
            }
        }
    }

    /// The poll thread's end is its own death notice's business.
    fn finished(&mut self, _: &mut Self::Context) {}
}

impl<H: Business> StreamHandler<Reported> for Supervisor<H> {
    fn handle(&mut self, reported: Reported, ctx: &mut Self::Context) {
        self.reported(reported, ctx);
    }
}

impl<H: Business> Handler<Shutdown> for Supervisor<H> {
    type Result = ResponseFuture<()>;

    fn handle(&mut self, Shutdown: Shutdown, _: &mut Self::Context) -> Self::Result {
        let (closed, is_closed) = oneshot::channel();
        self.closed.push(closed);
        let released = self.release(self.partitions.keys().copied().collect(), false);
        let commands = self.wiring.commands.clone();
        Box::pin(async move {
            released.await;
            let _ = commands.send(Command::Close);
            // A poll thread that died instead has ended as well.
            let _ = is_closed.await;
        })
    }
}
