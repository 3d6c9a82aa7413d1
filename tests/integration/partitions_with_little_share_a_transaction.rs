//! A partition with one new record waits for a COMMIT like one with a thousand. Where nobody is asked, those that wait at the same time go in one
//! transaction; each of them keeps its own fence, its claims and its frontier. If they were mixed up, one partition would pass over what another
//! has applied, or an owner that is gone would settle. R-KFK-IDEM-3, R-KFK-CONS-X1.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt as _;
use std::thread;

use onceward::crash::CrashPoint;
use onceward::lab::process::Signal;

use crate::support::{Engine, EngineBuilder, Message, Order, Proxy, World, eventually, eventually_equal};

const PARTITIONS: i32 = 24;
const PAID: &str = "SELECT count(*) FROM payment";
/// The transactions that wrote the claims, also where nobody is left who counted them.
const WROTE_CLAIMS: &str = "SELECT count(DISTINCT xmin::text) FROM processed_event";

/// One transaction at a time, so that partitions wait for each other; plain inserts from the first batch on, which is what they share.
fn engine(world: &World) -> EngineBuilder {
    world.engine().without_provider().patient_with_locks().concurrency(1).environment("ONCEWARD_CLAIM_FORM", "optimistic")
}

/// An order for each partition.
fn one_for_each() -> Vec<Order> {
    Order::some(PARTITIONS as usize)
}

/// Each in a partition of its own, as far as there are so many.
fn messages(orders: &[Order]) -> Vec<Message> {
    orders.iter().zip((0..PARTITIONS).cycle()).map(|(order, partition)| order.message().partition(partition)).collect()
}

fn transactions(engine: &Engine) -> f64 {
    engine.metric("onceward_batch_events_count", &[])
}

const LOCK: &str = "BEGIN; LOCK TABLE payment IN EXCLUSIVE MODE";

/// Sends the orders, and lets none of them be settled before all are read.
fn send_at_once(world: &World, engine: &Engine, orders: &[Order]) {
    let lock = world.database.session();
    lock.rows(LOCK);
    world.topic.send(messages(orders));
    let read = || engine.metric("onceward_window_records", &[]);
    eventually_equal("every partition has its records", orders.len() as f64, read);
    lock.rows("COMMIT");
}

/// As [`while_all_wait`], and nothing happens meanwhile.
fn send_and_let_wait(world: &World, engine: &mut Engine, messages: Vec<Message>) {
    while_all_wait(world, engine, messages, || (), |_| ());
}

/// Sends the records so that all partitions but one wait for that one's transaction, which waits for us. Then `before` happens; and `during`
/// when they have their own, which waits for us too.
fn while_all_wait(
    world: &World,
    engine: &mut Engine,
    messages: Vec<Message>,
    before: impl FnOnce(),
    during: impl FnOnce(&mut Engine),
) {
    let waiting = || world.database.waiting_for("payment");
    let (first, second) = (world.database.session(), world.database.session());
    first.rows(LOCK);
    let count = messages.len();
    world.topic.send(messages);
    let read = || engine.metric("onceward_window_records", &[]);
    eventually_equal("every partition has its records", count as f64, read);
    eventually_equal("the one waits", 1, waiting);
    before();
    thread::scope(|scope| {
        let behind = scope.spawn(|| second.rows(LOCK));
        eventually_equal("we wait behind it", 2, waiting);
        first.rows("COMMIT");
        behind.join().expect("it has the lock");
    });
    eventually_equal("the others wait", 1, waiting);
    during(engine);
    second.rows("COMMIT");
}

/// Every order has one payment and one claim, and each partition's row and Kafka's offset stand at its end.
fn assert_all_is_settled(world: &World, orders: usize) {
    eventually_equal("every record is settled and committed", 0, || world.topic.lag(&world.group));
    let orders = i64::try_from(orders).expect("few");
    let counts = [PAID, "SELECT count(*) FROM processed_event"].map(|rows| world.database.count(rows));
    assert_eq!(counts, [orders; 2], "payments and claims");
    let rows = world.database.rows("SELECT partition, next_offset FROM consumed_partition WHERE next_offset IS NOT NULL");
    let number = |text: &Option<String>| text.as_deref().and_then(|text| text.parse::<i64>().ok()).expect("a number");
    let stored: BTreeMap<i32, i64> = rows.iter().map(|row| (number(&row[0]) as i32, number(&row[1]))).collect();
    let ends: BTreeMap<i32, i64> = world.topic.ends().into_iter().filter(|(_, end)| *end > 0).collect();
    assert_eq!(stored, ends);
    let strays =
        "SELECT count(*) FROM processed_event JOIN consumed_partition ON id = source_id WHERE source_offset >= next_offset";
    assert_eq!(world.database.count(strays), 0, "each claim names its own partition");
}

