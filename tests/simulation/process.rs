//! One process and what it owns: the engine's own machines, and between them the steps of a batch as `pipeline/dedup.rs` takes them.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::time::{Duration, SystemTime};

use onceward::config::{OnGap, Start};
use onceward::handler::{BatchContext, Claimed, Event, EventDigest, Handler, HeldReason, Outcome, Rejection};
use onceward::held::{Next, RetryPolicy};
use onceward::pipeline::batch::Batch;
use onceward::pipeline::dedup::Written;
use onceward::pipeline::offset::Ledger;
use onceward::pipeline::start::{Beginning, Known, resolve, settled};
use onceward::pipeline::window::{Buffer, Handed, Share, Window, WindowBatch};
use onceward::record::{Epoch, NextOffset, Offset, Record, Skips, SourceId};
use onceward::store::consumed_partitions::Doubt;
use onceward::store::held_events::HeldState;
use onceward::store::processed_events::Seen;
use onceward::store::{DbError, Session};
use uuid::Uuid;

use super::draw::Draw;
use super::world::{Held, Said, Tx, World};

/// An event of the simulation: sixteen bytes of id, one of content.
#[derive(Clone, Copy, Debug)]
pub struct Told {
    pub id: Uuid,
    pub content: u8,
}

impl Event for Told {
    fn id(&self) -> Uuid {
        self.id
    }

    fn digest(&self) -> EventDigest {
        EventDigest::new(1, u64::from(self.content) << 8)
    }
}

/// Reads a payload; one that is too short is no event.
pub fn read(record: &Record) -> Result<Told, Rejection> {
    let payload = record.payload.as_deref().unwrap_or_default();
    match (payload.first_chunk::<16>(), payload.get(16)) {
        (Some(id), Some(content)) => Ok(Told { id: Uuid::from_bytes(*id), content: *content }),
        _ => Err(Rejection { reason: HeldReason::Undecodable, error: "too short".to_owned(), event_id: None }),
    }
}

struct Reads;

impl Handler for Reads {
    type Event = Told;
    type Answer = ();

    fn decode(&self, record: &Record) -> Result<Told, Rejection> {
        read(record)
    }

    async fn apply(&self, _: &mut Session, _: &BatchContext<()>, _: &[Claimed<Told>]) -> Result<Vec<Outcome>, DbError> {
        unreachable!("the simulation decides the outcomes itself")
    }
}

const RETRY: RetryPolicy = RetryPolicy {
    max_attempts: 1_000,
    max_age: Duration::from_secs(1_000_000),
    backoff_min: Duration::from_millis(100),
    backoff_max: Duration::from_millis(2_000),
};
/// The most records of one batch.
const BATCH: usize = 6;

/// A process.
pub struct Process {
    pub frozen: bool,
    pub owned: BTreeMap<usize, Owner>,
    pub ledger: Ledger,
    buffer: Buffer,
    share: Share,
}

/// A partition as its PartitionActor has it.
pub struct Owner {
    pub epoch: i64,
    pub stop: bool,
    pub window: Window,
    /// One past the last record handed on by the poll thread.
    pub handed: i64,
    written: Written,
    answers: HashMap<Uuid, Said>,
    flight: Option<Flight>,
    /// After an outage: a new epoch comes first.
    bump_first: bool,
    /// The chain broke: what runs ends, then the partition is read again.
    broken: bool,
}

/// A batch on its way.
struct Flight {
    tx: Tx,
    /// The server has ended the transaction.
    dead: bool,
    work: Work,
    phase: Phase,
    claimed: HashSet<Uuid>,
    seen: Vec<Seen>,
    to_ask: VecDeque<Uuid>,
    said: HashMap<Uuid, Said>,
}

enum Work {
    Window(WindowBatch),
    /// Places in `World::held`; read under the fence.
    Due(Vec<usize>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Fence,
    Claim,
    Open,
    Call,
    Commit,
}

/// What a step came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// There was nothing to do, or it waits for a lock.
    Nothing,
    /// It went on.
    Went,
    /// A batch has committed.
    Settled,
    /// COMMIT was not answered.
    CommitUnknown,
    /// The row is somebody else's: this owner is over.
    Fenced,
    /// Records may be missing: this owner is over.
    ChainBroken,
    /// A batch was lost with its transaction.
    Abandoned,
}

impl Process {
    pub fn new() -> Self {
        let buffer = Buffer::new(1 << 20, std::sync::mpsc::channel().0);
        Self { frozen: false, owned: BTreeMap::new(), ledger: Ledger::default(), buffer, share: Share::default() }
    }

