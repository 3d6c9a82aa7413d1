//! What was produced: records of the producer's log or of the topic, as entries.
//!
//! In: a record's place and what it is. Out: an entry in the sort, and two counts. It owns the sort.
//!
//! Invariant: a record that is not settled, or that an operator wants passed over, never makes an event lost.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead as _, BufReader};
use std::path::Path;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::AuditError;
use super::entry::{Content, Entry, READ, Seen, WANTED};
use super::problems::Problem;
use super::sorter::Sorter;
use super::traces::Counts;
use super::unseen::Unseen;
use crate::event;
use crate::handler::Event as _;
use crate::produce::LogLine;
use crate::progress::Progress;
use crate::record::{Offset, Skips};
use crate::store::reconcile::Gap;
use crate::store::skips::Position;

/// How far the group had settled each partition, what it passes over there, and what it found gone.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Frontier(BTreeMap<i32, Known>);

/// One partition.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Known {
    settled: Option<i64>,
    /// Ranges `[from, to)`, in no order: an operator wants them skipped, or has discarded the gap that they are.
    passed_over: Vec<(i64, i64)>,
    /// Ranges `[from, to)`, in no order, that nobody has decided about.
    gaps: Vec<(i64, i64)>,
}

impl Frontier {
    pub(super) fn of(positions: Vec<Position>, gaps: &[Gap]) -> Self {
        let known = |position: Position| {
            let partition = position.partition;
            let ranges = |is_discarded| -> Vec<(i64, i64)> {
                let gaps = gaps.iter().filter(|gap| gap.partition == partition && gap.is_discarded == is_discarded);
                gaps.map(|gap| (gap.from, gap.to)).collect()
            };
            let settled = position.next_offset.map(|next| next.0);
            let passed_over = [position.skips.ranges(), &ranges(true)].concat();
            (partition, Known { settled, passed_over, gaps: ranges(false) })
        };
        Self(positions.into_iter().map(known).collect())
    }

    /// The partitions that the group has ever owned.
    pub(super) fn partitions(&self) -> impl Iterator<Item = i32> {
        self.0.keys().copied()
    }

    /// What an operator wants passed over, as ranges `[from, to)` in no order.
    pub(super) fn passed_over(&self, partition: i32) -> &[(i64, i64)] {
        self.0.get(&partition).map_or(&[], |known| &known.passed_over)
    }

    /// Notes what was gone before the group had read it: the gaps that it has written down, and, of partitions whose log was seen to
    /// begin at `firsts`, what it will find gone.
    pub(super) fn gone(&self, firsts: &BTreeMap<i32, i64>, unseen: &mut Unseen) {
        for (partition, known) in &self.0 {
            let next = known.settled.zip(firsts.get(partition).copied());
            known.gaps.iter().copied().chain(next).for_each(|range| unseen.add(Problem::GoneUnread, *partition, range));
        }
    }

    /// The first offset that is not settled; `None`: nothing is. What stands there or beyond is not lost, only not read.
    pub(super) fn settled(&self, partition: i32) -> Option<i64> {
        self.0.get(&partition).and_then(|known| known.settled)
    }

    /// Whether the record there is settled.
    pub(super) fn has_settled(&self, (partition, offset): (i32, i64)) -> bool {
        self.settled(partition).is_some_and(|below| offset < below)
    }

    fn skips(&self) -> BTreeMap<i32, Skips> {
        self.0.iter().map(|(partition, known)| (*partition, Skips::new(known.passed_over.clone()))).collect()
    }
}

/// Takes records in.
pub(super) struct Records {
    pub sorter: Sorter<{ Entry::SIZE }>,
    pub counts: Counts,
    pub frontier: Frontier,
    skips: BTreeMap<i32, Skips>,
}

impl Records {
    pub(super) fn new(frontier: Frontier, sorter: Sorter<{ Entry::SIZE }>, counts: Counts) -> Self {
        Self { sorter, counts, skips: frontier.skips(), frontier }
    }

    /// What the place says: an operator may want the record passed over, the group may not have come to it.
    fn place(&self, place: (i32, i64)) -> Seen {
        let passed_over = self.skips.get(&place.0).is_some_and(|skips| skips.contain(Offset(place.1)));
        match (passed_over, self.frontier.has_settled(place)) {
            (true, _) => 0,
            (false, true) => WANTED | READ,
            (false, false) => WANTED,
        }
    }

