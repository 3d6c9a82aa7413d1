//! Waiting for a signal, under one time limit.

use std::env;
use std::fmt::Debug;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tokio::runtime::{Builder, Runtime};

/// No single wait in any test is longer; nothing that is waited for takes a third of it on an idle machine.
pub const LIMIT: Duration = Duration::from_secs(60);
const INTERVAL: Duration = Duration::from_millis(20);

/// Looks again and again until there is something to see, and gives it. Panics after [`LIMIT`].
pub fn eventually<S: Sight>(what: &str, mut look: impl FnMut() -> S) -> S::Seen {
    let end = Instant::now() + LIMIT;
    loop {
        if let Some(seen) = look().seen() {
            return seen;
        }
        assert!(Instant::now() < end, "not within {LIMIT:?}: {what}");
        thread::sleep(INTERVAL);
    }
}

/// Looks again and again until it sees `expected`. Panics after [`LIMIT`] and tells what it saw last.
pub fn eventually_equal<T: PartialEq + Debug>(what: &str, expected: T, mut look: impl FnMut() -> T) {
    let end = Instant::now() + LIMIT;
    loop {
        let seen = look();
        if seen == expected {
            return;
        }
        assert!(Instant::now() < end, "not within {LIMIT:?}: {what}\n expected: {expected:?}\n seen last: {seen:?}");
        thread::sleep(INTERVAL);
    }
}

/// What a look gives: `true` or `Some` is seen.
pub trait Sight {
    /// What was seen.
    type Seen;
    fn seen(self) -> Option<Self::Seen>;
}

impl Sight for bool {
    type Seen = ();
    fn seen(self) -> Option<()> {
        self.then_some(())
    }
}

impl<T> Sight for Option<T> {
    type Seen = T;
    fn seen(self) -> Self {
        self
    }
}

/// Raises its flag when it is dropped, also by a panic: what runs beside a test ends with the test.
pub struct RaisedAtTheEnd<'a>(pub &'a AtomicBool);

impl Drop for RaisedAtTheEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// How often a test does the same again: `long` times under `scripts/test --long`.
pub fn times(usually: usize, long: usize) -> usize {
    if env::var_os("ONCEWARD_TEST_LONG").is_some() { long } else { usually }
}

/// Waits for a future: the clients are asynchronous, the tests are not.
pub fn block_on<F: Future>(future: F) -> F::Output {
    static RUNTIME: LazyLock<Runtime> =
        LazyLock::new(|| Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime"));
    RUNTIME.block_on(future)
}
