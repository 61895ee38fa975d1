//! The load of this machine, as reported to other nodes for placement.
//!
//! Not here: telling them (`load_publisher`), choosing (`nagaya_placement`).

use std::collections::BTreeMap;
use std::fs;

use nagaya_records::SiteName;
use rustix::thread::{CpuSet, sched_getaffinity};
use serde::{Deserialize, Serialize};

use super::delegated_task::{DelegatedTask, TaskOutcome};
use super::image_inventory::ImageInventory;
use super::node_cpu_limit::CpuAllotment;

/// A node's report about itself, once a second.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeReport {
    /// Part of its CPU time that was used since the last report, 0 to 1.
    pub cpu_used: f64,
    pub memory_bytes: u64,
    /// Memory that programs could still get without swapping (`MemAvailable` of proc(5)).
    pub memory_available: u64,
    /// Serial of the CA that issued this node's certificate.
    pub authority: u64,
    /// Serial of the newest CA that it trusts. Zero if the version does not report it, or if it is
    /// not known yet.
    #[serde(skip_serializing_if = "is_none")]
    pub believes: u64,
    /// It has a lease on its placed sites.
    pub serves: bool,
    /// Requests per second to applications that are placed there.
    #[serde(skip_serializing_if = "is_none")]
    pub heat: f32,
    /// Wakes in progress and queued.
    #[serde(skip_serializing_if = "is_none")]
    pub wakes: u32,
    /// Which of its wanted images it has. `None` if the version does not report it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub images: Option<ImageInventory>,
    /// CPUs used here by sites that run on several nodes.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub shared: BTreeMap<SiteName, f32>,
    /// Sites that an operator has other nodes move.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub wishes: Vec<DelegatedTask>,
    /// Outcomes of others' tasks, by their ids.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub outcomes: BTreeMap<String, TaskOutcome>,
}

fn is_none<T: Default + PartialEq>(number: &T) -> bool {
    *number == T::default()
}

/// Measures between two calls.
#[derive(Debug)]
pub struct CpuMeter {
    /// `None` if it may use all of its CPUs.
    allotment: Option<CpuAllotment>,
    /// Clock ticks of this node's CPUs: busy, and all.
    last: (u64, u64),
}

/// Returns the CPUs of this node: those it may run on, or as many as its control group allows.
pub fn cpus() -> u32 {
    std::thread::available_parallelism().map_or(1, |cpus| u32::try_from(cpus.get()).unwrap_or(u32::MAX))
}

fn cpus_bound_to() -> u32 {
    sched_getaffinity(None).map_or(u32::MAX, |own| own.count())
}

impl CpuMeter {
    pub fn new() -> Self {
        Self { allotment: CpuAllotment::find(cpus_bound_to()), last: (0, 0) }
    }

    /// Returns the CPU use; 0 the first time.
    pub fn cpu_used(&mut self) -> f64 {
        if let Some(allotment) = &mut self.allotment {
            return allotment.used().unwrap_or(0.0);
        }
        // A node that is bound to some CPUs of its machine is as busy as those.
        let own = sched_getaffinity(None).ok();
        let now = fs::read_to_string("/proc/stat").ok().and_then(|text| ticks(&text, own.as_ref()));
        let now = now.unwrap_or(self.last);
        let is_first = self.last == (0, 0);
        let busy = now.0.saturating_sub(self.last.0);
        let all = now.1.saturating_sub(self.last.1);
        self.last = now;
        // Tick counts of a second are far below where a double loses whole numbers.
        if all == 0 || is_first { 0.0 } else { busy as f64 / all as f64 }
    }
}

/// Returns busy and all clock ticks since boot of these CPUs, or of all, from `/proc/stat`
/// (proc(5)).
fn ticks(stat: &str, own: Option<&CpuSet>) -> Option<(u64, u64)> {
    let of_one = |line: &str| {
        let (number, fields) = line.strip_prefix("cpu")?.split_once(' ')?;
        Some((number.parse::<usize>().ok(), sum(fields)?))
    };
    let mut lines = stat.lines().map_while(of_one);
    let whole = lines.next()?.1;
    let Some(own) = own else { return Some(whole) };
    let ours = lines
        .filter(|(number, _)| number.is_some_and(|number| number < CpuSet::MAX_CPU && own.is_set(number)));
    let sum = ours.fold((0, 0), |(busy, all), (_, one)| (busy + one.0, all + one.1));
    Some(if sum.1 == 0 { whole } else { sum })
}

/// Sums one line of numbers.
fn sum(fields: &str) -> Option<(u64, u64)> {
    // user, nice, system, idle, iowait, irq, softirq, steal; guest time is part of user time.
    let fields: Vec<u64> =
        fields.split_ascii_whitespace().take(8).map_while(|word| word.parse().ok()).collect();
    let all: u64 = fields.iter().sum();
    let idle: u64 = fields.iter().skip(3).take(2).sum();
    (fields.len() >= 4).then_some((all - idle, all))
}

/// Returns bytes of memory: total, and available.
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
    fn load_of_another_version_is_read_as_far_as_it_is_known() {
        let older = r#"{"cpu_used":0.5,"memory_bytes":8,"memory_available":4,"authority":1,"serves":true}"#;
        let older: NodeReport = serde_json::from_str(older).unwrap();
        assert_eq!((older.cpu_used, older.serves), (0.5, true));
        assert_eq!((older.heat, older.wakes, older.images), (0.0, 0, None));
        let newer = r#"{"wakes":3,"heat":1.5,"images":{"most":true,"but":["wiki"]},"colour":"red"}"#;
        let newer: NodeReport = serde_json::from_str(newer).unwrap();
        assert_eq!((newer.heat, newer.wakes), (1.5, 3));
        let has = |site| newer.images.as_ref().unwrap().has(&SiteName::new(site).unwrap());
        assert_eq!((has("wiki"), has("blog")), (false, true));
        let calm = serde_json::to_string(&NodeReport::default()).unwrap();
        assert!(["heat", "wakes", "images"].iter().all(|word| !calm.contains(word)), "{calm}");
    }

    #[test]
    fn waiting_for_a_disk_is_not_being_busy() {
        assert_eq!(ticks("cpu  10 1 5 80 4 0 0 0 3 0\ncpu0 1", None), Some((16, 100)));
        assert_eq!(ticks("intr 5", None), None);
        assert_eq!(ticks("", None), None);
    }

    #[test]
    fn a_node_is_as_busy_as_the_processors_it_may_use() {
        let stat = "cpu  30 0 0 170 0\ncpu0 5 0 0 95 0\ncpu1 25 0 0 75 0\nintr 7 cpu2 1\n";
        let of = |numbers: &[usize]| {
            let mut own = CpuSet::new();
            numbers.iter().for_each(|number| own.set(*number));
            ticks(stat, Some(&own))
        };
        assert_eq!((of(&[0]), of(&[1]), of(&[0, 1])), (Some((5, 100)), Some((25, 100)), Some((30, 200))));
        assert_eq!(of(&[7]), Some((30, 200)), "what is not listed says nothing");
    }

    #[test]
    fn this_machine_has_memory_and_uses_its_processors() {
        let (all, available) = memory();
        assert!(all > 0 && available > 0 && available <= all);
        let mut meter = CpuMeter::new();
        let used = meter.cpu_used();
        assert!((0.0..=1.0).contains(&used), "{used}");
        assert_eq!(field("MemTotal: 2 kB\nMemAvailable: 1 kB", "MemAvailable:"), 1024);
    }
}
