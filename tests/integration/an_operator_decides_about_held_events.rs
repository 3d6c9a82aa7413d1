//! Some events need a person: rejected, unknown for too long, no event at all. What the person decides is written down as a request and
//! carried out by the partition's owner, under its fence: two hands on one row, or a row changed under a running batch, would charge
//! twice or lose it.

use std::process::Output;

use onceward::lab::process::{self, Signal};
use onceward::lab::provider_stub::{Act, Rule};
use serde_json::Value;

use crate::support::{Message, Order, World, assert_charged_once, assert_the_books_agree, eventually, eventually_equal};

const HELD: &str = "SELECT reason || ' ' || state FROM held_event ORDER BY id";

/// Runs `onceward held …` with an actor and a reason, and gives its output and whether it ended with 0.
fn held(world: &World, words: &[&str]) -> (String, bool) {
    told(world.onceward(&[&["held"], words].concat()))
}

fn asked(world: &World, words: &[&str]) -> (String, bool) {
    held(world, &[words, &["--because", "seen with the bank", "--actor", "ann"]].concat())
}

fn told(output: Output) -> (String, bool) {
    let text = String::from_utf8(output.stdout).expect("text");
    assert!(matches!(output.status.code(), Some(0 | 1)), "{text}{}", String::from_utf8_lossy(&output.stderr));
    (text, output.status.success())
}

fn ids(world: &World) -> Vec<String> {
    world.database.column("SELECT id FROM held_event ORDER BY id")
}

fn json_lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect()
}

#[test]
fn what_is_held_is_listed_by_reason_key_time_and_state_and_shown_whole() {
    let world = World::with_partitions(1);
    let (rejected, good) = (Order::new(), Order::new());
    world.provider.script([Rule::for_order(rejected.order_id, Act::status(400))]);
    world.topic.send([
        rejected.message().key("customer-7").header("trace", Some(b"t\xff")),
        Message::new("\x1b[2Jno event").key(*b"k\0\xff"),
        good.message(),
    ]);
    let _engine = world.engine().start();
    eventually_equal("settled", 0, || world.topic.lag(&world.group));

    let list = |words: &[&str]| json_lines(&held(&world, &[&["list", "--format", "json"], words].concat()).0);
    let reasons = |rows: Vec<Value>| rows.iter().map(|row| row["reason"].as_str().expect("a word").to_owned()).collect::<Vec<_>>();
    assert_eq!(reasons(list(&[])), ["rejected", "undecodable"]);
    assert_eq!(reasons(list(&["--reason", "rejected"])), ["rejected"]);
    assert_eq!(reasons(list(&["--key", "customer-7"])), ["rejected"]);
    assert_eq!(reasons(list(&["--key", "customer-8"])), [""; 0]);
    assert_eq!(reasons(list(&["--until", "2026-01-01T00:00:00Z"])), [""; 0]);
    assert_eq!(reasons(list(&["--since", "2026-01-01T00:00:00+01:00"])).len(), 2);
    assert_eq!(reasons(list(&["--state", "applied"])), [""; 0]);
    assert_eq!(reasons(list(&["--partition", "1"])), [""; 0]);
    assert_eq!(reasons(list(&["--limit", "1"])), ["rejected"]);
    let (table, _) = held(&world, &["list", "--limit", "1"]);
    assert!(table.contains("customer-7") && table.contains("--limit shows them"), "{table}");

    let shown = &list(&["--reason", "rejected"])[0];
    assert_eq!(shown["payload"], rejected.json());
    assert_eq!(shown["headers"], serde_json::json!([["trace", {"hex": "74ff"}]]));
    assert_eq!(shown["event_id"], rejected.event_id.to_string());
    let (whole, _) = held(&world, &["show", &ids(&world)[1]]);
    assert!(whole.contains("undecodable") && !whole.contains('\x1b'), "nothing that a terminal obeys: {whole}");
    assert!(!told(world.onceward(&["held", "show", "4711"])).1);
}

