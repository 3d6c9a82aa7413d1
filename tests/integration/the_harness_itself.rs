//! The ground the other tests stand on holds.

use std::collections::BTreeMap;

use crate::support::{Database, Message, Order, Topic, World, eventually, eventually_equal};

#[test]
fn a_topic_keeps_what_is_sent_and_a_group_can_be_set_back_and_forgotten() {
    let topic = Topic::create(&crate::support::unique_name(), 2);
    let sent = topic.send(Order::some(10).iter().map(|order| order.message().partition(1)));
    assert_eq!(sent, (0..10).map(|offset| (1, offset)).collect::<Vec<_>>());
    topic.send([Message::tombstone().partition(0).header("empty", None)]);
    assert_eq!(topic.ends(), BTreeMap::from([(0, 1), (1, 10)]));

    topic.reset_to_the_beginning("a-group");
    assert_eq!(topic.committed("a-group"), BTreeMap::from([(0, 0), (1, 0)]));
    assert_eq!(topic.lag("a-group"), 11);
    topic.forget_group("a-group");
    eventually_equal("the group's offsets are gone", BTreeMap::new(), || topic.committed("a-group"));
    topic.grow(3);
    eventually_equal("the new partition is known", 3, || topic.ends().len());
}

#[test]
fn a_database_is_a_tests_own() {
    let database = Database::empty(&crate::support::unique_name());
    database.execute("CREATE TABLE things (n int, t text); INSERT INTO things VALUES (1, 'one'), (2, NULL)");
    assert_eq!(database.count("SELECT count(*) FROM things"), 2);
    assert_eq!(database.column("SELECT t FROM things ORDER BY n"), ["one", ""]);
    let holder = database.session();
    holder.rows("BEGIN; LOCK TABLE things");
    let refused = database.session().try_rows("SET lock_timeout = '50ms'; SELECT * FROM things");
    assert_eq!(refused.unwrap_err().code().unwrap().code(), "55P03");
}

#[test]
fn the_scaled_down_configuration_is_one_that_the_engine_accepts() {
    let world = World::new();
    assert_eq!(world.database.count("SELECT count(*) FROM payment"), 0);
    let checked = world.onceward(&["check", "--show-config"]);
    assert!(checked.status.success(), "{}{}", String::from_utf8_lossy(&checked.stdout), String::from_utf8_lossy(&checked.stderr));
}

#[test]
fn an_engine_charges_the_orders_of_its_world_and_ends_when_told() {
    let world = World::new();
    let orders = Order::some(20);
    world.topic.send(orders.iter().map(Order::message));
    let engine = world.engine().start();
    eventually_equal("each order is charged", 20, || world.database.count("SELECT count(*) FROM payment WHERE status = 'charged'"));
    eventually("its metrics tell it", || engine.metric("onceward_events_total", &[("outcome", "applied")]) == 20.0);
    eventually_equal("everything is committed", 0, || world.topic.lag(&world.group));
    assert_eq!(engine.terminate().code(), Some(0));
    assert_eq!(world.provider.ledger().len(), 20);

    let engine = world.engine().without_provider().start();
    world.topic.send(Order::some(3).iter().map(Order::message));
    eventually_equal("they are applied without a provider", 23, || world.database.count("SELECT count(*) FROM payment"));
    engine.kill();
    assert_eq!(world.provider.ledger().len(), 20);
}
