//! What operators see of held events, and what they ask for.
//!
//! In: filters and requests. Out: rows for people; requests for the owner, who carries them out. It owns the columns `wanted` and
//! `actor`; all others are the owner's.
//!
//! Invariant: a request is written only on a row that is still as the operator has seen it, and it is gone when it was carried out.

use std::collections::HashSet;

use chrono::{DateTime, Utc};
use diesel::sql_types::{Array, BigInt, Binary, Bool, Integer, Nullable, Text, Timestamptz, Uuid as SqlUuid};
use uuid::Uuid;

use super::held_events::{HeldState, RecordColumns, read_reason, read_record, read_state};
use super::statement::statement;
use super::{DbError, Session, storable};
use crate::handler::HeldReason;
use crate::record::{Record, SourceId};

/// A held event for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldRow {
    /// The row.
    pub id: i64,
    /// The record as it was read.
    pub record: Record,
    /// The event's id, where it could be read.
    pub event_id: Option<Uuid>,
    /// Why it is held.
    pub reason: HeldReason,
    /// Why, in words.
    pub error: String,
    /// Where it stands.
    pub state: HeldState,
    /// Its claim exists.
    pub owns_claim: bool,
    /// What an operator asked for and the owner has not carried out yet.
    pub wanted: Option<String>,
    /// Who asked last.
    pub actor: Option<String>,
    /// Why, and what became of it.
    pub note: Option<String>,
    /// How often it was tried.
    pub attempts: i32,
    /// When it is tried again.
    pub next_attempt_at: Option<DateTime<Utc>>,
    /// Since when it is held.
    pub held_at: DateTime<Utc>,
    /// When its dead letter was written.
    pub relayed_at: Option<DateTime<Utc>>,
}

/// Which rows; what is not given does not matter.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// These rows.
    pub ids: Option<Vec<i64>>,
    /// In one of these states.
    pub states: Option<Vec<HeldState>>,
    /// For this reason.
    pub reason: Option<HeldReason>,
    /// With this key.
    pub key: Option<Vec<u8>>,
    /// Of this partition.
    pub partition: Option<i32>,
    /// Held at this time or later.
    pub since: Option<DateTime<Utc>>,
    /// Held before this time.
    pub until: Option<DateTime<Utc>>,
}

/// The rows of the group and topic that pass the filter, at most so many after the row `after`, oldest first.
///
/// # Errors
/// The statement failed, or a row cannot be read.
pub async fn find(
    s: &mut Session,
    group: &str,
    topic: &str,
    filter: &Filter,
    after: i64,
    limit: i64,
) -> Result<Vec<HeldRow>, DbError> {
    let states = filter.states.as_ref().map(|states| states.iter().map(|state| state.as_str()).collect());
    let find = Find {
        group,
        topic,
        ids: filter.ids.as_deref(),
        states,
        reason: filter.reason.map(HeldReason::as_str),
        key: filter.key.as_deref(),
        partition: filter.partition,
        since: filter.since,
        until: filter.until,
        after,
        limit,
    };
    let rows: Vec<FoundRow> = s.within("find_held", async |s| s.rows("find_held", find).await).await?;
    rows.into_iter().map(read).collect()
}

/// Writes a request on rows that are still in the state in which they were seen and carry no other request, and records it. Out: the rows
/// that took it.
///
/// # Errors
/// The statement failed.
pub async fn request(
    s: &mut Session,
    seen: &[(i64, HeldState)],
    wanted: &str,
    actor: &str,
    note: &str,
) -> Result<HashSet<i64>, DbError> {
    let ask = Ask {
        ids: seen.iter().map(|(id, _)| *id).collect(),
        states: seen.iter().map(|(_, state)| state.as_str()).collect(),
        wanted: storable(wanted),
        actor: storable(actor),
        note: storable(note),
    };
    s.within("request", async |s| Ok(s.rows("request", ask).await?.into_iter().collect())).await
}

/// Of these partitions of the group and topic, those for which there are requests, or whose row an operator has changed since its owner took it
/// (`true`).
///
/// # Errors
/// The statement failed.
pub async fn wanted(s: &mut Session, (group, topic): (&str, &str), partitions: &[i32]) -> Result<Vec<(i32, bool)>, DbError> {
    if partitions.is_empty() {
        return Ok(Vec::new());
    }
    let wanted = Wanted { group, topic, partitions };
    s.within("wanted", async |s| s.rows("wanted", wanted).await).await
}

/// How many requests of the group and topic nobody has carried out yet.
///
/// # Errors
/// The statement failed.
pub async fn count(s: &mut Session, group: &str, topic: &str) -> Result<i64, DbError> {
    Ok(s.within("count_requests", async |s| s.row("count_requests", Count { group, topic }).await).await?.unwrap_or(0))
}

