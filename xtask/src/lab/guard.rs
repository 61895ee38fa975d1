//! A process that takes a lab down when the one that made it is gone, however that ended.
//!
//! It holds the reading end of a pipe whose other end only the maker has: the kernel closes that also after SIGKILL. Not here:
//! taking it down (`Lab`).

use std::io::{Read as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, Result};

use super::Lab;

/// The verb by which this program becomes the guard.
pub const VERB: &str = "guard";

/// What dismisses it.
const DISMISSED: u8 = b'.';

#[derive(Debug)]
pub struct Guard(Child);

impl Guard {
    pub fn start(dir: &Path) -> Result<Self> {
        let own = std::env::current_exe().context("asking which program this is")?;
        let child = Command::new(own)
            .args(["cluster", VERB])
            .arg(dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::inherit())
            .current_dir("/")
            // Ctrl-C is for the maker; should that die of it, the guard must not.
            .process_group(0)
            .spawn()
            .context("starting the lab's guard")?;
        Ok(Self(child))
    }

    /// The lab stays.
    pub fn dismiss(mut self) -> Result<()> {
        let told = self.0.stdin.take().map(|mut pipe| pipe.write_all(&[DISMISSED]));
        told.transpose().context("dismissing the lab's guard")?;
        self.0.wait().context("waiting for the lab's guard").map(drop)
    }

    /// It sees to it that the lab is gone, and ends.
    pub fn end(mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// The guard's own life.
pub fn watch(dir: &Path) -> Result<()> {
    let mut word = [0];
    let is_dismissed = matches!(std::io::stdin().read(&mut word), Ok(1)) && word[0] == DISMISSED;
    if is_dismissed || !dir.exists() {
        return Ok(());
    }
    Lab::open(dir)?.down()
}
