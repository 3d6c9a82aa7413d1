//! The command line as a document, and the documents held to the command line.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use clap::{Arg, Command, CommandFactory};

use super::Cli;
use crate::tests_support::assert_file;

/// Commands of builds with the feature `lab` only.
const OF_THE_LAB: [&str; 3] = ["provider-stub", "demo", "chaos"];

const HEAD: &str = "\
# Command line

`onceward COMMAND`. Made from `src/cli.rs`; a test holds it true. Results go to standard output, everything else to standard error.
Exit codes: 0 done; 1 failed, or it does not add up; 64 the command or the configuration is wrong.

`--config FILE` names the configuration ([keys](CONFIGURATION.md)); it stands over the variable `ONCEWARD_CONFIG`. Every command takes it, and `--help`.
";

#[test]
fn the_reference_is_made_from_the_commands() {
    assert_file("docs/CLI.md", &markdown());
}

fn markdown() -> String {
    let mut text = HEAD.to_owned();
    let mut cli = Cli::command();
    cli.build();
    for of_the_lab in [false, true] {
        if of_the_lab {
            text.push_str("\n# Only in builds with the feature `lab`\n");
        }
        let commands = cli.get_subcommands().filter(|command| command.get_name() != "help");
        for command in commands.filter(|command| OF_THE_LAB.contains(&command.get_name()) == of_the_lab) {
            describe(&mut text, command, &format!("onceward {}", command.get_name()));
        }
    }
    text
}

fn describe(text: &mut String, command: &Command, path: &str) {
    let about = command.get_long_about().or(command.get_about()).map(ToString::to_string).unwrap_or_default();
    let _ = writeln!(text, "\n## `{path}`\n\n{}", sentence(&about));
    let usage = command.clone().render_usage().to_string();
    let _ = writeln!(text, "\n```text\n{}\n```", usage.trim_start_matches("Usage: ").trim());
    let arguments: Vec<&Arg> =
        command.get_arguments().filter(|argument| !["config", "help"].contains(&argument.get_id().as_str())).collect();
    if !arguments.is_empty() {
        text.push_str("\n| argument | default | meaning |\n| --- | --- | --- |\n");
    }
    for argument in arguments {
        let _ = writeln!(text, "| `{}` | {} | {} |", name(argument), default(argument), meaning(argument));
    }
    for inner in command.get_subcommands().filter(|command| command.get_name() != "help") {
        describe(text, inner, &format!("{path} {}", inner.get_name()));
    }
}

fn name(argument: &Arg) -> String {
    let values = argument.get_value_names().unwrap_or_default().join(" ");
    match (argument.get_long(), argument.get_action().takes_values()) {
        (Some(long), true) => format!("--{long} {values}"),
        (Some(long), false) => format!("--{long}"),
        (None, _) => values,
    }
}

fn default(argument: &Arg) -> String {
    let values: Vec<String> = argument.get_default_values().iter().map(|value| format!("`{}`", value.to_string_lossy())).collect();
    if !argument.get_action().takes_values() || values.is_empty() { "–".to_owned() } else { values.join(", ") }
}

fn meaning(argument: &Arg) -> String {
    let help = argument.get_long_help().or(argument.get_help()).map(ToString::to_string).unwrap_or_default();
    let words: Vec<String> = argument.get_possible_values().iter().map(|value| format!("`{}`", value.get_name())).collect();
    let takes =
        if words.is_empty() || !argument.get_action().takes_values() { String::new() } else { format!(" ({})", words.join(", ")) };
    format!("{}{takes}", sentence(&help).replace('|', "\\|").replace('\n', " "))
}

/// With a full stop, which clap takes away; and nothing in it is taken for a tag.
fn sentence(text: &str) -> String {
    let text = text.trim().replace('<', "&lt;");
    if text.ends_with(['.', '!', '?']) || text.is_empty() { text } else { format!("{text}.") }
}

/// Whoever is on call types what the page says.
#[test]
fn every_command_and_option_that_a_document_shows_is_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = ["README.md", "CONTRIBUTING.md", "SECURITY.md"].map(|name| root.join(name)).to_vec();
    collect(&root.join("docs"), &mut files);
    let (mut seen, mut wrong) = (0, Vec::new());
    for file in files {
        let page = fs::read_to_string(&file).expect("a document");
        for line in commands(&page) {
            seen += 1;
            if let Err(word) = follow(&line) {
                wrong.push(format!("{}: {word}: {line}", file.display()));
            }
        }
    }
    assert!(seen > 100 && wrong.is_empty(), "{seen} commands, of which are wrong:\n{}", wrong.join("\n"));
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            collect(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            files.push(path);
        }
    }
}

/// What begins with `onceward ` in a block for the shell, or between backticks in the text.
fn commands(page: &str) -> Vec<String> {
    let (mut found, mut block) = (Vec::new(), None::<&str>);
    let joined = page.replace("\\\n", " ");
    for line in joined.lines() {
        match (line.strip_prefix("```"), block) {
            (Some(language), None) => block = Some(language),
            (Some(_), Some(_)) => block = None,
            (None, Some("sh")) => {
                let code = line.split(" #").next().unwrap_or_default();
                let parts = code.split([';', '|', '&', '(', ')', '"']).map(str::trim);
                let parts = parts.map(|part| part.trim_start_matches("until ").trim_start_matches("target/debug/"));
                found.extend(parts.filter(|part| part.starts_with("onceward ")).map(ToOwned::to_owned));
            }
            (None, Some(_)) => {}
            (None, None) => {
                let code = line.split('`').skip(1).step_by(2);
                found.extend(code.filter(|code| code.starts_with("onceward ")).map(ToOwned::to_owned));
            }
        }
    }
    found
}

/// The word at which it leaves what there is.
fn follow(line: &str) -> Result<(), String> {
    let mut cli = Cli::command();
    cli.build();
    let mut command = &cli;
    for word in line.split_whitespace().skip(1) {
        if let Some(option) = word.strip_prefix("--") {
            let option = option.split('=').next().unwrap_or_default();
            if !command.get_arguments().any(|known| known.get_long() == Some(option)) {
                return Err(word.to_owned());
            }
        } else if command.has_subcommands() && word != "COMMAND" && word != "…" {
            command = command.find_subcommand(word).ok_or_else(|| word.to_owned())?;
        }
    }
    Ok(())
}
