//! A topic of a test's own: what a producer and an administrator do to it.

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::future::join_all;
use rdkafka::admin::{AdminClient, AdminOptions, AlterConfig, NewPartitions, NewTopic, ResourceSpecifier, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer as _};
use rdkafka::error::KafkaError;
use rdkafka::message::{Header, Headers as _, Message as _, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord, Producer as _};
use rdkafka::{ClientConfig, Offset, TopicPartitionList};

use super::{LIMIT, block_on, eventually, server};

/// A topic.
pub struct Topic {
    name: String,
    brokers: String,
    producer: FutureProducer,
}

/// A record to be sent.
#[derive(Clone, Debug, Default)]
pub struct Message {
    partition: Option<i32>,
    key: Option<Vec<u8>>,
    payload: Option<Vec<u8>>,
    headers: Vec<(String, Option<Vec<u8>>)>,
    timestamp_ms: Option<i64>,
}

/// A record as it was read back.
#[derive(Clone, Debug)]
pub struct Read {
    pub key: Option<Vec<u8>>,
    pub payload: Option<Vec<u8>>,
    /// Name and value as text, in their order.
    pub headers: Vec<(String, Option<String>)>,
}

impl Read {
    fn of(message: &rdkafka::message::BorrowedMessage<'_>) -> Self {
        let text = |value: &[u8]| String::from_utf8_lossy(value).into_owned();
        let headers = message.headers().into_iter().flat_map(|headers| headers.iter());
        Self {
            key: message.key().map(Into::into),
            payload: message.payload().map(Into::into),
            headers: headers.map(|header| (header.key.to_owned(), header.value.map(text))).collect(),
        }
    }

    /// The value of the last header of this name.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().rev().find(|(found, _)| found == name).and_then(|(_, value)| value.as_deref())
    }
}

impl Message {
    /// With a payload and nothing else.
    pub fn new(payload: impl Into<Vec<u8>>) -> Self {
        Self { payload: Some(payload.into()), ..Self::default() }
    }

    /// With no payload at all.
    pub fn tombstone() -> Self {
        Self::default()
    }

    pub fn key(mut self, key: impl Into<Vec<u8>>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// Otherwise the key decides, and without a key chance.
    pub fn partition(mut self, partition: i32) -> Self {
        self.partition = Some(partition);
        self
    }

    pub fn header(mut self, name: &str, value: Option<&[u8]>) -> Self {
        self.headers.push((name.to_owned(), value.map(<[u8]>::to_vec)));
        self
    }

    pub fn timestamp_ms(mut self, timestamp_ms: i64) -> Self {
        self.timestamp_ms = Some(timestamp_ms);
        self
    }
}

impl Topic {
    /// Makes it; the name must be new.
    pub fn create(name: &str, partitions: i32) -> Self {
        Self::configured(name, partitions, &[])
    }

    /// Makes it with settings of its own.
    pub fn configured(name: &str, partitions: i32, settings: &[(&str, &str)]) -> Self {
        Self::at(&server("ONCEWARD_TEST_KAFKA"), name, partitions, settings)
    }

