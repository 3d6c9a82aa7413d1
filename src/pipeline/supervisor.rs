//! The lives of the partitions: who owns what, since when, and what happens when that ends.
//!
//! In: what librdkafka asks for, and reports of PartitionActors that cannot go on. Out: actors at their positions, answers to the poll
//! thread. It owns the map from partition to actor. If it dies, the process ends.
//!
//! Invariant: epochs come from the database alone, and bumps of one partition are serial. An answer to an outdated assign, or of an
//! earlier start of a partition, changes nothing.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use actix::prelude::*;
use futures_util::future::join_all;
use rdkafka::consumer::Consumer;
use tokio::sync::{RwLock, mpsc, oneshot};
use tracing::{error, info, warn};

use crate::app::{DeathNotice, Fatal};
use crate::handler::Handler as Business;
use crate::metrics::{self, Phase};
use crate::pipeline::broker::{ask, log_ends};
use crate::pipeline::client::Client;
use crate::pipeline::command::{Command, PollEvent, Route};
use crate::pipeline::lives::{Life, Lives, Report, Reported};
use crate::pipeline::offset::{OffsetActor, Release, Track};
use crate::pipeline::partition::{Drain, PartitionActor, Requested};
use crate::pipeline::rebalance::Rebalance;
use crate::pipeline::start;
use crate::pipeline::takeover::{Late, Placed, Positioned, Rules, Taken, Takeover};
use crate::pipeline::workers::Workers;
use crate::record::{Epoch, NextOffset, SourceId};
use crate::status::{Readiness, Status};
use crate::store::{DbError, held_requests};

/// The wait before a partition that could not go on is taken up again, so that a fault that repeats does not spin.
const RESTART_WAIT: Duration = Duration::from_millis(200);

/// How long an assign waits for the database. Until it is answered, librdkafka fetches nothing for this member, and its next rebalance,
/// which may be everybody's, waits.
const ASSIGN_PATIENCE: Duration = Duration::from_secs(2);
/// How often the database is asked whether operators want something, and the broker what waits in paused partitions.
const OPERATORS: Duration = Duration::from_secs(1);

