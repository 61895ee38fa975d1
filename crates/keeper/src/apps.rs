//! Kept applications: one process tree per site, started on first need, connected to on each.
//!
//! An application ends with the keeper, when its site's record changes, or by itself; one that fails is
//! started again only after a pause that doubles. Not here: starting a program (`spawn`), HTTP (`edge`).

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::fs;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nagaya_cmdb::record::{App as Record, Listen};
use nagaya_cmdb::{Backend, Site, SiteName, Tenant};
use rustix::fs::{CWD, FileType, Mode, OFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde_json::{Value, json};
use tokio::sync::{Notify, watch};
use tokio::task::spawn_local;
use tokio::time::{Instant, sleep, timeout};

use crate::cells::Home;
use crate::engine::{Engine, same_runner, wrong_kind};
use crate::fault::{self, Fault};
use crate::process::{Handle, Kind, Request};
use crate::protocol::{Failure, InstanceId};
use crate::spawn::{self, Address, Runner};

/// Longest time an application may be given to listen, whatever its record says.
pub const START_MAX: Duration = Duration::from_secs(300);

/// Pause before a failed application is started again; doubled for each further failure.
const BACKOFF_FIRST: Duration = Duration::from_secs(1);
const BACKOFF_MAX: Duration = Duration::from_secs(60);

/// An application that ran this long had a good start: its failures before are forgotten.
const GOOD_RUN: Duration = Duration::from_secs(60);

/// First and longest pause between two looks whether an application listens.
const LOOK_FIRST: Duration = Duration::from_millis(5);
const LOOK_MAX: Duration = Duration::from_millis(100);

/// How long a connection to a listening application may take; its queue may be full for a moment.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Applications of one tenant.
const PER_TENANT_MAX: u32 = 64;

/// Longest path of a Unix socket, `sun_path` less its NUL (unix(7)).
const SOCKET_PATH_MAX: usize = 107;

/// Characters of the site's name in the name of its socket's directory, so that the path stays short.
const DIR_NAME_MAX: usize = 32;

/// Applications listed by name in the status.
const STATUS_MAX: usize = 200;

/// Longest wait for an application.
pub const WAKE_MAX: Duration = START_MAX;

pub struct Apps {
    dir: PathBuf,
    running: RefCell<HashMap<SiteName, Rc<App>>>,
    failures: RefCell<HashMap<SiteName, Failures>>,
    starts: Cell<u64>,
}

/// How often an application failed of late.
struct Failures {
    /// The record it failed with; another one is a new attempt.
    site: Arc<Site>,
    count: u32,
    not_before: Instant,
}

struct App {
    site: Arc<Site>,
    tenant: Arc<Tenant>,
    id: InstanceId,
    phase: watch::Sender<Phase>,
    dropped: Notify,
}

#[derive(Debug, Clone)]
enum Phase {
    Starting,
    Listening(Address),
    Failed(Fault),
}

impl Apps {
    pub fn new(dir: PathBuf) -> Self {
        Self { dir, running: RefCell::default(), failures: RefCell::default(), starts: Cell::new(0) }
    }

    /// A connection to the site's application, once it listens.
    pub async fn connect(
        &self,
        engine: &Rc<Engine>,
        name: &SiteName,
    ) -> Result<(InstanceId, OwnedFd), Fault> {
        let app = self.running_or_new(engine, name)?;
        let mut phase = app.phase.subscribe();
        let settled =
            phase.wait_for(|phase| !matches!(phase, Phase::Starting)).await.map(|phase| phase.clone());
        match settled {
            Ok(Phase::Listening(address)) => {
                let (_, tenant) = engine.site(name)?;
                let owner = engine.runner(&tenant)?.identity.map(|identity| identity.uid);
                let socket = connect_patiently(&address, owner).await.map_err(|error| {
                    let message = format!("the application of '{name}' does not take a connection: {error}");
                    Fault::new(Failure::Broken, fault::APP, message)
                })?;
                Ok((app.id, socket))
            }
            Ok(Phase::Failed(fault)) => Err(fault),
            Ok(Phase::Starting) | Err(_) => {
                let message = format!("the application of '{name}' was ended while it started");
                Err(Fault::new(Failure::Busy, fault::APP, message))
            }
        }
    }

    /// Another connection to one that runs.
    pub async fn connect_again(&self, engine: &Rc<Engine>, id: InstanceId) -> Result<OwnedFd, Fault> {
        let name = self.running.borrow().values().find(|app| app.id == id).map(|app| app.site.name.clone());
        match name {
            Some(name) => Ok(self.connect(engine, &name).await?.1),
            None => Err(Fault::new(Failure::NotFound, fault::UNKNOWN, "the instance has ended")),
        }
    }

    fn running_or_new(&self, engine: &Rc<Engine>, name: &SiteName) -> Result<Rc<App>, Fault> {
        if let Some(app) = self.running.borrow().get(name) {
            return Ok(Rc::clone(app));
        }
        let (site, tenant) = engine.site(name)?;
        let Backend::App(_) = &site.backend else { return Err(wrong_kind(&site, "app")) };
        if let Some(failures) = self.failures.borrow().get(name)
            && let Some(left) = failures.not_before.checked_duration_since(Instant::now())
        {
            let message = format!(
                "the application of '{name}' failed {} times and is started again in {:.1} s; its log says why",
                failures.count,
                left.as_secs_f32()
            );
            return Err(Fault::new(Failure::Busy, fault::APP_BACKOFF, message));
        }
        let (phase, _) = watch::channel(Phase::Starting);
        let number = self.starts.replace(self.starts.get() + 1);
        let app = Rc::new(App { site, tenant, id: InstanceId(number), phase, dropped: Notify::new() });
        self.running.borrow_mut().insert(name.clone(), Rc::clone(&app));
        spawn_local(live(Rc::clone(engine), Rc::clone(&app)));
        Ok(app)
    }

    /// Ends applications whose record is not what they were started with.
    pub fn records_changed(&self, engine: &Engine) {
        let current = |app: &App| {
            engine.site(&app.site.name).is_ok_and(|(site, tenant)| {
                site.backend == app.site.backend
                    && site.tenant == app.site.tenant
                    && same_runner(&tenant, &app.tenant)
            })
        };
        self.running.borrow_mut().retain(|_, app| {
            let keep = current(app);
            if !keep {
                app.dropped.notify_one();
            }
            keep
        });
        self.failures.borrow_mut().retain(|name, failures| {
            engine.site(name).is_ok_and(|(site, _)| site.backend == failures.site.backend)
        });
    }

    pub fn status(&self) -> Value {
        let running = self.running.borrow();
        let word = |app: &App| match &*app.phase.borrow() {
            Phase::Starting => "starting",
            Phase::Listening(_) => "listening",
            Phase::Failed(_) => "failed",
        };
        running.iter().take(STATUS_MAX).map(|(name, app)| (name.to_string(), json!(word(app)))).collect()
    }

    fn failed(&self, app: &App) {
        let name = &app.site.name;
        let mut failures = self.failures.borrow_mut();
        let count = failures.get(name).map_or(0, |failures| failures.count).saturating_add(1);
        let pause = BACKOFF_FIRST.saturating_mul(1 << (count - 1).min(10)).min(BACKOFF_MAX);
        let not_before = Instant::now() + pause;
        failures.insert(name.clone(), Failures { site: Arc::clone(&app.site), count, not_before });
    }

    /// Takes the application off the list, unless another has its place already.
    fn forget(&self, app: &Rc<App>) {
        let mut running = self.running.borrow_mut();
        if running.get(&app.site.name).is_some_and(|listed| Rc::ptr_eq(listed, app)) {
            running.remove(&app.site.name);
        }
    }
}

/// One application from its start to its end.
async fn live(engine: Rc<Engine>, app: Rc<App>) {
    let name = &app.site.name;
    let short: String = name.as_str().chars().take(DIR_NAME_MAX).collect();
    let dir = engine.apps.dir.join(format!("{short}.{}", app.id.0));
    let work = async {
        let (handle, began) = match start(&engine, &app, &dir).await {
            Ok((handle, address)) => {
                app.phase.send_replace(Phase::Listening(address));
                (handle, Instant::now())
            }
            Err(fault) => {
                // Not the application's doing, and over soon; the next request may try at once.
                if fault.failure != Failure::Busy {
                    engine.apps.failed(&app);
                }
                tracing::warn!(site = %name, "{fault}");
                app.phase.send_replace(Phase::Failed(fault));
                return;
            }
        };
        let (exit, _) = handle.ended().await;
        tracing::warn!(site = %name, status = exit.status, signal = exit.signal, "its application ended by itself");
        if began.elapsed() >= GOOD_RUN {
            engine.apps.failures.borrow_mut().remove(name);
        }
        engine.apps.failed(&app);
    };
    // Dropping the work drops the handle in it, which ends the tree.
    tokio::select! {
        () = work => {}
        () = app.dropped.notified() => tracing::info!(site = %name, "its record changed; ending its application"),
    }
    engine.apps.forget(&app);
    if matches!(fs::remove_dir_all(&dir), Err(error) if error.kind() != io::ErrorKind::NotFound) {
        tracing::warn!(site = %name, "{} cannot be removed", dir.display());
    }
}

/// Starts it and waits until it listens.
async fn start(engine: &Rc<Engine>, app: &App, dir: &Path) -> Result<(Handle, Address), Fault> {
    let Backend::App(record) = &app.site.backend else { return Err(wrong_kind(&app.site, "app")) };
    let runner = engine.runner(&app.tenant)?;
    let owner = runner.identity.map(|identity| identity.uid);
    let address = {
        let (listen, dir, runner) = (record.listen, dir.to_owned(), runner.clone());
        engine.on_worker(move || give_address(listen, &dir, &runner)).await?
    };
    let most = engine.options().app_start_ms;
    let within = record.start_seconds.map_or(Duration::from_millis(most), |s| Duration::from_secs(s.into()));
    let home = Home { tenant: Arc::clone(&app.tenant), site: Some(Arc::clone(&app.site)), device: None };
    let order = engine.order(Kind::App, Request::none(home), app.site.name.to_string(), PER_TENANT_MAX);
    let handle = {
        let (record, tenant, address): (Record, _, _) =
            (record.clone(), Arc::clone(&app.tenant), address.clone());
        let make = move |leaf: &_| spawn::app(&record, &tenant, &address, &runner, leaf);
        engine.processes.start(order, make).await?.0
    };
    let within = within.min(START_MAX);
    let broken = |why: String| {
        let message = format!("the application of '{}' {why}; its log says more", app.site.name);
        Err(Fault::new(Failure::Broken, fault::APP, message))
    };
    tokio::select! {
        (exit, _) = handle.ended() => {
            broken(format!("ended before it listened (status {:?}, signal {:?})", exit.status, exit.signal))
        }
        listens = timeout(within, until_listening(&address, owner)) => match listens {
            Err(_) => broken(format!("does not listen after {} s", within.as_secs_f32())),
            Ok(Err(error)) => broken(format!("cannot be used: {error}")),
            Ok(Ok(())) => match address {
                Address::Port(port) => {
                    engine.on_worker(move || is_owner(port, owner)).await.map(|()| (handle, address))
                }
                Address::Socket(_) => Ok((handle, address)),
            },
        },
    }
}

fn give_address(listen: Listen, dir: &Path, runner: &Runner) -> Result<Address, Fault> {
    match listen {
        Listen::Fd => Err(Fault::new(Failure::Broken, fault::APP, "listen = fd is not supported yet")),
        Listen::Port => {
            // Free now; whether it is the application's later is checked once it listens.
            let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|listener| listener.local_addr());
            port.map(|address| Address::Port(address.port())).map_err(|error| {
                Fault::new(Failure::Busy, fault::APP, format!("no loopback port is free: {error}"))
            })
        }
        Listen::Socket => {
            let path = dir.join("app.sock");
            if path.as_os_str().len() > SOCKET_PATH_MAX {
                let message = format!(
                    "{} is longer than the {SOCKET_PATH_MAX} bytes a socket's path may have: choose a shorter runtime directory",
                    path.display()
                );
                return Err(Fault::new(Failure::Broken, fault::APP, message));
            }
            let made = fs::DirBuilder::new().mode(0o700).create(dir).and_then(|()| match runner.identity {
                Some(identity) => std::os::unix::fs::chown(dir, Some(identity.uid), Some(identity.gid)),
                None => Ok(()),
            });
            made.map(|()| Address::Socket(path))
                .map_err(|error| Fault::of_path(fault::APP, "cannot make", dir, error))
        }
    }
}

