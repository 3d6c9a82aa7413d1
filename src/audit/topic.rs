//! A range of the topic, read as the engine reads it, without being a member of the group.
//!
//! In: where to begin and to end. Out: every record there, as entries. It owns its consumer, which commits nothing. If it dies here,
//! what is kept in the folder stays; see [`super::state`].
//!
//! Invariant: each record of the range that a consumer can see is taken in once, whatever the client does in between.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::Message as _;
use rdkafka::{Offset as Place, TopicPartitionList};
use serde::{Deserialize, Serialize};

use super::AuditError;
use super::progress::Progress;
use super::records::{Frontier, Records};
use super::sorter::Sorter;
use super::state::{Kept, Question, Reached};
use super::traces::Counts;

/// How long a broker may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long no record may come where there are some.
const SILENCE: Duration = Duration::from_secs(60);
/// One wait for a record.
const POLL: Duration = Duration::from_millis(100);

/// Which part of the topic is read, and how.
#[derive(Clone, Debug)]
pub struct TopicRange {
    /// The consumer's configuration. What makes it a member of a group is taken out.
    pub client: ClientConfig,
    /// Where to begin; `None`: where the log begins.
    pub from: Option<Bound>,
    /// Where to end; `None`: where the group has not settled any further.
    pub to: Option<Bound>,
    /// Where to keep what was read, so that a kill costs little.
    pub state: Option<PathBuf>,
}

/// A place in every partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Bound {
    /// Before the first record that is not older.
    Time(DateTime<Utc>),
    /// Before these offsets; partitions that are not named are as without a bound.
    Offsets(BTreeMap<i32, i64>),
}

impl FromStr for Bound {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let pair = |pair: &str| {
            let (partition, offset) = pair.split_once(':')?;
            let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            Some((partition, offset)).filter(|_| is_number(partition) && is_number(offset))?;
            Some((partition.parse().ok()?, offset.parse().ok()?))
        };
        if let Some(pairs) = text.split(',').map(pair).collect::<Option<Vec<(i32, i64)>>>() {
            let count = pairs.len();
            let offsets: BTreeMap<i32, i64> = pairs.into_iter().collect();
            return if offsets.len() == count { Ok(Self::Offsets(offsets)) } else { Err("a partition is named twice".to_owned()) };
        }
        let time = DateTime::parse_from_rfc3339(text).map(|time| Self::Time(time.to_utc()));
        time.map_err(|_| "neither a time (2026-01-31T10:00:00Z) nor offsets (partition:offset,partition:offset)".to_owned())
    }
}

/// The range of one partition, and how far it is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Part {
    pub from: i64,
    /// One past the last offset.
    pub to: i64,
    /// The first offset that is not read.
    pub next: i64,
}

/// What was read.
pub(super) struct Topic {
    pub records: Records,
    /// The ranges `[from, to)` in which every record is known, by partition.
    pub ranges: BTreeMap<i32, (i64, i64)>,
    /// To be cleared when there is a report.
    pub kept: Option<Kept>,
}

/// Reads the range. Blocks the thread.
pub(super) fn read(
    range: &TopicRange,
    (group, topic): (&str, &str),
    frontier: Frontier,
    memory: usize,
    show_progress: bool,
) -> Result<Topic, AuditError> {
    let consumer = connect(&range.client)?;
    let logs = logs(&consumer, topic)?;
    let (kept, before) = match &range.state {
        None => (None, None),
        Some(folder) => {
            let question = Question {
                version: env!("CARGO_PKG_VERSION").to_owned(),
                group: group.to_owned(),
                topic: topic.to_owned(),
                from: format!("{:?}", range.from),
                to: format!("{:?}", range.to),
            };
            let (kept, before) = Kept::open(folder, question)?;
            (Some(kept), before)
        }
    };
    let reached = match before {
        Some(before) => before,
        None => Reached {
            parts: parts(range, &consumer, topic, &logs, &frontier)?,
            frontier,
            counts: Counts::default(),
            runs: Vec::new(),
        },
    };
    let sorter = match &kept {
        Some(kept) => Sorter::kept_in(kept.runs()?, reached.runs, memory).map_err(AuditError::Sort)?,
        None => Sorter::new(memory),
    };
    let total = reached.parts.values().map(|part| (part.to - part.from).unsigned_abs()).sum();
    let done = reached.parts.values().map(|part| (part.next - part.from).unsigned_abs()).sum();
    let mut reading = Reading {
        consumer: &consumer,
        topic,
        parts: reached.parts,
        records: Records::new(reached.frontier, sorter, reached.counts),
        kept: kept.as_ref(),
        progress: Progress::begin(show_progress, "reading the topic", done, Some(total)),
    };
    reading.read()?;
    let Reading { parts, records, .. } = reading;
    // Of what the log has deleted meanwhile nobody can say what it was.
    let logs = self::logs(&consumer, topic)?;
    let known = |(partition, part): (i32, Part)| {
        let first = logs.get(&partition).map_or(part.to, |(first, _)| *first);
        (partition, (part.from.max(first), part.to))
    };
    Ok(Topic { ranges: parts.into_iter().map(known).collect(), records, kept })
}

