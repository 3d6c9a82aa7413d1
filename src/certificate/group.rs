//! Judging the group: who is in it, and where it stands.
//!
//! In: what the broker and the database said. Out: answers. It owns nothing; it reads the database's positions a second time, because
//! the group may be at work.
//!
//! Invariant: a working engine fails nothing here: what Kafka was told before the second reading is in what the database says then.

use std::collections::BTreeMap;

use super::broker::{Asked, Facts, Group, Member};
use super::{Answers, Condition, topic};
use crate::config::{Assignor, Config};
use crate::pipeline::broker::Log;
use crate::pipeline::settings::{Settings, value};
use crate::pipeline::start::{self, Known};
use crate::record::{RecordDigest, Skips};
use crate::store::conditions::{self, Frontier};
use crate::store::{Session, retention, skips};

const POSITIONS: [Condition; 3] = [Condition::Position, Condition::Start, Condition::Witness];

/// `engine_runs`: an engine of this configuration answers on its admin port.
pub(super) async fn judge(config: &Config, facts: &Facts, engine_runs: bool, session: Option<&mut Session>, answers: &mut Answers) {
    group_protocol(config, facts, answers);
    match &facts.group {
        Ok(group) => {
            members(config, group, answers);
            static_id(config, group, engine_runs, answers);
        }
        Err(why) => {
            answers.not_asked(Condition::Members, why);
            answers.not_asked(Condition::StaticId, why);
        }
    }
    let floor = match session {
        Some(session) => {
            positions(config, facts, session, answers).await;
            retention::floor(session).await.map_err(|error| error.to_string())
        }
        None => {
            not_asked(answers, "the database could not be asked");
            Err("the database could not be asked".to_owned())
        }
    };
    topic::judge_oldest_record(floor, &facts.oldest_record_ms, answers);
}

fn not_asked(answers: &mut Answers, why: &str) {
    for condition in POSITIONS {
        answers.not_asked(condition, why);
    }
}

/// The protocol of the members that are there; with KIP-848 the broker alone decides.
fn group_protocol(config: &Config, facts: &Facts, answers: &mut Answers) {
    let condition = Condition::GroupProtocol;
    let assignor = config.kafka.assignor;
    let spoken = facts.broker.as_ref().map_err(Clone::clone).map(|broker| speaks(broker, assignor));
    match (spoken, &facts.group) {
        (Err(why), _) => answers.not_asked(condition, why),
        (_, Err(why)) => answers.not_asked(condition, why),
        (Ok(Err(found)), _) => answers.fails(
            condition,
            found,
            "set kafka.assignor to one that it speaks, or the broker's group.coordinator.rebalance.protocols",
        ),
        (Ok(Ok(found)), Ok(group)) => {
            let other = !group.protocol.is_empty() && assignor != Assignor::Broker && group.protocol != assignor.as_str();
            if other && !group.members.is_empty() {
                let found = format!(
                    "the group's members share partitions by {}, and kafka.assignor is {}",
                    group.protocol,
                    assignor.as_str()
                );
                answers.fails(condition, found, "stop all of them before one with another assignor joins");
            } else {
                answers.holds(condition, found);
            }
        }
    }
}

/// Brokers that do not tell know the classic protocol and no other.
fn speaks(broker: &Settings, assignor: Assignor) -> Result<String, String> {
    let wanted = if assignor == Assignor::Broker { "consumer" } else { "classic" };
    let spoken = value(broker, "group.coordinator.rebalance.protocols").unwrap_or("classic");
    if spoken.split(',').any(|protocol| protocol.trim() == wanted) {
        Ok(format!("the broker speaks {spoken}"))
    } else {
        Err(format!("the broker speaks {spoken}, and kafka.assignor = \"{}\" needs {wanted}", assignor.as_str()))
    }
}

