//! The chapter of Kafka: what the topic and its broker are set to, who is in the group, and where it stands.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use onceward::event::id::DAY_MS;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer as _};
use rdkafka::{ClientConfig, Offset, TopicPartitionList};

use super::{Break, RETENTION, assert_run_refuses, check, engine, good};
use crate::support::{Order, Topic, World, brokers, eventually, eventually_equal, unique_name};

/// Each in a world of its own.
fn assert_each_is_named(breaks: &[Break]) {
    for Break { condition, says, how } in breaks {
        let world = good();
        let broken = how(&world, engine(&world));
        let checked = check(broken.clone());
        checked.assert_only(condition, says);
        if checked.finding(condition)["blocking"] == true {
            world.topic.send([Order::new().message()]);
            assert_run_refuses(&world, broken, condition);
        }
    }
}

#[test]
fn what_a_topic_or_a_broker_is_set_to_is_named() {
    fn with(world: &World, setting: (&str, &str)) {
        let others = RETENTION.into_iter().filter(|(key, _)| *key != setting.0);
        world.topic.configure(&others.chain([setting]).collect::<Vec<_>>());
    }
    assert_each_is_named(&[
        Break {
            condition: "cleanup_policy",
            says: "compact",
            how: |world, engine| {
                with(world, ("cleanup.policy", "compact,delete"));
                engine
            },
        },
        Break {
            condition: "topic_retention",
            says: "for ever",
            how: |world, engine| {
                with(world, ("retention.ms", "-1"));
                engine
            },
        },
        Break {
            condition: "record_size",
            says: "receive.message.max.bytes",
            how: |world, engine| {
                with(world, ("max.message.bytes", "200000000"));
                engine.set("pipeline.buffer_bytes", 300 << 20)
            },
        },
        Break {
            condition: "record_size",
            says: "pipeline.buffer_bytes",
            how: |world, engine| {
                with(world, ("max.message.bytes", "20000000"));
                engine
            },
        },
        Break {
            condition: "min_insync_replicas",
            says: "2 of 1",
            how: |world, engine| {
                with(world, ("min.insync.replicas", "2"));
                engine
            },
        },
        Break {
            condition: "offsets_retention",
            says: "offsets.retention.minutes to 28800",
            how: |world, engine| {
                with(world, ("retention.ms", "1728000000"));
                engine.set("retention.retention_ms", 30 * DAY_MS)
            },
        },
        Break {
            condition: "session_timeout",
            says: "group.max.session.timeout.ms",
            how: |_, engine| engine.set("kafka.session_timeout_ms", 1_900_000).set("kafka.max_poll_interval_ms", 2_000_000),
        },
        Break {
            condition: "session_timeout",
            says: "group.consumer.session.timeout.ms",
            how: |_, engine| engine.assignor("broker").set("kafka.session_timeout_ms", 7_000),
        },
        Break {
            condition: "oldest_record",
            says: "d of records held as beyond_horizon",
            how: |world, engine| {
                let twenty_days_ago = chrono::Utc::now().timestamp_millis() - 20 * DAY_MS;
                world.topic.send([Order::new().message().partition(2).timestamp_ms(twenty_days_ago)]);
                engine
            },
        },
    ]);
}

#[test]
fn of_a_broker_or_topic_that_is_not_there_nothing_is_called_ok() {
    let world = good();
    for (broken, condition) in [
        (engine(&world).set("kafka.topic", unique_name()), "topic"),
        (engine(&world).set("kafka.brokers", "127.0.0.1:1"), "brokers"),
    ] {
        let checked = check(broken);
        assert_eq!((checked.code, checked.with("failed")), (1, vec![condition]), "{:#?}", checked.findings);
        for other in ["cleanup_policy", "topic_retention", "members", "start", "witness"] {
            assert_eq!(checked.finding(other)["verdict"], "not_asked", "{other}");
        }
        assert_eq!(checked.finding("dedup_key")["verdict"], "ok");
    }
}

/// A member of the group that is no engine of ours, until it is dropped.
struct Stranger {
    leaves: Arc<AtomicBool>,
    polls: Option<JoinHandle<()>>,
}

impl Stranger {
    fn joins(world: &World, options: &[(&str, &str)]) -> Self {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", brokers()).set("group.id", &world.group).set("enable.auto.commit", "false");
        for (name, value) in options {
            config.set(*name, *value);
        }
        let consumer: BaseConsumer = config.create().expect("a consumer");
        consumer.subscribe(&[world.topic.name()]).expect("it may want the topic");
        let (leaves, joined) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let polls = thread::spawn({
            let (leaves, joined) = (Arc::clone(&leaves), Arc::clone(&joined));
            move || {
                while !leaves.load(Ordering::Acquire) {
                    consumer.poll(Duration::from_millis(20));
                    let owned = consumer.assignment().is_ok_and(|assignment| assignment.count() > 0);
                    joined.fetch_or(owned, Ordering::AcqRel);
                }
            }
        });
        eventually("the stranger has partitions", || joined.load(Ordering::Acquire));
        Self { leaves, polls: Some(polls) }
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        self.leaves.store(true, Ordering::Release);
        if let Some(polls) = self.polls.take() {
            let _ = polls.join(); // its panic is not the test's
        }
    }
}

