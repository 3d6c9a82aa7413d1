//! The floor and the days above it.
//!
//! In: days that are needed. Out: partitions of `processed_event`, one a day. It owns the partitions and the row of `retention`.
//!
//! Invariant: no day below the floor is ever made, so an id that was forgotten is never new.

use std::collections::BTreeSet;
use std::time::Duration;

use chrono::DateTime;
use diesel::prelude::*;
use diesel::sql_types::{BigInt, Uuid as SqlUuid};
use uuid::Uuid;

use super::old_claims;
use super::processed_events::ClaimTable;
use super::schema::retention;
use super::statement::statement;
use super::{DbError, Session, milliseconds, our_time};
use crate::event::id::{DAY_MS, first_id_of_day, first_id_of_ms, unix_ms};

/// What there is of the table of claims.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// The database's time, in milliseconds since 1970.
    pub now_ms: i64,
    /// Ids below are forgotten; `None` before the first run.
    pub floor: Option<Uuid>,
    /// The ranges of ids, `[from, to)`, for which there is a partition, in their order.
    pub days: Vec<(Uuid, Uuid)>,
}

impl Kept {
    /// How many days after today are there without a hole between them; −1 when today itself is missing.
    #[must_use]
    pub fn days_ahead(&self) -> i64 {
        let today = self.now_ms.div_euclid(DAY_MS);
        let is_there =
            |day: &i64| self.days.iter().any(|(from, to)| *from <= first_id_of_day(*day) && first_id_of_day(*day + 1) <= *to);
        (today..).take_while(is_there).count() as i64 - 1
    }

    /// How old an id is, in milliseconds.
    #[must_use]
    pub fn age_ms(&self, id: Uuid) -> i64 {
        self.now_ms - unix_ms(id)
    }
}

/// What there is, by the database's clock.
///
/// # Errors
/// The statement failed.
pub async fn kept(s: &mut Session) -> Result<Kept, DbError> {
    s.within("kept", async |s| {
        let now_ms = now_ms(s).await?;
        let floor = s.row("kept", retention::table.select(retention::floor)).await?;
        Ok(Kept { now_ms, floor, days: s.rows("kept", Days {}).await? })
    })
    .await
}

/// The database's time, in milliseconds since 1970.
///
/// # Errors
/// The statement failed.
pub async fn database_time(s: &mut Session) -> Result<i64, DbError> {
    s.within("now", async |s| now_ms(s).await).await
}

/// The earlier of the database's time and ours, in milliseconds since 1970: whatever is forgotten goes by it, so that one clock that
/// jumps ahead forgets nothing. What was raised by such a jump could never be lowered again.
///
/// # Errors
/// The statement failed.
pub async fn earlier_time(s: &mut Session) -> Result<i64, DbError> {
    Ok(database_time(s).await?.min(our_time()))
}

/// The floor; `None` before the first run.
///
/// # Errors
/// The statement failed.
pub async fn floor(s: &mut Session) -> Result<Option<Uuid>, DbError> {
    s.within("floor", async |s| s.row("floor", retention::table.select(retention::floor)).await).await
}

/// The floor. The first caller sets it: today (the earlier clock's), less the longer of `retention` and the age of the topic's oldest
/// record, less one day. Of a plain table with claims it is the time of the oldest one, if that is later: the service that made them may have
/// deleted those before.
///
/// # Errors
/// The statement failed.
pub async fn init_floor(s: &mut Session, retention: Duration, oldest_record_ms: Option<i64>) -> Result<Uuid, DbError> {
    s.within("init_floor", async |s| {
        let now_ms = now_ms(s).await?.min(our_time());
        let kept_ms = milliseconds(retention).max(oldest_record_ms.map_or(0, |oldest| now_ms - oldest));
        let mut first = first_id_of_day((now_ms - kept_ms).div_euclid(DAY_MS) - 1);
        if !ClaimTable::read(s).await?.by_day {
            let oldest = old_claims::oldest_claim_ms(s).await?.and_then(|oldest| u64::try_from(oldest).ok());
            first = first.max(oldest.map_or(first, first_id_of_ms));
        }
        let insert = diesel::insert_into(retention::table).values(retention::floor.eq(first)).on_conflict_do_nothing();
        s.change("init_floor", insert).await?;
        let stored = s.row("init_floor", retention::table.select(retention::floor)).await?;
        Ok(stored.expect("written above, or there already"))
    })
    .await
}

