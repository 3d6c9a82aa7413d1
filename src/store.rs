//! All that is PostgreSQL: every statement, every transaction, every connection.
//!
//! In: rows to write and ids to look up. Out: what the database said, or a [`DbError`] that knows its SQLSTATE. It owns the pools and
//! the schema. If it dies here, the server rolls back whatever was not committed.
//!
//! Invariant: a connection is either between transactions and known to be, or it is closed; nobody is handed anything else.

mod connect;
mod encryption;
mod error;
mod migrate;
#[doc(hidden)]
pub mod packed_headers;
mod schema;
mod session;
mod statement;
mod tap;
mod url;

#[doc(hidden)]
pub mod attempts;
#[cfg(feature = "lab")]
#[doc(hidden)]
pub mod batch_text;
#[doc(hidden)]
pub mod conditions;
#[doc(hidden)]
pub mod consumed_partitions;
#[doc(hidden)]
pub mod dead_letters;
#[doc(hidden)]
pub mod forgetting;
#[doc(hidden)]
pub mod held_events;
#[doc(hidden)]
pub mod held_requests;
#[doc(hidden)]
pub mod held_turns;
#[doc(hidden)]
pub mod horizon_claims;
#[doc(hidden)]
pub mod numeric;
#[doc(hidden)]
pub mod old_claims;
#[doc(hidden)]
pub mod operator_actions;
#[doc(hidden)]
pub mod overview;
#[doc(hidden)]
pub mod payments;
#[doc(hidden)]
pub mod processed_events;
#[doc(hidden)]
pub mod reconcile;
#[doc(hidden)]
pub mod retention;
#[doc(hidden)]
pub mod skips;

use std::time::{Duration, SystemTime};

use crate::config::Secret;
use crate::event::id::unix_ms_of;

pub use self::error::{DbError, ErrorClass};
#[doc(hidden)]
pub use self::migrate::{MigrateError, migrate, schema_is_current};
pub use self::session::Session;
#[doc(hidden)]
pub use self::session::{ConnectionAbort, Pool, PooledSession, SessionManager, TimeLimits, TransactionError};
#[doc(hidden)]
pub use self::url::{DatabaseUrl, Encryption};

/// How rows are inserted whose keys may be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// By a plain `INSERT`: a taken key is an error ([`DbError::is_taken`]), and the transaction is to be rolled back.
    Optimistic,
    /// With `ON CONFLICT DO NOTHING`: what is taken stays as it is.
    OnConflict,
}

/// What the store must be told.
#[doc(hidden)]
#[derive(Clone, Debug)]
pub struct Settings {
    /// `postgres://user:password@host1:5432,host2:5432/database`, or libpq's `key=value` form.
    pub url: Secret,
    /// The longest wait for one host to answer, its handshakes included.
    pub connect_timeout: Duration,
    /// The longest wait for a pooled connection that somebody else holds.
    pub pool_wait: Duration,
    /// The limits of the store's own transactions.
    pub limits: TimeLimits,
}

/// The pools. They are apart so that neither an attempt nor a bump ever waits for a batch that waits for it.
#[doc(hidden)]
#[derive(Clone, Debug)]
pub struct Store {
    /// For the transactions that claim and settle: one per partition that may be inside one at once.
    pub claims: Pool,
    /// For the attempts that must be durable while such a transaction is open: as many.
    pub attempts: Pool,
    /// For bumps, days, migrations of left-overs and questions.
    pub control: Pool,
}

/// Bumps must not wait for each other's locks for long; more than this many at once do.
const CONTROL_CONNECTIONS: usize = 2;

impl Store {
    /// Makes the pools. Nothing is connected yet: each connection is made when it is first needed.
    ///
    /// # Errors
    /// The URL cannot be understood, or a file of it cannot be used.
    pub fn connect(settings: &Settings, partition_concurrency: usize) -> Result<Self, DbError> {
        let server = connect::Server::new(settings)?;
        let pool = |size| session::pool(server.clone(), settings, size);
        Ok(Self {
            claims: pool(partition_concurrency)?,
            attempts: pool(partition_concurrency)?,
            control: pool(CONTROL_CONNECTIONS)?,
        })
    }
}

/// A text that PostgreSQL takes whatever a stranger wrote: without NUL, and cut.
fn storable(text: &str) -> String {
    const MAX_CHARACTERS: usize = 2_000;
    text.chars().filter(|character| *character != '\0').take(MAX_CHARACTERS).collect()
}

/// For SQL. A century stands for "never": more would overflow the server's clock.
fn milliseconds(duration: Duration) -> i64 {
    const CENTURY: i64 = 100 * 365 * 24 * 60 * 60 * 1000;
    i64::try_from(duration.as_millis()).map_or(CENTURY, |ms| ms.min(CENTURY))
}

/// This process's time, in milliseconds since 1970.
fn our_time() -> i64 {
    unix_ms_of(SystemTime::now())
}

/// From SQL; a time that lies behind is zero.
fn duration(milliseconds: i64) -> Duration {
    Duration::from_millis(u64::try_from(milliseconds).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    // CASES E12
    #[test]
    fn no_text_is_too_strange_to_store() {
        assert_eq!(storable("a\0b\u{7f}é"), "ab\u{7f}é");
        assert_eq!(storable(&"é\0".repeat(5_000)).chars().count(), 2_000);
    }
}
