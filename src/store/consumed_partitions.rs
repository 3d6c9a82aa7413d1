//! Who owns a partition, and how far it is settled.
//!
//! In: a partition and its owner. Out: an [`Ownership`] with an epoch, or a [`Fence`] inside a batch's transaction. It owns the
//! rows of `consumed_partition`. If it dies here, the next owner bumps the epoch.
//!
//! Invariant: epochs come from here alone and only grow; a transaction that holds the fence is the only one that settles.

use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

use diesel::prelude::*;
use diesel::sql_types::{Array, BigInt, Integer, Nullable, Text};
use diesel_async::AsyncPgConnection;
use uuid::Uuid;

use super::schema::consumed_partition;
use super::session::{Opening, TimeLimits, TransactionError};
use super::statement::statement;
use super::{DbError, Session, operator_actions, our_time};
use crate::event::id::unix_ms;
use crate::record::{Epoch, Holds, NextOffset, Offset, RecordDigest, Skips, SourceId};

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
    /// What an operator wants passed over.
    pub skips: Skips,
    /// What an operator wants held.
    pub holds: Holds,
    /// By whom it is paused, and why.
    pub paused: Option<Paused>,
    /// In words: the database is not the one that the row was last written on, or was promoted since. Commits may be lost.
    pub went_back: Option<String>,
    /// Which new events may have been charged before.
    pub doubt: Doubt,
}

/// Nothing of the partition is consumed, because an operator wants it so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paused {
    /// Who.
    pub actor: String,
    /// Why.
    pub reason: String,
}

/// Which events that are new to the database may have been charged before it went back in time. It only grows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Doubt {
    /// Those of records below this offset.
    pub offset: Option<NextOffset>,
    /// Those whose id is not younger: milliseconds since 1970, by the database's clock.
    pub before_ms: Option<i64>,
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
    let limits = bump_limits(s);
    s.alone("bump", limits, async |s| {
        let server = Server::ask(s).await?;
        let Server { system_identifier, timeline } = server;
        let bump = Bump { group, topic, partition, owner, system_identifier, timeline };
        let row = s.row("bump", bump).await?;
        ownership(s, row.expect("an upsert returns its row"), server).await
    })
    .await
}

/// Takes the next epoch, if `epoch` is still the current one. `None`: somebody else owns the partition.
///
/// # Errors
/// As [`bump`].
pub async fn rebump(s: &mut Session, source: SourceId, epoch: Epoch, owner: &str) -> Result<Option<Ownership>, DbError> {
    let limits = bump_limits(s);
    s.alone("rebump", limits, async |s| {
        let server = Server::ask(s).await?;
        let Server { system_identifier, timeline } = server;
        let rebump = Rebump { owner, system_identifier, timeline, source: source.0, epoch: epoch.0 };
        let Some(row) = s.row("rebump", rebump).await? else { return Ok(None) };
        ownership(s, row, server).await.map(Some)
    })
    .await
}

/// Notes that the database went back in time: events up to now, and those below `offset`, are in doubt. The server is known from now on.
/// Needs no fence: doubt only grows.
///
/// # Errors
/// As [`bump`].
pub async fn doubt(s: &mut Session, source: SourceId, offset: Option<NextOffset>) -> Result<Doubt, DbError> {
    let Server { system_identifier, timeline } = Server::ask(s).await?;
    let store = StoreDoubt { offset: offset.map(|offset| offset.0), system_identifier, timeline, source: source.0 };
    let (offset, before_ms): (Option<i64>, Option<i64>) =
        s.row("doubt", store).await?.ok_or_else(|| DbError::program("doubt", "the partition's row is gone"))?;
    Ok(Doubt { offset: offset.map(NextOffset), before_ms })
}

/// The limits of a bump and of what goes with it.
#[must_use]
pub fn bump_limits(s: &Session) -> TimeLimits {
    let limits = s.limits();
    TimeLimits { lock: limits.lock.min(BUMP_WAIT), ..limits }
}

/// Locks the ownership row until the transaction ends. `None`: the epoch has moved on, and nothing may be written.
///
/// # Errors
/// The statement failed.
pub async fn fence(s: &mut Session, source: SourceId, epoch: Epoch) -> Result<Option<Fence>, DbError> {
    let row = s.row("fence", LockOwnership { source: source.0, epoch: epoch.0 }).await?;
    Ok(row.map(Fence::read))
}

