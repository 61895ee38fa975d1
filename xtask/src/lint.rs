//! `./dev lint`: formatting, clippy, house style and licences; and the generated page of the documentation.
//!
//! Not here: the rules themselves (`Cargo.toml`, `clippy.toml`, `deny.toml`, `tests/tests/tidy.rs`).

use std::fs;
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result, bail, ensure};

use crate::workspace;

pub fn run(arguments: &[String]) -> Result<ExitCode> {
    if !arguments.is_empty() {
        bail!("lint takes no arguments");
    }
    let checks: [(&str, &[&str]); 4] = [
        ("formatting", &["fmt", "--all", "--check"]),
        ("clippy", &["clippy", "--quiet", "--workspace", "--all-targets", "--", "-D", "warnings"]),
        ("house style", &["test", "--quiet", "--package", "nagaya-tests", "--test", "tidy"]),
        ("licences and sources", &["deny", "--log-level", "error", "check", "licenses", "bans", "sources"]),
    ];
    let mut failed = Vec::new();
    for (what, command) in checks {
        // A compiler without these tools still builds and tests everything.
        if command[0] != "test" && !has_tool(command[0]) {
            println!("skipped: {what}: 'cargo {}' is not installed", command[0]);
            continue;
        }
        let status = workspace::cargo().args(command).status().context("running cargo")?;
        println!("{}: {what}", if status.success() { "ok" } else { "failed" });
        if !status.success() {
            failed.push(what);
        }
    }
    Ok(if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn has_tool(verb: &str) -> bool {
    Command::new("cargo").args([verb, "--version"]).output().is_ok_and(|output| output.status.success())
}

/// `docs/configuration.md`, from the table of keys in the program.
pub fn write_configuration_reference() -> Result<()> {
    let output = workspace::cargo()
        .args(["run", "--quiet", "--package", "nagaya", "--", "config", "reference"])
        .output()
        .context("running nagaya config reference")?;
    ensure!(output.status.success(), "nagaya config reference: {}", String::from_utf8_lossy(&output.stderr));
    let path = workspace::root().join("docs/configuration.md");
    if fs::read(&path).is_ok_and(|old| old == output.stdout) {
        println!("{} is up to date", path.display());
        return Ok(());
    }
    fs::write(&path, output.stdout).with_context(|| format!("writing {}", path.display()))?;
    println!("wrote {}", path.display());
    Ok(())
}
