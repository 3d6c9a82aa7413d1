//! Which days of ids the table of claims can take, and which it may forget.
//!
//! In: ids about to be claimed. Out: their days exist. It owns a memory of days seen, which may lag; the claim itself finds out, and
//! the batch asks again. Days are made before a batch's transaction, never inside it. How long ids are needed is noted in `memory`,
//! what follows from all notes is decided in `plan`, and what may go goes in `cleaner`.
//!
//! Invariant: a day below the floor is never made.

pub mod cleaner;
pub mod memory;
pub mod plan;
pub mod sweeper;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::KafkaError;
use rdkafka::{ClientConfig, Message, TopicPartitionList};
use tokio::sync::watch;
use tracing::debug;
use uuid::Uuid;

use self::cleaner::Cleaner;
use self::memory::{Notes, Own};
use crate::config::Config;
use crate::crash::CrashPoint;
use crate::event::id::day_of;
use crate::handler::Handler;
use crate::pipeline::client::Client;
use crate::pipeline::connection::{self, Plain};
use crate::pipeline::dedup::Engine;
use crate::store::processed_events::ClaimTable;
use crate::store::retention;
use crate::store::{DbError, Store};

/// How often it is looked whether something is due.
const TICK: Duration = Duration::from_secs(2);
/// How long the broker may take for one answer.
const ANSWER: Duration = Duration::from_secs(5);
/// How long reading the first record of every partition may take.
const OLDEST: Duration = Duration::from_secs(20);

/// Days known to exist, and the floor as it was when they were read.
#[derive(Debug)]
pub struct Days {
    by_day: bool,
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    days: BTreeSet<i64>,
    floor: Option<Uuid>,
}

/// Says something, and not again while it stays the same.
#[derive(Debug, Default)]
struct Once(Option<String>);

/// As long as the service runs: notes what its group needs, and drops what nobody needs. A database that is away shows in readiness, and
/// nothing here is urgent.
pub async fn upkeep<H: Handler>(config: Config, engine: Arc<Engine<H>>, client: Client) {
    let mut notes = Notes::default();
    let (tell, told) = watch::channel(None);
    actix::spawn(clean(Cleaner::new(&config), told));
    let mut ticks = actix::clock::interval(TICK);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if let Err(error) = notes.write(&config, &engine, &client).await {
            debug!(%error, "what the group needs could not be noted; it is tried again");
        }
        tell.send_replace(notes.own().cloned());
    }
}

/// By itself, because a run may take long and the notes must not wait for it.
async fn clean(mut cleaner: Cleaner, mut told: watch::Receiver<Option<Own>>) {
    while told.changed().await.is_ok() {
        let own = told.borrow().clone();
        if let Some(own) = own {
            cleaner.run_if_due(&own).await;
        }
    }
}

impl Once {
    fn say(&mut self, what: String, say: impl FnOnce(&str)) {
        if self.0.as_deref() != Some(&what) {
            say(&what);
            self.0 = Some(what);
        }
    }
}

impl Days {
    /// None is known yet. A plain table has none and needs none.
    #[must_use]
    pub fn of(table: ClaimTable) -> Self {
        Self { by_day: table.by_day, known: Mutex::default() }
    }

    /// Makes the days of these ids that are not known to exist; ids below the floor need none.
    ///
    /// # Errors
    /// When the database cannot be asked or a day cannot be made.
    pub async fn ensure(&self, store: &Store, ids: impl Iterator<Item = Uuid>) -> Result<(), DbError> {
        if !self.by_day {
            return Ok(());
        }
        let (missing, floor) = {
            let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            let new = ids.filter(|id| known.floor.is_none_or(|floor| *id >= floor) && !known.days.contains(&day_of(*id)));
            (new.collect::<Vec<Uuid>>(), known.floor)
        };
        if missing.is_empty() {
            return Ok(());
        }
        let mut session = store.control.get().await.map_err(DbError::from)?;
        let floor = match floor {
            Some(floor) => Some(floor),
            None => retention::floor(&mut session).await?,
        };
        let takes: BTreeSet<i64> =
            missing.iter().filter(|id| floor.is_none_or(|floor| **id >= floor)).map(|id| day_of(*id)).collect();
        if !takes.is_empty() {
            retention::ensure_days(&mut session, &takes).await?;
            CrashPoint::DayMade.passed();
        }
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.floor = floor;
        known.days.extend(takes);
        Ok(())
    }

    /// Forgets everything: a claim has found no partition.
    pub fn forget(&self) {
        *self.known.lock().unwrap_or_else(PoisonError::into_inner) = Known::default();
    }
}

/// The timestamp of the topic's oldest record in milliseconds since 1970, by reading the first record of each partition; `None` when
/// the topic is empty. Blocks for 20 s at most.
///
/// # Errors
/// In words: the broker does not answer, or the topic is not there.
pub fn oldest_record_ms(mut client: ClientConfig, topic: &str) -> Result<Option<i64>, String> {
    let deadline = Instant::now() + OLDEST;
    client.set("enable.partition.eof", "true");
    let consumer: BaseConsumer<Plain> = connection::connect(&client, Plain::default()).map_err(|error| error.to_string())?;
    let metadata = consumer.fetch_metadata(Some(topic), ANSWER).map_err(|error| connection::why(&consumer, &error))?;
    let partitions = connection::topic(&metadata, topic)?.partitions();
    let mut assignment = TopicPartitionList::new();
    for partition in partitions {
        let borders =
            consumer.fetch_watermarks(topic, partition.id(), ANSWER).map_err(|error| connection::why(&consumer, &error))?;
        if borders.0 < borders.1 {
            assignment
                .add_partition_offset(topic, partition.id(), rdkafka::Offset::Offset(borders.0))
                .map_err(|error| error.to_string())?;
        }
    }
    let mut waiting = assignment.count();
    consumer.assign(&assignment).map_err(|error| error.to_string())?;
    let mut oldest: Option<i64> = None;
    let mut seen = BTreeSet::new();
    while waiting > 0 {
        if Instant::now() >= deadline {
            return Err("the first records of the topic could not be read in time".to_owned());
        }
        let (partition, made) = match consumer.poll(Duration::from_millis(100)) {
            Some(Ok(message)) => (message.partition(), message.timestamp().to_millis()),
            // Nothing but markers of transactions.
            Some(Err(KafkaError::PartitionEOF(partition))) => (partition, None),
            Some(Err(_)) | None => continue,
        };
        if seen.insert(partition) {
            waiting -= 1;
            oldest = [oldest, made].into_iter().flatten().min();
        }
    }
    Ok(oldest)
}
