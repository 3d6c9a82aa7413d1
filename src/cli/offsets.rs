//! `onceward offsets`: where each partition stands, what is to be passed over, and what is to be held.
//!
//! In: a group and a topic, by the configuration. Out: a table, or offsets that no owner will apply. It changes one row, with a record of
//! who wanted it and why. If it dies here, the row has changed or not.
//!
//! Invariant: nothing is passed over that is not in the log yet.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use clap::{Args, Subcommand, ValueEnum};
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::{Offset as Place, TopicPartitionList};
use serde_json::json;

use crate::cli::actions::Why;
use crate::config::{Config, KafkaConfig};
use crate::pipeline::connection::{self, Plain};
use crate::record::{NextOffset, Offset};
use crate::store::Store;
use crate::store::skips::{self, Position};

/// How long a broker may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// The words.
#[derive(Debug, Args)]
pub struct Offsets {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Shows each partition: what is settled, what Kafka was told, what the log holds, what is passed over.
    Show {
        /// A table for people, or one line of JSON.
        #[arg(long, value_enum, default_value_t = Format::Table)]
        format: Format,
    },
    /// Passes over records: they are settled without effect, now and whenever they are read again. It is written down.
    Skip(Skip),
    /// Holds one record and moves on: it is kept whole in `held_event`, to be replayed or discarded. Later events of its key wait.
    Hold(Hold),
}

#[derive(Debug, Args)]
struct Hold {
    /// The partition.
    #[arg(value_parser = clap::value_parser!(i32).range(0..))]
    partition: i32,
    /// The record's offset; it must not be settled.
    #[arg(value_parser = clap::value_parser!(i64).range(0..))]
    offset: i64,
    #[command(flatten)]
    why: Why,
}

#[derive(Debug, Args)]
struct Skip {
    /// The partition.
    #[arg(long)]
    partition: i32,
    /// The first offset; without it, the first that is not settled.
    #[arg(long, value_parser = clap::value_parser!(i64).range(0..))]
    from: Option<i64>,
    /// One past the last offset; it must not lie beyond the log's end.
    #[arg(long, value_parser = clap::value_parser!(i64).range(1..))]
    to: i64,
    #[command(flatten)]
    why: Why,
    /// Says what would be passed over, and changes nothing.
    #[arg(long)]
    dry_run: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Format {
    Table,
    Json,
}

/// What the broker says of a partition.
#[derive(Clone, Copy, Debug)]
struct Log {
    first: i64,
    end: i64,
    committed: Option<i64>,
}

impl Offsets {
    /// Runs the command. The text goes to standard output.
    pub async fn run(&self, config: &Config, environment: &[(OsString, OsString)]) -> anyhow::Result<String> {
        match &self.command {
            Command::Show { format } => show(config, *format).await,
            Command::Skip(words) => words.run(config, environment).await,
            Command::Hold(Hold { partition, offset, why }) => {
                why.decide(config, environment, async |desk, by| desk.hold(*partition, Offset(*offset), by).await).await?;
                Ok(format!(
                    "partition {partition}: the record at {offset} is held instead of applied; `onceward held list --reason operator` shows it\n"
                ))
            }
        }
    }
}

async fn show(config: &Config, format: Format) -> anyhow::Result<String> {
    let (positions, logs) = (positions(config).await?, logs(&config.kafka).await?);
    let positions: BTreeMap<i32, Position> = positions.into_iter().map(|position| (position.partition, position)).collect();
    let rows = logs.iter().map(|(partition, log)| (*partition, *log, positions.get(partition)));
    Ok(match format {
        Format::Table => table(rows),
        Format::Json => {
            let rows: Vec<_> = rows.map(|(partition, log, position)| as_json(partition, log, position)).collect();
            format!("{}\n", json!({ "group": config.kafka.group, "topic": config.kafka.topic, "partitions": rows }))
        }
    })
}

fn table<'a>(rows: impl Iterator<Item = (i32, Log, Option<&'a Position>)>) -> String {
    let mut text = format!(
        "{:>9}  {:>12}  {:>12}  {:>12}  {:>12}  {:>8}  {:>6}  {:<20}  passed over\n",
        "partition", "settled", "committed", "log begins", "log ends", "lag", "epoch", "owner"
    );
    let number = |number: Option<i64>| number.map_or_else(|| "-".to_owned(), |number| number.to_string());
    for (partition, log, position) in rows {
        let settled = position.and_then(|position| position.next_offset).map(|next| next.0);
        let _ = writeln!(
            text,
            "{partition:>9}  {:>12}  {:>12}  {:>12}  {:>12}  {:>8}  {:>6}  {:<20}  {}",
            number(settled),
            number(log.committed),
            log.first,
            log.end,
            number(settled.map(|settled| (log.end - settled).max(0))),
            number(position.map(|position| position.epoch.0)),
            position.map_or("-", |position| position.owner.as_str()),
            position.map(|position| position.skips.to_string()).filter(|skips| !skips.is_empty()).unwrap_or_else(|| "-".to_owned()),
        );
    }
    text
}

