//! Whoever deploys copies a unit, a compose file or a manifest. A key in it that was renamed, a flag that is gone or a time limit that is too
//! short is met on their machine, at the first release or at the first crash. Their own tools look at these files too: `scripts/ops`.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use onceward::app::LEAVE;
use onceward::config::{Config, KEYS, Need};
use onceward::lab::process::TempFolder;
use serde::Deserialize as _;
use serde_yaml_ng::{Deserializer, Value};

use crate::support::{LIMIT, World, run_onceward_within};

const REQUIRED: [Need; 3] = [Need::Kafka, Need::Database, Need::Provider];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(name: &str) -> String {
    fs::read_to_string(root().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn yaml(name: &str) -> Vec<Value> {
    let text = read(name);
    let documents =
        Deserializer::from_str(&text).map(|part| Value::deserialize(part).unwrap_or_else(|error| panic!("{name}: {error}")));
    documents.collect()
}

fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| panic!("no text: {value:?}"), ToOwned::to_owned)
}

fn texts(value: &Value) -> Vec<String> {
    value.as_sequence().unwrap_or_else(|| panic!("no list: {value:?}")).iter().map(text).collect()
}

/// What a file makes of the service.
struct Deployment {
    file: &'static str,
    environment: Vec<(String, String)>,
    /// The configuration file that it brings along.
    configuration: Option<String>,
    /// The commands that it starts.
    commands: Vec<Vec<String>>,
    /// After SIGTERM it is killed.
    grace: Duration,
}

/// `ops/compose.yaml`, the service of this name.
fn service(name: &str) -> Value {
    let mut service = yaml("ops/compose.yaml").remove(0)["services"][name].clone();
    service.apply_merge().expect("what is merged is there");
    service
}

fn compose() -> Deployment {
    let service = service("onceward");
    let environment = service["environment"].as_mapping().expect("variables").iter();
    let environment = environment.map(|(name, value)| {
        // ${NAME:-what is taken without it}
        let value = text(value);
        let default = value.strip_prefix("${").and_then(|rest| rest.split_once(":-")).map(|(_, rest)| rest.trim_end_matches('}'));
        (text(name), default.unwrap_or(&value).to_owned())
    });
    let seconds = text(&service["stop_grace_period"]);
    Deployment {
        file: "ops/compose.yaml",
        environment: environment.collect(),
        configuration: None,
        commands: vec![texts(&service["command"])],
        grace: Duration::from_secs(seconds.trim_end_matches('s').parse().expect("seconds")),
    }
}

/// `ops/kubernetes.yaml`, the object of this kind.
fn object(kind: &str) -> Value {
    yaml("ops/kubernetes.yaml").into_iter().find(|object| object["kind"] == kind).unwrap_or_else(|| panic!("no {kind}"))
}

fn kubernetes() -> Deployment {
    let pod = object("StatefulSet")["spec"]["template"]["spec"].clone();
    let container = &pod["containers"][0];
    let environment = container["env"].as_sequence().expect("variables").iter().map(|variable| {
        let value = variable["value"].as_str().map_or_else(
            || {
                assert_eq!(variable["valueFrom"]["fieldRef"]["fieldPath"], "metadata.name");
                "onceward-0".to_owned()
            },
            ToOwned::to_owned,
        );
        (text(&variable["name"]), value)
    });
    Deployment {
        file: "ops/kubernetes.yaml",
        environment: environment.collect(),
        configuration: Some(text(&object("ConfigMap")["data"]["onceward.toml"])),
        commands: vec![texts(&container["args"])],
        grace: Duration::from_secs(pod["terminationGracePeriodSeconds"].as_u64().expect("seconds")),
    }
}

/// The values of a key of `ops/onceward.service`.
fn unit(key: &str) -> Vec<String> {
    let unit = read("ops/onceward.service");
    let values = unit.lines().filter_map(|line| line.split_once('=')).filter(|(name, _)| *name == key);
    values.map(|(_, value)| value.to_owned()).collect()
}

