//! Every metric: its name, help, labels and buckets, and the one function that changes it.
//!
//! In: numbers, once per batch or call, never per event. Out: the text that Prometheus reads, and the table in `docs/METRICS.md`.
//! It owns one recorder per process, not the global one of the `metrics` crate: whatever else runs here neither adds to it nor takes its
//! place. Samples wait in memory until somebody scrapes or [`upkeep`] runs. What is true now (`now`) is read from [`Status`],
//! [`Readiness`] and the kernel while rendering, so that the series of a partition are gone when it is.
//!
//! Invariant: every label value is one of a closed list, a currency, this process's group or topic, or the number of a partition that it
//! owns.

mod now;
mod process;
mod series;

use std::sync::LazyLock;
use std::time::Duration;

use metrics::{Counter, Gauge, Histogram};
use metrics_exporter_prometheus::PrometheusRecorder;

pub use self::now::Source;
use self::series::{Definition, Family, Kind, Series};
use crate::pipeline::form::Claiming;
use crate::status::{Readiness, Status};
use crate::store::retention::Kept;

/// Declares a closed list of label values.
macro_rules! label {
    ($(#[doc = $about:literal])+ $name:ident { $( $(#[doc = $doc:literal])+ $variant:ident = $word:literal, )+ }) => {
        $(#[doc = $about])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub enum $name { $( $(#[doc = $doc])+ $variant, )+ }

        impl $name {
            const WORDS: &'static [&'static str] = &[ $($word),+ ];

            /// The label's value.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                Self::WORDS[self as usize]
            }
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
        /// An operator wanted it passed over.
        Skipped = "skipped",
    }
}

label! {
    /// How the rows of a batch of records were inserted.
    Claims {
        /// Plainly: all of its events were new.
        Optimistic = "optimistic",
        /// Plainly those that a look had not found.
        LookFirst = "look_first",
        /// With `ON CONFLICT`.
        OnConflict = "on_conflict",
        /// Plainly, and a key was taken: it was rolled back and ran again.
        Taken = "taken",
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
        /// Held rows and claims given back.
        Settle = "settle",
        /// The frontier and the commit.
        Commit = "commit",
    }
}

label! {
    /// Why an event came that was settled before.
    DuplicateCause {
        /// The same record was delivered again: its offset was not committed yet when its owner ended.
        Redelivery = "redelivery",
        /// The same record was read again, because the group was set back.
        Replay = "replay",
        /// Another record with the same event: the producer sent it more than once.
        ProducedAgain = "produced_again",
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
    /// A part of a rebalance.
    Phase {
        /// From the assign to the epochs: the old owner's batch is waited for.
        Bump = "bump",
        /// What the broker says of offsets and logs.
        Position = "position",
        /// From the broker's word until the consumer was assigned.
        Assign = "assign",
        /// Until the running batches have ended.
        Drain = "drain",
        /// The last commit of what goes away.
        Commit = "commit",
        /// From the broker's word until the consumer was unassigned.
        Revoke = "revoke",
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

label! {
    /// How writing a dead letter ended.
    Delivery {
        /// The broker took it.
        Ok = "ok",
        /// It was refused or got no answer; it is written again.
        Failed = "failed",
    }
}

/// Counts events by what became of them.
pub fn events(outcome: Outcome, count: usize) {
    EVENTS.at(outcome as usize).increment(count as u64);
}

/// Counts duplicates by why they came.
pub fn duplicates(cause: DuplicateCause, count: usize) {
    DUPLICATES.at(cause as usize).increment(count as u64);
}

/// One transaction with this many events has been committed.
pub fn batch_size(events: usize) {
    BATCH_EVENTS.at(0).record(events as f64);
}

/// The claims of one batch were made, or found taken.
pub fn claims(claims: Claims) {
    CLAIMS.at(claims as usize).increment(1);
}

impl From<Claiming> for Claims {
    fn from(claiming: Claiming) -> Self {
        match claiming {
            Claiming::Optimistic => Self::Optimistic,
            Claiming::LookFirst => Self::LookFirst,
            Claiming::OnConflict => Self::OnConflict,
        }
    }
}

/// One stage of one batch is over.
pub fn stage(stage: Stage, took: Duration) {
    STAGE.at(stage as usize).record(took);
}

/// The age of a batch's oldest record when its transaction was committed, by the record's own timestamp.
pub fn record_age_at_commit(age: Duration) {
    RECORD_AGE.at(0).record(age);
}

/// One call of the provider has ended.
pub fn provider_call(class: CallClass, took: Duration) {
    PROVIDER_CALL.at(class as usize).record(took);
}

/// The breaker has opened.
pub fn breaker_opened() {
    BREAKER_OPENINGS.at(0).increment(1);
}

/// Whether the breaker is open.
pub fn breaker(open: bool) {
    BREAKER_OPEN.at(0).set(f64::from(u8::from(open)));
}

/// Partitions came or went.
pub fn rebalance(kind: Rebalance, partitions: usize) {
    REBALANCES.at(kind as usize).increment(1);
    REBALANCED_PARTITIONS.at(kind as usize).increment(partitions as u64);
}

/// One phase of one rebalance is over.
pub fn rebalance_phase(phase: Phase, took: Duration) {
    REBALANCE_PHASES.at(phase as usize).record(took);
}

/// A partition was taken over below its frontier: so many offsets are read once more.
pub fn read_again(offsets: u64) {
    READ_AGAIN.at(0).increment(offsets);
}

/// The broker took an offset commit.
pub fn commit_ok() {
    COMMITS.at(Commit::Ok as usize).increment(1);
}

/// A partition was taken over from a database that has lost what it had.
pub fn database_went_back() {
    WENT_BACK.at(0).increment(1);
}

/// An offset commit was refused or got no answer.
pub fn commit_failed() {
    COMMITS.at(Commit::Failed as usize).increment(1);
}

/// A confirmation came from an earlier assignment and was not counted.
pub fn stale_confirmation() {
    STALE_CONFIRMATIONS.at(0).increment(1);
}

/// Dead letters were written, or could not be.
pub fn dead_letters(delivery: Delivery, count: usize) {
    DEAD_LETTERS.at(delivery as usize).increment(count as u64);
}

/// The Kafka client reported an error that it recovers from by itself.
pub fn client_error() {
    CLIENT_ERRORS.at(0).increment(1);
}

/// A Kafka client met a fatal error and another took its place.
pub fn client_replaced() {
    CLIENT_REPLACEMENTS.at(0).increment(1);
}

/// A batch has taken more than four fifths of what a drain allows.
pub fn near_drain() {
    NEAR_DRAIN.at(0).increment(1);
}

/// Connections of a pool that are in use now.
pub fn pool_in_use(pool: PoolName, connections: usize) {
    POOL_IN_USE.at(pool as usize).set(connections as f64);
}

/// How far back ids are remembered.
pub fn floor(kept: &Kept) {
    FLOOR_AGE.at(0).set(kept.floor.map_or(0.0, |floor| kept.age_ms(floor) as f64 / 1000.0));
}

/// The days of the table of claims, where it has days.
pub fn days(kept: &Kept) {
    DAYS_AHEAD.at(0).set(kept.days_ahead() as f64);
    OLDEST_DAY_AGE.at(0).set(kept.days.first().map_or(0.0, |(from, _)| kept.age_ms(*from) as f64 / 1000.0));
}

/// A table without days takes every id.
pub fn no_days() {
    DAYS_AHEAD.at(0).set(f64::INFINITY);
}

/// Whether days are kept that nobody needs for their age.
pub fn held_back(is_held_back: bool) {
    HELD_BACK.at(0).set(f64::from(u8::from(is_held_back)));
}

/// A run of the cleaner has ended well, or could not go on.
pub fn cleaner(went_on: bool) {
    CLEANER_FAILED.at(0).set(f64::from(u8::from(!went_on)));
}

/// Sorts the samples since the last call into their buckets. To be called every few seconds, or they pile up while nobody scrapes.
pub fn upkeep() {
    RECORDER.handle().run_upkeep();
}

/// The text that Prometheus reads.
#[must_use]
pub fn render(source: Source<'_>, status: &Status, readiness: &Readiness) -> String {
    for family in FAMILIES {
        family.register();
    }
    let mut text = RECORDER.handle().render();
    text.push_str(&now::render(source, &status.snapshot(), readiness));
    text.push_str(&process::render());
    text
}

/// The Markdown table of all metrics: `docs/METRICS.md` equals it, and a test says so.
#[must_use]
pub fn markdown() -> String {
    let counted = FAMILIES.iter().map(|family| family.definition());
    let rows = counted.chain(now::definitions()).chain(process::DEFINITIONS).map(Definition::row);
    MARKDOWN_HEAD.to_owned() + &rows.collect::<String>()
}

const MARKDOWN_HEAD: &str = "# Metrics\n\n\
    `GET /metrics` on the admin port. Made from `src/metrics.rs`; a test holds it true.\n\n\
    The series of a partition exist only in the process that owns it.\n\n\
    | metric | type | labels | meaning |\n| --- | --- | --- | --- |\n";

/// From a millisecond to beyond every time limit of a batch.
const STAGE_SECONDS: Kind = Kind::Histogram(&[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0]);

/// From ten milliseconds to an hour: the age of a record behind a long outage is a number too.
const AGE_SECONDS: Kind = Kind::Histogram(&[0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0]);

const BATCH_SIZES: Kind = Kind::Histogram(&[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0]);

/// The whole process's: several engines in one process share it.
static RECORDER: LazyLock<PrometheusRecorder> =
    LazyLock::new(|| series::recorder(FAMILIES.iter().map(|family| family.definition())));

static EVENTS: Series<Counter> = Series::new(Definition {
    name: "onceward_events_total",
    kind: Kind::Counter,
    labels: &[("outcome", Outcome::WORDS)],
    help: "Events by what became of them, counted when their transaction is committed.",
});

static DUPLICATES: Series<Counter> = Series::new(Definition {
    name: "onceward_duplicates_total",
    kind: Kind::Counter,
    labels: &[("cause", DuplicateCause::WORDS)],
    help: "Events that were settled before, by why they came.",
});

static BATCH_EVENTS: Series<Histogram> = Series::new(Definition {
    name: "onceward_batch_events",
    kind: BATCH_SIZES,
    labels: &[],
    help: "Events in one committed transaction.",
});

static CLAIMS: Series<Counter> = Series::new(Definition {
    name: "onceward_claims_total",
    kind: Kind::Counter,
    labels: &[("form", Claims::WORDS)],
    help: "Batches by how their claims were made. `look_first`: what a look had not found went in plainly. `taken`: a plain `INSERT` met a key that was not free, was rolled back and ran again.",
});

static STAGE: Series<Histogram> = Series::new(Definition {
    name: "onceward_stage_seconds",
    kind: STAGE_SECONDS,
    labels: &[("stage", Stage::WORDS)],
    help: "Time of a batch in each of its stages.",
});

static RECORD_AGE: Series<Histogram> = Series::new(Definition {
    name: "onceward_record_age_at_commit_seconds",
    kind: AGE_SECONDS,
    labels: &[],
    help: "Age of a batch's oldest record when its transaction was committed, by the record's timestamp.",
});

static PROVIDER_CALL: Series<Histogram> = Series::new(Definition {
    name: "onceward_provider_call_seconds",
    kind: STAGE_SECONDS,
    labels: &[("class", CallClass::WORDS)],
    help: "Calls of the payment provider by the class of the answer.",
});

static BREAKER_OPENINGS: Series<Counter> = Series::new(Definition {
    name: "onceward_breaker_openings_total",
    kind: Kind::Counter,
    labels: &[],
    help: "How often the breaker before the payment provider has opened.",
});

static BREAKER_OPEN: Series<Gauge> = Series::new(Definition {
    name: "onceward_breaker_open",
    kind: Kind::Gauge,
    labels: &[],
    help: "1 while nobody, or only a probe, calls the payment provider; `/status` says why.",
});

static REBALANCES: Series<Counter> = Series::new(Definition {
    name: "onceward_rebalances_total",
    kind: Kind::Counter,
    labels: &[("kind", Rebalance::WORDS)],
    help: "Changes of the assignment.",
});

static REBALANCED_PARTITIONS: Series<Counter> = Series::new(Definition {
    name: "onceward_rebalanced_partitions_total",
    kind: Kind::Counter,
    labels: &[("kind", Rebalance::WORDS)],
    help: "Partitions that came or went.",
});

static REBALANCE_PHASES: Series<Histogram> = Series::new(Definition {
    name: "onceward_rebalance_seconds",
    kind: STAGE_SECONDS,
    labels: &[("phase", Phase::WORDS)],
    help: "Time of a rebalance in each of its phases. Bump and position are parts of assign; drain and commit are parts of revoke.",
});

static READ_AGAIN: Series<Counter> = Series::new(Definition {
    name: "onceward_read_again_offsets_total",
    kind: Kind::Counter,
    labels: &[],
    help: "Offsets between the start of a takeover and the frontier: their records come again and are duplicates. Over \
           `onceward_rebalances_total` these are the duplicates per rebalance.",
});

static COMMITS: Series<Counter> = Series::new(Definition {
    name: "onceward_offset_commits_total",
    kind: Kind::Counter,
    labels: &[("result", Commit::WORDS)],
    help: "Offset commits sent to Kafka. A failed one loses nothing: the position is in the database too.",
});

static NEAR_DRAIN: Series<Counter> = Series::new(Definition {
    name: "onceward_batches_near_drain_total",
    kind: Kind::Counter,
    labels: &[],
    help: "Batches that took longer than four fifths of `pipeline.drain_ms`: what takes all of it is not waited for in a rebalance.",
});

static POOL_IN_USE: Series<Gauge> = Series::new(Definition {
    name: "onceward_pool_connections_in_use",
    kind: Kind::Gauge,
    labels: &[("pool", PoolName::WORDS)],
    help: "Database connections in use.",
});

static WENT_BACK: Series<Counter> = Series::new(Definition {
    name: "onceward_database_went_back_total",
    kind: Kind::Counter,
    labels: &[],
    help: "Partitions taken over from a database that had settled more before: restored, promoted, or the group was moved ahead.",
});

static STALE_CONFIRMATIONS: Series<Counter> = Series::new(Definition {
    name: "onceward_stale_confirmations_total",
    kind: Kind::Counter,
    labels: &[],
    help: "Commits of the database that were confirmed after their assignment had ended, and moved no offset.",
});

static DEAD_LETTERS: Series<Counter> = Series::new(Definition {
    name: "onceward_dead_letters_total",
    kind: Kind::Counter,
    labels: &[("result", Delivery::WORDS)],
    help: "Parked events written to the dead-letter topic. A failed one is written later; its event is parked all the same.",
});

static CLIENT_ERRORS: Series<Counter> = Series::new(Definition {
    name: "onceward_client_errors_total",
    kind: Kind::Counter,
    labels: &[],
    help: "Errors that the Kafka client reported, each of them, also those that the log leaves out.",
});

static CLIENT_REPLACEMENTS: Series<Counter> = Series::new(Definition {
    name: "onceward_client_replacements_total",
    kind: Kind::Counter,
    labels: &[],
    help: "Kafka clients that met a fatal error and were replaced; after three in ten minutes the process ends instead.",
});

static DAYS_AHEAD: Series<Gauge> = Series::new(Definition {
    name: "onceward_retention_days_ahead",
    kind: Kind::Gauge,
    labels: &[],
    help: "Days after today that the table of claims can take, without a hole; below 1 the next midnight stops partitions. +Inf: the table has no days.",
});

static OLDEST_DAY_AGE: Series<Gauge> = Series::new(Definition {
    name: "onceward_retention_oldest_day_age_seconds",
    kind: Kind::Gauge,
    labels: &[],
    help: "How long ago the oldest day began that the table of claims still has; `onceward retention status` says what keeps it.",
});

static FLOOR_AGE: Series<Gauge> = Series::new(Definition {
    name: "onceward_retention_floor_age_seconds",
    kind: Kind::Gauge,
    labels: &[],
    help: "How old the youngest forgotten id is; an older event is held as beyond_horizon, unless it left other traces.",
});

static HELD_BACK: Series<Gauge> = Series::new(Definition {
    name: "onceward_retention_held_back",
    kind: Kind::Gauge,
    labels: &[],
    help: "1 while claims are kept that nobody needs for their age: somebody has not settled what is older. As the cleaner saw it last.",
});

static CLEANER_FAILED: Series<Gauge> = Series::new(Definition {
    name: "onceward_retention_cleaner_failed",
    kind: Kind::Gauge,
    labels: &[],
    help: "1 while the last run of the cleaner in this process could not go on; the log says why.",
});

static FAMILIES: &[&dyn Family] = &[
    &EVENTS,
    &DUPLICATES,
    &BATCH_EVENTS,
    &CLAIMS,
    &STAGE,
    &RECORD_AGE,
    &PROVIDER_CALL,
    &BREAKER_OPENINGS,
    &BREAKER_OPEN,
    &REBALANCES,
    &REBALANCED_PARTITIONS,
    &REBALANCE_PHASES,
    &READ_AGAIN,
    &COMMITS,
    &WENT_BACK,
    &STALE_CONFIRMATIONS,
    &DEAD_LETTERS,
    &CLIENT_ERRORS,
    &CLIENT_REPLACEMENTS,
    &NEAR_DRAIN,
    &POOL_IN_USE,
    &DAYS_AHEAD,
    &OLDEST_DAY_AGE,
    &FLOOR_AGE,
    &HELD_BACK,
    &CLEANER_FAILED,
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Epoch, NextOffset};
    use crate::store::held_events::HeldState;
    use crate::tests_support::assert_file;

    fn shown(status: &Status) -> String {
        render(Source { group: "billing", topic: "orders" }, status, &Readiness::new())
    }

    #[test]
    fn the_documented_table_is_made_from_the_definitions() {
        assert_file("docs/METRICS.md", &markdown());
    }

    /// Every line is a comment or `name{labels} number`, each family has its head once, and no name repeats.
    #[test]
    fn the_text_is_what_prometheus_reads() {
        let status = Status::default();
        status.partition_owned(0, Epoch(1));
        status.held(vec![(crate::handler::HeldReason::Unknown, HeldState::Parked, 2)], 0);
        let text = shown(&status);
        let mut heads: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect();
        for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
            let (series, value) = line.rsplit_once(' ').expect("a name and a number");
            assert!(value.parse::<f64>().is_ok(), "{line}");
            let name = series.split('{').next().unwrap_or_default();
            assert!(heads.iter().any(|head| name.starts_with(head)), "{line} has no head");
            assert!(name.starts_with("onceward_") || name.starts_with("process_"), "{line}");
        }
        let families = heads.len();
        heads.sort_unstable();
        heads.dedup();
        assert_eq!(heads.len(), families);
        let held = "onceward_held_events{group=\"billing\",topic=\"orders\",reason=\"unknown\",state=\"parked\"} 2\n";
        assert!(text.contains(held), "{text}");
        assert!(text.contains(concat!("onceward_build_info{version=\"", env!("CARGO_PKG_VERSION"), "\"")), "{text}");
    }

    // CASES H06
    #[test]
    fn durations_have_buckets_that_reach_every_time_limit() {
        let text = shown(&Status::default());
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
        let text = shown(&status);
        for line in [
            "onceward_lag_records{group=\"billing\",topic=\"orders\",partition=\"7\"} 5\n",
            "onceward_frontier_offset{group=\"billing\",topic=\"orders\",partition=\"7\"} 10\n",
            "onceward_committed_offset{group=\"billing\",topic=\"orders\",partition=\"7\"} 8\n",
        ] {
            assert!(text.contains(line), "{line}: {text}");
        }
        status.partition_gone(7);
        assert!(!shown(&status).contains("partition=\"7\""));
    }

    // CASES H04. Kept, these samples would take 80 MB.
    #[test]
    fn samples_that_nobody_scrapes_take_no_memory() {
        let before = resident_kib();
        for sample in 0..5_000_000 {
            stage(Stage::Wait, Duration::from_millis(3));
            if sample % 100_000 == 0 {
                upkeep();
            }
        }
        let grown = resident_kib().saturating_sub(before);
        assert!(grown < 30 << 10, "{grown} KiB");
    }

    fn resident_kib() -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a process has memory");
        line.trim().trim_end_matches(" kB").parse().expect("a number")
    }

    #[test]
    fn a_sample_is_counted_once_in_its_bucket_and_in_those_above() {
        let definition = Definition { name: "x_seconds", kind: Kind::Histogram(&[0.001, 1.0]), labels: &[], help: "X." };
        let recorder = series::recorder([&definition].into_iter());
        let histogram: Histogram = definition.handle(&recorder, &[]);
        for nanoseconds in [1_000_000, 1_000_001, 2_000_000_000] {
            histogram.record(Duration::from_nanos(nanoseconds));
        }
        assert_eq!(
            recorder.handle().render(),
            "# HELP x_seconds X.\n# TYPE x_seconds histogram\n\
             x_seconds_bucket{le=\"0.001\"} 1\nx_seconds_bucket{le=\"1\"} 2\nx_seconds_bucket{le=\"+Inf\"} 3\n\
             x_seconds_sum 2.002000001\nx_seconds_count 3\n\n"
        );
    }

    #[test]
    fn each_function_changes_its_own_series() {
        let calls: [(fn(), &str); 17] = [
            (|| claims(Claims::Taken), "onceward_claims_total{form=\"taken\"}"),
            (|| events(Outcome::GivenBack, 1), "onceward_events_total{outcome=\"given_back\"}"),
            (|| batch_size(3), "onceward_batch_events_count"),
            (|| stage(Stage::Settle, Duration::ZERO), "onceward_stage_seconds_count{stage=\"settle\"}"),
            (|| record_age_at_commit(Duration::ZERO), "onceward_record_age_at_commit_seconds_count"),
            (
                || provider_call(CallClass::InProgress, Duration::ZERO),
                "onceward_provider_call_seconds_count{class=\"in_progress\"}",
            ),
            (|| rebalance(Rebalance::Lost, 1), "onceward_rebalanced_partitions_total{kind=\"lost\"}"),
            (|| rebalance_phase(Phase::Drain, Duration::ZERO), "onceward_rebalance_seconds_count{phase=\"drain\"}"),
            (|| read_again(3), "onceward_read_again_offsets_total"),
            (commit_ok, "onceward_offset_commits_total{result=\"ok\"}"),
            (commit_failed, "onceward_offset_commits_total{result=\"failed\"}"),
            (stale_confirmation, "onceward_stale_confirmations_total"),
            (|| dead_letters(Delivery::Failed, 1), "onceward_dead_letters_total{result=\"failed\"}"),
            (client_error, "onceward_client_errors_total"),
            (near_drain, "onceward_batches_near_drain_total"),
            (client_replaced, "onceward_client_replacements_total"),
            (|| pool_in_use(PoolName::Attempts, 1), "onceward_pool_connections_in_use{pool=\"attempts\"}"),
        ];
        for (call, series) in calls {
            let value = || -> f64 {
                let text = shown(&Status::default());
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
