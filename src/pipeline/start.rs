//! Where a partition starts: a pure decision from what Kafka has committed, what our row says, and what the log still holds.
//!
//! Invariant: never beyond an unsettled record. When in doubt the partition stops with a reason; it never skips.

use crate::config::Start;
use crate::record::{NextOffset, Offset};

/// What is known when the decision is made.
#[derive(Clone, Copy, Debug)]
pub struct Known {
    /// Kafka's committed offset of the group.
    pub committed: Option<NextOffset>,
    /// `consumed_partition.next_offset`.
    pub next_offset: Option<NextOffset>,
    /// The log: its oldest offset, and one past its newest.
    pub log: (Offset, NextOffset),
    /// Where to start when nothing is known.
    pub fresh: Start,
    /// Other partitions of this group and topic have rows already: this one was added later, and its beginning would be lost.
    pub added_later: bool,
}

/// Why a partition does not start. It needs a person.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Records that were not settled are gone from the log.
    #[error("records {base} to {first} are gone from the log (retention, or the topic was made anew) and were not settled")]
    Gap {
        /// Where we should start.
        base: NextOffset,
        /// The oldest record there is.
        first: Offset,
    },
    /// The log ends before the place where we should start.
    #[error("the log ends at {end}, before {base} where this group stands: the topic was made anew or truncated")]
    BeyondEnd {
        /// Where we should start.
        base: NextOffset,
        /// One past the newest record.
        end: NextOffset,
    },
}

/// The first offset to settle.
///
/// # Errors
/// When any start would skip records or contradict what is known.
pub fn resolve(known: &Known) -> Result<NextOffset, Refusal> {
    let (first, end) = known.log;
    let base = match (known.committed, known.next_offset) {
        // Kafka behind: a replay, or a commit that came after a kill; the claims absorb it. Kafka ahead: the database went back in time, or
        // somebody moved the group; whoever calls has noted the doubt.
        (Some(committed), Some(next_offset)) => committed.min(next_offset),
        (Some(committed), None) => committed,
        (None, Some(next_offset)) => next_offset,
        (None, None) => {
            let from_start = known.added_later || known.fresh == Start::Earliest;
            return Ok(if from_start { NextOffset(first.0) } else { end });
        }
    };
    // What Kafka has forgotten to note is settled all the same, as far as our row says so.
    let settled = known.next_offset.is_some_and(|next_offset| next_offset.first_open() >= first);
    let base = if settled { base.max(NextOffset(first.0)) } else { base };
    if base.first_open() < first {
        return Err(Refusal::Gap { base, first });
    }
    if base > end {
        return Err(Refusal::BeyondEnd { base, end });
    }
    Ok(base)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(committed: Option<i64>, next_offset: Option<i64>) -> Known {
        Known {
            committed: committed.map(NextOffset),
            next_offset: next_offset.map(NextOffset),
            log: (Offset(10), NextOffset(100)),
            fresh: Start::Earliest,
            added_later: false,
        }
    }

    #[test]
    fn the_lower_of_the_two_positions_is_taken_and_one_alone_counts() {
        assert_eq!(resolve(&known(Some(20), Some(30))), Ok(NextOffset(20)));
        assert_eq!(resolve(&known(Some(30), Some(30))), Ok(NextOffset(30)));
        assert_eq!(resolve(&known(Some(30), None)), Ok(NextOffset(30)));
        assert_eq!(resolve(&known(None, Some(40))), Ok(NextOffset(40)), "CASES B10: the group's offsets are gone");
    }

    #[test]
    fn kafka_ahead_of_the_database_starts_where_the_database_stands() {
        assert_eq!(resolve(&known(Some(31), Some(30))), Ok(NextOffset(30)));
    }

    #[test]
    fn a_start_outside_the_log_stops_the_partition() {
        assert!(matches!(resolve(&known(Some(9), None)), Err(Refusal::Gap { .. })), "CASES B09");
        assert_eq!(resolve(&known(Some(10), None)), Ok(NextOffset(10)));
        assert_eq!(resolve(&known(Some(3), Some(50))), Ok(NextOffset(10)), "what is gone was settled");
        assert!(matches!(resolve(&known(Some(3), Some(9))), Err(Refusal::Gap { .. })));
        assert_eq!(resolve(&known(None, Some(100))), Ok(NextOffset(100)));
        assert!(matches!(resolve(&known(None, Some(101))), Err(Refusal::BeyondEnd { .. })), "CASES B11");
    }

    #[test]
    fn a_new_group_starts_as_configured_but_a_partition_added_later_loses_nothing() {
        let latest = Known { fresh: Start::Latest, ..known(None, None) };
        assert_eq!(resolve(&known(None, None)), Ok(NextOffset(10)));
        assert_eq!(resolve(&latest), Ok(NextOffset(100)));
        assert_eq!(resolve(&Known { added_later: true, ..latest }), Ok(NextOffset(10)));
    }
}
