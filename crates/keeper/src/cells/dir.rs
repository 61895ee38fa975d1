//! One directory of one hierarchy: its wanted limits, its written values, and the limits for
//! directories below it.
//!
//! v1 knows less of levels than v2. It refuses a quota above that of the parent directory. So a
//! quota is written only while it is the smaller one. Its limits of disks apply only to processes
//! in the directory itself. So each directory gets the strictest of all above it. A cpuset begins
//! empty, so it gets that of the parent directory. On v2 the kernel does all that. Not here: the
//! set of directories (`cell_path`), their texts (`lines`).

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use nagaya_records::cell::{CgroupController, CpuQuota, IoLimit, LimitSet};
use parking_lot::Mutex;
use rustix::fs::OFlags;
use rustix::io::Errno;

use crate::cells::cpu_demand::{CpuDemand, CpuDemandCounts};

use super::codes;
use super::complaints::CellWarnings;
use super::controllers::{CgroupVersion, ControllerSet};
use super::device::strictest;
use super::files::{self, CgroupFileError};
use super::hierarchy::{CgroupHierarchy, enable};
use super::lines::{self, CgroupWrite, CpuWeight};

#[derive(Debug)]
pub struct CgroupDir {
    pub hierarchy: Arc<CgroupHierarchy>,
    pub path: PathBuf,
    /// `None` for the keeper's own directory.
    pub above: Option<Arc<Self>>,
    /// Nothing is made below it, and its files are kept open for writing.
    is_leaf: bool,
    complaints: Arc<CellWarnings>,
    state: Mutex<CgroupDirState>,
}

#[derive(Debug, Default)]
struct CgroupDirState {
    /// Limits of this level alone.
    own: LimitSet,
    /// Limits for the directories below, on v1.
    handed: InheritedLimits,
    /// Limits that its files should hold.
    limits: LimitSet,
    /// CPU demand of the leaves below it. Idle, if they want only leftover CPU time.
    claims: CpuDemandCounts,
    is_idle: bool,
    written: Vec<CgroupWrite>,
    below: HashMap<Box<str>, Weak<CgroupDir>>,
    tasks: Option<Arc<OwnedFd>>,
    files: Vec<(&'static str, OwnedFd)>,
    /// A file holds something else than these limits.
    is_changed: bool,
}

/// Limits that a directory of v1 passes to those below it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct InheritedLimits {
    cpu: Option<CpuQuota>,
    io: Vec<IoLimit>,
    cpus: Option<Box<str>>,
    mems: Option<Box<str>>,
}

impl CgroupDir {
    /// Returns the keeper's own directory, which exists already.
    pub fn node(hierarchy: Arc<CgroupHierarchy>, complaints: Arc<CellWarnings>) -> Arc<Self> {
        let mut handed = InheritedLimits::default();
        let path = hierarchy.node.clone();
        if hierarchy.version == CgroupVersion::V1 && hierarchy.controllers.has(CgroupController::Cpuset) {
            let above = |file| files::read(&path.parent()?.join(file)).ok().map(String::into_boxed_str);
            (handed.cpus, handed.mems) = (above("cpuset.cpus"), above("cpuset.mems"));
        }
        let state = CgroupDirState {
            written: lines::fresh(hierarchy.version, hierarchy.controllers),
            ..CgroupDirState::default()
        };
        let dir = Self { hierarchy, path, above: None, is_leaf: false, complaints, state: Mutex::new(state) };
        dir.apply(&mut dir.state.lock(), &handed);
        Arc::new(dir)
    }

