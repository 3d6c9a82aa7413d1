//! Every set-up that holds today is broken one day by somebody who means well: an index for a report, a trigger for a log, a topic that is
//! compacted to save space. Nobody notices until an event was charged twice, or never. `onceward check` names the one condition that does
//! not hold, and calls no other one broken; what nobody would notice later, `onceward run` refuses before it reads anything.

use std::collections::BTreeMap;
use std::process::Output;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use onceward::lab::postgres;
use onceward::lab::process::{exit_code, free_port};
use onceward::lab::provider_stub::{self, ProviderStub};
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer as _};
use rdkafka::{ClientConfig, Offset, TopicPartitionList};
use serde_json::Value;

use crate::support::{Database, EngineBuilder, Order, Topic, World, brokers, eventually, eventually_equal, unique_name};

const DAY_MS: i64 = 86_400_000;
/// A topic whose records are gone before their ids are forgotten.
const RETENTION: [(&str, &str); 2] = [("retention.ms", "432000000"), ("segment.ms", "86400000")];

/// One way to break a set-up.
struct Break {
    /// The condition that it breaks.
    condition: &'static str,
    /// What the finding must say.
    says: &'static str,
    /// How: the engine is the one to check with.
    how: fn(&World, EngineBuilder) -> EngineBuilder,
}

/// What a check has said.
struct Checked {
    code: u8,
    findings: BTreeMap<String, Value>,
}

impl Checked {
    fn of(output: &Output) -> Self {
        let text = String::from_utf8_lossy(&output.stdout);
        let findings = text.lines().map(|line| {
            let finding: Value = serde_json::from_str(line).expect("a line is an object");
            (finding["condition"].as_str().expect("a name").to_owned(), finding)
        });
        Self { code: exit_code(output.status), findings: findings.collect() }
    }

    fn with(&self, verdict: &str) -> Vec<&str> {
        let those = self.findings.iter().filter(|(_, finding)| finding["verdict"] == verdict);
        those.map(|(name, _)| name.as_str()).collect()
    }

    fn finding(&self, condition: &str) -> &Value {
        &self.findings[condition]
    }

    /// That this one alone does not hold, and that every other was asked.
    fn assert_only(&self, condition: &str, says: &str) {
        assert_eq!((self.with("failed"), self.with("not_asked")), (vec![condition], vec![]), "{says}: {:#?}", self.findings);
        assert_eq!(self.code, 1, "{condition}");
        let (found, todo) = (&self.finding(condition)["found"], &self.finding(condition)["todo"]);
        assert!(format!("{found} {todo}").contains(says), "{condition} says nothing of `{says}`: {found} {todo}");
        assert!(todo.as_str().is_some_and(|todo| !todo.is_empty()), "{condition} does not say what to do: {found}");
    }

    fn assert_good(&self) {
        assert_eq!((self.with("failed"), self.with("not_asked")), (vec![], vec![]), "{:#?}", self.findings);
        assert_eq!((self.code, self.findings.len() > 35), (0, true));
    }
}

fn check(engine: EngineBuilder) -> Checked {
    Checked::of(&engine.run_to_end(&["check", "--format", "json"]))
}

/// Whose admin port nobody else has.
fn engine(world: &World) -> EngineBuilder {
    world.engine().set("admin.listen", format!("127.0.0.1:{}", free_port().expect("a free port")))
}

/// A set-up that holds, in which partitions 0 and 1 of three are settled up to their ends.
fn good() -> World {
    let name = unique_name();
    good_in(Database::migrated(&name), &name)
}

fn good_in(database: Database, name: &str) -> World {
    let world = World {
        topic: Topic::configured(name, 3, &RETENTION),
        database,
        provider: ProviderStub::start(provider_stub::Options::default()).expect("a provider"),
        group: format!("group-{name}"),
    };
    let running = world.engine().start();
    world.topic.send([0, 1].map(|partition| Order::new().message().partition(partition)));
    eventually_equal("two events are settled", 0, || world.topic.lag(&world.group));
    assert!(running.terminate().success());
    world
}

