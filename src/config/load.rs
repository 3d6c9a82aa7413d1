//! Reading: the file, the environment over it, then the checks; every fault is collected on the way.
//!
//! Invariant: a word that was given and is not understood is a fault; no fault quotes a secret.

use std::ffi::OsString;
use std::fmt;
use std::path::Path;

use super::check::{self, Need};
use super::setting::{Key, Raw};
use super::{Config, KEYS, SECTIONS};
use crate::rotating::Files;
use crate::text::printable;

/// All faults of a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// In the order in which they were found.
    pub faults: Vec<Fault>,
}

/// One fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The key, or the word that is none.
    pub key: String,
    /// Where the value was found; `None` for a fault of several values together or of a missing one.
    pub origin: Option<String>,
    /// What is wrong and what would be valid.
    pub problem: String,
}

impl Config {
    /// Reads the file, puts the environment over it and checks the whole; `needs` says what this command requires.
    ///
    /// # Errors
    /// All faults at once.
    pub fn load(
        file: Option<&Path>,
        environment: impl IntoIterator<Item = (OsString, OsString)>,
        needs: &[Need],
    ) -> Result<Self, ConfigError> {
        let mut reading = Reading::default();
        if let Some(path) = file {
            match std::fs::read_to_string(path) {
                Ok(text) => reading.file(&path.display().to_string(), &text),
                Err(error) => reading.fault("--config", Some(path.display().to_string()), format!("cannot be read: {error}")),
            }
        }
        reading.end(environment, needs)
    }

    /// As [`Self::load`], of a file's text under this name.
    ///
    /// # Errors
    /// All faults at once.
    pub fn read(
        (name, text): (&str, &str),
        environment: impl IntoIterator<Item = (OsString, OsString)>,
        needs: &[Need],
    ) -> Result<Self, ConfigError> {
        let mut reading = Reading::default();
        reading.file(name, text);
        reading.end(environment, needs)
    }
}

#[derive(Default)]
struct Reading {
    config: Config,
    faults: Vec<Fault>,
}

/// One value on its way in: where it was found and whether it names a file.
struct Found<'a> {
    key: &'a Key,
    sub: String,
    is_file: bool,
    raw: Raw,
    origin: String,
}

impl Reading {
    fn end(mut self, environment: impl IntoIterator<Item = (OsString, OsString)>, needs: &[Need]) -> Result<Config, ConfigError> {
        self.environment(environment);
        self.faults.extend(check::faults(&self.config, needs, &self.faults));
        if self.faults.is_empty() { Ok(self.config) } else { Err(ConfigError { faults: self.faults }) }
    }

    fn file(&mut self, path: &str, text: &str) {
        let table = match text.parse::<toml::Table>() {
            Ok(table) => table,
            Err(error) => {
                // Its own text would quote the line, and the line may hold a secret.
                let line = error.span().map_or(0, |span| text[..span.start].lines().count().max(1));
                return self.fault(path, None, format!("line {line}: is not TOML: {}", error.message().replace('\n', ", ")));
            }
        };
        let mut found = Vec::new();
        for (section, content) in table {
            match content {
                toml::Value::Table(content) if SECTIONS.iter().any(|(name, _)| *name == section) => {
                    for (name, value) in content {
                        self.file_key(path, &section, &name, value, &mut found);
                    }
                }
                _ => {
                    let valid = SECTIONS.iter().map(|(name, _)| format!("[{name}]")).collect::<Vec<_>>().join(", ");
                    self.fault(&section, Some(path.to_owned()), format!("is not a section; there are {valid}"));
                }
            }
        }
        self.take(found);
    }

    fn file_key(&mut self, path: &str, section: &str, name: &str, value: toml::Value, found: &mut Vec<Found<'static>>) {
        let lookup = |name: &str| KEYS.iter().find(|key| key.section == section && key.name() == name);
        let (key, is_file) = match (lookup(name), name.strip_suffix("_file").and_then(lookup)) {
            (Some(key), _) => (key, false),
            (None, Some(key)) if key.secret => (key, true),
            _ => {
                let valid = KEYS.iter().filter(|key| key.section == section).map(Key::name).collect::<Vec<_>>().join(", ");
                return self.fault(
                    &format!("{section}.{name}"),
                    Some(path.to_owned()),
                    format!("is not a key; [{section}] has {valid}"),
                );
            }
        };
        let mut push = |sub, value| found.push(Found { key, sub, is_file, raw: Raw::Toml(value), origin: path.to_owned() });
        match value {
            toml::Value::Table(options) if key.open => flatten(String::new(), options, &mut push),
            value => push(String::new(), value),
        }
    }

