//! Held records come back exactly, when they are due and in their order.

use std::time::Duration;

use onceward::handler::HeldReason;
use onceward::record::{Offset, Record, SourceId};
use onceward::store::Session;
use onceward::store::held_events::{HeldState, HeldUpdate, NewHeld, counts, hold, update};
use onceward::store::held_requests::{self, CarriedOut, Filter};
use onceward::store::held_turns::{OpenHeld, discarded, lock_due, open};

use super::{Db, GROUP, TOPIC, committed, own};

fn record(offset: i64) -> Record {
    Record {
        partition: 0,
        offset: Offset(offset),
        timestamp_ms: Some(1_700_000_000_000),
        key: Some(offset.to_string().into_bytes().into()),
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
    let due = committed(s, async |s| lock_due(s, source, 100, false).await).await;
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
    let due = committed(&mut s, async |s| lock_due(s, source, 100, false).await).await;
    assert!(due.iter().map(|due| &due.record).eq(&records));
    assert!(due.iter().all(|due| due.owns_claim && due.attempts == 1 && due.first_tried_age < Duration::from_secs(60)));
    let text: String =
        db.outsider().await.query_one("SELECT DISTINCT error || provider_charge_id FROM held_event", &[]).await.unwrap().get(0);
    assert_eq!(text, format!("{}ch_1", "é".repeat(2_000)));
}

#[tokio::test]
async fn a_record_is_held_once_and_a_record_of_another_content_at_its_offset_is_another() {
    let (_db, store) = Db::ready().await;
    let mut s = store.claims.get().await.unwrap();
    let (source, _) = own(&mut s, 0).await;
    let (first, other) = (record(7), Record { key: None, ..record(7) });
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
    assert_eq!(open(&mut s, source).await.unwrap().next_due, None);

    let records: Vec<_> = [30, 10, 20, 40, 50].map(record).into();
    let later = |record, seconds| NewHeld { next_attempt_in: Some(Duration::from_secs(seconds)), ..held(record) };
    let parked = NewHeld { state: HeldState::Parked, ..held(&records[4]) };
    committed(&mut s, async |s| hold(s, source, &[later(&records[3], 3_600)]).await).await;
    let in_an_hour = open(&mut s, source).await.unwrap().next_due.unwrap();
    assert!(in_an_hour > Duration::from_secs(3_500) && in_an_hour <= Duration::from_secs(3_600), "{in_an_hour:?}");
    let now = [held(&records[0]), held(&records[1]), later(&records[2], 0), parked];
    committed(&mut s, async |s| hold(s, source, &now).await).await;
    committed(&mut s, async |s| hold(s, elsewhere, &[held(&records[0])]).await).await;

    let found = due(&mut s, source).await;
    assert_eq!(found.iter().map(|(_, offset, _)| *offset).collect::<Vec<_>>(), [30, 10, 20]);
    assert_eq!(open(&mut s, source).await.unwrap().next_due, Some(Duration::ZERO));
    assert_eq!(committed(&mut s, async |s| lock_due(s, source, 2, false).await).await.len(), 2);

    let locked = "SELECT count(*) FROM (SELECT FROM held_event WHERE source_id = $1 FOR UPDATE SKIP LOCKED) AS free";
    let outsider = db.outsider().await;
    committed(&mut s, async |s| {
        lock_due(s, source, 2, false).await?;
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
            (HeldReason::Retryable, HeldState::Retrying, 2),
            (HeldReason::Unknown, HeldState::Retrying, 1),
        ]
    );
    assert_eq!(counts(&mut s, "another group", TOPIC).await.unwrap(), []);
}

#[tokio::test]
async fn every_reason_and_state_can_be_stored_and_what_is_open_is_counted() {
    let (_db, store) = Db::ready().await;
    let mut s = store.claims.get().await.unwrap();
    let (source, _) = own(&mut s, 0).await;
    let kinds = HeldReason::ALL.into_iter().flat_map(|reason| HeldState::ALL.map(|state| (reason, state)));
    let records: Vec<_> = kinds.clone().zip(0..).map(|(_, offset)| record(offset)).collect();
    let rows: Vec<_> =
        kinds.clone().zip(&records).map(|((reason, state), record)| NewHeld { reason, state, ..held(record) }).collect();
    committed(&mut s, async |s| hold(s, source, &rows).await).await;
    let counted = counts(&mut s, GROUP, TOPIC).await.unwrap();
    let open: Vec<_> = kinds.filter(|(_, state)| state.is_open()).collect();
    assert!(counted.len() == open.len() && open.into_iter().all(|(reason, state)| counted.contains(&(reason, state, 1))));
}

/// A record of a key at an offset.
fn keyed(key: Option<&[u8]>, offset: i64) -> Record {
    Record { key: key.map(Into::into), ..record(offset) }
}

#[tokio::test]
async fn of_one_key_nothing_runs_before_what_holds_it_up_and_what_stands_aside_holds_nobody_up() {
    let (db, store) = Db::ready().await;
    let mut s = store.claims.get().await.unwrap();
    let (source, _) = own(&mut s, 0).await;
    let (a, b) = (Some(&b"a"[..]), Some(&b"b"[..]));
    let records: Vec<Record> = [a, a, b, b, None, None, a].into_iter().zip(0..).map(|(key, offset)| keyed(key, offset)).collect();
    let waiting = |record| NewHeld { state: HeldState::Waiting, reason: HeldReason::Behind, attempts: 0, ..held(record) };
    let hour = Some(Duration::from_secs(3_600));
    let rows = [
        NewHeld { next_attempt_in: hour, ..held(&records[0]) },
        waiting(&records[1]),
        NewHeld { state: HeldState::Parked, reason: HeldReason::Rejected, ..held(&records[2]) },
        held(&records[3]),
        NewHeld { state: HeldState::Parked, ..held(&records[4]) },
        held(&records[5]),
        waiting(&records[6]),
    ];
    committed(&mut s, async |s| hold(s, source, &rows).await).await;
    let offsets = async |s: &mut Session| due(s, source).await.into_iter().map(|(_, offset, _)| offset).collect::<Vec<_>>();
    assert_eq!(offsets(&mut s).await, [3, 5], "a rejected event holds nobody up, nor does one without a key");
    let now = open(&mut s, source).await.unwrap();
    let keys = [&records[0], &records[2]].map(|record| record.key_digest().unwrap());
    let expected =
        OpenHeld { count: 7, next_due: Some(Duration::ZERO), has_turn: false, sequences: keys.into(), last_discarded: None };
    assert_eq!(now, expected);

    // The head is due: it comes with all that stand behind it.
    let outsider = db.outsider().await;
    outsider.batch_execute("UPDATE held_event SET next_attempt_at = now() WHERE source_offset = 0").await.unwrap();
    assert_eq!(offsets(&mut s).await, [0, 1, 3, 5, 6]);
    // It is parked for good: they wait for a person, and so does whatever is due behind it.
    outsider
        .batch_execute("UPDATE held_event SET state = 'parked' WHERE source_offset IN (0, 3, 5); UPDATE held_event SET state = 'retrying' WHERE source_offset = 6")
        .await
        .unwrap_err(); // a retrying event has a time
    outsider
        .batch_execute(
            "UPDATE held_event SET state = 'parked' WHERE source_offset IN (0, 3, 5);
             UPDATE held_event SET state = 'retrying', next_attempt_at = now() WHERE source_offset = 6",
        )
        .await
        .unwrap();
    assert_eq!(offsets(&mut s).await, [0_i64; 0]);
    let now = open(&mut s, source).await.unwrap();
    assert_eq!((now.next_due, now.has_turn, now.sequences.len()), (None, false, 2), "nothing to look for until a person decides");
    // It is settled.
    outsider.batch_execute("UPDATE held_event SET state = 'applied' WHERE source_offset = 0").await.unwrap();
    assert!(open(&mut s, source).await.unwrap().has_turn);
    assert_eq!(offsets(&mut s).await, [1, 6]);
}

#[tokio::test]
async fn a_stopped_partition_runs_what_is_asked_for_and_nothing_overtakes_what_it_leaves() {
    let (_db, store) = Db::ready().await;
    let mut s = store.claims.get().await.unwrap();
    let (source, _) = own(&mut s, 0).await;
    let records: Vec<Record> = [&b"a"[..], b"a", b"b"].into_iter().zip(0..).map(|(key, offset)| keyed(Some(key), offset)).collect();
    let queued = |record| NewHeld { state: HeldState::Queued, ..held(record) };
    committed(&mut s, async |s| hold(s, source, &[held(&records[0]), queued(&records[1]), queued(&records[2])]).await).await;
    let rows = committed(&mut s, async |s| lock_due(s, source, 100, true).await).await;
    assert_eq!(rows.iter().map(|row| row.record.offset.0).collect::<Vec<_>>(), [2]);
}

#[tokio::test]
async fn a_request_is_written_on_a_row_that_is_as_it_was_seen_and_once() {
    let (db, store) = Db::ready().await;
    let mut s = store.claims.get().await.unwrap();
    let (source, _) = own(&mut s, 0).await;
    let records = [0, 1].map(record);
    let parked = records.each_ref().map(|record| NewHeld { state: HeldState::Parked, ..held(record) });
    committed(&mut s, async |s| hold(s, source, &parked).await).await;
    let rows = held_requests::find(&mut s, GROUP, TOPIC, &Filter::default(), 0, 10).await.unwrap();
    let seen: Vec<_> = rows.iter().map(|row| (row.id, row.state)).collect();
    db.outsider().await.batch_execute("UPDATE held_event SET state = 'applied' WHERE source_offset = 1").await.unwrap();
    let taken = held_requests::request(&mut s, &seen, "replay", "ann", "it is mended").await.unwrap();
    assert_eq!(taken.into_iter().collect::<Vec<_>>(), [seen[0].0]);
    assert!(held_requests::request(&mut s, &seen, "discard", "bob", "no").await.unwrap().is_empty(), "one request at a time");
    let wanted = async |s: &mut Session| held_requests::wanted(s, (GROUP, TOPIC), &[0, 1]).await.unwrap();
    assert_eq!(wanted(&mut s).await, [(0, false)]);

    committed(&mut s, async |s| {
        let requests = held_requests::lock(s, source, 10).await?;
        assert_eq!(requests.iter().map(|r| (r.wanted.as_str(), r.actor.as_str())).collect::<Vec<_>>(), [("replay", "ann")]);
        held_requests::carry_out(s, &[(requests[0].id, CarriedOut::Queued)]).await
    })
    .await;
    assert_eq!(wanted(&mut s).await, []);
    let row = held_requests::find(&mut s, GROUP, TOPIC, &Filter::default(), 0, 1).await.unwrap().remove(0);
    let told = (row.state, row.wanted, row.actor.as_deref(), row.note.as_deref());
    assert_eq!(told, (HeldState::Queued, None, Some("ann"), Some("it is mended")));
    assert!(open(&mut s, source).await.unwrap().has_turn);
}

#[tokio::test]
async fn only_discarded_records_without_a_claim_are_told_when_they_are_read_again() {
    let (_db, store) = Db::ready().await;
    let mut s = store.claims.get().await.unwrap();
    let (source, _) = own(&mut s, 0).await;
    let records: Vec<Record> = (0..4).map(record).collect();
    let discard = |record, owns_claim| NewHeld { state: HeldState::Discarded, owns_claim, ..held(record) };
    let rows = [
        discard(&records[0], false),
        discard(&records[1], true),
        NewHeld { state: HeldState::Parked, ..discard(&records[2], false) },
    ];
    committed(&mut s, async |s| hold(s, source, &rows).await).await;
    let asked: Vec<_> = records.iter().map(|record| (record.offset, record.digest())).collect();
    assert_eq!(discarded(&mut s, source, &asked).await.unwrap().into_iter().collect::<Vec<_>>(), asked[..1]);
    let other = Record { payload: None, ..record(0) };
    assert!(discarded(&mut s, source, &[(other.offset, other.digest())]).await.unwrap().is_empty(), "another record at its offset");
    assert_eq!(open(&mut s, source).await.unwrap().last_discarded, Some(Offset(0)));
}
