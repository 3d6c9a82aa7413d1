//! How long this group needs ids remembered, and up to when its partitions are settled.
//!
//! In: the configuration, the topic's settings, the log's ends. Out: notes on the rows of the partitions that this process owns. It owns
//! nothing. If it dies, the notes grow old, and less is forgotten.
//!
//! Invariant: a partition is noted as settled up to a moment only if the end of its log was asked for after that moment.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use tracing::warn;

use super::Once;
use crate::config::{Config, ProviderKind};
use crate::handler::Handler;
use crate::pipeline::broker;
use crate::pipeline::client::Client;
use crate::pipeline::dedup::Engine;
use crate::pipeline::settings::{Admin, Settings, value};
use crate::record::Epoch;
use crate::span;
use crate::store::consumed_partitions::{self, Owned};
use crate::store::{DbError, retention};

/// For how long a note is good.
const NOTED: Duration = Duration::from_secs(60);
/// How soon a partition is looked at again that did not stand at the end of its log.
const UNSETTLED: Duration = Duration::from_secs(5);
/// For how long an answer about the topic is good.
const ASKED: Duration = Duration::from_secs(600);

/// How long ids must be remembered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Need {
    /// `None`: for ever.
    pub time: Option<Duration>,
    /// What asks for it, for people.
    pub why: String,
}

/// What this process has to say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Own {
    /// Its group.
    pub group: String,
    /// Its topic.
    pub topic: String,
    /// The topic's partitions.
    pub partitions: i32,
    /// What the group needs.
    pub need: Need,
}

/// What was noted, and when.
#[derive(Debug, Default)]
pub struct Notes {
    own: Option<(Instant, Own)>,
    noted: BTreeMap<i32, Noted>,
    unanswered: Once,
}

/// Of one partition.
#[derive(Debug)]
struct Noted {
    epoch: Epoch,
    /// When the need was noted.
    need: Instant,
    /// When it was looked whether it stands at the end of its log, and whether it did.
    looked: Instant,
    settled: bool,
}

impl Own {
    /// Reads the configuration and asks the broker about the topic.
    ///
    /// # Errors
    /// In words: the broker does not answer or does not tell.
    pub async fn of(config: &Config) -> Result<Self, String> {
        let asked = config.clone();
        let asked = tokio::task::spawn_blocking(move || ask_topic(&asked)).await;
        let (partitions, need) = asked.map_err(|error| error.to_string())??;
        Ok(Self { group: config.kafka.group.clone(), topic: config.kafka.topic.clone(), partitions, need })
    }
}

impl Notes {
    /// What this process has to say, once it is known.
    pub fn own(&self) -> Option<&Own> {
        self.own.as_ref().map(|(_, own)| own)
    }

    /// Writes the notes that are due: those of a partition that was taken over, and of each once a minute.
    ///
    /// # Errors
    /// The database does not answer.
    pub async fn write<H: Handler>(&mut self, config: &Config, engine: &Engine<H>, client: &Client) -> Result<(), DbError> {
        if self.own.as_ref().is_none_or(|(asked, _)| asked.elapsed() >= ASKED) {
            match Own::of(config).await {
                Ok(own) => (self.own, self.unanswered) = (Some((Instant::now(), own)), Once::default()),
                Err(error) => self.unanswered.say(error, |error| {
                    warn!(error, "the topic's settings cannot be read: how long ids are needed stays as it was noted before");
                }),
            }
        }
        let owned = engine.status.snapshot().partitions;
        self.noted.retain(|partition, noted| owned.get(partition).is_some_and(|known| known.epoch == noted.epoch));
        if owned.keys().all(|partition| self.noted.get(partition).is_some_and(|noted| !noted.is_due())) {
            return Ok(());
        }
        let asked_ms = retention::earlier_time(&mut *engine.store.control.get().await?).await?;
        let ends = broker::ask(client, &engine.topic, broker::log_ends).await;
        // Looked at after the ends were: what has come since is no matter, the moment lies before.
        for (partition, known) in engine.status.snapshot().partitions {
            let noted = self.noted.get(&partition).filter(|noted| noted.epoch == known.epoch);
            if noted.is_some_and(|noted| !noted.is_due()) {
                continue;
            }
            let need = if noted.is_some_and(|noted| noted.need.elapsed() < NOTED) { None } else { self.own().map(|own| &own.need) };
            let end = ends.as_ref().ok().and_then(|ends| ends.get(&partition));
            let settled_ms = end.filter(|end| known.has_settled_up_to(**end)).map(|_| asked_ms);
            let owned = Owned { group: &engine.group, topic: &engine.topic, partition, epoch: known.epoch };
            match note(engine, owned, need, settled_ms).await {
                // The partition's batch is a long one: another time.
                Err(error) if error.is_contention() => continue,
                done => done?,
            }
            let now = Instant::now();
            let need = noted.filter(|_| need.is_none()).map_or(now, |noted| noted.need);
            self.noted.insert(partition, Noted { epoch: known.epoch, need, looked: now, settled: settled_ms.is_some() });
        }
        Ok(())
    }
}

impl Noted {
    fn is_due(&self) -> bool {
        self.need.elapsed() >= NOTED || self.looked.elapsed() >= if self.settled { NOTED } else { UNSETTLED }
    }
}

async fn note<H: Handler>(
    engine: &Engine<H>,
    owned: Owned<'_>,
    need: Option<&Need>,
    settled_ms: Option<i64>,
) -> Result<(), DbError> {
    let mut session = engine.store.control.get().await?;
    if let Some(Need { time, why }) = need {
        let needed_ms = time.map(|time| i64::try_from(time.as_millis()).unwrap_or(i64::MAX));
        consumed_partitions::remember(&mut session, owned, needed_ms, why).await?;
    }
    if let Some(settled_ms) = settled_ms {
        consumed_partitions::stands_at_the_end(&mut session, owned, settled_ms).await?;
    }
    Ok(())
}

