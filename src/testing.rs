//! For tests of your own handler: a world of its own for each test, engines that die where you say, and the reckoning.
//!
//! Everything here is synchronous and panics when it fails, as a test wants it. It stands behind the feature `lab`, for tests only, so that the
//! program you ship can neither lie nor kill:
//!
//! ```toml
//! [dependencies]
//! onceward = "0.1"
//!
//! [dev-dependencies]
//! onceward = { version = "0.1", features = ["lab"] }
//! ```
//!
//! ```no_run
//! # fn order(id: uuid::Uuid) -> String { String::new() }
//! use std::process::Command;
//!
//! use onceward::testing::{CrashPoint, World, kill_at};
//! use onceward::uuid::Uuid;
//!
//! # fn in_a_test_crate() {
//! let world = World::new("CREATE TABLE journal (event_id uuid NOT NULL, order_id bigint NOT NULL)");
//! let ids: Vec<Uuid> = (0..100).map(|_| Uuid::now_v7()).collect();
//! world.send(ids.iter().map(|id| ("a key".to_owned(), order(*id))));
//!
//! let program = || Command::new("target/debug/journal"); // in your crate: env!("CARGO_BIN_EXE_journal")
//! let mut program_that_dies = program();
//! program_that_dies.envs([kill_at(CrashPoint::BeforeCommit, 1)]);
//! world.spawn(program_that_dies).wait_until_killed();
//! let engine = world.spawn(program());
//! world.wait_until_settled();
//! engine.stop();
//! world.assert_each_once(ids, "SELECT event_id FROM journal");
//! # }
//! ```
//!
//! A handler that calls a downstream needs one in the test that misbehaves: [`provider_stub`] is a payment provider that lies on request.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Debug;
use std::fs::{self, File};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::KafkaResult;
use rdkafka::producer::{BaseProducer, BaseRecord, Producer as _};
use rdkafka::{ClientConfig, TopicPartitionList};
use tokio::sync::oneshot;
use uuid::Uuid;

pub use crate::crash::CrashPoint;
#[doc(inline)]
pub use crate::lab::provider_stub;

use crate::config::{Config, Need};
use crate::engine;
use crate::handler::Handler;
use crate::lab::broker::MockBroker;
use crate::lab::postgres::{self, Postgres};
use crate::lab::process::{self, Signal, TempFolder};
use crate::store;

/// No single wait is longer.
pub const LIMIT: Duration = Duration::from_secs(60);
/// Of a world's topic.
const PARTITIONS: i32 = 3;
/// Between two looks.
const LOOK: Duration = Duration::from_millis(20);

/// The defaults of time scaled down, the order among them kept, so that a death is noticed within seconds.
pub const SHORT_TIMES_MS: [(&str, i64); 14] = [
    ("kafka.session_timeout_ms", 6_000),
    ("kafka.max_poll_interval_ms", 20_000),
    ("kafka.commit_interval_ms", 50),
    ("database.connect_timeout_ms", 1_000),
    ("database.lock_timeout_ms", 1_000),
    ("database.statement_timeout_ms", 1_500),
    ("database.idle_in_transaction_timeout_ms", 4_000),
    ("database.transaction_budget_ms", 6_000),
    ("provider.call_timeout_ms", 1_500),
    ("provider.effect_deadline_ms", 3_000),
    ("pipeline.drain_ms", 5_000),
    ("pipeline.stuck_after_ms", 8_000),
    ("retry.backoff_min_ms", 200),
    ("retry.backoff_max_ms", 1_000),
];

/// One test's own world: a topic of three partitions, a consumer group, and a database with onceward's tables and yours.
pub struct World {
    settings: BTreeMap<String, String>,
    database_url: String,
    brokers: String,
    topic: String,
    group: String,
    servers: Option<(MockBroker, Postgres)>,
}

/// An engine inside the test's process.
#[derive(Debug)]
#[must_use = "an engine ends when nobody holds it"]
pub struct Inside {
    stop: oneshot::Sender<()>,
    thread: JoinHandle<anyhow::Result<()>>,
}

