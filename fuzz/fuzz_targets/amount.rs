#![no_main]

#[path = "../targets.rs"]
#[expect(dead_code, reason = "the others have a binary of their own")]
mod targets;

libfuzzer_sys::fuzz_target!(|data: &[u8]| targets::amount(data));
