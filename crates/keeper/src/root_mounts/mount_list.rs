//! The kernel's list of this process' mounts, read again only after it has changed.
//!
//! It tells which mounts a network or another process answers for, and which lie beneath a
//! directory. Asking a file system itself (statfs(2)) could hang; the kernel's list does not ask
//! it. Not here: making mounts (`root_mounts`).

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Bound;
use std::path::Path;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// The list (proc_pid_mountinfo(5)).
const LIST: &str = "/proc/self/mountinfo";

/// Names of file systems, or their beginnings, as the kernel has them. FUSE ones have the name of
/// the program behind a dot.
const REMOTE: [&str; 18] = [
    "nfs", "cifs", "smb3", "fuse", "ceph", "9p", "afs", "lustre", "gfs2", "ocfs2", "gpfs", "virtiofs",
    "autofs", "pvfs2", "orangefs", "coda", "beegfs", "ncpfs",
];

/// For a poll without waiting.
const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// The list as it was last read.
#[derive(Debug, Default)]
pub struct MountList {
    /// Stays open while this lives: the kernel remembers by it which changes were reported.
    told: Option<File>,
    mounts: MountIndex,
    generation: u64,
}

#[derive(Debug, Default, PartialEq, Eq)]
struct MountIndex {
    is_remote: BTreeMap<u64, bool>,
    /// By path, as the list escapes it. Several mounts may be at one path.
    places: BTreeMap<(Vec<u8>, u64), ()>,
}

impl MountList {
    /// Reads the list if it has changed. Returns the number of its state, which grows with each
    /// change.
    pub fn refresh(&mut self) -> io::Result<u64> {
        let is_new = match &self.told {
            Some(told) => {
                let mut polled = [PollFd::new(told, PollFlags::PRI)];
                poll(&mut polled, Some(&AT_ONCE))? > 0 && polled[0].revents().contains(PollFlags::PRI)
            }
            None => {
                self.told = Some(File::open(LIST)?);
                true
            }
        };
        if is_new {
            self.mounts = MountIndex::parse(&std::fs::read(LIST)?);
            self.generation += 1;
        }
        Ok(self.generation)
    }

    /// Whether a network or another process serves this mount. False for one that is not in the
    /// list.
    pub fn is_remote(&self, mount: u64) -> bool {
        self.mounts.is_remote.get(&mount).copied().unwrap_or(false)
    }

    /// Returns the numbers of all mounts below this directory.
    pub fn beneath(&self, directory: &Path) -> Vec<u64> {
        self.mounts.beneath(directory)
    }
}

impl MountIndex {
    /// Parses the list. A line that is not understood is skipped.
    fn parse(list: &[u8]) -> Self {
        let mut mounts = Self::default();
        for line in list.split(|byte| *byte == b'\n') {
            let mut words = line.split(|byte| *byte == b' ');
            let number = words.next().and_then(|word| std::str::from_utf8(word).ok()?.parse().ok());
            let (Some(number), Some(place)) = (number, words.nth(3)) else { continue };
            // The file system's name is the first word behind the dash.
            let kind = words.skip_while(|word| *word != b"-").nth(1).unwrap_or_default();
            mounts.is_remote.insert(number, is_remote_kind(&String::from_utf8_lossy(kind)));
            mounts.places.insert((place.to_vec(), number), ());
        }
        mounts
    }

    fn beneath(&self, directory: &Path) -> Vec<u64> {
        let mut begin = escape(directory);
        if begin.last() != Some(&b'/') {
            begin.push(b'/');
        }
        let from = Bound::Excluded((begin.clone(), u64::MAX));
        let behind = self.places.range((from, Bound::Unbounded));
        behind
            .take_while(|((place, _), ())| place.starts_with(&begin))
            .map(|((_, number), ())| *number)
            .collect()
    }
}

/// Escapes a path as the list does: characters that would end a word or a line become octal
/// numbers.
fn escape(path: &Path) -> Vec<u8> {
    use std::os::unix::ffi::OsStrExt as _;
    let mut escaped = Vec::new();
    for byte in path.as_os_str().as_bytes() {
        match byte {
            b' ' | b'\t' | b'\n' | b'\\' | b'#' => escaped.extend(format!("\\{byte:03o}").into_bytes()),
            _ => escaped.push(*byte),
        }
    }
    escaped
}

fn is_remote_kind(kind: &str) -> bool {
    // `fuseblk` is a disk, but behind a program; `fusectl` is the kernel's.
    kind != "fusectl" && REMOTE.iter().any(|remote| kind.starts_with(remote))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &[u8] = b"\
22 27 0:20 / /sys rw,nosuid - sysfs sysfs rw\n\
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n\
102 27 0:50 / /mnt/a rw,relatime shared:5 master:2 - nfs4 server:/export rw\n\
103 102 0:51 / /mnt/a/b\\040c rw - fuse.sshfs host: rw\n\
104 27 0:52 / /mnt/ab rw - fusectl fusectl rw\n\
105 103 0:53 / /mnt/a/b\\040c/d rw - tmpfs tmpfs rw\n\
not a line\n";

    #[test]
    fn mounts_are_told_apart_by_their_file_systems() {
        let list = MountList { mounts: MountIndex::parse(LIST), ..MountList::default() };
        let remote = |mount| list.is_remote(mount);
        assert_eq!([27, 102, 103, 104, 105, 10].map(remote), [false, true, true, false, false, false]);
    }

    #[test]
    fn mounts_beneath_a_directory_are_found_by_whole_names() {
        let mounts = MountIndex::parse(LIST);
        let beneath = |path: &str| mounts.beneath(Path::new(path));
        assert_eq!(beneath("/mnt/a"), [103, 105]);
        assert_eq!(beneath("/mnt/a/b c"), [105]);
        assert_eq!(beneath("/mnt/a/b"), [0_u64; 0]);
        assert_eq!(beneath("/").len(), 5, "all but itself");
    }

    #[test]
    fn the_list_is_read_once_while_nothing_changes() {
        let mut list = MountList::default();
        // Other tests of this process may mount something between the two.
        let first = list.refresh().unwrap();
        assert!(first >= 1);
        assert!(!list.mounts.is_remote.is_empty());
        assert!(list.refresh().unwrap() <= first + 1);
    }
}
