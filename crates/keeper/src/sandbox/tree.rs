//! The files of a sandbox: sources opened for it with the node's rights, and their assembly by its
//! init.
//!
//! The root file system is made first, the same for every sandbox, and is all of its mount
//! namespace (`skeleton`, `enter`). When the sandbox is ordered, a process with the node's root
//! rights opens every source as a detached mount (`prepare`). Root of a sandbox could not reach
//! them. Its init attaches them (`attach`). Not here: the namespaces (`namespaces`), the order of
//! steps (`birth`).

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, StatxAttributes, StatxFlags};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, fsconfig_create,
    fsconfig_set_string, fsmount, fsopen, move_mount, open_tree, unmount,
};

use crate::paths::tenant_path::PathOwner;
use crate::sys::{AccessRight, UnixIdentity};

use super::failure::{StepContext, StepFailure};
use super::ids::root_id;
use super::kernel::{set_mount_attributes, set_tree_attributes};
use super::order::{BirthBind, SandboxBirth};

const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

const PLAIN: MountAttrFlags = MountAttrFlags::MOUNT_ATTR_NOSUID.union(MountAttrFlags::MOUNT_ATTR_NODEV);
const READ_ONLY: MountAttrFlags = PLAIN.union(MountAttrFlags::MOUNT_ATTR_RDONLY);
const NO_PROGRAMS: MountAttrFlags = MountAttrFlags::MOUNT_ATTR_NOEXEC;
/// The one file system that has devices.
const SKELETON: MountAttrFlags = MountAttrFlags::MOUNT_ATTR_NOSUID.union(NO_PROGRAMS);

/// Directories of which every sandbox has its own.
const OWN: [&str; 5] = ["proc", "sys", "dev", "run", "tmp"];

/// Entries of the node's root that are shown, because programs need them. Any others may be
/// anybody's files.
const SHOWN: [&str; 14] = [
    "bin", "etc", "gnu", "lib", "lib32", "lib64", "libexec", "libo32", "libx32", "nix", "opt", "sbin", "usr",
    "var",
];

/// Directories of any other base whose entries are mounted one by one, if there are few. So a
/// tenant's files may be beside them.
const SPREAD: [&str; 7] = ["home", "root", "srv", "mnt", "media", "boot", "lost+found"];
const SPREAD_MAX: usize = 32;

/// Directories of the node that look empty. `hide` of an order adds to them.
const HIDDEN: [&str; 5] = ["/var/log", "/var/spool", "/var/mail", "/var/backups", "/var/www"];

/// Directories of a base that nodes often have as file systems of their own.
const NESTED: [&str; 3] = ["usr/local", "var/lib", "var/cache"];

/// Files about the node's hardware that programs read.
const FACTS: [&str; 2] = ["/sys/devices/system/cpu", "/sys/kernel/mm/transparent_hugepage"];

/// Files of `/proc` that report on the node, or act on it. Docker masks them, too.
const MASKED: [&str; 16] = [
    "acpi",
    "asound",
    "interrupts",
    "kallsyms",
    "kcore",
    "keys",
    "key-users",
    "kmsg",
    "latency_stats",
    "modules",
    "sched_debug",
    "scsi",
    "sysrq-trigger",
    "timer_list",
    "timer_stats",
    "vmallocinfo",
];
/// Not `sys`: its foreign entries belong to root of the node, who is nobody here. CRIU must write
/// the sandbox' own entries.
const LOCKED: [&str; 3] = ["bus", "fs", "irq"];

/// Directories of the root file system that are the sandbox' root's, in the order they are made.
const OWNED: [&str; 10] = [".", "dev", "proc", "sys", "run", "tmp", "dev/pts", "dev/shm", HIDES, NOTHING];

/// Name, major and minor number (`Documentation/admin-guide/devices.txt`).
const DEVICES: [(&str, u32, u32); 6] =
    [("null", 1, 3), ("zero", 1, 5), ("full", 1, 7), ("random", 1, 8), ("urandom", 1, 9), ("tty", 5, 0)];

