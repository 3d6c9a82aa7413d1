//! The schema: embedded migrations, run by one process at a time.
//!
//! In: the settings. Out: the migrations that were applied now. It owns nothing. If it dies here, the migration it was in rolls back.
//!
//! Invariant: each migration is applied once, however many processes start at once, on whatever runtime.

use std::error::Error;

use diesel::migration::{Migration, MigrationSource};
use diesel::pg::Pg;
use diesel::sql_types::{Array, BigInt, Bool, Text};
use diesel_async::AsyncMigrationHarness;
use diesel_migrations::{EmbeddedMigrations, MigrationHarness, embed_migrations};

use super::connect::Server;
use super::statement::statement;
use super::{DbError, Session, Settings};

const MIGRATIONS: EmbeddedMigrations = embed_migrations!("migrations");

/// Why the schema is not current.
#[derive(Debug, thiserror::Error)]
pub enum MigrateError {
    /// The database cannot be asked.
    #[error(transparent)]
    Database(#[from] DbError),
    /// A migration failed; it has been rolled back.
    #[error("migration failed: {0}")]
    Migration(Box<dyn Error + Send + Sync>),
}

/// Applies the migrations that are missing and returns their names. Callable from any runtime.
///
/// # Errors
/// The database cannot be reached, or a migration failed.
pub async fn migrate(settings: &Settings) -> Result<Vec<String>, MigrateError> {
    let server = Server::new(settings)?;
    let limits = settings.limits;
    // The harness blocks its thread and needs a runtime with others; the caller's may have one thread only.
    let migration = tokio::task::spawn_blocking(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        runtime.map_err(|error| MigrateError::Migration(error.into()))?.block_on(async {
            let mut session = server.connect().await?;
            session.script("migrate", LOCK_MIGRATORS).await?;
            session.script("migrate", &format!("SET lock_timeout = {}", limits.lock.as_millis().max(1))).await?;
            apply_missing(session).map_err(MigrateError::Migration)
        })
    });
    migration.await.unwrap_or_else(|panic| Err(MigrateError::Migration(panic.into())))
}

/// Whether every migration of this program is applied.
///
/// # Errors
/// The statement failed.
pub async fn schema_is_current(s: &mut Session) -> Result<bool, DbError> {
    let versions = known_versions()?;
    s.within("schema_is_current", async |s| {
        if s.row("schema_is_current", HasMigrations {}).await? != Some(true) {
            return Ok(false);
        }
        let expected = versions.len() as i64;
        Ok(s.row("schema_is_current", CountApplied { versions }).await? == Some(expected))
    })
    .await
}

/// Processes that start together wait here for the first one; the lock ends with the connection. Its number is one that nobody
/// else uses.
const LOCK_MIGRATORS: &str = "SET lock_timeout = '60s'; SELECT pg_advisory_lock(7957702, 1)";

/// Must run on a runtime with several threads.
fn apply_missing(session: Session) -> Result<Vec<String>, Box<dyn Error + Send + Sync>> {
    let mut harness = AsyncMigrationHarness::new(session);
    let mut applied = Vec::new();
    for migration in harness.pending_migrations(MIGRATIONS)? {
        harness.run_migration(&*migration)?;
        applied.push(migration.name().to_string());
    }
    Ok(applied)
}

fn known_versions() -> Result<Vec<String>, DbError> {
    let unreadable = |error| DbError::program("schema_is_current", error);
    let migrations: Vec<Box<dyn Migration<Pg>>> = MIGRATIONS.migrations().map_err(unreadable)?;
    Ok(migrations.iter().map(|migration| migration.name().version().to_string()).collect())
}

statement! {
    HasMigrations {} -> Bool { "SELECT to_regclass('__diesel_schema_migrations') IS NOT NULL" }
}

statement! {
    CountApplied { versions: Vec<String> => Array<Text> } -> BigInt {
        "SELECT count(*) FROM __diesel_schema_migrations WHERE version = ANY(:versions)"
    }
}
