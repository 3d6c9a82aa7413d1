//! What the tables are made like.
//!
//! In: a session. Out: answers about the tables of claims, each day by itself, and about those beside them. It owns nothing.
//!
//! Invariant: a key is right when every table of claims has it by itself.

use super::database::not_asked;
use super::{Answers, Condition};
use crate::config::Config;
use crate::store::Session;
use crate::store::conditions::{self, Column, Meddler, Relation, UniqueIndex};

/// The key, sorted.
const KEY: [&str; 2] = ["consumer_group", "event_id"];
/// A day is a range of ids, and so are the parts of no other table.
const BY_DAY: &str = "RANGE (event_id)";
/// What a claim says, and of which type it is. The last three are written together, or not at all.
const WRITTEN: [(&str, &str); 6] = [
    ("event_id", "uuid"),
    ("consumer_group", "text"),
    ("processed_at", "timestamptz"),
    ("event_digest", "bigint"),
    ("source_id", "integer"),
    ("source_offset", "bigint"),
];

const TABLES: [Condition; 3] = [Condition::DefaultPartition, Condition::RowSecurity, Condition::LoggedTables];
const INDEXES: [Condition; 2] = [Condition::UniqueIndexes, Condition::PaymentRows];

/// How the table of claims is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Made {
    ByDay,
    Plain,
    /// As no table of claims may be.
    Otherwise,
}

