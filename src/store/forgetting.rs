//! Forgetting: the floor is raised, and the days below it are detached and dropped.
//!
//! In: how far the floor may rise. Out: what there is, and what is gone. It owns the rise of `retention.floor`, and the tables of the days
//! below it. If it dies here, the floor stands where it stood or higher, and what is half gone is found again by its name.
//!
//! Invariant: a day is touched only after a floor above it has been committed, so no id of it can be new to anybody any more.

use std::time::Duration;

use chrono::NaiveDate;
use diesel::sql_types::{BigInt, Bool, Integer, Nullable, Text, Uuid as SqlUuid};
use uuid::Uuid;

use super::session::TimeLimits;
use super::statement::statement;
use super::{DbError, Session};
use crate::event::id::first_id_of_day;

/// The table of one day.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DayTable {
    /// Its name as SQL takes it.
    pub table: String,
    /// The day.
    pub day: NaiveDate,
    /// One past its last id.
    pub end: Uuid,
    /// Where it stands.
    pub state: DayState,
    /// Claims in it, as the server estimates.
    pub rows: i64,
    /// Its size with its indexes.
    pub bytes: i64,
}

/// Where a day's table stands on its way out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DayState {
    /// Claims go into it.
    Attached,
    /// Nobody finds it any more; the detach waits for those who did, or was cut off.
    Detaching,
    /// A table by itself.
    Detached,
}

/// What a partition's owner has said about how far its claims may be forgotten.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standing {
    /// The consumer group.
    pub group: String,
    /// The topic.
    pub topic: String,
    /// The partition.
    pub partition: i32,
    /// No unsettled event of it is older; milliseconds since 1970.
    pub safe_ms: Option<i64>,
    /// How long the group needs ids remembered; `None`: not known yet, or for ever.
    pub remember_ms: Option<i64>,
    /// What asks for that.
    pub remember_why: Option<String>,
}

/// The tables of days, oldest first: partitions of `processed_event`, and what was detached from it. Only those whose name is one that we
/// give.
///
/// # Errors
/// The statement failed.
pub async fn day_tables(s: &mut Session) -> Result<Vec<DayTable>, DbError> {
    type Row = (String, String, i32, Option<Uuid>, i64, i64);
    let rows: Vec<Row> = s.within("day_tables", async |s| s.rows("day_tables", DayTables {}).await).await?;
    let read = |(table, day, state, end, rows, bytes): Row| {
        let day = NaiveDate::parse_from_str(&day, "%Y_%m_%d").ok()?; // 2026_02_31 is no name of ours
        let next = day.to_epoch_days() + 1;
        let end = end.unwrap_or_else(|| first_id_of_day(i64::from(next)));
        let state = [DayState::Attached, DayState::Detaching, DayState::Detached][usize::try_from(state).ok()?];
        Some(DayTable { table, day, end, state, rows, bytes })
    };
    Ok(rows.into_iter().filter_map(read).collect())
}

/// What every partition's owner has said, of all groups: they share the table.
///
/// # Errors
/// The statement failed.
pub async fn standings(s: &mut Session) -> Result<Vec<Standing>, DbError> {
    type Row = (String, String, i32, Option<i64>, Option<i64>, Option<String>);
    let rows: Vec<Row> = s.within("standings", async |s| s.rows("standings", Standings {}).await).await?;
    let read = |(group, topic, partition, safe_ms, remember_ms, remember_why): Row| Standing {
        group,
        topic,
        partition,
        safe_ms,
        remember_ms,
        remember_why,
    };
    Ok(rows.into_iter().map(read).collect())
}

/// Raises the floor to `floor` and commits; it never falls. Out: where it stands now; `None` while there is none.
///
/// # Errors
/// The statement failed.
pub async fn raise_floor(s: &mut Session, floor: Uuid) -> Result<Option<Uuid>, DbError> {
    s.within("raise_floor", async |s| s.row("raise_floor", RaiseFloor { floor }).await).await
}

