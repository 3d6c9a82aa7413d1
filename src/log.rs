//! The log: where its lines go, and how much is said.
//!
//! In: the configuration; while `run` runs also SIGHUP, at which it is read again, and what is asked for on the admin port. Out: lines on
//! standard error, so that results can be piped. If it dies here, as much is said as before.
//!
//! Invariant: a change changes how much is said and nothing else, what is no level changes nothing, and who has changed it is always said.

use std::io::{self, IsTerminal};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;

use anyhow::Context;
use chrono::{DateTime, Utc};
use tokio::signal::unix::{SignalKind, signal};
use tracing::{info, warn};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::reload::{self, Handle};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, Registry};

use crate::config::{Config, ConfigError, LogConfig, LogFormat};

/// How much is said, since [`start`]: its first call decides where.
static LEVEL: OnceLock<Level> = OnceLock::new();

struct Level {
    filter: Handle<EnvFilter, Registry>,
    now: Mutex<Said>,
}

/// How much is said, and by whose wish.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Said {
    /// As it stands in the configuration, or as it was asked for.
    pub level: String,
    /// Who has changed it since the configuration was read.
    pub changed: Option<Change>,
}

/// Somebody's wish.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// When.
    pub at: DateTime<Utc>,
    /// Who.
    pub actor: String,
    /// Why.
    pub reason: String,
}

/// Lines go to standard error from now on. A second call in one process changes nothing.
pub fn start(log: &LogConfig) {
    let (filter, handle) = reload::Layer::new(filter(&log.level).unwrap_or_default());
    let lines = tracing_subscriber::fmt::layer().with_writer(io::stderr);
    let lines = match log.format {
        LogFormat::Human => lines.with_ansi(io::stderr().is_terminal()).boxed(),
        LogFormat::Json => lines.json().flatten_event(true).boxed(),
    };
    if tracing_subscriber::registry().with(filter).with(lines).try_init().is_ok() {
        let now = Mutex::new(Said { level: log.level.clone(), changed: None });
        let _ = LEVEL.set(Level { filter: handle, now }); // the first one, as the subscriber
    }
}

/// From now on, until the process ends: at each SIGHUP the level is taken from what `read` gives.
///
/// # Errors
/// The operating system gives no signals, or no thread.
pub fn follow_hangups(read: impl Fn() -> Result<Config, ConfigError> + Send + 'static) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("no runtime")?;
    let mut hangups = {
        let _within = runtime.enter();
        signal(SignalKind::hangup()).context("SIGHUP")?
    };
    let listen = async move {
        while hangups.recv().await.is_some() {
            match read() {
                Ok(config) => {
                    // The configuration has passed its checks, and this is one of them.
                    let _ = say_so_much(&config.log.level, None);
                    info!(level = config.log.level, "SIGHUP: the log level is read again");
                }
                Err(error) => warn!(%error, "SIGHUP: the configuration has faults; the log level stays"),
            }
        }
    };
    let thread = thread::Builder::new().name("onceward-hangup".into()).spawn(move || runtime.block_on(listen));
    thread.map(drop).context("the operating system gives no thread")
}

/// How much is said now; `None` in a process that has no log.
#[must_use]
pub fn now() -> Option<Said> {
    LEVEL.get().map(|level| level.now.lock().unwrap_or_else(PoisonError::into_inner).clone())
}

/// Somebody wants so much said, until a restart or SIGHUP. Out: what it was before.
///
/// # Errors
/// In words, what would be a level.
pub fn change(level: &str, actor: &str, reason: &str) -> Result<Option<Said>, String> {
    let (actor, reason) = (actor.to_owned(), reason.to_owned());
    let before = say_so_much(level, Some(Change { at: Utc::now(), actor: actor.clone(), reason: reason.clone() }))?;
    let was = before.as_ref().map(|said| said.level.as_str());
    info!(level, was, actor = ?actor, reason = ?reason, "the log level is changed on the admin port");
    Ok(before)
}

fn say_so_much(level: &str, changed: Option<Change>) -> Result<Option<Said>, String> {
    let filter = filter(level)?;
    Ok(LEVEL.get().map(|known| {
        let mut now = known.now.lock().unwrap_or_else(PoisonError::into_inner);
        // It fails only when nobody logs here any more.
        let _ = known.filter.reload(filter);
        std::mem::replace(&mut *now, Said { level: level.to_owned(), changed })
    }))
}

/// What is let through. Directives as they stand in the configuration, over ours: a notice of the server is news to nobody, and this file's own
/// lines say who has asked for silence.
///
/// # Errors
/// In words, what would be valid.
pub fn filter(level: &str) -> Result<EnvFilter, String> {
    // A word that is no level would be taken for a target, at its most talkative, and everything else would fall silent.
    let is_known = |word: &str| {
        word.contains('=') || matches!(word.to_ascii_lowercase().as_str(), "off" | "error" | "warn" | "info" | "debug" | "trace")
    };
    let all_known = !level.trim().is_empty() && level.split(',').all(|word| is_known(word.trim()));
    let directives = format!("tokio_postgres=warn,onceward::log=info,{level}");
    let refused = || "must be off, error, warn, info, debug, trace, or directives such as info,onceward=debug".to_owned();
    if all_known { EnvFilter::try_new(directives).map_err(|_| refused()) } else { Err(refused()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_level_is_one_of_the_known_words_or_a_directive() {
        for good in ["info", "DEBUG", "off", "info,onceward::pipeline=debug", "debug,onceward=trace"] {
            assert!(filter(good).is_ok(), "{good}");
        }
        for bad in ["", " ", "debg", "info,onceward", "onceward=loud", "info,", "all"] {
            assert!(filter(bad).is_err_and(|why| why.contains("debug")), "{bad}");
        }
    }

    #[test]
    fn who_asks_for_silence_is_told_all_the_same() {
        assert!(filter("off").is_ok_and(|filter| filter.to_string().contains("onceward::log=info")));
    }
}
