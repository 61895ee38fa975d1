//! Selects the CRIU that makes the images, and runs it in a sandbox without using any file of the
//! sandbox.
//!
//! It runs as root of the sandbox, next to files that a tenant can write. So the program, its
//! dynamic loader, its libraries and all its directories are descriptors that the keeper has
//! opened. They are detached mounts. It reads no configuration, and its environment has only one
//! directory of the keeper's. Not here: its commands (`checkpoint`).

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{CWD, Mode, OFlags};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::image::Digest;
use crate::sandbox::{self, MemoryFill, Sandbox, SandboxError, SandboxTask, SandboxTool};
use crate::version;

/// The oldest version that works: 3.17, which Debian 12 has, does not support current kernels.
const OLDEST: (u32, u32) = (4, 1);

/// From this kernel on, a CRIU older than that cannot image a process with a TCP socket
/// (<https://github.com/checkpoint-restore/criu/issues/2705>).
const PICKY_KERNEL: (u32, u32) = (6, 16);
const OLDEST_WITH_SOCKETS: (u32, u32) = (4, 2);

/// Paths where `./dev setup` and packages of nagaya's install one, and where distributions do.
const PLACES: [(&str, &str); 3] = [
    ("/usr/local/lib/nagaya/criu/usr/sbin/criu", "nagaya's own"),
    ("/usr/local/sbin/criu", "the machine's own"),
    ("/usr/sbin/criu", "the system's"),
];

/// Maximum time for it to print its version.
const VERSION_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum length of that text, bytes.
const VERSION_LEN_MAX: u64 = 4096;

/// Numbers of descriptors in CRIU's process. 3 is the executed program (`SandboxTool`).
const BINARY_FD: i32 = 4;
const LIBRARY_FDS: [i32; 3] = [5, 6, 7];
const FACTS_FD: i32 = 8;
/// Directory of the image.
pub const IMAGE_FD: i32 = 9;
/// Directory of its log.
pub const WORK_FD: i32 = 10;
/// First descriptor that is handed to restored processes, of at most two.
pub const HANDED_FD: i32 = 11;
/// File of the image with the files of `/dev/shm`.
const SHM_FD: i32 = 13;
/// First file of the image that they map, of `mapped::FILES_MAX`.
pub const MAPPED_FD: i32 = 16;
/// First file of memory that they share, of `shared::MEMORIES_MAX`.
pub const SHARED_FD: i32 = 48;
/// First file of the image from which these are written.
pub const CONTENTS_FD: i32 = 56;

/// Its number in the sandbox, above those that an image restores, and below the kernel's default
/// maximum.
const PID: u32 = 30_000;

/// Inputs besides its arguments.
#[derive(Debug, Clone, Default)]
pub struct CriuInputs<'a> {
    /// Descriptors with their numbers.
    pub fds: Vec<(i32, &'a OwnedFd)>,
    /// It takes a checkpoint into the directory of the image.
    pub is_to_take: bool,
    /// It restores the contents of that directory.
    pub is_to_restore: bool,
    /// Ranges where restored processes map memory from files (`mapped`).
    pub shown: Vec<(u64, u64)>,
    /// Memory that is written while it runs (`shared`).
    pub fills: Vec<MemoryFill>,
    /// File from which the files in `/dev/shm` are made before it starts.
    pub shm: Option<&'a OwnedFd>,
}

/// A usable CRIU.
#[derive(Debug)]
pub struct CriuProgram {
    pub path: PathBuf,
    /// As it prints it.
    pub version: String,
    /// Why this one was selected.
    pub why: String,
    /// Digest of the program's file.
    pub build: Digest,
    /// `None` if it is linked statically.
    loader: Option<PathBuf>,
    libraries: Vec<PathBuf>,
}

/// Result of the search, for `nagaya doctor`.
#[derive(Debug)]
pub struct CriuSearch {
    pub found: Option<CriuProgram>,
    /// Each rejected one, with the reason.
    pub passed_over: Vec<(PathBuf, String)>,
}

