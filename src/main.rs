//! The service binary: everything it does is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    onceward::cli::main(std::env::args_os(), std::env::vars_os())
}
