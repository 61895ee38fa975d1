//! Starts programs: CGI, PHP workers, applications. Pipes and sockets are connected here.
//!
//! All of it blocks for up to a millisecond: call it from `workers`. Not here: who may start what
//! (`verbs`), how long it lives (`process`), the system calls (`sys`).

mod php;

use std::collections::BTreeMap;
use std::ffi::{CString, OsStr};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use nagaya_keeper_api::protocol::FailureKind;
use nagaya_records::record::App;
use nagaya_records::{Site, Tenant};
use rustix::fs::{CWD, Mode, OFlags};
use rustix::pipe::PipeFlags;

use crate::cells::Leaf;
use crate::cgi;
use crate::enclosure::{Enclosure, Enclosures};
use crate::fault::{self, Fault};
use crate::paths::roots;
use crate::paths::tenant_path::PathOwner;
use crate::process::{StartedProgram, TreeRoot};
use crate::sys::{self, ExecPlan, SpawnError, SpawnStep, UnixIdentity};

pub use php::{PhpProgram, PhpStart, php, php_parent};

/// Rights and limits of a program.
#[derive(Debug, Clone)]
pub struct RunAs {
    pub identity: Option<UnixIdentity>,
    pub open_files_max: u64,
}

/// Starts a program of a CGI site.
pub fn cgi(
    site: &Site,
    tenant: &Tenant,
    script: &str,
    env: Vec<(String, String)>,
    runner: &RunAs,
    (leaf, enclosures): (&Leaf, &Enclosures),
) -> Result<StartedProgram, Fault> {
    let files = site.backend.files().expect("the verb starts only sites of kind cgi here");
    let found = roots::find_script(site, tenant, runner.identity, script)?;
    enclosures.view(tenant, runner.identity).check(&found.path)?;
    let env = cgi::environment(env, &roots::root_path(files, tenant)?, script, &files.env)?;
    let program = c_text(found.path.as_os_str())?;
    let directory = c_text(found.path.parent().unwrap_or(&found.root).as_os_str())?;
    let wire = || -> io::Result<_> {
        let (stdin, to_program) = pipe()?;
        let (from_program, stdout) = pipe()?;
        let (log, stderr) = pipe()?;
        // The edge waits for readiness. The program must not notice that, so only our ends are
        // changed.
        for ours in [&to_program, &from_program] {
            rustix::io::ioctl_fionbio(ours, true)?;
        }
        Ok((stdin, to_program, from_program, stdout, log, stderr))
    };
    let (stdin, to_program, from_program, stdout, log, stderr) = wire().map_err(|e| not_wired(script, &e))?;
    let enclosure = enclosures.of(tenant, runner.identity)?;
    let child = sys::spawn(&ExecPlan {
        programs: std::slice::from_ref(&program),
        args: std::slice::from_ref(&program),
        env: &env,
        directory: &directory,
        identity: runner.identity,
        stdio: [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()],
        listener: None,
        entrance: leaf.entrance(),
        namespaces: &namespaces_of(enclosure.as_deref()),
        open_files_max: runner.open_files_max,
        filter: enclosures.call_filter(),
    })
    .map_err(|error| not_started(&found.path, error))?;
    Ok(StartedProgram { root: TreeRoot::Child(child), log, fds: vec![to_program, from_program], enclosure })
}

/// The address at which an application is to listen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AppAddress {
    Socket(PathBuf),
    /// On the loopback address.
    Port(u16),
    /// A socket at this path, which it gets as descriptor 3.
    Inherited(PathBuf),
}

/// Shell command that sets the variable for descriptor 3, the socket to listen on
/// (sd_listen_fds(3)). The variable holds the program's own number, which is known only once there
/// is a process.
const WITH_ITS_PID: &str = "export LISTEN_PID=$$; exec \"$0\" \"$@\"";

