//! The command line: words in, an exit code out.
//!
//! In: arguments and environment. Out: 0 = done, 1 = it failed or does not add up, 64 = the command or the configuration is wrong. It
//! owns the process's output: results go to standard output, everything else to standard error, an error as one paragraph.
//!
//! Invariant: nothing is started before the whole configuration has passed its checks.

mod actions;
mod audit;
mod held;
mod log;
mod offsets;
mod produce;
#[cfg(all(test, feature = "lab"))]
mod reference;
mod retention;
mod status;
mod text;

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Parser, Subcommand, ValueEnum};

use self::actions::{Actions, Partition};
use self::audit::Audit;
use self::held::Held;
use self::offsets::Offsets;
use self::produce::Produce;
use self::retention::Retention;
use self::status::Status;
use crate::certificate::{self, Finding};
use crate::config::{Config, ConfigError, FILE_VARIABLE, Need};
use crate::store;

/// Consumes business events from Kafka and applies each of them once: one row in PostgreSQL, one charge at the payment provider.
///
/// Exit codes: 0 done; 1 failed, or it does not add up; 64 the command or the configuration is wrong.
#[derive(Debug, Parser)]
#[command(name = "onceward", version, max_term_width = 100)]
struct Cli {
    /// The configuration file (TOML); the environment stands over it [env: ONCEWARD_CONFIG].
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,

    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Runs the service until SIGTERM or SIGINT, which let running batches end and leave the group.
    Run,
    /// Brings the database's schema up to date. Any number of processes may do so at once.
    Migrate,
    /// Shows the whole group: every partition, what is held, what is remembered. Needs no running process, and changes nothing.
    ///
    /// Ends with exit code 1 when the database or the broker does not answer; what is known is shown all the same.
    Status(Status),
    /// Asks for every condition under which the guarantee holds, and prints a line for each, with what to do. Changes nothing, charges nobody.
    ///
    /// Ends with exit code 1 when any does not hold, or could not be asked.
    Check(Check),
    /// Shows where each partition stands, holds a record, or passes over records for good.
    Offsets(Offsets),
    /// Pauses a partition, or lets it go on.
    Partition(Partition),
    /// Lists what operators have decided: who, when, what, on which, why.
    Actions(Actions),
    /// Shows what is remembered and what keeps it, or forgets what nobody needs any more.
    Retention(Retention),
    /// Puts events into the topic, keyed by order id, from a file or generated.
    Produce(Produce),
    /// Reconciles the topic (or the producer's log) with claims, payments, held events and, where given, the provider's ledger.
    ///
    /// Ends with exit code 1 when something is lost, doubled, without an event, or with another amount. It changes nothing and joins no
    /// group; how far it is shows on a terminal.
    Audit(Audit),
    /// Lists and shows held events, and asks for them to be tried again, given up, or resolved.
    ///
    /// Ends with exit code 1 when an event that was named cannot be asked for.
    Held(Held),
    /// Runs a payment provider that misbehaves on request and keeps an honest ledger, in memory.
    #[cfg(feature = "lab")]
    ProviderStub(crate::lab::provider_stub::Args),
    /// Runs the whole story on this machine: broker, database, provider, crashes, replay, and the reckoning.
    #[cfg(feature = "lab")]
    Demo(crate::lab::demo::Args),
    /// Runs several engines on a real Kafka and PostgreSQL, makes a fault every few seconds, and reconciles.
    ///
    /// Ends with exit code 1 when anything is lost, doubled or unexplained.
    #[cfg(feature = "lab")]
    Chaos(crate::lab::chaos::Args),
}

#[derive(Debug, Args)]
struct Check {
    /// Prints the effective configuration, secrets redacted, and connects to nothing.
    #[arg(long)]
    show_config: bool,
    /// A line for people, or one JSON object, for each condition.
    #[arg(long, value_enum, default_value_t = CheckFormat::Text)]
    format: CheckFormat,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum CheckFormat {
    Text,
    Json,
}

/// How a command ended that did not simply succeed.
#[derive(Debug)]
enum Failure {
    /// Exit code 64.
    Usage(ConfigError),
    /// Exit code 1, with a message.
    Failed(anyhow::Error),
    /// Exit code 1; what is wrong has been said.
    Said,
}

/// Runs one command.
pub fn main(
    arguments: impl IntoIterator<Item = OsString>,
    environment: impl IntoIterator<Item = (OsString, OsString)>,
) -> ExitCode {
    let cli = match Cli::try_parse_from(arguments) {
        Ok(cli) => cli,
        Err(help) => {
            let code = if help.use_stderr() { USAGE } else { 0 };
            let _ = help.print();
            return ExitCode::from(code);
        }
    };
    let environment: Vec<(OsString, OsString)> = environment.into_iter().collect();
    match run_command(&cli, &environment) {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Said) => ExitCode::from(FAILED),
        Err(Failure::Usage(error)) => {
            complain(&error.to_string());
            ExitCode::from(USAGE)
        }
        Err(Failure::Failed(error)) => {
            complain(&chain(&error));
            ExitCode::from(FAILED)
        }
    }
}

