//! The cell of one request: its directories in all hierarchies, who is in them, what they used.
//!
//! Directories outlive their request: they go back to their branch, and the next request there writes only the limits
//! in which it differs. Not here: which directories a request gets (`branch`), how long it lives (`process`).

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

use nagaya_cmdb::cell::{Controller, Limits, Usage};
use parking_lot::Mutex;
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process_group};

use super::branch::{Branch, Join};
use super::claims::{Claim, Claimant};
use super::controllers::{Controllers, Version, only};
use super::device::Number;
use super::dir::Dir;
use super::ending;
use super::files::{self, FileError};
use super::memory::Kills;
use super::usage::{self, Counters, Meter, Source};
use super::{CellError, Shared, codes};
use crate::authority::Guard;
use crate::sys::Entrance;

/// Longest list of processes that is read at once, bytes: some thousand numbers. Whether there are any is all that
/// matters beyond.
const LIST_LEN_MAX: usize = 32 * 1024;

/// A tree of so many processes at most is killed one by one, twice at most: that leaves the cell fit for another
/// request, as a write to `cgroup.kill` does not.
const ONE_BY_ONE_MAX: usize = 8;
const ENDS_ONE_BY_ONE: u32 = 2;

/// The cell of one request. It goes by `release`, not by dropping: a tree that still runs keeps its leaf.
#[derive(Debug)]
pub struct Leaf {
    shared: Arc<Shared>,
    branch: Arc<Branch>,
    name: Box<str>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// None: it was given back.
    body: Option<Body>,
    /// None: no controller shares the processor out, or it was given back.
    claimant: Option<Claimant>,
    /// For each hierarchy the directory a process of it is in. None: nothing there limits it.
    joined: Vec<Option<Arc<Dir>>>,
    tasks: Vec<Arc<OwnedFd>>,
    limits: Limits,
    roots: Vec<Number>,
    /// What the counters were when it began.
    began: Counters,
    /// No directory counts its disk alone, so its processes are asked: what they said last, and when it began.
    asks: bool,
    said: Counters,
    said_began: Counters,
    /// What was used, for who asks after it was given back.
    last: Usage,
    /// What stops it in time, if it is placed here by a cluster.
    guard: Option<Guard>,
    /// What lives in it may be stopped by the freezer of v1.
    in_freezer: bool,
}

/// A leaf's directories and what is open of them, without a request.
#[derive(Debug)]
pub struct Body {
    pub number: u64,
    /// For each hierarchy, where the leaf has been needed there.
    dirs: Vec<Option<Arc<Dir>>>,
    fence: Option<Fence>,
    meter: Meter,
    /// How often its processes were killed.
    ends: u32,
    /// It cannot be used again: what is born in a cgroup that was ever killed as a whole is killed at once (`birth`).
    is_spent: bool,
}

/// What of the fence's directory is kept open.
#[derive(Debug)]
struct Fence {
    /// v2: children are born in it; its `cgroup.kill` and `cgroup.events`.
    v2: Option<(Arc<OwnedFd>, OwnedFd, File)>,
    procs: Procs,
}

/// The list of who is in a directory. v1 tells who reads an open file again what it told before, for a second
/// (`cgroup_pidlist_start` of kernel/cgroup/cgroup-v1.c), so there it is opened for each look.
#[derive(Debug)]
enum Procs {
    Open(File),
    At(PathBuf),
}

impl Procs {
    fn look<R>(&self, read: impl FnOnce(&File) -> io::Result<R>) -> io::Result<R> {
        match self {
            Self::Open(file) => read(file),
            Self::At(path) => match File::open(path) {
                // As an open file says it whose directory was removed.
                Err(error) if error.kind() == io::ErrorKind::NotFound => Err(Errno::NODEV.into()),
                opened => read(&opened?),
            },
        }
    }
}

