//! Judging the topic and the broker: pure comparisons of their settings with ours.
//!
//! In: what the broker said. Out: answers. It owns nothing.
//!
//! Invariant: a setting that the broker did not tell is not judged.

use std::cmp::Ordering;
use std::time::Duration;

use super::broker::{Asked, Facts};
use super::{Answers, Condition};
use crate::config::{Assignor, Config};
use crate::event::id::{DAY_MS, day_text, first_id_of_day, unix_ms};
use crate::pipeline::settings::{Settings, value};
use crate::retention::memory::need;
use crate::span;

/// What librdkafka takes in one answer, unless told otherwise; and what it needs of that for itself.
const RECEIVE: u64 = 100_000_000;
const OVERHEAD: u64 = 512;

/// What is found, or what is found and what to do.
type Judged = Result<String, (String, String)>;

pub(super) fn judge(config: &Config, facts: &Facts, answers: &mut Answers) {
    judge_cleanup_policy(
        facts.topic.as_ref().map_err(Clone::clone).and_then(|topic| Ok(value(topic, "cleanup.policy")?.to_owned())),
        answers,
    );
    let mut of = |condition, settings: &Asked<Settings>, judge: &dyn Fn(&Settings) -> Asked<Judged>| match settings
        .as_ref()
        .map_err(Clone::clone)
        .and_then(judge)
    {
        Ok(judged) => answers.judged(condition, judged),
        Err(why) => answers.not_asked(condition, why),
    };
    let (topic, broker) = (&facts.topic, &facts.broker);
    of(Condition::TopicRetention, topic, &|topic| topic_retention(config, topic));
    of(Condition::RecordSize, topic, &|topic| record_size(config, topic));
    of(Condition::SessionTimeout, broker, &|broker| session_timeout(config, broker));
    let topic = topic.as_ref().ok();
    of(Condition::OffsetsRetention, broker, &|broker| {
        offsets_retention(config, topic.ok_or("the topic's settings are not known")?, broker)
    });
    replication(facts, answers);
}

/// Blocking, so that `run` asks it too.
pub(super) fn judge_cleanup_policy(policy: Asked<String>, answers: &mut Answers) {
    match policy {
        Ok(policy) if policy.contains("compact") => answers.fails(
            Condition::CleanupPolicy,
            format_args!("cleanup.policy is {policy}: of the events of one key only the last may ever be read"),
            "set the topic's cleanup.policy to delete",
        ),
        Ok(policy) => answers.holds(Condition::CleanupPolicy, policy),
        Err(why) => answers.not_asked(Condition::CleanupPolicy, why),
    }
}

fn topic_retention(config: &Config, topic: &Settings) -> Asked<Judged> {
    let need = need(config, || Ok(topic.clone()))?;
    Ok(if need.time.is_some() {
        Ok(format!("ids are remembered for {}", need.why))
    } else {
        Err((need.why, "set it to the age of the oldest record that is still read, or the topic's retention.ms".to_owned()))
    })
}

fn record_size(config: &Config, topic: &Settings) -> Asked<Judged> {
    let largest: u64 = number(topic, "max.message.bytes")?;
    let option = config.kafka.options.get("receive.message.max.bytes").and_then(|bytes| bytes.parse().ok());
    let fetched = option.unwrap_or(RECEIVE).saturating_sub(OVERHEAD);
    let buffered = config.pipeline.buffer_bytes as u64;
    let (least, todo) = if fetched < buffered {
        (fetched, format!("set kafka.options.\"receive.message.max.bytes\" to {} or more", largest + OVERHEAD))
    } else {
        (buffered, format!("set pipeline.buffer_bytes to {largest} or more"))
    };
    let found = format!("max.message.bytes is {largest}; what is fetched and buffered at once is {least}");
    Ok(if largest <= least { Ok(found) } else { Err((found, format!("{todo}, or the topic's max.message.bytes to {least}"))) })
}

fn session_timeout(config: &Config, broker: &Settings) -> Asked<Judged> {
    let session = u64::try_from(config.kafka.session_timeout.as_millis()).unwrap_or(u64::MAX);
    if config.kafka.assignor == Assignor::Broker {
        let theirs: u64 = number(broker, "group.consumer.session.timeout.ms")?;
        let found = format!("the broker's is {theirs} ms, and kafka.session_timeout_ms {session}");
        let todo = "set the broker's group.consumer.session.timeout.ms, or the group's consumer.session.timeout.ms, no shorter";
        return Ok(if theirs >= session { Ok(found) } else { Err((found, todo.to_owned())) });
    }
    let least: u64 = number(broker, "group.min.session.timeout.ms")?;
    let most: u64 = number(broker, "group.max.session.timeout.ms")?;
    let found = format!("kafka.session_timeout_ms is {session}, and the broker takes {least} to {most}");
    let todo = "change it, or the broker's group.min.session.timeout.ms and group.max.session.timeout.ms";
    Ok(if (least..=most).contains(&session) { Ok(found) } else { Err((found, todo.to_owned())) })
}

