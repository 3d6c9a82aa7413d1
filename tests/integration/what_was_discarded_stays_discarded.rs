//! A group is reset and reads everything again: what was applied is a duplicate, and what a person gave up must stay given up, or a
//! replay for another reason would charge for it after all. A claim says so where there is one; where there is none the row does.

use std::time::{SystemTime, UNIX_EPOCH};

use onceward::lab::provider_stub::{Act, Rule};

use crate::support::{Order, World, assert_charged_once, eventually_equal};

const HELD: &str = "SELECT source_offset || ' ' || reason || ' ' || state FROM held_event ORDER BY id";

#[test]
fn after_a_reset_a_discarded_event_is_not_applied_with_a_claim_or_without_also_by_an_owner_who_cannot_see_the_reset() {
    let world = World::with_partitions(1);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_millis();
    let ahead = u64::try_from(now).expect("this century") + 30_000;
    let in_future =
        |last: u8| Order { event_id: uuid::Builder::from_unix_timestamp_millis(ahead, &[last; 10]).into_uuid(), ..Order::new() };
    let (given_up, looked_at) = (in_future(1), in_future(2));
    let (rejected, good) = (Order::new(), Order::some(3));
    world.provider.script([Rule::for_order(rejected.order_id, Act::status(422))]);
    let strict = world.engine().set("retention.future_skew_ms", 1_000);
    let engine = strict.start();
    world.topic.send([&good[0], &given_up, &rejected, &looked_at].map(|order| order.message().partition(0)));
    let parked = ["1 future parked", "2 rejected parked", "3 future parked"].map(str::to_owned).to_vec();
    eventually_equal("parked", parked, || world.database.column(HELD));
    for offset in [1, 2] {
        let id = world.database.text(&format!("SELECT id FROM held_event WHERE source_offset = {offset}"));
        assert!(world.onceward(&["held", "discard", &id, "--because", "a test order"]).status.success());
    }
    let decided = ["1 future discarded", "2 rejected discarded", "3 future parked"].map(str::to_owned).to_vec();
    eventually_equal("discarded", decided.clone(), || world.database.column(HELD));
    world.topic.send([good[1].message().partition(0)]);
    eventually_equal("settled", 0, || world.topic.lag(&world.group));
    assert!(engine.terminate().success());

    // All of it again, by an engine to which those ids are not of the future.
    world.provider.clear_script();
    world.topic.reset_to_the_beginning(&world.group);
    // What an owner leaves that has settled the first record again and dies: from here on it does not look like a reset any more.
    world.database.execute("UPDATE consumed_partition SET next_offset = 1, last_record_digest = NULL");
    let _engine = world.engine().start();
    world.topic.send([good[2].message().partition(0)]);
    eventually_equal("settled", 0, || world.topic.lag(&world.group));
    assert_charged_once(&world.provider, [&good[0], &good[1], &good[2], &looked_at]);
    assert_eq!(world.database.column(HELD), decided);
}
