//! Who owns a partition, and how far it is settled.
//!
//! In: a partition and its owner. Out: an [`Ownership`] with an epoch, or a [`Fence`] inside a batch's transaction. It owns the
//! rows of `consumed_partition`. If it dies here, the next owner bumps the epoch.
//!
//! Invariant: epochs come from here alone and only grow; a transaction that holds the fence is the only one that settles.

use uuid::Uuid;

use super::{DbError, Session};
use crate::record::{Epoch, NextOffset, RecordDigest, SourceId};

/// What the new owner of a partition finds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ownership {
    /// The partition's row.
    pub source: SourceId,
    /// The epoch of this owner.
    pub epoch: Epoch,
    /// Where the last owner stopped; `None` if nothing was ever settled.
    pub next_offset: Option<NextOffset>,
    /// The digest of the record before it, where there was one.
    pub last_record_digest: Option<RecordDigest>,
    /// In words: the database is not the one that the row was last written on, or was promoted since. Commits may be lost.
    pub went_back: Option<String>,
}

/// What a batch's transaction knows once it holds its ownership row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fence {
    /// The stored frontier.
    pub next_offset: Option<NextOffset>,
    /// Ids below are forgotten; `None` before the first run.
    pub floor: Option<Uuid>,
}

/// Takes a partition over: the next epoch for `owner`. Waits up to a second for the old owner's open batch.
///
/// # Errors
/// 55P03 (class `Retry`) when that batch takes longer: bump again.
pub async fn bump(s: &mut Session, group: &str, topic: &str, partition: i32, owner: &str) -> Result<Ownership, DbError> {
    todo!()
}

/// Takes the next epoch, if `epoch` is still the current one. `None`: somebody else owns the partition.
///
/// # Errors
/// As [`bump`].
pub async fn rebump(s: &mut Session, source: SourceId, epoch: Epoch, owner: &str) -> Result<Option<Ownership>, DbError> {
    todo!()
}

/// Locks the ownership row until the transaction ends. `None`: the epoch has moved on, and nothing may be written.
///
/// # Errors
/// The statement failed.
pub async fn fence(s: &mut Session, source: SourceId, epoch: Epoch) -> Result<Option<Fence>, DbError> {
    todo!()
}

/// Writes the frontier, and the digest of the record before it.
///
/// # Errors
/// The statement failed.
///
/// # Panics
/// When the epoch is not ours: the caller holds no fence.
pub async fn advance(
    s: &mut Session,
    source: SourceId,
    epoch: Epoch,
    next: NextOffset,
    digest: Option<RecordDigest>,
) -> Result<(), DbError> {
    todo!()
}

/// Whether any partition of this group and topic was ever owned.
///
/// # Errors
/// The statement failed.
pub async fn has_rows(s: &mut Session, group: &str, topic: &str) -> Result<bool, DbError> {
    todo!()
}
