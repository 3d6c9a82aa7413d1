//! Between "away" and "well" a database has many ways to fail a statement: backends die, two transactions wait for each other, a lock or a
//! statement takes too long, the disk is full, somebody changes a table. Each of them rolls a batch back after its charges were made, and
//! none of them may cost a second charge, an event, or a person's time where waiting is enough. R-KFK-IDEM-3.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use onceward::lab::postgres::Options;
use onceward::lab::process::{self, Signal, TempFolder};
use onceward::lab::provider_stub::{Act, Rule};

use crate::support::{Database, Engine, Order, World, assert_the_books_agree, eventually, eventually_equal};

const PAID: &str = "SELECT count(*) FROM payment";

fn send(world: &World, orders: &[Order]) {
    world.topic.send(orders.iter().map(Order::message));
}

fn number(orders: &[Order]) -> i64 {
    i64::try_from(orders.len()).expect("few")
}

/// Everything is paid, once, and nobody was asked twice: the answers outlive a transaction that is rolled back.
fn assert_it_cost_nothing(world: &World, orders: &[Order]) {
    eventually_equal("everything is paid", number(orders), || world.database.count(PAID));
    assert_the_books_agree(world, &world.provider, orders);
    assert_eq!(world.provider.calls().posts, orders.len() as u64, "nobody was asked twice");
}

// CASES D07
#[test]
fn every_backend_is_killed_again_and_again() {
    let world = World::with_partitions(2);
    let engine = world.engine().set("pipeline.batch_max", 8).start();
    let mut orders = Vec::new();
    for round in 1..=5 {
        world.provider.script([Rule::once(Act::Hold)]);
        let more = Order::some(20);
        send(&world, &more);
        orders.extend(more);
        eventually("a call is open inside a transaction", || world.provider.calls().held == 1);
        let killed = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                      WHERE datname = current_database() AND application_name = 'onceward'";
        assert!(!world.database.column(killed).is_empty());
        world.provider.release();
        eventually_equal(&format!("paid in round {round}"), number(&orders), || world.database.count(PAID));
    }
    assert_it_cost_nothing(&world, &orders);
    assert!(engine.terminate().success());
}

#[test]
fn the_server_is_restarted_and_crashes_while_calls_are_open() {
    let (mut server, world) = World::with_a_server(&Options { fsync: false, ..Options::default() }, 2);
    let engine = world.engine().start();
    let mut orders = Vec::new();
    for crash in [false, true] {
        world.provider.script([Rule::once(Act::Hold)]);
        let more = Order::some(20);
        send(&world, &more);
        orders.extend(more);
        eventually("a call is open inside a transaction", || world.provider.calls().held == 1);
        if crash { server.crash() } else { server.stop() }.expect("it goes down");
        world.provider.release();
        server.start_again().expect("it comes up");
        eventually_equal("everything is paid", number(&orders), || world.database.count(PAID));
    }
    assert_it_cost_nothing(&world, &orders);
    assert!(engine.terminate().success());
}

// CASES E04
#[test]
fn of_two_transactions_that_wait_for_each_other_ours_is_the_one_that_is_rolled_back() {
    let world = World::with_partitions(1);
    let order = Order::new();
    world.provider.script([Rule::once(Act::Hold)]);
    let engine = world.engine().patient().patient_with_locks().start();
    send(&world, std::slice::from_ref(&order));
    eventually("the ownership row is locked, and a call is open", || world.provider.calls().held == 1);

    let (outsider, waits) = (world.database.session(), world.database.session());
    outsider.rows("BEGIN");
    let backend = outsider.backend();
    outsider.rows(&format!(
        "INSERT INTO payment (event_id, order_id, customer_id, amount, currency, status, attempts)
         VALUES ('{}', 1, 1, 1, 'EUR', 'charged', 1)",
        order.event_id
    ));
    std::thread::scope(|scope| {
        let blocked = scope.spawn(|| outsider.rows("UPDATE consumed_partition SET updated_at = now(); ROLLBACK"));
        // The server looks once per wait: whoever has waited for the batch itself for more than a second is not the one that finds the circle.
        eventually("the other one has waited for its lock long enough to be past its own look", || {
            let waited = format!(
                "SELECT count(*) FROM pg_locks WHERE pid = {backend} AND NOT granted AND locktype = 'transactionid'
                     AND waitstart < clock_timestamp() - interval '1.3 s'"
            );
            waits.rows(&waited) == [[Some("1".to_owned())]]
        });
        world.provider.release();
        blocked.join().expect("the other one gets its lock");
    });
    assert_it_cost_nothing(&world, std::slice::from_ref(&order));
    assert!(engine.log().contains("40P01"), "there was a deadlock, and it was ours: {}", engine.log());
    assert!(engine.terminate().success());
}