    fn environment(&mut self, environment: impl IntoIterator<Item = (OsString, OsString)>) {
        let mut given: Vec<(OsString, OsString)> = environment.into_iter().collect();
        given.sort();
        let mut found = Vec::new();
        for (variable, value) in given {
            let Some(variable) = variable.to_str().filter(|name| name.starts_with(PREFIX) && !is_not_ours(name)) else { continue };
            let Some(value) = value.to_str() else {
                self.fault(variable, Some("environment".to_owned()), "is not UTF-8".to_owned());
                continue;
            };
            match key_of_variable(variable) {
                Some((key, sub, is_file)) => {
                    let origin = format!("environment: {variable}");
                    found.push(Found { key, sub, is_file, raw: Raw::Word(value.to_owned()), origin });
                }
                None => self.fault(variable, Some("environment".to_owned()), UNKNOWN_VARIABLE.to_owned()),
            }
        }
        self.take(found);
    }

    /// Sets what one place has given; a secret and the file for it must not both come from the same place.
    fn take(&mut self, found: Vec<Found<'_>>) {
        for value in &found {
            let path = value.key.path();
            let twice = value.is_file && found.iter().any(|other| !other.is_file && other.key.path() == path);
            let full = match (value.is_file, value.sub.as_str()) {
                (true, _) => format!("{path}_file"),
                (false, "") => path.clone(),
                (false, sub) => format!("{path}.{sub}"),
            };
            let result = if twice { Err(format!("is given together with {path}: give one of them")) } else { self.set(value) };
            if let Err(problem) = result {
                self.fault(&full, Some(value.origin.clone()), problem);
            }
        }
    }

    fn set(&mut self, value: &Found<'_>) -> Result<(), String> {
        if !value.is_file {
            return (value.key.set)(&mut self.config, &value.sub, &value.raw);
        }
        let path = super::setting::word(&value.raw).ok_or("must be the name of a file")?;
        let text = super::secret::of_file(path.as_ref(), &mut Files::default())?;
        let kept = Raw::Kept(path.clone().into(), text);
        (value.key.set)(&mut self.config, "", &kept).map_err(|problem| format!("the content of {path} {problem}"))
    }

    fn fault(&mut self, key: &str, origin: Option<String>, problem: String) {
        self.faults.push(Fault { key: key.to_owned(), origin, problem });
    }
}

/// `a.b.c = 1` is the same option as `"a.b.c" = 1`.
fn flatten(prefix: String, table: toml::Table, push: &mut impl FnMut(String, toml::Value)) {
    for (name, value) in table {
        let name = if prefix.is_empty() { name } else { format!("{prefix}.{name}") };
        match value {
            toml::Value::Table(inner) => flatten(name, inner, push),
            value => push(name, value),
        }
    }
}

fn key_of_variable(variable: &str) -> Option<(&'static Key, String, bool)> {
    if let Some(key) = KEYS.iter().find(|key| !key.open && key.variable() == variable) {
        return Some((key, String::new(), false));
    }
    let file = variable.strip_suffix("_FILE").and_then(|name| KEYS.iter().find(|key| key.secret && key.variable() == name));
    if let Some(key) = file {
        return Some((key, String::new(), true));
    }
    let option = |key: &'static Key| {
        let rest = variable.strip_prefix(&key.variable())?.strip_prefix('_').filter(|rest| !rest.is_empty())?;
        Some((key, rest.to_lowercase().replace('_', "."), false))
    };
    KEYS.iter().filter(|key| key.open).find_map(option)
}

/// Kubernetes puts such variables into every container beside a service that is called onceward; the rest are the tests' and the lab's.
fn is_not_ours(variable: &str) -> bool {
    let port = |(_, rest): (&str, &str)| rest.starts_with(|first: char| first.is_ascii_digit());
    matches!(variable, FILE_VARIABLE | "ONCEWARD_PG_BIN")
        || variable.starts_with("ONCEWARD_TEST_")
        || (cfg!(feature = "lab") && matches!(variable, "ONCEWARD_CLAIM_FORM" | "ONCEWARD_CRASH_POINTS"))
        || variable.ends_with("_SERVICE_HOST")
        || variable.contains("_SERVICE_PORT")
        || variable.ends_with("_PORT")
        || variable.split_once("_PORT_").is_some_and(port)
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.faults.len();
        write!(f, "the configuration has {count} fault{}:", if count == 1 { "" } else { "s" })?;
        for fault in &self.faults {
            write!(f, "\n  {fault}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let origin = self.origin.as_ref().map_or_else(String::new, |origin| format!(" ({origin})"));
        // A key that is none may be made of anything.
        f.write_str(&printable(&format!("{}{origin}: {}", self.key, self.problem)))
    }
}

impl std::error::Error for ConfigError {}

/// In front of every variable that is ours.
const PREFIX: &str = "ONCEWARD_";

/// The variable that names the file, read by the command line.
pub const FILE_VARIABLE: &str = "ONCEWARD_CONFIG";

const UNKNOWN_VARIABLE: &str = "is not a key; a variable is ONCEWARD_<SECTION>_<KEY>, such as ONCEWARD_KAFKA_BROKERS for kafka.brokers; \
    `onceward check --show-config` prints every key";

#[cfg(test)]
mod tests;
