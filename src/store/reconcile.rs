//! What the reconciler reads: claims and payments in the order of their ids, held events and attempts, all in pages.
//!
//! In: a group and a topic. Out: pages of rows. It owns nothing and changes nothing.
//!
//! Invariant: all rows are of one snapshot, so that a batch which commits meanwhile is seen whole or not at all.

use std::collections::BTreeMap;
use std::time::Duration;

use diesel::sql_types::{BigInt, Bool, Integer, Nullable, Text, Uuid as SqlUuid};
use uuid::Uuid;

use super::held_events::HeldState;
use super::payments::PaymentStatus;
use super::processed_events::ClaimTable;
use super::statement::statement;
use super::{DbError, Session, TimeLimits, TransactionError};
use crate::handler::HeldReason;

/// Of `processed_event`, or of `horizon_claim`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The claimed id.
    pub event_id: Uuid,
    /// The claim is of the group that is read for; a payment may rest on another's.
    pub of_group: bool,
    /// Partition and offset of the record that made it, where that is one of the topic that is read for.
    pub place: Option<(i32, i64)>,
}

/// Of `payment`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Payment {
    /// The event that is paid for.
    pub event_id: Uuid,
    /// Its order.
    pub order_id: i64,
    /// The exact amount, as the table has it.
    pub amount: String,
    /// As the table has it.
    pub currency: String,
    /// How it ended.
    pub status: PaymentStatus,
    /// It may have been made after the moment that was asked about.
    pub is_later: bool,
}

/// Of `held_event`, of the group and topic that are read for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// Where it could be read.
    pub event_id: Option<Uuid>,
    /// The record's partition.
    pub partition: i32,
    /// The record's offset.
    pub offset: i64,
    /// Why.
    pub reason: HeldReason,
    /// Where it stands.
    pub state: HeldState,
}

/// Of `held_event`: records that were gone from the log before they were read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gap {
    /// Their partition.
    pub partition: i32,
    /// The first offset.
    pub from: i64,
    /// One past the last.
    pub to: i64,
    /// An operator has given them up.
    pub is_discarded: bool,
}

/// Rows in memory at once, of each table.
const PAGE: i64 = 10_000;

/// Runs `body` on one snapshot, however long it takes to read; no statement takes longer than one page.
///
/// # Errors
/// Those of `body`, or the transaction could not be begun or ended.
pub async fn on_one_snapshot<T, E: From<DbError>>(
    s: &mut Session,
    body: impl AsyncFnOnce(&mut Session) -> Result<T, E>,
) -> Result<T, E> {
    const NAME: &str = "reconcile";
    let minutes = |count: u64| Duration::from_secs(60 * count);
    let limits = TimeLimits { statement: minutes(1), idle_in_transaction: minutes(30), budget: minutes(12 * 60), ..s.limits() };
    let done = s.transaction(NAME, &limits, async |s| {
        s.script(NAME, "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY").await?;
        // Before the snapshot: the detach of a day waits for who holds this, and not for who has only looked at something else.
        s.script(NAME, "LOCK TABLE processed_event IN ACCESS SHARE MODE").await?;
        body(s).await
    });
    done.await.map_err(|error| match error {
        TransactionError::Body(error) => error,
        TransactionError::CommitUnknown(error) | TransactionError::Begin(error) => error.into(),
    })
}

/// A walk through the claims of every group, in the order of their ids.
#[derive(Clone, Debug)]
pub struct Claims {
    group: String,
    /// The partition of each source of the group and topic.
    sources: BTreeMap<i32, i32>,
    /// The table has the columns that say where a claim comes from.
    explains: bool,
    last: (Uuid, String),
}

impl Claims {
    /// At the first one.
    ///
    /// # Errors
    /// The statement failed.
    pub async fn start(s: &mut Session, group: &str, topic: &str) -> Result<Self, DbError> {
        // Not joined: with a join the planner may sort the whole table for every page.
        let sources: Vec<(i32, i32)> = s.rows("reconcile_sources", Sources { group, topic }).await?;
        let ClaimTable { explains, .. } = ClaimTable::read(s).await?;
        Ok(Self { group: group.to_owned(), sources: sources.into_iter().collect(), explains, last: (Uuid::nil(), String::new()) })
    }

