//! "From the end" is said once, about a group that is new. A consumer that says it at every start loses what came while it was off,
//! and one that says it of a partition added last night loses that partition's first hour.

use std::collections::BTreeMap;

use crate::support::{Order, World, eventually, eventually_equal, stub};

fn paid(world: &World) -> Vec<String> {
    world.database.column("SELECT event_id FROM payment ORDER BY 1")
}

fn ids<'a>(orders: impl IntoIterator<Item = &'a Order>) -> Vec<String> {
    let mut ids: Vec<String> = orders.into_iter().map(|order| order.event_id.to_string()).collect();
    ids.sort();
    ids
}

#[test]
fn a_new_group_that_starts_at_the_end_applies_only_what_comes_after() {
    let world = World::with_partitions(2);
    world.topic.send(Order::some(10).iter().map(Order::message));
    let _engine = world.engine().set("kafka.start", "latest").start();
    let new = Order::some(10);
    world.topic.send(new.iter().map(Order::message));
    eventually_equal("the new ones are applied", ids(&new), || paid(&world));
    assert_eq!(world.database.count("SELECT count(*) FROM processed_event"), 10, "the old ones were not even claimed");
}

#[test]
fn what_came_between_a_kill_and_a_restart_is_applied_although_nothing_was_ever_committed() {
    let world = World::with_partitions(2);
    world.topic.send(Order::some(10).iter().map(Order::message));
    let engine = world.engine().set("kafka.start", "latest").set("kafka.commit_interval_ms", 5_500).start();
    engine.kill();
    assert_eq!(world.topic.committed(&world.group), BTreeMap::new());
    let meanwhile = Order::some(10);
    world.topic.send(meanwhile.iter().map(Order::message));
    let _engine = world.engine().set("kafka.start", "latest").start();
    eventually_equal("they are applied", ids(&meanwhile), || paid(&world));
}

#[test]
fn a_new_group_that_starts_at_the_beginning_applies_everything() {
    let world = World::with_partitions(2);
    let old = Order::some(10);
    world.topic.send(old.iter().map(Order::message));
    let _engine = world.engine().start();
    eventually_equal("all are applied", ids(&old), || paid(&world));
}

#[test]
fn a_partition_added_later_begins_at_its_beginning_also_when_new_groups_start_at_the_end() {
    let world = World::with_partitions(1);
    world.topic.send(Order::some(5).iter().map(Order::message));
    let refresh = ("kafka.options.topic.metadata.refresh.interval.ms", "300");
    let engine = world.engine().set("kafka.start", "latest").set(refresh.0, refresh.1).start();
    let mut new = Order::some(3);
    world.topic.send(new.iter().map(|order| order.message().partition(0)));
    eventually_equal("the first partition works", ids(&new), || paid(&world));

    // Records are there before the group hears of the partition: at the latest then, its end is not its beginning.
    assert!(engine.terminate().success());
    world.topic.grow(2);
    eventually_equal("the new partition is known", 2, || world.topic.ends().len());
    let early = Order::some(5);
    world.topic.send(early.iter().map(|order| order.message().partition(1)));
    let engine = world.engine().set("kafka.start", "latest").set(refresh.0, refresh.1).start();
    new.extend(early);
    eventually_equal("its first records are applied", ids(&new), || paid(&world));

    // And once more while the engine runs.
    world.topic.grow(3);
    eventually_equal("the new partition is known", 3, || world.topic.ends().len());
    let early = Order::some(5);
    world.topic.send(early.iter().map(|order| order.message().partition(2)));
    new.extend(early);
    eventually("it is taken over", || engine.status()["partitions"].as_array().is_some_and(|owned| owned.len() == 3));
    eventually_equal("its first records are applied", ids(&new), || paid(&world));
}

#[test]
fn what_is_settled_and_kafka_was_never_told_is_committed_though_no_record_comes() {
    let (world, stub) = (World::with_partitions(2), stub());
    let orders = Order::some(6);
    world.topic.send(orders.iter().map(Order::message));
    let engine = world.engine().provider(&stub.url()).start();
    eventually_equal("settled", 0, || world.topic.lag(&world.group));
    assert!(engine.terminate().success());
    world.topic.forget_group(&world.group);
    eventually_equal("Kafka knows no position", 6, || world.topic.lag(&world.group));
    let _next = world.engine().provider(&stub.url()).start();
    eventually_equal("Kafka knows again", 0, || world.topic.lag(&world.group));
    assert_eq!(stub.calls().posts, 6);
}
