//! (in the making)

pub mod provider_stub;