/// The longest of what asks for ids: our retention, the provider's keys, and how old a record can be that is delivered again.
///
/// # Errors
/// In words: the topic's settings do not tell.
pub fn need(config: &Config, settings: impl FnOnce() -> Result<Settings, String>) -> Result<Need, String> {
    let redelivery = match config.retention.replay_horizon {
        // Whoever declares how far back anything is read knows more than the topic's settings.
        Some(declared) => known(declared, "retention.replay_horizon_ms"),
        None => redelivery(&config.kafka.topic, &settings()?)?,
    };
    Ok(longest(config, redelivery))
}

fn longest(config: &Config, redelivery: Need) -> Need {
    let retention = known(config.retention.retention, "retention.retention_ms");
    let key_life = known(config.provider.key_life, "provider.key_life_ms");
    let needs = [Some(retention), (config.provider.kind == ProviderKind::Http).then_some(key_life), Some(redelivery)];
    let longest = needs.into_iter().flatten().reduce(|a, b| match (a.time, b.time) {
        (Some(ours), Some(theirs)) if theirs > ours => b,
        (Some(_), None) => b,
        (None | Some(_), _) => a,
    });
    longest.expect("one at least")
}

fn known(time: Duration, why: &str) -> Need {
    Need { time: Some(time), why: format!("{} ({why})", span::in_words(time)) }
}

/// How many partitions the topic has, and how long its ids are needed. Blocks.
fn ask_topic(config: &Config) -> Result<(i32, Need), String> {
    let topic = &config.kafka.topic;
    let no_answer = |error: String| format!("topic {topic}: {error}");
    let admin = Admin::connect(&config.kafka).map_err(no_answer)?;
    let partitions = i32::try_from(admin.partitions.clone()?).map_err(|error| error.to_string())?;
    Ok((partitions, need(config, || admin.topic(topic).map_err(no_answer))?))
}

/// A record can be as old as its segment, which is deleted when its youngest record is old enough, and a moment later.
fn redelivery(topic: &str, settings: &Settings) -> Result<Need, String> {
    let number = |name: &str| -> Result<i64, String> {
        let value = value(settings, name)?;
        value.parse().map_err(|_| format!("topic {topic}: its {name} is {value:?}"))
    };
    let for_ever = |why: &str| Need {
        time: None,
        why: format!("topic {topic} keeps records for ever ({why}), and retention.replay_horizon_ms is not set"),
    };
    let policy = value(settings, "cleanup.policy")?;
    if !policy.split(',').any(|policy| policy.trim() == "delete") {
        return Ok(for_ever(&format!("cleanup.policy={policy}")));
    }
    let parts = ["retention.ms", "segment.ms", "file.delete.delay.ms"];
    let [kept, segment, delay] = parts.map(number);
    let (kept, segment, delay) = (kept?, segment?, delay?);
    let Ok(kept) = u64::try_from(kept) else { return Ok(for_ever("retention.ms=-1")) };
    let [segment, delay] = [segment, delay].map(|part| u64::try_from(part).unwrap_or_default());
    let sum = Duration::from_millis(kept.saturating_add(segment).saturating_add(delay));
    Ok(Need { time: Some(sum), why: format!("{} ({} of topic {topic})", span::in_words(sum), parts.join(" + ")) })
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(86_400);

    fn topic(settings: &[(&'static str, &'static str)]) -> Result<Need, String> {
        let defaults = [
            ("cleanup.policy", "delete"),
            ("retention.ms", "604800000"),
            ("segment.ms", "86400000"),
            ("file.delete.delay.ms", "60000"),
        ];
        let all = defaults.iter().chain(settings);
        redelivery("orders", &all.map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect())
    }

    #[test]
    fn kafka_redelivers_what_retention_segment_and_delay_leave() {
        assert_eq!(topic(&[]).unwrap().time, Some(8 * DAY + Duration::from_secs(60)));
        assert_eq!(topic(&[("cleanup.policy", "compact,delete")]).unwrap().time, Some(8 * DAY + Duration::from_secs(60)));
        for for_ever in [("retention.ms", "-1"), ("cleanup.policy", "compact")] {
            let need = topic(&[for_ever]).unwrap();
            assert_eq!(need.time, None);
            assert!(need.why.contains("retention.replay_horizon_ms"), "{}", need.why);
        }
        assert!(topic(&[("segment.ms", "a while")]).is_err());
        assert!(redelivery("orders", &Settings::new()).is_err(), "what is not told is not taken for nothing");
    }

    #[test]
    fn the_longest_of_retention_key_life_and_redelivery_counts() {
        let mut config = Config::default();
        let asks =
            |config: &Config, days: Option<u32>| longest(config, Need { time: days.map(|days| days * DAY), why: "kafka".into() });
        assert_eq!(asks(&config, Some(1)).why, "7 d (retention.retention_ms)");
        assert_eq!(asks(&config, Some(8)).why, "kafka");
        assert_eq!(asks(&config, None).time, None);
        config.provider.key_life = 30 * DAY;
        assert_eq!(asks(&config, Some(8)).why, "30 d (provider.key_life_ms)");
        assert_eq!(asks(&config, None).time, None);
        config.provider.kind = ProviderKind::None;
        assert_eq!(asks(&config, Some(8)).why, "kafka");
    }
}
