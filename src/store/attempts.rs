//! Attempts: what the provider may have heard of, and in which bytes.
//!
//! In: the bytes that are about to be posted. Out: what is known of the events already. It owns `attempt_batch` (in flight) and
//! `payment_attempt` (left without a payment).
//!
//! Invariant: an attempt is durable before the provider hears of it, and is kept until its event has a `payment` row.

use std::time::Duration;

use diesel::sql_types::{Array, BigInt, Binary, Bool, Integer, Nullable, Text, Uuid as SqlUuid};
use uuid::Uuid;

use super::payments::{self, PaymentRow};
use super::statement::statement;
use super::{DbError, Session, duration, milliseconds, storable};
use crate::handler::EventDigest;
use crate::record::{Epoch, SourceId};

/// An attempt that is about to begin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewAttempt {
    /// The event, and the idempotency key.
    pub event_id: Uuid,
    /// Its content.
    pub digest: EventDigest,
    /// The bytes to post.
    pub body: Vec<u8>,
    /// It may have been asked for before the database went back in time, which has forgotten it.
    pub in_doubt: bool,
}

/// An attempt of earlier, or of another partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnownAttempt {
    /// The event.
    pub event_id: Uuid,
    /// The content it had.
    pub digest: EventDigest,
    /// The bytes that must be posted again; `None` = never built.
    pub body: Option<Vec<u8>>,
    /// How long ago it began, by the database's clock.
    pub first_attempt_age: Duration,
    /// How long ago the last one began, or its answer came.
    pub last_attempt_age: Duration,
    /// Answers that told nothing.
    pub unknown_answers: i32,
    /// The last answer, in words.
    pub answer: Option<String>,
    /// The provider's name for the charge, if it said one.
    pub provider_charge_id: Option<String>,
}

/// What is known of the events of a batch whose attempts are now durable.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Opened {
    /// Payments that exist, whoever made them.
    pub payments: Vec<PaymentRow>,
    /// Earlier attempts, one per event: the earliest time and its bytes, all unknown answers.
    pub attempts: Vec<KnownAttempt>,
}

/// An attempt that was begun and ends without a payment row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BegunAttempt {
    /// The event.
    pub event_id: Uuid,
    /// Its content.
    pub digest: EventDigest,
    /// The bytes that were posted.
    pub body: Vec<u8>,
    /// Answers of this batch that told nothing, to be added.
    pub unknown_answers: i32,
    /// The last answer, in words.
    pub answer: Option<String>,
    /// The provider's name for the charge, if it said one.
    pub provider_charge_id: Option<String>,
}

/// Makes the attempts durable before anybody is called, on a session other than the batch's own. `None`: fenced, call nobody.
///
/// # Errors
/// A statement failed: call nobody.
pub async fn open(s: &mut Session, source: SourceId, epoch: Epoch, attempts: &[NewAttempt]) -> Result<Option<Opened>, DbError> {
    let ids: Vec<Uuid> = attempts.iter().map(|attempt| attempt.event_id).collect();
    let limits = s.limits();
    let open = Open {
        event_ids: &ids,
        bodies: attempts.iter().map(|attempt| attempt.body.as_slice()).collect(),
        digests: attempts.iter().map(|attempt| attempt.digest.0).collect(),
        source: source.0,
        epoch: epoch.0,
    };
    let in_doubt = || attempts.iter().filter(|attempt| attempt.in_doubt);
    let doubt = Doubt {
        source: source.0,
        event_ids: in_doubt().map(|attempt| attempt.event_id).collect(),
        digests: in_doubt().map(|attempt| attempt.digest.0).collect(),
    };
    let opened = s.alone("open_attempts", limits, async |s| {
        let opened = s.change("open_attempts", open).await?;
        if opened > 0 && !doubt.event_ids.is_empty() {
            s.change("doubt_attempts", doubt).await?;
        }
        Ok(opened)
    });
    if opened.await? == 0 {
        return Ok(None);
    }
    // Looked up only once ours is committed: of two that open the same event at once, at least the later one sees the other.
    s.alone("look_up_attempts", limits, async |s| {
        let payments = payments::look_up(s, &ids).await?;
        let known = s.rows("look_up_attempts", Find { ids: &ids, source: source.0, epoch: epoch.0 }).await?;
        Ok(Some(Opened { payments, attempts: merge(known) }))
    })
    .await
}

/// Gives every open held event of the partition an attempt, once, because the database went back in time: each may have been asked for
/// since the state it has gone back to. To be called in the transaction that stores the doubt.
///
/// # Errors
/// The statement failed.
pub async fn doubt_held(s: &mut Session, source: SourceId, group: &str) -> Result<(), DbError> {
    s.change("doubt_held", DoubtHeld { group, source: source.0 }).await.map(drop)
}

