//! Limits as the kernel reads them: which text in which file, and which writes lead from one state to another.
//!
//! Pure. The files are those of Documentation/admin-guide/cgroup-v1 (`cpu.shares`: scheduler/sched-design-CFS.rst,
//! quotas: scheduler/sched-bwc.rst) and cgroup-v2.rst; `docs/cells.md` has them side by side. Not here: which limits
//! hold for a directory beneath others (`dir`), the writing.

use nagaya_cmdb::cell::{CPU_SHARES_DEFAULT, Controller, Device, IoLimit, Limits};

use super::controllers::{Controllers, Version};

/// Weight of a fresh cgroup v2 directory (cgroup-v2.rst, `cpu.weight`).
const V2_WEIGHT_FRESH: u32 = 100;
const V2_WEIGHT_MAX: u32 = 10_000;

const V1_SHARES: &str = "cpu.shares";
const V2_WEIGHT: &str = "cpu.weight";
const V1_PERIOD: &str = "cpu.cfs_period_us";
const V1_QUOTA: &str = "cpu.cfs_quota_us";
const V1_NO_QUOTA: &str = "-1";

/// Operations per second are 32 bits in the kernel, and a larger number wraps around (measured on 6.18).
const IOPS_MAX: u64 = u32::MAX as u64;

/// On both versions, since Linux 5.15 (cgroup-v2.rst, `cpu.idle`): what is in it runs when nobody beside it wants to. It has no
/// weight of its own then, and none is taken.
pub const IDLE: &str = "cpu.idle";

/// What a directory weighs on the processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weight {
    OfLimits,
    /// It gives way to all beside it.
    Idle,
}

/// One value of one file, for one device where the file has a line for each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    pub file: &'static str,
    pub device: Option<(u32, u32)>,
    pub value: String,
}

impl Line {
    fn new(file: &'static str, value: impl ToString) -> Self {
        Self { file, device: None, value: value.to_string() }
    }

    /// As it is written.
    pub fn text(&self) -> String {
        match self.device {
            Some((major, minor)) => format!("{major}:{minor} {}", self.value),
            None => self.value.clone(),
        }
    }

    fn is_same_place(&self, other: &Self) -> bool {
        self.file == other.file && self.device == other.device
    }
}

/// What a directory that was just made holds already.
pub fn fresh(version: Version, controllers: Controllers) -> Vec<Line> {
    match version {
        _ if !controllers.has(Controller::Cpu) => Vec::new(),
        Version::V1 => vec![Line::new(V1_SHARES, CPU_SHARES_DEFAULT)],
        Version::V2 => vec![Line::new(V2_WEIGHT, V2_WEIGHT_FRESH)],
    }
}

