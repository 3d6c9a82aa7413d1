//! Just enough HTTP/1.1 to be lied over: keep-alive, `Content-Length` bodies, answers that can be cut in half.
//!
//! In: a socket. Out: whole requests; whole, half or no answers. A request beyond its bounds, or one that is no HTTP, ends the
//! connection. Invariant: a head is at most [`MAX_HEAD`] bytes, a body at most [`MAX_BODY`].

use std::io;
use std::time::{Duration, SystemTime};

use serde::Serialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::script::Reply;
use crate::trace_context::{TRACEPARENT, TRACESTATE};

const MAX_HEAD: usize = 16 * 1024;
const MAX_BODY: usize = 1024 * 1024;

/// One request, read to its end.
#[derive(Debug, Default)]
pub(super) struct Request {
    pub(super) method: String,
    pub(super) path: String,
    pub(super) body: Vec<u8>,
    /// `traceparent` and `tracestate`.
    pub(super) trace: (Option<String>, Option<String>),
    query: String,
    key: String,
    content_length: usize,
    close: bool,
}

/// One answer, with a body of known length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Response {
    pub(super) status: u16,
    content_type: String,
    retry_after: Option<String>,
    location: Option<String>,
    body: String,
}

pub(super) struct Connection {
    stream: TcpStream,
    buffer: Vec<u8>,
    /// The client asked for the connection to end with the answer.
    last: bool,
}

impl Connection {
    pub(super) fn new(stream: TcpStream) -> Self {
        // Without it, an answer waits for the client's delayed acknowledgement; where it cannot be set, only speed suffers.
        let _ = stream.set_nodelay(true);
        Self { stream, buffer: Vec::with_capacity(1024), last: false }
    }

    /// The next request, or `None` at an orderly end.
    pub(super) async fn next_request(&mut self) -> io::Result<Option<Request>> {
        let head_end = loop {
            if let Some(at) = find(&self.buffer, b"\r\n\r\n") {
                break at;
            }
            // A TLS handshake, for one, would be waited for in vain.
            if self.buffer.first().is_some_and(|first| !first.is_ascii_uppercase()) {
                return Err(malformed("no method"));
            }
            if self.buffer.len() > MAX_HEAD {
                return Err(malformed("head too long"));
            }
            if self.stream.read_buf(&mut self.buffer).await? == 0 {
                return if self.buffer.is_empty() { Ok(None) } else { Err(io::ErrorKind::UnexpectedEof.into()) };
            }
        };
        let mut request = parse_head(&self.buffer[..head_end])?;
        let end = head_end + 4 + request.content_length;
        while self.buffer.len() < end {
            if self.stream.read_buf(&mut self.buffer).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        request.body = self.buffer[head_end + 4..end].to_vec();
        self.buffer.drain(..end);
        self.last = request.close;
        Ok(Some(request))
    }

    /// Sends an answer; `None` when the connection is over.
    pub(super) async fn answer(mut self, response: &Response) -> Option<Self> {
        self.stream.write_all(&response.bytes()).await.ok()?;
        (!self.last).then_some(self)
    }

    /// Sends the head and half of the body, then ends the connection.
    pub(super) async fn answer_half(mut self, response: &Response) {
        let bytes = response.bytes();
        let half = bytes.len() - response.body.len().div_ceil(2);
        // The client may be gone already; then it got even less than half.
        let _ = self.stream.write_all(&bytes[..half]).await;
    }

    /// Sends the answer byte by byte, for as long as the client listens.
    pub(super) async fn drip(mut self, response: &Response, pause: Duration) -> Option<Self> {
        for byte in response.bytes() {
            tokio::time::sleep(pause).await;
            self.stream.write_all(&[byte]).await.ok()?;
        }
        (!self.last).then_some(self)
    }

    /// Waits until the client gives up.
    pub(super) async fn wait_for_close(mut self) {
        while let Ok(1..) = self.stream.read_buf(&mut self.buffer).await {
            if self.buffer.len() > MAX_HEAD {
                return;
            }
        }
    }

    pub(super) fn close(self, with_reset: bool) {
        if with_reset {
            reset(self.stream);
        }
    }
}

/// Closes by RST, so that the client sees a broken connection and no end.
pub(super) fn reset(stream: TcpStream) {
    // If it cannot be set, the connection ends in order: a milder lie.
    let _ = stream.set_zero_linger();
}

impl Request {
    /// `Idempotency-Key` as it was sent; empty when there is none.
    pub(super) fn key(&self) -> String {
        self.key.clone()
    }

    /// A query parameter, as it stands (keys and counts need no decoding).
    pub(super) fn query(&self, name: &str) -> Option<String> {
        self.query
            .split('&')
            .find_map(|pair| pair.split_once('=').filter(|(key, _)| *key == name))
            .map(|(_, value)| value.to_owned())
    }
}

impl Response {
    pub(super) fn json(value: &impl Serialize) -> Self {
        // Only this module's own structs come here, and none can fail to serialize.
        Self::with_body(200, "application/json", serde_json::to_string(value).unwrap_or_default())
    }

