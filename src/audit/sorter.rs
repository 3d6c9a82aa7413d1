//! Sorts any number of entries in bounded memory: sorted runs go to a file and are merged as streams.
//!
//! In: entries of one size, in any order. Out: the same entries in the order of their bytes. It owns one buffer and one file. The file
//! has no name, so that it is gone with the process however that ends; or it is one that the caller keeps, so that its finished runs
//! can be taken up again.
//!
//! Invariant: what comes out is what went in, repeats included; memory depends on the buffer and on [`FAN_IN`], never on how much comes.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Runs that are merged at once; more of them are merged in several passes.
const FAN_IN: usize = 64;
/// What is read of a run at once, about, in bytes: with [`FAN_IN`] the memory of a merge.
const READ_BYTES: usize = 32 << 10;

/// Takes entries in.
pub(super) struct Sorter<const N: usize> {
    /// How many entries a run has.
    run_entries: usize,
    buffer: Vec<[u8; N]>,
    spill: Option<Spill>,
    runs: Vec<Run>,
}

/// A sorted part of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Run {
    /// Where it begins, in bytes.
    at: u64,
    entries: u64,
}

/// A file that only grows.
struct Spill {
    file: Arc<File>,
    end: u64,
}

impl<const N: usize> Sorter<N> {
    /// Holds up to `memory` bytes of entries.
    pub(super) const fn new(memory: usize) -> Self {
        Self { run_entries: if memory < N { 1 } else { memory / N }, buffer: Vec::new(), spill: None, runs: Vec::new() }
    }

    /// The same, with its runs in a file that the caller keeps. What the file has beyond `runs` is of no run and is cut off.
    pub(super) fn kept_in(file: File, runs: Vec<Run>, memory: usize) -> io::Result<Self> {
        let end = runs.last().map_or(0, Run::end::<N>);
        if file.metadata()?.len() < end {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file is shorter than its runs"));
        }
        file.set_len(end)?;
        Ok(Self { spill: Some(Spill { file: Arc::new(file), end }), runs, ..Self::new(memory) })
    }

    /// Takes one in. `true`: with it a run was finished, and everything that came so far stands in the file.
    pub(super) fn push(&mut self, entry: [u8; N]) -> io::Result<bool> {
        if self.buffer.capacity() == 0 {
            self.buffer.reserve_exact(self.run_entries);
        }
        self.buffer.push(entry);
        if self.buffer.len() < self.run_entries {
            return Ok(false);
        }
        self.end_run()?;
        Ok(true)
    }

    /// Finishes the run, however short it is.
    pub(super) fn end_run(&mut self) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        self.buffer.sort_unstable();
        let spill = match &mut self.spill {
            Some(spill) => spill,
            none => none.insert(Spill::temporary()?),
        };
        let run = Run { at: spill.end, entries: self.buffer.len() as u64 };
        spill.append(self.buffer.as_flattened())?;
        self.runs.push(run);
        self.buffer.clear();
        Ok(())
    }

    /// The runs that are finished.
    pub(super) fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Makes what [`Self::runs`] names outlive a loss of power.
    pub(super) fn sync(&self) -> io::Result<()> {
        self.spill.as_ref().map_or(Ok(()), |spill| spill.file.sync_data())
    }

    /// Everything, in order. The buffer's memory is free from here on.
    pub(super) fn sorted(self) -> io::Result<Sorted<N>> {
        self.sorted_by(FAN_IN)
    }

    fn sorted_by(mut self, fan_in: usize) -> io::Result<Sorted<N>> {
        self.end_run()?;
        let Some(spill) = self.spill else { return Ok(Sorted::default()) };
        let mut cursors: Vec<Cursor<N>> = self.runs.iter().map(|run| Cursor::new(&spill.file, run)).collect();
        drop(self.buffer);
        while cursors.len() > fan_in {
            // The new run goes to the end, so that each pass takes the shortest ones.
            let mut pass = Spill::temporary()?;
            let mut runs = Vec::new();
            while !cursors.is_empty() {
                let some = cursors.drain(..cursors.len().min(fan_in)).collect();
                runs.push(pass.append_all(Sorted::of(some)?)?);
            }
            cursors = runs.iter().map(|run| Cursor::new(&pass.file, run)).collect();
        }
        Sorted::of(cursors)
    }
}

