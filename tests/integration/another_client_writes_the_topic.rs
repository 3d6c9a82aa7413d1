//! The topic is written by a client that shares nothing with us: Kafka's own console producer. Its batches, its compression and its
//! keys are read as they come, and what it sent is charged once although the engine is killed in the middle.

use std::io::Write as _;
use std::process::{Command, Stdio};

use onceward::lab::process::{self, Signal, exit_code};
use onceward::lab::provider_stub::{Act, Rule};

use crate::support::{Order, World, assert_the_books_agree, eventually, server, stub};

#[test]
fn what_kafkas_own_console_producer_wrote_is_charged_once_across_a_kill() {
    let (world, stub) = (World::new(), stub());
    let orders = Order::some(300);
    let repeated = orders.iter().step_by(5);
    console_producer(&world, orders.iter().chain(repeated));
    let written: i64 = world.topic.ends().values().sum();
    assert_eq!(written, 360);

    stub.script([Rule::for_order(orders[150].order_id, Act::Hold).times(1)]);
    let engine = world.engine().provider(&stub.url()).patient().start();
    eventually("the provider has charged and is slow to say so", || stub.calls().held == 1);
    engine.kill();
    stub.release();
    let engine = world.engine().provider(&stub.url()).start();
    assert_the_books_agree(&world, &stub, &orders);
    assert!(engine.terminate().success());

    let audit = world.engine().run_to_end(&["audit", "--ledger", &stub.url()]);
    assert_eq!(exit_code(audit.status), 0, "{}", String::from_utf8_lossy(&audit.stdout));
}

/// Its logger speaks of every setting.
const QUIET: &str = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn";

/// A line for each order: key, tab, payload.
fn console_producer<'a>(world: &World, orders: impl Iterator<Item = &'a Order>) {
    let jars = format!("{}/*", server("ONCEWARD_TEST_KAFKA_JARS"));
    let mut java = Command::new("java");
    java.args(["-cp", &jars, "-XX:TieredStopAtLevel=1", QUIET, "org.apache.kafka.tools.ConsoleProducer"])
        .args(["--bootstrap-server", &server("ONCEWARD_TEST_KAFKA"), "--topic", world.topic.name()])
        .args(["--reader-property", "parse.key=true", "--compression-codec", "lz4"])
        .stdin(Stdio::piped());
    let mut java = process::spawn(java, Signal::Kill).expect("java starts");
    let mut lines = java.stdin.take().expect("a pipe");
    for order in orders {
        writeln!(lines, "{}\t{}", order.order_id, order.json()).expect("it reads");
    }
    drop(lines);
    assert!(java.wait().expect("a child is waited for").success());
}
