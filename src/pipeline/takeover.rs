//! Taking partitions over: bump the epoch, convert what the past left, resolve where to start.
//!
//! In: partitions that are assigned to us. Out: where each begins, or why it stands still. Everything here is asked again until it is
//! answered: a database or broker that is away delays the assign, and a failed offset fetch is never "no offset".
//!
//! Invariant: Kafka's committed offset is read after the bump, so that whatever an earlier owner settled is in what we read of both.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::future::join_all;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::{Offset as Place, TopicPartitionList};
use tracing::{error, warn};

use crate::config::Start;
use crate::crash::CrashPoint;
use crate::handler::{Handler as Business, StopFlag};
use crate::metrics;
use crate::pipeline::dedup::{Engine, Written};
use crate::pipeline::partition::{Positioned, Wrote};
use crate::pipeline::rebalance::Rebalances;
use crate::pipeline::start::{self, Known};
use crate::record::{Epoch, NextOffset, Offset, SourceId};
use crate::store::consumed_partitions::{self, Doubt, Ownership};
use crate::store::held_turns::{self, OpenHeld};
use crate::store::{DbError, Session, TransactionError, attempts};

/// The wait between two tries while the database or the broker does not answer.
const RETRY: Duration = Duration::from_millis(250);
/// For one question to the broker.
const BROKER: Duration = Duration::from_secs(5);

/// A partition to be taken over.
#[derive(Clone, Debug)]
pub struct Takeover {
    /// The partition.
    pub partition: i32,
    /// Which start of it.
    pub run: u64,
    /// Only if the row still has this epoch: a replaced actor's partition, which a zombie must not steal back.
    pub after: Option<(SourceId, Epoch)>,
    /// What this process wrote last, if it had the partition before.
    pub wrote: Wrote,
    /// Raised: the partition is gone again.
    pub cancelled: StopFlag,
    /// Held while bumping.
    pub bumping: Arc<tokio::sync::Mutex<()>>,
}

/// A partition with its start, or with the reason why it has none.
#[derive(Debug)]
pub struct Placed {
    /// The partition.
    pub partition: i32,
    /// Which start of it.
    pub run: u64,
    /// Where it begins, or why it does not.
    pub outcome: Result<Positioned, String>,
    /// A valid offset for a partition that must be assigned but stands still: the log's end.
    pub fallback: NextOffset,
}

/// What the broker says about a partition.
#[derive(Clone, Copy, Debug)]
struct Log {
    committed: Option<NextOffset>,
    first: Offset,
    end: NextOffset,
}

impl Takeover {
    /// Takes all of them over. A partition whose compare-and-set fails is left out. `None` when any was revoked meanwhile.
    pub async fn run_all<H: Business>(
        takeovers: Vec<Self>,
        engine: &Engine<H>,
        consumer: &Weak<BaseConsumer<Rebalances>>,
        start: Start,
    ) -> Option<Vec<Placed>> {
        if takeovers.is_empty() {
            return Some(Vec::new()); // a member without partitions, or none of these were new
        }
        let partitions: Vec<i32> = takeovers.iter().map(|takeover| takeover.partition).collect();
        let group_is_known =
            Self::again(&takeovers, async || group_is_known(engine).await.map_err(|error| error.to_string())).await?;
        if !group_is_known && start == Start::Latest {
            // Pinned for every partition at once, so that a crash before the first batch loses nothing, and a member that comes a moment
            // later does not take the beginning for a partition "added later".
            let ends = Self::again(&takeovers, async || ask(consumer, &engine.topic, log_ends).await).await?;
            Self::again(&takeovers, async || pin(engine, &ends).await.map_err(|error| error.to_string())).await?;
        }
        let bumped = join_all(
            takeovers.iter().map(|takeover| Self::again(std::slice::from_ref(takeover), async || takeover.bump(engine).await)),
        )
        .await;
        let logs = Self::again(&takeovers, async || {
            let partitions = partitions.clone();
            ask(consumer, &engine.topic, move |consumer, topic| read_logs(consumer, topic, &partitions)).await
        });
        let logs = logs.await?;
        let mut placed = Vec::with_capacity(takeovers.len());
        for (takeover, bumped) in takeovers.iter().zip(bumped) {
            let Some((mut ownership, held)) = bumped? else { continue };
            let log = logs[&takeover.partition];
            let one = std::slice::from_ref(takeover);
            if let Some(ahead) = takeover.went_back(&ownership, log) {
                let doubted = async || store_doubt(engine, ownership.source, ahead).await.map_err(|error| error.to_string());
                ownership.doubt = Self::again(one, doubted).await?;
            }
            let outcome = takeover.resolve(ownership, held, log, start, group_is_known);
            placed.push(Placed { partition: takeover.partition, run: takeover.run, outcome, fallback: log.end });
        }
        Some(placed)
    }

