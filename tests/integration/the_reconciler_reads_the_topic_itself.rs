//! Whoever kept no log of what was produced still has the topic. What the audit says of it must be what a log would have said, and what
//! is planted must be found in it too: with the topic alone, a loss would otherwise be seen by nobody.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, BufWriter, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::thread;
use std::time::Duration;

use chrono::{DateTime, SecondsFormat, TimeDelta, Utc};
use onceward::lab::process::{TempFolder, exit_code};
use onceward::lab::provider_stub::{Act, Rule};
use serde_json::{Value, json};

use crate::support::{Message, Order, World, eventually_equal, times};
use crate::the_reconciler_finds_what_is_planted::{Run, post_charge};

/// Exit code and numbers of an audit of this world.
fn audit(world: &World, words: &[&str]) -> (u8, Value) {
    let output = world.onceward(&[&["audit", "--format", "json"][..], words].concat());
    let said = String::from_utf8_lossy(&output.stderr);
    (exit_code(output.status), serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {said}")))
}

/// Sends records, and has everything settled by an engine that has ended since.
fn settle(world: &World, orders: &[Order]) {
    world.topic.send(orders.iter().map(Order::message));
    let engine = world.engine().start();
    eventually_equal("all is committed", 0, || world.topic.lag(&world.group));
    assert!(engine.terminate().success());
}

#[test]
fn an_ordinary_run_adds_up_and_the_topic_says_what_the_log_says() {
    let run = Run::new();
    let (code, by_topic, said) = run.audit_with(&[]);
    assert_eq!(code, 0, "{said}{by_topic}");
    assert_eq!(by_topic["produced"], json!(202));
    let (_, by_log, _) = run.audit_with(&["--log", &run.log()]);
    assert_eq!(by_topic, by_log);
}

#[test]
fn a_charge_that_only_the_ledger_knows_is_found() {
    let run = Run::new();
    run.world.provider.clear_script();
    let hidden = uuid::Uuid::now_v7().to_string();
    post_charge(&run.world.provider, &hidden, r#"{"orderId":987654321,"amount":1.00,"currency":"EUR"}"#);
    let (code, numbers, said) = run.audit_with(&[]);
    assert_eq!(code, 1, "{said}{numbers}");
    let sentence = format!("1 charged at the provider, with neither a payment row nor a held row that is in doubt: {hidden}");
    assert_eq!(numbers["problems"], json!([sentence]), "{said}");
}

#[test]
fn a_deleted_payment_is_found() {
    let run = Run::new();
    let id = run.charged();
    run.world.database.execute(&format!("DELETE FROM payment WHERE event_id = '{id}'"));
    let (code, numbers, said) = run.audit_with(&[]);
    assert_eq!((code, &numbers["lost"]), (1, &json!(1)), "{said}{numbers}");
    assert!(said.contains(&format!("neither charged nor declined nor held: {id}")), "{said}");
    assert!(said.contains(&format!("claimed, with neither a payment row nor a held row: {id}")), "{said}");
    assert!(
        said.contains(&format!("charged at the provider, with neither a payment row nor a held row that is in doubt: {id}")),
        "{said}"
    );
}

#[test]
fn a_double_charge_is_found() {
    let run = Run::new();
    let id = run.charged();
    let entry = run.world.provider.ledger().into_iter().find(|entry| entry.idempotency_key == id).expect("it was charged");
    run.world.provider.clear_script();
    run.world.provider.forget_keys();
    let body = format!(r#"{{"orderId":{},"amount":{},"currency":"{}"}}"#, entry.order_id, entry.amount, entry.currency);
    post_charge(&run.world.provider, &id, &body);
    let (code, numbers, said) = run.audit_with(&[]);
    assert_eq!((code, &numbers["double_charges"], &numbers["lost"]), (1, &json!(1), &json!(0)), "{said}{numbers}");
    assert!(said.contains(&format!("charged more than once under its key: {id}")), "{said}");
}

#[test]
fn an_offset_that_was_settled_without_a_trace_is_found() {
    let run = Run::new();
    let order = Order::new();
    let (partition, offset) = run.world.topic.send([order.message()])[0];
    let (code, numbers, said) = run.audit_with(&[]);
    assert_eq!((code, &numbers["produced"]), (0, &json!(202)), "what is not settled is not looked at: {said}");
    let past = format!("UPDATE consumed_partition SET next_offset = {} WHERE partition = {partition}", offset + 1);
    run.world.database.execute(&past);
    let (code, numbers, said) = run.audit_with(&[]);
    assert_eq!((code, &numbers["lost"], &numbers["produced"]), (1, &json!(1), &json!(203)), "{said}{numbers}");
    assert!(
        said.contains(&format!(
            "neither charged nor declined nor held: {} (partition {partition} offset {offset})",
            order.event_id
        )),
        "{said}"
    );
}

#[test]
fn poison_that_was_settled_and_not_held_is_found() {
    let run = Run::new();
    let (partition, offset) = run.world.topic.send([Message::new("no event either").partition(1)])[0];
    let past = format!("UPDATE consumed_partition SET next_offset = {} WHERE partition = {partition}", offset + 1);
    run.world.database.execute(&past);
    let (code, _, said) = run.audit_with(&[]);
    assert_eq!(code, 1, "{said}");
    assert!(said.contains(&format!("no event, and not held: partition {partition} offset {offset}")), "{said}");
}

#[test]
fn another_amount_is_found() {
    let run = Run::new();
    let id = run.charged();
    run.world.database.execute(&format!("UPDATE payment SET amount = amount + 1 WHERE event_id = '{id}'"));
    let (code, numbers, said) = run.audit_with(&[]);
    assert_eq!(code, 1, "{said}{numbers}");
    assert!(
        said.contains(&format!("with another order, amount or currency in one of log, payment table and ledger: {id}")),
        "{said}"
    );
}

#[test]
fn a_payment_that_says_it_came_from_the_range_and_did_not_is_found() {
    let run = Run::new();
    let (id, orphan) = (run.charged(), uuid::Uuid::now_v7());
    run.world.database.execute(&format!(
        "INSERT INTO processed_event (event_id, consumer_group, event_digest, source_id, source_offset)
         SELECT '{orphan}', consumer_group, event_digest, source_id, source_offset FROM processed_event WHERE event_id = '{id}';
         INSERT INTO payment (event_id, order_id, customer_id, amount, currency, status, attempts)
         VALUES ('{orphan}', 987654321, 1, 1, 'EUR', 'declined', 1)"
    ));
    let (code, numbers, said) = run.audit_with(&[]);
    assert_eq!(code, 1, "{said}{numbers}");
    assert!(
        said.contains(&format!("claimed from a place in the range that was read, where no record has this id: {orphan}")),
        "{said}"
    );
}

#[test]
fn a_range_is_cut_by_offsets_or_by_time_and_what_lies_outside_is_nobody_s_fault() {
    let world = World::with_partitions(1);
    // Not so long ago that the broker would delete them.
    let old = Utc::now() - TimeDelta::hours(2);
    let orders = Order::some(30);
    let at = |index: usize| old.timestamp() * 1_000 + i64::try_from(index).expect("few") * 60_000;
    world.topic.send(orders.iter().enumerate().map(|(index, order)| order.message().timestamp_ms(at(index))));
    let engine = world.engine().start();
    eventually_equal("all is committed", 0, || world.topic.lag(&world.group));
    assert!(engine.terminate().success());
    let time =
        |index: usize| DateTime::from_timestamp_millis(at(index)).expect("a time").to_rfc3339_opts(SecondsFormat::Secs, true);
    let url = world.provider.url();
    for (bounds, produced) in [
        (vec![], 30),
        (vec!["--from", "0:10"], 20),
        (vec!["--from", "0:10", "--to", "0:12"], 2),
        (vec!["--from", &time(25)], 5),
        (vec!["--from", &time(5), "--to", &time(9)], 4),
        (vec!["--from", &time(1_000)], 0),
    ] {
        let words = [&["audit", "--ledger", &url, "--format", "json"], &bounds[..]].concat();
        let output = world.onceward(&words);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(exit_code(output.status), 0, "{bounds:?}: {said}");
        let numbers: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!((&numbers["produced"], &numbers["charged"]), (&json!(produced), &json!(produced)), "{bounds:?}");
    }
    let refused = world.onceward(&["audit", "--from", "0:31"]);
    assert_eq!(exit_code(refused.status), 1);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(said.contains("the log of partition 0 is [0, 30): 31 is not in it"), "{said}");
}

// CASES B09
#[test]
fn what_was_gone_before_it_was_read_is_named_until_somebody_has_decided() {
    let world = World::with_partitions(1);
    settle(&world, &Order::some(10));
    world.topic.send(Order::some(10).iter().map(Order::message));
    world.topic.delete_records(0, 15);
    let gap = json!(["5 gone from the log before the group had read them: partition 0 offsets [10, 15)"]);
    let (code, numbers) = audit(&world, &[]);
    assert_eq!((code, &numbers["problems"]), (1, &gap), "nobody has written it down yet");

    let engine = world.engine().set("kafka.on_gap", "continue").start();
    eventually_equal("the rest is settled", 0, || world.topic.lag(&world.group));
    for words in [&[][..], &["--tables-only"], &["--from", "0:17"]] {
        let (code, numbers) = audit(&world, words);
        assert_eq!((code, &numbers["problems"]), (1, &gap), "{words:?}");
    }

    let row = world.database.text("SELECT id FROM held_event WHERE reason = 'gap'");
    let discard = ["held", "discard", &row, "--because", "test orders", "--actor", "ann"];
    assert!(world.onceward(&discard).status.success());
    eventually_equal("it is discarded", "discarded".to_owned(), || world.database.text("SELECT state FROM held_event"));
    let (code, numbers) = audit(&world, &[]);
    assert_eq!((code, &numbers["produced"]), (0, &json!(5)), "{numbers}");
    assert!(engine.terminate().success());
}

#[test]
fn a_partition_that_the_group_has_never_had_is_not_left_out_in_silence() {
    let world = World::with_partitions(1);
    settle(&world, &Order::some(3));
    world.topic.grow(2);
    world.topic.send(Order::some(4).iter().map(|order| order.message().partition(1)));
    let (code, numbers) = audit(&world, &[]);
    let problem = "4 not settled, in partitions that the group has never taken over: partition 1 offsets [0, 4)";
    assert_eq!((code, &numbers["produced"], &numbers["problems"]), (1, &json!(3), &json!([problem])));

    settle(&world, &[]);
    let (code, numbers) = audit(&world, &[]);
    assert_eq!((code, &numbers["produced"]), (0, &json!(7)), "{numbers}");
}

#[test]
fn what_was_asked_for_and_is_not_in_the_log_any_more_is_named() {
    let world = World::with_partitions(1);
    settle(&world, &Order::some(30));
    world.topic.delete_records(0, 10);
    for (words, produced, problem) in [
        (vec![], 20, None),
        (vec!["--from", "0:10"], 20, None),
        (vec!["--from", "0:4"], 20, Some("6 gone from the log before they could be audited: partition 0 offsets [4, 10)")),
        (
            vec!["--from", "0:4", "--to", "0:7"],
            0,
            Some("3 gone from the log before they could be audited: partition 0 offsets [4, 7)"),
        ),
    ] {
        let (code, numbers) = audit(&world, &words);
        let expected = (u8::from(problem.is_some()), &json!(produced), &json!(Vec::from_iter(problem)));
        assert_eq!((code, &numbers["produced"], &numbers["problems"]), expected, "{words:?}");
    }
}

#[test]
fn what_the_log_loses_while_it_is_audited_is_named() {
    let world = World::with_partitions(1);
    let folder = TempFolder::new("state").expect("a folder");
    let state = folder.path().display().to_string();
    assert!(world.onceward(&["produce", "--count", "25000"]).status.success());
    let range = ["audit", "--from", "0:0", "--to", "0:25000", "--memory", "1", "--state", &state];
    let killed = world.engine().environment("ONCEWARD_CRASH_POINTS", "run_kept:kill:1").run_to_end(&range);
    assert_eq!(killed.status.signal(), Some(9), "{}", String::from_utf8_lossy(&killed.stderr));
    let manifest: Value = serde_json::from_slice(&fs::read(folder.path().join("audit.json")).expect("a file")).expect("JSON");
    let next = manifest["reached"]["parts"]["0"]["next"].as_i64().expect("an offset");
    assert!((1..24_900).contains(&next), "one run is kept: {next}");

    world.topic.delete_records(0, next + 100);
    let (code, numbers) = audit(&world, &range[1..]);
    assert_eq!((code, &numbers["produced"]), (1, &json!(24_900)), "{numbers}");
    let problem = format!("100 gone from the log before they could be audited: partition 0 offsets [{next}, {})", next + 100);
    assert_eq!(numbers["problems"][0], json!(problem), "{numbers}");
}

#[test]
fn an_event_that_is_tried_again_behind_the_back_of_the_ledger_is_no_contradiction() {
    let world = World::with_partitions(1);
    let order = Order::new();
    world.provider.script([Rule::for_order(order.order_id, Act::status(500))]);
    world.topic.send([order.message()]);
    let engine = world.engine().set("retry.max_attempts", 1000).start();
    eventually_equal("it is held, and its record is settled", 0, || world.topic.lag(&world.group));

    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound");
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut reader = listener.accept().expect("a reader").0;
            read_request(&mut reader);
            // The ledger says what it has: nothing. Before the rows are read, there is more.
            world.provider.clear_script();
            eventually_equal("it is paid", 1, || world.database.count("SELECT count(*) FROM payment"));
            write!(reader, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").expect("an answer");
        });
        let (code, numbers) = audit(&world, &["--ledger", &format!("http://{address}")]);
        drop(TcpStream::connect(address)); // so that nobody waits for an audit that did not ask
        assert_eq!((code, &numbers["charged"]), (0, &json!(1)), "{numbers}");
    });

    // A payment that is older than what the ledger says must be in it.
    let folder = TempFolder::new("ledger").expect("a folder");
    let empty = folder.path().join("empty");
    File::create(&empty).expect("a file");
    let problem = format!("1 charged in the payment table, not at the provider: {}", order.event_id);
    eventually_equal("it is missed", (1, json!([problem])), || {
        let (code, numbers) = audit(&world, &["--ledger", &serve(&empty)]);
        (code, numbers["problems"].clone())
    });
    assert!(engine.terminate().success());
}

