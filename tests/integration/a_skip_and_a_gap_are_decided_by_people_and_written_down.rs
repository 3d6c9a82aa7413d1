//! Records vanish: retention was faster than a long outage, a topic was made anew under the same name. Or somebody wants them passed
//! over. Whoever goes on silently has lost events; whoever stops for ever has lost the partition. So the engine says what is gone,
//! writes it down, and a person decides, once, for ever.

use crate::support::{Engine, Order, World, assert_charged_once, eventually, eventually_equal};

fn stopped(engine: &Engine, partition: usize) -> Option<String> {
    engine.status()["partitions"][partition]["stopped"].as_str().map(str::to_owned)
}

fn held(world: &World) -> Vec<String> {
    world.database.column("SELECT reason || ' ' || state || ' ' || source_offset || ' ' || error FROM held_event ORDER BY id")
}

fn offsets(world: &World, arguments: &[&str]) -> String {
    let output = world.onceward(&[&["offsets"], arguments].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

/// Ten are applied, ten more arrive while nobody reads, and five of these are gone before anybody does.
fn five_are_gone(world: &World) -> Vec<Order> {
    let mut orders = Order::some(10);
    world.topic.send(orders.iter().map(|order| order.message().partition(0)));
    let engine = world.engine().start();
    eventually_equal("ten are committed", 10, || world.topic.committed(&world.group).get(&0).copied().unwrap_or(0));
    assert!(engine.terminate().success());
    let later = Order::some(10);
    world.topic.send(later.iter().map(|order| order.message().partition(0)));
    world.topic.delete_records(0, 15);
    orders.extend_from_slice(&later[5..]);
    orders
}

// CASES B09
#[test]
fn records_that_are_gone_stop_their_partition_until_a_person_passes_over_them() {
    let world = World::with_partitions(2);
    let expected = five_are_gone(&world);
    let engine = world.engine().launch();
    let reason = eventually("partition 0 stops", || stopped(&engine, 0));
    assert!(reason.starts_with("records [10, 15) are gone from the log"), "{reason}");
    assert_eq!(held(&world), ["gap parked 10 records [10, 15) are gone from the log and were not settled"]);
    let other = Order::new();
    world.topic.send([other.message().partition(1)]);
    eventually_equal("the other partition works", 11, || world.database.count("SELECT count(*) FROM payment"));

    let dry = offsets(&world, &["skip", "--partition", "0", "--to", "15", "--reason", "retention was too short", "--dry-run"]);
    assert_eq!(dry, "partition 0: 5 offsets, [10, 15), would be passed over\n");
    let said =
        offsets(&world, &["skip", "--partition", "0", "--to", "15", "--reason", "retention was too short", "--actor", "ada"]);
    assert_eq!(said, "partition 0: [10, 15) is passed over from now on. Passed over in all: [10, 15)\n");
    eventually_equal("the rest is applied", 0, || world.topic.lag(&world.group));
    eventually("and nothing is stopped", || engine.is_ready());
    assert_charged_once(&world.provider, expected.iter().chain([&other]));
    let decision = "SELECT reason || ' ' || state || ': ' || actor || ': ' || note FROM held_event";
    assert_eq!(world.database.column(decision), ["gap discarded: ada: retention was too short"]);
    assert!(engine.terminate().success());
}

// CASES B09
#[test]
fn where_it_is_configured_so_the_partition_goes_on_behind_the_gap_that_it_has_written_down() {
    let world = World::with_partitions(1);
    let expected = five_are_gone(&world);
    let engine = world.engine().set("kafka.on_gap", "continue").start();
    eventually_equal("the rest is applied", 0, || world.topic.lag(&world.group));
    assert_charged_once(&world.provider, &expected);
    assert_eq!(held(&world), ["gap parked 10 records [10, 15) are gone from the log and were not settled"]);
    assert!(engine.terminate().success());
}

// CASES B11
#[test]
fn a_topic_that_was_made_anew_and_is_longer_already_stops_the_partition() {
    let world = World::with_partitions(1);
    let orders = ten_are_committed(&world);

    world.topic.make_anew();
    let others = Order::some(20);
    world.topic.send(others.iter().map(Order::message));
    let engine = world.engine().launch();
    let reason = eventually("the partition stops", || stopped(&engine, 0));
    assert!(reason.starts_with("the record at 9 is not the one that was settled there"), "{reason}");
    assert_charged_once(&world.provider, &orders);
    assert_eq!(world.database.count("SELECT count(*) FROM processed_event"), 10, "nothing of the new one was even claimed");
    assert!(engine.terminate().success());
}

// CASES B11
#[test]
fn the_record_that_was_settled_last_bears_witness_and_is_not_applied_again() {
    let world = World::with_partitions(1);
    let orders = ten_are_committed(&world);
    let later = Order::some(5);
    let engine = world.engine().start();
    world.topic.send(later.iter().map(Order::message));
    eventually_equal("all are committed", 0, || world.topic.lag(&world.group));
    assert_eq!(engine.metric("onceward_events_total", &[("outcome", "duplicate")]), 0.0);
    assert_charged_once(&world.provider, orders.iter().chain(&later));
    assert!(engine.terminate().success());
}

#[test]
fn what_an_operator_passes_over_is_never_applied_also_when_it_is_read_again() {
    let world = World::with_partitions(1);
    let nobody = format!("http://127.0.0.1:{}", onceward::lab::process::free_port().expect("a free port"));
    let engine = world.engine().provider(&nobody).start();
    let unwanted = Order::some(5);
    world.topic.send(unwanted.iter().map(Order::message));
    eventually("they cannot be charged", || engine.metric("onceward_events_total", &[("outcome", "given_back")]) > 0.0);
    // The owner is at work: it takes the partition over anew, and sees it.
    offsets(&world, &["skip", "--partition", "0", "--from", "0", "--to", "5", "--reason", "a test order", "--actor", "ada"]);
    eventually_equal("they are settled", 0, || world.topic.lag(&world.group));
    let decision = "SELECT reason || ' ' || state || ': ' || actor || ': ' || note FROM held_event";
    assert_eq!(world.database.column(decision), ["skipped discarded: ada: a test order"]);
    assert_eq!(engine.metric("onceward_events_total", &[("outcome", "skipped")]), 5.0);
    assert!(engine.terminate().success());

    world.topic.reset_to_the_beginning(&world.group);
    let wanted = Order::some(3);
    world.topic.send(wanted.iter().map(Order::message));
    let engine = world.engine().start();
    eventually_equal("all is read once more", 0, || world.topic.lag(&world.group));
    assert_charged_once(&world.provider, &wanted);
    assert_eq!(world.database.count("SELECT count(*) FROM processed_event"), 3);
    let shown: serde_json::Value = serde_json::from_str(&offsets(&world, &["show", "--format", "json"])).expect("JSON");
    let partition = &shown["partitions"][0];
    assert_eq!((&partition["settled"], &partition["committed"], &partition["log_ends"]), (&8.into(), &8.into(), &8.into()));
    assert_eq!(partition["passed_over"], serde_json::json!([[0, 5]]));
    let table = offsets(&world, &["show"]);
    assert!(table.lines().count() == 2 && table.contains("[0, 5)"), "{table}");
    assert!(engine.terminate().success());
}

#[test]
fn what_is_not_there_yet_cannot_be_passed_over() {
    let world = World::with_partitions(1);
    let orders = Order::some(3);
    world.topic.send(orders.iter().map(Order::message));
    let engine = world.engine().start();
    eventually_equal("all is committed", 0, || world.topic.lag(&world.group));
    for (arguments, complaint) in [
        (["--from", "1", "--to", "4"], "the log of partition 0 ends at 3: what is not there yet cannot be passed over"),
        (["--from", "2", "--to", "2"], "[2, 2) is empty"),
    ] {
        let output = world.onceward(&[&["offsets", "skip", "--partition", "0", "--reason", "a slip"][..], &arguments[..]].concat());
        assert_eq!(output.status.code(), Some(1));
        assert!(String::from_utf8_lossy(&output.stderr).contains(complaint), "{}", String::from_utf8_lossy(&output.stderr));
    }
    assert_eq!(world.database.count("SELECT count(*) FROM consumed_partition WHERE skips IS NOT NULL"), 0);
    assert!(engine.terminate().success());
}

/// By an engine that has ended since.
fn ten_are_committed(world: &World) -> Vec<Order> {
    let orders = Order::some(10);
    world.topic.send(orders.iter().map(Order::message));
    let engine = world.engine().start();
    eventually_equal("ten are committed", 0, || world.topic.lag(&world.group));
    assert!(engine.terminate().success());
    orders
}
