//! What the engine reaches of what the database can do: the raw limit and the engine, in one run, on one server.
//!
//! In: a Kafka and a PostgreSQL (`scripts/bench` starts them). Out: a report, and with `--format json` one object on the last line. It
//! owns the databases and topics that it makes; they end with the servers.
//!
//! Invariant: nothing is measured on a database that could lose a commit, and a run in which an event is missing has no figures.

mod engine;
mod growth;
mod machine;
mod peers;
mod raw;

use std::error::Error;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use onceward::lab::postgres;
use onceward::store::{self, Settings, TimeLimits};

use crate::engine::Measured;
use crate::machine::Cpu;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Measures the engine's throughput against the raw limit of its own statements.
#[derive(Debug, Parser)]
#[command(name = "throughput")]
struct Arguments {
    /// Events that the engine consumes.
    #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(u64).range(20_000..))]
    events: u64,
    /// Runs; the median of each figure is reported.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=100))]
    runs: u64,
    /// Measures the programs in benches/peers as well.
    #[arg(long)]
    peers: bool,
    /// Measures instead what so many claims in the table cost, by the statements of a batch alone.
    #[arg(long, value_name = "ROWS,…", value_delimiter = ',', conflicts_with_all = ["events", "peers", "format"])]
    growth: Option<Vec<u64>>,
    /// `json` adds one object as the last line.
    #[arg(long, value_enum, default_value_t = Format::Human)]
    format: Format,
    /// Given by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    Human,
    Json,
}

/// Connections and events per transaction of the raw limit.
const SHAPES: [(usize, usize); 4] = [(3, 512), (4, 512), (3, 2_048), (4, 2_048)];
/// Events of one raw measurement.
const RAW_EVENTS: usize = 300_000;

