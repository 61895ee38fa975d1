//! nagaya's own requests to an instance, before anybody else's: whether it is ready, and warming it up. A `GET` of
//! HTTP/1.1, or of a script by FastCGI, over a connection that serves nothing else, its answer read and thrown away.
//!
//! Not here: which paths (`start`), visitors' requests (`edge`), FastCGI's records (`fastcgi`).

mod scripts;

use std::os::fd::OwnedFd;
use std::time::Duration;
use std::{fmt, io};

use bytes::BytesMut;
use nagaya_cmdb::record::App;
use nagaya_cmdb::{Site, Tenant};
use rustix::io::Errno;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::timeout;

use self::scripts::Scripts;
use crate::fastcgi::{Decoder, END_OF_BODY, Event};
use crate::fault::Fault;
use crate::sys;

/// Of an answer so much is read, bytes: more than any page's start, so that the program comes to its end.
const ANSWER_MAX: usize = 4 << 20;

/// Longest first line of an answer, bytes.
const STATUS_LINE_MAX: usize = 512;

/// Bytes of the beginning of an answer that are kept, and characters of a line of it that are repeated.
const BEGINNING_MAX: usize = 4 * 1024;
const LINE_SHOWN_MAX: usize = 120;

/// Longest head of a script's answer, bytes, in which its status is looked for.
const HEAD_MAX: usize = 64 * 1024;

/// What an application said.
#[derive(Debug, PartialEq, Eq)]
pub struct Answer {
    pub status: u16,
    /// The first line of the body that says something; empty without one.
    line: String,
}

impl Answer {
    fn new(status: u16, beginning: &[u8]) -> Self {
        let text = String::from_utf8_lossy(beginning);
        let body =
            text.split_once("\r\n\r\n").or_else(|| text.split_once("\n\n")).map_or("", |(_, body)| body);
        let line = body.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default();
        let shown = line.chars().filter(|c| !c.is_control()).take(LINE_SHOWN_MAX);
        Self { status, line: shown.collect() }
    }
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line.as_str() {
            "" => write!(f, "status {} without a text", self.status),
            line => write!(f, "status {}, which begins '{line}'", self.status),
        }
    }
}

/// Who is asked.
pub struct Asked {
    host: String,
    /// None: it speaks HTTP.
    scripts: Option<Scripts>,
}

impl Asked {
    pub fn of(site: &Site, tenant: &Tenant, app: &App) -> Result<Self, Fault> {
        // A name the application is known by. One that stands for many stands for none here.
        let plain = site.hosts.iter().map(|host| host.as_str()).find(|host| !host.contains('*'));
        let scripts = app.files.as_deref().map(|files| Scripts::of(site, tenant, files)).transpose()?;
        Ok(Self { host: plain.unwrap_or("localhost").to_owned(), scripts })
    }

    /// Asks for this path.
    pub async fn get(&self, socket: OwnedFd, path: &str, within: Duration) -> io::Result<Answer> {
        let asked = async {
            let socket = sys::watch(socket, Interest::READABLE | Interest::WRITABLE)?;
            match &self.scripts {
                None => ask(&socket, &self.host, path).await,
                Some(scripts) => run(&socket, scripts, &self.host, path).await,
            }
        };
        timeout(within, asked).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    }
}

async fn send(socket: &AsyncFd<OwnedFd>, mut left: &[u8]) -> io::Result<()> {
    while !left.is_empty() {
        let sent = turn(socket, Interest::WRITABLE, |fd| rustix::io::write(fd, left)).await?;
        left = &left[sent..];
    }
    Ok(())
}

async fn run(socket: &AsyncFd<OwnedFd>, scripts: &Scripts, host: &str, path: &str) -> io::Result<Answer> {
    let mut request = scripts.opening(host, path)?;
    request.extend_from_slice(&END_OF_BODY);
    send(socket, &request).await?;
    let mut piece = vec![0; 16 * 1024];
    let (mut decoder, mut buffer) = (Decoder::default(), BytesMut::new());
    let (mut head, mut read) = (Vec::new(), 0);
    loop {
        let ended = loop {
            match decoder.next(&mut buffer).map_err(io::Error::other)? {
                Some(Event::Stdout(output)) => {
                    head.extend_from_slice(&output[..output.len().min(HEAD_MAX - head.len())]);
                }
                Some(Event::Stderr(_)) => {}
                Some(Event::End { .. }) => break true,
                None => break false,
            }
        };
        if ended || read >= ANSWER_MAX {
            return Ok(Answer::new(scripts::status_of(&head)?, &head));
        }
        let len = turn(socket, Interest::READABLE, |fd| rustix::io::read(fd, &mut piece[..])).await?;
        if len == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        read += len;
        buffer.extend_from_slice(&piece[..len]);
    }
}

