//! From bytes to an event, or to everything that is wrong with them.
//!
//! In: a payload as Kafka gave it. Out: an [`OrderConfirmed`], or one [`Rejection`] with all faults. The JSON is walked once and its
//! fields stay slices of the payload until they are read; time is linear, depth and size are bounded, a good event allocates
//! nothing.
//!
//! Invariant: whatever the bytes are, the result is one of these two, and a number is read from its own digits.

use std::borrow::Cow;
use std::fmt;

use chrono::{DateTime, Datelike, Utc};
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;
use uuid::Uuid;

use super::id::version_seven;
use super::money::{AmountFault, Currency, Money, scaled_integer};
use super::{AGGREGATE_TYPE, EVENT_TYPE, OrderConfirmed};
use crate::handler::{HeldReason, Rejection};
use crate::text::printable;

/// A payload of more bytes is not looked at.
pub const MAX_PAYLOAD_BYTES: usize = 1 << 20;
/// Arrays and objects inside one another, the event itself included.
pub const MAX_DEPTH: usize = 64;
/// How much of a faulty value is quoted.
const MAX_QUOTED_CHARS: usize = 48;

/// Decodes and validates one payload.
///
/// Unknown fields are ignored; a known one given twice is a fault, however its name is escaped. Ids are judged by value, as JSON
/// Schema's `integer` is: `1.0` and `1e2` are 1 and 100, exactly.
///
/// # Errors
/// `undecodable` when the bytes are no JSON object (or are too many), `invalid` when the object breaks rules; then all of them are
/// named in one message.
pub fn decode(payload: Option<&[u8]>) -> Result<OrderConfirmed, Rejection> {
    let fields = match read(payload) {
        Ok(fields) => fields,
        Err(error) => return Err(Rejection { reason: HeldReason::Undecodable, error, event_id: None }),
    };
    let mut faults = Faults::default();
    if fields.too_deep {
        faults.add("event", format_args!("nested deeper than {MAX_DEPTH}"));
    }
    let event_id = faults.field(&fields, Field::EventId, uuid);
    if let Some(id) = event_id {
        faults.check("eventId", version_seven(id));
    }
    let event_type = faults.field(&fields, Field::EventType, |raw| literal(raw, EVENT_TYPE));
    let occurred_at = faults.field(&fields, Field::OccurredAt, instant);
    if fields.is_given(Field::AggregateType) {
        faults.field(&fields, Field::AggregateType, |raw| literal(raw, AGGREGATE_TYPE));
    }
    let order_id = faults.field(&fields, Field::OrderId, positive_integer);
    let customer_id = faults.field(&fields, Field::CustomerId, positive_integer);
    let currency = faults.field(&fields, Field::Currency, currency);
    let total = faults.field(&fields, Field::TotalAmount, |raw| amount(raw, currency));
    match (event_id, event_type, occurred_at, order_id, customer_id, total.flatten()) {
        (Some(event_id), Some(()), Some(occurred_at), Some(order_id), Some(customer_id), Some(total)) if faults.0.is_empty() => {
            Ok(OrderConfirmed { event_id, occurred_at, order_id, customer_id, total })
        }
        _ => Err(Rejection { reason: HeldReason::Invalid, error: faults.0, event_id }),
    }
}

/// The fields that are read.
#[derive(Clone, Copy)]
enum Field {
    EventId,
    EventType,
    OccurredAt,
    AggregateType,
    OrderId,
    CustomerId,
    TotalAmount,
    Currency,
}

impl Field {
    const NAMES: [&'static str; 8] =
        ["eventId", "eventType", "occurredAt", "aggregateType", "orderId", "customerId", "totalAmount", "currency"];

    const fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }

    fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "eventId" => Self::EventId,
            "eventType" => Self::EventType,
            "occurredAt" => Self::OccurredAt,
            "aggregateType" => Self::AggregateType,
            "orderId" => Self::OrderId,
            "customerId" => Self::CustomerId,
            "totalAmount" => Self::TotalAmount,
            "currency" => Self::Currency,
            _ => return None,
        })
    }
}

