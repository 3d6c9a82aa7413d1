//! What must hold of bytes that strangers choose: records, amounts, headers, the provider's answers, configurations.
//!
//! Each function is a target of libFuzzer (`fuzz_targets/`), and runs in the ordinary tests over `seeds/` and thousands of mutations of
//! them (`tests/fuzz.rs`). Where a rule can be said in another way than the code says it, it is said here in that other way.

use std::collections::HashMap;
use std::ffi::OsString;
use std::time::{Duration, SystemTime};

use onceward::config::Config;
use onceward::event::{AmountFault, Currency, Money, decode};
use onceward::handler::{Event, HeldReason};
use onceward::provider::answer::{Answer, Found, Reply};
use onceward::provider::{AmountForm, Profile, ProviderQuery};
use onceward::record::{Offset, Record};
use onceward::store::packed_headers::{pack, unpack};
use reqwest::StatusCode;
use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderValue, RETRY_AFTER};
use serde_json::value::RawValue;

/// A payload is an event whose rules all hold, the same however it is written down again, or a rejection in words that can be shown.
pub fn record(payload: &[u8]) {
    let event = match decode(Some(payload)) {
        Ok(event) => event,
        Err(rejection) => {
            assert!(matches!(rejection.reason, HeldReason::Undecodable | HeldReason::Invalid));
            assert!(!rejection.error.is_empty() && rejection.error.len() < 4_000);
            return assert_prints(&rejection.error);
        }
    };
    assert!(event.order_id > 0 && event.customer_id > 0 && event.total.minor_units() > 0);
    assert_eq!(event.event_id.get_version_num(), 7);
    let again = decode(Some(event.to_json().as_bytes())).expect("an event can be written down and read");
    assert_eq!((again.digest(), &again), (event.digest(), &event));

    for amount in [AmountForm::Decimal, AmountForm::MinorUnits] {
        let body = Profile { amount, ..profile(false) }.charge_body(event.order_id, event.total);
        assert!(body.iter().all(u8::is_ascii_graphic), "one line of ASCII");
        let fields: HashMap<String, &RawValue> = serde_json::from_slice(&body).expect("JSON");
        let written = fields["amount"].get();
        let read = match amount {
            AmountForm::Decimal => Money::from_decimal(written, event.total.currency()).expect("an amount"),
            AmountForm::MinorUnits => Money::from_minor_units(written.parse().expect("a number"), event.total.currency()),
        };
        assert_eq!(read, event.total);
    }
}

/// A text is exactly the amount that its digits say, or it is none. The first byte chooses the currency.
pub fn amount(data: &[u8]) {
    let Some((choice, text)) = data.split_first() else { return };
    let Ok(text) = std::str::from_utf8(text) else { return };
    let code = ["EUR", "JPY", "KWD", "CLF"][usize::from(*choice) % 4];
    let currency = Currency::from_code(code).expect("a currency");
    let read = Money::from_decimal(text, currency);
    assert_eq!(read.map(Money::minor_units), by_long_hand(text, currency.decimals()), "{text:?} {code}");
    if let Ok(money) = read {
        assert_eq!(Money::from_decimal(&money.decimal(), currency), Ok(money));
    }
}

/// Numbers as JSON's own parser knows them, then digits shifted as one does on paper.
fn by_long_hand(text: &str, decimals: u32) -> Result<i64, AmountFault> {
    let is_number = serde_json::from_str::<&RawValue>(text)
        .is_ok_and(|raw| raw.get() == text && text.starts_with(|c: char| c == '-' || c.is_ascii_digit()));
    if !is_number {
        return Err(AmountFault::NotANumber);
    }
    let (mantissa, exponent) = text.split_once(['e', 'E']).unwrap_or((text, "0"));
    let (sign, mantissa) = mantissa.strip_prefix('-').map_or((1, mantissa), |rest| (-1, rest));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let all = format!("{whole}{fraction}");
    let digits = all.trim_end_matches('0');
    if digits.trim_start_matches('0').is_empty() {
        return Ok(0);
    }
    // No exponent of more digits than this can be made up for by the digits of a text that fits into memory.
    let beyond = if exponent.starts_with('-') { i128::MIN / 4 } else { i128::MAX / 4 };
    let exponent = exponent.parse::<i128>().map_or(beyond, |exponent| exponent.clamp(i128::MIN / 4, i128::MAX / 4));
    let zeros = (all.len() - digits.len()) as i128;
    let places = exponent + zeros - fraction.len() as i128 + i128::from(decimals);
    if places < 0 {
        return Err(AmountFault::TooManyDecimals);
    }
    let digits = digits.trim_start_matches('0');
    if digits.len() as i128 + places > 25 {
        return Err(AmountFault::TooLarge);
    }
    let value = digits.parse::<i128>().expect("digits") * 10_i128.pow(places as u32);
    i64::try_from(sign * value).map_err(|_| AmountFault::TooLarge)
}

