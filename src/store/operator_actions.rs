//! What operators have decided of partitions and records, and the record of every decision.
//!
//! In: a decision with its actor and reason. Out: the row of `consumed_partition` as they want it, and a row of `operator_action`. It owns
//! that table and the columns `paused` and `paused_by`.
//!
//! Invariant: a decision is recorded in the statement that makes it count. What an owner must know of takes the epoch with it: no batch
//! begins that does not know of it, for every batch begins with the fence.

use chrono::{DateTime, Utc};
use diesel::sql_types::{BigInt, Bool, Integer, Nullable, Text, Timestamptz};

use super::consumed_partitions::{Paused, bump_limits};
use super::statement::statement;
use super::{DbError, Session, storable};
use crate::record::{Holds, NextOffset, Offset, SourceId};

/// A partition of a topic, as a group consumes it.
#[derive(Clone, Copy, Debug)]
pub struct Of<'a> {
    /// The consumer group.
    pub group: &'a str,
    /// The topic.
    pub topic: &'a str,
    /// The partition.
    pub partition: i32,
}

/// Who decides, and why.
#[derive(Clone, Copy, Debug)]
pub struct By<'a> {
    /// Who.
    pub actor: &'a str,
    /// Why: whoever looks later will want to know.
    pub reason: &'a str,
}

/// What is known of a partition and one of its offsets, for whoever cannot have what they want.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Known {
    /// The frontier.
    pub next_offset: Option<NextOffset>,
    /// By whom it is paused, and why.
    pub paused: Option<Paused>,
    /// The offset is passed over.
    pub is_skipped: bool,
    /// An operator wants the record held, in words.
    pub hold: Option<String>,
    /// Row, reason and state of the last held event at the offset.
    pub held: Option<(i64, String, String)>,
}

/// A decision, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decided {
    /// Its number; later ones are higher.
    pub id: i64,
    /// When, by the database's clock.
    pub at: DateTime<Utc>,
    /// Who.
    pub actor: String,
    /// What: `pause`, `resume`, `hold`, `skip`, or the word of a request.
    pub action: String,
    /// Of which partition.
    pub partition: i32,
    /// Of which record; of a skip, the first.
    pub offset: Option<Offset>,
    /// Of a skip: one past the last record.
    pub to: Option<NextOffset>,
    /// Of which held event; of a hold, what it has become, if the record was met.
    pub held: Option<i64>,
    /// Why.
    pub reason: String,
}

/// Pauses the partition, or lets it go on. `false`: it is so already, or nobody has ever owned it; nothing has changed.
///
/// # Errors
/// 55P03 (class `Retry`) when the owner's open batch takes longer than a second; or the statement failed.
pub async fn pause(s: &mut Session, of: Of<'_>, by: By<'_>, pause: bool) -> Result<bool, DbError> {
    let Of { group, topic, partition } = of;
    let action = if pause { "pause" } else { "resume" };
    let pause = Pause { action, actor: storable(by.actor), reason: storable(by.reason), group, topic, partition };
    let limits = bump_limits(s);
    s.alone("pause", limits, async |s| Ok(s.row::<_, i32>("pause", pause).await?.is_some())).await
}

/// Wants a record held that is not settled. `false`: see [`look`]; nothing has changed.
///
/// # Errors
/// As [`pause`].
pub async fn hold(s: &mut Session, of: Of<'_>, offset: Offset, by: By<'_>) -> Result<bool, DbError> {
    let Of { group, topic, partition } = of;
    let hold = Hold { offset: offset.0, actor: storable(by.actor), reason: storable(by.reason), group, topic, partition };
    let limits = bump_limits(s);
    s.alone("hold_record", limits, async |s| Ok(s.row::<_, i32>("hold_record", hold).await?.is_some())).await
}

/// What is known of the partition and the offset; `None` when nobody has ever owned it.
///
/// # Errors
/// The statement failed.
pub async fn look(s: &mut Session, of: Of<'_>, offset: Option<Offset>) -> Result<Option<Known>, DbError> {
    type Row = (
        Option<i64>,
        Option<String>,
        Option<String>,
        bool,
        Option<String>,
        Option<String>,
        Option<i64>,
        Option<String>,
        Option<String>,
    );
    let Of { group, topic, partition } = of;
    let look = Look { offset: offset.map(|offset| offset.0), group, topic, partition };
    let row: Option<Row> = s.within("look", async |s| s.row("look", look).await).await?;
    Ok(row.map(|(next_offset, paused, paused_by, is_skipped, hold_by, hold_why, held, reason, state)| Known {
        next_offset: next_offset.map(NextOffset),
        paused: Paused::read(paused, paused_by),
        is_skipped,
        hold: hold_by.zip(hold_why).map(|(actor, reason)| hold_words(&actor, &reason)),
        held: held.zip(reason).zip(state).map(|((id, reason), state)| (id, reason, state)),
    }))
}

/// The records of the partition that operators want held, each with what its row is to say.
///
/// # Errors
/// The statement failed.
pub async fn holds(s: &mut Session, source: SourceId) -> Result<Holds, DbError> {
    let rows: Vec<(i64, String, String)> = s.rows("holds", Wanted { source: source.0 }).await?;
    Ok(rows.into_iter().map(|(offset, actor, reason)| (Offset(offset), hold_words(&actor, &reason))).collect())
}

