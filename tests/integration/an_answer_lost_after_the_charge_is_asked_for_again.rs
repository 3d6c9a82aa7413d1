//! The money has moved and we do not know it: no answer, a broken connection, half an answer, or an error that the provider repeats for
//! ever. To post with a new key is a second charge; to give up is a lost row. The same key brings the stored answer, and where it never
//! comes, a person decides. R-KFK-IDEM-4.

use onceward::lab::provider_stub::{Act, Rule};

use crate::support::{Order, World, assert_charged_once, assert_the_books_agree, eventually_equal, stub};

// CASES G07, G09, G10
#[test]
fn silence_reset_close_half_an_answer_html_and_drops_all_end_as_one_charge_and_one_row() {
    let acts = [
        Act::Silence { charge: true },
        Act::Close { charge: true, reset: true },
        Act::Close { charge: true, reset: false },
        Act::HalfAnswer,
        Act::html(),
        Act::Drip { ms: 20 },
    ];
    let (world, stub) = (World::new(), stub());
    let orders = Order::some(acts.len());
    stub.script(orders.iter().zip(acts).map(|(order, act)| Rule::for_order(order.order_id, act).times(1)));
    world.topic.send(orders.iter().map(Order::message));
    let _engine = world.engine().provider(&stub.url()).start();
    eventually_equal("every answer has come at last", 6, || world.database.count("SELECT count(*) FROM payment"));
    assert_the_books_agree(&world, &stub, &orders);
    assert_eq!(world.database.column("SELECT DISTINCT attempts FROM payment"), ["2"]);
    assert_eq!((stub.calls().posts, stub.calls().bodies_changed), (12, 0));
    assert_eq!(world.database.column("SELECT DISTINCT reason || ' ' || state FROM held_event"), ["unknown applied"]);
}

// CASES G02
#[test]
fn a_failure_that_the_provider_replays_for_ever_is_parked_as_unknown_and_never_posted_under_another_key() {
    let (world, stub) = (World::with_partitions(1), stub());
    let (order, good) = (Order::new(), Order::new());
    stub.script([Rule::for_order(order.order_id, Act::stored_failure())]);
    world.topic.send([order.message(), good.message()]);
    let engine = world.engine().provider(&stub.url()).set("retry.max_attempts", 3).start();
    eventually_equal("a person must decide", vec!["unknown parked 3".to_owned()], || {
        world.database.column("SELECT reason || ' ' || state || ' ' || attempts FROM held_event")
    });
    eventually_equal("the partition has moved on", 0, || world.topic.lag(&world.group));
    assert!(engine.terminate().success());
    assert_charged_once(&stub, [&order, &good]);
    let asked = stub.journal().into_iter().filter(|key| *key == order.event_id.to_string()).count();
    assert_eq!((asked, stub.calls().posts), (3, 4));
    assert_eq!(world.database.column("SELECT event_id FROM payment"), [good.event_id.to_string()]);
    let kept = "SELECT event_id || ' ' || unknown_answers FROM payment_attempt";
    assert_eq!(world.database.column(kept), [format!("{} 3", order.event_id)], "an unknown outcome is never \"not charged\"");
}
