//! Billing: one payment row and one charge per confirmed order.
//!
//! In: claimed [`OrderConfirmed`] events, inside the engine's transaction. Out: their rows in `payment`, what is left of their
//! attempts, and one outcome each. It owns nothing between two batches: the engine keeps the answers. If it dies here, the
//! transaction rolls back, the attempts stay, and so does every answer that had come.
//!
//! Invariant: nobody is called whose attempt is not durable, who has a payment already, whose answer is known, or whose key the
//! provider may have forgotten; and every event that was called for leaves a payment row or an attempt.
//!
//! This file reads and writes; what follows from what was read is decided in `verdict`.

mod verdict;

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use actix::Addr;
use uuid::Uuid;

use self::verdict::Verdict;
use crate::crash::CrashPoint;
use crate::event::{self, OrderConfirmed};
use crate::handler::{BatchContext, Claimed, Event, Found, Handler, Outcome, Pause, Rejection, Trace};
use crate::pipeline::payment::{Called, Charge, ChargeBatch, Kept, PaymentActor};
use crate::provider::{Breaker, Profile};
use crate::record::{Record, SourceId};
use crate::store::attempts::{self, NewAttempt, Opened};
use crate::store::payments::{self, PaymentRow};
use crate::store::{DbError, Form, Pool, Session, Store};

/// How long a batch waits before it looks for the payment actor again.
const NO_ACTOR_WAIT: Duration = Duration::from_secs(1);

/// The handler; see the head of this file.
#[derive(Debug)]
pub struct Billing {
    provider: Option<Provider>,
}

#[derive(Debug)]
struct Provider {
    /// A pool of its own: an attempt is committed while the batch's transaction is open.
    attempts: Pool,
    payment: Addr<PaymentActor>,
    breaker: Breaker,
    profile: Profile,
}

impl Billing {
    /// Charges at the provider.
    #[must_use]
    pub fn charging(store: &Store, payment: Addr<PaymentActor>, breaker: Breaker, profile: Profile) -> Self {
        Self { provider: Some(Provider { attempts: store.attempts.clone(), payment, breaker, profile }) }
    }

    /// Writes payment rows and calls nobody (`provider.kind = "none"`).
    #[must_use]
    pub const fn without_provider() -> Self {
        Self { provider: None }
    }
}

impl Handler for Billing {
    type Event = OrderConfirmed;
    type Answer = Kept;

    fn decode(&self, record: &Record) -> Result<OrderConfirmed, Rejection> {
        event::decode(record.payload.as_deref())
    }

    async fn apply(
        &self,
        tx: &mut Session,
        ctx: &BatchContext<Kept>,
        events: &[Claimed<OrderConfirmed>],
    ) -> Result<Vec<Outcome>, DbError> {
        match &self.provider {
            Some(provider) => provider.apply(tx, ctx, events).await,
            None => {
                let events = events.iter().map(Claimed::event);
                let rows = events.map(|event| Some(verdict::row_without_provider(event))).collect();
                write_rows(tx, rows, ctx.form)
                    .await
                    .map(|written| written.into_iter().map(|row| row.unwrap_or(Outcome::Applied)).collect())
            }
        }
    }

    fn shares_transactions(&self) -> bool {
        self.provider.is_none()
    }

    /// A payment outlives its claim.
    async fn traces(&self, tx: &mut Session, events: &[&OrderConfirmed]) -> Result<Vec<Trace>, DbError> {
        let ids: Vec<Uuid> = events.iter().map(|event| event.event_id).collect();
        let payments = payments::look_up(tx, &ids).await?;
        let trace = |event: &&OrderConfirmed| {
            let payment = payments.iter().find(|payment| payment.event_id == event.event_id);
            verdict::trace(event, payment)
        };
        Ok(events.iter().map(trace).collect())
    }

    fn pause(&self) -> Option<Pause> {
        let breaker = &self.provider.as_ref()?.breaker;
        let opened = breaker.opened()?;
        Some(Pause { reason: opened.reason, since: opened.since, wait: breaker.wait(Instant::now()) })
    }

    async fn doubt_held(&self, tx: &mut Session, source: SourceId, group: &str) -> Result<(), DbError> {
        match self.provider {
            Some(_) => attempts::doubt_held(tx, source, group).await,
            None => Ok(()),
        }
    }

