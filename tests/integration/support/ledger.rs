//! What the provider says: the one witness that the engine cannot talk to.

use std::collections::BTreeMap;

use onceward::lab::provider_stub::{LedgerStatus, Options, ProviderStub};

use super::Order;

/// An honest provider, until it is given a script: one more than the world has.
pub fn stub() -> ProviderStub {
    ProviderStub::start(Options::default()).expect("the provider stub starts")
}

/// How often money moved under each key.
pub fn charges(stub: &ProviderStub) -> BTreeMap<String, usize> {
    let mut charges = BTreeMap::new();
    for entry in stub.ledger().into_iter().filter(|entry| entry.status == LedgerStatus::Charged) {
        *charges.entry(entry.idempotency_key).or_default() += 1;
    }
    charges
}

/// Each of these orders was charged once, under its canonical id (R-KFK-IDEM-4), and nothing else was.
pub fn assert_charged_once<'a>(stub: &ProviderStub, orders: impl IntoIterator<Item = &'a Order>) {
    let expected: BTreeMap<String, usize> = orders.into_iter().map(|order| (order.event_id.hyphenated().to_string(), 1)).collect();
    assert_eq!(charges(stub), expected);
}
