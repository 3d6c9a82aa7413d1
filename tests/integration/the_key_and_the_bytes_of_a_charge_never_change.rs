//! A retry in another spelling of the key is another charge, and a retry in other bytes is refused by the provider (or, worse, taken).
//! So the key is the canonical event id and the body is the stored one, on every attempt: whatever the producer wrote, whatever was
//! restarted, whatever the configuration says now. R-KFK-IDEM-4.

use std::collections::BTreeMap;

use onceward::lab::provider_stub::{Act, Rule};

use crate::support::{Message, Order, World, assert_the_books_agree, charges, eventually, eventually_equal, stub};

// CASES F14, G04
#[test]
fn every_spelling_of_an_id_and_of_a_number_is_the_same_charge() {
    let (world, stub) = (World::with_partitions(1), stub());
    let order = Order::new();
    let id = order.event_id;
    let mut upper = [0; 36];
    let spellings = [
        id.hyphenated().encode_upper(&mut upper).to_owned(),
        id.hyphenated().to_string(),
        id.braced().to_string(),
        id.urn().to_string(),
        id.simple().to_string(),
    ];
    let amounts = ["10", "10.0", "10.00", "1e1", "10.000"];
    let records = spellings.iter().zip(amounts).map(|(spelling, amount)| {
        Message::new(order.clone().amount(amount).json().replace(&id.to_string(), spelling)).partition(0)
    });
    world.topic.send(records);
    // One record to a batch, so that each is a transaction of its own.
    let engine = world.engine().provider(&stub.url()).set("pipeline.batch_max", 1).start();
    assert_the_books_agree(&world, &stub, [&order]);
    assert_eq!(stub.journal(), [id.hyphenated().to_string()]);
    assert_eq!(stub.ledger()[0].amount, "10.00");
    assert_eq!(engine.metric("onceward_events_total", &[("outcome", "duplicate")]), 4.0);
}

// CASES G04
#[test]
fn retries_and_restarts_post_the_stored_bytes_even_when_new_ones_would_be_others() {
    let (world, stub) = (World::with_partitions(1), stub());
    let order = Order::new().amount("10.0");
    stub.script([Rule::always(Act::Close { charge: false, reset: false })]);
    world.topic.send([order.message()]);
    let engine = world.engine().provider(&stub.url()).start();
    eventually("some attempts have failed", || stub.calls().posts >= 3);
    engine.kill();
    let before = stub.calls().posts;

    let _other = world.engine().provider(&stub.url()).set("provider.amount", "minor_units").start();
    eventually("the new process has asked too", || stub.calls().posts > before);
    stub.clear_script();
    eventually_equal("paid", 1, || world.database.count("SELECT count(*) FROM payment"));
    assert_the_books_agree(&world, &stub, [&order]);
    let journal = stub.journal();
    assert!(journal.len() >= 5, "{journal:?}");
    assert!(journal.iter().all(|key| *key == order.event_id.hyphenated().to_string()), "{journal:?}");
    assert_eq!(stub.calls().bodies_changed, 0);
    assert_eq!(stub.ledger()[0].amount, "10.00");
}

// CASES F12
#[test]
fn both_forms_of_an_amount_know_how_many_decimals_a_currency_has() {
    for (form, expected) in [("decimal", ["5.00", "500", "1.234"]), ("minor_units", ["500", "500", "1234"])] {
        let (world, stub) = (World::with_partitions(1), stub());
        let good =
            [("5.0", "EUR"), ("500", "JPY"), ("1.234", "KWD")].map(|(amount, code)| Order::new().amount(amount).currency(code));
        let bad =
            [("10.5", "JPY"), ("1.2345", "KWD"), ("1", "ZZZ")].map(|(amount, code)| Order::new().amount(amount).currency(code));
        world.topic.send(good.iter().chain(&bad).map(Order::message));
        let _engine = world.engine().provider(&stub.url()).set("provider.amount", form).start();
        assert_the_books_agree(&world, &stub, &good);
        let amounts: BTreeMap<i64, String> = stub.ledger().into_iter().map(|entry| (entry.order_id, entry.amount)).collect();
        assert_eq!(good.each_ref().map(|order| amounts[&order.order_id].as_str()), expected);
        assert_eq!(
            world.database.column("SELECT amount::text || ' ' || currency FROM payment ORDER BY event_id"),
            ["5.00 EUR", "500 JPY", "1.234 KWD"]
        );
        assert_eq!(world.database.column("SELECT DISTINCT state || ' ' || reason FROM held_event"), ["parked invalid"]);
        assert_eq!((charges(&stub).len(), world.database.count("SELECT count(*) FROM held_event")), (3, 3));
    }
}
