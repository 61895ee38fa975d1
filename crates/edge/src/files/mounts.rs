//! Which mounts are of file systems that a network or another process answers for, and that may hang for ever.
//!
//! Asking such a file system what it is (statfs(2)) could hang too. The kernel's own list of mounts does not ask it.

use std::cell::RefCell;
use std::collections::HashMap;
use std::time::{Duration, Instant};

use foldhash::fast::RandomState;

/// An answer is good for so long: a number may be another mount's later.
const AGE_MAX: Duration = Duration::from_secs(10);

/// Mounts that one thread remembers.
const REMEMBERED_MAX: usize = 1024;

/// Names of file systems, or their beginnings, as the kernel has them (proc_pid_mountinfo(5)). FUSE ones have the name of the
/// program behind a dot.
const REMOTE: [&str; 18] = [
    "nfs", "cifs", "smb3", "fuse", "ceph", "9p", "afs", "lustre", "gfs2", "ocfs2", "gpfs", "virtiofs",
    "autofs", "pvfs2", "orangefs", "coda", "beegfs", "ncpfs",
];

thread_local! {
    static REMEMBERED: RefCell<HashMap<u64, (bool, Instant), RandomState>> = RefCell::default();
}

/// False for a mount that is not in the list, or without a number.
pub(super) fn is_remote(mount: u64, now: Instant) -> bool {
    REMEMBERED.with_borrow_mut(|remembered| {
        if let Some((is_remote, since)) = remembered.get(&mount)
            && now.saturating_duration_since(*since) < AGE_MAX
        {
            return *is_remote;
        }
        // Without /proc nothing is known, as before.
        let list = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let is_remote = kind_of(&list, mount).is_some_and(is_remote_kind);
        if remembered.len() >= REMEMBERED_MAX {
            remembered.clear();
        }
        remembered.insert(mount, (is_remote, now));
        is_remote
    })
}

/// The file system's name is the first word behind the dash.
fn kind_of(list: &str, mount: u64) -> Option<&str> {
    let number = mount.to_string();
    let line = list.lines().find(|line| line.split(' ').next() == Some(&number))?;
    line.split_once(" - ")?.1.split(' ').next()
}

fn is_remote_kind(kind: &str) -> bool {
    // `fuseblk` is a disk, behind a program all the same; `fusectl` is the kernel's.
    kind != "fusectl" && REMOTE.iter().any(|remote| kind.starts_with(remote))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &str = "\
22 27 0:20 / /sys rw,nosuid - sysfs sysfs rw\n\
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n\
102 27 0:50 / /mnt/a rw,relatime shared:5 master:2 - nfs4 server:/export rw\n\
103 27 0:51 / /mnt/b rw - fuse.sshfs host: rw\n\
104 27 0:52 / /ctl rw - fusectl fusectl rw\n\
105 27 0:53 / /srv rw - tmpfs tmpfs rw\n";

    #[test]
    fn mounts_are_told_apart_by_their_file_systems() {
        let remote = |mount| kind_of(LIST, mount).is_some_and(is_remote_kind);
        assert_eq!([27, 102, 103, 104, 105, 10].map(remote), [false, true, true, false, false, false]);
        assert_eq!(kind_of(LIST, 102), Some("nfs4"));
    }
}
