//! The directories of one leaf in all hierarchies, and what is open of them. They outlive a
//! request.
//!
//! Not here: who is in them for which request (`leaf`).

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

use nagaya_records::cell::{CgroupController, LimitSet};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::process::Pid;

use super::controllers::{CgroupVersion, ControllerSet, only};
use super::dir::CgroupDir;
use super::ending;
use super::files::{self, CgroupFileError};
use super::usage::{self, CellCounters, CellMeter, CounterSource};

/// Maximum length of a process list that is read at once, bytes: some thousand numbers. Beyond that
/// only the existence of processes matters.
const LIST_LEN_MAX: usize = 32 * 1024;

/// A leaf's directories and their open files, without a request.
#[derive(Debug)]
pub struct LeafDirs {
    pub number: u64,
    /// For each hierarchy, where the leaf was needed there.
    pub dirs: Vec<Option<Arc<CgroupDir>>>,
    pub fence: Option<TreeKill>,
    pub meter: CellMeter,
    /// How often its processes were killed.
    pub ends: u32,
    /// It cannot be used again. A process that is born in a cgroup that was ever killed as a whole
    /// is killed at once (`birth`).
    pub is_spent: bool,
}

/// Open files of the directory by which all of a tree is listed and killed.
#[derive(Debug)]
pub struct TreeKill {
    /// v2: children are born in it; its `cgroup.kill` and `cgroup.events`.
    pub v2: Option<(Arc<OwnedFd>, OwnedFd, File)>,
    procs: ProcessList,
    /// Number of its threads, if the controller `pids` counts them.
    threads: Option<File>,
}

/// The list of processes in a directory. A reader of an open file of v1 gets the old list for a
/// second (`cgroup_pidlist_start` of kernel/cgroup/cgroup-v1.c). So there it is opened for each
/// check.
#[derive(Debug)]
enum ProcessList {
    Open(File),
    At(PathBuf),
}

impl ProcessList {
    fn look<R>(&self, read: impl FnOnce(&File) -> io::Result<R>) -> io::Result<R> {
        match self {
            Self::Open(file) => read(file),
            Self::At(path) => match File::open(path) {
                // The error that an open file gives when its directory was removed.
                Err(error) if error.kind() == io::ErrorKind::NotFound => Err(Errno::NODEV.into()),
                opened => read(&opened?),
            },
        }
    }
}

impl TreeKill {
    pub fn open(dir: &CgroupDir) -> Result<Self, CgroupFileError> {
        let reading = |name| files::open(&dir.file(name), OFlags::RDONLY).map(File::from);
        let v2 = match dir.hierarchy.version {
            CgroupVersion::V1 => None,
            CgroupVersion::V2 => Some((
                Arc::new(files::open(&dir.path, OFlags::RDONLY | OFlags::DIRECTORY)?),
                files::open(&dir.file("cgroup.kill"), OFlags::WRONLY)?,
                reading("cgroup.events")?,
            )),
        };
        let procs = match v2 {
            Some(_) => ProcessList::Open(reading("cgroup.procs")?),
            None => ProcessList::At(dir.file("cgroup.procs")),
        };
        let threads = reading("pids.current").ok();
        Ok(Self { v2, procs, threads })
    }

    pub fn is_empty(&self) -> io::Result<bool> {
        let mut buffer = [0; 256];
        match &self.v2 {
            // Counts processes that are about to be gone and are listed no more, too.
            Some((_, _, events)) => {
                let len = events.read_at(&mut buffer, 0)?;
                Ok(usage::keyed(str::from_utf8(&buffer[..len]).unwrap_or(""), "populated") == Some(0))
            }
            None => Ok(self.procs.look(|procs| procs.read_at(&mut buffer, 0))? == 0),
        }
    }

    /// Whether this process, of one thread, is alone. It is in there while it lives.
    pub fn has_only(&self, pid: Pid) -> io::Result<bool> {
        if let Some(threads) = &self.threads {
            let mut buffer = [0; 32];
            let len = threads.read_at(&mut buffer, 0)?;
            if buffer[..len] == *b"1\n" {
                return Ok(true);
            }
        }
        // An ended process counts until its parent has waited for it. It is listed no more.
        Ok(self.pids()?.iter().all(|other| *other == pid))
    }

    pub fn pids(&self) -> io::Result<Vec<Pid>> {
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

impl LeafDirs {
    pub fn new(number: u64, hierarchies: usize) -> Self {
        Self {
            number,
            dirs: vec![None; hierarchies],
            fence: None,
            meter: CellMeter::default(),
            ends: 0,
            is_spent: false,
        }
    }

    /// Returns its directory in this hierarchy, made below `above` with these limits if it has
    /// none.
    pub fn dir(
        &mut self,
        index: usize,
        above: &Arc<CgroupDir>,
        limits: LimitSet,
    ) -> Result<Arc<CgroupDir>, CgroupFileError> {
        if let Some(dir) = &self.dirs[index] {
            dir.set(limits);
            return Ok(Arc::clone(dir));
        }
        let dir = above.below(&format!("r{}", self.number), true, || limits)?;
        self.open(&dir)?;
        self.dirs[index] = Some(Arc::clone(&dir));
        Ok(dir)
    }

    fn open(&mut self, dir: &CgroupDir) -> Result<(), CgroupFileError> {
        let hierarchy = &dir.hierarchy;
        let has = |one| hierarchy.controllers.has(one);
        let mut add = |source: CounterSource| {
            self.meter
                .add(source, &dir.path)
                .map_err(|error| CgroupFileError::new(&dir.file(source.file()), error))
        };
        if has(CgroupController::Cpuacct) {
            add(match hierarchy.version {
                CgroupVersion::V1 => CounterSource::CpuacctUsage,
                CgroupVersion::V2 => CounterSource::CpuStatUsage,
            })?;
        }
        if has(CgroupController::Cpu) && !add(CounterSource::CpuStatLocal)? {
            add(CounterSource::CpuStatThrottled)?;
        }
        if has(CgroupController::Blkio) {
            add(match hierarchy.version {
                CgroupVersion::V1 => CounterSource::BlkioBytes,
                CgroupVersion::V2 => CounterSource::IoStat,
            })?;
        }
        if hierarchy.is_fence {
            self.fence = Some(TreeKill::open(dir)?);
        }
        Ok(())
    }

    /// Returns whether nothing but this process is in it, as far as processes are listed.
    pub fn has_only(&self, pid: Pid) -> bool {
        self.fence.as_ref().is_none_or(|fence| fence.has_only(pid).unwrap_or(false))
    }

    /// Prepares it for another request. Returns false if it cannot have one.
    pub fn renew(&mut self) -> bool {
        self.ends = 0;
        !self.is_spent
    }

    /// Reads its use so far. Fails if its directories were removed, as far as some of their files
    /// are read.
    pub fn read(&self) -> io::Result<CellCounters> {
        self.meter.read()
    }
}

/// Returns the part of a request's limits for its directory in one hierarchy. Memory is limited at
/// its tenant's: a leaf would still be charged with files of the request before.
pub fn of_leaf(limits: &LimitSet, above: &CgroupDir) -> LimitSet {
    only(limits, above.hierarchy.controllers.minus(ControllerSet::only(CgroupController::Memory)))
}
