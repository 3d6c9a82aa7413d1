//! The breaker: whether the provider may be called at all.
//!
//! In: what each call was answered. Out: a call may begin, or how long to wait. It owns this one state, which the calls and whoever
//! pauses for them share; it does no I/O. If the process dies, the next one begins closed and finds out again.
//!
//! Invariant: while it is open nobody is called; when the wait is over one call probes, and until that one is answered nobody else is
//! called. Who has not failed before probes first. A failure that is one event's own (its calls fail, others are served) opens it no
//! second time.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tracing::{info, warn};
use uuid::Uuid;

use super::Answer;
use crate::metrics;

/// How long it stays open after failures; it doubles with each failed probe, up to the longest.
const WAIT: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// By how much an event that has failed before probes later: so long others may show whether the failure was its own.
const LATER: Duration = Duration::from_secs(1);
/// When to look again while a probe is on its way.
const PROBE_LOOK: Duration = Duration::from_millis(100);
/// Events that met a configuration answer and are remembered. Forgetting one costs one more opening.
const REMEMBERED: usize = 1024;

/// A shared breaker.
#[derive(Clone, Debug)]
pub struct Breaker(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    /// It opens after this many events have failed in a row.
    threshold: usize,
    position: Position,
    /// Since the last event that was served. Events, not calls: one that always fails must not stop the others.
    failed: HashSet<Uuid>,
    /// Failed probes in a row.
    failed_probes: u32,
    /// When each of these events last met a configuration answer.
    refused: HashMap<Uuid, Instant>,
    /// When the last call began that was served.
    served: Option<Instant>,
}

#[derive(Clone, Debug)]
enum Position {
    Closed,
    Open(Opened),
    /// This event's call decides.
    Probing {
        event_id: Uuid,
        opened: Opened,
    },
}

/// Why nobody is called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Opened {
    /// In words.
    pub reason: String,
    /// Since when.
    pub since: Instant,
    /// Until when nobody probes.
    pub until: Instant,
}

/// What an answer says of the provider.
enum Sign {
    /// It is there and works on charges.
    Served,
    /// Nothing that could be relied on came back.
    Failed(String),
    /// Nobody should call for so long.
    Wait(String, Duration),
}

impl Breaker {
    /// Closed; it opens after `threshold` events have failed in a row.
    #[must_use]
    pub fn new(threshold: usize) -> Self {
        Self(Arc::new(Mutex::new(State {
            threshold,
            position: Position::Closed,
            failed: HashSet::new(),
            failed_probes: 0,
            refused: HashMap::new(),
            served: None,
        })))
    }

    /// How long nobody may be called; `None`: somebody may.
    #[must_use]
    pub fn wait(&self, now: Instant) -> Option<Duration> {
        match &self.lock().position {
            Position::Closed => None,
            Position::Open(opened) => opened.until.checked_duration_since(now).filter(|wait| !wait.is_zero()),
            Position::Probing { .. } => Some(PROBE_LOOK),
        }
    }

    /// Why nobody is called, or only a probe.
    #[must_use]
    pub fn opened(&self) -> Option<Opened> {
        match &self.lock().position {
            Position::Closed => None,
            Position::Open(opened) | Position::Probing { opened, .. } => Some(opened.clone()),
        }
    }

    /// A call for this event begins now, unless nobody may be called: then how long not. `had_unknown`: an earlier answer for it was
    /// unknown.
    ///
    /// # Errors
    /// The wait.
    pub fn begin(&self, event_id: Uuid, had_unknown: bool, now: Instant) -> Result<Begun, Duration> {
        if let Some(wait) = self.wait(now) {
            return Err(wait);
        }
        let mut state = self.lock();
        if let Position::Open(opened) = &state.position {
            let later = if had_unknown || state.has_failed(event_id) { opened.until + LATER } else { opened.until };
            if let Some(wait) = later.checked_duration_since(now).filter(|wait| !wait.is_zero()) {
                return Err(wait);
            }
            state.position = Position::Probing { event_id, opened: opened.clone() };
        }
        Ok(Begun { breaker: self.clone(), event_id, at: now, is_open: true })
    }

