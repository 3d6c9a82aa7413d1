//! Kafka delivers at least once: a producer that missed an acknowledgement sends again, a consumer that died reads again, an operator
//! replays. The event id alone decides whether an event is new; without it every such day charges somebody twice.

use crate::support::{Message, Order, Topic, World, assert_charged_once, eventually, eventually_equal, unique_name};
use onceward::lab::provider_stub::{Act, Rule};

// R-KFK-IDEM-2, R-KFK-IDEM-3, R-KFK-IDEM-4
#[test]
fn the_same_event_again_changes_nothing_also_in_another_partition() {
    let world = World::new();
    let stub = &world.provider;
    let engine = world.engine().start();
    let orders = Order::some(50);
    world.topic.send(orders.iter().map(|order| order.message().partition(0)));
    eventually_equal("each order is paid", 50, || world.database.count("SELECT count(*) FROM payment"));
    let before = traces(&world);

    world.topic.send(orders.iter().map(|order| order.message().partition(0)));
    world.topic.send(orders.iter().map(|order| order.message().partition(1)));
    eventually_equal("the duplicates' offsets are committed", 0, || world.topic.lag(&world.group));
    assert_eq!(engine.metric("onceward_events_total", &[("outcome", "duplicate")]), 100.0);
    assert_eq!(engine.metric("onceward_duplicates_total", &[("cause", "produced_again")]), 100.0);
    assert_eq!(engine.metric("onceward_events_total", &[("outcome", "applied")]), 50.0);
    assert_eq!(traces(&world), before, "a duplicate writes nothing");
    assert_eq!(world.database.count("SELECT count(*) FROM held_event"), 0);
    assert_charged_once(stub, &orders);
    assert_eq!(stub.calls().posts, 50, "nobody is asked about a duplicate");
}

// R-KFK-IDEM-3
#[test]
fn a_duplicate_inside_one_batch_shares_the_fate_of_the_first() {
    let world = World::new();
    let stub = &world.provider;
    let engine = world.engine().patient().concurrency(1).start();
    // While the only DedupActor waits for the provider, the next batch gathers in another partition.
    let [held, a, b] = [Order::new(), Order::new(), Order::new()];
    stub.script([Rule::for_order(held.order_id, Act::Hold).times(1)]);
    world.topic.send([held.message().partition(0)]);
    eventually("a transaction is open", || stub.calls().held == 1);
    world.topic.send([&a, &a, &b, &a, &b].map(|order| order.message().partition(1)));
    eventually_equal("the duplicates stand in one window", 5.0, || engine.metric("onceward_window_records", &[("partition", "1")]));
    stub.release();

    eventually_equal("all is committed", 0, || world.topic.lag(&world.group));
    assert_eq!(engine.metric("onceward_batch_events_count", &[]), 2.0, "they were one batch");
    assert_eq!(engine.metric("onceward_batch_events_sum", &[]), 6.0);
    assert_eq!(engine.metric("onceward_events_total", &[("outcome", "duplicate")]), 3.0);
    assert_charged_once(stub, [&held, &a, &b]);
    let first_offsets = "SELECT source_offset FROM processed_event JOIN consumed_partition AS p ON p.id = source_id
                         ORDER BY p.partition, source_offset";
    assert_eq!(world.database.column(first_offsets), ["0", "0", "2"], "the claim is the first one's");
}

// R-KFK-IDEM-X2
#[test]
fn the_same_offset_with_a_new_id_applies_and_the_same_id_at_a_new_offset_does_not() {
    let world = World::with_partitions(2);
    let [a, b, c] = [Order::new(), Order::new(), Order::new()];
    let engine = world.engine().start();
    world.topic.send([a.message().partition(0), b.message().partition(1)]);
    world.topic.send([a.message().partition(0), a.message().partition(1)]);
    eventually_equal("all is committed", 0, || world.topic.lag(&world.group));
    assert_eq!(paid(&world), ids([&a, &b]));
    assert!(engine.terminate().success());

    // The same partition and offset once more, in a topic that replaces the first one.
    let successor = Topic::create(&unique_name(), 2);
    let engine = world.engine().set("kafka.topic", successor.name()).start();
    let sent = successor.send([c.message().partition(0), b.message().partition(0), a.message().partition(0)]);
    assert_eq!(sent, [(0, 0), (0, 1), (0, 2)]);
    eventually_equal("all is committed", 0, || successor.lag(&world.group));
    assert_eq!(paid(&world), ids([&a, &b, &c]));
    assert_eq!(engine.metric("onceward_events_total", &[("outcome", "duplicate")]), 2.0);
}

// R-KFK-IDEM-X1: `Claimed` has no other door than the claim (its compile-fail test stands in `handler.rs`).
#[test]
fn an_event_whose_claim_is_taken_has_no_effect() {
    let world = World::new();
    let stub = &world.provider;
    let engine = world.engine().start();
    let [claimed, free] = [Order::new(), Order::new()];
    let claim = "INSERT INTO processed_event (event_id, consumer_group) VALUES";
    world.database.execute(&format!("{claim} ('{}', '{}')", claimed.event_id, world.group));
    world.database.execute(&format!("{claim} ('{}', 'another-group')", free.event_id));
    world.topic.send([claimed.message(), free.message()]);
    eventually_equal("all is committed", 0, || world.topic.lag(&world.group));
    assert_eq!(paid(&world), ids([&free]));
    assert_charged_once(stub, [&free]);
    assert_eq!(engine.metric("onceward_events_total", &[("outcome", "duplicate")]), 1.0);
}

// R-KFK-IDEM-4. CASES F14: every legal spelling of an id is one key, here and at the provider.
#[test]
fn an_id_in_another_spelling_is_the_same_event() {
    let world = World::new();
    let stub = &world.provider;
    let engine = world.engine().start();
    let order = Order::new();
    let canonical = order.event_id.hyphenated().to_string();
    let spellings = [
        canonical.to_uppercase(),
        order.event_id.simple().to_string(),
        format!("{{{canonical}}}"),
        format!("urn:uuid:{canonical}"),
        format!("URN:UUID:{canonical}"),
        canonical.clone(),
    ];
    world.topic.send(spellings.iter().map(|spelling| Message::new(order.json().replace(&canonical, spelling)).partition(0)));
    eventually_equal("all is committed", 0, || world.topic.lag(&world.group));
    assert_charged_once(stub, [&order]);
    assert_eq!(engine.metric("onceward_events_total", &[("outcome", "duplicate")]), 5.0);
    assert_eq!(world.database.count("SELECT count(*) FROM held_event"), 0);
}

fn paid(world: &World) -> Vec<String> {
    world.database.column("SELECT event_id FROM payment ORDER BY 1")
}

fn ids<const N: usize>(orders: [&Order; N]) -> Vec<String> {
    let mut ids: Vec<String> = orders.iter().map(|order| order.event_id.to_string()).collect();
    ids.sort();
    ids
}

/// Every row that an event leaves, as it was written.
fn traces(world: &World) -> Vec<Vec<Option<String>>> {
    let claims = world.database.rows("SELECT c, c.xmin FROM processed_event AS c ORDER BY event_id");
    claims.into_iter().chain(world.database.rows("SELECT p, p.xmin FROM payment AS p ORDER BY event_id")).collect()
}