impl CriuSearch {
    /// Returns one line for the operator.
    pub fn reason(&self) -> String {
        let passed = || {
            let each = self.passed_over.iter().map(|(path, why)| format!("{}: {why}", path.display()));
            each.collect::<Vec<_>>().join("; ")
        };
        match &self.found {
            Some(criu) if self.passed_over.is_empty() => criu.why.clone(),
            Some(criu) => format!("{} ({})", criu.why, passed()),
            None if self.passed_over.is_empty() => "none is installed".into(),
            None => passed(),
        }
    }
}

/// Finds the first usable one: only the configured one, or in the usual places. Runs each to read
/// its version, so it blocks.
pub fn find(configured: Option<&Path>) -> CriuSearch {
    let places: Vec<(PathBuf, String)> = match configured {
        Some(path) => vec![(path.into(), "the configured one".into())],
        None => PLACES.iter().map(|(path, what)| (path.into(), format!("{what} one"))).collect(),
    };
    let kernel = version::of_kernel();
    let mut passed_over = Vec::new();
    for (path, what) in places {
        match look(&path) {
            Ok(None) if configured.is_none() => {}
            Ok(None) => passed_over.push((path, "there is no such file".into())),
            Ok(Some(mut criu)) => match judge(&criu.version, kernel) {
                Ok(limit) => {
                    criu.why = format!("{what}, version {}{limit}", criu.version);
                    return CriuSearch { found: Some(criu), passed_over };
                }
                Err(why) => passed_over.push((path, why)),
            },
            Err(error) => passed_over.push((path, error.to_string())),
        }
    }
    CriuSearch { found: None, passed_over }
}

/// Whether a CRIU of this version can be used on this kernel, and its limits there. The error says
/// why not.
fn judge(criu: &str, kernel: Option<(u32, u32)>) -> Result<&'static str, String> {
    match version::of(criu) {
        Some(version) if version < OLDEST => {}
        Some(version) if version >= OLDEST_WITH_SOCKETS => return Ok(""),
        Some(_) if kernel.is_some_and(|kernel| kernel < PICKY_KERNEL) => return Ok(""),
        Some(_) => return Ok("; on this kernel it cannot image applications with TCP sockets, 4.2 can"),
        None => return Err(format!("'{criu}' is no version")),
    }
    Err(format!("version {criu} is older than 4.1"))
}

/// Returns `None` if there is no such file.
fn look(path: &Path) -> io::Result<Option<CriuProgram>> {
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    // It will run as root, so nobody else may be able to change it.
    let stat = rustix::fs::fstat(&file)?;
    if rustix::process::geteuid().is_root() && (stat.st_uid != 0 || stat.st_mode & 0o022 != 0) {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "others than root can change it"));
    }
    let (loader, libraries) = match interpreter(&file)? {
        None => (None, Vec::new()),
        Some(interpreter) => {
            let prefix = prefix(path);
            let beneath = |root: &Path| root.join(interpreter.strip_prefix("/").unwrap_or(&interpreter));
            let places = [beneath(&prefix), beneath(&prefix.join("usr"))];
            let loader = places.into_iter().find(|place| place.exists()).unwrap_or(interpreter);
            (Some(loader), libraries(&prefix))
        }
    };
    let build = Digest::of_file(&file)?;
    let mut criu = CriuProgram {
        path: path.into(),
        version: String::new(),
        why: String::new(),
        build,
        loader,
        libraries,
    };
    criu.version = criu.ask_version()?;
    Ok(Some(criu))
}

/// Returns the directory with a distribution's whole tree: `/` for a system's own.
fn prefix(binary: &Path) -> PathBuf {
    let above = |count: usize| binary.ancestors().nth(count).map(Path::to_path_buf);
    let is_usr = binary.parent().and_then(Path::parent).is_some_and(|dir| dir.ends_with("usr"));
    above(if is_usr { 3 } else { 2 }).unwrap_or_else(|| "/".into())
}

