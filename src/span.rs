//! A length of time, for people. It owns nothing.
//!
//! Invariant: what is said is never less than it is.

use std::time::Duration;

/// `0.3 s`, `90 s`, `10 min`, `36 h`, `7 d`.
#[must_use]
pub fn in_words(span: Duration) -> String {
    let tenths = span.as_micros().div_ceil(100_000);
    let seconds = span.as_secs().saturating_add(u64::from(span.subsec_nanos() > 0));
    match seconds {
        0..=10 => format!("{}.{} s", tenths / 10, tenths % 10),
        11..120 => format!("{seconds} s"),
        120..7_200 => format!("{} min", seconds.div_ceil(60)),
        7_200..172_800 => format!("{} h", seconds.div_ceil(3_600)),
        _ => format!("{} d", seconds.div_ceil(86_400)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_for_people_and_never_shorter_than_they_are() {
        let words = |ms| in_words(Duration::from_millis(ms));
        assert_eq!([words(1_100), words(5_001), words(10_000), words(30_001)], ["1.1 s", "5.1 s", "10.0 s", "31 s"]);
        let seconds = |seconds: u64| words(seconds * 1_000);
        assert_eq!([seconds(600), seconds(86_400), seconds(7 * 86_400)], ["10 min", "24 h", "7 d"]);
        assert_eq!(seconds(7 * 86_400 + 1), "8 d");
        assert_eq!(in_words(Duration::MAX), format!("{} d", u64::MAX / 86_400 + 1));
    }
}
