//! What operators ask for, carried out by the owner.
//!
//! In: rows with a request. Out: the same rows, queued, discarded, or with the reason why not. It owns a fenced transaction in which
//! nothing else happens: what it notes of attempts must be committed before anybody looks at them, on whatever connection. If it dies
//! here, the requests are still there.
//!
//! Invariant: an event whose effect may have happened is never discarded.

use tracing::info;

use crate::crash::CrashPoint;
use crate::handler::{Event, Found, Handler as Business};
use crate::held::Request;
use crate::pipeline::batch::decode_guarded;
use crate::pipeline::claim::fenced;
use crate::pipeline::dedup::{BatchError, Engine, RunBatch, Settled};
use crate::store::held_requests::{self, CarriedOut, OpenRequest};
use crate::store::{Session, TransactionError, held_turns};

/// Requests carried out in one transaction.
const AT_ONCE: i64 = 512;

/// Carries out what waits, in the order of the rows. What is queued by it runs in the next batch.
pub(super) async fn run_requests<H: Business>(
    engine: &Engine<H>,
    session: &mut Session,
    run: &RunBatch<H::Answer>,
) -> Result<Settled, TransactionError<BatchError>> {
    let runs = [run];
    let carried_out = fenced(engine, session, &runs, "requests", async |tx, _| {
        let requests = held_requests::lock(tx, run.source, AT_ONCE).await?;
        CrashPoint::RequestRead.passed();
        let mut done = Vec::with_capacity(requests.len());
        for request in &requests {
            if let Some(carried_out) = carry_out_one(engine, tx, run, request).await? {
                let OpenRequest { id, wanted, actor, .. } = request;
                info!(partition = run.partition, held = id, wanted, actor, ?carried_out, "an operator's request");
                done.push((*id, carried_out));
            }
        }
        held_requests::carry_out(tx, &done).await?;
        Ok(held_turns::open(tx, run.source).await?)
    });
    let held = Some(carried_out.await?);
    Ok(Settled { frontier: None, given_back: Vec::new(), started: 0, wait: None, held })
}

/// `None`: not now. A transaction that was rolled back has called for this event, so it must settle first.
async fn carry_out_one<H: Business>(
    engine: &Engine<H>,
    tx: &mut Session,
    run: &RunBatch<H::Answer>,
    asked: &OpenRequest,
) -> Result<Option<CarriedOut>, BatchError> {
    let Some(request) = Request::from_word(&asked.wanted) else {
        return Ok(Some(CarriedOut::Refused(format!("{:?} is no request", asked.wanted))));
    };
    if let Err(why) = request.permitted(asked.state, asked.reason) {
        return Ok(Some(CarriedOut::Refused(why.to_owned())));
    }
    let event = decode_guarded(&engine.handler, &asked.record).ok();
    if event.as_ref().is_some_and(|event| run.answers.get(event.id()).is_some()) {
        return Ok(None);
    }
    let found = match request {
        Request::Replay => return Ok(Some(CarriedOut::Queued)),
        Request::Discard => {
            let may_have_happened = match &event {
                Some(event) => engine.handler.may_have_happened(tx, event).await?,
                None => false,
            };
            let why = "an attempt was cut off, so it may have happened: resolve it";
            return Ok(Some(if may_have_happened { CarriedOut::InDoubt(why.to_owned()) } else { CarriedOut::Discarded }));
        }
        Request::Charged(charge) => Found::Happened(charge),
        Request::NotCharged => Found::NotHappened,
    };
    let Some(event) = event else {
        return Ok(Some(CarriedOut::Refused("this release cannot decode it".to_owned())));
    };
    engine.handler.resolve(tx, &event, &found).await?;
    Ok(Some(CarriedOut::Queued))
}
