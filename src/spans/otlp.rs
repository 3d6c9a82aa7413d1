//! OpenTelemetry: spans by its SDK, exported over HTTP in protobuf by a thread of its own.
//!
//! In, out and invariant: as in `spans.rs`. The names of attributes are those of OpenTelemetry's semantic conventions where they have one.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, anyhow};
use opentelemetry::trace::{
    Link, Span as _, SpanBuilder, SpanContext, SpanId, SpanKind, Status, TraceContextExt as _, TraceFlags, TraceId, TraceState,
    Tracer as _, TracerProvider as _,
};
use opentelemetry::{Context, KeyValue};
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig as _, WithHttpConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, Sampler, SamplingResult, SdkTracer, SdkTracerProvider, ShouldSample, Span, SpanData,
    SpanExporter as Exports,
};
use tracing::{info, warn};
use url::Url;

use crate::config::Config;
use crate::handler::Outcome;
use crate::provider::Answer;
use crate::record::Offset;
use crate::rotating::Files;
use crate::tls::Tls;
use crate::trace_context::TraceContext;

/// The longest time of one export.
const EXPORT: Duration = Duration::from_secs(5);
/// How long spans are collected before they are exported.
const COLLECT: Duration = Duration::from_secs(1);
/// Spans that wait for their export: some ten megabytes. What comes beyond them is dropped.
const QUEUE: usize = 16_384;
/// How long the end of the process waits for what is queued.
const LAST_EXPORT: Duration = Duration::from_secs(2);

#[derive(Clone, Debug)]
pub struct Tracer {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
    place: Arc<Place>,
}

/// What all spans say of where they are.
#[derive(Debug)]
struct Place {
    name: String,
    attributes: Vec<KeyValue>,
}

#[derive(Debug)]
pub struct Batch {
    tracer: Tracer,
    begun: SystemTime,
    partition: i32,
    /// One for each event, in their order; `None`: it is not recorded.
    spans: Vec<Option<Span>>,
}

#[derive(Debug)]
pub struct Call(Span);

impl Tracer {
    pub fn start(endpoint: &Url, config: &Config) -> anyhow::Result<Self> {
        let exporter = Told { exporter: exporter(endpoint)?, fails: AtomicBool::new(false) };
        let bounds = BatchConfigBuilder::default().with_max_queue_size(QUEUE).with_scheduled_delay(COLLECT).build();
        let most_links = u32::try_from(config.pipeline.batch_max).unwrap_or(u32::MAX);
        let who = [
            KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
            KeyValue::new("service.instance.id", crate::app::owner()),
        ];
        let provider = SdkTracerProvider::builder()
            .with_span_processor(BatchSpanProcessor::builder(exporter).with_batch_config(bounds).build())
            .with_sampler(Sampler::parent_based(OfRoots(Sampler::TraceIdRatioBased(config.tracing.sample_ratio.as_f64()))))
            .with_max_links_per_span(most_links)
            .with_resource(Resource::builder().with_service_name("onceward").with_attributes(who).build())
            .build();
        let topic = &config.kafka.topic;
        let attributes = vec![
            KeyValue::new("messaging.system", "kafka"),
            KeyValue::new("messaging.operation.type", "process"),
            KeyValue::new("messaging.destination.name", topic.clone()),
            KeyValue::new("messaging.consumer.group.name", config.kafka.group.clone()),
        ];
        let place = Arc::new(Place { name: format!("process {topic}"), attributes });
        Ok(Self { tracer: provider.tracer("onceward"), provider, place })
    }

    pub fn batch(&self, partition: i32) -> Batch {
        Batch { tracer: self.clone(), begun: SystemTime::now(), partition, spans: Vec::new() }
    }

    /// `None`: the trace is not recorded.
    pub fn call(&self, trace: &TraceContext) -> Option<(Call, TraceContext)> {
        let builder = SpanBuilder::from_name("POST /v1/charges").with_kind(SpanKind::Client);
        let mut span = self.tracer.build_with_context(builder, &context_of(trace, false));
        let ours = ours(&span, Some(trace))?;
        span.set_attribute(KeyValue::new("http.request.method", "POST"));
        Some((Call(span), ours))
    }

