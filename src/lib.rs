//! onceward applies each business event from a Kafka topic **once**: the claim of its id, the rows of its effect and the position of its
//! partition are one PostgreSQL transaction, whatever is killed, restarted, rebalanced or replayed. The program `onceward` charges a payment
//! provider for confirmed orders; this library is the same engine with a [`Handler`](handler::Handler) of yours.
//!
//! # A handler
//!
//! It says what a record means and which rows an event writes. Everything else is the engine's.
//!
//! ```no_run
//! use onceward::diesel::sql_types;
//! use onceward::diesel_async::RunQueryDsl as _;
//! use onceward::event::{self, OrderConfirmed};
//! use onceward::handler::{BatchContext, Claimed, Handler, Outcome, Rejection};
//! use onceward::record::Record;
//! use onceward::store::{DbError, Session};
//!
//! /// Writes down every confirmed order.
//! struct Journal;
//!
//! impl Handler for Journal {
//!     type Event = OrderConfirmed;
//!     type Answer = (); // nobody is asked
//!
//!     fn decode(&self, record: &Record) -> Result<OrderConfirmed, Rejection> {
//!         event::decode(record.payload.as_deref())
//!     }
//!
//!     async fn apply(
//!         &self,
//!         tx: &mut Session,
//!         _: &BatchContext<()>,
//!         events: &[Claimed<OrderConfirmed>],
//!     ) -> Result<Vec<Outcome>, DbError> {
//!         for order in events.iter().map(Claimed::event) {
//!             let insert = onceward::diesel::sql_query("INSERT INTO journal (event_id, order_id) VALUES ($1, $2)")
//!                 .bind::<sql_types::Uuid, _>(order.event_id)
//!                 .bind::<sql_types::BigInt, _>(order.order_id);
//!             insert.execute(&mut **tx).await.map_err(|error| tx.db_error("write the journal", error))?;
//!         }
//!         Ok(vec![Outcome::Applied; events.len()])
//!     }
//! }
//!
//! /// `journal --config onceward.toml`, until SIGTERM.
//! fn main() -> std::process::ExitCode {
//!     onceward::engine::main(Journal)
//! }
//! ```
//!
//! Longer ones stand in `examples/`: `ledger` (rows with Diesel), `notify` (a downstream that is asked by HTTP) and `stock` (an event type of
//! its own). The feature `lab` has `testing`, with which a test of yours kills an engine with your handler at any step and counts.
//!
//! # Where the guarantee ends
//!
//! - **Rows written through the session are once.** What a handler does elsewhere is as often as it does it: a downstream must know the event
//!   id as idempotency key, and what it answered belongs into [`Answers`](handler::Answers) at once.
//! - **The id is a UUID of version 7**; an event with any other is held. Ids are forgotten by their age: an older event is held, unless
//!   [`Handler::traces`](handler::Handler::traces) knows it.
//! - **One topic and one group per engine.** Claims are kept per group: two groups apply each event once each.
//! - **Order is kept by key within a partition**, as far as the handler returns [`Outcome::Behind`](handler::Outcome::Behind).
//! - A handler that swallows an error of the session commits nothing: the server has rolled back, and the engine notices.
//!
//! # What may change
//!
//! Semantic versioning covers what these pages show: [`engine`], [`handler`], [`event`], [`record`], [`trace_context`], [`config`], what is shown of [`store`],
//! `testing`, and the re-exported crates, whose major versions are part of it. The configuration's keys, metrics and tables are covered
//! as the changelog says. Everything else is public for this package's own binaries, tests and benches, hidden here, and may change in any release.

// The modules stand in the order a record travels, before them a producer, around them what all of them need. A module that is not hidden is a
// promise: `the_public_modules_are_those_that_the_documentation_promises` lists them.

pub mod record;
pub mod trace_context;

pub mod event;
pub mod handler;

#[doc(hidden)]
pub mod billing;

#[doc(hidden)]
pub mod actions;
#[doc(hidden)]
pub mod held;
#[doc(hidden)]
pub mod pipeline;
#[doc(hidden)]
pub mod retention;

#[doc(hidden)]
pub mod provider;
pub mod store;

#[doc(hidden)]
pub mod produce;

#[doc(hidden)]
pub mod audit;

#[doc(hidden)]
pub mod certificate;

#[doc(hidden)]
pub mod admin;
#[doc(hidden)]
pub mod app;
#[doc(hidden)]
pub mod cli;
pub mod config;
pub mod engine;
mod log;
#[doc(hidden)]
pub mod metrics;
mod overview;
mod progress;
#[doc(hidden)]
pub mod rotating;
mod span;
#[doc(hidden)]
pub mod spans;
#[doc(hidden)]
pub mod status;
mod text;
#[doc(hidden)]
pub mod tls;

#[doc(hidden)]
pub mod crash;

#[cfg(feature = "lab")]
#[doc(hidden)]
pub mod lab;
#[cfg(feature = "lab")]
pub mod testing;

// Their types stand in signatures of ours.
pub use {anyhow, chrono, diesel, diesel_async, url, uuid};

#[cfg(test)]
mod tests_support;

#[cfg(test)]
mod tests {
    /// What stands in the documentation is promised, so that it grows by decision and not by accident.
    #[test]
    fn the_public_modules_are_those_that_the_documentation_promises() {
        let promised = |source: &str| {
            let lines: Vec<&str> = source.lines().map(str::trim).collect();
            let shown = lines.windows(2).filter(|pair| pair[0] != "#[doc(hidden)]");
            let names = shown.filter_map(|pair| pair[1].strip_prefix("pub mod ")?.strip_suffix(';'));
            names.map(str::to_owned).collect::<Vec<_>>()
        };
        let ours = ["record", "trace_context", "event", "handler", "store", "config", "engine", "testing"];
        assert_eq!(promised(include_str!("lib.rs")), ours);
        assert_eq!(promised(include_str!("store.rs")), <[&str; 0]>::default());
        assert_eq!(promised(include_str!("event.rs")), ["id"]);
    }
}
