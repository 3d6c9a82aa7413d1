//! The reconciler is what demo, tests and operators believe. One that says "it adds up" whatever happened is worse than none, so here
//! one fault is planted at a time, and it must fail.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::PathBuf;

use onceward::lab::process::{TempFolder, exit_code};
use onceward::lab::provider_stub::{Act, ProviderStub, Rule};
use serde_json::{Value, json};

use crate::support::{Message, World, eventually_equal};

/// A run that went well: 200 records of the producer with repeats among them, two that are no event, some declined.
pub struct Run {
    pub world: World,
    pub folder: TempFolder,
}

impl Run {
    pub fn new() -> Self {
        let run = Self { world: World::new(), folder: TempFolder::new("audit").expect("a folder") };
        run.world.provider.script([Rule::for_share(100, 7, Act::declined())]);
        let log = run.log();
        let words = ["produce", "--count", "200", "--duplicates", "20", "--elsewhere", "50", "--first-order", "1", "--log", &log];
        run.produce(&words);
        let poison = run.folder.path().join("poison");
        fs::write(&poison, "no event\n{}\n").expect("a file");
        run.produce(&["produce", "--file", &poison.display().to_string(), "--log", &log]);
        let engine = run.world.engine().start();
        eventually_equal("all is committed", 0, || run.world.topic.lag(&run.world.group));
        assert!(engine.terminate().success());
        run
    }

