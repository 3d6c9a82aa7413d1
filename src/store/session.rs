//! One connection and the transactions on it.
//!
//! In: the body of a transaction. Out: its result after COMMIT, or an error that says whether COMMIT can have happened. It owns the
//! connection. If the body dies here (a panic, a dropped future), the connection is closed and the server rolls back.
//!
//! Invariant: a connection whose transaction has no known end is closed at once, and the pool never hands it out.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;

use deadpool::Runtime;
use deadpool::managed::{Manager, Metrics, RecycleError, RecycleResult};
use diesel::connection::TransactionDepthChange;
use diesel::result::QueryResult;
use diesel_async::methods::{ExecuteDsl, LoadQuery};
use diesel_async::{AnsiTransactionManager, AsyncPgConnection, RunQueryDsl, SimpleAsyncConnection, TransactionManager};
use futures_util::future::join;
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout_at};

use super::Settings;
use super::connect::Server;
use super::error::{DbError, SqlState};
use super::tap::Wire;

/// The time limits of one transaction. The first three are the server's, set for the transaction only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimeLimits {
    /// The longest wait for a lock.
    pub lock: Duration,
    /// The longest statement.
    pub statement: Duration,
    /// The longest pause between two statements.
    pub idle_in_transaction: Duration,
    /// The longest whole transaction; afterwards its connection is closed.
    pub budget: Duration,
}

/// A connection. It dereferences to Diesel's, so that a handler can run its own statements on it:
///
/// ```
/// use onceward::diesel::{ExpressionMethods as _, QueryDsl as _, table};
/// use onceward::diesel_async::RunQueryDsl as _;
/// use onceward::store::{DbError, Session};
///
/// table! { stock (sku) { sku -> Text, available -> BigInt, } }
///
/// async fn available(tx: &mut Session, sku: &str) -> Result<i64, DbError> {
///     let row = stock::table.filter(stock::sku.eq(sku)).select(stock::available);
///     row.first(&mut **tx).await.map_err(|error| tx.db_error("what is available", error))
/// }
/// ```
pub struct Session {
    connection: AsyncPgConnection,
    task: AbortHandle,
    wire: Arc<Wire>,
    limits: TimeLimits,
    /// A transaction was begun and its end is not known.
    open: bool,
    /// What is said with COMMIT.
    last_words: String,
}

/// What goes out with BEGIN.
pub(super) struct Opening<'a, First> {
    /// More statements of BEGIN's own message, each behind a semicolon.
    pub words: &'a str,
    /// How many statements that are.
    pub statements: usize,
    /// The name of the first statement.
    pub name: &'static str,
    /// That statement.
    pub first: First,
}

/// Ends one connection from anywhere.
#[derive(Clone, Debug)]
pub struct ConnectionAbort(AbortHandle);

/// Why a transaction has no result.
#[derive(Debug, thiserror::Error)]
pub enum TransactionError<E> {
    /// The body failed, or the server refused the COMMIT: nothing was committed.
    #[error("rolled back: {0}")]
    Body(E),
    /// Nobody knows whether it was committed.
    #[error("the outcome of COMMIT is unknown: {0}")]
    CommitUnknown(DbError),
    /// It never began.
    #[error("not begun: {0}")]
    Begin(DbError),
}

impl TransactionError<DbError> {
    /// The error, whatever it leaves open.
    #[must_use]
    pub fn into_inner(self) -> DbError {
        match self {
            Self::Body(error) | Self::CommitUnknown(error) | Self::Begin(error) => error,
        }
    }
}

impl ConnectionAbort {
    /// Closes the socket. What runs on the connection ends with an error of class `Connection`, and the server rolls back.
    pub fn abort(&self) {
        self.0.abort();
    }
}

impl Session {
    pub(super) fn new(connection: AsyncPgConnection, task: AbortHandle, wire: Arc<Wire>, limits: TimeLimits) -> Self {
        Self { connection, task, wire, limits, open: false, last_words: String::new() }
    }

    /// A handle that outlives every borrow of the session.
    #[doc(hidden)]
    #[must_use]
    pub fn abort_handle(&self) -> ConnectionAbort {
        ConnectionAbort(self.task.clone())
    }

