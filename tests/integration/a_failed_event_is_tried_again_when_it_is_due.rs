//! An event that failed must neither stop its partition nor be forgotten: it is held, shown, and tried again by whoever owns its
//! partition then, a bounded number of times. It is still the same event: what comes again from Kafka is a duplicate. R-KFK-IDEM-3.

use onceward::lab::provider_stub::{Act, Rule};
use serde_json::json;

use crate::support::{Engine, Order, World, assert_charged_once, assert_the_books_agree, eventually, eventually_equal, stub};

const HELD: &str = "SELECT reason || ' ' || state || ' ' || owns_claim FROM held_event";

fn shown(engine: &Engine) -> serde_json::Value {
    engine.status()["held"].clone()
}

#[test]
fn it_is_held_as_retrying_and_shown_and_the_next_events_are_not_behind_it() {
    let (world, stub) = (World::with_partitions(1), stub());
    let (fails, flows) = (Order::new(), Order::new());
    stub.script([Rule::for_order(fails.order_id, Act::status(500))]);
    world.topic.send([fails.message(), flows.message()]);
    let engine = world.engine().provider(&stub.url()).set("retry.max_attempts", 1000).start();
    eventually_equal("the frontier has passed both", 0, || world.topic.lag(&world.group));
    assert_charged_once(&stub, [&flows]);
    assert_eq!(world.database.column(HELD), ["unknown retrying true"]);
    eventually_equal("it is shown", json!([{"reason": "unknown", "state": "retrying", "count": 1}]), || shown(&engine));
    assert_eq!(engine.metric("onceward_held_events", &[("reason", "unknown"), ("state", "retrying")]), 1.0);

    // The same event again, while it waits: its claim is taken.
    let asked = stub.calls().posts;
    world.topic.send([fails.message()]);
    eventually_equal("a duplicate", 1.0, || engine.metric("onceward_events_total", &[("outcome", "duplicate")]));
    eventually("it is tried again all the same", || stub.calls().posts > asked);
    stub.clear_script();
    eventually_equal("applied when due", vec!["unknown applied true".to_owned()], || world.database.column(HELD));
    assert_the_books_agree(&world, &stub, [&fails, &flows]);
    eventually_equal("and shown so", 0.0, || engine.metric("onceward_held_events", &[("state", "retrying")]));
}

#[test]
fn whoever_owns_the_partition_after_a_restart_tries_it_again() {
    for crash in [false, true] {
        let (world, stub) = (World::with_partitions(1), stub());
        let order = Order::new();
        stub.script([Rule::always(Act::Close { charge: true, reset: true }).times(1), Rule::always(Act::status(500))]);
        world.topic.send([order.message()]);
        // The next attempt lies beyond this process.
        let patient = world.engine().provider(&stub.url()).set("retry.backoff_min_ms", 4_000).set("retry.backoff_max_ms", 4_000);
        let engine = patient.clone().start();
        eventually_equal("held", vec!["unknown retrying true".to_owned()], || world.database.column(HELD));
        eventually_equal("its offset is committed", 0, || world.topic.lag(&world.group));
        if crash {
            engine.kill();
        } else {
            assert!(engine.terminate().success());
        }
        assert_eq!((stub.calls().posts, world.database.count("SELECT count(*) FROM payment")), (1, 0));

        stub.clear_script();
        let _next = patient.start();
        eventually_equal("applied", vec!["unknown applied true".to_owned()], || world.database.column(HELD));
        assert_the_books_agree(&world, &stub, [&order]);
        assert_eq!(stub.journal(), vec![order.event_id.to_string(); 2]);
    }
}

// CASES G02
#[test]
fn after_the_last_attempt_it_waits_for_a_person() {
    let (world, stub) = (World::with_partitions(1), stub());
    let order = Order::new();
    stub.script([Rule::always(Act::status(500))]);
    world.topic.send([order.message()]);
    let engine = world.engine().provider(&stub.url()).set("retry.max_attempts", 4).start();
    eventually_equal("shown as parked", json!([{"reason": "unknown", "state": "parked", "count": 1}]), || shown(&engine));
    assert_eq!(engine.metric("onceward_held_events", &[("reason", "unknown"), ("state", "parked")]), 1.0);
    assert_eq!(stub.journal(), vec![order.event_id.to_string(); 4]);
    assert_eq!(world.database.column("SELECT unknown_answers FROM payment_attempt"), ["4"]);
    assert!(engine.terminate().success());
    assert_eq!(stub.calls().posts, 4, "no more after the last");
}