/// A request that its owner reads; the row is locked.
#[derive(Clone, Debug)]
pub struct OpenRequest {
    /// The row.
    pub id: i64,
    /// What is asked for.
    pub wanted: String,
    /// By whom.
    pub actor: String,
    /// Where the row stands now.
    pub state: HeldState,
    /// Why it is held now.
    pub reason: HeldReason,
    /// The record as it was read.
    pub record: Record,
}

/// Locks up to `limit` requested rows of the partition.
///
/// # Errors
/// The statement failed, or a row cannot be read.
pub async fn lock(s: &mut Session, source: SourceId, limit: i64) -> Result<Vec<OpenRequest>, DbError> {
    type Row = (i64, String, String, String, String, i32, i64, Option<i64>, Option<Vec<u8>>, Vec<u8>, Option<Vec<u8>>);
    let rows: Vec<Row> = s.rows("lock_requests", Lock { source: source.0, limit }).await?;
    let read = |(id, wanted, actor, state, reason, partition, offset, timestamp, key, headers, payload): Row| {
        let (state, reason) = (read_state(id, &state)?, read_reason(id, &reason)?);
        let record = read_record(id, (partition, offset, timestamp, key, headers, payload))?;
        Ok(OpenRequest { id, wanted, actor, state, reason, record })
    };
    rows.into_iter().map(read).collect()
}

/// What a request has made of its row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CarriedOut {
    /// It runs now.
    Queued,
    /// It is given up.
    Discarded,
    /// Nothing; why.
    Refused(String),
    /// It stays parked, and nobody knows whether its effect happened: it must be resolved.
    InDoubt(String),
}

/// Writes what became of locked requests; they are gone then.
///
/// # Errors
/// The statement failed.
pub async fn carry_out(s: &mut Session, done: &[(i64, CarriedOut)]) -> Result<(), DbError> {
    if done.is_empty() {
        return Ok(());
    }
    let state = |done: &CarriedOut| match done {
        CarriedOut::Queued => Some(HeldState::Queued.as_str()),
        CarriedOut::Discarded => Some(HeldState::Discarded.as_str()),
        CarriedOut::InDoubt(_) => Some(HeldState::Parked.as_str()),
        CarriedOut::Refused(_) => None,
    };
    let note = |done: &CarriedOut| match done {
        CarriedOut::Queued | CarriedOut::Discarded => None,
        CarriedOut::Refused(why) | CarriedOut::InDoubt(why) => Some(storable(&format!("not done: {why}"))),
    };
    let in_doubt = |done: &CarriedOut| matches!(done, CarriedOut::InDoubt(_)).then_some(HeldReason::Unknown.as_str());
    let carry_out = CarryOut {
        ids: done.iter().map(|(id, _)| *id).collect(),
        states: done.iter().map(|(_, done)| state(done)).collect(),
        reasons: done.iter().map(|(_, done)| in_doubt(done)).collect(),
        notes: done.iter().map(|(_, done)| note(done)).collect(),
    };
    s.change("carry_out", carry_out).await?;
    Ok(())
}

type FoundRow = (
    i64,
    i32,
    i64,
    Option<i64>,
    Option<Vec<u8>>,
    Vec<u8>,
    Option<Vec<u8>>,
    Option<Uuid>,
    String,
    String,
    String,
    bool,
    Option<String>,
    Option<String>,
    Option<String>,
    i32,
    Option<DateTime<Utc>>,
    DateTime<Utc>,
    Option<DateTime<Utc>>,
);

fn read(row: FoundRow) -> Result<HeldRow, DbError> {
    let (
        id,
        partition,
        offset,
        timestamp,
        key,
        headers,
        payload,
        event_id,
        reason,
        error,
        state,
        owns_claim,
        wanted,
        actor,
        note,
        ..,
    ) = row;
    let (attempts, next_attempt_at, held_at, relayed_at) = (row.15, row.16, row.17, row.18);
    let columns: RecordColumns = (partition, offset, timestamp, key, headers, payload);
    Ok(HeldRow {
        id,
        record: read_record(id, columns)?,
        event_id,
        reason: read_reason(id, &reason)?,
        error,
        state: read_state(id, &state)?,
        owns_claim,
        wanted,
        actor,
        note,
        attempts,
        next_attempt_at,
        held_at,
        relayed_at,
    })
}

