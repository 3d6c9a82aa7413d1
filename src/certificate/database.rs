//! What PostgreSQL is asked.
//!
//! In: a session. Out: answers about the server, our role and the tables. Each question stands for itself: one that fails leaves its
//! own conditions open and no others.
//!
//! Invariant: a key is right when every table of claims has it by itself.

use std::fmt::Display;

use super::{Answers, Condition, session};
use crate::config::Config;
use crate::retention::sweeper::CREATE_INDEX;
use crate::retention::{day_text, unix_ms};
use crate::store::conditions::{self, Meddler, Memory, Relation, Settings, UniqueIndex};
use crate::store::old_claims::{self, PlainTable};
use crate::store::retention::{self, day_of, first_id_of_day};
use crate::store::{self, PooledSession, Session};

/// The key, sorted.
const KEY: [&str; 2] = ["consumer_group", "event_id"];
/// Multiranges, and a DETACH that locks nobody out.
const OLDEST_SERVER: i32 = 140_000;
/// How a server or database that need not survive a crash says so.
const ACCEPTED: &str =
    "or say in the database that it need not survive a crash: ALTER DATABASE … SET onceward.no_fsync = 'accepted'";

/// A connection; none when the database does not answer as it must.
pub(super) async fn connect(config: &Config, answers: &mut Answers) -> Option<PooledSession> {
    let url = config.database.url.redacted_url();
    match session(config).await {
        Ok(session) => {
            answers.holds(Condition::Database, format_args!("{url} takes writes"));
            Some(session)
        }
        Err(error) => {
            answers.fails(
                Condition::Database,
                format_args!("{url}: {error}"),
                "see database.url; it must be the primary, writable for our role (default_transaction_read_only), in UTF8",
            );
            None
        }
    }
}

/// Asks everything.
pub(super) async fn ask(config: &Config, s: &mut Session, answers: &mut Answers) {
    match conditions::settings(s).await {
        Ok(settings) => judge_settings(&settings, answers),
        Err(error) => not_asked(answers, &SETTINGS, error),
    }
    match store::schema_is_current(s).await {
        Ok(true) => {
            answers.holds(Condition::Schema, "every migration is applied");
            privileges(s, answers).await;
        }
        Ok(false) => {
            answers.fails(Condition::Schema, "migrations are missing", "run `onceward migrate`");
            answers.not_asked(Condition::Privileges, "migrations are missing");
        }
        Err(error) => not_asked(answers, &[Condition::Schema, Condition::Privileges], error),
    }
    let made = tables(config, s, answers).await;
    match made {
        Some(Made::ByDay) => answers.does_not_apply(Condition::OldClaims, "days are dropped whole"),
        Some(Made::Plain) => plain_table(s, answers).await,
        Some(Made::Otherwise) => answers.does_not_apply(Condition::OldClaims, "processed_event is partitioned in another way"),
        None => answers.not_asked(Condition::OldClaims, "processed_event could not be looked at"),
    }
    memory(config, s, made, answers).await;
}

async fn privileges(s: &mut Session, answers: &mut Answers) {
    match conditions::missing_privileges(s).await {
        Ok(missing) if missing.is_empty() => answers.holds(Condition::Privileges, "our role has what it needs"),
        Ok(missing) => answers.fails(
            Condition::Privileges,
            format_args!("our role lacks {}", missing.join(", ")),
            "GRANT them, or let our role own the tables",
        ),
        Err(error) => not_asked(answers, &[Condition::Privileges], error),
    }
}

fn not_asked(answers: &mut Answers, conditions: &[Condition], why: impl Display) {
    for condition in conditions {
        answers.not_asked(*condition, &why);
    }
}

const SETTINGS: [Condition; 5] =
    [Condition::ServerVersion, Condition::Fsync, Condition::FullPageWrites, Condition::SynchronousCommit, Condition::Isolation];

