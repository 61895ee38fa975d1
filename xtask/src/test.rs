//! `./dev test`: all tests, summed to one line, with a reason for each that was skipped.
//!
//! Not here: the tests themselves.

use std::io::{BufRead as _, BufReader};
use std::panic::resume_unwind;
use std::process::{Child, Command, ExitCode, Stdio};
use std::thread;
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, setpriority_process};

use crate::test_sum::TestSum;
use crate::workspace::{Build, PACKAGES};
use crate::{conformance, content, guest, workspace};

/// The test program for the kernel.
const KERNEL: &str = "kernel";
/// The test programs for the style and the shape of the code.
pub const STYLE: [&str; 2] = ["tidy", "house"];
/// The test program for the built server.
const END_TO_END: &str = "e2e";

/// The nice value of work beside other tests. It gets an eleventh of a CPU that they want, and all
/// of one that they do not.
const NICE_BESIDE: i32 = 10;

/// The same beside tests that measure what programs get: a sixtieth.
const NICE_LINT: i32 = 19;

pub fn run(arguments: &[String]) -> Result<ExitCode> {
    let mut sum = TestSum::default();
    let mut succeeded = true;
    match arguments {
        [] => succeeded &= all(&mut sum, LintMode::Not)?,
        [only] if only == "--with-lint" => succeeded &= all(&mut sum, LintMode::Beside)?,
        [only] if only == "--unit" => succeeded &= unit(&mut sum)?,
        [only] if only == "--e2e" => succeeded &= end_to_end(&mut sum, LintMode::Not)?,
        [only] if only == "--guest" => {
            if guest::is_possible(&mut sum) {
                let suite = guest::GuestSuite::build()?;
                succeeded &= suite.run(suite.is_emulated()?, &mut sum)?;
            }
        }
        _ => bail!("unknown arguments '{}': use --with-lint, --unit, --e2e or --guest", arguments.join(" ")),
    }
    Ok(sum.tell(succeeded))
}

/// Whether `./dev lint` runs while the end-to-end tests wait for their programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LintMode {
    Not,
    Beside,
}

/// Runs all tests. An emulated guest uses CPU time that the modules' tests leave. It has ended
/// before the tests of this machine's kernel and of the built server. One with KVM runs alone, as
/// its clock is this machine's.
fn all(sum: &mut TestSum, lint: LintMode) -> Result<bool> {
    if !guest::is_possible(sum) {
        return Ok(unit(sum)? & end_to_end(sum, lint)?);
    }
    let suite = timed("building for the guest", guest::GuestSuite::build)?;
    if !suite.is_emulated()? {
        return Ok(unit(sum)? & end_to_end(sum, lint)? & suite.run(false, sum)?);
    }
    let beside = thread::spawn(move || {
        // It applies to this thread alone, and to its children: setpriority(2), "C library/kernel
        // differences".
        setpriority_process(None, NICE_BESIDE).context("letting others go first")?;
        let mut sum = TestSum::default();
        timed("guest", || suite.run(true, &mut sum)).map(|succeeded| (succeeded, sum))
    });
    let here = timed("modules", || modules(sum));
    // It ends by itself, and must be waited for.
    let inside = beside.join().unwrap_or_else(|panic| resume_unwind(panic));
    let (succeeded, more) = inside?;
    sum.take_in(more);
    let kernel = timed("kernel", || kernel(sum))?;
    Ok(here? & succeeded & kernel & timed("end to end", || end_to_end(sum, lint))?)
}

/// Prints how long a part took, including builds.
fn timed<T>(part: &str, run: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let result = run();
    println!("took: {part}: {} s", begun.elapsed().as_secs());
    result
}

/// Runs everything that needs no built server.
fn unit(sum: &mut TestSum) -> Result<bool> {
    Ok(modules(sum)? & kernel(sum)?)
}

/// Runs everything that needs neither root nor a built server: modules, simulations, house style.
fn modules(sum: &mut TestSum) -> Result<bool> {
    let targets = test_targets()?;
    let mut arguments = vec!["test", "--no-fail-fast", PACKAGES, "--lib", "--bins"];
    let modules = targets.iter().map(String::as_str).filter(|target| *target != KERNEL);
    for target in modules.chain(STYLE) {
        arguments.extend(["--test", target]);
    }
    cargo_test(&arguments, sum, || Ok(()))
}

