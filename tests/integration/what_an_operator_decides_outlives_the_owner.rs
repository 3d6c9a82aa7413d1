//! At night somebody stops one partition, or takes one record out of its way. If that lives in a process, the next rebalance undoes it
//! without a word; if it is done to a partition at work, records are lost or applied twice. So it lives in the partition's row, every
//! owner finds it when it takes the partition over, and it takes the epoch: no batch begins that does not know of it.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use onceward::lab::provider_stub::{Act, Rule};
use serde_json::Value;

use crate::support::{
    Engine, Message, Order, RaisedAtTheEnd, World, assert_charged_once, assert_the_books_agree, eventually, eventually_equal,
};

const HELD: &str = "SELECT reason || ' ' || state FROM held_event ORDER BY id";
const LEFT: &str = "SELECT next_offset FROM consumed_partition ORDER BY partition";

/// Runs a command that must take the decision.
fn decide(world: &World, words: &[&str]) -> String {
    let output = world.onceward(&[words, &["--actor", "ann", "--reason", "it looks odd"]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

/// Runs a command that must not, and gives what it says.
fn refused(world: &World, words: &[&str]) -> String {
    let output = world.onceward(&[words, &["--actor", "ann", "--reason", "it looks odd"]].concat());
    assert_eq!(output.status.code(), Some(1));
    String::from_utf8(output.stderr).expect("text")
}

fn asked(world: &World, words: &[&str]) {
    let output = world.onceward(&[&["held"], words, &["--actor", "ann", "--because", "it is mended"]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

/// What `/status` says of a partition, if the engine owns it.
fn partition(engine: &Engine, number: i64) -> Option<Value> {
    let status = engine.status();
    let partitions = status["partitions"].as_array().expect("partitions");
    partitions.iter().find(|partition| partition["partition"] == number).cloned()
}

fn is_paused(engine: &Engine, number: i64) -> bool {
    partition(engine, number).is_some_and(|partition| partition["paused"] == "paused by ann: it looks odd")
}

/// So many orders, each in this partition.
fn send(world: &World, partition: i32, count: usize) -> Vec<Order> {
    let orders = Order::some(count);
    world.topic.send(orders.iter().map(|order| order.message().partition(partition)));
    orders
}

#[test]
fn a_paused_partition_stands_still_through_a_rebalance_and_a_restart_and_goes_on_when_it_is_resumed() {
    let world = World::with_partitions(2);
    let first = world.engine().start();
    let mut orders = [send(&world, 0, 3), send(&world, 1, 3)].concat();
    eventually_equal("all is settled", 0, || world.topic.lag(&world.group));

    let said = decide(&world, &["partition", "pause", "0"]);
    assert!(said.starts_with("partition 0 is paused"), "{said}");
    assert_eq!(
        world.database.column("SELECT paused_by || ': ' || paused FROM consumed_partition WHERE partition = 0"),
        ["ann: it looks odd"]
    );
    let waiting = send(&world, 0, 5);
    let mut more = |world: &World, settled: &str| {
        orders.extend(send(world, 1, 2));
        eventually_equal("the other one goes on", vec!["3".to_owned(), settled.to_owned()], || world.database.column(LEFT));
    };
    more(&world, "5");
    eventually("it says so", || is_paused(&first, 0));
    assert_eq!(first.metric("onceward_partition_paused", &[("partition", "0")]), 1.0);
    assert_eq!(first.metric("onceward_partition_paused", &[("partition", "1")]), 0.0);
    eventually("what waits is told", || partition(&first, 0).is_some_and(|partition| partition["lag"] == 5));
    assert!(first.is_live() && first.is_ready(), "a restart would not help it, and nothing is wrong");

    // A rebalance: another process comes, and the first one goes.
    let second = world.engine().start();
    eventually("both own one", || first.owned().len() == 1 && second.owned().len() == 1);
    more(&world, "7");
    let owner = if first.owned() == BTreeSet::from([0]) { &first } else { &second };
    eventually("it is paused, whoever has it", || is_paused(owner, 0));
    assert!(first.terminate().success());
    eventually("the second has it", || is_paused(&second, 0));
    more(&world, "9");

    // A restart: nobody is left who would remember.
    second.kill();
    let third = world.engine().start();
    eventually("the third has it", || is_paused(&third, 0));
    more(&world, "11");

    decide(&world, &["partition", "resume", "0"]);
    orders.extend(waiting);
    assert_the_books_agree(&world, &world.provider, &orders);
    eventually("and says so", || partition(&third, 0).is_some_and(|partition| partition["paused"].is_null()));
    assert!(third.terminate().success());

    let listed = world.onceward(&["actions", "--format", "json"]);
    let listed = String::from_utf8(listed.stdout).expect("text");
    let listed: Vec<Value> = listed.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect();
    assert_eq!(listed.iter().map(|line| line["action"].as_str().expect("a word")).collect::<Vec<_>>(), ["resume", "pause"]);
    assert!(listed.iter().all(|line| line["actor"] == "ann" && line["reason"] == "it looks odd" && line["partition"] == 0));
    let table = String::from_utf8(world.onceward(&["actions", "--limit", "1"]).stdout).expect("text");
    assert!(table.contains("ann") && table.contains("resume") && table.contains("--limit shows them"), "{table}");
}

#[test]
fn a_partition_that_is_paused_under_load_begins_nothing_more_and_loses_and_doubles_nothing() {
    let world = World::with_partitions(1);
    let engine = world.engine().start();
    let over = AtomicBool::new(false);
    let orders = thread::scope(|scope| {
        let end = RaisedAtTheEnd(&over);
        let sender = scope.spawn(|| {
            let mut sent = Vec::new();
            while !over.load(Ordering::Acquire) {
                sent.extend(send(&world, 0, 5));
            }
            sent
        });
        for _ in 0..3 {
            let before = world.provider.calls().posts;
            eventually("it is at work", || world.provider.calls().posts > before + 20);
            decide(&world, &["partition", "pause", "0"]);
            let posts = world.provider.calls().posts;
            let ends = world.topic.ends()[&0];
            eventually("more waits", || world.topic.ends()[&0] > ends + 50);
            eventually("it says so", || is_paused(&engine, 0));
            assert_eq!(world.provider.calls().posts, posts, "from the command's end on nobody is called");
            decide(&world, &["partition", "resume", "0"]);
        }
        drop(end);
        sender.join().expect("it sends")
    });
    assert_the_books_agree(&world, &world.provider, &orders);
    assert!(engine.terminate().success());
}

#[test]
fn what_is_due_in_a_paused_partition_waits_and_what_is_asked_for_is_noted() {
    let world = World::with_partitions(1);
    let [retried, rejected] = [Order::new(), Order::new()];
    world.provider.script([Rule::for_order(rejected.order_id, Act::status(422)), Rule::always(Act::status(500))]);
    let engine = world.engine().set("retry.backoff_min_ms", 700).set("retry.backoff_max_ms", 700).start();
    world.topic.send([retried.message(), rejected.message()]);
    let held = ["unknown retrying", "rejected parked"].map(str::to_owned).to_vec();
    eventually_equal("held", held, || world.database.column(HELD));
    decide(&world, &["partition", "pause", "0"]);
    world.provider.clear_script();
    let posts = world.provider.calls().posts;
    asked(&world, &["replay", &world.database.text("SELECT id FROM held_event WHERE state = 'parked'")]);
    let noted = "SELECT state FROM held_event WHERE wanted IS NULL AND state <> 'retrying'";
    eventually_equal("the owner has noted it", vec!["queued".to_owned()], || world.database.column(noted));
    let overdue = "SELECT count(*) FROM held_event WHERE next_attempt_at < now() - interval '1 second'";
    eventually_equal("the other is overdue", 1, || world.database.count(overdue));
    assert_eq!(world.provider.calls().posts, posts);
    assert!(is_paused(&engine, 0));

    decide(&world, &["partition", "resume", "0"]);
    assert_the_books_agree(&world, &world.provider, [&retried, &rejected]);
}

#[test]
fn a_partition_that_a_bad_record_has_stopped_moves_on_when_it_is_held_and_a_replay_applies_it_before_its_tail() {
    let world = World::with_partitions(1);
    let [before, bad, behind, after] = [Order::new(), Order::new(), Order::new(), Order::new()];
    world.database.execute(&format!(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'refused'; END $$;
         CREATE TRIGGER refuse BEFORE INSERT ON payment FOR EACH ROW WHEN (NEW.order_id = {}) EXECUTE FUNCTION refuse()",
        bad.order_id
    ));
    let engine = world.engine().start();
    world.topic.send([before.message()]);
    eventually_equal("the first is settled", 0, || world.topic.lag(&world.group));
    world.topic.send([bad.message().key("a")]);
    eventually("the partition stops", || partition(&engine, 0).is_some_and(|partition| partition["stopped"].is_string()));
    assert!(!engine.is_ready());
    world.topic.send([behind.message().key("a"), after.message().key("b")]);

    decide(&world, &["offsets", "hold", "0", "1"]);
    let held = ["operator parked", "behind waiting"].map(str::to_owned).to_vec();
    eventually_equal("it is held, and its key with it", held, || world.database.column(HELD));
    eventually_equal("the partition moves on", 0, || world.topic.lag(&world.group));
    eventually("nothing is stopped", || engine.is_ready());
    let row = "SELECT convert_from(payload, 'UTF8') || owns_claim || error || event_id FROM held_event WHERE source_offset = 1";
    let whole = format!("{}falseheld by ann: it looks odd{}", bad.json(), bad.event_id);
    assert_eq!(world.database.text(row), whole);
    assert_charged_once(&world.provider, [&before, &after, &bad]);
    assert_eq!(world.database.count("SELECT count(*) FROM payment"), 2, "what was charged before it was held has no row yet");

    world.database.execute("DROP TRIGGER refuse ON payment");
    asked(&world, &["replay", "--reason", "operator"]);
    let applied = ["operator applied", "behind applied"].map(str::to_owned).to_vec();
    eventually_equal("both are applied", applied, || world.database.column(HELD));
    assert_the_books_agree(&world, &world.provider, [&before, &bad, &behind, &after]);
    let keys: Vec<String> = world.provider.ledger().into_iter().map(|entry| entry.idempotency_key).collect();
    let place = |order: &Order| keys.iter().position(|key| *key == order.event_id.to_string());
    assert!(place(&bad) < place(&behind), "{keys:?}");
}

#[test]
fn a_record_to_come_is_held_when_it_comes_and_stays_held_when_it_is_read_again() {
    let world = World::with_partitions(1);
    let mut orders = {
        let engine = world.engine().start();
        let orders = send(&world, 0, 3);
        eventually_equal("all is settled", 0, || world.topic.lag(&world.group));
        assert!(refused(&world, &["offsets", "hold", "0", "1"]).contains("is settled, for everything below 3 is"));
        assert!(refused(&world, &["offsets", "hold", "1", "1"]).contains("ever owned partition 1"));
        decide(&world, &["offsets", "hold", "0", "3"]);
        decide(&world, &["offsets", "hold", "0", "5"]);
        assert!(engine.terminate().success());
        orders
    };
    let engine = world.engine().start();
    let [wanted, behind, free] = [Order::new(), Order::new(), Order::new()];
    // The one at 5 is no event at all.
    world.topic.send([wanted.message().key("a"), behind.message().key("a"), Message::new("{").key("c"), free.message().key("b")]);
    let held = ["operator parked", "behind waiting", "operator parked"].map(str::to_owned).to_vec();
    eventually_equal("held", held.clone(), || world.database.column(HELD));
    eventually_equal("all is settled", 0, || world.topic.lag(&world.group));
    let twice = refused(&world, &["offsets", "hold", "0", "3"]);
    assert!(twice.contains("is held already, as number") && twice.contains("(operator, parked)"), "{twice}");
    assert!(engine.terminate().success());

    world.topic.reset_to_the_beginning(&world.group);
    let _engine = world.engine().start();
    eventually_equal("all is read again", 0, || world.topic.lag(&world.group));
    assert_eq!(world.database.column(HELD), held);
    orders.push(free);
    assert_charged_once(&world.provider, &orders);

    asked(&world, &["discard", "--reason", "operator"]);
    let decided = ["operator discarded", "behind applied", "operator discarded"].map(str::to_owned).to_vec();
    eventually_equal("discarded, and its key goes on", decided, || world.database.column(HELD));
    orders.push(behind);
    assert_the_books_agree(&world, &world.provider, &orders);
    let audit = world.onceward(&["audit"]);
    assert!(audit.status.success(), "{}{}", String::from_utf8_lossy(&audit.stdout), String::from_utf8_lossy(&audit.stderr));
}

#[test]
fn an_owner_that_dies_while_it_holds_a_record_leaves_it_to_the_next_one() {
    let world = World::with_partitions(1);
    let mut engine = world.engine().environment("ONCEWARD_CRASH_POINTS", "held_written:kill").start();
    let mut orders = send(&world, 0, 1);
    eventually_equal("all is settled", 0, || world.topic.lag(&world.group));
    decide(&world, &["offsets", "hold", "0", "1"]);
    let held = Order::new();
    world.topic.send([held.message()]);
    assert!(!engine.wait().success(), "killed by its own hand");
    assert_eq!(world.database.column(HELD), [""; 0]);
    assert_eq!(world.database.column(LEFT), ["1"], "held and passed in one transaction, or neither");
    let _next = world.engine().start();
    eventually_equal("it is held", vec!["operator parked".to_owned()], || world.database.column(HELD));
    orders.extend(send(&world, 0, 1));
    assert_the_books_agree(&world, &world.provider, &orders);
    asked(&world, &["replay", "--reason", "operator"]);
    eventually_equal("it is applied", vec!["operator applied".to_owned()], || world.database.column(HELD));
    orders.push(held);
    assert_the_books_agree(&world, &world.provider, &orders);
}
