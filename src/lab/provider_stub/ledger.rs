//! What the stub has really charged.
//!
//! In: posts by key and body. Out: the stored answer of a key, or a new one. It owns every charge ever booked and the remembered keys.
//! Invariant: an entry is never changed or dropped; forgetting a key forgets the answer, not the charge. Two charges of one key are
//! therefore two entries, and anybody who counts sees them.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::http::Response;
use super::script::Reply;

/// One line of `GET /v1/ledger`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LedgerEntry {
    /// As it was sent.
    pub idempotency_key: String,
    /// `None` unless charged.
    pub charge_id: Option<String>,
    /// From the body.
    pub order_id: i64,
    /// The number's text exactly as it stood in the body.
    pub amount: String,
    /// From the body.
    pub currency: String,
    /// Posts of this key so far, whatever became of them.
    pub times_posted: u64,
    /// What was booked.
    pub status: LedgerStatus,
}

/// What an entry says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LedgerStatus {
    /// Money moved.
    Charged,
    /// A stored "no".
    Declined,
    /// A stored failure; no money moved.
    Failed,
}

/// What became of a post.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Booked {
    /// Answered for the first time.
    New(Response),
    /// The stored answer of the key.
    Replayed(Response),
    /// The key is known with another body.
    OtherBody,
    /// The key is being worked on.
    InProgress,
    /// No key, or no charge in the body.
    Invalid(&'static str),
}

#[derive(Debug, Default)]
pub(super) struct Ledger {
    entries: Vec<LedgerEntry>,
    keys: HashMap<String, Remembered>,
    posts: HashMap<String, Posts>,
    working: HashSet<String>,
    key_life: Option<Duration>,
}

/// A key within its life.
#[derive(Debug)]
struct Remembered {
    body: Box<[u8]>,
    answer: Response,
    since: Instant,
}

#[derive(Debug)]
struct Posts {
    first_body: Box<[u8]>,
    count: u64,
}

#[derive(Deserialize)]
struct Body<'a> {
    #[serde(rename = "orderId")]
    order_id: i64,
    #[serde(borrow)]
    amount: &'a RawValue,
    currency: &'a str,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Charge<'a> {
    id: &'a str,
    status: &'a str,
    order_id: i64,
    amount: &'a RawValue,
    currency: &'a str,
    idempotency_key: &'a str,
}

impl Ledger {
    pub(super) fn new(key_life: Option<Duration>) -> Self {
        Self { key_life, ..Self::default() }
    }

    /// Counts a post; `false` when its body is not the first one of its key.
    pub(super) fn note_post(&mut self, key: &str, body: &[u8]) -> bool {
        if let Some(posts) = self.posts.get_mut(key) {
            posts.count += 1;
            return *posts.first_body == *body;
        }
        self.posts.insert(key.to_owned(), Posts { first_body: body.into(), count: 1 });
        true
    }

    /// Answers a post: a known key from its stored answer, a new one by a charge or by `lie`.
    pub(super) fn book(&mut self, key: &str, body: &[u8], lie: Option<&Reply>, now: Instant) -> Booked {
        if self.working.contains(key) {
            return Booked::InProgress;
        }
        self.book_idle(key, body, lie, now)
    }

    /// The same for the one post that is working on the key.
    pub(super) fn book_held(&mut self, key: &str, body: &[u8], now: Instant) -> Booked {
        self.book_idle(key, body, None, now)
    }

    /// From here to [`Self::end_work`] every other post of this key is in progress.
    pub(super) fn begin_work(&mut self, key: &str) -> Result<(), Booked> {
        if self.working.insert(key.to_owned()) { Ok(()) } else { Err(Booked::InProgress) }
    }

    pub(super) fn end_work(&mut self, key: &str) {
        self.working.remove(key);
    }

    /// What a look-up finds: a charge for ever, another stored answer as long as its key.
    pub(super) fn find(&self, key: &str, now: Instant) -> Option<Response> {
        let charged = self.entries.iter().find(|entry| entry.idempotency_key == key && entry.status == LedgerStatus::Charged);
        charged.and_then(charge_again).or_else(|| self.remembered(key, now).map(|known| known.answer.clone()))
    }

    pub(super) fn entries(&self) -> Vec<LedgerEntry> {
        let posted = |entry: &LedgerEntry| self.posts.get(&entry.idempotency_key).map_or(0, |posts| posts.count);
        self.entries.iter().map(|entry| LedgerEntry { times_posted: posted(entry), ..entry.clone() }).collect()
    }

    pub(super) fn forget_keys(&mut self) {
        self.keys.clear();
    }

