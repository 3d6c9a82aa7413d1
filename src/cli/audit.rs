//! `onceward audit`: the words for [`audit::Options`].
//!
//! Invariant: what does not add up ends with exit code 1, whatever the format.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use url::Url;

use crate::audit::{self, Bound, Report, Source, TopicRange};
use crate::config::{AmountForm, Config, Need};
use crate::store::Store;

/// The words.
#[derive(Debug, Args)]
pub struct Audit {
    /// Reads what was produced from the log that `onceward produce --log` wrote, instead of from the topic.
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// Reads neither topic nor log: whether the tables agree with one another and with the ledger. Nobody can say what is lost then.
    #[arg(long, conflicts_with = "log")]
    tables_only: bool,
    /// Where to begin in the topic: a time (2026-01-31T10:00:00Z), or offsets (0:1200,1:980). Without it, and in partitions that are
    /// not named: where the log begins.
    #[arg(long, value_name = "BOUND", conflicts_with_all = ["log", "tables_only"])]
    from: Option<Bound>,
    /// Where to end, before the first record of that time or offset. Without it, and in partitions that are not named: where the
    /// group has not settled any further. Beyond that, records count as not read yet.
    #[arg(long, value_name = "BOUND", conflicts_with_all = ["log", "tables_only"])]
    to: Option<Bound>,
    /// Keeps what was read of the topic in this folder, sorted: run again with the same words after a kill, the audit goes on where
    /// the last finished run of records ended. The ledger and the tables are read anew, for they must be of one time. When the audit
    /// has ended, whatever the result, its files are removed.
    #[arg(long, value_name = "FOLDER", conflicts_with_all = ["log", "tables_only"])]
    state: Option<PathBuf>,
    /// The provider's base URL; its ledger is read from `/v1/ledger` there. Without it, nobody can say what was charged twice.
    #[arg(long, value_name = "URL")]
    ledger: Option<Url>,
    /// Memory for sorting, in MiB; two sorts are at work at the most. What does not fit goes to files without a name in TMPDIR, else
    /// in /var/tmp: about 150 bytes per record, which should be on a disk.
    #[arg(long, value_name = "MIB", default_value_t = (audit::MEMORY >> 20) as u16, value_parser = clap::value_parser!(u16).range(1..))]
    memory: u16,
    /// A table for people, or one line of JSON.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Format {
    Table,
    Json,
}

impl Audit {
    /// What the configuration must name.
    pub const fn needs(&self) -> &'static [Need] {
        if self.reads_topic() { &[Need::Kafka, Need::Database] } else { &[Need::Database] }
    }

    const fn reads_topic(&self) -> bool {
        self.log.is_none() && !self.tables_only
    }

    /// Reconciles. The text goes to standard output.
    pub async fn run(&self, config: &Config) -> anyhow::Result<(Report, String)> {
        let store = Store::connect(&config.database.settings(), 1)?;
        let range = || TopicRange {
            client: config.kafka.kafka_client_config(),
            from: self.from.clone(),
            to: self.to.clone(),
            state: self.state.clone(),
        };
        let options = audit::Options {
            group: config.kafka.group.clone(),
            topic: config.kafka.topic.clone(),
            produced: match &self.log {
                Some(log) => Some(Source::Log(log.clone())),
                None => self.reads_topic().then(range).map(Source::Topic),
            },
            ledger: self.ledger.clone(),
            ledger_tls: config.provider.tls(),
            ledger_in_minor_units: config.provider.amount == AmountForm::MinorUnits,
            memory: usize::from(self.memory) << 20,
            show_progress: true,
        };
        let report = audit::run(&store, &options).await?;
        let text = match self.format {
            Format::Table => report.to_string() + "\n",
            Format::Json => {
                report.problems.iter().for_each(|problem| super::complain(problem));
                report.to_json() + "\n"
            }
        };
        Ok((report, text))
    }
}
