//! When days are forgotten: at the test's word and not before.

use super::{Engine, EngineBuilder, World, eventually};

/// The lock that whoever cleans holds.
pub const CLEANERS_LOCK: &str = "SELECT pg_advisory_xact_lock(7957702, 3)";

/// Starts an engine that does not clean: the one run of its start finds somebody else at work, and the next would come in a day.
pub fn start_without_cleaning(world: &World, engine: EngineBuilder) -> Engine {
    let somebody = world.database.session();
    somebody.rows(&format!("BEGIN; {CLEANERS_LOCK}"));
    let engine = engine.start();
    // One that could not even ask tries again, but not before ten minutes are over.
    let over = ["another cleaner is at work", "the cleaner cannot go on"];
    eventually("the run of its start is over", || over.iter().any(|words| engine.log().contains(words)));
    somebody.rows("COMMIT");
    engine
}