    /// Takes a partition over: bump, then Kafka's offset, then the decision. `None`: the old owner's transaction is still open.
    pub fn take_over(&mut self, world: &mut World, partition: usize) -> Option<Owner> {
        let row = &mut world.rows[partition];
        if row.locked_by.is_some() {
            return None;
        }
        row.epoch += 1;
        let (epoch, next_offset, committed) =
            (row.epoch, row.next_offset.map(NextOffset), world.committed[partition].map(NextOffset));
        let known = Known {
            committed,
            next_offset,
            log: (Offset(0), NextOffset(world.end_of(partition))),
            fresh: Start::Earliest,
            added_later: false,
            skips: &Skips::default(),
            on_gap: OnGap::Stop,
        };
        let Beginning { base, .. } = resolve(&known).unwrap_or_else(|refusal| panic!("nothing here may refuse a start: {refusal}"));
        self.ledger.track(i32::try_from(partition).expect("small"), Epoch(epoch), committed, settled(base, next_offset));
        Some(Owner {
            epoch,
            stop: false,
            window: Window::positioned(base),
            handed: base.0,
            written: Written::known(next_offset),
            answers: HashMap::new(),
            flight: None,
            bump_first: false,
            broken: false,
        })
    }

    /// The poll thread hands records on; it may lose one on the way, and the chain must show it.
    pub fn deliver(&mut self, world: &World, partition: usize, draw: &mut Draw) -> Step {
        let Some(owner) = self.owned.get_mut(&partition) else { return Step::Nothing };
        let skip = usize::from(draw.percent(3));
        let fresh = world.log[partition].iter().filter(|record| record.offset.0 >= owner.handed).skip(skip);
        let records: Vec<_> = fresh.take(1 + draw.below(8)).map(|record| self.buffer.admit(record.clone(), &self.share)).collect();
        let (Some(first), Some(last)) = (records.first(), records.last()) else { return Step::Nothing };
        // What is skipped was handed to nobody, so that the next link does not fit.
        let after = if skip == 0 { owner.handed } else { first.offset.0 };
        owner.handed = last.offset.next().0;
        if owner.broken || owner.stop {
            return Step::Nothing;
        }
        owner.broken = owner.window.offer(Handed { after: NextOffset(after), records }).is_err();
        Step::Went
    }
}

impl Owner {
    /// Whether a batch runs.
    pub const fn is_busy(&self) -> bool {
        self.flight.is_some()
    }

    /// What the server does to a transaction whose client is silent for too long.
    pub fn lose_transaction(&mut self, world: &mut World) {
        if let Some(flight) = &mut self.flight {
            world.end(flight.tx);
            flight.dead = true;
        }
    }

    /// One step of a batch, or the begin of one.
    pub fn step(&mut self, world: &mut World, partition: usize, ledger: &mut Ledger, draw: &mut Draw) -> Step {
        let Some(flight) = self.flight.take() else { return self.begin(world, partition, draw) };
        match flight.phase {
            // What runs in the transaction finds out that it is gone; what runs beside it does not.
            Phase::Fence | Phase::Claim | Phase::Commit if flight.dead => self.abandon(world, &flight),
            Phase::Fence => self.fence(world, partition, flight),
            Phase::Claim => self.claim(world, partition, flight),
            Phase::Open => self.open(world, partition, flight),
            Phase::Call => self.call(world, flight, draw),
            Phase::Commit => match &flight.work {
                Work::Window(batch) => self.commit(world, partition, ledger, &flight, batch, draw),
                Work::Due(places) => self.commit_due(world, &flight, places, draw),
            },
        }
    }

    fn begin(&mut self, world: &mut World, partition: usize, draw: &mut Draw) -> Step {
        if self.stop {
            return Step::Nothing;
        }
        if self.broken {
            return Step::ChainBroken;
        }
        if self.bump_first {
            return self.bump(world, partition);
        }
        let work = if !due(world, partition).is_empty() && (self.window.is_empty() || draw.percent(50)) {
            Work::Due(Vec::new())
        } else {
            let Some(batch) = self.window.take(1 + draw.below(BATCH)) else { return Step::Nothing };
            Work::Window(batch)
        };
        let (tx, phase) = (world.begin(), Phase::Fence);
        let (claimed, seen, to_ask, said) = (HashSet::new(), Vec::new(), VecDeque::new(), HashMap::new());
        self.flight = Some(Flight { tx, dead: false, work, phase, claimed, seen, to_ask, said });
        Step::Went
    }

    /// A new epoch by compare-and-set.
    fn bump(&mut self, world: &mut World, partition: usize) -> Step {
        let row = &mut world.rows[partition];
        if row.locked_by.is_some() {
            return Step::Nothing;
        }
        if row.epoch != self.epoch {
            return Step::Fenced;
        }
        row.epoch += 1;
        let found = row.next_offset.map(NextOffset);
        assert!(self.written.allows(found), "{found:?} is there, but this owner wrote {:?}", self.written);
        self.epoch = row.epoch;
        self.written = Written::known(found);
        self.bump_first = false;
        Step::Went
    }

