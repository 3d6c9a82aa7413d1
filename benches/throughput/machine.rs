//! The machine under the figures: what it is, how the database is set up, who used how much of its processors.
//!
//! In: `/proc` and the database's own settings. Out: lines of text, seconds of processor time. It owns nothing.
//!
//! Invariant: a database that can lose a commit, or that lives in memory, is refused, but for a look.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{Seek as _, SeekFrom, Write as _};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use onceward::lab::postgres;
use onceward::lab::process::TempFolder;

use crate::Result;

/// Settings that a figure depends on.
const SETTINGS: [&str; 9] = [
    "fsync",
    "synchronous_commit",
    "full_page_writes",
    "wal_sync_method",
    "wal_level",
    "shared_buffers",
    "max_wal_size",
    "checkpoint_timeout",
    "autovacuum",
];

/// Processors, memory, kernel.
pub fn describe() -> Result<String> {
    let (processors, memory) = (fs::read_to_string("/proc/cpuinfo")?, fs::read_to_string("/proc/meminfo")?);
    let model = processors.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or("unknown model");
    let model = model.trim_start_matches(['\t', ' ', ':']);
    let kib = memory.lines().find_map(|line| line.strip_prefix("MemTotal:")).and_then(first_number).unwrap_or(0.0);
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let cores = std::thread::available_parallelism()?;
    Ok(format!("{cores} cores ({model}), {:.1} GiB, Linux {}", kib / 1024.0 / 1024.0, kernel.trim()))
}

/// Version, settings, file system. Where only a `look` is wanted, a database that can lose a commit is no error.
pub fn describe_database(url: &str, look: bool) -> Result<Vec<String>> {
    let show = |name: &str| -> Result<String> {
        let rows = postgres::query(url, &format!("SHOW {name}"))?;
        Ok(rows.into_iter().flatten().flatten().next().unwrap_or_default())
    };
    let mut settings = Vec::new();
    for name in SETTINGS {
        let value = show(name)?;
        if !look && value != "on" && ["fsync", "synchronous_commit", "full_page_writes"].contains(&name) {
            return Err(format!("{name} is {value}: such figures mean nothing").into());
        }
        settings.push(format!("{name}={value}"));
    }
    let folder = show("data_directory")?;
    let (device, mount, kind) = mount_of(&folder)?;
    if !look && ["tmpfs", "ramfs"].contains(&kind.as_str()) {
        return Err(format!("{folder} is memory ({kind}): let TMPDIR name a folder on a disk").into());
    }
    Ok(vec![
        format!("PostgreSQL  {}: {}", show("server_version")?, settings.join(" ")),
        format!("disk        {kind} on {device}, mounted at {mount}"),
    ])
}

/// Device, mount point and type of the file system that holds `path`.
fn mount_of(path: &str) -> Result<(String, String, String)> {
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    let holds = |mount: &str| std::path::Path::new(path).starts_with(mount);
    let mounts = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>()).filter(|line| line.len() > 2 && holds(line[1]));
    // Of equally long ones the last is on top.
    let top = mounts.max_by_key(|line| line[1].len()).ok_or("no file system holds the data directory")?;
    Ok((top[0].to_owned(), top[1].to_owned(), top[2].to_owned()))
}

/// What it takes to have a page on the disk, where the servers keep their data, again and again until it is over.
pub fn fsyncs(is_over: &AtomicBool) -> Result<Vec<Duration>> {
    let folder = TempFolder::new("fsync")?;
    let mut file = File::create(folder.path().join("page"))?;
    let mut times = Vec::new();
    while !is_over.load(Ordering::Relaxed) {
        thread::sleep(Duration::from_millis(20));
        let started = Instant::now();
        file.seek(SeekFrom::Start(0))?;
        file.write_all(&[1; 8_192])?;
        file.sync_data()?;
        times.push(started.elapsed());
    }
    Ok(times)
}

/// The servers' process ids.
#[derive(Clone, Copy, Debug)]
pub struct Processes {
    /// The postmaster.
    pub postgres: Option<u32>,
    /// The broker.
    pub kafka: Option<u32>,
}

