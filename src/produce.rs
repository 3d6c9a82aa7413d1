//! Puts events into a topic: from a file as they are, or generated.
//!
//! In: [`Options`]. Out: records in Kafka, keyed by order id, each with a delivery report; on request a log of where each one landed,
//! which `audit` reads. It owns its producer. If it dies here, what was acknowledged is in the topic and, up to the last buffer, in
//! the log; run again, it makes new events, never the same ones.
//!
//! Invariant: success is reported only when every record was acknowledged by all in-sync replicas.

pub mod draw;
mod generate;
mod log;

use std::borrow::Cow;
use std::error::Error;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rdkafka::ClientContext;
use rdkafka::client::OAuthToken;
use rdkafka::config::{ClientConfig, RDKafkaLogLevel};
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::Message as _;
use rdkafka::producer::{BaseProducer, BaseRecord, DeliveryResult, Producer as _, ProducerContext};

pub use self::generate::Generated;
pub use self::log::LogLine;
use crate::event;
use crate::pipeline::client_log::ClientLog;
use crate::pipeline::connection::{self, Plain};

/// What to produce, and where.
#[derive(Clone, Debug)]
pub struct Options {
    /// Brokers and connection options. Idempotence, acknowledgements and the partitioner are set over them.
    pub client: ClientConfig,
    /// The topic.
    pub topic: String,
    /// The events.
    pub source: Source,
    /// Records per second; `None` is as fast as they are taken.
    pub per_second: Option<u32>,
    /// Appends one [`LogLine`] per delivered record to this file.
    pub log: Option<PathBuf>,
    /// A record that is not acknowledged within this time has failed.
    pub delivery_timeout: Duration,
}

/// Where the events come from.
#[derive(Clone, Debug)]
pub enum Source {
    /// One payload a line, sent as it is, whatever it is; empty lines are passed over.
    File(PathBuf),
    /// New events.
    Generated(Generated),
}

/// What was produced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Produced {
    /// Records that are in the topic.
    pub delivered: u64,
    /// From the first send to the last delivery report.
    pub elapsed: Duration,
}