    pub fn stop(&self) {
        if let Err(error) = self.provider.shutdown_with_timeout(LAST_EXPORT) {
            warn!(%error, "the last spans may not have been exported");
        }
    }
}

impl Batch {
    pub fn begin(&mut self, offset: Offset, trace: Option<&Arc<TraceContext>>) -> Option<Arc<TraceContext>> {
        let parent = trace.map_or_else(Context::new, |trace| context_of(trace, true));
        let builder = SpanBuilder::from_name("process").with_kind(SpanKind::Consumer).with_start_time(self.begun);
        let mut span = self.tracer.tracer.build_with_context(builder, &parent);
        let Some(ours) = ours(&span, trace.map(|trace| &**trace)) else {
            self.spans.push(None);
            return trace.cloned();
        };
        span.update_name(self.tracer.place.name.clone());
        span.set_attributes(self.attributes());
        span.set_attribute(KeyValue::new("messaging.kafka.offset", offset.0));
        self.spans.push(Some(span));
        Some(Arc::new(ours))
    }

    pub fn conclude(&mut self, outcomes: &[Outcome]) {
        for (span, outcome) in self.spans.iter_mut().zip(outcomes) {
            let Some(span) = span else { continue };
            let word = word(outcome);
            span.set_attribute(KeyValue::new("onceward.outcome", word));
            if !matches!(outcome, Outcome::Applied | Outcome::Declined) {
                span.set_status(Status::error(word));
            }
        }
    }

    pub fn committed(mut self) {
        self.end(None);
    }

    /// Ends the events' spans, and tells of the transaction if it had any that are recorded.
    fn end(&mut self, failed: Option<&'static str>) {
        let events = self.spans.len();
        let mut links = Vec::new();
        for mut span in std::mem::take(&mut self.spans).into_iter().flatten() {
            links.push(Link::with_context(span.span_context().clone()));
            if let Some(why) = failed {
                span.set_status(Status::error(why));
            }
            span.end();
        }
        if links.is_empty() {
            return;
        }
        let events = KeyValue::new("messaging.batch.message_count", i64::try_from(events).unwrap_or(i64::MAX));
        let builder = SpanBuilder::from_name("transaction")
            .with_start_time(self.begun)
            .with_attributes(self.attributes().chain([events]))
            .with_links(links);
        let mut span = self.tracer.tracer.build_with_context(builder, &Context::new());
        if let Some(why) = failed {
            span.set_status(Status::error(why));
        }
        span.end();
    }

    fn attributes(&self) -> impl Iterator<Item = KeyValue> + use<> {
        let partition = KeyValue::new("messaging.destination.partition.id", self.partition.to_string());
        self.tracer.place.attributes.clone().into_iter().chain([partition])
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        self.end(Some("no COMMIT was answered"));
    }
}

impl Call {
    pub fn answered(mut self, answer: &Answer) {
        let class = answer.class();
        self.0.set_attribute(KeyValue::new("onceward.answer", class));
        if !matches!(answer, Answer::Charged { .. } | Answer::Declined { .. }) {
            self.0.set_status(Status::error(class));
        }
        self.0.end();
    }
}

/// A closed list, as all that a span says in words.
const fn word(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Applied => "applied",
        Outcome::Declined => "declined",
        Outcome::NotStarted { .. } => "not_started",
        Outcome::Retry { .. } => "retryable",
        Outcome::Unknown { .. } => "unknown",
        Outcome::Rejected { .. } => "rejected",
        Outcome::Conflict { .. } => "conflict",
        Outcome::Refused { .. } => "refused",
        Outcome::NotRecorded { .. } => "charged_not_recorded",
        Outcome::Behind => "behind",
    }
}

/// Without what others want to be carried along: a producer wrote it, and it is no business of our collector's.
fn context_of(trace: &TraceContext, is_remote: bool) -> Context {
    let (trace_id, parent) = (TraceId::from(trace.trace_id), SpanId::from(trace.parent_id));
    Context::new().with_remote_span_context(SpanContext::new(
        trace_id,
        parent,
        TraceFlags::new(trace.flags),
        is_remote,
        TraceState::NONE,
    ))
}

