//! The table that says what a provider's answer means.
//!
//! In: status, headers and body, whether an earlier answer for the same event was unknown, the profile, the time. Out: one [`Answer`].
//! It owns nothing and calls nobody.
//!
//! Invariant: what the table does not know is *unknown*, never "not charged".
//!
//! | status | answer |
//! | --- | --- |
//! | 2xx with a charge in the body | charged |
//! | 2xx without one | unknown |
//! | 3xx | configuration (and unknown: who knows what the other place did) |
//! | 400, 422 | rejected; another body under the key: mismatch |
//! | 401, 403, 404 | configuration |
//! | 402 | declined |
//! | 409 | in progress; another body under the key: mismatch |
//! | 429 | too many: not started |
//! | 503 | unavailable: unknown |
//! | anything else | unknown |
//!
//! A refusal (400, 402, 422) after an unknown answer proves nothing, unless the provider replays stored answers: it stays unknown.
//! A refusal in HTML comes from something that stands in front of the provider: unknown.
//!
//! What is said of the provider as a whole (it may open the breaker, and then stands in the log and on the open part of the admin port) has
//! the status, type and code in it and not the message: that one may quote the token or what was sent. A message stays with its event.

use std::fmt::Write as _;
use std::time::{Duration, SystemTime};

use reqwest::StatusCode;
use reqwest::header::{CONTENT_TYPE, HeaderMap, RETRY_AFTER};
use serde::Deserialize;
use serde_json::value::RawValue;

use super::profile::Profile;
use crate::text::prints;

/// What one call told us.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The money moves.
    Charged {
        /// The provider's name for the charge.
        charge_id: String,
    },
    /// A business "no", for good.
    Declined {
        /// In the provider's words.
        error: String,
    },
    /// The provider does not accept this charge, for good, and has not made it.
    Rejected {
        /// In the provider's words.
        error: String,
    },
    /// The key is known with another body: somebody charged something under it, and it was not this.
    Mismatch {
        /// In the provider's words.
        error: String,
    },
    /// Address or credentials are wrong: no event's fault, and every event's trouble.
    Configuration {
        /// In words.
        error: String,
        /// The provider pointed elsewhere. That is not followed, and counts as unknown.
        redirect: bool,
        /// How long nobody should call.
        wait: Duration,
    },
    /// An earlier request with this key is being worked on.
    InProgress {
        /// In the provider's words.
        error: String,
        /// When to ask again, if it said so.
        wait: Option<Duration>,
    },
    /// Refused unread: too many calls.
    TooMany {
        /// How long nobody should call.
        wait: Duration,
    },
    /// The provider was not reached: nothing was sent.
    NotReached {
        /// In words.
        error: String,
        /// When to try again.
        wait: Duration,
    },
    /// The provider, or something before it, is overloaded or down.
    Unavailable {
        /// In words.
        error: String,
        /// How long nobody should call.
        wait: Duration,
    },
    /// Nobody knows.
    Unknown {
        /// In words.
        error: String,
        /// When to ask again, if it said so.
        wait: Option<Duration>,
        /// The provider has worked on the request: it is there, and only what it did before is open.
        served: bool,
    },
}

/// What the provider knows of a charge it was asked about, without being asked to make it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// It was made.
    Charge {
        /// The provider's name for it.
        charge_id: String,
    },
    /// The provider has none under this key, as far as it knows by now.
    Nothing,
    /// That was no answer to the question; this is what it was.
    Unclear(Answer),
}

/// A whole answer as it came.
#[derive(Clone, Copy, Debug)]
pub struct Reply<'a> {
    /// The status.
    pub status: StatusCode,
    /// The headers.
    pub headers: &'a HeaderMap,
    /// The body.
    pub body: &'a [u8],
}

/// How long nobody calls after a 429 or 503 without a usable `Retry-After`, and after a refused connection.
const DEFAULT_WAIT: Duration = Duration::from_secs(1);
/// The same after a configuration answer, which only a person can change.
const CONFIGURATION_WAIT: Duration = Duration::from_secs(5);
/// The shortest wait that is taken from a provider: `Retry-After: 0` must not make a busy loop.
const SHORTEST_WAIT: Duration = Duration::from_millis(100);
/// The longest charge id that is taken for one, in bytes.
const LONGEST_CHARGE_ID: usize = 255;
/// How much of the provider's words is kept, in characters.
const LONGEST_ERROR: usize = 300;
/// A longer type or code is none.
const LONGEST_CODE: usize = 64;

