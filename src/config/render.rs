//! The configuration as text: the effective values, the example file, the table of the documentation.
//!
//! Invariant: all three are made from the declared keys, and secrets are redacted in each.

use std::fmt::Write;

use super::setting::Key;
use super::{Config, KEYS, SECTIONS};

impl Config {
    /// The effective values as TOML, secrets redacted.
    #[must_use]
    pub fn show(&self) -> String {
        let mut text = String::new();
        for (section, _) in SECTIONS {
            let _ = writeln!(text, "{}[{section}]", if text.is_empty() { "" } else { "\n" });
            for key in keys_of(section).filter(|key| !key.open) {
                match (key.show)(self) {
                    Some(value) => writeln!(text, "{} = {value}", key.name()),
                    None => writeln!(text, "# {} is not set", key.name()),
                }
                .unwrap_or_default();
            }
            for key in keys_of(section).filter(|key| key.open) {
                if let Some(lines) = (key.show)(self) {
                    let _ = writeln!(text, "\n[{}]\n{lines}", key.path());
                }
            }
        }
        text
    }
}

/// The example file: every key with its default and its meaning. `config/example.toml` equals it, and a test says so.
#[must_use]
pub fn example() -> String {
    let defaults = Config::default();
    let mut text = String::from(EXAMPLE_HEAD);
    for (section, about) in SECTIONS {
        let _ = writeln!(text, "\n#{about}\n[{section}]");
        for key in keys_of(section) {
            let unit = if key.suffix.is_empty() { key.kind.replace('`', "\"") } else { "milliseconds".to_owned() };
            let _ = match (key.show)(&defaults) {
                Some(value) => writeln!(text, "#{} ({unit})\n{} = {value}", key.doc, key.name()),
                None => writeln!(text, "#{} ({unit})\n# {}", key.doc, blank(key)),
            };
        }
    }
    text
}

/// The Markdown table of all keys: `docs/CONFIGURATION.md` equals it, and a test says so.
#[must_use]
pub fn markdown() -> String {
    let defaults = Config::default();
    let mut text = String::from(MARKDOWN_HEAD);
    for (section, about) in SECTIONS {
        let _ = writeln!(
            text,
            "\n## `[{section}]`\n\n{}\n\n| key | default | takes | meaning |\n| --- | --- | --- | --- |",
            about.trim()
        );
        for key in keys_of(section) {
            let default = (key.show)(&defaults).map_or("–".to_owned(), |value| match in_words(key, &value) {
                Some(words) => format!("`{value}` ({words})"),
                None => format!("`{value}`"),
            });
            let _ = writeln!(text, "| `{}` | {default} | {} | {} |", key.name(), key.kind, key.doc.trim());
        }
    }
    text
}

fn keys_of(section: &str) -> impl Iterator<Item = &'static Key> {
    KEYS.iter().filter(move |key| key.section == section)
}

/// What a key without a default looks like when it is set.
fn blank(key: &Key) -> String {
    let path = key.path();
    let value = BLANK.iter().find(|(name, _)| *name == path).map_or("", |(_, value)| *value);
    format!("{}{}{value}", key.name(), if key.open { "." } else { " = " })
}

const BLANK: &[(&str, &str)] = &[
    ("kafka.brokers", "\"kafka-1:9092,kafka-2:9092\""),
    ("kafka.instance_id", "\"billing-0\""),
    ("kafka.oauth_token_file", "\"/run/secrets/kafka-token\""),
    ("kafka.options", "fetch.wait.max.ms = 100"),
    ("database.url", "\"postgres://onceward:password@db:5432/onceward\""),
    ("provider.url", "\"http://payments:8080\""),
    ("provider.token", "\"…\""),
    ("provider.ca_file", "\"/etc/onceward/provider-ca.pem\""),
    ("provider.client_cert_file", "\"/etc/onceward/client.pem\""),
    ("provider.client_key_file", "\"/etc/onceward/client.key\""),
    ("retention.replay_horizon_ms", "2_592_000_000"),
    ("admin.token", "\"what-openssl-rand-hex-32-prints\""),
    ("tracing.otlp_endpoint", "\"http://collector:4318\""),
];

