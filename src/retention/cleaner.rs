//! The cleaner: raises the floor and drops the days below it, or deletes what a table without days has there (`sweeper`).
//!
//! In: what everybody allows (`plan`). Out: fewer claims. It owns those below the floor, one cleaner at a time. If it dies here, the next
//! run finishes what is half gone: a detach that was cut off, a table that was detached and is still there.
//!
//! Invariant: the floor is committed before any day below it is touched, days go strictly in their order, and neither the
//! database's clock nor ours can make a day go before the other one says so.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use chrono::NaiveDate;
use serde_json::json;
use tracing::{info, warn};
use uuid::Uuid;

use super::memory::Own;
use super::plan::{Limit, Plan, moment};
use super::{Once, sweeper};
use crate::config::Config;
use crate::crash::CrashPoint;
use crate::event::id::{day_text, unix_ms};
use crate::metrics;
use crate::store::forgetting::{self, DayState, DayTable};
use crate::store::old_claims::{self, Forgettable, PlainTable};
use crate::store::processed_events::ClaimTable;
use crate::store::{DbError, Session, Settings, Store, retention};

/// The longest wait of one statement, for however many transactions.
const STATEMENT: Duration = Duration::from_secs(600);
/// The longest run. Then another cleaner may begin: they get into each other's way, and do no harm.
const RUN: Duration = Duration::from_secs(3_600);

/// What there is and what may go.
#[derive(Clone, Debug)]
pub struct Outlook {
    /// The earlier of the database's time and ours, in milliseconds since 1970.
    pub now_ms: i64,
    /// The floor; `None` before the first run.
    pub floor: Option<Uuid>,
    /// What everybody allows.
    pub plan: Plan,
    /// The days' tables, oldest first.
    pub days: Vec<DayTable>,
    /// What a table without days holds.
    pub plain: Option<PlainTable>,
    /// The groups that have partitions here: of others' claims nothing goes.
    pub groups: BTreeSet<String>,
}

/// What a run has done.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Where the floor stood and where it stands, if it was raised.
    pub raised: Option<(Uuid, Uuid)>,
    /// Detaches of an earlier run that were ended.
    pub finished: Vec<NaiveDate>,
    /// Days that are gone.
    pub dropped: Vec<DayTable>,
    /// Claims that are gone of a table without days.
    pub deleted: u64,
    /// What keeps days that nobody needs for their age.
    pub held_back: Vec<Limit>,
}

/// When a run that could not go on, or was held back, is tried again.
const AGAIN: Duration = Duration::from_secs(600);

/// The cleaner of a running service.
#[derive(Debug)]
pub struct Cleaner {
    settings: Settings,
    interval: Duration,
    next: Instant,
    failed: Once,
    held_back: Once,
}

impl Cleaner {
    /// One that runs at once, and then so often.
    #[must_use]
    pub fn new(config: &Config) -> Self {
        let (settings, interval) = (config.database.settings(), config.retention.interval);
        Self { settings, interval, next: Instant::now(), failed: Once::default(), held_back: Once::default() }
    }

    /// Runs if it is due. What stands in its way is said once.
    pub async fn run_if_due(&mut self, own: &Own) {
        if Instant::now() < self.next {
            return;
        }
        self.next = Instant::now() + self.interval;
        let report = match run(&self.settings, own).await {
            Ok(Some(report)) => report,
            Ok(None) => return info!("another cleaner is at work"),
            Err(error) => {
                metrics::cleaner(false);
                self.next = Instant::now() + self.interval.min(AGAIN);
                return self.failed.say(error.to_string(), |error| warn!(error, "the cleaner cannot go on; it tries again"));
            }
        };
        metrics::cleaner(true);
        metrics::held_back(!report.held_back.is_empty());
        if !report.held_back.is_empty() {
            // Whoever holds them back may have caught up long before the next day.
            self.next = Instant::now() + self.interval.min(AGAIN);
        }
        self.failed = Once::default();
        if report.deleted > 0 {
            info!(deleted = report.deleted, "old claims are deleted");
        }
        if let Some((from, to)) = report.raised {
            info!(
                from = day_text(from),
                to = day_text(to),
                dropped = report.dropped.len(),
                deleted = report.deleted,
                "the retention floor was raised"
            );
        }
        match report.held_back.first() {
            None => self.held_back = Once::default(),
            Some(limit) => self.held_back.say(limit.to_string(), |why| {
                warn!(why, "days are kept that nobody needs for their age; `onceward retention status` tells more");
            }),
        }
    }
}

impl Outlook {
    /// The floor after a run.
    #[must_use]
    pub fn floor_to_be(&self) -> Option<Uuid> {
        self.floor.max(self.plan.floor())
    }

    /// Whether a run drops this day.
    #[must_use]
    pub fn goes(&self, day: &DayTable) -> bool {
        self.floor_to_be().is_some_and(|floor| day.end <= floor)
    }

    /// What a run deletes from a table without days.
    #[must_use]
    pub fn forgettable(&self) -> Option<Forgettable> {
        self.plain?;
        // The floor may be older than what somebody has said since: all of them must allow it.
        let floor = self.floor_to_be()?.min(self.plan.floor()?);
        let before_ms = unix_ms(floor);
        Some(Forgettable { floor, before_ms, groups: self.groups.iter().cloned().collect() })
    }

