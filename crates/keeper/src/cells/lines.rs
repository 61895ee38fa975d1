//! Limits in the kernel's format: the text of each file, and the writes that lead from one state to
//! another.
//!
//! Pure. The files are those of Documentation/admin-guide/cgroup-v1 (`cpu.shares`:
//! scheduler/sched-design-CFS.rst, quotas: scheduler/sched-bwc.rst) and cgroup-v2.rst.
//! `docs/cells.md` has them side by side. Not here: which limits a directory below others gets
//! (`dir`), the writing.

use nagaya_records::cell::{CPU_SHARES_DEFAULT, CgroupController, Device, IoLimit, LimitSet};

use super::controllers::{CgroupVersion, ControllerSet};

/// Weight of a fresh cgroup v2 directory (cgroup-v2.rst, `cpu.weight`).
const V2_WEIGHT_FRESH: u32 = 100;
const V2_WEIGHT_MAX: u32 = 10_000;

const V1_SHARES: &str = "cpu.shares";
const V2_WEIGHT: &str = "cpu.weight";
const V1_PERIOD: &str = "cpu.cfs_period_us";
const V1_QUOTA: &str = "cpu.cfs_quota_us";
const V1_NO_QUOTA: &str = "-1";

/// Maximum of operations per second. The kernel has 32 bits for it, and a larger number wraps
/// around (measured on 6.18).
const IOPS_MAX: u64 = u32::MAX as u64;

/// On both versions, since Linux 5.15 (cgroup-v2.rst, `cpu.idle`): its processes run when no
/// sibling wants to. It has no weight of its own then, and accepts none.
pub const IDLE: &str = "cpu.idle";

/// CPU weight of a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CpuWeight {
    OfLimits,
    /// It gives way to all its siblings.
    Idle,
}

/// One value of one file, for one device where the file has a line for each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CgroupWrite {
    pub file: &'static str,
    pub device: Option<(u32, u32)>,
    pub value: String,
}

impl CgroupWrite {
    fn new(file: &'static str, value: impl ToString) -> Self {
        Self { file, device: None, value: value.to_string() }
    }