/// Starts an application. Its standard output and error both go to the log.
pub fn app(
    app: &App,
    tenant: &Tenant,
    address: &AppAddress,
    listener: Option<OwnedFd>,
    runner: &RunAs,
    leaf: &Leaf,
) -> Result<StartedProgram, Fault> {
    let command = app_command(app, address)?;
    let mut env = app_environment(app, tenant, address);
    env.extend(secrets(app, tenant, runner)?);
    let env = env.iter().map(|(name, value)| cgi::variable(name, value.as_bytes()));
    let program = &command[0];
    let (programs, args) = match &listener {
        None => (candidates(program)?, command.clone()),
        Some(_) => {
            let shell = ["sh", "-c", WITH_ITS_PID].map(str::to_owned).into_iter();
            (vec![c"/bin/sh".to_owned()], shell.chain(command.iter().cloned()).collect())
        }
    };
    let directory = c_text(home(tenant).join(&app.directory).as_os_str())?;
    let wire = || -> io::Result<_> {
        let listener = listener.map(above_stdio).transpose()?;
        Ok((OwnedFd::from(File::open("/dev/null")?), pipe()?, listener))
    };
    let (nothing, (log, output), listener) = wire().map_err(|e| not_wired(program, &e))?;
    let child = sys::spawn(&ExecPlan {
        programs: &programs,
        args: &args.iter().map(|arg| c_text(OsStr::new(arg))).collect::<Result<Vec<_>, _>>()?,
        env: &env.collect::<Result<Vec<_>, _>>()?,
        directory: &directory,
        identity: runner.identity,
        stdio: [nothing.as_fd(), output.as_fd(), output.as_fd()],
        listener: listener.as_ref().map(AsFd::as_fd),
        entrance: leaf.entrance(),
        namespaces: &[],
        open_files_max: runner.open_files_max,
        // Without a sandbox nothing is refused to applications. This is logged at the start.
        filter: &[],
    })
    .map_err(|error| not_started(Path::new(program), error))?;
    Ok(StartedProgram { root: TreeRoot::Child(child), log, fds: Vec::new(), enclosure: None })
}

/// Returns program and arguments, with the listening address filled in.
pub fn app_command(app: &App, address: &AppAddress) -> Result<Vec<String>, Fault> {
    let fill = |text: &String| match address {
        AppAddress::Socket(path) => text.replace("{socket}", &path.to_string_lossy()),
        AppAddress::Port(port) => text.replace("{port}", &port.to_string()),
        AppAddress::Inherited(_) => text.clone(),
    };
    let command: Vec<String> = app.command.iter().map(fill).collect();
    match command.first() {
        Some(program) if !program.is_empty() => Ok(command),
        _ => Err(Fault::new(FailureKind::Broken, fault::SPAWN, "its command is empty: name a program")),
    }
}

/// Returns its variables, without its secrets.
pub fn app_environment(app: &App, tenant: &Tenant, address: &AppAddress) -> BTreeMap<String, String> {
    let mut env = BTreeMap::from([
        ("PATH".to_owned(), cgi::PATH.to_owned()),
        ("HOME".to_owned(), home(tenant).to_string_lossy().into_owned()),
    ]);
    env.extend(app.env.clone());
    let (name, value) = match address {
        AppAddress::Socket(path) => ("NAGAYA_SOCKET", path.to_string_lossy().into_owned()),
        AppAddress::Port(port) => ("PORT", port.to_string()),
        AppAddress::Inherited(_) => ("LISTEN_FDS", "1".to_owned()),
    };
    env.insert(name.to_owned(), value);
    env
}

/// Returns the default for a directory that a record does not set.
pub fn home(tenant: &Tenant) -> &Path {
    tenant.home.as_deref().unwrap_or(Path::new("/"))
}

/// Reads variables from files, with the tenant's own rights: a record cannot reveal another
/// tenant's secrets.
pub fn secrets(app: &App, tenant: &Tenant, runner: &RunAs) -> Result<Vec<(String, String)>, Fault> {
    let owner = PathOwner::of(tenant, runner.identity);
    let read = |(name, file): (&String, &PathBuf)| {
        let text = owner.open_file(file).and_then(read_short);
        let text = text.map_err(|error| {
            Fault::of_path(fault::SECRET, "cannot read the secret in", &home(tenant).join(file), error)
        })?;
        // Editors end the last line with a line break, which is no part of the secret.
        let text = text.strip_suffix('\n').unwrap_or(&text);
        Ok((name.clone(), text.strip_suffix('\r').unwrap_or(text).to_owned()))
    };
    app.secrets.iter().map(read).collect()
}

