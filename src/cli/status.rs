//! `onceward status`: the whole group at one glance, from the database and from Kafka, whether a process runs or not.
//!
//! In: a group and a topic, by the configuration. Out: a table for people or a line of JSON; with `--watch` again and again. It owns
//! nothing and changes nothing.
//!
//! Invariant: what could not be asked is said, and the rest is shown all the same.

use std::fmt::Write as _;
use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};

use crate::cli::text::table_of;
use crate::config::Config;
use crate::event::id::day_text;
use crate::overview::{HeldKind, Known, Overview, Row, State, ask_broker};
use crate::retention::cleaner::{self, Outlook};
use crate::retention::memory::Own;
use crate::span;
use crate::status::Snapshot;
use crate::store::{DbError, Store, overview};
use crate::text::printable;

/// The words.
#[derive(Debug, Args)]
pub struct Status {
    /// A table for people, or one line of JSON.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
    /// Again every second, until it is interrupted.
    #[arg(long)]
    watch: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Format {
    Table,
    Json,
}

/// Between two looks.
const AGAIN: Duration = Duration::from_secs(1);
/// Clears a terminal.
const CLEAR: &str = "\x1b[2J\x1b[H";

impl Status {
    /// Runs the command; `say` writes to standard output. Out: whether all was answered.
    pub async fn run(&self, config: &Config, say: impl Fn(&str) -> anyhow::Result<()>) -> anyhow::Result<bool> {
        let store = Store::connect(&config.database.settings(), 1)?;
        loop {
            let overview = look(config, &store).await;
            let text = self.text(&overview);
            let clear = if self.watch && io::stdout().is_terminal() { CLEAR } else { "" };
            say(&format!("{clear}{text}"))?;
            if !self.watch {
                return Ok(overview.database.error.is_none() && overview.kafka.error.is_none());
            }
            tokio::time::sleep(AGAIN).await;
        }
    }

    fn text(&self, overview: &Overview) -> String {
        match self.format {
            Format::Table => table(overview),
            Format::Json => format!("{}\n", overview.json()),
        }
    }
}

async fn look(config: &Config, store: &Store) -> Overview {
    let kafka = config.kafka.clone();
    let logs = timed(async { tokio::task::spawn_blocking(move || ask_broker(&kafka)).await.map_err(|error| error.to_string())? });
    let group = timed(async {
        let mut session = store.control.get().await.map_err(|error| DbError::from(error).to_string())?;
        let group = overview::group(&mut session, &config.kafka.group, &config.kafka.topic).await;
        group.map_err(|error| error.to_string())
    });
    let outlook = timed(async {
        let own = Own::of(config).await?;
        let mut session = store.control.get().await.map_err(|error| DbError::from(error).to_string())?;
        cleaner::look(&mut session, &own).await.map_err(|error| error.to_string())
    });
    let (group, logs, outlook) = tokio::join!(group, logs, outlook);
    Overview::of(&config.kafka, (group, logs, outlook), &Snapshot::default())
}

async fn timed<T>(answer: impl Future<Output = Result<T, String>>) -> Known<T> {
    let begun = Instant::now();
    let answer = answer.await;
    Known::just_now(answer, begun.elapsed())
}

fn table(overview: &Overview) -> String {
    let mut text = format!(
        "topic {}, group {}: lag {}, {} held",
        overview.topic,
        overview.group,
        number(overview.lag()),
        overview.held.iter().map(|kind| kind.count).sum::<i64>()
    );
    let _ = match overview.unknown() {
        0 => writeln!(text),
        unknown => {
            writeln!(text, ", of which {unknown} may have been charged and nobody knows: `onceward held list --reason unknown`")
        }
    };
    let head = ["partition", "lag", "settled", "committed", "log ends", "held", "epoch", "owner", "state", "why"];
    text.push('\n');
    text.push_str(&table_of(head, overview.partitions.iter().map(cells)));
    if !overview.held.is_empty() {
        let now_ms = overview.database.get().map_or(0, |group| group.now_ms);
        let kind = |kind: &HeldKind| {
            let age = Duration::from_millis(u64::try_from(now_ms - kind.oldest_ms).unwrap_or_default());
            [kind.reason.to_string(), kind.state.as_str().to_owned(), kind.count.to_string(), span::in_words(age)]
        };
        text.push('\n');
        text.push_str(&table_of(["held", "state", "events", "oldest"], overview.held.iter().map(kind)));
    }
    text.push('\n');
    text.push_str(&sources(overview));
    text
}

fn cells(row: &Row) -> [String; 10] {
    [
        row.partition.to_string(),
        number(row.lag),
        number(row.settled),
        number(row.committed),
        number(row.log_ends),
        row.held.to_string(),
        number(row.epoch),
        row.owner.clone().unwrap_or_else(|| "-".to_owned()),
        match row.state {
            // Whether its owner lives, nobody here can say.
            State::Running | State::Waiting => "owned",
            State::Paused => "paused",
            State::Stopped => "stopped",
            State::Unowned => "never owned",
        }
        .to_owned(),
        printable(&row.why.clone().unwrap_or_default().replace('\n', " ")),
    ]
}

/// Where the answers come from, and what could not be asked.
fn sources(overview: &Overview) -> String {
    let mut text = String::new();
    let Overview { database, kafka, retention, .. } = overview;
    let requests = database.get().map_or(0, |group| group.requests);
    if requests > 0 {
        let _ = writeln!(text, "requests   {requests} not carried out yet: each waits for the owner of its partition");
    }
    let _ = match (retention.get(), &retention.error) {
        (Some(outlook), _) => writeln!(text, "retention  {}", remembered(outlook)),
        (None, error) => writeln!(text, "retention  not known: {}", error.as_deref().unwrap_or_default()),
    };
    let _ = match (database.get(), &database.error) {
        (Some(group), _) => {
            writeln!(text, "database   PostgreSQL {}, answered in {} ms", group.version, database.took.as_millis())
        }
        (None, error) => writeln!(text, "database   does not answer: {}", error.as_deref().unwrap_or_default()),
    };
    let _ = match &kafka.error {
        None => writeln!(text, "kafka      answered in {} ms", kafka.took.as_millis()),
        Some(error) => writeln!(text, "kafka      does not answer (kafka.brokers): {error}"),
    };
    text
}

fn remembered(outlook: &Outlook) -> String {
    let floor = outlook
        .floor
        .map_or_else(|| "nothing is forgotten yet".to_owned(), |floor| format!("forgotten before {}", day_text(floor)));
    match outlook.held_back().first() {
        None => format!("{floor}, {} days kept", outlook.days.len()),
        Some(limit) => format!("{floor}; days are held back, see `onceward retention status`: {limit}"),
    }
}

fn number(number: Option<i64>) -> String {
    number.map_or_else(|| "-".to_owned(), |number| number.to_string())
}
