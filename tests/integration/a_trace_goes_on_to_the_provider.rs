//! Whoever looks for what became of one order follows its trace from the shop to the bank. It breaks where a service in the middle forgets it;
//! and where that service believes whatever stands in a header, anybody who can produce a record writes the requests that go out.

use onceward::lab::provider_stub::{Act, Rule};

use crate::support::{Collector, Message, Order, Span, World, assert_charged_once, eventually, eventually_equal};

const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
const STATE: &str = "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE";
/// Stands in every header that must go nowhere.
const MARK: &str = "7b1f-must-go-nowhere";

fn traced(order: &Order, parent: impl AsRef<[u8]>) -> Message {
    order.message().header("traceparent", Some(parent.as_ref()))
}

#[test]
fn the_provider_is_told_the_trace_of_the_record_at_every_try_and_also_after_a_replay() {
    let (world, order, plain) = (World::with_partitions(1), Order::new(), Order::new());
    let lost = || Rule { limit_per_key: Some(1), ..Rule::for_order(order.order_id, Act::Close { charge: false, reset: false }) };
    world.provider.script([lost(), Rule::for_order(order.order_id, Act::status(422))]);
    world.topic.send([traced(&order, PARENT).header("tracestate", Some(STATE.as_bytes())), plain.message()]);
    // A refusal after an answer that was lost is not believed, so it is tried again, and then waits for a person.
    let engine = world.engine().set("retry.max_attempts", 3).start();
    eventually_equal("parked", 1, || world.database.count("SELECT count(*) FROM held_event WHERE state = 'parked'"));
    world.provider.clear_script();
    let replay = ["held", "replay", "--partition", "0", "--because", "they have found it"];
    assert!(world.onceward(&replay).status.success());
    eventually_equal("both are paid", 2, || world.database.count("SELECT count(*) FROM payment"));
    assert_charged_once(&world.provider, [&order, &plain]);

    let told = world.provider.traces(&order.event_id.to_string());
    assert!(told.len() >= 3, "{told:?}");
    for (parent, state) in told {
        assert_eq!((parent.as_deref(), state.as_deref()), (Some(PARENT), Some(STATE)));
    }
    assert_eq!(world.provider.traces(&plain.event_id.to_string()), [(None, None)], "a record that says nothing");
    assert!(engine.terminate().success());
}

#[test]
fn what_is_no_trace_goes_nowhere_and_its_record_is_charged_all_the_same() {
    let (world, order) = (World::with_partitions(1), Order::new);
    let hostile: [&[u8]; 6] = [
        b"",
        b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\r\nX-7b1f-must-go-nowhere: 1",
        b"00-00000000000000000000000000000000-00f067aa0ba902b7-01-7b1f-must-go-nowhere",
        b"7b1f-must-go-nowhere\x1b[2J\0\xff",
        b"ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-7b1f-must-go-nowhere",
        &[b'0'; 100_000],
    ];
    let mut orders = Vec::new();
    for parent in hostile {
        orders.push(order());
        world.topic.send([traced(orders.last().expect("one"), parent).header("tracestate", Some(b"7b1f-must-go-nowhere=1"))]);
    }
    let state = order();
    let bad_state = format!("rojo=1,congo={MARK}\r\nX-{MARK}: 1");
    world.topic.send([traced(&state, PARENT).header("tracestate", Some(bad_state.as_bytes()))]);
    let engine = world.engine().set("log.level", "debug").start();
    eventually("all are settled", || world.topic.lag(&world.group) == 0);
    assert_charged_once(&world.provider, orders.iter().chain([&state]));

    for order in &orders {
        assert_eq!(world.provider.traces(&order.event_id.to_string()), [(None, None)]);
    }
    let told = world.provider.traces(&state.event_id.to_string());
    assert_eq!(told, [(Some(PARENT.to_owned()), None)], "the trace goes on without a list that is wrong");
    assert!(!engine.log().contains(MARK), "{}", engine.log());
    assert!(engine.terminate().success());
}

// --- With an OpenTelemetry collector ---

fn parent_of(trace: &str, sampled: bool) -> String {
    format!("00-{trace}-00f067aa0ba902b7-0{}", u8::from(sampled))
}

fn trace_of(parent: &str) -> &str {
    parent.split('-').nth(1).expect("a trace id")
}

fn parent_id_of(parent: &str) -> &str {
    parent.split('-').nth(2).expect("a parent id")
}

/// The one post for this order.
fn told(world: &World, order: &Order) -> Option<String> {
    let mut told = world.provider.traces(&order.event_id.to_string());
    assert_eq!(told.len(), 1, "{told:?}");
    told.pop().and_then(|(parent, _)| parent)
}

