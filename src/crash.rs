//! Named places on a batch's way, and on an audit's, where a test can make the process die.
//!
//! In: `ONCEWARD_CRASH_POINTS`, a list such as `claimed:kill:3,committed:freeze` (point, what happens, at which passage; the first if
//! none is named). Out: the process is killed or frozen, the task panics, or the thread hangs. It owns the counts of passages.
//!
//! Invariant: without the feature `lab` a point is nothing, and without the variable it does nothing.

/// A place between two steps on a record's way; its name is what has just happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CrashPoint {
    /// The poll thread has handed records on.
    HandedOn,
    /// Records stand in their partition's window.
    Windowed,
    /// A partition's epoch was taken.
    Bumped,
    /// The attempts of an owner that is gone have become rows of their own.
    LeftoversConverted,
    /// A batch is decoded; nothing is in the database.
    Decoded,
    /// A missing day was made.
    DayMade,
    /// The floor was raised; no day below it is touched yet.
    FloorRaised,
    /// A day below the floor is a table by itself, and still there.
    DayDetached,
    /// A day below the floor is gone.
    DayDropped,
    /// Some of the claims below the floor are gone, of a table without days.
    ClaimsDeleted,
    /// The ownership row is locked.
    Fenced,
    /// The claims are inserted.
    Claimed,
    /// A key was taken: an optimistic batch is rolled back, and comes again in the other form.
    KeyTaken,
    /// Held events that are due are locked.
    DueLocked,
    /// The attempts are durable; nobody is called yet.
    AttemptsOpened,
    /// An answer of the provider has arrived; more may be on their way.
    Answered,
    /// The payment rows are inserted.
    PaymentsWritten,
    /// The attempts of what is paid are gone, the others kept.
    AttemptsSettled,
    /// The held rows are inserted.
    HeldWritten,
    /// All is written but the frontier, which goes out with COMMIT.
    BeforeCommit,
    /// COMMIT was answered.
    Committed,
    /// The OffsetActor knows.
    Confirmed,
    /// Kafka has taken an offset commit.
    OffsetsCommitted,
    /// A parked event was written to the dead-letter topic; its row does not say so yet.
    Relayed,
    /// An operator's request was read under the fence; nothing of it is done.
    RequestRead,
    /// An audit has written down how far it has read.
    RunKept,
}

impl CrashPoint {
    /// Every point, in the order above.
    pub const ALL: [Self; 26] = [
        Self::HandedOn,
        Self::Windowed,
        Self::Bumped,
        Self::LeftoversConverted,
        Self::Decoded,
        Self::DayMade,
        Self::FloorRaised,
        Self::DayDetached,
        Self::DayDropped,
        Self::ClaimsDeleted,
        Self::Fenced,
        Self::Claimed,
        Self::KeyTaken,
        Self::DueLocked,
        Self::AttemptsOpened,
        Self::Answered,
        Self::PaymentsWritten,
        Self::AttemptsSettled,
        Self::HeldWritten,
        Self::BeforeCommit,
        Self::Committed,
        Self::Confirmed,
        Self::OffsetsCommitted,
        Self::Relayed,
        Self::RequestRead,
        Self::RunKept,
    ];

    /// The word that arms it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::HandedOn => "handed_on",
            Self::Windowed => "windowed",
            Self::Bumped => "bumped",
            Self::LeftoversConverted => "leftovers_converted",
            Self::Decoded => "decoded",
            Self::DayMade => "day_made",
            Self::FloorRaised => "floor_raised",
            Self::DayDetached => "day_detached",
            Self::DayDropped => "day_dropped",
            Self::ClaimsDeleted => "claims_deleted",
            Self::Fenced => "fenced",
            Self::Claimed => "claimed",
            Self::KeyTaken => "key_taken",
            Self::DueLocked => "due_locked",
            Self::AttemptsOpened => "attempts_opened",
            Self::Answered => "answered",
            Self::PaymentsWritten => "payments_written",
            Self::AttemptsSettled => "attempts_settled",
            Self::HeldWritten => "held_written",
            Self::BeforeCommit => "before_commit",
            Self::Committed => "committed",
            Self::Confirmed => "confirmed",
            Self::OffsetsCommitted => "offsets_committed",
            Self::Relayed => "relayed",
            Self::RequestRead => "request_read",
            Self::RunKept => "run_kept",
        }
    }

    /// Passes the point. Inert unless armed.
    ///
    /// # Panics
    /// When it is armed with `panic`.
    #[cfg(feature = "lab")]
    pub fn passed(self) {
        armed::pass(self);
    }

    /// Nothing: this build cannot be armed.
    #[cfg(not(feature = "lab"))]
    #[inline]
    pub const fn passed(self) {}
}

