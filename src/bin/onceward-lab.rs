//! Runs a command with a private PostgreSQL and Apache Kafka around it: see `onceward::lab::services`. `onceward-lab chaos …` is
//! `onceward chaos …`.

use std::ffi::OsString;
use std::process::ExitCode;

fn main() -> ExitCode {
    let mut arguments: Vec<OsString> = std::env::args_os().collect();
    if arguments.get(1).is_some_and(|word| word == "chaos") {
        arguments[0] = "onceward".into();
        return onceward::cli::main(arguments, std::env::vars_os());
    }
    onceward::lab::services::main()
}
