//! Memory that is written while a tool restores the processes that have it.
//!
//! A child of the init writes it, in the sandbox' cell, which so pays for it. The tool maps it
//! meanwhile and needs nothing that is in it; the processes do. A tool lets go of them with a
//! system call, and that call waits for an answer until all is written (`restoring`). Where it
//! could not be, the call fails, and the tool ends what it has brought back. Not here: what is
//! written (`image/shared`).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nagaya_keeper_api::protocol::ProcessExit;
use nix::libc;
use rustix::fs::SeekFrom;

use super::kernel::{ForkOptions, SingleThreaded};
use super::order::{MemoryFill, ProcessRole, RunRequest};

/// For an error without one: EIO.
const NO_ERRNO: u8 = 5;

/// State of the writing for one tool.
#[derive(Debug)]
pub struct MemoryFilling {
    /// Number of the writing process.
    pid: u32,
    /// `None` while it still writes. The error is an errno.
    done: Option<Result<(), i32>>,
}

impl MemoryFilling {
    /// Returns `None` if there is nothing to write.
    pub fn start(alone: &SingleThreaded, run: &RunRequest, fds: &[OwnedFd]) -> io::Result<Option<Self>> {
        let ProcessRole::Tool { fills, .. } = &run.role else { return Ok(None) };
        if fills.is_empty() {
            return Ok(None);
        }
        let (pid, _) = alone.fork(&ForkOptions::default(), |_| {
            let Err(error) = fills.iter().try_for_each(|one| fill(one, run, fds)) else { return 0 };
            // An exit status has room for every errno.
            error.raw_os_error().and_then(|errno| u8::try_from(errno).ok()).unwrap_or(NO_ERRNO)
        })?;
        let pid = u32::try_from(pid).map_err(|_| io::ErrorKind::InvalidData)?;
        Ok(Some(Self { pid, done: None }))
    }

    /// A process has ended, which may have been the writing one.
    pub fn ended(&mut self, pid: u32, exit: &ProcessExit) {
        if pid == self.pid {
            self.done = Some(match exit.status {
                Some(0) => Ok(()),
                Some(errno) => Err(errno),
                // Only the kernel kills it: there is too little memory.
                None => Err(libc::ENOMEM),
            });
        }
    }

    pub fn is_done(&self) -> bool {
        self.done.is_some()
    }

    /// Returns the error of the writing, as far as it is known.
    pub fn errno(&self) -> Option<i32> {
        self.done?.err()
    }
}

/// Writes a file of memory.
fn fill(
    MemoryFill { memory, contents, parts }: &MemoryFill,
    run: &RunRequest,
    fds: &[OwnedFd],
) -> io::Result<()> {
    let by_number = |number: &i32| -> io::Result<BorrowedFd<'_>> {
        let found = run.fds.iter().zip(fds).find(|(one, _)| *one == number);
        Ok(found.ok_or(io::ErrorKind::InvalidInput)?.1.as_fd())
    };
    let (memory, contents) = (by_number(memory)?, by_number(contents)?);
    for (start, end) in parts {
        rustix::fs::seek(memory, SeekFrom::Start(*start))?;
        let mut left = end.saturating_sub(*start);
        while left > 0 {
            let most = usize::try_from(left).unwrap_or(usize::MAX);
            match rustix::fs::sendfile(memory, contents, None, most)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                written => left -= written as u64,
            }
        }
    }
    Ok(())
}
