//! librdkafka's own options: what may pass, and the client's configuration made from them.
//!
//! Invariant: no option that carries the guarantee can be set from outside, under none of its names; ours are put in last and
//! asserted. A secret that stands in a file is read again for every client.

mod connection;
mod token;

use std::collections::BTreeMap;
use std::{fmt, fs};

use rdkafka::ClientConfig;
use rdkafka::error::KafkaError;

pub use self::connection::Wire;
pub use self::token::Token;
use super::secret::REDACTED;
use super::{Assignor, KafkaConfig};

/// Options of librdkafka by their own names; the refused ones cannot be put in.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct KafkaOptions(
    BTreeMap<String, String>,
    /// The secrets among them that stand in files: name and file.
    BTreeMap<String, String>,
);

impl KafkaOptions {
    /// Adds one option.
    ///
    /// # Errors
    /// The reason, when it carries the guarantee or librdkafka does not take it.
    pub fn insert(&mut self, key: &str, value: &str) -> Result<(), String> {
        if let Some(reason) = refusal(key, value) {
            return Err(format!("is refused: {reason}"));
        }
        let (key, value, file) = match key.strip_suffix(IN_A_FILE).filter(|key| is_secret(key)) {
            Some(key) => (key, read(value)?, Some(value)),
            None => (key, value.to_owned(), None),
        };
        let refused = match ClientConfig::new().set(key, &value).create_native_config() {
            Ok(_) => None,
            Err(KafkaError::ClientConfig(_, reason, _, _)) => Some(reason),
            Err(other) => Some(other.to_string()),
        };
        if let Some(reason) = refused {
            return Err(format!("librdkafka refuses it: {}", without(&reason, key, &value)));
        }
        self.0.insert(key.to_owned(), value);
        // What is given later counts: the environment after the file.
        self.1.remove(key);
        if let Some(file) = file {
            self.1.insert(key.to_owned(), file.to_owned());
        }
        Ok(())
    }

    /// The value of an option that was given.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str)
    }

    /// The options, passwords redacted.
    pub(super) fn shown(&self) -> impl Iterator<Item = (String, &str)> {
        self.0.iter().map(|(key, value)| match self.1.get(key) {
            Some(file) => (format!("{key}{IN_A_FILE}"), file.as_str()),
            None => (key.clone(), if is_secret(key) { REDACTED } else { value.as_str() }),
        })
    }

    /// The options as they are now. A file that is gone or empty leaves what was in it when the configuration was read.
    fn now(&self) -> impl Iterator<Item = (&str, String)> {
        self.0.iter().map(|(key, value)| {
            let again = self.1.get(key).and_then(|file| read(file).ok());
            (key.as_str(), again.unwrap_or_else(|| value.clone()))
        })
    }

    fn given(&self, names: &[&str]) -> bool {
        names.iter().any(|name| self.0.contains_key(*name))
    }
}

impl fmt::Debug for KafkaOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.shown()).finish()
    }
}

impl KafkaConfig {
    /// The consumer's configuration: the given options first, what carries the guarantee last.
    ///
    /// # Panics
    /// If an option that carries the guarantee has not the value it must have.
    #[doc(hidden)]
    #[must_use]
    pub fn kafka_client_config(&self) -> ClientConfig {
        let mut client = ClientConfig::new();
        for (key, value) in self.options.now() {
            client.set(key, value);
        }
        for (names, value) in TUNED {
            let is_the_brokers = self.assignor == Assignor::Broker && names[0] == "heartbeat.interval.ms";
            if !self.options.given(names) && !is_the_brokers {
                client.set(names[0], *value);
            }
        }
        let ours = self.guarantee();
        for (key, value) in &ours {
            client.set(*key, value);
        }
        // The map behind the client has no order, so that a second name of one of these keys could win by chance.
        for (key, value) in client.config_map() {
            let is_ours = ours.iter().any(|(name, wanted)| *name == key && wanted == value);
            assert!(is_ours || refusal(key, value).is_none(), "{key} carries the guarantee and must not be set");
        }
        client
    }

