//! The admin port: probes, metrics, the status page, and what operators may ask for, over HTTP.
//!
//! In: requests. Out: what [`Readiness`], [`Status`], the database and the metrics say at that moment; requests of operators, written where
//! the partition's owner finds them. It owns one socket, one thread and two database connections, so that a scrape never waits for a batch,
//! nor a batch for a viewer. If it dies here, nothing else does.
//!
//! Invariant: without the token (`admin.token`) nothing can be changed through it and nothing of a record can be read; no secret can be
//! read at all. Nothing is applied here: what is asked for is carried out by the partition's owner, under its fence.

mod access;
mod api;
mod page;

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use actix_web::body::BoxBody;
use actix_web::dev::{Server, ServerHandle, ServiceRequest, ServiceResponse};
use actix_web::http::StatusCode;
use actix_web::http::header::{self, ContentType};
use actix_web::middleware::{DefaultHeaders, Next, from_fn};
use actix_web::{App, HttpResponse, HttpServer, web};
use serde_json::{Value, json};

use self::access::Access;
use crate::config::Config;
use crate::metrics;
use crate::metrics::DuplicateCause;
use crate::overview::Lookout;
use crate::pipeline::client::Client;
use crate::status::{Duplicated, PartitionStatus, Readiness, Status};
use crate::store::{DbError, Store};

/// What the port shows, and to whom.
#[derive(Clone, Debug)]
pub struct Admin {
    config: Arc<Config>,
    readiness: Readiness,
    status: Status,
    /// The engine's Kafka client, once it is there.
    client: Arc<OnceLock<Client>>,
    /// Its own connections.
    store: Store,
    lookout: Lookout,
    access: Access,
}

/// What is shown cannot be asked for, or not be kept from others.
#[derive(Debug, thiserror::Error)]
pub enum SetUpError {
    /// The database's settings.
    #[error(transparent)]
    Database(#[from] DbError),
    /// The file of the token.
    #[error("admin.token: {0}")]
    Token(String),
}

/// The port cannot be opened.
#[derive(Debug, thiserror::Error)]
#[error("the admin port {address} cannot be opened ({source}): is it in use? `admin.listen` chooses another")]
pub struct AdminError {
    /// The configured address.
    address: SocketAddr,
    source: io::Error,
}

/// An open port; it serves while [`Port::server`] is awaited.
#[expect(missing_debug_implementations, reason = "actix-web's server shows nothing")]
pub struct Port {
    /// The address it listens on; port 0 was replaced by a free one.
    pub address: SocketAddr,
    /// Stops it from elsewhere.
    pub handle: ServerHandle,
    /// Serves when awaited or spawned.
    pub server: Server,
}

impl Admin {
    /// Of this process. Nothing is asked before somebody looks.
    ///
    /// # Errors
    /// As [`Store::connect`], and the token's file cannot be used.
    pub fn new(config: &Config, readiness: Readiness, status: Status) -> Result<Self, SetUpError> {
        let config = Arc::new(config.clone());
        let access = Access::new(config.admin.token.as_ref()).map_err(SetUpError::Token)?;
        let store = Store::connect(&config.database.settings(), 1)?;
        let client = Arc::new(OnceLock::new());
        let lookout = Lookout::new(Arc::clone(&config), store.control.clone(), Arc::clone(&client), status.clone());
        Ok(Self { access, config, readiness, status, client, store, lookout })
    }

    /// Where the engine's Kafka client is put when it is there: the broker is asked through it.
    #[must_use]
    pub fn client(&self) -> Arc<OnceLock<Client>> {
        Arc::clone(&self.client)
    }

    /// Opens the port. To be called inside a Tokio or actix runtime.
    ///
    /// # Errors
    /// The address cannot be bound.
    pub fn open(self, listen: SocketAddr) -> Result<Port, AdminError> {
        let only_local = listen.ip().is_loopback();
        let bound = HttpServer::new(move || {
            let harmless = DefaultHeaders::new()
                .add((header::CACHE_CONTROL, "no-store"))
                .add((header::CONTENT_SECURITY_POLICY, "default-src 'none'; frame-ancestors 'none'"))
                .add((header::REFERRER_POLICY, "no-referrer"))
                .add((header::X_CONTENT_TYPE_OPTIONS, "nosniff"));
            App::new()
                .wrap(from_fn(move |request, next| by_a_name_of_ours(only_local, request, next)))
                .wrap(harmless)
                .app_data(web::Data::new(self.clone()))
                .route("/", web::get().to(page::page))
                .configure(api::routes)
                .route("/live", web::get().to(live))
                .route("/ready", web::get().to(ready))
                .route("/metrics", web::get().to(metrics))
                .route("/status", web::get().to(status))
        })
        .workers(1)
        .max_connections(MOST_CONNECTIONS)
        .client_request_timeout(HEAD)
        .disable_signals()
        .shutdown_timeout(1)
        .bind(listen);
        let http = bound.map_err(|source| AdminError { address: listen, source })?;
        let address = http.addrs().first().copied().unwrap_or(listen);
        let server = http.run();
        Ok(Port { address, handle: server.handle(), server })
    }

