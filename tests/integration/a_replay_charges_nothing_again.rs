//! Positions go back: an operator resets the group to replay, the broker forgets offsets of a group that was off for a week, a process
//! dies between its transaction and its commit. Whatever position comes back, what was charged is not charged again, and the first
//! record read after a restart is the next one.

use std::collections::BTreeMap;
use std::time::Duration;

use onceward::lab::process::Signal;
use onceward::lab::provider_stub::{Act, Rule};

use crate::support::{Engine, EngineBuilder, LIMIT, Order, World, assert_charged_once, eventually, eventually_equal};

// R-KFK-IDEM-2, R-KFK-IDEM-3
#[test]
fn the_group_reset_to_the_beginning_applies_and_charges_nothing_again() {
    let world = World::new();
    let stub = &world.provider;
    let mut orders = Order::some(300);
    world.topic.send(orders.iter().map(Order::message));
    let engine = world.engine().start();
    eventually_equal("all is committed", 0, || world.topic.lag(&world.group));
    assert!(engine.terminate().success());
    let rows = world.database.rows("SELECT p, p.xmin FROM payment AS p ORDER BY event_id");

    world.topic.reset_to_the_beginning(&world.group);
    assert_eq!(world.topic.lag(&world.group), 300);
    let engine = world.engine().start();
    eventually_equal("all is read once more", 0, || world.topic.lag(&world.group));
    assert_eq!(events(&engine, "duplicate"), 300.0);
    // Who set the group back is told from a commit that was missed, and nobody pays 300 × 10.00 again.
    assert_eq!(engine.metric("onceward_duplicates_total", &[("cause", "replay")]), 300.0);
    let duplicates = &engine.status()["duplicates"];
    assert_eq!(*duplicates, serde_json::json!({ "replay": { "count": 300, "amounts_not_charged_again": { "EUR": "3000.00" } } }));
    assert_eq!(events(&engine, "applied"), 0.0);
    assert_eq!(world.database.rows("SELECT p, p.xmin FROM payment AS p ORDER BY event_id"), rows);
    assert_eq!(stub.calls().posts, 300, "nobody is asked again");

    let new = Order::new();
    world.topic.send([new.message()]);
    eventually_equal("new records are applied", 0, || world.topic.lag(&world.group));
    orders.push(new);
    assert_charged_once(stub, &orders);
}

// CASES B10
#[test]
fn the_group_whose_offsets_are_gone_resumes_at_our_frontier() {
    let world = World::new();
    let stub = &world.provider;
    let mut orders = Order::some(300);
    world.topic.send(orders.iter().map(Order::message));
    let engine = world.engine().start();
    eventually_equal("all is committed", 0, || world.topic.lag(&world.group));
    assert!(engine.terminate().success());

    world.topic.forget_group(&world.group);
    eventually_equal("Kafka knows no position", BTreeMap::new(), || world.topic.committed(&world.group));
    let while_off = Order::some(10);
    world.topic.send(while_off.iter().map(Order::message));
    // Were the frontier not asked, "latest" would lose these and "earliest" read the rest once more.
    let engine = world.engine().set("kafka.start", "latest").start();
    orders.extend(while_off);
    eventually_equal("what came while it was off is applied", 310, || world.database.count("SELECT count(*) FROM payment"));
    assert_eq!(events(&engine, "duplicate"), 0.0);
    assert_charged_once(stub, &orders);
}

// R-KFK-CONS-X1
#[test]
fn nothing_is_committed_to_kafka_before_its_transaction() {
    let world = World::with_partitions(2);
    let stub = &world.provider;
    let engine = world.engine().patient().start();
    let orders = Order::some(3);
    world.topic.send([orders[0].message().partition(0)]);
    eventually_equal("the first is committed", BTreeMap::from([(0, 1)]), || world.topic.committed(&world.group));
    stub.script([Rule::for_order(orders[1].order_id, Act::Hold).times(1)]);
    world.topic.send([orders[1].message().partition(0)]);
    eventually("the second is charged and its transaction is open", || stub.calls().held == 1);
    // The next round of commits takes another partition along; a position that was only read would go with it.
    world.topic.send([orders[2].message().partition(1)]);
    let only_settled = BTreeMap::from([(0, 1), (1, 1)]);
    eventually("a round of commits is over", || world.topic.committed(&world.group).contains_key(&1));
    assert_eq!(stub.calls().held, 1, "the transaction is still open");
    engine.kill();
    assert_eq!(world.topic.committed(&world.group), only_settled);

    let _engine = world.engine().start();
    eventually_equal("the second is settled", BTreeMap::from([(0, 2), (1, 1)]), || world.topic.committed(&world.group));
    assert_charged_once(stub, &orders);
}

