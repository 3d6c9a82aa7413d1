//! Events as any producer would write them: plain text, made without a line of the code under test.

use std::sync::atomic::{AtomicI64, Ordering};

use uuid::{Builder, Uuid};

use super::Message;

/// One confirmed order.
#[derive(Clone, Debug)]
pub struct Order {
    pub event_id: Uuid,
    pub order_id: i64,
    pub customer_id: i64,
    /// The number as it stands in the JSON text.
    pub amount: String,
    pub currency: String,
}

impl Order {
    /// A new order of 10.00 EUR with an id of its own.
    pub fn new() -> Self {
        static NEXT: AtomicI64 = AtomicI64::new(1);
        let order_id = NEXT.fetch_add(1, Ordering::Relaxed);
        Self { event_id: Uuid::now_v7(), order_id, customer_id: 7, amount: "10.00".to_owned(), currency: "EUR".to_owned() }
    }

    /// So many new orders.
    pub fn some(count: usize) -> Vec<Self> {
        (0..count).map(|_| Self::new()).collect()
    }

    /// The same order, whose id was made so many milliseconds after 1970.
    pub fn made_at(mut self, ms: i64) -> Self {
        let mut random = [0; 10];
        random.copy_from_slice(&Uuid::now_v7().as_bytes()[6..]);
        self.event_id = Builder::from_unix_timestamp_millis(u64::try_from(ms).expect("after 1970"), &random).into_uuid();
        self
    }

    /// When its id was made, in milliseconds since 1970.
    pub fn made_ms(&self) -> i64 {
        i64::try_from(self.event_id.as_u128() >> 80).expect("48 bits")
    }

    /// The same order with another amount, as a number in JSON.
    pub fn amount(mut self, amount: &str) -> Self {
        amount.clone_into(&mut self.amount);
        self
    }

    /// The same order in another currency.
    pub fn currency(mut self, currency: &str) -> Self {
        currency.clone_into(&mut self.currency);
        self
    }

    /// The payload.
    pub fn json(&self) -> String {
        format!(
            r#"{{"eventId":"{}","eventType":"order.confirmed.v1","occurredAt":"2026-01-05T10:15:30.123Z","aggregateType":"Order","orderId":{},"customerId":{},"totalAmount":{},"currency":"{}"}}"#,
            self.event_id, self.order_id, self.customer_id, self.amount, self.currency
        )
    }

    /// The record, keyed by order id.
    pub fn message(&self) -> Message {
        Message::new(self.json()).key(self.order_id.to_string())
    }

    /// The record, as old as its event.
    pub fn old_message(&self) -> Message {
        self.message().timestamp_ms(self.made_ms())
    }
}
