//! One trace of one event, as bytes of one size: what is sorted.
//!
//! In: a record, a row, a booking. Out: an [`Entry`]. No I/O.
//!
//! Invariant: the order of the bytes brings together what belongs to one event, and of one event first what the tables and the ledger
//! say, then its records, those of one content together: so it can be judged as it streams by.

use std::num::NonZeroU64;

use uuid::Uuid;
use xxhash_rust::xxh3::xxh3_64;

use crate::event::{Currency, Money};
use crate::handler::HeldReason;
use crate::store::held_events::HeldState;
use crate::store::payments::PaymentStatus;

/// Order, amount and currency, as a hash: equal for equal values however the amount is spelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Content(NonZeroU64);

impl Content {
    /// `None` when the amount is none of its currency. `in_minor_units`: the text counts the smallest unit.
    pub(super) fn of(order: i64, amount: &str, currency: &str, in_minor_units: bool) -> Option<Self> {
        let currency = Currency::from_code(currency).ok()?;
        let money = if in_minor_units {
            Money::from_minor_units(amount.parse().ok()?, currency)
        } else {
            Money::from_decimal(amount, currency).ok()?
        };
        Some(Self::of_money(order, money))
    }

    pub(super) fn of_money(order: i64, money: Money) -> Self {
        let mut bytes = [0; 19];
        bytes[..8].copy_from_slice(&order.to_le_bytes());
        bytes[8..16].copy_from_slice(&money.minor_units().to_le_bytes());
        bytes[16..].copy_from_slice(money.currency().code().as_bytes());
        Self(NonZeroU64::new(xxh3_64(&bytes)).unwrap_or(NonZeroU64::MIN))
    }

    /// 0 stands for none.
    pub(super) fn to_number(content: Option<Self>) -> u64 {
        content.map_or(0, |content| content.0.get())
    }

    pub(super) fn from_number(number: u64) -> Option<Self> {
        NonZeroU64::new(number).map(Self)
    }
}

/// What a trace says, as a set of bits. An event's traces are added up.
pub(super) type Seen = u32;

pub(super) const CLAIMED: Seen = 1;
pub(super) const CLAIMED_ELSEWHERE: Seen = 1 << 1;
pub(super) const CHARGED: Seen = 1 << 2;
pub(super) const DECLINED: Seen = 1 << 3;
/// Held and not applied, for whatever reason but those of poison and conflicts.
pub(super) const HELD: Seen = 1 << 4;
/// Held, and nobody can say whether it was charged.
pub(super) const HELD_IN_DOUBT: Seen = 1 << 5;
pub(super) const HELD_AS_CONFLICT: Seen = 1 << 6;
pub(super) const HELD_APPLIED: Seen = 1 << 7;
pub(super) const LEDGER_DECLINED: Seen = 1 << 8;
/// It has records with more than one content that the group has settled and that are wanted.
pub(super) const TWO_WAYS: Seen = 1 << 9;
pub(super) const AMOUNTS_DIFFER: Seen = 1 << 10;
pub(super) const UNREADABLE: Seen = 1 << 11;
/// The group has settled a record of it that is wanted, or says so: it must be somewhere.
pub(super) const READ: Seen = 1 << 12;
/// It has a record that is not passed over.
pub(super) const WANTED: Seen = 1 << 13;
/// A call has begun, and its end is not written down: it may be charged.
pub(super) const BEGUN: Seen = 1 << 14;
/// Its claim names a place within the range of the topic.
pub(super) const CLAIMED_IN_RANGE: Seen = 1 << 15;
/// Its payment row may be younger than what was read of the ledger.
pub(super) const PAID_LATER: Seen = 1 << 16;

/// What it is a trace of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Subject {
    /// An event.
    Event(Uuid),
    /// A record that is no event: it has a place and nothing else.
    Place(i32, i64),
}

/// What left the trace. Of one event they come in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    /// A claim, a held row, an attempt, a "no" of the provider: bits and nothing else.
    Note,
    /// A payment row.
    Payment,
    /// A charge in the ledger.
    Charge,
    /// A record of the log or of the topic.
    Record,
}

/// One trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub subject: Subject,
    pub kind: Kind,
    pub content: Option<Content>,
    /// Of a record.
    pub digest: i64,
    pub seen: Seen,
    /// Of a record: partition and offset.
    pub place: (i32, i64),
}

/// What the provider's ledger says of one booking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Booking {
    /// Money moved.
    Charged,
    /// A business "no".
    Declined,
    /// No money moved.
    Failed,
}

impl Entry {
    const fn note(id: Uuid, seen: Seen) -> Self {
        Self { subject: Subject::Event(id), kind: Kind::Note, content: None, digest: 0, seen, place: (0, 0) }
    }

    const fn of(id: Uuid, kind: Kind, content: Option<Content>, seen: Seen) -> Self {
        Self { kind, content, ..Self::note(id, seen) }
    }

