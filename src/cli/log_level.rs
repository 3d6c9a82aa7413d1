//! `onceward log-level`: how much a running process says.
//!
//! In: a level with its reason, or a question. Out: what is in use, or why it cannot be changed. It owns nothing; the process that is asked
//! does it, and says in its log who has asked.

use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::Args;
use reqwest::Client;
use reqwest::header::CONTENT_TYPE;
use serde_json::{Value, json};
use url::Url;

use crate::cli::text::actor;
use crate::config::{Config, Secret};
use crate::rotating::Files;
use crate::text::printable;
use crate::tls::Tls;

/// The words.
#[derive(Debug, Args)]
pub struct LogLevel {
    /// What is to be said until a restart or SIGHUP: off, error, warn, info, debug, trace, or directives such as
    /// info,onceward::pipeline=debug. Without it, tells what is in use and who wanted it.
    #[arg(requires = "reason")]
    level: Option<String>,
    /// Why; it stands in the log of that process.
    #[arg(long, requires = "level")]
    reason: Option<String>,
    /// Who wants it; without it, the user of this shell.
    #[arg(long, requires = "level")]
    actor: Option<String>,
    /// Another process than the one at admin.listen, by the address of its admin port.
    #[arg(long, value_name = "HOST:PORT")]
    at: Option<String>,
}

/// The longest wait for an answer.
const PATIENCE: Duration = Duration::from_secs(10);

impl LogLevel {
    /// Does it. The text goes to standard output.
    pub async fn run(&self, config: &Config, environment: &[(OsString, OsString)]) -> anyhow::Result<String> {
        let place = self.at.clone().unwrap_or_else(|| reachable(config.admin.listen).to_string());
        let url = Url::parse(&format!("http://{place}/api/log")).with_context(|| format!("--at {place}"))?;
        let client =
            Tls::default().of_http(Client::builder().timeout(PATIENCE).no_proxy(), &url, &mut Files::default())?.build()?;
        let request = match &self.level {
            Some(level) => {
                let body = json!({ "level": level, "actor": actor(self.actor.as_deref(), environment), "reason": self.reason });
                client.post(url).header(CONTENT_TYPE, "application/json").body(body.to_string())
            }
            None => client.get(url),
        };
        let token = config.admin.token.as_ref().map(Secret::expose).unwrap_or_default();
        let asked = request.bearer_auth(token).send().await;
        let answer =
            asked.with_context(|| format!("nobody answers at {place}: is `onceward run` there? --at names another address"))?;
        let (status, text) = (answer.status(), answer.text().await?);
        let told: Value = serde_json::from_str(&text).unwrap_or_default();
        match told["level"].as_str() {
            Some(level) if status.is_success() => Ok(printable(&words(level, &told)) + "\n"),
            _ => bail!("{place} says {status}: {}", printable(told["error"].as_str().unwrap_or("it is no admin port of onceward"))),
        }
    }
}

/// Where a listener on every address is found from here.
fn reachable(listen: SocketAddr) -> SocketAddr {
    let ip = match listen.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, listen.port())
}

fn words(level: &str, told: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let was = told["was"].as_str().map(|was| format!("; it was {was}")).unwrap_or_default();
    let by = &told["changed"];
    let by = if by.is_object() {
        format!(", by {} since {}: {}", text(&by["actor"]), text(&by["at"]), text(&by["reason"]))
    } else {
        String::new()
    };
    format!("the log level is {level}{was}{by}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_listens_everywhere_is_asked_on_this_machine() {
        let at = |listen: &str| reachable(listen.parse().expect("an address")).to_string();
        assert_eq!([at("0.0.0.0:9464"), at("[::]:1"), at("10.0.0.7:2")], ["127.0.0.1:9464", "[::1]:1", "10.0.0.7:2"]);
    }

    #[test]
    fn what_is_in_use_is_told_with_who_wanted_it() {
        assert_eq!(words("info", &json!({ "level": "info", "changed": null })), "the log level is info");
        let changed = json!({ "actor": "ann", "at": "now", "reason": "ticket 17" });
        assert_eq!(
            words("debug", &json!({ "was": "info", "changed": changed })),
            "the log level is debug; it was info, by ann since now: ticket 17"
        );
    }
}
