//! Checkpoint and restore: the two commands of CRIU, and their results.
//!
//! CRIU runs in the sandbox and sees only what is its own there, so it handles processes and
//! nothing else: no mounts, no network devices, no cgroups. Not here: where images are kept
//! (`store`), how CRIU is run (`criu`).

use std::fs::File;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::fs::{CWD, Mode, OFlags};

use crate::image::criu::log;
use crate::image::criu::program::{
    self, CONTENTS_FD, CriuInputs, CriuProgram, HANDED_FD, IMAGE_FD, MAPPED_FD, SHARED_FD, WORK_FD,
};
use crate::image::error::{ImageError, at};
use crate::image::files;
use crate::image::format::file_list::handed_path;
use crate::image::format::header::KnownFd;
use crate::image::format::memory_plan::{MappedMemory, SharedMemory};
use crate::image::store::work_dir::CriuWorkDir;
use crate::sandbox::{
    self, ChildStep, MemoryFill, ROOT_PID, SHM_DEPTH_MAX, SHM_ENTRIES_MAX, SHM_FILE, Sandbox, SandboxError,
    SandboxTask,
};

/// Maximum time of taking an image, for which its application is frozen. The largest measured took
/// a tenth of a second.
const TAKE_TIMEOUT: Duration = Duration::from_secs(60);

/// Maximum time of a restore. After it a cold start is quicker.
const RESTORE_TIMEOUT: Duration = Duration::from_secs(10);

/// Its log, in the working directory.
const LOG: &str = "log";

/// A CRIU, and a directory with its knowledge of the kernel (`facts`).
#[derive(Debug)]
pub struct CriuEnv {
    pub criu: CriuProgram,
    pub facts: OwnedFd,
}

/// Descriptors that an image cannot carry, because they are the keeper's. Each is handed over at a
/// restore.
#[derive(Debug, Clone, Copy, Default)]
pub struct HandedFds<'a> {
    /// The socket of `Sandbox::listener` that the application listens on. The image carries one
    /// that it has made itself.
    pub listener: Option<BorrowedFd<'a>>,
    /// The pipe of `Sandbox::pipe` that its standard output and error go to.
    pub log: Option<BorrowedFd<'a>>,
}

impl HandedFds<'_> {
    /// Returns them in the order of their names in a header.
    fn all(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.listener.into_iter().chain(self.log)
    }

    pub fn known(&self) -> io::Result<Vec<KnownFd>> {
        let known = |fd: BorrowedFd<'_>| {
            let stat = rustix::fs::fstat(fd)?;
            let kind = match rustix::fs::FileType::from_raw_mode(stat.st_mode) {
                rustix::fs::FileType::Socket => "socket",
                _ => "pipe",
            };
            let nonblocking = rustix::fs::fcntl_getfl(fd)?.contains(OFlags::NONBLOCK);
            Ok(KnownFd { name: format!("{kind}:[{}]", stat.st_ino), nonblocking })
        };
        self.all().map(known).collect()
    }
}

/// Returns the reason of a failure from CRIU's log.
fn reason_in(work: &CriuWorkDir) -> io::Result<log::CriuFailure> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = rustix::fs::openat(CWD, work.path.join(LOG), flags, Mode::empty())?;
    log::reason(File::from(file))
}

fn words(text: &str) -> Vec<String> {
    text.split(' ').map(str::to_owned).collect()
}

/// Options of both commands. Files are compared by size, and network and cgroups are left alone.
/// Unlinked open files are carried up to this size.
const BOTH: &str =
    "--tcp-close --file-locks --manage-cgroups=ignore --file-validation filesize --ghost-limit 64M";

