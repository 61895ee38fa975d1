//! The birth of a sandbox: what it is made of before its order, sources opened with the node's rights, its ids, its init.
//!
//! Runs in a copy of the launcher, which becomes the sandbox' init. Until it enters the namespaces it has the node's
//! rights, and from then on none. If there is no order yet it makes what is the same for every sandbox, and waits for
//! one. Not here: the init's life (`init`), its files (`tree`), when it is forked (`launcher`), how many wait
//! (`super::Launcher`).

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Duration;

use nix::unistd::{Gid, Uid};
use rustix::process::{Pid, PidfdFlags, Signal};

use super::failure::{Failure, Step};
use super::kernel::{self, Alone, INIT};
use super::namespaces::Namespaces;
use super::order::{Birth, Told};
use super::{channel, init, tree};

/// What comes with an order.
struct Given {
    cgroup: Option<OwnedFd>,
    tasks: Vec<OwnedFd>,
}

/// Makes the sandbox once it is ordered, and tells the keeper where it cannot. The init tells where it can. The launcher begins no
/// other ahead until `begun` is closed.
pub fn run(alone: &Alone, keeper: &OwnedFd, begun: OwnedFd) -> u8 {
    let Ok(ahead) = begin(alone, keeper, begun) else { return 1 };
    // None: the keeper has gone, and wants none.
    let Ok(Some((birth, fds))) = channel::receive::<Birth>(keeper) else { return 1 };
    let Some(given) = take(&birth, fds) else { return 1 };
    match make(alone, keeper, &birth, &given, ahead) {
        // The descriptors of these frames are closed already.
        Ok(shm_device) => {
            let own = init::Own { uid: birth.uid, gid: birth.gid, shm_device };
            kernel::end(init::run(alone, keeper, own).into())
        }
        Err(Failure { step, errno }) => {
            // A keeper that does not listen any more has given the sandbox up.
            let _ = channel::send(keeper, &Told::Failed { step, errno }, &[]);
            1
        }
    }
}

/// What it has made ahead, if there is no order yet. What did not work is tried again for the order.
fn begin(alone: &Alone, keeper: &OwnedFd, begun: OwnedFd) -> io::Result<Option<Namespaces>> {
    rustix::thread::set_name(c"nagaya-birth")?;
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    // The launcher's connection with the keeper, and nobody else's: this one may live for long.
    kernel::close_all_but(&mut [0, 1, 2, keeper.as_raw_fd(), begun.as_raw_fd()])?;
    let _begun = begun;
    match channel::wait_readable(keeper, Duration::ZERO) {
        Err(error) if error.kind() == io::ErrorKind::TimedOut => Ok(Namespaces::make(alone).ok()),
        waited => waited.map(|()| None),
    }
}

fn take(birth: &Birth, fds: Vec<OwnedFd>) -> Option<Given> {
    let mut fds = fds.into_iter();
    let cgroup = if birth.has_cgroup { Some(fds.next()?) } else { None };
    Some(Given { cgroup, tasks: fds.collect() })
}

/// Returns in the init, when the sandbox is made, with the device of its `/dev/shm`.
fn make(
    alone: &Alone,
    keeper: &OwnedFd,
    birth: &Birth,
    given: &Given,
    ahead: Option<Namespaces>,
) -> Result<u64, Failure> {
    let namespaces = ahead.map_or_else(|| Namespaces::make(alone), Ok)?;
    let sources = tree::prepare(birth, &namespaces.root)?;
    namespaces.map(birth.uid, birth.gid)?;
    namespaces.enter(!birth.host_network).step("enter its namespaces")?;
    alone.go_on_as(INIT, given.cgroup.as_ref().map(AsFd::as_fd)).step("make its init")?;
    become_root(birth)?;
    let shm_device = tree::attach(&namespaces.root, &sources, birth)?;
    // To unmount takes a lock of the whole machine (`ending`). In a cell that is short of CPU time it would be kept for long, so
    // the cell is entered after that. On cgroup v2 the init is born there.
    tree::forget_node().step("let go of the node's /proc")?;
    enter_cell(given)?;
    answer(keeper, &namespaces.mount)?;
    // The keeper need not wait for this. Nothing of the node's stays open in an init.
    kernel::close_all_but(&mut [keeper.as_raw_fd()]).step("close what it does not need")?;
    // Closed just now, and so is what came with the order.
    std::mem::forget((namespaces, sources));
    Ok(shm_device)
}

// === In the init ===

fn become_root(birth: &Birth) -> Result<(), Failure> {
    let (uid, gid) = (Uid::from_raw(0), Gid::from_raw(0));
    nix::unistd::setgroups(&[]).step("leave the keeper's groups")?;
    nix::unistd::setresgid(gid, gid, gid).step("become its root")?;
    nix::unistd::setresuid(uid, uid, uid).step("become its root")?;
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).step("be bound to the launcher")?;
    rustix::thread::set_name(c"nagaya-init").step("name its init")?;
    rustix::process::setsid().step("leave the keeper's session")?;
    rustix::system::sethostname(birth.hostname.as_bytes()).step("name it")
}

fn enter_cell(given: &Given) -> Result<(), Failure> {
    for tasks in &given.tasks {
        rustix::io::write(tasks, b"0").step("enter its cell")?;
    }
    // After the way into the cell, so that the cell is all it can see.
    kernel::new_cgroup_namespace().step("make its cgroup namespace")
}

fn answer(keeper: &OwnedFd, mount_namespace: &OwnedFd) -> Result<(), Failure> {
    let own = rustix::process::pidfd_open(Pid::INIT, PidfdFlags::empty()).step("open its init")?;
    let flags = rustix::fs::OFlags::PATH | rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC;
    let root = rustix::fs::open("/", flags, rustix::fs::Mode::empty()).step("open its root")?;
    channel::send(keeper, &Told::Ready, &[own.as_fd(), root.as_fd(), mount_namespace.as_fd()])
        .step("answer the keeper")
}
