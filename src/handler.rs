//! What a business must say so that the engine can apply its events once.
//!
//! In: decoded, claimed events of one batch, inside the engine's transaction. Out: one [`Outcome`] each. The handler writes its own
//! rows; claims, held rows and the frontier are the engine's. If it dies here, the transaction rolls back and nothing has happened,
//! but for calls whose answers the handler has kept in [`Answers`].
//!
//! Invariant: an effect needs a [`Claimed`] event, and only the engine can make one (R-KFK-IDEM-X1).

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use uuid::Uuid;
use xxhash_rust::xxh3::xxh3_64;

use crate::event::Money;
use crate::record::{Epoch, KeyDigest, Offset, Record, SourceId};
use crate::store::{DbError, Form, Session};
use crate::trace_context::TraceContext;

/// A digest of an event's decoded fields in canonical form; the low byte is the version of that form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EventDigest(pub i64);

impl EventDigest {
    /// Builds a digest of canonical form `version` from a 64-bit hash, of which the upper 56 bits are kept.
    #[must_use]
    pub const fn new(version: u8, hash: u64) -> Self {
        Self((hash & !0xff | version as u64).cast_signed())
    }

    /// Builds it from a canonical form: every field at a fixed place or with its length, so that no two events share one. Digests are
    /// stored: a changed form needs a new `version`.
    #[must_use]
    pub fn of(version: u8, canonical_form: &[u8]) -> Self {
        Self::new(version, xxh3_64(canonical_form))
    }

    /// `true` when both were made by the same version and differ: the same id with another content.
    #[must_use]
    pub const fn contradicts(self, other: Self) -> bool {
        self.0 as u8 == other.0 as u8 && self.0 != other.0
    }
}

/// What the engine must know of a decoded event.
pub trait Event: Send + Sync + 'static {
    /// The UUID v7 that is the one and only dedup key (R-KFK-IDEM-1, R-KFK-IDEM-X2); an event with any other id is held as invalid.
    fn id(&self) -> Uuid;
    /// The digest that tells a repeated event from a conflicting one.
    fn digest(&self) -> EventDigest;
    /// The money at stake, where there is any: what a duplicate would have cost is told with it.
    fn worth(&self) -> Option<Money> {
        None
    }
}

/// Why a record is held and not applied: a stable word for metrics and queries, and a sentence for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejection {
    /// The stable word.
    pub reason: HeldReason,
    /// All faults found, in words. It may quote the input, so it is stored, never logged.
    pub error: String,
    /// The event's id where it could be read, so that an operator can find it.
    pub event_id: Option<Uuid>,
}

/// The closed list of reasons in `held_event.reason`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HeldReason {
    /// The bytes are no event.
    Undecodable,
    /// An event, but one that breaks a rule of its schema.
    Invalid,
    /// The downstream refused it for good.
    Rejected,
    /// The same id was seen with another content.
    Conflict,
    /// The id is older than what is remembered.
    BeyondHorizon,
    /// The id's time lies too far in the future.
    Future,
    /// A retryable failure that has not happened downstream.
    Retryable,
    /// Nobody knows whether the effect happened.
    Unknown,
    /// The database does not take its rows.
    Refused,
    /// The effect happened downstream, and its row could not be written or contradicts one that is there.
    ChargedNotRecorded,
    /// Records that were never settled are gone from the log; the row stands for a range of offsets.
    Gap,
    /// An operator wants these records passed over; the row stands for a range of offsets.
    Skipped,
    /// An earlier event of its key is held.
    Behind,
    /// An operator wants it held.
    Operator,
}

impl HeldReason {
    /// Every reason, in the order above.
    pub const ALL: [Self; 14] = [
        Self::Undecodable,
        Self::Invalid,
        Self::Rejected,
        Self::Conflict,
        Self::BeyondHorizon,
        Self::Future,
        Self::Retryable,
        Self::Unknown,
        Self::Refused,
        Self::ChargedNotRecorded,
        Self::Gap,
        Self::Skipped,
        Self::Behind,
        Self::Operator,
    ];