    /// Asks until it is answered; `None` when a partition it is for is gone.
    async fn again<T>(takeovers: &[Self], question: impl AsyncFn() -> Result<T, String>) -> Option<T> {
        let mut warned = false;
        loop {
            if takeovers.iter().any(|takeover| takeover.cancelled.is_raised()) {
                return None;
            }
            match question().await {
                Ok(answer) => return Some(answer),
                Err(error) if !warned => {
                    warn!(error, "a takeover waits");
                    warned = true;
                }
                Err(_) => {}
            }
            actix::clock::sleep(RETRY).await;
        }
    }

    async fn bump<H: Business>(&self, engine: &Engine<H>) -> Result<Option<(Ownership, OpenHeld)>, String> {
        let _serial = self.bumping.lock().await;
        let bumped = async {
            let mut session = engine.store.control.get().await.map_err(DbError::from)?;
            let ownership = match self.after {
                None => Some(
                    consumed_partitions::bump(&mut session, &engine.group, &engine.topic, self.partition, &engine.owner).await?,
                ),
                Some((source, epoch)) => consumed_partitions::rebump(&mut session, source, epoch, &engine.owner).await?,
            };
            let Some(ownership) = ownership else { return Ok(None) };
            CrashPoint::Bumped.passed();
            attempts::convert_leftovers(&mut session, ownership.source).await?;
            CrashPoint::LeftoversConverted.passed();
            let held = held_turns::open(&mut session, ownership.source).await?;
            Ok::<_, DbError>(Some((ownership, held)))
        };
        bumped.await.map_err(|error| error.to_string())
    }

    /// Whether the database has lost what it had: then up to which offset it is known to have been further.
    fn went_back(&self, ownership: &Ownership, log: Log) -> Option<Option<NextOffset>> {
        let next_offset = ownership.next_offset;
        // Of a group that never was here, Kafka's offset alone says nothing; what we wrote ourselves does.
        let ahead =
            log.committed.filter(|_| next_offset.is_some()).max(self.wrote.last()).filter(|further| Some(*further) > next_offset);
        let words = match (&ownership.went_back, ahead) {
            (Some(words), _) => words.clone(),
            (None, Some(ahead)) => format!("it was settled up to {ahead}, and the database says {next_offset:?}"),
            (None, None) => return None,
        };
        error!(
            partition = self.partition,
            words,
            "the database went back in time, or the group was moved ahead: nothing that may have been charged is asked for blindly"
        );
        metrics::database_went_back();
        Some(ahead)
    }

    fn resolve(
        &self,
        ownership: Ownership,
        held: OpenHeld,
        log: Log,
        start: Start,
        group_is_known: bool,
    ) -> Result<Positioned, String> {
        // A row that was ours and has forgotten where it stood: Kafka's offset would skip what the database has lost.
        let forgotten = ownership.next_offset.is_none() && self.wrote.last().is_some();
        let known = Known {
            committed: log.committed.filter(|_| !forgotten),
            next_offset: ownership.next_offset,
            log: (log.first, log.end),
            fresh: start,
            added_later: group_is_known || forgotten,
        };
        let base = start::resolve(&known).map_err(|refusal| refusal.to_string())?;
        Ok(Positioned {
            partition: self.partition,
            source: ownership.source,
            epoch: ownership.epoch,
            written: Written::known(ownership.next_offset),
            base,
            committed: log.committed,
            held,
            doubt: ownership.doubt,
            wrote: self.wrote.clone(),
        })
    }
}

async fn group_is_known<H: Business>(engine: &Engine<H>) -> Result<bool, DbError> {
    let mut session = engine.store.control.get().await.map_err(DbError::from)?;
    consumed_partitions::has_rows(&mut session, &engine.group, &engine.topic).await
}

async fn pin<H: Business>(engine: &Engine<H>, ends: &BTreeMap<i32, NextOffset>) -> Result<(), DbError> {
    let mut session = engine.store.control.get().await.map_err(DbError::from)?;
    let ends: Vec<_> = ends.iter().map(|(partition, end)| (*partition, *end)).collect();
    consumed_partitions::pin(&mut session, &engine.group, &engine.topic, &ends).await
}

