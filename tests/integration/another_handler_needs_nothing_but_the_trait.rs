//! One topic, two businesses: billing, and a second one that is nothing but a type in this file. A claim that forgot its group would
//! let the first group swallow the events of the other; a trait that is not enough would force the second one into the engine.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use diesel::sql_types::{BigInt, Uuid as SqlUuid};
use onceward::app;
use onceward::config::Config;
use onceward::event::{self, OrderConfirmed};
use onceward::handler::{BatchContext, Claimed, Handler, Outcome, Rejection};
use onceward::record::Record;
use onceward::store::{DbError, Session};
use tokio::sync::oneshot;

use crate::support::{Order, World, assert_charged_once, eventually, eventually_equal};

/// Notes that a customer is to be told of an order: no provider, no amounts, a table of its own.
#[derive(Default)]
struct Notifications {
    /// Orders whose note cannot be written yet.
    refused: Arc<Mutex<HashSet<i64>>>,
    /// Orders over which the program stumbles.
    panics: HashSet<i64>,
    /// Partitions may share a transaction.
    shares: bool,
    /// Events of how many partitions it was given, each time that it stumbled.
    stumbled_among: Arc<Mutex<Vec<usize>>>,
}

impl Handler for Notifications {
    type Event = OrderConfirmed;
    type Answer = ();

    fn decode(&self, record: &Record) -> Result<OrderConfirmed, Rejection> {
        event::decode(record.payload.as_deref())
    }

    async fn apply(
        &self,
        tx: &mut Session,
        _: &BatchContext<()>,
        events: &[Claimed<OrderConfirmed>],
    ) -> Result<Vec<Outcome>, DbError> {
        use diesel_async::RunQueryDsl as _;
        let mut outcomes = Vec::new();
        for event in events.iter().map(Claimed::event) {
            if self.panics.contains(&event.order_id) {
                let partitions: HashSet<i32> = events.iter().map(Claimed::partition).collect();
                self.stumbled_among.lock().expect("nobody panics with it").push(partitions.len());
                panic!("stumbled over order {}", event.order_id);
            }
            if self.refused.lock().expect("nobody panics").contains(&event.order_id) {
                outcomes.push(Outcome::Retry { error: "not yet".to_owned(), wait: None });
                continue;
            }
            let note = diesel::sql_query("INSERT INTO notification (event_id, order_id) VALUES ($1, $2)");
            let note = note.bind::<SqlUuid, _>(event.event_id).bind::<BigInt, _>(event.order_id);
            note.execute(&mut **tx).await.map_err(|error| tx.db_error("notify", error))?;
            outcomes.push(Outcome::Applied);
        }
        Ok(outcomes)
    }

    fn shares_transactions(&self) -> bool {
        self.shares
    }
}

/// No key: should the engine apply an event twice, both rows stand here.
const TABLE: &str = "CREATE TABLE notification (event_id uuid NOT NULL, order_id bigint NOT NULL)";

/// An engine inside this process, with a handler of the test's own.
struct Inside {
    stop: oneshot::Sender<()>,
    thread: JoinHandle<anyhow::Result<()>>,
}

impl Inside {
    fn start(config: Config, handler: impl Handler) -> Self {
        let (stop, stopped) = oneshot::channel();
        let thread = thread::spawn(move || {
            actix::System::new().block_on(app::serve(config, |_| handler, async {
                let _ = stopped.await;
            }))
        });
        Self { stop, thread }
    }

    fn stop(self) -> anyhow::Result<()> {
        let _ = self.stop.send(());
        self.thread.join().expect("it does not panic")
    }
}

