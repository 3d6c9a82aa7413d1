//! Which SQLSTATE and class each fault really arrives with.

use std::time::Duration;

use diesel_async::{RunQueryDsl, SimpleAsyncConnection};
use futures_util::future::join;
use onceward::record::SourceId;
use onceward::store::{DbError, ErrorClass, Session, Settings, Store, TimeLimits, TransactionError};
use tokio::sync::Barrier;

use super::{Db, LIMITS, assert_class, claim, committed, id_of_day, refused, settings};

/// What a handler does that knows nothing of SQLSTATEs: `?` on Diesel's error.
async fn run(s: &mut Session, sql: &str) -> Result<(), DbError> {
    diesel::sql_query(sql).execute(s).await?;
    Ok(())
}

#[tokio::test]
async fn a_refused_statement_names_its_sqlstate_though_diesel_hides_it() {
    let (_db, store) = Db::ready().await;
    let mut s = store.claims.get().await.unwrap();
    for (sql, sqlstate, class) in [
        ("SELECT 'x'::integer", "22P02", ErrorClass::Data),
        ("SELECT 1 / 0", "22012", ErrorClass::Data),
        ("INSERT INTO payment VALUES (gen_random_uuid(), 0, 1, 1, 'EUR', 'charged', NULL, 1)", "23514", ErrorClass::Data),
        ("INSERT INTO retention (floor) SELECT floor FROM retention", "23505", ErrorClass::Data),
        ("SELECT * FROM nowhere", "42P01", ErrorClass::Schema),
        ("SELECT set_config('lock_timeout', 'soon', true)", "22023", ErrorClass::Data),
        ("DO $$ BEGIN RAISE 'no' USING ERRCODE = '40001'; END $$", "40001", ErrorClass::Retry),
        ("DO $$ BEGIN RAISE 'no' USING ERRCODE = '53100'; END $$", "53100", ErrorClass::Retry),
        ("DO $$ BEGIN RAISE 'no'; END $$", "P0001", ErrorClass::Other),
    ] {
        let error = refused(&mut s, async |s| run(s, sql).await.map_err(|error| s.db_error("apply", error))).await;
        assert_class(&error, sqlstate, class);
        assert_eq!(error.statement(), "apply");
    }
    let error = refused(&mut s, async |s| claim(s, SourceId(1), &[id_of_day(9)]).await).await;
    assert_class(&error, "23514", ErrorClass::Data);
    committed(&mut s, async |s| run(s, "SELECT 1").await).await;
}

#[tokio::test]
async fn the_time_limits_are_set_for_the_transaction_only() {
    let (db, store) = Db::ready().await;
    let mut s = store.claims.get().await.unwrap();
    let short = |change: fn(&mut TimeLimits)| {
        let mut limits = LIMITS;
        change(&mut limits);
        limits
    };
    let outsider = db.outsider().await;
    outsider.batch_execute("BEGIN; LOCK TABLE payment").await.unwrap();
    let limits = short(|limits| limits.lock = Duration::from_millis(20));
    let error =
        s.transaction("t", &limits, async |s| run(s, "LOCK TABLE payment").await.map_err(|error| s.db_error("lock", error))).await;
    let Err(TransactionError::Body(error)) = error else { panic!("{error:?}") };
    assert_class(&error, "55P03", ErrorClass::Retry);

    let limits = short(|limits| limits.statement = Duration::from_millis(20));
    let error =
        s.transaction("t", &limits, async |s| run(s, "SELECT pg_sleep(9)").await.map_err(|error| s.db_error("sleep", error))).await;
    let Err(TransactionError::Body(error)) = error else { panic!("{error:?}") };
    assert_class(&error, "57014", ErrorClass::Connection);

    committed(&mut s, async |s| {
        run(s, "DO $$ BEGIN ASSERT current_setting('transaction_isolation') = 'read committed'; END $$").await
    })
    .await;
    run(&mut s, "DO $$ BEGIN ASSERT current_setting('lock_timeout') = '0' AND current_setting('statement_timeout') = '0'; END $$")
        .await
        .unwrap();
}

/// A frozen owner: the server itself ends its transaction.
#[tokio::test]
async fn a_transaction_that_idles_too_long_is_ended_by_the_server() {
    let (db, store) = Db::ready().await;
    let mut s = store.claims.get().await.unwrap();
    let limits = TimeLimits { idle_in_transaction: Duration::from_millis(20), ..LIMITS };
    let error = s
        .transaction("t", &limits, async |s| {
            // On a busy machine it may be ended before the first statement already.
            run(s, "SELECT 1").await.map_err(|error| s.db_error("early", error))?;
            db.until("SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction')").await;
            run(s, "SELECT 1").await.map_err(|error| s.db_error("late", error))
        })
        .await;
    let Err(TransactionError::Body(error)) = error else { panic!("{error:?}") };
    assert_class(&error, "25P03", ErrorClass::Connection);
}