impl Fence {
    fn open(dir: &Dir) -> Result<Self, FileError> {
        let reading = |name| files::open(&dir.file(name), OFlags::RDONLY).map(File::from);
        let v2 = match dir.hierarchy.version {
            Version::V1 => None,
            Version::V2 => Some((
                Arc::new(files::open(&dir.path, OFlags::RDONLY | OFlags::DIRECTORY)?),
                files::open(&dir.file("cgroup.kill"), OFlags::WRONLY)?,
                reading("cgroup.events")?,
            )),
        };
        let procs = match v2 {
            Some(_) => Procs::Open(reading("cgroup.procs")?),
            None => Procs::At(dir.file("cgroup.procs")),
        };
        Ok(Self { v2, procs })
    }

    fn is_empty(&self) -> io::Result<bool> {
        let mut buffer = [0; 256];
        match &self.v2 {
            // Also what is about to be gone and listed no more.
            Some((_, _, events)) => {
                let len = events.read_at(&mut buffer, 0)?;
                Ok(usage::keyed(str::from_utf8(&buffer[..len]).unwrap_or(""), "populated") == Some(0))
            }
            None => Ok(self.procs.look(|procs| procs.read_at(&mut buffer, 0))? == 0),
        }
    }

    fn pids(&self) -> io::Result<Vec<Pid>> {
        let mut buffer = vec![0; 512];
        self.procs.look(|procs| {
            loop {
                let len = procs.read_at(&mut buffer, 0)?;
                if len < buffer.len() || len >= LIST_LEN_MAX {
                    return Ok(ending::pids(str::from_utf8(&buffer[..len]).unwrap_or("")));
                }
                buffer.resize((len * 2).min(LIST_LEN_MAX), 0);
            }
        })
    }
}

impl Body {
    pub fn new(number: u64, hierarchies: usize) -> Self {
        Self {
            number,
            dirs: vec![None; hierarchies],
            fence: None,
            meter: Meter::default(),
            ends: 0,
            is_spent: false,
        }
    }

    /// Its directory in this hierarchy, made beneath `above` if it has none, with these limits.
    pub fn dir(&mut self, index: usize, above: &Arc<Dir>, limits: Limits) -> Result<Arc<Dir>, FileError> {
        if let Some(dir) = &self.dirs[index] {
            dir.set(limits);
            return Ok(Arc::clone(dir));
        }
        let dir = above.below(&format!("r{}", self.number), true, || limits)?;
        self.open(&dir)?;
        self.dirs[index] = Some(Arc::clone(&dir));
        Ok(dir)
    }

    fn open(&mut self, dir: &Dir) -> Result<(), FileError> {
        let hierarchy = &dir.hierarchy;
        let has = |one| hierarchy.controllers.has(one);
        let mut add = |source: Source| {
            self.meter.add(source, &dir.path).map_err(|error| FileError::new(&dir.file(source.file()), error))
        };
        if has(Controller::Cpuacct) {
            add(match hierarchy.version {
                Version::V1 => Source::CpuacctUsage,
                Version::V2 => Source::CpuStatUsage,
            })?;
        }
        if has(Controller::Cpu) && !add(Source::CpuStatLocal)? {
            add(Source::CpuStatThrottled)?;
        }
        if has(Controller::Blkio) {
            add(match hierarchy.version {
                Version::V1 => Source::BlkioBytes,
                Version::V2 => Source::IoStat,
            })?;
        }
        if hierarchy.is_fence {
            self.fence = Some(Fence::open(dir)?);
        }
        Ok(())
    }

    /// Makes it ready for another request. False: it cannot have one.
    pub fn renew(&mut self) -> bool {
        self.ends = 0;
        !self.is_spent
    }

    /// Whether its directories are still there, as far as something of them is read. What it has used so far.
    pub fn read(&self) -> io::Result<Counters> {
        self.meter.read()
    }
}

/// What of a request's limits its directory in one hierarchy has. Memory is its tenant's: that of a leaf would still
/// be charged with files of the request before.
pub fn of_leaf(limits: &Limits, above: &Dir) -> Limits {
    only(limits, above.hierarchy.controllers.minus(Controllers::only(Controller::Memory)))
}