// CASES F09
#[test]
fn a_rejected_event_is_replayed_once_the_cause_is_gone_and_asked_for_twice_it_is_one_effect() {
    let world = World::with_partitions(1);
    let order = Order::new();
    world.provider.script([Rule::always(Act::status(422))]);
    world.topic.send([order.message()]);
    let _engine = world.engine().start();
    eventually_equal("parked", vec!["rejected parked".to_owned()], || world.database.column(HELD));
    let id = ids(&world).remove(0);

    let (text, taken) = asked(&world, &["replay", &id, "--dry-run"]);
    assert!(taken && text.contains("would ask for replay"), "{text}");
    assert_eq!(world.database.count("SELECT count(*) FROM held_event WHERE actor IS NOT NULL"), 0, "a dry run writes nothing");

    world.provider.clear_script();
    let (text, taken) = asked(&world, &["replay", &id]);
    assert!(taken && text.contains("asked for replay"), "{text}");
    eventually_equal("applied", vec!["rejected applied".to_owned()], || world.database.column(HELD));
    let (text, taken) = asked(&world, &["replay", &id]);
    assert!(!taken && text.contains("it is applied"), "{text}");
    assert_the_books_agree(&world, &world.provider, [&order]);
    assert_eq!(world.provider.calls().posts, 2);
    assert_eq!(world.database.column("SELECT actor || ': ' || note FROM held_event"), ["ann: seen with the bank"]);

    // The record once more, from the producer: its claim has been there all the time.
    world.topic.send([order.message()]);
    eventually_equal("a duplicate", 0, || world.topic.lag(&world.group));
    assert_the_books_agree(&world, &world.provider, [&order]);
}

#[test]
fn a_filter_asks_for_all_it_lets_through_and_what_cannot_be_asked_for_is_told() {
    let world = World::with_partitions(1);
    let orders = Order::some(4);
    world.provider.script([Rule::for_order(orders[0].order_id, Act::status(500)), Rule::always(Act::status(400))]);
    world.topic.send(orders.iter().map(Order::message));
    let _engine = world.engine().set("retry.max_attempts", 1).start();
    eventually_equal("parked", 4, || world.database.count("SELECT count(*) FROM held_event WHERE state = 'parked'"));
    let (text, taken) = asked(&world, &["discard", "--since", "2026-01-01T00:00:00Z", "--format", "json"]);
    assert!(taken, "{text}");
    let told = json_lines(&text);
    assert_eq!(told.iter().filter(|line| line["requested"] == true).count(), 3);
    assert!(told[0]["why_not"].as_str().is_some_and(|why| why.contains("resolved, never discarded")), "{text}");
    let decided = ["unknown parked", "rejected discarded", "rejected discarded", "rejected discarded"].map(str::to_owned).to_vec();
    eventually_equal("discarded", decided, || world.database.column(HELD));
    assert_eq!(world.onceward(&["held", "discard", "--because", "no filter"]).status.code(), Some(64));
    assert_eq!(world.onceward(&["held", "discard", &ids(&world)[0]]).status.code(), Some(64), "no reason");
}

#[test]
fn an_unknown_outcome_that_was_a_charge_becomes_a_payment_and_nobody_is_asked_and_its_tail_follows() {
    let world = World::with_partitions(1);
    let [head, second] = [Order::new(), Order::new()];
    world.provider.script([Rule::for_order(head.order_id, Act::Close { charge: true, reset: true })]);
    world.topic.send([&head, &second].map(|order| order.message().key("a")));
    let _engine = world.engine().set("retry.max_attempts", 1).start();
    let waiting = ["unknown parked", "behind waiting"].map(str::to_owned).to_vec();
    eventually_equal("parked", waiting, || world.database.column(HELD));
    let charge = world.provider.ledger()[0].charge_id.clone().expect("it was charged");
    let id = ids(&world).remove(0);
    assert!(!asked(&world, &["discard", &id]).1, "an unknown outcome is resolved");
    assert!(!asked(&world, &["replay", &ids(&world)[1]]).1, "it waits for its head");

    let posts = world.provider.calls().posts;
    assert!(asked(&world, &["resolve", &id, "--charged", &charge]).1);
    let applied = ["unknown applied", "behind applied"].map(str::to_owned).to_vec();
    eventually_equal("the head is paid, and then its tail", applied, || world.database.column(HELD));
    assert_eq!(world.provider.calls().posts, posts + 1, "the tail alone was asked for");
    assert_the_books_agree(&world, &world.provider, [&head, &second]);
}

