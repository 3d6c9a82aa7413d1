//! One record that is no event stops a naive consumer for ever: it dies, restarts, and reads the same bytes again. Here each is held
//! with its reason, byte for byte, so that a person can look at it and replay it, and the next record is applied.

use std::time::{SystemTime, UNIX_EPOCH};

use uuid::{Builder, Uuid};

use crate::support::{Message, Order, World, assert_charged_once, eventually_equal};

/// A record that must be held: its payload, and why.
struct Poison {
    payload: Option<Vec<u8>>,
    reason: &'static str,
    /// A piece of the explanation.
    error: &'static str,
}

// R-KFK-IDEM-1: an id that is no UUID v7 is none. CASES E12 F08 E09
#[test]
fn every_poison_is_held_with_its_reason_and_its_bytes_and_the_next_record_is_applied() {
    let world = World::with_partitions(1);
    let stub = &world.provider;
    let good = Order::some(2);
    let poison = poison();
    world.topic.send([good[0].message().partition(0)]);
    world.topic.send(poison.iter().map(|poison| match &poison.payload {
        Some(bytes) => Message::new(bytes.clone()).key(*b"k\0\xff").partition(0),
        None => Message::tombstone().partition(0),
    }));
    world.topic.send([good[1].message().partition(0)]);
    let engine = world.engine().start();
    eventually_equal("the partition has moved on", 0, || world.topic.lag(&world.group));

    assert_charged_once(stub, &good);
    assert_eq!(world.database.count("SELECT count(*) FROM held_event"), i64::try_from(poison.len()).expect("few"));
    for (poison, offset) in poison.iter().zip(1..) {
        let held = &world.database.rows(&format!(
            "SELECT reason, error, encode(payload, 'hex'), encode(key, 'hex') FROM held_event
             WHERE source_offset = {offset} AND state = 'parked' AND NOT owns_claim"
        ))[0];
        let [reason, error, payload, key] = &held[..] else { panic!("four columns") };
        let (reason, error) = (reason.as_deref().expect("a reason"), error.as_deref().expect("words"));
        let shown = poison.payload.as_deref().map(|bytes| String::from_utf8_lossy(&bytes[..bytes.len().min(200)]).into_owned());
        assert_eq!(reason, poison.reason, "{shown:?}: {error}");
        assert!(error.contains(poison.error), "{shown:?}: {error}");
        assert!(*payload == poison.payload.as_deref().map(hex), "{shown:?} is held byte for byte");
        assert_eq!(*key, poison.payload.as_ref().map(|_| "6b00ff".to_owned()), "{shown:?}");
    }
    assert!(engine.is_ready(), "poison stops nothing");
    eventually_equal("the metric counts them", 1.0, || engine.metric("onceward_held_events", &[("reason", "beyond_horizon")]));

    // Read again from the beginning it is held still, once.
    assert!(engine.terminate().success());
    world.topic.reset_to_the_beginning(&world.group);
    let _engine = world.engine().start();
    eventually_equal("the partition has moved on once more", 0, || world.topic.lag(&world.group));
    assert_eq!(world.database.count("SELECT count(*) FROM held_event"), i64::try_from(poison.len()).expect("few"));
    assert_charged_once(stub, &good);
}

