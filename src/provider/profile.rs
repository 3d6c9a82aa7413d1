//! What differs between payment providers, in one place.
//!
//! In: configuration. Out: the bytes of a charge, the words of its answers, the life of a key. It owns nothing.
//!
//! Invariant: [`Profile::charge_body`] is the only place that builds those bytes. They are stored before the first call and posted
//! again as they are, so that no release can change what an old key was used with.

use std::time::Duration;

use crate::config::{AmountForm, ProviderQuery};
use crate::event::Money;

/// How one provider wants to be spoken to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profile {
    /// The form of the amount on the wire.
    pub amount: AmountForm,
    /// How long the provider remembers an idempotency key.
    pub key_life: Duration,
    /// How long before that end a key is treated as forgotten: two clocks, and the time of a call.
    pub key_life_margin: Duration,
    /// How it is asked what became of a charge whose key it may have forgotten.
    pub query: ProviderQuery,
    /// "No such charge" is believed only so long after the last attempt: what is on its way, or not yet in its index, is not found.
    pub query_settle: Duration,
    /// The longest `Retry-After` that is obeyed.
    pub retry_after_cap: Duration,
    /// A known key always gets its first answer again, so that a refusal after an unknown answer proves that nothing was charged.
    pub replays_stored_answers: bool,
}

/// The path of a charge below the provider's base address.
pub const CHARGES_PATH: &str = "/v1/charges";

impl Profile {
    /// The body of `POST /v1/charges`, in its one spelling.
    #[must_use]
    pub fn charge_body(&self, order_id: i64, amount: Money) -> Vec<u8> {
        let currency = amount.currency();
        let body = match self.amount {
            AmountForm::Decimal => format!(r#"{{"orderId":{order_id},"amount":{amount},"currency":"{currency}"}}"#),
            AmountForm::MinorUnits => {
                format!(r#"{{"orderId":{order_id},"amount":{},"currency":"{currency}"}}"#, amount.minor_units())
            }
        };
        body.into_bytes()
    }

    /// Whether a key that was first used so long ago may be used again without the risk of a second charge.
    #[must_use]
    pub fn still_knows_key(&self, first_attempt_age: Duration) -> bool {
        first_attempt_age < self.key_life.saturating_sub(self.key_life_margin)
    }

    /// Whether an error answer means "this key was used with another body". Providers send it as 400, 409 or 422.
    pub(super) fn is_other_body(&self, kind: &str, code: &str) -> bool {
        const CODES: [&str; 3] = ["idempotency_key_reused", "idempotency_mismatch", "parameter_mismatch"];
        const IN_USE: &str = "idempotency_key_in_use";
        CODES.contains(&code) || CODES.contains(&kind) || kind == "idempotency_error" && code != IN_USE
    }

    /// Whether a 404 means that there is no such charge, and not that there is no such place. "not_found" could be either.
    pub(super) fn is_no_such_charge(&self, code: &str) -> bool {
        matches!(code, "resource_missing" | "charge_not_found")
    }

    /// Whether the `status` in the body of a charge says that the money moves.
    pub(super) fn is_success(&self, status: &str) -> bool {
        matches!(status, "succeeded" | "charged" | "paid" | "captured")
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::event::Currency;

    pub(crate) fn profile() -> Profile {
        Profile {
            amount: AmountForm::Decimal,
            key_life: Duration::from_secs(24 * 3600),
            key_life_margin: Duration::from_secs(3600),
            query: ProviderQuery::None,
            query_settle: Duration::from_secs(600),
            retry_after_cap: Duration::from_secs(60),
            replays_stored_answers: false,
        }
    }

    // CASES F10, F12, G04: the bytes are stored and posted again, so they must never change.
    #[test]
    fn the_bytes_of_a_charge_are_frozen() {
        for (code, minor_units, decimal, whole) in [
            ("EUR", 1000, "10.00", "1000"),
            ("EUR", 1, "0.01", "1"),
            ("EUR", 1999, "19.99", "1999"),
            ("EUR", 500, "5.00", "500"),
            ("USD", 9_007_199_254_740_993, "90071992547409.93", "9007199254740993"),
            ("JPY", 500, "500", "500"),
            ("KWD", 1234, "1.234", "1234"),
            ("KWD", 5, "0.005", "5"),
            ("EUR", i64::MAX, "92233720368547758.07", "9223372036854775807"),
        ] {
            let amount = Money::from_minor_units(minor_units, Currency::from_code(code).unwrap());
            for (form, number) in [(AmountForm::Decimal, decimal), (AmountForm::MinorUnits, whole)] {
                let body = Profile { amount: form, ..profile() }.charge_body(7, amount);
                let expected = format!(r#"{{"orderId":7,"amount":{number},"currency":"{code}"}}"#);
                assert_eq!(String::from_utf8(body).unwrap(), expected, "{form:?}");
            }
        }
    }

    #[test]
    fn a_key_is_trusted_until_its_life_less_the_margin() {
        let hours = |h: u64| Duration::from_secs(h * 3600);
        assert!(profile().still_knows_key(Duration::ZERO));
        assert!(profile().still_knows_key(hours(23) - Duration::from_nanos(1)));
        assert!(!profile().still_knows_key(hours(23)));
        assert!(!Profile { key_life: hours(1), ..profile() }.still_knows_key(Duration::ZERO), "a margin as long as the life");
    }
}
