//! What chaos is made on: brokers, a database behind a breakable way, a lying provider, engines.
//!
//! In: what was given, and what is to be started. Out: what can be seen from outside the engines. It owns every server that was not
//! given, and the folder for files; all of it is gone when it is dropped.
//!
//! Invariant: the engines reach the database by the breakable way only, and we look at it by the direct one.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::{ClientConfig, TopicPartitionList};
use tokio::runtime::Runtime;
use uuid::Uuid;

use super::engines::Engines;
use super::watch::Position;
use super::{Args, Protocol};
use crate::audit::{self, Report};
use crate::config::{Config, Need};
use crate::event::Currency;
use crate::lab::interrupt;
use crate::lab::kafka::Kafka;
use crate::lab::postgres::{self, Postgres, PostgresError};
use crate::lab::process::TempFolder;
use crate::lab::provider_stub::{self, Act, ProviderStub, Reply, Rule};
use crate::lab::proxy::Proxy;
use crate::produce::{self, Generated, ProduceError, Produced, Source};
use crate::store::Store;

/// Of the topic.
pub const PARTITIONS: i32 = 12;
/// For one question to the broker.
const PATIENCE: Duration = Duration::from_secs(10);
/// The producer's log.
const PRODUCED: &str = "produced.jsonl";
/// How many of a hundred records repeat an earlier one, and how many of a hundred repeats go to another partition.
const REPEATS: (u8, u8) = (13, 25);

/// All of it; what is dropped first stands first.
pub struct Field {
    /// The engines.
    pub engines: Engines,
    /// The way that the engines take to the database.
    pub way: Proxy,
    /// Who is asked for money.
    pub provider: ProviderStub,
    server: Server,
    database: String,
    group: BaseConsumer,
    brokers: String,
    topic: String,
    runtime: Runtime,
    folder: TempFolder,
    _kafka: Option<Kafka>,
}

/// The database server.
enum Server {
    /// Ours: it may be restarted.
    Own {
        postgres: Postgres,
        is_up: bool,
    },
    Given,
}

