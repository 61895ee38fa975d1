//! nagaya's own requests to an instance, before anybody else's: whether it is ready, and warming it
//! up. A `GET` of HTTP/1.1, or of a script by FastCGI, over a connection that serves nothing else,
//! its answer read and thrown away. It says that it came by HTTPS, as nearly all visitors' do.
//!
//! Not here: the paths (`start`), visitors' requests (`edge`), FastCGI's records (`fastcgi`).

mod scripts;

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use bytes::BytesMut;
use nagaya_keeper_api::fastcgi::{END_OF_BODY, FastCgiDecoder, FastCgiEvent};
use nagaya_records::record::App;
use nagaya_records::{Site, Tenant};
use rustix::io::Errno;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::timeout;

use crate::fault::Fault;

use self::scripts::ScriptFinder;

/// Maximum number of bytes read of a response. It is more than the start of any page, so that the
/// program comes to its end.
const ANSWER_MAX: usize = 4 << 20;

/// Maximum length of the first line of a response, bytes.
const STATUS_LINE_MAX: usize = 512;

/// Bytes of the beginning of a response that are kept, and characters of one of its lines that are
/// repeated.
const BEGINNING_MAX: usize = 4 * 1024;
const LINE_SHOWN_MAX: usize = 120;

/// Maximum length of the head of a script's response, bytes, in which its status is searched.
const HEAD_MAX: usize = 64 * 1024;

/// The response of an application.
#[derive(Debug, PartialEq, Eq)]
pub struct InternalResponse {
    pub status: u16,
    /// The first line of the body with text. Empty without one.
    line: String,
}

impl InternalResponse {
    fn new(status: u16, beginning: &[u8]) -> Self {
        let text = String::from_utf8_lossy(beginning);
        let body =
            text.split_once("\r\n\r\n").or_else(|| text.split_once("\n\n")).map_or("", |(_, body)| body);
        let line = body.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default();
        let shown = line.chars().filter(|c| !c.is_control()).take(LINE_SHOWN_MAX);
        Self { status, line: shown.collect() }
    }
}

impl fmt::Display for InternalResponse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line.as_str() {
            "" => write!(f, "status {} without a text", self.status),
            line => write!(f, "status {}, which begins '{line}'", self.status),
        }
    }
}

/// The application that is requested.
pub struct InternalTarget {
    host: String,
    /// `None` if it speaks HTTP.
    scripts: Option<ScriptFinder>,
}

impl InternalTarget {
    pub fn of(site: &Site, tenant: &Tenant, app: &App) -> Result<Self, Fault> {
        let scripts = app.files.as_deref().map(|files| ScriptFinder::of(site, tenant, files)).transpose()?;
        Ok(Self { host: name_of(site), scripts })
    }

    /// Requests this path.
    pub async fn get(&self, socket: OwnedFd, path: &str, within: Duration) -> io::Result<InternalResponse> {
        let asked = async {
            let socket = nagaya_keeper_api::watch(socket, Interest::READABLE | Interest::WRITABLE)?;
            match &self.scripts {
                None => ask(&socket, &self.host, path).await,
                Some(scripts) => run(&socket, scripts, &self.host, path).await,
            }
        };
        timeout(within, asked).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    }
}

/// Returns a name the application is known by. A wildcard is replaced by one of its names.
fn name_of(site: &Site) -> String {
    let mut hosts = site.hosts.iter().map(|host| host.as_str());
    let plain = hosts.clone().find(|host| !host.contains('*')).map(str::to_owned);
    let of_many = || hosts.find_map(|host| host.strip_prefix("*.")).map(|rest| format!("www.{rest}"));
    plain.or_else(of_many).unwrap_or_else(|| "localhost".into())
}

async fn send(socket: &AsyncFd<OwnedFd>, mut left: &[u8]) -> io::Result<()> {
    while !left.is_empty() {
        let sent = turn(socket, Interest::WRITABLE, |fd| rustix::io::write(fd, left)).await?;
        left = &left[sent..];
    }
    Ok(())
}

