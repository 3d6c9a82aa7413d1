//! An engine with a handler of yours: configured, watched and stopped as the service is.
//!
//! In: a configuration and a handler. Out: why it ended. It owns nothing that outlives the call; `app.rs` does the work. What the engine
//! needs in the database it makes at the start; the handler's own tables must be there.
//!
//! The other commands are those of the program `onceward` with the same configuration: `onceward check`, `status`, `held`, `partition`, … They
//! know nothing of a handler. One that calls no payment provider says `provider.kind = "none"`; its calls end within
//! `provider.effect_deadline_ms` all the same.

use std::process::ExitCode;

use actix::System;

use crate::config::Config;
use crate::handler::Handler;
use crate::{app, cli};

/// A program: reads `--config FILE` (or `ONCEWARD_CONFIG`) and the environment over it, starts the log, and runs until SIGTERM or SIGINT, which
/// let running batches end and leave the group. SIGHUP has the log level read again.
///
/// Exit codes: 0 it ended in order; 1 it could not go on; 64 the command or the configuration is wrong, and all faults have been named.
pub fn main(handler: impl Handler) -> ExitCode {
    cli::engine(handler, std::env::args_os(), std::env::vars_os())
}

/// Runs an engine on this thread until `stop` resolves, for a program that has more to do than this. Any number may run in one process, each
/// with a consumer group or a topic of its own.
///
/// # Errors
/// Why it cannot go on, or could not end in order. What had not been committed comes again.
///
/// # Panics
/// On a thread of an asynchronous runtime: it makes one of its own.
pub fn run(config: Config, handler: impl Handler, stop: impl Future<Output = ()>) -> anyhow::Result<()> {
    System::new().block_on(app::serve(config, |_| handler, stop))
}