fn libraries(prefix: &Path) -> Vec<PathBuf> {
    let triplet = format!("usr/lib/{}-linux-gnu", std::env::consts::ARCH);
    let places = [triplet.as_str(), "usr/lib64", "usr/local/lib"].map(|place| prefix.join(place));
    let mut found: Vec<PathBuf> = places.into_iter().filter(|place| place.is_dir()).collect();
    found.truncate(LIBRARY_FDS.len());
    found
}

/// Returns the dynamic loader named in an ELF file of 64 bits (`PT_INTERP`, elf(5)). `None` if it
/// needs none.
fn interpreter(file: &File) -> io::Result<Option<PathBuf>> {
    const INTERPRETER: u32 = 3;
    const PATH_LEN_MAX: u64 = 4096;
    let bad = || io::Error::new(io::ErrorKind::InvalidData, "it is no program of this machine");
    let mut header = [0; 64];
    file.read_exact_at(&mut header, 0).map_err(|_| bad())?;
    if header[..5] != *b"\x7fELF\x02" {
        return Err(bad());
    }
    let long = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("eight bytes are asked for"));
    let short = |bytes: &[u8]| u16::from_le_bytes(bytes.try_into().expect("two bytes are asked for"));
    let (table, size, count) = (long(&header[32..40]), short(&header[54..56]), short(&header[56..58]));
    for index in 0..u64::from(count) {
        let mut entry = [0; 56];
        file.read_exact_at(&mut entry, table.saturating_add(index * u64::from(size))).map_err(|_| bad())?;
        if entry[..4] != INTERPRETER.to_le_bytes() {
            continue;
        }
        let (offset, len) = (long(&entry[8..16]), long(&entry[32..40]));
        let mut path = vec![0; usize::try_from(len.min(PATH_LEN_MAX)).expect("it is small")];
        file.read_exact_at(&mut path, offset).map_err(|_| bad())?;
        path.retain(|byte| *byte != 0);
        return Ok(Some(String::from_utf8(path).map_err(|_| bad())?.into()));
    }
    Ok(None)
}

impl CriuProgram {
    fn ask_version(&self) -> io::Result<String> {
        let mut command = match &self.loader {
            None => Command::new(&self.path),
            Some(loader) => {
                let mut command = Command::new(loader);
                command.arg("--library-path").arg(join(&self.libraries)).arg(&self.path);
                command
            }
        };
        command.arg("--version").env_clear();
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
        let pid = Pid::from_child(&child);
        let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
        let timeout = rustix::event::Timespec { tv_sec: VERSION_TIMEOUT.as_secs().cast_signed(), tv_nsec: 0 };
        if poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&timeout))? == 0 {
            pidfd_send_signal(&pidfd, Signal::KILL)?;
        }
        let mut text = String::new();
        if let Some(stdout) = child.stdout.take() {
            stdout.take(VERSION_LEN_MAX).read_to_string(&mut text)?;
        }
        child.wait()?;
        let version = text.lines().find_map(|line| line.strip_prefix("Version:"));
        version.map(|version| version.trim().to_owned()).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, "it does not run, or does not say its version")
        })
    }

    /// Starts it as root of the sandbox. `facts` is `Facts::dir`.
    pub fn start(
        &self,
        sandbox: &Sandbox,
        words: &[String],
        given: &CriuInputs<'_>,
        facts: &OwnedFd,
    ) -> Result<SandboxTask, SandboxError> {
        let failed = |error| SandboxError::Run { step: sandbox::ChildStep::Descriptors, error };
        let open = |path: &Path| -> Result<OwnedFd, SandboxError> {
            let opened = rustix::fs::openat(CWD, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
            opened.map_err(|errno| failed(errno.into()))
        };
        let binary = open(&self.path)?;
        let loader = self.loader.as_deref().map(open).transpose()?;
        let libraries =
            self.libraries.iter().map(|dir| sandbox::detached(dir, false)).collect::<Result<Vec<_>, _>>();
        let libraries = libraries.map_err(failed)?;
        let mut argv: Vec<OsString> = vec!["criu".into()];
        if loader.is_some() {
            let dirs = LIBRARY_FDS.iter().zip(&libraries).map(|(number, _)| by_number(*number));
            let paths = dirs.collect::<Vec<_>>().join(":");
            argv.extend(["--library-path".into(), paths.into(), by_number(BINARY_FD).into()]);
        }
        argv.extend(words.iter().map(Into::into));
        let own = ["--no-default-config", "--unprivileged", "--libdir", &by_number(FACTS_FD)];
        argv.extend(own.map(Into::into));
        let mut all = vec![(BINARY_FD, binary.as_fd()), (FACTS_FD, facts.as_fd())];
        all.extend(LIBRARY_FDS.into_iter().zip(libraries.iter().map(AsFd::as_fd)));
        all.extend(given.fds.iter().map(|(number, fd)| (*number, fd.as_fd())));
        all.extend(given.shm.map(|fd| (SHM_FD, fd.as_fd())));
        sandbox.run_tool(&SandboxTool {
            program: loader.as_ref().unwrap_or(&binary).as_fd(),
            argv,
            env: vec![("XDG_RUNTIME_DIR".into(), by_number(FACTS_FD).into())],
            fds: all,
            pid: PID,
            takes_into: given.is_to_take.then_some(IMAGE_FD),
            brings_back: given.is_to_restore,
            shown: given.shown.clone(),
            fills: given.fills.clone(),
            shm: given.shm.map(|_| SHM_FD),
        })
    }
}

