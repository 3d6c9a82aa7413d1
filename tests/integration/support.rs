//! What every test stands on: a world of its own (topic, group, database, provider), engines as child processes, and patience.
//!
//! Everything here is synchronous, so that a test reads from top to bottom. A test never sleeps: it waits for a signal with
//! [`eventually`], under one time limit.
//!
//! Invariant: two tests share a broker and a database server, and nothing in them.

#![allow(dead_code, unused_imports, reason = "the tests decide which parts they need")]

mod acl;
mod books;
mod browser;
mod certificates;
mod cleaner;
mod collector;
mod database;
mod engine;
mod ledger;
mod orders;
mod patience;
mod proxy;
mod raw_header;
mod secured;
mod tls_front;
mod topic;

use std::env;
use std::process::Output;
use std::thread;

use onceward::lab::postgres::{self, Postgres};
use onceward::lab::process;
use onceward::lab::provider_stub::{self, ProviderStub};
use uuid::Uuid;

pub use acl::{Right, Rights, documented_rights};
pub use books::assert_the_books_agree;
pub use browser::Browser;
pub use certificates::{Authority, Folder, Identity};
pub use cleaner::{CLEANERS_LOCK, start_without_cleaning};
pub use collector::{Collector, Span};
pub use database::{Backup, Database, Session};
pub use engine::{ANSWER, Engine, EngineBuilder, get, request, run_onceward_within};
pub use ledger::{assert_charged_once, charges, stub};
pub use orders::Order;
pub use patience::{LIMIT, RaisedAtTheEnd, block_on, eventually, eventually_equal, times};
pub use proxy::Proxy;
pub use secured::{PASSWORD, SecuredKafka};
pub use tls_front::TlsFront;
pub use topic::{Message, Read, Topic};

/// One test's own world.
pub struct World {
    /// The topic, with no records yet.
    pub topic: Topic,
    /// The database, migrated.
    pub database: Database,
    /// The payment provider: honest until it gets a script.
    pub provider: ProviderStub,
    /// The consumer group; nobody has joined it yet.
    pub group: String,
}

impl World {
    /// With a topic of three partitions.
    pub fn new() -> Self {
        Self::with_partitions(3)
    }

    /// With a topic of so many partitions.
    pub fn with_partitions(partitions: i32) -> Self {
        let name = unique_name();
        Self::in_database(&name, Database::migrated(&name), partitions)
    }

    /// With a topic at these brokers.
    pub fn at(brokers: &str, database: Database, partitions: i32) -> Self {
        let name = unique_name();
        Self::with_topic(&name, Topic::at(brokers, &name, partitions, &[]), database)
    }

    /// Whose database has no tables yet.
    pub fn without_tables(partitions: i32) -> Self {
        let name = unique_name();
        Self::in_database(&name, Database::empty(&name), partitions)
    }

    /// Whose database is in a server of its own, which the test may stop.
    pub fn with_a_server(options: &postgres::Options, partitions: i32) -> (Postgres, Self) {
        let (server, database) = Database::in_a_server(options);
        (server, Self::in_database(&unique_name(), database, partitions))
    }

    fn in_database(name: &str, database: Database, partitions: i32) -> Self {
        Self::with_topic(name, Topic::create(name, partitions), database)
    }

    fn with_topic(name: &str, topic: Topic, database: Database) -> Self {
        Self {
            topic,
            database,
            provider: ProviderStub::start(provider_stub::Options::default()).expect("a provider"),
            group: format!("group-{name}"),
        }
    }

    /// An engine of this world, not started yet. Its time limits are the defaults scaled down, for a session of six seconds.
    pub fn engine(&self) -> EngineBuilder {
        EngineBuilder::new(self)
    }

    /// Runs `onceward` to its end with the configuration that [`World::engine`] would get.
    pub fn onceward(&self, arguments: &[&str]) -> Output {
        self.engine().run_to_end(arguments)
    }
}

/// A word that no other test of any run has, with the test's name in it, good for topics and databases alike.
pub fn unique_name() -> String {
    let test = thread::current().name().unwrap_or("nameless").rsplit("::").next().unwrap_or_default().to_owned();
    let unique = Uuid::now_v7().simple().to_string();
    format!("{:.40}_{}", test.to_lowercase(), &unique[20..])
}

/// The brokers that all tests share.
pub fn brokers() -> String {
    server("ONCEWARD_TEST_KAFKA")
}

/// What `scripts/test` says about the servers it has started.
pub fn server(variable: &str) -> String {
    process::end_with_our_parent(process::Signal::Kill).expect("the kernel knows how");
    env::var(variable).unwrap_or_else(|_| panic!("{variable} is not set: these tests need scripts/test, which starts the servers"))
}
