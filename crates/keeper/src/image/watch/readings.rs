//! Records the files that an application reads before an image of it is taken.
//!
//! The kernel tells of each file that is opened or written through the sandbox' own mounts
//! (fanotify(7)), from before its first program on. A file that the application itself writes is
//! left out: logs, caches and databases change all the time. Where the kernel does not tell, the
//! entries of the application's directory are watched in its place, and that is said.
//!
//! Invariant: nothing is opened by a path that a tenant can change; the kernel hands over what was
//! opened. All of it blocks. Not here: comparing (`watched`).

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ffi::OsString;
use std::fs;
use std::io::{self, Read as _};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sys::fanotify::{EventFFlags, Fanotify, InitFlags, MarkFlags, MaskFlags};
use parking_lot::Mutex;
use rustix::fs::{CWD, FileType};
use rustix::time::{ClockId, clock_gettime};

use crate::image::watch::watched::{ContentStamp, PathState, WatchedInputs, WatchedPath};
use crate::paths::tenant_path::PathOwner;
use crate::sandbox::Sandbox;

/// Maximum number of files that are watched separately. For further files, only their directories
/// are watched.
const FILES_MAX: usize = 6144;

/// Maximum number of directories of these files that are searched for links, and of entries of one.
const DIRECTORIES_MAX: usize = 512;
const ENTRIES_MAX: usize = 4096;

/// Maximum number of watched links.
const LINKS_MAX: usize = 1024;

/// Maximum number of entries of a directory that the record names.
const NAMED_ENTRIES_MAX: usize = 1024;

/// Maximum number of descriptors of one process that are read, and bytes of the kernel's text about
/// one. The needed part is at its beginning.
const DESCRIPTORS_MAX: usize = 4096;
const DESCRIPTOR_LEN_MAX: u64 = 512;

/// Maximum number of bytes read of one process' list of mappings.
const MAPPINGS_LEN_MAX: u64 = 4 << 20;

/// Maximum number of events read at once: as many as the kernel queues by itself
/// (`fs.fanotify.max_queued_events`). A program that opens files without end keeps nobody busy for
/// longer.
const EVENTS_MAX: usize = 16_384;

/// Why some events are missing.
const TOO_MANY: &str = "more files were opened at once than the kernel tells of";

/// Device and inode of a file, which are the same for all its names.
type InodeKey = (u64, u64);

/// Further dependencies of an image besides the files that its processes read.
#[derive(Debug, Clone, Default)]
pub struct WatchTerms {
    /// Paths of the application's files, the same in its sandbox and on the node.
    pub roots: Vec<PathBuf>,
    /// Its working directory.
    pub directory: PathBuf,
    /// Dependencies of the image that it was restored from.
    pub before: WatchedInputs,
    /// Absolute paths that the record names, and those that end any image.
    pub named: Vec<PathBuf>,
}

#[derive(Debug)]
struct ReadFile {
    path: PathBuf,
    stamp: ContentStamp,
    /// It has not changed since it was opened.
    is_sure: bool,
}

#[derive(Debug, Default)]
struct SeenFiles {
    files: HashMap<InodeKey, ReadFile>,
    written: HashSet<InodeKey>,
    /// Directories of files beyond `FILES_MAX`.
    beyond: BTreeSet<PathBuf>,
    beyond_count: usize,
    /// Why some events were lost.
    lost: Option<String>,
    /// When events were read last.
    read_at: (i64, i64),
}

/// Records the files that are opened in one sandbox.
#[derive(Debug)]
pub struct ReadRecorder {
    /// The error says why there is none.
    group: Result<Fanotify, String>,
    began: (i64, i64),
    terms: WatchTerms,
    seen: Mutex<SeenFiles>,
}

impl ReadRecorder {
    /// Begins to record which files are opened in a sandbox, before its first program.
    pub fn of_sandbox(sandbox: &Sandbox, terms: WatchTerms) -> Self {
        Self::start(sandbox.root(), terms)
    }

