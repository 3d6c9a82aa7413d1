//! Runs a command with a private PostgreSQL and Apache Kafka around it: see `onceward::lab::services`.

use std::process::ExitCode;

fn main() -> ExitCode {
    onceward::lab::services::main()
}
