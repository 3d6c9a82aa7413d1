//! What is made of files that are replaced while we run: passwords, tokens, certificates.
//!
//! In: how something is made of files. Out: the newest of it that could be made. It owns that, and remembers what it was made of.
//!
//! Invariant: what could be made once stays: a file that is gone, half written or wrong changes nothing but a line in the log.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tracing::{info, warn};

/// Reads files and remembers what was in them.
#[derive(Default)]
pub struct Files(Vec<(PathBuf, Option<Vec<u8>>)>);

impl Files {
    /// # Errors
    /// In words, with the file's name.
    pub fn read(&mut self, path: &Path) -> Result<&[u8], String> {
        let (content, fault) = match fs::read(path) {
            Ok(content) => (Some(content), None),
            Err(error) => (None, Some(error)),
        };
        self.0.push((path.to_owned(), content));
        let content = self.0.last().and_then(|(_, content)| content.as_deref());
        content.ok_or_else(|| {
            format!("{} cannot be read: {}", path.display(), fault.map(|fault| fault.to_string()).unwrap_or_default())
        })
    }

    fn are_as_they_were(&self) -> bool {
        self.0.iter().all(|(path, content)| fs::read(path).ok() == *content)
    }
}

type Make<T, E> = Box<dyn Fn(&mut Files) -> Result<T, E> + Send + Sync>;

/// Something that is made of files, and made again when they have changed.
pub struct Rotating<T, E> {
    what: &'static str,
    make: Make<T, E>,
    /// Between two looks at the files.
    every: Duration,
    newest: Mutex<Newest<T>>,
}

struct Newest<T> {
    made: T,
    files: Files,
    looked: Instant,
    /// What is wrong with newer files, as it was said last.
    fault: Option<String>,
}

impl<T: Clone, E: fmt::Display> Rotating<T, E> {
    /// # Errors
    /// It cannot be made now.
    pub fn new(
        what: &'static str,
        every: Duration,
        make: impl Fn(&mut Files) -> Result<T, E> + Send + Sync + 'static,
    ) -> Result<Self, E> {
        let mut files = Files::default();
        let made = make(&mut files)?;
        let newest = Newest { made, files, looked: Instant::now(), fault: None };
        Ok(Self { what, make: Box::new(make), every, newest: Mutex::new(newest) })
    }

    /// The newest. The files are small and of this machine, so that reading them here holds nobody up.
    pub fn get(&self) -> T {
        let mut newest = self.newest.lock().unwrap_or_else(PoisonError::into_inner);
        if newest.looked.elapsed() < self.every {
            return newest.made.clone();
        }
        newest.looked = Instant::now();
        if newest.files.are_as_they_were() {
            newest.fault = None;
            return newest.made.clone();
        }
        let mut files = Files::default();
        match (self.make)(&mut files) {
            Ok(made) => {
                info!(what = self.what, "its files have changed: used from now on");
                *newest = Newest { made, files, looked: newest.looked, fault: None };
            }
            Err(fault) => {
                let fault = fault.to_string();
                if newest.fault.as_ref() != Some(&fault) {
                    warn!(what = self.what, fault, "its files have changed and cannot be used: what was there before stays in use");
                }
                newest.fault = Some(fault);
            }
        }
        newest.made.clone()
    }
}

/// Files hold secrets.
impl fmt::Debug for Files {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|(path, _)| path)).finish()
    }
}

impl<T, E> fmt::Debug for Rotating<T, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rotating").field("what", &self.what).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(content: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("onceward-rotating-{}", uuid::Uuid::now_v7().simple()));
        fs::write(&path, content).expect("a file");
        path
    }

    fn number(path: &Path, every: Duration) -> Rotating<u32, String> {
        let path = path.to_owned();
        let make = move |files: &mut Files| {
            let text = String::from_utf8(files.read(&path)?.to_vec()).map_err(|error| error.to_string())?;
            text.parse().map_err(|_| "is no number".to_owned())
        };
        Rotating::new("a number", every, make).expect("a number")
    }

    #[test]
    fn a_replaced_file_is_used_and_one_that_is_gone_or_half_written_is_not() {
        let path = scratch("1");
        let number = number(&path, Duration::ZERO);
        assert_eq!(number.get(), 1);
        for (content, seen) in [("2", 2), ("", 2), ("3x", 2), ("3", 3)] {
            fs::write(&path, content).expect("a file");
            assert_eq!(number.get(), seen, "{content:?}");
        }
        fs::remove_file(&path).expect("it is there");
        assert_eq!(number.get(), 3);
        fs::write(&path, "4").expect("a file");
        assert_eq!(number.get(), 4);
        fs::remove_file(&path).expect("it is there");
    }

    #[test]
    fn files_are_not_looked_at_more_often_than_wanted() {
        let path = scratch("1");
        let number = number(&path, Duration::from_secs(3_600));
        fs::write(&path, "2").expect("a file");
        assert_eq!(number.get(), 1);
        fs::remove_file(&path).expect("it is there");
    }

    #[test]
    fn what_cannot_be_made_at_first_is_an_error_that_names_the_file() {
        let make = |files: &mut Files| files.read(Path::new("/nowhere/at/all")).map(<[u8]>::len);
        let fault = Rotating::new("nothing", Duration::ZERO, make).map(|_| ()).expect_err("no file");
        assert!(fault.starts_with("/nowhere/at/all cannot be read: "), "{fault}");
    }

    #[test]
    fn no_content_is_ever_shown() {
        let path = scratch("hunter2");
        let mut files = Files::default();
        files.read(&path).expect("a file");
        assert!(!format!("{files:?}").contains("hunter2"));
        fs::remove_file(&path).expect("it is there");
    }
}
