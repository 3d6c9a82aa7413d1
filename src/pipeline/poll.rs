//! The poll thread: the one place where the Kafka consumer is polled, assigned and closed.
//!
//! In: records and rebalances from librdkafka, commands from the Supervisor. Out: records, grouped by partition and linked into a
//! chain, and what librdkafka asked for. It owns the consumer. If it dies, the process ends: nothing would ever be read again.
//!
//! Invariant: each thing that librdkafka asks for is answered once, and only while it is the last thing asked. All partitions share the
//! one main queue; split queues can stop without a word (CASES A02 to A06).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use rdkafka::TopicPartitionList;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, KafkaResult, RDKafkaErrorCode};
use rdkafka::message::Message as _;
use tokio::sync::{mpsc, oneshot};
use tracing::{debug, error, info, warn};

use crate::app::DeathNotice;
use crate::metrics::{self, Phase};
use crate::pipeline::client::{self, Client, Login, Remedy, Replacements};
use crate::pipeline::command::{Command, PollEvent, Route};
use crate::pipeline::handover::HandOver;
use crate::pipeline::native::{cached_log_end, own};
use crate::pipeline::pressure::{Orders, Pressure, Seen};
use crate::pipeline::rebalance::{self, Rebalance, Rebalances};
use crate::pipeline::window::Buffer;
use crate::record::NextOffset;
use crate::status::Status;

/// How long one poll waits for a record; commands wait as long at most.
const POLL: Duration = Duration::from_millis(10);
/// Records taken from librdkafka's queue before they are handed on.
const HAND_OVER: usize = 1024;
/// How often the lag of the owned partitions is read from librdkafka's own memory.
const WATERMARKS: Duration = Duration::from_secs(1);
/// How long librdkafka may take to seek; it waits for a fetch in progress.
const SEEK: Duration = Duration::from_secs(5);

/// The thread's state.
pub struct PollThread {
    /// First, so that a panic is told before the consumer is dropped, which waits for an answer that nobody gives any more.
    _death: DeathNotice,
    consumer: Arc<BaseConsumer<Rebalances>>,
    /// To make another client with, should this one meet a fatal error.
    login: Login,
    client: Client,
    replacements: Replacements,
    /// The client is beyond repair, and its partitions are being released.
    is_lost: bool,
    topic: String,
    status: Status,
    commands: Receiver<Command>,
    events: mpsc::UnboundedSender<PollEvent>,
    generation: u64,
    asked: Option<Rebalance>,
    asked_at: Instant,
    on_the_way: HandOver,
    probes: Vec<(i32, oneshot::Sender<bool>)>,
    pressure: Pressure,
    /// Partitions that an operator has paused; back-pressure leaves them alone.
    paused: BTreeSet<i32>,
    buffer_limit: usize,
    watermarks_read: Instant,
}

impl PollThread {
    /// Starts the thread on a client of its own. Out: where others find that client.
    ///
    /// # Errors
    /// librdkafka refuses the configuration or the topic.
    ///
    /// # Panics
    /// When the operating system refuses a thread.
    pub fn start(
        mut login: Login,
        topic: String,
        buffer: Buffer,
        status: Status,
        commands: Receiver<Command>,
        events: mpsc::UnboundedSender<PollEvent>,
        death: DeathNotice,
    ) -> KafkaResult<Client> {
        let consumer = Arc::new(login.connect(&topic)?);
        let client = Client::new(&consumer);
        let thread = Self {
            _death: death,
            consumer,
            login,
            client: client.clone(),
            replacements: Replacements::default(),
            is_lost: false,
            topic,
            buffer_limit: buffer.limit(),
            pressure: Pressure::new(buffer.limit()),
            paused: BTreeSet::new(),
            on_the_way: HandOver::new(buffer),
            status,
            commands,
            events,
            generation: 0,
            asked: None,
            asked_at: Instant::now(),
            probes: Vec::new(),
            watermarks_read: Instant::now(),
        };
        std::thread::Builder::new()
            .name("onceward-poll".into())
            .spawn(move || thread.run())
            .expect("the operating system gives a thread");
        Ok(client)
    }

