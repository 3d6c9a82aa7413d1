//! A record is what Kafka gives: bytes at an offset. What they mean is the handler's business (`event.rs`).
//!
//! Invariant: an [`Offset`] is a record's own place, a [`NextOffset`] is what is committed; they never share a variable.

use std::collections::BTreeMap;
use std::fmt;

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// The place of one record in its partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Offset(pub i64);

/// One past the last settled record: the value that the ownership row and Kafka hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NextOffset(pub i64);

/// `consumed_partition.epoch`: made by the database alone, one more at each change of owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(pub i64);

/// `consumed_partition.id`: one (group, topic, partition).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SourceId(pub i32);

/// A digest of a record's timestamp, key, headers and value as bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RecordDigest(pub i64);

/// Offsets that an operator wants passed over: their records are settled without effect.
#[doc(hidden)]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Skips(Vec<(i64, i64)>);

/// Offsets whose records an operator wants held, each with what its row is to say.
#[doc(hidden)]
pub type Holds = BTreeMap<Offset, String>;

/// A digest of a record's key: events of one key keep their order. Two keys that share one would wait for each other, and no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KeyDigest(pub i64);

/// A record header: Kafka bounds neither name nor value, and neither need be text.
pub type Header = (Box<[u8]>, Option<Box<[u8]>>);

/// One owned record. Nothing of the Kafka client's memory is kept, so that a slow partition cannot pin its buffers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The partition it was read from.
    pub partition: i32,
    /// Its place there.
    pub offset: Offset,
    /// Milliseconds since 1970 as the topic keeps them; `None` when the broker has none.
    pub timestamp_ms: Option<i64>,
    /// The key; `None` and empty are different.
    pub key: Option<Box<[u8]>>,
    /// The headers in their order, repeats included.
    pub headers: Box<[Header]>,
    /// The value; `None` is a tombstone.
    pub payload: Option<Box<[u8]>>,
}

impl Offset {
    /// The offset that is committed once this record is settled.
    #[must_use]
    pub const fn next(self) -> NextOffset {
        NextOffset(self.0 + 1)
    }
}

impl NextOffset {
    /// Where the first record not yet settled would stand.
    #[must_use]
    pub const fn first_open(self) -> Offset {
        Offset(self.0)
    }
}

impl RecordDigest {
    /// Of a range of offsets, for a row that stands for records which are not there. Frozen: it is stored.
    #[doc(hidden)]
    #[must_use]
    pub fn of_range(from: NextOffset, to: NextOffset) -> Self {
        let mut hash = Xxh3::new();
        hash.update(b"range");
        hash.update(&from.0.to_le_bytes());
        hash.update(&to.0.to_le_bytes());
        Self(hash.digest().cast_signed())
    }
}

impl Skips {
    /// Ranges `[from, to)`, in any order.
    #[must_use]
    pub fn new(mut ranges: Vec<(i64, i64)>) -> Self {
        ranges.sort_unstable();
        Self(ranges)
    }

    /// Reads PostgreSQL's text of an `int8multirange` with finite bounds, such as `{[3,5),[9,12)}`.
    #[must_use]
    pub fn from_text(text: &str) -> Option<Self> {
        let inner = text.strip_prefix('{')?.strip_suffix('}')?;
        let range = |range: &str| {
            let (from, to) = range.strip_prefix('[')?.split_once(',')?;
            Some((from.parse().ok()?, to.parse().ok()?))
        };
        let ranges = inner.split_terminator(')').map(|part| range(part.trim_start_matches(',')));
        Some(Self::new(ranges.collect::<Option<_>>()?))
    }

    /// The ranges `[from, to)`, in order.
    #[must_use]
    pub fn ranges(&self) -> &[(i64, i64)] {
        &self.0
    }

    /// Whether the record there is to be passed over.
    #[must_use]
    pub fn contain(&self, offset: Offset) -> bool {
        self.0.iter().any(|(from, to)| (*from..*to).contains(&offset.0))
    }

    /// The first offset at or beyond `base` that is not passed over.
    #[must_use]
    pub fn beyond(&self, base: NextOffset) -> NextOffset {
        self.0.iter().fold(base, |base, (from, to)| if (*from..*to).contains(&base.0) { NextOffset(*to) } else { base })
    }
}

impl fmt::Display for Skips {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranges: Vec<String> = self.0.iter().map(|(from, to)| format!("[{from}, {to})")).collect();
        f.write_str(&ranges.join(" "))
    }
}

impl Record {
    /// The digest that tells this record from another at the same offset (a topic made anew).
    /// Lengths go in with the bytes, so that moving a byte from key to value changes it.
    #[must_use]
    pub fn digest(&self) -> RecordDigest {
        let mut hash = Whole::new();
        hash.update(&self.timestamp_ms.unwrap_or(i64::MIN).to_le_bytes());
        absorb(&mut hash, self.key.as_deref());
        hash.update(&(self.headers.len() as u64).to_le_bytes());
        for (name, value) in &self.headers {
            absorb(&mut hash, Some(name));
            absorb(&mut hash, value.as_deref());
        }
        absorb(&mut hash, self.payload.as_deref());
        RecordDigest(hash.digest().cast_signed())
    }