/// How the table of claims is made, if that could be asked.
pub(super) async fn ask(config: &Config, s: &mut Session, answers: &mut Answers) -> Option<Made> {
    let relations = match conditions::relations(s).await {
        Ok(relations) if relations.iter().any(|relation| relation.holds_claims) => relations,
        without => {
            let why = without.map_or_else(|error| error.to_string(), |_| "there is no table processed_event".to_owned());
            let others = [Condition::ClaimColumns, Condition::DedupKey, Condition::Triggers];
            not_asked(answers, &[&TABLES[..], &INDEXES, &others].concat(), why);
            return None;
        }
    };
    judge_relations(&relations, answers);
    match conditions::claim_columns(s).await {
        Ok(columns) => judge_columns(&columns, &config.kafka.group, answers),
        Err(error) => not_asked(answers, &[Condition::ClaimColumns], error),
    }
    indexes_and_triggers(config, s, &relations, answers).await;
    let claims = relations.iter().find(|relation| relation.name == CLAIMS)?;
    Some(match claims.partitioned_by.as_deref() {
        Some(BY_DAY) => Made::ByDay,
        None => Made::Plain,
        Some(_) => Made::Otherwise,
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

/// Every column that a claim writes must take what it says, and no other one may be asked for.
fn judge_columns(columns: &[Column], group: &str, answers: &mut Answers) {
    let column = |name: &str| columns.iter().find(|column| column.name == name);
    let explains = WRITTEN[3..].iter().all(|(name, _)| column(name).is_some());
    let written = if explains { &WRITTEN[..] } else { &WRITTEN[..3] };
    let (mut found, mut changes) = (Vec::new(), Vec::new());
    for (name, kind) in written {
        match column(name) {
            None => {
                found.push(format!("there is no {name}"));
                changes.push(format!("ADD {name} {kind}{}", of_old_rows(name, group)));
            }
            Some(column) if !fits(column, kind, group) => {
                let limit = column.most_chars.map(|most| format!(" of {most} characters")).unwrap_or_default();
                let (about, using) = if column.kind == "timestamp without time zone" {
                    (" (put the zone that it is meant in where UTC stands)", format!("{name} AT TIME ZONE 'UTC'"))
                } else {
                    ("", format!("{name}::{kind}"))
                };
                found.push(format!("{name} is {}{limit}{about}", column.kind));
                changes.push(format!("ALTER {name} TYPE {kind} USING {using}"));
            }
            Some(_) => {}
        }
    }
    for Column { name, kind, must_be_given, .. } in columns {
        if *must_be_given && !written.iter().any(|(ours, _)| ours == name) {
            found.push(format!("{name} must be given, and a claim does not know it (any DEFAULT is enough)"));
            changes
                .push(format!("ALTER {name} {}", if kind == "uuid" { "SET DEFAULT gen_random_uuid()" } else { "DROP NOT NULL" }));
        }
    }
    if found.is_empty() {
        answers.holds(Condition::ClaimColumns, "they take what a claim says, and ask for nothing else");
    } else {
        answers.fails(
            Condition::ClaimColumns,
            found.join("; "),
            format_args!("ALTER TABLE processed_event {}", changes.join(", ")),
        );
    }
}

fn fits(column: &Column, kind: &str, group: &str) -> bool {
    match kind {
        "text" => {
            let takes = |most: i32| usize::try_from(most).is_ok_and(|most| group.chars().count() <= most);
            ["text", "character varying"].contains(&column.kind.as_str()) && column.most_chars.is_none_or(takes)
        }
        "timestamptz" => column.kind == "timestamp with time zone",
        kind => column.kind == kind,
    }
}

/// What a column says of the claims that are there already.
fn of_old_rows(name: &str, group: &str) -> String {
    match name {
        "consumer_group" => format!(" NOT NULL DEFAULT '{}'", group.replace('\'', "''")),
        "processed_at" => " NOT NULL DEFAULT now()".to_owned(),
        _ => String::new(),
    }
}

/// What makes a claim unique.
#[derive(Debug, PartialEq, Eq)]
enum Key<'a> {
    Right,
    /// Of one group's table, as other services make it.
    EventIdAlone(&'a str),
    /// A table is partitioned in another way than by the day of the id.
    PartitionedBy(&'a str),
    /// These tables have another one, or none.
    Wrong(Vec<(&'a str, Vec<&'a [String]>)>),
}

fn key<'a>(relations: &'a [Relation], indexes: &'a [UniqueIndex]) -> Key<'a> {
    let claims = relations.iter().filter(|relation| relation.holds_claims);
    if let Some(by) = claims.filter_map(|relation| relation.partitioned_by.as_deref()).find(|by| *by != BY_DAY) {
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
                format_args!(
                    "event_id alone, and the table has claims of the group {other}: an event of theirs would be a duplicate of ours"
                ),
                format_args!("ALTER TABLE processed_event DROP CONSTRAINT {name}, ADD UNIQUE (event_id, consumer_group)"),
            ),
        },
        Key::PartitionedBy(by) => {
            let why = if by.ends_with(" (event_id)") {
                "whose parts are no days: none can be made for new ids, and none dropped"
            } else {
                "which PostgreSQL then wants in every unique key: the same id at another time is taken again"
            };
            let todo = "make it anew, partitioned by RANGE (event_id): a UUID v7 begins with its time";
            answers.fails(condition, format_args!("processed_event is partitioned by {by}, {why}"), todo);
        }
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

#[cfg(test)]
mod tests {
    use super::super::{Finding, Verdict};
    use super::*;

    fn table(name: &str) -> Relation {
        Relation {
            name: name.to_owned(),
            holds_claims: true,
            kind: "r".to_owned(),
            logged: true,
            row_security: false,
            partitioned_by: None,
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
    }

    // CASES E01
    #[test]
    fn only_ranges_of_the_id_are_days() {
        let found = |by: &str| {
            let tables = [Relation { partitioned_by: Some(by.to_owned()), ..table("processed_event") }];
            let indexes = [index("processed_event", &KEY)];
            let mut answers = Answers::default();
            judge_key(&key(&tables, &indexes), None, &mut answers);
            let finding = answers.0.remove(&Condition::DedupKey).expect("an answer");
            (finding.verdict, finding.found)
        };
        assert_eq!(found("RANGE (event_id)").0, Verdict::Ok);
        for by in ["HASH (event_id)", "LIST (event_id)"] {
            let (verdict, said) = found(by);
            assert_eq!(verdict, Verdict::Failed, "{by}");
            assert!(said.contains(by) && said.contains("no days"), "{said}");
        }
        for by in ["RANGE (processed_at)", "RANGE (event_id, processed_at)", "RANGE (date_trunc('day'::text, processed_at))"] {
            let (verdict, said) = found(by);
            assert_eq!(verdict, Verdict::Failed, "{by}");
            assert!(said.contains(by) && said.contains("at another time"), "{said}");
        }
    }

    fn column(name: &str, kind: &str) -> Column {
        Column { name: name.to_owned(), kind: kind.to_owned(), most_chars: None, must_be_given: false }
    }

    /// As another service makes them.
    fn columns() -> Vec<Column> {
        let group = Column { most_chars: Some(7), must_be_given: true, ..column("consumer_group", "character varying") };
        vec![
            column("event_id", "uuid"),
            group,
            Column { must_be_given: true, ..column("processed_at", "timestamp with time zone") },
        ]
    }

    fn judged(columns: &[Column], group: &str) -> Finding {
        let mut answers = Answers::default();
        judge_columns(columns, group, &mut answers);
        answers.0.remove(&Condition::ClaimColumns).expect("an answer")
    }

    #[test]
    fn a_column_that_takes_no_claim_is_named_with_its_alter() {
        assert_eq!(judged(&columns(), "billing").verdict, Verdict::Ok);
        let with = |others: &[Column]| {
            let names = |column: &Column| others.iter().all(|other| other.name != column.name);
            let columns: Vec<_> = columns().into_iter().filter(names).chain(others.iter().cloned()).collect();
            let finding = judged(&columns, "billing");
            assert_eq!(finding.verdict == Verdict::Failed, !finding.todo.is_empty(), "{finding}");
            finding.todo
        };
        let ours = [column("event_digest", "bigint"), column("source_id", "integer"), column("source_offset", "bigint")];
        assert_eq!(with(&ours), "");
        assert_eq!(with(&[column("source_id", "text")]), "", "without the other two it is none of ours");
        let old = [column("event_id", "text"), column("processed_at", "timestamp without time zone")];
        assert_eq!(
            with(&old),
            "ALTER TABLE processed_event ALTER event_id TYPE uuid USING event_id::uuid, \
             ALTER processed_at TYPE timestamptz USING processed_at AT TIME ZONE 'UTC'"
        );
        let narrow = [column("event_digest", "integer"), column("source_id", "integer"), column("source_offset", "bigint")];
        assert_eq!(with(&narrow), "ALTER TABLE processed_event ALTER event_digest TYPE bigint USING event_digest::bigint");
        let given = |name: &str, kind: &str| Column { must_be_given: true, ..column(name, kind) };
        assert_eq!(
            with(&[given("tenant", "text"), given("id", "uuid")]),
            "ALTER TABLE processed_event ALTER tenant DROP NOT NULL, ALTER id SET DEFAULT gen_random_uuid()"
        );
        let short = judged(&columns(), "billing2");
        assert!(short.found.contains("of 7 characters"), "{short}");
        assert_eq!(short.todo, "ALTER TABLE processed_event ALTER consumer_group TYPE text USING consumer_group::text");
        assert_eq!(
            judged(&columns()[..1], "o'neil").todo,
            "ALTER TABLE processed_event ADD consumer_group text NOT NULL DEFAULT 'o''neil', \
             ADD processed_at timestamptz NOT NULL DEFAULT now()"
        );
    }
}
