//! The claims: one row per event and group, kept for as long as the floor allows.
//!
//! In: ids. Out: those that were new. It owns the rows of `processed_event`.
//!
//! Invariant: an id is claimed once per group, however many sessions try, on whichever day and with whatever offset.

use std::collections::HashSet;

use uuid::Uuid;

use super::{DbError, Session};
use crate::handler::EventDigest;
use crate::record::{Offset, SourceId};

/// One event to claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClaimRow {
    /// The dedup key.
    pub event_id: Uuid,
    /// Tells a repeated event from a conflicting one.
    pub digest: EventDigest,
    /// Explains a duplicate; never a key.
    pub offset: Offset,
}

/// A claim that exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The claimed id.
    pub event_id: Uuid,
    /// The event's digest, if its claim has one.
    pub digest: Option<EventDigest>,
    /// The partition that claimed it.
    pub source: Option<SourceId>,
    /// Its record's offset there.
    pub offset: Option<Offset>,
}

/// Claims the events and returns the ids that are new. An id that another open transaction claims is waited for.
///
/// # Errors
/// 23514: a day is missing, see [`super::retention::ensure_days`].
pub async fn claim(s: &mut Session, group: &str, source: SourceId, rows: &[ClaimRow]) -> Result<HashSet<Uuid>, DbError> {
    todo!()
}

/// The claims of `ids` that exist, in no order.
///
/// # Errors
/// The statement failed.
pub async fn look_up(s: &mut Session, group: &str, ids: &[Uuid]) -> Result<Vec<Seen>, DbError> {
    todo!()
}

/// Deletes claims that this transaction made: the events stay in the window.
///
/// # Errors
/// The statement failed.
///
/// # Panics
/// When one of them is not there.
pub async fn give_back(s: &mut Session, group: &str, ids: &[Uuid]) -> Result<(), DbError> {
    todo!()
}
