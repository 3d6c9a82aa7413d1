//! Held records come back exactly, when they are due and in their order.

use std::time::Duration;

use onceward::handler::HeldReason;
use onceward::record::{Offset, Record, SourceId};
use onceward::store::Session;
use onceward::store::held_events::{HeldState, HeldUpdate, NewHeld, counts, hold, lock_due, next_due, update};

use super::{Db, GROUP, TOPIC, committed, own};

fn record(offset: i64) -> Record {
    Record {
        partition: 0,
        offset: Offset(offset),
        timestamp_ms: Some(1_700_000_000_000),
        key: Some(b"key"[..].into()),
        headers: Box::default(),
        payload: Some(b"{}"[..].into()),
    }
}

fn held(record: &Record) -> NewHeld<'_> {
    NewHeld {
        record,
        digest: record.digest(),
        event_id: None,
        reason: HeldReason::Retryable,
        error: "try again",
        state: HeldState::Retrying,
        owns_claim: true,
        provider_charge_id: None,
        attempts: 1,
        next_attempt_in: None,
    }
}

async fn due(s: &mut Session, source: SourceId) -> Vec<(i64, i64, i32)> {
    let due = committed(s, async |s| lock_due(s, source, 100).await).await;
    due.into_iter().map(|due| (due.id, due.record.offset.0, due.attempts)).collect()
}

// CASES A15, E12, F08
#[tokio::test]
async fn hostile_bytes_come_back_exactly_and_no_error_text_is_refused() {
    let (db, store) = Db::ready().await;
    let mut s = store.claims.get().await.unwrap();
    let (source, _) = own(&mut s, 0).await;
    let bytes: Vec<u8> = (0..=255).collect();
    let many = (0..10_000_u32).map(|n| (n.to_le_bytes()[..].into(), None));
    let records = [
        Record { key: Some(bytes.as_slice().into()), payload: Some(bytes.as_slice().into()), ..record(0) },
        Record { key: None, payload: None, timestamp_ms: None, ..record(1) },
        Record { key: Some(Box::default()), payload: Some(Box::default()), timestamp_ms: Some(i64::MIN), ..record(i64::MAX) },
        Record { headers: many.chain([(b"\xff\xfe\0"[..].into(), Some(bytes.as_slice().into()))]).collect(), ..record(3) },
        Record { payload: Some(vec![0; 3 << 20].into()), ..record(4) },
    ];
    let error = format!("\0{}\0\u{10ffff}", "é".repeat(5_000));
    let rows: Vec<_> =
        records.iter().map(|record| NewHeld { error: &error, provider_charge_id: Some("ch\0_1"), ..held(record) }).collect();
    committed(&mut s, async |s| hold(s, source, &rows).await).await;
    let due = committed(&mut s, async |s| lock_due(s, source, 100).await).await;
    assert!(due.iter().map(|due| &due.record).eq(&records));
    assert!(due.iter().all(|due| due.owns_claim && due.attempts == 1 && due.first_held_age < Duration::from_secs(60)));
    let text: String =
        db.outsider().await.query_one("SELECT DISTINCT error || provider_charge_id FROM held_event", &[]).await.unwrap().get(0);
    assert_eq!(text, format!("{}ch_1", "é".repeat(2_000)));
}

#[tokio::test]
async fn a_record_is_held_once_and_a_record_of_another_content_at_its_offset_is_another() {
    let (_db, store) = Db::ready().await;
    let mut s = store.claims.get().await.unwrap();
    let (source, _) = own(&mut s, 0).await;
    let (first, other) = (record(7), Record { payload: None, ..record(7) });
    for state in [HeldState::Parked, HeldState::Retrying] {
        let rows = [NewHeld { state, ..held(&first) }];
        committed(&mut s, async |s| hold(s, source, &rows).await).await;
    }
    assert_eq!(counts(&mut s, GROUP, TOPIC).await.unwrap(), [(HeldReason::Retryable, HeldState::Parked, 1)]);
    committed(&mut s, async |s| hold(s, source, &[held(&other)]).await).await;
    assert_eq!(due(&mut s, source).await.len(), 1);
}

// A record that was held unread (an id from the future, say) comes again in a replay, is claimed, and its call ends unknown.
#[tokio::test]
async fn a_record_that_was_held_without_a_claim_is_held_anew_once_it_has_one() {
    let (_db, store) = Db::ready().await;
    let mut s = store.claims.get().await.unwrap();
    let (source, _) = own(&mut s, 0).await;
    let record = record(7);
    let without = NewHeld { reason: HeldReason::Future, state: HeldState::Parked, owns_claim: false, ..held(&record) };
    let with = NewHeld { reason: HeldReason::Unknown, state: HeldState::Retrying, owns_claim: true, ..held(&record) };
    for rows in [[without.clone()], [with], [without]] {
        committed(&mut s, async |s| hold(s, source, &rows).await).await;
    }
    assert_eq!(counts(&mut s, GROUP, TOPIC).await.unwrap(), [(HeldReason::Unknown, HeldState::Retrying, 1)]);
    assert_eq!(due(&mut s, source).await.len(), 1, "it is tried again");
}