/// What one walk over the object found: the raw text of each known field.
#[derive(Default)]
struct Fields<'a> {
    raw: [Option<&'a str>; Field::NAMES.len()],
    repeated: [bool; Field::NAMES.len()],
    too_deep: bool,
}

impl Fields<'_> {
    const fn is_given(&self, field: Field) -> bool {
        self.raw[field as usize].is_some()
    }
}

/// The walk: size, UTF-8, JSON, one object and nothing after it.
fn read(payload: Option<&[u8]>) -> Result<Fields<'_>, String> {
    let bytes = payload.ok_or("no payload (a tombstone)")?;
    if bytes.len() > MAX_PAYLOAD_BYTES {
        return Err(format!("{} bytes, of which at most {MAX_PAYLOAD_BYTES} are read", bytes.len()));
    }
    let text = std::str::from_utf8(bytes).map_err(|error| format!("not UTF-8: byte {}", error.valid_up_to()))?;
    match text.bytes().find(|byte| !matches!(byte, b' ' | b'\t' | b'\n' | b'\r')) {
        None => Err("an empty payload".to_owned()),
        Some(b'{') => serde_json::from_str(text).map_err(|error| format!("not JSON: {error}")),
        Some(_) => Err("not a JSON object".to_owned()),
    }
}

impl<'de> Deserialize<'de> for Fields<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Walk)
    }
}

struct Walk;

impl<'de> Visitor<'de> for Walk {
    type Value = Fields<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Self::Value, M::Error> {
        let mut fields = Fields::default();
        while let Some(Key(known)) = map.next_key()? {
            // A raw value is scanned without recursion, so depth costs no stack; what is too deep is refused all the same.
            let raw = map.next_value::<&RawValue>()?.get();
            fields.too_deep |= raw.starts_with(['{', '[']) && is_deeper_than(raw, MAX_DEPTH - 1);
            if let Some(field) = known {
                let slot = &mut fields.raw[field as usize];
                fields.repeated[field as usize] |= slot.is_some();
                *slot = Some(raw);
            }
        }
        Ok(fields)
    }
}

/// A name as it reads once its escapes are resolved.
struct Key(Option<Field>);

impl<'de> Deserialize<'de> for Key {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Name;
        impl Visitor<'_> for Name {
            type Value = Key;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a name")
            }

            fn visit_str<E>(self, name: &str) -> Result<Key, E> {
                Ok(Key(Field::from_name(name)))
            }
        }
        deserializer.deserialize_identifier(Name)
    }
}

