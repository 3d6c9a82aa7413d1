//! A group's whole topic at one glance: what the database, Kafka and this process know, side by side.
//!
//! In: their answers, each with its age or why there is none. Out: a row per partition, and what is held; for the page, for machines and
//! for `onceward status`. It owns nothing.
//!
//! Invariant: what is not known is shown as not known, never as nothing; and nothing of a record is in it.

mod lookout;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::{Value, json};

pub(crate) use self::lookout::Lookout;
use crate::config::KafkaConfig;
use crate::event::id::unix_ms_of;
use crate::handler::HeldReason;
use crate::pipeline::broker::{self, Log};
use crate::pipeline::connection;
use crate::pipeline::rebalance::Rebalances;
use crate::retention::cleaner::Outlook;
use crate::status::Snapshot;
use crate::store::held_events::HeldState;
use crate::store::overview::{Group, PartitionRow};

/// What the broker says of every partition.
pub(crate) type Logs = BTreeMap<i32, Log>;

/// The newest answer to a question, and whether a newer one has failed.
#[derive(Debug)]
pub(crate) struct Known<T> {
    /// The answer, and when it came.
    pub answer: Option<(Instant, Arc<T>)>,
    /// Why there is no newer one.
    pub error: Option<String>,
    /// How long the last question took.
    pub took: Duration,
}

/// What is looked at.
#[derive(Clone, Debug)]
pub(crate) struct Overview {
    /// The consumed topic.
    pub topic: String,
    /// The consumer group.
    pub group: String,
    /// A row per partition of the topic.
    pub partitions: Vec<Row>,
    /// What is held and not settled, what nobody knows the outcome of first.
    pub held: Vec<HeldKind>,
    /// The database's answer.
    pub database: Known<Group>,
    /// The broker's answer.
    pub kafka: Known<Logs>,
    /// What is remembered, and what keeps it.
    pub retention: Known<Outlook>,
}

/// A partition.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Row {
    /// Its number.
    pub partition: i32,
    /// What it does.
    pub state: State,
    /// Why it does not run.
    pub why: Option<String>,
    /// Who took it last.
    pub owner: Option<String>,
    /// This process owns it.
    pub here: bool,
    /// How often it was taken.
    pub epoch: Option<i64>,
    /// The frontier.
    pub settled: Option<i64>,
    /// What Kafka was told.
    pub committed: Option<i64>,
    /// The oldest record.
    pub log_begins: Option<i64>,
    /// One past the newest.
    pub log_ends: Option<i64>,
    /// Records that are not settled.
    pub lag: Option<i64>,
    /// Records that wait in its window; known of those owned here.
    pub window_records: Option<usize>,
    /// What they hold, in bytes.
    pub window_bytes: Option<usize>,
    /// Records in the open transaction; known of those owned here.
    pub in_flight: Option<usize>,
    /// How old the oldest record of the window is; known of those owned here.
    pub oldest_ms: Option<i64>,
    /// Held events that are not settled.
    pub held: i64,
    /// No unsettled event is older; milliseconds since 1970.
    pub safe_ms: Option<i64>,
    /// Ranges of offsets that are passed over.
    pub passed_over: Vec<(i64, i64)>,
    /// When its row was last written; milliseconds since 1970.
    pub updated_ms: Option<i64>,
}

/// What a partition does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum State {
    /// It is consumed, as far as anybody here knows.
    Running,
    /// It waits, and goes on by itself.
    Waiting,
    /// An operator wants it to wait.
    Paused,
    /// It waits for a person to repair something.
    Stopped,
    /// Nobody has ever owned it.
    #[default]
    Unowned,
}

/// Held events of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HeldKind {
    /// Why they are held.
    pub reason: HeldReason,
    /// Where they stand.
    pub state: HeldState,
    /// How many.
    pub count: i64,
    /// Since when the oldest is held; milliseconds since 1970.
    pub oldest_ms: i64,
}

impl<T> Known<T> {
    /// Of a question that was asked just now.
    pub(crate) fn just_now(answer: Result<T, String>, took: Duration) -> Self {
        let (answer, error) = match answer {
            Ok(answer) => (Some((Instant::now(), Arc::new(answer))), None),
            Err(error) => (None, Some(error)),
        };
        Self { answer, error, took }
    }

    /// The answer, however old.
    pub(crate) fn get(&self) -> Option<&T> {
        self.answer.as_ref().map(|(_, answer)| &**answer)
    }

    fn json(&self) -> Value {
        let age = self.answer.as_ref().map(|(at, _)| ms(at.elapsed()));
        json!({ "age_ms": age, "took_ms": ms(self.took), "error": self.error })
    }
}

impl<T> Clone for Known<T> {
    fn clone(&self) -> Self {
        Self { answer: self.answer.clone(), error: self.error.clone(), took: self.took }
    }
}

impl<T> Default for Known<T> {
    fn default() -> Self {
        Self { answer: None, error: None, took: Duration::ZERO }
    }
}