fn systemd() -> Deployment {
    let command = |line: String| line.trim_start_matches('-').split_whitespace().skip(1).map(ToOwned::to_owned).collect();
    let environment = unit("Environment");
    Deployment {
        file: "ops/onceward.service",
        environment: environment
            .iter()
            .filter_map(|line| line.split_once('='))
            .map(|(name, value)| (name.into(), value.into()))
            .collect(),
        // The unit expects one; the shortest there is.
        configuration: Some("[kafka]\nbrokers = \"kafka:9092\"\n[provider]\nurl = \"https://payments.example\"\n".to_owned()),
        commands: ["ExecStartPre", "ExecStart"].into_iter().flat_map(unit).map(command).collect(),
        grace: Duration::from_secs(unit("TimeoutStopSec")[0].parse().expect("seconds")),
    }
}

impl Deployment {
    fn all() -> [Self; 3] {
        [compose(), kubernetes(), systemd()]
    }

    /// What the service makes of it, with files in a folder of the test's own.
    fn config(&self) -> Config {
        let folder = TempFolder::new("shipped").expect("a folder");
        let path = |path: &str| folder.path().join(path.trim_start_matches('/').replace('/', "-"));
        let here = |text: &str| {
            let mut text = text.to_owned();
            for name in ["database-url", "provider-token", "admin-token"] {
                for place in ["/run/secrets", "/etc/onceward/secrets", "/etc/onceward"] {
                    let there = format!("{place}/{name}");
                    fs::write(path(&there), if name == "database-url" { "postgres://a:b@db/c".into() } else { "0".repeat(64) })
                        .expect("a file");
                    text = text.replace(&there, &path(&there).display().to_string());
                }
            }
            text
        };
        let file: Option<PathBuf> = self.configuration.as_ref().map(|text| {
            fs::write(path("onceward.toml"), here(text)).expect("a file");
            path("onceward.toml")
        });
        let names_its_file = self.environment.iter().any(|(name, _)| name == "ONCEWARD_CONFIG");
        assert_eq!(names_its_file, file.is_some(), "{}", self.file);
        let others = self.environment.iter().filter(|(name, _)| name != "ONCEWARD_CONFIG");
        let environment: Vec<(OsString, OsString)> = others.map(|(name, value)| (name.into(), here(value).into())).collect();
        Config::load(file.as_deref(), environment, &REQUIRED).unwrap_or_else(|error| panic!("{}: {error}", self.file))
    }
}

#[test]
fn every_file_gives_a_configuration_that_the_service_takes() {
    for deployment in Deployment::all() {
        let config = deployment.config();
        let is_reached = deployment.file == "ops/onceward.service" || config.admin.listen.ip().is_unspecified();
        assert!(
            is_reached,
            "{}: probes and scrapes come from elsewhere, and it listens on {}",
            deployment.file, config.admin.listen
        );
    }
    let image = read("ops/Dockerfile");
    let variables = image.lines().filter_map(|line| line.strip_prefix("ENV ")).flat_map(str::split_whitespace);
    let variables: Vec<(OsString, OsString)> =
        variables.filter_map(|word| word.split_once('=')).map(|(name, value)| (name.into(), value.into())).collect();
    assert!(!variables.is_empty());
    Config::load(None, variables, &[]).expect("the image's variables are known");
}

