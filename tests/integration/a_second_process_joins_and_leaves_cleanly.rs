//! A deployment adds a process and takes it away again while orders arrive. During each change two processes may believe that a
//! partition is theirs; an event applied by both is charged twice, one that both leave to the other is lost.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crate::support::{Engine, Order, RaisedAtTheEnd, World, assert_charged_once, eventually, eventually_equal};

#[test]
fn with_range_every_event_is_applied_once_and_partitions_move_there_and_back() {
    joins_and_leaves("range");
}

#[test]
fn with_cooperative_sticky_every_event_is_applied_once_and_partitions_move_there_and_back() {
    joins_and_leaves("cooperative-sticky");
}

// CASES A12, B03: KIP-848, where the broker shares the partitions out.
#[test]
fn with_the_brokers_own_assignor_every_event_is_applied_once_and_partitions_move_there_and_back() {
    joins_and_leaves("broker");
}

// CASES H01
fn joins_and_leaves(assignor: &str) {
    const PARTITIONS: i64 = 6;
    let world = World::with_partitions(6);
    let stub = &world.provider;
    let start = || world.engine().assignor(assignor).start();
    let over = AtomicBool::new(false);
    let orders = thread::scope(|scope| {
        let end = RaisedAtTheEnd(&over);
        let sender = scope.spawn(|| send_until(&over, &world));
        let first = start();
        eventually_equal("the first owns all", (0..PARTITIONS).collect(), || owned(&first));
        let epochs = epochs(&world);

        let second = start();
        eventually("the partitions are shared", || {
            let (mine, its) = (owned(&first), owned(&second));
            let all = &mine | &its;
            mine.len() == 3 && its.len() == 3 && all.len() == 6
        });
        let moved = owned(&second);
        assert!(owned(&first).is_disjoint(&moved), "each partition has one owner");
        for (partition, (before, now)) in epochs.iter().zip(self::epochs(&world)).enumerate() {
            let partition = i64::try_from(partition).expect("small");
            assert!(if moved.contains(&partition) { now > *before } else { now >= *before }, "partition {partition}");
        }
        eventually_equal("the second has series of what it owns", moved.clone(), || series(&second));
        let mine: BTreeSet<i64> = &(0..PARTITIONS).collect() - &moved;
        assert_eq!(series(&first), mine, "those of the partitions that moved are gone");
        eventually("the second applies", || applied(&second) > 20.0);
        let duplicates = |engine: &Engine| engine.metric("onceward_events_total", &[("outcome", "duplicate")]);
        let before_it_leaves = duplicates(&second);
        let epochs = self::epochs(&world);

        assert!(second.terminate().success(), "it leaves in order");
        eventually_equal("the first owns all again", (0..PARTITIONS).collect(), || owned(&first));
        let now = self::epochs(&world);
        assert!(moved.iter().all(|partition| now[*partition as usize] > epochs[*partition as usize]), "{epochs:?} {now:?}");
        let so_far = applied(&first);
        eventually("the first goes on", || applied(&first) > so_far + 20.0);
        drop(end);
        let orders = sender.join().expect("it sends");
        eventually_equal("all is committed", 0, || world.topic.lag(&world.group));
        assert_eq!(before_it_leaves + duplicates(&first), 0.0, "whoever leaves in order leaves nothing to be read twice");
        orders
    });
    assert_eq!(world.database.count("SELECT count(*) FROM payment"), i64::try_from(orders.len()).expect("few"));
    assert_charged_once(stub, &orders);
}

/// Orders in all partitions without a pause.
fn send_until(over: &AtomicBool, world: &World) -> Vec<Order> {
    let mut sent = Vec::new();
    while !over.load(Ordering::Acquire) {
        let orders = Order::some(6);
        world.topic.send(orders.iter().zip(0..).map(|(order, partition)| order.message().partition(partition)));
        sent.extend(orders);
    }
    sent
}

fn owned(engine: &Engine) -> BTreeSet<i64> {
    let status = engine.status();
    let partitions = status["partitions"].as_array().expect("partitions");
    partitions.iter().map(|partition| partition["partition"].as_i64().expect("a number")).collect()
}

/// The partitions of which there is any series.
fn series(engine: &Engine) -> BTreeSet<i64> {
    let (_, body) = eventually("the engine tells its metrics", || engine.get("/metrics"));
    let of_partition = |line: &str| line.split_once("partition=\"")?.1.split('"').next()?.parse().ok();
    body.lines().filter_map(of_partition).collect()
}

fn applied(engine: &Engine) -> f64 {
    engine.metric("onceward_events_total", &[("outcome", "applied")])
}

fn epochs(world: &World) -> Vec<i64> {
    let epochs = world.database.column("SELECT epoch FROM consumed_partition ORDER BY partition");
    epochs.iter().map(|epoch| epoch.parse().expect("a number")).collect()
}