    /// Whether a transaction may begin here at once: the last one has ended, and the server waits for a command.
    #[doc(hidden)]
    #[must_use]
    pub fn is_settled(&self) -> bool {
        !self.open && !self.task.is_finished() && self.wire.is_idle()
    }

    /// Names the statement of an error of this session and adds the SQLSTATE that Diesel hides. To be called before the next
    /// statement; an error that has both keeps them.
    pub fn db_error(&self, statement: &'static str, error: impl Into<DbError>) -> DbError {
        error.into().completed(statement, &self.wire)
    }

    /// Begins a transaction (READ COMMITTED, limits set), runs `body` and commits, or rolls back if it failed.
    ///
    /// The body's future is never dropped: past the budget its *connection* is closed, and the body is awaited to its error.
    ///
    /// # Errors
    /// See [`TransactionError`]; only `CommitUnknown` leaves open what happened. After an error of class `Connection` this session is
    /// of no more use; drop it and get another.
    #[doc(hidden)]
    pub async fn transaction<T, E: From<DbError>>(
        &mut self,
        name: &'static str,
        limits: &TimeLimits,
        body: impl AsyncFnOnce(&mut Self) -> Result<T, E>,
    ) -> Result<T, TransactionError<E>> {
        let opening = Opening { words: "", statements: 0, name, first: async |_: &AsyncPgConnection| Ok(()) };
        self.transaction_behind(name, limits, opening, async |s: &mut Self, _| body(s).await).await
    }

    /// The same, with a first statement in the flight of BEGIN. What that one says is for the body to judge.
    pub(super) async fn transaction_behind<F, T, E: From<DbError>>(
        &mut self,
        name: &'static str,
        limits: &TimeLimits,
        opening: Opening<'_, impl AsyncFnOnce(&AsyncPgConnection) -> QueryResult<F>>,
        body: impl AsyncFnOnce(&mut Self, Result<F, DbError>) -> Result<T, E>,
    ) -> Result<T, TransactionError<E>> {
        if self.open {
            let message = "a transaction is open, or its end is not known";
            return Err(TransactionError::Begin(DbError::connection(name, message)));
        }
        self.open = true;
        self.last_words.clear();
        let mut fuse = Fuse { abort: self.abort_handle(), until: Instant::now() + limits.budget, state: FuseState::Armed };
        let first = fuse.watch(self.begin(name, limits, opening)).await.map_err(TransactionError::Begin)?;
        let result = match fuse.watch(body(self, first)).await {
            Ok(_) if fuse.state == FuseState::Blown => Err(E::from(DbError::connection(name, "took longer than its budget"))),
            result => result,
        };
        // The end of a transaction has a statement's time for itself, however late it is.
        fuse.until = fuse.until.max(Instant::now() + limits.statement);
        let (ended, end_is_known) = match result {
            Ok(value) => match self.commit(name, &mut fuse).await {
                Ok(()) => (Ok(value), true),
                Err(TransactionError::Body(error)) => (Err(TransactionError::Body(error)), self.roll_back(&mut fuse).await),
                Err(unknown) => (Err(unknown), false),
            },
            Err(error) => (Err(TransactionError::Body(error)), self.roll_back(&mut fuse).await),
        };
        if end_is_known {
            fuse.state = FuseState::Spent;
            self.open = false;
        }
        ended
    }

    /// BEGIN and what goes with it: sent one after the other, without waiting in between.
    async fn begin<F>(
        &mut self,
        name: &'static str,
        limits: &TimeLimits,
        opening: Opening<'_, impl AsyncFnOnce(&AsyncPgConnection) -> QueryResult<F>>,
    ) -> Result<Result<F, DbError>, DbError> {
        let begin = limits.begin() + opening.words;
        self.wire.watch();
        let mut connection = &self.connection;
        let (begun, first) = join(connection.batch_execute(&begin), (opening.first)(&self.connection)).await;
        begun.map_err(|error| self.db_error(name, error))?;
        // The order is the driver's, so it is not believed: a lock that was taken before BEGIN would be gone. Inside, there was an answer to
        // BEGIN and one to the statement behind it.
        if first.is_ok() && self.wire.answers_inside() < 1 + opening.statements {
            return Err(DbError::connection(name, "its first statement has run outside of the transaction"));
        }
        self.tell_diesel(TransactionDepthChange::IncreaseDepth).map_err(|error| self.db_error(name, error))?;
        Ok(first.map_err(|error| self.db_error(opening.name, error)))
    }

