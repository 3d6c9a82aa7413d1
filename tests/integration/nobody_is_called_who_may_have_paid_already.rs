//! The last look before the money: a key that the provider may have forgotten is a second charge, and so is an event that somebody else
//! has paid. Then nobody is called. R-KFK-IDEM-4.

use onceward::lab::provider_stub::{Act, Rule};

use crate::support::{Order, World, assert_charged_once, eventually, eventually_equal, stub};

const HELD: &str = "SELECT event_id || ' ' || reason || ' ' || state || ' ' || owns_claim FROM held_event";

// CASES G03
#[test]
fn an_attempt_older_than_the_keys_life_is_parked_as_unknown() {
    let (world, stub) = (World::with_partitions(1), stub());
    let order = Order::new();
    stub.script([Rule::once(Act::Hold)]);
    world.topic.send([order.message()]);
    let engine = world.engine().provider(&stub.url()).start();
    eventually("charged, and the answer is held back", || stub.calls().held == 1);
    engine.kill();
    // A partition that stood still for a day: both sides have let the key's life pass.
    stub.release();
    stub.forget_keys();
    world.database.execute("UPDATE attempt_batch SET started_at = now() - interval '25 hours'");

    let _next = world.engine().provider(&stub.url()).start();
    eventually_equal("settled", 0, || world.topic.lag(&world.group));
    assert_eq!(world.database.column(HELD), [format!("{} unknown parked true", order.event_id)]);
    assert_eq!(stub.calls().posts, 1, "never blind");
    assert_charged_once(&stub, [&order]);
    assert_eq!(world.database.count("SELECT count(*) FROM payment"), 0);
    assert_eq!(world.database.count("SELECT count(*) FROM payment_attempt"), 1);
}

#[test]
fn a_payment_that_is_there_already_is_the_answer_and_one_of_another_content_a_conflict() {
    let (world, stub) = (World::with_partitions(1), stub());
    let [same, other, new] = [Order::new(), Order::new(), Order::new()];
    for (order, amount) in [(&same, "10.00"), (&other, "11.00")] {
        world.database.execute(&format!(
            "INSERT INTO payment (event_id, order_id, customer_id, amount, currency, status, provider_charge_id, attempts)
             VALUES ('{}', {}, {}, {amount}, 'EUR', 'charged', 'by hand', 1)",
            order.event_id, order.order_id, order.customer_id
        ));
    }
    world.topic.send([&same, &other, &new].map(Order::message));
    let engine = world.engine().provider(&stub.url()).start();
    eventually_equal("settled", 0, || world.topic.lag(&world.group));
    assert_charged_once(&stub, [&new]);
    assert_eq!(stub.calls().posts, 1);
    assert_eq!(world.database.column(HELD), [format!("{} conflict parked false", other.event_id)]);
    let mut claims = vec![same.event_id.to_string(), new.event_id.to_string()];
    claims.sort();
    assert_eq!(
        world.database.column("SELECT event_id FROM processed_event ORDER BY event_id"),
        claims,
        "the conflict's is given back"
    );
    assert_eq!(world.database.count("SELECT count(*) FROM payment WHERE provider_charge_id = 'by hand'"), 2);
    assert_eq!(world.database.count("SELECT count(*) FROM attempt_batch"), 0);
    assert_eq!(engine.metric("onceward_events_total", &[("outcome", "applied")]), 2.0);
}

#[test]
fn an_attempt_of_another_content_under_this_id_is_a_conflict() {
    let (world, stub) = (World::with_partitions(1), stub());
    let order = Order::new();
    // A digest of the same version (its low byte) and another content.
    world.database.execute(&format!(
        "INSERT INTO payment_attempt (event_id, event_digest, body, first_attempt_at, last_attempt_at, unknown_answers)
         VALUES ('{}', 256 * 77 + 1, 'other bytes', now(), now(), 1)",
        order.event_id
    ));
    world.topic.send([order.message()]);
    let _engine = world.engine().provider(&stub.url()).start();
    eventually_equal("settled", 0, || world.topic.lag(&world.group));
    assert_eq!(world.database.column(HELD), [format!("{} conflict parked false", order.event_id)]);
    assert_eq!((stub.calls().posts, world.database.count("SELECT count(*) FROM payment_attempt")), (0, 1));
}