    /// Whether the next call is a probe for which another event would be the better one: this one has failed. `had_unknown` as in
    /// [`Self::begin`].
    #[must_use]
    pub fn prefers_another(&self, event_id: Uuid, had_unknown: bool) -> bool {
        let state = self.lock();
        matches!(state.position, Position::Open(_)) && (had_unknown || state.has_failed(event_id))
    }

    fn heard(&self, event_id: Uuid, answer: &Answer, begun: Instant, now: Instant) -> bool {
        let mut state = self.lock();
        let configuration = matches!(answer, Answer::Configuration { .. });
        let own_trouble = configuration
            && state.refused.get(&event_id).is_some_and(|refused| state.served.is_some_and(|served| served > *refused));
        let is_probe = matches!(state.position, Position::Probing { event_id: probe, .. } if probe == event_id);
        match sign(answer) {
            Sign::Served => {
                state.served = state.served.max(Some(begun));
                state.refused.remove(&event_id);
                state.failed.clear();
                if is_probe {
                    state.close();
                }
            }
            // The provider is there, and others are served: it is as good as an answer.
            _ if own_trouble => {
                state.remember(event_id, now);
                if is_probe {
                    state.close();
                }
            }
            Sign::Wait(reason, wait) => {
                if configuration {
                    state.remember(event_id, now);
                }
                state.open(reason, wait, now);
            }
            Sign::Failed(reason) => {
                state.failed.insert(event_id);
                if is_probe || matches!(state.position, Position::Closed) && state.failed.len() >= state.threshold {
                    let wait = WAIT.0.saturating_mul(1 << state.failed_probes.min(16)).min(WAIT.1);
                    state.failed_probes += 1;
                    state.open(reason, wait, now);
                }
            }
        }
        own_trouble
    }

    /// A call has ended without an answer. If it was the probe, another may follow at once.
    fn abandoned(&self, event_id: Uuid) {
        let mut state = self.lock();
        if let Position::Probing { event_id: probe, opened } = &state.position
            && *probe == event_id
        {
            state.position = Position::Open(opened.clone());
        }
    }

    /// A panic while it is locked leaves at most a wait that is too long.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A call on its way. Dropped without an answer (its task panicked or was dropped), it leaves the probe to another.
#[derive(Debug)]
pub struct Begun {
    breaker: Breaker,
    event_id: Uuid,
    at: Instant,
    is_open: bool,
}

impl Begun {
    /// Takes the call's answer. Out: `true` when a configuration answer is this event's own trouble, because another one was served
    /// since it met one before.
    pub fn heard(mut self, answer: &Answer, now: Instant) -> bool {
        self.is_open = false;
        self.breaker.heard(self.event_id, answer, self.at, now)
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        if self.is_open {
            self.breaker.abandoned(self.event_id);
        }
    }
}

impl State {
    /// Only ever for longer: a short wait does not undo a long one.
    fn open(&mut self, reason: String, wait: Duration, now: Instant) {
        let until = now + wait;
        let opened = match std::mem::replace(&mut self.position, Position::Closed) {
            Position::Closed => {
                warn!(reason, wait_ms = wait.as_millis(), "the provider is not called: the breaker is open");
                metrics::breaker_opened();
                Opened { reason, since: now, until }
            }
            Position::Open(opened) | Position::Probing { opened, .. } => {
                let reason = if until > opened.until { reason } else { opened.reason };
                Opened { reason, since: opened.since, until: until.max(opened.until) }
            }
        };
        self.position = Position::Open(opened);
        metrics::breaker(true);
    }

    fn close(&mut self) {
        info!("the provider is called again: the breaker is closed");
        self.position = Position::Closed;
        self.failed.clear();
        self.failed_probes = 0;
        metrics::breaker(false);
    }

    /// Its last call failed, and as far as is known that may be its own fault.
    fn has_failed(&self, event_id: Uuid) -> bool {
        self.failed.contains(&event_id) || self.refused.contains_key(&event_id)
    }

