//! The network between an engine and its database, which can be broken.
//!
//! In: connections to a port of its own. Out: connections to the server, or what stands for them. It owns the port and its threads;
//! every connection through it ends when it is dropped.
//!
//! Invariant: bytes are passed on as they are, or the connection ends; nothing is changed and nothing is left out.

use std::io;
use std::net::TcpListener as StdListener;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::watch;
use url::Url;

/// A way to a database, open until it is broken.
#[derive(Debug)]
pub struct Proxy {
    url: String,
    wire: Arc<Wire>,
    /// Carries the bytes; its end is the end of every connection.
    _runtime: Runtime,
}

/// What the way does with connections, those that stand and new ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Open,
    /// They are closed.
    Refused,
    /// They stand, and nothing gets through.
    Silent,
}

#[derive(Debug)]
struct Wire {
    server: (String, u16),
    way: watch::Sender<Way>,
    /// The next COMMIT of a batch is lost: its answer (`true`) or it itself.
    lose_commit: Mutex<Option<bool>>,
}

impl Proxy {
    /// A way to the database of this URL. Not to be dropped inside an async runtime.
    ///
    /// # Errors
    /// The URL is none, or the operating system has no port or thread to give.
    pub fn before(database: &str) -> io::Result<Self> {
        let no_url = |error: url::ParseError| io::Error::new(io::ErrorKind::InvalidInput, error);
        let mut url = Url::parse(database).map_err(no_url)?;
        let host = url.host_str().ok_or_else(|| no_url(url::ParseError::EmptyHost))?.to_owned();
        let wire =
            Wire { server: (host, url.port().unwrap_or(5432)), way: watch::Sender::new(Way::Open), lose_commit: Mutex::new(None) };
        let wire = Arc::new(wire);
        let listener = StdListener::bind("127.0.0.1:0")?;
        listener.set_nonblocking(true)?;
        url.set_host(Some("127.0.0.1")).map_err(no_url)?;
        url.set_port(Some(listener.local_addr()?.port())).map_err(|()| no_url(url::ParseError::InvalidPort))?;
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        runtime.spawn(accept(listener, Arc::clone(&wire)));
        Ok(Self { url: url.into(), wire, _runtime: runtime })
    }

    /// The database by this way.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// As if the server had ended: every connection breaks, and none can be made.
    pub fn refuse(&self) {
        self.wire.way.send_replace(Way::Refused);
    }

    /// As if the cable had been pulled: nobody gets an answer, not even a refusal.
    pub fn fall_silent(&self) {
        self.wire.way.send_replace(Way::Silent);
    }

    /// As if nothing had been: what has waited gets through.
    pub fn open(&self) {
        self.wire.way.send_replace(Way::Open);
    }

    /// Whether everything gets through.
    #[must_use]
    pub fn is_open(&self) -> bool {
        *self.wire.way.borrow() == Way::Open
    }

    /// Breaks the connection of the next batch that commits, after the server has `committed` it or before it hears of it.
    pub fn lose_the_next_commit(&self, committed: bool) {
        *self.wire.lose_commit.lock().unwrap_or_else(PoisonError::into_inner) = Some(committed);
    }

    /// Whether that has happened.
    #[must_use]
    pub fn has_lost_it(&self) -> bool {
        !self.wire.loses_a_commit()
    }
}

impl Wire {
    fn loses_a_commit(&self) -> bool {
        self.lose_commit.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }
}

async fn accept(listener: StdListener, wire: Arc<Wire>) {
    let Ok(listener) = TcpListener::from_std(listener) else { return };
    loop {
        // An accept fails for one connection (reset in the queue) or for want of descriptors; both pass.
        match listener.accept().await {
            Ok((client, _)) => drop(tokio::spawn(relay(client, Arc::clone(&wire)))),
            Err(_) => tokio::time::sleep(std::time::Duration::from_millis(10)).await,
        }
    }
}

async fn relay(client: TcpStream, wire: Arc<Wire>) {
    let mut way = wire.way.subscribe();
    let mut seen = way.clone();
    let refused = async move { drop(seen.wait_for(|way| *way == Way::Refused).await) };
    let through = async move {
        drop(way.wait_for(|way| *way == Way::Open).await);
        let Ok(server) = TcpStream::connect(wire.server.clone()).await else { return };
        let ((from_client, to_client), (from_server, to_server)) = (client.into_split(), server.into_split());
        let (lost, heard) = watch::channel(false);
        let forth = pass(from_client, to_server, way.clone(), Some((&wire, &lost)), heard.clone());
        let back = pass(from_server, to_client, way.clone(), None, heard);
        // Whichever ends first closes both sockets.
        tokio::select! { () = forth => {}, () = back => {} }
    };
    tokio::select! { biased; () = refused => {}, () = through => {} }
}

/// Passes bytes on. The side that hears the client decides about COMMIT; the other ends when the answer to a lost one comes.
async fn pass(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    mut way: watch::Receiver<Way>,
    decides: Option<(&Arc<Wire>, &watch::Sender<bool>)>,
    lost: watch::Receiver<bool>,
) {
    let mut bytes = vec![0; 1 << 16];
    let mut claims = false;
    while let Ok(read @ 1..) = from.read(&mut bytes).await {
        drop(way.wait_for(|way| *way == Way::Open).await);
        let has = |word: &[u8]| bytes[..read].windows(word.len()).any(|found| found == word);
        match decides {
            Some((wire, losing)) => {
                // Prepared once per connection, so the words tell which connections are those of batches.
                claims = claims || has(b"INSERT INTO processed_event");
                if claims && wire.loses_a_commit() && has(b"COMMIT\0") {
                    match wire.lose_commit.lock().unwrap_or_else(PoisonError::into_inner).take() {
                        Some(true) => drop(losing.send(true)),
                        Some(false) => return,
                        None => {}
                    }
                }
            }
            None if *lost.borrow() => return,
            None => {}
        }
        if to.write_all(&bytes[..read]).await.is_err() {
            return;
        }
    }
}
