//! The configuration: a TOML file, then the environment over it.
//!
//! In: a file's text and `ONCEWARD_<SECTION>_<KEY>` variables. Out: a [`Config`] that has passed every check, or all faults at once.
//! It owns nothing and does nothing; secrets leave it through [`Secret::expose`] alone.
//!
//! Invariant: no key is read that is not declared below, none that is given is ignored, and a [`Config`] from [`Config::load`] keeps
//! the order of time limits on which the engine's safety rests (`check.rs`).

mod check;
mod kafka;
mod load;
mod render;
mod secret;
mod setting;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use url::Url;

pub use self::check::Need;
pub(crate) use self::check::admin_token_fault;
pub use self::kafka::{KafkaOptions, TOKEN_FILE, Token, Wire};
pub use self::load::{ConfigError, FILE_VARIABLE, Fault};
#[doc(hidden)]
pub use self::render::{example, markdown};
pub use self::secret::Secret;
pub use self::setting::Ratio;
use self::setting::{choice, settings};
use crate::provider;
use crate::store::{self, TimeLimits};
use crate::tls::{Roots, Tls, Trust};

settings! {
    /// The topic and the consumer group.
    kafka: KafkaConfig {
        /// Bootstrap servers, `host:port` separated by commas. Required.
        brokers: String = String::new(),
        /// The topic to consume.
        topic: String = "orders.confirmed".to_owned(),
        /// The consumer group; claims are kept per group.
        group: String = "billing-order-confirmed".to_owned(),
        /// Where a group without any position begins.
        start: Start = Start::Earliest,
        /// What to do when records are gone from the log that were never settled; the gap is recorded either way.
        on_gap: OnGap = OnGap::Stop,
        /// How partitions are shared among the members of the group.
        assignor: Assignor = Assignor::CooperativeSticky,
        /// A name of this process that outlives it (`group.instance.id`): killed and restarted under it within the session time-out, it has
        /// its partitions back at once and nobody else stops. No two processes may share one. Not with the assignor `broker`.
        instance_id: String = String::new(),
        /// A member that is silent for longer loses its partitions. With the assignor `broker` the broker's own setting counts
        /// (`group.consumer.session.timeout.ms`), which must not be shorter than this.
        session_timeout: Duration = Duration::from_secs(20),
        /// A member that does not poll for longer leaves the group.
        max_poll_interval: Duration = Duration::from_secs(300),
        /// How often settled offsets are committed.
        commit_interval: Duration = Duration::from_millis(200),
        /// A file that holds the bearer token for the `sasl.mechanism` OAUTHBEARER, a JSON Web Token; read again when four fifths of the
        /// token's life are over, so that whoever renews it only has to replace the file in time.
        oauth_token_file: String = String::new(),
        /// Further librdkafka options, by their own names; those that carry the guarantee are refused. The consumer takes all of them, every
        /// other client those of the connection: `security.protocol`, `ssl.*`, `sasl.*` and the like.
        options: KafkaOptions = KafkaOptions::default(),
    }

    /// How much is worked on at once.
    pipeline: PipelineConfig {
        /// Database transactions that are open at once; also the size of the pools of claims and of attempts.
        partition_concurrency: usize = 3,
        /// The most events in one transaction.
        batch_max: usize = 2_048,
        /// The most memory that waiting records may hold, in bytes; beyond it, polling stops.
        buffer_bytes: usize = 16 << 20,
        /// How long a revoke or a stop waits for running batches.
        drain: Duration = Duration::from_secs(15),
        /// A partition that has records to settle, no reason to wait, and settles none for longer makes `/live` fail.
        stuck_after: Duration = Duration::from_secs(300),
    }

    /// PostgreSQL.
    database: DatabaseConfig {
        /// `postgres://user:password@host:5432/database`. Required; `database.url_file` names a file that holds it. TLS as libpq has it, in the
        /// URL: `?sslmode=verify-full&sslrootcert=/etc/onceward/ca.pem`.
        url: Secret = Secret::default(),
        /// For one connection, its handshakes included.
        connect_timeout: Duration = Duration::from_secs(2),
        /// How long to wait for a free connection of a pool.
        pool_wait: Duration = Duration::from_secs(5),
        /// `lock_timeout` of a batch's transaction.
        lock_timeout: Duration = Duration::from_secs(3),
        /// `statement_timeout` of a batch's transaction.
        statement_timeout: Duration = Duration::from_secs(5),
        /// `idle_in_transaction_session_timeout`: how long a frozen owner keeps its partition locked.
        idle_in_transaction_timeout: Duration = Duration::from_secs(12),
        /// A transaction that takes longer has its connection closed.
        transaction_budget: Duration = Duration::from_secs(20),
    }

    /// The payment provider.
    provider: ProviderConfig {
        /// `none` writes the rows and calls nobody: for measuring only.
        kind: ProviderKind = ProviderKind::Http,
        /// The base URL; charges are posted to `<url>/v1/charges`. Required, but for kind `none`.
        url: Option<Url> = None,
        /// Sent as a bearer token; `provider.token_file` names a file that holds it.
        token: Option<Secret> = None,
        /// Whose certificates count for `https`, in PEM, instead of those that the machine trusts.
        ca_file: Option<PathBuf> = None,
        /// Our certificate with its chain, in PEM, for a provider that asks for one.
        client_cert_file: Option<PathBuf> = None,
        /// Its key, in PEM, without a passphrase.
        client_key_file: Option<PathBuf> = None,
        /// The total time of one call, body included.
        call_timeout: Duration = Duration::from_secs(5),
        /// All calls of one transaction end within this, counted from its claim.
        effect_deadline: Duration = Duration::from_secs(10),
        /// Calls in flight at once, over all partitions.
        max_in_flight: usize = 384,
        /// Nobody is called for a while after so many events in a row failed; then one call tries.
        breaker_failures: usize = 10,
        /// How an amount is written: `10.00` or `1000`.
        amount: AmountForm = AmountForm::Decimal,
        /// How long the provider remembers an idempotency key.
        key_life: Duration = Duration::from_secs(24 * 3_600),
        /// No call is made for an event within this time of its key's end.
        key_life_margin: Duration = Duration::from_secs(3_600),
        /// Whether the provider is asked what became of a charge whose key it may have forgotten; `none` leaves those to a person.
        query: ProviderQuery = ProviderQuery::None,
        /// "No such charge" is believed only so long after the last attempt.
        query_settle: Duration = Duration::from_secs(300),
        /// The longest `Retry-After` that is honoured.
        retry_after_cap: Duration = Duration::from_secs(300),
        /// The provider repeats a stored answer, so that a refusal after an unknown answer is definite.
        replays_stored_answers: bool = false,
    }

    /// Events that failed and are tried again.
    retry: RetryConfig {
        /// Attempts, the first included; then the event waits for an operator.
        max_attempts: u32 = 20,
        /// The time since the first attempt, after which the event waits for an operator.
        max_age: Duration = Duration::from_secs(6 * 3_600),
        /// The wait before the first retry; it doubles each time.
        backoff_min: Duration = Duration::from_secs(1),
        /// The longest wait between two attempts.
        backoff_max: Duration = Duration::from_secs(600),
    }

    /// Events that are not applied: retried, waiting for their turn, or for an operator.
    held: HeldConfig {
        /// With more open held events than this, a partition pauses until there are fewer.
        max_open: usize = 10_000,
        /// Writes parked events to the topic `<kafka.topic>.dlq` too.
        dead_letters: bool = true,
    }

    /// How long ids are remembered.
    retention: RetentionConfig {
        /// The least life of a claim; 30 days where old events are replayed. It is longer where Kafka can redeliver older records, where the
        /// provider remembers keys for longer, and while a partition has not settled what is older.
        retention: Duration = Duration::from_secs(7 * 86_400),
        /// How old a record can be that Kafka still redelivers. Without it the topic's own settings say so (`retention.ms`, `segment.ms`,
        /// `file.delete.delay.ms`); a topic that keeps its records for ever needs it, or nothing is ever forgotten.
        replay_horizon: Option<Duration> = None,
        /// How often days are dropped that are not needed any more, by one process at a time; also a short time after the start.
        interval: Duration = Duration::from_secs(86_400),
        /// Day partitions that are made ahead.
        days_ahead: u32 = 7,
        /// An id whose time lies further in the future is held.
        future_skew: Duration = Duration::from_secs(3_600),
    }

    /// The port for probes, metrics, the status page and what operators ask for.
    admin: AdminConfig {
        /// Where it listens.
        listen: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 9464),
        /// Who sends it as a bearer token may see held records and ask for actions; without one nobody may. `admin.token_file` names a file
        /// that holds it.
        token: Option<Secret> = None,
    }

    /// What is written to standard error.
    log: LogConfig {
        /// For people or for machines.
        format: LogFormat = LogFormat::Human,
        /// A level, or directives such as `info,onceward::pipeline=debug`; SIGHUP has it read again, `onceward log-level` changes it meanwhile.
        level: String = "info".to_owned(),
    }

    /// Spans for OpenTelemetry, in a build with the feature `otlp`.
    tracing: TracingConfig {
        /// A collector's base URL; spans are posted to `<url>/v1/traces` in protobuf. Without it there are none.
        otlp_endpoint: Option<Url> = None,
        /// How many of the traces that begin here are recorded, from 0 to 1. Of a trace that a record names its sampled flag decides.
        sample_ratio: Ratio = Ratio::ALL,
    }
}

