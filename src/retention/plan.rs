//! How far the table of claims may forget: pure decisions over what everybody has said.
//!
//! In: what this process needs, what the owner of every partition of every group has said, the time. Out: the floor, and for
//! each day what keeps it. It owns nothing.
//!
//! Invariant: an id may be forgotten only when everybody allows it; who has said nothing allows nothing.

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::memory::Own;
use crate::event::id::{DAY_MS, first_id_of_day, unix_ms};
use crate::store::forgetting::Standing;

/// An event can be older than its record says, and records come in no strict order of time: so much older than what a partition has
/// settled is kept.
pub const SLACK: Duration = Duration::from_secs(86_400);

/// What everybody allows, the strictest first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    limits: Vec<Limit>,
}

/// What one of them allows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Ids of this time and younger are kept; milliseconds since 1970, `None`: all are.
    pub keeps_from_ms: Option<i64>,
    /// Why.
    pub keeper: Keeper,
}

/// Who keeps ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Keeper {
    /// A group needs them for so long.
    Need {
        /// The group.
        group: String,
        /// For how long, and what asks for it.
        why: String,
    },
    /// A partition has events to settle, or has not said that it has none.
    Partition {
        /// Its group.
        group: String,
        /// Its topic.
        topic: String,
        /// Its number.
        partition: i32,
        /// No unsettled event of it is older; milliseconds since 1970.
        safe_ms: Option<i64>,
    },
}

impl Plan {
    /// Weighs what everybody has said.
    #[must_use]
    pub fn new(now_ms: i64, own: &Own, standings: &[Standing]) -> Self {
        let of_need = |group: &str, needed_ms: Option<i64>, why: &str| Limit {
            keeps_from_ms: needed_ms.map(|needed| now_ms.saturating_sub(needed)),
            keeper: Keeper::Need { group: group.to_owned(), why: why.to_owned() },
        };
        let of_partition = |group: &str, topic: &str, partition: i32, safe_ms: Option<i64>| Limit {
            keeps_from_ms: safe_ms.map(|safe| safe.saturating_sub(ms(SLACK))),
            keeper: Keeper::Partition { group: group.to_owned(), topic: topic.to_owned(), partition, safe_ms },
        };
        let mut limits = vec![of_need(&own.group, own.need.time.map(ms), &own.need.why)];
        for Standing { group, topic, partition, safe_ms, remember_ms, remember_why } in standings {
            let why = remember_why.as_deref().unwrap_or("for how long is not known: its owner has not said it yet");
            limits.push(of_need(group, *remember_ms, why));
            limits.push(of_partition(group, topic, *partition, *safe_ms));
        }
        // A partition that nobody has ever owned has said nothing.
        let ours = standings.iter().filter(|standing| standing.group == own.group && standing.topic == own.topic);
        let known: BTreeSet<i32> = ours.map(|standing| standing.partition).collect();
        let unknown = (0..own.partitions).filter(|partition| !known.contains(partition));
        limits.extend(unknown.map(|partition| of_partition(&own.group, &own.topic, partition, None)));
        limits.sort_by_key(|limit| limit.keeps_from_ms); // `None` stands first
        limits.dedup();
        Self { limits }
    }

    /// The lowest id that somebody keeps, rounded down to its day; `None`: all are kept.
    #[must_use]
    pub fn floor(&self) -> Option<Uuid> {
        let from_ms = self.limits.first()?.keeps_from_ms?;
        Some(first_id_of_day(from_ms.div_euclid(DAY_MS)))
    }

    /// Who keeps a day that ends with this id, the strictest first.
    pub fn keepers(&self, end: Uuid) -> impl Iterator<Item = &Limit> {
        let end_ms = unix_ms(end);
        self.limits.iter().filter(move |limit| limit.keeps_from_ms.is_none_or(|from| from < end_ms))
    }

    /// Partitions that keep ids which nobody needs any more for their age, and groups that keep them for ever: what a person should look
    /// at when days are not dropped.
    pub fn holding_back(&self) -> impl Iterator<Item = &Limit> {
        let needs = self.limits.iter().filter(|limit| matches!(limit.keeper, Keeper::Need { .. }));
        let needed_from = needs.filter_map(|limit| limit.keeps_from_ms).min();
        self.limits.iter().filter(move |limit| match limit.keeps_from_ms {
            None => true,
            Some(from) => matches!(limit.keeper, Keeper::Partition { .. }) && needed_from.is_some_and(|needed| from < needed),
        })
    }
}

