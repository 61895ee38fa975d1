//! The birth of a sandbox: its preparation before its order, sources opened with the node's rights,
//! its ids, its init.
//!
//! Runs in a copy of the launcher, which becomes the sandbox' init. Until it enters the namespaces
//! it has the node's rights, and from then on none. Without an order it makes the parts that are
//! the same for every sandbox, and waits for one. Not here: the init's life (`init`), its files
//! (`tree`), when it is forked (`launcher`), how many wait (`super::Launcher`).

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Duration;

use nix::unistd::{Gid, Uid};
use rustix::process::{Pid, PidfdFlags, Signal};

use super::failure::{StepContext, StepFailure};
use super::kernel::{self, INIT, SingleThreaded};
use super::namespaces::NamespaceFds;
use super::order::{InitReply, SandboxBirth};
use super::{channel, init, tree};

/// Descriptors that come with an order.
struct BirthFds {
    cgroup: Option<OwnedFd>,
    tasks: Vec<OwnedFd>,
}

/// Makes the sandbox once it is ordered. Notifies the keeper of a failure; the init notifies it of
/// success. The launcher begins no other ahead until `begun` is closed.
pub fn run(alone: &SingleThreaded, keeper: &OwnedFd, begun: OwnedFd) -> u8 {
    let Ok(ahead) = begin(alone, keeper, begun) else { return 1 };
    // `None`: the keeper has gone, and needs none.
    let Ok(Some((birth, fds))) = channel::receive::<SandboxBirth>(keeper) else { return 1 };
    let Some(given) = take(&birth, fds) else { return 1 };
    match make(alone, keeper, &birth, &given, ahead) {
        // The descriptors of these frames are closed already.
        Ok(shm_device) => {
            let own = init::InitIdentity { uid: birth.uid, gid: birth.gid, shm_device };
            kernel::end(init::run(alone, keeper, own).into())
        }
        Err(StepFailure { step, errno }) => {
            // A keeper that no longer listens has given the sandbox up.
            let _ = channel::send(keeper, &InitReply::Failed { step, errno }, &[]);
            1
        }
    }
}

/// Returns the parts made ahead, if there is no order yet. A failed step is repeated for the order.
fn begin(alone: &SingleThreaded, keeper: &OwnedFd, begun: OwnedFd) -> io::Result<Option<NamespaceFds>> {
    rustix::thread::set_name(c"nagaya-birth")?;
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    // Only the launcher's connection with the keeper: this process may live for long.
    kernel::close_all_but(&mut [0, 1, 2, keeper.as_raw_fd(), begun.as_raw_fd()])?;
    let _begun = begun;
    match channel::wait_readable(keeper, Duration::ZERO) {
        Err(error) if error.kind() == io::ErrorKind::TimedOut => Ok(NamespaceFds::make(alone).ok()),
        waited => waited.map(|()| None),
    }
}

fn take(birth: &SandboxBirth, fds: Vec<OwnedFd>) -> Option<BirthFds> {
    let mut fds = fds.into_iter();
    let cgroup = if birth.has_cgroup { Some(fds.next()?) } else { None };
    Some(BirthFds { cgroup, tasks: fds.collect() })
}

/// Returns in the init, when the sandbox is made, with the device of its `/dev/shm`.
fn make(
    alone: &SingleThreaded,
    keeper: &OwnedFd,
    birth: &SandboxBirth,
    given: &BirthFds,
    ahead: Option<NamespaceFds>,
) -> Result<u64, StepFailure> {
    let namespaces = ahead.map_or_else(|| NamespaceFds::make(alone), Ok)?;
    let sources = tree::prepare(birth, &namespaces.root)?;
    namespaces.map(birth.uid, birth.gid)?;
    namespaces.enter(!birth.host_network).step("enter its namespaces")?;
    alone.go_on_as(INIT, given.cgroup.as_ref().map(AsFd::as_fd)).step("make its init")?;
    become_root(birth)?;
    let shm_device = tree::attach(&namespaces.root, &sources, birth)?;
    // Unmounting takes a lock of the whole machine (`ending`). In a cell that is short of CPU time
    // it would be held for long. So the cell is entered after that. On cgroup v2 the init is born
    // there.
    tree::forget_node().step("let go of the node's /proc")?;
    enter_cell(given)?;
    answer(keeper, &namespaces.mount)?;
    // The keeper need not wait for this. Nothing of the node's stays open in an init.
    kernel::close_all_but(&mut [keeper.as_raw_fd()]).step("close what it does not need")?;
    // Closed just now, and so are the descriptors of the order.
    std::mem::forget((namespaces, sources));
    Ok(shm_device)
}

// === In the init ===

fn become_root(birth: &SandboxBirth) -> Result<(), StepFailure> {
    let (uid, gid) = (Uid::from_raw(0), Gid::from_raw(0));
    nix::unistd::setgroups(&[]).step("leave the keeper's groups")?;
    nix::unistd::setresgid(gid, gid, gid).step("become its root")?;
    nix::unistd::setresuid(uid, uid, uid).step("become its root")?;
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).step("be bound to the launcher")?;
    rustix::thread::set_name(c"nagaya-init").step("name its init")?;
    rustix::process::setsid().step("leave the keeper's session")?;
    rustix::system::sethostname(birth.hostname.as_bytes()).step("name it")
}

fn enter_cell(given: &BirthFds) -> Result<(), StepFailure> {
    for tasks in &given.tasks {
        rustix::io::write(tasks, b"0").step("enter its cell")?;
    }
    // After entering the cell, so that the cell is all it can see.
    kernel::new_cgroup_namespace().step("make its cgroup namespace")
}

fn answer(keeper: &OwnedFd, mount_namespace: &OwnedFd) -> Result<(), StepFailure> {
    let own = rustix::process::pidfd_open(Pid::INIT, PidfdFlags::empty()).step("open its init")?;
    let flags = rustix::fs::OFlags::PATH | rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC;
    let root = rustix::fs::open("/", flags, rustix::fs::Mode::empty()).step("open its root")?;
    channel::send(keeper, &InitReply::Ready, &[own.as_fd(), root.as_fd(), mount_namespace.as_fd()])
        .step("answer the keeper")
}
