//! In which form a partition's next batch is written: optimistic while its events are new, with `ON CONFLICT` where some are not.
//!
//! In: how its batches have ended. Out: the form of the next one. It owns a purse: an optimistic batch that commits fills it, a miss
//! empties it. If it is wrong, a batch runs twice, which costs time and nothing else.
//!
//! Invariant: what misses cost was earned before by optimistic batches, but for one miss in `MISS` other batches. So whatever comes, and
//! in whatever order, the engine is not slower by more than a hundredth. And one batch in `ASSURE` names the key: the database refuses it
//! when there is no such key any more, which a plain `INSERT` would never notice.

use std::sync::{Arc, Mutex, PoisonError};

use crate::store::Form;

/// What an optimistic batch earns: it takes two thirds of the other form's time.
const HIT: u32 = 32;
/// What a miss costs: at worst the whole of an optimistic batch, or twice what one saves. The other form's batches bring one coin each.
const MISS: u32 = 64;
/// What is saved at most: so many misses in a row are forgiven after a good time.
const FULL: u32 = 8 * MISS;
/// So many optimistic batches at most come in a row, and one.
const ASSURE: u32 = 128;

/// The forms of one partition's batches; its clones share the purse.
#[derive(Clone, Debug, Default)]
pub struct Forms(Arc<Mutex<Purse>>);

#[derive(Debug)]
struct Purse {
    coins: u32,
    /// The last batch had nothing but new events.
    all_new: bool,
    /// Optimistic batches since one named the key.
    unnamed: u32,
}

impl Default for Purse {
    /// One miss is free. What an owner reads first was often read before.
    fn default() -> Self {
        Self { coins: MISS, all_new: false, unnamed: 0 }
    }
}

impl Forms {
    /// Of the next batch.
    #[must_use]
    pub fn next(&self) -> Form {
        pinned().unwrap_or_else(|| self.with(|purse| purse.next()))
    }

    /// A batch with claims has committed in this form. `all_new`: none of them was taken.
    pub fn committed(&self, form: Form, all_new: bool) {
        self.with(|purse| purse.committed(form, all_new));
    }

    /// An optimistic batch has met a taken key.
    pub fn missed(&self) {
        self.with(Purse::missed);
    }

    /// Nothing that is done under the lock can panic half way.
    fn with<T>(&self, act: impl FnOnce(&mut Purse) -> T) -> T {
        act(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Purse {
    const fn next(&self) -> Form {
        if self.all_new && self.coins >= MISS && self.unnamed < ASSURE - 1 { Form::Optimistic } else { Form::OnConflict }
    }

    fn committed(&mut self, form: Form, all_new: bool) {
        let (earned, unnamed) = match form {
            Form::Optimistic => (HIT, self.unnamed + 1),
            Form::OnConflict => (1, 0),
        };
        self.coins = (self.coins + earned).min(FULL);
        (self.all_new, self.unnamed) = (all_new, unnamed);
    }

    fn missed(&mut self) {
        self.coins = self.coins.saturating_sub(MISS);
        self.all_new = false;
    }
}

#[cfg(not(feature = "lab"))]
const fn pinned() -> Option<Form> {
    None
}

/// For tests: each form must keep every promise by itself. A miss is followed by the other form all the same.
#[cfg(feature = "lab")]
fn pinned() -> Option<Form> {
    static PINNED: std::sync::OnceLock<Option<Form>> = std::sync::OnceLock::new();
    *PINNED.get_or_init(|| match std::env::var("ONCEWARD_CLAIM_FORM").as_deref() {
        Ok("optimistic") => Some(Form::Optimistic),
        Ok("on_conflict") => Some(Form::OnConflict),
        Ok("adaptive") | Err(_) => None,
        // A test that pins nothing by a slip of the pen would pass for nothing.
        Ok(other) => panic!("ONCEWARD_CLAIM_FORM={other}: adaptive, optimistic or on_conflict"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Plays batches of which each is new or not, and returns what they cost, the other form's batch being a hundred.
    fn cost(dirty: impl Iterator<Item = bool>) -> (u32, u32) {
        let (mut purse, mut cost, mut batches) = (Purse::default(), 0, 0);
        for dirty in dirty {
            batches += 1;
            match (purse.next(), dirty) {
                (Form::Optimistic, false) => {
                    purse.committed(Form::Optimistic, true);
                    cost += 67;
                }
                (Form::Optimistic, true) => {
                    purse.missed();
                    purse.committed(Form::OnConflict, false);
                    cost += 67 + 100;
                }
                (Form::OnConflict, dirty) => {
                    purse.committed(Form::OnConflict, !dirty);
                    cost += 100;
                }
            }
        }
        (cost, batches * 100)
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
    fn a_stream_without_duplicates_is_optimistic_from_the_second_batch_on_but_for_one_in_128() {
        let (cost, all) = cost(std::iter::repeat_n(false, 10 * ASSURE as usize));
        assert_eq!(cost, all - 10 * (ASSURE - 1) * 33);
    }

    #[test]
    fn a_stream_of_duplicates_is_never_tried() {
        let (cost, all) = cost(std::iter::repeat_n(true, 1_000));
        assert_eq!(cost, all);
    }

    #[test]
    fn at_any_rate_of_batches_with_duplicates_it_costs_a_hundredth_at_most_and_a_low_rate_gains() {
        for percent in 0..=100 {
            let (cost, all) = cost(std::iter::repeat_with(of_a_hundred(percent)).take(20_000));
            assert!(cost <= all + all / 90, "{percent} %: {cost} of {all}");
            if percent <= 10 {
                assert!(cost < all * 80 / 100, "{percent} %: {cost} of {all}");
            }
        }
    }

    /// The worst that can come: duplicates in exactly the batches that were optimistic, at once or after a good time.
    #[test]
    fn not_even_an_adversary_costs_more() {
        for hits in 0..40 {
            let mut purse = Purse::default();
            let (mut cost, mut batches, mut run) = (0_u64, 0_u64, 0);
            while batches < 50_000 {
                batches += 1;
                match purse.next() {
                    Form::Optimistic if run < hits => {
                        run += 1;
                        purse.committed(Form::Optimistic, true);
                        cost += 67;
                    }
                    Form::Optimistic => {
                        if purse.coins < 2 * MISS {
                            run = 0;
                        }
                        purse.missed();
                        purse.committed(Form::OnConflict, false);
                        cost += 167;
                    }
                    Form::OnConflict => {
                        purse.committed(Form::OnConflict, true);
                        cost += 100;
                    }
                }
            }
            assert!(cost <= batches * 102, "{hits}: {cost} for {batches}");
        }
    }
}