    /// So that a transaction of Diesel's inside of ours is a savepoint.
    fn tell_diesel(&mut self, change: TransactionDepthChange) -> QueryResult<()> {
        let status = AnsiTransactionManager::transaction_manager_status_mut(&mut self.connection);
        status.transaction_state()?.change_transaction_depth(change)
    }

    /// What is said with COMMIT, in one message: the server passes over COMMIT if a statement before it fails.
    ///
    /// # Panics
    /// Outside of a transaction.
    pub(super) fn end_with(&mut self, statement: &str) {
        assert!(self.open, "there is a transaction to end");
        self.last_words.push_str(statement);
        self.last_words.push_str("; ");
    }

    /// Whether the transaction is known to be over. Where the server has ended it before, it only warns.
    async fn roll_back(&mut self, fuse: &mut Fuse) -> bool {
        let rolled_back = fuse.watch(AnsiTransactionManager::rollback_transaction(&mut self.connection)).await.is_ok();
        // A transaction of Diesel's that was left open by a panic inside of ours takes the ROLLBACK for its savepoint.
        rolled_back && self.wire.is_idle()
    }

    async fn commit<E: From<DbError>>(&mut self, name: &'static str, fuse: &mut Fuse) -> Result<(), TransactionError<E>> {
        let commit = std::mem::take(&mut self.last_words) + "COMMIT";
        // Somebody else has ended the transaction. By itself this message would be taken for a success, and the claims may be gone.
        if self.wire.is_idle() {
            return Err(TransactionError::CommitUnknown(DbError::connection(name, "the transaction was over before its COMMIT")));
        }
        match fuse.watch(self.connection.batch_execute(&commit)).await {
            // A statement had failed and its error was swallowed: the server calls that COMMIT a success.
            Ok(()) if self.wire.rolled_back() => {
                let message = "a statement had failed, so the server rolled back instead";
                Err(TransactionError::Body(E::from(DbError::server(name, SqlState::IN_FAILED_TRANSACTION, message))))
            }
            Ok(()) => self.tell_diesel(TransactionDepthChange::DecreaseDepth).map_err(|error| {
                // It has happened, but nobody will find a use for this connection.
                TransactionError::CommitUnknown(self.db_error(name, error))
            }),
            Err(error) => {
                let error = self.db_error(name, error);
                Err(if error.is_definite() {
                    TransactionError::Body(E::from(error))
                } else {
                    TransactionError::CommitUnknown(error)
                })
            }
        }
    }

    /// Runs `body` in the open transaction, or in one of its own under the store's limits.
    pub(super) async fn within<T>(
        &mut self,
        name: &'static str,
        body: impl AsyncFnOnce(&mut Self) -> Result<T, DbError>,
    ) -> Result<T, DbError> {
        if self.open { body(self).await } else { self.alone(name, self.limits, body).await }
    }

    /// Runs `body` in a transaction of its own.
    pub(super) async fn alone<T>(
        &mut self,
        name: &'static str,
        limits: TimeLimits,
        body: impl AsyncFnOnce(&mut Self) -> Result<T, DbError>,
    ) -> Result<T, DbError> {
        self.transaction(name, &limits, body).await.map_err(TransactionError::into_inner)
    }

    /// The store's own limits.
    pub(super) const fn limits(&self) -> TimeLimits {
        self.limits
    }

