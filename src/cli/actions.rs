//! `onceward actions`, `onceward partition`: what operators have decided, and what they decide of a partition.
//!
//! In: a decision with its reason. Out: that it counts, or why not; or a row for each decision. If it dies here, the decision counts or
//! it does not: it is one statement.

use std::ffi::OsString;
use std::fmt::Write as _;

use clap::{Args, Subcommand, ValueEnum};

use crate::actions::{By, Desk, json_of};
use crate::cli::text::{actor, table_of};
use crate::config::Config;
use crate::held::shown::time;
use crate::store::Store;
use crate::store::operator_actions::Decided;
use crate::text::printable;

/// The words of `onceward partition`.
#[derive(Debug, Args)]
pub struct Partition {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Lets a partition stand still, whoever owns it, until it is resumed. A batch that runs ends; requests for held events are noted.
    Pause(Which),
    /// Lets a paused partition go on where it stood.
    Resume(Which),
}

#[derive(Debug, Args)]
struct Which {
    /// The partition.
    #[arg(value_parser = clap::value_parser!(i32).range(0..))]
    partition: i32,
    #[command(flatten)]
    why: Why,
}

/// Every decision has a reason, and somebody who takes it.
#[derive(Debug, Args)]
pub struct Why {
    /// Why: whoever looks later will want to know.
    #[arg(long)]
    reason: String,
    /// Who wants it; without it, the user of this shell.
    #[arg(long)]
    actor: Option<String>,
}

/// The words of `onceward actions`.
#[derive(Debug, Args)]
pub struct Actions {
    /// Of this partition.
    #[arg(long)]
    partition: Option<i32>,
    /// The most rows.
    #[arg(long, value_name = "ROWS", default_value_t = 100, value_parser = clap::value_parser!(i64).range(1..))]
    limit: i64,
    /// For people, or one line of JSON a row.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    Table,
    Json,
}

impl Why {
    /// Hands a decision in. Out: what the action gives.
    pub async fn decide<T>(
        &self,
        config: &Config,
        environment: &[(OsString, OsString)],
        action: impl AsyncFnOnce(Desk<'_>, By<'_>) -> Result<T, crate::actions::ActionError>,
    ) -> anyhow::Result<T> {
        let store = Store::connect(&config.database.settings(), 1)?;
        let desk = Desk { store: &store, group: &config.kafka.group, topic: &config.kafka.topic };
        let actor = actor(self.actor.as_deref(), environment);
        Ok(action(desk, By { actor: &actor, reason: self.reason.trim() }).await?)
    }
}

impl Partition {
    /// Does it. The text goes to standard output.
    pub async fn run(&self, config: &Config, environment: &[(OsString, OsString)]) -> anyhow::Result<String> {
        match &self.what {
            What::Pause(Which { partition, why }) => {
                why.decide(config, environment, async |desk, by| desk.pause(*partition, by).await).await?;
                Ok(format!("partition {partition} is paused: nothing of it begins until `onceward partition resume {partition}`\n"))
            }
            What::Resume(Which { partition, why }) => {
                why.decide(config, environment, async |desk, by| desk.resume(*partition, by).await).await?;
                Ok(format!("partition {partition} goes on\n"))
            }
        }
    }
}

impl Actions {
    /// Lists them, the latest first. The text goes to standard output.
    pub async fn run(&self, config: &Config) -> anyhow::Result<String> {
        let store = Store::connect(&config.database.settings(), 1)?;
        let desk = Desk { store: &store, group: &config.kafka.group, topic: &config.kafka.topic };
        let mut decided = desk.decided(self.partition, None, self.limit.saturating_add(1)).await?;
        let limit = usize::try_from(self.limit).unwrap_or(usize::MAX);
        let more = decided.len() > limit;
        decided.truncate(limit);
        if self.format == Format::Json {
            return Ok(decided.iter().map(|decided| format!("{}\n", json_of(decided))).collect());
        }
        let head = ["when", "who", "what", "partition", "offset", "held", "why"];
        let mut text = table_of(head, decided.iter().map(line));
        if more {
            writeln!(text, "there are more; --limit shows them")?;
        }
        Ok(text)
    }
}

fn line(decided: &Decided) -> [String; 7] {
    let Decided { id: _, at, actor, action, partition, offset, to, held, reason } = decided;
    let offset = match (offset, to) {
        (Some(from), Some(to)) => format!("[{from}, {to})"),
        (Some(offset), None) => offset.to_string(),
        (None, _) => String::new(),
    };
    [
        time(*at),
        printable(actor),
        printable(action),
        partition.to_string(),
        offset,
        held.map(|held| held.to_string()).unwrap_or_default(),
        printable(&reason.replace('\n', " ")),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{NextOffset, Offset};

    #[test]
    fn a_decision_is_one_line_whatever_people_write() {
        let decided = Decided {
            id: 1,
            at: chrono::DateTime::UNIX_EPOCH,
            actor: "ann\x1b[2J".to_owned(),
            action: "skip".to_owned(),
            partition: 3,
            offset: Some(Offset(5)),
            to: Some(NextOffset(9)),
            held: None,
            reason: "two\nlines".to_owned(),
        };
        let shown = line(&decided);
        assert_eq!(shown, ["1970-01-01T00:00:00.000Z", "ann\u{fffd}[2J", "skip", "3", "[5, 9)", "", "two lines"]);
        let record = Decided { to: None, held: Some(7), ..decided };
        assert_eq!(line(&record)[4..6], ["5", "7"]);
        assert_eq!(json_of(&record)["offset"], 5);
    }
}
