//! Does it add up? The one reconciler, for operators, for tests and for the demo.
//!
//! In: what was produced (a range of the topic, or the producer's log), the database, the provider's ledger (optional). Out: a
//! [`Report`]. It owns nothing and changes nothing. What the group has not read yet does not add up, and is not called lost; what cannot be
//! looked at is named.
//!
//! What comes in no order is sorted by event id in files; claims and payments come in that order from their tables. All of it streams by
//! the judge, so that memory does not depend on how much there is.
//!
//! Invariant: nothing that the engine says of itself is believed; only the records, the rows and the ledger count.

mod entry;
mod ledger;
mod problems;
mod records;
mod report;
mod sorter;
mod state;
mod streams;
mod topic;
mod traces;
mod unseen;

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;

use rdkafka::error::KafkaError;
use url::Url;
use uuid::Uuid;

use self::entry::{Booking, Content, Entry};
use self::records::{Frontier, Records};
pub use self::report::{Report, grouped};
use self::sorter::{Sorted, Sorter};
use self::state::Kept;
use self::streams::{Places, Streams};
use self::topic::Topic;
pub use self::topic::{Bound, TopicRange};
use self::traces::{Counts, Judge, Scope};
use self::unseen::Unseen;
use crate::progress::Progress;
use crate::store::{DbError, Session, Store, reconcile, retention, skips};
use crate::tls::{self, Tls};

/// Memory for one sort, unless something else is wanted, in bytes. Two are at work at the most.
pub const MEMORY: usize = 16 << 20;

/// What to reconcile.
#[derive(Clone, Debug)]
pub struct Options {
    /// The consumer group whose claims and held events are read.
    pub group: String,
    /// The topic.
    pub topic: String,
    /// What was produced. Without it, nobody can say what is lost.
    pub produced: Option<Source>,
    /// The provider's base address; the ledger is read from `<url>/v1/ledger`. Without it, nobody can say what was charged twice.
    pub ledger: Option<Url>,
    /// Whom its `https` connection trusts, and what it shows.
    pub ledger_tls: Tls,
    /// The ledger counts amounts in the smallest unit, as `provider.amount = "minor_units"` posts them.
    pub ledger_in_minor_units: bool,
    /// Memory for one sort, in bytes.
    pub memory: usize,
    /// How far it is may be shown on standard error, if that is a terminal.
    pub show_progress: bool,
}

