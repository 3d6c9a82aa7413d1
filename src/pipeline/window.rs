//! The records of one partition that are read and not yet settled: a plain state machine without I/O.
//!
//! In: batches of records, each naming the offset handed before it. Out: batches for the DedupActor, and the frontier. If it dies, its
//! records are read again from the frontier.
//!
//! Invariant: no unsettled record lies below the frontier. Offsets may have holes; the frontier is one past the last record before
//! the first unsettled one, so it never depends on a record that does not exist.

use std::collections::VecDeque;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::Sender;

use crate::pipeline::command::Command;
use crate::record::{NextOffset, Offset, Record, RecordDigest};

/// How far a partition is settled: what `consumed_partition` holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// One past the last settled record.
    pub next_offset: NextOffset,
    /// The digest of the record at `next_offset - 1`, where that record was seen.
    pub last_record: Option<RecordDigest>,
}

/// A record that counts against the buffer until its last owner lets go of it.
#[derive(Debug)]
pub struct Buffered {
    record: Record,
    digest: RecordDigest,
    weight: usize,
    buffer: Buffer,
    share: Share,
}

/// What one partition's records hold of the buffer, and have ever let go of, in bytes.
#[derive(Clone, Debug, Default)]
pub struct Share(Arc<ShareState>);

#[derive(Debug, Default)]
struct ShareState {
    held: AtomicUsize,
    released: AtomicUsize,
}

/// The byte budget that all partitions share. Not a hard wall: one poll may overshoot it by what it reads.
#[derive(Clone, Debug)]
pub struct Buffer(Arc<BufferState>);

#[derive(Debug)]
struct BufferState {
    limit: usize,
    used: AtomicUsize,
    poll_thread: Sender<Command>,
}

/// Records of one partition in offset order, and the offset handed before them.
#[derive(Debug)]
pub struct Handed {
    /// The link of the chain: what the receiver must have as its tail.
    pub after: NextOffset,
    /// The records, each at or beyond `after`.
    pub records: Vec<Arc<Buffered>>,
}

/// Why records are not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// Records between the tail and what was handed may be missing: read again from the frontier.
    #[error("the window ends at {tail}, but the next records follow {after}")]
    ChainBroken {
        /// The end of what is here.
        tail: NextOffset,
        /// What was handed follows this.
        after: NextOffset,
    },
    /// The record that was settled last is not there any more: another stands in its place.
    #[error(
        "the record at {0} is not the one that was settled there: the topic was made anew or truncated. Its offsets mean something else now; \
         be sure that it is the right topic, then use a new group"
    )]
    OtherRecord(Offset),
}

/// The record that was settled last, to be compared with the one that stands at its place now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Witness {
    /// Its place.
    pub offset: Offset,
    /// What it was.
    pub digest: RecordDigest,
}

/// The window proper.
#[derive(Debug)]
pub struct Window {
    open: VecDeque<Open>,
    tail: Position,
    /// To be compared with the first record, which then counts for nothing.
    witness: Option<Witness>,
    in_flight: usize,
    bytes: usize,
}

#[derive(Clone, Debug)]
struct Open {
    record: Arc<Buffered>,
    /// The frontier, should this record be the first unsettled one.
    before: Position,
}

/// The first records of the window, lent to a DedupActor. They stay in the window until [`Window::settle`].
#[derive(Clone, Debug)]
pub struct WindowBatch {
    open: Vec<Open>,
    /// The frontier, should all of them be settled.
    all_settled: Position,
}

impl Window {
    /// A window whose first record to settle stands at or beyond `base`.
    #[must_use]
    pub fn positioned(base: NextOffset) -> Self {
        let tail = Position { next_offset: base, last_record: None };
        Self { open: VecDeque::new(), tail, witness: None, in_flight: 0, bytes: 0 }
    }

    /// The same, behind a witness: the first record is compared with it. A witness that is not handed stood in a hole of the log.
    #[must_use]
    pub fn behind(witness: Witness) -> Self {
        let tail = Position { next_offset: NextOffset(witness.offset.0), last_record: None };
        Self { witness: Some(witness), ..Self::positioned(tail.next_offset) }
    }