fn offsets_retention(config: &Config, topic: &Settings, broker: &Settings) -> Asked<Judged> {
    let minutes: u64 = number(broker, "offsets.retention.minutes")?;
    let theirs = Duration::from_secs(minutes.saturating_mul(60));
    let readable: i64 = number(topic, "retention.ms")?;
    let readable = u64::try_from(readable).map_or(Duration::MAX, Duration::from_millis);
    let needed = readable.min(need(config, || Ok(topic.clone()))?.time.unwrap_or(config.retention.retention));
    let (kept, wanted) = (span::in_words(theirs), span::in_words(needed));
    let found = format!("offsets of a stopped group are kept for {kept}, records or ids for {wanted}");
    let todo = format!("set the broker's offsets.retention.minutes to {} or more", needed.as_secs().div_ceil(60));
    Ok(if theirs >= needed { Ok(found) } else { Err((found, todo)) })
}

/// A single broker has nowhere to replicate to; whoever runs one knows.
fn replication(facts: &Facts, answers: &mut Answers) {
    let alone = facts.brokers < 2;
    let wanted = facts.brokers.min(3);
    let enough = |replicas: usize| match replicas.cmp(&wanted) {
        Ordering::Less => Err((format!("{replicas} replicas on {} brokers", facts.brokers), format!("make it {wanted}"))),
        _ => Ok(format!("{replicas} replicas")),
    };
    if alone {
        answers.does_not_apply(Condition::Replication, "there is one broker");
    } else {
        answers.judged(Condition::Replication, enough(facts.replicas));
    }
    let topic = facts.topic.as_ref().map_err(Clone::clone);
    match topic.and_then(|topic| min_insync(topic, facts.replicas, alone)) {
        Ok(judged) => answers.judged(Condition::MinInsyncReplicas, judged),
        Err(why) => answers.not_asked(Condition::MinInsyncReplicas, why),
    }
    match &facts.offsets {
        _ if alone => answers.does_not_apply(Condition::OffsetsReplication, "there is one broker"),
        Err(why) => answers.not_asked(Condition::OffsetsReplication, why),
        Ok(None) => answers.does_not_apply(Condition::OffsetsReplication, "it is not there yet: nobody has committed anything"),
        Ok(Some((replicas, settings))) => {
            let both = enough(*replicas).and_then(|found| match min_insync(settings, *replicas, alone) {
                Ok(judged) => judged.map(|insync| format!("{found}, {insync}")),
                Err(why) => Err((why, "see its settings".to_owned())),
            });
            answers.judged(Condition::OffsetsReplication, both);
        }
    }
}

fn min_insync(settings: &Settings, replicas: usize, alone: bool) -> Asked<Judged> {
    let least: usize = number(settings, "min.insync.replicas")?;
    let found = format!("min.insync.replicas is {least} of {replicas}");
    Ok(if least > replicas {
        Err((found, "set it lower: nothing can be written to the topic with acks=all".to_owned()))
    } else if least < 2 && !alone {
        Err((found, "set it to 2, so that a record that was acknowledged outlives one disk".to_owned()))
    } else {
        Ok(found)
    })
}

/// The floor against the oldest record. An event's id is about as old as its record.
pub(super) fn judge_oldest_record(floor: Asked<Option<uuid::Uuid>>, oldest_ms: &Asked<Option<i64>>, answers: &mut Answers) {
    let condition = Condition::OldestRecord;
    match (floor, oldest_ms) {
        (Err(why), _) => answers.not_asked(condition, why),
        (_, Err(why)) => answers.not_asked(condition, why),
        (_, Ok(None)) => answers.holds(condition, "the topic is empty"),
        (Ok(None), Ok(Some(_))) => {
            answers.does_not_apply(condition, "there is no floor yet: the first `run` puts it below all records")
        }
        (Ok(Some(floor)), Ok(Some(oldest))) => {
            let day = first_id_of_day(oldest.div_euclid(DAY_MS));
            let found = format!("the oldest record is of {}, the floor of {}", day_text(day), day_text(floor));
            let below = u64::try_from(unix_ms(floor) - (*oldest).max(0)).unwrap_or_default();
            if below == 0 {
                answers.holds(condition, found);
            } else {
                let below = span::in_words(Duration::from_millis(below));
                let todo = format!(
                    "a group that begins there has {below} of records held as beyond_horizon: skip them, or decide with `onceward held`"
                );
                answers.fails(condition, found, todo);
            }
        }
    }
}

