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
//! | `GET /v1/charges?idempotency_key=K` | the stored answer of that key, or 404 |
//! | `GET /v1/ledger` | one JSON line per booked charge, decline or failure |
//! | `POST /script` | adds rules (a JSON array of [`Rule`]); `DELETE /script` drops them |
//! | `POST /release` | lets every held call go on |
//! | `POST /forget` | forgets every key, as a provider does after its key life |
//! | `POST /drop-connections?n=N` | closes the next N connections before reading from them |
//! | `GET /calls` | counters, among them the highest number of calls open at once |

mod http;
mod ledger;
mod script;

use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde::Serialize;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{oneshot, watch};

pub use self::ledger::{LedgerEntry, LedgerStatus};
pub use self::script::{Act, Reply, Rule, When};

use self::http::{Connection, Request, Response};
use self::ledger::{Booked, Ledger};
use self::script::Script;

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

/// `onceward provider-stub`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Address to listen on.
    #[arg(long, default_value = "127.0.0.1:8080")]
    listen: SocketAddr,
    /// A JSON array of rules to start with.
    #[arg(long)]
    script: Option<PathBuf>,
    /// Milliseconds after which an idempotency key is forgotten; without it, never.
    #[arg(long)]
    key_life_ms: Option<u64>,
}

/// Runs a stub until SIGINT or SIGTERM.
///
/// # Errors
/// The script cannot be read, or the address cannot be had.
pub async fn run(args: Args) -> io::Result<()> {
    let script = match args.script {
        Some(path) => serde_json::from_slice(&std::fs::read(path)?)?,
        None => Vec::new(),
    };
    let key_life = args.key_life_ms.map(Duration::from_millis);
    let stub = ProviderStub::start(Options { listen: Some(args.listen), script, key_life })?;
    println!("provider stub listens on {}", stub.url());
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    tokio::select! {
        interrupted = tokio::signal::ctrl_c() => interrupted,
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

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    calls: watch::Sender<Calls>,
    /// Grows by one at each release; a held call waits for the next value.
    released: watch::Sender<u64>,
}

#[derive(Debug)]
struct State {
    ledger: Ledger,
    script: Script,
    connections_to_drop: u64,
    /// Keys in the order of their posts.
    journal: Vec<String>,
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
        let state = State {
            ledger: Ledger::new(options.key_life),
            script: Script::new(options.script),
            connections_to_drop: 0,
            journal: Vec::new(),
        };
        let (calls, released) = (watch::Sender::default(), watch::Sender::default());
        let shared = Arc::new(Shared { state: Mutex::new(state), calls, released });
        let (stop, stopped) = oneshot::channel();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let thread = std::thread::Builder::new().name("provider-stub".to_owned()).spawn({
            let shared = Arc::clone(&shared);
            move || runtime.block_on(accept(listener, shared, stopped))
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

async fn accept(listener: StdListener, shared: Arc<Shared>, mut stopped: oneshot::Receiver<()>) {
    let Ok(listener) = TcpListener::from_std(listener) else { return };
    loop {
        let stream = tokio::select! {
            _ = &mut stopped => return,
            accepted = listener.accept() => accepted,
        };
        // An accept fails for one connection (reset in the queue) or for want of descriptors; both pass.
        let Ok((stream, _)) = stream else {
            tokio::task::yield_now().await;
            continue;
        };
        tokio::spawn(serve(stream, Arc::clone(&shared)));
    }
}

async fn serve(stream: TcpStream, shared: Arc<Shared>) {
    shared.count(|calls| calls.connections += 1);
    if shared.drops_this_connection() {
        return http::reset(stream);
    }
    let mut connection = Connection::new(stream);
    while let Ok(Some(request)) = connection.next_request().await {
        let next = match (request.method.as_str(), request.path.as_str()) {
            ("POST", "/v1/charges") => charge(connection, &shared, &request).await,
            _ => connection.answer(&shared.answer(&request)).await,
        };
        match next {
            Some(open) => connection = open,
            None => return,
        }
    }
}

/// One charge, by the script or honestly. It runs to its end even if the client goes away: what a provider has begun, it finishes.
async fn charge(connection: Connection, shared: &Shared, request: &Request) -> Option<Connection> {
    let _open = OpenCall::begin(shared, request);
    let Some(act) = shared.act_for(request) else {
        return connection.answer(&shared.book(request, None)).await;
    };
    shared.count(|calls| calls.misbehaved += 1);
    match act {
        Act::Delay { ms } => {
            if let Err(refusal) = shared.begin_work(request) {
                return connection.answer(&refusal).await;
            }
            tokio::time::sleep(Duration::from_millis(ms)).await;
            connection.answer(&shared.end_work(request)).await
        }
        Act::Hold => {
            let mut released = shared.released.subscribe();
            if let Err(refusal) = shared.begin_work(request) {
                return connection.answer(&refusal).await;
            }
            // Booked at once: a test that kills the engine now leaves a real charge behind.
            let answer = shared.book_held(request);
            shared.count(|calls| calls.held += 1);
            let _ = released.changed().await;
            shared.count(|calls| calls.held -= 1);
            shared.state().ledger.end_work(&request.key());
            connection.answer(&answer).await
        }
        Act::Silence { charge } => {
            if charge {
                shared.book(request, None);
            }
            connection.wait_for_close().await;
            None
        }
        Act::Close { charge, reset } => {
            if charge {
                shared.book(request, None);
            }
            connection.close(reset);
            None
        }
        Act::HalfAnswer => {
            connection.answer_half(&shared.book(request, None)).await;
            None
        }
        Act::AnswerThenClose => {
            drop(connection.answer(&shared.book(request, None)).await);
            None
        }
        Act::InProgress => {
            shared.count(|calls| calls.in_progress += 1);
            connection.answer(&Response::key_in_use()).await
        }
        Act::Reply(reply) => connection.answer(&shared.book(request, Some(&reply))).await,
    }
}

/// Counts a call as open until it is dropped.
struct OpenCall<'a>(&'a Shared);

impl<'a> OpenCall<'a> {
    fn begin(shared: &'a Shared, request: &Request) -> Self {
        let same_body = {
            let mut state = shared.state();
            let key = request.key();
            let same_body = state.ledger.note_post(&key, &request.body);
            state.journal.push(key);
            same_body
        };
        shared.count(|calls| {
            calls.posts += 1;
            calls.in_flight += 1;
            calls.max_in_flight = calls.max_in_flight.max(calls.in_flight);
            calls.bodies_changed += u64::from(!same_body);
        });
        Self(shared)
    }
}

impl Drop for OpenCall<'_> {
    fn drop(&mut self) {
        self.0.count(|calls| calls.in_flight -= 1);
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count(&self, change: impl FnOnce(&mut Calls)) {
        self.calls.send_modify(change);
    }

    fn drops_this_connection(&self) -> bool {
        let mut state = self.state();
        let drops = state.connections_to_drop > 0;
        state.connections_to_drop -= u64::from(drops);
        drops
    }

    fn act_for(&self, request: &Request) -> Option<Act> {
        let order_id = ledger::order_id(&request.body);
        self.state().script.next(&request.key(), order_id)
    }

    /// Books the charge and answers: with the stored answer of a known key, else honestly, else (`lie`) as the rule says.
    fn book(&self, request: &Request, lie: Option<&Reply>) -> Response {
        let booked = self.state().ledger.book(&request.key(), &request.body, lie, Instant::now());
        self.counted(booked)
    }

    fn book_held(&self, request: &Request) -> Response {
        let booked = self.state().ledger.book_held(&request.key(), &request.body, Instant::now());
        self.counted(booked)
    }

    fn begin_work(&self, request: &Request) -> Result<(), Response> {
        let refused = self.state().ledger.begin_work(&request.key());
        refused.map_err(|in_progress| self.counted(in_progress))
    }

    fn end_work(&self, request: &Request) -> Response {
        let answer = self.book_held(request);
        self.state().ledger.end_work(&request.key());
        answer
    }

    fn counted(&self, booked: Booked) -> Response {
        match booked {
            Booked::New(response) => response,
            Booked::Replayed(response) => {
                self.count(|calls| calls.replayed += 1);
                response
            }
            Booked::OtherBody => Response::other_body(),
            Booked::InProgress => {
                self.count(|calls| calls.in_progress += 1);
                Response::key_in_use()
            }
            Booked::Invalid(why) => {
                self.count(|calls| calls.invalid += 1);
                Response::error(400, "invalid_request_error", "invalid_request", why)
            }
        }
    }

    /// Everything but a charge.
    fn answer(&self, request: &Request) -> Response {
        match (request.method.as_str(), request.path.as_str()) {
            ("GET", "/v1/charges") => {
                self.count(|calls| calls.look_ups += 1);
                let found = request.query("idempotency_key").and_then(|key| self.state().ledger.stored(&key, Instant::now()));
                found.unwrap_or_else(|| Response::error(404, "invalid_request_error", "resource_missing", "no such key"))
            }
            ("GET", "/v1/ledger") => Response::json_lines(&self.state().ledger.entries()),
            ("GET", "/calls") => Response::json(&*self.calls.borrow()),
            ("POST", "/script") => match serde_json::from_slice::<Vec<Rule>>(&request.body) {
                Ok(rules) => {
                    self.state().script.add(rules);
                    Response::no_content()
                }
                Err(fault) => Response::error(400, "invalid_request_error", "invalid_script", &fault.to_string()),
            },
            ("DELETE", "/script") => {
                self.state().script.clear();
                Response::no_content()
            }
            ("POST", "/release") => {
                self.released.send_modify(|generation| *generation += 1);
                Response::no_content()
            }
            ("POST", "/forget") => {
                self.state().ledger.forget_keys();
                Response::no_content()
            }
            ("POST", "/drop-connections") => match request.query("n").map(|n| n.parse::<u64>()) {
                Some(Ok(n)) => {
                    self.state().connections_to_drop += n;
                    Response::no_content()
                }
                Some(Err(_)) | None => Response::error(400, "invalid_request_error", "invalid_query", "n is a count"),
            },
            _ => Response::error(404, "invalid_request_error", "unknown_path", "no such path"),
        }
    }
}

#[cfg(test)]
mod tests;
