//! Every deployment stops every process, mostly while it works. One that just dies leaves its last batch to be read twice; one that
//! waits for all its work is killed by the orchestrator; one that ends with an error wakes somebody.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use onceward::lab::broker::MockBroker;
use onceward::lab::process::Signal;
use onceward::lab::provider_stub::{Act, Rule};

use crate::support::{Engine, Order, World, assert_charged_once, eventually, eventually_equal};

// CASES F18
#[test]
fn sigterm_under_load_commits_what_is_settled_ends_with_0_and_the_restart_reads_nothing_twice() {
    ends_in_order(Signal::Term);
}

// CASES F18
#[test]
fn so_does_sigint() {
    ends_in_order(Signal::Int);
}

fn ends_in_order(signal: Signal) {
    /// `pipeline.drain_ms` of the tests.
    const DRAIN: Duration = Duration::from_secs(5);
    let world = World::new();
    let stub = &world.provider;
    stub.script([Rule::always(Act::Delay { ms: 20 })]);
    let orders = Order::some(1_000);
    world.topic.send(orders.iter().map(Order::message));
    // Small batches and few calls at once, so that the stop comes in the middle.
    let start = || world.engine().set("pipeline.batch_max", 40).set("provider.max_in_flight", 8).start();
    let mut engine: Engine = start();
    eventually("it works", || world.database.count("SELECT count(*) FROM payment") > 100);

    let asked = Instant::now();
    engine.signal(signal);
    let ended = engine.wait();
    assert!(ended.success(), "{ended}: {}", engine.log());
    assert!(asked.elapsed() < DRAIN, "it took {:?}", asked.elapsed());
    assert!(world.database.count("SELECT count(*) FROM payment") < 1_000, "it was asked in the middle");
    assert_eq!(stub.calls().in_flight, 0, "no call is left behind");
    assert_eq!(world.topic.committed(&world.group), frontiers(&world), "Kafka and the database have the same position");
    assert_eq!(world.database.count("SELECT count(*) FROM attempt_batch"), 0);

    stub.clear_script();
    let engine = start();
    eventually_equal("all is committed", 0, || world.topic.lag(&world.group));
    assert_eq!(engine.metric("onceward_events_total", &[("outcome", "duplicate")]), 0.0, "nothing was read twice");
    assert_charged_once(stub, &orders);
    assert_eq!(stub.calls().posts, 1_000, "nobody was asked twice");
}

// CASES B18. Nobody can be told the offsets or that the member leaves; the database knows them, and the session ends by itself.
#[test]
fn sigterm_while_the_broker_is_gone_ends_in_bounded_time() {
    /// `pipeline.drain_ms` of the tests, and what the process then gives itself for committing and leaving.
    const BOUND: Duration = Duration::from_secs(5 + 10);
    let world = World::new();
    let broker = MockBroker::start(world.topic.name(), 3).expect("a broker");
    let engine = world.engine().set("kafka.brokers", broker.bootstrap_servers()).assignor("range");
    // So late that the last offsets are still to be committed when the broker goes.
    let engine = engine.set("kafka.commit_interval_ms", 5_000);
    let produced = engine.clone().run_to_end(&["produce", "--count", "60"]);
    assert!(produced.status.success(), "{}", String::from_utf8_lossy(&produced.stderr));
    let mut engine = engine.start();
    eventually_equal("all is paid", 60, || world.database.count("SELECT count(*) FROM payment"));
    assert!(broker.committed(&world.group).expect("it answers").iter().any(Option::is_none), "not all of it is committed");

    drop(broker);
    let asked = Instant::now();
    engine.signal(Signal::Term);
    let ended = engine.wait();
    assert!(asked.elapsed() < BOUND + Duration::from_secs(5), "it took {:?}", asked.elapsed());
    assert!(matches!(ended.code(), Some(0 | 1)), "it ended by itself, and not by a crash: {ended}");
    assert_eq!(world.database.count("SELECT count(*) FROM attempt_batch"), 0);
}

fn frontiers(world: &World) -> BTreeMap<i32, i64> {
    let rows = world.database.rows("SELECT partition, next_offset FROM consumed_partition WHERE next_offset > 0");
    let number = |text: &Option<String>| text.as_deref().and_then(|text| text.parse().ok());
    rows.iter().map(|row| (number(&row[0]).expect("a partition") as i32, number(&row[1]).expect("an offset"))).collect()
}
