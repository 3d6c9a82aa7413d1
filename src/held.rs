//! When a failed event is tried again, and what a person may ask for instead: pure decisions.
//!
//! Invariant: an event is either tried again at a known time or waits for a person; both bounds are finite. An unknown outcome is
//! resolved, never discarded.

pub mod shown;

use std::time::Duration;

use crate::handler::HeldReason;
use crate::store::held_events::HeldState;

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

/// What an operator asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// Try it again now.
    Replay,
    /// Give it up for good.
    Discard,
    /// It was charged, under this name of the provider's: write that down and ask nobody.
    Charged(String),
    /// It was not charged: ask as if nobody had.
    NotCharged,
}

impl Request {
    const CHARGED: &str = "charged:";

    /// The word in `held_event.wanted`.
    #[must_use]
    pub fn word(&self) -> String {
        match self {
            Self::Replay => "replay".to_owned(),
            Self::Discard => "discard".to_owned(),
            Self::Charged(charge) => format!("{}{charge}", Self::CHARGED),
            Self::NotCharged => "not_charged".to_owned(),
        }
    }

    /// The request of a stored word.
    #[must_use]
    pub fn from_word(word: &str) -> Option<Self> {
        match word {
            "replay" => Some(Self::Replay),
            "discard" => Some(Self::Discard),
            "not_charged" => Some(Self::NotCharged),
            _ => {
                word.strip_prefix(Self::CHARGED).filter(|charge| !charge.is_empty()).map(|charge| Self::Charged(charge.to_owned()))
            }
        }
    }

    /// Whether it can be asked of an event in this state, held for this reason.
    ///
    /// # Errors
    /// Why not, in words.
    pub const fn permitted(&self, state: HeldState, reason: HeldReason) -> Result<(), &'static str> {
        match (state, self) {
            (HeldState::Applied, _) => return Err("it is applied"),
            (HeldState::Discarded, _) => return Err("it is discarded"),
            (HeldState::Queued, _) => return Err("an earlier request was accepted: it runs as soon as it can"),
            (HeldState::Waiting, Self::Replay | Self::Charged(_) | Self::NotCharged) => {
                return Err("it waits for an earlier event of its key");
            }
            (HeldState::Waiting, Self::Discard) | (HeldState::Retrying | HeldState::Parked, _) => {}
        }
        match (self, reason) {
            (Self::Replay, HeldReason::Conflict) => Err("a conflict can only be discarded"),
            (Self::Replay, HeldReason::Gap) => {
                Err("the log had lost these records before they were read: it can only be discarded")
            }
            (Self::Discard, HeldReason::Unknown) => Err("nobody knows whether it was charged: it is resolved, never discarded"),
            (Self::Discard, HeldReason::ChargedNotRecorded) => Err("it was charged: a replay writes its row and asks nobody"),
            (Self::Charged(_) | Self::NotCharged, HeldReason::Unknown) | (Self::Replay | Self::Discard, _) => Ok(()),
            (Self::Charged(_) | Self::NotCharged, _) => Err("its outcome is not unknown: there is nothing to resolve"),
        }
    }
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
    fn the_words_of_a_request_are_those_that_are_read_back() {
        for request in [Request::Replay, Request::Discard, Request::Charged("ch:1 x".to_owned()), Request::NotCharged] {
            assert_eq!(Request::from_word(&request.word()), Some(request));
        }
        for wrong in ["", "charged", "charged:", "Replay", "replay "] {
            assert_eq!(Request::from_word(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn an_unknown_outcome_is_resolved_and_never_discarded_and_what_is_settled_stays_so() {
        let requests = [Request::Replay, Request::Discard, Request::Charged("ch_1".to_owned()), Request::NotCharged];
        for (state, reason) in HeldState::ALL.into_iter().flat_map(|state| HeldReason::ALL.map(|reason| (state, reason))) {
            let [replay, discard, charged, not_charged] =
                requests.each_ref().map(|request| request.permitted(state, reason).is_ok());
            let tried = matches!(state, HeldState::Parked | HeldState::Retrying);
            let has_an_event = !matches!(reason, HeldReason::Conflict | HeldReason::Gap);
            assert_eq!(replay, tried && has_an_event, "{state:?} {reason:?}");
            assert_eq!(charged, tried && reason == HeldReason::Unknown, "{state:?} {reason:?}");
            assert_eq!(charged, not_charged);
            let happened = matches!(reason, HeldReason::Unknown | HeldReason::ChargedNotRecorded);
            assert_eq!(discard, (tried || state == HeldState::Waiting) && !happened, "{state:?} {reason:?}");
        }
    }

    #[test]
    fn a_longer_wait_of_the_downstream_is_honoured_and_no_number_overflows() {
        assert_eq!(POLICY.after(1, Duration::ZERO, Some(Duration::from_secs(9))), Next::Again(Duration::from_secs(9)));
        let endless = RetryPolicy { max_attempts: u32::MAX, ..POLICY };
        assert_eq!(endless.after(u32::MAX - 1, Duration::ZERO, None), Next::Again(Duration::from_secs(3)));
    }
}
