//! Attempts: what the provider may have heard of, and in which bytes.
//!
//! In: the bytes that are about to be posted. Out: what is known of the events already. It owns `attempt_batch` (in flight) and
//! `payment_attempt` (left without a payment).
//!
//! Invariant: an attempt is durable before the provider hears of it, and is kept until its event has a `payment` row.

use std::time::Duration;

use uuid::Uuid;

use super::payments::PaymentRow;
use super::{DbError, Session};
use crate::handler::EventDigest;
use crate::record::{Epoch, SourceId};

/// An attempt that is about to begin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewAttempt {
    /// The event, and the idempotency key.
    pub event_id: Uuid,
    /// Its content.
    pub digest: EventDigest,
    /// The bytes to post.
    pub body: Vec<u8>,
}

/// An attempt of earlier, or of another partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnownAttempt {
    /// The event.
    pub event_id: Uuid,
    /// The content it had.
    pub digest: EventDigest,
    /// The bytes that must be posted again; `None` = never built.
    pub body: Option<Vec<u8>>,
    /// How long ago it began, by the database's clock.
    pub first_attempt_age: Duration,
    /// Answers that told nothing.
    pub unknown_answers: i32,
    /// The last answer, in words.
    pub answer: Option<String>,
    /// The provider's name for the charge, if it said one.
    pub provider_charge_id: Option<String>,
}

/// What is known of the events of a batch whose attempts are now durable.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Opened {
    /// Payments that exist, whoever made them.
    pub payments: Vec<PaymentRow>,
    /// Earlier attempts, one per event: the earliest time and its bytes, all unknown answers.
    pub attempts: Vec<KnownAttempt>,
}

/// An attempt that was begun and ends without a payment row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BegunAttempt {
    /// The event.
    pub event_id: Uuid,
    /// Its content.
    pub digest: EventDigest,
    /// The bytes that were posted.
    pub body: Vec<u8>,
    /// Answers of this batch that told nothing, to be added.
    pub unknown_answers: i32,
    /// The last answer, in words.
    pub answer: Option<String>,
    /// The provider's name for the charge, if it said one.
    pub provider_charge_id: Option<String>,
}

/// Makes the attempts durable before anybody is called, on a session other than the batch's own. `None`: fenced, call nobody.
///
/// # Errors
/// A statement failed: call nobody.
pub async fn open(s: &mut Session, source: SourceId, epoch: Epoch, attempts: &[NewAttempt]) -> Result<Option<Opened>, DbError> {
    todo!()
}

/// Settles the attempts of a partition, in the batch's transaction: its batch rows go, events begun without a payment are kept,
/// those of `paid` are forgotten.
///
/// # Errors
/// A statement failed.
pub async fn settle(
    s: &mut Session,
    source: SourceId,
    begun_without_payment: &[BegunAttempt],
    paid: &[Uuid],
) -> Result<(), DbError> {
    todo!()
}

/// Turns what a crash left of the partition's attempts into one unknown answer each, unless the event was paid. To be called after
/// every bump. Returns how many events.
///
/// # Errors
/// A statement failed.
pub async fn convert_leftovers(s: &mut Session, source: SourceId) -> Result<u64, DbError> {
    todo!()
}

/// The same for attempts of any partition that are older than any transaction can be.
///
/// # Errors
/// A statement failed.
pub async fn convert_stale(s: &mut Session, older_than: Duration) -> Result<u64, DbError> {
    todo!()
}
