//! Who makes the faults: which, when, to whom, and for how long.
//!
//! In: a seed. Out: faults, one every few seconds, and their ends. It owns the count of what was done and the list of what nobody can
//! explain.
//!
//! Invariant: the seed decides the order of the kinds, and each comes as often as every other, give or take one. One engine is left
//! running by every fault, and every fault ends by itself.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::engines::State;
use super::field::Field;
use crate::lab::process::Signal;
use crate::lab::provider_stub::{Act, Rule};
use crate::produce::draw::Draw;

/// See the head of this file.
pub struct Conductor {
    draw: Draw,
    kinds: Vec<Kind>,
    /// What is still to come before every kind has come once more.
    deck: Vec<Kind>,
    next: Instant,
    later: Vec<(Instant, Undo)>,
    faults: BTreeMap<&'static str, u64>,
    unexplained: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Kill,
    Freeze,
    Leave,
    Join,
    DatabaseRestart,
    DatabaseCrash,
    DatabaseCut,
    DatabaseSilent,
    BackendsKilled,
    CommitLost,
    CommitAnswerLost,
    ProviderBusy,
    ProviderSilent,
    ProviderResets,
}

/// How a fault ends.
#[derive(Clone, Copy, Debug)]
enum Undo {
    Start(usize),
    Thaw(usize),
    Leave(usize),
    StartServer,
    OpenWay,
}

/// Between two faults, in milliseconds.
const PAUSE: (u64, u64) = (2_000, 5_000);
/// When something that could not be undone yet is tried again.
const SOON: Duration = Duration::from_millis(200);

impl Kind {
    const ALL: [Self; 14] = [
        Self::Kill,
        Self::Freeze,
        Self::Leave,
        Self::Join,
        Self::DatabaseRestart,
        Self::DatabaseCrash,
        Self::DatabaseCut,
        Self::DatabaseSilent,
        Self::BackendsKilled,
        Self::CommitLost,
        Self::CommitAnswerLost,
        Self::ProviderBusy,
        Self::ProviderSilent,
        Self::ProviderResets,
    ];

    const fn as_str(self) -> &'static str {
        match self {
            Self::Kill => "kill",
            Self::Freeze => "freeze",
            Self::Leave => "leave",
            Self::Join => "join",
            Self::DatabaseRestart => "database_restart",
            Self::DatabaseCrash => "database_crash",
            Self::DatabaseCut => "database_cut",
            Self::DatabaseSilent => "database_silent",
            Self::BackendsKilled => "backends_killed",
            Self::CommitLost => "commit_lost",
            Self::CommitAnswerLost => "commit_answer_lost",
            Self::ProviderBusy => "provider_busy",
            Self::ProviderSilent => "provider_silent",
            Self::ProviderResets => "provider_resets",
        }
    }

    const fn needs_our_server(self) -> bool {
        matches!(self, Self::DatabaseRestart | Self::DatabaseCrash)
    }

    /// Whether it can be made now.
    fn is_possible(self, field: &Field) -> bool {
        match self {
            Self::Kill | Self::Freeze | Self::Leave => field.engines.running() >= 2,
            Self::Join => field.engines.state(field.engines.guest()) == State::Away,
            Self::DatabaseRestart | Self::DatabaseCrash | Self::DatabaseCut | Self::DatabaseSilent | Self::BackendsKilled => {
                field.server_is_up() && field.way.is_open()
            }
            Self::CommitLost | Self::CommitAnswerLost => field.way.has_lost_it(),
            Self::ProviderBusy | Self::ProviderSilent | Self::ProviderResets => true,
        }
    }
}

impl Conductor {
    /// The first fault comes after a pause.
    pub fn new(seed: u64, field: &Field) -> Self {
        let kinds = Kind::ALL.into_iter().filter(|kind| field.has_its_own_server() || !kind.needs_our_server()).collect();
        let (next, later, deck) = (Instant::now(), Vec::new(), Vec::new());
        let draw = Draw::new(seed);
        Self { draw, kinds, deck, next, later, faults: BTreeMap::new(), unexplained: Vec::new() }
    }

