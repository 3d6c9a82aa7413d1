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
use super::problems::Problem;
use super::records::{Frontier, Records};
use super::sorter::Sorter;
use super::state::{Kept, Question, Reached};
use super::traces::Counts;
use super::unseen::Unseen;
use crate::pipeline::connection::{self, Plain};
use crate::progress::Progress;

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
    /// Where the log began when it had been read, by partition.
    pub firsts: BTreeMap<i32, i64>,
    /// What was asked for and could not be read.
    pub unseen: Unseen,
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
        None => {
            let (parts, unseen) = parts(range, &consumer, topic, &logs, &frontier)?;
            Reached { parts, frontier, counts: Counts::default(), unseen, runs: Vec::new() }
        }
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
        unseen: reached.unseen,
        kept: kept.as_ref(),
        progress: Progress::begin(show_progress, "reading the topic", done, Some(total)),
    };
    reading.read()?;
    let Reading { parts, records, unseen, .. } = reading;
    // Of what the log has deleted meanwhile nobody can say what it was.
    let logs = self::logs(&consumer, topic)?;
    let known = |(partition, part): (i32, Part)| {
        let first = logs.get(&partition).map_or(part.to, |(first, _)| *first);
        (partition, (part.from.max(first), part.to))
    };
    let firsts = logs.iter().map(|(partition, (first, _))| (*partition, *first)).collect();
    Ok(Topic { ranges: parts.into_iter().map(known).collect(), records, firsts, unseen, kept })
}

/// A consumer that joins nothing and commits nothing.
fn connect(client: &ClientConfig) -> Result<BaseConsumer<Plain>, AuditError> {
    let mut client = client.clone();
    client.remove("group.instance.id").remove("group.protocol");
    // What the log deletes while it is read is never skipped in silence: see `Reading::go_on_behind_what_is_gone`.
    client.set("auto.offset.reset", "error").set("enable.auto.commit", "false").set("enable.partition.eof", "true");
    Ok(connection::connect(&client, Plain::default())?)
}

/// First offset and end of every partition's log.
fn logs(consumer: &BaseConsumer<Plain>, topic: &str) -> Result<BTreeMap<i32, (i64, i64)>, AuditError> {
    let no_answer = |error| AuditError::Range(format!("{}; see kafka.brokers", connection::why(consumer, &error)));
    let metadata = consumer.fetch_metadata(Some(topic), PATIENCE).map_err(no_answer)?;
    let found = connection::topic(&metadata, topic).map_err(|why| AuditError::Range(format!("{why}; see kafka.topic")))?;
    let log = |partition: i32| Ok((partition, consumer.fetch_watermarks(topic, partition, PATIENCE)?));
    found.partitions().iter().map(|partition| log(partition.id())).collect()
}

/// What is to be read of each partition, and what of it cannot be read.
fn parts(
    range: &TopicRange,
    consumer: &BaseConsumer<Plain>,
    topic: &str,
    logs: &BTreeMap<i32, (i64, i64)>,
    frontier: &Frontier,
) -> Result<(BTreeMap<i32, Part>, Unseen), AuditError> {
    let from = places(range.from.as_ref(), consumer, topic, logs)?;
    let to = places(range.to.as_ref(), consumer, topic, logs)?;
    let owned: BTreeSet<i32> = frontier.partitions().collect();
    let mut unseen = Unseen::default();
    let part = |partition: i32| {
        // One that the group has settled and the topic does not have any more is an empty log.
        let log = logs.get(&partition).copied().unwrap_or_default();
        let asked = (from.get(&partition).copied(), to.get(&partition).copied());
        let known = owned.contains(&partition).then(|| frontier.settled(partition));
        (partition, part(asked, log, known, |problem, range| unseen.add(problem, partition, range)))
    };
    let partitions: BTreeSet<i32> = logs.keys().chain(&owned).copied().collect();
    Ok((partitions.into_iter().map(part).collect(), unseen))
}

/// What is to be read of one partition whose log is `[first, end)`; `settled` is empty when the group has never owned it. What cannot be
/// read of it is told, but for what the group itself could not read: see [`Frontier::gone`].
fn part(
    (from, to): (Option<i64>, Option<i64>),
    (first, end): (i64, i64),
    settled: Option<Option<i64>>,
    mut tell: impl FnMut(Problem, (i64, i64)),
) -> Part {
    let begin = from.unwrap_or(first).max(first);
    if settled.is_none() && to.is_none() {
        tell(Problem::NeverTaken, (begin, end));
    }
    let settled = settled.flatten();
    if let Some(from) = from {
        tell(Problem::OutOfReach, (from, to.into_iter().chain(settled).fold(first, i64::min)));
    }
    if let Some(settled) = settled {
        tell(Problem::BeyondEnd, (end, settled));
    }
    let to = to.unwrap_or_else(|| settled.unwrap_or(first).min(end)).max(begin);
    Part { from: begin, to, next: begin }
}