const LINKS: [(&str, &str); 5] = [
    ("dev/ptmx", "pts/ptmx"),
    ("dev/fd", "/proc/self/fd"),
    ("dev/stdin", "/proc/self/fd/0"),
    ("dev/stdout", "/proc/self/fd/1"),
    ("dev/stderr", "/proc/self/fd/2"),
];

/// Directories of the skeleton that are mounted over others: those that may get mount points, and
/// an empty one.
const HIDES: &str = ".hidden";
const NOTHING: &str = ".nothing";
/// Path of the node's `/proc` until the sandbox has its own: relative to the root that is its
/// working directory.
const NODE_PROC: &str = ".hidden/proc";

/// Size of the skeleton: directories, links and devices only.
const SKELETON_BYTES_MAX: &str = "1m";
/// Maximum number of pseudoterminals.
const TERMINALS_MAX: &str = "16";
/// Size of `/tmp` and of `/run` where the order names no directory for them.
const SCRATCH_BYTES_MAX: u64 = 64 << 20;

/// All sources of one sandbox, each a detached mount.
#[derive(Debug)]
pub struct PreparedMounts {
    /// Each with its path in the root file system, where a mount point is made for it.
    base: Vec<(OwnedFd, PathBuf)>,
    /// File systems of their own in the base.
    nested: Vec<MountSource>,
    tmp: Option<OwnedFd>,
    run: Option<OwnedFd>,
    binds: Vec<MountSource>,
    /// Directories of the base that look empty.
    hide: Vec<PathBuf>,
    /// `/var/tmp` exists and must be `/tmp`.
    has_var_tmp: bool,
}

#[derive(Debug)]
struct MountSource {
    mount: OwnedFd,
    target: PathBuf,
    is_directory: bool,
    is_optional: bool,
}

// === With the node's rights ===

/// Opens everything `birth` names, and makes the root file system the sandbox'.
pub fn prepare(birth: &SandboxBirth, root: &OwnedFd) -> Result<PreparedMounts, StepFailure> {
    for name in OWNED {
        give(root, name, birth).step("make its root file system its own")?;
    }
    let base_at = || format!("open its base {}", birth.base.display());
    let identity = UnixIdentity { uid: birth.uid, gid: birth.gid };
    let owner = PathOwner::new(birth.home.as_deref(), Some(identity));
    let base = open_base(birth, &owner).step(base_at())?;
    let is_node = is_root_of_node(&base).step(base_at())?;
    let sources = top_level(&base, root, birth, is_node).step(base_at())?;
    let nested = nested(&base).step(base_at())?;
    let mut hide = Vec::new();
    if is_node {
        let hidden = HIDDEN.iter().map(Path::new).chain(birth.hide.iter().map(PathBuf::as_path));
        hide.extend(hidden.filter(|path| path.is_dir()).map(Path::to_path_buf));
    }
    let scratch = |path: &Option<PathBuf>| {
        let open = |path: &PathBuf| clone_path(CWD, path, PLAIN).step(format!("open {}", path.display()));
        path.as_ref().map(open).transpose()
    };
    let binds = birth
        .binds
        .iter()
        .map(|bound| open_bound(bound, &owner).step(format!("open {} for it", bound.source.display())));
    let has_var_tmp = find(&base, Path::new("var/tmp"), true).is_ok();
    Ok(PreparedMounts {
        base: sources,
        nested,
        tmp: scratch(&birth.tmp)?,
        run: scratch(&birth.run)?,
        binds: binds.collect::<Result<_, _>>()?,
        hide,
        has_var_tmp,
    })
}

