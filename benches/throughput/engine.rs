//! The engine as its users run it: `onceward run` on a topic that was filled before.
//!
//! In: a Kafka, a database with our tables. Out: events per second from the beginning of the first transaction to the end of the last
//! one, by the database's clock; processor time; memory. It owns the child.
//!
//! Invariant: the figures come from the rows of the database, never from the engine's own counters.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use onceward::lab::postgres;
use onceward::lab::process::{self, Signal, TempFolder};
use tokio::runtime::Runtime;
use tokio_postgres::NoTls;

use crate::machine::{self, Cpu, Processes};
use crate::topic::Topic;
use crate::{Result, thousands};

/// Of a topic, where nothing else is said.
pub const PARTITIONS: i32 = 12;
pub const GROUP: &str = "billing-order-confirmed";
/// How often the database is asked how far the engine is.
pub const LOOK: Duration = Duration::from_millis(20);
/// No progress for so long is a failure.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// What one consumption of the topic gave.
#[derive(Clone, Copy, Debug)]
pub struct Measured {
    pub per_second: f64,
    pub rss_peak_mib: f64,
    /// Processor time of the engine for an event, in microseconds.
    pub us_per_event: f64,
}

/// Everything that the engine needs around it.
#[derive(Clone, Copy)]
pub struct Engine<'a> {
    pub kafka: &'a str,
    pub topic: &'a str,
    pub database: &'a str,
    pub processes: &'a Processes,
    /// Lines of its configuration beside what it must have; without any, the defaults hold and the provider is left out.
    pub settings: &'a str,
}

/// An engine that runs.
pub struct Running {
    pub child: Child,
    folder: TempFolder,
}

/// How far the engine is.
#[derive(Clone, Copy)]
pub struct Row {
    pub partition: i32,
    pub next_offset: i64,
    /// When the transaction that wrote the row began, and when it was read, by the database's clock.
    pub updated_at: f64,
    pub now: f64,
}

impl Engine<'_> {
    /// Consumes the whole topic and prints what it took.
    pub fn consume(&self, what: &str, topic: &Topic) -> Result<Measured> {
        self.consume_with(what, topic, self.database, |_| {})
    }

    /// The same, looked at by another way to the database; does something with the process's id when the first events are settled.
    pub fn consume_with(&self, what: &str, topic: &Topic, way: &str, meanwhile: impl FnOnce(u32)) -> Result<Measured> {
        let observer = Observer::connect(way)?;
        let before = observer.look()?;
        let servers = [self.processes.postgres, self.processes.kafka];
        let cpu_before = servers.map(Cpu::of);
        let mut running = self.start()?;
        let took = watch(topic, &observer, &before, &mut running, meanwhile);
        let (cpu_engine, rss) = (Cpu::of(Some(running.child.id())), machine::rss_peak_mib(running.child.id()));
        let [postgres, kafka] = [0, 1].map(|server| Cpu::of(servers[server]) - cpu_before[server]);
        let (seconds, rss_peak_mib) = running.end(took.and_then(|seconds| Ok((seconds, rss?))))?;
        let events = topic.events as f64;
        let [engine, postgres, kafka] = [cpu_engine, postgres, kafka].map(|seconds| seconds * 1e6 / events);
        println!(
            "  {what:<24} {} events/s; CPU per million: engine {engine:.1} s, PostgreSQL {postgres:.1} s, Kafka {kafka:.1} s; \
             peak {rss_peak_mib:.0} MiB",
            thousands(events / seconds)
        );
        Ok(Measured { per_second: events / seconds, rss_peak_mib, us_per_event: engine })
    }

    /// Every event is claimed and paid, once.
    pub fn check(&self, topic: &Topic) -> Result<()> {
        let rows = postgres::query(self.database, "SELECT (SELECT count(*) FROM processed_event), (SELECT count(*) FROM payment)")?;
        let expected = Some(topic.distinct.to_string());
        if rows == [[expected.clone(), expected]] {
            Ok(())
        } else {
            Err(format!("{} events were produced, but claims and payments are {rows:?}", topic.distinct).into())
        }
    }

    pub fn start(&self) -> Result<Running> {
        let mut config = format!(
            "kafka.brokers = '{}'\nkafka.topic = '{}'\nkafka.group = '{GROUP}'\ndatabase.url = '{}'\nadmin.listen = '127.0.0.1:{}'\n",
            self.kafka,
            self.topic,
            self.database,
            process::free_port()?
        );
        if !self.settings.contains("provider.url") {
            config.push_str("provider.kind = 'none'\n");
        }
        let _ = writeln!(config, "{}", self.settings);
        let folder = TempFolder::new("throughput")?;
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
        Ok(Running { child: process::spawn(command, Signal::Kill)?, folder })
    }
}

