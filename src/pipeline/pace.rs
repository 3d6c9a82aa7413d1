//! How long batches take, against what a drain allows.
//!
//! In: the time of each batch. Out: a warning before a rebalance begins to leave batches behind. It owns the last few hundred times. If
//! it is wrong, nobody is warned; a batch that a drain does not wait for is the next owner's all the same.
//!
//! Invariant: one warning in ten minutes.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tracing::warn;

use crate::metrics;

/// How many batches are looked at.
const RECENT: usize = 256;
/// How often they are.
const EVERY: usize = 64;
/// How long a warning holds.
const QUIET: Duration = Duration::from_secs(600);

/// The times of the last batches.
#[derive(Debug)]
pub struct Pace {
    drain: Duration,
    recent: Mutex<Recent>,
}

#[derive(Debug, Default)]
struct Recent {
    times: VecDeque<Duration>,
    seen: usize,
    warned: Option<Instant>,
}

impl Pace {
    /// Against so long a drain.
    #[must_use]
    pub fn new(drain: Duration) -> Self {
        Self { drain, recent: Mutex::default() }
    }

    /// A batch has taken so long.
    pub fn took(&self, time: Duration) {
        if self.is_near(time) {
            metrics::near_drain();
        }
        if let Some(p99) = self.look(time, Instant::now()) {
            warn!(
                p99_ms = p99.as_millis(),
                drain_ms = self.drain.as_millis(),
                "batches take nearly as long as pipeline.drain_ms: soon a rebalance will not wait for them, and their events come twice"
            );
        }
    }

    /// Four fifths of it leave little for what comes on top.
    fn is_near(&self, time: Duration) -> bool {
        time * 5 >= self.drain * 4
    }

    /// The time that all but one in a hundred stay below, when it is worth a warning.
    fn look(&self, time: Duration, now: Instant) -> Option<Duration> {
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        recent.times.push_back(time);
        if recent.times.len() > RECENT {
            recent.times.pop_front();
        }
        recent.seen += 1;
        let is_quiet = recent.warned.is_some_and(|warned| now.duration_since(warned) < QUIET);
        if !recent.seen.is_multiple_of(EVERY) || is_quiet {
            return None;
        }
        let mut sorted: Vec<Duration> = recent.times.iter().copied().collect();
        sorted.sort_unstable();
        let p99 = sorted[sorted.len() * 99 / 100];
        if !self.is_near(p99) {
            return None;
        }
        recent.warned = Some(now);
        Some(p99)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    fn warnings(pace: &Pace, times: impl Iterator<Item = Duration>, now: Instant) -> Vec<Duration> {
        times.filter_map(|time| pace.look(time, now)).collect()
    }

    #[test]
    fn batches_that_come_near_the_drain_are_told_of_once_in_ten_minutes() {
        let (pace, start) = (Pace::new(MS(1_000)), Instant::now());
        assert!(warnings(&pace, std::iter::repeat_n(MS(790), 256), start).is_empty());
        let slow = || std::iter::repeat_n(MS(10), 252).chain(std::iter::repeat_n(MS(810), 4));
        assert_eq!(warnings(&pace, slow(), start), [MS(810)]);
        assert!(warnings(&pace, slow(), start + QUIET / 2).is_empty());
        assert_eq!(warnings(&pace, slow(), start + QUIET), [MS(810)]);
    }

    #[test]
    fn one_slow_batch_among_hundreds_is_no_news() {
        let pace = Pace::new(MS(1_000));
        let one = std::iter::repeat_n(MS(10), 300).chain([MS(5_000)]).chain(std::iter::repeat_n(MS(10), 100));
        assert!(warnings(&pace, one, Instant::now()).is_empty());
    }
}
