//! The business rows: what was charged, and what was declined.
//!
//! In: rows to write, ids to look up. Out: those that were written or found. It owns the rows of `payment`.
//!
//! Invariant: one row per event, whichever group writes it; amounts pass as exact decimals.

use std::collections::HashSet;

use uuid::Uuid;

use super::{DbError, Session};
use crate::event::Money;

/// How a payment ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PaymentStatus {
    /// The money moves.
    Charged,
    /// A business "no".
    Declined,
}

/// One row of `payment`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PaymentRow {
    /// The event that is paid for.
    pub event_id: Uuid,
    /// Its order.
    pub order_id: i64,
    /// Its customer.
    pub customer_id: i64,
    /// The exact amount.
    pub amount: Money,
    /// How it ended.
    pub status: PaymentStatus,
    /// The provider's name for the charge.
    pub provider_charge_id: Option<String>,
    /// How often the provider was asked.
    pub attempts: i32,
}

/// Writes the rows and returns the ids of those that were not there yet.
///
/// # Errors
/// The statement failed.
pub async fn insert(s: &mut Session, rows: &[PaymentRow]) -> Result<HashSet<Uuid>, DbError> {
    todo!()
}

/// The rows of `ids` that exist, in no order.
///
/// # Errors
/// The statement failed, or a row holds an amount that its currency cannot have.
pub async fn look_up(s: &mut Session, ids: &[Uuid]) -> Result<Vec<PaymentRow>, DbError> {
    todo!()
}
