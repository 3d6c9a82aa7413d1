//! Many services have a table `processed_event` already: a plain one, with the id as its key, and a job that deletes old rows. They can
//! change over with that table in place, and no event that it knows is new. Old claims go in batches, and only when nobody can claim
//! their ids again.

use std::os::unix::process::ExitStatusExt as _;
use std::process::Output;

use onceward::crash::CrashPoint;
use onceward::event::id::DAY_MS;
use onceward::lab::process::Signal;
use serde_json::Value;

use crate::support::{EngineBuilder, Order, World, assert_charged_once, eventually, eventually_equal, start_without_cleaning};

const KILLED: i32 = 9;
/// As the rule has it (R-KFK-IDEM-2).
const BY_ID: &str = "CREATE TABLE processed_event (
    event_id uuid PRIMARY KEY, consumer_group text NOT NULL, processed_at timestamptz NOT NULL DEFAULT now());
    CREATE INDEX ix_processed_event_processed_at ON processed_event (processed_at)";
const BY_ID_AND_GROUP: &str = "CREATE TABLE processed_event (
    event_id uuid NOT NULL, consumer_group text NOT NULL, processed_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (event_id, consumer_group));
    CREATE INDEX ix_processed_event_processed_at ON processed_event (processed_at)";
/// As an object-relational mapper makes it that wants a key of its own.
const WITH_A_NUMBER: &str = "CREATE TABLE processed_event (
    id bigserial PRIMARY KEY, event_id uuid NOT NULL UNIQUE, consumer_group varchar(200) NOT NULL, processed_at timestamptz NOT NULL DEFAULT now());
    CREATE INDEX ON processed_event (processed_at DESC)";

/// A service's database, in which it has claimed these orders.
fn world(table: &str, claimed: &[Order]) -> World {
    let world = World::without_tables(1);
    world.topic.alter("retention.ms", "-1");
    world.database.execute(table);
    for order in claimed {
        let (id, group, made) = (order.event_id, &world.group, order.made_ms());
        world.database.execute(&format!(
            "INSERT INTO processed_event (event_id, consumer_group, processed_at) VALUES ('{id}', '{group}', to_timestamp({made} / 1000.0))"
        ));
    }
    world
}

/// Needs ids for a week.
fn engine(world: &World) -> EngineBuilder {
    world.engine().set("retention.retention_ms", 7 * DAY_MS).set("retention.replay_horizon_ms", DAY_MS)
}

fn all_settled(world: &World) {
    eventually_equal("every record is settled and committed", 0, || world.topic.lag(&world.group));
}

