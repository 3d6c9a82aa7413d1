//! The poll thread: the one place where the Kafka consumer is polled, assigned and closed.
//!
//! In: records and rebalances from librdkafka, commands from the Supervisor. Out: records, grouped by partition and linked into a
//! chain, and what librdkafka asked for. It owns the consumer. If it dies, the process ends: nothing would ever be read again.
//!
//! Invariant: a record is handed on with the offset handed before it, or it is dropped *and* the chain shows it. All partitions share
//! the one main queue; split queues can stop without a word (CASES A02 to A06).

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use actix::prelude::SendError;
use rdkafka::TopicPartitionList;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{BorrowedMessage, Message as _};
use tokio::sync::{mpsc, oneshot};
use tracing::{debug, error, info, warn};

use crate::pipeline::command::{Command, PollEvent, Records, Route};
use crate::pipeline::native::{cached_log_end, own};
use crate::pipeline::rebalance::{self, Rebalance, Rebalances};
use crate::pipeline::window::{Buffer, Buffered, Handed};
use crate::record::NextOffset;
use crate::status::Status;

/// How long one poll waits for a record; commands wait as long at most.
const POLL: Duration = Duration::from_millis(10);
/// Records taken from librdkafka's queue before they are handed on.
const HAND_OVER: usize = 1024;
/// How long a full buffer may stop the polling; after that everything is paused and polling goes on, for the group's sake.
const STALL: Duration = Duration::from_secs(2);
/// How often the lag of the owned partitions is read from librdkafka's own memory.
const WATERMARKS: Duration = Duration::from_secs(1);
/// How long librdkafka may take to seek; it waits for a fetch in progress.
const SEEK: Duration = Duration::from_secs(5);

/// The thread's state.
pub struct PollThread {
    consumer: Arc<BaseConsumer<Rebalances>>,
    topic: String,
    buffer: Buffer,
    status: Status,
    commands: Receiver<Command>,
    events: mpsc::UnboundedSender<PollEvent>,
    generation: u64,
    asked: Option<Rebalance>,
    partitions: HashMap<i32, Assigned>,
    refused: VecDeque<(i32, Records)>,
    probes: Vec<(i32, oneshot::Sender<bool>)>,
    stalled: Option<Stall>,
    watermarks_read: Instant,
    _death: crate::app::DeathNotice,
}

struct Assigned {
    route: Option<Route>,
    /// One past the last record handed on: the chain's end.
    handed: NextOffset,
    fresh: Vec<Arc<Buffered>>,
}

#[derive(Clone, Copy)]
enum Stall {
    NotPolling { since: Instant },
    Paused,
}

impl PollThread {
    /// Starts the thread.
    ///
    /// # Panics
    /// When the operating system refuses a thread.
    pub fn start(
        consumer: Arc<BaseConsumer<Rebalances>>,
        topic: String,
        buffer: Buffer,
        status: Status,
        commands: Receiver<Command>,
        events: mpsc::UnboundedSender<PollEvent>,
        death: crate::app::DeathNotice,
    ) -> std::thread::JoinHandle<()> {
        let thread = Self {
            consumer,
            topic,
            buffer,
            status,
            commands,
            events,
            generation: 0,
            asked: None,
            partitions: HashMap::new(),
            refused: VecDeque::new(),
            probes: Vec::new(),
            stalled: None,
            watermarks_read: Instant::now(),
            _death: death,
        };
        std::thread::Builder::new()
            .name("onceward-poll".into())
            .spawn(move || thread.run())
            .expect("the operating system gives a thread")
    }

    fn run(mut self) {
        while self.obey() {
            self.hand_over_refused();
            if self.may_poll() {
                self.poll();
                self.hand_over();
                self.report_rebalances();
                self.answer_probes();
                self.read_watermarks();
            }
        }
        self.close();
    }

    /// Carries out the commands that wait; `false` when the thread should end.
    fn obey(&mut self) -> bool {
        loop {
            match self.commands.try_recv() {
                Ok(Command::Close) | Err(TryRecvError::Disconnected) => return false,
                Ok(command) => self.carry_out(command),
                Err(TryRecvError::Empty) => return true,
            }
        }
    }

    fn carry_out(&mut self, command: Command) {
        match command {
            Command::Assign { generation, routes } => self.assign(generation, routes),
            Command::Unassign { generation } => self.unassign(generation),
            Command::Reposition { partition, base, route } => self.reposition(partition, base, route),
            Command::Cut { partition } => {
                if let Some(assigned) = self.partitions.get_mut(&partition) {
                    assigned.route = None;
                }
                self.refused.retain(|(refused, _)| *refused != partition);
            }
            Command::Probe { partition, answer } => self.probes.push((partition, answer)),
            Command::Wake => {}
            Command::Close => unreachable!("obey ends the thread"),
        }
    }

