//! What an id tells: a UUID v7 begins with the millisecond at which it was made, in 48 bits.
//!
//! In: ids and times. Out: the one from the other. It owns nothing.
//!
//! Invariant: ids lie in the order of their times, so that a day, or all that was made before a moment, is one range of ids.

use std::time::SystemTime;

use chrono::NaiveDate;
use uuid::{Uuid, Variant};

/// Milliseconds of a day.
pub const DAY_MS: i64 = 24 * 60 * 60 * 1000;

/// Whether it is one of version 7: only an id that begins with its time can be forgotten by age.
///
/// # Errors
/// What it is instead, in words.
pub fn version_seven(id: Uuid) -> Result<(), String> {
    if id.is_nil() {
        Err("the nil UUID, not one of version 7".to_owned())
    } else if id.is_max() {
        Err("the max UUID, not one of version 7".to_owned())
    } else if id.get_variant() != Variant::RFC4122 {
        Err("a UUID of another variant, not one of version 7".to_owned())
    } else if id.get_version_num() != 7 {
        Err(format!("a UUID of version {}, not of version 7", id.get_version_num()))
    } else {
        Ok(())
    }
}

/// When it was made, in milliseconds since 1970.
#[must_use]
pub fn unix_ms(id: Uuid) -> i64 {
    (id.as_u128() >> 80) as i64
}

/// A moment in milliseconds since 1970, as an id has it; 0 for any moment before.
#[must_use]
pub fn unix_ms_of(moment: SystemTime) -> i64 {
    moment.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| i64::try_from(since.as_millis()).unwrap_or(i64::MAX))
}

/// The day on which it was made, counted from 1970-01-01 (UTC).
#[must_use]
pub fn day_of(id: Uuid) -> i64 {
    unix_ms(id) / DAY_MS
}

/// The day of an id, as `2026-11-30`.
#[must_use]
pub fn day_text(id: Uuid) -> String {
    let day = i32::try_from(day_of(id)).ok().and_then(NaiveDate::from_epoch_days);
    day.map_or_else(|| id.to_string(), |day| day.to_string())
}

/// The lowest UUID v7 of a day; of 1970-01-01 for any day before.
#[must_use]
pub fn first_id_of_day(day: i64) -> Uuid {
    first_id_of_ms(u64::try_from(day.saturating_mul(DAY_MS)).unwrap_or_default())
}

/// The lowest UUID v7 of a millisecond since 1970.
#[must_use]
pub fn first_id_of_ms(milliseconds: u64) -> Uuid {
    uuid::Builder::from_unix_timestamp_millis(milliseconds, &[0; 10]).into_uuid()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_day_begins_with_its_lowest_id_and_ends_where_the_next_begins() {
        for day in [0, 1, 20_000, 50_000] {
            let (first, next) = (first_id_of_day(day), first_id_of_day(day + 1));
            assert_eq!((first.get_version_num(), day_of(first)), (7, day));
            let last =
                uuid::Builder::from_unix_timestamp_millis(u64::try_from((day + 1) * DAY_MS - 1).expect("positive"), &[255; 10]);
            let last = last.into_uuid();
            assert!(first < last && last < next && day_of(last) == day);
        }
        assert_eq!(first_id_of_day(20_000).to_string(), "019254d3-8000-7000-8000-000000000000");
        assert_eq!(day_text(first_id_of_day(20_000)), "2024-10-04");
        assert_eq!(first_id_of_day(-1), first_id_of_day(0));
    }

    #[test]
    fn the_time_of_an_id_is_its_first_48_bits() {
        assert_eq!(unix_ms(first_id_of_ms(1_728_000_000_123)), 1_728_000_000_123);
        assert_eq!(unix_ms(Uuid::max()), (1 << 48) - 1);
    }
}
