//! When a failed event is tried again: pure arithmetic over attempts and time.
//!
//! Invariant: an event is either tried again at a known time or waits for a person; both bounds are finite.

use std::time::Duration;

/// Bounds of the automatic retries.
#[derive(Clone, Copy, Debug)]
pub struct RetryPolicy {
    /// Attempts, the first included.
    pub max_attempts: u32,
    /// Time since the first attempt.
    pub max_age: Duration,
    /// The wait after the first attempt; it doubles with each further one.
    pub backoff_min: Duration,
    /// The longest wait.
    pub backoff_max: Duration,
}

/// What comes after a failed attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Try again, not before this.
    Again(Duration),
    /// The bounds are reached: a person decides.
    Park,
}

impl RetryPolicy {
    /// Decides after `attempts` attempts, the last just failed, `age` after the first; `wait` is what the downstream asked for.
    #[must_use]
    pub fn after(&self, attempts: u32, age: Duration, wait: Option<Duration>) -> Next {
        if attempts >= self.max_attempts || age >= self.max_age {
            return Next::Park;
        }
        let doubled = self.backoff_min.saturating_mul(1 << attempts.saturating_sub(1).min(30));
        Next::Again(doubled.min(self.backoff_max).max(wait.unwrap_or_default()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: RetryPolicy = RetryPolicy {
        max_attempts: 4,
        max_age: Duration::from_secs(100),
        backoff_min: Duration::from_secs(1),
        backoff_max: Duration::from_secs(3),
    };

    #[test]
    fn waits_double_up_to_the_longest_and_end() {
        let waits: Vec<Next> = (1..=4).map(|attempts| POLICY.after(attempts, Duration::ZERO, None)).collect();
        let again = |seconds| Next::Again(Duration::from_secs(seconds));
        assert_eq!(waits, [again(1), again(2), again(3), Next::Park]);
        assert_eq!(POLICY.after(1, Duration::from_secs(100), None), Next::Park);
    }

    #[test]
    fn a_longer_wait_of_the_downstream_is_honoured_and_no_number_overflows() {
        assert_eq!(POLICY.after(1, Duration::ZERO, Some(Duration::from_secs(9))), Next::Again(Duration::from_secs(9)));
        let endless = RetryPolicy { max_attempts: u32::MAX, ..POLICY };
        assert_eq!(endless.after(u32::MAX - 1, Duration::ZERO, None), Next::Again(Duration::from_secs(3)));
    }
}