fn members(config: &Config, group: &Group, answers: &mut Answers) {
    let condition = Condition::Members;
    if config.kafka.assignor == Assignor::Broker && group.members.is_empty() {
        // A group of the new protocol is not shown to the question that all brokers know.
        return answers.does_not_apply(condition, "members that the broker assigns are not told");
    }
    let ours = config.kafka.options.get("client.id").unwrap_or("onceward");
    let strange: Vec<String> = group
        .members
        .iter()
        .filter_map(|member| {
            let place = format!("{} at {}", member.client, member.host);
            let topics = subscribed_to(&member.subscription);
            if member.client != ours {
                Some(format!("{place} is not {ours}"))
            } else if topics.as_ref().is_some_and(|topics| *topics != [config.kafka.topic.as_str()]) {
                Some(format!("{place} is subscribed to {}", topics.unwrap_or_default().join(", ")))
            } else {
                None
            }
        })
        .collect();
    match (strange.is_empty(), group.members.len()) {
        (true, 0) => answers.holds(condition, "there are none"),
        (true, count) => answers.holds(condition, format_args!("{count}, all of them ours")),
        (false, _) => answers.fails(
            condition,
            strange.join("; "),
            "a group belongs to one service: give the other one a group of its own, or this one (kafka.group); claims are kept per group",
        ),
    }
}

/// The topics of a member's subscription, as the consumer protocol writes it: a version, then texts behind their lengths.
fn subscribed_to(mut bytes: &[u8]) -> Option<Vec<&str>> {
    let mut take = |count: usize| {
        let (taken, rest) = bytes.split_at_checked(count)?;
        bytes = rest;
        Some(taken)
    };
    take(2)?;
    let count = i32::from_be_bytes(take(4)?.try_into().ok()?);
    let mut topics = Vec::new();
    for _ in 0..count {
        let length = i16::from_be_bytes(take(2)?.try_into().ok()?);
        topics.push(std::str::from_utf8(take(usize::try_from(length).ok()?)?).ok()?);
    }
    Some(topics)
}

/// The broker makes a static member's id of its name and a random part.
fn static_id(config: &Config, group: &Group, engine_runs: bool, answers: &mut Answers) {
    let (condition, name) = (Condition::StaticId, config.kafka.instance_id.as_str());
    if name.is_empty() {
        return answers.does_not_apply(condition, "kafka.instance_id is not set");
    }
    let has_our_name = |member: &&Member| {
        let random = member.id.strip_prefix(name).and_then(|rest| rest.strip_prefix('-'));
        random.is_some_and(|random| uuid::Uuid::try_parse(random).is_ok())
    };
    match group.members.iter().find(has_our_name) {
        None => answers.holds(condition, format_args!("nobody is called {name}")),
        Some(_) if engine_runs => answers.holds(condition, format_args!("{name} runs here")),
        Some(member) => answers.fails(
            condition,
            format_args!("a member at {} is called {name}", member.host),
            "give each process a kafka.instance_id of its own; after a crash its name is free when its session has ended",
        ),
    }
}

async fn positions(config: &Config, facts: &Facts, s: &mut Session, answers: &mut Answers) {
    let (group, topic) = (&config.kafka.group, &config.kafka.topic);
    let (Some(before), Ok(logs)) = (&facts.frontiers, &facts.logs) else {
        let why = facts.logs.as_ref().err().map_or("the database could not be asked", String::as_str);
        return not_asked(answers, why);
    };
    let after = conditions::frontiers(s, group, topic).await;
    let skips = skips::positions(s, group, topic).await;
    let (after, skips) = match (after, skips) {
        (Ok(after), Ok(skips)) => (after, skips),
        (Err(error), _) | (_, Err(error)) => return not_asked(answers, &error.to_string()),
    };
    let skips: BTreeMap<i32, Skips> = skips.into_iter().map(|position| (position.partition, position.skips)).collect();
    let known = |partition: i32| skips.get(&partition).cloned().unwrap_or_default();
    let next = |of: &[Frontier], partition: i32| {
        of.iter().find(|frontier| frontier.partition == partition).and_then(|frontier| frontier.next_offset)
    };

    let ahead = logs.iter().filter_map(|(partition, log)| {
        let (committed, ours) = (log.committed?, next(&after, *partition)?);
        (committed > known(*partition).beyond(ours))
            .then(|| format!("partition {partition}: Kafka has {committed}, the database {ours}"))
    });
    let todo = "the database went back, or somebody else commits for this group: let the engine charge nothing in doubt (it does), and run `onceward audit`";
    judge_all(Condition::Position, ahead, "no partition is ahead in Kafka", todo, answers);

    let refused = logs.iter().filter_map(|(partition, log)| {
        let skips = known(*partition);
        let known = Known {
            committed: log.committed,
            next_offset: next(before, *partition),
            log: (log.first, log.end),
            fresh: config.kafka.start,
            added_later: !before.is_empty(),
            skips: &skips,
            on_gap: config.kafka.on_gap,
        };
        start::resolve(&known).err().map(|refusal| format!("partition {partition}: {refusal}"))
    });
    judge_all(Condition::Start, refused, "every partition can begin", "its owner stops it until then", answers);
    witnesses(&facts.witnesses, logs, before, answers);
}

