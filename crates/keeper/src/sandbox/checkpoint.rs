//! What the kernel tells only root of the node about filters of system calls, told to a checkpoint in a sandbox.
//!
//! A checkpoint must read the filter of every process and suspend it, and the kernel grants both to the capability of
//! the first user namespace alone (`seccomp_get_filter` and `check_ptrace_options` of Linux). Root of a sandbox has
//! none of those, but the filter is no secret: it is ours. So the three calls are answered here. The filter stays in
//! force while the checkpoint's code runs in the process; it allows all that code does. Not here: which calls ask
//! (`filter::of_checkpoints`).

use std::io;
use std::os::fd::OwnedFd;

use nix::libc;

use super::filter::{self, PTRACE_SECCOMP_GET_FILTER, PTRACE_SETOPTIONS};
use super::kernel::{self, Question};

/// Answers the next call that waits.
pub fn answer(questions: &OwnedFd) -> io::Result<()> {
    let Some(question) = kernel::next_question(questions)? else { return Ok(()) };
    match kernel::answer_question(questions, question, decide(&question)) {
        // Its caller was killed meanwhile.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        answered => answered,
    }
}

fn decide(question: &Question) -> Result<i64, libc::c_int> {
    // As the kernel does, of the request only the lower half.
    let [request, process, index, data, ..] = question.args;
    match u32::try_from(request & u64::from(u32::MAX)).unwrap_or(0) {
        // The one option that asks is that of suspending.
        PTRACE_SETOPTIONS => Ok(0),
        PTRACE_SECCOMP_GET_FILTER if index > 0 => Err(libc::ENOENT),
        PTRACE_SECCOMP_GET_FILTER => read_filter(question.pid, process, data),
        // Metadata; a kernel without them says so in this way.
        _ => Err(libc::EIO),
    }
}

/// The number of its instructions; and they themselves, if there is an address for them.
fn read_filter(reader: i32, process: u64, address: u64) -> Result<i64, libc::c_int> {
    if filters(process) != Some(1) {
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
