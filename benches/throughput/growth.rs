//! What a large table of claims costs: the statements of a batch on tables of several sizes, and while claims are forgotten.
//!
//! In: a PostgreSQL and the sizes. Out: a report. It owns the databases that it makes; all of them are there until the end, so that the
//! sizes can be measured in turn.
//!
//! Invariant: what is compared is measured in one run, one after another, with the same statements.

use std::thread;
use std::time::Instant;

use chrono::Utc;
use onceward::event::id::{DAY_MS, day_of, first_id_of_ms};
use onceward::lab::postgres;
use onceward::retention::sweeper::sweep;
use onceward::store::old_claims::Forgettable;
use onceward::store::retention::ensure_days;
use onceward::store::{Form, Session, Store, forgetting, retention};
use uuid::Uuid;

use crate::raw::{Measured, Shape};
use crate::{Database, Result, block_on, median, raw, settings, thousands};

/// Connections, and events per transaction.
pub const SHAPE: (usize, usize) = (3, 512);
/// Events of one measurement.
const EVENTS: usize = 1_000_000;
/// The claims lie in so many days, the last of them today.
const DAYS: i64 = 3;

/// How the table is made.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Table {
    ByDay,
    Plain,
    /// Plain, with ids that have no order.
    RandomIds,
}

struct Case<'a> {
    table: Table,
    rows: u64,
    database: Database<'a>,
    measured: Vec<Measured>,
}

/// Prints what each size costs, and at the largest one what forgetting costs.
pub fn measure(server: &str, sizes: &[u64], runs: u64) -> Result<()> {
    let largest = sizes.iter().copied().max().ok_or("no size is given")?;
    let mut cases = Vec::new();
    for rows in sizes {
        cases.push(Case::make(server, Table::ByDay, *rows)?);
    }
    // Whoever has more of them would not keep them in one table.
    let plain = sizes.iter().copied().filter(|rows| *rows > 0).min().unwrap_or(0);
    for table in [Table::Plain, Table::RandomIds] {
        cases.push(Case::make(server, table, plain)?);
    }
    for _ in 0..runs {
        for case in &mut cases {
            case.measured.push(case.run()?);
        }
    }
    println!("median of {runs} run(s)");
    cases.iter().for_each(|case| line(&case.name(), &case.measured));
    let of = |table, rows| cases.iter().find(|case| case.table == table && case.rows == rows).ok_or("no such case");
    let (by_day, plain) = (of(Table::ByDay, largest)?, of(Table::Plain, plain)?);
    line("  while days are made", &[by_day.run_while(make_days)?]);
    line("  while a day is dropped", &[by_day.run_while(drop_a_day)?]);
    line("  while old claims of the plain table are deleted", &[plain.run_while(delete_old)?]);
    Ok(())
}

fn line(what: &str, measured: &[Measured]) {
    let of = |value: fn(&Measured) -> f64| median(measured.iter().map(value));
    let (per_second, p50, p99) = (thousands(of(|m| m.per_second)), of(|m| m.p50_ms), of(|m| m.p99_ms));
    println!("  {what:<52} {per_second} events/s, a transaction {p50:.1} ms (p50), {p99:.1} ms (p99)");
}

impl<'a> Case<'a> {
    fn make(server: &'a str, table: Table, rows: u64) -> Result<Self> {
        let kind = ["by_day", "plain", "random"][table as usize];
        let database = Database::create(server, &format!("growth_{kind}_{rows}"))?;
        let today = day_of(Uuid::now_v7());
        if table == Table::ByDay {
            with_store(&database.url, async |s| {
                retention::init_floor(s, std::time::Duration::from_millis((DAY_MS * DAYS).unsigned_abs()), None).await?;
                Ok(ensure_days(s, &(today - DAYS + 1..=today).collect()).await?)
            })?;
        } else {
            let plain = "ALTER TABLE processed_event RENAME TO made_by_us;
                         CREATE TABLE processed_event (LIKE made_by_us INCLUDING ALL);
                         CREATE INDEX ix_processed_event_processed_at ON processed_event (processed_at);
                         DROP TABLE made_by_us";
            postgres::query(&database.url, plain)?;
        }
        let of_a_day = of_a_day(rows);
        for day in (today - DAYS + 1..=today).filter(|_| of_a_day > 0) {
            postgres::query(&database.url, &fill(day, of_a_day, table == Table::RandomIds))?;
        }
        postgres::query(&database.url, "VACUUM ANALYZE processed_event")?;
        postgres::query(&database.url, "CHECKPOINT")?;
        Ok(Self { table, rows, database, measured: Vec::new() })
    }