/// What is stored of a record's headers is read back as it was, and nothing else is taken for it.
pub fn headers(packed: &[u8]) {
    let Some(headers) = unpack(packed) else { return };
    assert_eq!(pack(&headers), packed);
    let record = Record { partition: 0, offset: Offset(0), timestamp_ms: None, key: None, headers, payload: None };
    let again = Record { headers: unpack(&pack(&record.headers)).expect("just packed"), ..record.clone() };
    assert_eq!(again.digest(), record.digest());
    assert!(record.weight() > packed.len() / 2, "what is counted is what it holds");
}

/// An answer is unknown unless it says otherwise in so many words. Four bytes choose the status, what was known before, and how much of the
/// rest is `Retry-After`; what is left is the body.
pub fn answer(data: &[u8]) {
    const KNOWN: [u16; 16] = [200, 201, 204, 302, 400, 401, 402, 403, 404, 409, 422, 429, 500, 502, 503, 504];
    let Some((&[flags, low, high, length], rest)) = data.split_first_chunk() else { return };
    let number = if flags & 1 == 0 { KNOWN[usize::from(low % 16)] } else { 100 + u16::from_le_bytes([low, high]) % 900 };
    let (had_unknown, replays, html) = (flags & 2 != 0, flags & 4 != 0, flags & 8 != 0);
    let (wait, body) = rest.split_at(usize::from(length).min(rest.len()));
    let mut headers = HeaderMap::new();
    if let Ok(value) = HeaderValue::from_bytes(wait) {
        headers.insert(RETRY_AFTER, value);
    }
    if html {
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/html"));
    }
    let (status, profile) = (StatusCode::from_u16(number).expect("three digits"), profile(replays));
    let reply = Reply { status, headers: &headers, body };
    let said = String::from_utf8_lossy(body);

    let answer = Answer::classify(reply, had_unknown, &profile, SystemTime::UNIX_EPOCH);
    match &answer {
        Answer::Charged { charge_id } => {
            assert!(status.is_success());
            assert_eq!(word(&said, "id").as_ref(), Some(charge_id));
            assert!(!charge_id.is_empty() && charge_id.len() < 256);
            assert_prints(charge_id);
        }
        Answer::Declined { .. } | Answer::Rejected { .. } => {
            assert!([400, 402, 422].contains(&number) && (replays || !had_unknown));
            assert!(!html && !body.trim_ascii_start().starts_with(b"<"), "somebody else says so");
        }
        Answer::TooMany { .. } => assert_eq!(number, 429),
        Answer::Configuration { redirect: false, .. } => assert!([401, 403, 404].contains(&number)),
        Answer::Configuration { redirect: true, .. } => assert!(status.is_redirection()),
        Answer::NotReached { .. } => panic!("it was"),
        Answer::Mismatch { .. } => assert!([400, 409, 422].contains(&number)),
        Answer::InProgress { .. } => assert_eq!(number, 409),
        Answer::Unavailable { .. } => assert_eq!(number, 503),
        Answer::Unknown { .. } => {}
    }
    let refuses = matches!(number, 400..=404 | 422 | 429);
    assert!(answer.is_unknown() || refuses || matches!(answer, Answer::Charged { .. }), "{number}: never \"not charged\"");
    assert_said_well(&answer);
    let alone = answer.clone().of_one_event(had_unknown);
    let is_open = answer.is_unknown() || had_unknown && matches!(answer, Answer::Configuration { .. });
    assert!(alone.is_unknown() || !is_open);
    if let Some(wait) = answer.wait_for_all() {
        assert!(wait >= Duration::from_millis(100) && wait <= profile.retry_after_cap);
    }

    match Found::classify(reply, KEY, &profile, SystemTime::UNIX_EPOCH) {
        Found::Charge { charge_id } => {
            let is_key = |name: &str, charge: &str| word(charge, name).as_deref() == Some(KEY);
            let is_ours = |charge: &str| is_key("idempotencyKey", charge) || is_key("idempotency_key", charge);
            let mut charges = list(&said).unwrap_or_default();
            charges.push(&said);
            assert!(
                number == 200 && charges.iter().any(|charge| word(charge, "id").as_ref() == Some(&charge_id) && is_ours(charge))
            );
        }
        Found::Nothing => {
            let none = list(&said).is_some_and(|charges| charges.is_empty());
            let missing = object(&said).get("error").and_then(|error| word(error.get(), "code"));
            let is_missing = matches!(missing.as_deref(), Some("resource_missing" | "charge_not_found"));
            assert!(number == 200 && none || number == 404 && is_missing);
        }
        Found::Unclear(answer) => {
            assert!(!matches!(answer, Answer::Charged { .. } | Answer::Declined { .. } | Answer::Rejected { .. }));
            assert_said_well(&answer);
        }
    }
}

