//! The cgroup of the launcher: that of the keeper.
//!
//! The keeper may move to a fresh cgroup when it starts, and must. A process is killed at birth if
//! its parent's cgroup was once killed as a whole (`cells::birth`). The launcher is that parent for
//! all its sandboxes. Not here: cells, which the sandboxes themselves are born in.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Moves a process to the cgroup v2 directory of this process. Nothing to do without cgroup v2.
pub fn share(pid: i32) -> io::Result<()> {
    let (ours, theirs) = (group("self")?, group(&pid.to_string())?);
    let Some(ours) = ours.filter(|ours| Some(ours) != theirs.as_ref()) else { return Ok(()) };
    let mountinfo = fs::read_to_string("/proc/self/mountinfo")?;
    let Some((root, point)) = mountinfo.lines().find_map(mount) else { return Ok(()) };
    let beneath = Path::new(&ours).strip_prefix(root).unwrap_or(Path::new(""));
    fs::write(PathBuf::from(point).join(beneath).join("cgroup.procs"), pid.to_string())
}

/// Parses `0::/path` of `/proc/<pid>/cgroup`.
fn group(process: &str) -> io::Result<Option<String>> {
    let groups = fs::read_to_string(format!("/proc/{process}/cgroup"))?;
    Ok(groups.lines().find_map(|line| line.strip_prefix("0::")).map(str::to_owned))
}

/// Returns the mounted part of the hierarchy, and its mount point.
fn mount(line: &str) -> Option<(&str, &str)> {
    let (place, kind) = line.split_once(" - ")?;
    let mut place = place.split(' ').skip(3);
    let found = (place.next()?, place.next()?);
    kind.starts_with("cgroup2 ").then_some(found)
}
