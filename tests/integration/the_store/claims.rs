//! An id is claimed once per group.

use diesel_async::SimpleAsyncConnection;
use futures_util::future::join;
use onceward::handler::EventDigest;
use onceward::record::{Offset, SourceId};
use onceward::store::processed_events::{self, ClaimRow, ClaimTable, Seen};
use onceward::store::{Form, Session, Store, TransactionError};
use tokio::sync::oneshot;
use uuid::Uuid;

use super::{Db, GROUP, LIMITS, OURS, claim, claim_row, committed, id_of_day, ids, refused};

const SOURCE: SourceId = SourceId(1);

// CASES D08, D09
#[tokio::test]
async fn a_claim_returns_new_ids_only_and_by_id() {
    let (_db, store) = Db::ready().await;
    let mut s = store.claims.get().await.unwrap();
    let [a, b, c] = ids();
    assert_eq!(committed(&mut s, async |s| claim(s, SOURCE, &[b]).await).await, [b]);
    assert_eq!(committed(&mut s, async |s| claim(s, SOURCE, &[b]).await).await, ids::<0>());
    let mut new = [a, c];
    new.sort();
    assert_eq!(committed(&mut s, async |s| claim(s, SOURCE, &[a, b, a, c]).await).await, new);
}

// CASES E01
#[tokio::test]
async fn an_id_applies_once_at_any_time_from_any_place_and_twice_for_two_groups() {
    let (db, store) = Db::ready().await;
    let mut s = store.claims.get().await.unwrap();
    let [x] = ids();
    assert_eq!(committed(&mut s, async |s| claim(s, SOURCE, &[x]).await).await, [x]);
    let outsider = db.outsider().await;
    outsider.batch_execute("UPDATE processed_event SET processed_at = processed_at - interval '36 hours'").await.unwrap();
    assert_eq!(committed(&mut s, async |s| claim(s, SourceId(2), &[Uuid::now_v7(), x]).await).await.len(), 1);
    let other_group = committed(&mut s, async |s| OURS.claim(s, "mail", SOURCE, &[claim_row(x, 0)], Form::OnConflict).await).await;
    assert!(other_group.contains(&x));

    let sql = "SELECT array_agg(attname::text ORDER BY attname) FROM pg_index JOIN pg_attribute ON attrelid = indexrelid
               WHERE indrelid = 'processed_event'::regclass AND indisunique GROUP BY indexrelid";
    let unique: Vec<Vec<String>> = outsider.query(sql, &[]).await.unwrap().iter().map(|row| row.get(0)).collect();
    assert_eq!(unique, [["consumer_group", "event_id"]], "a unique key with a time in it takes the same id twice");
}

/// As other services make it, with and without the columns that ours has beside: each is read as what it is, and takes an id once.
#[tokio::test]
async fn a_table_of_another_service_takes_an_id_once_whatever_its_key_and_columns() {
    let (db, store) = Db::ready().await;
    assert_eq!(ClaimTable::read(&mut store.control.get().await.unwrap()).await.unwrap(), OURS);
    for (key, of_groups) in [("PRIMARY KEY (event_id, consumer_group)", true), ("UNIQUE (event_id)", false)] {
        for (columns, explains) in
            [("event_digest bigint, source_id integer, source_offset bigint,", true), ("source_id integer,", false)]
        {
            let table = format!(
                "DROP TABLE processed_event;
                 CREATE TABLE processed_event (
                     event_id uuid NOT NULL, consumer_group text NOT NULL, processed_at timestamptz NOT NULL, {columns} {key})"
            );
            db.outsider().await.batch_execute(&table).await.unwrap();
            let mut s = store.claims.get().await.unwrap();
            let made = ClaimTable::read(&mut s).await.unwrap();
            assert_eq!(made, ClaimTable { by_day: false, of_groups, explains }, "{key} {columns}");

            let [x, y] = ids();
            let rows = [claim_row(x, 3), claim_row(y, 4)];
            let first = committed(&mut s, async |s| made.claim(s, GROUP, SOURCE, &rows, Form::OnConflict).await).await;
            assert_eq!(first, [x, y]);
            assert!(committed(&mut s, async |s| made.claim(s, GROUP, SOURCE, &rows, Form::OnConflict).await).await.is_empty());
            let theirs = committed(&mut s, async |s| made.claim(s, "mail", SOURCE, &rows[..1], Form::OnConflict).await).await;
            assert_eq!(theirs.contains(&x), of_groups, "{key}");
            let seen = made.look_up(&mut s, GROUP, &[x]).await.unwrap();
            let claim = Seen { event_id: x, digest: None, source: None, offset: None };
            let digest = Some(rows[0].digest);
            let explained = Seen { digest, source: Some(SOURCE), offset: Some(Offset(3)), ..claim };
            assert_eq!(seen, [if explains { explained } else { claim }], "{key} {columns}");
            assert_eq!(committed(&mut s, async |s| processed_events::give_back(s, GROUP, &[x, y]).await).await, 2);
        }
    }
}