impl Processes {
    /// The postmaster is named in its own file; the broker is the Java program with the same parent. What runs elsewhere stays unknown.
    pub fn find(url: &str) -> Result<Self> {
        let rows = postgres::query(url, "SELECT pg_read_file('postmaster.pid')")?;
        let file = rows.into_iter().flatten().flatten().next().unwrap_or_default();
        let postgres = file.lines().next().and_then(|line| line.parse().ok());
        let processes = Process::all();
        let parent = postgres.and_then(|postmaster| processes.get(&postmaster)).map(|postmaster| postmaster.parent);
        let kafka = processes.iter().find(|(_, process)| process.name == "java" && Some(process.parent) == parent);
        Ok(Self { postgres, kafka: kafka.map(|(id, _)| *id) })
    }
}

/// Seconds of processor time.
pub struct Cpu;

impl Cpu {
    /// Of the process, its children, and those of its children that have ended; 0 for one that is unknown.
    pub fn of(process: Option<u32>) -> f64 {
        let Some(id) = process else { return 0.0 };
        let processes = Process::all();
        let children: f64 = processes.values().filter(|process| process.parent == id).map(|process| process.seconds).sum();
        children + processes.get(&id).map_or(0.0, |process| process.seconds + process.seconds_of_ended_children)
    }

    /// Of the process alone, without what it has started.
    pub fn of_itself(id: u32) -> f64 {
        Process::all().get(&id).map_or(0.0, |process| process.seconds)
    }
}

/// The processors at one moment: what others take of them while something is measured.
pub struct Load {
    since: Instant,
    busy: f64,
    ours: f64,
}

impl Load {
    /// The part of all processors that anybody has had from then until now.
    pub fn busy_until(&self, now: &Self) -> Result<f64> {
        let all = (now.since - self.since).as_secs_f64() * std::thread::available_parallelism()?.get() as f64;
        Ok((now.busy - self.busy) / all)
    }

    pub fn now(processes: &Processes) -> Result<Self> {
        // user, nice, system, idle, iowait, irq, softirq, steal: what the hypervisor gave to others counts as theirs.
        let stat = fs::read_to_string("/proc/stat")?;
        let line = stat.lines().next().and_then(|line| line.strip_prefix("cpu ")).ok_or("no line for all processors")?;
        let counts: Vec<f64> = line.split_whitespace().filter_map(|count| count.parse().ok()).collect();
        let busy = [0, 1, 2, 5, 6, 7].iter().filter_map(|field| counts.get(*field)).sum::<f64>() / ticks();
        let ours = [processes.postgres, processes.kafka, Some(std::process::id())].map(Cpu::of).iter().sum();
        Ok(Self { since: Instant::now(), busy, ours })
    }

    /// The part of all processors that others have had from then until now.
    pub fn of_others_until(&self, now: &Self) -> Result<f64> {
        let all = (now.since - self.since).as_secs_f64() * std::thread::available_parallelism()?.get() as f64;
        Ok(((now.busy - self.busy) - (now.ours - self.ours)) / all)
    }
}

/// Clock ticks in a second.
fn ticks() -> f64 {
    // SAFETY: reads a number.
    unsafe { libc::sysconf(libc::_SC_CLK_TCK) as f64 }
}

/// The most memory that the process has ever held, in MiB.
pub fn rss_peak_mib(id: u32) -> Result<f64> {
    let status = fs::read_to_string(format!("/proc/{id}/status"))?;
    let kib = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).and_then(first_number).ok_or("no VmHWM")?;
    Ok(kib / 1024.0)
}

struct Process {
    name: String,
    parent: u32,
    seconds: f64,
    seconds_of_ended_children: f64,
}

impl Process {
    fn all() -> HashMap<u32, Self> {
        let ids = fs::read_dir("/proc").into_iter().flatten().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        ids.filter_map(|id: u32| Some((id, Self::read(&fs::read_to_string(format!("/proc/{id}/stat")).ok()?)?))).collect()
    }

    /// The name stands in parentheses and may hold any of them.
    fn read(stat: &str) -> Option<Self> {
        let (name, rest) = (stat.split_once('(')?.1.rsplit_once(')')?.0, stat.rsplit_once(')')?.1);
        let fields: Vec<&str> = rest.split_whitespace().collect();
        let seconds = |field: usize| fields.get(field).and_then(|text| text.parse::<f64>().ok()).map(|count| count / ticks());
        Some(Self {
            name: name.to_owned(),
            parent: fields.get(1)?.parse().ok()?,
            seconds: seconds(11)? + seconds(12)?,
            seconds_of_ended_children: seconds(13)? + seconds(14)?,
        })
    }
}

fn first_number(text: &str) -> Option<f64> {
    text.split_whitespace().next()?.parse().ok()
}
