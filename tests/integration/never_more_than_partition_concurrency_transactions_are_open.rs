//! `partition_concurrency` is a promise to the database: so many connections that claim, no more, however many partitions have work.
//! One too many and a fleet of processes runs the server out of connections; one too few and a slow provider stops everything.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use onceward::lab::provider_stub::{Act, Rule};

use crate::support::{Order, RaisedAtTheEnd, World, assert_charged_once, eventually, eventually_equal};

/// Sessions of the engine whose transaction has claimed.
const CLAIMING: &str = "SELECT count(DISTINCT pid) FROM pg_locks JOIN pg_stat_activity AS session USING (pid)
    WHERE relation = 'processed_event'::regclass AND mode = 'RowExclusiveLock' AND granted
      AND session.datname = current_database() AND application_name = 'onceward' AND xact_start IS NOT NULL";

#[test]
fn twelve_partitions_with_work_open_two_transactions_when_two_are_allowed() {
    let world = World::with_partitions(12);
    let stub = &world.provider;
    let orders = Order::some(120);
    world.topic.send(orders.iter().zip(0..).map(|(order, n)| order.message().partition(n % 12)));
    stub.script([Rule::always(Act::Delay { ms: 40 })]);
    let over = AtomicBool::new(false);
    let most_seen = thread::scope(|scope| {
        let end = RaisedAtTheEnd(&over);
        let sampler = scope.spawn(|| {
            let session = world.database.session();
            let mut most = 0;
            while !over.load(Ordering::Acquire) {
                let claiming = session.rows(CLAIMING)[0][0].as_deref().and_then(|count| count.parse::<i64>().ok());
                most = most.max(claiming.expect("a number"));
            }
            most
        });
        // One event a batch, so that the calls in flight are the transactions that are open.
        let _engine = world.engine().concurrency(2).set("pipeline.batch_max", 1).start();
        eventually_equal("all is committed", 0, || world.topic.lag(&world.group));
        drop(end);
        sampler.join().expect("a number")
    });
    assert_eq!(stub.calls().max_in_flight, 2, "as the provider saw it");
    assert_eq!(most_seen, 2, "as the database saw it");
    assert_charged_once(stub, &orders);
}

#[test]
fn two_partitions_that_wait_for_the_provider_hold_up_the_others_and_nothing_else() {
    let world = World::with_partitions(12);
    let stub = &world.provider;
    let engine = world.engine().patient().concurrency(2).start();
    let orders = Order::some(12);
    stub.script([Rule::always(Act::Hold).times(2)]);
    world.topic.send(orders.iter().zip(0..).map(|(order, n)| order.message().partition(n)));
    eventually("two transactions are open", || stub.calls().held == 2);
    eventually_equal("all records are read", 12.0, || engine.metric("onceward_window_records", &[]));
    assert_eq!(world.database.count(CLAIMING), 2);
    assert_eq!(stub.calls().posts, 2, "the other ten wait");
    assert!(engine.is_ready());
    stub.release();
    eventually_equal("all is committed", 0, || world.topic.lag(&world.group));
    assert_charged_once(stub, &orders);
}