impl Answer {
    /// Classifies a whole answer. `had_unknown` = an earlier answer for this event was unknown.
    #[must_use]
    pub fn classify(reply: Reply<'_>, had_unknown: bool, profile: &Profile, now: SystemTime) -> Self {
        let status = reply.status.as_u16();
        let wait = retry_after(reply.headers, profile.retry_after_cap, now);
        let (error, status_and_code) = (|| reply.error(), || reply.status_and_code());
        let unknown = |error| Self::Unknown { error, wait, served: false };
        let proven = |refused: Self| {
            if reply.is_html() {
                unknown(format!("{}; it is not the provider who says so", status_and_code()))
            } else if had_unknown && !profile.replays_stored_answers {
                let error = format!("{}; an earlier answer was unknown, so this proves nothing", error());
                Self::Unknown { error, wait, served: true }
            } else {
                refused
            }
        };
        match status {
            200..=299 => match charge_id(reply.body, profile) {
                Some(charge_id) => Self::Charged { charge_id },
                None => unknown(format!("HTTP {status} without a charge in the body")),
            },
            300..=399 => Self::Configuration { error: status_and_code(), redirect: true, wait: wait.unwrap_or(CONFIGURATION_WAIT) },
            400 | 409 | 422 if reply.is_mismatch(profile) => Self::Mismatch { error: error() },
            400 | 422 => proven(Self::Rejected { error: error() }),
            401 | 403 | 404 => {
                Self::Configuration { error: status_and_code(), redirect: false, wait: wait.unwrap_or(CONFIGURATION_WAIT) }
            }
            402 => proven(Self::Declined { error: error() }),
            409 => Self::InProgress { error: error(), wait },
            429 => Self::TooMany { wait: wait.unwrap_or(DEFAULT_WAIT) },
            503 => Self::Unavailable { error: status_and_code(), wait: wait.unwrap_or(DEFAULT_WAIT) },
            _ => unknown(status_and_code()),
        }
    }

    /// A call that failed before the whole answer was there.
    #[must_use]
    pub fn failed(is_connect: bool, error: String) -> Self {
        if is_connect { Self::not_reached(error) } else { Self::unknown(error) }
    }

    /// A connection that could not be made.
    #[must_use]
    pub const fn not_reached(error: String) -> Self {
        Self::NotReached { error, wait: DEFAULT_WAIT }
    }

    /// Anything that went wrong once the request may have been written.
    #[must_use]
    pub const fn unknown(error: String) -> Self {
        Self::Unknown { error, wait: None, served: false }
    }

    /// A configuration answer that only this event gets, while others are served: it is the event that is refused. `had_unknown` as in
    /// [`Self::classify`].
    #[must_use]
    pub fn of_one_event(self, had_unknown: bool) -> Self {
        match self {
            Self::Configuration { error, redirect, wait: _ } => {
                let error = format!("{error}; other events are served");
                if redirect || had_unknown { Self::unknown(error) } else { Self::Rejected { error } }
            }
            other => other,
        }
    }

    /// It is now open whether this event was charged.
    #[must_use]
    pub const fn is_unknown(&self) -> bool {
        match self {
            Self::Mismatch { .. } | Self::InProgress { .. } | Self::Unavailable { .. } | Self::Unknown { .. } => true,
            Self::Configuration { redirect, .. } => *redirect,
            Self::Charged { .. }
            | Self::Declined { .. }
            | Self::Rejected { .. }
            | Self::TooMany { .. }
            | Self::NotReached { .. } => false,
        }
    }

    /// How long nobody at all should call this provider.
    #[must_use]
    pub const fn wait_for_all(&self) -> Option<Duration> {
        match self {
            Self::Configuration { wait, .. } | Self::TooMany { wait } | Self::Unavailable { wait, .. } => Some(*wait),
            Self::Charged { .. }
            | Self::Declined { .. }
            | Self::Rejected { .. }
            | Self::Mismatch { .. }
            | Self::InProgress { .. }
            | Self::NotReached { .. }
            | Self::Unknown { .. } => None,
        }
    }

    /// The class, for metrics and for the attempt's row.
    #[must_use]
    pub const fn class(&self) -> &'static str {
        match self {
            Self::Charged { .. } => "charged",
            Self::Declined { .. } => "declined",
            Self::Rejected { .. } => "rejected",
            Self::Mismatch { .. } => "mismatch",
            Self::Configuration { redirect: false, .. } => "configuration",
            Self::Configuration { redirect: true, .. } => "redirect",
            Self::InProgress { .. } => "in_progress",
            Self::TooMany { .. } => "too_many",
            Self::NotReached { .. } => "not_reached",
            Self::Unavailable { .. } => "unavailable",
            Self::Unknown { .. } => "unknown",
        }
    }
}

