//! Probes and metrics decide who is paged and which process is restarted.

use onceward::lab::process;

use crate::support::{Order, World, assert_the_books_agree, eventually, stub};

// CASES H06
#[test]
fn a_latency_is_a_histogram_whose_buckets_reach_thirty_seconds() {
    let (world, stub) = (World::with_partitions(1), stub());
    let order = Order::new();
    world.topic.send([order.message()]);
    let engine = world.engine().provider(&stub.url()).start();
    assert_the_books_agree(&world, &stub, [&order]);
    let (_, text) = engine.get("/metrics").expect("metrics");
    for name in ["onceward_provider_call_seconds", "onceward_stage_seconds", "onceward_record_age_at_commit_seconds"] {
        assert!(text.contains(&format!("# TYPE {name} histogram")), "{name}");
        assert!(text.lines().any(|line| line.starts_with(&format!("{name}_bucket{{")) && line.contains("le=\"30\"")), "{name}");
    }
    assert!(!text.contains("quantile="));
    assert_eq!(engine.metric("onceward_provider_call_seconds_bucket", &[("class", "charged"), ("le", "30")]), 1.0);
}

#[test]
fn it_is_alive_and_not_ready_before_its_first_assignment() {
    let world = World::new();
    let nobody = format!("127.0.0.1:{}", process::free_port().expect("a port"));
    let engine = world.engine().set("kafka.brokers", nobody).launch();
    let red = eventually("the database is there, the broker is not", || {
        engine.get("/ready").filter(|(_, body)| !body.contains("database") && !body.contains("schema"))
    });
    assert_eq!(red.0, 503);
    assert!(red.1.starts_with("assignment: "), "{}", red.1);
    assert!(engine.is_live());
    drop(engine);

    let engine = world.engine().start();
    let owned = engine.status()["partitions"].as_array().expect("a list").len();
    assert_eq!(owned, 3, "ready is said with the first assignment, not before");
}
