//! The cell of one request: its directories in all hierarchies, its processes, its use.
//!
//! Directories outlive their request: they go back to their branch, and the next request there
//! writes only the limits in which it differs. Not here: which directories a request gets
//! (`branch`), how long it lives (`process`).

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use nagaya_records::cell::{CgroupController, LimitSet, RequestUsage};
use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process_group};

use crate::cells::cpu_demand::{CpuDemand, CpuDemandGuard};
use crate::sys::CellEntrance;

use super::account::CellAccount;
use super::branch::{CellBranch, JoinTarget};
use super::controllers::CgroupVersion;
use super::device::DeviceNumber;
use super::dir::CgroupDir;
use super::error::CellError;
use super::files::{self, CgroupFileError};
use super::leaf_dirs::{LeafDirs, TreeKill, of_leaf};
use super::memory::OomKills;
use super::tree::CellTree;
use super::usage::{self, CellCounters};
use super::{codes, ending};

/// A tree of at most this many processes is killed one by one, at most twice. That leaves the cell
/// fit for another request, as a write to `cgroup.kill` does not.
const ONE_BY_ONE_MAX: usize = 8;
const ENDS_ONE_BY_ONE: u32 = 2;

/// The cell of one request. `release` returns it, not a drop: a tree that still runs keeps its
/// leaf.
#[derive(Debug)]
pub struct Leaf {
    shared: Arc<CellTree>,
    branch: Arc<CellBranch>,
    name: Box<str>,
    state: Mutex<LeafState>,
}

/// Something that is dropped once nothing lives in a leaf.
pub trait KeptGuard: fmt::Debug + Send + Sync {}

#[derive(Debug)]
struct LeafState {
    /// `None` after it was returned.
    body: Option<LeafDirs>,
    /// `None` if no controller shares out the CPU, or it was returned.
    claimant: Option<CpuDemandGuard>,
    /// For each hierarchy the directory of its processes. `None` if nothing there limits it.
    joined: Vec<Option<Arc<CgroupDir>>>,
    tasks: Vec<Arc<OwnedFd>>,
    limits: LimitSet,
    roots: Vec<DeviceNumber>,
    account: CellAccount,
    /// Its use, for callers after it was returned.
    last: RequestUsage,
    /// Counts kernel kills for lack of memory in it. `None` if nobody counts.
    kills: Option<OomKills>,
    /// Freezes it in time, if a cluster placed it here.
    guard: Option<Box<dyn KeptGuard>>,
    /// Its processes may be frozen by the freezer of v1.
    in_freezer: bool,
}

impl Leaf {
    /// Makes the leaf of a request in these directories. `joined`: for each hierarchy where its
    /// processes go.
    pub fn new(
        shared: Arc<CellTree>,
        branch: Arc<CellBranch>,
        body: LeafDirs,
        joined: Vec<Option<Arc<CgroupDir>>>,
        (limits, roots): (LimitSet, Vec<DeviceNumber>),
    ) -> Result<Self, CgroupFileError> {
        let name = format!("{}/r{}", branch.path(), body.number).into();
        let mut v1: Vec<_> =
            joined.iter().flatten().filter(|dir| dir.hierarchy.version == CgroupVersion::V1).collect();
        // A process that enters holds the kernel's lock on all cgroups meanwhile. In a directory
        // without CPU time it would hold it until there is some. Every fork and move of the machine
        // would wait for it.
        v1.sort_by_key(|dir| dir.hierarchy.controllers.has(CgroupController::Cpu));
        let tasks = v1.into_iter().map(|dir| dir.tasks()).collect::<Result<_, _>>()?;
        let counted =
            |dir: &Arc<CgroupDir>| dir.hierarchy.controllers.has(CgroupController::Blkio) && dir.is_leaf();
        let account = CellAccount::new(!joined.iter().flatten().any(counted));
        let shares =
            |dir: &&Arc<CgroupDir>| dir.hierarchy.controllers.has(CgroupController::Cpu) && dir.is_leaf();
        // Before anything is born in it.
        let claimant = joined.iter().flatten().find(shares).map(|dir| CpuDemandGuard::new(Arc::clone(dir)));
        let state = LeafState {
            body: Some(body),
            claimant,
            joined,
            tasks,
            limits,
            roots,
            account,
            last: RequestUsage::default(),
            kills: None,
            guard: None,
            in_freezer: false,
        };
        Ok(Self { shared, branch, name, state: Mutex::new(state) })
    }

