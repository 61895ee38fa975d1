//! Taking and bringing back: the two commands CRIU is given, and what comes of them.
//!
//! CRIU runs in the sandbox and sees only what is its own there, so it handles processes and nothing else: no mounts,
//! no network devices, no cgroups. Not here: where images are kept (`store`), how CRIU is run (`criu`).

use std::fs::{self, File};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, chown};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{CWD, Mode, OFlags};
use serde::{Deserialize, Serialize};

use super::criu::{self, CONTENTS_FD, Criu, Given, HANDED_FD, IMAGE_FD, MAPPED_FD, SHARED_FD, WORK_FD};
use super::file_list::handed_path;
use super::mapped::Mapped;
use super::shared::Shared;
use super::{ImageError, at, files, log};
use crate::sandbox::{
    self, Fill, ROOT_PID, SHM_DEPTH_MAX, SHM_ENTRIES_MAX, SHM_FILE, Sandbox, SandboxError, Step, Task,
    root_id,
};

/// How long taking an image may take, and with it how long its application stands still. The largest measured took a
/// tenth of a second.
const TAKE_TIMEOUT: Duration = Duration::from_secs(60);

/// How long bringing one back may take before a cold start is quicker.
const RESTORE_TIMEOUT: Duration = Duration::from_secs(10);

/// Its log, in the directory of work.
const LOG: &str = "log";

/// A CRIU, and a directory with what it knows of the kernel (`facts`).
#[derive(Debug)]
pub struct Engine {
    pub criu: Criu,
    pub facts: OwnedFd,
}

/// Descriptors an image cannot carry, because they are the keeper's: each is handed over anew.
#[derive(Debug, Clone, Copy, Default)]
pub struct Handed<'a> {
    /// The socket of `Sandbox::listener` that the application listens on. One it has made itself, it brings along.
    pub listener: Option<BorrowedFd<'a>>,
    /// The pipe of `Sandbox::pipe` that its standard output and error go to.
    pub log: Option<BorrowedFd<'a>>,
}

impl Handed<'_> {
    /// In the order in which their names stand in a header.
    fn all(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.listener.into_iter().chain(self.log)
    }

    pub fn known(&self) -> io::Result<Vec<Known>> {
        let known = |fd: BorrowedFd<'_>| {
            let stat = rustix::fs::fstat(fd)?;
            let kind = match rustix::fs::FileType::from_raw_mode(stat.st_mode) {
                rustix::fs::FileType::Socket => "socket",
                _ => "pipe",
            };
            let nonblocking = rustix::fs::fcntl_getfl(fd)?.contains(OFlags::NONBLOCK);
            Ok(Known { name: format!("{kind}:[{}]", stat.st_ino), nonblocking })
        };
        self.all().map(known).collect()
    }
}

/// What an image knows of a descriptor that was handed over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Known {
    /// As CRIU names it: `socket:[123]`, `pipe:[456]`.
    pub name: String,
    /// The application has made it so, the keeper's own descriptor included. CRIU leaves what it is handed as it is, and a
    /// program that waits for events must not wait in `accept`.
    pub nonblocking: bool,
}

/// A directory that root of one sandbox may write to, gone with this.
#[derive(Debug)]
pub struct Work {
    pub path: PathBuf,
}

impl Work {
    pub fn new(path: PathBuf, sandbox: &Sandbox) -> io::Result<Self> {
        fs::DirBuilder::new().mode(0o700).create(&path)?;
        let work = Self { path };
        let owner = sandbox.identity();
        chown(&work.path, Some(root_id(owner.uid)), Some(root_id(owner.gid)))?;
        Ok(work)
    }

    /// One of root's alone.
    pub fn closed(path: PathBuf) -> io::Result<Self> {
        fs::DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Self { path })
    }

    fn reason(&self) -> io::Result<log::Reason> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = rustix::fs::openat(CWD, self.path.join(LOG), flags, Mode::empty())?;
        log::reason(File::from(file))
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.path)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(%error, "{} cannot be removed", self.path.display());
        }
    }
}

