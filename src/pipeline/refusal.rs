//! A record whose rows the database refuses, or over which the handler panics: whose fault an error is.
//!
//! In: an error of a transaction, and how many records it had. Out: the error, or a [`Refusal`]: then smaller parts of the batch run,
//! until the offender stands alone and is held. It owns nothing.
//!
//! Invariant: nobody is held who did not stand alone; and who stands alone and is refused even as a held row is everybody's trouble. A key
//! that the optimistic form finds taken is nobody's fault.

use crate::pipeline::dedup::BatchError;
use crate::pipeline::form::Claiming;
use crate::store::{ErrorClass, Form};

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

/// How a batch runs this time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Try<'a> {
    /// How it claims.
    pub claiming: Claiming,
    /// Its one record has been refused already.
    pub refusal: Option<&'a Refusal>,
}

/// Takes an error of effect rows or held rows.
pub(super) fn row_error(error: BatchError, records: usize, held_row: Option<i64>, this: Try<'_>) -> BatchError {
    let of_one_record = match &error {
        BatchError::Panicked => true,
        BatchError::Database(error) if this.claiming.form() == Form::Optimistic && error.is_taken() => return BatchError::Taken,
        BatchError::Database(error) => error.class() == ErrorClass::Data,
        BatchError::Fenced
        | BatchError::WentBack { .. }
        | BatchError::NoDay
        | BatchError::Taken
        | BatchError::Swallowed(_)
        | BatchError::Refused(_) => false,
    };
    if of_one_record && this.refusal.is_none() {
        BatchError::Refused(Refusal { records, held_row, error: error.to_string() })
    } else {
        error
    }
}