/// Settles the attempts of a partition, in the batch's transaction: its batch rows go, events begun without a payment are kept,
/// those of `paid` are forgotten.
///
/// # Errors
/// A statement failed.
pub async fn settle(
    s: &mut Session,
    source: SourceId,
    begun_without_payment: &[BegunAttempt],
    paid: &[Uuid],
) -> Result<(), DbError> {
    let settle = Settle {
        source: source.0,
        event_ids: begun_without_payment.iter().map(|begun| begun.event_id).collect(),
        digests: begun_without_payment.iter().map(|begun| begun.digest.0).collect(),
        bodies: begun_without_payment.iter().map(|begun| begun.body.as_slice()).collect(),
        unknown_answers: begun_without_payment.iter().map(|begun| begun.unknown_answers).collect(),
        answers: begun_without_payment.iter().map(|begun| begun.answer.as_deref().map(storable)).collect(),
        charge_ids: begun_without_payment.iter().map(|begun| begun.provider_charge_id.as_deref().map(storable)).collect(),
    };
    s.change("settle_attempts", settle).await?;
    forget(s, paid).await
}

/// Deletes what is known of attempts for these events: they are paid, or an operator has found out that none was made.
///
/// # Errors
/// The statement failed.
pub async fn forget(s: &mut Session, ids: &[Uuid]) -> Result<(), DbError> {
    if !ids.is_empty() {
        s.change("forget_attempts", Forget { ids }).await?;
    }
    Ok(())
}

/// Notes the charge that an operator has found at the provider.
///
/// # Errors
/// The statement failed.
pub async fn note_charge(s: &mut Session, event_id: Uuid, digest: EventDigest, answer: &str, charge: &str) -> Result<(), DbError> {
    let note = NoteCharge { event_id, digest: digest.0, answer, charge: storable(charge) };
    s.change("note_charge", note).await.map(drop)
}

/// Whether an attempt without a payment may have been a charge.
///
/// # Errors
/// The statement failed.
pub async fn is_in_doubt(s: &mut Session, event_id: Uuid) -> Result<bool, DbError> {
    Ok(s.row("is_in_doubt", InDoubt { event_id }).await?.unwrap_or(false))
}

/// Turns what a crash left of the partition's attempts into one unknown answer each, unless the event was paid. To be called after
/// every bump. Returns how many events.
///
/// # Errors
/// A statement failed.
pub async fn convert_leftovers(s: &mut Session, source: SourceId) -> Result<u64, DbError> {
    convert(s, "convert_leftovers", Some(source), Duration::ZERO).await
}

/// The same for attempts of any partition that are older than any transaction can be.
///
/// # Errors
/// A statement failed.
pub async fn convert_stale(s: &mut Session, older_than: Duration) -> Result<u64, DbError> {
    convert(s, "convert_stale", None, older_than).await
}

async fn convert(s: &mut Session, name: &'static str, source: Option<SourceId>, older_than: Duration) -> Result<u64, DbError> {
    let convert = Convert { older_than_ms: milliseconds(older_than), source: source.map(|source| source.0) };
    let converted = s.within(name, async |s| s.change(name, convert).await).await?;
    Ok(converted as u64)
}

type KnownRow = (Uuid, i64, Option<Vec<u8>>, i64, i64, i32, Option<String>, Option<String>);

/// One attempt per event out of rows that stand oldest first: the oldest gives time, content and bytes, the counts add up.
fn merge(rows: Vec<KnownRow>) -> Vec<KnownAttempt> {
    let mut merged: Vec<KnownAttempt> = Vec::with_capacity(rows.len());
    for (event_id, digest, body, first_ms, last_ms, unknown_answers, answer, provider_charge_id) in rows {
        match merged.last_mut() {
            Some(known) if known.event_id == event_id => {
                known.last_attempt_age = known.last_attempt_age.min(duration(last_ms));
                known.unknown_answers = known.unknown_answers.saturating_add(unknown_answers);
                known.body = known.body.take().or(body);
                known.answer = known.answer.take().or(answer);
                known.provider_charge_id = known.provider_charge_id.take().or(provider_charge_id);
            }
            _ => merged.push(KnownAttempt {
                event_id,
                digest: EventDigest(digest),
                body,
                first_attempt_age: duration(first_ms),
                last_attempt_age: duration(last_ms),
                unknown_answers,
                answer,
                provider_charge_id,
            }),
        }
    }
    merged
}

