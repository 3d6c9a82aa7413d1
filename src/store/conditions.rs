//! Whether the database can keep the promise: what it is set to, and what its tables are.
//!
//! In: a session. Out: facts, judged elsewhere (`src/certificate`). It owns nothing and changes nothing.
//!
//! Invariant: every table of claims is looked at, each day by itself: a day's own index or trigger is as good as one of the whole table.

use diesel::sql_types::{Array, BigInt, Bool, Integer, Nullable, Text, Uuid as SqlUuid};
use uuid::Uuid;

use super::statement::statement;
use super::{DbError, Session};
use crate::record::{NextOffset, RecordDigest};

/// What the server, and the sessions of our role, are set to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// `150004` for 15.4.
    pub version: i32,
    /// Commits survive a crash of the machine.
    pub fsync: bool,
    /// Pages are whole after a crash.
    pub full_page_writes: bool,
    /// Who has a commit before we hear of it.
    pub synchronous_commit: String,
    /// The isolation of whoever names none.
    pub default_isolation: String,
    /// The isolation of our own transactions.
    pub isolation: String,
    /// Somebody has written into the server or the database that this one need not survive a crash: `onceward.no_fsync = accepted`.
    pub no_fsync_accepted: bool,
}

/// One of our tables; each day of claims is one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Relation {
    /// Its name.
    pub name: String,
    /// It is `processed_event`, or a part of it.
    pub holds_claims: bool,
    /// `r` a table, `p` a partitioned one; anything else is none that can hold rows of ours.
    pub kind: String,
    /// A crash does not empty it.
    pub logged: bool,
    /// Policies decide what we see of it.
    pub row_security: bool,
    /// How it is partitioned, such as `RANGE (event_id)`.
    pub partitioned_by: Option<String>,
    /// The name of its DEFAULT partition.
    pub default_partition: Option<String>,
}

/// A column of the table of claims.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Column {
    /// Its name, quoted where SQL wants that.
    pub name: String,
    /// Its type without a modifier, as the server writes it: `character varying`.
    pub kind: String,
    /// How many characters it takes, where that is limited.
    pub most_chars: Option<i32>,
    /// A row that leaves it out is refused.
    pub must_be_given: bool,
}

/// A unique index, or an exclusion constraint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UniqueIndex {
    /// The table it is of.
    pub relation: String,
    /// Its name.
    pub name: String,
    /// It is the primary key.
    pub primary: bool,
    /// Its columns, sorted by name.
    pub columns: Vec<String>,
    /// It holds for every row, at once, and for nothing but equality of these columns.
    pub plain: bool,
}

/// Something of others that runs when we write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Meddler {
    /// The table.
    pub relation: String,
    /// `trigger` or `rule`.
    pub kind: String,
    /// Its name.
    pub name: String,
    /// It comes before the row is there, and can make it vanish.
    pub can_swallow: bool,
}

/// What has to do with forgetting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Ids below it are forgotten.
    pub floor: Option<Uuid>,
    /// The database's clock, in milliseconds since 1970.
    pub now_ms: i64,
    /// Somebody has settled something here.
    pub in_use: bool,
}

/// How far a partition is settled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frontier {
    /// The partition.
    pub partition: i32,
    /// One past the last settled record.
    pub next_offset: Option<NextOffset>,
    /// Of the record before it.
    pub last_record_digest: Option<RecordDigest>,
}

/// What the server and our role's sessions are set to.
///
/// # Errors
/// The statement failed.
pub async fn settings(s: &mut Session) -> Result<Settings, DbError> {
    s.within("settings", async |s| {
        let row = s.row("settings", AskSettings {}).await?.expect("one row");
        let (version, fsync, full_page_writes, synchronous_commit, default_isolation, isolation, no_fsync_accepted) = row;
        Ok(Settings { version, fsync, full_page_writes, synchronous_commit, default_isolation, isolation, no_fsync_accepted })
    })
    .await
}

/// Our tables, as far as they are there.
///
/// # Errors
/// The statement failed.
pub async fn relations(s: &mut Session) -> Result<Vec<Relation>, DbError> {
    type Row = (String, bool, String, bool, bool, Option<String>, Option<String>);
    let relation = |(name, holds_claims, kind, logged, row_security, partitioned_by, default_partition): Row| Relation {
        name,
        holds_claims,
        kind,
        logged,
        row_security,
        partitioned_by,
        default_partition,
    };
    s.within("relations", async |s| Ok(s.rows("relations", Relations {}).await?.into_iter().map(relation).collect())).await
}

/// The columns of the table of claims, in their order.
///
/// # Errors
/// The statement failed.
pub async fn claim_columns(s: &mut Session) -> Result<Vec<Column>, DbError> {
    type Row = (String, String, Option<i32>, bool);
    let column = |(name, kind, most_chars, must_be_given): Row| Column { name, kind, most_chars, must_be_given };
    s.within("claim_columns", async |s| Ok(s.rows("claim_columns", ClaimColumns {}).await?.into_iter().map(column).collect())).await
}