/// The common beginning of every sandbox.
#[derive(Debug)]
pub struct RootSkeleton {
    pub root: OwnedFd,
    /// `/proc` of the node. Only a process that sees one in full may mount another.
    proc: OwnedFd,
    facts: Vec<(OwnedFd, &'static Path)>,
}

/// Makes one: a root file system and the parts that are the same in all of them.
pub fn skeleton() -> io::Result<RootSkeleton> {
    let root = root_of_all()?;
    rustix::fs::mkdirat(&root, NODE_PROC, Mode::from_raw_mode(0o755))?;
    let mut facts = Vec::with_capacity(FACTS.len());
    for fact in FACTS.iter().map(Path::new).filter(|fact| fact.is_dir()) {
        make(&root, fact, true)?;
        facts.push((clone_path(CWD, fact, READ_ONLY)?, fact));
    }
    Ok(RootSkeleton { root, proc: clone_path(CWD, Path::new("/proc"), PLAIN | NO_PROGRAMS)?, facts })
}

/// Makes a small file system in memory with the only devices there are. It is root's of the node
/// until it is somebody's.
fn root_of_all() -> io::Result<OwnedFd> {
    let root = new_mount("tmpfs", &[("mode", "755"), ("size", SKELETON_BYTES_MAX)], SKELETON)?;
    let mode = Mode::from_raw_mode(0o755);
    for name in OWNED.into_iter().filter(|name| *name != ".") {
        rustix::fs::mkdirat(&root, name, mode)?;
    }
    for (name, major, minor) in DEVICES {
        let (path, device) = (format!("dev/{name}"), rustix::fs::makedev(major, minor));
        let file = Mode::from_raw_mode(0o666);
        rustix::fs::mknodat(&root, &path, FileType::CharacterDevice, file, device)?;
        // The umask of the keeper's process has removed bits.
        rustix::fs::chmodat(&root, &path, file, AtFlags::empty())?;
    }
    for (name, to) in LINKS {
        rustix::fs::symlinkat(to, &root, name)?;
    }
    Ok(root)
}

/// Makes it the sandbox' root's.
fn give(root: &OwnedFd, path: impl rustix::path::Arg, birth: &SandboxBirth) -> io::Result<()> {
    Ok(rustix::fs::chownat(
        root,
        path,
        Some(own(birth.uid)),
        Some(own_group(birth.gid)),
        AtFlags::SYMLINK_NOFOLLOW,
    )?)
}

fn own(uid: u32) -> rustix::fs::Uid {
    rustix::fs::Uid::from_raw(root_id(uid))
}

fn own_group(gid: u32) -> rustix::fs::Gid {
    rustix::fs::Gid::from_raw(root_id(gid))
}

/// Opens the directories of a base, each as a mount, and copies its links into the skeleton.
fn top_level(
    base: &OwnedFd,
    root: &OwnedFd,
    birth: &SandboxBirth,
    is_node: bool,
) -> io::Result<Vec<(OwnedFd, PathBuf)>> {
    let mut sources = Vec::new();
    for entry in rustix::fs::Dir::read_from(base_readable(base)?)? {
        let entry = entry?;
        let Ok(name) = entry.file_name().to_str() else { continue };
        let left_out = is_node && !SHOWN.contains(&name);
        if name.starts_with('.') || OWN.contains(&name) || left_out {
            continue;
        }
        match kind_of(base, &entry)? {
            FileType::Symlink => {
                let to = rustix::fs::readlinkat(base, name, Vec::new())?;
                rustix::fs::symlinkat(&to, root, name)?;
            }
            // One entry at a time, so that there is room for a tenant's files beside them.
            FileType::Directory if SPREAD.contains(&name) && is_small(base, name)? => {
                let dir = find(base, Path::new(name), true)?;
                rustix::fs::mkdirat(root, name, Mode::from_raw_mode(0o755))?;
                give(root, name, birth)?;
                spread(&dir, name, root, &mut sources)?;
            }
            FileType::Directory => {
                let mount = clone_path(base, Path::new(name), READ_ONLY)?;
                rustix::fs::mkdirat(root, name, Mode::from_raw_mode(0o755))?;
                sources.push((mount, name.into()));
            }
            _ => {}
        }
    }
    Ok(sources)
}

fn nested(base: &OwnedFd) -> io::Result<Vec<MountSource>> {
    let mut sources = Vec::new();
    for name in NESTED {
        // A base that is not the node's may have any links.
        let Ok(found) = find(base, Path::new(name), true) else { continue };
        let stat = rustix::fs::statx(&found, "", AtFlags::EMPTY_PATH, StatxFlags::TYPE)?;
        if stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) {
            let mount = clone_mount(&found, READ_ONLY)?;
            sources.push(MountSource { mount, target: name.into(), is_directory: true, is_optional: false });
        }
    }
    Ok(sources)
}

