//! The stub's connections: each request gets its answer, or the lie that the script has for it.
//!
//! In: sockets. Out: answers, or what stands for them. It owns ledger, script and counters, behind one lock that is never held while
//! anything is awaited.
//!
//! Invariant: what is begun is finished, even if its client goes away: a charge is booked, a call is counted down.

use std::net::TcpListener as StdListener;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{oneshot, watch};

use super::Calls;
use super::http::{self, Connection, Request, Response};
use super::ledger::{self, Booked, Ledger};
use super::script::{Act, Reply, Rule, Script};

#[derive(Debug)]
pub(super) struct Shared {
    state: Mutex<State>,
    pub(super) calls: watch::Sender<Calls>,
    /// Grows by one at each release; a held call waits for the next value.
    pub(super) released: watch::Sender<u64>,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) ledger: Ledger,
    pub(super) script: Script,
    pub(super) connections_to_drop: u64,
    /// Keys in the order of their posts.
    pub(super) journal: Vec<String>,
    /// `traceparent` and `tracestate` of each post, in the same order.
    pub(super) traces: Vec<(Option<String>, Option<String>)>,
    /// Look-ups find nothing.
    pub(super) blind: bool,
}

impl State {
    fn find(&self, key: &str) -> Option<Response> {
        if self.blind { None } else { self.ledger.find(key, Instant::now()) }
    }
}

pub(super) async fn accept(listener: StdListener, shared: Arc<Shared>, mut stopped: oneshot::Receiver<()>) {
    let Ok(listener) = TcpListener::from_std(listener) else { return };
    loop {
        let stream = tokio::select! {
            _ = &mut stopped => return,
            accepted = listener.accept() => accepted,
        };
        // An accept fails for one connection (reset in the queue) or for want of descriptors; both pass.
        let Ok((stream, _)) = stream else {
            tokio::time::sleep(Duration::from_millis(10)).await;
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
        Act::Drip { ms } => connection.drip(&shared.book(request, None), Duration::from_millis(ms)).await,
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
            state.traces.push(request.trace.clone());
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
    pub(super) fn new(rules: Vec<Rule>, key_life: Option<Duration>) -> Self {
        let state = State {
            ledger: Ledger::new(key_life),
            script: Script::new(rules),
            connections_to_drop: 0,
            journal: Vec::new(),
            traces: Vec::new(),
            blind: false,
        };
        Self { state: Mutex::new(state), calls: watch::Sender::default(), released: watch::Sender::default() }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
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
                let found = request.query("idempotency_key").and_then(|key| self.state().find(&key));
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
