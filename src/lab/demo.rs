//! The demo: the whole story on one machine in half a minute, and a reckoning that a stranger understands.
//!
//! In: nothing but this executable. Out: a story on standard error, the reckoning on standard output, and whether it adds up. It owns
//! everything on the stage; all of it is gone when it ends, however it ends.
//!
//! Invariant: every number of the reckoning comes from `audit`, which believes nothing that the engine says of itself.

pub(in crate::lab) mod mischief;
mod stage;

use std::collections::HashSet;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use super::process::{self, Signal};
use super::provider_stub::LedgerStatus;
use crate::audit::{Report, grouped};
use crate::event::Currency;
use crate::produce::{Generated, Source};
use stage::Stage;

/// `onceward demo`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// How the reckoning is written; `json` is one object in the last line.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
    /// Leave everything running afterwards, until Ctrl-C, with some lines to try.
    #[arg(long)]
    keep: bool,
}

/// How the reckoning is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    /// A table.
    #[default]
    Text,
    /// One JSON object.
    Json,
}

/// Records of the first wave, which waits for the engine, and of the second, which meets it running. Repeats are among them.
const WAVES: [u64; 2] = [13_000, 11_000];
/// How many of a hundred records repeat an earlier one, and how many of a hundred repeats go to another partition.
const REPEATS: (u8, u8) = (13, 25);
/// The file that holds the one order which a watcher may send again.
const ORDER_TO_REPEAT: &str = "order.json";
/// The call that is still waiting for its answer when the engine is killed.
const LAST_CALL: u64 = 6_000;
/// Long enough for the slowest machine; the whole demo takes a sixth of it on an idle one.
const LIMIT: Duration = Duration::from_secs(180);

/// Plays it all. `false`: it does not add up.
///
/// # Errors
/// Something could not be started, or did not happen in time.
pub fn run(args: &Args) -> Result<bool> {
    let story = Story(Instant::now());
    story.opening();
    let mut stage = Stage::set_up()?;
    let told = play(&story, &mut stage);
    if told.is_err() && !stage.is_interrupted() {
        stage.show_the_engines_last_words();
    }
    let report = told?;
    match args.format {
        Format::Text => println!("\n{report}\n"),
        Format::Json => println!("{}", report.to_json()),
    }
    if args.keep && !stage.is_interrupted() {
        keep(&mut stage)?;
    }
    Ok(report.adds_up())
}

fn play(story: &Story, stage: &mut Stage) -> Result<Report> {
    story.tell("A broker, a payment provider and a database run here, all private. The provider will lie:");
    for lie in mischief::LIES {
        story.detail(lie);
    }

    first_wave(story, stage)?;
    stage.start_engine()?;
    story.tell(format!("The engine runs: `onceward run`, process {}.", stage.engine_id()));
    stage.produce(Source::Generated(generated(1)))?;
    story.tell(format!("{} more records have come.", grouped(WAVES[1])));

    kill_it_while_it_charges(story, stage)?;
    stage.pause_until_the_broker_misses_it()?;
    stage.start_engine()?;
    story.tell(format!(
        "It was started again, process {}, and nothing was repaired by hand. The broker gives it the",
        stage.engine_id()
    ));
    story.more(format!("killed one's partitions when that one's session of {} s has ended.", stage::SESSION.as_secs()));
    stage.wait_until("everything is settled", LIMIT, Stage::is_settled)?;
    story.tell("Every record is settled, also those whose answer was lost and those that had to be asked again.");
    story.more(format!("What is held, and waits for a person: {}.", stage.held()?.join(", ")));

    replay_everything(story, stage)?;
    story.tell("The reckoning, from the producer's log, the database and the provider's ledger:");
    stage.audit()
}

fn first_wave(story: &Story, stage: &Stage) -> Result<()> {
    stage.produce(Source::Generated(generated(0)))?;
    let poison = mischief::poison();
    let conflicts = mischief::conflicts(&stage.produced()?)?;
    stage.produce(Source::File(stage.file("rubbish", &[&poison[..], &conflicts[..]].concat())?))?;
    stage.produce(Source::File(stage.file(ORDER_TO_REPEAT, &[mischief::an_order()?])?))?;
    story.tell(format!(
        "{} records are in the topic, on {} partitions:",
        grouped(stage.produced()?.len() as u64),
        stage::PARTITIONS
    ));
    story.detail(&format!("orders, and {} % repeats of them, every fourth on another partition than its first", REPEATS.0));
    story.detail(&format!("{} that are no orders, of {} kinds: {}", poison.len(), mischief::KINDS.len(), mischief::EXAMPLE));
    story.detail(&format!("{} that repeat an order's id with another amount", conflicts.len()));
    Ok(())
}

