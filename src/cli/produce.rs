//! `onceward produce`: the words for [`produce::Options`].
//!
//! Invariant: what is sent is decided by the words alone, but for new ids and times.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use crate::config::Config;
use crate::event::Currency;
use crate::produce::{self, Generated, Options, Source};

/// The words.
#[derive(Debug, Args)]
#[command(group(clap::ArgGroup::new("source").required(true).args(["file", "count"])))]
pub struct Produce {
    /// Sends the lines of this file, one payload each, as they are.
    #[arg(long)]
    file: Option<PathBuf>,
    /// Generates this many records, repeats included.
    #[arg(long)]
    count: Option<u64>,
    /// How many of a hundred generated records repeat an earlier one, byte for byte.
    #[arg(long, value_name = "PERCENT", default_value_t = 0, requires = "count")]
    duplicates: u8,
    /// How many of a hundred repeats go to a partition drawn by chance.
    #[arg(long, value_name = "PERCENT", default_value_t = 0, requires = "count")]
    elsewhere: u8,
    /// Currencies of generated amounts, by their ISO 4217 codes.
    #[arg(long, value_delimiter = ',', default_value = "EUR", value_parser = currency, requires = "count")]
    currencies: Vec<Currency>,
    /// Decides amounts, customers and repeats.
    #[arg(long, default_value_t = 1, requires = "count")]
    seed: u64,
    /// The first order id; each generated event has the next one. By default the microseconds since 1970.
    #[arg(long, value_name = "ID", requires = "count")]
    first_order: Option<i64>,
    /// Records per second; by default as fast as Kafka takes them.
    #[arg(long, value_name = "PER_SECOND")]
    rate: Option<u32>,
    /// Appends one line per delivered record to this file, for `onceward audit`.
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// A record that is not acknowledged within this time has failed.
    #[arg(long, value_name = "MS", default_value_t = 30_000)]
    delivery_timeout_ms: u64,
}

impl Produce {
    /// Produces, and says in one line what was done.
    pub fn run(&self, config: &Config) -> anyhow::Result<String> {
        let source = match (&self.file, self.count) {
            (Some(path), _) => Source::File(path.clone()),
            (None, count) => Source::Generated(Generated {
                count: count.unwrap_or(0),
                currencies: self.currencies.clone(),
                duplicates_percent: self.duplicates,
                duplicates_elsewhere_percent: self.elsewhere,
                seed: self.seed,
                first_order: self.first_order,
            }),
        };
        let produced = produce::run(&Options {
            client: config.kafka.kafka_producer_config(),
            topic: config.kafka.topic.clone(),
            source,
            per_second: self.rate,
            log: self.log.clone(),
            delivery_timeout: Duration::from_millis(self.delivery_timeout_ms),
        })?;
        let seconds = produced.elapsed.as_secs_f64();
        Ok(format!("{} records delivered to {} in {seconds:.1} s\n", produced.delivered, config.kafka.topic))
    }
}

fn currency(code: &str) -> Result<Currency, String> {
    Currency::from_code(code).map_err(|_| "not a code of ISO 4217, such as EUR".to_owned())
}
