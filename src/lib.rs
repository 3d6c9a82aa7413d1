//! onceward applies each business event from Kafka once: one row in PostgreSQL, one charge at the provider.
//!
//! The modules stand in the order a record travels: [`record`] (and the trace it belongs to, [`trace_context`]) → [`event`] → [`handler`] (and [`billing`], the handler of the
//! service) → [`pipeline`] → [`provider`], [`store`]; before them a [`produce`]r, around them configuration, log, what is made of
//! files that change ([`rotating`], [`tls`]), metrics, the admin port and the reconciler.

pub mod record;
pub mod trace_context;

pub mod event;
pub mod handler;

pub mod billing;

pub mod actions;
pub mod held;
pub mod pipeline;
pub mod retention;

pub mod provider;
pub mod store;

pub mod produce;

pub mod audit;

pub mod certificate;

pub mod admin;
pub mod app;
pub mod cli;
pub mod config;
mod log;
pub mod metrics;
mod overview;
mod progress;
pub mod rotating;
mod span;
pub mod spans;
pub mod status;
mod text;
pub mod tls;

#[doc(hidden)]
pub mod crash;

#[cfg(feature = "lab")]
pub mod lab;

#[cfg(test)]
mod tests_support;