fn words(text: &str) -> Vec<String> {
    text.split(' ').map(str::to_owned).collect()
}

/// Options of both commands: files are compared by size, network and cgroups are left alone, files that are open and
/// have no name any more are carried up to this size.
const BOTH: &str =
    "--tcp-close --file-locks --manage-cgroups=ignore --file-validation filesize --ghost-limit 64M";

/// Writes the processes of a sandbox into `image`. They go on as if nothing had been, also after a failure.
pub fn take(
    engine: &Engine,
    sandbox: &Sandbox,
    handed: &Handed<'_>,
    image: &Work,
    work: &Work,
) -> Result<(), ImageError> {
    let mut command = vec!["dump".to_owned()];
    let own = "--leave-running --network-lock skip --skip-in-flight";
    command.extend(words(&format!("-t {ROOT_PID} -v1 -o {LOG} {own} {BOTH}")));
    if let Some(socket) = handed.listener {
        let stat = rustix::fs::fstat(socket).map_err(|errno| at("look at", "the listener")(errno.into()))?;
        command.extend(["--external".into(), format!("unix[{}]", stat.st_ino)]);
    }
    let into = sandbox::detached(&image.path, true).map_err(at("open", &image.path))?;
    let given = Given { is_to_take: true, ..Given::default() };
    let status = run(engine, sandbox, command, (&into, work), given, TAKE_TIMEOUT)?;
    let kept = sandbox.kept();
    match status {
        Some(0) => kept?.map_err(not_kept),
        _ => {
            let reason = work.reason().map_err(at("read", &work.path))?;
            let text = reason.to_string();
            Err(if reason.is_no_space() {
                ImageError::NoSpace { reason: text }
            } else if reason.is_passing() {
                ImageError::Unsettled { reason: text }
            } else {
                ImageError::Unfit { reason: text }
            })
        }
    }
}

fn not_kept(error: io::Error) -> ImageError {
    match error.kind() {
        io::ErrorKind::StorageFull => {
            ImageError::NoSpace { reason: format!("the files in its /dev/shm cannot be kept: {error}") }
        }
        io::ErrorKind::FileTooLarge => ImageError::Unfit {
            reason: format!(
                "it has more than {SHM_ENTRIES_MAX} files in /dev/shm, or directories deeper than {SHM_DEPTH_MAX}"
            ),
        },
        _ => at("keep", "the files in its /dev/shm")(error),
    }
}

/// What an image says of how it is brought back.
#[derive(Debug, Clone, Copy)]
pub struct Needs<'a> {
    /// What was handed to the processes that were taken.
    pub known: &'a [Known],
    pub mapped: &'a Mapped,
    pub shared: &'a [Shared],
    /// It has files of `/dev/shm`.
    pub has_shm: bool,
}