#[test]
fn a_stranger_in_the_group_is_named() {
    let world = good();
    let stranger = Stranger::joins(&world, &[("client.id", "kcat"), ("partition.assignment.strategy", "cooperative-sticky")]);
    check(engine(&world)).assert_only("members", "kcat at");
    drop(stranger);
    let other = Stranger::joins(&world, &[("client.id", "onceward"), ("partition.assignment.strategy", "range")]);
    check(engine(&world)).assert_only("group_protocol", "by range");
    drop(other);
    check(engine(&world)).assert_good();
}

#[test]
fn a_name_that_a_running_member_has_is_named_unless_it_is_the_engine_itself() {
    let world = good();
    let named = engine(&world).set("kafka.instance_id", "teller-1");
    let running = named.clone().start();
    eventually("it owns all partitions", || running.owned().len() == 3);
    check(named).assert_good();
    check(engine(&world).set("kafka.instance_id", "teller-1")).assert_only("static_id", "is called teller-1");
    check(engine(&world).set("kafka.instance_id", "teller-2")).assert_good();
    assert!(running.terminate().success());
}

// CASES B11
#[test]
fn a_place_in_the_topic_that_cannot_be_is_named() {
    assert_each_is_named(&[
        Break {
            condition: "position",
            says: "Kafka has 2, the database 1",
            how: |world, engine| {
                world.topic.send([Order::new().message().partition(0)]);
                let client: BaseConsumer = ClientConfig::new()
                    .set("bootstrap.servers", brokers())
                    .set("group.id", &world.group)
                    .create()
                    .expect("a consumer");
                let mut offsets = TopicPartitionList::new();
                offsets.add_partition_offset(world.topic.name(), 0, Offset::Offset(2)).expect("an offset");
                eventually("the offset is set", || client.commit(&offsets, CommitMode::Sync).is_ok());
                engine
            },
        },
        Break {
            condition: "start",
            says: "are gone from the log",
            how: |world, engine| {
                world.topic.send((0..3).map(|_| Order::new().message().partition(0)));
                world.topic.delete_records(0, 3);
                engine
            },
        },
        Break {
            condition: "start",
            says: "the log ends at 0, before 1",
            how: |world, engine| {
                world.topic.make_anew();
                world.topic.configure(&RETENTION);
                engine
            },
        },
        Break {
            condition: "witness",
            says: "partition 0: the record at 0 is another one",
            how: |world, engine| {
                world.topic.make_anew();
                world.topic.configure(&RETENTION);
                world.topic.send([0, 1].map(|partition| Order::new().message().partition(partition)));
                engine
            },
        },
    ]);
}

/// Nothing came for longer than the topic keeps its records.
#[test]
fn of_settled_records_that_are_all_gone_nobody_says_that_the_topic_is_the_same() {
    let world = good();
    for partition in [0, 1] {
        world.topic.delete_records(partition, 1);
    }
    let checked = check(engine(&world));
    assert_eq!((checked.with("failed"), checked.with("not_asked")), (vec![], vec!["witness"]), "{:#?}", checked.findings);
    assert_eq!(checked.code, 1);
    let found = checked.finding("witness")["found"].to_string();
    assert!([0, 1].iter().all(|partition| found.contains(&format!("partition {partition}: the record at 0 is gone"))), "{found}");

    let running = engine(&world).start();
    world.topic.send([Order::new().message().partition(0)]);
    eventually_equal("it goes on all the same", 0, || world.topic.lag(&world.group));
    assert!(running.terminate().success());
    let again = check(engine(&world));
    again.assert_good();
    let found = again.finding("witness")["found"].to_string();
    assert!(found.contains("1 partitions have") && found.contains("not compared: partition 1"), "{found}");
}

#[test]
fn a_topic_that_cannot_be_asked_is_told_and_waited_for() {
    let world = good();
    let missing = unique_name();
    let waiting = engine(&world).set("kafka.topic", missing.as_str()).launch();
    eventually("it says what it could not ask", || waiting.log().contains("cleanup_policy"));
    assert!(!waiting.is_ready());
    let topic = Topic::configured(&missing, 1, &RETENTION);
    eventually("it reads", || waiting.is_ready());
    topic.send([Order::new().message()]);
    eventually_equal("it has settled it", 0, || topic.lag(&world.group));
    assert!(waiting.terminate().success());
}

#[test]
fn a_way_to_the_broker_that_can_be_listened_to_is_named() {
    let world = good();
    let anywhere = world.topic.brokers().replace("127.0.0.1", "0.0.0.0");
    check(engine(&world).set("kafka.brokers", anywhere)).assert_only("kafka_tls", "make it ssl or sasl_ssl");
}
