//! Ends everything in a cgroup, and removes the directories of dead keepers.
//!
//! Not here: when a living keeper's cells are ended (`process`).

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::files::{self, CgroupFileError};
use super::lines::IDLE;

/// Maximum wait for the directories of dead keepers at start.
const CLEAN_TIMEOUT: Duration = Duration::from_secs(5);

/// Longest time between two checks of a tree that is being ended.
pub const LOOK_AGAIN_MAX: Duration = Duration::from_millis(50);

/// Maximum depth of directories below one keeper's: named cells (one for each controller), tenant,
/// site and leaf. Some room is for those of later versions.
const DEPTH_MAX: usize = 16;

/// Kills all processes in this one directory, where no single write does. First it forbids forks
/// there, so that a list of its processes, once read, only becomes shorter.
pub fn end_listed(dir: &Path) -> io::Result<()> {
    match files::write(&dir.join("pids.max"), "0") {
        // The hierarchy of another controller: the next check finds processes that are forked
        // meanwhile.
        Err(error) if error.is(Errno::NOENT) && dir.exists() => {}
        other => other?,
    }
    end_these(&members(dir)?, || Ok(members(dir)?))
}

/// Kills these processes, as far as they are still listed where they were read.
pub fn end_these(pids: &[Pid], list_again: impl FnOnce() -> io::Result<Vec<Pid>>) -> io::Result<()> {
    if pids.is_empty() {
        return Ok(());
    }
    let open = |pid: &Pid| Some((*pid, pidfd_open(*pid, PidfdFlags::empty()).ok()?));
    let held: Vec<(Pid, OwnedFd)> = pids.iter().filter_map(open).collect();
    // A number may have passed to another process between reading and opening. A process that is
    // still listed now is the opened one, and is in the directory.
    let listed = list_again()?;
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

pub fn members(dir: &Path) -> Result<Vec<Pid>, CgroupFileError> {
    Ok(pids(&files::read(&dir.join("cgroup.procs"))?))
}

/// Reads one number from each line. A process outside of this pid namespace is listed as 0.
pub fn pids(text: &str) -> Vec<Pid> {
    text.lines().filter_map(|line| Pid::from_raw(line.parse().ok()?)).collect()
}

/// Returns `k<pid>-<start time>-<pid namespace>`, by which a later keeper knows whether this one
/// still lives.
pub fn own_name() -> io::Result<String> {
    let pid = std::process::id();
    Ok(format!("k{pid}-{}-{}", start_time(pid)?, pid_namespace()?))
}

fn pid_namespace() -> io::Result<u64> {
    Ok(rustix::fs::stat("/proc/self/ns/pid")?.st_ino)
}

/// Returns field 22 of `/proc/<pid>/stat`. It is counted behind the last `)`, because the name
/// before it can contain anything.
fn start_time(pid: u32) -> io::Result<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let field = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_ascii_whitespace().nth(19));
    field.and_then(|text| text.parse().ok()).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
}

/// Whether the directory of this name belongs to a keeper that is certainly dead. Keepers of
/// another pid namespace cannot be judged from here.
fn is_left_over(name: &str, namespace: u64) -> bool {
    let Some(parts) = name.strip_prefix('k') else { return false };
    let parts: Vec<&str> = parts.split('-').collect();
    let numbers: Vec<u64> = parts.iter().filter_map(|part| part.parse().ok()).collect();
    let ([pid, started, of], 3) = (&numbers[..], parts.len()) else { return false };
    let Ok(pid) = u32::try_from(*pid) else { return false };
    *of == namespace && start_time(pid).map_or(true, |now| now != *started)
}