#[test]
fn an_audit_beside_a_running_group_finds_nothing_wrong() {
    let world = World::new();
    let engine = world.engine().start();
    let url = world.provider.url();
    let mut audits = 0;
    thread::scope(|scope| {
        let load = scope.spawn(|| world.onceward(&["produce", "--count", "6000", "--rate", "1500", "--duplicates", "5"]));
        while !load.is_finished() {
            let output = world.onceward(&["audit", "--ledger", &url, "--format", "json"]);
            assert_eq!(exit_code(output.status), 0, "{}", String::from_utf8_lossy(&output.stderr));
            audits += 1;
        }
        assert!(load.join().expect("it ran").status.success());
    });
    assert!(audits > 1, "the group was at work meanwhile");
    eventually_equal("all is committed", 0, || world.topic.lag(&world.group));
    assert!(engine.terminate().success());
}

#[test]
fn an_audit_that_was_killed_goes_on_where_its_last_run_ended() {
    let world = World::with_partitions(2);
    let folder = TempFolder::new("state").expect("a folder");
    let state = folder.path().display().to_string();
    assert!(world.onceward(&["produce", "--count", "70000", "--duplicates", "10"]).status.success());
    let ends: Vec<String> = world.topic.ends().iter().map(|(partition, end)| format!("{partition}:{end}")).collect();
    let (from, to) = ("0:0,1:0", ends.join(","));
    let range = ["audit", "--from", from, "--to", &to, "--memory", "1", "--format", "json"];
    let straight = world.onceward(&range);

    let kept = [&range[..], &["--state", &state]].concat();
    let killed = world.engine().environment("ONCEWARD_CRASH_POINTS", "run_kept:kill:2").run_to_end(&kept);
    assert_eq!(killed.status.signal(), Some(9), "{}", String::from_utf8_lossy(&killed.stderr));
    let other = world.onceward(&["audit", "--from", from, "--state", &state]);
    let said = String::from_utf8_lossy(&other.stderr);
    assert!(exit_code(other.status) == 1 && said.contains("name another folder"), "{said}");

    // What was read before the kill is not there to be read again: only the kept runs know it.
    let manifest: Value = serde_json::from_slice(&fs::read(folder.path().join("audit.json")).expect("a file")).expect("JSON");
    let reached = &manifest["reached"];
    assert!(reached["counts"]["records"].as_u64().expect("a number") > 40_000, "two runs: {reached}");
    for (partition, part) in reached["parts"].as_object().expect("partitions") {
        let next = part["next"].as_i64().expect("an offset");
        world.topic.delete_records(partition.parse().expect("a number"), next);
    }
    let resumed = world.onceward(&kept);
    let numbers = |output: &std::process::Output| -> Value {
        serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)))
    };
    assert_eq!(numbers(&resumed), numbers(&straight));
    assert_eq!(numbers(&straight)["produced"], json!(70_000));
    assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 0, "it has ended");
}

