//! What goes wrong in the demo: the provider's lies, records that are no orders, records that contradict one; and one honest order.
//!
//! Out: rules and payloads. It owns nothing.
//! Invariant: nothing here has a line break in it, for the payloads travel through a file of lines.

use anyhow::{Context as _, Result};
use chrono::Utc;
use uuid::Uuid;

use crate::event::{Currency, Money, OrderConfirmedBuilder};
use crate::lab::provider_stub::{Act, Rule, When};
use crate::produce::LogLine;

/// The lies, for people; [`lies`] tells them.
pub const LIES: [&str; 4] = [
    "some orders it charges, and closes the connection before the answer or in the middle of it",
    "some calls it resets, or answers with 500, 409 or 429: they have to be made again",
    "one call it never answers, and one so late that the engine is killed meanwhile",
    "some orders are honestly declined, some refused for good",
];

/// The provider's script; the call number `last_call` is charged and gets no answer until it is released.
pub fn lies(last_call: u64) -> Vec<Rule> {
    let mut rules = vec![
        Rule { when: When { nth: Some(last_call), ..When::default() }, ..Rule::always(Act::Hold) },
        Rule { when: When { nth: Some(last_call / 3), ..When::default() }, ..Rule::always(Act::busy(429, "1")) },
        Rule { when: When { nth: Some(last_call / 2), ..When::default() }, ..Rule::always(Act::Silence { charge: true }) },
    ];
    let shares = [
        (20, Act::declined()),
        (10, Act::Close { charge: true, reset: false }),
        (5, Act::HalfAnswer),
        (5, Act::Close { charge: false, reset: true }),
        (3, Act::status(500)),
        (3, Act::InProgress),
        (1, Act::status(400)),
    ];
    rules.extend(shares.into_iter().zip(1..).map(|((per_mille, act), seed)| Rule::for_share(per_mille, seed, act)));
    rules
}

/// Some of [`KINDS`], in words.
pub const EXAMPLE: &str = "broken JSON, 10.001 EUR, an id that is no UUID v7, …";

/// Kinds of poison. `{id}` stands for a new UUID v7.
pub const KINDS: [&[u8]; 12] = [
    b"this is no JSON",
    br#"{"eventId":"{id}","eventType":"order.confirmed.v1","occurredAt":"2026-01-05T10:15"#,
    b"\xff\xfe\x00not even text\x00",
    b"[]",
    br#"{"eventId":"{id}"}"#,
    br#"{"eventId":"9f8b6c1e-3d3f-4c55-8a5e-2f7f0a4f3b11","eventType":"order.confirmed.v1","occurredAt":"2026-01-05T10:15:30Z","orderId":1,"customerId":1,"totalAmount":10.00,"currency":"EUR"}"#,
    br#"{"eventId":"{id}","eventType":"order.cancelled.v1","occurredAt":"2026-01-05T10:15:30Z","orderId":1,"customerId":1,"totalAmount":10.00,"currency":"EUR"}"#,
    br#"{"eventId":"{id}","eventType":"order.confirmed.v1","occurredAt":"yesterday","orderId":1,"customerId":1,"totalAmount":10.00,"currency":"EUR"}"#,
    br#"{"eventId":"{id}","eventType":"order.confirmed.v1","occurredAt":"2026-01-05T10:15:30Z","orderId":1,"customerId":1,"totalAmount":10.001,"currency":"EUR"}"#,
    br#"{"eventId":"{id}","eventType":"order.confirmed.v1","occurredAt":"2026-01-05T10:15:30Z","orderId":1,"customerId":1,"totalAmount":-10.00,"currency":"EUR"}"#,
    br#"{"eventId":"{id}","eventType":"order.confirmed.v1","occurredAt":"2026-01-05T10:15:30Z","orderId":1,"customerId":1,"totalAmount":10.00,"currency":"GOLD"}"#,
    br#"{"eventId":"{id}","eventType":"order.confirmed.v1","occurredAt":"2026-01-05T10:15:30Z","orderId":1,"customerId":1,"totalAmount":10.00,"totalAmount":99.00,"currency":"EUR"}"#,
];
/// Records of each kind.
const OF_EACH: usize = 10;

/// Payloads that are no orders.
pub fn poison() -> Vec<Vec<u8>> {
    KINDS.iter().flat_map(|kind| (0..OF_EACH).map(|_| with_new_id(kind))).collect()
}

/// One honest order, to be sent again by whoever watches.
pub fn an_order() -> Result<Vec<u8>> {
    let total = Money::from_decimal("42.00", Currency::from_code("EUR")?)?;
    Ok(OrderConfirmedBuilder::new().build(Utc::now(), 5_000_000, 7, total)?.to_json().into_bytes())
}

/// Every so many orders, one is contradicted.
const CONFLICT_EVERY: usize = 400;

/// Payloads that repeat an order's id with another amount.
pub fn conflicts(produced: &[LogLine]) -> Result<Vec<Vec<u8>>> {
    let conflict = |line: &LogLine| {
        let (id, order) = (line.event_id.context("an id")?, line.order.context("an order")?);
        Ok(format!(
            r#"{{"eventId":"{id}","eventType":"order.confirmed.v1","occurredAt":"2026-01-05T10:15:30Z","orderId":{order},"customerId":1,"totalAmount":1000000,"currency":"EUR"}}"#
        )
        .into_bytes())
    };
    produced.iter().filter(|line| line.fault.is_none()).step_by(CONFLICT_EVERY).map(conflict).collect()
}

fn with_new_id(kind: &[u8]) -> Vec<u8> {
    const ID: &[u8] = b"{id}";
    let Some(at) = kind.windows(ID.len()).position(|window| window == ID) else { return kind.to_vec() };
    [&kind[..at], Uuid::now_v7().to_string().as_bytes(), &kind[at + ID.len()..]].concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event;

    #[test]
    fn no_kind_of_poison_is_an_order_and_none_breaks_the_line() {
        for payload in poison() {
            assert!(event::decode(Some(&payload)).is_err(), "{}", String::from_utf8_lossy(&payload));
            assert!(!payload.contains(&b'\n'));
        }
    }

    #[test]
    fn a_conflict_is_an_order_with_a_known_id() {
        let line = LogLine { event_id: Some(Uuid::now_v7()), order: Some(7), ..LogLine::default() };
        let conflicts = conflicts(std::slice::from_ref(&line)).unwrap();
        let event = event::decode(Some(&conflicts[0])).unwrap();
        assert_eq!((Some(event.event_id), Some(event.order_id)), (line.event_id, line.order));
    }
}
