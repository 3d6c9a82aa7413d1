//! The statements of one batch as text, for a program that measures what the database alone does with them.
//!
//! In: nothing. Out: what the pipeline sends for a batch of new events without a provider, in its order. It owns nothing.
//!
//! Invariant: the text is made from the statements that the store runs; there is no copy that could differ.

use super::consumed_partitions::Advance;
use super::{Form, TimeLimits, consumed_partitions, payments, processed_events};
use crate::record::{Epoch, NextOffset, RecordDigest, SourceId};

/// In the order of the transaction.
#[derive(Clone, Debug)]
pub struct BatchText {
    /// Without parameters.
    pub begin: String,
    /// In the same flight. `$1` source, `$2` epoch; next offset and floor come back.
    pub fence: String,
    /// `$1` group, `$2` source, `$3` ids, `$4` digests, `$5` offsets; in the form `OnConflict` the new ids come back.
    pub claim: String,
    /// `$1` ids, `$2` group, `$3` the lowest id, `$4` the highest: what is known of ids that were not new.
    pub look_up: String,
    /// `$1` ids, `$2` orders, `$3` customers, `$4` amounts (`numeric`), `$5` currencies, `$6` statuses, `$7` charge ids, `$8` attempts; what comes
    /// back is as with the claim.
    pub insert_payments: String,
}

impl BatchText {
    /// With these limits, in this form.
    #[must_use]
    pub fn new(limits: &TimeLimits, form: Form) -> Self {
        Self {
            begin: limits.begin(),
            fence: consumed_partitions::fence_text(),
            claim: processed_events::claim_text(form),
            look_up: processed_events::look_up_text(),
            insert_payments: payments::insert_text(form),
        }
    }

    /// The frontier and COMMIT, one message; `made_ms`: the records' own time.
    #[must_use]
    pub fn end(source: SourceId, epoch: Epoch, next: NextOffset, digest: RecordDigest, made_ms: i64) -> String {
        let advance = Advance { source, epoch, next, digest: Some(digest), safe_ms: Some(made_ms) };
        consumed_partitions::advance_text(advance) + "; COMMIT"
    }
}
