//! Listens to what the server says on one connection, because Diesel hides the SQLSTATE and tokio-postgres the transaction's state.
//!
//! In: the bytes of the socket, in pieces of any size. Out: the same bytes, and in [`Wire`] the last error's SQLSTATE, the last
//! command's tag and whether a transaction is open. It owns the socket; nothing is ever held back or changed.
//!
//! Invariant: it only follows frames (one type byte, four bytes of length, the body) from the first byte of the protocol; TLS ends below it.

use std::future::{Ready, ready as at_once};
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_postgres::tls::{ChannelBinding, TlsConnect, TlsStream};

use super::encryption::Line;
use super::error::SqlState;

/// Any socket.
pub(super) trait Socket: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> Socket for S {}

/// A socket that is listened to.
pub(super) struct Tap {
    line: Line,
    frame: Frame,
    wire: Arc<Wire>,
}

/// What the server said last.
#[derive(Debug, Default)]
pub(super) struct Wire(Mutex<Said>);

#[derive(Clone, Copy, Debug, Default)]
struct Said {
    error: Option<SqlState>,
    /// That error ended the connection.
    fatal: bool,
    rolled_back: bool,
    idle: bool,
    /// Answers since [`Wire::watch`] after which a transaction was open.
    inside: usize,
}

impl Wire {
    /// The SQLSTATE of the last error.
    pub(super) fn last_error(&self) -> Option<SqlState> {
        self.lock().error
    }

    /// The SQLSTATE with which the server ended the connection.
    pub(super) fn farewell(&self) -> Option<SqlState> {
        let said = self.lock();
        said.error.filter(|_| said.fatal)
    }

    /// The last command that ended was a ROLLBACK, whatever was asked for.
    pub(super) fn rolled_back(&self) -> bool {
        self.lock().rolled_back
    }

    /// The server waits for a command and no transaction is open.
    pub(super) fn is_idle(&self) -> bool {
        self.lock().idle
    }

    /// From now on answers inside of a transaction are counted.
    pub(super) fn watch(&self) {
        self.lock().inside = 0;
    }

    /// How many there were since. Late answers to what was asked outside of one, as when the driver lets go of a statement, do not count.
    pub(super) fn answers_inside(&self) -> usize {
        self.lock().inside
    }

    pub(super) fn hear(&self, kind: u8, body: &[u8]) {
        let mut said = self.lock();
        match kind {
            b'E' => {
                said.error = fields(body).find_map(|field| SqlState::new(field.strip_prefix(b"C")?));
                said.fatal = fields(body).any(|field| field == b"VFATAL" || field == b"VPANIC");
            }
            b'C' => said.rolled_back = body.starts_with(b"ROLLBACK\0"),
            b'Z' => {
                said.idle = body == b"I";
                said.inside += usize::from(!said.idle);
            }
            _ => {}
        }
    }

    /// Nothing that is done under the lock can panic half way.
    fn lock(&self) -> MutexGuard<'_, Said> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The fields of an ErrorResponse: each a type byte (`C` SQLSTATE, `V` severity, never translated) and a text that ends in NUL.
fn fields(body: &[u8]) -> impl Iterator<Item = &[u8]> {
    body.split(|byte| *byte == 0)
}

/// The frame that is being read.
#[derive(Default)]
struct Frame {
    head: Vec<u8>,
    body: Vec<u8>,
    /// Bytes of the body that are still to come.
    left: usize,
}

impl Frame {
    const HEAD: usize = 5;
    /// Severity and SQLSTATE stand at the beginning of an error; more is never needed.
    const KEPT: usize = 256;

