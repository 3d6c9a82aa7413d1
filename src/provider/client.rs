//! One charge over HTTP, or the question what became of one.
//!
//! In: an event id and the bytes of its charge. Out: one [`Answer`] (or [`Found`]), always, within the time limit. It owns the connections; it keeps
//! nothing of a call. If it dies here, the attempt's row tells that the provider may have heard of the event. Its token and its certificates
//! are those that their files hold at that time.
//!
//! Invariant: "not reached" is said only when no connection stood, so that nothing can have been sent; whatever fails later is
//! unknown. It never sends a call a second time: what to do after an unknown answer is not decided here.

use std::error::Error;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use reqwest::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, InvalidHeaderValue};
use reqwest::{RequestBuilder, StatusCode, redirect};
use url::Url;
use uuid::Uuid;

use super::Settings;
use super::answer::{Answer, Found, Reply};
use super::profile::{CHARGES_PATH, Profile};
use crate::rotating::{Files, Rotating};
use crate::tls;
use crate::trace_context::{TRACEPARENT, TRACESTATE, TraceContext};

/// R-KFK-IDEM-4.
const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
/// The longest answer that is read, in bytes.
const LONGEST_ANSWER: usize = 64 * 1024;
/// Between two looks at the files of the token and the certificates.
const LOOK: Duration = Duration::from_secs(2);

/// The provider's client. It belongs to the runtime it is used on.
#[derive(Clone, Debug)]
pub struct Client {
    /// Made anew when a file has changed: calls that run end on their old connections.
    http: Arc<Rotating<reqwest::Client, ClientError>>,
    charges: Url,
    profile: Profile,
    call_timeout: Duration,
}

/// Settings from which no client can be made.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The address is no `http` or `https` address.
    #[error("the provider's address cannot be used: {0}")]
    Url(String),
    /// The file of the token cannot be used.
    #[error("the provider's token: {0}")]
    TokenFile(String),
    /// The token cannot stand in a header.
    #[error("the provider's token holds characters that no header can carry")]
    Token(#[from] InvalidHeaderValue),
    /// A certificate or a key.
    #[error("TLS to the provider: {0}")]
    Tls(#[from] tls::Fault),
    /// Anything else.
    #[error("the HTTP client cannot be made: {0}")]
    Http(#[from] reqwest::Error),
}

impl Client {
    /// Makes a client. No connection is made yet.
    ///
    /// # Errors
    /// The address, the token or a file cannot be used, or an `https` address meets a machine without root certificates.
    pub fn new(settings: &Settings) -> Result<Self, ClientError> {
        let charges = charges_url(&settings.url)?;
        let (of_files, url) = (settings.clone(), charges.clone());
        let http = Rotating::new("provider", LOOK, move |files| http(&of_files, &url, files))?;
        Ok(Self { http: Arc::new(http), charges, profile: settings.profile.clone(), call_timeout: settings.call_timeout })
    }

    /// The longest time that [`Self::charge`] takes.
    #[must_use]
    pub const fn call_timeout(&self) -> Duration {
        self.call_timeout
    }

    /// Posts one charge, as part of this trace. `had_unknown` = an earlier answer for this event was unknown.
    pub async fn charge(&self, event_id: Uuid, body: Vec<u8>, had_unknown: bool, trace: Option<&TraceContext>) -> Answer {
        // `Uuid` shows itself as lower-case hyphenated text, the one spelling of the key (CASES F14).
        let request = self.http.get().post(self.charges.clone()).header(IDEMPOTENCY_KEY, event_id.to_string()).body(body);
        match whole_answer(of_trace(request, trace)).await {
            Ok(whole) => Answer::classify(whole.reply(), had_unknown, &self.profile, SystemTime::now()),
            Err(answer) => answer,
        }
    }

    /// Asks the base address for anything: that the provider answers at all, over TLS where it is used. Nothing is charged by it.
    ///
    /// # Errors
    /// In words, why there was no answer.
    pub async fn reach(&self) -> Result<StatusCode, String> {
        let mut url = self.charges.clone();
        let base = url.path().strip_suffix(CHARGES_PATH).unwrap_or_default().to_owned();
        url.set_path(&base);
        self.http.get().get(url).send().await.map(|response| response.status()).map_err(in_words)
    }

    /// Asks what became of the charge of this event. Nothing is charged by it.
    pub async fn find(&self, event_id: Uuid, trace: Option<&TraceContext>) -> Found {
        let key = event_id.to_string();
        let mut url = self.charges.clone();
        url.query_pairs_mut().append_pair("idempotency_key", &key);
        match whole_answer(of_trace(self.http.get().get(url), trace)).await {
            Ok(whole) => Found::classify(whole.reply(), &key, &self.profile, SystemTime::now()),
            Err(answer) => Found::Unclear(answer),
        }
    }
}

fn http(settings: &Settings, charges: &Url, files: &mut Files) -> Result<reqwest::Client, ClientError> {
    let mut headers = HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static("application/json"))]);
    if let Some(token) = &settings.token {
        let token = token.now(files).map_err(ClientError::TokenFile)?;
        let mut value = HeaderValue::try_from(format!("Bearer {token}"))?;
        value.set_sensitive(true);
        headers.insert(AUTHORIZATION, value);
    }
    let builder = reqwest::Client::builder()
        .user_agent(concat!("onceward/", env!("CARGO_PKG_VERSION")))
        .default_headers(headers)
        .timeout(settings.call_timeout)
        // Shorter than the whole call, so that a provider that cannot be reached is "not reached" and not "unknown".
        .connect_timeout(settings.call_timeout / 2)
        .pool_max_idle_per_host(settings.max_in_flight)
        .redirect(redirect::Policy::none())
        .retry(reqwest::retry::never())
        .no_proxy();
    Ok(settings.tls.of_http(builder, charges, files)?.build()?)
}

