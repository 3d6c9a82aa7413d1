//! (in the making)
use crate::support::{Order, World, eventually_equal};

#[test]
fn it_runs() {
    let world = World::new();
    let orders = Order::some(1000);
    world.topic.send(orders.iter().map(Order::message));
    world.topic.send(orders.iter().take(100).map(Order::message));
    let engine = world.engine().start();
    eventually_equal("claims", 1000, || world.database.count("SELECT count(*) FROM processed_event"));
    eventually_equal("lag", 0, || world.topic.lag(&world.group));
    println!("{}", engine.status());
    println!("{}", engine.log());
    let code = engine.terminate();
    assert!(code.success(), "{code}");
}
