//! Thousands of histories, each drawn from a seed: the engine's machines without I/O (window, offset ledger, start, batch, retry) on a
//! Kafka, a database and a provider that are a few maps. Records come, come again, come with holes; processes crash, freeze and believe
//! that they own what is another's; answers to COMMIT and to charges are lost; the clock jumps; the group is moved back.
//!
//! A failure is: a record below a frontier or a committed offset that is not settled; a post without a durable attempt, or for an event
//! that is paid; a frontier that its owner cannot have written; in the end, an event that is neither paid nor held. No failure is: a
//! record that is read again, a batch that runs again, a partition that waits.
//!
//! A history that fails tells its seed; `ONCEWARD_SIMULATION_SEED` runs that one alone. A seed that has failed once becomes a test below.

mod draw;
mod history;
mod process;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};

use history::History;

/// Histories of one run of the tests.
const HISTORIES: u64 = 2_000;
/// With `scripts/test --long`.
const HISTORIES_LONG: u64 = 100_000;
/// Steps of one history, before everything may come to rest.
const STEPS: usize = 300;

#[test]
fn whatever_happens_nothing_is_lost_nothing_is_doubled_and_no_position_passes_open_work() {
    if let Ok(seed) = std::env::var("ONCEWARD_SIMULATION_SEED") {
        return History::new(seed.parse().expect("a number")).run(STEPS);
    }
    let long = std::env::var_os("ONCEWARD_TEST_LONG").is_some();
    let mut seen = history::Seen::default();
    for seed in 0..if long { HISTORIES_LONG } else { HISTORIES } {
        let mut history = History::new(seed);
        if catch_unwind(AssertUnwindSafe(|| history.run(STEPS))).is_err() {
            panic!("the history of seed {seed} fails; its last steps:\n{}", history.last_steps());
        }
        seen.add(history.seen());
    }
    // A simulation that meets nothing proves nothing.
    seen.assert_everything_was_met();
}

#[test]
fn the_same_seed_is_the_same_history() {
    let story = |seed| {
        let mut history = History::new(seed);
        history.run(STEPS);
        history.last_steps()
    };
    assert_eq!(story(7), story(7));
    assert_ne!(story(7), story(8));
}