    /// Takes records at the end.
    ///
    /// # Errors
    /// When they do not follow on what is here, or the witness is another record; nothing is taken then.
    pub fn offer(&mut self, handed: Handed) -> Result<(), Refused> {
        let tail = self.tail.next_offset;
        let mut expected = tail;
        let in_order = handed.records.iter().all(|record| {
            let in_order = record.offset.0 >= expected.0;
            expected = record.offset.next();
            in_order
        });
        if handed.after != tail || !in_order {
            return Err(Refused::ChainBroken { tail, after: handed.after });
        }
        let mut records = handed.records.into_iter().peekable();
        if let Some(witness) = self.witness {
            let Some(first) = records.peek() else { return Ok(()) };
            if first.offset == witness.offset {
                if first.digest != witness.digest {
                    return Err(Refused::OtherRecord(witness.offset));
                }
                records.next();
            }
            self.witness = None;
            self.tail = Position { next_offset: witness.offset.next(), last_record: Some(witness.digest) };
        }
        for record in records {
            let before = self.tail;
            self.tail = Position { next_offset: record.offset.next(), last_record: Some(record.digest) };
            self.bytes += record.weight;
            self.open.push_back(Open { record, before });
        }
        Ok(())
    }

    /// Lends the first `max` unsettled records; `None` when there are none.
    ///
    /// # Panics
    /// When a batch is out already: one batch per partition is in flight.
    pub fn take(&mut self, max: usize) -> Option<WindowBatch> {
        assert_eq!(self.in_flight, 0, "one batch per partition is in flight");
        let count = max.min(self.open.len());
        if count == 0 {
            return None;
        }
        self.in_flight = count;
        let all_settled = self.open.get(count).map_or(self.tail, |next| next.before);
        Some(WindowBatch { open: self.open.iter().take(count).cloned().collect(), all_settled })
    }

    /// The batch has committed: its records are settled, but for those given back, which stay.
    ///
    /// # Panics
    /// When no batch is out.
    pub fn settle(&mut self, given_back: &[Offset]) {
        assert_ne!(self.in_flight, 0, "only a batch that was taken can settle");
        let batch: Vec<Open> = self.open.drain(..self.in_flight).collect();
        self.in_flight = 0;
        for open in batch.into_iter().rev() {
            if given_back.contains(&open.record.offset) {
                self.open.push_front(open);
            } else {
                self.bytes -= open.record.weight;
            }
        }
    }

    /// The batch has rolled back: all of it is still to do.
    pub const fn abandon(&mut self) {
        self.in_flight = 0;
    }

    /// How far everything is settled.
    #[must_use]
    pub fn frontier(&self) -> Position {
        let settled = self.open.front().map_or(self.tail, |first| first.before);
        match self.witness {
            Some(witness) => Position { next_offset: witness.offset.next(), last_record: Some(witness.digest) },
            None => settled,
        }
    }

    /// Unsettled records.
    #[must_use]
    pub fn len(&self) -> usize {
        self.open.len()
    }

    /// `true` when everything handed is settled.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// When the first of them was made, in milliseconds since 1970.
    #[must_use]
    pub fn first_made(&self) -> Option<i64> {
        self.open.front()?.record.timestamp_ms
    }

    /// Their weight, in bytes.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.bytes
    }
}

impl WindowBatch {
    /// The records in offset order.
    pub fn records(&self) -> impl ExactSizeIterator<Item = &Buffered> {
        self.open.iter().map(|open| &*open.record)
    }

    /// When the first of its records was made, in milliseconds since 1970: nothing that comes later is expected to be older. One producer
    /// whose clock is ahead does not move it.
    #[must_use]
    pub fn made_first(&self) -> Option<i64> {
        self.records().filter_map(|record| record.timestamp_ms).min()
    }

    /// The frontier that this batch's transaction writes, given the records it gives back.
    #[must_use]
    pub fn frontier(&self, given_back: &[Offset]) -> Position {
        let first_open = self.open.iter().find(|open| given_back.contains(&open.record.offset));
        first_open.map_or(self.all_settled, |open| open.before)
    }
}

impl Buffer {
    /// A budget of `limit` bytes, whose refilling wakes the poll thread.
    #[must_use]
    pub fn new(limit: usize, poll_thread: Sender<Command>) -> Self {
        Self(Arc::new(BufferState { limit, used: AtomicUsize::new(0), poll_thread }))
    }

    /// Takes a record in, whether or not there is room: the caller has read it already.
    #[must_use]
    pub fn admit(&self, record: Record, share: &Share) -> Arc<Buffered> {
        let weight = record.weight();
        self.0.used.fetch_add(weight, Ordering::AcqRel);
        share.0.held.fetch_add(weight, Ordering::AcqRel);
        Arc::new(Buffered { digest: record.digest(), record, weight, buffer: self.clone(), share: share.clone() })
    }

    /// Its size in bytes.
    #[must_use]
    pub fn limit(&self) -> usize {
        self.0.limit
    }

