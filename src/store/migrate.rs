//! The schema: embedded migrations, run by one process at a time.
//!
//! In: the settings. Out: the migrations that were applied now. It owns nothing. If it dies here, the migration it was in rolls back.
//!
//! Invariant: each migration is applied once, however many processes start at once, on whatever runtime.

use super::{DbError, Session, Settings};

/// Why the schema is not current.
#[derive(Debug, thiserror::Error)]
pub enum MigrateError {
    /// The database cannot be asked.
    #[error(transparent)]
    Database(#[from] DbError),
    /// A migration failed; it has been rolled back.
    #[error("migration failed: {0}")]
    Migration(Box<dyn std::error::Error + Send + Sync>),
}

/// Applies the migrations that are missing and returns their names. Callable from any runtime.
///
/// # Errors
/// The database cannot be reached, or a migration failed.
pub async fn migrate(settings: &Settings) -> Result<Vec<String>, MigrateError> {
    todo!()
}

/// Whether every migration of this program is applied.
///
/// # Errors
/// The statement failed.
pub async fn schema_is_current(s: &mut Session) -> Result<bool, DbError> {
    todo!()
}
