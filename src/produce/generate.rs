//! New events, and repeats of some of them.
//!
//! In: a seed and shares. Out: payloads in an order that depends on them alone; only ids and times are new in each run. It owns
//! nothing but the last payloads, from which repeats are drawn.
//!
//! Invariant: exactly the asked share of the records are repeats, and every repeat follows its first.

use std::borrow::Cow;
use std::collections::VecDeque;

use chrono::Utc;

use super::draw::Draw;
use super::{Outgoing, ProduceError};
use crate::event::{Currency, Money, OrderConfirmedBuilder};

/// What to generate.
#[derive(Clone, Debug)]
pub struct Generated {
    /// Records, repeats included.
    pub count: u64,
    /// Drawn from evenly; name one twice to have it twice as often.
    pub currencies: Vec<Currency>,
    /// How many of a hundred records repeat an earlier one, byte for byte.
    pub duplicates_percent: u8,
    /// How many of a hundred repeats go to a partition drawn by chance, as after a change of the number of partitions.
    pub duplicates_elsewhere_percent: u8,
    /// Amounts, customers and what is repeated depend on it.
    pub seed: u64,
    /// The first order id; each event has the next one. `None`: the microseconds since 1970, so that runs do not share orders.
    pub first_order: Option<i64>,
}

/// Repeats are drawn from so many of the last events.
const MEMORY: usize = 4_096;
/// The largest amount, in minor units.
const MAX_UNITS: u64 = 50_000;

impl Generated {
    /// Hands every record to `send`; `partitions` is needed only for repeats elsewhere.
    pub(super) fn each(&self, partitions: i32, mut send: impl FnMut(Outgoing<'_>)) -> Result<(), ProduceError> {
        if self.currencies.is_empty() {
            return Err(ProduceError::Options("no currency to generate amounts in"));
        }
        if self.duplicates_percent > 99 || self.duplicates_elsewhere_percent > 100 {
            return Err(ProduceError::Options("at most 99 % of the records can be repeats, and at most 100 % of these elsewhere"));
        }
        let first_order = self.first_order.unwrap_or_else(|| Utc::now().timestamp_micros());
        if first_order <= 0 || i64::try_from(self.count).ok().and_then(|count| first_order.checked_add(count)).is_none() {
            return Err(ProduceError::Options("order ids must be above 0 and fit into 64 bits"));
        }
        let (builder, mut draw) = (OrderConfirmedBuilder::new(), Draw::new(self.seed));
        let (mut recent, mut next_order, mut repeats) = (VecDeque::new(), first_order, 0_u64);
        for record in 0..self.count {
            let is_repeat = share(record + 1, self.duplicates_percent) > share(record, self.duplicates_percent);
            if is_repeat {
                let (payload, key): &(String, String) = &recent[draw.below(recent.len() as u64) as usize];
                repeats += 1;
                let elsewhere =
                    share(repeats, self.duplicates_elsewhere_percent) > share(repeats - 1, self.duplicates_elsewhere_percent);
                let partition = elsewhere.then(|| draw.below(partitions.max(1).unsigned_abs().into()) as i32);
                send(Outgoing { payload: Cow::Borrowed(payload.as_bytes()), key: Some(key.clone()), partition });
                continue;
            }
            let currency = self.currencies[draw.below(self.currencies.len() as u64) as usize];
            let total = Money::from_minor_units(1 + draw.below(MAX_UNITS) as i64, currency);
            let event = builder.build(Utc::now(), next_order, 1 + draw.below(1_000_000) as i64, total);
            let event = event.map_err(|_| ProduceError::Options("a generated event would not be valid"))?;
            next_order += 1;
            let (payload, key) = (event.to_json(), event.order_id.to_string());
            send(Outgoing { payload: Cow::Borrowed(payload.as_bytes()), key: Some(key.clone()), partition: None });
            if self.duplicates_percent > 0 {
                if recent.len() == MEMORY {
                    recent.pop_front();
                }
                recent.push_back((payload, key));
            }
        }
        Ok(())
    }
}

/// How many of the first `records` belong to the share; it never counts the very first one unless the share is everything.
fn share(records: u64, percent: u8) -> u64 {
    (u128::from(records) * u128::from(percent) / 100) as u64
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};

    use super::*;
    use crate::event;

    fn generated() -> Generated {
        let currencies = ["EUR", "JPY", "KWD"].map(|code| Currency::from_code(code).unwrap()).to_vec();
        Generated {
            count: 1_000,
            currencies,
            duplicates_percent: 13,
            duplicates_elsewhere_percent: 25,
            seed: 7,
            first_order: Some(100),
        }
    }

    fn records(generated: &Generated) -> Vec<Outgoing<'static>> {
        let mut records = Vec::new();
        generated.each(12, |record| records.push(Outgoing { payload: record.payload.into_owned().into(), ..record })).unwrap();
        records
    }

    #[test]
    fn exactly_the_asked_share_repeats_earlier_records() {
        let records = records(&generated());
        let (mut seen, mut repeats, mut elsewhere) = (HashSet::new(), 0, 0);
        for record in &records {
            let is_repeat = !seen.insert(record.payload.clone());
            repeats += u64::from(is_repeat);
            elsewhere += u64::from(record.partition.is_some());
            assert!(is_repeat || record.partition.is_none());
        }
        assert_eq!((records.len(), repeats, elsewhere), (1_000, 130, 32));
    }

    #[test]
    fn every_event_is_valid_keyed_by_its_order_and_in_every_currency() {
        let mut currencies = HashMap::new();
        for record in records(&Generated { duplicates_percent: 0, ..generated() }) {
            let event = event::decode(Some(&record.payload)).unwrap();
            assert_eq!(record.key, Some(event.order_id.to_string()));
            *currencies.entry(event.total.currency()).or_insert(0) += 1;
        }
        assert!(currencies.len() == 3 && currencies.values().all(|count| *count > 200), "{currencies:?}");
    }

    #[test]
    fn the_seed_decides_everything_but_ids_and_times() {
        let run = |seed| -> Vec<_> {
            let read = |record: Outgoing<'_>| event::decode(Some(&record.payload)).unwrap();
            records(&Generated { seed, ..generated() })
                .into_iter()
                .map(read)
                .map(|event| (event.order_id, event.customer_id, event.total))
                .collect()
        };
        assert_eq!(run(7), run(7));
        assert_ne!(run(7), run(8));
    }

    #[test]
    fn options_that_make_no_sense_are_refused() {
        let refused = |generated: Generated| matches!(generated.each(1, |_| {}), Err(ProduceError::Options(_)));
        assert!(refused(Generated { currencies: Vec::new(), ..generated() }));
        assert!(refused(Generated { duplicates_percent: 100, ..generated() }));
        assert!(refused(Generated { duplicates_elsewhere_percent: 101, ..generated() }));
        assert!(refused(Generated { first_order: Some(0), ..generated() }));
        assert!(refused(Generated { first_order: Some(i64::MAX), ..generated() }));
    }
}
