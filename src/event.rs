//! An event is what a record means: an order was confirmed and shall be charged once.
//!
//! In: a record's payload ([`decode`]). Out: an [`OrderConfirmed`] whose rules all hold, or one rejection that names every fault.
//! The other way, [`OrderConfirmedBuilder`] makes events for producers. It owns nothing; if it dies here, the record is still in
//! the window.
//!
//! Invariant: two payloads with the same meaning give the same id and the same digest, however they are spelled.

mod decode;
pub mod id;
mod money;

use std::fmt::Write as _;

use chrono::{DateTime, SecondsFormat, Utc};
use uuid::{ContextV7, Timestamp, Uuid};

pub use self::decode::{MAX_DEPTH, MAX_PAYLOAD_BYTES, decode};
pub use self::money::{AmountFault, Currency, CurrencyFault, Money};
use crate::handler::{Event, EventDigest};

/// The only event type that is applied here.
pub const EVENT_TYPE: &str = "order.confirmed.v1";
/// The only aggregate type that is accepted, where one is given.
pub const AGGREGATE_TYPE: &str = "Order";

/// A confirmed order: `total` shall be charged once to the customer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OrderConfirmed {
    /// The UUID v7 that is the dedup key and, in canonical form, the provider's idempotency key (R-KFK-IDEM-1).
    pub event_id: Uuid,
    /// When the order was confirmed.
    pub occurred_at: DateTime<Utc>,
    /// Above 0.
    pub order_id: i64,
    /// Above 0.
    pub customer_id: i64,
    /// Above 0.
    pub total: Money,
}

impl Event for OrderConfirmed {
    fn worth(&self) -> Option<Money> {
        Some(self.total)
    }

    fn id(&self) -> Uuid {
        self.event_id
    }

    fn digest(&self) -> EventDigest {
        EventDigest::of(CANONICAL_FORM, &self.canonical_form())
    }
}

/// The version of [`OrderConfirmed::canonical_form`]. Digests are stored: a changed form needs a new number.
const CANONICAL_FORM: u8 = 1;

impl OrderConfirmed {
    /// The event as JSON, the amount as an exact number with the currency's decimals.
    #[must_use]
    pub fn to_json(&self) -> String {
        let mut json = String::with_capacity(256);
        let occurred_at = self.occurred_at.to_rfc3339_opts(SecondsFormat::AutoSi, true);
        // Nothing here can need an escape: digits, hexadecimal, upper-case letters.
        let written = write!(
            json,
            r#"{{"eventId":"{}","eventType":"{EVENT_TYPE}","occurredAt":"{occurred_at}","aggregateType":"{AGGREGATE_TYPE}","orderId":{},"customerId":{},"totalAmount":{},"currency":"{}"}}"#,
            self.event_id.hyphenated(),
            self.order_id,
            self.customer_id,
            self.total,
            self.total.currency(),
        );
        debug_assert!(written.is_ok(), "writing into a string cannot fail");
        json
    }

    /// All fields at fixed places, so that no two events share a form. Frozen: its hash is stored.
    fn canonical_form(&self) -> [u8; 55] {
        let mut form = [0; 55];
        form[..16].copy_from_slice(self.event_id.as_bytes());
        form[16..24].copy_from_slice(&self.occurred_at.timestamp().to_le_bytes());
        form[24..28].copy_from_slice(&self.occurred_at.timestamp_subsec_nanos().to_le_bytes());
        form[28..36].copy_from_slice(&self.order_id.to_le_bytes());
        form[36..44].copy_from_slice(&self.customer_id.to_le_bytes());
        form[44..52].copy_from_slice(&self.total.minor_units().to_le_bytes());
        form[52..].copy_from_slice(self.total.currency().code().as_bytes());
        form
    }
}

/// Makes events for producers. Ids of one builder only grow, also within a millisecond and when the clock steps back.
#[derive(Debug, Default)]
pub struct OrderConfirmedBuilder {
    context: ContextV7,
}

/// What a producer must not send.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BuildFault {
    /// Order or customer id.
    #[error("order and customer id must be above 0")]
    Id,
    /// The amount.
    #[error("the amount must be above 0")]
    Amount,
}