    /// Begins to record opened files below these roots of a sandbox, in which nothing runs yet.
    pub fn start(root: &OwnedFd, terms: WatchTerms) -> Self {
        let group = begin(root, &terms.roots).map_err(|error| error.to_string());
        if let Err(why) = &group {
            tracing::debug!("files that an application reads are not reported: {why}");
        }
        let began = now();
        let seen = SeenFiles { read_at: began, ..SeenFiles::default() };
        Self { group, began, terms, seen: Mutex::new(seen) }
    }

    /// Reads the events so far, `EVENTS_MAX` at most. Returns their number.
    pub fn drain(&self) -> usize {
        let Ok(group) = &self.group else { return 0 };
        let mut seen = self.seen.lock();
        let began = now();
        let mut count = 0;
        while count < EVENTS_MAX {
            let events = match group.read_events() {
                Ok(events) if events.is_empty() => break,
                Ok(events) => events,
                Err(Errno::EAGAIN) => break,
                Err(Errno::EINTR) => continue,
                Err(errno) => {
                    seen.lost = Some(format!("the kernel did not tell of some: {errno}"));
                    break;
                }
            };
            count += events.len();
            for event in &events {
                if event.mask().contains(MaskFlags::FAN_Q_OVERFLOW) {
                    seen.lost = Some(TOO_MANY.into());
                } else if let Some(fd) = event.fd() {
                    seen.add(event.mask(), &fd, &self.terms.roots);
                }
            }
        }
        seen.read_at = began;
        count
    }

    /// Returns the dependencies of an image that is taken now. `pids`: all processes of the
    /// application.
    pub fn finish(&self, owner: &PathOwner, pids: &[i32]) -> WatchedInputs {
        let is_all = self.drain() < EVENTS_MAX;
        let mut seen = self.seen.lock();
        if !is_all {
            seen.lost = Some(TOO_MANY.into());
        }
        let (written, held) = written_by(pids);
        seen.files
            .retain(|(device, inode), _| !written.contains(inode) && !held.contains(&(*device, *inode)));
        let mut gaps: Vec<String> = seen.lost.iter().chain(self.terms.before.gaps()).cloned().collect();
        let mut paths = BTreeMap::new();
        for watched in self.terms.before.paths() {
            let is_own = |stamp: &ContentStamp| {
                written.contains(&stamp.inode) || seen.written.contains(&(stamp.device, stamp.inode))
            };
            if !matches!(&watched.state, PathState::Is(stamp) if is_own(stamp)) {
                paths.insert(watched.path().to_path_buf(), watched.state);
            }
        }
        if let Err(why) = &self.group {
            gaps.push(format!(
                "files below its directory's own entries: the kernel does not tell of them ({why})"
            ));
            add_entries(owner, &self.terms.directory, &written, &mut paths);
        }
        add_read(owner, &seen, &mut paths);
        add_sources(owner, self.began, &mut paths);
        if seen.beyond_count > 0 {
            let (files, directories) = (seen.beyond_count, seen.beyond.len());
            gaps.push(format!(
                "{files} files beyond the first {FILES_MAX}; the {directories} directories they are in are"
            ));
            let beyond: Vec<PathBuf> = seen.beyond.iter().cloned().collect();
            add_states(owner, beyond, &mut paths);
        }
        add_links(owner, seen.files.values(), &self.terms.roots, &mut paths);
        self.add_named(owner, &mut paths);
        let paths = paths.iter().map(|(path, state)| WatchedPath::new(path, *state)).collect();
        WatchedInputs::new(paths, gaps)
    }

    /// Adds the paths that the record names, even if the application writes them.
    fn add_named(&self, owner: &PathOwner, paths: &mut BTreeMap<PathBuf, PathState>) {
        let named: Vec<PathBuf> = self.terms.named.clone();
        let mut all = named.clone();
        for path in named {
            let Ok(entries) = owner.list_directory(&path, NAMED_ENTRIES_MAX) else { continue };
            all.extend(entries.into_iter().map(|(name, _)| path.join(name)));
        }
        all.sort();
        add_states(owner, all, paths);
    }
}