#[test]
fn a_lock_that_is_not_had_in_time_is_asked_for_again() {
    let world = World::with_partitions(1);
    let orders = Order::some(3);
    let engine = world.engine().start();
    let outsider = world.database.session();
    outsider.rows("BEGIN");
    outsider.rows(&format!(
        "INSERT INTO processed_event (event_id, consumer_group) VALUES ('{}', '{}')",
        orders[1].event_id, world.group
    ));
    send(&world, &orders);
    eventually("the claim has waited in vain", || engine.log().contains("55P03"));
    assert!(engine.is_live());
    let asked = world.provider.journal().contains(&orders[1].event_id.to_string());
    assert!(!asked, "nobody is called without the claim");
    outsider.rows("ROLLBACK");
    assert_it_cost_nothing(&world, &orders);
    assert!(engine.terminate().success());
}

#[test]
fn a_statement_that_takes_too_long_after_the_charge_is_run_again() {
    let world = World::with_partitions(1);
    let orders = Order::some(3);
    world.database.execute(
        "CREATE TABLE slow (n int);
         INSERT INTO slow VALUES (1);
         CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS
             $$ BEGIN IF EXISTS (SELECT FROM slow) THEN PERFORM pg_sleep(30); END IF; RETURN NEW; END $$;
         CREATE TRIGGER slow BEFORE INSERT ON payment FOR EACH ROW EXECUTE FUNCTION slow()",
    );
    let engine = world.engine().start();
    send(&world, &orders);
    eventually("the statement was ended by the server", || engine.log().contains("57014"));
    assert_eq!(world.database.count(PAID), 0);
    assert!(engine.is_live());
    world.database.execute("DELETE FROM slow");
    assert_it_cost_nothing(&world, &orders);
    assert!(engine.terminate().success());
}

#[test]
fn a_column_that_is_added_under_load_is_not_noticed() {
    let world = World::with_partitions(2);
    let engine = world.engine().set("pipeline.batch_max", 8).start();
    let mut orders = Order::some(50);
    send(&world, &orders);
    eventually("statements are prepared", || world.database.count(PAID) > 0);
    for change in [
        "ALTER TABLE payment ADD COLUMN note text",
        "ALTER TABLE processed_event ADD COLUMN note text",
        "ALTER TABLE consumed_partition ADD COLUMN note text",
        "ALTER TABLE attempt_batch ADD COLUMN note text",
        "CREATE INDEX payment_order ON payment (order_id)",
    ] {
        world.database.execute(change);
        let more = Order::some(20);
        send(&world, &more);
        orders.extend(more);
    }
    eventually_equal("everything is paid", number(&orders), || world.database.count(PAID));
    eventually_equal("every offset is committed", 0, || world.topic.lag(&world.group));
    assert!(engine.is_ready());
    assert!(engine.terminate().success());
}

#[test]
fn a_column_that_is_gone_stops_the_partition_visibly_and_back_again_it_goes_on_without_a_second_charge() {
    let world = World::with_partitions(1);
    let engine = world.engine().start();
    let mut orders = Order::some(3);
    send(&world, &orders);
    eventually_equal("paid", 3, || world.database.count(PAID));
    world.database.execute("ALTER TABLE payment RENAME COLUMN currency TO coin");
    let more = Order::some(3);
    send(&world, &more);
    orders.extend(more);
    let red = eventually("readiness is red", || engine.get("/ready").filter(|(status, _)| *status == 503));
    assert!(red.1.contains("stopped: 0"), "{}", red.1);
    assert!(engine.is_live(), "a restart would help nobody");
    let stopped = engine.status()["partitions"][0]["stopped"].to_string();
    assert!(stopped.contains("42703"), "{stopped}");
    assert!(engine.terminate().success());

    world.database.execute("ALTER TABLE payment RENAME COLUMN coin TO currency");
    let _engine = world.engine().start();
    eventually_equal("everything is paid", 6, || world.database.count(PAID));
    assert_the_books_agree(&world, &world.provider, &orders);
}

/// A small file system in memory, if we may mount one; gone when dropped.
struct SmallDisk(TempFolder);

