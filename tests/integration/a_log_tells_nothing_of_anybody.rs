//! A log is read by more people than a database, and kept for longer. What customers buy, for how much, what their records say, and the words
//! that open the database and the provider stand in none of its lines, whatever goes wrong and however much is logged.

use onceward::lab::process::Signal;
use onceward::lab::provider_stub::{Act, Reply, Rule};
use serde_json::json;

use crate::support::{EngineBuilder, Message, Order, World, eventually, eventually_equal, stub};

const CUSTOMER: i64 = 880_011_223_344;
const TOKEN: &str = "token-of-ours-5f1c";
/// In keys, headers, poison and what the provider answers.
const PERSON: &str = "jane.doe@example.com";

fn order(amount: &str) -> Order {
    let mut order = Order::new().amount(amount);
    order.customer_id = CUSTOMER;
    order
}

fn message(order: &Order) -> Message {
    order.message().key(format!("{PERSON} {}", order.order_id)).header("customer", Some(PERSON.as_bytes()))
}

/// An answer that quotes what it was asked for and by whom, as many a provider's does.
fn quoting(status: u16) -> Act {
    let body = json!({ "error": { "type": "no_way", "code": PERSON, "message": format!("{TOKEN} may not charge {PERSON}") } });
    let body = Some(body.to_string());
    Act::Reply(Reply { status, body, ..Reply::default() })
}

/// A run with everything that can become of a record; its log.
fn log_of(configure: impl Fn(EngineBuilder) -> EngineBuilder) -> (World, String) {
    let (world, stub) = (World::with_partitions(1), stub());
    let amounts = ["1234567.01", "1234567.02", "1234567.03", "1234567.04", "1234567.05"];
    let [charged, declined, rejected, unknown, later] = amounts.map(order);
    stub.script([
        Rule::for_order(declined.order_id, quoting(402)),
        Rule::for_order(rejected.order_id, quoting(422)),
        Rule::for_order(unknown.order_id, quoting(500)),
        Rule::for_order(later.order_id, Act::Silence { charge: true }).times(1),
    ]);
    let mut conflict = charged.clone();
    conflict.amount = "1234567.06".to_owned();
    let refused = order("1234567.12");
    stub.script([Rule::for_order(refused.order_id, quoting(401)).times(1)]);
    let all = [&charged, &declined, &rejected, &unknown, &later, &charged, &conflict, &refused];
    let poison = [
        Message::new(format!("{PERSON} pays 1234567.07")),
        Message::new(order("-1234567.08").json()),
        Message::new(order("1234567.09").json().replace("\"EUR\"", &format!("\"{PERSON}\""))),
        Message::new(order("1234567.10").json().replace("2026-01-05T", PERSON)),
    ];
    world.topic.send(all.into_iter().map(message).chain(poison));
    let engine = world.engine().provider(&stub.url()).set("provider.token", TOKEN).set("retry.max_attempts", 2);
    let mut engine = configure(engine).start();
    eventually_equal("four are settled with a payment", 4, || world.database.count("SELECT count(*) FROM payment"));
    eventually_equal("seven wait for a person", 7, || {
        world.database.count("SELECT count(*) FROM held_event WHERE state = 'parked'")
    });
    // A database that goes away and comes back has its own way into the log.
    world.database.column(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()",
    );
    let last = order("1234567.11");
    world.topic.send([message(&last)]);
    eventually("it has gone on", || world.database.count("SELECT count(*) FROM payment") == 5);
    eventually_equal("everything is committed", 0, || world.topic.lag(&world.group));
    engine.signal(Signal::Term);
    assert!(engine.wait().success());
    let log = engine.log();
    assert!(log.contains("configuration: HTTP 401: no_way"), "the breaker says why it opened: {log}");
    (world, log)
}