/// Ends and removes the remains of dead keepers below these directories, each the tree of one
/// hierarchy. Directories without a keeper's name are never touched. Returns how many directories
/// were removed.
pub fn clean(trees: &[PathBuf]) -> u64 {
    let Ok(namespace) = pid_namespace() else { return 0 };
    let mut dead = Vec::new();
    for tree in trees {
        let keepers = fs::read_dir(tree).into_iter().flatten().flatten();
        let left = keepers.filter(|keeper| is_left_over(&keeper.file_name().to_string_lossy(), namespace));
        dead.extend(left.map(|keeper| keeper.path()));
    }
    for dir in &dead {
        tracing::warn!("a keeper died; ending what it left in {}", dir.display());
    }
    // All hierarchies together: a process is in a directory of each, and holds all of them until it
    // is gone.
    let mut removed = 0;
    let began = Instant::now();
    let mut pause = Duration::from_millis(1);
    loop {
        dead.retain(|dir| {
            end_all(dir, DEPTH_MAX);
            thaw_all(dir, DEPTH_MAX);
            !remove_all(dir, DEPTH_MAX, &mut removed)
        });
        if dead.is_empty() {
            return removed;
        }
        if began.elapsed() > CLEAN_TIMEOUT {
            break;
        }
        thread::sleep(pause);
        pause = (pause * 2).min(LOOK_AGAIN_MAX);
    }
    for dir in dead {
        let code = crate::fault::UNKILLABLE;
        tracing::error!("{code}: processes in {} survived SIGKILL for {CLEAN_TIMEOUT:?}", dir.display());
    }
    removed
}

/// Kills all processes. A directory that is gone by now cannot be written to; removing it finds
/// that.
fn end_all(dir: &Path, depth: usize) {
    if files::write(&dir.join("cgroup.kill"), "1").is_ok() {
        return;
    }
    let _ = end_listed(dir);
    if depth > 0 {
        subdirectories(dir).iter().for_each(|child| end_all(child, depth - 1));
    }
}

/// Thaws the tree. A frozen process on v1 does not die. It is thawed only when everything in the
/// tree has its signal. The node may be fenced, and then no process may continue by a single step.
/// An idle process dies only when nobody else wants the CPU. Elsewhere there are no such files.
fn thaw_all(dir: &Path, depth: usize) {
    let _ = files::write(&dir.join("freezer.state"), "THAWED");
    let _ = files::write(&dir.join(IDLE), "0");
    if depth > 0 {
        subdirectories(dir).iter().for_each(|child| thaw_all(child, depth - 1));
    }
}

/// Removes directories from the bottom up. Returns false if something is still in them.
fn remove_all(dir: &Path, depth: usize, removed: &mut u64) -> bool {
    if depth > 0 {
        for child in subdirectories(dir) {
            remove_all(&child, depth - 1, removed);
        }
    }
    let is_gone = rustix::fs::rmdir(dir);
    *removed += u64::from(is_gone.is_ok());
    matches!(is_gone, Ok(()) | Err(Errno::NOENT))
}

fn subdirectories(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.path())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert!(!is_left_over(&format!("k1-x-1-{here}"), here));
    }

    #[test]
    fn processes_of_other_namespaces_are_left_out() {
        let raw: Vec<i32> = pids("12\n0\n7\n").iter().map(|pid| pid.as_raw_nonzero().get()).collect();
        assert_eq!(raw, [12, 7]);
    }

    #[test]
    fn directories_of_the_living_and_of_others_stay() {
        let tree = tempfile::tempdir().unwrap();
        let here = pid_namespace().unwrap();
        let own = own_name().unwrap();
        let dead = format!("k{}-1-{here}", std::process::id());
        for dir in [&own, &dead, "somebody"] {
            fs::create_dir_all(tree.path().join(dir).join("tenant-x/r1")).unwrap();
        }
        assert_eq!(clean(&[tree.path().to_path_buf()]), 3, "the dead one's, with what was in it");
        let mut left: Vec<_> = subdirectories(tree.path());
        left.sort();
        let mut expected = [tree.path().join(own), tree.path().join("somebody")];
        expected.sort();
        assert_eq!(left, expected);
    }
}