    /// A record that is an event.
    pub(super) const fn event(place: (i32, i64), id: Uuid, digest: i64, content: Option<Content>, seen: Seen) -> Self {
        Self { place, digest, ..Self::of(id, Kind::Record, content, seen) }
    }

    /// A record that is none.
    pub(super) const fn poison(partition: i32, offset: i64, seen: Seen) -> Self {
        Self { subject: Subject::Place(partition, offset), kind: Kind::Record, content: None, digest: 0, seen, place: (0, 0) }
    }

    /// A claim, of the audited group or of another; `seen`: what is known of its place.
    pub(super) const fn claim(id: Uuid, of_group: bool, seen: Seen) -> Self {
        Self::note(id, seen | if of_group { CLAIMED } else { CLAIMED_ELSEWHERE })
    }

    /// A call that has begun.
    pub(super) const fn attempt(id: Uuid) -> Self {
        Self::note(id, BEGUN)
    }

    /// A payment row; `seen`: what is known of its age.
    pub(super) fn payment(id: Uuid, status: PaymentStatus, content: Option<Content>, seen: Seen) -> Self {
        let status = match status {
            PaymentStatus::Charged => CHARGED,
            PaymentStatus::Declined => DECLINED,
        };
        Self::of(id, Kind::Payment, content, seen | status | if content.is_none() { UNREADABLE } else { 0 })
    }

    /// A held row; `None` when it is not about one event or record.
    pub(super) fn held(id: Option<Uuid>, partition: i32, offset: i64, reason: HeldReason, state: HeldState) -> Option<Self> {
        let seen = match (reason, state) {
            (HeldReason::Undecodable | HeldReason::Invalid, _) => {
                return Some(Self { kind: Kind::Note, ..Self::poison(partition, offset, HELD) });
            }
            // It may be no event: whoever held it has not asked.
            (HeldReason::Operator, _) if id.is_none() => {
                return Some(Self { kind: Kind::Note, ..Self::poison(partition, offset, HELD) });
            }
            (HeldReason::Gap | HeldReason::Skipped, _) => return None, // they stand for records that are gone: see `Unseen`
            (HeldReason::Conflict, _) => HELD_AS_CONFLICT,
            (_, HeldState::Applied) => HELD_APPLIED,
            (HeldReason::Retryable | HeldReason::Unknown | HeldReason::ChargedNotRecorded, _) => HELD | HELD_IN_DOUBT,
            (
                HeldReason::Rejected
                | HeldReason::BeyondHorizon
                | HeldReason::Future
                | HeldReason::Refused
                | HeldReason::Behind
                | HeldReason::Operator,
                _,
            ) => HELD,
        };
        Some(Self::note(id?, seen))
    }

    /// A booking under an event's id; `None`: it says nothing.
    pub(super) fn booking(id: Uuid, booking: Booking, content: Option<Content>) -> Option<Self> {
        match booking {
            Booking::Failed => None,
            Booking::Declined => Some(Self::note(id, LEDGER_DECLINED)),
            Booking::Charged => Some(Self::of(id, Kind::Charge, content, if content.is_none() { UNREADABLE } else { 0 })),
        }
    }
}

/// An [`Entry`] as it is sorted: subject, kind, content, digest, bits, place, each with its most significant byte first.
pub(super) type Bytes = [u8; Entry::SIZE];

impl Entry {
    /// In bytes.
    pub(super) const SIZE: usize = 1 + 16 + 1 + 8 + 8 + 4 + 4 + 8;

    pub(super) fn to_bytes(self) -> Bytes {
        let mut bytes = [0; Self::SIZE];
        match self.subject {
            Subject::Event(id) => bytes[1..17].copy_from_slice(id.as_bytes()),
            Subject::Place(partition, offset) => {
                bytes[0] = 1;
                bytes[1..5].copy_from_slice(&partition.to_be_bytes());
                bytes[5..13].copy_from_slice(&offset.to_be_bytes());
            }
        }
        bytes[17] = self.kind as u8;
        bytes[18..26].copy_from_slice(&Content::to_number(self.content).to_be_bytes());
        bytes[26..34].copy_from_slice(&self.digest.to_be_bytes());
        bytes[34..38].copy_from_slice(&self.seen.to_be_bytes());
        bytes[38..42].copy_from_slice(&self.place.0.to_be_bytes());
        bytes[42..].copy_from_slice(&self.place.1.to_be_bytes());
        bytes
    }

