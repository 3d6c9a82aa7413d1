//! Held events: recorded with a reason, not applied.
//!
//! In: records and why they are held. Out: those that are due. It owns the rows of `held_event`.
//!
//! Invariant: the record's bytes come back exactly as they went in, and no text of an error can be refused by the database.

use std::time::Duration;

use diesel::sql_types::{Array, BigInt, Binary, Bool, Integer, Nullable, Text, Uuid as SqlUuid};
use uuid::Uuid;

use super::statement::statement;
use super::{DbError, Session, duration, milliseconds, storable};
use crate::handler::HeldReason;
use crate::record::{Header, Offset, Record, RecordDigest, SourceId};

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

/// A held event that is due; its row is locked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DueHeld {
    /// The row.
    pub id: i64,
    /// The record as it was read.
    pub record: Record,
    /// How often it was tried.
    pub attempts: i32,
    /// How long it is held, by the database's clock.
    pub first_held_age: Duration,
    /// Its claim is in `processed_event`.
    pub owns_claim: bool,
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

    pub(super) fn from_word(word: &str) -> Option<Self> {
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

/// Locks up to `limit` events of the partition that are due, oldest row first.
///
/// # Errors
/// The statement failed, or a row's headers are broken.
pub async fn lock_due(s: &mut Session, source: SourceId, limit: i64) -> Result<Vec<DueHeld>, DbError> {
    let rows: Vec<DueRow> = s.rows("lock_due", LockDue { source: source.0, limit }).await?;
    rows.into_iter().map(read).collect()
}

/// Writes what became of held events that [`lock_due`] returned.
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

/// How long until the partition's earliest retrying event is due: zero when it is overdue, `None` when there is none.
///
/// # Errors
/// The statement failed.
pub async fn next_due(s: &mut Session, source: SourceId) -> Result<Option<Duration>, DbError> {
    let in_ms: Option<Option<i64>> = s.within("next_due", async |s| s.row("next_due", NextDue { source: source.0 }).await).await?;
    Ok(in_ms.flatten().map(duration))
}

/// How many events of the group and topic are held, by reason and state.
///
/// # Errors
/// The statement failed, or a row has a reason or state that this program does not know.
pub async fn counts(s: &mut Session, group: &str, topic: &str) -> Result<Vec<(HeldReason, HeldState, i64)>, DbError> {
    let rows: Vec<(String, String, i64)> = s.within("counts", async |s| s.rows("counts", Count { group, topic }).await).await?;
    let count = |(reason, state, count): (String, String, i64)| {
        let known = (HeldReason::ALL.into_iter().find(|known| known.as_str() == reason), HeldState::from_word(&state));
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

type DueRow = (i64, i32, i64, Option<i64>, Option<Vec<u8>>, Vec<u8>, Option<Vec<u8>>, i32, bool, i64);

fn read(row: DueRow) -> Result<DueHeld, DbError> {
    let (id, partition, offset, timestamp_ms, key, headers, payload, attempts, owns_claim, age_ms) = row;
    let headers =
        unpack(&headers).ok_or_else(|| DbError::program("lock_due", format_args!("held event {id}: its headers are broken")))?;
    let record = Record {
        partition,
        offset: Offset(offset),
        timestamp_ms,
        key: key.map(Into::into),
        headers,
        payload: payload.map(Into::into),
    };
    Ok(DueHeld { id, record, attempts, first_held_age: duration(age_ms), owns_claim })
}

/// The length of a value that is null.
const NULL: u32 = u32::MAX;

/// All headers in one value, each part behind its length (big-endian, four bytes), so that no byte is special. Frozen: it is stored.
fn pack(headers: &[Header]) -> Vec<u8> {
    // A record is far below 4 GiB, so every length fits.
    let length = |bytes: &[u8]| u32::try_from(bytes.len()).expect("a header of less than 4 GiB").to_be_bytes();
    let mut packed = u32::try_from(headers.len()).expect("less than 4 G headers").to_be_bytes().to_vec();
    for (name, value) in headers {
        packed.extend_from_slice(&length(name));
        packed.extend_from_slice(name);
        packed.extend_from_slice(&value.as_deref().map_or(NULL.to_be_bytes(), length));
        packed.extend_from_slice(value.as_deref().unwrap_or_default());
    }
    packed
}

fn unpack(mut packed: &[u8]) -> Option<Box<[Header]>> {
    fn number(packed: &mut &[u8]) -> Option<u32> {
        let (number, rest) = packed.split_first_chunk()?;
        *packed = rest;
        Some(u32::from_be_bytes(*number))
    }
    fn bytes(packed: &mut &[u8], length: u32) -> Option<Box<[u8]>> {
        let (bytes, rest) = packed.split_at_checked(length as usize)?;
        *packed = rest;
        Some(bytes.into())
    }
    let mut headers = Vec::new();
    for _ in 0..number(&mut packed)? {
        let length = number(&mut packed)?;
        let name = bytes(&mut packed, length)?;
        let value = match number(&mut packed)? {
            NULL => None,
            length => Some(bytes(&mut packed, length)?),
        };
        headers.push((name, value));
    }
    packed.is_empty().then(|| headers.into())
}

// Sorted as given, so that `id` tells the order in which events are to run again.
statement! {
    Hold<'a> {
        source: i32 => Integer, offsets: Vec<i64> => Array<BigInt>, digests: Vec<i64> => Array<BigInt>,
        timestamps: Vec<Option<i64>> => Array<Nullable<BigInt>>, event_ids: Vec<Option<Uuid>> => Array<Nullable<SqlUuid>>,
        keys: Vec<Option<&'a [u8]>> => Array<Nullable<Binary>>, headers: Vec<Vec<u8>> => Array<Binary>,
        payloads: Vec<Option<&'a [u8]>> => Array<Nullable<Binary>>, reasons: Vec<&'a str> => Array<Text>,
        errors: Vec<String> => Array<Text>, states: Vec<&'a str> => Array<Text>, own_claims: Vec<bool> => Array<Bool>,
        charge_ids: Vec<Option<String>> => Array<Nullable<Text>>, attempts: Vec<i32> => Array<Integer>,
        due_in_ms: Vec<Option<i64>> => Array<Nullable<BigInt>>,
    } -> () {
        "INSERT INTO held_event AS held (source_id, source_offset, record_digest, record_timestamp, event_id, key, headers, payload, reason, error,
                                 state, owns_claim, provider_charge_id, attempts, next_attempt_at)
         SELECT :source, source_offset, record_digest, record_timestamp, event_id, key, headers, payload, reason, error,
                state, owns_claim, charge_id, attempts, clock_timestamp() + due_in_ms * interval '1 millisecond'
         FROM unnest(:offsets, :digests, :timestamps, :event_ids, :keys, :headers, :payloads, :reasons, :errors,
                     :states, :own_claims, :charge_ids, :attempts, :due_in_ms) WITH ORDINALITY
              AS new (source_offset, record_digest, record_timestamp, event_id, key, headers, payload, reason, error,
                      state, owns_claim, charge_id, attempts, due_in_ms, place)
         ORDER BY place
         ON CONFLICT (source_id, source_offset, record_digest) DO UPDATE SET
             reason = excluded.reason, error = excluded.error, state = excluded.state, owns_claim = true, event_id = excluded.event_id,
             provider_charge_id = excluded.provider_charge_id, attempts = excluded.attempts, next_attempt_at = excluded.next_attempt_at
         WHERE excluded.owns_claim AND NOT held.owns_claim"
    }
}

statement! {
    LockDue { source: i32 => Integer, limit: i64 => BigInt }
    -> (BigInt, Integer, BigInt, Nullable<BigInt>, Nullable<Binary>, Binary, Nullable<Binary>, Integer, Bool, BigInt) {
        "SELECT held.id, partition, source_offset, record_timestamp, key, headers, payload, attempts, owns_claim,
                (extract(epoch FROM clock_timestamp() - held_at) * 1000)::bigint
         FROM held_event AS held JOIN consumed_partition ON consumed_partition.id = source_id
         WHERE source_id = :source AND state = 'retrying' AND next_attempt_at <= statement_timestamp()
         ORDER BY held.id
         LIMIT :limit
         FOR UPDATE OF held"
    }
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
             note = coalesce(new.note, held.note), attempts = held.attempts + new.attempts,
             provider_charge_id = coalesce(new.charge_id, held.provider_charge_id),
             next_attempt_at = clock_timestamp() + new.due_in_ms * interval '1 millisecond'
         FROM unnest(:ids, :states, :reasons, :errors, :notes, :charge_ids, :attempts, :due_in_ms)
              AS new (id, state, reason, error, note, charge_id, attempts, due_in_ms)
         WHERE held.id = new.id"
    }
}

