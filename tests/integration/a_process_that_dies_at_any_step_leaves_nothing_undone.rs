//! Between any two steps of a batch the power can fail. Which half is done differs from step to step; what must be true afterwards does
//! not: each order is charged once and has one row, no attempt is left open, and the offset has passed. R-KFK-IDEM-3, R-KFK-IDEM-4,
//! R-KFK-CONS-X1.
//!
//! A test of each step, killed there twice, and one that is frozen there while another process goes on. `--long`: twenty times each,
//! and a hundred SIGTERMs and SIGKILLs at moments drawn by chance.

use std::os::unix::process::ExitStatusExt as _;
use std::time::{Duration, Instant};

use onceward::crash::CrashPoint;
use onceward::event::id::{day_of, first_id_of_day};
use onceward::lab::process::Signal;
use onceward::lab::provider_stub::{Act, Rule};
use uuid::Uuid;

use crate::support::{Engine, EngineBuilder, Order, World, assert_the_books_agree, eventually, eventually_equal, times};

/// Signal numbers, as the kernel reports them.
const KILLED: i32 = 9;

macro_rules! steps {
    ($(fn $killed:ident(), fn $frozen:ident(): $point:ident;)*) => {
        $(
            #[test]
            fn $killed() {
                killed_at(CrashPoint::$point);
            }

            #[test]
            fn $frozen() {
                frozen_at(CrashPoint::$point);
            }
        )*

        /// The points that have tests here.
        const TESTED: &[CrashPoint] = &[$(CrashPoint::$point),*];
    };
}

steps! {
    fn killed_after_the_epoch_was_taken(), fn frozen_after_the_epoch_was_taken(): Bumped;
    fn killed_after_the_attempts_of_the_past_became_rows(), fn frozen_after_the_attempts_of_the_past_became_rows(): LeftoversConverted;
    fn killed_after_a_hand_over(), fn frozen_after_a_hand_over(): HandedOn;
    fn killed_after_records_joined_the_window(), fn frozen_after_records_joined_the_window(): Windowed;
    fn killed_after_decoding(), fn frozen_after_decoding(): Decoded;
    fn killed_after_a_day_was_made(), fn frozen_after_a_day_was_made(): DayMade;
    fn killed_after_the_fence(), fn frozen_after_the_fence(): Fenced;
    fn killed_after_the_claim(), fn frozen_after_the_claim(): Claimed;
    fn killed_after_a_key_was_taken(), fn frozen_after_a_key_was_taken(): KeyTaken;
    fn killed_after_due_events_were_locked(), fn frozen_after_due_events_were_locked(): DueLocked;
    fn killed_after_the_attempts_were_durable(), fn frozen_after_the_attempts_were_durable(): AttemptsOpened;
    fn killed_after_an_answer(), fn frozen_after_an_answer(): Answered;
    fn killed_after_the_payments_were_written(), fn frozen_after_the_payments_were_written(): PaymentsWritten;
    fn killed_after_the_attempts_were_settled(), fn frozen_after_the_attempts_were_settled(): AttemptsSettled;
    fn killed_after_the_held_rows_were_written(), fn frozen_after_the_held_rows_were_written(): HeldWritten;
    fn killed_before_commit(), fn frozen_before_commit(): BeforeCommit;
    fn killed_after_commit(), fn frozen_after_commit(): Committed;
    fn killed_after_the_confirmation(), fn frozen_after_the_confirmation(): Confirmed;
    fn killed_after_kafka_has_the_offset(), fn frozen_after_kafka_has_the_offset(): OffsetsCommitted;
}

#[test]
fn every_crash_point_of_a_batch_has_a_test() {
    /// Only a relay, an operator's request, an audit and the cleaner pass these; their own tests arm them.
    const ELSEWHERE: [CrashPoint; 7] = [
        CrashPoint::Relayed,
        CrashPoint::RequestRead,
        CrashPoint::RunKept,
        CrashPoint::FloorRaised,
        CrashPoint::DayDetached,
        CrashPoint::DayDropped,
        CrashPoint::ClaimsDeleted,
    ];
    let untested: Vec<_> = CrashPoint::ALL.iter().filter(|point| !TESTED.contains(point) && !ELSEWHERE.contains(point)).collect();
    assert!(untested.is_empty(), "{untested:?}");
}

/// A world in which every step is taken: a third of the charges are made and not answered, so that events are held and due again.
struct Scene {
    world: World,
    orders: Vec<Order>,
    /// What is sent has been sent before too, in batches that take everything for new.
    repeats: bool,
}

impl Scene {
    fn new(point: Option<CrashPoint>) -> Self {
        let world = World::with_partitions(2);
        let lie = |act, seed| Rule::for_share(170, seed, act);
        world.provider.script([lie(Act::Close { charge: true, reset: true }, 1), lie(Act::status(500), 2)]);
        Self { world, orders: Vec::new(), repeats: point == Some(CrashPoint::KeyTaken) }
    }

    /// Limits as short as they go, so that a killed member is soon given up.
    fn engine(&self) -> EngineBuilder {
        let limits: [(&str, i64); 13] = [
            ("kafka.session_timeout_ms", 2_500),
            ("database.connect_timeout_ms", 500),
            ("database.lock_timeout_ms", 400),
            ("database.statement_timeout_ms", 800),
            ("database.idle_in_transaction_timeout_ms", 1_500),
            ("database.transaction_budget_ms", 3_000),
            ("provider.call_timeout_ms", 600),
            ("provider.effect_deadline_ms", 1_200),
            ("retry.backoff_min_ms", 50),
            ("retry.backoff_max_ms", 200),
            ("retention.retention_ms", 40 * 86_400_000),
            ("pipeline.batch_max", 4),
            ("provider.max_in_flight", 4),
        ];
        let engine = limits.into_iter().fold(self.world.engine(), |engine, (key, value)| engine.set(key, value));
        if self.repeats { engine.environment("ONCEWARD_CLAIM_FORM", "optimistic") } else { engine }
    }

