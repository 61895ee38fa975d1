//! Servers under measurement: nagaya and its peers. Each has its own port and an expert's
//! configuration, from files in the experiment's own directory.
//!
//! Not here: load (`load`), the processes themselves (`process`).

pub mod apache;
pub mod haproxy;
pub mod instance;
pub mod nagaya;
pub mod nginx;
pub mod phpfpm;

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::process::RunningProcess;

/// Longest time for any server to start: Apache reads 100,000 virtual hosts in well under a minute.
const START_MAX: Duration = Duration::from_secs(300);

/// Connections that a server must hold at once; above any load of the experiments.
pub const CONNECTIONS_MAX: u32 = 4096;

/// Descriptors that each server may open: connections, their backends, and cached files.
pub const OPEN_FILES_MAX: u32 = 65_536;

/// A running server.
#[derive(Debug)]
pub struct TestServer {
    pub address: SocketAddr,
    pub process: RunningProcess,
    /// A program that it hands requests to, which counts as a part of it.
    pub behind: Option<RunningProcess>,
    /// From starting the program to its first right response.
    pub started_in: Duration,
}

/// A request that needs a 200 response before the server counts as started.
#[derive(Debug, Clone)]
pub struct StartProbe {
    pub host: String,
    pub path: String,
}

impl TestServer {
    /// Starts `command` in `dir` and waits for its first right response.
    pub fn start(
        what: &str,
        command: &[String],
        dir: &Path,
        address: SocketAddr,
        probe: &StartProbe,
    ) -> Result<Self> {
        let begun = std::time::Instant::now();
        let mut process = RunningProcess::start(what, command, &dir.join("output.log"))?;
        process.wait_until(START_MAX, || {
            crate::http::get(address, &probe.host, &probe.path).is_ok_and(|(status, _)| status == 200)
        })?;
        Ok(Self { address, process, behind: None, started_in: begun.elapsed() })
    }

    /// Returns the CPU time used so far by all its processes.
    pub fn cpu_seconds(&self) -> f64 {
        self.process.cpu_seconds() + self.behind.as_ref().map_or(0.0, RunningProcess::cpu_seconds)
    }

    /// Returns the memory of all its processes.
    pub fn memory_mib(&self) -> Result<f64> {
        let behind = self.behind.as_ref().map_or(Ok(0.0), RunningProcess::memory_mib)?;
        Ok(self.process.memory_mib()? + behind)
    }
}

/// Makes a directory for one server's files, through which its unprivileged processes may pass.
pub fn make_dir(parent: &Path, name: &str) -> Result<PathBuf> {
    let dir = parent.join(name);
    fs::create_dir_all(&dir).with_context(|| format!("creating {}", dir.display()))?;
    Ok(dir)
}

pub fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("writing {}", path.display()))
}

pub fn words(command: &[&str]) -> Vec<String> {
    command.iter().map(|word| (*word).into()).collect()
}