    /// Whether to poll now. A full buffer, or a PartitionActor that takes no more, stops the polling for a while: waiting is cheaper than
    /// `pause`, which throws away what librdkafka has fetched. The group must see us poll, so after [`STALL`] everything is paused.
    fn may_poll(&mut self) -> bool {
        let blocked = self.buffer.is_full() || !self.refused.is_empty();
        let may_go_on = self.refused.is_empty() && self.buffer.has_room();
        match self.stalled {
            None if !blocked => true,
            None => {
                self.stalled = Some(Stall::NotPolling { since: Instant::now() });
                false
            }
            Some(Stall::NotPolling { .. }) if may_go_on => {
                self.stalled = None;
                true
            }
            Some(Stall::NotPolling { since }) if since.elapsed() >= STALL => {
                info!("the buffer stays full: all partitions are paused and polling goes on");
                self.pause_all(true);
                self.stalled = Some(Stall::Paused);
                true
            }
            Some(Stall::NotPolling { .. }) => {
                match self.commands.recv_timeout(POLL) {
                    Ok(Command::Close) | Err(RecvTimeoutError::Disconnected) => self.commands = closed(),
                    Ok(command) => self.carry_out(command),
                    Err(RecvTimeoutError::Timeout) => {}
                }
                false
            }
            Some(Stall::Paused) => {
                if may_go_on {
                    self.pause_all(false);
                    self.stalled = None;
                }
                true
            }
        }
    }

    fn pause_all(&self, pause: bool) {
        let list = self.list(self.partitions.keys().copied());
        let result = if pause { self.consumer.pause(&list) } else { self.consumer.resume(&list) };
        if let Err(error) = result {
            warn!(%error, pause, "could not pause or resume");
        }
    }

    /// Takes what librdkafka has, up to [`HAND_OVER`] records.
    fn poll(&mut self) {
        let consumer = Arc::clone(&self.consumer);
        let mut wait = POLL;
        for _ in 0..HAND_OVER {
            match consumer.poll(wait) {
                None => break,
                Some(Ok(message)) => self.take(&message),
                Some(Err(error)) => self.act_on(&error),
            }
            wait = Duration::ZERO;
            if self.buffer.is_full() {
                break;
            }
        }
    }

    fn take(&mut self, message: &BorrowedMessage<'_>) {
        let Some(assigned) = self.partitions.get_mut(&message.partition()) else { return };
        if assigned.route.is_none() {
            return;
        }
        let end = assigned.fresh.last().map_or(assigned.handed, |last| last.offset.next());
        if message.offset() < end.0 {
            debug!(partition = message.partition(), offset = message.offset(), "a stray record before the base is dropped");
            return;
        }
        assigned.fresh.push(self.buffer.admit(own(message)));
    }

    fn hand_over(&mut self) {
        for (partition, assigned) in &mut self.partitions {
            let Some(last) = assigned.fresh.last() else { continue };
            let end = last.offset.next();
            let handed = Handed { after: assigned.handed, records: std::mem::take(&mut assigned.fresh) };
            assigned.handed = end;
            let Some(route) = &assigned.route else { continue };
            match route.try_send(Records(handed)) {
                Ok(()) => {}
                Err(SendError::Full(records)) => self.refused.push_back((*partition, records)),
                // The actor is gone; the Supervisor replaces it and repositions. Until then the chain is cut.
                Err(SendError::Closed(_)) => assigned.route = None,
            }
        }
    }

    /// Tries again what full mailboxes refused, in order. While anything waits here nothing is polled, so order is kept.
    fn hand_over_refused(&mut self) {
        while let Some((partition, records)) = self.refused.pop_front() {
            let Some(route) = self.partitions.get(&partition).and_then(|assigned| assigned.route.as_ref()) else { continue };
            if let Err(SendError::Full(records)) = route.try_send(records) {
                self.refused.push_front((partition, records));
                return;
            }
        }
    }

    fn act_on(&self, error: &KafkaError) {
        match error {
            KafkaError::MessageConsumptionFatal(code) => {
                self.tell(PollEvent::Fatal(format!("the Kafka client is beyond repair: {code}")))
            }
            KafkaError::MessageConsumption(RDKafkaErrorCode::AutoOffsetReset) => self.tell(PollEvent::OutOfRange),
            // It recovers by itself. The context's callback has counted and logged the same error, with the reason that is missing here.
            _ => {}
        }
    }

    fn report_rebalances(&mut self) {
        for rebalance in self.consumer.context().take() {
            self.generation += 1;
            info!(generation = self.generation, ?rebalance, "rebalance");
            if let Rebalance::Revoke { partitions, .. } = &rebalance {
                for partition in partitions {
                    // What is already handed on is drained; nothing follows it.
                    if let Some(assigned) = self.partitions.get_mut(partition) {
                        assigned.route = None;
                        assigned.fresh.clear();
                    }
                }
                self.refused.retain(|(refused, _)| !partitions.contains(refused));
            }
            self.asked = Some(rebalance.clone());
            self.tell(PollEvent::Asked { generation: self.generation, rebalance });
        }
    }

