//! Words for cells that records, rules and the keeper share: limits, names, confinement of a
//! request, and usage.
//!
//! Plain numbers, for memory and for the wire between edge and keeper. Not here: how limits are
//! written in records (`record::CellLimits`), how they reach the kernel (`keeper::cells`), the
//! choice of limits (`rules`, the records).

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Longest name of a named cell, in bytes. Two names and a separator still fit one directory name
/// (255).
pub const CELL_NAME_LEN_MAX: usize = 100;

/// Most named cells to which one request can be attached: one for each controller.
pub const NAMED_PER_REQUEST_MAX: usize = 6;

/// Most devices for which one cell can have limits.
pub const DEVICES_PER_CELL_MAX: usize = 16;

/// Shares of a cell that sets none: the default of cgroup v1 for every group.
pub const CPU_SHARES_DEFAULT: u32 = 1024;

/// Range of `cpu_shares`: the smallest of cgroup v1, the largest of cgroup v2's `cpu.weight`.
pub const CPU_SHARES_MIN: u32 = 2;
pub const CPU_SHARES_MAX: u32 = 10_000;

/// Period of CPU quotas given as a percentage, microseconds. It is a tenth of the kernel's default.
/// So a cell that is over its quota pauses for milliseconds, not for a tenth of a second.
pub const CPU_PERIOD_DEFAULT_US: u32 = 10_000;

/// Range of a quota's period, microseconds (Documentation/scheduler/sched-bwc.rst).
pub const CPU_PERIOD_MIN_US: u32 = 1_000;
pub const CPU_PERIOD_MAX_US: u32 = 1_000_000;

/// Smallest quota, microseconds (same source).
pub const CPU_QUOTA_MIN_US: u64 = 1_000;

/// Limits of one cell. `None` or an absent entry means no limit at this level; the levels above
/// still hold.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LimitSet {
    pub cpu: Option<CpuQuota>,
    /// Weight against siblings that want to run too, `CPU_SHARES_MIN..=CPU_SHARES_MAX`. Siblings
    /// without it have `CPU_SHARES_DEFAULT`. Written 1:1 to `cpu.shares` (v1) and `cpu.weight`
    /// (v2), so ratios stay exact on both.
    pub cpu_shares: Option<u32>,
    /// At most `DEVICES_PER_CELL_MAX`, each device once.
    pub io: Vec<IoLimit>,
    /// Processes and threads.
    pub processes: Option<u32>,
    /// Bytes. For tenants and named cells: a request's own leaf has no memory of its own.
    pub memory: Option<u64>,
    /// CPUs as in `cpuset(7)`: `0-1,3`.
    pub cpus: Option<Box<str>>,
    /// Memory nodes, in the same form.
    pub mems: Option<Box<str>>,
}

impl LimitSet {
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Returns these limits, with those that `over` sets in their place.
    pub fn overlaid(&self, over: &Self) -> Self {
        let mut io = self.io.clone();
        for limit in &over.io {
            match io.iter_mut().find(|have| have.device == limit.device) {
                Some(have) => have.overlay(limit),
                None => io.push(limit.clone()),
            }
        }
        Self {
            cpu: over.cpu.or(self.cpu),
            cpu_shares: over.cpu_shares.or(self.cpu_shares),
            io,
            processes: over.processes.or(self.processes),
            memory: over.memory.or(self.memory),
            cpus: over.cpus.clone().or_else(|| self.cpus.clone()),
            mems: over.mems.clone().or_else(|| self.mems.clone()),
        }
    }

    /// Returns the limits of one device, if there are any.
    pub fn device(&self, device: Device) -> Option<&IoLimit> {
        self.io.iter().find(|limit| limit.device == device)
    }
}

/// CPU time per period, both in microseconds. A quota above the period means more than one core.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CpuQuota {
    pub quota_us: u64,
    pub period_us: u32,
}

