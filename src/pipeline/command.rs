//! What the poll thread is told, and what it tells: the words between the threads.
//!
//! Invariant: an answer to librdkafka names the generation it answers, so that an outdated one can be told from a current one.

use actix::{Message, Recipient};
use tokio::sync::oneshot;

use crate::pipeline::rebalance::Rebalance;
use crate::pipeline::window::Handed;
use crate::record::NextOffset;

/// What the Supervisor and the buffer tell the poll thread.
#[derive(Debug)]
pub enum Command {
    /// Answer the assign of this generation: begin at these offsets.
    Assign {
        /// Which assign this answers; an outdated answer is dropped.
        generation: u64,
        /// Partition, first offset, and who takes the records (nobody: the partition is stopped and its records are dropped).
        routes: Vec<(i32, NextOffset, Option<Route>)>,
    },
    /// Answer the revoke of this generation: everything is drained.
    Unassign {
        /// Which revoke this answers.
        generation: u64,
    },
    /// Read an owned partition again, from here.
    Reposition {
        /// The partition.
        partition: i32,
        /// The first offset.
        base: NextOffset,
        /// Who takes the records.
        route: Option<Route>,
    },
    /// Read nothing of this partition before it is positioned anew: an operator has paused it.
    Pause {
        /// The partition.
        partition: i32,
    },
    /// Hand on nothing more of this partition: its window is gone.
    Cut {
        /// The partition.
        partition: i32,
    },
    /// Is the partition still ours, as seen after a poll that begins now?
    Probe {
        /// The partition.
        partition: i32,
        /// The answer.
        answer: oneshot::Sender<bool>,
    },
    /// The buffer has room again.
    Wake,
    /// Leave the group and end.
    Close,
}

/// Who takes a partition's records.
pub type Route = Recipient<Records>;

/// Records for one PartitionActor.
#[derive(Message, Debug)]
#[rtype(result = "()")]
pub struct Records(pub Handed);

/// What the poll thread tells the Supervisor.
#[derive(Debug)]
pub enum PollEvent {
    /// librdkafka waits for [`Command::Assign`] or [`Command::Unassign`] of this generation.
    Asked {
        /// Counts what librdkafka asked for.
        generation: u64,
        /// What.
        rebalance: Rebalance,
    },
    /// An offset turned out to lie outside the log; librdkafka does not say of which partition.
    OutOfRange,
    /// The client is beyond repair, and so is the process.
    Fatal(String),
    /// The client was beyond repair: another takes its place when its partitions are released.
    Replaced(String),
    /// The broker does not let us in, or not to everything; the client tries again by itself.
    Refused(String),
    /// The consumer has left the group and is closed.
    Closed,
}
