//! What the kernel says of this process, under the names that every Prometheus client gives it.
//!
//! In: `/proc`. Out: text. It owns nothing; what the kernel does not tell is left out.

use std::fs;

use super::series::{Definition, Kind};

const START_TIME: Definition =
    of_the_kernel("process_start_time_seconds", Kind::Gauge, "When the process has started, since 1970.");
const CPU: Definition =
    of_the_kernel("process_cpu_seconds_total", Kind::Counter, "Time on processors, in user code and in the kernel.");
const MEMORY: Definition = of_the_kernel("process_resident_memory_bytes", Kind::Gauge, "Memory that is in use.");

pub const DEFINITIONS: [&Definition; 3] = [&START_TIME, &CPU, &MEMORY];

/// Times of a process are told in hundredths of a second on all machines that we run on (`USER_HZ`).
const TICKS: u64 = 100;

const fn of_the_kernel(name: &'static str, kind: Kind, help: &'static str) -> Definition {
    Definition { name, kind, labels: &[], help }
}

/// The text that Prometheus reads.
pub fn render() -> String {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    let (stat, status, machine) = (read("/proc/self/stat"), read("/proc/self/status"), read("/proc/stat"));
    let alone = |value: Option<String>| value.map(|value| (vec![], value));
    let started = start_ticks(&stat).and_then(|ticks| Some(seconds(ticks + boot_seconds(&machine)? * TICKS)));
    START_TIME.text(alone(started))
        + &CPU.text(alone(cpu_ticks(&stat).map(seconds)))
        + &MEMORY.text(alone(resident_kib(&status).map(|kib| (kib << 10).to_string())))
}

fn seconds(ticks: u64) -> String {
    format!("{}.{:02}", ticks / TICKS, ticks % TICKS)
}

/// A field of `/proc/PID/stat` by its number in the manual. The second one is a name that may hold anything.
fn field(stat: &str, number: usize) -> Option<u64> {
    stat.rsplit_once(") ")?.1.split_ascii_whitespace().nth(number - 3)?.parse().ok()
}

fn cpu_ticks(stat: &str) -> Option<u64> {
    Some(field(stat, 14)? + field(stat, 15)?)
}

fn start_ticks(stat: &str) -> Option<u64> {
    field(stat, 22)
}

fn boot_seconds(machine: &str) -> Option<u64> {
    machine.lines().find_map(|line| line.strip_prefix("btime "))?.parse().ok()
}

fn resident_kib(status: &str) -> Option<u64> {
    status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?.trim().trim_end_matches(" kB").parse().ok()
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime, UNIX_EPOCH};

    use super::*;

    #[test]
    fn a_name_with_brackets_and_spaces_shifts_no_field() {
        let stat = "7 (a ) b) S 1 7 7 0 -1 4194560 109 0 0 0 250 75 0 0 20 0 3 0 123456 2322432 200 1844";
        assert_eq!((cpu_ticks(stat), start_ticks(stat)), (Some(325), Some(123_456)));
        assert_eq!(seconds(325), "3.25");
        assert_eq!(cpu_ticks("7 (a) S 1"), None);
    }

    #[test]
    fn the_kernel_tells_of_this_very_process() {
        let text = render();
        let value = |name: &str| -> f64 {
            let line = text.lines().find_map(|line| line.strip_prefix(name)).expect(name);
            line.trim().parse().expect("a number")
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
        let age = now.as_secs_f64() - value("process_start_time_seconds ");
        assert!((-1.0..Duration::from_secs(86_400).as_secs_f64()).contains(&age), "{age}");
        assert!(value("process_resident_memory_bytes ") > f64::from(1 << 20));
        assert!(value("process_cpu_seconds_total ") >= 0.0);
    }
}