    fn assign(&mut self, generation: u64, routes: Vec<(i32, NextOffset, Option<Route>)>) {
        if generation != self.generation || !matches!(self.asked, Some(Rebalance::Assign(_))) {
            debug!(generation, "an outdated assign is dropped");
            return;
        }
        self.asked = None;
        let mut list = TopicPartitionList::with_capacity(routes.len());
        for (partition, base, _) in &routes {
            list.add_partition_offset(&self.topic, *partition, rdkafka::Offset::Offset(base.0))
                .expect("an offset of a record is valid");
        }
        if let Err(error) = rebalance::assign(&self.consumer, &list) {
            self.tell(PollEvent::Fatal(format!("could not assign: {error}")));
            return;
        }
        for (partition, base, route) in routes {
            self.partitions.insert(partition, Assigned { route, handed: base, fresh: Vec::new() });
        }
    }

    fn unassign(&mut self, generation: u64) {
        let Some(Rebalance::Revoke { partitions, .. }) = self.asked.take_if(|_| generation == self.generation) else {
            debug!(generation, "an outdated unassign is dropped");
            return;
        };
        if let Err(error) = rebalance::unassign(&self.consumer, &self.list(partitions.iter().copied())) {
            self.tell(PollEvent::Fatal(format!("could not unassign: {error}")));
        }
        for partition in partitions {
            self.partitions.remove(&partition);
        }
    }

    fn reposition(&mut self, partition: i32, base: NextOffset, route: Option<Route>) {
        let Some(assigned) = self.partitions.get_mut(&partition) else { return };
        *assigned = Assigned { route, handed: base, fresh: Vec::new() };
        if let Err(error) = self.consumer.seek(&self.topic, partition, rdkafka::Offset::Offset(base.0), SEEK) {
            self.tell(PollEvent::Fatal(format!("could not seek partition {partition} to {base}: {error}")));
        }
    }

    fn answer_probes(&mut self) {
        let lost = self.consumer.assignment_lost();
        for (partition, answer) in self.probes.drain(..) {
            let revoked = matches!(&self.asked, Some(Rebalance::Revoke { partitions, .. }) if partitions.contains(&partition));
            // Whoever asked may be gone.
            let _ = answer.send(!lost && !revoked && self.partitions.contains_key(&partition));
        }
    }

    fn read_watermarks(&mut self) {
        if self.watermarks_read.elapsed() < WATERMARKS {
            return;
        }
        self.watermarks_read = Instant::now();
        for partition in self.partitions.keys() {
            if let Some(end) = cached_log_end(&self.consumer, &self.topic, *partition) {
                self.status.end(*partition, end);
            }
        }
    }

    /// Leaves the group. Everyone else holds the consumer for one call at a time, so being its last owner is a matter of waiting; the drop
    /// must happen here, because it polls until the group is left.
    fn close(mut self) {
        // librdkafka still waits for this answer, and would wait while closing.
        let answered = match self.asked.take() {
            Some(Rebalance::Assign(_)) => rebalance::assign(&self.consumer, &TopicPartitionList::new()),
            Some(Rebalance::Revoke { partitions, .. }) => rebalance::unassign(&self.consumer, &self.list(partitions.into_iter())),
            None => Ok(()),
        };
        if let Err(error) = answered {
            warn!(%error, "the last rebalance could not be answered");
        }
        self.consumer.context().close();
        self.partitions.into_iter().for_each(drop);
        let mut consumer = self.consumer;
        let closed = loop {
            match Arc::try_unwrap(consumer) {
                Ok(last) => break last,
                Err(shared) => {
                    consumer = shared;
                    // A commit in progress ends within its own time limit.
                    if let Some(Err(error)) = consumer.poll(POLL) {
                        debug!(%error, "while closing");
                    }
                }
            }
        };
        drop(closed);
        if self.events.send(PollEvent::Closed).is_err() {
            error!("the Supervisor ended before the consumer was closed");
        }
    }

    fn list(&self, partitions: impl Iterator<Item = i32>) -> TopicPartitionList {
        let mut list = TopicPartitionList::new();
        for partition in partitions {
            list.add_partition(&self.topic, partition);
        }
        list
    }

    fn tell(&self, event: PollEvent) {
        // The Supervisor is gone: its own death notice ends the process.
        let _ = self.events.send(event);
    }
}

/// A channel that is closed already, so that the next read ends the thread.
fn closed() -> Receiver<Command> {
    std::sync::mpsc::channel().1
}
