//! The results of test programs, summed to one line.
//!
//! Not here: running them (`test`, `guest`).

use std::process::ExitCode;

/// Lines of output that are repeated at the end, for one failed test and for all. A record may hold
/// only the end of a run.
const WORDS_OF_ONE_MAX: usize = 25;
const WORDS_MAX: usize = 200;

/// Sums over all test programs, as `cargo test` prints them.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct TestSum {
    passed: u64,
    failed: u64,
    skipped: u64,
    /// `name: reason` of each test that was not run.
    reasons: Vec<String>,
    pub failures: Vec<String>,
    /// Output of the first failed ones, as their programs show it when all have run.
    words: Vec<String>,
    /// Lines that may still come of the failure that is being read; 0 if none is.
    words_left: usize,
}

impl TestSum {
    /// Adds the results of another machine's tests; their names begin with `place`.
    pub fn add(&mut self, other: Self, place: &str) {
        let placed = |name: String| format!("{place}: {name}");
        self.take_in(Self {
            reasons: other.reasons.into_iter().map(placed).collect(),
            failures: other.failures.into_iter().map(placed).collect(),
            ..other
        });
    }

    pub fn take_in(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
        self.reasons.extend(other.reasons);
        self.failures.extend(other.failures);
        self.words.extend(other.words);
    }

    /// Counts a whole suite that cannot run here as one test.
    pub fn skip(&mut self, name: &str, reason: &str) {
        self.skipped += 1;
        self.reasons.push(format!("{name}: {reason}"));
    }

    /// Prints the failed tests, the skipped ones and, as the last line, the numbers.
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
    use super::TestSum;

    #[test]
    fn results_are_summed_and_skipped_tests_named() {
        let mut sum = TestSum::default();
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

        let mut all = TestSum::default();
        all.add(sum, "guest");
        all.skip("other", "no such machine");
        assert_eq!((all.passed, all.failed, all.skipped), (42, 1, 2));
        assert_eq!(all.failures, ["guest: a::d"]);
        assert_eq!(all.reasons.last().map(String::as_str), Some("other: no such machine"));
    }
}