    fn name(&self) -> String {
        let how = match self.table {
            Table::ByDay => "claims in days",
            Table::Plain => "claims in a plain table",
            Table::RandomIds => "claims in a plain table, random ids (v4)",
        };
        format!("{} million {how}", self.rows as f64 / 1e6)
    }

    fn run(&self) -> Result<Measured> {
        let id = if self.table == Table::RandomIds { random_of } else { std::convert::identity };
        let (connections, batch) = SHAPE;
        raw::measure(&self.database.url, &Shape { connections, batch, events: EVENTS, form: Form::Optimistic, id })
    }

    /// While somebody does something else to the table, which begins at the same time.
    fn run_while(&self, something: fn(&str, u64) -> Result<()>) -> Result<Measured> {
        let (url, rows) = (self.database.url.clone(), self.rows);
        let other = thread::spawn(move || something(&url, rows).map_err(|error| error.to_string()));
        let measured = self.run()?;
        other.join().map_err(|_| "it panicked")??;
        Ok(measured)
    }
}

/// An id without order, the same for the same id: an odd factor mixes all bits and maps no two to one.
fn random_of(id: Uuid) -> Uuid {
    let mixed = id.as_u128().wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
    uuid::Builder::from_random_bytes(mixed.to_be_bytes()).into_uuid()
}

fn of_a_day(rows: u64) -> u64 {
    rows / DAYS.unsigned_abs()
}

/// Milliseconds between two claims of a day that is over.
fn step_ms(of_a_day: u64) -> f64 {
    (DAY_MS as f64 / of_a_day as f64).min(1_000.0)
}

/// So many claims over one day, made at that time; today's up to now.
fn fill(day: i64, rows: u64, random: bool) -> String {
    let from = day * DAY_MS;
    let until = (from + DAY_MS).min(Utc::now().timestamp_millis());
    let step = step_ms(rows).min((until - from) as f64 / rows as f64);
    let id = if random {
        "gen_random_uuid()"
    } else {
        "(lpad(to_hex(ms), 12, '0') || '7' || substr(hash, 1, 3) || '8' || substr(hash, 4, 15))::uuid"
    };
    format!(
        "INSERT INTO processed_event (event_id, consumer_group, processed_at, event_digest, source_id, source_offset)
         SELECT {id}, 'billing-order-confirmed', to_timestamp(ms / 1000.0), n, 1, n
         FROM (SELECT n, {from} + (n * {step})::bigint AS ms, md5(n::text) AS hash FROM generate_series(0, {rows} - 1) AS n) AS made"
    )
}

fn make_days(url: &str, _: u64) -> Result<()> {
    let today = day_of(Uuid::now_v7());
    with_store(url, async |s| {
        for day in today + 20..today + 30 {
            ensure_days(s, &[day].into()).await?;
        }
        Ok(())
    })
}

/// The oldest one, as the cleaner does it.
fn drop_a_day(url: &str, _: u64) -> Result<()> {
    with_store(url, async |s| {
        let oldest = forgetting::day_tables(s).await?.into_iter().next().ok_or("there is no day")?;
        forgetting::raise_floor(s, oldest.end).await?;
        let limits = settings("").limits;
        forgetting::be_patient(s, limits.budget + limits.statement, limits.budget * 10).await?;
        forgetting::detach(s, &oldest.table).await?;
        Ok(forgetting::drop_table(s, &oldest.table).await?)
    })
}

/// As many of the oldest claims as are made meanwhile, as the cleaner deletes them.
fn delete_old(url: &str, rows: u64) -> Result<()> {
    with_store(url, async |s| {
        let oldest = (day_of(Uuid::now_v7()) - DAYS + 1) * DAY_MS;
        let before_ms = oldest + (step_ms(of_a_day(rows)) * EVENTS as f64) as i64;
        let floor = first_id_of_ms(before_ms.unsigned_abs());
        forgetting::raise_floor(s, floor).await?;
        let may_go = Forgettable { floor, before_ms, groups: vec!["billing-order-confirmed".to_owned()] };
        let started = Instant::now();
        let gone = sweep(s, &may_go).await?;
        println!("  (deleted {gone} in {:.1} s)", started.elapsed().as_secs_f64());
        Ok(())
    })
}

fn with_store(url: &str, work: impl AsyncFnOnce(&mut Session) -> Result<()>) -> Result<()> {
    block_on(async {
        let store = Store::connect(&settings(url), 1)?;
        let mut session = store.control.get().await?;
        work(&mut session).await
    })
}
