//! A restore, or a failover that lost commits, makes the database forget claims, payments and attempts of money that has moved. What it
//! then calls new may have been charged before: with the key still known that is one charge, with the key forgotten it is two. So every
//! such event is in doubt: it is asked for again only while the provider surely knows its key, and looked for, or left to a person,
//! afterwards. R-KFK-IDEM-3, R-KFK-IDEM-4.

use std::collections::BTreeMap;

use onceward::lab::provider_stub::{Act, Rule};
use uuid::Uuid;

use crate::support::{Order, Proxy, World, assert_charged_once, assert_the_books_agree, eventually, eventually_equal, stub};

const PAID: &str = "SELECT count(*) FROM payment";
const DOUBT: &str = "SELECT doubt_offset || ' ' || (doubt_before > now() - interval '2 minutes') FROM consumed_partition";
const HELD: &str = "SELECT event_id || ' ' || reason || ' ' || state FROM held_event ORDER BY event_id";

/// Orders whose ids are older than the life of a key.
fn old_orders(count: usize) -> Vec<Order> {
    const AGE_MS: u128 = 25 * 3_600_000;
    let aged = |order: Order| Order { event_id: Uuid::from_u128(order.event_id.as_u128() - (AGE_MS << 80)), ..order };
    Order::some(count).into_iter().map(aged).collect()
}

fn send(world: &World, orders: &[Order]) {
    world.topic.send(orders.iter().map(|order| order.message().partition(0)));
}

#[test]
fn restored_and_started_as_ever_it_charges_nothing_again_and_what_the_provider_knows_comes_back() {
    let (world, stub) = (World::with_partitions(1), stub());
    let (kept, old, young) = (Order::some(2), old_orders(3), Order::some(3));
    send(&world, &kept);
    let engine = world.engine().provider(&stub.url()).start();
    eventually_equal("settled", 0, || world.topic.lag(&world.group));
    assert!(engine.terminate().success());
    let backup = world.database.backup();

    let engine = world.engine().provider(&stub.url()).start();
    send(&world, &old);
    eventually_equal("paid", 5, || world.database.count(PAID));
    stub.forget_keys(); // a day goes by
    send(&world, &young);
    eventually_equal("all paid", 8, || world.database.count(PAID));
    eventually_equal("and committed", 0, || world.topic.lag(&world.group));
    assert!(engine.terminate().success());
    world.database.restore(&backup);
    assert_eq!(world.database.count(PAID), 2);

    let engine = world.engine().provider(&stub.url()).start();
    eventually_equal("those whose keys are known are paid again in our books", 5, || world.database.count(PAID));
    let unknown: Vec<_> = old.iter().map(|order| format!("{} unknown parked", order.event_id)).collect();
    eventually_equal("the others wait for a person", unknown, || world.database.column(HELD));
    assert_eq!(stub.calls().posts, 8 + 3);
    assert_charged_once(&stub, kept.iter().chain(&old).chain(&young));
    assert_eq!(world.database.column(DOUBT), ["8 true"]);
    assert_eq!(engine.metric("onceward_database_went_back_total", &[]), 1.0);
    assert_eq!(world.topic.committed(&world.group), BTreeMap::from([(0, 8)]), "Kafka's offset never went back");
    assert!(engine.terminate().success());

    // A provider that can be asked is asked, and nobody has to decide.
    world.database.execute("UPDATE held_event SET state = 'retrying', next_attempt_at = now()");
    let _asking = world.engine().provider(&stub.url()).set("provider.query", "idempotency_key").start();
    eventually_equal("found", 8, || world.database.count(PAID));
    assert_the_books_agree(&world, &stub, kept.iter().chain(&old).chain(&young));
    assert_eq!((stub.calls().posts, stub.calls().look_ups), (11, 3));
    assert_eq!(world.database.column(DOUBT), ["8 true"], "it is known once and for all");
}

#[test]
fn restored_under_a_running_process_it_charges_nothing_again() {
    let (world, stub) = (World::with_partitions(1), stub());
    let proxy = Proxy::before(&world.database);
    let orders = Order::some(6);
    let engine = world.engine().set("database.url", proxy.url()).provider(&stub.url()).start();
    send(&world, &orders[..2]);
    eventually_equal("paid", 2, || world.database.count(PAID));
    proxy.refuse();
    let backup = world.database.backup();
    proxy.open();
    send(&world, &orders[2..5]);
    eventually_equal("paid", 5, || world.database.count(PAID));
    proxy.refuse();
    world.database.restore(&backup);
    proxy.open();
    assert_eq!(world.database.count(PAID), 2);
    send(&world, &orders[5..]);
    eventually_equal("all are paid, in our books too", 6, || world.database.count(PAID));
    assert_the_books_agree(&world, &stub, &orders);
    assert_eq!((stub.calls().posts, stub.calls().bodies_changed), (6 + 3, 0));
    assert_eq!(world.database.column(DOUBT), ["5 true"], "what this process had written last");
    assert!(engine.terminate().success());
}

