//! What Kafka is asked, once, for all conditions.
//!
//! In: a configuration, and how far the database says we are. Out: [`Facts`]. It owns three clients while it asks: one that reads settings,
//! one that asks about the group, one that reads records. None of them joins the group.
//!
//! Invariant: an answer that did not come is an error with its words, never an empty answer.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use rdkafka::ClientConfig;
use rdkafka::TopicPartitionList;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::KafkaError;
use rdkafka::types::RDKafkaErrorCode;

use super::{Answers, Condition};
use crate::config::{Config, KafkaConfig, Wire};
use crate::pipeline::broker::{Log, read_logs};
use crate::pipeline::connection::{self, Plain};
use crate::pipeline::native;
use crate::pipeline::rebalance::Rebalances;
use crate::pipeline::settings::{Admin, Settings, value};
use crate::record::{Offset, RecordDigest};
use crate::retention::oldest_record_ms;
use crate::store::conditions::Frontier;

/// How long the broker may take for one answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long reading the last settled record of every partition may take.
const WITNESSES: Duration = Duration::from_secs(10);
/// Where Kafka keeps the offsets of groups.
const OFFSETS_TOPIC: &str = "__consumer_offsets";

/// An answer, or why there is none.
pub(super) type Asked<T> = Result<T, String>;

/// What the broker said.
#[derive(Debug)]
pub(super) struct Facts {
    /// How many brokers there are.
    pub brokers: usize,
    /// The topic's own settings, the broker's defaults among them.
    pub topic: Asked<Settings>,
    /// One broker's settings.
    pub broker: Asked<Settings>,
    /// The fewest replicas of any partition of the topic.
    pub replicas: usize,
    /// The same of the offsets' topic, and its settings; `None` while nobody has committed anything yet.
    pub offsets: Asked<Option<(usize, Settings)>>,
    /// The time of the topic's oldest record, in milliseconds since 1970.
    pub oldest_record_ms: Asked<Option<i64>>,
    /// Who is in the group.
    pub group: Asked<Group>,
    /// How far the database says we are: asked before the broker was. `None`: it could not be asked.
    pub frontiers: Option<Vec<Frontier>>,
    /// Every partition's log, and where Kafka says that we are.
    pub logs: Asked<BTreeMap<i32, Log>>,
    /// The record before each frontier, where there is one.
    pub witnesses: Asked<BTreeMap<i32, RecordDigest>>,
}

/// A group as the broker sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Group {
    /// What its members have agreed upon; empty while there are none.
    pub protocol: String,
    /// Its members.
    pub members: Vec<Member>,
}

/// A member.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Member {
    /// Begins with its static name, if it has one.
    pub id: String,
    /// What it calls itself.
    pub client: String,
    /// Where it is.
    pub host: String,
    /// What it is subscribed to, as its protocol writes it; empty while the group settles.
    pub subscription: Vec<u8>,
}

impl Facts {
    /// Asks everything. `None` when there is no broker or no topic: that is answered, and nothing else can be asked.
    pub(super) async fn ask(config: &Config, frontiers: Option<Vec<Frontier>>, answers: &mut Answers) -> Option<Self> {
        let kafka = config.kafka.clone();
        let asked = tokio::task::spawn_blocking(move || read(&kafka, frontiers)).await;
        match asked.unwrap_or_else(|panic| Err(Missing::Broker(panic.to_string()))) {
            Ok((partitions, facts)) => {
                answers.holds(Condition::Brokers, format_args!("{} ({})", facts.brokers, config.kafka.brokers));
                answers.holds(Condition::Topic, format_args!("{}, {partitions} partitions", config.kafka.topic));
                Some(facts)
            }
            Err(Missing::Broker(why)) => {
                answers.fails(
                    Condition::Brokers,
                    format_args!("no answer from {}: {why}", config.kafka.brokers),
                    "see kafka.brokers",
                );
                None
            }
            Err(Missing::Topic { brokers, why }) => {
                answers.holds(Condition::Brokers, format_args!("{brokers} ({})", config.kafka.brokers));
                answers.fails(Condition::Topic, format_args!("{}: {why}", config.kafka.topic), "create it, or see kafka.topic");
                None
            }
        }
    }
}

