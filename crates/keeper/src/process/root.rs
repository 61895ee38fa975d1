//! The first process of a tree: a child of the keeper's, or a program in a sandbox, which its own init looks after.
//!
//! Not here: the life of the tree (`process`), starting it (`spawn`, `instances::start`).

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use rustix::process::{Pid, Signal, pidfd_send_signal};

use crate::protocol::Exit;
use crate::sandbox::{Sandbox, Task};
use crate::sys::{self, Child};

#[derive(Debug)]
pub enum Root {
    Child(Child),
    Sandboxed { sandbox: Arc<Sandbox>, task: Task },
}

impl Root {
    /// Its number on the node. None: in a sandbox, where it has another and the keeper needs neither.
    pub fn pid(&self) -> Option<Pid> {
        match self {
            Self::Child(child) => Some(child.pid),
            Self::Sandboxed { .. } => None,
        }
    }

    /// Readable once it has ended.
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

    /// Kills it, and in a sandbox everything else with it.
    pub fn kill(&self) -> io::Result<()> {
        match self {
            Self::Child(_) => self.signal(Signal::KILL),
            Self::Sandboxed { sandbox, .. } => sandbox.end(),
        }
    }

    /// How it ended; None: it runs. Said once.
    pub fn try_reap(&self) -> io::Result<Option<Exit>> {
        match self {
            Self::Child(child) => sys::try_reap(child.pidfd.as_fd()),
            Self::Sandboxed { task, .. } => task.try_exit(),
        }
    }
}
