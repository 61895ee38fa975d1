//! Processes that the kernel killed for lack of memory: their number in a cell, to explain why a
//! tree ended.
//!
//! Not here: limits of memory (`lines`), the memory of the node (`instances::pressure`).

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::controllers::CgroupVersion;
use super::usage::keyed;

/// Maximum length of a file's text that is read, bytes.
const TEXT_LEN_MAX: usize = 1024;

/// Key in both files.
const KEY: &str = "oom_kill";

/// Number of kills since it was opened.
#[derive(Debug)]
pub struct OomKills {
    file: File,
    before: u64,
}

impl OomKills {
    /// Opens the counter of this directory. `None` if the kernel does not count them there.
    pub(super) fn open(version: CgroupVersion, dir: &Path) -> Option<Self> {
        let name = match version {
            CgroupVersion::V1 => "memory.oom_control",
            CgroupVersion::V2 => "memory.events",
        };
        let file = File::open(dir.join(name)).ok()?;
        let before = read(&file)?;
        Some(Self { file, before })
    }

    /// As `open`, for kills in this very directory, where the kernel counts them separately.
    pub(super) fn open_own(version: CgroupVersion, dir: &Path) -> Option<Self> {
        let above = || Self::open(version, dir.parent()?);
        match version {
            // It has never counted its children.
            CgroupVersion::V1 => Self::open(version, dir),
            // Without a memory controller of its own it has no such file.
            CgroupVersion::V2 => Self::open(version, dir).or_else(above),
        }
    }

    /// Counts from now on.
    pub fn forget(&mut self) {
        self.before = read(&self.file).unwrap_or(self.before);
    }

    /// Returns the number so far.
    pub fn count(&self) -> u64 {
        // A removed directory counts no more.
        read(&self.file).map_or(0, |now| now.saturating_sub(self.before))
    }
}

fn read(file: &File) -> Option<u64> {
    let mut buffer = [0; TEXT_LEN_MAX];
    let len = file.read_at(&mut buffer, 0).ok()?;
    keyed(str::from_utf8(&buffer[..len]).ok()?, KEY)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kills_are_counted_from_the_moment_of_opening() {
        let dir = tempfile::tempdir().unwrap();
        let write = |text: &str| std::fs::write(dir.path().join("memory.oom_control"), text).unwrap();
        assert!(OomKills::open(CgroupVersion::V1, dir.path()).is_none());
        write("oom_kill_disable 0\nunder_oom 0\n");
        assert!(OomKills::open(CgroupVersion::V1, dir.path()).is_none(), "a kernel that does not count");
        write("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n");
        let kills = OomKills::open(CgroupVersion::V1, dir.path()).unwrap();
        assert_eq!(kills.count(), 0);
        write("oom_kill_disable 0\nunder_oom 0\noom_kill 5\n");
        assert_eq!(kills.count(), 2);
    }

    #[test]
    fn kills_elsewhere_in_the_same_tree_are_not_counted() {
        let tenant = tempfile::tempdir().unwrap();
        let (own, other) = (tenant.path().join("own"), tenant.path().join("other"));
        std::fs::create_dir(&own).unwrap();
        std::fs::create_dir(&other).unwrap();
        let write = |dir: &Path, count: u64| {
            std::fs::write(dir.join("memory.events"), format!("low 0\noom {count}\noom_kill {count}\n"))
                .unwrap();
        };
        write(tenant.path(), 0);
        let with_others = OomKills::open_own(CgroupVersion::V2, &own).unwrap();
        write(&own, 0);
        let kills = OomKills::open_own(CgroupVersion::V2, &own).unwrap();
        write(tenant.path(), 1);
        assert_eq!((kills.count(), with_others.count()), (0, 1), "one in the other cell");
        write(&own, 1);
        write(tenant.path(), 2);
        assert_eq!(kills.count(), 1);
    }
}