    fn book_idle(&mut self, key: &str, body: &[u8], lie: Option<&Reply>, now: Instant) -> Booked {
        if key.is_empty() {
            return Booked::Invalid("Idempotency-Key is missing");
        }
        if let Some(known) = self.remembered(key, now) {
            return if *known.body == *body { Booked::Replayed(known.answer.clone()) } else { Booked::OtherBody };
        }
        let Ok(charge) = serde_json::from_slice::<Body<'_>>(body) else {
            return Booked::Invalid("the body is no charge");
        };
        let Some(reply) = lie else {
            let answer = self.charge(key, &charge);
            self.remember(key, body, answer.clone(), now);
            return Booked::New(answer);
        };
        let spoken = Response::from(reply);
        let honest = reply.charge.then(|| self.charge(key, &charge));
        if reply.store {
            if honest.is_none() {
                let status = if reply.status == 402 { LedgerStatus::Declined } else { LedgerStatus::Failed };
                self.enter(key, &charge, None, status);
            }
            self.remember(key, body, spoken.clone(), now);
        } else if let Some(honest) = honest {
            self.remember(key, body, honest, now);
        }
        Booked::New(spoken)
    }

    fn charge(&mut self, key: &str, body: &Body<'_>) -> Response {
        let id = format!("ch_{:08}", self.entries.len() + 1);
        let answer = Response::json(&Charge {
            id: &id,
            status: "succeeded",
            order_id: body.order_id,
            amount: body.amount,
            currency: body.currency,
            idempotency_key: key,
        });
        self.enter(key, body, Some(id), LedgerStatus::Charged);
        answer
    }

    fn enter(&mut self, key: &str, body: &Body<'_>, charge_id: Option<String>, status: LedgerStatus) {
        self.entries.push(LedgerEntry {
            idempotency_key: key.to_owned(),
            charge_id,
            order_id: body.order_id,
            amount: body.amount.get().to_owned(),
            currency: body.currency.to_owned(),
            times_posted: 0, // filled in when read
            status,
        });
    }

    fn remember(&mut self, key: &str, body: &[u8], answer: Response, since: Instant) {
        self.keys.insert(key.to_owned(), Remembered { body: body.into(), answer, since });
    }

    fn remembered(&self, key: &str, now: Instant) -> Option<&Remembered> {
        let alive = |known: &&Remembered| self.key_life.is_none_or(|life| now.duration_since(known.since) < life);
        self.keys.get(key).filter(alive)
    }
}

/// The answer with which an entry was booked.
fn charge_again(entry: &LedgerEntry) -> Option<Response> {
    let amount = RawValue::from_string(entry.amount.clone()).ok()?;
    Some(Response::json(&Charge {
        id: entry.charge_id.as_deref()?,
        status: "succeeded",
        order_id: entry.order_id,
        amount: &amount,
        currency: &entry.currency,
        idempotency_key: &entry.idempotency_key,
    }))
}

pub(super) fn order_id(body: &[u8]) -> Option<i64> {
    serde_json::from_slice::<Body<'_>>(body).ok().map(|body| body.order_id)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BODY: &[u8] = br#"{"orderId":7,"amount":10.00,"currency":"EUR"}"#;

    fn book(ledger: &mut Ledger, lie: Option<&Reply>) -> Booked {
        ledger.note_post("k", BODY);
        ledger.book("k", BODY, lie, Instant::now())
    }

    #[test]
    fn a_known_key_gets_its_stored_answer_and_another_body_is_refused() {
        let mut ledger = Ledger::new(None);
        let Booked::New(first) = book(&mut ledger, None) else { panic!("new") };
        assert_eq!(book(&mut ledger, None), Booked::Replayed(first));
        let other = br#"{"orderId":7,"amount":10.0,"currency":"EUR"}"#;
        assert!(!ledger.note_post("k", other));
        assert_eq!(ledger.book("k", other, None, Instant::now()), Booked::OtherBody);
        let entries = ledger.entries();
        assert_eq!(entries.len(), 1);
        assert_eq!((entries[0].amount.as_str(), entries[0].times_posted), ("10.00", 3));
    }

    #[test]
    fn a_key_that_is_worked_on_is_in_progress_for_everybody_else() {
        let mut ledger = Ledger::new(None);
        ledger.begin_work("k").unwrap();
        assert_eq!(ledger.begin_work("k"), Err(Booked::InProgress));
        assert_eq!(book(&mut ledger, None), Booked::InProgress);
        assert!(matches!(ledger.book_held("k", BODY, Instant::now()), Booked::New(_)));
        ledger.end_work("k");
        assert!(matches!(book(&mut ledger, None), Booked::Replayed(_)));
    }

    #[test]
    fn a_stored_failure_hides_a_charge_that_the_ledger_shows() {
        let mut ledger = Ledger::new(None);
        let lie = Reply { status: 500, charge: true, store: true, ..Reply::default() };
        let Booked::New(first) = book(&mut ledger, Some(&lie)) else { panic!("new") };
        assert_eq!(first.status, 500);
        assert_eq!(book(&mut ledger, None), Booked::Replayed(first));
        assert_eq!(ledger.entries()[0].status, LedgerStatus::Charged);
    }

    #[test]
    fn a_refusal_that_is_not_stored_leaves_the_key_free() {
        let mut ledger = Ledger::new(None);
        let lie = Reply { status: 503, ..Reply::default() };
        assert!(matches!(book(&mut ledger, Some(&lie)), Booked::New(answer) if answer.status == 503));
        assert!(ledger.entries().is_empty());
        assert!(matches!(book(&mut ledger, None), Booked::New(answer) if answer.status == 200));
    }

    #[test]
    fn a_forgotten_key_is_charged_again_and_the_ledger_shows_both() {
        let mut ledger = Ledger::new(Some(Duration::from_secs(60)));
        let begin = Instant::now();
        for (after, entries) in [(0, 1), (59, 1), (60, 2)] {
            ledger.note_post("k", BODY);
            ledger.book("k", BODY, None, begin + Duration::from_secs(after));
            assert_eq!(ledger.entries().len(), entries, "after {after} s");
        }
        ledger.forget_keys();
        book(&mut ledger, None);
        assert_eq!(ledger.entries().len(), 3);
        assert!(ledger.entries().iter().all(|entry| entry.times_posted == 4));
    }

    #[test]
    fn what_is_no_charge_is_refused() {
        let mut ledger = Ledger::new(None);
        assert!(matches!(ledger.book("", BODY, None, Instant::now()), Booked::Invalid(_)));
        assert!(matches!(ledger.book("k", b"{}", None, Instant::now()), Booked::Invalid(_)));
        assert!(ledger.entries().is_empty());
    }
}
