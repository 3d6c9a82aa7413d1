//! The provider's ledger: a line of JSON per booking, in any order.
//!
//! In: the provider's address. Out: every line, handed on one by one. It owns its connection and one line.
//!
//! Invariant: a line that is cut off is an error, and so is a body that HTTP knows to be cut off; neither is a short ledger.

use std::time::Duration;

use serde::Deserialize;
use url::Url;

use super::AuditError;
use super::entry::{Booking, Content};
use crate::rotating::Files;
use crate::tls::Tls;

/// One line of the provider's ledger.
#[derive(Deserialize)]
struct Line {
    idempotency_key: String,
    order_id: i64,
    amount: String,
    currency: String,
    status: Status,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Status {
    Charged,
    Declined,
    Failed,
}

/// Hands every booking to `see`, with its key and its content.
pub(super) async fn read(
    url: &Url,
    tls: &Tls,
    in_minor_units: bool,
    mut see: impl FnMut(&str, Booking, Option<Content>) -> Result<(), AuditError>,
) -> Result<(), AuditError> {
    /// A longer line is no ledger's.
    const MAX_LINE: usize = 64 << 10;
    /// The ledger may be long; silence may not.
    const SILENCE: Duration = Duration::from_secs(30);
    let builder = reqwest::Client::builder().connect_timeout(SILENCE).read_timeout(SILENCE).no_proxy();
    let client = tls.of_http(builder, url, &mut Files::default())?.build()?;
    let address = format!("{}/v1/ledger", url.as_str().trim_end_matches('/'));
    let mut response = client.get(&address).send().await?.error_for_status()?;
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
            if !line.is_empty() {
                let faulty = |error| AuditError::Line { source_name: address.clone(), line: number, error };
                let (key, booking, content) = booking(line, in_minor_units).map_err(faulty)?;
                see(&key, booking, content)?;
            }
        }
        if is_end {
            return Ok(());
        }
        rest.drain(..rest.len() - unread);
    }
}

fn booking(line: &[u8], in_minor_units: bool) -> Result<(String, Booking, Option<Content>), String> {
    let line: Line = serde_json::from_slice(line).map_err(|error| error.to_string())?;
    let booking = match line.status {
        Status::Charged => Booking::Charged,
        Status::Declined => Booking::Declined,
        Status::Failed => Booking::Failed,
    };
    let content = Content::of(line.order_id, &line.amount, &line.currency, in_minor_units);
    Ok((line.idempotency_key, booking, content))
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    const BOOKING: &str = r#"{"idempotency_key":"01890a5d-ac96-774b-bcce-b302099a8057","charge_id":"ch_1","order_id":42,"amount":"10.00","currency":"EUR","times_posted":2,"status":"charged"}"#;

    /// The keys, of a body in pieces that do not respect lines, as a network gives them.
    async fn keys_of(pieces: Vec<Vec<u8>>) -> Result<Vec<String>, AuditError> {
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
        let mut keys = Vec::new();
        let see = |key: &str, booking, content| {
            assert_eq!((booking, content), (Booking::Charged, Content::of(42, "10.00", "EUR", false)));
            keys.push(key.to_owned());
            Ok(())
        };
        let tls = Tls::default();
        let (read, _) = tokio::join!(read(&url, &tls, false, see), serve);
        read.map(|()| keys)
    }

    #[tokio::test]
    async fn a_ledger_is_read_in_pieces_of_any_size() {
        let body = format!("{BOOKING}\n{}\n{BOOKING}", BOOKING.replace("8057", "8058"));
        for size in [1, 7, 100, 10_000] {
            let keys = keys_of(body.as_bytes().chunks(size).map(<[u8]>::to_vec).collect()).await.unwrap();
            let ends: Vec<&str> = keys.iter().map(|key| &key[32..]).collect();
            assert_eq!(ends, ["8057", "8058", "8057"], "{size}");
        }
        assert_eq!(keys_of(Vec::new()).await.unwrap(), Vec::<String>::new());
    }

    #[tokio::test]
    async fn a_line_that_is_no_booking_is_named() {
        let error = keys_of(vec![format!("{BOOKING}\n{{}}\n").into_bytes()]).await.unwrap_err();
        assert!(error.to_string().contains("/v1/ledger, line 2: missing field"), "{error}");
        let error = keys_of(vec![vec![b'x'; 100_000], vec![b'x'; 100_000]]).await.unwrap_err();
        assert!(matches!(error, AuditError::Line { line: 1, .. }), "{error}");
    }
}