/// Writes the processes of a sandbox into `image`. They continue as before, also after a failure.
pub fn take(
    engine: &CriuEnv,
    sandbox: &Sandbox,
    handed: &HandedFds<'_>,
    image: &CriuWorkDir,
    work: &CriuWorkDir,
) -> Result<(), ImageError> {
    let mut command = vec!["dump".to_owned()];
    let own = "--leave-running --network-lock skip --skip-in-flight";
    command.extend(words(&format!("-t {ROOT_PID} -v1 -o {LOG} {own} {BOTH}")));
    if let Some(socket) = handed.listener {
        let stat = rustix::fs::fstat(socket).map_err(|errno| at("look at", "the listener")(errno.into()))?;
        command.extend(["--external".into(), format!("unix[{}]", stat.st_ino)]);
    }
    let into = sandbox::detached(&image.path, true).map_err(at("open", &image.path))?;
    let given = CriuInputs { is_to_take: true, ..CriuInputs::default() };
    let status = run(engine, sandbox, command, (&into, work), given, TAKE_TIMEOUT)?;
    let kept = sandbox.kept();
    match status {
        Some(0) => kept?.map_err(not_kept),
        _ => {
            let reason = reason_in(work).map_err(at("read", &work.path))?;
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

/// Parameters of a restore, from the image.
#[derive(Debug, Clone, Copy)]
pub struct RestoreNeeds<'a> {
    /// Descriptors that were handed to the processes.
    pub known: &'a [KnownFd],
    pub mapped: &'a MappedMemory,
    pub shared: &'a [SharedMemory],
    /// It has files of `/dev/shm`.
    pub has_shm: bool,
}

/// Restores the processes of an image in a fresh sandbox.
pub fn restore(
    engine: &CriuEnv,
    sandbox: &Sandbox,
    (handed, needs): (&HandedFds<'_>, RestoreNeeds<'_>),
    image: &Path,
    work: &CriuWorkDir,
) -> Result<SandboxTask, ImageError> {
    let mut command = vec!["restore".to_owned()];
    command.extend(words(&format!("-d -v1 -o {LOG} {BOTH}")));
    let copies = handed.all().map(|fd| rustix::io::fcntl_dupfd_cloexec(fd, 0));
    let copies =
        copies.collect::<Result<Vec<_>, _>>().map_err(|e| at("copy", "what is handed over")(e.into()))?;
    let mut fds = Vec::new();
    for ((number, KnownFd { name, nonblocking }), fd) in (HANDED_FD..).zip(needs.known).zip(&copies) {
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
    let made = |one: &SharedMemory| Ok((one.memory()?, open(&one.file)?));
    let shared = needs.shared.iter().map(made).collect::<io::Result<Vec<_>>>();
    let shared = shared.map_err(at("make shared memory from", image))?;
    let mut fills = Vec::new();
    let numbers = (SHARED_FD..).zip(CONTENTS_FD..);
    for (((memory, contents), one), (to, from)) in numbers.zip(needs.shared).zip(&shared) {
        command.extend(["--inherit-fd".into(), format!("fd[{memory}]:{}", handed_path(&one.file))]);
        fds.extend([(memory, to), (contents, from)]);
        fills.push(MemoryFill { memory, contents, parts: one.parts.clone() });
    }
    let shm = needs.has_shm.then(|| open(SHM_FILE)).transpose().map_err(at("open", image.join(SHM_FILE)))?;
    let from = sandbox::detached(image, false).map_err(at("open", image))?;
    let shown = needs.mapped.ranges.clone();
    let shm = shm.as_ref();
    let given = CriuInputs { fds, is_to_restore: true, shown, fills, shm, ..CriuInputs::default() };
    match run(engine, sandbox, command, (&from, work), given, RESTORE_TIMEOUT).map_err(of_files)? {
        Some(0) => sandbox.adopt(ROOT_PID).map_err(of_rights),
        _ => {
            // Then CRIU reports only that it may not end, or was killed.
            let restored = sandbox.restored()?;
            if let Some(reason) = restored.wrong_rights {
                return Err(ImageError::LessFenced { reason });
            }
            restored.filled.map_err(|error| SandboxError::Run { step: ChildStep::Memory, error })?;
            let reason = reason_in(work).map_err(at("read", &work.path))?;
            Err(ImageError::NotRestored { reason: reason.to_string() })
        }
    }
}

/// Makes the error for a restore whose rights were not compared: it is not used.
fn of_rights(error: SandboxError) -> ImageError {
    match error {
        SandboxError::Run { step: ChildStep::Rights, .. } => {
            ImageError::LessFenced { reason: "CRIU has let go of nobody, so nothing was compared".into() }
        }
        error => error.into(),
    }
}

/// Makes the error for files that are not restored. The image is to blame, unless memory is short.
fn of_files(error: ImageError) -> ImageError {
    match error {
        ImageError::Sandbox(SandboxError::Run { step: ChildStep::Files, error })
            if error.kind() != io::ErrorKind::OutOfMemory =>
        {
            ImageError::NotRestored {
                reason: format!("the files in its /dev/shm cannot be put back: {error}"),
            }
        }
        error => error,
    }
}

/// Returns the exit status of a CRIU with two directories. `None` if it was killed.
fn run<'a>(
    engine: &CriuEnv,
    sandbox: &Sandbox,
    mut command: Vec<String>,
    (image, work): (&'a OwnedFd, &CriuWorkDir),
    given: CriuInputs<'a>,
    within: Duration,
) -> Result<Option<i32>, ImageError> {
    command.extend(["-D".into(), program::by_number(IMAGE_FD), "-W".into(), program::by_number(WORK_FD)]);
    let work = sandbox::detached(&work.path, true).map_err(at("open", &work.path))?;
    let fds = [given.fds, vec![(IMAGE_FD, image), (WORK_FD, &work)]].concat();
    let given = CriuInputs { fds, ..given };
    let task = engine.criu.start(sandbox, &command, &given, &engine.facts)?;
    match task.wait(within) {
        Ok(exit) => Ok(exit.status),
        Err(error) if error.kind() == io::ErrorKind::TimedOut => {
            // Its processes may be stopped for good.
            sandbox.end().map_err(at("end", "a sandbox CRIU hangs in"))?;
            Err(ImageError::Timeout { within })
        }
        Err(error) => Err(at("wait for", "CRIU")(error)),
    }
}