#[test]
fn a_standby_that_was_promoted_is_accepted_and_only_the_backlog_is_in_doubt() {
    let (world, stub) = (World::with_partitions(1), stub());
    let backlog = Order::some(3);
    let first = world.engine().provider(&stub.url()).start();
    eventually_equal("owned", 1, || world.database.count("SELECT count(*) FROM consumed_partition"));
    assert!(first.terminate().success());
    let timeline = world.database.text("SELECT timeline FROM consumed_partition");
    world.database.execute("UPDATE consumed_partition SET timeline = timeline + 8");
    send(&world, &backlog);
    let engine = world.engine().provider(&stub.url()).start();
    eventually_equal("the backlog is paid", 3, || world.database.count(PAID));
    assert_eq!(world.database.column("SELECT DISTINCT attempts FROM payment"), ["2"], "each may have been asked for before");
    let new = Order::some(3);
    send(&world, &new);
    eventually_equal("paid", 6, || world.database.count(PAID));
    assert_the_books_agree(&world, &stub, backlog.iter().chain(&new));
    assert_eq!(world.database.count("SELECT count(*) FROM payment WHERE attempts = 1"), 3, "what is younger is not");
    assert_eq!(world.database.text("SELECT timeline FROM consumed_partition"), timeline);
    assert!(engine.terminate().success());
    // The next start has nothing to doubt.
    let again = world.engine().provider(&stub.url()).start();
    assert_eq!(again.metric("onceward_database_went_back_total", &[]), 0.0);
}

// CASES G03
#[test]
fn no_such_charge_is_believed_only_when_the_last_attempt_is_long_enough_ago() {
    let (world, stub) = (World::with_partitions(1), stub());
    let (kept, made, never_made) = (Order::some(1), old_orders(1), old_orders(1));
    let engine = world.engine().provider(&stub.url()).start();
    send(&world, &kept);
    eventually_equal("settled", 0, || world.topic.lag(&world.group));
    assert!(engine.terminate().success());
    let backup = world.database.backup();
    let engine = world.engine().provider(&stub.url()).start();
    send(&world, &made);
    eventually_equal("settled", 0, || world.topic.lag(&world.group));
    assert!(engine.terminate().success());
    stub.forget_keys();
    world.database.restore(&backup);

    // Its index lags behind: neither is found.
    stub.be_blind(true);
    send(&world, &never_made);
    let asking = world.engine().provider(&stub.url()).set("provider.query", "idempotency_key");
    let _engine = asking.set("provider.query_settle_ms", 8_000).start();
    eventually("both were looked for in vain", || stub.calls().look_ups >= 2);
    stub.be_blind(false);
    eventually_equal("one was found, the other made", 3, || world.database.count(PAID));
    assert_the_books_agree(&world, &stub, kept.iter().chain(&made).chain(&never_made));
    assert_eq!(stub.calls().posts, 3, "no blind post");
    assert_eq!(world.database.count("SELECT count(*) FROM held_event WHERE state = 'applied'"), 2);
    let waited = "SELECT min(created_at - held_at) > interval '2 s' FROM payment JOIN held_event USING (event_id)";
    assert_eq!(world.database.text(waited), "t", "the longest wait of ours is one second");
}

// CASES G03: held before, and perhaps asked for in the time that is lost.
#[test]
fn a_held_event_that_is_open_in_the_restored_state_is_in_doubt_too() {
    let (world, stub) = (World::with_partitions(1), stub());
    let order = &old_orders(1)[0];
    stub.script([Rule::once(Act::status(400))]);
    send(&world, std::slice::from_ref(order));
    let engine = world.engine().provider(&stub.url()).start();
    eventually_equal("settled", 0, || world.topic.lag(&world.group));
    assert!(engine.terminate().success());
    assert_eq!(world.database.column("SELECT reason FROM held_event"), ["rejected"]);
    // As an operator would, who knows that nothing was charged.
    world.database.execute("DELETE FROM payment_attempt");
    let backup = world.database.backup();
    let again = "UPDATE held_event SET state = 'retrying', next_attempt_at = now()";
    world.database.execute(again);
    let engine = world.engine().provider(&stub.url()).start();
    eventually_equal("a replay charges it", 1, || world.database.count(PAID));
    assert!(engine.terminate().success());
    stub.forget_keys();
    world.database.restore(&backup);
    world.database.execute("UPDATE consumed_partition SET timeline = timeline + 8");

    world.database.execute(again);
    let _engine = world.engine().provider(&stub.url()).start();
    eventually_equal("a person must look", vec![format!("{} unknown parked", order.event_id)], || world.database.column(HELD));
    assert_charged_once(&stub, [order]);
    assert_eq!(stub.calls().posts, 2, "the refusal, and the charge that the database has forgotten");
}
