//! What is true at the moment of a scrape: read, not counted, so that no series outlives what it tells of.
//!
//! In: a snapshot of the status, and the latches. Out: text. It owns nothing.
//!
//! Invariant: each series of a partition or of the group names its group and topic; two groups in one Prometheus never add up.

use super::DuplicateCause;
use super::series::{Definition, Kind};
use crate::status::{Duplicates, PartitionStatus, Readiness, Snapshot};

/// What this process consumes.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    /// The consumer group.
    pub group: &'a str,
    /// The topic.
    pub topic: &'a str,
}

const BUILD_INFO: Definition = Definition {
    name: "onceward_build_info",
    kind: Kind::Gauge,
    labels: &[("version", &[]), ("revision", &[]), GROUP, TOPIC],
    help: "Always 1.",
};

const READY: Definition = Definition {
    name: "onceward_ready",
    kind: Kind::Gauge,
    labels: &[("latch", Readiness::LATCHES)],
    help: "1 while the latch is green; `/ready` says why one is red.",
};

const NOT_CHARGED_AGAIN: Definition = Definition {
    name: "onceward_not_charged_again_total",
    kind: Kind::Counter,
    labels: &[("cause", DuplicateCause::WORDS), ("currency", &[])],
    help: "What the duplicates would have cost, in units of the currency, since the process has started.",
};

const PARTITIONS: Definition = Definition {
    name: "onceward_group_partitions",
    kind: Kind::Gauge,
    labels: &[GROUP, TOPIC],
    help: "Partitions of the topic that the database knows for this group; every process counts all. Each should have an owner, which \
           shows `onceward_partition_epoch`.",
};

const HELD: Definition = Definition {
    name: "onceward_held_events",
    kind: Kind::Gauge,
    labels: &[GROUP, TOPIC, ("reason", &[]), ("state", &[])],
    help: "Held events of this group and topic that are open, by reason and state; every process counts all partitions.",
};

const HELD_REQUESTS: Definition = Definition {
    name: "onceward_held_requests",
    kind: Kind::Gauge,
    labels: &[GROUP, TOPIC],
    help: "Requests of operators that are not carried out yet. One that stays is of a partition that nobody owns or that cannot serve.",
};

const OF_THE_PROCESS: [&Definition; 6] = [&BUILD_INFO, &READY, &NOT_CHARGED_AGAIN, &PARTITIONS, &HELD, &HELD_REQUESTS];

const GROUP: (&str, &[&str]) = ("group", &[]);
const TOPIC: (&str, &[&str]) = ("topic", &[]);

type Reading = fn(&PartitionStatus) -> Option<i64>;

const OF_A_PARTITION: [(Definition, Reading); 11] = [
    (of_a_partition("onceward_window_records", "Records that wait in the partition's window."), |p| whole(p.window_records)),
    (of_a_partition("onceward_window_bytes", "Memory that these records hold."), |p| whole(p.window_bytes)),
    (of_a_partition("onceward_in_flight_events", "Records of the window's batch that is in its transaction."), |p| {
        whole(p.in_flight)
    }),
    (of_a_partition("onceward_lag_records", "Records between the frontier and the end of the partition."), |p| p.lag()),
    (of_a_partition("onceward_frontier_offset", "One past the last settled record; the database holds the same value."), |p| {
        p.frontier.map(|next| next.0)
    }),
    (of_a_partition("onceward_committed_offset", "The offset that Kafka has taken."), |p| p.committed.map(|next| next.0)),
    (of_a_partition("onceward_partition_epoch", "The epoch under which the partition is owned."), |p| Some(p.epoch.0)),
    (
        of_a_partition(
            "onceward_stuck_seconds",
            "How long the partition has had records to settle and no reason to wait, and has settled none; 0 while it moves.",
        ),
        |p| i64::try_from(p.stuck_for().as_secs()).ok(),
    ),
    (
        of_a_partition("onceward_held_open_events", "Held events of the partition that are not settled; with too many it pauses."),
        |p| whole(p.held_open),
    ),
    (
        of_a_partition(
            "onceward_partition_paused",
            "1 while the partition waits: an operator has paused it, too many held events are open, or the database is away.",
        ),
        |p| Some(i64::from(p.paused.is_some())),
    ),
    (of_a_partition("onceward_partition_stopped", "1 while the partition waits for an operator."), |p| {
        Some(i64::from(p.stopped.is_some()))
    }),
];

const fn of_a_partition(name: &'static str, help: &'static str) -> Definition {
    Definition { name, kind: Kind::Gauge, labels: &[GROUP, TOPIC, ("partition", &[])], help }
}