    fn armed(&self, point: CrashPoint, action: &str, passage: u32) -> Engine {
        self.engine().environment("ONCEWARD_CRASH_POINTS", &format!("{}:{action}:{passage}", point.as_str())).launch()
    }

    fn send(&mut self, orders: Vec<Order>) {
        self.world.topic.send(orders.iter().map(Order::message));
        self.orders.extend(orders);
    }

    /// Orders keep coming until the engine has met its point, so that it is met in the middle of work.
    fn send_until(&mut self, what: &str, mut met: impl FnMut() -> bool) {
        eventually(what, || {
            self.send(vec![Order::new()]);
            if self.repeats {
                self.world.topic.send([self.orders[0].message()]);
            }
            met()
        });
    }

    fn assert_nothing_is_undone(&self) {
        let orders = i64::try_from(self.orders.len()).expect("few");
        eventually_equal("each order is paid", orders, || self.world.database.count("SELECT count(*) FROM payment"));
        assert_the_books_agree(&self.world, &self.world.provider, &self.orders);
        assert_eq!(self.world.provider.calls().bodies_changed, 0, "each post of a key has the same bytes");
        let open = "SELECT count(*) FROM held_event WHERE state <> 'applied'";
        assert_eq!(self.world.database.count(open), 0, "what was held is applied");
    }
}

fn killed_at(point: CrashPoint) {
    let mut scene = Scene::new(Some(point));
    for round in 0..times(2, 20) {
        if matches!(point, CrashPoint::Bumped | CrashPoint::LeftoversConverted) {
            // So that there is something to convert.
            let mut before = scene.armed(CrashPoint::Answered, "kill", 2);
            scene.send_until("an engine died in the middle of its calls", || before.exit_now().is_some());
        }
        if point == CrashPoint::DayMade {
            scene.send(vec![of_another_day(round)]);
        }
        let mut engine = scene.armed(point, "kill", passage(point, round));
        scene.send_until("it is killed at its point", || engine.exit_now().is_some());
        let status = engine.wait();
        assert_eq!(status.signal(), Some(KILLED), "{status}: {}", engine.log());
    }
    let engine = scene.engine().start();
    scene.assert_nothing_is_undone();
    assert!(engine.terminate().success());
}

fn frozen_at(point: CrashPoint) {
    let mut scene = Scene::new(Some(point));
    for round in 0..times(1, 20) {
        if point == CrashPoint::DayMade {
            scene.send(vec![of_another_day(round)]);
        }
        let mut frozen = scene.armed(point, "freeze", passage(point, round));
        scene.send_until("it is frozen at its point", || {
            assert_eq!(frozen.exit_now(), None, "it ended instead");
            frozen.is_frozen()
        });
        let next = scene.engine().start();
        let owned = || next.status()["partitions"].as_array().expect("a list").len();
        eventually_equal("another has taken over", 2, owned);
        scene.send(Order::some(4));
        eventually_equal("and has settled everything", 0, || scene.world.topic.lag(&scene.world.group));
        frozen.signal(Signal::Continue);
        // Thawed, it finds out and goes on as a member like any other, or has a reason to end.
        scene.send(Order::some(4));
        scene.assert_nothing_is_undone();
        frozen.kill();
        assert!(next.terminate().success());
    }
}

/// At which passage of the point: the first and the second in turn, where there is a second in every run.
fn passage(point: CrashPoint, round: usize) -> u32 {
    match point {
        CrashPoint::DayMade => 1,
        _ if round.is_multiple_of(2) => 1,
        _ => 2,
    }
}

/// An order whose id is of a day that nobody has made yet.
fn of_another_day(round: usize) -> Order {
    let back = 1 + i64::try_from(round).expect("few");
    let first = first_id_of_day(day_of(Uuid::now_v7()) - back).as_u128();
    Order { event_id: Uuid::from_u128(first | u128::from(Uuid::now_v7().as_u128() as u32)), ..Order::new() }
}

#[test]
fn sigterm_at_any_moment_ends_in_order_and_leaves_nothing_undone() {
    let mut scene = Scene::new(None);
    for round in 0..times(2, 100) {
        let engine = scene.engine().start();
        scene.work_for(moment(round));
        let ended = engine.terminate();
        assert!(ended.success(), "{ended}");
    }
    let _last = scene.engine().start();
    scene.assert_nothing_is_undone();
}

#[test]
fn sigkill_at_any_moment_leaves_nothing_undone() {
    let mut scene = Scene::new(None);
    for round in 0..times(2, 100) {
        let engine = scene.engine().start();
        scene.work_for(moment(round));
        engine.kill();
    }
    let _last = scene.engine().start();
    scene.assert_nothing_is_undone();
}

impl Scene {
    fn work_for(&mut self, time: Duration) {
        let end = Instant::now() + time;
        self.send_until("the moment has come", || Instant::now() >= end);
    }
}

/// Moments spread over the first second of work.
fn moment(round: usize) -> Duration {
    Duration::from_millis((u64::try_from(round).expect("few") * 617 + 130) % 1_000)
}
