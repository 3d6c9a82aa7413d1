//! The stub over a plain socket, so that nothing between test and wire hides a lie.

use std::io::{Read, Write};
use std::net::TcpStream;

use super::*;

const BODY: &str = r#"{"orderId":7,"amount":10.00,"currency":"EUR"}"#;

fn stub(script: Vec<Rule>) -> ProviderStub {
    ProviderStub::start(Options { script, ..Options::default() }).unwrap()
}

fn connect(stub: &ProviderStub) -> TcpStream {
    TcpStream::connect(stub.address()).unwrap()
}

fn send(stream: &mut TcpStream, method: &str, target: &str, key: &str, body: &str) {
    let length = body.len();
    let head = format!("{method} {target} HTTP/1.1\r\nHost: stub\r\nIdempotency-Key: {key}\r\nContent-Length: {length}\r\n");
    stream.write_all(format!("{head}\r\n{body}").as_bytes()).unwrap();
}

/// What comes until the connection ends; the error kind when it does not end in order.
fn read_to_end(stream: &mut TcpStream) -> Result<String, std::io::ErrorKind> {
    let mut text = String::new();
    stream.read_to_string(&mut text).map(|_| text).map_err(|fault| fault.kind())
}

/// One request on a connection that is closed afterwards.
fn ask(stub: &ProviderStub, method: &str, target: &str, key: &str, body: &str) -> String {
    let mut stream = connect(stub);
    let length = body.len();
    let head = format!("{method} {target} HTTP/1.1\r\nConnection: close\r\nIdempotency-Key: {key}\r\nContent-Length: {length}\r\n");
    stream.write_all(format!("{head}\r\n{body}").as_bytes()).unwrap();
    read_to_end(&mut stream).unwrap()
}

fn post(stub: &ProviderStub, key: &str) -> String {
    ask(stub, "POST", "/v1/charges", key, BODY)
}

#[test]
fn a_charge_is_booked_once_and_can_be_read_back() {
    let stub = stub(vec![]);
    let first = post(&stub, "k");
    assert!(first.starts_with("HTTP/1.1 200 OK\r\n"), "{first}");
    let body = r#"{"id":"ch_00000001","status":"succeeded","orderId":7,"amount":10.00,"currency":"EUR","idempotencyKey":"k"}"#;
    assert!(first.ends_with(body), "{first}");
    assert_eq!(post(&stub, "k"), first);
    assert_eq!(ask(&stub, "GET", "/v1/charges?idempotency_key=k", "", ""), first);
    assert!(ask(&stub, "GET", "/v1/charges?idempotency_key=other", "", "").starts_with("HTTP/1.1 404 "));
    assert!(ask(&stub, "POST", "/v1/charges", "k", "{}").starts_with("HTTP/1.1 422 "));
    let ledger = ask(&stub, "GET", "/v1/ledger", "", "");
    let line = r#"{"idempotency_key":"k","charge_id":"ch_00000001","order_id":7,"amount":"10.00","currency":"EUR","times_posted":3,"status":"charged"}"#;
    assert!(ledger.ends_with(&format!("{line}\n")), "{ledger}");
    let calls = stub.calls();
    assert_eq!((calls.posts, calls.replayed, calls.bodies_changed, calls.look_ups, calls.in_flight), (3, 1, 1, 2, 0));
    assert_eq!(stub.journal(), ["k", "k", "k"]);
}

#[test]
fn one_connection_carries_many_requests_even_when_they_arrive_together() {
    let stub = stub(vec![]);
    let mut stream = connect(&stub);
    for key in ["a", "b", "c"] {
        send(&mut stream, "POST", "/v1/charges", key, BODY);
    }
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(read_to_end(&mut stream).unwrap().matches("HTTP/1.1 200 OK").count(), 3);
    assert_eq!(stub.ledger().len(), 3);
    assert_eq!(stub.calls().connections, 1);
}

#[tokio::test]
async fn a_held_call_is_charged_at_once_answered_on_release_and_in_progress_meanwhile() {
    let stub = stub(vec![Rule::once(Act::Hold)]);
    let mut held = connect(&stub);
    send(&mut held, "POST", "/v1/charges", "k", BODY);
    stub.wait_until(|calls| calls.held == 1).await;
    assert_eq!(stub.ledger().len(), 1);
    assert!(post(&stub, "k").starts_with("HTTP/1.1 409 "));
    assert!(post(&stub, "other").starts_with("HTTP/1.1 200 "));
    assert!(ask(&stub, "POST", "/release", "", "").starts_with("HTTP/1.1 204 "));
    held.shutdown(std::net::Shutdown::Write).unwrap();
    assert!(read_to_end(&mut held).unwrap().contains("ch_00000001"));
    let calls = stub.wait_until(|calls| calls.in_flight == 0).await;
    assert_eq!((calls.max_in_flight, calls.in_progress, calls.held), (2, 1, 0));
}