/// The unique indexes of the tables of claims, and of `payment`.
///
/// # Errors
/// The statement failed.
pub async fn unique_indexes(s: &mut Session) -> Result<Vec<UniqueIndex>, DbError> {
    type Row = (String, String, bool, Vec<String>, bool);
    let index = |(relation, name, primary, columns, plain): Row| UniqueIndex { relation, name, primary, columns, plain };
    s.within("unique_indexes", async |s| Ok(s.rows("unique_indexes", UniqueIndexes {}).await?.into_iter().map(index).collect()))
        .await
}

/// The triggers and rules on our tables.
///
/// # Errors
/// The statement failed.
pub async fn meddlers(s: &mut Session) -> Result<Vec<Meddler>, DbError> {
    type Row = (String, String, String, bool);
    let meddler = |(relation, kind, name, can_swallow): Row| Meddler { relation, kind, name, can_swallow };
    s.within("meddlers", async |s| Ok(s.rows("meddlers", Meddlers {}).await?.into_iter().map(meddler).collect())).await
}

/// What our role may not do and must, in words.
///
/// # Errors
/// The statement failed.
pub async fn missing_privileges(s: &mut Session) -> Result<Vec<String>, DbError> {
    s.within("missing_privileges", async |s| s.rows("missing_privileges", MissingPrivileges {}).await).await
}

/// Another group that has claims in the table, as far as a look at the newest tells.
///
/// # Errors
/// The statement failed, or took too long.
pub async fn other_group(s: &mut Session, group: &str) -> Result<Option<String>, DbError> {
    s.within("other_group", async |s| s.row("other_group", OtherGroup { counted: group, group }).await).await
}

/// The floor, and whether there must be one.
///
/// # Errors
/// The statement failed.
pub async fn memory(s: &mut Session) -> Result<Memory, DbError> {
    s.within("memory", async |s| {
        let (floor, now_ms, in_use) = s.row("memory", AskMemory {}).await?.expect("one row");
        Ok(Memory { floor, now_ms, in_use })
    })
    .await
}

/// How far every partition of this group and topic is settled.
///
/// # Errors
/// The statement failed.
pub async fn frontiers(s: &mut Session, group: &str, topic: &str) -> Result<Vec<Frontier>, DbError> {
    let rows: Vec<(i32, Option<i64>, Option<i64>)> =
        s.within("frontiers", async |s| s.rows("frontiers", Frontiers { group, topic }).await).await?;
    let frontier = |(partition, next, digest): (i32, Option<i64>, Option<i64>)| Frontier {
        partition,
        next_offset: next.map(NextOffset),
        last_record_digest: digest.map(RecordDigest),
    };
    Ok(rows.into_iter().map(frontier).collect())
}

/// The tables as `ours (oid, holds_claims)`. A day that is being detached takes no new claims.
macro_rules! ours {
    ($rest:literal) => {
        concat!(
            "WITH RECURSIVE claims (oid) AS (
                 SELECT to_regclass('processed_event')::oid
                 UNION ALL
                 SELECT inhrelid FROM pg_inherits JOIN claims ON inhparent = claims.oid WHERE NOT inhdetachpending),
             ours (oid, holds_claims) AS (
                 SELECT oid, true FROM claims
                 UNION ALL
                 SELECT to_regclass(name)::oid, false
                 FROM unnest(ARRAY['payment', 'payment_attempt', 'attempt_batch', 'consumed_partition', 'held_event',
                                   'horizon_claim', 'operator_action', 'retention']) AS name)
             ",
            $rest
        )
    };
}

statement! {
    AskSettings {} -> (Integer, Bool, Bool, Text, Text, Text, Bool) {
        "SELECT current_setting('server_version_num')::integer, current_setting('fsync')::boolean,
                current_setting('full_page_writes')::boolean, current_setting('synchronous_commit'),
                current_setting('default_transaction_isolation'), current_setting('transaction_isolation'),
                coalesce(current_setting('onceward.no_fsync', true), '') = 'accepted'"
    }
}

statement! {
    Relations {} -> (Text, Bool, Text, Bool, Bool, Nullable<Text>, Nullable<Text>) {
        ours!(
            "SELECT c.relname::text, holds_claims, c.relkind::text, c.relpersistence = 'p', row_security_active(c.oid),
                    pg_get_partkeydef(c.oid),
                    (SELECT d.relname::text FROM pg_class d WHERE d.oid = p.partdefid)
             FROM ours JOIN pg_class c USING (oid) LEFT JOIN pg_partitioned_table p ON p.partrelid = c.oid
             ORDER BY holds_claims DESC, c.relname"
        )
    }
}

statement! {
    ClaimColumns {} -> (Text, Text, Nullable<Integer>, Bool) {
        // What a domain is made over is what counts.
        "SELECT quote_ident(attname), format_type(CASE typtype WHEN 'd' THEN typbasetype ELSE atttypid END, NULL),
                CASE WHEN atttypid = 'varchar'::regtype AND atttypmod >= 4 THEN atttypmod - 4 END,
                attnotnull AND NOT atthasdef AND attidentity = ''
         FROM pg_attribute JOIN pg_type ON pg_type.oid = atttypid WHERE attrelid = to_regclass('processed_event') AND attnum > 0 AND NOT attisdropped
         ORDER BY attnum"
    }
}

