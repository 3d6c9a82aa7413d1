//! Our books against the provider's.

use std::collections::BTreeMap;

use onceward::lab::provider_stub::{LedgerStatus, ProviderStub};

use super::{Order, World, assert_charged_once, eventually_equal};

/// Waits until Kafka has every record's offset and nothing waits to be tried again, and compares: for each of these orders one charge, one
/// row that names this charge, one claim, and no attempt left open; nothing else anywhere.
pub fn assert_the_books_agree<'a>(world: &World, stub: &ProviderStub, orders: impl IntoIterator<Item = &'a Order> + Clone) {
    eventually_equal("every record is settled and committed", 0, || world.topic.lag(&world.group));
    // A call that met its time limit on a busy machine is asked for again.
    let waiting = "SELECT count(*) FROM held_event WHERE state IN ('retrying', 'waiting', 'queued')";
    eventually_equal("nothing waits to be tried again", 0, || world.database.count(waiting));
    assert_charged_once(stub, orders.clone());
    let theirs: BTreeMap<String, Option<String>> = stub
        .ledger()
        .into_iter()
        .filter(|entry| entry.status == LedgerStatus::Charged)
        .map(|entry| (entry.idempotency_key, entry.charge_id))
        .collect();
    let ours = world.database.rows("SELECT event_id, provider_charge_id FROM payment WHERE status = 'charged'");
    let ours: BTreeMap<_, _> = ours.into_iter().map(|row| (row[0].clone().expect("an id"), row[1].clone())).collect();
    assert_eq!(ours, theirs);
    let [payments, claims, open] =
        ["payment", "processed_event", "(SELECT FROM attempt_batch UNION ALL SELECT FROM payment_attempt) AS open"]
            .map(|rows| world.database.count(&format!("SELECT count(*) FROM {rows}")));
    let orders = i64::try_from(orders.into_iter().count()).expect("not so many");
    assert_eq!((payments, claims, open), (orders, orders, 0), "payments, claims, open attempts");
}
