//! What an audit keeps in a folder, so that a kill costs no more than the run that is being sorted.
//!
//! In: the runs that are finished, and the place that was reached with them. Out: the same, to the audit that goes on. It owns three
//! files in the folder, and the lock on it.
//!
//! Invariant: what the folder says was read is in its runs, no more and no less; it is taken up only for the very question that it
//! belongs to.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::AuditError;
use super::records::Frontier;
use super::sorter::Run;
use super::topic::Part;
use super::traces::Counts;
use super::unseen::Unseen;
use crate::crash::CrashPoint;

/// What is asked. Another version of the program may decode otherwise.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Question {
    pub version: String,
    pub group: String,
    pub topic: String,
    pub from: String,
    pub to: String,
}

/// How far it is answered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Reached {
    pub parts: BTreeMap<i32, Part>,
    pub frontier: Frontier,
    pub counts: Counts,
    pub unseen: Unseen,
    pub runs: Vec<Run>,
}

#[derive(Serialize, Deserialize)]
struct Manifest {
    question: Question,
    reached: Reached,
}

/// The folder.
#[derive(Debug)]
pub(super) struct Kept {
    folder: PathBuf,
    question: Question,
    /// Held as long as this lives.
    _lock: File,
}

const MANIFEST: &str = "audit.json";
/// Becomes the manifest when it is whole.
const DRAFT: &str = "audit.json.new";
const RUNS: &str = "audit.runs";
const LOCK: &str = "audit.lock";

impl Kept {
    /// Opens the folder, which is made if need be, and says how far an audit has come that was begun there.
    pub(super) fn open(folder: &Path, question: Question) -> Result<(Self, Option<Reached>), AuditError> {
        let failed = |error: &dyn std::fmt::Display| AuditError::State { folder: folder.to_owned(), error: error.to_string() };
        fs::create_dir_all(folder).map_err(|error| failed(&error))?;
        let lock = open(&folder.join(LOCK)).map_err(|error| failed(&error))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(fs::TryLockError::WouldBlock) => return Err(failed(&"another audit is at work in it")),
            Err(fs::TryLockError::Error(error)) => return Err(failed(&error)),
        }
        let kept = Self { folder: folder.to_owned(), question, _lock: lock };
        let text = match fs::read(folder.join(MANIFEST)) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok((kept, None)),
            Err(error) => return Err(failed(&error)),
        };
        let manifest: Manifest = serde_json::from_slice(&text).map_err(|error| failed(&error))?;
        if manifest.question != kept.question {
            return Err(failed(
                &"it belongs to an audit of another group, topic or range, or by another version; name another folder",
            ));
        }
        Ok((kept, Some(manifest.reached)))
    }

    /// The file of the runs.
    pub(super) fn runs(&self) -> Result<File, AuditError> {
        open(&self.folder.join(RUNS)).map_err(|error| self.failed(&error))
    }

    /// Writes down how far it is. The runs themselves are safe already.
    pub(super) fn save(&self, reached: Reached) -> Result<(), AuditError> {
        let manifest = Manifest { question: self.question.clone(), reached };
        let text = serde_json::to_vec(&manifest).expect("numbers and texts can always be written");
        let draft = self.folder.join(DRAFT);
        let written = fs::write(&draft, text).and_then(|()| File::open(&draft)?.sync_all());
        written.and_then(|()| fs::rename(&draft, self.folder.join(MANIFEST))).map_err(|error| self.failed(&error))?;
        CrashPoint::RunKept.passed();
        Ok(())
    }

    /// The audit has ended: the next one in this folder begins anew.
    pub(super) fn clear(self) -> Result<(), AuditError> {
        // The manifest first: without it the rest says nothing.
        [MANIFEST, RUNS, LOCK].into_iter().try_for_each(|name| match fs::remove_file(self.folder.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(self.failed(&error)),
            _ => Ok(()),
        })
    }

    fn failed(&self, error: &io::Error) -> AuditError {
        AuditError::State { folder: self.folder.clone(), error: error.to_string() }
    }
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::audit::problems::Problem;

    fn question() -> Question {
        let word = |word: &str| word.to_owned();
        Question { version: word("1"), group: word("g"), topic: word("t"), from: word("None"), to: word("None") }
    }

    fn reached(next: i64) -> Reached {
        let mut unseen = Unseen::default();
        unseen.add(Problem::OutOfReach, 2, (3, 4));
        Reached {
            parts: BTreeMap::from([(0, Part { from: 0, to: 9, next })]),
            frontier: Frontier::default(),
            counts: Counts { records: 7, events: 6 },
            unseen,
            runs: Vec::new(),
        }
    }

    #[test]
    fn a_folder_says_how_far_the_same_audit_has_come_and_nothing_to_another() {
        let folder = std::env::temp_dir().join(format!("onceward-state-{}", uuid::Uuid::now_v7().simple()));
        let (kept, before) = Kept::open(&folder, question()).unwrap();
        assert_eq!(before, None);
        kept.save(reached(3)).unwrap();
        kept.save(reached(4)).unwrap();
        let second = Kept::open(&folder, question()).unwrap_err();
        assert!(second.to_string().contains("another audit is at work"), "{second}");
        drop(kept); // as a kill would
        let other = Kept::open(&folder, Question { from: "later".to_owned(), ..question() }).unwrap_err();
        assert!(other.to_string().contains("name another folder"), "{other}");
        let (kept, before) = Kept::open(&folder, question()).unwrap();
        assert_eq!(before, Some(reached(4)));
        kept.clear().unwrap();
        let (_kept, before) = Kept::open(&folder, question()).unwrap();
        assert_eq!(before, None, "it has ended");
        fs::remove_dir_all(folder).unwrap();
    }
}
