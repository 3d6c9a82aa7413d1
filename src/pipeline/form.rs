//! How a partition's next batch claims its events: plainly while they are new, after a look at which are there where some are not, and with
//! `ON CONFLICT` where neither has paid or a key must be named.
//!
//! In: how its batches have ended. Out: the way of the next one. It owns a purse: what a batch saves fills it, a miss empties it. If it is
//! wrong, a batch runs twice, which costs time and nothing else.
//!
//! Invariant: what misses cost was earned before, but for one miss in `MISS` other batches. So whatever comes, and in whatever order, the
//! engine is not slower by more than two hundredths. And one batch in `ASSURE` names the key: the database refuses it when there is no such
//! key any more, which a plain `INSERT` would never notice.

use std::sync::{Arc, Mutex, PoisonError};

use crate::store::Form;

/// What an optimistic batch earns: it takes two thirds of the other form's time.
const HIT: u32 = 32;
/// What a batch earns that has looked first: at worst, with nothing but new events, it takes five sixths of that time.
const LOOKED: u32 = 16;
/// What a miss costs: at worst the whole of a batch that has looked first. The other form's batches bring one coin each.
const MISS: u32 = 80;
/// What is saved at most: so many misses in a row are forgiven after a good time.
const FULL: u32 = 8 * MISS;
/// So many batches of new events in a row make the next one optimistic: what a look saves when there is a duplicate is worth several looks.
const CLEAN: u32 = 4;
/// So many batches at most come in a row that do not name the key, and one that does.
const ASSURE: u32 = 128;

/// How a batch claims its events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claiming {
    /// All of them by plain `INSERT`s: none is there.
    Optimistic,
    /// By plain `INSERT`s those that a look has not found.
    LookFirst,
    /// With `ON CONFLICT DO NOTHING`, and a look at those that were taken.
    OnConflict,
}

impl Claiming {
    /// How its rows go in.
    #[must_use]
    pub const fn form(self) -> Form {
        match self {
            Self::Optimistic | Self::LookFirst => Form::Optimistic,
            Self::OnConflict => Form::OnConflict,
        }
    }
}

/// How one partition's batches claim; its clones share the purse.
#[derive(Clone, Debug, Default)]
pub struct Forms(Arc<Mutex<Purse>>);

#[derive(Debug)]
struct Purse {
    coins: u32,
    /// Batches in a row that had nothing but new events.
    clean: u32,
    /// Batches since one named the key.
    unnamed: u32,
}

impl Default for Purse {
    /// One miss is free. The first batch names the key, and tells whether to be optimistic.
    fn default() -> Self {
        Self { coins: MISS, clean: CLEAN - 1, unnamed: ASSURE }
    }
}

impl Forms {
    /// Of the next batch.
    #[must_use]
    pub fn next(&self) -> Claiming {
        pinned().unwrap_or_else(|| self.with(|purse| purse.next()))
    }

    /// A batch with events to claim has committed in this way. `all_new`: none of them was taken.
    pub fn committed(&self, claiming: Claiming, all_new: bool) {
        self.with(|purse| purse.committed(claiming, all_new));
    }

    /// A plain `INSERT` has met a taken key.
    pub fn missed(&self) {
        self.with(Purse::missed);
    }

