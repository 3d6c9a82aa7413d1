//! Each program under `examples/` as its reader would run it: its own tables, the environment, signals. One of them is killed in the middle.

use std::collections::HashMap;
use std::env;
use std::io::{BufRead, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread;

use onceward::testing::{CrashPoint, World, kill_at};
use uuid::Uuid;

use crate::support::{Order, server};

const LEDGER: &str = include_str!("../../examples/ledger.sql");
const NOTIFY: &str = include_str!("../../examples/notify.sql");
const STOCK: &str = include_str!("../../examples/stock.sql");

/// A world in the servers that all tests share, whose batches are small enough for a death between them.
fn world(tables: &str) -> World {
    let mut world = World::within(&server("ONCEWARD_TEST_KAFKA"), &server("ONCEWARD_TEST_DATABASE_URL"), tables);
    world.set("pipeline.batch_max", "16");
    world
}

/// `cargo test` builds the examples before any test, into the folder beside the tests'.
fn example(name: &str) -> Command {
    let tests = env::current_exe().expect("a test has a file");
    let program = tests.ancestors().nth(2).expect("target/debug/deps").join("examples").join(name);
    assert!(program.exists(), "{} is not built: cargo build --features lab --examples", program.display());
    Command::new(program)
}

fn record(order: &Order) -> (String, String) {
    (order.order_id.to_string(), order.json())
}

fn ids(orders: &[Order]) -> Vec<Uuid> {
    orders.iter().map(|order| order.event_id).collect()
}

fn text(rows: Vec<Vec<Option<String>>>) -> Vec<Vec<String>> {
    rows.into_iter().map(|row| row.into_iter().map(Option::unwrap_or_default).collect()).collect()
}

// R-KFK-IDEM-2, R-KFK-IDEM-3
#[test]
fn a_ledger_that_is_killed_between_its_rows_and_the_commit_and_again_after_it_books_each_order_once() {
    let world = world(LEDGER);
    let orders: Vec<Order> = Order::some(300).into_iter().map(|order| order.amount("10.25")).collect();
    world.send(orders.iter().map(record));
    world.send(orders.iter().step_by(4).map(record));

    for (point, passage) in [(CrashPoint::BeforeCommit, 4), (CrashPoint::Committed, 3)] {
        let mut program = example("ledger");
        program.envs([kill_at(point, passage)]);
        world.spawn(program).wait_until_killed();
    }
    let booked = text(world.rows("SELECT count(*) FROM ledger_entry"));
    assert_ne!(booked, [["0"]], "it has died in the middle");
    assert_ne!(booked, [["300"]], "it has died in the middle");
    let ledger = world.spawn(example("ledger"));
    world.wait_until_settled();
    ledger.stop();

    world.assert_each_once(ids(&orders), "SELECT event_id FROM ledger_entry");
    let balances = text(world.rows("SELECT customer_id, currency, minor_units FROM ledger_balance"));
    assert_eq!(balances, [["7", "EUR", "307500"]], "a balance has no key that would forgive a repeat");
}

#[test]
fn a_group_that_notifies_sends_one_message_for_each_order_whatever_becomes_of_the_answer() {
    let world = world(NOTIFY);
    let orders = Order::some(60);
    let inbox = Inbox::start(HashMap::from([
        (orders[3].event_id, vec![Answer::Lost, Answer::Sent]),
        (orders[20].event_id, vec![Answer::Busy, Answer::Broken, Answer::Sent]),
        (orders[40].event_id, vec![Answer::Never]),
    ]));
    world.send(orders.iter().map(record));
    world.send(orders.iter().step_by(4).map(record));
    let mut notify = example("notify");
    notify.env("NOTIFY_URL", &inbox.url).env("NO_PROXY", "127.0.0.1");
    let notify = world.spawn(notify);
    world.wait_until_settled();
    notify.stop();

    let mut sent = ids(&orders);
    let refused = sent.remove(40);
    sent.sort_unstable();
    let messages = inbox.messages();
    assert_eq!(messages.len(), 59);
    assert!(sent.iter().all(|id| messages[id] == 1), "one message for each order");
    let rows = "SELECT event_id FROM notification UNION ALL SELECT event_id FROM held_event WHERE state = 'parked'";
    world.assert_each_once(ids(&orders), rows);
    let held = text(world.rows("SELECT reason, state, event_id FROM held_event WHERE state <> 'applied'"));
    assert_eq!(held, [["rejected".to_owned(), "parked".to_owned(), refused.to_string()]]);
    assert_eq!(text(world.rows("SELECT count(*) FROM held_event WHERE state = 'applied'")), [["2"]], "the lost and the busy one");
}

#[test]
fn a_stock_with_events_of_its_own_grants_what_is_there_and_refuses_in_its_own_words() {
    let world = world(&format!("{STOCK}; INSERT INTO stock VALUES ('A-1', 25), ('B-2', 1000)"));
    let event = |id: Uuid, sku: &str, quantity: i64| {
        let payload = format!(r#"{{"eventId":"{id}","eventType":"stock.requested.v1","sku":"{sku}","quantity":{quantity}}}"#);
        (sku.to_owned(), payload)
    };
    let ids: Vec<Uuid> = (0..40).map(|_| Uuid::now_v7()).collect();
    let requests = ids.iter().enumerate().map(|(at, id)| event(*id, ["A-1", "B-2"][at % 2], 2));
    world.send(requests);
    let [repeat, wrong] = [ids[0], Uuid::now_v7()];
    world.send([
        event(repeat, "A-1", 2),
        event(repeat, "A-1", 3),
        event(wrong, "", 0),
        event(Uuid::from_u128(4 << 76 | 2 << 62), "B-2", 1), // of version 4
        ("x".to_owned(), "no JSON".to_owned()),
    ]);
    let stock = world.spawn(example("stock"));
    world.wait_until_settled();
    stock.stop();

    world.assert_each_once(ids, "SELECT event_id FROM stock_reservation");
    let granted = "SELECT sku, granted, count(*), sum(quantity) FROM stock_reservation GROUP BY 1, 2 ORDER BY 1, 2";
    assert_eq!(text(world.rows(granted)), [["A-1", "f", "8", "16"], ["A-1", "t", "12", "24"], ["B-2", "t", "20", "40"]]);
    assert_eq!(text(world.rows("SELECT * FROM stock ORDER BY sku")), [["A-1", "1"], ["B-2", "960"]]);
    let held = text(world.rows("SELECT reason || ': ' || error FROM held_event ORDER BY 1")).concat();
    assert_eq!(held.len(), 4, "{held:?}");
    assert!(held[0].starts_with("conflict: "), "{held:?}");
    assert_eq!(held[1], "invalid: eventId is a UUID of version 4, not of version 7");
    assert_eq!(held[2], "invalid: sku must not be empty; quantity must be above 0, not 0");
    assert!(held[3].starts_with("undecodable: no stock.requested.v1: "), "{held:?}");
}

#[test]
fn an_example_without_a_configuration_names_what_is_missing_and_ends_with_64() {
    let ended = example("ledger").env_clear().output().expect("it runs");
    let said = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(64), "{said}");
    assert!(said.contains("kafka.brokers") && said.contains("database.url") && !said.contains("provider.url"), "{said}");
}

/// What the inbox does with one post of a key.
#[derive(Clone, Copy)]
enum Answer {
    /// The message goes out, unless it has.
    Sent,
    /// The same, and nobody hears of it.
    Lost,
    /// Nothing; not now.
    Busy,
    /// Nothing; who knows.
    Broken,
    /// Nothing; not ever.
    Never,
}

/// A downstream that sends one message per idempotency key, and answers as it is told.
struct Inbox {
    url: String,
    sent: Arc<Mutex<HashMap<Uuid, usize>>>,
}

impl Inbox {
    fn start(mut answers: HashMap<Uuid, Vec<Answer>>) -> Self {
        answers.values_mut().for_each(|answers| answers.reverse());
        let (answers, sent) = (Mutex::new(answers), Arc::new(Mutex::new(HashMap::new())));
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}/messages", listener.local_addr().expect("bound"));
        let messages = Arc::clone(&sent);
        let next = move |key| answers.lock().expect("nobody panics").get_mut(&key).and_then(Vec::pop).unwrap_or(Answer::Sent);
        let serve = Arc::new(move |stream| Self::serve(stream, &messages, &next));
        // It ends with the process.
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let serve = Arc::clone(&serve);
                thread::spawn(move || serve(stream));
            }
        });
        Self { url, sent }
    }

    /// How often each key's message went out.
    fn messages(&self) -> HashMap<Uuid, usize> {
        self.sent.lock().expect("nobody panics").clone()
    }

    fn serve(stream: TcpStream, sent: &Mutex<HashMap<Uuid, usize>>, next: &impl Fn(Uuid) -> Answer) {
        let mut requests = BufReader::new(stream.try_clone().expect("a socket"));
        let mut answers = stream;
        while let Some(key) = Self::read(&mut requests) {
            let answer = next(key);
            if matches!(answer, Answer::Sent | Answer::Lost) {
                sent.lock().expect("nobody panics").entry(key).or_insert(1);
            }
            let status = match answer {
                Answer::Lost => return, // the connection is closed
                Answer::Sent => "202 Accepted",
                Answer::Busy => "503 Service Unavailable\r\nRetry-After: 0",
                Answer::Broken => "500 Internal Server Error",
                Answer::Never => "410 Gone",
            };
            if write!(answers, "HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n").is_err() {
                return;
            }
        }
    }

    /// The key of the next request; `None` at the end of the connection.
    fn read(requests: &mut impl BufRead) -> Option<Uuid> {
        let (mut key, mut length) = (None, 0);
        loop {
            let mut line = String::new();
            if requests.read_line(&mut line).ok()? == 0 {
                return None;
            }
            let Some((name, value)) = line.trim_end().split_once(": ") else {
                if line.trim_end().is_empty() {
                    break;
                }
                continue; // the first line
            };
            match name.to_lowercase().as_str() {
                "idempotency-key" => key = value.parse().ok(),
                "content-length" => length = value.parse().ok()?,
                _ => {}
            }
        }
        requests.take(length).read_to_string(&mut String::new()).ok()?;
        key
    }
}
