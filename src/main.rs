//! The service binary: everything it does is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    use_two_arenas();
    onceward::cli::main(std::env::args_os(), std::env::vars_os())
}

/// By default each of our dozen threads would allocate in an arena of its own and leave what is free scattered over all of them: a twentieth
/// of the memory of a service whose database is silent.
fn use_two_arenas() {
    // SAFETY: it sets a number, and no other thread runs yet.
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 2)
    };
}
