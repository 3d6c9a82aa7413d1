//! A private PostgreSQL server for the demo, the tests and the benches.
//!
//! In: how it should be set up. Out: URLs of databases in it. It owns one server process and, unless a data folder was given, the
//! folder it works in; both are gone when it is dropped. If we die, the kernel asks the server for a fast shutdown.
//!
//! Invariant: it never touches a server, a folder or a port that it did not make itself, and the server never runs as root.

mod binaries;

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use tokio_postgres::{NoTls, SimpleQueryMessage};
use uuid::Uuid;

use super::process::{self, Signal, TempFolder};

pub use binaries::Binaries;

/// How the server is set up.
#[derive(Clone, Debug)]
pub struct Options {
    /// `false` gives up durability for speed, which no test of ours can notice: the machine does not crash.
    pub fsync: bool,
    /// Connections allowed at once.
    pub max_connections: u32,
    /// Further `name = value` settings.
    pub settings: Vec<(String, String)>,
    /// Settings that name a file, such as `ssl_key_file` or `hba_file`, with what is to be in it.
    pub files: Vec<(String, String)>,
    /// Where the data is kept; it must not exist yet, and stays when the server is dropped. `None`: a folder of its own.
    pub data: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Self { fsync: true, max_connections: 100, settings: Vec::new(), files: Vec::new(), data: None }
    }
}

