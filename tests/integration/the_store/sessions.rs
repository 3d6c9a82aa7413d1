//! A connection is between transactions, or it is closed.

use std::cell::Cell;
use std::future::poll_fn;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use diesel_async::{AnsiTransactionManager, RunQueryDsl, SimpleAsyncConnection, TransactionManager};
use futures_util::FutureExt;
use futures_util::future::join_all;
use onceward::record::SourceId;
use onceward::store::{DbError, ErrorClass, Session, Store, TimeLimits, TransactionError};

use super::proxy::lossy_proxy;
use super::{Db, LIMITS, assert_class, claim, committed, ids, refused, settings};

const SOURCE: SourceId = SourceId(1);
const NONE_IN_TRANSACTION: &str = "SELECT NOT EXISTS (SELECT FROM pg_stat_activity
    WHERE datname = current_database() AND application_name = 'onceward' AND xact_start IS NOT NULL)";

async fn run(s: &mut Session, sql: &str) -> Result<(), DbError> {
    diesel::sql_query(sql).execute(s).await?;
    Ok(())
}

async fn pid(s: &mut Session) -> i32 {
    diesel::select(diesel::dsl::sql::<diesel::sql_types::Integer>("pg_backend_pid()")).get_result(s).await.unwrap()
}

// CASES D01, D02
#[tokio::test]
async fn past_its_budget_the_connection_is_closed_and_the_body_still_awaited() {
    let (db, _) = Db::ready().await;
    let store = Store::connect(&db.settings(), 1).unwrap();
    let limits = TimeLimits { budget: Duration::from_millis(100), ..LIMITS };
    let mut s = store.claims.get().await.unwrap();
    let doomed = pid(&mut s).await;
    let ended = Cell::new(false);
    let error = s
        .transaction("slow", &limits, async |s| {
            claim(s, SOURCE, &ids::<1>()).await?;
            let slept = run(s, "SELECT pg_sleep(2)").await;
            ended.set(true);
            slept
        })
        .await;
    assert!(matches!(&error, Err(TransactionError::Body(error)) if error.class() == ErrorClass::Connection), "{error:?}");
    assert!(ended.get());
    drop(s);
    let mut s = store.claims.get().await.unwrap();
    assert_ne!(pid(&mut s).await, doomed);
    db.until(NONE_IN_TRANSACTION).await;
    let claimed: i64 = db.outsider().await.query_one("SELECT count(*) FROM processed_event", &[]).await.unwrap().get(0);
    assert_eq!(claimed, 0);
}

#[tokio::test]
async fn a_body_that_ends_well_but_too_late_is_not_committed() {
    let (db, store) = Db::ready().await;
    let limits = TimeLimits { budget: Duration::from_millis(500), ..LIMITS };
    let mut s = store.claims.get().await.unwrap();
    let late = s
        .transaction("slow", &limits, async |s| {
            claim(s, SOURCE, &ids::<1>()).await?;
            db.until("SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction')").await;
            Ok::<_, DbError>(())
        })
        .await;
    let Err(TransactionError::Body(error)) = late else { panic!("{late:?}") };
    assert_eq!(error.to_string(), "slow: took longer than its budget");
    let claimed: i64 = db.outsider().await.query_one("SELECT count(*) FROM processed_event", &[]).await.unwrap().get(0);
    assert_eq!(claimed, 0);
}

// CASES D01
#[tokio::test]
async fn a_transaction_dropped_at_any_point_never_swallows_what_comes_after_it() {
    let (db, _) = Db::ready().await;
    let store = Store::connect(&db.settings(), 1).unwrap();
    let outsider = db.outsider().await;
    let mut dropped = 0;
    for polls in 1.. {
        let ended = {
            let mut s = store.claims.get().await.unwrap();
            let mut work = pin!(committed(&mut s, async |s| claim(s, SOURCE, &ids::<3>()).await));
            let mut left = polls;
            poll_fn(|cx| {
                left -= 1;
                if left < 0 { Poll::Ready(false) } else { work.as_mut().poll(cx).map(|_| true) }
            })
            .await
        };
        let [id] = ids();
        let mut s = store.claims.get().await.unwrap();
        committed(&mut s, async |s| claim(s, SOURCE, &[id]).await).await;
        let found = outsider.query_one("SELECT EXISTS (SELECT FROM processed_event WHERE event_id = $1)", &[&id]).await.unwrap();
        assert!(found.get::<_, bool>(0), "swallowed after {polls} polls");
        if ended {
            break;
        }
        dropped += 1;
    }
    assert!(dropped >= 3, "begin, claim and commit are at least a poll each: {dropped}");
    db.until(NONE_IN_TRANSACTION).await;
}

