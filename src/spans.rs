//! Spans of what becomes of events, for an OpenTelemetry collector: `tracing.otlp_endpoint`, in a build with the feature `otlp`.
//!
//! In: the events of a transaction, their outcomes, the calls for them. Out: for each event that is recorded a span from its batch's begin to its
//! COMMIT, with one for each call below it, in the trace that the record names or in one of its own; and for each partition's batch with any of them a
//! span that links to them. It owns a queue and a thread. If it dies here, spans are lost and nothing else.
//!
//! Invariant: nobody waits for a collector, and what the queue cannot take is dropped. Of a record a span holds its place and no more.

#[cfg(not(feature = "otlp"))]
mod nowhere;
#[cfg(feature = "otlp")]
mod otlp;

use std::sync::Arc;

#[cfg(not(feature = "otlp"))]
use self::nowhere::{Batch, Call, Tracer};
#[cfg(feature = "otlp")]
use self::otlp::{Batch, Call, Tracer};
use crate::config::Config;
use crate::handler::{Claimed, Outcome};
use crate::provider::Answer;
use crate::trace_context::TraceContext;

/// Whether this build can export spans.
pub const BUILT_IN: bool = cfg!(feature = "otlp");

/// Where spans go; by default nowhere.
#[derive(Clone, Debug, Default)]
pub struct Spans(Option<Tracer>);

/// The spans of one transaction. Dropped before `committed`, they say that no COMMIT was answered.
#[derive(Debug)]
pub(crate) struct BatchSpans(Option<Batch>);

/// The span of one call, and what the other side is told of the trace.
#[derive(Debug)]
pub(crate) struct CallSpan {
    span: Option<Call>,
    trace: Option<Arc<TraceContext>>,
}

impl Spans {
    /// As the configuration says. No connection is made yet.
    ///
    /// # Errors
    /// The address cannot be used, or no thread can be made.
    pub fn start(config: &Config) -> anyhow::Result<Self> {
        config.tracing.otlp_endpoint.as_ref().map(|endpoint| Tracer::start(endpoint, config)).transpose().map(Self)
    }

    /// A transaction of this partition begins.
    pub(crate) fn batch(&self, partition: i32) -> BatchSpans {
        BatchSpans(self.0.as_ref().map(|tracer| tracer.batch(partition)))
    }

    /// A call for an event begins. Whoever is not recorded goes on with the trace as it came.
    pub(crate) fn call(&self, trace: Option<&Arc<TraceContext>>) -> CallSpan {
        let begun = self.0.as_ref().zip(trace).and_then(|(tracer, trace)| tracer.call(trace));
        match begun {
            Some((span, ours)) => CallSpan { span: Some(span), trace: Some(Arc::new(ours)) },
            None => CallSpan { span: None, trace: trace.cloned() },
        }
    }

    /// Exports what is queued, if that is possible within two seconds.
    pub fn stop(&self) {
        if let Some(tracer) = &self.0 {
            tracer.stop();
        }
    }
}

impl BatchSpans {
    /// These events were claimed; those that are recorded go on under their own spans.
    pub(crate) fn begin<E>(&mut self, events: &mut [Claimed<E>]) {
        if let Some(batch) = &mut self.0 {
            for event in events {
                let trace = batch.begin(event.offset(), event.trace_context());
                event.go_on_under(trace);
            }
        }
    }

    /// What became of each of them, in their order.
    pub(crate) fn conclude(&mut self, outcomes: &[Outcome]) {
        if let Some(batch) = &mut self.0 {
            batch.conclude(outcomes);
        }
    }

    /// It has committed.
    pub(crate) fn committed(self) {
        if let Some(batch) = self.0 {
            batch.committed();
        }
    }
}

impl CallSpan {
    /// What the other side is told.
    pub(crate) fn trace(&self) -> Option<&TraceContext> {
        self.trace.as_deref()
    }

    /// The call has ended.
    pub(crate) fn answered(self, answer: &Answer) {
        if let Some(span) = self.span {
            span.answered(answer);
        }
    }
}
