//! The DedupActors and who may use one: `partition_concurrency` of them, lent to partitions in the order they ask.
//!
//! In: a partition that has work. Out: a DedupActor on loan, returned when the loan is dropped. It owns their addresses. If one dies
//! on a batch, that batch's outcome is unknown, and another actor takes its place.
//!
//! Invariant: no more transactions are open than there are permits, and a DedupActor serves one partition at a time.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use actix::Arbiter;
use actix::prelude::*;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tracing::error;

use crate::handler::Handler as Business;
use crate::pipeline::dedup::{DedupActor, Done, Engine, RunBatch};
use crate::pipeline::offset::OffsetActor;
use crate::pipeline::pace::Pace;

/// The DedupActors: `partition_concurrency` of them, lent out first come, first served.
#[derive(Debug)]
pub struct Workers<H: Business> {
    engine: Arc<Engine<H>>,
    offsets: Addr<OffsetActor>,
    free: Arc<Semaphore>,
    idle: Mutex<Vec<Addr<DedupActor<H>>>>,
    threads: Threads,
    pace: Pace,
}

/// The DedupActors' threads: one per core, so that a batch which is decoded keeps no other waiting for its database.
#[derive(Debug)]
struct Threads {
    arbiters: Vec<Arbiter>,
    next: AtomicUsize,
}

/// A DedupActor on loan.
#[derive(Debug)]
pub struct Worker<H: Business> {
    workers: Arc<Workers<H>>,
    actor: Option<Addr<DedupActor<H>>>,
    _permit: OwnedSemaphorePermit,
}

impl<H: Business> Workers<H> {
    /// `count` DedupActors, whose batches a drain waits for so long.
    #[must_use]
    pub fn start(engine: Arc<Engine<H>>, offsets: Addr<OffsetActor>, count: usize, drain: Duration) -> Arc<Self> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = Threads { arbiters: (0..count.min(cores)).map(|_| Arbiter::new()).collect(), next: AtomicUsize::new(0) };
        let idle = (0..count).map(|_| threads.start(DedupActor::new(Arc::clone(&engine), offsets.clone()))).collect();
        Arc::new(Self {
            engine,
            offsets,
            free: Arc::new(Semaphore::new(count)),
            idle: Mutex::new(idle),
            threads,
            pace: Pace::new(drain),
        })
    }

    /// The next free DedupActor, in the order asked.
    ///
    /// # Panics
    /// Never: the semaphore is not closed, and holds as many permits as there are actors.
    pub async fn borrow(self: &Arc<Self>) -> Worker<H> {
        let permit = Arc::clone(&self.free).acquire_owned().await.expect("the semaphore is never closed");
        let actor = self.idle().pop().filter(Addr::connected);
        // One that has died on a batch is replaced here.
        let actor = actor.unwrap_or_else(|| self.threads.start(DedupActor::new(Arc::clone(&self.engine), self.offsets.clone())));
        Worker { workers: Arc::clone(self), actor: Some(actor), _permit: permit }
    }

    /// What the actors share.
    #[must_use]
    pub fn engine(&self) -> &Engine<H> {
        &self.engine
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<Addr<DedupActor<H>>>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Threads {
    fn start<H: Business>(&self, actor: DedupActor<H>) -> Addr<DedupActor<H>> {
        let next = self.next.fetch_add(1, Ordering::Relaxed);
        DedupActor::start_in_arbiter(&self.arbiters[next % self.arbiters.len()].handle(), |_| actor)
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        for arbiter in &self.arbiters {
            arbiter.stop();
        }
    }
}

impl<H: Business> Worker<H> {
    /// Runs a batch. A DedupActor that dies on it leaves its outcome unknown.
    pub async fn run(self, batch: RunBatch<H::Answer>) -> Done {
        let Some(actor) = &self.actor else { unreachable!("the actor goes back only when the loan ends") };
        let partition = batch.partition;
        let began = Instant::now();
        let done = actor.send(batch).await.unwrap_or_else(|closed| {
            error!(partition, %closed, "a DedupActor died on a batch");
            Done::Died
        });
        self.workers.pace.took(began.elapsed());
        done
    }
}

impl<H: Business> Drop for Worker<H> {
    fn drop(&mut self) {
        if let Some(actor) = self.actor.take() {
            self.workers.idle().push(actor);
        }
    }
}
