//! Members of a group with a name of their own, members by the broker's own protocol, members that Kafka has thrown out. What goes wrong
//! with them in other systems is silence: a client that is beyond repair polls on for ever and gets nothing, a lost member commits over
//! the next one, one process without a database stops the rebalance of all.

use std::thread;
use std::time::{Duration, Instant};

use onceward::lab::process::Signal;

use crate::support::{Engine, EngineBuilder, Order, Proxy, World, assert_the_books_agree, eventually, eventually_equal};

fn named(world: &World, name: &str) -> EngineBuilder {
    world.engine().set("kafka.instance_id", format!("{}-{name}", world.group))
}

fn assigns(engine: &Engine) -> f64 {
    engine.metric("onceward_rebalances_total", &[("kind", "assign")])
}

// CASES B19
#[test]
fn a_named_member_that_is_killed_has_its_partitions_back_at_once_and_nobody_else_stops() {
    let world = World::with_partitions(4);
    let killed = named(&world, "a").start();
    let stays = named(&world, "b").start();
    eventually("each has its half", || killed.owned().len() == 2 && stays.owned().len() == 2);
    let (its, rebalances) = (killed.owned(), assigns(&stays));

    killed.kill();
    let orders = Order::some(40);
    world.topic.send(orders.iter().map(Order::message));
    let again = named(&world, "a").start();
    eventually_equal("it has the same partitions", its, || again.owned());
    assert_the_books_agree(&world, &world.provider, &orders);
    assert_eq!(assigns(&stays), rebalances, "the other one has noticed nothing");
    assert!(again.terminate().success() && stays.terminate().success());
}

// CASES B19
#[test]
fn of_two_processes_under_one_name_the_older_one_ends() {
    let world = World::with_partitions(2);
    let mut older = named(&world, "one").start();
    let orders = Order::some(20);
    world.topic.send(orders.iter().map(Order::message));
    let newer = named(&world, "one").start();
    let status = older.wait();
    assert_eq!(status.code(), Some(1));
    assert!(older.log().contains("FencedInstanceId"), "{}", older.log());
    let later = Order::some(20);
    world.topic.send(later.iter().map(Order::message));
    assert_the_books_agree(&world, &world.provider, orders.iter().chain(&later));
    assert!(newer.terminate().success());
}

// CASES B01
#[test]
fn a_member_that_was_thrown_out_for_not_polling_comes_back_by_itself() {
    is_thrown_out_and_comes_back("cooperative-sticky");
}

// CASES B01, B02
#[test]
fn so_does_a_member_by_the_brokers_own_protocol() {
    is_thrown_out_and_comes_back("broker");
}

fn is_thrown_out_and_comes_back(assignor: &str) {
    let world = World::with_partitions(2);
    let hangs = world.engine().assignor(assignor).set("kafka.max_poll_interval_ms", 6_500);
    let engine = hangs.environment("ONCEWARD_CRASH_POINTS", "handed_on:hang").start();
    let orders = Order::some(20);
    world.topic.send(orders.iter().map(Order::message));
    eventually("it is thrown out", || engine.metric("onceward_rebalances_total", &[("kind", "lost")]) >= 1.0);
    let later = Order::some(20);
    world.topic.send(later.iter().map(Order::message));
    assert_the_books_agree(&world, &world.provider, orders.iter().chain(&later));
    assert!(engine.is_ready() && engine.terminate().success());
}