impl SmallDisk {
    fn mount() -> Option<Self> {
        let folder = TempFolder::new("disk").expect("a folder");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", "size=120m,mode=777", "tmpfs"]).arg(folder.path()).stderr(Stdio::null());
        mount.status().is_ok_and(|status| status.success()).then_some(Self(folder))
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// Takes what is free, all but so many bytes.
    fn fill(&self, leave: u64) {
        let (block, file) = (vec![0_u8; 1 << 16], self.path().join("filler"));
        let mut written = 0;
        let mut filler = fs::File::create(&file).expect("a file");
        while std::io::Write::write_all(&mut filler, &block).is_ok() {
            written += block.len() as u64;
        }
        filler.set_len(written.saturating_sub(leave)).expect("a shorter file");
    }

    fn free(&self) {
        fs::remove_file(self.path().join("filler")).expect("the filler is there");
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(self.path()).status();
    }
}

#[test]
fn a_full_disk_is_waited_for() {
    let Some(disk) = SmallDisk::mount() else {
        return eprintln!("not root, or no right to mount: there is no small disk to fill");
    };
    let options = Options {
        fsync: false,
        data: Some(disk.path().join("data")),
        settings: vec![("wal_recycle".to_owned(), "off".to_owned()), ("max_wal_size".to_owned(), "32MB".to_owned())],
        ..Options::default()
    };
    let (mut server, world) = World::with_a_server(&options, 1);
    let engine = world.engine().start();
    let mut orders = Order::some(20);
    send(&world, &orders);
    eventually_equal("paid", 20, || world.database.count(PAID));

    disk.fill(0);
    let before = engine.log().len();
    let full = || engine.log()[before..].contains("53100") || !world.database.answers();
    eventually("the disk is full for the engine too", || {
        let more = Order::some(100);
        send(&world, &more);
        orders.extend(more);
        full()
    });
    assert!(engine.is_live());
    disk.free();
    // A server that could not write its log has ended; whoever frees the disk starts it again.
    if !world.database.answers() {
        server.stop().expect("it is down");
        server.start_again().expect("it comes up");
    }
    eventually_equal("everything is paid", number(&orders), || world.database.count(PAID));
    assert_the_books_agree(&world, &world.provider, &orders);
    assert!(engine.terminate().success());
    drop(server);
    drop(disk);
}

/// A pooler before a database, if one is installed.
struct Pooler {
    child: Child,
    _folder: TempFolder,
    url: String,
}

impl Pooler {
    fn before(database: &Database) -> Option<Self> {
        let places = [std::env::var("ONCEWARD_TEST_PGBOUNCER").unwrap_or_default(), "/usr/sbin/pgbouncer".to_owned()];
        let program = places.into_iter().find(|place| Path::new(place).is_file())?;
        let folder = TempFolder::new("pooler").expect("a folder");
        let url = url::Url::parse(database.url()).expect("a URL");
        let (port, name) = (process::free_port().expect("a port"), url.path().trim_start_matches('/').to_owned());
        let settings = format!(
            "[databases]
{name} = host=127.0.0.1 port={} user={} password={}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = session
ignore_startup_parameters = extra_float_digits
",
            url.port().expect("a port"),
            url.username(),
            url.password().unwrap_or_default()
        );
        let file = folder.path().join("pgbouncer.ini");
        fs::write(&file, settings).expect("a file");
        let mut command = Command::new(program);
        // It refuses to be root, and takes another name before it reads anything.
        let (own, user) = (fs::metadata("/proc/self").expect("ourselves"), "nobody");
        if std::os::unix::fs::MetadataExt::uid(&own) == 0 {
            command.args(["-u", user]);
            for place in [folder.path(), &file] {
                fs::set_permissions(place, std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("it is ours");
            }
        }
        command.arg(&file).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = process::spawn(command, Signal::Kill).expect("the pooler starts");
        let url = format!("postgres://{}:any@127.0.0.1:{port}/{name}", url.username());
        let pooler = Self { child, _folder: folder, url };
        eventually("the pooler answers", || Database::at(pooler.url.clone()).answers());
        Some(pooler)
    }
}

impl Drop for Pooler {
    fn drop(&mut self) {
        let _ = process::end(&mut self.child, Signal::Kill, Duration::from_secs(5)); // gone or never to go
    }
}

#[test]
fn a_pooler_of_sessions_may_stand_between() {
    let world = World::with_partitions(2);
    let Some(pooler) = Pooler::before(&world.database) else {
        return eprintln!("there is no /usr/sbin/pgbouncer and no ONCEWARD_TEST_PGBOUNCER");
    };
    let orders = Order::some(100);
    let engine: Engine = world.engine().set("database.url", pooler.url.as_str()).set("pipeline.batch_max", 8).start();
    send(&world, &orders);
    assert_it_cost_nothing(&world, &orders);
    let again = Order::some(20);
    // What it has pooled dies, and it says so in its own words.
    world.database.column(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()",
    );
    send(&world, &again);
    assert_it_cost_nothing(&world, &[&orders[..], &again].concat());
    assert!(engine.terminate().success());
}
