//! What librdkafka says about ownership, noted down and answered later.
//!
//! In: the rebalance callback, which runs inside `poll` on the poll thread. Out: a queue that the poll thread reads right after.
//! The callback returns at once; the poll thread assigns or unassigns when the Supervisor has positioned or drained. Until then
//! librdkafka fetches nothing, so a rebalance costs one batch, not a time-out.
//!
//! Invariant: each assign and each revoke is answered once. When the consumer closes, the callback answers itself, or closing would
//! wait for ever.

use std::error::Error;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use rdkafka::bindings::rd_kafka_resp_err_t as Code;
use rdkafka::client::OAuthToken;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext, RebalanceProtocol};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::{ClientContext, TopicPartitionList};
use tracing::error;

use crate::pipeline::client_log::ClientLog;
use crate::pipeline::connection;

/// One thing librdkafka asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rebalance {
    /// These partitions are ours once we assign them.
    Assign(Vec<i32>),
    /// These partitions go away once we unassign them.
    Revoke {
        /// The partitions.
        partitions: Vec<i32>,
        /// They are gone already: the session had ended.
        lost: bool,
    },
}

/// The consumer's context.
#[derive(Debug, Default)]
pub struct Rebalances {
    asked: Mutex<Vec<Rebalance>>,
    closing: AtomicBool,
    refused: Mutex<Option<String>>,
    log: ClientLog,
}

impl Rebalances {
    /// What was asked since the last call, in order.
    pub fn take(&self) -> Vec<Rebalance> {
        std::mem::take(&mut *self.asked.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// What the broker has refused since the last call, with what to do.
    pub fn take_refusal(&self) -> Option<String> {
        self.refused.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// From now on the callback unassigns by itself.
    pub fn close(&self) {
        self.closing.store(true, Ordering::Release);
    }

    fn ask(&self, rebalance: Rebalance) {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner).push(rebalance);
    }
}

impl ClientContext for Rebalances {
    const ENABLE_REFRESH_OAUTH_TOKEN: bool = true;

    fn generate_oauth_token(&self, file: Option<&str>) -> Result<OAuthToken, Box<dyn Error>> {
        connection::renew(file)
    }

    fn log(&self, level: RDKafkaLogLevel, facility: &str, line: &str) {
        ClientLog::line(level, facility, line);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        // Asked for, and the poll thread hears of it too.
        if error.rdkafka_error_code() != Some(RDKafkaErrorCode::PartitionEOF) {
            self.log.error(&error, reason);
            if let Some(todo) = error.rdkafka_error_code().and_then(|code| connection::todo_about(code, reason)) {
                *self.refused.lock().unwrap_or_else(PoisonError::into_inner) = Some(format!("{reason}: {todo}"));
            }
        }
    }
}

impl ConsumerContext for Rebalances {
    fn rebalance(&self, consumer: &BaseConsumer<Self>, code: Code, list: &mut TopicPartitionList) {
        let partitions = list.elements().iter().map(|element| element.partition()).collect();
        if self.closing.load(Ordering::Acquire) {
            // What was never assigned cannot be unassigned: librdkafka would go on waiting for an answer.
            let answered = match code {
                Code::RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS => assign(consumer, &TopicPartitionList::new()),
                _ => unassign(consumer, list),
            };
            if let Err(error) = answered {
                error!(%error, "could not answer a rebalance while closing");
            }
            return;
        }
        match code {
            Code::RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS => self.ask(Rebalance::Assign(partitions)),
            // Any other code means that the group could not be kept: librdkafka wants the partitions back.
            _ => self.ask(Rebalance::Revoke { partitions, lost: consumer.assignment_lost() }),
        }
    }
}

/// Assigns with explicit offsets, by the protocol's own call.
///
/// # Errors
/// What librdkafka answers.
pub fn assign(consumer: &BaseConsumer<Rebalances>, list: &TopicPartitionList) -> rdkafka::error::KafkaResult<()> {
    match consumer.rebalance_protocol() {
        RebalanceProtocol::Cooperative => consumer.incremental_assign(list),
        RebalanceProtocol::Eager | RebalanceProtocol::None => consumer.assign(list),
    }
}

/// Gives the partitions up, by the protocol's own call (the eager one knows only all of them).
///
/// # Errors
/// What librdkafka answers.
pub fn unassign(consumer: &BaseConsumer<Rebalances>, list: &TopicPartitionList) -> rdkafka::error::KafkaResult<()> {
    match consumer.rebalance_protocol() {
        RebalanceProtocol::Cooperative => consumer.incremental_unassign(list),
        RebalanceProtocol::Eager | RebalanceProtocol::None => consumer.unassign(),
    }
}
