//! The conditions, in the order in which they are printed.
//!
//! Invariant: names are stable; machines read them. A condition is blocking only if nobody would notice later that it does not hold.

/// What becomes of `onceward run` when it does not hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weight {
    /// It reads nothing.
    Blocking,
    /// It starts all the same.
    Advisory,
}

/// Declares the conditions: name, weight, when it holds, why it has its weight.
macro_rules! conditions {
    ($( $condition:ident = $name:literal, $weight:ident, $holds:literal, $why:literal; )+) => {
        /// Something without which the guarantee, or the ease of keeping it, is gone.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Condition {
            $( #[doc = $holds] $condition, )+
        }

        impl Condition {
            /// Every condition, in its place.
            pub const ALL: &[Self] = &[ $( Self::$condition, )+ ];

            /// Its name, which stays.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $( Self::$condition => $name, )+ }
            }

            /// What it is to `run`.
            #[must_use]
            pub const fn weight(self) -> Weight {
                match self { $( Self::$condition => Weight::$weight, )+ }
            }

            /// When it holds.
            #[must_use]
            pub const fn holds(self) -> &'static str {
                match self { $( Self::$condition => $holds, )+ }
            }

            /// Why it blocks, or does not.
            #[must_use]
            pub const fn why(self) -> &'static str {
                match self { $( Self::$condition => $why, )+ }
            }
        }
    };
}

