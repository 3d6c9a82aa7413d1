//! All partitions share one queue of the Kafka client and one budget of memory. A partition that cannot move must not take the memory of
//! all the others with it, and none may take more than there is.

use crate::support::{Order, Proxy, World, assert_the_books_agree, eventually, eventually_equal, times};

// CASES A02, B12, I12
#[test]
fn the_others_are_read_and_applied_while_one_partitions_row_is_locked() {
    let world = World::with_partitions(3);
    let small = || world.engine().without_provider().set("pipeline.buffer_bytes", 1 << 20);
    let engine = small().start();
    let holder = world.database.session();
    holder.rows("BEGIN; SELECT FROM consumed_partition WHERE partition = 0 FOR UPDATE");

    // Four times what the buffer holds, for the one that cannot move.
    let stuck = Order::some(12_000);
    world.topic.send(stuck.iter().map(|order| order.message().partition(0)));
    let others = Order::some(2_000);
    world.topic.send(others.iter().zip(0..).map(|(order, n)| order.message().partition(1 + n % 2)));
    eventually_equal("the others are applied", 2_000, || world.database.count("SELECT count(*) FROM payment"));
    assert_eq!(world.database.count("SELECT count(*) FROM processed_event WHERE source_offset IS NOT NULL"), 2_000);
    assert!(engine.log().contains("these partitions do not move"), "it was paused");
    assert!(engine.is_live(), "the database is what is waited for");

    // It moves away while it is paused, and comes back.
    let second = small().start();
    let assigned = || second.metric("onceward_rebalanced_partitions_total", &[("kind", "assign")]);
    eventually("it is assigned one", || assigned() >= 1.0);
    assert!(second.terminate().success());
    holder.rows("COMMIT");
    eventually_equal("every record is settled and committed", 0, || world.topic.lag(&world.group));
    assert_eq!(world.database.count("SELECT count(*) FROM payment"), 14_000);
    assert!(engine.terminate().success());
}

#[test]
fn claims_that_a_trigger_swallows_stop_their_partition_and_are_never_taken_for_duplicates() {
    let world = World::with_partitions(2);
    let (swallowed, other) = (Order::new(), Order::new());
    // It comes after the start, which would have refused it.
    let engine = world.engine().start();
    world.database.execute(&format!(
        "CREATE FUNCTION swallow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
         CREATE TRIGGER swallow BEFORE INSERT ON processed_event
         FOR EACH ROW WHEN (NEW.event_id = '{}') EXECUTE FUNCTION swallow()",
        swallowed.event_id
    ));
    world.topic.send([swallowed.message().partition(0), other.message().partition(1)]);
    let stopped = || engine.status()["partitions"][0]["stopped"].as_str().map(str::to_owned);
    let reason = eventually("its partition stops", stopped);
    assert!(reason.contains("neither inserted nor found"), "{reason}");
    eventually("readiness names it", || {
        engine.get("/ready").is_some_and(|(code, body)| code == 503 && body.contains("stopped: 0"))
    });
    eventually_equal("the other goes on", 1, || world.database.count("SELECT count(*) FROM payment"));
    assert_eq!(world.database.count("SELECT count(*) FROM consumed_partition WHERE partition = 0 AND next_offset > 0"), 0);
    assert!(engine.terminate().success());

    world.database.execute("DROP TRIGGER swallow ON processed_event");
    let _repaired = world.engine().start();
    assert_the_books_agree(&world, &world.provider, [&swallowed, &other]);
}

// CASES F08, B17
#[test]
fn a_record_larger_than_a_fetch_gets_through() {
    let world = World::with_partitions(1);
    let order = Order::new();
    let json = order.json();
    let large = format!("{},\"note\":\"{}\"}}", json.trim_end_matches('}'), "x".repeat(900_000));
    let next = Order::new();
    world.topic.send([crate::support::Message::new(large), next.message()]);
    let engine = world.engine().start();
    assert_the_books_agree(&world, &world.provider, [&order, &next]);
    assert!(engine.terminate().success());
}

// CASES B17
#[test]
fn memory_stays_bounded_while_the_database_is_silent_and_the_backlog_is_long() {
    let (records, allowed_kib) = if times(0, 1) == 1 { (1_000_000, 48 << 10) } else { (100_000, 96 << 10) };
    let world = World::with_partitions(64);
    let proxy = Proxy::before(&world.database);
    let engine = world.engine().without_provider().set("database.url", proxy.url()).start();
    eventually_equal("it has all partitions", 64, || engine.owned().len());
    proxy.fall_silent();
    let produced = world.onceward(&["produce", "--count", &records.to_string()]);
    assert!(produced.status.success(), "{}", String::from_utf8_lossy(&produced.stderr));
    let held = || engine.metric("onceward_window_bytes", &[]);
    eventually("the buffer is full and everything is paused", || {
        held() > f64::from(8 << 20) && engine.log().contains("these partitions do not move")
    });
    assert!(engine.is_live(), "{:?}", engine.get("/live"));
    proxy.open();
    eventually("it goes on by itself", || world.database.count("SELECT count(*) FROM payment") > 10_000);
    let most = engine.most_memory_kib();
    assert!(most < allowed_kib, "{most} KiB");
    assert!(engine.terminate().success());
}