fn as_json(partition: i32, log: Log, position: Option<&Position>) -> serde_json::Value {
    json!({
        "partition": partition,
        "settled": position.and_then(|position| position.next_offset).map(|next| next.0),
        "committed": log.committed,
        "log_begins": log.first,
        "log_ends": log.end,
        "epoch": position.map(|position| position.epoch.0),
        "owner": position.map(|position| position.owner.as_str()),
        "updated_at": position.map(|position| position.updated_at.as_str()),
        "passed_over": position.map(|position| position.skips.ranges()),
    })
}

impl Skip {
    async fn run(&self, config: &Config, environment: &[(OsString, OsString)]) -> anyhow::Result<String> {
        let partition = self.partition;
        let log =
            logs(&config.kafka).await?.remove(&partition).with_context(|| format!("the topic has no partition {partition}"))?;
        let position = positions(config).await?.into_iter().find(|position| position.partition == partition);
        let position =
            position.with_context(|| format!("nobody has ever owned partition {partition}: there is nothing to pass over yet"))?;
        let from = match self.from {
            Some(from) => NextOffset(from),
            None => position.next_offset.context("nothing is settled there yet: say --from")?,
        };
        let to = NextOffset(self.to);
        if from >= to {
            bail!("[{from}, {to}) is empty: --to is one past the last offset to pass over");
        }
        if to.0 > log.end {
            bail!("the log of partition {partition} ends at {}: what is not there yet cannot be passed over", log.end);
        }
        if self.dry_run {
            return Ok(format!("partition {partition}: {} offsets, [{from}, {to}), would be passed over\n", to.0 - from.0));
        }
        let skips = self.why.decide(config, environment, async |desk, by| desk.skip(partition, (from, to), by).await).await?;
        Ok(format!("partition {partition}: [{from}, {to}) is passed over from now on. Passed over in all: {skips}\n"))
    }
}

async fn positions(config: &Config) -> anyhow::Result<Vec<Position>> {
    let store = Store::connect(&config.database.settings(), 1)?;
    let mut session = store.control.get().await?;
    Ok(skips::positions(&mut session, &config.kafka.group, &config.kafka.topic).await?)
}

async fn logs(kafka: &KafkaConfig) -> anyhow::Result<BTreeMap<i32, Log>> {
    let kafka = kafka.clone();
    tokio::task::spawn_blocking(move || read_logs(&kafka)).await?
}

/// Blocks the thread. It joins no group.
fn read_logs(kafka: &KafkaConfig) -> anyhow::Result<BTreeMap<i32, Log>> {
    let client: BaseConsumer<Plain> = connection::connect(&kafka.kafka_client_config(), Plain::default())?;
    let asked = client.fetch_metadata(Some(&kafka.topic), PATIENCE);
    let metadata =
        asked.map_err(|error| anyhow!("the broker does not answer; see kafka.brokers: {}", connection::why(&client, &error)))?;
    let topic = connection::topic(&metadata, &kafka.topic).map_err(|why| anyhow!(why))?;
    let mut wanted = TopicPartitionList::new();
    for partition in topic.partitions() {
        wanted.add_partition(&kafka.topic, partition.id());
    }
    let committed = client.committed_offsets(wanted, PATIENCE);
    let committed =
        committed.map_err(|error| anyhow!("the broker does not tell the group's offsets: {}", connection::why(&client, &error)))?;
    let mut logs = BTreeMap::new();
    for element in committed.elements() {
        let (first, end) = client.fetch_watermarks(&kafka.topic, element.partition(), PATIENCE)?;
        let committed = if let Place::Offset(committed) = element.offset() { Some(committed) } else { None };
        logs.insert(element.partition(), Log { first, end, committed });
    }
    Ok(logs)
}
