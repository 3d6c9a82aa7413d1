//! The claims: one row per event and group, kept for as long as the floor allows.
//!
//! In: ids. Out: those that were new. It owns the rows of `processed_event`.
//!
//! Invariant: an id is claimed once per group, however many sessions try, on whichever day and with whatever offset.

use diesel::sql_types::{Array, BigInt, Bool, Integer, Nullable, Text, Uuid as SqlUuid};
use uuid::Uuid;

use super::old_claims::SHOW_AS_A_WRITER;
use super::statement::statement;
use super::{DbError, Form, Session};
use crate::handler::EventDigest;
use crate::record::{Offset, SourceId};

/// One event to claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClaimRow {
    /// The dedup key.
    pub event_id: Uuid,
    /// Tells a repeated event from a conflicting one.
    pub digest: EventDigest,
    /// Explains a duplicate; never a key.
    pub offset: Offset,
}

/// A claim that exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The claimed id.
    pub event_id: Uuid,
    /// The event's digest, if its claim has one.
    pub digest: Option<EventDigest>,
    /// The partition that claimed it.
    pub source: Option<SourceId>,
    /// Its record's offset there.
    pub offset: Option<Offset>,
}

/// How the table of claims is made: as our migration makes it, or as another service has made it (R-KFK-IDEM-2), which is used as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClaimTable {
    /// A table per day of ids; else one plain table.
    pub by_day: bool,
    /// The key is `(event_id, consumer_group)`; else `event_id` alone, and the table serves one group.
    pub of_groups: bool,
    /// It has the columns `event_digest`, `source_id` and `source_offset`, which tell a repeat from a conflict and explain a duplicate.
    pub explains: bool,
}

impl ClaimTable {
    /// Reads how it is made.
    ///
    /// # Errors
    /// The statement failed, or there is no such table.
    pub async fn read(s: &mut Session) -> Result<Self, DbError> {
        let shape = s.within("claim_table", async |s| s.row("claim_table", Shape {}).await).await?;
        let (by_day, of_groups, explains) = shape.ok_or_else(|| DbError::program("claim_table", "there is no processed_event"))?;
        Ok(Self { by_day, of_groups, explains })
    }

    /// What a transaction that claims must say with BEGIN. Who waits for the fence has read the floor already; where there are no days,
    /// whoever deletes claims must see that somebody has.
    #[must_use]
    pub const fn opening(self) -> &'static str {
        if self.by_day { "" } else { SHOW_AS_A_WRITER }
    }

    /// Claims the events and returns the ids that are new, in no order. An id that another open transaction claims is waited for.
    ///
    /// # Errors
    /// 23514: a day is missing, see [`super::retention::ensure_days`]. In the optimistic form [`DbError::is_taken`]: not all are new.
    pub async fn claim(
        self,
        s: &mut Session,
        group: &str,
        source: SourceId,
        rows: &[ClaimRow],
        form: Form,
    ) -> Result<Vec<Uuid>, DbError> {
        if rows.is_empty() {
            return Ok(Vec::new());
        }
        let event_ids: Vec<Uuid> = rows.iter().map(|row| row.event_id).collect();
        let (source, digests, offsets) =
            (source.0, rows.iter().map(|row| row.digest.0).collect(), rows.iter().map(|row| row.offset.0).collect());
        match (form, self.explains, self.of_groups) {
            (Form::OnConflict, true, true) => s.rows("claim", Claim { group, source, event_ids, digests, offsets }).await,
            (Form::OnConflict, true, false) => s.rows("claim", ClaimById { group, source, event_ids, digests, offsets }).await,
            (Form::OnConflict, false, true) => s.rows("claim", PlainClaim { group, event_ids }).await,
            (Form::OnConflict, false, false) => s.rows("claim", PlainClaimById { group, event_ids }).await,
            (Form::Optimistic, _, _) => {
                let count = if self.explains {
                    s.change("claim", ClaimAll { group, source, event_ids, digests, offsets }).await?
                } else {
                    s.change("claim", PlainClaimAll { group, event_ids }).await?
                };
                if count < rows.len() {
                    return Err(DbError::swallowed("claim"));
                }
                Ok(rows.iter().map(|row| row.event_id).collect())
            }
        }
    }

    /// Claims the events of several partitions, each with its own, in the optimistic form: all of them or none.
    ///
    /// # Errors
    /// As [`ClaimTable::claim`].
    pub async fn claim_together(self, s: &mut Session, group: &str, rows: &[(SourceId, ClaimRow)]) -> Result<(), DbError> {
        if rows.is_empty() {
            return Ok(());
        }
        let event_ids: Vec<Uuid> = rows.iter().map(|(_, row)| row.event_id).collect();
        let count = if self.explains {
            let sources = rows.iter().map(|(source, _)| source.0).collect();
            let (digests, offsets) = rows.iter().map(|(_, row)| (row.digest.0, row.offset.0)).unzip();
            s.change("claim", ClaimTogether { group, sources, event_ids, digests, offsets }).await?
        } else {
            s.change("claim", PlainClaimAll { group, event_ids }).await?
        };
        if count < rows.len() { Err(DbError::swallowed("claim")) } else { Ok(()) }
    }

    /// The claims of `ids` that exist, in no order.
    ///
    /// # Errors
    /// The statement failed.
    pub async fn look_up(self, s: &mut Session, group: &str, ids: &[Uuid]) -> Result<Vec<Seen>, DbError> {
        let (Some(&min), Some(&max)) = (ids.iter().min(), ids.iter().max()) else { return Ok(Vec::new()) };
        type Row = (Uuid, Option<i64>, Option<i32>, Option<i64>);
        let seen = |(event_id, digest, source, offset): Row| Seen {
            event_id,
            digest: digest.map(EventDigest),
            source: source.map(SourceId),
            offset: offset.map(Offset),
        };
        let found = s.within("look_up_claims", async |s| {
            if self.explains {
                s.rows("look_up_claims", Find { ids, group, min, max }).await
            } else {
                s.rows("look_up_claims", FindPlain { ids, group, min, max }).await
            }
        });
        Ok(found.await?.into_iter().map(seen).collect())
    }
}