/// Where a bound stands in each partition that it says something about.
fn places(
    bound: Option<&Bound>,
    consumer: &BaseConsumer<Plain>,
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
                if offset > end {
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
    consumer: &'a BaseConsumer<Plain>,
    topic: &'a str,
    parts: BTreeMap<i32, Part>,
    records: Records,
    unseen: Unseen,
    kept: Option<&'a Kept>,
    progress: Progress,
}

impl Reading<'_> {
    fn read(&mut self) -> Result<(), AuditError> {
        let mut open: BTreeSet<i32> = self.parts.iter().filter(|(_, part)| part.next < part.to).map(|(id, _)| *id).collect();
        self.assign(&open)?;
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
                Some(Err(KafkaError::MessageConsumption(RDKafkaErrorCode::AutoOffsetReset))) => {
                    self.go_on_behind_what_is_gone(&mut open)?;
                }
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

    fn assign(&self, open: &BTreeSet<i32>) -> Result<(), AuditError> {
        let mut places = TopicPartitionList::new();
        for partition in open {
            places.add_partition_offset(self.topic, *partition, Place::Offset(self.parts[partition].next))?;
        }
        Ok(self.consumer.assign(&places)?)
    }

    /// A place that was to be read is not in the log any more. What is gone is noted, and what is left of the range is read.
    fn go_on_behind_what_is_gone(&mut self, open: &mut BTreeSet<i32>) -> Result<(), AuditError> {
        let logs = logs(self.consumer, self.topic)?;
        for partition in open.clone() {
            let part = self.parts.get_mut(&partition).expect("only these are open");
            let (first, end) = logs.get(&partition).copied().unwrap_or_default();
            let next = part.next;
            if next > end {
                return Err(went_back(self.topic, partition, next, end));
            }
            part.next = next.max(first.min(part.to));
            self.unseen.add(Problem::OutOfReach, partition, (next, part.next));
            if part.next == part.to {
                open.remove(&partition);
            }
        }
        self.assign(open)
    }

    /// Takes one in. `true`: its partition's range ends with it or before it.
    fn record(&mut self, (partition, offset): (i32, i64), payload: Option<&[u8]>) -> Result<bool, AuditError> {
        let part = self.parts.get_mut(&partition).expect("only these are assigned");
        if offset < part.next {
            return Err(went_back(self.topic, partition, part.next, offset));
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
        let (parts, frontier, unseen) = (self.parts.clone(), frontier.clone(), self.unseen.clone());
        kept.save(Reached { parts, frontier, counts: *counts, unseen, runs: sorter.runs().to_vec() })
    }
}

fn went_back(topic: &str, partition: i32, next: i64, to: i64) -> AuditError {
    AuditError::Range(format!("{topic}, partition {partition} went back from {next} to {to}: was it made anew?"))
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
    fn what_was_asked_for_and_cannot_be_read_is_named() {
        use Problem::{BeyondEnd, NeverTaken, OutOfReach};
        let log = (10, 30);
        for (asked, settled, range, told) in [
            ((None, None), Some(Some(20)), (10, 20), vec![]),
            ((Some(12), Some(25)), Some(Some(20)), (12, 25), vec![]),
            ((None, None), Some(None), (10, 10), vec![]),
            // Nobody has ever read it.
            ((None, None), None, (10, 10), vec![(NeverTaken, (10, 30))]),
            ((Some(12), None), None, (12, 12), vec![(NeverTaken, (12, 30))]),
            ((None, Some(15)), None, (10, 15), vec![]),
            // The log has been cut.
            ((Some(4), None), Some(Some(20)), (10, 20), vec![(OutOfReach, (4, 10))]),
            ((Some(4), Some(7)), Some(Some(20)), (10, 10), vec![(OutOfReach, (4, 7))]),
            ((Some(4), None), Some(Some(8)), (10, 10), vec![(OutOfReach, (4, 8))]),
            // It ends before what is settled.
            ((None, None), Some(Some(33)), (10, 30), vec![(BeyondEnd, (30, 33))]),
        ] {
            let mut heard = Vec::new();
            let Part { from, to, next } = part(asked, log, settled, |problem, range| heard.push((problem, range)));
            heard.retain(|(_, (from, to))| from < to);
            assert_eq!(((from, to), next, heard), (range, range.0, told), "{asked:?} {settled:?}");
        }
    }

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
