//! A visitor with cookies, who logs in and comes back.
//!
//! Not here: the requested pages (`content::field`).

use std::collections::BTreeMap;
use std::net::SocketAddr;

use anyhow::{Context as _, Result};

use crate::content::field::{FieldStep, TOKEN, VALUE};
use crate::http::{self, HttpVisit};
use crate::interrupt;

/// Redirections that are followed in a row.
const REDIRECTS_MAX: usize = 5;

/// A browser's state for one site.
#[derive(Debug, Clone)]
pub struct AppSession {
    address: SocketAddr,
    host: String,
    cookies: BTreeMap<String, String>,
    /// The last token that a page had.
    pub token: String,
}

impl AppSession {
    pub fn new(address: SocketAddr, host: &str) -> Self {
        Self { address, host: host.into(), cookies: BTreeMap::new(), token: String::new() }
    }

    /// Takes steps, with `value` in the posted forms. Returns whether each had the expected
    /// response, with 200 at its end.
    pub fn follow(&mut self, steps: &[FieldStep], value: &str) -> Result<bool> {
        for step in steps {
            let form = step.form.as_ref().map(|form| form.replace(TOKEN, &self.token).replace(VALUE, value));
            let (status, text, _) = self.send(&step.path, form.as_deref())?;
            if status != 200 {
                eprintln!("{}{}: {status} {}", self.host, step.path, shorten(&text));
                return Ok(false);
            }
            let Some((before, after)) = step.token else { continue };
            let found = text.split_once(before).and_then(|(_, rest)| rest.split_once(after));
            let Some((token, _)) = found else {
                eprintln!("{}{}: no token in {}", self.host, step.path, shorten(&text));
                return Ok(false);
            };
            self.token = token.into();
        }
        Ok(true)
    }

    /// Gets a page with its cookies, or posts a form; follows redirections. Returns status and text
    /// of the last response, and the first.
    pub fn send(&mut self, path: &str, form: Option<&str>) -> Result<(u16, String, HttpVisit)> {
        let first = self.send_once(path, form)?;
        let mut last = first.clone();
        for _ in 0..REDIRECTS_MAX {
            let Some(location) = redirection(&last) else { break };
            let path = location
                .split_once("://")
                .map_or(location.as_str(), |(_, rest)| rest.find('/').map_or("/", |at| &rest[at..]));
            let path = if path.starts_with('/') { path.to_owned() } else { format!("/{path}") };
            last = self.send_once(&path, None)?;
        }
        Ok((last.status, text(&last), first))
    }

    fn send_once(&mut self, path: &str, form: Option<&str>) -> Result<HttpVisit> {
        interrupt::check()?;
        let cookies: Vec<String> =
            self.cookies.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let mut request = format!(
            "{} {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n",
            if form.is_some() { "POST" } else { "GET" },
            self.host
        );
        if !cookies.is_empty() {
            request.push_str(&format!("Cookie: {}\r\n", cookies.join("; ")));
        }
        if let Some(form) = form {
            let length = form.len();
            request.push_str(&format!(
                "Content-Type: application/x-www-form-urlencoded\r\nContent-Length: {length}\r\n"
            ));
        }
        request.push_str("\r\n");
        request.push_str(form.unwrap_or_default());
        let visit = http::exchange(self.address, &request)
            .with_context(|| format!("http://{}{path} at {}", self.host, self.address))?;
        self.keep_cookies(&visit.head);
        Ok(visit)
    }

    fn keep_cookies(&mut self, head: &str) {
        for value in fields(head, "set-cookie") {
            let pair = value.split(';').next().unwrap_or_default();
            if let Some((name, value)) = pair.split_once('=') {
                self.cookies.insert(name.trim().into(), value.trim().into());
            }
        }
    }
}

fn redirection(visit: &HttpVisit) -> Option<String> {
    let is_one = matches!(visit.status, 301 | 302 | 303 | 307 | 308);
    is_one.then(|| fields(&visit.head, "location").next().map(ToOwned::to_owned))?
}

fn fields<'h>(head: &'h str, name: &'h str) -> impl Iterator<Item = &'h str> {
    head.lines().skip(1).filter_map(move |line| {
        let (found, value) = line.split_once(':')?;
        found.eq_ignore_ascii_case(name).then_some(value.trim())
    })
}

/// Returns a body without the chunk sizes between its bytes.
pub fn text(visit: &HttpVisit) -> String {
    let is_chunked =
        fields(&visit.head, "transfer-encoding").any(|value| value.eq_ignore_ascii_case("chunked"));
    let joined = if is_chunked { join_chunks(&visit.body) } else { visit.body.clone() };
    String::from_utf8_lossy(&joined).into_owned()
}

/// Joins chunks up to the first invalid one.
fn join_chunks(mut body: &[u8]) -> Vec<u8> {
    let mut joined = Vec::new();
    while let Some(end) = body.windows(2).position(|pair| pair == b"\r\n") {
        let size =
            std::str::from_utf8(&body[..end]).ok().and_then(|text| usize::from_str_radix(text, 16).ok());
        let Some(size @ 1..) = size else { break };
        let rest = &body[end + 2..];
        let Some(chunk) = rest.get(..size) else { break };
        joined.extend_from_slice(chunk);
        body = rest.get(size + 2..).unwrap_or_default();
    }
    joined
}

fn shorten(text: &str) -> String {
    text.chars().take(500).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn visit(head: &str, body: &str) -> HttpVisit {
        HttpVisit { status: 200, head: head.into(), body: body.into(), first_byte_ms: 0.0, whole_ms: 0.0 }
    }

    #[test]
    fn chunks_are_joined() {
        let head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked";
        assert_eq!(text(&visit(head, "4\r\nlogg\r\n5\r\ned in\r\n0\r\n\r\n")), "logged in");
        assert_eq!(text(&visit("HTTP/1.1 200 OK", "4\r\nlogg")), "4\r\nlogg");
    }

    #[test]
    fn cookies_are_kept_and_replaced() {
        let mut session = AppSession::new(([127, 0, 0, 1], 1).into(), "a.example");
        session.keep_cookies("HTTP/1.1 200 OK\r\nSet-Cookie: a=1; Path=/\r\nset-cookie: b=2");
        session.keep_cookies("HTTP/1.1 200 OK\r\nSet-Cookie: a=3; HttpOnly");
        let kept: Vec<_> = session.cookies.iter().map(|(n, v)| format!("{n}={v}")).collect();
        assert_eq!(kept, ["a=3", "b=2"]);
    }
}