// R-KFK-IDEM-2, R-KFK-IDEM-3
#[test]
fn billing_and_a_log_of_notifications_each_apply_every_event_once() {
    let world = World::new();
    let stub = &world.provider;
    world.database.execute(TABLE);
    let orders = Order::some(200);
    world.topic.send(orders.iter().map(Order::message));
    world.topic.send(orders.iter().step_by(4).map(|order| order.message().partition(2)));

    let notifying = format!("{}-notifications", world.group);
    let billing = world.engine().start();
    let config = world.engine().set("kafka.group", notifying.as_str()).set("admin.listen", "127.0.0.1:0").load();
    let inside = Inside::start(config, Notifications::default());
    for group in [&world.group, &notifying] {
        eventually_equal("the group has caught up", 0, || world.topic.lag(group));
    }

    let each_once = "SELECT count(*), count(DISTINCT event_id) FROM";
    let row = |rows: Vec<Vec<Option<String>>>| rows.concat().into_iter().flatten().collect::<Vec<_>>();
    assert_eq!(row(world.database.rows(&format!("{each_once} notification"))), ["200", "200"]);
    assert_eq!(row(world.database.rows(&format!("{each_once} payment"))), ["200", "200"]);
    assert_charged_once(stub, &orders);
    let claims = "SELECT count(*) FROM processed_event GROUP BY consumer_group";
    assert_eq!(world.database.column(claims), ["200", "200"], "one claim per event and group");

    inside.stop().expect("it ends in order");
    assert!(billing.terminate().success());
}

#[test]
fn an_event_that_a_handler_wants_to_be_tried_again_is_held_tried_again_and_applied_once() {
    let world = World::with_partitions(1);
    world.database.execute(TABLE);
    let orders = Order::some(10);
    let refused = Arc::new(Mutex::new(HashSet::from([orders[0].order_id])));
    world.topic.send(orders.iter().map(|order| order.message().partition(0)));
    let config = world.engine().set("admin.listen", "127.0.0.1:0").load();
    let inside = Inside::start(config, Notifications { refused: Arc::clone(&refused), ..Notifications::default() });
    let notified = || world.database.count("SELECT count(*) FROM notification");
    eventually_equal("the others are applied", 9, notified);
    eventually_equal("the frontier moves on", 0, || world.topic.lag(&world.group));
    let held = "SELECT reason || ' ' || state || ' ' || source_offset || ' ' || owns_claim FROM held_event";
    assert_eq!(world.database.column(held), ["retryable retrying 0 true"]);
    eventually("it is tried again", || world.database.count("SELECT attempts FROM held_event") >= 2);

    refused.lock().expect("nobody panics").clear();
    eventually_equal("it is applied", 10, notified);
    assert_eq!(world.database.column("SELECT state FROM held_event"), ["applied"]);
    assert_eq!(world.database.count("SELECT count(DISTINCT event_id) FROM notification"), 10);
    inside.stop().expect("it ends in order");
}

// CASES C01
#[test]
fn an_event_over_which_the_handler_panics_is_held_and_the_others_of_its_batch_are_applied() {
    let world = World::with_partitions(1);
    world.database.execute(TABLE);
    let orders = Order::some(40);
    world.topic.send(orders.iter().map(|order| order.message().partition(0)));
    let config = world.engine().set("admin.listen", "127.0.0.1:0").load();
    let panics = [5, 20, 21].map(|place: usize| orders[place].order_id).into();
    let inside = Inside::start(config, Notifications { panics, ..Notifications::default() });
    eventually_equal("the frontier has passed all", 0, || world.topic.lag(&world.group));
    let held = "SELECT source_offset || ' ' || reason || ' ' || state || ' ' || owns_claim FROM held_event ORDER BY source_offset";
    assert_eq!(world.database.column(held), [5, 20, 21].map(|offset| format!("{offset} refused parked true")));
    assert_eq!(world.database.count("SELECT count(DISTINCT event_id) FROM notification"), 37);
    assert_eq!(world.database.count("SELECT count(*) FROM notification"), 37);
    inside.stop().expect("it ends in order");
}

