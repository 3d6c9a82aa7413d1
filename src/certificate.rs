//! The certificate: every condition under which the guarantee holds, asked one by one.
//!
//! In: a configuration that has passed its own checks. Out: one [`Finding`] per [`Condition`], each with what to do. It owns its
//! connections, changes nothing, charges nobody, and joins no group. If it dies here, nothing has happened.
//!
//! Invariant: it fails closed. What could not be asked is not called ok, and a condition that nobody has answered is one that could
//! not be asked.

mod broker;
mod condition;
mod database;
mod downstream;
mod group;
mod tables;
mod topic;

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

use serde_json::json;
use tracing::warn;

pub use self::condition::{Condition, Weight};
use crate::config::Config;
use crate::store::{DbError, PooledSession, Session, Store, conditions};

/// The answer to one condition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Which one.
    pub condition: Condition,
    /// How it ended.
    pub verdict: Verdict,
    /// What was found, or why nothing was.
    pub found: String,
    /// What to do; empty when it holds.
    pub todo: String,
}

/// How asking for a condition ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It holds.
    Ok,
    /// It does not.
    Failed,
    /// Nobody knows.
    NotAsked,
    /// This set-up does not need it.
    DoesNotApply,
}

/// Why `run` does not read anything yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Objection {
    /// A blocking condition does not hold: waiting does not help.
    Failed(Vec<Finding>),
    /// The database could not be asked for one.
    NotAsked(Finding),
}

/// Asks for everything.
pub async fn findings(config: &Config) -> Vec<Finding> {
    let mut answers = Answers::default();
    answers.holds(Condition::Configuration, "every key, and the order of the time limits");
    let mut session = database::connect(config, &mut answers).await;
    let frontiers = match &mut session {
        Some(session) => {
            database::ask(config, session, &mut answers).await;
            conditions::frontiers(session, &config.kafka.group, &config.kafka.topic).await.ok()
        }
        None => None,
    };
    let engine = downstream::Engine::ask(config).await;
    broker::judge_the_way(&config.kafka, &mut answers);
    if let Some(facts) = broker::Facts::ask(config, frontiers, &mut answers).await {
        topic::judge(config, &facts, &mut answers);
        group::judge(config, &facts, engine.is_some(), session.as_deref_mut(), &mut answers).await;
    }
    downstream::judge(config, engine, &mut answers).await;
    answers.complete("what it rests on did not answer: see the lines above")
}

/// What `run` asks before it reads anything: the conditions that nobody would notice later.
///
/// # Errors
/// Why it must not read yet, or not at all.
pub async fn before_the_start(config: &Config, session: &mut Session) -> Result<(), Objection> {
    let mut answers = Answers::default();
    database::ask(config, session, &mut answers).await;
    topic::judge_cleanup_policy(broker::cleanup_policy(&config.kafka).await, &mut answers);
    let asked = answers.0.into_values().filter(|finding| finding.condition.weight() == Weight::Blocking);
    let (failed, others): (Vec<_>, Vec<_>) = asked.partition(|finding| finding.verdict == Verdict::Failed);
    if !failed.is_empty() {
        return Err(Objection::Failed(failed));
    }
    let mut open = None;
    for finding in others.into_iter().filter(|finding| finding.verdict == Verdict::NotAsked) {
        if finding.condition == Condition::CleanupPolicy {
            // A broker that is away is waited for anyway, and one that keeps its settings to itself must not keep the engine down.
            warn!(condition = finding.condition.name(), reason = finding.found, "not asked: `onceward check` does not call it ok");
        } else {
            open.get_or_insert(finding);
        }
    }
    open.map_or(Ok(()), |finding| Err(Objection::NotAsked(finding)))
}

/// A connection of its own, to ask with.
async fn session(config: &Config) -> Result<PooledSession, DbError> {
    let store = Store::connect(&config.database.settings(), 1)?;
    Ok(store.control.get().await?)
}

/// The answers so far; each condition has one at most.
#[derive(Debug, Default)]
struct Answers(BTreeMap<Condition, Finding>);

impl Answers {
    fn holds(&mut self, condition: Condition, found: impl fmt::Display) {
        self.answer(condition, Verdict::Ok, found, "");
    }

    fn fails(&mut self, condition: Condition, found: impl fmt::Display, todo: impl fmt::Display) {
        self.answer(condition, Verdict::Failed, found, todo);
    }

    fn not_asked(&mut self, condition: Condition, why: impl fmt::Display) {
        self.answer(condition, Verdict::NotAsked, why, "");
    }

    fn does_not_apply(&mut self, condition: Condition, why: impl fmt::Display) {
        self.answer(condition, Verdict::DoesNotApply, why, "");
    }

    /// `Err`: found, and what to do.
    fn judged<D: fmt::Display>(&mut self, condition: Condition, judged: Result<String, (String, D)>) {
        match judged {
            Ok(found) => self.holds(condition, found),
            Err((found, todo)) => self.fails(condition, found, todo),
        }
    }