#[test]
fn every_command_that_a_file_starts_is_there() {
    let stub = texts(&service("provider")["command"]);
    for words in Deployment::all().into_iter().flat_map(|deployment| deployment.commands).chain([stub]) {
        let words: Vec<&str> = words.iter().map(String::as_str).chain(["--help"]).collect();
        let output = run_onceward_within(LIMIT, &words, &[]);
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    assert!(read("ops/Dockerfile").contains("ENTRYPOINT [\"/usr/bin/onceward\"]\nCMD [\"run\"]"));
    assert_eq!(systemd().commands, [["check"], ["run"]], "the certificate first");
}

#[test]
fn nobody_is_killed_before_its_drain_is_over() {
    for deployment in Deployment::all() {
        let needed = deployment.config().pipeline.drain + LEAVE;
        assert!(deployment.grace >= needed, "{}: {:?}, and {needed:?} are needed", deployment.file, deployment.grace);
    }
}

#[test]
fn nothing_runs_as_root_and_nothing_can_be_written() {
    let user = read("ops/Dockerfile").lines().rev().find_map(|line| line.strip_prefix("USER ").map(ToOwned::to_owned));
    assert_eq!(user.as_deref(), Some("65532:65532"));
    for name in ["onceward", "provider", "prometheus"] {
        let service = service(name);
        assert_eq!((service["read_only"].as_bool(), texts(&service["cap_drop"])), (Some(true), vec!["ALL".to_owned()]), "{name}");
    }
    let pod = object("StatefulSet")["spec"]["template"]["spec"].clone();
    let container = &pod["containers"][0]["securityContext"];
    assert_eq!(
        (pod["securityContext"]["runAsNonRoot"].as_bool(), pod["securityContext"]["runAsUser"].as_u64()),
        (Some(true), Some(65532))
    );
    assert_eq!(
        (container["readOnlyRootFilesystem"].as_bool(), container["allowPrivilegeEscalation"].as_bool()),
        (Some(true), Some(false))
    );
    assert_eq!(
        (unit("User"), unit("ProtectSystem"), unit("NoNewPrivileges")),
        (vec!["onceward".into()], vec!["strict".into()], vec!["yes".into()])
    );
}

#[test]
fn no_secret_stands_in_a_file_that_is_shipped() {
    let secret: BTreeSet<String> = KEYS.iter().filter(|key| key.secret).map(|key| key.variable()).collect();
    assert!(secret.len() > 2);
    let given: BTreeMap<String, String> = Deployment::all().into_iter().flat_map(|deployment| deployment.environment).collect();
    assert!(given.keys().all(|name| !secret.contains(name)), "{given:?}");
    for file in ["ops/compose.yaml", "ops/kubernetes.yaml"] {
        for line in read(file).lines().filter(|line| line.to_lowercase().contains("password")) {
            assert!(line.contains("/run/secrets/") || line.contains("./secrets/") || line.contains("secrets: ["), "{file}: {line}");
        }
    }
    let ignored = [".gitignore", "ops/Dockerfile.dockerignore"]
        .map(|file| read(file).lines().any(|line| line.trim_start_matches('/') == "ops/secrets"));
    assert_eq!(ignored, [true, true], "the folder of the secrets is neither committed nor copied into an image");
}

#[test]
fn whoever_probes_and_scrapes_is_answered() {
    let container = object("StatefulSet")["spec"]["template"]["spec"]["containers"][0].clone();
    let probes = ["livenessProbe", "readinessProbe"].map(|probe| text(&container[probe]["httpGet"]["path"]));
    let world = World::new();
    let engine = world.engine().start();
    for path in probes.iter().map(String::as_str).chain(["/metrics"]) {
        assert_eq!(engine.get(path).map(|(status, _)| status), Some(200), "{path}");
    }
    let ports = [
        u64::from(compose().config().admin.listen.port()),
        u64::from(kubernetes().config().admin.listen.port()),
        container["ports"][0]["containerPort"].as_u64().expect("a port"),
        object("Service")["spec"]["ports"][0]["port"].as_u64().expect("a port"),
    ];
    let scraped = yaml("ops/prometheus.yaml").remove(0)["scrape_configs"][0].clone();
    let target = text(&scraped["static_configs"][0]["targets"][0]);
    assert!(ports.iter().all(|port| target == format!("onceward:{port}")), "{ports:?}, and {target} is scraped");
    assert!(text(&scraped["job_name"]).contains("onceward"), "the alerts know it by that");
    assert_eq!(engine.terminate().code(), Some(0));
}

#[test]
fn what_compose_mounts_is_there() {
    for (name, service) in yaml("ops/compose.yaml").remove(0)["services"].as_mapping().expect("services") {
        let volumes = service["volumes"].as_sequence().into_iter().flatten().map(text);
        for file in volumes.filter_map(|volume| Some(volume.strip_prefix("./")?.split(':').next()?.to_owned())) {
            assert!(root().join("ops").join(&file).exists(), "{name:?}: {file}");
        }
    }
}

#[test]
fn a_package_holds_what_a_dependent_needs_and_nothing_else() {
    let output = Command::new(env!("CARGO")).args(["package", "--list", "--allow-dirty", "--offline"]).current_dir(root()).output();
    let output = output.expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let files = String::from_utf8(output.stdout).expect("names");
    let folders: BTreeSet<&str> = files.lines().filter_map(|file| file.split_once('/')).map(|(folder, _)| folder).collect();
    assert!(folders.contains("src") && folders.contains("migrations"), "{files}");
    assert!(
        folders.iter().all(|folder| ["src", "migrations", "config", "examples", "docs", "ops"].contains(folder)),
        "{folders:?}"
    );
    // What the code takes in at compile time is in it.
    assert!(files.contains("src/admin/page.html") && files.contains("/up.sql"), "{files}");
}