#[tokio::test]
async fn a_look_up_finds_the_claims_of_this_group_on_every_day() {
    let (_db, store) = Db::ready().await;
    let mut s = store.claims.get().await.unwrap();
    let [today, other, unclaimed] = ids();
    let tomorrow = id_of_day(1);
    let digest = EventDigest::new(3, 1 << 40);
    let rows = [today, tomorrow].map(|event_id| ClaimRow { event_id, digest, offset: Offset(9) });
    committed(&mut s, async |s| OURS.claim(s, GROUP, SOURCE, &rows, Form::OnConflict).await).await;
    committed(&mut s, async |s| OURS.claim(s, "mail", SOURCE, &[claim_row(other, 0)], Form::OnConflict).await).await;
    let mut seen = OURS.look_up(&mut s, GROUP, &[unclaimed, tomorrow, other, today]).await.unwrap();
    seen.sort_by_key(|seen| seen.event_id);
    let expect = |event_id| Seen { event_id, digest: Some(digest), source: Some(SOURCE), offset: Some(Offset(9)) };
    assert_eq!(seen, [expect(today), expect(tomorrow)]);
    assert_eq!(OURS.look_up(&mut s, GROUP, &[]).await.unwrap(), []);
}

// CASES E02: the second session waits for the first, and then knows.
#[tokio::test]
async fn a_claim_that_is_given_back_is_new_to_the_session_that_waited_for_it() {
    let (db, store) = Db::ready().await;
    let (mut first, mut second) = (store.claims.get().await.unwrap(), store.claims.get().await.unwrap());
    let [kept, given] = ids();
    let (claimed, is_claimed) = oneshot::channel();
    let holder = committed(&mut first, async |s| {
        claim(s, SOURCE, &[kept, given]).await?;
        claimed.send(()).unwrap();
        db.until("SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock')")
            .await;
        processed_events::give_back(s, GROUP, &[given]).await
    });
    let waiter = async {
        is_claimed.await.unwrap();
        committed(&mut second, async |s| claim(s, SourceId(2), &[kept, given]).await).await
    };
    let (there, new) = join(holder, waiter).await;
    assert_eq!((there, &new[..]), (1, &[given][..]));
}

#[tokio::test]
async fn giving_back_tells_how_many_claims_were_there() {
    let (_db, store) = Db::ready().await;
    let mut s = store.claims.get().await.unwrap();
    let [claimed, never] = ids();
    let given = committed(&mut s, async |s| {
        claim(s, SOURCE, &[claimed]).await?;
        processed_events::give_back(s, GROUP, &[claimed, never]).await
    });
    assert_eq!(given.await, 1);
}

// CASES E04
#[tokio::test]
async fn two_batches_in_opposite_order_never_deadlock() {
    let (_db, store) = Db::ready().await;
    let (mut first, mut second) = (store.claims.get().await.unwrap(), store.claims.get().await.unwrap());
    for _ in 0..60 {
        let forward: [Uuid; 64] = ids();
        let mut backward = forward;
        backward.reverse();
        let (a, b) = join(
            committed(&mut first, async |s| claim(s, SOURCE, &forward).await),
            committed(&mut second, async |s| claim(s, SourceId(2), &backward).await),
        )
        .await;
        assert_eq!(a.len() + b.len(), 64);
    }
}

// CASES E06
#[tokio::test]
async fn a_hundred_thousand_duplicates_leave_no_dead_rows() {
    let (db, store) = Db::ready().await;
    let mut s = store.claims.get().await.unwrap();
    let batch: [Uuid; 1_000] = ids();
    committed(&mut s, async |s| claim(s, SOURCE, &batch).await).await;
    for _ in 0..100 {
        assert_eq!(committed(&mut s, async |s| claim(s, SOURCE, &batch).await).await, ids::<0>());
    }
    s.batch_execute("SELECT pg_stat_force_next_flush()").await.unwrap();
    let outsider = db.outsider().await;
    let dead = "SELECT coalesce(sum(n_dead_tup), 0)::bigint, sum(n_tup_ins)::bigint FROM pg_stat_user_tables WHERE relname LIKE 'processed_event_%'";
    let row = outsider.query_one(dead, &[]).await.unwrap();
    assert_eq!((row.get::<_, i64>(0), row.get::<_, i64>(1)), (0, 1_000));
}

/// An unprepared statement halves the throughput, and nothing else would show it.
#[tokio::test]
async fn the_hot_statements_are_prepared_once() {
    let (_db, store) = Db::ready().await;
    let mut s = store.claims.get().await.unwrap();
    for _ in 0..3 {
        committed(&mut s, async |s| claim(s, SOURCE, &ids::<5>()).await).await;
    }
    use diesel::sql_types::BigInt;
    use diesel_async::RunQueryDsl;
    #[derive(diesel::QueryableByName)]
    struct Count {
        #[diesel(sql_type = BigInt)]
        count: i64,
    }
    let sql = "SELECT count(*) FROM pg_prepared_statements WHERE statement LIKE 'INSERT INTO processed_event%'";
    let prepared: Count = diesel::sql_query(sql).get_result(&mut *s).await.unwrap();
    assert_eq!(prepared.count, 1);
}