// The fence and the row are one statement. It does not wait for the ownership row, which the batch holds.
statement! {
    Open<'a> {
        event_ids: &'a [Uuid] => Array<SqlUuid>, bodies: Vec<&'a [u8]> => Array<Binary>, digests: Vec<i64> => Array<BigInt>,
        source: i32 => Integer, epoch: i64 => BigInt,
    } -> () {
        "INSERT INTO attempt_batch (source_id, epoch, event_ids, bodies, digests)
         SELECT id, epoch, :event_ids, :bodies, :digests
         FROM consumed_partition WHERE id = :source AND epoch = :epoch"
    }
}

/// The millisecond with which a UUID v7 begins, but not a future one.
macro_rules! id_time {
    () => {
        "least(now(), to_timestamp(('x' || left(replace(event_id::text, '-', ''), 12))::bit(48)::bigint / 1000.0))"
    };
}

/// What a doubt adds to an attempt that is known: it may have been asked for since, and nobody knows what the answer was.
macro_rules! doubt_attempt {
    () => {
        " ON CONFLICT (event_id) DO UPDATE SET
             unknown_answers = greatest(old.unknown_answers, 1), last_attempt_at = greatest(old.last_attempt_at, excluded.last_attempt_at)"
    };
}

// One unknown answer, as old as the event can be; the bytes are not known. The last attempt can have been as late as the doubt.
statement! {
    Doubt { source: i32 => Integer, event_ids: Vec<Uuid> => Array<SqlUuid>, digests: Vec<i64> => Array<BigInt> } -> () {
        concat!(
            "INSERT INTO payment_attempt AS old (event_id, event_digest, first_attempt_at, last_attempt_at, unknown_answers)
             SELECT event_id, digest, ",
            id_time!(),
            ", coalesce((SELECT doubt_before FROM consumed_partition WHERE id = :source), now()), 1
             FROM unnest(:event_ids, :digests) AS doubted (event_id, digest)
             WHERE NOT EXISTS (SELECT FROM payment WHERE payment.event_id = doubted.event_id)
             ORDER BY event_id",
            doubt_attempt!()
        )
    }
}

// The digest is in the claim. Without one, zero: its version is none, so it contradicts no content.
statement! {
    DoubtHeld<'a> { group: &'a str => Text, source: i32 => Integer } -> () {
        concat!(
            "WITH open_event AS (
                 SELECT DISTINCT held.event_id, coalesce(claim.event_digest, 0) AS digest
                 FROM held_event AS held
                      LEFT JOIN processed_event AS claim ON claim.event_id = held.event_id AND claim.consumer_group = :group
                 WHERE held.source_id = :source AND held.event_id IS NOT NULL AND held.reason <> 'conflict'
                       AND held.state IN ('retrying', 'waiting', 'parked', 'queued'))
             INSERT INTO payment_attempt AS old (event_id, event_digest, first_attempt_at, last_attempt_at, unknown_answers)
             SELECT event_id, digest, ",
            id_time!(),
            ", now(), 1
             FROM open_event
             WHERE NOT EXISTS (SELECT FROM payment WHERE payment.event_id = open_event.event_id)
             ORDER BY event_id",
            doubt_attempt!()
        )
    }
}

// Other partitions' batches, and those of an earlier owner of this one: what they asked, nobody here knows. The rows of this owner
// are left out, because it keeps its answers itself. Each source is joined for itself (joined to their union, the batches' arrays
// would be unpacked once per id), and rows are probed by key, see `payments`.
statement! {
    Find<'a> { ids: &'a [Uuid] => Array<SqlUuid>, source: i32 => Integer, epoch: i64 => BigInt }
    -> (SqlUuid, BigInt, Nullable<Binary>, BigInt, BigInt, Integer, Nullable<Text>, Nullable<Text>) {
        "WITH wanted AS (SELECT unnest(:ids) AS event_id)
         SELECT left_over.event_id, event_digest, body, (extract(epoch FROM clock_timestamp() - first_attempt_at) * 1000)::bigint AS age,
                (extract(epoch FROM clock_timestamp() - last_attempt_at) * 1000)::bigint AS last_age, unknown_answers, answer, provider_charge_id
         FROM wanted, LATERAL (SELECT * FROM payment_attempt AS p WHERE p.event_id = wanted.event_id LIMIT 1) AS left_over
         UNION ALL
         SELECT event_id, digest, body, (extract(epoch FROM clock_timestamp() - started_at) * 1000)::bigint,
                (extract(epoch FROM clock_timestamp() - started_at) * 1000)::bigint, 1, NULL, NULL
         FROM attempt_batch, unnest(event_ids, digests, bodies) AS each (event_id, digest, body) JOIN wanted USING (event_id)
         WHERE (source_id, epoch) IS DISTINCT FROM (:source, :epoch)
         ORDER BY event_id, age DESC"
    }
}

