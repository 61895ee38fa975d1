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

use crate::workspace::{Build, PACKAGES};
use crate::{conformance, guest, workspace};

/// The program that tries the kernel, and the one that looks at how the code is written.
const KERNEL: &str = "kernel";
const TIDY: &str = "tidy";
/// The one that tries the built server.
const END_TO_END: &str = "e2e";

/// The nice value of what runs beside other tests: an eleventh of a processor that they want, all that they do not.
const NICE_BESIDE: i32 = 10;

/// The same of what runs beside tests that measure what programs get: a sixtieth.
const NICE_LINT: i32 = 19;

/// Lines that are repeated at the end of what one failed test printed, and of all: a record may hold only the end of a run.
const WORDS_OF_ONE_MAX: usize = 25;
const WORDS_MAX: usize = 200;

/// Sums over all test programs, as `cargo test` prints them.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Sum {
    passed: u64,
    failed: u64,
    skipped: u64,
    /// `name: reason` of each test that was not run.
    reasons: Vec<String>,
    failures: Vec<String>,
    /// What the first of these printed, as their programs show it when all have run.
    words: Vec<String>,
    /// Lines that may still come of the failure whose words are read; 0: none is.
    words_left: usize,
}

pub fn run(arguments: &[String]) -> Result<ExitCode> {
    let mut sum = Sum::default();
    let mut succeeded = true;
    match arguments {
        [] => succeeded &= all(&mut sum, Lint::Not)?,
        [only] if only == "--with-lint" => succeeded &= all(&mut sum, Lint::Beside)?,
        [only] if only == "--unit" => succeeded &= unit(&mut sum)?,
        [only] if only == "--e2e" => succeeded &= end_to_end(&mut sum, Lint::Not)?,
        [only] if only == "--guest" => {
            if guest::is_possible(&mut sum) {
                let suite = guest::Suite::build()?;
                succeeded &= suite.run(suite.is_emulated()?, &mut sum)?;
            }
        }
        _ => bail!("unknown arguments '{}': use --with-lint, --unit, --e2e or --guest", arguments.join(" ")),
    }
    Ok(sum.tell(succeeded))
}

/// Whether `./dev lint` runs while the end-to-end tests wait for what they have started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lint {
    Not,
    Beside,
}

/// An emulated guest takes what modules' tests leave of the processors, and has ended before this machine's kernel and the built
/// server are tried. One with KVM is alone, as its clock is this machine's.
fn all(sum: &mut Sum, lint: Lint) -> Result<bool> {
    if !guest::is_possible(sum) {
        return Ok(unit(sum)? & end_to_end(sum, lint)?);
    }
    let suite = timed("building for the guest", guest::Suite::build)?;
    if !suite.is_emulated()? {
        return Ok(unit(sum)? & end_to_end(sum, lint)? & suite.run(false, sum)?);
    }
    let beside = thread::spawn(move || {
        // Of this thread alone, and of what it starts: setpriority(2), "C library/kernel differences".
        setpriority_process(None, NICE_BESIDE).context("letting others go first")?;
        let mut sum = Sum::default();
        timed("guest", || suite.run(true, &mut sum)).map(|succeeded| (succeeded, sum))
    });
    let here = timed("modules", || modules(sum));
    // It ends by itself, and is not left alone.
    let inside = beside.join().unwrap_or_else(|panic| resume_unwind(panic));
    let (succeeded, more) = inside?;
    sum.take_in(more);
    let kernel = timed("kernel", || kernel(sum))?;
    Ok(here? & succeeded & kernel & timed("end to end", || end_to_end(sum, lint))?)
}

/// Says how long a part took, with what it had built.
fn timed<T>(part: &str, run: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let result = run();
    println!("took: {part}: {} s", begun.elapsed().as_secs());
    result
}

/// Everything that needs no built server.
fn unit(sum: &mut Sum) -> Result<bool> {
    Ok(modules(sum)? & kernel(sum)?)
}

/// Everything that needs neither root nor a built server: modules, simulations, house style.
fn modules(sum: &mut Sum) -> Result<bool> {
    let targets = test_targets()?;
    let mut arguments = vec!["test", "--no-fail-fast", PACKAGES, "--lib", "--bins", "--test", TIDY];
    for target in targets.iter().filter(|target| *target != KERNEL) {
        arguments.extend(["--test", target.as_str()]);
    }
    cargo_test(&arguments, sum, || Ok(()))
}

/// The keeper's process on this machine's kernel.
fn kernel(sum: &mut Sum) -> Result<bool> {
    cargo_test(&["test", "--no-fail-fast", PACKAGES, "--test", KERNEL], sum, || Ok(()))
}

/// Names of what lies in `tests` of our crates: one file or one directory for each program.
fn test_targets() -> Result<Vec<String>> {
    let mut found = Vec::new();
    for package in std::fs::read_dir(workspace::root().join("crates")).context("listing our crates")? {
        let Ok(tests) = std::fs::read_dir(package?.path().join("tests")) else { continue };
        for test in tests {
            found.extend(test?.path().file_stem().map(|stem| stem.to_string_lossy().into_owned()));
        }
    }
    found.sort();
    Ok(found)
}

