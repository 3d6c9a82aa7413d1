//! The log of a command: where its lines go, and how much it says.
//!
//! In: the configuration; while `run` runs also SIGHUP, at which it is read again. Out: lines on standard error, so that results can be piped.
//! If it dies here, as much is said as before.
//!
//! Invariant: a hangup changes how much is said and nothing else, and a configuration with faults changes nothing.

use std::io::{self, IsTerminal};
use std::sync::OnceLock;
use std::thread;

use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};
use tracing::{info, warn};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::reload::{self, Handle};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, Registry};

use crate::config::{Config, ConfigError, LogConfig, LogFormat};

/// How much is said. The first call of [`start`] decides where.
static LEVEL: OnceLock<Handle<EnvFilter, Registry>> = OnceLock::new();

/// Lines go to standard error from now on. A second call in one process changes nothing.
pub fn start(log: &LogConfig) {
    let (filter, level) = reload::Layer::new(filter(log));
    let lines = tracing_subscriber::fmt::layer().with_writer(io::stderr);
    let lines = match log.format {
        LogFormat::Human => lines.with_ansi(io::stderr().is_terminal()).boxed(),
        LogFormat::Json => lines.json().flatten_event(true).boxed(),
    };
    if tracing_subscriber::registry().with(filter).with(lines).try_init().is_ok() {
        let _ = LEVEL.set(level); // the first one, as the subscriber
    }
}

/// From now on, until the process ends: at each SIGHUP the level is taken from what `read` gives.
///
/// # Errors
/// The operating system gives no signals, or no thread.
pub fn follow_hangups(read: impl Fn() -> Result<Config, ConfigError> + Send + 'static) -> anyhow::Result<()> {
    let runtime = super::runtime()?;
    let mut hangups = {
        let _within = runtime.enter();
        signal(SignalKind::hangup()).context("SIGHUP")?
    };
    let listen = async move {
        while hangups.recv().await.is_some() {
            match read() {
                Ok(config) => set(&config.log),
                Err(error) => warn!(%error, "SIGHUP: the configuration has faults; the log level stays"),
            }
        }
    };
    let thread = thread::Builder::new().name("onceward-hangup".into()).spawn(move || runtime.block_on(listen));
    thread.map(drop).context("the operating system gives no thread")
}

fn set(log: &LogConfig) {
    // It fails only when nobody logs here any more.
    let _ = LEVEL.get().map(|level| level.reload(filter(log)));
    info!(level = log.level, "SIGHUP: the log level is read again");
}

fn filter(log: &LogConfig) -> EnvFilter {
    // A notice of the server is news to nobody; a directive in the configuration may say otherwise.
    EnvFilter::try_new(format!("tokio_postgres=warn,{}", log.level)).unwrap_or_default()
}
