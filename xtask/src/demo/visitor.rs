//! A visitor of the demo's sites with curl, as a person with a browser. Cookies are kept, forms are
//! filled in.
//!
//! Not here: the pages and expectations (`check`, `resting`).

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::server::nagaya::NagayaNode;

/// Longest time of one request: the first page of a wiki builds its caches.
const REQUEST_SECONDS_MAX: &str = "60";

/// A visitor with a browser, and with the right to use the node's command line.
pub struct DemoVisitor {
    pub port: u16,
    /// Cookies, as a browser keeps them between two pages.
    pub jar: PathBuf,
    /// For its command line.
    pub node: NagayaNode,
}

pub struct VisitorAnswer {
    pub status: u16,
    pub head: String,
    pub body: String,
}

impl DemoVisitor {
    pub fn get(&self, host: &str, path: &str) -> Result<VisitorAnswer> {
        self.ask(host, path, &[])
    }

    /// Sends one request with curl, with further arguments of curl.
    pub fn ask(&self, host: &str, path: &str, more: &[&str]) -> Result<VisitorAnswer> {
        let url = format!("http://{host}:{}{path}", self.port);
        let output = Command::new("curl")
            .args([
                "--silent",
                "--show-error",
                "--include",
                "--max-time",
                REQUEST_SECONDS_MAX,
                "--noproxy",
                "*",
            ])
            .args(["--connect-to", &format!("::127.0.0.1:{}", self.port)])
            .arg("--cookie")
            .arg(&self.jar)
            .arg("--cookie-jar")
            .arg(&self.jar)
            .args(more)
            .arg(&url)
            .output()
            .context("running curl")?;
        ensure!(output.status.success(), "curl {url}: {}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let (head, body) =
            text.split_once("\r\n\r\n").with_context(|| format!("{url}: an answer without a head"))?;
        let status = head.split(' ').nth(1).and_then(|s| s.parse().ok());
        let status = status.with_context(|| format!("{url}: an answer without a status"))?;
        Ok(VisitorAnswer { status, head: head.into(), body: body.into() })
    }
}

impl VisitorAnswer {
    /// Fails unless it has this status and this text in its body.
    pub fn expect(&self, status: u16, text: &str) -> Result<()> {
        let shown: String = self.body.chars().take(400).collect();
        ensure!(self.status == status, "status {} instead of {status}: {}\n{shown}", self.status, self.head);
        ensure!(self.body.contains(text), "'{text}' is not in the answer: {}\n{shown}", self.head);
        Ok(())
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().skip(1).find_map(|line| {
            let (field, value) = line.split_once(':')?;
            field.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }
}

/// Returns the value of a hidden field of a form.
pub fn hidden<'b>(body: &'b str, name: &str) -> Option<&'b str> {
    let mark = format!("name=\"{name}\" value=\"");
    let begin = body.find(&mark)? + mark.len();
    body[begin..].split('"').next()
}