    fn abandon(&mut self, world: &mut World, flight: &Flight) -> Step {
        world.end(flight.tx);
        if matches!(flight.work, Work::Window(_)) {
            self.window.abandon();
        }
        self.bump_first = true;
        Step::Abandoned
    }

    fn go_on(&mut self, flight: Flight, phase: Phase) -> Step {
        self.flight = Some(Flight { phase, ..flight });
        Step::Went
    }

    fn wait(&mut self, flight: Flight) -> Step {
        self.flight = Some(flight);
        Step::Nothing
    }

    fn fence(&mut self, world: &mut World, partition: usize, flight: Flight) -> Step {
        let row = &mut world.rows[partition];
        if row.locked_by.is_some() {
            return self.wait(flight);
        }
        if row.epoch != self.epoch {
            world.end(flight.tx);
            return Step::Fenced;
        }
        let found = row.next_offset.map(NextOffset);
        assert!(self.written.allows(found), "{found:?} is there, but this owner wrote {:?}", self.written);
        row.locked_by = Some(flight.tx);
        self.go_on(flight, Phase::Claim)
    }

    fn claim(&mut self, world: &mut World, partition: usize, mut flight: Flight) -> Step {
        match &mut flight.work {
            Work::Due(places) => {
                *places = due(world, partition);
                flight.to_ask = places.iter().filter_map(|place| world.held[*place].id).collect();
            }
            Work::Window(batch) => {
                let mut decoded = decode(batch);
                let rows = decoded.claims();
                if rows.iter().any(|row| world.claiming.get(&row.event_id).is_some_and(|by| *by != flight.tx)) {
                    return self.wait(flight);
                }
                let (mut claimed, mut seen) = (HashSet::new(), Vec::new());
                for row in &rows {
                    match world.claims.get(&row.event_id) {
                        None => {
                            claimed.insert(row.event_id);
                            world.claiming.insert(row.event_id, flight.tx);
                        }
                        Some(digest) => {
                            seen.push(Seen {
                                event_id: row.event_id,
                                digest: Some(*digest),
                                source: Some(SourceId(0)),
                                offset: None,
                            });
                        }
                    }
                }
                assert!(decoded.seen(SourceId(1), &claimed, &seen).is_empty(), "a claim is inserted or found");
                flight.to_ask = decoded.take_claimed(&Doubt::default()).iter().map(|claimed| claimed.event().id).collect();
                (flight.claimed, flight.seen) = (claimed, seen);
            }
        }
        self.go_on(flight, Phase::Open)
    }

    /// On a connection of its own, so also when the transaction is gone; fenced by the epoch.
    fn open(&mut self, world: &mut World, partition: usize, mut flight: Flight) -> Step {
        if world.rows[partition].epoch != self.epoch {
            flight.to_ask.clear();
            return self.go_on(flight, Phase::Commit);
        }
        let paid: Vec<Uuid> = flight.to_ask.iter().copied().filter(|id| world.payments.contains(id)).collect();
        for id in paid {
            flight.said.insert(id, if world.charged[&id] { Said::Charged } else { Said::Declined });
        }
        for id in &flight.to_ask {
            if !flight.said.contains_key(id) {
                world.attempts.insert(*id);
            }
        }
        self.go_on(flight, Phase::Call)
    }

    fn call(&mut self, world: &mut World, mut flight: Flight, draw: &mut Draw) -> Step {
        let Some(id) = flight.to_ask.pop_front() else { return self.go_on(flight, Phase::Commit) };
        // A transaction that the server has ended is one whose deadline is over: no call starts.
        if self.stop || flight.dead {
            flight.to_ask.clear();
            return self.go_on(flight, Phase::Commit);
        }
        if let Entry::Vacant(unasked) = flight.said.entry(id) {
            let kept = self.answers.get(&id).copied().filter(|said| matches!(said, Said::Charged | Said::Declined));
            let said = *unasked.insert(kept.unwrap_or_else(|| world.call(id, draw)));
            if said != Said::NotStarted {
                self.answers.insert(id, said);
            }
        }
        self.go_on(flight, Phase::Call)
    }