statement! {
    Find<'a> {
        group: &'a str => Text, topic: &'a str => Text, ids: Option<&'a [i64]> => Nullable<Array<BigInt>>,
        states: Option<Vec<&'a str>> => Nullable<Array<Text>>, reason: Option<&'a str> => Nullable<Text>,
        key: Option<&'a [u8]> => Nullable<Binary>, partition: Option<i32> => Nullable<Integer>,
        since: Option<DateTime<Utc>> => Nullable<Timestamptz>, until: Option<DateTime<Utc>> => Nullable<Timestamptz>,
        after: i64 => BigInt, limit: i64 => BigInt,
    } -> (BigInt, Integer, BigInt, Nullable<BigInt>, Nullable<Binary>, Binary, Nullable<Binary>, Nullable<SqlUuid>, Text, Text, Text, Bool,
          Nullable<Text>, Nullable<Text>, Nullable<Text>, Integer, Nullable<Timestamptz>, Timestamptz, Nullable<Timestamptz>) {
        "SELECT held.id, partition, source_offset, record_timestamp, key, headers, payload, event_id, reason, error, state, owns_claim,
                wanted, actor, note, attempts, next_attempt_at, held_at, relayed_at
         FROM held_event AS held JOIN consumed_partition ON consumed_partition.id = source_id
         WHERE consumer_group = :group AND topic = :topic
               AND coalesce(held.id = ANY(:ids), true) AND coalesce(state = ANY(:states), true) AND reason = coalesce(:reason, reason)
               AND key IS NOT DISTINCT FROM coalesce(:key, key) AND partition = coalesce(:partition, partition)
               AND held_at >= coalesce(:since, '-infinity') AND held_at < coalesce(:until, 'infinity') AND held.id > :after
         ORDER BY held.id LIMIT :limit"
    }
}

// In the order of their ids, so that an owner who locks them too is waited for and not met head on.
statement! {
    Ask<'a> {
        ids: Vec<i64> => Array<BigInt>, states: Vec<&'a str> => Array<Text>, wanted: String => Text, actor: String => Text,
        note: String => Text,
    } -> BigInt {
        "WITH seen AS (
             SELECT held.id FROM unnest(:ids, :states) AS seen (id, state) JOIN held_event AS held USING (id, state)
             WHERE held.wanted IS NULL
             ORDER BY held.id FOR UPDATE OF held),
         asked AS (
             UPDATE held_event AS held SET wanted = :wanted, actor = :actor, note = :note
             FROM seen WHERE held.id = seen.id
             RETURNING held.*)
         INSERT INTO operator_action (action, source_id, source_offset, held_id, actor, reason)
         SELECT wanted, source_id, source_offset, id, actor, note FROM asked ORDER BY id
         RETURNING held_id"
    }
}

// A command that changes the row is its owner by name until a process takes it over.
statement! {
    Wanted<'a> { group: &'a str => Text, topic: &'a str => Text, partitions: &'a [i32] => Array<Integer> } -> (Integer, Bool) {
        "SELECT partition, is_changed
         FROM (SELECT id, partition, owner LIKE 'onceward %' AS is_changed FROM consumed_partition
               WHERE consumer_group = :group AND topic = :topic AND partition = ANY(:partitions)) AS ours
         WHERE is_changed OR EXISTS (SELECT FROM held_event WHERE source_id = ours.id AND wanted IS NOT NULL)"
    }
}

statement! {
    Count<'a> { group: &'a str => Text, topic: &'a str => Text } -> BigInt {
        "SELECT count(*) FROM held_event JOIN consumed_partition ON consumed_partition.id = source_id
         WHERE consumer_group = :group AND topic = :topic AND wanted IS NOT NULL"
    }
}

statement! {
    Lock { source: i32 => Integer, limit: i64 => BigInt }
    -> (BigInt, Text, Text, Text, Text, Integer, BigInt, Nullable<BigInt>, Nullable<Binary>, Binary, Nullable<Binary>) {
        "SELECT held.id, wanted, coalesce(actor, ''), state, reason, partition, source_offset, record_timestamp, key, headers, payload
         FROM held_event AS held JOIN consumed_partition ON consumed_partition.id = source_id
         WHERE source_id = :source AND wanted IS NOT NULL
         ORDER BY held.id LIMIT :limit
         FOR UPDATE OF held"
    }
}

statement! {
    CarryOut<'a> {
        ids: Vec<i64> => Array<BigInt>, states: Vec<Option<&'a str>> => Array<Nullable<Text>>,
        reasons: Vec<Option<&'a str>> => Array<Nullable<Text>>, notes: Vec<Option<String>> => Array<Nullable<Text>>,
    } -> () {
        "UPDATE held_event AS held SET
             wanted = NULL, state = coalesce(new.state, held.state), reason = coalesce(new.reason, held.reason),
             note = nullif(concat_ws('; ', held.note, new.note), ''),
             next_attempt_at = CASE WHEN new.state IS NULL THEN held.next_attempt_at END
         FROM unnest(:ids, :states, :reasons, :notes) AS new (id, state, reason, note)
         WHERE held.id = new.id"
    }
}