    fn remember(&mut self, event_id: Uuid, now: Instant) {
        if self.refused.len() >= REMEMBERED {
            self.refused.clear();
        }
        self.refused.insert(event_id, now);
    }
}

fn sign(answer: &Answer) -> Sign {
    match answer {
        Answer::Charged { .. }
        | Answer::Declined { .. }
        | Answer::Rejected { .. }
        | Answer::Mismatch { .. }
        | Answer::InProgress { .. }
        | Answer::Unknown { served: true, .. } => Sign::Served,
        Answer::Configuration { error, wait, .. } => Sign::Wait(format!("configuration: {error}"), *wait),
        Answer::TooMany { wait } => Sign::Wait("HTTP 429: too many calls".to_owned(), *wait),
        Answer::Unavailable { error, wait } => Sign::Wait(error.clone(), *wait),
        Answer::NotReached { error, .. } => Sign::Failed(format!("not reached: {error}")),
        Answer::Unknown { error, served: false, .. } => Sign::Failed(error.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// A breaker whose clock is the test's.
    struct Bench {
        breaker: Breaker,
        now: Instant,
    }

    impl Bench {
        fn new() -> Self {
            Self { breaker: Breaker::new(3), now: Instant::now() }
        }

        /// Open for a second, after the failures of 0, 1 and 2.
        fn after_three_failures() -> Self {
            let bench = Self::new();
            for event in 0..3 {
                bench.call(event, &lost());
            }
            bench
        }

        fn begin(&self, event: u128) -> Result<Begun, Duration> {
            self.breaker.begin(Uuid::from_u128(event), false, self.now)
        }

        /// One call to its end; `None` when it may not begin.
        fn call(&self, event: u128, answer: &Answer) -> Option<bool> {
            Some(self.begin(event).ok()?.heard(answer, self.now))
        }

        fn wait(&self) -> Option<Duration> {
            self.breaker.wait(self.now)
        }
    }

    fn charged() -> Answer {
        Answer::Charged { charge_id: "ch".to_owned() }
    }

    fn forbidden() -> Answer {
        Answer::Configuration { error: "HTTP 403".to_owned(), redirect: false, wait: 5 * SECOND }
    }

    fn lost() -> Answer {
        Answer::unknown("reset".to_owned())
    }

    #[test]
    fn events_that_fail_in_a_row_open_it_and_one_that_always_fails_does_not() {
        let bench = Bench::new();
        for _ in 0..10 {
            assert_eq!(bench.call(1, &lost()), Some(false));
        }
        assert_eq!(bench.call(2, &Answer::not_reached("refused".to_owned())), Some(false));
        assert_eq!(bench.wait(), None);
        bench.call(3, &charged());
        for event in 4..6 {
            bench.call(event, &lost());
        }
        assert_eq!(bench.wait(), None, "two in a row");
        bench.call(6, &lost());
        assert_eq!(bench.wait(), Some(SECOND));
        assert_eq!(bench.call(7, &charged()), None, "nobody is called");
        assert_eq!(bench.breaker.opened().unwrap().reason, "reset");
    }

    #[test]
    fn after_the_wait_one_call_probes_and_its_answer_decides() {
        let mut bench = Bench::new();
        // From before it opened.
        let mut early: Vec<Begun> = (100..107).map(|event| bench.begin(event).unwrap()).collect();
        for event in 0..3 {
            bench.call(event, &lost());
        }
        for (probe, wait) in (10..).zip([1, 2, 4, 8, 16, 30, 30]) {
            assert_eq!(bench.wait(), Some(wait * SECOND));
            bench.now += wait * SECOND;
            assert_eq!(bench.wait(), None);
            let probe = bench.begin(probe).unwrap();
            assert_eq!(bench.begin(2).unwrap_err(), PROBE_LOOK, "one");
            early.pop().unwrap().heard(&charged(), bench.now);
            assert_eq!(bench.wait(), Some(PROBE_LOOK), "only the probe decides");
            probe.heard(&lost(), bench.now);
        }
        bench.now += 30 * SECOND;
        assert_eq!(bench.call(5, &charged()), Some(false));
        assert_eq!((bench.wait(), bench.breaker.opened()), (None, None));
        for event in 0..3 {
            bench.call(event, &lost());
        }
        assert_eq!(bench.wait(), Some(SECOND), "it has begun anew");
    }

    #[test]
    fn who_has_failed_before_probes_later_so_that_another_can_show_whose_fault_it_was() {
        let mut bench = Bench::after_three_failures();
        bench.now += SECOND;
        assert!(
            bench.breaker.prefers_another(Uuid::from_u128(1), false) && !bench.breaker.prefers_another(Uuid::from_u128(3), false)
        );
        assert_eq!((bench.begin(0).unwrap_err(), bench.begin(1).unwrap_err()), (LATER, LATER));
        let retried = Uuid::from_u128(4);
        assert!(bench.breaker.prefers_another(retried, true));
        let early = bench.breaker.begin(retried, true, bench.now).unwrap_err();
        assert_eq!(early, LATER, "it failed before somebody was served in between");
        bench.call(3, &charged());
        assert_eq!((bench.wait(), bench.call(0, &lost())), (None, Some(false)), "closed: whoever comes");

        for event in 1..3 {
            bench.call(event, &lost());
        }
        bench.now += SECOND + LATER;
        assert_eq!(bench.call(0, &charged()), Some(false), "nobody else has come");
        assert_eq!(bench.wait(), None);
    }

    #[test]
    fn a_probe_that_ends_without_an_answer_leaves_its_place_to_another() {
        let mut bench = Bench::after_three_failures();
        bench.now += SECOND;
        let (other, probe) = (bench.begin(3).unwrap(), bench.begin(4));
        assert_eq!(probe.unwrap_err(), PROBE_LOOK);
        drop(other);
        assert_eq!(bench.wait(), None);
        assert_eq!(bench.call(4, &charged()), Some(false));
        assert_eq!(bench.breaker.opened(), None);
    }

    // Declined for good, after answers that were lost: the more such events there are, the longer it must not be taken for an outage.
    #[test]
    fn a_refusal_that_proves_nothing_shows_that_the_provider_is_there() {
        let bench = Bench::new();
        for event in 0..10 {
            bench.call(event, &Answer::Unknown { error: "HTTP 402".to_owned(), wait: None, served: true });
        }
        assert_eq!(bench.wait(), None);
    }

    #[test]
    fn a_provider_that_names_a_wait_gets_it_and_a_shorter_one_does_not_undo_a_longer() {
        let mut bench = Bench::new();
        let (first, second) = (bench.begin(1).unwrap(), bench.begin(2).unwrap());
        first.heard(&Answer::Unavailable { error: "HTTP 503".to_owned(), wait: 9 * SECOND }, bench.now);
        second.heard(&Answer::TooMany { wait: SECOND }, bench.now);
        assert_eq!(bench.wait(), Some(9 * SECOND));
        assert_eq!(bench.breaker.opened().unwrap().reason, "HTTP 503");
        bench.now += 9 * SECOND;
        assert_eq!(bench.call(3, &charged()), Some(false));
        assert_eq!(bench.wait(), None);
    }

    #[test]
    fn a_configuration_answer_is_everybodys_until_another_event_is_served() {
        let mut bench = Bench::new();
        assert_eq!(bench.call(1, &forbidden()), Some(false));
        assert_eq!(bench.wait(), Some(5 * SECOND));
        assert!(bench.breaker.opened().unwrap().reason.starts_with("configuration: "));
        bench.now += 5 * SECOND + LATER;
        assert!(
            bench.breaker.prefers_another(Uuid::from_u128(1), false) && !bench.breaker.prefers_another(Uuid::from_u128(2), false)
        );
        assert_eq!(bench.call(1, &forbidden()), Some(false), "still nobody else was served");
        bench.now += 5 * SECOND;
        assert_eq!(bench.call(2, &charged()), Some(false));
        assert!(!bench.breaker.prefers_another(Uuid::from_u128(1), false), "closed: in their order");
        bench.now += SECOND;
        assert_eq!(bench.call(1, &forbidden()), Some(true));
        assert_eq!(bench.wait(), None, "it is that event's alone");
        assert_eq!(bench.call(3, &forbidden()), Some(false), "another event's first one is everybody's again");
        bench.now += 5 * SECOND + LATER;
        assert_eq!(bench.call(1, &forbidden()), Some(false), "and so is the next of this one: nobody was served since the third");
    }

    #[test]
    fn a_call_that_began_before_proves_nothing() {
        let mut bench = Bench::new();
        let early = bench.begin(2).unwrap();
        bench.now += SECOND;
        bench.call(1, &forbidden());
        early.heard(&charged(), bench.now);
        assert_eq!(bench.wait(), Some(5 * SECOND), "nor does it close it");
        bench.now += 5 * SECOND + LATER;
        assert_eq!(bench.call(1, &forbidden()), Some(false));
    }
}
