//! `onceward held`: what is held, and what shall become of it.
//!
//! In: filters and requests. Out: rows for people or machines; requests on rows, which the owner of their partition carries out within a
//! second or two. It owns nothing and applies nothing.
//!
//! Invariant: nothing but a request is written, and each that is not written is told with the reason.

use std::ffi::OsString;
use std::fmt::Write as _;

use anyhow::bail;
use chrono::{DateTime, Utc};
use clap::{ArgGroup, Args, Subcommand, ValueEnum};
use serde_json::json;

use crate::actions::{self, Asked, By};
use crate::cli::text::{actor, printable_lines, table_of};
use crate::config::Config;
use crate::handler::HeldReason;
use crate::held::Request;
use crate::held::shown::{hex, json_of, time};
use crate::progress::Progress;
use crate::store::held_events::HeldState;
use crate::store::held_requests::{self, Filter, HeldRow};
use crate::store::{DbError, Session, Store};
use crate::text::prints;

/// The words.
#[derive(Debug, Args)]
pub struct Held {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Lists held events, the oldest first; without --state those that are not settled.
    List(List),
    /// Shows one held event whole: record, reason, requests.
    Show {
        /// The number in the list.
        id: i64,
        /// For people, or one line of JSON.
        #[arg(long, value_enum, default_value_t = Format::Table)]
        format: Format,
    },
    /// Asks for events to be tried again now.
    Replay(Ask),
    /// Asks for events to be given up for good. One whose outcome is unknown is resolved instead.
    Discard(Ask),
    /// Says whether an event with an unknown outcome was charged.
    Resolve(Resolve),
}

#[derive(Debug, Args)]
struct List {
    #[command(flatten)]
    only: Only,
    /// In this state.
    #[arg(long, value_name = "STATE", value_parser = state)]
    state: Option<HeldState>,
    /// The most rows.
    #[arg(long, value_name = "ROWS", default_value_t = 100, value_parser = clap::value_parser!(i64).range(1..))]
    limit: i64,
    /// For people, or one line of JSON a row.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

#[derive(Debug, Args)]
struct Only {
    /// Held for this reason.
    #[arg(long, value_name = "REASON", value_parser = reason)]
    reason: Option<HeldReason>,
    /// With this record key, as text.
    #[arg(long)]
    key: Option<String>,
    /// Of this partition.
    #[arg(long)]
    partition: Option<i32>,
    /// Held at this time (RFC 3339) or later.
    #[arg(long, value_name = "TIME")]
    since: Option<DateTime<Utc>>,
    /// Held before this time (RFC 3339).
    #[arg(long, value_name = "TIME")]
    until: Option<DateTime<Utc>>,
}

#[derive(Debug, Args)]
#[command(group(ArgGroup::new("which").required(true).multiple(true).args(["ids", "reason", "key", "partition", "since", "until"])))]
struct Ask {
    /// These events, by their numbers in the list; or all that the filters let through.
    ids: Vec<i64>,
    #[command(flatten)]
    only: Only,
    #[command(flatten)]
    because: Because,
}

#[derive(Debug, Args)]
#[command(group(ArgGroup::new("found").required(true).args(["charged", "not_charged"])))]
struct Resolve {
    /// The number in the list.
    id: i64,
    /// It was charged, and the provider calls the charge by this name: the payment is written and nobody is asked.
    #[arg(long, value_name = "CHARGE_ID")]
    charged: Option<String>,
    /// It was not charged: what is known of the attempt is forgotten, and it is tried again.
    #[arg(long)]
    not_charged: bool,
    #[command(flatten)]
    because: Because,
}

#[derive(Debug, Args)]
struct Because {
    /// Why; it is recorded with the event.
    #[arg(long = "because", value_name = "TEXT")]
    why: String,
    /// Who asks; it is recorded with the event. By default the user of this shell.
    #[arg(long, value_name = "NAME")]
    actor: Option<String>,
    /// Says what would be asked for, and asks for nothing.
    #[arg(long)]
    dry_run: bool,
    /// For people, or one line of JSON an event.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    Table,
    Json,
}

/// Rows read or asked for at once.
const PAGE: i64 = 500;

impl Held {
    /// Does it. Out: the text for standard output, and whether every event that was named took its request.
    pub async fn run(&self, config: &Config, environment: &[(OsString, OsString)]) -> anyhow::Result<(String, bool)> {
        let store = Store::connect(&config.database.settings(), 1)?;
        let mut session = store.control.get().await.map_err(DbError::from)?;
        let mut desk = Desk { session: &mut session, group: &config.kafka.group, topic: &config.kafka.topic };
        match &self.what {
            What::List(list) => Ok((desk.list(list).await?, true)),
            What::Show { id, format } => Ok((desk.show(*id, *format).await?, true)),
            What::Replay(ask) => desk.ask(&Request::Replay, &ask.filter(), &ask.because, environment).await,
            What::Discard(ask) => desk.ask(&Request::Discard, &ask.filter(), &ask.because, environment).await,
            What::Resolve(resolve) => {
                let request = match &resolve.charged {
                    Some(charge) if charge.trim().is_empty() => bail!("--charged needs the provider's name for the charge"),
                    Some(charge) => Request::Charged(charge.trim().to_owned()),
                    None => Request::NotCharged,
                };
                let filter = Filter { ids: Some(vec![resolve.id]), ..Filter::default() };
                desk.ask(&request, &filter, &resolve.because, environment).await
            }
        }
    }
}

impl Only {
    fn filter(&self) -> Filter {
        let key = self.key.as_ref().map(|key| key.clone().into_bytes());
        let Self { reason, partition, since, until, .. } = *self;
        Filter { ids: None, states: None, reason, key, partition, since, until }
    }
}

impl Ask {
    /// Without numbers: whatever is not settled and passes.
    fn filter(&self) -> Filter {
        let filter = self.only.filter();
        match self.ids.is_empty() {
            true => Filter { states: Some(open_states()), ..filter },
            false => Filter { ids: Some(self.ids.clone()), ..filter },
        }
    }
}

struct Desk<'a> {
    session: &'a mut Session,
    group: &'a str,
    topic: &'a str,
}

