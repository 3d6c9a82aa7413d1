//! The engine as its users run it: the binary, a configuration file, signals, an exit code, an admin port.

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use onceward::config::{Config, Need};
use onceward::lab::process::{self, Signal, TempFolder};
use onceward::testing::SHORT_TIMES_MS;

use super::{LIMIT, World, eventually};

/// Between two looks at a process.
const LOOK: Duration = Duration::from_millis(20);

/// The longest wait for an answer of the admin port.
pub const ANSWER: Duration = Duration::from_secs(5);

/// An engine's configuration.
#[derive(Clone)]
pub struct EngineBuilder {
    settings: BTreeMap<String, toml::Value>,
    environment: Vec<(String, String)>,
}

/// A running engine; dropping it kills it. When the test fails, what it wrote to standard error is shown.
pub struct Engine {
    child: Child,
    admin: String,
    folder: TempFolder,
}

impl EngineBuilder {
    pub(super) fn new(world: &World) -> Self {
        let builder = Self { settings: BTreeMap::new(), environment: Vec::new() }
            .set("kafka.brokers", world.topic.brokers())
            .set("kafka.topic", world.topic.name())
            .set("kafka.group", world.group.as_str())
            .set("database.url", world.database.url())
            .set("provider.url", world.provider.url())
            .set("held.dead_letters", false) // their topic would have to be made
            .set("log.level", "info");
        SHORT_TIMES_MS.into_iter().fold(builder, |builder, (key, value)| builder.set(key, value))
    }

    /// Any key of the configuration, `section.key`.
    pub fn set(mut self, key: &str, value: impl Into<toml::Value>) -> Self {
        self.settings.insert(key.to_owned(), value.into());
        self
    }

    /// Takes a key out of the configuration, so that its default holds.
    pub fn unset(mut self, key: &str) -> Self {
        self.settings.remove(key);
        self
    }

    /// An environment variable.
    pub fn environment(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Charges at this address.
    pub fn provider(self, url: &str) -> Self {
        self.set("provider.kind", "http").set("provider.url", url)
    }

    /// Leaves the provider out: the rows are written, and nobody is called.
    pub fn without_provider(self) -> Self {
        self.set("provider.kind", "none").unset("provider.url")
    }

    /// A call of the provider may take so long that a test can do something while one is held, and the machine stand still for some seconds.
    pub fn patient(self) -> Self {
        let longer = [
            ("provider.call_timeout_ms", 6_000),
            ("provider.effect_deadline_ms", 6_500),
            ("database.idle_in_transaction_timeout_ms", 7_500),
            ("database.transaction_budget_ms", 9_000),
            ("kafka.session_timeout_ms", 10_000),
            ("pipeline.drain_ms", 10_000),
            ("pipeline.stuck_after_ms", 12_000),
        ];
        longer.into_iter().fold(self, |builder, (key, value)| builder.set(key, value))
    }

    /// Whose locks are waited for longer than a test holds them, also where the machine stands still meanwhile. May follow [`Self::patient`].
    pub fn patient_with_locks(self) -> Self {
        let longer = [
            ("database.lock_timeout_ms", 12_000),
            ("database.statement_timeout_ms", 12_500),
            ("database.transaction_budget_ms", 20_000),
            ("kafka.session_timeout_ms", 21_000),
            ("kafka.max_poll_interval_ms", 30_000),
            ("pipeline.drain_ms", 21_000),
            ("pipeline.stuck_after_ms", 34_000),
        ];
        longer.into_iter().fold(self, |builder, (key, value)| builder.set(key, value))
    }

    pub fn concurrency(self, partitions: u32) -> Self {
        self.set("pipeline.partition_concurrency", i64::from(partitions))
    }

    pub fn assignor(self, assignor: &str) -> Self {
        self.set("kafka.assignor", assignor)
    }

    /// Starts it and waits until it is ready.
    pub fn start(self) -> Engine {
        let mut engine = self.launch();
        eventually("the engine is ready", || {
            assert_eq!(engine.exit_now(), None, "the engine ended instead of becoming ready");
            engine.is_ready()
        });
        engine
    }

    /// Starts it and waits for nothing.
    pub fn launch(self) -> Engine {
        let folder = TempFolder::new("engine").expect("a folder");
        let engine = self.with_a_port();
        let admin = engine.settings["admin.listen"].as_str().expect("an address").to_owned();
        let mut command = engine.command(&folder, &["run"]);
        let log = File::create(folder.path().join("stderr.log")).expect("a log");
        command.stdout(log.try_clone().expect("a log")).stderr(log);
        Engine { child: process::spawn(command, Signal::Kill).expect("the engine starts"), admin, folder }
    }

    /// Runs another command of `onceward` with this configuration, to its end.
    pub fn run_to_end(self, arguments: &[&str]) -> Output {
        let folder = TempFolder::new("onceward").expect("a folder");
        let configured = if arguments.contains(&"run") { self.with_a_port() } else { self };
        run(configured.asks_once().command(&folder, arguments), &folder, LIMIT)
    }

    /// A service tries again to connect; a command does not.
    fn asks_once(self) -> Self {
        self.set("database.connect_timeout_ms", 5_500)
    }

    /// With an admin port that no engine of another test has, unless the test has chosen one.
    fn with_a_port(self) -> Self {
        if self.settings.contains_key("admin.listen") {
            return self;
        }
        self.set("admin.listen", format!("127.0.0.1:{}", process::free_port().expect("a free port")))
    }

    /// The same under a time limit of its own; and the most memory that it held, in KiB, as it was looked at over and over.
    pub fn run_measured(self, limit: Duration, arguments: &[&str]) -> (Output, u64) {
        let folder = TempFolder::new("onceward").expect("a folder");
        let most = AtomicU64::new(0);
        let look = |pid| {
            most.fetch_max(most_memory_kib(pid).unwrap_or(0), Ordering::Relaxed);
        };
        let output = run_and_look(self.asks_once().command(&folder, arguments), &folder, limit, look);
        (output, most.into_inner())
    }

    /// The same configuration, for an engine that runs inside the test.
    pub fn load(self) -> Config {
        let folder = TempFolder::new("onceward").expect("a folder");
        let config = Config::load(Some(&self.write(&folder)), [], &[Need::Kafka, Need::Database, Need::Provider]);
        config.expect("the configuration is good")
    }

    fn command(self, folder: &TempFolder, arguments: &[&str]) -> Command {
        let mut command = onceward();
        command.args(arguments).arg("--config").arg(self.write(folder)).envs(self.environment);
        command
    }

    fn write(&self, folder: &TempFolder) -> PathBuf {
        let mut file = toml::Table::new();
        for (key, value) in &self.settings {
            let mut path: Vec<&str> = key.split('.').collect();
            // librdkafka's own keys have dots in them.
            let last = if key.starts_with("kafka.options.") {
                path.drain(2..).collect::<Vec<_>>().join(".")
            } else {
                path.pop().expect("a key").to_owned()
            };
            let section = path.into_iter().fold(&mut file, |table, name| {
                let section = table.entry(name).or_insert_with(|| toml::Table::new().into());
                section.as_table_mut().expect("a section")
            });
            section.insert(last, value.clone());
        }
        let path = folder.path().join("onceward.toml");
        fs::write(&path, file.to_string()).expect("the configuration is written");
        path
    }
}

impl Engine {
    /// Whether `/ready` says so.
    pub fn is_ready(&self) -> bool {
        self.get("/ready").is_some_and(|(status, _)| status == 200)
    }