/// The topic's `cleanup.policy`.
pub(super) async fn cleanup_policy(kafka: &KafkaConfig) -> Asked<String> {
    let kafka = kafka.clone();
    let asked = tokio::task::spawn_blocking(move || {
        let admin = Admin::connect(&kafka)?;
        admin.partitions.clone()?;
        let settings = admin.topic(&kafka.topic)?;
        Ok(value(&settings, "cleanup.policy")?.to_owned())
    });
    asked.await.unwrap_or_else(|panic| Err(panic.to_string()))
}

/// How the brokers are spoken to; nobody is asked.
pub(super) fn judge_the_way(kafka: &KafkaConfig, answers: &mut Answers) {
    let is_of_this_machine = |broker: &str| {
        let host = broker.trim().rsplit_once(':').map_or(broker, |(host, _)| host).trim_matches(['[', ']']);
        host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
    };
    let protocol = kafka.options.get("security.protocol").unwrap_or("plaintext");
    match kafka.wire() {
        Wire::Verified => answers.holds(Condition::KafkaTls, protocol),
        _ if kafka.brokers.split(',').all(is_of_this_machine) => answers.holds(Condition::KafkaTls, "of this machine"),
        Wire::Plain => answers.fails(
            Condition::KafkaTls,
            format_args!("kafka.options.security.protocol is {protocol}"),
            "make it ssl or sasl_ssl",
        ),
        Wire::Unverified => answers.fails(
            Condition::KafkaTls,
            format_args!("{protocol}, with anybody who answers"),
            "leave out ssl.endpoint.identification.algorithm and enable.ssl.certificate.verification, and name an ssl.ca.location that vouches for the brokers",
        ),
    }
}

/// What is not there.
enum Missing {
    Broker(String),
    Topic { brokers: usize, why: String },
}

/// Blocks the thread.
fn read(kafka: &KafkaConfig, frontiers: Option<Vec<Frontier>>) -> Result<(usize, Facts), Missing> {
    let consumer = consumer(kafka).map_err(|error| Missing::Broker(error.to_string()))?;
    let metadata = consumer.fetch_metadata(Some(&kafka.topic), PATIENCE);
    let metadata = metadata.map_err(|error| Missing::Broker(connection::why(&consumer, &error)))?;
    let brokers = metadata.brokers().len();
    let broker = metadata.brokers().first().ok_or_else(|| Missing::Broker("it knows no brokers".to_owned()))?.id();
    let topic = metadata.topics().iter().find(|topic| topic.name() == kafka.topic);
    let missing = |why: String| Missing::Topic { brokers, why };
    let topic = topic.ok_or_else(|| missing("the broker does not know it".to_owned()))?;
    if let Some(error) = topic.error() {
        return Err(missing(connection::in_words(error.into())));
    }
    let partitions: Vec<i32> = topic.partitions().iter().map(rdkafka::metadata::MetadataPartition::id).collect();
    let replicas = topic.partitions().iter().map(|partition| partition.replicas().len()).min();
    let replicas = replicas.ok_or_else(|| missing("it has no partitions".to_owned()))?;

    let admin = Admin::connect(kafka);
    let ask = |settings: &dyn Fn(&Admin) -> Asked<Settings>| admin.as_ref().map_err(Clone::clone).and_then(settings);
    let logs = read_logs(&consumer, &kafka.topic, &partitions);
    let logs = logs.map_err(|error| connection::told(&consumer).unwrap_or(error));
    let witnesses = match (&frontiers, &logs) {
        (Some(frontiers), Ok(logs)) => read_witnesses(kafka, frontiers, logs),
        (None, _) => Err("the database could not be asked".to_owned()),
        (_, Err(error)) => Err(error.clone()),
    };
    let facts = Facts {
        brokers,
        topic: ask(&|admin| admin.topic(&kafka.topic)),
        broker: ask(&|admin| admin.broker(broker)),
        replicas,
        offsets: offsets_topic(&consumer, || ask(&|admin| admin.topic(OFFSETS_TOPIC))),
        oldest_record_ms: oldest_record_ms(quiet(kafka), &kafka.topic),
        // To whom the group's offsets are not told, its members are kept back in silence.
        group: logs.as_ref().map_err(Clone::clone).and_then(|_| group(&consumer, &kafka.group)),
        frontiers,
        logs,
        witnesses,
    };
    Ok((partitions.len(), facts))
}

