//! Held events: recorded with a reason, not applied.
//!
//! In: records and why they are held. Out: those that are due. It owns the rows of `held_event`.
//!
//! Invariant: the record's bytes come back exactly as they went in, and no text of an error can be refused by the database.

use std::time::Duration;

use uuid::Uuid;

use super::{DbError, Session};
use crate::handler::HeldReason;
use crate::record::{Record, RecordDigest, SourceId};

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
}

/// Writes the rows, in their order. A record that is held already stays as it is.
///
/// # Errors
/// The statement failed.
pub async fn hold(s: &mut Session, source: SourceId, rows: &[NewHeld<'_>]) -> Result<(), DbError> {
    todo!()
}

/// Locks up to `limit` events of the partition that are due, oldest row first.
///
/// # Errors
/// The statement failed, or a row's headers are broken.
pub async fn lock_due(s: &mut Session, source: SourceId, limit: i64) -> Result<Vec<DueHeld>, DbError> {
    todo!()
}

/// Writes what became of held events that [`lock_due`] returned.
///
/// # Errors
/// The statement failed.
///
/// # Panics
/// When a row is gone.
pub async fn update(s: &mut Session, updates: &[(i64, HeldUpdate)]) -> Result<(), DbError> {
    todo!()
}

/// How long until the partition's earliest retrying event is due: zero when it is overdue, `None` when there is none.
///
/// # Errors
/// The statement failed.
pub async fn next_due(s: &mut Session, source: SourceId) -> Result<Option<Duration>, DbError> {
    todo!()
}

/// How many events of the group and topic are held, by reason and state.
///
/// # Errors
/// The statement failed, or a row has a reason or state that this program does not know.
pub async fn counts(s: &mut Session, group: &str, topic: &str) -> Result<Vec<(HeldReason, HeldState, i64)>, DbError> {
    todo!()
}
