//! What operators decide: a partition is paused or goes on, a record is held or passed over, a held event is replayed, discarded or
//! resolved.
//!
//! In: a decision, who takes it and why; from the command line, or from the admin port. Out: it is written down, or the reason why not.
//! The owner of the partition carries it out, now and after every rebalance and restart. Nothing is owned and nothing is applied here.
//!
//! Invariant: no decision counts that is not recorded with its actor and reason, and each that is refused changes nothing.

use std::collections::HashSet;

use serde_json::{Value, json};

use crate::held::Request;
use crate::held::shown::time;
use crate::record::{NextOffset, Offset, Skips};
use crate::store::held_requests::{self, Filter, HeldRow};
use crate::store::operator_actions::{self, Decided, Known, Of};
use crate::store::{DbError, ErrorClass, PooledSession, Session, Store, skips};

pub use crate::store::operator_actions::By;

/// How often the owner's open batch is waited for, a second each.
const TRIES: u32 = 30;

/// Where decisions about one group's topic are handed in.
#[derive(Clone, Copy, Debug)]
pub struct Desk<'a> {
    /// The database.
    pub store: &'a Store,
    /// The consumer group.
    pub group: &'a str,
    /// The topic.
    pub topic: &'a str,
}

/// Why a decision does not count.
#[derive(Debug, thiserror::Error)]
pub enum ActionError {
    /// It cannot be had as things stand.
    #[error("{0}")]
    Refused(String),
    /// The owner has held its row all the time.
    #[error("the owner's batch has held the partition for {} s: try again, or look at it first", TRIES)]
    Busy,
    /// The database does not answer, or not so.
    #[error(transparent)]
    Database(#[from] DbError),
}

/// What became of one held event that was asked for.
#[derive(Clone, Debug)]
pub struct Asked {
    /// As it was when it was asked for.
    pub row: HeldRow,
    /// Why the request was not written.
    pub refused: Option<String>,
}

impl Desk<'_> {
    /// Pauses a partition: from now on no batch of it begins, whoever owns it, until it is resumed. A batch that runs is waited for.
    ///
    /// # Errors
    /// It is paused already, nobody has ever owned it, or the database does not answer.
    pub async fn pause(&self, partition: i32, by: By<'_>) -> Result<(), ActionError> {
        self.set_paused(partition, by, true).await
    }

    /// Lets a paused partition go on.
    ///
    /// # Errors
    /// It is not paused, nobody has ever owned it, or the database does not answer.
    pub async fn resume(&self, partition: i32, by: By<'_>) -> Result<(), ActionError> {
        self.set_paused(partition, by, false).await
    }

    async fn set_paused(&self, partition: i32, by: By<'_>, pause: bool) -> Result<(), ActionError> {
        by.check()?;
        let of = self.of(partition);
        if self.patiently(async |s| operator_actions::pause(s, of, by, pause).await).await? {
            return Ok(());
        }
        let known = self.look(partition, None).await?;
        Err(ActionError::Refused(match known.paused {
            Some(paused) if pause => format!("partition {partition} is paused already, {paused}"),
            Some(_) | None if pause => format!("partition {partition} was paused until now: try again"),
            Some(_) | None => format!("partition {partition} is not paused"),
        }))
    }

    /// Wants the record at this offset held instead of applied: it is kept whole in `held_event`, for a replay or to be discarded, and its
    /// partition moves on. Later events of its key wait.
    ///
    /// # Errors
    /// The record is settled, passed over or held already, nobody has ever owned the partition, or the database does not answer.
    pub async fn hold(&self, partition: i32, offset: Offset, by: By<'_>) -> Result<(), ActionError> {
        by.check()?;
        if offset.0 < 0 {
            return Err(ActionError::Refused(format!("{offset} is no offset")));
        }
        let of = self.of(partition);
        if self.patiently(async |s| operator_actions::hold(s, of, offset, by).await).await? {
            return Ok(());
        }
        let known = self.look(partition, Some(offset)).await?;
        Err(ActionError::Refused(not_to_be_held(partition, offset, &known)))
    }

