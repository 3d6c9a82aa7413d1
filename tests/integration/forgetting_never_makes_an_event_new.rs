//! The table of claims must not grow for ever, and an event whose claim is gone must never look new: it would be charged again. So whole
//! days are forgotten, and only below a floor that says so; an older event is known by what outlives its claim, or it waits for a person.

use onceward::lab::provider_stub::{Act, Rule};

use crate::support::{EngineBuilder, Message, Order, World, assert_charged_once, eventually_equal, start_without_cleaning};

const DAY_MS: i64 = 86_400_000;
const HELD: &str = "SELECT reason || ' ' || state FROM held_event ORDER BY id";

/// Whose topic keeps old records.
fn world() -> World {
    let world = World::with_partitions(1);
    world.topic.alter("retention.ms", "-1");
    world
}

/// Needs ids for so many days.
fn engine(world: &World, days: i64) -> EngineBuilder {
    world.engine().set("retention.retention_ms", days * DAY_MS).set("retention.replay_horizon_ms", DAY_MS)
}

/// What the cleaner has said.
fn clean(world: &World, days: i64) -> String {
    let ran = engine(world, days).run_to_end(&["retention", "run"]);
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    String::from_utf8(ran.stdout).expect("text")
}

fn now_ms(world: &World) -> i64 {
    world.database.count("SELECT (extract(epoch FROM now()) * 1000)::bigint")
}

fn today(world: &World) -> i64 {
    now_ms(world) / DAY_MS
}

/// Orders whose ids were made at the noon of a day so many days ago.
fn some_days_ago(world: &World, days: i64, count: usize) -> Vec<Order> {
    let noon = (today(world) - days) * DAY_MS + DAY_MS / 2;
    Order::some(count).into_iter().zip(noon..).map(|(order, ms)| order.made_at(ms)).collect()
}

fn old(orders: &[Order]) -> Vec<Message> {
    orders.iter().map(Order::old_message).collect()
}

/// The claims of these orders that are there.
fn claims(world: &World, orders: &[Order]) -> i64 {
    let ids: Vec<String> = orders.iter().map(|order| format!("'{}'", order.event_id)).collect();
    world.database.count(&format!("SELECT count(*) FROM processed_event WHERE event_id IN ({})", ids.join(",")))
}

fn all_settled(world: &World) {
    eventually_equal("every record is settled and committed", 0, || world.topic.lag(&world.group));
}

/// Until the partition is noted as settled up to now.
fn noted_as_settled(world: &World) {
    let sql = "SELECT count(*) FROM consumed_partition WHERE safe_time IS NULL OR remember_ms IS NULL OR safe_time < now() - interval '1 hour'";
    eventually_equal("every partition is noted as settled", 0, || world.database.count(sql));
}

// CASES F01: the cleaner runs first, after a stop of three retentions.
#[test]
fn after_a_stop_of_three_retentions_the_cleaner_forgets_nothing_that_is_still_to_come() {
    let world = world();
    let (settled, to_come) = (some_days_ago(&world, 25, 40), some_days_ago(&world, 24, 20));
    world.topic.send(old(&settled));
    let running = start_without_cleaning(&world, engine(&world, 7));
    all_settled(&world);
    noted_as_settled(&world);
    running.kill();
    // As it stood when the service was stopped, and what was sent since; the last part of what was settled comes again.
    world.database.execute("UPDATE consumed_partition SET safe_time = now() - interval '24 days 12 hours'");
    world.topic.send(old(&to_come));
    world.topic.forget_group(&world.group);
    world.database.execute("UPDATE consumed_partition SET next_offset = 20, last_record_digest = NULL");

    clean(&world, 7);
    let _running = start_without_cleaning(&world, engine(&world, 7));
    all_settled(&world);
    let all: Vec<Order> = settled.iter().chain(&to_come).cloned().collect();
    assert_charged_once(&world.provider, &all);
    assert_eq!(world.database.column(HELD), [""; 0], "nothing is forgotten that was still to come");

    // Once it has caught up, there is no reason to keep them, and no second charge either.
    noted_as_settled(&world);
    let said = clean(&world, 7);
    assert!(said.contains("is gone"), "{said}");
    assert_eq!(claims(&world, &all), 0);
    world.topic.send(old(&all));
    all_settled(&world);
    assert_charged_once(&world.provider, &all);
    assert_eq!(world.database.column(HELD), [""; 0], "their payments tell");
}