/// Brings the processes of an image back in a fresh sandbox.
pub fn restore(
    engine: &Engine,
    sandbox: &Sandbox,
    (handed, needs): (&Handed<'_>, Needs<'_>),
    image: &Path,
    work: &Work,
) -> Result<Task, ImageError> {
    let mut command = vec!["restore".to_owned()];
    command.extend(words(&format!("-d -v1 -o {LOG} {BOTH}")));
    let copies = handed.all().map(|fd| rustix::io::fcntl_dupfd_cloexec(fd, 0));
    let copies =
        copies.collect::<Result<Vec<_>, _>>().map_err(|e| at("copy", "what is handed over")(e.into()))?;
    let mut fds = Vec::new();
    for ((number, Known { name, nonblocking }), fd) in (HANDED_FD..).zip(needs.known).zip(&copies) {
        rustix::io::ioctl_fionbio(fd, *nonblocking)
            .map_err(|errno| at("set up", "what is handed over")(errno.into()))?;
        command.extend(["--inherit-fd".into(), format!("fd[{number}]:{name}")]);
        fds.push((number, fd));
    }
    let open = |name: &str| files::open(image, name, OFlags::RDONLY).map(OwnedFd::from);
    let mapped = needs.mapped.files.iter().map(|name| open(name)).collect::<io::Result<Vec<_>>>();
    let mapped = mapped.map_err(at("open", image))?;
    for ((number, name), fd) in (MAPPED_FD..).zip(&needs.mapped.files).zip(&mapped) {
        command.extend(["--inherit-fd".into(), format!("fd[{number}]:{}", handed_path(name))]);
        fds.push((number, fd));
    }
    let made = |one: &Shared| Ok((one.memory()?, open(&one.file)?));
    let shared = needs.shared.iter().map(made).collect::<io::Result<Vec<_>>>();
    let shared = shared.map_err(at("make shared memory from", image))?;
    let mut fills = Vec::new();
    let numbers = (SHARED_FD..).zip(CONTENTS_FD..);
    for (((memory, contents), one), (to, from)) in numbers.zip(needs.shared).zip(&shared) {
        command.extend(["--inherit-fd".into(), format!("fd[{memory}]:{}", handed_path(&one.file))]);
        fds.extend([(memory, to), (contents, from)]);
        fills.push(Fill { memory, contents, parts: one.parts.clone() });
    }
    let shm = needs.has_shm.then(|| open(SHM_FILE)).transpose().map_err(at("open", image.join(SHM_FILE)))?;
    let from = sandbox::detached(image, false).map_err(at("open", image))?;
    let shown = needs.mapped.ranges.clone();
    let shm = shm.as_ref();
    let given = Given { fds, is_to_restore: true, shown, fills, shm, ..Given::default() };
    match run(engine, sandbox, command, (&from, work), given, RESTORE_TIMEOUT).map_err(of_files)? {
        Some(0) => sandbox.adopt(ROOT_PID).map_err(of_rights),
        _ => {
            // Then CRIU knows only that it may not end, or was killed.
            let restored = sandbox.restored()?;
            if let Some(reason) = restored.wrong_rights {
                return Err(ImageError::LessFenced { reason });
            }
            restored.filled.map_err(|error| SandboxError::Run { step: Step::Memory, error })?;
            let reason = work.reason().map_err(at("read", &work.path))?;
            Err(ImageError::NotRestored { reason: reason.to_string() })
        }
    }
}

/// Nothing that was not compared is used.
fn of_rights(error: SandboxError) -> ImageError {
    match error {
        SandboxError::Run { step: Step::Rights, .. } => {
            ImageError::LessFenced { reason: "CRIU has let go of nobody, so nothing was compared".into() }
        }
        error => error.into(),
    }
}

/// Files that are not put back are the image's fault, unless memory is short.
fn of_files(error: ImageError) -> ImageError {
    match error {
        ImageError::Sandbox(SandboxError::Run { step: Step::Files, error })
            if error.kind() != io::ErrorKind::OutOfMemory =>
        {
            ImageError::NotRestored {
                reason: format!("the files in its /dev/shm cannot be put back: {error}"),
            }
        }
        error => error,
    }
}

/// The exit status of a CRIU with two directories. None: it was killed.
fn run<'a>(
    engine: &Engine,
    sandbox: &Sandbox,
    mut command: Vec<String>,
    (image, work): (&'a OwnedFd, &Work),
    given: Given<'a>,
    within: Duration,
) -> Result<Option<i32>, ImageError> {
    command.extend(["-D".into(), criu::by_number(IMAGE_FD), "-W".into(), criu::by_number(WORK_FD)]);
    let work = sandbox::detached(&work.path, true).map_err(at("open", &work.path))?;
    let fds = [given.fds, vec![(IMAGE_FD, image), (WORK_FD, &work)]].concat();
    let given = Given { fds, ..given };
    let task = engine.criu.start(sandbox, &command, &given, &engine.facts)?;
    match task.wait(within) {
        Ok(exit) => Ok(exit.status),
        Err(error) if error.kind() == io::ErrorKind::TimedOut => {
            // Its processes may stand still for good.
            sandbox.end().map_err(at("end", "a sandbox CRIU hangs in"))?;
            Err(ImageError::Timeout { within })
        }
        Err(error) => Err(at("wait for", "CRIU")(error)),
    }
}