/// Under `scripts/test --long` with ten million events.
#[test]
fn memory_does_not_grow_with_what_is_audited() {
    // In the first case several runs, in the second what an operator gets.
    let (count, memory) = (times(60_000, 10_000_000), times(1, 16).to_string());
    let world = World::new();
    let folder = TempFolder::new("audit").expect("a folder");
    let log = folder.path().join("produced.log");
    let engine = world.engine().start(); // makes today and the partitions' rows
    assert!(engine.terminate().success());
    let words = ["produce", "--count", &count.to_string(), "--first-order", "1", "--log", &log.display().to_string()];
    let limit = Duration::from_secs(3_600);
    let (produced, _) = world.engine().run_measured(limit, &words);
    assert!(produced.status.success(), "{}", String::from_utf8_lossy(&produced.stderr));
    let ledger = folder.path().join("ledger");
    write_rows_and_ledger(&world, &log, &ledger);
    fs::remove_file(log).expect("a file");
    let url = serve(&ledger);

    let (audit, kib) = world.engine().run_measured(limit, &["audit", "--ledger", &url, "--memory", &memory, "--format", "json"]);
    let said = String::from_utf8_lossy(&audit.stderr);
    assert_eq!(exit_code(audit.status), 0, "{said}");
    let numbers: Value = serde_json::from_slice(&audit.stdout).expect("JSON");
    assert_eq!((&numbers["produced"], &numbers["charged"]), (&json!(count), &json!(count)));
    println!("{count} events: at most {} MiB resident", kib >> 10);
    assert!(kib > 0 && kib < 64 << 10, "{kib} KiB for {count} events");
}

