//! The path of a record: poll thread → PartitionActor → DedupActor → (handler, PaymentActor) → OffsetActor → Kafka.
//!
//! Who owns what: the poll thread the consumer, the Supervisor the partitions' lives, a PartitionActor its window, a DedupActor the
//! transaction, the OffsetActor what Kafka is told. Everything between them is a message.

pub mod client;
pub mod command;
pub(crate) mod connection;
pub mod handover;
pub(crate) mod native;
pub mod poll;
pub mod pressure;
pub mod rebalance;

pub mod client_log;

pub(crate) mod broker;
pub mod lives;
pub(crate) mod settings;
pub mod start;
pub mod supervisor;
pub mod takeover;

pub mod agenda;
pub mod partition;
pub mod window;

pub mod batch;
mod claim;
pub mod dedup;
mod due;
pub mod form;
mod horizon;
pub mod pace;
pub mod refusal;
mod requests;
mod windows;
pub mod workers;

pub mod payment;

pub mod relay;

pub mod offset;
