//! Processes that the kernel killed for want of memory: how many of a cell, so that whoever looks after it can say why it
//! ended.
//!
//! Not here: limits of memory (`lines`), the memory of the node (`instances::pressure`).

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::controllers::Version;
use super::usage::keyed;

/// Longest text of a file that is read, bytes.
const TEXT_LEN_MAX: usize = 1024;

/// In both files.
const KEY: &str = "oom_kill";

/// Counts from when it was opened.
#[derive(Debug)]
pub struct Kills {
    file: File,
    before: u64,
}

impl Kills {
    /// Of this directory. None: the kernel does not count them there.
    pub(super) fn open(version: Version, dir: &Path) -> Option<Self> {
        let name = match version {
            Version::V1 => "memory.oom_control",
            Version::V2 => "memory.events",
        };
        let file = File::open(dir.join(name)).ok()?;
        let before = read(&file)?;
        Some(Self { file, before })
    }

    /// So far.
    pub fn count(&self) -> u64 {
        // A directory that was removed has counted to the end.
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
    fn what_was_killed_is_counted_from_when_it_was_opened() {
        let dir = tempfile::tempdir().unwrap();
        let write = |text: &str| std::fs::write(dir.path().join("memory.oom_control"), text).unwrap();
        assert!(Kills::open(Version::V1, dir.path()).is_none());
        write("oom_kill_disable 0\nunder_oom 0\n");
        assert!(Kills::open(Version::V1, dir.path()).is_none(), "a kernel that does not count");
        write("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n");
        let kills = Kills::open(Version::V1, dir.path()).unwrap();
        assert_eq!(kills.count(), 0);
        write("oom_kill_disable 0\nunder_oom 0\noom_kill 5\n");
        assert_eq!(kills.count(), 2);
    }
}
