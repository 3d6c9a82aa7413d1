//! Epochs only grow, and only the current one writes.

use futures_util::future::join;
use onceward::record::{Epoch, NextOffset, RecordDigest, SourceId};
use onceward::store::consumed_partitions::{self, Advance, Fence, bump, doubt, fence, fenced, has_rows, rebump};
use onceward::store::{DbError, ErrorClass, Session, Settings, Store, TimeLimits, TransactionError, retention};
use std::time::Duration;
use tokio::sync::oneshot;

use super::{Db, GROUP, LIMITS, TOPIC, advance, assert_class, claim, committed, ids, own, refused};

#[tokio::test]
async fn each_owner_gets_the_next_epoch_and_finds_where_the_last_one_stopped() {
    let (_db, store) = Db::ready().await;
    let mut s = store.control.get().await.unwrap();
    assert!(!has_rows(&mut s, GROUP, TOPIC).await.unwrap());
    let first = bump(&mut s, GROUP, TOPIC, 3, "a").await.unwrap();
    assert_eq!((first.epoch, first.next_offset, first.went_back.as_deref()), (Epoch(1), None, None));
    let digest = Some(RecordDigest(-5));
    committed(&mut s, async |s| {
        fence(s, first.source, first.epoch).await?.expect("ours");
        advance(s, first.source, first.epoch, NextOffset(42), digest, None);
        Ok(())
    })
    .await;
    let second = bump(&mut s, GROUP, TOPIC, 3, "b").await.unwrap();
    assert_eq!((second.source, second.epoch), (first.source, Epoch(2)));
    assert_eq!((second.next_offset, second.last_record_digest), (Some(NextOffset(42)), digest));
    assert!(has_rows(&mut s, GROUP, TOPIC).await.unwrap() && !has_rows(&mut s, GROUP, "other").await.unwrap());
    assert_ne!(own(&mut s, 4).await.0, first.source);
}

#[tokio::test]
async fn the_fence_holds_for_the_current_epoch_only_and_brings_the_floor() {
    let (_db, store) = Db::ready().await;
    let mut s = store.control.get().await.unwrap();
    let (source, stale) = own(&mut s, 0).await;
    let (_, current) = own(&mut s, 0).await;
    assert_eq!(committed(&mut s, async |s| fence(s, source, stale).await).await, None);
    let floor = retention::floor(&mut s).await.unwrap();
    assert!(floor.is_some());
    assert_eq!(committed(&mut s, async |s| fence(s, source, current).await).await, Some(Fence { next_offset: None, floor }));
}