    /// The word stored in the table and shown in metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Undecodable => "undecodable",
            Self::Invalid => "invalid",
            Self::Rejected => "rejected",
            Self::Conflict => "conflict",
            Self::BeyondHorizon => "beyond_horizon",
            Self::Future => "future",
            Self::Retryable => "retryable",
            Self::Unknown => "unknown",
            Self::Refused => "refused",
            Self::ChargedNotRecorded => "charged_not_recorded",
            Self::Gap => "gap",
            Self::Skipped => "skipped",
            Self::Behind => "behind",
            Self::Operator => "operator",
        }
    }

    /// The reason of a stored word.
    #[must_use]
    pub fn from_word(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|reason| reason.as_str() == word)
    }

    /// Whether later events of the key wait behind one that is parked for this reason: its effect may still come. What will never have
    /// an effect, or stands outside of any order, holds nobody up.
    #[must_use]
    pub const fn holds_up(self) -> bool {
        match self {
            Self::Retryable | Self::Unknown | Self::Refused | Self::ChargedNotRecorded | Self::Behind | Self::Operator => true,
            Self::Undecodable
            | Self::Invalid
            | Self::Rejected
            | Self::Conflict
            | Self::BeyondHorizon
            | Self::Future
            | Self::Gap
            | Self::Skipped => false,
        }
    }
}

impl fmt::Display for HeldReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A decoded event whose claim this transaction holds.
///
/// Only the engine makes one, so no effect can be written without the claim:
///
/// ```compile_fail,E0451
/// # use onceward::handler::Claimed;
/// let forged = Claimed { event: (), partition: 0, offset: onceward::record::Offset(0), sequence: todo!(), in_doubt: false, trace: None };
/// ```
///
/// Reading one is open to every handler:
///
/// ```
/// # use onceward::handler::Claimed;
/// fn read<E>(claimed: &Claimed<E>) -> &E {
///     claimed.event()
/// }
/// ```
#[derive(Debug)]
pub struct Claimed<E> {
    event: E,
    partition: i32,
    offset: Offset,
    sequence: Sequence,
    in_doubt: bool,
    trace: Option<Arc<TraceContext>>,
}

/// Which events must keep their order: those of one record key in one partition share it. A record without a key stands alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sequence(i64);

impl Sequence {
    pub(crate) fn of(record: &Record) -> Self {
        // Offsets are small and digests are not: a record without a key shares its number with nobody. Nor do records of two partitions.
        let number = record.key_digest().map_or(record.offset.0, |KeyDigest(digest)| digest);
        Self(number ^ i64::from(record.partition) << 44)
    }

    /// The same for all events of the sequence.
    #[must_use]
    pub const fn number(self) -> i64 {
        self.0
    }
}

impl<E> Claimed<E> {
    /// The engine's only door: called with what the claim statement returned, or with a held row it has locked.
    pub(crate) fn new(event: E, record: &Record) -> Self {
        let Record { partition, offset, .. } = *record;
        Self { event, partition, offset, sequence: Sequence::of(record), in_doubt: false, trace: TraceContext::of(record) }
    }

    /// The same, in doubt or not.
    pub(crate) fn in_doubt_if(self, in_doubt: bool) -> Self {
        Self { in_doubt, ..self }
    }

    /// What it does is part of another span from now on.
    pub(crate) fn go_on_under(&mut self, trace: Option<Arc<TraceContext>>) {
        self.trace = trace;
    }

    /// The event.
    pub const fn event(&self) -> &E {
        &self.event
    }

    /// The database went back in time, and its effect may have happened before: what a downstream was asked is not remembered.
    pub const fn is_in_doubt(&self) -> bool {
        self.in_doubt
    }

    /// The partition of its record.
    pub const fn partition(&self) -> i32 {
        self.partition
    }

    /// Where its record stands in that partition; for order and explanation, never a key.
    pub const fn offset(&self) -> Offset {
        self.offset
    }

    /// Which events it keeps its order with.
    pub const fn sequence(&self) -> Sequence {
        self.sequence
    }

    /// The trace that it belongs to: what a downstream is told, so that its part of the trace is found.
    pub const fn trace_context(&self) -> Option<&Arc<TraceContext>> {
        self.trace.as_ref()
    }
}

/// What became of one claimed event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The effect happened and its row is written.
    Applied,
    /// A business "no": its row is written, and it is settled.
    Declined,
    /// Nobody was called: the claim is given back and the event comes again, not before the wait is over.
    NotStarted {
        /// How long the downstream asked us to wait.
        wait: Duration,
    },
    /// It did not happen and may be tried again.
    Retry {
        /// For the held row.
        error: String,
        /// The earliest next attempt, where the downstream named one.
        wait: Option<Duration>,
    },
    /// Nobody knows whether it happened; never "not charged".
    Unknown {
        /// For the held row.
        error: String,
        /// The earliest next attempt, where the downstream named one.
        wait: Option<Duration>,
        /// Asking again could repeat the effect (the downstream has forgotten the key): wait for an operator.
        parked: bool,
    },
    /// The downstream refused it for good, and it has not happened.
    Rejected {
        /// For the held row.
        error: String,
    },
    /// The same id is known with another content.
    Conflict {
        /// For the held row.
        error: String,
    },
    /// The database does not take its rows; nothing was asked of a downstream that would have to be remembered.
    Refused {
        /// For the held row.
        error: String,
    },
    /// It happened downstream, and its row could not be written or contradicts one that is there. A replay writes the row and asks
    /// nobody.
    NotRecorded {
        /// For the held row.
        error: String,
        /// The downstream's name for what happened.
        charge_id: String,
    },
    /// Not begun, because an earlier event of its sequence [holds it up](Outcome::holds_up).
    Behind,
}

