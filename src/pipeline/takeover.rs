//! Taking partitions over: bump the epoch, convert what the past left, resolve where to start.
//!
//! In: partitions that are assigned to us. Out: where each begins, or why it stands still. Everything here is asked again until it is
//! answered: a database or broker that is away delays the assign, and a failed offset fetch is never "no offset".
//!
//! Invariant: Kafka's committed offset is read after the bump, so that whatever an earlier owner settled is in what we read of both.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::{error, warn};

use crate::config::{OnGap, Start};
use crate::crash::CrashPoint;
use crate::handler::{Handler as Business, HeldReason, StopFlag};
use crate::metrics::{self, Phase};
use crate::pipeline::broker::{Log, ask, log_ends, read_logs};
use crate::pipeline::client::Client;
use crate::pipeline::dedup::{Engine, Written};
use crate::pipeline::lives::Wrote;
use crate::pipeline::start::{self, Beginning, Known, Refusal};
use crate::pipeline::window::Witness;
use crate::pipeline::workers::Workers;
use crate::record::{Epoch, Holds, NextOffset, Offset, Record, RecordDigest, Skips, SourceId};
use crate::store::consumed_partitions::{self, Doubt, Ownership, Paused};
use crate::store::held_events::{HeldState, NewHeld};
use crate::store::held_turns::{self, OpenHeld};
use crate::store::{DbError, Session, TransactionError, attempts, held_events};

/// The wait between two tries while the database or the broker does not answer.
const RETRY: Duration = Duration::from_millis(250);

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

/// Where partitions start, as configured.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Where a group without any position begins.
    pub start: Start,
    /// What to do when unsettled records are gone.
    pub on_gap: OnGap,
}

/// What a partition begins with: positioned, fenced, and with the attempts of its past converted.
#[derive(Debug)]
pub struct Positioned {
    /// The partition.
    pub partition: i32,
    /// Its row and our epoch.
    pub source: SourceId,
    /// Our epoch.
    pub epoch: Epoch,
    /// What the row says.
    pub written: Written,
    /// The first offset to settle.
    pub base: NextOffset,
    /// The record before it, to be compared with what stands there now.
    pub witness: Option<Witness>,
    /// What an operator wants passed over.
    pub skips: Skips,
    /// What an operator wants held.
    pub holds: Holds,
    /// An operator wants nothing of it consumed: by whom, and why.
    pub paused: Option<Paused>,
    /// What Kafka had when it was taken over.
    pub committed: Option<NextOffset>,
    /// Somebody has set the group back: what lies below this is read again because of that, and not because a commit was missed.
    pub replayed_below: Option<NextOffset>,
    /// What is open of its held events.
    pub held: OpenHeld,
    /// Which new events may have been charged before the database went back in time.
    pub doubt: Doubt,
    /// Where the frontier is noted for whoever comes after this actor.
    pub wrote: Wrote,
}

impl Positioned {
    /// The first record to be read.
    #[must_use]
    pub fn reads_from(&self) -> NextOffset {
        self.witness.map_or(self.base, |witness| NextOffset(witness.offset.0))
    }
}

/// What has become of takeovers.
#[derive(Debug, Default)]
pub struct Taken {
    /// Partitions with their starts.
    pub placed: Vec<Placed>,
    /// Partitions that the database has not given us yet.
    pub late: Vec<Late>,
}

/// A takeover that goes on.
#[derive(Debug)]
pub struct Late {
    takeover: Takeover,
    bump: Bumping,
    fallback: NextOffset,
}

/// The row, when its first held event is due, and whether the group had rows before. Outer `None`: the partition is gone; inner: the
/// compare-and-set has failed.
type Bumped = Option<Option<(Ownership, OpenHeld, bool)>>;

/// Never dropped unfinished: a bump that nobody waits for would still be one.
type Bumping = tokio::task::JoinHandle<Bumped>;

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