impl CpuQuota {
    /// Makes a quota from a share of one core in thousandths: 500 is half a core. The period grows
    /// where the quota would be below the kernel's minimum.
    pub fn of_core(thousandths: u32) -> Self {
        let thousandths = u64::from(thousandths.max(1));
        let least = CPU_QUOTA_MIN_US * 1000 / thousandths;
        let period = least.clamp(CPU_PERIOD_DEFAULT_US.into(), CPU_PERIOD_MAX_US.into());
        let quota_us = (period * thousandths / 1000).max(CPU_QUOTA_MIN_US);
        Self { quota_us, period_us: u32::try_from(period).unwrap_or(CPU_PERIOD_MAX_US) }
    }

    /// Returns its share of one core in thousandths, rounded down.
    pub fn thousandths(self) -> u32 {
        let thousandths = u128::from(self.quota_us) * 1000 / u128::from(self.period_us.max(1));
        u32::try_from(thousandths).unwrap_or(u32::MAX)
    }

    /// Returns the wall time in which this quota gives `cpu_us` of CPU time, microseconds.
    pub fn wall_us(self, cpu_us: u64) -> u64 {
        let wall = u128::from(cpu_us) * u128::from(self.period_us) / u128::from(self.quota_us.max(1));
        u64::try_from(wall).unwrap_or(u64::MAX)
    }
}

impl fmt::Display for CpuQuota {
    /// Writes it in percent of one core, as operators do.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tenths = self.thousandths();
        match tenths % 10 {
            0 => write!(f, "{}%", tenths / 10),
            tenth => write!(f, "{}.{tenth}%", tenths / 10),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Device {
    /// The disk of the site's files, whatever its device number.
    Root,
    Number {
        major: u32,
        minor: u32,
    },
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Root => f.write_str(":root"),
            Self::Number { major, minor } => write!(f, "{major}:{minor}"),
        }
    }
}

impl FromStr for Device {
    type Err = BadDevice;

    fn from_str(text: &str) -> Result<Self, BadDevice> {
        if text == ":root" {
            return Ok(Self::Root);
        }
        let number = |part: &str| part.parse().ok().filter(|_| !part.starts_with('+'));
        let numbers = text.split_once(':').and_then(|(major, minor)| Some((number(major)?, number(minor)?)));
        let (major, minor) = numbers.ok_or_else(|| BadDevice(text.chars().take(40).collect()))?;
        Ok(Self::Number { major, minor })
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not a device: write MAJOR:MINOR as in `lsblk`, or :root for the disk of the site's files")]
pub struct BadDevice(String);

/// Limits of one device: bytes and operations per second.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct IoLimit {
    pub device: Device,
    pub read_bps: Option<u64>,
    pub write_bps: Option<u64>,
    pub read_iops: Option<u64>,
    pub write_iops: Option<u64>,
}

impl IoLimit {
    pub fn of(device: Device) -> Self {
        Self { device, read_bps: None, write_bps: None, read_iops: None, write_iops: None }
    }

    fn overlay(&mut self, over: &Self) {
        self.read_bps = over.read_bps.or(self.read_bps);
        self.write_bps = over.write_bps.or(self.write_bps);
        self.read_iops = over.read_iops.or(self.read_iops);
        self.write_iops = over.write_iops.or(self.write_iops);
    }
}

/// Name of a named cell: 1 to `CELL_NAME_LEN_MAX` of `A-Z a-z 0-9 . _ -`, not beginning with a dot.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "Box<str>", into = "Box<str>")]
pub struct CellName(Box<str>);

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{0}' is not the name of a cell: 1 to {CELL_NAME_LEN_MAX} letters, digits, '.', '_' and '-', without '/', not beginning with '.'"
)]
pub struct BadCellName(String);