choice! {
    /// Where a group without any position begins.
    Start {
        /// With the oldest record.
        Earliest = "earliest",
        /// With the next record.
        Latest = "latest",
    }
}

choice! {
    /// What to do when records are gone from the log that were never settled.
    OnGap {
        /// The partition stops and waits for a person.
        Stop = "stop",
        /// It goes on with the oldest record there is.
        Continue = "continue",
    }
}

choice! {
    /// How partitions are shared among the members of the group.
    Assignor {
        /// Only the partitions that move stop.
        CooperativeSticky = "cooperative-sticky",
        /// All partitions stop, for a shorter time.
        Range = "range",
        /// The broker shares them out (KIP-848, `group.protocol=consumer`); partitions come after its heartbeat interval.
        Broker = "broker",
    }
}

choice! {
    /// Who is asked for money.
    ProviderKind {
        /// A provider over HTTP.
        Http = "http",
        /// Nobody.
        None = "none",
    }
}

choice! {
    /// How an amount is written.
    AmountForm {
        /// With exactly the currency's decimals: `10.00`, `500` for JPY.
        Decimal = "decimal",
        /// In the currency's smallest unit: `1000`.
        MinorUnits = "minor_units",
    }
}

choice! {
    /// How the provider is asked what became of a charge.
    ProviderQuery {
        /// Not at all.
        None = "none",
        /// `GET <url>/v1/charges?idempotency_key=<eventId>`; only an answer that repeats the key in `idempotencyKey` counts.
        IdempotencyKey = "idempotency_key",
    }
}

