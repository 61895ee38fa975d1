//! Paths of the checkout and the built programs, and how cargo is called.
//!
//! Not here: required packages; the script `dev` installs them before it starts this program.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

/// Returns the checkout's root.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("xtask lies in a directory of the workspace")
        .to_path_buf()
}

/// Returns cargo's target directory.
pub fn target_dir() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}

/// Returns the data of demos and experiments that is kept between runs: unpacked packages. Ignored
/// by git.
pub fn cache_dir() -> PathBuf {
    root().join(".dev")
}

/// The packages of each build that is not shipped. Dependencies get the features that all chosen
/// packages need together. With another choice each time, cargo would build them again each time.
pub const PACKAGES: &str = "--workspace";

/// Returns a cargo command that runs as the caller.
pub fn cargo() -> Command {
    let mut command = Command::new("cargo");
    command.current_dir(root());
    command
}

/// Returns a cargo command that may write to the target directory. Under sudo in another user's
/// checkout it runs as that user, so that the files stay theirs.
pub fn cargo_as_builder() -> Command {
    let Some(user) = std::env::var("NAGAYA_BUILDER").ok().filter(|user| !user.is_empty()) else {
        return cargo();
    };
    let mut command = Command::new("runuser");
    command.args(["-u", &user, "--", "cargo"]).current_dir(root());
    command
}

/// Returns the same with variables of the environment, which `runuser` passes on.
pub fn cargo_as_builder_with(variables: &[(&str, String)]) -> Command {
    let mut command = cargo_as_builder();
    command.envs(variables.iter().map(|(name, value)| (*name, value)));
    command
}

/// Kind of build.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Build {
    /// The shipped build: optimised.
    Shipped,
    /// With the dependencies that all tests share, and with every check that only tests have.
    Tested,
}

/// Returns the program's path, built or not.
pub fn nagaya(build: Build) -> PathBuf {
    target_dir().join(match build {
        Build::Shipped => "release/nagaya",
        Build::Tested => "debug/nagaya",
    })
}

/// Builds the program and returns its path.
pub fn build_nagaya(build: Build) -> Result<PathBuf> {
    let options: &[&str] = match build {
        Build::Shipped => &["--release", "--package", "nagaya"],
        Build::Tested => &[PACKAGES, "--bin", "nagaya"],
    };
    let status = cargo_as_builder()
        .args(["build", "--quiet"])
        .args(options)
        .status()
        .context("running cargo build")?;
    ensure!(status.success(), "nagaya does not build: {status}");
    Ok(nagaya(build))
}
