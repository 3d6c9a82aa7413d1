//! The floor's rise and the way of a day out of the table.

use std::time::Duration;

use futures_util::future::join;
use onceward::event::id::{day_of, first_id_of_day};
use onceward::record::{NextOffset, SourceId};
use onceward::retention::cleaner::look;
use onceward::retention::memory::{Need, Own};
use onceward::store::consumed_partitions::{Owned, bump, remember, stands_at_the_end};
use onceward::store::forgetting::{
    DayState, be_patient, day_tables, detach, drop_table, finish_detach, one_at_a_time, raise_floor, standings,
};
use onceward::store::retention::{database_time, ensure_days, floor, init_floor};
use onceward::store::{ErrorClass, Session, Store, horizon_claims, migrate, processed_events};
use tokio::sync::Notify;
use uuid::Uuid;

use super::{Db, GROUP, TOPIC, advance, assert_class, claim, committed, id_of_day, ids, own, refused};

const SECOND: Duration = Duration::from_secs(1);

async fn states(s: &mut Session) -> Vec<DayState> {
    day_tables(s).await.unwrap().into_iter().map(|day| day.state).collect()
}

async fn table_of(s: &mut Session, id: Uuid) -> String {
    let end = first_id_of_day(day_of(id) + 1);
    day_tables(s).await.unwrap().into_iter().find(|day| day.end == end).unwrap().table
}

#[tokio::test]
async fn the_floor_only_rises() {
    let (_db, store) = Db::ready().await;
    let mut s = store.control.get().await.unwrap();
    let higher = first_id_of_day(day_of(Uuid::now_v7()) - 1);
    assert_eq!(raise_floor(&mut s, higher).await.unwrap(), Some(higher));
    assert_eq!(raise_floor(&mut s, first_id_of_day(3)).await.unwrap(), Some(higher));
    assert_eq!(floor(&mut s).await.unwrap(), Some(higher));
}

// CASES E08
#[tokio::test]
async fn a_detach_waits_for_who_has_looked_and_makes_nobody_wait_and_is_ended_later() {
    let (_db, store) = Db::ready().await;
    let (mut reader, mut writer) = (store.claims.get().await.unwrap(), store.claims.get().await.unwrap());
    let mut cleaner = store.control.get().await.unwrap();
    let (out, stays) = (Uuid::now_v7(), id_of_day(1));
    let table = table_of(&mut cleaner, out).await;
    be_patient(&mut cleaner, SECOND, 10 * SECOND).await.unwrap();
    committed(&mut reader, async |s| {
        claim(s, SourceId(1), &[stays]).await?;
        let refused_detach = async {
            let error = detach(&mut cleaner, &table).await.unwrap_err();
            assert_class(&error, "55P03", ErrorClass::Retry);
        };
        let inserting = async {
            for _ in 0..50 {
                committed(&mut writer, async |s| claim(s, SourceId(2), &[id_of_day(1)]).await).await;
            }
        };
        join(refused_detach, inserting).await;
        Ok(())
    })
    .await;
    assert_eq!(states(&mut cleaner).await, [DayState::Detaching, DayState::Attached]);
    let error = refused(&mut writer, async |s| claim(s, SourceId(1), &[out]).await).await;
    assert_class(&error, "23514", ErrorClass::Data);

    finish_detach(&mut cleaner, &table).await.unwrap();
    assert_eq!(states(&mut cleaner).await, [DayState::Detached, DayState::Attached]);
    drop_table(&mut cleaner, &table).await.unwrap();
    assert_eq!(states(&mut cleaner).await, [DayState::Attached]);
}

