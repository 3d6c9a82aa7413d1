//! The Kafka client: made, shared, and replaced when it is beyond repair.
//!
//! In: a configuration. Out: a consumer for the poll thread, which owns it, and a [`Client`] for everyone else's questions and commits.
//! If a client dies here of a fatal error, another takes its place, a few times; then the process ends.
//!
//! Invariant: only the poll thread holds a consumer for longer than one call, so it alone drops it: dropping polls until the group is
//! left.

use std::collections::VecDeque;
use std::sync::{Arc, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaResult, RDKafkaErrorCode};
use tracing::{debug, info};

use crate::pipeline::connection;
use crate::pipeline::rebalance::Rebalances;

/// How often a client may be replaced within [`WITHIN`]: a fault that comes back at once needs a person.
const REPLACEMENTS: usize = 3;
/// See [`REPLACEMENTS`].
const WITHIN: Duration = Duration::from_secs(600);
/// One poll of a client that is being closed.
const POLL: Duration = Duration::from_millis(10);

/// Where everyone but the poll thread finds the consumer.
#[derive(Clone, Debug)]
pub struct Client(Arc<RwLock<Weak<BaseConsumer<Rebalances>>>>);

/// What a fatal error leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remedy {
    /// Another client, as a new member of the group.
    Replace,
    /// The end of the process.
    End,
}

/// How a client logs in: made anew from files that may be replaced.
pub struct Login {
    make: Box<dyn Fn() -> ClientConfig + Send>,
    password: Option<String>,
    looked: Instant,
}

/// When clients were replaced.
#[derive(Debug, Default)]
pub struct Replacements(VecDeque<Instant>);

/// A consumer that wants the topic.
///
/// # Errors
/// librdkafka refuses the configuration or the topic.
pub fn connect(config: &ClientConfig, topic: &str) -> KafkaResult<BaseConsumer<Rebalances>> {
    let consumer: BaseConsumer<Rebalances> = connection::connect(config, Rebalances::default())?;
    consumer.subscribe(&[topic])?;
    Ok(consumer)
}

/// Leaves the group and drops the client. Everyone else holds it for one call at a time, so being its last owner is a matter of waiting.
pub fn close(mut consumer: Arc<BaseConsumer<Rebalances>>) {
    consumer.context().close();
    let last = loop {
        match Arc::try_unwrap(consumer) {
            Ok(last) => break last,
            Err(shared) => {
                consumer = shared;
                // A commit in progress ends within its own time limit.
                if let Some(Err(error)) = consumer.poll(POLL) {
                    debug!(%error, "while closing");
                }
            }
        }
    };
    drop(last);
}

impl Client {
    /// A place that shows this consumer.
    #[must_use]
    pub fn new(consumer: &Arc<BaseConsumer<Rebalances>>) -> Self {
        Self(Arc::new(RwLock::new(Arc::downgrade(consumer))))
    }

    /// The consumer, for one call; `None` once it is closed.
    #[must_use]
    pub fn get(&self) -> Option<Arc<BaseConsumer<Rebalances>>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).upgrade()
    }

    /// From now on shows this one.
    pub fn show(&self, consumer: &Arc<BaseConsumer<Rebalances>>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(consumer);
    }
}

impl Login {
    /// From a configuration that is made anew each time.
    pub fn new(make: impl Fn() -> ClientConfig + Send + 'static) -> Self {
        Self { make: Box::new(make), password: None, looked: Instant::now() }
    }

    /// A client as the files are now.
    ///
    /// # Errors
    /// As [`connect`].
    pub fn connect(&mut self, topic: &str) -> KafkaResult<BaseConsumer<Rebalances>> {
        let config = (self.make)();
        self.password = config.get("sasl.password").map(str::to_owned);
        connect(&config, topic)
    }

    /// Looks now and then whether the password is another one; then the client uses it from its next connection on.
    pub fn look_again(&mut self, consumer: &BaseConsumer<Rebalances>) {
        if self.password.is_none() || self.looked.elapsed() < connection::LOOK_AGAIN {
            return;
        }
        self.looked = Instant::now();
        let config = (self.make)();
        let password = config.get("sasl.password").map(str::to_owned);
        if password != self.password {
            self.password = password;
            connection::log_in_as(consumer, &config);
            info!("the password of Kafka was replaced in its file");
        }
    }
}

impl Replacements {
    /// What to do about a fatal error. A replacement is counted.
    pub fn remedy(&mut self, code: RDKafkaErrorCode, now: Instant) -> Remedy {
        if code == RDKafkaErrorCode::FencedInstanceId {
            // Another process has our name. A new client of ours would fence that one, and it us, for ever.
            return Remedy::End;
        }
        while self.0.front().is_some_and(|first| now.duration_since(*first) > WITHIN) {
            self.0.pop_front();
        }
        if self.0.len() >= REPLACEMENTS {
            return Remedy::End;
        }
        self.0.push_back(now);
        Remedy::Replace
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FATAL: RDKafkaErrorCode = RDKafkaErrorCode::InvalidRequest;

    #[test]
    fn a_client_is_replaced_three_times_in_ten_minutes_and_then_no_more() {
        let (mut replacements, start) = (Replacements::default(), Instant::now());
        for minute in 0..3 {
            assert_eq!(replacements.remedy(FATAL, start + Duration::from_secs(60 * minute)), Remedy::Replace);
        }
        assert_eq!(replacements.remedy(FATAL, start + Duration::from_secs(599)), Remedy::End);
        assert_eq!(replacements.remedy(FATAL, start + Duration::from_secs(601)), Remedy::Replace, "the first is forgotten");
    }

    // CASES B19
    #[test]
    fn a_member_whose_name_was_taken_ends_at_once() {
        assert_eq!(Replacements::default().remedy(RDKafkaErrorCode::FencedInstanceId, Instant::now()), Remedy::End);
    }
}
