//! A user's own test of a user's own handler: nothing here but `onceward::testing` and the example.

use std::env;
use std::process::Command;

use onceward::event::{Currency, Money, OrderConfirmed, OrderConfirmedBuilder};
use onceward::testing::{CrashPoint, World, kill_at};

#[path = "../../examples/ledger.rs"]
#[expect(dead_code, reason = "the example's own main")]
mod ledger;

const TABLES: &str = include_str!("../../examples/ledger.sql");

fn orders(count: i64) -> Vec<OrderConfirmed> {
    let (builder, euro) = (OrderConfirmedBuilder::new(), Currency::from_code("EUR").expect("a currency"));
    let now = onceward::chrono::Utc::now();
    (1..=count).map(|id| builder.build(now, id, 7, Money::from_minor_units(150, euro)).expect("a good order")).collect()
}

fn record(order: &OrderConfirmed) -> (String, String) {
    (order.order_id.to_string(), order.to_json())
}

#[test]
fn a_ledger_books_each_order_once_in_this_process_and_in_one_that_is_killed() {
    let mut world = World::new(TABLES);
    world.set("pipeline.batch_max", "16");
    let orders = orders(150);
    let (first, second) = orders.split_at(50);

    let engine = world.run(ledger::Ledger);
    world.send(first.iter().chain(first).map(record));
    world.wait_until_settled();
    engine.stop();

    let program =
        || Command::new(env::current_exe().expect("a file").ancestors().nth(2).expect("a folder").join("examples/ledger"));
    let mut one_that_dies = program();
    one_that_dies.envs([kill_at(CrashPoint::BeforeCommit, 2)]);
    let engine = world.spawn(one_that_dies);
    world.send(second.iter().chain(first).map(record));
    engine.wait_until_killed();
    let engine = world.spawn(program());
    world.wait_until_settled();
    engine.stop();

    world.assert_each_once(orders.iter().map(|order| order.event_id), "SELECT event_id FROM ledger_entry");
    assert_eq!(world.rows("SELECT minor_units FROM ledger_balance"), [[Some("22500".to_owned())]]);
}