/// Whether valid JSON nests deeper than `limit`; stops at the first bracket that does.
fn is_deeper_than(json: &str, limit: usize) -> bool {
    let (mut depth, mut in_string) = (0_usize, false);
    let mut bytes = json.bytes();
    while let Some(byte) = bytes.next() {
        match (byte, in_string) {
            (b'\\', true) => drop(bytes.next()),
            (b'"', _) => in_string = !in_string,
            (b'{' | b'[', false) => depth += 1,
            (b'}' | b']', false) => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > limit {
            return true;
        }
    }
    false
}

/// All faults of one event, as `field: what is wrong`, joined by `; `.
#[derive(Default)]
struct Faults(String);

impl Faults {
    /// Reads one field, noting its fault. A repeated field has no value: nobody could say which one was meant.
    fn field<T>(&mut self, fields: &Fields<'_>, field: Field, read: impl FnOnce(&str) -> Result<T, String>) -> Option<T> {
        if fields.repeated[field as usize] {
            self.add(field.name(), format_args!("given more than once"));
            return None;
        }
        match fields.raw[field as usize].map(read) {
            Some(Ok(value)) => Some(value),
            Some(Err(fault)) => {
                self.add(field.name(), format_args!("{fault}"));
                None
            }
            None => {
                self.add(field.name(), format_args!("missing"));
                None
            }
        }
    }

    fn check(&mut self, name: &str, result: Result<(), String>) {
        if let Err(fault) = result {
            self.add(name, format_args!("{fault}"));
        }
    }

    fn add(&mut self, name: &str, fault: fmt::Arguments<'_>) {
        use fmt::Write as _;
        let separator = if self.0.is_empty() { "" } else { "; " };
        let written = write!(self.0, "{separator}{name}: {fault}");
        debug_assert!(written.is_ok(), "writing into a string cannot fail");
    }
}

/// Any UUID in any legal spelling: with hyphens, without, in braces or as a URN, in either case.
fn uuid(raw: &str) -> Result<Uuid, String> {
    let text = string(raw).ok_or_else(|| format!("must be a string with a UUID, not {}", quoted(raw)))?;
    let parsed = match text.split_at_checked("urn:uuid:".len()) {
        Some((scheme, name)) if scheme.eq_ignore_ascii_case("urn:uuid:") && name.len() == 36 => Uuid::try_parse(name),
        _ => Uuid::try_parse(&text),
    };
    parsed.map_err(|_| format!("{} is no UUID ({} characters)", quoted(raw), text.chars().count()))
}

fn literal(raw: &str, expected: &str) -> Result<(), String> {
    match string(raw) {
        Some(text) if text == expected => Ok(()),
        _ => Err(format!("must be {expected:?}, not {}", quoted(raw))),
    }
}

fn instant(raw: &str) -> Result<DateTime<Utc>, String> {
    let parsed = string(raw).and_then(|text| DateTime::parse_from_rfc3339(&text).ok()).map(|time| time.to_utc());
    // A zone may lead out of the years that RFC 3339 can write.
    parsed
        .filter(|time| (0..=9999).contains(&time.year()))
        .ok_or_else(|| format!("must be an RFC 3339 time with a zone, not {}", quoted(raw)))
}

fn positive_integer(raw: &str) -> Result<i64, String> {
    match scaled_integer(raw, 0) {
        Ok(id @ 1..) => Ok(id),
        Ok(_) | Err(AmountFault::NotANumber | AmountFault::TooManyDecimals) => {
            Err(format!("must be an integer above 0, not {}", quoted(raw)))
        }
        Err(AmountFault::TooLarge) => Err(format!("{} does not fit into 64 bits", quoted(raw))),
    }
}

fn currency(raw: &str) -> Result<Currency, String> {
    let code = string(raw).ok_or_else(|| format!("must be a string with a code of ISO 4217, not {}", quoted(raw)))?;
    Currency::from_code(&code).map_err(|fault| format!("{} {fault}", quoted(raw)))
}

/// Without a currency the amount's own faults are still told; that it is fine then says nothing.
fn amount(raw: &str, currency: Option<Currency>) -> Result<Option<Money>, String> {
    /// More decimals than any currency has, so that only form, sign and size are judged.
    const ANY: u32 = 4;
    let value = currency.map_or_else(|| scaled_integer(raw, ANY), |known| scaled_integer(raw, known.decimals()));
    match (value, currency) {
        (Ok(1..), None) | (Err(AmountFault::TooManyDecimals), None) => Ok(None),
        (Ok(units @ 1..), Some(currency)) => Ok(Some(Money::from_minor_units(units, currency))),
        (Ok(_), _) => Err(format!("must be above 0, not {}", quoted(raw))),
        (Err(AmountFault::NotANumber), _) => Err(format!("must be a number, not {}", quoted(raw))),
        (Err(AmountFault::TooLarge), _) => Err(format!("{} is too large", quoted(raw))),
        (Err(AmountFault::TooManyDecimals), Some(currency)) => {
            Err(format!("{} has more decimals than {currency} has ({})", quoted(raw), currency.decimals()))
        }
    }
}

/// A JSON string's text, borrowed unless it has escapes; `None` for other values and for escapes that mean nothing.
fn string(raw: &str) -> Option<Cow<'_, str>> {
    let inner = raw.strip_prefix('"')?.strip_suffix('"')?;
    if inner.as_bytes().contains(&b'\\') { serde_json::from_str(raw).ok().map(Cow::Owned) } else { Some(Cow::Borrowed(inner)) }
}

