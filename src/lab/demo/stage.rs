//! What the demo plays on: a broker, a provider and a database in this process, the engine as a child.
//!
//! In: acts of the play. Out: what can be seen from outside the engine. It owns every server and the folder for files; all of it is
//! gone when it is dropped.
//!
//! Invariant: the engine is a process like any user's: the same executable, a configuration file, signals.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use rdkafka::ClientConfig;
use tokio::runtime::Runtime;

use super::{LAST_CALL, mischief};
use crate::audit::{self, Report};
use crate::config::{Config, Need};
use crate::lab::broker::MockBroker;
use crate::lab::interrupt;
use crate::lab::postgres::{self, Postgres};
use crate::lab::process::{self, Signal, TempFolder};
use crate::lab::provider_stub::{self, ProviderStub};
use crate::produce::{self, LogLine, Source};
use crate::store::Store;

/// The consumer group.
pub const GROUP: &str = "billing-order-confirmed";
/// Of the topic.
pub const PARTITIONS: i32 = 6;
/// After which the broker gives a killed engine's partitions to another.
pub const SESSION: Duration = Duration::from_secs(6);
const TOPIC: &str = "orders.confirmed";
/// What the engine has to say.
const ENGINE_LOG: &str = "engine.log";
/// The producer's log.
pub const PRODUCED: &str = "produced.jsonl";

/// All of it.
pub struct Stage {
    engine: Option<Child>,
    /// The broker of the play.
    pub broker: MockBroker,
    /// The provider of the play.
    pub provider: ProviderStub,
    postgres: Postgres,
    admin: String,
    runtime: Runtime,
    folder: TempFolder,
}