    fn json(&self) -> Value {
        let snapshot = self.status.snapshot();
        let red = self.readiness.red();
        let held = |(reason, state, count): &(crate::handler::HeldReason, crate::store::held_events::HeldState, i64)| json!({ "reason": reason.as_str(), "state": state.as_str(), "count": count });
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "topic": self.config.kafka.topic,
            "group": self.config.kafka.group,
            "ready": red.is_empty(),
            "not_ready": red.into_iter().map(|(latch, reason)| (latch.to_owned(), Value::from(reason))).collect::<serde_json::Map<_, _>>(),
            "paused": snapshot.paused,
            "partitions": snapshot.partitions.iter().map(|(number, partition)| partition_json(*number, partition)).collect::<Vec<_>>(),
            "duplicates": snapshot.duplicates.iter().map(duplicates_json).collect::<serde_json::Map<_, _>>(),
            "held_requests": snapshot.held_requests,
            "held": snapshot.held.iter().map(held).collect::<Vec<_>>(),
        })
    }
}

/// More wait to be accepted: the process needs its file descriptors for the database and Kafka.
const MOST_CONNECTIONS: usize = 256;
/// How long the head of a request may take.
const HEAD: Duration = Duration::from_secs(5);

/// On the loopback address only a browser that was led astray calls us by another name than the machine's own.
async fn by_a_name_of_ours(
    only_local: bool,
    request: ServiceRequest,
    next: Next<BoxBody>,
) -> Result<ServiceResponse<BoxBody>, actix_web::Error> {
    if only_local && !access::is_named_locally(request.headers()) {
        let words = "on the loopback address this port is asked for by an address or as localhost\n";
        let refused = HttpResponse::build(StatusCode::MISDIRECTED_REQUEST).content_type(ContentType::plaintext()).body(words);
        return Ok(request.into_response(refused));
    }
    next.call(request).await
}

/// Amounts are exact decimals, as text.
fn duplicates_json((cause, duplicated): (DuplicateCause, &Duplicated)) -> (String, Value) {
    let amounts =
        duplicated.minor_units.iter().map(|(currency, units)| (currency.to_string(), Value::from(currency.decimal_of(*units))));
    let amounts: serde_json::Map<_, _> = amounts.collect();
    (cause.as_str().to_owned(), json!({ "count": duplicated.count, "amounts_not_charged_again": amounts }))
}

fn partition_json(number: i32, partition: &PartitionStatus) -> Value {
    json!({
        "partition": number,
        "epoch": partition.epoch.0,
        "lag": partition.lag(),
        "window_records": partition.window_records,
        "window_bytes": partition.window_bytes,
        "in_flight": partition.in_flight,
        "frontier": partition.frontier.map(|next| next.0),
        "committed": partition.committed.map(|next| next.0),
        "end": partition.end.map(|next| next.0),
        "held_open": partition.held_open,
        "paused": partition.paused,
        "stopped": partition.stopped,
    })
}

/// A restart would not help: the process answers, and nothing in it is stuck. Whether it can work is `/ready`'s business.
async fn live(admin: web::Data<Admin>) -> HttpResponse {
    let stuck = admin.status.snapshot().stuck(admin.config.pipeline.stuck_after);
    if stuck.is_empty() {
        return HttpResponse::Ok().content_type(ContentType::plaintext()).body("live\n");
    }
    let lines: String = stuck.iter().map(|words| format!("{words}\n")).collect();
    HttpResponse::ServiceUnavailable().content_type(ContentType::plaintext()).body(lines)
}

