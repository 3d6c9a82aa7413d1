//! Not every "no" is the same no: one means later, one means never, one means that nobody may call, one is a business answer. Taken for
//! another, an event is lost, charged twice, or tried for ever. R-KFK-IDEM-4.

use onceward::lab::process;
use onceward::lab::provider_stub::{Act, LedgerStatus, Options, ProviderStub, Rule};

use crate::support::{Order, World, assert_charged_once, assert_the_books_agree, eventually, eventually_equal, stub};

// CASES G01
#[test]
fn in_progress_is_asked_again_later_with_the_same_key() {
    let (world, stub) = (World::with_partitions(1), stub());
    let order = Order::new();
    stub.script([Rule::always(Act::InProgress).times(2)]);
    world.topic.send([order.message()]);
    let _engine = world.engine().provider(&stub.url()).start();
    eventually_equal("paid", 1, || world.database.count("SELECT count(*) FROM payment"));
    assert_the_books_agree(&world, &stub, [&order]);
    assert_eq!(stub.journal(), vec![order.event_id.to_string(); 3]);
    assert_eq!(world.database.column("SELECT reason || ' ' || state || ' ' || attempts FROM held_event"), ["unknown applied 3"]);
}

#[test]
fn too_many_requests_gives_the_events_back_and_costs_no_attempt() {
    let (world, stub) = (World::new(), stub());
    let orders = Order::some(6);
    stub.script([Rule::always(Act::busy(429, "1")).times(3)]);
    world.topic.send(orders.iter().map(Order::message));
    let _engine = world.engine().patient().provider(&stub.url()).start();
    assert_the_books_agree(&world, &stub, &orders);
    assert_eq!(world.database.count("SELECT count(*) FROM held_event"), 0);
    assert_eq!(world.database.column("SELECT DISTINCT attempts FROM payment"), ["1"]);
    assert_eq!(stub.calls().posts, 9);
}

#[test]
fn unavailable_is_unknown_and_waits_as_long_as_it_is_told() {
    let (world, stub) = (World::with_partitions(1), stub());
    let order = Order::new();
    stub.script([Rule::once(Act::busy(503, "3"))]);
    world.topic.send([order.message()]);
    let _engine = world.engine().provider(&stub.url()).start();
    eventually_equal("paid", 1, || world.database.count("SELECT count(*) FROM payment"));
    assert_the_books_agree(&world, &stub, [&order]);
    assert_eq!(world.database.column("SELECT reason || ' ' || state FROM held_event"), ["unknown applied"]);
    let waited = "SELECT created_at - held_at > interval '2.9 s' FROM payment JOIN held_event USING (event_id)";
    assert_eq!(world.database.text(waited), "t", "the longest wait of ours is one second");
}

#[test]
fn declined_is_a_business_answer_with_a_row_and_no_retry() {
    let (world, stub) = (World::with_partitions(1), stub());
    let order = Order::new();
    stub.script([Rule::always(Act::declined())]);
    world.topic.send([order.message(), order.message()]);
    let engine = world.engine().provider(&stub.url()).start();
    eventually_equal("settled", 0, || world.topic.lag(&world.group));
    assert_eq!(world.database.column("SELECT event_id || ' ' || status FROM payment"), [format!("{} declined", order.event_id)]);
    assert_eq!(world.database.count("SELECT count(*) FROM held_event"), 0);
    assert_eq!((stub.calls().posts, stub.ledger()[0].status), (1, LedgerStatus::Declined));
    assert_eq!(engine.metric("onceward_events_total", &[("outcome", "declined")]), 1.0);
    assert_eq!(engine.metric("onceward_events_total", &[("outcome", "duplicate")]), 1.0);
}

#[test]
fn a_charge_that_the_provider_rejects_is_held_for_a_person() {
    let (world, stub) = (World::with_partitions(1), stub());
    let (bad, good) = (Order::new(), Order::new());
    stub.script([Rule::for_order(bad.order_id, Act::status(400))]);
    world.topic.send([bad.message(), good.message()]);
    let _engine = world.engine().provider(&stub.url()).start();
    eventually_equal("settled", 0, || world.topic.lag(&world.group));
    assert_charged_once(&stub, [&good]);
    let held = "SELECT event_id || ' ' || reason || ' ' || state || ' ' || owns_claim FROM held_event";
    assert_eq!(world.database.column(held), [format!("{} rejected parked true", bad.event_id)]);
    assert_eq!(world.database.column("SELECT event_id FROM payment"), [good.event_id.to_string()]);
    assert_eq!(stub.calls().posts, 2);
}

#[test]
fn wrong_credentials_pause_everything_and_it_goes_on_by_itself() {
    let (world, stub) = (World::new(), stub());
    let orders = Order::some(20);
    stub.script([Rule::always(Act::busy(401, "1"))]);
    world.topic.send(orders.iter().map(Order::message));
    let _engine = world.engine().provider(&stub.url()).start();
    eventually("it has looked more than once", || stub.calls().posts > 20);
    let [claims, held, payments] =
        ["processed_event", "held_event", "payment"].map(|table| world.database.count(&format!("SELECT count(*) FROM {table}")));
    assert_eq!((claims, held, payments), (0, 0, 0), "nothing is settled while nobody may call");
    stub.clear_script();
    assert_the_books_agree(&world, &stub, &orders);
    assert_eq!(world.database.count("SELECT count(*) FROM held_event"), 0);
    assert_eq!(world.database.column("SELECT DISTINCT attempts FROM payment"), ["1"], "no such answer counts");
}

#[test]
fn a_provider_that_is_not_there_yet_is_waited_for() {
    let world = World::new();
    let orders = Order::some(20);
    let address = ([127, 0, 0, 1], process::free_port().expect("a port")).into();
    world.topic.send(orders.iter().map(Order::message));
    let engine = world.engine().provider(&format!("http://{address}")).start();
    eventually("nobody was reached", || engine.metric("onceward_provider_call_seconds_count", &[("class", "not_started")]) >= 1.0);
    eventually("the events are given back", || engine.metric("onceward_events_total", &[("outcome", "given_back")]) >= 1.0);
    let [claims, held] =
        ["processed_event", "held_event"].map(|table| world.database.count(&format!("SELECT count(*) FROM {table}")));
    assert_eq!((claims, held), (0, 0));

    let stub = ProviderStub::start(Options { listen: Some(address), ..Options::default() }).expect("the port is still free");
    assert_the_books_agree(&world, &stub, &orders);
    assert_eq!(world.database.count("SELECT count(*) FROM held_event"), 0);
    assert_eq!(world.database.column("SELECT DISTINCT attempts FROM payment"), ["1"]);
}
