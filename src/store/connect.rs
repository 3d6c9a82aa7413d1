//! From a URL to a session on the first host that takes writes.
//!
//! In: the settings. Out: a [`Session`] whose connection runs in a task of its own. It owns nothing afterwards.
//!
//! Invariant: every connection of the store is made here, by what the files say at that moment; none is weaker than the URL asks for, and
//! none is to a server that only reads.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use diesel_async::AsyncPgConnection;
use rustls::ClientConfig;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;
use tokio_postgres::config::{Host, SslMode, SslNegotiation};
use tokio_postgres::{Config, SimpleQueryMessage};

use super::Settings;
use super::encryption::Line;
use super::error::{DbError, SqlState};
use super::session::{Session, TimeLimits};
use super::tap::{AsItIs, Tap, Wire};
use super::url::{DatabaseUrl, Encryption};
use crate::rotating::{Files, Rotating};
use crate::tls::{Part, Tls};

const NAME: &str = "connect";

/// A peer that has not acknowledged our bytes for this long is gone; longer than any statement, shorter than a session of the group.
const TCP_USER_TIMEOUT: Duration = Duration::from_secs(10);
/// When nothing is sent, ask this often whether the peer is there.
const KEEPALIVE: Duration = Duration::from_secs(5);

/// The server, as the newest URL and certificates tell.
#[derive(Clone, Debug)]
pub(super) struct Server(Arc<Rotating<Arc<Target>, DbError>>);

impl Server {
    /// # Errors
    /// The URL cannot be understood, or a file cannot be used.
    pub(super) fn new(settings: &Settings) -> Result<Self, DbError> {
        let settings = settings.clone();
        // At each connection: they are few, and a password is changed in the server and in the file at once.
        let newest = Rotating::new("database.url", Duration::ZERO, move |files| Target::read(&settings, files).map(Arc::new))?;
        Ok(Self(Arc::new(newest)))
    }

    /// # Errors
    /// The last host's error, when none takes writes.
    pub(super) async fn connect(&self) -> Result<Session, DbError> {
        self.0.get().connect().await
    }
}

/// Where to connect, checked.
struct Target {
    config: Config,
    addresses: Vec<Address>,
    encryption: Encryption<Arc<ClientConfig>>,
    connect_timeout: Duration,
    limits: TimeLimits,
}

#[derive(Debug)]
enum Address {
    /// Its name, by which its certificate is judged, where it is, and the port.
    Tcp {
        name: String,
        host: String,
        port: u16,
    },
    Unix(PathBuf),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { name, host, port } if name == host => write!(f, "{host}:{port}"),
            Self::Tcp { name, host, port } => write!(f, "{name} ({host}:{port})"),
            Self::Unix(path) => path.display().fmt(f),
        }
    }
}

impl Target {
    /// # Errors
    /// The URL cannot be understood, or a file cannot be used.
    fn read(settings: &Settings, files: &mut Files) -> Result<Self, DbError> {
        let refused = |why: String| DbError::program(NAME, format_args!("the database URL {why}"));
        let url = settings.url.now(files).map_err(|why| DbError::program(NAME, why))?;
        let DatabaseUrl { mut config, encryption } = DatabaseUrl::parse(&url).map_err(|why| refused(why.to_owned()))?;
        let encryption = match encryption {
            Encryption::Never => Encryption::Never,
            Encryption::IfOffered(tls) => Encryption::IfOffered(client_config(&tls, files).map_err(refused)?),
            Encryption::Always(tls) => Encryption::Always(client_config(&tls, files).map_err(refused)?),
        };
        // The driver must not ask for TLS by itself: the line is encrypted below the tap, or it is not.
        config.ssl_mode(SslMode::Require).ssl_negotiation(SslNegotiation::Direct).application_name("onceward");
        let addresses = addresses(&config).map_err(|why| refused(why.to_owned()))?;
        Ok(Self { config, addresses, encryption, connect_timeout: settings.connect_timeout, limits: settings.limits })
    }

    /// Tries each host in turn.
    ///
    /// # Errors
    /// The last host's error, when none takes writes.
    async fn connect(&self) -> Result<Session, DbError> {
        let mut last = None;
        for address in &self.addresses {
            match timeout(self.connect_timeout, self.connect_to(address)).await {
                Ok(Ok(session)) => return Ok(session),
                Ok(Err(error)) => last = Some(error),
                Err(_) => last = Some(DbError::connection(NAME, format_args!("no answer from {address} in time"))),
            }
        }
        Err(last.unwrap_or_else(|| DbError::program(NAME, "no host")))
    }

