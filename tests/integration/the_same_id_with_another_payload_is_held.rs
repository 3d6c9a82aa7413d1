//! A producer that reuses an id for another order: taken for a duplicate, the second order would vanish without a word; applied, the
//! provider would be asked for another charge under a key it knows. It is held as a conflict, for a person. What differs only in
//! spelling is a duplicate, or every pretty-printer between producer and topic would fill the table.

use crate::support::{Message, Order, World, assert_charged_once, eventually_equal};

// CASES F03
#[test]
fn another_amount_under_a_known_id_is_held_as_a_conflict_and_nobody_is_charged() {
    let world = World::with_partitions(1);
    let stub = &world.provider;
    let engine = world.engine().start();
    let order = Order::new();
    world.topic.send([order.message()]);
    eventually_equal("the first is paid", 1, || world.database.count("SELECT count(*) FROM payment"));
    let [dearer, foreign] = [order.clone().amount("99.00"), order.clone().currency("USD")];
    let next = Order::new();
    world.topic.send([dearer.message(), foreign.message(), next.message()]);
    eventually_equal("all is committed", 0, || world.topic.lag(&world.group));

    let held =
        "SELECT source_offset, event_id, reason, state, owns_claim, convert_from(payload, 'UTF8') FROM held_event ORDER BY 1";
    let held: Vec<Vec<String>> = world.database.rows(held).into_iter().map(|row| row.into_iter().flatten().collect()).collect();
    let row = |offset: &str, order: &Order| {
        [offset, &order.event_id.to_string(), "conflict", "parked", "f", &order.json()].map(str::to_owned).to_vec()
    };
    assert_eq!(held, [row("1", &dearer), row("2", &foreign)]);
    assert_charged_once(stub, [&order, &next]);
    assert_eq!(stub.calls().bodies_changed, 0);
    assert_eq!(world.database.text(&format!("SELECT amount FROM payment WHERE event_id = '{}'", order.event_id)), "10.00");
    eventually_equal("the metric shows them", 2.0, || {
        engine.metric("onceward_held_events", &[("reason", "conflict"), ("state", "parked")])
    });
}

// CASES F03: the conflict stands in the same batch as the event it contradicts.
#[test]
fn two_payloads_of_one_id_in_one_batch_charge_the_first_and_hold_the_second() {
    let world = World::with_partitions(1);
    let stub = &world.provider;
    let first = Order::new();
    let second = first.clone().amount("99.00");
    world.topic.send([first.message(), second.message(), first.message()].map(|message| message.partition(0)));
    let engine = world.engine().start();
    eventually_equal("all is committed", 0, || world.topic.lag(&world.group));
    assert_charged_once(stub, [&first]);
    assert_eq!(world.database.column("SELECT source_offset FROM held_event WHERE reason = 'conflict'"), ["1"]);
    assert_eq!(world.database.text("SELECT amount FROM payment"), "10.00");
    assert_eq!(engine.metric("onceward_events_total", &[("outcome", "duplicate")]), 1.0);
}

// CASES F03, F14
#[test]
fn the_same_event_in_another_spelling_is_a_plain_duplicate() {
    let world = World::with_partitions(1);
    let engine = world.engine().start();
    let order = Order::new();
    let id = order.event_id.hyphenated().to_string();
    let spellings = [
        order.json(),
        // other order of keys, white space, an unknown field
        format!(
            "{{ \"currency\":\"EUR\",\n\t\"totalAmount\" : 10.00, \"trace\": {{\"a\": [1]}}, \"customerId\": 7, \"orderId\": {},\r\n \
             \"occurredAt\": \"2026-01-05T10:15:30.123Z\", \"eventType\": \"order.confirmed.v1\", \"eventId\": \"{id}\"}}  ",
            order.order_id
        ),
        order.json().replace(&id, &id.to_uppercase()),
        order.json().replace("10.00", "1e1"),
        order.json().replace("10:15:30.123Z", "12:15:30.123000+02:00"),
        order.json().replace("EUR", "\\u0045UR"),
    ];
    world.topic.send(spellings.map(Message::new));
    eventually_equal("all is committed", 0, || world.topic.lag(&world.group));
    assert_eq!(world.database.column("SELECT reason || ': ' || error FROM held_event"), Vec::<String>::new());
    assert_eq!(world.database.count("SELECT count(*) FROM payment"), 1);
    assert_eq!(engine.metric("onceward_events_total", &[("outcome", "duplicate")]), 5.0);
}
