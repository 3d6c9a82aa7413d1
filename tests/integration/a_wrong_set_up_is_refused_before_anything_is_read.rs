//! A guarantee that an option can switch off is none: auto-commit, for one, moves positions past events that nobody has applied. And
//! a set-up that is wrong must say so at once, all of it, and not after the first event that could not be charged.

use std::process::Output;

use onceward::lab::process::exit_code;

use crate::support::{Order, Topic, World, eventually_equal, unique_name};

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

// R-KFK-CONS-X1. CASES I12
#[test]
fn client_options_that_carry_the_guarantee_are_refused_all_at_once_with_64() {
    let world = World::with_partitions(1);
    world.topic.send([Order::new().message()]);
    let refused = [
        ("enable.auto.commit", "true"),
        ("enable.auto.offset.store", "true"),
        ("auto.offset.reset", "latest"),
        ("group.id", "another"),
        ("isolation.level", "read_uncommitted"),
        ("session.timeout.ms", "1000"),
        ("group.instance.id", "one"),
        ("allow.auto.create.topics", "true"),
    ];
    let wrong = refused.into_iter().fold(world.engine(), |engine, (key, value)| engine.set(&format!("kafka.options.{key}"), value));
    // The environment is no way around, and other faults are told in the same breath.
    let wrong = wrong.environment("ONCEWARD_KAFKA_OPTIONS_PARTITION_ASSIGNMENT_STRATEGY", "roundrobin");
    let wrong = wrong.set("provider.call_timeout_ms", 5_000).set("pipeline.partition_concurrency", 0).set("kafka.topik", "x");
    for command in [&["run"][..], &["check"], &["check", "--show-config"]] {
        let output = wrong.clone().run_to_end(command);
        let said = stderr(&output);
        assert_eq!(exit_code(output.status), 64, "{said}");
        let named = refused.iter().map(|(key, _)| *key);
        for key in named.chain([
            "partition.assignment.strategy",
            "provider.effect_deadline_ms",
            "pipeline.partition_concurrency",
            "kafka.topik",
        ]) {
            assert!(said.contains(key), "{key} is not named: {said}");
        }
    }
    assert!(world.topic.committed(&world.group).is_empty());
    assert_eq!(world.database.count("SELECT count(*) FROM consumed_partition"), 0, "nothing was begun");
}

#[test]
fn keys_that_nobody_knows_are_refused_in_the_file_and_in_the_environment() {
    let world = World::with_partitions(1);
    for wrong in [
        world.engine().set("kafka.gruop", "x"),
        world.engine().set("kafak.group", "x"),
        world.engine().set("kafka.options.fetch.wait.maximum.ms", "7"),
        world.engine().environment("ONCEWARD_KAFKA_GRUOP", "x"),
    ] {
        let output = wrong.run_to_end(&["run"]);
        assert_eq!(exit_code(output.status), 64, "{}", stderr(&output));
        let said = stderr(&output).to_lowercase();
        assert!(said.contains("gruop") || said.contains("kafak") || said.contains("fetch.wait.maximum"), "{said}");
    }
}

#[test]
fn other_client_options_pass_and_the_engine_works_with_them() {
    let world = World::with_partitions(1);
    let engine = world.engine().set("kafka.options.fetch.wait.max.ms", "20").set("kafka.options.client.id", "teller-7").start();
    world.topic.send([Order::new().message()]);
    eventually_equal("it is committed", 0, || world.topic.lag(&world.group));
    assert!(engine.terminate().success());
}

#[test]
fn without_a_provider_the_engine_writes_its_rows_and_calls_nobody() {
    let world = World::with_partitions(1);
    let engine = world.engine().without_provider().start();
    world.topic.send([Order::new().message()]);
    eventually_equal("it is committed", 0, || world.topic.lag(&world.group));
    assert_eq!(world.database.count("SELECT count(*) FROM payment"), 1);
    assert_eq!(world.provider.calls().connections, 0);
    assert!(engine.terminate().success());
}

#[test]
fn a_password_is_never_shown() {
    let world = World::with_partitions(1);
    let engine = world.engine().set("database.url", "postgres://bill:hunter2@127.0.0.1:1/money").set("provider.token", "hunter2");
    for command in [&["check"][..], &["check", "--show-config"], &["migrate"], &["audit"]] {
        let output = engine.clone().run_to_end(command);
        let said = stdout(&output) + &stderr(&output);
        assert!(!said.is_empty() && !said.contains("hunter2"), "{command:?}: {said}");
    }
}

#[test]
fn a_topic_that_does_not_exist_is_not_brought_into_being() {
    let world = World::with_partitions(1);
    let missing = unique_name();
    let output = world.engine().set("kafka.topic", missing.as_str()).run_to_end(&["check"]);
    assert_eq!(exit_code(output.status), 1);
    // Creating it fails if the check has done so.
    Topic::create(&missing, 1);
}