    /// A producer's configuration: the same brokers and connection options, idempotent, acknowledged by all replicas.
    #[doc(hidden)]
    #[must_use]
    pub fn kafka_producer_config(&self) -> ClientConfig {
        let mut client = ClientConfig::new();
        for (key, value) in self.options.now().filter(|(key, _)| CONNECTION.iter().any(|prefix| key.starts_with(prefix))) {
            client.set(key, value);
        }
        for (key, value) in self.connection() {
            client.set(key, value);
        }
        client.set("client.id", "onceward");
        client.set("enable.idempotence", "true").set("acks", "all");
        client
    }

    /// The configuration of a client that asks a broker about topics and settings: the same brokers and connection options.
    #[doc(hidden)]
    #[must_use]
    pub fn kafka_admin_config(&self) -> ClientConfig {
        let mut client = self.kafka_producer_config();
        // librdkafka takes it for a producer, and a producer's question about a topic makes the topic.
        client.set("allow.auto.create.topics", "false").set("log_level", "0");
        client
    }

    /// The brokers, and what our keys say of the way to them.
    fn connection(&self) -> Vec<(&'static str, String)> {
        let mut ours = vec![("bootstrap.servers", self.brokers.clone())];
        if self.is_tls() && !self.options.given(&["ssl.ca.location", "ssl.ca.pem"]) {
            // Our OpenSSL is built in and knows no place of this machine by itself.
            ours.push(("ssl.ca.location", "probe".to_owned()));
        }
        if !self.oauth_token_file.is_empty() {
            ours.push((TOKEN_FILE, self.oauth_token_file.clone()));
        }
        ours
    }

    fn guarantee(&self) -> Vec<(&'static str, String)> {
        let mut ours = self.connection();
        ours.extend([
            ("group.id", self.group.clone()),
            ("max.poll.interval.ms", self.max_poll_interval.as_millis().to_string()),
            ("enable.auto.commit", "false".to_owned()),
            ("enable.auto.offset.store", "false".to_owned()),
            ("auto.offset.reset", "error".to_owned()),
            ("isolation.level", "read_committed".to_owned()),
            ("enable.partition.eof", "true".to_owned()),
            ("allow.auto.create.topics", "false".to_owned()),
        ]);
        let mut classic = |assignor: &str| {
            ours.push(("group.protocol", "classic".to_owned()));
            ours.push(("partition.assignment.strategy", assignor.to_owned()));
            ours.push(("session.timeout.ms", self.session_timeout.as_millis().to_string()));
        };
        match self.assignor {
            Assignor::CooperativeSticky => classic("cooperative-sticky"),
            Assignor::Range => classic("range"),
            // Session and heartbeat are the broker's; librdkafka refuses them here.
            Assignor::Broker => ours.push(("group.protocol", "consumer".to_owned())),
        }
        if !self.instance_id.is_empty() {
            ours.push(("group.instance.id", self.instance_id.clone()));
        }
        ours
    }
}

/// Behind the name of a secret option: the value is the name of a file that holds it.
const IN_A_FILE: &str = ".file";

/// librdkafka's name for what it hands to whoever fetches a token: to us, the name of the file.
pub const TOKEN_FILE: &str = "sasl.oauthbearer.config";

/// Our defaults where nothing is given: each option with its second name.
/// The memory of a stalled consumer is a third of librdkafka's own defaults; the back-off makes it fetch again at once.
const TUNED: &[(&[&str], &str)] = &[
    (&["client.id"], "onceward"),
    (&["queued.max.messages.kbytes"], "8192"),
    (&["queued.min.messages"], "10000"),
    (&["fetch.message.max.bytes", "max.partition.fetch.bytes"], "262144"),
    (&["fetch.max.bytes"], "4194304"),
    (&["fetch.queue.backoff.ms"], "10"),
    (&["fetch.wait.max.ms"], "100"),
    (&["heartbeat.interval.ms"], "500"),
];

