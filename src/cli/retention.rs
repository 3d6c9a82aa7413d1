//! `onceward retention`: what is remembered, what may be forgotten, and what keeps the rest.
//!
//! In: a group and a topic, by the configuration, and what everybody has noted in the database. Out: a table, or a run of the cleaner as the
//! service makes it. If it dies here, the next run finishes.
//!
//! Invariant: `status` and `run --dry-run` change nothing, and tell what a run would do.

use std::fmt::Write as _;

use anyhow::{Context, bail};
use clap::{Args, Subcommand, ValueEnum};

use crate::config::Config;
use crate::event::id::day_text;
use crate::retention::cleaner::{self, Outlook, Report};
use crate::retention::memory::Own;
use crate::retention::plan::{Limit, moment};
use crate::retention::sweeper::CREATE_INDEX;
use crate::store::Store;
use crate::store::forgetting::{DayState, DayTable};

/// The words.
#[derive(Debug, Args)]
pub struct Retention {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Shows each day of claims: its size, whether it goes at the next run, and what keeps it.
    Status {
        /// A table for people, or one line of JSON.
        #[arg(long, value_enum, default_value_t = Format::Table)]
        format: Format,
    },
    /// Drops the days that nobody needs any more, as the service does every `retention.interval_ms`.
    Run {
        /// Says what would go, and changes nothing.
        #[arg(long)]
        dry_run: bool,
    },
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Format {
    Table,
    Json,
}

impl Retention {
    /// Runs the command. The text goes to standard output.
    pub async fn run(&self, config: &Config) -> anyhow::Result<String> {
        let own = Own::of(config).await;
        let own = own.map_err(anyhow::Error::msg).context("how long ids are needed is not known; see kafka.brokers")?;
        match &self.command {
            Command::Status { format } => {
                let outlook = look(config, &own).await?;
                Ok(match format {
                    Format::Table => table(&outlook),
                    Format::Json => format!("{}\n", outlook.json()),
                })
            }
            Command::Run { dry_run: true } => Ok(would_go(&look(config, &own).await?)),
            Command::Run { dry_run: false } => match cleaner::run(&config.database.settings(), &own).await? {
                Some(report) => Ok(done(&report)),
                None => bail!("another cleaner is at work"),
            },
        }
    }
}

async fn look(config: &Config, own: &Own) -> anyhow::Result<Outlook> {
    let store = Store::connect(&config.database.settings(), 1)?;
    let mut session = store.control.get().await?;
    Ok(cleaner::look(&mut session, own).await?)
}

fn table(outlook: &Outlook) -> String {
    let floor = |floor: Option<_>| floor.map_or_else(|| "none yet".to_owned(), day_text);
    let mut text = format!("floor {}: older ids are forgotten; now {}\n", floor(outlook.floor), moment(outlook.now_ms));
    if outlook.floor_to_be() > outlook.floor {
        let _ = writeln!(text, "floor {} after the next run", floor(outlook.floor_to_be()));
    }
    if let Some(plain) = outlook.plain {
        let _ = writeln!(text, "\none table without days: {} claims, {} KiB", plain.rows, plain.bytes / 1024);
        text.push_str(&goes_of_a_plain_table(outlook));
    } else {
        let _ = writeln!(text, "\n{:<10}  {:>12}  {:>12}  ", "day", "claims", "KiB");
    }
    for day in &outlook.days {
        let _ = writeln!(text, "{}  {:>12}  {:>12}  {}", day.day, day.rows, day.bytes / 1024, fate(outlook, day));
    }
    text.push_str(&remedies(&outlook.held_back()));
    text
}

fn goes_of_a_plain_table(outlook: &Outlook) -> String {
    if outlook.plain.is_some_and(|plain| !plain.indexed) {
        return format!("nothing goes: old claims cannot be found; {CREATE_INDEX}\n");
    }
    outlook.forgettable().map_or_else(String::new, |may_go| {
        let (before, groups) = (moment(may_go.before_ms), may_go.groups.join(", "));
        format!("ids below the floor go that were claimed before {before} by {groups}\n")
    })
}

/// What becomes of a day.
fn fate(outlook: &Outlook, day: &DayTable) -> String {
    let keepers: Vec<String> = outlook.plan.keepers(day.end).map(Limit::to_string).collect();
    match (day.state, keepers.as_slice()) {
        (DayState::Detaching, _) => "is being detached; a run ends that".to_owned(),
        (DayState::Detached, _) if !outlook.goes(day) => "was detached by somebody, and is not below the floor".to_owned(),
        _ if outlook.goes(day) => "goes".to_owned(),
        (_, [only]) => only.clone(),
        (_, [first, others @ ..]) => format!("{first} (and {} more)", others.len()),
        (_, []) => "kept".to_owned(),
    }
}

fn remedies(held_back: &[Limit]) -> String {
    let mut text = String::new();
    for limit in held_back {
        let _ = writeln!(text, "\nkeeps days that nobody needs for their age: {limit}");
        if let Some(remedy) = limit.remedy() {
            let _ = writeln!(text, "    {remedy}");
        }
    }
    text
}

fn would_go(outlook: &Outlook) -> String {
    let days: Vec<&DayTable> = outlook.days.iter().filter(|day| outlook.goes(day)).collect();
    let mut text = String::new();
    if outlook.floor_to_be() > outlook.floor {
        let _ = writeln!(text, "the floor would rise to {}", outlook.floor_to_be().map(day_text).unwrap_or_default());
    }
    for day in &days {
        let _ = writeln!(text, "{} would go: {} claims, {} KiB", day.day, day.rows, day.bytes / 1024);
    }
    if outlook.plain.is_some() {
        text.push_str(&goes_of_a_plain_table(outlook));
    } else if days.is_empty() {
        text.push_str("no day would go\n");
    }
    text + &remedies(&outlook.held_back())
}

fn done(report: &Report) -> String {
    let mut text = String::new();
    for day in &report.finished {
        let _ = writeln!(text, "{day}: a detach that was cut off is ended");
    }
    if let Some((from, to)) = report.raised {
        let _ = writeln!(text, "the floor was raised from {} to {}", day_text(from), day_text(to));
    }
    for day in &report.dropped {
        let _ = writeln!(text, "{} is gone: {} claims, {} KiB", day.day, day.rows, day.bytes / 1024);
    }
    match (report.deleted, report.dropped.is_empty()) {
        (0, true) => text.push_str("nothing was to go\n"),
        (0, false) => {}
        (deleted, _) => {
            let _ = writeln!(text, "{deleted} claims are gone");
        }
    }
    text + &remedies(&report.held_back)
}
