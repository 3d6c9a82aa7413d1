//! The DedupActors and who may use one: `partition_concurrency` of them, lent to partitions in the order they ask.
//!
//! In: a partition that has work. Out: a DedupActor on loan, returned when the loan is dropped; or a seat in the transaction of a partition
//! that has one, when both wait with new records of their windows and the handler lets partitions share. It owns the actors' addresses and the queue.
//! If a DedupActor dies on a batch, that batch's outcome is unknown, and another actor takes its place.
//!
//! Invariant: no more transactions are open than there are DedupActors, and a DedupActor has one transaction at a time.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use actix::Arbiter;
use actix::prelude::*;
use tokio::sync::oneshot;
use tracing::error;

use crate::handler::Handler as Business;
use crate::pipeline::dedup::{DedupActor, Done, Engine, RunBatch, RunTogether};
use crate::pipeline::offset::OffsetActor;
use crate::pipeline::pace::Pace;

/// The most events of a transaction that several partitions share: beyond it, what a COMMIT costs is little to each of them.
const SHARED_MAX: usize = 512;
/// After a transaction that its partitions could not share, so many turns are taken alone.
const TURNS_APART: usize = 32;

/// The DedupActors: `partition_concurrency` of them, lent out first come, first served.
#[derive(Debug)]
pub struct Workers<H: Business> {
    engine: Arc<Engine<H>>,
    offsets: Addr<OffsetActor>,
    queue: Mutex<Queue<H>>,
    threads: Threads,
    pace: Pace,
}

/// Nobody waits while an actor is free.
#[derive(Debug)]
struct Queue<H: Business> {
    free: Vec<Addr<DedupActor<H>>>,
    waiting: VecDeque<Waiting<H>>,
    /// Turns until partitions may share a transaction again.
    apart: usize,
}

#[derive(Debug)]
struct Waiting<H: Business> {
    /// How many events it has, if it would share a transaction.
    shares: Option<usize>,
    turn: oneshot::Sender<Turn<H>>,
}

/// The DedupActors' threads: one per core, so that a batch which is decoded keeps no other waiting for its database.
#[derive(Debug)]
struct Threads {
    arbiters: Vec<Arbiter>,
    next: AtomicUsize,
}

/// A partition's batch may run.
#[derive(Debug)]
pub enum Turn<H: Business> {
    /// In a transaction that begins with it.
    Own(Worker<H>),
    /// In that of another partition.
    Shared(Seat<H::Answer>),
}

/// A DedupActor on loan.
#[derive(Debug)]
pub struct Worker<H: Business> {
    workers: Arc<Workers<H>>,
    actor: Option<Addr<DedupActor<H>>>,
}

/// A place in another partition's transaction.
#[derive(Debug)]
pub struct Seat<A> {
    /// How many more events that transaction takes, from all who have a seat.
    room: Arc<AtomicUsize>,
    board: oneshot::Sender<Aboard<A>>,
}

/// A batch that came along, and who waits for its end.
type Aboard<A> = (RunBatch<A>, oneshot::Sender<Done>);

impl<H: Business> Workers<H> {
    /// `count` DedupActors, whose batches a drain waits for so long.
    #[must_use]
    pub fn start(engine: Arc<Engine<H>>, offsets: Addr<OffsetActor>, count: usize, drain: Duration) -> Arc<Self> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = Threads { arbiters: (0..count.min(cores)).map(|_| Arbiter::new()).collect(), next: AtomicUsize::new(0) };
        let free = (0..count).map(|_| threads.start(DedupActor::new(Arc::clone(&engine), offsets.clone()))).collect();
        let queue = Mutex::new(Queue { free, waiting: VecDeque::new(), apart: 0 });
        Arc::new(Self { engine, offsets, queue, threads, pace: Pace::new(drain) })
    }

    /// The next turn, in the order asked. `shares`: the batch has so many events and may go with those of other partitions.
    pub async fn turn(self: &Arc<Self>, shares: Option<usize>) -> Turn<H> {
        loop {
            let waiting = {
                let mut queue = self.queue();
                if let Some(actor) = queue.free.pop() {
                    return Turn::Own(self.lend(actor));
                }
                let (turn, waiting) = oneshot::channel();
                queue.waiting.push_back(Waiting { shares, turn });
                waiting
            };
            // Whoever had it in hand may have gone with it.
            if let Ok(turn) = waiting.await {
                return turn;
            }
        }
    }

    /// What the actors share.
    #[must_use]
    pub fn engine(&self) -> &Engine<H> {
        &self.engine
    }

    /// One that has died on a batch is replaced here.
    fn lend(self: &Arc<Self>, actor: Addr<DedupActor<H>>) -> Worker<H> {
        let alive = actor.connected();
        let new = || self.threads.start(DedupActor::new(Arc::clone(&self.engine), self.offsets.clone()));
        Worker { workers: Arc::clone(self), actor: Some(if alive { actor } else { new() }) }
    }

    /// Hands the actor to whoever waits longest and is still there.
    fn give_back(self: &Arc<Self>, mut actor: Addr<DedupActor<H>>) {
        loop {
            let next = {
                let mut queue = self.queue();
                let Some(next) = queue.waiting.pop_front() else {
                    queue.free.push(actor);
                    return;
                };
                next
            };
            let Err(Turn::Own(mut refused)) = next.turn.send(Turn::Own(self.lend(actor))) else { return };
            let Some(returned) = refused.actor.take() else { unreachable!("it was lent a moment ago") };
            actor = returned;
        }
    }

    /// Those who wait and would share, the first ones whose events fill so much room, unless that went wrong a moment ago.
    fn companions(&self, mut room: usize) -> Vec<oneshot::Sender<Turn<H>>> {
        let mut queue = self.queue();
        if queue.apart > 0 {
            queue.apart -= 1;
            return Vec::new();
        }
        let (mut companions, mut stay) = (Vec::new(), VecDeque::with_capacity(queue.waiting.len()));
        for waiting in queue.waiting.drain(..) {
            match waiting.shares {
                Some(events) if room > 0 => {
                    room = room.saturating_sub(events);
                    companions.push(waiting.turn);
                }
                _ => stay.push_back(waiting),
            }
        }
        queue.waiting = stay;
        companions
    }

    fn queue(&self) -> std::sync::MutexGuard<'_, Queue<H>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
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