/// The fields of an object; of anything else there are none.
fn object(json: &str) -> HashMap<String, &RawValue> {
    serde_json::from_str(json).unwrap_or_default()
}

fn word(json: &str, name: &str) -> Option<String> {
    object(json).get(name).and_then(|raw| serde_json::from_str(raw.get()).ok())
}

fn list(json: &str) -> Option<Vec<&str>> {
    let data = object(json).get("data").and_then(|raw| serde_json::from_str::<Vec<&RawValue>>(raw.get()).ok())?;
    Some(data.into_iter().map(RawValue::get).collect())
}

/// The key of the charge that is asked about.
const KEY: &str = "01890a5d-ac96-774b-bcce-b302099a8057";

/// A configuration is read or refused in lines that can be shown; a secret in it is told to nobody, whatever is wrong with it.
pub fn configuration(data: &[u8]) {
    const MARK: &str = "hunter2-and-so-on";
    let text = String::from_utf8_lossy(data).into_owned();
    // What a file may name is opened: nothing on this machine is meant.
    if text.contains('/') && text.contains("_file") {
        return;
    }
    if let Err(refused) = Config::read(("fuzz.toml", text.as_str()), [], &[]) {
        assert!(!refused.faults.is_empty());
        refused.faults.iter().for_each(|fault| assert_prints(&fault.to_string()));
    }
    let word = text.replace('\0', "");
    for (variable, value) in [
        ("ONCEWARD_PROVIDER_TOKEN", format!("{MARK}{word}")),
        ("ONCEWARD_ADMIN_TOKEN", format!("{word}{MARK}")),
        ("ONCEWARD_DATABASE_URL", format!("postgres://bill:{MARK}{word}@db/money")),
        ("ONCEWARD_DATABASE_URL", format!("{word} password={MARK}")),
    ] {
        let told = match Config::read(("fuzz.toml", ""), [(variable.into(), OsString::from(value))], &[]) {
            Ok(config) => format!("{}{config:?}", config.show()),
            Err(refused) => refused.to_string(),
        };
        assert!(!told.contains(MARK), "{variable}: {told}");
    }
}

fn profile(replays_stored_answers: bool) -> Profile {
    Profile {
        amount: AmountForm::Decimal,
        key_life: Duration::from_secs(86_400),
        key_life_margin: Duration::from_secs(3_600),
        query: ProviderQuery::None,
        query_settle: Duration::from_secs(600),
        retry_after_cap: Duration::from_secs(300),
        replays_stored_answers,
    }
}

/// The provider's words: bounded, and in what may open the breaker only words for machines.
fn assert_said_well(answer: &Answer) {
    let (words, to_all) = match answer {
        Answer::Charged { .. } | Answer::TooMany { .. } => return,
        Answer::Declined { error } | Answer::Rejected { error } | Answer::Mismatch { error } => (error, false),
        Answer::InProgress { error, .. } | Answer::NotReached { error, .. } | Answer::Unknown { error, served: true, .. } => {
            (error, false)
        }
        Answer::Configuration { error, .. } | Answer::Unavailable { error, .. } | Answer::Unknown { error, .. } => (error, true),
    };
    assert_prints(words);
    assert!(words.chars().count() < 400, "{words}");
    assert!(!to_all || words.is_ascii() && words.len() < 200, "{words}");
}

fn assert_prints(text: &str) {
    let bad = |c: char| c.is_control() || matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{200b}'..='\u{200f}');
    assert!(!text.contains(bad), "{text:?}");
}