// CASES A07
#[test]
fn after_a_commit_by_the_clock_the_first_record_read_is_exactly_the_next() {
    let world = World::with_partitions(1);
    let engine = world.engine().start();
    let _applied = ten_records(&world);
    eventually_equal("the clock has committed", BTreeMap::from([(0, 10)]), || world.topic.committed(&world.group));
    engine.kill();
    the_next_is_the_eleventh(&world, &world.engine().start());
}

// CASES A07
#[test]
fn after_the_commit_of_a_stop_the_first_record_read_is_exactly_the_next() {
    let world = World::with_partitions(1);
    let engine = without_commits_by_the_clock(world.engine()).start();
    let _applied = ten_records(&world);
    assert_eq!(world.topic.committed(&world.group), BTreeMap::new(), "nothing is committed before the stop");
    assert!(engine.terminate().success());
    assert_eq!(world.topic.committed(&world.group), BTreeMap::from([(0, 10)]));
    the_next_is_the_eleventh(&world, &world.engine().start());
}

// CASES A07
#[test]
fn after_the_commit_of_a_revoke_the_first_record_read_is_exactly_the_next() {
    let world = World::with_partitions(1);
    // With range the first member by name has the only partition; whoever joins, it is revoked and given anew.
    let first = without_commits_by_the_clock(world.engine()).assignor("range").start();
    let _applied = ten_records(&world);
    assert_eq!(world.topic.committed(&world.group), BTreeMap::new(), "nothing is committed before the revoke");
    let second = without_commits_by_the_clock(world.engine()).assignor("range").start();
    let epoch = "SELECT epoch FROM consumed_partition";
    eventually("the partition was taken over anew", || world.database.count(epoch) > 1);
    eventually_equal("the revoke has committed", BTreeMap::from([(0, 10)]), || world.topic.committed(&world.group));
    world.topic.send([Order::new().message()]);
    eventually_equal("the next offset is not beyond it", 11, || world.database.count("SELECT count(*) FROM payment"));
    assert_eq!(events(&first, "duplicate") + events(&second, "duplicate"), 0.0, "the next offset is not below it");
}

// CASES A07
#[test]
fn without_any_commit_to_kafka_the_first_record_read_is_exactly_the_next() {
    let world = World::with_partitions(1);
    let mut engine = world.engine().set("kafka.commit_interval_ms", 5_500).start();
    let _applied = ten_records(&world);
    engine.signal(Signal::Kill);
    engine.wait();
    assert_eq!(world.topic.committed(&world.group), BTreeMap::new(), "it died before its first commit");
    the_next_is_the_eleventh(&world, &world.engine().start());
}

/// No test waits so long.
fn without_commits_by_the_clock(engine: EngineBuilder) -> EngineBuilder {
    let (commit, session, poll) = (2 * LIMIT, 3 * LIMIT, 4 * LIMIT);
    let ms = |limit: Duration| i64::try_from(limit.as_millis()).expect("a limit of ours");
    engine
        .set("kafka.commit_interval_ms", ms(commit))
        .set("kafka.session_timeout_ms", ms(session))
        .set("kafka.max_poll_interval_ms", ms(poll))
}

/// Sends ten records and waits until they are applied.
fn ten_records(world: &World) -> Vec<Order> {
    let orders = Order::some(10);
    world.topic.send(orders.iter().map(|order| order.message().partition(0)));
    eventually_equal("ten are applied", 10, || world.database.count("SELECT count(*) FROM payment"));
    assert_eq!(world.database.count("SELECT next_offset FROM consumed_partition"), 10);
    orders
}

fn the_next_is_the_eleventh(world: &World, engine: &Engine) {
    world.topic.send([Order::new().message().partition(0)]);
    eventually_equal("the eleventh is committed", BTreeMap::from([(0, 11)]), || world.topic.committed(&world.group));
    assert_eq!(events(engine, "duplicate"), 0.0, "the next offset was not below it");
    assert_eq!(events(engine, "applied"), 1.0, "the next offset was not beyond it");
    assert_eq!(world.database.count("SELECT next_offset FROM consumed_partition"), 11);
}

fn events(engine: &Engine, outcome: &str) -> f64 {
    engine.metric("onceward_events_total", &[("outcome", outcome)])
}