/// An answer, read to its end.
struct Whole {
    status: StatusCode,
    headers: HeaderMap,
    body: Vec<u8>,
}

impl Whole {
    fn reply(&self) -> Reply<'_> {
        Reply { status: self.status, headers: &self.headers, body: &self.body }
    }
}

/// The request as part of a trace.
fn of_trace(request: RequestBuilder, trace: Option<&TraceContext>) -> RequestBuilder {
    let Some(trace) = trace else { return request };
    let request = request.header(TRACEPARENT, trace.to_string());
    match trace.state() {
        Some(state) => request.header(TRACESTATE, state),
        None => request,
    }
}

async fn whole_answer(request: RequestBuilder) -> Result<Whole, Answer> {
    let mut response = request.send().await.map_err(|fault| Answer::failed(fault.is_connect(), in_words(fault)))?;
    let mut body = Vec::new();
    loop {
        match response.chunk().await {
            Ok(Some(chunk)) if body.len() + chunk.len() <= LONGEST_ANSWER => body.extend_from_slice(&chunk),
            Ok(Some(_)) => return Err(Answer::unknown(format!("the answer is longer than {LONGEST_ANSWER} bytes"))),
            Ok(None) => break,
            Err(fault) => return Err(Answer::unknown(in_words(fault))),
        }
    }
    Ok(Whole { status: response.status(), headers: std::mem::take(response.headers_mut()), body })
}

fn charges_url(base: &str) -> Result<Url, ClientError> {
    let mut url = Url::parse(base).map_err(|fault| ClientError::Url(fault.to_string()))?;
    let refused = |why: &str| Err(ClientError::Url(why.to_owned()));
    if !matches!(url.scheme(), "http" | "https") {
        return refused("it is neither http nor https");
    }
    if !url.username().is_empty() || url.password().is_some() {
        return refused("it holds credentials; they belong into the token");
    }
    if url.query().is_some() || url.fragment().is_some() {
        return refused("it has a query or a fragment");
    }
    let path = format!("{}{CHARGES_PATH}", url.path().trim_end_matches('/'));
    url.set_path(&path);
    Ok(url)
}

/// The fault with its causes, without the address: it is the same for every call.
fn in_words(fault: reqwest::Error) -> String {
    let fault = fault.without_url();
    let mut words = fault.to_string();
    let mut cause = fault.source();
    while let Some(next) = cause {
        // Writing to a String cannot fail.
        let _ = write!(words, ": {next}");
        cause = next.source();
    }
    words
}

#[cfg(test)]
#[cfg(feature = "lab")]
mod tests {
    use std::io::Write as _;