impl Overview {
    /// Puts side by side what each knows; `here` is this process, where one consumes.
    pub(crate) fn of(
        kafka: &KafkaConfig,
        (database, logs, retention): (Known<Group>, Known<Logs>, Known<Outlook>),
        here: &Snapshot,
    ) -> Self {
        Self {
            topic: kafka.topic.clone(),
            group: kafka.group.clone(),
            partitions: rows(database.get(), logs.get(), here),
            held: database.get().map(held).unwrap_or_default(),
            database,
            kafka: logs,
            retention,
        }
    }

    /// Events that may have been charged, and nobody knows.
    pub(crate) fn unknown(&self) -> i64 {
        self.held.iter().filter(|kind| kind.reason == HeldReason::Unknown).map(|kind| kind.count).sum()
    }

    /// The records that are not settled; `None` while of one partition that is not known.
    pub(crate) fn lag(&self) -> Option<i64> {
        self.partitions.iter().map(|row| row.lag).sum()
    }

    /// For machines.
    pub(crate) fn json(&self) -> Value {
        let kind = |kind: &HeldKind| json!({ "reason": kind.reason.as_str(), "state": kind.state.as_str(), "count": kind.count, "oldest_ms": kind.oldest_ms });
        let (mut database, mut retention) = (self.database.json(), self.retention.json());
        database["version"] = json!(self.database.get().map(|group| &group.version));
        retention["outlook"] = json!(self.retention.get().map(Outlook::json));
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "now_ms": self.database.answer.as_ref().map_or_else(our_time, |(at, group)| group.now_ms + ms(at.elapsed())),
            "topic": self.topic,
            "group": self.group,
            "lag": self.lag(),
            "partitions": self.partitions,
            "held": {
                "unknown": self.unknown(),
                "kinds": self.held.iter().map(kind).collect::<Vec<_>>(),
                "requests": self.database.get().map(|group| group.requests),
            },
            "database": database,
            "kafka": self.kafka.json(),
            "retention": retention,
        })
    }
}

/// Asks the broker, as a client that joins no group. Blocks the thread.
pub(crate) fn ask_broker(kafka: &KafkaConfig) -> Result<Logs, String> {
    let consumer = connection::connect(&kafka.kafka_client_config(), Rebalances::default());
    let consumer = consumer.map_err(|error| error.to_string())?;
    broker::all_logs(&consumer, &kafka.topic).map_err(|error| connection::told(&consumer).unwrap_or(error))
}

fn rows(group: Option<&Group>, logs: Option<&Logs>, here: &Snapshot) -> Vec<Row> {
    let stored: BTreeMap<i32, &PartitionRow> =
        group.into_iter().flat_map(|group| &group.partitions).map(|row| (row.partition, row)).collect();
    let mut numbers: BTreeSet<i32> = stored.keys().chain(here.partitions.keys()).copied().collect();
    numbers.extend(logs.into_iter().flat_map(BTreeMap::keys));
    let held_in = |partition: i32| -> i64 {
        let counts = group.into_iter().flat_map(|group| &group.held);
        counts.filter(|held| held.partition == partition).map(|held| held.count).sum()
    };
    let row = |partition| {
        let row = row_of(partition, stored.get(&partition).copied(), logs.and_then(|logs| logs.get(&partition)), here);
        Row { held: held_in(partition), ..row }
    };
    numbers.into_iter().map(row).collect()
}

fn row_of(partition: i32, stored: Option<&PartitionRow>, log: Option<&Log>, here: &Snapshot) -> Row {
    let ours = here.partitions.get(&partition);
    let settled = ours.and_then(|known| known.frontier).map(|next| next.0).or(stored.and_then(|row| row.settled));
    // Both only grow; the one that was asked later is the larger.
    let log_ends = ours.and_then(|known| known.end).map(|next| next.0).max(log.map(|log| log.end.0));
    let committed = ours.and_then(|known| known.committed).map(|next| next.0);
    // A log without records leaves nothing to settle.
    let is_empty = log.is_some_and(|log| log.first.0 == log.end.0);
    let passed = settled.or(log_ends.filter(|_| is_empty));
    let waiting = ours.filter(|known| known.window_records > 0);
    let (state, why) = match (ours, stored) {
        (Some(known), _) if known.stopped.is_some() => (State::Stopped, known.stopped.clone()),
        (_, Some(row)) if row.paused.is_some() => (State::Paused, row.paused.as_ref().map(ToString::to_string)),
        (Some(known), _) if known.paused.is_some() => (State::Waiting, known.paused.clone()),
        (Some(_), _) => (State::Running, None),
        (None, Some(row)) if row.owner != NOBODY => (State::Running, None),
        (None, _) => (State::Unowned, None),
    };
    Row {
        partition,
        state,
        why,
        owner: stored.map(|row| row.owner.clone()).filter(|owner| owner != NOBODY),
        here: ours.is_some(),
        epoch: ours.map(|known| known.epoch.0).or(stored.map(|row| row.epoch)),
        settled,
        committed: committed.max(log.and_then(|log| log.committed).map(|next| next.0)),
        log_begins: log.map(|log| log.first.0),
        log_ends,
        lag: log_ends.zip(passed).map(|(end, passed)| (end - passed).max(0)),
        window_records: ours.map(|known| known.window_records),
        window_bytes: ours.map(|known| known.window_bytes),
        in_flight: ours.map(|known| known.in_flight),
        oldest_ms: waiting.and_then(|known| known.window_made_ms).map(|made| (our_time() - made).max(0)),
        held: 0,
        safe_ms: stored.and_then(|row| row.safe_ms),
        passed_over: stored.map(|row| row.skips.ranges().to_vec()).unwrap_or_default(),
        updated_ms: stored.map(|row| row.updated_ms),
    }
}