    /// Makes it at these brokers.
    pub fn at(brokers: &str, name: &str, partitions: i32, settings: &[(&str, &str)]) -> Self {
        let topic = NewTopic::new(name, partitions, TopicReplication::Fixed(1));
        let topic = settings.iter().fold(topic, |topic, (key, value)| topic.set(key, value));
        let made = block_on(admin(brokers).create_topics([&topic], &AdminOptions::new())).expect("the broker answers");
        assert_eq!(made, vec![Ok(name.to_owned())]);
        let producer = client(brokers).set("linger.ms", "1").set("acks", "all").create().expect("a producer");
        let topic = Self { name: name.to_owned(), brokers: brokers.to_owned(), producer };
        topic.wait_until_known(usize::try_from(partitions).expect("a number of partitions"));
        topic
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// For `bootstrap.servers`.
    pub fn brokers(&self) -> &str {
        &self.brokers
    }

    /// Sends records and waits until the broker has them: partition and offset of each.
    pub fn send(&self, messages: impl IntoIterator<Item = Message>) -> Vec<(i32, i64)> {
        let messages: Vec<Message> = messages.into_iter().collect();
        let sent = block_on(join_all(messages.iter().map(|message| {
            let mut record = FutureRecord::to(&self.name).headers(headers(message));
            record.partition = message.partition;
            record.key = message.key.as_deref();
            record.payload = message.payload.as_deref();
            record.timestamp = message.timestamp_ms;
            self.producer.send(record, LIMIT)
        })));
        sent.into_iter()
            .map(|sent| sent.expect("the broker takes it"))
            .map(|delivery| (delivery.partition, delivery.offset))
            .collect()
    }

    /// Changes a setting; all others are the broker's then.
    pub fn alter(&self, key: &str, value: &str) {
        self.configure(&[(key, value)]);
    }

    /// Sets these; all others are the broker's then.
    pub fn configure(&self, settings: &[(&str, &str)]) {
        let alter = AlterConfig::new(ResourceSpecifier::Topic(&self.name));
        let alter = settings.iter().fold(alter, |alter, (key, value)| alter.set(key, value));
        let altered = block_on(admin(&self.brokers).alter_configs([&alter], &AdminOptions::new())).expect("the broker answers");
        assert!(altered.iter().all(Result::is_ok), "{altered:?}");
    }

    /// Adds partitions until there are so many.
    pub fn grow(&self, partitions: usize) {
        let grown =
            block_on(admin(&self.brokers).create_partitions([&NewPartitions::new(&self.name, partitions)], &AdminOptions::new()));
        assert_eq!(grown.expect("the broker answers"), vec![Ok(self.name.clone())]);
        self.wait_until_known(partitions);
    }

    /// The broker has made partitions before it tells of them, and a producer refuses those that it has not heard of.
    fn wait_until_known(&self, partitions: usize) {
        eventually("the producer knows the partitions", || {
            let metadata = self.producer.client().fetch_metadata(Some(&self.name), LIMIT).expect("the broker answers");
            metadata.topics()[0].partitions().len() == partitions
        });
    }

    /// Deletes the topic and makes one of the same name, with as many partitions and no records.
    pub fn make_anew(&self) {
        let partitions = i32::try_from(self.ends().len()).expect("few");
        let deleted =
            block_on(admin(&self.brokers).delete_topics(&[&self.name], &AdminOptions::new())).expect("the broker answers");
        assert_eq!(deleted, vec![Ok(self.name.clone())]);
        let topic = NewTopic::new(&self.name, partitions, TopicReplication::Fixed(1));
        eventually("the old topic is gone, so that a new one may be made", || {
            let made = block_on(admin(&self.brokers).create_topics([&topic], &AdminOptions::new())).expect("the broker answers");
            made.iter().all(Result::is_ok)
        });
        eventually("it is empty", || self.ends().values().all(|end| *end == 0));
        self.wait_until_known(usize::try_from(partitions).expect("few"));
    }

    /// Deletes all records of a partition below `offset`.
    pub fn delete_records(&self, partition: i32, offset: i64) {
        let mut until = TopicPartitionList::new();
        until.add_partition_offset(&self.name, partition, Offset::Offset(offset)).expect("an offset");
        block_on(admin(&self.brokers).delete_records(&until, &AdminOptions::new())).expect("the broker answers");
    }

    /// One past the last record of each partition.
    pub fn ends(&self) -> BTreeMap<i32, i64> {
        let consumer = self.consumer("nobody");
        self.partitions(&consumer).into_iter().map(|partition| (partition, self.watermarks(&consumer, partition).1)).collect()
    }

    /// Every record of a topic, of whoever made it; none while it does not exist.
    pub fn records_of(name: &str) -> Vec<Read> {
        Self::records_at(&server("ONCEWARD_TEST_KAFKA"), name)
    }

    /// The same, at these brokers.
    pub fn records_at(brokers: &str, name: &str) -> Vec<Read> {
        let consumer: BaseConsumer = client(brokers)
            .set("group.id", "nobody")
            .set("enable.auto.commit", "false")
            .set("enable.partition.eof", "true")
            .create()
            .expect("a consumer");
        let metadata = consumer.fetch_metadata(None, LIMIT).expect("the broker answers");
        let Some(topic) = metadata.topics().iter().find(|topic| topic.name() == name) else { return Vec::new() };
        let mut list = TopicPartitionList::new();
        for partition in topic.partitions() {
            list.add_partition_offset(name, partition.id(), Offset::Beginning).expect("an offset");
        }
        consumer.assign(&list).expect("it is assigned");
        let (mut records, mut ends) = (Vec::new(), 0);
        while ends < topic.partitions().len() {
            match consumer.poll(LIMIT).expect("the broker answers") {
                Ok(message) => records.push(Read::of(&message)),
                Err(KafkaError::PartitionEOF(_)) => ends += 1,
                Err(error) => panic!("{error}"),
            }
        }
        records
    }

    /// The offsets that a group has committed; partitions without one are left out.
    pub fn committed(&self, group: &str) -> BTreeMap<i32, i64> {
        let consumer = self.consumer(group);
        let mut wanted = TopicPartitionList::new();
        for partition in self.partitions(&consumer) {
            wanted.add_partition(&self.name, partition);
        }
        // A broker that makes the first groups of its life has no coordinator for them yet.
        let committed = eventually("the broker answers", || consumer.committed_offsets(wanted.clone(), LIMIT).ok());
        let offsets = committed.elements().into_iter().filter_map(|element| match element.offset() {
            Offset::Offset(offset) => Some((element.partition(), offset)),
            _ => None,
        });
        offsets.collect()
    }

    /// Records of the topic that the group has not committed yet.
    pub fn lag(&self, group: &str) -> i64 {
        let committed = self.committed(group);
        self.ends().into_iter().map(|(partition, end)| end - committed.get(&partition).copied().unwrap_or(0)).sum()
    }

    /// Commits the beginning for a group that has no members, as an operator does to replay everything.
    pub fn reset_to_the_beginning(&self, group: &str) {
        let consumer = self.consumer(group);
        let mut offsets = TopicPartitionList::new();
        for partition in self.partitions(&consumer) {
            let (first, _) = self.watermarks(&consumer, partition);
            offsets.add_partition_offset(&self.name, partition, Offset::Offset(first)).expect("an offset");
        }
        // A killed member is still one until its session ends; the broker refuses until then.
        eventually("the group has no members, so that its offsets may be set", || {
            consumer.commit(&offsets, CommitMode::Sync).is_ok()
        });
    }

    /// Deletes a group that has no members, and with it its offsets.
    pub fn forget_group(&self, group: &str) {
        let admin = admin(&self.brokers);
        eventually("the group has no members, so that it may be deleted", || {
            let deleted = block_on(admin.delete_groups(&[group], &AdminOptions::new())).expect("the broker answers");
            deleted.iter().all(Result::is_ok)
        });
    }

    fn consumer(&self, group: &str) -> BaseConsumer {
        client(&self.brokers).set("group.id", group).set("enable.auto.commit", "false").create().expect("a consumer")
    }

    fn partitions(&self, consumer: &BaseConsumer) -> Vec<i32> {
        let metadata = consumer.fetch_metadata(Some(&self.name), LIMIT).expect("the broker answers");
        metadata.topics()[0].partitions().iter().map(|partition| partition.id()).collect()
    }

    fn watermarks(&self, consumer: &BaseConsumer, partition: i32) -> (i64, i64) {
        // A leader that has just been chosen may not know it yet.
        eventually("the partition has a leader", || consumer.fetch_watermarks(&self.name, partition, LIMIT).ok())
    }
}

fn headers(message: &Message) -> OwnedHeaders {
    message.headers.iter().fold(OwnedHeaders::new(), |headers, (key, value)| headers.insert(Header { key, value: value.as_ref() }))
}

pub(super) fn client(brokers: &str) -> ClientConfig {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", brokers);
    config.set("socket.timeout.ms", Duration::as_millis(&LIMIT).to_string());
    config
}

pub(super) fn admin(brokers: &str) -> AdminClient<DefaultClientContext> {
    client(brokers).create().expect("an admin client")
}
