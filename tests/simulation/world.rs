//! What the machines stand in: a log and committed offsets, a database, a provider. A few maps each, with the locks that matter.

use std::collections::{HashMap, HashSet};

use onceward::handler::EventDigest;
use onceward::record::{Offset, Record};
use uuid::Uuid;

use super::draw::Draw;

/// Of the topic.
pub const PARTITIONS: usize = 2;

/// All of it.
#[derive(Default)]
pub struct World {
    pub log: [Vec<Record>; PARTITIONS],
    /// What Kafka has committed for the group.
    pub committed: [Option<i64>; PARTITIONS],
    /// The database.
    pub rows: [Row; PARTITIONS],
    pub claims: HashMap<Uuid, EventDigest>,
    pub payments: HashSet<Uuid>,
    pub attempts: HashSet<Uuid>,
    pub held: Vec<Held>,
    /// Claims of open transactions.
    pub claiming: HashMap<Uuid, Tx>,
    /// The provider: what became of each key.
    pub charged: HashMap<Uuid, bool>,
    /// Milliseconds, by the database's clock.
    pub now: u64,
    /// Every charge is answered, honestly and at once.
    pub honest: bool,
    transactions: Tx,
}

/// The number of a transaction.
pub type Tx = u64;

/// `consumed_partition`.
#[derive(Default)]
pub struct Row {
    pub epoch: i64,
    pub next_offset: Option<i64>,
    pub locked_by: Option<Tx>,
}

/// `held_event`.
pub struct Held {
    pub partition: usize,
    pub offset: Offset,
    pub id: Option<Uuid>,
    pub attempts: u32,
    /// When it is tried again; `None`: it waits for a person, or is applied.
    pub due: Option<u64>,
    pub applied: bool,
}

/// What a call of the provider brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Said {
    Charged,
    Declined,
    /// Nobody knows.
    Lost,
    /// Nothing was sent.
    NotStarted,
}

impl World {
    pub fn begin(&mut self) -> Tx {
        self.transactions += 1;
        self.transactions
    }

    /// The transaction is gone, with its locks.
    pub fn end(&mut self, tx: Tx) {
        self.claiming.retain(|_, by| *by != tx);
        for row in &mut self.rows {
            row.locked_by = row.locked_by.filter(|by| *by != tx);
        }
    }

    /// One call. A key that is known keeps its first answer.
    pub fn call(&mut self, id: Uuid, draw: &mut Draw) -> Said {
        assert!(self.attempts.contains(&id), "a post without a durable attempt: {id}");
        assert!(!self.payments.contains(&id), "a post for an event that is paid: {id}");
        let (lies, refuses) = if self.honest { (false, false) } else { (draw.percent(20), draw.percent(10)) };
        if refuses {
            return Said::NotStarted;
        }
        let reaches_it = !lies || draw.percent(60);
        if reaches_it {
            self.charged.entry(id).or_insert(!id.as_u128().is_multiple_of(10));
        }
        match self.charged.get(&id) {
            _ if lies => Said::Lost,
            Some(true) => Said::Charged,
            Some(false) => Said::Declined,
            None => unreachable!("an honest provider has booked it"),
        }
    }

    /// One past the last record.
    pub fn end_of(&self, partition: usize) -> i64 {
        self.log[partition].last().map_or(0, |record| record.offset.0 + 1)
    }

    /// Invariants 1 and 2: whatever lies below is claimed or held.
    pub fn assert_settled_below(&self, partition: usize, next_offset: i64, what: &str) {
        for record in self.log[partition].iter().take_while(|record| record.offset.0 < next_offset) {
            let claimed = super::process::read(record).is_ok_and(|event| self.claims.contains_key(&event.id));
            let held = || self.held.iter().any(|held| held.partition == partition && held.offset == record.offset);
            assert!(claimed || held(), "{what} {next_offset} of partition {partition} has passed {}, which is open", record.offset);
        }
    }
}