// CASES D02
#[tokio::test]
async fn a_panic_in_a_transaction_costs_its_connection_and_nothing_else() {
    let (db, _) = Db::ready().await;
    let store = Store::connect(&db.settings(), 1).unwrap();
    let [id] = ids();
    let mut s = store.claims.get().await.unwrap();
    let panicking = committed(&mut s, async |s| {
        claim(s, SOURCE, &[id]).await?;
        if id.is_nil() { Ok(()) } else { panic!("on purpose") }
    });
    AssertUnwindSafe(panicking).catch_unwind().await.unwrap_err();
    db.until(NONE_IN_TRANSACTION).await;
    drop(s);
    let mut s = store.claims.get().await.unwrap();
    assert_eq!(committed(&mut s, async |s| claim(s, SOURCE, &[id]).await).await, [id]);
}

#[tokio::test]
async fn a_transaction_that_somebody_opened_by_hand_is_not_handed_on() {
    let (db, _) = Db::ready().await;
    let store = Store::connect(&db.settings(), 1).unwrap();
    let mut s = store.claims.get().await.unwrap();
    s.batch_execute("BEGIN").await.unwrap();
    let opened = pid(&mut s).await;
    drop(s);
    let mut s = store.claims.get().await.unwrap();
    assert_ne!(pid(&mut s).await, opened);
    db.until(NONE_IN_TRANSACTION).await;
}

#[tokio::test]
async fn a_transaction_that_was_ended_by_hand_is_never_called_committed() {
    let (_db, store) = Db::ready().await;
    for end in ["ROLLBACK", "COMMIT"] {
        let mut s = store.claims.get().await.unwrap();
        let ended = s.transaction("t", &LIMITS, async |s| Ok::<_, DbError>(s.batch_execute(end).await?)).await;
        assert!(matches!(ended, Err(TransactionError::CommitUnknown(_))), "{end}: {ended:?}");
    }
}

#[tokio::test]
async fn a_savepoint_that_was_left_open_keeps_no_lock() {
    let (db, store) = Db::ready().await;
    let mut s = store.claims.get().await.unwrap();
    refused(&mut s, async |s| {
        run(s, "SELECT pg_advisory_xact_lock(77)").await?;
        let inner = AnsiTransactionManager::begin_transaction(&mut **s).await;
        inner.map_err(|error| s.db_error("inner", error))?;
        run(s, "SELECT 1 / 0").await
    })
    .await;
    db.until("SELECT NOT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND objid = 77)").await;
}

#[tokio::test]
async fn a_good_connection_is_used_again_after_commit_and_after_rollback() {
    let (db, _) = Db::ready().await;
    let store = Store::connect(&db.settings(), 1).unwrap();
    let first = pid(&mut store.claims.get().await.unwrap()).await;
    let mut s = store.claims.get().await.unwrap();
    committed(&mut s, async |s| run(s, "SELECT 1").await).await;
    drop(s);
    let mut s = store.claims.get().await.unwrap();
    refused(&mut s, async |s| run(s, "SELECT 1 / 0").await).await;
    drop(s);
    assert_eq!(pid(&mut store.claims.get().await.unwrap()).await, first);
}

// CASES D03
#[tokio::test]
async fn killed_connections_are_replaced_before_anybody_gets_one() {
    let (db, _) = Db::ready().await;
    let store = Store::connect(&db.settings(), 16).unwrap();
    let connect = || async {
        let mut all: Vec<_> = join_all((0..16).map(|_| store.claims.get())).await.into_iter().map(Result::unwrap).collect();
        let mut pids = Vec::new();
        for s in &mut all {
            pids.push(pid(s).await);
        }
        pids
    };
    let before = connect().await;
    let kill = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'onceward'";
    assert_eq!(db.outsider().await.query(kill, &[]).await.unwrap().len(), 16);
    let after = connect().await;
    assert!(before.iter().all(|pid| !after.contains(pid)));
    let mut s = store.claims.get().await.unwrap();
    assert_eq!(committed(&mut s, async |s| claim(s, SOURCE, &ids::<2>()).await).await.len(), 2);
}