/// What fails is said in a finding.
fn quiet(kafka: &KafkaConfig) -> ClientConfig {
    let mut client = kafka.kafka_client_config();
    client.set("log_level", "0");
    client
}

fn consumer(kafka: &KafkaConfig) -> Result<BaseConsumer<Rebalances>, KafkaError> {
    connection::connect(&quiet(kafka), Rebalances::default())
}

fn offsets_topic(consumer: &BaseConsumer<Rebalances>, ask: impl FnOnce() -> Asked<Settings>) -> Asked<Option<(usize, Settings)>> {
    let metadata = consumer.fetch_metadata(Some(OFFSETS_TOPIC), PATIENCE).map_err(|error| connection::plainly(&error))?;
    let topic = metadata.topics().iter().find(|topic| topic.name() == OFFSETS_TOPIC);
    if let Some(refused) = topic.and_then(|topic| topic.error()).map(RDKafkaErrorCode::from)
        && refused != RDKafkaErrorCode::UnknownTopicOrPartition
    {
        return Err(connection::in_words(refused));
    }
    let replicas = topic.and_then(|topic| topic.partitions().iter().map(|partition| partition.replicas().len()).min());
    replicas.map(|replicas| Ok((replicas, ask()?))).transpose()
}

/// While members come and go, what they want is not known: that passes.
fn group(consumer: &BaseConsumer<Rebalances>, name: &str) -> Asked<Group> {
    let until = Instant::now() + PATIENCE;
    loop {
        let list = consumer.fetch_group_list(Some(name), PATIENCE).map_err(|error| error.to_string())?;
        let Some(found) = list.groups().iter().find(|group| group.name() == name) else { return Ok(Group::default()) };
        if ["PreparingRebalance", "CompletingRebalance"].contains(&found.state()) {
            if Instant::now() > until {
                return Err("the group is rebalancing: ask again".to_owned());
            }
            std::thread::sleep(Duration::from_millis(200));
            continue;
        }
        let member = |member: &rdkafka::groups::GroupMemberInfo| Member {
            id: member.id().to_owned(),
            client: member.client_id().to_owned(),
            host: member.client_host().to_owned(),
            subscription: member.metadata().unwrap_or_default().to_vec(),
        };
        return Ok(Group { protocol: found.protocol().to_owned(), members: found.members().iter().map(member).collect() });
    }
}

/// The digest of each record before a frontier; a hole of the log has none.
fn read_witnesses(kafka: &KafkaConfig, frontiers: &[Frontier], logs: &BTreeMap<i32, Log>) -> Asked<BTreeMap<i32, RecordDigest>> {
    let mut wanted: BTreeMap<i32, Offset> = BTreeMap::new();
    for frontier in frontiers {
        let (Some(next), Some(_), Some(log)) = (frontier.next_offset, frontier.last_record_digest, logs.get(&frontier.partition))
        else {
            continue;
        };
        if next.0 > log.first.0 && next <= log.end {
            wanted.insert(frontier.partition, Offset(next.0 - 1));
        }
    }
    if wanted.is_empty() {
        return Ok(BTreeMap::new());
    }
    let mut assignment = TopicPartitionList::new();
    for (partition, offset) in &wanted {
        let place = rdkafka::Offset::Offset(offset.0);
        assignment.add_partition_offset(&kafka.topic, *partition, place).map_err(|error| error.to_string())?;
    }
    let consumer: BaseConsumer<Plain> = connection::connect(&quiet(kafka), Plain::default()).map_err(|error| error.to_string())?;
    consumer.assign(&assignment).map_err(|error| error.to_string())?;
    let (until, mut found) = (Instant::now() + WITNESSES, BTreeMap::new());
    while !wanted.is_empty() {
        if Instant::now() > until {
            return Err("the last settled records could not be read in time".to_owned());
        }
        match consumer.poll(Duration::from_millis(100)) {
            Some(Ok(message)) => {
                let record = native::own(&message);
                if wanted.remove(&record.partition) == Some(record.offset) {
                    found.insert(record.partition, record.digest());
                }
            }
            // Nothing but markers of transactions.
            Some(Err(KafkaError::PartitionEOF(partition))) => drop(wanted.remove(&partition)),
            Some(Err(_)) | None => {}
        }
    }
    Ok(found)
}