/// Runs `body` in a transaction behind the [`fence`] of each owner, in their order, which goes out with BEGIN and with `words` of its message.
///
/// # Errors
/// As [`Session::transaction`].
pub async fn fenced<T, E: From<DbError>>(
    s: &mut Session,
    name: &'static str,
    limits: &TimeLimits,
    words: &str,
    owners: &[(SourceId, Epoch)],
    body: impl AsyncFnOnce(&mut Session, Vec<Option<Fence>>) -> Result<T, E>,
) -> Result<T, TransactionError<E>> {
    let first = async |mut connection: &AsyncPgConnection| {
        use diesel_async::RunQueryDsl;
        if let [(SourceId(source), Epoch(epoch))] = *owners {
            let row: Vec<FenceRow> = LockOwnership { source, epoch }.load(&mut connection).await?;
            return Ok(vec![row.into_iter().next().map(Fence::read)]);
        }
        let (sources, epochs) = owners.iter().map(|(source, epoch)| (source.0, epoch.0)).unzip();
        let rows: Vec<(i32, Option<i64>, Option<Uuid>)> = LockOwnerships { sources, epochs }.load(&mut connection).await?;
        let mut found: HashMap<i32, FenceRow> =
            rows.into_iter().map(|(source, next_offset, floor)| (source, (next_offset, floor))).collect();
        Ok(owners.iter().map(|(source, _)| found.remove(&source.0).map(Fence::read)).collect())
    };
    s.transaction_behind(
        name,
        limits,
        Opening { words, statements: 1, name: "fence", first },
        async |s, fences: Result<Vec<_>, _>| body(s, fences?).await,
    )
    .await
}

/// What a partition's row says when its batch has committed.
#[derive(Clone, Copy, Debug)]
pub struct Advance {
    /// The row.
    pub source: SourceId,
    /// The owner's.
    pub epoch: Epoch,
    /// The frontier.
    pub next: NextOffset,
    /// Of the record before it.
    pub digest: Option<RecordDigest>,
    /// Up to when the partition is settled by that: the records' own time in milliseconds since 1970, if they have one.
    pub safe_ms: Option<i64>,
}

/// Writes the frontiers, with COMMIT. The time up to which a partition is settled only grows, and no producer's clock takes it beyond the
/// database's. Where an epoch is not ours, because the caller holds no fence, the transaction fails.
///
/// # Panics
/// Outside of a transaction.
pub fn advance(s: &mut Session, advances: &[Advance]) {
    let now = our_time();
    let advances: Vec<Advance> =
        advances.iter().map(|one| Advance { safe_ms: one.safe_ms.map(|safe| safe.clamp(0, now)), ..*one }).collect();
    match advances[..] {
        [] => {}
        [one] => s.end_with(&advance_text(one)),
        _ => s.end_with(&advance_all_text(&advances)),
    }
}

// It goes out in the message of COMMIT, which takes no parameters; they are numbers. Records without a time leave that where it was; before
// the first one that is the beginning of time, which holds everything back. A record of the future counts as one of now, by the earlier of
// both clocks. A number that is none is how a statement can fail.
pub(super) fn advance_text(Advance { source, epoch, next, digest, safe_ms }: Advance) -> String {
    let (SourceId(source), Epoch(epoch), NextOffset(next)) = (source, epoch, next);
    let (digest, safe_ms) = (number(digest.map(|digest| digest.0)), number(safe_ms));
    format!(
        "WITH advanced AS (
             UPDATE consumed_partition SET next_offset = {next}, last_record_digest = {digest}, updated_at = now(),
                 safe_time = greatest(safe_time, least(now(), coalesce(to_timestamp({safe_ms} / 1000.0), 'epoch')))
             WHERE id = {source} AND epoch = {epoch}
             RETURNING id)
         SELECT CASE count(*) WHEN 1 THEN 1
                ELSE ('frontier {next} of partition row {source} written without the fence of epoch {epoch}: ' || count(*))::integer END
         FROM advanced"
    )
}

// The same for several at once.
fn advance_all_text(advances: &[Advance]) -> String {
    let row = |Advance { source, epoch, next, digest, safe_ms }: &Advance| {
        let (digest, safe_ms) = (number(digest.map(|digest| digest.0)), number(*safe_ms));
        format!("({}, {}::bigint, {}::bigint, {digest}::bigint, {safe_ms}::bigint)", source.0, epoch.0, next.0)
    };
    let (rows, count) = (advances.iter().map(row).collect::<Vec<_>>().join(", "), advances.len());
    format!(
        "WITH advanced AS (
             UPDATE consumed_partition AS p SET next_offset = new.next, last_record_digest = new.digest, updated_at = now(),
                 safe_time = greatest(safe_time, least(now(), coalesce(to_timestamp(new.safe_ms / 1000.0), 'epoch')))
             FROM (VALUES {rows}) AS new (source, epoch, next, digest, safe_ms)
             WHERE p.id = new.source AND p.epoch = new.epoch
             RETURNING p.id)
         SELECT CASE count(*) WHEN {count} THEN 1
                ELSE ('frontiers of {count} partition rows written without the fence of their epochs: ' || count(*))::integer END
         FROM advanced"
    )
}