    /// Whether `/live` says so.
    pub fn is_live(&self) -> bool {
        self.get("/live").is_some_and(|(status, _)| status == 200)
    }

    /// `/status`.
    pub fn status(&self) -> serde_json::Value {
        let (_, body) = eventually("the engine tells its status", || self.get("/status"));
        serde_json::from_str(&body).expect("the status is JSON")
    }

    /// The sum of a metric's samples that have all these labels.
    pub fn metric(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let (_, body) = eventually("the engine tells its metrics", || self.get("/metrics"));
        let samples = body.lines().filter_map(|line| {
            let (series, value) = line.rsplit_once(' ')?;
            let (found, with) = series.split_once('{').unwrap_or((series, ""));
            let fits = found == name && labels.iter().all(|(label, value)| with.contains(&format!("{label}=\"{value}\"")));
            fits.then(|| value.parse::<f64>().expect("a sample is a number"))
        });
        samples.sum()
    }

    /// The partitions that it owns.
    pub fn owned(&self) -> BTreeSet<i64> {
        let status = self.status();
        let partitions = status["partitions"].as_array().expect("partitions");
        partitions.iter().map(|partition| partition["partition"].as_i64().expect("a number")).collect()
    }

    /// The most memory that it has ever held, in KiB, as the kernel knows it.
    pub fn most_memory_kib(&self) -> u64 {
        most_memory_kib(self.child.id()).expect("it runs")
    }

    /// Answer code and body of the admin port; `None` when nobody answers.
    pub fn get(&self, path: &str) -> Option<(u16, String)> {
        get(&self.admin, path)
    }

    /// Where its admin port listens.
    pub fn address(&self) -> &str {
        &self.admin
    }

    /// Answer code and body of a POST of JSON to the admin port, with this token.
    pub fn post(&self, path: &str, token: &str, body: &serde_json::Value) -> (u16, String) {
        let token = format!("Bearer {token}");
        let headers = [("Content-Type", "application/json"), ("Authorization", token.as_str())];
        eventually("the engine answers", || request(ANSWER, &self.admin, "POST", path, &headers, &body.to_string()))
    }