/// All of them.
pub fn definitions() -> impl Iterator<Item = &'static Definition> {
    OF_THE_PROCESS.into_iter().chain(OF_A_PARTITION.iter().map(|(definition, _)| definition))
}

/// The text that Prometheus reads.
pub fn render(Source { group, topic }: Source<'_>, snapshot: &Snapshot, readiness: &Readiness) -> String {
    let (revision, version) = (option_env!("ONCEWARD_REVISION").unwrap_or("unknown"), env!("CARGO_PKG_VERSION"));
    let red = readiness.red();
    let is_green = |latch: &str| red.iter().all(|(name, _)| *name != latch);
    let latches = Readiness::LATCHES.iter().map(|latch| (vec![*latch], u8::from(is_green(latch))));
    let held = snapshot.held.iter().map(|(reason, state, count)| (vec![group, topic, reason.as_str(), state.as_str()], *count));
    let mut text = BUILD_INFO.text([(vec![version, revision, group, topic], 1)]);
    text += &READY.text(latches);
    text += &not_charged_again(&snapshot.duplicates);
    text += &PARTITIONS.text(snapshot.known_partitions.map(|known| (vec![group, topic], known)));
    text += &HELD.text(held);
    text += &HELD_REQUESTS.text([(vec![group, topic], snapshot.held_requests)]);
    let partitions: Vec<_> = snapshot.partitions.iter().map(|(number, state)| (number.to_string(), state)).collect();
    for (definition, reading) in &OF_A_PARTITION {
        let samples = partitions.iter().filter_map(|(number, state)| Some((vec![group, topic, number.as_str()], reading(state)?)));
        text += &definition.text(samples);
    }
    text
}

fn not_charged_again(duplicates: &Duplicates) -> String {
    let amounts = duplicates.iter().flat_map(|(cause, duplicated)| {
        duplicated.minor_units.iter().map(move |(currency, units)| (cause, currency.to_string(), currency.decimal_of(*units)))
    });
    let amounts: Vec<_> = amounts.collect();
    NOT_CHARGED_AGAIN.text(amounts.iter().map(|(cause, currency, amount)| (vec![cause.as_str(), currency.as_str()], amount)))
}

fn whole(number: usize) -> Option<i64> {
    i64::try_from(number).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{Currency, Money};
    use crate::status::Status;

    const SOURCE: Source<'_> = Source { group: "bil\"ling", topic: "orders" };

    #[test]
    fn a_group_of_any_name_is_a_label() {
        let text = render(SOURCE, &Snapshot { held_requests: 2, ..Snapshot::default() }, &Readiness::new());
        assert!(text.contains("onceward_held_requests{group=\"bil\\\"ling\",topic=\"orders\"} 2\n"), "{text}");
    }

    #[test]
    fn each_latch_has_a_series_from_the_start_and_an_unknown_one_is_no_fault() {
        let readiness = Readiness::new();
        let value = |latch: &str| {
            let text = render(SOURCE, &Snapshot::default(), &readiness);
            let series = format!("onceward_ready{{latch=\"{latch}\"}} ");
            text.lines().find_map(|line| line.strip_prefix(&series)).expect("a series").to_owned()
        };
        assert_eq!(Readiness::LATCHES.iter().map(|latch| value(latch)).collect::<String>(), "0001111");
        readiness.set(Readiness::DATABASE);
        readiness.clear(Readiness::PROVIDER, "it refuses our credentials");
        assert_eq!((value("database").as_str(), value("provider").as_str()), ("1", "0"));
    }

    #[test]
    fn what_duplicates_would_have_cost_is_exact_in_each_currency() {
        let status = Status::default();
        let mut duplicates = Duplicates::default();
        for (amount, currency) in [("0.10", "EUR"), ("0.20", "EUR"), ("500", "JPY")] {
            let currency = Currency::from_code(currency).expect("a currency");
            duplicates.add(DuplicateCause::Replay, Money::from_decimal(amount, currency).ok());
        }
        status.duplicates(&duplicates);
        let text = render(SOURCE, &status.snapshot(), &Readiness::new());
        for line in [
            "# TYPE onceward_not_charged_again_total counter\n",
            "onceward_not_charged_again_total{cause=\"replay\",currency=\"EUR\"} 0.30\n",
            "onceward_not_charged_again_total{cause=\"replay\",currency=\"JPY\"} 500\n",
        ] {
            assert!(text.contains(line), "{line}: {text}");
        }
    }

    #[test]
    fn partitions_that_nobody_has_counted_yet_are_not_none() {
        let status = Status::default();
        let shown = |status: &Status| render(SOURCE, &status.snapshot(), &Readiness::new()).contains("onceward_group_partitions");
        assert!(!shown(&status));
        status.known_partitions(0);
        assert!(shown(&status));
    }
}
