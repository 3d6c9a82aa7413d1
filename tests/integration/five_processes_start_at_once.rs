//! A deployment starts all its processes in the same second on a database that has no table yet. Five migrations that run into each
//! other leave half a schema; a process that gives up instead of waiting takes the rollout down.

use std::collections::BTreeSet;
use std::thread;

use crate::support::{Engine, Order, World, assert_charged_once, eventually, eventually_equal};

#[test]
fn five_processes_that_migrate_at_once_all_succeed_and_one_of_them_does_it() {
    let world = World::without_tables(1);
    let said: Vec<String> = thread::scope(|scope| {
        let running: Vec<_> = (0..5).map(|_| scope.spawn(|| world.onceward(&["migrate"]))).collect();
        let ended = running.into_iter().map(|running| running.join().expect("it runs"));
        let said = ended.map(|output| {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            String::from_utf8(output.stdout).expect("text")
        });
        said.collect()
    });
    assert_eq!(said.iter().filter(|said| said.starts_with("applied ")).count(), 1, "{said:?}");
    assert_eq!(said.iter().filter(|said| *said == "the schema is current\n").count(), 4, "{said:?}");
    let again = world.onceward(&["migrate"]);
    assert_eq!(String::from_utf8_lossy(&again.stdout), "the schema is current\n");
}

#[test]
fn five_services_that_start_at_once_on_an_empty_database_share_the_work() {
    let world = World::without_tables(5);
    let stub = &world.provider;
    let orders = Order::some(250);
    world.topic.send(orders.iter().map(Order::message));
    let mut engines: Vec<Engine> = (0..5).map(|_| world.engine().launch()).collect();
    for engine in &mut engines {
        eventually("it is ready", || {
            assert_eq!(engine.exit_now(), None, "it ended instead of becoming ready");
            engine.is_ready()
        });
    }
    let owned = |engine: &Engine| {
        let partitions = engine.status()["partitions"].as_array().expect("partitions").clone();
        partitions.iter().map(|partition| partition["partition"].as_i64().expect("a number")).collect::<Vec<_>>()
    };
    eventually("each has one partition", || {
        let owned: Vec<Vec<i64>> = engines.iter().map(owned).collect();
        owned.iter().all(|owned| owned.len() == 1) && owned.concat().into_iter().collect::<BTreeSet<_>>().len() == 5
    });
    eventually_equal("all is committed", 0, || world.topic.lag(&world.group));
    assert_eq!(world.database.count("SELECT count(*) FROM retention"), 1, "one floor");
    assert_eq!(world.database.count("SELECT count(*) FROM payment"), 250);
    assert_charged_once(stub, &orders);
}