fn judge_settings(settings: &Settings, answers: &mut Answers) {
    let version = settings.version / 10_000;
    answers.judged(
        Condition::ServerVersion,
        if settings.version >= OLDEST_SERVER {
            Ok(format!("PostgreSQL {version}"))
        } else {
            Err((format!("PostgreSQL {version}"), "it must be 14 or newer"))
        },
    );
    for (condition, is_on, todo) in [
        (Condition::Fsync, settings.fsync, format!("ALTER SYSTEM SET fsync = on, {ACCEPTED}")),
        (Condition::FullPageWrites, settings.full_page_writes, format!("ALTER SYSTEM SET full_page_writes = on, {ACCEPTED}")),
    ] {
        match (is_on, settings.no_fsync_accepted) {
            (true, _) => answers.holds(condition, "on"),
            (false, true) => {
                answers.holds(condition, "off, and the database says that it need not survive a crash (onceward.no_fsync)")
            }
            (false, false) => answers.fails(condition, "off", todo),
        }
    }
    answers.judged(
        Condition::SynchronousCommit,
        match settings.synchronous_commit.as_str() {
            "off" => Err(("off in our sessions".to_owned(), "ALTER ROLE or ALTER DATABASE … SET synchronous_commit = on")),
            value => Ok(value.to_owned()),
        },
    );
    let (ours, default) = (settings.isolation.as_str(), settings.default_isolation.as_str());
    answers.judged(
        Condition::Isolation,
        match (ours, default) {
            ("read committed", "read committed") => Ok("read committed".to_owned()),
            ("read committed", default) => Err((
                format!("the default of our role is {default}"),
                "ALTER ROLE or ALTER DATABASE … SET default_transaction_isolation = 'read committed'",
            )),
            (ours, _) => {
                Err((format!("our transactions are {ours}"), "something between us and the server changes BEGIN: take it away"))
            }
        },
    );
}

const TABLES: [Condition; 3] = [Condition::DefaultPartition, Condition::RowSecurity, Condition::LoggedTables];
const INDEXES: [Condition; 2] = [Condition::UniqueIndexes, Condition::PaymentRows];

/// How the table of claims is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Made {
    ByDay,
    Plain,
    /// As no table of claims may be.
    Otherwise,
}

/// How the table of claims is made, if that could be asked.
async fn tables(config: &Config, s: &mut Session, answers: &mut Answers) -> Option<Made> {
    let relations = match conditions::relations(s).await {
        Ok(relations) if relations.iter().any(|relation| relation.holds_claims) => relations,
        without => {
            let why = without.map_or_else(|error| error.to_string(), |_| "there is no table processed_event".to_owned());
            not_asked(answers, &[&TABLES[..], &INDEXES, &[Condition::DedupKey, Condition::Triggers]].concat(), why);
            return None;
        }
    };
    judge_relations(&relations, answers);
    indexes_and_triggers(config, s, &relations, answers).await;
    let partitioned_by = relations.iter().find(|relation| relation.name == CLAIMS).map(|claims| claims.partitioned_by.as_slice());
    Some(match partitioned_by {
        Some([column]) if column == "event_id" => Made::ByDay,
        Some([]) => Made::Plain,
        _ => Made::Otherwise,
    })
}

async fn indexes_and_triggers(config: &Config, s: &mut Session, relations: &[Relation], answers: &mut Answers) {
    let meddlers = conditions::meddlers(s).await;
    match &meddlers {
        Ok(meddlers) => judge_triggers(meddlers, answers),
        Err(error) => not_asked(answers, &[Condition::Triggers], error),
    }
    let indexes = match conditions::unique_indexes(s).await {
        Ok(indexes) => indexes,
        Err(error) => {
            not_asked(answers, &[Condition::DedupKey], &error);
            return not_asked(answers, &INDEXES, error);
        }
    };
    let key = key(relations, &indexes);
    let others = match key {
        Key::EventIdAlone(_) => conditions::other_group(s, &config.kafka.group).await,
        _ => Ok(None),
    };
    match others {
        Ok(other) => judge_key(&key, other, answers),
        Err(error) => not_asked(answers, &[Condition::DedupKey], error),
    }
    judge_further_indexes(relations, &indexes, &key, answers);
    match meddlers {
        Ok(meddlers) => judge_payment(&meddlers, &indexes, answers),
        Err(error) => not_asked(answers, &[Condition::PaymentRows], error),
    }
}