#[test]
fn those_that_wait_at_the_same_time_go_in_one() {
    let world = World::with_partitions(PARTITIONS);
    let mut engine = engine(&world).start();
    let orders = one_for_each();
    send_and_let_wait(&world, &mut engine, messages(&orders));
    assert_all_is_settled(&world, orders.len());
    assert_eq!(transactions(&engine), 2.0, "the first one's, and all others'");
    assert_eq!(engine.metric("onceward_events_total", &[("outcome", "applied")]), f64::from(PARTITIONS));
    let sources = "SELECT count(DISTINCT source_id) FROM processed_event";
    assert_eq!(world.database.count(sources), i64::from(PARTITIONS), "each claim tells its partition");
}

#[test]
fn where_somebody_is_asked_none_waits_for_the_answers_of_another() {
    let world = World::with_partitions(PARTITIONS);
    let mut engine = engine(&world).provider(&world.provider.url()).start();
    let orders = one_for_each();
    send_and_let_wait(&world, &mut engine, messages(&orders));
    assert_all_is_settled(&world, orders.len());
    assert_eq!(transactions(&engine), f64::from(PARTITIONS));
}

#[test]
fn poison_in_one_is_held_and_all_go_on_together() {
    let world = World::with_partitions(PARTITIONS);
    let mut engine = engine(&world).start();
    let orders = one_for_each();
    let mut sent = messages(&orders);
    sent.push(Message::new(*b"no event").partition(9));
    send_and_let_wait(&world, &mut engine, sent);
    assert_all_is_settled(&world, orders.len());
    assert_eq!(transactions(&engine), 2.0);
    let held = "SELECT reason || ' ' || state || ' ' || partition FROM held_event JOIN consumed_partition AS p ON p.id = source_id";
    assert_eq!(world.database.column(held), ["undecodable parked 9"]);
}

#[test]
fn an_event_in_two_of_them_is_applied_once_and_costs_the_others_nothing() {
    let world = World::with_partitions(PARTITIONS);
    let mut engine = engine(&world).start();
    let orders = one_for_each();
    let mut sent = messages(&orders);
    // Whichever goes first alone, two of these three are in one transaction.
    sent.extend([7, 8].map(|partition| orders[3].message().partition(partition)));
    send_and_let_wait(&world, &mut engine, sent);
    assert_all_is_settled(&world, orders.len());
    assert!(engine.metric("onceward_claims_total", &[("form", "taken")]) >= 1.0, "they could not share it");
    assert_eq!(engine.metric("onceward_events_total", &[("outcome", "duplicate")]), 2.0);
}

#[test]
fn a_row_that_the_database_refuses_is_found_alone_and_held() {
    let world = World::with_partitions(PARTITIONS);
    world.database.execute("ALTER TABLE payment ADD CHECK (amount < 1000)");
    let mut engine = engine(&world).start();
    let mut orders = one_for_each();
    let (bad, another) = (Order::new().amount("1000.00"), Order::new().amount("1001.00"));
    orders[4] = bad.clone();
    orders[5] = another.clone();
    send_and_let_wait(&world, &mut engine, messages(&orders));
    eventually_equal("every record is settled and committed", 0, || world.topic.lag(&world.group));
    assert_eq!(world.database.count(PAID), i64::from(PARTITIONS) - 2);
    let mut refused = [bad, another].map(|order| format!("{} refused", order.event_id));
    refused.sort();
    assert_eq!(world.database.column("SELECT event_id || ' ' || reason FROM held_event ORDER BY 1"), refused);
}

#[test]
fn no_more_than_has_room_goes_in_one() {
    const EACH: i32 = 30;
    let world = World::with_partitions(PARTITIONS);
    let mut engine = engine(&world).start();
    let orders = Order::some((EACH * PARTITIONS) as usize);
    send_and_let_wait(&world, &mut engine, messages(&orders));
    assert_all_is_settled(&world, orders.len());
    let of_at_most = |events: &str| engine.metric("onceward_batch_events_bucket", &[("le", events)]);
    assert_eq!(of_at_most("512"), transactions(&engine));
    assert!(transactions(&engine) < f64::from(PARTITIONS));
}

#[test]
fn an_owner_that_has_lost_one_of_them_settles_the_others_and_that_one_once() {
    let world = World::with_partitions(PARTITIONS);
    let mut engine = engine(&world).start();
    let orders = one_for_each();
    while_all_wait(
        &world,
        &mut engine,
        messages(&orders),
        || {
            // Not the one whose row is locked.
            world.database.execute(
                "UPDATE consumed_partition SET epoch = epoch + 1, owner = 'another'
             WHERE id = (SELECT id FROM consumed_partition ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED)",
            );
        },
        |_| (),
    );
    assert_all_is_settled(&world, orders.len());
    assert!(transactions(&engine) > 2.0, "each of them went on alone");
    let epochs = "SELECT count(*) FROM consumed_partition WHERE epoch > 2";
    assert_eq!(world.database.count(epochs), 1, "nobody but the one was taken anew");
}

