//! System calls that both ends need and that are unsafe to make: a mapping that another process
//! writes, a descriptor that the runtime watches, and bytes received into fresh memory.
//!
//! Not here: starting processes and asking for rights (`keeper::sys`).

#![allow(
    unsafe_code,
    reason = "a mapping that another process writes, a descriptor that the runtime watches, and bytes received into fresh memory"
)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

use nix::libc;
use rustix::fs::SealFlags;
use rustix::net::RecvFlags;
use tokio::io::unix::AsyncFd;
use tokio::io::{Interest, ReadBuf};

/// Descriptors that stay open and the same while the value lives.
pub trait StableFd: AsRawFd {}
impl StableFd for OwnedFd {}
impl StableFd for std::sync::Arc<OwnedFd> {}
impl StableFd for BorrowedFd<'_> {}

/// Numbers in a file in memory, which another process writes.
#[derive(Debug)]
pub struct MappedCounts {
    first: ptr::NonNull<AtomicU32>,
    len: usize,
}

// SAFETY: what it points to is mapped for reading as long as it lives, and read as atomics.
unsafe impl Send for MappedCounts {}
// SAFETY: as above.
unsafe impl Sync for MappedCounts {}

impl MappedCounts {
    /// Fails for a file with fewer numbers, and for one that may become shorter.
    pub fn new(file: &OwnedFd, len: usize) -> io::Result<Self> {
        let bytes = len * size_of::<AtomicU32>();
        let has = u64::try_from(rustix::fs::fstat(file)?.st_size).unwrap_or(0);
        if has < bytes as u64 || !rustix::fs::fcntl_get_seals(file)?.contains(SealFlags::SHRINK) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        // SAFETY: a new mapping at a place that the kernel chooses, of a file that has all of it
        // and never gets shorter.
        let mapped = unsafe {
            libc::mmap(ptr::null_mut(), bytes, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0)
        };
        if mapped == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let first = ptr::NonNull::new(mapped.cast()).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Self { first, len })
    }

    pub fn get(&self, at: usize) -> Option<u32> {
        // SAFETY: it is within what is mapped, which begins at a page and so is aligned.
        (at < self.len).then(|| unsafe { self.first.add(at).as_ref() }.load(Ordering::Acquire))
    }
}

impl Drop for MappedCounts {
    fn drop(&mut self) {
        // SAFETY: exactly what was mapped, and nobody reads it any more.
        unsafe { libc::munmap(self.first.as_ptr().cast(), self.len * size_of::<AtomicU32>()) };
    }
}

/// Receives available bytes into the rest of a buffer, and returns their number.
pub fn receive_into(socket: impl AsFd, into: &mut ReadBuf<'_>) -> io::Result<usize> {
    // SAFETY: the kernel only writes to it, so no byte becomes uninitialised.
    let rest = unsafe { into.unfilled_mut() };
    let ((received, _), _) = rustix::net::recv(socket, rest, RecvFlags::DONTWAIT)?;
    let len = received.len();
    // SAFETY: the kernel has written these bytes, the first of the rest.
    unsafe { into.assume_init(len) };
    into.advance(len);
    Ok(len)
}

/// Registers a descriptor with the runtime of this thread.
pub fn watch<T: StableFd>(fd: T, interest: Interest) -> io::Result<AsyncFd<T>> {
    // SAFETY: `StableFd` guarantees what the function needs: `as_raw_fd` always gives the same,
    // open descriptor.
    Ok(unsafe { AsyncFd::register_with_interest(fd, interest) }?)
}