    async fn refused(
        &self,
        tx: &mut Session,
        ctx: &BatchContext<Kept>,
        event: &Claimed<OrderConfirmed>,
        error: &str,
    ) -> Result<Outcome, DbError> {
        if self.provider.is_some() {
            // What the provider said goes into the attempt's row: a replay writes the payment from there, and asks nobody.
            let begun = without_payment(tx, ctx, &[event.event()], &[]).await?;
            attempts::settle(tx, ctx.source, &begun, &[]).await?;
        }
        Ok(verdict::refused(ctx.answers.get(event.event().event_id), error))
    }

    /// The attempt's row tells it: with a charge the payment is written from it and nobody is asked, without one it is as if nobody had.
    async fn resolve(&self, tx: &mut Session, event: &OrderConfirmed, found: &Found) -> Result<(), DbError> {
        match found {
            Found::Happened(charge) => attempts::note_charge(tx, event.event_id, event.digest(), verdict::CHARGED, charge).await,
            Found::NotHappened => attempts::forget(tx, &[event.event_id]).await,
        }
    }

    async fn may_have_happened(&self, tx: &mut Session, event: &OrderConfirmed) -> Result<bool, DbError> {
        attempts::is_in_doubt(tx, event.event_id).await
    }
}

impl Provider {
    async fn apply(
        &self,
        tx: &mut Session,
        ctx: &BatchContext<Kept>,
        claimed: &[Claimed<OrderConfirmed>],
    ) -> Result<Vec<Outcome>, DbError> {
        let Some(opened) = self.open(ctx, claimed).await? else {
            // Fenced: the partition is somebody else's. Nobody is called, and COMMIT or the next fence tells the owner.
            return Ok(vec![Outcome::NotStarted { wait: Duration::ZERO }; claimed.len()]);
        };
        let events: Vec<&OrderConfirmed> = claimed.iter().map(Claimed::event).collect();
        let events = &events[..];
        CrashPoint::AttemptsOpened.passed();
        let mut verdicts = self.judge(ctx, events, opened);
        let sequences: Vec<i64> = claimed.iter().map(|claimed| claimed.sequence().number()).collect();
        verdict::stand_behind(&mut verdicts, &sequences);
        self.call(ctx, claimed, &mut verdicts).await;

        let rows = events.iter().zip(&verdicts).map(|(event, verdict)| verdict.payment_row(event)).collect();
        let written = write_rows(tx, rows, ctx.form).await?;
        let outcomes: Vec<Outcome> =
            verdicts.iter().zip(written).map(|(verdict, written)| written.unwrap_or_else(|| verdict.outcome())).collect();

        let paid = |outcome: &Outcome| matches!(outcome, Outcome::Applied | Outcome::Declined);
        let settled: Vec<Uuid> =
            events.iter().zip(&outcomes).filter(|(_, outcome)| paid(outcome)).map(|(event, _)| event.event_id).collect();
        let begun = without_payment(tx, ctx, events, &settled).await?;
        attempts::settle(tx, ctx.source, &begun, &settled).await?;
        CrashPoint::AttemptsSettled.passed();
        Ok(outcomes)
    }

    /// Makes the attempts of all events durable that may be asked for now. `None`: fenced.
    async fn open(&self, ctx: &BatchContext<Kept>, claimed: &[Claimed<OrderConfirmed>]) -> Result<Option<Opened>, DbError> {
        let answered = |id| ctx.answers.get(id).is_some_and(|kept| verdict::is_final(&kept));
        let to_ask = claimed.iter().filter(|claimed| !answered(claimed.event().event_id));
        let attempt = |claimed: &Claimed<OrderConfirmed>| NewAttempt {
            in_doubt: claimed.is_in_doubt(),
            ..verdict::new_attempt(claimed.event(), &self.profile)
        };
        let new: Vec<NewAttempt> = to_ask.map(attempt).collect();
        if new.is_empty() {
            return Ok(Some(Opened::default()));
        }
        let mut session = self.attempts.get().await?;
        attempts::open(&mut session, ctx.source, ctx.epoch, &new).await
    }

