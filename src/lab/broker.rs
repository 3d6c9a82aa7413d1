//! A Kafka broker inside this process, for the demo: librdkafka's mock cluster, which needs no Java.
//!
//! In: a topic. Out: its address. It owns the topic's records, in memory; they are gone when it is dropped.
//!
//! Invariant: it is good for `range` only; a second member never completes a cooperative join in it. Tests use [`super::kafka`].

use std::thread;
use std::time::{Duration, Instant};

use rdkafka::bindings::{rd_kafka_handle_mock_cluster, rd_kafka_mock_group_initial_rebalance_delay_ms};
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer as _};
use rdkafka::error::{KafkaError, KafkaResult};
use rdkafka::producer::{BaseProducer, Producer as _};
use rdkafka::types::RDKafkaErrorCode;
use rdkafka::{ClientConfig, Offset, TopicPartitionList};

/// The broker; dropping it ends it.
pub struct MockBroker {
    /// The cluster lives and dies with this client, which produces nothing.
    host: BaseProducer,
    address: String,
    topic: String,
    partitions: i32,
}

impl MockBroker {
    /// Starts one broker that has one topic.
    ///
    /// # Errors
    /// No port, or a topic name that Kafka would refuse.
    pub fn start(topic: &str, partitions: i32) -> KafkaResult<Self> {
        let host: BaseProducer = ClientConfig::new().set("test.mock.num.brokers", "1").set("log_level", "4").create()?;
        let cluster = host.client().mock_cluster().ok_or(KafkaError::MockCluster(RDKafkaErrorCode::Fail))?;
        cluster.create_topic(topic, partitions, 1)?;
        let address = cluster.bootstrap_servers();
        drop(cluster);
        // SAFETY: the pointer is the host's own and used while the host lives; the cluster exists, as was seen above.
        unsafe {
            let cluster = rd_kafka_handle_mock_cluster(host.client().native_ptr());
            rd_kafka_mock_group_initial_rebalance_delay_ms(cluster, FIRST_JOIN_DELAY_MS);
        }
        Ok(Self { host, address, topic: topic.to_owned(), partitions })
    }

    /// For `bootstrap.servers`.
    #[must_use]
    pub fn bootstrap_servers(&self) -> &str {
        &self.address
    }

    /// One past the last record of each partition.
    ///
    /// # Errors
    /// The broker does not answer.
    pub fn ends(&self) -> KafkaResult<Vec<i64>> {
        (0..self.partitions).map(|partition| Ok(self.host.client().fetch_watermarks(&self.topic, partition, PATIENCE)?.1)).collect()
    }

    /// What a group has committed, partition by partition.
    ///
    /// # Errors
    /// The broker does not answer.
    pub fn committed(&self, group: &str) -> KafkaResult<Vec<Option<i64>>> {
        let consumer: BaseConsumer = ClientConfig::new().set("bootstrap.servers", &self.address).set("group.id", group).create()?;
        let mut wanted = TopicPartitionList::new();
        wanted.add_partition_range(&self.topic, 0, self.partitions - 1);
        let committed = consumer.committed_offsets(wanted, PATIENCE)?;
        let offset = |partition| committed.find_partition(&self.topic, partition).and_then(|element| element.offset().to_raw());
        Ok((0..self.partitions).map(|partition| offset(partition).filter(|offset| *offset >= 0)).collect())
    }

    /// Commits the beginning of every partition for a group that has no members, as an operator does who wants everything replayed.
    ///
    /// The mock takes a known group's commit from members only, so this joins, commits and leaves. And it waits for the last member
    /// that has left, for its `session` less a second; whoever joins before that with a shorter session is forgotten again.
    ///
    /// # Errors
    /// The group has a member, or the broker does not answer.
    pub fn rewind(&self, group: &str, session: Duration) -> KafkaResult<()> {
        thread::sleep(session.saturating_sub(Duration::from_millis(700)));
        let consumer: BaseConsumer = ClientConfig::new()
            .set("bootstrap.servers", &self.address)
            .set("group.id", group)
            .set("partition.assignment.strategy", "range")
            .set("session.timeout.ms", "1000")
            .set("heartbeat.interval.ms", "300")
            .set("enable.auto.commit", "false")
            .create()?;
        consumer.subscribe(&[&self.topic])?;
        let end = Instant::now() + PATIENCE;
        while consumer.assignment()?.count() == 0 {
            if Instant::now() > end {
                return Err(KafkaError::OffsetFetch(RDKafkaErrorCode::OperationTimedOut));
            }
            consumer.poll(Duration::from_millis(50)).transpose()?;
        }
        let mut beginning = TopicPartitionList::new();
        for partition in 0..self.partitions {
            beginning.add_partition_offset(&self.topic, partition, Offset::Offset(0))?;
        }
        consumer.commit(&beginning, CommitMode::Sync)
    }
}

/// Three seconds by default, for the members to gather; here there is one.
const FIRST_JOIN_DELAY_MS: i32 = 100;
/// It is in this process, and joining takes six seconds at most.
const PATIENCE: Duration = Duration::from_secs(20);

#[cfg(test)]
mod tests {
    use rdkafka::producer::BaseRecord;

    use super::*;

    #[test]
    fn a_group_that_was_set_back_begins_again() {
        let broker = MockBroker::start("orders", 2).unwrap();
        let producer: BaseProducer = ClientConfig::new().set("bootstrap.servers", broker.bootstrap_servers()).create().unwrap();
        for partition in [0, 1, 1] {
            producer.send(BaseRecord::<(), str>::to("orders").payload("x").partition(partition)).unwrap();
        }
        producer.flush(PATIENCE).unwrap();
        assert_eq!(broker.ends().unwrap(), [1, 2]);
        assert_eq!(broker.committed("readers").unwrap(), [None, None]);

        let read_three_and_commit = || {
            let mut config = ClientConfig::new();
            config.set("bootstrap.servers", broker.bootstrap_servers()).set("group.id", "readers");
            config.set("session.timeout.ms", "2000").set("heartbeat.interval.ms", "300").set("auto.offset.reset", "earliest");
            let consumer: BaseConsumer = config.set("enable.auto.commit", "false").create().unwrap();
            consumer.subscribe(&["orders"]).unwrap();
            let end = Instant::now() + PATIENCE;
            let mut read = 0;
            while read < 3 {
                assert!(Instant::now() < end, "{read} of 3");
                read += usize::from(matches!(consumer.poll(Duration::from_millis(100)), Some(Ok(_))));
            }
            let mut all = TopicPartitionList::new();
            all.add_partition_offset("orders", 0, Offset::Offset(1)).unwrap();
            all.add_partition_offset("orders", 1, Offset::Offset(2)).unwrap();
            consumer.commit(&all, CommitMode::Sync).unwrap();
        };
        read_three_and_commit();
        assert_eq!(broker.committed("readers").unwrap(), [Some(1), Some(2)]);
        broker.rewind("readers", Duration::from_secs(2)).unwrap();
        assert_eq!(broker.committed("readers").unwrap(), [Some(0), Some(0)]);
        read_three_and_commit();
    }
}