// R-KFK-IDEM-3. CASES E04
#[tokio::test]
async fn the_optimistic_form_claims_all_or_nothing_in_every_kind_of_table() {
    let (db, _) = Db::ready().await;
    let theirs = |key: &str, columns: &str| {
        format!(
            "DROP TABLE processed_event;
             CREATE TABLE processed_event (
                 event_id uuid NOT NULL, consumer_group text NOT NULL, processed_at timestamptz NOT NULL DEFAULT now(), {columns} {key})"
        )
    };
    let explained = "event_digest bigint, source_id integer, source_offset bigint,";
    for table in [
        String::new(),
        theirs("CONSTRAINT their_key PRIMARY KEY (event_id, consumer_group)", explained),
        theirs("UNIQUE (event_id)", explained),
        theirs("CONSTRAINT another_name UNIQUE (event_id)", ""),
    ] {
        db.outsider().await.batch_execute(&table).await.unwrap();
        // Prepared anew: the table behind the statements may be another.
        let store = Store::connect(&db.settings(), 1).unwrap();
        let mut s = store.claims.get().await.unwrap();
        let made = ClaimTable::read(&mut s).await.unwrap();
        let [known, new, later] = ids();
        let rows = |ids: &[Uuid]| ids.iter().zip(0..).map(|(id, offset)| claim_row(*id, offset)).collect::<Vec<_>>();
        let first = committed(&mut s, async |s| made.claim(s, GROUP, SOURCE, &rows(&[known]), Form::Optimistic).await).await;
        assert_eq!(first, [known], "{table}");
        for taken in [&[new, known][..], &[known, later], &[later, later]] {
            let error = refused(&mut s, async |s| made.claim(s, GROUP, SOURCE, &rows(taken), Form::Optimistic).await).await;
            assert!(error.is_taken(), "{table}: {error}");
        }
        let found = committed(&mut s, async |s| made.claim(s, GROUP, SOURCE, &rows(&[known, new]), Form::OnConflict).await).await;
        assert_eq!(found, [new], "the other form tells them apart on the same connection");
        let second = committed(&mut s, async |s| made.claim(s, GROUP, SOURCE, &rows(&[later]), Form::Optimistic).await).await;
        assert_eq!(second, [later], "nothing was left of the refused ones");
    }
}

#[tokio::test]
async fn a_row_that_a_trigger_swallows_is_not_claimed_by_the_optimistic_form() {
    let (db, store) = Db::ready().await;
    let outsider = db.outsider().await;
    let swallow = "CREATE FUNCTION swallow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
                   CREATE TRIGGER swallow BEFORE INSERT ON processed_event FOR EACH ROW WHEN (NEW.source_offset = 1) EXECUTE FUNCTION swallow()";
    outsider.batch_execute(swallow).await.unwrap();
    let mut s = store.claims.get().await.unwrap();
    let rows =
        ids::<3>().map(|id| claim_row(id, 0)).into_iter().zip(0..).map(|(row, offset)| ClaimRow { offset: Offset(offset), ..row });
    let rows: Vec<_> = rows.collect();
    let error = refused(&mut s, async |s| OURS.claim(s, GROUP, SOURCE, &rows, Form::Optimistic).await).await;
    assert!(error.is_taken(), "{error}");
    let new = committed(&mut s, async |s| OURS.claim(s, GROUP, SOURCE, &rows, Form::OnConflict).await).await;
    assert_eq!(new.len(), 2);
}

// CASES E02, E04
#[tokio::test]
async fn two_optimistic_batches_in_opposite_order_never_deadlock_and_one_of_them_has_all() {
    let (_db, store) = Db::ready().await;
    let (mut first, mut second) = (store.claims.get().await.unwrap(), store.claims.get().await.unwrap());
    for _ in 0..30 {
        let forward: [Uuid; 64] = ids();
        let mut backward = forward;
        backward.reverse();
        let claim = async |s: &mut Session, ids: &[Uuid]| {
            let rows: Vec<_> = ids.iter().map(|id| claim_row(*id, 0)).collect();
            s.transaction("test", &LIMITS, async |s| OURS.claim(s, GROUP, SOURCE, &rows, Form::Optimistic).await).await
        };
        let (a, b) = join(claim(&mut first, &forward), claim(&mut second, &backward)).await;
        let taken = [a, b].into_iter().filter_map(Result::err).map(TransactionError::into_inner).collect::<Vec<_>>();
        assert!(taken.len() == 1 && taken[0].is_taken(), "{taken:?}");
    }
}