#[tokio::test]
async fn a_batch_whose_day_goes_meanwhile_is_waited_for_and_finds_its_claims_gone() {
    let (db, store) = Db::ready().await;
    let (mut batch, mut cleaner) = (store.claims.get().await.unwrap(), store.control.get().await.unwrap());
    let [id] = ids();
    let table = table_of(&mut cleaner, id).await;
    be_patient(&mut cleaner, 10 * SECOND, 20 * SECOND).await.unwrap();
    let pending = "SELECT EXISTS (SELECT FROM pg_inherits WHERE inhdetachpending)";
    let claimed = Notify::new();
    let (there, ()) = join(
        committed(&mut batch, async |s| {
            assert_eq!(claim(s, SourceId(1), &[id]).await?, [id]);
            claimed.notify_one();
            db.until(pending).await;
            processed_events::give_back(s, GROUP, &[id]).await
        }),
        async {
            claimed.notified().await;
            detach(&mut cleaner, &table).await.unwrap();
        },
    )
    .await;
    assert!(there <= 1, "a transaction that began before may find it or not: the batch is told");
    assert_eq!(states(&mut cleaner).await, [DayState::Detached, DayState::Attached]);
}

#[tokio::test]
async fn only_tables_that_are_named_as_days_are_days() {
    let (db, store) = Db::ready().await;
    let mut s = store.control.get().await.unwrap();
    ensure_days(&mut s, &[day_of(id_of_day(-1))].into()).await.unwrap();
    let outsider = db.outsider().await;
    let other = "CREATE TABLE processed_event_2020_01_01 (id bigint) PARTITION BY RANGE (id);
                 CREATE TABLE processed_event_backup (id bigint);
                 CREATE TABLE processed_event_2020_02_31 (id bigint);
                 CREATE TABLE processed_event_2020_01_02 PARTITION OF processed_event_2020_01_01 FOR VALUES FROM (1) TO (2)";
    outsider.batch_execute(other).await.unwrap();
    let days = day_tables(&mut s).await.unwrap();
    let ends: Vec<Uuid> = days.iter().map(|day| day.end).collect();
    let today = day_of(Uuid::now_v7());
    assert_eq!(ends, [today, today + 1, today + 2].map(first_id_of_day));
    assert!(days.iter().all(|day| day.state == DayState::Attached && day.bytes > 0 && day.rows == 0));
}

#[tokio::test]
async fn somebody_who_comes_while_one_is_at_work_is_sent_away() {
    let (_db, store) = Db::ready().await;
    let (mut first, mut second) = (store.control.get().await.unwrap(), store.control.get().await.unwrap());
    let inner = one_at_a_time(&mut first, 10 * SECOND, async || one_at_a_time(&mut second, SECOND, async || 1).await.unwrap());
    assert_eq!(inner.await.unwrap(), Some(None));
    assert_eq!(one_at_a_time(&mut first, SECOND, async || 2).await.unwrap(), Some(2));
}

#[tokio::test]
async fn up_to_when_a_partition_is_settled_only_grows_never_beyond_now_and_only_for_its_owner() {
    let (_db, store) = Db::ready().await;
    let mut s = store.control.get().await.unwrap();
    let (source, epoch) = own(&mut s, 0).await;
    let now = database_time(&mut s).await.unwrap();
    let safe = async |s: &mut Session| standings(s).await.unwrap()[0].safe_ms;
    assert_eq!(safe(&mut s).await, None);
    let settle = async |s: &mut Session, next, made| {
        committed(s, async |s| {
            advance(s, source, epoch, NextOffset(next), None, made);
            Ok(())
        })
        .await;
    };
    settle(&mut s, 1, None).await;
    assert_eq!(safe(&mut s).await, Some(0), "records without a time tell nothing");
    settle(&mut s, 2, Some(now - 5_000)).await;
    settle(&mut s, 3, Some(now - 9_000)).await;
    settle(&mut s, 4, None).await;
    settle(&mut s, 4, Some(i64::MIN)).await; // which no calendar of the server has
    assert_eq!(safe(&mut s).await, Some(now - 5_000));
    settle(&mut s, 5, Some(now + 1_000_000_000)).await;
    let capped = safe(&mut s).await.unwrap();
    assert!((now..now + 60_000).contains(&capped), "a producer's clock is not believed: {capped}");

    let owned = Owned { group: GROUP, topic: TOPIC, partition: 0, epoch };
    stands_at_the_end(&mut s, owned, capped + 7).await.unwrap();
    stands_at_the_end(&mut s, owned, capped + 3).await.unwrap();
    remember(&mut s, owned, Some(7), "a test").await.unwrap();
    bump(&mut s, GROUP, TOPIC, 0, "the next").await.unwrap();
    stands_at_the_end(&mut s, owned, capped + 99).await.unwrap();
    remember(&mut s, owned, None, "a late one").await.unwrap();
    let standing = standings(&mut s).await.unwrap().remove(0);
    assert_eq!((standing.safe_ms, standing.remember_ms), (Some(capped + 7), Some(7)));
    assert_eq!(standing.remember_why.as_deref(), Some("a test"));
}