    fn answer(&mut self, condition: Condition, verdict: Verdict, found: impl fmt::Display, todo: impl fmt::Display) {
        let finding = Finding { condition, verdict, found: one_line(found), todo: one_line(todo) };
        let before = self.0.insert(condition, finding);
        assert!(before.is_none(), "{condition:?} is answered twice");
    }

    /// One finding per condition, in their order.
    fn complete(mut self, why_not: &str) -> Vec<Finding> {
        for condition in Condition::ALL {
            if !self.0.contains_key(condition) {
                self.not_asked(*condition, why_not);
            }
        }
        self.0.into_values().collect()
    }
}

/// What servers say may have line breaks in it.
fn one_line(text: impl fmt::Display) -> String {
    text.to_string().split_whitespace().collect::<Vec<_>>().join(" ")
}

impl Finding {
    /// Whether the certificate can be given with this.
    #[must_use]
    pub fn is_fine(&self) -> bool {
        match self.verdict {
            Verdict::Ok | Verdict::DoesNotApply => true,
            Verdict::Failed | Verdict::NotAsked => false,
        }
    }

    /// One object, for machines. Names and verdicts are stable.
    #[must_use]
    pub fn json(&self) -> serde_json::Value {
        json!({
            "condition": self.condition.name(),
            "verdict": self.verdict.word(),
            "blocking": self.condition.weight() == Weight::Blocking,
            "found": self.found,
            "todo": self.todo,
        })
    }
}

impl Verdict {
    const fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Failed => "failed",
            Self::NotAsked => "not_asked",
            Self::DoesNotApply => "does_not_apply",
        }
    }
}

/// One line, for people.
impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = match self.verdict {
            Verdict::Ok => "ok",
            Verdict::Failed => "FAILED",
            Verdict::NotAsked => "NOT ASKED",
            Verdict::DoesNotApply => "-",
        };
        write!(f, "{:<19} {verdict:<9} {}", self.condition.name(), self.found)?;
        if self.todo.is_empty() { Ok(()) } else { write!(f, ": {}", self.todo) }
    }
}

impl fmt::Display for Objection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(findings) => {
                let lines = findings.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
                write!(f, "the guarantee would not hold, so nothing is read (`onceward check` tells all of it):\n{lines}")
            }
            Self::NotAsked(finding) => {
                write!(f, "{} could not be asked: {}", finding.condition.name(), finding.found)
            }
        }
    }
}

/// The table of all conditions: `docs/CERTIFICATE.md` equals it, and a test says so.
#[must_use]
pub fn markdown() -> String {
    let mut text = MARKDOWN_HEAD.to_owned();
    for condition in Condition::ALL {
        let weight = match condition.weight() {
            Weight::Blocking => "blocking",
            Weight::Advisory => "advisory",
        };
        // Writing to a String cannot fail.
        let _ = writeln!(text, "| `{}` | {} | {weight} | {} |", condition.name(), condition.holds(), condition.why());
    }
    text
}

const MARKDOWN_HEAD: &str = "# The certificate\n\n\
    `onceward check` prints one line per condition. Made from `src/certificate/condition.rs`; a test holds it true.\n\n\
    Blocking: `onceward run` reads nothing before it holds, because nobody would notice later. Advisory: the engine notices, or loses no more \
    than time.\n\n\
    | condition | holds when | weight | because |\n| --- | --- | --- | --- |\n";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests_support::assert_file;

    #[test]
    fn the_documented_conditions_are_those_that_are_asked() {
        assert_file("docs/CERTIFICATE.md", &markdown());
    }

    #[test]
    fn what_nobody_has_answered_is_not_asked_and_not_fine() {
        let mut answers = Answers::default();
        answers.holds(Condition::Fsync, "on");
        answers.does_not_apply(Condition::Provider, "none");
        let findings = answers.complete("no ground");
        assert_eq!(findings.iter().map(|finding| finding.condition).collect::<Vec<_>>(), Condition::ALL);
        for finding in findings {
            let answered = [Condition::Fsync, Condition::Provider].contains(&finding.condition);
            assert_eq!(finding.is_fine(), answered, "{finding}");
        }
    }

    #[test]
    fn a_finding_is_one_line_whatever_the_server_says() {
        let mut answers = Answers::default();
        answers.fails(Condition::Schema, "first\n  second", "run `onceward migrate`");
        let finding = answers.0.pop_first().expect("one").1;
        assert_eq!(finding.to_string(), "schema              FAILED    first second: run `onceward migrate`");
        assert_eq!(
            finding.json(),
            json!({ "condition": "schema", "verdict": "failed", "blocking": true, "found": "first second", "todo": "run `onceward migrate`" })
        );
    }
}