/// Returns its type. Not all file systems report it with the name.
fn kind_of(dir: &OwnedFd, entry: &rustix::fs::DirEntry) -> io::Result<FileType> {
    match entry.file_type() {
        FileType::Unknown => {
            let stat = rustix::fs::statat(dir, entry.file_name(), AtFlags::SYMLINK_NOFOLLOW)?;
            Ok(FileType::from_raw_mode(stat.st_mode))
        }
        kind => Ok(kind),
    }
}

/// Whether it has so few entries that each can be a mount of its own.
fn is_small(base: &OwnedFd, name: &str) -> io::Result<bool> {
    let dir = base_readable(&find(base, Path::new(name), true)?)?;
    // With `.` and `..`.
    Ok(rustix::fs::Dir::read_from(dir)?.take(SPREAD_MAX + 3).count() <= SPREAD_MAX + 2)
}

/// Opens each entry in a directory of the base as a mount below `name`, and copies links into the
/// skeleton.
fn spread(
    dir: &OwnedFd,
    name: &str,
    root: &OwnedFd,
    sources: &mut Vec<(OwnedFd, PathBuf)>,
) -> io::Result<()> {
    for entry in rustix::fs::Dir::read_from(base_readable(dir)?)? {
        let entry = entry?;
        let Some(inner) = entry.file_name().to_str().ok().filter(|inner| !matches!(*inner, "." | ".."))
        else {
            continue;
        };
        let target = Path::new(name).join(inner);
        match kind_of(dir, &entry)? {
            FileType::Symlink => {
                let to = rustix::fs::readlinkat(dir, inner, Vec::new())?;
                rustix::fs::symlinkat(&to, root, &target)?;
            }
            kind @ (FileType::Directory | FileType::RegularFile) => {
                let mount = clone_path(dir, Path::new(inner), READ_ONLY)?;
                match kind {
                    FileType::Directory => rustix::fs::mkdirat(root, &target, Mode::from_raw_mode(0o755))?,
                    _ => drop(new_file(root, &target)?),
                }
                sources.push((mount, target));
            }
            _ => {}
        }
    }
    Ok(())
}

fn base_readable(base: &OwnedFd) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(base, ".", flags, Mode::empty())?)
}

fn open_base(birth: &SandboxBirth, owner: &PathOwner) -> io::Result<OwnedFd> {
    if birth.base_as_tenant {
        return owner.open_directory(&birth.base, AccessRight::Search);
    }
    Ok(rustix::fs::openat(CWD, &birth.base, DIRECTORY, Mode::empty())?)
}

/// Under any path.
fn is_root_of_node(base: &OwnedFd) -> io::Result<bool> {
    let (base, root) = (rustix::fs::fstat(base)?, rustix::fs::stat("/")?);
    Ok((base.st_dev, base.st_ino) == (root.st_dev, root.st_ino))
}

