//! Starts PHP workers, by their tenant's parent or alone, and those parents.
//!
//! All of it blocks: call it from `workers`. Not here: which parent there is (`php_parent`), the
//! requests a worker gets (`gate`).

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nagaya_keeper_api::protocol::FailureKind;
use nagaya_records::Tenant;
use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType};

use crate::cells::Leaf;
use crate::cgi;
use crate::enclosure::{Enclosure, Enclosures};
use crate::fault::{self, Fault};
use crate::gate::{self, GatedWorker, ScriptGate, ScriptRule};
use crate::php_parent::ParentChannel;
use crate::process::{StartedProgram, TreeRoot};
use crate::sys::{self, ExecPlan, SpawnStep, SpawnedChild};

use super::{RunAs, above_stdio, c_text, namespaces_of, not_started, not_wired, pipe};

/// The program of PHP.
#[derive(Clone)]
pub struct PhpProgram {
    pub php_cgi: PathBuf,
    pub enclosures: Arc<Enclosures>,
}

/// Parameters of a PHP worker.
pub struct PhpStart {
    pub program: PhpProgram,
    /// Parent that makes it. `None`: it starts alone.
    pub parent: Option<Arc<ParentChannel>>,
    /// Directory in which its socket has a name for a moment.
    pub sockets: Arc<OwnedFd>,
    pub gate: ScriptGate,
    /// The scripts that it may be given.
    pub scripts: Arc<ScriptRule>,
}

/// Settings without which PHP runs another file than the one the gate has checked:
/// `main/fopen_wrappers.c` and `sapi/cgi/cgi_main.c` of PHP.
const PHP_SETTINGS: [&CStr; 6] = [c"-d", c"doc_root=", c"-d", c"user_dir=", c"-d", c"cgi.fix_pathinfo=1"];

/// Variables that make `php-cgi` a parent: its standard output is the library's file
/// (`c/php_parent.c`).
const PARENT_VARIABLES: [&CStr; 2] = [c"LD_PRELOAD=/proc/self/fd/1", c"NAGAYA_PHP_PARENT=1"];

/// Starts a PHP worker whose first connection is already made. Its socket has a path only until
/// then.
pub fn php(start: &PhpStart, tenant: &Tenant, runner: &RunAs, leaf: &Leaf) -> Result<StartedProgram, Fault> {
    let PhpStart { program, sockets, gate, scripts, .. } = start;
    if let Some(scripts) = scripts.get() {
        scripts.check_root()?;
    }
    let enclosure = program.enclosures.of(tenant, runner.identity)?;
    let wire = || -> io::Result<_> {
        let worker = connected_listener(sockets)?;
        let (log, stderr) = pipe()?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (ours, edges) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        Ok((worker, log, stderr, ours, edges))
    };
    let (worker, log, stderr, ours, edges) = wire().map_err(|e| not_wired("php-cgi", &e))?;
    let ListeningWorker { listener, door, connection } = worker;
    let child = match start.of_parent(tenant, enclosure.as_ref(), (listener.as_fd(), stderr.as_fd()), leaf) {
        Some(child) => child,
        None => {
            let process = PhpProcess {
                stdio: [listener.as_fd(), stderr.as_fd(), stderr.as_fd()],
                control: None,
                variables: &[],
            };
            process.start(program, tenant, runner, (leaf, enclosure.as_deref()))?
        }
    };
    let root = TreeRoot::Child(child);
    let whose = tenant.name.to_string();
    let passage = GatedWorker { edge: ours, worker: connection, door, rule: Arc::clone(scripts), whose };
    if let Err(error) = gate.open(passage) {
        // Nothing could be sent to it. Its tree is ended with its cell.
        let _ = root.kill();
        return Err(Fault::new(FailureKind::Busy, fault::SPAWN, error.to_string()));
    }
    Ok(StartedProgram { root, log, fds: vec![edges], enclosure })
}

impl PhpStart {
    /// Lets the parent make the worker. `None`: there is none, or it makes none.
    fn of_parent(
        &self,
        tenant: &Tenant,
        enclosure: Option<&Arc<Enclosure>>,
        (listener, log): (BorrowedFd<'_>, BorrowedFd<'_>),
        leaf: &Leaf,
    ) -> Option<SpawnedChild> {
        let parent = self.parent.as_ref()?;
        match parent.make_worker((enclosure, listener, log), leaf) {
            Ok(worker) => Some(worker),
            Err(error) => {
                tracing::info!(tenant = %tenant.name, %error, "a PHP worker starts without its parent");
                None
            }
        }
    }
}

