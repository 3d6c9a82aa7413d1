//! The raw limit: the statements of a batch, one after another, by a program that does nothing else.
//!
//! In: an empty database with our tables. Out: events per second over all connections. It owns its connections.
//!
//! Invariant: each transaction is the engine's own, statement by statement: the text comes from the store, the rows from the event
//! builder, and every one of them must be new.

use std::time::Instant;

use chrono::Utc;
use onceward::event::{Currency, Money, OrderConfirmedBuilder};
use onceward::handler::Event as _;
use onceward::record::{Epoch, SourceId};
use onceward::store::batch_text::BatchText;
use onceward::store::{Store, consumed_partitions, retention};
use tokio_postgres::types::{ToSql, Type};
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
const UUIDS: Type = Type::UUID_ARRAY;

const GROUP: &str = "billing-order-confirmed";

/// The columns of one transaction.
#[derive(Default)]
struct Batch {
    ids: Vec<Uuid>,
    digests: Vec<i64>,
    offsets: Vec<i64>,
    orders: Vec<i64>,
    customers: Vec<i64>,
    amounts: Vec<String>,
    currencies: Vec<&'static str>,
    statuses: Vec<&'static str>,
    charge_ids: Vec<Option<String>>,
    attempts: Vec<i32>,
}

/// Events per second with so many connections, each of which owns a partition.
pub fn measure(url: &str, connections: usize, batch: usize, events: usize) -> Result<f64> {
    let work = batches(connections, batch, events)?;
    block_on(async {
        let sources = prepare(url, connections).await?;
        let mut owners = Vec::new();
        for ((source, epoch), batches) in sources.into_iter().zip(work) {
            owners.push((Owner::connect(url, source, epoch).await?, batches));
        }
        let started = Instant::now();
        let running: Vec<_> = owners.into_iter().map(|(owner, batches)| tokio::spawn(owner.run(batches))).collect();
        for owner in running {
            owner.await??;
        }
        Ok(events as f64 / started.elapsed().as_secs_f64())
    })
}

/// Each connection gets one of every so many events, as the partitions of a topic do.
fn batches(connections: usize, batch: usize, events: usize) -> Result<Vec<Vec<Batch>>> {
    let (builder, currency) = (OrderConfirmedBuilder::new(), Currency::from_code("EUR")?);
    let first_order = Utc::now().timestamp_micros();
    let mut work: Vec<Vec<Batch>> = (0..connections).map(|_| Vec::new()).collect();
    for number in 0..events {
        let units = 1 + (number as i64 * 7_919) % 50_000;
        let (order, customer) = (first_order + number as i64, 1 + (number as i64 * 104_729) % 1_000_000);
        let event = builder.build(Utc::now(), order, customer, Money::from_minor_units(units, currency));
        let event = event.map_err(|fault| format!("an event of the bench is not valid: {fault:?}"))?;
        let batches = &mut work[number % connections];
        if batches.last().is_none_or(|last| last.ids.len() == batch) {
            batches.push(Batch::default());
        }
        let Some(last) = batches.last_mut() else { unreachable!("pushed above") };
        last.ids.push(event.event_id);
        last.digests.push(event.digest().0);
        last.offsets.push((number / connections) as i64);
        last.orders.push(event.order_id);
        last.customers.push(event.customer_id);
        last.amounts.push(event.total.decimal());
        last.currencies.push("EUR");
        last.statuses.push("charged");
        last.charge_ids.push(None);
        last.attempts.push(0);
    }
    Ok(work)
}

/// Days and ownership rows, made by the store as the engine has them made.
async fn prepare(url: &str, connections: usize) -> Result<Vec<(SourceId, Epoch)>> {
    let store = Store::connect(&settings(url), connections)?;
    let mut session = store.control.get().await?;
    retention::init_floor(&mut session, std::time::Duration::from_secs(7 * 24 * 60 * 60), None).await?;
    retention::ensure_days_ahead(&mut session, 7).await?;
    let mut sources = Vec::new();
    for partition in 0..connections {
        let owned = consumed_partitions::bump(&mut session, GROUP, "raw", i32::try_from(partition)?, "throughput").await?;
        sources.push((owned.source, owned.epoch));
    }
    Ok(sources)
}

/// One connection and its partition.
struct Owner {
    client: Client,
    text: BatchText,
    fence: Statement,
    claim: Statement,
    insert_payments: Statement,
    advance: Statement,
    source: i32,
    epoch: i64,
}

impl Owner {
    async fn connect(url: &str, source: SourceId, epoch: Epoch) -> Result<Self> {
        let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
        tokio::spawn(connection);
        let text = BatchText::new(&settings(url).limits);
        Ok(Self {
            fence: client.prepare_typed(&text.fence, &[INT4, INT8]).await?,
            claim: client.prepare_typed(&text.claim, &[TEXT, INT4, UUIDS, INT8S, INT8S]).await?,
            insert_payments: client
                .prepare_typed(&text.insert_payments, &[UUIDS, INT8S, INT8S, TEXTS, TEXTS, TEXTS, TEXTS, INT4S])
                .await?,
            advance: client.prepare_typed(&text.advance, &[INT8, INT8, INT4, INT8]).await?,
            source: source.0,
            epoch: epoch.0,
            text,
            client,
        })
    }

    async fn run(self, batches: Vec<Batch>) -> std::result::Result<(), tokio_postgres::Error> {
        for batch in batches {
            self.apply(&batch).await?;
        }
        Ok(())
    }

    async fn apply(&self, b: &Batch) -> std::result::Result<(), tokio_postgres::Error> {
        self.client.batch_execute(&self.text.begin).await?;
        let fence = self.client.query(&self.fence, &[&self.source, &self.epoch]).await?;
        assert_eq!(fence.len(), 1, "the partition is ours");
        let claimed = self.client.query(&self.claim, &[&GROUP, &self.source, &b.ids, &b.digests, &b.offsets]).await?;
        assert_eq!(claimed.len(), b.ids.len(), "every event is new");
        let columns: [&(dyn ToSql + Sync); 8] =
            [&b.ids, &b.orders, &b.customers, &b.amounts, &b.currencies, &b.statuses, &b.charge_ids, &b.attempts];
        let paid = self.client.query(&self.insert_payments, &columns).await?;
        assert_eq!(paid.len(), b.ids.len(), "every payment is new");
        let next_offset = b.offsets.last().map_or(0, |last| last + 1);
        let digest = b.digests.last().copied();
        let advanced = self.client.execute(&self.advance, &[&next_offset, &digest, &self.source, &self.epoch]).await?;
        assert_eq!(advanced, 1, "the partition is ours");
        self.client.batch_execute(self.text.commit).await
    }
}