impl Running {
    /// Ends it; what was measured counts only if it ends well.
    pub fn end<T>(mut self, measured: Result<T>) -> Result<T> {
        let status = process::end(&mut self.child, Signal::Term, PATIENCE)?;
        if measured.is_ok() && status.success() {
            return measured;
        }
        let log = fs::read_to_string(self.folder.path().join("stderr.log")).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        eprintln!("{}", lines[lines.len().saturating_sub(40)..].join("\n"));
        Err(measured.err().unwrap_or_else(|| format!("onceward ended with {status}").into()))
    }

    /// An error once it has ended.
    pub fn still_runs(&mut self) -> Result<()> {
        self.child.try_wait()?.map_or(Ok(()), |status| Err(format!("onceward ended with {status}").into()))
    }
}

/// Seconds from the beginning of the first transaction to the moment when every partition has moved and stands at its end.
fn watch(topic: &Topic, observer: &Observer, before: &[Row], running: &mut Running, meanwhile: impl FnOnce(u32)) -> Result<f64> {
    let stood = |partition| before.iter().find(|row| row.partition == partition).map_or(0, |row| row.next_offset);
    let mut moved: BTreeMap<i32, f64> = BTreeMap::new();
    let mut meanwhile = Some(meanwhile);
    let (mut settled, mut since) = (0, Instant::now());
    loop {
        let rows = observer.look()?;
        for row in rows.iter().filter(|row| row.next_offset != stood(row.partition)) {
            moved.entry(row.partition).or_insert(row.updated_at);
        }
        if !moved.is_empty()
            && let Some(meanwhile) = meanwhile.take()
        {
            meanwhile(running.child.id());
            since = Instant::now();
        }
        if let Some(last) = rows.last()
            && topic.ends.iter().all(|(partition, end)| *end == 0 || moved.contains_key(partition))
            && topic
                .ends
                .iter()
                .all(|(partition, end)| *end == 0 || rows.iter().any(|row| row.partition == *partition && row.next_offset == *end))
        {
            let first = moved.values().copied().fold(f64::INFINITY, f64::min);
            return Ok(last.now - first);
        }
        let now_settled: i64 = rows.iter().map(|row| row.next_offset).sum();
        if now_settled != settled {
            (settled, since) = (now_settled, Instant::now());
        }
        if since.elapsed() > PATIENCE {
            return Err(format!("no progress beyond {settled} of {} events for {PATIENCE:?}", topic.events).into());
        }
        running.still_runs()?;
        thread::sleep(LOOK);
    }
}

/// One connection that asks again and again: making one costs more than the question.
pub struct Observer {
    runtime: Runtime,
    client: tokio_postgres::Client,
    look: OnceCell<tokio_postgres::Statement>,
}

impl Observer {
    pub fn connect(url: &str) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (client, connection) = runtime.block_on(tokio_postgres::connect(url, NoTls))?;
        runtime.spawn(connection);
        Ok(Self { runtime, client, look: OnceCell::new() })
    }

    pub fn ask(&self, sql: &str) -> Result<Vec<tokio_postgres::Row>> {
        Ok(self.runtime.block_on(self.client.query(sql, &[]))?)
    }

    /// How far the engine is.
    pub fn look(&self) -> Result<Vec<Row>> {
        let sql = "SELECT partition, coalesce(next_offset, 0), extract(epoch FROM updated_at)::float8,
                          extract(epoch FROM clock_timestamp())::float8
                   FROM consumed_partition";
        if self.look.get().is_none() {
            let _ = self.look.set(self.runtime.block_on(self.client.prepare(sql))?);
        }
        let look = self.look.get().ok_or("it was prepared above")?;
        let rows = self.runtime.block_on(self.client.query(look, &[]))?;
        let row = |row: &tokio_postgres::Row| Row {
            partition: row.get(0),
            next_offset: row.get(1),
            updated_at: row.get(2),
            now: row.get(3),
        };
        Ok(rows.iter().map(row).collect())
    }
}
