//! Chaos: several engines on a real Kafka and a real PostgreSQL, a provider that lies, and a fault every few seconds; then the reckoning.
//!
//! In: for how long, with which seed, on whose servers. Out: the reconciler's table, what was done to the engines, and the longest time
//! that a partition stood still though it could have gone on. It owns every process on the field; all of it is gone when it ends.
//!
//! Invariant: what is lost or doubled is counted by `audit`, which believes nothing that an engine says of itself; and an engine that
//! ends unasked, or with an error after it was asked, is never overlooked.

mod conductor;
mod engines;
mod field;
mod outcome;
mod watch;

use std::cell::RefCell;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};

use super::demo::mischief;
use super::interrupt;
use crate::audit::grouped;
use crate::produce::Source;
use crate::progress::Progress;
use conductor::Conductor;
use field::Field;
use outcome::Outcome;
use watch::Watch;

/// `onceward chaos`.
#[derive(Clone, Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("kafka").required(true).args(["brokers", "kafka_jars"])))]
pub struct Args {
    /// For how long faults are made. Settling and reckoning come after that.
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    duration: u64,
    /// Decides which faults are made, when, and to whom.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Engines that share the work; one more comes and goes.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=20))]
    processes: u8,
    /// How the group shares the partitions.
    #[arg(long, value_enum, default_value_t)]
    protocol: Protocol,
    /// Records per second while faults are made.
    #[arg(long, default_value_t = 2_000, value_parser = clap::value_parser!(u32).range(1..))]
    rate: u32,
    /// Given brokers, `host:port` separated by commas; a topic and a group are made there and stay.
    #[arg(long)]
    brokers: Option<String>,
    /// The folder of Kafka's jars (see scripts/test): a broker of its own is started.
    #[arg(long, value_name = "FOLDER")]
    kafka_jars: Option<PathBuf>,
    /// A given server's superuser URL; a database is made there and stays. Without it a server of its own is started, which can also be
    /// restarted and crashed.
    #[arg(long, value_name = "URL")]
    database: Option<String>,
    /// How the outcome is written; `json` is one object in the last line.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// How the group shares the partitions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
enum Protocol {
    /// Only the partitions that move stop.
    #[default]
    CooperativeSticky,
    /// All partitions stop.
    Range,
    /// The broker decides (KIP-848).
    Broker,
}

/// How the outcome is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    /// A table.
    #[default]
    Text,
    /// One JSON object.
    Json,
}

/// How long everything may take to settle once nothing more is done to it.
const SETTLING: Duration = Duration::from_secs(300);
/// How long the first takeover of all partitions may take.
const BEGINNING: Duration = Duration::from_secs(60);
/// Between two looks at everything.
const TICK: Duration = Duration::from_millis(50);

/// Does it all. `false`: it does not add up.
///
/// # Errors
/// Something could not be started, or nothing settled in time.
pub fn run(args: &Args) -> Result<bool> {
    let mut field = Field::set_up(args)?;
    let played = play(args, &mut field);
    if played.is_err() && !interrupt::has_come() {
        field.engines.show_last_words();
    }
    let outcome = played?;
    match args.format {
        Format::Text => println!("\n{outcome}"),
        Format::Json => println!("{}", outcome.to_json()),
    }
    Ok(outcome.is_good())
}

fn play(args: &Args, field: &mut Field) -> Result<Outcome> {
    let started = Instant::now();
    let progress = RefCell::new(Progress::begin(false, "", 0, None));
    let say = |line: String| progress.borrow_mut().say(&format!("{:6.1} s  {line}", started.elapsed().as_secs_f32()));
    let tell = |news: Vec<String>| news.into_iter().for_each(&say);
    field.produce(Source::File(field.file("poison", &mischief::poison())?))?;
    field.engines.start_all()?;
    let load = field.produce_beside(args.rate, args.duration, args.seed);
    say(format!(
        "{} engines ({:?}), {} records per second on {} partitions, seed {}",
        args.processes,
        args.protocol,
        grouped(args.rate.into()),
        field::PARTITIONS,
        args.seed
    ));

    let mut conductor = Conductor::new(args.seed, field);
    let mut watch = Watch::default();
    await_so(BEGINNING, "every partition has been worked on", || {
        conductor.look_after(field)?;
        tell(watch.look(field)?);
        Ok(watch.partitions() == usize::try_from(field::PARTITIONS)?)
    })?;
    let faults_begin = Instant::now();
    let faults_end = faults_begin + Duration::from_secs(args.duration);
    progress.replace(Progress::begin(true, "making faults", 0, Some(args.duration)));
    while Instant::now() < faults_end {
        progress.borrow_mut().at(faults_begin.elapsed().as_secs());
        ensure!(!interrupt::has_come(), "interrupted");
        if let Some(told) = conductor.make_a_fault(field)? {
            say(told);
        }
        conductor.look_after(field)?;
        tell(watch.look(field)?);
        std::thread::sleep(TICK);
    }

    progress.replace(Progress::begin(false, "", 0, None));
    conductor.undo_everything(field)?;
    say("no more faults; everything may settle".to_owned());
    let delivered = load.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
    await_so(SETTLING, "everything is settled", || {
        conductor.look_after(field)?;
        tell(watch.look(field)?);
        field.is_settled()
    })?;
    say(format!("settled; {} records were delivered beside the poison", grouped(delivered.delivered)));
    conductor.stop_everybody(field)?;
    Ok(Outcome {
        report: field.audit()?,
        faults: conductor.faults(),
        rebalances: field.engines.rebalances()?,
        longest_stall: watch.longest(),
        unexplained: conductor.unexplained(),
    })
}

/// Looks again and again until it is so.
fn await_so(limit: Duration, what: &str, mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
    let end = Instant::now() + limit;
    while !is_so()? {
        if interrupt::has_come() {
            bail!("interrupted");
        }
        ensure!(Instant::now() < end, "not within {limit:?}: {what}");
        std::thread::sleep(TICK);
    }
    Ok(())
}
