//! `./dev lint`: formatting, clippy, house style and licences; and the generated pages of the documentation.
//!
//! Not here: the rules themselves (`Cargo.toml`, `clippy.toml`, `deny.toml`, `tests/tests/tidy.rs`).

use std::fs;
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result, bail, ensure};

use crate::workspace::{self, PACKAGES};

pub fn run(arguments: &[String]) -> Result<ExitCode> {
    if !arguments.is_empty() {
        bail!("lint takes no arguments");
    }
    let checks: [(&str, &[&str]); 4] = [
        ("formatting", &["fmt", "--all", "--check"]),
        ("clippy", &["clippy", "--quiet", PACKAGES, "--all-targets", "--", "-D", "warnings"]),
        ("house style", &["test", "--quiet", PACKAGES, "--test", "tidy"]),
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

/// The pages that are made from tables in the program: `docs/configuration.md`, `docs/rules-compatibility.md`,
/// `docs/header-fields.md`.
pub fn write_generated_pages() -> Result<()> {
    let output = workspace::cargo()
        .args(["run", "--quiet", "--package", "nagaya", "--", "config", "reference"])
        .output()
        .context("running nagaya config reference")?;
    ensure!(output.status.success(), "nagaya config reference: {}", String::from_utf8_lossy(&output.stderr));
    let path = workspace::root().join("docs/configuration.md");
    let old = fs::read(&path).unwrap_or_default();
    fs::write(&path, &output.stdout).with_context(|| format!("writing {}", path.display()))?;
    tell(&path, &old)?;

    write_by_test("docs/rules-compatibility.md", "nagaya-rules")?;
    write_by_test("docs/header-fields.md", "nagaya-edge")
}

/// The test that compares a page with its table is what writes it, too: the program itself has no use for it.
fn write_by_test(page: &str, package: &str) -> Result<()> {
    let path = workspace::root().join(page);
    let old = fs::read(&path).unwrap_or_default();
    let output = workspace::cargo()
        .args(["test", "--quiet", "--package", package, "--lib", "the_page_is_what_the_table_says"])
        .env("NAGAYA_WRITE_DOCS", "1")
        .output()
        .context("running cargo test")?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    tell(&path, &old)
}

fn tell(path: &Path, old: &[u8]) -> Result<()> {
    let new = fs::read(path).with_context(|| format!("reading {}", path.display()))?;
    println!("{} {}", path.display(), if new == old { "is up to date" } else { "was written" });
    Ok(())
}