    /// Lets a range of records be passed over: they are settled without effect. Out: all ranges of the partition.
    ///
    /// # Errors
    /// Nobody has ever owned the partition, or the database does not answer.
    pub async fn skip(&self, partition: i32, (from, to): (NextOffset, NextOffset), by: By<'_>) -> Result<Skips, ActionError> {
        by.check()?;
        let wanted = skips::Wanted { partition, from, to, actor: by.actor, reason: by.reason };
        let skips = self.patiently(async |s| skips::skip(s, self.group, self.topic, &wanted).await).await?;
        skips.ok_or_else(|| self.never_owned(partition))
    }

    /// Asks for held events, by their rows, to be replayed, discarded or resolved. Out: what became of each that there is.
    ///
    /// # Errors
    /// The database does not answer.
    pub async fn request(&self, ids: &[i64], request: &Request, by: By<'_>) -> Result<Vec<Asked>, ActionError> {
        by.check()?;
        let mut session = self.session().await?;
        let filter = Filter { ids: Some(ids.to_vec()), ..Filter::default() };
        let most = i64::try_from(ids.len()).unwrap_or(i64::MAX);
        let rows = held_requests::find(&mut session, self.group, self.topic, &filter, 0, most).await?;
        Ok(ask(&mut session, (self.group, self.topic), rows, request, by).await?)
    }

    /// What was decided, of one partition or of all, at most so many before the decision `before`, the latest first.
    ///
    /// # Errors
    /// The database does not answer.
    pub async fn decided(&self, partition: Option<i32>, before: Option<i64>, limit: i64) -> Result<Vec<Decided>, ActionError> {
        let mut session = self.session().await?;
        Ok(operator_actions::list(&mut session, (self.group, self.topic), partition, before, limit).await?)
    }

    const fn of(&self, partition: i32) -> Of<'_> {
        Of { group: self.group, topic: self.topic, partition }
    }

    async fn session(&self) -> Result<PooledSession, ActionError> {
        Ok(self.store.control.get().await.map_err(DbError::from)?)
    }

    async fn look(&self, partition: i32, offset: Option<Offset>) -> Result<Known, ActionError> {
        let mut session = self.session().await?;
        let known = operator_actions::look(&mut session, self.of(partition), offset).await?;
        known.ok_or_else(|| self.never_owned(partition))
    }

    fn never_owned(&self, partition: i32) -> ActionError {
        let (group, topic) = (self.group, self.topic);
        ActionError::Refused(format!("nobody of {group} has ever owned partition {partition} of {topic}: start the service first"))
    }

    /// Again, until the owner's batch lets go of its row.
    async fn patiently<T>(&self, action: impl AsyncFn(&mut Session) -> Result<T, DbError>) -> Result<T, ActionError> {
        for _ in 0..TRIES {
            match action(&mut *self.session().await?).await {
                Err(error) if error.class() == ErrorClass::Retry => {}
                done => return Ok(done?),
            }
        }
        Err(ActionError::Busy)
    }
}

/// A decision for machines: nothing is left out.
#[must_use]
pub fn json_of(decided: &Decided) -> Value {
    json!({
        "id": decided.id,
        "at": time(decided.at),
        "actor": decided.actor,
        "action": decided.action,
        "partition": decided.partition,
        "offset": decided.offset.map(|offset| offset.0),
        "to": decided.to.map(|to| to.0),
        "held": decided.held,
        "reason": decided.reason,
    })
}

