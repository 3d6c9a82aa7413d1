//! What the engine itself does for an event, without a network or a disk: record, window, decoding, batch.
//!
//! In: a number of batches. Out: nothing; `scripts/instructions` counts what it takes. The same work each time, whatever the machine.
//!
//! Invariant: every event is new and is settled, or it panics.

use std::collections::HashSet;
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use onceward::event::{self, OrderConfirmed};
use onceward::handler::{BatchContext, Claimed, Handler, Outcome, Rejection};
use onceward::held::RetryPolicy;
use onceward::pipeline::batch::Batch;
use onceward::pipeline::window::{Buffer, Handed, Share, Window};
use onceward::record::{NextOffset, Offset, Record, Skips};
use onceward::store::consumed_partitions::Doubt;
use onceward::store::{DbError, Session};
use uuid::Uuid;

/// Events of a batch, as by default.
const BATCH: i64 = 512;

const RETRY: RetryPolicy = RetryPolicy {
    max_attempts: 20,
    max_age: Duration::from_secs(3_600),
    backoff_min: Duration::from_secs(1),
    backoff_max: Duration::from_secs(60),
};

struct Decodes;

impl Handler for Decodes {
    type Event = OrderConfirmed;
    type Answer = ();

    fn decode(&self, record: &Record) -> Result<OrderConfirmed, Rejection> {
        event::decode(record.payload.as_deref())
    }

    async fn apply(&self, _: &mut Session, _: &BatchContext<()>, _: &[Claimed<OrderConfirmed>]) -> Result<Vec<Outcome>, DbError> {
        unreachable!("there is no database")
    }
}

fn main() {
    let batches = std::env::args().find_map(|argument| argument.parse().ok()).unwrap_or(100);
    let (buffer, share) = (Buffer::new(usize::MAX, std::sync::mpsc::channel().0), Share::default());
    let mut window = Window::positioned(NextOffset(0));
    for batch in 0..batches {
        settle(&mut window, batch * BATCH, &buffer, &share);
    }
    assert_eq!(window.frontier().next_offset, NextOffset(batches * BATCH));
}

/// One batch from the poll thread's records to the frontier.
fn settle(window: &mut Window, first: i64, buffer: &Buffer, share: &Share) {
    let records = (first..first + BATCH).map(|offset| buffer.admit(record(offset), share)).collect::<Vec<Arc<_>>>();
    window.offer(Handed { after: NextOffset(first), records }).expect("they follow on what is there");
    let lent = window.take(BATCH as usize).expect("there are some");
    let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
    let mut batch = Batch::decode(&Decodes, lent.records(), &Skips::default(), now, Duration::from_secs(60), &HashSet::new());
    let rows = black_box(batch.claims());
    assert_eq!(rows.len() as i64, BATCH);
    batch.wait_behind(&HashSet::new());
    let claimed = batch.take_claimed(&Doubt::default());
    batch.conclude(claimed.iter().map(|_| Outcome::Applied).collect(), &RETRY);
    black_box(claimed);
    assert_eq!(batch.counts().applied as i64, BATCH);
    let (held, given_back) = (batch.held(), batch.given_back());
    assert!(held.is_empty());
    black_box((lent.made_first(), lent.frontier(&given_back)));
    window.settle(&given_back);
}

/// What the Kafka client gives, copied.
fn record(offset: i64) -> Record {
    let ms = 1_700_000_000_000 + offset.unsigned_abs() / 100;
    let id = Uuid::from_u128(u128::from(ms) << 80 | 7 << 76 | 2 << 62 | u128::from(offset.unsigned_abs()));
    let payload = format!(
        r#"{{"eventId":"{id}","eventType":"order.confirmed.v1","occurredAt":"2023-11-14T22:13:20.123456Z","aggregateType":"Order","orderId":{},"customerId":{},"totalAmount":{}.{:02},"currency":"EUR"}}"#,
        1_700_000_000_000_000 + offset,
        1 + offset * 104_729 % 1_000_000,
        offset % 500,
        1 + offset % 99
    );
    Record {
        partition: 0,
        offset: Offset(offset),
        timestamp_ms: Some(ms.cast_signed()),
        key: Some(offset.to_string().into_bytes().into()),
        headers: Box::default(),
        payload: Some(payload.into_bytes().into()),
    }
}
