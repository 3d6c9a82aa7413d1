//! Parked events that are not in the dead-letter topic yet.
//!
//! In: an owner. Out: rows of its partitions; a mark on those that are written. It owns the column `relayed_at`.
//!
//! Invariant: a row is marked only for the parking that was written: parked once more, it is a new dead letter.

use diesel::sql_types::{Array, BigInt, Binary, Integer, Nullable, Text, Uuid as SqlUuid};
use uuid::Uuid;

use super::held_events::{read_reason, read_record};
use super::statement::statement;
use super::{DbError, Session};
use crate::handler::HeldReason;
use crate::record::Record;

/// A parked event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadLetter {
    /// The row.
    pub id: i64,
    /// The record as it was read.
    pub record: Record,
    /// The event's id, where it could be read.
    pub event_id: Option<Uuid>,
    /// Why.
    pub reason: HeldReason,
    /// Why, in words.
    pub error: String,
    /// How often it was tried.
    pub attempts: i32,
}

/// The oldest dead letters of the partitions that `owner` has, up to so many bytes, and one in any case.
///
/// # Errors
/// The statement failed, or a row cannot be read.
pub async fn find(s: &mut Session, group: &str, topic: &str, owner: &str, most_bytes: i64) -> Result<Vec<DeadLetter>, DbError> {
    type Row = (i64, Option<Uuid>, String, String, i32, i32, i64, Option<i64>, Option<Vec<u8>>, Vec<u8>, Option<Vec<u8>>);
    let find = Find { group, topic, owner, most_bytes };
    let rows: Vec<Row> = s.within("find_dead_letters", async |s| s.rows("find_dead_letters", find).await).await?;
    let read = |(id, event_id, reason, error, attempts, partition, offset, timestamp, key, headers, payload): Row| {
        let record = read_record(id, (partition, offset, timestamp, key, headers, payload))?;
        Ok(DeadLetter { id, record, event_id, reason: read_reason(id, &reason)?, error, attempts })
    };
    rows.into_iter().map(read).collect()
}

/// Marks dead letters that are in the topic.
///
/// # Errors
/// The statement failed.
pub async fn relayed(s: &mut Session, letters: &[DeadLetter]) -> Result<(), DbError> {
    if letters.is_empty() {
        return Ok(());
    }
    let (ids, attempts) = letters.iter().map(|letter| (letter.id, letter.attempts)).unzip();
    s.within("relayed", async |s| s.change("relayed", Relayed { ids, attempts }).await.map(drop)).await
}

// The lengths are known without reading what is stored beside the table.
statement! {
    Find<'a> { group: &'a str => Text, topic: &'a str => Text, owner: &'a str => Text, most_bytes: i64 => BigInt }
    -> (BigInt, Nullable<SqlUuid>, Text, Text, Integer, Integer, BigInt, Nullable<BigInt>, Nullable<Binary>, Binary, Nullable<Binary>) {
        "WITH waiting AS (
             SELECT held.id, partition, row_number() OVER oldest_first AS place,
                    sum(coalesce(octet_length(payload), 0) + coalesce(octet_length(key), 0) + octet_length(headers)) OVER oldest_first AS bytes
             FROM held_event AS held JOIN consumed_partition ON consumed_partition.id = source_id
             WHERE consumer_group = :group AND topic = :topic AND owner = :owner AND state = 'parked' AND relayed_at IS NULL
             WINDOW oldest_first AS (ORDER BY held.id))
         SELECT held.id, event_id, reason, error, attempts, partition, source_offset, record_timestamp, key, headers, payload
         FROM waiting JOIN held_event AS held USING (id)
         WHERE bytes <= :most_bytes OR place = 1
         ORDER BY held.id LIMIT 100"
    }
}

statement! {
    Relayed { ids: Vec<i64> => Array<BigInt>, attempts: Vec<i32> => Array<Integer> } -> () {
        "UPDATE held_event AS held SET relayed_at = clock_timestamp()
         FROM unnest(:ids, :attempts) AS letter (id, attempts)
         WHERE held.id = letter.id AND held.attempts = letter.attempts AND state = 'parked'"
    }
}