    async fn connect_to(&self, address: &Address) -> Result<Session, DbError> {
        let io = |error: std::io::Error| DbError::connection(NAME, format_args!("{address}: {error}"));
        let line = match address {
            Address::Unix(path) => Line::plain(UnixStream::connect(path).await.map_err(io)?),
            Address::Tcp { name, host, port } => {
                let socket = connect_tcp(host, *port).await.map_err(io)?;
                Line::open(socket, name, &self.encryption).await.map_err(io)?
            }
        };
        let (tap, wire) = Tap::new(line);
        let failed = |error: tokio_postgres::Error| server_error(&error, &wire);
        let (client, connection) = self.config.connect_raw(tap, AsItIs).await.map_err(failed)?;
        // Texts of any language go into the tables; elsewhere one of them would be refused in the middle of a batch.
        if connection.parameter("server_encoding") != Some("UTF8") {
            return Err(DbError::program(NAME, "the database's encoding is not UTF8"));
        }
        // Its errors reach the caller through the client, so the task's own result says nothing new.
        let task = TaskGuard(Some(tokio::spawn(connection).abort_handle()));
        let answer = client.simple_query("SHOW transaction_read_only").await.map_err(failed)?;
        let read_only = answer.iter().find_map(|message| match message {
            SimpleQueryMessage::Row(row) => row.get(0),
            _ => None,
        });
        if read_only != Some("off") {
            return Err(DbError::connection(NAME, format_args!("{address} takes no writes")));
        }
        let connection = AsyncPgConnection::try_from(client).await.map_err(|error| DbError::connection(NAME, error))?;
        Ok(Session::new(connection, task.keep(), wire, self.limits))
    }
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Target").field("addresses", &self.addresses).finish_non_exhaustive()
    }
}

fn client_config(tls: &Tls, files: &mut Files) -> Result<Arc<ClientConfig>, String> {
    tls.config(files).map(Arc::new).map_err(|fault| {
        let word = match fault.part {
            Part::Roots => "sslrootcert",
            Part::Certificate => "sslcert",
            Part::Key => "sslkey",
        };
        format!("has a {word} that cannot be used: {fault}")
    })
}

fn addresses(config: &Config) -> Result<Vec<Address>, &'static str> {
    let (names, places) = (config.get_hosts(), config.get_hostaddrs());
    let hosts = names.len().max(places.len());
    let ports = match config.get_ports() {
        [] => vec![5432; hosts],
        [one] => vec![*one; hosts],
        many => many.to_vec(),
    };
    if ports.len() != hosts {
        return Err("must name one port, or as many as hosts");
    }
    if !places.is_empty() && !names.is_empty() && names.len() != places.len() {
        return Err("must have as many hosts as hostaddrs");
    }
    let address = |(index, port): (usize, u16)| {
        let place = places.get(index).map(ToString::to_string);
        match (names.get(index), place) {
            (Some(Host::Unix(folder)), None) => Address::Unix(folder.join(format!(".s.PGSQL.{port}"))),
            (Some(Host::Tcp(name)), place) => {
                Address::Tcp { host: place.unwrap_or_else(|| name.clone()), name: name.clone(), port }
            }
            (_, place) => {
                let host = place.expect("as many as the longer of the two");
                Address::Tcp { name: host.clone(), host, port }
            }
        }
    };
    Ok(ports.into_iter().enumerate().map(address).collect())
}

async fn connect_tcp(host: &str, port: u16) -> std::io::Result<TcpStream> {
    let addresses: Vec<SocketAddr> = tokio::net::lookup_host((host, port)).await?.collect();
    let stream = TcpStream::connect(addresses.as_slice()).await?;
    stream.set_nodelay(true)?;
    let socket = SockRef::from(&stream);
    socket.set_tcp_keepalive(&TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE))?;
    #[cfg(any(target_os = "linux", target_os = "android"))]
    socket.set_tcp_user_timeout(Some(TCP_USER_TIMEOUT))?;
    Ok(stream)
}

fn server_error(error: &tokio_postgres::Error, wire: &Wire) -> DbError {
    match error.as_db_error() {
        Some(refusal) => match SqlState::new(refusal.code().code().as_bytes()) {
            Some(state) => DbError::server(NAME, state, refusal.message()),
            None => DbError::connection(NAME, refusal.message()),
        },
        None => {
            // "error connecting", "connection closed": the cause says more.
            let cause = std::error::Error::source(error).map(|cause| format!(": {cause}")).unwrap_or_default();
            DbError::connection(NAME, format_args!("{error}{cause}")).completed(NAME, wire)
        }
    }
}

/// Ends the connection's task if the handshake does not end well.
struct TaskGuard(Option<tokio::task::AbortHandle>);

impl TaskGuard {
    fn keep(mut self) -> tokio::task::AbortHandle {
        self.0.take().expect("taken only here, where the guard ends")
    }
}

impl Drop for TaskGuard {
    fn drop(&mut self) {
        if let Some(task) = &self.0 {
            task.abort();
        }
    }
}
