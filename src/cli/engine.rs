//! The command line of a program that is an engine with a handler of its own: `--config`, and nothing else.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;

use super::{Failure, config_file, exit_code_of, log, read_words};
use crate::app;
use crate::config::{Config, Need};
use crate::handler::Handler;

/// Applies each event of a Kafka topic once, until SIGTERM or SIGINT, which let running batches end and leave the group.
///
/// Exit codes: 0 done; 1 it could not go on; 64 the command or the configuration is wrong.
#[derive(Debug, Parser)]
#[command(max_term_width = 100)]
struct Words {
    /// The configuration file (TOML); the environment stands over it [env: ONCEWARD_CONFIG].
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

/// Runs an engine to its end.
pub fn engine(
    handler: impl Handler,
    arguments: impl IntoIterator<Item = OsString>,
    environment: impl IntoIterator<Item = (OsString, OsString)>,
) -> ExitCode {
    let words: Words = match read_words(arguments) {
        Ok(words) => words,
        Err(code) => return code,
    };
    let environment: Vec<(OsString, OsString)> = environment.into_iter().collect();
    let file = config_file(words.config.as_ref(), &environment);
    exit_code_of(run(handler, file, environment))
}

fn run(handler: impl Handler, file: Option<PathBuf>, environment: Vec<(OsString, OsString)>) -> Result<(), Failure> {
    let load = move |needs: &[Need]| Config::load(file.as_deref(), environment.iter().cloned(), needs);
    let config = load(&[Need::Kafka, Need::Database]).map_err(Failure::Usage)?;
    log::start(&config.log);
    log::follow_hangups(move || load(&[]))?;
    Ok(app::run_handler(config, handler)?)
}