/// Opens a source. Links in it are left as they are. A program follows them in its sandbox, where
/// they lead to nothing else.
fn open_bound(bound: &BirthBind, owner: &PathOwner) -> io::Result<MountSource> {
    let (found, is_directory) = if bound.as_tenant {
        owner.open_source(&bound.source)?
    } else {
        let found = rustix::fs::openat(CWD, &bound.source, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        let kind = FileType::from_raw_mode(rustix::fs::fstat(&found)?.st_mode);
        (found, kind == FileType::Directory)
    };
    let mount = clone_mount(&found, if bound.writable { PLAIN } else { READ_ONLY })?;
    Ok(MountSource { mount, target: bound.target.clone(), is_directory, is_optional: bound.is_optional })
}

// === In the sandbox' own namespaces ===

/// Makes it the root of this process, and all of this process' mount namespace. Nothing of the
/// node's own tree is left but its `/proc`, until another is mounted.
pub fn enter(RootSkeleton { root, proc, facts }: &RootSkeleton) -> io::Result<()> {
    attach_at(root, CWD, "/")?;
    attach_at(proc, root, NODE_PROC)?;
    for (mount, fact) in facts {
        attach_to(mount, &find(root, fact, true)?)?;
    }
    pivot(root)
}

/// Releases the node's `/proc`. Must be done before any program runs.
pub fn forget_node() -> io::Result<()> {
    Ok(unmount(NODE_PROC, UnmountFlags::DETACH)?)
}

/// Attaches everything. Needs the mount namespace that was entered with this root. Returns the
/// device of its `/dev/shm`, over which something else may be bound.
pub fn attach(root: &OwnedFd, prepared: &PreparedMounts, birth: &SandboxBirth) -> Result<u64, StepFailure> {
    let (uid, gid) = (birth.uid, birth.gid);
    for (mount, target) in &prepared.base {
        attach_at(mount, root, target).step(format!("attach {}", target.display()))?;
    }
    for source in &prepared.nested {
        put(root, source).step(format!("attach {}", source.target.display()))?;
    }
    let mut hides = Vec::with_capacity(prepared.hide.len());
    for (number, path) in prepared.hide.iter().enumerate() {
        let hidden = hide(root, number, path).step(format!("hide {}", path.display()))?;
        hides.extend(hidden);
    }
    for (target, given) in [("tmp", &prepared.tmp), ("run", &prepared.run)] {
        let at = || format!("mount its /{target}");
        match given {
            Some(mount) => attach_at(mount, root, target).step(at())?,
            None => {
                let mount = scratch(uid, gid, "755", SCRATCH_BYTES_MAX, PLAIN).step(at())?;
                attach_at(&mount, root, target).step(at())?;
            }
        }
    }
    if prepared.has_var_tmp {
        let mount = clone_path(root, Path::new("tmp"), PLAIN).step("open its /tmp")?;
        let at = find(root, Path::new("var/tmp"), true).step("find its /var/tmp")?;
        attach_to(&mount, &at).step("mount its /var/tmp")?;
    }
    let shm = scratch(uid, gid, "1777", birth.shm_bytes_max, PLAIN | NO_PROGRAMS).and_then(|shm| {
        attach_at(&shm, root, "dev/shm")?;
        Ok(rustix::fs::fstat(&shm)?.st_dev)
    });
    let shm_device = shm.step("mount its /dev/shm")?;
    let options = [("ptmxmode", "666"), ("mode", "620"), ("max", TERMINALS_MAX)];
    let terminals = new_mount("devpts", &options, MountAttrFlags::MOUNT_ATTR_NOSUID | NO_PROGRAMS);
    terminals.and_then(|pts| attach_at(&pts, root, "dev/pts")).step("mount its /dev/pts")?;
    let proc = new_mount("proc", &[("hidepid", "2")], PLAIN | NO_PROGRAMS);
    proc.and_then(|proc| attach_at(&proc, root, "proc")).step("mount its /proc")?;
    mask(root).step("mask its /proc")?;
    for source in &prepared.binds {
        put(root, source).step(format!("bind {}", source.target.display()))?;
    }
    for hidden in &hides {
        set_mount_attributes(hidden, READ_ONLY).step("make what is hidden read-only")?;
    }
    set_mount_attributes(root, SKELETON | MountAttrFlags::MOUNT_ATTR_RDONLY)
        .step("make its root read-only")?;
    Ok(shm_device)
}

fn hide(root: &OwnedFd, number: usize, path: &Path) -> io::Result<Option<OwnedFd>> {
    // Looked up first: an unneeded mount costs as much to release as to unmount.
    let target = match find(root, path, true) {
        Ok(target) => target,
        // Below a directory that is hidden itself.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let place = format!("{HIDES}/{number}");
    rustix::fs::mkdirat(root, &place, Mode::from_raw_mode(0o755))?;
    let mount = clone_path(root, Path::new(&place), SKELETON | MountAttrFlags::MOUNT_ATTR_NODEV)?;
    attach_to(&mount, &target)?;
    Ok(Some(mount))
}

fn scratch(
    uid: u32,
    gid: u32,
    mode: &str,
    bytes_max: u64,
    attributes: MountAttrFlags,
) -> io::Result<OwnedFd> {
    let (uid, gid, size) = (uid.to_string(), gid.to_string(), bytes_max.to_string());
    new_mount("tmpfs", &[("mode", mode), ("size", &size), ("uid", &uid), ("gid", &gid)], attributes)
}

/// Replaces files of `/proc` by `/dev/null` and directories by empty ones. Makes a few more
/// read-only.
fn mask(root: &OwnedFd) -> io::Result<()> {
    let over = |path| rustix::fs::openat(root, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
    let (null, nothing) = (over("dev/null")?, over(NOTHING)?);
    for name in MASKED {
        let Some(target) = find_in_proc(root, name)? else { continue };
        let is_directory =
            FileType::from_raw_mode(rustix::fs::fstat(&target)?.st_mode) == FileType::Directory;
        let over = if is_directory { &nothing } else { &null };
        attach_to(&clone_mount(over, SKELETON | MountAttrFlags::MOUNT_ATTR_RDONLY)?, &target)?;
    }
    for name in LOCKED {
        let Some(target) = find_in_proc(root, name)? else { continue };
        attach_to(&clone_mount(&target, READ_ONLY | NO_PROGRAMS)?, &target)?;
    }
    Ok(())
}

/// Returns `None` if this kernel has no such file.
fn find_in_proc(root: &OwnedFd, name: &str) -> io::Result<Option<OwnedFd>> {
    match find(root, &Path::new("proc").join(name), false) {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Attaches at the source's target. Missing parts of the path are made where the sandbox' root may
/// do that.
fn put(root: &OwnedFd, source: &MountSource) -> io::Result<()> {
    let target = match find(root, &source.target, source.is_directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound && source.is_optional => return Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            make(root, &source.target, source.is_directory)?;
            find(root, &source.target, source.is_directory)?
        }
        target => target?,
    };
    attach_to(&source.mount, &target)
}

/// Looks a path up as a program in the sandbox would: no link leads out.
fn find(root: &OwnedFd, path: &Path, is_directory: bool) -> io::Result<OwnedFd> {
    let flags = if is_directory { DIRECTORY } else { OFlags::PATH | OFlags::CLOEXEC };
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    Ok(rustix::fs::openat2(root, path, flags, Mode::empty(), resolve)?)
}

fn make(root: &OwnedFd, path: &Path, is_directory: bool) -> io::Result<()> {
    let names: Vec<_> = path.components().filter(|part| matches!(part, Component::Normal(_))).collect();
    let mut at = find(root, Path::new("."), true)?;
    let mut done = PathBuf::new();
    for (index, name) in names.iter().enumerate() {
        let (is_last, mode) = (index + 1 == names.len(), Mode::from_raw_mode(0o755));
        let made = match is_last && !is_directory {
            true => new_file(&at, name.as_os_str()).map(drop),
            false => rustix::fs::mkdirat(&at, name.as_os_str(), mode),
        };
        match made {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(Errno::ACCESS | Errno::PERM | Errno::ROFS) => {
                let why = format!("/{} is missing in the base", done.join(name).display());
                return Err(io::Error::new(io::ErrorKind::NotFound, why));
            }
            Err(errno) => return Err(errno.into()),
        }
        done.push(name);
        if !is_last {
            at = find(root, &done, true)?;
        }
    }
    Ok(())
}

fn new_file(at: &OwnedFd, name: impl rustix::path::Arg) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
    rustix::fs::openat(at, name, flags, Mode::from_raw_mode(0o644))
}

/// Leaves the node's tree for good.
fn pivot(root: &OwnedFd) -> io::Result<()> {
    rustix::process::fchdir(root)?;
    rustix::process::pivot_root(".", ".")?;
    // While both are at one place the old one is on top.
    unmount(".", UnmountFlags::DETACH)?;
    rustix::process::chdir("/")?;
    Ok(())
}

// === Mounts ===

/// Opens a directory of the node as a mount that leads nowhere else, not even by `..`.
pub fn detached(path: &Path, writable: bool) -> io::Result<OwnedFd> {
    clone_path(CWD, path, if writable { PLAIN } else { READ_ONLY })
}

/// Makes this mount read-only.
pub fn lock(mount: impl AsFd) -> io::Result<()> {
    set_mount_attributes(mount, READ_ONLY)
}

/// Makes an empty directory in memory that nobody finds, for a user and group of the node.
pub fn memory(uid: u32, gid: u32, mode: &str, bytes_max: u64) -> io::Result<OwnedFd> {
    scratch(uid, gid, mode, bytes_max, PLAIN | NO_PROGRAMS)
}

/// Mounts a `/proc` of this process' pid namespace, in which only root sees other users' processes.
pub fn own_proc() -> io::Result<OwnedFd> {
    // By its name it is a setting of this mount alone (Linux 5.8). By its number it could be the
    // node's, too.
    new_mount("proc", &[("hidepid", "invisible")], PLAIN | NO_PROGRAMS)
}

fn new_mount(kind: &str, options: &[(&str, &str)], attributes: MountAttrFlags) -> io::Result<OwnedFd> {
    let context = fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (name, value) in options {
        fsconfig_set_string(&context, *name, *value)?;
    }
    fsconfig_create(&context)?;
    Ok(fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?)
}

/// Never clones the target of a link. A base may be a tenant's, which can replace the checked path
/// by one.
fn clone_path(at: impl AsFd, path: &Path, attributes: MountAttrFlags) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let found = rustix::fs::openat(at, path, flags, Mode::empty())?;
    clone_mount(&found, attributes)
}

/// Makes a detached mount of an open file.
fn clone_mount(file: &OwnedFd, attributes: MountAttrFlags) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH
        | OpenTreeFlags::AT_NO_AUTOMOUNT;
    let mount = open_tree(file, "", flags)?;
    set_mount_attributes(&mount, attributes)?;
    Ok(mount)
}

/// Makes a detached mount of an open file with all that is mounted below it. No path leads up from
/// it.
pub fn detached_tree(file: impl AsFd, writable: bool) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH
        | OpenTreeFlags::AT_NO_AUTOMOUNT
        | OpenTreeFlags::AT_RECURSIVE;
    let mount = open_tree(file, "", flags)?;
    let attributes = if writable { PLAIN } else { READ_ONLY };
    set_tree_attributes(&mount, attributes | NO_PROGRAMS)?;
    Ok(mount)
}

fn attach_at(mount: &OwnedFd, at: impl AsFd, path: impl rustix::path::Arg) -> io::Result<()> {
    Ok(move_mount(mount, "", at, path, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?)
}

pub fn attach_to(mount: &OwnedFd, target: &OwnedFd) -> io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    Ok(move_mount(mount, "", target, "", flags)?)
}
