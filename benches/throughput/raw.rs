//! The raw limit: the statements of a batch, one after another, by a program that does nothing else.
//!
//! In: an empty database with our tables. Out: events per second over all connections. It owns its connections.
//!
//! Invariant: each transaction is the engine's own, statement by statement: the text comes from the store, the rows from the event
//! builder, and every one of them must be new.

use std::time::{Duration, Instant};

use bytes::{BufMut, BytesMut};
use chrono::Utc;
use onceward::event::{Currency, Money, OrderConfirmedBuilder};
use onceward::handler::Event as _;
use onceward::record::{Epoch, NextOffset, RecordDigest, SourceId};
use onceward::store::batch_text::BatchText;
use onceward::store::numeric::Exact;
use onceward::store::processed_events::ClaimTable;
use onceward::store::{Form, Store, consumed_partitions, retention};
use tokio_postgres::types::{IsNull, ToSql, Type};
use tokio_postgres::{Client, NoTls, Statement};
use uuid::Uuid;

use crate::{Result, block_on, settings};

// The types that Diesel names as well when it prepares a statement.
const INT4: Type = Type::INT4;
const INT8: Type = Type::INT8;
const TEXT: Type = Type::TEXT;
const INT4S: Type = Type::INT4_ARRAY;
const INT8S: Type = Type::INT8_ARRAY;
const TEXTS: Type = Type::TEXT_ARRAY;
const UUID: Type = Type::UUID;
const UUIDS: Type = Type::UUID_ARRAY;
const NUMERICS: Type = Type::NUMERIC_ARRAY;

const GROUP: &str = "billing-order-confirmed";
const PARTITIONS: usize = crate::engine::PARTITIONS as usize;

/// A partition's row and the epoch of its owner.
type Source = (SourceId, Epoch);

/// The columns of one transaction.
#[derive(Clone, Default)]
struct Batch {
    partition: usize,
    /// All of it was applied before.
    again: bool,
    ids: Vec<Uuid>,
    digests: Vec<i64>,
    offsets: Vec<i64>,
    orders: Vec<i64>,
    customers: Vec<i64>,
    amounts: Vec<Amount>,
    currencies: Vec<&'static str>,
    statuses: Vec<&'static str>,
    charge_ids: Vec<Option<String>>,
    attempts: Vec<i32>,
}

/// An amount as the store sends it.
#[derive(Clone, Copy, Debug)]
struct Amount(Money);

impl ToSql for Amount {
    fn to_sql(&self, _: &Type, out: &mut BytesMut) -> std::result::Result<IsNull, Box<dyn std::error::Error + Sync + Send>> {
        Exact(self.0).encode(|word| out.put_u16(word));
        Ok(IsNull::No)
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::NUMERIC
    }

    tokio_postgres::types::to_sql_checked!();
}

/// What a measurement gave.
#[derive(Clone, Copy, Debug)]
pub struct Measured {
    /// Events per second over all connections.
    pub per_second: f64,
    /// Of a transaction, in milliseconds: half of them are not longer, and 99 of 100.
    pub p50_ms: f64,
    /// See there.
    pub p99_ms: f64,
}

/// What is to be measured.
#[derive(Clone, Copy)]
pub struct Shape {
    /// Among which the partitions are divided.
    pub connections: usize,
    /// Events of a transaction.
    pub batch: usize,
    pub events: usize,
    pub form: Form,
    /// Makes the ids of the builder's.
    pub id: fn(Uuid) -> Uuid,
}

/// New events.
pub fn measure(url: &str, shape: &Shape) -> Result<Measured> {
    let work = batches(shape)?;
    run(url, shape.form, work)
}

/// New events, and the same ones once more; each with what `processor_time` has grown by meanwhile.
pub fn measure_twice(url: &str, shape: &Shape, processor_time: impl Fn() -> f64) -> Result<[(Measured, f64); 2]> {
    let work = batches(shape)?;
    let again = work.iter().map(|batches| batches.iter().map(|batch| Batch { again: true, ..batch.clone() }).collect());
    let again: Vec<Vec<Batch>> = again.collect();
    let measure = |work| {
        let before = processor_time();
        Ok::<_, Box<dyn std::error::Error>>((run(url, shape.form, work)?, processor_time() - before))
    };
    Ok([measure(work)?, measure(again)?])
}

fn run(url: &str, form: Form, work: Vec<Vec<Batch>>) -> Result<Measured> {
    let events: usize = work.iter().flatten().map(|batch| batch.ids.len()).sum();
    let connections = work.len();
    block_on(async {
        let sources = prepare(url, connections).await?;
        let mut owners = Vec::new();
        for batches in work {
            owners.push((Owner::connect(url, form, sources.clone()).await?, batches));
        }
        let started = Instant::now();
        let running: Vec<_> = owners.into_iter().map(|(owner, batches)| tokio::spawn(owner.run(batches))).collect();
        let mut times = Vec::new();
        for owner in running {
            times.extend(owner.await??);
        }
        let per_second = events as f64 / started.elapsed().as_secs_f64();
        times.sort_unstable();
        let at = |part: usize| times[(times.len() - 1) * part / 100].as_secs_f64() * 1_000.0;
        Ok(Measured { per_second, p50_ms: at(50), p99_ms: at(99) })
    })
}

