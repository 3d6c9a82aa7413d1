//! When not to poll, and whom to pause: decisions about back-pressure, without I/O.
//!
//! In: how much each partition holds of the buffer, and how much it has let go of. Out: whether to poll, whom to pause, whom to resume.
//! It owns the list of the paused. Not polling is the cheap answer, for a partition that is only busy; `pause` throws away what
//! librdkafka has fetched, so it is for one that does not move.
//!
//! Invariant: a partition that does not move holds up the others for [`STALL`] at most, and the group sees a poll at least that often.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How long nothing is polled before those that do not move are paused.
pub const STALL: Duration = Duration::from_secs(2);
/// What the others have of the buffer at least, as a part of it, however much the paused ones hold.
const AT_LEAST: usize = 16;

/// What is seen of one assigned partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The partition.
    pub partition: i32,
    /// What its records hold of the buffer, in bytes.
    pub held: usize,
    /// What its records have ever let go of, in bytes.
    pub released: usize,
    /// Its actor takes no more.
    pub refuses: bool,
}

/// What to do now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Orders {
    /// Whether to poll.
    pub poll: bool,
    /// Partitions to pause.
    pub pause: Vec<i32>,
    /// Partitions to resume.
    pub resume: Vec<i32>,
}

/// The decision's memory.
#[derive(Debug)]
pub struct Pressure {
    limit: usize,
    state: State,
    /// The paused partitions, with what they held then.
    paused: BTreeMap<i32, usize>,
}

#[derive(Debug)]
enum State {
    Flowing,
    /// Since then, and what each partition had let go of by then.
    NotPolling(Instant, BTreeMap<i32, usize>),
}

impl Pressure {
    /// For a buffer of so many bytes.
    #[must_use]
    pub const fn new(limit: usize) -> Self {
        Self { limit, state: State::Flowing, paused: BTreeMap::new() }
    }

    /// Whether the partition is paused.
    #[must_use]
    pub fn has_paused(&self, partition: i32) -> bool {
        self.paused.contains_key(&partition)
    }

    /// The partition goes away, or is positioned anew: it is not paused any more, which is for the caller to do.
    pub fn forget(&mut self, partition: i32) {
        self.paused.remove(&partition);
    }

    /// What to do now.
    pub fn decide(&mut self, seen: &[Seen], now: Instant) -> Orders {
        let drained = |seen: &&Seen| self.paused.get(&seen.partition).is_some_and(|held| seen.held <= held / 2 && !seen.refuses);
        let resume: Vec<i32> = seen.iter().filter(drained).map(|seen| seen.partition).collect();
        resume.iter().for_each(|partition| self.forget(*partition));

        let room = self.room(seen);
        let flowing: Vec<&Seen> = seen.iter().filter(|seen| !self.has_paused(seen.partition)).collect();
        let blocked = flowing.iter().any(|seen| seen.refuses || seen.held >= room.share) || room.used >= room.limit;
        let may_go_on = !flowing.iter().any(|seen| seen.refuses) && room.used < room.limit / 2;
        let (poll, pause) = match &self.state {
            State::Flowing if !blocked => (true, Vec::new()),
            State::Flowing => {
                self.state = State::NotPolling(now, released(seen));
                (false, Vec::new())
            }
            State::NotPolling(..) if may_go_on => {
                self.state = State::Flowing;
                (true, Vec::new())
            }
            State::NotPolling(since, _) if now.duration_since(*since) < STALL => (false, Vec::new()),
            State::NotPolling(_, before) => {
                let moves = |seen: &Seen| before.get(&seen.partition).is_none_or(|before| seen.released > *before);
                let stuck: Vec<&Seen> =
                    flowing.iter().copied().filter(|seen| (seen.held > 0 || seen.refuses) && !moves(seen)).collect();
                // All are slow and none is stuck: all are paused, so that polling goes on.
                let pause = if stuck.is_empty() { flowing } else { stuck };
                self.paused.extend(pause.iter().map(|seen| (seen.partition, seen.held)));
                self.state = State::Flowing;
                (true, pause.into_iter().map(|seen| seen.partition).collect())
            }
        };
        Orders { poll, pause, resume }
    }

    /// What is left for those that are not paused. One of several may hold half of it, so that there is always some for the others.
    fn room(&self, seen: &[Seen]) -> Room {
        let reserved: usize = seen.iter().filter(|seen| self.has_paused(seen.partition)).map(|seen| seen.held).sum();
        let limit = self.limit.saturating_sub(reserved).max(self.limit / AT_LEAST);
        let used = seen.iter().map(|seen| seen.held).sum::<usize>() - reserved;
        Room { limit, used, share: if seen.len() > 1 { limit / 2 } else { limit } }
    }
}

struct Room {
    limit: usize,
    used: usize,
    share: usize,
}