/// What a producer shares with the consumer.
const CONNECTION: &[&str] =
    &["broker.", "client.dns.", "enable.ssl.", "https.", "reconnect.", "sasl.", "security.", "socket.", "ssl.", "debug", "log"];

/// Every option that carries the guarantee, with the reason.
const REFUSED: &[(&[&str], &str)] = &[
    (
        &["enable.auto.commit", "auto.commit.enable", "auto.commit.interval.ms"],
        "a position is committed only after its transaction (R-KFK-CONS-X1)",
    ),
    (
        &["enable.auto.offset.store", "offset.store.method", "offset.store.path", "offset.store.sync.interval.ms"],
        "only settled records move a position (R-KFK-CONS-X1)",
    ),
    (&["auto.offset.reset"], "a position is never guessed; `kafka.start` says where a new group begins"),
    (&["group.id"], "claims are kept per group: use `kafka.group`"),
    (&["bootstrap.servers", "metadata.broker.list"], "use `kafka.brokers`"),
    (&["partition.assignment.strategy", "group.remote.assignor"], "use `kafka.assignor`"),
    (&["session.timeout.ms"], "it is part of the order of time limits: use `kafka.session_timeout_ms`"),
    (&["max.poll.interval.ms"], "it is part of the order of time limits: use `kafka.max_poll_interval_ms`"),
    (&["group.protocol", "group.protocol.type"], "use `kafka.assignor`: `broker` stands for the protocol `consumer`"),
    (&["group.instance.id"], "use `kafka.instance_id`"),
    (&["enable.partition.eof"], "it tells a partition that is read to its end from one that is stuck"),
    (&["allow.auto.create.topics"], "a misspelt topic must fail, not come into being"),
    (&["consume.callback.max.messages"], "records are polled, not called back"),
    (&[TOKEN_FILE, "enable.sasl.oauthbearer.unsecure.jwt"], "use `kafka.oauth_token_file`"),
];

/// Why an option may not be given. librdkafka takes a `topic.` in front of the options of a topic, so that is no way around.
fn refusal(key: &str, value: &str) -> Option<&'static str> {
    let mut name = key;
    while let Some(rest) = name.strip_prefix("topic.").filter(|rest| !rest.starts_with("metadata.") && *rest != "blacklist") {
        name = rest;
    }
    if name == "isolation.level" && value != "read_committed" {
        return Some("records of transactions that were rolled back must not be applied");
    }
    REFUSED.iter().find(|(names, _)| names.contains(&name)).map(|(_, reason)| *reason)
}

fn read(file: &str) -> Result<String, String> {
    let text = fs::read_to_string(file).map_err(|error| format!("{file} cannot be read: {error}"))?;
    let secret = text.trim_end_matches(['\r', '\n']);
    if secret.is_empty() { Err(format!("{file} is empty")) } else { Ok(secret.to_owned()) }
}

fn is_secret(key: &str) -> bool {
    const SECRET: [&str; 7] = ["password", "secret", "passphrase", "key.pem", "ssl_key", "token", "extensions"];
    SECRET.iter().any(|part| key.contains(part))
}

