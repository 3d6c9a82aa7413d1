//! How long an event takes from the moment at which it was to be produced to the moment at which its row can be read.
//!
//! In: an engine, a rate. Out: percentiles. It owns the topic's producers, a connection that looks how far each partition is, and a file
//! whose syncs tell what the disk does meanwhile.
//!
//! Invariant: the clock of an event starts when the rate says that it is due, whether or not anybody was late; a stall of the producer or
//! of the engine is counted for each event that had to wait for it. A second clock starts when the producer hears that the broker
//! has the event; one that is settled before that has waited for nothing.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rdkafka::ClientContext;
use rdkafka::message::Message as _;
use rdkafka::producer::{BaseRecord, DeliveryResult, Producer as _, ProducerContext, ThreadedProducer};

use crate::Result;
use crate::engine::{Engine, Observer, PATIENCE, Running};
use crate::topic::{Events, Topic, producer};

/// Events at a rate.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    pub per_second: u64,
    pub partitions: i32,
    pub time: Duration,
    /// Not counted: connections are made, statements prepared, caches filled.
    pub warm_up: Duration,
    /// For how long a producer waits for more records of a partition, at most.
    pub linger: Duration,
    /// They take turns. A broker handles the requests of one connection one after another, and with many partitions, a request for each
    /// record, it would be the producer that is measured.
    pub producers: usize,
}

/// What it gave.
#[derive(Clone, Copy, Debug)]
pub struct Latency {
    pub from_due: Percentiles,
    pub from_acknowledged: Percentiles,
    /// Of a page, where the servers keep their data, while the events ran.
    pub fsync: Percentiles,
    /// The part of all processors that was taken meanwhile: where it is all of them, it is the machine that is waited for.
    pub busy: f64,
    pub rss_peak_mib: f64,
}

/// Milliseconds.
#[derive(Clone, Copy, Debug)]
pub struct Percentiles {
    pub p50: f64,
    pub p99: f64,
    pub most: f64,
}

impl Percentiles {
    fn of(mut times: Vec<Duration>) -> Result<Self> {
        times.sort_unstable();
        let last = times.len().checked_sub(1).ok_or("nothing was measured")?;
        let at = |part: usize| times[last * part / 100].as_secs_f64() * 1e3;
        Ok(Self { p50: at(50), p99: at(99), most: at(100) })
    }
}

/// Where an event came to lie.
#[derive(Clone, Copy, Debug)]
struct Produced {
    partition: i32,
    offset: i64,
    due: Instant,
    acknowledged: Instant,
}

/// When a partition was seen to have come so far.
type Seen = (i64, Instant);

/// Between two looks: so many times as long as a look has taken, so that looking at many partitions costs little of a core. But within these
/// bounds: after a look that was held up itself, a long rest would be taken for a stall of the engine.
const REST: u32 = 4;
const LOOK: (Duration, Duration) = (Duration::from_micros(500), Duration::from_millis(20));

#[derive(Default)]
struct Deliveries(Mutex<Vec<Produced>>);

impl Deliveries {
    fn lock(&self) -> MutexGuard<'_, Vec<Produced>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ClientContext for Deliveries {}

impl ProducerContext for Deliveries {
    type DeliveryOpaque = Box<Instant>;