/// Writes a request on these rows, if they are still as they were read and can be asked for it. Out: what became of each.
///
/// # Errors
/// The database does not answer.
pub async fn ask(
    s: &mut Session,
    (group, topic): (&str, &str),
    rows: Vec<HeldRow>,
    request: &Request,
    by: By<'_>,
) -> Result<Vec<Asked>, DbError> {
    let mut asked: Vec<Asked> = rows.into_iter().map(|row| Asked { refused: refusal(&row, request), row }).collect();
    let seen: Vec<_> = asked.iter().filter(|asked| asked.refused.is_none()).map(|asked| (asked.row.id, asked.row.state)).collect();
    let taken = held_requests::request(s, &seen, &request.word(), by.actor, by.reason).await?;
    let missed: Vec<i64> = seen.iter().map(|(id, _)| *id).filter(|id| !taken.contains(id)).collect();
    if missed.is_empty() {
        return Ok(asked);
    }
    let most = i64::try_from(missed.len()).unwrap_or(i64::MAX);
    let now = held_requests::find(s, group, topic, &Filter { ids: Some(missed.clone()), ..Filter::default() }, 0, most).await?;
    let missed: HashSet<i64> = missed.into_iter().collect();
    for asked in asked.iter_mut().filter(|asked| missed.contains(&asked.row.id)) {
        let now = now.iter().find(|row| row.id == asked.row.id);
        asked.refused = Some(now.map_or_else(|| "it is gone".to_owned(), |now| format!("meanwhile it is {}", state_of(now))));
    }
    Ok(asked)
}

/// Why this cannot be asked for.
#[must_use]
pub fn refusal(row: &HeldRow, request: &Request) -> Option<String> {
    let waiting = row.wanted.as_ref().map(|wanted| format!("{wanted} is asked for already"));
    waiting.or_else(|| request.permitted(row.state, row.reason).err().map(str::to_owned))
}

fn state_of(row: &HeldRow) -> String {
    let wanted = row.wanted.as_ref().map(|wanted| format!(", and {wanted} is asked for")).unwrap_or_default();
    format!("{}{wanted}", row.state.as_str())
}

fn not_to_be_held(partition: i32, offset: Offset, known: &Known) -> String {
    let record = format!("the record at {offset} of partition {partition}");
    let what_now = "`onceward held` shows it and takes what shall become of it";
    match known {
        Known { is_skipped: true, .. } => format!("{record} is passed over"),
        Known { held: Some((id, reason, state)), .. } => {
            format!("{record} is held already, as number {id} ({reason}, {state}): {what_now}")
        }
        Known { hold: Some(words), .. } => format!("{record} is to be {words}"),
        Known { next_offset: Some(next), .. } if offset.next() <= *next => {
            format!("{record} is settled, for everything below {next} is: it was applied or declined, or is a duplicate")
        }
        Known { .. } => format!("{record} was being settled: try again"),
    }
}

impl By<'_> {
    fn check(&self) -> Result<(), ActionError> {
        let missing = |what| Err(ActionError::Refused(format!("{what} is missing: whoever looks later will want to know")));
        match (self.actor.trim(), self.reason.trim()) {
            ("", _) => missing("the actor"),
            (_, "") => missing("the reason"),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTHING: Known = Known { next_offset: None, paused: None, is_skipped: false, hold: None, held: None };

    #[test]
    fn who_cannot_have_a_record_held_is_told_what_is_known_of_it() {
        let why = |known: &Known| not_to_be_held(3, Offset(9), known);
        let settled = Known { next_offset: Some(NextOffset(10)), ..NOTHING };
        assert!(why(&settled).contains("everything below 10 is"), "{}", why(&settled));
        let held = Known { held: Some((7, "rejected".to_owned(), "parked".to_owned())), ..settled.clone() };
        assert!(why(&held).contains("as number 7 (rejected, parked)"), "{}", why(&held));
        assert!(why(&Known { is_skipped: true, ..held }).ends_with("is passed over"));
        let wanted = Known { hold: Some("held by ann: odd".to_owned()), ..NOTHING };
        assert!(why(&wanted).ends_with("is to be held by ann: odd"), "{}", why(&wanted));
        let meanwhile = Known { next_offset: Some(NextOffset(9)), ..NOTHING };
        assert!(why(&meanwhile).ends_with("try again"), "{}", why(&meanwhile));
    }

    #[test]
    fn a_decision_has_somebody_who_takes_it_and_a_reason() {
        let by = |actor, reason| By { actor, reason }.check().map_err(|error| error.to_string());
        assert_eq!(by("ann", "odd"), Ok(()));
        assert!(by(" ", "odd").is_err_and(|why| why.contains("actor")));
        assert!(by("ann", "\n").is_err_and(|why| why.contains("reason")));
    }
}