    /// Whether no more should be read.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.0.used.load(Ordering::Acquire) >= self.0.limit
    }

    fn release(&self, weight: usize) {
        let before = self.0.used.fetch_sub(weight, Ordering::AcqRel);
        let half = self.0.limit / 2;
        if before >= half && before - weight < half {
            // A poll thread that has ended needs no waking.
            let _ = self.0.poll_thread.send(Command::Wake);
        }
    }
}

impl Share {
    /// Bytes that are held now.
    #[must_use]
    pub fn held(&self) -> usize {
        self.0.held.load(Ordering::Acquire)
    }

    /// Bytes that were let go of since the partition was assigned.
    #[must_use]
    pub fn released(&self) -> usize {
        self.0.released.load(Ordering::Acquire)
    }
}

impl Buffered {
    /// See [`Record::digest`]; computed once.
    #[must_use]
    pub const fn digest(&self) -> RecordDigest {
        self.digest
    }
}

impl Deref for Buffered {
    type Target = Record;

    fn deref(&self) -> &Record {
        &self.record
    }
}

impl Drop for Buffered {
    fn drop(&mut self) {
        self.share.0.held.fetch_sub(self.weight, Ordering::AcqRel);
        self.share.0.released.fetch_add(self.weight, Ordering::AcqRel);
        self.buffer.release(self.weight);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn buffer() -> Buffer {
        Buffer::new(1 << 20, std::sync::mpsc::channel().0)
    }

    fn record(buffer: &Buffer, offset: i64) -> Arc<Buffered> {
        let record = Record {
            partition: 0,
            offset: Offset(offset),
            timestamp_ms: None,
            key: None,
            headers: Box::default(),
            payload: Some(offset.to_be_bytes()[..].into()),
        };
        buffer.admit(record, &Share::default())
    }

    fn handed(buffer: &Buffer, after: i64, offsets: &[i64]) -> Handed {
        Handed { after: NextOffset(after), records: offsets.iter().map(|offset| record(buffer, *offset)).collect() }
    }

    // CASES B14, I10: offsets with holes; the frontier never passes open work and never waits for a record that does not exist.
    #[test]
    fn holes_do_not_stop_the_frontier_and_open_work_does() {
        let buffer = buffer();
        let mut window = Window::positioned(NextOffset(0));
        window.offer(handed(&buffer, 0, &[0, 2, 4, 9])).unwrap();
        assert_eq!(window.frontier().next_offset, NextOffset(0));
        let batch = window.take(10).unwrap();
        assert_eq!(batch.frontier(&[Offset(2)]).next_offset, NextOffset(1));
        assert_eq!(batch.frontier(&[Offset(9)]).next_offset, NextOffset(5));
        assert_eq!(batch.frontier(&[]).next_offset, NextOffset(10));
        window.settle(&[Offset(4)]);
        assert_eq!(window.frontier().next_offset, NextOffset(3));
        assert_eq!(window.take(10).unwrap().frontier(&[]).next_offset, NextOffset(10), "4 was the last open one");
    }

    #[test]
    fn a_break_in_the_chain_is_refused_and_nothing_is_taken() {
        let buffer = buffer();
        let mut window = Window::positioned(NextOffset(5));
        assert!(window.offer(handed(&buffer, 0, &[5])).is_err(), "handed after another offset");
        assert!(window.offer(handed(&buffer, 5, &[4])).is_err(), "a stray record before the base");
        assert!(window.offer(handed(&buffer, 5, &[6, 6])).is_err(), "an offset twice");
        assert!(window.is_empty());
        window.offer(handed(&buffer, 5, &[7])).unwrap();
        assert!(window.offer(handed(&buffer, 5, &[7])).is_err(), "the same batch twice");
        assert_eq!(window.len(), 1);
    }

    fn witness(of: &Buffered) -> Witness {
        Witness { offset: of.offset, digest: of.digest() }
    }

    // CASES B11
    #[test]
    fn a_witness_is_compared_and_is_no_record_of_the_window() {
        let buffer = buffer();
        let mut window = Window::behind(witness(&record(&buffer, 4)));
        assert_eq!(window.frontier().next_offset, NextOffset(5), "what was settled is settled");
        window.offer(handed(&buffer, 4, &[4, 5, 6])).unwrap();
        assert_eq!((window.len(), window.frontier().next_offset), (2, NextOffset(5)));
        let batch = window.take(10).unwrap();
        let stored = batch.frontier(&[Offset(5)]);
        assert_eq!(stored, Position { next_offset: NextOffset(5), last_record: Some(record(&buffer, 4).digest()) });
        window.settle(&[]);
        window.offer(handed(&buffer, 7, &[7])).unwrap();
    }

    // CASES B11
    #[test]
    fn another_record_in_the_place_of_the_witness_is_refused() {
        let buffer = buffer();
        let other = Witness { digest: RecordDigest(1), ..witness(&record(&buffer, 4)) };
        let mut window = Window::behind(other);
        assert_eq!(window.offer(handed(&buffer, 4, &[4, 5])), Err(Refused::OtherRecord(Offset(4))));
        assert!(window.is_empty());
    }

    // CASES B14
    #[test]
    fn a_witness_in_a_hole_of_the_log_is_waited_for_by_nobody() {
        let buffer = buffer();
        let mut window = Window::behind(witness(&record(&buffer, 4)));
        window.offer(handed(&buffer, 4, &[6, 7])).unwrap();
        assert_eq!((window.len(), window.frontier().next_offset), (2, NextOffset(5)));
        assert_eq!(window.take(10).unwrap().frontier(&[]).next_offset, NextOffset(8));
    }

    #[test]
    fn a_rolled_back_batch_comes_again_whole() {
        let buffer = buffer();
        let mut window = Window::positioned(NextOffset(0));
        window.offer(handed(&buffer, 0, &[0, 1, 2])).unwrap();
        let first: Vec<_> = window.take(2).unwrap().records().map(|r| r.offset).collect();
        window.abandon();
        let second: Vec<_> = window.take(2).unwrap().records().map(|r| r.offset).collect();
        assert_eq!(first, second);
    }

    #[test]
    fn the_buffer_is_free_again_when_the_last_owner_lets_go() {
        let (poll_thread, woken) = std::sync::mpsc::channel();
        let buffer = Buffer::new(256, poll_thread);
        let mut window = Window::positioned(NextOffset(0));
        window.offer(handed(&buffer, 0, &[0, 1])).unwrap();
        assert!(buffer.is_full());
        let batch = window.take(2).unwrap();
        window.settle(&[]);
        assert!(buffer.is_full(), "the batch still holds them");
        drop(batch);
        assert!(!buffer.is_full());
        assert!(matches!(woken.try_recv(), Ok(Command::Wake)), "the poll thread is told");
    }

    proptest! {
        // Any interleaving of hand-overs (with holes), batches, roll-backs and given-back records: the frontier is one past the last
        // record before the first unsettled one, it never falls, and every record is settled once.
        #[test]
        fn the_frontier_is_what_its_definition_says(steps in prop::collection::vec((0u8..4, 1usize..6, any::<u64>()), 1..120)) {
            let buffer = buffer();
            let mut window = Window::positioned(NextOffset(0));
            let (mut next, mut all, mut open) = (0i64, Vec::new(), BTreeSet::new());
            let mut taken: Option<WindowBatch> = None;
            let mut last = window.frontier().next_offset;
            for (kind, size, seed) in steps {
                match (kind, taken.take()) {
                    (0, busy) => {
                        let after = next;
                        let offsets: Vec<i64> = (0..size).map(|i| {
                            next += 1 + i64::from((seed >> i) & 1 == 1);
                            next - 1
                        }).collect();
                        window.offer(handed(&buffer, after, &offsets)).unwrap();
                        open.extend(offsets.iter().copied());
                        all.extend(offsets);
                        taken = busy;
                    }
                    (1, None) => taken = window.take(size).inspect(|batch| {
                        assert_eq!(batch.records().next().map(|r| r.offset.0), open.first().copied());
                    }),
                    (2, Some(_)) => window.abandon(),
                    (3, Some(batch)) => {
                        let offsets: Vec<Offset> = batch.records().map(|r| r.offset).collect();
                        let back: Vec<Offset> = offsets.iter().enumerate().filter(|(i, _)| (seed >> i) & 1 == 1).map(|(_, o)| *o).collect();
                        let written = batch.frontier(&back);
                        window.settle(&back);
                        assert_eq!(written, window.frontier(), "what is written before COMMIT is what the window holds after it");
                        for offset in offsets.iter().filter(|offset| !back.contains(offset)) {
                            assert!(open.remove(&offset.0), "settled twice");
                        }
                    }
                    (_, busy) => taken = busy,
                }
                let defined = match open.first() {
                    Some(first) => all.iter().rev().find(|o| *o < first).map_or(0, |o| o + 1),
                    None => all.last().map_or(0, |o| o + 1),
                };
                assert_eq!(window.frontier().next_offset, NextOffset(defined));
                assert!(window.frontier().next_offset >= last);
                assert_eq!(window.len(), open.len());
                last = window.frontier().next_offset;
            }
        }
    }
}