impl CellName {
    /// Parses a name. A leading `/`, which libcgroup allows, is not part of the name.
    pub fn parse(text: &str) -> Result<Self, BadCellName> {
        let name = text.strip_prefix('/').unwrap_or(text);
        let fits = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
        if name.is_empty()
            || name.len() > CELL_NAME_LEN_MAX
            || name.starts_with('.')
            || !name.bytes().all(fits)
        {
            return Err(BadCellName(text.chars().take(120).flat_map(char::escape_debug).collect()));
        }
        Ok(Self(name.into()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for CellName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl TryFrom<Box<str>> for CellName {
    type Error = BadCellName;

    fn try_from(text: Box<str>) -> Result<Self, BadCellName> {
        Self::parse(&text)
    }
}

impl From<CellName> for Box<str> {
    fn from(name: CellName) -> Self {
        name.0
    }
}

/// The controllers of a cgroup, by their v1 names. On v1 each can have a group of another name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum CgroupController {
    Cpu,
    Cpuacct,
    Cpuset,
    Blkio,
    Memory,
    Pids,
}

impl CgroupController {
    pub const ALL: [Self; 6] =
        [Self::Cpu, Self::Cpuacct, Self::Cpuset, Self::Blkio, Self::Memory, Self::Pids];

    /// Returns the name as in `/proc/cgroups`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cpuacct => "cpuacct",
            Self::Cpuset => "cpuset",
            Self::Blkio => "blkio",
            Self::Memory => "memory",
            Self::Pids => "pids",
        }
    }
}

/// Requests that share a named cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum CellScope {
    /// All tenants of the node: the groups of mod_mruby's rules.
    Node,
    /// The requests of one tenant, under its limits.
    Tenant,
}

/// Attaches a request to a named cell with these controllers.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct NamedCell {
    pub name: CellName,
    pub scope: CellScope,
    /// Controllers with which the cell is joined. `Scope::Tenant` needs all of them
    /// (`Controller::ALL`).
    pub controllers: Vec<CgroupController>,
    /// Limits to set on the cell first; it is made if it does not exist. With `None`, the cell is
    /// joined as it is. If it does not exist, the request stays where it would be.
    pub limits: Option<LimitSet>,
}

/// Change by a rule to a named cell of the node, without attaching to it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum CellChange {
    /// Sets these limits, and makes the cell if it does not exist.
    Set { name: CellName, controllers: Vec<CgroupController>, limits: LimitSet },
    /// Removes it. Requests that run in it continue under their tenants' limits.
    Drop { name: CellName, controllers: Vec<CgroupController> },
}

/// Lowers (or raises) the limits of one running request once it has used this much CPU time.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Demotion {
    pub after_cpu_us: u64,
    /// Laid over the limits of its cell.
    pub limits: LimitSet,
}

/// Limits of a site's cell while one request to its application runs, where its record gives less.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Boost {
    pub cpu: Option<CpuQuota>,
    /// Writes it as `CPU_SHARES_MIN..=CPU_SHARES_MAX`.
    pub cpu_shares: Option<u32>,
}

impl Boost {
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Returns this boost, with the values that `over` sets in their place.
    pub fn overlaid(self, over: Self) -> Self {
        Self { cpu: over.cpu.or(self.cpu), cpu_shares: over.cpu_shares.or(self.cpu_shares) }
    }
}

impl fmt::Display for Boost {
    /// Writes it as `cpu=200%,cpu_shares=4096`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(cpu) = self.cpu {
            write!(f, "cpu={cpu}")?;
        }
        if let Some(shares) = self.cpu_shares {
            write!(f, "{}cpu_shares={shares}", if self.cpu.is_some() { "," } else { "" })?;
        }
        Ok(())
    }
}

/// The cells and limits of one request. The default is its own cell in its site's, without limits
/// of its own.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Confinement {
    /// Limits of the request's own cell.
    pub limits: LimitSet,
    /// At most `NAMED_PER_REQUEST_MAX`; each controller in at most one of them.
    pub named: Vec<NamedCell>,
    /// In rising order of `after_cpu_us`; at most `DEMOTIONS_MAX`.
    pub demotions: Vec<Demotion>,
    /// For applications.
    pub boost: Boost,
}

