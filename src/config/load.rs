//! Loading.
/// x
#[derive(Debug)]
pub struct ConfigError;
/// x
#[derive(Debug)]
pub struct Fault;