    /// A record that is an event. `true`: it is kept, with everything before it.
    fn event(&mut self, place: (i32, i64), id: Uuid, digest: i64, content: Option<Content>) -> io::Result<bool> {
        self.counts.records += 1;
        self.counts.events += 1;
        self.sorter.push(Entry::event(place, id, digest, content, self.place(place)).to_bytes())
    }

    /// A record that is none. `true`: it is kept, with everything before it.
    fn poison(&mut self, place: (i32, i64)) -> io::Result<bool> {
        self.counts.records += 1;
        match self.place(place) {
            0 => Ok(false),
            seen => self.sorter.push(Entry::poison(place.0, place.1, seen).to_bytes()),
        }
    }

    /// A record of the topic, judged as the engine judges it. `true`: it is kept, with everything before it.
    pub(super) fn payload(&mut self, place: (i32, i64), payload: Option<&[u8]>) -> io::Result<bool> {
        match event::decode(payload) {
            Ok(event) => {
                let content = Content::of_money(event.order_id, event.total);
                self.event(place, event.event_id, event.digest().0, Some(content))
            }
            Err(_) => self.poison(place),
        }
    }

    /// A line of the producer's log.
    fn log_line(&mut self, line: &str) -> Result<io::Result<bool>, String> {
        let line: LogLine = serde_json::from_str(line).map_err(|error| error.to_string())?;
        match line {
            LogLine { fault: Some(_), partition, offset, .. } => Ok(self.poison((partition, offset))),
            LogLine {
                event_id: Some(id),
                order: Some(order),
                amount: Some(amount),
                currency: Some(currency),
                digest: Some(digest),
                partition,
                offset,
                ..
            } => Ok(self.event((partition, offset), id, digest, Content::of(order, &amount, &currency, false))),
            _ => Err("neither an event nor a fault".to_owned()),
        }
    }

    /// The producer's log. It is read on the calling thread.
    pub(super) fn log(&mut self, path: &Path, progress: &mut Progress) -> Result<(), AuditError> {
        let failed = |error| AuditError::Log { path: path.to_owned(), error };
        for (number, line) in (1..).zip(BufReader::new(File::open(path).map_err(failed)?).lines()) {
            let line = line.map_err(failed)?;
            let faulty = |error| AuditError::Line { source_name: path.display().to_string(), line: number, error };
            self.log_line(&line).map_err(faulty)?.map_err(AuditError::Sort)?;
            progress.step();
        }
        Ok(())
    }
}