/// Most steps in which one request can be slowed down.
pub const DEMOTIONS_MAX: usize = 4;

/// Resources that the programs in a request's cell used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestUsage {
    /// User and system CPU time, microseconds.
    pub cpu_us: u64,
    /// Bytes read from and written to disks.
    pub read_bytes: u64,
    pub write_bytes: u64,
    /// Time its processes paused because the CPU quota was used up, microseconds.
    pub throttled_us: u64,
    /// Number of demotions that were applied.
    pub demoted: u8,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_could_leave_the_tree_are_refused() {
        for bad in ["", "/", "..", ".", "a/b", "../x", "a b", "ä", ".hidden", "//x", &"x".repeat(101)] {
            assert!(CellName::parse(bad).is_err(), "{bad}");
        }
        assert_eq!(CellName::parse("/httpd-limited").unwrap().as_str(), "httpd-limited");
    }

    #[test]
    fn quotas_stay_within_what_the_kernel_takes() {
        assert_eq!(CpuQuota::of_core(500), CpuQuota { quota_us: 5_000, period_us: 10_000 });
        assert_eq!(CpuQuota::of_core(1500), CpuQuota { quota_us: 15_000, period_us: 10_000 });
        assert_eq!(CpuQuota::of_core(50), CpuQuota { quota_us: 1_000, period_us: 20_000 });
        for thousandths in 1..=4000 {
            let quota = CpuQuota::of_core(thousandths);
            assert!(quota.quota_us >= CPU_QUOTA_MIN_US, "{thousandths}");
            assert!((CPU_PERIOD_MIN_US..=CPU_PERIOD_MAX_US).contains(&quota.period_us), "{thousandths}");
        }
    }

    #[test]
    fn quotas_are_told_in_percent() {
        for (thousandths, text) in [(1_000, "100%"), (125, "12.5%"), (5, "0.5%"), (2_000, "200%")] {
            let quota = CpuQuota::of_core(thousandths);
            assert_eq!((quota.thousandths(), &*quota.to_string()), (thousandths, text));
        }
        let quota = CpuQuota { quota_us: u64::MAX, period_us: 0 };
        assert_eq!(quota.thousandths(), u32::MAX);
    }

    #[test]
    fn a_boost_is_one_word() {
        let cpu = Boost { cpu: Some(CpuQuota::of_core(2_000)), cpu_shares: None };
        let both = cpu.overlaid(Boost { cpu: None, cpu_shares: Some(4096) });
        assert_eq!([cpu.to_string(), both.to_string()], ["cpu=200%", "cpu=200%,cpu_shares=4096"]);
        assert_eq!(Boost { cpu: None, ..both }.to_string(), "cpu_shares=4096");
    }

    #[test]
    fn devices_are_read_and_written_alike() {
        for text in [":root", "254:0", "8:16"] {
            assert_eq!(text.parse::<Device>().unwrap().to_string(), text);
        }
        for bad in ["", "8", "8:", ":", "a:b", "8:0:1", "+8:0", "root"] {
            assert!(bad.parse::<Device>().is_err(), "{bad}");
        }
    }

    #[test]
    fn an_overlay_replaces_only_what_it_names() {
        let read = IoLimit { read_bps: Some(5), ..IoLimit::of(Device::Root) };
        let write = IoLimit { write_bps: Some(7), ..IoLimit::of(Device::Root) };
        let base = LimitSet { processes: Some(3), io: vec![read], ..LimitSet::default() };
        let over = LimitSet { cpu_shares: Some(25), io: vec![write], ..LimitSet::default() };
        let both = base.overlaid(&over);
        assert_eq!((both.processes, both.cpu_shares), (Some(3), Some(25)));
        assert_eq!(both.io, [IoLimit { read_bps: Some(5), write_bps: Some(7), ..IoLimit::of(Device::Root) }]);
    }
}