/// Why there is no server.
#[derive(Debug, thiserror::Error)]
pub enum PostgresError {
    /// No binaries on this machine, and none could be fetched.
    #[error(
        "PostgreSQL was not found in ONCEWARD_PG_BIN, /usr/lib/postgresql or PATH, and fetching it failed: {0}; install the package postgresql"
    )]
    NoBinaries(String),
    /// We are root, and there is no unprivileged account to run the server as.
    #[error("PostgreSQL refuses to run as root, and /etc/passwd names neither postgres nor nobody")]
    NoAccount,
    /// The server or `initdb` ended instead of working.
    #[error("{program} failed; the end of its output:\n{output}")]
    Failed {
        /// Which of the two.
        program: &'static str,
        /// Its last lines.
        output: String,
    },
    /// The server did not come up, or did not go down.
    #[error("PostgreSQL was not {0} within {1:?}")]
    TooSlow(&'static str, Duration),
    /// The operating system's error.
    #[error("{0}: {1}")]
    Io(&'static str, #[source] io::Error),
    /// A statement of ours failed.
    #[error("{0}: {1}")]
    Sql(String, #[source] tokio_postgres::Error),
}

/// A running server, or one that was stopped on purpose and can be started again on the same port.
#[derive(Debug)]
pub struct Postgres {
    binaries: Binaries,
    account: Option<Account>,
    data: PathBuf,
    log: PathBuf,
    port: u16,
    password: String,
    settings: Vec<(String, String)>,
    server: Option<Child>,
    /// Last, so that it is removed after the server has gone.
    _folder: TempFolder,
}

/// Time for the server to come up or to go down; both take well under a second on an idle machine.
const PATIENCE: Duration = Duration::from_secs(60);

impl Postgres {
    /// Finds or fetches the binaries, makes a data folder and starts a server on a free port of the loopback interface.
    ///
    /// # Errors
    /// See [`PostgresError`].
    pub fn start(options: &Options) -> Result<Self, PostgresError> {
        let account = Account::choose()?;
        let binaries = Binaries::find_or_fetch()?;
        let folder = TempFolder::new("postgres").map_err(|e| PostgresError::Io("making a folder", e))?;
        Account::own(account, folder.path())?;
        let mut settings = vec![
            ("listen_addresses".to_owned(), "127.0.0.1".to_owned()),
            ("unix_socket_directories".to_owned(), String::new()),
            ("max_connections".to_owned(), options.max_connections.to_string()),
            ("fsync".to_owned(), if options.fsync { "on" } else { "off" }.to_owned()),
        ];
        if !options.fsync {
            // An engine refuses such a server, unless that is said.
            settings.push(("onceward.no_fsync".to_owned(), "accepted".to_owned()));
        }
        settings.extend(options.settings.iter().cloned());
        for (name, content) in &options.files {
            let path = folder.path().join(name);
            private_file(&path, content, account)?;
            settings.push((name.clone(), path.display().to_string()));
        }
        let mut postgres = Self {
            binaries,
            data: options.data.clone().unwrap_or_else(|| folder.path().join("data")),
            log: folder.path().join("server.log"),
            account,
            port: 0,
            password: format!("{}{}", Uuid::now_v7().simple(), Uuid::now_v7().simple()),
            settings,
            server: None,
            _folder: folder,
        };
        postgres.init()?;
        postgres.start_on_a_free_port()?;
        Ok(postgres)
    }

    /// The URL of a database in this server, for its superuser.
    #[must_use]
    pub fn url(&self, database: &str) -> String {
        format!("postgres://postgres:{}@127.0.0.1:{}/{database}", self.password, self.port)
    }

    /// Makes an empty database and returns its URL. `name` is an SQL identifier of lower-case letters, digits and underscores.
    ///
    /// # Errors
    /// The server's refusal, for example that the name is taken.
    pub fn create_database(&self, name: &str) -> Result<String, PostgresError> {
        query(&self.url("postgres"), &format!("CREATE DATABASE {name}"))?;
        Ok(self.url(name))
    }

    /// Fast shutdown: open transactions are rolled back. The data and the port stay.
    ///
    /// # Errors
    /// The server does not go.
    pub fn stop(&mut self) -> Result<(), PostgresError> {
        self.go(Signal::Int)
    }

    /// Immediate shutdown, as if it had crashed: it recovers from its log when started again.
    ///
    /// # Errors
    /// The server does not go.
    pub fn crash(&mut self) -> Result<(), PostgresError> {
        self.go(Signal::Quit)
    }

    /// Starts the server again on the same data and port. Does nothing when it runs.
    ///
    /// # Errors
    /// The server does not come up.
    pub fn start_again(&mut self) -> Result<(), PostgresError> {
        if self.server.is_some() { Ok(()) } else { self.launch() }
    }

    /// Where the server writes its log.
    #[must_use]
    pub fn log(&self) -> &Path {
        &self.log
    }

    fn go(&mut self, how: Signal) -> Result<(), PostgresError> {
        let Some(mut server) = self.server.take() else { return Ok(()) };
        process::end(&mut server, how, PATIENCE).map(drop).map_err(|e| PostgresError::Io("stopping PostgreSQL", e))
    }

    fn init(&self) -> Result<(), PostgresError> {
        let password = self.log.with_file_name("password");
        private_file(&password, &self.password, self.account)?;
        let mut done = self.initdb(&password, self.command(&self.binaries.program("initdb"))?);
        if let Err(PostgresError::Failed { output, .. }) = &done
            && output.contains("could not look up effective user ID")
        {
            // A uid without a name, as in many containers: initdb insists on a name, so it gets another's in a namespace of its own.
            let mut command = self.command(Path::new("unshare"))?;
            command.args(["--user", "--map-user=65534", "--"]).arg(self.binaries.program("initdb"));
            done = self.initdb(&password, command);
        }
        let _ = fs::remove_file(&password); // the folder is private and short-lived anyway
        done
    }

    fn initdb(&self, password: &Path, mut command: Command) -> Result<(), PostgresError> {
        command.args(["--username=postgres", "--auth=scram-sha-256", "--encoding=UTF8", "--locale=C", "--no-sync"]);
        command.arg("--pwfile").arg(password).arg("--pgdata").arg(&self.data);
        let mut initdb = process::spawn(command, Signal::Kill).map_err(|e| PostgresError::Io("starting initdb", e))?;
        let status = initdb.wait().map_err(|e| PostgresError::Io("waiting for initdb", e))?;
        if status.success() { Ok(()) } else { Err(self.failed("initdb")) }
    }

    /// Another program may take the port between the look and the start; then another port is tried.
    fn start_on_a_free_port(&mut self) -> Result<(), PostgresError> {
        let mut tries = 5;
        loop {
            self.port = process::free_port().map_err(|e| PostgresError::Io("looking for a port", e))?;
            tries -= 1;
            match self.launch() {
                Err(PostgresError::Failed { output, .. }) if tries > 0 && output.contains("could not bind") => {}
                other => return other,
            }
        }
    }

    fn launch(&mut self) -> Result<(), PostgresError> {
        let mut command = self.command(&self.binaries.program("postgres"))?;
        command.arg("-D").arg(&self.data).arg("-p").arg(self.port.to_string());
        for (name, value) in &self.settings {
            command.arg("-c").arg(format!("{name}={value}"));
        }
        let mut server = process::spawn(command, Signal::Int).map_err(|e| PostgresError::Io("starting PostgreSQL", e))?;
        let end = Instant::now() + PATIENCE;
        while !self.says_ready(&server) {
            if server.try_wait().map_err(|e| PostgresError::Io("waiting for PostgreSQL", e))?.is_some() {
                return Err(self.failed("postgres"));
            }
            if Instant::now() > end {
                process::end(&mut server, Signal::Quit, PATIENCE).map_err(|e| PostgresError::Io("stopping PostgreSQL", e))?;
                return Err(PostgresError::TooSlow("up", PATIENCE));
            }
            thread::sleep(Duration::from_millis(10));
        }
        self.server = Some(server);
        Ok(())
    }

    /// The server keeps a file with its process id in the first line and its state in the eighth; `pg_ctl` reads the same.
    fn says_ready(&self, server: &Child) -> bool {
        let file = fs::read_to_string(self.data.join("postmaster.pid")).unwrap_or_default();
        let mut lines = file.lines();
        lines.next().is_some_and(|id| id.trim() == server.id().to_string())
            && lines.nth(6).is_some_and(|state| state.trim() == "ready")
    }

    /// A program of the server, as the unprivileged account when we are root, its output in the log.
    fn command(&self, program: &Path) -> Result<Command, PostgresError> {
        let open = || File::options().create(true).append(true).open(&self.log);
        let (out, err) = open().and_then(|log| Ok((log.try_clone()?, log))).map_err(|e| PostgresError::Io("opening the log", e))?;
        let mut command = Command::new(program);
        command.stdin(Stdio::null()).stdout(out).stderr(err).current_dir("/");
        command.env_remove("PGDATA").env_remove("PGPORT").env_remove("PGHOST").env("LC_ALL", "C");
        if let Some(account) = self.account {
            // Dropping the supplementary groups is the standard library's doing when the uid changes as root.
            command.uid(account.uid).gid(account.gid);
        }
        Ok(command)
    }

    fn failed(&self, program: &'static str) -> PostgresError {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        PostgresError::Failed { program, output: lines[lines.len().saturating_sub(15)..].join("\n") }
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        // `end` has killed it by now if it would not go; there is nobody left to tell.
        let _ = self.stop();
    }
}

/// Runs statements on a connection of their own; the rows of all of them, each value as the server writes it.
///
/// # Errors
/// [`PostgresError::Sql`].
pub fn query(url: &str, sql: &str) -> Result<Vec<Vec<Option<String>>>, PostgresError> {
    let fault = |error| PostgresError::Sql(sql.to_owned(), error);
    block_on(async {
        let (client, connection) = tokio_postgres::connect(url, NoTls).await.map_err(fault)?;
        let driver = tokio::spawn(connection);
        let messages = client.simple_query(sql).await.map_err(fault);
        drop(client);
        let _ = driver.await; // the statement's own error is the one that counts
        let rows = messages?.into_iter().filter_map(|message| match message {
            SimpleQueryMessage::Row(row) => Some((0..row.len()).map(|column| row.get(column).map(str::to_owned)).collect()),
            _ => None,
        });
        Ok(rows.collect())
    })
}

/// Waits for a future on a thread of its own, so that callers inside an async runtime may use this module too.
fn block_on<T: Send>(future: impl Future<Output = T> + Send) -> T {
    thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime needs a few file descriptors").block_on(future)
        });
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Only the server can read it.
fn private_file(path: &Path, content: &str, account: Option<Account>) -> Result<(), PostgresError> {
    let written = fs::write(path, content).and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(0o600)));
    written.map_err(|e| PostgresError::Io("writing a file", e))?;
    Account::own(account, path)
}

