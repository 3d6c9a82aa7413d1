//! Who depends on the crate downloads the package: what builds it, runs it and explains it, and nothing else.

use std::path::Path;
use std::process::{Command, Stdio};

/// By folder or by file. Pictures, benches, tests and what is measured against stay at home.
const BELONGS: [&str; 11] = [
    "src/",
    "migrations/",
    "examples/",
    "config/example.toml",
    "docs/",
    "ops/",
    "README.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "LICENSE-APACHE",
    "LICENSE-MIT",
];
/// What cargo adds.
const OF_CARGO: [&str; 4] = [".cargo_vcs_info.json", "Cargo.lock", "Cargo.toml", "Cargo.toml.orig"];
/// Kinds of files that somebody reads or something runs.
const KINDS: [&str; 10] = ["rs", "sql", "toml", "md", "html", "yaml", "json", "sh", "service", "dockerignore"];

#[test]
fn the_package_holds_what_belongs_there_and_all_of_it() {
    let cargo = Command::new(env!("CARGO"))
        .args(["package", "--list", "--allow-dirty", "--offline", "--quiet"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .stdin(Stdio::null())
        .output()
        .expect("cargo runs");
    assert!(cargo.status.success(), "{}", String::from_utf8_lossy(&cargo.stderr));
    let list = String::from_utf8(cargo.stdout).expect("paths are text");
    let ours: Vec<&str> = list.lines().filter(|path| !OF_CARGO.contains(path)).collect();

    let is_fitting = |path: &str| {
        let place = BELONGS.iter().any(|place| if place.ends_with('/') { path.starts_with(place) } else { path == *place });
        let kind = Path::new(path).extension().is_none_or(|kind| KINDS.iter().any(|known| kind == *known));
        place && kind
    };
    let strangers: Vec<&&str> = ours.iter().filter(|path| !is_fitting(path)).collect();
    assert!(strangers.is_empty(), "not to be shipped: {strangers:?}");
    for place in BELONGS {
        assert!(ours.iter().any(|path| path.starts_with(place)), "{place} is missing");
    }
}
