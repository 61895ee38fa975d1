//! A sandbox with directories on disk and a cell, as each test needs it, and programs in it.
//!
//! Not here: what is tested (`sandbox`, `image`), the keeper's process (`world`).

use std::fs::{self, File};
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::chown;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use nagaya_keeper::sandbox::{
    CellEntrance, Launcher, ROOT_PID, Sandbox, SandboxBind, SandboxProgram, SandboxSpec, SandboxTask,
    UnixIdentity,
};
use nagaya_keeper_api::protocol::ProcessExit;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tempfile::TempDir;

use crate::world::{ALICE, set_mode};

/// Nothing in a test takes this long unless something hangs, a new database on an emulated machine included.
pub const TIMEOUT: Duration = Duration::from_secs(120);

static LAUNCHER: OnceLock<Launcher> = OnceLock::new();

/// To be called while this process has one thread.
pub fn start_launcher() {
    let started = Launcher::start().unwrap();
    LAUNCHER.set(started).expect("it is called once");
}

pub fn launcher() -> &'static Launcher {
    LAUNCHER.get().expect("the tests that need it need root")
}

/// Where alice's application is in her sandbox.
pub const APP: &str = "/srv/app";

pub struct Scene {
    pub dir: TempDir,
    pub spec: SandboxSpec,
}

impl Scene {
    /// A sandbox of alice's: her application's directory, her `/run` and `/tmp`.
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        // Not for tenants: what they may see of it is bound into their sandboxes.
        set_mode(dir.path(), 0o700);
        for name in ["app", "run", "tmp"] {
            fs::create_dir(dir.path().join(name)).unwrap();
            chown(dir.path().join(name), Some(ALICE), Some(ALICE)).unwrap();
        }
        let bind = SandboxBind {
            source: dir.path().join("app"),
            target: APP.into(),
            writable: true,
            as_tenant: false,
            is_optional: false,
        };
        let spec = SandboxSpec {
            identity: UnixIdentity { uid: ALICE, gid: ALICE },
            home: None,
            hostname: "alices".into(),
            base: "/".into(),
            base_as_tenant: false,
            binds: vec![bind],
            hide: Vec::new(),
            tmp: Some(dir.path().join("tmp")),
            run: Some(dir.path().join("run")),
            shm_bytes_max: 16 << 20,
            host_network: false,
            entrance: CellEntrance::default(),
        };
        Self { dir, spec }
    }

    pub fn app(&self, name: &str) -> PathBuf {
        self.dir.path().join("app").join(name)
    }

    /// A file of alice's application.
    pub fn with_file(self, name: &str, text: &str) -> Self {
        fs::write(self.app(name), text).unwrap();
        chown(self.app(name), Some(ALICE), Some(ALICE)).unwrap();
        set_mode(&self.app(name), 0o755);
        self
    }

    pub fn create(&self) -> Sandbox {
        launcher().create(&self.spec).unwrap()
    }
}

/// A command in alice's sandbox; the caller changes what is different.
pub fn program<'a>(command: &[&str]) -> SandboxProgram<'a> {
    SandboxProgram {
        argv: command.iter().map(Into::into).collect(),
        env: vec![("PATH".into(), "/usr/local/bin:/usr/bin:/bin".into())],
        directory: APP.into(),
        stdin: None,
        stdout: None,
        stderr: None,
        listener: None,
        pid: None,
        open_files_max: 1024,
        has_terminal: false,
    }
}

/// A command's end and what it wrote, to standard error too.
#[track_caller]
pub fn run(sandbox: &Sandbox, command: &[&str]) -> (ProcessExit, String) {
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
    let task = sandbox
        .run(&SandboxProgram { stdout: Some(write.as_fd()), stderr: Some(write.as_fd()), ..program(command) })
        .unwrap();
    drop(write);
    let said = read_all(read);
    (task.wait(TIMEOUT).unwrap(), said)
}

/// What a program of Python's wrote, without the last line's end. It must end well.
#[track_caller]
pub fn python(sandbox: &Sandbox, code: &str) -> String {
    let (exit, said) = run(sandbox, &["python3", "-c", code]);
    assert_eq!(exit.status, Some(0), "{said}");
    said.trim_end().to_owned()
}

#[track_caller]
pub fn shell(sandbox: &Sandbox, code: &str) -> String {
    let (exit, said) = run(sandbox, &["sh", "-c", code]);
    assert_eq!(exit.status, Some(0), "{said}");
    said.trim_end().to_owned()
}

/// The application's first process, with its end of the log.
pub fn root_task(
    sandbox: &Sandbox,
    command: &[&str],
    listener: Option<&OwnedFd>,
    log: &OwnedFd,
) -> SandboxTask {
    let log = Some(log.as_fd());
    let program = SandboxProgram {
        pid: Some(ROOT_PID),
        listener: listener.map(AsFd::as_fd),
        stdout: log,
        stderr: log,
        ..program(command)
    };
    sandbox.run(&program).unwrap()
}

pub fn read_all(from: OwnedFd) -> String {
    let mut said = String::new();
    File::from(from).read_to_string(&mut said).unwrap();
    said
}

/// Returns once the descriptor is readable; panics if it never is.
#[track_caller]
pub fn wait_readable(fd: impl AsFd) {
    let until = Timespec { tv_sec: 60, tv_nsec: 0 };
    assert_eq!(poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&until)).unwrap(), 1, "nothing happens");
}

/// Everything beneath the sandbox is gone once its init is.
#[track_caller]
pub fn wait_ended(sandbox: &Sandbox) {
    wait_readable(sandbox.init_pidfd());
}

/// Waits until it is so; panics if it never is.
#[track_caller]
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let until = Instant::now() + TIMEOUT;
    while !is_so() {
        assert!(Instant::now() < until, "it never came: {what}");
        std::thread::park_timeout(Duration::from_millis(20));
    }
}