/// What goes on under this span, with what came along; `None`: it is not recorded.
fn ours(span: &Span, came: Option<&TraceContext>) -> Option<TraceContext> {
    let context = span.span_context();
    span.is_recording().then(|| TraceContext {
        trace_id: u128::from_be_bytes(context.trace_id().to_bytes()),
        parent_id: u64::from_be_bytes(context.span_id().to_bytes()),
        flags: context.trace_flags().to_u8(),
        state: came.and_then(|came| came.state.clone()),
    })
}

/// Traces that begin here. A span with links is a transaction's, and any of its events is recorded.
#[derive(Clone, Debug)]
struct OfRoots(Sampler);

impl ShouldSample for OfRoots {
    fn should_sample(
        &self,
        parent: Option<&Context>,
        trace_id: TraceId,
        name: &str,
        kind: &SpanKind,
        attributes: &[KeyValue],
        links: &[Link],
    ) -> SamplingResult {
        let sampler = if links.is_empty() { &self.0 } else { &Sampler::AlwaysOn };
        sampler.should_sample(parent, trace_id, name, kind, attributes, links)
    }
}

/// A blocking client, for the thread that exports: no runtime of ours ever waits with it.
fn exporter(endpoint: &Url) -> anyhow::Result<SpanExporter> {
    let mut url = endpoint.clone();
    url.set_path(&format!("{}/v1/traces", endpoint.path().trim_end_matches('/')));
    let tls = Tls::default().config_of_http(&url, &mut Files::default())?;
    // Where a runtime runs, the client may not be made.
    let make = move || {
        let builder = reqwest::blocking::Client::builder().timeout(EXPORT).redirect(reqwest::redirect::Policy::none()).no_proxy();
        builder.tls_backend_preconfigured(tls).build()
    };
    let client = thread::spawn(make).join().map_err(|_| anyhow!("no client of {url}"))??;
    let exporter = SpanExporter::builder().with_http().with_http_client(client).with_protocol(Protocol::HttpBinary);
    exporter.with_endpoint(url.as_str()).with_timeout(EXPORT).build().with_context(|| format!("tracing.otlp_endpoint {endpoint}"))
}

/// Tells once that exports fail, and once that they work again.
#[derive(Debug)]
struct Told {
    exporter: SpanExporter,
    fails: AtomicBool,
}

impl Exports for Told {
    async fn export(&self, spans: Vec<SpanData>) -> OTelSdkResult {
        let exported = self.exporter.export(spans).await;
        match (&exported, self.fails.swap(exported.is_err(), Ordering::Relaxed)) {
            (Err(error), false) => warn!(%error, "spans cannot be exported and are dropped; nothing else is touched"),
            (Ok(()), true) => info!("spans are exported again"),
            (Err(_), true) | (Ok(()), false) => {}
        }
        exported
    }

    fn shutdown_with_timeout(&self, limit: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(limit)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.exporter.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parent_decides_whether_its_trace_is_recorded_and_otherwise_the_ratio_does() {
        let sampler = Sampler::parent_based(OfRoots(Sampler::TraceIdRatioBased(0.0)));
        let provider = SdkTracerProvider::builder().with_sampler(sampler).build();
        let tracer = provider.tracer("test");
        let trace = |flags| TraceContext { trace_id: 7, parent_id: 9, flags, state: Some("a=1".into()) };
        let begun = |context: &Context| tracer.build_with_context(SpanBuilder::from_name("x"), context);
        let recorded = ours(&begun(&context_of(&trace(1), true)), Some(&trace(1))).expect("recorded");
        assert_eq!((recorded.trace_id, recorded.flags, recorded.state()), (7, 1, Some("a=1")));
        assert!(recorded.parent_id != 9 && recorded.parent_id != 0);
        assert_eq!(ours(&begun(&context_of(&trace(0), true)), None), None);
        assert_eq!(ours(&begun(&Context::new()), None), None);
        let event = SpanContext::new(TraceId::from(7), SpanId::from(9), TraceFlags::SAMPLED, true, TraceState::NONE);
        let link = Link::with_context(event);
        let linked = tracer.build_with_context(SpanBuilder::from_name("x").with_links(vec![link]), &Context::new());
        assert!(linked.is_recording(), "the transaction of an event that is recorded");
    }
}
