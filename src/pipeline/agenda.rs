//! What a partition does next: its held events that can run, or its window. A plain state machine without I/O.
//!
//! In: what is open of its held events, the time, what operators and the downstream asked for. Out: the kind of the next batch. It owns
//! nothing that matters: all of it is read again after every bump.
//!
//! Invariant: what waited behind a head that is settled runs before the next records of the window, and a partition with too many open
//! held events reads on only when there are fewer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::store::held_turns::OpenHeld;

/// The state.
#[derive(Debug)]
pub struct Agenda {
    held: Arc<OpenHeld>,
    max_open: usize,
    due: Option<Instant>,
    not_before: Option<Instant>,
    /// The kind of the last batch.
    last: Next,
    requested: bool,
    /// Requests were carried out: what they queued can run, also in a partition that is stopped.
    serve: bool,
    stopped: bool,
    /// An operator wants nothing to begin.
    paused: bool,
}

/// The next batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// What operators ask for is carried out.
    Requests,
    /// Held events.
    Held {
        /// Only those that operators asked for.
        requested_only: bool,
    },
    /// The first records of the window.
    Window,
    /// Nothing before this is over.
    Wait(Duration),
    /// Nothing until something changes.
    Nothing,
}

impl Agenda {
    /// With nothing known yet.
    #[must_use]
    pub fn new(max_open: usize) -> Self {
        Self {
            held: Arc::default(),
            max_open,
            due: None,
            not_before: None,
            last: Next::Nothing,
            requested: false,
            serve: false,
            stopped: false,
            paused: false,
        }
    }

    /// Takes in what is open now.
    pub fn know(&mut self, held: OpenHeld, now: Instant) {
        self.due = held.next_due.map(|wait| now + wait);
        self.held = Arc::new(held);
    }

    /// What is open, for the batch that runs.
    #[must_use]
    pub fn held(&self) -> Arc<OpenHeld> {
        Arc::clone(&self.held)
    }

    /// What to do next.
    #[must_use]
    pub fn next(&self, window_is_empty: bool, now: Instant) -> Next {
        // Nobody is called for it, so it waits for nobody.
        if self.requested {
            return Next::Requests;
        }
        if self.paused {
            return Next::Nothing; // what requests have queued runs when it goes on
        }
        if self.stopped {
            return if self.serve { Next::Held { requested_only: true } } else { Next::Nothing };
        }
        if let Some(not_before) = self.not_before.filter(|not_before| *not_before > now) {
            return Next::Wait(not_before - now);
        }
        let has_window = !window_is_empty && self.too_many().is_none();
        let is_due = self.due.is_some_and(|due| due <= now);
        // Held events that are due and the window take turns, so that neither starves. A turn that has come goes before both.
        let held_last = matches!(self.last, Next::Held { .. });
        if self.held.has_turn || is_due && !(held_last && has_window) {
            return Next::Held { requested_only: false };
        }
        match self.due {
            _ if has_window => Next::Window,
            Some(due) => Next::Wait(due.saturating_duration_since(now)),
            None => Next::Nothing,
        }
    }

    /// A batch of this kind has begun.
    pub const fn begun(&mut self, batch: Next) {
        self.last = batch;
    }

    /// The batch of held events runs again at once, in smaller parts.
    pub const fn again(&mut self) {
        self.last = Next::Nothing;
    }

    /// A batch has committed; the downstream may have asked to wait.
    pub fn settled(&mut self, wait: Option<Duration>, now: Instant) {
        match self.last {
            Next::Requests => (self.requested, self.serve) = (false, true),
            Next::Held { .. } => self.serve = false,
            Next::Window | Next::Wait(_) | Next::Nothing => {}
        }
        if self.last != Next::Requests {
            self.not_before = wait.map(|wait| now + wait);
        }
    }

    /// Operators ask for something.
    pub const fn request(&mut self) {
        self.requested = true;
    }

    /// Requests are carried out, and nothing runs, not even what they queue.
    pub const fn pause(&mut self) {
        self.paused = true;
    }

    /// From now on only what operators ask for is done.
    pub const fn stop(&mut self) {
        self.stopped = true;
    }

