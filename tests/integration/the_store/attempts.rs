//! An attempt is durable before the provider hears of it, and lives until its event is paid.

use std::time::Duration;

use futures_util::future::{join, join_all};
use onceward::handler::EventDigest;
use onceward::record::{Epoch, SourceId};
use onceward::store::Form;
use onceward::store::attempts::{BegunAttempt, KnownAttempt, NewAttempt, convert_leftovers, convert_stale, open, settle};
use onceward::store::consumed_partitions::fence;
use onceward::store::payments::insert;
use tokio_postgres::Client;
use uuid::Uuid;

use super::payments::payment;
use super::{Db, committed, ids, own};

const DIGEST: EventDigest = EventDigest::new(1, 0xabc << 8);

fn attempt(event_id: Uuid, body: &str) -> NewAttempt {
    NewAttempt { event_id, digest: DIGEST, body: body.as_bytes().to_vec(), in_doubt: false }
}

fn begun(event_id: Uuid, body: &str) -> BegunAttempt {
    let (answer, provider_charge_id) = (Some("503".to_owned()), None);
    BegunAttempt { event_id, digest: DIGEST, body: body.as_bytes().to_vec(), unknown_answers: 1, answer, provider_charge_id }
}

/// (id, body, unknown answers, answer) of every left attempt, by id.
async fn left(outsider: &Client) -> Vec<(Uuid, Option<String>, i32, Option<String>)> {
    let sql = "SELECT event_id, convert_from(body, 'UTF8'), unknown_answers, answer FROM payment_attempt ORDER BY event_id";
    let rows = outsider.query(sql, &[]).await.unwrap();
    rows.iter().map(|row| (row.get(0), row.get(1), row.get(2), row.get(3))).collect()
}

async fn in_flight(outsider: &Client) -> i64 {
    outsider.query_one("SELECT count(*) FROM attempt_batch", &[]).await.unwrap().get(0)
}

#[tokio::test]
async fn an_attempt_is_durable_while_the_batch_holds_the_fence_and_a_stale_owner_opens_none() {
    let (db, store) = Db::ready().await;
    let (mut batch, mut side) = (store.claims.get().await.unwrap(), store.attempts.get().await.unwrap());
    let outsider = db.outsider().await;
    let (source, epoch) = own(&mut batch, 0).await;
    let [a] = ids();
    committed(&mut batch, async |s| {
        fence(s, source, epoch).await?.expect("ours");
        let opened = open(&mut side, source, epoch, &[attempt(a, "{}")]).await?.expect("ours");
        assert!(opened.attempts.is_empty() && opened.payments.is_empty());
        assert_eq!(in_flight(&outsider).await, 1);
        Ok(())
    })
    .await;
    own(&mut batch, 0).await;
    assert_eq!(open(&mut side, source, epoch, &[attempt(a, "{}")]).await.unwrap(), None);
    assert_eq!(open(&mut side, SourceId(source.0 + 1), Epoch(1), &[attempt(a, "{}")]).await.unwrap(), None);
    assert_eq!(in_flight(&outsider).await, 1);
}

