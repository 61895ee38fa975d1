//! The birth of a sandbox: sources opened with the node's rights, an init in namespaces of its own, its ids.
//!
//! Runs in a copy of the launcher that ends when the init goes on alone. Not here: the init's life (`init`), its files
//! (`tree`).

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use nix::unistd::{Gid, Uid};
use rustix::process::{Pid, PidfdFlags, Signal};

use super::failure::{Failure, Step};
use super::kernel::{self, Alone, CLONE_PARENT, Fork, NETWORK, SANDBOX_NAMESPACES};
use super::order::{Birth, Told};
use super::{channel, init, root_id, tree};

/// What an order brings along.
struct Given {
    keeper: OwnedFd,
    cgroup: Option<OwnedFd>,
    tasks: Vec<OwnedFd>,
}

/// Makes the sandbox, and tells the keeper where it cannot. The init tells where it can.
pub fn run(alone: &Alone, birth: &Birth, fds: Vec<OwnedFd>) -> u8 {
    let Some(given) = take(birth, fds) else { return 1 };
    match make(alone, birth, &given) {
        Ok(()) => 0,
        Err(failure) => {
            tell(&given.keeper, failure);
            1
        }
    }
}

fn take(birth: &Birth, fds: Vec<OwnedFd>) -> Option<Given> {
    let mut fds = fds.into_iter();
    let keeper = fds.next()?;
    let cgroup = if birth.has_cgroup { Some(fds.next()?) } else { None };
    Some(Given { keeper, cgroup, tasks: fds.collect() })
}

fn tell(keeper: &OwnedFd, Failure { step, errno }: Failure) {
    // A keeper that does not listen any more has given the sandbox up.
    let _ = channel::send(keeper, &Told::Failed { step, errno }, &[]);
}

fn make(alone: &Alone, birth: &Birth, given: &Given) -> Result<(), Failure> {
    let prepared = tree::prepare(birth)?;
    let (go, wait) = channel::pair().step("make a connection with its init")?;
    let how = Fork {
        flags: if birth.host_network { SANDBOX_NAMESPACES & !NETWORK } else { SANDBOX_NAMESPACES }
            | CLONE_PARENT,
        pid: None,
        cgroup: given.cgroup.as_ref().map(AsFd::as_fd),
    };
    let (pid, _pidfd) = alone
        .fork(&how, |alone| {
            let born = begin(birth, given, &prepared, wait).and_then(|()| forget_all_but(&given.keeper));
            match born {
                Ok(()) => init::run(alone, &given.keeper, birth.uid, birth.gid),
                Err(failure) => {
                    tell(&given.keeper, failure);
                    1
                }
            }
        })
        .step("make its namespaces")?;
    map(pid, "uid_map", birth.uid).step("map its uids")?;
    map(pid, "gid_map", birth.gid).step("map its gids")?;
    channel::send(&go, &(), &[]).step("let its init go on")
}

/// Two ids are all it has: its own root, which owns nothing on the node, and the tenant's, the same number as outside.
fn map(pid: i32, file: &str, id: u32) -> io::Result<()> {
    std::fs::write(format!("/proc/{pid}/{file}"), format!("0 {} 1\n{id} {id} 1\n", root_id(id)))
}

// === In the init ===

fn begin(birth: &Birth, given: &Given, prepared: &tree::Prepared, wait: OwnedFd) -> Result<(), Failure> {
    channel::receive::<()>(&wait).step("wait for its ids")?;
    for tasks in &given.tasks {
        rustix::io::write(tasks, b"0").step("enter its cell")?;
    }
    // After the way into the cell, so that the cell is all it can see.
    kernel::new_cgroup_namespace().step("make its cgroup namespace")?;
    let (uid, gid) = (Uid::from_raw(0), Gid::from_raw(0));
    nix::unistd::setgroups(&[]).step("leave the keeper's groups")?;
    nix::unistd::setresgid(gid, gid, gid).step("become its root")?;
    nix::unistd::setresuid(uid, uid, uid).step("become its root")?;
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).step("be bound to the launcher")?;
    rustix::thread::set_name(c"nagaya-init").step("name its init")?;
    rustix::process::setsid().step("leave the keeper's session")?;
    rustix::system::sethostname(birth.hostname.as_bytes()).step("name it")?;
    if !birth.host_network {
        kernel::raise_loopback().step("bring its loopback up")?;
    }
    tree::attach(prepared, birth.uid, birth.gid, birth.shm_bytes_max)?;
    let own = rustix::process::pidfd_open(Pid::INIT, PidfdFlags::empty()).step("open its init")?;
    let flags = rustix::fs::OFlags::PATH | rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC;
    let root = rustix::fs::open("/", flags, rustix::fs::Mode::empty()).step("open its root")?;
    channel::send(&given.keeper, &Told::Ready, &[own.as_fd(), root.as_fd()]).step("answer the keeper")
}

/// Nothing of the node's stays open in an init.
fn forget_all_but(keeper: &OwnedFd) -> Result<(), Failure> {
    kernel::close_all_but(&mut [keeper.as_raw_fd()]).step("close what it does not need")
}
