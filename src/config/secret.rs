//! A value that must not be seen.
//!
//! Invariant: only [`Secret::expose`] and [`Secret::now`] give the text out; `Debug` and every rendering show a redacted form.

use std::fmt;
use std::path::{Path, PathBuf};

use tokio_postgres::config::Host;

use crate::rotating::Files;
use crate::store::DatabaseUrl;

/// A text that is never printed.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Secret {
    text: String,
    /// Where it is kept.
    file: Option<PathBuf>,
}

impl Secret {
    /// Wraps a text.
    #[must_use]
    pub const fn new(text: String) -> Self {
        Self { text, file: None }
    }

    /// The text of a file.
    pub(super) fn kept_in(self, file: Option<PathBuf>) -> Self {
        Self { file, ..self }
    }

    /// The text as it was at the start, for the one place that needs it.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.text
    }

    /// The text as it is now: what is kept in a file may be changed there.
    ///
    /// # Errors
    /// The file cannot be read or is empty.
    #[doc(hidden)]
    pub fn now(&self, files: &mut Files) -> Result<String, String> {
        match &self.file {
            Some(file) => of_file(file, files),
            None => Ok(self.text.clone()),
        }
    }

    /// Whether nothing was given.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.text.is_empty()
    }

    /// A database URL with nothing but its user, hosts and database, and a mark for its password, read by the parser that will connect with it.
    #[must_use]
    pub fn redacted_url(&self) -> String {
        let Ok(DatabaseUrl { config: parsed, .. }) = DatabaseUrl::parse(&self.text) else { return REDACTED.to_owned() };
        // A misplaced quotation mark, or both forms in one, makes a name of what follows it: the password, perhaps.
        let plain = |name: &str| {
            let is_plain = name.chars().all(|c| c.is_alphanumeric() || "_-.+/@:".contains(c));
            if is_plain { name.to_owned() } else { REDACTED.to_owned() }
        };
        let ports = parsed.get_ports();
        let host = |(index, host): (usize, &Host)| {
            let name = match host {
                Host::Tcp(name) => plain(name),
                Host::Unix(path) => plain(&path.display().to_string()),
            };
            match ports.get(index).or(ports.first()) {
                Some(port) => format!("{name}:{port}"),
                None => name,
            }
        };
        let hosts = parsed.get_hosts().iter().enumerate().map(host).collect::<Vec<_>>().join(",");
        let password = if parsed.get_password().is_some() { ":***" } else { "" };
        let user = parsed.get_user().map_or_else(String::new, |user| format!("{}{password}@", plain(user)));
        format!("postgres://{user}{hosts}/{}", plain(parsed.get_dbname().unwrap_or_default()))
    }
}

/// Without the end of its line.
pub(super) fn of_file(file: &Path, files: &mut Files) -> Result<String, String> {
    let text = std::str::from_utf8(files.read(file)?).map_err(|_| format!("{} is not UTF-8", file.display()))?;
    match text.trim_end_matches(['\r', '\n']) {
        "" => Err(format!("{} is empty", file.display())),
        text => Ok(text.to_owned()),
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(REDACTED)
    }
}

/// What is shown instead.
pub const REDACTED: &str = "[redacted]";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_never_in_debug() {
        assert_eq!(format!("{:?}", Secret::new("hunter2".to_owned())), "[redacted]");
        assert_eq!(format!("{:?}", Some(Secret::new("hunter2".to_owned()))), "Some([redacted])");
    }

    #[test]
    fn a_url_keeps_user_hosts_and_database_only() {
        for (given, shown) in [
            ("postgres://bill:hunter2@db-1:5433/money?application_name=hunter2", "postgres://bill:***@db-1:5433/money"),
            ("postgres://bill:hunter2@db-1:5433,db-2:5434/money", "postgres://bill:***@db-1:5433,db-2:5434/money"),
            ("postgres://bill:hunter2@/money?host=/run/pg", "postgres://bill:***@/run/pg/money"),
            ("host=db-1 user=bill password=hunter2 dbname=money", "postgres://bill:***@db-1/money"),
            ("postgres://bill:hunter2@db-1", "postgres://bill:***@db-1:5432/"),
            ("postgres://bill@db-1/money", "postgres://bill@db-1:5432/money"),
            ("postgres://bill:hunter2@db-1/money?sslmode=verify-full&sslrootcert=/hunter2", "postgres://bill:***@db-1:5432/money"),
            ("postgres://bill:x@db-1/money password=hunter2", "postgres://bill:***@db-1:5432/[redacted]"),
            ("host=db-1 user= password=hunter2", "postgres://[redacted]@db-1/"),
            ("hunter2", "[redacted]"),
            ("postgres://bill:hunter2@db-1/money?x=hunter2", "[redacted]"),
        ] {
            assert_eq!(Secret::new(given.to_owned()).redacted_url(), shown);
        }
    }
}
