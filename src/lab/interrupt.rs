//! Ctrl-C and SIGTERM, noted: what runs for a while looks here and takes its servers down in order.
//!
//! Invariant: once noted it stays so.

use std::sync::atomic::{AtomicBool, Ordering};

use tokio::signal::unix::{SignalKind, signal};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Waits for the first of both signals and notes it; from the first poll on they no longer end the process.
pub async fn watch() {
    let (Ok(mut interrupt), Ok(mut terminate)) = (signal(SignalKind::interrupt()), signal(SignalKind::terminate())) else { return };
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    INTERRUPTED.store(true, Ordering::Relaxed);
}

/// Whether somebody wants it to end.
#[must_use]
pub fn has_come() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}
