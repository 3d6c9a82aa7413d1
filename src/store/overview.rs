//! What the database knows of a group's whole topic, whoever owns the partitions.
//!
//! In: a group and a topic. Out: a row per partition, and counts of held events. It owns nothing and changes nothing.
//!
//! Invariant: all of it is of one transaction, so what is shown side by side was there within a moment.

use diesel::sql_types::{BigInt, Double, Integer, Nullable, Text};

use super::consumed_partitions::Paused;
use super::held_events::{HeldState, read_reason, read_state};
use super::statement::statement;
use super::{DbError, Session, held_requests};
use crate::handler::HeldReason;
use crate::record::Skips;

/// The group's topic as the database has it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Group {
    /// The database's time, in milliseconds since 1970.
    pub now_ms: i64,
    /// The server's version.
    pub version: String,
    /// Partitions that were ever owned, by number.
    pub partitions: Vec<PartitionRow>,
    /// Held events that are not settled.
    pub held: Vec<HeldCount>,
    /// What operators ask for and nobody has carried out yet.
    pub requests: i64,
}

/// A row of `consumed_partition`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartitionRow {
    /// The partition.
    pub partition: i32,
    /// Who took it last.
    pub owner: String,
    /// How often it was taken.
    pub epoch: i64,
    /// The frontier.
    pub settled: Option<i64>,
    /// By whom it is paused, and why.
    pub paused: Option<Paused>,
    /// No unsettled event of it is older; milliseconds since 1970.
    pub safe_ms: Option<i64>,
    /// What is passed over.
    pub skips: Skips,
    /// When the row was last written; milliseconds since 1970.
    pub updated_ms: i64,
}

/// Held events of one kind in one partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldCount {
    /// The partition.
    pub partition: i32,
    /// Why they are held.
    pub reason: HeldReason,
    /// Where they stand.
    pub state: HeldState,
    /// How many.
    pub count: i64,
    /// Since when the oldest is held; milliseconds since 1970.
    pub oldest_ms: i64,
}

/// Reads all of it.
///
/// # Errors
/// A statement failed, or a row cannot be read.
pub async fn group(s: &mut Session, group: &str, topic: &str) -> Result<Group, DbError> {
    s.within("overview", async |s| {
        let (now_ms, version): (i64, String) = s.row("overview", Server {}).await?.expect("one row");
        let partitions: Vec<Row> = s.rows("overview", Partitions { group, topic }).await?;
        let held: Vec<(i32, String, String, i64, i64)> = s.rows("overview", Held { group, topic }).await?;
        let held = held.into_iter().map(|(partition, reason, state, count, oldest_ms)| {
            let (reason, state) = (read_reason(0, &reason)?, read_state(0, &state)?);
            Ok(HeldCount { partition, reason, state, count, oldest_ms })
        });
        Ok(Group {
            now_ms,
            version,
            partitions: partitions.into_iter().map(read).collect::<Result<_, _>>()?,
            held: held.collect::<Result<_, DbError>>()?,
            requests: held_requests::count(s, group, topic).await?,
        })
    })
    .await
}

type Row = (i32, String, i64, Option<i64>, Option<String>, Option<String>, Option<f64>, String, f64);

fn read((partition, owner, epoch, settled, paused, paused_by, safe, skips, updated): Row) -> Result<PartitionRow, DbError> {
    let ranges = Skips::from_text(&skips);
    let skips = ranges.ok_or_else(|| DbError::program("overview", format_args!("{skips} are no ranges with two ends")))?;
    Ok(PartitionRow {
        partition,
        owner,
        epoch,
        settled,
        paused: Paused::read(paused, paused_by),
        safe_ms: safe.map(whole_ms),
        skips,
        updated_ms: whole_ms(updated),
    })
}

fn whole_ms(seconds: f64) -> i64 {
    (seconds * 1_000.0) as i64
}

statement! {
    Server {} -> (BigInt, Text) {
        "SELECT (extract(epoch FROM statement_timestamp()) * 1000)::bigint, split_part(current_setting('server_version'), ' ', 1)"
    }
}

statement! {
    Partitions<'a> { group: &'a str => Text, topic: &'a str => Text }
    -> (Integer, Text, BigInt, Nullable<BigInt>, Nullable<Text>, Nullable<Text>, Nullable<Double>, Text, Double) {
        "SELECT partition, owner, epoch, next_offset, paused, paused_by, extract(epoch FROM safe_time)::float8,
                coalesce(skips, '{}')::text, extract(epoch FROM updated_at)::float8
         FROM consumed_partition WHERE consumer_group = :group AND topic = :topic ORDER BY partition"
    }
}

statement! {
    Held<'a> { group: &'a str => Text, topic: &'a str => Text } -> (Integer, Text, Text, BigInt, BigInt) {
        "SELECT partition, reason, state, count(*), (extract(epoch FROM min(held_at)) * 1000)::bigint
         FROM held_event JOIN consumed_partition ON consumed_partition.id = source_id
         WHERE consumer_group = :group AND topic = :topic AND state IN ('retrying', 'waiting', 'parked', 'queued')
         GROUP BY partition, reason, state ORDER BY partition, reason, state"
    }
}