    pub(super) fn from_bytes(bytes: &Bytes) -> Self {
        let number = |at: usize| u64::from_be_bytes(std::array::from_fn(|index| bytes[at + index]));
        let half = |at: usize| u32::from_be_bytes(std::array::from_fn(|index| bytes[at + index]));
        let subject = match bytes[0] {
            0 => Subject::Event(Uuid::from_bytes(std::array::from_fn(|index| bytes[1 + index]))),
            _ => Subject::Place(half(1).cast_signed(), number(5).cast_signed()),
        };
        let kind = match bytes[17] {
            0 => Kind::Note,
            1 => Kind::Payment,
            2 => Kind::Charge,
            _ => Kind::Record,
        };
        let (content, digest) = (Content::from_number(number(18)), number(26).cast_signed());
        Self { subject, kind, content, digest, seen: half(34), place: (half(38).cast_signed(), number(42).cast_signed()) }
    }
}

/// A place in the sort by content: what has it, and under which key.
pub(super) type BalanceBytes = [u8; 8 + 1 + KEY];

/// As much of a key is named; an event's id in canonical form is just so long.
pub(super) const KEY: usize = 36;

/// What has a content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Share {
    /// An event and a charge under its own key.
    Both,
    /// An event that has no charge with this content.
    Event,
    /// A charge under a key that is no event with this content.
    Charge,
}

pub(super) fn balance_bytes(content: Content, share: Share, key: &str) -> BalanceBytes {
    let mut bytes = [0; 8 + 1 + KEY];
    bytes[..8].copy_from_slice(&content.0.get().to_be_bytes());
    bytes[8] = share as u8;
    let length = key.len().min(KEY);
    bytes[9..9 + length].copy_from_slice(&key.as_bytes()[..length]);
    bytes
}

pub(super) fn from_balance_bytes(bytes: &BalanceBytes) -> (u64, Share, String) {
    let content = u64::from_be_bytes(std::array::from_fn(|index| bytes[index]));
    let share = match bytes[8] {
        0 => Share::Both,
        1 => Share::Event,
        _ => Share::Charge,
    };
    let key = bytes[9..].split(|byte| *byte == 0).next().unwrap_or_default();
    (content, share, String::from_utf8_lossy(key).into_owned())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn subject() -> impl Strategy<Value = Subject> {
        prop_oneof![
            any::<u128>().prop_map(|id| Subject::Event(Uuid::from_u128(id))),
            (0..i32::MAX, 0..i64::MAX).prop_map(|(partition, offset)| Subject::Place(partition, offset)),
        ]
    }

    fn entry() -> impl Strategy<Value = Entry> {
        let kind = prop::sample::select(vec![Kind::Note, Kind::Payment, Kind::Charge, Kind::Record]);
        let record = (any::<u64>(), any::<i64>(), (0..i32::MAX, 0..i64::MAX));
        (subject(), kind, record, any::<u32>()).prop_map(|(subject, kind, (content, digest, place), seen)| Entry {
            subject,
            kind,
            content: Content::from_number(content),
            digest,
            seen,
            place,
        })
    }

    proptest! {
        #[test]
        fn an_entry_comes_back_from_its_bytes(entry in entry()) {
            prop_assert_eq!(Entry::from_bytes(&entry.to_bytes()), entry);
        }

        #[test]
        fn the_bytes_bring_events_and_kinds_into_order(id in any::<u128>(), other in any::<u128>(), a in entry(), b in entry()) {
            let of = |id: u128, entry: Entry| Entry { subject: Subject::Event(Uuid::from_u128(id)), ..entry };
            let (first, second) = (of(id, a), of(other, b));
            if id != other {
                prop_assert_eq!(first.to_bytes() < second.to_bytes(), id < other);
            }
            let same = of(id, b);
            if a.kind != b.kind {
                prop_assert_eq!(first.to_bytes() < same.to_bytes(), a.kind < b.kind);
            }
            let place = Entry { subject: Subject::Place(0, 0), ..b };
            prop_assert!(first.to_bytes() < place.to_bytes());
        }
    }

    #[test]
    fn amounts_are_compared_by_value_in_either_form() {
        let ten_euro = Content::of(1, "10.00", "EUR", false);
        assert_eq!(ten_euro, Content::of(1, "1e1", "EUR", false));
        assert_eq!(ten_euro, Content::of(1, "1000", "EUR", true));
        assert_ne!(ten_euro, Content::of(1, "10.00", "USD", false));
        assert_ne!(ten_euro, Content::of(2, "10.00", "EUR", false));
        assert_eq!((Content::of(1, "10.001", "EUR", false), Content::of(1, "10.00", "EUR", true)), (None, None));
    }

    #[test]
    fn a_key_longer_than_an_id_is_cut_and_nothing_else_is() {
        let content = Content::of(1, "10.00", "EUR", false).unwrap();
        let back = |key: &str| from_balance_bytes(&balance_bytes(content, Share::Charge, key));
        let number = Content::to_number(Some(content));
        for key in ["", "order-5", "01890A5D-AC96-774B-BCCE-B302099A8057"] {
            assert_eq!(back(key), (number, Share::Charge, key.to_owned()));
        }
        assert_eq!(back(&"x".repeat(100)).2, "x".repeat(KEY));
    }
}
