//! How long a partition stands still though it could go on.
//!
//! In: where each partition stands, look by look. Out: each long stall in words, and the longest. It owns a clock per partition.
//!
//! Invariant: a partition's clock runs only while it has work and while database, provider and one engine are there; it begins anew with
//! each step that the partition makes, and only then.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::field::Field;

/// The clocks.
#[derive(Debug, Default)]
pub struct Watch {
    partitions: BTreeMap<i32, Standing>,
    looked: Option<Look>,
    longest: Duration,
    /// Long stalls that have begun or ended since the last look.
    news: Vec<String>,
}

#[derive(Debug)]
struct Standing {
    next_offset: i64,
    stalled: Duration,
    told: bool,
}

#[derive(Clone, Copy, Debug)]
struct Look {
    at: Instant,
    could_go_on: bool,
}

/// One partition at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// How far it is settled.
    pub next_offset: i64,
    /// One past its last record.
    pub end: i64,
}

/// A stall that lasts longer is told while it lasts and when it ends, so that whoever looks at the logs knows where.
const WORTH_TELLING: Duration = Duration::from_secs(10);
/// Between two looks: each asks the broker for every partition's end.
const INTERVAL: Duration = Duration::from_millis(250);

impl Watch {
    /// Looks where the partitions stand, if it is time. Out: long stalls that have begun or ended, in words.
    pub fn look(&mut self, field: &Field) -> Result<Vec<String>> {
        let now = Instant::now();
        if self.looked.is_some_and(|look| now - look.at < INTERVAL) {
            return Ok(Vec::new());
        }
        let could_go_on = field.could_go_on();
        // A database that is away tells nothing; nobody could have gone on without it either.
        let positions = if could_go_on { field.positions()? } else { BTreeMap::new() };
        self.note(now, could_go_on, &positions);
        Ok(std::mem::take(&mut self.news))
    }

    /// Partitions that have been worked on.
    pub fn partitions(&self) -> usize {
        self.partitions.len()
    }

    /// The longest stall so far.
    pub const fn longest(&self) -> Duration {
        self.longest
    }

    fn note(&mut self, now: Instant, could_go_on: bool, positions: &BTreeMap<i32, Position>) {
        let last = self.looked.replace(Look { at: now, could_go_on });
        let passed = last.filter(|last| last.could_go_on && could_go_on).map_or(Duration::ZERO, |last| now - last.at);
        for (partition, position) in positions {
            let standing = self.partitions.entry(*partition).or_insert_with(|| Standing::at(position));
            if position.next_offset != standing.next_offset || position.next_offset >= position.end {
                if standing.told {
                    self.news.push(format!("partition {partition} moves again, after {} ms", standing.stalled.as_millis()));
                }
                *standing = Standing::at(position);
            } else {
                standing.stalled += passed;
                self.longest = self.longest.max(standing.stalled);
                if standing.stalled >= WORTH_TELLING && !standing.told {
                    standing.told = true;
                    self.news.push(format!("partition {partition} stands still"));
                }
            }
        }
    }
}

impl Standing {
    const fn at(position: &Position) -> Self {
        Self { next_offset: position.next_offset, stalled: Duration::ZERO, told: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_runs_only_while_a_partition_has_work_and_could_do_it() {
        let (start, mut watch) = (Instant::now(), Watch::default());
        let mut note = |seconds, could_go_on, next_offset, end| {
            let positions = if could_go_on { BTreeMap::from([(0, Position { next_offset, end })]) } else { BTreeMap::new() };
            watch.note(start + Duration::from_secs(seconds), could_go_on, &positions);
            watch.longest().as_secs()
        };
        assert_eq!(note(0, true, 5, 9), 0);
        assert_eq!(note(2, true, 5, 9), 2, "it has work and does nothing");
        assert_eq!(note(5, false, 0, 0), 2, "the database is away");
        assert_eq!(note(9, true, 5, 9), 2, "it has only just come back");
        assert_eq!(note(10, true, 5, 9), 3);
        assert_eq!(note(11, true, 9, 9), 3, "a step");
        assert_eq!(note(60, true, 9, 9), 3, "no work");
        assert_eq!(note(64, true, 9, 12), 4, "work that may have come right after the last look");
    }
}
