//! Positions for people, and what they want passed over.
//!
//! In: a group and a topic. Out: a row per partition; or a range of offsets that is settled without effect from the next takeover on. It
//! owns the column `skips`.
//!
//! Invariant: a skip is recorded with who wanted it and why, in the transaction that makes it count, and it takes the epoch with it: the
//! owner must take the partition over anew and sees it.

use diesel::sql_types::{BigInt, Integer, Nullable, Text};

use super::consumed_partitions::bump_limits;
use super::statement::statement;
use super::{DbError, Session, storable};
use crate::handler::HeldReason;
use crate::record::{Epoch, NextOffset, RecordDigest, Skips};
use crate::store::held_events::HeldState;

/// A partition as its row has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Position {
    /// The partition.
    pub partition: i32,
    /// Who took it last.
    pub owner: String,
    /// How often it was taken.
    pub epoch: Epoch,
    /// The frontier.
    pub next_offset: Option<NextOffset>,
    /// What is passed over.
    pub skips: Skips,
    /// When the row was last written, by the database's clock.
    pub updated_at: String,
}

/// What an operator wants passed over, and why.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// The partition.
    pub partition: i32,
    /// The first offset.
    pub from: NextOffset,
    /// One past the last.
    pub to: NextOffset,
    /// Who wants it.
    pub actor: &'a str,
    /// Why.
    pub reason: &'a str,
}

/// Every partition of the topic that was ever owned by the group.
///
/// # Errors
/// The statement failed.
pub async fn positions(s: &mut Session, group: &str, topic: &str) -> Result<Vec<Position>, DbError> {
    type Row = (i32, String, i64, Option<i64>, String, String);
    let rows: Vec<Row> = s.within("positions", async |s| s.rows("positions", Positions { group, topic }).await).await?;
    let position = |(partition, owner, epoch, next_offset, skips, updated_at): Row| {
        let next_offset = next_offset.map(NextOffset);
        Ok(Position { partition, owner, epoch: Epoch(epoch), next_offset, skips: read(&skips)?, updated_at })
    };
    rows.into_iter().map(position).collect()
}

/// Lets a range be passed over. Out: all ranges of the partition, or `None` when nobody has ever owned it.
///
/// # Errors
/// 55P03 (class `Retry`) when the owner's open batch takes longer than a second; or the statement failed.
pub async fn skip(s: &mut Session, group: &str, topic: &str, wanted: &Wanted<'_>) -> Result<Option<Skips>, DbError> {
    let Wanted { partition, from, to, actor, reason } = *wanted;
    let limits = bump_limits(s);
    s.alone("skip", limits, async |s| {
        let skip = Skip { from: from.0, to: to.0, group, topic, partition };
        let Some((source, skips)) = s.row::<_, (i32, String)>("skip", skip).await? else { return Ok(None) };
        let note = Note {
            source,
            offset: from.0,
            digest: RecordDigest::of_range(from, to).0,
            reason: HeldReason::Skipped.as_str(),
            error: format!("records [{from}, {to}) are passed over"),
            state: HeldState::Discarded.as_str(),
            actor: storable(actor),
            note: storable(reason),
        };
        s.change("note_skip", note).await?;
        let record = Record { source, from: from.0, to: to.0, actor: storable(actor), reason: storable(reason) };
        s.change("record_skip", record).await?;
        read(&skips).map(Some)
    })
    .await
}

fn read(skips: &str) -> Result<Skips, DbError> {
    Skips::from_text(skips).ok_or_else(|| DbError::program("skips", format_args!("{skips} are no ranges with two ends")))
}

statement! {
    Positions<'a> { group: &'a str => Text, topic: &'a str => Text } -> (Integer, Text, BigInt, Nullable<BigInt>, Text, Text) {
        "SELECT partition, owner, epoch, next_offset, coalesce(skips, '{}')::text, to_char(updated_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"')
         FROM consumed_partition WHERE consumer_group = :group AND topic = :topic ORDER BY partition"
    }
}

// With a new epoch, so that the owner is fenced and looks again.
statement! {
    Skip<'a> {
        from: i64 => BigInt, to: i64 => BigInt, group: &'a str => Text, topic: &'a str => Text, partition: i32 => Integer,
    } -> (Integer, Text) {
        "UPDATE consumed_partition SET
             skips = coalesce(skips, '{}') + int8multirange(int8range(:from, :to)),
             epoch = epoch + 1, owner = 'onceward offsets skip', updated_at = now()
         WHERE consumer_group = :group AND topic = :topic AND partition = :partition
         RETURNING id, skips::text"
    }
}

statement! {
    Record { source: i32 => Integer, from: i64 => BigInt, to: i64 => BigInt, actor: String => Text, reason: String => Text } -> () {
        "INSERT INTO operator_action (action, source_id, source_offset, to_offset, actor, reason)
         VALUES ('skip', :source, :from, :to, :actor, :reason)"
    }
}

// The row stands for the range: its bytes are those of a record without headers. A gap of the same range is decided by it.
statement! {
    Note<'a> {
        source: i32 => Integer, offset: i64 => BigInt, digest: i64 => BigInt, reason: &'a str => Text, error: String => Text,
        state: &'a str => Text, actor: String => Text, note: String => Text,
    } -> () {
        "INSERT INTO held_event (source_id, source_offset, record_digest, headers, reason, error, state, owns_claim, actor, note, attempts)
         VALUES (:source, :offset, :digest, '\\x00000000', :reason, :error, :state, false, :actor, :note, 0)
         ON CONFLICT (source_id, source_offset, record_digest) DO UPDATE SET state = excluded.state, actor = excluded.actor, note = excluded.note"
    }
}
