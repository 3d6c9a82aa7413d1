//! A provider that is down, or that refuses our credentials, answers every event in the same way. Without a breaker each of them spends
//! an attempt on it, and an hour later thousands wait for a person. With one that never closes, or that one bad event holds open, nothing
//! is ever charged again. R-KFK-IDEM-4.

use onceward::lab::provider_stub::{Act, ProviderStub, Rule};

use crate::support::{Engine, Order, World, assert_charged_once, assert_the_books_agree, eventually, eventually_equal, stub};

/// Why the provider is not called, as `/status` tells.
fn paused(engine: &Engine) -> Option<String> {
    engine.status()["paused"].as_str().map(str::to_owned)
}

fn posts_of(stub: &ProviderStub, order: &Order) -> usize {
    let key = order.event_id.to_string();
    stub.journal().into_iter().filter(|posted| *posted == key).count()
}

#[test]
fn while_the_provider_is_down_only_probes_call_it_and_it_goes_on_by_itself() {
    let (world, stub) = (World::new(), stub());
    let orders = Order::some(200);
    stub.script([Rule::always(Act::status(500))]);
    world.topic.send(orders.iter().map(Order::message));
    // Those that are on their way when it opens fail too.
    let engine = world.engine().provider(&stub.url()).set("provider.max_in_flight", 4).set("retry.max_attempts", 1000).start();
    let reason = eventually("the status says why", || paused(&engine));
    assert!(reason.contains("HTTP 500"), "{reason}");
    assert_eq!(engine.metric("onceward_breaker_open", &[]), 1.0);
    eventually("a partition says so too", || engine.status()["partitions"].to_string().contains("HTTP 500"));
    eventually("and readiness, after a while", || {
        engine.get("/ready").is_some_and(|(code, body)| code == 503 && body.contains("provider: "))
    });
    assert!(engine.is_live(), "a restart would help nobody");
    let spent = "SELECT (SELECT count(*) FROM held_event), (SELECT count(*) FROM processed_event)";
    let [held, claims] = &world.database.rows(spent)[0][..] else { panic!("two counts") };
    assert_eq!(held, claims, "nobody's claim is taken who was not called for");
    let posts = stub.calls().posts;
    assert!(posts < 30, "{posts} posts: ten failures, those on their way, and a probe now and then");
    assert!(held.as_ref().is_some_and(|held| held.parse::<u64>().is_ok_and(|held| held <= posts)), "{held:?} of {posts}");

    stub.clear_script();
    assert_the_books_agree(&world, &stub, &orders);
    eventually_equal("closed", (0.0, None), || (engine.metric("onceward_breaker_open", &[]), paused(&engine)));
    eventually("ready again", || engine.is_ready());
    assert_eq!(engine.metric("onceward_breaker_openings_total", &[]), 1.0);
    assert!(world.database.count("SELECT count(*) FROM payment WHERE attempts = 1") >= 170);
}

#[test]
fn wrong_credentials_open_it_with_that_reason_and_spend_no_attempt() {
    let (world, stub) = (World::with_partitions(2), stub());
    let orders = Order::some(50);
    stub.script([Rule::always(Act::busy(401, "1"))]);
    world.topic.send(orders.iter().map(Order::message));
    let engine = world.engine().provider(&stub.url()).set("provider.max_in_flight", 2).start();
    let reason = eventually("the status says why", || paused(&engine));
    assert!(reason.starts_with("configuration: HTTP 401"), "{reason}");
    let first = stub.calls().posts;
    eventually("it probes", || stub.calls().posts > first + 2);
    assert_eq!(world.database.count("SELECT count(*) FROM held_event"), 0);
    assert_eq!(world.database.count("SELECT count(*) FROM payment"), 0);
    stub.clear_script();
    assert_the_books_agree(&world, &stub, &orders);
    assert_eq!(world.database.column("SELECT DISTINCT attempts FROM payment"), ["1"]);
}

#[test]
fn one_event_that_alone_is_refused_is_held_and_the_others_flow() {
    let (world, stub) = (World::with_partitions(1), stub());
    let (forbidden, moved, others) = (Order::new(), Order::new(), Order::some(40));
    stub.script([Rule::for_order(forbidden.order_id, Act::busy(403, "1")), Rule::for_order(moved.order_id, Act::redirect())]);
    world.topic.send([&forbidden, &moved].into_iter().chain(&others).map(|order| order.message().partition(0)));
    // One at a time: those that are on their way when an event is refused prove nothing.
    let engine = world.engine().provider(&stub.url()).set("retry.max_attempts", 2).set("provider.max_in_flight", 1).start();
    eventually_equal("the frontier has passed all", 0, || world.topic.lag(&world.group));
    assert_charged_once(&stub, &others);
    let held = || {
        let mut held = world.database.column("SELECT event_id || ' ' || reason || ' ' || state FROM held_event");
        held.sort();
        held
    };
    let mut expected = [format!("{} rejected parked", forbidden.event_id), format!("{} unknown parked", moved.event_id)];
    expected.sort();
    eventually_equal("each for what it was told", expected.to_vec(), held);
    assert!(posts_of(&stub, &forbidden) <= 4, "{}", posts_of(&stub, &forbidden));
    assert_eq!(stub.calls().look_ups, 0, "no redirect is followed");
    // What a refused event costs is over: new ones are served at once.
    let more = Order::some(20);
    world.topic.send(more.iter().map(|order| order.message().partition(0)));
    eventually_equal("paid", 60, || world.database.count("SELECT count(*) FROM payment"));
    assert!(engine.terminate().success());
}