#[test]
fn asked_to_end_while_they_share_one_it_settles_them_all_and_ends_in_order() {
    let world = World::with_partitions(PARTITIONS);
    let mut engine = engine(&world).start();
    let orders = one_for_each();
    while_all_wait(
        &world,
        &mut engine,
        messages(&orders),
        || (),
        |engine| {
            engine.signal(Signal::Term);
            eventually("it drains", || engine.log().contains("stopping: drain"));
        },
    );
    assert!(engine.wait().success(), "{}", engine.log());
    assert_all_is_settled(&world, orders.len());
    assert_eq!(world.database.count(WROTE_CLAIMS), 2, "one alone, and all others");
}

#[test]
fn partitions_that_move_while_they_share_one_are_settled_first() {
    let world = World::with_partitions(PARTITIONS);
    let mut first = engine(&world).start();
    let orders = one_for_each();
    let mut second = None;
    while_all_wait(
        &world,
        &mut first,
        messages(&orders),
        || (),
        |first| {
            second = Some(engine(&world).launch());
            eventually("it is to give some back", || first.log().contains("rebalance=Revoke {"));
        },
    );
    let second = second.expect("it was started");
    eventually_equal("each has its half", [PARTITIONS as usize / 2; 2], || [first.owned().len(), second.owned().len()]);
    assert_all_is_settled(&world, orders.len());
    assert_eq!(world.database.count(WROTE_CLAIMS), 2, "one alone, and all others");
    let more = one_for_each();
    world.topic.send(messages(&more));
    assert_all_is_settled(&world, orders.len() + more.len());
    assert!(first.terminate().success() && second.terminate().success());
}

#[test]
fn a_commit_that_is_lost_with_or_without_its_answer_is_asked_for_by_each() {
    for committed in [true, false] {
        let world = World::with_partitions(PARTITIONS);
        let way = Proxy::before(&world.database);
        let mut engine = engine(&world).set("database.url", way.url()).start();
        let orders = one_for_each();
        while_all_wait(&world, &mut engine, messages(&orders), || (), |_| way.lose_the_next_commit(committed));
        eventually("a COMMIT is lost", || way.has_lost_it());
        assert_all_is_settled(&world, orders.len());
        let duplicates = engine.metric("onceward_events_total", &[("outcome", "duplicate")]);
        let expected = if committed { f64::from(PARTITIONS - 1) } else { 0.0 };
        assert_eq!(duplicates, expected, "they were found to be there");
    }
}

/// Killed at each step of the second transaction, which the partitions share.
#[test]
fn a_death_at_any_step_leaves_nothing_undone() {
    use CrashPoint::{BeforeCommit, Claimed, Committed, Confirmed, Decoded, Fenced, PaymentsWritten};
    at_each([Decoded, Fenced, Claimed, PaymentsWritten, BeforeCommit, Committed, Confirmed], |point| {
        let world = World::with_partitions(PARTITIONS);
        let orders = one_for_each();
        let armed = format!("{}:kill:2", point.as_str());
        let mut doomed = engine(&world).environment("ONCEWARD_CRASH_POINTS", &armed).start();
        send_at_once(&world, &doomed, &orders);
        eventually("it dies at its point", || doomed.exit_now().is_some());
        assert_eq!(doomed.wait().signal(), Some(9), "{}", doomed.log());
        let shared_by_all = if matches!(point, Committed | Confirmed) { i64::from(PARTITIONS) } else { 1 };
        eventually_equal("what is settled", shared_by_all, || world.database.count(PAID));
        let engine = engine(&world).start();
        assert_all_is_settled(&world, orders.len());
        assert!(engine.terminate().success());
    });
}

#[test]
fn an_owner_that_is_frozen_in_one_is_given_up_and_settles_nothing_when_it_thaws() {
    use CrashPoint::{BeforeCommit, Claimed, Fenced};
    at_each([Fenced, Claimed, BeforeCommit], |point| {
        let world = World::with_partitions(PARTITIONS);
        let orders = one_for_each();
        let armed = format!("{}:freeze:2", point.as_str());
        let mut frozen = engine(&world).environment("ONCEWARD_CRASH_POINTS", &armed).start();
        send_at_once(&world, &frozen, &orders);
        eventually("it is frozen at its point", || frozen.is_frozen());
        let next = engine(&world).start();
        assert_all_is_settled(&world, orders.len());
        frozen.signal(Signal::Continue);
        let more = one_for_each();
        world.topic.send(messages(&more));
        assert_all_is_settled(&world, orders.len() + more.len());
        frozen.kill();
        assert!(next.terminate().success());
    });
}

/// Side by side: most of the time is waiting for a dead member's session to end.
fn at_each<const N: usize>(points: [CrashPoint; N], test: impl Fn(CrashPoint) + Sync) {
    thread::scope(|scope| {
        for point in points {
            let test = &test;
            scope.spawn(move || {
                println!("{}", point.as_str());
                test(point);
            });
        }
    });
}
