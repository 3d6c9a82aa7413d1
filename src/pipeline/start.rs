//! Where a partition starts: a pure decision from what Kafka has committed, what our row says, what an operator wants passed over, and
//! what the log still holds.
//!
//! Invariant: never beyond an unsettled record. When in doubt the partition stops with a reason; it never skips.

use crate::config::{OnGap, Start};
use crate::record::{NextOffset, Offset, Skips};

/// What is known when the decision is made.
#[derive(Clone, Copy, Debug)]
pub struct Known<'a> {
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
    /// What an operator wants passed over.
    pub skips: &'a Skips,
    /// What to do when unsettled records are gone.
    pub on_gap: OnGap,
}

/// Where a partition begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Beginning {
    /// The first offset to settle.
    pub base: NextOffset,
    /// The record before it is the one that was settled last, and is still there: it can bear witness.
    pub has_witness: bool,
    /// Unsettled records that are gone from the log, from the first one's offset to the first that is left.
    pub gap: Option<(NextOffset, NextOffset)>,
}

/// Why a partition does not start. It needs a person.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Records that were not settled are gone from the log.
    #[error(
        "records [{from}, {to}) are gone from the log (retention, or the topic was made anew) and were not settled. Find out which, then pass \
         over them with `onceward offsets skip`, or set kafka.on_gap = \"continue\""
    )]
    Gap {
        /// Where we should start.
        from: NextOffset,
        /// Where the oldest record stands that there is.
        to: NextOffset,
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

/// The start, if our row says that everything below it is settled.
#[must_use]
pub fn settled(base: NextOffset, next_offset: Option<NextOffset>) -> Option<NextOffset> {
    next_offset.is_some_and(|settled| base <= settled).then_some(base)
}

/// Where to begin.
///
/// # Errors
/// When any start would skip records or contradict what is known.
pub fn resolve(known: &Known<'_>) -> Result<Beginning, Refusal> {
    let (first, end) = (NextOffset(known.log.0.0), known.log.1);
    let base = match (known.committed, known.next_offset) {
        // Kafka behind: a replay, or a commit that came after a kill; the claims absorb it. Kafka ahead: the database went back in time, or
        // somebody moved the group; whoever calls has noted the doubt.
        (Some(committed), Some(next_offset)) => committed.min(next_offset),
        (Some(known), None) | (None, Some(known)) => known,
        (None, None) => {
            let from_start = known.added_later || known.fresh == Start::Earliest;
            let base = if from_start { first } else { end };
            return Ok(Beginning { base, has_witness: false, gap: None });
        }
    };
    // What is to be passed over is read and settled as such; it need not be there.
    let base = if base < first { known.skips.beyond(base).min(first) } else { base };
    // What Kafka has forgotten to note is settled all the same, as far as our row says so.
    let settled = known.next_offset.is_some_and(|next_offset| next_offset >= first);
    let base = if settled { base.max(first) } else { base };
    if base > end {
        return Err(Refusal::BeyondEnd { base, end });
    }
    if base >= first {
        let has_witness = known.next_offset == Some(base) && base > first;
        return Ok(Beginning { base, has_witness, gap: None });
    }
    match known.on_gap {
        OnGap::Stop => Err(Refusal::Gap { from: base, to: first }),
        OnGap::Continue => Ok(Beginning { base: first, has_witness: false, gap: Some((base, first)) }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static NONE: std::sync::LazyLock<Skips> = std::sync::LazyLock::new(Skips::default);

    fn known(committed: Option<i64>, next_offset: Option<i64>) -> Known<'static> {
        Known {
            committed: committed.map(NextOffset),
            next_offset: next_offset.map(NextOffset),
            log: (Offset(10), NextOffset(100)),
            fresh: Start::Earliest,
            added_later: false,
            skips: &NONE,
            on_gap: OnGap::Stop,
        }
    }

    fn base(known: &Known<'_>) -> Result<NextOffset, Refusal> {
        resolve(known).map(|beginning| beginning.base)
    }

    #[test]
    fn the_lower_of_the_two_positions_is_taken_and_one_alone_counts() {
        assert_eq!(base(&known(Some(20), Some(30))), Ok(NextOffset(20)));
        assert_eq!(base(&known(Some(30), Some(30))), Ok(NextOffset(30)));
        assert_eq!(base(&known(Some(30), None)), Ok(NextOffset(30)));
        assert_eq!(base(&known(None, Some(40))), Ok(NextOffset(40)), "CASES B10: the group's offsets are gone");
    }

    #[test]
    fn kafka_ahead_of_the_database_starts_where_the_database_stands() {
        assert_eq!(base(&known(Some(31), Some(30))), Ok(NextOffset(30)));
    }

    #[test]
    fn a_start_outside_the_log_stops_the_partition() {
        assert!(matches!(resolve(&known(Some(9), None)), Err(Refusal::Gap { .. })), "CASES B09");
        assert_eq!(base(&known(Some(10), None)), Ok(NextOffset(10)));
        assert_eq!(base(&known(Some(3), Some(50))), Ok(NextOffset(10)), "what is gone was settled");
        assert!(matches!(resolve(&known(Some(3), Some(9))), Err(Refusal::Gap { .. })));
        assert_eq!(base(&known(None, Some(100))), Ok(NextOffset(100)));
        assert!(matches!(resolve(&known(None, Some(101))), Err(Refusal::BeyondEnd { .. })), "CASES B11");
    }

    // CASES B09
    #[test]
    fn a_gap_is_named_and_passed_over_only_when_that_is_wanted() {
        let lost = known(Some(4), Some(7));
        assert_eq!(resolve(&lost), Err(Refusal::Gap { from: NextOffset(4), to: NextOffset(10) }));
        let wanted = Known { on_gap: OnGap::Continue, ..lost };
        let gap = Some((NextOffset(4), NextOffset(10)));
        assert_eq!(resolve(&wanted), Ok(Beginning { base: NextOffset(10), has_witness: false, gap }));
        let skips = Skips::new(vec![(4, 10)]);
        let skipped = Known { skips: &skips, ..lost };
        assert_eq!(resolve(&skipped), Ok(Beginning { base: NextOffset(10), has_witness: false, gap: None }));
        let only_some = Skips::new(vec![(4, 9)]);
        let some_skipped = Known { skips: &only_some, ..lost };
        assert_eq!(resolve(&some_skipped), Err(Refusal::Gap { from: NextOffset(9), to: NextOffset(10) }));
    }

    #[test]
    fn what_is_to_be_passed_over_and_is_there_is_read_so_that_it_is_settled() {
        let skips = Skips::new(vec![(5, 25)]);
        assert_eq!(base(&Known { skips: &skips, ..known(Some(20), Some(20)) }), Ok(NextOffset(20)));
        assert_eq!(base(&Known { skips: &skips, ..known(Some(7), Some(7)) }), Ok(NextOffset(10)), "the log begins in it");
    }

    // CASES B11
    #[test]
    fn the_record_before_the_frontier_bears_witness_while_it_is_there() {
        let has_witness = |known: &Known<'_>| resolve(known).unwrap().has_witness;
        assert!(has_witness(&known(Some(30), Some(30))));
        assert!(has_witness(&known(None, Some(30))));
        assert!(!has_witness(&known(Some(29), Some(30))), "a start below the frontier needs none");
        assert!(!has_witness(&known(Some(10), Some(10))), "the log begins there");
        assert!(!has_witness(&known(Some(30), None)));
    }

    #[test]
    fn a_new_group_starts_as_configured_but_a_partition_added_later_loses_nothing() {
        let latest = Known { fresh: Start::Latest, ..known(None, None) };
        assert_eq!(base(&known(None, None)), Ok(NextOffset(10)));
        assert_eq!(base(&latest), Ok(NextOffset(100)));
        assert_eq!(base(&Known { added_later: true, ..latest }), Ok(NextOffset(10)));
    }
}
