//! Whose turn it is among the held events of a partition: what is due, what comes after a head that is settled, what an operator asked
//! for.
//!
//! In: a partition. Out: rows that can run, locked, in their order; and what its owner must know to leave the others alone. It owns
//! nothing: the rows are those of `held_events`.
//!
//! Invariant: of the events of one key none runs before an earlier one that holds it up.

use std::collections::HashSet;
use std::time::Duration;

use diesel::sql_types::{Array, BigInt, Binary, Bool, Integer, Nullable, Text};

use super::held_events::{HeldState, read_record, read_state};
use super::statement::statement;
use super::{DbError, Session, duration};
use crate::handler::HeldReason;
use crate::record::{KeyDigest, Offset, Record, RecordDigest, SourceId};

/// A held event that can run; its row is locked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DueHeld {
    /// The row.
    pub id: i64,
    /// Where it stands.
    pub state: HeldState,
    /// The record as it was read.
    pub record: Record,
    /// How often it was tried.
    pub attempts: i32,
    /// How long ago it was tried first, by the database's clock; zero if it never was.
    pub first_tried_age: Duration,
    /// Its claim is in `processed_event`.
    pub owns_claim: bool,
}

/// What an owner must know of the partition's held events that are not settled.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpenHeld {
    /// How many there are.
    pub count: usize,
    /// When the first of them is to be tried again; zero when it is overdue.
    pub next_due: Option<Duration>,
    /// Some can run at once that are not a matter of time: their turn has come, or an operator's request was accepted.
    pub has_turn: bool,
    /// Keys whose later events must wait.
    pub sequences: HashSet<KeyDigest>,
    /// The last offset at which a record without a claim is discarded.
    pub last_discarded: Option<Offset>,
}

/// Locks up to `limit` events of the partition that can run, oldest row first: what is due, whose turn has come, and what operators
/// asked for (`requested_only`: nothing else). Of one key all that can run come, up to the first that holds the others up.
///
/// # Errors
/// The statement failed, or a row's headers or state are broken.
pub async fn lock_due(s: &mut Session, source: SourceId, limit: i64, requested_only: bool) -> Result<Vec<DueHeld>, DbError> {
    let due = LockDue { source: source.0, requested_only, hold_up: holding_up(), others_stand: requested_only, limit };
    let rows: Vec<DueRow> = s.rows("lock_due", due).await?;
    rows.into_iter().map(read).collect()
}

/// What is open of the partition, as of this transaction.
///
/// # Errors
/// The statement failed.
pub async fn open(s: &mut Session, source: SourceId) -> Result<OpenHeld, DbError> {
    let question = Open { hold_up: holding_up(), of: source.0, source: source.0 };
    let row: Option<OpenRow> = s.within("open_held", async |s| s.row("open_held", question).await).await?;
    let (count, due_in_ms, has_turn, sequences, last_discarded) = row.expect("an aggregate returns one row");
    Ok(OpenHeld {
        count: usize::try_from(count).unwrap_or_default(),
        next_due: due_in_ms.map(duration),
        has_turn,
        sequences: sequences.into_iter().map(KeyDigest).collect(),
        last_discarded: last_discarded.map(Offset),
    })
}

type OpenRow = (i64, Option<i64>, bool, Vec<i64>, Option<i64>);

/// Of these records of the partition, those that an operator has discarded and that have no claim.
///
/// # Errors
/// The statement failed.
pub async fn discarded(
    s: &mut Session,
    source: SourceId,
    records: &[(Offset, RecordDigest)],
) -> Result<HashSet<(Offset, RecordDigest)>, DbError> {
    if records.is_empty() {
        return Ok(HashSet::new());
    }
    let (offsets, digests) = records.iter().map(|(offset, digest)| (offset.0, digest.0)).unzip();
    let find = Discarded { offsets, digests, source: source.0 };
    let rows: Vec<(i64, i64)> = s.within("discarded", async |s| s.rows("discarded", find).await).await?;
    Ok(rows.into_iter().map(|(offset, digest)| (Offset(offset), RecordDigest(digest))).collect())
}

/// The reasons for which a parked event holds up the later ones of its key.
fn holding_up() -> Vec<&'static str> {
    HeldReason::ALL.into_iter().filter(|reason| reason.holds_up()).map(HeldReason::as_str).collect()
}

type DueRow = (i64, String, i32, i64, Option<i64>, Option<Vec<u8>>, Vec<u8>, Option<Vec<u8>>, i32, bool, i64);