fn assert_it_tells_nothing(world: &World, log: &str) {
    let url = url::Url::parse(world.database.url()).expect("a URL");
    let password = url.password().expect("a password");
    for secret in [TOKEN, password, PERSON, "1234567", &CUSTOMER.to_string(), "jane"] {
        let told: Vec<_> = log.lines().filter(|line| line.contains(secret)).take(3).collect();
        assert!(told.is_empty(), "{secret} in {told:#?}");
    }
}

#[test]
fn a_run_in_which_everything_happens_logs_what_happened_and_to_nobody() {
    let (world, log) = log_of(|engine| engine);
    assert!(log.contains("admin port") && log.contains("left the group"), "there is a log: {log}");
    assert_it_tells_nothing(&world, &log);
}

#[test]
fn neither_does_a_machine_read_it_where_every_step_of_ours_is_logged() {
    let (world, log) = log_of(|engine| engine.set("log.level", "debug,onceward=trace").set("log.format", "json"));
    assert!(log.lines().all(|line| serde_json::from_str::<serde_json::Value>(line).is_ok()), "each line is an object: {log}");
    assert!(log.contains("\"level\":\"DEBUG\""), "it says more than usual: {log}");
    assert_it_tells_nothing(&world, &log);
}

#[test]
fn a_hangup_changes_how_much_is_said_and_faults_in_the_configuration_change_nothing() {
    let world = World::with_partitions(1);
    let configuration = world.engine();
    let mut engine = configuration.clone().start();
    assert!(!engine.log().contains(" DEBUG "));
    engine.reconfigure(&configuration.clone().set("log.level", "onceward=loud"));
    eventually("the fault is told", || engine.log().contains("the log level stays"));
    engine.reconfigure(&configuration.set("log.level", "debug"));
    eventually("the new level is told", || engine.log().contains("the log level is read again"));
    world.topic.send([Order::new().message()]);
    eventually("more is said", || engine.log().contains(" DEBUG "));
    assert!(engine.terminate().success());
}

#[test]
fn who_is_on_call_has_more_said_without_a_restart_and_the_log_tells_who_it_was() {
    let world = World::with_partitions(1);
    let configured = || world.engine().set("admin.token", TOKEN);
    let mut engine = configured().start();
    let at = engine.address().to_owned();
    let ask = |configured: EngineBuilder, words: &[&str]| {
        let output = configured.run_to_end(&[&["log-level"][..], words, &["--at", &at]].concat());
        let [told, error] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).expect("text"));
        (output.status.code(), told + &error)
    };
    let wanted = ["debug", "--reason", "ticket 17", "--actor", "ann\x1b[2J"];
    let (code, told) = ask(world.engine(), &wanted);
    assert!(code == Some(1) && told.contains("401"), "without the token: {told}");
    let (code, told) = ask(configured(), &["debg", "--reason", "a typing error"]);
    assert!(code == Some(1) && told.contains("must be off, error, warn"), "{told}");
    assert_eq!(ask(configured(), &[]), (Some(0), "the log level is info\n".to_owned()));

    let (code, told) = ask(configured(), &wanted);
    assert!(code == Some(0) && told.starts_with("the log level is debug; it was info, by ann\u{fffd}[2J since "), "{told}");
    world.topic.send([Order::new().message()]);
    eventually("more is said", || engine.log().contains(" DEBUG "));
    assert!(ask(configured(), &["off", "--reason", "enough"]).1.contains("off; it was debug"));
    let log = engine.log();
    let who: Vec<&str> = log.lines().filter(|line| line.contains("the log level is changed")).collect();
    assert!(
        who.len() == 2 && who[0].contains(r"ann\u{1b}[2J") && who[0].contains("ticket 17") && who[1].contains("enough"),
        "{who:#?}"
    );

    engine.signal(Signal::Hangup);
    eventually("what is configured holds again", || engine.log().contains("the log level is read again"));
    assert_eq!(ask(configured(), &[]).1, "the log level is info\n");
    assert!(engine.terminate().success());
}
