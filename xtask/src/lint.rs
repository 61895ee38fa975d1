//! `./dev lint`: formatting, clippy, house style and licences; and the generated pages of the
//! documentation.
//!
//! Not here: the rules themselves (`Cargo.toml`, `clippy.toml`, `deny.toml`,
//! `tests/tests/tidy.rs`, `house.rs`).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context as _, Result, bail, ensure};

use crate::measurements;
use crate::test::STYLE;
use crate::workspace::{self, PACKAGES};

pub fn run(arguments: &[String]) -> Result<ExitCode> {
    if !arguments.is_empty() {
        bail!("lint takes no arguments");
    }
    let checks: [(&str, &[&str]); 4] = [
        ("formatting", &["fmt", "--all", "--check"]),
        ("clippy", &["clippy", "--quiet", PACKAGES, "--all-targets", "--", "-D", "warnings"]),
        ("house style", &["test", "--quiet", PACKAGES, "--test", STYLE[0], "--test", STYLE[1]]),
        ("licences and sources", &["deny", "--log-level", "error", "check", "licenses", "bans", "sources"]),
    ];
    let mut failed = Vec::new();
    for (what, command) in checks {
        // A compiler without these tools still builds and tests everything.
        if command[0] != "test" && !has_tool(command[0]) {
            println!("skipped: {what}: 'cargo {}' is not installed", command[0]);
            continue;
        }
        let is_clean = if command[0] == "clippy" && is_compiled_by_clippy() {
            has_no_warning()?
        } else {
            workspace::cargo().args(command).status().context("running cargo")?.success()
        };
        println!("{}: {what}", if is_clean { "ok" } else { "failed" });
        if !is_clean {
            failed.push(what);
        }
    }
    Ok(if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Returns whether each build in this environment compiles our crates with clippy, which is the
/// compiler with more warnings.
fn is_compiled_by_clippy() -> bool {
    let wrapper = std::env::var_os("RUSTC_WORKSPACE_WRAPPER").map(PathBuf::from);
    wrapper.is_some_and(|wrapper| wrapper.file_name().is_some_and(|name| name == "clippy-driver"))
}

/// Prints the compiler's messages about everything that was built. Cargo keeps them, and compiles
/// only what was not built yet.
fn has_no_warning() -> Result<bool> {
    let output = workspace::cargo()
        .args(["build", "--quiet", PACKAGES, "--all-targets", "--message-format=json"])
        .stderr(Stdio::inherit())
        .output()
        .context("running cargo build")?;
    let messages = String::from_utf8(output.stdout).context("cargo's messages")?;
    let mut is_clean = output.status.success();
    for line in messages.lines() {
        let message: serde_json::Value = serde_json::from_str(line).context("a message of cargo's")?;
        if message["reason"] == "compiler-message" {
            is_clean = false;
            println!("{}", message["message"]["rendered"].as_str().unwrap_or(line));
        }
    }
    Ok(is_clean)
}

fn has_tool(verb: &str) -> bool {
    Command::new("cargo").args([verb, "--version"]).output().is_ok_and(|output| output.status.success())
}

/// Writes the pages that are made from tables in the program: `docs/configuration.md`,
/// `docs/rules-compatibility.md` and `docs/header-fields.md`. Writes `docs/measurements.md` from
/// files.
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
    write_by_test("docs/header-fields.md", "nagaya-edge")?;
    measurements::write_page()
}

/// Writes a page with the test that compares it with its table: the program itself does not need
/// that.
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
