//! An event type of its own: `stock.requested.v1` takes a quantity of an article out of the stock, or is declined.
//!
//! What an event means is the handler's business: its schema, the sentences with which a record is refused, and the digest by which a repeat is told
//! from another content under the same id. Only the id is not: it is a UUID of version 7, and the engine holds every event with another.
//!
//! ```json
//! {"eventId":"01890a5d-ac96-774b-bcce-b302099a8057","eventType":"stock.requested.v1","sku":"A-1","quantity":2}
//! ```
//!
//! ```sh
//! psql "$ONCEWARD_DATABASE_URL" -f examples/stock.sql
//! export ONCEWARD_KAFKA_BROKERS=localhost:9092 ONCEWARD_KAFKA_TOPIC=stock.requested ONCEWARD_KAFKA_GROUP=stock ONCEWARD_PROVIDER_KIND=none
//! cargo run --example stock    # or --config FILE
//! ```

use std::process::ExitCode;

use diesel::prelude::*;
use diesel_async::RunQueryDsl;
use onceward::event::id;
use onceward::handler::{BatchContext, Claimed, Event, EventDigest, Handler, HeldReason, Outcome, Rejection};
use onceward::record::Record;
use onceward::store::{DbError, Session};
use serde::Deserialize;
use uuid::Uuid;

use self::schema::{stock, stock_reservation};

mod schema {
    diesel::table! {
        stock (sku) {
            sku -> Text,
            available -> BigInt,
        }
    }

    diesel::table! {
        stock_reservation (event_id) {
            event_id -> Uuid,
            sku -> Text,
            quantity -> BigInt,
            granted -> Bool,
        }
    }
}

/// The event, as its JSON has it.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct StockRequested {
    event_id: Uuid,
    event_type: String,
    sku: String,
    quantity: i64,
}

impl Event for StockRequested {
    fn id(&self) -> Uuid {
        self.event_id
    }

    /// Every field that means something, each at a place of its own. It is stored: another form needs another version.
    fn digest(&self) -> EventDigest {
        let form = [self.event_id.as_bytes(), &self.quantity.to_le_bytes()[..], self.sku.as_bytes()].concat();
        EventDigest::of(1, &form)
    }
}

/// The handler.
struct Stock;

impl Handler for Stock {
    type Event = StockRequested;
    type Answer = ();

    fn decode(&self, record: &Record) -> Result<StockRequested, Rejection> {
        let rejection = |reason, error, event_id| Rejection { reason, error, event_id };
        let payload = record.payload.as_deref().unwrap_or_default();
        let event: StockRequested = serde_json::from_slice(payload)
            .map_err(|error| rejection(HeldReason::Undecodable, format!("no stock.requested.v1: {error}"), None))?;
        // All faults together, for whoever has to correct the producer.
        let rules = [
            (event.event_type == "stock.requested.v1", "eventType must be stock.requested.v1".to_owned()),
            (!event.sku.is_empty(), "sku must not be empty".to_owned()),
            (event.quantity > 0, format!("quantity must be above 0, not {}", event.quantity)),
        ];
        let mut faults: Vec<String> = rules.into_iter().filter(|(holds, _)| !holds).map(|(_, fault)| fault).collect();
        faults.extend(id::version_seven(event.event_id).err().map(|fault| format!("eventId is {fault}")));
        if faults.is_empty() { Ok(event) } else { Err(rejection(HeldReason::Invalid, faults.join("; "), Some(event.event_id))) }
    }

    /// Records are keyed by article, so one partition has all of an article's events, and no other transaction waits for its row.
    async fn apply(
        &self,
        tx: &mut Session,
        _: &BatchContext<()>,
        events: &[Claimed<StockRequested>],
    ) -> Result<Vec<Outcome>, DbError> {
        let (mut outcomes, mut rows) = (Vec::new(), Vec::new());
        for wanted in events.iter().map(Claimed::event) {
            let enough = stock::table.filter(stock::sku.eq(&wanted.sku)).filter(stock::available.ge(wanted.quantity));
            let taken =
                diesel::update(enough).set(stock::available.eq(stock::available - wanted.quantity)).execute(&mut **tx).await;
            let granted = taken.map_err(|error| tx.db_error("take from the stock", error))? == 1;
            rows.push((
                stock_reservation::event_id.eq(wanted.event_id),
                stock_reservation::sku.eq(&wanted.sku),
                stock_reservation::quantity.eq(wanted.quantity),
                stock_reservation::granted.eq(granted),
            ));
            // A "no" of the business is an outcome like any other: it is written down and settled.
            outcomes.push(if granted { Outcome::Applied } else { Outcome::Declined });
        }
        let written = diesel::insert_into(stock_reservation::table).values(rows).execute(&mut **tx).await;
        written.map_err(|error| tx.db_error("write the reservations", error))?;
        Ok(outcomes)
    }
}

fn main() -> ExitCode {
    onceward::engine::main(Stock)
}
