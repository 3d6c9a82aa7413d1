//! The first event of a batch cannot be settled now, the rest can, and then the process dies and Kafka forgets the group. An engine
//! that kept the retry in memory, or let the offset pass over it, would have lost that event: nobody would ever be charged.

use onceward::lab::provider_stub::{Act, Rule};

use crate::support::{Order, World, assert_charged_once, charges, eventually, eventually_equal};

#[test]
fn a_first_event_whose_key_is_being_worked_on_is_charged_once_after_a_crash_that_forgets_every_position() {
    the_first_fails(Act::InProgress);
}

#[test]
fn a_first_event_with_an_unknown_answer_is_charged_once_after_a_crash_that_forgets_every_position() {
    the_first_fails(Act::status(500));
}

#[test]
fn a_first_event_whose_charge_was_made_behind_an_unknown_answer_is_not_charged_twice() {
    the_first_fails(Act::Close { charge: true, reset: true });
}

fn the_first_fails(act: Act) {
    let world = World::with_partitions(1);
    let stub = &world.provider;
    // As many as a first batch has.
    let orders = Order::some(8);
    // Until the script is dropped, so that it cannot be charged before the crash.
    stub.script([Rule::for_order(orders[0].order_id, act)]);
    world.topic.send(orders.iter().map(|order| order.message().partition(0)));
    let engine = world.engine().start();
    eventually_equal("the rest is paid", 7, || world.database.count("SELECT count(*) FROM payment"));
    eventually_equal("all is committed", 0, || world.topic.lag(&world.group));
    assert_eq!(world.database.count("SELECT count(DISTINCT xmin::text) FROM processed_event"), 1, "they were one batch");
    let held = world.database.rows("SELECT source_offset, event_id, reason, state, owns_claim FROM held_event");
    let id = orders[0].event_id.to_string();
    assert_eq!(held, [["0", &id, "unknown", "retrying", "t"].map(|text| Some(text.to_owned()))]);
    eventually("it is tried again", || stub.journal().iter().filter(|key| **key == id).count() >= 2);
    engine.kill();

    world.topic.forget_group(&world.group);
    assert!(charges(stub).len() >= 7 && world.database.count("SELECT count(*) FROM payment") == 7);
    stub.clear_script();
    let engine = world.engine().start();
    eventually_equal("the first is paid too", 8, || world.database.count("SELECT count(*) FROM payment"));
    assert_charged_once(stub, &orders);
    assert_eq!(stub.calls().bodies_changed, 0, "each post of a key has the same bytes");
    assert_eq!(world.database.text("SELECT state FROM held_event"), "applied");
    assert_eq!(engine.metric("onceward_events_total", &[("outcome", "duplicate")]), 0.0, "it resumed at the frontier");
    assert_eq!(world.database.count("SELECT (SELECT count(*) FROM payment_attempt) + (SELECT count(*) FROM attempt_batch)"), 0);
}
