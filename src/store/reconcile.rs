//! What the reconciler reads: claims, payments and held events, in pages.
//!
//! In: a group and a topic. Out: every row, handed on one by one. It owns nothing and changes nothing.
//!
//! Invariant: all rows are of one snapshot, so that a batch which commits meanwhile is seen whole or not at all.

use std::time::Duration;

use diesel::sql_types::{BigInt, Integer, Nullable, Text, Uuid as SqlUuid};
use uuid::Uuid;

use super::held_events::HeldState;
use super::payments::PaymentStatus;
use super::statement::statement;
use super::{DbError, Session, TimeLimits, retention};
use crate::handler::HeldReason;

/// One row of interest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trace {
    /// Of `processed_event`, or of `horizon_claim`.
    Claim {
        /// The claimed id.
        event_id: Uuid,
        /// The claim is of the group that is read for; a payment may rest on another's.
        of_group: bool,
    },
    /// Of `payment`.
    Payment {
        /// The event that is paid for.
        event_id: Uuid,
        /// Its order.
        order_id: i64,
        /// The exact amount, as the table has it.
        amount: String,
        /// As the table has it.
        currency: String,
        /// How it ended.
        status: PaymentStatus,
    },
    /// Of `held_event`, of the group and topic that are read for.
    Held {
        /// Where it could be read.
        event_id: Option<Uuid>,
        /// The record's partition.
        partition: i32,
        /// The record's offset.
        offset: i64,
        /// Why.
        reason: HeldReason,
        /// Where it stands.
        state: HeldState,
    },
}

/// Rows in memory at once.
const PAGE: i64 = 20_000;

/// Hands every row to `see` and returns the floor. It may take minutes; no statement takes more than one page.
///
/// # Errors
/// A statement failed, or a row has a status, reason or state that this program does not know.
pub async fn read(s: &mut Session, group: &str, topic: &str, see: &mut impl FnMut(Trace)) -> Result<Option<Uuid>, DbError> {
    const NAME: &str = "reconcile";
    let minutes = |count: u64| Duration::from_secs(60 * count);
    let limits = TimeLimits { statement: minutes(1), idle_in_transaction: minutes(5), budget: minutes(60), ..s.limits() };
    s.alone(NAME, limits, async |s| {
        s.script(NAME, "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY").await?;
        read_claims(s, group, see).await?;
        read_payments(s, see).await?;
        read_held(s, group, topic, see).await?;
        retention::floor(s).await
    })
    .await
}

async fn read_claims(s: &mut Session, group: &str, see: &mut impl FnMut(Trace)) -> Result<(), DbError> {
    let mut last = (Uuid::nil(), String::new());
    loop {
        let page = Claims { from: last.0, after: last.0, other: &last.1, page: PAGE };
        let rows: Vec<(Uuid, String)> = s.rows("reconcile_claims", page).await?;
        let Some(end) = rows.last().cloned() else { break };
        last = end;
        rows.into_iter().for_each(|(event_id, of)| see(Trace::Claim { event_id, of_group: of == group }));
    }
    // Few, by design.
    let rows: Vec<(Uuid, String)> = s.rows("reconcile_horizon_claims", HorizonClaims {}).await?;
    rows.into_iter().for_each(|(event_id, of)| see(Trace::Claim { event_id, of_group: of == group }));
    Ok(())
}

async fn read_payments(s: &mut Session, see: &mut impl FnMut(Trace)) -> Result<(), DbError> {
    type Row = (Uuid, i64, String, String, String);
    let mut last = Uuid::nil();
    loop {
        let rows: Vec<Row> = s.rows("reconcile_payments", Payments { after: last, page: PAGE }).await?;
        let Some((end, ..)) = rows.last() else { return Ok(()) };
        last = *end;
        for (event_id, order_id, amount, currency, status) in rows {
            let unknown = || DbError::program("reconcile_payments", format_args!("payment {event_id}: its status is unknown"));
            let status = PaymentStatus::from_word(&status).ok_or_else(unknown)?;
            see(Trace::Payment { event_id, order_id, amount, currency, status });
        }
    }
}

async fn read_held(s: &mut Session, group: &str, topic: &str, see: &mut impl FnMut(Trace)) -> Result<(), DbError> {
    type Row = (i64, Option<Uuid>, i32, i64, String, String);
    let mut last = 0;
    loop {
        let rows: Vec<Row> = s.rows("reconcile_held", Held { group, topic, after: last, page: PAGE }).await?;
        let Some((end, ..)) = rows.last() else { return Ok(()) };
        last = *end;
        for (id, event_id, partition, offset, reason, state) in rows {
            let known = (HeldReason::ALL.into_iter().find(|known| known.as_str() == reason), HeldState::from_word(&state));
            let (Some(reason), Some(state)) = known else {
                return Err(DbError::program("reconcile_held", format_args!("held event {id}: unknown reason or state")));
            };
            see(Trace::Held { event_id, partition, offset, reason, state });
        }
    }
}

// The first condition lets the planner leave out days; the second one is the place in the key.
statement! {
    Claims<'a> { from: Uuid => SqlUuid, after: Uuid => SqlUuid, other: &'a str => Text, page: i64 => BigInt } -> (SqlUuid, Text) {
        "SELECT event_id, consumer_group FROM processed_event
         WHERE event_id >= :from AND (event_id, consumer_group) > (:after, :other)
         ORDER BY event_id, consumer_group LIMIT :page"
    }
}

statement! {
    HorizonClaims {} -> (SqlUuid, Text) { "SELECT event_id, consumer_group FROM horizon_claim" }
}

statement! {
    Payments { after: Uuid => SqlUuid, page: i64 => BigInt } -> (SqlUuid, BigInt, Text, Text, Text) {
        "SELECT event_id, order_id, amount::text, currency, status FROM payment WHERE event_id > :after ORDER BY event_id LIMIT :page"
    }
}

statement! {
    Held<'a> { group: &'a str => Text, topic: &'a str => Text, after: i64 => BigInt, page: i64 => BigInt }
    -> (BigInt, Nullable<SqlUuid>, Integer, BigInt, Text, Text) {
        "SELECT held.id, held.event_id, source.partition, held.source_offset, held.reason, held.state
         FROM held_event AS held JOIN consumed_partition AS source ON source.id = held.source_id
         WHERE source.consumer_group = :group AND source.topic = :topic AND held.id > :after
         ORDER BY held.id LIMIT :page"
    }
}