conditions! {
    Configuration = "configuration", Blocking,
        "every key is known, and the time limits keep their order",
        "a frozen owner is kept from committing by that order; exit code 64";
    Database = "database", Blocking,
        "PostgreSQL answers, takes writes (no standby, not read-only) and keeps texts as UTF-8",
        "`run` waits for it";
    DatabaseTls = "database_tls", Advisory,
        "`database.url` has `sslmode=verify-full` or `verify-ca`, or is of this machine",
        "password and payloads could be read on the way, or somebody else could answer; nothing is charged twice by it";
    ServerVersion = "server_version", Blocking,
        "the server is PostgreSQL 14 or newer",
        "older ones have no multiranges and cannot detach a day without a lock";
    Fsync = "fsync", Blocking,
        "`fsync` is on, or the database says `onceward.no_fsync = accepted`",
        "a crash of the machine would take back claims and attempts that Kafka and the provider know of, and leave no trace";
    FullPageWrites = "full_page_writes", Blocking,
        "`full_page_writes` is on, or the same is accepted",
        "a page that is half written at a crash loses rows, and nobody is told";
    SynchronousCommit = "synchronous_commit", Blocking,
        "`synchronous_commit` is not off for our role and database",
        "an attempt must be durable before the provider hears of it; with off a crash of the server forgets the last ones";
    Isolation = "isolation", Advisory,
        "our transactions are READ COMMITTED, and so is the default of our role and database",
        "ours name their isolation; whoever else writes these tables under a higher one makes batches run again (40001)";
    Schema = "schema", Blocking,
        "every migration is applied",
        "`run` applies them first";
    Privileges = "privileges", Blocking,
        "our role may read and write its tables, and make days",
        "a right that is missing is met in the middle of a batch, after the charge";
    ClaimColumns = "claim_columns", Blocking,
        "`processed_event` has event_id (uuid), consumer_group (text, or varchar with room for our group's name) and processed_at (timestamptz); no other column must be given",
        "a time without a zone is another moment in every session, so that claims go too early; and no event passes a claim that is refused";
    DedupKey = "dedup_key", Blocking,
        "the key of `processed_event` is (event_id, consumer_group), on every day, without the time; event_id alone where one group has claims. It is one plain table, or partitioned by RANGE (event_id)",
        "with the time in it the same id is taken twice; without the group one group's claims are another's duplicates; of other parts no day can be made or dropped";
    DefaultPartition = "default_partition", Blocking,
        "`processed_event` has no DEFAULT partition",
        "it would take the ids of days that are forgotten, so that they are new again";
    UniqueIndexes = "unique_indexes", Blocking,
        "`processed_event` and each of its days have no further unique index",
        "it makes new events look like duplicates";
    Triggers = "triggers", Blocking,
        "no trigger and no rule stands on the engine's tables (`payment`: see `payment_rows`)",
        "what they swallow is missing later: a claim, an attempt, a position, a held event";
    RowSecurity = "row_security", Blocking,
        "no row-level security hides rows of these tables from our role",
        "a claim, a payment or an attempt that is there and not seen is asked for again";
    LoggedTables = "logged_tables", Blocking,
        "all of these are ordinary, logged tables",
        "a crash of the server empties an unlogged table";
    PaymentRows = "payment_rows", Advisory,
        "`payment` has no trigger that comes before the row, no rule, and no unique index but its key",
        "a charge whose row is refused is held as `charged_not_recorded`, and never made again";
    Floor = "floor", Blocking,
        "the retention floor is there and not in the future; the first `run` writes it",
        "written anew it could come to lie lower, and what was forgotten would be new";
    Days = "days", Advisory,
        "today's day is there, and the next ones without a hole",
        "`run` makes those that are missing at its start and every two seconds, and a batch makes what it needs";
    OldClaims = "old_claims", Advisory,
        "a `processed_event` without days has an index that begins with `processed_at`",
        "the cleaner finds old claims by it; without it none is deleted, and the table grows";
    Brokers = "brokers", Advisory,
        "a broker answers",
        "nothing is read until one does";
    KafkaTls = "kafka_tls", Advisory,
        "the way to every broker is TLS with its name verified, or does not leave this machine",
        "events and password could be read on the way, and events changed";
    Topic = "topic", Advisory,
        "the topic exists and has partitions",
        "nothing is read until it does";
    CleanupPolicy = "cleanup_policy", Blocking,
        "the topic's `cleanup.policy` has no `compact`",
        "compaction removes events before they are read, and leaves nothing but a hole; a broker that does not tell is not waited for";
    TopicRetention = "topic_retention", Advisory,
        "the topic does not keep its records for ever, or `retention.replay_horizon_ms` says how far back anything is read",
        "ids are remembered for as long as a record can be delivered again: for ever, then, and the table grows without end";
    OldestRecord = "oldest_record", Advisory,
        "the topic's oldest record is younger than the floor",
        "older ones are held as `beyond_horizon`";
    RecordSize = "record_size", Advisory,
        "the largest record that the topic takes (`max.message.bytes`) can be fetched, and fits into `pipeline.buffer_bytes`",
        "a partition stands still before a record that is too large, and says so";
    Replication = "replication", Advisory,
        "the topic has 3 replicas, or as many as there are brokers; nothing is asked of a single broker",
        "a broker's disk takes records with it; a gap is recorded";
    MinInsyncReplicas = "min_insync_replicas", Advisory,
        "the topic's `min.insync.replicas` is 2 or more, and not more than its replicas; of a single broker only the latter",
        "the same";
    OffsetsReplication = "offsets_replication", Advisory,
        "`__consumer_offsets` has 3 replicas, or as many as there are brokers, and `min.insync.replicas` of 2; nothing is asked of a single broker",
        "the database's own position is used when the group's is lost";
    OffsetsRetention = "offsets_retention", Advisory,
        "the broker keeps a stopped group's offsets (`offsets.retention.minutes`) as long as records can be read and ids are remembered",
        "the same";
    SessionTimeout = "session_timeout", Advisory,
        "the broker takes `kafka.session_timeout_ms`; with the assignor `broker` its own is not shorter",
        "a member that is refused says so; one that is given up too early is fenced by the database";
    GroupProtocol = "group_protocol", Advisory,
        "the broker speaks the protocol of `kafka.assignor`, and so does the group as it is",
        "a member that is refused says so";
    Members = "members", Advisory,
        "every member of the group is one of ours and subscribed to the topic",
        "what another client commits for the group is found at the next start, as an offset that is ahead of the database";
    StaticId = "static_id", Advisory,
        "no member of another process has `kafka.instance_id`",
        "of two with one name the older one ends; after a crash the name is still there, and a start must not wait for it";
    Position = "position", Advisory,
        "Kafka's offset of no partition is ahead of the database's",
        "the engine takes it for a database that went back, and charges nothing in doubt";
    Start = "start", Advisory,
        "every partition can begin where the group stands: nothing unsettled is gone, nothing lies beyond the log's end",
        "the partition stops, or records the gap";
    Witness = "witness", Advisory,
        "the last settled record of every partition, as far as it is still in the log, is the same: the topic was not made anew. Where none is left to compare, it is not asked",
        "the owner looks at every start, and stops that partition";
    Provider = "provider", Advisory,
        "the provider answers, whatever it says; no charge is made",
        "nobody is called while it is away, and nothing is lost";
    ProviderTls = "provider_tls", Advisory,
        "`provider.url` is `https`, or of this machine",
        "amounts and token could be read on the way; nothing is charged twice by it";
    BatchTime = "batch_time", Advisory,
        "of the engine that runs here (`admin.listen`), 99 of 100 batches surely end within `pipeline.drain_ms`: what 499 of 500 need at most in each of the five stages is less in sum",
        "a batch that is cut off runs again, and its answers are kept";
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_are_words_of_their_own_for_machines() {
        let names: BTreeSet<&str> = Condition::ALL.iter().map(|condition| condition.name()).collect();
        assert_eq!(names.len(), Condition::ALL.len());
        assert!(names.iter().all(|name| name.len() < 20 && name.chars().all(|char| char.is_ascii_lowercase() || char == '_')));
    }
}
