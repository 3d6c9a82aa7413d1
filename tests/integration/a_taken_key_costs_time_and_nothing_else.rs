//! While a partition's events are new, their rows go in by plain `INSERT`s, which cost the database a third less. Such a batch is rolled
//! back whole when one of its keys turns out to be taken. Were that taken for bad data, events would be held for nothing; were the batch
//! run again without its answers, everybody in it would be charged once more. R-KFK-IDEM-3, R-KFK-IDEM-4.

use onceward::lab::provider_stub::{Act, Rule};

use crate::support::{Engine, EngineBuilder, Order, World, assert_the_books_agree, eventually, eventually_equal, stub};

const HELD: &str = "SELECT event_id || ' ' || reason || ' ' || state || ' ' || owns_claim FROM held_event";

fn optimistic(world: &World) -> EngineBuilder {
    world.engine().environment("ONCEWARD_CLAIM_FORM", "optimistic")
}

fn batches(engine: &Engine, form: &str) -> f64 {
    engine.metric("onceward_claims_total", &[("form", form)])
}

/// Somebody else pays, so much.
fn pay_by_hand(world: &World, order: &Order, amount: &str) {
    world.database.execute(&format!(
        "INSERT INTO payment (event_id, order_id, customer_id, amount, currency, status, provider_charge_id, attempts)
         VALUES ('{}', {}, {}, {amount}, 'EUR', 'charged', 'by hand', 1)",
        order.event_id, order.order_id, order.customer_id
    ));
}

#[test]
fn a_duplicate_among_new_events_changes_nothing_and_the_new_ones_are_applied() {
    let world = World::with_partitions(1);
    let engine = optimistic(&world).start();
    let orders = Order::some(40);
    world.topic.send(orders[..20].iter().map(Order::message));
    eventually_equal("the first are paid", 20, || world.database.count("SELECT count(*) FROM payment"));
    assert_eq!((batches(&engine, "taken"), batches(&engine, "on_conflict")), (0.0, 0.0));
    world.topic.send(orders.iter().rev().map(Order::message));
    assert_the_books_agree(&world, &world.provider, &orders);
    assert!(batches(&engine, "taken") >= 1.0);
    assert_eq!(batches(&engine, "on_conflict"), batches(&engine, "taken"), "each of them ran again in the other form");
    assert_eq!(engine.metric("onceward_events_total", &[("outcome", "duplicate")]), 20.0);
    assert_eq!(engine.metric("onceward_events_total", &[("outcome", "applied")]), 40.0);
    assert_eq!(world.provider.calls().posts, 40, "nobody was called before the claim was whole");
    assert_eq!(world.database.count("SELECT count(*) FROM held_event"), 0);
}

#[test]
fn a_payment_that_somebody_writes_during_the_call_is_no_bad_data_and_nobody_is_called_twice() {
    let (world, stub) = (World::with_partitions(1), stub());
    let [same, other, new] = [Order::new(), Order::new(), Order::new()];
    stub.script([Rule::for_order(same.order_id, Act::Hold).times(1)]);
    world.topic.send([&same, &other, &new].map(|order| order.message().partition(0)));
    let engine = optimistic(&world).provider(&stub.url()).patient().start();
    eventually("charged, and the answer is held back", || stub.calls().held == 1);
    pay_by_hand(&world, &same, "10.00");
    pay_by_hand(&world, &other, "11.00");
    stub.release();
    eventually_equal("settled", 0, || world.topic.lag(&world.group));
    assert_eq!(batches(&engine, "taken"), 1.0);
    assert_eq!(stub.calls().posts, 3, "their answers were kept");
    let held = world.database.column(HELD);
    assert_eq!(held, [format!("{} charged_not_recorded parked true", other.event_id)], "only what contradicts is for a person");
    assert_eq!(world.database.count("SELECT count(*) FROM payment"), 3);
    assert_eq!(world.database.count("SELECT count(*) FROM attempt_batch"), 0);
}

#[test]
fn where_nobody_is_asked_a_payment_that_stands_already_is_compared() {
    let world = World::with_partitions(1);
    let [same, other, new] = [Order::new(), Order::new(), Order::new()];
    pay_by_hand(&world, &same, "10.00");
    pay_by_hand(&world, &other, "11.00");
    world.topic.send([&same, &other, &new].map(|order| order.message().partition(0)));
    let engine = optimistic(&world).without_provider().start();
    eventually_equal("settled", 0, || world.topic.lag(&world.group));
    assert!(batches(&engine, "taken") >= 1.0);
    assert_eq!(world.database.column(HELD), [format!("{} conflict parked false", other.event_id)]);
    assert_eq!(world.database.count("SELECT count(*) FROM processed_event"), 2, "the claim of the conflict is given back");
    assert_eq!(world.database.count("SELECT count(*) FROM payment"), 3);
}

