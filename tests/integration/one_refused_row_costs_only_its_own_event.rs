//! One row that the database does not take (a constraint of the house, an index of somebody else's) must cost its own event and nothing
//! else: neither the others of its batch nor the partition. And money that has moved is written down somewhere, or an operator who
//! replays the event pays twice. R-KFK-IDEM-3, R-KFK-IDEM-4.

use onceward::lab::provider_stub::{Act, ProviderStub, Rule};

use crate::support::{Order, World, assert_charged_once, assert_the_books_agree, eventually, eventually_equal, stub};

const HELD: &str = "SELECT event_id || ' ' || reason || ' ' || state || ' ' || owns_claim || ' ' || coalesce(provider_charge_id, '-') FROM held_event";
const UNLUCKY: &str = "ALTER TABLE payment ADD CONSTRAINT unlucky CHECK (amount <> 13)";
const LUCKY: &str = "ALTER TABLE payment DROP CONSTRAINT unlucky";
const AGAIN: &str = "UPDATE held_event SET state = 'retrying', next_attempt_at = now() WHERE state = 'parked'";

fn charge_id(stub: &ProviderStub, order: &Order) -> String {
    let entry = stub.ledger().into_iter().find(|entry| entry.idempotency_key == order.event_id.to_string());
    entry.and_then(|entry| entry.charge_id).expect("it was charged")
}

#[test]
fn a_charge_whose_row_is_refused_is_held_with_its_charge_and_its_replay_asks_nobody() {
    let (world, stub) = (World::with_partitions(1), stub());
    let mut orders = Order::some(512);
    orders[300] = Order::new().amount("13.00");
    world.database.execute(UNLUCKY);
    world.topic.send(orders.iter().map(Order::message));
    let engine = world.engine().provider(&stub.url()).start();
    eventually_equal("the frontier has passed all", 0, || world.topic.lag(&world.group));
    assert_charged_once(&stub, &orders);
    assert_eq!(stub.calls().posts, 512, "nobody is asked twice, however often the batch was halved");
    assert_eq!(world.database.count("SELECT count(*) FROM payment"), 511);
    let charge = charge_id(&stub, &orders[300]);
    let id = orders[300].event_id;
    assert_eq!(world.database.column(HELD), [format!("{id} charged_not_recorded parked true {charge}")]);
    let attempts = "SELECT event_id || ' ' || answer || ' ' || provider_charge_id FROM payment_attempt";
    assert_eq!(world.database.column(attempts), [format!("{id} charged {charge}")]);
    assert_eq!(world.database.count("SELECT count(*) FROM attempt_batch"), 0);

    world.database.execute(LUCKY);
    world.database.execute(AGAIN);
    assert!(engine.terminate().success());
    let _next = world.engine().provider(&stub.url()).start();
    eventually_equal("its row is written", 512, || world.database.count("SELECT count(*) FROM payment"));
    assert_the_books_agree(&world, &stub, &orders);
    assert_eq!(stub.calls().posts, 512);
}

#[test]
fn many_refused_rows_in_one_batch_are_each_held_and_the_rest_is_paid() {
    let (world, stub) = (World::with_partitions(1), stub());
    let mut orders = Order::some(64);
    for unlucky in [0, 1, 2, 31, 32, 63] {
        orders[unlucky] = Order::new().amount("13.00");
    }
    // Somebody else's index: another event of the same order.
    orders[40].order_id = orders[20].order_id;
    world.database.execute("CREATE UNIQUE INDEX one_payment_per_order ON payment (order_id)");
    world.database.execute(UNLUCKY);
    world.topic.send(orders.iter().map(|order| order.message().partition(0)));
    let _engine = world.engine().provider(&stub.url()).start();
    eventually_equal("the frontier has passed all", 0, || world.topic.lag(&world.group));
    assert_charged_once(&stub, &orders);
    assert_eq!(stub.calls().posts, 64);
    let held = "SELECT source_offset || ' ' || reason || ' ' || state FROM held_event ORDER BY source_offset";
    let expected: Vec<_> = [0, 1, 2, 31, 32, 40, 63].map(|offset| format!("{offset} charged_not_recorded parked")).into();
    assert_eq!(world.database.column(held), expected);
    assert_eq!(world.database.count("SELECT count(*) FROM payment"), 57);
    assert_eq!(world.database.count("SELECT count(*) FROM processed_event"), 64);
}

#[test]
fn where_nobody_is_asked_a_refused_row_is_held_as_refused() {
    let world = World::with_partitions(1);
    let orders = [Order::new(), Order::new().amount("13.00"), Order::new()];
    world.database.execute(UNLUCKY);
    world.topic.send(orders.iter().map(|order| order.message().partition(0)));
    let _engine = world.engine().without_provider().start();
    eventually_equal("the frontier has passed all", 0, || world.topic.lag(&world.group));
    assert_eq!(world.database.column(HELD), [format!("{} refused parked true -", orders[1].event_id)]);
    assert_eq!(world.database.count("SELECT count(*) FROM payment"), 2);
}

#[test]
fn the_row_of_a_retry_is_refused() {
    let (world, stub) = (World::with_partitions(1), stub());
    let orders = [Order::new(), Order::new().amount("13.00"), Order::new()];
    // All three are held first, and due together.
    stub.script([Rule { limit_per_key: Some(1), ..Rule::always(Act::status(500)) }]);
    world.database.execute(UNLUCKY);
    world.topic.send(orders.iter().map(|order| order.message().partition(0)));
    let _engine = world.engine().provider(&stub.url()).start();
    eventually_equal("two are paid", 2, || world.database.count("SELECT count(*) FROM payment"));
    let expected = format!("{} charged_not_recorded parked true {}", orders[1].event_id, charge_id(&stub, &orders[1]));
    eventually("the third is held with its charge", || world.database.column(HELD).contains(&expected));
    assert_charged_once(&stub, &orders);
    assert_eq!(stub.calls().posts, 6);
}

#[test]
fn a_held_row_that_is_refused_too_stops_the_partition_and_loses_nothing() {
    let (world, stub) = (World::with_partitions(2), stub());
    let orders = Order::some(20);
    world.database.execute("ALTER TABLE held_event ADD CONSTRAINT no_poison CHECK (reason <> 'undecodable')");
    let poison = crate::support::Message::new("no event").partition(0);
    let before = orders[..10].iter().map(|order| order.message().partition(0));
    let behind = orders[10..15].iter().map(|order| order.message().partition(0));
    let beside = orders[15..].iter().map(|order| order.message().partition(1));
    world.topic.send(before.chain([poison]).chain(behind).chain(beside));
    let engine = world.engine().provider(&stub.url()).start();
    let stopped = || engine.status()["partitions"][0]["stopped"].as_str().map(str::to_owned);
    let reason = eventually("it stops", stopped);
    assert!(reason.contains("no_poison") && reason.contains("23514"), "{reason}");
    eventually("readiness says so", || engine.get("/ready").is_some_and(|(code, body)| code == 503 && body.contains("stopped: 0")));
    eventually_equal("all before it and all beside it are paid", 15, || world.database.count("SELECT count(*) FROM payment"));
    assert_eq!(world.database.column("SELECT next_offset FROM consumed_partition ORDER BY partition"), ["10", "5"]);

    world.database.execute("ALTER TABLE held_event DROP CONSTRAINT no_poison");
    assert!(engine.terminate().success());
    let _next = world.engine().provider(&stub.url()).start();
    assert_the_books_agree(&world, &stub, &orders);
    assert_eq!(world.database.column("SELECT source_offset || ' ' || reason FROM held_event"), ["10 undecodable"]);
}
