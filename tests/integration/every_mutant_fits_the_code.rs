//! A mutant that no longer fits the code proves nothing, and one that names no test is killed by nobody. `scripts/mutants` runs them, which
//! takes long; that they can be run is seen here.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

#[test]
fn every_mutant_applies_and_names_what_it_breaks_and_who_must_notice() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (mut seen, mut faults) = (0, Vec::new());
    for entry in fs::read_dir(root.join("tests/mutants")).expect("a folder") {
        let path = entry.expect("an entry").path();
        let patch = fs::read_to_string(&path).expect("a patch");
        seen += 1;
        let mut fault = |what: &str| faults.push(format!("{}: {what}", path.display()));
        let line = |word: &str| patch.lines().find_map(|line| line.strip_prefix(word)).unwrap_or_default();
        if line("Breaks: ").is_empty() {
            fault("no line says what it breaks");
        }
        if !["--lib ", "--test "].iter().any(|binary| line("Tests: ").starts_with(binary)) {
            fault("no line says which tests must fail");
        }
        let mut apply = Command::new("patch");
        apply.args(["-p1", "--dry-run", "--force", "--silent"]).arg("--input").arg(&path).current_dir(root).stdout(Stdio::null());
        if !apply.status().expect("patch is installed").success() {
            fault("does not fit the code");
        }
    }
    assert!(seen > 40 && faults.is_empty(), "{seen} mutants\n{}", faults.join("\n"));
}
