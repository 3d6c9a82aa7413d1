//! What people run today for the same job: the programs in `benches/peers`, beside the engine and measured as it is.
//!
//! In: what the engine has around it, the programs. Out: events per second from the beginning of the first transaction to the moment
//! when every event is paid, by the database's clock; processor time. It owns a database with the peer's own tables, and the child.
//!
//! Invariant: a peer has figures only when it has claimed and paid every event, once.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use onceward::lab::postgres;
use onceward::lab::process::{self, Signal, TempFolder};

use crate::engine::{Engine, LOOK, Observer, PATIENCE};
use crate::machine::{self, Cpu};
use crate::topic::{Filling, Topic};
use crate::{Bench, Database, Figure, Result, thousands};

/// The first start fetches and builds what the peer is made of.
const BUILD: Duration = Duration::from_secs(600);

struct Peer {
    /// Of the folder; with `_` the key in the last line.
    name: &'static str,
    /// A slow one is not given more.
    most_events: u64,
}

const PEERS: [Peer; 2] =
    [Peer { name: "spring-batch", most_events: u64::MAX }, Peer { name: "kafkajs-typeorm", most_events: 20_000 }];

/// Every peer consumes the engine's topic, or a shorter one like it.
pub fn measure(bench: &Bench<'_>, engine: &Engine<'_>, topic: &Topic, engine_per_second: f64) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for peer in &PEERS {
        let database = Database::empty(bench.server, &format!("{}_{}", peer.key(), bench.number))?;
        postgres::query(&database.url, &fs::read_to_string(peer.folder().join("tables.sql"))?)?;
        postgres::query(bench.server, "CHECKPOINT")?;
        let shorter;
        let topic = if topic.events > peer.most_events {
            shorter = Topic::fill(bench.kafka, &format!("{}.{}", topic.name, peer.name), &Filling::even(peer.most_events))?;
            &shorter
        } else {
            topic
        };
        let around = Engine { topic: &topic.name, database: &database.url, ..*engine };
        let per_second = peer.consume(&around, topic).map_err(|error| format!("{}: {error}", peer.name))?;
        around.check(topic)?;
        figures.push(Figure::new(format!("peers.{}.eps", peer.key()), per_second));
        figures.push(Figure::new(format!("peers.{}.ratio", peer.key()), engine_per_second / per_second));
    }
    Ok(figures)
}

impl Peer {
    fn key(&self) -> String {
        self.name.replace('-', "_")
    }

    fn folder(&self) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/peers").join(self.name)
    }

    /// Consumes the whole topic, prints what it took, and gives the events per second.
    fn consume(&self, around: &Engine<'_>, topic: &Topic) -> Result<f64> {
        let observer = Observer::connect(around.database)?;
        let servers = [around.processes.postgres, around.processes.kafka];
        let cpu_before = servers.map(Cpu::of);
        let folder = TempFolder::new("peer")?;
        let log = folder.path().join("log");
        let mut child = self.start(around, &log)?;
        let took = wait_until_ready(&log, &mut child).and_then(|()| watch(&observer, topic.events, &mut child));
        let (cpu_peer, rss) = (Cpu::of_itself(child.id()), machine::rss_peak_mib(child.id()));
        let [postgres, kafka] = [0, 1].map(|server| Cpu::of(servers[server]) - cpu_before[server]);
        // A Java program ends with the signal's number also when it has put its house in order.
        let code = process::exit_code(process::end(&mut child, Signal::Term, PATIENCE)?);
        let (seconds, rss_peak_mib) = match (took, rss) {
            (Ok(seconds), Ok(rss)) if [0, 143].contains(&code) => (seconds, rss),
            (took, _) => {
                let log = fs::read_to_string(&log).unwrap_or_default();
                let lines: Vec<&str> = log.lines().collect();
                eprintln!("{}", lines[lines.len().saturating_sub(40)..].join("\n"));
                return Err(took.err().unwrap_or_else(|| format!("it ended with {code}").into()));
            }
        };
        let events = topic.events as f64;
        let [peer, postgres, kafka] = [cpu_peer, postgres, kafka].map(|seconds| seconds * 1e6 / events);
        println!(
            "  {:<24} {} events/s; CPU per million: peer {peer:.1} s, PostgreSQL {postgres:.1} s, Kafka {kafka:.1} s; \
             peak {rss_peak_mib:.0} MiB",
            self.name,
            thousands(events / seconds)
        );
        Ok(events / seconds)
    }

    fn start(&self, around: &Engine<'_>, log: &Path) -> Result<Child> {
        let log = File::create(log)?;
        let mut command = Command::new(self.folder().join("run"));
        command
            .env("PEER_BROKERS", around.kafka)
            .env("PEER_TOPIC", around.topic)
            .env("PEER_GROUP", self.name)
            .env("PEER_DATABASE_URL", around.database)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        Ok(process::spawn(command, Signal::Kill)?)
    }
}

fn wait_until_ready(log: &Path, child: &mut Child) -> Result<()> {
    let started = Instant::now();
    while !fs::read_to_string(log)?.lines().any(|line| line == "ready") {
        still_runs(child)?;
        if started.elapsed() > BUILD {
            return Err(format!("not ready after {BUILD:?}").into());
        }
        thread::sleep(LOOK);
    }
    Ok(())
}

/// Seconds from the beginning of the first transaction to the moment when all payments are there.
fn watch(observer: &Observer, events: u64, child: &mut Child) -> Result<f64> {
    let (mut bytes, mut since) = (0, Instant::now());
    loop {
        let now: i64 = observer.ask("SELECT pg_relation_size('payment')")?[0].get(0);
        if now != bytes {
            (bytes, since) = (now, Instant::now());
        } else if bytes > 0 {
            // Counting reads all of the table, so it is done only when that has stopped growing.
            let sql = "SELECT count(*), extract(epoch FROM statement_timestamp() - min(created_at))::float8 FROM payment";
            let row = &observer.ask(sql)?[0];
            if row.get::<_, i64>(0).unsigned_abs() == events {
                return Ok(row.get(1));
            }
        }
        if since.elapsed() > PATIENCE {
            return Err(format!("no progress beyond {bytes} bytes of payments for {PATIENCE:?}").into());
        }
        still_runs(child)?;
        thread::sleep(LOOK);
    }
}

fn still_runs(child: &mut Child) -> Result<()> {
    child.try_wait()?.map_or(Ok(()), |status| Err(format!("it ended with {status}").into()))
}
