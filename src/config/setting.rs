//! What a key of the configuration is: one declaration gives the struct's field, its default, its name, its text and its row in
//! every table.
//!
//! Invariant: a key that is parsed is documented, and a key that is documented is parsed: both come from the same line.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use url::Url;

use super::kafka::KafkaOptions;
use super::{Config, Secret};

/// One key: where it stands, what it takes, how it is set and shown.
#[derive(Debug)]
pub struct Key {
    /// The table of the file it stands in.
    pub section: &'static str,
    /// The struct's field.
    pub field: &'static str,
    /// `_ms` for a duration.
    pub suffix: &'static str,
    /// What it takes, for people.
    pub kind: &'static str,
    /// The documentation.
    pub doc: &'static str,
    /// May also be given as `<key>_file`, the name of a file that holds it.
    pub secret: bool,
    /// A table whose keys are not declared here.
    pub open: bool,
    /// Reads a value into the configuration; the word is the key inside an open table, else empty.
    pub set: fn(&mut Config, &str, &Raw) -> Result<(), String>,
    /// Shows the value as TOML, secrets redacted; `None` while it is not set.
    pub show: fn(&Config) -> Option<String>,
}

impl Key {
    /// `section.key`, as documents and messages name it.
    #[must_use]
    pub fn path(&self) -> String {
        format!("{}.{}", self.section, self.name())
    }

    /// The key inside its section.
    #[must_use]
    pub fn name(&self) -> String {
        format!("{}{}", self.field, self.suffix)
    }

    /// The environment variable that sets it.
    #[must_use]
    pub fn variable(&self) -> String {
        format!("ONCEWARD_{}_{}", self.section, self.name()).to_uppercase()
    }
}

/// A value as it was found.
#[derive(Clone, Debug)]
pub enum Raw {
    /// In the file, typed.
    Toml(toml::Value),
    /// In the environment, always a word.
    Word(String),
    /// In a file of its own.
    Kept(PathBuf, String),
}

impl Raw {
    fn file(&self) -> Option<PathBuf> {
        match self {
            Self::Kept(file, _) => Some(file.clone()),
            Self::Toml(_) | Self::Word(_) => None,
        }
    }
}

/// A type that a key can have.
pub trait Setting: Sized {
    /// Appended to the field's name.
    const SUFFIX: &'static str = "";
    /// What it takes, for people.
    const KIND: &'static str;
    /// May be given in a file of its own.
    const SECRET: bool = false;

    /// A table whose keys are not declared.
    const OPEN: bool = false;

    /// Reads the value; the error says what would be valid, and never quotes a secret.
    fn read(raw: &Raw) -> Result<Self, String>;
    /// Sets one value; `sub` is the key inside an open table.
    fn set(&mut self, sub: &str, raw: &Raw) -> Result<(), String> {
        debug_assert!(sub.is_empty());
        *self = Self::read(raw)?;
        Ok(())
    }
    /// As TOML, redacted; `None` while it is not set.
    fn show(&self) -> Option<String>;
}

