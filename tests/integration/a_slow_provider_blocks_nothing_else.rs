//! A provider that is slow, or hangs, while the database's connections are as few as allowed and the process is asked to end: nothing
//! deadlocks, nothing hangs, nothing is charged twice.

use std::time::{Duration, Instant};

use onceward::lab::provider_stub::{Act, Rule};

use crate::support::{Order, World, assert_the_books_agree, charges, eventually, eventually_equal, stub};

#[test]
fn one_connection_and_twelve_partitions_do_not_deadlock() {
    let (world, stub) = (World::with_partitions(12), stub());
    let orders = Order::some(120);
    stub.script([Rule::always(Act::Delay { ms: 150 })]);
    world.topic.send(orders.iter().enumerate().map(|(n, order)| order.message().partition((n % 12) as i32)));
    let engine = world.engine().patient().concurrency(1).provider(&stub.url()).start();
    assert_the_books_agree(&world, &stub, &orders);
    assert_eq!(world.database.count("SELECT count(*) FROM held_event"), 0, "slow is not unknown");
    assert!(engine.terminate().success());
}

// CASES F18, G10
#[test]
fn asked_to_end_while_the_provider_hangs_it_ends_in_order_and_in_time() {
    let (world, stub) = (World::new(), stub());
    let orders = Order::some(6);
    stub.script([Rule::always(Act::Silence { charge: true })]);
    let engine = world.engine().provider(&stub.url()).start();
    world.topic.send(orders.iter().map(Order::message));
    eventually("calls hang, and money has moved", || stub.calls().in_flight >= 1 && !charges(&stub).is_empty());
    let asked = Instant::now();
    assert!(engine.terminate().success());
    assert!(asked.elapsed() < Duration::from_secs(15), "drain and leave: {:?}", asked.elapsed());
    assert_eq!(world.database.count("SELECT count(*) FROM payment"), 0);

    stub.clear_script();
    let _next = world.engine().provider(&stub.url()).start();
    eventually_equal("paid", 6, || world.database.count("SELECT count(*) FROM payment"));
    assert_the_books_agree(&world, &stub, &orders);
    assert_eq!(stub.calls().bodies_changed, 0);
}