fn judge_all(condition: Condition, wrong: impl Iterator<Item = String>, right: &str, todo: &str, answers: &mut Answers) {
    let wrong: Vec<String> = wrong.collect();
    if wrong.is_empty() {
        answers.holds(condition, right);
    } else {
        answers.fails(condition, wrong.join("; "), todo);
    }
}

/// One partition that has its record speaks for the topic, which is made anew as a whole; those that cannot be compared are told beside it.
fn witnesses(found: &Asked<BTreeMap<i32, RecordDigest>>, logs: &BTreeMap<i32, Log>, before: &[Frontier], answers: &mut Answers) {
    let condition = Condition::Witness;
    let found = match found {
        Ok(found) => found,
        Err(why) => return answers.not_asked(condition, why),
    };
    let (mut same, mut others, mut gone) = (0, Vec::new(), Vec::new());
    for frontier in before {
        let partition = frontier.partition;
        let (Some(next), Some(digest), Some(log)) = (frontier.next_offset, frontier.last_record_digest, logs.get(&partition))
        else {
            continue;
        };
        let place = next.0 - 1;
        match found.get(&partition) {
            Some(there) if *there == digest => same += 1,
            Some(_) => others.push(format!("partition {partition}: the record at {place} is another one")),
            // That is said by the line `start`.
            None if next > log.end => {}
            None => gone.push(format!("partition {partition}: the record at {place} is gone from the log")),
        }
    }
    match (others.is_empty(), same, gone.is_empty()) {
        (false, ..) => answers.fails(
            condition,
            others.join("; "),
            "the topic was made anew or truncated: find out what is missing, then `onceward offsets skip`, or use another group",
        ),
        (true, 0, true) => answers.does_not_apply(condition, "no partition has a settled record in its log yet"),
        (true, 0, false) => answers.not_asked(condition, format_args!("there is nothing left to compare: {}", gone.join("; "))),
        (true, _, true) => answers.holds(condition, format_args!("{same} partitions have the record that was settled last")),
        (true, ..) => answers.holds(
            condition,
            format_args!("{same} partitions have the record that was settled last; not compared: {}", gone.join("; ")),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Finding, Verdict};
    use super::*;
    use crate::config::KafkaConfig;
    use crate::record::{NextOffset, Offset};

    fn config(instance_id: &str) -> Config {
        let kafka = KafkaConfig { topic: "orders".to_owned(), instance_id: instance_id.to_owned(), ..KafkaConfig::default() };
        Config { kafka, ..Config::default() }
    }

    fn member(client: &str, topics: &[&str]) -> Member {
        let mut subscription = vec![0, 3];
        subscription.extend(i32::try_from(topics.len()).unwrap().to_be_bytes());
        for topic in topics {
            subscription.extend(i16::try_from(topic.len()).unwrap().to_be_bytes());
            subscription.extend(topic.as_bytes());
        }
        subscription.extend([0xff; 4]); // user data, which says nothing
        Member { id: "m".to_owned(), client: client.to_owned(), host: "/10.0.0.1".to_owned(), subscription }
    }

    fn judged(config: &Config, group: &Group, engine_runs: bool) -> Vec<Finding> {
        let mut answers = Answers::default();
        members(config, group, &mut answers);
        static_id(config, group, engine_runs, &mut answers);
        answers.0.into_values().collect()
    }

    #[test]
    fn a_member_that_is_not_ours_or_wants_another_topic_is_named() {
        let group = |member: Member| Group { protocol: "range".to_owned(), members: vec![member] };
        let verdict = |member: Member| judged(&config(""), &group(member), false)[0].verdict;
        assert_eq!(verdict(member("onceward", &["orders"])), Verdict::Ok);
        assert_eq!(verdict(member("kcat", &["orders"])), Verdict::Failed);
        assert_eq!(verdict(member("onceward", &["orders", "others"])), Verdict::Failed);
        let settling = Member { subscription: Vec::new(), ..member("onceward", &[]) };
        assert_eq!(verdict(settling), Verdict::Ok, "not known yet");
    }

    #[test]
    fn a_static_name_is_taken_only_by_a_member_of_just_that_name() {
        let named = |id: &str, runs: bool| {
            let member = Member { id: id.to_owned(), ..member("onceward", &["orders"]) };
            judged(&config("teller-1"), &Group { protocol: String::new(), members: vec![member] }, runs)[1].verdict
        };
        let id = "teller-1-5f0c9a1e-8a3c-4b3e-9d3e-2f1d7c1a0b11";
        assert_eq!(named(id, false), Verdict::Failed);
        assert_eq!(named(id, true), Verdict::Ok, "it is the engine of this very configuration");
        assert_eq!(named("teller-1-1-5f0c9a1e-8a3c-4b3e-9d3e-2f1d7c1a0b11", false), Verdict::Ok, "teller-1-1 is another");
        assert_eq!(judged(&config(""), &Group::default(), false)[1].verdict, Verdict::DoesNotApply);
    }

    /// Each partition: its next offset and the digest before it, the log, and the digest that is found there.
    type Place = (i64, Option<i64>, (i64, i64), Option<i64>);

    fn witness(places: &[Place]) -> (Verdict, String) {
        let number = |index: usize| i32::try_from(index).unwrap();
        let frontier = |(index, (next, digest, ..)): (usize, &Place)| Frontier {
            partition: number(index),
            next_offset: Some(NextOffset(*next)),
            last_record_digest: digest.map(RecordDigest),
        };
        let log = |(index, (.., (first, end), _)): (usize, &Place)| {
            (number(index), Log { committed: None, set_by_others: false, first: Offset(*first), end: NextOffset(*end) })
        };
        let digest = |(index, (.., found)): (usize, &Place)| Some((number(index), RecordDigest((*found)?)));
        let frontiers: Vec<_> = places.iter().enumerate().map(frontier).collect();
        let logs = places.iter().enumerate().map(log).collect();
        let found = Ok(places.iter().enumerate().filter_map(digest).collect());
        let mut answers = Answers::default();
        witnesses(&found, &logs, &frontiers, &mut answers);
        let finding = answers.0.remove(&Condition::Witness).expect("an answer");
        assert_eq!(finding.is_fine(), [Verdict::Ok, Verdict::DoesNotApply].contains(&finding.verdict));
        (finding.verdict, finding.found)
    }

    // CASES B11
    #[test]
    fn a_topic_is_the_same_only_if_a_record_says_so() {
        const SAME: Place = (5, Some(7), (0, 9), Some(7));
        const OTHER: Place = (5, Some(7), (0, 9), Some(8));
        const GONE: Place = (5, Some(7), (5, 9), None);
        const WITHOUT: Place = (5, None, (0, 9), None);
        const TOO_SHORT: Place = (5, Some(7), (0, 3), None);
        assert_eq!(witness(&[SAME, SAME]), (Verdict::Ok, "2 partitions have the record that was settled last".to_owned()));
        assert_eq!(witness(&[SAME, OTHER, GONE]).0, Verdict::Failed);
        let (verdict, found) = witness(&[SAME, GONE, WITHOUT]);
        assert_eq!(verdict, Verdict::Ok);
        assert!(found.contains("not compared: partition 1: the record at 4 is gone"), "{found}");
        let (verdict, found) = witness(&[GONE, WITHOUT]);
        assert_eq!(verdict, Verdict::NotAsked, "nobody knows");
        assert!(found.contains("partition 0: the record at 4 is gone"), "{found}");
        assert_eq!(witness(&[WITHOUT]).0, Verdict::DoesNotApply, "no record was settled here yet");
        assert_eq!(witness(&[]).0, Verdict::DoesNotApply, "the first start of a group");
        assert_eq!(witness(&[TOO_SHORT]).0, Verdict::DoesNotApply, "`start` fails then");
    }

    #[test]
    fn a_subscription_that_is_cut_off_is_not_known() {
        let bytes = member("onceward", &["orders"]).subscription;
        assert_eq!(subscribed_to(&bytes), Some(vec!["orders"]));
        assert_eq!(subscribed_to(&bytes[..9]), None);
        assert_eq!(subscribed_to(&[]), None);
    }
}
