//! Every metric: its name, help, labels and buckets, and the one function that changes it.
//!
//! In: numbers, once per batch or call, never per event. Out: the text that Prometheus reads, and the table in `docs/METRICS.md`.
//! It owns a fixed set of atomic numbers: nothing allocates, nothing grows, nothing must be drained, whether or not anybody scrapes.
//! The gauges of a partition are read from [`Status`] while rendering, so that they are gone when the partition is.
//!
//! Invariant: every label value is one of a closed list or the number of a partition that this process owns.

mod series;

use std::time::Duration;

use self::series::{Bounds, Counters, Definition, Gauges, Histograms, Kind, sample};
use crate::status::{PartitionStatus, Status};

/// Declares a closed list of label values.
macro_rules! label {
    ($(#[doc = $about:literal])+ $name:ident { $( $(#[doc = $doc:literal])+ $variant:ident = $word:literal, )+ }) => {
        $(#[doc = $about])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name { $( $(#[doc = $doc])+ $variant, )+ }

        impl $name {
            const WORDS: &'static [&'static str] = &[ $($word),+ ];
        }
    };
}

label! {
    /// What became of an event.
    Outcome {
        /// The effect happened in this batch.
        Applied = "applied",
        /// A business "no", stored.
        Declined = "declined",
        /// Its claim was there already.
        Duplicate = "duplicate",
        /// Recorded with a reason.
        Held = "held",
        /// Its claim was taken back; it comes again.
        GivenBack = "given_back",
    }
}

label! {
    /// A part of a batch's time.
    Stage {
        /// From hand-over to the start of the transaction.
        Wait = "wait",
        /// Decoding and validating.
        Decode = "decode",
        /// Begin, fence, claim and digest look-up.
        Claim = "claim",
        /// The handler, its calls included.
        Apply = "apply",
        /// Held rows, claims given back and the frontier.
        Settle = "settle",
        /// The commit alone.
        Commit = "commit",
    }
}

label! {
    /// How the provider answered.
    CallClass {
        /// 2xx with the expected body.
        Charged = "charged",
        /// 402.
        Declined = "declined",
        /// 400 or 422.
        Rejected = "rejected",
        /// 401, 403, 404 or a redirect.
        Configuration = "configuration",
        /// 409.
        InProgress = "in_progress",
        /// Refused before anything happened.
        NotStarted = "not_started",
        /// Nobody knows.
        Unknown = "unknown",
    }
}

label! {
    /// A change of the assignment.
    Rebalance {
        /// Partitions came.
        Assign = "assign",
        /// Partitions were asked back.
        Revoke = "revoke",
        /// Partitions were taken without asking.
        Lost = "lost",
    }
}

label! {
    /// A connection pool.
    PoolName {
        /// For the batches' transactions.
        Claims = "claims",
        /// For open attempts.
        Attempts = "attempts",
        /// For bumps and everything else.
        Control = "control",
    }
}

label! {
    /// How an offset commit ended.
    Commit {
        /// The broker took it.
        Ok = "ok",
        /// It was refused or got no answer.
        Failed = "failed",
    }
}

/// Counts events by what became of them.
pub fn events(outcome: Outcome, count: usize) {
    EVENTS.add(outcome as usize, count as u64);
}

/// One transaction with this many events has been committed.
pub fn batch_size(events: usize) {
    BATCH_EVENTS.observe(0, events as u64);
}

/// One stage of one batch is over.
pub fn stage(stage: Stage, took: Duration) {
    STAGE.observe(stage as usize, nanoseconds(took));
}

/// The age of a batch's oldest record when its transaction was committed, by the record's own timestamp.
pub fn record_age_at_commit(age: Duration) {
    RECORD_AGE.observe(0, nanoseconds(age));
}

/// One call of the provider has ended.
pub fn provider_call(class: CallClass, took: Duration) {
    PROVIDER_CALL.observe(class as usize, nanoseconds(took));
}

/// Partitions came or went.
pub fn rebalance(kind: Rebalance, partitions: usize) {
    REBALANCES.add(kind as usize, 1);
    REBALANCED_PARTITIONS.add(kind as usize, partitions as u64);
}

/// The broker took an offset commit.
pub fn commit_ok() {
    COMMITS.add(Commit::Ok as usize, 1);
}

/// An offset commit was refused or got no answer.
pub fn commit_failed() {
    COMMITS.add(Commit::Failed as usize, 1);
}

/// A confirmation came from an earlier assignment and was not counted.
pub fn stale_confirmation() {}

/// The Kafka client reported an error that it recovers from by itself.
pub fn client_error() {}

/// Connections of a pool that are in use now.
pub fn pool_in_use(pool: PoolName, connections: usize) {
    POOL_IN_USE.set(pool as usize, connections as u64);
}

/// The text that Prometheus reads.
#[must_use]
pub fn render(status: &Status) -> String {
    let mut text = String::with_capacity(16 << 10);
    for family in FAMILIES {
        family.render(&mut text);
    }
    BUILD_INFO.head(&mut text);
    let revision = option_env!("ONCEWARD_REVISION").unwrap_or("unknown");
    sample(&mut text, BUILD_INFO.name, &[("version", env!("CARGO_PKG_VERSION")), ("revision", revision)], 1.0);
    render_status(&mut text, status);
    text
}

/// The Markdown table of all metrics: `docs/METRICS.md` equals it, and a test says so.
#[must_use]
pub fn markdown() -> String {
    let mut rows = String::from(MARKDOWN_HEAD);
    let partition = PARTITION_GAUGES.iter().map(|(definition, _)| definition);
    for definition in FAMILIES.iter().map(|family| family.definition()).chain([&BUILD_INFO, &HELD]).chain(partition) {
        rows.push_str(&definition.row());
    }
    rows
}

const MARKDOWN_HEAD: &str = "# Metrics\n\n\
    `GET /metrics` on the admin port. Made from `src/metrics.rs`; a test holds it true.\n\n\
    The series of a partition exist only in the process that owns it.\n\n\
    | metric | type | labels | meaning |\n| --- | --- | --- | --- |\n";

/// From a millisecond to beyond every time limit of a batch.
const STAGE_SECONDS: Bounds<14> = Bounds::seconds([
    1_000_000,
    2_500_000,
    5_000_000,
    10_000_000,
    25_000_000,
    50_000_000,
    100_000_000,
    250_000_000,
    500_000_000,
    1_000_000_000,
    2_500_000_000,
    5_000_000_000,
    10_000_000_000,
    30_000_000_000,
]);

/// From ten milliseconds to an hour: the age of a record behind a long outage is a number too.
const AGE_SECONDS: Bounds<14> = Bounds::seconds([
    10_000_000,
    25_000_000,
    50_000_000,
    100_000_000,
    250_000_000,
    500_000_000,
    1_000_000_000,
    2_500_000_000,
    5_000_000_000,
    10_000_000_000,
    30_000_000_000,
    60_000_000_000,
    300_000_000_000,
    3_600_000_000_000,
]);

const BATCH_BUCKETS: Bounds<12> = Bounds::whole([1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]);

static EVENTS: Counters<5> = Counters::new(Definition {
    name: "onceward_events_total",
    kind: Kind::Counter,
    labels: &[("outcome", Outcome::WORDS)],
    help: "Events by what became of them, counted when their transaction is committed.",
});

static BATCH_EVENTS: Histograms<1, 12> = Histograms::new(
    Definition { name: "onceward_batch_events", kind: Kind::Histogram, labels: &[], help: "Events in one committed transaction." },
    &BATCH_BUCKETS,
);

static STAGE: Histograms<6, 14> = Histograms::new(
    Definition {
        name: "onceward_stage_seconds",
        kind: Kind::Histogram,
        labels: &[("stage", Stage::WORDS)],
        help: "Time of a batch in each of its stages.",
    },
    &STAGE_SECONDS,
);

static RECORD_AGE: Histograms<1, 14> = Histograms::new(
    Definition {
        name: "onceward_record_age_at_commit_seconds",
        kind: Kind::Histogram,
        labels: &[],
        help: "Age of a batch's oldest record when its transaction was committed, by the record's timestamp.",
    },
    &AGE_SECONDS,
);

static PROVIDER_CALL: Histograms<7, 14> = Histograms::new(
    Definition {
        name: "onceward_provider_call_seconds",
        kind: Kind::Histogram,
        labels: &[("class", CallClass::WORDS)],
        help: "Calls of the payment provider by the class of the answer.",
    },
    &STAGE_SECONDS,
);

static REBALANCES: Counters<3> = Counters::new(Definition {
    name: "onceward_rebalances_total",
    kind: Kind::Counter,
    labels: &[("kind", Rebalance::WORDS)],
    help: "Changes of the assignment.",
});

static REBALANCED_PARTITIONS: Counters<3> = Counters::new(Definition {
    name: "onceward_rebalanced_partitions_total",
    kind: Kind::Counter,
    labels: &[("kind", Rebalance::WORDS)],
    help: "Partitions that came or went.",
});

static COMMITS: Counters<2> = Counters::new(Definition {
    name: "onceward_offset_commits_total",
    kind: Kind::Counter,
    labels: &[("result", Commit::WORDS)],
    help: "Offset commits sent to Kafka. A failed one loses nothing: the position is in the database too.",
});

static POOL_IN_USE: Gauges<3> = Gauges::new(Definition {
    name: "onceward_pool_connections_in_use",
    kind: Kind::Gauge,
    labels: &[("pool", PoolName::WORDS)],
    help: "Database connections in use.",
});

const BUILD_INFO: Definition = Definition {
    name: "onceward_build_info",
    kind: Kind::Gauge,
    labels: &[("version", &[]), ("revision", &[])],
    help: "Always 1.",
};

const HELD: Definition = Definition {
    name: "onceward_held_events",
    kind: Kind::Gauge,
    labels: &[("reason", &[]), ("state", &[])],
    help: "Held events of this group and topic, by reason and state; every process counts all partitions.",
};

type Reading = fn(&PartitionStatus) -> Option<i64>;

const PARTITION_GAUGES: &[(Definition, Reading)] = &[
    (partition_gauge("onceward_window_records", "Records that wait in the partition's window."), |p| whole(p.window_records)),
    (partition_gauge("onceward_window_bytes", "Memory that these records hold."), |p| whole(p.window_bytes)),
    (partition_gauge("onceward_in_flight_events", "Events of the batch that is in its transaction."), |p| whole(p.in_flight)),
    (partition_gauge("onceward_lag_records", "Records between the frontier and the end of the partition."), |p| p.lag()),
    (partition_gauge("onceward_frontier_offset", "One past the last settled record; the database holds the same value."), |p| {
        p.frontier.map(|next| next.0)
    }),
    (partition_gauge("onceward_committed_offset", "The offset that Kafka has taken."), |p| p.committed.map(|next| next.0)),
    (partition_gauge("onceward_partition_epoch", "The epoch under which the partition is owned."), |p| Some(p.epoch.0)),
    (partition_gauge("onceward_partition_stopped", "1 while the partition waits for an operator."), |p| {
        Some(i64::from(p.stopped.is_some()))
    }),
];

const fn partition_gauge(name: &'static str, help: &'static str) -> Definition {
    Definition { name, kind: Kind::Gauge, labels: &[("partition", &[])], help }
}

static FAMILIES: &[&dyn series::Family] =
    &[&EVENTS, &BATCH_EVENTS, &STAGE, &RECORD_AGE, &PROVIDER_CALL, &REBALANCES, &REBALANCED_PARTITIONS, &COMMITS, &POOL_IN_USE];

fn render_status(text: &mut String, status: &Status) {
    let snapshot = status.snapshot();
    HELD.head(text);
    for (reason, state, count) in &snapshot.held {
        sample(text, HELD.name, &[("reason", reason), ("state", state)], *count as f64);
    }
    for (definition, reading) in PARTITION_GAUGES {
        definition.head(text);
        for (partition, state) in &snapshot.partitions {
            if let Some(value) = reading(state) {
                sample(text, definition.name, &[("partition", &partition.to_string())], value as f64);
            }
        }
    }
}

fn whole(number: usize) -> Option<i64> {
    i64::try_from(number).ok()
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
