//! Calls of a checkpoint in a sandbox that its init answers. The kernel gives data about system
//! call filters only to root of the node. The init also decides whether the checkpoint may release
//! the processes.
//!
//! A checkpoint must read the filter of every process and suspend it. The kernel grants both to the
//! capability of the first user namespace alone (`seccomp_get_filter` and `check_ptrace_options` of
//! Linux). Root of a sandbox has none of those, but the filter is no secret: it is ours. So the
//! three calls are answered here. The filter stays in force while the checkpoint's code runs in the
//! process. It allows all that code does.
//!
//! A checkpoint releases the first process when it has written all it knows of them. Until that
//! call is answered everything is still stopped. So the files in `/dev/shm` are kept then: their
//! contents fit the memory of the processes. Not here: which calls are held
//! (`filter::of_checkpoints`), how the files are kept (`shm`).

use std::io;
use std::os::fd::OwnedFd;

use nix::libc;

use super::filter::{self, PTRACE_DETACH, PTRACE_SECCOMP_GET_FILTER, PTRACE_SETOPTIONS};
use super::kernel::{self, NotificationReply, SeccompNotification};
use super::shm;

/// State of a checkpoint that has stopped all processes.
#[derive(Debug)]
pub struct CheckpointStop {
    /// Directory of its image.
    image: OwnedFd,
    shm_device: u64,
    /// Filters that a restore has put on them beside their own. No image carries these.
    guards: u32,
    /// `None` while it has released no process yet.
    kept: Option<io::Result<()>>,
}

impl CheckpointStop {
    pub fn new(image: OwnedFd, shm_device: u64, guards: u32) -> Self {
        Self { image, shm_device, guards, kept: None }
    }

    /// Returns the result of keeping the files.
    pub fn kept(self) -> io::Result<()> {
        self.kept.unwrap_or_else(|| Err(io::Error::from_raw_os_error(libc::ESRCH)))
    }

    /// Resets the state: it attaches to its processes. A process that vanishes while it stops them
    /// all is released, too. That was not the end.
    fn begins(&mut self) {
        self.kept = None;
    }

    fn ends(&mut self) {
        self.kept.get_or_insert_with(|| shm::keep(&self.image, self.shm_device));
    }
}

/// Answers the next call that waits.
pub fn answer(questions: &OwnedFd, standstill: &mut CheckpointStop) -> io::Result<()> {
    kernel::answer_next(questions, |question| {
        if request(question) == PTRACE_DETACH {
            standstill.ends();
            return NotificationReply::GoOn;
        }
        standstill.begins();
        decide(question, standstill.guards).map_or_else(NotificationReply::Error, NotificationReply::Value)
    })
}

/// Only the lower half counts, as in the kernel.
fn request(question: &SeccompNotification) -> u32 {
    u32::try_from(question.args[0] & u64::from(u32::MAX)).unwrap_or(0)
}

fn decide(question: &SeccompNotification, guards: u32) -> Result<i64, libc::c_int> {
    let [_, process, index, data, ..] = question.args;
    match request(question) {
        // The only option that is held is that of suspending.
        PTRACE_SETOPTIONS => Ok(0),
        PTRACE_SECCOMP_GET_FILTER if index > 0 => Err(libc::ENOENT),
        PTRACE_SECCOMP_GET_FILTER => read_filter(question.pid, (process, guards), data),
        // Metadata: a kernel without them returns this error.
        _ => Err(libc::EIO),
    }
}

/// Returns the number of its instructions. Writes the instructions, if there is an address for
/// them.
fn read_filter(reader: i32, (process, guards): (u64, u32), address: u64) -> Result<i64, libc::c_int> {
    if filters(process) != Some(1 + guards) {
        // The program has put filters of its own on itself, which nobody here knows.
        return Err(libc::EACCES);
    }
    let program = filter::of_tenants();
    if address != 0 {
        kernel::write_memory(reader, address, &kernel::filter_bytes(&program)).map_err(|_| libc::EFAULT)?;
    }
    Ok(i64::try_from(program.len()).unwrap_or(0))
}

/// Returns how many filters a process is behind.
fn filters(process: u64) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("Seccomp_filters:"))?.trim().parse().ok()
}
