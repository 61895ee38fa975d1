//! nagaya's own requests to an instance, before anybody else's: whether it is ready, and warming it up. A `GET` of
//! HTTP/1.1 over a connection that serves nothing else, its answer read and thrown away.
//!
//! Not here: which paths (`start`), visitors' requests (`edge`).

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::io::Errno;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::timeout;

use crate::sys;

/// Of an answer so much is read, bytes: more than any page's start, so that the program comes to its end.
const ANSWER_MAX: usize = 4 << 20;

/// Longest first line of an answer, bytes.
const STATUS_LINE_MAX: usize = 512;

/// Asks for this path, and returns the status.
pub async fn get(socket: OwnedFd, host: &str, path: &str, within: Duration) -> io::Result<u16> {
    timeout(within, ask(socket, host, path)).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

async fn ask(socket: OwnedFd, host: &str, path: &str) -> io::Result<u16> {
    let socket = sys::watch(socket, Interest::READABLE | Interest::WRITABLE)?;
    let request = format!(
        "GET {path} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: nagaya\r\nAccept: */*\r\nConnection: close\r\n\r\n"
    );
    let mut left = request.as_bytes();
    while !left.is_empty() {
        let sent = turn(&socket, Interest::WRITABLE, |fd| rustix::io::write(fd, left)).await?;
        left = &left[sent..];
    }
    let mut buffer = vec![0; 16 * 1024];
    let (mut head, mut read) = (Vec::new(), 0);
    let mut status = None;
    loop {
        let len = turn(&socket, Interest::READABLE, |fd| rustix::io::read(fd, &mut buffer[..])).await?;
        if status.is_none() {
            head.extend_from_slice(&buffer[..len.min(STATUS_LINE_MAX)]);
            status = status_of(&head)?;
        }
        read += len;
        if len == 0 || read >= ANSWER_MAX {
            return status.ok_or_else(|| io::ErrorKind::UnexpectedEof.into());
        }
    }
}

async fn turn(
    socket: &AsyncFd<OwnedFd>,
    interest: Interest,
    mut act: impl FnMut(&OwnedFd) -> Result<usize, Errno>,
) -> io::Result<usize> {
    loop {
        let mut ready = socket.ready(interest).await?;
        if let Ok(done) = ready.try_io(|socket| Ok(act(socket.get_ref())?)) {
            return done;
        }
    }
}

/// Of `HTTP/1.1 200 OK`; None: the line is not whole yet.
fn status_of(head: &[u8]) -> io::Result<Option<u16>> {
    let Some(end) = head.iter().position(|byte| *byte == b'\n') else {
        return if head.len() < STATUS_LINE_MAX { Ok(None) } else { Err(io::ErrorKind::InvalidData.into()) };
    };
    let line = str::from_utf8(&head[..end]).ok().filter(|line| line.starts_with("HTTP/1."));
    let status = line.and_then(|line| line.split_ascii_whitespace().nth(1)?.parse().ok());
    status
        .filter(|status| (100..=599).contains(status))
        .map(Some)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "what it answers is not HTTP/1.1"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_line_is_read_in_parts() {
        assert_eq!(status_of(b"HTTP/1.1 20").unwrap(), None);
        assert_eq!(status_of(b"HTTP/1.1 204 No Content\r\nA: b").unwrap(), Some(204));
        assert_eq!(status_of(b"HTTP/1.0 500\r\n").unwrap(), Some(500));
        for bad in
            [&b"SSH-2.0-x\r\n"[..], b"HTTP/1.1 2x\n", b"HTTP/1.1 999 x\n", b"\n", &[b'x'; STATUS_LINE_MAX]]
        {
            assert!(status_of(bad).is_err(), "{}", bad.escape_ascii());
        }
    }

    fn asked(answer: &'static [u8]) -> (io::Result<u16>, String) {
        use std::io::{Read, Write};
        let (ours, mut theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let server = std::thread::spawn(move || {
            let mut seen = Vec::new();
            while !seen.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                theirs.read_exact(&mut byte).unwrap();
                seen.push(byte[0]);
            }
            // Whoever asked may not read all of it.
            let _ = theirs.write_all(answer);
            String::from_utf8(seen).unwrap()
        });
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let status = runtime.block_on(get(ours.into(), "a.test", "/up?x=1", Duration::from_secs(20)));
        (status, server.join().unwrap())
    }

    #[test]
    fn a_real_answer_is_read_to_its_end() {
        let (status, seen) = asked(b"HTTP/1.1 302 Found\r\nLocation: /x\r\n\r\nbody");
        assert_eq!(status.unwrap(), 302);
        assert!(seen.starts_with("GET /up?x=1 HTTP/1.1\r\nHost: a.test\r\n"), "{seen}");
        let (status, _) = asked(b"");
        assert_eq!(status.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