/// Before the first batch: what may have been charged is noted, with the held events that are open.
async fn store_doubt<H: Business>(engine: &Engine<H>, source: SourceId, ahead: Option<NextOffset>) -> Result<Doubt, DbError> {
    let mut session = engine.store.control.get().await.map_err(DbError::from)?;
    let limits = consumed_partitions::bump_limits(&session);
    let stored = session.transaction("doubt", &limits, async |tx: &mut Session| {
        let doubt = consumed_partitions::doubt(tx, source, ahead).await?;
        engine.handler.doubt_held(tx, source, &engine.group).await?;
        Ok::<_, DbError>(doubt)
    });
    stored.await.map_err(|error| match error {
        TransactionError::Body(error) | TransactionError::CommitUnknown(error) | TransactionError::Begin(error) => error,
    })
}

/// Puts a blocking question to the broker, off the actors' thread.
async fn ask<T: Send + 'static>(
    consumer: &Weak<BaseConsumer<Rebalances>>,
    topic: &str,
    question: impl FnOnce(&BaseConsumer<Rebalances>, &str) -> Result<T, String> + Send + 'static,
) -> Result<T, String> {
    let consumer = consumer.upgrade().ok_or("the consumer is closed")?;
    let topic = topic.to_owned();
    let asked = tokio::task::spawn_blocking(move || question(&consumer, &topic));
    asked.await.map_err(|error| error.to_string())?
}

fn log_ends(consumer: &BaseConsumer<Rebalances>, topic: &str) -> Result<BTreeMap<i32, NextOffset>, String> {
    let metadata = consumer.fetch_metadata(Some(topic), BROKER).map_err(|error| error.to_string())?;
    let known = metadata.topics().iter().find(|known| known.name() == topic).ok_or("the topic does not exist")?;
    let partitions: Vec<i32> = known.partitions().iter().map(rdkafka::metadata::MetadataPartition::id).collect();
    offsets_at(consumer, topic, &partitions, Place::End).map(|ends| ends.into_iter().map(|(p, end)| (p, NextOffset(end))).collect())
}

fn read_logs(consumer: &BaseConsumer<Rebalances>, topic: &str, partitions: &[i32]) -> Result<BTreeMap<i32, Log>, String> {
    let committed =
        consumer.committed_offsets(list(topic, partitions, Place::Invalid)?, BROKER).map_err(|error| error.to_string())?;
    let committed = committed.elements().into_iter().map(|element| {
        element.error().map_err(|error| format!("committed offset of partition {}: {error}", element.partition()))?;
        let next = if let Place::Offset(next) = element.offset() { Some(NextOffset(next)) } else { None };
        Ok((element.partition(), next))
    });
    let committed = committed.collect::<Result<BTreeMap<_, _>, String>>()?;
    let (first, end) =
        (offsets_at(consumer, topic, partitions, Place::Beginning)?, offsets_at(consumer, topic, partitions, Place::End)?);
    let log = |partition: &i32| {
        let (first, end) =
            first.get(partition).zip(end.get(partition)).ok_or_else(|| format!("partition {partition} has no log"))?;
        let committed = *committed.get(partition).ok_or_else(|| format!("no committed offset answer for partition {partition}"))?;
        Ok((*partition, Log { committed, first: Offset(*first), end: NextOffset(*end) }))
    };
    partitions.iter().map(log).collect()
}

/// The log's border of each partition, in one request.
fn offsets_at(
    consumer: &BaseConsumer<Rebalances>,
    topic: &str,
    partitions: &[i32],
    place: Place,
) -> Result<BTreeMap<i32, i64>, String> {
    let answer = consumer.offsets_for_times(list(topic, partitions, place)?, BROKER).map_err(|error| error.to_string())?;
    let border = answer.elements().into_iter().map(|element| {
        element.error().map_err(|error| format!("log of partition {}: {error}", element.partition()))?;
        match element.offset() {
            Place::Offset(offset) => Ok((element.partition(), offset)),
            other => Err(format!("log of partition {}: {other:?}", element.partition())),
        }
    });
    border.collect()
}

fn list(topic: &str, partitions: &[i32], place: Place) -> Result<TopicPartitionList, String> {
    let mut list = TopicPartitionList::with_capacity(partitions.len());
    for partition in partitions {
        list.add_partition_offset(topic, *partition, place).map_err(|error| error.to_string())?;
    }
    Ok(list)
}