/// They mostly wait, so more of them run at once than there are CPUs.
const KERNEL_AT_ONCE: &str = "--test-threads=3";

/// Tests the keeper's process on this machine's kernel.
fn kernel(sum: &mut TestSum) -> Result<bool> {
    let words = ["test", "--no-fail-fast", PACKAGES, "--test", KERNEL, "--", KERNEL_AT_ONCE];
    cargo_test(&words, sum, || Ok(()))
}

/// Returns names of the programs in `tests` of our crates: each is one file of Rust, or one
/// directory.
fn test_targets() -> Result<Vec<String>> {
    let mut found = Vec::new();
    for package in std::fs::read_dir(workspace::root().join("crates")).context("listing our crates")? {
        let Ok(tests) = std::fs::read_dir(package?.path().join("tests")) else { continue };
        for test in tests {
            let path = test?.path();
            if path.is_dir() || path.extension().is_some_and(|extension| extension == "rs") {
                found.extend(path.file_stem().map(|stem| stem.to_string_lossy().into_owned()));
            }
        }
    }
    found.sort();
    Ok(found)
}

/// Tests the built server from outside.
fn end_to_end(sum: &mut TestSum, lint: LintMode) -> Result<bool> {
    let tests = ["test", "--no-fail-fast", PACKAGES, "--test", END_TO_END];
    workspace::build_nagaya(Build::Tested)?;
    let mut linting = None;
    let succeeded = cargo_test(&tests, sum, || {
        if lint == LintMode::Beside {
            linting = Some(begin_lint()?);
        }
        Ok(())
    })?;
    let Some(linting) = linting else { return Ok(succeeded & (lint == LintMode::Not)) };
    let output = timed("lint, after the tests", || linting.wait_with_output()).context("waiting for lint")?;
    print!("{}", String::from_utf8_lossy(&output.stdout));
    if !output.status.success() {
        sum.failures.push("lint".into());
    }
    Ok(succeeded & output.status.success())
}

/// Starts the lint in a separate process, so that its nice value affects nothing else. It starts
/// when nothing is left to build: cargo would wait for it.
fn begin_lint() -> Result<Child> {
    let own = std::env::current_exe().context("asking which program this is")?;
    let child = Command::new(own).arg("lint").stdout(Stdio::piped()).spawn().context("starting lint")?;
    let pid = Pid::from_child(&child);
    setpriority_process(Some(pid), NICE_LINT).context("letting the tests go before lint")?;
    Ok(child)
}

/// Builds as the checkout's owner, then runs as the caller while reading along. `begun` is called
/// once the tests run.
fn cargo_test(arguments: &[&str], sum: &mut TestSum, begun: impl FnOnce() -> Result<()>) -> Result<bool> {
    // Before words for the tests themselves.
    let built = workspace::cargo_as_builder()
        .arg(arguments[0])
        .arg("--no-run")
        .args(&arguments[1..])
        .status()
        .context("running cargo test --no-run")?;
    if !built.success() {
        bail!("the tests do not build: {built}");
    }
    // Tests of clusters on one machine call this program.
    let own = std::env::current_exe().context("asking which program this is")?;
    let mut command = workspace::cargo();
    let mut is_prepared = true;
    if arguments.contains(&END_TO_END) {
        match conformance::prepare() {
            Ok(Some(directory)) => _ = command.env(conformance::DIRECTORY_VARIABLE, directory),
            // Without a network its tests are skipped, with a message.
            Ok(None) => {}
            Err(error) => {
                println!("conformance: {error:#}");
                sum.failures.push("conformance".into());
                is_prepared = false;
            }
        }
    }
    let mut child = command
        .args(arguments)
        .env("NAGAYA_XTASK", own)
        .env("NAGAYA_BIN", workspace::nagaya(Build::Tested))
        // The kernel of the emulated guest is that of machines, too.
        .env("NAGAYA_KERNELS", content::package_dir())
        .stdout(Stdio::piped())
        .spawn()
        .context("running cargo test")?;
    let output = child.stdout.take().context("the output of cargo test")?;
    let mut begun = Some(begun);
    for line in BufReader::new(output).lines() {
        let line = line.context("reading the output of cargo test")?;
        if let Some(begun) = begun.take() {
            begun()?;
        }
        println!("{line}");
        sum.read(&line);
    }
    Ok(child.wait().context("waiting for cargo test")?.success() & is_prepared)
}