    use super::super::profile::tests::profile;
    use super::*;
    use crate::config::Secret;
    use crate::lab::provider_stub::{Act, Options, ProviderStub, Reply as Scripted, Rule};
    use crate::tls::Tls;

    const BODY: &[u8] = br#"{"orderId":7,"amount":10.00,"currency":"EUR"}"#;

    fn settings(url: String) -> Settings {
        Settings {
            url,
            token: None,
            tls: Tls::default(),
            call_timeout: Duration::from_secs(10),
            max_in_flight: 4,
            profile: profile(),
        }
    }

    fn stub(script: Vec<Rule>) -> (ProviderStub, Client) {
        let stub = ProviderStub::start(Options { script, ..Options::default() }).unwrap();
        let client = Client::new(&settings(stub.url())).unwrap();
        (stub, client)
    }

    async fn charge(client: &Client, id: Uuid) -> Answer {
        client.charge(id, BODY.to_vec(), false, None).await
    }

    async fn charge_of(client: &Client, id: Uuid) -> &'static str {
        charge(client, id).await.class()
    }

    // CASES F14; R-KFK-IDEM-4.
    #[tokio::test]
    async fn the_key_is_the_canonical_event_id_however_it_was_spelled() {
        let (stub, client) = stub(vec![]);
        let id = Uuid::parse_str("urn:uuid:0190A1B2-C3D4-7E5F-8A9B-0C1D2E3F4A5B").unwrap();
        let first = charge(&client, id).await;
        assert_eq!(first, Answer::Charged { charge_id: "ch_00000001".to_owned() });
        assert_eq!(charge(&client, id).await, first);
        assert_eq!(stub.journal(), ["0190a1b2-c3d4-7e5f-8a9b-0c1d2e3f4a5b"; 2]);
        assert_eq!(stub.ledger()[0].amount, "10.00");
        assert_eq!(stub.calls().connections, 1, "kept alive");
    }

    // CASES G07, G09: whatever is lost on the way back, the same key brings the stored answer.
    #[tokio::test]
    async fn a_lost_answer_is_unknown_and_the_next_call_finds_the_charge() {
        for act in
            [Act::Close { charge: true, reset: false }, Act::Close { charge: true, reset: true }, Act::HalfAnswer, Act::html()]
        {
            let (stub, client) = stub(vec![Rule::once(act.clone())]);
            let id = Uuid::now_v7();
            let lost = charge(&client, id).await;
            assert_eq!(lost.class(), "unknown", "{act:?}: {lost:?}");
            assert_eq!(charge(&client, id).await.class(), "charged", "{act:?}");
            assert_eq!(stub.ledger().len(), 1, "{act:?}");
            assert_eq!(stub.calls().bodies_changed, 0, "{act:?}");
        }
    }

    // CASES G07 (a): the connection died while it was idle. The client may notice before it writes (and takes another one) or not.
    #[tokio::test]
    async fn a_connection_that_died_idle_costs_no_second_charge() {
        let (stub, client) = stub(vec![Rule::once(Act::AnswerThenClose)]);
        assert_eq!(charge(&client, Uuid::now_v7()).await.class(), "charged");
        let id = Uuid::now_v7();
        let answer = charge(&client, id).await;
        assert!(matches!(answer.class(), "charged" | "unknown"), "{answer:?}");
        assert_eq!(charge(&client, id).await.class(), "charged");
        assert_eq!(stub.ledger().len(), 2);
    }

    #[tokio::test]
    async fn a_connection_closed_before_it_was_read_is_never_an_answer() {
        let (stub, client) = stub(vec![]);
        stub.drop_connections(1);
        let answer = charge(&client, Uuid::now_v7()).await;
        // The reset may already meet the connecting, before which nothing can have been sent.
        assert!(["unknown", "not_reached"].contains(&answer.class()), "{answer:?}");
        assert!(stub.ledger().is_empty());
    }

    // CASES G10: the one limit covers all of the call.
    #[tokio::test]
    async fn silence_ends_by_the_total_time_limit() {
        let silent = |charge| async move {
            let (stub, _) = stub(vec![]);
            let client = Client::new(&Settings { call_timeout: Duration::from_millis(500), ..settings(stub.url()) }).unwrap();
            assert_eq!(charge_of(&client, Uuid::now_v7()).await, "charged", "the connection stands");
            stub.script([Rule::once(Act::Silence { charge })]);
            assert_eq!(charge_of(&client, Uuid::now_v7()).await, "unknown");
            stub.wait_until(|calls| calls.posts == 2 && calls.in_flight == 0).await;
            assert_eq!(stub.ledger().len(), 1 + usize::from(charge));
        };
        tokio::join!(silent(false), silent(true));
    }

    // CASES G10: every byte comes in time, and the answer does not.
    #[tokio::test]
    async fn an_answer_that_drips_ends_by_the_total_time_limit_and_the_next_call_finds_the_charge() {
        let (stub, _) = stub(vec![Rule::once(Act::Drip { ms: 20 })]);
        let client = Client::new(&Settings { call_timeout: Duration::from_millis(500), ..settings(stub.url()) }).unwrap();
        let id = Uuid::now_v7();
        assert_eq!(charge_of(&client, id).await, "unknown");
        assert_eq!(charge_of(&client, id).await, "charged");
        assert_eq!(stub.ledger().len(), 1);
    }

    #[tokio::test]
    async fn a_wait_is_understood_in_every_form_a_provider_may_write_it() {
        let busy = |retry_after: Option<&str>, retry_after_date_s| {
            let retry_after = retry_after.map(str::to_owned);
            Act::Reply(Scripted { status: 503, retry_after, retry_after_date_s, ..Scripted::default() })
        };
        let second = Duration::from_secs(1);
        for (act, waits) in [
            (busy(Some("7"), None), 7 * second..=7 * second),
            (busy(None, Some(30)), 28 * second..=30 * second),
            (busy(None, Some(-30)), Duration::ZERO..=second / 2),
            (busy(None, None), second..=second),
            (busy(Some("in a moment"), None), second..=second),
            (busy(Some("99999999"), None), 60 * second..=60 * second),
        ] {
            let (_stub, client) = stub(vec![Rule::once(act.clone())]);
            let wait = charge(&client, Uuid::now_v7()).await.wait_for_all();
            assert!(wait.is_some_and(|wait| waits.contains(&wait)), "{act:?}: {wait:?}");
        }
    }

    // CASES G01: the second call meets the first, which its client has given up.
    #[tokio::test]
    async fn a_key_in_use_is_in_progress_and_later_charged_once() {
        let (stub, client) = stub(vec![Rule::once(Act::Hold)]);
        let id = Uuid::now_v7();
        let first = tokio::spawn({
            let client = client.clone();
            async move { charge(&client, id).await }
        });
        stub.wait_until(|calls| calls.held == 1).await;
        first.abort();
        assert_eq!(charge(&client, id).await.class(), "in_progress");
        stub.release();
        stub.wait_until(|calls| calls.in_flight == 0).await;
        assert_eq!(charge(&client, id).await.class(), "charged");
        assert_eq!(stub.ledger().len(), 1);
    }

    // CASES G04.
    #[tokio::test]
    async fn another_body_under_the_key_is_a_mismatch() {
        let (_stub, client) = stub(vec![]);
        let id = Uuid::now_v7();
        assert_eq!(charge(&client, id).await.class(), "charged");
        let other = client.charge(id, br#"{"orderId":7,"amount":10.0,"currency":"EUR"}"#.to_vec(), false, None).await;
        assert_eq!(other.class(), "mismatch");
    }

    #[tokio::test]
    async fn what_was_charged_is_found_by_its_key_also_when_the_key_is_forgotten() {
        let (stub, client) = stub(vec![]);
        let (charged, never) = (Uuid::now_v7(), Uuid::now_v7());
        charge(&client, charged).await;
        stub.forget_keys();
        assert_eq!(client.find(charged, None).await, Found::Charge { charge_id: "ch_00000001".to_owned() });
        assert_eq!(client.find(never, None).await, Found::Nothing);
        assert_eq!((stub.calls().posts, stub.calls().look_ups, stub.ledger().len()), (1, 2, 1));
        drop(stub);
        assert!(matches!(client.find(charged, None).await, Found::Unclear(_)));
    }

    #[tokio::test]
    async fn scripted_statuses_come_through_the_wire() {
        for (act, class) in [
            (Act::declined(), "declined"),
            (Act::stored_failure(), "unknown"),
            (Act::status(400), "rejected"),
            (Act::status(401), "configuration"),
            (Act::redirect(), "redirect"),
            (Act::busy(429, "2"), "too_many"),
            (Act::busy(503, "2"), "unavailable"),
        ] {
            let (stub, client) = stub(vec![Rule::always(act)]);
            let answer = charge(&client, Uuid::now_v7()).await;
            assert_eq!(answer.class(), class, "{answer:?}");
            assert!(!matches!(class, "too_many" | "unavailable") || answer.wait_for_all() == Some(Duration::from_secs(2)));
            assert_eq!(stub.calls().posts, 1, "asked once, redirects not followed");
        }
    }

    #[tokio::test]
    async fn an_endless_answer_is_not_read_to_its_end() {
        let long = Scripted { status: 200, body: Some("x".repeat(LONGEST_ANSWER + 1)), ..Scripted::default() };
        let (_stub, client) = stub(vec![Rule::once(Act::Reply(long))]);
        let answer = charge(&client, Uuid::now_v7()).await;
        assert_eq!(answer, Answer::unknown("the answer is longer than 65536 bytes".to_owned()));
    }

    #[tokio::test]
    async fn an_endless_head_is_not_read_to_its_end() {
        for line in ["X-More: more\r\n".to_owned(), "x".repeat(4_096)] {
            let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            let url = format!("http://{}", server.local_addr().unwrap());
            let sent = std::thread::spawn(move || {
                let (mut stream, _) = server.accept().unwrap();
                let (mut sent, mut written) = (0, stream.write_all(b"HTTP/1.1 200 OK\r\nX-First: "));
                while written.is_ok() {
                    sent += line.len();
                    written = stream.write_all(line.as_bytes());
                }
                sent
            });
            let client = Client::new(&settings(url)).unwrap();
            let begun = std::time::Instant::now();
            assert_eq!(charge(&client, Uuid::now_v7()).await.class(), "unknown");
            assert!(begun.elapsed() < client.call_timeout(), "it is the length that ends it");
            assert!(sent.join().unwrap() < 16 << 20, "what the two sockets hold, and a little more");
        }
    }

    #[tokio::test]
    async fn a_provider_that_cannot_be_reached_has_heard_nothing() {
        let (stub, _) = stub(vec![]);
        let refused = stub.url();
        drop(stub);
        // A label of 64 characters: no name, so no resolver is asked.
        for url in [refused, format!("http://{}.invalid", "a".repeat(64))] {
            let client = Client::new(&settings(url)).unwrap();
            let answer = charge(&client, Uuid::now_v7()).await;
            assert_eq!(answer.class(), "not_reached", "{answer:?}");
        }
    }

    #[tokio::test]
    async fn an_https_address_speaks_tls_and_a_plain_server_has_heard_nothing() {
        let (stub, _) = stub(vec![]);
        let url = stub.url().replace("http:", "https:");
        match Client::new(&settings(url)) {
            Ok(client) => assert_eq!(charge(&client, Uuid::now_v7()).await.class(), "not_reached"),
            Err(fault) => assert!(matches!(fault, ClientError::Tls(_)), "a machine without certificates: {fault}"),
        }
        assert_eq!(stub.calls().posts, 0);
    }

    #[test]
    fn unusable_settings_are_named() {
        for url in ["", "provider", "ftp://provider", "http://", "http://provider?x=1", "http://a:b@provider"] {
            let fault = Client::new(&settings(url.to_owned())).unwrap_err();
            assert!(matches!(fault, ClientError::Url(_)), "{url}: {fault}");
        }
        let token = Settings { token: Some(Secret::new("a\nb".to_owned())), ..settings("http://provider".to_owned()) };
        assert!(matches!(Client::new(&token).unwrap_err(), ClientError::Token(_)));
        for (base, whole) in [("http://p", "http://p/v1/charges"), ("https://p:1/api/", "https://p:1/api/v1/charges")] {
            assert_eq!(charges_url(base).unwrap().as_str(), whole);
        }
    }
}
