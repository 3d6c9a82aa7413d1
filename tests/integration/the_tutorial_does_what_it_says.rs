//! Somebody who meets the service for the first time types what its tutorial says, in an empty folder, and sees what it shows. One command that
//! does not work, and there is no second time.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use std::{env, iter};

use onceward::lab::process::{self, Signal, TempFolder, free_port};

use crate::support::{Database, brokers, server, unique_name};

const TUTORIAL: &str = include_str!("../../docs/TUTORIAL.md");
/// Somebody who reads takes ten minutes; a machine waits for the session of a member with a name, and for little else.
const LIMIT: Duration = Duration::from_secs(300);
/// Kafka's own tools, as its distribution calls them.
const TOOLS: [(&str, &str); 2] = [
    ("kafka-topics.sh", "org.apache.kafka.tools.TopicCommand"),
    ("kafka-consumer-groups.sh", "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand"),
];

/// The text of each block of a language.
fn blocks(language: &str) -> Vec<String> {
    let fence = format!("```{language}");
    let mut lines = TUTORIAL.lines();
    let next = || {
        lines.by_ref().find(|line| *line == fence)?;
        Some(lines.by_ref().take_while(|line| *line != "```").map(|line| format!("{line}\n")).collect())
    };
    iter::from_fn(next).collect()
}

#[test]
fn every_command_of_the_tutorial_runs_from_an_empty_folder_and_shows_what_is_shown() {
    let folder = TempFolder::new("tutorial").expect("a folder");
    let (tools, work) = (folder.path().join("tools"), folder.path().join("work"));
    for place in [&tools, &work] {
        fs::create_dir(place).expect("a folder");
    }
    make_tools(&tools);

    let database = Database::empty(&unique_name());
    // Whatever happens, what was started ends with the shell.
    let script = format!("set -euo pipefail\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n{}", blocks("sh").concat());
    let [out, err] = ["stdout", "stderr"].map(|name| folder.path().join(name));
    let mut shell = Command::new("bash");
    shell.arg("-c").arg(script).current_dir(&work).stdin(Stdio::null());
    shell.stdout(File::create(&out).expect("a file")).stderr(File::create(&err).expect("a file"));
    shell.env("PATH", format!("{}:{}", tools.display(), env::var("PATH").unwrap_or_default()));
    shell.env("KAFKA", brokers()).env("DATABASE", database.url());
    for name in ["PROVIDER", "ADMIN"] {
        shell.env(name, format!("127.0.0.1:{}", free_port().expect("a free port")));
    }
    let mut shell = process::spawn(shell, Signal::Kill).expect("a shell");
    let status = process::wait(&mut shell, LIMIT).expect("a child is waited for");
    if status.is_none() {
        let _ = process::end(&mut shell, Signal::Term, Duration::from_secs(10)); // the assertion tells more
    }

    let [said, complained] = [&out, &err].map(|file| fs::read_to_string(file).expect("text"));
    let log = fs::read_to_string(work.join("onceward.log")).unwrap_or_default();
    assert!(status.is_some_and(|status| status.success()), "{status:?}\n{said}\n{complained}\n{log}");

    let mut shown = said.lines();
    for line in blocks("text").iter().flat_map(|block| block.lines()) {
        assert!(shown.any(|said| fits(line, said)), "not shown, or not in this order: {line}\n{said}");
    }
    let paid = database.count("SELECT count(*) FROM payment WHERE status = 'charged'");
    assert_eq!(
        paid,
        database.count("SELECT count(DISTINCT event_id) FROM processed_event"),
        "each id that was claimed was charged once"
    );
    assert_eq!(database.count("SELECT count(*) FROM payment WHERE order_id = 42"), 1);
}

fn make_tools(folder: &Path) {
    let jars = server("ONCEWARD_TEST_KAFKA_JARS");
    let quiet = "-Dorg.slf4j.simpleLogger.defaultLogLevel=off -XX:TieredStopAtLevel=1";
    let of_kafka = TOOLS.map(|(name, class)| (name, format!("java {quiet} -cp '{jars}/*' {class}")));
    let binary = env::var("ONCEWARD_TEST_BINARY").unwrap_or_else(|_| env!("CARGO_BIN_EXE_onceward").to_owned());
    for (name, command) in of_kafka.into_iter().chain([("onceward", format!("'{binary}'"))]) {
        let tool = folder.join(name);
        fs::write(&tool, format!("#!/bin/sh\nexec {command} \"$@\"\n")).expect("a file");
        fs::set_permissions(&tool, fs::Permissions::from_mode(0o755)).expect("it is made executable");
    }
}

/// `…` stands for anything.
fn fits(pattern: &str, line: &str) -> bool {
    let mut parts = pattern.split('…');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = line.strip_prefix(first) else { return false };
    let mut last = None;
    for part in parts {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
        last = Some(part);
    }
    // Behind the last `…` the line ends as the pattern does.
    rest.is_empty() || last.is_some_and(|part| part.is_empty() || line.ends_with(part))
}