impl Leaf {
    /// A request in these directories. `joined`: for each hierarchy where its processes go.
    pub fn new(
        shared: Arc<Shared>,
        branch: Arc<Branch>,
        body: Body,
        joined: Vec<Option<Arc<Dir>>>,
        (limits, roots): (Limits, Vec<Number>),
    ) -> Result<Self, FileError> {
        let name = format!("{}/r{}", branch.path(), body.number).into();
        let mut v1: Vec<_> =
            joined.iter().flatten().filter(|dir| dir.hierarchy.version == Version::V1).collect();
        // Who enters holds the kernel's lock on all cgroups meanwhile. In a directory that is out of CPU time it would hold
        // it until there is some, and with it every fork and move of the machine.
        v1.sort_by_key(|dir| dir.hierarchy.controllers.has(Controller::Cpu));
        let tasks = v1.into_iter().map(|dir| dir.tasks()).collect::<Result<_, _>>()?;
        let counted = |dir: &Arc<Dir>| dir.hierarchy.controllers.has(Controller::Blkio) && dir.is_leaf();
        let asks = !joined.iter().flatten().any(counted);
        let shares = |dir: &&Arc<Dir>| dir.hierarchy.controllers.has(Controller::Cpu) && dir.is_leaf();
        // Before anything is born in it.
        let claimant = joined.iter().flatten().find(shares).map(|dir| Claimant::new(Arc::clone(dir)));
        let state = State {
            body: Some(body),
            claimant,
            joined,
            tasks,
            limits,
            roots,
            began: Counters::default(),
            asks,
            said: Counters::default(),
            said_began: Counters::default(),
            last: Usage::default(),
            guard: None,
            in_freezer: false,
        };
        Ok(Self { shared, branch, name, state: Mutex::new(state) })
    }

