//! What the provider and the engine of this machine are asked.
//!
//! In: the configuration. Out: answers. It owns two short connections. No charge is made: the provider is asked for its base address only.
//!
//! Invariant: an engine counts only if it says itself that it serves this group and topic.

use std::fmt::Write as _;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use url::{Host, Url};

use super::{Answers, Condition, span};
use crate::config::{Config, ProviderKind};
use crate::provider::Client;

/// For both questions to an engine: it is on this machine, or it is not there.
const ADMIN: Duration = Duration::from_secs(2);
/// With fewer batches a share of 99 in 100 says nothing.
const ENOUGH_BATCHES: u64 = 100;
/// A batch's time, but for the wait before it.
const STAGES: [&str; 5] = ["decode", "claim", "apply", "settle", "commit"];

/// An engine of this configuration that runs.
#[derive(Debug)]
pub(super) struct Engine {
    metrics: String,
}

impl Engine {
    /// `None` when nobody answers at `admin.listen`, or somebody else does.
    pub(super) async fn ask(config: &Config) -> Option<Self> {
        let asked = async {
            let status: serde_json::Value = serde_json::from_str(&get(config, "/status").await?).ok()?;
            let is_ours = status["group"] == config.kafka.group && status["topic"] == config.kafka.topic;
            let metrics = if is_ours { get(config, "/metrics").await? } else { return None };
            Some(Self { metrics })
        };
        tokio::time::timeout(ADMIN, asked).await.ok().flatten()
    }
}

/// HTTP/1.0, so that the answer is one piece and ends with the connection.
async fn get(config: &Config, path: &str) -> Option<String> {
    let mut stream = TcpStream::connect(config.admin.listen).await.ok()?;
    stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).await.ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.ok()?;
    Some(answer.split_once("\r\n\r\n")?.1.to_owned())
}

/// The provider, and how long batches take.
pub(super) async fn judge(config: &Config, engine: Option<Engine>, answers: &mut Answers) {
    provider(config, answers).await;
    match engine {
        Some(engine) => batch_time(&engine.metrics, config.pipeline.drain, answers),
        None => {
            answers.does_not_apply(Condition::BatchTime, format_args!("no engine of this group answers at {}", config.admin.listen))
        }
    }
}

async fn provider(config: &Config, answers: &mut Answers) {
    let settings = match (config.provider.kind, config.provider.settings()) {
        (ProviderKind::Http, Some(settings)) => settings,
        _ => {
            answers.does_not_apply(Condition::Provider, "none: nobody is called");
            return answers.does_not_apply(Condition::ProviderTls, "none");
        }
    };
    let reached = match Client::new(&settings) {
        Ok(client) => client.reach().await,
        Err(error) => Err(error.to_string()),
    };
    match reached {
        Ok(status) => answers.holds(Condition::Provider, format_args!("{} answers ({status})", settings.url)),
        Err(why) => answers.fails(Condition::Provider, format_args!("{}: {why}", settings.url), "see provider.url"),
    }
    let encrypted = settings.url.starts_with("https:");
    if encrypted || settings.url.parse().is_ok_and(|url| is_of_this_machine(&url)) {
        answers.holds(Condition::ProviderTls, if encrypted { "https" } else { "of this machine" });
    } else {
        answers.fails(Condition::ProviderTls, format_args!("{} is in plain text", settings.url), "make provider.url https");
    }
}

fn is_of_this_machine(url: &Url) -> bool {
    match url.host() {
        Some(Host::Ipv4(address)) => address.is_loopback(),
        Some(Host::Ipv6(address)) => address.is_loopback(),
        Some(Host::Domain(name)) => name == "localhost",
        None => false,
    }
}

