//! Another effect in the transaction: each confirmed order is an entry in a ledger and moves its customer's balance.
//!
//! Nobody is called, so PostgreSQL alone decides: entries, balances, claims and the partition's position are committed together or not at all.
//! A balance has no key that would forgive a repeat, and needs none.
//!
//! ```sh
//! psql "$ONCEWARD_DATABASE_URL" -f examples/ledger.sql
//! export ONCEWARD_KAFKA_BROKERS=localhost:9092 ONCEWARD_KAFKA_GROUP=ledger ONCEWARD_PROVIDER_KIND=none
//! cargo run --example ledger    # or --config FILE
//! ```

use std::collections::HashMap;
use std::process::ExitCode;

use diesel::prelude::*;
use diesel::sql_types::{Array, Uuid as SqlUuid};
use diesel_async::RunQueryDsl;
use onceward::event::{self, OrderConfirmed};
use onceward::handler::{BatchContext, Claimed, Handler, Outcome, Rejection, Trace};
use onceward::record::Record;
use onceward::store::{DbError, Session};
use uuid::Uuid;

use self::schema::ledger_entry;

mod schema {
    diesel::table! {
        ledger_entry (event_id) {
            event_id -> Uuid,
            customer_id -> BigInt,
            currency -> Text,
            minor_units -> BigInt,
        }
    }
}

/// The handler. It has no state: all that it knows is in the tables.
pub struct Ledger;

impl Handler for Ledger {
    type Event = OrderConfirmed;
    type Answer = (); // nobody is asked, so nobody answers

    fn decode(&self, record: &Record) -> Result<OrderConfirmed, Rejection> {
        event::decode(record.payload.as_deref())
    }

    async fn apply(
        &self,
        tx: &mut Session,
        _: &BatchContext<()>,
        events: &[Claimed<OrderConfirmed>],
    ) -> Result<Vec<Outcome>, DbError> {
        let entry = |order: &OrderConfirmed| {
            (
                ledger_entry::event_id.eq(order.event_id),
                ledger_entry::customer_id.eq(order.customer_id),
                ledger_entry::currency.eq(order.total.currency().code()),
                ledger_entry::minor_units.eq(order.total.minor_units()),
            )
        };
        let entries: Vec<_> = events.iter().map(|claimed| entry(claimed.event())).collect();
        let written = diesel::insert_into(ledger_entry::table).values(entries).execute(&mut **tx).await;
        written.map_err(|error| tx.db_error("write the entries", error))?;

        let ids: Vec<Uuid> = events.iter().map(|claimed| claimed.event().event_id).collect();
        let moved = diesel::sql_query(MOVE_BALANCES).bind::<Array<SqlUuid>, _>(ids).execute(&mut **tx).await;
        moved.map_err(|error| tx.db_error("move the balances", error))?;
        Ok(vec![Outcome::Applied; events.len()])
    }

    /// An entry outlives its claim, so an old event that is delivered again is known by it.
    async fn traces(&self, tx: &mut Session, events: &[&OrderConfirmed]) -> Result<Vec<Trace>, DbError> {
        let ids: Vec<Uuid> = events.iter().map(|order| order.event_id).collect();
        let known = ledger_entry::table
            .filter(ledger_entry::event_id.eq_any(ids))
            .select((ledger_entry::event_id, (ledger_entry::customer_id, ledger_entry::currency, ledger_entry::minor_units)))
            .load::<(Uuid, (i64, String, i64))>(&mut **tx)
            .await;
        let known: HashMap<_, _> = known.map_err(|error| tx.db_error("look entries up", error))?.into_iter().collect();
        let trace = |order: &&OrderConfirmed| match known.get(&order.event_id) {
            None => Trace::None,
            Some((customer, currency, units))
                if (*customer, currency.as_str(), *units)
                    == (order.customer_id, order.total.currency().code(), order.total.minor_units()) =>
            {
                Trace::Applied
            }
            Some(_) => Trace::OtherContent,
        };
        Ok(events.iter().map(trace).collect())
    }
}

/// Other partitions move the same balances. All lock them in one order, so that no two transactions wait for each other in a circle.
const MOVE_BALANCES: &str = "INSERT INTO ledger_balance (customer_id, currency, minor_units) \
     SELECT customer_id, currency, sum(minor_units) FROM ledger_entry WHERE event_id = ANY($1) GROUP BY 1, 2 ORDER BY 1, 2 \
     ON CONFLICT (customer_id, currency) DO UPDATE SET minor_units = ledger_balance.minor_units + excluded.minor_units";

fn main() -> ExitCode {
    onceward::engine::main(Ledger)
}
