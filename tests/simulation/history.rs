//! One history: what happens, step by step, drawn from the seed; then everything may come to rest, and must.

use std::collections::{BTreeMap, VecDeque};

use onceward::record::NextOffset;
use uuid::Uuid;

use super::draw::Draw;
use super::process::{Owner, Process, Step, read, record};
use super::world::{PARTITIONS, World};

const PROCESSES: usize = 3;
/// Steps that are told when a history fails.
const TOLD: usize = 60;
/// Rounds in which everything must come to rest.
const ROUNDS: usize = 5_000;

/// See the head of this file.
pub struct History {
    draw: Draw,
    world: World,
    processes: Vec<Process>,
    group: [Membership; PARTITIONS],
    /// Takeovers that have bumped and are not placed yet: process, partition, generation.
    placed: Vec<(usize, usize, u64, Owner)>,
    events: Vec<(Uuid, u8)>,
    story: VecDeque<String>,
    seen: Seen,
}

/// Who Kafka says has a partition.
#[derive(Clone, Copy, Default)]
struct Membership {
    process: usize,
    generation: u64,
    /// The takeover has not bumped yet.
    pending: bool,
}

/// What was met, so that a simulation that meets nothing is found out.
#[derive(Clone, Default)]
pub struct Seen(BTreeMap<&'static str, u64>);

impl Seen {
    pub fn add(&mut self, other: &Self) {
        for (what, times) in &other.0 {
            *self.0.entry(*what).or_default() += times;
        }
    }

    pub fn assert_everything_was_met(&self) {
        let must = [
            "a batch has settled",
            "COMMIT was not answered",
            "a batch was lost with its transaction",
            "an owner was fenced",
            "a chain was broken",
            "an outdated takeover was dropped",
            "a process crashed",
            "a process froze",
            "a transaction of a frozen process ended",
            "a partition was revoked",
            "a partition was lost",
            "Kafka took an offset",
            "Kafka refused an offset",
            "the group was set back",
            "the group's offsets were forgotten",
        ];
        let missing: Vec<_> = must.iter().filter(|what| !self.0.contains_key(*what)).collect();
        assert!(missing.is_empty(), "never met: {missing:?}");
    }
}

impl History {
    pub fn new(seed: u64) -> Self {
        let mut draw = Draw::new(seed);
        let group = std::array::from_fn(|_| Membership { process: draw.below(PROCESSES), generation: 1, pending: true });
        Self {
            draw,
            world: World::default(),
            processes: (0..PROCESSES).map(|_| Process::new()).collect(),
            group,
            placed: Vec::new(),
            events: Vec::new(),
            story: VecDeque::new(),
            seen: Seen::default(),
        }
    }

    /// So many steps, then rest.
    pub fn run(&mut self, steps: usize) {
        for _ in 0..steps {
            self.step();
        }
        self.rest();
    }

    pub fn last_steps(&self) -> String {
        self.story.iter().map(|line| format!("  {line}\n")).collect()
    }

    pub const fn seen(&self) -> &Seen {
        &self.seen
    }

    fn step(&mut self) {
        let (process, partition) = (self.draw.below(PROCESSES), self.draw.below(PARTITIONS));
        match self.draw.below(100) {
            0..25 => self.deliver(process, partition),
            25..65 => self.work(process, partition),
            65..73 => self.produce(partition),
            73..79 => self.commit_offsets(process),
            79..84 => self.take_over(partition),
            84..89 => self.place(),
            89..91 => self.revoke(partition),
            91..93 => self.lose(partition),
            93 => self.crash(process),
            94 => self.freeze(process),
            95 => self.thaw(process),
            96 => self.end_transactions_of_the_frozen(process),
            97 => self.clock(),
            98 => self.move_the_group(Some(0)),
            _ => self.move_the_group(None),
        }
    }

    /// New events, repeats also in another partition, other contents under known ids, poison, and holes between them.
    fn produce(&mut self, partition: usize) {
        for _ in 0..=self.draw.below(4) {
            let offset = self.world.end_of(partition) + i64::from(self.draw.percent(15));
            let known = (!self.events.is_empty()).then(|| self.events[self.draw.below(self.events.len())]);
            let payload = match (self.draw.below(10), known) {
                (0, _) => vec![0; 3],
                (1, Some((id, content))) => told(id, content + 1),
                (2 | 3, Some((id, content))) => told(id, content),
                _ => {
                    let id = new_id(&mut self.draw);
                    self.events.push((id, 0));
                    told(id, 0)
                }
            };
            self.world.log[partition].push(record(partition, offset, payload));
        }
    }

    fn deliver(&mut self, process: usize, partition: usize) {
        if !self.processes[process].frozen {
            self.processes[process].deliver(&self.world, partition, &mut self.draw);
        }
    }

    fn work(&mut self, process: usize, partition: usize) {
        let Process { frozen, owned, ledger, .. } = &mut self.processes[process];
        let Some(owner) = owned.get_mut(&partition).filter(|_| !*frozen) else { return };
        match owner.step(&mut self.world, partition, ledger, &mut self.draw) {
            Step::Nothing | Step::Went => {}
            Step::Settled => self.tell("a batch has settled", process, partition),
            Step::CommitUnknown => self.tell("COMMIT was not answered", process, partition),
            Step::Abandoned => self.tell("a batch was lost with its transaction", process, partition),
            Step::Fenced => {
                self.tell("an owner was fenced", process, partition);
                self.over(process, partition);
            }
            Step::ChainBroken => {
                self.tell("a chain was broken", process, partition);
                self.over(process, partition);
            }
        }
    }

    /// An owner cannot go on. If Kafka says that the partition is its process's, it is taken over once more.
    fn over(&mut self, process: usize, partition: usize) {
        self.drop_owner(process, partition);
        if self.group[partition].process == process {
            self.group[partition].pending = true;
        }
    }

    fn drop_owner(&mut self, process: usize, partition: usize) {
        if let Some(mut owner) = self.processes[process].owned.remove(&partition) {
            owner.lose_transaction(&mut self.world);
        }
    }

    fn commit_offsets(&mut self, process: usize) {
        if self.processes[process].frozen {
            return;
        }
        for (number, next) in self.processes[process].ledger.due() {
            let partition = usize::try_from(number).expect("small");
            let is_member = self.group[partition].process == process && !self.group[partition].pending;
            if !is_member || (!self.world.honest && self.draw.percent(10)) {
                self.tell("Kafka refused an offset", process, partition);
                continue;
            }
            let before = self.world.committed[partition];
            assert!(before.is_none_or(|before| next.0 >= before), "Kafka's offset falls from {before:?} to {next}");
            self.world.assert_settled_below(partition, next.0, "Kafka's offset");
            self.world.committed[partition] = Some(next.0);
            self.processes[process].ledger.committed(number, next);
            self.tell("Kafka took an offset", process, partition);
        }
    }

    /// A takeover that waits tries its bump.
    fn take_over(&mut self, partition: usize) {
        let Membership { process, generation, pending } = self.group[partition];
        if !pending || self.processes[process].frozen {
            return;
        }
        if let Some(owner) = self.processes[process].take_over(&mut self.world, partition) {
            self.group[partition].pending = false;
            self.placed.push((process, partition, generation, owner));
        }
    }

    /// A takeover that has bumped gets its actor, unless the partition has moved on.
    fn place(&mut self) {
        if self.placed.is_empty() {
            return;
        }
        let (process, partition, generation, owner) = self.placed.remove(0);
        let now = self.group[partition];
        if now.generation != generation || now.process != process || now.pending {
            return self.tell("an outdated takeover was dropped", process, partition);
        }
        self.drop_owner(process, partition);
        self.processes[process].owned.insert(partition, owner);
    }

    /// Kafka moves a partition; whoever had it drains and commits first.
    fn revoke(&mut self, partition: usize) {
        let process = self.group[partition].process;
        if self.processes[process].frozen {
            return self.lose(partition);
        }
        if let Some(owner) = self.processes[process].owned.get_mut(&partition) {
            owner.stop = true;
            let budget = self.draw.below(60);
            for _ in 0..budget {
                let busy = self.processes[process].owned.get(&partition).is_some_and(Owner::is_busy);
                if !busy {
                    break;
                }
                self.work(process, partition);
            }
        }
        self.commit_offsets(process);
        let drained = self.processes[process].owned.get(&partition).is_none_or(|owner| !owner.is_busy());
        if drained {
            self.drop_owner(process, partition);
        }
        // A batch that took longer than the drain ends as a zombie's.
        self.processes[process].ledger.release(i32::try_from(partition).expect("small"));
        self.tell("a partition was revoked", process, partition);
        self.assign(partition);
    }

    /// Kafka moves a partition, and whoever had it does not hear of it.
    fn lose(&mut self, partition: usize) {
        let process = self.group[partition].process;
        self.tell("a partition was lost", process, partition);
        self.assign(partition);
    }

    fn assign(&mut self, partition: usize) {
        let Membership { generation, .. } = self.group[partition];
        let running: Vec<usize> = (0..PROCESSES).filter(|process| !self.processes[*process].frozen).collect();
        let process = if running.is_empty() { self.draw.below(PROCESSES) } else { running[self.draw.below(running.len())] };
        self.group[partition] = Membership { process, generation: generation + 1, pending: true };
    }

    fn crash(&mut self, process: usize) {
        for partition in 0..PARTITIONS {
            self.drop_owner(process, partition);
        }
        self.processes[process] = Process::new();
        self.tell("a process crashed", process, 0);
        for partition in (0..PARTITIONS).filter(|partition| self.group[*partition].process == process).collect::<Vec<_>>() {
            self.assign(partition);
        }
    }

    fn freeze(&mut self, process: usize) {
        self.processes[process].frozen = true;
        self.tell("a process froze", process, 0);
    }

    fn thaw(&mut self, process: usize) {
        // By then the server has ended what was idle, and every deadline is over.
        self.end_transactions_of_the_frozen(process);
        self.processes[process].frozen = false;
    }

    fn end_transactions_of_the_frozen(&mut self, process: usize) {
        if !self.processes[process].frozen {
            return;
        }
        for partition in 0..PARTITIONS {
            if let Some(owner) = self.processes[process].owned.get_mut(&partition).filter(|owner| owner.is_busy()) {
                owner.lose_transaction(&mut self.world);
                self.tell("a transaction of a frozen process ended", process, partition);
            }
        }
    }

    fn clock(&mut self) {
        let back = self.draw.percent(30);
        let by = self.draw.next() % 3_000;
        self.world.now = if back { self.world.now.saturating_sub(by / 6) } else { self.world.now + by };
    }

    /// An operator stops everything, sets the group back or deletes its offsets, and starts everything.
    fn move_the_group(&mut self, to: Option<i64>) {
        if self.processes.iter().any(|process| process.frozen) {
            return;
        }
        for partition in 0..PARTITIONS {
            self.revoke(partition);
        }
        let busy = self.processes.iter().any(|process| process.owned.values().any(Owner::is_busy));
        if !busy {
            self.world.committed = [to; PARTITIONS];
            self.tell(if to.is_some() { "the group was set back" } else { "the group's offsets were forgotten" }, 0, 0);
        }
    }

    fn tell(&mut self, what: &'static str, process: usize, partition: usize) {
        *self.seen.0.entry(what).or_default() += 1;
        if self.story.len() == TOLD {
            self.story.pop_front();
        }
        let row = &self.world.rows[partition];
        let (epoch, next, committed) = (row.epoch, row.next_offset, self.world.committed[partition]);
        self.story.push_back(format!(
            "{what}: process {process}, partition {partition} (epoch {epoch}, next {next:?}, Kafka {committed:?})"
        ));
    }

    /// Nothing more happens to anybody; whatever is open must be done.
    fn rest(&mut self) {
        self.world.honest = true;
        for process in 0..PROCESSES {
            self.thaw(process);
        }
        for _ in 0..ROUNDS {
            for partition in 0..PARTITIONS {
                self.take_over(partition);
                self.place();
                for process in 0..PROCESSES {
                    self.deliver(process, partition);
                    self.work(process, partition);
                    self.commit_offsets(process);
                }
            }
            self.world.now += 50;
            if self.is_at_rest() {
                return self.assert_nothing_is_missing();
            }
        }
        panic!("it does not come to rest:\n{}", self.whereabouts());
    }

    fn is_at_rest(&self) -> bool {
        let done = |partition: usize| {
            let end = self.world.end_of(partition);
            // Nobody writes a position for a partition in which there was never a record.
            let next = self.world.rows[partition].next_offset.unwrap_or(0);
            let committed = self.world.committed[partition].unwrap_or(0);
            let owner = self.processes[self.group[partition].process].owned.get(&partition);
            next == end && (committed == end || end == 0) && owner.is_some_and(|owner| !owner.is_busy() && owner.handed == end)
        };
        (0..PARTITIONS).all(done) && self.world.held.iter().all(|held| held.due.is_none())
    }

    fn whereabouts(&self) -> String {
        let partition = |partition: usize| {
            let (row, Membership { process, pending, .. }) = (&self.world.rows[partition], self.group[partition]);
            let owner = self.processes[process].owned.get(&partition);
            let owner = owner.map(|owner| (owner.epoch, owner.handed, owner.window.len(), owner.is_busy(), owner.stop));
            let (next, lock, end) = (row.next_offset, row.locked_by, self.world.end_of(partition));
            format!(
                "partition {partition}: process {process}, pending {pending}, end {end}, next {next:?}, epoch {}, locked by {lock:?}, owner {owner:?}\n",
                row.epoch
            )
        };
        (0..PARTITIONS).map(partition).collect()
    }

    fn assert_nothing_is_missing(&self) {
        for partition in 0..PARTITIONS {
            self.world.assert_settled_below(partition, self.world.end_of(partition), "the end");
            for event in self.world.log[partition].iter().filter_map(|record| read(record).ok()) {
                assert!(self.world.payments.contains(&event.id), "neither paid nor declined: {}", event.id);
                assert!(self.world.charged.contains_key(&event.id), "a payment that the provider has never heard of: {}", event.id);
            }
            let owner = &self.processes[self.group[partition].process].owned[&partition];
            assert_eq!(owner.window.frontier().next_offset, NextOffset(self.world.end_of(partition)));
        }
        assert!(self.world.attempts.is_empty(), "attempts of events that are paid: {:?}", self.world.attempts);
        assert!(self.world.held.iter().all(|held| held.applied || held.due.is_none()));
    }
}

fn told(id: Uuid, content: u8) -> Vec<u8> {
    [&id.into_bytes()[..], &[content]].concat()
}

/// A UUID v7 of a fixed time.
fn new_id(draw: &mut Draw) -> Uuid {
    uuid::Builder::from_unix_timestamp_millis(1_767_225_600_000, &{
        let [a, b] = [draw.next().to_be_bytes(), draw.next().to_be_bytes()];
        [a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], b[0], b[1]]
    })
    .into_uuid()
}
