//! Dead letters: parked events as records of `<topic>.dlq`, for whoever shall see them without our database.
//!
//! In: parked rows of the partitions this process owns. Out: one record each, with headers that point at its source. It owns a producer,
//! made when there is something to write first. The row is the truth and the record a copy of it: if this dies, or the topic refuses,
//! nothing waits and nothing is lost, and the record is written later, perhaps twice.
//!
//! Invariant: a row is marked only after the broker has taken its record, and a record never lacks the pointer to its source, however
//! much of it had to be cut.

use std::time::Duration;

use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord};
use tracing::{info, warn};

use crate::config::KafkaConfig;
use crate::crash::CrashPoint;
use crate::metrics;
use crate::pipeline::connection::{self, Plain};
use crate::store::dead_letters::{self, DeadLetter};
use crate::store::{DbError, Store};

/// How often parked rows are looked for.
const EVERY: Duration = Duration::from_secs(1);
/// How long the broker may take for one record.
const DELIVERY: Duration = Duration::from_secs(10);
/// What is read at once.
const MOST_BYTES: i64 = 4 << 20;

/// The relay of one process.
pub struct Relay {
    /// Where the rows are.
    pub store: Store,
    /// The brokers and how to connect to them, the source topic, the consumer group.
    pub kafka: KafkaConfig,
    /// Who we are, in `consumed_partition.owner`.
    pub owner: String,
    /// Made when there is something to write.
    pub(crate) producer: Option<FutureProducer<Plain>>,
}

/// Why a dead letter is not in its topic yet.
#[derive(Debug, thiserror::Error)]
enum RelayError {
    #[error(transparent)]
    Database(#[from] DbError),
    #[error("{0}")]
    Kafka(#[from] KafkaError),
}

impl Relay {
    /// The topic of dead letters.
    #[must_use]
    pub fn dead_letter_topic(topic: &str) -> String {
        format!("{topic}.dlq")
    }

    /// Relays until the process ends.
    pub async fn run(mut self) {
        let mut failing = false;
        let mut ticks = actix::clock::interval(EVERY);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            match self.relay_all().await {
                Ok(()) if failing => {
                    failing = false;
                    info!("dead letters are written again");
                }
                Ok(()) => {}
                Err(error) => {
                    // The database's absence is told elsewhere.
                    metrics::dead_letters(metrics::Delivery::Failed, usize::from(matches!(error, RelayError::Kafka(_))));
                    let refused = self.refused(&error);
                    if !std::mem::replace(&mut failing, true) {
                        let topic = Self::dead_letter_topic(&self.kafka.topic);
                        warn!(topic, %error, refused, "a dead letter is not written yet; its event stays parked");
                    }
                }
            }
        }
    }

    /// What the broker has against us, if that is why. The next producer is another one, made of what the files of secrets hold then.
    fn refused(&mut self, error: &RelayError) -> Option<String> {
        let RelayError::Kafka(error) = error else { return None };
        let producer = self.producer.take()?;
        Some(connection::why(&producer, error)).filter(|why| *why != error.to_string())
    }

    /// Everything that is parked and not written.
    async fn relay_all(&mut self) -> Result<(), RelayError> {
        loop {
            let mut session = self.store.control.get().await.map_err(DbError::from)?;
            let mut letters =
                dead_letters::find(&mut session, &self.kafka.group, &self.kafka.topic, &self.owner, MOST_BYTES).await?;
            drop(session);
            if letters.is_empty() {
                return Ok(());
            }
            let mut written = 0;
            let mut end = Ok(());
            for letter in &letters {
                end = self.write(letter).await;
                if end.is_err() {
                    break;
                }
                written += 1;
            }
            metrics::dead_letters(metrics::Delivery::Ok, written);
            if written > 0 {
                CrashPoint::Relayed.passed();
            }
            letters.truncate(written);
            let mut session = self.store.control.get().await.map_err(DbError::from)?;
            dead_letters::relayed(&mut session, &letters).await?;
            end?;
        }
    }

    /// One record, cut until the broker takes it.
    async fn write(&mut self, letter: &DeadLetter) -> Result<(), KafkaError> {
        let topic = Self::dead_letter_topic(&self.kafka.topic);
        let producer = match &self.producer {
            Some(producer) => producer.clone(),
            None => self.producer.insert(self.make_producer()?).clone(),
        };
        let mut room = usize::MAX;
        loop {
            let copy = Letter::of(letter, &self.kafka.topic, &self.kafka.group, room);
            let mut record = FutureRecord::<[u8], [u8]>::to(&topic).headers(copy.headers);
            (record.key, record.payload) = (copy.key, copy.payload);
            match producer.send(record, DELIVERY).await {
                Ok(_) => return Ok(()),
                Err((KafkaError::MessageProduction(RDKafkaErrorCode::MessageSizeTooLarge), _)) if copy.size > 0 => {
                    room = copy.size / 2
                }
                Err((error, _)) => return Err(error),
            }
        }
    }

    fn make_producer(&self) -> Result<FutureProducer<Plain>, KafkaError> {
        let mut client = self.kafka.kafka_producer_config();
        client
            .set("acks", "all")
            .set("enable.idempotence", "false") // twice is allowed; refused for its size, one must not stop the next
            .set("linger.ms", "0")
            .set("partitioner", "murmur2_random")
            .set("queue.buffering.max.kbytes", "16384")
            .set("message.max.bytes", "1000000000") // how much is too much, the broker says
            .set("message.timeout.ms", DELIVERY.as_millis().to_string());
        connection::connect(&client, Plain::default())
    }
}

/// A dead letter as a record.
struct Letter<'a> {
    key: Option<&'a [u8]>,
    payload: Option<&'a [u8]>,
    headers: OwnedHeaders,
    /// Bytes of the source record in it.
    size: usize,
}