/// An engine that is a process. It is killed when it is dropped; when the test fails, its last words are shown.
#[derive(Debug)]
#[must_use = "an engine ends when nobody holds it"]
pub struct Outside {
    child: Child,
    folder: TempFolder,
    /// The mock broker keeps a killed member for a while.
    is_missed_late: bool,
}

impl World {
    /// In servers of its own, which need no Java: PostgreSQL, from this machine or fetched, and librdkafka's mock broker, in which one engine
    /// runs at a time. `tables` is SQL.
    ///
    /// # Panics
    /// A server cannot be had, or refuses the tables.
    #[must_use]
    pub fn new(tables: &str) -> Self {
        let name = unique_name();
        let broker = MockBroker::start(&name, PARTITIONS).expect("a mock broker");
        let postgres = Postgres::start(&postgres::Options { fsync: false, ..postgres::Options::default() }).expect("PostgreSQL");
        let (brokers, database) = (broker.bootstrap_servers().to_owned(), postgres.create_database(&name).expect("a database"));
        let mut world = Self::with_tables(name, brokers, database, tables);
        world.set("kafka.assignor", "range");
        world.servers = Some((broker, postgres));
        world
    }

    /// In servers that are there: Kafka's bootstrap servers, and the URL of a superuser in any database of PostgreSQL. `onceward-lab --kafka-jars
    /// FOLDER -- cargo test` starts both and names them in `ONCEWARD_TEST_KAFKA` and `ONCEWARD_TEST_DATABASE_URL`.
    ///
    /// # Panics
    /// One of them does not answer, or refuses.
    #[must_use]
    pub fn within(brokers: &str, database_url: &str, tables: &str) -> Self {
        let name = unique_name();
        let admin: AdminClient<DefaultClientContext> =
            ClientConfig::new().set("bootstrap.servers", brokers).create().expect("a client");
        let topic = NewTopic::new(&name, PARTITIONS, TopicReplication::Fixed(1));
        let made = runtime().block_on(admin.create_topics([&topic], &AdminOptions::new())).expect("the broker answers");
        assert!(made.iter().all(Result::is_ok), "the topic is not made: {made:?}");
        postgres::query(database_url, &format!("CREATE DATABASE {name}")).expect("a database");
        let (server, _) = database_url.rsplit_once('/').expect("a URL with a database");
        let database = format!("{server}/{name}");
        Self::with_tables(name, brokers.to_owned(), database, tables)
    }

    fn with_tables(name: String, brokers: String, database_url: String, tables: &str) -> Self {
        let mut world =
            Self { settings: BTreeMap::new(), database_url, brokers, group: format!("group-{name}"), topic: name, servers: None };
        for (key, milliseconds) in SHORT_TIMES_MS {
            world.set(key, &milliseconds.to_string());
        }
        let own = [
            ("kafka.brokers", world.brokers.clone()),
            ("kafka.topic", world.topic.clone()),
            ("kafka.group", world.group.clone()),
            ("database.url", world.database_url.clone()),
            ("provider.kind", "none".to_owned()),
            ("held.dead_letters", "false".to_owned()), // their topic would have to be made
            ("admin.listen", "127.0.0.1:0".to_owned()),
        ];
        for (key, value) in own {
            world.set(key, &value);
        }
        runtime().block_on(store::migrate(&world.config().database.settings())).expect("onceward's tables");
        world.rows(tables);
        world
    }

    /// Sets any key of the configuration, `section.key`, for engines that start from now on.
    pub fn set(&mut self, key: &str, value: &str) -> &mut Self {
        self.settings.insert(key.to_owned(), value.to_owned());
        self
    }

    /// The configuration.
    ///
    /// # Panics
    /// With all faults of what was set.
    #[must_use]
    pub fn config(&self) -> Config {
        let variables = self.variables().map(|(name, value)| (OsString::from(name), OsString::from(value)));
        Config::load(None, variables, &[Need::Kafka, Need::Database]).expect("the configuration is good")
    }

