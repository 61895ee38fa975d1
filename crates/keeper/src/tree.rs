//! The fence around a process tree: a cgroup leaf of its own, so that the tree can be ended as one.
//!
//! A program that forks twice and changes its session still is in the leaf it was born in. Two back ends
//! behind one type: cgroup v2 (one write ends all) and v1 (`pids`: forking is forbidden, then each is
//! killed). Where neither can be used, the process group is all there is. Not here: limits.
//!
//! On v2 a child is born in its leaf by `clone3`; on v1 it writes itself into `tasks`. Neither writes
//! `cgroup.procs`: moving a thread group waits for a grace period of the kernel, measured at 6 ms (median,
//! one move each 50 ms) against 0.02 ms for both ways used here.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open, pidfd_send_signal};

use crate::options::BackEnd;
use crate::sys::Entrance;

/// Directory of all keepers beneath the cgroup this process is in.
const TREE: &str = "nagaya";

/// How long leftovers of dead keepers are waited for at start.
const CLEAN_TIMEOUT: Duration = Duration::from_secs(5);

/// Longest time between two looks at a tree that is being ended.
pub const LOOK_AGAIN_MAX: Duration = Duration::from_millis(50);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    CgroupV2,
    CgroupV1,
    ProcessGroup,
}

impl Kind {
    /// The word for it in status and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::CgroupV2 => "cgroup-v2",
            Self::CgroupV1 => "cgroup-v1",
            Self::ProcessGroup => "process-group",
        }
    }
}

/// Where the leaves of this keeper are made.
#[derive(Debug)]
pub struct Fence {
    kind: Kind,
    /// This keeper's own directory; empty for process groups.
    dir: PathBuf,
    leaves_made: AtomicU64,
}

impl Fence {
    /// The best fence that works here, after removing what dead keepers left behind.
    pub fn open(choice: BackEnd) -> Self {
        let wanted: &[Kind] = match choice {
            BackEnd::Auto => &[Kind::CgroupV2, Kind::CgroupV1],
            BackEnd::CgroupV2 => &[Kind::CgroupV2],
            BackEnd::CgroupV1 => &[Kind::CgroupV1],
            BackEnd::ProcessGroup => &[],
        };
        let mut opened = None;
        // Both are cleaned, whichever is used: the dead keeper may have chosen differently.
        for kind in [Kind::CgroupV2, Kind::CgroupV1] {
            let Some(base) = own_cgroup(kind) else { continue };
            clean(kind, &base.join(TREE));
            if opened.is_none() && wanted.contains(&kind) {
                opened = Self::open_at(kind, &base.join(TREE))
                    .inspect_err(|error| {
                        tracing::info!(%error, "{} cannot be used in {}", kind.as_str(), base.display());
                    })
                    .ok();
            }
        }
        opened.unwrap_or(Self {
            kind: Kind::ProcessGroup,
            dir: PathBuf::new(),
            leaves_made: AtomicU64::new(0),
        })
    }

    fn open_at(kind: Kind, tree: &Path) -> io::Result<Self> {
        let dir = tree.join(own_name()?);
        fs::create_dir_all(&dir)?;
        let fence = Self { kind, dir, leaves_made: AtomicU64::new(0) };
        // A hierarchy can be mounted and still not be ours to use; making one leaf tells.
        let probe = fence.leaf().and_then(|leaf| {
            let ending = leaf.end(None);
            leaf.remove()?;
            ending
        });
        if let Err(error) = probe {
            fence.close();
            return Err(error);
        }
        Ok(fence)
    }

    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// A fresh leaf for one tree.
    pub fn leaf(&self) -> io::Result<Leaf> {
        if self.kind == Kind::ProcessGroup {
            return Ok(Leaf { kind: self.kind, dir: PathBuf::new(), entrance: None });
        }
        let dir = self.dir.join(format!("t{}", self.leaves_made.fetch_add(1, Ordering::Relaxed)));
        fs::create_dir(&dir)?;
        let (path, flags) = match self.kind {
            Kind::CgroupV2 => (dir.clone(), OFlags::DIRECTORY | OFlags::RDONLY),
            _ => (dir.join("tasks"), OFlags::WRONLY),
        };
        match rustix::fs::open(&path, flags | OFlags::CLOEXEC, Mode::empty()) {
            Ok(entrance) => Ok(Leaf { kind: self.kind, dir, entrance: Some(Arc::new(entrance)) }),
            Err(errno) => {
                // Nothing was born in it, so nothing can keep it from going.
                let _ = fs::remove_dir(&dir);
                Err(errno.into())
            }
        }
    }

    /// Removes this keeper's own directory. Leaves that still have processes keep theirs.
    pub fn close(&self) {
        if self.kind != Kind::ProcessGroup {
            let _ = fs::remove_dir(&self.dir);
            if let Some(tree) = self.dir.parent() {
                // Other keepers may be in it; then it stays.
                let _ = fs::remove_dir(tree);
            }
        }
    }
}

