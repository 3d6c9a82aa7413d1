//! From a URL to a session on the first host that takes writes.
//!
//! In: the settings. Out: a [`Session`] whose connection runs in a task of its own. It owns nothing afterwards.
//!
//! Invariant: no connection weaker than the URL asks for, and none to a server that only reads.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use diesel_async::AsyncPgConnection;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;
use tokio_postgres::config::{Host, SslMode};
use tokio_postgres::{Config, NoTls, SimpleQueryMessage};

use super::Settings;
use super::error::{DbError, SqlState};
use super::session::{Session, TimeLimits};
use super::tap::{Tap, Wire};

const NAME: &str = "connect";

/// A peer that has not acknowledged our bytes for this long is gone; longer than any statement, shorter than a session of the group.
const TCP_USER_TIMEOUT: Duration = Duration::from_secs(10);
/// When nothing is sent, ask this often whether the peer is there.
const KEEPALIVE: Duration = Duration::from_secs(5);

/// Where to connect, checked.
#[derive(Clone)]
pub(super) struct Target {
    config: Config,
    addresses: Vec<Address>,
    connect_timeout: Duration,
    limits: TimeLimits,
}

#[derive(Clone, Debug)]
enum Address {
    Tcp(String, u16),
    Unix(PathBuf),
}

impl Target {
    /// # Errors
    /// The URL cannot be understood, names no host, or asks for TLS.
    pub(super) fn parse(settings: &Settings) -> Result<Self, DbError> {
        let refuse = |message: &str| Err(DbError::program(NAME, message));
        let no_tls = "the database URL asks for TLS (sslmode), which is not supported yet; refusing to connect in plain text";
        if settings.url.contains("sslmode=verify") {
            return refuse(no_tls);
        }
        let mut config: Config = settings.url.parse().map_err(|error| {
            let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
            DbError::program(NAME, format_args!("the database URL is not valid: {cause}"))
        })?;
        if config.get_ssl_mode() == SslMode::Require {
            return refuse(no_tls);
        }
        // Nothing may be sent before the first frame: the tap follows frames only.
        config.ssl_mode(SslMode::Disable).application_name("onceward");
        let hosts: Vec<Host> = match config.get_hostaddrs() {
            [] => config.get_hosts().to_vec(),
            addresses => addresses.iter().map(|address| Host::Tcp(address.to_string())).collect(),
        };
        let ports = match config.get_ports() {
            [] => vec![5432; hosts.len()],
            [one] => vec![*one; hosts.len()],
            many => many.to_vec(),
        };
        if hosts.is_empty() {
            return refuse("the database URL names no host");
        }
        if hosts.len() != ports.len() {
            return refuse("the database URL must name one port, or as many as hosts");
        }
        let addresses = hosts.into_iter().zip(ports).map(|(host, port)| match host {
            Host::Tcp(name) => Address::Tcp(name, port),
            Host::Unix(folder) => Address::Unix(folder.join(format!(".s.PGSQL.{port}"))),
        });
        Ok(Self { addresses: addresses.collect(), config, connect_timeout: settings.connect_timeout, limits: settings.limits })
    }

    /// Tries each host in turn.
    ///
    /// # Errors
    /// The last host's error, when none takes writes.
    pub(super) async fn connect(&self) -> Result<Session, DbError> {
        let mut last = None;
        for address in &self.addresses {
            match timeout(self.connect_timeout, self.connect_to(address)).await {
                Ok(Ok(session)) => return Ok(session),
                Ok(Err(error)) => last = Some(error),
                Err(_) => last = Some(DbError::connection(NAME, format_args!("no answer from {address:?} in time"))),
            }
        }
        Err(last.unwrap_or_else(|| DbError::program(NAME, "no host")))
    }

    async fn connect_to(&self, address: &Address) -> Result<Session, DbError> {
        let io = |error: std::io::Error| DbError::connection(NAME, format_args!("{address:?}: {error}"));
        let (tap, wire) = match address {
            Address::Unix(path) => Tap::new(UnixStream::connect(path).await.map_err(io)?),
            Address::Tcp(host, port) => Tap::new(connect_tcp(host, *port).await.map_err(io)?),
        };
        let failed = |error: tokio_postgres::Error| server_error(&error, &wire);
        let (client, connection) = self.config.connect_raw(tap, NoTls).await.map_err(failed)?;
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
            return Err(DbError::connection(NAME, format_args!("{address:?} takes no writes")));
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
