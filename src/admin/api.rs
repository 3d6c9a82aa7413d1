//! The API of the status page, for scripts too: JSON in, JSON out.
//!
//! In: looks and requests. Out: the overview, held events, and what became of a request. It owns nothing; actions do what the command line
//! does. If it dies here, a request was written or not; what is written says so.
//!
//! Invariant: nothing is changed without the token, a name and a reason, and a record is shown to nobody without the token.

use std::time::Duration;

use actix_web::http::StatusCode;
use actix_web::{HttpRequest, HttpResponse, web};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tracing::info;

use super::access::Refusal;
use super::{Admin, duplicates_json};
use crate::actions::{self, ActionError, By, Desk};
use crate::handler::HeldReason;
use crate::held::Request;
use crate::held::shown::{json_of, outline_of, time};
use crate::log;
use crate::record::Offset;
use crate::store::held_events::HeldState;
use crate::store::held_requests::{self, Filter, HeldRow};
use crate::store::{DbError, PooledSession};

pub fn routes(routes: &mut web::ServiceConfig) {
    routes
        .route("/api/overview", web::get().to(overview))
        .route("/api/held", web::get().to(list))
        .route("/api/held/{id}", web::get().to(show))
        .route("/api/held/{id}/{action}", web::post().to(decide))
        .route("/api/decisions", web::get().to(decisions))
        .route("/api/partitions/{partition}/{action}", web::post().to(steer))
        .route("/api/log", web::get().to(log_level))
        .route("/api/log", web::post().to(change_log_level));
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
enum ApiError {
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error("{0}")]
    Wrong(String),
    #[error("there is no such {0}")]
    NotThere(&'static str),
    #[error("{0}")]
    Conflict(String),
    #[error("the database does not answer: {0}")]
    Database(#[from] DbError),
}

impl From<ActionError> for ApiError {
    fn from(error: ActionError) -> Self {
        match error {
            ActionError::Database(error) => Self::Database(error),
            refused => Self::Conflict(refused.to_string()),
        }
    }
}

type Answer = Result<HttpResponse, ApiError>;

impl actix_web::ResponseError for ApiError {
    fn status_code(&self) -> StatusCode {
        match self {
            Self::Refused(refusal) => refusal.status(),
            Self::Wrong(_) => StatusCode::BAD_REQUEST,
            Self::NotThere(_) => StatusCode::NOT_FOUND,
            Self::Conflict(_) => StatusCode::CONFLICT,
            Self::Database(_) => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    fn error_response(&self) -> HttpResponse {
        HttpResponse::build(self.status_code()).json(json!({ "error": self.to_string() }))
    }
}

async fn overview(admin: web::Data<Admin>) -> HttpResponse {
    let mut seen = admin.lookout.look().await.json();
    let snapshot = admin.status.snapshot();
    let red = admin.readiness.red().into_iter().map(|(latch, reason)| (latch.to_owned(), Value::from(reason)));
    seen["process"] = json!({
        "owner": crate::app::owner(),
        "not_ready": red.collect::<serde_json::Map<_, _>>(),
        "stuck": snapshot.stuck(admin.config.pipeline.stuck_after),
        "breaker": snapshot.paused,
        "duplicates": snapshot.duplicates.iter().map(duplicates_json).collect::<serde_json::Map<_, _>>(),
        "actions": admin.access.is_on(),
    });
    HttpResponse::Ok().json(seen)
}

/// Which held events; without a state those that are not settled, and without a reason the unknown ones first.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Which {
    reason: Option<String>,
    state: Option<String>,
}

/// The longest body of a request that is read.
const MOST_BYTES: usize = 16 << 10;
/// How long it may take.
const BODY: Duration = Duration::from_secs(5);
/// The most rows of a list.
const MOST_ROWS: i64 = 100;
/// The most decisions.
const MOST_DECISIONS: i64 = 20;

async fn list(admin: web::Data<Admin>, request: HttpRequest) -> Answer {
    let which = web::Query::<Which>::from_query(request.query_string()).map_err(|error| ApiError::Wrong(error.to_string()))?;
    let filter = which.filter()?;
    let mut session = admin.session().await?;
    let mut rows = Vec::new();
    if filter.reason.is_none() {
        let unknown = Filter { reason: Some(HeldReason::Unknown), ..filter.clone() };
        rows = admin.find(&mut session, &unknown, MOST_ROWS).await?;
    }
    let all = admin.find(&mut session, &filter, MOST_ROWS + 1).await?;
    rows.extend(all.into_iter().filter(|row| filter.reason.is_some() || row.reason != HeldReason::Unknown));
    let most = usize::try_from(MOST_ROWS).unwrap_or(usize::MAX);
    let more = rows.len() > most;
    rows.truncate(most);
    let may_see = admin.access.may_see(request.headers()).is_ok();
    let shown = |row: &HeldRow| if may_see { without_payload(row) } else { outline_of(row) };
    Ok(HttpResponse::Ok().json(json!({ "events": rows.iter().map(shown).collect::<Vec<_>>(), "more": more, "whole": may_see })))
}

async fn show(admin: web::Data<Admin>, id: web::Path<i64>, request: HttpRequest) -> Answer {
    admin.access.may_see(request.headers())?;
    let mut session = admin.session().await?;
    let only = Filter { ids: Some(vec![*id]), ..Filter::default() };
    let row = admin.find(&mut session, &only, 1).await?.pop().ok_or(ApiError::NotThere("held event"))?;
    Ok(HttpResponse::Ok().json(json_of(&row)))
}

/// Who asks and why; for an unknown outcome also what was found out.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Decision {
    actor: String,
    reason: String,
    charged: Option<String>,
    #[serde(default)]
    not_charged: bool,
}

async fn decide(admin: web::Data<Admin>, path: web::Path<(i64, String)>, request: HttpRequest, body: web::Payload) -> Answer {
    admin.access.may_act(request.headers())?;
    let (id, action) = path.into_inner();
    let decision: Decision = read(whole(body).await?)?;
    let (wanted, by) = (decision.request(&action)?, by(&decision.actor, &decision.reason)?);
    let asked = admin.desk().request(&[id], &wanted, by).await?.pop().ok_or(ApiError::NotThere("held event"))?;
    info!(held = id, action, refused = asked.refused, "asked for on the admin port");
    match asked.refused {
        None => Ok(done(&format!("the owner of partition {} carries it out", asked.row.record.partition))),
        Some(why) => Err(ApiError::Conflict(why)),
    }
}

/// Who wants a partition paused or to go on, or one of its records held, and why.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Steering {
    actor: String,
    reason: String,
    offset: Option<i64>,
}

async fn steer(admin: web::Data<Admin>, path: web::Path<(i32, String)>, request: HttpRequest, body: web::Payload) -> Answer {
    admin.access.may_act(request.headers())?;
    let (partition, action) = path.into_inner();
    let steering: Steering = read(whole(body).await?)?;
    let by = by(&steering.actor, &steering.reason)?;
    let told = match (action.as_str(), steering.offset) {
        ("pause", None) => admin.desk().pause(partition, by).await.map(|()| "it is paused, and stays so over restarts"),
        ("resume", None) => admin.desk().resume(partition, by).await.map(|()| "it goes on"),
        ("hold", Some(offset)) => {
            admin.desk().hold(partition, Offset(offset), by).await.map(|()| "the record will be held, and its partition moves on")
        }
        ("hold", None) => return Err(ApiError::Wrong("offset is missing: which record?".to_owned())),
        ("pause" | "resume", Some(_)) => return Err(ApiError::Wrong(format!("a {action} is of the whole partition"))),
        _ => return Err(ApiError::NotThere("action")),
    };
    info!(partition, action, offset = steering.offset, refused = told.is_err(), "asked for on the admin port");
    Ok(done(told?))
}

/// What was decided last: names and reasons, which are people's.
async fn decisions(admin: web::Data<Admin>, request: HttpRequest) -> Answer {
    admin.access.may_see(request.headers())?;
    let decided = admin.desk().decided(None, None, MOST_DECISIONS).await?;
    Ok(HttpResponse::Ok().json(json!({ "decisions": decided.iter().map(actions::json_of).collect::<Vec<_>>() })))
}

/// How much this process says, and who wanted it so: a name and a reason, which are people's.
async fn log_level(admin: web::Data<Admin>, request: HttpRequest) -> Answer {
    admin.access.may_see(request.headers())?;
    said(None)
}

/// How much this process is to say, who wants it and why.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Loudness {
    level: String,
    actor: String,
    reason: String,
}

