//! Signs of life in files: a worker touches an unlinked file, and its parent checks the file's
//! times. So does gunicorn.
//!
//! A process that is frozen in `select` or `poll` sleeps on after the thaw for the rest of its
//! time. The kernel restarts the call with that rest (select(2), signal(7)). So its next sign of
//! life may come long after its parent's check. Therefore the time of the freeze is added to the
//! last sign.
//!
//! Files are found by the descriptors of the tenant's processes, opened with `O_PATH`, and checked
//! and changed through that. So no name of a tenant's is followed, and no device or pipe is opened.
//! A descriptor that is replaced meanwhile changes nothing. Only regular unlinked files that the
//! process's user owns are changed, and only their time of modification. So a hostile tenant gains
//! no more than `touch` gives. Not here: when (`instances::watchdog`).

use std::os::fd::OwnedFd;
use std::time::{Duration, SystemTime};

use rustix::fs::{
    AtFlags, Dir, FileType, Mode, OFlags, Stat, Timespec, Timestamps, UTIME_OMIT, fstat, open as open_path,
    openat, utimensat,
};
use rustix::io;

/// Maximum number of descriptors of one application that are checked: some milliseconds.
pub const FILES_MAX: usize = 1_024;

/// The descriptors of a process.
#[derive(Debug)]
pub struct ProcessFds {
    pub pid: i32,
    dir: OwnedFd,
    /// Owner of the process.
    owner: u32,
}

/// Opens those of a live process. The directory stays that of this process, even if its number is
/// reused.
pub fn open(pid: i32) -> Option<ProcessFds> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = open_path(format!("/proc/{pid}/fd"), flags, Mode::empty()).ok()?;
    let owner = fstat(&dir).ok()?.st_uid;
    Some(ProcessFds { pid, dir, owner })
}

impl ProcessFds {
    /// Makes signs of life as old as they were at `frozen_since`, which is `stood_still` ago. Later
    /// signs are left alone. `left`: number of descriptors that may still be checked.
    pub fn renew(&self, frozen_since: SystemTime, stood_still: Duration, left: &mut usize) {
        let Ok(entries) = Dir::read_from(&self.dir) else { return };
        for entry in entries.flatten() {
            if *left == 0 {
                return;
            }
            *left -= 1;
            let flags = OFlags::PATH | OFlags::CLOEXEC;
            let Ok(file) = openat(&self.dir, entry.file_name(), flags, Mode::empty()) else { continue };
            let Ok(stat) = fstat(&file) else { continue };
            if self.is_sign(&stat) && changed_at(&stat).is_some_and(|at| at < frozen_since) {
                // A file that cannot be changed stays as it was.
                let _ = add(&file, &stat, stood_still);
            }
        }
    }

    fn is_sign(&self, stat: &Stat) -> bool {
        FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
            && stat.st_nlink == 0
            && stat.st_uid == self.owner
    }
}

fn changed_at(stat: &Stat) -> Option<SystemTime> {
    let seconds = u64::try_from(stat.st_ctime).ok()?;
    SystemTime::UNIX_EPOCH
        .checked_add(Duration::from_secs(seconds) + Duration::from_nanos(stat.st_ctime_nsec))
}

/// Moves the time of modification, which follows the program's clock. The time of change becomes
/// now.
fn add(file: &OwnedFd, stat: &Stat, time: Duration) -> io::Result<()> {
    let nanos = u64::from(time.subsec_nanos()) + stat.st_mtime_nsec;
    let whole = time.as_secs() + nanos / 1_000_000_000;
    let seconds = i64::try_from(whole).ok().and_then(|whole| stat.st_mtime.checked_add(whole));
    let times = Timestamps {
        last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
        last_modification: Timespec {
            tv_sec: seconds.ok_or(io::Errno::OVERFLOW)?,
            tv_nsec: i64::try_from(nanos % 1_000_000_000).map_err(|_| io::Errno::OVERFLOW)?,
        },
    };
    utimensat(file, "", &times, AtFlags::EMPTY_PATH)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt as _;
    use std::process::Command;

    use super::*;

    /// The time of modification of a file that is open here, after it was renewed: seconds since
    /// 1970.
    fn renewed(has_name: bool, frozen_since: SystemTime) -> i64 {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sign");
        let file = fs::File::create(&path).unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(700)).unwrap();
        if !has_name {
            fs::remove_file(&path).unwrap();
        }
        let own = open(i32::try_from(std::process::id()).unwrap()).unwrap();
        let stat = fstat(&file).unwrap();
        let is_sign = own.is_sign(&stat);
        if is_sign && changed_at(&stat).unwrap() < frozen_since {
            add(&file.try_clone().unwrap().into(), &stat, Duration::from_millis(60_500)).unwrap();
        }
        assert_eq!(is_sign, !has_name);
        file.metadata().unwrap().mtime()
    }

    #[test]
    fn signs_without_a_name_are_as_old_as_before() {
        let later = SystemTime::now() + Duration::from_secs(60);
        assert_eq!(renewed(false, later), 760);
        assert_eq!(renewed(false, SystemTime::UNIX_EPOCH), 700, "it was given since");
        assert_eq!(renewed(true, later), 700, "a file with a name is no sign");
    }

    #[test]
    fn files_are_found_by_their_descriptors() {
        let file = tempfile::tempfile().unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(700)).unwrap();
        let mut worker = Command::new("sleep").arg("60").stdin(file.try_clone().unwrap()).spawn().unwrap();
        // The kernel's clock for files is some milliseconds behind.
        let later = SystemTime::now() + Duration::from_secs(1);
        open(i32::try_from(worker.id()).unwrap()).unwrap().renew(later, Duration::from_secs(5), &mut 100);
        assert_eq!(file.metadata().unwrap().mtime(), 705);
        worker.kill().unwrap();
        worker.wait().unwrap();
    }
}
