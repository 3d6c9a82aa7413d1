//! The partitions that are ours, each with its life: starting, running, stopped.
//!
//! In: starts, reports, ends. Out: who runs what, and since which start. It owns the map, without I/O; the Supervisor acts on it.
//!
//! Invariant: a start of a partition has a number, and whatever names an earlier one finds nothing.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use actix::prelude::*;

use crate::handler::{Answers, Handler as Business, StopFlag};
use crate::pipeline::partition::PartitionActor;
use crate::pipeline::takeover::Takeover;
use crate::record::{Epoch, NextOffset, SourceId};

/// Why a PartitionActor ended by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Report {
    /// Its row is not ours any more.
    Fenced,
    /// The database is not in the state that it left it in.
    WentBack(String),
    /// Records may be missing.
    ChainBroken,
    /// It, or the DedupActor that ran its batch, panicked.
    Died,
    /// A person must look.
    Stop(String),
}

/// A report and who sent it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reported {
    /// The partition.
    pub partition: i32,
    /// Which start of it.
    pub run: u64,
    /// What happened.
    pub report: Report,
}

/// The map.
#[derive(Debug)]
pub struct Lives<H: Business> {
    partitions: BTreeMap<i32, Owned<H>>,
    /// Held while a partition is bumped; kept beyond its life, so that a late bump of the last one is not overtaken.
    bumping: BTreeMap<i32, Arc<tokio::sync::Mutex<()>>>,
    runs: u64,
}

/// One partition.
#[derive(Debug)]
pub struct Owned<H: Business> {
    run: u64,
    /// Where it stands.
    pub life: Life<H>,
    /// An operator has paused it.
    pub is_paused: bool,
    /// Outlive the actors, so that nobody is called twice for want of a memory.
    pub answers: Answers<H::Answer>,
    wrote: Wrote,
    /// Raised when this start ends.
    pub stop: StopFlag,
    /// Where it started last, and how often an actor has died since it last got further.
    deaths: (NextOffset, u32),
}

/// The frontier that this process wrote last, since the partition was assigned. It outlives the actors, and tells whether the database
/// went back in time between two of them.
#[derive(Clone, Debug, Default)]
pub struct Wrote(Arc<Mutex<Option<NextOffset>>>);

impl Wrote {
    /// What was written last, if anything.
    #[must_use]
    pub fn last(&self) -> Option<NextOffset> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It has been written.
    pub fn note(&self, frontier: NextOffset) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(frontier);
    }
}

/// Where a partition stands.
#[derive(Debug)]
pub enum Life<H: Business> {
    /// It is being taken over.
    Starting,
    /// An actor has it.
    Running {
        /// Which.
        actor: Addr<PartitionActor<H>>,
        /// Its row.
        source: SourceId,
        /// The epoch that it was taken over under.
        epoch: Epoch,
    },
    /// It waits for a person. If it was running, its actor may live on, for what operators ask for.
    Stopped {
        /// Who serves them.
        serving: Option<Addr<PartitionActor<H>>>,
    },
}

impl<H: Business> Lives<H> {
    /// Begins a start of the partition; `after` is the row and epoch that a compare-and-set must still find.
    pub fn begin(&mut self, partition: i32, after: Option<(SourceId, Epoch)>) -> Takeover {
        self.runs += 1;
        let run = self.runs;
        let stop = StopFlag::default();
        let owned = self.partitions.entry(partition).or_insert_with(|| Owned {
            run,
            life: Life::Starting,
            is_paused: false,
            answers: Answers::default(),
            wrote: Wrote::default(),
            stop: StopFlag::default(),
            deaths: (NextOffset(0), 0),
        });
        owned.run = run;
        owned.life = Life::Starting;
        // Whoever still serves the start before begins nothing more.
        std::mem::replace(&mut owned.stop, stop.clone()).raise();
        let bumping = Arc::clone(self.bumping.entry(partition).or_default());
        Takeover { partition, run, after, wrote: owned.wrote.clone(), cancelled: stop, bumping }
    }

    /// The partition, if this is its current start.
    pub fn of_run(&mut self, partition: i32, run: u64) -> Option<&mut Owned<H>> {
        self.partitions.get_mut(&partition).filter(|owned| owned.run == run)
    }

    /// The partition waits for a person.
    pub fn stopped(&mut self, partition: i32) {
        if let Some(owned) = self.partitions.get_mut(&partition) {
            let serving = match std::mem::replace(&mut owned.life, Life::Starting) {
                Life::Running { actor, .. } => Some(actor),
                Life::Starting | Life::Stopped { .. } => None,
            };
            owned.life = Life::Stopped { serving };
        }
    }

    /// The partition is given up.
    pub fn end(&mut self, partition: i32) -> Option<Owned<H>> {
        self.partitions.remove(&partition)
    }

    /// All of them.
    #[must_use]
    pub fn partitions(&self) -> Vec<i32> {
        self.partitions.keys().copied().collect()
    }

    /// Those that operators have paused.
    pub fn all_paused(&self) -> impl Iterator<Item = i32> {
        self.partitions.iter().filter(|(_, owned)| owned.is_paused).map(|(partition, _)| *partition)
    }

    /// Those whose takeover is over, each with its start.
    #[must_use]
    pub fn all_taken(&self) -> BTreeMap<i32, u64> {
        let taken = self.partitions.iter().filter(|(_, owned)| !matches!(owned.life, Life::Starting));
        taken.map(|(partition, owned)| (*partition, owned.run)).collect()
    }

    /// Those that wait for a person.
    pub fn all_stopped(&self) -> impl Iterator<Item = i32> {
        self.partitions.iter().filter(|(_, owned)| matches!(owned.life, Life::Stopped { .. })).map(|(partition, _)| *partition)
    }

    /// Those that an actor has; the actors start nothing more.
    pub fn stop_all_running(&self) -> Vec<(i32, SourceId, Epoch)> {
        let running = self.partitions.iter().filter_map(|(partition, owned)| match owned.life {
            Life::Running { source, epoch, .. } => {
                owned.stop.raise();
                Some((*partition, source, epoch))
            }
            Life::Starting | Life::Stopped { .. } => None,
        });
        running.collect()
    }
}

impl<H: Business> Life<H> {
    /// The actor.
    #[must_use]
    pub const fn actor(&self) -> Option<&Addr<PartitionActor<H>>> {
        match self {
            Self::Running { actor, .. } => Some(actor),
            Self::Stopped { serving } => serving.as_ref(),
            Self::Starting => None,
        }
    }
}

impl<H: Business> Owned<H> {
    /// It begins at `base`: further than the last time means that the deaths before count no more.
    pub fn begins_at(&mut self, base: NextOffset) {
        if self.deaths.0 != base {
            self.deaths = (base, 0);
        }
    }

    /// Counts a death; out: how many in a row.
    pub const fn died(&mut self) -> u32 {
        self.deaths.1 += 1;
        self.deaths.1
    }
}

impl<H: Business> Default for Lives<H> {
    fn default() -> Self {
        Self { partitions: BTreeMap::new(), bumping: BTreeMap::new(), runs: 0 }
    }
}
