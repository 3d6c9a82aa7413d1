//! The bearer token of SASL OAUTHBEARER, as it stands in its file.
//!
//! Invariant: the token is in no message, not even in pieces.

use std::fs;

use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use serde::Deserialize;

/// A JSON Web Token and what it says of itself. Nobody here verifies it: the broker does.
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    /// As it is sent.
    pub text: String,
    /// Whom it speaks of; empty when it does not say.
    pub subject: String,
    /// From when on it is worth nothing, in milliseconds since 1970.
    pub expires_ms: i64,
}

#[derive(Deserialize)]
struct Claims {
    #[serde(default)]
    sub: String,
    exp: f64,
}

impl Token {
    /// Reads the file.
    ///
    /// # Errors
    /// In words: it is not there, or no token.
    pub fn read(file: &str) -> Result<Self, String> {
        let text = fs::read_to_string(file).map_err(|error| format!("{file} cannot be read: {error}"))?;
        Self::parse(text.trim()).ok_or_else(|| format!("{file} must hold a JSON Web Token that says when it expires (`exp`)"))
    }

    fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split('.');
        let (_, claims, _, None) = (parts.next()?, parts.next()?, parts.next()?, parts.next()) else { return None };
        let Claims { sub, exp } = serde_json::from_slice(&BASE64_URL_SAFE_NO_PAD.decode(claims).ok()?).ok()?;
        Some(Self { text: text.to_owned(), subject: sub, expires_ms: (exp * 1_000.0) as i64 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_says_whom_it_speaks_of_and_when_it_expires() {
        let part = |text: &str| BASE64_URL_SAFE_NO_PAD.encode(text);
        let token = format!("{}.{}.", part(r#"{"alg":"none"}"#), part(r#"{"sub":"billing","exp":1750000000.5,"more":1}"#));
        let read = Token::parse(&token).expect("a token");
        assert_eq!((read.text.as_str(), read.subject.as_str(), read.expires_ms), (token.as_str(), "billing", 1_750_000_000_500));
        for none in ["", "a.b", "a.b.c", "a.b.c.d", &format!("a.{}.c", part(r#"{"sub":"billing"}"#))] {
            assert!(Token::parse(none).is_none(), "{none}");
        }
    }

    #[test]
    fn a_file_that_holds_something_else_is_named_and_not_quoted() {
        assert!(Token::read("/nowhere/token").is_err_and(|why| why.starts_with("/nowhere/token cannot be read")));
        let file = std::env::temp_dir().join(format!("onceward-token-{}", uuid::Uuid::now_v7()));
        fs::write(&file, "hunter2").expect("a file");
        let why = Token::read(file.to_str().expect("text")).err().expect("no token");
        fs::remove_file(&file).expect("it goes");
        assert!(why.contains("must hold a JSON Web Token") && !why.contains("hunter2"), "{why}");
    }
}
