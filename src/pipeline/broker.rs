//! What the broker is asked about offsets and logs.
//!
//! In: the consumer, for one question, off the actors' thread. Out: an answer, or why there is none yet. It owns nothing.
//!
//! Invariant: a question that failed is never answered with "nothing".

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::{Offset as Place, TopicPartitionList};

use crate::pipeline::client::Client;
use crate::pipeline::connection;
use crate::pipeline::rebalance::Rebalances;
use crate::record::{NextOffset, Offset};

/// Stands beside every offset that we commit, so that one which somebody else has set is told from ours.
pub(crate) const COMMITTED_BY: &str = "onceward";

/// For one question.
const BROKER: Duration = Duration::from_secs(5);

/// What the broker says about a partition.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Log {
    /// The group's offset.
    pub committed: Option<NextOffset>,
    /// That offset was not committed by an owner of ours: somebody has set the group.
    pub set_by_others: bool,
    /// The oldest record.
    pub first: Offset,
    /// One past the newest record.
    pub end: NextOffset,
}

/// Puts a blocking question to the broker, off the actors' thread.
pub(crate) async fn ask<T: Send + 'static>(
    client: &Client,
    topic: &str,
    question: impl FnOnce(&BaseConsumer<Rebalances>, &str) -> Result<T, String> + Send + 'static,
) -> Result<T, String> {
    let consumer = client.get().ok_or("the consumer is closed")?;
    let topic = topic.to_owned();
    let asked = tokio::task::spawn_blocking(move || question(&consumer, &topic));
    asked.await.map_err(|error| error.to_string())?
}

/// One past the newest record of every partition of the topic.
pub(crate) fn log_ends(consumer: &BaseConsumer<Rebalances>, topic: &str) -> Result<BTreeMap<i32, NextOffset>, String> {
    let partitions = partitions(consumer, topic)?;
    offsets_at(consumer, topic, &partitions, Place::End).map(|ends| ends.into_iter().map(|(p, end)| (p, NextOffset(end))).collect())
}

/// What the broker says of every partition of the topic.
pub(crate) fn all_logs(consumer: &BaseConsumer<Rebalances>, topic: &str) -> Result<BTreeMap<i32, Log>, String> {
    read_logs(consumer, topic, &partitions(consumer, topic)?)
}

fn partitions(consumer: &BaseConsumer<Rebalances>, topic: &str) -> Result<Vec<i32>, String> {
    let metadata = consumer.fetch_metadata(Some(topic), BROKER).map_err(|error| connection::plainly(&error))?;
    let known = connection::topic(&metadata, topic)?;
    Ok(known.partitions().iter().map(rdkafka::metadata::MetadataPartition::id).collect())
}

/// What the broker says of these partitions. A failed offset fetch is an error, never "no offset".
pub(crate) fn read_logs(
    consumer: &BaseConsumer<Rebalances>,
    topic: &str,
    partitions: &[i32],
) -> Result<BTreeMap<i32, Log>, String> {
    let committed = consumer
        .committed_offsets(list(topic, partitions, Place::Invalid)?, BROKER)
        .map_err(|error| connection::plainly(&error))?;
    let committed = committed.elements().into_iter().map(|element| {
        let failed = |error| format!("committed offset of partition {}: {}", element.partition(), connection::plainly(&error));
        element.error().map_err(failed)?;
        let next = if let Place::Offset(next) = element.offset() { Some(NextOffset(next)) } else { None };
        // The wrapper panics on a text that is not UTF-8; whoever wrote that, we did not.
        let by_us = catch_unwind(AssertUnwindSafe(|| element.metadata() == COMMITTED_BY)).unwrap_or(false);
        Ok((element.partition(), (next, next.is_some() && !by_us)))
    });
    let committed = committed.collect::<Result<BTreeMap<_, _>, String>>()?;
    let (first, end) =
        (offsets_at(consumer, topic, partitions, Place::Beginning)?, offsets_at(consumer, topic, partitions, Place::End)?);
    let log = |partition: &i32| {
        let (first, end) =
            first.get(partition).zip(end.get(partition)).ok_or_else(|| format!("partition {partition} has no log"))?;
        let (committed, set_by_others) =
            *committed.get(partition).ok_or_else(|| format!("no committed offset answer for partition {partition}"))?;
        Ok((*partition, Log { committed, set_by_others, first: Offset(*first), end: NextOffset(*end) }))
    };
    partitions.iter().map(log).collect()
}

/// The log's border of each partition, in one request.
fn offsets_at(
    consumer: &BaseConsumer<Rebalances>,
    topic: &str,
    partitions: &[i32],
    place: Place,
) -> Result<BTreeMap<i32, i64>, String> {
    let answer =
        consumer.offsets_for_times(list(topic, partitions, place)?, BROKER).map_err(|error| connection::plainly(&error))?;
    let border = answer.elements().into_iter().map(|element| {
        element.error().map_err(|error| format!("log of partition {}: {}", element.partition(), connection::plainly(&error)))?;
        match element.offset() {
            Place::Offset(offset) => Ok((element.partition(), offset)),
            other => Err(format!("log of partition {}: {other:?}", element.partition())),
        }
    });
    border.collect()
}

fn list(topic: &str, partitions: &[i32], place: Place) -> Result<TopicPartitionList, String> {
    let mut list = TopicPartitionList::with_capacity(partitions.len());
    for partition in partitions {
        list.add_partition_offset(topic, *partition, place).map_err(|error| error.to_string())?;
    }
    Ok(list)
}