    /// Whether only what operators ask for is done.
    #[must_use]
    pub const fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// Why nothing more of the window is applied: too many held events are open.
    #[must_use]
    pub fn too_many(&self) -> Option<String> {
        let (count, most) = (self.held.count, self.max_open);
        (count > most)
            .then(|| format!("{count} held events are open, more than held.max_open ({most}): `onceward held list` shows them"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HELD: Next = Next::Held { requested_only: false };

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn knowing(held: OpenHeld, max_open: usize, now: Instant) -> Agenda {
        let mut agenda = Agenda::new(max_open);
        agenda.know(held, now);
        agenda
    }

    fn due_in(wait: u64) -> OpenHeld {
        OpenHeld { count: 1, next_due: Some(seconds(wait)), ..OpenHeld::default() }
    }

    #[test]
    fn what_is_due_and_the_window_take_turns() {
        let now = Instant::now();
        let mut agenda = knowing(due_in(0), 9, now);
        assert_eq!(agenda.next(false, now), HELD);
        agenda.begun(HELD);
        agenda.know(due_in(0), now);
        assert_eq!(agenda.next(false, now), Next::Window);
        assert_eq!(agenda.next(true, now), HELD, "nobody else has a turn");
        agenda.begun(Next::Window);
        assert_eq!(agenda.next(false, now), HELD);
    }

    #[test]
    fn a_turn_that_has_come_goes_before_the_window_however_often() {
        let now = Instant::now();
        let mut agenda = knowing(OpenHeld { has_turn: true, ..due_in(60) }, 9, now);
        agenda.begun(HELD);
        assert_eq!(agenda.next(false, now), HELD);
    }

    #[test]
    fn what_is_not_due_is_waited_for_only_when_there_is_nothing_else() {
        let now = Instant::now();
        let agenda = knowing(due_in(5), 9, now);
        assert_eq!(agenda.next(false, now), Next::Window);
        assert_eq!(agenda.next(true, now), Next::Wait(seconds(5)));
        assert_eq!(agenda.next(true, now + seconds(5)), HELD);
        assert_eq!(knowing(OpenHeld::default(), 9, now).next(true, now), Next::Nothing);
    }

    #[test]
    fn too_many_open_events_stop_the_window_and_nothing_else() {
        let now = Instant::now();
        let mut agenda = knowing(OpenHeld { count: 4, ..due_in(5) }, 3, now);
        assert!(agenda.too_many().is_some());
        assert_eq!(agenda.next(false, now), Next::Wait(seconds(5)));
        assert_eq!(agenda.next(false, now + seconds(5)), HELD);
        agenda.know(OpenHeld { count: 3, ..due_in(5) }, now);
        assert_eq!(agenda.next(false, now), Next::Window);
    }

    #[test]
    fn a_request_waits_for_nobody_and_is_kept_until_its_batch_has_committed() {
        let now = Instant::now();
        let mut agenda = knowing(due_in(60), 9, now);
        agenda.begun(Next::Window);
        agenda.settled(Some(seconds(300)), now);
        assert_eq!(agenda.next(false, now), Next::Wait(seconds(300)));
        agenda.begun(Next::Window);
        agenda.request();
        agenda.settled(Some(seconds(300)), now);
        assert_eq!(agenda.next(false, now), Next::Requests, "what has committed was the window's batch");
        agenda.begun(Next::Requests);
        agenda.settled(None, now);
        assert_eq!(agenda.next(false, now), Next::Wait(seconds(300)), "what it has queued waits like all others");
    }

    #[test]
    fn a_paused_partition_carries_requests_out_and_runs_nothing() {
        let now = Instant::now();
        let mut agenda = knowing(OpenHeld { has_turn: true, ..due_in(0) }, 9, now);
        agenda.pause();
        assert_eq!(agenda.next(false, now), Next::Nothing);
        agenda.request();
        assert_eq!(agenda.next(false, now), Next::Requests);
        agenda.begun(Next::Requests);
        agenda.settled(None, now);
        assert_eq!(agenda.next(false, now), Next::Nothing, "what is queued waits until it goes on");
    }

    #[test]
    fn a_stopped_partition_does_what_operators_ask_for_and_nothing_else() {
        let now = Instant::now();
        let mut agenda = knowing(OpenHeld { has_turn: true, ..due_in(0) }, 9, now);
        agenda.stop();
        assert_eq!(agenda.next(false, now), Next::Nothing);
        agenda.request();
        assert_eq!(agenda.next(false, now), Next::Requests);
        agenda.begun(Next::Requests);
        agenda.settled(None, now);
        let asked_for = Next::Held { requested_only: true };
        assert_eq!(agenda.next(false, now), asked_for);
        agenda.begun(asked_for);
        agenda.settled(None, now);
        assert_eq!(agenda.next(false, now), Next::Nothing, "once: the rest stands where it stood");
    }
}
