//! What librdkafka says, in our log.
//!
//! In: its log lines and errors. Out: ours, calmer: it recovers from nearly everything by itself, and says the same a hundred times in a
//! millisecond while no broker answers. It owns the time of the last line per error code. If it dies here, only words are missing.
//!
//! Invariant: one error code makes one line per ten seconds at most, and every error is counted.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rdkafka::config::RDKafkaLogLevel;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use tracing::{debug, error, info, warn};

use crate::metrics;
use crate::pipeline::connection;
use crate::text::printable;

/// How long an error is left out after it was logged.
const QUIET: Duration = Duration::from_secs(10);

/// The errors seen so far; as many as there are codes.
#[derive(Debug, Default)]
pub struct ClientLog(Mutex<Vec<Seen>>);

#[derive(Debug)]
struct Seen {
    code: Option<RDKafkaErrorCode>,
    logged: Instant,
    left_out: u64,
}

impl ClientLog {
    /// One of librdkafka's own lines.
    pub fn line(level: RDKafkaLogLevel, facility: &str, line: &str) {
        // What brokers and other members say may be in it.
        let line = printable(line);
        match level {
            RDKafkaLogLevel::Emerg | RDKafkaLogLevel::Alert | RDKafkaLogLevel::Critical => {
                error!(target: "librdkafka", facility, "{line}");
            }
            // Its errors are a broker's absence and the like: it tries again.
            RDKafkaLogLevel::Error | RDKafkaLogLevel::Warning => warn!(target: "librdkafka", facility, "{line}"),
            RDKafkaLogLevel::Notice => info!(target: "librdkafka", facility, "{line}"),
            RDKafkaLogLevel::Info | RDKafkaLogLevel::Debug => debug!(target: "librdkafka", facility, "{line}"),
        }
    }

    /// An error of the client, whoever decides what follows from it.
    pub fn error(&self, error: &KafkaError, reason: &str) {
        metrics::client_error();
        if let Some(left_out) = self.due(error.rdkafka_error_code(), Instant::now()) {
            let todo = error.rdkafka_error_code().and_then(|code| connection::todo_about(code, reason));
            warn!(target: "librdkafka", %error, reason, todo, left_out, "Kafka client");
        }
    }

    /// Whether this error is to be logged now, and how many like it were left out since the last line.
    fn due(&self, code: Option<RDKafkaErrorCode>, now: Instant) -> Option<u64> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(seen) = all.iter_mut().find(|seen| seen.code == code) else {
            all.push(Seen { code, logged: now, left_out: 0 });
            return Some(0);
        };
        if now.duration_since(seen.logged) < QUIET {
            seen.left_out += 1;
            return None;
        }
        seen.logged = now;
        Some(std::mem::take(&mut seen.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOWN: Option<RDKafkaErrorCode> = Some(RDKafkaErrorCode::AllBrokersDown);

    #[test]
    fn a_burst_of_one_error_is_one_line_and_the_next_line_counts_the_rest() {
        let (log, start) = (ClientLog::default(), Instant::now());
        assert_eq!(log.due(DOWN, start), Some(0));
        for millisecond in 1..100 {
            assert_eq!(log.due(DOWN, start + Duration::from_millis(millisecond)), None);
        }
        assert_eq!(log.due(DOWN, start + QUIET), Some(99));
        assert_eq!(log.due(DOWN, start + QUIET * 2), Some(0));
    }

    #[test]
    fn another_error_is_not_left_out() {
        let (log, start) = (ClientLog::default(), Instant::now());
        assert_eq!(log.due(DOWN, start), Some(0));
        assert_eq!(log.due(Some(RDKafkaErrorCode::BrokerTransportFailure), start), Some(0));
    }
}
