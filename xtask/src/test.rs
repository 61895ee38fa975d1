//! `./dev test`: all tests, summed to one line, with a reason for each that was skipped.
//!
//! Not here: the tests themselves.

use std::io::{BufRead as _, BufReader};
use std::process::{ExitCode, Stdio};

use anyhow::{Context as _, Result, bail};

use crate::{guest, workspace};

/// Sums over all test programs, as `cargo test` prints them.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Sum {
    passed: u64,
    failed: u64,
    skipped: u64,
    /// `name: reason` of each test that was not run.
    reasons: Vec<String>,
    failures: Vec<String>,
}

pub fn run(arguments: &[String]) -> Result<ExitCode> {
    let mut sum = Sum::default();
    let mut succeeded = true;
    match arguments {
        [] => {
            succeeded &= unit(&mut sum)?;
            succeeded &= end_to_end(&mut sum)?;
            succeeded &= guest::suite(&mut sum)?;
        }
        [only] if only == "--unit" => succeeded &= unit(&mut sum)?,
        [only] if only == "--e2e" => succeeded &= end_to_end(&mut sum)?,
        [only] if only == "--guest" => succeeded &= guest::suite(&mut sum)?,
        _ => bail!("unknown arguments '{}': use --unit, --e2e or --guest", arguments.join(" ")),
    }
    Ok(sum.tell(succeeded))
}

/// Everything that needs neither root nor a built server: modules, simulations, house style.
fn unit(sum: &mut Sum) -> Result<bool> {
    let packages = ["--workspace", "--exclude", "nagaya-tests"];
    let mut succeeded = cargo_test(&[&["test", "--no-fail-fast"], &packages[..]].concat(), sum)?;
    succeeded &=
        cargo_test(&["test", "--no-fail-fast", "--package", "nagaya-tests", "--lib", "--test", "tidy"], sum)?;
    Ok(succeeded)
}

/// The built server, visited from outside.
fn end_to_end(sum: &mut Sum) -> Result<bool> {
    workspace::build_nagaya()?;
    cargo_test(&["test", "--no-fail-fast", "--package", "nagaya-tests", "--test", "e2e"], sum)
}

/// Builds as the checkout's owner, then runs as the caller while reading along.
fn cargo_test(arguments: &[&str], sum: &mut Sum) -> Result<bool> {
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
    let mut child = workspace::cargo()
        .args(arguments)
        .env("NAGAYA_XTASK", own)
        .stdout(Stdio::piped())
        .spawn()
        .context("running cargo test")?;
    let output = child.stdout.take().context("the output of cargo test")?;
    for line in BufReader::new(output).lines() {
        let line = line.context("reading the output of cargo test")?;
        println!("{line}");
        sum.read(&line);
    }
    Ok(child.wait().context("waiting for cargo test")?.success())
}

impl Sum {
    /// Takes in what another machine's tests came to; their names begin with `place`.
    pub fn add(&mut self, other: Self, place: &str) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
        let placed = |name: String| format!("{place}: {name}");
        self.reasons.extend(other.reasons.into_iter().map(placed));
        self.failures.extend(other.failures.into_iter().map(placed));
    }

    /// A whole suite that cannot run here counts as one test.
    pub fn skip(&mut self, name: &str, reason: &str) {
        self.skipped += 1;
        self.reasons.push(format!("{name}: {reason}"));
    }

    /// Prints what failed, what was skipped and, as the last line, the numbers.
    pub fn tell(&self, succeeded: bool) -> ExitCode {
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
            "test result: FAILED. 1 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s",
            "test result: ok. 41 passed; 0 failed; 0 ignored; 0 measured; 2 filtered out; finished in 1.20s",
        ] {
            sum.read(line);
        }
        assert_eq!((sum.passed, sum.failed, sum.skipped), (42, 1, 1));
        assert_eq!(sum.reasons, ["a::c: needs a second disk", "e::f: needs root"]);
        assert_eq!(sum.failures, ["a::d"]);

        let mut all = Sum::default();
        all.add(sum, "guest");
        all.skip("other", "no such machine");
        assert_eq!((all.passed, all.failed, all.skipped), (42, 1, 2));
        assert_eq!(all.failures, ["guest: a::d"]);
        assert_eq!(all.reasons.last().map(String::as_str), Some("other: no such machine"));
    }
}
