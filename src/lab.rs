//! The lab: everything that plays the world around the engine on one machine, for the demo, the tests and the benches.
//!
//! Feature `lab` only, so that the default binary can neither lie nor kill. Whatever is started here ends with us: see [`process`].

pub mod interrupt;
pub mod process;

pub mod broker;
pub mod chaos;
pub mod demo;
pub mod kafka;
pub mod postgres;
pub mod provider_stub;
pub mod proxy;
pub mod services;