/// The offender is still found by halving, with plain inserts on the way.
#[test]
fn a_row_that_is_refused_costs_its_own_event_in_this_form_too() {
    let (world, stub) = (World::with_partitions(1), stub());
    let mut orders = Order::some(40);
    orders[17] = Order::new().amount("13.00");
    orders[30].order_id = orders[29].order_id;
    world.database.execute("ALTER TABLE payment ADD CONSTRAINT unlucky CHECK (amount <> 13)");
    // Somebody else's index: to the optimistic form it looks like the key.
    world.database.execute("CREATE UNIQUE INDEX one_payment_per_order ON payment (order_id)");
    world.topic.send(orders.iter().map(|order| order.message().partition(0)));
    let _engine = optimistic(&world).provider(&stub.url()).start();
    eventually_equal("settled", 0, || world.topic.lag(&world.group));
    let held = "SELECT source_offset || ' ' || reason FROM held_event ORDER BY source_offset";
    assert_eq!(world.database.column(held), ["17 charged_not_recorded", "30 charged_not_recorded"]);
    assert_eq!(stub.calls().posts, 40, "nobody is asked twice");
    assert_eq!(world.database.count("SELECT count(*) FROM payment"), 38);
}

#[test]
fn a_partition_becomes_optimistic_by_itself_and_one_taken_key_makes_it_look_first() {
    let world = World::with_partitions(1);
    let orders = Order::some(200);
    world.topic.send(orders.iter().map(Order::message));
    let adaptive = world.engine().environment("ONCEWARD_CLAIM_FORM", "adaptive").set("pipeline.batch_max", 10);
    let engine = adaptive.without_provider().start();
    eventually_equal("all are paid", 200, || world.database.count("SELECT count(*) FROM payment"));
    eventually("all batches are counted", || engine.metric("onceward_events_total", &[("outcome", "applied")]) == 200.0);
    assert_eq!(batches(&engine, "on_conflict"), 1.0, "the first, of which nobody knows anything");
    assert!(batches(&engine, "optimistic") >= 19.0);
    world.topic.send(orders.iter().map(Order::message));
    eventually("all are duplicates", || engine.metric("onceward_events_total", &[("outcome", "duplicate")]) == 200.0);
    assert_eq!(batches(&engine, "taken"), 1.0, "the first of the duplicates");
    assert_eq!(batches(&engine, "on_conflict"), 2.0, "and that batch once more");
    assert!(batches(&engine, "look_first") >= 19.0);
    assert_eq!(world.database.count("SELECT count(*) FROM payment"), 200);
}

fn looking_first(world: &World) -> EngineBuilder {
    world.engine().environment("ONCEWARD_CLAIM_FORM", "look_first")
}

#[test]
fn a_look_finds_repeats_and_conflicts_and_what_it_does_not_find_is_applied() {
    let world = World::with_partitions(1);
    let engine = looking_first(&world).start();
    let orders = Order::some(40);
    world.topic.send(orders[..20].iter().map(Order::message));
    eventually_equal("the first are paid", 20, || world.database.count("SELECT count(*) FROM payment"));
    let other_content = Order { event_id: orders[3].event_id, ..Order::new() };
    world.topic.send(orders.iter().rev().chain([&other_content]).map(Order::message));
    assert_the_books_agree(&world, &world.provider, &orders);
    eventually_equal("all are settled", 0, || world.topic.lag(&world.group));
    assert_eq!((batches(&engine, "taken"), batches(&engine, "on_conflict"), batches(&engine, "optimistic")), (0.0, 0.0, 0.0));
    assert_eq!(engine.metric("onceward_events_total", &[("outcome", "duplicate")]), 20.0);
    assert_eq!(engine.metric("onceward_events_total", &[("outcome", "applied")]), 40.0);
    assert_eq!(world.provider.calls().posts, 40);
    assert_eq!(world.database.column(HELD), [format!("{} conflict parked false", other_content.event_id)]);
}

/// Between the look and the claim somebody else claims one of them: of two partitions that get the same event, say.
#[test]
fn a_claim_that_a_look_came_too_early_for_is_found_all_the_same() {
    let world = World::with_partitions(1);
    let engine = looking_first(&world).patient_with_locks().start();
    let first = Order::new();
    world.topic.send([first.message()]);
    eventually_equal("paid", 1, || world.database.count("SELECT count(*) FROM payment"));
    let orders = Order::some(10);
    let somebody = world.database.session();
    let backend = somebody.backend();
    somebody.rows(&format!(
        "BEGIN; INSERT INTO processed_event (event_id, consumer_group, processed_at, source_id, event_digest, source_offset)
         SELECT '{}', consumer_group, now(), source_id, NULL, 77 FROM processed_event",
        orders[4].event_id
    ));
    world.topic.send(orders.iter().map(Order::message));
    eventually("the engine has looked, and waits for that claim", || {
        world.database.count(&format!("SELECT count(*) FROM pg_stat_activity WHERE {backend} = ANY (pg_blocking_pids(pid))")) == 1
    });
    somebody.rows("COMMIT");
    eventually_equal("all are settled", 0, || world.topic.lag(&world.group));
    assert_eq!(batches(&engine, "taken"), 1.0);
    assert_eq!(engine.metric("onceward_events_total", &[("outcome", "duplicate")]), 1.0);
    assert_eq!(world.provider.calls().posts, 10, "everybody but that one");
    assert_eq!(world.database.count("SELECT count(*) FROM payment"), 10);
}