/// The fence of one tree. It goes by `remove`, not by dropping: a tree that still runs keeps its leaf.
#[derive(Debug)]
pub struct Leaf {
    kind: Kind,
    dir: PathBuf,
    entrance: Option<Arc<OwnedFd>>,
}

impl Leaf {
    pub fn entrance(&self) -> Entrance {
        let fd = self.entrance.clone();
        match self.kind {
            Kind::CgroupV2 => Entrance { born: fd, tasks: Vec::new() },
            _ => Entrance { born: None, tasks: fd.into_iter().collect() },
        }
    }

    /// Kills everything in it; what dies slowly is still there afterwards. `leader` is the first process,
    /// which must not be reaped yet: its number stands for its group.
    pub fn end(&self, leader: Option<Pid>) -> io::Result<()> {
        match self.kind {
            Kind::CgroupV2 => fs::write(self.dir.join("cgroup.kill"), "1"),
            Kind::CgroupV1 => end_v1(&self.dir),
            Kind::ProcessGroup => match leader.map(|pid| kill_process_group(pid, Signal::KILL)) {
                None | Some(Ok(()) | Err(Errno::SRCH)) => Ok(()),
                Some(Err(errno)) => Err(errno.into()),
            },
        }
    }

    /// True once nothing lives in it and it is gone.
    pub fn remove(&self) -> io::Result<bool> {
        if self.kind == Kind::ProcessGroup {
            return Ok(true);
        }
        remove_leaf(&self.dir)
    }
}