#[tokio::test]
async fn opening_tells_what_is_known_of_the_events_wherever_it_is_known() {
    let (db, store) = Db::ready().await;
    let mut s = store.attempts.get().await.unwrap();
    let (here, epoch) = own(&mut s, 0).await;
    let (there, there_epoch) = own(&mut s, 1).await;
    let [paid, left_over, both, fresh, stranger] = ids();
    committed(&mut s, async |s| {
        insert(s, &[payment(paid, "1.00", "EUR"), payment(stranger, "2.00", "EUR")], Form::OnConflict).await
    })
    .await;
    let earlier = [attempt(left_over, "first"), attempt(both, "older")];
    open(&mut s, there, there_epoch, &earlier).await.unwrap().unwrap();
    convert_leftovers(&mut s, there).await.unwrap();
    db.outsider().await.batch_execute("UPDATE payment_attempt SET first_attempt_at = now() - interval '1 hour'").await.unwrap();
    let newer = NewAttempt { digest: EventDigest::new(1, 1 << 8), ..attempt(both, "newer") };
    open(&mut s, there, there_epoch, &[newer]).await.unwrap().unwrap();

    let batch = [paid, left_over, both, fresh].map(|id| attempt(id, "now"));
    let opened = open(&mut s, here, epoch, &batch).await.unwrap().unwrap();
    assert_eq!(opened.payments, [payment(paid, "1.00", "EUR")]);
    let known = |event_id, body: &str, unknown_answers, known: &KnownAttempt| KnownAttempt {
        event_id,
        digest: DIGEST,
        body: Some(body.as_bytes().to_vec()),
        first_attempt_age: known.first_attempt_age,
        last_attempt_age: known.last_attempt_age,
        unknown_answers,
        answer: None,
        provider_charge_id: None,
    };
    let [first, second] = opened.attempts.as_slice() else { panic!("{:?}", opened.attempts) };
    assert_eq!(*first, known(left_over, "first", 1, first));
    assert_eq!(*second, known(both, "older", 2, second), "the earliest time and its content, all unknown answers");
    let an_hour = Duration::from_secs(3_600)..Duration::from_secs(3_660);
    assert!(an_hour.contains(&first.first_attempt_age) && an_hour.contains(&second.first_attempt_age));
    assert!(second.last_attempt_age < Duration::from_secs(60), "the latest time of all");

    let again = open(&mut s, here, epoch, &batch).await.unwrap().unwrap();
    assert_eq!(again.attempts.len(), 2, "the owner's own earlier batch is no news to it");
    let (_, next_epoch) = own(&mut s, 0).await;
    let after_bump = open(&mut s, here, next_epoch, &batch).await.unwrap().unwrap();
    assert_eq!(after_bump.attempts.len(), 4, "what an earlier owner asked and nobody converted is known");
}

#[tokio::test]
async fn settling_keeps_what_has_no_payment_and_forgets_what_was_paid() {
    let (db, store) = Db::ready().await;
    let mut s = store.attempts.get().await.unwrap();
    let outsider = db.outsider().await;
    let (source, epoch) = own(&mut s, 0).await;
    let (other, other_epoch) = own(&mut s, 1).await;
    let [paid, unknown, not_begun] = ids();
    for _ in 0..2 {
        open(&mut s, source, epoch, &[paid, unknown, not_begun].map(|id| attempt(id, "bytes"))).await.unwrap().unwrap();
    }
    open(&mut s, other, other_epoch, &[attempt(paid, "elsewhere")]).await.unwrap().unwrap();
    outsider.batch_execute("UPDATE attempt_batch SET started_at = now() - id * interval '1 hour'").await.unwrap();
    committed(&mut s, async |s| settle(s, source, &[begun(unknown, "bytes")], &[]).await).await;
    assert_eq!(left(&outsider).await, [(unknown, Some("bytes".to_owned()), 1, Some("503".to_owned()))]);
    assert_eq!(in_flight(&outsider).await, 1, "other partitions' rows are theirs");
    let age = "SELECT now() - first_attempt_at > interval '119 minutes' AND last_attempt_at > now() - interval '1 minute' FROM payment_attempt";
    assert!(outsider.query_one(age, &[]).await.unwrap().get::<_, bool>(0), "the earliest of the rows that went");

    open(&mut s, source, epoch, &[attempt(unknown, "other bytes")]).await.unwrap().unwrap();
    let second = BegunAttempt {
        answer: None,
        unknown_answers: 2,
        provider_charge_id: Some("ch\0".to_owned()),
        ..begun(unknown, "other bytes")
    };
    committed(&mut s, async |s| settle(s, source, &[second], &[]).await).await;
    assert_eq!(left(&outsider).await, [(unknown, Some("bytes".to_owned()), 3, Some("503".to_owned()))], "the first bytes stay");
    assert!(outsider.query_one(age, &[]).await.unwrap().get::<_, bool>(0));

    open(&mut s, source, epoch, &[attempt(unknown, "bytes")]).await.unwrap().unwrap();
    committed(&mut s, async |s| settle(s, source, &[], &[unknown, paid]).await).await;
    assert_eq!(left(&outsider).await, []);
    assert_eq!(in_flight(&outsider).await, 1);
}