impl Run {
    const fn end<const N: usize>(&self) -> u64 {
        self.at + self.entries * N as u64
    }
}

impl Spill {
    /// In `TMPDIR`, else in `/var/tmp`, which is a disk where `/tmp` may be memory. It has no name any more when it is handed out.
    fn temporary() -> io::Result<Self> {
        let parent = std::env::var_os("TMPDIR").map_or_else(|| PathBuf::from("/var/tmp"), PathBuf::from);
        let parent = if parent.is_dir() { parent } else { std::env::temp_dir() };
        let path = parent.join(format!("onceward-audit-{}", Uuid::now_v7().simple()));
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
        fs::remove_file(&path)?;
        Ok(Self { file: Arc::new(file), end: 0 })
    }

    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, self.end)?;
        self.end += bytes.len() as u64;
        Ok(())
    }

    fn append_all<const N: usize>(&mut self, mut sorted: Sorted<N>) -> io::Result<Run> {
        let at = self.end;
        let mut bytes = Vec::with_capacity(READ_BYTES);
        while let Some(entry) = sorted.next()? {
            bytes.extend_from_slice(&entry);
            if bytes.len() >= READ_BYTES {
                self.append(&bytes)?;
                bytes.clear();
            }
        }
        self.append(&bytes)?;
        Ok(Run { at, entries: (self.end - at) / N as u64 })
    }
}

/// Gives entries out, the smallest first.
#[derive(Default)]
pub(super) struct Sorted<const N: usize> {
    total: u64,
    cursors: Vec<Cursor<N>>,
    /// The first entry of each cursor that has one.
    heads: BinaryHeap<Reverse<([u8; N], usize)>>,
}

/// A place in a run.
struct Cursor<const N: usize> {
    file: Arc<File>,
    at: u64,
    end: u64,
    buffer: Vec<u8>,
    /// Where the next entry stands in the buffer.
    next: usize,
}

impl<const N: usize> Sorted<N> {
    fn of(cursors: Vec<Cursor<N>>) -> io::Result<Self> {
        let total = cursors.iter().map(|cursor| (cursor.end - cursor.at) / N as u64).sum();
        let mut sorted = Self { total, heads: BinaryHeap::with_capacity(cursors.len()), cursors };
        for index in 0..sorted.cursors.len() {
            sorted.refill(index)?;
        }
        Ok(sorted)
    }

    fn refill(&mut self, index: usize) -> io::Result<()> {
        if let Some(entry) = self.cursors[index].next()? {
            self.heads.push(Reverse((entry, index)));
        }
        Ok(())
    }

    /// How many there are in all.
    pub(super) const fn total(&self) -> u64 {
        self.total
    }

    /// The next one, which stays.
    pub(super) fn peek(&self) -> Option<&[u8; N]> {
        self.heads.peek().map(|Reverse((entry, _))| entry)
    }

    /// The next one.
    pub(super) fn next(&mut self) -> io::Result<Option<[u8; N]>> {
        let Some(Reverse((entry, index))) = self.heads.pop() else { return Ok(None) };
        self.refill(index)?;
        Ok(Some(entry))
    }
}

impl<const N: usize> Cursor<N> {
    fn new(file: &Arc<File>, run: &Run) -> Self {
        Self { file: Arc::clone(file), at: run.at, end: run.end::<N>(), buffer: Vec::new(), next: 0 }
    }

