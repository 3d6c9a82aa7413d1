//! What the engine reaches of what the database can do: the raw limit and the engine, in one run, on one server; and what the engine
//! does under every load that its users have.
//!
//! In: a Kafka and a PostgreSQL (`scripts/bench` starts them). Out: a report, and with `--format json` one object on the last line. It
//! owns the databases and topics that it makes; they end with the servers.
//!
//! Invariant: but for a quick look nothing is measured on a database that could lose a commit, and a run in which an event is missing has
//! no figures.

mod cases;
mod engine;
mod growth;
mod latency;
mod machine;
mod peers;
mod plot;
mod raw;
mod topic;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use onceward::config::Secret;
use onceward::lab::postgres;
use onceward::store::{self, Form, Settings, TimeLimits};
use serde_json::{Map, Value, json};

use crate::cases::Case;
use crate::engine::Engine;
use crate::machine::{Cpu, Load, Processes};
use crate::raw::Shape;
use crate::topic::{Filling, Topic};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Measures the engine's throughput against the raw limit of its own statements.
#[derive(Debug, Parser)]
#[command(name = "throughput")]
struct Arguments {
    /// Events that the engine consumes in the plain case.
    #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(u64).range(20_000..))]
    events: u64,
    /// Runs; the median of each figure is reported.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=100))]
    runs: u64,
    /// Only these cases.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "CASE,…")]
    only: Option<Vec<Case>>,
    /// A tenth of the events in every case, on any database: for a look, and to see that it runs.
    #[arg(long)]
    quick: bool,
    /// Measures the programs in benches/peers as well.
    #[arg(long)]
    peers: bool,
    /// Measures instead what so many claims in the table cost, by the statements of a batch alone.
    #[arg(long, value_name = "ROWS,…", value_delimiter = ',', conflicts_with_all = ["events", "only", "quick", "peers", "format"])]
    growth: Option<Vec<u64>>,
    /// `json` adds one object as the last line.
    #[arg(long, value_enum, default_value_t = Format::Human)]
    format: Format,
    /// Draws the medians as SVG files into this folder.
    #[arg(long, value_name = "FOLDER", conflicts_with = "growth")]
    plot: Option<PathBuf>,
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
const SHAPES: [(usize, usize); 2] = [(3, 2_048), (4, 2_048)];

/// While others take more of the processors, no ratio means anything.
const OTHERS: f64 = 0.10;

/// What every case needs.
struct Bench<'a> {
    kafka: &'a str,
    server: &'a str,
    processes: &'a Processes,
    /// Of the run, from 1.
    number: u64,
    events: u64,
    quick: bool,
    peers: bool,
}

/// One number of the last line.
#[derive(Clone, Debug)]
struct Figure {
    /// With a dot for each step into the object.
    key: String,
    value: f64,
}

impl Figure {
    fn new(key: impl Into<String>, value: f64) -> Self {
        Self { key: key.into(), value }
    }
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
    println!("machine     {}", machine::describe()?);
    machine::describe_database(&database, arguments.quick)?.iter().for_each(|line| println!("{line}"));
    if let Some(rows) = &arguments.growth {
        println!("growth of the table of claims: {} × {} events a transaction", growth::SHAPE.0, growth::SHAPE.1);
        return growth::measure(&database, rows, arguments.runs);
    }
    let processes = Processes::find(&database)?;
    let cases = arguments.only.as_deref().unwrap_or(Case::value_variants());
    let mut runs = Vec::new();
    for number in 1..=arguments.runs {
        println!("run {number}");
        let bench = Bench {
            kafka: &kafka,
            server: &database,
            processes: &processes,
            number,
            events: arguments.events,
            quick: arguments.quick,
            peers: arguments.peers,
        };
        let mut figures = Vec::new();
        for case in cases {
            figures.extend(case.measure(&bench)?);
        }
        runs.push(figures);
    }
    let medians = medians(&runs);
    if let Some(folder) = &arguments.plot {
        plot::draw(folder, |key| medians.iter().find(|figure| figure.key == key).map(|figure| figure.value))?;
    }
    if arguments.format == Format::Json {
        let mut line = Map::new();
        for Figure { key, value } in &medians {
            insert(&mut line, key, written(*value).parse::<f64>().map_or(Value::Null, |value| json!(value)));
        }
        println!("{}", Value::Object(line));
    }
    Ok(())
}