fn number<T: std::str::FromStr>(settings: &Settings, name: &str) -> Asked<T> {
    let text = value(settings, name)?;
    text.parse().map_err(|_| format!("the broker says {name} = {text}"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use uuid::Uuid;

    use super::super::Verdict;
    use super::*;

    fn settings(of: &[(&str, &str)]) -> Settings {
        of.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    fn facts(brokers: usize, replicas: usize, insync: &str) -> Facts {
        let settings = settings(&[("min.insync.replicas", insync)]);
        Facts {
            brokers,
            topic: Ok(settings.clone()),
            broker: Err("not asked".to_owned()),
            replicas,
            offsets: Ok(Some((replicas, settings))),
            oldest_record_ms: Ok(None),
            group: Err("not asked".to_owned()),
            frontiers: None,
            logs: Err("not asked".to_owned()),
            witnesses: Err("not asked".to_owned()),
        }
    }

    fn verdicts(judge: impl FnOnce(&mut Answers)) -> Vec<Verdict> {
        let mut answers = Answers::default();
        judge(&mut answers);
        answers.0.into_values().map(|finding| finding.verdict).collect()
    }

    #[test]
    fn one_disk_is_not_enough_where_there_are_more() {
        use Verdict::{DoesNotApply, Failed, Ok};
        let of = |brokers, replicas, insync| verdicts(|answers| replication(&facts(brokers, replicas, insync), answers));
        assert_eq!(of(3, 3, "2"), [Ok, Ok, Ok]);
        assert_eq!(of(3, 2, "2"), [Failed, Ok, Failed]);
        assert_eq!(of(3, 3, "1"), [Ok, Failed, Failed]);
        assert_eq!(of(2, 2, "2"), [Ok, Ok, Ok]);
        assert_eq!(of(1, 1, "1"), [DoesNotApply, Ok, DoesNotApply]);
        assert_eq!(of(1, 1, "2"), [DoesNotApply, Failed, DoesNotApply], "nothing can be written");
        let untold = Facts { topic: Result::Ok(BTreeMap::new()), offsets: Err("refused".to_owned()), ..facts(3, 3, "2") };
        assert_eq!(verdicts(|answers| replication(&untold, answers)), [Ok, Verdict::NotAsked, Verdict::NotAsked]);
    }

    #[test]
    fn a_setting_that_the_broker_does_not_tell_is_not_judged() {
        let config = Config::default();
        let none = settings(&[]);
        assert!(topic_retention(&config, &none).is_err());
        assert!(record_size(&config, &none).is_err());
        assert!(session_timeout(&config, &none).is_err());
        assert!(offsets_retention(&config, &none, &none).is_err());
        let odd = settings(&[("cleanup.policy", "delete"), ("retention.ms", "a week")]);
        assert!(topic_retention(&config, &odd).unwrap_err().contains("a week"));
    }

    #[test]
    fn ids_are_remembered_for_as_long_as_a_record_can_come_again() {
        let mut config = Config::default();
        let for_ever = [("cleanup.policy", "delete"), ("retention.ms", "-1"), ("segment.ms", "1"), ("file.delete.delay.ms", "1")];
        let (found, _) = topic_retention(&config, &settings(&for_ever)).unwrap().expect_err("for ever");
        assert!(found.contains("retention.replay_horizon_ms"), "{found}");
        config.retention.replay_horizon = Some(Duration::from_secs(30 * 86_400));
        let found = topic_retention(&config, &settings(&for_ever)).unwrap().expect("somebody has said how far back is read");
        assert_eq!(found, "ids are remembered for 30 d (retention.replay_horizon_ms)");
    }

    #[test]
    fn the_oldest_record_is_compared_with_the_floor_to_the_millisecond() {
        let floor = first_id_of_day(20_000);
        let at = unix_ms(floor);
        let of =
            |floor: Option<Uuid>, oldest: Option<i64>| verdicts(|answers| judge_oldest_record(Ok(floor), &Ok(oldest), answers))[0];
        assert_eq!(of(Some(floor), Some(at)), Verdict::Ok);
        assert_eq!(of(Some(floor), Some(at - 1)), Verdict::Failed);
        assert_eq!(of(Some(floor), None), Verdict::Ok);
        assert_eq!(of(None, Some(at)), Verdict::DoesNotApply);
    }
}
