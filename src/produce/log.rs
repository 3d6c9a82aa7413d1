//! The producer's log: what is in the topic, and where.
//!
//! In: one delivered record. Out: one JSON line. It owns the file, to which it only appends, so that several runs add up. If it dies
//! here, the last buffer is missing and the last line may be cut; a reader says so.
//!
//! Invariant: a line is written only for a record that was acknowledged.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write as _};
use std::path::Path;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::ProduceError;
use crate::event;
use crate::handler::{Event as _, HeldReason};

/// One record. Order, amount, currency and digest are there for a valid event; the others have a `fault`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LogLine {
    /// Canonical; also of an invalid event, where it could be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub event_id: Option<Uuid>,
    /// Where it landed.
    pub partition: i32,
    /// Where it landed.
    pub offset: i64,
    /// The order.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub order: Option<i64>,
    /// The exact amount with the currency's decimals.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub amount: Option<String>,
    /// Its code.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub currency: Option<String>,
    /// The event's digest: tells a repeated event from a conflicting one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub digest: Option<i64>,
    /// `undecodable` or `invalid`: no event.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fault: Option<String>,
}

impl LogLine {
    pub(crate) fn of(partition: i32, offset: i64, payload: Option<&[u8]>) -> Self {
        match event::decode(payload) {
            Ok(event) => Self {
                event_id: Some(event.event_id),
                partition,
                offset,
                order: Some(event.order_id),
                amount: Some(event.total.decimal()),
                currency: Some(event.total.currency().code().to_owned()),
                digest: Some(event.digest().0),
                fault: None,
            },
            Err(rejection) => Self {
                event_id: rejection.event_id,
                partition,
                offset,
                fault: Some(HeldReason::as_str(rejection.reason).to_owned()),
                ..Self::default()
            },
        }
    }
}

pub(super) struct Log {
    file: BufWriter<File>,
    failure: Option<io::Error>,
}

pub(super) fn open(path: &Path) -> Result<Log, ProduceError> {
    let file = OpenOptions::new().create(true).append(true).open(path);
    let file = file.map_err(|error| ProduceError::File { path: path.to_owned(), error })?;
    Ok(Log { file: BufWriter::new(file), failure: None })
}

impl Log {
    /// The first failure is kept for [`Self::finish`]: a delivery report has nobody to tell.
    pub(super) fn write(&mut self, line: &LogLine) {
        if self.failure.is_none() {
            let written =
                serde_json::to_writer(&mut self.file, line).map_err(io::Error::from).and_then(|()| self.file.write_all(b"\n"));
            self.failure = written.err();
        }
    }

    pub(super) fn finish(&mut self) -> io::Result<()> {
        self.failure.take().map_or_else(|| self.file.flush(), Err)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_tells_what_landed_and_where() {
        let event = r#"{"eventId":"01890A5D-AC96-774B-BCCE-B302099A8057","eventType":"order.confirmed.v1","occurredAt":"2023-06-29T12:34:56.789Z",
            "orderId":42,"customerId":7,"totalAmount":1e1,"currency":"EUR"}"#;
        let line = |payload: &str| serde_json::to_string(&LogLine::of(3, 17, Some(payload.as_bytes()))).unwrap();
        assert_eq!(
            line(event),
            r#"{"event_id":"01890a5d-ac96-774b-bcce-b302099a8057","partition":3,"offset":17,"order":42,"amount":"10.00","currency":"EUR","digest":-6596412271418776319}"#
        );
        let invalid = event.replace("42", "0");
        assert_eq!(
            line(&invalid),
            r#"{"event_id":"01890a5d-ac96-774b-bcce-b302099a8057","partition":3,"offset":17,"fault":"invalid"}"#
        );
        assert_eq!(line("{"), r#"{"partition":3,"offset":17,"fault":"undecodable"}"#);
        assert_eq!(serde_json::from_str::<LogLine>(&line(event)).unwrap(), LogLine::of(3, 17, Some(event.as_bytes())));
    }
}