    /// Returns the child directory of this name. Makes it with these limits if it is missing.
    pub fn below(
        self: &Arc<Self>,
        name: &str,
        is_leaf: bool,
        own: impl FnOnce() -> LimitSet,
    ) -> Result<Arc<Self>, CgroupFileError> {
        if let Some(found) = self.state.lock().below.get(name).and_then(Weak::upgrade) {
            return Ok(found);
        }
        let path = self.path.join(name);
        let is_new = match files::make(&path) {
            Err(error) if error.is(Errno::NOENT) => {
                self.make_again()?;
                files::make(&path)?
            }
            other => other?,
        };
        let dir = Arc::new(Self {
            hierarchy: Arc::clone(&self.hierarchy),
            path,
            above: Some(Arc::clone(self)),
            is_leaf,
            complaints: Arc::clone(&self.complaints),
            state: Mutex::new(CgroupDirState { own: own(), ..CgroupDirState::default() }),
        });
        let mut state = self.state.lock();
        dir.begin(&mut dir.state.lock(), &state.handed, is_new)?;
        state.below.retain(|_, below| below.strong_count() > 0);
        state.below.insert(name.into(), Arc::downgrade(&dir));
        Ok(dir)
    }

    /// Writes what a directory needs before a process can be in it.
    fn begin(
        &self,
        state: &mut CgroupDirState,
        handed: &InheritedLimits,
        is_new: bool,
    ) -> Result<(), CgroupFileError> {
        let CgroupHierarchy { version, controllers, .. } = *self.hierarchy;
        state.written = match is_new {
            true => lines::fresh(version, controllers),
            false => lines::unknown(version, controllers),
        };
        (state.tasks, state.files) = (None, Vec::new());
        if version == CgroupVersion::V2 && !self.is_leaf {
            for controller in controllers.minus(ControllerSet::only(CgroupController::Cpuset)).iter() {
                enable(&self.path, controller)?;
            }
        }
        self.apply(state, handed);
        Ok(())
    }

    /// Makes the directory again: somebody removed it, and maybe those above it.
    fn make_again(&self) -> Result<(), CgroupFileError> {
        self.complaints.add(codes::REMOVED, &self.path.to_string_lossy(), || {
            format!("{} was removed by somebody; it is made again with its limits", self.path.display())
        });
        let is_new = match (files::make(&self.path), &self.above) {
            (Err(error), Some(above)) if error.is(Errno::NOENT) => {
                above.make_again()?;
                files::make(&self.path)?
            }
            (made, _) => made?,
        };
        let handed = self.handed_from_above();
        self.begin(&mut self.state.lock(), &handed, is_new)
    }

    /// Sets these limits. A value that the kernel refuses gives a warning. The others apply.
    pub fn set(&self, own: LimitSet) {
        let handed = self.handed_from_above();
        let mut state = self.state.lock();
        if state.own != own || state.is_changed {
            (state.own, state.is_changed) = (own, false);
            self.apply(&mut state, &handed);
        }
    }

    fn handed_from_above(&self) -> InheritedLimits {
        self.above.as_ref().map(|above| above.state.lock().handed.clone()).unwrap_or_default()
    }

    /// Applies limits. Lower values go from the bottom up and higher ones from the top down. So
    /// none is ever above its parent's.
    fn apply(&self, state: &mut CgroupDirState, from_above: &InheritedLimits) {
        let (limits, handed) = match self.hierarchy.version {
            CgroupVersion::V2 => (state.own.clone(), InheritedLimits::default()),
            CgroupVersion::V1 => beneath(&state.own, from_above),
        };
        let before = std::mem::replace(&mut state.handed, handed);
        state.limits = limits;
        let is_lower = ratio(state.handed.cpu) < ratio(before.cpu);
        if is_lower {
            Self::apply_below(state);
        }
        let refused = self.write(state);
        if before != state.handed && !is_lower {
            Self::apply_below(state);
        }
        if refused.is_empty() {
            return;
        }
        // Values below may have been an obstacle until now, as CPUs of v1 are.
        for (line, error) in self.write(state) {
            self.complain(&line, &error);
            self.fall_back(state, &line, from_above);
        }
    }

    fn complain(&self, line: &CgroupWrite, error: &CgroupFileError) {
        self.complaints.add(codes::REFUSED, &format!("{}: {}", line.file, error.error), || {
            format!("this limit does not hold: the kernel does not take '{}'. {error}", line.text())
        });
    }

