//! Possible leftovers of a demo on a machine: processes, mounts, cgroups and files.
//!
//! Not here: ending them (`process`). Other nodes may run on the same machine, come and go. Only
//! leftovers that certainly belong to the demo count.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use crate::process::tree;

/// Deepest level of cgroups; the keeper's own tree has four levels.
const CGROUP_DEPTH_MAX: usize = 8;

/// The kernel removes the resources of a dying process a moment after it is gone.
const SETTLE_MAX: Duration = Duration::from_secs(3);

/// Where a node without settings of its own would put its files; the demo's node must not.
const DEFAULT_PLACES: [&str; 3] = ["/run/nagaya", "/var/lib/nagaya", "/etc/nagaya"];

/// Data for the check after the demo.
#[derive(Debug, Clone)]
pub struct DemoTraces {
    /// Directory of everything that the demo writes.
    dir: PathBuf,
    /// Those of the default places that existed before.
    places: BTreeSet<PathBuf>,
    /// All processes of the node while it ran: keepers name their cgroups after themselves.
    pids: BTreeSet<u32>,
}

impl DemoTraces {
    /// Begins, before the demo starts.
    pub fn before(dir: &Path) -> Self {
        let places = DEFAULT_PLACES.iter().map(PathBuf::from).filter(|place| place.exists()).collect();
        Self { dir: dir.into(), places, pids: BTreeSet::new() }
    }

    /// Notes the node's processes while it runs.
    pub fn node(&mut self, pid: u32) {
        self.pids.extend(tree(pid));
    }

    /// Returns the leftovers, after everything was ended and the directory removed.
    pub fn left_behind(&self) -> Result<Vec<String>> {
        let begun = Instant::now();
        loop {
            let left = self.look()?;
            if left.is_empty() || begun.elapsed() > SETTLE_MAX {
                return Ok(left);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn look(&self) -> Result<Vec<String>> {
        let mut left = Vec::new();
        // This process has adopted orphans of the node.
        let own = std::process::id();
        for pid in tree(own).into_iter().filter(|pid| *pid != own) {
            let command = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            // A zombie has no command line, and goes with this process.
            if !command.is_empty() {
                left.push(format!("process {pid}: {}", command.replace('\0', " ")));
            }
        }
        let dir = self.dir.to_string_lossy();
        let mounts = fs::read_to_string("/proc/self/mountinfo").context("reading /proc/self/mountinfo")?;
        left.extend(mounts.lines().filter(|line| line.contains(&*dir)).map(|line| format!("mount {line}")));
        cgroups(Path::new("/sys/fs/cgroup"), CGROUP_DEPTH_MAX, &self.pids, &mut left);
        if self.dir.exists() {
            left.push(format!("directory {dir}"));
        }
        let places = DEFAULT_PLACES.iter().map(PathBuf::from);
        let new = places.filter(|place| place.exists() && !self.places.contains(place));
        left.extend(new.map(|place| format!("directory {}", place.display())));
        Ok(left)
    }
}

/// Finds cgroups below a `nagaya` directory of keepers among `pids`.
fn cgroups(dir: &Path, depth: usize, pids: &BTreeSet<u32>, found: &mut Vec<String>) {
    if depth == 0 {
        return;
    }
    let ours = dir.file_name().is_some_and(|name| name == "nagaya");
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        let name = entry.file_name().to_string_lossy().into_owned();
        // `k<pid>-<start time>-...`
        let number =
            name.strip_prefix('k').and_then(|rest| rest.split('-').next()).and_then(|pid| pid.parse().ok());
        if ours && number.is_some_and(|pid| pids.contains(&pid)) {
            found.push(format!("cgroup {}", entry.path().display()));
        }
        cgroups(&entry.path(), depth - 1, pids, found);
    }
}
