//! During a rolling upgrade the older version runs on the schema that the newer one has brought up to date: migrations only add. For this
//! version the next schema is made up: a column more in every table, an index, a migration that it does not know. And what another version has
//! digested in another form is no other content.

use crate::support::{Order, World, assert_the_books_agree, eventually, eventually_equal};

/// Every table of ours has something that this version has never heard of.
const NEXT_SCHEMA: &str = "DO $$ DECLARE name text; BEGIN
    FOR name IN SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p') AND NOT relispartition
                                               AND relname <> '__diesel_schema_migrations' LOOP
        EXECUTE format('ALTER TABLE %I ADD COLUMN added_later text NOT NULL DEFAULT ''later''', name);
    END LOOP;
    CREATE INDEX added_later ON payment (customer_id);
    INSERT INTO __diesel_schema_migrations (version) VALUES ('99991231000000');
END $$";

#[test]
fn two_processes_share_partitions_on_a_schema_that_is_ahead_of_them_and_charge_once() {
    let world = World::with_partitions(4);
    world.database.execute(NEXT_SCHEMA);
    let tables = "SELECT count(*) FROM pg_attribute WHERE attname = 'added_later'";
    assert!(world.database.count(tables) >= 8, "the schema is ahead");

    let first = world.engine().start();
    let orders = Order::some(60);
    world.topic.send(orders[..20].iter().map(Order::message));
    assert_the_books_agree(&world, &world.provider, &orders[..20]);
    let second = world.engine().start();
    let assigned = || second.metric("onceward_rebalanced_partitions_total", &[("kind", "assign")]);
    eventually("the second one has partitions", || assigned() >= 1.0);
    world.topic.send(orders[20..40].iter().map(Order::message));
    assert_the_books_agree(&world, &world.provider, &orders[..40]);
    assert!(first.terminate().success());
    world.topic.send(orders[40..].iter().map(Order::message));
    assert_the_books_agree(&world, &world.provider, &orders);
    assert_eq!(world.provider.calls().posts, 60);
    assert_eq!(world.database.count("SELECT count(*) FROM __diesel_schema_migrations WHERE version = '99991231000000'"), 1);
}

/// The low byte of a digest is the version of its form (`EventDigest`).
#[test]
fn a_claim_that_another_version_has_digested_makes_a_repeat_and_no_conflict() {
    let world = World::with_partitions(1);
    let engine = world.engine().start();
    let orders = Order::some(20);
    world.topic.send(orders.iter().map(Order::message));
    assert_the_books_agree(&world, &world.provider, &orders);
    world.database.execute("UPDATE processed_event SET event_digest = ((~event_digest) & (~255)) | 254");
    world.topic.send(orders.iter().map(Order::message));
    eventually("all are repeats", || engine.metric("onceward_events_total", &[("outcome", "duplicate")]) == 20.0);
    eventually_equal("settled", 0, || world.topic.lag(&world.group));
    assert_eq!(world.database.count("SELECT count(*) FROM held_event"), 0);

    // The same form and another content is a conflict, or the test would show nothing.
    world.database.execute("UPDATE processed_event SET event_digest = (event_digest & (~255)) | 1");
    let version = "SELECT count(*) FROM processed_event WHERE event_digest & 255 = 1";
    assert_eq!(world.database.count(version), 20);
    world.topic.send(orders.iter().map(Order::message));
    eventually_equal("all are conflicts", 20, || world.database.count("SELECT count(*) FROM held_event WHERE reason = 'conflict'"));
}