#[tokio::test]
async fn a_deadlock_is_an_error_that_a_retry_may_mend() {
    let (_db, store) = Db::ready().await;
    let (mut first, mut second) = (store.claims.get().await.unwrap(), store.claims.get().await.unwrap());
    let both_hold_one = Barrier::new(2);
    let cross = async |s: &mut Session, mine: i32, theirs: i32| {
        s.transaction("t", &LIMITS, async |s| {
            run(s, &format!("SELECT pg_advisory_xact_lock({mine})")).await?;
            both_hold_one.wait().await;
            let crossed = run(s, &format!("SELECT pg_advisory_xact_lock({theirs})")).await;
            crossed.map_err(|error| s.db_error("cross", error))
        })
        .await
    };
    let (a, b) = join(cross(&mut first, 1, 2), cross(&mut second, 2, 1)).await;
    let (Err(TransactionError::Body(error)), Ok(())) = (if a.is_err() { (a, b) } else { (b, a) }) else { panic!("one must lose") };
    assert_class(&error, "40P01", ErrorClass::Retry);
}

// CASES D07
#[tokio::test]
async fn a_terminated_backend_is_an_error_at_once_and_a_closed_connection_afterwards() {
    let (db, store) = Db::ready().await;
    let mut s = store.claims.get().await.unwrap();
    let outsider = db.outsider().await;
    let kill = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'onceward'";
    let error = s
        .transaction("t", &LIMITS, async |s| {
            let sleeping = async { run(s, "SELECT pg_sleep(2)").await };
            let killing = async {
                db.until(
                    "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep')",
                )
                .await;
                outsider.query(kill, &[]).await.unwrap();
            };
            let (slept, ()) = join(sleeping, killing).await;
            slept.map_err(|error| s.db_error("sleep", error))
        })
        .await;
    let Err(TransactionError::Body(error)) = error else { panic!("{error:?}") };
    assert_class(&error, "57P01", ErrorClass::Connection);
    let error = s.transaction("t", &LIMITS, async |s| run(s, "SELECT 1").await).await;
    assert!(matches!(&error, Err(TransactionError::Begin(error)) if error.class() == ErrorClass::Connection), "{error:?}");
}

#[tokio::test]
async fn nobody_answering_is_the_connections_fault_and_a_busy_pool_is_not() {
    let (db, store) = Db::ready().await;
    let nobody = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let silent =
        Settings { connect_timeout: Duration::from_millis(50), ..settings(db.url_through(nobody.local_addr().unwrap().port())) };
    let error = DbError::from(Store::connect(&silent, 1).unwrap().claims.get().await.unwrap_err());
    assert_eq!(error.class(), ErrorClass::Connection, "{error}");
    drop(nobody);
    let error = DbError::from(Store::connect(&silent, 1).unwrap().claims.get().await.unwrap_err());
    assert_eq!(error.class(), ErrorClass::Connection, "{error}");

    let hurried = Settings { pool_wait: Duration::from_millis(20), ..db.settings() };
    let pool = Store::connect(&hurried, 1).unwrap().claims;
    let _only = pool.get().await.unwrap();
    let error = DbError::from(pool.get().await.unwrap_err());
    assert_eq!(error.class(), ErrorClass::Retry, "{error}");

    let nowhere = Store::connect(&settings(db.url().replace("/store_", "/not_store_")), 1).unwrap();
    assert_class(&DbError::from(nowhere.claims.get().await.unwrap_err()), "3D000", ErrorClass::Connection);
    drop(store);
}

#[tokio::test]
async fn a_server_that_only_reads_is_passed_over_for_one_that_takes_writes() {
    let (db, _store) = Db::ready().await;
    let (host, port) = db.address();
    let read_only = format!("{}?options=-c%20default_transaction_read_only%3Don", db.url());
    let error = DbError::from(Store::connect(&settings(read_only), 1).unwrap().claims.get().await.unwrap_err());
    assert!(error.class() == ErrorClass::Connection && error.to_string().ends_with("takes no writes"), "{error}");

    let closed = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
    let several = db.url().replace(&format!("{host}:{port}"), &format!("127.0.0.1:{closed},{host}:{port}"));
    let mut s = Store::connect(&settings(several), 1).unwrap().claims.get().await.unwrap();
    s.batch_execute("SELECT 1").await.unwrap();
}

#[tokio::test]
async fn a_url_that_cannot_be_used_is_refused_and_never_quoted() {
    for (url, says) in [
        ("postgres://u:secret@/d", "names no host"),
        ("host=a,b,c port=1,2 user=u password=secret", "as many as hosts"),
        ("postgres://u:secret@h:x", "must be postgres://"),
        ("postgres://u:secret@h/d?sslmode=verify-full", "whose certificates count"),
        (
            "postgres://u:secret@h/d?sslmode=verify-full&sslrootcert=/nowhere/ca.pem",
            "sslrootcert that cannot be used: /nowhere/ca.pem",
        ),
    ] {
        let error = Store::connect(&settings(url.to_owned()), 1).unwrap_err();
        assert!(error.to_string().contains(says) && !error.to_string().contains("secret"), "{error}");
    }
}
