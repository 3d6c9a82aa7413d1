//! What strangers may send, torn and stirred: the targets of `fuzz/` over their seeds and thousands of mutations of them. Here nobody looks which
//! code was reached; that is libFuzzer's part (`fuzz/Cargo.toml`), and what it finds becomes a seed.

#[path = "../fuzz/targets.rs"]
mod targets;

use std::fs;
use std::path::Path;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;

/// Mutations of one target in one run of the tests.
const MUTATIONS: u32 = 4_000;
/// With `scripts/test --long`.
const MUTATIONS_LONG: u32 = 400_000;

/// What parsers stumble over.
const TOKENS: [&str; 24] = [
    "\"",
    "\\",
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "\0",
    "\u{7f}",
    "\u{202e}",
    "null",
    "-",
    "0",
    "1e9",
    "E-400",
    "9223372036854775808",
    ".",
    "\\u0000",
    "\\ud800",
    "é",
    "Ａ",
    "\n",
    "=",
];

/// One change: where, of what kind, with which byte, how far.
type Change = (Index, u8, u8, Index);

fn changed(mut bytes: Vec<u8>, other: &[u8], changes: &[Change]) -> Vec<u8> {
    for (at, kind, byte, far) in changes {
        let (start, end) = (at.index(bytes.len() + 1), far.index(bytes.len() + 1));
        let (from, to) = (start.min(end), start.max(end));
        match kind % 8 {
            0 if start < bytes.len() => bytes[start] = *byte,
            1 if start < bytes.len() => bytes[start] ^= 1 << (byte % 8),
            2 => bytes.insert(start, *byte),
            3 => drop(bytes.drain(from..to.min(from + 16))),
            4 => bytes.truncate(start),
            5 => {
                let piece = bytes[from..to].to_vec();
                bytes.splice(start..start, piece);
            }
            6 => drop(bytes.splice(from.., other[far.index(other.len() + 1)..].iter().copied())),
            _ => drop(bytes.splice(start..start, TOKENS[usize::from(*byte) % TOKENS.len()].bytes())),
        }
    }
    bytes
}

fn run(name: &str, target: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds").join(name);
    let mut seeds: Vec<Vec<u8>> = Vec::new();
    for entry in fs::read_dir(folder).expect("seeds") {
        seeds.push(fs::read(entry.expect("an entry").path()).expect("a seed"));
    }
    assert!(!seeds.is_empty());
    seeds.sort();
    seeds.iter().for_each(|seed| target(seed));
    let cases = if std::env::var_os("ONCEWARD_TEST_LONG").is_some() { MUTATIONS_LONG } else { MUTATIONS };
    let config = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
    let seed = || (0..seeds.len()).prop_map(|at| seeds[at].clone());
    proptest!(config, |(bytes in seed(), other in seed(), changes in vec(any::<Change>(), 1..8))| target(&changed(bytes, &other, &changes)));
}

#[test]
fn a_record_is_an_event_or_a_rejection_that_can_be_shown() {
    run("record", targets::record);
}

#[test]
fn an_amount_is_exactly_what_its_digits_say() {
    run("amount", targets::amount);
}

#[test]
fn headers_are_read_back_as_they_were() {
    run("headers", targets::headers);
}

#[test]
fn an_answer_that_is_not_understood_is_unknown() {
    run("answer", targets::answer);
}

#[test]
fn a_configuration_is_read_or_refused_and_tells_no_secret() {
    run("configuration", targets::configuration);
}
