//! System calls that both ends need and that are unsafe to make: a mapping that another process
//! writes, and a descriptor that the runtime watches.
//!
//! Not here: starting processes and asking for rights (`keeper::sys`).

#![allow(
    unsafe_code,
    reason = "a mapping that another process writes, and a descriptor that the runtime watches"
)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

use nix::libc;
use rustix::fs::SealFlags;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

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

/// Registers a descriptor with the runtime of this thread.
pub fn watch<T: StableFd>(fd: T, interest: Interest) -> io::Result<AsyncFd<T>> {
    // SAFETY: `StableFd` guarantees what the function needs: `as_raw_fd` always gives the same,
    // open descriptor.
    Ok(unsafe { AsyncFd::register_with_interest(fd, interest) }?)
}