impl SeenFiles {
    fn add(&mut self, mask: MaskFlags, fd: &impl AsFd, roots: &[PathBuf]) {
        let Ok(stat) = rustix::fs::fstat(fd) else { return };
        let id = (stat.st_dev, stat.st_ino);
        if mask.intersects(MaskFlags::FAN_MODIFY | MaskFlags::FAN_CLOSE_WRITE) {
            self.files.remove(&id);
            if self.written.len() < FILES_MAX {
                self.written.insert(id);
            }
            return;
        }
        if self.written.contains(&id) {
            return;
        }
        let link = format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd());
        let Ok(path) = rustix::fs::readlinkat(CWD, link, Vec::new()) else { return };
        let path = PathBuf::from(OsString::from_vec(path.into_bytes()));
        // The path of a removed file belongs to another now, or to none.
        let (path, is_removed) = match path.to_str().and_then(|path| path.strip_suffix(" (deleted)")) {
            Some(before) if stat.st_nlink == 0 => (PathBuf::from(before), true),
            _ => (path, false),
        };
        if !roots.iter().any(|root| path.starts_with(root)) {
            return;
        }
        if self.files.len() >= FILES_MAX && !self.files.contains_key(&id) {
            self.beyond_count += 1;
            if self.beyond.len() < DIRECTORIES_MAX {
                self.beyond.extend(path.parent().map(Path::to_path_buf));
            }
            return;
        }
        let stamp = ContentStamp::from(&stat);
        let is_sure = !is_removed && stamp.changed <= self.read_at;
        self.files.insert(id, ReadFile { path, stamp, is_sure });
    }
}

fn now() -> (i64, i64) {
    // The clock from which file systems take their times.
    let now = clock_gettime(ClockId::RealtimeCoarse);
    (now.tv_sec, now.tv_nsec)
}

fn begin(root: &OwnedFd, roots: &[PathBuf]) -> io::Result<Fanotify> {
    let flags = InitFlags::FAN_CLASS_NOTIF | InitFlags::FAN_CLOEXEC | InitFlags::FAN_NONBLOCK;
    // Non-blocking: somebody may hold a lease on a file (fcntl(2)).
    let events =
        EventFFlags::O_RDONLY | EventFFlags::O_NONBLOCK | EventFFlags::O_CLOEXEC | EventFFlags::O_LARGEFILE;
    let group = Fanotify::init(flags, events)?;
    let mask = MaskFlags::FAN_OPEN | MaskFlags::FAN_MODIFY | MaskFlags::FAN_CLOSE_WRITE;
    for path in roots {
        let place = crate::paths::tenant_path::open_in_tree(root, path)?;
        // The very mount that was looked up. The path is the keeper's own.
        let link = PathBuf::from(format!("/proc/self/fd/{}", place.as_raw_fd()));
        group.mark(MarkFlags::FAN_MARK_ADD | MarkFlags::FAN_MARK_MOUNT, mask, CWD, Some(&link))?;
    }
    Ok(group)
}

fn add_states(owner: &PathOwner, all: Vec<PathBuf>, paths: &mut BTreeMap<PathBuf, PathState>) {
    let Ok(stats) = owner.stat_each(&all) else { return };
    for (path, stat) in all.into_iter().zip(stats) {
        paths.insert(path, PathState::from_stat(stat));
    }
}

/// Adds files as they were read, if they are unchanged. A file that the application itself has
/// replaced is its own.
fn add_read(owner: &PathOwner, seen: &SeenFiles, paths: &mut BTreeMap<PathBuf, PathState>) {
    let mut read: Vec<&ReadFile> = seen.files.values().collect();
    read.sort_by(|one, other| one.path.cmp(&other.path));
    let names: Vec<PathBuf> = read.iter().map(|file| file.path.clone()).collect();
    let Ok(stats) = owner.stat_each(&names) else { return };
    for ((file, stat), path) in read.into_iter().zip(stats).zip(names) {
        let stamp = stat.ok().map(|stat| ContentStamp::from(&stat));
        if stamp.is_some_and(|stamp| seen.written.contains(&(stamp.device, stamp.inode))) {
            continue;
        }
        let is_same = stamp == Some(file.stamp);
        let state = if file.is_sure && is_same { PathState::Is(file.stamp) } else { PathState::Unsure };
        paths.insert(path, state);
    }
}

