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
        sample(text, HELD.name, &[("reason", reason.as_str()), ("state", state.as_str())], *count as f64);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Epoch, NextOffset};
    use crate::store::held_events::HeldState;
    use crate::tests_support::assert_file;

    #[test]
    fn the_documented_table_is_made_from_the_definitions() {
        assert_file("docs/METRICS.md", &markdown());
    }

    /// Every line is a comment or `name{labels} number`, each family has its head once, and no name repeats.
    #[test]
    fn the_text_is_what_prometheus_reads() {
        let status = Status::default();
        status.partition_owned(0, Epoch(1));
        status.held(vec![(crate::handler::HeldReason::Unknown, HeldState::Parked, 2)]);
        let text = render(&status);
        let mut heads: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let (series, value) = line.rsplit_once(' ').expect("a name and a number");
            assert!(value.parse::<f64>().is_ok(), "{line}");
            let name = series.split('{').next().unwrap_or_default();
            assert!(heads.iter().any(|head| name.starts_with(head)), "{line} has no head");
            assert!(name.starts_with("onceward_"), "{line}");
        }
        let families = heads.len();
        heads.sort_unstable();
        heads.dedup();
        assert_eq!(heads.len(), families);
        assert!(text.contains("onceward_held_events{reason=\"unknown\",state=\"parked\"} 2\n"), "{text}");
        assert!(text.contains(concat!("onceward_build_info{version=\"", env!("CARGO_PKG_VERSION"), "\"")), "{text}");
    }

    // CASES H06
    #[test]
    fn durations_have_buckets_that_reach_every_time_limit() {
        let text = render(&Status::default());
        for bucket in [
            "onceward_stage_seconds_bucket{stage=\"commit\",le=\"30\"}",
            "onceward_provider_call_seconds_bucket{class=\"unknown\",le=\"30\"}",
            "onceward_record_age_at_commit_seconds_bucket{le=\"300\"}",
            "onceward_stage_seconds_bucket{stage=\"wait\",le=\"0.001\"}",
        ] {
            assert!(text.contains(bucket), "{bucket}: {text}");
        }
    }

    // CASES H01
    #[test]
    fn the_series_of_a_partition_are_gone_when_it_is() {
        let status = Status::default();
        status.partition_owned(7, Epoch(4));
        status.frontier(7, Epoch(4), NextOffset(10));
        status.committed(7, Epoch(4), NextOffset(8));
        status.end(7, NextOffset(15));
        let text = render(&status);
        for line in [
            "onceward_lag_records{partition=\"7\"} 5\n",
            "onceward_frontier_offset{partition=\"7\"} 10\n",
            "onceward_committed_offset{partition=\"7\"} 8\n",
        ] {
            assert!(text.contains(line), "{line}: {text}");
        }
        status.partition_gone(7);
        assert!(!render(&status).contains("partition=\"7\""));
    }

    // CASES H04
    #[test]
    fn samples_that_nobody_scrapes_take_no_memory() {
        let before = render(&Status::default()).len();
        for _ in 0..1_000_000 {
            stage(Stage::Wait, Duration::from_millis(3));
        }
        let text = render(&Status::default());
        assert!(text.len() < before + 200, "only digits may have been added");
        assert!(!std::mem::needs_drop::<Histograms<6, 14>>(), "a histogram owns nothing on the heap");
    }

    #[test]
    fn a_sample_is_counted_once_in_its_bucket_and_in_those_above() {
        static BOUNDS: Bounds<2> = Bounds::seconds([1_000_000, 1_000_000_000]);
        let definition = Definition { name: "x_seconds", kind: Kind::Histogram, labels: &[], help: "X." };
        let histogram = Histograms::<1, 2>::new(definition, &BOUNDS);
        for nanoseconds in [1_000_000, 1_000_001, 2_000_000_000] {
            histogram.observe(0, nanoseconds);
        }
        let mut text = String::new();
        series::Family::render(&histogram, &mut text);
        assert_eq!(
            text,
            "# HELP x_seconds X.\n# TYPE x_seconds histogram\n\
             x_seconds_bucket{le=\"0.001\"} 1\nx_seconds_bucket{le=\"1\"} 2\nx_seconds_bucket{le=\"+Inf\"} 3\n\
             x_seconds_sum 2.002000001\nx_seconds_count 3\n"
        );
    }

    #[test]
    fn each_function_changes_its_own_series() {
        let calls: [(fn(), &str); 9] = [
            (|| events(Outcome::GivenBack, 1), "onceward_events_total{outcome=\"given_back\"}"),
            (|| batch_size(3), "onceward_batch_events_count"),
            (|| stage(Stage::Settle, Duration::ZERO), "onceward_stage_seconds_count{stage=\"settle\"}"),
            (|| record_age_at_commit(Duration::ZERO), "onceward_record_age_at_commit_seconds_count"),
            (
                || provider_call(CallClass::InProgress, Duration::ZERO),
                "onceward_provider_call_seconds_count{class=\"in_progress\"}",
            ),
            (|| rebalance(Rebalance::Lost, 1), "onceward_rebalanced_partitions_total{kind=\"lost\"}"),
            (commit_ok, "onceward_offset_commits_total{result=\"ok\"}"),
            (commit_failed, "onceward_offset_commits_total{result=\"failed\"}"),
            (|| pool_in_use(PoolName::Attempts, 1), "onceward_pool_connections_in_use{pool=\"attempts\"}"),
        ];
        for (call, series) in calls {
            let value = || -> f64 {
                let text = render(&Status::default());
                let line = text.lines().find(|line| line.starts_with(series)).expect(series);
                line.rsplit(' ').next().and_then(|value| value.parse().ok()).expect("a number")
            };
            let before = value();
            call();
            // Other tests of this process count too, so the exact number is not ours to know.
            assert!(value() > before, "{series}");
        }
    }
}
