//! A collector of spans: OTLP over HTTP, or a socket that takes everything and never says a word.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use prost::Message as _;

/// It listens until the tests end.
pub struct Collector {
    address: SocketAddr,
    /// Every body, as it came.
    bodies: Arc<Mutex<Vec<Vec<u8>>>>,
}

/// What a test looks at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// In hexadecimal, as in a `traceparent`.
    pub trace: String,
    pub id: String,
    /// Empty at a trace's root.
    pub parent: String,
    pub name: String,
    pub attributes: BTreeMap<String, String>,
    /// The spans that it links to.
    pub links: Vec<String>,
    /// What went wrong, if anything did.
    pub error: Option<String>,
}

impl Collector {
    pub fn start() -> Self {
        Self::listening(|stream, bodies| {
            let _ = serve(stream, bodies); // whoever ends a connection has said what there was to say
        })
    }

    /// Reads nothing and answers nothing, with the connection open.
    pub fn silent() -> Self {
        Self::listening(|stream, bodies| {
            bodies.lock().expect("whole").push(Vec::new());
            std::mem::forget(stream);
        })
    }

    fn listening(serve: impl Fn(TcpStream, &Mutex<Vec<Vec<u8>>>) + Copy + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("bound");
        let bodies = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&bodies);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let kept = Arc::clone(&kept);
                thread::spawn(move || serve(stream, &kept));
            }
        });
        Self { address, bodies }
    }

    /// For `tracing.otlp_endpoint`.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Exports, or connections of one that is silent.
    pub fn bodies(&self) -> Vec<Vec<u8>> {
        self.bodies.lock().expect("whole").clone()
    }

    /// Every span that has come.
    pub fn spans(&self) -> Vec<Span> {
        let requests = self.bodies().into_iter().map(|body| ExportTraceServiceRequest::decode(&body[..]).expect("OTLP"));
        let scopes = requests.flat_map(|request| request.resource_spans).flat_map(|resource| resource.scope_spans);
        scopes.flat_map(|scope| scope.spans).map(Span::of).collect()
    }
}

impl Span {
    fn of(span: opentelemetry_proto::tonic::trace::v1::Span) -> Self {
        let text = |value| match value {
            Some(Value::StringValue(text)) => text,
            Some(Value::IntValue(number)) => number.to_string(),
            other => panic!("{other:?}"),
        };
        let attributes = span.attributes.into_iter().map(|pair| (pair.key, text(pair.value.and_then(|value| value.value))));
        let failed = |status: &opentelemetry_proto::tonic::trace::v1::Status| status.code() == StatusCode::Error;
        Self {
            trace: hex(&span.trace_id),
            id: hex(&span.span_id),
            parent: hex(&span.parent_span_id),
            name: span.name,
            attributes: attributes.collect(),
            links: span.links.iter().map(|link| hex(&link.span_id)).collect(),
            error: span.status.filter(failed).map(|status| status.message),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn serve(stream: TcpStream, bodies: &Mutex<Vec<Vec<u8>>>) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut writer = stream;
    loop {
        let (mut length, mut head) = (0, String::new());
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line)? == 0 {
                return Ok(());
            }
            if line.trim().is_empty() {
                break;
            }
            if let Some((_, value)) = line.split_once(':').filter(|(name, _)| name.eq_ignore_ascii_case("content-length")) {
                length = value.trim().parse().expect("a length");
            }
            head.push_str(&line);
        }
        assert!(head.starts_with("POST /v1/traces ") && head.contains("application/x-protobuf"), "{head}");
        let mut body = vec![0; length];
        reader.read_exact(&mut body)?;
        bodies.lock().expect("whole").push(body);
        writer.write_all(b"HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\ncontent-length: 0\r\n\r\n")?;
    }
}
