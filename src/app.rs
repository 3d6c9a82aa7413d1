//! The service: everything wired together, started, and ended in order.
//!
//! In: a checked configuration. Out: an exit code. It owns the actor system. Whatever core part dies, the process ends non-zero within
//! seconds and with readiness red: a service that is half alive is worse than one that is restarted.
//!
//! Invariant: nothing is read before the schema is current, and the process does not end with 0 unless the group was left in order.

use tokio::sync::mpsc;

/// Ends the process with a reason: the first one counts.
#[derive(Clone, Debug)]
pub struct Fatal(mpsc::UnboundedSender<String>);

/// Ends the process when it is dropped: held by whatever must not die.
#[derive(Debug)]
pub struct DeathNotice {
    who: &'static str,
    fatal: Fatal,
}

impl Fatal {
    /// The sender and where the reasons arrive.
    #[must_use]
    pub fn channel() -> (Self, mpsc::UnboundedReceiver<String>) {
        let (sender, receiver) = mpsc::unbounded_channel();
        (Self(sender), receiver)
    }

    /// Asks for the end.
    pub fn end(&self, reason: impl Into<String>) {
        // After the first reason nobody listens any more.
        let _ = self.0.send(reason.into());
    }

    /// A notice that asks for the end when `who` dies.
    #[must_use]
    pub fn notice(&self, who: &'static str) -> DeathNotice {
        DeathNotice { who, fatal: self.clone() }
    }
}

impl Drop for DeathNotice {
    fn drop(&mut self) {
        self.fatal.end(format!("the {} died", self.who));
    }
}
