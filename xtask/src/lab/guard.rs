//! A process that takes a lab down when its maker is gone, however that ended.
//!
//! It holds the reading end of a pipe whose other end only the maker has. The kernel closes that
//! even after SIGKILL. Not here: taking it down (`Lab`).

use std::io::{Read as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, Result};

use super::running::Lab;

/// The verb with which this program becomes the guard.
pub const VERB: &str = "guard";

/// The byte that dismisses it.
const DISMISSED: u8 = b'.';

#[derive(Debug)]
pub struct LabGuard(Child);

impl LabGuard {
    pub fn start(dir: &Path) -> Result<Self> {
        let own = std::env::current_exe().context("asking which program this is")?;
        let child = Command::new(own)
            .args(["cluster", VERB])
            .arg(dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::inherit())
            .current_dir("/")
            // Ctrl-C is for the maker; if that dies of it, the guard must not.
            .process_group(0)
            .spawn()
            .context("starting the lab's guard")?;
        Ok(Self(child))
    }

    /// Dismisses the guard: the lab stays.
    pub fn dismiss(mut self) -> Result<()> {
        let told = self.0.stdin.take().map(|mut pipe| pipe.write_all(&[DISMISSED]));
        told.transpose().context("dismissing the lab's guard")?;
        self.0.wait().context("waiting for the lab's guard").map(drop)
    }

    /// Makes the guard remove the lab and end.
    pub fn end(mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// Runs the guard itself.
pub fn watch(dir: &Path) -> Result<()> {
    let mut word = [0];
    let is_dismissed = matches!(std::io::stdin().read(&mut word), Ok(1)) && word[0] == DISMISSED;
    if is_dismissed || !dir.exists() {
        return Ok(());
    }
    Lab::open(dir)?.down()
}