#[tokio::test]
async fn a_database_whose_clock_is_ahead_forgets_nothing_for_it() {
    let db = Db::empty().await;
    migrate(&db.settings()).await.unwrap();
    let ahead = |name| {
        format!(
            "CREATE FUNCTION ahead.{name}() RETURNS timestamptz LANGUAGE sql STABLE
             AS $$SELECT pg_catalog.{name}() + interval '400 days'$$;"
        )
    };
    let found_first =
        format!("ALTER DATABASE {} SET search_path = ahead, pg_catalog, public", db.url.path().trim_start_matches('/'));
    let clock = ["CREATE SCHEMA ahead;", &ahead("now"), &ahead("statement_timestamp"), &found_first].concat();
    db.outsider().await.batch_execute(&clock).await.unwrap();

    let store = Store::connect(&db.settings(), 1).unwrap();
    let mut s = store.control.get().await.unwrap();
    let wrong = database_time(&mut s).await.unwrap();
    let real = |days| day_of(Uuid::now_v7()) + days;
    let before = real(0);
    assert!(wrong / 86_400_000 > real(300), "its clock is ahead");
    let first = day_of(init_floor(&mut s, 86_400 * SECOND, None).await.unwrap());
    assert!((before - 2..=real(-2)).contains(&first), "the first floor");

    let (source, epoch) = own(&mut s, 0).await;
    committed(&mut s, async |s| {
        advance(s, source, epoch, NextOffset(1), None, Some(wrong));
        Ok(())
    })
    .await;
    let safe = standings(&mut s).await.unwrap()[0].safe_ms.unwrap();
    assert!((before..=real(0)).contains(&(safe / 86_400_000)), "a record of that future: settled up to now");

    let need = Need { time: Some(86_400 * SECOND), why: "a test".to_owned() };
    let cleaner = Own { group: GROUP.to_owned(), topic: TOPIC.to_owned(), partitions: 1, need };
    let outlook = look(&mut s, &cleaner).await.unwrap();
    assert!(outlook.floor_to_be().is_some_and(|floor| day_of(floor) <= real(-1)), "nothing that is still needed goes");
}

// CASES F02
#[tokio::test]
async fn below_the_floor_an_id_is_settled_by_a_claim_beyond_the_horizon_or_a_held_event_of_its_group() {
    let (db, store) = Db::ready().await;
    let mut s = store.control.get().await.unwrap();
    let (ours, _) = own(&mut s, 0).await;
    let theirs = bump(&mut s, "another", TOPIC, 0, "test").await.unwrap().source;
    let [claimed, owned, beyond, conflict, invalid, of_others, nobody] = ids();
    committed(&mut s, async |s| horizon_claims::claim(s, GROUP, &[claimed]).await).await;
    committed(&mut s, async |s| horizon_claims::claim(s, "another", &[nobody]).await).await;
    let outsider = db.outsider().await;
    for (offset, (source, id, reason, owns_claim)) in [
        (ours, owned, "unknown", true),
        (ours, beyond, "beyond_horizon", false),
        (ours, conflict, "conflict", false),
        (ours, invalid, "invalid", false),
        (theirs, of_others, "unknown", true),
    ]
    .into_iter()
    .enumerate()
    {
        let insert = format!(
            "INSERT INTO held_event (source_id, source_offset, record_digest, event_id, headers, reason, error, state, owns_claim, attempts)
             VALUES ({source}, {offset}, 1, '{id}', '', '{reason}', '', 'parked', {owns_claim}, 0)"
        );
        outsider.batch_execute(&insert).await.unwrap();
    }
    let asked = [claimed, owned, beyond, conflict, invalid, of_others, nobody];
    let settled = horizon_claims::settled(&mut s, GROUP, &asked).await.unwrap();
    assert_eq!(settled, [claimed, owned, beyond].into());
}