/// Of this process alone, and until it ends: it is written into its log, and nowhere else.
async fn change_log_level(admin: web::Data<Admin>, request: HttpRequest, body: web::Payload) -> Answer {
    admin.access.may_act(request.headers())?;
    let wanted: Loudness = read(whole(body).await?)?;
    let By { actor, reason } = by(&wanted.actor, &wanted.reason)?;
    let was = log::change(wanted.level.trim(), actor, reason).map_err(|why| ApiError::Wrong(format!("level {why}")))?;
    said(was.map(|said| said.level))
}

fn said(was: Option<String>) -> Answer {
    let said = log::now().ok_or(ApiError::NotThere("log"))?;
    let changed = said.changed.map(|by| json!({ "actor": by.actor, "reason": by.reason, "at": time(by.at) }));
    Ok(HttpResponse::Ok().json(json!({ "level": said.level, "was": was, "changed": changed })))
}

fn done(words: &str) -> HttpResponse {
    HttpResponse::Ok().json(json!({ "done": words }))
}

/// The body, read when it is known who sends it: bounded in bytes and in time.
async fn whole(body: web::Payload) -> Result<web::Bytes, ApiError> {
    let wrong = |why: String| ApiError::Wrong(format!("the body cannot be read: {why}"));
    let read = tokio::time::timeout(BODY, body.to_bytes_limited(MOST_BYTES)).await;
    let read = read.map_err(|_| wrong(format!("it takes more than {} s", BODY.as_secs())))?;
    read.map_err(|_| wrong(format!("it has more than {MOST_BYTES} bytes")))?.map_err(|error| wrong(error.to_string()))
}