/// Declares the sections, their keys, [`Config`] and the table of all keys.
macro_rules! settings {
    ($(
        $(#[doc = $about:literal])+
        $section:ident: $name:ident {
            $( $(#[doc = $doc:literal])+ $field:ident: $type:ty = $default:expr, )*
        }
    )*) => {
        $(
            $(#[doc = $about])+
            #[derive(Clone, Debug, PartialEq, Eq)]
            pub struct $name {
                $( $(#[doc = $doc])+ pub $field: $type, )*
            }

            impl Default for $name {
                fn default() -> Self {
                    Self { $( $field: $default, )* }
                }
            }
        )*

        /// Everything that can be set. The default holds every default; what is required is blank in it.
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        pub struct Config {
            $( $(#[doc = $about])+ pub $section: $name, )*
        }

        /// The sections in their order, with what they are about.
        pub const SECTIONS: &[(&str, &str)] = &[ $( (stringify!($section), concat!($($about),+)), )* ];

        /// Every key, in the order of the documents.
        pub const KEYS: &[$crate::config::setting::Key] = &[ $( $( $crate::config::setting::Key {
            section: stringify!($section),
            field: stringify!($field),
            suffix: <$type as $crate::config::setting::Setting>::SUFFIX,
            kind: <$type as $crate::config::setting::Setting>::KIND,
            doc: concat!($($doc),+),
            secret: <$type as $crate::config::setting::Setting>::SECRET,
            open: <$type as $crate::config::setting::Setting>::OPEN,
            set: |config, sub, raw| $crate::config::setting::Setting::set(&mut config.$section.$field, sub, raw),
            show: |config| $crate::config::setting::Setting::show(&config.$section.$field),
        }, )* )* ];
    };
}
pub(crate) use settings;

/// Declares a closed list of words.
macro_rules! choice {
    ($(#[doc = $about:literal])+ $name:ident { $( $(#[doc = $doc:literal])+ $variant:ident = $word:literal, )+ }) => {
        $(#[doc = $about])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name {
            $( $(#[doc = $doc])+ $variant, )+
        }

        impl $name {
            /// The word in the configuration.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $( Self::$variant => $word, )+ }
            }
        }

        impl $crate::config::setting::Setting for $name {
            const KIND: &'static str = $crate::config::setting::one_of!($($word),+);

            fn read(raw: &$crate::config::setting::Raw) -> Result<Self, String> {
                match $crate::config::setting::word(raw).as_deref() {
                    $( Some($word) => Ok(Self::$variant), )+
                    _ => Err(format!("must be {}", Self::KIND)),
                }
            }

            fn show(&self) -> Option<String> {
                Some($crate::config::setting::quote(self.as_str()))
            }
        }
    };
}
pub(crate) use choice;

/// `"a" or "b"`, as a literal.
macro_rules! one_of {
    ($first:literal $(, $word:literal)*) => { concat!("`", $first, "`" $(, " or `", $word, "`")*) };
}
pub(crate) use one_of;

impl Setting for String {
    const KIND: &'static str = "text";

    fn read(raw: &Raw) -> Result<Self, String> {
        word(raw).filter(|text| !text.trim().is_empty()).ok_or_else(|| "must be text that is not empty".to_owned())
    }

    fn show(&self) -> Option<String> {
        (!self.is_empty()).then(|| quote(self))
    }
}

impl Setting for usize {
    const KIND: &'static str = "whole number";

    fn read(raw: &Raw) -> Result<Self, String> {
        whole(raw)?.try_into().map_err(|_| "is too large".to_owned())
    }

    fn show(&self) -> Option<String> {
        Some(grouped(*self as u128))
    }
}

impl Setting for u32 {
    const KIND: &'static str = "whole number";

    fn read(raw: &Raw) -> Result<Self, String> {
        whole(raw)?.try_into().map_err(|_| "is too large".to_owned())
    }

    fn show(&self) -> Option<String> {
        Some(grouped(u128::from(*self)))
    }
}

impl Setting for Duration {
    const SUFFIX: &'static str = "_ms";
    const KIND: &'static str = "milliseconds";

    /// Zero is refused everywhere: PostgreSQL and librdkafka read it as "no limit".
    fn read(raw: &Raw) -> Result<Self, String> {
        match whole(raw) {
            Ok(ms) if (1..=LONGEST_MS).contains(&ms) => Ok(Self::from_millis(ms)),
            _ => Err(format!("must be a whole number of milliseconds from 1 to {LONGEST_MS}")),
        }
    }

    fn show(&self) -> Option<String> {
        Some(grouped(self.as_millis()))
    }
}

/// A part of a whole, in millionths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ratio(u32);

impl Ratio {
    /// The whole.
    pub const ALL: Self = Self(1_000_000);

    /// From 0 to 1.
    #[must_use]
    pub fn as_f64(self) -> f64 {
        f64::from(self.0) / f64::from(Self::ALL.0)
    }
}

impl Setting for Ratio {
    const KIND: &'static str = "number from 0 to 1";

    fn read(raw: &Raw) -> Result<Self, String> {
        let found = match raw {
            Raw::Toml(value) => {
                value.as_float().or_else(|| value.as_integer().and_then(|number| i32::try_from(number).ok()).map(f64::from))
            }
            Raw::Word(word) | Raw::Kept(_, word) => word.parse().ok(),
        };
        let ratio = found.filter(|ratio| (0.0..=1.0).contains(ratio));
        let millionths = ratio.map(|ratio| Self((ratio * f64::from(Self::ALL.0)).round() as u32));
        millionths.ok_or_else(|| format!("must be a {}", Self::KIND))
    }

    fn show(&self) -> Option<String> {
        Some(format!("{:?}", self.as_f64()))
    }
}

/// A time that is not always said.
impl Setting for Option<Duration> {
    const SUFFIX: &'static str = Duration::SUFFIX;
    const KIND: &'static str = Duration::KIND;

    fn read(raw: &Raw) -> Result<Self, String> {
        Duration::read(raw).map(Some)
    }

    fn show(&self) -> Option<String> {
        self.and_then(|duration| duration.show())
    }
}

impl Setting for bool {
    const KIND: &'static str = "`true` or `false`";

    fn read(raw: &Raw) -> Result<Self, String> {
        let found = match raw {
            Raw::Toml(value) => value.as_bool(),
            Raw::Word(word) | Raw::Kept(_, word) => word.parse().ok(),
        };
        found.ok_or_else(|| format!("must be {}", Self::KIND))
    }

    fn show(&self) -> Option<String> {
        Some(self.to_string())
    }
}

impl Setting for SocketAddr {
    const KIND: &'static str = "address and port";

    fn read(raw: &Raw) -> Result<Self, String> {
        word(raw)
            .and_then(|text| text.parse().ok())
            .ok_or_else(|| "must be an IP address and a port, such as \"127.0.0.1:9464\" or \"[::]:9464\"".to_owned())
    }

    fn show(&self) -> Option<String> {
        Some(quote(&self.to_string()))
    }
}

impl Setting for Option<Url> {
    const KIND: &'static str = "URL";

    /// Credentials in it would be printed with it.
    fn read(raw: &Raw) -> Result<Self, String> {
        let url = word(raw).and_then(|text| text.parse::<Url>().ok());
        let plain = |url: &Url| {
            matches!(url.scheme(), "http" | "https") && url.has_host() && url.username().is_empty() && url.password().is_none()
        };
        url.filter(plain).map(Some).ok_or_else(|| "must be an http:// or https:// URL without user and password".to_owned())
    }

    fn show(&self) -> Option<String> {
        self.as_ref().map(|url| quote(url.as_str()))
    }
}

/// The name of a file.
impl Setting for Option<PathBuf> {
    const KIND: &'static str = "file";

    fn read(raw: &Raw) -> Result<Self, String> {
        String::read(raw).map(|name| Some(name.into()))
    }

    fn show(&self) -> Option<String> {
        self.as_ref().map(|path| quote(&path.to_string_lossy()))
    }
}

/// A secret alone is a database URL: it is shown with what tells databases apart.
impl Setting for Secret {
    const KIND: &'static str = "secret URL";
    const SECRET: bool = true;

    fn read(raw: &Raw) -> Result<Self, String> {
        String::read(raw).map(|text| Self::new(text).kept_in(raw.file()))
    }

    fn show(&self) -> Option<String> {
        (!self.is_empty()).then(|| quote(&self.redacted_url()))
    }
}

impl Setting for Option<Secret> {
    const KIND: &'static str = "secret";
    const SECRET: bool = true;

    fn read(raw: &Raw) -> Result<Self, String> {
        Secret::read(raw).map(Some)
    }

    fn show(&self) -> Option<String> {
        self.as_ref().map(|_| quote(super::secret::REDACTED))
    }
}

impl Setting for KafkaOptions {
    const KIND: &'static str = "table";
    const OPEN: bool = true;

    fn read(_: &Raw) -> Result<Self, String> {
        Err("must be a table of librdkafka options".to_owned())
    }

    fn set(&mut self, sub: &str, raw: &Raw) -> Result<(), String> {
        let value = match raw {
            Raw::Word(word) | Raw::Kept(_, word) | Raw::Toml(toml::Value::String(word)) => word.clone(),
            Raw::Toml(value @ (toml::Value::Integer(_) | toml::Value::Float(_) | toml::Value::Boolean(_))) => value.to_string(),
            Raw::Toml(_) => return Err("must be text, a number, true or false".to_owned()),
        };
        self.insert(sub, &value)
    }

    fn show(&self) -> Option<String> {
        let lines: Vec<String> = self.shown().map(|(key, value)| format!("{} = {}", quote(&key), quote(value))).collect();
        (!lines.is_empty()).then(|| lines.join("\n"))
    }
}

/// A text, from either place.
pub fn word(raw: &Raw) -> Option<String> {
    match raw {
        Raw::Toml(value) => value.as_str().map(str::to_owned),
        Raw::Word(word) | Raw::Kept(_, word) => Some(word.clone()),
    }
}

/// A whole number, from either place.
fn whole(raw: &Raw) -> Result<u64, String> {
    let found = match raw {
        Raw::Toml(value) => value.as_integer().and_then(|number| u64::try_from(number).ok()),
        Raw::Word(word) | Raw::Kept(_, word) => word.replace('_', "").parse().ok(),
    };
    found.ok_or_else(|| "must be a whole number, zero or more".to_owned())
}

/// A text as TOML.
pub fn quote(text: &str) -> String {
    toml::Value::from(text).to_string()
}

/// `16_777_216`: TOML's own way to write large numbers.
fn grouped(number: u128) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push('_');
        }
        text.push(digit);
    }
    text
}

/// A hundred years: what is longer is a mistake in the unit.
const LONGEST_MS: u64 = 100 * 366 * 86_400_000;
