//! A Kafka that lets in only whom it knows, one for all tests of its chapter, and certificates that are worth something to it.

use std::path::Path;
use std::process::{Command, Output};
use std::sync::{LazyLock, Mutex, PoisonError};

use onceward::lab::kafka::{Kafka, Secured};

use super::engine::EngineBuilder;
use super::{Authority, Database, Folder, World, server, unique_name};

/// The broker, as its clients see it.
pub struct SecuredKafka {
    /// Where the administrator comes in, who may do everything.
    pub plain: String,
    /// TLS, and a name by SASL.
    pub sasl: String,
    /// TLS with a certificate on both sides.
    pub mutual: String,
    pub authority: Authority,
    /// The file that `ssl.ca.location` names.
    pub authority_file: String,
}

/// Known to the broker by name and password.
const USERS: [&str; 6] = ["billing", "produce", "check", "audit", "offsets", "status"];
pub const PASSWORD: &str = "tr0ub4dor&3";

/// The process and the files of secrets. Gone when the tests end; the kernel ends the process if they do not end in order.
static RUNNING: Mutex<Option<(Kafka, Folder)>> = Mutex::new(None);

extern "C" fn end() {
    drop(RUNNING.lock().unwrap_or_else(PoisonError::into_inner).take());
}

impl SecuredKafka {
    /// The one that the tests share.
    pub fn shared() -> &'static Self {
        static SHARED: LazyLock<SecuredKafka> = LazyLock::new(SecuredKafka::start);
        &SHARED
    }

    fn start() -> Self {
        let authority = Authority::new();
        let broker = authority.sign("127.0.0.1");
        let secured = Secured {
            identity: format!("{}{}", broker.key, broker.certificate),
            authority: authority.pem(),
            users: USERS.map(|user| (user.to_owned(), PASSWORD.to_owned())).into(),
        };
        let kafka = Kafka::start_secured(Path::new(&server("ONCEWARD_TEST_KAFKA_JARS")), &secured).expect("a secured broker");
        let address = |address: Option<String>| address.expect("a secured one listens there");
        let files = Folder::new();
        let shared = Self {
            plain: kafka.bootstrap_servers(),
            sasl: address(kafka.sasl_servers()),
            mutual: address(kafka.mutual_servers()),
            authority_file: files.put("authority.pem", &authority.pem()),
            authority,
        };
        *RUNNING.lock().unwrap_or_else(PoisonError::into_inner) = Some((kafka, files));
        // SAFETY: the function takes nothing and unwinds nowhere; it runs once, at the end of the process.
        assert_eq!(unsafe { libc::atexit(end) }, 0);
        shared
    }

    /// A topic and all the rest, made by the administrator.
    pub fn world(&self, partitions: i32) -> World {
        World::at(&self.plain, Database::migrated(&unique_name()), partitions)
    }

    /// A file of secrets with this content.
    pub fn file(&self, name: &str, content: &str) -> String {
        let running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        running.as_ref().expect("it runs").1.put(name, content)
    }

    /// An engine that comes by the front door as this user.
    pub fn engine(&self, world: &World, mechanism: &str, user: &str) -> EngineBuilder {
        self.unnamed(world, mechanism).set("kafka.options.sasl.username", user).set("kafka.options.sasl.password", PASSWORD)
    }

    /// One that does not say who it is.
    pub fn unnamed(&self, world: &World, mechanism: &str) -> EngineBuilder {
        world
            .engine()
            .set("kafka.brokers", self.sasl.as_str())
            .set("kafka.options.security.protocol", "sasl_ssl")
            .set("kafka.options.sasl.mechanism", mechanism)
            .set("kafka.options.ssl.ca.location", self.authority_file.as_str())
    }

    /// Gives what `ops/acls.sh` says that a command needs, by that script.
    pub fn grant(&self, world: &World, command: &str, user: &str) {
        let jars = server("ONCEWARD_TEST_KAFKA_JARS");
        let acls = format!(
            "java -Xmx128m -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Dorg.slf4j.simpleLogger.defaultLogLevel=warn -cp {jars}/* \
             org.apache.kafka.tools.AclCommand --bootstrap-server {}",
            self.plain
        );
        let mut script = Command::new("sh");
        script.args(["-f", "ops/acls.sh", command, &format!("User:{user}")]).current_dir(env!("CARGO_MANIFEST_DIR"));
        script.env("KAFKA_ACLS", acls).env("TOPIC", world.topic.name()).env("GROUP", &world.group);
        let Output { status, stdout, stderr } = script.output().expect("a shell");
        let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(status.success(), "{}{}", said(&stdout), said(&stderr));
    }
}