// CASES A15
#[test]
fn headers_that_no_text_type_takes_stop_nothing_and_are_held_byte_for_byte() {
    let world = World::with_partitions(1);
    let stub = &world.provider;
    let _engine = world.engine().start();
    let good = Order::some(4);
    world.topic.send_with_raw_header(0, good[0].json().as_bytes(), b"\xff\xfe", Some(b"\xff"));
    world.topic.send_with_raw_header(0, b"{", b"\xff\xfe", None);
    let many = |message: Message| (0..10_000).fold(message, |message, _| message.header("h", Some(b"v"))).partition(0);
    world.topic.send([
        many(good[1].message()),
        many(Message::new("{")),
        good[2]
            .message()
            .header("null", None)
            .header("empty", Some(b""))
            .header("twice", Some(b"\xff"))
            .header("twice", None)
            .partition(0),
        Message::new("{")
            .header("null", None)
            .header("empty", Some(b""))
            .header("twice", Some(b"\xff\0"))
            .header("twice", None)
            .partition(0),
        good[3].message().partition(0),
    ]);
    eventually_equal("the partition has moved on", 0, || world.topic.lag(&world.group));

    assert_charged_once(stub, &good);
    let held = world.database.column("SELECT encode(headers, 'hex') FROM held_event ORDER BY source_offset");
    let some = Some(&b"v"[..]);
    let expected = [
        packed(&[(b"\xff\xfe", None)]),
        packed(&vec![(&b"h"[..], some); 10_000]),
        packed(&[(b"null", None), (b"empty", Some(b"")), (b"twice", Some(b"\xff\0")), (b"twice", None)]),
    ];
    assert!(held == expected.map(|bytes| hex(&bytes)), "the headers are held byte for byte");
}

fn poison() -> Vec<Poison> {
    let order = Order::new();
    let event = |wrong: &dyn Fn(Order) -> String| Some(wrong(Order::new()).into_bytes());
    let with_id = |id: Uuid| event(&|order| Order { event_id: id, ..order }.json());
    let at = |ms: u64| Builder::from_unix_timestamp_millis(ms, &[7; 10]).into_uuid();
    let day = 86_400_000;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_millis();
    let now = u64::try_from(now).expect("before the year 500,000,000");
    let poison = |payload, reason, error| Poison { payload, reason, error };
    vec![
        poison(None, "undecodable", "tombstone"),
        poison(Some(Vec::new()), "undecodable", "empty"),
        poison(Some(b"null".to_vec()), "undecodable", "not a JSON object"),
        poison(Some(b"{}".to_vec()), "invalid", "eventId: missing; eventType: missing"),
        poison(Some(b"confirmed!".to_vec()), "undecodable", "not a JSON object"),
        poison(Some(b"{\"eventId\": ".to_vec()), "undecodable", "not JSON"),
        poison(Some(b"\0".to_vec()), "undecodable", "not a JSON object"),
        poison(Some(order.json().replace("Order", "Or\0der").into_bytes()), "undecodable", "not JSON"),
        poison(event(&|order| order.json().replace("\"EUR\"", "\"E\\u0000R\"")), "invalid", "currency"),
        poison(Some(b"{\xff\xfe}".to_vec()), "undecodable", "not UTF-8"),
        poison(Some(vec![b'x'; 900_000]), "undecodable", "not a JSON object"),
        poison(event(&|order| order.amount("1e400").json()), "invalid", "too large"),
        poison(event(&|order| order.amount("-0").json()), "invalid", "above 0"),
        poison(event(&|order| order.currency("XXQ").json()), "invalid", "currency"),
        poison(event(&|order| order.json().replace("{", "{\"orderId\":1,")), "invalid", "orderId: given more than once"),
        poison(with_id(Builder::from_random_bytes([7; 16]).into_uuid()), "invalid", "version 4"),
        poison(with_id(Uuid::nil()), "invalid", "nil"),
        poison(with_id(at(now + day)), "future", "future"),
        poison(with_id(at(now + 3_650 * day)), "future", "future"),
        poison(with_id(at(now - 30 * day)), "beyond_horizon", "floor"),
    ]
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut hex, byte| {
        use std::fmt::Write as _;
        write!(hex, "{byte:02x}").expect("a string takes it");
        hex
    })
}

/// The frozen form of `held_event.headers`: their number, then name and value, each behind its length; NULL has the length 2^32 - 1.
fn packed(headers: &[(&[u8], Option<&[u8]>)]) -> Vec<u8> {
    let number = |number: usize| u32::try_from(number).expect("small").to_be_bytes();
    let mut packed = number(headers.len()).to_vec();
    for (name, value) in headers {
        packed.extend([&number(name.len())[..], name].concat());
        packed.extend([&value.map_or([0xff; 4], |value| number(value.len()))[..], value.unwrap_or_default()].concat());
    }
    packed
}
