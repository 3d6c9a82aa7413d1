//! The engines of chaos: processes like any user's, each with a configuration file, signals, and an exit code that must be explained.
//!
//! In: who is started, signalled, ended. Out: who runs, and what ended without a reason. It owns the processes; they are killed when it
//! is dropped.
//!
//! Invariant: a process that is not [`State::Away`] has a child, and every end of one is looked at once.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::lab::process::{self, Signal};

/// Time for an engine to end in order: its drain, and leaving the group.
const FAREWELL: Duration = Duration::from_secs(30);

/// All of them.
pub struct Engines {
    folder: PathBuf,
    engines: Vec<Engine>,
    /// So many share the work at the beginning; the last one comes and goes.
    regular: usize,
}

struct Engine {
    state: State,
    child: Option<Child>,
}

/// What an engine does, as far as we have told it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It runs.
    Up,
    /// It is stopped, as by SIGSTOP.
    Frozen,
    /// It was asked to end.
    Leaving,
    /// It does not run.
    Away,
}

impl Engines {
    /// So many, and one more, none of them started.
    pub fn new(folder: PathBuf, configuration: &str, regular: usize) -> Result<Self> {
        let engines: Vec<Engine> = (0..=regular).map(|_| Engine { state: State::Away, child: None }).collect();
        for index in 0..engines.len() {
            let admin = format!("[admin]\nlisten = \"127.0.0.1:{}\"\n", process::free_port()?);
            fs::write(folder.join(format!("{index}.toml")), format!("{configuration}\n{admin}"))?;
        }
        Ok(Self { folder, engines, regular })
    }

    /// Starts those that share the work.
    pub fn start_all(&mut self) -> Result<()> {
        (0..self.regular).try_for_each(|index| self.start(index))
    }

    /// Starts one that is away.
    pub fn start(&mut self, index: usize) -> Result<()> {
        let log = File::options().create(true).append(true).open(self.log(index))?;
        let mut command = Command::new(process::onceward());
        command.arg("run").arg("--config").arg(self.folder.join(format!("{index}.toml")));
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let child = process::spawn(command, Signal::Kill)?;
        self.engines[index] = Engine { state: State::Up, child: Some(child) };
        Ok(())
    }

    /// Ends one at once and waits for its end.
    pub fn kill(&mut self, index: usize) -> Result<()> {
        let mut child = self.engines[index].child.take().context("it runs")?;
        self.engines[index].state = State::Away;
        process::end(&mut child, Signal::Kill, FAREWELL)?;
        Ok(())
    }

    /// Freezes one, thaws it, or asks it to end: one that was started a moment ago as soon as it hears it.
    pub fn tell(&mut self, index: usize, signal: Signal, then: State) -> Result<()> {
        let child = self.engines[index].child.as_mut().context("it runs")?;
        if signal == Signal::Term {
            process::wait_until_it_catches(child, signal, FAREWELL)?;
        }
        process::signal(child, signal)?;
        self.engines[index].state = then;
        Ok(())
    }

    /// What one does.
    pub fn state(&self, index: usize) -> State {
        self.engines[index].state
    }

    /// The one that comes and goes.
    pub const fn guest(&self) -> usize {
        self.regular
    }

    /// Those that run.
    pub fn up(&self) -> Vec<usize> {
        (0..self.engines.len()).filter(|index| self.state(*index) == State::Up).collect()
    }

    /// How many run.
    pub fn running(&self) -> usize {
        self.up().len()
    }

    /// Every one, the guest included.
    pub fn indices(&self) -> std::ops::Range<usize> {
        0..self.engines.len()
    }

    /// Takes in what has ended; each end that nobody can explain, in words.
    pub fn reap(&mut self) -> Result<Vec<(usize, String)>> {
        let mut unexplained = Vec::new();
        for (index, engine) in self.engines.iter_mut().enumerate() {
            let Some(status) = engine.child.as_mut().map(Child::try_wait).transpose()?.flatten() else { continue };
            match engine.state {
                State::Leaving if status.success() => {}
                State::Leaving => unexplained.push((index, format!("engine {index} was asked to end and ended with {status}"))),
                State::Up | State::Frozen | State::Away => {
                    unexplained.push((index, format!("engine {index} ended by itself: {status}")))
                }
            }
            *engine = Engine { state: State::Away, child: None };
        }
        Ok(unexplained)
    }

    /// Asks one that runs to end, and waits; what nobody can explain, in words.
    pub fn stop(&mut self, index: usize) -> Result<Option<String>> {
        let Some(mut child) = self.engines[index].child.take() else { return Ok(None) };
        self.engines[index].state = State::Away;
        let status = process::end(&mut child, Signal::Term, FAREWELL)?;
        Ok((!status.success()).then(|| format!("engine {index} was asked to end and ended with {status}")))
    }

    /// How often any of them was given partitions, by their logs.
    pub fn rebalances(&self) -> Result<u64> {
        let mut count = 0;
        for index in self.indices() {
            let path = self.log(index);
            let log = if path.exists() { fs::read_to_string(path)? } else { String::new() };
            count += log.lines().filter(|line| line.contains("rebalance=Assign(")).count() as u64;
        }
        Ok(count)
    }

    /// A configuration file that reaches the database.
    pub fn configuration(&self) -> PathBuf {
        self.folder.join("0.toml")
    }

    /// The ends of the logs, for people, when something has failed.
    pub fn show_last_words(&self) {
        for index in self.indices() {
            let log = fs::read_to_string(self.log(index)).unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            eprintln!("\nThe last lines of engine {index}:\n{}", lines[lines.len().saturating_sub(15)..].join("\n"));
        }
    }

    fn log(&self, index: usize) -> PathBuf {
        self.folder.join(format!("{index}.log"))
    }
}

impl Drop for Engines {
    fn drop(&mut self) {
        for child in self.engines.iter_mut().filter_map(|engine| engine.child.as_mut()) {
            let _ = process::end(child, Signal::Kill, FAREWELL); // gone or never to go
        }
    }
}
