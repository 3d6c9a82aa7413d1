//! How far it is: one line on a terminal, written over and over.
//!
//! In: counts. Out: the line, a few times a second. It owns the line and wipes it at the end. Where standard error is no terminal
//! nothing is written at all.

use std::io::{self, IsTerminal as _, Write as _};
use std::time::{Duration, Instant};

use crate::audit::grouped;

/// The line.
#[derive(Debug)]
pub(crate) struct Progress {
    is_shown: bool,
    what: &'static str,
    done: u64,
    of: Option<u64>,
    began: Instant,
    written: Option<Instant>,
}

/// How often it is written anew.
const EVERY: Duration = Duration::from_millis(200);
/// The clock is looked at after so many steps.
const STEPS: u64 = 256;
/// The length of the bar.
const WIDTH: u64 = 30;
/// Back to the line's beginning, and everything behind it wiped.
const WIPE: &str = "\r\x1b[K";

impl Progress {
    /// Something begins: `of` so many steps, if that is known, `done` of them already. It is shown on a terminal, if it is `wanted` at
    /// all.
    pub(crate) fn begin(wanted: bool, what: &'static str, done: u64, of: Option<u64>) -> Self {
        let is_shown = wanted && io::stderr().is_terminal();
        let mut progress = Self { is_shown, what, done, of, began: Instant::now(), written: None };
        progress.write();
        progress
    }

    /// One step more.
    pub(crate) fn step(&mut self) {
        self.done += 1;
        if self.is_shown && self.done.is_multiple_of(STEPS) && self.written.is_none_or(|written| written.elapsed() >= EVERY) {
            self.write();
        }
    }

    /// So much is done by now, to be called a few times a second at most.
    #[cfg(feature = "lab")]
    pub(crate) fn at(&mut self, done: u64) {
        if self.done != done || self.written.is_none() {
            self.done = done;
            self.write();
        }
    }

    /// Says something that stays, above the line.
    #[cfg(feature = "lab")]
    pub(crate) fn say(&mut self, text: &str) {
        let wipe = if self.written.take().is_some() { WIPE } else { "" };
        let _ = writeln!(io::stderr(), "{wipe}{text}");
    }

    fn write(&mut self) {
        if self.is_shown {
            self.written = Some(Instant::now());
            let _ = write!(io::stderr(), "{WIPE}{}", line(self.what, self.done, self.of, self.began.elapsed()));
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.written.is_some() {
            let _ = write!(io::stderr(), "{WIPE}");
        }
    }
}

fn line(what: &str, done: u64, of: Option<u64>, elapsed: Duration) -> String {
    let seconds = elapsed.as_secs();
    match of.filter(|of| *of > 0) {
        Some(of) => {
            let part = done.min(of);
            let full = (u128::from(part) * u128::from(WIDTH) / u128::from(of)) as usize;
            let percent = u128::from(part) * 100 / u128::from(of);
            let bar = "=".repeat(full) + &" ".repeat(WIDTH as usize - full);
            format!("{what} [{bar}] {percent:>3} %  {} of {}  {seconds} s", grouped(done), grouped(of))
        }
        None => format!("{what} {}  {seconds} s", grouped(done)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_tells_how_far_it_is() {
        let ten = Duration::from_secs(10);
        assert_eq!(
            line("reading the topic", 1_500, Some(3_000), ten),
            "reading the topic [===============               ]  50 %  1,500 of 3,000  10 s"
        );
        assert!(line("x", 4_000, Some(3_000), ten).contains(&format!("[{}] 100 %", "=".repeat(30))), "never beyond its end");
        assert!(line("x", 0, Some(u64::MAX), ten).contains("  0 %"));
        assert_eq!(line("reading the ledger", 1_500, None, ten), "reading the ledger 1,500  10 s");
        assert_eq!(line("x", 0, Some(0), ten), "x 0  10 s");
    }
}