statement! {
    UniqueIndexes {} -> (Text, Text, Bool, Array<Text>, Bool) {
        ours!(
            "SELECT t.relname::text, i.relname::text, x.indisprimary,
                    ARRAY(SELECT a.attname::text FROM unnest(x.indkey::int2[]) WITH ORDINALITY AS k (attnum, place)
                          JOIN pg_attribute a ON a.attrelid = x.indrelid AND a.attnum = k.attnum
                          WHERE k.place <= x.indnkeyatts ORDER BY a.attname),
                    x.indisunique AND x.indpred IS NULL AND x.indexprs IS NULL AND x.indisvalid AND x.indimmediate
             FROM ours JOIN pg_index x ON x.indrelid = ours.oid JOIN pg_class t ON t.oid = x.indrelid
                  JOIN pg_class i ON i.oid = x.indexrelid
             WHERE (x.indisunique OR x.indisexclusion) AND (holds_claims OR t.relname = 'payment')
             ORDER BY 1, 2"
        )
    }
}

// Tables that replicate have triggers of the kind that never runs here; those of constraints are internal.
statement! {
    Meddlers {} -> (Text, Text, Text, Bool) {
        ours!(
            "SELECT t.relname::text, 'trigger', g.tgname::text, g.tgtype & 2 <> 0
             FROM ours JOIN pg_trigger g ON g.tgrelid = ours.oid JOIN pg_class t ON t.oid = g.tgrelid
             WHERE NOT g.tgisinternal AND g.tgparentid = 0 AND g.tgenabled IN ('O', 'A')
             UNION ALL
             SELECT t.relname::text, 'rule', r.rulename::text, true
             FROM ours JOIN pg_rewrite r ON r.ev_class = ours.oid JOIN pg_class t ON t.oid = r.ev_class
             WHERE r.rulename <> '_RETURN' AND r.ev_enabled IN ('O', 'A')
             ORDER BY 1, 2, 3"
        )
    }
}

statement! {
    MissingPrivileges {} -> Text {
        "SELECT privilege || ' on ' || name
         FROM (VALUES ('processed_event', ARRAY['SELECT', 'INSERT', 'DELETE']), ('payment', ARRAY['SELECT', 'INSERT']),
                      ('payment_attempt', ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']),
                      ('attempt_batch', ARRAY['SELECT', 'INSERT', 'DELETE']),
                      ('consumed_partition', ARRAY['SELECT', 'INSERT', 'UPDATE']),
                      ('held_event', ARRAY['SELECT', 'INSERT', 'UPDATE']), ('horizon_claim', ARRAY['SELECT', 'INSERT', 'DELETE']),
                      ('operator_action', ARRAY['SELECT', 'INSERT']),
                      ('retention', ARRAY['SELECT', 'INSERT', 'UPDATE'])) AS wanted (name, privileges),
              unnest(privileges) AS privilege
         WHERE to_regclass(name) IS NOT NULL AND NOT has_table_privilege(to_regclass(name), privilege)
         UNION ALL
         SELECT missing
         FROM pg_class, LATERAL (VALUES
                  ('to own processed_event', pg_has_role(relowner, 'USAGE')),
                  ('CREATE on schema ' || relnamespace::regnamespace, has_schema_privilege(relnamespace, 'CREATE'))) AS day (missing, there)
         WHERE pg_class.oid = to_regclass('processed_event') AND relkind = 'p' AND NOT there"
    }
}

// The whole of a large table cannot be read at each start: what the server has counted, and the newest claims. A group that shows itself
// later stops a partition, since its claims are neither inserted nor found.
statement! {
    OtherGroup<'a> { counted: &'a str => Text, group: &'a str => Text } -> Text {
        "SELECT other FROM pg_stats, unnest(most_common_vals::text::text[]) AS other
         WHERE schemaname = current_schema() AND tablename = 'processed_event' AND attname = 'consumer_group' AND other <> :counted
         UNION ALL
         SELECT consumer_group::text FROM (SELECT consumer_group FROM processed_event ORDER BY event_id DESC LIMIT 10000) AS newest
         WHERE consumer_group <> :group
         LIMIT 1"
    }
}

statement! {
    AskMemory {} -> (Nullable<SqlUuid>, BigInt, Bool) {
        "SELECT (SELECT floor FROM retention), (extract(epoch FROM statement_timestamp()) * 1000)::bigint,
                EXISTS (SELECT FROM consumed_partition WHERE next_offset IS NOT NULL)"
    }
}

statement! {
    Frontiers<'a> { group: &'a str => Text, topic: &'a str => Text } -> (Integer, Nullable<BigInt>, Nullable<BigInt>) {
        "SELECT partition, next_offset, last_record_digest FROM consumed_partition
         WHERE consumer_group = :group AND topic = :topic ORDER BY partition"
    }
}