#[tokio::test]
#[should_panic(expected = "without the fence of epoch 1")]
async fn a_stale_owner_cannot_move_the_frontier() {
    let (_db, store) = Db::ready().await;
    let mut s = store.control.get().await.unwrap();
    let (source, stale) = own(&mut s, 0).await;
    own(&mut s, 0).await;
    committed(&mut s, async |s| {
        advance(s, source, stale, NextOffset(1), None, None);
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn a_frontier_without_its_fence_takes_everything_of_its_transaction_with_it_and_the_connection_goes_on() {
    let (db, store) = Db::ready().await;
    let (mut s, mut control) = (store.claims.get().await.unwrap(), store.control.get().await.unwrap());
    let (source, stale) = own(&mut control, 0).await;
    let (_, current) = own(&mut control, 0).await;
    let mut settle = async |epoch, next| {
        let settled = s.transaction("batch", &LIMITS, async |s| {
            claim(s, source, &ids::<2>()).await?;
            advance(s, source, epoch, NextOffset(next), None, None);
            Ok::<_, DbError>(())
        });
        settled.await
    };
    let Err(TransactionError::Body(error)) = settle(stale, 2).await else { panic!("it is not ours") };
    assert!(error.to_string().contains("frontier 2 of partition row"), "{error}");
    let claims =
        async || db.outsider().await.query_one("SELECT count(*) FROM processed_event", &[]).await.unwrap().get::<_, i64>(0);
    assert_eq!(claims().await, 0);
    settle(current, 2).await.unwrap();
    assert_eq!(claims().await, 2);
    assert_eq!(bump(&mut control, GROUP, TOPIC, 0, "next").await.unwrap().next_offset, Some(NextOffset(2)));
}

#[tokio::test]
async fn a_fence_that_goes_out_with_begin_is_held_until_the_end_whether_it_is_prepared_or_not() {
    let (db, store) = Db::ready().await;
    let (mut batch, mut control) = (store.claims.get().await.unwrap(), store.control.get().await.unwrap());
    let owner = [own(&mut control, 0).await];
    let outsider = db.outsider().await;
    let free = async || outsider.query("SELECT FROM consumed_partition FOR UPDATE SKIP LOCKED", &[]).await.unwrap().len();
    for words in ["", "", "; SELECT pg_current_xact_id()"] {
        let held = fenced(&mut batch, "batch", &LIMITS, words, &owner, async |_, fences| {
            assert!(matches!(fences[..], [Some(_)]));
            Ok::<_, DbError>(free().await)
        });
        assert_eq!(held.await.unwrap(), 0);
        assert_eq!(free().await, 1);
    }
    own(&mut control, 0).await;
    let stale = fenced(&mut batch, "batch", &LIMITS, "", &owner, async |_, fences| Ok::<_, DbError>(fences)).await;
    assert_eq!(stale.unwrap(), [None]);
}

#[tokio::test]
async fn several_rows_are_fenced_at_once_and_each_tells_whose_it_is() {
    let (db, store) = Db::ready().await;
    let (mut batch, mut control) = (store.claims.get().await.unwrap(), store.control.get().await.unwrap());
    let mut owners = Vec::new();
    for partition in [2, 0, 1] {
        owners.push(own(&mut control, partition).await);
    }
    let outsider = db.outsider().await;
    let free = async || outsider.query("SELECT FROM consumed_partition FOR UPDATE SKIP LOCKED", &[]).await.unwrap().len();
    let ends = [(7, Some(3)), (8, None), (9, Some(5))];
    let move_all = async |s: &mut Session, owners: &[(SourceId, Epoch)]| {
        let advances = owners.iter().zip(ends).map(|(&(source, epoch), (next, digest))| Advance {
            source,
            epoch,
            next: NextOffset(next),
            digest: digest.map(RecordDigest),
            safe_ms: Some(1_700_000_000_000),
        });
        consumed_partitions::advance(s, &advances.collect::<Vec<_>>());
    };
    let moved = fenced(&mut batch, "batch", &LIMITS, "", &owners, async |s, fences| {
        let known: Vec<_> = fences.iter().map(|fence| fence.map(|fence| fence.next_offset)).collect();
        assert_eq!((known, free().await), (vec![Some(None); 3], 0));
        move_all(s, &owners).await;
        Ok::<_, DbError>(())
    });
    moved.await.unwrap();
    let stored = "SELECT partition, next_offset, last_record_digest, extract(epoch FROM safe_time)::bigint
                  FROM consumed_partition ORDER BY partition";
    let stored = async || -> Vec<(i32, i64, Option<i64>, i64)> {
        let rows = outsider.query(stored, &[]).await.unwrap();
        rows.iter().map(|row| (row.get(0), row.get(1), row.get(2), row.get(3))).collect()
    };
    let expected = [(0, 8, None, 1_700_000_000), (1, 9, Some(5), 1_700_000_000), (2, 7, Some(3), 1_700_000_000)];
    assert_eq!(stored().await, expected, "each its own");

    own(&mut control, 0).await;
    let stale = fenced(&mut batch, "batch", &LIMITS, "", &owners, async |_, fences| {
        assert_eq!(free().await, 1, "a row whose epoch is another owner's is not locked");
        Ok::<_, DbError>(fences.iter().map(Option::is_some).collect::<Vec<_>>())
    });
    assert_eq!(stale.await.unwrap(), [true, false, true], "in the order asked");
    let without_a_fence = refused(&mut batch, async |s| {
        move_all(s, &owners).await;
        Ok(())
    });
    assert_eq!(without_a_fence.await.sqlstate(), Some("22P02"));
    assert_eq!(stored().await, expected, "all or none");
}

#[tokio::test]
async fn several_fences_wait_for_a_bump_and_then_know() {
    let (db, store) = Db::ready().await;
    let (mut batch, mut control) = (store.claims.get().await.unwrap(), store.control.get().await.unwrap());
    let owners = [own(&mut control, 0).await, own(&mut control, 1).await];
    let outsider = db.outsider().await;
    outsider.batch_execute("BEGIN; UPDATE consumed_partition SET epoch = epoch + 1 WHERE partition = 1").await.unwrap();
    let waits = fenced(&mut batch, "batch", &LIMITS, "", &owners, async |_, fences| {
        Ok::<_, DbError>(fences.iter().map(Option::is_some).collect::<Vec<_>>())
    });
    let bumped = async {
        db.until("SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock')")
            .await;
        outsider.batch_execute("COMMIT").await.unwrap();
    };
    assert_eq!(join(waits, bumped).await.0.unwrap(), [true, false]);
}

#[tokio::test]
async fn a_fence_that_waits_too_long_is_rolled_back_and_its_connection_goes_on() {
    let (db, store) = Db::ready().await;
    let mut s = store.claims.get().await.unwrap();
    let owner = [own(&mut s, 0).await];
    let outsider = db.outsider().await;
    outsider.batch_execute("BEGIN; SELECT FROM consumed_partition FOR UPDATE").await.unwrap();
    let impatient = TimeLimits { lock: Duration::from_millis(20), ..LIMITS };
    for _ in 0..2 {
        let late = fenced(&mut s, "batch", &impatient, "", &owner, async |_, _| Ok::<_, DbError>(())).await;
        let Err(TransactionError::Body(error)) = late else { panic!("{late:?}") };
        assert_class(&error, "55P03", ErrorClass::Retry);
        assert_eq!(error.statement(), "fence");
    }
    outsider.batch_execute("ROLLBACK").await.unwrap();
    let fences = fenced(&mut s, "batch", &LIMITS, "", &owner, async |_, fences| Ok::<_, DbError>(fences)).await.unwrap();
    assert!(matches!(fences[..], [Some(_)]));
}

#[tokio::test]
async fn a_bump_waits_for_the_open_batch_and_then_goes_on() {
    let (db, store) = Db::ready().await;
    let (mut batch, mut control) = (store.claims.get().await.unwrap(), store.control.get().await.unwrap());
    let (source, epoch) = own(&mut control, 0).await;
    let (fenced, is_fenced) = oneshot::channel();
    let running = committed(&mut batch, async |s| {
        fence(s, source, epoch).await?.expect("ours");
        fenced.send(()).unwrap();
        db.until("SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock')")
            .await;
        advance(s, source, epoch, NextOffset(7), None, None);
        Ok(())
    });
    let taking_over = async {
        is_fenced.await.unwrap();
        bump(&mut control, GROUP, TOPIC, 0, "next").await.unwrap()
    };
    let ((), next) = join(running, taking_over).await;
    assert_eq!(
        (next.epoch, next.next_offset),
        (Epoch(2), Some(NextOffset(7))),
        "what the batch settled is what the next owner sees"
    );
    assert_eq!(committed(&mut batch, async |s| fence(s, source, epoch).await).await, None);
}

#[tokio::test]
async fn a_bump_that_waits_too_long_says_try_again() {
    let (db, store) = Db::ready().await;
    let limits = onceward::store::TimeLimits { lock: Duration::from_millis(50), ..LIMITS };
    let impatient = Store::connect(&Settings { limits, ..db.settings() }, 1).unwrap();
    let (mut batch, mut control) = (store.claims.get().await.unwrap(), impatient.control.get().await.unwrap());
    let (source, epoch) = own(&mut control, 0).await;
    let error = committed(&mut batch, async |s| {
        fence(s, source, epoch).await?.expect("ours");
        Ok(bump(&mut control, GROUP, TOPIC, 0, "next").await.unwrap_err())
    })
    .await;
    assert_class(&error, "55P03", ErrorClass::Retry);
    assert_eq!(own(&mut control, 0).await.1, Epoch(2), "the failed bump left nothing behind");
}

#[tokio::test]
async fn a_rebump_only_succeeds_for_the_epoch_that_is_current() {
    let (_db, store) = Db::ready().await;
    let mut s = store.control.get().await.unwrap();
    let (source, first) = own(&mut s, 0).await;
    let again = rebump(&mut s, source, first, "again").await.unwrap().expect("ours");
    assert_eq!(again.epoch, Epoch(2));
    assert_eq!(rebump(&mut s, source, first, "zombie").await.unwrap(), None);
    assert!(committed(&mut s, async |s| fence(s, source, Epoch(2)).await).await.is_some());
}

#[tokio::test]
async fn another_server_or_timeline_is_reported_for_as_long_as_the_stored_one_differs() {
    let (db, store) = Db::ready().await;
    let mut s = store.control.get().await.unwrap();
    let (source, epoch) = own(&mut s, 0).await;
    let outsider = db.outsider().await;
    outsider.batch_execute("UPDATE consumed_partition SET timeline = timeline + 8").await.unwrap();
    for _ in 0..2 {
        let went_back = bump(&mut s, GROUP, TOPIC, 0, "x").await.unwrap().went_back.expect("another timeline");
        assert_eq!(went_back, "the timeline was 9 and is 1");
    }
    outsider.batch_execute("UPDATE consumed_partition SET system_identifier = 5").await.unwrap();
    let ownership = rebump(&mut s, source, Epoch(epoch.0 + 2), "x").await.unwrap().expect("ours");
    assert!(ownership.went_back.expect("another server").starts_with("the system identifier was 5 and is "));
}

#[tokio::test]
async fn an_ordinary_role_may_ask_which_server_this_is() {
    let (db, _store) = Db::ready().await;
    let outsider = db.outsider().await;
    let role = format!("plain_{}", uuid::Uuid::now_v7().simple());
    outsider.batch_execute(&format!("CREATE ROLE {role}; GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}")).await.unwrap();
    let url = format!("{}?options=-c%20role%3D{role}", db.url());
    let plain = Store::connect(&super::settings(url), 1).unwrap();
    own(&mut plain.control.get().await.unwrap(), 0).await;
}

#[tokio::test]
async fn a_doubt_only_grows_and_the_server_is_known_from_then_on() {
    let (db, store) = Db::ready().await;
    let mut s = store.control.get().await.unwrap();
    let (source, epoch) = own(&mut s, 0).await;
    db.outsider().await.batch_execute("UPDATE consumed_partition SET timeline = timeline + 8").await.unwrap();
    let first = committed(&mut s, async |s| doubt(s, source, Some(NextOffset(40))).await).await;
    let second = committed(&mut s, async |s| doubt(s, source, Some(NextOffset(30))).await).await;
    let third = committed(&mut s, async |s| doubt(s, source, None).await).await;
    assert_eq!([first, second, third].map(|doubt| doubt.offset), [Some(NextOffset(40)); 3]);
    assert!(first.before_ms <= second.before_ms && second.before_ms <= third.before_ms && first.before_ms.is_some());
    let next = rebump(&mut s, source, epoch, "next").await.unwrap().expect("ours");
    assert_eq!((next.doubt, next.went_back), (third, None));
}