/// How often in a row actors may die on a partition that gets no further; then it stops.
const DEATHS: u32 = 5;

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
    pub client: Client,
    /// Where partitions start.
    pub rules: Rules,
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
    partitions: Lives<H>,
    closed: Vec<oneshot::Sender<()>>,
    /// Each release holds it for reading until it has ended: a stop waits for those that a revoke has begun.
    releasing: Arc<RwLock<()>>,
    _death: DeathNotice,
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
            partitions: Lives::default(),
            closed: Vec::new(),
            releasing: Arc::default(),
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

    /// Takes partitions over: bump, base, actor; then the poll thread is told to assign them all. Those that the database does not give us
    /// soon are assigned all the same, at any place, and read from their own when it is known.
    fn assign(&mut self, generation: u64, partitions: Vec<i32>, ctx: &mut Context<Self>) {
        let takeovers: Vec<Takeover> = partitions.iter().map(|partition| self.partitions.begin(*partition, None)).collect();
        let (workers, client, rules) = self.to_take_over();
        let taken = async move { Takeover::run_all(takeovers, &workers, &client, rules, Some(ASSIGN_PATIENCE)).await };
        let taken = self.tracked(taken);
        ctx.spawn(taken.into_actor(self).map(move |taken, actor, ctx| {
            let Some(Taken { placed, late }) = taken else { return }; // revoked meanwhile
            let mut routes: Vec<_> = placed.into_iter().filter_map(|placed| actor.place(placed)).collect();
            routes.extend(late.iter().map(Late::blind).map(|(partition, anywhere)| (partition, anywhere, None)));
            let _ = actor.wiring.commands.send(Command::Assign { generation, routes });
            actor.keep_paused();
            if late.is_empty() {
                actor.wiring.readiness.set(Readiness::ASSIGNMENT);
            } else {
                warn!(partitions = late.len(), "the database is waited for; the assign is not");
            }
            for late in late {
                actor.follow(late, ctx);
            }
        }));
    }

    /// A partition that is assigned already, and not ours by the database yet.
    fn follow(&mut self, late: Late, ctx: &mut Context<Self>) {
        let (workers, client, rules) = self.to_take_over();
        let taken = self.tracked(async move { late.run(&workers, &client, rules).await });
        ctx.spawn(taken.into_actor(self).map(|taken, actor, _| {
            if let Some(taken) = taken {
                actor.reposition(taken);
                actor.wiring.readiness.set(Readiness::ASSIGNMENT);
            }
        }));
    }

    fn reposition(&mut self, taken: Taken) {
        for (partition, base, route) in taken.placed.into_iter().filter_map(|placed| self.place(placed)).collect::<Vec<_>>() {
            let _ = self.wiring.commands.send(Command::Reposition { partition, base, route });
        }
        self.keep_paused();
    }

    /// Nothing is read of what an operator has paused.
    fn keep_paused(&self) {
        for partition in self.partitions.all_paused() {
            let _ = self.wiring.commands.send(Command::Pause { partition });
        }
    }

    fn to_take_over(&self) -> (Arc<Workers<H>>, Client, Rules) {
        (Arc::clone(&self.wiring.workers), self.wiring.client.clone(), self.wiring.rules)
    }

    /// Makes what was placed known to the OffsetActor, before its first record is handed on.
    fn tracked<F: Future<Output = Option<Taken>>>(&self, taken: F) -> impl Future<Output = Option<Taken>> + use<H, F> {
        let offsets = self.wiring.offsets.clone();
        async move {
            let taken = taken.await?;
            track(&offsets, &taken.placed).await;
            Some(taken)
        }
    }

    /// Starts the actor of a partition that is positioned, or says why it stands still. Out: the partition's route.
    fn place(&mut self, placed: Placed) -> Option<(i32, NextOffset, Option<Route>)> {
        let Placed { partition, run, outcome, fallback } = placed;
        let owned = self.partitions.of_run(partition, run)?;
        match outcome {
            Ok(at) => {
                self.wiring.status.partition_owned(partition, at.epoch);
                self.wiring.status.frontier(partition, at.epoch, at.base);
                owned.begins_at(at.base);
                info!(partition, epoch = at.epoch.0, base = at.base.0, "partition taken over");
                metrics::read_again(at.written.surely.map_or(0, |next| u64::try_from(next.0 - at.base.0).unwrap_or(0)));
                let (workers, reports) = (Arc::clone(&self.wiring.workers), self.reports.0.clone());
                let actor = PartitionActor::new(&at, run, workers, owned.answers.clone(), owned.stop.clone(), reports).start();
                if let Some(paused) = &at.paused {
                    info!(partition, actor = paused.actor, "an operator has paused this partition");
                }
                owned.is_paused = at.paused.is_some();
                let route = (!owned.is_paused).then(|| actor.clone().recipient());
                owned.life = Life::Running { actor, source: at.source, epoch: at.epoch };
                Some((partition, at.reads_from(), route))
            }
            Err(reason) => {
                self.stop_partition(partition, &reason);
                Some((partition, fallback, None))
            }
        }
    }

    fn reported(&mut self, reported: Reported, ctx: &mut Context<Self>) {
        let Reported { partition, run, report } = reported;
        let Some(owned) = self.partitions.of_run(partition, run) else { return };
        let Life::Running { source, epoch, .. } = owned.life else { return };
        let deaths = if report == Report::Died { owned.died() } else { 0 };
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
            let current = actor.partitions.of_run(partition, run).is_some();
            if ours == Ok(true) && current {
                actor.restart(partition, None, ctx);
            }
        }));
    }

    /// Takes an assigned partition up again, at its frontier.
    fn restart(&mut self, partition: i32, after: Option<(SourceId, Epoch)>, ctx: &mut Context<Self>) {
        let takeover = self.partitions.begin(partition, after);
        let run = takeover.run;
        self.wiring.status.taken_up_again(partition);
        self.show_stopped();
        let (workers, client, rules) = self.to_take_over();
        let taken = self.tracked(async move {
            actix::clock::sleep(RESTART_WAIT).await;
            Takeover::run_all(vec![takeover], &workers, &client, rules, None).await
        });
        ctx.spawn(taken.into_actor(self).map(move |taken, actor, ctx| match taken {
            None => {} // revoked meanwhile
            Some(taken) if taken.placed.is_empty() => actor.ask_whether_ours(partition, run, ctx),
            Some(taken) => actor.reposition(taken),
        }));
    }

    fn stop_partition(&mut self, partition: i32, reason: &str) {
        error!(partition, reason, "partition stopped: it waits for a person");
        self.partitions.stopped(partition);
        self.wiring.status.stopped(partition, reason);
        self.show_stopped();
    }

    /// Readiness is red while any partition of ours is stopped.
    fn show_stopped(&self) {
        let stopped: Vec<_> = self.partitions.all_stopped().map(|partition| partition.to_string()).collect();
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
            let Some(owned) = self.partitions.end(*partition) else { continue };
            owned.stop.raise();
            if let Some(actor) = owned.life.actor() {
                let actor = actor.clone();
                drains.push(async move {
                    // An actor that has ended is drained.
                    let _ = actor.send(Drain).await;
                });
            }
        }
        self.show_stopped();
        let (offsets, client, status) = (self.wiring.offsets.clone(), self.wiring.client.clone(), self.wiring.status.clone());
        let budget = self.wiring.drain;
        // None once a stop waits for all of them: it has released everything by then.
        let releasing = Arc::clone(&self.releasing).try_read_owned().ok();
        async move {
            let _releasing = releasing;
            if lost {
                // Forgotten before the drain: nothing more is committed for them (CASES B04).
                let _ = offsets.send(Release { partitions: partitions.clone(), lost }).await;
            }
            let began = Instant::now();
            if tokio::time::timeout(budget, join_all(drains)).await.is_err() {
                warn!(?partitions, "the drain took too long; what has not settled is left to the next owner");
            }
            metrics::rebalance_phase(Phase::Drain, began.elapsed());
            let drained = Instant::now();
            let lost = lost || client.get().is_none_or(|consumer| consumer.assignment_lost());
            let _ = offsets.send(Release { partitions: partitions.clone(), lost }).await;
            metrics::rebalance_phase(Phase::Commit, drained.elapsed());
            for partition in partitions {
                status.partition_gone(partition);
            }
        }
    }

    /// Tells the partitions for which there are requests, and takes those over anew of which an operator has decided something. What cannot be
    /// asked or told now is a second later.
    fn look_for_operators(&self, ctx: &mut Context<Self>) {
        let workers = Arc::clone(&self.wiring.workers);
        // Our own bumps of these have committed, so what an operator has changed of their rows came after them.
        let taken = self.partitions.all_taken();
        let wanted = async move {
            let engine = workers.engine();
            let partitions: Vec<i32> = taken.keys().copied().collect();
            let mut session = engine.store.control.get().await.map_err(DbError::from)?;
            let of = (&*engine.group, engine.topic.as_str());
            let wanted = held_requests::wanted(&mut session, of, &partitions).await?;
            Ok::<_, DbError>(
                wanted.into_iter().map(|(partition, is_changed)| (partition, taken[&partition], is_changed)).collect::<Vec<_>>(),
            )
        };
        ctx.spawn(wanted.into_actor(self).map(|wanted, actor, ctx| {
            for (partition, run, is_changed) in wanted.unwrap_or_default() {
                actor.wanted(partition, run, is_changed, ctx);
            }
            ctx.run_later(OPERATORS, |actor, ctx| actor.look_for_operators(ctx));
        }));
    }

    /// A partition at work would meet the fence of a row that was changed; one that is idle, paused or stopped would not.
    fn wanted(&mut self, partition: i32, run: u64, is_changed: bool, ctx: &mut Context<Self>) {
        let Some(owned) = self.partitions.of_run(partition, run) else { return };
        if is_changed && !matches!(owned.life, Life::Starting) {
            info!(partition, "an operator has decided something about this partition");
            let _ = self.wiring.commands.send(Command::Cut { partition });
            self.ask_whether_ours(partition, run, ctx);
        } else if let Some(address) = owned.life.actor() {
            let _ = address.try_send(Requested);
        }
    }

    /// How far the logs go of which nothing is read: what waits there grows.
    fn look_at_unread_logs(&self, ctx: &mut Context<Self>) {
        let paused: Vec<i32> = self.partitions.all_paused().collect();
        let (client, workers) = (self.wiring.client.clone(), Arc::clone(&self.wiring.workers));
        let ends = async move {
            if paused.is_empty() {
                return;
            }
            let engine = workers.engine();
            let ends = ask(&client, &engine.topic, log_ends).await.unwrap_or_default();
            for partition in paused {
                if let Some(end) = ends.get(&partition) {
                    engine.status.end(partition, *end);
                }
            }
        };
        ctx.spawn(ends.into_actor(self).map(|(), _, ctx| {
            ctx.run_later(OPERATORS, |actor, ctx| actor.look_at_unread_logs(ctx));
        }));
    }

    fn out_of_range(&mut self, ctx: &mut Context<Self>) {
        warn!("an offset lies outside the log; every partition is positioned anew");
        for (partition, source, epoch) in self.partitions.stop_all_running() {
            let _ = self.wiring.commands.send(Command::Cut { partition });
            self.restart(partition, Some((source, epoch)), ctx);
        }
    }
}