impl Found {
    /// Classifies the answer to the question for `key`. Only what repeats the key can be about it.
    #[must_use]
    pub fn classify(reply: Reply<'_>, key: &str, profile: &Profile, now: SystemTime) -> Self {
        let missing = || reply.error_fields().code.is_some_and(|code| profile.is_no_such_charge(&code));
        match reply.status.as_u16() {
            200 => match listed(reply.body) {
                Some(charges) if charges.is_empty() => Self::Nothing,
                Some(charges) => {
                    let ours = charges.iter().filter(|charge| charge.idempotency_key.as_deref() == Some(key));
                    match ours.filter_map(|charge| charge.made(profile)).next() {
                        Some(charge_id) => Self::Charge { charge_id },
                        // A charge that failed, or another one's: whatever it is, it is not "there is none".
                        None => Self::Unclear(Answer::unknown("HTTP 200, but no charge under this key that was made".to_owned())),
                    }
                }
                None => Self::Unclear(Answer::unknown("HTTP 200 without a charge or a list of charges".to_owned())),
            },
            404 if missing() => Self::Nothing,
            _ => Self::Unclear(match Answer::classify(reply, true, profile, now) {
                // A question is not refused for what it would do.
                Answer::Charged { .. } | Answer::Declined { .. } | Answer::Rejected { .. } | Answer::Mismatch { .. } => {
                    Answer::unknown(reply.status_and_code())
                }
                other => other,
            }),
        }
    }
}

/// `None`: it is no object, or not this one. An array is none, though it could be read as the fields in their order.
fn object<'a, T: Deserialize<'a>>(json: &'a [u8]) -> Option<T> {
    let is_object = json.trim_ascii_start().starts_with(b"{");
    is_object.then(|| serde_json::from_slice(json).ok()).flatten()
}

/// The charges in an answer: one object, or a list in `data`.
fn listed(body: &[u8]) -> Option<Vec<Charge>> {
    #[derive(Deserialize)]
    struct List<'a> {
        #[serde(borrow)]
        data: Vec<&'a RawValue>,
    }
    let list = object::<List<'_>>(body).and_then(|list| list.data.iter().map(|charge| object(charge.get().as_bytes())).collect());
    list.or_else(|| object(body).map(|charge| vec![charge]))
}

/// The part of an error body that is understood: `{"error": {"type", "code", "message"}}`.
#[derive(Deserialize)]
struct ErrorBody<'a> {
    #[serde(borrow)]
    error: &'a RawValue,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ErrorFields {
    r#type: Option<String>,
    code: Option<String>,
    message: Option<String>,
}

impl Reply<'_> {
    fn is_mismatch(&self, profile: &Profile) -> bool {
        let ErrorFields { r#type, code, message: _ } = self.error_fields();
        profile.is_other_body(&r#type.unwrap_or_default(), &code.unwrap_or_default())
    }

    fn is_html(&self) -> bool {
        let content_type = self.headers.get(CONTENT_TYPE).map_or(&b""[..], |value| value.as_bytes());
        content_type.to_ascii_lowercase().starts_with(b"text/html") || self.body.trim_ascii_start().starts_with(b"<")
    }

    fn error_fields(&self) -> ErrorFields {
        let error = object::<ErrorBody<'_>>(self.body).and_then(|body| object(body.error.get().as_bytes()));
        error.unwrap_or_default()
    }

    /// The status, and type and code where they are such: a word for a machine.
    fn status_and_code(&self) -> String {
        let ErrorFields { r#type, code, message: _ } = self.error_fields();
        let words = [r#type, code].into_iter().flatten().filter(|word| is_code(word));
        words.fold(format!("HTTP {}", self.status.as_u16()), |text, word| format!("{text}: {word}"))
    }

    /// The same with the message; nothing else of the body is repeated.
    fn error(&self) -> String {
        let mut text = self.status_and_code();
        if let Some(message) = self.error_fields().message {
            let _ = write!(text, ": {message}");
        }
        text.chars().filter(|c| prints(*c)).take(LONGEST_ERROR).collect()
    }
}

fn is_code(word: &str) -> bool {
    let is_part = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
    !word.is_empty() && word.len() <= LONGEST_CODE && word.bytes().all(is_part)
}

/// The charge's id, if the body is a charge: an object whose `id` is a text that can be stored, and whose `status`, if it has one, says
/// that the money moves.
fn charge_id(body: &[u8], profile: &Profile) -> Option<String> {
    object::<Charge>(body)?.made(profile)
}

/// The part of a charge that is understood.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Charge {
    id: String,
    status: Option<String>,
    #[serde(alias = "idempotency_key")]
    idempotency_key: Option<String>,
}

impl Charge {
    /// Its id, if the money moves and the id can be stored.
    fn made(&self, profile: &Profile) -> Option<String> {
        let storable = !self.id.is_empty() && self.id.len() <= LONGEST_CHARGE_ID && self.id.chars().all(prints);
        let moves = self.status.as_deref().is_none_or(|status| profile.is_success(status));
        (storable && moves).then(|| self.id.clone())
    }
}

/// `Retry-After` in seconds or as an HTTP date, within [`SHORTEST_WAIT`] and `cap`; `None` when there is none that can be read.
fn retry_after(headers: &HeaderMap, cap: Duration, now: SystemTime) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    let wait = if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        // More digits than fit are beyond every cap.
        Duration::from_secs(text.parse().unwrap_or(u64::MAX))
    } else {
        httpdate::parse_http_date(text).ok()?.duration_since(now).unwrap_or_default()
    };
    Some(wait.max(SHORTEST_WAIT).min(cap))
}