/// The built server, visited from outside.
fn end_to_end(sum: &mut Sum, lint: Lint) -> Result<bool> {
    let tests = ["test", "--no-fail-fast", PACKAGES, "--test", END_TO_END];
    workspace::build_nagaya(Build::Tested)?;
    let mut linting = None;
    let succeeded = cargo_test(&tests, sum, || {
        if lint == Lint::Beside {
            linting = Some(begin_lint()?);
        }
        Ok(())
    })?;
    let Some(linting) = linting else { return Ok(succeeded & (lint == Lint::Not)) };
    let output = timed("lint, after the tests", || linting.wait_with_output()).context("waiting for lint")?;
    print!("{}", String::from_utf8_lossy(&output.stdout));
    if !output.status.success() {
        sum.failures.push("lint".into());
    }
    Ok(succeeded & output.status.success())
}

/// A process of its own, so that its nice value is nobody else's. Begun when nothing is left to build: cargo would wait for it.
fn begin_lint() -> Result<Child> {
    let own = std::env::current_exe().context("asking which program this is")?;
    let child = Command::new(own).arg("lint").stdout(Stdio::piped()).spawn().context("starting lint")?;
    let pid = Pid::from_child(&child);
    setpriority_process(Some(pid), NICE_LINT).context("letting the tests go before lint")?;
    Ok(child)
}

/// Builds as the checkout's owner, then runs as the caller while reading along. `begun` is called once the tests run.
fn cargo_test(arguments: &[&str], sum: &mut Sum, begun: impl FnOnce() -> Result<()>) -> Result<bool> {
    let built = workspace::cargo_as_builder()
        .args(arguments)
        .arg("--no-run")
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
            // Without a network its tests are skipped, and say so.
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

impl Sum {
    /// Takes in what another machine's tests came to; their names begin with `place`.
    pub fn add(&mut self, other: Self, place: &str) {
        let placed = |name: String| format!("{place}: {name}");
        self.take_in(Self {
            reasons: other.reasons.into_iter().map(placed).collect(),
            failures: other.failures.into_iter().map(placed).collect(),
            ..other
        });
    }

    fn take_in(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
        self.reasons.extend(other.reasons);
        self.failures.extend(other.failures);
        self.words.extend(other.words);
    }

    /// A whole suite that cannot run here counts as one test.
    pub fn skip(&mut self, name: &str, reason: &str) {
        self.skipped += 1;
        self.reasons.push(format!("{name}: {reason}"));
    }

    /// Prints what failed, what was skipped and, as the last line, the numbers.
    pub fn tell(&self, succeeded: bool) -> ExitCode {
        for word in &self.words {
            println!("{word}");
        }
        for failure in &self.failures {
            println!("failed: {failure}");
        }
        for reason in &self.reasons {
            println!("skipped: {reason}");
        }
        println!("{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped);
        if succeeded && self.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }

    /// Counts one line of output.
    pub fn read(&mut self, line: &str) {
        if line.starts_with("---- ") {
            self.words_left = WORDS_OF_ONE_MAX.min(WORDS_MAX.saturating_sub(self.words.len()));
        } else if line == "failures:" || line.starts_with("test result: ") {
            self.words_left = 0;
        }
        if self.words_left > 0 {
            self.words_left -= 1;
            self.words.push(line.into());
        }
        if let Some(counts) = line.strip_prefix("test result: ") {
            for part in counts.split_once(". ").map_or("", |(_, counts)| counts).split("; ") {
                let Some((number, what)) = part.split_once(' ') else { continue };
                let Ok(number) = number.parse::<u64>() else { continue };
                match what {
                    "passed" => self.passed += number,
                    "failed" => self.failed += number,
                    "ignored" => self.skipped += number,
                    _ => {}
                }
            }
        } else if let Some(test) = line.strip_prefix("test ") {
            if let Some((name, rest)) = test.split_once(" ... ignored") {
                // libtest writes ", reason", the runner of the end-to-end tests " (reason)".
                let reason = rest.trim_start_matches([',', ' ', '(']).trim_end_matches(')');
                let reason = if reason.is_empty() { "no reason given" } else { reason };
                self.reasons.push(format!("{}: {reason}", name.trim_end()));
            } else if let Some(name) = test.strip_suffix(" ... FAILED") {
                self.failures.push(name.trim_end().into());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Sum;

    #[test]
    fn results_are_summed_and_skipped_tests_named() {
        let mut sum = Sum::default();
        for line in [
            "running 3 tests",
            "test a::b ... ok",
            "test a::c ... ignored, needs a second disk",
            "test a::d ... FAILED",
            "test e::f    ... ignored (needs root)",
            "failures:",
            "---- a::d stdout ----",
            "thread 'a::d' panicked at a.rs:1:2:",
            "failures:",
            "    a::d",
            "test result: FAILED. 1 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s",
            "test result: ok. 41 passed; 0 failed; 0 ignored; 0 measured; 2 filtered out; finished in 1.20s",
        ] {
            sum.read(line);
        }
        assert_eq!((sum.passed, sum.failed, sum.skipped), (42, 1, 1));
        assert_eq!(sum.reasons, ["a::c: needs a second disk", "e::f: needs root"]);
        assert_eq!(sum.failures, ["a::d"]);
        assert_eq!(sum.words, ["---- a::d stdout ----", "thread 'a::d' panicked at a.rs:1:2:"]);

        let mut all = Sum::default();
        all.add(sum, "guest");
        all.skip("other", "no such machine");
        assert_eq!((all.passed, all.failed, all.skipped), (42, 1, 2));
        assert_eq!(all.failures, ["guest: a::d"]);
        assert_eq!(all.reasons.last().map(String::as_str), Some("other: no such machine"));
    }
}