// CASES B04, I05
#[test]
fn a_member_whose_session_has_ended_commits_nothing() {
    let world = World::with_partitions(1);
    let rarely = [("kafka.commit_interval_ms", 11_500), ("kafka.session_timeout_ms", 12_000)];
    let mut frozen = rarely.into_iter().fold(world.engine(), |engine, (key, value)| engine.set(key, value)).start();
    let orders = Order::some(10);
    world.topic.send(orders.iter().map(Order::message));
    eventually_equal("they are settled", 10, || world.database.count("SELECT count(*) FROM payment"));
    frozen.signal(Signal::Stop);
    let commits = |engine: &Engine| engine.metric("onceward_offset_commits_total", &[("result", "ok")]);

    let next = world.engine().start();
    eventually("the next one has the partition", || next.owned().len() == 1);
    let more = Order::some(10);
    world.topic.send(more.iter().map(Order::message));
    assert_the_books_agree(&world, &world.provider, orders.iter().chain(&more));
    frozen.signal(Signal::Continue);
    eventually("the thawed one knows that it has lost it", || frozen.owned().is_empty());
    let last = Order::some(10);
    world.topic.send(last.iter().map(Order::message));
    assert_the_books_agree(&world, &world.provider, orders.iter().chain(&more).chain(&last));
    assert_eq!(commits(&frozen), 0.0, "what it had settled was not its to commit any more");
    assert!(frozen.terminate().success() && next.terminate().success());
}

#[test]
fn a_partition_whose_row_is_held_by_somebody_holds_up_only_itself() {
    let world = World::with_partitions(2);
    let first = world.engine().start();
    eventually_equal("it has both", 2, || first.owned().len());
    assert!(first.terminate().success());
    let holder = world.database.session();
    holder.rows("BEGIN; SELECT FROM consumed_partition WHERE partition = 0 FOR UPDATE");

    let engine = world.engine().launch();
    let (waits, goes) = (Order::new(), Order::new());
    world.topic.send([waits.message().partition(0), goes.message().partition(1)]);
    eventually_equal("partition 1 works", vec![goes.event_id.to_string()], || {
        world.database.column("SELECT event_id FROM payment")
    });
    assert_eq!(engine.owned().into_iter().collect::<Vec<_>>(), [1]);
    holder.rows("COMMIT");
    assert_the_books_agree(&world, &world.provider, [&waits, &goes]);
    eventually("ready", || engine.is_ready());
    assert!(engine.terminate().success());
}

// CASES B05, I15
#[test]
fn a_member_without_a_database_does_not_hold_up_the_rebalance_of_the_others() {
    let world = World::with_partitions(4);
    let leaves = world.engine().start();
    let proxy = Proxy::before(&world.database);
    let cut_off = world.engine().set("database.url", proxy.url()).start();
    eventually("each has its half", || leaves.owned().len() == 2 && cut_off.owned().len() == 2);
    proxy.refuse();
    let assigns_before = assigns(&cut_off);
    assert!(leaves.terminate().success());
    eventually("it is asked to take the other half", || assigns(&cut_off) > assigns_before);

    let began = Instant::now();
    let healthy = world.engine().start();
    eventually("the newcomer has partitions", || !healthy.owned().is_empty());
    assert!(began.elapsed() < Duration::from_secs(15), "before anybody was thrown out: {:?}", began.elapsed());
    assert_eq!(cut_off.get("/live").map(|(code, _)| code), Some(200));
    let orders = Order::some(40);
    world.topic.send(orders.iter().map(Order::message));
    proxy.open();
    assert_the_books_agree(&world, &world.provider, &orders);
    eventually_equal("they share", 4, || cut_off.owned().len() + healthy.owned().len());
    assert!(cut_off.terminate().success() && healthy.terminate().success());
}

// CASES A10, B18
#[test]
fn four_members_that_come_and_go_at_once_settle_down() {
    let world = World::with_partitions(8);
    let orders = Order::some(80);
    world.topic.send(orders.iter().map(Order::message));
    let engines: Vec<Engine> = thread::scope(|scope| {
        let starting: Vec<_> = (0..4).map(|_| scope.spawn(|| world.engine().start())).collect();
        starting.into_iter().map(|engine| engine.join().expect("it starts")).collect()
    });
    eventually("each has two", || engines.iter().all(|engine| engine.owned().len() == 2));
    assert_the_books_agree(&world, &world.provider, &orders);
    thread::scope(|scope| {
        for engine in engines {
            scope.spawn(|| assert!(engine.terminate().success()));
        }
    });
}
