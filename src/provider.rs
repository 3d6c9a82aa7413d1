//! The payment provider, seen from here: one kind of call, one table that says what an answer means.
//!
//! [`profile`] holds what differs between providers, [`client`] makes the call, [`answer`] classifies what came back, [`breaker`] says
//! whether anybody may be called.
//!
//! Invariant: only an answer that says so is a charge, and nothing but a definite refusal is "not charged" (R-KFK-IDEM-4).

pub mod answer;
pub mod breaker;
pub mod client;
pub mod profile;

use std::time::Duration;

pub use self::answer::{Answer, Found};
pub use self::breaker::Breaker;
pub use self::client::{Client, ClientError};
pub use self::profile::Profile;
use crate::config::Secret;
pub use crate::config::{AmountForm, ProviderQuery};
use crate::tls::Tls;

/// What the provider's room must be told.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The base address; `/v1/charges` is added.
    pub url: String,
    /// Sent as a bearer token.
    pub token: Option<Secret>,
    /// Whom an `https` connection trusts, and what it shows.
    pub tls: Tls,
    /// The longest time of one call, from the connection to the last byte of the answer.
    pub call_timeout: Duration,
    /// The most calls open at once, over all partitions.
    pub max_in_flight: usize,
    /// What this provider does in its own way.
    pub profile: Profile,
}