impl Outcome {
    /// Whether the later events of its sequence must not be begun: the effect of this one may still come.
    #[must_use]
    pub const fn holds_up(&self) -> bool {
        match self {
            Self::Retry { .. } | Self::Unknown { .. } | Self::Refused { .. } | Self::NotRecorded { .. } | Self::Behind => true,
            Self::Applied | Self::Declined | Self::NotStarted { .. } | Self::Rejected { .. } | Self::Conflict { .. } => false,
        }
    }
}

/// What an operator has found out about an event whose outcome was unknown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// The effect has happened, and the downstream calls it by this name.
    Happened(String),
    /// It has not happened.
    NotHappened,
}

/// What a handler's own rows tell of an event whose id is no longer remembered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trace {
    /// Nothing.
    None,
    /// It was applied.
    Applied,
    /// Another content was applied under its id.
    OtherContent,
}

/// Answers of the downstream, by event id, kept until the event is settled: they survive a rolled-back transaction and the
/// actor that asked, so that a batch which runs again does not call again.
#[derive(Debug)]
pub struct Answers<A>(Arc<Mutex<HashMap<Uuid, A>>>);

impl<A> Clone for Answers<A> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<A> Default for Answers<A> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<A: Clone> Answers<A> {
    /// Keeps an answer; called as soon as it is known.
    pub fn keep(&self, event_id: Uuid, answer: A) {
        self.lock().insert(event_id, answer);
    }

    /// The kept answer, if this event has been asked for already.
    #[must_use]
    pub fn get(&self, event_id: Uuid) -> Option<A> {
        self.lock().get(&event_id).cloned()
    }

    /// Every kept answer: also of events that are not in this batch.
    #[must_use]
    pub fn all(&self) -> Vec<(Uuid, A)> {
        self.lock().iter().map(|(id, answer)| (*id, answer.clone())).collect()
    }

    pub(crate) fn forget(&self, event_ids: impl IntoIterator<Item = Uuid>) {
        let mut answers = self.lock();
        // Most batches have none, and a hash costs more than this look.
        if answers.is_empty() {
            return;
        }
        for id in event_ids {
            answers.remove(&id);
        }
    }

