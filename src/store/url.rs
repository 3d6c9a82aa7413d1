//! What `database.url` says: the driver's part, and whether and whom to speak TLS with, of which the driver knows only half.
//!
//! In: a text. Out: a [`DatabaseUrl`], or what is wrong. It owns nothing.
//!
//! Invariant: what the URL says about TLS is kept or refused, never weakened and never passed over. No error quotes the URL: what does not
//! parse may be a piece of a password.

use std::path::PathBuf;

use tokio_postgres::Config;
use tokio_postgres::config::{SslMode, SslNegotiation};
use url::form_urlencoded;

use crate::tls::{Roots, Tls, Trust};

/// A URL, understood.
#[derive(Clone, Debug)]
pub struct DatabaseUrl {
    /// All but TLS.
    pub config: Config,
    /// TLS. It means TCP: a socket of this machine has none, as with libpq.
    pub encryption: Encryption<Tls>,
}

/// Whether a connection is encrypted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Encryption<T> {
    /// `sslmode=disable`.
    Never,
    /// `allow`, `prefer`, or nothing: unless the server says that it cannot.
    IfOffered(T),
    /// `require`, `verify-ca`, `verify-full`.
    Always(T),
}

/// The words that are ours, each as it was said last; an empty one is none.
#[derive(Default)]
struct Words {
    mode: Option<String>,
    root_cert: Option<String>,
    cert: Option<String>,
    key: Option<String>,
}

impl DatabaseUrl {
    /// # Errors
    /// What is wrong, in words that follow its name.
    pub fn parse(text: &str) -> Result<Self, &'static str> {
        let (text, words) = Words::take_out_of(text);
        let config: Config = text.parse().map_err(|_| NOT_A_URL)?;
        if config.get_hosts().is_empty() && config.get_hostaddrs().is_empty() {
            return Err("names no host");
        }
        if config.get_ssl_negotiation() != SslNegotiation::Postgres {
            return Err("asks for sslnegotiation=direct, which is not supported");
        }
        let encryption = words.encryption(config.get_ssl_mode())?;
        Ok(Self { config, encryption })
    }
}

impl Words {
    /// Only of a URL: in the form `key=value` the driver refuses those that it does not know.
    fn take_out_of(text: &str) -> (String, Self) {
        let mut words = Self::default();
        let is_url = text.starts_with("postgres://") || text.starts_with("postgresql://");
        // As the driver reads it: a question mark in the password is none.
        let host = text.find('@').map_or(0, |at| at + 1);
        let Some((address, query)) = text[host..].find('?').filter(|_| is_url).map(|mark| text.split_at(host + mark)) else {
            return (text.to_owned(), words);
        };
        let mut rest = Vec::new();
        for pair in query[1..].split('&') {
            // Only in forms a plus sign is a space.
            let plain = pair.replace('+', "%2B");
            let (name, value) = form_urlencoded::parse(plain.as_bytes()).next().unwrap_or_default();
            let word = match &*name {
                "sslmode" => &mut words.mode,
                "sslrootcert" => &mut words.root_cert,
                "sslcert" => &mut words.cert,
                "sslkey" => &mut words.key,
                _ => {
                    rest.push(pair);
                    continue;
                }
            };
            *word = Some(value.into_owned()).filter(|value| !value.is_empty());
        }
        let mark = if rest.is_empty() { "" } else { "?" };
        (format!("{address}{mark}{}", rest.join("&")), words)
    }

    fn encryption(self, of_driver: SslMode) -> Result<Encryption<Tls>, &'static str> {
        let roots = self.root_cert.map(|root| if root == "system" { Roots::System } else { Roots::File(root.into()) });
        let mode = match (self.mode.as_deref(), of_driver) {
            (Some(mode), _) => mode,
            (None, SslMode::Require) => "require",
            (None, SslMode::Disable) => "disable",
            (None, _) if roots == Some(Roots::System) => "verify-full",
            (None, _) => "prefer",
        };
        let client = match (self.cert, self.key) {
            (Some(cert), Some(key)) => Some((PathBuf::from(cert), PathBuf::from(key))),
            (None, None) => None,
            _ => return Err("must have both sslcert and sslkey, or neither"),
        };
        let tls = |trust| Tls { trust, client };
        match (mode, roots) {
            ("disable", _) => Ok(Encryption::Never),
            ("allow" | "prefer", None) => Ok(Encryption::IfOffered(tls(Trust::Anyone))),
            ("allow" | "prefer", Some(_)) => Err("has a sslrootcert that nobody is measured by: say sslmode=verify-full too"),
            ("require", None) => Ok(Encryption::Always(tls(Trust::Anyone))),
            ("require" | "verify-ca", Some(Roots::System)) => {
                Err("trusts every issuer that the machine knows (sslrootcert=system): that takes sslmode=verify-full")
            }
            ("require" | "verify-ca", Some(roots)) => Ok(Encryption::Always(tls(Trust::Issuer(roots)))),
            ("verify-full", Some(roots)) => Ok(Encryption::Always(tls(Trust::Name(roots)))),
            ("verify-ca" | "verify-full", None) => {
                Err("must say whose certificates count: sslrootcert=<file>, or sslrootcert=system with sslmode=verify-full")
            }
            _ => Err("has a sslmode that is none of disable, allow, prefer, require, verify-ca and verify-full"),
        }
    }
}

