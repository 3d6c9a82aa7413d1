//! A second group on the same topic: each confirmed order sends its customer one message, through a downstream that is asked by HTTP.
//!
//! A message cannot be rolled back. So the event's id goes with it as idempotency key, and the downstream promises to act once per key; an answer
//! is kept at once, so that a batch that runs again does not ask again; and what nobody knows is `Unknown`, never "not sent".
//!
//! ```sh
//! psql "$ONCEWARD_DATABASE_URL" -f examples/notify.sql
//! export ONCEWARD_KAFKA_BROKERS=localhost:9092 ONCEWARD_KAFKA_GROUP=notifications ONCEWARD_PROVIDER_KIND=none
//! NOTIFY_URL=http://localhost:8025/messages cargo run --example notify    # or --config FILE
//! ```

use std::collections::HashSet;
use std::env;
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime};

use diesel::prelude::*;
use diesel_async::RunQueryDsl;
use onceward::event::{self, OrderConfirmed};
use onceward::handler::{BatchContext, Claimed, Handler, Outcome, Rejection};
use onceward::record::Record;
use onceward::store::{DbError, Session};
use reqwest::{Client, Response, redirect};

use self::schema::notification;

mod schema {
    diesel::table! {
        notification (event_id) {
            event_id -> Uuid,
            customer_id -> BigInt,
        }
    }
}

/// The handler.
struct Notifications {
    http: Client,
    url: String,
}

/// The one answer that is final: the message is out.
#[derive(Clone, Debug)]
struct Sent;

impl Handler for Notifications {
    type Event = OrderConfirmed;
    type Answer = Sent;

    fn decode(&self, record: &Record) -> Result<OrderConfirmed, Rejection> {
        event::decode(record.payload.as_deref())
    }

    async fn apply(
        &self,
        tx: &mut Session,
        ctx: &BatchContext<Sent>,
        events: &[Claimed<OrderConfirmed>],
    ) -> Result<Vec<Outcome>, DbError> {
        let (mut outcomes, mut held_up, mut rows) = (Vec::new(), HashSet::new(), Vec::new());
        for claimed in events {
            let order = claimed.event();
            // Messages of one record key keep their order: once one must be tried again, the later ones wait.
            let outcome = if held_up.contains(&claimed.sequence()) { Outcome::Behind } else { self.send(ctx, order).await };
            if outcome.holds_up() {
                held_up.insert(claimed.sequence());
            }
            if outcome == Outcome::Applied {
                rows.push((notification::event_id.eq(order.event_id), notification::customer_id.eq(order.customer_id)));
            }
            outcomes.push(outcome);
        }
        let written = diesel::insert_into(notification::table).values(rows).execute(&mut **tx).await;
        written.map_err(|error| tx.db_error("write what is sent", error))?;
        Ok(outcomes)
    }
}

impl Notifications {
    async fn send(&self, ctx: &BatchContext<Sent>, order: &OrderConfirmed) -> Outcome {
        if ctx.answers.get(order.event_id).is_some() {
            return Outcome::Applied; // an earlier try of this batch has sent it and was rolled back
        }
        let left = ctx.deadline.saturating_duration_since(Instant::now());
        if ctx.stop.is_raised() || left.is_zero() || SystemTime::now() >= ctx.deadline_wall {
            return Outcome::NotStarted { wait: Duration::ZERO };
        }
        let message = format!(r#"{{"customer":{},"text":"Order {} is confirmed."}}"#, order.customer_id, order.order_id);
        let request = self.http.post(&self.url).timeout(left).header("Content-Type", "application/json");
        let request = request.header("Idempotency-Key", order.event_id.hyphenated().to_string()).body(message);
        match request.send().await {
            Ok(answer) if answer.status().is_success() => {
                ctx.answers.keep(order.event_id, Sent);
                Outcome::Applied
            }
            Ok(answer) => refusal(&answer),
            // It never left this machine.
            Err(error) if error.is_connect() || error.is_builder() => Outcome::Retry { error: error.to_string(), wait: None },
            // It did, and the answer is lost. The downstream knows the key, so asking again is safe: nobody need decide.
            Err(error) => Outcome::Unknown { error: error.to_string(), wait: None, parked: false },
        }
    }
}

/// What an answer other than "sent" means.
fn refusal(answer: &Response) -> Outcome {
    let seconds = answer.headers().get("Retry-After").and_then(|value| value.to_str().ok()?.parse().ok());
    let (error, wait) = (answer.status().to_string(), seconds.map(Duration::from_secs));
    match answer.status().as_u16() {
        // Not now. 409: the key is being worked on by a call whose answer was lost.
        409 | 425 | 429 | 503 => Outcome::Retry { error, wait },
        // Never: it would say the same each time.
        400..=407 | 410..=424 | 426..=499 => Outcome::Rejected { error },
        // An error on the way tells nothing of what was done.
        _ => Outcome::Unknown { error, wait, parked: false },
    }
}

fn main() -> ExitCode {
    let Ok(url) = env::var("NOTIFY_URL") else {
        eprintln!("NOTIFY_URL is not set");
        return ExitCode::from(64);
    };
    // Of the crates that can encrypt, the one that onceward uses.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let http = Client::builder().redirect(redirect::Policy::none()).build().expect("a client without settings can be made");
    onceward::engine::main(Notifications { http, url })
}