    /// A panic while the map is locked cannot leave it half changed: each change is one call.
    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<Uuid, A>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A flag that a revoke, a stop or a fence raises and that a running batch reads before each call.
#[derive(Clone, Debug, Default)]
pub struct StopFlag(Arc<AtomicBool>);

impl StopFlag {
    /// Raises it; it never falls again.
    pub fn raise(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Whether no further call may start.
    #[must_use]
    pub fn is_raised(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// Why the downstream is not to be called, and no event is to be claimed for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pause {
    /// For people.
    pub reason: String,
    /// Since when.
    pub since: Instant,
    /// When to ask again; `None`: one batch may try.
    pub wait: Option<Duration>,
}

/// What a handler may know of the batch it is in.
#[derive(Debug)]
pub struct BatchContext<A> {
    /// The partition's row; where [partitions share](Handler::shares_transactions) the transaction, that of the first.
    pub source: SourceId,
    /// The epoch under which that row was fenced.
    pub epoch: Epoch,
    /// The consumer group.
    pub group: Arc<str>,
    /// How rows may be inserted: an error by which the optimistic form shows a taken key ([`DbError::is_taken`]) is nobody's fault. The
    /// transaction is rolled back, and the batch comes again with the other form.
    pub form: Form,
    /// No call may start that could end after this.
    pub deadline: Instant,
    /// The same on the wall clock, which also counts the time of a machine that was suspended.
    pub deadline_wall: SystemTime,
    /// Raised: start no call. Of that partition.
    pub stop: StopFlag,
    /// Answers of earlier tries, and where new ones go. Of that partition.
    pub answers: Answers<A>,
}

/// A business that applies events once.
///
/// `apply` is called at most once per event and transaction, with each partition's events in offset order, and returns one outcome for
/// each, in the order of the events. Once an outcome of a [`Sequence`] [holds up](Outcome::holds_up) the later events, it does not begin them and returns
/// [`Outcome::Behind`]. It writes its rows through `tx` and must not end the transaction. Whatever it learns from a downstream that cannot
/// be asked twice goes into `ctx.answers` at once.
pub trait Handler: Send + Sync + 'static {
    /// The decoded event.
    type Event: Event;
    /// What the downstream said about one event.
    type Answer: Clone + fmt::Debug + Send + Sync + 'static;

    /// Decodes and validates one record, reporting all its faults together.
    ///
    /// # Errors
    /// The record is held with the rejection's reason; it never stops the partition.
    fn decode(&self, record: &Record) -> Result<Self::Event, Rejection>;

    /// Applies the events and writes the handler's rows.
    ///
    /// # Errors
    /// Rolls the whole batch back; kept answers survive.
    fn apply(
        &self,
        tx: &mut Session,
        ctx: &BatchContext<Self::Answer>,
        events: &[Claimed<Self::Event>],
    ) -> impl Future<Output = Result<Vec<Outcome>, DbError>>;

    /// Whether partitions whose records wait at the same time may share a transaction, and so a call of [`Handler::apply`]: it saves each
    /// of them a COMMIT. For a handler that does nothing but write rows. One that asks a downstream says no, as it does by default: partitions would
    /// wait for each other's answers, and what the context tells of answers and the stop flag is the first partition's.
    fn shares_transactions(&self) -> bool {
        false
    }

    /// Whether these events were applied, by the handler's own rows: one answer for each, in their order. Asked only of events whose ids
    /// lie below the retention floor, so that their claims may be forgotten. A handler whose rows do not tell has nothing to say: such an
    /// event is then held for a person.
    ///
    /// # Errors
    /// Rolls the whole batch back.
    fn traces(&self, _tx: &mut Session, events: &[&Self::Event]) -> impl Future<Output = Result<Vec<Trace>, DbError>> {
        std::future::ready(Ok(vec![Trace::None; events.len()]))
    }

    /// Asked before each batch: while the downstream is not to be called, partitions pause.
    fn pause(&self) -> Option<Pause> {
        None
    }

    /// The database went back in time, to a state in which events of this partition were held that may have been applied since. Called
    /// once, in the transaction that notes it, before any event is applied.
    ///
    /// # Errors
    /// It is tried again.
    fn doubt_held(&self, _tx: &mut Session, _source: SourceId, _group: &str) -> impl Future<Output = Result<(), DbError>> {
        std::future::ready(Ok(()))
    }

    /// The event stood alone in its transaction, and the database refused a row that [`Handler::apply`] wrote for it: it is held, and this
    /// says how. Whatever was learned of it downstream must be kept here, in rows that the database takes.
    ///
    /// # Errors
    /// Stops the partition: there is no smaller part to try.
    fn refused(
        &self,
        _tx: &mut Session,
        _ctx: &BatchContext<Self::Answer>,
        _event: &Claimed<Self::Event>,
        error: &str,
    ) -> impl Future<Output = Result<Outcome, DbError>> {
        std::future::ready(Ok(Outcome::Refused { error: error.to_owned() }))
    }

    /// Notes what an operator has found out about an event whose outcome was unknown; it is applied again afterwards. A handler that
    /// remembers nothing of its own about such events has nothing to do.
    ///
    /// # Errors
    /// Rolls the whole batch back.
    fn resolve(&self, _tx: &mut Session, _event: &Self::Event, _found: &Found) -> impl Future<Output = Result<(), DbError>> {
        std::future::ready(Ok(()))
    }

    /// Whether the effect of an event that has not been applied may have happened all the same: then nobody may give it up. A handler
    /// all of whose effects are rows of this transaction has nothing to ask.
    ///
    /// # Errors
    /// Rolls the whole batch back.
    fn may_have_happened(&self, _tx: &mut Session, _event: &Self::Event) -> impl Future<Output = Result<bool, DbError>> {
        std::future::ready(Ok(false))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_key_in_two_partitions_is_two_sequences() {
        let sequence = |partition, offset, key: Option<&[u8]>| {
            let (offset, key) = (Offset(offset), key.map(Into::into));
            Sequence::of(&Record { partition, offset, timestamp_ms: None, key, headers: Box::default(), payload: None })
        };
        let keyed = |partition, offset| sequence(partition, offset, Some(b"order-7"));
        assert_eq!(keyed(1, 5), keyed(1, 6));
        assert_ne!(keyed(1, 5), keyed(2, 5));
        assert_ne!(sequence(1, 5, None), sequence(1, 6, None));
        assert_ne!(sequence(1, 5, None), sequence(2, 5, None));
    }
}