/// By reason and state, of all partitions; first what a person must look at first.
fn held(group: &Group) -> Vec<HeldKind> {
    let mut kinds: BTreeMap<_, HeldKind> = BTreeMap::new();
    let place = |reason| {
        let first = [HeldReason::Unknown, HeldReason::ChargedNotRecorded];
        let rest = HeldReason::ALL.into_iter().filter(|reason| !first.contains(reason));
        first.into_iter().chain(rest).position(|known| known == reason)
    };
    for held in &group.held {
        let key = (place(held.reason), HeldState::ALL.iter().position(|state| *state == held.state));
        let kind = HeldKind { reason: held.reason, state: held.state, count: 0, oldest_ms: held.oldest_ms };
        let kind = kinds.entry(key).or_insert(kind);
        kind.count += held.count;
        kind.oldest_ms = kind.oldest_ms.min(held.oldest_ms);
    }
    kinds.into_values().collect()
}

/// Stands where a start was written down and nobody has owned the partition yet.
const NOBODY: &str = "nobody";

fn our_time() -> i64 {
    unix_ms_of(std::time::SystemTime::now())
}

fn ms(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Epoch, NextOffset, Offset};
    use crate::status::Status;
    use crate::store::consumed_partitions::Paused;
    use crate::store::overview::HeldCount;

    fn stored(partition: i32, owner: &str) -> PartitionRow {
        PartitionRow {
            partition,
            owner: owner.to_owned(),
            epoch: 3,
            settled: Some(10),
            paused: None,
            safe_ms: None,
            skips: Default::default(),
            updated_ms: 0,
        }
    }

    fn log(end: i64) -> Log {
        Log { committed: Some(NextOffset(9)), set_by_others: false, first: Offset(0), end: NextOffset(end) }
    }

    #[test]
    fn every_partition_has_a_row_whoever_knows_of_it() {
        let status = Status::default();
        status.partition_owned(1, Epoch(4));
        status.frontier(1, Epoch(4), NextOffset(12));
        let group = Group { partitions: vec![stored(0, "a:1"), stored(1, "b:2"), stored(3, NOBODY)], ..Group::default() };
        let logs = [(0, log(15)), (1, log(15)), (2, log(0))].into();
        let rows = rows(Some(&group), Some(&logs), &status.snapshot());
        let seen: Vec<_> = rows.iter().map(|row| (row.partition, row.state, row.here, row.lag)).collect();
        assert_eq!(
            seen,
            [
                (0, State::Running, false, Some(5)),
                (1, State::Running, true, Some(3)),
                (2, State::Unowned, false, Some(0)),
                (3, State::Unowned, false, None)
            ]
        );
        assert_eq!((rows[0].in_flight, rows[1].in_flight), (None, Some(0)), "of others that is not known");
    }

    #[test]
    fn a_stop_is_told_before_a_pause_and_a_pause_before_a_wait() {
        let status = Status::default();
        status.partition_owned(0, Epoch(3));
        let paused = || Paused { actor: "ann".to_owned(), reason: "ticket 17".to_owned() };
        let row = |is_paused: bool| {
            let partitions = vec![PartitionRow { paused: is_paused.then(paused), ..stored(0, "a:1") }];
            rows(Some(&Group { partitions, ..Group::default() }), None, &status.snapshot()).remove(0)
        };
        assert_eq!(row(false).state, State::Running);
        status.partition_paused(0, Epoch(3), Some("the provider is away".to_owned()));
        assert_eq!(row(false).state, State::Waiting);
        assert_eq!((row(true).state, row(true).why.as_deref()), (State::Paused, Some("by ann: ticket 17")));
        status.stopped(0, "the topic was made anew");
        assert_eq!(row(true).state, State::Stopped);
    }

    #[test]
    fn what_nobody_knows_the_outcome_of_comes_first() {
        let count =
            |partition, reason, count, oldest_ms| HeldCount { partition, reason, state: HeldState::Parked, count, oldest_ms };
        let group = Group {
            held: vec![
                count(0, HeldReason::Undecodable, 7, 5),
                count(0, HeldReason::Unknown, 1, 9),
                count(1, HeldReason::Unknown, 2, 4),
            ],
            ..Group::default()
        };
        let kinds: Vec<_> = held(&group).iter().map(|kind| (kind.reason, kind.count, kind.oldest_ms)).collect();
        assert_eq!(kinds, [(HeldReason::Unknown, 3, 4), (HeldReason::Undecodable, 7, 5)]);
    }
}
