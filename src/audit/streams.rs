//! Everything that there is, as one stream in the order of events.
//!
//! In: what was sorted in files, and the tables that come in order by themselves. Out: entry after entry. It owns a page of each table.
//!
//! Invariant: what it gives out is in the order of its parts, and each part is given out whole.

use std::collections::{BTreeMap, VecDeque};

use super::AuditError;
use super::entry::{Bytes, CLAIMED_IN_RANGE, Content, Entry, PAID_LATER};
use super::sorter::{Sorted, Sorter};
use crate::store::reconcile::{self, Claim, Claims, Payment, Payments};
use crate::store::{DbError, Session};

/// The ranges `[from, to)` in which every record is known, by partition.
pub(super) struct Places(pub BTreeMap<i32, (i64, i64)>);

impl Places {
    fn claim(&self, claim: &Claim) -> Entry {
        let is_known = |(partition, offset)| self.0.get(&partition).is_some_and(|(from, to)| (*from..*to).contains(&offset));
        Entry::claim(claim.event_id, claim.of_group, if claim.place.is_some_and(is_known) { CLAIMED_IN_RANGE } else { 0 })
    }
}

/// The parts.
pub(super) struct Streams {
    /// Records.
    records: Sorted<{ Entry::SIZE }>,
    /// Bookings, and the rows that come in no order.
    others: Sorted<{ Entry::SIZE }>,
    claims: (Claims, Page),
    payments: (Payments, Page),
    places: Places,
}

/// The rows of a table that were read ahead.
#[derive(Default)]
struct Page {
    rows: VecDeque<Bytes>,
    is_last: bool,
}

impl Page {
    fn is_used_up(&self) -> bool {
        self.rows.is_empty() && !self.is_last
    }

    fn fill(&mut self, rows: impl Iterator<Item = Entry>) {
        self.rows.extend(rows.map(Entry::to_bytes));
        self.is_last = self.rows.is_empty();
    }
}

impl Streams {
    /// Reads the rows that come in no order; `others` has what else does. Payments that may be younger than `ledger_since_ms` say so.
    pub(super) async fn start(
        s: &mut Session,
        (group, topic): (&str, &str),
        records: Sorted<{ Entry::SIZE }>,
        mut others: Sorter<{ Entry::SIZE }>,
        places: Places,
        ledger_since_ms: Option<i64>,
    ) -> Result<Self, AuditError> {
        let mut push = |entry: Entry| others.push(entry.to_bytes()).map(drop).map_err(AuditError::Sort);
        for claim in reconcile::horizon_claims(s, group).await? {
            push(places.claim(&claim))?;
        }
        let held = |held: reconcile::Held| {
            let entry = Entry::held(held.event_id, held.partition, held.offset, held.reason, held.state);
            entry.map_or(Ok(()), &mut push)
        };
        reconcile::held(s, group, topic, held).await?;
        reconcile::attempts(s, |id| push(Entry::attempt(id))).await?;
        let claims = Claims::start(s, group, topic).await?;
        Ok(Self {
            records,
            others: others.sorted().map_err(AuditError::Sort)?,
            claims: (claims, Page::default()),
            payments: (Payments::since(ledger_since_ms), Page::default()),
            places,
        })
    }

    /// How many entries come from the files.
    pub(super) fn sorted(&self) -> u64 {
        self.records.total() + self.others.total()
    }

    /// The next entry, and whether it comes from the files.
    pub(super) async fn next(&mut self, s: &mut Session) -> Result<Option<(Bytes, bool)>, AuditError> {
        self.read_ahead(s).await?;
        let (claims, payments) = (&mut self.claims.1.rows, &mut self.payments.1.rows);
        let heads = [self.records.peek(), self.others.peek(), claims.front(), payments.front()];
        let entry = match least(heads) {
            Some(0) => self.records.next().map_err(AuditError::Sort)?.map(|entry| (entry, true)),
            Some(1) => self.others.next().map_err(AuditError::Sort)?.map(|entry| (entry, true)),
            Some(2) => claims.pop_front().map(|entry| (entry, false)),
            _ => payments.pop_front().map(|entry| (entry, false)),
        };
        Ok(entry)
    }

    async fn read_ahead(&mut self, s: &mut Session) -> Result<(), DbError> {
        let Self { claims: (claims, claims_page), payments: (payments, payments_page), places, .. } = self;
        if claims_page.is_used_up() {
            claims_page.fill(claims.page(s).await?.iter().map(|claim| places.claim(claim)));
        }
        if payments_page.is_used_up() {
            let entry = |payment: Payment| {
                let Payment { event_id, order_id, amount, currency, status, is_later } = payment;
                let seen = if is_later { PAID_LATER } else { 0 };
                Entry::payment(event_id, status, Content::of(order_id, &amount, &currency, false), seen)
            };
            payments_page.fill(payments.page(s).await?.into_iter().map(entry));
        }
        Ok(())
    }
}

/// Which of the heads comes first.
pub(super) fn least<const N: usize>(heads: [Option<&Bytes>; N]) -> Option<usize> {
    let some = heads.into_iter().enumerate().filter_map(|(index, head)| Some((head?, index)));
    some.min().map(|(_, index)| index)
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::audit::entry::CLAIMED;

    #[test]
    fn a_claim_knows_whether_its_record_was_read() {
        let places = Places(BTreeMap::from([(1, (10, 40))]));
        let seen = |place| places.claim(&Claim { event_id: Uuid::nil(), of_group: true, place }).seen & !CLAIMED;
        assert_eq!(seen(None), 0, "another topic's, another group's, or from below the floor");
        assert_eq!([9, 10, 39, 40].map(|at| seen(Some((1, at)))), [0, CLAIMED_IN_RANGE, CLAIMED_IN_RANGE, 0]);
        assert_eq!(seen(Some((2, 10))), 0);
    }
}
