//! Which post is answered how.
//!
//! In: rules, and the key and order id of each post. Out: the act of the first rule that matches and is not used up; none = honest.
//! Invariant: the same script and the same keys give the same acts, in whatever order the posts arrive (but for `nth`).

use std::collections::HashMap;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// One rule of a script.
///
/// ```json
/// {"when": {"share_per_mille": 50, "seed": 7}, "limit_per_key": 1, "act": {"close": {"charge": true}}}
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// Which posts it is for.
    #[serde(default)]
    pub when: When,
    /// How often it acts at most; `None` is without limit.
    #[serde(default)]
    pub limit: Option<u64>,
    /// How often it acts at most on one key; `None` is without limit.
    #[serde(default)]
    pub limit_per_key: Option<u64>,
    /// What happens.
    pub act: Act,
}

/// All fields that are given must match; none given = every post.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct When {
    /// The nth post since the start, counted from 1.
    #[serde(default)]
    pub nth: Option<u64>,
    /// The idempotency key as it was sent.
    #[serde(default)]
    pub key: Option<String>,
    /// The order id in the body.
    #[serde(default)]
    pub order_id: Option<i64>,
    /// This many of 1,000 keys, chosen by a hash of seed and key.
    #[serde(default)]
    pub share_per_mille: Option<u64>,
    /// The seed of that choice.
    #[serde(default)]
    pub seed: u64,
}

/// What happens to a post. "Charged" means booked in the ledger as an honest charge.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Act {
    /// Works that long, then charges and answers; the same key gets 409 meanwhile.
    Delay {
        /// Milliseconds.
        ms: u64,
    },
    /// Charges at once and answers when released; the same key gets 409 meanwhile.
    Hold,
    /// Never answers.
    Silence {
        /// Whether it charges first.
        #[serde(default)]
        charge: bool,
    },
    /// Closes the connection without an answer.
    Close {
        /// Whether it charges first.
        #[serde(default)]
        charge: bool,
        /// By a reset instead of an orderly end.
        #[serde(default)]
        reset: bool,
    },
    /// Charges, sends the first half of the answer and closes.
    HalfAnswer,
    /// Charges and sends the answer byte by byte: no read is ever idle for long, and the whole never comes.
    Drip {
        /// Milliseconds between two bytes.
        ms: u64,
    },
    /// Charges, answers, and closes the connection that the client believes to be kept alive.
    AnswerThenClose,
    /// 409, as if the key were being worked on.
    InProgress,
    /// Any other answer.
    Reply(Reply),
}

/// An answer made up by a rule. A key that has a stored answer gets that one instead.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reply {
    /// The status code.
    pub status: u16,
    /// `Retry-After`, as it stands: seconds, a date, or nonsense.
    #[serde(default)]
    pub retry_after: Option<String>,
    /// `Retry-After` as the HTTP date so many seconds from the answer; negative is in the past.
    #[serde(default)]
    pub retry_after_date_s: Option<i64>,
    /// `Location`, for redirects.
    #[serde(default)]
    pub location: Option<String>,
    /// `Content-Type`; `application/json` unless given.
    #[serde(default)]
    pub content_type: Option<String>,
    /// The body; a JSON error that fits the status unless given.
    #[serde(default)]
    pub body: Option<String>,
    /// The ledger charges all the same.
    #[serde(default)]
    pub charge: bool,
    /// The answer becomes the stored answer of its key and is replayed.
    #[serde(default)]
    pub store: bool,
}

impl Rule {
    /// A rule for every post.
    #[must_use]
    pub fn always(act: Act) -> Self {
        Self { when: When::default(), limit: None, limit_per_key: None, act }
    }

    /// A rule for the next post, once.
    #[must_use]
    pub fn once(act: Act) -> Self {
        Self { limit: Some(1), ..Self::always(act) }
    }

    /// A rule for one order id.
    #[must_use]
    pub fn for_order(order_id: i64, act: Act) -> Self {
        Self { when: When { order_id: Some(order_id), ..When::default() }, ..Self::always(act) }
    }

    /// A rule for `per_mille` of 1,000 keys, once for each of them.
    #[must_use]
    pub fn for_share(per_mille: u64, seed: u64, act: Act) -> Self {
        let when = When { share_per_mille: Some(per_mille), seed, ..When::default() };
        Self { when, limit: None, limit_per_key: Some(1), act }
    }

    /// The same rule, used up after `n` acts.
    #[must_use]
    pub fn times(self, n: u64) -> Self {
        Self { limit: Some(n), ..self }
    }
}

impl Act {
    /// 402, stored: the card was declined.
    #[must_use]
    pub fn declined() -> Self {
        Self::Reply(Reply { status: 402, store: true, ..Reply::default() })
    }

    /// 500, stored and replayed without end, though the charge was made.
    #[must_use]
    pub fn stored_failure() -> Self {
        Self::Reply(Reply { status: 500, charge: true, store: true, ..Reply::default() })
    }

    /// A bare status, with nothing charged and nothing stored.
    #[must_use]
    pub fn status(status: u16) -> Self {
        Self::Reply(Reply { status, ..Reply::default() })
    }

    /// What a proxy says that has lost its way: 200 and a page, though the charge was made.
    #[must_use]
    pub fn html() -> Self {
        let (content_type, body) = (Some("text/html".to_owned()), Some("<html><body>Welcome</body></html>".to_owned()));
        Self::Reply(Reply { status: 200, charge: true, content_type, body, ..Reply::default() })
    }

