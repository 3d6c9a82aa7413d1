//! Held events: recorded with a reason, not applied.
//!
//! In: records and why they are held, and what became of them. Out: their counts. It owns the rows of `held_event`. Which of them can
//! run is asked in `held_turns`, what operators ask for in `held_requests`, what is told to Kafka in `dead_letters`.
//!
//! Invariant: the record's bytes come back exactly as they went in, and no text of an error can be refused by the database.

use std::time::Duration;

use diesel::sql_types::{Array, BigInt, Binary, Bool, Integer, Nullable, Text, Uuid as SqlUuid};
use uuid::Uuid;

use super::packed_headers::{pack, unpack};
use super::statement::statement;
use super::{DbError, Session, milliseconds, storable};
use crate::handler::HeldReason;
use crate::record::{Offset, Record, RecordDigest, SourceId};

/// Where a held event stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HeldState {
    /// Runs again when it is due.
    Retrying,
    /// Waits behind another event of its key.
    Waiting,
    /// Waits for an operator.
    Parked,
    /// An operator's request was accepted; due now.
    Queued,
    /// Done.
    Applied,
    /// Given up by an operator.
    Discarded,
}

/// A record to hold.
#[derive(Clone, Debug)]
pub struct NewHeld<'a> {
    /// The record, kept byte by byte.
    pub record: &'a Record,
    /// Its digest: tells it from another record at the same offset.
    pub digest: RecordDigest,
    /// The event's id, where it could be read.
    pub event_id: Option<Uuid>,
    /// Why.
    pub reason: HeldReason,
    /// Why, in words; NUL is dropped and the rest cut to 2,000 characters.
    pub error: &'a str,
    /// Where it stands.
    pub state: HeldState,
    /// Its claim is in `processed_event`.
    pub owns_claim: bool,
    /// The provider's name for the charge, if it said one.
    pub provider_charge_id: Option<&'a str>,
    /// How often it was tried.
    pub attempts: i32,
    /// When it is due, from now; a retrying event without one is due at once.
    pub next_attempt_in: Option<Duration>,
}

/// What became of a held event that was due.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HeldUpdate {
    /// Applied; one attempt more.
    Applied {
        /// What a reader should know, such as that its claim was found taken.
        note: Option<&'static str>,
    },
    /// To be tried again; one attempt more.
    Retrying {
        /// Why, in words.
        error: String,
        /// Why.
        reason: HeldReason,
        /// When it is due, from now.
        next_attempt_in: Duration,
    },
    /// For an operator; one attempt more.
    Parked {
        /// Why.
        reason: HeldReason,
        /// Why, in words.
        error: String,
        /// The provider's name for the charge, if it was learned now.
        charge_id: Option<String>,
    },
    /// It was not started: only the due time moves.
    Later {
        /// When it is due, from now.
        wait: Duration,
    },
}

impl HeldState {
    /// Every state, in the order above.
    pub const ALL: [Self; 6] = [Self::Retrying, Self::Waiting, Self::Parked, Self::Queued, Self::Applied, Self::Discarded];

    /// The word stored in the table and shown in metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Retrying => "retrying",
            Self::Waiting => "waiting",
            Self::Parked => "parked",
            Self::Queued => "queued",
            Self::Applied => "applied",
            Self::Discarded => "discarded",
        }
    }

    /// Settled, or not yet.
    #[must_use]
    pub const fn is_open(self) -> bool {
        match self {
            Self::Retrying | Self::Waiting | Self::Parked | Self::Queued => true,
            Self::Applied | Self::Discarded => false,
        }
    }

    /// The state of a stored word.
    #[must_use]
    pub fn from_word(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.as_str() == word)
    }
}