    /// Changes the CPU demand of a leaf below it.
    pub fn claim(&self, from: CpuDemand, to: CpuDemand) {
        let mut state = self.state.lock();
        state.claims.change(from, to);
        let is_idle = state.claims.are_idle();
        if std::mem::replace(&mut state.is_idle, is_idle) != is_idle {
            for (line, error) in self.write(&mut state) {
                self.complain(&line, &error);
            }
        }
    }

    /// Replaces a refused CPU list by the parent's: nothing can be in a cpuset of v1 without CPUs.
    fn fall_back(&self, state: &mut CgroupDirState, line: &CgroupWrite, from_above: &InheritedLimits) {
        let (mine, above) = match line.file {
            "cpuset.cpus" => (&mut state.handed.cpus, &from_above.cpus),
            "cpuset.mems" => (&mut state.handed.mems, &from_above.mems),
            _ => return,
        };
        if let (CgroupVersion::V1, Some(above)) = (self.hierarchy.version, above) {
            *mine = Some(above.clone());
            let line = CgroupWrite { value: above.to_string(), ..line.clone() };
            if self.write_line(state, &line).is_ok() {
                lines::remember(&mut state.written, line);
            }
        }
    }

    fn apply_below(state: &CgroupDirState) {
        for below in state.below.values().filter_map(Weak::upgrade) {
            below.apply(&mut below.state.lock(), &state.handed);
        }
    }

    /// Writes each value that differs from the written one. Returns the failures.
    fn write(&self, state: &mut CgroupDirState) -> Vec<(CgroupWrite, CgroupFileError)> {
        let CgroupHierarchy { version, controllers, has_idle, .. } = *self.hierarchy;
        let weight = if state.is_idle && has_idle { CpuWeight::Idle } else { CpuWeight::OfLimits };
        let wanted = lines::lines(version, controllers, &state.limits, weight);
        let mut failed = Vec::new();
        for line in lines::writes(&state.written, &wanted) {
            match self.write_line(state, &line) {
                Ok(()) => lines::remember(&mut state.written, line),
                Err(error) => failed.push((line, error)),
            }
        }
        failed
    }

    fn write_line(&self, state: &mut CgroupDirState, line: &CgroupWrite) -> Result<(), CgroupFileError> {
        let path = self.path.join(line.file);
        if let Some((_, file)) = state.files.iter().find(|(file, _)| *file == line.file) {
            return files::write_to(file, &line.text()).map_err(|error| CgroupFileError::new(&path, error));
        }
        let file = match files::open(&path, OFlags::WRONLY) {
            Err(error) if error.is(Errno::NOENT) && line.file.starts_with("cpuset.") => {
                self.enable_cpuset()?;
                files::open(&path, OFlags::WRONLY)?
            }
            other => other?,
        };
        let written =
            files::write_to(&file, &line.text()).map_err(|error| CgroupFileError::new(&path, error));
        if self.is_leaf {
            state.files.push((line.file, file));
        }
        written
    }

    /// Enables the cpuset controller, on v2 only. There CPUs are bound nowhere until a cell needs
    /// it.
    fn enable_cpuset(&self) -> Result<(), CgroupFileError> {
        let mut above = Vec::new();
        let mut next = &self.above;
        while let Some(dir) = next {
            above.push(dir);
            next = &dir.above;
        }
        self.hierarchy.enable_above(CgroupController::Cpuset)?;
        above.into_iter().rev().try_for_each(|dir| enable(&dir.path, CgroupController::Cpuset))
    }

    /// Returns the file, kept open, into which a process is written to be here.
    pub fn tasks(&self) -> Result<Arc<OwnedFd>, CgroupFileError> {
        let mut state = self.state.lock();
        if let Some(tasks) = &state.tasks {
            return Ok(Arc::clone(tasks));
        }
        // A process that writes itself to `tasks` of v1 takes no lock that waits for a kernel grace
        // period.
        let file = match self.hierarchy.version {
            CgroupVersion::V1 => "tasks",
            CgroupVersion::V2 => "cgroup.procs",
        };
        let tasks = Arc::new(files::open(&self.path.join(file), OFlags::WRONLY)?);
        state.tasks = Some(Arc::clone(&tasks));
        Ok(tasks)
    }