    /// 302 to another place of the stub, with nothing charged.
    #[must_use]
    pub fn redirect() -> Self {
        Self::Reply(Reply { status: 302, location: Some("/v1/charges?idempotency_key=elsewhere".to_owned()), ..Reply::default() })
    }

    /// 429 or 503 with `Retry-After`.
    #[must_use]
    pub fn busy(status: u16, retry_after: impl Into<String>) -> Self {
        Self::Reply(Reply { status, retry_after: Some(retry_after.into()), ..Reply::default() })
    }
}

/// The rules with what they have used up.
#[derive(Debug, Default)]
pub(super) struct Script {
    rules: Vec<Standing>,
    posts: u64,
}

#[derive(Debug)]
struct Standing {
    rule: Rule,
    acted: u64,
    acted_on: HashMap<String, u64>,
}

impl Script {
    pub(super) fn new(rules: Vec<Rule>) -> Self {
        let mut script = Self::default();
        script.add(rules);
        script
    }

    pub(super) fn add(&mut self, rules: impl IntoIterator<Item = Rule>) {
        self.rules.extend(rules.into_iter().map(|rule| Standing { rule, acted: 0, acted_on: HashMap::new() }));
    }

    pub(super) fn clear(&mut self) {
        self.rules.clear();
    }

    /// The act for the next post.
    pub(super) fn next(&mut self, key: &str, order_id: Option<i64>) -> Option<Act> {
        self.posts += 1;
        let nth = self.posts;
        let standing = self.rules.iter_mut().find(|standing| standing.matches(nth, key, order_id))?;
        standing.acted += 1;
        if standing.rule.limit_per_key.is_some() {
            *standing.acted_on.entry(key.to_owned()).or_default() += 1;
        }
        Some(standing.rule.act.clone())
    }
}

impl Standing {
    fn matches(&self, nth: u64, key: &str, order_id: Option<i64>) -> bool {
        let when = &self.rule.when;
        self.rule.limit.is_none_or(|limit| self.acted < limit)
            && self.rule.limit_per_key.is_none_or(|limit| self.acted_on.get(key).is_none_or(|acted| *acted < limit))
            && when.nth.is_none_or(|wanted| wanted == nth)
            && when.key.as_deref().is_none_or(|wanted| wanted == key)
            && when.order_id.is_none_or(|wanted| Some(wanted) == order_id)
            && when.share_per_mille.is_none_or(|share| xxh3_64_with_seed(key.as_bytes(), when.seed) % 1000 < share)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_rule_that_matches_and_is_not_used_up_acts() {
        let mut script = Script::new(vec![
            Rule::for_order(7, Act::declined()).times(1),
            Rule { when: When { nth: Some(3), ..When::default() }, ..Rule::always(Act::InProgress) },
            Rule { when: When { key: Some("a".to_owned()), ..When::default() }, ..Rule::always(Act::Hold) },
        ]);
        let acts: Vec<_> = [("b", 7), ("b", 7), ("b", 1), ("a", 7), ("b", 1)]
            .into_iter()
            .map(|(key, order_id)| script.next(key, Some(order_id)))
            .collect();
        assert_eq!(acts, [Some(Act::declined()), None, Some(Act::InProgress), Some(Act::Hold), None]);
        script.clear();
        assert_eq!(script.next("a", None), None);
    }

    #[test]
    fn a_share_is_chosen_by_seed_and_key_and_acts_once_for_each_of_its_keys() {
        let chosen = |seed| {
            let mut script = Script::new(vec![Rule::for_share(100, seed, Act::HalfAnswer)]);
            let keys: Vec<_> = (0..1000).map(|n| format!("key-{n}")).collect();
            let chosen: Vec<_> = keys.iter().filter(|key| script.next(key, None).is_some()).cloned().collect();
            assert!(keys.iter().all(|key| script.next(key, None).is_none()), "each key once");
            chosen
        };
        assert_eq!(chosen(1), chosen(1));
        assert_ne!(chosen(1), chosen(2));
        assert!((50..200).contains(&chosen(1).len()), "{}", chosen(1).len());
    }

    #[test]
    fn a_script_is_read_from_json_and_unknown_words_are_refused() {
        let json = r#"[
            {"when": {"share_per_mille": 50, "seed": 7}, "limit_per_key": 1, "act": {"close": {"charge": true}}},
            {"when": {"nth": 5}, "act": "hold"},
            {"limit": 2, "act": {"delay": {"ms": 20}}},
            {"when": {"order_id": 3}, "act": {"reply": {"status": 503, "retry_after": "2"}}},
            {"act": {"drip": {"ms": 9}}},
            {"act": {"reply": {"status": 429, "retry_after_date_s": -5}}}
        ]"#;
        let rules: Vec<Rule> = serde_json::from_str(json).unwrap();
        assert_eq!(rules[0], Rule::for_share(50, 7, Act::Close { charge: true, reset: false }));
        assert_eq!(rules[3], Rule::for_order(3, Act::busy(503, "2")));
        assert_eq!(rules[4].act, Act::Drip { ms: 9 });
        for wrong in [r#"{"act": "explode"}"#, r#"{"act": "hold", "limits": 1}"#, r#"{"when": {"nht": 1}, "act": "hold"}"#] {
            assert!(serde_json::from_str::<Rule>(wrong).is_err(), "{wrong}");
        }
    }
}
