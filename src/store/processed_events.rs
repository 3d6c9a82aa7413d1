//! The claims: one row per event and group, kept for as long as the floor allows.
//!
//! In: ids. Out: those that were new. It owns the rows of `processed_event`.
//!
//! Invariant: an id is claimed once per group, however many sessions try, on whichever day and with whatever offset.

use std::collections::HashSet;

use diesel::sql_types::{Array, BigInt, Integer, Nullable, Text, Uuid as SqlUuid};
use uuid::Uuid;

use super::statement::statement;
use super::{DbError, Session};
use crate::handler::EventDigest;
use crate::record::{Offset, SourceId};

/// One event to claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClaimRow {
    /// The dedup key.
    pub event_id: Uuid,
    /// Tells a repeated event from a conflicting one.
    pub digest: EventDigest,
    /// Explains a duplicate; never a key.
    pub offset: Offset,
}

/// A claim that exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The claimed id.
    pub event_id: Uuid,
    /// The event's digest, if its claim has one.
    pub digest: Option<EventDigest>,
    /// The partition that claimed it.
    pub source: Option<SourceId>,
    /// Its record's offset there.
    pub offset: Option<Offset>,
}

/// Claims the events and returns the ids that are new. An id that another open transaction claims is waited for.
///
/// # Errors
/// 23514: a day is missing, see [`super::retention::ensure_days`].
pub async fn claim(s: &mut Session, group: &str, source: SourceId, rows: &[ClaimRow]) -> Result<HashSet<Uuid>, DbError> {
    if rows.is_empty() {
        return Ok(HashSet::new());
    }
    let claim = Claim {
        group,
        source: source.0,
        event_ids: rows.iter().map(|row| row.event_id).collect(),
        digests: rows.iter().map(|row| row.digest.0).collect(),
        offsets: rows.iter().map(|row| row.offset.0).collect(),
    };
    Ok(s.rows("claim", claim).await?.into_iter().collect())
}

/// The claims of `ids` that exist, in no order.
///
/// # Errors
/// The statement failed.
pub async fn look_up(s: &mut Session, group: &str, ids: &[Uuid]) -> Result<Vec<Seen>, DbError> {
    let (Some(&min), Some(&max)) = (ids.iter().min(), ids.iter().max()) else { return Ok(Vec::new()) };
    type Row = (Uuid, Option<i64>, Option<i32>, Option<i64>);
    let seen = |(event_id, digest, source, offset): Row| Seen {
        event_id,
        digest: digest.map(EventDigest),
        source: source.map(SourceId),
        offset: offset.map(Offset),
    };
    let find = Find { ids, group, min, max };
    s.within("look_up_claims", async |s| Ok(s.rows("look_up_claims", find).await?.into_iter().map(seen).collect())).await
}

/// Deletes claims that this transaction made: the events stay in the window. Out: how many of them were there; a day that was detached
/// meanwhile has taken its claims with it.
///
/// # Errors
/// The statement failed.
pub async fn give_back(s: &mut Session, group: &str, ids: &[Uuid]) -> Result<usize, DbError> {
    let (Some(&min), Some(&max)) = (ids.iter().min(), ids.iter().max()) else { return Ok(0) };
    s.change("give_back", GiveBack { ids, group, min, max }).await
}

#[cfg(feature = "lab")]
pub(super) fn claim_text() -> String {
    super::statement::text(&Claim { group: "", source: 0, event_ids: vec![], digests: vec![], offsets: vec![] })
}

// Sorted, so that two sessions which claim the same ids wait for each other in one order and never in a circle.
statement! {
    Claim<'a> {
        group: &'a str => Text, source: i32 => Integer,
        event_ids: Vec<Uuid> => Array<SqlUuid>, digests: Vec<i64> => Array<BigInt>, offsets: Vec<i64> => Array<BigInt>,
    } -> SqlUuid {
        "INSERT INTO processed_event (event_id, consumer_group, source_id, event_digest, source_offset)
         SELECT event_id, :group, :source, digest, source_offset
         FROM unnest(:event_ids, :digests, :offsets) AS new (event_id, digest, source_offset)
         ORDER BY event_id
         ON CONFLICT (event_id, consumer_group) DO NOTHING
         RETURNING event_id"
    }
}

// The join is planned well for any number of ids, and the range lets the planner leave out the other days.
statement! {
    Find<'a> { ids: &'a [Uuid] => Array<SqlUuid>, group: &'a str => Text, min: Uuid => SqlUuid, max: Uuid => SqlUuid }
    -> (SqlUuid, Nullable<BigInt>, Nullable<Integer>, Nullable<BigInt>) {
        "SELECT event_id, event_digest, source_id, source_offset
         FROM unnest(:ids) AS wanted (event_id) JOIN processed_event USING (event_id)
         WHERE consumer_group = :group AND event_id BETWEEN :min AND :max"
    }
}

statement! {
    GiveBack<'a> { ids: &'a [Uuid] => Array<SqlUuid>, group: &'a str => Text, min: Uuid => SqlUuid, max: Uuid => SqlUuid } -> () {
        "DELETE FROM processed_event AS claim
         USING unnest(:ids) AS given (event_id)
         WHERE claim.event_id = given.event_id AND claim.consumer_group = :group AND claim.event_id BETWEEN :min AND :max"
    }
}