/// Adds sources whose compiled form was read instead: Python then checks only the time of the
/// source.
fn add_sources(owner: &PathOwner, began: (i64, i64), paths: &mut BTreeMap<PathBuf, PathState>) {
    let mut sources: Vec<PathBuf> = paths.keys().filter_map(|path| source_of(path)).collect();
    sources.sort();
    sources.dedup();
    sources.retain(|source| !paths.contains_key(source));
    let mut found = BTreeMap::new();
    add_states(owner, sources, &mut found);
    for (path, state) in found {
        let is_late = matches!(state, PathState::Is(stamp) if stamp.changed > began);
        paths.insert(path, if is_late { PathState::Unsure } else { state });
    }
}

/// Returns the source of a compiled file of Python's, `__pycache__/NAME.TAG.pyc` (PEP 3147).
fn source_of(compiled: &Path) -> Option<PathBuf> {
    let directory = compiled.parent().filter(|directory| directory.ends_with("__pycache__"))?;
    let name = compiled.file_name()?.to_str()?.strip_suffix(".pyc")?;
    Some(directory.parent()?.join(format!("{}.py", name.split('.').next()?)))
}

/// Adds links beside the files that were read, and beside their directories: the kernel reports no
/// links.
fn add_links<'a>(
    owner: &PathOwner,
    files: impl Iterator<Item = &'a ReadFile>,
    roots: &[PathBuf],
    paths: &mut BTreeMap<PathBuf, PathState>,
) {
    let mut directories: BTreeSet<&Path> = roots.iter().map(PathBuf::as_path).collect();
    for file in files {
        for above in file.path.ancestors().skip(1) {
            let is_within = roots.iter().any(|root| above.starts_with(root));
            if !is_within || directories.len() >= DIRECTORIES_MAX || !directories.insert(above) {
                break;
            }
        }
    }
    let mut links = Vec::new();
    for directory in directories {
        let Ok(entries) = owner.list_directory(directory, ENTRIES_MAX) else { continue };
        let found = entries.into_iter().filter(|(_, kind)| *kind == FileType::Symlink);
        links.extend(found.map(|(name, _)| directory.join(name)));
    }
    links.sort();
    links.truncate(LINKS_MAX);
    add_states(owner, links, paths);
}

/// Adds the files of a directory, without those that the application has open for writing.
fn add_entries(
    owner: &PathOwner,
    directory: &Path,
    written: &HashSet<u64>,
    paths: &mut BTreeMap<PathBuf, PathState>,
) {
    let Ok(entries) = owner.list_directory(directory, ENTRIES_MAX) else { return };
    let files = entries.into_iter().filter(|(_, kind)| *kind != FileType::Directory);
    let mut all: Vec<PathBuf> = files.map(|(name, _)| directory.join(name)).collect();
    all.sort();
    let mut found = BTreeMap::new();
    add_states(owner, all, &mut found);
    let is_written =
        |state: &PathState| matches!(state, PathState::Is(stamp) if written.contains(&stamp.inode));
    paths.extend(found.into_iter().filter(|(_, state)| !is_written(state)));
}

