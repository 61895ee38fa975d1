//! The parent of a tenant's PHP workers: a `php-cgi` that has started up and makes a worker for
//! each order. Its workers share its opcache, as those of php-fpm do, and PHP need not start again.
//!
//! The parent has the tenant's rights, and the tenant may control it. So nothing that it sends is
//! believed. The kernel says which process reports as a worker. That process must be a child of the
//! keeper's, in the parent's cell, and alone there with the parent. It runs nothing before it is in
//! its own cell. Without a parent each worker is started by itself, with an opcache of its own.
//!
//! A parent lives while it is held: by its workers, and by the start of one. Another one replaces
//! it when a worker crashes, when `php-cgi`, a setting or the edge's number of the opcache changes,
//! or when it fails to make one.
//!
//! Not here: starting a worker and its connection (`spawn`), the code in it (`c/php_parent.c`).

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::fs;
use std::io::{self, IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nagaya_keeper_api::protocol::ProcessExit;
use nagaya_records::TenantName;
use parking_lot::Mutex;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair, sockopt,
};
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, pidfd_open, waitid};

use crate::cells::{CellError, CpuDemand, Leaf};
use crate::enclosure::Enclosure;
use crate::fault::{self, Fault};
use crate::process::ProcessRef;
use crate::spawn::{PhpProgram, RunAs};
use crate::sys::{SpawnedChild, UnixIdentity};

/// `c/php_parent.c`.
static LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/php_parent.so"));

/// Maximum number of parents of one tenant: the present one, and earlier ones whose workers still
/// serve.
pub const PARENTS_PER_TENANT_MAX: u32 = 4;

/// Time after a failed start of a parent in which that tenant's workers start without one.
const RETRY_AFTER: Duration = Duration::from_secs(60);

/// Maximum wait for a worker to report. It is long, because a cell may have little CPU time.
const REPORT_TIMEOUT: Duration = Duration::from_secs(20);

/// Signals of a process that ends by a fault of its own: memory that its parent's other workers
/// share may be damaged.
const CRASHES: [Signal; 5] = [Signal::SEGV, Signal::BUS, Signal::ABORT, Signal::ILL, Signal::FPE];

/// Opens the library as a file of its own, for `LD_PRELOAD`. `/run` may be mounted `noexec`.
pub fn open_library() -> io::Result<OwnedFd> {
    let file =
        rustix::fs::memfd_create("nagaya-php-parent", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let mut file = fs::File::from(file);
    file.write_all(LIBRARY)?;
    let seals = SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&file, seals)?;
    Ok(file.into())
}

/// The values that a parent is started with. With others its tenant gets another one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParentBasis {
    /// Number that the edge gives it. It gives another one when paths lead elsewhere.
    opcache: u64,
    php_cgi: PathBuf,
    /// Device and inode of `php_cgi`. An update of the package changes them.
    file: Option<(u64, u64)>,
    identity: Option<UnixIdentity>,
    home: Option<PathBuf>,
    open_files_max: u64,
    /// It has a filter of system calls. The rest of its walls is its enclosure.
    is_filtered: bool,
}

impl ParentBasis {
    /// Reads a disk, so it blocks.
    pub fn new(opcache: u64, program: &PhpProgram, home: Option<PathBuf>, runner: &RunAs) -> Self {
        let php_cgi = program.php_cgi.clone();
        let file = fs::metadata(&php_cgi).ok().map(|file| (file.dev(), file.ino()));
        let is_filtered = !program.enclosures.call_filter().is_empty();
        let RunAs { identity, open_files_max } = *runner;
        Self { opcache, php_cgi, file, identity, home, open_files_max, is_filtered }
    }
}

/// A running parent.
pub struct PhpParent {
    pub channel: Arc<ParentChannel>,
    basis: ParentBasis,
    _process: ProcessRef,
}

impl PhpParent {
    /// Takes a process that `spawn::php_parent` has started, with its one descriptor.
    pub fn new(process: ProcessRef, mut fds: Vec<OwnedFd>, basis: ParentBasis) -> Rc<Self> {
        let leaf = process.leaf();
        leaf.claim(CpuDemand::Nothing);
        let channel = ParentChannel {
            control: Mutex::new(fds.pop().expect("it is started with a control socket")),
            pid: process.pid().expect("it is a child of the keeper's"),
            leaf,
            enclosure: process.enclosure(),
            is_spent: AtomicBool::new(false),
        };
        Rc::new(Self { channel: Arc::new(channel), basis, _process: process })
    }

