//! The namespaces of a sandbox before it has a process: user, mount, network, IPC and UTS, as
//! descriptors.
//!
//! They are the same for every order: nothing in them names the sandbox' owner yet, and each is
//! used once. A helper is born into them, enters the root file system in there, and ends when they
//! are held here. Not here: the sandbox' own pid and cgroup namespaces, which begin with its init
//! (`birth`), its files (`tree`).

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::{CWD, Mode, OFlags};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::failure::{StepContext, StepFailure};
use super::ids::root_id;
use super::kernel::{self, ForkOptions, NAMESPACES, SingleThreaded};
use super::order::InitReply;
use super::{channel, tree};

#[derive(Debug)]
pub struct NamespaceFds {
    /// The root directory of the mount namespace, still accessible to processes with the node's
    /// rights.
    pub root: OwnedFd,
    user: OwnedFd,
    pub mount: OwnedFd,
    network: OwnedFd,
    ipc: OwnedFd,
    uts: OwnedFd,
    uid_map: File,
    gid_map: File,
}

impl NamespaceFds {
    pub fn make(alone: &SingleThreaded) -> Result<Self, StepFailure> {
        let skeleton = tree::skeleton().step("make its root file system")?;
        let (ours, theirs) = channel::pair().step("make a connection with its namespaces")?;
        let how = ForkOptions { flags: NAMESPACES, ..ForkOptions::default() };
        let (pid, _pidfd) = alone.fork(&how, |_| hold(&skeleton, &theirs)).step("make its namespaces")?;
        drop(theirs);
        match channel::receive(&ours).step("make its namespaces")? {
            Some((InitReply::Ready, _)) => Self::open(pid, skeleton.root).step("open its namespaces"),
            Some((InitReply::Failed { step, errno }, _)) => Err(StepFailure { step, errno }),
            _ => Err(io::Error::from(io::ErrorKind::BrokenPipe)).step("make its namespaces"),
        }
    }

    /// Opens those of the helper, which lives until the connection with it is closed.
    fn open(pid: i32, root: OwnedFd) -> io::Result<Self> {
        let open = |name: &str| {
            let flags = OFlags::RDONLY | OFlags::CLOEXEC;
            Ok::<_, io::Error>(rustix::fs::openat(
                CWD,
                format!("/proc/{pid}/ns/{name}"),
                flags,
                Mode::empty(),
            )?)
        };
        // Writing to these files needs rights on the node, when they are opened, too.
        let map = |name: &str| File::options().write(true).open(format!("/proc/{pid}/{name}"));
        Ok(Self {
            root,
            user: open("user")?,
            mount: open("mnt")?,
            network: open("net")?,
            ipc: open("ipc")?,
            uts: open("uts")?,
            uid_map: map("uid_map")?,
            gid_map: map("gid_map")?,
        })
    }

    /// Maps the only two ids it has. Its own root owns nothing on the node, and the tenant has the
    /// same number as outside.
    pub fn map(&self, uid: u32, gid: u32) -> Result<(), StepFailure> {
        let write = |file: &File, id: u32| {
            let lines = format!("0 {} 1\n{id} {id} 1\n", root_id(id));
            rustix::io::write(file, lines.as_bytes())
        };
        write(&self.uid_map, uid).step("map its uids")?;
        write(&self.gid_map, gid).step("map its gids")?;
        Ok(())
    }

    /// Enters them for good: from here on this process has no right on the node.
    pub fn enter(&self, has_network: bool) -> io::Result<()> {
        let enter = |fd: &OwnedFd, kind| move_into_link_name_space(fd.as_fd(), Some(kind));
        // First, because it gives the rights to enter the others.
        enter(&self.user, LinkNameSpaceType::User)?;
        enter(&self.mount, LinkNameSpaceType::Mount)?;
        enter(&self.ipc, LinkNameSpaceType::InterProcessCommunication)?;
        enter(&self.uts, LinkNameSpaceType::HostNameAndNISDomainName)?;
        if has_network {
            enter(&self.network, LinkNameSpaceType::Network)?;
        }
        Ok(())
    }
}

/// The helper's life: does the steps that need the inside and reports them. It keeps the namespaces
/// until the sandbox' maker has opened them, or has gone.
fn hold(skeleton: &tree::RootSkeleton, maker: &OwnedFd) -> u8 {
    let done = kernel::raise_loopback()
        .step("bring its loopback up")
        .and_then(|()| tree::enter(skeleton).step("enter its root"));
    let told = match done {
        Ok(()) => InitReply::Ready,
        Err(StepFailure { step, errno }) => InitReply::Failed { step, errno },
    };
    // The other end, too: otherwise this process would wait for itself.
    let alone = kernel::close_all_but(&mut [maker.as_raw_fd()]);
    let told = alone.and_then(|()| channel::send(maker, &told, &[]));
    u8::from(told.and_then(|()| channel::receive::<()>(maker)).is_err())
}