impl Desk<'_> {
    async fn list(&mut self, list: &List) -> anyhow::Result<String> {
        let states = Some(list.state.map_or_else(open_states, |state| vec![state]));
        let filter = Filter { states, ..list.only.filter() };
        let mut rows = self.find(&filter, 0, list.limit + 1).await?;
        let more = rows.len() > usize::try_from(list.limit).unwrap_or(usize::MAX);
        rows.truncate(usize::try_from(list.limit).unwrap_or(usize::MAX));
        if list.format == Format::Json {
            return Ok(rows.iter().map(|row| format!("{}\n", json_of(row))).collect());
        }
        let mut text = table(&rows);
        if more {
            writeln!(text, "there are more; --limit shows them")?;
        }
        Ok(text)
    }

    async fn show(&mut self, id: i64, format: Format) -> anyhow::Result<String> {
        let filter = Filter { ids: Some(vec![id]), ..Filter::default() };
        let rows = self.find(&filter, 0, 1).await?;
        let Some(row) = rows.first() else { bail!("there is no held event {id} of this group and topic") };
        Ok(match format {
            Format::Table => whole(row),
            Format::Json => format!("{}\n", json_of(row)),
        })
    }

    async fn ask(
        &mut self,
        request: &Request,
        filter: &Filter,
        because: &Because,
        environment: &[(OsString, OsString)],
    ) -> anyhow::Result<(String, bool)> {
        if because.why.trim().is_empty() {
            bail!("--because needs a reason");
        }
        let actor = actor(because.actor.as_deref(), environment);
        let (mut text, mut missing, mut all_taken) = (String::new(), filter.ids.clone().unwrap_or_default(), true);
        let mut after = 0;
        let mut progress = Progress::begin(filter.ids.is_none(), "asking for held events", 0, None);
        loop {
            let rows = self.find(filter, after, PAGE).await?;
            let Some(last) = rows.last() else { break };
            after = last.id;
            missing.retain(|id| !rows.iter().any(|row| row.id == *id));
            for asked in self.ask_page(rows, request, because, &actor).await? {
                all_taken &= asked.refused.is_none();
                progress.step();
                text.push_str(&answer(&asked, request, because));
            }
        }
        for id in &missing {
            let why = "there is no such held event of this group and topic, or a filter keeps it out";
            text.push_str(&match because.format {
                Format::Table => format!("{id}: not asked for: {why}\n"),
                Format::Json => format!("{}\n", json!({ "id": id, "requested": false, "why_not": why })),
            });
        }
        // What the filters let through may well be something that cannot be asked for; what was named must be.
        Ok((text, filter.ids.is_none() || (all_taken && missing.is_empty())))
    }

    async fn ask_page(
        &mut self,
        rows: Vec<HeldRow>,
        request: &Request,
        because: &Because,
        actor: &str,
    ) -> Result<Vec<Asked>, DbError> {
        if because.dry_run {
            return Ok(rows.into_iter().map(|row| Asked { refused: actions::refusal(&row, request), row }).collect());
        }
        let by = By { actor, reason: because.why.trim() };
        actions::ask(self.session, (self.group, self.topic), rows, request, by).await
    }

    async fn find(&mut self, filter: &Filter, after: i64, limit: i64) -> Result<Vec<HeldRow>, DbError> {
        held_requests::find(self.session, self.group, self.topic, filter, after, limit).await
    }
}

