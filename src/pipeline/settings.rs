//! What topics and brokers are set to.
//!
//! In: how Kafka is reached. Out: names and values. It owns one client, which changes nothing and makes no topic.
//!
//! Invariant: an answer that did not come is an error with its words, never an empty answer.

use std::collections::BTreeMap;
use std::time::Duration;

use rdkafka::admin::{AdminClient, AdminOptions, ResourceSpecifier};
use rdkafka::types::RDKafkaErrorCode;

use super::connection::{self, Plain};
use super::native;
use crate::config::KafkaConfig;

/// Names and values.
pub(crate) type Settings = BTreeMap<String, String>;

/// For one question.
const PATIENCE: Duration = Duration::from_secs(5);

/// Asks for settings. Every question blocks its thread, which must be one of a runtime.
pub(crate) struct Admin {
    client: AdminClient<Plain>,
    /// The cluster has named one that answers for it.
    controlled: bool,
    /// How many partitions the topic has, or why that is not known.
    pub partitions: Result<usize, String>,
}

impl Admin {
    /// # Errors
    /// In words: no broker answers.
    pub fn connect(kafka: &KafkaConfig) -> Result<Self, String> {
        let client: AdminClient<_> =
            connection::connect(&kafka.kafka_admin_config(), Plain::default()).map_err(|error| error.to_string())?;
        let metadata = client.inner().fetch_metadata(Some(&kafka.topic), PATIENCE);
        let metadata = metadata.map_err(|error| connection::why(&client, &error))?;
        let controller = native::controller(client.inner());
        let controlled = metadata.brokers().iter().any(|broker| Some(broker.id()) == controller);
        let partitions = connection::topic(&metadata, &kafka.topic).map(|topic| topic.partitions().len());
        Ok(Self { partitions, client, controlled })
    }

    /// Of a topic, the broker's defaults among them.
    ///
    /// # Errors
    /// In words: it does not answer, or not to us.
    pub fn topic(&self, name: &str) -> Result<Settings, String> {
        self.ask(ResourceSpecifier::Topic(name))
    }

    /// Of a broker.
    ///
    /// # Errors
    /// As [`Self::topic`].
    pub fn broker(&self, id: i32) -> Result<Settings, String> {
        self.ask(ResourceSpecifier::Broker(id))
    }

    fn ask(&self, resource: ResourceSpecifier<'_>) -> Result<Settings, String> {
        // librdkafka asks the controller, and waits for one as long as it may.
        if !self.controlled {
            return Err("no broker is named that could be asked for settings".to_owned());
        }
        let options = AdminOptions::new().request_timeout(Some(PATIENCE));
        let described = tokio::runtime::Handle::current().block_on(self.client.describe_configs([&resource], &options));
        let resource = described.map_err(|error| error.to_string())?.into_iter().next().unwrap_or(Err(RDKafkaErrorCode::NoEnt));
        let resource = resource.map_err(|code| code.to_string())?;
        // The wrapper leaves out why.
        if resource.entries.is_empty() {
            return Err(
                "the broker keeps its settings to itself: our principal needs DescribeConfigs on it (ops/acls.sh)".to_owned()
            );
        }
        Ok(resource.entries.into_iter().filter_map(|entry| Some((entry.name, entry.value?))).collect())
    }
}

/// A setting that every broker knows.
///
/// # Errors
/// It is not told.
pub(crate) fn value<'a>(settings: &'a Settings, name: &str) -> Result<&'a str, String> {
    settings.get(name).map(String::as_str).ok_or_else(|| format!("the broker does not tell {name}"))
}