/// Why not everything was produced.
#[derive(Debug, thiserror::Error)]
pub enum ProduceError {
    /// An option makes no sense.
    #[error("{0}")]
    Options(&'static str),
    /// Nobody has made the topic. A broker that makes topics when they are named must not be led to it by a slip of the pen.
    #[error("the topic {topic} does not exist at {brokers}: create it, or see kafka.topic")]
    NoTopic {
        /// The topic.
        topic: String,
        /// The brokers.
        brokers: String,
    },
    /// The topic is not for us.
    #[error("the topic {topic}: {why}")]
    Refused {
        /// The topic.
        topic: String,
        /// What the broker said, and what to do.
        why: String,
    },
    /// The source or the log.
    #[error("{path}: {error}", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// Nobody tells of the topic.
    #[error("no answer from {brokers}: {error}; see kafka.brokers")]
    NoAnswer {
        /// The brokers.
        brokers: String,
        /// What the client said.
        error: String,
    },
    /// The client cannot be made.
    #[error("Kafka: {0}")]
    Kafka(#[from] KafkaError),
    /// Some records are not known to be in the topic. Those that timed out may be.
    #[error("{not_delivered} records were not delivered to {topic} at {brokers} ({delivered} were): {first}; see kafka.brokers")]
    NotDelivered {
        /// The topic.
        topic: String,
        /// The brokers.
        brokers: String,
        /// Acknowledged.
        delivered: u64,
        /// Failed, or not sent any more after the first failure.
        not_delivered: u64,
        /// The first failure, in words.
        first: String,
    },
}

/// One record to send.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Outgoing<'a> {
    payload: Cow<'a, [u8]>,
    /// The order id in decimal; a payload that is no event has none.
    key: Option<String>,
    /// Instead of the partition that the key asks for.
    partition: Option<i32>,
}

/// Sends everything and waits for every delivery report. Blocks the thread.
///
/// # Errors
/// See [`ProduceError`]; after the first failure nothing more is sent.
pub fn run(options: &Options) -> Result<Produced, ProduceError> {
    let partitions = partitions(options)?;
    let mut sender = Sender::start(options)?;
    match &options.source {
        Source::File(path) => {
            let failed = |error| ProduceError::File { path: path.clone(), error };
            for line in BufReader::new(File::open(path).map_err(failed)?).split(b'\n') {
                let line = line.map_err(failed)?;
                if !line.is_empty() {
                    sender.send(&Outgoing::keyed(line.into()));
                }
            }
        }
        Source::Generated(generated) => {
            generated.each(partitions, |outgoing| sender.send(&outgoing))?;
        }
    }
    sender.finish(options.log.as_deref())
}

/// How many partitions the topic has. Asked by a consumer, which is not given a topic that it only names. Brokers take a moment to tell of
/// one that was just made.
fn partitions(options: &Options) -> Result<i32, ProduceError> {
    /// How long a topic may be unknown before it counts as not there.
    const NEW_TOPIC: Duration = Duration::from_secs(5);
    const PAUSE: Duration = Duration::from_millis(100);
    let mut client = options.client.clone();
    client.set("allow.auto.create.topics", "false").set("log_level", "0");
    let consumer: BaseConsumer<Plain> = connection::connect(&client, Plain::default())?;
    let deadline = Instant::now() + options.delivery_timeout.min(NEW_TOPIC);
    loop {
        let metadata = consumer.fetch_metadata(Some(&options.topic), options.delivery_timeout).map_err(|error| {
            ProduceError::NoAnswer { brokers: brokers(&options.client), error: connection::why(&consumer, &error) }
        })?;
        let topic = metadata.topics().first();
        if let Some(refused) = topic.and_then(|topic| topic.error()).map(RDKafkaErrorCode::from)
            && connection::todo(refused).is_some()
        {
            return Err(ProduceError::Refused { topic: options.topic.clone(), why: connection::in_words(refused) });
        }
        let partitions = topic.map_or(0, |topic| topic.partitions().len());
        match i32::try_from(partitions) {
            Ok(partitions) if partitions > 0 => return Ok(partitions),
            _ if Instant::now() >= deadline => {
                return Err(ProduceError::NoTopic { topic: options.topic.clone(), brokers: brokers(&options.client) });
            }
            _ => std::thread::sleep(PAUSE),
        }
    }
}

fn brokers(client: &ClientConfig) -> String {
    client.get("bootstrap.servers").unwrap_or_default().to_owned()
}

impl<'a> Outgoing<'a> {
    /// A record for a payload of unknown content.
    fn keyed(payload: Cow<'a, [u8]>) -> Self {
        let key = event::decode(Some(&payload)).ok().map(|event| event.order_id.to_string());
        Self { payload, key, partition: None }
    }
}

/// The producer and its pace.
struct Sender<'a> {
    producer: BaseProducer<Deliveries>,
    options: &'a Options,
    started: Instant,
    sent: u64,
    /// Not handed to the client: refused by it, or after the first failure.
    unsent: u64,
}

impl<'a> Sender<'a> {
    /// Reports are taken in after so many sends at the latest.
    const POLL_EVERY: u64 = 64;
    /// How long to wait for room in the client's queue before asking again.
    const FULL: Duration = Duration::from_millis(2);

    fn start(options: &'a Options) -> Result<Self, ProduceError> {
        if options.per_second == Some(0) {
            return Err(ProduceError::Options("the rate must be above 0"));
        }
        let log = options.log.as_deref().map(log::open).transpose()?;
        let mut client = options.client.clone();
        client
            .set("enable.idempotence", "true")
            .set("acks", "all")
            .set("partitioner", "murmur2_random") // the one of other clients, so that an order's events share a partition
            .set("linger.ms", "5")
            .set("queue.buffering.max.kbytes", "65536")
            .set("message.timeout.ms", options.delivery_timeout.as_millis().max(1).to_string());
        let state = State { log, delivered: 0, first_failure: None };
        let producer = connection::connect(&client, Deliveries { state: Mutex::new(state), log: ClientLog::default() })?;
        Ok(Self { producer, options, started: Instant::now(), sent: 0, unsent: 0 })
    }

    fn send(&mut self, outgoing: &Outgoing<'_>) {
        if self.state().first_failure.is_some() {
            self.unsent += 1;
            return;
        }
        self.keep_pace();
        let mut record = BaseRecord::<str, [u8]>::to(&self.options.topic).payload(&outgoing.payload);
        record.key = outgoing.key.as_deref();
        record.partition = outgoing.partition;
        while let Err((error, refused)) = self.producer.send(record) {
            if error.rdkafka_error_code() != Some(RDKafkaErrorCode::QueueFull) {
                self.unsent += 1;
                self.state().fail(&error);
                return;
            }
            self.producer.poll(Self::FULL);
            record = refused;
        }
        self.sent += 1;
        if self.sent.is_multiple_of(Self::POLL_EVERY) {
            self.producer.poll(Duration::ZERO);
        }
    }