impl Takeover {
    /// Takes all of them over, within `patience` if there is any: those that the database has not given us by then come later, each for
    /// itself, so that nobody's rebalance waits for them. A partition whose compare-and-set fails is left out. `None` when any was revoked
    /// meanwhile.
    pub async fn run_all<H: Business>(
        takeovers: Vec<Self>,
        workers: &Arc<Workers<H>>,
        client: &Client,
        rules: Rules,
        patience: Option<Duration>,
    ) -> Option<Taken> {
        let mut taken = Taken::default();
        if takeovers.is_empty() {
            return Some(taken); // a member without partitions, or none of these were new
        }
        let asked = Instant::now();
        let bumps =
            takeovers.iter().map(|takeover| actix::spawn(takeover.clone().bumped(Arc::clone(workers), client.clone(), rules)));
        let mut bumps: Vec<Bumping> = bumps.collect();
        let mut bumped: Vec<Option<Bumped>> = Vec::with_capacity(bumps.len());
        for bump in &mut bumps {
            let done = match patience {
                None => Some(bump.await),
                Some(patience) => tokio::time::timeout_at((asked + patience).into(), bump).await.ok(),
            };
            // A takeover that has panicked takes the Supervisor with it.
            bumped.push(done.map(|done| done.expect("a takeover ends")));
        }
        metrics::rebalance_phase(Phase::Bump, asked.elapsed());
        let asked = Instant::now();
        let partitions: Vec<i32> = takeovers.iter().map(|takeover| takeover.partition).collect();
        let logs = Self::again(&takeovers, async || {
            let partitions = partitions.clone();
            ask(client, &workers.engine().topic, move |consumer, topic| read_logs(consumer, topic, &partitions)).await
        });
        let logs = logs.await?;
        for ((takeover, bumped), bump) in takeovers.into_iter().zip(bumped).zip(bumps) {
            let log = logs[&takeover.partition];
            match bumped {
                Some(bumped) => taken.placed.extend(takeover.place(bumped?, log, workers.engine(), rules).await?),
                None => taken.late.push(Late { takeover, bump, fallback: log.end }),
            }
        }
        metrics::rebalance_phase(Phase::Position, asked.elapsed());
        Some(taken)
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

    /// Everything that needs the database: the start of a new group is pinned, then the epoch is taken.
    async fn bumped<H: Business>(self, workers: Arc<Workers<H>>, client: Client, rules: Rules) -> Bumped {
        let (engine, this) = (workers.engine(), std::slice::from_ref(&self));
        let group_is_known = Self::again(this, async || group_is_known(engine).await.map_err(|error| error.to_string())).await?;
        if !group_is_known && rules.start == Start::Latest {
            // Pinned for every partition at once, so that a crash before the first batch loses nothing, and a member that comes a moment
            // later does not take the beginning for a partition "added later".
            let ends = Self::again(this, async || ask(&client, &engine.topic, log_ends).await).await?;
            Self::again(this, async || pin(engine, &ends).await.map_err(|error| error.to_string())).await?;
        }
        let bumped = Self::again(this, async || self.bump(engine).await).await?;
        Some(bumped.map(|(ownership, held)| (ownership, held, group_is_known)))
    }

    async fn bump<H: Business>(&self, engine: &Engine<H>) -> Result<Option<(Ownership, OpenHeld)>, String> {
        let _serial = self.bumping.lock().await;
        if self.cancelled.is_raised() {
            return Err("the partition is gone".to_owned());
        }
        let bumped = async {
            let mut session = engine.store.control.get().await.map_err(DbError::from)?;
            let ownership = match self.after {
                None => Some(
                    consumed_partitions::bump(&mut session, &engine.group, &engine.topic, self.partition, &engine.owner).await?,
                ),
                Some((source, epoch)) => consumed_partitions::rebump(&mut session, source, epoch, &engine.owner).await?,
            };
            let Some(ownership) = ownership else { return Ok(None) };
            let held = after_bump(&mut session, ownership.source).await?;
            Ok::<_, DbError>(Some((ownership, held)))
        };
        bumped.await.map_err(|error| error.to_string())
    }

    /// The place of a partition whose epoch is ours. A gap is recorded before anything goes beyond it. Empty when the compare-and-set has
    /// failed; `None` when the partition is gone.
    async fn place<H: Business>(
        &self,
        bumped: Option<(Ownership, OpenHeld, bool)>,
        log: Log,
        engine: &Engine<H>,
        rules: Rules,
    ) -> Option<Option<Placed>> {
        let Some((mut ownership, held, group_is_known)) = bumped else { return Some(None) };
        let this = std::slice::from_ref(self);
        if let Some(ahead) = self.went_back(&ownership, log) {
            let doubted = async || store_doubt(engine, ownership.source, ahead).await.map_err(|error| error.to_string());
            ownership.doubt = Self::again(this, doubted).await?;
        }
        // A row that was ours and has forgotten where it stood: Kafka's offset would skip what the database has lost.
        let forgotten = ownership.next_offset.is_none() && self.wrote.last().is_some();
        let known = Known {
            committed: log.committed.filter(|_| !forgotten),
            next_offset: ownership.next_offset,
            log: (log.first, log.end),
            fresh: rules.start,
            added_later: group_is_known || forgotten,
            skips: &ownership.skips,
            on_gap: rules.on_gap,
        };
        let beginning = start::resolve(&known);
        let gap = match beginning {
            Ok(Beginning { gap, .. }) => gap,
            Err(Refusal::Gap { from, to }) => Some((from, to)),
            Err(Refusal::BeyondEnd { .. }) => None,
        };
        if let Some((from, to)) = gap {
            error!(partition = self.partition, from = from.0, to = to.0, "unsettled records are gone from the log");
            let recorded =
                async || record_gap(engine, self.partition, &ownership, from, to).await.map_err(|error| error.to_string());
            Self::again(this, recorded).await?;
        }
        let outcome = match beginning {
            Err(refusal) => Err(refusal.to_string()),
            Ok(beginning) => Ok(self.positioned(ownership, held, log, beginning)),
        };
        Some(Some(Placed { partition: self.partition, run: self.run, outcome, fallback: log.end }))
    }

    /// Whether the database has lost what it had: then up to which offset it is known to have been further.
    fn went_back(&self, ownership: &Ownership, log: Log) -> Option<Option<NextOffset>> {
        let next_offset = ownership.next_offset;
        // Of a group that never was here, Kafka's offset alone says nothing; what we wrote ourselves does.
        let ahead = log
            .committed
            .filter(|_| next_offset.is_some())
            .max(self.wrote.last())
            .filter(|further| next_offset.is_none_or(|next| *further > ownership.skips.beyond(next)));
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

    fn positioned(&self, ownership: Ownership, held: OpenHeld, log: Log, beginning: Beginning) -> Positioned {
        let digest = ownership.last_record_digest.filter(|_| beginning.has_witness);
        Positioned {
            partition: self.partition,
            source: ownership.source,
            epoch: ownership.epoch,
            written: Written::known(ownership.next_offset),
            base: beginning.base,
            witness: digest.map(|digest| Witness { offset: Offset(beginning.base.0 - 1), digest }),
            skips: ownership.skips,
            holds: ownership.holds,
            paused: ownership.paused,
            committed: log.committed,
            replayed_below: ownership.next_offset.filter(|_| log.set_by_others),
            held,
            doubt: ownership.doubt,
            wrote: self.wrote.clone(),
        }
    }
}

impl Late {
    /// Waits for the database, then reads what the broker says, and places the partition.
    pub async fn run<H: Business>(self, workers: &Arc<Workers<H>>, client: &Client, rules: Rules) -> Option<Taken> {
        let Self { takeover, bump, .. } = self;
        let bumped = bump.await.expect("a takeover ends")?;
        let partition = takeover.partition;
        let logs = Takeover::again(std::slice::from_ref(&takeover), async || {
            ask(client, &workers.engine().topic, move |consumer, topic| read_logs(consumer, topic, &[partition])).await
        });
        let log = logs.await?[&partition];
        let placed = takeover.place(bumped, log, workers.engine(), rules).await?;
        Some(Taken { placed: placed.into_iter().collect(), late: Vec::new() })
    }

    /// The partition, and a valid offset to assign it at until its own is known.
    #[must_use]
    pub fn blind(&self) -> (i32, NextOffset) {
        (self.takeover.partition, self.fallback)
    }
}

/// What follows every bump, before the first batch: attempts of the past become rows of their own, and what is open is read.
pub(super) async fn after_bump(session: &mut Session, source: SourceId) -> Result<OpenHeld, DbError> {
    CrashPoint::Bumped.passed();
    attempts::convert_leftovers(session, source).await?;
    CrashPoint::LeftoversConverted.passed();
    held_turns::open(session, source).await
}

/// Writes down, under the fence, that unsettled records are gone. A row that is there already stays; one whose epoch has moved on is for
/// the next owner to write.
async fn record_gap<H: Business>(
    engine: &Engine<H>,
    partition: i32,
    ownership: &Ownership,
    from: NextOffset,
    to: NextOffset,
) -> Result<(), DbError> {
    let record =
        Record { partition, offset: from.first_open(), timestamp_ms: None, key: None, headers: Box::default(), payload: None };
    let error = format!("records [{from}, {to}) are gone from the log and were not settled");
    let row = NewHeld {
        record: &record,
        digest: RecordDigest::of_range(from, to),
        event_id: None,
        reason: HeldReason::Gap,
        error: &error,
        state: HeldState::Parked,
        owns_claim: false,
        provider_charge_id: None,
        attempts: 0,
        next_attempt_in: None,
    };
    let mut session = engine.store.control.get().await.map_err(DbError::from)?;
    let recorded = session.transaction("gap", &engine.limits, async |tx: &mut Session| {
        match consumed_partitions::fence(tx, ownership.source, ownership.epoch).await? {
            Some(_) => held_events::hold(tx, ownership.source, std::slice::from_ref(&row)).await,
            None => Ok(()),
        }
    });
    recorded.await.map_err(TransactionError::into_inner)
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
    stored.await.map_err(TransactionError::into_inner)
}