    /// Notes how one of its workers ended.
    pub fn worker_ended(&self, exit: &ProcessExit) {
        if exit.signal.is_some_and(|signal| CRASHES.iter().any(|crash| crash.as_raw() == signal)) {
            self.channel.is_spent.store(true, Ordering::Relaxed);
        }
    }
}

/// Why a parent made no worker.
#[derive(Debug, thiserror::Error)]
pub enum ParentError {
    #[error("it is replaced")]
    Spent,
    #[error("it cannot be reached: {0}")]
    Io(#[from] io::Error),
    #[error("process {0} reports as its worker, and is none")]
    Foreign(i32),
    #[error(transparent)]
    Cell(#[from] CellError),
}

/// The way to a parent. Blocks.
#[derive(Debug)]
pub struct ParentChannel {
    /// Held for each order: one worker at a time is in the parent's cell.
    control: Mutex<OwnedFd>,
    pid: Pid,
    leaf: Arc<Leaf>,
    enclosure: Option<Arc<Enclosure>>,
    /// No more orders go to it.
    is_spent: AtomicBool,
}

impl ParentChannel {
    /// Lets it make a worker that listens on `listener`, and moves that to `cell`. After an error
    /// it gets no more orders, and nothing of the worker is left.
    pub fn make_worker(
        &self,
        (enclosure, listener, log): (Option<&Arc<Enclosure>>, BorrowedFd<'_>, BorrowedFd<'_>),
        cell: &Leaf,
    ) -> Result<SpawnedChild, ParentError> {
        let control = self.control.lock();
        if self.is_spent.load(Ordering::Relaxed) {
            return Err(ParentError::Spent);
        }
        if self.enclosure.as_ref().map(Arc::as_ptr) != enclosure.map(Arc::as_ptr) {
            self.is_spent.store(true, Ordering::Relaxed);
            return Err(ParentError::Spent);
        }
        self.leaf.claim(CpuDemand::Share);
        let made = self.order(&control, &[listener, log], cell);
        self.leaf.claim(CpuDemand::Nothing);
        if made.is_err() {
            self.is_spent.store(true, Ordering::Relaxed);
            self.end();
        }
        made
    }

    /// Ends it and a worker that it may be making. That is a child of the keeper's that nobody else
    /// would reap.
    fn end(&self) {
        let others = self.leaf.pids().unwrap_or_default().into_iter().filter(|pid| *pid != self.pid);
        let others: Vec<OwnedFd> =
            others.filter_map(|pid| pidfd_open(pid, PidfdFlags::empty()).ok()).collect();
        if let Err(error) = self.leaf.end(None) {
            tracing::warn!(cell = self.leaf.name(), %error, "a parent of PHP workers cannot be ended");
            return;
        }
        for other in others {
            let _ = waitid(WaitId::PidFd(other.as_fd()), WaitIdOptions::EXITED);
        }
    }

    fn order(
        &self,
        control: &OwnedFd,
        [listener, log]: &[BorrowedFd<'_>; 2],
        cell: &Leaf,
    ) -> Result<SpawnedChild, ParentError> {
        let (report, theirs) = report_sockets()?;
        send_order(control, &[*listener, *log, theirs.as_fd()])?;
        drop(theirs);
        let worker = self.check_worker(receive_report(&report)?)?;
        // With all its threads: a false worker may have more than one.
        let moved = cell.adopt_whole(worker.pid, &self.leaf).map_err(ParentError::from);
        let begun = moved.and_then(|()| Ok(let_begin(&report)?));
        // It may be in its own cell already, which is not ended here.
        begun.inspect_err(|_| worker.end()).map(|()| worker)
    }

    /// Returns the process with this number, if it is a fresh worker. Only the parent and its
    /// workers are ever in its cell. So another process of the tenant's is not taken for one.
    fn check_worker(&self, pid: Pid) -> Result<SpawnedChild, ParentError> {
        let foreign = || ParentError::Foreign(pid.as_raw_nonzero().get());
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).map_err(|_| foreign())?;
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        match waitid(WaitId::PidFd(pidfd.as_fd()), options) {
            Ok(None) => {}
            Ok(Some(_)) | Err(Errno::CHILD) => return Err(foreign()),
            Err(errno) => return Err(io::Error::from(errno).into()),
        }
        let inside = self.leaf.pids()?;
        let is_worker =
            pid != self.pid && inside.len() == 2 && [pid, self.pid].iter().all(|of| inside.contains(of));
        is_worker.then_some(SpawnedChild { pid, pidfd }).ok_or_else(foreign)
    }
}

/// Returns the keeper's end of the connection on which one worker reports, and the worker's.
fn report_sockets() -> io::Result<(OwnedFd, OwnedFd)> {
    let kind = SocketType::SEQPACKET;
    let (report, theirs) = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_passcred(&report, true)?;
    for way in [sockopt::Timeout::Recv, sockopt::Timeout::Send] {
        sockopt::set_socket_timeout(&report, way, Some(REPORT_TIMEOUT))?;
    }
    Ok((report, theirs))
}

fn send_order(control: &OwnedFd, fds: &[BorrowedFd<'_>; 3]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let is_pushed = ancillary.push(SendAncillaryMessage::ScmRights(fds));
    debug_assert!(is_pushed, "the space is made for them");
    sendmsg(control, &[IoSlice::new(&[0])], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Returns the number of the process that reports, by the kernel (unix(7), `SO_PASSCRED`).
fn receive_report(report: &OwnedFd) -> io::Result<Pid> {
    let mut byte = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmCredentials(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let mut bytes = [IoSliceMut::new(&mut byte)];
        match recvmsg(report, &mut bytes, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            received => break received?,
        }
    };
    let credentials = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmCredentials(credentials) => Some(credentials),
        _ => None,
    });
    match credentials {
        Some(credentials) if received.bytes > 0 => Ok(credentials.pid),
        _ => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it has made no process")),
    }
}

/// Lets the worker that has reported begin.
fn let_begin(report: &OwnedFd) -> io::Result<()> {
    rustix::net::send(report, &[0], SendFlags::NOSIGNAL)?;
    Ok(())
}

/// The present parent of each tenant. Held by the keeper's main thread.
#[derive(Default)]
pub struct PhpParents {
    library: RefCell<Option<Arc<OwnedFd>>>,
    tenants: RefCell<HashMap<TenantName, Rc<ParentSlot>>>,
}

/// The parent of one tenant. The lock is held while one is started: all its workers wait for it.
#[derive(Default)]
pub struct ParentSlot {
    parent: tokio::sync::Mutex<Weak<PhpParent>>,
    failed: Cell<Option<Instant>>,
}

impl PhpParents {
    /// Returns the library, opened once.
    pub fn library(&self) -> io::Result<Arc<OwnedFd>> {
        if let Some(library) = &*self.library.borrow() {
            return Ok(Arc::clone(library));
        }
        let opened = Arc::new(open_library()?);
        Ok(Arc::clone(self.library.borrow_mut().insert(opened)))
    }

    /// Returns the tenant's parent for this basis. `start` starts one if there is none. `None` if
    /// that failed, now or a moment ago.
    pub async fn of<F>(
        &self,
        tenant: &TenantName,
        basis: &ParentBasis,
        start: impl FnOnce() -> F,
    ) -> Option<Rc<PhpParent>>
    where
        F: Future<Output = Result<Rc<PhpParent>, Fault>>,
    {
        let slot = self.slot(tenant);
        let mut present = slot.parent.lock().await;
        let is_usable = |parent: &Rc<PhpParent>| {
            parent.basis == *basis && !parent.channel.is_spent.load(Ordering::Relaxed)
        };
        if let Some(parent) = present.upgrade().filter(is_usable) {
            return Some(parent);
        }
        if slot.failed.get().is_some_and(|at| at.elapsed() < RETRY_AFTER) {
            return None;
        }
        match start().await {
            Ok(parent) => {
                *present = Rc::downgrade(&parent);
                Some(parent)
            }
            // The start of the worker says it.
            Err(fault) if fault.code == fault::NO_PHP => None,
            Err(fault) => {
                slot.failed.set(Some(Instant::now()));
                tracing::warn!(%tenant, "PHP workers start one by one, and share no opcache: {fault}");
                None
            }
        }
    }

    fn slot(&self, tenant: &TenantName) -> Rc<ParentSlot> {
        let mut tenants = self.tenants.borrow_mut();
        if let Some(slot) = tenants.get(tenant) {
            return Rc::clone(slot);
        }
        tenants.retain(|_, slot| slot.is_in_use());
        let slot = Rc::<ParentSlot>::default();
        tenants.insert(tenant.clone(), Rc::clone(&slot));
        slot
    }
}

impl ParentSlot {
    fn is_in_use(self: &Rc<Self>) -> bool {
        Rc::strong_count(self) > 1
            || self.failed.get().is_some_and(|at| at.elapsed() < RETRY_AFTER)
            || self.parent.try_lock().is_ok_and(|parent| parent.strong_count() > 0)
    }
}
