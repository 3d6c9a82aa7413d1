//! Clean-ups fail in public: one that is killed half way and never finishes, one that makes every insert queue behind a long reader, two
//! that delete against each other, one that nobody misses until the last day is full.

use std::os::unix::process::ExitStatusExt as _;
use std::process::Output;

use onceward::crash::CrashPoint;
use serde_json::Value;

use crate::support::{
    CLEANERS_LOCK, Engine, EngineBuilder, Order, World, assert_charged_once, eventually, eventually_equal, start_without_cleaning,
};

const DAY_MS: i64 = 86_400_000;
const KILLED: i32 = 9;
const TABLES: &str = "SELECT relname FROM pg_class WHERE relkind = 'r' AND relname LIKE 'processed_event_%' ORDER BY relname";

/// Three days of claims that nobody needs any more, and orders of today.
struct Scene {
    world: World,
    orders: Vec<Order>,
}

impl Scene {
    fn new() -> Self {
        let world = World::with_partitions(1);
        world.topic.alter("retention.ms", "-1");
        let orders =
            (18..21).rev().map(|days| Order::new().made_at((today(&world) - days) * DAY_MS + 1)).chain([Order::new()]).collect();
        Self { world, orders }
    }

    /// Whose partitions are settled, with an engine that still runs.
    fn settled() -> (Self, Engine) {
        let scene = Self::new();
        scene.send();
        let engine = start_without_cleaning(&scene.world, scene.engine());
        scene.noted();
        (scene, engine)
    }

    fn engine(&self) -> EngineBuilder {
        self.world.engine().set("retention.retention_ms", 7 * DAY_MS).set("retention.replay_horizon_ms", DAY_MS)
    }

    fn send(&self) {
        self.world.topic.send(self.orders.iter().map(Order::old_message));
    }

    fn settled_to_the_end(&self) {
        eventually_equal("every record is settled and committed", 0, || self.world.topic.lag(&self.world.group));
    }

    fn noted(&self) {
        self.settled_to_the_end();
        let sql = "SELECT count(*) FROM consumed_partition WHERE remember_ms IS NOT NULL AND safe_time > now() - interval '1 hour'";
        eventually_equal("the partition is noted as settled", 1, || self.world.database.count(sql));
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.engine().run_to_end(&[&["retention"], arguments].concat())
    }

    /// The days below the floor that are still there, in whatever state.
    fn old_days(&self) -> usize {
        let first =
            format!("processed_event_{}", self.world.database.text("SELECT to_char(now() - interval '10 days', 'YYYY_MM_DD')"));
        self.world.database.column(TABLES).into_iter().filter(|table| *table < first).count()
    }

    /// Everything comes again, and nobody is charged again.
    fn nothing_is_new(&self) {
        self.send();
        self.settled_to_the_end();
        assert_charged_once(&self.world.provider, &self.orders);
        assert_eq!(self.world.database.count("SELECT count(*) FROM held_event"), 0);
    }
}