    fn judge(&self, ctx: &BatchContext<Kept>, events: &[&OrderConfirmed], opened: Opened) -> Vec<Verdict> {
        let payments: HashMap<Uuid, PaymentRow> = opened.payments.into_iter().map(|row| (row.event_id, row)).collect();
        let mut known: HashMap<Uuid, _> = opened.attempts.into_iter().map(|attempt| (attempt.event_id, attempt)).collect();
        let verdict = |event: &&OrderConfirmed| {
            let id = event.event_id;
            let verdict = verdict::judge(event, ctx.answers.get(id), payments.get(&id), known.remove(&id), &self.profile);
            if let Verdict::Answered(kept) = &verdict {
                ctx.answers.keep(id, kept.clone()); // also one that an attempt's row remembers
            }
            verdict
        };
        events.iter().map(verdict).collect()
    }

    /// Asks for every charge that is to be asked for, and puts what became of it in its place.
    async fn call(&self, ctx: &BatchContext<Kept>, claimed: &[Claimed<OrderConfirmed>], verdicts: &mut [Verdict]) {
        let charge = |(verdict, claimed): (&Verdict, &Claimed<_>)| {
            Some(Charge { trace: claimed.trace_context().cloned(), ..verdict.charge()?.clone() })
        };
        let charges: Vec<Charge> = verdicts.iter().zip(claimed).filter_map(charge).collect();
        if charges.is_empty() {
            return;
        }
        let (stop, answers) = (ctx.stop.clone(), ctx.answers.clone());
        let batch = ChargeBatch { charges, deadline: ctx.deadline, deadline_wall: ctx.deadline_wall, stop, answers };
        let called = self.payment.send(batch).await.map_err(|fault| {
            tracing::error!(%fault, source = %ctx.source, "the payment actor did not answer; calls that had begun are unknown");
        });
        let mut called = called.unwrap_or_default().into_iter();
        for verdict in verdicts {
            let Verdict::Ask(charge) = verdict else { continue };
            let unanswered = || match ctx.answers.get(charge.event_id) {
                Some(begun) => Called::Answered(begun),
                None => Called::NotStarted { wait: NO_ACTOR_WAIT },
            };
            *verdict = called.next().unwrap_or_else(unanswered).into();
        }
    }
}

/// Writes the rows. For a row that another one stood in the way of, what the comparison says; `None` for every other event.
async fn write_rows(tx: &mut Session, rows: Vec<Option<PaymentRow>>, form: Form) -> Result<Vec<Option<Outcome>>, DbError> {
    let new: Vec<PaymentRow> = rows.iter().flatten().cloned().collect();
    let written = payments::insert(tx, &new, form).await?;
    if !new.is_empty() {
        CrashPoint::PaymentsWritten.passed();
    }
    if written.len() == new.len() {
        return Ok(vec![None; rows.len()]);
    }
    let written: HashSet<Uuid> = written.into_iter().collect();
    let missing: Vec<Uuid> = new.iter().map(|row| row.event_id).filter(|id| !written.contains(id)).collect();
    let found = payments::look_up(tx, &missing).await?;
    let compare = |row: Option<PaymentRow>| {
        let row = row.filter(|row| !written.contains(&row.event_id))?;
        Some(verdict::compare(&row, found.iter().find(|found| found.event_id == row.event_id)))
    };
    Ok(rows.into_iter().map(compare).collect())
}

/// Every begun attempt that stays without a payment: of this batch, and of earlier tries that were rolled back.
async fn without_payment(
    tx: &mut Session,
    ctx: &BatchContext<Kept>,
    events: &[&OrderConfirmed],
    settled: &[Uuid],
) -> Result<Vec<attempts::BegunAttempt>, DbError> {
    let settled: HashSet<Uuid> = settled.iter().copied().collect();
    let here: HashSet<Uuid> = events.iter().map(|event| event.event_id).collect();
    let mut kept = ctx.answers.all();
    kept.retain(|(id, _)| !settled.contains(id));
    let elsewhere: Vec<Uuid> = kept.iter().map(|(id, _)| *id).filter(|id| !here.contains(id)).collect();
    let paid: HashSet<Uuid> = payments::look_up(tx, &elsewhere).await?.into_iter().map(|row| row.event_id).collect();
    kept.retain(|(id, _)| !paid.contains(id));
    // In the order of their ids, so that two transactions lock rows in one order.
    kept.sort_unstable_by_key(|(id, _)| *id);
    Ok(kept.into_iter().filter_map(|(id, kept)| verdict::begun_attempt(id, kept)).collect())
}
