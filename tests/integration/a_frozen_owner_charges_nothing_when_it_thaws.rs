//! A process that is frozen in the middle of a charge (a paused machine, a stopped container) does not know that it has lost its
//! partition. When it thaws it must find its transaction gone, its epoch outdated and its deadline over: it commits nothing and calls
//! nobody. R-KFK-CONS-X1.

use onceward::lab::process::Signal;
use onceward::lab::provider_stub::{Act, Rule};

use crate::support::{Engine, Order, World, assert_the_books_agree, eventually, eventually_equal, stub};

fn owned(engine: &Engine) -> usize {
    engine.status()["partitions"].as_array().expect("a list").len()
}

#[test]
fn another_process_has_taken_over_meanwhile() {
    let (world, stub) = (World::with_partitions(2), stub());
    let orders = Order::some(5);
    stub.script([Rule::for_order(orders[0].order_id, Act::Hold).times(1)]);
    world.topic.send(orders.iter().map(|order| order.message().partition(0)));
    // One call at a time: the first is charged and not answered, the others wait to be started.
    let mut frozen = world.engine().patient().provider(&stub.url()).set("provider.max_in_flight", 1).start();
    eventually("one is charged, the others wait behind it", || stub.calls().held == 1);
    frozen.signal(Signal::Stop);
    assert_eq!(stub.calls().posts, 1);

    let next = world.engine().provider(&stub.url()).start();
    eventually_equal("the next one has both partitions", 2, || owned(&next));
    eventually_equal("it has charged what was waiting", 4, || world.database.count("SELECT count(*) FROM payment"));
    stub.release();
    eventually_equal("and has got the answer of the first", 5, || world.database.count("SELECT count(*) FROM payment"));
    let epochs = world.database.column("SELECT epoch FROM consumed_partition ORDER BY partition");

    // It has slept beyond the life of the keys: whatever it asks for now is charged once more.
    stub.forget_keys();
    let posts = stub.calls().posts;
    frozen.signal(Signal::Continue);
    eventually_equal("the thawed one is a member like any other", (1, 1), || (owned(&frozen), owned(&next)));
    assert_eq!(stub.calls().posts, posts, "it called nobody");
    assert_ne!(
        world.database.column("SELECT epoch FROM consumed_partition ORDER BY partition"),
        epochs,
        "it asked for an epoch of its own"
    );
    let more = Order::some(20);
    world.topic.send(more.iter().map(Order::message));
    assert_the_books_agree(&world, &stub, orders.iter().chain(&more));
    assert_eq!(stub.calls().bodies_changed, 0);
    assert!(frozen.terminate().success());
    assert!(next.terminate().success());
}