    /// Sends records, each with its key, and waits until the broker has them.
    ///
    /// # Panics
    /// It does not take them.
    pub fn send(&self, records: impl IntoIterator<Item = (String, String)>) {
        let producer: BaseProducer = self.client().set("linger.ms", "1").create().expect("a producer");
        for (key, payload) in records {
            let mut record = BaseRecord::to(&self.topic).key(&key).payload(&payload);
            while let Err((_, full)) = producer.send(record) {
                producer.poll(LOOK);
                record = full;
            }
        }
        producer.flush(LIMIT).expect("the broker takes the records");
    }

    /// Starts an engine with this handler in this process: a test can look into the handler.
    pub fn run(&self, handler: impl Handler) -> Inside {
        let (stop, stopped) = oneshot::channel();
        let config = self.config();
        let stop_or_dropped = async {
            let _ = stopped.await;
        };
        Inside { stop, thread: thread::spawn(move || engine::run(config, handler, stop_or_dropped)) }
    }

    /// Starts your program as an engine, configured by its environment: it can be killed.
    ///
    /// # Panics
    /// It cannot be started.
    pub fn spawn(&self, mut program: Command) -> Outside {
        let folder = TempFolder::new("engine").expect("a folder");
        let log = File::create(folder.path().join(LOG)).expect("a log");
        program.stdin(Stdio::null()).stdout(log.try_clone().expect("a log")).stderr(log).envs(self.variables());
        let child = process::spawn(program, Signal::Kill).expect("the program starts");
        Outside { child, folder, is_missed_late: self.servers.is_some() }
    }

    /// Waits until every record is settled and its offset committed, and nothing waits to be tried again. What waits for a person is settled:
    /// `held_event` tells.
    ///
    /// # Panics
    /// Not within [`LIMIT`].
    pub fn wait_until_settled(&self) {
        let waiting = "SELECT count(*) FROM held_event WHERE state IN ('retrying', 'waiting', 'queued')";
        let consumer: BaseConsumer = self.client().set("group.id", &self.group).create().expect("a consumer");
        wait_until_equal("records to settle, events to be tried again", (0, "0".to_owned()), || {
            // A leader or a coordinator that has just been chosen may not answer yet.
            let lag = self.lag(&consumer).unwrap_or(-1);
            (lag, self.rows(waiting)[0][0].clone().unwrap_or_default())
        });
    }

    /// The reckoning: each of these events was claimed once, and each has one of the rows that `rows` gives, whose first column is the event's id;
    /// no row is left over. Repeats and refused records are therefore not among `ids`.
    ///
    /// # Panics
    /// It does not add up.
    pub fn assert_each_once(&self, ids: impl IntoIterator<Item = Uuid>, rows: &str) {
        let sorted = |mut ids: Vec<String>| {
            ids.sort_unstable();
            ids
        };
        let column = |sql: &str| sorted(self.rows(sql).into_iter().map(|mut row| row.swap_remove(0).unwrap_or_default()).collect());
        let ids = sorted(ids.into_iter().map(|id| id.hyphenated().to_string()).collect());
        assert_eq!(column(&format!("SELECT event_id FROM processed_event WHERE consumer_group = '{}'", self.group)), ids, "claims");
        assert_eq!(column(rows), ids, "{rows}");
    }

    /// Runs statements in the database; the rows of all of them, each value as the server writes it.
    ///
    /// # Panics
    /// The server refuses.
    pub fn rows(&self, sql: &str) -> Vec<Vec<Option<String>>> {
        postgres::query(&self.database_url, sql).unwrap_or_else(|error| panic!("{error}"))
    }

    fn variables(&self) -> impl Iterator<Item = (String, &str)> {
        let variable = |key: &str| format!("ONCEWARD_{}", key.to_uppercase().replace('.', "_"));
        self.settings.iter().map(move |(key, value)| (variable(key), value.as_str()))
    }

    fn client(&self) -> ClientConfig {
        let mut client = ClientConfig::new();
        client.set("bootstrap.servers", &self.brokers);
        client
    }