/// OffsetActor knows a partition before its first record is handed on.
async fn track(offsets: &Addr<OffsetActor>, placed: &[Placed]) {
    for placed in placed {
        if let Ok(Positioned { partition, epoch, committed, base, written, .. }) = &placed.outcome {
            let settled = start::settled(*base, written.surely);
            let _ = offsets.send(Track { partition: *partition, epoch: *epoch, committed: *committed, settled }).await;
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
        self.look_for_operators(ctx);
        self.look_at_unread_logs(ctx);
    }
}

impl<H: Business> StreamHandler<PollEvent> for Supervisor<H> {
    fn handle(&mut self, event: PollEvent, ctx: &mut Self::Context) {
        match event {
            PollEvent::Asked { generation, rebalance } => self.rebalanced(generation, rebalance, ctx),
            PollEvent::OutOfRange => self.out_of_range(ctx),
            PollEvent::Fatal(reason) => self.wiring.fatal.end(reason),
            PollEvent::Replaced(reason) => {
                error!(reason, "another Kafka client is made");
                metrics::client_replaced();
                self.wiring.readiness.clear(Readiness::ASSIGNMENT, reason);
            }
            // Later the partitions themselves tell how they are.
            PollEvent::Refused(reason) if self.partitions.partitions().is_empty() => {
                self.wiring.readiness.clear(Readiness::ASSIGNMENT, reason);
            }
            PollEvent::Refused(_) => {}
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
        let released = self.release(self.partitions.partitions(), false);
        let (commands, releasing) = (self.wiring.commands.clone(), Arc::clone(&self.releasing));
        Box::pin(async move {
            released.await;
            let _all_released = releasing.write().await;
            let _ = commands.send(Command::Close);
            // A poll thread that died instead has ended as well.
            let _ = is_closed.await;
        })
    }
}
