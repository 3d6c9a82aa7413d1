//! What the values must be to each other.
//!
//! The safety of the engine rests on an order of time limits: a call ends before its transaction must, a transaction before the
//! member can lose its partition, a drain lasts long enough for one batch. Here that order is refused or kept.
//!
//! Invariant: a configuration without a fault here keeps the chain call < effect deadline < idle in transaction, and
//! statement + idle in transaction < session < poll interval.

use std::ops::RangeInclusive;
use std::time::Duration;

use url::Url;

use super::load::Fault;
use super::{Assignor, Config, ProviderKind};
use crate::log;
use crate::rotating::Files;
use crate::spans::BUILT_IN;
use crate::store::{DatabaseUrl, Encryption};
use crate::tls::Part;

/// What a command requires to be set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// `kafka.brokers`.
    Kafka,
    /// `database.url`.
    Database,
    /// `provider.url`, but for kind `none`.
    Provider,
}

/// A shorter token could be guessed.
const SHORTEST_TOKEN: usize = 16;

/// How long a batch may need, beyond its lock and its longest call, to settle and commit.
pub const SETTLE: Duration = Duration::from_secs(2);

/// All faults of the whole; a key that is faulty by itself is not reported as missing too.
pub fn faults(config: &Config, needs: &[Need], known: &[Fault]) -> Vec<Fault> {
    let mut faults = Vec::new();
    required(config, needs, &mut faults);
    faults.retain(|fault| !known.iter().any(|known| known.key.trim_end_matches("_file") == fault.key));
    texts(config, &mut faults);
    files(config, needs, &mut faults);
    numbers(config, &mut faults);
    durations(config, &mut faults);
    faults
}

fn required(config: &Config, needs: &[Need], faults: &mut Vec<Fault>) {
    let missing = |need: &Need| match need {
        Need::Kafka => config.kafka.brokers.is_empty().then_some(("kafka.brokers", "such as \"kafka-1:9092,kafka-2:9092\"")),
        Need::Database => config.database.url.is_empty().then_some((
            "database.url",
            "a PostgreSQL URL, best as ONCEWARD_DATABASE_URL or in the file that database.url_file names",
        )),
        Need::Provider => (config.provider.kind == ProviderKind::Http && config.provider.url.is_none())
            .then_some(("provider.url", "the provider's base URL (or, for measuring only, provider.kind = \"none\")")),
    };
    for (key, valid) in needs.iter().filter_map(missing) {
        push(faults, key, format!("is required: {valid}"));
    }
}

fn texts(config: &Config, faults: &mut Vec<Fault>) {
    let kafka = &config.kafka;
    if !kafka.brokers.is_empty() && kafka.brokers.split(',').any(|broker| broker.trim().is_empty() || broker.trim().contains(' ')) {
        push(faults, "kafka.brokers", "must be host:port, separated by commas".to_owned());
    }
    let legal = |char: char| char.is_ascii_alphanumeric() || matches!(char, '.' | '_' | '-');
    // A name that begins with ^ would subscribe to a pattern.
    if kafka.topic.len() > 249 || !kafka.topic.chars().all(legal) || matches!(kafka.topic.as_str(), "." | "..") {
        push(faults, "kafka.topic", "must be one topic's name: up to 249 of a-z A-Z 0-9 . _ -".to_owned());
    }
    if config.held.dead_letters && (246..=249).contains(&kafka.topic.len()) {
        push(
            faults,
            "held.dead_letters",
            "must be false: the name of kafka.topic with .dlq behind it is too long for a topic".to_owned(),
        );
    }
    if kafka.group.len() > 255 || kafka.group.chars().any(char::is_control) {
        push(faults, "kafka.group", "must have 255 bytes at most and no control characters".to_owned());
    }
    if kafka.instance_id.len() > 249 || !kafka.instance_id.chars().all(legal) {
        push(faults, "kafka.instance_id", "must be up to 249 of a-z A-Z 0-9 . _ -".to_owned());
    }
    if kafka.assignor == Assignor::Broker && !kafka.instance_id.is_empty() {
        let why = "makes a crash worse with the assignor `broker`: the broker refuses the restarted process until the old one's session has ended";
        push(faults, "kafka.instance_id", why.to_owned());
    }
    faults.extend(kafka.connection_faults().into_iter().map(|(key, problem)| Fault { key, origin: None, problem }));
    if let Err(why) = log::filter(&config.log.level) {
        push(faults, "log.level", why);
    }
    if let Some(why) = spans(config.tracing.otlp_endpoint.as_ref(), BUILT_IN) {
        push(faults, "tracing.otlp_endpoint", why.to_owned());
    }
    if let Some(problem) = config.admin.token.as_ref().and_then(|token| admin_token_fault(token.expose())) {
        push(faults, "admin.token", problem);
    }
}

/// What is wrong with a token of the admin port.
pub(crate) fn admin_token_fault(token: &str) -> Option<String> {
    let good = token.len() >= SHORTEST_TOKEN && token.bytes().all(|byte| byte.is_ascii_graphic());
    let such = "such as `openssl rand -hex 32` prints";
    (!good).then(|| format!("must be {SHORTEST_TOKEN} or more printable ASCII characters without blanks, {such}"))
}

