//! Cross-field checks.
/// x
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// x
    Kafka,
    /// x
    Database,
    /// x
    Provider,
}
