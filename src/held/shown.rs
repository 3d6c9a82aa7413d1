//! A held event for people and machines.
//!
//! Invariant: an outline has nothing in it that came with the record or was written by a person.

use std::fmt::Write as _;

use chrono::{DateTime, SecondsFormat, Utc};
use serde_json::{Value, json};

use crate::record::Header;
use crate::store::held_requests::HeldRow;

/// A row whole: nothing of the record is left out.
#[must_use]
pub fn json_of(row: &HeldRow) -> Value {
    let headers = |header: &Header| json!([bytes(&header.0), header.1.as_deref().map(bytes)]);
    let mut whole = outline_of(row);
    let record = json!({
        "timestamp_ms": row.record.timestamp_ms,
        "error": row.error,
        "owns_claim": row.owns_claim,
        "actor": row.actor,
        "note": row.note,
        "key": row.record.key.as_deref().map(bytes),
        "headers": row.record.headers.iter().map(headers).collect::<Vec<_>>(),
        "payload": row.record.payload.as_deref().map(bytes),
    });
    if let (Value::Object(whole), Value::Object(record)) = (&mut whole, record) {
        whole.extend(record);
    }
    whole
}

/// A row without anything that people have written: not the record, nor an error that may quote it, nor a note.
#[must_use]
pub fn outline_of(row: &HeldRow) -> Value {
    json!({
        "id": row.id,
        "partition": row.record.partition,
        "offset": row.record.offset.0,
        "event_id": row.event_id.map(|id| id.to_string()),
        "reason": row.reason.as_str(),
        "state": row.state.as_str(),
        "attempts": row.attempts,
        "held_at": time(row.held_at),
        "next_attempt_at": row.next_attempt_at.map(time),
        "relayed_at": row.relayed_at.map(time),
        "wanted": row.wanted,
    })
}

/// Bytes as digits.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}

/// A moment for people and machines, in one way everywhere.
#[must_use]
pub fn time(time: DateTime<Utc>) -> String {
    time.to_rfc3339_opts(SecondsFormat::Millis, true)
}

/// A text as it is; other bytes as an object with their digits.
fn bytes(bytes: &[u8]) -> Value {
    std::str::from_utf8(bytes).map_or_else(|_| json!({ "hex": hex(bytes) }), Value::from)
}