/// Deletes claims that this transaction made: the events stay in the window. Out: how many of them were there; a day that was detached
/// meanwhile has taken its claims with it.
///
/// # Errors
/// The statement failed.
pub async fn give_back(s: &mut Session, group: &str, ids: &[Uuid]) -> Result<usize, DbError> {
    let (Some(&min), Some(&max)) = (ids.iter().min(), ids.iter().max()) else { return Ok(0) };
    s.change("give_back", GiveBack { ids, group, min, max }).await
}

#[cfg(feature = "lab")]
pub(super) fn claim_text(form: Form) -> String {
    let (group, source, event_ids, digests, offsets) = ("", 0, vec![], vec![], vec![]);
    match form {
        Form::OnConflict => super::statement::text(&Claim { group, source, event_ids, digests, offsets }),
        Form::Optimistic => super::statement::text(&ClaimAll { group, source, event_ids, digests, offsets }),
    }
}

#[cfg(feature = "lab")]
pub(super) fn look_up_text() -> String {
    super::statement::text(&Find { ids: &[], group: "", min: Uuid::nil(), max: Uuid::nil() })
}

/// The new ones come back.
macro_rules! unless_taken {
    ($key:literal) => {
        concat!(" ON CONFLICT ", $key, " DO NOTHING RETURNING event_id")
    };
}

// Sorted, so that two sessions which claim the same ids wait for each other in one order and never in a circle. The time is written here,
// because the table of another service may leave it to its program.
macro_rules! claims {
    ($name:ident -> $rows:ty, $end:expr) => {
        statement! {
            $name<'a> {
                group: &'a str => Text, source: i32 => Integer,
                event_ids: Vec<Uuid> => Array<SqlUuid>, digests: Vec<i64> => Array<BigInt>, offsets: Vec<i64> => Array<BigInt>,
            } -> $rows {
                concat!(
                    "INSERT INTO processed_event (event_id, consumer_group, processed_at, source_id, event_digest, source_offset)
         SELECT event_id, :group, now(), :source, digest, source_offset
         FROM unnest(:event_ids, :digests, :offsets) AS new (event_id, digest, source_offset)
         ORDER BY event_id",
                    $end
                )
            }
        }
    };
}

