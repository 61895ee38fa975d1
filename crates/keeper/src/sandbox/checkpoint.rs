//! What a checkpoint in a sandbox asks: what the kernel tells only root of the node about filters of system calls, and
//! whether it may let go of the processes.
//!
//! A checkpoint must read the filter of every process and suspend it, and the kernel grants both to the capability of
//! the first user namespace alone (`seccomp_get_filter` and `check_ptrace_options` of Linux). Root of a sandbox has
//! none of those, but the filter is no secret: it is ours. So the three calls are answered here. The filter stays in
//! force while the checkpoint's code runs in the process; it allows all that code does.
//!
//! A checkpoint lets go of the first process when it has written all it knows of them. Until it is answered everything still
//! stands still, so that is when the files in `/dev/shm` are kept: what is in them fits what the processes remember. Not here:
//! which calls ask (`filter::of_checkpoints`), how they are kept (`shm`).

use std::io;
use std::os::fd::OwnedFd;

use nix::libc;

use super::filter::{self, PTRACE_DETACH, PTRACE_SECCOMP_GET_FILTER, PTRACE_SETOPTIONS};
use super::kernel::{self, Answer, Question};
use super::shm;

/// What is done while a checkpoint has all processes stand still.
#[derive(Debug)]
pub struct Standstill {
    /// Directory of its image.
    image: OwnedFd,
    shm_device: u64,
    /// Filters that a restore has put on them beside their own. No image carries these.
    guards: u32,
    /// None: it has not let go of any process yet.
    kept: Option<io::Result<()>>,
}

impl Standstill {
    pub fn new(image: OwnedFd, shm_device: u64, guards: u32) -> Self {
        Self { image, shm_device, guards, kept: None }
    }

    /// What came of it.
    pub fn kept(self) -> io::Result<()> {
        self.kept.unwrap_or_else(|| Err(io::Error::from_raw_os_error(libc::ESRCH)))
    }

    /// It looks at its processes. Who vanishes while it stops them all is let go of; that was not the end.
    fn begins(&mut self) {
        self.kept = None;
    }

    fn ends(&mut self) {
        self.kept.get_or_insert_with(|| shm::keep(&self.image, self.shm_device));
    }
}

/// Answers the next call that waits.
pub fn answer(questions: &OwnedFd, standstill: &mut Standstill) -> io::Result<()> {
    kernel::answer_next(questions, |question| {
        if request(question) == PTRACE_DETACH {
            standstill.ends();
            return Answer::GoOn;
        }
        standstill.begins();
        decide(question, standstill.guards).map_or_else(Answer::Error, Answer::Value)
    })
}

/// As the kernel does, only the lower half.
fn request(question: &Question) -> u32 {
    u32::try_from(question.args[0] & u64::from(u32::MAX)).unwrap_or(0)
}

fn decide(question: &Question, guards: u32) -> Result<i64, libc::c_int> {
    let [_, process, index, data, ..] = question.args;
    match request(question) {
        // The one option that asks is that of suspending.
        PTRACE_SETOPTIONS => Ok(0),
        PTRACE_SECCOMP_GET_FILTER if index > 0 => Err(libc::ENOENT),
        PTRACE_SECCOMP_GET_FILTER => read_filter(question.pid, (process, guards), data),
        // Metadata; a kernel without them says so in this way.
        _ => Err(libc::EIO),
    }
}

/// The number of its instructions; and they themselves, if there is an address for them.
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

/// How many filters a process is behind.
fn filters(process: u64) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("Seccomp_filters:"))?.trim().parse().ok()
}