    fn run(mut self) {
        self.status.polled();
        while self.obey() {
            self.on_the_way.try_again();
            if self.may_poll() {
                self.poll();
                self.on_the_way.hand_over();
                self.report_rebalances();
                self.answer_probes();
                self.read_watermarks();
                self.tell_refusal();
            }
            self.login.look_again(&self.consumer);
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
            Command::Pause { partition } => self.pause_for_an_operator(partition),
            Command::Cut { partition } => self.on_the_way.cut(partition),
            Command::Probe { partition, answer } => self.probes.push((partition, answer)),
            Command::Wake => {}
            Command::Close => unreachable!("obey ends the thread"),
        }
    }

    /// Whether to poll now; see [`Pressure`]. Not polling is waiting for a command.
    fn may_poll(&mut self) -> bool {
        let Orders { poll, pause, resume } = self.pressure.decide(&self.seen(), Instant::now());
        if !pause.is_empty() {
            info!(?pause, "these partitions do not move: they are paused, and polling goes on");
            self.pause(&pause);
        }
        self.resume(&resume);
        self.status.room(poll);
        if !poll {
            match self.commands.recv_timeout(POLL) {
                Ok(Command::Close) | Err(RecvTimeoutError::Disconnected) => self.commands = closed(),
                Ok(command) => self.carry_out(command),
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
        poll
    }

    fn seen(&self) -> Vec<Seen> {
        let mut seen = self.on_the_way.seen();
        seen.retain(|seen| !self.paused.contains(&seen.partition));
        seen
    }

    fn pause_for_an_operator(&mut self, partition: i32) {
        if self.on_the_way.has(partition) && self.paused.insert(partition) {
            self.pressure.forget(partition);
            self.pause(&[partition]);
        }
    }

    fn pause(&self, partitions: &[i32]) {
        if let Err(error) = self.consumer.pause(&self.list(partitions.iter().copied())) {
            warn!(%error, ?partitions, "could not pause");
        }
    }

    fn resume(&self, partitions: &[i32]) {
        if partitions.is_empty() {
            return;
        }
        if let Err(error) = self.consumer.resume(&self.list(partitions.iter().copied())) {
            warn!(%error, ?partitions, "could not resume");
        }
    }

    /// A partition that goes away or is positioned anew must not stay paused: librdkafka keeps that beyond the assignment (CASES B12), and
    /// resumes where it was paused.
    fn release_pause(&mut self, partition: i32) {
        if self.paused.remove(&partition) || self.pressure.has_paused(partition) {
            self.pressure.forget(partition);
            self.resume(&[partition]);
        }
    }

    /// Takes what librdkafka has, up to [`HAND_OVER`] records.
    fn poll(&mut self) {
        let consumer = Arc::clone(&self.consumer);
        let mut wait = POLL;
        for _ in 0..HAND_OVER {
            match consumer.poll(wait) {
                None => break,
                Some(Ok(message)) => self.on_the_way.take(message.partition(), message.offset(), || own(&message)),
                Some(Err(error)) => self.act_on(&error),
            }
            wait = Duration::ZERO;
            if self.on_the_way.is_full() {
                break;
            }
        }
    }

    fn act_on(&mut self, error: &KafkaError) {
        match error {
            KafkaError::MessageConsumptionFatal(code) => self.lose_client(*code),
            KafkaError::MessageConsumption(RDKafkaErrorCode::AutoOffsetReset) => self.tell(PollEvent::OutOfRange),
            KafkaError::PartitionEOF(partition) => {
                if let Some(end) = cached_log_end(&self.consumer, &self.topic, *partition) {
                    self.status.read_to_the_end(*partition, end);
                }
            }
            // It recovers by itself. The context's callback has counted and logged the same error, with the reason that is missing here.
            _ => {}
        }
    }

    /// Without a word of it a member that may not join would look like one that waits.
    fn tell_refusal(&self) {
        if let Some(reason) = self.consumer.context().take_refusal() {
            self.tell(PollEvent::Refused(reason));
        }
    }

    fn report_rebalances(&mut self) {
        for rebalance in self.consumer.context().take() {
            // Of a client that is beyond repair all partitions are on their way out already.
            if !self.is_lost {
                self.report(rebalance);
            }
        }
    }

    fn report(&mut self, rebalance: Rebalance) {
        self.generation += 1;
        info!(generation = self.generation, ?rebalance, "rebalance");
        if let Rebalance::Revoke { partitions, .. } = &rebalance {
            for partition in partitions {
                self.release_pause(*partition);
                self.on_the_way.cut(*partition); // what is already handed on is drained
            }
        }
        (self.asked, self.asked_at) = (Some(rebalance.clone()), Instant::now());
        self.tell(PollEvent::Asked { generation: self.generation, rebalance });
    }

    /// A client that has met a fatal error would stay silent for ever. Its partitions are lost; when they are released, another client
    /// takes its place.
    fn lose_client(&mut self, code: RDKafkaErrorCode) {
        if self.is_lost {
            return; // it says so more than once
        }
        let (code, reason) = self.consumer.client().fatal_error().unwrap_or_else(|| (code, code.to_string()));
        let reason = format!("the Kafka client is beyond repair: {reason} ({code:?})");
        if self.replacements.remedy(code, Instant::now()) == Remedy::End {
            return self.tell(PollEvent::Fatal(reason));
        }
        self.is_lost = true;
        self.tell(PollEvent::Replaced(reason));
        self.consumer.context().close();
        // It treats any answer as "unassign" by now, and would wait for one while it is dropped.
        if let Err(error) = self.consumer.unassign() {
            debug!(%error, "while giving up a client");
        }
        let mut partitions: BTreeSet<i32> = self.on_the_way.partitions().collect();
        if let Some(Rebalance::Assign(assigned)) = self.asked.take() {
            partitions.extend(assigned);
        }
        self.report(Rebalance::Revoke { partitions: partitions.into_iter().collect(), lost: true });
    }

    fn replace_client(&mut self) {
        self.is_lost = false;
        self.pressure = Pressure::new(self.buffer_limit);
        self.paused.clear();
        match self.login.connect(&self.topic) {
            Ok(consumer) => {
                let next = Arc::new(consumer);
                self.client.show(&next);
                client::close(std::mem::replace(&mut self.consumer, next));
                info!("another Kafka client takes the place of the one that was beyond repair");
            }
            Err(error) => self.tell(PollEvent::Fatal(format!("the Kafka client could not be replaced: {error}"))),
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
        metrics::rebalance_phase(Phase::Assign, self.asked_at.elapsed());
        for (partition, base, route) in routes {
            self.on_the_way.begin(partition, base, route);
        }
    }

    fn unassign(&mut self, generation: u64) {
        let Some(Rebalance::Revoke { partitions, .. }) = self.asked.take_if(|_| generation == self.generation) else {
            debug!(generation, "an outdated unassign is dropped");
            return;
        };
        if self.is_lost {
            partitions.into_iter().for_each(|partition| self.on_the_way.end(partition));
            return self.replace_client();
        }
        if let Err(error) = rebalance::unassign(&self.consumer, &self.list(partitions.iter().copied())) {
            self.tell(PollEvent::Fatal(format!("could not unassign: {error}")));
        }
        metrics::rebalance_phase(Phase::Revoke, self.asked_at.elapsed());
        for partition in partitions {
            self.on_the_way.end(partition);
        }
    }

    fn reposition(&mut self, partition: i32, base: NextOffset, route: Option<Route>) {
        if !self.on_the_way.has(partition) {
            return;
        }
        self.release_pause(partition);
        self.on_the_way.begin(partition, base, route);
        if let Err(error) = self.consumer.seek(&self.topic, partition, rdkafka::Offset::Offset(base.0), SEEK) {
            self.tell(PollEvent::Fatal(format!("could not seek partition {partition} to {base}: {error}")));
        }
    }

    fn answer_probes(&mut self) {
        let lost = self.is_lost || self.consumer.assignment_lost();
        for (partition, answer) in self.probes.drain(..) {
            let revoked = matches!(&self.asked, Some(Rebalance::Revoke { partitions, .. }) if partitions.contains(&partition));
            // Whoever asked may be gone.
            let _ = answer.send(!lost && !revoked && self.on_the_way.has(partition));
        }
    }

    fn read_watermarks(&mut self) {
        if self.watermarks_read.elapsed() < WATERMARKS {
            return;
        }
        self.watermarks_read = Instant::now();
        self.status.polled();
        for partition in self.on_the_way.partitions() {
            if let Some(end) = cached_log_end(&self.consumer, &self.topic, partition) {
                self.status.end(partition, end);
            }
        }
    }

    /// Leaves the group.
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
        client::close(self.consumer);
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

#[cfg(test)]
mod tests {
    use rdkafka::ClientConfig;
    use rdkafka::bindings::{rd_kafka_resp_err_t, rd_kafka_test_fatal_error};
    use rdkafka::mocking::MockCluster;

    use super::*;
    use crate::app::Fatal;

    const TOPIC: &str = "orders";
    const PATIENCE: Duration = Duration::from_secs(30);

    struct Running {
        client: Client,
        commands: std::sync::mpsc::Sender<Command>,
        events: mpsc::UnboundedReceiver<PollEvent>,
    }

    impl Running {
        fn on(brokers: &str) -> Self {
            let mut config = ClientConfig::new();
            config.set("bootstrap.servers", brokers).set("group.id", "readers");
            config.set("partition.assignment.strategy", "range").set("enable.auto.commit", "false");
            let (commands, obeyed) = std::sync::mpsc::channel();
            let (told, events) = mpsc::unbounded_channel();
            let buffer = Buffer::new(1 << 20, commands.clone());
            let (fatal, _) = Fatal::channel();
            let death = fatal.notice("poll thread");
            let client = PollThread::start(
                Login::new(move || config.clone()),
                TOPIC.to_owned(),
                buffer,
                Status::default(),
                obeyed,
                told,
                death,
            );
            Self { client: client.expect("a client"), commands, events }
        }

        fn next(&mut self) -> PollEvent {
            let end = Instant::now() + PATIENCE;
            loop {
                match self.events.try_recv() {
                    Ok(event) => return event,
                    Err(_) => assert!(Instant::now() < end, "nothing is told"),
                }
                std::thread::sleep(POLL);
            }
        }

        /// Takes the next assign and answers it.
        fn is_assigned(&mut self) -> usize {
            let PollEvent::Asked { generation, rebalance: Rebalance::Assign(partitions) } = self.next() else {
                panic!("an assign is expected")
            };
            let routes = partitions.iter().map(|partition| (*partition, NextOffset(0), None)).collect();
            self.commands.send(Command::Assign { generation, routes }).expect("it listens");
            partitions.len()
        }

        fn owns(&self, partition: i32) -> bool {
            let (answer, answered) = oneshot::channel();
            self.commands.send(Command::Probe { partition, answer }).expect("it listens");
            answered.blocking_recv().expect("an answer")
        }

        fn meet_a_fatal_error(&self) {
            let consumer = self.client.get().expect("a client");
            // SAFETY: the client is alive while the consumer is held; the text ends with a NUL and is copied.
            unsafe {
                rd_kafka_test_fatal_error(
                    consumer.client().native_ptr(),
                    rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR_INVALID_REQUEST,
                    c"thrown out".as_ptr(),
                );
            }
        }
    }

    // CASES A17, B02
    #[test]
    fn a_client_that_meets_a_fatal_error_gives_its_partitions_up_as_lost_and_another_takes_its_place() {
        let cluster = MockCluster::new(1).expect("a mock cluster");
        cluster.create_topic(TOPIC, 2, 1).expect("a topic");
        let mut running = Running::on(&cluster.bootstrap_servers());
        assert_eq!(running.is_assigned(), 2);
        assert!(running.owns(0));
        running.meet_a_fatal_error();
        let replaced = running.next();
        assert!(matches!(&replaced, PollEvent::Replaced(reason) if reason.contains("thrown out")), "{replaced:?}");
        let PollEvent::Asked { generation, rebalance: Rebalance::Revoke { mut partitions, lost: true } } = running.next() else {
            panic!("a loss is expected")
        };
        partitions.sort_unstable();
        assert_eq!(partitions, [0, 1]);
        assert!(!running.owns(0), "nobody must go on with it meanwhile");
        let before = running.client.get().map(|consumer| Arc::as_ptr(&consumer));
        running.commands.send(Command::Unassign { generation }).expect("it listens");
        let end = Instant::now() + PATIENCE;
        // That it joins is the broker's business, and the mock waits for the member that is gone.
        while running.client.get().map(|consumer| Arc::as_ptr(&consumer)) == before {
            assert!(Instant::now() < end, "no other client");
            std::thread::sleep(POLL);
        }
        assert!(running.client.get().is_some_and(|consumer| consumer.client().fatal_error().is_none()));
    }
}
