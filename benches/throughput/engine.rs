//! The engine as its users run it: `onceward run` on a topic that was filled before.
//!
//! In: a Kafka, a database with our tables. Out: events per second from the beginning of the first transaction to the end of the last
//! one, by the database's clock; processor time; memory. It owns the topic and the child.
//!
//! Invariant: the figures come from the rows of the database, never from the engine's own counters.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use onceward::event::Currency;
use onceward::lab::postgres;
use onceward::lab::process::{self, Signal, TempFolder};
use onceward::produce::{self, Generated, Source};
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer as _};
use rdkafka::{ClientConfig, Offset, TopicPartitionList};
use tokio::runtime::Runtime;
use tokio_postgres::NoTls;

use crate::machine::{self, Cpu, Processes};
use crate::{Result, block_on};

/// Of the topic.
pub const PARTITIONS: i32 = 12;
const CONCURRENCY: u32 = 3;
const GROUP: &str = "billing-order-confirmed";
/// How often the database is asked how far the engine is.
pub const LOOK: Duration = Duration::from_millis(20);
/// No progress for so long is a failure.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// What one consumption of the topic gave.
#[derive(Clone, Copy, Debug)]
pub struct Measured {
    pub per_second: f64,
    pub rss_peak_mib: f64,
}

/// A topic full of events.
pub struct Topic {
    pub name: String,
    pub events: u64,
    /// Key and payload of its first event.
    pub event_bytes: usize,
    /// How long producing took.
    pub elapsed: Duration,
    ends: BTreeMap<i32, i64>,
}

impl Topic {
    /// Makes it and produces so many new events.
    pub fn fill(kafka: &str, name: &str, events: u64) -> Result<Self> {
        let admin: AdminClient<DefaultClientContext> = client(kafka).create()?;
        let topic = NewTopic::new(name, PARTITIONS, TopicReplication::Fixed(1));
        for made in block_on(admin.create_topics([&topic], &AdminOptions::new()))? {
            made.map_err(|(name, code)| format!("topic {name}: {code}"))?;
        }
        let generated = Generated {
            count: events,
            currencies: vec![Currency::from_code("EUR")?],
            duplicates_percent: 0,
            duplicates_elsewhere_percent: 0,
            seed: 1,
            first_order: None,
        };
        let produced = produce::run(&produce::Options {
            client: client(kafka),
            topic: name.to_owned(),
            source: Source::Generated(generated),
            per_second: None,
            log: None,
            delivery_timeout: Duration::from_secs(120),
        })?;
        let consumer = consumer(kafka)?;
        let mut ends = BTreeMap::new();
        for partition in 0..PARTITIONS {
            ends.insert(partition, consumer.fetch_watermarks(name, partition, PATIENCE)?.1);
        }
        Ok(Self {
            name: name.to_owned(),
            events,
            event_bytes: first_event_bytes(&consumer, name)?,
            elapsed: produced.elapsed,
            ends,
        })
    }

    /// Commits the beginning of every partition for the group, which has no members, as an operator does to replay everything.
    pub fn reset(&self, kafka: &str) -> Result<()> {
        let consumer = consumer(kafka)?;
        let mut beginning = TopicPartitionList::new();
        for partition in self.ends.keys() {
            beginning.add_partition_offset(&self.name, *partition, Offset::Offset(0))?;
        }
        Ok(consumer.commit(&beginning, CommitMode::Sync)?)
    }
}

/// Everything that the engine needs around it.
pub struct Engine<'a> {
    pub kafka: &'a str,
    pub topic: &'a Topic,
    pub database: &'a str,
    pub processes: &'a Processes,
}

/// How far the engine is.
#[derive(Clone, Copy)]
struct Row {
    partition: i32,
    next_offset: i64,
    /// When the transaction that wrote the row began, and when it was read, by the database's clock.
    updated_at: f64,
    now: f64,
}

