//! A record whose rows the database refuses, or over which the handler panics: whose fault an error is.
//!
//! In: an error of a transaction, and how many records it had. Out: the error, or a [`Refusal`]: then smaller parts of the batch run,
//! until the offender stands alone and is held. It owns nothing.
//!
//! Invariant: nobody is held who did not stand alone; and who stands alone and is refused even as a held row is everybody's trouble.

use crate::pipeline::dedup::BatchError;
use crate::store::ErrorClass;

/// Rows that the database refuses because of a value in them, or a record over which the handler panics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// How many records the transaction had. If it is one, that one is the offender.
    pub records: usize,
    /// The first of them, if they were held events.
    pub held_row: Option<i64>,
    /// What was said.
    pub error: String,
}

/// Takes an error of effect rows or held rows. `refusal`: the one record of this transaction has been refused already.
pub(super) fn row_error(error: BatchError, records: usize, held_row: Option<i64>, refusal: Option<&Refusal>) -> BatchError {
    let of_one_record = match &error {
        BatchError::Panicked => true,
        BatchError::Database(error) => error.class() == ErrorClass::Data,
        BatchError::Fenced
        | BatchError::WentBack { .. }
        | BatchError::NoDay
        | BatchError::Swallowed(_)
        | BatchError::Refused(_) => false,
    };
    if of_one_record && refusal.is_none() {
        BatchError::Refused(Refusal { records, held_row, error: error.to_string() })
    } else {
        error
    }
}
