//! `onceward audit`: the words for [`audit::Options`].
//!
//! Invariant: what does not add up ends with exit code 1, whatever the format.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use url::Url;

use crate::audit::{self, Report};
use crate::config::{AmountForm, Config};
use crate::store::Store;

/// The words.
#[derive(Debug, Args)]
pub struct Audit {
    /// The log that `onceward produce --log` wrote. Without it, nobody can say what is lost.
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// The provider's base URL; its ledger is read from <URL>/v1/ledger. Without it, nobody can say what was charged twice.
    #[arg(long, value_name = "URL")]
    ledger: Option<Url>,
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
    /// Reconciles. The text goes to standard output.
    pub async fn run(&self, config: &Config) -> anyhow::Result<(Report, String)> {
        let store = Store::connect(&config.database.settings(), 1)?;
        let options = audit::Options {
            group: config.kafka.group.clone(),
            topic: config.kafka.topic.clone(),
            log: self.log.clone(),
            ledger: self.ledger.clone(),
            ledger_in_minor_units: config.provider.amount == AmountForm::MinorUnits,
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
