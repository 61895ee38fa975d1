//! Opening a directory by its handle (open_by_handle_at(2)).
//!
//! It needs `CAP_DAC_READ_SEARCH`, and a descriptor of the same file system. Invariant: handles
//! come from the kernel's events alone. Not here: what is done with the directory.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};

use nix::libc;

use crate::change_event::FileHandle;

/// Length of a handle's head: its length and its kind.
const HEAD_WORDS: usize = 2;

/// Opens a directory as a place (`O_PATH`). An error `ESTALE` says that it is gone.
pub fn open_directory(mount: BorrowedFd<'_>, handle: FileHandle<'_>) -> io::Result<OwnedFd> {
    let mut words = vec![0_u32; HEAD_WORDS + handle.bytes.len().div_ceil(4)];
    words[0] = u32::try_from(handle.bytes.len()).map_err(io::Error::other)?;
    words[1] = handle.kind.cast_unsigned();
    for (word, bytes) in words[HEAD_WORDS..].iter_mut().zip(handle.bytes.chunks(4)) {
        let mut whole = [0; 4];
        whole[..bytes.len()].copy_from_slice(bytes);
        *word = u32::from_ne_bytes(whole);
    }
    let flags = libc::O_PATH | libc::O_DIRECTORY | libc::O_CLOEXEC;
    // SAFETY: the words are a `struct file_handle` with as many bytes as its head says, aligned as
    // that. The kernel reads them and keeps no pointer.
    let fd = unsafe { libc::open_by_handle_at(mount.as_raw_fd(), words.as_mut_ptr().cast(), flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor, and nobody else has its number.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