    /// The next ones; none at the end.
    ///
    /// # Errors
    /// The statement failed.
    pub async fn page(&mut self, s: &mut Session) -> Result<Vec<Claim>, DbError> {
        type Row = (Uuid, String, Option<i32>, Option<i64>);
        let (after, other) = (self.last.0, &self.last.1);
        let rows: Vec<Row> = if self.explains {
            s.rows("reconcile_claims", ClaimsPage { from: after, after, other, page: PAGE }).await?
        } else {
            s.rows("reconcile_claims", PlainClaimsPage { from: after, after, other, page: PAGE }).await?
        };
        if let Some((event_id, of, ..)) = rows.last() {
            self.last = (*event_id, of.clone());
        }
        let claim = |(event_id, of, source, offset): Row| Claim {
            event_id,
            of_group: of == self.group,
            place: source.and_then(|source| self.sources.get(&source).copied()).zip(offset),
        };
        Ok(rows.into_iter().map(claim).collect())
    }
}

/// The claims below the floor, in no order. They are few by design.
///
/// # Errors
/// The statement failed.
pub async fn horizon_claims(s: &mut Session, group: &str) -> Result<Vec<Claim>, DbError> {
    let rows: Vec<(Uuid, String)> = s.rows("reconcile_horizon_claims", HorizonClaims {}).await?;
    Ok(rows.into_iter().map(|(event_id, of)| Claim { event_id, of_group: of == group, place: None }).collect())
}

/// A walk through the payments, in the order of their events' ids.
#[derive(Clone, Debug)]
pub struct Payments {
    last: Uuid,
    since_ms: Option<i64>,
}

impl Payments {
    /// At the first one; those that may have been made since this moment are told apart.
    #[must_use]
    pub const fn since(since_ms: Option<i64>) -> Self {
        Self { last: Uuid::nil(), since_ms }
    }

    /// The next ones; none at the end.
    ///
    /// # Errors
    /// The statement failed, or a row has a status that this program does not know.
    pub async fn page(&mut self, s: &mut Session) -> Result<Vec<Payment>, DbError> {
        type Row = (Uuid, i64, String, String, String, bool);
        let page = PaymentsPage { since_ms: self.since_ms, after: self.last, page: PAGE };
        let rows: Vec<Row> = s.rows("reconcile_payments", page).await?;
        self.last = rows.last().map_or(self.last, |(event_id, ..)| *event_id);
        let payment = |(event_id, order_id, amount, currency, status, is_later): Row| {
            let unknown = || DbError::program("reconcile_payments", format_args!("payment {event_id}: its status is unknown"));
            let status = PaymentStatus::from_word(&status).ok_or_else(unknown)?;
            Ok(Payment { event_id, order_id, amount, currency, status, is_later })
        };
        rows.into_iter().map(payment).collect()
    }
}

/// Who pays after this call has returned does so in a transaction that began at this time or later, and the row says so: milliseconds
/// since 1970, by the database's clock.
///
/// # Errors
/// The statement failed.
pub async fn begun_since(s: &mut Session) -> Result<i64, DbError> {
    let budget_ms = i64::try_from(s.limits().budget.as_millis()).unwrap_or(i64::MAX);
    let since = s.within("begun_since", async |s| s.row("begun_since", BegunSince { budget_ms }).await).await?;
    Ok(since.expect("an aggregate has a row"))
}

/// All gaps of the group and topic.
///
/// # Errors
/// The statement failed.
pub async fn gaps(s: &mut Session, group: &str, topic: &str) -> Result<Vec<Gap>, DbError> {
    let rows: Vec<(i32, i64, i64, bool)> = s.rows("reconcile_gaps", Gaps { group, topic }).await?;
    Ok(rows.into_iter().map(|(partition, from, to, is_discarded)| Gap { partition, from, to, is_discarded }).collect())
}

/// Hands every held row of the group and topic to `see`, in no order of ids.
///
/// # Errors
/// A statement or `see` failed, or a row has a reason or state that this program does not know.
pub async fn held<E: From<DbError>>(
    s: &mut Session,
    group: &str,
    topic: &str,
    mut see: impl FnMut(Held) -> Result<(), E>,
) -> Result<(), E> {
    type Row = (i64, Option<Uuid>, i32, i64, String, String);
    let mut last = 0;
    loop {
        let rows: Vec<Row> = s.rows("reconcile_held", HeldPage { group, topic, after: last, page: PAGE }).await?;
        let Some((end, ..)) = rows.last() else { return Ok(()) };
        last = *end;
        for (id, event_id, partition, offset, reason, state) in rows {
            let known = (HeldReason::ALL.into_iter().find(|known| known.as_str() == reason), HeldState::from_word(&state));
            let (Some(reason), Some(state)) = known else {
                return Err(DbError::program("reconcile_held", format_args!("held event {id}: unknown reason or state")).into());
            };
            see(Held { event_id, partition, offset, reason, state })?;
        }
    }
}

