//! A visitor with cookies, who logs in and comes back.
//!
//! Not here: the requested pages (`content::field`).

use std::collections::BTreeMap;
use std::net::SocketAddr;

use anyhow::{Context as _, Result};
use ureq::http::Method;
use ureq::http::header::{CONTENT_TYPE, COOKIE};

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
        let mut request = http::request(self.address, &self.host, path);
        if !cookies.is_empty() {
            request = request.header(COOKIE, cookies.join("; "));
        }
        let visit = match form {
            None => http::exchange(request.body(())),
            Some(form) => {
                let post = request.method(Method::POST);
                http::exchange(post.header(CONTENT_TYPE, "application/x-www-form-urlencoded").body(form))
            }
        };
        let visit = visit.with_context(|| format!("http://{}{path} at {}", self.host, self.address))?;
        self.keep_cookies(&visit);
        Ok(visit)
    }

    fn keep_cookies(&mut self, visit: &HttpVisit) {
        for value in visit.fields("set-cookie") {
            let pair = value.split(';').next().unwrap_or_default();
            if let Some((name, value)) = pair.split_once('=') {
                self.cookies.insert(name.trim().into(), value.trim().into());
            }
        }
    }
}

fn redirection(visit: &HttpVisit) -> Option<String> {
    let is_one = matches!(visit.status, 301 | 302 | 303 | 307 | 308);
    is_one.then(|| visit.fields("location").next().map(ToOwned::to_owned))?
}

pub fn text(visit: &HttpVisit) -> String {
    String::from_utf8_lossy(&visit.body).into_owned()
}

fn shorten(text: &str) -> String {
    text.chars().take(500).collect()
}

#[cfg(test)]
mod tests {
    use ureq::http::HeaderValue;
    use ureq::http::header::SET_COOKIE;

    use super::*;

    fn visit(cookies: &[&'static str]) -> HttpVisit {
        let cookies = cookies.iter().map(|cookie| (SET_COOKIE, HeaderValue::from_static(cookie)));
        HttpVisit {
            status: 200,
            headers: cookies.collect(),
            body: Vec::new(),
            first_byte_ms: 0.0,
            whole_ms: 0.0,
        }
    }

    #[test]
    fn cookies_are_kept_and_replaced() {
        let mut session = AppSession::new(([127, 0, 0, 1], 1).into(), "a.example");
        session.keep_cookies(&visit(&["a=1; Path=/", "b=2"]));
        session.keep_cookies(&visit(&["a=3; HttpOnly"]));
        let kept: Vec<_> = session.cookies.iter().map(|(n, v)| format!("{n}={v}")).collect();
        assert_eq!(kept, ["a=3", "b=2"]);
    }
}