    /// The digest of the key; `None` without a key: such a record stands alone.
    #[must_use]
    pub fn key_digest(&self) -> Option<KeyDigest> {
        self.key.as_deref().map(|key| KeyDigest(xxh3_64(key).cast_signed()))
    }

    /// What the record costs the buffer, in bytes: its contents and a flat charge for its own structure, its place in a window, and what the
    /// allocator adds to each of three pieces.
    #[doc(hidden)]
    #[must_use]
    pub fn weight(&self) -> usize {
        const OWN: usize = 224;
        let header = |(name, value): &Header| name.len() + value.as_deref().map_or(0, <[u8]>::len) + 48;
        OWN + self.key.as_deref().map_or(0, <[u8]>::len)
            + self.payload.as_deref().map_or(0, <[u8]>::len)
            + self.headers.iter().map(header).sum::<usize>()
    }
}

/// XXH3 of bytes that come in parts. Of few bytes it is cheaper to hash all at once than to keep a state.
struct Whole {
    few: [u8; 512],
    length: usize,
    many: Option<Box<Xxh3>>,
}

impl Whole {
    const fn new() -> Self {
        Self { few: [0; 512], length: 0, many: None }
    }

    fn update(&mut self, bytes: &[u8]) {
        if let Some(many) = &mut self.many {
            many.update(bytes);
        } else if let Some(free) = self.few[self.length..].get_mut(..bytes.len()) {
            free.copy_from_slice(bytes);
            self.length += bytes.len();
        } else {
            let mut many = Box::new(Xxh3::new());
            many.update(&self.few[..self.length]);
            many.update(bytes);
            self.many = Some(many);
        }
    }

    fn digest(&self) -> u64 {
        self.many.as_ref().map_or_else(|| xxh3_64(&self.few[..self.length]), |many| many.digest())
    }
}

fn absorb(hash: &mut Whole, bytes: Option<&[u8]>) {
    let length = bytes.map_or(u64::MAX, |bytes| bytes.len() as u64);
    hash.update(&length.to_le_bytes());
    hash.update(bytes.unwrap_or_default());
}

macro_rules! display_as_number {
    ($($name:ty),+) => { $(
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    )+ };
}
display_as_number!(Offset, NextOffset, Epoch, SourceId);

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        Record {
            partition: 0,
            offset: Offset(7),
            timestamp_ms: Some(1),
            key: Some(b"ab"[..].into()),
            headers: Box::new([(b"h"[..].into(), None)]),
            payload: Some(b"cd"[..].into()),
        }
    }

    #[test]
    fn the_digest_tells_every_part_apart() {
        let base = record();
        let changes: [fn(&mut Record); 6] = [
            |r| r.timestamp_ms = None,
            |r| r.key = None,
            |r| r.key = Some(Box::default()),
            |r| r.headers = Box::default(),
            |r| (r.key, r.payload) = (Some(b"abc"[..].into()), Some(b"d"[..].into())),
            |r| r.payload = None,
        ];
        for change in changes {
            let mut other = base.clone();
            change(&mut other);
            assert_ne!(base.digest(), other.digest(), "{other:?}");
        }
    }

    #[test]
    fn skips_are_read_from_the_databases_text_and_lead_beyond_themselves() {
        assert_eq!(Skips::from_text("{}"), Some(Skips::default()));
        let skips = Skips::from_text("{[3,5),[5,7),[9,12)}").expect("ranges");
        assert_eq!([2, 3, 6, 7, 9, 12].map(|at| skips.contain(Offset(at))), [false, true, true, false, true, false]);
        assert_eq!([2, 3, 8, 11, 12].map(|at| skips.beyond(NextOffset(at)).0), [2, 7, 8, 12, 12]);
        assert_eq!(skips.to_string(), "[3, 5) [5, 7) [9, 12)");
        for broken in ["", "{(,5)}", "{[3,)}", "[3,5)"] {
            assert_eq!(Skips::from_text(broken), None, "{broken}");
        }
    }

    #[test]
    fn the_digest_is_frozen_because_it_is_stored() {
        assert_eq!(record().digest(), RecordDigest(-763529167367224884));
    }

    #[test]
    fn the_digest_is_that_of_all_bytes_however_many_they_are() {
        for length in (0..1_200_u64).chain([70_000]) {
            let payload: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
            let mut bytes = 1_i64.to_le_bytes().to_vec();
            for part in [&2_u64.to_le_bytes()[..], b"ab", &1_u64.to_le_bytes(), &1_u64.to_le_bytes(), b"h", &u64::MAX.to_le_bytes()]
            {
                bytes.extend(part);
            }
            bytes.extend(length.to_le_bytes());
            bytes.extend(&payload);
            let digest = Record { payload: Some(payload.into()), ..record() }.digest();
            assert_eq!(digest, RecordDigest(xxh3_64(&bytes).cast_signed()), "{length}");
        }
    }
}
