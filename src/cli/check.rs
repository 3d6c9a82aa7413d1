//! `onceward check`: what would stop the service from starting, asked in the order in which it would be met.
//!
//! In: a configuration that has passed its own checks. Out: one finding per question, each with what to do. It owns its connections
//! and changes nothing. If it dies here, nothing has happened.
//!
//! Invariant: a question that was not asked is never called ok.

use std::fmt;
use std::time::Duration;

use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::KafkaError;

use crate::config::{Config, DatabaseConfig, KafkaConfig};
use crate::store::{self, DbError, Store, dedup_key};

/// The answer to one question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    what: &'static str,
    verdict: Verdict,
    text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Ok,
    Failed,
    NotAsked,
}

/// Asks everything; a question whose ground is missing is not asked.
pub async fn findings(config: &Config) -> Vec<Finding> {
    let mut findings = vec![ok("configuration", "every key and the order of time limits")];
    findings.extend(database(&config.database).await);
    let kafka = config.kafka.clone();
    let topic = tokio::task::spawn_blocking(move || topic(&kafka)).await;
    findings.push(topic.unwrap_or_else(|panic| failed("topic", panic)));
    findings
}

async fn database(config: &DatabaseConfig) -> Vec<Finding> {
    let mut session = match connect(config).await {
        Ok(session) => session,
        Err(error) => {
            let todo = format_args!("{}: {error}; see database.url", config.url.redacted_url());
            return vec![failed("database", todo), not_asked("schema"), not_asked("dedup key")];
        }
    };
    let mut findings = vec![ok("database", config.url.redacted_url())];
    findings.push(match store::schema_is_current(&mut session).await {
        Ok(true) => ok("schema", "every migration is applied"),
        Ok(false) => failed("schema", "migrations are missing: run `onceward migrate`"),
        Err(error) => failed("schema", error),
    });
    findings.push(match dedup_key::columns(&mut session).await {
        Ok(columns) if columns == dedup_key::RIGHT => ok("dedup key", "processed_event (event_id, consumer_group)"),
        Ok(columns) if columns.is_empty() => failed("dedup key", "processed_event has no primary key: run `onceward migrate`"),
        Ok(columns) => failed(
            "dedup key",
            format_args!(
                "the primary key of processed_event is ({}): it must be (event_id, consumer_group) and nothing else, or the same id can be taken twice",
                columns.join(", ")
            ),
        ),
        Err(error) => failed("dedup key", error),
    });
    findings
}

async fn connect(config: &DatabaseConfig) -> Result<impl std::ops::DerefMut<Target = store::Session>, DbError> {
    let store = Store::connect(&config.settings(), 1)?;
    Ok(store.control.get().await?)
}

/// Blocks the thread.
fn topic(kafka: &KafkaConfig) -> Finding {
    let ask = || -> Result<Finding, KafkaError> {
        let client: BaseConsumer = kafka.kafka_client_config().create()?;
        let metadata = client.fetch_metadata(Some(&kafka.topic), PATIENCE)?;
        let found = metadata.topics().iter().find(|topic| topic.name() == kafka.topic);
        Ok(match found.map(|topic| (topic.error(), topic.partitions().len())) {
            Some((None, partitions)) if partitions > 0 => ok("topic", format_args!("{}, {partitions} partitions", kafka.topic)),
            Some((Some(error), _)) => {
                let reason = rdkafka::types::RDKafkaErrorCode::from(error);
                failed("topic", format_args!("{}: {reason}; create it, or see kafka.topic", kafka.topic))
            }
            _ => failed("topic", format_args!("{} has no partitions; create it, or see kafka.topic", kafka.topic)),
        })
    };
    ask().unwrap_or_else(|error| {
        failed(
            "topic",
            format_args!("no answer from {} within {} s: {error}; see kafka.brokers", kafka.brokers, PATIENCE.as_secs()),
        )
    })
}

/// How long a broker may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);

fn ok(what: &'static str, text: impl fmt::Display) -> Finding {
    Finding { what, verdict: Verdict::Ok, text: text.to_string() }
}

fn failed(what: &'static str, text: impl fmt::Display) -> Finding {
    Finding { what, verdict: Verdict::Failed, text: text.to_string() }
}

fn not_asked(what: &'static str) -> Finding {
    Finding { what, verdict: Verdict::NotAsked, text: "not asked: there is no database".to_owned() }
}

impl Finding {
    /// Whether it was asked and answered well.
    pub fn is_ok(&self) -> bool {
        self.verdict == Verdict::Ok
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = match self.verdict {
            Verdict::Ok => "ok",
            Verdict::Failed => "FAILED",
            Verdict::NotAsked => "-",
        };
        writeln!(f, "{:<13} {verdict:<6} {}", self.what, self.text)
    }
}

#[cfg(test)]
mod tests {
    use rdkafka::mocking::MockCluster;

    use super::*;
    use crate::config::Secret;

    #[tokio::test]
    async fn without_a_database_its_schema_is_not_called_ok() {
        let socket = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = socket.local_addr().expect("bound").port();
        drop(socket);
        let url = Secret::new(format!("postgres://bill:hunter2@127.0.0.1:{port}/money"));
        let findings = database(&DatabaseConfig { url, ..DatabaseConfig::default() }).await;
        let text: String = findings.iter().map(ToString::to_string).collect();
        assert!(findings.iter().all(|finding| !finding.is_ok()), "{text}");
        assert!(text.starts_with("database      FAILED"), "{text}");
        assert!(text.contains("schema        -      not asked"), "{text}");
        assert!(!text.contains("hunter2"), "{text}");
    }

    #[test]
    fn a_topic_is_found_with_its_partitions_and_a_missing_one_is_not_created() {
        let cluster = MockCluster::new(1).expect("a mock cluster");
        cluster.create_topic("orders.confirmed", 3, 1).expect("a topic");
        let mut kafka = KafkaConfig { brokers: cluster.bootstrap_servers(), ..KafkaConfig::default() };
        assert_eq!(topic(&kafka), ok("topic", "orders.confirmed, 3 partitions"));

        kafka.topic = "orders.misspelt".to_owned();
        let finding = topic(&kafka);
        assert!(!finding.is_ok() && finding.text.contains("see kafka.topic"), "{finding}");
    }
}