    /// Returns its place in the tree, under the name in `nagaya cells`: `demo/wiki/r12`.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn shared(&self) -> &CellTree {
        &self.shared
    }

    /// Returns its directory in cgroup v2, if v2 keeps trees together.
    pub(super) fn freezable(&self) -> Option<PathBuf> {
        let state = self.state.lock();
        let dirs = state.body.iter().flat_map(|body| body.dirs.iter().flatten());
        let is_fence =
            |dir: &&Arc<CgroupDir>| dir.hierarchy.is_fence && dir.hierarchy.version == CgroupVersion::V2;
        dirs.into_iter().find(is_fence).map(|dir| dir.path.clone())
    }

    pub fn branch(&self) -> &Arc<CellBranch> {
        &self.branch
    }

    /// Returns its own directories.
    pub fn dirs(&self) -> Vec<Arc<CgroupDir>> {
        let state = self.state.lock();
        state.body.iter().flat_map(|body| body.dirs.iter().flatten().cloned()).collect()
    }

    /// Whether a request with these directories can be in this leaf.
    pub fn is_joined(&self, joins: &[JoinTarget]) -> bool {
        let state = self.state.lock();
        let Some(body) = &state.body else { return false };
        let same = |(index, join): (usize, &JoinTarget)| match (join, &state.joined[index]) {
            (JoinTarget::Leaf(_), Some(dir)) => {
                body.dirs[index].as_ref().is_some_and(|own| Arc::ptr_eq(own, dir))
            }
            (JoinTarget::Dir(to), Some(dir)) => Arc::ptr_eq(to, dir),
            (JoinTarget::Out, None) => true,
            _ => false,
        };
        joins.iter().enumerate().all(same)
    }

    // === Limits ===

    /// Replaces its limits while work runs in it. A kind of limit that the request did not have may
    /// apply only from the next request on. That is so where v1 has it in a parent directory.
    pub fn set(&self, limits: &LimitSet) {
        let mut state = self.state.lock();
        if state.limits != *limits {
            state.limits = limits.clone();
            state.apply(&self.shared);
        }
    }

    /// As `set`, for the next request of a worker that stays. Its CPU demand is the gate's to set.
    pub fn refit(&self, limits: &LimitSet, roots: Vec<DeviceNumber>) {
        let mut state = self.state.lock();
        let is_same = state.limits == *limits && (state.roots == roots || limits.io.is_empty());
        state.roots = roots;
        if !is_same {
            state.limits = limits.clone();
            state.apply(&self.shared);
        }
    }

    /// Sets the CPU demand of its processes.
    pub fn claim(&self, claim: CpuDemand) {
        self.state.lock().claim(claim);
    }

    /// Returns its limits.
    pub fn limits(&self) -> LimitSet {
        self.state.lock().limits.clone()
    }

    // === Processes ===

    /// Returns the directories for `sys::spawn`.
    pub fn entrance(&self) -> CellEntrance {
        let state = self.state.lock();
        let v2 = state.body.as_ref().and_then(|body| body.fence.as_ref()?.v2.as_ref());
        CellEntrance { born: v2.map(|(dir, ..)| Arc::clone(dir)), tasks: state.tasks.clone() }
    }

    /// Makes new processes enter this file of cgroup v1, too.
    pub(super) fn enter_too(&self, tasks: OwnedFd) {
        self.state.lock().tasks.push(Arc::new(tasks));
    }

    pub(super) fn may_be_in_freezer(&self) {
        self.state.lock().in_freezer = true;
    }

    /// Keeps it guarded until nothing lives in it.
    pub fn keep_guarded(&self, guard: impl KeptGuard + 'static) {
        self.state.lock().guard = Some(Box::new(guard));
    }

    /// Moves a running process of one thread here from its leaf, in the hierarchies in which the
    /// two differ. After an error it may be in some directories of both, and can only be ended.
    pub fn adopt(&self, pid: Pid, from: &Self) -> Result<(), CellError> {
        let text = pid.as_raw_nonzero().to_string();
        let enter = |to: &CgroupDir| {
            let tasks = to.tasks()?;
            files::write_to(&tasks, &text).map_err(|error| CgroupFileError::new(&to.path, error))
        };
        self.not_in(from).iter().try_for_each(|to| enter(to)).map_err(|error| self.unmoved(&text, &error))
    }

    /// As `adopt`, with all its threads. After an error some of it may be in directories of both.
    /// `adopt_whole` the other way puts it back.
    pub fn adopt_whole(&self, pid: Pid, from: &Self) -> Result<(), CellError> {
        let text = pid.as_raw_nonzero().to_string();
        let enter = |to: &CgroupDir| files::write(&to.file("cgroup.procs"), &text);
        self.not_in(from).iter().try_for_each(|to| enter(to)).map_err(|error| self.unmoved(&text, &error))
    }

    fn unmoved(&self, process: &str, error: &CgroupFileError) -> CellError {
        let message = format!("process {process} cannot be moved to cell {}: {error}", self.name);
        CellError { code: codes::MOVE, message }
    }

    /// Returns the directories that a process from another leaf has to enter. Empty if one of both
    /// leaves was returned.
    fn not_in(&self, from: &Self) -> Vec<Arc<CgroupDir>> {
        let before = from.state.lock().joined.clone();
        let now = self.state.lock().joined.clone();
        let differing = now.into_iter().zip(before).enumerate().filter_map(|(index, moved)| match moved {
            (Some(now), Some(before)) if Arc::ptr_eq(&now, &before) => None,
            (Some(now), _) => Some(now),
            (None, Some(_)) => Some(Arc::clone(&self.shared.trees[index])),
            (None, None) => None,
        });
        differing.collect()
    }

    /// Returns the processes in it.
    pub fn pids(&self) -> io::Result<Vec<Pid>> {
        let state = self.state.lock();
        state.body.as_ref().and_then(|body| body.fence.as_ref()).map_or(Ok(Vec::new()), TreeKill::pids)
    }

    /// Kills everything in it. A process that dies slowly is still there afterwards. `leader` is
    /// the first process, which must not be reaped yet, because its number is that of its group.
    pub fn end(&self, leader: Option<Pid>) -> io::Result<()> {
        let mut state = self.state.lock();
        let state = &mut *state;
        state.ask(leader);
        // Dying takes CPU time, too.
        state.claim(CpuDemand::Share);
        let Some(body) = &mut state.body else { return Ok(()) };
        match &body.fence {
            Some(fence @ TreeKill { v2: Some((_, kill, _)), .. }) => {
                body.ends += 1;
                let pids = fence.pids()?;
                // Most requests end by themselves and leave nothing, and most others are a process
                // or two.
                if pids.len() <= ONE_BY_ONE_MAX && body.ends <= ENDS_ONE_BY_ONE {
                    return ending::end_these(&pids, || fence.pids());
                }
                body.is_spent = true;
                files::write_to(kill, "1")
            }
            Some(_) => {
                let dirs = body.dirs.iter().flatten();
                for dir in dirs.filter(|dir| dir.hierarchy.is_fence) {
                    dir.changed("pids.max", "0");
                    ending::end_listed(&dir.path)?;
                }
                if state.in_freezer {
                    self.let_the_killed_go();
                }
                Ok(())
            }
            None => match leader.map(|pid| kill_process_group(pid, Signal::KILL)) {
                None | Some(Ok(()) | Err(Errno::SRCH)) => Ok(()),
                Some(Err(errno)) => Err(errno.into()),
            },
        }
    }

    /// Returns the cell to its branch. True once nothing lives in it: then it is free for the next
    /// request.
    pub fn release(&self) -> io::Result<bool> {
        let mut state = self.state.lock();
        let Some(body) = &state.body else { return Ok(true) };
        let is_empty = match body.fence.as_ref().map(TreeKill::is_empty) {
            // Somebody removed it, so nothing was in it.
            Some(Err(error)) if error.raw_os_error() == Some(Errno::NODEV.raw_os_error()) => true,
            Some(empty) => empty?,
            None => true,
        };
        if !is_empty {
            return Ok(false);
        }
        state.last = state.usage();
        if let Some(body) = state.body.take() {
            (state.joined, state.tasks) = (Vec::new(), Vec::new());
            let (guard, claimant) = (state.guard.take(), state.claimant.take());
            drop(state);
            drop((guard, claimant));
            self.branch.give_back(body, &self.shared);
        }
        Ok(true)
    }

    /// Counts processes that the kernel kills here for lack of memory, from now on. If others are
    /// in the same directory, theirs count, too. `None` if nobody counts them.
    pub fn kills(&self) -> Option<OomKills> {
        let state = self.state.lock();
        let counts = |dir: &&Arc<CgroupDir>| dir.hierarchy.controllers.has(CgroupController::Memory);
        let dir = state.joined.iter().flatten().find(counts)?;
        match dir.hierarchy.version {
            CgroupVersion::V1 => OomKills::open(CgroupVersion::V1, &dir.path),
            // The parent directory counts the leaf's kills, and still exists when a killed leaf is
            // gone.
            CgroupVersion::V2 => OomKills::open(CgroupVersion::V2, dir.path.parent()?),
        }
    }

    /// Counts the same from now on, for this cell alone, where it has a count of its own.
    pub fn count_kills(&self) {
        let mut state = self.state.lock();
        let counts = |dir: &&Arc<CgroupDir>| dir.hierarchy.controllers.has(CgroupController::Memory);
        let dir = state.joined.iter().flatten().find(counts);
        state.kills = dir.and_then(|dir| OomKills::open_own(dir.hierarchy.version, &dir.path));
    }

    /// Returns how many processes were killed since `begin`, if `count_kills` was called. Where the
    /// cell has no count of its own, those of its site or tenant count, too.
    pub fn kills_since_begin(&self) -> u64 {
        self.state.lock().kills.as_ref().map_or(0, OomKills::count)
    }

    // === Use ===

    /// Makes `usage` and `kills_since_begin` count from now.
    pub fn begin(&self) {
        let mut state = self.state.lock();
        state.forget_kills();
        state.ask(None);
        // Counters that cannot be read count nothing.
        let counters = state.body.as_ref().and_then(|body| body.read().ok()).unwrap_or_default();
        state.account.begin(counters);
    }

    /// As `usage` and then `begin`, with one reading of the counters. `None`, and nothing is
    /// changed, if another process than this one is in it, the counters cannot be read, or the use
    /// is not accepted.
    pub fn begin_next(&self, pid: Pid, accepts: impl Fn(&RequestUsage) -> bool) -> Option<RequestUsage> {
        let mut state = self.state.lock();
        let state = &mut *state;
        let body = state.body.as_ref().filter(|body| body.has_only(pid))?;
        let counters = body.read().ok()?;
        if state.account.reads_processes() {
            state.account.note_disk_use(&[pid]);
        }
        let used = state.account.used(counters);
        if !accepts(&used) {
            return None;
        }
        state.forget_kills();
        state.account.begin_process(counters, pid);
        Some(used)
    }

    /// As `begin_next`, after a short request. Reads no counters: the CPU time is that of the
    /// process, and all other use is part of a later reading. `None`, and nothing is changed, if
    /// the counters have to be read, also for a cell with limits of its own.
    pub fn begin_next_quick(&self, pid: Pid) -> Option<RequestUsage> {
        let mut state = self.state.lock();
        if !state.limits.is_empty() || !state.body.as_ref()?.has_only(pid) {
            return None;
        }
        state.account.take_quick(pid)
    }

    /// Sets the counters at the moment it was taken.
    pub fn began_at(&self, counters: CellCounters) {
        self.state.lock().account.began_at(counters);
    }

    /// Returns CPU time used in it, and time throttled by a quota, microseconds, since it was made.
    /// `None` if somebody removed it.
    pub fn cpu_us(&self) -> Option<(u64, u64)> {
        let counters = self.state.lock().body.as_ref()?.read().ok()?;
        Some((counters.cpu_us, counters.throttled_us))
    }

    /// Returns the time for which some of its processes waited for a CPU, since it was made. `None`
    /// if this kernel does not report it.
    pub fn waited_us(&self) -> Option<u64> {
        let dirs = self.dirs();
        let dir = dirs.iter().find(|dir| dir.hierarchy.version == CgroupVersion::V2)?;
        usage::waited_us(&std::fs::read_to_string(dir.file("cpu.pressure")).ok()?)
    }

    /// Returns the use since `begin`.
    pub fn usage(&self) -> RequestUsage {
        let mut state = self.state.lock();
        state.ask(None);
        state.usage()
    }
}