#[cfg(test)]
impl Frontier {
    /// One partition of which nothing is settled, and `ranges` are passed over.
    pub(super) fn passing_over(partition: i32, ranges: &[(i64, i64)]) -> Self {
        Self(BTreeMap::from([(partition, Known { settled: None, passed_over: ranges.to_vec(), gaps: Vec::new() })]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::audit::problems::Problems;
    use crate::audit::report::Report;
    use crate::audit::traces::{Judge, Scope};
    use crate::record::NextOffset;

    const EVENT: &str = r#"{"event_id":"01890a5d-ac96-774b-bcce-b302099a8057","partition":3,"offset":17,"order":42,"amount":"10.00","currency":"EUR","digest":-6}"#;

    /// With all settled below `settled` in partition 3, and `skips` passed over there.
    fn position(settled: i64, skips: Vec<(i64, i64)>) -> Position {
        Position {
            partition: 3,
            owner: String::new(),
            epoch: crate::record::Epoch(1),
            next_offset: Some(NextOffset(settled)),
            skips: Skips::new(skips),
            updated_at: String::new(),
        }
    }

    fn records(settled: i64, skips: Vec<(i64, i64)>) -> Records {
        with_gaps(position(settled, skips), &[])
    }

    fn with_gaps(position: Position, gaps: &[Gap]) -> Records {
        Records::new(Frontier::of(vec![position], gaps), Sorter::new(1 << 10), Counts::default())
    }

    fn report(records: Records) -> Report {
        let scope = Scope { has_records: true, is_range: false, has_ledger: false };
        let (mut judge, mut sorted) = (Judge::new(scope, 1 << 10), records.sorter.sorted().unwrap());
        while let Some(entry) = sorted.next().unwrap() {
            judge.take(&entry).unwrap();
        }
        judge.report(records.counts).unwrap()
    }

    #[test]
    fn what_is_passed_over_is_not_lost_unless_it_also_stands_where_it_is_wanted() {
        let told = |lines: &[&str]| {
            let mut records = records(100, vec![(17, 19)]);
            for line in lines {
                records.log_line(line).unwrap().unwrap();
            }
            let report = report(records);
            (report.lost, report.passed_over, report.adds_up())
        };
        assert_eq!(told(&[EVENT, r#"{"partition":3,"offset":18,"fault":"undecodable"}"#]), (Some(0), 1, true));
        let elsewhere = EVENT.replace("\"offset\":17", "\"offset\":20");
        assert_eq!(told(&[EVENT, &elsewhere]), (Some(1), 0, false));
    }

    #[test]
    fn a_gap_that_somebody_has_discarded_is_passed_over_and_any_other_is_a_problem() {
        for (is_discarded, counts, gone) in [(true, (Some(0), 1), 0), (false, (Some(1), 0), 1)] {
            let gap = Gap { partition: 3, from: 16, to: 18, is_discarded };
            let mut records = with_gaps(position(100, Vec::new()), &[gap, Gap { partition: 4, ..gap }]);
            records.log_line(EVENT).unwrap().unwrap();
            let (mut unseen, mut problems) = (Unseen::default(), Problems::default());
            records.frontier.gone(&BTreeMap::new(), &mut unseen);
            unseen.tell(&records.frontier, &mut problems);
            let sentences = problems.into_sentences();
            assert_eq!(sentences.len(), gone, "{sentences:?}");
            let expected = "2 gone from the log before the group had read them: partition 3 offsets [16, 18)";
            assert!(sentences.iter().all(|sentence| sentence == expected), "{sentences:?}");
            let report = report(records);
            assert_eq!((report.lost, report.passed_over), counts, "the event stands at 17");
        }
    }

    #[test]
    fn a_log_that_begins_beyond_what_is_settled_has_lost_the_rest() {
        let gone = |settled, first| {
            let (mut unseen, mut problems) = (Unseen::default(), Problems::default());
            let frontier = Frontier::of(vec![position(settled, vec![(10, 12)])], &[]);
            frontier.gone(&BTreeMap::from([(3, first), (5, 1)]), &mut unseen);
            unseen.tell(&frontier, &mut problems);
            problems.into_sentences()
        };
        assert_eq!(gone(10, 15), ["3 gone from the log before the group had read them: partition 3 offsets [12, 15)"]);
        assert_eq!([gone(15, 15), gone(10, 12)], [Vec::<String>::new(), Vec::new()]);
    }

    #[test]
    fn a_line_of_the_log_is_an_event_or_a_fault() {
        let mut records = records(19, Vec::new());
        records.log_line(EVENT).unwrap().unwrap();
        records.log_line(r#"{"partition":3,"offset":18,"fault":"undecodable"}"#).unwrap().unwrap();
        for cut in [
            &EVENT[..EVENT.len() - 1],
            r#"{"partition":3,"offset":18}"#,
            r#"{"partition":3,"offset":18,"fault":"invalid","x":1}"#,
            "",
        ] {
            assert!(records.log_line(cut).is_err(), "{cut}");
        }
        let report = report(records);
        assert_eq!((report.produced, report.distinct, report.lost), (Some(2), Some(1), Some(1)));
    }

    #[test]
    fn a_record_of_the_topic_is_what_the_producer_s_log_says_it_is() {
        let event = r#"{"eventId":"01890A5D-AC96-774B-BCCE-B302099A8057","eventType":"order.confirmed.v1",
            "occurredAt":"2023-06-29T12:34:56.789Z","orderId":42,"customerId":7,"totalAmount":1e1,"currency":"EUR"}"#;
        for payload in [event, &event.replace("42", "0"), "{", ""] {
            let line = serde_json::to_string(&LogLine::of(3, 17, Some(payload.as_bytes()))).unwrap();
            let (mut of_log, mut of_topic) = (records(100, Vec::new()), records(100, Vec::new()));
            of_log.log_line(&line).unwrap().unwrap();
            of_topic.payload((3, 17), Some(payload.as_bytes())).unwrap();
            assert_eq!(of_log.counts, of_topic.counts);
            let entry = |records: Records| *records.sorter.sorted().unwrap().peek().expect("one");
            assert_eq!(entry(of_log), entry(of_topic), "{payload}");
        }
    }
}
