//! (in the making)
use crate::handler::*;
use crate::event::OrderConfirmed;
use crate::record::Record;
use crate::store::{Store, DbError, Session};
/// x
pub struct Billing;
/// x
pub fn start(_: &crate::config::Config) -> anyhow::Result<impl FnOnce(&Store) -> Billing + use<>> { Ok(|_: &Store| Billing) }
impl Handler for Billing {
    type Event = OrderConfirmed;
    type Answer = ();
    fn decode(&self, record: &Record) -> Result<Self::Event, Rejection> { crate::event::decode(record.payload.as_deref()) }
    async fn apply(&self, _tx: &mut Session, _ctx: &BatchContext<()>, events: &[Claimed<OrderConfirmed>]) -> Result<Vec<Outcome>, DbError> { Ok(events.iter().map(|_| Outcome::Applied).collect()) }
}
