//! Memory that is written while a tool brings back the processes that have it.
//!
//! A child of the init writes it, in the sandbox' cell, which so pays for it. The tool maps it meanwhile and needs nothing that
//! is in it; the processes do. A tool lets go of them with a system call, and that call waits for an answer until all
//! is written (`restoring`). Where it could not be, the call fails, and the tool ends what it has brought back. Not here: what
//! is written (`image/shared`).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::libc;
use rustix::fs::SeekFrom;

use super::kernel::{Alone, Fork};
use super::order::{Fill, Role, Run};
use crate::protocol::Exit;

/// For an error without one: EIO.
const NO_ERRNO: u8 = 5;

/// What one tool's processes have in common.
#[derive(Debug)]
pub struct Filling {
    /// Of who writes.
    pid: u32,
    /// None: it still does. The error is an errno.
    done: Option<Result<(), i32>>,
}

impl Filling {
    /// None: there is nothing to write.
    pub fn start(alone: &Alone, run: &Run, fds: &[OwnedFd]) -> io::Result<Option<Self>> {
        let Role::Tool { fills, .. } = &run.role else { return Ok(None) };
        if fills.is_empty() {
            return Ok(None);
        }
        let (pid, _) = alone.fork(&Fork::default(), |_| {
            let Err(error) = fills.iter().try_for_each(|one| fill(one, run, fds)) else { return 0 };
            // An exit status has room for every errno there is.
            error.raw_os_error().and_then(|errno| u8::try_from(errno).ok()).unwrap_or(NO_ERRNO)
        })?;
        let pid = u32::try_from(pid).map_err(|_| io::ErrorKind::InvalidData)?;
        Ok(Some(Self { pid, done: None }))
    }

    /// A process has ended, which may have been the one that writes.
    pub fn ended(&mut self, pid: u32, exit: &Exit) {
        if pid == self.pid {
            self.done = Some(match exit.status {
                Some(0) => Ok(()),
                Some(errno) => Err(errno),
                // Nobody but the kernel kills it: there is too little memory.
                None => Err(libc::ENOMEM),
            });
        }
    }

    pub fn is_done(&self) -> bool {
        self.done.is_some()
    }

    /// What came of it, as far as it is known.
    pub fn errno(&self) -> Option<i32> {
        self.done?.err()
    }
}

/// Writes a file of memory.
fn fill(Fill { memory, contents, parts }: &Fill, run: &Run, fds: &[OwnedFd]) -> io::Result<()> {
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
