//! The trace that a record belongs to, as its producer says: W3C Trace Context (the Recommendation of 23 November 2021) in Kafka headers.
//!
//! In: the headers of a record. Out: a [`TraceContext`] to go on with, or nothing. It owns nothing, and a record without these headers costs a
//! look at the names of those that it has.
//!
//! Invariant: what leaves here is in the form of the specification. Whoever produces a record writes these headers; what is not in that form
//! goes into no request and no log, and changes nothing of what becomes of the event.

use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use crate::record::Record;

/// The name of the one header, in Kafka as in HTTP (section 3.2.1).
pub const TRACEPARENT: &str = "traceparent";
/// The name of the other (section 3.3.1).
pub const TRACESTATE: &str = "tracestate";

/// Which trace, which span of it is the parent, and what tracing systems want to be carried along.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceContext {
    pub(crate) trace_id: u128,
    pub(crate) parent_id: u64,
    pub(crate) flags: u8,
    pub(crate) state: Option<Box<str>>,
}

/// The parent recorded its span (section 3.2.2.5.1).
pub(crate) const SAMPLED: u8 = 1;

impl TraceContext {
    /// What the record's headers say. Two of a `traceparent` contradict each other, so that none is believed; several of a `tracestate` are
    /// one list (section 3.3.1.1).
    #[must_use]
    pub fn of(record: &Record) -> Option<Arc<Self>> {
        let parent = only(values_of(record, TRACEPARENT))?;
        let context = Self { state: state(values_of(record, TRACESTATE)), ..parse(parent?)? };
        Some(Arc::new(context))
    }

    /// The value of a `tracestate`, if there is one.
    #[must_use]
    pub fn state(&self) -> Option<&str> {
        self.state.as_deref()
    }
}

/// The value of a `traceparent`, in the highest version that we know (section 3.2.4).
impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{:032x}-{:016x}-{:02x}", self.trace_id, self.parent_id, self.flags)
    }
}

/// Vendors must expect the names in any case.
fn values_of<'a>(record: &'a Record, name: &'static str) -> impl Iterator<Item = Option<&'a [u8]>> {
    let named = |(found, _): &&(Box<[u8]>, _)| found.eq_ignore_ascii_case(name.as_bytes());
    record.headers.iter().filter(named).map(|(_, value)| value.as_deref())
}

fn only<T>(mut values: impl Iterator<Item = T>) -> Option<T> {
    values.next().filter(|_| values.next().is_none())
}

/// Sections 3.2.2 (version 00) and 3.2.4 (a later one: what it adds follows on a dash, and of its flags only the one that we know counts).
fn parse(value: &[u8]) -> Option<TraceContext> {
    let (fields, rest) = value.split_at_checked(55)?;
    let [version, trace_id, parent_id, flags] = [0..2, 3..35, 36..52, 53..55].map(|field| hex(&fields[field]));
    let (version, trace_id, parent_id, flags) = (version?, trace_id?, parent_id?, flags?);
    let is_whole = [2, 35, 52].iter().all(|dash| fields[*dash] == b'-') && (rest.is_empty() || (version > 0 && rest[0] == b'-'));
    if !is_whole || version == 0xff || trace_id == 0 || parent_id == 0 {
        return None;
    }
    let flags = u8::try_from(flags).ok()? & if version == 0 { 0xff } else { SAMPLED };
    Some(TraceContext { trace_id, parent_id: u64::try_from(parent_id).ok()?, flags, state: None })
}

/// `HEXDIGLC`: digits and lower-case letters only, so that a number has one spelling.
fn hex(digits: &[u8]) -> Option<u128> {
    digits.iter().try_fold(0_u128, |number, digit| {
        let value = match digit {
            b'0'..=b'9' => digit - b'0',
            b'a'..=b'f' => digit - b'a' + 10,
            _ => return None,
        };
        Some(number << 4 | u128::from(value))
    })
}

/// The most that is carried along; so much every tracing system must carry (section 3.3.1.5).
const LONGEST_STATE: usize = 512;
/// The most members of a list (section 3.3.1.2).
const MOST_MEMBERS: usize = 32;

/// The list without its empty members, or nothing if any of it is not in the form of section 3.3.1, or there is more than must be carried: then the
/// trace goes on without it.
fn state<'a>(values: impl Iterator<Item = Option<&'a [u8]>>) -> Option<Box<str>> {
    let (mut members, mut keys, mut length) = (Vec::new(), HashSet::new(), 0);
    for value in values {
        for member in std::str::from_utf8(value?).ok()?.split(',') {
            let member = member.trim_matches([' ', '\t']);
            if member.is_empty() {
                continue;
            }
            let (key, value) = member.split_once('=')?;
            length += member.len() + 1;
            if !is_key(key) || !is_value(value) || !keys.insert(key) || keys.len() > MOST_MEMBERS || length > LONGEST_STATE + 1 {
                return None;
            }
            members.push(Cow::from(member));
        }
    }
    (!members.is_empty()).then(|| members.join(",").into())
}

fn is_key(key: &str) -> bool {
    let lower = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let of_key = |byte: &u8| lower(byte) || matches!(byte, b'_' | b'-' | b'*' | b'/' | b'@');
    (1..=256).contains(&key.len()) && key.as_bytes().first().is_some_and(lower) && key.as_bytes().iter().all(of_key)
}

