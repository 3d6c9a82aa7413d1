//! The cases beside the plain one: a provider, more or fewer transactions at once, repeats, loads that are not even, latency, memory,
//! starts.
//!
//! In: the servers. Out: figures. It owns a topic and a database for each case.
//!
//! Invariant: in every case every event is claimed and paid once, or there is no figure.

use std::thread;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use onceward::lab::process::{self, Signal};
use onceward::lab::provider_stub::{Act, Options, ProviderStub, Rule};
use onceward::lab::proxy::Proxy;

use crate::engine::{Engine, Measured, Observer, PARTITIONS, PATIENCE};
use crate::latency::{self, Load, Percentiles};
use crate::topic::{Filling, Spread, Topic};
use crate::{Bench, Figure, Result, machine};

/// A group of cases.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Case {
    /// The raw limit, new events, the same events once more.
    Plain,
    /// Each event is charged at a provider that answers after some milliseconds.
    Provider,
    /// `pipeline.partition_concurrency`.
    Concurrency,
    /// Repeats among the events.
    Repeats,
    /// One hot partition, one hot key, large events.
    Uneven,
    /// From produced to settled, at a rate.
    Latency,
    /// What the engine holds while the database is silent.
    Memory,
    /// The first event after a start.
    Start,
}

impl Case {
    pub fn measure(self, bench: &Bench<'_>) -> Result<Vec<Figure>> {
        match self {
            Self::Plain => bench.plain(),
            Self::Provider => provider(bench),
            Self::Concurrency => concurrency(bench),
            Self::Repeats => repeats(bench),
            Self::Uneven => uneven(bench),
            Self::Latency => latency(bench),
            Self::Memory => memory(bench),
            Self::Start => start(bench),
        }
    }
}

/// One topic, one database, one consumption.
fn consume(bench: &Bench<'_>, what: &str, filling: &Filling, settings: &str) -> Result<(Topic, Measured)> {
    let name = format!("case_{what}_{}", bench.number).replace([' ', ',', '.', '%'], "_").to_lowercase();
    let database = bench.database(&name)?;
    let topic = Topic::fill(bench.kafka, &name, filling)?;
    let engine = Engine { topic: &topic.name, settings, ..bench.engine(&database.url) };
    let measured = engine.consume(what, &topic)?;
    engine.check(&topic)?;
    Ok((topic, measured))
}

fn provider(bench: &Bench<'_>) -> Result<Vec<Figure>> {
    let stub = ProviderStub::start(Options::default())?;
    let settings = format!("provider.url = '{}'", stub.url());
    let mut figures = Vec::new();
    for (ms, events) in [(0, 100_000), (5, 100_000), (20, 100_000), (100, 20_000)] {
        stub.clear_script();
        if ms > 0 {
            stub.script([Rule::always(Act::Delay { ms })]);
        }
        let (_, measured) = consume(bench, &format!("provider {ms} ms"), &Filling::even(bench.scaled(events)), &settings)?;
        figures.push(Figure::new(format!("provider{ms}_eps"), measured.per_second));
        if ms == 20 {
            figures.push(Figure::new("provider20_engine_us_per_event", measured.us_per_event));
        }
    }
    Ok(figures)
}

fn concurrency(bench: &Bench<'_>) -> Result<Vec<Figure>> {
    let at = |partitions: u32| {
        let settings = format!("pipeline.partition_concurrency = {partitions}");
        let what = format!("{partitions} transactions");
        let (_, measured) = consume(bench, &what, &Filling::even(bench.scaled(400_000)), &settings)?;
        Ok(Figure::new(format!("concurrency{partitions}_eps"), measured.per_second))
    };
    [1, 3, 12].into_iter().map(at).collect()
}

fn repeats(bench: &Bench<'_>) -> Result<Vec<Figure>> {
    let at = |(per_mille, key): (u64, &str)| {
        let filling = Filling { repeats: per_mille, ..Filling::even(bench.scaled(400_000)) };
        let (_, measured) = consume(bench, &format!("{key} repeats"), &filling, "")?;
        Ok(Figure::new(format!("repeats{key}_eps"), measured.per_second))
    };
    [(0, "0"), (1, "0_1"), (10, "1"), (50, "5"), (500, "50")].into_iter().map(at).collect()
}

fn uneven(bench: &Bench<'_>) -> Result<Vec<Figure>> {
    let even = Filling::even(bench.scaled(400_000));
    let (_, evenly) = consume(bench, "even", &even, "")?;
    let (_, partition) = consume(bench, "hot partition", &Filling { spread: Spread::HotPartition(90), ..even }, "")?;
    let (_, key) = consume(bench, "hot key", &Filling { spread: Spread::HotKey(90), ..even }, "")?;
    let large = Filling { note: 100_000, ..Filling::even(bench.scaled(8_000)) };
    let (topic, large) = consume(bench, "events of 100 kB", &large, "")?;
    let per_byte = large.per_second * topic.event_bytes as f64 / 1e6;
    Ok(vec![
        Figure::new("hot_partition_eps", partition.per_second),
        Figure::new("hot_partition_ratio", partition.per_second / evenly.per_second),
        Figure::new("hot_key_eps", key.per_second),
        Figure::new("hot_key_ratio", key.per_second / evenly.per_second),
        Figure::new("large_eps", large.per_second),
        Figure::new("large_mb_per_second", per_byte),
        Figure::new("large_rss_peak_mib", large.rss_peak_mib),
    ])
}