/// Returns the path of a descriptor in CRIU's process.
pub fn by_number(number: i32) -> String {
    format!("/proc/self/fd/{number}")
}

fn join(paths: &[PathBuf]) -> OsString {
    std::env::join_paths(paths).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(criu: &str, kernel: &str) -> Result<&'static str, String> {
        judge(criu, version::of(kernel))
    }

    #[test]
    fn criu_that_is_too_old_is_skipped_and_an_old_one_is_limited() {
        for (version, kernel) in [("3.17.1", "6.18.5"), ("4.0", "5.10.0"), ("0.9", "6.18.5")] {
            assert_eq!(judged(version, kernel), Err(format!("version {version} is older than 4.1")));
        }
        assert_eq!(judged("next", "6.18.5"), Err("'next' is no version".into()));
        for (version, kernel) in
            [("4.1", "6.15.9-amd64"), ("4.2", "6.16.0"), ("4.2.1", "7.0"), ("5.0", "6.18.5")]
        {
            assert_eq!(judged(version, kernel), Ok(""), "{version} on {kernel}");
        }
        for (version, kernel) in [("4.1", "6.16.0"), ("4.1.1", "6.18.5-amd64"), ("4.1", "next")] {
            assert!(judged(version, kernel).unwrap().contains("TCP sockets"), "{version} on {kernel}");
        }
    }

    #[test]
    fn the_tree_of_a_program_is_found_from_its_path() {
        let of = |path: &str| prefix(Path::new(path));
        assert_eq!(of("/usr/sbin/criu"), Path::new("/"));
        assert_eq!(of("/usr/local/lib/nagaya/criu/usr/sbin/criu"), Path::new("/usr/local/lib/nagaya/criu"));
        assert_eq!(of("/opt/criu/sbin/criu"), Path::new("/opt/criu"));
        assert_eq!(of("/criu"), Path::new("/"));
    }

    #[test]
    fn a_program_names_its_loader() {
        let own = File::open("/proc/self/exe").unwrap();
        let loader = interpreter(&own).unwrap();
        assert!(loader.is_none_or(|loader| loader.is_absolute() && loader.exists()));
        let mut text = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut text, &[b'#'; 100]).unwrap();
        assert!(interpreter(&text).is_err());
        assert!(interpreter(&tempfile::tempfile().unwrap()).is_err());
    }

    #[test]
    fn search_reports_why_a_criu_was_passed_over() {
        let search = find(Some(Path::new("/no/such/criu")));
        assert!(search.found.is_none());
        assert_eq!(search.reason(), "/no/such/criu: there is no such file");
        let none = CriuSearch { found: None, passed_over: Vec::new() };
        assert_eq!(none.reason(), "none is installed");
    }
}
