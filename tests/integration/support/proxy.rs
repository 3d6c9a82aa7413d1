//! The network between an engine and its database, which a test can break.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use url::Url;

use super::{Database, block_on};

/// A way to a database, open until it is broken.
pub struct Proxy {
    url: String,
    wire: Arc<Wire>,
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

struct Wire {
    server: (String, u16),
    way: watch::Sender<Way>,
    /// The next COMMIT of a batch is lost: its answer (`true`) or it itself.
    lose_commit: Mutex<Option<bool>>,
}

impl Proxy {
    pub fn before(database: &Database) -> Self {
        let mut url = Url::parse(database.url()).expect("a URL");
        let server = (url.host_str().expect("a host").to_owned(), url.port().unwrap_or(5432));
        let wire = Arc::new(Wire { server, way: watch::Sender::new(Way::Open), lose_commit: Mutex::new(None) });
        let port = block_on(accept(Arc::clone(&wire)));
        url.set_host(Some("127.0.0.1")).expect("a host");
        url.set_port(Some(port)).expect("a port");
        Self { url: url.into(), wire }
    }

    /// The database by this way.
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

    pub fn open(&self) {
        self.wire.way.send_replace(Way::Open);
    }

    /// Breaks the connection of the next batch that commits, after the server has `committed` it or before it hears of it.
    pub fn lose_the_next_commit(&self, committed: bool) {
        *self.wire.lose_commit.lock().unwrap_or_else(PoisonError::into_inner) = Some(committed);
    }

    /// Whether that has happened.
    pub fn has_lost_it(&self) -> bool {
        self.wire.lose_commit.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }
}

async fn accept(wire: Arc<Wire>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            tokio::spawn(relay(client, Arc::clone(&wire)));
        }
    });
    port
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
                claims |= has(b"INSERT INTO processed_event");
                if claims && has(b"COMMIT\0") {
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