    /// Makes the next fault if it is time. Out: what was done, in words.
    pub fn make_a_fault(&mut self, field: &mut Field) -> Result<Option<String>> {
        if Instant::now() < self.next {
            return Ok(None);
        }
        if self.deck.is_empty() {
            self.deck = shuffled(&mut self.draw, &self.kinds);
        }
        let Some(place) = self.deck.iter().position(|kind| kind.is_possible(field)) else { return Ok(None) };
        let kind = self.deck.remove(place);
        let told = self.make(kind, field)?;
        *self.faults.entry(kind.as_str()).or_default() += 1;
        self.next = Instant::now() + between(&mut self.draw, PAUSE);
        Ok(Some(told))
    }

    /// Ends the faults whose time is over, and looks who has ended unasked: such an engine is started again.
    pub fn look_after(&mut self, field: &mut Field) -> Result<()> {
        for (index, words) in field.engines.reap()? {
            self.unexplained.push(words);
            if index != field.engines.guest() {
                self.after(Duration::from_secs(1), Undo::Start(index));
            }
        }
        let now = Instant::now();
        let (due, later): (Vec<_>, Vec<_>) = std::mem::take(&mut self.later).into_iter().partition(|(at, _)| *at <= now);
        self.later = later;
        for (_, undo) in due {
            self.undo(undo, field)?;
        }
        Ok(())
    }

    /// Ends every fault now. Whoever shares the work runs afterwards, or will when it has ended in order.
    pub fn undo_everything(&mut self, field: &mut Field) -> Result<()> {
        self.later.clear();
        self.undo(Undo::StartServer, field)?;
        self.undo(Undo::OpenWay, field)?;
        for index in field.engines.indices() {
            match field.engines.state(index) {
                State::Up => {}
                State::Frozen => self.undo(Undo::Thaw(index), field)?,
                State::Leaving | State::Away => self.undo(Undo::Start(index), field)?,
            }
        }
        Ok(())
    }

    /// Ends every engine in order.
    pub fn stop_everybody(&mut self, field: &mut Field) -> Result<()> {
        for index in field.engines.indices() {
            self.unexplained.extend(field.engines.stop(index)?);
        }
        Ok(())
    }

