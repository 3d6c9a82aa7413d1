//! Topics full of events, and how they are spread over partitions and keys.
//!
//! In: a Kafka. Out: a topic whose end is known. It owns what it has made.
//!
//! Invariant: every event is new and valid, and a topic that did not take all of them is an error.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use chrono::Utc;
use onceward::event::{Currency, Money, OrderConfirmedBuilder};
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer as _};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::producer::{BaseProducer, BaseRecord, Producer as _};
use rdkafka::{ClientConfig, Offset, TopicPartitionList};

use crate::engine::{GROUP, PATIENCE};
use crate::{Result, block_on};

/// What a topic is filled with.
#[derive(Clone, Copy, Debug)]
pub struct Filling {
    pub events: u64,
    pub partitions: i32,
    pub spread: Spread,
    /// This many of a thousand repeat an earlier event, byte for byte.
    pub repeats: u64,
    /// Bytes that each event has beyond the usual ones.
    pub note: usize,
}

/// Repeats are of one of so many events before them.
const RECENT: usize = 4_096;

/// Who goes where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spread {
    /// Each order has a key of its own.
    Even,
    /// So do these, and this many of a hundred are in one partition.
    HotPartition(u64),
    /// This many of a hundred have one key.
    HotKey(u64),
}

/// A topic full of events.
pub struct Topic {
    pub name: String,
    pub events: u64,
    /// Without repeats.
    pub distinct: u64,
    /// Key and payload of its first event.
    pub event_bytes: usize,
    /// How long producing took.
    pub elapsed: Duration,
    pub ends: BTreeMap<i32, i64>,
}

/// Makes events one after another.
pub struct Events {
    builder: OrderConfirmedBuilder,
    currency: Currency,
    next_order: i64,
    note: String,
}

impl Events {
    pub fn new(note: usize) -> Result<Self> {
        let note = if note == 0 { String::new() } else { format!(r#","note":"{}"}}"#, "x".repeat(note.saturating_sub(10))) };
        let currency = Currency::from_code("EUR")?;
        Ok(Self { builder: OrderConfirmedBuilder::new(), currency, next_order: Utc::now().timestamp_micros(), note })
    }

    /// The next one: its order and its payload.
    pub fn next(&mut self) -> Result<(i64, String)> {
        self.next_order += 1;
        let order = self.next_order;
        let (customer, units) = (1 + order % 999_983, 1 + order % 49_999);
        let event = self.builder.build(Utc::now(), order, customer, Money::from_minor_units(units, self.currency));
        let mut json = event.map_err(|fault| format!("an event of the bench is not valid: {fault:?}"))?.to_json();
        if !self.note.is_empty() {
            json.pop(); // the note brings the brace again
            json.push_str(&self.note);
        }
        Ok((order, json))
    }
}

impl Filling {
    /// Over twelve partitions, as everything is that is not said to be otherwise.
    pub const fn even(events: u64) -> Self {
        Self { events, partitions: crate::engine::PARTITIONS, spread: Spread::Even, repeats: 0, note: 0 }
    }
}

impl Topic {
    /// Makes it without records.
    pub fn make(kafka: &str, name: &str, partitions: i32) -> Result<()> {
        let admin: AdminClient<DefaultClientContext> = client(kafka).create()?;
        let topic = NewTopic::new(name, partitions, TopicReplication::Fixed(1));
        for made in block_on(admin.create_topics([&topic], &AdminOptions::new()))? {
            made.map_err(|(name, code)| format!("topic {name}: {code}"))?;
        }
        Ok(())
    }

    /// More events for a topic that is there.
    pub fn add(kafka: &str, name: &str, count: u64) -> Result<()> {
        let (mut events, producer): (_, BaseProducer) = (Events::new(0)?, producer(kafka).create()?);
        for _ in 0..count {
            let (order, payload) = events.next()?;
            send(&producer, BaseRecord::to(name).key(&order.to_string()).payload(&payload))?;
        }
        Ok(producer.flush(PATIENCE)?)
    }

    /// Makes it and produces what it is to hold.
    pub fn fill(kafka: &str, name: &str, filling: &Filling) -> Result<Self> {
        Self::make(kafka, name, filling.partitions)?;
        let (started, mut events) = (Instant::now(), Events::new(filling.note)?);
        // One client sees to it that orders of one key share a partition, as other clients would choose it.
        let producer: BaseProducer = producer(kafka).create()?;
        let (mut recent, mut distinct): (Vec<(i64, String)>, u64) = (Vec::new(), 0);
        for number in 0..filling.events {
            let is_one_of = |share, of| number * share / of < (number + 1) * share / of;
            let (order, payload) = if is_one_of(filling.repeats, 1_000) && !recent.is_empty() {
                recent[(number * 7_919) as usize % recent.len()].clone()
            } else {
                distinct += 1;
                events.next()?
            };
            if filling.repeats > 0 {
                let place = number as usize % RECENT;
                if place < recent.len() { recent[place] = (order, payload.clone()) } else { recent.push((order, payload.clone())) }
            }
            let is_hot = |percent| is_one_of(percent, 100);
            let key = if matches!(filling.spread, Spread::HotKey(percent) if is_hot(percent)) { 1 } else { order };
            let key = key.to_string();
            let mut record = BaseRecord::to(name).key(&key).payload(&payload);
            record.partition = matches!(filling.spread, Spread::HotPartition(percent) if is_hot(percent)).then_some(0);
            send(&producer, record)?;
        }
        producer.flush(PATIENCE)?;
        let elapsed = started.elapsed();
        let consumer = consumer(kafka)?;
        let ends = ends(&consumer, name, filling.partitions)?;
        let there: i64 = ends.values().sum();
        if there.unsigned_abs() != filling.events {
            return Err(format!("topic {name} has {there} records, not {}", filling.events).into());
        }
        let event_bytes = first_event_bytes(&consumer, name)?;
        Ok(Self { name: name.to_owned(), events: filling.events, distinct, event_bytes, elapsed, ends })
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

/// Waits while the producer's queue is full.
fn send(producer: &BaseProducer, mut record: BaseRecord<'_, String, String>) -> Result<()> {
    loop {
        match producer.send(record) {
            Ok(()) => return Ok(()),
            Err((KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull), back)) => {
                record = back;
                producer.poll(Duration::from_millis(10));
            }
            Err((error, _)) => return Err(error.into()),
        }
    }
}

/// One past the last record of each partition.
pub fn ends(consumer: &BaseConsumer, name: &str, partitions: i32) -> Result<BTreeMap<i32, i64>> {
    (0..partitions).map(|partition| Ok((partition, consumer.fetch_watermarks(name, partition, PATIENCE)?.1))).collect()
}

fn first_event_bytes(consumer: &BaseConsumer, topic: &str) -> Result<usize> {
    let mut first = TopicPartitionList::new();
    first.add_partition_offset(topic, 0, Offset::Beginning)?;
    consumer.assign(&first)?;
    let record = consumer.poll(PATIENCE).ok_or("the first event cannot be read")??;
    Ok(record.key_len() + record.payload_len())
}

/// As `onceward produce` sends.
pub fn producer(kafka: &str) -> ClientConfig {
    let mut config = client(kafka);
    config.set("enable.idempotence", "true").set("partitioner", "murmur2_random").set("linger.ms", "5");
    config
}

pub fn consumer(kafka: &str) -> Result<BaseConsumer> {
    Ok(client(kafka).set("group.id", GROUP).set("enable.auto.commit", "false").create()?)
}

fn client(kafka: &str) -> ClientConfig {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", kafka);
    config
}