/// A consumer that joins nothing and commits nothing.
fn connect(client: &ClientConfig) -> Result<BaseConsumer, AuditError> {
    let mut client = client.clone();
    client.remove("group.instance.id").remove("group.protocol");
    // A place that the log deletes while it is read is gone; what is left of the range is read.
    client.set("auto.offset.reset", "earliest").set("enable.auto.commit", "false").set("enable.partition.eof", "true");
    Ok(client.create()?)
}

/// First offset and end of every partition's log.
fn logs(consumer: &BaseConsumer, topic: &str) -> Result<BTreeMap<i32, (i64, i64)>, AuditError> {
    let metadata = consumer.fetch_metadata(Some(topic), PATIENCE)?;
    let found = metadata.topics().iter().find(|found| found.name() == topic && found.error().is_none());
    let found = found.ok_or_else(|| AuditError::Range(format!("the topic {topic} does not exist; see kafka.topic")))?;
    let log = |partition: i32| Ok((partition, consumer.fetch_watermarks(topic, partition, PATIENCE)?));
    found.partitions().iter().map(|partition| log(partition.id())).collect()
}

/// What is to be read of each partition.
fn parts(
    range: &TopicRange,
    consumer: &BaseConsumer,
    topic: &str,
    logs: &BTreeMap<i32, (i64, i64)>,
    frontier: &Frontier,
) -> Result<BTreeMap<i32, Part>, AuditError> {
    let from = places(range.from.as_ref(), consumer, topic, logs)?;
    let to = places(range.to.as_ref(), consumer, topic, logs)?;
    let part = |(partition, (first, end)): (&i32, &(i64, i64))| {
        let settled = frontier.settled(*partition).unwrap_or(*first).clamp(*first, *end);
        let from = from.get(partition).copied().unwrap_or(*first);
        let to = to.get(partition).copied().unwrap_or(settled).max(from);
        (*partition, Part { from, to, next: from })
    };
    Ok(logs.iter().map(part).collect())
}

/// Where a bound stands in each partition that it says something about.
fn places(
    bound: Option<&Bound>,
    consumer: &BaseConsumer,
    topic: &str,
    logs: &BTreeMap<i32, (i64, i64)>,
) -> Result<BTreeMap<i32, i64>, AuditError> {
    match bound {
        None => Ok(BTreeMap::new()),
        Some(Bound::Offsets(offsets)) => {
            for (partition, offset) in offsets {
                let Some((first, end)) = logs.get(partition) else {
                    return Err(AuditError::Range(format!("the topic has no partition {partition}")));
                };
                if !(first..=end).contains(&offset) {
                    return Err(AuditError::Range(format!(
                        "the log of partition {partition} is [{first}, {end}): {offset} is not in it"
                    )));
                }
            }
            Ok(offsets.clone())
        }
        Some(Bound::Time(time)) => {
            let mut times = TopicPartitionList::new();
            for partition in logs.keys() {
                times.add_partition_offset(topic, *partition, Place::Offset(time.timestamp_millis()))?;
            }
            let found = consumer.offsets_for_times(times, PATIENCE)?;
            let place = |element: rdkafka::topic_partition_list::TopicPartitionListElem<'_>| {
                element.error()?;
                let (_, end) = logs[&element.partition()];
                Ok((element.partition(), if let Place::Offset(offset) = element.offset() { offset } else { end }))
            };
            found.elements().into_iter().map(place).collect()
        }
    }
}

struct Reading<'a> {
    consumer: &'a BaseConsumer,
    topic: &'a str,
    parts: BTreeMap<i32, Part>,
    records: Records,
    kept: Option<&'a Kept>,
    progress: Progress,
}

