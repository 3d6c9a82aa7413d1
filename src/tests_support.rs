//! What the unit tests share.

/// Asserts that a file of the repository is exactly what the code makes; `BLESS=1` writes it instead.
pub fn assert_file(name: &str, made: &str) {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(&path, made).expect("the file can be written");
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(found == made, "{name} is not what the code makes: run `BLESS=1 cargo test --lib` and look at the difference");
}
