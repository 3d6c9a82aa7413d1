//! librdkafka's options.
use std::collections::BTreeMap;
use std::fmt;

/// Options of librdkafka by their own names.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct KafkaOptions(BTreeMap<String, String>);

impl KafkaOptions {
    pub(super) fn from_table(_table: &toml::Table) -> Result<Self, String> {
        Ok(Self::default())
    }
    pub(super) fn shown(&self) -> String {
        String::new()
    }
}
impl fmt::Debug for KafkaOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown())
    }
}