/// A duration as people say it.
fn in_words(key: &Key, value: &str) -> Option<String> {
    let ms: u64 = value.replace('_', "").parse().ok().filter(|_| !key.suffix.is_empty())?;
    let units = [(86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1_000, "s")];
    let (size, unit) = units.into_iter().find(|(size, _)| ms >= *size && ms.is_multiple_of(*size))?;
    Some(format!("{} {unit}", ms / size))
}

const EXAMPLE_HEAD: &str = "\
# Every key of onceward with its default. Give this file with --config, or set a key in the environment:
# kafka.brokers is ONCEWARD_KAFKA_BROKERS. What is commented out has no default.
";

const MARKDOWN_HEAD: &str = "\
# Configuration

A TOML file (`--config FILE` or `ONCEWARD_CONFIG`), and the environment over it: `kafka.brokers` is `ONCEWARD_KAFKA_BROKERS`.
Unknown keys are refused, in both. All faults are reported together, with exit code 64; `onceward check --show-config` prints the
effective values, secrets redacted. This page is made from `src/config.rs`; a test holds it true.

- **Secrets** (`database.url`, `provider.token`, `admin.token`) may stand in a file of their own: `database.url_file`, `provider.token_file`,
  `admin.token_file` (`ONCEWARD_DATABASE_URL_FILE`, `ONCEWARD_PROVIDER_TOKEN_FILE`, `ONCEWARD_ADMIN_TOKEN_FILE`). A relative name is relative
  to the working directory. These files, but for the last, and those of certificates and keys may be replaced while the service runs
  ([how](OPERATIONS.md#secrets-and-certificates)).
- **TLS to PostgreSQL** is asked for in the URL, as libpq does: `sslmode`, `sslrootcert` (a file, or `system`), `sslcert` and `sslkey`
  ([what they mean](OPERATIONS.md#tls-to-postgresql)).
- **Time limits** end in `_ms`. They must keep an order, checked at start: call < effect deadline < idle in transaction;
  lock + call + 2 s < drain; statement + idle in transaction < session < poll interval; effect deadline + statement < transaction budget;
  `retry.max_age_ms` + margin < the life of the provider's keys.
- **`[kafka.options]`** passes options to librdkafka by their own names (`ONCEWARD_KAFKA_OPTIONS_FETCH_WAIT_MAX_MS`), but not those
  that carry the guarantee: auto-commit, offset store, offset reset, group, brokers, assignor, group protocol, instance id, session, poll interval,
  isolation, topic creation. A secret among them may stand in a file of its own: `sasl.password.file`, `ssl.key.password.file`
  (`ONCEWARD_KAFKA_OPTIONS_SASL_PASSWORD_FILE`). `queued.*` and `fetch.*` may be set: they decide how much memory librdkafka itself holds,
  beside `pipeline.buffer_bytes`.
- Variables that Kubernetes makes for a service called `onceward` (`ONCEWARD_SERVICE_HOST`, `ONCEWARD_PORT…`) are no keys and are
  passed over.
";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests_support::assert_file;

    #[test]
    fn the_example_file_is_made_from_the_keys() {
        assert_file("config/example.toml", &example());
    }

    #[test]
    fn the_documented_table_is_made_from_the_keys() {
        assert_file("docs/CONFIGURATION.md", &markdown());
    }

    #[test]
    fn every_key_without_a_default_has_an_example() {
        let blank: Vec<String> = KEYS.iter().filter(|key| (key.show)(&Config::default()).is_none()).map(Key::path).collect();
        assert_eq!(blank, BLANK.iter().map(|(name, _)| *name).collect::<Vec<_>>());
    }
}
