//! The sweeper: deletes the claims of a plain table that nobody needs any more.
//!
//! In: what everybody allows. Out: how many claims are gone. It owns nothing; the cleaner that calls it is alone. If it dies here, the next
//! run begins again, and what is gone is gone for good.
//!
//! Invariant: nothing goes before every transaction is over that may have read a lower floor. Such a one could still claim an id whose
//! claim has just been deleted.

use std::time::{Duration, Instant};

use crate::crash::CrashPoint;
use crate::store::old_claims::{self, Forgettable, Place};
use crate::store::{DbError, Session};

/// What lets old claims be found.
pub const CREATE_INDEX: &str =
    "CREATE INDEX CONCURRENTLY ix_processed_event_processed_at ON processed_event (processed_at, event_id, consumer_group)";
/// Claims in one transaction: few, because whoever waits for one of its rows waits for all of them.
const STEP: i64 = 5_000;
/// The shortest rest between two of them. Each rests as long as it took, so that half of one core is left to the hot path.
const REST: Duration = Duration::from_millis(20);
/// How long others' transactions are waited for. A batch is over in seconds; a bulk load of somebody else is not.
const OTHERS: Duration = Duration::from_secs(600);
/// The longest sweep, well within a run of the cleaner; the next one goes on.
const SWEEP: Duration = Duration::from_secs(1_800);
/// How often it is looked whether they are over.
const LOOK: Duration = Duration::from_millis(100);

/// Deletes what may go. Out: how many claims that were.
///
/// # Errors
/// The table cannot be walked through, somebody writes for too long, or a statement failed; what is gone stays gone.
pub async fn sweep(s: &mut Session, may_go: &Forgettable) -> Result<u64, DbError> {
    if !old_claims::plain_table(s).await?.indexed {
        return Err(DbError::program(
            "sweep",
            format_args!("no index of processed_event begins with processed_at, so old claims cannot be found: {CREATE_INDEX}"),
        ));
    }
    wait_for_writers(s).await?;
    let (mut place, mut deleted, until) = (Place::default(), 0, Instant::now() + SWEEP);
    loop {
        let started = Instant::now();
        let step = old_claims::step(s, &mut place, may_go, STEP).await?;
        if step.gone > 0 {
            CrashPoint::ClaimsDeleted.passed();
        }
        deleted += u64::try_from(step.gone).unwrap_or_default();
        if step.seen < STEP || Instant::now() >= until {
            return Ok(deleted);
        }
        actix::clock::sleep(started.elapsed().max(REST)).await;
    }
}

/// The floor may have been raised by a run that died, so this waits also when it was not raised now.
async fn wait_for_writers(s: &mut Session) -> Result<(), DbError> {
    let (next, until) = (old_claims::next_writer(s).await?, Instant::now() + OTHERS);
    while !old_claims::writers_are_over(s, next).await? {
        if Instant::now() >= until {
            return Err(DbError::program(
                "sweep",
                "a transaction that writes is open for ten minutes (pg_stat_activity.backend_xid, pg_prepared_xacts): \
                 it may have read a lower floor, so nothing is deleted",
            ));
        }
        actix::clock::sleep(LOOK).await;
    }
    Ok(())
}
