//! An event that fails and is tried again later must not be overtaken by the next one of its key: an order that is cancelled before it
//! was confirmed is another order. Later events of the key wait behind it, in the database, and all other keys flow.

use onceward::lab::provider_stub::{Act, Rule};

use crate::support::{Engine, Order, World, assert_charged_once, assert_the_books_agree, eventually, eventually_equal};

const HELD: &str = "SELECT source_offset || ' ' || reason || ' ' || state FROM held_event ORDER BY id";

/// Orders in the one partition of a world, with their keys.
fn send(world: &World, orders: &[(&Order, &str)]) {
    world.topic.send(orders.iter().map(|(order, key)| order.message().key(*key).partition(0)));
}

fn posts_of(world: &World, order: &Order) -> usize {
    let id = order.event_id.to_string();
    world.provider.journal().iter().filter(|key| **key == id).count()
}

/// The ids that the provider was asked for, each at its first post.
fn first_posts(world: &World) -> Vec<String> {
    let mut seen = Vec::new();
    for id in world.provider.journal() {
        if !seen.contains(&id) {
            seen.push(id);
        }
    }
    seen
}

fn ids(orders: &[&Order]) -> Vec<String> {
    orders.iter().map(|order| order.event_id.to_string()).collect()
}

#[test]
fn later_events_of_a_key_wait_behind_a_failed_one_and_come_after_it_and_other_keys_flow() {
    let world = World::with_partitions(1);
    let [head, second, other, third] = [Order::new(), Order::new(), Order::new(), Order::new()];
    world.provider.script([Rule::for_order(head.order_id, Act::status(500))]);
    let _engine = world.engine().start();
    send(&world, &[(&head, "a")]);
    eventually_equal("it is held", vec!["0 unknown retrying".to_owned()], || world.database.column(HELD));
    send(&world, &[(&second, "a"), (&other, "b"), (&third, "a")]);
    eventually_equal("the frontier has passed all", 0, || world.topic.lag(&world.group));
    let held = ["0 unknown retrying", "1 behind waiting", "3 behind waiting"];
    assert_eq!(world.database.column(HELD), held);
    assert_charged_once(&world.provider, [&other]);
    eventually("the head is tried again, and nobody else", || posts_of(&world, &head) > 3);
    assert_eq!((posts_of(&world, &second), posts_of(&world, &third)), (0, 0));

    world.provider.clear_script();
    let applied = ["0 unknown applied", "1 behind applied", "3 behind applied"].map(str::to_owned).to_vec();
    eventually_equal("the tail follows its head", applied, || world.database.column(HELD));
    assert_eq!(first_posts(&world), ids(&[&head, &other, &second, &third]));
    assert_the_books_agree(&world, &world.provider, [&head, &second, &other, &third]);
}

#[test]
fn in_one_batch_nobody_is_called_behind_a_failed_event_of_its_key() {
    let world = World::with_partitions(1);
    let [head, second, other, third] = [Order::new(), Order::new(), Order::new(), Order::new()];
    world.provider.script([Rule::for_order(head.order_id, Act::InProgress)]);
    send(&world, &[(&head, "a"), (&second, "a"), (&other, "b"), (&third, "a")]);
    let _engine = world.engine().start();
    eventually_equal("the frontier has passed all", 0, || world.topic.lag(&world.group));
    assert_eq!(world.database.count("SELECT count(DISTINCT xmin::text) FROM processed_event"), 1, "they were one batch");
    assert_eq!(world.database.column(HELD), ["0 unknown retrying", "1 behind waiting", "3 behind waiting"]);
    assert_eq!((posts_of(&world, &second), posts_of(&world, &third)), (0, 0));
    world.provider.clear_script();
    assert_the_books_agree_in_the_end(&world, &[&head, &second, &other, &third]);
    assert_eq!(first_posts(&world)[2..], ids(&[&second, &third]));
}

fn assert_the_books_agree_in_the_end(world: &World, orders: &[&Order]) {
    eventually_equal("nothing is held any more", 0, || {
        world.database.count("SELECT count(*) FROM held_event WHERE state <> 'applied'")
    });
    assert_the_books_agree(world, &world.provider, orders.iter().copied());
}

