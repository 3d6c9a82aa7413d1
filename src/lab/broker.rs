//! A Kafka broker inside this process, for the demo: librdkafka's mock cluster, which needs no Java.
//!
//! In: a topic. Out: its address. It owns the topic's records, in memory; they are gone when it is dropped.
//!
//! Invariant: it is good for `range` only; a second member never completes a cooperative join in it. Tests use [`super::kafka`].

use rdkafka::error::KafkaResult;
use rdkafka::mocking::MockCluster;
use rdkafka::producer::DefaultProducerContext;

/// The broker; dropping it ends it.
pub struct MockBroker(MockCluster<'static, DefaultProducerContext>);

impl MockBroker {
    /// Starts one broker that has one topic.
    ///
    /// # Errors
    /// No port, or a topic name that Kafka would refuse.
    pub fn start(topic: &str, partitions: i32) -> KafkaResult<Self> {
        let cluster = MockCluster::new(1)?;
        cluster.create_topic(topic, partitions, 1)?;
        Ok(Self(cluster))
    }

    /// For `bootstrap.servers`.
    #[must_use]
    pub fn bootstrap_servers(&self) -> String {
        self.0.bootstrap_servers()
    }
}