/// Writes the rows, in their order. A record that is held already stays as it is, unless it was held without a claim and has one now:
/// then it has been tried, and its row tells what became of that.
///
/// # Errors
/// The statement failed.
pub async fn hold(s: &mut Session, source: SourceId, rows: &[NewHeld<'_>]) -> Result<(), DbError> {
    if rows.is_empty() {
        return Ok(());
    }
    let due_in = |row: &NewHeld<'_>| row.next_attempt_in.or((row.state == HeldState::Retrying).then_some(Duration::ZERO));
    let hold = Hold {
        source: source.0,
        offsets: rows.iter().map(|row| row.record.offset.0).collect(),
        digests: rows.iter().map(|row| row.digest.0).collect(),
        timestamps: rows.iter().map(|row| row.record.timestamp_ms).collect(),
        event_ids: rows.iter().map(|row| row.event_id).collect(),
        keys: rows.iter().map(|row| row.record.key.as_deref()).collect(),
        key_digests: rows.iter().map(|row| row.record.key_digest().map(|digest| digest.0)).collect(),
        headers: rows.iter().map(|row| pack(&row.record.headers)).collect(),
        payloads: rows.iter().map(|row| row.record.payload.as_deref()).collect(),
        reasons: rows.iter().map(|row| row.reason.as_str()).collect(),
        errors: rows.iter().map(|row| storable(row.error)).collect(),
        states: rows.iter().map(|row| row.state.as_str()).collect(),
        own_claims: rows.iter().map(|row| row.owns_claim).collect(),
        charge_ids: rows.iter().map(|row| row.provider_charge_id.map(storable)).collect(),
        attempts: rows.iter().map(|row| row.attempts).collect(),
        due_in_ms: rows.iter().map(|row| due_in(row).map(milliseconds)).collect(),
    };
    s.change("hold", hold).await?;
    Ok(())
}

/// Notes that these locked events have their claim now.
///
/// # Errors
/// The statement failed.
pub async fn owns_claim(s: &mut Session, ids: &[i64]) -> Result<(), DbError> {
    if !ids.is_empty() {
        s.change("owns_claim", OwnsClaim { ids }).await?;
    }
    Ok(())
}

/// Writes what became of held events that are locked.
///
/// # Errors
/// The statement failed.
///
/// # Panics
/// When a row is gone.
pub async fn update(s: &mut Session, updates: &[(i64, HeldUpdate)]) -> Result<(), DbError> {
    if updates.is_empty() {
        return Ok(());
    }
    let changes: Vec<Change<'_>> = updates.iter().map(|(_, update)| change(update)).collect();
    let update = Update {
        ids: updates.iter().map(|(id, _)| *id).collect(),
        states: changes.iter().map(|change| change.state.as_str()).collect(),
        reasons: changes.iter().map(|change| change.reason.map(HeldReason::as_str)).collect(),
        errors: changes.iter().map(|change| change.error.map(storable)).collect(),
        notes: changes.iter().map(|change| change.note).collect(),
        attempts: changes.iter().map(|change| change.attempts).collect(),
        charge_ids: changes.iter().map(|change| change.charge_id.map(storable)).collect(),
        due_in_ms: changes.iter().map(|change| change.due_in.map(milliseconds)).collect(),
    };
    let changed = s.change("update_held", update).await?;
    assert_eq!(changed, updates.len(), "a held event that was locked must be there");
    Ok(())
}

/// How many events of the group and topic are held and open, by reason and state. Settled ones are kept for people, and grow in number.
///
/// # Errors
/// The statement failed, or a row has a reason or state that this program does not know.
pub async fn counts(s: &mut Session, group: &str, topic: &str) -> Result<Vec<(HeldReason, HeldState, i64)>, DbError> {
    let rows: Vec<(String, String, i64)> = s.within("counts", async |s| s.rows("counts", Count { group, topic }).await).await?;
    let count = |(reason, state, count): (String, String, i64)| {
        let known = (HeldReason::from_word(&reason), HeldState::from_word(&state));
        match known {
            (Some(reason), Some(state)) => Ok((reason, state, count)),
            _ => Err(DbError::program("counts", format_args!("held events of unknown reason {reason:?} or state {state:?}"))),
        }
    };
    rows.into_iter().map(count).collect()
}

/// The columns that an update changes.
struct Change<'a> {
    state: HeldState,
    reason: Option<HeldReason>,
    error: Option<&'a str>,
    note: Option<&'static str>,
    charge_id: Option<&'a str>,
    attempts: i32,
    due_in: Option<Duration>,
}

fn change(update: &HeldUpdate) -> Change<'_> {
    let once = |state| Change { state, reason: None, error: None, note: None, charge_id: None, attempts: 1, due_in: None };
    match update {
        HeldUpdate::Applied { note } => Change { note: *note, ..once(HeldState::Applied) },
        HeldUpdate::Retrying { error, reason, next_attempt_in } => {
            Change { reason: Some(*reason), error: Some(error), due_in: Some(*next_attempt_in), ..once(HeldState::Retrying) }
        }
        HeldUpdate::Parked { reason, error, charge_id } => {
            Change { reason: Some(*reason), error: Some(error), charge_id: charge_id.as_deref(), ..once(HeldState::Parked) }
        }
        HeldUpdate::Later { wait } => Change { attempts: 0, due_in: Some(*wait), ..once(HeldState::Retrying) },
    }
}

/// The columns from which a record is read: partition, offset, timestamp, key, headers, payload.
pub(super) type RecordColumns = (i32, i64, Option<i64>, Option<Vec<u8>>, Vec<u8>, Option<Vec<u8>>);
pub(super) fn read_record(id: i64, columns: RecordColumns) -> Result<Record, DbError> {
    let (partition, offset, timestamp_ms, key, headers, payload) = columns;
    let broken = || DbError::program("held_event", format_args!("held event {id}: its headers are broken"));
    Ok(Record {
        partition,
        offset: Offset(offset),
        timestamp_ms,
        key: key.map(Into::into),
        headers: unpack(&headers).ok_or_else(broken)?,
        payload: payload.map(Into::into),
    })
}

pub(super) fn read_state(id: i64, word: &str) -> Result<HeldState, DbError> {
    HeldState::from_word(word)
        .ok_or_else(|| DbError::program("held_event", format_args!("held event {id}: its state {word:?} is unknown")))
}

