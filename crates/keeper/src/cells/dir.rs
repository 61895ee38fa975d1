//! One directory of one hierarchy: the limits it is to have, what was written, and what holds beneath it.
//!
//! v1 knows less of levels than v2. A quota above that of the directory over it is refused there, so it is written
//! only while it is the smaller one; limits of disks hold for processes in the directory itself only, so each
//! directory gets the strictest of all above it; a cpuset begins empty, so it gets that of the directory above. On v2
//! the kernel does all that. Not here: which directories there are (`place`), their texts (`lines`).

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use nagaya_cmdb::cell::{Controller, CpuQuota, IoLimit, Limits};
use parking_lot::Mutex;
use rustix::fs::OFlags;
use rustix::io::Errno;

use super::claims::{Claim, Claims};
use super::codes;
use super::complaints::Complaints;
use super::controllers::{Controllers, Version};
use super::device::strictest;
use super::files::{self, FileError};
use super::hierarchy::{Hierarchy, enable};
use super::lines::{self, Line, Weight};

#[derive(Debug)]
pub struct Dir {
    pub hierarchy: Arc<Hierarchy>,
    pub path: PathBuf,
    /// None: the keeper's own.
    pub above: Option<Arc<Self>>,
    /// Nothing is made beneath it, and its files are kept open for writing.
    is_leaf: bool,
    complaints: Arc<Complaints>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Of this level alone.
    own: Limits,
    /// What holds for the directories beneath, on v1.
    handed: Handed,
    /// What is to stand in its files.
    limits: Limits,
    /// What is beneath it claims so much of the processor; idle, if that is only what nobody else wants.
    claims: Claims,
    is_idle: bool,
    written: Vec<Line>,
    below: HashMap<Box<str>, Weak<Dir>>,
    tasks: Option<Arc<OwnedFd>>,
    files: Vec<(&'static str, OwnedFd)>,
    /// A file holds something else than these limits.
    is_changed: bool,
}

/// What a directory of v1 leaves to those beneath it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Handed {
    cpu: Option<CpuQuota>,
    io: Vec<IoLimit>,
    cpus: Option<Box<str>>,
    mems: Option<Box<str>>,
}

impl Dir {
    /// The keeper's own directory, which is there already.
    pub fn node(hierarchy: Arc<Hierarchy>, complaints: Arc<Complaints>) -> Arc<Self> {
        let mut handed = Handed::default();
        let path = hierarchy.node.clone();
        if hierarchy.version == Version::V1 && hierarchy.controllers.has(Controller::Cpuset) {
            let above = |file| files::read(&path.parent()?.join(file)).ok().map(String::into_boxed_str);
            (handed.cpus, handed.mems) = (above("cpuset.cpus"), above("cpuset.mems"));
        }
        let state =
            State { written: lines::fresh(hierarchy.version, hierarchy.controllers), ..State::default() };
        let dir = Self { hierarchy, path, above: None, is_leaf: false, complaints, state: Mutex::new(state) };
        dir.apply(&mut dir.state.lock(), &handed);
        Arc::new(dir)
    }