async fn ask(socket: &AsyncFd<OwnedFd>, host: &str, path: &str) -> io::Result<Answer> {
    let request = format!(
        "GET {path} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: nagaya\r\nAccept: */*\r\nConnection: close\r\n\r\n"
    );
    send(socket, request.as_bytes()).await?;
    let mut buffer = vec![0; 16 * 1024];
    let (mut head, mut read) = (Vec::new(), 0);
    let mut status = None;
    loop {
        let len = turn(socket, Interest::READABLE, |fd| rustix::io::read(fd, &mut buffer[..])).await?;
        head.extend_from_slice(&buffer[..len.min(BEGINNING_MAX - head.len())]);
        if status.is_none() {
            status = status_of(&head)?;
        }
        read += len;
        if len == 0 || read >= ANSWER_MAX {
            let status = status.ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))?;
            return Ok(Answer::new(status, &head));
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
pub(crate) fn status_of(head: &[u8]) -> io::Result<Option<u16>> {
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

    /// The status of an answer to a request that ends in `last`, and the request.
    fn asked(backend: &str, last: &'static [u8], answer: &'static [u8]) -> (io::Result<Answer>, Vec<u8>) {
        use std::io::{Read, Write};
        let (ours, mut theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let server = std::thread::spawn(move || {
            let mut seen = Vec::new();
            while !seen.ends_with(last) {
                let mut byte = [0];
                theirs.read_exact(&mut byte).unwrap();
                seen.push(byte[0]);
            }
            // Whoever asked may not read all of it.
            let _ = theirs.write_all(answer);
            seen
        });
        let site = format!(
            r#"{{"name":"a","tenant":"t","hosts":["*.x","a.test"],"backend":{{"kind":"app","command":["x"],"directory":"d"{backend}}}}}"#
        );
        let site: Site = serde_json::from_str(&site).unwrap();
        let tenant: Tenant =
            serde_json::from_str(r#"{"name":"t","uid":9,"gid":9,"home":"/home/t"}"#).unwrap();
        let nagaya_cmdb::Backend::App(app) = &site.backend else { panic!("an application") };
        let asked = Asked::of(&site, &tenant, app).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let status = runtime.block_on(asked.get(ours.into(), "/up?x=1", Duration::from_secs(20)));
        (status, server.join().unwrap())
    }

    #[test]
    fn a_script_is_asked_by_fastcgi() {
        const FASTCGI: &str =
            r#","protocol":"fastcgi","files":{"root":"d/html","front_controller":"index.php"}"#;
        let answer = b"\x01\x06\0\x01\0\x19\0\0Status: 404 no\r\nA: b\r\n\r\nx\x01\x03\0\x01\0\x08\0\0\0\0\0\0\0\0\0\0";
        let (status, seen) = asked(FASTCGI, &END_OF_BODY, answer);
        assert_eq!(status.unwrap().to_string(), "status 404, which begins 'x'");
        let seen = String::from_utf8_lossy(&seen);
        for pair in ["SCRIPT_FILENAME/home/t/d/html/index.php", "REQUEST_URI/up?x=1", "HTTP_HOSTa.test"] {
            assert!(seen.contains(pair), "{pair}: {seen:?}");
        }
        for bad in [&b""[..], b"HTTP/1.1 200 OK\r\n\r\n", &answer[..40]] {
            assert!(asked(FASTCGI, &END_OF_BODY, bad).0.is_err(), "{}", bad.escape_ascii());
        }
    }

    #[test]
    fn a_real_answer_is_read_to_its_end() {
        let (status, seen) = asked("", b"\r\n\r\n", b"HTTP/1.1 302 Found\r\nLocation: /x\r\n\r\nbody");
        assert_eq!(status.unwrap().to_string(), "status 302, which begins 'body'");
        assert!(seen.starts_with(b"GET /up?x=1 HTTP/1.1\r\nHost: a.test\r\n"), "{}", seen.escape_ascii());
        let (status, _) = asked("", b"\r\n\r\n", b"");
        assert_eq!(status.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