const FAILED: u8 = 1;
const USAGE: u8 = 64;

fn run_command(cli: &Cli, environment: &[(OsString, OsString)]) -> Result<(), Failure> {
    let named = environment.iter().find(|(name, _)| name == FILE_VARIABLE).map(|(_, file)| PathBuf::from(file));
    let file = cli.config.clone().or(named);
    let load = |needs: &[Need]| -> Result<Config, Failure> {
        let config = Config::load(file.as_deref(), environment.iter().cloned(), needs).map_err(Failure::Usage)?;
        // What a check finds, it says itself; the clients' own words would bury it.
        if !matches!(cli.command, Command::Check(_)) {
            log::start(&config.log);
        }
        Ok(config)
    };
    match &cli.command {
        Command::Run => {
            let config = load(&[Need::Kafka, Need::Database, Need::Provider])?;
            let (file, environment) = (file.clone(), environment.to_vec());
            log::follow_hangups(move || Config::load(file.as_deref(), environment.iter().cloned(), &[]))?;
            Ok(crate::app::run(config)?)
        }
        Command::Migrate => Ok(migrate(&load(&[Need::Database])?)?),
        Command::Check(Check { show_config: true, .. }) => Ok(say(&load(&[])?.show())?),
        Command::Check(Check { format, .. }) => check(&load(&[Need::Kafka, Need::Database, Need::Provider])?, *format),
        Command::Offsets(arguments) => Ok(offsets(&load(&[Need::Kafka, Need::Database])?, arguments, environment)?),
        Command::Partition(arguments) => Ok(partition(&load(&[Need::Database])?, arguments, environment)?),
        Command::Actions(arguments) => Ok(actions(&load(&[Need::Database])?, arguments)?),
        Command::Status(arguments) => status(&load(&[Need::Kafka, Need::Database])?, arguments),
        Command::Retention(arguments) => Ok(retention(&load(&[Need::Kafka, Need::Database])?, arguments)?),
        Command::Produce(arguments) => Ok(produce(&load(&[Need::Kafka])?, arguments)?),
        Command::Held(arguments) => held(&load(&[Need::Database])?, arguments, environment),
        Command::Audit(arguments) => audit(&load(arguments.needs())?, arguments),
        #[cfg(feature = "lab")]
        Command::ProviderStub(arguments) => {
            let stub = crate::lab::provider_stub::run(arguments.clone());
            Ok(runtime()?.block_on(stub)?)
        }
        #[cfg(feature = "lab")]
        Command::Demo(arguments) => demo(arguments),
        #[cfg(feature = "lab")]
        Command::Chaos(arguments) => chaos(arguments),
    }
}

fn migrate(config: &Config) -> anyhow::Result<()> {
    let applied = runtime()?.block_on(store::migrate(&config.database.settings())).with_context(|| database_of(config))?;
    say(&match applied.as_slice() {
        [] => "the schema is current\n".to_owned(),
        names => names.iter().map(|name| format!("applied {name}\n")).collect(),
    })
}

/// What an error of a command is about that talks to the database.
fn database_of(config: &Config) -> String {
    format!("{} (database.url)", config.database.url.redacted_url())
}

fn check(config: &Config, format: CheckFormat) -> Result<(), Failure> {
    let findings = runtime()?.block_on(certificate::findings(config));
    let line = |finding: &Finding| match format {
        CheckFormat::Text => format!("{finding}\n"),
        CheckFormat::Json => format!("{}\n", finding.json()),
    };
    say(&findings.iter().map(line).collect::<String>())?;
    if findings.iter().all(Finding::is_fine) { Ok(()) } else { Err(Failure::Said) }
}

fn status(config: &Config, arguments: &Status) -> Result<(), Failure> {
    if runtime()?.block_on(arguments.run(config, say))? { Ok(()) } else { Err(Failure::Said) }
}

fn produce(config: &Config, arguments: &Produce) -> anyhow::Result<()> {
    say(&arguments.run(config)?)
}

fn offsets(config: &Config, arguments: &Offsets, environment: &[(OsString, OsString)]) -> anyhow::Result<()> {
    say(&runtime()?.block_on(arguments.run(config, environment))?)
}

fn partition(config: &Config, arguments: &Partition, environment: &[(OsString, OsString)]) -> anyhow::Result<()> {
    say(&runtime()?.block_on(arguments.run(config, environment))?)
}

fn actions(config: &Config, arguments: &Actions) -> anyhow::Result<()> {
    say(&runtime()?.block_on(arguments.run(config))?)
}