// CASES B10
#[test]
fn when_the_groups_offsets_and_the_claims_are_gone_everything_comes_again_and_nobody_is_charged() {
    let world = world();
    let orders = some_days_ago(&world, 20, 60);
    world.topic.send(old(&orders));
    let running = start_without_cleaning(&world, engine(&world, 7));
    all_settled(&world);
    noted_as_settled(&world);
    running.kill();
    world.topic.forget_group(&world.group);
    clean(&world, 7);
    assert_eq!(claims(&world, &orders), 0);
    // Also the table's own position is lost: only what outlives claims is left.
    world.database.execute("UPDATE consumed_partition SET next_offset = NULL, last_record_digest = NULL");

    let running = engine(&world, 7).start();
    all_settled(&world);
    assert_charged_once(&world.provider, &orders);
    assert_eq!(world.provider.calls().posts, 60);
    assert_eq!(world.database.count("SELECT count(*) FROM payment"), 60);
    assert_eq!(running.metric("onceward_events_total", &[("outcome", "duplicate")]), 60.0);
}

#[test]
fn an_id_on_either_side_of_midnight_is_charged_once_across_a_dropped_day_other_time_zones_and_a_longer_retention() {
    let world = world();
    let midnight = (today(&world) - 8) * DAY_MS;
    let orders = [Order::new().made_at(midnight - 1), Order::new().made_at(midnight)];
    world.topic.send(old(&orders));
    let running = start_without_cleaning(&world, engine(&world, 8));
    all_settled(&world);
    noted_as_settled(&world);
    running.kill();
    clean(&world, 8);
    assert_eq!(
        [claims(&world, &orders[..1]), claims(&world, &orders[1..])],
        [0, 1],
        "the day before is gone, the day after is not"
    );
    let floor = world.database.text("SELECT floor FROM retention");

    let name = world.database.text("SELECT current_database()");
    for zone in ["Pacific/Kiritimati", "America/Los_Angeles"] {
        world.database.execute(&format!("ALTER DATABASE \"{name}\" SET timezone = '{zone}'"));
        // A longer retention brings no day back.
        let running = engine(&world, 30).start();
        world.topic.send(old(&orders));
        all_settled(&world);
        running.kill();
        clean(&world, 30);
    }
    assert_charged_once(&world.provider, &orders);
    assert_eq!(world.provider.calls().posts, 2);
    assert_eq!(world.database.column(HELD), [""; 0]);
    assert_eq!(world.database.text("SELECT floor FROM retention"), floor, "it never falls");
    assert_eq!([claims(&world, &orders[..1]), claims(&world, &orders[1..])], [0, 1], "and a day below it is never made");
}

// CASES F02
#[test]
fn an_event_that_nothing_tells_of_is_held_once_however_often_it_comes() {
    let world = world();
    let orders = some_days_ago(&world, 20, 1);
    world.topic.send(old(&orders));
    let running = start_without_cleaning(&world, engine(&world, 7));
    all_settled(&world);
    noted_as_settled(&world);
    clean(&world, 7);
    world.database.execute("DELETE FROM payment");
    for _ in 0..2 {
        world.topic.send(old(&orders));
        all_settled(&world);
        assert_eq!(world.database.column(HELD), ["beyond_horizon parked"]);
    }
    assert_eq!(world.provider.calls().posts, 1, "nobody is asked");
    // With another content it is no repeat, if a payment says so.
    world.database.execute(&format!(
        "INSERT INTO payment (event_id, order_id, customer_id, amount, currency, status, attempts)
         VALUES ('{}', 1, 7, 99, 'EUR', 'charged', 1)",
        orders[0].event_id
    ));
    world.topic.send(old(&orders));
    all_settled(&world);
    assert_eq!(world.database.column(HELD), ["beyond_horizon parked", "conflict parked"]);
    // A replay is a person's decision, and looks for the payment first.
    let asked = ["held", "replay", "--reason", "beyond_horizon", "--because", "seen with the bank", "--actor", "ann"];
    assert!(world.onceward(&asked).status.success());
    eventually_equal("it is compared", vec!["conflict parked".to_owned(); 2], || world.database.column(HELD));
    assert_eq!(world.provider.calls().posts, 1, "nobody is asked");
    assert_eq!(world.database.column("SELECT actor FROM held_event WHERE actor IS NOT NULL"), ["ann"]);
    drop(running);
}