fn generated(wave: usize) -> Generated {
    let currencies = ["EUR", "EUR", "USD", "JPY", "KWD"].map(|code| Currency::from_code(code).expect("an ISO 4217 code"));
    Generated {
        count: WAVES[wave],
        currencies: currencies.to_vec(),
        duplicates_percent: REPEATS.0,
        duplicates_elsewhere_percent: REPEATS.1,
        seed: wave as u64,
        first_order: Some(1 + 1_000_000 * wave as i64),
    }
}

/// The worst moment: charges are made, the transaction that would remember them is open, and an answer is on its way.
fn kill_it_while_it_charges(story: &Story, stage: &mut Stage) -> Result<()> {
    let mut open = 0;
    stage.wait_until("a call waits for its answer inside an open transaction", LIMIT, |stage| {
        open = stage.open_transactions()?;
        Ok(stage.provider.calls().held > 0 && open > 0)
    })?;
    stage.kill_engine()?;
    stage.provider.release();
    let paid: HashSet<String> = stage.column("SELECT event_id FROM payment")?.into_iter().collect();
    let ledger = stage.provider.ledger();
    let charged = ledger.iter().filter(|entry| entry.status == LedgerStatus::Charged);
    let unknown = charged.filter(|entry| !paid.contains(&entry.idempotency_key)).count();
    ensure!(unknown > 0, "the engine was not killed in the middle of anything");
    let transactions = if open == 1 { "transaction" } else { "transactions" };
    story.tell(format!(
        "SIGKILL, with {open} {transactions} open and a call on its way. The database knows {} payments,",
        grouped(paid.len() as u64)
    ));
    story.more(format!("and the provider has made {} charges that the database has never heard of.", grouped(unknown as u64)));
    Ok(())
}

fn replay_everything(story: &Story, stage: &mut Stage) -> Result<()> {
    let code = stage.stop_engine(Signal::Term)?;
    ensure!(code == 0, "the engine ended with exit code {code} after SIGTERM");
    let calls = stage.provider.calls().posts;
    story.tell(format!(
        "SIGTERM: it has finished what it had begun and ended by itself. The provider was called {} times so far.",
        grouped(calls)
    ));
    stage.broker.rewind(stage::GROUP, stage::SESSION).context("setting the group back")?;
    stage.start_engine()?;
    story.tell("The group was set back to the beginning, so that every record comes once more.");
    stage.wait_until("everything is settled once more", LIMIT, Stage::is_settled)?;
    let again = stage.provider.calls().posts - calls;
    story.tell(format!("All of it was read again. The provider was called {again} times meanwhile."));
    Ok(())
}

fn keep(stage: &mut Stage) -> Result<()> {
    let duplicate = stage.path(ORDER_TO_REPEAT);
    let (program, config, admin) = (process::onceward(), stage.config(), stage.admin().to_owned());
    let ledger = stage.provider.url();
    eprintln!(
        "It is left running until you press Ctrl-C. To try in another terminal:

  its metrics           curl -s http://{admin}/metrics
  its status            curl -s http://{admin}/status
  send this duplicate   {} produce --config {} --file {}
  and see it counted    curl -s http://{admin}/metrics | grep duplicate
  its database          psql {}
  the provider's books  curl -s {ledger}/v1/ledger
  and whether all of    {} audit --config {} --log {} --ledger {ledger}
  it adds up
",
        program.display(),
        config.display(),
        duplicate.display(),
        stage.database_url(),
        program.display(),
        config.display(),
        stage.path(stage::PRODUCED).display(),
    );
    let wait = stage.wait_until("Ctrl-C", Duration::MAX, |_| Ok(false));
    if stage.is_interrupted() { Ok(()) } else { wait }
}

/// Lines for people, on standard error, each with the time since the start.
struct Story(Instant);

impl Story {
    fn opening(&self) {
        eprintln!(
            "onceward charges each confirmed order once. This demo shows it with records that come twice, records that are
rubbish, a payment provider that lies, a kill in the worst moment and a replay of everything. Half a minute or so.
"
        );
    }

    fn tell(&self, line: impl AsRef<str>) {
        eprintln!("{:5.1} s  {}", self.0.elapsed().as_secs_f32(), line.as_ref());
    }

    fn more(&self, line: impl AsRef<str>) {
        eprintln!("         {}", line.as_ref());
    }

    fn detail(&self, line: &str) {
        eprintln!("           - {line}");
    }
}