/// The same transactions as the engine's: each of one partition, which has one of every so many events, so that a batch spreads as
/// widely over the index. A connection takes its partitions in turn.
fn batches(&Shape { connections, batch, events, id, .. }: &Shape) -> Result<Vec<Vec<Batch>>> {
    let (builder, currency) = (OrderConfirmedBuilder::new(), Currency::from_code("EUR")?);
    let first_order = Utc::now().timestamp_micros();
    let mut work: Vec<Vec<Batch>> = (0..connections).map(|_| Vec::new()).collect();
    let mut filling: Vec<Batch> = (0..PARTITIONS).map(|partition| Batch { partition, ..Batch::default() }).collect();
    for number in 0..events {
        let units = 1 + (number as i64 * 7_919) % 50_000;
        let (order, customer) = (first_order + number as i64, 1 + (number as i64 * 104_729) % 1_000_000);
        let event = builder.build(Utc::now(), order, customer, Money::from_minor_units(units, currency));
        let event = event.map_err(|fault| format!("an event of the bench is not valid: {fault:?}"))?;
        let partition = number % PARTITIONS;
        let filled = &mut filling[partition];
        filled.ids.push(id(event.event_id));
        filled.digests.push(event.digest().0);
        filled.offsets.push((number / PARTITIONS) as i64);
        filled.orders.push(event.order_id);
        filled.customers.push(event.customer_id);
        filled.amounts.push(Amount(event.total));
        filled.currencies.push("EUR");
        filled.statuses.push("charged");
        filled.charge_ids.push(None);
        filled.attempts.push(0);
        if filled.ids.len() == batch {
            let full = std::mem::replace(filled, Batch { partition, ..Batch::default() });
            work[partition % connections].push(full);
        }
    }
    for rest in filling.into_iter().filter(|rest| !rest.ids.is_empty()) {
        work[rest.partition % connections].push(rest);
    }
    Ok(work)
}

/// Days and ownership rows, made by the store as the engine has them made.
async fn prepare(url: &str, connections: usize) -> Result<Vec<Source>> {
    let store = Store::connect(&settings(url), connections)?;
    let mut session = store.control.get().await?;
    retention::init_floor(&mut session, Duration::from_secs(7 * 24 * 60 * 60), None).await?;
    if ClaimTable::read(&mut session).await?.by_day {
        retention::ensure_days_ahead(&mut session, 7).await?;
    }
    let mut sources = Vec::new();
    for partition in 0..PARTITIONS {
        let owned = consumed_partitions::bump(&mut session, GROUP, "raw", i32::try_from(partition)?, "throughput").await?;
        sources.push((owned.source, owned.epoch));
    }
    Ok(sources)
}

/// One connection and every partition.
struct Owner {
    client: Client,
    text: BatchText,
    fence: Statement,
    claim: Statement,
    look_up: Statement,
    form: Form,
    insert_payments: Statement,
    sources: Vec<Source>,
}

impl Owner {
    async fn connect(url: &str, form: Form, sources: Vec<Source>) -> Result<Self> {
        let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
        tokio::spawn(connection);
        let text = BatchText::new(&settings(url).limits, form);
        Ok(Self {
            fence: client.prepare_typed(&text.fence, &[INT4, INT8]).await?,
            claim: client.prepare_typed(&text.claim, &[TEXT, INT4, UUIDS, INT8S, INT8S]).await?,
            look_up: client.prepare_typed(&text.look_up, &[UUIDS, TEXT, UUID, UUID]).await?,
            insert_payments: client
                .prepare_typed(&text.insert_payments, &[UUIDS, INT8S, INT8S, NUMERICS, TEXTS, TEXTS, TEXTS, INT4S])
                .await?,
            form,
            sources,
            text,
            client,
        })
    }

    /// How long each transaction took.
    async fn run(self, batches: Vec<Batch>) -> std::result::Result<Vec<Duration>, tokio_postgres::Error> {
        let mut times = Vec::with_capacity(batches.len());
        for batch in batches {
            let started = Instant::now();
            self.apply(&batch).await?;
            times.push(started.elapsed());
        }
        Ok(times)
    }

    /// How many rows were new. In the optimistic form they do not come back.
    async fn insert(
        &self,
        statement: &Statement,
        columns: &[&(dyn ToSql + Sync)],
    ) -> std::result::Result<usize, tokio_postgres::Error> {
        match self.form {
            Form::OnConflict => Ok(self.client.query(statement, columns).await?.len()),
            Form::Optimistic => Ok(self.client.execute(statement, columns).await? as usize),
        }
    }

    async fn apply(&self, b: &Batch) -> std::result::Result<(), tokio_postgres::Error> {
        let (source_id, epoch_of_owner) = self.sources[b.partition];
        let (SourceId(source), Epoch(epoch)) = (source_id, epoch_of_owner);
        let fence: [&(dyn ToSql + Sync); 2] = [&source, &epoch];
        let ((), fence) = tokio::try_join!(self.client.batch_execute(&self.text.begin), self.client.query(&self.fence, &fence))?;
        assert_eq!(fence.len(), 1, "the partition is ours");
        if b.again {
            // As the engine does once it has met a duplicate.
            let (min, max) = (b.ids.iter().min(), b.ids.iter().max());
            let found = self.client.query(&self.look_up, &[&b.ids, &GROUP, &min, &max]).await?;
            assert_eq!(found.len(), b.ids.len(), "every claim is there");
        } else {
            let claimed = self.insert(&self.claim, &[&GROUP, &source, &b.ids, &b.digests, &b.offsets]).await?;
            assert_eq!(claimed, b.ids.len(), "every event is new");
            let columns: [&(dyn ToSql + Sync); 8] =
                [&b.ids, &b.orders, &b.customers, &b.amounts, &b.currencies, &b.statuses, &b.charge_ids, &b.attempts];
            assert_eq!(self.insert(&self.insert_payments, &columns).await?, b.ids.len(), "every payment is new");
        }
        let next = NextOffset(b.offsets.last().map_or(0, |last| last + 1));
        let digest = RecordDigest(b.digests.last().copied().unwrap_or_default());
        self.client.batch_execute(&BatchText::end(source_id, epoch_of_owner, next, digest, 1_700_000_000_000)).await
    }
}