#[test]
fn whoever_owns_the_partition_next_knows_the_sequences_from_its_first_batch_on() {
    let world = World::with_partitions(1);
    let [head, second, third] = [Order::new(), Order::new(), Order::new()];
    world.provider.script([Rule::for_order(head.order_id, Act::status(500))]);
    let engine = world.engine().start();
    send(&world, &[(&head, "a"), (&second, "a")]);
    eventually_equal("held", vec!["0 unknown retrying".to_owned(), "1 behind waiting".to_owned()], || world.database.column(HELD));
    engine.kill();
    send(&world, &[(&third, "a")]);
    let _next = world.engine().start();
    eventually_equal("the next one waits too", "2 behind waiting".to_owned(), || {
        world.database.column(HELD).pop().unwrap_or_default()
    });
    assert_eq!((posts_of(&world, &second), posts_of(&world, &third)), (0, 0));
    world.provider.clear_script();
    assert_the_books_agree_in_the_end(&world, &[&head, &second, &third]);
    assert_eq!(first_posts(&world), ids(&[&head, &second, &third]));
}

#[test]
fn behind_a_head_that_ran_out_of_attempts_they_wait_for_a_person() {
    let world = World::with_partitions(1);
    let [head, second, other] = [Order::new(), Order::new(), Order::new()];
    world.provider.script([Rule::for_order(head.order_id, Act::status(500))]);
    let _engine = world.engine().set("retry.max_attempts", 2).start();
    send(&world, &[(&head, "a"), (&second, "a")]);
    let parked = ["0 unknown parked", "1 behind waiting"].map(str::to_owned).to_vec();
    eventually_equal("the head is parked", parked.clone(), || world.database.column(HELD));
    send(&world, &[(&other, "b")]);
    eventually_equal("other keys flow", 0, || world.topic.lag(&world.group));
    assert_charged_once(&world.provider, [&other]);
    assert_eq!(world.database.column(HELD), parked);
    assert_eq!(posts_of(&world, &second), 0);
}

#[test]
fn a_rejected_event_and_one_without_a_key_hold_nobody_up() {
    let world = World::with_partitions(1);
    let [rejected, after, keyless, last] = [Order::new(), Order::new(), Order::new(), Order::new()];
    world
        .provider
        .script([Rule::for_order(rejected.order_id, Act::status(422)), Rule::for_order(keyless.order_id, Act::status(500))]);
    send(&world, &[(&rejected, "a"), (&after, "a")]);
    let without_key = |order: &Order| crate::support::Message::new(order.json()).partition(0);
    world.topic.send([without_key(&keyless), without_key(&last)]);
    let _engine = world.engine().start();
    eventually_equal("all is settled", 0, || world.topic.lag(&world.group));
    assert_eq!(world.database.column(HELD), ["0 rejected parked", "2 unknown retrying"]);
    assert_charged_once(&world.provider, [&after, &last]);
}

fn paused(engine: &Engine) -> Option<String> {
    engine.status()["partitions"][0]["paused"].as_str().map(str::to_owned)
}

#[test]
fn with_too_many_open_events_the_partition_pauses_and_says_so_and_goes_on_when_there_are_fewer() {
    let world = World::with_partitions(1);
    let orders = Order::some(8);
    world.provider.script([Rule::always(Act::status(500))]);
    let engine = world.engine().set("held.max_open", 3).set("pipeline.batch_max", 2).set("retry.max_attempts", 1_000).start();
    world.topic.send(orders.iter().map(Order::message));
    let reason = eventually("it pauses", || paused(&engine));
    assert!(reason.contains("held.max_open"), "{reason}");
    let held = || world.database.count("SELECT count(*) FROM held_event");
    assert_eq!(held(), 4, "two batches of two, and not one more");
    assert_eq!(engine.metric("onceward_held_open_events", &[("partition", "0")]), 4.0);
    assert_eq!(engine.metric("onceward_partition_paused", &[("partition", "0")]), 1.0);
    eventually("the retries run", || world.provider.calls().posts > 12);
    assert_eq!(held(), 4, "while nothing more is read");

    world.provider.clear_script();
    assert_the_books_agree_in_the_end(&world, &orders.iter().collect::<Vec<_>>());
    eventually_equal("and it says that it has gone on", None, || paused(&engine));
}
