//! The question whether the table of claims can keep its promise.
//!
//! In: nothing. Out: the columns of its primary key. It owns nothing.
//!
//! Invariant: what is not exactly (event id, group) is not called right: a key with the processing time in it takes the same id twice.

use diesel::sql_types::{Array, Text};

use super::statement::statement;
use super::{DbError, Session};

/// The columns of the primary key of `processed_event`, sorted; none when there is no such table or key.
///
/// # Errors
/// The statement failed.
pub async fn columns(s: &mut Session) -> Result<Vec<String>, DbError> {
    Ok(s.row("dedup_key", KeyColumns {}).await?.unwrap_or_default())
}

/// What [`columns`] must return.
pub const RIGHT: [&str; 2] = ["consumer_group", "event_id"];

statement! {
    KeyColumns {} -> Array<Text> {
        "SELECT array_agg(a.attname::text ORDER BY a.attname::text) FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY(i.indkey) \
         WHERE i.indrelid = to_regclass('processed_event') AND i.indisprimary AND i.indisvalid GROUP BY i.indexrelid"
    }
}
