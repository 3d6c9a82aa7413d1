//! Numbers that look random and are the same for the same seed, on every machine and in every version.

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// A sequence of them.
#[derive(Clone, Debug)]
pub struct Draw {
    seed: u64,
    drawn: u64,
}

impl Draw {
    /// The sequence of this seed, from its beginning.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self { seed, drawn: 0 }
    }

    /// One of `0..limit`; `limit` is small, so that the bias of `%` does not matter.
    ///
    /// # Panics
    /// When `limit` is 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.drawn += 1;
        xxh3_64_with_seed(&self.drawn.to_le_bytes(), self.seed) % limit
    }
}