impl Engine<'_> {
    /// Consumes the whole topic and prints what it took.
    pub fn consume(&self, what: &str) -> Result<Measured> {
        let observer = Observer::connect(self.database)?;
        let before = observer.look()?;
        let servers = [self.processes.postgres, self.processes.kafka];
        let cpu_before = servers.map(Cpu::of);
        let folder = TempFolder::new("throughput")?;
        let mut child = self.start(&folder)?;
        let took = self.watch(&observer, &before, &mut child);
        let (cpu_engine, rss) = (Cpu::of(Some(child.id())), machine::rss_peak_mib(child.id()));
        let [postgres, kafka] = [0, 1].map(|server| Cpu::of(servers[server]) - cpu_before[server]);
        let status = process::end(&mut child, Signal::Term, PATIENCE)?;
        let (seconds, rss_peak_mib) = match (took, rss) {
            (Ok(seconds), Ok(rss)) if status.success() => (seconds, rss),
            (took, _) => {
                let log = fs::read_to_string(folder.path().join("stderr.log")).unwrap_or_default();
                let lines: Vec<&str> = log.lines().collect();
                eprintln!("{}", lines[lines.len().saturating_sub(40)..].join("\n"));
                return Err(took.err().unwrap_or_else(|| format!("onceward ended with {status}").into()));
            }
        };
        let events = self.topic.events as f64;
        let [engine, postgres, kafka] = [cpu_engine, postgres, kafka].map(|seconds| seconds * 1e6 / events);
        println!(
            "  {what:<10}          {} events/s; CPU per million: engine {engine:.1} s, PostgreSQL {postgres:.1} s, Kafka {kafka:.1} s; \
             peak {rss_peak_mib:.0} MiB",
            crate::thousands(events / seconds)
        );
        Ok(Measured { per_second: events / seconds, rss_peak_mib })
    }

    /// Every event is claimed and paid, once.
    pub fn check(&self) -> Result<()> {
        let rows = postgres::query(self.database, "SELECT (SELECT count(*) FROM processed_event), (SELECT count(*) FROM payment)")?;
        let expected = Some(self.topic.events.to_string());
        if rows == [[expected.clone(), expected]] {
            Ok(())
        } else {
            Err(format!("{} events were produced, but claims and payments are {rows:?}", self.topic.events).into())
        }
    }

    fn start(&self, folder: &TempFolder) -> Result<Child> {
        let config = format!(
            "kafka.brokers = '{}'\nkafka.topic = '{}'\nkafka.group = '{GROUP}'\ndatabase.url = '{}'\nprovider.kind = 'none'\n\
             pipeline.partition_concurrency = {CONCURRENCY}\nadmin.listen = '127.0.0.1:{}'\n",
            self.kafka,
            self.topic.name,
            self.database,
            process::free_port()?
        );
        let path = folder.path().join("onceward.toml");
        fs::write(&path, config)?;
        let log = File::create(folder.path().join("stderr.log"))?;
        let mut command = Command::new(env!("CARGO_BIN_EXE_onceward"));
        command
            .arg("run")
            .arg("--config")
            .arg(path)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .env_remove("RUST_LOG");
        Ok(process::spawn(command, Signal::Kill)?)
    }

    /// Seconds from the beginning of the first transaction to the moment when every partition has moved and stands at its end.
    fn watch(&self, observer: &Observer, before: &[Row], child: &mut Child) -> Result<f64> {
        let ends = &self.topic.ends;
        let stood = |partition| before.iter().find(|row| row.partition == partition).map_or(0, |row| row.next_offset);
        let mut moved: BTreeMap<i32, f64> = BTreeMap::new();
        let (mut settled, mut since) = (0, Instant::now());
        loop {
            let rows = observer.look()?;
            for row in rows.iter().filter(|row| row.next_offset != stood(row.partition)) {
                moved.entry(row.partition).or_insert(row.updated_at);
            }
            if let Some(last) = rows.last()
                && ends.iter().all(|(partition, end)| *end == 0 || moved.contains_key(partition))
                && rows.iter().all(|row| ends.get(&row.partition) == Some(&row.next_offset))
            {
                let first = moved.values().copied().fold(f64::INFINITY, f64::min);
                return Ok(last.now - first);
            }
            let now_settled: i64 = rows.iter().map(|row| row.next_offset).sum();
            if now_settled != settled {
                (settled, since) = (now_settled, Instant::now());
            }
            if since.elapsed() > PATIENCE {
                return Err(format!("no progress beyond {settled} of {} events for {PATIENCE:?}", self.topic.events).into());
            }
            if let Some(status) = child.try_wait()? {
                return Err(format!("onceward ended with {status}").into());
            }
            thread::sleep(LOOK);
        }
    }
}

/// One connection that asks again and again: making one costs more than the question.
pub struct Observer {
    runtime: Runtime,
    client: tokio_postgres::Client,
}

impl Observer {
    pub fn connect(url: &str) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (client, connection) = runtime.block_on(tokio_postgres::connect(url, NoTls))?;
        runtime.spawn(connection);
        Ok(Self { runtime, client })
    }

    pub fn ask(&self, sql: &str) -> Result<Vec<tokio_postgres::Row>> {
        Ok(self.runtime.block_on(self.client.query(sql, &[]))?)
    }

    fn look(&self) -> Result<Vec<Row>> {
        let sql = "SELECT partition, coalesce(next_offset, 0), extract(epoch FROM updated_at)::float8,
                          extract(epoch FROM clock_timestamp())::float8
                   FROM consumed_partition";
        let rows = self.ask(sql)?;
        let row = |row: &tokio_postgres::Row| Row {
            partition: row.get(0),
            next_offset: row.get(1),
            updated_at: row.get(2),
            now: row.get(3),
        };
        Ok(rows.iter().map(row).collect())
    }
}

fn first_event_bytes(consumer: &BaseConsumer, topic: &str) -> Result<usize> {
    let mut first = TopicPartitionList::new();
    first.add_partition_offset(topic, 0, Offset::Beginning)?;
    consumer.assign(&first)?;
    let record = consumer.poll(PATIENCE).ok_or("the first event cannot be read")??;
    Ok(record.key_len() + record.payload_len())
}

fn consumer(kafka: &str) -> Result<BaseConsumer> {
    Ok(client(kafka).set("group.id", GROUP).set("enable.auto.commit", "false").create()?)
}

fn client(kafka: &str) -> ClientConfig {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", kafka);
    config
}
