//! How long the parts of a batch take, each for itself: decoding, the window, the claim in each of its ways.
//!
//! In: for the claim a PostgreSQL (`scripts/bench --parts` starts one). Out: criterion's report, compared with the one before. It owns the
//! databases that it makes.
//!
//! Invariant: a claim that is measured is rolled back, so that each sample meets the same table.

use std::sync::Arc;
use std::time::{Duration, Instant};

use chrono::Utc;
use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use onceward::config::Secret;
use onceward::event::{self, Currency, Money, OrderConfirmed, OrderConfirmedBuilder};
use onceward::handler::Event as _;
use onceward::lab::postgres;
use onceward::pipeline::window::{Buffer, Buffered, Handed, Share, Window};
use onceward::record::{NextOffset, Offset, Record};
use onceward::store::consumed_partitions;
use onceward::store::processed_events::{ClaimRow, ClaimTable};
use onceward::store::{self, DbError, Form, Settings, Store, TimeLimits, TransactionError, retention};
use tokio::runtime::Runtime;

/// Events of a batch.
const BATCH: usize = 512;
const GROUP: &str = "parts";

fn events() -> Vec<OrderConfirmed> {
    let (builder, euro) = (OrderConfirmedBuilder::new(), Currency::from_code("EUR").expect("a currency"));
    let event = |order| builder.build(Utc::now(), order, 1 + order % 1_000, Money::from_minor_units(1 + order % 50_000, euro));
    (1..=BATCH as i64).map(|order| event(order).expect("a valid event")).collect()
}

fn record(event: &OrderConfirmed, offset: usize) -> Record {
    Record {
        partition: 0,
        offset: Offset(offset as i64),
        timestamp_ms: Some(1),
        key: Some(event.order_id.to_string().into_bytes().into()),
        headers: Box::default(),
        payload: Some(event.to_json().into_bytes().into()),
    }
}

fn decode(c: &mut Criterion) {
    let payloads: Vec<Vec<u8>> = events().iter().map(|event| event.to_json().into_bytes()).collect();
    let mut group = c.benchmark_group("decode");
    group.throughput(Throughput::Elements(BATCH as u64));
    group.bench_function("512 events", |b| {
        b.iter(|| payloads.iter().map(|payload| event::decode(Some(payload))).filter(Result::is_ok).count());
    });
    group.finish();
}

fn window(c: &mut Criterion) {
    let (buffer, share) = (Buffer::new(usize::MAX, std::sync::mpsc::channel().0), Share::default());
    let records: Vec<Record> = events().iter().enumerate().map(|(offset, event)| record(event, offset)).collect();
    let admitted = || records.iter().map(|record| buffer.admit(record.clone(), &share)).collect::<Vec<Arc<Buffered>>>();
    let mut group = c.benchmark_group("window");
    group.throughput(Throughput::Elements(BATCH as u64));
    group.bench_function("512 records offered, lent and settled", |b| {
        let fresh = || (Window::positioned(NextOffset(0)), admitted());
        b.iter_batched(
            fresh,
            |(mut window, records)| {
                window.offer(Handed { after: NextOffset(0), records }).expect("they follow on nothing");
                let lent = window.take(BATCH).expect("there are some");
                window.settle(&[]);
                (window, lent)
            },
            BatchSize::SmallInput,
        );
    });
    group.finish();
}

/// Only to end the transaction.
#[derive(Debug)]
struct RolledBack;

impl From<DbError> for RolledBack {
    fn from(error: DbError) -> Self {
        panic!("the statement is refused: {error}")
    }
}

fn claim(c: &mut Criterion) {
    let server = std::env::var("ONCEWARD_TEST_DATABASE_URL").expect("a database: use scripts/bench --parts");
    postgres::query(&server, "DROP DATABASE IF EXISTS parts").expect("it is dropped");
    postgres::query(&server, "CREATE DATABASE parts").expect("it is made");
    let (host, _) = server.rsplit_once('/').expect("the server's URL names a database");
    let ms = Duration::from_millis;
    let limits = TimeLimits { lock: ms(3_000), statement: ms(5_000), idle_in_transaction: ms(12_000), budget: ms(20_000) };
    let url = Secret::new(format!("{host}/parts"));
    let settings = Settings { url, connect_timeout: ms(2_000), pool_wait: ms(5_000), limits };
    let runtime = Runtime::new().expect("a runtime");
    let (session, table, source) = runtime.block_on(async {
        store::migrate(&settings).await.expect("it is migrated");
        let store = Store::connect(&settings, 1).expect("a store");
        let mut session = store.claims.get().await.expect("a session");
        retention::init_floor(&mut session, Duration::from_secs(24 * 60 * 60), None).await.expect("a floor");
        retention::ensure_days_ahead(&mut session, 2).await.expect("days");
        let owned = consumed_partitions::bump(&mut session, GROUP, "parts", 0, "parts").await.expect("a partition");
        let table = ClaimTable::read(&mut session).await.expect("the table");
        (session, table, owned.source)
    });
    let session = tokio::sync::Mutex::new(session);
    let rows: Vec<ClaimRow> = events()
        .iter()
        .zip(0..)
        .map(|(event, offset)| ClaimRow { event_id: event.event_id, digest: event.digest(), offset: Offset(offset) })
        .collect();
    let ids: Vec<_> = rows.iter().map(|row| row.event_id).collect();
    let mut group = c.benchmark_group("claim");
    group.throughput(Throughput::Elements(BATCH as u64));
    let ways = [
        ("512 new ids, plainly", false, Form::Optimistic),
        ("512 new ids, looked up first", true, Form::Optimistic),
        ("512 new ids, on conflict", false, Form::OnConflict),
    ];
    for (name, looks, form) in ways {
        group.bench_function(name, |b| {
            b.to_async(&runtime).iter_custom(|times| {
                let (session, rows, ids, limits) = (&session, &rows, &ids, &limits);
                async move {
                    let (mut session, mut took) = (session.lock().await, Duration::ZERO);
                    for _ in 0..times {
                        let ended = session.transaction("parts", limits, async |tx: &mut store::Session| {
                            let begun = Instant::now();
                            if looks {
                                assert!(table.look_up(tx, GROUP, ids).await?.is_empty(), "nobody has claimed them");
                            }
                            assert_eq!(table.claim(tx, GROUP, source, rows, form).await?.len(), BATCH);
                            took += begun.elapsed();
                            Err::<(), _>(RolledBack)
                        });
                        assert!(matches!(ended.await, Err(TransactionError::Body(RolledBack))));
                    }
                    took
                }
            });
        });
    }
    group.finish();
}

criterion_group!(parts, decode, window, claim);
criterion_main!(parts);