pub(super) fn read_reason(id: i64, word: &str) -> Result<HeldReason, DbError> {
    HeldReason::from_word(word)
        .ok_or_else(|| DbError::program("held_event", format_args!("held event {id}: its reason {word:?} is unknown")))
}

// Sorted as given, so that `id` tells the order in which events are to run again.
statement! {
    Hold<'a> {
        source: i32 => Integer, offsets: Vec<i64> => Array<BigInt>, digests: Vec<i64> => Array<BigInt>,
        timestamps: Vec<Option<i64>> => Array<Nullable<BigInt>>, event_ids: Vec<Option<Uuid>> => Array<Nullable<SqlUuid>>,
        keys: Vec<Option<&'a [u8]>> => Array<Nullable<Binary>>, key_digests: Vec<Option<i64>> => Array<Nullable<BigInt>>, headers: Vec<Vec<u8>> => Array<Binary>,
        payloads: Vec<Option<&'a [u8]>> => Array<Nullable<Binary>>, reasons: Vec<&'a str> => Array<Text>,
        errors: Vec<String> => Array<Text>, states: Vec<&'a str> => Array<Text>, own_claims: Vec<bool> => Array<Bool>,
        charge_ids: Vec<Option<String>> => Array<Nullable<Text>>, attempts: Vec<i32> => Array<Integer>,
        due_in_ms: Vec<Option<i64>> => Array<Nullable<BigInt>>,
    } -> () {
        "INSERT INTO held_event AS held (source_id, source_offset, record_digest, record_timestamp, event_id, key, key_digest, headers, payload, reason,
                                 error, state, owns_claim, provider_charge_id, attempts, next_attempt_at, first_tried_at)
         SELECT :source, source_offset, record_digest, record_timestamp, event_id, key, key_digest, headers, payload, reason,
                error, state, owns_claim, charge_id, attempts, clock_timestamp() + due_in_ms * interval '1 millisecond',
                CASE WHEN attempts > 0 THEN now() END
         FROM unnest(:offsets, :digests, :timestamps, :event_ids, :keys, :key_digests, :headers, :payloads, :reasons, :errors,
                     :states, :own_claims, :charge_ids, :attempts, :due_in_ms) WITH ORDINALITY
              AS new (source_offset, record_digest, record_timestamp, event_id, key, key_digest, headers, payload, reason, error,
                      state, owns_claim, charge_id, attempts, due_in_ms, place)
         ORDER BY place
         ON CONFLICT (source_id, source_offset, record_digest) DO UPDATE SET
             reason = excluded.reason, error = excluded.error, state = excluded.state, owns_claim = true, event_id = excluded.event_id,
             provider_charge_id = excluded.provider_charge_id, attempts = excluded.attempts, next_attempt_at = excluded.next_attempt_at,
             first_tried_at = excluded.first_tried_at, relayed_at = NULL
         WHERE excluded.owns_claim AND NOT held.owns_claim"
    }
}

statement! {
    OwnsClaim<'a> { ids: &'a [i64] => Array<BigInt> } -> () { "UPDATE held_event SET owns_claim = true WHERE id = ANY(:ids)" }
}

statement! {
    Update<'a> {
        ids: Vec<i64> => Array<BigInt>, states: Vec<&'a str> => Array<Text>, reasons: Vec<Option<&'a str>> => Array<Nullable<Text>>,
        errors: Vec<Option<String>> => Array<Nullable<Text>>, notes: Vec<Option<&'a str>> => Array<Nullable<Text>>,
        charge_ids: Vec<Option<String>> => Array<Nullable<Text>>, attempts: Vec<i32> => Array<Integer>,
        due_in_ms: Vec<Option<i64>> => Array<Nullable<BigInt>>,
    } -> () {
        "UPDATE held_event AS held SET
             state = new.state, reason = coalesce(new.reason, held.reason), error = coalesce(new.error, held.error),
             note = nullif(concat_ws('; ', held.note, new.note), ''), attempts = held.attempts + new.attempts,
             provider_charge_id = coalesce(new.charge_id, held.provider_charge_id),
             next_attempt_at = clock_timestamp() + new.due_in_ms * interval '1 millisecond',
             first_tried_at = CASE WHEN new.attempts > 0 THEN coalesce(held.first_tried_at, now()) ELSE held.first_tried_at END,
             relayed_at = CASE WHEN new.state <> 'parked' THEN held.relayed_at END
         FROM unnest(:ids, :states, :reasons, :errors, :notes, :charge_ids, :attempts, :due_in_ms)
              AS new (id, state, reason, error, note, charge_id, attempts, due_in_ms)
         WHERE held.id = new.id"
    }
}

statement! {
    Count<'a> { group: &'a str => Text, topic: &'a str => Text } -> (Text, Text, BigInt) {
        "SELECT reason, state, count(*)
         FROM held_event JOIN consumed_partition ON consumed_partition.id = source_id
         WHERE consumer_group = :group AND topic = :topic AND state IN ('retrying', 'waiting', 'parked', 'queued')
         GROUP BY reason, state"
    }
}
