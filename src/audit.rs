//! Does it add up? The one reconciler, for operators, for tests and for the demo.
//!
//! In: the producer's log (optional), the database, the provider's ledger (optional). Out: a [`Report`]. It owns nothing and changes
//! nothing. What the group has not read yet does not add up, and is not called lost.
//!
//! Invariant: nothing that the engine says of itself is believed; only the log, the rows and the ledger count.

mod report;
mod traces;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use url::Url;

pub use self::report::{Report, grouped};
use self::traces::{Booking, Content, Reconciliation};
use crate::produce::LogLine;
use crate::record::{Offset, Skips};
use crate::store::consumed_partitions;
use crate::store::reconcile::{self, Trace};
use crate::store::{DbError, Store, skips};

/// What to reconcile.
#[derive(Clone, Debug)]
pub struct Options {
    /// The consumer group whose claims and held events are read.
    pub group: String,
    /// The topic.
    pub topic: String,
    /// The log that `produce` wrote. Without it, nobody can say what is lost.
    pub log: Option<PathBuf>,
    /// The provider's base address; the ledger is read from `<url>/v1/ledger`. Without it, nobody can say what was charged twice.
    pub ledger: Option<Url>,
    /// The ledger counts amounts in the smallest unit, as `provider.amount = "minor_units"` posts them.
    pub ledger_in_minor_units: bool,
}

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub enum AuditError {
    /// The log cannot be read.
    #[error("{path}: {error}", path = path.display())]
    Log {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// A line is not what `produce` or the provider writes; the last one may be cut.
    #[error("{source_name}, line {line}: {error}")]
    Line {
        /// The log or the ledger.
        source_name: String,
        /// Counted from 1.
        line: u64,
        /// What is wrong with it.
        error: String,
    },
    /// The database.
    #[error("database: {0}")]
    Database(#[from] DbError),
    /// The provider's ledger.
    #[error("ledger: {0}")]
    Ledger(#[from] reqwest::Error),
}

/// What operators want passed over, by partition.
type PassedOver = BTreeMap<i32, Skips>;

/// Reads everything and reconciles it. The log is read on the calling thread.
///
/// # Errors
/// One of the sources cannot be read, or holds what nobody writes there. What does not add up is no error: see [`Report::adds_up`].
pub async fn run(store: &Store, options: &Options) -> Result<Report, AuditError> {
    let mut reconciliation = Reconciliation::default();
    let mut session = store.control.get().await.map_err(DbError::from)?;
    // Before the rows: what is settled by now must be among them.
    for (partition, next) in consumed_partitions::positions(&mut session, &options.group, &options.topic).await? {
        reconciliation.settled_below(partition, next.0);
    }
    if let Some(path) = &options.log {
        let positions = skips::positions(&mut session, &options.group, &options.topic).await?;
        let passed_over = positions.into_iter().map(|position| (position.partition, position.skips)).collect();
        read_log(path, &passed_over, &mut reconciliation)?;
    }
    let mut see = |trace| match trace {
        Trace::Claim { event_id, of_group } => reconciliation.claim(event_id, of_group),
        Trace::Payment { event_id, order_id, amount, currency, status } => {
            reconciliation.payment(event_id, status, Content::of(order_id, &amount, &currency, false));
        }
        Trace::Held { event_id, partition, offset, reason, state } => {
            reconciliation.held(event_id, partition, offset, reason, state)
        }
    };
    let floor = reconcile::read(&mut session, &options.group, &options.topic, &mut see).await?;
    if let Some(url) = &options.ledger {
        read_ledger(url, options.ledger_in_minor_units, &mut reconciliation).await?;
    }
    Ok(reconciliation.report(floor))
}

fn read_log(path: &Path, passed_over: &PassedOver, reconciliation: &mut Reconciliation) -> Result<(), AuditError> {
    let failed = |error| AuditError::Log { path: path.to_owned(), error };
    reconciliation.with_log();
    for (number, line) in (1..).zip(BufReader::new(File::open(path).map_err(failed)?).lines()) {
        let line = line.map_err(failed)?;
        log_line(&line, passed_over, reconciliation).map_err(|error| AuditError::Line {
            source_name: path.display().to_string(),
            line: number,
            error,
        })?;
    }
    Ok(())
}

fn log_line(line: &str, passed_over: &PassedOver, reconciliation: &mut Reconciliation) -> Result<(), String> {
    let line: LogLine = serde_json::from_str(line).map_err(|error| error.to_string())?;
    let wanted = !passed_over.get(&line.partition).is_some_and(|skips| skips.contain(Offset(line.offset)));
    match line {
        LogLine { fault: Some(_), partition, offset, .. } => reconciliation.logged_poison(partition, offset, wanted),
        LogLine {
            event_id: Some(id),
            order: Some(order),
            amount: Some(amount),
            currency: Some(currency),
            digest: Some(digest),
            partition,
            offset,
            ..
        } => {
            let content = Content::of(order, &amount, &currency, false);
            reconciliation.logged_event((partition, offset), id, digest, content, wanted);
        }
        _ => return Err("neither an event nor a fault".to_owned()),
    }
    Ok(())
}

/// One line of the provider's ledger.
#[derive(Deserialize)]
struct LedgerLine {
    idempotency_key: String,
    order_id: i64,
    amount: String,
    currency: String,
    status: LedgerStatus,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum LedgerStatus {
    Charged,
    Declined,
    Failed,
}

async fn read_ledger(url: &Url, in_minor_units: bool, reconciliation: &mut Reconciliation) -> Result<(), AuditError> {
    /// A longer line is no ledger's.
    const MAX_LINE: usize = 64 << 10;
    /// The ledger may be long; silence may not.
    const SILENCE: Duration = Duration::from_secs(30);
    // An error means that it is installed already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let client = reqwest::Client::builder().connect_timeout(SILENCE).read_timeout(SILENCE).no_proxy().build()?;
    let address = format!("{}/v1/ledger", url.as_str().trim_end_matches('/'));
    let mut response = client.get(&address).send().await?.error_for_status()?;
    reconciliation.with_ledger();
    let (mut rest, mut number) = (Vec::new(), 0);
    loop {
        let chunk = response.chunk().await?;
        let is_end = chunk.is_none();
        rest.extend_from_slice(&chunk.unwrap_or_default());
        let mut lines = rest.split(|byte| *byte == b'\n').peekable();
        let mut unread = 0;
        while let Some(line) = lines.next() {
            let is_whole = is_end || lines.peek().is_some();
            if !is_whole && line.len() <= MAX_LINE {
                unread = line.len();
                break;
            }
            number += 1;
            ledger_line(line, in_minor_units, reconciliation).map_err(|error| AuditError::Line {
                source_name: address.clone(),
                line: number,
                error,
            })?;
        }
        if is_end {
            return Ok(());
        }
        rest.drain(..rest.len() - unread);
    }
}

fn ledger_line(line: &[u8], in_minor_units: bool, reconciliation: &mut Reconciliation) -> Result<(), String> {
    if line.is_empty() {
        return Ok(());
    }
    let line: LedgerLine = serde_json::from_slice(line).map_err(|error| error.to_string())?;
    let booking = match line.status {
        LedgerStatus::Charged => Booking::Charged,
        LedgerStatus::Declined => Booking::Declined,
        LedgerStatus::Failed => Booking::Failed,
    };
    let content = Content::of(line.order_id, &line.amount, &line.currency, in_minor_units);
    reconciliation.booking(&line.idempotency_key, booking, content);
    Ok(())
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    const EVENT: &str = r#"{"event_id":"01890a5d-ac96-774b-bcce-b302099a8057","partition":3,"offset":17,"order":42,"amount":"10.00","currency":"EUR","digest":-6}"#;
    const BOOKING: &str = r#"{"idempotency_key":"01890a5d-ac96-774b-bcce-b302099a8057","charge_id":"ch_1","order_id":42,"amount":"10.00","currency":"EUR","times_posted":2,"status":"charged"}"#;

    /// The body in pieces that do not respect lines, as a network gives them.
    async fn report_of(pieces: Vec<Vec<u8>>) -> Result<Report, AuditError> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = Url::parse(&format!("http://{}/", listener.local_addr().unwrap())).unwrap();
        let serve = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let (mut request, mut byte) = (Vec::new(), [0]);
            while !request.ends_with(b"\r\n\r\n") {
                stream.read_exact(&mut byte).await.unwrap();
                request.push(byte[0]);
            }
            assert!(request.starts_with(b"GET /v1/ledger HTTP/1.1\r\n"));
            stream.write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n").await.unwrap();
            for piece in pieces {
                let head = format!("{:x}\r\n", piece.len());
                stream.write_all(&[head.as_bytes(), &piece, b"\r\n"].concat()).await.unwrap();
            }
            stream.write_all(b"0\r\n\r\n").await.unwrap();
            stream
        };
        let mut reconciliation = Reconciliation::default();
        let (read, _) = tokio::join!(read_ledger(&url, false, &mut reconciliation), serve);
        read.map(|()| reconciliation.report(None))
    }

    #[tokio::test]
    async fn a_ledger_is_read_in_pieces_of_any_size() {
        let body = format!("{BOOKING}\n{}\n{BOOKING}", BOOKING.replace("8057", "8058"));
        for size in [1, 7, 100, 10_000] {
            let report = report_of(body.as_bytes().chunks(size).map(<[u8]>::to_vec).collect()).await.unwrap();
            assert_eq!(report.double_charges, Some(1), "{size}");
        }
        assert_eq!(report_of(Vec::new()).await.unwrap().double_charges, Some(0));
    }

    #[tokio::test]
    async fn a_line_that_is_no_booking_is_named() {
        let error = report_of(vec![format!("{BOOKING}\n{{}}\n").into_bytes()]).await.unwrap_err();
        assert!(error.to_string().contains("/v1/ledger, line 2: missing field"), "{error}");
        let error = report_of(vec![vec![b'x'; 100_000], vec![b'x'; 100_000]]).await.unwrap_err();
        assert!(matches!(error, AuditError::Line { line: 1, .. }), "{error}");
    }

    #[test]
    fn what_is_passed_over_is_not_lost_unless_it_also_stands_where_it_is_wanted() {
        let passed_over = PassedOver::from([(3, Skips::new(vec![(17, 19)]))]);
        let told = |lines: &[&str]| {
            let mut reconciliation = Reconciliation::default();
            reconciliation.settled_below(3, 100);
            reconciliation.with_log();
            lines.iter().for_each(|line| log_line(line, &passed_over, &mut reconciliation).unwrap());
            let report = reconciliation.report(None);
            (report.lost, report.passed_over, report.adds_up())
        };
        assert_eq!(told(&[EVENT, r#"{"partition":3,"offset":18,"fault":"undecodable"}"#]), (Some(0), 1, true));
        let elsewhere = EVENT.replace("\"offset\":17", "\"offset\":20");
        assert_eq!(told(&[EVENT, &elsewhere]), (Some(1), 0, false));
    }

    #[test]
    fn a_line_of_the_log_is_an_event_or_a_fault() {
        let mut reconciliation = Reconciliation::default();
        reconciliation.settled_below(3, 19);
        reconciliation.with_log();
        log_line(EVENT, &PassedOver::new(), &mut reconciliation).unwrap();
        log_line(r#"{"partition":3,"offset":18,"fault":"undecodable"}"#, &PassedOver::new(), &mut reconciliation).unwrap();
        for cut in [
            &EVENT[..EVENT.len() - 1],
            r#"{"partition":3,"offset":18}"#,
            r#"{"partition":3,"offset":18,"fault":"invalid","x":1}"#,
            "",
        ] {
            assert!(log_line(cut, &PassedOver::new(), &mut reconciliation).is_err(), "{cut}");
        }
        let report = reconciliation.report(None);
        assert_eq!((report.produced, report.distinct, report.lost), (Some(2), Some(1), Some(1)));
    }
}
