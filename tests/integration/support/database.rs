//! A database of a test's own, and plain SQL in it. Values come and go as text, exactly as the server writes them.

use std::sync::{Mutex, OnceLock, PoisonError};

use onceward::lab::postgres::{Options, Postgres};
use tokio_postgres::{Client, NoTls, SimpleQueryMessage};

use super::engine::run_onceward;
use super::{LIMIT, block_on, eventually, server};

/// A database.
pub struct Database {
    url: String,
    session: Mutex<Option<Session>>,
}

/// A database as it was once.
pub struct Backup(String);

/// One connection, for what a single statement cannot do: open transactions, locks.
pub struct Session(Client);

impl Database {
    /// A new one with the tables in it: a copy of one that `onceward migrate` has made.
    pub fn migrated(name: &str) -> Self {
        static TEMPLATE: OnceLock<String> = OnceLock::new();
        let template = TEMPLATE.get_or_init(|| {
            let template = Self::create(&super::unique_name(), "template0");
            let migrated = run_onceward(&["migrate"], &[("ONCEWARD_DATABASE_URL", &template.url)]);
            assert!(migrated.status.success(), "onceward migrate: {}", String::from_utf8_lossy(&migrated.stderr));
            template.url.rsplit('/').next().expect("a URL ends with the database").to_owned()
        });
        Self::create(name, template)
    }

    /// A new one without any table.
    pub fn empty(name: &str) -> Self {
        Self::create(name, "template0")
    }

    /// A new one, migrated, in a server of the test's own, which it may stop.
    pub fn in_a_server_of_its_own() -> (Postgres, Self) {
        Self::in_a_server(&Options { fsync: false, ..Options::default() })
    }

    /// The same, in a server that is set up like this.
    pub fn in_a_server(options: &Options) -> (Postgres, Self) {
        let server = Postgres::start(options).expect("a PostgreSQL server");
        let database = Self::at(server.create_database("onceward").expect("a database"));
        let migrated = run_onceward(&["migrate"], &[("ONCEWARD_DATABASE_URL", &database.url)]);
        assert!(migrated.status.success(), "onceward migrate: {}", String::from_utf8_lossy(&migrated.stderr));
        (server, database)
    }

    /// One that is there already.
    pub fn at(url: String) -> Self {
        Self { url, session: Mutex::new(None) }
    }

    /// Its address, for a superuser.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// A connection of its own.
    pub fn session(&self) -> Session {
        Session::open(&self.url).expect("a connection")
    }

    /// Runs statements.
    pub fn execute(&self, sql: &str) {
        self.rows(sql);
    }

    /// The one number that the query gives.
    pub fn count(&self, sql: &str) -> i64 {
        self.text(sql).parse().unwrap_or_else(|_| panic!("no number: {sql}"))
    }

    /// How many wait for a lock on this table. Not who waits for a row, as whoever notes how long ids are needed may do; and not who waits for
    /// the table in another database, which has the same number there if both are copies of one.
    pub fn waiting_for(&self, table: &str) -> i64 {
        self.count(&format!(
            "SELECT count(*) FROM pg_locks JOIN pg_database AS d ON d.oid = database
             WHERE datname = current_database() AND relation = '{table}'::regclass AND NOT granted"
        ))
    }

    /// The one value that the query gives.
    pub fn text(&self, sql: &str) -> String {
        let rows = self.rows(sql);
        let [row] = &rows[..] else { panic!("{} rows, not one: {sql}", rows.len()) };
        row[0].clone().unwrap_or_else(|| panic!("NULL: {sql}"))
    }

    /// The first column; NULL is an empty text.
    pub fn column(&self, sql: &str) -> Vec<String> {
        self.rows(sql).into_iter().map(|mut row| row.swap_remove(0).unwrap_or_default()).collect()
    }

    /// All rows.
    pub fn rows(&self, sql: &str) -> Vec<Vec<Option<String>>> {
        let mut kept = self.session.lock().unwrap_or_else(PoisonError::into_inner);
        let session = kept.take().filter(|session| !session.0.is_closed()).unwrap_or_else(|| self.session());
        let rows = session.rows(sql);
        *kept = Some(session);
        rows
    }

    /// A copy of it as it is now. Whoever is connected to it is thrown out.
    pub fn backup(&self) -> Backup {
        let (server, name) = (self.server(), self.name());
        let backup = format!("{name}_b");
        let throw_out = format!("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'");
        let copy = format!("CREATE DATABASE \"{backup}\" TEMPLATE \"{name}\"");
        eventually("the database is copied while nobody is connected", || {
            server.rows(&throw_out);
            server.try_rows(&copy).is_ok()
        });
        Backup(backup)
    }

    /// Puts the copy in its place. Whoever is connected is thrown out, and everything since the copy is lost.
    pub fn restore(&self, backup: &Backup) {
        let (server, name) = (self.server(), self.name());
        server.rows(&format!("DROP DATABASE \"{name}\" WITH (FORCE)"));
        server.rows(&format!("CREATE DATABASE \"{name}\" TEMPLATE \"{}\"", backup.0));
    }

    fn name(&self) -> &str {
        self.url.rsplit('/').next().expect("a URL ends with the database")
    }

    /// A connection to another database of the same server.
    fn server(&self) -> Session {
        let (address, _) = self.url.rsplit_once('/').expect("a URL with a database");
        Session::open(&format!("{address}/postgres")).expect("the server answers")
    }

    /// Whether the server answers at all.
    pub fn answers(&self) -> bool {
        Session::open(&self.url).is_ok()
    }

    fn create(name: &str, template: &str) -> Self {
        let server = server("ONCEWARD_TEST_DATABASE_URL");
        let (address, _) = server.rsplit_once('/').expect("a URL with a database");
        Session::open(&server).expect("the server answers").rows(&format!("CREATE DATABASE \"{name}\" TEMPLATE \"{template}\""));
        Self::at(format!("{address}/{name}"))
    }
}

impl Session {
    fn open(url: &str) -> Result<Self, tokio_postgres::Error> {
        block_on(async {
            let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
            tokio::spawn(connection); // it ends with the client
            // A thread of a test that has failed may wait for what the test itself holds.
            client.batch_execute(&format!("SET lock_timeout = {}", LIMIT.as_millis())).await?;
            Ok(Self(client))
        })
    }

    /// The process that serves it, as `pg_stat_activity` names it.
    pub fn backend(&self) -> String {
        self.rows("SELECT pg_backend_pid()")[0][0].clone().expect("a number")
    }

    /// Runs statements; the rows of all of them.
    pub fn rows(&self, sql: &str) -> Vec<Vec<Option<String>>> {
        self.try_rows(sql).unwrap_or_else(|error| panic!("{error:?}: {sql}"))
    }

    /// As [`Session::rows`], for statements that the server may refuse.
    pub fn try_rows(&self, sql: &str) -> Result<Vec<Vec<Option<String>>>, tokio_postgres::Error> {
        let messages = block_on(self.0.simple_query(sql))?;
        let rows = messages.into_iter().filter_map(|message| match message {
            SimpleQueryMessage::Row(row) => Some((0..row.len()).map(|column| row.get(column).map(str::to_owned)).collect()),
            _ => None,
        });
        Ok(rows.collect())
    }
}