async fn until_listening(address: &Address, owner: Option<u32>) -> io::Result<()> {
    let mut pause = LOOK_FIRST;
    loop {
        match connect(address, owner).await {
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Err(error),
            Err(_) => sleep(pause).await,
        }
        pause = (pause * 2).min(LOOK_MAX);
    }
}

/// Waits while the application's queue of connections is full.
async fn connect_patiently(address: &Address, owner: Option<u32>) -> io::Result<OwnedFd> {
    let connected = async {
        let mut pause = LOOK_FIRST;
        loop {
            match connect(address, owner).await {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => sleep(pause).await,
                connected => return connected,
            }
            pause = (pause * 2).min(LOOK_MAX);
        }
    };
    timeout(CONNECT_TIMEOUT, connected).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

async fn connect(address: &Address, owner: Option<u32>) -> io::Result<OwnedFd> {
    match address {
        Address::Socket(path) => connect_socket(path, owner),
        Address::Port(port) => {
            let v4 = SocketAddr::from((Ipv4Addr::LOCALHOST, *port));
            let v6 = SocketAddr::from((Ipv6Addr::LOCALHOST, *port));
            // Some runtimes listen on the first address of `localhost` only, which may be either.
            let stream = match tokio::net::TcpStream::connect(v4).await {
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    tokio::net::TcpStream::connect(v6).await?
                }
                connected => connected?,
            };
            Ok(stream.into_std()?.into())
        }
    }
}