/// Makes the given days, unless they are there or lie below the floor. Never to be called inside a batch's transaction.
///
/// # Errors
/// A statement failed; 55P03 (class `Retry`) when another session holds a lock for too long. There is no floor yet.
pub async fn ensure_days(s: &mut Session, days: &BTreeSet<i64>) -> Result<(), DbError> {
    if days.is_empty() {
        return Ok(());
    }
    let limits = s.limits();
    s.alone("ensure_days", limits, async |s| {
        s.script("ensure_days", LOCK_MAKERS).await?;
        // Held to the end, so that the floor cannot be raised past a day while that day is being made.
        let floor = s.row("ensure_days", retention::table.select(retention::floor).for_share()).await?;
        let floor: Uuid = floor.ok_or_else(|| DbError::program("ensure_days", "the retention floor is not set yet"))?;
        let there = self::days(s).await?;
        for day in days {
            let (from, to) = (first_id_of_day(*day), first_id_of_day(day + 1));
            if from >= floor && !there.iter().any(|(first, end)| *first <= from && to <= *end) {
                s.script("ensure_days", &make_day(*day, from, to)).await?;
            }
        }
        Ok(())
    })
    .await
}

/// Makes today (by the database's clock) and the `days` after it.
///
/// # Errors
/// As [`ensure_days`].
pub async fn ensure_days_ahead(s: &mut Session, days: u32) -> Result<(), DbError> {
    let today = database_time(s).await?.div_euclid(DAY_MS);
    ensure_days(s, &(today..=today + i64::from(days)).collect()).await
}

/// The ranges of ids, `[from, to)`, for which there is a partition, in their order.
///
/// # Errors
/// The statement failed.
pub async fn days(s: &mut Session) -> Result<Vec<(Uuid, Uuid)>, DbError> {
    s.within("days", async |s| s.rows("days", Days {}).await).await
}

/// Whoever makes days does so alone. The lock's number is one that nobody else uses.
const LOCK_MAKERS: &str = "SELECT pg_advisory_xact_lock(7957702, 2)";

/// A table of its own that is then attached: unlike `CREATE … PARTITION OF` this never makes an insert wait, even behind a long
/// transaction. The table is empty, so there is nothing to scan and no CHECK is needed to avoid it.
fn make_day(day: i64, from: Uuid, to: Uuid) -> String {
    let name = DateTime::from_timestamp_millis(day * DAY_MS).unwrap_or_default().format("processed_event_%Y_%m_%d");
    format!(
        "CREATE TABLE {name} (LIKE processed_event INCLUDING ALL);
         ALTER TABLE processed_event ATTACH PARTITION {name} FOR VALUES FROM ('{from}') TO ('{to}')"
    )
}

async fn now_ms(s: &mut Session) -> Result<i64, DbError> {
    Ok(s.row("now", Now {}).await?.expect("one row"))
}

statement! {
    Now {} -> BigInt { "SELECT (extract(epoch FROM statement_timestamp()) * 1000)::bigint" }
}

statement! {
    Days {} -> (SqlUuid, SqlUuid) {
        r"SELECT bounds[1]::uuid, bounds[2]::uuid
          FROM pg_inherits JOIN pg_class AS day ON day.oid = inhrelid,
               regexp_match(pg_get_expr(day.relpartbound, day.oid), $$FROM \('([^']+)'\) TO \('([^']+)'\)$$) AS bounds
          WHERE inhparent = 'processed_event'::regclass AND NOT inhdetachpending AND bounds IS NOT NULL
          ORDER BY 1"
    }
}