/// librdkafka quotes the value in what it says; a password must not be printed that way.
fn without(reason: &str, key: &str, value: &str) -> String {
    if is_secret(key) && !value.is_empty() { reason.replace(value, REDACTED) } else { reason.to_owned() }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn kafka() -> KafkaConfig {
        KafkaConfig { brokers: "k:9092".to_owned(), ..KafkaConfig::default() }
    }

    // CASES I12
    #[test]
    fn options_that_carry_the_guarantee_are_refused_under_all_their_names() {
        for (key, value) in [
            ("enable.auto.commit", "true"),
            ("enable.auto.commit", "false"),
            ("auto.commit.enable", "true"),
            ("auto.commit.interval.ms", "100"),
            ("enable.auto.offset.store", "true"),
            ("offset.store.method", "broker"),
            ("offset.store.path", "/tmp"),
            ("offset.store.sync.interval.ms", "1"),
            ("auto.offset.reset", "latest"),
            ("topic.auto.offset.reset", "latest"),
            ("topic.auto.commit.enable", "true"),
            ("topic.topic.auto.offset.reset", "latest"),
            ("group.id", "other"),
            ("bootstrap.servers", "elsewhere:9092"),
            ("metadata.broker.list", "elsewhere:9092"),
            ("partition.assignment.strategy", "roundrobin"),
            ("session.timeout.ms", "1"),
            ("max.poll.interval.ms", "1"),
            ("group.protocol", "consumer"),
            ("group.instance.id", "one"),
            ("isolation.level", "read_uncommitted"),
            ("enable.partition.eof", "false"),
            ("allow.auto.create.topics", "true"),
            ("sasl.oauthbearer.config", "/run/token"),
        ] {
            let mut options = KafkaOptions::default();
            let refused = options.insert(key, value).expect_err(key);
            assert!(refused.starts_with("is refused: "), "{key}: {refused}");
            assert_eq!(options, KafkaOptions::default());
        }
    }

    #[test]
    fn other_options_pass_and_our_own_stand_last() {
        let mut kafka = kafka();
        for (key, value) in [
            ("fetch.wait.max.ms", "7"),
            ("max.partition.fetch.bytes", "1024"),
            ("isolation.level", "read_committed"),
            ("topic.metadata.refresh.interval.ms", "1000"),
            ("queued.min.messages", "5"),
        ] {
            kafka.options.insert(key, value).expect(key);
        }
        let client = kafka.kafka_client_config();
        client.create_native_config().expect("librdkafka takes all of it");
        assert_eq!(client.get("fetch.wait.max.ms"), Some("7"));
        assert_eq!(client.get("queued.min.messages"), Some("5"));
        assert_eq!(client.get("fetch.message.max.bytes"), None, "the second name was given");
        for (key, value) in [
            ("enable.auto.commit", "false"),
            ("enable.auto.offset.store", "false"),
            ("auto.offset.reset", "error"),
            ("group.id", "billing-order-confirmed"),
            ("partition.assignment.strategy", "cooperative-sticky"),
            ("session.timeout.ms", "20000"),
            ("queued.max.messages.kbytes", "8192"),
        ] {
            assert_eq!(client.get(key), Some(value), "{key}");
        }
    }

    // CASES A12
    #[test]
    fn each_assignor_is_a_client_that_librdkafka_takes() {
        for (assignor, protocol, strategy, session) in [
            (Assignor::CooperativeSticky, "classic", Some("cooperative-sticky"), Some("20000")),
            (Assignor::Range, "classic", Some("range"), Some("20000")),
            (Assignor::Broker, "consumer", None, None),
        ] {
            let client = KafkaConfig { assignor, ..kafka() }.kafka_client_config();
            client.create_native_config().expect("librdkafka takes all of it");
            let _: rdkafka::consumer::BaseConsumer = client.create().expect("and all of it together");
            let given = ["group.protocol", "partition.assignment.strategy", "session.timeout.ms"].map(|key| client.get(key));
            assert_eq!(given, [Some(protocol), strategy, session]);
        }
    }

    // CASES B19
    #[test]
    fn an_instance_id_is_passed_on_and_none_is_not() {
        let named = KafkaConfig { instance_id: "billing-0".to_owned(), ..kafka() };
        assert_eq!(named.kafka_client_config().get("group.instance.id"), Some("billing-0"));
        assert_eq!(kafka().kafka_client_config().get("group.instance.id"), None);
    }

    #[test]
    #[should_panic(expected = "auto.commit.enable carries the guarantee")]
    fn a_refused_option_that_got_in_all_the_same_stops_the_start() {
        let mut kafka = kafka();
        kafka.options.0.insert("auto.commit.enable".to_owned(), "true".to_owned());
        let _ = kafka.kafka_client_config();
    }

    #[test]
    fn an_option_or_value_that_librdkafka_does_not_know_is_refused_at_once() {
        let mut options = KafkaOptions::default();
        assert!(options.insert("fetch.wait.max", "7").expect_err("unknown").contains("No such configuration property"));
        assert!(options.insert("fetch.wait.max.ms", "soon").expect_err("no number").contains("fetch.wait.max.ms"));
    }

    #[test]
    fn passwords_among_the_options_are_never_shown() {
        let mut options = KafkaOptions::default();
        options.0.insert("sasl.password".to_owned(), "hunter2".to_owned());
        options.0.insert("sasl.username".to_owned(), "bill".to_owned());
        assert_eq!(format!("{options:?}"), r#"{"sasl.password": "[redacted]", "sasl.username": "bill"}"#);
        let refused = options.insert("ssl.key.password", "hunter2");
        assert!(!format!("{refused:?}").contains("hunter2"), "{refused:?}");
    }

    #[test]
    fn a_secret_in_a_file_is_read_again_for_every_client_and_shown_as_its_file() {
        let path = std::env::temp_dir().join(format!("onceward-password-{}", uuid::Uuid::now_v7()));
        let file = path.to_str().expect("text");
        let mut kafka = kafka();
        assert!(kafka.options.insert("sasl.password.file", file).is_err_and(|why| why.contains("cannot be read")));
        fs::write(file, "hunter2\n").expect("a file");
        kafka.options.insert("sasl.password.file", file).expect("passes");
        let password = || {
            [kafka.kafka_client_config(), kafka.kafka_producer_config()]
                .map(|client| client.get("sasl.password").map(str::to_owned))
        };
        assert_eq!(password(), [Some("hunter2".to_owned()), Some("hunter2".to_owned())]);
        fs::write(file, "hunter3").expect("a file");
        assert_eq!(password(), [Some("hunter3".to_owned()), Some("hunter3".to_owned())]);
        fs::write(file, "\n").expect("a file");
        assert_eq!(password()[0].as_deref(), Some("hunter2"), "as when the configuration was read");
        assert!(KafkaOptions::default().insert("sasl.password.file", file).is_err_and(|why| why.contains("is empty")));
        fs::remove_file(file).expect("it goes");
        assert_eq!(password()[0].as_deref(), Some("hunter2"), "so when there is none");
        assert_eq!(format!("{:?}", kafka.options), format!("{{\"sasl.password.file\": {file:?}}}"));
        kafka.options.insert("sasl.password", "hunter4").expect("passes");
        assert_eq!(format!("{:?}", kafka.options), r#"{"sasl.password": "[redacted]"}"#, "what is given later counts");
    }

    #[test]
    fn without_a_list_of_authorities_the_machines_own_is_looked_for() {
        let mut kafka = kafka();
        assert_eq!(kafka.kafka_client_config().get("ssl.ca.location"), None);
        kafka.options.insert("security.protocol", "SASL_SSL").expect("passes");
        assert_eq!(kafka.kafka_admin_config().get("ssl.ca.location"), Some("probe"));
        kafka.options.insert("ssl.ca.location", "/etc/authority.pem").expect("passes");
        assert_eq!(kafka.kafka_client_config().get("ssl.ca.location"), Some("/etc/authority.pem"));
    }

    #[test]
    fn a_producer_shares_the_connection_and_nothing_of_the_consumer() {
        let mut kafka = kafka();
        kafka.session_timeout = Duration::from_secs(6);
        kafka.options.insert("socket.keepalive.enable", "true").expect("passes");
        kafka.options.insert("fetch.wait.max.ms", "7").expect("passes");
        let client = kafka.kafka_producer_config();
        assert_eq!(client.get("socket.keepalive.enable"), Some("true"));
        assert_eq!(client.get("enable.idempotence"), Some("true"));
        assert_eq!((client.get("fetch.wait.max.ms"), client.get("session.timeout.ms")), (None, None));
    }
}
