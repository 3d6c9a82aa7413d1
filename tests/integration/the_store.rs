//! The store against a real PostgreSQL: each test has a database of its own on the server that `ONCEWARD_TEST_DATABASE_URL` names.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod attempts;
mod claims;
mod days;
mod errors;
mod forgetting;
mod held;
mod operators;
mod ownership;
mod payments;
mod proxy;
mod sessions;

use std::time::Duration;

use onceward::config::Secret;
use onceward::event::id::{day_of, first_id_of_day};
use onceward::handler::EventDigest;
use onceward::record::{Epoch, NextOffset, Offset, RecordDigest, SourceId};
use onceward::store::consumed_partitions::Advance;
use onceward::store::processed_events::{ClaimRow, ClaimTable};
use onceward::store::{
    DbError, ErrorClass, Form, Session, Settings, Store, TimeLimits, TransactionError, consumed_partitions, migrate, retention,
};
use tokio_postgres::{Client, NoTls};
use url::Url;
use uuid::Uuid;

const GROUP: &str = "billing";
const TOPIC: &str = "orders";

/// A database that nobody else uses.
struct Db {
    url: Url,
}

impl Db {
    async fn empty() -> Self {
        let server = std::env::var("ONCEWARD_TEST_DATABASE_URL").expect(
            "ONCEWARD_TEST_DATABASE_URL must name a superuser's database, such as postgres://postgres@127.0.0.1:5432/postgres",
        );
        let mut url = Url::parse(&server).expect("ONCEWARD_TEST_DATABASE_URL is a postgres:// URL");
        let name = format!("store_{}", Uuid::now_v7().simple());
        let create = format!("CREATE DATABASE {name} TEMPLATE template0 ENCODING 'UTF8'");
        connect(&server).await.batch_execute(&create).await.unwrap();
        url.set_path(&name);
        Self { url }
    }

    /// With the tables, a floor and the days around today.
    async fn ready() -> (Self, Store) {
        let db = Self::empty().await;
        migrate(&db.settings()).await.unwrap();
        let store = Store::connect(&db.settings(), 4).unwrap();
        let mut s = store.control.get().await.unwrap();
        retention::init_floor(&mut s, Duration::from_secs(86_400), None).await.unwrap();
        retention::ensure_days_ahead(&mut s, 1).await.unwrap();
        drop(s);
        (db, store)
    }

    fn url(&self) -> String {
        self.url.to_string()
    }

    fn address(&self) -> (String, u16) {
        (self.url.host_str().expect("a TCP host").to_owned(), self.url.port().unwrap_or(5432))
    }

    /// The same database by way of another port of this machine.
    fn url_through(&self, port: u16) -> String {
        let mut url = self.url.clone();
        url.set_host(Some("127.0.0.1")).unwrap();
        url.set_port(Some(port)).unwrap();
        url.to_string()
    }

    fn settings(&self) -> Settings {
        settings(self.url())
    }

    /// A connection that the store knows nothing of.
    async fn outsider(&self) -> Client {
        connect(&self.url()).await
    }

    /// Waits until `sql`, a question with one boolean for an answer, says true.
    async fn until(&self, sql: &str) {
        let outsider = self.outsider().await;
        let asked = async {
            while !outsider.query_one(sql, &[]).await.unwrap().get::<_, bool>(0) {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), asked).await.unwrap_or_else(|_| panic!("never true: {sql}"));
    }
}

const LIMITS: TimeLimits = TimeLimits {
    lock: Duration::from_secs(5),
    statement: Duration::from_secs(8),
    idle_in_transaction: Duration::from_secs(10),
    budget: Duration::from_secs(20),
};

fn settings(url: String) -> Settings {
    Settings { url: Secret::new(url), connect_timeout: Duration::from_secs(5), pool_wait: Duration::from_secs(5), limits: LIMITS }
}

async fn connect(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.expect("ONCEWARD_TEST_DATABASE_URL answers");
    tokio::spawn(connection);
    client
}

/// Runs a body that must succeed in a transaction.
async fn committed<T>(s: &mut Session, body: impl AsyncFnOnce(&mut Session) -> Result<T, DbError>) -> T {
    s.transaction("test", &LIMITS, body).await.unwrap()
}

/// Runs a body that must fail, and returns its error.
async fn refused<T: std::fmt::Debug>(s: &mut Session, body: impl AsyncFnOnce(&mut Session) -> Result<T, DbError>) -> DbError {
    match s.transaction("test", &LIMITS, body).await.unwrap_err() {
        TransactionError::Body(error) => error,
        other => panic!("{other}"),
    }
}

async fn own(s: &mut Session, partition: i32) -> (SourceId, Epoch) {
    let ownership = consumed_partitions::bump(s, GROUP, TOPIC, partition, "test").await.unwrap();
    (ownership.source, ownership.epoch)
}

/// Moves one partition's frontier.
fn advance(s: &mut Session, source: SourceId, epoch: Epoch, next: NextOffset, digest: Option<RecordDigest>, safe_ms: Option<i64>) {
    consumed_partitions::advance(s, &[Advance { source, epoch, next, digest, safe_ms }]);
}

/// The table as our migration makes it.
const OURS: ClaimTable = ClaimTable { by_day: true, of_groups: true, explains: true };

fn claim_row(event_id: Uuid, offset: i64) -> ClaimRow {
    ClaimRow { event_id, digest: EventDigest::new(1, 7 << 8), offset: Offset(offset) }
}

/// Claims ids at offsets 0, 1, 2, … and returns the new ones, sorted.
async fn claim(s: &mut Session, source: SourceId, ids: &[Uuid]) -> Result<Vec<Uuid>, DbError> {
    let rows: Vec<_> = ids.iter().zip(0..).map(|(id, offset)| claim_row(*id, offset)).collect();
    let mut new: Vec<_> = OURS.claim(s, GROUP, source, &rows, Form::OnConflict).await?.into_iter().collect();
    new.sort();
    Ok(new)
}

fn ids<const N: usize>() -> [Uuid; N] {
    std::array::from_fn(|_| Uuid::now_v7())
}

/// An id of another day than today.
fn id_of_day(days_from_now: i64) -> Uuid {
    let first = first_id_of_day(day_of(Uuid::now_v7()) + days_from_now);
    Uuid::from_u128(first.as_u128() + u128::from(Uuid::now_v7().as_u128() as u32))
}

fn assert_class(error: &DbError, sqlstate: &str, class: ErrorClass) {
    assert_eq!((error.sqlstate(), error.class()), (Some(sqlstate), class), "{error}");
}