/// Runs `work` unless somebody else runs it now: `None` then. The lock is that of a transaction which does nothing else, so that it is
/// gone when the connection is, whatever stands between us and the server.
///
/// # Errors
/// The lock cannot be asked for, or was lost before the work was done.
pub async fn one_at_a_time<T>(s: &mut Session, limit: Duration, work: impl AsyncFnOnce() -> T) -> Result<Option<T>, DbError> {
    let limits = TimeLimits { idle_in_transaction: limit, budget: limit, ..s.limits() };
    s.alone("one_cleaner", limits, async |s| {
        if s.row("one_cleaner", LockCleaners {}).await? != Some(true) {
            return Ok(None);
        }
        // That query's snapshot lives until another query takes its place, and the end of a detach waits for every older snapshot: the
        // cleaner would wait for its own lock.
        s.script("one_cleaner", "SELECT").await?;
        Ok(Some(work().await))
    })
    .await
}

/// Gives this session the patience that [`detach`], [`finish_detach`] and [`drop_table`] need, which run outside of transactions. It is to
/// be used for nothing else afterwards.
///
/// # Errors
/// The statement failed.
pub async fn be_patient(s: &mut Session, lock: Duration, statement: Duration) -> Result<(), DbError> {
    let (lock, statement) = (lock.as_millis().max(1), statement.as_millis().max(1));
    s.script("be_patient", &format!("SET lock_timeout = {lock}; SET statement_timeout = {statement}")).await
}

/// Takes a day out of `processed_event`. It waits for every transaction that has looked at it, and makes nobody else wait.
///
/// # Errors
/// 55P03 when such a transaction lasts too long: the day is found by nobody any more, and [`finish_detach`] does the rest another time.
pub async fn detach(s: &mut Session, table: &str) -> Result<(), DbError> {
    s.script("detach", &format!("ALTER TABLE processed_event DETACH PARTITION {table} CONCURRENTLY")).await
}

/// Ends a detach that was cut off; while there is one, no other can begin.
///
/// # Errors
/// As [`detach`].
pub async fn finish_detach(s: &mut Session, table: &str) -> Result<(), DbError> {
    s.script("finish_detach", &format!("ALTER TABLE processed_event DETACH PARTITION {table} FINALIZE")).await
}

/// Drops a day that was detached.
///
/// # Errors
/// 55P03 when somebody reads it for too long.
pub async fn drop_table(s: &mut Session, table: &str) -> Result<(), DbError> {
    s.script("drop_day", &format!("DROP TABLE {table}")).await
}

// Next to the makers' lock.
statement! {
    LockCleaners {} -> Bool { "SELECT pg_try_advisory_xact_lock(7957702, 3)" }
}

statement! {
    RaiseFloor { floor: Uuid => SqlUuid } -> SqlUuid { "UPDATE retention SET floor = greatest(floor, :floor) RETURNING floor" }
}

// A table of such a name that is a partition of something else is not ours.
statement! {
    DayTables {} -> (Text, Text, Integer, Nullable<SqlUuid>, BigInt, BigInt) {
        r"SELECT day.oid::regclass::text, substr(day.relname, 17),
                 CASE WHEN link.inhdetachpending THEN 1 WHEN link.inhrelid IS NOT NULL THEN 0 ELSE 2 END,
                 (regexp_match(pg_get_expr(day.relpartbound, day.oid), $$ TO \('([^']+)'\)$$))[1]::uuid,
                 greatest(day.reltuples, 0)::bigint, coalesce(pg_total_relation_size(day.oid), 0)
          FROM pg_class AS parent
               JOIN pg_class AS day ON day.relnamespace = parent.relnamespace AND day.relkind = 'r'
                    AND day.relname ~ '^processed_event_\d{4}_\d{2}_\d{2}$'
               LEFT JOIN pg_inherits AS link ON link.inhrelid = day.oid AND link.inhparent = parent.oid
          WHERE parent.oid = 'processed_event'::regclass AND (link.inhrelid IS NOT NULL OR NOT day.relispartition)
          ORDER BY day.relname"
    }
}

statement! {
    Standings {} -> (Text, Text, Integer, Nullable<BigInt>, Nullable<BigInt>, Nullable<Text>) {
        "SELECT consumer_group, topic, partition, floor(extract(epoch FROM safe_time) * 1000)::bigint, remember_ms, remember_why
         FROM consumed_partition
         ORDER BY consumer_group, topic, partition"
    }
}