    /// Returns the text to write.
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

/// Returns the values of a directory that was just made.
pub fn fresh(version: CgroupVersion, controllers: ControllerSet) -> Vec<CgroupWrite> {
    match version {
        _ if !controllers.has(CgroupController::Cpu) => Vec::new(),
        CgroupVersion::V1 => vec![CgroupWrite::new(V1_SHARES, CPU_SHARES_DEFAULT)],
        CgroupVersion::V2 => vec![CgroupWrite::new(V2_WEIGHT, V2_WEIGHT_FRESH)],
    }
}

/// Returns the assumed values of a directory that existed before: an unknown one, in each file that
/// can be lifted.
pub fn unknown(version: CgroupVersion, controllers: ControllerSet) -> Vec<CgroupWrite> {
    let files: &[(CgroupController, &'static str)] = match version {
        CgroupVersion::V1 => &[
            (CgroupController::Cpu, V1_SHARES),
            (CgroupController::Cpu, V1_QUOTA),
            (CgroupController::Pids, "pids.max"),
            (CgroupController::Memory, "memory.limit_in_bytes"),
        ],
        CgroupVersion::V2 => &[
            (CgroupController::Cpu, V2_WEIGHT),
            (CgroupController::Cpu, "cpu.max"),
            (CgroupController::Pids, "pids.max"),
            (CgroupController::Memory, "memory.max"),
        ],
    };
    let ours = files.iter().filter(|(controller, _)| controllers.has(*controller));
    ours.map(|(_, file)| CgroupWrite::new(file, "?")).collect()
}

/// Returns the values of these limits in a directory with these controllers. Devices are numbers by
/// now.
pub fn lines(
    version: CgroupVersion,
    controllers: ControllerSet,
    limits: &LimitSet,
    weight: CpuWeight,
) -> Vec<CgroupWrite> {
    let mut lines = Vec::new();
    if controllers.has(CgroupController::Cpu) {
        cpu_lines(version, limits, weight, &mut lines);
    }
    if controllers.has(CgroupController::Cpuset) {
        let files = [("cpuset.cpus", &limits.cpus), ("cpuset.mems", &limits.mems)];
        lines.extend(
            files.into_iter().filter_map(|(file, list)| Some(CgroupWrite::new(file, list.as_ref()?))),
        );
    }
    if controllers.has(CgroupController::Blkio) {
        for limit in &limits.io {
            io_lines(version, limit, &mut lines);
        }
    }
    if controllers.has(CgroupController::Memory) {
        let file = match version {
            CgroupVersion::V1 => "memory.limit_in_bytes",
            CgroupVersion::V2 => "memory.max",
        };
        lines.extend(limits.memory.map(|bytes| CgroupWrite::new(file, bytes)));
    }
    if controllers.has(CgroupController::Pids) {
        lines.extend(limits.processes.map(|count| CgroupWrite::new("pids.max", count)));
    }
    lines
}

/// Adds the CPU values. Shares are written one to one on both versions: only ratios between
/// siblings count, and all siblings here are ours. There is no burst: `cpu.max.burst` saves up
/// unused quota. A request after a pause would exceed its limit. A limit of 50 % would not measure
/// as 50 %. Short periods alone limit how long a throttled request waits.
fn cpu_lines(version: CgroupVersion, limits: &LimitSet, weight: CpuWeight, lines: &mut Vec<CgroupWrite>) {
    let shares = match weight {
        CpuWeight::OfLimits => Some(limits.cpu_shares.unwrap_or(CPU_SHARES_DEFAULT)),
        CpuWeight::Idle => None,
    };
    lines.push(match (shares, version) {
        (None, _) => CgroupWrite::new(IDLE, 1),
        (Some(shares), CgroupVersion::V1) => CgroupWrite::new(V1_SHARES, shares),
        (Some(shares), CgroupVersion::V2) => CgroupWrite::new(V2_WEIGHT, shares.clamp(1, V2_WEIGHT_MAX)),
    });
    match version {
        CgroupVersion::V1 => {
            if let Some(cpu) = limits.cpu {
                lines.push(CgroupWrite::new(V1_PERIOD, cpu.period_us));
                lines.push(CgroupWrite::new(V1_QUOTA, cpu.quota_us));
            }
        }
        CgroupVersion::V2 => {
            let quota = limits.cpu.map(|cpu| format!("{} {}", cpu.quota_us, cpu.period_us));
            lines.extend(quota.map(|quota| CgroupWrite::new("cpu.max", quota)));
        }
    }
}

fn io_lines(version: CgroupVersion, limit: &IoLimit, lines: &mut Vec<CgroupWrite>) {
    let Device::Number { major, minor } = limit.device else { return };
    let device = Some((major, minor));
    let iops = |most: Option<u64>| most.map(|most| most.min(IOPS_MAX));
    let rates = [limit.read_bps, limit.write_bps, iops(limit.read_iops), iops(limit.write_iops)];
    if version == CgroupVersion::V2 {
        let texts = rates.map(|rate| rate.map_or("max".into(), |rate| rate.to_string()));
        let [read, write, read_iops, write_iops] = texts;
        let value = format!("rbps={read} wbps={write} riops={read_iops} wiops={write_iops}");
        lines.push(CgroupWrite { file: "io.max", device, value });
        return;
    }
    let files = [
        "blkio.throttle.read_bps_device",
        "blkio.throttle.write_bps_device",
        "blkio.throttle.read_iops_device",
        "blkio.throttle.write_iops_device",
    ];
    for (file, rate) in files.into_iter().zip(rates) {
        lines.extend(rate.map(|rate| CgroupWrite { file, device, value: rate.to_string() }));
    }
}

/// Returns the line that lifts the limit of this one. `None` if it does no harm alone.
fn lifted(line: &CgroupWrite) -> Option<CgroupWrite> {
    let value = match line.file {
        V1_QUOTA | "memory.limit_in_bytes" => V1_NO_QUOTA,
        "cpu.max" | "pids.max" | "memory.max" => "max",
        "io.max" => "rbps=max wbps=max riops=max wiops=max",
        IDLE => "0",
        file if file.starts_with("blkio.throttle.") => "0",
        // On v1 the list of the parent directory replaces it, as a line of its own.
        "cpuset.cpus" | "cpuset.mems" => "",
        _ => return None,
    };
    Some(CgroupWrite { value: value.into(), ..line.clone() })
}

/// Returns the writes that lead from the written values to the wanted ones, in an order that the
/// kernel accepts.
pub fn writes(written: &[CgroupWrite], wanted: &[CgroupWrite]) -> Vec<CgroupWrite> {
    let in_place =
        |lines: &[CgroupWrite], line: &CgroupWrite| lines.iter().find(|one| one.is_same_place(line)).cloned();
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
        // A new period with the old quota may be more than the parent directory has, or less than a
        // child. Version 1 refuses both. Without a quota it accepts any period.
        let quota = CgroupWrite::new(V1_QUOTA, V1_NO_QUOTA);
        if line.file == V1_PERIOD && in_place(written, &quota).is_some_and(|old| old != quota) {
            writes.push(quota);
        }
        writes.push(line.clone());
    }
    // A quota that was removed for its period's sake comes back, even with the same number.
    let quota = wanted.iter().find(|line| line.file == V1_QUOTA);
    if let Some(quota) = quota
        && writes.iter().any(|line| line.file == V1_PERIOD)
        && !writes.contains(quota)
    {
        writes.push(quota.clone());
    }
    // A directory that is no longer idle has the kernel's default weight.
    let weight = wanted.iter().find(|line| [V1_SHARES, V2_WEIGHT].contains(&line.file));
    if let Some(weight) = weight
        && writes.iter().any(|line| line.file == IDLE)
        && !writes.contains(weight)
    {
        writes.push(weight.clone());
    }
    writes
}

/// Notes that a line was written.
pub fn remember(written: &mut Vec<CgroupWrite>, line: CgroupWrite) {
    match written.iter_mut().find(|one| one.is_same_place(&line)) {
        Some(old) => *old = line,
        None => written.push(line),
    }
}

#[cfg(test)]
mod tests;