    fn delivery(&self, result: &DeliveryResult<'_>, due: Self::DeliveryOpaque) {
        // What was not delivered is missed at the end.
        if let Ok(message) = result {
            let (partition, offset) = (message.partition(), message.offset());
            self.lock().push(Produced { partition, offset, due: *due, acknowledged: Instant::now() });
        }
    }
}

/// Starts the engine on an empty topic and sends.
pub fn measure(engine: &Engine<'_>, load: &Load) -> Result<Latency> {
    Topic::make(engine.kafka, engine.topic, load.partitions)?;
    let observer = Observer::connect(engine.database)?;
    let mut running = engine.start()?;
    let measured = play(engine, load, observer, &mut running);
    running.end(measured)
}

fn play(engine: &Engine<'_>, load: &Load, observer: Observer, running: &mut Running) -> Result<Latency> {
    let started = Instant::now();
    while observer.look()?.len() < load.partitions as usize {
        running.still_runs()?;
        if started.elapsed() > PATIENCE {
            return Err("the engine does not get its partitions".into());
        }
        thread::sleep(Duration::from_millis(20));
    }
    let mut config = producer(engine.kafka);
    config.set("linger.ms", load.linger.as_millis().to_string());
    let producers = (0..load.producers).map(|_| config.create_with_context(Deliveries::default()));
    let producers: Vec<ThreadedProducer<Deliveries>> = producers.collect::<std::result::Result<_, _>>()?;
    let is_over = Arc::new(AtomicBool::new(false));
    let until = || Arc::clone(&is_over);
    let looking = {
        let is_over = until();
        thread::spawn(move || look(&observer, &is_over).map_err(|error| error.to_string()))
    };
    let syncing = {
        let is_over = until();
        thread::spawn(move || crate::machine::fsyncs(&is_over).map_err(|error| error.to_string()))
    };
    let before = crate::machine::Load::now(engine.processes)?;
    let sent = send(&producers, engine.topic, load);
    let busy = before.busy_until(&crate::machine::Load::now(engine.processes)?)?;
    producers.iter().try_for_each(|producer| producer.flush(PATIENCE))?;
    let (due, warm) = sent?;
    let deliveries = producers.iter().map(|producer| std::mem::take(&mut *producer.context().lock()));
    let produced: Vec<Produced> = deliveries.flatten().collect();
    if produced.len() != due {
        return Err(format!("{} of {due} events were produced", produced.len()).into());
    }
    wait_for(engine, &produced)?;
    is_over.store(true, Ordering::Relaxed);
    let seen = looking.join().map_err(|_| "it panicked")??;
    let fsync = Percentiles::of(syncing.join().map_err(|_| "it panicked")??)?;
    let counted: Vec<(Produced, Instant)> = produced
        .into_iter()
        .filter(|event| event.due >= warm)
        .map(|event| {
            let of_partition = seen.get(&event.partition).ok_or("a partition was never seen")?;
            let at = of_partition.partition_point(|(next, _)| *next <= event.offset);
            let (_, moment) = of_partition.get(at).ok_or("an event was never seen")?;
            Ok((event, *moment))
        })
        .collect::<Result<_>>()?;
    let since = |begin: fn(&Produced) -> Instant| {
        Percentiles::of(counted.iter().map(|(event, moment)| moment.saturating_duration_since(begin(event))).collect())
    };
    let rss_peak_mib = crate::machine::rss_peak_mib(running.child.id())?;
    let (from_due, from_acknowledged) = (since(|event| event.due)?, since(|event| event.acknowledged)?);
    Ok(Latency { from_due, from_acknowledged, fsync, busy, rss_peak_mib })
}

/// How many were sent, and from when on they count.
fn send(producers: &[ThreadedProducer<Deliveries>], topic: &str, load: &Load) -> Result<(usize, Instant)> {
    let mut events = Events::new(0)?;
    let started = Instant::now();
    let count = load.per_second * (load.warm_up + load.time).as_secs();
    for (number, producer) in (0..count).zip(producers.iter().cycle()) {
        let due = started + Duration::from_secs_f64(number as f64 / load.per_second as f64);
        thread::sleep(due.saturating_duration_since(Instant::now()));
        let (order, payload) = events.next()?;
        let key = order.to_string();
        let record = BaseRecord::with_opaque_to(topic, Box::new(due)).key(&key).payload(&payload);
        producer.send(record).map_err(|(error, _)| error)?;
    }
    Ok((count as usize, started + load.warm_up))
}

/// Until all of them are settled.
fn wait_for(engine: &Engine<'_>, produced: &[Produced]) -> Result<()> {
    let observer = Observer::connect(engine.database)?;
    let mut ends: HashMap<i32, i64> = HashMap::new();
    for Produced { partition, offset, .. } in produced {
        let end = ends.entry(*partition).or_default();
        *end = (*end).max(offset + 1);
    }
    let started = Instant::now();
    loop {
        let rows = observer.look()?;
        if ends.iter().all(|(partition, end)| rows.iter().any(|row| row.partition == *partition && row.next_offset >= *end)) {
            return Ok(());
        }
        if started.elapsed() > PATIENCE {
            return Err(format!("not all is settled after {PATIENCE:?}").into());
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// Notes each step of each partition, until it is over and once more.
fn look(observer: &Observer, is_over: &AtomicBool) -> Result<HashMap<i32, Vec<Seen>>> {
    let mut seen: HashMap<i32, Vec<Seen>> = HashMap::new();
    loop {
        let last = is_over.load(Ordering::Relaxed);
        let began = Instant::now();
        let rows = observer.look()?;
        let now = Instant::now();
        for row in rows {
            let of_partition = seen.entry(row.partition).or_default();
            if of_partition.last().is_none_or(|(next, _)| *next != row.next_offset) {
                of_partition.push((row.next_offset, now));
            }
        }
        if last {
            return Ok(seen);
        }
        thread::sleep((now.duration_since(began) * REST).clamp(LOOK.0, LOOK.1));
    }
}