#[tokio::test]
async fn a_statement_that_failed_silently_does_not_pass_for_a_commit() {
    let (_db, store) = Db::ready().await;
    let mut s = store.claims.get().await.unwrap();
    let [id] = ids();
    let error = refused(&mut s, async |s| {
        claim(s, SOURCE, &[id]).await?;
        assert!(run(s, "SELECT 1 / 0").await.is_err());
        Ok(())
    })
    .await;
    assert_class(&error, "25P02", ErrorClass::Retry);
    assert_eq!(committed(&mut s, async |s| claim(s, SOURCE, &[id]).await).await, [id]);
}

/// A handler may use Diesel's own transactions: were theirs not savepoints, they would commit ours.
#[tokio::test]
async fn a_transaction_of_diesels_inside_of_ours_is_a_savepoint_and_commits_nothing() {
    let (db, store) = Db::ready().await;
    let mut s = store.claims.get().await.unwrap();
    let [kept, lost] = ids();
    for fails in [false, true] {
        let inside = s.transaction("outer", &LIMITS, async |s| {
            claim(s, SOURCE, &[if fails { lost } else { kept }]).await?;
            let inner = diesel_async::AsyncConnection::transaction(&mut **s, async |s| {
                diesel::sql_query("DELETE FROM processed_event").execute(s).await?;
                Err::<(), _>(diesel::result::Error::RollbackTransaction)
            });
            inner.await.unwrap_err();
            let inner =
                diesel_async::AsyncConnection::transaction(&mut **s, async |s| diesel::sql_query("SELECT 1").execute(s).await);
            inner.await?;
            if fails { Err(DbError::from(diesel::result::Error::NotFound)) } else { Ok(()) }
        });
        assert_eq!(inside.await.is_err(), fails);
    }
    let ids: Vec<uuid::Uuid> = db
        .outsider()
        .await
        .query("SELECT event_id FROM processed_event", &[])
        .await
        .unwrap()
        .iter()
        .map(|row| row.get(0))
        .collect();
    assert_eq!(ids, [kept]);
}

#[tokio::test]
async fn a_commit_that_the_server_refuses_is_certainly_rolled_back() {
    let (db, store) = Db::ready().await;
    let outsider = db.outsider().await;
    outsider.batch_execute("CREATE TABLE late (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)").await.unwrap();
    let mut s = store.claims.get().await.unwrap();
    let error = refused(&mut s, async |s| run(s, "INSERT INTO late VALUES (1), (1)").await).await;
    assert_class(&error, "23505", ErrorClass::Data);
    committed(&mut s, async |s| run(s, "INSERT INTO late VALUES (1)").await).await;
}

// CASES D17
#[tokio::test]
async fn a_lost_answer_to_commit_is_unknown_whether_or_not_it_was_committed() {
    let (db, store) = Db::ready().await;
    for deliver in [true, false] {
        let port = lossy_proxy(db.address(), deliver).await;
        let proxied = Store::connect(&settings(db.url_through(port)), 1).unwrap();
        let mut s = proxied.claims.get().await.unwrap();
        let [id] = ids();
        let lost = s.transaction("lost", &LIMITS, async |s| claim(s, SOURCE, &[id]).await).await;
        let Err(TransactionError::CommitUnknown(error)) = lost else { panic!("{lost:?}") };
        assert_eq!(error.class(), ErrorClass::Connection, "{error}");
        let mut s = store.claims.get().await.unwrap();
        let again = committed(&mut s, async |s| claim(s, SOURCE, &[id]).await).await;
        assert_eq!(again.is_empty(), deliver, "the claim answers");
    }
}

#[tokio::test]
async fn an_abort_from_outside_ends_the_statement_that_runs() {
    let (db, store) = Db::ready().await;
    let mut s = store.claims.get().await.unwrap();
    let abort = s.abort_handle();
    let aborting = async {
        db.until("SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep')")
            .await;
        abort.abort();
    };
    let sleeping = s.transaction("t", &LIMITS, async |s| run(s, "SELECT pg_sleep(2)").await);
    let (slept, ()) = futures_util::future::join(sleeping, aborting).await;
    assert!(matches!(&slept, Err(TransactionError::Body(error)) if error.class() == ErrorClass::Connection), "{slept:?}");
}
