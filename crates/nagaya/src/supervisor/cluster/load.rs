//! How busy this machine is, as other nodes are told so that they can place applications.
//!
//! Not here: telling them (`membership`), choosing (`nagaya_placement`).

use std::fs;

use serde::{Deserialize, Serialize};

/// What a node tells of itself, once a second.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Load {
    /// Part of all processors' time that was used since the last time, 0 to 1.
    pub cpu_used: f64,
    pub memory_bytes: u64,
    /// What programs could still get without swapping (`MemAvailable` of proc(5)).
    pub memory_available: u64,
    /// Serial of the authority that gave this node its certificate.
    pub authority: u64,
    /// It may run what is placed on it.
    pub serves: bool,
}

/// Measures between two calls.
#[derive(Debug, Default)]
pub struct Meter {
    /// Clock ticks of all processors: busy, and all.
    last: (u64, u64),
}

impl Meter {
    pub fn cpu_used(&mut self) -> f64 {
        let now = fs::read_to_string("/proc/stat").ok().and_then(|text| ticks(&text)).unwrap_or(self.last);
        let (busy, all) = (now.0.saturating_sub(self.last.0), now.1.saturating_sub(self.last.1));
        self.last = now;
        // Tick counts of a second are far below where a double loses whole numbers.
        if all == 0 { 0.0 } else { busy as f64 / all as f64 }
    }
}

/// Busy and all clock ticks since boot, from the first line of `/proc/stat` (proc(5)).
fn ticks(stat: &str) -> Option<(u64, u64)> {
    let line = stat.lines().next()?.strip_prefix("cpu ")?;
    // user, nice, system, idle, iowait, irq, softirq, steal; guest time is part of user time.
    let fields: Vec<u64> =
        line.split_ascii_whitespace().take(8).map_while(|word| word.parse().ok()).collect();
    let all: u64 = fields.iter().sum();
    let idle: u64 = fields.iter().skip(3).take(2).sum();
    (fields.len() >= 4).then_some((all - idle, all))
}

/// Bytes of memory: all, and what is available.
pub fn memory() -> (u64, u64) {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    (field(&text, "MemTotal:"), field(&text, "MemAvailable:"))
}

fn field(meminfo: &str, name: &str) -> u64 {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(name));
    let kib = line.and_then(|rest| rest.split_ascii_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or_default() * 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_for_a_disk_is_not_being_busy() {
        assert_eq!(ticks("cpu  10 1 5 80 4 0 0 0 3 0\ncpu0 1"), Some((16, 100)));
        assert_eq!(ticks("intr 5"), None);
        assert_eq!(ticks(""), None);
    }

    #[test]
    fn this_machine_has_memory_and_uses_its_processors() {
        let (all, available) = memory();
        assert!(all > 0 && available > 0 && available <= all);
        let mut meter = Meter::default();
        let used = meter.cpu_used();
        assert!((0.0..=1.0).contains(&used), "{used}");
        assert_eq!(field("MemTotal: 2 kB\nMemAvailable: 1 kB", "MemAvailable:"), 1024);
    }
}
