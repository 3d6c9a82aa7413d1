//! The records on their way from the poll thread to the PartitionActors.
//!
//! In: records of assigned partitions, one by one. Out: hand-overs, each with the offset handed before it (the chain). It owns what is
//! read and not handed on, and what a full mailbox has refused. If it dies here, the process ends.
//!
//! Invariant: a record is handed on with the offset handed before it, in the order of its partition, or it is dropped *and* the chain
//! shows it.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use actix::prelude::SendError;
use tracing::debug;

use crate::crash::CrashPoint;
use crate::pipeline::command::{Records, Route};
use crate::pipeline::pressure::Seen;
use crate::pipeline::window::{Buffer, Buffered, Handed, Share};
use crate::record::{NextOffset, Record};

/// The assigned partitions and their records on the way.
#[derive(Debug)]
pub struct HandOver {
    buffer: Buffer,
    partitions: HashMap<i32, Assigned>,
    refused: VecDeque<(i32, Records)>,
}

#[derive(Debug)]
struct Assigned {
    route: Option<Route>,
    /// One past the last record handed on: the chain's end.
    handed: NextOffset,
    fresh: Vec<Arc<Buffered>>,
    share: Share,
}

impl HandOver {
    /// With no partitions yet.
    #[must_use]
    pub fn new(buffer: Buffer) -> Self {
        Self { buffer, partitions: HashMap::new(), refused: VecDeque::new() }
    }

    /// The partition is assigned, or positioned anew. Without a route its records are dropped.
    pub fn begin(&mut self, partition: i32, base: NextOffset, route: Option<Route>) {
        self.refused.retain(|(refused, _)| *refused != partition);
        self.partitions.insert(partition, Assigned { route, handed: base, fresh: Vec::new(), share: Share::default() });
    }

    /// Nothing follows what is handed on already.
    pub fn cut(&mut self, partition: i32) {
        if let Some(assigned) = self.partitions.get_mut(&partition) {
            assigned.route = None;
            assigned.fresh.clear();
        }
        self.refused.retain(|(refused, _)| *refused != partition);
    }

    /// The partition is not assigned any more.
    pub fn end(&mut self, partition: i32) {
        self.partitions.remove(&partition);
        self.refused.retain(|(refused, _)| *refused != partition);
    }

    /// Whether it is assigned.
    #[must_use]
    pub fn has(&self, partition: i32) -> bool {
        self.partitions.contains_key(&partition)
    }

    /// The assigned partitions.
    pub fn partitions(&self) -> impl Iterator<Item = i32> {
        self.partitions.keys().copied()
    }

    /// What each holds.
    #[must_use]
    pub fn seen(&self) -> Vec<Seen> {
        let seen = |(partition, assigned): (&i32, &Assigned)| Seen {
            partition: *partition,
            held: assigned.share.held(),
            released: assigned.share.released(),
            refuses: self.is_refused(*partition),
        };
        self.partitions.iter().map(seen).collect()
    }

