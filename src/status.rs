//! What this process does now: the partitions it owns and whether it is ready.
//!
//! In: changes from the pipeline, once per batch. Out: snapshots for `/status`, `/metrics` and `/ready`. It owns nothing that matters:
//! if it is wrong, people are misled, and no event is.
//!
//! Invariant: a partition that is not owned has no entry, and a late change of it makes none.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::event::{Currency, Money};
use crate::handler::HeldReason;
use crate::metrics::DuplicateCause;
use crate::record::{Epoch, NextOffset};
use crate::store::held_events::HeldState;

/// A shared view of the partitions and the held events.
#[derive(Clone, Debug, Default)]
pub struct Status(Arc<Mutex<Snapshot>>);

/// The whole view at one moment.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// The owned partitions by number.
    pub partitions: BTreeMap<i32, PartitionStatus>,
    /// Since the process has started.
    pub duplicates: Duplicates,
    /// Held events of the whole group and topic, as last counted.
    pub held: Vec<(HeldReason, HeldState, i64)>,
    /// When the poll thread was last seen at work; `None` before it has begun.
    pub polled: Option<Instant>,
    /// Since when nothing is polled because the buffer is full.
    pub no_room: Option<Instant>,
    /// When a partition last got its turn or gave it back.
    pub turned: Option<Instant>,
    /// Why the downstream is not called.
    pub paused: Option<String>,
    /// Requests of operators that nobody has carried out yet, as last counted.
    pub held_requests: i64,
    /// Partitions that the database knows for the group and topic, as last counted.
    pub known_partitions: Option<i64>,
}

/// Events that were settled before, and what they would have cost, by why they came.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Duplicates(BTreeMap<DuplicateCause, Duplicated>);

/// Of one cause.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Duplicated {
    /// How many records.
    pub count: usize,
    /// Their amounts, added up in the smallest unit of each currency.
    pub minor_units: BTreeMap<Currency, i128>,
}

/// One owned partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartitionStatus {
    /// Under which it is owned.
    pub epoch: Epoch,
    /// Records that wait in the window.
    pub window_records: usize,
    /// What they hold, in bytes.
    pub window_bytes: usize,
    /// When the first of them was made, by its own timestamp; milliseconds since 1970.
    pub window_made_ms: Option<i64>,
    /// Records of the window's batch that is in its transaction.
    pub in_flight: usize,
    /// Where it stands on its way to a transaction.
    pub turn: Turn,
    /// One past the last settled record.
    pub frontier: Option<NextOffset>,
    /// What Kafka has taken.
    pub committed: Option<NextOffset>,
    /// One past the last record of the partition, as last seen.
    pub end: Option<NextOffset>,
    /// Held events that are not settled.
    pub held_open: usize,
    /// Why nothing is fetched now; goes away by itself.
    pub paused: Option<String>,
    /// Why it waits for an operator.
    pub stopped: Option<String>,
    /// One past what the Kafka client could give out when it had nothing more: what a rolled-back transaction leaves at the end is no lag.
    pub read_to: Option<NextOffset>,
    /// When something was last settled, or there was nothing to settle, or a reason to wait ended.
    pub progressed: Instant,
}

/// Where a partition stands on its way to a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// It has nothing to do, or waits for something else.
    Resting,
    /// It waits for a free DedupActor, since then.
    Queued(Instant),
    /// A DedupActor works for it.
    Running,
}

impl Duplicates {
    /// One more.
    pub fn add(&mut self, cause: DuplicateCause, worth: Option<Money>) {
        let of_cause = self.0.entry(cause).or_default();
        of_cause.count += 1;
        if let Some(worth) = worth {
            *of_cause.minor_units.entry(worth.currency()).or_default() += i128::from(worth.minor_units());
        }
    }

    /// How many came for which reason.
    pub fn counts(&self) -> impl Iterator<Item = (DuplicateCause, usize)> {
        self.0.iter().map(|(cause, of_cause)| (*cause, of_cause.count))
    }

    /// Everything, by cause.
    pub fn iter(&self) -> impl Iterator<Item = (DuplicateCause, &Duplicated)> {
        self.0.iter().map(|(cause, of_cause)| (*cause, of_cause))
    }
}

impl Status {
    /// More duplicates.
    pub fn duplicates(&self, more: &Duplicates) {
        if more.0.is_empty() {
            return;
        }
        let mut view = self.lock();
        for (cause, of_cause) in &more.0 {
            let sum = view.duplicates.0.entry(*cause).or_default();
            sum.count += of_cause.count;
            for (currency, units) in &of_cause.minor_units {
                *sum.minor_units.entry(*currency).or_default() += units;
            }
        }
    }