/// Printable, without what separates; a blank is not its end, for it was trimmed.
fn is_value(value: &str) -> bool {
    (1..=256).contains(&value.len()) && value.bytes().all(|byte| matches!(byte, b' '..=b'~') && byte != b'=')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::record::{Header, Offset};

    const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn of(headers: &[(&str, &[u8])]) -> Option<(String, Option<String>)> {
        let header = |(name, value): &(&str, &[u8])| -> Header { (name.as_bytes().into(), Some((*value).into())) };
        let record = Record {
            partition: 0,
            offset: Offset(0),
            timestamp_ms: None,
            key: None,
            headers: headers.iter().map(header).collect(),
            payload: None,
        };
        TraceContext::of(&record).map(|context| (context.to_string(), context.state().map(str::to_owned)))
    }

    fn parent(value: &str) -> Option<String> {
        of(&[("traceparent", value.as_bytes())]).map(|(parent, _)| parent)
    }

    fn with_state(values: &[&str]) -> Option<String> {
        let states = values.iter().map(|value| ("tracestate", value.as_bytes()));
        of(&[("traceparent", PARENT.as_bytes())].into_iter().chain(states).collect::<Vec<_>>()).expect("a parent").1
    }

    #[test]
    fn a_parent_is_taken_as_it_came_and_only_in_the_one_form_that_it_has() {
        for good in [PARENT, "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"] {
            assert_eq!(parent(good).as_deref(), Some(good));
        }
        assert!(of(&[("TraceParent", PARENT.as_bytes())]).is_some(), "the name in any case");
        for bad in [
            "",
            "00",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-0",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\r\nx: y",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00F067AA0BA902B7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-4bf92f3577b34da6a3ce929d0e0e473g-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-0x",
            "00_4bf92f3577b34da6a3ce929d0e0e4736_00f067aa0ba902b7_01",
            " 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "0-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-0100",
        ] {
            assert_eq!(parent(bad), None, "{bad:?}");
        }
        assert_eq!(of(&[("traceparent", PARENT.as_bytes()), ("traceparent", PARENT.as_bytes())]), None, "two of them");
        assert_eq!(of(&[("tracestate", b"a=b")]), None, "a state without a parent");
        assert_eq!(of(&[]), None);
    }

    // Section 3.2.4.
    #[test]
    fn a_later_version_is_read_as_far_as_it_is_known_and_goes_on_as_ours() {
        let later = "cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-";
        assert_eq!(parent(&format!("{later}01")).as_deref(), Some(PARENT));
        assert_eq!(parent(&format!("{later}01-what-the-future-will-be")).as_deref(), Some(PARENT));
        assert_eq!(parent(&format!("{later}09")).as_deref(), Some(PARENT), "flags that nobody here knows");
        assert_eq!(parent(&format!("{later}01.what")), None);
    }

    // Section 3.3.1.
    #[test]
    fn a_state_is_one_list_and_is_left_out_whole_when_any_of_it_is_wrong() {
        assert_eq!(
            with_state(&["rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"]).as_deref(),
            Some("rojo=00f067aa0ba902b7,congo=t61rcWkgMzE")
        );
        assert_eq!(with_state(&["a=1 2, ,\tb=x ", "c@d/*_-=~!"]).as_deref(), Some("a=1 2,b=x,c@d/*_-=~!"));
        for bad in
            ["", " , ", "a", "a=", "=1", "A=1", "a=1,a=2", "a=1=2", "a b=1", "_a=1", "a=\u{e9}", "a=1\r\nx: y", "a=\u{7f}", "a=1\0"]
        {
            assert_eq!(with_state(&[bad]), None, "{bad:?}");
        }
        assert_eq!(with_state(&["a=1", "a=2"]), None, "also of two headers");
        let members = |count: usize| (0..count).map(|n| format!("k{n}=v")).collect::<Vec<_>>().join(",");
        assert_eq!(with_state(&[&members(32)]), Some(members(32)));
        assert_eq!(with_state(&[&members(33)]), None);
        let long = |length: usize| format!("a={},b={}", "x".repeat(250), "y".repeat(length - 255));
        assert_eq!(with_state(&[&long(511)]), Some(long(511)));
        let longer = format!("{},c=1", long(509));
        assert_eq!(with_state(&[&longer]), None, "{} characters", longer.len());
        assert_eq!(of(&[("traceparent", PARENT.as_bytes()), ("tracestate", b"a=\xff")]), Some((PARENT.to_owned(), None)));
    }

    proptest! {
        /// Whatever is written into the headers: what comes out can stand in a request, and says the same again when it is read.
        #[test]
        fn what_comes_out_is_harmless_and_says_the_same_when_it_is_read_again(
            parent in prop_oneof![".{0,70}", "[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-.{0,5})?"],
            states in prop::collection::vec(prop_oneof!["\\PC{0,40}", "([a-z0-9@*/_-]{1,5}=[ -~]{0,9},?){0,4}"], 0..3),
        ) {
            let states: Vec<(&str, &[u8])> = states.iter().map(|state| ("tracestate", state.as_bytes())).collect();
            let all = [&[("traceparent", parent.as_bytes())][..], &states].concat();
            if let Some((parent, state)) = of(&all) {
                prop_assert!(parent.len() == 55 && parent.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-'));
                let mut again = vec![("traceparent", parent.as_bytes())];
                if let Some(state) = &state {
                    prop_assert!(state.len() <= LONGEST_STATE && state.bytes().all(|byte| (b' '..=b'~').contains(&byte)));
                    again.push(("tracestate", state.as_bytes()));
                }
                prop_assert_eq!(of(&again), Some((parent.clone(), state.clone())));
            }
        }
    }
}