    /// Waits until the next record is due, taking reports in meanwhile.
    fn keep_pace(&self) {
        let Some(per_second) = self.options.per_second else { return };
        let due = self.started + Duration::from_secs_f64(self.sent as f64 / f64::from(per_second));
        let wait = due.saturating_duration_since(Instant::now());
        if !wait.is_zero() {
            self.producer.poll(wait);
        }
    }

    fn finish(self, log: Option<&Path>) -> Result<Produced, ProduceError> {
        // Every record has a report once its own time is over; the second is for the client to give it.
        let flushed = self.producer.flush(self.options.delivery_timeout + Duration::from_secs(1));
        let elapsed = self.started.elapsed();
        let mut state = self.state();
        let written = state.log.as_mut().map_or(Ok(()), log::Log::finish);
        let not_delivered = self.sent + self.unsent - state.delivered;
        if not_delivered > 0 {
            let unreported = || flushed.err().map_or_else(|| "no delivery report".to_owned(), |error| error.to_string());
            let first = state.first_failure.take().unwrap_or_else(unreported);
            let (topic, brokers) = (self.options.topic.clone(), brokers(&self.options.client));
            return Err(ProduceError::NotDelivered { topic, brokers, delivered: state.delivered, not_delivered, first });
        }
        written.map_err(|error| ProduceError::File { path: log.unwrap_or(Path::new("log")).to_owned(), error })?;
        Ok(Produced { delivered: state.delivered, elapsed })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.producer.context().state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Takes the delivery reports. The lock is never waited for: reports are taken in on the thread that sends.
struct Deliveries {
    state: Mutex<State>,
    log: ClientLog,
}

struct State {
    log: Option<log::Log>,
    delivered: u64,
    first_failure: Option<String>,
}

impl State {
    fn fail(&mut self, error: &KafkaError) {
        self.first_failure.get_or_insert_with(|| error.to_string());
    }
}

impl ClientContext for Deliveries {
    const ENABLE_REFRESH_OAUTH_TOKEN: bool = true;

    fn generate_oauth_token(&self, file: Option<&str>) -> Result<OAuthToken, Box<dyn Error>> {
        connection::renew(file)
    }

    fn log(&self, level: RDKafkaLogLevel, facility: &str, line: &str) {
        ClientLog::line(level, facility, line);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        self.log.error(&error, reason);
    }
}

impl ProducerContext for Deliveries {
    type DeliveryOpaque = ();

    fn delivery(&self, result: &DeliveryResult<'_>, (): ()) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match result {
            Ok(message) => {
                state.delivered += 1;
                if let Some(log) = &mut state.log {
                    // What was sent is read once more, so that the log tells what is in the topic, not what was meant.
                    log.write(&LogLine::of(message.partition(), message.offset(), message.payload()));
                }
            }
            Err((error, _)) => state.fail(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::fs;

    use rdkafka::mocking::MockCluster;
    use rdkafka::producer::DefaultProducerContext;
    use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};

    use super::*;
    use crate::event::Currency;

    /// A file of this test's own, gone with it.
    struct TempFile(PathBuf);

    impl TempFile {
        fn new(name: &str, contents: &[u8]) -> Self {
            let path = std::env::temp_dir().join(format!("onceward-produce-{}-{name}", std::process::id()));
            fs::write(&path, contents).unwrap();
            Self(path)
        }

        fn lines(&self) -> Vec<LogLine> {
            fs::read_to_string(&self.0).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
        }
    }

    impl Drop for TempFile {
        fn drop(&mut self) {
            let _ = fs::remove_file(&self.0);
        }
    }

    fn options(brokers: &str, source: Source, log: &TempFile) -> Options {
        let mut client = ClientConfig::new();
        // A queue that is full nearly always.
        client.set("bootstrap.servers", brokers).set("queue.buffering.max.messages", "50");
        let delivery_timeout = Duration::from_secs(30);
        Options {
            client,
            topic: "orders.confirmed".to_owned(),
            source,
            per_second: None,
            log: Some(log.0.clone()),
            delivery_timeout,
        }
    }

    fn generated(count: u64) -> Generated {
        let currencies = vec![Currency::from_code("EUR").unwrap()];
        Generated { count, currencies, duplicates_percent: 20, duplicates_elsewhere_percent: 50, seed: 1, first_order: None }
    }

    fn cluster() -> MockCluster<'static, DefaultProducerContext> {
        let cluster = MockCluster::new(1).unwrap();
        cluster.create_topic("orders.confirmed", 3, 1).unwrap();
        cluster
    }

    #[test]
    fn everything_is_delivered_through_a_full_queue_and_logged_where_it_landed() {
        let (cluster, log) = (cluster(), TempFile::new("all", b""));
        let options = options(&cluster.bootstrap_servers(), Source::Generated(generated(2_000)), &log);
        assert_eq!(run(&options).unwrap().delivered, 2_000);
        assert_eq!(run(&options).unwrap().delivered, 2_000);
        let lines = log.lines();
        let places: HashSet<_> = lines.iter().map(|line| (line.partition, line.offset)).collect();
        let events: HashSet<_> = lines.iter().map(|line| line.event_id.unwrap()).collect();
        assert_eq!((lines.len(), places.len(), events.len()), (4_000, 4_000, 3_200));
        let homes: HashSet<_> = lines.iter().map(|line| (line.event_id, line.partition)).collect();
        assert!(homes.len() > events.len(), "some repeats must be on another partition");
    }

    #[test]
    fn a_file_is_sent_line_by_line_as_it_is() {
        let event = br#"{"eventId":"01890a5d-ac96-774b-bcce-b302099a8057","eventType":"order.confirmed.v1","occurredAt":"2023-06-29T12:34:56.789Z","orderId":42,"customerId":7,"totalAmount":10.00,"currency":"EUR"}"#;
        let file = TempFile::new("file", &[event, &b"\n\n\xff\0 no json\n"[..], event].concat());
        let (cluster, log) = (cluster(), TempFile::new("file-log", b""));
        let produced = run(&options(&cluster.bootstrap_servers(), Source::File(file.0.clone()), &log)).unwrap();
        assert_eq!(produced.delivered, 3);
        let lines = log.lines();
        let (events, others): (Vec<_>, Vec<_>) = lines.iter().partition(|line| line.fault.is_none());
        assert_eq!((events[0].order, events[0].partition), (Some(42), events[1].partition));
        assert_eq!((others.len(), others[0].fault.as_deref()), (1, Some("undecodable")));
    }

    #[test]
    fn what_is_not_delivered_is_counted() {
        let log = TempFile::new("none", b"");
        let cluster = cluster();
        let refused = [RDKafkaRespErr::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED; 3];
        cluster.request_errors(RDKafkaApiKey::Produce, &refused);
        let error = run(&options(&cluster.bootstrap_servers(), Source::Generated(generated(1_000)), &log)).unwrap_err();
        let ProduceError::NotDelivered { delivered, not_delivered, .. } = &error else { panic!("{error}") };
        assert!(*not_delivered > 0 && delivered + not_delivered == 1_000, "{error}");
        assert_eq!(log.lines().len() as u64, *delivered);
    }

    #[test]
    fn without_a_broker_or_a_topic_nothing_is_sent_and_the_key_to_look_at_is_named() {
        let log = TempFile::new("nowhere", b"");
        let run = |brokers: &str, topic: &str| {
            let delivery_timeout = Duration::from_millis(200);
            let options = options(brokers, Source::Generated(generated(1)), &log);
            run(&Options { topic: topic.to_owned(), delivery_timeout, ..options }).unwrap_err().to_string()
        };
        // Nobody listens on port 1.
        let error = run("127.0.0.1:1", "orders.confirmed");
        assert!(error.starts_with("no answer from 127.0.0.1:1: ") && error.ends_with("see kafka.brokers"), "{error}");
        let error = run(&cluster().bootstrap_servers(), "orders.misspelt");
        assert!(error.contains("orders.misspelt") && error.ends_with("see kafka.topic"), "{error}");
    }

    #[test]
    fn a_rate_is_kept() {
        let (cluster, log) = (cluster(), TempFile::new("rate", b""));
        let mut options = options(&cluster.bootstrap_servers(), Source::Generated(generated(51)), &log);
        options.per_second = Some(100);
        assert!(run(&options).unwrap().elapsed >= Duration::from_millis(500));
        options.per_second = Some(0);
        assert!(matches!(run(&options), Err(ProduceError::Options(_))));
    }
}