    /// How often each kind was made.
    pub fn faults(&self) -> BTreeMap<&'static str, u64> {
        self.faults.clone()
    }

    /// What nobody had asked for.
    pub fn unexplained(&self) -> Vec<String> {
        self.unexplained.clone()
    }

    fn make(&mut self, kind: Kind, field: &mut Field) -> Result<String> {
        let word = kind.as_str();
        match kind {
            Kind::Kill | Kind::Freeze | Kind::Leave => self.hit_an_engine(kind, field),
            Kind::Join => {
                let guest = field.engines.guest();
                field.engines.start(guest)?;
                let stays = between(&mut self.draw, (5_000, 15_000));
                self.after(stays, Undo::Leave(guest));
                Ok(format!("{word}: engine {guest}, for {} ms", stays.as_millis()))
            }
            Kind::DatabaseRestart | Kind::DatabaseCrash => {
                field.stop_server(kind == Kind::DatabaseCrash)?;
                Ok(self.lasts(word, (0, 2_000), Undo::StartServer))
            }
            Kind::DatabaseCut => {
                field.way.refuse();
                Ok(self.lasts(word, (300, 3_000), Undo::OpenWay))
            }
            Kind::DatabaseSilent => {
                field.way.fall_silent();
                Ok(self.lasts(word, (500, 4_000), Undo::OpenWay))
            }
            Kind::BackendsKilled => {
                field.kill_backends()?;
                Ok(word.to_owned())
            }
            Kind::CommitLost | Kind::CommitAnswerLost => {
                field.way.lose_the_next_commit(kind == Kind::CommitAnswerLost);
                Ok(word.to_owned())
            }
            Kind::ProviderBusy => {
                let status = if self.draw.below(2) == 0 { 429 } else { 503 };
                field.provider.script([Rule::once(Act::busy(status, "1"))]);
                Ok(format!("{word}: {status}"))
            }
            Kind::ProviderSilent => {
                field.provider.script([
                    Rule::always(Act::Silence { charge: true }).times(3),
                    Rule::always(Act::Silence { charge: false }).times(3),
                ]);
                Ok(word.to_owned())
            }
            Kind::ProviderResets => {
                field.provider.script([Rule::always(Act::Close { charge: false, reset: true }).times(20)]);
                Ok(word.to_owned())
            }
        }
    }

    fn hit_an_engine(&mut self, kind: Kind, field: &mut Field) -> Result<String> {
        let up = field.engines.up();
        let index = up[self.draw.below(up.len() as u64) as usize];
        let lasts = match kind {
            Kind::Freeze => {
                field.engines.tell(index, Signal::Stop, State::Frozen)?;
                // Shorter and longer than a session.
                let lasts = between(&mut self.draw, (1_000, 10_000));
                self.after(lasts, Undo::Thaw(index));
                lasts
            }
            _ => {
                if kind == Kind::Kill {
                    field.engines.kill(index)?;
                } else {
                    field.engines.tell(index, Signal::Term, State::Leaving)?;
                }
                let lasts = between(&mut self.draw, (0, 3_000));
                if index == field.engines.guest() {
                    // It stays away until it joins again, or nobody could join any more.
                    return Ok(format!("{}: engine {index}", kind.as_str()));
                }
                self.after(lasts, Undo::Start(index));
                lasts
            }
        };
        Ok(format!("{}: engine {index}, for {} ms", kind.as_str(), lasts.as_millis()))
    }

    fn lasts(&mut self, word: &str, range: (u64, u64), undo: Undo) -> String {
        let lasts = between(&mut self.draw, range);
        self.after(lasts, undo);
        format!("{word}: for {} ms", lasts.as_millis())
    }

    fn after(&mut self, wait: Duration, undo: Undo) {
        self.later.push((Instant::now() + wait, undo));
    }

    fn undo(&mut self, undo: Undo, field: &mut Field) -> Result<()> {
        match undo {
            Undo::Start(index) => match field.engines.state(index) {
                State::Away => field.engines.start(index)?,
                State::Leaving => self.after(SOON, undo),
                State::Up | State::Frozen => {}
            },
            Undo::Thaw(index) if field.engines.state(index) == State::Frozen => {
                field.engines.tell(index, Signal::Continue, State::Up)?;
            }
            Undo::Leave(index) => match field.engines.state(index) {
                State::Up => field.engines.tell(index, Signal::Term, State::Leaving)?,
                State::Frozen => self.after(SOON, undo),
                State::Leaving | State::Away => {}
            },
            Undo::Thaw(_) => {}
            Undo::StartServer => field.start_server()?,
            Undo::OpenWay => field.way.open(),
        }
        Ok(())
    }
}

fn between(draw: &mut Draw, (least, most): (u64, u64)) -> Duration {
    Duration::from_millis(least + draw.below(most - least + 1))
}

fn shuffled<T: Copy>(draw: &mut Draw, all: &[T]) -> Vec<T> {
    let mut shuffled = all.to_vec();
    for last in (1..shuffled.len()).rev() {
        let other = draw.below(last as u64 + 1) as usize;
        shuffled.swap(last, other);
    }
    shuffled
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seed_decides_the_order_of_the_kinds_and_each_comes_once_a_deck() {
        let deck = |seed| shuffled(&mut Draw::new(seed), &Kind::ALL);
        assert_eq!(deck(7), deck(7));
        assert_ne!(deck(7), deck(8));
        assert!(Kind::ALL.iter().all(|kind| deck(7).contains(kind)));
    }
}