fn released(seen: &[Seen]) -> BTreeMap<i32, usize> {
    seen.iter().map(|seen| (seen.partition, seen.released)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: usize = 1_600;

    fn seen(partition: i32, held: usize, released: usize) -> Seen {
        Seen { partition, held, released, refuses: false }
    }

    fn orders(poll: bool, pause: &[i32], resume: &[i32]) -> Orders {
        Orders { poll, pause: pause.to_vec(), resume: resume.to_vec() }
    }

    #[test]
    fn a_full_buffer_is_waited_for_and_nobody_is_paused_who_moves() {
        let (mut pressure, start) = (Pressure::new(LIMIT), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!(pressure.decide(&[seen(0, 700, 0), seen(1, 700, 0)], at(0)), orders(true, &[], &[]));
        assert_eq!(pressure.decide(&[seen(0, 790, 0), seen(1, 810, 0)], at(10)), orders(false, &[], &[]));
        assert_eq!(
            pressure.decide(&[seen(0, 600, 190), seen(1, 400, 410)], at(20)),
            orders(false, &[], &[]),
            "more than half full"
        );
        assert_eq!(pressure.decide(&[seen(0, 390, 400), seen(1, 400, 410)], at(30)), orders(true, &[], &[]));
    }

    #[test]
    fn the_one_that_does_not_move_is_paused_alone_and_the_others_have_the_rest() {
        let (mut pressure, start) = (Pressure::new(LIMIT), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!(
            pressure.decide(&[seen(0, 800, 0), seen(1, 100, 0)], at(0)),
            orders(false, &[], &[]),
            "half of all is its share"
        );
        assert_eq!(pressure.decide(&[seen(0, 800, 0), seen(1, 0, 100)], at(1_999)), orders(false, &[], &[]));
        assert_eq!(pressure.decide(&[seen(0, 800, 0), seen(1, 0, 100)], at(2_000)), orders(true, &[0], &[]));
        assert_eq!(pressure.decide(&[seen(0, 800, 0), seen(1, 399, 100)], at(2_010)), orders(true, &[], &[]));
        assert_eq!(pressure.decide(&[seen(0, 800, 0), seen(1, 401, 100)], at(2_020)), orders(false, &[], &[]), "half of the rest");
        assert_eq!(pressure.decide(&[seen(0, 800, 0), seen(1, 200, 301)], at(2_030)), orders(true, &[], &[]));
        assert_eq!(pressure.decide(&[seen(0, 401, 399), seen(1, 0, 501)], at(3_000)), orders(true, &[], &[]));
        assert_eq!(
            pressure.decide(&[seen(0, 400, 400), seen(1, 0, 501)], at(3_010)),
            orders(true, &[], &[0]),
            "half of it is settled"
        );
    }

    #[test]
    fn the_second_and_third_that_are_stuck_leave_room_too() {
        let (mut pressure, start) = (Pressure::new(LIMIT), Instant::now());
        let mut held = [0; 4];
        let mut now = start;
        for stuck in 0..3 {
            for _ in 0..1_000 {
                now += Duration::from_millis(10);
                let all: Vec<Seen> = (0..4)
                    .map(|p| seen(p, held[p as usize], if p == 3 { now.elapsed().subsec_nanos() as usize } else { 0 }))
                    .collect();
                let orders = pressure.decide(&all, now);
                if orders.pause.contains(&(stuck as i32)) {
                    break;
                }
                held[stuck] += if orders.poll { 50 } else { 0 };
            }
            assert!(pressure.has_paused(stuck as i32), "{held:?}");
        }
        assert!(held.iter().sum::<usize>() < LIMIT, "{held:?}");
        let all: Vec<Seen> = (0..4).map(|p| seen(p, held[p as usize], 0)).collect();
        assert!(pressure.decide(&all, now).poll, "the fourth is read");
    }

    #[test]
    fn when_all_stand_still_all_are_paused_and_polling_goes_on() {
        let (mut pressure, start) = (Pressure::new(LIMIT), Instant::now());
        let all = [seen(0, 799, 0), seen(1, 801, 0), seen(2, 0, 0)];
        assert!(!pressure.decide(&all, start).poll);
        assert_eq!(pressure.decide(&all, start + STALL), orders(true, &[0, 1], &[]));
        assert!(pressure.decide(&all, start + 2 * STALL).poll, "the empty one may have a little");
        let drained = [seen(0, 300, 499), seen(1, 801, 0), seen(2, 0, 0)];
        assert_eq!(pressure.decide(&drained, start + 3 * STALL), orders(true, &[], &[0]));
    }

    #[test]
    fn slow_ones_that_all_move_are_paused_together_so_that_the_group_sees_a_poll() {
        let (mut pressure, start) = (Pressure::new(LIMIT), Instant::now());
        assert!(!pressure.decide(&[seen(0, 1_600, 0)], start).poll);
        assert_eq!(pressure.decide(&[seen(0, 1_500, 100)], start + STALL), orders(true, &[0], &[]));
        assert_eq!(pressure.decide(&[seen(0, 750, 850)], start + 2 * STALL), orders(true, &[], &[0]));
    }

    #[test]
    fn one_partition_alone_has_the_whole_buffer() {
        let mut pressure = Pressure::new(LIMIT);
        assert!(pressure.decide(&[seen(0, 1_599, 0)], Instant::now()).poll);
        assert!(!pressure.decide(&[seen(0, 1_600, 0)], Instant::now()).poll);
    }

    // CASES C04
    #[test]
    fn an_actor_that_takes_no_more_is_waited_for_and_then_paused() {
        let (mut pressure, start) = (Pressure::new(LIMIT), Instant::now());
        let refuses = [Seen { refuses: true, ..seen(0, 10, 0) }, seen(1, 10, 0)];
        assert!(!pressure.decide(&refuses, start).poll);
        let other_moves = [refuses[0], seen(1, 0, 10)];
        assert_eq!(pressure.decide(&other_moves, start + STALL), orders(true, &[0], &[]));
        assert_eq!(pressure.decide(&[seen(0, 5, 5), seen(1, 0, 10)], start + STALL), orders(true, &[], &[0]));
    }
}