#[tokio::test]
async fn what_a_crash_left_is_one_unknown_answer_each_unless_it_was_paid() {
    let (db, store) = Db::ready().await;
    let mut s = store.attempts.get().await.unwrap();
    let outsider = db.outsider().await;
    let (source, epoch) = own(&mut s, 0).await;
    let [paid, once, twice] = ids();
    open(&mut s, source, epoch, &[attempt(paid, "a"), attempt(twice, "b")]).await.unwrap().unwrap();
    outsider.batch_execute("UPDATE attempt_batch SET started_at = now() - interval '1 hour'").await.unwrap();
    open(&mut s, source, epoch, &[attempt(once, "c"), attempt(twice, "later")]).await.unwrap().unwrap();
    committed(&mut s, async |s| insert(s, &[payment(paid, "1.00", "EUR")], Form::OnConflict).await).await;
    assert_eq!(convert_leftovers(&mut s, SourceId(source.0 + 1)).await.unwrap(), 0);
    assert_eq!(convert_leftovers(&mut s, source).await.unwrap(), 2);
    assert_eq!(left(&outsider).await, [(once, Some("c".to_owned()), 1, None), (twice, Some("b".to_owned()), 2, None)]);
    assert_eq!(in_flight(&outsider).await, 0);
    assert_eq!(convert_leftovers(&mut s, source).await.unwrap(), 0);
}

#[tokio::test]
async fn only_one_of_several_converters_converts() {
    let (db, store) = Db::ready().await;
    let mut s = store.attempts.get().await.unwrap();
    let outsider = db.outsider().await;
    let (source, epoch) = own(&mut s, 0).await;
    let events: [Uuid; 100] = ids();
    for _ in 0..10 {
        open(&mut s, source, epoch, &events.map(|id| attempt(id, "x"))).await.unwrap().unwrap();
        let converters = join_all((0..2).map(|_| async {
            let mut s = store.control.get().await.unwrap();
            convert_leftovers(&mut s, source).await.unwrap()
        }));
        let stale = async { convert_stale(&mut store.claims.get().await.unwrap(), Duration::ZERO).await.unwrap() };
        let (converted, stale) = join(converters, stale).await;
        assert_eq!(converted.iter().sum::<u64>() + stale, 100, "{converted:?} {stale}");
    }
    assert!(left(&outsider).await.iter().all(|(_, _, unknown, _)| *unknown == 10));
}

#[tokio::test]
async fn only_stale_batches_are_converted_by_time_whoever_owns_them() {
    let (db, store) = Db::ready().await;
    let mut s = store.attempts.get().await.unwrap();
    let outsider = db.outsider().await;
    let [old, older, young] = ids();
    for (partition, id, age) in [(0, old, 30), (1, older, 60), (2, young, 0)] {
        let (source, epoch) = own(&mut s, partition).await;
        open(&mut s, source, epoch, &[attempt(id, "x")]).await.unwrap().unwrap();
        let set_age = format!("UPDATE attempt_batch SET started_at = now() - interval '{age} s' WHERE source_id = {source}");
        outsider.batch_execute(&set_age).await.unwrap();
    }
    assert_eq!(convert_stale(&mut s, Duration::from_secs(20)).await.unwrap(), 2);
    assert_eq!(left(&outsider).await.iter().map(|row| row.0).collect::<Vec<_>>(), [old, older]);
    assert_eq!(in_flight(&outsider).await, 1);
}