fn number(number: Option<i64>) -> String {
    number.map_or_else(|| "NULL".to_owned(), |number| number.to_string())
}

/// Which partition, and under which epoch.
#[derive(Clone, Copy, Debug)]
pub struct Owned<'a> {
    /// The consumer group.
    pub group: &'a str,
    /// The topic.
    pub topic: &'a str,
    /// The partition.
    pub partition: i32,
    /// Of its owner.
    pub epoch: Epoch,
}

/// Notes that the partition had nothing unsettled at this time of the database, in milliseconds since 1970. Another owner's row stays.
///
/// # Errors
/// As [`bump`].
pub async fn stands_at_the_end(s: &mut Session, owned: Owned<'_>, asked_ms: i64) -> Result<(), DbError> {
    let Owned { group, topic, partition, epoch: Epoch(epoch) } = owned;
    let limits = bump_limits(s);
    let note = StandsAtTheEnd { asked_ms, group, topic, partition, epoch };
    s.alone("stands_at_the_end", limits, async |s| s.change("stands_at_the_end", note).await.map(drop)).await
}

/// Notes how long the group needs ids remembered (`None`: for ever), and what asks for that. Another owner's row stays.
///
/// # Errors
/// As [`bump`].
pub async fn remember(s: &mut Session, owned: Owned<'_>, needed_ms: Option<i64>, why: &str) -> Result<(), DbError> {
    let Owned { group, topic, partition, epoch: Epoch(epoch) } = owned;
    let limits = bump_limits(s);
    let note = Remember { needed_ms, why, group, topic, partition, epoch };
    s.alone("remember", limits, async |s| s.change("remember", note).await.map(drop)).await
}

/// Whether any partition of this group and topic was ever owned.
///
/// # Errors
/// The statement failed.
pub async fn has_rows(s: &mut Session, group: &str, topic: &str) -> Result<bool, DbError> {
    let of_topic = consumed_partition::consumer_group.eq(group).and(consumed_partition::topic.eq(topic));
    let found = diesel::select(diesel::dsl::exists(consumed_partition::table.filter(of_topic)));
    s.within("has_rows", async |s| Ok(s.row("has_rows", found).await?.unwrap_or(false))).await
}

/// How many partitions of this topic the group has ever taken, or has a start for.
///
/// # Errors
/// The statement failed.
pub async fn count(s: &mut Session, group: &str, topic: &str) -> Result<i64, DbError> {
    let of_topic = consumed_partition::consumer_group.eq(group).and(consumed_partition::topic.eq(topic));
    let known = consumed_partition::table.filter(of_topic).count();
    s.within("known_partitions", async |s| Ok(s.row("known_partitions", known).await?.unwrap_or(0))).await
}

/// How far every partition of this group and topic is settled; a partition of which nothing is settled is not there.
///
/// # Errors
/// The statement failed.
pub async fn positions(s: &mut Session, group: &str, topic: &str) -> Result<Vec<(i32, NextOffset)>, DbError> {
    let of_topic = consumed_partition::consumer_group.eq(group).and(consumed_partition::topic.eq(topic));
    let settled = consumed_partition::table
        .filter(of_topic.and(consumed_partition::next_offset.is_not_null()))
        .select((consumed_partition::partition, consumed_partition::next_offset.assume_not_null()));
    let rows: Vec<(i32, i64)> = s.within("positions", async |s| s.rows("positions", settled).await).await?;
    Ok(rows.into_iter().map(|(partition, next)| (partition, NextOffset(next))).collect())
}

/// Writes the start of a new group for all partitions of its topic at once; a partition that has a row keeps it.
///
/// # Errors
/// The statement failed.
pub async fn pin(s: &mut Session, group: &str, topic: &str, starts: &[(i32, NextOffset)]) -> Result<(), DbError> {
    let (partitions, offsets): (Vec<i32>, Vec<i64>) = starts.iter().map(|(partition, start)| (*partition, start.0)).unzip();
    let pin = Pin { group, topic, partitions: &partitions, offsets: &offsets };
    s.within("pin", async |s| s.change("pin", pin).await.map(drop)).await
}

