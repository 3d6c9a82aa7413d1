//! A payment provider that lies on request and keeps an honest ledger.
//!
//! In: HTTP/1.1 on a port of its own. Out: answers, or the misbehaviour that a [`Rule`] asks for. It owns the ledger, the script and
//! its own thread, so neither a test's paused clock nor a killed engine touches it. If it dies here, the ledger is gone: it outlives
//! the engine, not itself.
//!
//! Invariant: whatever it says on the wire, the ledger tells what it has really charged.
//!
//! | request | answer |
//! | --- | --- |
//! | `POST /v1/charges` | the charge; 422 for another body under a known key; 409 while the key is being worked on |
//! | `GET /v1/charges?idempotency_key=K` | the charge of that key however old, else its stored answer, or 404 |
//! | `GET /v1/ledger` | one JSON line per booked charge, decline or failure |
//! | `POST /script` | adds rules (a JSON array of [`Rule`]); `DELETE /script` drops them |
//! | `POST /release` | lets every held call go on |
//! | `POST /forget` | forgets every key, as a provider does after its key life |
//! | `POST /drop-connections?n=N` | closes the next N connections before reading from them |
//! | `GET /calls` | counters, among them the highest number of calls open at once |

mod http;
mod ledger;
mod script;
mod server;

use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context as _;
use serde::Serialize;
use tokio::sync::oneshot;

pub use self::ledger::{LedgerEntry, LedgerStatus};
pub use self::script::{Act, Reply, Rule, When};

use self::server::Shared;

/// How a stub starts.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Where it listens; `None` is a free port of this machine.
    pub listen: Option<SocketAddr>,
    /// The first rules.
    pub script: Vec<Rule>,
    /// How long a key is remembered; `None` is for ever.
    pub key_life: Option<Duration>,
}

/// `onceward provider-stub`. The ledger is kept in memory: whoever restarts it has a provider that never charged anybody.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Address to listen on.
    #[arg(long, default_value = "127.0.0.1:8080")]
    listen: SocketAddr,
    /// A file with a JSON array of rules to start with, such as
    /// [{"when": {"share_per_mille": 50, "seed": 7}, "limit_per_key": 1, "act": {"close": {"charge": true}}}]; more in `provider_stub/script.rs`.
    #[arg(long, value_name = "FILE")]
    script: Option<PathBuf>,
    /// After which an idempotency key is forgotten; without it, never.
    #[arg(long, value_name = "MS")]
    key_life_ms: Option<u64>,
}

/// Runs a stub until SIGINT or SIGTERM.
///
/// # Errors
/// The script cannot be read, or the address cannot be had.
pub async fn run(args: Args) -> anyhow::Result<()> {
    let read = |path: &PathBuf| anyhow::Ok(serde_json::from_slice(&std::fs::read(path)?)?);
    let script = match &args.script {
        Some(path) => read(path).with_context(|| path.display().to_string())?,
        None => Vec::new(),
    };
    let key_life = args.key_life_ms.map(Duration::from_millis);
    let stub = ProviderStub::start(Options { listen: Some(args.listen), script, key_life })
        .with_context(|| format!("the address {}", args.listen))?;
    println!("provider stub listens on {}", stub.url());
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    tokio::select! {
        interrupted = tokio::signal::ctrl_c() => Ok(interrupted?),
        _ = terminate.recv() => Ok(()),
    }
}

/// What has reached the stub so far.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Calls {
    /// Connections accepted, dropped ones included.
    pub connections: u64,
    /// `POST /v1/charges` read to their end.
    pub posts: u64,
    /// Of these, open now.
    pub in_flight: u64,
    /// The most that were open at once.
    pub max_in_flight: u64,
    /// Of the open ones, held until released.
    pub held: u64,
    /// Posts that got a rule's act instead of an honest answer.
    pub misbehaved: u64,
    /// Posts answered from the stored answer of their key.
    pub replayed: u64,
    /// Posts refused because their key was in use.
    pub in_progress: u64,
    /// Posts whose body was not the first one of their key, whatever was answered.
    pub bodies_changed: u64,
    /// Posts without a key, or with a body that is no charge.
    pub invalid: u64,
    /// `GET /v1/charges`.
    pub look_ups: u64,
}

/// A running stub; dropping it closes every connection.
#[derive(Debug)]
pub struct ProviderStub {
    address: SocketAddr,
    shared: Arc<Shared>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl ProviderStub {
    /// Starts one on a thread of its own.
    ///
    /// # Errors
    /// The address cannot be had, or no thread can be made.
    pub fn start(options: Options) -> io::Result<Self> {
        let listener = StdListener::bind(options.listen.unwrap_or_else(|| SocketAddr::from(([127, 0, 0, 1], 0))))?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared::new(options.script, options.key_life));
        let (stop, stopped) = oneshot::channel();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let thread = std::thread::Builder::new().name("provider-stub".to_owned()).spawn({
            let shared = Arc::clone(&shared);
            move || runtime.block_on(server::accept(listener, shared, stopped))
        })?;
        Ok(Self { address, shared, stop: Some(stop), thread: Some(thread) })
    }

    /// Where it listens.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// The base address for `provider.url`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Adds rules behind those that stand already; the first that matches acts.
    pub fn script(&self, rules: impl IntoIterator<Item = Rule>) {
        self.shared.state().script.add(rules);
    }

    /// Drops every rule: honest from here on.
    pub fn clear_script(&self) {
        self.shared.state().script.clear();
    }

    /// What was booked, in order.
    #[must_use]
    pub fn ledger(&self) -> Vec<LedgerEntry> {
        self.shared.state().ledger.entries()
    }

    /// Idempotency keys in the order in which their posts arrived, repeats included.
    #[must_use]
    pub fn journal(&self) -> Vec<String> {
        self.shared.state().journal.clone()
    }

    /// `traceparent` and `tracestate` of every post for this key, in the order of the journal.
    #[must_use]
    pub fn traces(&self, key: &str) -> Vec<(Option<String>, Option<String>)> {
        let state = self.shared.state();
        state.journal.iter().zip(&state.traces).filter(|(posted, _)| *posted == key).map(|(_, trace)| trace.clone()).collect()
    }

    /// The counters.
    #[must_use]
    pub fn calls(&self) -> Calls {
        self.shared.calls.borrow().clone()
    }

    /// Waits, without a limit of its own, until the counters satisfy `reached`. Needs no particular runtime.
    pub async fn wait_until(&self, reached: impl FnMut(&Calls) -> bool) -> Calls {
        let mut calls = self.shared.calls.subscribe();
        let seen = calls.wait_for(reached).await;
        seen.map_or_else(|_| self.calls(), |calls| calls.clone())
    }

    /// Lets every call that is held now go on.
    pub fn release(&self) {
        self.shared.released.send_modify(|generation| *generation += 1);
    }

    /// Forgets every key and its stored answer; the booked charges stay.
    pub fn forget_keys(&self) {
        self.shared.state().ledger.forget_keys();
    }

    /// Look-ups find nothing from here on, as while a provider's index lags behind; or they see again.
    pub fn be_blind(&self, blind: bool) {
        self.shared.state().blind = blind;
    }

    /// Closes the next `n` connections before reading from them.
    pub fn drop_connections(&self, n: u64) {
        self.shared.state().connections_to_drop += n;
    }
}

impl Drop for ProviderStub {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic of that thread has shown itself in the answers already.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests;
