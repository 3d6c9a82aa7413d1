//! (in the making)
/// x
#[derive(Debug)]
pub struct Session;
/// x
#[derive(Debug)]
pub struct DbError;