/// How long a bump waits for the old owner's batch before it is tried anew: its connection serves other partitions too.
const BUMP_WAIT: Duration = Duration::from_secs(1);

impl Doubt {
    /// Whether it may have been charged, provided that nothing is known of it.
    #[must_use]
    pub fn covers(&self, event_id: Uuid, offset: Offset) -> bool {
        self.offset.is_some_and(|below| offset.0 < below.0) || self.before_ms.is_some_and(|before| unix_ms(event_id) <= before)
    }
}

/// Which server this is; an ordinary role can ask. The timeline is read from where it writes: the one in `pg_control_checkpoint`
/// still names the old primary's until the first checkpoint after a promotion.
#[derive(Clone, Copy)]
struct Server {
    system_identifier: i64,
    timeline: i32,
}

impl Server {
    async fn ask(s: &mut Session) -> Result<Self, DbError> {
        let row = s.row("server", AskServer {}).await?;
        let (system_identifier, timeline) = row.expect("a function without a set returns one row");
        Ok(Self { system_identifier, timeline })
    }
}

type FenceRow = (Option<i64>, Option<Uuid>);

impl Fence {
    fn read((next_offset, floor): FenceRow) -> Self {
        Self { next_offset: next_offset.map(NextOffset), floor }
    }
}

impl Paused {
    pub(super) fn read(reason: Option<String>, actor: Option<String>) -> Option<Self> {
        // By hand, perhaps: it counts all the same.
        reason.map(|reason| Self { actor: actor.unwrap_or_else(|| "nobody known".to_owned()), reason })
    }
}

impl fmt::Display for Paused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "by {}: {}", self.actor, self.reason)
    }
}

type OwnershipRow = (
    i32,
    i64,
    Option<i64>,
    Option<i64>,
    Option<i64>,
    Option<i32>,
    Option<String>,
    Option<String>,
    Option<String>,
    Option<i64>,
    Option<i64>,
);
type OwnershipTypes = (
    Integer,
    BigInt,
    Nullable<BigInt>,
    Nullable<BigInt>,
    Nullable<BigInt>,
    Nullable<Integer>,
    Nullable<Text>,
    Nullable<Text>,
    Nullable<Text>,
    Nullable<BigInt>,
    Nullable<BigInt>,
);

async fn ownership(s: &mut Session, row: OwnershipRow, server: Server) -> Result<Ownership, DbError> {
    let (id, epoch, next_offset, digest, system_identifier, timeline, skips, paused, paused_by, doubt_offset, before_ms) = row;
    let skips = skips.map_or_else(|| Some(Skips::default()), |text| Skips::from_text(&text));
    let skips = skips.ok_or_else(|| DbError::program("bump", format_args!("row {id}: its skips are no ranges with two ends")))?;
    let Server { system_identifier: system_now, timeline: timeline_now } = server;
    let went_back = match (system_identifier, timeline) {
        (Some(before), _) if before != system_now => Some(format!("the system identifier was {before} and is {system_now}")),
        (_, Some(before)) if before != timeline_now => Some(format!("the timeline was {before} and is {timeline_now}")),
        _ => None,
    };
    Ok(Ownership {
        source: SourceId(id),
        epoch: Epoch(epoch),
        next_offset: next_offset.map(NextOffset),
        last_record_digest: digest.map(RecordDigest),
        skips,
        holds: operator_actions::holds(s, SourceId(id)).await?,
        paused: Paused::read(paused, paused_by),
        went_back,
        doubt: Doubt { offset: doubt_offset.map(NextOffset), before_ms },
    })
}

/// Rounded up: what was called before that moment has an id that is not younger.
macro_rules! doubt_columns {
    () => {
        "doubt_offset, ceil(extract(epoch FROM doubt_before) * 1000)::bigint"
    };
}

#[cfg(feature = "lab")]
pub(super) fn fence_text() -> String {
    super::statement::text(&LockOwnership { source: 0, epoch: 0 })
}

statement! {
    AskServer {} -> (BigInt, Integer) {
        "SELECT system_identifier, ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::integer
         FROM pg_control_system()"
    }
}

// The stored server is kept when it is another one: that is the evidence.
statement! {
    Bump<'a> {
        group: &'a str => Text, topic: &'a str => Text, partition: i32 => Integer, owner: &'a str => Text,
        system_identifier: i64 => BigInt, timeline: i32 => Integer,
    } -> OwnershipTypes {
        concat!("INSERT INTO consumed_partition AS p (consumer_group, topic, partition, owner, epoch, system_identifier, timeline)
         VALUES (:group, :topic, :partition, :owner, 1, :system_identifier, :timeline)
         ON CONFLICT (consumer_group, topic, partition) DO UPDATE SET
             epoch = p.epoch + 1, owner = excluded.owner, updated_at = now(),
             system_identifier = coalesce(p.system_identifier, excluded.system_identifier),
             timeline = coalesce(p.timeline, excluded.timeline)
         RETURNING id, epoch, next_offset, last_record_digest, system_identifier, timeline, skips::text, paused, paused_by, ", doubt_columns!())
    }
}