#[cfg(test)]
mod tests {
    use super::super::profile::tests::profile;
    use super::*;

    const CHARGE: &str = r#"{"id":"ch_1","status":"succeeded","more":1}"#;
    const NO: &str = r#"{"error":{"type":"card_error","code":"card_declined","message":"no funds"}}"#;
    const REUSED: &str = r#"{"error":{"type":"idempotency_error","message":"other parameters"}}"#;
    const IN_USE: &str = r#"{"error":{"type":"idempotency_error","code":"idempotency_key_in_use"}}"#;
    const HTML: &str = "\n<html><body>Bad Request</body></html>";

    fn now() -> SystemTime {
        httpdate::parse_http_date("Sun, 06 Nov 1994 08:49:37 GMT").unwrap()
    }

    fn with(status: u16, headers: &[(&'static str, &str)], body: &str, had_unknown: bool, profile: &Profile) -> Answer {
        let headers = headers.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect();
        let reply = Reply { status: StatusCode::from_u16(status).unwrap(), headers: &headers, body: body.as_bytes() };
        Answer::classify(reply, had_unknown, profile, now())
    }

    fn classify(status: u16, body: &str) -> Answer {
        with(status, &[], body, false, &profile())
    }

    // CASES G05: by status and error type, and unknown for everything else.
    #[test]
    fn every_status_has_one_class() {
        for status in 100..=999 {
            let expected = match status {
                200..=299 => ["charged", "unknown", "unknown"],
                300..=399 => ["redirect"; 3],
                400 | 422 => ["rejected", "rejected", "mismatch"],
                401 | 403 | 404 => ["configuration"; 3],
                402 => ["declined"; 3],
                409 => ["in_progress", "in_progress", "mismatch"],
                429 => ["too_many"; 3],
                503 => ["unavailable"; 3],
                _ => ["unknown"; 3],
            };
            assert_eq!([CHARGE, NO, REUSED].map(|body| classify(status, body).class()), expected, "{status}");
        }
    }

    #[test]
    fn only_a_charge_in_the_body_is_a_charge() {
        assert_eq!(classify(201, CHARGE), Answer::Charged { charge_id: "ch_1".to_owned() });
        assert_eq!(classify(200, r#"{"id":"ch_1"}"#).class(), "charged");
        let long = format!(r#"{{"id":"{}"}}"#, "x".repeat(256));
        for body in [
            "",
            HTML,
            "null",
            "[]",
            "{}",
            r#"{"id":7}"#,
            r#"{"id":""}"#,
            r#"{"id":"a\u0000b"}"#,
            r#"{"id":"ch_1","status":"pending"}"#,
            r#"{"id":"ch_1","status":"failed"}"#,
            r#"{"id":"ch_1","status":"succ"#,
            r#"{"error":{"type":"card_error"}}"#,
            r#"["ch_1","succeeded",null]"#,
            &long,
        ] {
            assert_eq!(classify(200, body).class(), "unknown", "{body}");
        }
    }

    #[test]
    fn a_refusal_after_an_unknown_answer_stays_unknown_unless_answers_are_replayed() {
        let replays = Profile { replays_stored_answers: true, ..profile() };
        for (status, class) in [(400, "rejected"), (402, "declined"), (422, "rejected")] {
            assert_eq!(with(status, &[], NO, false, &profile()).class(), class);
            assert!(matches!(with(status, &[], NO, true, &profile()), Answer::Unknown { served: true, .. }), "it is there");
            assert_eq!(with(status, &[], NO, true, &replays).class(), class);
        }
        assert_eq!(with(200, &[], CHARGE, true, &profile()).class(), "charged");
        assert_eq!(with(429, &[], NO, true, &profile()).class(), "too_many");
    }

    #[test]
    fn a_refusal_in_html_is_not_the_providers() {
        for status in [200, 400, 402, 422] {
            assert!(matches!(classify(status, HTML), Answer::Unknown { served: false, .. }), "{status}");
            assert_eq!(with(status, &[("content-type", "Text/HTML; charset=utf-8")], "no", false, &profile()).class(), "unknown");
        }
        assert_eq!(classify(402, "").class(), "declined", "an empty body is nobody else's");
    }

    #[test]
    fn a_key_in_use_is_no_mismatch() {
        assert_eq!(classify(409, IN_USE).class(), "in_progress");
        assert_eq!(classify(409, r#"{"error":{"code":"parameter_mismatch"}}"#).class(), "mismatch");
        assert_eq!(classify(400, r#"{"error":{"type":"idempotency_mismatch"}}"#).class(), "mismatch");
        assert_eq!(with(422, &[], REUSED, true, &profile()).class(), "mismatch");
    }

    #[test]
    fn what_leaves_the_charge_open_counts_as_unknown() {
        for (status, body, unknown) in [
            (200, CHARGE, false),
            (200, HTML, true),
            (302, "", true),
            (400, NO, false),
            (401, NO, false),
            (402, NO, false),
            (409, IN_USE, true),
            (422, REUSED, true),
            (429, NO, false),
            (500, NO, true),
            (503, NO, true),
        ] {
            assert_eq!(classify(status, body).is_unknown(), unknown, "{status}");
        }
        assert!(!Answer::not_reached(String::new()).is_unknown());
        assert!(Answer::unknown(String::new()).is_unknown());
    }

    #[test]
    fn retry_after_is_read_in_seconds_and_as_a_date_and_is_bounded() {
        let second = Duration::from_secs(1);
        for (text, wait) in [
            ("2", Some(2 * second)),
            (" 3 ", Some(3 * second)),
            ("0", Some(SHORTEST_WAIT)),
            ("86400", Some(60 * second)),
            ("99999999999999999999999", Some(60 * second)),
            ("Sun, 06 Nov 1994 08:49:47 GMT", Some(10 * second)),
            ("Sunday, 06-Nov-94 08:49:47 GMT", Some(10 * second)),
            ("Sun Nov  6 08:49:47 1994", Some(10 * second)),
            ("Sun, 06 Nov 1994 08:49:37 GMT", Some(SHORTEST_WAIT)),
            ("Sat, 05 Nov 1994 08:49:37 GMT", Some(SHORTEST_WAIT)),
            ("Fri, 31 Dec 9999 23:59:59 GMT", Some(60 * second)),
            ("", None),
            ("-1", None),
            ("1.5", None),
            ("soon", None),
        ] {
            let answer = |status| with(status, &[("retry-after", text)], NO, false, &profile());
            assert_eq!(answer(429), Answer::TooMany { wait: wait.unwrap_or(DEFAULT_WAIT) }, "{text:?}");
            assert_eq!(answer(503).wait_for_all(), Some(wait.unwrap_or(DEFAULT_WAIT)), "{text:?}");
            assert_eq!(answer(401).wait_for_all(), Some(wait.unwrap_or(CONFIGURATION_WAIT)), "{text:?}");
            let Answer::Unknown { wait: own, .. } = answer(500) else { panic!("unknown") };
            assert_eq!(own, wait, "{text:?}");
            assert_eq!(answer(500).wait_for_all(), None, "only this event's");
        }
    }

    #[test]
    fn only_an_answer_that_repeats_the_key_tells_what_became_of_a_charge() {
        let found = |status: u16, body: &str| {
            let headers = HeaderMap::new();
            let reply = Reply { status: StatusCode::from_u16(status).unwrap(), headers: &headers, body: body.as_bytes() };
            Found::classify(reply, "key", &profile(), now())
        };
        let charge = || Found::Charge { charge_id: "ch_1".to_owned() };
        let ours = r#"{"id":"ch_1","status":"succeeded","idempotencyKey":"key"}"#;
        assert_eq!(found(200, ours), charge());
        assert_eq!(found(200, r#"{"id":"ch_1","idempotency_key":"key"}"#), charge());
        assert_eq!(found(200, &format!(r#"{{"data":[{{"id":"ch_0","idempotencyKey":"other"}},{ours}]}}"#)), charge());
        assert_eq!(found(200, r#"{"data":[]}"#), Found::Nothing);
        for code in ["resource_missing", "charge_not_found"] {
            assert_eq!(found(404, &format!(r#"{{"error":{{"code":"{code}"}}}}"#)), Found::Nothing);
        }
        for (status, body, class) in [
            (200, r#"{"id":"ch_1","status":"succeeded"}"#, "unknown"),
            (200, r#"{"id":"ch_1","status":"succeeded","idempotencyKey":"KEY"}"#, "unknown"),
            (200, r#"{"id":"ch_1","status":"failed","idempotencyKey":"key"}"#, "unknown"),
            (200, r#"{"data":[{"id":"ch_0","idempotencyKey":"other"}]}"#, "unknown"),
            (200, "{}", "unknown"),
            (200, "[]", "unknown"),
            (200, "[[]]", "unknown"),
            (200, r#"{"data":[["ch_1","succeeded","key"]]}"#, "unknown"),
            (404, r#"[["","resource_missing"]]"#, "configuration"),
            (404, r#"{"error":["","resource_missing"]}"#, "configuration"),
            (200, HTML, "unknown"),
            (204, "", "unknown"),
            (201, ours, "unknown"),
            (404, HTML, "configuration"),
            (404, r#"{"error":{"code":"not_found"}}"#, "configuration"),
            (302, "", "redirect"),
            (401, NO, "configuration"),
            (402, NO, "unknown"),
            (400, NO, "unknown"),
            (409, REUSED, "unknown"),
            (429, "", "too_many"),
            (503, "", "unavailable"),
            (500, "", "unknown"),
        ] {
            let Found::Unclear(answer) = found(status, body) else { panic!("{status} {body}") };
            assert_eq!(answer.class(), class, "{status} {body}");
            let stays = matches!(answer, Answer::Unknown { served: true, .. });
            assert!(
                stays || !format!("{answer:?}").contains("no funds"),
                "what may open the breaker quotes no message: {answer:?}"
            );
        }
    }

    #[test]
    fn a_configuration_answer_of_one_event_is_a_refusal_unless_it_could_hide_a_charge() {
        let of_one = |status, had_unknown| classify(status, NO).of_one_event(had_unknown).class();
        for status in [401, 403, 404] {
            assert_eq!((of_one(status, false), of_one(status, true)), ("rejected", "unknown"));
        }
        assert_eq!(of_one(302, false), "unknown");
        assert_eq!(of_one(402, false), "declined");
    }

    #[test]
    fn the_providers_words_are_kept_short_and_clean() {
        let Answer::Declined { error } = classify(402, NO) else { panic!("declined") };
        assert_eq!(error, "HTTP 402: card_error: card_declined: no funds");
        let wild = format!(r#"{{"error":{{"message":"a\u0000b\n{}"}}}}"#, "é".repeat(1000));
        let Answer::Declined { error } = classify(402, &wild) else { panic!("declined") };
        assert!(error.starts_with("HTTP 402: abé") && error.chars().count() == LONGEST_ERROR, "{error}");
        assert_eq!(classify(500, HTML), Answer::unknown("HTTP 500".to_owned()));
        let Answer::Declined { error } = classify(402, r#"{"error":{"message":"1\u202e2\u2028\u200b3\u001b[31m"}}"#) else {
            panic!("declined")
        };
        assert_eq!(error, "HTTP 402: 123[31m");
    }

    #[test]
    fn what_is_said_of_the_provider_as_a_whole_quotes_no_message() {
        let quoting =
            r#"{"error":{"type":"auth_error","code":"bad key: sk_live_1","message":"bad key sk_live_1 for jane@example.com"}}"#;
        for status in [302, 401, 403, 404, 500, 503] {
            let told = format!("{:?}", classify(status, quoting));
            assert!(told.contains(&format!("\"HTTP {status}: auth_error\"")), "{told}");
        }
        let told = format!("{:?}", with(402, &[("content-type", "text/html")], quoting, false, &profile()));
        assert!(told.contains("HTTP 402: auth_error; it is not"), "{told}");
    }
}
