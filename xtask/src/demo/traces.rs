//! What a run may leave on a machine: processes, mounts, cgroups and files, compared before and after.
//!
//! Not here: ending them (`process`).

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use crate::process::tree;

/// cgroups lie at most this deep; the keeper's own tree has four levels.
const CGROUP_DEPTH_MAX: usize = 8;

/// The kernel removes what a dying process held a moment after it is gone.
const SETTLE_MAX: Duration = Duration::from_secs(3);

/// What is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Traces(BTreeSet<String>);

impl Traces {
    pub fn take() -> Result<Self> {
        let mut found = BTreeSet::new();
        let mounts = fs::read_to_string("/proc/self/mountinfo").context("reading /proc/self/mountinfo")?;
        found.extend(mounts.lines().map(|line| format!("mount: {line}")));
        cgroups(Path::new("/sys/fs/cgroup"), CGROUP_DEPTH_MAX, &mut found);
        for dir in [std::env::temp_dir().as_path(), Path::new("/run"), Path::new("/var/lib")] {
            files(dir, &mut found);
        }
        Ok(Self(found))
    }

    /// What is there now and was not, without `gone`, which may be named in old mounts of others. Also children of
    /// this process: it adopts orphans.
    pub fn left_behind(&self, gone: &Path) -> Result<Vec<String>> {
        let begun = Instant::now();
        loop {
            let mut left: Vec<String> = Self::take()?.0.difference(&self.0).cloned().collect();
            let own = std::process::id();
            for pid in tree(own).into_iter().filter(|pid| *pid != own) {
                let command = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                // A zombie has no command line, and ends with this process.
                if !command.is_empty() {
                    left.push(format!("process: {pid} {}", command.replace('\0', " ")));
                }
            }
            if gone.exists() {
                left.push(format!("directory: {}", gone.display()));
            }
            if left.is_empty() || begun.elapsed() > SETTLE_MAX {
                return Ok(left);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// cgroups with our name; others come and go by themselves.
fn cgroups(dir: &Path, depth: usize, found: &mut BTreeSet<String>) {
    if depth == 0 {
        return;
    }
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            let path = entry.path();
            if path.to_string_lossy().contains("nagaya") {
                found.insert(format!("cgroup: {}", path.display()));
            }
            cgroups(&path, depth - 1, found);
        }
    }
}

/// Files with our name in directories that everybody uses.
fn files(dir: &Path, found: &mut BTreeSet<String>) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().contains("nagaya") {
            found.insert(format!("file: {}", entry.path().display()));
        }
    }
}