    fn follow(&mut self, mut bytes: &[u8], wire: &Wire) {
        while !bytes.is_empty() {
            if self.head.len() < Self::HEAD {
                let (head, rest) = bytes.split_at(bytes.len().min(Self::HEAD - self.head.len()));
                self.head.extend_from_slice(head);
                bytes = rest;
                let &[_, a, b, c, d] = self.head.as_slice() else { return };
                // The length counts itself, not the type.
                self.left = (u32::from_be_bytes([a, b, c, d]) as usize).saturating_sub(4);
            }
            let (body, rest) = bytes.split_at(bytes.len().min(self.left));
            if matches!(self.head[0], b'E' | b'C' | b'Z') {
                self.body.extend_from_slice(&body[..body.len().min(Self::KEPT - self.body.len())]);
            }
            self.left -= body.len();
            bytes = rest;
            if self.left == 0 {
                wire.hear(self.head[0], &self.body);
                self.head.clear();
                self.body.clear();
            }
        }
    }
}

impl Tap {
    pub(super) fn new(line: Line) -> (Self, Arc<Wire>) {
        let wire = Arc::<Wire>::default();
        (Self { line, frame: Frame::default(), wire: Arc::clone(&wire) }, wire)
    }
}

/// For the driver, which would encrypt above the tap: it gets the line as it is, and is told what the server is known by.
pub(super) struct AsItIs;

impl TlsConnect<Tap> for AsItIs {
    type Stream = Tap;
    type Error = io::Error;
    type Future = Ready<io::Result<Tap>>;

    fn connect(self, tap: Tap) -> Self::Future {
        at_once(Ok(tap))
    }
}

impl TlsStream for Tap {
    fn channel_binding(&self) -> ChannelBinding {
        self.line.end_point.clone().map_or_else(ChannelBinding::none, ChannelBinding::tls_server_end_point)
    }
}

impl AsyncRead for Tap {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let tap = self.get_mut();
        let before = buf.filled().len();
        ready!(Pin::new(&mut tap.line.socket).poll_read(cx, buf))?;
        tap.frame.follow(&buf.filled()[before..], &tap.wire);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Tap {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.line.socket).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.line.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.line.socket).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, body: &[u8]) -> Vec<u8> {
        let length = u32::try_from(body.len() + 4).expect("short");
        [&[kind][..], &length.to_be_bytes(), body].concat()
    }

    #[test]
    fn frames_cut_at_every_byte_tell_the_same() {
        let said = [
            frame(b'E', b"SERROR\0VERROR\0C22P02\0Minvalid input C99999\0\0"),
            frame(b'D', &vec![b'E'; 3_000]),
            frame(b'E', &[b"SFATAL\0VFATAL\0C57P01\0M".to_vec(), vec![b'x'; 9_000]].concat()),
            frame(b'n', b""),
            frame(b'C', b"ROLLBACK\0"),
            frame(b'Z', b"I"),
        ]
        .concat();
        for cut in 0..said.len() {
            let (mut follower, wire) = (Frame::default(), Wire::default());
            follower.follow(&said[..cut], &wire);
            follower.follow(&said[cut..], &wire);
            assert_eq!((wire.last_error(), wire.farewell()), (SqlState::new(b"57P01"), SqlState::new(b"57P01")), "{cut}");
            assert!(wire.rolled_back() && wire.is_idle(), "{cut}");
        }
        let (mut follower, wire) = (Frame::default(), Wire::default());
        said.iter().for_each(|byte| follower.follow(&[*byte], &wire));
        assert_eq!(wire.last_error(), SqlState::new(b"57P01"));
        follower.follow(&[frame(b'C', b"COMMIT\0"), frame(b'Z', b"T")].concat(), &wire);
        assert!(!wire.rolled_back() && !wire.is_idle());
    }

    #[test]
    fn only_answers_inside_of_a_transaction_count() {
        let wire = Wire::default();
        wire.hear(b'Z', b"T");
        wire.watch();
        wire.hear(b'Z', b"I");
        assert_eq!(wire.answers_inside(), 0);
        wire.hear(b'Z', b"T");
        wire.hear(b'Z', b"E");
        assert_eq!(wire.answers_inside(), 2);
    }
}