/// Connects to the tenant's own socket and to nothing else. The tenant owns the directory, and could put a
/// link to another's socket there, which would then take the keeper for its root peer.
fn connect_socket(path: &Path, owner: Option<u32>) -> io::Result<OwnedFd> {
    let file =
        rustix::fs::openat(CWD, path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    let stat = rustix::fs::fstat(&file)?;
    let is_socket = FileType::from_raw_mode(stat.st_mode) == FileType::Socket;
    if !is_socket || owner.is_some_and(|owner| stat.st_uid != owner) {
        let why = "what is at the application's path is not a socket of its tenant";
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // By descriptor, so that it is the file just looked at.
    rustix::net::connect(&socket, &SocketAddrUnix::new(format!("/proc/self/fd/{}", file.as_raw_fd()))?)?;
    Ok(socket)
}

/// Whether everyone who listens on this port is the tenant: another could have taken it first.
fn is_owner(port: u16, owner: Option<u32>) -> Result<(), Fault> {
    let Some(owner) = owner else { return Ok(()) };
    let mut listeners = Vec::new();
    for path in ["/proc/net/tcp", "/proc/net/tcp6"] {
        // A kernel without IPv6 has no second file.
        let table = fs::read_to_string(path).unwrap_or_default();
        listeners.extend(table.lines().filter_map(|line| listener_uid(line, port)));
    }
    if !listeners.is_empty() && listeners.iter().all(|uid| *uid == owner) {
        return Ok(());
    }
    let message =
        format!("port {port} is listened on by uids {listeners:?}, not by its tenant {owner} alone");
    Err(Fault::new(Failure::Busy, fault::APP, message))
}

/// Uid in a line of `/proc/net/tcp`, if it is a socket that listens on this port: `n: addr:port peer 0A
/// queues timer retransmits uid ...`, numbers of addresses and states in hexadecimal (proc(5)).
fn listener_uid(line: &str, port: u16) -> Option<u32> {
    let mut fields = line.split_ascii_whitespace();
    let (_, local) = fields.nth(1)?.rsplit_once(':')?;
    let state = fields.nth(1)?;
    let listens = state == "0A" && u16::from_str_radix(local, 16) == Ok(port);
    if listens { fields.nth(3)?.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_uid_of_a_listener_is_read_from_the_kernels_table() {
        let line =
            "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 5 1";
        assert_eq!(listener_uid(line, 8080), Some(1000));
        assert_eq!(listener_uid(line, 8081), None);
        assert_eq!(listener_uid(&line.replace(" 0A ", " 01 "), 8080), None);
        assert_eq!(listener_uid("  sl  local_address rem_address   st", 8080), None);
    }

    #[test]
    fn a_real_listener_is_its_own_users() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let uid = rustix::process::geteuid().as_raw();
        assert_eq!(is_owner(port, Some(uid)), Ok(()));
        assert!(is_owner(port, Some(uid + 1)).is_err());
    }
}
