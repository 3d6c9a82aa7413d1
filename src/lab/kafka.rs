//! Apache Kafka itself, one broker from its jars, for the tests and the benches.
//!
//! In: a folder of jars. Out: its address. It owns one Java process and the folder it works in; both are gone when it is dropped, and
//! the process with us should we die.
//!
//! Invariant: it listens on the loopback interface only. As most brokers do, a plain one asks nobody who they are, and makes a topic that a
//! client names, if that client allows it.

mod secured;

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rdkafka::ClientConfig;
use rdkafka::producer::{BaseProducer, Producer as _};

use self::secured::Doors;
pub use self::secured::Secured;
use super::process::{self, Signal, TempFolder};

/// Why there is no broker.
#[derive(Debug, thiserror::Error)]
pub enum KafkaError {
    /// A Java program ended instead of working.
    #[error("{program} failed; the end of its output:\n{output}")]
    Failed {
        /// Which one.
        program: &'static str,
        /// Its last lines.
        output: String,
    },
    /// Another program was faster.
    #[error("the broker's port was taken by another program between the look and the start")]
    PortTaken,
    /// The broker did not answer.
    #[error("Kafka did not answer within {0:?}")]
    TooSlow(Duration),
    /// The operating system's error.
    #[error("{0}: {1}")]
    Io(&'static str, #[source] io::Error),
    /// The Kafka client's error.
    #[error(transparent)]
    Client(#[from] rdkafka::error::KafkaError),
}

/// A running broker.
#[derive(Debug)]
pub struct Kafka {
    port: u16,
    doors: Option<Doors>,
    jars: PathBuf,
    server: Child,
    folder: TempFolder,
}

/// Time to come up; four seconds on an idle machine.
const PATIENCE: Duration = Duration::from_secs(120);
/// Time to go down before it is killed: nobody reads its data again.
const FAREWELL: Duration = Duration::from_secs(10);
/// It would be more on a machine with many cores; it is one broker for one test run.
const JAVA: [&str; 4] =
    ["-Xmx640m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"];

impl Kafka {
    /// Formats a data folder and starts a broker on free ports. `jars` holds the jars that `tests/kafka/pom.xml` names.
    ///
    /// # Errors
    /// See [`KafkaError`].
    pub fn start(jars: &Path) -> Result<Self, KafkaError> {
        Self::start_with(jars, None)
    }

    /// The same, with two more listeners, and an authorizer behind both.
    ///
    /// # Errors
    /// See [`KafkaError`].
    pub fn start_secured(jars: &Path, secured: &Secured) -> Result<Self, KafkaError> {
        Self::start_with(jars, Some(secured))
    }

    fn start_with(jars: &Path, secured: Option<&Secured>) -> Result<Self, KafkaError> {
        // Another program may take a port between the look and the start; then other ports are tried.
        let mut tries = 5;
        loop {
            tries -= 1;
            match Self::start_once(jars, secured) {
                Err(KafkaError::PortTaken) if tries > 0 => {}
                other => return other,
            }
        }
    }

    fn start_once(jars: &Path, secured: Option<&Secured>) -> Result<Self, KafkaError> {
        let folder = TempFolder::new("kafka").map_err(|e| KafkaError::Io("making a folder", e))?;
        let free_port = || process::free_port().map_err(|e| KafkaError::Io("looking for a port", e));
        let (port, controller) = (free_port()?, free_port()?);
        let mut settings = settings(port, controller, folder.path());
        let mut doors = None;
        if let Some(secured) = secured {
            let ports = Doors { sasl: free_port()?, mutual: free_port()? };
            let more = secured.settings(ports, port, controller, folder.path());
            settings += &more.map_err(|e| KafkaError::Io("writing certificates", e))?;
            doors = Some(ports);
        }
        let properties = folder.path().join("server.properties");
        fs::write(&properties, settings).map_err(|e| KafkaError::Io("writing the properties", e))?;

        let program = "kafka.tools.StorageTool";
        let mut format = java(jars, folder.path())?;
        format.args([program, "format", "-t", "b25jZXdhcmQtdGVzdHM0Mg", "-c"]).arg(&properties);
        format.args(secured.map(Secured::credentials).unwrap_or_default());
        let mut format = process::spawn(format, Signal::Kill).map_err(|e| KafkaError::Io("starting java", e))?;
        if !format.wait().map_err(|e| KafkaError::Io("waiting for java", e))?.success() {
            return Err(failed(program, folder.path()));
        }

        let mut server = java(jars, folder.path())?;
        server.arg("kafka.Kafka").arg(&properties);
        let server = process::spawn(server, Signal::Kill).map_err(|e| KafkaError::Io("starting java", e))?;
        let mut kafka = Self { port, doors, jars: jars.to_owned(), server, folder };
        kafka.wait_until_it_answers()?;
        Ok(kafka)
    }

    /// For `bootstrap.servers`.
    #[must_use]
    pub fn bootstrap_servers(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Where a secured one asks for TLS, and for a name by SASL.
    #[must_use]
    pub fn sasl_servers(&self) -> Option<String> {
        self.doors.map(|doors| format!("127.0.0.1:{}", doors.sasl))
    }

    /// Where a secured one asks for TLS with a certificate on both sides.
    #[must_use]
    pub fn mutual_servers(&self) -> Option<String> {
        self.doors.map(|doors| format!("127.0.0.1:{}", doors.mutual))
    }

    /// The jars it runs from: Kafka's own command-line clients are among them.
    #[must_use]
    pub fn jars(&self) -> &Path {
        &self.jars
    }

    /// Where the broker writes what it has to say.
    #[must_use]
    pub fn log(&self) -> PathBuf {
        log(self.folder.path())
    }

    fn wait_until_it_answers(&mut self) -> Result<(), KafkaError> {
        let client: BaseProducer = ClientConfig::new()
            .set("bootstrap.servers", self.bootstrap_servers())
            .set("reconnect.backoff.ms", "50")
            .set("reconnect.backoff.max.ms", "200")
            .set("log_level", "0") // that nobody listens yet is no news
            .create()?;
        let end = Instant::now() + PATIENCE;
        while client.client().fetch_metadata(None, Duration::from_millis(500)).is_err() {
            if self.server.try_wait().map_err(|e| KafkaError::Io("waiting for java", e))?.is_some() {
                return Err(failed("kafka.Kafka", self.folder.path()));
            }
            if Instant::now() > end {
                return Err(KafkaError::TooSlow(PATIENCE));
            }
        }
        Ok(())
    }
}

impl Drop for Kafka {
    fn drop(&mut self) {
        // Killed by now if it would not go.
        let _ = process::end(&mut self.server, Signal::Term, FAREWELL);
    }
}

fn settings(port: u16, controller: u16, folder: &Path) -> String {
    format!(
        "process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
controller.listener.names=CONTROLLER
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
log.dirs={data}
auto.create.topics.enable=true
offsets.topic.replication.factor=1
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=4
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=1000
group.consumer.min.heartbeat.interval.ms=200
group.consumer.heartbeat.interval.ms=500
group.consumer.min.session.timeout.ms=6000
group.consumer.session.timeout.ms=6000
log.retention.ms=-1
",
        data = folder.join("data").display()
    )
}

fn java(jars: &Path, folder: &Path) -> Result<Command, KafkaError> {
    let open = || File::options().create(true).append(true).open(log(folder));
    let (out, err) = open().and_then(|log| Ok((log.try_clone()?, log))).map_err(|e| KafkaError::Io("opening the log", e))?;
    let mut command = Command::new("java");
    command.args(JAVA).arg("-cp").arg(jars.join("*")).stdin(Stdio::null()).stdout(out).stderr(err).current_dir(folder);
    Ok(command)
}

fn log(folder: &Path) -> PathBuf {
    folder.join("output.log")
}

fn failed(program: &'static str, folder: &Path) -> KafkaError {
    let text = fs::read_to_string(log(folder)).unwrap_or_default();
    if text.contains("Address already in use") {
        return KafkaError::PortTaken;
    }
    let lines: Vec<&str> = text.lines().collect();
    KafkaError::Failed { program, output: lines[lines.len().saturating_sub(15)..].join("\n") }
}