#[test]
fn an_unknown_outcome_that_was_no_charge_is_asked_for_as_if_nobody_had() {
    let world = World::with_partitions(1);
    let order = Order::new();
    world.provider.script([Rule::always(Act::status(500))]);
    world.topic.send([order.message()]);
    let _engine = world.engine().set("retry.max_attempts", 1).start();
    eventually_equal("parked", vec!["unknown parked".to_owned()], || world.database.column(HELD));
    // Beyond the key's life nobody is called any more, until a person says that nothing was charged.
    world.database.execute("UPDATE payment_attempt SET first_attempt_at = now() - interval '25 hours'");
    world.provider.clear_script();
    let id = ids(&world).remove(0);
    assert!(asked(&world, &["replay", &id]).1);
    let attempts = "SELECT attempts FROM held_event WHERE state = 'parked'";
    eventually_equal("parked again", vec!["2".to_owned()], || world.database.column(attempts));
    assert_eq!(world.provider.calls().posts, 1, "never blind");
    assert!(asked(&world, &["resolve", &id, "--not-charged"]).1);
    eventually_equal("applied", vec!["unknown applied".to_owned()], || world.database.column(HELD));
    assert_the_books_agree(&world, &world.provider, [&order]);
}

#[test]
fn a_discarded_head_lets_its_tail_go() {
    let world = World::with_partitions(1);
    let [head, second] = [Order::new(), Order::new()];
    world.topic.send([&head, &second].map(|order| order.message().key("a")));
    world.provider.script([Rule::for_order(head.order_id, Act::status(500))]);
    let _engine = world.engine().set("retry.max_attempts", 1).start();
    let waiting = ["unknown parked", "behind waiting"].map(str::to_owned).to_vec();
    eventually_equal("parked", waiting, || world.database.column(HELD));
    let [first, tail] = <[String; 2]>::try_from(ids(&world)).expect("two");
    // The tail may go without its head, and the head once it is known to be no charge.
    assert!(asked(&world, &["discard", &tail]).1);
    assert!(asked(&world, &["resolve", &first, "--not-charged"]).1);
    world.provider.clear_script();
    let decided = ["unknown applied", "behind discarded"].map(str::to_owned).to_vec();
    eventually_equal("decided", decided, || world.database.column(HELD));
    assert_charged_once(&world.provider, [&head]);
}

#[test]
fn an_event_below_the_floor_is_applied_once_when_it_is_replayed_however_often_it_came() {
    let world = World::with_partitions(1);
    let old =
        Order { event_id: uuid::Builder::from_unix_timestamp_millis(1_600_000_000_000, &[7; 10]).into_uuid(), ..Order::new() };
    world.topic.send([old.message(), old.message()]);
    let _engine = world.engine().start();
    let parked = vec!["beyond_horizon parked".to_owned()];
    eventually_equal("parked, and once", parked, || world.database.column(HELD));
    world.topic.send([old.message()]);
    eventually_equal("settled", 0, || world.topic.lag(&world.group));
    assert!(asked(&world, &["replay", "--reason", "beyond_horizon"]).1);
    let applied = vec!["beyond_horizon applied".to_owned()];
    eventually_equal("applied", applied, || world.database.column(HELD));
    world.topic.send([old.message()]);
    eventually_equal("settled", 0, || world.topic.lag(&world.group));
    assert_charged_once(&world.provider, [&old]);
    assert_eq!(world.provider.calls().posts, 1);
    assert_eq!(world.database.count("SELECT count(*) FROM payment"), 1);
    assert_eq!(world.database.column(HELD), ["beyond_horizon applied"]);
    assert_eq!(world.database.column("SELECT event_id FROM horizon_claim"), [old.event_id.to_string()]);
    assert_eq!(world.database.count("SELECT count(*) FROM processed_event"), 0, "days below the floor are never made");
}

