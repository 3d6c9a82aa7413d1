//! A document that names what is not there is a promise that nobody keeps: a test, a key, a metric, a page, a command that somebody types at
//! night. Commands and options are compared beside the command line (`src/cli.rs`); the tutorial has a test of its own.

mod blocks;
mod links;
mod markdown;
mod names;

use std::fs;
use std::path::{Path, PathBuf};

use self::markdown::Page;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every document of the repository, by its name below the root.
fn pages() -> Vec<Page> {
    let mut files = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"].map(|name| root().join(name)).to_vec();
    collect(&root().join("docs"), &mut files);
    collect(&root().join("benches"), &mut files);
    files.sort();
    files.iter().map(|file| Page::read(root(), file)).collect()
}

fn collect(folder: &Path, documents: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() && !path.ends_with("node_modules") {
            collect(&path, documents);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            documents.push(path);
        }
    }
}

#[test]
fn every_test_and_function_that_a_document_names_is_there() {
    let (mut seen, mut missing) = (0, Vec::new());
    for page in pages() {
        for (path, name) in references(&page.text) {
            seen += 1;
            // The documents leave out the folder: tests are named from here, code also from `src`.
            let places = ["", "tests/integration", "src"].map(|folder| root().join(folder).join(path));
            let has_it = |place: &PathBuf| fs::read_to_string(place).is_ok_and(|code| defines(&code, name));
            if !places.iter().any(has_it) {
                missing.push(format!("{}: {path}::{name}", page.name));
            }
        }
    }
    assert!(seen > 100 && missing.is_empty(), "{seen} references, of which lead nowhere:\n{}", missing.join("\n"));
}

/// Each `path.rs::name` of a text.
fn references(text: &str) -> impl Iterator<Item = (&str, &str)> {
    const MARK: &str = ".rs::";
    text.match_indices(MARK).map(move |(at, _)| {
        let is_path = |c: char| c.is_ascii_alphanumeric() || "_-/.".contains(c);
        let start = text[..at].trim_end_matches(is_path).len();
        let name = &text[at + MARK.len()..];
        let end = name.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(name.len());
        (&text[start..at + ".rs".len()], &name[..end])
    })
}

fn defines(code: &str, name: &str) -> bool {
    let follows = |rest: &str| rest.starts_with(['(', '<']);
    !name.is_empty() && code.match_indices(&format!("fn {name}")).any(|(at, found)| follows(&code[at + found.len()..]))
}

/// A reader copies what stands there: it must be what is compiled and run.
#[test]
fn every_block_of_the_handlers_page_is_a_part_of_an_example_or_a_test() {
    let page = fs::read_to_string(root().join("docs/howto/write-a-handler.md")).expect("the page");
    let files = ["examples/ledger.rs", "examples/notify.rs", "examples/stock.rs", USERS_TEST].map(|file| root().join(file));
    let code = files.map(|file| fs::read_to_string(file).expect("code"));
    let blocks: Vec<&str> = page.split("```rust\n").skip(1).filter_map(|rest| rest.split("\n```").next()).collect();
    assert_eq!(blocks.len(), 7);
    for block in blocks {
        assert!(code.iter().any(|code| code.contains(block)), "stands in no example:\n{block}");
    }
}

const USERS_TEST: &str = "tests/integration/a_handler_of_ones_own_is_tested_with_what_the_crate_has.rs";