impl<H: Business> Turn<H> {
    /// Of so many events that could run: how many may.
    #[must_use]
    pub fn take(&self, events: usize) -> usize {
        match self {
            Self::Own(_) => events,
            Self::Shared(seat) => {
                let left = |room: usize| Some(room.saturating_sub(events));
                let Ok(room) = seat.room.fetch_update(Ordering::AcqRel, Ordering::Acquire, left) else {
                    unreachable!("there is always a next value")
                };
                room.min(events)
            }
        }
    }

    /// Whether only a window's batch that shares may run.
    #[must_use]
    pub const fn is_shared(&self) -> bool {
        matches!(self, Self::Shared(_))
    }

    /// Runs a batch. `shares`: others who wait may come along.
    pub async fn run(self, batch: RunBatch<H::Answer>, shares: bool) -> Done {
        match self {
            Self::Own(worker) if shares => worker.run_together(batch).await,
            Self::Own(worker) => worker.run(batch).await,
            Self::Shared(seat) => {
                let (done, ended) = oneshot::channel();
                match seat.board.send((batch, done)) {
                    Ok(()) => ended.await.unwrap_or(Done::Died),
                    // Whose transaction it was to be is gone, and has not begun it.
                    Err(_) => Done::Apart,
                }
            }
        }
    }
}

impl<H: Business> Worker<H> {
    /// A DedupActor that dies on it leaves its outcome unknown.
    async fn run(self, batch: RunBatch<H::Answer>) -> Done {
        let partition = batch.partition;
        let began = Instant::now();
        let done = self.actor().send(batch).await.unwrap_or_else(|closed| {
            error!(partition, %closed, "a DedupActor died on a batch");
            Done::Died
        });
        self.workers.pace.took(began.elapsed());
        done
    }

    /// With the batches of those who wait, as far as there is room. By itself: the transaction is theirs too, so it must not end with the actor
    /// of the first.
    async fn run_together(self, batch: RunBatch<H::Answer>) -> Done {
        let room =
            SHARED_MAX.min(self.workers.engine.batch_max).saturating_sub(batch.window().map_or(0, |window| window.records().len()));
        let companions = self.workers.companions(room);
        if companions.is_empty() {
            return self.run(batch).await;
        }
        let (done, ended) = oneshot::channel();
        actix::spawn(self.go_with(companions, room, (batch, done)));
        ended.await.unwrap_or(Done::Died)
    }

    async fn go_with(self, companions: Vec<oneshot::Sender<Turn<H>>>, room: usize, (batch, done): Aboard<H::Answer>) {
        let room = Arc::new(AtomicUsize::new(room));
        let mut boarding = Vec::with_capacity(companions.len());
        for companion in companions {
            let (board, aboard) = oneshot::channel();
            // One that is gone, or has other work by now, leaves its seat empty.
            if companion.send(Turn::Shared(Seat { room: Arc::clone(&room), board })).is_ok() {
                boarding.push(aboard);
            }
        }
        let (mut batches, mut waiting) = (vec![batch], vec![done]);
        for aboard in boarding {
            if let Ok((batch, done)) = aboard.await {
                batches.push(batch);
                waiting.push(done);
            }
        }
        let all_done = match <[_; 1]>::try_from(batches) {
            Ok([batch]) => vec![self.run(batch).await],
            Err(batches) => {
                let began = Instant::now();
                let all_done = self.actor().send(RunTogether(batches)).await.unwrap_or_else(|closed| {
                    error!(partitions = waiting.len(), %closed, "a DedupActor died on a batch of several partitions");
                    waiting.iter().map(|_| Done::Died).collect()
                });
                self.workers.pace.took(began.elapsed());
                if all_done.iter().any(|done| matches!(done, Done::Apart)) {
                    self.workers.queue().apart = TURNS_APART;
                }
                drop(self);
                all_done
            }
        };
        for (waiting, done) in waiting.into_iter().zip(all_done) {
            let _ = waiting.send(done); // an actor that has died meanwhile is replaced at its row's frontier
        }
    }

    fn actor(&self) -> &Addr<DedupActor<H>> {
        let Some(actor) = &self.actor else { unreachable!("the actor goes back only when the loan ends") };
        actor
    }
}

impl<H: Business> Drop for Worker<H> {
    fn drop(&mut self) {
        if let Some(actor) = self.actor.take() {
            self.workers.give_back(actor);
        }
    }
}