#[test]
fn a_conflict_can_be_discarded_and_nothing_else() {
    let world = World::with_partitions(1);
    let order = Order::new();
    let other = order.clone().amount("99.00");
    world.topic.send([order.message(), other.message()]);
    let _engine = world.engine().start();
    eventually_equal("held", vec!["conflict parked".to_owned()], || world.database.column(HELD));
    let id = ids(&world).remove(0);
    assert!(!asked(&world, &["replay", &id]).1);
    assert!(!asked(&world, &["resolve", &id, "--not-charged"]).1);
    assert!(asked(&world, &["discard", &id]).1);
    eventually_equal("discarded", vec!["conflict discarded".to_owned()], || world.database.column(HELD));
    assert_the_books_agree(&world, &world.provider, [&order]);
}

#[test]
fn a_request_outlives_the_owner_that_dies_while_it_carries_it_out() {
    let world = World::with_partitions(1);
    let order = Order::new();
    world.provider.script([Rule::always(Act::status(422))]);
    world.topic.send([order.message()]);
    let mut engine = world.engine().environment("ONCEWARD_CRASH_POINTS", "request_read:kill").start();
    eventually_equal("parked", vec!["rejected parked".to_owned()], || world.database.column(HELD));
    world.provider.clear_script();
    assert!(asked(&world, &["replay", &ids(&world)[0]]).1);
    assert!(!engine.wait().success(), "killed by its own hand");
    assert_eq!(world.database.column("SELECT state || ' ' || wanted FROM held_event"), ["parked replay"]);
    let _next = world.engine().start();
    eventually_equal("applied", vec!["rejected applied".to_owned()], || world.database.column(HELD));
    assert_the_books_agree(&world, &world.provider, [&order]);
}

#[test]
fn an_event_that_was_being_asked_for_when_the_owner_died_is_not_discarded_but_resolved() {
    let world = World::with_partitions(1);
    let order = Order::new();
    world.provider.script([Rule::once(Act::status(422)), Rule::once(Act::Hold)]);
    world.topic.send([order.message()]);
    let engine = world.engine().start();
    eventually_equal("parked", vec!["rejected parked".to_owned()], || world.database.column(HELD));
    assert!(asked(&world, &["replay", &ids(&world)[0]]).1);
    eventually("charged, and the answer is held back", || world.provider.calls().held == 1);
    engine.kill();
    // The next owner reaches nobody, so its row says nothing of what the attempt's row knows.
    let nobody = format!("http://127.0.0.1:{}", process::free_port().expect("a port"));
    let _next = world.engine().provider(&nobody).start();
    eventually_equal("it is to be tried again", vec!["rejected retrying".to_owned()], || world.database.column(HELD));
    assert!(asked(&world, &["discard", &ids(&world)[0]]).1);
    eventually_equal("it stays", vec!["unknown parked".to_owned()], || world.database.column(HELD));
    let note = world.database.text("SELECT note FROM held_event");
    assert!(note.contains("resolve it"), "{note}");
    assert_charged_once(&world.provider, [&order]);
}

#[test]
fn a_stopped_partition_still_does_what_operators_ask_for() {
    let world = World::with_partitions(1);
    let [parked, refused, after] = [Order::new(), Order::new(), Order::new()];
    world.database.execute(&format!(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'refused'; END $$;
         CREATE TRIGGER refuse BEFORE INSERT ON payment FOR EACH ROW WHEN (NEW.order_id = {}) EXECUTE FUNCTION refuse()",
        refused.order_id
    ));
    world.provider.script([Rule::for_order(parked.order_id, Act::status(422)).times(1)]);
    let mut engine = world.engine().start();
    world.topic.send([parked.message()]);
    eventually_equal("parked", vec!["rejected parked".to_owned()], || world.database.column(HELD));
    world.topic.send([refused.message(), after.message()]);
    eventually("the partition stops", || engine.status()["partitions"][0]["stopped"].is_string());
    assert!(asked(&world, &["replay", &ids(&world)[0]]).1);
    eventually_equal("applied", vec!["rejected applied".to_owned()], || world.database.column(HELD));
    assert_eq!(world.database.column("SELECT order_id FROM payment"), [parked.order_id.to_string()]);
    assert!(!engine.is_ready(), "it is still stopped");
    engine.signal(Signal::Term);
    assert!(engine.wait().success(), "and ends in order");
}