impl Reading<'_> {
    fn read(&mut self) -> Result<(), AuditError> {
        let mut open: BTreeSet<i32> = self.parts.iter().filter(|(_, part)| part.next < part.to).map(|(id, _)| *id).collect();
        let mut begin = TopicPartitionList::new();
        for partition in &open {
            begin.add_partition_offset(self.topic, *partition, Place::Offset(self.parts[partition].next))?;
        }
        self.consumer.assign(&begin)?;
        let (mut heard, mut last_word) = (Instant::now(), None);
        while !open.is_empty() {
            match self.consumer.poll(POLL) {
                Some(Ok(message)) => {
                    heard = Instant::now();
                    let place = (message.partition(), message.offset());
                    if open.contains(&place.0) && self.record(place, message.payload())? {
                        self.finish(place.0, &mut open)?;
                    }
                }
                Some(Err(KafkaError::PartitionEOF(partition))) => self.finish(partition, &mut open)?,
                Some(Err(error)) if is_hopeless(&error) => return Err(error.into()),
                // The client goes on trying by itself; what it says is news only if nothing comes of it.
                Some(Err(error)) => last_word = Some(error),
                None => {}
            }
            if heard.elapsed() > SILENCE {
                let what = || AuditError::Range(format!("no record has come for {} s; see kafka.brokers", SILENCE.as_secs()));
                return Err(last_word.map_or_else(what, AuditError::from));
            }
        }
        self.records.sorter.end_run().map_err(AuditError::Sort)?;
        self.keep()
    }

    /// Takes one in. `true`: its partition's range ends with it or before it.
    fn record(&mut self, (partition, offset): (i32, i64), payload: Option<&[u8]>) -> Result<bool, AuditError> {
        let part = self.parts.get_mut(&partition).expect("only these are assigned");
        if offset < part.next {
            let (next, topic) = (part.next, self.topic);
            return Err(AuditError::Range(format!(
                "{topic}, partition {partition} went back from {next} to {offset}: was it made anew?"
            )));
        }
        if offset >= part.to {
            return Ok(true);
        }
        part.next = offset + 1;
        let is_last = part.next == part.to;
        if self.records.payload((partition, offset), payload).map_err(AuditError::Sort)? {
            self.keep()?;
        }
        self.progress.step();
        Ok(is_last)
    }

    /// The rest of a range that has no records is read, too.
    fn finish(&mut self, partition: i32, open: &mut BTreeSet<i32>) -> Result<(), AuditError> {
        if open.remove(&partition) {
            let part = self.parts.get_mut(&partition).expect("only these are assigned");
            part.next = part.to;
            let mut done = TopicPartitionList::new();
            done.add_partition(self.topic, partition);
            self.consumer.pause(&done)?;
        }
        Ok(())
    }

    /// Everything that was read stands in finished runs.
    fn keep(&self) -> Result<(), AuditError> {
        let Some(kept) = self.kept else { return Ok(()) };
        let Records { sorter, counts, frontier, .. } = &self.records;
        sorter.sync().map_err(AuditError::Sort)?;
        let (parts, frontier) = (self.parts.clone(), frontier.clone());
        kept.save(Reached { parts, frontier, counts: *counts, runs: sorter.runs().to_vec() })
    }
}

/// Trying again would not help.
fn is_hopeless(error: &KafkaError) -> bool {
    match error {
        KafkaError::MessageConsumptionFatal(_) => true,
        KafkaError::MessageConsumption(code) => matches!(
            code,
            RDKafkaErrorCode::UnknownTopicOrPartition
                | RDKafkaErrorCode::UnknownTopic
                | RDKafkaErrorCode::UnknownPartition
                | RDKafkaErrorCode::TopicAuthorizationFailed
                | RDKafkaErrorCode::GroupAuthorizationFailed
                | RDKafkaErrorCode::SaslAuthenticationFailed
        ),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_is_a_time_or_offsets() {
        let time = "2026-01-31T11:00:00.250+01:00".parse::<Bound>().unwrap();
        assert_eq!(time, Bound::Time(DateTime::from_timestamp_millis(1_769_853_600_250).unwrap()));
        assert_eq!("0:17".parse::<Bound>().unwrap(), Bound::Offsets(BTreeMap::from([(0, 17)])));
        assert_eq!("2:9000000000,0:0".parse::<Bound>().unwrap(), Bound::Offsets(BTreeMap::from([(0, 0), (2, 9_000_000_000)])));
        assert_eq!("1:2,1:3".parse::<Bound>().unwrap_err(), "a partition is named twice");
        for wrong in ["", "17", "0:", ":3", "0:-1", "+0:1", "0:1,", "2026-01-31", "2026-01-31T10:00:00", "yesterday"] {
            let error = wrong.parse::<Bound>().unwrap_err();
            assert!(error.starts_with("neither a time"), "{wrong}: {error}");
        }
    }
}