    /// What keeps claims that nobody needs for their age; nothing while no day is there for its sake alone.
    #[must_use]
    pub fn held_back(&self) -> Vec<Limit> {
        if self.plain.is_some() {
            return self.plan.holding_back().cloned().collect();
        }
        let holds = |limit: &&Limit| {
            let kept = |day: &DayTable| !self.goes(day) && self.plan.keepers(day.end).any(|keeper| keeper == *limit);
            self.days.first().is_some_and(kept)
        };
        self.plan.holding_back().filter(holds).cloned().collect()
    }

    /// For machines: each day with what keeps it.
    #[must_use]
    pub fn json(&self) -> serde_json::Value {
        let limit = |limit: &Limit| json!({ "why": limit.to_string(), "keeps_from": limit.keeps_from_ms.map(moment), "remedy": limit.remedy() });
        let state = |state| match state {
            DayState::Attached => "attached",
            DayState::Detaching => "detaching",
            DayState::Detached => "detached",
        };
        let day = |day: &DayTable| {
            json!({
                "day": day.day.to_string(),
                "state": state(day.state),
                "claims_estimated": day.rows,
                "bytes": day.bytes,
                "goes": self.goes(day),
                "kept_by": self.plan.keepers(day.end).map(limit).collect::<Vec<_>>(),
            })
        };
        json!({
            "now": moment(self.now_ms),
            "floor": self.floor.map(day_text),
            "floor_after_the_next_run": self.floor_to_be().map(day_text),
            "plain_table": self.plain.map(|plain| json!({ "claims_estimated": plain.rows, "bytes": plain.bytes })),
            "days": self.days.iter().map(day).collect::<Vec<_>>(),
            "held_back_by": self.held_back().iter().map(limit).collect::<Vec<_>>(),
        })
    }
}

/// Looks and changes nothing.
///
/// # Errors
/// The database does not answer.
pub async fn look(s: &mut Session, own: &Own) -> Result<Outlook, DbError> {
    let now_ms = retention::earlier_time(s).await?;
    // The floor before the standings: what is said later allows no less.
    let floor = retention::floor(s).await?;
    let standings = forgetting::standings(s).await?;
    let (days, plain) = if ClaimTable::read(s).await?.by_day {
        (forgetting::day_tables(s).await?, None)
    } else {
        (Vec::new(), Some(old_claims::plain_table(s).await?))
    };
    let groups = standings.iter().map(|standing| standing.group.clone()).collect();
    Ok(Outlook { now_ms, floor, plan: Plan::new(now_ms, own, &standings), days, plain, groups })
}

/// One run, on connections of its own. `None`: another cleaner is at work.
///
/// # Errors
/// Something stands in its way; what is done stays done.
pub async fn run(settings: &Settings, own: &Own) -> Result<Option<Report>, DbError> {
    let store = Store::connect(settings, 1)?;
    let (mut lock, mut session) = (store.control.get().await?, store.control.get().await?);
    let cleaned = forgetting::one_at_a_time(&mut lock, RUN, async || clean(&mut session, settings, own).await).await?;
    cleaned.transpose()
}

async fn clean(s: &mut Session, settings: &Settings, own: &Own) -> Result<Report, DbError> {
    // Longer than any transaction of ours: only a stranger can be in the way for good.
    let patience = settings.limits.budget + settings.limits.statement;
    forgetting::be_patient(s, patience, STATEMENT).await?;
    let mut report = Report { finished: finish(s).await?, ..Report::default() };

    let outlook = look(s, own).await?;
    report.held_back = outlook.held_back();
    let Some(before) = outlook.floor else { return Ok(report) };
    let mut floor = before;
    if let Some(rises) = outlook.plan.floor().filter(|rises| *rises > before) {
        floor = forgetting::raise_floor(s, rises).await?.unwrap_or(before);
        report.raised = Some((before, floor));
        CrashPoint::FloorRaised.passed();
    }
    // By the floor as it is now: another cleaner may have raised it further.
    let outlook = Outlook { floor: Some(floor), ..outlook };
    if let Some(may_go) = outlook.forgettable() {
        report.deleted = sweeper::sweep(s, &may_go).await?;
    }
    for day in outlook.days.into_iter().filter(|day| day.end <= floor) {
        if day.state == DayState::Attached {
            forgetting::detach(s, &day.table).await?;
            CrashPoint::DayDetached.passed();
        }
        forgetting::drop_table(s, &day.table).await?;
        CrashPoint::DayDropped.passed();
        report.dropped.push(day);
    }
    Ok(report)
}

/// Ends the detaches that an earlier run has left: while there is one, no other can begin.
async fn finish(s: &mut Session) -> Result<Vec<NaiveDate>, DbError> {
    let mut finished = Vec::new();
    for day in forgetting::day_tables(s).await?.into_iter().filter(|day| day.state == DayState::Detaching) {
        forgetting::finish_detach(s, &day.table).await?;
        CrashPoint::DayDetached.passed();
        finished.push(day.day);
    }
    Ok(finished)
}
