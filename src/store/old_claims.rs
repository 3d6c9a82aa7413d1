//! The claims of a plain table, deleted in batches.
//!
//! In: how far ids are forgotten. Out: rows that are gone. It owns the rows of `processed_event` that lie below the floor, where that table
//! has no days. If it dies here, the next run begins again.
//!
//! Invariant: a row goes only if its id lies below the floor that is committed, and its group is one that has agreed to that.

use std::time::Duration;

use diesel::sql_types::{Array, BigInt, Bool, Nullable, Text, Uuid as SqlUuid};
use uuid::Uuid;

use super::statement::statement;
use super::{DbError, Session, TimeLimits};

/// What a plain table holds, as the server estimates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlainTable {
    /// Claims.
    pub rows: i64,
    /// Its size with its indexes.
    pub bytes: i64,
    /// An index begins with `processed_at`: old claims can be found.
    pub indexed: bool,
}

/// Which claims may go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forgettable {
    /// Ids below.
    pub floor: Uuid,
    /// And made before, in milliseconds since 1970.
    pub before_ms: i64,
    /// Of these groups: what others keep in the table is theirs to forget.
    pub groups: Vec<String>,
}

/// Where a walk through the claims has come to, in the order of their age.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place(Option<(i64, Uuid, String)>);

/// One step of the walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Claims that were looked at; fewer than asked for at the end.
    pub seen: i64,
    /// How many of them are gone.
    pub gone: i64,
}

/// How long one step may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// The year 1, in microseconds since 1970.
const LONG_AGO: i64 = -62_135_596_800_000_000;

/// What there is.
///
/// # Errors
/// The statement failed, or there is no such table.
pub async fn plain_table(s: &mut Session) -> Result<PlainTable, DbError> {
    let found = s.within("plain_table", async |s| s.row("plain_table", Look {}).await).await?;
    let (rows, bytes, indexed) = found.ok_or_else(|| DbError::program("plain_table", "there is no processed_event"))?;
    Ok(PlainTable { rows, bytes, indexed })
}

/// Said with BEGIN, this gives a transaction a number, by which [`writers_are_over`] knows it.
pub(super) const SHOW_AS_A_WRITER: &str = "; SELECT pg_current_xact_id()";

/// When the oldest claim was made, in milliseconds since 1970; `None` while there is none.
///
/// # Errors
/// The statement failed, or took too long without an index.
pub async fn oldest_claim_ms(s: &mut Session) -> Result<Option<i64>, DbError> {
    s.row("oldest_claim", OldestClaim {}).await
}

/// The number of the next transaction that writes: every one that has written so far has a lower one.
///
/// # Errors
/// The statement failed.
pub async fn next_writer(s: &mut Session) -> Result<i64, DbError> {
    let next = s.within("next_writer", async |s| s.row("next_writer", NextWriter {}).await).await?;
    Ok(next.unwrap_or(i64::MAX))
}

/// Whether every transaction that writes and has a lower number is over. A batch has one before its fence reads the floor.
///
/// # Errors
/// The statement failed.
pub async fn writers_are_over(s: &mut Session, below: i64) -> Result<bool, DbError> {
    let over = s.within("writers_are_over", async |s| s.row("writers_are_over", WritersAreOver { below }).await).await?;
    Ok(over == Some(true))
}

/// Looks at the next `most` claims that are old enough, and deletes those that may go.
///
/// # Errors
/// The statement failed; nothing of this step is gone.
pub async fn step(s: &mut Session, place: &mut Place, may_go: &Forgettable, most: i64) -> Result<Step, DbError> {
    type Row = (i64, i64, Option<i64>, Option<Uuid>, Option<String>);
    let (from, after, other) = place.0.clone().unwrap_or((LONG_AGO, Uuid::nil(), String::new()));
    let Forgettable { floor, before_ms, groups } = may_go;
    let step = Delete { from, before: *before_ms, after_time: from, after, other: &other, most, floor: *floor, groups };
    // A transaction of others may have made millions of claims at one moment, among which the place must be found again.
    let limits = TimeLimits { statement: PATIENCE, idle_in_transaction: PATIENCE, budget: 2 * PATIENCE, ..s.limits() };
    let done: Option<Row> = s.alone("delete_claims", limits, async |s| s.row("delete_claims", step).await).await?;
    let (seen, gone, time, id, group) = done.unwrap_or_default();
    if let (Some(time), Some(id), Some(group)) = (time, id, group) {
        place.0 = Some((time, id, group));
    }
    Ok(Step { seen, gone })
}

statement! {
    Look {} -> (BigInt, BigInt, Bool) {
        "SELECT greatest(reltuples, 0)::bigint, pg_total_relation_size(c.oid),
                EXISTS (SELECT FROM pg_index AS x JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum = x.indkey[0]
                             JOIN pg_class AS i ON i.oid = x.indexrelid JOIN pg_am AS m ON m.oid = i.relam AND m.amname = 'btree'
                        WHERE x.indrelid = c.oid AND x.indisvalid AND x.indpred IS NULL AND a.attname = 'processed_at')
         FROM pg_class AS c WHERE c.oid = to_regclass('processed_event')"
    }
}

statement! {
    OldestClaim {} -> BigInt {
        "SELECT (extract(epoch FROM processed_at::timestamptz) * 1000)::bigint FROM processed_event ORDER BY processed_at LIMIT 1"
    }
}

statement! {
    NextWriter {} -> BigInt { "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint" }
}

statement! {
    WritersAreOver { below: i64 => BigInt } -> Bool { "SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint >= :below" }
}

// Microseconds, so that the place is exact. The first condition is the index's, the second one the place within one moment: a
// transaction of others may have made any number of claims at once. What stays is passed over, and not looked at again in this run.
statement! {
    Delete<'a> {
        from: i64 => BigInt, before: i64 => BigInt, after_time: i64 => BigInt, after: Uuid => SqlUuid, other: &'a str => Text,
        most: i64 => BigInt, floor: Uuid => SqlUuid, groups: &'a [String] => Array<Text>,
    } -> (BigInt, BigInt, Nullable<BigInt>, Nullable<SqlUuid>, Nullable<Text>) {
        "WITH old AS MATERIALIZED (
             SELECT ctid AS place, event_id, consumer_group, processed_at FROM processed_event
             WHERE processed_at >= '1970-01-01 00:00:00+00'::timestamptz + :from * interval '1 microsecond'
                   AND processed_at < '1970-01-01 00:00:00+00'::timestamptz + :before * interval '1 millisecond'
                   AND (processed_at, event_id, consumer_group) >
                       ('1970-01-01 00:00:00+00'::timestamptz + :after_time * interval '1 microsecond', :after, :other)
             ORDER BY processed_at, event_id, consumer_group LIMIT :most),
         gone AS (
             DELETE FROM processed_event USING old
             WHERE processed_event.ctid = old.place AND old.event_id < :floor AND old.consumer_group = ANY(:groups)
             RETURNING 1)
         SELECT count(*), (SELECT count(*) FROM gone), last.at, last.event_id, last.consumer_group
         FROM old LEFT JOIN LATERAL (
             SELECT (extract(epoch FROM processed_at::timestamptz) * 1000000)::bigint AS at, event_id, consumer_group::text FROM old
             ORDER BY processed_at DESC, event_id DESC, consumer_group DESC LIMIT 1) AS last ON true
         GROUP BY last.at, last.event_id, last.consumer_group"
    }
}