#[test]
fn a_held_event_outlives_its_day_and_is_applied_once() {
    let world = world();
    let orders = some_days_ago(&world, 20, 2);
    world.provider.script([Rule::for_order(orders[0].order_id, Act::status(500))]);
    world.topic.send(old(&orders));
    let _running = start_without_cleaning(&world, engine(&world, 7).set("retry.max_attempts", 1));
    all_settled(&world);
    noted_as_settled(&world);
    clean(&world, 7);
    assert_eq!(claims(&world, &orders), 0);
    assert_eq!(world.database.column(HELD), ["unknown parked"]);

    world.topic.send(old(&orders));
    all_settled(&world);
    assert_eq!(world.database.column(HELD), ["unknown parked"], "its row tells that it is no new event");
    world.provider.clear_script();
    let asked = ["held", "replay", "--reason", "unknown", "--because", "it is back", "--actor", "ann"];
    assert!(world.onceward(&asked).status.success());
    eventually_equal("it is applied", vec!["unknown applied".to_owned()], || world.database.column(HELD));
    world.topic.send(old(&orders));
    all_settled(&world);
    assert_charged_once(&world.provider, &orders);
    assert_eq!(world.database.count("SELECT count(*) FROM payment"), 2);
    assert_eq!(world.database.count("SELECT count(*) FROM payment_attempt"), 0);
    assert_eq!(world.database.column(HELD), ["unknown applied"]);
}

/// The floor is read with the fence, which may have waited for its lock since before the floor was raised: then the claim finds no day.
#[test]
fn a_batch_that_meets_a_day_on_its_way_out_decides_anew_about_that_days_events_alone() {
    let world = world();
    let (known, current) = (some_days_ago(&world, 20, 2), Order::some(3));
    world.topic.send(old(&known));
    let running = start_without_cleaning(&world, engine(&world, 7).set("database.lock_timeout_ms", 1_400));
    all_settled(&world);

    let owner = world.database.session();
    owner.rows("BEGIN; SELECT FROM consumed_partition FOR UPDATE");
    world.topic.send(old(&known).into_iter().chain(current.iter().map(Order::message)));
    let waits = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE '%FOR UPDATE OF p%' AND wait_event_type = 'Lock'";
    eventually_equal("the fence waits", 1, || world.database.count(waits));
    let day = world.database.text("SELECT tableoid::regclass FROM processed_event ORDER BY event_id LIMIT 1");
    let floor = (today(&world) - 10) * DAY_MS;
    let floor = Order::new().made_at(floor).event_id;
    world.database.execute(&format!("UPDATE retention SET floor = '{floor}'"));
    world.database.execute(&format!("ALTER TABLE processed_event DETACH PARTITION {day}"));
    owner.rows("COMMIT");

    all_settled(&world);
    assert!(running.log().contains("a day of ids is not there"), "it has read the floor before it was raised");
    let all: Vec<Order> = known.into_iter().chain(current).collect();
    assert_charged_once(&world.provider, &all);
    assert_eq!(world.provider.calls().posts, 5);
    assert_eq!(world.database.column(HELD), [""; 0]);
    assert_eq!(running.status()["partitions"][0]["stopped"], serde_json::Value::Null);
}