fn today(world: &World) -> i64 {
    world.database.count("SELECT (extract(epoch FROM now()) * 1000)::bigint") / DAY_MS
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

// CASES E08
#[test]
fn killed_at_any_step_it_is_finished_by_the_next_run() {
    for (point, passage) in [(CrashPoint::FloorRaised, 1), (CrashPoint::DayDetached, 2), (CrashPoint::DayDropped, 1)] {
        let (scene, _engine) = Scene::settled();
        assert_eq!(scene.old_days(), 3);
        let armed = format!("{}:kill:{passage}", point.as_str());
        let killed = scene.engine().environment("ONCEWARD_CRASH_POINTS", &armed).run_to_end(&["retention", "run"]);
        assert_eq!(killed.status.signal(), Some(KILLED), "{point:?}: {}", text(&killed));
        assert!(scene.old_days() > 0, "{point:?}");
        scene.nothing_is_new();
        let ran = scene.run(&["run"]);
        assert!(ran.status.success(), "{point:?}: {}", text(&ran));
        assert_eq!(scene.old_days(), 0, "{point:?}");
        scene.nothing_is_new();
        let again = text(&scene.run(&["run"]));
        assert!(again.contains("nothing was to go"), "{again}");
    }
}

// CASES E08: a detach that a reader has made give up is ended by the next run, and nobody has waited for either.
#[test]
fn a_long_reader_makes_the_cleaner_give_up_and_no_insert_wait() {
    let (scene, engine) = Scene::settled();
    let reader = scene.world.database.session();
    reader.rows("BEGIN; SELECT count(*) FROM processed_event");
    let pending = "SELECT count(*) FROM pg_inherits WHERE inhparent = 'processed_event'::regclass AND inhdetachpending";

    let ran = std::thread::scope(|scope| {
        // Patient enough for all that happens meanwhile.
        let patient = scene.engine().set("database.transaction_budget_ms", 12_000).set("pipeline.stuck_after_ms", 20_000);
        let cleaner = scope.spawn(|| patient.run_to_end(&["retention", "run"]));
        eventually_equal("a detach waits for the reader", 1, || scene.world.database.count(pending));
        // Orders of today, and again those of the day that is on its way out.
        let mut orders = scene.orders.clone();
        for _ in 0..20 {
            let order = Order::new();
            scene.world.topic.send([order.message()]);
            orders.push(order);
        }
        scene.world.topic.send(scene.orders.iter().map(Order::old_message));
        eventually_equal("settled meanwhile", 0, || scene.world.topic.lag(&scene.world.group));
        assert!(!cleaner.is_finished(), "the reader is still there, and so is the cleaner");
        assert_charged_once(&scene.world.provider, &orders);
        cleaner.join().expect("it ends")
    });
    assert!(!ran.status.success(), "{}", text(&ran));
    assert!(text(&ran).contains("55P03"), "{}", text(&ran));
    assert_eq!(scene.world.database.count(pending), 1, "it is left pending");
    assert_eq!(scene.old_days(), 3);
    let status = text(&scene.run(&["status"]));
    assert!(status.contains("is being detached"), "{status}");
    assert!(engine.is_ready());

    reader.rows("COMMIT");
    let ran = scene.run(&["run"]);
    assert!(ran.status.success() && text(&ran).contains("a detach that was cut off is ended"), "{}", text(&ran));
    assert_eq!(scene.old_days(), 0);
}

// CASES E10
#[test]
fn one_cleaner_is_at_work_at_a_time() {
    let (scene, _engine) = Scene::settled();
    let other = scene.world.database.session();
    other.rows(&format!("BEGIN; {CLEANERS_LOCK}"));
    let ran = scene.run(&["run"]);
    assert_eq!(ran.status.code(), Some(1));
    assert!(text(&ran).contains("another cleaner is at work"), "{}", text(&ran));
    assert_eq!(scene.old_days(), 3);
    other.rows("COMMIT");
    assert!(scene.run(&["run"]).status.success());
    assert_eq!(scene.old_days(), 0);
}

// CASES E10
#[test]
fn the_service_cleans_by_itself_and_tells_how_old_the_rest_is() {
    let scene = Scene::new();
    scene.send();
    let engine = scene.engine().set("retention.interval_ms", 1_000).start();
    scene.settled_to_the_end();
    eventually_equal("the old days are gone", 0, || scene.old_days());
    let floor = |engine: &Engine| engine.metric("onceward_retention_floor_age_seconds", &[]);
    eventually("the floor's age is told", || (7.0 * 86_400.0..=8.0 * 86_400.0).contains(&floor(&engine)));
    assert_eq!(engine.metric("onceward_retention_cleaner_failed", &[]), 0.0);
    scene.nothing_is_new();
}

#[test]
fn days_are_kept_while_any_group_needs_them_and_the_status_says_which_and_what_to_do() {
    let (scene, engine) = Scene::settled();
    let held_back = || -> Value {
        let output = scene.run(&["status", "--format", "json"]);
        serde_json::from_slice::<Value>(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", text(&output)))
    };
    let insert = |group: &str, rest: &str| {
        scene.world.database.execute(&format!(
            "INSERT INTO consumed_partition (consumer_group, topic, partition, owner, epoch, safe_time, remember_ms, remember_why)
             VALUES ('{group}', 'others', 4, 'somebody', 1, {rest})"
        ));
    };
    // Another group on the same table needs ids for longer.
    insert("longer", &format!("now(), {}, '30 d (retention.retention_ms)'", 30 * DAY_MS));
    let status = held_back();
    assert!(status["days"].as_array().expect("days").iter().all(|day| day["goes"] == false), "{status}");
    let kept_by = status["days"][0]["kept_by"][0]["why"].as_str().expect("why").to_owned();
    assert!(kept_by.contains("longer") && kept_by.contains("30 d"), "{kept_by}");
    assert_eq!(status["held_back_by"].as_array().map(Vec::len), Some(0), "that is as it should be");
    scene.world.database.execute("DELETE FROM consumed_partition WHERE consumer_group = 'longer'");

    // One that stands still, and one that has never said anything.
    insert("behind", &format!("now() - interval '40 days', {DAY_MS}, 'retention'"));
    insert("silent", "NULL, NULL, NULL");
    let told = text(&scene.run(&["run", "--dry-run"]));
    assert!(told.contains("no day would go"), "{told}");
    for words in
        ["group behind, topic others, partition 4 is settled only up to", "group silent", "WHERE consumer_group = 'silent'"]
    {
        assert!(told.contains(words), "{words}: {told}");
    }
    assert!(text(&scene.run(&["run"])).contains("nothing was to go"));
    assert_eq!(scene.old_days(), 3);

    scene.world.database.execute("DELETE FROM consumed_partition WHERE consumer_group IN ('behind', 'silent')");
    let told = text(&scene.run(&["run", "--dry-run"]));
    assert!(told.contains("would go") && scene.old_days() == 3, "{told}");
    // A topic that keeps its records for ever, and nobody has said how old a replay can be.
    let undeclared = scene.engine().unset("retention.replay_horizon_ms").run_to_end(&["retention", "run"]);
    assert!(text(&undeclared).contains("retention.replay_horizon_ms"), "{}", text(&undeclared));
    assert_eq!(scene.old_days(), 3);
    assert!(scene.run(&["run"]).status.success());
    assert_eq!(scene.old_days(), 0);
    drop(engine);
}

// CASES E09: nobody makes days any more, and a week of them is left.
#[test]
fn a_maker_that_is_off_is_told_while_there_are_days_left() {
    let world = World::with_partitions(1);
    let engine = world.engine().set("retention.days_ahead", 3).start();
    let ahead = || engine.metric("onceward_retention_days_ahead", &[]);
    eventually("all days are there", || ahead() == 3.0);
    world.database.execute(
        "CREATE FUNCTION refuse() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no tables today'; END $$;
         CREATE EVENT TRIGGER refuse ON ddl_command_start WHEN TAG IN ('CREATE TABLE') EXECUTE FUNCTION refuse()",
    );
    // As if days had passed since.
    let last = world.database.column(TABLES).pop().expect("days");
    world.database.execute(&format!("DROP TABLE {last}"));
    let (code, body) = eventually("it is told", || engine.get("/ready").filter(|(code, _)| *code != 200));
    assert_eq!(code, 503);
    assert!(body.contains("days: ") && body.contains("2 are there after today") && body.contains("no tables today"), "{body}");
    assert_eq!(ahead(), 2.0);
    let order = Order::new();
    world.topic.send([order.message()]);
    eventually_equal("work goes on", 0, || world.topic.lag(&world.group));
    assert_charged_once(&world.provider, [&order]);
    world.database.execute("DROP EVENT TRIGGER refuse");
    eventually("it is made", || engine.is_ready() && ahead() == 3.0);
}
