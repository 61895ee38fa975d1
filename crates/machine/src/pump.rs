//! Carries FUSE's messages between the guest's port and the server of its files.
//!
//! The port is a stream of bytes, and the server's library wants one message at a time, as from
//! `/dev/fuse`. Each message begins with its length. A guest that sends a wrong one is not served
//! any more. Not here: the files (`share`).

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use fuser::{Config, Session, SessionACL};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};

use crate::share::{SharedFiles, TRANSFER_LEN_MAX};

/// Length of the head of a request: the shortest message of a guest (`struct fuse_in_header`).
const HEAD_LEN: usize = 40;

/// Maximum length of a message: a write or a read, and what is before its data.
const MESSAGE_LEN_MAX: usize = TRANSFER_LEN_MAX as usize + 4096;

/// Serves everything beneath `root` to the guest at this port, until the port is closed.
pub fn serve(port: UnixStream, root: &Path) -> io::Result<()> {
    let files = SharedFiles::open(root)?;
    let flags = SocketFlags::CLOEXEC;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    let (requests, replies) = (ours.try_clone()?, ours);
    let (incoming, outgoing) = (port.try_clone()?, port);
    let is_over = Arc::new(AtomicBool::new(false));
    let ended = Arc::clone(&is_over);
    thread::Builder::new()
        .name("file-requests".into())
        .spawn(move || take_requests(incoming, &requests, &ended))?;
    thread::Builder::new().name("file-replies".into()).spawn(move || send_replies(&replies, outgoing))?;
    thread::Builder::new().name("files".into()).spawn(move || {
        let session = Session::from_fd(files, theirs, SessionACL::All, Config::default());
        let ended = session.and_then(Session::run);
        // The end of the port is not told from a wrong message.
        if let Err(error) = ended
            && !is_over.load(Ordering::Relaxed)
        {
            eprintln!("the guest's files are not served any more: {error}");
        }
    })?;
    Ok(())
}

/// Passes requests on, each as one message, until the guest sends no more.
fn take_requests(mut port: impl Read, to: &OwnedFd, is_over: &AtomicBool) {
    let mut message = vec![0; MESSAGE_LEN_MAX];
    let error = loop {
        match read_message(&mut port, &mut message) {
            Ok(len) if send(to, &message[..len], SendFlags::NOSIGNAL).is_ok() => {}
            Ok(_) => break None,
            Err(error) => break Some(error),
        }
    };
    let is_end = |error: &io::Error| error.kind() != io::ErrorKind::InvalidData;
    is_over.store(error.as_ref().is_none_or(is_end), Ordering::Relaxed);
    let _ = rustix::net::shutdown(to, rustix::net::Shutdown::Both);
}

/// Reads one message. Returns its length.
fn read_message(port: &mut impl Read, message: &mut [u8]) -> io::Result<usize> {
    port.read_exact(&mut message[..4])?;
    let len = message.first_chunk().copied().map_or(0, u32::from_le_bytes) as usize;
    if !(HEAD_LEN..=message.len()).contains(&len) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("a request of {len} bytes")));
    }
    port.read_exact(&mut message[4..len])?;
    Ok(len)
}

fn send_replies(from: &OwnedFd, mut port: impl Write) {
    let mut message = vec![0; MESSAGE_LEN_MAX];
    while let Ok((len @ 1.., _)) = recv(from, &mut message[..], RecvFlags::empty()) {
        if port.write_all(&message[..len]).is_err() {
            break;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(len: u32) -> Vec<u8> {
        let mut message = len.to_le_bytes().to_vec();
        message.resize((len as usize).max(4), 7);
        message
    }

    #[test]
    fn messages_are_found_in_a_stream_and_wrong_ones_end_it() {
        let stream = [message(40), message(100), message(MESSAGE_LEN_MAX as u32)].concat();
        let (mut port, mut buffer) = (&stream[..], vec![0; MESSAGE_LEN_MAX]);
        let lengths: Vec<usize> = std::iter::from_fn(|| read_message(&mut port, &mut buffer).ok()).collect();
        assert_eq!(lengths, [40, 100, MESSAGE_LEN_MAX]);
        for wrong in [0, 3, 39, MESSAGE_LEN_MAX as u32 + 1, u32::MAX] {
            let stream = wrong.to_le_bytes();
            assert!(read_message(&mut &stream[..], &mut buffer).is_err(), "{wrong}");
        }
        assert!(read_message(&mut &message(60)[..50], &mut buffer).is_err(), "it ends too early");
    }
}