const NOT_A_URL: &str = "must be postgres://user:password@host:5432/database, special characters in the password percent-encoded";

#[cfg(test)]
mod tests {
    use super::*;

    fn encryption(query: &str) -> Result<Encryption<Tls>, &'static str> {
        DatabaseUrl::parse(&format!("postgres://u:p@h/d{query}")).map(|url| url.encryption)
    }

    // CASES D06
    #[test]
    fn every_mode_is_kept_as_libpq_keeps_it_or_refused() {
        use Encryption::{Always, IfOffered, Never};
        let file = || Roots::File("/ca.pem".into());
        let tls = |trust| Tls { trust, client: None };
        for (query, wanted) in [
            ("", IfOffered(tls(Trust::Anyone))),
            ("?sslmode=", IfOffered(tls(Trust::Anyone))),
            ("?sslmode=allow", IfOffered(tls(Trust::Anyone))),
            ("?sslmode=prefer&application_name=x", IfOffered(tls(Trust::Anyone))),
            ("?sslmode=disable&sslrootcert=/ca.pem", Never),
            ("?sslmode=require", Always(tls(Trust::Anyone))),
            ("?sslmode=disable&sslmode=require", Always(tls(Trust::Anyone))),
            ("?sslmode=require&sslrootcert=/ca.pem", Always(tls(Trust::Issuer(file())))),
            ("?sslmode=verify-ca&sslrootcert=%2Fca.pem", Always(tls(Trust::Issuer(file())))),
            ("?sslmode=verify-full&sslrootcert=/ca.pem", Always(tls(Trust::Name(file())))),
            ("?sslmode=verify-full&sslrootcert=system", Always(tls(Trust::Name(Roots::System)))),
            ("?sslrootcert=system", Always(tls(Trust::Name(Roots::System)))),
        ] {
            assert_eq!(encryption(query), Ok(wanted), "{query}");
        }
        for (query, says) in [
            ("?sslmode=verify-full", "whose certificates count"),
            ("?sslmode=verify-ca", "whose certificates count"),
            ("?sslmode=verify-ca&sslrootcert=system", "verify-full"),
            ("?sslmode=require&sslrootcert=system", "verify-full"),
            ("?sslrootcert=/ca.pem", "nobody is measured by"),
            ("?sslmode=verify_full&sslrootcert=/ca.pem", "none of disable"),
            ("?sslmode=require&sslcert=/c.pem", "both sslcert and sslkey"),
            ("?sslmode=require&sslnegotiation=direct", "not supported"),
            ("?sslmode=require&sslcrl=/x", "must be postgres://"),
        ] {
            assert!(encryption(query).is_err_and(|error| error.contains(says)), "{query}");
        }
    }

    #[test]
    fn names_of_files_are_read_as_they_are_written_and_the_driver_gets_the_rest() {
        let text = "postgres://u:p?w@h/d?sslcert=/a+b%20c.pem&connect_timeout=3&sslkey=/k.pem&sslmode=require&options=-c%20a%3Db";
        let url = DatabaseUrl::parse(text).expect("valid");
        let Encryption::Always(tls) = url.encryption else { panic!("{:?}", url.encryption) };
        assert_eq!(tls.client, Some(("/a+b c.pem".into(), "/k.pem".into())));
        assert_eq!((url.config.get_password(), url.config.get_options()), (Some(&b"p?w"[..]), Some("-c a=b")));
        assert_eq!(url.config.get_dbname(), Some("d"));
    }

    #[test]
    fn the_other_form_knows_what_the_driver_knows() {
        let mode = |words: &str| DatabaseUrl::parse(&format!("host=h user=u {words}")).map(|url| url.encryption);
        assert_eq!(mode("sslmode=disable"), Ok(Encryption::Never));
        assert!(matches!(mode("sslmode=require"), Ok(Encryption::Always(Tls { trust: Trust::Anyone, client: None }))));
        assert!(mode("sslmode=verify-full").is_err() && mode("sslrootcert=/ca.pem").is_err());
    }
}