impl Stage {
    /// Starts everything but the engine.
    pub fn set_up() -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        runtime.spawn(interrupt::watch());
        let folder = TempFolder::new("demo")?;
        let postgres = Postgres::start(&postgres::Options::default())?;
        let broker = MockBroker::start(TOPIC, PARTITIONS)?;
        let script = mischief::lies(LAST_CALL);
        let provider = ProviderStub::start(provider_stub::Options { script, ..provider_stub::Options::default() })?;
        let admin = format!("127.0.0.1:{}", process::free_port()?);
        let stage = Self { engine: None, broker, provider, postgres, admin, runtime, folder };
        let url = stage.postgres.create_database("onceward")?;
        fs::write(stage.config(), stage.configuration(&url))?;
        let migrated = stage.command("migrate").output()?;
        ensure!(migrated.status.success(), "onceward migrate: {}", String::from_utf8_lossy(&migrated.stderr));
        Ok(stage)
    }

    /// The defaults of time scaled down, the order among them kept, so that a crash is noticed in seconds.
    fn configuration(&self, database: &str) -> String {
        format!(
            "[kafka]
brokers = {:?}
topic = {TOPIC:?}
group = {GROUP:?}
assignor = \"range\"
session_timeout_ms = {}
commit_interval_ms = 50

[database]
url = {database:?}
lock_timeout_ms = 1000
statement_timeout_ms = 1500
idle_in_transaction_timeout_ms = 4000
transaction_budget_ms = 6000

[provider]
url = {:?}
call_timeout_ms = 1500
effect_deadline_ms = 3000

[retry]
max_attempts = 8
backoff_min_ms = 100
backoff_max_ms = 500

[admin]
listen = {:?}
",
            self.broker.bootstrap_servers(),
            SESSION.as_millis(),
            self.provider.url(),
            self.admin
        )
    }

    /// Starts the engine.
    pub fn start_engine(&mut self) -> Result<()> {
        let mut command = self.command("run");
        let log = File::options().create(true).append(true).open(self.path(ENGINE_LOG))?;
        command.stdout(log.try_clone()?).stderr(log);
        self.engine = Some(process::spawn(command, Signal::Kill)?);
        Ok(())
    }

    /// Its process id, for people.
    pub fn engine_id(&self) -> u32 {
        self.engine.as_ref().map_or(0, Child::id)
    }

    /// Ends the engine at once.
    pub fn kill_engine(&mut self) -> Result<()> {
        self.stop_engine(Signal::Kill).map(drop)
    }

    /// Ends the engine with a signal; its exit code.
    pub fn stop_engine(&mut self, how: Signal) -> Result<u8> {
        let mut engine = self.engine.take().context("the engine runs")?;
        Ok(process::exit_code(process::end(&mut engine, how, Duration::from_secs(15))?))
    }

    /// The mock broker keeps a killed member until its session ends, and may make it the leader of the next generation if another
    /// member joins too early: the new one is started when less than a rebalance is left of that session.
    pub fn pause_until_the_broker_misses_it(&mut self) -> Result<()> {
        let killed = Instant::now();
        self.wait_until("two seconds", Duration::from_secs(30), |_| Ok(killed.elapsed() > Duration::from_millis(2_500)))
    }

    /// Puts records into the topic and their places into the log.
    pub fn produce(&self, source: Source) -> Result<()> {
        let mut client = ClientConfig::new();
        client.set("bootstrap.servers", self.broker.bootstrap_servers());
        let options = produce::Options {
            client,
            topic: TOPIC.to_owned(),
            source,
            per_second: None,
            log: Some(self.path(PRODUCED)),
            delivery_timeout: Duration::from_secs(30),
        };
        produce::run(&options)?;
        Ok(())
    }

    /// What was produced so far.
    pub fn produced(&self) -> Result<Vec<LogLine>> {
        let log = fs::read_to_string(self.path(PRODUCED))?;
        log.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
    }

    /// Every record's offset is committed, and nothing waits to be tried again.
    pub fn is_settled(&self) -> Result<bool> {
        let ends: Vec<Option<i64>> = self.broker.ends()?.into_iter().map(Some).collect();
        let waiting = "SELECT count(*) FROM held_event WHERE state IN ('retrying', 'waiting', 'queued')";
        Ok(self.broker.committed(GROUP)? == ends && self.column(waiting)? == ["0"])
    }

    /// What waits for a person, in words: `21 rejected`.
    pub fn held(&self) -> Result<Vec<String>> {
        self.column(
            "SELECT count(*) || ' ' || reason FROM held_event WHERE state = 'parked' GROUP BY reason ORDER BY count(*) DESC",
        )
    }

    /// Transactions of the engine in which it waits for something that is not the database.
    pub fn open_transactions(&self) -> Result<usize> {
        let open = "SELECT pid FROM pg_stat_activity WHERE application_name = 'onceward' AND state = 'idle in transaction'";
        Ok(self.column(open)?.len())
    }

    /// Its database, for psql.
    pub fn database_url(&self) -> String {
        self.postgres.url("onceward")
    }

    /// The first column of a query's rows.
    pub fn column(&self, sql: &str) -> Result<Vec<String>> {
        let rows = postgres::query(&self.database_url(), sql)?;
        Ok(rows.into_iter().map(|mut row| row.swap_remove(0).unwrap_or_default()).collect())
    }

    /// Reconciles what was produced, paid and charged.
    pub fn audit(&self) -> Result<Report> {
        let config = Config::load(Some(&self.config()), [], &[Need::Database])?;
        let store = Store::connect(&config.database.settings(), 1)?;
        let options = audit::Options {
            group: GROUP.to_owned(),
            topic: TOPIC.to_owned(),
            produced: Some(audit::Source::Log(self.path(PRODUCED))),
            ledger: Some(self.provider.url().parse()?),
            ledger_tls: config.provider.tls(),
            ledger_in_minor_units: false,
            memory: audit::MEMORY,
            show_progress: false,
        };
        Ok(self.runtime.block_on(audit::run(&store, &options))?)
    }

    /// Looks again and again until something is so, under a time limit; ends early when the engine has died or somebody presses
    /// Ctrl-C.
    pub fn wait_until(&mut self, what: &str, limit: Duration, mut look: impl FnMut(&Self) -> Result<bool>) -> Result<()> {
        let started = Instant::now();
        while !look(self)? {
            if self.is_interrupted() {
                bail!("interrupted");
            }
            if let Some(status) = self.engine.as_mut().map(Child::try_wait).transpose()?.flatten() {
                bail!("the engine ended by itself ({status}) while the demo waited until {what}");
            }
            ensure!(started.elapsed() < limit, "not within {limit:?}: {what}");
            thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// Whether somebody wants it to end.
    pub fn is_interrupted(&self) -> bool {
        interrupt::has_come()
    }

    /// Where a file of the folder is.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes lines to a file in the folder.
    pub fn file(&self, name: &str, lines: &[Vec<u8>]) -> Result<PathBuf> {
        let path = self.path(name);
        fs::write(&path, lines.join(&b'\n'))?;
        Ok(path)
    }

    /// The end of the engine's log, for people, when the play has failed.
    pub fn show_the_engines_last_words(&self) {
        let log = fs::read_to_string(self.path(ENGINE_LOG)).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        eprintln!("\nThe engine's last lines:\n{}\n", lines[lines.len().saturating_sub(30)..].join("\n"));
    }

    /// The configuration file that the engine was started with.
    pub fn config(&self) -> PathBuf {
        self.path("onceward.toml")
    }

    /// The address of the engine's admin port.
    pub fn admin(&self) -> &str {
        &self.admin
    }

    fn command(&self, name: &str) -> Command {
        let mut command = Command::new(process::onceward());
        command.arg(name).arg("--config").arg(self.config()).stdin(Stdio::null());
        command
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        if self.engine.is_some() {
            let _ = self.stop_engine(Signal::Term); // killed by now if it would not go
        }
    }
}
