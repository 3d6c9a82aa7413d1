//! The chapter of the database: what it is set to, and what its tables are made like.

use onceward::lab::postgres;

use super::{Break, Checked, assert_run_refuses, check, engine, good, good_in};
use crate::support::{Database, EngineBuilder, Order, World, unique_name};

/// One world is enough: its database is put back after each.
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
            says: "partitioned by RANGE (processed_at), which",
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
        // Its key is right, and still no day is in it.
        Break {
            condition: "dedup_key",
            says: "partitioned by HASH (event_id), whose parts are no days",
            how: |world, engine| {
                world.database.execute(
                    "DROP TABLE processed_event;
                     CREATE TABLE processed_event (
                         event_id uuid NOT NULL, consumer_group text NOT NULL, processed_at timestamptz NOT NULL DEFAULT now(),
                         event_digest bigint, source_id integer, source_offset bigint, PRIMARY KEY (event_id, consumer_group)
                     ) PARTITION BY HASH (event_id);
                     CREATE TABLE even PARTITION OF processed_event FOR VALUES WITH (MODULUS 2, REMAINDER 0);
                     CREATE TABLE odd PARTITION OF processed_event FOR VALUES WITH (MODULUS 2, REMAINDER 1)",
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
fn a_column_that_takes_no_claim_is_named() {
    assert_each_is_named_in_the_database(&[
        Break {
            condition: "claim_columns",
            says: "ALTER TABLE processed_event ALTER tenant DROP NOT NULL",
            how: |world, engine| {
                world.database.execute(
                    "ALTER TABLE processed_event ADD tenant text NOT NULL DEFAULT 'the only one';
                     ALTER TABLE processed_event ALTER tenant DROP DEFAULT",
                );
                engine
            },
        },
        Break {
            condition: "claim_columns",
            says: "ALTER TABLE processed_event ALTER processed_at TYPE timestamptz USING processed_at AT TIME ZONE 'UTC'",
            how: |world, engine| {
                world.database.execute("ALTER TABLE processed_event ALTER processed_at TYPE timestamp");
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