fn answer(asked: &Asked, request: &Request, because: &Because) -> String {
    let (row, word) = (&asked.row, request.word());
    let id = row.id;
    if because.format == Format::Json {
        let requested = asked.refused.is_none() && !because.dry_run;
        return format!("{}\n", json!({ "id": id, "request": word, "requested": requested, "why_not": asked.refused }));
    }
    match &asked.refused {
        Some(why) => format!("{id}: not asked for: {why}\n"),
        None if because.dry_run => format!("{id}: would ask for {word} ({}, {})\n", row.reason, row.state.as_str()),
        None => format!("{id}: asked for {word}; the owner of partition {} carries it out\n", row.record.partition),
    }
}

fn open_states() -> Vec<HeldState> {
    HeldState::ALL.into_iter().filter(|state| state.is_open()).collect()
}

fn state(word: &str) -> Result<HeldState, String> {
    HeldState::from_word(word).ok_or_else(|| one_of(&HeldState::ALL.map(HeldState::as_str)))
}

fn reason(word: &str) -> Result<HeldReason, String> {
    HeldReason::from_word(word).ok_or_else(|| one_of(&HeldReason::ALL.map(HeldReason::as_str)))
}

fn one_of(words: &[&str]) -> String {
    format!("must be one of {}", words.join(", "))
}

fn table(rows: &[HeldRow]) -> String {
    let head =
        ["id", "partition", "offset", "reason", "state", "attempts", "held since", "next attempt", "asked for", "key", "event"];
    let line = |row: &HeldRow| {
        [
            row.id.to_string(),
            row.record.partition.to_string(),
            row.record.offset.to_string(),
            row.reason.to_string(),
            row.state.as_str().to_owned(),
            row.attempts.to_string(),
            time(row.held_at),
            row.next_attempt_at.map(time).unwrap_or_default(),
            row.wanted.clone().unwrap_or_default(),
            row.record.key.as_deref().map(shown).unwrap_or_default(),
            row.event_id.map(|id| id.to_string()).unwrap_or_default(),
        ]
    };
    table_of(head, rows.iter().map(line))
}

fn whole(row: &HeldRow) -> String {
    let fields = json_of(row);
    let fields = fields.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null());
    fields.fold(String::new(), |mut text, (name, value)| {
        let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let _ = writeln!(text, "{name:<16} {}", printable_lines(&value));
        text
    })
}

/// A key in a table: short, and harmless to a terminal.
fn shown(key: &[u8]) -> String {
    const MOST: usize = 24;
    let text = std::str::from_utf8(key).ok().filter(|text| text.chars().all(prints));
    let text = text.map_or_else(|| format!("0x{}", hex(key)), str::to_owned);
    if text.chars().count() <= MOST { text } else { text.chars().take(MOST - 1).chain(['…']).collect() }
}