#[tokio::test]
async fn a_call_goes_on_when_its_client_is_gone() {
    let stub = stub(vec![Rule::once(Act::Hold)]);
    let mut held = connect(&stub);
    send(&mut held, "POST", "/v1/charges", "k", BODY);
    stub.wait_until(|calls| calls.held == 1).await;
    drop(held);
    stub.release();
    stub.wait_until(|calls| calls.in_flight == 0).await;
    assert!(post(&stub, "k").contains("ch_00000001"));
    assert_eq!(stub.ledger().len(), 1);
}

#[test]
fn each_lie_about_the_connection_looks_as_it_should() {
    let close = |charge, reset| Act::Close { charge, reset };
    let lies = [
        (close(false, false), Ok(""), 0),
        (close(true, false), Ok(""), 1),
        (close(true, true), Err(std::io::ErrorKind::ConnectionReset), 1),
        (Act::HalfAnswer, Ok("HTTP/1.1 200 OK"), 1),
        (Act::AnswerThenClose, Ok("HTTP/1.1 200 OK"), 1),
    ];
    for (act, heard, booked) in lies {
        let stub = stub(vec![Rule::once(act.clone())]);
        let mut stream = connect(&stub);
        send(&mut stream, "POST", "/v1/charges", "k", BODY);
        let text = read_to_end(&mut stream);
        assert_eq!(text.as_deref().map(|text| text.lines().next().unwrap_or("")), heard.as_ref().map(|line| *line), "{act:?}");
        let whole = text.unwrap_or_default().ends_with('}');
        assert_eq!(whole, act == Act::AnswerThenClose, "{act:?}");
        assert_eq!(stub.ledger().len(), booked, "{act:?}");
        assert!(post(&stub, "k").starts_with("HTTP/1.1 200 "), "honest afterwards");
        assert_eq!(stub.ledger().len(), 1, "{act:?}");
    }
}

#[tokio::test]
async fn silence_lasts_until_the_client_gives_up() {
    let stub = stub(vec![Rule::once(Act::Silence { charge: true })]);
    let mut stream = connect(&stub);
    send(&mut stream, "POST", "/v1/charges", "k", BODY);
    stub.wait_until(|calls| calls.misbehaved == 1).await;
    stream.set_nonblocking(true).unwrap();
    assert_eq!(read_to_end(&mut stream), Err(std::io::ErrorKind::WouldBlock));
    drop(stream);
    stub.wait_until(|calls| calls.in_flight == 0).await;
    assert_eq!(stub.ledger().len(), 1);
}

#[test]
fn connections_are_dropped_unread_on_request() {
    let stub = stub(vec![]);
    assert!(ask(&stub, "POST", "/drop-connections?n=1", "", "").starts_with("HTTP/1.1 204 "));
    let mut dropped = connect(&stub);
    // The stub may close before or after these bytes arrive; either way it has read none of them.
    let _ = dropped.write_all(b"POST /v1/charges HTTP/1.1\r\n\r\n");
    assert!(!matches!(read_to_end(&mut dropped), Ok(text) if !text.is_empty()));
    assert!(post(&stub, "k").starts_with("HTTP/1.1 200 "));
    assert_eq!(stub.calls().posts, 1);
}

#[test]
fn scripts_and_counters_are_reached_over_http() {
    let stub = stub(vec![]);
    let rules = r#"[{"limit": 1, "act": {"reply": {"status": 503, "retry_after": "2"}}}, {"act": "in_progress"}]"#;
    assert!(ask(&stub, "POST", "/script", "", rules).starts_with("HTTP/1.1 204 "));
    assert!(ask(&stub, "POST", "/script", "", r#"[{"act": "explode"}]"#).starts_with("HTTP/1.1 400 "));
    let busy = post(&stub, "k");
    assert!(busy.starts_with("HTTP/1.1 503 ") && busy.contains("\r\nRetry-After: 2\r\n"), "{busy}");
    assert!(post(&stub, "k").starts_with("HTTP/1.1 409 "));
    assert!(ask(&stub, "DELETE", "/script", "", "").starts_with("HTTP/1.1 204 "));
    assert!(post(&stub, "k").starts_with("HTTP/1.1 200 "));
    assert!(ask(&stub, "GET", "/calls", "", "").contains(r#""posts":3"#));
}

#[test]
fn what_is_no_http_ends_the_connection() {
    let stub = stub(vec![]);
    for nonsense in [
        "\r\n\r\n",
        "\u{16}\u{3}\u{1}",
        "GET\r\n\r\n",
        "POST / HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n",
        "GET / HTTP/1.1\r\nx\r\n\r\n",
    ] {
        let mut stream = connect(&stub);
        stream.write_all(nonsense.as_bytes()).unwrap();
        assert_eq!(read_to_end(&mut stream).unwrap_or_default(), "", "{nonsense:?}");
    }
    assert!(post(&stub, "k").starts_with("HTTP/1.1 200 "));
}