macro_rules! plain_claims {
    ($name:ident -> $rows:ty, $end:expr) => {
        statement! {
            $name<'a> { group: &'a str => Text, event_ids: Vec<Uuid> => Array<SqlUuid> } -> $rows {
                concat!(
                    "INSERT INTO processed_event (event_id, consumer_group, processed_at)
         SELECT event_id, :group, now()
         FROM unnest(:event_ids) AS new (event_id)
         ORDER BY event_id",
                    $end
                )
            }
        }
    };
}

claims!(Claim -> SqlUuid, unless_taken!("(event_id, consumer_group)"));
claims!(ClaimById -> SqlUuid, unless_taken!("(event_id)"));
claims!(ClaimAll -> (), "");
plain_claims!(PlainClaim -> SqlUuid, unless_taken!("(event_id, consumer_group)"));
plain_claims!(PlainClaimById -> SqlUuid, unless_taken!("(event_id)"));
plain_claims!(PlainClaimAll -> (), "");

statement! {
    ClaimTogether<'a> {
        group: &'a str => Text, sources: Vec<i32> => Array<Integer>,
        event_ids: Vec<Uuid> => Array<SqlUuid>, digests: Vec<i64> => Array<BigInt>, offsets: Vec<i64> => Array<BigInt>,
    } -> () {
        "INSERT INTO processed_event (event_id, consumer_group, processed_at, source_id, event_digest, source_offset)
         SELECT event_id, :group, now(), source_id, digest, source_offset
         FROM unnest(:sources, :event_ids, :digests, :offsets) AS new (source_id, event_id, digest, source_offset)
         ORDER BY event_id"
    }
}

// The join is planned well for any number of ids, and the range lets the planner leave out the other days.
statement! {
    Find<'a> { ids: &'a [Uuid] => Array<SqlUuid>, group: &'a str => Text, min: Uuid => SqlUuid, max: Uuid => SqlUuid }
    -> (SqlUuid, Nullable<BigInt>, Nullable<Integer>, Nullable<BigInt>) {
        "SELECT event_id, event_digest, source_id, source_offset
         FROM unnest(:ids) AS wanted (event_id) JOIN processed_event USING (event_id)
         WHERE consumer_group = :group AND event_id BETWEEN :min AND :max"
    }
}

statement! {
    FindPlain<'a> { ids: &'a [Uuid] => Array<SqlUuid>, group: &'a str => Text, min: Uuid => SqlUuid, max: Uuid => SqlUuid }
    -> (SqlUuid, Nullable<BigInt>, Nullable<Integer>, Nullable<BigInt>) {
        "SELECT event_id, NULL::bigint, NULL::integer, NULL::bigint
         FROM unnest(:ids) AS wanted (event_id) JOIN processed_event USING (event_id)
         WHERE consumer_group = :group AND event_id BETWEEN :min AND :max"
    }
}

// An index that holds for every row, at once, and for nothing but the equality of these two columns.
statement! {
    Shape {} -> (Bool, Bool, Bool) {
        "SELECT relkind = 'p',
                EXISTS (SELECT FROM pg_index AS x
                        WHERE x.indrelid = c.oid AND x.indisunique AND x.indisvalid AND x.indimmediate
                              AND x.indpred IS NULL AND x.indexprs IS NULL
                              AND ARRAY(SELECT a.attname::text FROM unnest(x.indkey::int2[]) WITH ORDINALITY AS k (attnum, place)
                                        JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum = k.attnum
                                        WHERE k.place <= x.indnkeyatts ORDER BY a.attname) = ARRAY['consumer_group', 'event_id']),
                (SELECT count(*) = 3 FROM pg_attribute AS a
                 WHERE a.attrelid = c.oid AND a.attname IN ('event_digest', 'source_id', 'source_offset'))
         FROM pg_class AS c WHERE c.oid = to_regclass('processed_event')"
    }
}

statement! {
    GiveBack<'a> { ids: &'a [Uuid] => Array<SqlUuid>, group: &'a str => Text, min: Uuid => SqlUuid, max: Uuid => SqlUuid } -> () {
        "DELETE FROM processed_event AS claim
         USING unnest(:ids) AS given (event_id)
         WHERE claim.event_id = given.event_id AND claim.consumer_group = :group AND claim.event_id BETWEEN :min AND :max"
    }
}