    /// What it has written to standard error so far.
    pub fn log(&self) -> String {
        fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    /// Asks it to end and waits for its exit code.
    pub fn terminate(mut self) -> ExitStatus {
        self.signal(Signal::Term);
        self.wait()
    }

    /// Ends it at once, as a crash does.
    pub fn kill(mut self) {
        self.signal(Signal::Kill);
        self.wait();
    }

    /// Writes another configuration in the place of its own, and has it read.
    pub fn reconfigure(&mut self, configuration: &EngineBuilder) {
        configuration.write(&self.folder);
        self.signal(Signal::Hangup);
    }

    /// Sends it a signal and waits for nothing; a request to one that was started a moment ago, as soon as it hears it.
    pub fn signal(&mut self, signal: Signal) {
        if matches!(signal, Signal::Term | Signal::Int | Signal::Hangup) {
            process::wait_until_it_catches(&mut self.child, signal, LIMIT).expect("a child is looked at");
        }
        process::signal(&mut self.child, signal).expect("a signal is sent");
    }

    /// Waits until it has ended by itself.
    pub fn wait(&mut self) -> ExitStatus {
        process::wait(&mut self.child, LIMIT)
            .expect("a child is waited for")
            .unwrap_or_else(|| panic!("the engine has not ended within {LIMIT:?}"))
    }

    /// Whether it is stopped, as by SIGSTOP: the state that the kernel shows behind the name.
    pub fn is_frozen(&self) -> bool {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap_or_default();
        stat.rsplit_once(") ").is_some_and(|(_, state)| state.starts_with('T'))
    }

    /// How it ended, if it has.
    pub fn exit_now(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("a child is waited for")
    }

    fn log_path(&self) -> PathBuf {
        self.folder.path().join("stderr.log")
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = process::end(&mut self.child, Signal::Kill, Duration::from_secs(5)); // gone or never to go
        if thread::panicking() {
            let log = self.log();
            let lines: Vec<&str> = log.lines().collect();
            let last = &lines[lines.len().saturating_sub(80)..];
            eprintln!("--- the engine's last {} lines ({}) ---\n{}\n---", last.len(), self.admin, last.join("\n"));
        }
    }
}

/// Runs `onceward` without a configuration file, to its end.
pub fn run_onceward(arguments: &[&str], environment: &[(&str, &str)]) -> Output {
    run_onceward_within(LIMIT, arguments, environment)
}

/// The same for what may take longer than any wait.
pub fn run_onceward_within(limit: Duration, arguments: &[&str], environment: &[(&str, &str)]) -> Output {
    let folder = TempFolder::new("onceward").expect("a folder");
    let mut command = onceward();
    command.args(arguments).envs(environment.iter().copied());
    run(command, &folder, limit)
}

fn onceward() -> Command {
    // `scripts/test --long` names a release build.
    let mut command = Command::new(env::var_os("ONCEWARD_TEST_BINARY").unwrap_or_else(|| env!("CARGO_BIN_EXE_onceward").into()));
    command.stdin(Stdio::null()).env_remove("RUST_LOG");
    command
}

/// `None`: the process has ended.
fn most_memory_kib(pid: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().trim_end_matches(" kB").parse().expect("a number"))
}

/// To its end, under a time limit; output goes through files, which cannot fill up as pipes do.
fn run(command: Command, folder: &TempFolder, limit: Duration) -> Output {
    run_and_look(command, folder, limit, |_| {})
}

/// The same, and looks at the process every few milliseconds.
fn run_and_look(mut command: Command, folder: &TempFolder, limit: Duration, look: impl Fn(u32)) -> Output {
    let [out, err] = ["stdout", "stderr"].map(|name| folder.path().join(name));
    command.stdout(File::create(&out).expect("a file")).stderr(File::create(&err).expect("a file"));
    let mut child = process::spawn(command, Signal::Kill).expect("the command starts");
    let end = Instant::now() + limit;
    let mut status = None;
    while status.is_none() && Instant::now() < end {
        look(child.id());
        status = process::wait(&mut child, LOOK).expect("a child is waited for");
    }
    let (stdout, stderr) = (fs::read(out).expect("the output"), fs::read(err).expect("the output"));
    let status = status.unwrap_or_else(|| {
        let _ = process::end(&mut child, Signal::Kill, Duration::from_secs(5)); // the panic tells more
        panic!("not ended within {limit:?}: {}", String::from_utf8_lossy(&stderr))
    });
    Output { status, stdout, stderr }
}

/// Answer code and body of a GET; `None` when nobody answers.
pub fn get(address: &str, path: &str) -> Option<(u16, String)> {
    request(ANSWER, address, "GET", path, &[], "")
}

/// The same for any request.
pub fn request(
    limit: Duration,
    address: &str,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> Option<(u16, String)> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(limit)).ok()?;
    let headers: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Length: {}\r\n{headers}\r\n",
        body.len()
    );
    stream.write_all(format!("{head}{body}").as_bytes()).ok()?;
    let mut answer = BufReader::new(stream);
    let (mut status, mut length) = (None, None);
    loop {
        let mut line = String::new();
        if answer.read_line(&mut line).ok()? <= 2 {
            break;
        }
        status = status.or_else(|| line.split(' ').nth(1)?.parse().ok());
        length = length.or_else(|| line.to_lowercase().strip_prefix("content-length:")?.trim().parse::<u64>().ok());
    }
    // Who does not tell the length ends with the connection.
    let mut body = String::new();
    answer.take(length.unwrap_or(u64::MAX)).read_to_string(&mut body).ok()?;
    Some((status?, body))
}