fn spans(endpoint: Option<&Url>, built_in: bool) -> Option<&'static str> {
    match endpoint {
        Some(_) if !built_in => Some("needs a program that is built with `--features otlp`; this one was not"),
        Some(url) if url.query().is_some() || url.fragment().is_some() => Some("must be a base URL: it has a query or a fragment"),
        _ => None,
    }
}

/// Every file is there and can be used.
fn files(config: &Config, needs: &[Need], faults: &mut Vec<Fault>) {
    if let Some(problem) = database_url(config.database.url.expose()) {
        push(faults, "database.url", problem);
    }
    let provider = &config.provider;
    if provider.client_cert_file.is_some() != provider.client_key_file.is_some() {
        push(faults, "provider.client_key_file", "is given together with provider.client_cert_file, or not at all".to_owned());
    }
    let given = [
        ("provider.ca_file", &provider.ca_file),
        ("provider.client_cert_file", &provider.client_cert_file),
        ("provider.client_key_file", &provider.client_key_file),
    ];
    match &provider.url {
        Some(url) if url.scheme() == "https" && needs.contains(&Need::Provider) => {
            if let Err(fault) = provider.tls().config(&mut Files::default()) {
                let [roots, certificate, key] = given.map(|(key, _)| key);
                let key = match fault.part {
                    Part::Roots => roots,
                    Part::Certificate => certificate,
                    Part::Key => key,
                };
                push(faults, key, fault.to_string());
            }
        }
        Some(url) if url.scheme() == "http" => {
            for (key, _) in given.iter().filter(|(_, file)| file.is_some()) {
                push(faults, key, "is of no use: provider.url is not https".to_owned());
            }
        }
        _ => {}
    }
}

/// Never quotes the URL: what does not parse may be a piece of a password.
fn database_url(url: &str) -> Option<String> {
    if url.is_empty() {
        return None;
    }
    let (config, tls) = match DatabaseUrl::parse(url) {
        Ok(DatabaseUrl { config, encryption: Encryption::Never }) => (config, None),
        Ok(DatabaseUrl { config, encryption: Encryption::IfOffered(tls) | Encryption::Always(tls) }) => (config, Some(tls)),
        Err(problem) => return Some(problem.to_owned()),
    };
    if config.get_dbname().is_none() {
        return Some("names no database".to_owned());
    }
    tls?.config(&mut Files::default()).err().map(|fault| format!("names a file that cannot be used: {fault}"))
}

fn numbers(config: &Config, faults: &mut Vec<Fault>) {
    let pipeline = &config.pipeline;
    let mut bound = |key: &str, value: usize, range: RangeInclusive<usize>| {
        if !range.contains(&value) {
            push(faults, key, format!("is {value} and must be from {} to {}", range.start(), range.end()));
        }
    };
    bound("pipeline.partition_concurrency", pipeline.partition_concurrency, 1..=256);
    bound("pipeline.batch_max", pipeline.batch_max, 1..=10_000);
    bound("pipeline.buffer_bytes", pipeline.buffer_bytes, 1 << 20..=64 << 30);
    bound("provider.max_in_flight", config.provider.max_in_flight, 1..=10_000);
    bound("provider.breaker_failures", config.provider.breaker_failures, 1..=10_000);
    bound("retry.max_attempts", config.retry.max_attempts as usize, 1..=10_000);
    bound("held.max_open", config.held.max_open, 1..=1_000_000);
    bound("retention.days_ahead", config.retention.days_ahead as usize, 1..=366);
    let least = pipeline.batch_max.saturating_mul(BATCH_RECORD_BYTES);
    if pipeline.buffer_bytes < least && pipeline.batch_max <= 10_000 {
        push(
            faults,
            "pipeline.buffer_bytes",
            format!("must be at least {least}: {BATCH_RECORD_BYTES} for each event of pipeline.batch_max"),
        );
    }
}

/// A buffer that cannot hold one batch of small records would never fill one.
const BATCH_RECORD_BYTES: usize = 512;