fn remove_leaf(dir: &Path) -> io::Result<bool> {
    match rustix::fs::rmdir(dir) {
        Ok(()) | Err(Errno::NOENT) => Ok(true),
        Err(Errno::BUSY) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

/// First nobody in it may fork, so that a list of its processes, once read, only becomes shorter.
fn end_v1(dir: &Path) -> io::Result<()> {
    fs::write(dir.join("pids.max"), "0")?;
    let held: Vec<(Pid, OwnedFd)> = members(dir)?
        .into_iter()
        .filter_map(|pid| Some((pid, pidfd_open(pid, PidfdFlags::empty()).ok()?)))
        .collect();
    // A number may have passed to another process between reading and opening. Who is still listed now is
    // the one that was opened, and is in the leaf.
    let listed = members(dir)?;
    for (pid, pidfd) in held {
        if listed.contains(&pid) {
            match pidfd_send_signal(&pidfd, Signal::KILL) {
                Ok(()) | Err(Errno::SRCH) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
    Ok(())
}

fn members(dir: &Path) -> io::Result<Vec<Pid>> {
    let text = fs::read_to_string(dir.join("cgroup.procs"))?;
    Ok(text.lines().filter_map(|line| Pid::from_raw(line.parse().ok()?)).collect())
}

/// The directory of the cgroup this process is in, where a hierarchy of this kind is mounted.
fn own_cgroup(kind: Kind) -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let mount = mounts.lines().find_map(|line| mount_point(kind, line))?;
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let own = groups.lines().find_map(|line| group_path(kind, line)).unwrap_or("/");
    let dir = mount.join(own.trim_start_matches('/'));
    // In a container the path may be one of the host, which is not visible here.
    Some(if dir.is_dir() { dir } else { mount })
}

/// Mount point in a line of `mountinfo`: `36 35 0:30 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids`.
fn mount_point(kind: Kind, line: &str) -> Option<PathBuf> {
    let (mount, fs) = line.split_once(" - ")?;
    let mut fs = fs.split(' ');
    let fits = match (kind, fs.next()?) {
        (Kind::CgroupV2, "cgroup2") => true,
        (Kind::CgroupV1, "cgroup") => fs.nth(1)?.split(',').any(|option| option == "pids"),
        _ => false,
    };
    fits.then(|| mount.split(' ').nth(4).map(PathBuf::from)).flatten()
}

/// Path in a line of `/proc/self/cgroup`: `8:pids:/x` on v1, `0::/x` on v2.
fn group_path(kind: Kind, line: &str) -> Option<&str> {
    let (_, rest) = line.split_once(':')?;
    let (controllers, path) = rest.split_once(':')?;
    let fits = match kind {
        Kind::CgroupV2 => controllers.is_empty(),
        _ => controllers.split(',').any(|controller| controller == "pids"),
    };
    fits.then_some(path)
}

/// `k<pid>-<start time>-<pid namespace>`: tells a later keeper whether this one still lives.
fn own_name() -> io::Result<String> {
    let pid = std::process::id();
    Ok(format!("k{pid}-{}-{}", start_time(pid)?, pid_namespace()?))
}

fn pid_namespace() -> io::Result<u64> {
    Ok(rustix::fs::stat("/proc/self/ns/pid")?.st_ino)
}

/// Field 22 of `/proc/<pid>/stat`. Counted behind the last `)`: the name before it can hold anything.
fn start_time(pid: u32) -> io::Result<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let field = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_ascii_whitespace().nth(19));
    field.and_then(|text| text.parse().ok()).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
}

/// Whether the directory of this name belongs to a keeper that is dead for certain. Of another pid
/// namespace nothing can be said from here.
fn is_left_over(name: &str, namespace: u64) -> bool {
    let Some(parts) = name.strip_prefix('k') else { return false };
    let parts: Vec<u64> = parts.split('-').filter_map(|part| part.parse().ok()).collect();
    let [pid, started, of] = parts[..] else { return false };
    let Ok(pid) = u32::try_from(pid) else { return false };
    of == namespace && start_time(pid).map_or(true, |now| now != started)
}

/// Ends and removes what dead keepers left in this hierarchy.
fn clean(kind: Kind, tree: &Path) {
    let (Ok(keepers), Ok(namespace)) = (fs::read_dir(tree), pid_namespace()) else { return };
    for keeper in keepers.flatten() {
        if !is_left_over(&keeper.file_name().to_string_lossy(), namespace) {
            continue;
        }
        tracing::warn!("a keeper died; ending what it left in {}", keeper.path().display());
        if !clean_keeper(kind, &keeper.path()) {
            tracing::error!(
                "{}: processes in {} survived SIGKILL for {CLEAN_TIMEOUT:?}",
                crate::fault::UNKILLABLE,
                keeper.path().display()
            );
        }
    }
}

fn clean_keeper(kind: Kind, dir: &Path) -> bool {
    let leaves: Vec<Leaf> = fs::read_dir(dir)
        .map(|entries| {
            let dirs = entries.flatten().filter(|entry| entry.file_type().is_ok_and(|t| t.is_dir()));
            dirs.map(|entry| Leaf { kind, dir: entry.path(), entrance: None }).collect()
        })
        .unwrap_or_default();
    let began = Instant::now();
    let mut pause = Duration::from_millis(1);
    loop {
        let mut alive = false;
        for leaf in &leaves {
            // A leaf that is gone by now cannot be written to; `remove` tells.
            let _ = leaf.end(None);
            alive |= !leaf.remove().unwrap_or(false);
        }
        if !alive {
            return rustix::fs::rmdir(dir).is_ok();
        }
        if began.elapsed() > CLEAN_TIMEOUT {
            return false;
        }
        thread::sleep(pause);
        pause = (pause * 2).min(LOOK_AGAIN_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_of_both_versions_are_found() {
        let v1 = "36 24 0:31 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids";
        let joint = "36 24 0:31 / /sys/fs/cgroup/cpu,pids rw shared:3 - cgroup none rw,cpu,pids";
        let v2 = "25 30 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate";
        assert_eq!(mount_point(Kind::CgroupV1, v1), Some("/sys/fs/cgroup/pids".into()));
        assert_eq!(mount_point(Kind::CgroupV1, joint), Some("/sys/fs/cgroup/cpu,pids".into()));
        assert_eq!(mount_point(Kind::CgroupV2, v2), Some("/sys/fs/cgroup".into()));
        assert_eq!(mount_point(Kind::CgroupV2, v1), None);
        assert_eq!(mount_point(Kind::CgroupV1, v2), None);
        assert_eq!(mount_point(Kind::CgroupV1, "36 24 0:31 / /proc rw - proc proc rw"), None);
    }

    #[test]
    fn own_groups_of_both_versions_are_found() {
        assert_eq!(group_path(Kind::CgroupV1, "8:pids:/a/b"), Some("/a/b"));
        assert_eq!(group_path(Kind::CgroupV1, "8:cpu,pids:/a:b"), Some("/a:b"));
        assert_eq!(group_path(Kind::CgroupV1, "0::/a"), None);
        assert_eq!(group_path(Kind::CgroupV2, "0::/a"), Some("/a"));
        assert_eq!(group_path(Kind::CgroupV2, "8:pids:/a"), None);
    }

    #[test]
    fn only_a_keeper_that_is_dead_for_certain_leaves_something_over() {
        let here = pid_namespace().unwrap();
        let own = own_name().unwrap();
        assert!(!is_left_over(&own, here));
        assert!(is_left_over(&format!("k{}-1-{here}", std::process::id()), here));
        assert!(!is_left_over(&format!("k{}-1-{}", std::process::id(), here + 1), here));
        for foreign in ["", "k", "k1-2", "t3", "kx-1-2", "system.slice", "k99999999999-1-2"] {
            assert!(!is_left_over(foreign, here), "{foreign}");
        }
    }
}