    /// The partition is ours from now on; whatever was known of it is forgotten.
    pub fn partition_owned(&self, partition: i32, epoch: Epoch) {
        self.lock().partitions.insert(partition, PartitionStatus::new(epoch));
    }

    /// The partition is no longer ours.
    pub fn partition_gone(&self, partition: i32) {
        self.lock().partitions.remove(&partition);
    }

    /// The owner took a new epoch and went on.
    pub fn epoch(&self, partition: i32, from: Epoch, to: Epoch) {
        self.change(partition, from, |known| known.epoch = to);
    }

    /// The partition is ours and waits for a person.
    pub fn stopped(&self, partition: i32, reason: &str) {
        let mut view = self.lock();
        let known = view.partitions.entry(partition).or_insert_with(|| PartitionStatus::new(Epoch(0)));
        known.stopped = Some(reason.to_owned());
    }

    /// Changes what is known of an owned partition; a change by another epoch than the owning one is dropped.
    pub fn change(&self, partition: i32, epoch: Epoch, change: impl FnOnce(&mut PartitionStatus)) {
        if let Some(known) = self.lock().partitions.get_mut(&partition).filter(|known| known.epoch == epoch) {
            change(known);
        }
    }

    /// What Kafka has taken, as the committing thread learns it.
    pub fn committed(&self, partition: i32, epoch: Epoch, next: NextOffset) {
        self.change(partition, epoch, |known| known.committed = Some(next));
    }

    /// What waits in the window.
    pub fn window(&self, partition: i32, epoch: Epoch, records: usize, bytes: usize, made_ms: Option<i64>) {
        self.change(partition, epoch, |known| {
            (known.window_records, known.window_bytes, known.window_made_ms) = (records, bytes, made_ms);
        });
    }

    /// The frontier after a commit.
    pub fn frontier(&self, partition: i32, epoch: Epoch, next: NextOffset) {
        self.change(partition, epoch, |known| {
            if known.frontier.replace(next) != Some(next) {
                known.progressed = Instant::now();
            }
        });
    }

    /// A batch of the window has begun with so many records, or is over (none).
    pub fn in_flight(&self, partition: i32, epoch: Epoch, events: usize) {
        self.change(partition, epoch, |known| known.in_flight = events);
    }

    /// It waits for its turn, has it, or is done. Waiting for it is no fault of the partition.
    pub fn turn(&self, partition: i32, epoch: Epoch, turn: Turn) {
        self.lock().turned = Some(Instant::now());
        self.change(partition, epoch, |known| {
            if let Turn::Queued(since) = known.turn {
                known.waited_since(since);
            }
            known.turn = turn;
        });
    }

    /// Held events were settled, which moves no frontier.
    pub fn progressed(&self, partition: i32, epoch: Epoch) {
        self.change(partition, epoch, |known| known.progressed = Instant::now());
    }

    /// Why it waits, or that it goes on.
    pub fn partition_paused(&self, partition: i32, epoch: Epoch, reason: Option<String>) {
        self.change(partition, epoch, |known| {
            if known.paused.is_some() && reason.is_none() {
                known.progressed = Instant::now();
            }
            known.paused = reason;
        });
    }

    /// It is to be taken up again, by another actor.
    pub fn taken_up_again(&self, partition: i32) {
        if let Some(known) = self.lock().partitions.get_mut(&partition) {
            known.paused = Some("it is being taken up again".to_owned());
            known.stopped = None;
        }
    }

    /// The end of the partition, as the poll thread learns it, whatever the epoch.
    pub fn end(&self, partition: i32, end: NextOffset) {
        if let Some(known) = self.lock().partitions.get_mut(&partition) {
            let had_nothing_to_do = !known.has_work();
            known.end = Some(end);
            if had_nothing_to_do {
                known.progressed = Instant::now();
            }
        }
    }

    /// The Kafka client has given out everything up to this end.
    pub fn read_to_the_end(&self, partition: i32, end: NextOffset) {
        self.end(partition, end);
        if let Some(known) = self.lock().partitions.get_mut(&partition) {
            known.read_to = Some(end);
        }
    }

    /// The poll thread is at work.
    pub fn polled(&self) {
        self.lock().polled = Some(Instant::now());
    }

    /// Whether there is room in the buffer. While there is none, nothing is polled; that is no fault of a partition that has no record yet.
    pub fn room(&self, is_there: bool) {
        let mut view = self.lock();
        let since = view.no_room;
        view.no_room = if is_there { None } else { since.or_else(|| Some(Instant::now())) };
        if let Some(since) = since.filter(|_| is_there) {
            for known in view.partitions.values_mut().filter(|known| known.has_no_record()) {
                known.waited_since(since);
            }
        }
    }