fn retention(config: &Config, arguments: &Retention) -> anyhow::Result<()> {
    say(&runtime()?.block_on(arguments.run(config))?)
}

fn audit(config: &Config, arguments: &Audit) -> Result<(), Failure> {
    let (report, text) = runtime()?.block_on(arguments.run(config)).with_context(|| database_of(config))?;
    say(&text)?;
    if report.adds_up() { Ok(()) } else { Err(Failure::Said) }
}

fn held(config: &Config, arguments: &Held, environment: &[(OsString, OsString)]) -> Result<(), Failure> {
    let (text, all_taken) = runtime()?.block_on(arguments.run(config, environment))?;
    say(&text)?;
    if all_taken { Ok(()) } else { Err(Failure::Said) }
}

#[cfg(feature = "lab")]
fn demo(arguments: &crate::lab::demo::Args) -> Result<(), Failure> {
    if crate::lab::demo::run(arguments)? { Ok(()) } else { Err(Failure::Said) }
}

#[cfg(feature = "lab")]
fn chaos(arguments: &crate::lab::chaos::Args) -> Result<(), Failure> {
    if crate::lab::chaos::run(arguments)? { Ok(()) } else { Err(Failure::Said) }
}

fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().context("no runtime")
}

/// Writes a result. A reader that has seen enough (`| head`) is no failure.
fn say(text: &str) -> anyhow::Result<()> {
    match io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error).context("standard output"),
        _ => Ok(()),
    }
}

/// An error and its causes. Many an error says its cause itself: what has been said is not said again.
fn chain(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |said, cause| match said.as_str() {
        "" => cause,
        _ if said.contains(&cause) => said,
        _ => format!("{said}: {cause}"),
    })
}

fn complain(text: &str) {
    let _ = writeln!(io::stderr(), "onceward: {text}");
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        Self::Failed(error)
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn exit_code(arguments: &[&str], environment: &[(&str, &str)]) -> String {
        let arguments = std::iter::once("onceward").chain(arguments.iter().copied()).map(OsString::from);
        let code = main(arguments, environment.iter().map(|(name, value)| (name.into(), value.into())));
        format!("{code:?}")
    }

    fn code(number: u8) -> String {
        format!("{:?}", ExitCode::from(number))
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn wrong_words_and_wrong_configurations_end_with_64() {
        assert_eq!(exit_code(&["walk"], &[]), code(64));
        assert_eq!(exit_code(&["run", "--loudly"], &[]), code(64));
        assert_eq!(exit_code(&[], &[]), code(64));
        assert_eq!(exit_code(&["produce"], &[]), code(64), "neither a file nor a count");
        assert_eq!(exit_code(&["partition", "pause", "0"], &[]), code(64), "no reason");
        assert_eq!(exit_code(&["partition", "pause", "-1", "--reason", "x"], &[]), code(64));
        assert_eq!(exit_code(&["offsets", "hold", "0", "--reason", "x"], &[]), code(64), "no offset");
        assert_eq!(exit_code(&["offsets", "hold", "0", "-5", "--reason", "x"], &[]), code(64));
        assert_eq!(exit_code(&["produce", "--count", "1", "--currencies", "EUR,XXQ"], &[]), code(64));
        assert_eq!(exit_code(&["run"], &[]), code(64), "nothing that is required is there");
        assert_eq!(exit_code(&["check", "--show-config"], &[("ONCEWARD_KAFKA_TOPIK", "x")]), code(64));
        assert_eq!(exit_code(&["check", "--show-config", "--config", "/nowhere/at/all"], &[]), code(64));
        assert_eq!(exit_code(&["check", "--show-config"], &[("ONCEWARD_CONFIG", "/nowhere/at/all")]), code(64));
    }

    #[test]
    fn a_cause_that_an_error_has_said_itself_is_not_said_again() {
        let refused = || anyhow::anyhow!("connection refused");
        assert_eq!(
            chain(&refused().context("connect: connection refused").context("database")),
            "database: connect: connection refused"
        );
        assert_eq!(chain(&refused().context("connect")), "connect: connection refused");
    }

    #[test]
    fn help_version_and_show_config_end_with_0() {
        assert_eq!(exit_code(&["--help"], &[]), code(0));
        assert_eq!(exit_code(&["--version"], &[]), code(0));
        assert_eq!(exit_code(&["check", "--show-config"], &[]), code(0));
    }

    #[test]
    fn a_database_that_is_not_there_ends_with_1() {
        let socket = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = socket.local_addr().expect("bound").port();
        drop(socket);
        let url = format!("postgres://bill@127.0.0.1:{port}/money");
        assert_eq!(exit_code(&["migrate"], &[("ONCEWARD_DATABASE_URL", &url)]), code(1));
    }
}
