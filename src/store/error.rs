//! What can go wrong with the database, and whose fault it is.
//!
//! Invariant: an error of the server keeps its SQLSTATE, and the class is read from nothing else.

use std::fmt;

use deadpool::managed::{PoolError, TimeoutType};
use diesel::result::{DatabaseErrorKind, Error};

use super::tap::Wire;

/// A failed statement: its name, the server's SQLSTATE where there is one, and a message without parameters.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct DbError {
    statement: &'static str,
    origin: Origin,
    state: Option<SqlState>,
    message: String,
}

/// Whose fault an error is; each is answered in one way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorClass {
    /// The connection or the server is gone (08, 57, 25006, a closed socket, no answer in time): bump again afterwards.
    Connection,
    /// It may go better next time (25, 40, 53, 55, or no pooled connection was free in time).
    Retry,
    /// A value is not acceptable (22, 23).
    Data,
    /// The tables are not those this program knows (42, 0A).
    Schema,
    /// Anything else: a person must look.
    Other,
}

/// The five characters of an SQLSTATE.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct SqlState([u8; 5]);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    /// The server answered with an error.
    Server,
    /// There was no answer.
    Connection,
    /// Nothing was asked: no pooled connection became free.
    Pool,
    /// The answer was not what this program expects.
    Program,
}

impl DbError {
    /// Whose fault it is.
    #[must_use]
    pub fn class(&self) -> ErrorClass {
        let state = self.sqlstate().unwrap_or_default();
        match self.origin {
            Origin::Connection => ErrorClass::Connection,
            Origin::Pool => ErrorClass::Retry,
            Origin::Program => ErrorClass::Other,
            Origin::Server => match state.get(..2).unwrap_or_default() {
                // 28, 3D: a password or a name that is being changed; 58, XX: a server in trouble. All of these end by themselves or by an
                // operator's hand, and the log and readiness tell meanwhile.
                "08" | "28" | "3D" | "57" | "58" | "XX" => ErrorClass::Connection,
                // The server behind this connection has become a standby: another connection may find the primary.
                "25" if state == "25006" => ErrorClass::Connection,
                "25" | "40" | "53" | "55" => ErrorClass::Retry,
                "22" | "23" => ErrorClass::Data,
                "42" | "0A" => ErrorClass::Schema,
                _ => ErrorClass::Other,
            },
        }
    }

    /// Another transaction stood in the way: it is over soon, or this one can go round it.
    #[must_use]
    pub fn is_contention(&self) -> bool {
        // lock_not_available; query_canceled, because several waits for locks add up to a statement's limit before one of them comes to
        // its own; and the class of deadlocks and serialization failures.
        self.sqlstate().is_some_and(|state| state == "55P03" || state == "57014" || state.starts_with("40"))
    }

    /// A key that should have been free is taken.
    #[must_use]
    pub fn is_taken(&self) -> bool {
        self.state == Some(SqlState::TAKEN)
    }

    /// The server's SQLSTATE; of a lost connection the one with which it said goodbye, if it did.
    #[must_use]
    pub fn sqlstate(&self) -> Option<&str> {
        self.state.as_ref().map(SqlState::as_str)
    }

    /// The name of the statement or transaction that failed.
    #[must_use]
    pub const fn statement(&self) -> &'static str {
        self.statement
    }

    /// The server did answer, so what it says about a COMMIT is certain.
    pub(super) fn is_definite(&self) -> bool {
        self.origin == Origin::Server && self.class() != ErrorClass::Connection
    }

    pub(super) fn connection(statement: &'static str, message: impl fmt::Display) -> Self {
        Self { statement, origin: Origin::Connection, state: None, message: message.to_string() }
    }

    /// What the program expected and did not get.
    pub(crate) fn program(statement: &'static str, message: impl fmt::Display) -> Self {
        Self { statement, origin: Origin::Program, state: None, message: message.to_string() }
    }

    pub(super) fn server(statement: &'static str, state: SqlState, message: impl fmt::Display) -> Self {
        Self { statement, origin: Origin::Server, state: Some(state), message: message.to_string() }
    }

    /// Rows were swallowed by a plain `INSERT`, nobody knows which: like a taken key, it is for the other form to find out.
    pub(super) fn swallowed(statement: &'static str) -> Self {
        Self::server(statement, SqlState::TAKEN, "fewer rows were inserted than given")
    }

    /// Adds what only the session knows: the SQLSTATE that Diesel hides, and the statement's name.
    pub(super) fn completed(mut self, statement: &'static str, wire: &Wire) -> Self {
        if self.statement.is_empty() {
            self.statement = statement;
        }
        self.state = self.state.or_else(|| match self.origin {
            Origin::Server => wire.last_error(),
            Origin::Connection => wire.farewell(),
            Origin::Pool | Origin::Program => None,
        });
        self
    }
}