    /// The directory of this name beneath; made with these limits if it is not there.
    pub fn below(
        self: &Arc<Self>,
        name: &str,
        is_leaf: bool,
        own: impl FnOnce() -> Limits,
    ) -> Result<Arc<Self>, FileError> {
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
            state: Mutex::new(State { own: own(), ..State::default() }),
        });
        let mut state = self.state.lock();
        dir.begin(&mut dir.state.lock(), &state.handed, is_new)?;
        state.below.retain(|_, below| below.strong_count() > 0);
        state.below.insert(name.into(), Arc::downgrade(&dir));
        Ok(dir)
    }

    /// What a directory needs before anything can be in it.
    fn begin(&self, state: &mut State, handed: &Handed, is_new: bool) -> Result<(), FileError> {
        let Hierarchy { version, controllers, .. } = *self.hierarchy;
        state.written = match is_new {
            true => lines::fresh(version, controllers),
            false => lines::unknown(version, controllers),
        };
        (state.tasks, state.files) = (None, Vec::new());
        if version == Version::V2 && !self.is_leaf {
            for controller in controllers.minus(Controllers::only(Controller::Cpuset)).iter() {
                enable(&self.path, controller)?;
            }
        }
        self.apply(state, handed);
        Ok(())
    }

    /// Somebody removed this directory, and maybe those above it.
    fn make_again(&self) -> Result<(), FileError> {
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

    /// Gives it these limits. What the kernel refuses is complained about; the rest holds.
    pub fn set(&self, own: Limits) {
        let handed = self.handed_from_above();
        let mut state = self.state.lock();
        if state.own != own || state.is_changed {
            (state.own, state.is_changed) = (own, false);
            self.apply(&mut state, &handed);
        }
    }

    fn handed_from_above(&self) -> Handed {
        self.above.as_ref().map(|above| above.state.lock().handed.clone()).unwrap_or_default()
    }

    /// Lowering goes from the bottom up and raising from the top down, so that none is ever above the one over it.
    fn apply(&self, state: &mut State, from_above: &Handed) {
        let (limits, handed) = match self.hierarchy.version {
            Version::V2 => (state.own.clone(), Handed::default()),
            Version::V1 => beneath(&state.own, from_above),
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
        // What is beneath may have stood in the way until now, as CPUs of v1 do.
        for (line, error) in self.write(state) {
            self.complain(&line, &error);
            self.fall_back(state, &line, from_above);
        }
    }

    fn complain(&self, line: &Line, error: &FileError) {
        self.complaints.add(codes::REFUSED, &format!("{}: {}", line.file, error.error), || {
            format!("this limit does not hold: the kernel does not take '{}'. {error}", line.text())
        });
    }

    /// A leaf beneath it claims something else of the processor now.
    pub fn claim(&self, from: Claim, to: Claim) {
        let mut state = self.state.lock();
        state.claims.change(from, to);
        let is_idle = state.claims.are_idle();
        if std::mem::replace(&mut state.is_idle, is_idle) != is_idle {
            for (line, error) in self.write(&mut state) {
                self.complain(&line, &error);
            }
        }
    }

    /// Nothing can be in a cpuset of v1 without CPUs: in the place of a list that is refused stands the one above.
    fn fall_back(&self, state: &mut State, line: &Line, from_above: &Handed) {
        let (mine, above) = match line.file {
            "cpuset.cpus" => (&mut state.handed.cpus, &from_above.cpus),
            "cpuset.mems" => (&mut state.handed.mems, &from_above.mems),
            _ => return,
        };
        if let (Version::V1, Some(above)) = (self.hierarchy.version, above) {
            *mine = Some(above.clone());
            let line = Line { value: above.to_string(), ..line.clone() };
            if self.write_line(state, &line).is_ok() {
                lines::remember(&mut state.written, line);
            }
        }
    }

    fn apply_below(state: &State) {
        for below in state.below.values().filter_map(Weak::upgrade) {
            below.apply(&mut below.state.lock(), &state.handed);
        }
    }

    /// Writes what differs from what was written. Returns what failed.
    fn write(&self, state: &mut State) -> Vec<(Line, FileError)> {
        let Hierarchy { version, controllers, has_idle, .. } = *self.hierarchy;
        let weight = if state.is_idle && has_idle { Weight::Idle } else { Weight::OfLimits };
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

    fn write_line(&self, state: &mut State, line: &Line) -> Result<(), FileError> {
        let path = self.path.join(line.file);
        if let Some((_, file)) = state.files.iter().find(|(file, _)| *file == line.file) {
            return files::write_to(file, &line.text()).map_err(|error| FileError::new(&path, error));
        }
        let file = match files::open(&path, OFlags::WRONLY) {
            Err(error) if error.is(Errno::NOENT) && line.file.starts_with("cpuset.") => {
                self.enable_cpuset()?;
                files::open(&path, OFlags::WRONLY)?
            }
            other => other?,
        };
        let written = files::write_to(&file, &line.text()).map_err(|error| FileError::new(&path, error));
        if self.is_leaf {
            state.files.push((line.file, file));
        }
        written
    }

    /// v2 only: there CPUs are bound nowhere until a cell asks for it.
    fn enable_cpuset(&self) -> Result<(), FileError> {
        let mut above = Vec::new();
        let mut next = &self.above;
        while let Some(dir) = next {
            above.push(dir);
            next = &dir.above;
        }
        self.hierarchy.enable_above(Controller::Cpuset)?;
        above.into_iter().rev().try_for_each(|dir| enable(&dir.path, Controller::Cpuset))
    }

    /// Where a process writes itself, or is written, to be here. Kept open.
    pub fn tasks(&self) -> Result<Arc<OwnedFd>, FileError> {
        let mut state = self.state.lock();
        if let Some(tasks) = &state.tasks {
            return Ok(Arc::clone(tasks));
        }
        // Who writes itself to `tasks` of v1 takes no lock that waits for a grace period of the kernel.
        let file = match self.hierarchy.version {
            Version::V1 => "tasks",
            Version::V2 => "cgroup.procs",
        };
        let tasks = Arc::new(files::open(&self.path.join(file), OFlags::WRONLY)?);
        state.tasks = Some(Arc::clone(&tasks));
        Ok(tasks)
    }

    /// Remembers that a file holds something else than was written, until limits are set again.
    pub fn changed(&self, file: &'static str, value: &str) {
        let mut state = self.state.lock();
        lines::remember(&mut state.written, Line { file, device: None, value: value.to_owned() });
        state.is_changed = true;
    }

    pub fn is_leaf(&self) -> bool {
        self.is_leaf
    }

    /// Makes it again if somebody removed it.
    pub fn see_to(&self) -> Result<(), FileError> {
        if self.path.exists() { Ok(()) } else { self.make_again() }
    }

    pub fn file(&self, name: &str) -> PathBuf {
        Path::new(&self.path).join(name)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        // The keeper's own goes last, by `Hierarchy::close`. One that is not empty is the next keeper's to clean.
        if self.above.is_some() {
            let _ = rustix::fs::rmdir(&self.path);
        }
    }
}

/// What is to be written in a directory of v1 with these limits beneath another, and what it hands on.
fn beneath(own: &Limits, above: &Handed) -> (Limits, Handed) {
    let cpu = own.cpu.filter(|_| ratio(own.cpu) <= ratio(above.cpu));
    let io = strictest(&own.io, &above.io);
    let cpus = own.cpus.clone().or_else(|| above.cpus.clone());
    let mems = own.mems.clone().or_else(|| above.mems.clone());
    let handed = Handed { cpu: cpu.or(above.cpu), io: io.clone(), cpus: cpus.clone(), mems: mems.clone() };
    (Limits { cpu, io, cpus, mems, ..own.clone() }, handed)
}

/// A quota's share of one core, in the unit in which v1 compares it (`to_ratio` of kernel/sched/core.c). Without a
/// quota: more than any.
fn ratio(cpu: Option<CpuQuota>) -> u64 {
    cpu.map_or(u64::MAX, |cpu| {
        let ratio = (u128::from(cpu.quota_us) << 20) / u128::from(cpu.period_us.max(1));
        u64::try_from(ratio).unwrap_or(u64::MAX)
    })
}

#[cfg(test)]
mod tests {
    use nagaya_cmdb::cell::Device;

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
            let own = Limits { cpu: own, ..Limits::default() };
            let (limits, to) = beneath(&own, &Handed { cpu: above, ..Handed::default() });
            assert_eq!((limits.cpu, to.cpu), (written, handed), "{own:?}");
        }
    }

    #[test]
    fn limits_of_disks_and_cpus_come_from_above() {
        let device = Device::Number { major: 8, minor: 0 };
        let of = |read, write| IoLimit { read_bps: read, write_bps: write, ..IoLimit::of(device) };
        let own = Limits { io: vec![of(Some(9), Some(1))], mems: Some("0".into()), ..Limits::default() };
        let above = Handed { io: vec![of(Some(5), None)], cpus: Some("0-3".into()), ..Handed::default() };
        let (limits, handed) = beneath(&own, &above);
        assert_eq!(limits.io, [of(Some(5), Some(1))]);
        assert_eq!((limits.cpus, limits.mems), (Some("0-3".into()), Some("0".into())));
        assert_eq!(handed.io, limits.io);
    }
}