fn read<T: DeserializeOwned>(body: web::Bytes) -> Result<T, ApiError> {
    serde_json::from_slice(&body).map_err(|error| ApiError::Wrong(format!("the body is not as it must be: {error}")))
}

fn by<'a>(actor: &'a str, reason: &'a str) -> Result<By<'a>, ApiError> {
    let (actor, reason) = (actor.trim(), reason.trim());
    match (actor.is_empty(), reason.is_empty()) {
        (false, false) => Ok(By { actor, reason }),
        (true, _) => Err(ApiError::Wrong("actor is missing: who asks?".to_owned())),
        (false, true) => Err(ApiError::Wrong("reason is missing: why?".to_owned())),
    }
}

impl Decision {
    fn request(&self, action: &str) -> Result<Request, ApiError> {
        let charged = self.charged.as_deref().map(str::trim).filter(|charge| !charge.is_empty());
        match (action, charged, self.not_charged) {
            ("replay", None, false) => Ok(Request::Replay),
            ("discard", None, false) => Ok(Request::Discard),
            ("resolve", Some(charge), false) => Ok(Request::Charged(charge.to_owned())),
            ("resolve", None, true) => Ok(Request::NotCharged),
            ("resolve", ..) => Err(ApiError::Wrong(
                "a resolve says either `charged` with the provider's name for the charge, or `not_charged` true".to_owned(),
            )),
            ("replay" | "discard", ..) => Err(ApiError::Wrong(format!("a {action} says nothing about a charge"))),
            _ => Err(ApiError::NotThere("action")),
        }
    }
}

impl Which {
    fn filter(&self) -> Result<Filter, ApiError> {
        let unknown = |name: &str, word: &str| ApiError::Wrong(format!("{word:?} is no {name}"));
        let reason = |word: &String| HeldReason::from_word(word).ok_or_else(|| unknown("reason", word));
        let state = |word: &String| HeldState::from_word(word).ok_or_else(|| unknown("state", word));
        let open = || HeldState::ALL.into_iter().filter(|state| state.is_open()).collect();
        let states = self.state.as_ref().map(state).transpose()?.map_or_else(open, |state| vec![state]);
        Ok(Filter { reason: self.reason.as_ref().map(reason).transpose()?, states: Some(states), ..Filter::default() })
    }
}

impl Admin {
    async fn session(&self) -> Result<PooledSession, DbError> {
        self.store.control.get().await.map_err(DbError::from)
    }

    async fn find(&self, session: &mut PooledSession, filter: &Filter, limit: i64) -> Result<Vec<HeldRow>, DbError> {
        held_requests::find(session, &self.config.kafka.group, &self.config.kafka.topic, filter, 0, limit).await
    }

    fn desk(&self) -> Desk<'_> {
        Desk { store: &self.store, group: &self.config.kafka.group, topic: &self.config.kafka.topic }
    }
}

/// For a list: a payload may be a megabyte.
fn without_payload(row: &HeldRow) -> Value {
    let mut whole = json_of(row);
    if let Value::Object(fields) = &mut whole {
        fields.remove("payload");
        fields.remove("headers");
    }
    whole
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decision(body: &str) -> Result<Decision, ApiError> {
        read(web::Bytes::copy_from_slice(body.as_bytes()))
    }

    #[test]
    fn who_and_why_are_required_and_nothing_that_is_not_known_is_taken() {
        for wrong in ["", "[]", r#"{"actor":"ann"}"#, r#"{"actor":"ann","reason":"r","force":true}"#] {
            assert!(matches!(decision(wrong), Err(ApiError::Wrong(_))), "{wrong}");
        }
        assert!(by("ann", " \n").is_err() && by(" ", "why").is_err());
        assert!(by(" ann ", "why").is_ok_and(|by| by.actor == "ann"));
    }

    #[test]
    fn only_a_resolve_says_something_about_a_charge_and_it_says_one_thing() {
        let request = |action: &str, about: &str| {
            let decision = decision(&format!(r#"{{"actor":"ann","reason":"r"{about}}}"#)).expect("JSON");
            decision.request(action).ok()
        };
        assert_eq!(request("replay", ""), Some(Request::Replay));
        assert_eq!(request("discard", ""), Some(Request::Discard));
        assert_eq!(request("resolve", r#","charged":" ch_1 ""#), Some(Request::Charged("ch_1".to_owned())));
        assert_eq!(request("resolve", r#","not_charged":true"#), Some(Request::NotCharged));
        for (action, about) in [
            ("resolve", ""),
            ("resolve", r#","charged":" ""#),
            ("resolve", r#","charged":"ch_1","not_charged":true"#),
            ("discard", r#","not_charged":true"#),
            ("delete", ""),
        ] {
            assert_eq!(request(action, about), None, "{action} {about}");
        }
    }
}