/// Who says what was produced.
#[derive(Clone, Debug)]
pub enum Source {
    /// The log that `produce` wrote: all that there is.
    Log(PathBuf),
    /// A part of the topic.
    Topic(TopicRange),
}

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub enum AuditError {
    /// The log cannot be read.
    #[error("{path}: {error}", path = path.display())]
    Log {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// A line is not what `produce` or the provider writes; the last one may be cut.
    #[error("{source_name}, line {line}: {error}")]
    Line {
        /// The log or the ledger.
        source_name: String,
        /// Counted from 1.
        line: u64,
        /// What is wrong with it.
        error: String,
    },
    /// The database.
    #[error("database: {0}")]
    Database(#[from] DbError),
    /// The provider's ledger.
    #[error("ledger: {0}")]
    Ledger(#[from] reqwest::Error),
    /// A certificate or a key for it.
    #[error("TLS to the ledger: {0}")]
    Tls(#[from] tls::Fault),
    /// The brokers.
    #[error("topic: {0}; see kafka.brokers")]
    Kafka(#[from] KafkaError),
    /// The range is not one of the topic's.
    #[error("topic: {0}")]
    Range(String),
    /// What is sorted needs room on a disk.
    #[error("sorting in files: {0}; they stand in TMPDIR, else in /var/tmp, and in the folder of --state")]
    Sort(#[source] io::Error),
    /// The folder that is to make the audit resumable.
    #[error("{folder}: {error}", folder = folder.display())]
    State {
        /// The folder.
        folder: PathBuf,
        /// What is wrong with it.
        error: String,
    },
    /// The thread that reads the topic is gone.
    #[error("reading the topic: {0}")]
    Reader(#[from] tokio::task::JoinError),
}

/// What was produced, sorted by id.
struct Input {
    entries: Sorted<{ Entry::SIZE }>,
    counts: Counts,
    places: Places,
    /// Where the log began, by partition.
    firsts: BTreeMap<i32, i64>,
    unseen: Unseen,
    /// To be cleared when there is a report.
    kept: Option<Kept>,
}

/// Reads everything and reconciles it. Log, files and ledger are worked on on the calling thread.
///
/// # Errors
/// One of the sources cannot be read, or holds what nobody writes there. What does not add up is no error: see [`Report::adds_up`].
pub async fn run(store: &Store, options: &Options) -> Result<Report, AuditError> {
    // Before the rows: what is settled by now must be among them.
    let frontier = {
        let mut session = store.control.get().await.map_err(DbError::from)?;
        reconcile::on_one_snapshot(&mut session, async |s| read_frontier(s, options).await).await?
    };
    let input = read_produced(options, frontier).await?;
    let scope = Scope {
        has_records: options.produced.is_some(),
        is_range: matches!(options.produced, Some(Source::Topic(_))),
        has_ledger: options.ledger.is_some(),
    };
    let mut judge = Judge::new(scope, options.memory);
    let mut others = Sorter::new(options.memory);
    // Before the rows, too: what it says of an event that is settled must be among them, or the attempt at it.
    let ledger_since_ms = read_ledger(store, options, &mut others, &mut judge).await?;
    let Input { entries, counts, places, firsts, mut unseen, kept } = input;
    let mut session = store.control.get().await.map_err(DbError::from)?;
    reconcile::on_one_snapshot(&mut session, async |s| {
        judge.floor = retention::floor(s).await?;
        // Again: what was settled meanwhile is no gap, though the log has lost it since.
        let frontier = read_frontier(s, options).await?;
        frontier.gone(&firsts, &mut unseen);
        judge.unseen(unseen, &frontier);
        let mut streams = Streams::start(s, (&options.group, &options.topic), entries, others, places, ledger_since_ms).await?;
        let mut progress = Progress::begin(options.show_progress, "comparing", 0, Some(streams.sorted()));
        while let Some((entry, is_sorted)) = streams.next(s).await? {
            judge.take(&entry).map_err(AuditError::Sort)?;
            if is_sorted {
                progress.step();
            }
        }
        Ok::<(), AuditError>(())
    })
    .await?;
    let report = judge.report(counts).map_err(AuditError::Sort)?;
    kept.map_or(Ok(()), Kept::clear)?;
    Ok(report)
}

async fn read_frontier(s: &mut Session, options: &Options) -> Result<Frontier, DbError> {
    let positions = skips::positions(s, &options.group, &options.topic).await?;
    Ok(Frontier::of(positions, &reconcile::gaps(s, &options.group, &options.topic).await?))
}

async fn read_produced(options: &Options, frontier: Frontier) -> Result<Input, AuditError> {
    let Topic { records, ranges, firsts, unseen, kept } = match &options.produced {
        Some(Source::Topic(range)) => {
            let (range, group, topic) = (range.clone(), options.group.clone(), options.topic.clone());
            let (memory, show) = (options.memory, options.show_progress);
            let read = tokio::task::spawn_blocking(move || topic::read(&range, (&group, &topic), frontier, memory, show));
            read.await??
        }
        produced => {
            let mut records = Records::new(frontier, Sorter::new(options.memory), Counts::default());
            if let Some(Source::Log(path)) = produced {
                records.log(path, &mut Progress::begin(options.show_progress, "reading the log", 0, None))?;
            }
            Topic { records, ranges: BTreeMap::new(), firsts: BTreeMap::new(), unseen: Unseen::default(), kept: None }
        }
    };
    let Records { sorter, counts, .. } = records;
    let entries = sorter.sorted().map_err(AuditError::Sort)?;
    Ok(Input { entries, counts, places: Places(ranges), firsts, unseen, kept })
}

/// Out: since when a payment may be younger than what was read, by the database's clock.
async fn read_ledger(
    store: &Store,
    options: &Options,
    sorter: &mut Sorter<{ Entry::SIZE }>,
    judge: &mut Judge,
) -> Result<Option<i64>, AuditError> {
    let Some(url) = &options.ledger else { return Ok(None) };
    let since_ms = {
        let mut session = store.control.get().await.map_err(DbError::from)?;
        reconcile::begun_since(&mut session).await?
    };
    let mut progress = Progress::begin(options.show_progress, "reading the ledger", 0, None);
    let see = |key: &str, booking: Booking, content: Option<Content>| {
        progress.step();
        // Only the canonical form is what we send (R-KFK-IDEM-4).
        match Uuid::try_parse(key).ok().filter(|id| id.hyphenated().to_string() == key) {
            Some(id) => Entry::booking(id, booking, content).map_or(Ok(()), |entry| sorter.push(entry.to_bytes()).map(drop)),
            None if booking == Booking::Charged => judge.strange_charge(key, content),
            None => Ok(()),
        }
        .map_err(AuditError::Sort)
    };
    ledger::read(url, &options.ledger_tls, options.ledger_in_minor_units, see).await?;
    Ok(Some(since_ms))
}