fn judge_relations(relations: &[Relation], answers: &mut Answers) {
    let default = relations.iter().find_map(|relation| Some((&relation.name, relation.default_partition.as_ref()?)));
    match default {
        None => answers.holds(Condition::DefaultPartition, "none"),
        Some((parent, partition)) => answers.fails(
            Condition::DefaultPartition,
            format_args!("{partition} is the DEFAULT partition of {parent}"),
            format_args!(
                "ALTER TABLE {parent} DETACH PARTITION {partition}; if it has rows, start once without it, so that their days are made, and insert them again"
            ),
        ),
    }
    let mut none = |condition, what: &str, found: Vec<&str>, todo: &str| {
        if found.is_empty() {
            answers.holds(condition, "none of our tables is otherwise");
        } else {
            answers.fails(condition, format_args!("{what}: {}", found.join(", ")), todo);
        }
    };
    let names = |of: &dyn Fn(&Relation) -> bool| -> Vec<&str> {
        relations.iter().filter(|relation| of(relation)).map(|relation| relation.name.as_str()).collect()
    };
    none(
        Condition::RowSecurity,
        "policies decide what our role sees of",
        names(&|relation| relation.row_security),
        "ALTER TABLE … DISABLE ROW LEVEL SECURITY, or give our role BYPASSRLS",
    );
    none(
        Condition::LoggedTables,
        "not an ordinary, logged table",
        names(&|relation| !relation.logged || !["r", "p"].contains(&relation.kind.as_str())),
        "ALTER TABLE … SET LOGGED; a view or a foreign table cannot keep our rows",
    );
}

