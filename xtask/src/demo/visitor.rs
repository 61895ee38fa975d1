//! One who visits the demo's sites with curl, as a person does with a browser: cookies are kept, forms are filled in.
//!
//! Not here: what is visited and expected (`check`, `resting`).

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::server::nagaya::Node;

/// Longest time one request may take: the first page of a wiki builds its caches.
const REQUEST_SECONDS_MAX: &str = "60";

/// Somebody with a browser, and with the right to use the node's command line.
pub struct Visitor {
    pub port: u16,
    /// Cookies, as a browser keeps them between two pages.
    pub jar: PathBuf,
    /// For its command line.
    pub node: Node,
}

pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: String,
}

impl Visitor {
    pub fn get(&self, host: &str, path: &str) -> Result<Answer> {
        self.ask(host, path, &[])
    }

    /// One request with curl, with more of curl's arguments.
    pub fn ask(&self, host: &str, path: &str, more: &[&str]) -> Result<Answer> {
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
        Ok(Answer { status, head: head.into(), body: body.into() })
    }
}

impl Answer {
    /// An error unless it has this status and this text in its body.
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

/// The value of a hidden field of a form.
pub fn hidden<'b>(body: &'b str, name: &str) -> Option<&'b str> {
    let mark = format!("name=\"{name}\" value=\"");
    let begin = body.find(&mark)? + mark.len();
    body[begin..].split('"').next()
}