impl LeafState {
    fn claim(&mut self, claim: CpuDemand) {
        if let Some(claimant) = &mut self.claimant {
            claimant.set(claim);
        }
    }

    fn forget_kills(&mut self) {
        if let Some(kills) = &mut self.kills {
            kills.forget();
        }
    }

    fn apply(&self, shared: &CellTree) {
        let resolved = shared.resolve(&self.limits, &self.roots);
        for dir in self.body.iter().flat_map(|body| body.dirs.iter().flatten()) {
            dir.set(of_leaf(&resolved, dir));
        }
    }

    fn usage(&self) -> RequestUsage {
        let Some(body) = &self.body else { return self.last };
        // The values of a directory that somebody removed are final.
        body.read().map_or(self.last, |counters| self.account.used(counters))
    }

    /// Reads what the processes read and wrote, where no directory counts it.
    fn ask(&mut self, leader: Option<Pid>) {
        if !self.account.reads_processes() {
            return;
        }
        let Some(fence) = self.body.as_ref().and_then(|body| body.fence.as_ref()) else { return };
        let mut pids = fence.pids().unwrap_or_default();
        // A process that has ended is no longer listed, but its numbers can be read until it is
        // reaped.
        pids.extend(leader.filter(|leader| !pids.contains(leader)));
        self.account.note_disk_use(&pids);
    }
}