    pub(super) fn json_lines(values: &[impl Serialize]) -> Self {
        let mut body = String::new();
        for value in values {
            body.push_str(&serde_json::to_string(value).unwrap_or_default());
            body.push('\n');
        }
        Self::with_body(200, "application/x-ndjson", body)
    }

    pub(super) fn no_content() -> Self {
        Self::with_body(204, "application/json", String::new())
    }

    pub(super) fn error(status: u16, kind: &str, code: &str, message: &str) -> Self {
        let body = serde_json::json!({"error": {"type": kind, "code": code, "message": message}});
        Self::with_body(status, "application/json", body.to_string())
    }

    pub(super) fn key_in_use() -> Self {
        Self::error(409, "idempotency_error", "idempotency_key_in_use", "a request with this key is being worked on")
    }

    pub(super) fn other_body() -> Self {
        Self::error(422, "idempotency_error", "idempotency_key_reused", "this key was used with another body")
    }

    fn with_body(status: u16, content_type: &str, body: String) -> Self {
        Self { status, content_type: content_type.to_owned(), retry_after: None, location: None, body }
    }

    fn bytes(&self) -> Vec<u8> {
        use std::fmt::Write as _;
        let mut text = String::with_capacity(256 + self.body.len());
        // Writing to a String cannot fail.
        let _ = write!(text, "HTTP/1.1 {} {}\r\nContent-Type: {}\r\n", self.status, reason(self.status), self.content_type);
        if self.status != 204 {
            let _ = write!(text, "Content-Length: {}\r\n", self.body.len());
        }
        for (name, value) in [("Retry-After", &self.retry_after), ("Location", &self.location)] {
            if let Some(value) = value {
                let _ = write!(text, "{name}: {value}\r\n");
            }
        }
        text.push_str("\r\n");
        text.push_str(&self.body);
        text.into_bytes()
    }
}

impl From<&Reply> for Response {
    fn from(reply: &Reply) -> Self {
        let (kind, code) = match reply.status {
            402 => ("card_error", "card_declined"),
            400 | 422 => ("invalid_request_error", "invalid_request"),
            401 | 403 | 404 => ("authentication_error", "not_allowed"),
            429 => ("rate_limit_error", "rate_limit"),
            _ => ("api_error", "scripted"),
        };
        let mut response = Self::error(reply.status, kind, code, "as the script says");
        if let Some(body) = &reply.body {
            response.body.clone_from(body);
        }
        if let Some(content_type) = &reply.content_type {
            response.content_type.clone_from(content_type);
        }
        response.retry_after = reply.retry_after.clone().or_else(|| reply.retry_after_date_s.map(http_date));
        response.location.clone_from(&reply.location);
        response
    }
}

/// The date so many seconds from now.
fn http_date(seconds: i64) -> String {
    let distance = Duration::from_secs(seconds.unsigned_abs());
    let now = SystemTime::now();
    httpdate::fmt_http_date(if seconds < 0 { now - distance } else { now + distance })
}

fn parse_head(head: &[u8]) -> io::Result<Request> {
    let text = std::str::from_utf8(head).map_err(|_| malformed("head is no text"))?;
    let mut lines = text.split("\r\n");
    let mut first = lines.next().unwrap_or_default().split(' ');
    let (Some(method), Some(target), Some(_version)) = (first.next(), first.next(), first.next()) else {
        return Err(malformed("no request line"));
    };
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let mut request = Request { method: method.to_owned(), path: path.to_owned(), query: query.to_owned(), ..Request::default() };
    for line in lines {
        let (name, value) = line.split_once(':').ok_or_else(|| malformed("no header"))?;
        let value = value.trim();
        if name.eq_ignore_ascii_case("content-length") {
            request.content_length = value.parse().map_err(|_| malformed("no length"))?;
        } else if name.eq_ignore_ascii_case("idempotency-key") {
            value.clone_into(&mut request.key);
        } else if name.eq_ignore_ascii_case(TRACEPARENT) {
            request.trace.0 = Some(value.to_owned());
        } else if name.eq_ignore_ascii_case(TRACESTATE) {
            request.trace.1 = Some(value.to_owned());
        } else if name.eq_ignore_ascii_case("connection") {
            request.close = value.eq_ignore_ascii_case("close");
        } else if name.eq_ignore_ascii_case("transfer-encoding") {
            return Err(malformed("only bodies with a length"));
        }
    }
    if request.content_length > MAX_BODY {
        return Err(malformed("body too long"));
    }
    Ok(request)
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|window| window == needle)
}

fn malformed(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

const fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        204 => "No Content",
        402 => "Payment Required",
        409 => "Conflict",
        422 => "Unprocessable Content",
        429 => "Too Many Requests",
        503 => "Service Unavailable",
        _ => "As Scripted",
    }
}
