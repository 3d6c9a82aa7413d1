//! Who may see records and ask for actions: pure decisions over a request's head.
//!
//! In: headers. Out: yes, or a status and a sentence. It owns a digest of the token and not the token, and makes a new one when the file
//! that holds the token has changed.
//!
//! Invariant: without the token nobody may, and how long a refusal takes says nothing about it. What a browser would send by itself
//! (cookies, a form, another site's script) is never enough.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use actix_web::http::StatusCode;
use actix_web::http::header::{self, HeaderMap};
use actix_web::http::uri::Authority;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::config::{Secret, admin_token_fault};
use crate::rotating::Rotating;

/// Between two looks at the file of the token.
const LOOK: Duration = Duration::from_secs(2);

/// Whom to believe.
#[derive(Clone, Debug)]
pub struct Access(Option<Arc<Rotating<[u8; 32], String>>>);

/// Why not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// There is no token.
    #[error("off: set admin.token or admin.token_file, and send it as `Authorization: Bearer …`")]
    Off,
    /// Another site's page asks.
    #[error("a page of another origin may not ask")]
    OtherOrigin,
    /// It could be a form of another site.
    #[error("the body must be JSON: send `Content-Type: application/json`")]
    NotJson,
    /// The token is not there.
    #[error("the token is missing: send `Authorization: Bearer …` with what admin.token says")]
    NoToken,
    /// It is another one.
    #[error("this is not the token that admin.token says")]
    WrongToken,
}

impl Access {
    /// By this token.
    ///
    /// # Errors
    /// Its file cannot be used.
    pub fn new(token: Option<&Secret>) -> Result<Self, String> {
        let rotating = |token: Secret| {
            Rotating::new("admin.token", LOOK, move |files| {
                let token = token.now(files)?;
                admin_token_fault(&token).map_or_else(|| Ok(digest(&token)), |fault| Err(format!("it {fault}")))
            })
        };
        Ok(Self(token.cloned().map(rotating).transpose()?.map(Arc::new)))
    }

    /// Whether anybody may.
    pub const fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Whether this request may see records.
    pub fn may_see(&self, headers: &HeaderMap) -> Result<(), Refusal> {
        let token = self.0.as_ref().ok_or(Refusal::Off)?.get();
        let given = text(headers, header::AUTHORIZATION).and_then(|text| text.split_once(' '));
        let (_, given) = given.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer")).ok_or(Refusal::NoToken)?;
        // Digests have one length, so that not even that of the token shows in the time.
        if bool::from(digest(given.trim()).ct_eq(&token)) { Ok(()) } else { Err(Refusal::WrongToken) }
    }

    /// Whether this request may ask for an action.
    pub fn may_act(&self, headers: &HeaderMap) -> Result<(), Refusal> {
        if !self.is_on() {
            return Err(Refusal::Off);
        }
        if headers.contains_key(header::ORIGIN) && !is_same_origin(headers) {
            return Err(Refusal::OtherOrigin);
        }
        let kind = text(headers, header::CONTENT_TYPE).and_then(|kind| kind.split(';').next()).unwrap_or_default();
        if !kind.trim().eq_ignore_ascii_case("application/json") {
            return Err(Refusal::NotJson);
        }
        self.may_see(headers)
    }
}

/// A browser names the origin of the page, and the host that it asks.
fn is_same_origin(headers: &HeaderMap) -> bool {
    let origin = text(headers, header::ORIGIN).and_then(|origin| origin.split_once("://"));
    let host = text(headers, header::HOST);
    origin.is_some_and(|(scheme, origin)| matches!(scheme, "http" | "https") && host == Some(origin))
}

/// Whether it is a name of this machine for itself under which we are asked: what a page that makes its own name lead here (DNS rebinding)
/// cannot have its browser say.
pub fn is_named_locally(headers: &HeaderMap) -> bool {
    let Some(host) = headers.get(header::HOST) else { return true };
    let Ok(authority) = host.to_str().unwrap_or_default().parse::<Authority>() else { return false };
    let host = authority.host();
    let is_address = host.trim_matches(['[', ']']).parse::<IpAddr>().is_ok();
    is_address || host.eq_ignore_ascii_case("localhost")
}