async fn run(
    socket: &AsyncFd<OwnedFd>,
    scripts: &ScriptFinder,
    host: &str,
    path: &str,
) -> io::Result<InternalResponse> {
    let mut request = scripts.opening(host, path)?;
    request.extend_from_slice(&END_OF_BODY);
    send(socket, &request).await?;
    let mut piece = vec![0; 16 * 1024];
    let (mut decoder, mut buffer) = (FastCgiDecoder::default(), BytesMut::new());
    let (mut head, mut read) = (Vec::new(), 0);
    loop {
        let ended = loop {
            match decoder.next(&mut buffer).map_err(io::Error::other)? {
                Some(FastCgiEvent::Stdout(output)) => {
                    head.extend_from_slice(&output[..output.len().min(HEAD_MAX - head.len())]);
                }
                Some(FastCgiEvent::Stderr(_)) => {}
                Some(FastCgiEvent::End { .. }) => break true,
                None => break false,
            }
        };
        if ended || read >= ANSWER_MAX {
            return Ok(InternalResponse::new(scripts::status_of(&head)?, &head));
        }
        let len = turn(socket, Interest::READABLE, |fd| rustix::io::read(fd, &mut piece[..])).await?;
        if len == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        read += len;
        buffer.extend_from_slice(&piece[..len]);
    }
}

async fn ask(socket: &AsyncFd<OwnedFd>, host: &str, path: &str) -> io::Result<InternalResponse> {
    // As a visitor's request by HTTPS is passed on. An application that redirects all others there
    // would respond with that alone.
    let request = format!(
        "GET {path} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: nagaya\r\nAccept: */*\r\n\
         Forwarded: for=127.0.0.1;host=\"{host}\";proto=https\r\nX-Forwarded-For: 127.0.0.1\r\n\
         X-Forwarded-Proto: https\r\nX-Forwarded-Host: {host}\r\nX-Forwarded-Port: 443\r\n\
         Connection: close\r\n\r\n"
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
            return Ok(InternalResponse::new(status, &head));
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

/// Returns the status of `HTTP/1.1 200 OK`. `None` if the line is not whole yet.
pub(crate) fn status_of(head: &[u8]) -> io::Result<Option<u16>> {
    let Some(end) = head.iter().position(|byte| *byte == b'\n') else {
        return if head.len() < STATUS_LINE_MAX { Ok(None) } else { Err(io::ErrorKind::InvalidData.into()) };
    };
    let line = str::from_utf8(&head[..end]).ok().filter(|line| line.starts_with("HTTP/1."));
    let status = line.and_then(|line| line.split_ascii_whitespace().nth(1)?.parse().ok());
    status
        .filter(|status| (100..=599).contains(status))
        .map(Some)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "its response is not HTTP/1.1"))
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
    fn asked(
        backend: &str,
        last: &'static [u8],
        answer: &'static [u8],
    ) -> (io::Result<InternalResponse>, Vec<u8>) {
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
        let nagaya_records::Backend::App(app) = &site.backend else { panic!("an application") };
        let asked = InternalTarget::of(&site, &tenant, app).unwrap();
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
        for pair in [
            "SCRIPT_FILENAME/home/t/d/html/index.php",
            "REQUEST_URI/up?x=1",
            "HTTP_HOSTa.test",
            "HTTPSon",
            "HTTP_X_FORWARDED_PROTOhttps",
        ] {
            assert!(seen.contains(pair), "{pair}: {seen:?}");
        }
        for bad in [&b""[..], b"HTTP/1.1 200 OK\r\n\r\n", &answer[..40]] {
            assert!(asked(FASTCGI, &END_OF_BODY, bad).0.is_err(), "{}", bad.escape_ascii());
        }
    }

    #[test]
    fn a_site_of_many_names_is_asked_by_one_of_them() {
        for (hosts, name) in [
            (r#"["*.x.test","a.test"]"#, "a.test"),
            (r#"["*.x.test"]"#, "www.x.test"),
            (r#"["*","*.x.test"]"#, "www.x.test"),
            (r#"["*"]"#, "localhost"),
        ] {
            let site = format!(
                r#"{{"name":"a","tenant":"t","hosts":{hosts},"backend":{{"kind":"app","command":["x"],"directory":"d"}}}}"#
            );
            assert_eq!(name_of(&serde_json::from_str(&site).unwrap()), name, "{hosts}");
        }
    }

    #[test]
    fn a_real_answer_is_read_to_its_end() {
        let (status, seen) = asked("", b"\r\n\r\n", b"HTTP/1.1 302 Found\r\nLocation: /x\r\n\r\nbody");
        assert_eq!(status.unwrap().to_string(), "status 302, which begins 'body'");
        assert!(seen.starts_with(b"GET /up?x=1 HTTP/1.1\r\nHost: a.test\r\n"), "{}", seen.escape_ascii());
        let text = String::from_utf8_lossy(&seen);
        assert!(text.contains("\r\nX-Forwarded-Proto: https\r\n"), "{text}");
        let (status, _) = asked("", b"\r\n\r\n", b"");
        assert_eq!(status.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
