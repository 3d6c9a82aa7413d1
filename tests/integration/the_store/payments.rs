//! One row per event, to the last decimal.

use onceward::event::{Currency, Money};
use onceward::store::payments::{PaymentRow, PaymentStatus, insert, look_up};
use onceward::store::{ErrorClass, Form};
use uuid::Uuid;

use super::{Db, assert_class, committed, ids, refused};

pub fn payment(event_id: Uuid, amount: &str, currency: &str) -> PaymentRow {
    let amount = Money::from_decimal(amount, Currency::from_code(currency).unwrap()).unwrap();
    let (status, provider_charge_id) = (PaymentStatus::Charged, Some("ch_1".to_owned()));
    PaymentRow { event_id, order_id: 1, customer_id: 2, amount, status, provider_charge_id, attempts: 1 }
}

#[tokio::test]
async fn amounts_come_back_exactly_and_the_first_row_of_an_event_stays() {
    let (db, store) = Db::ready().await;
    let mut s = store.claims.get().await.unwrap();
    let [a, b, c, d, missing] = ids();
    let declined = PaymentRow { status: PaymentStatus::Declined, provider_charge_id: None, ..payment(d, "0.01", "EUR") };
    let rows = [payment(a, "90071992547409.93", "EUR"), payment(b, "500", "JPY"), payment(c, "1.234", "KWD"), declined];
    assert_eq!(committed(&mut s, async |s| insert(s, &rows, Form::OnConflict).await).await.len(), 4);
    let found = look_up(&mut s, &[missing, d, c, b, a]).await.unwrap();
    assert_eq!(found.len(), 4);
    assert!(rows.iter().all(|row| found.contains(row)), "{found:?}");

    let [new] = ids();
    let again = [payment(a, "1.00", "EUR"), payment(new, "2.00", "EUR")];
    assert_eq!(committed(&mut s, async |s| insert(s, &again, Form::OnConflict).await).await, [new]);
    assert_eq!(look_up(&mut s, &[a]).await.unwrap(), rows[..1]);
    let text: String =
        db.outsider().await.query_one("SELECT amount::text FROM payment WHERE event_id = $1", &[&a]).await.unwrap().get(0);
    assert_eq!(text, "90071992547409.93");
}

#[tokio::test]
async fn the_optimistic_form_writes_all_rows_or_none_and_a_taken_key_is_told_from_data() {
    let (_db, store) = Db::ready().await;
    let mut s = store.claims.get().await.unwrap();
    let [paid, a, b] = ids();
    let rows = [payment(paid, "1.00", "EUR"), payment(b, "2.00", "EUR")];
    assert_eq!(committed(&mut s, async |s| insert(s, &rows, Form::Optimistic).await).await, [paid, b]);
    let again = [payment(a, "1.00", "EUR"), payment(paid, "9.00", "EUR")];
    let error = refused(&mut s, async |s| insert(s, &again, Form::Optimistic).await).await;
    assert!(error.is_taken(), "{error}");
    assert_eq!(look_up(&mut s, &[a, paid]).await.unwrap(), rows[..1]);
    let error = refused(&mut s, async |s| insert(s, &[payment(a, "0.00", "EUR")], Form::Optimistic).await).await;
    assert!(!error.is_taken());
    assert_class(&error, "23514", ErrorClass::Data);
}

#[tokio::test]
async fn a_row_that_makes_no_sense_is_refused_as_data() {
    let (_db, store) = Db::ready().await;
    let mut s = store.claims.get().await.unwrap();
    let [a, b] = ids();
    let error =
        refused(&mut s, async |s| insert(s, &[payment(a, "1.00", "EUR"), payment(b, "0.00", "EUR")], Form::OnConflict).await).await;
    assert_class(&error, "23514", ErrorClass::Data);
    assert_eq!(look_up(&mut s, &[a, b]).await.unwrap(), []);
}