/// What operators have decided of the group and topic, or of one partition, at most so many before the decision `before`, the latest first.
///
/// # Errors
/// The statement failed.
pub async fn list(
    s: &mut Session,
    (group, topic): (&str, &str),
    partition: Option<i32>,
    before: Option<i64>,
    limit: i64,
) -> Result<Vec<Decided>, DbError> {
    type Row = (i64, DateTime<Utc>, String, String, i32, Option<i64>, Option<i64>, Option<i64>, String);
    let list = List { group, topic, partition, before, limit };
    let rows: Vec<Row> = s.within("list_actions", async |s| s.rows("list_actions", list).await).await?;
    let read = |(id, at, actor, action, partition, offset, to, held, reason): Row| {
        let (offset, to) = (offset.map(Offset), to.map(NextOffset));
        Decided { id, at, actor, action, partition, offset, to, held, reason }
    };
    Ok(rows.into_iter().map(read).collect())
}

fn hold_words(actor: &str, reason: &str) -> String {
    format!("held by {actor}: {reason}")
}

// With a new epoch, so that the owner is fenced and takes the partition over anew, with what it finds then.
statement! {
    Pause<'a> {
        action: &'a str => Text, actor: String => Text, reason: String => Text,
        group: &'a str => Text, topic: &'a str => Text, partition: i32 => Integer,
    } -> Integer {
        "WITH wish (action, actor, reason) AS (VALUES (:action, :actor, :reason)),
         changed AS (
             UPDATE consumed_partition AS p SET
                 paused = CASE action WHEN 'pause' THEN reason END, paused_by = CASE action WHEN 'pause' THEN actor END,
                 epoch = epoch + 1, owner = 'onceward partition ' || action, updated_at = now()
             FROM wish
             WHERE consumer_group = :group AND topic = :topic AND partition = :partition AND (paused IS NULL) = (action = 'pause')
             RETURNING p.id, wish.*)
         INSERT INTO operator_action (source_id, action, actor, reason) SELECT id, action, actor, reason FROM changed
         RETURNING source_id"
    }
}

// The frontier is judged under the lock of its row: what is not settled by then is held by whoever comes next.
statement! {
    Hold<'a> {
        offset: i64 => BigInt, actor: String => Text, reason: String => Text,
        group: &'a str => Text, topic: &'a str => Text, partition: i32 => Integer,
    } -> Integer {
        "WITH wish (source_offset, actor, reason) AS (VALUES (:offset, :actor, :reason)),
         changed AS (
             UPDATE consumed_partition AS p SET epoch = epoch + 1, owner = 'onceward offsets hold', updated_at = now()
             FROM wish
             WHERE consumer_group = :group AND topic = :topic AND partition = :partition
                   AND coalesce(next_offset <= source_offset, true) AND NOT coalesce(skips @> source_offset, false)
                   AND NOT EXISTS (SELECT FROM operator_action AS earlier
                                   WHERE earlier.source_id = p.id AND earlier.action = 'hold' AND earlier.source_offset = wish.source_offset)
             RETURNING p.id, wish.*)
         INSERT INTO operator_action (source_id, action, source_offset, actor, reason)
         SELECT id, 'hold', source_offset, actor, reason FROM changed
         RETURNING source_id"
    }
}

statement! {
    Look<'a> { offset: Option<i64> => Nullable<BigInt>, group: &'a str => Text, topic: &'a str => Text, partition: i32 => Integer }
    -> (Nullable<BigInt>, Nullable<Text>, Nullable<Text>, Bool, Nullable<Text>, Nullable<Text>, Nullable<BigInt>, Nullable<Text>, Nullable<Text>) {
        "SELECT next_offset, paused, paused_by, coalesce(skips @> seen.source_offset, false), hold.actor, hold.reason,
                held.id, held.reason, held.state
         FROM (VALUES (:offset)) AS seen (source_offset) CROSS JOIN consumed_partition AS p
              LEFT JOIN LATERAL (SELECT actor, reason FROM operator_action
                                 WHERE source_id = p.id AND action = 'hold' AND source_offset = seen.source_offset LIMIT 1) AS hold ON true
              LEFT JOIN LATERAL (SELECT id, reason, state FROM held_event
                                 WHERE source_id = p.id AND source_offset = seen.source_offset ORDER BY id DESC LIMIT 1) AS held ON true
         WHERE consumer_group = :group AND topic = :topic AND partition = :partition"
    }
}

statement! {
    Wanted { source: i32 => Integer } -> (BigInt, Text, Text) {
        "SELECT source_offset, actor, reason FROM operator_action WHERE source_id = :source AND action = 'hold'"
    }
}

statement! {
    List<'a> {
        group: &'a str => Text, topic: &'a str => Text, partition: Option<i32> => Nullable<Integer>, before: Option<i64> => Nullable<BigInt>,
        limit: i64 => BigInt,
    } -> (BigInt, Timestamptz, Text, Text, Integer, Nullable<BigInt>, Nullable<BigInt>, Nullable<BigInt>, Text) {
        "SELECT decided.id, decided_at, actor, action, p.partition, source_offset, to_offset,
                coalesce(held_id, CASE action WHEN 'hold' THEN (
                    SELECT max(held.id) FROM held_event AS held
                    WHERE held.source_id = decided.source_id AND held.source_offset = decided.source_offset) END),
                reason
         FROM operator_action AS decided JOIN consumed_partition AS p ON p.id = source_id
         WHERE consumer_group = :group AND topic = :topic AND p.partition = coalesce(:partition, p.partition)
               AND coalesce(decided.id < :before, true)
         ORDER BY decided.id DESC LIMIT :limit"
    }
}