/// Whom the server runs as when we are root.
#[derive(Clone, Copy, Debug)]
struct Account {
    uid: u32,
    gid: u32,
}

impl Account {
    /// `None`: we are nobody special, so it runs as ourselves.
    fn choose() -> Result<Option<Self>, PostgresError> {
        // SAFETY: reads a number.
        if unsafe { libc::geteuid() } != 0 {
            return Ok(None);
        }
        let accounts = fs::read_to_string("/etc/passwd").map_err(|e| PostgresError::Io("reading /etc/passwd", e))?;
        let find = |name: &str| {
            let fields = accounts.lines().map(|line| line.split(':').collect::<Vec<_>>()).find(|fields| fields[0] == name)?;
            Some(Self { uid: fields.get(2)?.parse().ok()?, gid: fields.get(3)?.parse().ok()? })
        };
        find("postgres").or_else(|| find("nobody")).map(Some).ok_or(PostgresError::NoAccount)
    }

    fn own(account: Option<Self>, path: &Path) -> Result<(), PostgresError> {
        let Some(Self { uid, gid }) = account else { return Ok(()) };
        chown(path, Some(uid), Some(gid)).map_err(|e| PostgresError::Io("changing an owner", e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_comes_up_keeps_its_data_over_a_crash_and_leaves_nothing_behind() {
        let mut postgres = Postgres::start(&Options { fsync: false, ..Options::default() }).unwrap();
        let folder = postgres.data.parent().unwrap().to_owned();
        let url = postgres.create_database("first").unwrap();
        query(&url, "CREATE TABLE kept (n int); INSERT INTO kept VALUES (1)").unwrap();
        postgres.crash().unwrap();
        assert!(query(&url, "SELECT 1").is_err());
        postgres.start_again().unwrap();
        assert_eq!(query(&url, "SELECT n, NULL FROM kept").unwrap(), [[Some("1".to_owned()), None]]);
        drop(postgres);
        assert!(query(&url, "SELECT 1").is_err());
        assert!(!folder.exists());
    }
}
