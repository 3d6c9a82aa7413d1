//! A part of the engine panics: an actor, a thread. Half an engine is the worst one: its probes are green, its lag grows. So what one
//! partition needs is replaced while the others go on, and what everything needs takes the process with it, in seconds and non-zero.
//! In both cases every event is applied once.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use onceward::lab::provider_stub::{Act, Rule};

use crate::support::{Engine, EngineBuilder, Order, World, assert_the_books_agree, eventually, eventually_equal};

/// Long enough for a machine with other work, short against any session time-out of production.
const SECONDS: Duration = Duration::from_secs(10);

fn armed(world: &World, points: &str) -> EngineBuilder {
    world.engine().environment("ONCEWARD_CRASH_POINTS", points)
}

/// The process ends by itself and says who died; the next one finishes the work.
fn takes_the_process_with_it(points: &str, who: &str) {
    let world = World::with_partitions(2);
    let orders = Order::some(40);
    world.topic.send(orders.iter().map(Order::message));
    let mut engine = armed(&world, points).launch();
    eventually("the armed point is passed", || engine.log().contains("panicked"));
    let passed = Instant::now();
    let status = engine.wait();
    assert!(passed.elapsed() < SECONDS, "it took {:?}", passed.elapsed());
    assert_eq!(status.code(), Some(1));
    assert!(engine.log().contains(&format!("the {who} died")), "{}", engine.log());
    let _next = world.engine().start();
    assert_the_books_agree(&world, &world.provider, &orders);
}

// CASES C02
#[test]
fn a_dead_poll_thread_ends_the_process() {
    takes_the_process_with_it("handed_on:panic", "poll thread");
}

// CASES C02
#[test]
fn a_dead_supervisor_ends_the_process() {
    takes_the_process_with_it("bumped:panic", "Supervisor");
}

// CASES C02
#[test]
fn a_dead_offset_actor_ends_the_process() {
    takes_the_process_with_it("offsets_committed:panic", "OffsetActor");
}

/// The same process goes on and settles everything.
fn is_replaced(points: &str) -> (World, Engine) {
    let world = World::with_partitions(2);
    let orders = Order::some(40);
    world.topic.send(orders.iter().map(Order::message));
    let engine = armed(&world, points).start();
    assert_the_books_agree(&world, &world.provider, &orders);
    eventually("somebody died", || engine.log().contains("an actor died on this partition; another takes its place"));
    let later = Order::some(40);
    world.topic.send(later.iter().map(Order::message));
    assert_the_books_agree(&world, &world.provider, orders.iter().chain(&later));
    assert_eq!(world.provider.calls().bodies_changed, 0);
    assert!(engine.is_ready() && engine.is_live());
    (world, engine)
}

// CASES A04, C01
#[test]
fn a_dead_partition_actor_is_replaced_and_its_partition_goes_on_without_a_rebalance() {
    let (world, engine) = is_replaced("windowed:panic:2");
    assert_eq!(engine.metric("onceward_rebalances_total", &[("kind", "assign")]), 1.0);
    let epochs = "SELECT sum(epoch) FROM consumed_partition";
    assert_eq!(world.database.count(epochs), 3, "one of the two partitions was taken over once more");
    assert!(engine.terminate().success());
}

// CASES C01, C13
#[test]
fn a_dedup_actor_that_dies_before_commit_leaves_nothing_done_twice() {
    let (_world, engine) = is_replaced("claimed:panic");
    assert!(engine.terminate().success());
}

// CASES C01, C13
#[test]
fn a_dedup_actor_that_dies_between_charge_and_commit_leaves_nothing_done_twice() {
    let (_world, engine) = is_replaced("before_commit:panic:2");
    assert!(engine.terminate().success());
}

// CASES C01, C13
#[test]
fn a_dedup_actor_that_dies_after_commit_leaves_nothing_done_twice() {
    let (_world, engine) = is_replaced("committed:panic");
    assert!(engine.terminate().success());
}

