//! Runs a command with services around it: `onceward-lab --kafka-jars target/kafka-libs -- cargo test`.
//!
//! In: a command. Out: its exit code. The command finds the services in `ONCEWARD_TEST_KAFKA` (bootstrap servers; its jars
//! in `ONCEWARD_TEST_KAFKA_JARS`) and `ONCEWARD_TEST_DATABASE_URL` (a superuser's URL of an empty server). If we die here, all of it ends with us.
//!
//! Invariant: when this returns, nothing that it started runs, whatever ended it: the command, SIGINT, SIGTERM, SIGHUP or its
//! parent's death.

use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use clap::Parser;
use tokio::signal::unix::{SignalKind, signal};

use super::kafka::Kafka;
use super::postgres::{self, Postgres};
use super::process::{self, Signal};

/// Runs a command with a private PostgreSQL, and Apache Kafka if asked for, around it.
#[derive(Debug, Parser)]
struct Arguments {
    /// The folder of Kafka's jars (see scripts/test); without it there is no Kafka.
    #[arg(long)]
    kafka_jars: Option<PathBuf>,
    /// Give up PostgreSQL's durability for speed.
    #[arg(long)]
    no_fsync: bool,
    /// A PostgreSQL setting, `name=value`.
    #[arg(long = "set", value_parser = setting)]
    settings: Vec<(String, String)>,
    /// The command and its arguments.
    #[arg(required = true, trailing_var_arg = true)]
    command: Vec<String>,
}

/// Time for the command to end after it was asked to.
const FAREWELL: Duration = Duration::from_secs(10);
/// Many engines run at once in the tests, each with three small pools.
const MAX_CONNECTIONS: u32 = 400;

/// The program.
#[must_use]
pub fn main() -> ExitCode {
    match run(Arguments::parse()) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("onceward-lab: {error}");
            ExitCode::FAILURE
        }
    }
}

#[tokio::main(flavor = "current_thread")]
async fn run(arguments: Arguments) -> Result<u8, Box<dyn std::error::Error>> {
    // Taken before anything is started, so that from here on no signal ends us without the farewells below.
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hangup = signal(SignalKind::hangup())?;

    process::end_with_our_parent(Signal::Term)?; // a killed script leaves nothing behind either

    let options = postgres::Options {
        fsync: !arguments.no_fsync,
        max_connections: MAX_CONNECTIONS,
        settings: arguments.settings,
        ..postgres::Options::default()
    };
    let postgres = Postgres::start(&options)?;
    let kafka = arguments.kafka_jars.as_deref().map(Kafka::start).transpose()?;

    let mut command = Command::new(&arguments.command[0]);
    command.args(&arguments.command[1..]).stdin(Stdio::null()).env("ONCEWARD_TEST_DATABASE_URL", postgres.url("postgres"));
    if let Some(kafka) = &kafka {
        command.env("ONCEWARD_TEST_KAFKA", kafka.bootstrap_servers());
        command.env("ONCEWARD_TEST_KAFKA_JARS", kafka.jars());
    }
    let mut child = process::spawn(command, Signal::Kill)?;
    let mut tick = tokio::time::interval(Duration::from_millis(20));
    loop {
        tokio::select! {
            _ = tick.tick() => {}
            _ = interrupt.recv() => break,
            _ = terminate.recv() => break,
            _ = hangup.recv() => break,
        }
        if let Some(status) = child.try_wait()? {
            return Ok(process::exit_code(status));
        }
    }
    eprintln!("onceward-lab: asked to stop");
    Ok(process::exit_code(process::end(&mut child, Signal::Term, FAREWELL)?))
}

fn setting(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("expected name=value")?;
    Ok((name.to_owned(), value.to_owned()))
}
