//! What Kafka is told: `next_offset` of each owned partition, after the transaction that settled it and never before (R-KFK-CONS-X1).
//!
//! In: confirmations by partition and epoch. Out: explicit commits, on a thread of their own, because a commit during a rebalance can
//! block for seconds. If it dies here, Kafka is behind and records come again; the claims absorb them. The process ends then, because
//! an engine that no longer commits would replay ever more.
//!
//! Invariant: within one assignment the committed offset of a partition only grows, and only by confirmations of an epoch that is not
//! older than the one tracked.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use actix::prelude::*;
use rdkafka::TopicPartitionList;
use rdkafka::consumer::{CommitMode, Consumer};
use tokio::sync::oneshot;
use tracing::warn;

use crate::app::{DeathNotice, Fatal};
use crate::crash::CrashPoint;
use crate::metrics;
use crate::pipeline::broker::COMMITTED_BY;
use crate::pipeline::client::Client;
use crate::record::{Epoch, NextOffset};
use crate::status::Status;

/// How long a commit may go unanswered before it counts as failed. Its thread may still be blocked; what it tried is tried again.
const COMMIT_ANSWER: Duration = Duration::from_secs(5);

/// Confirmations and flushes that may wait. Senders await a place, so nothing is lost when it is full.
const MAILBOX: usize = 1024;

/// A partition is ours from now on.
#[derive(Message, Debug)]
#[rtype(result = "()")]
pub struct Track {
    /// The partition.
    pub partition: i32,
    /// The epoch under which it was taken.
    pub epoch: Epoch,
    /// What Kafka had when it was assigned.
    pub committed: Option<NextOffset>,
    /// Where it begins, if our row says that everything below is settled. Should nothing more come, Kafka would never hear of it.
    pub settled: Option<NextOffset>,
}

/// A transaction has committed.
#[derive(Message, Debug)]
#[rtype(result = "()")]
pub struct Confirmed {
    /// The partition.
    pub partition: i32,
    /// The epoch that fenced the transaction.
    pub epoch: Epoch,
    /// The frontier that it wrote.
    pub next_offset: NextOffset,
}

/// Commit what is confirmed for these partitions now, then forget them: they are going away. Lost ones are only forgotten.
#[derive(Message, Debug)]
#[rtype(result = "()")]
pub struct Release {
    /// The partitions.
    pub partitions: Vec<i32>,
    /// Whether they were lost, not revoked: somebody else may have them already, and nothing may be committed.
    pub lost: bool,
}

/// The bookkeeping, without I/O.
#[derive(Debug, Default)]
pub struct Ledger(HashMap<i32, Entry>);

#[derive(Debug)]
struct Entry {
    epoch: Epoch,
    confirmed: Option<NextOffset>,
    committed: Option<NextOffset>,
}

/// The actor around the ledger.
#[derive(Debug)]
pub struct OffsetActor {
    /// First, so that it is told before the commit thread ends for want of requests.
    _death: DeathNotice,
    ledger: Ledger,
    thread: Sender<CommitRequest>,
    status: Status,
    interval: Duration,
    committing: bool,
}

#[derive(Debug)]
struct CommitRequest {
    offsets: Vec<(i32, NextOffset)>,
    answer: oneshot::Sender<Result<(), String>>,
}

impl Ledger {
    /// Starts a new assignment of the partition, or a new epoch within one (`committed` then stays what is known to be there).
    /// What is `settled` by earlier owners is confirmed at once.
    pub fn track(&mut self, partition: i32, epoch: Epoch, committed: Option<NextOffset>, settled: Option<NextOffset>) {
        self.0.insert(partition, Entry { epoch, confirmed: settled, committed });
    }

    /// Takes a confirmation; `false` when it is not from the current assignment and changes nothing.
    pub fn confirm(&mut self, partition: i32, epoch: Epoch, next_offset: NextOffset) -> bool {
        match self.0.get_mut(&partition) {
            Some(entry) if epoch >= entry.epoch => {
                entry.epoch = epoch;
                entry.confirmed = entry.confirmed.max(Some(next_offset));
                true
            }
            Some(_) | None => false,
        }
    }

