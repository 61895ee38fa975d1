//! What the kernel can do, found out by CRIU once and told to it at every start: it asks for 10 ms otherwise.
//!
//! CRIU keeps these facts in a file. One that a tenant could write would be a way into every other tenant's CRIU; so it
//! is made in a sandbox in which no tenant's program runs, and shown to others read-only. Not here: which CRIU
//! (`criu`).

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::pipe::PipeFlags;

use super::criu::{Criu, Given};
use super::{ImageError, at};
use crate::sandbox::{self, Entrance, Identity, Launcher, Spec, root_id};

/// Whose sandbox it is: `nobody` and `nogroup`, who own nothing.
const NOBODY: Identity = Identity { uid: 65_534, gid: 65_534 };

/// How long CRIU may take to look.
const CHECK_TIMEOUT: Duration = Duration::from_secs(20);

/// How long another process may have the file open that was just written: one that a thread of this one has forked and that has not
/// become its program yet.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
const CLOSE_POLL: Duration = Duration::from_millis(2);

/// Name of its file.
const FACTS: &str = "criu.kdat";

/// Bytes of its file, and of the directory it is in.
const FACTS_LEN_MAX: u64 = 64 * 1024;
const DIRECTORY_LEN_MAX: u64 = 1 << 20;

/// Bytes of what it writes that are read.
const SAID_LEN_MAX: u64 = 16 * 1024;

/// Lets CRIU look, and returns a directory with what it found, or why it cannot work here.
pub fn learn(criu: &Criu, launcher: &Launcher) -> Result<OwnedFd, ImageError> {
    let spec = Spec {
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
        entrance: Entrance::default(),
    };
    let sandbox = launcher.create(&spec)?;
    let (uid, gid) = (root_id(NOBODY.uid), root_id(NOBODY.gid));
    let made = || at("make", "a directory for CRIU in memory");
    let scratch = sandbox::memory(uid, gid, "700", DIRECTORY_LEN_MAX).map_err(made())?;
    let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).map_err(|e| made()(e.into()))?;
    let given = Given { fds: vec![(1, &write), (2, &write)], ..Given::default() };
    let task = criu.start(&sandbox, &["check".into()], &given, &scratch)?;
    drop(write);
    let exit = task.wait(CHECK_TIMEOUT).map_err(at("wait for", "'criu check'"))?;
    sandbox.end().map_err(at("end", "the sandbox of 'criu check'"))?;
    let mut said = String::new();
    // What it says explains a failure and is nothing else.
    let _ = File::from(read).take(SAID_LEN_MAX).read_to_string(&mut said);
    if exit.status != Some(0) {
        return Err(ImageError::Useless { said: said.trim().replace('\n', "; ") });
    }
    copy(&scratch).map_err(at("keep", "what CRIU has found out"))
}

/// Into a directory that is root's and read-only.
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