// CASES C13
#[test]
fn a_panic_among_a_batchs_calls_leaves_unknown_answers_and_everybody_goes_on() {
    let world = World::with_partitions(2);
    let orders = Order::some(40);
    world.topic.send(orders.iter().map(Order::message));
    let engine = armed(&world, "answered:panic:5").start();
    assert_the_books_agree(&world, &world.provider, &orders);
    assert!(engine.log().contains("the payment actor did not answer"), "{}", engine.log());
    assert!(world.provider.calls().posts > 40, "what had begun was asked for again");
    assert_eq!(world.provider.calls().bodies_changed, 0);
    assert!(engine.is_ready() && engine.is_live());
    assert!(engine.terminate().success());
}

// CASES A04
#[test]
fn a_partition_whose_actors_die_again_and_again_stops_and_the_others_go_on() {
    let world = World::with_partitions(2);
    let engine = armed(&world, "windowed:panic:5,windowed:panic:4,windowed:panic:3,windowed:panic:2,windowed:panic:1").start();
    let stuck = Order::new();
    world.topic.send([stuck.message().partition(0)]);
    let stopped = |engine: &Engine| engine.status()["partitions"][0]["stopped"].clone();
    eventually("partition 0 stops", || stopped(&engine).as_str().is_some_and(|reason| reason.starts_with("actors died 5 times")));
    let (code, reason) = engine.get("/ready").expect("it answers");
    assert_eq!((code, reason.as_str()), (503, "partitions: stopped: 0; /status says why\n"));
    assert!(engine.is_live(), "a restart is for a person to decide");

    let other = Order::new();
    world.topic.send([other.message().partition(1)]);
    eventually_equal("partition 1 goes on", 1, || world.database.count("SELECT count(*) FROM payment"));
    assert!(engine.terminate().success());
    let _repaired = world.engine().start();
    assert_the_books_agree(&world, &world.provider, [&stuck, &other]);
}

// CASES A02, H07
#[test]
fn a_poll_thread_that_hangs_is_named_by_the_liveness_probe() {
    let world = World::with_partitions(1);
    let orders = Order::some(3);
    let engine = armed(&world, "handed_on:hang").start();
    world.topic.send(orders.iter().map(Order::message));
    eventually("the probe is red", || {
        engine.get("/live").is_some_and(|(code, words)| code == 503 && words.starts_with("the poll thread has not polled for "))
    });
    eventually("it polls again, and the probe is green", || engine.is_live());
    assert_the_books_agree(&world, &world.provider, &orders);
}

// CASES H07
#[test]
fn a_provider_that_is_away_is_no_reason_to_restart() {
    let world = World::with_partitions(2);
    let orders = Order::some(4);
    let nobody = format!("http://127.0.0.1:{}", onceward::lab::process::free_port().expect("a free port"));
    let engine = world.engine().provider(&nobody).start();
    world.topic.send(orders.iter().map(Order::message));
    let paused =
        || engine.status()["partitions"].as_array().expect("a list").iter().any(|partition| !partition["paused"].is_null());
    eventually("the engine knows why it waits", paused);
    let until = Instant::now() + Duration::from_secs(10);
    eventually("longer than anything may be stuck", || {
        assert!(engine.is_live(), "{:?}", engine.get("/live"));
        Instant::now() > until
    });
    assert!(engine.terminate().success());
    let _charging = world.engine().start();
    assert_the_books_agree(&world, &world.provider, &orders);
}

// CASES C06
#[test]
fn two_batches_of_a_partition_never_overlap_though_its_first_one_is_slow() {
    let world = World::with_partitions(1);
    let orders = Order::some(6);
    world.provider.script([Rule::for_order(orders[0].order_id, Act::Hold).times(1)]);
    let engine = world.engine().patient().set("pipeline.batch_max", 1).start();
    world.topic.send(orders.iter().map(Order::message));
    eventually("the first is charged and not answered", || world.provider.calls().held == 1);
    let in_flight = || engine.metric("onceward_in_flight_events", &[]);
    assert_eq!((world.provider.calls().posts, in_flight()), (1, 1.0));
    world.provider.release();
    assert_the_books_agree(&world, &world.provider, &orders);
    let in_order = "SELECT order_id FROM payment JOIN processed_event USING (event_id) ORDER BY processed_at";
    let expected: Vec<String> = orders.iter().map(|order| order.order_id.to_string()).collect();
    assert_eq!(world.database.column(in_order), expected);
    assert_eq!(expected.iter().collect::<HashSet<_>>().len(), 6);
}