    /// Replaces the counts of held events and of what operators ask for.
    pub fn held(&self, counts: Vec<(HeldReason, HeldState, i64)>, requests: i64) {
        let mut view = self.lock();
        (view.held, view.held_requests) = (counts, requests);
    }

    /// How many partitions the database knows for the group and topic.
    pub fn known_partitions(&self, partitions: i64) {
        self.lock().known_partitions = Some(partitions);
    }

    /// Why the downstream is not called, if so.
    pub fn paused(&self, reason: Option<String>) {
        self.lock().paused = reason;
    }

    /// The view at this moment.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        self.lock().clone()
    }

    /// A panic while it is locked cannot leave more than one field stale.
    fn lock(&self) -> MutexGuard<'_, Snapshot> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Snapshot {
    /// What has had work for longer than `limit` and got nowhere, in words: the poll thread, or a partition that knows no reason to wait.
    /// A partition that waits for the database, the provider, a person, its turn or room in the buffer is not among them: a restart would
    /// not help it.
    #[must_use]
    pub fn stuck(&self, limit: Duration) -> Vec<String> {
        // Turns come in the order asked, but for those who share one. With many partitions and a silent database each waits for others that wait.
        let turns_go_on = self.partitions.values().any(|known| known.turn == Turn::Running)
            || self.turned.is_some_and(|moment| moment.elapsed() <= limit);
        let waits_for_others = |known: &PartitionStatus| match known.turn {
            Turn::Queued(_) => turns_go_on,
            _ => self.no_room.is_some() && known.has_no_record(),
        };
        let silent = self.polled.map(|moment| moment.elapsed()).filter(|silent| *silent > limit);
        let poll_thread = silent.map(|silent| format!("the poll thread has not polled for {} s", silent.as_secs()));
        let judged = self.partitions.iter().filter(|(_, known)| !waits_for_others(known));
        let idle = judged.map(|(partition, known)| (partition, known.stuck_for())).filter(|(_, idle)| *idle > limit);
        let partitions = idle.map(|(partition, idle)| {
            format!("partition {partition} has records to settle and has settled none for {} s", idle.as_secs())
        });
        poll_thread.into_iter().chain(partitions).collect()
    }
}

impl PartitionStatus {
    fn new(epoch: Epoch) -> Self {
        Self {
            epoch,
            window_records: 0,
            window_bytes: 0,
            window_made_ms: None,
            in_flight: 0,
            turn: Turn::Resting,
            frontier: None,
            committed: None,
            end: None,
            held_open: 0,
            paused: None,
            stopped: None,
            read_to: None,
            progressed: Instant::now(),
        }
    }

    /// Whether anything waits to be settled: in the window, in a batch, or in the log beyond what was read.
    fn has_work(&self) -> bool {
        let unread = self.end > self.read_to.max(self.frontier) && self.end.is_some() && self.frontier.is_some();
        !self.has_no_record() || unread
    }

    /// Neither in the window nor in a batch.
    const fn has_no_record(&self) -> bool {
        self.window_records == 0 && self.in_flight == 0
    }

    /// What it has waited for others since then does not count against it.
    fn waited_since(&mut self, since: Instant) {
        self.progressed = (self.progressed + since.elapsed()).min(Instant::now());
    }

    /// For the database, the provider or a person.
    const fn waits(&self) -> bool {
        self.paused.is_some() || self.stopped.is_some()
    }

    /// How long it has had work and no reason to wait, and got nowhere; zero while it has none, or waits.
    #[must_use]
    pub fn stuck_for(&self) -> Duration {
        if self.waits() || !self.has_work() { Duration::ZERO } else { self.progressed.elapsed() }
    }

    /// Whether nothing below this end of its log is unsettled. What a rolled-back transaction leaves at the end is not waited for.
    #[must_use]
    pub fn has_settled_up_to(&self, end: NextOffset) -> bool {
        // Who stopped or waits may have thrown away what came.
        let is_idle = !self.waits() && self.has_no_record() && self.frontier.is_some();
        self.frontier >= Some(end) || is_idle && self.read_to >= Some(end)
    }

    /// Records between the frontier and the end; `None` while either is unknown.
    #[must_use]
    pub fn lag(&self) -> Option<i64> {
        Some((self.end?.0 - self.frontier?.0).max(0))
    }
}