impl OrderConfirmedBuilder {
    /// A builder with a sequence of its own.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A new event with a new id, confirmed at `occurred_at`.
    ///
    /// # Errors
    /// An id or the amount is not above 0.
    pub fn build(
        &self,
        occurred_at: DateTime<Utc>,
        order_id: i64,
        customer_id: i64,
        total: Money,
    ) -> Result<OrderConfirmed, BuildFault> {
        if order_id <= 0 || customer_id <= 0 {
            return Err(BuildFault::Id);
        }
        if total.minor_units() <= 0 {
            return Err(BuildFault::Amount);
        }
        let event_id = Uuid::new_v7(Timestamp::now(&self.context));
        Ok(OrderConfirmed { event_id, occurred_at, order_id, customer_id, total })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event() -> OrderConfirmed {
        OrderConfirmed {
            event_id: Uuid::from_u128(0x0189_0a5d_ac96_774b_bcce_b302_099a_8057),
            occurred_at: DateTime::from_timestamp_millis(1_688_042_096_789).unwrap(),
            order_id: 42,
            customer_id: 7,
            total: Money::from_minor_units(1000, Currency::from_code("EUR").unwrap()),
        }
    }

    fn digest_of(json: &str) -> EventDigest {
        decode(Some(json.as_bytes())).unwrap().digest()
    }

    #[test]
    fn the_digest_is_frozen_because_it_is_stored() {
        assert_eq!(event().digest(), EventDigest(-6596412271418776319));
    }

    // CASES F03
    #[test]
    fn the_digest_does_not_depend_on_how_an_event_is_spelled() {
        let spellings = [
            event().to_json(),
            r#"{ "currency" : "EUR", "totalAmount": 10.0, "customerId":7, "orderId":42.0, "occurredAt":"2023-06-29T14:34:56.789+02:00",
                 "eventType":"order.confirmed.v1", "eventId":"URN:UUID:01890A5D-AC96-774B-BCCE-B302099A8057", "traceId":"x"}"#
                .to_owned(),
            event().to_json().replace("10.00", "1e1"),
            event().to_json().replace("EUR", "\\u0045UR"),
        ];
        for spelling in spellings {
            assert_eq!(digest_of(&spelling), event().digest(), "{spelling}");
        }
    }

    // CASES F03
    #[test]
    fn the_digest_changes_with_every_field() {
        let changes: [fn(&mut OrderConfirmed); 8] = [
            |e| e.event_id = Uuid::from_u128(e.event_id.as_u128() + 1),
            |e| e.occurred_at += chrono::TimeDelta::nanoseconds(1),
            |e| e.occurred_at += chrono::TimeDelta::seconds(1),
            |e| e.order_id += 1,
            |e| e.customer_id += 1,
            |e| (e.order_id, e.customer_id) = (e.customer_id, e.order_id),
            |e| e.total = Money::from_minor_units(1001, e.total.currency()),
            |e| e.total = Money::from_minor_units(1000, Currency::from_code("USD").unwrap()),
        ];
        for change in changes {
            let mut other = event();
            change(&mut other);
            assert!(event().digest().contradicts(other.digest()), "{other:?}");
        }
    }

    #[test]
    fn the_json_of_a_producer_is_frozen() {
        assert_eq!(
            event().to_json(),
            r#"{"eventId":"01890a5d-ac96-774b-bcce-b302099a8057","eventType":"order.confirmed.v1","occurredAt":"2023-06-29T12:34:56.789Z","aggregateType":"Order","orderId":42,"customerId":7,"totalAmount":10.00,"currency":"EUR"}"#
        );
    }

    // R-KFK-IDEM-1
    #[test]
    fn ids_of_one_builder_only_grow() {
        let builder = OrderConfirmedBuilder::new();
        let ids: Vec<_> = (0..10_000).map(|_| builder.build(event().occurred_at, 42, 7, event().total).unwrap().event_id).collect();
        assert!(ids.is_sorted_by(|earlier, later| earlier < later));
        assert!(ids.iter().all(|id| id.get_version_num() == 7));
    }

    #[test]
    fn a_builder_makes_nothing_that_a_consumer_would_hold() {
        let build = |order, customer, units| {
            OrderConfirmedBuilder::new().build(
                event().occurred_at,
                order,
                customer,
                Money::from_minor_units(units, event().total.currency()),
            )
        };
        assert_eq!(build(0, 7, 1), Err(BuildFault::Id));
        assert_eq!(build(42, -1, 1), Err(BuildFault::Id));
        assert_eq!(build(42, 7, 0), Err(BuildFault::Amount));
    }
}
