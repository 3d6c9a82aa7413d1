//! (in the making)

pub mod payment;
