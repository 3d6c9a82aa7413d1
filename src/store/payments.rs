//! The business rows: what was charged, and what was declined.
//!
//! In: rows to write, ids to look up. Out: those that were written or found. It owns the rows of `payment`.
//!
//! Invariant: one row per event, whichever group writes it; amounts pass as exact decimals.

use diesel::sql_types::{Array, BigInt, Integer, Nullable, Numeric, Text, Uuid as SqlUuid};
use uuid::Uuid;

use super::numeric::Exact;
use super::statement::statement;
use super::{DbError, Form, Session, storable};
use crate::event::{Currency, Money};

/// How a payment ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PaymentStatus {
    /// The money moves.
    Charged,
    /// A business "no".
    Declined,
}

/// One row of `payment`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PaymentRow {
    /// The event that is paid for.
    pub event_id: Uuid,
    /// Its order.
    pub order_id: i64,
    /// Its customer.
    pub customer_id: i64,
    /// The exact amount.
    pub amount: Money,
    /// How it ended.
    pub status: PaymentStatus,
    /// The provider's name for the charge.
    pub provider_charge_id: Option<String>,
    /// How often the provider was asked.
    pub attempts: i32,
}

impl PaymentStatus {
    /// The word stored in the table.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Charged => "charged",
            Self::Declined => "declined",
        }
    }

    pub(super) fn from_word(word: &str) -> Option<Self> {
        [Self::Charged, Self::Declined].into_iter().find(|status| status.as_str() == word)
    }
}

/// Writes the rows and returns the ids of those that were not there yet, in no order.
///
/// # Errors
/// The statement failed. In the optimistic form [`DbError::is_taken`]: some were there.
pub async fn insert(s: &mut Session, rows: &[PaymentRow], form: Form) -> Result<Vec<Uuid>, DbError> {
    if rows.is_empty() {
        return Ok(Vec::new());
    }
    match form {
        Form::OnConflict => s.rows("insert_payments", Insert::of(rows)).await,
        Form::Optimistic if s.change("insert_payments", InsertAll::of(rows)).await? < rows.len() => {
            Err(DbError::swallowed("insert_payments"))
        }
        Form::Optimistic => Ok(rows.iter().map(|row| row.event_id).collect()),
    }
}

/// The rows of `ids` that exist, in no order.
///
/// # Errors
/// The statement failed, or a row holds an amount that its currency cannot have.
pub async fn look_up(s: &mut Session, ids: &[Uuid]) -> Result<Vec<PaymentRow>, DbError> {
    if ids.is_empty() {
        return Ok(Vec::new());
    }
    s.within("look_up_payments", async |s| s.rows("look_up_payments", Find { ids }).await?.into_iter().map(read).collect()).await
}

type Row = (Uuid, i64, i64, String, String, String, Option<String>, i32);

fn read(
    (event_id, order_id, customer_id, amount, currency, status, provider_charge_id, attempts): Row,
) -> Result<PaymentRow, DbError> {
    let unreadable = |what: &str| DbError::program("look_up_payments", format_args!("payment {event_id}: {what}"));
    let currency = Currency::from_code(&currency).map_err(|fault| unreadable(&format!("its currency {fault}")))?;
    let amount = Money::from_decimal(&amount, currency).map_err(|fault| unreadable(&format!("its amount {fault}")))?;
    let status = PaymentStatus::from_word(&status).ok_or_else(|| unreadable("its status is unknown"))?;
    Ok(PaymentRow { event_id, order_id, customer_id, amount, status, provider_charge_id, attempts })
}

#[cfg(feature = "lab")]
pub(super) fn insert_text(form: Form) -> String {
    match form {
        Form::OnConflict => super::statement::text(&Insert::of(&[])),
        Form::Optimistic => super::statement::text(&InsertAll::of(&[])),
    }
}

// An amount goes in as the digits of a `numeric` and comes out as decimal text, so that nothing between here and the table can round it.
macro_rules! insertion {
    ($name:ident -> $rows:ty, $end:expr) => {
        statement! {
            $name<'a> {
                event_ids: Vec<Uuid> => Array<SqlUuid>, order_ids: Vec<i64> => Array<BigInt>, customer_ids: Vec<i64> => Array<BigInt>,
                amounts: Vec<Exact> => Array<Numeric>, currencies: Vec<&'a str> => Array<Text>, statuses: Vec<&'a str> => Array<Text>,
                charge_ids: Vec<Option<String>> => Array<Nullable<Text>>, attempts: Vec<i32> => Array<Integer>,
            } -> $rows {
                concat!(
                    "INSERT INTO payment (event_id, order_id, customer_id, amount, currency, status, provider_charge_id, attempts)
         SELECT event_id, order_id, customer_id, amount, currency, status, charge_id, attempts
         FROM unnest(:event_ids, :order_ids, :customer_ids, :amounts, :currencies, :statuses, :charge_ids, :attempts)
              AS new (event_id, order_id, customer_id, amount, currency, status, charge_id, attempts)
         ORDER BY event_id",
                    $end
                )
            }
        }

        impl<'a> $name<'a> {
            fn of(rows: &'a [PaymentRow]) -> Self {
                Self {
                    event_ids: rows.iter().map(|row| row.event_id).collect(),
                    order_ids: rows.iter().map(|row| row.order_id).collect(),
                    customer_ids: rows.iter().map(|row| row.customer_id).collect(),
                    amounts: rows.iter().map(|row| Exact(row.amount)).collect(),
                    currencies: rows.iter().map(|row| row.amount.currency().code()).collect(),
                    statuses: rows.iter().map(|row| row.status.as_str()).collect(),
                    charge_ids: rows.iter().map(|row| row.provider_charge_id.as_deref().map(storable)).collect(),
                    attempts: rows.iter().map(|row| row.attempts).collect(),
                }
            }
        }
    };
}

insertion!(Insert -> SqlUuid, " ON CONFLICT (event_id) DO NOTHING RETURNING event_id");
insertion!(InsertAll -> (), "");

// Each id is probed by itself. A plain join is planned for good while the table is still small, as a scan of all of it, and stays so
// until statistics come: up to a minute of a growing table.
statement! {
    Find<'a> { ids: &'a [Uuid] => Array<SqlUuid> }
    -> (SqlUuid, BigInt, BigInt, Text, Text, Text, Nullable<Text>, Integer) {
        "SELECT found.event_id, order_id, customer_id, amount::text, currency, status, provider_charge_id, attempts
         FROM unnest(:ids) AS wanted (event_id),
              LATERAL (SELECT * FROM payment AS p WHERE p.event_id = wanted.event_id LIMIT 1) AS found"
    }
}
