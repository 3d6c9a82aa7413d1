//! Offsets that no record speaks for: gone before the group had read them, or out of the audit's reach.
//!
//! In: ranges of offsets, each with what is wrong with it. Out: the same as problems. No I/O.
//!
//! Invariant: an offset counts once per problem, and is left out only where it is passed over on purpose.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::problems::{Problem, Problems};
use super::records::Frontier;

/// Ranges `[from, to)`, by problem and partition.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Unseen(BTreeMap<Problem, BTreeMap<i32, Vec<(i64, i64)>>>);

impl Unseen {
    /// Notes a range; an empty one says nothing.
    pub(super) fn add(&mut self, problem: Problem, partition: i32, (from, to): (i64, i64)) {
        if from < to {
            self.0.entry(problem).or_default().entry(partition).or_default().push((from, to));
        }
    }

    /// Makes problems of what is not passed over.
    pub(super) fn tell(self, frontier: &Frontier, problems: &mut Problems) {
        for (problem, partitions) in self.0 {
            for (partition, ranges) in partitions {
                for (from, to) in without(ranges, frontier.passed_over(partition)) {
                    let range = format_args!("partition {partition} offsets [{from}, {to})");
                    problems.add_all(problem, from.abs_diff(to), range);
                }
            }
        }
    }
}

/// What is in one of `ranges` and in none of `others`, in order and each offset once.
fn without(ranges: Vec<(i64, i64)>, others: &[(i64, i64)]) -> Vec<(i64, i64)> {
    let (others, mut left) = (merged(others.to_vec()), Vec::new());
    for (mut from, to) in merged(ranges) {
        for &(other_from, other_to) in &others {
            if other_to <= from || to <= other_from {
                continue;
            }
            if from < other_from {
                left.push((from, other_from));
            }
            from = other_to;
        }
        if from < to {
            left.push((from, to));
        }
    }
    left
}

/// The same offsets, in order, as ranges that neither overlap nor touch.
fn merged(mut ranges: Vec<(i64, i64)>) -> Vec<(i64, i64)> {
    ranges.sort_unstable();
    let mut merged: Vec<(i64, i64)> = Vec::new();
    for (from, to) in ranges {
        match merged.last_mut() {
            Some((_, end)) if from <= *end => *end = to.max(*end),
            _ => merged.push((from, to)),
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn ranges() -> impl Strategy<Value = Vec<(i64, i64)>> {
        prop::collection::vec((0_i64..20, 1_i64..6).prop_map(|(from, length)| (from, from + length)), 0..6)
    }

    fn offsets(ranges: &[(i64, i64)]) -> BTreeSet<i64> {
        ranges.iter().flat_map(|(from, to)| *from..*to).collect()
    }

    proptest! {
        #[test]
        fn what_is_left_is_the_difference_with_each_offset_once(some in ranges(), others in ranges()) {
            let left = without(some.clone(), &others);
            let expected: BTreeSet<i64> = offsets(&some).difference(&offsets(&others)).copied().collect();
            prop_assert_eq!(offsets(&left), expected);
            prop_assert!(left.windows(2).all(|pair| pair[0].1 < pair[1].0), "{:?}", left);
        }
    }

    #[test]
    fn a_gap_that_grew_is_one_problem_and_what_is_passed_over_is_none() {
        let mut unseen = Unseen::default();
        for (partition, range) in [(0, (10, 15)), (0, (10, 18)), (1, (3, 3)), (2, (5, 6))] {
            unseen.add(Problem::GoneUnread, partition, range);
        }
        let mut problems = Problems::default();
        unseen.tell(&Frontier::passing_over(0, &[(12, 14)]), &mut problems);
        let expected = "7 gone from the log before the group had read them: \
                        partition 0 offsets [10, 12), partition 0 offsets [14, 18), partition 2 offsets [5, 6)";
        assert_eq!(problems.into_sentences(), [expected]);
    }
}
