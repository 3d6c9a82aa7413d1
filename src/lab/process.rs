//! Child processes that cannot outlive us.
//!
//! In: a command. Out: a [`Child`] that its owner ends with [`end`]. Should we die here first, by SIGKILL or by a panic, the kernel
//! sends the child the signal that it was started with.
//!
//! Invariant: every child is started by one thread that lives as long as the process. The kernel's signal follows the *thread* that
//! started the child, and a test's thread ends long before the process does.

use std::io;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{LazyLock, Mutex, OnceLock, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};
use std::{env, fs, net};

use uuid::Uuid;

/// The signals that the lab sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// Please end.
    Term,
    /// As from a keyboard; PostgreSQL's fast shutdown.
    Int,
    /// PostgreSQL's immediate shutdown, as a crash.
    Quit,
    /// Read the configuration again.
    Hangup,
    /// Ends at once, whatever it does.
    Kill,
    /// Freezes.
    Stop,
    /// Thaws.
    Continue,
}

impl Signal {
    const fn number(self) -> libc::c_int {
        match self {
            Self::Term => libc::SIGTERM,
            Self::Int => libc::SIGINT,
            Self::Quit => libc::SIGQUIT,
            Self::Hangup => libc::SIGHUP,
            Self::Kill => libc::SIGKILL,
            Self::Stop => libc::SIGSTOP,
            Self::Continue => libc::SIGCONT,
        }
    }
}

/// Starts `command` in a process group of its own; it gets `when_orphaned` if this process ends in any way.
///
/// # Errors
/// As [`Command::spawn`].
pub fn spawn(mut command: Command, when_orphaned: Signal) -> io::Result<Child> {
    let parent = std::process::id();
    command.process_group(0);
    // SAFETY: both calls are async-signal-safe and touch no memory of ours. It runs after the change of uid, which clears the setting.
    unsafe {
        command.pre_exec(move || {
            if libc::prctl(libc::PR_SET_PDEATHSIG, when_orphaned.number()) != 0 {
                return Err(io::Error::last_os_error());
            }
            // We may have died between the fork and the line above.
            if libc::getppid().cast_unsigned() == parent { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::ESRCH)) }
        });
    }
    on_the_lasting_thread(move || command.spawn())?
}

