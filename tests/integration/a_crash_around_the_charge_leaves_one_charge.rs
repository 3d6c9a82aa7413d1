//! Between the charge and COMMIT the provider knows more than our database, and between COMMIT and the offset commit our database knows
//! more than Kafka. A process that is killed there leaves that difference behind, and the next one must not pay it. R-KFK-IDEM-3,
//! R-KFK-IDEM-4, R-KFK-CONS-X1.

use std::collections::BTreeMap;

use onceward::lab::process;
use onceward::lab::provider_stub::{Act, Rule};

use crate::support::{Order, World, assert_the_books_agree, charges, eventually, eventually_equal, stub};

// CASES G01, G09
#[test]
fn killed_after_the_provider_has_charged_and_before_commit() {
    let (world, stub) = (World::with_partitions(1), stub());
    let orders = Order::some(3);
    stub.script([Rule::for_order(orders[1].order_id, Act::Hold).times(1)]);
    world.topic.send(orders.iter().map(Order::message));
    let engine = world.engine().provider(&stub.url()).start();
    eventually("all are charged, and one answer is held back", || stub.calls().held == 1 && charges(&stub).len() == 3);
    engine.kill();
    assert_eq!(world.database.count("SELECT count(*) FROM payment"), 0);
    assert_eq!(world.database.count("SELECT count(*) FROM attempt_batch"), 1, "the attempts were durable before");

    let _next = world.engine().provider(&stub.url()).start();
    // The provider still works on that key: the answer is 409 until it is released.
    eventually("asked again, with the same key", || stub.calls().in_progress >= 1);
    stub.release();
    eventually_equal("paid", 3, || world.database.count("SELECT count(*) FROM payment"));
    assert_the_books_agree(&world, &stub, &orders);
    assert_eq!(stub.calls().bodies_changed, 0);
}

#[test]
fn what_a_killed_process_had_begun_is_one_unknown_answer_to_the_next() {
    let (world, stub) = (World::with_partitions(1), stub());
    let order = Order::new();
    stub.script([Rule::once(Act::Hold)]);
    world.topic.send([order.message()]);
    let engine = world.engine().provider(&stub.url()).start();
    eventually("charged, and the answer is held back", || stub.calls().held == 1);
    engine.kill();
    stub.release();

    // It takes the partition over while the provider cannot be reached: nothing is added to what was left.
    let nobody = format!("http://127.0.0.1:{}", process::free_port().expect("a port"));
    let between = world.engine().provider(&nobody).start();
    eventually_equal("the batch's row became the event's", 0, || world.database.count("SELECT count(*) FROM attempt_batch"));
    eventually("the event was given back", || between.metric("onceward_events_total", &[("outcome", "given_back")]) >= 1.0);
    eventually_equal(
        "one unknown answer, with the bytes that were posted",
        vec![format!(r#"{} 1 {{"orderId":{},"amount":10.00,"currency":"EUR"}}"#, order.event_id, order.order_id)],
        || {
            world
                .database
                .column("SELECT event_id || ' ' || unknown_answers || ' ' || convert_from(body, 'UTF8') FROM payment_attempt")
        },
    );
    assert!(between.terminate().success());

    let _last = world.engine().provider(&stub.url()).start();
    assert_the_books_agree(&world, &stub, [&order]);
    assert_eq!((stub.calls().posts, world.database.count("SELECT attempts FROM payment")), (2, 2));
}

#[test]
fn killed_after_commit_and_before_the_offset_commit() {
    let (world, stub) = (World::with_partitions(1), stub());
    let (first, then) = (Order::new(), Order::some(5));
    world.topic.send([first.message()]);
    // Offsets are committed so rarely that there is time for a crash between two commits.
    let engine = world.engine().provider(&stub.url()).set("kafka.commit_interval_ms", 5_000).start();
    eventually_equal("the first offset is committed", BTreeMap::from([(0, 1)]), || world.topic.committed(&world.group));
    world.topic.send(then.iter().map(Order::message));
    eventually_equal("paid", 6, || world.database.count("SELECT count(*) FROM payment"));
    engine.kill();
    assert_eq!(world.topic.committed(&world.group), BTreeMap::from([(0, 1)]), "Kafka knows nothing of it");

    let next = world.engine().provider(&stub.url()).start();
    assert_the_books_agree(&world, &stub, then.iter().chain([&first]));
    assert_eq!(next.metric("onceward_events_total", &[("outcome", "duplicate")]), 5.0, "they came again");
    assert_eq!(next.metric("onceward_duplicates_total", &[("cause", "redelivery")]), 5.0, "because a commit was missed");
    assert_eq!(stub.calls().posts, 6, "and nobody was asked");
}