/// The sum of what 99 of 100 batches need at most in each stage: never less than what 99 of 100 need in all.
fn batch_time(metrics: &str, drain: Duration, answers: &mut Answers) {
    let condition = Condition::BatchTime;
    let batches = samples(metrics, "commit").last().map_or(0, |(_, count)| *count);
    if batches < ENOUGH_BATCHES {
        return answers.does_not_apply(condition, format_args!("{batches} batches so far: too few to tell"));
    }
    let longest = STAGES.iter().map(|stage| p99(&samples(metrics, stage))).sum::<f64>();
    if longest.is_finite() && Duration::from_secs_f64(longest) < drain {
        let longest = span(Duration::from_secs_f64(longest));
        answers.holds(condition, format_args!("{longest} at most, pipeline.drain_ms is {}", span(drain)));
    } else {
        let mut found = "99 of 100 batches take up to ".to_owned();
        // Writing to a String cannot fail.
        let _ = if longest.is_finite() { write!(found, "{longest:.1} s") } else { write!(found, "more than 30 s") };
        let todo =
            "set pipeline.drain_ms higher or pipeline.batch_max lower, and look at onceward_stage_seconds for the slow stage";
        answers.fails(condition, format_args!("{found}, pipeline.drain_ms is {}", span(drain)), todo);
    }
}

/// Upper bounds in seconds, and how many batches were within them.
fn samples(metrics: &str, stage: &str) -> Vec<(f64, u64)> {
    let mark = format!("stage=\"{stage}\"");
    let sample = |line: &str| {
        let (series, count) = line.strip_prefix("onceward_stage_seconds_bucket{")?.rsplit_once("} ")?;
        let bound = series.split_once("le=\"")?.1.split('"').next()?;
        let bound = if bound == "+Inf" { f64::INFINITY } else { bound.parse().ok()? };
        series.contains(&mark).then_some((bound, count.parse().ok()?))
    };
    metrics.lines().filter_map(sample).collect()
}

fn p99(samples: &[(f64, u64)]) -> f64 {
    let all = samples.last().map_or(0, |(_, count)| *count);
    let enough = (all * 99).div_ceil(100);
    samples.iter().find(|(_, count)| *count >= enough).map_or(0.0, |(bound, _)| *bound)
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;

    fn metrics(slow: u64) -> String {
        let stage = |stage: &str| {
            let slow = if stage == "apply" { slow } else { 0 };
            format!(
                "onceward_stage_seconds_bucket{{stage=\"{stage}\",le=\"0.1\"}} {}\n\
                 onceward_stage_seconds_bucket{{stage=\"{stage}\",le=\"10\"}} 1000\n\
                 onceward_stage_seconds_bucket{{stage=\"{stage}\",le=\"+Inf\"}} 1000\n",
                1_000 - slow
            )
        };
        STAGES.map(stage).concat()
    }

    fn verdict(metrics: &str, drain_ms: u64) -> Verdict {
        let mut answers = Answers::default();
        batch_time(metrics, Duration::from_millis(drain_ms), &mut answers);
        answers.0[&Condition::BatchTime].verdict
    }

    #[test]
    fn the_slowest_of_a_hundred_batches_may_be_slower_than_a_drain_and_no_more() {
        assert_eq!(verdict(&metrics(10), 5_000), Verdict::Ok);
        assert_eq!(verdict(&metrics(11), 5_000), Verdict::Failed);
        assert_eq!(verdict(&metrics(11), 15_000), Verdict::Ok);
        assert_eq!(verdict(&metrics(0), 400), Verdict::Failed, "five stages of 0.1 s each");
        assert_eq!(verdict("", 5_000), Verdict::DoesNotApply);
    }

    #[test]
    fn an_address_of_this_machine_needs_no_encryption() {
        let of_this_machine = |url: &str| is_of_this_machine(&url.parse().unwrap());
        assert!(
            of_this_machine("http://127.0.0.1:8080") && of_this_machine("http://[::1]/x") && of_this_machine("http://localhost")
        );
        assert!(!of_this_machine("http://10.0.0.1") && !of_this_machine("http://localhost.example.com"));
    }
}