/// That it does not read, if the condition is a blocking one: nobody takes a partition over, nobody is called.
fn assert_run_refuses(world: &World, engine: EngineBuilder, condition: &str) {
    let epochs = || world.database.column("SELECT epoch FROM consumed_partition ORDER BY partition");
    let before = (epochs(), world.provider.calls().posts);
    let output = engine.run_to_end(&["run"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(exit_code(output.status), 1, "{said}");
    assert!(said.contains(condition) && said.contains("nothing is read"), "{condition}: {said}");
    assert_eq!((epochs(), world.provider.calls().posts), before, "{condition}");
}

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

/// The same for what is broken in the database alone: one world is enough, its database is put back after each.
fn assert_each_is_named_in_the_database(breaks: &[Break]) {
    let world = good();
    let backup = world.database.backup();
    check(engine(&world)).assert_good();
    world.topic.send([Order::new().message()]);
    for Break { condition, says, how } in breaks {
        let broken = how(&world, engine(&world));
        let checked = check(broken.clone());
        checked.assert_only(condition, says);
        if checked.finding(condition)["blocking"] == true && *condition != "schema" {
            assert_run_refuses(&world, broken, condition);
        }
        world.database.restore(&backup);
    }
    check(engine(&world)).assert_good();
}

const SWALLOW: &str = "CREATE FUNCTION swallow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;";

/// The name of a day that has claims.
fn day(world: &World) -> String {
    world.database.column("SELECT DISTINCT tableoid::regclass FROM processed_event").swap_remove(0)
}

/// Lets an ordinary role own the tables, and connects as that one.
fn as_an_ordinary_role(world: &World, engine: EngineBuilder) -> EngineBuilder {
    let role = format!("r_{}", unique_name().rsplit('_').next().expect("its end is unique"));
    world.database.execute(&format!(
        "CREATE ROLE {role} LOGIN PASSWORD 'secret';
         GRANT CREATE ON SCHEMA public TO {role};
         DO $$ DECLARE name text; BEGIN
             FOR name IN SELECT oid::regclass FROM pg_class
                 WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p') LOOP
                 EXECUTE 'ALTER TABLE ' || name || ' OWNER TO {role}';
             END LOOP; END $$"
    ));
    let (_, address) = world.database.url().split_once('@').expect("a URL with a user");
    engine.set("database.url", format!("postgres://{role}:secret@{address}"))
}

/// Sets it for everybody who connects from now on.
fn alter_database(database: &Database, setting: &str) {
    let name = database.text("SELECT current_database()");
    database.execute(&format!("ALTER DATABASE \"{name}\" SET {setting}"));
}

// CASES E01
#[test]
fn a_key_that_takes_an_id_twice_or_another_groups_is_named() {
    assert_each_is_named_in_the_database(&[
        Break {
            condition: "dedup_key",
            says: "(consumer_group, event_id, processed_at)",
            how: |world, engine| {
                world.database.execute(
                    "ALTER TABLE processed_event DROP CONSTRAINT processed_event_pkey;
                     ALTER TABLE processed_event ADD PRIMARY KEY (event_id, consumer_group, processed_at)",
                );
                engine
            },
        },
        // The trap of the reference: partitioned by the time, so that the time must be in every key.
        Break {
            condition: "dedup_key",
            says: "partitioned by (processed_at)",
            how: |world, engine| {
                world.database.execute(
                    "DROP TABLE processed_event;
                     CREATE TABLE processed_event (
                         event_id uuid NOT NULL, consumer_group text NOT NULL, processed_at timestamptz NOT NULL DEFAULT now(),
                         event_digest bigint, source_id integer, source_offset bigint, PRIMARY KEY (event_id, processed_at)
                     ) PARTITION BY RANGE (processed_at);
                     CREATE TABLE everything PARTITION OF processed_event FOR VALUES FROM ('2020-01-01') TO ('2120-01-01')",
                );
                engine
            },
        },
        Break {
            condition: "dedup_key",
            says: "ALTER TABLE processed_event DROP CONSTRAINT processed_event_pkey, ADD UNIQUE (event_id, consumer_group)",
            how: |world, engine| {
                world.database.execute(
                    "ALTER TABLE processed_event DROP CONSTRAINT processed_event_pkey, ADD PRIMARY KEY (event_id);
                     INSERT INTO processed_event (event_id, consumer_group)
                     SELECT overlay(event_id::text PLACING 'ffff' FROM 33)::uuid, 'shipping' FROM processed_event LIMIT 1",
                );
                engine
            },
        },
        Break {
            condition: "dedup_key",
            says: "has no unique key",
            how: |world, engine| {
                world.database.execute("ALTER TABLE processed_event DROP CONSTRAINT processed_event_pkey");
                engine
            },
        },
        Break {
            condition: "default_partition",
            says: "rest is the DEFAULT partition",
            how: |world, engine| {
                world.database.execute("CREATE TABLE rest PARTITION OF processed_event DEFAULT");
                engine
            },
        },
    ]);
}

#[test]
fn what_others_have_put_on_our_tables_is_named() {
    assert_each_is_named_in_the_database(&[
        Break {
            condition: "unique_indexes",
            says: "one_per_offset",
            how: |world, engine| {
                let day = day(world);
                world.database.execute(&format!("CREATE UNIQUE INDEX one_per_offset ON {day} (source_id, source_offset)"));
                engine
            },
        },
        Break {
            condition: "unique_indexes",
            says: "one_group_only",
            how: |world, engine| {
                world.database.execute("CREATE UNIQUE INDEX one_group_only ON processed_event (event_id)");
                engine
            },
        },
        Break {
            condition: "triggers",
            says: "trigger swallow on processed_event_",
            how: |world, engine| {
                let day = day(world);
                world.database.execute(&format!(
                    "{SWALLOW} CREATE TRIGGER swallow BEFORE INSERT ON {day} FOR EACH ROW EXECUTE FUNCTION swallow()"
                ));
                engine
            },
        },
        Break {
            condition: "triggers",
            says: "trigger swallow on attempt_batch",
            how: |world, engine| {
                world.database.execute(&format!(
                    "{SWALLOW} CREATE TRIGGER swallow BEFORE INSERT ON attempt_batch FOR EACH ROW EXECUTE FUNCTION swallow()"
                ));
                engine
            },
        },
        Break {
            condition: "triggers",
            says: "rule forget on held_event",
            how: |world, engine| {
                world.database.execute("CREATE RULE forget AS ON INSERT TO held_event DO INSTEAD NOTHING");
                engine
            },
        },
        Break {
            condition: "payment_rows",
            says: "one_payment_per_order",
            how: |world, engine| {
                world.database.execute("CREATE UNIQUE INDEX one_payment_per_order ON payment (order_id)");
                engine
            },
        },
        Break {
            condition: "payment_rows",
            says: "trigger swallow on payment",
            how: |world, engine| {
                world.database.execute(&format!(
                    "{SWALLOW} CREATE TRIGGER swallow BEFORE INSERT ON payment FOR EACH ROW EXECUTE FUNCTION swallow()"
                ));
                engine
            },
        },
        Break {
            condition: "logged_tables",
            says: "payment",
            how: |world, engine| {
                world.database.execute("ALTER TABLE payment SET UNLOGGED");
                engine
            },
        },
        Break {
            condition: "row_security",
            says: "payment",
            how: |world, engine| {
                let engine = as_an_ordinary_role(world, engine);
                world.database.execute("ALTER TABLE payment ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY");
                engine
            },
        },
        Break {
            condition: "privileges",
            says: "DELETE on attempt_batch",
            how: |world, engine| {
                let engine = as_an_ordinary_role(world, engine);
                world.database.execute(
                    "DO $$ BEGIN EXECUTE 'REVOKE DELETE ON attempt_batch FROM ' ||
                         (SELECT relowner::regrole FROM pg_class WHERE oid = 'attempt_batch'::regclass); END $$",
                );
                engine
            },
        },
    ]);
}

#[test]
fn a_floor_or_a_day_that_is_missing_is_named() {
    assert_each_is_named_in_the_database(&[
        Break {
            condition: "floor",
            says: "the row of `retention` is gone",
            how: |world, engine| {
                world.database.execute("DELETE FROM retention");
                engine
            },
        },
        Break {
            condition: "days",
            says: "1 of today and the next 7 days",
            how: |world, engine| {
                let day = world.database.text("SELECT to_char(now() AT TIME ZONE 'UTC' + interval '2 days', 'YYYY_MM_DD')");
                world.database.execute(&format!("DROP TABLE processed_event_{day}"));
                engine
            },
        },
        Break {
            condition: "oldest_record",
            says: "beyond_horizon",
            how: |world, engine| {
                // To just now: a few milliseconds are enough to make the oldest record one that is forgotten.
                world.database.execute(
                    "UPDATE retention SET floor =
                         overlay(rpad(lpad(to_hex((extract(epoch FROM now()) * 1000)::bigint), 12, '0'), 32, '0')
                                 PLACING '7' FROM 13)::uuid",
                );
                engine
            },
        },
    ]);
    // Nothing is younger than a floor in the future, so that two conditions do not hold.
    let world = good();
    world.database.execute("UPDATE retention SET floor = 'ffff0000-0000-7000-8000-000000000000'");
    let checked = check(engine(&world));
    assert_eq!((checked.with("failed"), checked.with("not_asked")), (vec!["floor", "oldest_record"], vec![]));
    assert_run_refuses(&world, engine(&world), "floor");
}

#[test]
fn what_the_database_is_set_to_is_named() {
    assert_each_is_named_in_the_database(&[
        Break {
            condition: "isolation",
            says: "serializable",
            how: |world, engine| {
                alter_database(&world.database, "default_transaction_isolation = 'serializable'");
                engine
            },
        },
        Break {
            condition: "synchronous_commit",
            says: "off",
            how: |world, engine| {
                alter_database(&world.database, "synchronous_commit = off");
                engine
            },
        },
    ]);
    for (setting, condition) in [("fsync", "fsync"), ("full_page_writes", "full_page_writes")] {
        let off = [(setting.to_owned(), "off".to_owned())];
        let options = postgres::Options { settings: off.into(), ..postgres::Options::default() };
        let (_server, database) = Database::in_a_server(&options);
        alter_database(&database, "onceward.no_fsync = 'accepted'");
        let world = good_in(database, &unique_name());
        check(engine(&world)).assert_good();
        alter_database(&world.database, "onceward.no_fsync = ''");
        check(engine(&world)).assert_only(condition, "off");
        assert_run_refuses(&world, engine(&world), condition);
    }
}

#[test]
fn of_a_database_that_cannot_be_asked_nothing_is_called_ok() {
    let world = good();
    let asked_of_it = |checked: &Checked| {
        assert_eq!((checked.code, checked.with("failed")), (1, vec!["database"]));
        for condition in ["schema", "dedup_key", "triggers", "fsync", "floor", "days", "position", "witness", "oldest_record"] {
            assert_eq!(checked.finding(condition)["verdict"], "not_asked", "{condition}");
        }
        assert_eq!(checked.finding("topic")["verdict"], "ok");
        assert_eq!(checked.finding("provider")["verdict"], "ok");
    };
    asked_of_it(&check(engine(&world).set("database.url", "postgres://nobody@127.0.0.1:1/nothing")));
    alter_database(&world.database, "default_transaction_read_only = on");
    let read_only = check(engine(&world));
    asked_of_it(&read_only);
    assert!(read_only.finding("database")["found"].to_string().contains("takes no writes"));

    let empty = Database::empty(&unique_name());
    let without_tables = check(engine(&world).set("database.url", empty.url()));
    assert_eq!(without_tables.with("failed"), ["schema"]);
    assert!(without_tables.finding("schema")["todo"].to_string().contains("onceward migrate"));
    assert_eq!(without_tables.finding("dedup_key")["verdict"], "not_asked");
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

#[test]
fn a_provider_that_does_not_answer_or_can_be_listened_to_is_named() {
    let world = good();
    check(engine(&world).provider("http://127.0.0.1:1")).assert_only("provider", "see provider.url");
    let anywhere = world.provider.url().replace("127.0.0.1", "0.0.0.0");
    check(engine(&world).provider(&anywhere)).assert_only("provider_tls", "plain text");
    check(engine(&world).without_provider()).assert_good();
}

#[test]
fn a_good_set_up_has_its_certificate_and_asking_for_it_changes_nothing() {
    let world = good();
    let posts = world.provider.calls().posts;
    let epochs = || world.database.column("SELECT epoch FROM consumed_partition ORDER BY partition");
    let before = (epochs(), world.topic.committed(&world.group));
    check(engine(&world)).assert_good();
    assert_eq!((epochs(), world.topic.committed(&world.group)), before);
    let running = engine(&world).start();
    check(engine(&world)).assert_good();
    assert!(running.terminate().success());
    assert_eq!(world.provider.calls().posts, posts, "nobody was charged");

    let text = engine(&world).run_to_end(&["check"]);
    let said = String::from_utf8_lossy(&text.stdout).into_owned();
    assert_eq!(exit_code(text.status), 0, "{said}");
    assert!(
        said.lines().all(|line| line.split_whitespace().nth(1).is_some_and(|verdict| ["ok", "-"].contains(&verdict))),
        "{said}"
    );
}

#[test]
fn a_set_up_that_has_never_run_is_good_too() {
    let name = unique_name();
    let world = World {
        topic: Topic::configured(&name, 3, &RETENTION),
        database: Database::migrated(&name),
        provider: ProviderStub::start(provider_stub::Options::default()).expect("a provider"),
        group: format!("group-{name}"),
    };
    check(engine(&world)).assert_good();
    assert_eq!(world.database.count("SELECT count(*) FROM consumed_partition"), 0);
    assert_eq!(world.provider.calls().posts, 0);
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