#[cfg(feature = "lab")]
mod armed {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    use super::CrashPoint;

    /// The variable that arms points.
    const VARIABLE: &str = "ONCEWARD_CRASH_POINTS";

    struct Armed {
        point: CrashPoint,
        action: Action,
        at: u32,
        passages: AtomicU32,
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Action {
        Kill,
        Freeze,
        Panic,
        Hang,
    }

    /// How long a thread hangs: longer than any time limit of a test, shorter than a test.
    const HANG: Duration = Duration::from_secs(20);

    static ARMED: OnceLock<Vec<Armed>> = OnceLock::new();

    pub(super) fn pass(point: CrashPoint) {
        // A test that arms nothing by a slip of the pen would pass for nothing: better to end at once.
        let armed = ARMED.get_or_init(|| std::env::var(VARIABLE).map_or_else(|_| Vec::new(), |list| read(&list).expect(VARIABLE)));
        for armed in armed.iter().filter(|armed| armed.point == point) {
            if armed.passages.fetch_add(1, Ordering::Relaxed) + 1 == armed.at {
                act(armed.action, point);
            }
        }
    }

    fn act(action: Action, point: CrashPoint) {
        let signal = match action {
            Action::Kill => libc::SIGKILL,
            Action::Freeze => libc::SIGSTOP,
            Action::Panic => panic!("crash point {}", point.as_str()),
            Action::Hang => return std::thread::sleep(HANG),
        };
        // To this thread, so that it is hit before it goes on; both signals act on the whole process all the same.
        // SAFETY: a plain system call on ourselves; no memory is shared with it.
        unsafe { libc::raise(signal) };
    }

    fn read(list: &str) -> Result<Vec<Armed>, String> {
        list.split(',').filter(|entry| !entry.is_empty()).map(read_one).collect()
    }

    fn read_one(entry: &str) -> Result<Armed, String> {
        let mut parts = entry.split(':');
        let point = parts.next().and_then(|name| CrashPoint::ALL.into_iter().find(|point| point.as_str() == name));
        let action = match parts.next() {
            Some("kill") => Some(Action::Kill),
            Some("freeze") => Some(Action::Freeze),
            Some("panic") => Some(Action::Panic),
            Some("hang") => Some(Action::Hang),
            Some(_) | None => None,
        };
        let at = parts.next().map_or(Some(1), |at| at.parse().ok().filter(|at| *at > 0));
        match (point, action, at, parts.next()) {
            (Some(point), Some(action), Some(at), None) => Ok(Armed { point, action, at, passages: AtomicU32::new(0) }),
            _ => Err(format!("{entry:?} is no crash point: point:kill|freeze|panic|hang[:passage]")),
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn a_list_is_read_whole_or_refused() {
            let armed = read("claimed:kill:3,committed:freeze").unwrap();
            let read_back: Vec<_> = armed.iter().map(|armed| (armed.point, armed.action, armed.at)).collect();
            assert_eq!(read_back, [(CrashPoint::Claimed, Action::Kill, 3), (CrashPoint::Committed, Action::Freeze, 1)]);
            for wrong in ["claim:kill", "claimed", "claimed:explode", "claimed:kill:0", "claimed:kill:1:2"] {
                assert!(read(wrong).is_err(), "{wrong}");
            }
        }
    }
}
