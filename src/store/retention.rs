//! The floor and the days above it.
//!
//! In: days that are needed. Out: partitions of `processed_event`, one a day. It owns the partitions and the row of `retention`.
//!
//! Invariant: no day below the floor is ever made, so an id that was forgotten is never new.

use std::collections::BTreeSet;
use std::time::Duration;

use uuid::Uuid;

use super::{DbError, Session};

/// The day of a UUID v7, counted from 1970-01-01 (UTC).
#[must_use]
pub fn day_of(id: Uuid) -> i64 {
    todo!()
}

/// The lowest UUID v7 of a day.
#[must_use]
pub fn first_id_of_day(day: i64) -> Uuid {
    todo!()
}

/// The floor; `None` before the first run.
///
/// # Errors
/// The statement failed.
pub async fn floor(s: &mut Session) -> Result<Option<Uuid>, DbError> {
    todo!()
}

/// The floor. The first caller sets it: the database's day, less the longer of `retention` and the age of the topic's oldest record,
/// less one day.
///
/// # Errors
/// The statement failed.
pub async fn init_floor(s: &mut Session, retention: Duration, oldest_record_ms: Option<i64>) -> Result<Uuid, DbError> {
    todo!()
}

/// Makes the given days, unless they are there or lie below the floor. Never to be called inside a batch's transaction.
///
/// # Errors
/// A statement failed; 55P03 (class `Retry`) when another session holds a lock for too long. There is no floor yet.
pub async fn ensure_days(s: &mut Session, days: &BTreeSet<i64>) -> Result<(), DbError> {
    todo!()
}

/// Makes today (by the database's clock) and the `days` after it.
///
/// # Errors
/// As [`ensure_days`].
pub async fn ensure_days_ahead(s: &mut Session, days: u32) -> Result<(), DbError> {
    todo!()
}

/// The ranges of ids, `[from, to)`, for which there is a partition, in their order.
///
/// # Errors
/// The statement failed.
pub async fn days(s: &mut Session) -> Result<Vec<(Uuid, Uuid)>, DbError> {
    todo!()
}