    /// Whether no more should be read before the next hand-over.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.buffer.is_full()
    }

    /// Takes one record, if anybody waits for it; `own` copies it.
    pub fn take(&mut self, partition: i32, offset: i64, own: impl FnOnce() -> Record) {
        let Some(assigned) = self.partitions.get_mut(&partition).filter(|assigned| assigned.route.is_some()) else { return };
        let end = assigned.fresh.last().map_or(assigned.handed, |last| last.offset.next());
        if offset < end.0 {
            debug!(partition, offset, "a stray record before the base is dropped");
            return;
        }
        assigned.fresh.push(self.buffer.admit(own(), &assigned.share));
    }

    /// Hands on what was taken since the last time.
    pub fn hand_over(&mut self) {
        for (partition, assigned) in &mut self.partitions {
            let Some(last) = assigned.fresh.last() else { continue };
            let end = last.offset.next();
            let records = Records(Handed { after: assigned.handed, records: std::mem::take(&mut assigned.fresh) });
            assigned.handed = end;
            let Some(route) = &assigned.route else { continue };
            if self.refused.iter().any(|(refused, _)| refused == partition) {
                self.refused.push_back((*partition, records));
                continue;
            }
            match route.try_send(records) {
                Ok(()) => CrashPoint::HandedOn.passed(),
                Err(SendError::Full(records)) => self.refused.push_back((*partition, records)),
                // The actor is gone; the Supervisor replaces it and repositions. Until then the chain is cut.
                Err(SendError::Closed(_)) => assigned.route = None,
            }
        }
    }

    /// Tries again what full mailboxes refused, in the order of each partition.
    pub fn try_again(&mut self) {
        let mut full = BTreeSet::new();
        for (partition, records) in std::mem::take(&mut self.refused) {
            let Some(route) = self.partitions.get(&partition).and_then(|assigned| assigned.route.as_ref()) else { continue };
            if full.contains(&partition) {
                self.refused.push_back((partition, records));
            } else if let Err(SendError::Full(records)) = route.try_send(records) {
                full.insert(partition);
                self.refused.push_back((partition, records));
            }
        }
    }

    fn is_refused(&self, partition: i32) -> bool {
        self.refused.iter().any(|(refused, _)| *refused == partition)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use actix::prelude::*;

    use super::*;
    use crate::record::Offset;

    /// Takes one hand-over at a time, and the next one only when it is asked to.
    struct Slow {
        taken: Arc<Mutex<Vec<i64>>>,
    }

    impl Actor for Slow {
        type Context = Context<Self>;

        fn started(&mut self, ctx: &mut Self::Context) {
            ctx.set_mailbox_capacity(1);
        }
    }

    impl actix::Handler<Records> for Slow {
        type Result = ();

        fn handle(&mut self, Records(handed): Records, _: &mut Self::Context) {
            self.taken.lock().unwrap().extend(handed.records.iter().map(|record| record.offset.0));
        }
    }

    fn record(offset: i64) -> Record {
        let payload = Some(b"x"[..].into());
        Record { partition: 0, offset: Offset(offset), timestamp_ms: None, key: None, headers: Box::default(), payload }
    }

    // CASES C03, C04
    #[test]
    fn what_a_full_mailbox_refuses_is_kept_and_handed_on_in_order() {
        System::new().block_on(async {
            let taken = Arc::<Mutex<Vec<i64>>>::default();
            let actor = Slow { taken: Arc::clone(&taken) }.start();
            let mut on_the_way = HandOver::new(Buffer::new(1 << 20, std::sync::mpsc::channel().0));
            on_the_way.begin(0, NextOffset(0), Some(actor.recipient()));
            // The actor does not run before this thread waits: its mailbox fills up.
            for offset in 0..40 {
                on_the_way.take(0, offset, || record(offset));
                on_the_way.hand_over();
            }
            assert!(on_the_way.seen()[0].refuses);
            while on_the_way.seen()[0].refuses {
                tokio::task::yield_now().await;
                on_the_way.try_again();
            }
            while taken.lock().unwrap().len() < 40 {
                tokio::task::yield_now().await;
            }
            assert_eq!(*taken.lock().unwrap(), (0..40).collect::<Vec<i64>>());
        });
    }

    #[test]
    fn records_before_the_base_and_of_partitions_that_nobody_reads_are_dropped() {
        System::new().block_on(async {
            let taken = Arc::<Mutex<Vec<i64>>>::default();
            let actor = Slow { taken: Arc::clone(&taken) }.start();
            let mut on_the_way = HandOver::new(Buffer::new(1 << 20, std::sync::mpsc::channel().0));
            on_the_way.begin(0, NextOffset(5), Some(actor.recipient()));
            on_the_way.begin(1, NextOffset(0), None);
            for (partition, offset) in [(0, 4), (0, 6), (0, 6), (0, 8), (1, 3), (2, 3)] {
                on_the_way.take(partition, offset, || record(offset));
            }
            on_the_way.hand_over();
            while taken.lock().unwrap().is_empty() {
                tokio::task::yield_now().await;
            }
            assert_eq!(*taken.lock().unwrap(), [6, 8]);
        });
    }
}