    fn commit(
        &mut self,
        world: &mut World,
        partition: usize,
        ledger: &mut Ledger,
        flight: &Flight,
        batch: &WindowBatch,
        draw: &mut Draw,
    ) -> Step {
        let mut decoded = decode(batch);
        decoded.seen(SourceId(1), &flight.claimed, &flight.seen);
        let events = decoded.take_claimed(&Doubt::default());
        let outcomes = events.iter().map(|claimed| outcome(flight.said.get(&claimed.event().id))).collect();
        decoded.conclude(outcomes, &RETRY);
        let (given_back, unclaim) = (decoded.given_back(), decoded.unclaim(&flight.claimed.iter().copied().collect::<Vec<_>>()));
        let frontier = batch.frontier(&given_back);
        let (committed, answered) = if world.honest { (true, true) } else { (draw.percent(95), draw.percent(92)) };
        let answered = answered && committed; // what was not committed is not answered with success
        if committed {
            for claimed in &events {
                let event = *claimed.event();
                if !unclaim.contains(&event.id) {
                    let before = world.claims.insert(event.id, event.digest());
                    assert_eq!(before, None, "claimed twice: {}", event.id);
                }
                if let Some(Said::Charged | Said::Declined) = flight.said.get(&event.id) {
                    pay(world, event.id);
                }
            }
            for held in decoded.held() {
                let known = world.held.iter().any(|known| (known.partition, known.offset) == (partition, held.record.offset));
                if !known {
                    let due =
                        (held.state == HeldState::Retrying).then(|| world.now + in_ms(held.next_attempt_in.unwrap_or_default()));
                    let (offset, id) = (held.record.offset, held.event_id);
                    world.held.push(Held { partition, offset, id, attempts: 1, due, applied: false });
                }
            }
            world.rows[partition].next_offset = Some(frontier.next_offset.0);
            world.assert_settled_below(partition, frontier.next_offset.0, "the frontier");
        }
        world.end(flight.tx);
        if !answered {
            self.window.abandon();
            self.written.perhaps = Some(frontier.next_offset);
            self.bump_first = true;
            return Step::CommitUnknown;
        }
        self.window.settle(&given_back);
        assert_eq!(self.window.frontier().next_offset, frontier.next_offset, "the row and the window agree on the frontier");
        self.written = Written::known(Some(frontier.next_offset));
        for claimed in &events {
            self.answers.remove(&claimed.event().id);
        }
        ledger.confirm(i32::try_from(partition).expect("small"), Epoch(self.epoch), frontier.next_offset);
        Step::Settled
    }

    fn commit_due(&mut self, world: &mut World, flight: &Flight, places: &[usize], draw: &mut Draw) -> Step {
        let (committed, answered) = if world.honest { (true, true) } else { (draw.percent(95), draw.percent(92)) };
        if committed {
            for place in places {
                let Some(id) = world.held[*place].id else { continue };
                match flight.said.get(&id) {
                    Some(Said::Charged | Said::Declined) => {
                        pay(world, id);
                        (world.held[*place].due, world.held[*place].applied) = (None, true);
                    }
                    Some(Said::Lost) => {
                        let held = &mut world.held[*place];
                        held.attempts += 1;
                        let Next::Again(wait) = RETRY.after(held.attempts, Duration::ZERO, None) else { panic!("within bounds") };
                        held.due = Some(world.now + in_ms(wait));
                    }
                    Some(Said::NotStarted) | None => world.held[*place].due = Some(world.now + in_ms(RETRY.backoff_min)),
                }
            }
        }
        world.end(flight.tx);
        if committed && answered {
            return Step::Settled;
        }
        self.bump_first = true;
        Step::CommitUnknown
    }
}

fn due(world: &World, partition: usize) -> Vec<usize> {
    let is_due = |held: &Held| held.partition == partition && held.due.is_some_and(|due| due <= world.now);
    (0..world.held.len()).filter(|place| is_due(&world.held[*place])).collect()
}

fn decode(batch: &WindowBatch) -> Batch<'_, Told> {
    Batch::decode(&Reads, batch.records(), &Skips::default(), SystemTime::now(), Duration::from_secs(3_600), &HashSet::new())
}

fn pay(world: &mut World, id: Uuid) {
    world.payments.insert(id);
    world.attempts.remove(&id);
}

fn outcome(said: Option<&Said>) -> Outcome {
    match said {
        Some(Said::Charged) => Outcome::Applied,
        Some(Said::Declined) => Outcome::Declined,
        Some(Said::Lost) => Outcome::Unknown { error: "no answer".to_owned(), wait: None, parked: false },
        Some(Said::NotStarted) | None => Outcome::NotStarted { wait: Duration::ZERO },
    }
}

fn in_ms(wait: Duration) -> u64 {
    u64::try_from(wait.as_millis()).expect("short")
}

/// A record of the log.
pub fn record(partition: usize, offset: i64, payload: Vec<u8>) -> Record {
    Record {
        partition: i32::try_from(partition).expect("small"),
        offset: Offset(offset),
        timestamp_ms: None,
        key: None,
        headers: Box::default(),
        payload: Some(payload.into()),
    }
}
