//! A parked event is written to `<topic>.dlq` too, for those who watch topics and not our tables. The row is the truth: the record may
//! come twice, may be cut to what the broker takes, may be late; and nothing of it ever holds up the partition.

use onceward::lab::provider_stub::{Act, Rule};

use crate::support::{EngineBuilder, Message, Order, Read, Topic, World, assert_charged_once, eventually, eventually_equal};

/// An engine that writes dead letters.
fn relaying(world: &World) -> EngineBuilder {
    world.engine().set("held.dead_letters", true)
}

/// Makes their topic.
fn take_letters(world: &World, settings: &[(&str, &str)]) -> Topic {
    Topic::configured(&format!("{}.dlq", world.topic.name()), 1, settings)
}

fn letters(world: &World) -> Vec<Read> {
    Topic::records_of(&format!("{}.dlq", world.topic.name()))
}

fn relayed(world: &World) -> i64 {
    world.database.count("SELECT count(relayed_at) FROM held_event")
}

#[test]
fn it_has_the_record_and_headers_that_point_at_its_source() {
    let world = World::with_partitions(2);
    take_letters(&world, &[]);
    let (rejected, retried) = (Order::new(), Order::new());
    world
        .provider
        .script([Rule::for_order(rejected.order_id, Act::status(422)), Rule::for_order(retried.order_id, Act::status(500))]);
    let sent = world.topic.send([
        rejected.message().key("k").partition(1).timestamp_ms(1_750_000_000_000).header("trace", Some(b"t-1")),
        retried.message().partition(0),
    ]);
    let engine = relaying(&world).start();
    eventually_equal("one dead letter", 1, || letters(&world).len());
    let letter = letters(&world).remove(0);
    assert_eq!((letter.key.as_deref(), letter.payload.as_deref()), (Some(&b"k"[..]), Some(rejected.json().as_bytes())));
    let (partition, offset) = (sent[0].0.to_string(), sent[0].1.to_string());
    let id = world.database.text("SELECT id FROM held_event WHERE state = 'parked'");
    for (name, value) in [
        ("trace", "t-1"),
        ("onceward-topic", world.topic.name()),
        ("onceward-partition", &partition),
        ("onceward-offset", &offset),
        ("onceward-timestamp", "1750000000000"),
        ("onceward-group", &world.group),
        ("onceward-reason", "rejected"),
        ("onceward-attempts", "1"),
        ("onceward-event-id", &rejected.event_id.to_string()),
        ("onceward-held-id", &id),
    ] {
        assert_eq!(letter.header(name), Some(value), "{name}: {:?}", letter.headers);
    }
    assert!(letter.header("onceward-error").is_some() && letter.header("onceward-cut").is_none(), "{:?}", letter.headers);
    eventually_equal("its row says so", 1, || relayed(&world));
    assert_eq!(engine.metric("onceward_dead_letters_total", &[("result", "ok")]), 1.0);

    // Replayed in vain it is parked once more, and that is a new dead letter.
    assert!(world.onceward(&["held", "replay", &id, "--because", "another try"]).status.success());
    eventually_equal("a second one", 2, || letters(&world).len());
    assert_eq!(letters(&world)[1].header("onceward-attempts"), Some("2"));
    eventually_equal("the retried one is none", 1, || relayed(&world));
}

#[test]
fn it_is_cut_to_what_the_broker_takes_and_keeps_the_pointer() {
    let world = World::with_partitions(1);
    take_letters(&world, &[("max.message.bytes", "20000")]);
    world.topic.send([
        Message::new(vec![b'x'; 500_000]).header("small", Some(b"1")),
        Message::new("no event").header("large", Some(&[b'y'; 100_000])),
        Message::new("no event either"),
    ]);
    let _engine = relaying(&world).start();
    eventually_equal("three dead letters", 3, || letters(&world).len());
    let letters = letters(&world);
    for (letter, offset) in letters.iter().zip(["0", "1", "2"]) {
        assert_eq!((letter.header("onceward-offset"), letter.header("onceward-topic")), (Some(offset), Some(world.topic.name())));
    }
    let cut = letters[0].payload.as_deref().map_or(0, <[u8]>::len);
    assert!((7_500..20_000).contains(&cut), "as much as fits: {cut}");
    assert_eq!(letters[0].header("small"), Some("1"));
    assert_eq!(letters[0].header("onceward-cut"), Some(&*format!("payload: {cut} of 500000 bytes")));
    assert_eq!(letters[1].header("onceward-cut"), Some("headers: 0 of 1"), "{:?}", letters[1].headers);
    assert_eq!(letters[1].payload.as_deref(), Some(&b"no event"[..]));
    assert_eq!(letters[2].header("onceward-cut"), None);
    assert_eq!(world.database.count("SELECT sum(octet_length(payload)) FROM held_event WHERE source_offset = 0"), 500_000);
}

// CASES F05, A19
#[test]
fn a_dead_letter_topic_that_refuses_stops_nothing_and_has_it_once_when_it_takes_it() {
    let world = World::with_partitions(1);
    let dead = take_letters(&world, &[("max.message.bytes", "100")]);
    let good = Order::new();
    world.topic.send([Message::new("no event"), good.message()]);
    let engine = relaying(&world).start();
    eventually_equal("the partition moves on", 0, || world.topic.lag(&world.group));
    assert_charged_once(&world.provider, [&good]);
    eventually("the refusal is counted", || engine.metric("onceward_dead_letters_total", &[("result", "failed")]) >= 1.0);
    assert_eq!((relayed(&world), letters(&world).len()), (0, 0));
    dead.alter("max.message.bytes", "100000");
    eventually_equal("it is written", 1, || relayed(&world));
    assert_eq!(letters(&world).len(), 1);
    assert!(engine.terminate().success());
}

#[test]
fn killed_between_the_record_and_its_mark_it_is_written_again() {
    let world = World::with_partitions(1);
    take_letters(&world, &[]);
    let mut engine = relaying(&world).environment("ONCEWARD_CRASH_POINTS", "relayed:kill").start();
    world.topic.send([Message::new("no event")]);
    assert!(!engine.wait().success(), "killed by its own hand");
    assert_eq!((relayed(&world), letters(&world).len()), (0, 1));
    let _next = relaying(&world).start();
    eventually_equal("its row says so", 1, || relayed(&world));
    let offsets: Vec<_> = letters(&world).iter().map(|letter| letter.header("onceward-offset").map(str::to_owned)).collect();
    assert_eq!(offsets, vec![Some("0".to_owned()); 2], "at least once");
}

#[test]
fn who_wants_none_gets_none() {
    let world = World::with_partitions(1);
    world.topic.send([Message::new("no event")]);
    let engine = world.engine().start();
    eventually_equal("settled", 0, || world.topic.lag(&world.group));
    assert!(engine.terminate().success());
    assert_eq!((relayed(&world), letters(&world).len()), (0, 0));
}