    /// Where it is in the tree, as `nagaya cells` shows it: `demo/wiki/r12`.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn shared(&self) -> &Shared {
        &self.shared
    }

    /// Its directory in cgroup v2, if that is the fence.
    pub(super) fn freezable(&self) -> Option<PathBuf> {
        let state = self.state.lock();
        let dirs = state.body.iter().flat_map(|body| body.dirs.iter().flatten());
        let is_fence = |dir: &&Arc<Dir>| dir.hierarchy.is_fence && dir.hierarchy.version == Version::V2;
        dirs.into_iter().find(is_fence).map(|dir| dir.path.clone())
    }

    pub fn branch(&self) -> &Arc<Branch> {
        &self.branch
    }

    /// Its own directories.
    pub fn dirs(&self) -> Vec<Arc<Dir>> {
        let state = self.state.lock();
        state.body.iter().flat_map(|body| body.dirs.iter().flatten().cloned()).collect()
    }

    /// Whether a request that is to be in these directories can be in this leaf.
    pub fn is_joined(&self, joins: &[Join]) -> bool {
        let state = self.state.lock();
        let Some(body) = &state.body else { return false };
        let same = |(index, join): (usize, &Join)| match (join, &state.joined[index]) {
            (Join::Leaf(_), Some(dir)) => body.dirs[index].as_ref().is_some_and(|own| Arc::ptr_eq(own, dir)),
            (Join::Dir(to), Some(dir)) => Arc::ptr_eq(to, dir),
            (Join::Out, None) => true,
            _ => false,
        };
        joins.iter().enumerate().all(same)
    }

    // === Limits ===

    /// Puts these limits in the place of those it has, while work runs in it. A kind of limit the request had none of
    /// may hold only from the next request on, where v1 has it in a directory above.
    pub fn set(&self, limits: &Limits) {
        let mut state = self.state.lock();
        if state.limits != *limits {
            state.limits = limits.clone();
            state.apply(&self.shared);
        }
    }

    /// The same, for the next request of a worker that stays.
    pub fn refit(&self, limits: &Limits, roots: Vec<Number>) {
        let mut state = self.state.lock();
        state.claim(Claim::Share);
        let is_same = state.limits == *limits && (state.roots == roots || limits.io.is_empty());
        state.roots = roots;
        if !is_same {
            state.limits = limits.clone();
            state.apply(&self.shared);
        }
    }

    /// From now on what is in it wants so much of the processor.
    pub fn claim(&self, claim: Claim) {
        self.state.lock().claim(claim);
    }

    /// The limits it has.
    pub fn limits(&self) -> Limits {
        self.state.lock().limits.clone()
    }

    // === Who is in it ===

    /// For `sys::spawn`.
    pub fn entrance(&self) -> Entrance {
        let state = self.state.lock();
        let v2 = state.body.as_ref().and_then(|body| body.fence.as_ref()?.v2.as_ref());
        Entrance { born: v2.map(|(dir, ..)| Arc::clone(dir)), tasks: state.tasks.clone() }
    }

    /// Who is born in it enters this file of cgroup v1, too.
    pub(super) fn enter_too(&self, tasks: OwnedFd) {
        self.state.lock().tasks.push(Arc::new(tasks));
    }

    pub(super) fn may_be_in_freezer(&self) {
        self.state.lock().in_freezer = true;
    }

    /// Keeps it guarded until nothing lives in it.
    pub fn keep_guarded(&self, guard: Guard) {
        self.state.lock().guard = Some(guard);
    }

    /// Moves a running process of one thread here from the leaf it is in. Only hierarchies in which the two differ.
    /// After an error it may be in some directories of both: it can only be ended.
    pub fn adopt(&self, pid: Pid, from: &Self) -> Result<(), CellError> {
        let text = pid.as_raw_nonzero().to_string();
        let enter = |to: &Dir| {
            let tasks = to.tasks()?;
            files::write_to(&tasks, &text).map_err(|error| FileError::new(&to.path, error))
        };
        self.not_in(from).iter().try_for_each(|to| enter(to)).map_err(|error| self.unmoved(&text, &error))
    }

    /// The same with all its threads. After an error some of it may be in directories of both; `adopt_whole` the other way puts
    /// it back.
    pub fn adopt_whole(&self, pid: Pid, from: &Self) -> Result<(), CellError> {
        let text = pid.as_raw_nonzero().to_string();
        let enter = |to: &Dir| files::write(&to.file("cgroup.procs"), &text);
        self.not_in(from).iter().try_for_each(|to| enter(to)).map_err(|error| self.unmoved(&text, &error))
    }

    fn unmoved(&self, process: &str, error: &FileError) -> CellError {
        let message = format!("process {process} cannot be moved to cell {}: {error}", self.name);
        CellError { code: codes::MOVE, message }
    }

    /// The directories that who comes from another leaf has to enter, to be in this one. None, if one of both was given back.
    fn not_in(&self, from: &Self) -> Vec<Arc<Dir>> {
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

    /// What lives in it.
    pub fn pids(&self) -> io::Result<Vec<Pid>> {
        let state = self.state.lock();
        state.body.as_ref().and_then(|body| body.fence.as_ref()).map_or(Ok(Vec::new()), Fence::pids)
    }

    /// Kills everything in it; what dies slowly is still there afterwards. `leader` is the first process,
    /// which must not be reaped yet: its number stands for its group.
    pub fn end(&self, leader: Option<Pid>) -> io::Result<()> {
        let mut state = self.state.lock();
        let state = &mut *state;
        state.ask(leader);
        // Dying takes time on the processor, too.
        state.claim(Claim::Share);
        let Some(body) = &mut state.body else { return Ok(()) };
        match &body.fence {
            Some(fence @ Fence { v2: Some((_, kill, _)), .. }) => {
                body.ends += 1;
                let pids = fence.pids()?;
                // Most requests end by themselves and leave nothing, and most others are a process or two.
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

    /// True once nothing lives in it: then it is for the next request, and no longer for this one.
    pub fn release(&self) -> io::Result<bool> {
        let mut state = self.state.lock();
        let Some(body) = &state.body else { return Ok(true) };
        let is_empty = match body.fence.as_ref().map(Fence::is_empty) {
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

    /// Counts what the kernel kills here for want of memory, from now on. With others in the same directory it counts
    /// theirs, too. None: nobody counts.
    pub fn kills(&self) -> Option<Kills> {
        let state = self.state.lock();
        let counts = |dir: &&Arc<Dir>| dir.hierarchy.controllers.has(Controller::Memory);
        let dir = state.joined.iter().flatten().find(counts)?;
        match dir.hierarchy.version {
            Version::V1 => Kills::open(Version::V1, &dir.path),
            // The one above counts what is beneath, and is still there when a leaf that was killed has gone.
            Version::V2 => Kills::open(Version::V2, dir.path.parent()?),
        }
    }

    // === What it used ===

    /// `usage` counts from now.
    pub fn begin(&self) {
        let mut state = self.state.lock();
        state.ask(None);
        state.said_began = state.said;
        // Who cannot be read counts nothing.
        state.began = state.body.as_ref().and_then(|body| body.read().ok()).unwrap_or_default();
    }

    /// What the counters were at the moment it was taken.
    pub fn began_at(&self, counters: Counters) {
        self.state.lock().began = counters;
    }

    /// CPU time used in it, and time it stood still because a quota was used up, microseconds, since it was made. None: somebody
    /// removed it.
    pub fn cpu_us(&self) -> Option<(u64, u64)> {
        let counters = self.state.lock().body.as_ref()?.read().ok()?;
        Some((counters.cpu_us, counters.throttled_us))
    }

    /// For how long some of what lives in it waited for a CPU, since it was made. None: this kernel does not tell.
    pub fn waited_us(&self) -> Option<u64> {
        let dirs = self.dirs();
        let dir = dirs.iter().find(|dir| dir.hierarchy.version == Version::V2)?;
        usage::waited_us(&std::fs::read_to_string(dir.file("cpu.pressure")).ok()?)
    }

    /// What was used here since `begin`.
    pub fn usage(&self) -> Usage {
        let mut state = self.state.lock();
        state.ask(None);
        state.usage()
    }
}

impl State {
    fn claim(&mut self, claim: Claim) {
        if let Some(claimant) = &mut self.claimant {
            claimant.set(claim);
        }
    }

    fn apply(&self, shared: &Shared) {
        let resolved = shared.resolve(&self.limits, &self.roots);
        for dir in self.body.iter().flat_map(|body| body.dirs.iter().flatten()) {
            dir.set(of_leaf(&resolved, dir));
        }
    }

    fn usage(&self) -> Usage {
        let Some(body) = &self.body else { return self.last };
        // A directory that somebody removed has told the last time.
        let Ok(counters) = body.read() else { return self.last };
        let mut used = counters - self.began;
        if self.asks {
            let said = self.said - self.said_began;
            (used.read_bytes, used.write_bytes) = (said.read_bytes, said.write_bytes);
        }
        used.into()
    }

    /// Asks the processes what they read and wrote, where no directory counts it. Who ends takes its numbers along,
    /// or adds them to those of who waits for it: the sum is what it was at its most.
    fn ask(&mut self, leader: Option<Pid>) {
        let Some(fence) = self.body.as_ref().and_then(|body| body.fence.as_ref()).filter(|_| self.asks)
        else {
            return;
        };
        let mut pids = fence.pids().unwrap_or_default();
        // A process that has ended is listed no more, and still says what it used until it is reaped.
        pids.extend(leader.filter(|leader| !pids.contains(leader)));
        let said = usage::of_processes(&pids);
        self.said.read_bytes = self.said.read_bytes.max(said.read_bytes);
        self.said.write_bytes = self.said.write_bytes.max(said.write_bytes);
    }
}
