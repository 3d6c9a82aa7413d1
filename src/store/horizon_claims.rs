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
use crate::handler::HeldReason;

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

/// Of `ids` below the floor, those that this group has settled: by such a claim, or by a held event that has or had its claim, or that
/// stands for this very case.
///
/// # Errors
/// The statement failed.
pub async fn settled(s: &mut Session, group: &str, ids: &[Uuid]) -> Result<HashSet<Uuid>, DbError> {
    let settled = Settled { ids, claimed_by: group, horizon: HeldReason::BeyondHorizon.as_str(), held_by: group };
    s.within("settled", async |s| Ok(s.rows("settled", settled).await?.into_iter().collect())).await
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

// What is held without a claim for another reason says nothing of the event: it was no event, or of another content.
statement! {
    Settled<'a> {
        ids: &'a [Uuid] => Array<SqlUuid>, claimed_by: &'a str => Text, horizon: &'a str => Text, held_by: &'a str => Text,
    } -> SqlUuid {
        "SELECT wanted.event_id FROM unnest(:ids) AS wanted (event_id)
         WHERE EXISTS (SELECT FROM horizon_claim AS claim WHERE claim.event_id = wanted.event_id AND claim.consumer_group = :claimed_by)
            OR EXISTS (SELECT FROM held_event AS held JOIN consumed_partition AS source ON source.id = held.source_id
                       WHERE held.event_id = wanted.event_id AND (held.owns_claim OR held.reason = :horizon)
                             AND source.consumer_group = :held_by)"
    }
}

statement! {
    GiveBack<'a> { group: &'a str => Text, ids: &'a [Uuid] => Array<SqlUuid> } -> () {
        "DELETE FROM horizon_claim WHERE consumer_group = :group AND event_id = ANY(:ids)"
    }
}