#[test]
fn what_became_of_an_event_stands_in_the_trace_of_its_producer_and_tells_nothing_of_anybody() {
    let (world, collector) = (World::with_partitions(1), Collector::start());
    let (sampled, not_sampled) =
        (parent_of("4bf92f3577b34da6a3ce929d0e0e4736", true), parent_of("1af92f3577b34da6a3ce929d0e0e4736", false));
    let (mut order, skipped, plain) = (Order::new().amount("7654321.09"), Order::new(), Order::new());
    order.customer_id = 880_011_223_344;
    let lost = Rule::for_order(order.order_id, Act::Close { charge: true, reset: false }).times(1);
    world.provider.script([lost]);
    let key = "jane.doe@example.com";
    world.topic.send([
        traced(&order, &sampled).key(key).header("tracestate", Some(STATE.as_bytes())).header("customer", Some(key.as_bytes())),
        traced(&skipped, &not_sampled),
        plain.message(),
    ]);
    // Of the traces that begin here none is recorded: the producer's flag decides, and nothing else.
    let engine = world.engine().set("tracing.otlp_endpoint", collector.url()).set("tracing.sample_ratio", 0).start();
    eventually_equal("all are paid", 3, || world.database.count("SELECT count(*) FROM payment"));
    assert_charged_once(&world.provider, [&order, &skipped, &plain]);
    assert!(engine.terminate().success(), "what is queued is exported before the end");

    let spans = collector.spans();
    let named = |name: &str| spans.iter().filter(|span| span.name == name).collect::<Vec<_>>();
    let (events, calls, transactions) =
        (named(&format!("process {}", world.topic.name())), named("POST /v1/charges"), named("transaction"));
    let told = world.provider.traces(&order.event_id.to_string());
    assert_eq!((events.len(), calls.len(), told.len()), (2, 2, 2), "it was tried twice: {spans:#?}");
    for ((event, call), (parent, state)) in events.iter().zip(&calls).zip(&told) {
        let parent = parent.as_deref().expect("the provider is told");
        assert_eq!([&event.trace, &call.trace], [trace_of(&sampled); 2]);
        assert_eq!([trace_of(parent), parent_id_of(parent), &parent[53..]], [trace_of(&sampled), &call.id, "01"]);
        assert_eq!((event.parent.as_str(), &call.parent), ("00f067aa0ba902b7", &event.id));
        assert_eq!(state.as_deref(), Some(STATE));
        assert_eq!(event.attributes["messaging.kafka.offset"], "0");
        assert!(transactions.iter().any(|span| span.links == [event.id.clone()] && span.trace != event.trace), "{transactions:#?}");
    }
    let became = |spans: &[&Span], attribute: &str| spans.iter().map(|span| span.attributes[attribute].clone()).collect::<Vec<_>>();
    assert_eq!(
        (became(&events, "onceward.outcome"), became(&calls, "onceward.answer")),
        (vec!["unknown".to_owned(), "applied".to_owned()], vec!["unknown".to_owned(), "charged".to_owned()],)
    );
    assert_eq!([&events[0].error, &events[1].error], [&Some("unknown".to_owned()), &None]);
    assert_eq!(spans.len(), events.len() + calls.len() + transactions.len(), "nobody else is recorded: {spans:#?}");
    assert_eq!(world.provider.traces(&skipped.event_id.to_string()), [(Some(not_sampled), None)], "as it came");
    assert_eq!(world.provider.traces(&plain.event_id.to_string()), [(None, None)]);

    let exported: Vec<u8> = collector.bodies().concat();
    for secret in [key, "7654321", "880011223344", &order.event_id.to_string(), &order.order_id.to_string(), STATE] {
        // Numbers that short stand in offsets and times too.
        let is_there = secret.len() > 6 && exported.windows(secret.len()).any(|part| part == secret.as_bytes());
        assert!(!is_there, "{secret} in {spans:#?}");
    }
}

#[test]
fn a_record_without_a_trace_begins_one_and_one_that_does_not_commit_says_so() {
    let (world, collector, order) = (World::with_partitions(1), Collector::start(), Order::new());
    world.database.execute("ALTER TABLE payment ADD CONSTRAINT none CHECK (false) NOT VALID");
    world.topic.send([order.message()]);
    let engine = world.engine().set("tracing.otlp_endpoint", collector.url()).start();
    eventually_equal("held", 1, || world.database.count("SELECT count(*) FROM held_event"));
    assert!(engine.terminate().success());
    let spans = collector.spans();
    let call = spans.iter().find(|span| span.name == "POST /v1/charges").expect("a call");
    let parent = told(&world, &order).expect("the provider is told");
    assert_eq!((trace_of(&parent), parent_id_of(&parent)), (call.trace.as_str(), call.id.as_str()));
    let event = spans.iter().find(|span| span.id == call.parent).expect("its event");
    assert_eq!((event.parent.as_str(), event.error.as_deref()), ("", Some("no COMMIT was answered")));
    let transaction = spans.iter().find(|span| span.links == [event.id.clone()]).expect("its transaction");
    assert_eq!(transaction.error.as_deref(), Some("no COMMIT was answered"));
}

#[test]
fn a_collector_that_is_silent_slows_and_stops_nothing() {
    let (world, collector, orders) = (World::new(), Collector::silent(), Order::some(3_000));
    world.topic.send(orders.iter().map(Order::message));
    let engine = world.engine().set("tracing.otlp_endpoint", collector.url()).start();
    eventually("it is asked", || !collector.bodies().is_empty());
    eventually_equal("all are paid all the same", 3_000, || world.database.count("SELECT count(*) FROM payment"));
    eventually("it is said once", || engine.log().contains("spans cannot be exported and are dropped"));
    assert!(engine.is_ready() && engine.is_live());
    assert_charged_once(&world.provider, &orders);
    assert!(engine.terminate().success());
}