/// What a later attempt adds to an earlier one: the earliest time and its content stay, the counts add up.
macro_rules! upsert_attempt {
    () => {
        " ON CONFLICT (event_id) DO UPDATE SET
             event_digest = CASE WHEN excluded.first_attempt_at < old.first_attempt_at THEN excluded.event_digest ELSE old.event_digest END,
             body = CASE WHEN excluded.first_attempt_at < old.first_attempt_at
                         THEN coalesce(excluded.body, old.body) ELSE coalesce(old.body, excluded.body) END,
             first_attempt_at = least(old.first_attempt_at, excluded.first_attempt_at),
             last_attempt_at = greatest(old.last_attempt_at, excluded.last_attempt_at),
             unknown_answers = old.unknown_answers + excluded.unknown_answers,
             answer = coalesce(excluded.answer, old.answer),
             provider_charge_id = coalesce(excluded.provider_charge_id, old.provider_charge_id)"
    };
}

// An event that was begun takes its time from the batch rows that go. If a timer has converted those already, it has a row by now,
// and that one's time stays.
statement! {
    Settle<'a> {
        source: i32 => Integer, event_ids: Vec<Uuid> => Array<SqlUuid>, digests: Vec<i64> => Array<BigInt>,
        bodies: Vec<&'a [u8]> => Array<Binary>, unknown_answers: Vec<i32> => Array<Integer>,
        answers: Vec<Option<String>> => Array<Nullable<Text>>, charge_ids: Vec<Option<String>> => Array<Nullable<Text>>,
    } -> () {
        concat!(
            "WITH gone AS (DELETE FROM attempt_batch WHERE source_id = :source RETURNING started_at, event_ids),
                  began AS (SELECT event_id, min(started_at) AS at FROM gone, unnest(event_ids) AS event_id GROUP BY event_id)
             INSERT INTO payment_attempt AS old (event_id, event_digest, body, first_attempt_at, last_attempt_at, unknown_answers,
                                                 answer, provider_charge_id)
             SELECT event_id, digest, body, coalesce(began.at, now()), clock_timestamp(), unknown_answers, answer, charge_id
             FROM unnest(:event_ids, :digests, :bodies, :unknown_answers, :answers, :charge_ids)
                  AS begun (event_id, digest, body, unknown_answers, answer, charge_id)
                  LEFT JOIN began USING (event_id)
             ORDER BY event_id",
            upsert_attempt!()
        )
    }
}

// Only the side that deletes a row converts it. A row that a batch is settling just now is waited for, and is then gone.
statement! {
    Convert { older_than_ms: i64 => BigInt, source: Option<i32> => Nullable<Integer> } -> () {
        concat!(
            "WITH gone AS (
                 DELETE FROM attempt_batch
                 WHERE started_at <= now() - :older_than_ms * interval '1 millisecond'
                       AND source_id = coalesce(:source, source_id)
                 RETURNING started_at, event_ids, digests, bodies),
             left_over AS (
                 SELECT DISTINCT ON (event_id) event_id, digest, body, started_at, max(started_at) OVER each_event AS last_at,
                        count(*) OVER each_event AS times
                 FROM gone, unnest(event_ids, digests, bodies) AS each (event_id, digest, body)
                 WHERE NOT EXISTS (SELECT FROM payment WHERE payment.event_id = each.event_id)
                 WINDOW each_event AS (PARTITION BY event_id)
                 ORDER BY event_id, started_at)
             INSERT INTO payment_attempt AS old (event_id, event_digest, body, first_attempt_at, last_attempt_at, unknown_answers)
             SELECT event_id, digest, body, started_at, last_at, times FROM left_over
             ORDER BY event_id",
            upsert_attempt!()
        )
    }
}

statement! {
    NoteCharge<'a> { event_id: Uuid => SqlUuid, digest: i64 => BigInt, answer: &'a str => Text, charge: String => Text } -> () {
        "INSERT INTO payment_attempt AS old (event_id, event_digest, first_attempt_at, last_attempt_at, unknown_answers, answer,
                                             provider_charge_id)
         VALUES (:event_id, :digest, now(), now(), 0, :answer, :charge)
         ON CONFLICT (event_id) DO UPDATE SET answer = excluded.answer, provider_charge_id = excluded.provider_charge_id"
    }
}

statement! {
    InDoubt { event_id: Uuid => SqlUuid } -> Bool {
        "SELECT EXISTS (SELECT FROM payment_attempt
                        WHERE event_id = :event_id AND (unknown_answers > 0 OR provider_charge_id IS NOT NULL))"
    }
}

statement! {
    Forget<'a> { ids: &'a [Uuid] => Array<SqlUuid> } -> () {
        "DELETE FROM payment_attempt USING unnest(:ids) AS paid (event_id) WHERE payment_attempt.event_id = paid.event_id"
    }
}