fn text(headers: &HeaderMap, name: header::HeaderName) -> Option<&str> {
    headers.get(name)?.to_str().ok()
}

fn digest(token: &str) -> [u8; 32] {
    Sha256::digest(token.as_bytes()).into()
}

impl Refusal {
    /// What HTTP calls it.
    pub const fn status(self) -> StatusCode {
        match self {
            Self::Off | Self::OtherOrigin => StatusCode::FORBIDDEN,
            Self::NotJson => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::NoToken | Self::WrongToken => StatusCode::UNAUTHORIZED,
        }
    }
}

#[cfg(test)]
mod tests {
    use actix_web::http::header::HeaderValue;

    use super::*;

    const GOOD: &[(&str, &str)] = &[
        ("host", "h:9464"),
        ("origin", "http://h:9464"),
        ("content-type", "application/json"),
        ("authorization", "Bearer the-right-token-17"),
    ];

    fn act(access: &Access, changes: &[(&'static str, Option<&'static str>)]) -> Result<(), Refusal> {
        let mut headers = HeaderMap::new();
        for (name, value) in GOOD {
            headers.insert(name.parse().expect("a name"), HeaderValue::from_static(value));
        }
        for (name, value) in changes {
            headers.remove(*name);
            if let Some(value) = value {
                headers.insert(name.parse().expect("a name"), HeaderValue::from_static(value));
            }
        }
        access.may_act(&headers)
    }

    #[test]
    fn only_the_token_in_json_from_no_other_origin_may_act() {
        let access = Access::new(Some(&Secret::new("the-right-token-17".to_owned()))).expect("a token");
        assert_eq!(act(&access, &[]), Ok(()));
        assert_eq!(act(&access, &[("origin", None)]), Ok(()), "no browser: curl");
        assert_eq!(act(&access, &[("content-type", Some("application/json; charset=utf-8"))]), Ok(()));
        for origin in ["http://evil", "http://h:9464.evil", "null", "http://h", "file://h:9464", "h:9464"] {
            assert_eq!(act(&access, &[("origin", Some(origin))]), Err(Refusal::OtherOrigin), "{origin}");
        }
        for kind in [None, Some("text/plain"), Some("application/x-www-form-urlencoded"), Some("application/jsonp")] {
            assert_eq!(act(&access, &[("content-type", kind)]), Err(Refusal::NotJson), "{kind:?}");
        }
        for token in [None, Some("the-right-token-17"), Some("Basic the-right-token-17"), Some("Bearer")] {
            assert_eq!(act(&access, &[("authorization", token)]), Err(Refusal::NoToken), "{token:?}");
        }
        for token in ["Bearer wrong", "Bearer the-right-token-178", "Bearer the-right-token-1", "Bearer "] {
            assert_eq!(act(&access, &[("authorization", Some(token))]), Err(Refusal::WrongToken), "{token:?}");
        }
    }

    #[test]
    fn only_names_of_this_machine_for_itself_are_local() {
        let named = |host: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::HOST, HeaderValue::from_str(host).expect("a value"));
            is_named_locally(&headers)
        };
        for host in ["127.0.0.1:9464", "127.0.0.1", "localhost:9464", "LOCALHOST", "[::1]:9464", "10.0.0.7"] {
            assert!(named(host), "{host}");
        }
        for host in ["evil.example:9464", "localhost.evil.example", "127.0.0.1.evil.example", "127.0.0.1@evil.example", "", "a b"] {
            assert!(!named(host), "{host}");
        }
        assert!(is_named_locally(&HeaderMap::new()), "HTTP/1.0: no browser");
    }

    #[test]
    fn without_a_token_nobody_may_and_nothing_tells_the_token() {
        let off = Access::new(None).expect("off");
        assert_eq!(act(&off, &[]), Err(Refusal::Off));
        assert_eq!(off.may_see(&HeaderMap::new()), Err(Refusal::Off));
        assert!(Refusal::Off.to_string().contains("admin.token"));
        let on = format!("{:?}", Access::new(Some(&Secret::new("the-right-token-17".to_owned()))).expect("a token"));
        assert!(
            on.contains("admin.token") && !on.contains("right") && !on.contains(&format!("{:?}", digest("the-right-token-17"))),
            "{on}"
        );
    }
}