impl<'a> Letter<'a> {
    /// With at most `room` bytes of the source record: its key, its headers, and what is left for the payload.
    fn of(letter: &'a DeadLetter, topic: &str, group: &str, room: usize) -> Self {
        let record = &letter.record;
        let mut left = room;
        let key = record.key.as_deref().filter(|key| fits(key.len(), &mut left));
        let mut headers = OwnedHeaders::new();
        let mut kept = 0;
        for (name, value) in &record.headers {
            let bytes = name.len() + value.as_deref().map_or(0, <[u8]>::len);
            // The client takes names as C strings only.
            let Some(name) = std::str::from_utf8(name).ok().filter(|name| !name.contains('\0')) else { continue };
            if fits(bytes, &mut left) {
                kept += 1;
                headers = headers.insert(Header { key: name, value: value.as_deref() });
            }
        }
        let payload = record.payload.as_deref().map(|payload| &payload[..payload.len().min(left)]);
        left -= payload.map_or(0, <[u8]>::len);

        let mut lacks = Vec::new();
        if let (Some(whole), Some(part)) = (record.payload.as_deref(), payload)
            && part.len() < whole.len()
        {
            lacks.push(format!("payload: {} of {} bytes", part.len(), whole.len()));
        }
        if kept < record.headers.len() {
            lacks.push(format!("headers: {kept} of {}", record.headers.len()));
        }
        if key.is_none() && record.key.is_some() {
            lacks.push("key".to_owned());
        }
        let pointer = [
            ("onceward-topic", Some(topic.to_owned())),
            ("onceward-partition", Some(record.partition.to_string())),
            ("onceward-offset", Some(record.offset.to_string())),
            ("onceward-timestamp", record.timestamp_ms.map(|ms| ms.to_string())),
            ("onceward-group", Some(group.to_owned())),
            ("onceward-reason", Some(letter.reason.to_string())),
            ("onceward-attempts", Some(letter.attempts.to_string())),
            ("onceward-event-id", letter.event_id.map(|id| id.to_string())),
            ("onceward-held-id", Some(letter.id.to_string())),
            ("onceward-error", Some(letter.error.clone())),
            ("onceward-cut", (!lacks.is_empty()).then(|| lacks.join("; "))),
        ];
        for (name, value) in pointer.iter().filter_map(|(name, value)| Some((name, value.as_ref()?))) {
            headers = headers.insert(Header { key: name, value: Some(value) });
        }
        Self { key, payload, headers, size: room - left }
    }
}

fn fits(bytes: usize, left: &mut usize) -> bool {
    let fits = bytes <= *left;
    *left -= if fits { bytes } else { 0 };
    fits
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use rdkafka::message::Headers as _;

    use super::*;
    use crate::handler::HeldReason;
    use crate::record::{Offset, Record};

    fn letter() -> DeadLetter {
        let record = Record {
            partition: 3,
            offset: Offset(42),
            timestamp_ms: Some(7),
            key: Some(b"key"[..].into()),
            headers: Box::new([
                (b"trace"[..].into(), Some(b"1"[..].into())),
                (b"\xff"[..].into(), None),
                (b"nul\0"[..].into(), None),
            ]),
            payload: Some(vec![b'x'; 1000].into()),
        };
        DeadLetter { id: 17, record, event_id: None, reason: HeldReason::Invalid, error: "wrong".to_owned(), attempts: 2 }
    }

    fn headers(copy: &Letter<'_>) -> BTreeMap<String, String> {
        let text = |value: Option<&[u8]>| String::from_utf8_lossy(value.unwrap_or_default()).into_owned();
        copy.headers.iter().map(|header| (header.key.to_owned(), text(header.value))).collect()
    }

    const POINTER: [(&str, &str); 8] = [
        ("onceward-topic", "orders"),
        ("onceward-partition", "3"),
        ("onceward-offset", "42"),
        ("onceward-timestamp", "7"),
        ("onceward-group", "billing"),
        ("onceward-reason", "invalid"),
        ("onceward-attempts", "2"),
        ("onceward-held-id", "17"),
    ];

    #[test]
    fn a_copy_has_the_record_and_the_pointer_to_its_source() {
        let letter = letter();
        let copy = Letter::of(&letter, "orders", "billing", usize::MAX);
        assert_eq!((copy.key, copy.payload), (letter.record.key.as_deref(), letter.record.payload.as_deref()));
        let headers = headers(&copy);
        assert!(POINTER.iter().all(|(name, value)| headers[*name] == *value), "{headers:?}");
        assert_eq!(headers["trace"], "1");
        assert_eq!(headers["onceward-cut"], "headers: 1 of 3", "names that are no C strings cannot be written");
    }

    #[test]
    fn however_little_room_there_is_the_pointer_stays_and_each_cut_is_smaller() {
        let letter = letter();
        let mut room = usize::MAX;
        for _ in 0..64 {
            let copy = Letter::of(&letter, "orders", "billing", room);
            let headers = headers(&copy);
            assert!(POINTER.iter().all(|(name, value)| headers[*name] == *value), "{headers:?}");
            assert!(copy.size <= room);
            if copy.size == 0 {
                assert_eq!(headers["onceward-cut"], "payload: 0 of 1000 bytes; headers: 0 of 3; key");
                return;
            }
            room = copy.size / 2;
        }
        panic!("it never ends");
    }

    #[test]
    fn a_record_without_a_payload_is_no_cut_one() {
        let mut letter = letter();
        letter.record.payload = None;
        letter.record.headers = Box::default();
        let copy = Letter::of(&letter, "orders", "billing", usize::MAX);
        assert_eq!(copy.payload, None);
        assert!(!headers(&copy).contains_key("onceward-cut"));
    }
}