    /// Notes that a file holds something else than was written, until limits are set again.
    pub fn changed(&self, file: &'static str, value: &str) {
        let mut state = self.state.lock();
        lines::remember(&mut state.written, CgroupWrite { file, device: None, value: value.to_owned() });
        state.is_changed = true;
    }

    pub fn is_leaf(&self) -> bool {
        self.is_leaf
    }

    /// Makes the directory again if somebody removed it.
    pub fn ensure_exists(&self) -> Result<(), CgroupFileError> {
        if self.path.exists() { Ok(()) } else { self.make_again() }
    }

    pub fn file(&self, name: &str) -> PathBuf {
        Path::new(&self.path).join(name)
    }
}

impl Drop for CgroupDir {
    fn drop(&mut self) {
        // The keeper's own goes last, by `CgroupHierarchy::close`. The next keeper cleans one that
        // is not empty.
        if self.above.is_some() {
            let _ = rustix::fs::rmdir(&self.path);
        }
    }
}

/// Computes the values for a directory of v1 with these limits below another, and the limits it
/// passes on.
fn beneath(own: &LimitSet, above: &InheritedLimits) -> (LimitSet, InheritedLimits) {
    let cpu = own.cpu.filter(|_| ratio(own.cpu) <= ratio(above.cpu));
    let io = strictest(&own.io, &above.io);
    let cpus = own.cpus.clone().or_else(|| above.cpus.clone());
    let mems = own.mems.clone().or_else(|| above.mems.clone());
    let handed =
        InheritedLimits { cpu: cpu.or(above.cpu), io: io.clone(), cpus: cpus.clone(), mems: mems.clone() };
    (LimitSet { cpu, io, cpus, mems, ..own.clone() }, handed)
}

/// Returns a quota's share of one core, in the unit in which v1 compares it (`to_ratio` of
/// kernel/sched/core.c). Without a quota: more than any.
fn ratio(cpu: Option<CpuQuota>) -> u64 {
    cpu.map_or(u64::MAX, |cpu| {
        let ratio = (u128::from(cpu.quota_us) << 20) / u128::from(cpu.period_us.max(1));
        u64::try_from(ratio).unwrap_or(u64::MAX)
    })
}

#[cfg(test)]
mod tests {
    use nagaya_records::cell::Device;

    use super::*;

    fn quota(quota_us: u64) -> Option<CpuQuota> {
        Some(CpuQuota { quota_us, period_us: 10_000 })
    }

    #[test]
    fn beneath_a_smaller_quota_none_is_written() {
        for (own, above, written, handed) in [
            (quota(5_000), None, quota(5_000), quota(5_000)),
            (quota(5_000), quota(2_000), None, quota(2_000)),
            (quota(2_000), quota(2_000), quota(2_000), quota(2_000)),
            (None, quota(2_000), None, quota(2_000)),
            (None, None, None, None),
            (Some(CpuQuota { quota_us: 50_000, period_us: 100_000 }), quota(2_000), None, quota(2_000)),
        ] {
            let own = LimitSet { cpu: own, ..LimitSet::default() };
            let (limits, to) = beneath(&own, &InheritedLimits { cpu: above, ..InheritedLimits::default() });
            assert_eq!((limits.cpu, to.cpu), (written, handed), "{own:?}");
        }
    }

    #[test]
    fn limits_of_disks_and_cpus_come_from_above() {
        let device = Device::Number { major: 8, minor: 0 };
        let of = |read, write| IoLimit { read_bps: read, write_bps: write, ..IoLimit::of(device) };
        let own = LimitSet { io: vec![of(Some(9), Some(1))], mems: Some("0".into()), ..LimitSet::default() };
        let above = InheritedLimits {
            io: vec![of(Some(5), None)],
            cpus: Some("0-3".into()),
            ..InheritedLimits::default()
        };
        let (limits, handed) = beneath(&own, &above);
        assert_eq!(limits.io, [of(Some(5), Some(1))]);
        assert_eq!((limits.cpus, limits.mems), (Some("0-3".into()), Some("0".into())));
        assert_eq!(handed.io, limits.io);
    }
}