/// A batch that settles late and a timer that converts its attempts: whoever comes second finds the rows gone.
#[tokio::test]
async fn a_batch_that_settles_while_its_attempts_are_converted_leaves_none_of_what_it_paid() {
    let (db, store) = Db::ready().await;
    let (mut s, mut timer) = (store.claims.get().await.unwrap(), store.control.get().await.unwrap());
    let outsider = db.outsider().await;
    let (source, epoch) = own(&mut s, 0).await;
    for settles_first in [true, false] {
        let [paid] = ids();
        open(&mut s, source, epoch, &[attempt(paid, "x")]).await.unwrap().unwrap();
        let mut converting = None;
        committed(&mut s, async |s| {
            if !settles_first {
                assert_eq!(convert_stale(&mut timer, Duration::ZERO).await?, 1);
            }
            insert(s, &[payment(paid, "1.00", "EUR")], Form::OnConflict).await?;
            settle(s, source, &[], &[paid]).await?;
            if settles_first {
                let store = store.clone();
                converting = Some(tokio::spawn(async move {
                    convert_stale(&mut store.attempts.get().await.unwrap(), Duration::ZERO).await.unwrap()
                }));
                let waits =
                    "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock')";
                db.until(waits).await;
            }
            Ok(())
        })
        .await;
        if let Some(converting) = converting {
            assert_eq!(converting.await.unwrap(), 0);
        }
        assert_eq!(left(&outsider).await, []);
        assert_eq!(in_flight(&outsider).await, 0);
    }
}

// CASES G03
#[tokio::test]
async fn an_event_in_doubt_has_an_attempt_as_old_as_its_id_before_anybody_is_called() {
    let (db, store) = Db::ready().await;
    let mut s = store.attempts.get().await.unwrap();
    let outsider = db.outsider().await;
    let (source, epoch) = own(&mut s, 0).await;
    let [now, paid, asked, refused] = ids();
    let old = Uuid::from_u128(now.as_u128() - (7_200_000 << 80));
    let ahead = Uuid::from_u128(now.as_u128() + (7_200_000 << 80));
    committed(&mut s, async |s| insert(s, &[payment(paid, "1.00", "EUR")], Form::OnConflict).await).await;
    let definite = BegunAttempt { unknown_answers: 0, ..begun(refused, "stored") };
    committed(&mut s, async |s| settle(s, source, &[begun(asked, "stored"), definite], &[]).await).await;
    let doubted = [old, ahead, paid, asked, refused].map(|id| NewAttempt { in_doubt: true, ..attempt(id, "now") });
    let opened = open(&mut s, source, epoch, &doubted).await.unwrap().unwrap();
    assert_eq!(opened.payments, [payment(paid, "1.00", "EUR")]);
    let known: Vec<_> = opened.attempts.iter().map(|known| (known.event_id, known.body.clone(), known.unknown_answers)).collect();
    let stored = Some(b"stored".to_vec());
    let expected = [(old, None, 1), (asked, stored.clone(), 1), (refused, stored, 1), (ahead, None, 1)];
    assert_eq!(known, expected, "the bytes stay, and no refusal is the last word");
    let ages: Vec<u64> = opened.attempts.iter().map(|known| known.first_attempt_age.as_secs() / 60).collect();
    assert_eq!(ages, [120, 0, 0, 0], "as old as the id, and never younger than now");
    assert!(opened.attempts.iter().all(|known| known.last_attempt_age < Duration::from_secs(60)), "nobody knows when it was last");
    assert_eq!(left(&outsider).await.len(), 4, "durable");

    let (_, next) = own(&mut s, 0).await;
    let [fresh] = ids();
    let stale = NewAttempt { in_doubt: true, ..attempt(fresh, "now") };
    assert_eq!(open(&mut s, source, epoch, std::slice::from_ref(&stale)).await.unwrap(), None);
    assert_eq!(left(&outsider).await.len(), 4, "a stale owner doubts nothing");
    open(&mut s, source, next, &[stale]).await.unwrap().unwrap();
    assert_eq!(left(&outsider).await.len(), 5);
}