    /// What Kafka should be told, of all partitions.
    #[must_use]
    pub fn due(&self) -> Vec<(i32, NextOffset)> {
        let mut due: Vec<_> = self.0.iter().filter_map(|(partition, entry)| entry.due().map(|next| (*partition, next))).collect();
        due.sort_unstable();
        due
    }

    /// What Kafka should be told, of one partition.
    #[must_use]
    pub fn due_of(&self, partition: i32) -> Option<NextOffset> {
        self.0.get(&partition).and_then(Entry::due)
    }

    /// Kafka has it. Out: the epoch under which the partition is tracked.
    pub fn committed(&mut self, partition: i32, next_offset: NextOffset) -> Option<Epoch> {
        let entry = self.0.get_mut(&partition)?;
        entry.committed = entry.committed.max(Some(next_offset));
        Some(entry.epoch)
    }

    /// Forgets the partition.
    pub fn release(&mut self, partition: i32) {
        self.0.remove(&partition);
    }
}

impl Entry {
    fn due(&self) -> Option<NextOffset> {
        self.confirmed.filter(|confirmed| self.committed.is_none_or(|committed| *confirmed > committed))
    }
}

impl OffsetActor {
    /// An actor that commits at most once per `interval`, through a thread of its own.
    ///
    /// # Panics
    /// When the operating system refuses a thread.
    #[must_use]
    pub fn new(topic: String, client: Client, interval: Duration, status: Status, fatal: &Fatal) -> Self {
        let (thread, requests) = channel();
        let death = fatal.notice("commit thread");
        std::thread::Builder::new()
            .name("onceward-commit".into())
            .spawn(move || {
                let _death = death;
                commit_requests(&topic, &client, &requests);
            })
            .expect("the operating system gives a thread");
        Self { ledger: Ledger::default(), thread, status, interval, committing: false, _death: fatal.notice("OffsetActor") }
    }

    /// Hands `offsets` to the commit thread and waits for the answer, at most [`COMMIT_ANSWER`].
    fn commit(&mut self, offsets: Vec<(i32, NextOffset)>) -> ResponseActFuture<Self, ()> {
        let (answer, answered) = oneshot::channel();
        let request = CommitRequest { offsets: offsets.clone(), answer };
        let sent = self.thread.send(request).is_ok();
        let wait = async move {
            if !sent {
                return Err("the commit thread has ended".to_owned());
            }
            match tokio::time::timeout(COMMIT_ANSWER, answered).await {
                Ok(Ok(result)) => result,
                Ok(Err(_)) => Err("the commit thread has ended".to_owned()),
                Err(_) => Err(format!("no answer within {} s", COMMIT_ANSWER.as_secs())),
            }
        };
        Box::pin(wait.into_actor(self).map(move |result, actor, _| match result {
            Ok(()) => {
                CrashPoint::OffsetsCommitted.passed();
                metrics::commit_ok();
                for (partition, next_offset) in offsets {
                    if let Some(epoch) = actor.ledger.committed(partition, next_offset) {
                        actor.status.committed(partition, epoch, next_offset);
                    }
                }
            }
            Err(error) => {
                metrics::commit_failed();
                warn!(error, partitions = offsets.len(), "offset commit failed; it is tried again while the partitions are ours");
            }
        }))
    }

    fn tick(&mut self, ctx: &mut Context<Self>) {
        let due = self.ledger.due();
        if self.committing || due.is_empty() {
            return;
        }
        self.committing = true;
        let commit = self.commit(due).map(|(), actor, _| actor.committing = false);
        ctx.spawn(commit);
    }
}

impl Actor for OffsetActor {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.set_mailbox_capacity(MAILBOX);
        ctx.run_interval(self.interval, Self::tick);
    }
}

impl Handler<Track> for OffsetActor {
    type Result = ();

    fn handle(&mut self, track: Track, _: &mut Self::Context) {
        self.ledger.track(track.partition, track.epoch, track.committed, track.settled);
    }
}

impl Handler<Confirmed> for OffsetActor {
    type Result = ();

