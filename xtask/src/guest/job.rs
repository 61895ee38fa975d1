//! A job that runs in a guest, and the guest's resources for it.
//!
//! Not here: booting it (`boot`), its disks (`root`, `machine`).

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use super::boot::InstructionTime;
use crate::workspace;
use crate::workspace::PACKAGES;

/// Equipment of a guest, by its purpose.
pub struct GuestFitting {
    /// Name of its root file system's image.
    pub name: &'static str,
    /// Programs that are called there: shells and tools come with Debian's essential packages.
    pub packages: &'static [&'static str],
    /// Free space on its root file system, MiB.
    pub room: u64,
    /// Its memory, MiB; this machine provides only touched memory.
    pub memory: u32,
    /// For its CPU, if that is emulated.
    pub instruction: InstructionTime,
    /// Kernel modules, in addition to those of each guest.
    pub modules: &'static [&'static str],
    /// The script of the guest's process 1, once its root file system is there.
    pub script: &'static str,
    /// Longest run of one visit. An emulated CPU needs about ten times as long as a real one. It
    /// may get only a part of that.
    pub limit: Duration,
}

pub const FOR_TESTS: GuestFitting = GuestFitting {
    name: "root",
    packages: &[
        "php-cgi",
        "perl",
        "python3",
        "procps",
        "iproute2",
        "mount",
        "util-linux",
        "curl",
        "openssl",
        "zstd",
    ],
    room: 1024,
    memory: 1536,
    instruction: InstructionTime::TwoNanoseconds,
    modules: &["veth", "tun"],
    script: RUN,
    limit: Duration::from_secs(1800),
};

/// Runs the program as the guest's only one.
pub const RUN: &str = include_str!("run.sh");

/// Where `./dev setup` puts a CRIU that is new enough.
pub const CRIU: &str = "/usr/local/lib/nagaya/criu";

/// A job of the guest: a program with its words, and its other files.
pub struct GuestJob {
    pub fitting: &'static GuestFitting,
    /// Directory of another unpacked kernel package than this release's.
    pub kernel: Option<PathBuf>,
    pub program: PathBuf,
    /// Files and directories, copied beside it by this name.
    pub beside: Vec<(&'static str, PathBuf)>,
    pub environment: Vec<String>,
    pub words: Vec<String>,
}

/// Returns a test program's job. The console is a terminal, and a program reads it, so there are no
/// colours. With one thread, a test's output would come between its name and its result.
pub fn tests(
    program: PathBuf,
    beside: Vec<(&'static str, PathBuf)>,
    environment: Vec<String>,
    words: Vec<String>,
) -> GuestJob {
    let own = ["--color=never".into(), "--test-threads=2".into()];
    let words = own.into_iter().chain(words).collect();
    GuestJob { fitting: &FOR_TESTS, kernel: None, program, beside, environment, words }
}

/// Builds a test program and returns its path.
pub fn built_test(name: &str) -> Result<PathBuf> {
    let output = workspace::cargo_as_builder()
        .args(["test", "--no-run", "--quiet", "--message-format=json", PACKAGES, "--test", name])
        .stderr(Stdio::inherit())
        .output()
        .context("running cargo test --no-run")?;
    ensure!(output.status.success(), "the test '{name}' does not build: {}", output.status);
    let messages = String::from_utf8(output.stdout).context("cargo's messages")?;
    let mut programs = messages.lines().filter_map(|line| {
        let message: serde_json::Value = serde_json::from_str(line).ok()?;
        let is_it = message["reason"] == "compiler-artifact" && message["target"]["name"] == name;
        is_it.then(|| message["executable"].as_str().map(PathBuf::from)).flatten()
    });
    programs.next_back().with_context(|| format!("cargo names no program of the test '{name}'"))
}