/// Starts the parent of a tenant's PHP workers. Returns when PHP has started up in it. Its one
/// descriptor is the keeper's end of the parent's descriptor 3.
pub fn php_parent(
    program: &PhpProgram,
    library: &OwnedFd,
    tenant: &Tenant,
    runner: &RunAs,
    leaf: &Leaf,
) -> Result<StartedProgram, Fault> {
    let enclosure = program.enclosures.of(tenant, runner.identity)?;
    let wire = || -> io::Result<_> {
        // PHP serves FastCGI if its standard input is a socket without another end.
        let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None)?;
        let (log, stderr) = pipe()?;
        let kind = SocketType::SEQPACKET;
        let (ours, theirs) = rustix::net::socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
        let library = above_stdio(library.try_clone()?)?;
        Ok((above_stdio(socket)?, library, log, stderr, ours, above_stdio(theirs)?))
    };
    let (socket, library, log, stderr, ours, theirs) = wire().map_err(|e| not_wired("php-cgi", &e))?;
    let process = PhpProcess {
        stdio: [socket.as_fd(), library.as_fd(), stderr.as_fd()],
        control: Some(theirs.as_fd()),
        variables: &PARENT_VARIABLES,
    };
    let child = process.start(program, tenant, runner, (leaf, enclosure.as_deref()))?;
    drop(theirs);
    if let Err(error) = wait_ready(&ours) {
        // The rest of its tree ends with its cell.
        child.end();
        let message = format!("{} does not become a parent: {error}", program.php_cgi.display());
        return Err(Fault::new(FailureKind::Broken, fault::SPAWN, message));
    }
    Ok(StartedProgram { root: TreeRoot::Child(child), log, fds: vec![ours], enclosure })
}

fn wait_ready(control: &OwnedFd) -> io::Result<()> {
    loop {
        match rustix::net::recv(control, &mut [0u8], RecvFlags::empty()) {
            Err(Errno::INTR) => {}
            Ok((_, 0)) => {
                let message = "it has ended, or is not linked with the system's C library";
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, message));
            }
            received => return Ok(received.map(drop)?),
        }
    }
}

/// A process of PHP that is to be started.
struct PhpProcess<'a> {
    stdio: [BorrowedFd<'a>; 3],
    /// Its descriptor 3.
    control: Option<BorrowedFd<'a>>,
    variables: &'a [&'a CStr],
}

impl PhpProcess<'_> {
    fn start(
        &self,
        program: &PhpProgram,
        tenant: &Tenant,
        runner: &RunAs,
        (leaf, enclosure): (&Leaf, Option<&Enclosure>),
    ) -> Result<SpawnedChild, Fault> {
        let PhpProgram { php_cgi, enclosures } = program;
        let path = c_text(php_cgi.as_os_str())?;
        let mut args: Vec<CString> =
            std::iter::once(path.as_c_str()).chain(PHP_SETTINGS).map(CStr::to_owned).collect();
        if let Some(sendmail) = enclosure.and_then(Enclosure::sendmail) {
            args.push(c"-d".to_owned());
            args.push(cgi::variable(
                "sendmail_path",
                format!("\"{} -t -i\"", sendmail.display()).as_bytes(),
            )?);
        }
        let directory = c_text(tenant.home.as_deref().unwrap_or(Path::new("/")).as_os_str())?;
        let mut env = vec![
            cgi::variable("PATH", cgi::PATH.as_bytes())?,
            // One process for one connection. The edge decides how many requests it serves.
            c"PHP_FCGI_CHILDREN=0".to_owned(),
            c"PHP_FCGI_MAX_REQUESTS=0".to_owned(),
        ];
        if let Some(home) = &tenant.home {
            env.push(cgi::variable("HOME", home.as_os_str().as_bytes())?);
        }
        env.extend(self.variables.iter().map(|variable| (*variable).to_owned()));
        sys::spawn(&ExecPlan {
            programs: std::slice::from_ref(&path),
            args: &args,
            env: &env,
            directory: &directory,
            identity: runner.identity,
            stdio: self.stdio,
            listener: self.control,
            entrance: leaf.entrance(),
            namespaces: &namespaces_of(enclosure),
            open_files_max: runner.open_files_max,
            filter: enclosures.call_filter(),
        })
        .map_err(|error| match (error.step, error.error.kind()) {
            (SpawnStep::Program, io::ErrorKind::NotFound) => Fault::new(
                FailureKind::Broken,
                fault::NO_PHP,
                format!("there is no {}: install php-cgi, or set its path", php_cgi.display()),
            ),
            _ => not_started(php_cgi, error),
        })
    }
}

/// The socket of a worker, with one connection waiting in it.
struct ListeningWorker {
    listener: OwnedFd,
    /// The socket opened as a path, which has no name any more. More connections can be made
    /// through it.
    door: OwnedFd,
    /// The other end of the one connection.
    connection: OwnedFd,
}

fn connected_listener(sockets: &OwnedFd) -> io::Result<ListeningWorker> {
    let mut random = [0; 16];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
    let name = format!("w{:032x}", u128::from_ne_bytes(random));
    // Through the directory's descriptor: the path to it may be longer than a socket address can
    // be.
    let address = SocketAddrUnix::new(format!("/proc/self/fd/{}/{name}", sockets.as_raw_fd()))?;
    let socket = |flags| rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
    let listener = above_stdio(socket(SocketFlags::CLOEXEC)?)?;
    rustix::net::bind(&listener, &address)?;
    let connect = || -> io::Result<(OwnedFd, OwnedFd)> {
        rustix::net::listen(&listener, 1)?;
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let door = rustix::fs::openat(sockets, &name, flags, Mode::empty())?;
        let connection = gate::connect(&door)?;
        Ok((door, connection))
    };
    let connected = connect();
    rustix::fs::unlinkat(sockets, &name, AtFlags::empty())?;
    let (door, connection) = connected?;
    Ok(ListeningWorker { listener, door, connection })
}