/// Returns the files that these processes can write to now: inodes of open files, and mapped files.
fn written_by(pids: &[i32]) -> (HashSet<u64>, HashSet<InodeKey>) {
    let (mut open, mut mapped) = (HashSet::new(), HashSet::new());
    for pid in pids {
        let Ok(descriptors) = fs::read_dir(format!("/proc/{pid}/fdinfo")) else { continue };
        for entry in descriptors.take(DESCRIPTORS_MAX).flatten() {
            let Ok(text) = read_beginning(&entry.path(), DESCRIPTOR_LEN_MAX) else { continue };
            open.extend(inode_if_writable(&text));
        }
        if let Ok(text) = read_beginning(Path::new(&format!("/proc/{pid}/maps")), MAPPINGS_LEN_MAX) {
            mapped.extend(text.lines().filter_map(mapped_writable));
        }
    }
    (open, mapped)
}

/// Reads a text of the kernel's, up to the limit. A program decides how long it is.
fn read_beginning(path: &Path, len_max: u64) -> io::Result<String> {
    let mut bytes = Vec::new();
    fs::File::open(path)?.take(len_max).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Returns the inode in a text of `/proc/PID/fdinfo`, if the descriptor can be written
/// (proc_pid_fdinfo(5)).
fn inode_if_writable(text: &str) -> Option<u64> {
    let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let flags = u32::from_str_radix(field("flags:")?, 8).ok()?;
    // `O_WRONLY` and `O_RDWR`.
    if flags & 0o3 == 0 { None } else { field("ino:")?.parse().ok() }
}

/// Returns the file in a line of `/proc/PID/maps`, if writes to the memory go to it
/// (proc_pid_maps(5)).
fn mapped_writable(line: &str) -> Option<InodeKey> {
    let mut words = line.split_ascii_whitespace();
    let (_, rights, _, device, inode) =
        (words.next()?, words.next()?, words.next()?, words.next()?, words.next()?);
    if !(rights.starts_with("rw") && rights.ends_with('s')) {
        return None;
    }
    let (major, minor) = device.split_once(':')?;
    let number = |text| u32::from_str_radix(text, 16).ok();
    let device = rustix::fs::makedev(number(major)?, number(minor)?);
    Some((device, inode.parse().ok().filter(|inode| *inode != 0)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_compiled_file_of_pythons_has_a_source() {
        let source = |path: &str| source_of(Path::new(path));
        assert_eq!(source("/a/__pycache__/b.cpython-311.pyc"), Some("/a/b.py".into()));
        assert_eq!(source("/a/__pycache__/b.cpython-311.opt-1.pyc"), Some("/a/b.py".into()));
        for other in ["/a/b.pyc", "/a/__pycache__/b.txt", "/a/b.py"] {
            assert_eq!(source(other), None, "{other}");
        }
    }

    #[test]
    fn of_a_long_text_the_beginning_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("maps");
        fs::write(&path, "a line\n".repeat(1000)).unwrap();
        assert_eq!(read_beginning(&path, 10).unwrap(), "a line\na l");
        assert_eq!(read_beginning(&path, 1 << 20).unwrap().len(), 7000);
    }

    #[test]
    fn only_what_can_be_written_counts_as_written() {
        let text = |flags: &str| format!("pos:\t0\nflags:\t{flags}\nmnt_id:\t29\nino:\t4711\n");
        assert_eq!(inode_if_writable(&text("0100000")), None);
        assert_eq!(inode_if_writable(&text("0100001")), Some(4711));
        assert_eq!(inode_if_writable(&text("02100002")), Some(4711));
        assert_eq!(inode_if_writable("flags:\t01\n"), None, "an old kernel tells no inode");
    }

    #[test]
    fn only_shared_memory_that_can_be_written_goes_to_its_file() {
        let line =
            |rights: &str| format!("7f0000000000-7f0000001000 {rights} 00000000 fe:01 131 /home/t/db-shm");
        assert_eq!(mapped_writable(&line("rw-s")), Some((rustix::fs::makedev(0xfe, 1), 131)));
        for rights in ["r--s", "rw-p", "r-xp"] {
            assert_eq!(mapped_writable(&line(rights)), None, "{rights}");
        }
        assert_eq!(mapped_writable("7f0000000000-7f0000001000 rw-s 00000000 00:01 0 /dev/zero"), None);
    }
}
