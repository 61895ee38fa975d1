//! The first process of a tree: a child of the keeper's, or a sandboxed program watched by its own
//! init.
//!
//! Not here: the life of the tree (`process`), starting it (`spawn`, `instances::start`).

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use nagaya_keeper_api::protocol::ProcessExit;
use rustix::process::{Pid, Signal, pidfd_send_signal};

use crate::sandbox::{Sandbox, SandboxTask};
use crate::sys::{self, SpawnedChild};

#[derive(Debug)]
pub enum TreeRoot {
    Child(SpawnedChild),
    Sandboxed { sandbox: Arc<Sandbox>, task: SandboxTask },
}

impl TreeRoot {
    /// Returns its number on the node. `None` in a sandbox, where it has another and the keeper
    /// needs neither.
    pub fn pid(&self) -> Option<Pid> {
        match self {
            Self::Child(child) => Some(child.pid),
            Self::Sandboxed { .. } => None,
        }
    }

    /// Returns a descriptor that is readable once it has ended.
    pub fn end(&self) -> BorrowedFd<'_> {
        match self {
            Self::Child(child) => child.pidfd.as_fd(),
            Self::Sandboxed { task, .. } => task.end(),
        }
    }

    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        match self {
            Self::Child(child) => Ok(pidfd_send_signal(&child.pidfd, signal)?),
            Self::Sandboxed { task, .. } => task.signal(signal),
        }
    }

    /// Kills it, and in a sandbox everything else, too.
    pub fn kill(&self) -> io::Result<()> {
        match self {
            Self::Child(_) => self.signal(Signal::KILL),
            Self::Sandboxed { sandbox, .. } => sandbox.end(),
        }
    }

    /// Returns how it ended. `None` while it runs. Reported once.
    pub fn try_reap(&self) -> io::Result<Option<ProcessExit>> {
        match self {
            Self::Child(child) => sys::try_reap(child.pidfd.as_fd()),
            Self::Sandboxed { task, .. } => task.try_exit(),
        }
    }
}
