//! `./dev conformance`: other projects' tests of HTTP, run against the node, and the differences of
//! `vendor/h2` from h2 of crates.io.
//!
//! Cargo and Go fetch the pinned sources of `tests/conformance`, and check their sums. They are
//! built and kept in `target/conformance`. Not here: the tests (`tests/tests/e2e/conformance.rs`)
//! and the tables of their results (`tests/conformance`).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

use crate::workspace::{self, Build, PACKAGES};

/// Variable with the directory of the sources.
pub const DIRECTORY_VARIABLE: &str = "NAGAYA_CONFORMANCE";

/// Files with messages: the package, the file in it, and its name for the tests.
const MESSAGES: [(&str, &str, &str); 2] =
    [("http-muncher", "http-parser/test.c", "http_parser_test.c"), ("httparse", "src/lib.rs", "httparse.rs")];

pub fn run(arguments: &[String]) -> Result<ExitCode> {
    if !arguments.is_empty() {
        bail!("conformance takes no arguments");
    }
    let directory = prepare()?.context("what others wrote could not be brought here; see above")?;
    let program = workspace::build_nagaya(Build::Tested)?;
    let tests = ["test", "--quiet", PACKAGES, "--test", "e2e"];
    let built =
        workspace::cargo_as_builder().args(tests).arg("--no-run").status().context("running cargo test")?;
    ensure!(built.success(), "the tests do not build: {built}");
    let status = workspace::cargo()
        .args(tests)
        .args(["--", "conformance::"])
        .env(DIRECTORY_VARIABLE, directory)
        .env("NAGAYA_BIN", program)
        .status()
        .context("running cargo test")?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Fetches and builds the parts that the tests need, and returns where they are. It needs a network
/// only the first time. `None`, with a message, without one.
///
/// # Errors
/// Fails if `vendor/h2` differs from its description.
pub fn prepare() -> Result<Option<PathBuf>> {
    let unprepared = |error: anyhow::Error| println!("conformance: {error:#}");
    let packages = match packages() {
        Ok(packages) => packages,
        Err(error) => {
            unprepared(error);
            return Ok(None);
        }
    };
    compare_vendored(&source_of(&packages, "h2")?)?;
    Ok(build(&packages).map_err(unprepared).ok())
}

fn build(packages: &[Value]) -> Result<PathBuf> {
    let directory = workspace::target_dir().join("conformance");
    let made = as_builder("mkdir").arg("-p").arg(&directory).status().context("running mkdir")?;
    ensure!(made.success(), "{} cannot be made", directory.display());
    for (package, file, name) in MESSAGES {
        let source = source_of(packages, package)?.join(file);
        let copied =
            as_builder("cp").arg(&source).arg(directory.join(name)).status().context("running cp")?;
        ensure!(copied.success(), "{} cannot be copied", source.display());
    }
    let built = as_builder("go")
        .args(["build", "-mod=readonly", "-buildvcs=false", "-o"])
        .arg(directory.join("h2spec"))
        .arg("github.com/summerwind/h2spec/cmd/h2spec")
        .current_dir(workspace::root().join("tests/conformance/h2spec"))
        .status()
        .context("running go; 'sudo ./dev setup conformance' installs it")?;
    ensure!(built.success(), "h2spec does not build: {built}");
    Ok(directory)
}

/// Returns a command that writes as the owner of the checkout.
fn as_builder(program: &str) -> Command {
    match std::env::var("NAGAYA_BUILDER").ok().filter(|user| !user.is_empty()) {
        None => Command::new(program),
        Some(user) => {
            let mut command = Command::new("runuser");
            command.args(["-u", &user, "--", program]);
            command
        }
    }
}

/// Returns cargo's data on the pinned packages. It fetches missing ones.
fn packages() -> Result<Vec<Value>> {
    let ask = |more: &[&str]| {
        workspace::cargo_as_builder()
            .args(["metadata", "--format-version", "1", "--locked", "--manifest-path"])
            .arg(workspace::root().join("tests/conformance/sources/Cargo.toml"))
            .args(more)
            .output()
            .context("running cargo metadata")
    };
    let mut answer = ask(&["--offline"])?;
    if !answer.status.success() {
        answer = ask(&[])?;
    }
    ensure!(answer.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&answer.stderr));
    let metadata: Value = serde_json::from_slice(&answer.stdout).context("cargo metadata writes JSON")?;
    metadata["packages"].as_array().cloned().context("cargo metadata lists packages")
}

fn source_of(packages: &[Value], name: &str) -> Result<PathBuf> {
    let found = packages.iter().find(|package| package["name"] == name);
    let manifest = found.and_then(|package| package["manifest_path"].as_str());
    let directory = manifest.and_then(|manifest| Path::new(manifest).parent());
    Ok(directory.with_context(|| format!("no package '{name}' in tests/conformance/sources"))?.to_path_buf())
}

/// Fails if the differences of `vendor/h2` from the released h2 are more, or fewer, than its patch
/// says.
fn compare_vendored(released: &Path) -> Result<()> {
    let vendored = workspace::root().join("vendor/h2");
    let output = Command::new("diff")
        // The tests of h2 are left out.
        .args(["--recursive", "--unified", "--exclude=test"])
        .args([released.join("src"), vendored.join("src")])
        .output()
        .context("running diff")?;
    ensure!(output.status.code() == Some(1), "diff: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout)
        .replace(&*released.to_string_lossy(), "a")
        .replace(&*vendored.to_string_lossy(), "b");
    // Without file times, and without the command line of each comparison.
    let lines = text.lines().filter(|line| !line.starts_with("diff ")).map(|line| {
        let is_name = line.starts_with("--- ") || line.starts_with("+++ ");
        line.split('\t').next().filter(|_| is_name).unwrap_or(line)
    });
    let found: String = lines.flat_map(|line| [line, "\n"]).collect();
    let patch = vendored.join("nagaya.patch");
    let known = fs::read_to_string(&patch).with_context(|| format!("reading {}", patch.display()))?;
    ensure!(
        found == known,
        "vendor/h2 differs from the released h2 in something else than {} says:\n{found}",
        patch.display()
    );
    Ok(())
}