impl Limit {
    /// What a person can do about it, if anything.
    #[must_use]
    pub fn remedy(&self) -> Option<String> {
        match &self.keeper {
            Keeper::Need { .. } if self.keeps_from_ms.is_some() => None,
            Keeper::Need { .. } => Some("set retention.replay_horizon_ms, or run the group once with this release".to_owned()),
            Keeper::Partition { group, topic, partition, .. } => {
                let quoted = |text: &str| format!("'{}'", text.replace('\'', "''"));
                Some(format!(
                    "let the group run until it has caught up; if the partition is gone for good: \
                     DELETE FROM consumed_partition WHERE consumer_group = {} AND topic = {} AND partition = {partition}",
                    quoted(group),
                    quoted(topic)
                ))
            }
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.keeper {
            Keeper::Need { group, why } => write!(f, "group {group} needs it: {why}"),
            Keeper::Partition { group, topic, partition, safe_ms: None } => {
                write!(f, "group {group}, topic {topic}, partition {partition}: nobody has said yet up to when it is settled")
            }
            Keeper::Partition { group, topic, partition, safe_ms: Some(safe_ms) } => {
                write!(f, "group {group}, topic {topic}, partition {partition} is settled only up to {}", moment(*safe_ms))
            }
        }
    }
}

/// A time for people, in UTC.
#[must_use]
pub fn moment(ms: i64) -> String {
    let moment = DateTime::<Utc>::from_timestamp_millis(ms);
    moment.map_or_else(|| format!("{ms} ms"), |moment| moment.format("%Y-%m-%dT%H:%M:%SZ").to_string())
}

fn ms(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::retention::memory::Need;

    const TODAY: i64 = 20_000;
    const NOON: i64 = TODAY * DAY_MS + DAY_MS / 2;

    fn own(days: Option<i64>) -> Own {
        let time = days.map(|days| Duration::from_millis(u64::try_from(days * DAY_MS).unwrap()));
        Own { group: "billing".into(), topic: "orders".into(), partitions: 1, need: Need { time, why: "retention".into() } }
    }

    fn standing(group: &str, remember_days: i64, safe_ms: i64) -> Standing {
        Standing {
            group: group.into(),
            topic: "orders".into(),
            partition: 0,
            safe_ms: Some(safe_ms),
            remember_ms: Some(remember_days * DAY_MS),
            remember_why: Some("retention".into()),
        }
    }

    fn floor_day(own: &Own, standings: &[Standing]) -> Option<i64> {
        Plan::new(NOON, own, standings).floor().map(crate::event::id::day_of)
    }

    #[test]
    fn whole_days_go_that_are_older_than_the_longest_need_of_any_group() {
        assert_eq!(floor_day(&own(Some(7)), &[standing("billing", 7, NOON)]), Some(TODAY - 7), "its noon is still needed");
        assert_eq!(
            floor_day(&own(Some(7)), &[standing("billing", 3, NOON)]),
            Some(TODAY - 7),
            "what this process needs counts too"
        );
        let shared = [standing("billing", 7, NOON), standing("notify", 30, NOON)];
        assert_eq!(floor_day(&own(Some(7)), &shared), Some(TODAY - 30));
    }

    // CASES F01
    #[test]
    fn what_a_partition_has_not_settled_is_kept_with_a_day_of_slack() {
        let behind = standing("billing", 7, NOON - 20 * DAY_MS);
        assert_eq!(floor_day(&own(Some(7)), std::slice::from_ref(&behind)), Some(TODAY - 21));
        let plan = Plan::new(NOON, &own(Some(7)), &[behind, standing("notify", 7, NOON)]);
        let held_back: Vec<String> = plan.holding_back().map(ToString::to_string).collect();
        assert_eq!(held_back, ["group billing, topic orders, partition 0 is settled only up to 2024-09-14T12:00:00Z"]);
        let keepers = |day| plan.keepers(first_id_of_day(day + 1)).count();
        assert_eq!([keepers(TODAY - 22), keepers(TODAY - 21), keepers(TODAY - 8), keepers(TODAY - 7)], [0, 1, 1, 3]);
    }

    #[test]
    fn who_has_said_nothing_allows_nothing() {
        let silent = Standing { safe_ms: None, ..standing("notify", 7, NOON) };
        assert_eq!(floor_day(&own(Some(7)), &[standing("billing", 7, NOON), silent]), None);
        let for_ever = Standing { remember_ms: None, remember_why: None, ..standing("notify", 7, NOON) };
        assert_eq!(floor_day(&own(Some(7)), &[standing("billing", 7, NOON), for_ever]), None);
        assert_eq!(floor_day(&own(None), &[standing("billing", 7, NOON)]), None);
        assert_eq!(floor_day(&own(Some(7)), &[]), None, "a partition that nobody has owned yet");
        let two = Own { partitions: 2, ..own(Some(7)) };
        assert_eq!(floor_day(&two, &[standing("billing", 7, NOON)]), None, "one that was added");
    }

    #[test]
    fn a_person_is_told_what_to_do() {
        let plan = Plan::new(NOON, &own(None), &[Standing { safe_ms: None, ..standing("o'neill", 7, NOON) }]);
        let told: Vec<String> = plan.holding_back().filter_map(Limit::remedy).collect();
        assert!(told.iter().any(|remedy| remedy.contains("retention.replay_horizon_ms")), "{told:?}");
        assert!(
            told.iter().any(|remedy| remedy.contains("consumer_group = 'o''neill' AND topic = 'orders' AND partition = 0")),
            "{told:?}"
        );
        assert_eq!(Plan::new(NOON, &own(Some(7)), &[standing("billing", 7, NOON)]).limits[0].remedy(), None);
    }
}