    fn lag(&self, consumer: &BaseConsumer) -> KafkaResult<i64> {
        let mut wanted = TopicPartitionList::new();
        wanted.add_partition_range(&self.topic, 0, PARTITIONS - 1);
        let committed = consumer.committed_offsets(wanted, ANSWER)?;
        let mut lag = 0;
        for partition in 0..PARTITIONS {
            let offset = committed.find_partition(&self.topic, partition).and_then(|element| element.offset().to_raw());
            let (first, end) = consumer.fetch_watermarks(&self.topic, partition, ANSWER)?;
            lag += end - offset.filter(|offset| *offset >= 0).unwrap_or(first);
        }
        Ok(lag)
    }
}

impl Inside {
    /// Ends it in order.
    ///
    /// # Panics
    /// It did not end in order.
    pub fn stop(self) {
        let _ = self.stop.send(()); // it may have ended by itself
        self.thread.join().expect("the engine does not panic").expect("the engine ends in order");
    }
}

impl Outside {
    /// Ends it with SIGTERM, in order.
    ///
    /// # Panics
    /// It did not end, or with another exit code than 0.
    pub fn stop(mut self) {
        process::signal(&mut self.child, Signal::Term).expect("a signal is sent");
        let status = self.wait();
        assert!(status.success(), "the engine ended with {status}");
    }

    /// Ends it with SIGKILL, wherever it is.
    ///
    /// # Panics
    /// It had ended by itself.
    pub fn kill(mut self) {
        process::signal(&mut self.child, Signal::Kill).expect("a signal is sent");
        self.wait_until_killed();
    }

    /// Waits until it has died of SIGKILL, as at a point of [`kill_at`].
    ///
    /// # Panics
    /// It ended in another way, or not within [`LIMIT`].
    pub fn wait_until_killed(mut self) {
        let status = self.wait();
        assert_eq!(status.signal(), Some(libc::SIGKILL), "the engine ended with {status}");
        if self.is_missed_late {
            // Until then, whoever joins may become a follower of the dead.
            thread::sleep(MISSED_AFTER);
        }
    }

    fn wait(&mut self) -> ExitStatus {
        let ended = process::wait(&mut self.child, LIMIT).expect("a child is waited for");
        ended.unwrap_or_else(|| panic!("the engine has not ended within {LIMIT:?}"))
    }
}

impl Drop for Outside {
    fn drop(&mut self) {
        let _ = process::end(&mut self.child, Signal::Kill, Duration::from_secs(5)); // gone, or never to go
        if thread::panicking() {
            let log = fs::read_to_string(self.folder.path().join(LOG)).unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            eprintln!("--- the engine's last lines ---\n{}\n---", lines[lines.len().saturating_sub(80)..].join("\n"));
        }
    }
}

/// A variable for an engine's environment: it is killed when it passes the point for the `passage`th time.
#[must_use]
pub fn kill_at(point: CrashPoint, passage: u32) -> (&'static str, String) {
    ("ONCEWARD_CRASH_POINTS", format!("{}:kill:{passage}", point.as_str()))
}

/// Looks again and again until it sees `expected`.
///
/// # Panics
/// Not within [`LIMIT`]; it tells what it saw last.
pub fn wait_until_equal<T: PartialEq + Debug>(what: &str, expected: T, mut look: impl FnMut() -> T) {
    let end = Instant::now() + LIMIT;
    loop {
        let seen = look();
        if seen == expected {
            return;
        }
        assert!(Instant::now() < end, "not within {LIMIT:?}: {what}\n expected: {expected:?}\n seen last: {seen:?}");
        thread::sleep(LOOK);
    }
}

/// The engine's output, in its folder.
const LOG: &str = "output.log";
/// The longest wait for one answer of the broker.
const ANSWER: Duration = Duration::from_secs(5);
/// The mock broker may make a killed member the leader of the next generation, unless less than a rebalance is left of its session.
const MISSED_AFTER: Duration = Duration::from_millis(2_500);

/// Good for topics, groups and databases alike.
fn unique_name() -> String {
    format!("test_{}", Uuid::now_v7().simple())
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime needs a few file descriptors")
}
