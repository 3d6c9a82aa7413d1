//! What the documents give to be copied.
//!
//! | language | what is held |
//! | --- | --- |
//! | `sh` | the shell takes it; its `onceward` commands and options exist (`src/cli.rs`); of the tutorial every line is run |
//! | `rust` | it stands in an example or a test (see the parent) |
//! | `toml` | the service takes it as its configuration; Cargo's manifest is TOML |
//! | `json` | it is JSON, and what is an event decodes |
//! | `yaml` | it is YAML |
//! | `sql` | it runs, page by page, in a database as `onceward migrate` makes it; or, of the pages in [`BEFORE`], in one that another service has made |
//! | `text`, or nothing | is shown, not copied |

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use onceward::config::Config;
use onceward::event;
use onceward::lab::process::TempFolder;
use serde::de::IgnoredAny;
use serde_json::Value;

use super::markdown::{Block, Page};
use super::{pages, root};
use crate::support::{Database, LIMIT, run_onceward_within, unique_name};

/// Pages whose SQL is for a database that onceward has not seen yet, and what stands in it, unless the page makes it.
const BEFORE: [(&str, Option<&str>); 2] = [
    ("docs/howto/move-from-kafkajs.md", Some("benches/peers/kafkajs-typeorm/tables.sql")),
    ("docs/howto/move-from-spring-kafka.md", None),
];

fn each(language: &str, mut look: impl FnMut(&Page, &Block) -> Result<(), String>) {
    let (mut seen, mut wrong) = (0, Vec::new());
    for page in pages() {
        for block in page.blocks.iter().filter(|block| block.language == language) {
            seen += 1;
            if let Err(error) = look(&page, block) {
                wrong.push(format!("{}:{}: {error}", page.name, block.line));
            }
        }
    }
    assert!(seen > 0 && wrong.is_empty(), "{seen} blocks, of which are wrong:\n{}", wrong.join("\n"));
}

#[test]
fn nothing_is_given_to_be_copied_that_nobody_tries() {
    const LANGUAGES: [&str; 8] = ["sh", "rust", "toml", "json", "yaml", "sql", "text", ""];
    let pages = pages();
    let others = pages.iter().flat_map(|page| page.blocks.iter().map(move |block| (page, block)));
    let others: Vec<String> = others
        .filter(|(_, block)| !LANGUAGES.contains(&block.language.as_str()))
        .map(|(page, block)| format!("{}:{}: {}", page.name, block.line, block.language))
        .collect();
    assert_eq!(others, [""; 0]);
}

#[test]
fn the_shell_takes_what_is_for_it() {
    each("sh", |_, block| {
        let mut shell = Command::new("bash").arg("-n").stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("a shell");
        shell.stdin.take().expect("a pipe").write_all(block.text.as_bytes()).expect("it reads");
        let output = shell.wait_with_output().expect("it ends");
        if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
    });
}

#[test]
fn the_service_takes_the_configurations() {
    let folder = TempFolder::new("documents").expect("a folder");
    each("toml", |_, block| {
        if block.text.contains("dependencies]") {
            return block.text.parse::<toml::Table>().map(drop).map_err(|error| error.to_string());
        }
        let path = folder.path().join("onceward.toml");
        std::fs::write(&path, on_this_machine(&block.text, folder.path())).expect("a file");
        Config::load(Some(&path), [], &[]).map(drop).map_err(|error| error.to_string())
    });
}

/// Files that the text names are made in the folder, and named there.
fn on_this_machine(text: &str, folder: &Path) -> String {
    const PLACES: [&str; 2] = ["/etc/onceward/", "/run/secrets/"];
    let mut here = text.to_owned();
    for place in PLACES {
        for (at, _) in text.match_indices(place) {
            let file = text[at..].split('"').next().unwrap_or_default();
            let made = folder.join(file[place.len()..].replace('/', "-"));
            std::fs::write(&made, if file.contains("url") { "postgres://a:b@db/c".to_owned() } else { "0".repeat(64) })
                .expect("a file");
            here = here.replace(&format!("{file}\""), &format!("{}\"", made.display()));
        }
    }
    here
}

#[test]
fn events_decode() {
    each("json", |_, block| {
        for value in serde_json::Deserializer::from_str(&block.text).into_iter::<Value>() {
            let value = value.map_err(|error| error.to_string())?;
            if value.get("eventType").is_some() {
                event::decode(Some(value.to_string().as_bytes())).map_err(|rejection| rejection.error)?;
            }
        }
        Ok(())
    });
}

#[test]
fn yaml_is_yaml() {
    let read = |text: &str| {
        serde_yaml_ng::Deserializer::from_str(text)
            .try_for_each(|part| serde::Deserialize::deserialize(part).map(|_: IgnoredAny| ()).map_err(|error| error.to_string()))
    };
    let pages = pages();
    let blocks = pages.iter().flat_map(|page| &page.blocks).filter(|block| block.language == "yaml");
    blocks.for_each(|block| read(&block.text).unwrap_or_else(|error| panic!("{error}: {}", block.text)));
}

#[test]
fn statements_run_in_the_database_that_they_are_for() {
    for page in pages().iter().filter(|page| page.blocks.iter().any(|block| block.language == "sql")) {
        let name = unique_name();
        let before = BEFORE.iter().find(|(before, _)| *before == page.name);
        let database = match before {
            Some((_, tables)) => {
                let database = Database::empty(&name);
                if let Some(tables) = tables {
                    database.execute(&std::fs::read_to_string(root().join(tables)).expect("tables"));
                }
                database
            }
            None => Database::migrated(&name),
        };
        for block in page.blocks.iter().filter(|block| block.language == "sql") {
            database.execute(&block.text);
        }
        if before.is_some() {
            let migrated = run_onceward_within(LIMIT, &["migrate"], &[("ONCEWARD_DATABASE_URL", database.url())]);
            assert!(migrated.status.success(), "{}: {}", page.name, String::from_utf8_lossy(&migrated.stderr));
        }
    }
}
