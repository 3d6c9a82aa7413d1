//! A database that restarts, a cable that is pulled, an answer to COMMIT that nobody hears: the engine waits, stays alive, says that it is
//! not ready, and goes on by itself. What it had charged meanwhile it does not charge again. R-KFK-IDEM-3.

use std::time::{Duration, Instant};

use onceward::lab::provider_stub::{Act, Rule};

use crate::support::{Engine, Order, Proxy, World, assert_the_books_agree, eventually, eventually_equal, stub};

#[test]
fn away_for_twenty_seconds_nothing_is_lost_and_nothing_comes_twice() {
    let (world, stub) = (World::new(), stub());
    let proxy = Proxy::before(&world.database);
    let mut engine = world.engine().set("database.url", proxy.url()).provider(&stub.url()).start();
    let orders = Order::some(60);
    let [before, during, after] = [&orders[..20], &orders[20..40], &orders[40..]];
    world.topic.send(before.iter().map(Order::message));
    eventually_equal("paid", 20, || world.database.count("SELECT count(*) FROM payment"));

    let away = Instant::now();
    proxy.fall_silent();
    world.topic.send(during.iter().map(Order::message));
    for (phase, ends) in [("silent", 10), ("refusing", 20)] {
        eventually(&format!("readiness is red while the database is {phase}"), || is_alive(&mut engine) && !engine.is_ready());
        eventually(&format!("{ends} seconds have gone"), || {
            assert!(is_alive(&mut engine));
            assert!(!engine.is_ready(), "the database is {phase}");
            away.elapsed() > Duration::from_secs(ends)
        });
        proxy.refuse();
    }
    assert_eq!(world.database.count("SELECT count(*) FROM payment"), 20, "it was away");
    proxy.open();
    world.topic.send(after.iter().map(Order::message));
    eventually("ready again, by itself", || engine.is_ready());
    assert_the_books_agree(&world, &stub, &orders);
    assert!(engine.terminate().success());
}

fn is_alive(engine: &mut Engine) -> bool {
    assert_eq!(engine.exit_now(), None, "the engine ended");
    engine.is_live()
}

#[test]
fn away_at_the_start_it_is_waited_for() {
    let (world, stub) = (World::new(), stub());
    let proxy = Proxy::before(&world.database);
    let orders = Order::some(5);
    world.topic.send(orders.iter().map(Order::message));
    proxy.refuse();
    let mut engine = world.engine().set("database.url", proxy.url()).provider(&stub.url()).launch();
    let red = eventually("it says what it waits for", || {
        engine.get("/ready").map(|(_, body)| body).filter(|body| !body.contains("database: not yet"))
    });
    assert!(red.contains("database: "), "{red}");
    assert!(is_alive(&mut engine));
    proxy.open();
    assert_the_books_agree(&world, &stub, &orders);
    eventually("ready", || engine.is_ready());
}

#[test]
fn away_at_an_assign_the_assign_waits() {
    let (world, stub) = (World::with_partitions(4), stub());
    let leaves = world.engine().provider(&stub.url()).start();
    let proxy = Proxy::before(&world.database);
    let stays = world.engine().set("database.url", proxy.url()).provider(&stub.url()).start();
    let owned = |engine: &Engine| engine.status()["partitions"].as_array().expect("a list").len();
    eventually_equal("each has its half", (2, 2), || (owned(&leaves), owned(&stays)));

    proxy.refuse();
    let assigns = stays.metric("onceward_rebalances_total", &[("kind", "assign")]);
    assert!(leaves.terminate().success());
    eventually("the other half is assigned", || stays.metric("onceward_rebalances_total", &[("kind", "assign")]) > assigns);
    let orders = Order::some(40);
    world.topic.send(orders.iter().map(Order::message));
    assert_eq!(owned(&stays), 2, "no epoch, no partition");
    proxy.open();
    eventually_equal("it has all", 4, || owned(&stays));
    assert_the_books_agree(&world, &stub, &orders);
}

// CASES D17
#[test]
fn the_answer_to_commit_is_lost_after_the_commit() {
    the_commit_is_lost(true);
}

// CASES D17
#[test]
fn the_answer_to_commit_is_lost_before_the_commit() {
    the_commit_is_lost(false);
}

fn the_commit_is_lost(committed: bool) {
    let (world, stub) = (World::with_partitions(1), stub());
    let proxy = Proxy::before(&world.database);
    let orders = Order::some(3);
    stub.script([Rule::for_order(orders[0].order_id, Act::Hold)]);
    let engine = world.engine().set("database.url", proxy.url()).provider(&stub.url()).start();
    world.topic.send(orders.iter().map(Order::message));
    eventually("the transaction is open and charging", || stub.calls().held == 1);
    proxy.lose_the_next_commit(committed);
    stub.release();
    eventually("the answer to COMMIT is lost", || proxy.has_lost_it());
    assert_the_books_agree(&world, &stub, &orders);
    assert_eq!(stub.calls().posts, 3, "the answers outlive the transaction");
    assert_eq!(world.database.count("SELECT next_offset FROM consumed_partition"), 3);
    let duplicates = engine.metric("onceward_events_total", &[("outcome", "duplicate")]);
    assert_eq!(duplicates >= 1.0, committed, "the claims tell");
    assert!(engine.terminate().success());
}

#[test]
fn a_backend_that_is_killed_in_the_middle_of_a_transaction_costs_no_second_charge() {
    let (world, stub) = (World::with_partitions(1), stub());
    let orders = Order::some(3);
    stub.script([Rule::for_order(orders[0].order_id, Act::Hold)]);
    let engine = world.engine().provider(&stub.url()).start();
    world.topic.send(orders.iter().map(Order::message));
    eventually("the transaction is open and charging", || stub.calls().held == 1);
    let killed = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                  WHERE datname = current_database() AND application_name = 'onceward' AND state = 'idle in transaction'";
    assert_eq!(world.database.column(killed), ["t"]);
    stub.release();
    assert_the_books_agree(&world, &stub, &orders);
    assert_eq!(stub.calls().posts, 3, "the answers outlive the transaction");
    assert!(engine.terminate().success());
}
