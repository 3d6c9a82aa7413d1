//! The schema, the floor and the days above it.

use std::collections::BTreeSet;
use std::time::Duration;

use futures_util::future::{join, join_all};
use onceward::event::id::{day_of, first_id_of_day};
use onceward::record::SourceId;
use onceward::store::retention::{days, ensure_days, ensure_days_ahead, floor, init_floor};
use onceward::store::{ErrorClass, Store, migrate, schema_is_current};
use tokio::sync::oneshot;
use uuid::Uuid;

use super::{Db, assert_class, claim, committed, id_of_day, refused};

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

fn today() -> i64 {
    day_of(Uuid::now_v7())
}

fn range(day: i64) -> (Uuid, Uuid) {
    (first_id_of_day(day), first_id_of_day(day + 1))
}

// CASES D10, D11: each process has one thread, as actix has.
#[tokio::test]
async fn five_processes_migrate_at_once_on_single_threaded_runtimes() {
    let db = Db::empty().await;
    let store = Store::connect(&db.settings(), 1).unwrap();
    assert!(!schema_is_current(&mut store.control.get().await.unwrap()).await.unwrap());
    let migrations = (0..5).map(|_| {
        let settings = db.settings();
        tokio::task::spawn_blocking(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(migrate(&settings)).unwrap()
        })
    });
    let mut applied: Vec<String> = join_all(migrations).await.into_iter().flat_map(Result::unwrap).collect();
    assert!(!applied.is_empty());
    let all = applied.len();
    applied.sort();
    applied.dedup();
    assert_eq!(applied.len(), all, "a migration was applied twice");
    assert!(schema_is_current(&mut store.control.get().await.unwrap()).await.unwrap());
}

#[tokio::test]
async fn the_first_floor_keeps_the_retention_and_the_oldest_record_and_then_stays() {
    let retained = |retention_days: u32, oldest_record_ms| async move {
        let db = Db::empty().await;
        migrate(&db.settings()).await.unwrap();
        let store = Store::connect(&db.settings(), 1).unwrap();
        let mut s = store.control.get().await.unwrap();
        assert_eq!(floor(&mut s).await.unwrap(), None);
        let first = init_floor(&mut s, DAY * retention_days, oldest_record_ms).await.unwrap();
        assert_eq!(init_floor(&mut s, DAY * 90, None).await.unwrap(), first, "the first value is kept");
        assert_eq!(floor(&mut s).await.unwrap(), Some(first));
        first
    };
    let ms_of_day = |day: i64| day * 86_400_000 + 1;
    assert_eq!(retained(7, None).await, first_id_of_day(today() - 8));
    assert_eq!(retained(7, Some(ms_of_day(today() - 2))).await, first_id_of_day(today() - 8));
    assert_eq!(retained(7, Some(ms_of_day(today() - 40))).await, first_id_of_day(today() - 41));
    assert_eq!(retained(7, Some(ms_of_day(today() + 400))).await, first_id_of_day(today() - 8));
}

#[tokio::test]
async fn a_missing_day_refuses_the_claim_until_it_is_made() {
    let (_db, store) = Db::ready().await;
    let mut s = store.claims.get().await.unwrap();
    let id = id_of_day(5);
    let error = refused(&mut s, async |s| claim(s, SourceId(1), &[id]).await).await;
    assert_class(&error, "23514", ErrorClass::Data);
    assert_eq!(error.statement(), "claim");
    ensure_days(&mut s, &[day_of(id)].into()).await.unwrap();
    assert_eq!(committed(&mut s, async |s| claim(s, SourceId(1), &[id]).await).await, [id]);
    assert!(days(&mut s).await.unwrap().contains(&range(today() + 5)));
}

#[tokio::test]
async fn no_day_below_the_floor_is_made() {
    let (_db, store) = Db::ready().await;
    let mut s = store.control.get().await.unwrap();
    let floor_day = day_of(floor(&mut s).await.unwrap().unwrap());
    ensure_days(&mut s, &[floor_day - 1, floor_day, 0].into()).await.unwrap();
    let there = days(&mut s).await.unwrap();
    assert!(there.contains(&range(floor_day)) && there.iter().all(|(from, _)| *from >= first_id_of_day(floor_day)));
}

#[tokio::test]
async fn without_a_floor_no_day_is_made() {
    let db = Db::empty().await;
    migrate(&db.settings()).await.unwrap();
    let store = Store::connect(&db.settings(), 1).unwrap();
    let mut s = store.control.get().await.unwrap();
    let error = ensure_days(&mut s, &[today()].into()).await.unwrap_err();
    assert_eq!(error.to_string(), "ensure_days: the retention floor is not set yet");
    assert_eq!(days(&mut s).await.unwrap(), []);
}

#[tokio::test]
async fn several_makers_make_each_day_once_and_leave_what_is_there() {
    let (_db, store) = Db::ready().await;
    let wanted: BTreeSet<i64> = (today() - 1..today() + 6).collect();
    join_all((0..4).map(|_| async {
        let mut s = store.claims.get().await.unwrap();
        ensure_days(&mut s, &wanted).await.unwrap();
    }))
    .await;
    let mut s = store.control.get().await.unwrap();
    ensure_days_ahead(&mut s, 3).await.unwrap();
    let expected: Vec<_> = wanted.into_iter().map(range).collect();
    assert_eq!(days(&mut s).await.unwrap(), expected);
}

/// `CREATE … PARTITION OF` would make every insert queue behind the day that waits for a long transaction.
#[tokio::test]
async fn a_day_is_made_beside_a_batch_that_stays_open_and_beside_new_ones() {
    let (_db, store) = Db::ready().await;
    let (mut long, mut short) = (store.claims.get().await.unwrap(), store.claims.get().await.unwrap());
    let mut maker = store.control.get().await.unwrap();
    let (open, is_open) = oneshot::channel();
    let (made, is_made) = oneshot::channel();
    let open_batch = committed(&mut long, async |s| {
        claim(s, SourceId(1), &[Uuid::now_v7()]).await?;
        open.send(()).unwrap();
        is_made.await.unwrap();
        Ok(())
    });
    let others = async {
        is_open.await.unwrap();
        let making = async { ensure_days(&mut maker, &[today() + 3].into()).await.unwrap() };
        let inserting = async {
            for _ in 0..50 {
                committed(&mut short, async |s| claim(s, SourceId(2), &[Uuid::now_v7()]).await).await;
            }
        };
        join(making, inserting).await;
        made.send(()).unwrap();
    };
    join(open_batch, others).await;
    let id = id_of_day(3);
    assert_eq!(committed(&mut short, async |s| claim(s, SourceId(1), &[id]).await).await, [id]);
}
