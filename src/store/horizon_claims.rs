//! Claims of ids below the floor, which only an operator's replay makes: few, and never dropped.
//!
//! In: ids. Out: those that were new. It owns the rows of `horizon_claim`.
//!
//! Invariant: an id below the floor is applied once per group, however often it is replayed.

use std::collections::HashSet;

use diesel::sql_types::{Array, Text, Uuid as SqlUuid};
use uuid::Uuid;

use super::statement::statement;
use super::{DbError, Session};

/// Claims the ids and returns the new ones.
///
/// # Errors
/// The statement failed.
pub async fn claim(s: &mut Session, group: &str, ids: &[Uuid]) -> Result<HashSet<Uuid>, DbError> {
    if ids.is_empty() {
        return Ok(HashSet::new());
    }
    Ok(s.rows("claim_horizon", Claim { group, ids }).await?.into_iter().collect())
}

/// Deletes claims that this transaction made.
///
/// # Errors
/// The statement failed.
pub async fn give_back(s: &mut Session, group: &str, ids: &[Uuid]) -> Result<(), DbError> {
    if !ids.is_empty() {
        s.change("give_back_horizon", GiveBack { group, ids }).await?;
    }
    Ok(())
}

statement! {
    Claim<'a> { group: &'a str => Text, ids: &'a [Uuid] => Array<SqlUuid> } -> SqlUuid {
        "INSERT INTO horizon_claim (event_id, consumer_group)
         SELECT event_id, :group FROM unnest(:ids) AS new (event_id) ORDER BY event_id
         ON CONFLICT (event_id, consumer_group) DO NOTHING
         RETURNING event_id"
    }
}

statement! {
    GiveBack<'a> { group: &'a str => Text, ids: &'a [Uuid] => Array<SqlUuid> } -> () {
        "DELETE FROM horizon_claim WHERE consumer_group = :group AND event_id = ANY(:ids)"
    }
}