    fn next(&mut self) -> io::Result<Option<[u8; N]>> {
        if self.next == self.buffer.len() {
            if self.at == self.end {
                return Ok(None);
            }
            let bytes = ((READ_BYTES / N).max(1) * N) as u64;
            self.buffer.resize(bytes.min(self.end - self.at) as usize, 0);
            self.file.read_exact_at(&mut self.buffer, self.at)?;
            self.at += self.buffer.len() as u64;
            self.next = 0;
        }
        let entry = self.buffer[self.next..self.next + N].try_into().expect("runs are whole entries");
        self.next += N;
        Ok(Some(entry))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn all<const N: usize>(mut sorted: Sorted<N>) -> Vec<[u8; N]> {
        let mut all = Vec::new();
        while let Some(entry) = sorted.next().unwrap() {
            all.push(entry);
        }
        all
    }

    proptest! {
        #[test]
        fn whatever_goes_in_comes_out_in_order(
            entries in prop::collection::vec(any::<[u8; 3]>(), 0..400),
            run in 1_usize..50,
            fan_in in 2_usize..6,
        ) {
            let mut sorter = Sorter::new(run * 3);
            for entry in &entries {
                sorter.push(*entry).unwrap();
            }
            let mut expected = entries;
            expected.sort_unstable();
            prop_assert_eq!(all(sorter.sorted_by(fan_in).unwrap()), expected);
        }
    }

    #[test]
    fn runs_longer_than_what_is_read_at_once_are_merged_whole() {
        let count: u64 = 40_000;
        let mut sorter = Sorter::new(150_000 * 8 / 10);
        for number in 0..count {
            sorter.push((number * 7_919 % count).to_be_bytes()).unwrap();
        }
        let expected: Vec<[u8; 8]> = (0..count).map(u64::to_be_bytes).collect();
        assert_eq!(all(sorter.sorted().unwrap()), expected);
    }

    #[test]
    fn memory_is_one_run_and_a_merge_however_much_comes() {
        const RUN: usize = 100;
        let mut sorter = Sorter::new(RUN * 8);
        for number in 0..100_000_u64 {
            let ended = sorter.push(number.reverse_bits().to_be_bytes()).unwrap();
            assert_eq!(ended, sorter.buffer.is_empty());
            assert!(sorter.buffer.capacity() <= RUN && sorter.buffer.len() < RUN);
        }
        assert_eq!(sorter.runs().len(), 1_000, "many more than are merged at once");
        let sorted = sorter.sorted().unwrap();
        assert!(sorted.cursors.len() <= FAN_IN, "{}", sorted.cursors.len());
        assert!(sorted.cursors.iter().all(|cursor| cursor.buffer.capacity() <= READ_BYTES));
        assert_eq!(all(sorted).len(), 100_000);
    }

    #[test]
    fn finished_runs_are_taken_up_again_and_what_comes_after_them_is_cut_off() {
        let open = |path: &std::path::Path| {
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).expect("a file")
        };
        let path = std::env::temp_dir().join(format!("onceward-sorter-{}", Uuid::now_v7().simple()));
        let mut sorter = Sorter::kept_in(open(&path), Vec::new(), 6).unwrap();
        let ended: Vec<bool> = [[3, 1], [1, 1], [2, 2], [9, 9]].map(|entry| sorter.push(entry).unwrap()).to_vec();
        assert_eq!(ended, [false, false, true, false]);
        let runs = sorter.runs().to_vec();
        sorter.end_run().unwrap(); // of which nobody was told
        drop(sorter);
        let mut sorter = Sorter::kept_in(open(&path), runs.clone(), 100).unwrap();
        sorter.push([2, 1]).unwrap();
        assert_eq!(all(sorter.sorted().unwrap()), [[1, 1], [2, 1], [2, 2], [3, 1]]);
        open(&path).set_len(5).unwrap();
        assert!(Sorter::<2>::kept_in(open(&path), runs, 100).is_err(), "a run is cut");
        fs::remove_file(path).unwrap();
    }

    #[test]
    fn nothing_at_all_needs_no_file() {
        let sorter = Sorter::<4>::new(1 << 20);
        assert!(all(sorter.sorted().unwrap()).is_empty());
    }
}
