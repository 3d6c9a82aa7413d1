//! What the provider and the engine of this machine are asked.
//!
//! In: the configuration. Out: answers. It owns two short connections. No charge is made: the provider is asked for its base address only.
//!
//! Invariant: an engine counts only if it says itself that it serves this group and topic.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use url::{Host, Url};

use super::{Answers, Condition};
use crate::config::{Config, ProviderKind};
use crate::provider::Client;
use crate::span;

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

/// Nobody measures the whole. But if one batch in 500 is slower than a bound in one of five stages, then five in 500 are slower than the
/// sum of the bounds at most, whichever they are: 99 of 100 need no longer. (The sum of what 99 of 100 need in each stage tells nothing:
/// the slow ones may be others in each.)
fn batch_time(metrics: &str, drain: Duration, answers: &mut Answers) {
    let condition = Condition::BatchTime;
    let batches = samples(metrics, "commit").last().map_or(0, |(_, count)| *count);
    if batches < ENOUGH_BATCHES {
        return answers.does_not_apply(condition, format_args!("{batches} batches so far: too few to tell"));
    }
    let slower = batches / (100 * STAGES.len() as u64);
    let longest = STAGES.iter().map(|stage| bound(&samples(metrics, stage), slower)).sum::<f64>();
    // Beyond the last bound nothing is known.
    let longest = Duration::try_from_secs_f64(longest).ok();
    let at_most = longest.map_or_else(|| "more than 30 s".to_owned(), |longest| format!("{} at most", span::in_words(longest)));
    let found = format!("99 of 100 batches need {at_most}, pipeline.drain_ms is {}", span::in_words(drain));
    if longest.is_some_and(|longest| longest < drain) {
        answers.holds(condition, found);
    } else {
        let todo =
            "set pipeline.drain_ms higher or pipeline.batch_max lower, and look at onceward_stage_seconds for the slow stage";
        answers.fails(condition, found, todo);
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

/// All but so many batches were within it.
fn bound(samples: &[(f64, u64)], but: u64) -> f64 {
    let all = samples.last().map_or(0, |(_, count)| *count);
    samples.iter().find(|(_, count)| count + but >= all).map_or(0.0, |(bound, _)| *bound)
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;

    /// Of 1000 batches: how many need 10 s in each stage; all others need 0.1 s there.
    fn metrics(slow: [u64; 5]) -> String {
        let stage = |(stage, slow): (&str, u64)| {
            format!(
                "onceward_stage_seconds_bucket{{stage=\"{stage}\",le=\"0.1\"}} {}\n\
                 onceward_stage_seconds_bucket{{stage=\"{stage}\",le=\"10\"}} 1000\n\
                 onceward_stage_seconds_bucket{{stage=\"{stage}\",le=\"+Inf\"}} 1000\n",
                1_000 - slow
            )
        };
        STAGES.into_iter().zip(slow).map(stage).collect()
    }

    fn verdict(metrics: &str, drain_ms: u64) -> Verdict {
        let mut answers = Answers::default();
        batch_time(metrics, Duration::from_millis(drain_ms), &mut answers);
        answers.0[&Condition::BatchTime].verdict
    }

    #[test]
    fn a_batch_that_is_slow_in_any_stage_counts_as_a_slow_one() {
        let slow_to_apply = |batches| metrics([0, 0, batches, 0, 0]);
        assert_eq!(verdict(&slow_to_apply(2), 5_000), Verdict::Ok);
        assert_eq!(verdict(&slow_to_apply(11), 5_000), Verdict::Failed);
        assert_eq!(verdict(&slow_to_apply(11), 15_000), Verdict::Ok);
        assert_eq!(verdict(&slow_to_apply(0), 400), Verdict::Failed, "five stages of 0.1 s each");
        // In each stage 99 of 100 are fast, and of all batches five in 100 may be slow.
        assert_eq!(verdict(&metrics([10; 5]), 5_000), Verdict::Failed);
        assert_eq!(verdict(&metrics([2; 5]), 5_000), Verdict::Ok, "ten slow ones are one in 100");
        assert_eq!(verdict(&metrics([0, 0, 1_000, 0, 0]).replace("le=\"10\"} 1000", "le=\"10\"} 0"), 60_000), Verdict::Failed);
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