impl fmt::Display for DbError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.statement.is_empty() {
            write!(f, "{}: ", self.statement)?;
        }
        f.write_str(&self.message)?;
        self.state.map_or(Ok(()), |state| write!(f, " (SQLSTATE {})", state.as_str()))
    }
}

impl SqlState {
    /// A COMMIT that the server turned into a ROLLBACK.
    pub(super) const IN_FAILED_TRANSACTION: Self = Self(*b"25P02");
    pub(super) const READ_ONLY: Self = Self(*b"25006");
    /// A unique key.
    const TAKEN: Self = Self(*b"23505");

    pub(super) fn new(code: &[u8]) -> Option<Self> {
        let code: [u8; 5] = code.try_into().ok()?;
        code.iter().all(u8::is_ascii_alphanumeric).then_some(Self(code))
    }

    fn as_str(&self) -> &str {
        std::str::from_utf8(&self.0).unwrap_or_default()
    }
}

impl fmt::Debug for SqlState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// For `?` in a handler that runs its own statements; [`super::Session::db_error`] adds the SQLSTATE where Diesel hides it.
impl From<Error> for DbError {
    fn from(error: Error) -> Self {
        let message = error.to_string();
        let (origin, state) = match error {
            Error::DatabaseError(kind, _) => match kind {
                DatabaseErrorKind::UniqueViolation => (Origin::Server, Some(SqlState::TAKEN)),
                DatabaseErrorKind::ForeignKeyViolation => (Origin::Server, Some(SqlState(*b"23503"))),
                DatabaseErrorKind::NotNullViolation => (Origin::Server, Some(SqlState(*b"23502"))),
                DatabaseErrorKind::CheckViolation => (Origin::Server, Some(SqlState(*b"23514"))),
                DatabaseErrorKind::SerializationFailure => (Origin::Server, Some(SqlState(*b"40001"))),
                DatabaseErrorKind::ReadOnlyTransaction => (Origin::Server, Some(SqlState::READ_ONLY)),
                DatabaseErrorKind::ClosedConnection | DatabaseErrorKind::UnableToSendCommand => (Origin::Connection, None),
                _ => (Origin::Server, None),
            },
            Error::BrokenTransactionManager | Error::RollbackErrorOnCommit { .. } => (Origin::Connection, None),
            _ => (Origin::Program, None),
        };
        Self { statement: "", origin, state, message }
    }
}

impl From<PoolError<Self>> for DbError {
    fn from(error: PoolError<Self>) -> Self {
        match error {
            PoolError::Backend(error) => error,
            PoolError::Timeout(TimeoutType::Wait) => {
                let message = "no connection became free in time".to_owned();
                Self { statement: "pool", origin: Origin::Pool, state: None, message }
            }
            PoolError::Timeout(TimeoutType::Create | TimeoutType::Recycle)
            | PoolError::Closed
            | PoolError::NoRuntimeSpecified
            | PoolError::PostCreateHook(_) => Self::connection("pool", error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sqlstate_has_one_class() {
        let class = |code: &[u8; 5]| DbError::server("test", SqlState(*code), "").class();
        for (code, expected) in [
            (b"08006", ErrorClass::Connection),
            (b"57P01", ErrorClass::Connection),
            (b"57014", ErrorClass::Connection),
            (b"25P02", ErrorClass::Retry),
            (b"25006", ErrorClass::Connection),
            (b"40P01", ErrorClass::Retry),
            (b"53300", ErrorClass::Retry),
            (b"55P03", ErrorClass::Retry),
            (b"22P02", ErrorClass::Data),
            (b"23514", ErrorClass::Data),
            (b"42P01", ErrorClass::Schema),
            (b"0A000", ErrorClass::Schema),
            (b"28P01", ErrorClass::Connection),
            (b"58030", ErrorClass::Connection),
            (b"P0001", ErrorClass::Other),
        ] {
            assert_eq!(class(code), expected, "{}", String::from_utf8_lossy(code));
        }
        let contention = |code: &[u8; 5]| DbError::server("test", SqlState(*code), "").is_contention();
        assert!(contention(b"55P03") && contention(b"57014") && contention(b"40P01") && contention(b"40001"));
        assert!(!contention(b"53300") && !contention(b"57P01"));
    }

    #[test]
    fn a_hidden_sqlstate_is_filled_in_once_and_never_replaced() {
        let wire = Wire::default();
        wire.hear(b'E', b"SERROR\0VERROR\0C22P02\0");
        let known = DbError::server("claim", SqlState(*b"23514"), "no partition");
        assert_eq!(known.clone().completed("later", &wire), known);
        let lost = DbError::connection("claim", "closed");
        assert_eq!(lost.clone().completed("claim", &wire).sqlstate(), None, "an old error is not why the connection ended");
        let hidden = DbError { statement: "", origin: Origin::Server, state: None, message: "x".to_owned() };
        let completed = hidden.completed("apply", &wire);
        assert_eq!(completed.to_string(), "apply: x (SQLSTATE 22P02)");
        assert_eq!(completed.class(), ErrorClass::Data);
    }
}