impl Bench<'_> {
    fn scaled(&self, events: u64) -> u64 {
        if self.quick { events / 10 } else { events }
    }

    fn database(&self, name: &str) -> Result<Database<'_>> {
        Database::create(self.server, name)
    }

    /// With its defaults, on no topic yet.
    fn engine<'a>(&'a self, database: &'a str) -> Engine<'a> {
        Engine { kafka: self.kafka, topic: "", database, processes: self.processes, settings: "" }
    }

    /// New events in the best shape; and in the best one for that, the same events once more.
    fn best_raw(&self, form: Form) -> Result<[f64; 2]> {
        let mut best = [0_f64; 2];
        for (connections, batch) in SHAPES {
            let database = self.database(&format!("raw_{}_{connections}_{batch}", self.number))?;
            // As many as the engine gets: the database is slower once it has to write back what it has made.
            let events = self.scaled(self.events) as usize;
            let shape = Shape { connections, batch, events, form, id: |id| id };
            let both = raw::measure_twice(&database.url, &shape, || Cpu::of(self.processes.postgres))?;
            let (measured, cpu) = (both.map(|(measured, _)| measured.per_second), both.map(|(_, cpu)| cpu * 1e6 / events as f64));
            let name = format!("raw {connections} × {batch}{}", if form == Form::Optimistic { "" } else { ", on conflict" });
            println!(
                "  {name:<24} {} events/s, once more {}; CPU per million: PostgreSQL {:.1} s, once more {:.1} s",
                thousands(measured[0]),
                thousands(measured[1]),
                cpu[0],
                cpu[1]
            );
            best = [best[0].max(measured[0]), best[1].max(measured[1])];
        }
        Ok(best)
    }

    fn plain(&self) -> Result<Vec<Figure>> {
        let before = Load::now(self.processes)?;
        let raw_on_conflict = self.best_raw(Form::OnConflict)?;
        let raw = self.best_raw(Form::Optimistic)?;
        // Once more it is the same statements in both.
        let raw_duplicates = raw[1].max(raw_on_conflict[1]);
        let database = self.database(&format!("plain_{}", self.number))?;
        let topic = Topic::fill(self.kafka, &format!("plain_{}", self.number), &Filling::even(self.scaled(self.events)))?;
        println!("  produced {} events of {} bytes in {:.1} s", topic.events, topic.event_bytes, topic.elapsed.as_secs_f64());
        let engine = Engine { topic: &topic.name, ..self.engine(&database.url) };
        let fresh = engine.consume("new events", &topic)?;
        topic.reset(self.kafka)?;
        let duplicates = engine.consume("the same once more", &topic)?;
        engine.check(&topic)?;
        let others = before.of_others_until(&Load::now(self.processes)?)?;
        let is_quiet = others <= OTHERS;
        println!("  other processes took {:.0} % of the processors{}", others * 100.0, if is_quiet { "" } else { ": no ratio" });
        let ratio = |a: f64, b: f64| if is_quiet { a / b } else { f64::NAN };
        let mut figures = vec![
            Figure::new("fresh_eps", fresh.per_second),
            Figure::new("raw_eps", raw[0]),
            Figure::new("ratio", ratio(fresh.per_second, raw[0])),
            Figure::new("raw_on_conflict_eps", raw_on_conflict[0]),
            Figure::new("fastest_raw_eps", raw[0].max(raw_on_conflict[0])),
            Figure::new("duplicates_eps", duplicates.per_second),
            Figure::new("raw_duplicates_eps", raw_duplicates),
            Figure::new("duplicates_ratio", ratio(duplicates.per_second, raw_duplicates)),
            Figure::new("rss_peak_mib", fresh.rss_peak_mib.max(duplicates.rss_peak_mib)),
            Figure::new("engine_us_per_event", fresh.us_per_event),
        ];
        if self.peers {
            figures.extend(peers::measure(self, &engine, &topic, fresh.per_second)?);
        }
        Ok(figures)
    }
}

/// The median of each figure, told with the range of its values.
fn medians(runs: &[Vec<Figure>]) -> Vec<Figure> {
    println!("medians of {} run(s)", runs.len());
    let of = |(index, Figure { key, .. }): (usize, &Figure)| {
        let values: Vec<f64> = runs.iter().map(|figures| figures[index].value).collect();
        let [least, most] = [f64::min, f64::max].map(|of| values.iter().copied().reduce(of).unwrap_or_default());
        let median = median(values.into_iter());
        let range = if runs.len() > 1 { format!("   ({}–{})", written(least), written(most)) } else { String::new() };
        println!("  {key:<32} {:>12}{range}", written(median));
        Figure::new(key, median)
    };
    runs.first().into_iter().flatten().enumerate().map(of).collect()
}

/// Three or four digits that mean something.
fn written(value: f64) -> String {
    match value.abs() {
        size if size >= 1_000.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.3}"),
    }
}

fn insert(object: &mut Map<String, Value>, key: &str, value: Value) {
    match key.split_once('.') {
        None => {
            object.insert(key.to_owned(), value);
        }
        Some((first, rest)) => {
            let inner = object.entry(first).or_insert_with(|| json!({}));
            if let Value::Object(inner) = inner {
                insert(inner, rest, value);
            }
        }
    }
}

/// The middle one, or the lower of the two in the middle; none if one of them is none.
fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    if values.iter().any(|value| value.is_nan()) {
        return f64::NAN;
    }
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
    Settings { url: Secret::new(url.to_owned()), connect_timeout: ms(2_000), pool_wait: ms(5_000), limits }
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime needs a few threads").block_on(future)
}
