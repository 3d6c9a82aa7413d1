//! When days are forgotten: at the test's word and not before.

use super::{Engine, EngineBuilder, World, eventually};

/// The lock that whoever cleans holds.
pub const CLEANERS_LOCK: &str = "SELECT pg_advisory_xact_lock(7957702, 3)";

/// Starts an engine that does not clean: the one run of its start finds somebody else at work, and the next would come in a day.
pub fn start_without_cleaning(world: &World, engine: EngineBuilder) -> Engine {
    let somebody = world.database.session();
    somebody.rows(&format!("BEGIN; {CLEANERS_LOCK}"));
    let engine = engine.start();
    eventually("the run of its start is over", || engine.log().contains("another cleaner is at work"));
    somebody.rows("COMMIT");
    engine
}