fn run(world: &World, arguments: &[&str]) -> Output {
    engine(world).run_to_end(&[&["retention"], arguments].concat())
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// Verdict and words of one line of the certificate.
fn certified(world: &World, condition: &str) -> (String, String) {
    let output = engine(world).run_to_end(&["check", "--format", "json"]);
    let findings = String::from_utf8_lossy(&output.stdout).into_owned();
    let findings = findings.lines().map(|line| serde_json::from_str::<Value>(line).expect("a line is an object"));
    let finding = findings.into_iter().find(|finding| finding["condition"] == condition).expect("every condition has a line");
    (finding["verdict"].as_str().expect("a word").to_owned(), format!("{} {}", finding["found"], finding["todo"]))
}

#[test]
fn what_a_service_has_claimed_is_no_news_and_its_table_stays_as_it_is() {
    const MADE: &str =
        "SELECT string_agg(attname || ' ' || format_type(atttypid, atttypmod), ', ' ORDER BY attnum) FROM pg_attribute
        WHERE attrelid = 'processed_event'::regclass AND attnum > 0";
    for table in [BY_ID, BY_ID_AND_GROUP, WITH_A_NUMBER] {
        let (before, after) = (Order::some(20), Order::some(30));
        let world = world(table, &before);
        let made = world.database.text(MADE);
        let running = engine(&world).start();
        for _ in 0..2 {
            world.topic.send(before.iter().chain(&after).map(Order::message));
        }
        all_settled(&world);
        assert_eq!(world.provider.calls().posts, 30, "{table}");
        assert_charged_once(&world.provider, &after);
        let duplicates = || running.metric("onceward_events_total", &[("outcome", "duplicate")]);
        eventually("every other record is a duplicate", || duplicates() == 70.0);
        assert_eq!(world.database.text(MADE), made);
        assert_eq!(world.database.count("SELECT count(*) FROM processed_event"), 50);
        for (condition, verdict) in [
            ("dedup_key", "ok"),
            ("unique_indexes", "ok"),
            ("old_claims", "ok"),
            ("privileges", "ok"),
            ("days", "does_not_apply"),
            ("default_partition", "ok"),
        ] {
            let (said, why) = certified(&world, condition);
            assert_eq!(said, verdict, "{table}: {condition} {why}");
        }
        assert!(running.is_ready());
        running.kill();
        world.topic.forget_group(&world.group);
        world.database.execute("UPDATE consumed_partition SET next_offset = 0, last_record_digest = NULL");
        let _running = engine(&world).start();
        all_settled(&world);
        assert_eq!(world.provider.calls().posts, 30, "a replay calls nobody: {table}");
    }
}

#[test]
fn a_table_keyed_by_the_id_alone_serves_no_second_group_until_its_key_is_changed() {
    let order = Order::new();
    let world = world(BY_ID, std::slice::from_ref(&order));
    world
        .database
        .execute(&format!("UPDATE processed_event SET consumer_group = 'shipping' WHERE event_id = '{}'", order.event_id));
    world.topic.send([order.message()]);
    let refused = engine(&world).run_to_end(&["run"]);
    assert_eq!(refused.status.code(), Some(1), "{}", text(&refused));
    let alter = "ALTER TABLE processed_event DROP CONSTRAINT processed_event_pkey, ADD UNIQUE (event_id, consumer_group)";
    assert!(text(&refused).contains(alter) && text(&refused).contains("shipping"), "{}", text(&refused));
    assert_eq!(certified(&world, "dedup_key").0, "failed");
    assert_eq!(world.provider.calls().posts, 0);

    world.database.execute(alter);
    let _running = engine(&world).start();
    all_settled(&world);
    assert_charged_once(&world.provider, &[order]);
}

/// What the service writes and we do not, or in a way that we do not: said before anything is read, with what mends it.
#[test]
fn a_table_that_takes_no_claim_of_ours_is_refused_with_the_alter_that_it_needs() {
    const KEY: &str = "PRIMARY KEY (event_id, consumer_group)); CREATE INDEX ON processed_event (processed_at)";
    for (columns, alter) in [
        (
            "event_id text, consumer_group text, processed_at timestamptz DEFAULT now()",
            "ALTER event_id TYPE uuid USING event_id::uuid",
        ),
        (
            "event_id uuid, consumer_group varchar(10), processed_at timestamptz NOT NULL",
            "ALTER consumer_group TYPE text USING consumer_group::text",
        ),
        (
            "event_id uuid, consumer_group text, processed_at timestamp NOT NULL DEFAULT now()",
            "ALTER processed_at TYPE timestamptz USING processed_at AT TIME ZONE 'UTC'",
        ),
        (
            "event_id uuid, consumer_group text, processed_at timestamptz NOT NULL, id uuid NOT NULL, \"Tenant\" text NOT NULL",
            "ALTER id SET DEFAULT gen_random_uuid(), ALTER \"Tenant\" DROP NOT NULL",
        ),
    ] {
        let world = world(&format!("CREATE TABLE processed_event ({columns}, {KEY}"), &[]);
        let order = Order::new();
        world.topic.send([order.message(), order.message()]);
        let alter = format!("ALTER TABLE processed_event {alter}");
        let refused = engine(&world).run_to_end(&["run"]);
        assert_eq!(refused.status.code(), Some(1), "{columns}: {}", text(&refused));
        assert!(text(&refused).contains("claim_columns") && text(&refused).contains(&alter), "{columns}: {}", text(&refused));
        assert_eq!(world.provider.calls().posts, 0, "{columns}");

        world.database.execute(&alter);
        let (verdict, why) = certified(&world, "claim_columns");
        assert_eq!(verdict, "ok", "{columns}: {why}");
        let _running = engine(&world).start();
        all_settled(&world);
        assert_charged_once(&world.provider, &[order]);
        assert_eq!(world.database.count("SELECT count(*) FROM processed_event"), 1, "{columns}");
    }
}

/// Claims of a service that are three weeks old: with ids of that time, with ids of now, and of a group that is none of ours. And one
/// that is of now, with an old id.
struct Old {
    world: World,
    orders: Vec<Order>,
}

const OLD: i64 = 12_000;

impl Old {
    fn claims() -> Self {
        let noon = |days: i64| chrono::Utc::now().timestamp_millis() / DAY_MS * DAY_MS - days * DAY_MS + DAY_MS / 2;
        let orders: Vec<Order> = Order::some(5).into_iter().zip(noon(20)..).map(|(order, ms)| order.made_at(ms)).collect();
        let world = world(BY_ID_AND_GROUP, &orders);
        let group = &world.group;
        let id = |days: i64| {
            let first = noon(days);
            format!(
                "(lpad(to_hex({first} + n), 12, '0') || '7' || substr(md5(n::text), 1, 3) || '8' || substr(md5(n::text), 4, 15))::uuid"
            )
        };
        let insert = |id: String, group: &str, days: i64, count: i64| {
            world.database.execute(&format!(
                "INSERT INTO processed_event SELECT {id}, '{group}', now() - interval '{days} days' FROM generate_series(1, {count}) AS n"
            ));
        };
        insert(id(20), group, 20, OLD - 5);
        insert(id(0), group, 20, 7);
        insert(id(20), "shipping", 20, 11);
        insert(id(19), group, 0, 3);
        Self { world, orders }
    }

    fn settled() -> Self {
        let old = Self::claims();
        let running = start_without_cleaning(&old.world, engine(&old.world));
        old.world.topic.send([Order::new().message()]);
        all_settled(&old.world);
        old.noted();
        running.kill();
        old
    }

    fn noted(&self) {
        let noted =
            "SELECT count(*) FROM consumed_partition WHERE remember_ms IS NOT NULL AND safe_time > now() - interval '1 hour'";
        eventually_equal("the partition is noted as settled", 1, || self.world.database.count(noted));
    }

    /// Old ones of our group; ones that must stay.
    fn left(&self) -> [i64; 2] {
        let count = |sql: &str| {
            self.world.database.count(&format!(
                "SELECT count(*) FROM processed_event, retention WHERE processed_at < now() - interval '19 days' {sql}"
            ))
        };
        let group = format!("consumer_group = '{}'", self.world.group);
        let younger = "SELECT count(*) FROM processed_event WHERE processed_at > now() - interval '1 hour'";
        let stay = count(&format!("AND NOT ({group} AND event_id < floor)")) + self.world.database.count(younger);
        [
            self.world.database.count(&format!(
                "SELECT count(*) FROM processed_event WHERE processed_at < now() - interval '19 days' AND {group}"
            )) - 7,
            stay,
        ]
    }

    /// The orders come again: their claims are gone or not, nobody is charged for them.
    fn nobody_is_charged(&self) {
        let posts = self.world.provider.calls().posts;
        let running = start_without_cleaning(&self.world, engine(&self.world));
        self.world.topic.send(self.orders.iter().map(Order::old_message));
        all_settled(&self.world);
        self.noted();
        running.kill();
        assert_eq!(self.world.provider.calls().posts, posts);
    }
}

/// What stays: seven with a young id, eleven of others, three young ones and that of the order that was sent.
const STAYS: i64 = 7 + 11 + 3 + 1;

#[test]
fn old_claims_go_in_batches_and_not_before_everybody_is_over_who_may_have_read_a_lower_floor() {
    let old = Old::settled();
    let floor = || old.world.database.text("SELECT floor FROM retention");
    let before = floor();
    let told = text(&run(&old.world, &["run", "--dry-run"]));
    assert!(told.contains("ids below the floor go that were claimed before"), "{told}");
    let status = text(&run(&old.world, &["status"]));
    assert!(status.contains("one table without days"), "{status}");

    let batch = old.world.database.session();
    batch.rows("BEGIN; SELECT pg_current_xact_id()");
    let ran = std::thread::scope(|scope| {
        let cleaner = scope.spawn(|| run(&old.world, &["run"]));
        eventually("the floor is raised", || floor() > before);
        let waits = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE '%pg_snapshot_xmin%' AND pid <> pg_backend_pid()";
        eventually("it waits for that transaction", || old.world.database.count(waits) > 0);
        assert!(!cleaner.is_finished());
        assert_eq!(old.left()[0], OLD, "nothing is gone before");
        batch.rows("COMMIT");
        cleaner.join().expect("it ends")
    });
    assert!(ran.status.success() && text(&ran).contains(&format!("{OLD} claims are gone")), "{}", text(&ran));
    assert_eq!(old.left(), [0, STAYS]);
    let again = text(&run(&old.world, &["run"]));
    assert!(again.contains("nothing was to go"), "{again}");
    old.nobody_is_charged();
}

/// A fence reads the floor before it waits for its lock, and its transaction has written nothing by then.
#[test]
fn a_batch_that_has_read_a_lower_floor_and_waited_for_its_lock_is_over_before_a_claim_goes() {
    let old = Old::settled();
    let posts = old.world.provider.calls().posts;
    old.world.database.execute("UPDATE retention SET floor = '00000000-0000-7000-8000-000000000000'");
    let patient = engine(&old.world).patient_with_locks();
    let mut batch = start_without_cleaning(&old.world, patient.environment("ONCEWARD_CRASH_POINTS", "fenced:freeze:1"));
    let owner = old.world.database.session();
    owner.rows("BEGIN; SELECT FROM consumed_partition FOR UPDATE");
    old.world.topic.send([old.orders[0].old_message()]);
    let waits = |query: &str| {
        let sql =
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() AND query LIKE";
        old.world.database.count(&format!("{sql} '%{query}%'"))
    };
    eventually("the fence waits", || waits("FOR UPDATE OF p%' AND wait_event_type LIKE 'Lock") == 1);
    let week_ago = Order::new().made_at(chrono::Utc::now().timestamp_millis() - 8 * DAY_MS).event_id;
    old.world.database.execute(&format!("UPDATE retention SET floor = '{week_ago}'"));
    let ran = std::thread::scope(|scope| {
        let cleaner = scope.spawn(|| run(&old.world, &["run"]));
        eventually("the cleaner waits for who writes", || waits("pg_snapshot_xmin") > 0);
        owner.rows("COMMIT");
        eventually("the batch stands behind its fence", || batch.is_frozen());
        cleaner.join().expect("it ends")
    });
    assert!(text(&ran).contains(&format!("{OLD} claims are gone")), "{}", text(&ran));
    batch.signal(Signal::Continue);
    all_settled(&old.world);
    assert_eq!(old.world.provider.calls().posts, posts, "the claim was there when the batch looked at the floor");
}

#[test]
fn while_a_partition_has_noted_nothing_every_claim_stays() {
    let old = Old::claims();
    assert!(old.world.onceward(&["migrate"]).status.success());
    let now = Order::new().event_id;
    old.world.database.execute(&format!("INSERT INTO retention (floor) VALUES ('{now}')"));
    let ran = run(&old.world, &["run"]);
    assert!(ran.status.success() && text(&ran).contains("nothing was to go"), "{}", text(&ran));
    assert_eq!(old.world.database.count("SELECT count(*) FROM processed_event"), OLD + 7 + 11 + 3);
}

/// Such services delete old rows: what they know of older events is gone.
#[test]
fn an_event_older_than_the_oldest_claim_is_not_new_to_whoever_adopts_the_table() {
    let hour = |hours: i64| Order::new().made_at(chrono::Utc::now().timestamp_millis() - hours * 3_600_000);
    let (claimed, older, younger) = (hour(50), hour(60), hour(40));
    let world = world(BY_ID, std::slice::from_ref(&claimed));
    world.topic.send([&claimed, &older, &younger].map(Order::old_message));
    let _running = engine(&world).start();
    all_settled(&world);
    assert_charged_once(&world.provider, &[younger]);
    assert_eq!(
        world.database.column("SELECT event_id FROM held_event WHERE reason = 'beyond_horizon'"),
        [older.event_id.to_string()]
    );
}

#[test]
fn killed_between_any_two_steps_the_next_run_deletes_the_rest() {
    for (point, passage, left) in [(CrashPoint::FloorRaised, 1, OLD), (CrashPoint::ClaimsDeleted, 2, OLD - 10_000)] {
        let old = Old::settled();
        let armed = format!("{}:kill:{passage}", point.as_str());
        let killed = engine(&old.world).environment("ONCEWARD_CRASH_POINTS", &armed).run_to_end(&["retention", "run"]);
        assert_eq!(killed.status.signal(), Some(KILLED), "{point:?}: {}", text(&killed));
        assert_eq!(old.left(), [left, STAYS], "{point:?}");
        old.nobody_is_charged();
        let ran = run(&old.world, &["run"]);
        assert!(ran.status.success() && text(&ran).contains(&format!("{left} claims are gone")), "{point:?}: {}", text(&ran));
        assert_eq!(old.left()[0], 0, "{point:?}");
        old.nobody_is_charged();
    }
}

#[test]
fn without_an_index_nothing_is_deleted_and_a_person_is_told_how_to_make_it() {
    let old = Old::settled();
    old.world.database.execute("DROP INDEX ix_processed_event_processed_at");
    let create =
        "CREATE INDEX CONCURRENTLY ix_processed_event_processed_at ON processed_event (processed_at, event_id, consumer_group)";
    let (verdict, why) = certified(&old.world, "old_claims");
    assert!(verdict == "failed" && why.contains(create), "{verdict} {why}");
    let ran = run(&old.world, &["run"]);
    assert!(ran.status.code() == Some(1) && text(&ran).contains(create), "{}", text(&ran));
    for told in [&["status"][..], &["run", "--dry-run"]] {
        let told = text(&run(&old.world, told));
        assert!(told.contains("nothing goes") && told.contains(create), "{told}");
    }
    assert_eq!(old.left(), [OLD, STAYS]);
    old.nobody_is_charged();
    old.world.database.execute(create);
    assert!(run(&old.world, &["run"]).status.success());
    assert_eq!(old.left()[0], 0);
}