choice! {
    /// How log lines look.
    LogFormat {
        /// For people.
        Human = "human",
        /// One JSON object each.
        Json = "json",
    }
}

impl DatabaseConfig {
    /// What the store must be told.
    #[doc(hidden)]
    #[must_use]
    pub fn settings(&self) -> store::Settings {
        store::Settings {
            url: self.url.clone(),
            connect_timeout: self.connect_timeout,
            pool_wait: self.pool_wait,
            limits: TimeLimits {
                lock: self.lock_timeout,
                statement: self.statement_timeout,
                idle_in_transaction: self.idle_in_transaction_timeout,
                budget: self.transaction_budget,
            },
        }
    }
}

impl ProviderConfig {
    /// What the provider's room must be told; `None` without an address.
    #[doc(hidden)]
    #[must_use]
    pub fn settings(&self) -> Option<provider::Settings> {
        Some(provider::Settings {
            url: self.url.as_ref()?.to_string(),
            token: self.token.clone(),
            tls: self.tls(),
            call_timeout: self.call_timeout,
            max_in_flight: self.max_in_flight,
            profile: self.profile(),
        })
    }

    /// Whom an `https` connection trusts, and what it shows.
    #[doc(hidden)]
    #[must_use]
    pub fn tls(&self) -> Tls {
        let roots = self.ca_file.clone().map_or(Roots::System, Roots::File);
        Tls { trust: Trust::Name(roots), client: self.client_cert_file.clone().zip(self.client_key_file.clone()) }
    }

    /// What this provider does in its own way.
    #[doc(hidden)]
    #[must_use]
    pub fn profile(&self) -> provider::Profile {
        provider::Profile {
            amount: self.amount,
            key_life: self.key_life,
            key_life_margin: self.key_life_margin,
            retry_after_cap: self.retry_after_cap,
            query: self.query,
            query_settle: self.query_settle,
            replays_stored_answers: self.replays_stored_answers,
        }
    }
}