statement! {
    Pin<'a> {
        group: &'a str => Text, topic: &'a str => Text, partitions: &'a [i32] => Array<Integer>, offsets: &'a [i64] => Array<BigInt>,
    } -> () {
        "INSERT INTO consumed_partition (consumer_group, topic, partition, owner, epoch, next_offset)
         SELECT :group, :topic, start.partition, 'nobody', 1, start.next_offset
         FROM unnest(:partitions, :offsets) AS start (partition, next_offset)
         ON CONFLICT (consumer_group, topic, partition) DO NOTHING"
    }
}

statement! {
    Rebump<'a> {
        owner: &'a str => Text, system_identifier: i64 => BigInt, timeline: i32 => Integer, source: i32 => Integer, epoch: i64 => BigInt,
    } -> OwnershipTypes {
        concat!("UPDATE consumed_partition SET
             epoch = epoch + 1, owner = :owner, updated_at = now(),
             system_identifier = coalesce(system_identifier, :system_identifier),
             timeline = coalesce(timeline, :timeline)
         WHERE id = :source AND epoch = :epoch
         RETURNING id, epoch, next_offset, last_record_digest, system_identifier, timeline, skips::text, paused, paused_by, ", doubt_columns!())
    }
}

statement! {
    StoreDoubt { offset: Option<i64> => Nullable<BigInt>, system_identifier: i64 => BigInt, timeline: i32 => Integer, source: i32 => Integer }
    -> (Nullable<BigInt>, Nullable<BigInt>) {
        concat!("UPDATE consumed_partition SET
             doubt_offset = greatest(doubt_offset, :offset), doubt_before = greatest(doubt_before, now()),
             system_identifier = :system_identifier, timeline = :timeline, updated_at = now()
         WHERE id = :source
         RETURNING ", doubt_columns!())
    }
}

// A floor that was raised while this waited for the lock is read too low: its days are gone by then, so a claim below it fails. Where
// there are no days, the transaction has shown itself before, and nothing is deleted until it is over.
statement! {
    LockOwnership { source: i32 => Integer, epoch: i64 => BigInt } -> (Nullable<BigInt>, Nullable<diesel::sql_types::Uuid>) {
        "SELECT p.next_offset, retention.floor
         FROM consumed_partition AS p LEFT JOIN retention ON true
         WHERE p.id = :source AND p.epoch = :epoch
         FOR UPDATE OF p"
    }
}

// In one order, so that two transactions never wait for each other in a circle. A row whose epoch is another owner's is not locked.
statement! {
    LockOwnerships { sources: Vec<i32> => Array<Integer>, epochs: Vec<i64> => Array<BigInt> }
    -> (Integer, Nullable<BigInt>, Nullable<diesel::sql_types::Uuid>) {
        "SELECT p.id, p.next_offset, retention.floor
         FROM unnest(:sources, :epochs) AS mine (id, epoch)
              JOIN consumed_partition AS p ON p.id = mine.id AND p.epoch = mine.epoch
              LEFT JOIN retention ON true
         ORDER BY p.id
         FOR UPDATE OF p"
    }
}

// A row that a batch has locked is waited for: no other row is locked meanwhile.
statement! {
    StandsAtTheEnd<'a> {
        asked_ms: i64 => BigInt, group: &'a str => Text, topic: &'a str => Text, partition: i32 => Integer, epoch: i64 => BigInt,
    } -> () {
        "UPDATE consumed_partition SET safe_time = greatest(safe_time, to_timestamp(:asked_ms / 1000.0))
         WHERE consumer_group = :group AND topic = :topic AND partition = :partition AND epoch = :epoch"
    }
}

statement! {
    Remember<'a> {
        needed_ms: Option<i64> => Nullable<BigInt>, why: &'a str => Text,
        group: &'a str => Text, topic: &'a str => Text, partition: i32 => Integer, epoch: i64 => BigInt,
    } -> () {
        "UPDATE consumed_partition SET remember_ms = :needed_ms, remember_why = :why
         WHERE consumer_group = :group AND topic = :topic AND partition = :partition AND epoch = :epoch"
    }
}