    /// Nothing that is done under the lock can panic half way.
    fn with<T>(&self, act: impl FnOnce(&mut Purse) -> T) -> T {
        act(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Purse {
    const fn next(&self) -> Claiming {
        if self.coins < MISS || self.unnamed >= ASSURE {
            Claiming::OnConflict
        } else if self.clean >= CLEAN {
            Claiming::Optimistic
        } else {
            Claiming::LookFirst
        }
    }

    fn committed(&mut self, claiming: Claiming, all_new: bool) {
        let (earned, unnamed) = match claiming {
            Claiming::Optimistic => (HIT, self.unnamed + 1),
            Claiming::LookFirst => (LOOKED, self.unnamed + 1),
            Claiming::OnConflict => (1, 0),
        };
        self.coins = (self.coins + earned).min(FULL);
        self.clean = if all_new { self.clean.saturating_add(1) } else { 0 };
        self.unnamed = unnamed;
    }

    fn missed(&mut self) {
        self.coins = self.coins.saturating_sub(MISS);
        self.clean = 0;
    }
}

#[cfg(not(feature = "lab"))]
const fn pinned() -> Option<Claiming> {
    None
}

/// For tests: each way must keep every promise by itself. A miss is followed by `ON CONFLICT` all the same.
#[cfg(feature = "lab")]
fn pinned() -> Option<Claiming> {
    static PINNED: std::sync::OnceLock<Option<Claiming>> = std::sync::OnceLock::new();
    *PINNED.get_or_init(|| match std::env::var("ONCEWARD_CLAIM_FORM").as_deref() {
        Ok("optimistic") => Some(Claiming::Optimistic),
        Ok("look_first") => Some(Claiming::LookFirst),
        Ok("on_conflict") => Some(Claiming::OnConflict),
        Ok("adaptive") | Err(_) => None,
        // A test that pins nothing by a slip of the pen would pass for nothing.
        Ok(other) => panic!("ONCEWARD_CLAIM_FORM={other}: adaptive, optimistic, look_first or on_conflict"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a batch costs, `ON CONFLICT`'s being a hundred: plainly, and after a look that finds all of it new, or some of it not.
    const PLAIN: u64 = 67;
    const LOOKED_NEW: u64 = 84;
    const LOOKED_DIRTY: u64 = 80;

    /// What comes.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Comes {
        New,
        /// Some of its events are claimed.
        Dirty,
        /// Some of its keys are taken, but no look at the claims shows it: another partition claims them at the same time, say.
        Hidden,
    }

    /// Plays one batch, and returns what it costs.
    fn play(purse: &mut Purse, comes: Comes) -> u64 {
        match (purse.next(), comes) {
            (Claiming::Optimistic, Comes::New) => {
                purse.committed(Claiming::Optimistic, true);
                PLAIN
            }
            (Claiming::LookFirst, Comes::New) => {
                purse.committed(Claiming::LookFirst, true);
                LOOKED_NEW
            }
            (Claiming::LookFirst, Comes::Dirty) => {
                purse.committed(Claiming::LookFirst, false);
                LOOKED_DIRTY
            }
            (Claiming::Optimistic, Comes::Dirty | Comes::Hidden) => {
                purse.missed();
                purse.committed(Claiming::OnConflict, false);
                PLAIN + 100
            }
            (Claiming::LookFirst, Comes::Hidden) => {
                purse.missed();
                purse.committed(Claiming::OnConflict, false);
                LOOKED_NEW + 100
            }
            (Claiming::OnConflict, comes) => {
                purse.committed(Claiming::OnConflict, comes == Comes::New);
                100
            }
        }
    }

    /// What batches cost in hundredths of `ON CONFLICT`'s.
    fn cost(batches: impl Iterator<Item = Comes>) -> (u64, u64) {
        let mut purse = Purse::default();
        batches.fold((0, 0), |(cost, all), comes| (cost + play(&mut purse, comes), all + 100))
    }

    fn of_a_hundred(percent: u64) -> impl FnMut() -> bool {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % 100 < percent
        }
    }

    #[test]
    fn a_stream_without_duplicates_is_optimistic_from_the_second_batch_on_but_for_one_in_129() {
        let (cost, all) = cost(std::iter::repeat_n(Comes::New, 10 * (ASSURE as usize + 1)));
        assert_eq!(cost, all - 10 * u64::from(ASSURE) * (100 - PLAIN));
    }

    #[test]
    fn a_stream_of_duplicates_is_looked_at_first_and_the_key_is_named_as_often() {
        let (cost, all) = cost(std::iter::repeat_n(Comes::Dirty, 10 * (ASSURE as usize + 1)));
        assert_eq!(cost, all - 10 * u64::from(ASSURE) * (100 - LOOKED_DIRTY));
    }

    #[test]
    fn at_any_rate_of_batches_with_duplicates_it_gains() {
        for percent in 0..=100 {
            let mut dirty = of_a_hundred(percent);
            let (cost, all) = cost(std::iter::repeat_with(|| if dirty() { Comes::Dirty } else { Comes::New }).take(20_000));
            assert!(cost < all, "{percent} %: {cost} of {all}");
            if percent <= 10 || percent >= 90 {
                assert!(cost < all * 84 / 100, "{percent} %: {cost} of {all}");
            }
        }
    }

    #[test]
    fn at_any_rate_of_batches_whose_keys_are_taken_unseen_it_costs_a_hundredth_at_most() {
        for percent in 0..=100 {
            let mut hidden = of_a_hundred(percent);
            let (cost, all) = cost(std::iter::repeat_with(|| if hidden() { Comes::Hidden } else { Comes::New }).take(20_000));
            assert!(cost <= all + all / 80, "{percent} %: {cost} of {all}");
        }
    }

    /// The worst that can come: a taken key in exactly those batches that go in plainly, at once or after a good time.
    #[test]
    fn not_even_an_adversary_costs_more() {
        for (good, kept) in (0..40).flat_map(|good| [(good, Comes::New), (good, Comes::Dirty)]) {
            let (mut purse, mut cost, mut run) = (Purse::default(), 0, 0);
            let batches = 50_000;
            for _ in 0..batches {
                let comes = match purse.next() {
                    Claiming::OnConflict => kept,
                    Claiming::Optimistic | Claiming::LookFirst if run < good => {
                        run += 1;
                        // A look that has found something is followed by another; else plain ones would be next.
                        if purse.next() == Claiming::LookFirst { kept } else { Comes::New }
                    }
                    Claiming::Optimistic | Claiming::LookFirst => {
                        if purse.coins < 2 * MISS {
                            run = 0;
                        }
                        Comes::Hidden
                    }
                };
                cost += play(&mut purse, comes);
            }
            assert!(cost <= batches * 102, "{good}, {kept:?}: {cost} for {batches}");
        }
    }
}
