//! Copies of the files for host name resolution, for an edge that does not see `/etc`.
//!
//! Such a file is often a link to somewhere else, and the network manager replaces it as a whole. A
//! copy is put in place as a whole, too. So the C library reads the old one or the new one
//! (resolver(5)).

use std::fs::{self, File, Metadata};
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;

/// Files that the C library reads before it queries a name server.
pub const FILES: [&str; 5] = ["resolv.conf", "hosts", "nsswitch.conf", "host.conf", "gai.conf"];

/// Longest such file, bytes. Lists of hosts that block advertisements have up to some megabytes.
pub const COPY_BYTES_MAX: u64 = 8 << 20;

/// Their directory on the node.
const DIRECTORY: &str = "/etc";

/// Temporary name of a new copy.
const DRAFT: &str = ".new";

/// The copied version of each file. `None` if there is none.
#[derive(Debug, Default)]
pub struct FileCopies([Option<CopyStamp>; FILES.len()]);

#[derive(Debug, Clone, PartialEq, Eq)]
struct CopyStamp {
    file: (u64, u64),
    len: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl CopyStamp {
    fn of(metadata: &Metadata) -> Self {
        Self {
            file: (metadata.dev(), metadata.ino()),
            len: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}

impl FileCopies {
    /// Makes the files in this directory match those of the node.
    pub fn refresh(&mut self, to: &OwnedFd) -> io::Result<()> {
        self.refresh_from(Path::new(DIRECTORY), to)
    }

    fn refresh_from(&mut self, from: &Path, to: &OwnedFd) -> io::Result<()> {
        for (name, seen) in FILES.iter().zip(&mut self.0) {
            let path = from.join(name);
            let now =
                fs::metadata(&path).ok().filter(Metadata::is_file).map(|metadata| CopyStamp::of(&metadata));
            if now == *seen {
                continue;
            }
            match now {
                Some(_) => {
                    copy(&path, name, to).map_err(|error| super::at_path(&path, &error))?;
                }
                None => match rustix::fs::unlinkat(to, *name, AtFlags::empty()) {
                    Ok(()) | Err(Errno::NOENT) => {}
                    Err(error) => return Err(error.into()),
                },
            }
            *seen = now;
        }
        Ok(())
    }
}

fn copy(from: &Path, name: &str, to: &OwnedFd) -> io::Result<()> {
    let mut text = Vec::new();
    File::open(from)?.take(COPY_BYTES_MAX + 1).read_to_end(&mut text)?;
    if text.len() as u64 > COPY_BYTES_MAX {
        return Err(io::Error::other(format!("it is longer than {COPY_BYTES_MAX} bytes")));
    }
    let flags = OFlags::CREATE | OFlags::TRUNC | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut draft: File = rustix::fs::openat(to, DRAFT, flags, Mode::from_raw_mode(0o644))?.into();
    // The umask may have removed the others' bit.
    draft.set_permissions(fs::Permissions::from_mode(0o644))?;
    draft.write_all(&text)?;
    Ok(rustix::fs::renameat(to, DRAFT, to, name)?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn copies_follow_what_is_written_replaced_linked_and_removed() {
        let from = tempfile::tempdir().unwrap();
        let to = tempfile::tempdir().unwrap();
        let directory: OwnedFd = File::open(to.path()).unwrap().into();
        let mut copies = FileCopies::default();
        let mut copied = |name: &str| {
            copies.refresh_from(from.path(), &directory).unwrap();
            fs::read_to_string(to.path().join(name)).ok()
        };
        assert_eq!(copied("hosts"), None);
        let hosts = from.path().join("hosts");
        fs::write(&hosts, "127.0.0.1 a\n").unwrap();
        assert_eq!(copied("hosts").as_deref(), Some("127.0.0.1 a\n"));
        fs::write(from.path().join("new"), "127.0.0.1 b\n").unwrap();
        fs::rename(from.path().join("new"), &hosts).unwrap();
        assert_eq!(copied("hosts").as_deref(), Some("127.0.0.1 b\n"));
        fs::create_dir(from.path().join("run")).unwrap();
        fs::write(from.path().join("run/resolv.conf"), "nameserver 127.0.0.53\n").unwrap();
        symlink("run/resolv.conf", from.path().join("resolv.conf")).unwrap();
        assert_eq!(copied("resolv.conf").as_deref(), Some("nameserver 127.0.0.53\n"));
        fs::remove_file(&hosts).unwrap();
        assert_eq!(copied("hosts"), None);
        assert_eq!(fs::read_dir(to.path()).unwrap().count(), 1, "no draft is left");
    }
}