/// Maximum length of a secret, bytes. A key of any kind is shorter.
const SECRET_LEN_MAX: u64 = 64 * 1024;

fn read_short(file: File) -> io::Result<String> {
    use std::io::Read;
    let mut text = String::new();
    if file.take(SECRET_LEN_MAX + 1).read_to_string(&mut text)? as u64 > SECRET_LEN_MAX {
        return Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            format!("it is longer than {SECRET_LEN_MAX} bytes"),
        ));
    }
    Ok(text)
}

/// Returns the paths that a program's name can mean: itself with a `/`, else one for each directory
/// of `PATH`.
fn candidates(program: &str) -> Result<Vec<CString>, Fault> {
    if program.contains('/') {
        return Ok(vec![c_text(OsStr::new(program))?]);
    }
    cgi::PATH.split(':').map(|dir| c_text(Path::new(dir).join(program).as_os_str())).collect()
}

fn namespaces_of(enclosure: Option<&Enclosure>) -> Vec<BorrowedFd<'_>> {
    enclosure.map(Enclosure::namespaces).unwrap_or_default()
}

/// Opens a directory that holds sockets, for PHP workers.
pub fn open_directory(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(CWD, path, flags, Mode::empty())?)
}

/// Makes a pipe whose ends are not among the standard three, so that wiring a child cannot
/// overwrite one.
fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    Ok((above_stdio(read)?, above_stdio(write)?))
}

fn above_stdio(fd: OwnedFd) -> io::Result<OwnedFd> {
    if fd.as_raw_fd() > 2 { Ok(fd) } else { Ok(rustix::io::fcntl_dupfd_cloexec(&fd, 3)?) }
}

fn c_text(text: &OsStr) -> Result<CString, Fault> {
    CString::new(text.as_bytes()).map_err(|_| {
        Fault::new(FailureKind::Broken, fault::SPAWN, format!("'{}' has a NUL byte", text.to_string_lossy()))
    })
}

fn not_wired(what: &str, error: &io::Error) -> Fault {
    let message = format!("cannot make the pipes of '{what}': {error}; is the limit on open files reached?");
    Fault::new(FailureKind::Busy, fault::SPAWN, message)
}

fn not_started(program: &Path, SpawnError { step, error }: SpawnError) -> Fault {
    let program = program.display();
    let (failure, why) = match (step, error.raw_os_error().map(rustix::io::Errno::from_raw_os_error)) {
        (_, Some(rustix::io::Errno::AGAIN | rustix::io::Errno::NOMEM)) => {
            (FailureKind::Busy, "the limit on processes or memory is reached")
        }
        (SpawnStep::Directory, _) => {
            (FailureKind::Forbidden, "its directory cannot be entered by the tenant")
        }
        (SpawnStep::Program, Some(rustix::io::Errno::ACCESS)) => {
            (FailureKind::Forbidden, "the tenant may not execute it or its '#!' interpreter")
        }
        (SpawnStep::Program, Some(rustix::io::Errno::NOENT)) => {
            (FailureKind::Broken, "it, or the interpreter its first line names, does not exist")
        }
        (SpawnStep::Program, Some(rustix::io::Errno::NOEXEC)) => {
            (FailureKind::Broken, "it is no program: a script begins with a line like '#!/bin/sh'")
        }
        (SpawnStep::Namespaces, _) => (FailureKind::Broken, "it cannot enter its tenant's namespaces"),
        (SpawnStep::Filter, _) => (
            FailureKind::Broken,
            "it gets no filter of system calls; see `programs_system_calls` in [keeper]",
        ),
        (SpawnStep::Clone | SpawnStep::Fence, _) => {
            (FailureKind::Broken, "no process can be made in a cgroup of its own")
        }
        _ => (FailureKind::Broken, "the system refused a step on the way to it"),
    };
    Fault::new(failure, fault::SPAWN, format!("cannot start {program}: {why} ({step:?}: {error})"))
}
