//! CRIU's findings about the kernel. They are made once and passed to it at every start, and save
//! 10 ms.
//!
//! CRIU keeps these facts in a file. A tenant that could write it would have a way into every other
//! tenant's CRIU. So it is made in a sandbox in which no tenant's program runs, and shown to others
//! read-only. Not here: which CRIU (`criu`).

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::pipe::PipeFlags;

use crate::image::criu::program::{CriuInputs, CriuProgram};
use crate::image::error::{ImageError, at};
use crate::sandbox::{self, CellEntrance, Launcher, SandboxSpec, UnixIdentity, root_id};

/// Owner of the sandbox: `nobody` and `nogroup`, who own nothing.
const NOBODY: UnixIdentity = UnixIdentity { uid: 65_534, gid: 65_534 };

/// Maximum time of CRIU's checks.
const CHECK_TIMEOUT: Duration = Duration::from_secs(20);

/// Maximum time that another process may have the new file open. It is a fork of this process that
/// has not become its program yet.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
const CLOSE_POLL: Duration = Duration::from_millis(2);

/// Name of its file.
const FACTS: &str = "criu.kdat";

/// Maximum length of its file, and of its directory, bytes.
const FACTS_LEN_MAX: u64 = 64 * 1024;
const DIRECTORY_LEN_MAX: u64 = 1 << 20;

/// Maximum length of its output that is read, bytes.
const SAID_LEN_MAX: u64 = 16 * 1024;

/// Lets CRIU check the kernel. Returns a directory with its findings, or why it cannot work here.
pub fn learn(criu: &CriuProgram, launcher: &Launcher) -> Result<OwnedFd, ImageError> {
    let spec = SandboxSpec {
        identity: NOBODY,
        home: None,
        hostname: "criu".into(),
        base: "/".into(),
        base_as_tenant: false,
        binds: Vec::new(),
        hide: Vec::new(),
        tmp: None,
        run: None,
        shm_bytes_max: DIRECTORY_LEN_MAX,
        host_network: false,
        entrance: CellEntrance::default(),
    };
    let sandbox = launcher.create(&spec)?;
    let (uid, gid) = (root_id(NOBODY.uid), root_id(NOBODY.gid));
    let made = || at("make", "a directory for CRIU in memory");
    let scratch = sandbox::memory(uid, gid, "700", DIRECTORY_LEN_MAX).map_err(made())?;
    let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).map_err(|e| made()(e.into()))?;
    let given = CriuInputs { fds: vec![(1, &write), (2, &write)], ..CriuInputs::default() };
    let task = criu.start(&sandbox, &["check".into()], &given, &scratch)?;
    drop(write);
    let exit = task.wait(CHECK_TIMEOUT).map_err(at("wait for", "'criu check'"))?;
    sandbox.end().map_err(at("end", "the sandbox of 'criu check'"))?;
    let mut said = String::new();
    // Its output only explains a failure.
    let _ = File::from(read).take(SAID_LEN_MAX).read_to_string(&mut said);
    if exit.status != Some(0) {
        return Err(ImageError::Useless { said: said.trim().replace('\n', "; ") });
    }
    copy(&scratch).map_err(at("keep", "what CRIU has found out"))
}

/// Copies the file into a directory that is root's and read-only.
fn copy(from: &OwnedFd) -> io::Result<OwnedFd> {
    let to = sandbox::memory(0, 0, "755", DIRECTORY_LEN_MAX)?;
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let found = rustix::fs::openat(from, FACTS, flags, Mode::empty())?;
    let mut facts = Vec::new();
    File::from(found).take(FACTS_LEN_MAX).read_to_end(&mut facts)?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let mode = Mode::from_raw_mode(0o644);
    let kept = rustix::fs::openat(&to, FACTS, flags, mode)?;
    File::from(kept).write_all(&facts)?;
    rustix::fs::chmodat(&to, FACTS, mode, AtFlags::empty())?;
    let until = Instant::now() + CLOSE_TIMEOUT;
    loop {
        match sandbox::lock(to.as_fd()) {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy && Instant::now() < until => {
                std::thread::sleep(CLOSE_POLL);
            }
            locked => return locked.map(|()| to),
        }
    }
}