#[tokio::test]
async fn what_is_due_comes_in_the_order_it_was_held_and_the_rest_says_when() {
    let (db, store) = Db::ready().await;
    let mut s = store.claims.get().await.unwrap();
    let (source, _) = own(&mut s, 0).await;
    let (elsewhere, _) = own(&mut s, 1).await;
    assert_eq!(next_due(&mut s, source).await.unwrap(), None);

    let records: Vec<_> = [30, 10, 20, 40, 50].map(record).into();
    let later = |record, seconds| NewHeld { next_attempt_in: Some(Duration::from_secs(seconds)), ..held(record) };
    let waiting = NewHeld { state: HeldState::Waiting, ..held(&records[4]) };
    committed(&mut s, async |s| hold(s, source, &[later(&records[3], 3_600)]).await).await;
    let in_an_hour = next_due(&mut s, source).await.unwrap().unwrap();
    assert!(in_an_hour > Duration::from_secs(3_500) && in_an_hour <= Duration::from_secs(3_600), "{in_an_hour:?}");
    let now = [held(&records[0]), held(&records[1]), later(&records[2], 0), waiting];
    committed(&mut s, async |s| hold(s, source, &now).await).await;
    committed(&mut s, async |s| hold(s, elsewhere, &[held(&records[0])]).await).await;

    let found = due(&mut s, source).await;
    assert_eq!(found.iter().map(|(_, offset, _)| *offset).collect::<Vec<_>>(), [30, 10, 20]);
    assert_eq!(next_due(&mut s, source).await.unwrap(), Some(Duration::ZERO));
    assert_eq!(committed(&mut s, async |s| lock_due(s, source, 2).await).await.len(), 2);

    let locked = "SELECT count(*) FROM (SELECT FROM held_event WHERE source_id = $1 FOR UPDATE SKIP LOCKED) AS free";
    let outsider = db.outsider().await;
    committed(&mut s, async |s| {
        lock_due(s, source, 2).await?;
        assert_eq!(outsider.query_one(locked, &[&source.0]).await.unwrap().get::<_, i64>(0), 3);
        Ok(())
    })
    .await;
}

#[tokio::test]
async fn each_update_moves_its_own_row_and_only_what_was_tried_counts() {
    let (db, store) = Db::ready().await;
    let mut s = store.claims.get().await.unwrap();
    let (source, _) = own(&mut s, 0).await;
    let records = [0, 1, 2, 3, 4].map(record);
    let rows: Vec<_> = records.iter().map(held).collect();
    committed(&mut s, async |s| hold(s, source, &rows).await).await;
    let ids: Vec<i64> = due(&mut s, source).await.into_iter().map(|(id, ..)| id).collect();
    let hour = Duration::from_secs(3_600);
    let updates = [
        (ids[3], HeldUpdate::Later { wait: hour }),
        (ids[0], HeldUpdate::Applied { note: Some("duplicate") }),
        (
            ids[1],
            HeldUpdate::Retrying { error: "no\0 answer".to_owned(), reason: HeldReason::Unknown, next_attempt_in: Duration::MAX },
        ),
        (ids[2], HeldUpdate::Parked { reason: HeldReason::Rejected, error: "refused".to_owned(), charge_id: None }),
    ];
    committed(&mut s, async |s| update(s, &updates).await).await;
    let sql =
        "SELECT state, reason, error, note, attempts, next_attempt_at > now() + interval '50 minutes' FROM held_event ORDER BY id";
    type Row = (String, String, String, Option<String>, i32, Option<bool>);
    let rows: Vec<Row> = db
        .outsider()
        .await
        .query(sql, &[])
        .await
        .unwrap()
        .iter()
        .map(|row| (row.get(0), row.get(1), row.get(2), row.get(3), row.get(4), row.get(5)))
        .collect();
    let row = |state: &str, reason: &str, error: &str, note: Option<&str>, attempts, later| {
        (state.to_owned(), reason.to_owned(), error.to_owned(), note.map(str::to_owned), attempts, later)
    };
    assert_eq!(
        rows,
        [
            row("applied", "retryable", "try again", Some("duplicate"), 2, None),
            row("retrying", "unknown", "no answer", None, 2, Some(true)),
            row("parked", "rejected", "refused", None, 2, None),
            row("retrying", "retryable", "try again", None, 1, Some(true)),
            row("retrying", "retryable", "try again", None, 1, Some(false)),
        ]
    );
    assert_eq!(due(&mut s, source).await, [(ids[4], 4, 1)]);
    let mut counted = counts(&mut s, GROUP, TOPIC).await.unwrap();
    counted.sort_by_key(|(reason, state, _)| (reason.as_str(), state.as_str()));
    assert_eq!(
        counted,
        [
            (HeldReason::Rejected, HeldState::Parked, 1),
            (HeldReason::Retryable, HeldState::Applied, 1),
            (HeldReason::Retryable, HeldState::Retrying, 2),
            (HeldReason::Unknown, HeldState::Retrying, 1),
        ]
    );
    assert_eq!(counts(&mut s, "another group", TOPIC).await.unwrap(), []);
}

#[tokio::test]
async fn every_reason_and_state_can_be_stored_and_counted() {
    let (_db, store) = Db::ready().await;
    let mut s = store.claims.get().await.unwrap();
    let (source, _) = own(&mut s, 0).await;
    let kinds = HeldReason::ALL.into_iter().flat_map(|reason| HeldState::ALL.map(|state| (reason, state)));
    let records: Vec<_> = kinds.clone().zip(0..).map(|(_, offset)| record(offset)).collect();
    let rows: Vec<_> =
        kinds.clone().zip(&records).map(|((reason, state), record)| NewHeld { reason, state, ..held(record) }).collect();
    committed(&mut s, async |s| hold(s, source, &rows).await).await;
    let counted = counts(&mut s, GROUP, TOPIC).await.unwrap();
    assert!(counted.len() == records.len() && kinds.into_iter().all(|(reason, state)| counted.contains(&(reason, state, 1))));
}