// CASES C01
#[test]
fn a_handler_that_stumbles_in_a_transaction_that_partitions_share_costs_only_its_own_event() {
    const PARTITIONS: i32 = 8;
    let world = World::with_partitions(PARTITIONS);
    world.database.execute(TABLE);
    let admin = format!("127.0.0.1:{}", onceward::lab::process::free_port().expect("a free port"));
    let config = world.engine().concurrency(1).patient_with_locks().set("admin.listen", admin.as_str()).load();
    let orders = Order::some(2 * PARTITIONS as usize);
    let (first, second) = orders.split_at(PARTITIONS as usize);
    let stumbled_among = Arc::default();
    let panics = HashSet::from([second[5].order_id]);
    let handler = Notifications { panics, shares: true, stumbled_among: Arc::clone(&stumbled_among), ..Notifications::default() };
    let inside = Inside::start(config, handler);
    let send =
        |orders: &[Order], from| world.topic.send(orders.iter().zip(from..).map(|(order, at)| order.message().partition(at)));
    // A partition's first batch names the key; what comes then goes in plainly, and together.
    send(first, 0);
    eventually_equal("the first are applied", 0, || world.topic.lag(&world.group));

    let lock = world.database.session();
    lock.rows("BEGIN; LOCK TABLE notification IN EXCLUSIVE MODE");
    send(&second[..1], 0);
    eventually_equal("the first partition waits for us", 1, || world.database.waiting_for("notification"));
    send(&second[1..], 1);
    let read = || {
        let (_, metrics) = crate::support::get(&admin, "/metrics").unwrap_or_default();
        let windows = metrics.lines().filter(|line| line.starts_with("onceward_window_records{"));
        windows.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum::<f64>()
    };
    eventually_equal("the others wait for it", f64::from(PARTITIONS), read);
    lock.rows("COMMIT");
    eventually_equal("the frontiers have passed all", 0, || world.topic.lag(&world.group));
    let held = "SELECT partition || ' ' || reason || ' ' || state FROM held_event JOIN consumed_partition AS p ON p.id = source_id";
    assert_eq!(world.database.column(held), ["5 refused parked"]);
    let notified = "SELECT count(*) || ' ' || count(DISTINCT event_id) FROM notification";
    assert_eq!(world.database.column(notified), ["15 15"]);
    let stumbled: Vec<usize> = stumbled_among.lock().expect("nobody panics with it").clone();
    assert!(stumbled.iter().any(|partitions| *partitions > 1), "it has stumbled among others: {stumbled:?}");
    inside.stop().expect("it ends in order");
}

/// A handler with a fault: it never comes back.
struct NeverEnds;

impl Handler for NeverEnds {
    type Event = OrderConfirmed;
    type Answer = ();

    fn decode(&self, record: &Record) -> Result<OrderConfirmed, Rejection> {
        event::decode(record.payload.as_deref())
    }

    async fn apply(&self, _: &mut Session, _: &BatchContext<()>, _: &[Claimed<OrderConfirmed>]) -> Result<Vec<Outcome>, DbError> {
        std::future::pending().await
    }
}

// CASES H07, A02
#[test]
fn a_handler_that_never_ends_turns_the_liveness_probe_red_and_its_partition_is_named() {
    let world = World::with_partitions(2);
    let admin = format!("127.0.0.1:{}", onceward::lab::process::free_port().expect("a free port"));
    let config = world.engine().set("admin.listen", admin.as_str()).load();
    let inside = Inside::start(config, NeverEnds);
    world.topic.send([Order::new().message().partition(1)]);
    let live = || crate::support::get(&admin, "/live");
    eventually("it is live at first", || live().is_some_and(|(code, _)| code == 200));
    let (_, words) = eventually("the probe is red", || live().filter(|(code, _)| *code == 503));
    assert!(
        words.starts_with("partition 1 has records to settle and has settled none for ") && words.lines().count() == 1,
        "{words}"
    );
    inside.stop().expect("it does not wait for the handler");
}
