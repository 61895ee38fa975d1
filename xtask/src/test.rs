//! `./dev test`: all tests, summed to one line, with a reason for each that was skipped.
//!
//! Not here: the tests themselves.

use std::io::{BufRead as _, BufReader};
use std::process::{ExitCode, Stdio};

use anyhow::{Context as _, Result, bail};

use crate::workspace;

/// Sums over all test programs, as `cargo test` prints them.
#[derive(Debug, Default, PartialEq, Eq)]
struct Sum {
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
        }
        [only] if only == "--unit" => succeeded &= unit(&mut sum)?,
        [only] if only == "--e2e" => succeeded &= end_to_end(&mut sum)?,
        _ => bail!("unknown arguments '{}': use --unit or --e2e", arguments.join(" ")),
    }
    for failure in &sum.failures {
        println!("failed: {failure}");
    }
    for reason in &sum.reasons {
        println!("skipped: {reason}");
    }
    println!("{} passed, {} failed, {} skipped", sum.passed, sum.failed, sum.skipped);
    Ok(if succeeded && sum.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
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
    let mut child =
        workspace::cargo().args(arguments).stdout(Stdio::piped()).spawn().context("running cargo test")?;
    let output = child.stdout.take().context("the output of cargo test")?;
    for line in BufReader::new(output).lines() {
        let line = line.context("reading the output of cargo test")?;
        println!("{line}");
        sum.read(&line);
    }
    Ok(child.wait().context("waiting for cargo test")?.success())
}

impl Sum {
    fn read(&mut self, line: &str) {
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
    }
}
