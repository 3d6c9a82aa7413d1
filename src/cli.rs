//! The command line: words in, an exit code out.
//!
//! In: arguments and environment. Out: 0 = done, 1 = it failed or does not add up, 64 = the command or the configuration is wrong. It
//! owns the process's output: results go to standard output, everything else to standard error, an error as one paragraph.
//!
//! Invariant: nothing is started before the whole configuration has passed its checks.

mod actions;
mod audit;
mod engine;
mod held;
mod log_level;
mod offsets;
mod produce;
#[cfg(all(test, feature = "lab"))]
mod reference;
mod retention;
mod status;
mod text;

use std::ffi::OsString;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, CommandFactory as _, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;

use self::actions::{Actions, Partition};
use self::audit::Audit;
pub use self::engine::engine;
use self::held::Held;
use self::log_level::LogLevel;
use self::offsets::Offsets;
use self::produce::Produce;
use self::retention::Retention;
use self::status::Status;
use crate::actions::ActionError;
use crate::certificate::{self, Finding};
use crate::config::{Config, ConfigError, FILE_VARIABLE, Need};
use crate::log;
use crate::store::{self, DbError, ErrorClass};

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
    /// Tells how much a running process says, or changes it; needs admin.token.
    LogLevel(LogLevel),
    /// Prints what makes a shell complete the words of this command line.
    ///
    /// bash: into ~/.local/share/bash-completion/completions/onceward; zsh: into a folder of $fpath, as _onceward; fish: into
    /// ~/.config/fish/completions/onceward.fish.
    Completions {
        /// The shell.
        shell: Shell,
    },
    /// Writes a manual page for each command into a folder, which is made if it is not there: `man -l FOLDER/onceward.1` shows the first.
    Man {
        /// The folder.
        folder: PathBuf,
    },
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
    let cli: Cli = match read_words(arguments) {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    let environment: Vec<(OsString, OsString)> = environment.into_iter().collect();
    exit_code_of(run_command(&cli, &environment))
}

/// The words of a command, or the exit code after the help was shown.
fn read_words<T: Parser>(arguments: impl IntoIterator<Item = OsString>) -> Result<T, ExitCode> {
    T::try_parse_from(arguments).map_err(|help| {
        let code = if help.use_stderr() { USAGE } else { 0 };
        let _ = help.print();
        ExitCode::from(code)
    })
}