/// What must be true before work can be expected of this process: named latches, each red until it is set.
#[derive(Clone, Debug)]
pub struct Readiness(Arc<Mutex<BTreeMap<&'static str, Option<String>>>>);

impl Readiness {
    /// PostgreSQL answers.
    pub const DATABASE: &'static str = "database";
    /// Every migration is applied.
    pub const SCHEMA: &'static str = "schema";
    /// The first assignment is over.
    pub const ASSIGNMENT: &'static str = "assignment";
    /// No partition of ours waits for a person.
    pub const PARTITIONS: &'static str = "partitions";
    /// Days of ids can be made ahead.
    pub const DAYS: &'static str = "days";
    /// The downstream is called.
    pub const PROVIDER: &'static str = "provider";
    /// The process is not about to end.
    pub const PROCESS: &'static str = "process";
    /// All of them.
    pub const LATCHES: &'static [&'static str] =
        &[Self::DATABASE, Self::SCHEMA, Self::ASSIGNMENT, Self::PARTITIONS, Self::DAYS, Self::PROVIDER, Self::PROCESS];

    /// With the three latches of the service, all red.
    #[must_use]
    pub fn new() -> Self {
        let red = |latch| (latch, Some("not yet".to_owned()));
        Self(Arc::new(Mutex::new([Self::DATABASE, Self::SCHEMA, Self::ASSIGNMENT].map(red).into())))
    }

    /// The latch is green.
    pub fn set(&self, latch: &'static str) {
        self.lock().insert(latch, None);
    }

    /// The latch is red, for this reason. A latch of any name may be added this way.
    pub fn clear(&self, latch: &'static str, reason: impl Into<String>) {
        self.lock().insert(latch, Some(reason.into()));
    }

    /// The red latches with their reasons; none = ready.
    #[must_use]
    pub fn red(&self) -> Vec<(&'static str, String)> {
        self.lock().iter().filter_map(|(latch, reason)| Some((*latch, reason.clone()?))).collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<&'static str, Option<String>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for Readiness {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_change_brings_no_partition_back() {
        let status = Status::default();
        status.partition_owned(3, Epoch(1));
        status.partition_gone(3);
        status.frontier(3, Epoch(1), NextOffset(9));
        status.end(3, NextOffset(9));
        assert!(status.snapshot().partitions.is_empty());
    }

    #[test]
    fn a_former_owner_in_this_process_changes_nothing_of_the_new_one() {
        let status = Status::default();
        status.partition_owned(3, Epoch(1));
        status.partition_owned(3, Epoch(2));
        status.frontier(3, Epoch(1), NextOffset(9));
        let known = &status.snapshot().partitions[&3];
        assert_eq!((known.epoch, known.frontier), (Epoch(2), None));
    }

    /// As if it had happened so long ago.
    fn long_ago(status: &Status) {
        let mut view = status.lock();
        let moment = Instant::now().checked_sub(Duration::from_secs(60)).expect("the machine runs for longer");
        let view = &mut *view;
        for since in [&mut view.polled, &mut view.no_room, &mut view.turned] {
            *since = since.map(|_| moment);
        }
        for known in view.partitions.values_mut() {
            known.progressed = moment;
            if let Turn::Queued(since) = &mut known.turn {
                *since = moment;
            }
        }
    }

    // CASES H07, A02
    #[test]
    fn who_has_work_and_no_reason_to_wait_and_gets_nowhere_is_stuck() {
        let (status, limit) = (Status::default(), Duration::from_secs(30));
        let stuck = || status.snapshot().stuck(limit);
        status.partition_owned(3, Epoch(1));
        status.frontier(3, Epoch(1), NextOffset(10));
        status.end(3, NextOffset(10));
        long_ago(&status);
        assert!(stuck().is_empty(), "it has nothing to do");
        status.end(3, NextOffset(12));
        assert!(stuck().is_empty(), "the first record has only just come");
        long_ago(&status);
        assert_eq!(stuck(), ["partition 3 has records to settle and has settled none for 60 s"]);
        status.end(3, NextOffset(13));
        assert!(!stuck().is_empty(), "more of it is no progress");

        status.partition_paused(3, Epoch(1), Some("the database is away".to_owned()));
        assert!(stuck().is_empty(), "a restart would not bring the database back");
        status.partition_paused(3, Epoch(1), None);
        assert!(stuck().is_empty(), "it has only just gone on");
        long_ago(&status);
        status.frontier(3, Epoch(1), NextOffset(11));
        assert!(stuck().is_empty(), "it has settled one");
        long_ago(&status);
        status.stopped(3, "the topic was made anew");
        assert!(stuck().is_empty(), "a person is waited for");
    }

    #[test]
    fn an_end_without_records_is_no_work_but_a_window_and_a_batch_are() {
        let (status, limit) = (Status::default(), Duration::from_secs(30));
        let stuck = || !status.snapshot().stuck(limit).is_empty();
        status.partition_owned(3, Epoch(1));
        status.frontier(3, Epoch(1), NextOffset(10));
        status.read_to_the_end(3, NextOffset(11));
        long_ago(&status);
        assert!(!stuck(), "the last offset is a marker of a transaction");
        status.window(3, Epoch(1), 1, 100, None);
        assert!(stuck());
        status.window(3, Epoch(1), 0, 0, None);
        status.in_flight(3, Epoch(1), 5);
        assert!(stuck(), "a batch that does not end");
    }

    #[test]
    fn who_waits_for_its_turn_is_stuck_only_while_nobody_has_one() {
        let (status, limit) = (Status::default(), Duration::from_secs(30));
        for partition in [3, 4] {
            status.partition_owned(partition, Epoch(1));
            status.window(partition, Epoch(1), 5, 500, None);
        }
        let stuck = || status.snapshot().stuck(limit).len();
        status.turn(3, Epoch(1), Turn::Running);
        status.turn(4, Epoch(1), Turn::Queued(Instant::now()));
        status.partition_paused(3, Epoch(1), Some("the database is silent".to_owned()));
        long_ago(&status);
        assert_eq!(stuck(), 0, "one waits for the database, the other one for that");
        status.turn(3, Epoch(1), Turn::Resting);
        assert_eq!(stuck(), 0, "it is the next one");
        long_ago(&status);
        assert_eq!(stuck(), 1, "nobody is there who could end its wait");
        status.turn(4, Epoch(1), Turn::Running);
        assert_eq!(stuck(), 0, "it has only just got its turn");
        long_ago(&status);
        assert_eq!(stuck(), 1, "and makes nothing of it");
        for turn in [Turn::Resting, Turn::Queued(Instant::now()), Turn::Running] {
            status.turn(4, Epoch(1), turn);
        }
        assert_eq!(stuck(), 1, "nor of one more turn");
    }

    #[test]
    fn who_has_no_record_yet_is_not_stuck_for_want_of_room() {
        let (status, limit) = (Status::default(), Duration::from_secs(30));
        let stuck = || status.snapshot().stuck(limit).len();
        status.partition_owned(3, Epoch(1));
        status.frontier(3, Epoch(1), NextOffset(10));
        status.end(3, NextOffset(12));
        status.room(false);
        long_ago(&status);
        status.room(false);
        assert_eq!(stuck(), 0, "records of others fill the buffer");
        status.room(true);
        assert_eq!(stuck(), 0, "there is room only since now");
        status.room(true);
        long_ago(&status);
        assert_eq!(stuck(), 1, "it gets none although there is room");
        status.window(3, Epoch(1), 1, 100, None);
        status.room(false);
        assert_eq!(stuck(), 1, "one that it has needs no room");
        long_ago(&status);
        status.frontier(3, Epoch(1), NextOffset(11));
        status.window(3, Epoch(1), 0, 0, None);
        status.room(true);
        assert!(status.snapshot().partitions[&3].progressed <= Instant::now(), "what it has not waited is not made up for");
    }

    #[test]
    fn a_poll_thread_that_does_not_poll_is_stuck() {
        let status = Status::default();
        assert!(status.snapshot().stuck(Duration::ZERO).is_empty(), "it has not begun");
        status.polled();
        long_ago(&status);
        assert_eq!(status.snapshot().stuck(Duration::from_secs(30)), ["the poll thread has not polled for 60 s"]);
    }

    #[test]
    fn lag_is_unknown_until_both_ends_are_known_and_never_negative() {
        let mut partition = PartitionStatus::new(Epoch(1));
        assert_eq!(partition.lag(), None);
        partition.frontier = Some(NextOffset(10));
        assert_eq!(partition.lag(), None);
        partition.end = Some(NextOffset(12));
        assert_eq!(partition.lag(), Some(2));
        partition.end = Some(NextOffset(8));
        assert_eq!(partition.lag(), Some(0));
    }

    // CASES A17
    #[test]
    fn readiness_is_red_until_every_latch_is_set() {
        let readiness = Readiness::new();
        readiness.set(Readiness::DATABASE);
        readiness.set(Readiness::SCHEMA);
        assert_eq!(readiness.red(), [(Readiness::ASSIGNMENT, "not yet".to_owned())]);
        readiness.set(Readiness::ASSIGNMENT);
        assert_eq!(readiness.red(), []);
        readiness.clear(Readiness::DATABASE, "away for 3 s");
        assert_eq!(readiness.red(), [(Readiness::DATABASE, "away for 3 s".to_owned())]);
    }
}