impl Field {
    /// Starts everything but the engines.
    pub fn set_up(args: &Args) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        runtime.spawn(interrupt::watch());
        let folder = TempFolder::new("chaos")?;
        let name = format!("chaos_{}", &Uuid::now_v7().simple().to_string()[20..]);
        let kafka = args.kafka_jars.as_deref().map(Kafka::start).transpose()?;
        let brokers = kafka.as_ref().map(Kafka::bootstrap_servers).or_else(|| args.brokers.clone()).context("no broker")?;
        make_topic(&runtime, &brokers, &name)?;
        let (server, database) = match &args.database {
            None => {
                let postgres = Postgres::start(&postgres::Options::default())?;
                let database = postgres.create_database(&name)?;
                (Server::Own { postgres, is_up: true }, database)
            }
            Some(given) => {
                postgres::query(given, &format!("CREATE DATABASE {name}"))?;
                let mut url: url::Url = given.parse()?;
                url.set_path(&name);
                (Server::Given, url.into())
            }
        };
        let way = Proxy::before(&database)?;
        let provider = ProviderStub::start(provider_stub::Options { script: lies(), ..provider_stub::Options::default() })?;
        let configuration = configuration(args.protocol, &brokers, &name, way.url(), &provider.url());
        let engines = Engines::new(folder.path().to_owned(), &configuration, args.processes.into())?;
        let mut client = ClientConfig::new();
        client.set("bootstrap.servers", &brokers).set("group.id", &name).set("enable.auto.commit", "false");
        let group = client.create()?;
        Ok(Self { engines, way, provider, server, database, group, brokers, topic: name, runtime, folder, _kafka: kafka })
    }

    /// Whether the server is ours to restart.
    pub const fn has_its_own_server(&self) -> bool {
        matches!(self.server, Server::Own { .. })
    }

    /// Whether the database server runs.
    pub const fn server_is_up(&self) -> bool {
        matches!(self.server, Server::Own { is_up: true, .. } | Server::Given)
    }

    /// Ends the server that is ours, in order or as by a crash.
    pub fn stop_server(&mut self, crash: bool) -> Result<(), PostgresError> {
        let Server::Own { postgres, is_up } = &mut self.server else { return Ok(()) };
        *is_up = false;
        if crash { postgres.crash() } else { postgres.stop() }
    }

    /// Starts it again.
    pub fn start_server(&mut self) -> Result<(), PostgresError> {
        let Server::Own { postgres, is_up } = &mut self.server else { return Ok(()) };
        postgres.start_again()?;
        *is_up = true;
        Ok(())
    }

    /// Ends every connection of the engines.
    pub fn kill_backends(&self) -> Result<(), PostgresError> {
        let kill = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                    WHERE datname = current_database() AND application_name = 'onceward'";
        postgres::query(&self.database, kill).map(drop)
    }

    /// Whether database, provider and at least one engine are there.
    pub fn could_go_on(&self) -> bool {
        self.server_is_up() && self.way.is_open() && self.engines.running() > 0
    }

    /// Where each partition stands that has been worked on. Nothing, when the database does not answer now.
    pub fn positions(&self) -> Result<BTreeMap<i32, Position>> {
        let positions = "SELECT partition, next_offset FROM consumed_partition WHERE next_offset IS NOT NULL";
        let Ok(rows) = postgres::query(&self.database, positions) else { return Ok(BTreeMap::new()) };
        let position = |row: Vec<Option<String>>| -> Result<(i32, Position)> {
            let [Some(partition), Some(next_offset)] = &row[..] else { anyhow::bail!("two columns, none of them NULL") };
            let partition = partition.parse()?;
            Ok((partition, Position { next_offset: next_offset.parse()?, end: self.end(partition)? }))
        };
        rows.into_iter().map(position).collect()
    }

    /// Every record is settled and committed, and nothing waits to be tried again by itself.
    pub fn is_settled(&self) -> Result<bool> {
        let positions = self.positions()?;
        let committed = self.committed()?;
        let done = |(partition, position): (&i32, &Position)| {
            position.next_offset == position.end && committed.get(partition) == Some(&position.end)
        };
        let waiting = "SELECT count(*) FROM held_event WHERE state IN ('retrying', 'queued')";
        let all = positions.len() == usize::try_from(PARTITIONS)?;
        Ok(all && positions.iter().all(done) && postgres::query(&self.database, waiting)? == [[Some("0".to_owned())]])
    }

    /// Puts records into the topic and their places into the log.
    pub fn produce(&self, source: Source) -> Result<(), ProduceError> {
        produce::run(&self.options(source, None)).map(drop)
    }

    /// The same on a thread of its own: new orders and repeats, so many a second for so many seconds.
    pub fn produce_beside(&self, rate: u32, seconds: u64, seed: u64) -> JoinHandle<Result<Produced, ProduceError>> {
        let currencies = ["EUR", "EUR", "USD", "JPY", "KWD"].map(|code| Currency::from_code(code).expect("an ISO 4217 code"));
        let generated = Generated {
            count: u64::from(rate) * seconds,
            currencies: currencies.to_vec(),
            duplicates_percent: REPEATS.0,
            duplicates_elsewhere_percent: REPEATS.1,
            seed,
            first_order: Some(1),
        };
        let options = self.options(Source::Generated(generated), Some(rate));
        thread::spawn(move || produce::run(&options))
    }

    /// Reconciles what was produced, paid and charged.
    pub fn audit(&self) -> Result<Report> {
        let config = Config::load(Some(&self.engines.configuration()), [], &[Need::Database])?;
        let store = Store::connect(&config.database.settings(), 1)?;
        let options = audit::Options {
            group: self.topic.clone(),
            topic: self.topic.clone(),
            produced: Some(audit::Source::Log(self.folder.path().join(PRODUCED))),
            ledger: Some(self.provider.url().parse()?),
            ledger_tls: config.provider.tls(),
            ledger_in_minor_units: false,
            memory: audit::MEMORY,
            show_progress: false,
        };
        Ok(self.runtime.block_on(audit::run(&store, &options))?)
    }

    /// Writes lines to a file in the folder.
    pub fn file(&self, name: &str, lines: &[Vec<u8>]) -> Result<PathBuf> {
        let path = self.folder.path().join(name);
        fs::write(&path, lines.join(&b'\n'))?;
        Ok(path)
    }

    fn options(&self, source: Source, per_second: Option<u32>) -> produce::Options {
        let mut client = ClientConfig::new();
        client.set("bootstrap.servers", &self.brokers);
        let log = Some(self.folder.path().join(PRODUCED));
        produce::Options { client, topic: self.topic.clone(), source, per_second, log, delivery_timeout: Duration::from_secs(60) }
    }

    fn end(&self, partition: i32) -> Result<i64> {
        Ok(self.group.fetch_watermarks(&self.topic, partition, PATIENCE)?.1)
    }

    fn committed(&self) -> Result<BTreeMap<i32, i64>> {
        let mut wanted = TopicPartitionList::new();
        wanted.add_partition_range(&self.topic, 0, PARTITIONS - 1);
        let committed = self.group.committed_offsets(wanted, PATIENCE)?;
        let offsets =
            committed.elements().into_iter().filter_map(|element| Some((element.partition(), element.offset().to_raw()?)));
        Ok(offsets.collect())
    }
}