/// What one run gave.
struct Run {
    raw: Vec<f64>,
    fresh: Measured,
    duplicates: Measured,
    /// None, unless they were asked for.
    peers: Vec<peers::Measured>,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let causes = std::iter::successors(error.source(), |&cause| cause.source());
            eprintln!("throughput: {}", causes.fold(error.to_string(), |words, cause| format!("{words}: {cause}")));
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<()> {
    let server = |name: &str| std::env::var(name).map_err(|_| format!("{name} is not set: use scripts/bench"));
    let (kafka, database) = (server("ONCEWARD_TEST_KAFKA")?, server("ONCEWARD_TEST_DATABASE_URL")?);
    if let Some(rows) = &arguments.growth {
        println!("onceward, growth of the table of claims: {} × {} events a transaction", growth::SHAPE.0, growth::SHAPE.1);
        println!("machine     {}", machine::describe()?);
        machine::describe_database(&database)?.iter().for_each(|line| println!("{line}"));
        return growth::measure(&database, rows, arguments.runs);
    }
    println!("onceward, throughput: {} events, {} partitions, provider left out", arguments.events, engine::PARTITIONS);
    println!("machine     {}", machine::describe()?);
    machine::describe_database(&database)?.iter().for_each(|line| println!("{line}"));

    let processes = machine::Processes::find(&database)?;
    let mut runs = Vec::new();
    for number in 1..=arguments.runs {
        println!("run {number}");
        runs.push(measure(arguments, number, &kafka, &database, &processes)?);
    }
    report(&runs, arguments.format);
    Ok(())
}

fn measure(arguments: &Arguments, number: u64, kafka: &str, server: &str, processes: &machine::Processes) -> Result<Run> {
    let mut raw = Vec::new();
    for (index, (connections, batch)) in SHAPES.into_iter().enumerate() {
        let database = Database::create(server, &format!("raw_{number}_{index}"))?;
        let before = Cpu::of(processes.postgres);
        let per_second = raw::measure(&database.url, connections, batch, RAW_EVENTS, |id| id)?.per_second;
        let cpu = (Cpu::of(processes.postgres) - before) * 1e6 / RAW_EVENTS as f64;
        println!(
            "  raw       {connections} × {batch:<5} {} events/s; CPU per million: PostgreSQL {cpu:.1} s",
            thousands(per_second)
        );
        raw.push(per_second);
    }
    let database = Database::create(server, &format!("engine_{number}"))?;
    let events = arguments.events;
    let topic = engine::Topic::fill(kafka, &format!("orders.confirmed.{number}"), events)?;
    println!("  produced  {events} events of {} bytes in {:.1} s", topic.event_bytes, topic.elapsed.as_secs_f64());
    let engine = engine::Engine { kafka, topic: &topic, database: &database.url, processes };
    let fresh = engine.consume("fresh")?;
    topic.reset(kafka)?;
    let duplicates = engine.consume("duplicates")?;
    engine.check()?;
    let peers = if arguments.peers { peers::measure(&engine, server, number, fresh.per_second)? } else { Vec::new() };
    Ok(Run { raw, fresh, duplicates, peers })
}

fn report(runs: &[Run], format: Format) {
    let raw: Vec<f64> = (0..SHAPES.len()).map(|shape| median(runs.iter().map(|run| run.raw[shape]))).collect();
    let best = raw.iter().copied().fold(0.0, f64::max);
    let fresh = median(runs.iter().map(|run| run.fresh.per_second));
    let duplicates = median(runs.iter().map(|run| run.duplicates.per_second));
    let rss = runs.iter().map(|run| run.fresh.rss_peak_mib.max(run.duplicates.rss_peak_mib)).fold(0.0, f64::max);
    println!("median of {} run(s)", runs.len());
    for ((connections, batch), per_second) in SHAPES.into_iter().zip(&raw) {
        println!("  raw {connections} × {batch:<5}       {} events/s", thousands(*per_second));
    }
    println!("  engine, fresh       {} events/s = {:.2} of the best raw", thousands(fresh), fresh / best);
    println!("  engine, duplicates  {} events/s", thousands(duplicates));
    println!("  engine, peak        {rss:.0} MiB resident");
    let peers = peers::report(runs);
    if format == Format::Json {
        println!(
            r#"{{"fresh_eps":{fresh:.0},"raw_eps":{best:.0},"ratio":{:.3},"duplicates_eps":{duplicates:.0},"rss_peak_mib":{rss:.1}{peers}}}"#,
            fresh / best
        );
    }
}

/// The middle one, or the lower of the two in the middle.
fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[(values.len() - 1) / 2]
}

fn thousands(per_second: f64) -> String {
    format!("{:>7.1} thousand", per_second / 1_000.0)
}

/// A database of one measurement, gone afterwards, so that no measurement shares the disk or the vacuum with one before it.
struct Database<'a> {
    server: &'a str,
    name: String,
    url: String,
}

impl<'a> Database<'a> {
    /// With our tables.
    fn create(server: &'a str, name: &str) -> Result<Self> {
        let database = Self::empty(server, name)?;
        block_on(store::migrate(&settings(&database.url)))?;
        postgres::query(server, "CHECKPOINT")?;
        Ok(database)
    }

    fn empty(server: &'a str, name: &str) -> Result<Self> {
        postgres::query(server, &format!("CREATE DATABASE {name}"))?;
        let url = match server.rsplit_once('/') {
            Some((host, _)) => format!("{host}/{name}"),
            None => return Err("the server's URL names no database".into()),
        };
        Ok(Self { server, name: name.to_owned(), url })
    }
}

impl Drop for Database<'_> {
    fn drop(&mut self) {
        if let Err(error) = postgres::query(self.server, &format!("DROP DATABASE {} WITH (FORCE)", self.name)) {
            eprintln!("throughput: {error}");
        }
    }
}

/// The engine's own defaults.
fn settings(url: &str) -> Settings {
    let ms = Duration::from_millis;
    let limits = TimeLimits { lock: ms(3_000), statement: ms(5_000), idle_in_transaction: ms(12_000), budget: ms(20_000) };
    Settings { url: url.to_owned(), connect_timeout: ms(2_000), pool_wait: ms(5_000), limits }
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime needs a few threads").block_on(future)
}