async fn ready(admin: web::Data<Admin>) -> HttpResponse {
    let red = admin.readiness.red();
    if red.is_empty() {
        return HttpResponse::Ok().content_type(ContentType::plaintext()).body("ready\n");
    }
    let lines: String = red.iter().map(|(latch, reason)| format!("{latch}: {reason}\n")).collect();
    HttpResponse::ServiceUnavailable().content_type(ContentType::plaintext()).body(lines)
}

async fn metrics(admin: web::Data<Admin>) -> HttpResponse {
    let source = metrics::Source { group: &admin.config.kafka.group, topic: &admin.config.kafka.topic };
    let text = metrics::render(source, &admin.status, &admin.readiness);
    HttpResponse::Ok().content_type("text/plain; version=0.0.4; charset=utf-8").body(text)
}

async fn status(admin: web::Data<Admin>) -> HttpResponse {
    let mut text = format!("{:#}", admin.json());
    text.push('\n');
    HttpResponse::Ok().content_type(ContentType::json()).body(text)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;

    use super::*;
    use crate::config::Secret;
    use crate::record::{Epoch, NextOffset};

    const TOKEN: &str = "a-token-that-is-long-enough";

    fn admin() -> Admin {
        let mut config = Config::default();
        config.kafka.group = "billing".to_owned();
        config.database.url = Secret::new("postgres://nobody@127.0.0.1:1/nothing".to_owned());
        config.pipeline.stuck_after = Duration::from_millis(50);
        config.admin.token = Some(Secret::new(TOKEN.to_owned()));
        Admin::new(&config, Readiness::new(), Status::default()).expect("nothing is connected yet")
    }

    fn opened(admin: &Admin) -> SocketAddr {
        let port = admin.clone().open(SocketAddr::from(([127, 0, 0, 1], 0))).expect("a free port");
        actix_rt::spawn(port.server);
        port.address
    }

    async fn get(address: SocketAddr, path: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(address).await.expect("it listens");
        stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).await.expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.expect("answered");
        let status = answer.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a status line");
        (status, answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned()).unwrap_or_default())
    }

    // CASES A17, H07
    #[test]
    fn readiness_names_the_red_latch_and_liveness_does_not_care() {
        actix_rt::System::new().block_on(async {
            let admin = admin();
            let address = opened(&admin);
            assert_eq!(get(address, "/live").await, (200, "live\n".to_owned()));
            let (status, body) = get(address, "/ready").await;
            assert_eq!((status, body.as_str()), (503, "assignment: not yet\ndatabase: not yet\nschema: not yet\n"));

            for latch in [Readiness::DATABASE, Readiness::SCHEMA, Readiness::ASSIGNMENT] {
                admin.readiness.set(latch);
            }
            assert_eq!(get(address, "/ready").await, (200, "ready\n".to_owned()));

            admin.readiness.clear("partition 3", "the topic was made anew");
            assert_eq!(get(address, "/ready").await, (503, "partition 3: the topic was made anew\n".to_owned()));
            assert_eq!(get(address, "/live").await.0, 200);
        });
    }

    // CASES H07
    #[test]
    fn liveness_names_the_partition_that_is_stuck() {
        actix_rt::System::new().block_on(async {
            let admin = admin();
            let address = opened(&admin);
            admin.status.partition_owned(4, Epoch(1));
            admin.status.window(4, Epoch(1), 1, 100, None);
            let (status, body) = loop {
                let answer = get(address, "/live").await;
                if answer.0 != 200 {
                    break answer;
                }
            };
            assert_eq!((status, body.as_str()), (503, "partition 4 has records to settle and has settled none for 0 s\n"));
            admin.status.frontier(4, Epoch(1), NextOffset(1));
            assert_eq!(get(address, "/live").await.0, 200);
        });
    }

    #[test]
    fn status_tells_each_owned_partition_and_why_it_stands_still() {
        actix_rt::System::new().block_on(async {
            let admin = admin();
            admin.status.partition_owned(2, Epoch(5));
            admin.status.change(2, Epoch(5), |partition| {
                partition.frontier = Some(NextOffset(40));
                partition.end = Some(NextOffset(44));
                partition.in_flight = 3;
                partition.stopped = Some("schema: column gone".to_owned());
            });
            let address = opened(&admin);
            let (code, body) = get(address, "/status").await;
            let told: Value = serde_json::from_str(&body).expect("JSON");
            assert_eq!(code, 200);
            assert_eq!(
                (&told["topic"], &told["group"], &told["ready"]),
                (&json!("orders.confirmed"), &json!("billing"), &json!(false))
            );
            let partition = &told["partitions"][0];
            assert_eq!(partition["partition"], 2);
            assert_eq!(partition["epoch"], 5);
            assert_eq!(partition["lag"], 4);
            assert_eq!(partition["in_flight"], 3);
            assert_eq!(partition["committed"], Value::Null);
            assert_eq!(partition["stopped"], "schema: column gone");
        });
    }

    #[test]
    fn metrics_are_served_and_nothing_else_is() {
        actix_rt::System::new().block_on(async {
            let address = opened(&admin());
            let (code, body) = get(address, "/metrics").await;
            assert_eq!(code, 200);
            assert!(body.contains("# TYPE onceward_events_total counter"), "{body}");
            assert_eq!(get(address, "/anything").await.0, 404);
        });
    }

    /// Sends this, and gives the status that is answered; `None`: the connection ends without an answer.
    async fn told(address: SocketAddr, sent: &[u8]) -> Option<u16> {
        let mut stream = TcpStream::connect(address).await.expect("it listens");
        // What is refused at its head may be cut off before it is written.
        let _ = stream.write_all(sent).await;
        let mut answer = Vec::new();
        let _ = tokio::time::timeout(Duration::from_secs(20), stream.read_to_end(&mut answer)).await.expect("it ends");
        let answer = String::from_utf8_lossy(&answer).into_owned();
        answer.split(' ').nth(1).and_then(|code| code.parse().ok())
    }

    fn post(headers: &str, body: &str) -> Vec<u8> {
        let length = body.len();
        format!("POST /api/held/1/replay HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n{body}")
            .into_bytes()
    }

    #[test]
    fn a_page_that_makes_its_own_name_lead_here_reads_nothing() {
        actix_rt::System::new().block_on(async {
            let address = opened(&admin());
            for path in ["/", "/api/overview", "/api/held", "/metrics", "/status", "/ready"] {
                let get = |host: &str| format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n").into_bytes();
                assert_eq!(told(address, &get("evil.example:9464")).await, Some(421), "{path}");
                assert_ne!(told(address, &get("localhost:9464")).await, Some(421), "{path}");
            }
        });
    }

    #[test]
    fn a_request_that_is_too_long_is_refused_and_none_is_waited_for() {
        actix_rt::System::new().block_on(async {
            let address = opened(&admin());
            let token = format!("Authorization: Bearer {TOKEN}\r\n");
            let many: String = (0..1_000).map(|at| format!("X-{at}: x\r\n")).collect();
            for head in [format!("X-Long: {}\r\n", "x".repeat(1 << 20)), many] {
                let status = told(address, &post(&format!("{token}{head}"), "{}")).await;
                assert!(status.is_none_or(|status| (400..500).contains(&status)), "{status:?}");
            }
            assert_eq!(told(address, &post(&token, &"[".repeat(10_000))).await, Some(400), "deep");
            assert_eq!(told(address, &post(&token, &" ".repeat(1 << 20))).await, Some(400), "long");

            let open = |headers: &str| post(&format!("{headers}X-Ours: "), "");
            let half_a_body = |headers: &str| {
                let whole = String::from_utf8(post(headers, "{}")).expect("text").replace("Content-Length: 2", "Content-Length: 9");
                whole.into_bytes()
            };
            let (open, refused, slow) = (open(&token), half_a_body(""), half_a_body(&token));
            let waited = std::time::Instant::now();
            assert_eq!(told(address, &refused).await, Some(401), "of a stranger no body is read");
            assert!(waited.elapsed() < BODY_IS_LATE, "nor waited for");
            let (head, body) = tokio::join!(told(address, &open[..open.len() - 4]), told(address, &slow));
            assert_eq!((head.unwrap_or(408), body), (408, Some(400)));
            assert_eq!(get(address, "/live").await.0, 200, "others are served");
        });
    }

    const BODY_IS_LATE: Duration = Duration::from_secs(4);

    #[test]
    fn a_port_in_use_is_a_clear_error() {
        actix_rt::System::new().block_on(async {
            let taken = std::net::TcpListener::bind("127.0.0.1:0").and_then(|socket| Ok((socket.local_addr()?, socket)));
            let (address, _socket) = taken.expect("a free port");
            let error = admin().open(address).err().expect("it is taken").to_string();
            assert!(error.contains(&address.to_string()) && error.contains("admin.listen"), "{error}");
        });
    }
}
