//! Which days of ids the table of claims can take.
//!
//! In: ids about to be claimed. Out: their days exist. It owns a memory of days seen, which may lag; the claim itself finds out, and
//! the batch asks again. Days are made before a batch's transaction, never inside it.
//!
//! Invariant: a day below the floor is never made.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use uuid::Uuid;

use crate::store::retention::{self, day_of};
use crate::store::{DbError, Store};

/// Days known to exist, and the floor as it was when they were read.
#[derive(Debug, Default)]
pub struct Days(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    days: BTreeSet<i64>,
    floor: Option<Uuid>,
}

impl Days {
    /// Makes the days of these ids that are not known to exist; ids below the floor need none.
    ///
    /// # Errors
    /// When the database cannot be asked or a day cannot be made.
    pub async fn ensure(&self, store: &Store, ids: impl Iterator<Item = Uuid>) -> Result<(), DbError> {
        let (missing, floor) = {
            let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            let new = ids.filter(|id| known.floor.is_none_or(|floor| *id >= floor) && !known.days.contains(&day_of(*id)));
            (new.collect::<Vec<Uuid>>(), known.floor)
        };
        if missing.is_empty() {
            return Ok(());
        }
        let mut session = store.control.get().await.map_err(DbError::from)?;
        let floor = match floor {
            Some(floor) => Some(floor),
            None => retention::floor(&mut session).await?,
        };
        let takes: BTreeSet<i64> = missing.iter().filter(|id| floor.is_none_or(|floor| **id >= floor)).map(|id| day_of(*id)).collect();
        if !takes.is_empty() {
            retention::ensure_days(&mut session, &takes).await?;
        }
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.floor = floor;
        known.days.extend(takes);
        Ok(())
    }

    /// Forgets everything: a claim has found no partition.
    pub fn forget(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Known::default();
    }
}

/// The milliseconds since 1970 with which a UUID v7 begins.
#[must_use]
pub fn unix_ms(id: Uuid) -> u64 {
    (id.as_u128() >> 80) as u64
}