fn exit_code_of(ended: Result<(), Failure>) -> ExitCode {
    match ended {
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

/// The configuration file that was named, on the command line or in the environment.
fn config_file(named: Option<&PathBuf>, environment: &[(OsString, OsString)]) -> Option<PathBuf> {
    let variable = environment.iter().find(|(name, _)| name == FILE_VARIABLE).map(|(_, file)| PathBuf::from(file));
    named.cloned().or(variable)
}

const FAILED: u8 = 1;
const USAGE: u8 = 64;

fn run_command(cli: &Cli, environment: &[(OsString, OsString)]) -> Result<(), Failure> {
    let file = config_file(cli.config.as_ref(), environment);
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
        Command::Offsets(arguments) => offsets(&load(&[Need::Kafka, Need::Database])?, arguments, environment),
        Command::Partition(arguments) => partition(&load(&[Need::Database])?, arguments, environment),
        Command::Actions(arguments) => actions(&load(&[Need::Database])?, arguments),
        Command::Status(arguments) => status(&load(&[Need::Kafka, Need::Database])?, arguments),
        Command::Retention(arguments) => retention(&load(&[Need::Kafka, Need::Database])?, arguments),
        Command::Produce(arguments) => Ok(produce(&load(&[Need::Kafka])?, arguments)?),
        Command::Held(arguments) => held(&load(&[Need::Database])?, arguments, environment),
        Command::Audit(arguments) => audit(&load(arguments.needs())?, arguments),
        Command::LogLevel(arguments) => Ok(log_level(&load(&[])?, arguments, environment)?),
        Command::Completions { shell } => Ok(say(&completions(*shell))?),
        Command::Man { folder } => Ok(manual(folder)?),
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

fn offsets(config: &Config, arguments: &Offsets, environment: &[(OsString, OsString)]) -> Result<(), Failure> {
    said(config, arguments.run(config, environment))
}

fn partition(config: &Config, arguments: &Partition, environment: &[(OsString, OsString)]) -> Result<(), Failure> {
    said(config, arguments.run(config, environment))
}

fn actions(config: &Config, arguments: &Actions) -> Result<(), Failure> {
    said(config, arguments.run(config))
}

fn retention(config: &Config, arguments: &Retention) -> Result<(), Failure> {
    said(config, arguments.run(config))
}

/// Does it and says what it gives.
fn said(config: &Config, doing: impl Future<Output = anyhow::Result<String>>) -> Result<(), Failure> {
    let text = runtime()?.block_on(doing).map_err(|error| of_database(config, error))?;
    Ok(say(&text)?)
}

/// An error of a database that is not reached names it; every other one is about something else.
fn of_database(config: &Config, error: anyhow::Error) -> anyhow::Error {
    let is_away = |error: &DbError| error.class() == ErrorClass::Connection;
    let away = match (error.downcast_ref::<DbError>(), error.downcast_ref::<ActionError>()) {
        (Some(error), _) | (_, Some(ActionError::Database(error))) => is_away(error),
        _ => false,
    };
    if away { error.context(database_of(config)) } else { error }
}

fn audit(config: &Config, arguments: &Audit) -> Result<(), Failure> {
    let (report, text) = runtime()?.block_on(arguments.run(config)).with_context(|| database_of(config))?;
    say(&text)?;
    if report.adds_up() { Ok(()) } else { Err(Failure::Said) }
}

fn held(config: &Config, arguments: &Held, environment: &[(OsString, OsString)]) -> Result<(), Failure> {
    let done = runtime()?.block_on(arguments.run(config, environment));
    let (text, all_taken) = done.map_err(|error| of_database(config, error))?;
    say(&text)?;
    if all_taken { Ok(()) } else { Err(Failure::Said) }
}

fn log_level(config: &Config, arguments: &LogLevel, environment: &[(OsString, OsString)]) -> anyhow::Result<()> {
    say(&runtime()?.block_on(arguments.run(config, environment))?)
}

fn completions(shell: Shell) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "onceward", &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

fn manual(folder: &Path) -> anyhow::Result<()> {
    let written = fs::create_dir_all(folder).and_then(|()| clap_mangen::generate_to(Cli::command(), folder));
    written.with_context(|| folder.display().to_string())
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

    /// Every command with the words before it.
    fn all_commands() -> Vec<(Vec<String>, clap::Command)> {
        fn below(path: &[String], command: &clap::Command) -> Vec<(Vec<String>, clap::Command)> {
            let path = [path, &[command.get_name().to_owned()]].concat();
            let deeper = command.get_subcommands().flat_map(|deeper| below(&path, deeper)).collect::<Vec<_>>();
            std::iter::once((path, command.clone())).chain(deeper).collect()
        }
        below(&[], &Cli::command())
    }

    fn options(command: &clap::Command) -> Vec<&str> {
        command.get_arguments().filter_map(clap::Arg::get_long).collect()
    }

    #[test]
    fn every_command_and_option_is_completed_in_every_shell() {
        for shell in Shell::value_variants() {
            let script = completions(*shell);
            for (path, command) in all_commands() {
                assert!(script.contains(path.last().expect("a name")), "{shell}: {path:?}");
                // Elvish and PowerShell have their options without the dashes between them; all have the words.
                for option in options(&command) {
                    assert!(script.contains(option), "{shell}: {path:?} --{option}");
                }
            }
        }
    }

    #[test]
    fn every_command_and_option_has_its_place_in_the_manual() {
        let folder = std::env::temp_dir().join(format!("onceward-man-{}", uuid::Uuid::now_v7()));
        manual(&folder).expect("written");
        for (path, command) in all_commands() {
            let page = fs::read_to_string(folder.join(format!("{}.1", path.join("-")))).expect("a page");
            for option in options(&command) {
                assert!(page.contains(&format!("\\-\\-{}", option.replace('-', "\\-"))), "{path:?} --{option}");
            }
        }
        fs::remove_dir_all(folder).expect("removed");
        assert_eq!(exit_code(&["man", "/dev/null/nowhere"], &[]), code(1));
        assert_eq!(exit_code(&["completions", "tcsh"], &[]), code(64));
        assert_eq!(exit_code(&["log-level", "debug"], &[]), code(64), "no reason");
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
        let config = Config::load(None, [("ONCEWARD_DATABASE_URL".into(), url.into())], &[]).expect("valid");
        let reach = async { store::Store::connect(&config.database.settings(), 1)?.control.get().await.map_err(DbError::from) };
        let error = runtime().expect("a runtime").block_on(reach).expect_err("nobody listens");
        let told = [error.clone().into(), ActionError::from(error).into()].map(|error| chain(&of_database(&config, error)));
        let named = format!("postgres://bill@127.0.0.1:{port}/money (database.url): connect: 127.0.0.1:{port}: ");
        assert!(told.iter().all(|told| told.starts_with(&named)), "{told:?}");
    }
}