/// What makes a claim unique.
#[derive(Debug, PartialEq, Eq)]
enum Key<'a> {
    Right,
    /// Of one group's table, as other services make it.
    EventIdAlone(&'a str),
    /// Every table is partitioned by a column that the key must then contain.
    PartitionedBy(&'a [String]),
    /// These tables have another one, or none.
    Wrong(Vec<(&'a str, Vec<&'a [String]>)>),
}

fn key<'a>(relations: &'a [Relation], indexes: &'a [UniqueIndex]) -> Key<'a> {
    if let Some(by) = relations.iter().find_map(|relation| {
        let by = &relation.partitioned_by;
        (relation.holds_claims && !by.is_empty() && by != &["event_id"]).then_some(by)
    }) {
        return Key::PartitionedBy(by);
    }
    let of =
        |relation: &Relation| indexes.iter().filter(|index| index.relation == relation.name && index.plain).collect::<Vec<_>>();
    let (mut wrong, mut alone) = (Vec::new(), None);
    for relation in relations.iter().filter(|relation| relation.holds_claims) {
        let indexes = of(relation);
        if indexes.iter().any(|index| index.columns == KEY) {
            continue;
        }
        // The days have names of their own for it; the one that can be dropped is the whole table's.
        if let Some(index) = indexes.iter().find(|index| relation.name == CLAIMS && index.columns == ["event_id"]) {
            alone = Some(index.name.as_str());
        }
        wrong.push((relation.name.as_str(), indexes.iter().map(|index| index.columns.as_slice()).collect()));
    }
    match alone {
        _ if wrong.is_empty() => Key::Right,
        Some(name) => Key::EventIdAlone(name),
        None => Key::Wrong(wrong),
    }
}

fn judge_key(key: &Key<'_>, other_group: Option<String>, answers: &mut Answers) {
    let condition = Condition::DedupKey;
    match key {
        Key::Right => answers.holds(condition, "(event_id, consumer_group), on every day"),
        Key::EventIdAlone(name) => match other_group {
            None => answers.holds(condition, "event_id alone: the table serves this group and no other"),
            Some(other) => answers.fails(
                condition,
                format_args!("event_id alone, and the table has claims of the group {other}: an event of theirs would be a duplicate of ours"),
                format_args!("ALTER TABLE processed_event DROP CONSTRAINT {name}, ADD UNIQUE (event_id, consumer_group)"),
            ),
        },
        Key::PartitionedBy(columns) => answers.fails(
            condition,
            format_args!(
                "processed_event is partitioned by ({}), which PostgreSQL then wants in every unique key: the same id at another time is taken again",
                columns.join(", ")
            ),
            "make it anew, partitioned by RANGE (event_id): a UUID v7 begins with its time",
        ),
        Key::Wrong(tables) => {
            let table = |(name, keys): &(&str, Vec<&[String]>)| match keys.as_slice() {
                [] => format!("{name} has no unique key"),
                keys => {
                    let keys: Vec<String> = keys.iter().map(|columns| format!("({})", columns.join(", "))).collect();
                    format!("{name} has the unique key {}", keys.join(" and "))
                }
            };
            let found = tables.iter().take(3).map(table).collect::<Vec<_>>().join("; ");
            let todo = "the key must be (event_id, consumer_group) and nothing else, or the same id can be taken twice";
            answers.fails(condition, found, todo);
        }
    }
}

/// An index that has all of the key in it refuses nothing that the key takes.
fn judge_further_indexes(relations: &[Relation], indexes: &[UniqueIndex], key: &Key<'_>, answers: &mut Answers) {
    let holds_claims = |name: &str| relations.iter().any(|relation| relation.holds_claims && relation.name == name);
    let has_all_of_the_key = |index: &UniqueIndex| KEY.iter().all(|column| index.columns.iter().any(|found| found == column));
    let is_the_key = |index: &UniqueIndex| match key {
        Key::Right => false,
        Key::EventIdAlone(_) => index.columns == ["event_id"],
        // A wrong one has its own line.
        Key::PartitionedBy(_) | Key::Wrong(_) => index.primary,
    };
    // A number that the table gives by itself.
    let is_a_number = |index: &UniqueIndex| index.primary && !index.columns.iter().any(|column| KEY.contains(&column.as_str()));
    let refuses = |index: &&UniqueIndex| !(is_a_number(index) || is_the_key(index) || index.plain && has_all_of_the_key(index));
    let further: Vec<String> = indexes
        .iter()
        .filter(|index| holds_claims(&index.relation))
        .filter(refuses)
        .map(|index| format!("{} on {} ({})", index.name, index.relation, index.columns.join(", ")))
        .collect();
    if further.is_empty() {
        answers.holds(Condition::UniqueIndexes, "none but the key");
    } else {
        answers.fails(Condition::UniqueIndexes, further.join("; "), "DROP INDEX, or ALTER TABLE … DROP CONSTRAINT");
    }
}

fn judge_triggers(meddlers: &[Meddler], answers: &mut Answers) {
    let found: Vec<String> = meddlers.iter().filter(|meddler| meddler.relation != PAYMENT).map(in_words).collect();
    if found.is_empty() {
        answers.holds(Condition::Triggers, "none");
    } else {
        answers.fails(
            Condition::Triggers,
            found.join("; "),
            "DROP or ALTER TABLE … DISABLE it; what others want to know they can read",
        );
    }
}

fn judge_payment(meddlers: &[Meddler], indexes: &[UniqueIndex], answers: &mut Answers) {
    let meddlers = meddlers.iter().filter(|meddler| meddler.relation == PAYMENT && meddler.can_swallow).map(in_words);
    let further = indexes.iter().filter(|index| index.relation == PAYMENT && index.columns != ["event_id"]);
    let found: Vec<String> = meddlers.chain(further.map(|index| format!("unique index {}", index.name))).collect();
    if found.is_empty() {
        answers.holds(Condition::PaymentRows, "nothing stands before a row");
    } else {
        answers.fails(Condition::PaymentRows, found.join("; "), "drop it, or expect events held as charged_not_recorded");
    }
}

const CLAIMS: &str = "processed_event";
const PAYMENT: &str = "payment";

fn in_words(meddler: &Meddler) -> String {
    format!("{} {} on {}", meddler.kind, meddler.name, meddler.relation)
}

async fn memory(config: &Config, s: &mut Session, made: Option<Made>, answers: &mut Answers) {
    let both = [Condition::Floor, Condition::Days];
    let memory = match conditions::memory(s).await {
        Ok(memory) => memory,
        Err(error) => return not_asked(answers, &both, error),
    };
    let Some(floor) = memory.floor else {
        if memory.in_use {
            answers.fails(
                Condition::Floor,
                "the row of `retention` is gone, and events were settled here",
                "restore it: the first id of the oldest day that was never dropped, never a lower one",
            );
        } else {
            answers.does_not_apply(Condition::Floor, "nothing was settled yet: the first `run` writes it");
        }
        return answers.does_not_apply(Condition::Days, "the first `run` makes them");
    };
    let today = memory.now_ms.div_euclid(DAY_MS);
    if i64::try_from(unix_ms(floor)).is_ok_and(|floor_ms| floor_ms > memory.now_ms) {
        let found = format_args!("{} lies in the future: every new event would be held", day_text(floor)).to_string();
        answers.fails(Condition::Floor, found, "find out who has written it, and correct the row of `retention`");
    } else {
        answers.holds(Condition::Floor, day_text(floor));
    }
    if matches!(made, Some(Made::Plain | Made::Otherwise)) {
        return answers.does_not_apply(Condition::Days, "processed_event is not kept by the day of the id");
    }
    match retention::days(s).await {
        Ok(days) => judge_days(&days, today, config.retention.days_ahead, &memory, answers),
        Err(error) => not_asked(answers, &[Condition::Days], error),
    }
}

async fn plain_table(s: &mut Session, answers: &mut Answers) {
    match old_claims::plain_table(s).await {
        Ok(PlainTable { indexed: true, .. }) => answers.holds(Condition::OldClaims, "an index begins with processed_at"),
        Ok(PlainTable { indexed: false, .. }) => {
            answers.fails(Condition::OldClaims, "no index of processed_event begins with processed_at", CREATE_INDEX)
        }
        Err(error) => not_asked(answers, &[Condition::OldClaims], error),
    }
}

const DAY_MS: i64 = 86_400_000;

/// Today, and as many after it as are configured.
fn judge_days(days: &[(uuid::Uuid, uuid::Uuid)], today: i64, ahead: u32, memory: &Memory, answers: &mut Answers) {
    let missing: Vec<i64> = (today..=today + i64::from(ahead))
        .filter(|day| {
            let (from, to) = (first_id_of_day(*day), first_id_of_day(day + 1));
            memory.floor.is_none_or(|floor| from >= floor) && !days.iter().any(|(first, end)| *first <= from && to <= *end)
        })
        .collect();
    let Some(first) = missing.first() else {
        let behind = days.iter().filter(|(first, _)| day_of(*first) < today).count();
        return answers.holds(Condition::Days, format_args!("today, {ahead} ahead, {behind} behind"));
    };
    answers.fails(
        Condition::Days,
        format_args!(
            "{} of today and the next {ahead} days are missing, the first is {}",
            missing.len(),
            day_text(first_id_of_day(*first))
        ),
        "`run` makes them when it starts and every two seconds: if one runs, `/ready` says why it cannot",
    );
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;

    fn settings() -> Settings {
        let on = || "on".to_owned();
        let read_committed = || "read committed".to_owned();
        Settings {
            version: 150_004,
            fsync: true,
            full_page_writes: true,
            synchronous_commit: on(),
            default_isolation: read_committed(),
            isolation: read_committed(),
            no_fsync_accepted: false,
        }
    }

    fn failed(settings: &Settings) -> Vec<Condition> {
        let mut answers = Answers::default();
        judge_settings(settings, &mut answers);
        assert_eq!(answers.0.len(), SETTINGS.len());
        answers.0.into_values().filter(|finding| finding.verdict == Verdict::Failed).map(|finding| finding.condition).collect()
    }

    #[test]
    fn each_setting_has_its_own_line() {
        assert_eq!(failed(&settings()), []);
        assert_eq!(failed(&Settings { version: 130_013, ..settings() }), [Condition::ServerVersion]);
        assert_eq!(failed(&Settings { fsync: false, ..settings() }), [Condition::Fsync]);
        assert_eq!(failed(&Settings { fsync: false, no_fsync_accepted: true, ..settings() }), []);
        assert_eq!(failed(&Settings { isolation: "serializable".to_owned(), ..settings() }), [Condition::Isolation]);
        assert_eq!(failed(&Settings { synchronous_commit: "local".to_owned(), ..settings() }), []);
    }

    fn table(name: &str) -> Relation {
        Relation {
            name: name.to_owned(),
            holds_claims: true,
            kind: "r".to_owned(),
            logged: true,
            row_security: false,
            partitioned_by: Vec::new(),
            default_partition: None,
        }
    }

    fn index(relation: &str, columns: &[&str]) -> UniqueIndex {
        let columns = columns.iter().map(|column| (*column).to_owned()).collect();
        UniqueIndex { relation: relation.to_owned(), name: "i".to_owned(), primary: true, columns, plain: true }
    }

    // CASES E01
    #[test]
    fn one_day_without_the_key_is_enough_to_be_wrong() {
        let tables = [table("processed_event"), table("day")];
        assert_eq!(key(&tables, &[index("processed_event", &KEY), index("day", &KEY)]), Key::Right);
        assert!(matches!(key(&tables, &[index("processed_event", &KEY)]), Key::Wrong(tables) if tables == [("day", vec![])]));
        let deferred = UniqueIndex { plain: false, ..index("day", &KEY) };
        assert!(matches!(key(&tables, &[index("processed_event", &KEY), deferred]), Key::Wrong(_)));
        let alone = [index("processed_event", &["event_id"]), index("day", &["event_id"])];
        let alone = alone.map(|index| UniqueIndex { name: format!("{}_pkey", index.relation), ..index });
        assert_eq!(key(&tables, &alone), Key::EventIdAlone("processed_event_pkey"));
        let by_time = [Relation { partitioned_by: vec!["processed_at".to_owned()], ..table("processed_event") }];
        assert!(matches!(key(&by_time, &[]), Key::PartitionedBy(_)));
    }
}