fn durations(config: &Config, faults: &mut Vec<Fault>) {
    let (kafka, database, provider, retry) = (&config.kafka, &config.database, &config.provider, &config.retry);
    let call = ("provider.call_timeout_ms", provider.call_timeout);
    let effect = ("provider.effect_deadline_ms", provider.effect_deadline);
    let key_life = ("provider.key_life_ms", provider.key_life);
    let margin = ("provider.key_life_margin_ms", provider.key_life_margin);
    let query_settle = ("provider.query_settle_ms", provider.query_settle);
    let idle = ("database.idle_in_transaction_timeout_ms", database.idle_in_transaction_timeout);
    let lock = ("database.lock_timeout_ms", database.lock_timeout);
    let statement = ("database.statement_timeout_ms", database.statement_timeout);
    let budget = ("database.transaction_budget_ms", database.transaction_budget);
    let connect = ("database.connect_timeout_ms", database.connect_timeout);
    let session = ("kafka.session_timeout_ms", kafka.session_timeout);
    let poll = ("kafka.max_poll_interval_ms", kafka.max_poll_interval);
    let commit = ("kafka.commit_interval_ms", kafka.commit_interval);
    let drain = ("pipeline.drain_ms", config.pipeline.drain);
    let stuck = ("pipeline.stuck_after_ms", config.pipeline.stuck_after);
    let max_age = ("retry.max_age_ms", retry.max_age);
    let longest = ("retry.backoff_max_ms", retry.backoff_max);
    let retention = ("retention.retention_ms", config.retention.retention);
    let settle = ("the time to settle", SETTLE);

    let chain: &[(&[Limit], Limit, &str)] = &[
        (&[call], effect, "a call must be able to end before its transaction's deadline"),
        (&[effect], idle, "the database must not end a transaction that waits for its calls"),
        (&[effect, statement], budget, "a healthy transaction must not be aborted"),
        (&[lock], statement, "a statement's limit includes its wait for locks"),
        (&[lock, call, settle], drain, "a drain must be long enough for the batch that runs"),
        (&[statement, idle], session, "a frozen owner must have lost its locks when its partitions move"),
        (&[connect], session, "a connect must not outlast a session"),
        (&[session], poll, "a member that polls must be seen to live"),
        (&[drain], poll, "a member that drains must be seen to poll"),
        (&[budget, statement], stuck, "a batch within its limits is not stuck"),
        (&[commit], session, "positions must be committed more often than partitions move"),
        (&[effect], margin, "a call must end before the provider has forgotten its key"),
        (&[max_age, margin], key_life, "a retry must come before the provider has forgotten its key"),
        (&[query_settle], max_age, "a charge must be known not to exist before its retries end"),
        (&[longest], max_age, "a wait longer than the whole time for retries is none"),
        (&[max_age], retention, "a claim must outlive its retries"),
    ];
    for (parts, whole, why) in chain {
        let sum: Duration = parts.iter().map(|(_, limit)| *limit).sum();
        if sum >= whole.1 {
            let parts = parts.iter().map(|(key, limit)| format!("{key} ({})", limit.as_millis())).collect::<Vec<_>>().join(" + ");
            push(faults, whole.0, format!("is {} and must be greater than {parts}: {why}", whole.1.as_millis()));
        }
    }
    others(config, faults);
}

type Limit = (&'static str, Duration);

fn others(config: &Config, faults: &mut Vec<Fault>) {
    let (kafka, retry) = (&config.kafka, &config.retry);
    if retry.backoff_min > retry.backoff_max {
        push(faults, "retry.backoff_min_ms", "must not be greater than retry.backoff_max_ms".to_owned());
    }
    if config.retention.retention < DAY {
        push(faults, "retention.retention_ms", format!("must be a day ({}) at least", DAY.as_millis()));
    }
    if config.retention.interval < SHORTEST_INTERVAL {
        push(faults, "retention.interval_ms", format!("must be at least {}", SHORTEST_INTERVAL.as_millis()));
    }
    if kafka.assignor == Assignor::Broker && kafka.options.get("heartbeat.interval.ms").is_some() {
        push(faults, "kafka.options.heartbeat.interval.ms", "is the broker's own setting with the assignor `broker`".to_owned());
    }
    let heartbeat = kafka.options.get("heartbeat.interval.ms").and_then(|ms| ms.parse::<u64>().ok()).unwrap_or(500);
    if Duration::from_millis(heartbeat) * 3 > kafka.session_timeout {
        let third = (kafka.session_timeout / 3).as_millis();
        push(
            faults,
            "kafka.options.heartbeat.interval.ms",
            format!("is {heartbeat} and must not be greater than a third of kafka.session_timeout_ms: {third}"),
        );
    }
    let server = [
        ("database.lock_timeout_ms", config.database.lock_timeout),
        ("database.statement_timeout_ms", config.database.statement_timeout),
        ("database.idle_in_transaction_timeout_ms", config.database.idle_in_transaction_timeout),
        ("kafka.session_timeout_ms", kafka.session_timeout),
        ("kafka.max_poll_interval_ms", kafka.max_poll_interval),
    ];
    for (key, _) in server.into_iter().filter(|(_, limit)| *limit > DAY) {
        push(faults, key, format!("must be a day ({}) at most", DAY.as_millis()));
    }
}

const DAY: Duration = Duration::from_secs(86_400);

/// More often there is nothing new to see.
const SHORTEST_INTERVAL: Duration = Duration::from_secs(1);

fn push(faults: &mut Vec<Fault>, key: &str, problem: String) {
    faults.push(Fault { key: key.to_owned(), origin: None, problem });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_need_a_base_url_and_a_build_that_can_export_them() {
        let url = |text: &str| Some(text.parse::<Url>().expect("a URL"));
        let (good, bad) = (url("http://collector:4318/otel"), url("http://collector:4318/?x=1"));
        assert_eq!([spans(None, false), spans(None, true), spans(good.as_ref(), true)], [None; 3]);
        assert!(spans(good.as_ref(), false).is_some_and(|why| why.contains("--features otlp")));
        assert!(spans(bad.as_ref(), true).is_some_and(|why| why.contains("query")));
    }
}