/// As if every record of the log had been charged.
fn write_rows_and_ledger(world: &World, log: &Path, ledger: &Path) {
    let sources = world.database.rows("SELECT partition, id FROM consumed_partition ORDER BY partition");
    let source = |partition: i64| sources[usize::try_from(partition).expect("a partition")][1].clone().expect("an id");
    let mut ledger = BufWriter::new(File::create(ledger).expect("a file"));
    let (mut claims, mut payments) = (Vec::new(), Vec::new());
    let write = |claims: &mut Vec<String>, payments: &mut Vec<String>| {
        world.database.execute(&format!(
            "INSERT INTO processed_event (event_id, consumer_group, event_digest, source_id, source_offset) VALUES {};
             INSERT INTO payment (event_id, order_id, customer_id, amount, currency, status, attempts) VALUES {}",
            claims.join(","),
            payments.join(",")
        ));
        claims.clear();
        payments.clear();
    };
    for line in BufReader::new(File::open(log).expect("a file")).lines() {
        let line: Value = serde_json::from_str(&line.expect("a line")).expect("JSON");
        let text = |name: &str| line[name].as_str().expect("a text");
        let number = |name: &str| line[name].as_i64().expect("a number");
        let (id, order, amount, currency) = (text("event_id"), number("order"), text("amount"), text("currency"));
        let (digest, source, offset) = (number("digest"), source(number("partition")), number("offset"));
        claims.push(format!("('{id}','{}',{digest},{source},{offset})", world.group));
        payments.push(format!("('{id}',{order},1,{amount},'{currency}','charged',1)"));
        let booking =
            json!({ "idempotency_key": id, "order_id": order, "amount": amount, "currency": currency, "status": "charged" });
        writeln!(ledger, "{booking}").expect("written");
        if claims.len() == 10_000 {
            write(&mut claims, &mut payments);
        }
    }
    if !claims.is_empty() {
        write(&mut claims, &mut payments);
    }
    for (partition, end) in world.topic.ends() {
        world.database.execute(&format!("UPDATE consumed_partition SET next_offset = {end} WHERE partition = {partition}"));
    }
    ledger.flush().expect("written");
}

/// A provider that has nothing but a ledger, for one reader. Its address.
fn serve(ledger: &Path) -> String {
    let mut ledger = File::open(ledger).expect("a file");
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a reader");
        read_request(&mut stream);
        let length = ledger.metadata().expect("a file").len();
        write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n").expect("an answer");
        std::io::copy(&mut ledger, &mut stream).expect("the ledger");
    });
    url
}

fn read_request(stream: &mut TcpStream) {
    let (mut request, mut byte) = (Vec::new(), [0]);
    while !request.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte).expect("a request");
        request.push(byte[0]);
    }
}