fn latency(bench: &Bench<'_>) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    let [time, warm_up] = [20, 5].map(|seconds| Duration::from_secs(if bench.quick { seconds / 4 } else { seconds }));
    let (short, usual) = (Duration::from_millis(1), Duration::from_millis(5)); // the second is the default of Kafka's clients
    let twelve = |per_second, linger| Load { per_second, partitions: PARTITIONS, linger, producers: 1, time, warm_up };
    let thousand = Load { partitions: 1_000, producers: 8, ..twelve(5_000, usual) };
    for (key, load) in [("", twelve(1_000, short)), ("20k_", twelve(20_000, usual)), ("1000_partitions_", thousand)] {
        let name = format!("latency_{key}{}", bench.number);
        let database = bench.database(&name)?;
        let engine = Engine { topic: &name, ..bench.engine(&database.url) };
        let latency = latency::measure(&engine, &load)?;
        println!(
            "  {} events/s, {} partitions, linger {:?}: peak {:.0} MiB; processors {:.0} % busy",
            load.per_second,
            load.partitions,
            load.linger,
            latency.rss_peak_mib,
            latency.busy * 100.0
        );
        let parts = [("due", latency.from_due), ("acknowledged", latency.from_acknowledged), ("fsync", latency.fsync)];
        for (name, Percentiles { p50, p99, most }) in parts {
            let what = if name == "fsync" { "fsync of a page".to_owned() } else { format!("from {name} to settled") };
            println!("    {what:<28} {p50:.2} ms (p50), {p99:.1} ms (p99), {most:.1} ms (most)");
            let name = if name == "due" { String::new() } else { format!("{name}_") };
            figures.push(Figure::new(format!("{key}{name}p50_ms"), p50));
            figures.push(Figure::new(format!("{key}{name}p99_ms"), p99));
        }
        figures.push(Figure::new(format!("{key}busy"), latency.busy));
        if load.partitions != PARTITIONS {
            figures.push(Figure::new(format!("{key}rss_peak_mib"), latency.rss_peak_mib));
        }
    }
    Ok(figures)
}

/// The database falls silent when the first events are settled, and the rest of the topic waits.
fn memory(bench: &Bench<'_>) -> Result<Vec<Figure>> {
    let name = format!("stalled_{}", bench.number);
    let database = bench.database(&name)?;
    let way = Proxy::before(&database.url)?;
    let topic = Topic::fill(bench.kafka, &name, &Filling::even(bench.scaled(1_000_000)))?;
    let engine = Engine { topic: &name, ..bench.engine(&database.url) };
    let through = Engine { database: way.url(), ..engine };
    let mut stalled = None;
    through.consume_with("database silent for 20 s", &topic, engine.database, |process| {
        way.fall_silent();
        thread::sleep(Duration::from_secs(20));
        stalled = Some(machine::rss_peak_mib(process));
        way.open();
    })?;
    engine.check(&topic)?;
    let stalled = stalled.ok_or("the first events were never settled")??;
    println!("  while it was silent: peak {stalled:.0} MiB");
    Ok(vec![Figure::new("stalled_rss_peak_mib", stalled)])
}

/// From the start of the process to its first settled event: its group is known; the one before was killed under the same name.
fn start(bench: &Bench<'_>) -> Result<Vec<Figure>> {
    let name = format!("start_{}", bench.number);
    let database = bench.database(&name)?;
    let topic = Topic::fill(bench.kafka, &name, &Filling::even(5_000))?;
    let engine = Engine { topic: &name, ..bench.engine(&database.url) };
    engine.consume("before the start", &topic)?;
    let known = first_event(bench, &engine, Signal::Term)?;
    let named = Engine { settings: "kafka.instance_id = 'bench'", ..engine };
    first_event(bench, &named, Signal::Kill)?;
    let killed = first_event(bench, &named, Signal::Term)?;
    println!("  first event after a start {known:.0} ms, after kill -9 of a named member {killed:.0} ms");
    Ok(vec![Figure::new("start_ms", known), Figure::new("restart_ms", killed)])
}

/// Produces, starts, and ends the engine once something of it is settled.
fn first_event(bench: &Bench<'_>, engine: &Engine<'_>, end: Signal) -> Result<f64> {
    Topic::add(bench.kafka, engine.topic, 1_000)?;
    let observer = Observer::connect(engine.database)?;
    let stood: i64 = observer.look()?.iter().map(|row| row.next_offset).sum();
    let started = Instant::now();
    let mut running = engine.start()?;
    let mut first = None;
    loop {
        let now: i64 = observer.look()?.iter().map(|row| row.next_offset).sum();
        if now > stood && first.is_none() {
            first = Some(started.elapsed().as_secs_f64() * 1e3);
        }
        if now >= stood + 1_000 {
            break;
        }
        if started.elapsed() > PATIENCE {
            return running.end(Err("nothing is settled".into()));
        }
        running.still_runs()?;
        thread::sleep(Duration::from_millis(2));
    }
    let first = first.ok_or("nothing was settled")?;
    if end == Signal::Kill {
        process::end(&mut running.child, Signal::Kill, PATIENCE)?;
        return Ok(first);
    }
    running.end(Ok(first))
}