/// Hands the id of every event to `see` of which a call has begun whose end is not written down.
///
/// # Errors
/// A statement or `see` failed.
pub async fn attempts<E: From<DbError>>(s: &mut Session, mut see: impl FnMut(Uuid) -> Result<(), E>) -> Result<(), E> {
    // A few batches in flight.
    let ids: Vec<Uuid> = s.rows("reconcile_attempt_batches", AttemptBatches {}).await?;
    ids.into_iter().try_for_each(&mut see)?;
    let mut last = Uuid::nil();
    loop {
        let ids: Vec<Uuid> = s.rows("reconcile_attempts", Attempts { after: last, page: PAGE }).await?;
        let Some(end) = ids.last() else { return Ok(()) };
        last = *end;
        ids.into_iter().try_for_each(&mut see)?;
    }
}

// The first condition on the id lets the planner leave out days; the second one is the place in the key.
statement! {
    ClaimsPage<'a> { from: Uuid => SqlUuid, after: Uuid => SqlUuid, other: &'a str => Text, page: i64 => BigInt }
    -> (SqlUuid, Text, Nullable<Integer>, Nullable<BigInt>) {
        "SELECT event_id, consumer_group, source_id, source_offset FROM processed_event
         WHERE event_id >= :from AND (event_id, consumer_group) > (:after, :other)
         ORDER BY event_id, consumer_group LIMIT :page"
    }
}

statement! {
    PlainClaimsPage<'a> { from: Uuid => SqlUuid, after: Uuid => SqlUuid, other: &'a str => Text, page: i64 => BigInt }
    -> (SqlUuid, Text, Nullable<Integer>, Nullable<BigInt>) {
        "SELECT event_id, consumer_group, NULL::integer, NULL::bigint FROM processed_event
         WHERE event_id >= :from AND (event_id, consumer_group) > (:after, :other)
         ORDER BY event_id, consumer_group LIMIT :page"
    }
}

statement! {
    Sources<'a> { group: &'a str => Text, topic: &'a str => Text } -> (Integer, Integer) {
        "SELECT id, partition FROM consumed_partition WHERE consumer_group = :group AND topic = :topic"
    }
}

statement! {
    HorizonClaims {} -> (SqlUuid, Text) { "SELECT event_id, consumer_group FROM horizon_claim" }
}

statement! {
    PaymentsPage { since_ms: Option<i64> => Nullable<BigInt>, after: Uuid => SqlUuid, page: i64 => BigInt }
    -> (SqlUuid, BigInt, Text, Text, Text, Bool) {
        "SELECT event_id, order_id, amount::text, currency, status, coalesce(created_at >= to_timestamp(:since_ms / 1000.0), false)
         FROM payment WHERE event_id > :after ORDER BY event_id LIMIT :page"
    }
}

// A row has the time at which its transaction began: of those that are open the oldest one counts, as long as ours can live at the most
// where some cannot be seen. A second for who has begun and does not show it yet.
statement! {
    BegunSince { budget_ms: i64 => BigInt } -> BigInt {
        "SELECT floor(extract(epoch FROM greatest(
             now() - interval '1 millisecond' * :budget_ms,
             CASE WHEN pg_is_in_recovery() OR bool_or(query = '<insufficient privilege>') THEN '-infinity' ELSE min(xact_start) END
         )) * 1000)::bigint - 1000
         FROM pg_stat_activity WHERE datname = current_database()"
    }
}

// Where a gap ends stands in its words alone; a row without them stands for its first offset.
statement! {
    Gaps<'a> { group: &'a str => Text, topic: &'a str => Text } -> (Integer, BigInt, BigInt, Bool) {
        "SELECT source.partition, held.source_offset,
                coalesce(substring(held.error FROM '^records \\[[0-9]+, ([0-9]+)\\)')::bigint, held.source_offset + 1),
                held.state = 'discarded'
         FROM held_event AS held JOIN consumed_partition AS source ON source.id = held.source_id
         WHERE source.consumer_group = :group AND source.topic = :topic AND held.reason = 'gap'"
    }
}

statement! {
    HeldPage<'a> { group: &'a str => Text, topic: &'a str => Text, after: i64 => BigInt, page: i64 => BigInt }
    -> (BigInt, Nullable<SqlUuid>, Integer, BigInt, Text, Text) {
        "SELECT held.id, held.event_id, source.partition, held.source_offset, held.reason, held.state
         FROM held_event AS held JOIN consumed_partition AS source ON source.id = held.source_id
         WHERE source.consumer_group = :group AND source.topic = :topic AND held.id > :after
         ORDER BY held.id LIMIT :page"
    }
}

statement! {
    AttemptBatches {} -> SqlUuid { "SELECT unnest(event_ids) FROM attempt_batch" }
}

statement! {
    Attempts { after: Uuid => SqlUuid, page: i64 => BigInt } -> SqlUuid {
        "SELECT event_id FROM payment_attempt WHERE event_id > :after ORDER BY event_id LIMIT :page"
    }
}