/// A value for a message: numbers and strings as they stand, as far as they print, cut to a bound.
fn quoted(raw: &str) -> String {
    match raw.as_bytes().first() {
        Some(b'{') => "an object".to_owned(),
        Some(b'[') => "an array".to_owned(),
        _ => match raw.char_indices().nth(MAX_QUOTED_CHARS) {
            Some((end, _)) => format!("{}…", printable(&raw[..end])),
            None => printable(raw),
        },
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::sample::Index;

    use super::super::OrderConfirmedBuilder;
    use super::*;

    const ID: &str = "01890a5d-ac96-774b-bcce-b302099a8057";

    /// A good event with one field's raw value replaced, or taken out when it is empty.
    fn with(name: &str, raw: &str) -> String {
        let fields = [
            ("eventId", format!("\"{ID}\"")),
            ("eventType", "\"order.confirmed.v1\"".to_owned()),
            ("occurredAt", "\"2023-06-29T12:34:56.789Z\"".to_owned()),
            ("aggregateType", "\"Order\"".to_owned()),
            ("orderId", "42".to_owned()),
            ("customerId", "7".to_owned()),
            ("totalAmount", "10.00".to_owned()),
            ("currency", "\"EUR\"".to_owned()),
        ];
        let pairs = fields.map(|(field, value)| (field, if field == name { raw.to_owned() } else { value }));
        let pairs: Vec<_> =
            pairs.iter().filter(|(_, raw)| !raw.is_empty()).map(|(field, raw)| format!("\"{field}\":{raw}")).collect();
        format!("{{{}}}", pairs.join(","))
    }

    fn good(json: &str) -> OrderConfirmed {
        decode(Some(json.as_bytes())).unwrap_or_else(|rejection| panic!("{json}: {}", rejection.error))
    }

    fn invalid(json: &str) -> String {
        let rejection = decode(Some(json.as_bytes())).expect_err(json);
        assert_eq!(rejection.reason, HeldReason::Invalid, "{json}: {}", rejection.error);
        rejection.error
    }

    fn undecodable(payload: Option<&[u8]>) -> String {
        let rejection = decode(payload).unwrap_err();
        assert_eq!((rejection.reason, rejection.event_id), (HeldReason::Undecodable, None), "{}", rejection.error);
        rejection.error
    }

    // R-KFK-IDEM-1
    #[test]
    fn a_good_event_is_read_field_by_field() {
        let event = good(&with("", ""));
        assert_eq!(event.event_id.to_string(), ID);
        assert_eq!(event.occurred_at.timestamp_millis(), 1_688_042_096_789);
        assert_eq!((event.order_id, event.customer_id), (42, 7));
        assert_eq!((event.total.minor_units(), event.total.currency().code()), (1000, "EUR"));
    }

    #[test]
    fn all_faults_of_one_event_are_named_together() {
        let json = r#"{"eventId":"nope","eventType":"order.cancelled.v1","occurredAt":"2023-06-29T12:34:56","aggregateType":null,
            "orderId":0,"customerId":"7","totalAmount":10.005,"currency":"EUR"}"#;
        assert_eq!(
            invalid(json),
            "eventId: \"nope\" is no UUID (4 characters); eventType: must be \"order.confirmed.v1\", not \"order.cancelled.v1\"; \
             occurredAt: must be an RFC 3339 time with a zone, not \"2023-06-29T12:34:56\"; aggregateType: must be \"Order\", not null; \
             orderId: must be an integer above 0, not 0; customerId: must be an integer above 0, not \"7\"; \
             totalAmount: 10.005 has more decimals than EUR has (2)"
        );
        let missing: Vec<_> = ["eventId", "eventType", "occurredAt", "orderId", "customerId", "currency", "totalAmount"]
            .map(|name| format!("{name}: missing"))
            .into();
        assert_eq!(invalid("{}"), missing.join("; "));
    }

    // CASES F08, E12
    #[test]
    fn what_is_no_json_object_is_undecodable() {
        assert_eq!(undecodable(None), "no payload (a tombstone)");
        assert_eq!(undecodable(Some(b"")), "an empty payload");
        assert_eq!(undecodable(Some(b" \r\n\t")), "an empty payload");
        for payload in [&b"null"[..], b"[]", b"1", b"\"{}\"", b"true", b"\0", b"\xef\xbb\xbf{}"] {
            assert_eq!(undecodable(Some(payload)), "not a JSON object", "{payload:?}");
        }
        for payload in [&b"\xff{}"[..], b"{\"eventId\":\"\xc3\x28\"}", b"{\"\xed\xa0\x80\":1}"] {
            assert!(undecodable(Some(payload)).starts_with("not UTF-8: byte "), "{payload:?}");
        }
        let good = with("", "");
        let broken = [
            &good[..good.len() - 1],
            &format!("{good}{good}"),
            &format!("{good}x"),
            &with("orderId", "01"),
            &with("orderId", "NaN"),
            &with("currency", "\"E\0R\""),
            &with("currency", "'EUR'"),
            r#"{"\ud800":1}"#,
            "{\"a\":1,}",
            "{a:1}",
        ];
        for payload in broken {
            let error = undecodable(Some(payload.as_bytes()));
            assert!(error.starts_with("not JSON: ") && !error.contains('\0'), "{error}");
        }
    }

    // CASES E12
    #[test]
    fn an_escaped_nul_is_a_fault_and_never_reaches_the_message() {
        for error in [
            invalid(&with("currency", r#""E\u0000R""#)),
            invalid(&with("eventId", r#""\u0000""#)),
            invalid(&with("eventType", r#""\u0000""#)),
        ] {
            assert!(!error.contains('\0'), "{error}");
        }
        good(&with("aggregateType", r#""Order","note":"\u0000","\u0000":null"#));
    }

    // CASES F14
    #[test]
    fn every_legal_spelling_of_an_id_is_one_key() {
        let plain = ID.replace('-', "");
        let spellings = [
            ID.to_owned(),
            ID.to_uppercase(),
            format!("{{{ID}}}"),
            format!("{{{}}}", ID.to_uppercase()),
            format!("urn:uuid:{ID}"),
            format!("URN:UUID:{}", ID.to_uppercase()),
            format!("Urn:Uuid:{ID}"),
            plain.to_uppercase(),
            plain,
            ID.replace('0', "\\u0030"),
        ];
        for spelling in spellings {
            assert_eq!(good(&with("eventId", &format!("\"{spelling}\""))), good(&with("", "")), "{spelling}");
        }
    }

    // CASES F14, E09
    #[test]
    fn other_ids_are_faults_and_uuids_among_them_are_still_reported() {
        let not_seven = [
            ("00000000-0000-0000-0000-000000000000", "the nil UUID, not one of version 7"),
            ("ffffffff-ffff-ffff-ffff-ffffffffffff", "the max UUID, not one of version 7"),
            ("c232ab00-9414-11ec-b3c8-9f6bdeced846", "a UUID of version 1, not of version 7"),
            ("919108f7-52d1-4320-9bac-f847db4148a8", "a UUID of version 4, not of version 7"),
            ("01890a5d-ac96-774b-1cce-b302099a8057", "a UUID of another variant, not one of version 7"),
        ];
        for (id, fault) in not_seven {
            let rejection = decode(Some(with("eventId", &format!("\"{id}\"")).as_bytes())).unwrap_err();
            assert_eq!(rejection.error, format!("eventId: {fault}"));
            assert_eq!(rejection.event_id, Some(Uuid::try_parse(id).unwrap()));
        }
        let also_wrong = decode(Some(with("orderId", "-1").as_bytes())).unwrap_err();
        assert_eq!(also_wrong.event_id, Some(Uuid::try_parse(ID).unwrap()));
        let no_uuids = [
            ID[1..].to_owned(),
            format!("{ID}7"),
            ID.replacen('0', "O", 1),
            format!(" {ID}"),
            format!("({ID})"),
            format!("{{{}}}", ID.replace('-', "")),
            format!("urn:uuid:{}", ID.replace('-', "")),
            format!("urn:uuid:{{{ID}}}"),
            ID.replace('-', "_"),
            String::new(),
        ];
        for text in no_uuids {
            let error = invalid(&with("eventId", &format!("\"{text}\"")));
            assert!(error.ends_with(&format!("is no UUID ({} characters)", text.len())), "{error}");
        }
        assert_eq!(invalid(&with("eventId", "7")), "eventId: must be a string with a UUID, not 7");
    }

    #[test]
    fn a_known_field_given_twice_is_a_fault_however_its_name_is_escaped() {
        assert_eq!(invalid(&with("orderId", r#"42,"orderId":42"#)), "orderId: given more than once");
        assert_eq!(invalid(&with("orderId", r#"42,"\u006frderId":43"#)), "orderId: given more than once");
        assert_eq!(invalid(&with("aggregateType", r#""Order","aggregateType":"Order""#)), "aggregateType: given more than once");
        let twice = decode(Some(with("eventId", &format!(r#""{ID}","event\u0049d":"{ID}""#)).as_bytes())).unwrap_err();
        assert_eq!((&*twice.error, twice.event_id), ("eventId: given more than once", None));
        assert_eq!(good(&with("", "").replace("\"orderId\"", r#""\u006f\u0072derId""#)), good(&with("", "")));
    }

    #[test]
    fn unknown_fields_are_ignored_also_when_repeated() {
        let json = with("aggregateType", r#""Order","x":{"orderId":1,"a":[1,{"b":"}]\"\\"}]},"x":1e999,"":null"#);
        assert_eq!(good(&json), good(&with("", "")));
        good(&with("aggregateType", ""));
    }

    // CASES F11
    #[test]
    fn ids_are_integers_by_value() {
        for (raw, id) in [
            ("9007199254740993", 9_007_199_254_740_993),
            ("9223372036854775807", i64::MAX),
            ("1.0", 1),
            ("1e2", 100),
            ("1.5e1", 15),
        ] {
            assert_eq!(good(&with("orderId", raw)).order_id, id, "{raw}");
            assert_eq!(good(&with("customerId", raw)).customer_id, id, "{raw}");
        }
        for raw in ["0", "-0", "-1", "1.5", "1e-1", "true", "null", "\"42\"", "[]", "{}", "-9223372036854775808"] {
            assert!(invalid(&with("orderId", raw)).starts_with("orderId: must be an integer above 0, not "), "{raw}");
        }
        for raw in ["9223372036854775808", "18446744073709551616", "1e400"] {
            assert_eq!(invalid(&with("customerId", raw)), format!("customerId: {raw} does not fit into 64 bits"));
        }
    }

    // CASES F10, F11, F12
    #[test]
    fn amounts_are_exact_or_faults() {
        for (raw, cents) in
            [("1e2", 10_000), ("19.99", 1999), ("0.01", 1), ("1E-2", 1), ("90071992547409.93", 9_007_199_254_740_993)]
        {
            assert_eq!(good(&with("totalAmount", raw)).total.minor_units(), cents, "{raw}");
        }
        let faults = [
            ("-0", "must be above 0, not -0"),
            ("0.00", "must be above 0, not 0.00"),
            ("-1", "must be above 0, not -1"),
            ("\"10.00\"", "must be a number, not \"10.00\""),
            ("null", "must be a number, not null"),
            ("[10]", "must be a number, not an array"),
            ("10.005", "10.005 has more decimals than EUR has (2)"),
            ("5.06e-6", "5.06e-6 has more decimals than EUR has (2)"),
            ("1E400", "1E400 is too large"),
        ];
        for (raw, fault) in faults {
            assert_eq!(invalid(&with("totalAmount", raw)), format!("totalAmount: {fault}"));
        }
        assert_eq!(
            invalid(&with("currency", "\"JPY\"").replace("10.00", "10.5")),
            "totalAmount: 10.5 has more decimals than JPY has (0)"
        );
        assert_eq!(good(&with("currency", "\"KWD\"").replace("10.00", "1.234")).total.minor_units(), 1234);
    }

    // CASES F12
    #[test]
    fn a_faulty_currency_does_not_hide_a_faulty_amount() {
        assert_eq!(invalid(&with("currency", "\"ZZZ\"")), "currency: \"ZZZ\" is no currency of ISO 4217");
        assert_eq!(invalid(&with("currency", "\"XAU\"")), "currency: \"XAU\" is a code of ISO 4217 in which nobody can pay");
        assert_eq!(invalid(&with("currency", "978")), "currency: must be a string with a code of ISO 4217, not 978");
        assert_eq!(
            invalid(&with("currency", "").replace("10.00", "-1")),
            "currency: missing; totalAmount: must be above 0, not -1"
        );
        assert_eq!(invalid(&with("currency", "").replace("10.00", "1.23456")), "currency: missing");
    }

    #[test]
    fn times_need_a_zone_and_are_compared_as_instants() {
        let reference = good(&with("", "")).occurred_at;
        for raw in ["2023-06-29T12:34:56.789+00:00", "2023-06-29T14:34:56.789000+02:00", "2023-06-29t12:34:56.789z"] {
            assert_eq!(good(&with("occurredAt", &format!("\"{raw}\""))).occurred_at, reference, "{raw}");
        }
        for raw in
            ["\"2023-06-29T12:34:56\"", "\"2023-06-29\"", "\"2023-02-30T00:00:00Z\"", "1688042096789", "\"\"", "\"yesterday\""]
        {
            assert!(
                invalid(&with("occurredAt", raw)).starts_with("occurredAt: must be an RFC 3339 time with a zone, not "),
                "{raw}"
            );
        }
    }

    #[test]
    fn depth_and_size_are_bounded() {
        let nested =
            |depth: usize| with("aggregateType", &format!("\"Order\",\"x\":{}1{}", "[".repeat(depth - 1), "]".repeat(depth - 1)));
        good(&nested(MAX_DEPTH));
        assert_eq!(invalid(&nested(MAX_DEPTH + 1)), "event: nested deeper than 64");
        assert_eq!(invalid(&nested(100_000)), "event: nested deeper than 64");
        for open in ["[", "{\"a\":"] {
            undecodable(Some(open.repeat(100_000).as_bytes()));
            undecodable(Some(with("", "").replace("42", &open.repeat(100_000)).as_bytes()));
        }
        let padded = |size: usize| format!("{}{}", with("", ""), " ".repeat(size - with("", "").len()));
        good(&padded(MAX_PAYLOAD_BYTES));
        assert_eq!(undecodable(Some(padded(MAX_PAYLOAD_BYTES + 1).as_bytes())), "1048577 bytes, of which at most 1048576 are read");
    }

    #[test]
    fn a_message_quotes_a_bounded_part_of_the_input() {
        let long = format!("\"{}\"", "ä".repeat(100_000));
        for name in ["eventId", "eventType", "occurredAt", "aggregateType", "orderId", "customerId", "totalAmount", "currency"] {
            assert!(invalid(&with(name, &long)).len() < 200);
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_an_event_or_a_rejection(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            prop_assert!(decode(Some(&bytes)).is_err());
        }

        #[test]
        fn any_json_like_text_is_an_event_or_a_rejection(text in r#"\{("(eventId|orderId|totalAmount|x)":([-0-9.eE]{1,8}|"[^"]{0,9}"|\[|\]|\{|\}|null),?){0,6}\}?"#) {
            prop_assert!(decode(Some(text.as_bytes())).is_err());
        }

        #[test]
        fn a_mutated_event_is_an_event_or_a_rejection(mutations in prop::collection::vec((any::<Index>(), any::<u8>(), 0..3), 1..6)) {
            let mut bytes = with("", "").into_bytes();
            for (at, byte, kind) in mutations {
                let at = at.index(bytes.len());
                match kind {
                    0 => bytes[at] = byte,
                    1 => bytes.insert(at, byte),
                    _ => drop(bytes.remove(at)),
                }
            }
            match decode(Some(&bytes)) {
                Ok(event) => prop_assert!(event.order_id > 0 && event.customer_id > 0 && event.total.minor_units() > 0 && event.event_id.get_version_num() == 7),
                Err(rejection) => prop_assert!(!rejection.error.is_empty() && rejection.error.len() < 2_000),
            }
        }

        #[test]
        fn what_the_builder_writes_is_read_back_the_same(order in 1..i64::MAX, customer in 1..i64::MAX, units in 1..i64::MAX, secs in 0..4_000_000_000_i64,
                                                         nanos in 0..1_000_000_000_u32, code in prop::sample::select(vec!["EUR", "JPY", "KWD", "CLF"])) {
            let total = Money::from_minor_units(units, Currency::from_code(code).unwrap());
            let event = OrderConfirmedBuilder::new().build(DateTime::from_timestamp(secs, nanos).unwrap(), order, customer, total).unwrap();
            prop_assert_eq!(decode(Some(event.to_json().as_bytes())), Ok(event));
        }
    }
}