    pub(super) async fn rows<'query, Q, U>(&mut self, statement: &'static str, query: Q) -> Result<Vec<U>, DbError>
    where
        Q: LoadQuery<'query, AsyncPgConnection, U> + RunQueryDsl<AsyncPgConnection> + 'query,
        U: Send,
    {
        let rows: QueryResult<Vec<U>> = query.load(&mut self.connection).await;
        rows.map_err(|error| self.db_error(statement, error))
    }

    pub(super) async fn row<'query, Q, U>(&mut self, statement: &'static str, query: Q) -> Result<Option<U>, DbError>
    where
        Q: LoadQuery<'query, AsyncPgConnection, U> + RunQueryDsl<AsyncPgConnection> + 'query,
        U: Send,
    {
        Ok(self.rows(statement, query).await?.pop())
    }

    /// How many rows it changed.
    pub(super) async fn change<Q>(&mut self, statement: &'static str, query: Q) -> Result<usize, DbError>
    where
        Q: ExecuteDsl<AsyncPgConnection> + RunQueryDsl<AsyncPgConnection>,
    {
        let changed = query.execute(&mut self.connection).await;
        changed.map_err(|error| self.db_error(statement, error))
    }

    pub(super) async fn script(&mut self, statement: &'static str, sql: &str) -> Result<(), DbError> {
        let done = self.connection.batch_execute(sql).await;
        done.map_err(|error| self.db_error(statement, error))
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Deref for Session {
    type Target = AsyncPgConnection;

    fn deref(&self) -> &AsyncPgConnection {
        &self.connection
    }
}

impl DerefMut for Session {
    fn deref_mut(&mut self) -> &mut AsyncPgConnection {
        &mut self.connection
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("open", &self.open).field("wire", &self.wire).finish_non_exhaustive()
    }
}

impl TimeLimits {
    /// BEGIN and the limits in one flight. They end with the transaction, so that a transaction pooler may stand between.
    pub(super) fn begin(&self) -> String {
        // The server reads 0 as "no limit".
        let ms = |limit: Duration| limit.as_millis().max(1);
        format!(
            "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL lock_timeout = {}; SET LOCAL statement_timeout = {}; \
             SET LOCAL idle_in_transaction_session_timeout = {}",
            ms(self.lock),
            ms(self.statement),
            ms(self.idle_in_transaction)
        )
    }
}

/// Closes the connection when the time is up, and when it is dropped before the transaction's end is known.
struct Fuse {
    abort: ConnectionAbort,
    until: Instant,
    state: FuseState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FuseState {
    Armed,
    Blown,
    Spent,
}

impl Fuse {
    /// Awaits `future` to its end, which is near once the connection is closed.
    async fn watch<F: Future>(&mut self, future: F) -> F::Output {
        let mut future = std::pin::pin!(future);
        if let Ok(output) = timeout_at(self.until, &mut future).await {
            return output;
        }
        self.abort.abort();
        self.state = FuseState::Blown;
        future.await
    }
}

impl Drop for Fuse {
    fn drop(&mut self) {
        if self.state != FuseState::Spent {
            self.abort.abort();
        }
    }
}

/// A pool of sessions.
pub type Pool = deadpool::managed::Pool<SessionManager>;
/// A session that goes back to its pool when it is dropped.
pub type PooledSession = deadpool::managed::Object<SessionManager>;

/// Connects sessions for a [`Pool`] and refuses those in doubt.
#[derive(Debug)]
pub struct SessionManager {
    server: Server,
}

pub(super) fn pool(server: Server, settings: &Settings, size: usize) -> Result<Pool, DbError> {
    Pool::builder(SessionManager { server })
        .max_size(size)
        .wait_timeout(Some(settings.pool_wait))
        .recycle_timeout(Some(settings.connect_timeout))
        .runtime(Runtime::Tokio1)
        .build()
        .map_err(|error| DbError::program("pool", error))
}

impl Manager for SessionManager {
    type Type = Session;
    type Error = DbError;

    async fn create(&self) -> Result<Session, DbError> {
        self.server.connect().await
    }

    async fn recycle(&self, session: &mut Session, _: &Metrics) -> RecycleResult<DbError> {
        if session.open || session.task.is_finished() {
            return Err(RecycleError::message("in doubt"));
        }
        if session.wire.last_error() == Some(SqlState::READ_ONLY) {
            return Err(RecycleError::message("its server takes no writes any more"));
        }
        // The question also lets everything end that was sent before it, so what the tap heard is the whole truth.
        session.script("ping", "SELECT 1").await?;
        if session.wire.is_idle() { Ok(()) } else { Err(RecycleError::message("in a transaction")) }
    }
}