/// From here on the kernel sends us `signal` should our parent die, so that an orphaned test run does not go on.
///
/// # Errors
/// The operating system's.
pub fn end_with_our_parent(signal: Signal) -> io::Result<()> {
    // SAFETY: touches no memory of ours.
    let set = on_the_lasting_thread(move || unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, signal.number()) })?;
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Sends a signal to the child and to what it has started in its process group; nothing happens when the child has ended already.
///
/// # Errors
/// The operating system's.
pub fn signal(child: &mut Child, signal: Signal) -> io::Result<()> {
    if child.try_wait()?.is_some() {
        return Ok(());
    }
    // SAFETY: no memory is touched. The group is the child's own since `spawn`, and a child that was not waited for keeps its id, so
    // nobody else can be hit.
    let sent = unsafe { libc::kill(-child.id().cast_signed(), signal.number()) };
    if sent == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Waits until the child catches `signal`, has ended, or `limit` is over. Before a program has said what it does at SIGTERM, the kernel ends it:
/// whoever asks a child to end that was started a moment ago, and wants it to end in order, waits for this first.
///
/// # Errors
/// The operating system's.
pub fn wait_until_it_catches(child: &mut Child, signal: Signal, limit: Duration) -> io::Result<()> {
    let end = Instant::now() + limit;
    while child.try_wait()?.is_none() && !catches(child.id(), signal)? && Instant::now() < end {
        thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// By the bit mask of caught signals in `/proc/<pid>/status`, see proc(5).
fn catches(pid: u32, signal: Signal) -> io::Result<bool> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let mask = caught.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    Ok(mask >> (signal.number() - 1) & 1 == 1)
}

/// Waits for the child's end; `None` when it still runs after `limit`.
///
/// # Errors
/// The operating system's.
pub fn wait(child: &mut Child, limit: Duration) -> io::Result<Option<ExitStatus>> {
    let end = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= end {
            return Ok(None);
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// As [`signal`] with `first`; kills them if the child has not ended after `patience`.
///
/// # Errors
/// The operating system's.
pub fn end(child: &mut Child, first: Signal, patience: Duration) -> io::Result<ExitStatus> {
    signal(child, first)?;
    signal(child, Signal::Continue)?; // a frozen one would never hear it
    if let Some(status) = wait(child, patience)? {
        return Ok(status);
    }
    self::signal(child, Signal::Kill)?;
    child.wait()
}

/// What a shell would report: the exit code, or 128 + the signal's number.
#[must_use]
pub fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    u8::try_from(code).unwrap_or(1)
}

/// The program `onceward`: ourselves, or what stands beside `onceward-lab`.
#[must_use]
pub fn onceward() -> PathBuf {
    let ourselves = env::current_exe().unwrap_or_else(|_| PathBuf::from("onceward"));
    if ourselves.file_name().is_some_and(|name| name == "onceward-lab") { ourselves.with_file_name("onceward") } else { ourselves }
}

/// A folder of our own, removed with everything in it when dropped.
#[derive(Debug)]
pub struct TempFolder(PathBuf);

impl TempFolder {
    /// Makes it in `TMPDIR`, else in `/var/tmp` (which is a disk where `/tmp` may be memory), private to this user.
    ///
    /// # Errors
    /// The operating system's.
    pub fn new(name: &str) -> io::Result<Self> {
        use std::os::unix::fs::DirBuilderExt as _;
        let parent = env::var_os("TMPDIR").map_or_else(|| PathBuf::from("/var/tmp"), PathBuf::from);
        let parent = if parent.is_dir() { parent } else { env::temp_dir() };
        let path = parent.join(format!("onceward-{name}-{}", Uuid::now_v7().simple()));
        fs::DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Self(path))
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TempFolder {
    fn drop(&mut self) {
        // What cannot be removed is rubbish in a folder for rubbish.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A port of the loopback interface that nobody listens on, below the range from which the kernel takes the ports of outgoing
/// connections: it stays free while our server is away, and a client cannot connect to itself. This process gets each port once, so that
/// two which are asked for before anybody listens are two; another process may still be faster.
///
/// # Errors
/// None of many tries was free.
pub fn free_port() -> io::Result<u16> {
    const FIRST: u16 = 15_000;
    const COUNT: u16 = 17_000;
    static STEP: LazyLock<AtomicU16> = LazyLock::new(|| {
        let [.., a, b] = *Uuid::now_v7().as_bytes();
        AtomicU16::new(u16::from_be_bytes([a, b]) % COUNT)
    });
    for _ in 0..100 {
        let port = FIRST + STEP.fetch_add(1, Ordering::Relaxed) % COUNT;
        if net::TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return Ok(port);
        }
    }
    Err(io::Error::new(io::ErrorKind::AddrInUse, "no free port found on 127.0.0.1"))
}

/// Runs `work` on the one thread that ends with the process.
fn on_the_lasting_thread<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
    type Work = Box<dyn FnOnce() + Send>;
    static LASTING: OnceLock<Mutex<mpsc::Sender<Work>>> = OnceLock::new();
    let lasting = LASTING.get_or_init(|| {
        let (works, inbox) = mpsc::channel::<Work>();
        thread::spawn(move || inbox.into_iter().for_each(|work| work()));
        Mutex::new(works)
    });
    let (reply, answer) = mpsc::channel();
    // The asker waits for the reply, so it can be sent.
    let work: Work = Box::new(move || drop(reply.send(work())));
    lasting.lock().unwrap_or_else(PoisonError::into_inner).send(work).map_err(|_| io::ErrorKind::BrokenPipe)?;
    answer.recv().map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_child_outlives_the_thread_that_asked_for_it_and_ends_when_told() {
        let mut child = thread::spawn(|| spawn(shell("exec sleep 600"), Signal::Kill)).join().unwrap().unwrap();
        assert_eq!(wait(&mut child, Duration::from_millis(100)).unwrap(), None);
        assert_eq!(exit_code(end(&mut child, Signal::Term, Duration::from_secs(10)).unwrap()), 143);
    }

    #[test]
    fn a_port_that_nobody_listens_on_yet_is_not_given_again() {
        let ports: std::collections::BTreeSet<u16> = (0..1000).map(|_| free_port().unwrap()).collect();
        assert_eq!(ports.len(), 1000);
    }

    #[test]
    fn a_child_that_ignores_the_request_is_killed() {
        let mut child = spawn(shell("trap : TERM; while :; do sleep 600; done"), Signal::Kill).unwrap();
        wait_until_it_catches(&mut child, Signal::Term, Duration::from_secs(10)).unwrap();
        assert_eq!(exit_code(end(&mut child, Signal::Term, Duration::from_millis(200)).unwrap()), 137);
    }

    #[test]
    fn a_child_that_does_not_catch_the_request_yet_is_waited_for() {
        let mut child = spawn(shell("sleep 0.2; trap 'exit 7' TERM; while :; do sleep 600 & wait; done"), Signal::Kill).unwrap();
        wait_until_it_catches(&mut child, Signal::Term, Duration::from_secs(10)).unwrap();
        assert_eq!(exit_code(end(&mut child, Signal::Term, Duration::from_secs(10)).unwrap()), 7);
    }

    #[test]
    fn nobody_waits_for_a_child_that_has_ended() {
        let mut child = spawn(shell("exit 3"), Signal::Kill).unwrap();
        let began = Instant::now();
        wait_until_it_catches(&mut child, Signal::Term, Duration::from_secs(600)).unwrap();
        assert!(began.elapsed() < Duration::from_secs(300));
        assert_eq!(child.wait().unwrap().code(), Some(3));
    }
}