fn make_topic(runtime: &Runtime, brokers: &str, name: &str) -> Result<()> {
    let admin: AdminClient<DefaultClientContext> = ClientConfig::new().set("bootstrap.servers", brokers).create()?;
    let topic = NewTopic::new(name, PARTITIONS, TopicReplication::Fixed(1));
    let made = runtime.block_on(admin.create_topics([&topic], &AdminOptions::new()))?;
    ensure!(made.iter().all(Result::is_ok), "the topic {name} was not made: {made:?}");
    Ok(())
}

/// One call of ten is lied to. Every key is lied to once, so that in the end each order is charged, declined, or refused for good.
fn lies() -> Vec<Rule> {
    let html = Reply {
        status: 200,
        content_type: Some("text/html".to_owned()),
        body: Some("<p>Thank you".to_owned()),
        ..Reply::default()
    };
    let shares = [
        (20, Act::Close { charge: true, reset: false }),
        (15, Act::declined()),
        (10, Act::Close { charge: false, reset: true }),
        (10, Act::HalfAnswer),
        (10, Act::AnswerThenClose),
        (10, Act::status(500)),
        (10, Act::InProgress),
        (8, Act::Delay { ms: 200 }),
        (4, Act::Reply(Reply { charge: true, ..html })),
        (2, Act::status(400)),
        (1, Act::stored_failure()),
    ];
    shares.into_iter().zip(1..).map(|((per_mille, act), seed)| Rule::for_share(per_mille, seed, act)).collect()
}

/// The defaults of time scaled down, the order among them kept, so that what is dead is missed in seconds. In the end only those events are
/// left that the provider fails for ever; nothing but them would keep the breaker open for minutes, so it takes more of them than there are.
fn configuration(protocol: Protocol, brokers: &str, name: &str, database: &str, provider: &str) -> String {
    let protocol = match protocol {
        Protocol::CooperativeSticky => "assignor = \"cooperative-sticky\"",
        Protocol::Range => "assignor = \"range\"",
        Protocol::Broker => "assignor = \"broker\"",
    };
    format!(
        "[kafka]
brokers = {brokers:?}
topic = {name:?}
group = {name:?}
{protocol}
session_timeout_ms = 6000
max_poll_interval_ms = 20000
commit_interval_ms = 50

[pipeline]
drain_ms = 5000

[database]
url = {database:?}
connect_timeout_ms = 1000
lock_timeout_ms = 1000
statement_timeout_ms = 1500
idle_in_transaction_timeout_ms = 4000
transaction_budget_ms = 6000

[provider]
url = {provider:?}
call_timeout_ms = 1500
effect_deadline_ms = 3000
breaker_failures = 100

[retry]
max_attempts = 10
backoff_min_ms = 100
backoff_max_ms = 1000
"
    )
}
