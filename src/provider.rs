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

use std::fmt;
use std::time::Duration;

pub use self::answer::{Answer, Found};
pub use self::breaker::Breaker;
pub use self::client::{Client, ClientError};
pub use self::profile::Profile;
pub use crate::config::{AmountForm, ProviderQuery};

/// What the provider's room must be told. It holds the token, so it shows itself without it.
#[derive(Clone)]
pub struct Settings {
    /// The base address; `/v1/charges` is added.
    pub url: String,
    /// Sent as a bearer token.
    pub token: Option<String>,
    /// The longest time of one call, from the connection to the last byte of the answer.
    pub call_timeout: Duration,
    /// The most calls open at once, over all partitions.
    pub max_in_flight: usize,
    /// What this provider does in its own way.
    pub profile: Profile,
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { url, token: _, call_timeout, max_in_flight, profile } = self;
        f.debug_struct("Settings")
            .field("url", url)
            .field("call_timeout", call_timeout)
            .field("max_in_flight", max_in_flight)
            .field("profile", profile)
            .finish_non_exhaustive()
    }
}