/// What a directory that was there already may hold: something else, in each file that can be lifted.
pub fn unknown(version: Version, controllers: Controllers) -> Vec<Line> {
    let files: &[(Controller, &'static str)] = match version {
        Version::V1 => &[
            (Controller::Cpu, V1_SHARES),
            (Controller::Cpu, V1_QUOTA),
            (Controller::Pids, "pids.max"),
            (Controller::Memory, "memory.limit_in_bytes"),
        ],
        Version::V2 => &[
            (Controller::Cpu, V2_WEIGHT),
            (Controller::Cpu, "cpu.max"),
            (Controller::Pids, "pids.max"),
            (Controller::Memory, "memory.max"),
        ],
    };
    let ours = files.iter().filter(|(controller, _)| controllers.has(*controller));
    ours.map(|(_, file)| Line::new(file, "?")).collect()
}

/// What these limits are in a directory that has these controllers. Devices are numbers by now.
pub fn lines(version: Version, controllers: Controllers, limits: &Limits, weight: Weight) -> Vec<Line> {
    let mut lines = Vec::new();
    if controllers.has(Controller::Cpu) {
        cpu_lines(version, limits, weight, &mut lines);
    }
    if controllers.has(Controller::Cpuset) {
        let files = [("cpuset.cpus", &limits.cpus), ("cpuset.mems", &limits.mems)];
        lines.extend(files.into_iter().filter_map(|(file, list)| Some(Line::new(file, list.as_ref()?))));
    }
    if controllers.has(Controller::Blkio) {
        for limit in &limits.io {
            io_lines(version, limit, &mut lines);
        }
    }
    if controllers.has(Controller::Memory) {
        let file = match version {
            Version::V1 => "memory.limit_in_bytes",
            Version::V2 => "memory.max",
        };
        lines.extend(limits.memory.map(|bytes| Line::new(file, bytes)));
    }
    if controllers.has(Controller::Pids) {
        lines.extend(limits.processes.map(|count| Line::new("pids.max", count)));
    }
    lines
}

/// Shares are written one to one on both versions: only ratios between siblings count, and all siblings here are
/// ours. No burst: `cpu.max.burst` lets unused quota be saved up, so a request after a pause would run at more than
/// its limit, and a limit of 50 % would not measure as 50 %. Short periods alone keep a throttled request from
/// standing still for long.
fn cpu_lines(version: Version, limits: &Limits, weight: Weight, lines: &mut Vec<Line>) {
    let shares = match weight {
        Weight::OfLimits => Some(limits.cpu_shares.unwrap_or(CPU_SHARES_DEFAULT)),
        Weight::Idle => None,
    };
    lines.push(match (shares, version) {
        (None, _) => Line::new(IDLE, 1),
        (Some(shares), Version::V1) => Line::new(V1_SHARES, shares),
        (Some(shares), Version::V2) => Line::new(V2_WEIGHT, shares.clamp(1, V2_WEIGHT_MAX)),
    });
    match version {
        Version::V1 => {
            if let Some(cpu) = limits.cpu {
                lines.push(Line::new(V1_PERIOD, cpu.period_us));
                lines.push(Line::new(V1_QUOTA, cpu.quota_us));
            }
        }
        Version::V2 => {
            let quota = limits.cpu.map(|cpu| format!("{} {}", cpu.quota_us, cpu.period_us));
            lines.extend(quota.map(|quota| Line::new("cpu.max", quota)));
        }
    }
}

fn io_lines(version: Version, limit: &IoLimit, lines: &mut Vec<Line>) {
    let Device::Number { major, minor } = limit.device else { return };
    let device = Some((major, minor));
    let iops = |most: Option<u64>| most.map(|most| most.min(IOPS_MAX));
    let rates = [limit.read_bps, limit.write_bps, iops(limit.read_iops), iops(limit.write_iops)];
    if version == Version::V2 {
        let texts = rates.map(|rate| rate.map_or("max".into(), |rate| rate.to_string()));
        let [read, write, read_iops, write_iops] = texts;
        let value = format!("rbps={read} wbps={write} riops={read_iops} wiops={write_iops}");
        lines.push(Line { file: "io.max", device, value });
        return;
    }
    let files = [
        "blkio.throttle.read_bps_device",
        "blkio.throttle.write_bps_device",
        "blkio.throttle.read_iops_device",
        "blkio.throttle.write_iops_device",
    ];
    for (file, rate) in files.into_iter().zip(rates) {
        lines.extend(rate.map(|rate| Line { file, device, value: rate.to_string() }));
    }
}

/// The line that lifts the limit of this one. None: what stands there does no harm alone.
fn lifted(line: &Line) -> Option<Line> {
    let value = match line.file {
        V1_QUOTA | "memory.limit_in_bytes" => V1_NO_QUOTA,
        "cpu.max" | "pids.max" | "memory.max" => "max",
        "io.max" => "rbps=max wbps=max riops=max wiops=max",
        IDLE => "0",
        file if file.starts_with("blkio.throttle.") => "0",
        // On v1 the list of the directory above stands in its place, as a line of its own.
        "cpuset.cpus" | "cpuset.mems" => "",
        _ => return None,
    };
    Some(Line { value: value.into(), ..line.clone() })
}

/// The writes that lead from what was written to what is wanted, in an order in which the kernel takes them.
pub fn writes(written: &[Line], wanted: &[Line]) -> Vec<Line> {
    let in_place = |lines: &[Line], line: &Line| lines.iter().find(|one| one.is_same_place(line)).cloned();
    let mut writes = Vec::new();
    for line in written {
        if in_place(wanted, line).is_none()
            && let Some(lift) = lifted(line).filter(|lift| lift != line)
        {
            writes.push(lift);
        }
    }
    let changed = wanted.iter().filter(|line| in_place(written, line).as_ref() != Some(line));
    for line in changed {
        // A new period with the old quota may be more than the directory above has, or less than one below: both are
        // refused on v1. Without a quota any period is taken.
        let quota = Line::new(V1_QUOTA, V1_NO_QUOTA);
        if line.file == V1_PERIOD && in_place(written, &quota).is_some_and(|old| old != quota) {
            writes.push(quota);
        }
        writes.push(line.clone());
    }
    // A quota that was taken away for its period's sake comes back, also where it is the same number.
    let quota = wanted.iter().find(|line| line.file == V1_QUOTA);
    if let Some(quota) = quota
        && writes.iter().any(|line| line.file == V1_PERIOD)
        && !writes.contains(quota)
    {
        writes.push(quota.clone());
    }
    // What is idle no more has the kernel's own weight.
    let weight = wanted.iter().find(|line| [V1_SHARES, V2_WEIGHT].contains(&line.file));
    if let Some(weight) = weight
        && writes.iter().any(|line| line.file == IDLE)
        && !writes.contains(weight)
    {
        writes.push(weight.clone());
    }
    writes
}

/// Remembers that a line was written.
pub fn remember(written: &mut Vec<Line>, line: Line) {
    match written.iter_mut().find(|one| one.is_same_place(&line)) {
        Some(old) => *old = line,
        None => written.push(line),
    }
}

#[cfg(test)]
mod tests;