fn read(row: DueRow) -> Result<DueHeld, DbError> {
    let (id, state, partition, offset, timestamp_ms, key, headers, payload, attempts, owns_claim, age_ms) = row;
    let record = read_record(id, (partition, offset, timestamp_ms, key, headers, payload))?;
    Ok(DueHeld { id, state: read_state(id, &state)?, record, attempts, first_tried_age: duration(age_ms), owns_claim })
}

// What holds an event up: an earlier one of its key that is parked for such a reason, or whose time has not come. Whatever else of the
// key stands before it runs in the same batch, before it.
statement! {
    LockDue {
        source: i32 => Integer, requested_only: bool => Bool, hold_up: Vec<&'static str> => Array<Text>,
        others_stand: bool => Bool, limit: i64 => BigInt,
    }
    -> (BigInt, Text, Integer, BigInt, Nullable<BigInt>, Nullable<Binary>, Binary, Nullable<Binary>, Integer, Bool, BigInt) {
        "SELECT held.id, state, partition, source_offset, record_timestamp, key, headers, payload, attempts, owns_claim,
                coalesce((extract(epoch FROM clock_timestamp() - first_tried_at) * 1000)::bigint, 0)
         FROM held_event AS held JOIN consumed_partition ON consumed_partition.id = source_id
         WHERE source_id = :source
               AND (state = 'queued' OR NOT :requested_only
                    AND (state = 'waiting' OR state = 'retrying' AND next_attempt_at <= statement_timestamp()))
               AND NOT EXISTS (
                   SELECT FROM held_event AS earlier
                   WHERE earlier.source_id = held.source_id AND earlier.key_digest = held.key_digest AND earlier.id < held.id
                         AND earlier.state IN ('retrying', 'waiting', 'parked', 'queued')
                         AND (earlier.state = 'parked' AND earlier.reason = ANY(:hold_up)
                              OR :others_stand AND earlier.state IN ('retrying', 'waiting')
                              OR earlier.state = 'retrying' AND earlier.next_attempt_at > statement_timestamp()))
         ORDER BY held.id
         LIMIT :limit
         FOR UPDATE OF held"
    }
}

// Rounded up: who waits this long finds the event due. An event that is held up is not due, whatever its own time says: the one that
// holds it up tells when to look again, or an operator does.
statement! {
    Open { hold_up: Vec<&'static str> => Array<Text>, of: i32 => Integer, source: i32 => Integer }
    -> (BigInt, Nullable<BigInt>, Bool, Array<BigInt>, Nullable<BigInt>) {
        "WITH open AS (
             SELECT id, key_digest, state, next_attempt_at, state = 'parked' AND NOT holds_up AS aside,
                    state = 'parked' AND holds_up OR state = 'retrying' AND next_attempt_at > statement_timestamp() AS stands
             FROM (SELECT *, reason = ANY(:hold_up) AS holds_up FROM held_event
                   WHERE source_id = :of AND state IN ('retrying', 'waiting', 'parked', 'queued')) AS open),
         judged AS (
             SELECT *, key_digest IS NOT NULL AND coalesce(bool_or(stands) OVER earlier, false) AS held_up FROM open
             WINDOW earlier AS (PARTITION BY key_digest ORDER BY id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING))
         SELECT count(*),
                ceil(extract(epoch FROM min(next_attempt_at) FILTER (WHERE state = 'retrying' AND NOT held_up) - clock_timestamp())
                     * 1000)::bigint,
                coalesce(bool_or(state IN ('waiting', 'queued') AND NOT held_up), false),
                coalesce(array_agg(DISTINCT key_digest) FILTER (WHERE NOT aside AND key_digest IS NOT NULL), '{}'),
                (SELECT max(source_offset) FROM held_event WHERE source_id = :source AND state = 'discarded' AND NOT owns_claim)
         FROM judged"
    }
}

statement! {
    Discarded { offsets: Vec<i64> => Array<BigInt>, digests: Vec<i64> => Array<BigInt>, source: i32 => Integer } -> (BigInt, BigInt) {
        "SELECT source_offset, record_digest
         FROM unnest(:offsets, :digests) AS wanted (source_offset, record_digest) JOIN held_event USING (source_offset, record_digest)
         WHERE source_id = :source AND state = 'discarded' AND NOT owns_claim"
    }
}