    fn produce(&self, words: &[&str]) {
        let output = self.world.onceward(words);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    pub fn log(&self) -> String {
        let path: PathBuf = self.folder.path().join("produced.log");
        path.display().to_string()
    }

    /// Exit code, the numbers, and what does not add up, by the producer's log.
    fn audit(&self) -> (u8, Value, String) {
        self.audit_with(&["--log", &self.log()])
    }

    /// The same with further words instead.
    pub fn audit_with(&self, words: &[&str]) -> (u8, Value, String) {
        let url = self.world.provider.url();
        let words = [&["audit", "--ledger", &url, "--format", "json"], words].concat();
        let output = self.world.onceward(&words);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let numbers = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {said}"));
        (exit_code(output.status), numbers, said)
    }

    /// The id of some charged event.
    pub fn charged(&self) -> String {
        self.world.database.text("SELECT event_id FROM payment WHERE status = 'charged' ORDER BY 1 LIMIT 1")
    }
}

#[test]
fn a_run_that_went_well_adds_up() {
    let run = Run::new();
    let (code, numbers, said) = run.audit();
    assert_eq!(code, 0, "{said}{numbers}");
    assert_eq!(numbers["produced"], json!(202));
    assert_eq!((&numbers["lost"], &numbers["double_charges"], &numbers["poison"]), (&json!(0), &json!(0), &json!(2)));
    let number = |name: &str| numbers[name].as_i64().unwrap_or_else(|| panic!("{name}: {numbers}"));
    assert!(number("duplicates") > 10 && number("declined") > 0, "the run has what is to be told apart: {numbers}");
    assert_eq!(number("distinct"), number("charged") + number("declined"));
    assert_eq!(number("distinct") + number("duplicates") + number("poison"), 202);
}

#[test]
fn one_charge_of_the_same_order_under_another_key_is_a_double_charge() {
    let run = Run::new();
    let id = run.charged();
    let entry = run.world.provider.ledger().into_iter().find(|entry| entry.idempotency_key == id).expect("it was charged");
    run.world.provider.clear_script();
    let body = format!(r#"{{"orderId":{},"amount":{},"currency":"{}"}}"#, entry.order_id, entry.amount, entry.currency);
    post_charge(&run.world.provider, &uuid::Uuid::now_v7().to_string(), &body);
    let (code, numbers, said) = run.audit();
    assert_eq!(code, 1, "{said}{numbers}");
    assert_eq!((&numbers["double_charges"], &numbers["lost"]), (&json!(1), &json!(0)), "{said}");
    assert!(said.contains(&id), "the event is named: {said}");
}

#[test]
fn one_charge_more_under_a_key_that_the_provider_has_forgotten_is_a_double_charge() {
    let run = Run::new();
    let id = run.charged();
    let entry = run.world.provider.ledger().into_iter().find(|entry| entry.idempotency_key == id).expect("it was charged");
    run.world.provider.clear_script();
    run.world.provider.forget_keys();
    let body = format!(r#"{{"orderId":{},"amount":{},"currency":"{}"}}"#, entry.order_id, entry.amount, entry.currency);
    post_charge(&run.world.provider, &id, &body);
    let (code, numbers, said) = run.audit();
    assert_eq!(code, 1, "{said}{numbers}");
    assert_eq!((&numbers["double_charges"], &numbers["lost"]), (&json!(1), &json!(0)), "{said}");
    assert!(said.contains(&format!("charged more than once under its key: {id}")), "{said}");
}

#[test]
fn one_event_without_any_trace_is_lost() {
    let run = Run::new();
    let id = run.charged();
    let sql = format!("DELETE FROM payment WHERE event_id = '{id}'; DELETE FROM processed_event WHERE event_id = '{id}'");
    run.world.database.execute(&sql);
    let (code, numbers, said) = run.audit();
    assert_eq!(code, 1, "{said}{numbers}");
    assert_eq!((&numbers["double_charges"], &numbers["lost"]), (&json!(0), &json!(1)), "{said}");
    assert!(said.contains(&format!("neither charged nor declined nor held: {id}")), "{said}");
}

#[test]
fn a_loss_and_a_double_charge_do_not_cancel_out() {
    let run = Run::new();
    let id = run.charged();
    let sql = format!("DELETE FROM payment WHERE event_id = '{id}'; DELETE FROM processed_event WHERE event_id = '{id}'");
    run.world.database.execute(&sql);
    let other = run.charged();
    let entry = run.world.provider.ledger().into_iter().find(|entry| entry.idempotency_key == other).expect("it was charged");
    run.world.provider.clear_script();
    let body = format!(r#"{{"orderId":{},"amount":{},"currency":"{}"}}"#, entry.order_id, entry.amount, entry.currency);
    post_charge(&run.world.provider, &uuid::Uuid::now_v7().to_string(), &body);
    let (code, numbers, said) = run.audit();
    assert_eq!(code, 1, "{said}{numbers}");
    assert_eq!((&numbers["double_charges"], &numbers["lost"]), (&json!(1), &json!(1)), "{said}");
}

#[test]
fn one_poison_record_that_is_not_held_does_not_add_up() {
    let run = Run::new();
    let sent = run.world.topic.send([Message::new("no event either").partition(0)]);
    let line = format!("{{\"partition\":{},\"offset\":{},\"fault\":\"undecodable\"}}\n", sent[0].0, sent[0].1);
    let mut log = fs::OpenOptions::new().append(true).open(run.log()).expect("the log");
    log.write_all(line.as_bytes()).expect("a line");
    let (code, numbers, said) = run.audit();
    assert_eq!((code, &numbers["lost"]), (1, &json!(0)), "{said}");
    assert!(said.contains("1 not read yet by the group"), "it stands beyond the frontier: {said}");

    let past = format!("UPDATE consumed_partition SET next_offset = {} WHERE partition = 0", sent[0].1 + 1);
    run.world.database.execute(&past);
    let (code, _, said) = run.audit();
    assert_eq!(code, 1, "{said}");
    assert!(said.contains(&format!("no event, and not held: partition 0 offset {}", sent[0].1)), "{said}");
}

/// A charge that the engine knows nothing of.
pub fn post_charge(stub: &ProviderStub, key: &str, body: &str) {
    let mut stream = TcpStream::connect(stub.address()).expect("the stub listens");
    let head = format!(
        "POST /v1/charges HTTP/1.1\r\nHost: stub\r\nIdempotency-Key: {key}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(&[head.as_bytes(), body.as_bytes()].concat()).expect("sent");
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).expect("answered");
    assert_eq!(&answer, b"HTTP/1.1 200");
}