    fn handle(&mut self, confirmed: Confirmed, _: &mut Self::Context) {
        if !self.ledger.confirm(confirmed.partition, confirmed.epoch, confirmed.next_offset) {
            metrics::stale_confirmation();
        }
    }
}

impl Handler<Release> for OffsetActor {
    type Result = ResponseActFuture<Self, ()>;

    fn handle(&mut self, release: Release, _: &mut Self::Context) -> Self::Result {
        let due: Vec<_> = if release.lost {
            Vec::new()
        } else {
            release.partitions.iter().filter_map(|p| self.ledger.due_of(*p).map(|next| (*p, next))).collect()
        };
        let committed = if due.is_empty() { Box::pin(fut::ready(())) as ResponseActFuture<Self, ()> } else { self.commit(due) };
        Box::pin(committed.map(move |(), actor, _| {
            for partition in release.partitions {
                actor.ledger.release(partition);
            }
        }))
    }
}

/// The commit thread: one blocking commit at a time, in the order asked.
fn commit_requests(topic: &str, client: &Client, requests: &Receiver<CommitRequest>) {
    for request in requests {
        // Nobody waits any more: by now it may be somebody else's partition, and what we would write lies behind or ahead of theirs.
        if request.answer.is_closed() {
            continue;
        }
        let result = client.get().ok_or_else(|| "the consumer is closed".to_owned()).and_then(|consumer| {
            let mut list = TopicPartitionList::with_capacity(request.offsets.len());
            for (partition, next_offset) in &request.offsets {
                let mut added = list.add_partition(topic, *partition);
                added.set_offset(rdkafka::Offset::Offset(next_offset.0)).map_err(|error| error.to_string())?;
                added.set_metadata(COMMITTED_BY);
            }
            consumer.commit(&list, CommitMode::Sync).map_err(|error| error.to_string())
        });
        // Whoever asked may have given up waiting.
        let _ = request.answer.send(result);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_confirmation_of_an_older_epoch_or_of_a_partition_not_ours_changes_nothing() {
        let mut ledger = Ledger::default();
        assert!(!ledger.confirm(0, Epoch(1), NextOffset(5)), "not ours");
        ledger.track(0, Epoch(2), Some(NextOffset(3)), None);
        assert!(!ledger.confirm(0, Epoch(1), NextOffset(9)), "CASES B06, I03, I09: a late completion of an earlier assignment");
        assert_eq!(ledger.due(), []);
        assert!(ledger.confirm(0, Epoch(3), NextOffset(4)), "the owner took a new epoch meanwhile");
        assert_eq!(ledger.due(), [(0, NextOffset(4))]);
    }

    #[test]
    fn nothing_is_committed_below_what_kafka_had_at_the_assign() {
        let mut ledger = Ledger::default();
        ledger.track(0, Epoch(1), Some(NextOffset(100)), None);
        ledger.confirm(0, Epoch(1), NextOffset(50));
        assert_eq!(ledger.due(), []);
        ledger.confirm(0, Epoch(1), NextOffset(101));
        assert_eq!(ledger.due(), [(0, NextOffset(101))]);
    }

    proptest! {
        // CASES I01: whatever the order of confirmations, answers and failures, commits of one assignment only grow.
        #[test]
        fn commits_only_grow(steps in prop::collection::vec((0i64..50, 0u8..3), 1..100)) {
            let mut ledger = Ledger::default();
            ledger.track(0, Epoch(1), None, None);
            let (mut sent, mut highest) = (Vec::new(), None);
            for (next, kind) in steps {
                match kind {
                    0 => {
                        ledger.confirm(0, Epoch(1), NextOffset(next));
                        highest = highest.max(Some(NextOffset(next)));
                    }
                    1 => {
                        if let Some(next) = ledger.due_of(0) {
                            sent.push(next);
                            ledger.committed(0, next);
                        }
                    }
                    _ => sent.extend(ledger.due_of(0)), // refused by the broker: tried again later
                }
                prop_assert!(sent.is_sorted());
                prop_assert!(ledger.due_of(0).or(sent.last().copied()) == highest);
            }
        }
    }
}