// Rounded up: who waits this long finds the event due.
statement! {
    NextDue { source: i32 => Integer } -> Nullable<BigInt> {
        "SELECT ceil(extract(epoch FROM min(next_attempt_at) - clock_timestamp()) * 1000)::bigint
         FROM held_event WHERE source_id = :source AND state = 'retrying'"
    }
}

statement! {
    Count<'a> { group: &'a str => Text, topic: &'a str => Text } -> (Text, Text, BigInt) {
        "SELECT reason, state, count(*)
         FROM held_event JOIN consumed_partition ON consumed_partition.id = source_id
         WHERE consumer_group = :group AND topic = :topic
         GROUP BY reason, state"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_come_back_as_they_went_in_and_broken_ones_are_refused() {
        let headers: Box<[Header]> = Box::new([
            (b"plain"[..].into(), Some(b"text"[..].into())),
            (b"plain"[..].into(), None),
            (Box::default(), Some(Box::default())),
            (b"\xff\xfe\0"[..].into(), Some(b"\0\xff"[..].into())),
        ]);
        let packed = pack(&headers);
        assert_eq!(unpack(&packed).as_deref(), Some(&*headers));
        assert_eq!(packed[..13], *b"\0\0\0\x04\0\0\0\x05plain", "stored, so frozen");
        for cut in 0..packed.len() {
            assert_eq!(unpack(&packed[..cut]), None, "{cut}");
        }
        assert_eq!(unpack(&[packed, vec![0]].concat()), None);
    }
}
