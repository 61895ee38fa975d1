//! `./dev guest`: test programs of this workspace in a small virtual machine. Its kernel has cgroup
//! v2 with all controllers, whatever the machine around it mounts.
//!
//! The guest is Debian's cloud kernel, this release's or another's, with the userland of the
//! packages installed here. Not here: the tests, the counts of their output (`test`), and
//! experiments that run there (`experiment`).

mod boot;
mod experiment;
mod initramfs;
mod job;
pub mod kernel;
mod machine;
mod root;
mod service;

use std::panic::resume_unwind;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Mutex;
use std::thread;

use anyhow::{Context as _, Result, bail};

use self::job::{GuestJob, built_test, tests};
use self::machine::machine;
use crate::test_sum::TestSum;
use crate::workspace;

/// Tests of the keeper's decisions: freezing and ending are the same in them as in others. './dev
/// guest' runs them.
const DECISIONS: [&str; 9] = [
    "an instance runs only where it is placed",
    "who knows of a later placement than the keeper",
    "nothing runs before the first authority",
    "a start that is fenced is answered",
    "an instance beside which another node gets one",
    "a site that always runs does so only",
    "a warden sleeps while all is stopped",
    "what a node runs ends when it is removed",
    "what has moved away does not go on by an authority",
];

/// `[--kernel DIR] [--e2e | --service [--program FILE]] [-- WORDS]`: the words go to the test
/// program. Or `[--kernel DIR] --experiment NAME [--quick] --out DIR`.
pub fn run(arguments: &[String]) -> Result<ExitCode> {
    let (kernel, arguments) = match arguments {
        [first, dir, rest @ ..] if first == "--kernel" => (Some(PathBuf::from(dir)), rest),
        _ => (None, arguments),
    };
    let (own, words) = match arguments.iter().position(|word| word == "--") {
        Some(at) => (&arguments[..at], arguments[at + 1..].to_vec()),
        None => (arguments, Vec::new()),
    };
    let mut job = match own {
        [first, rest @ ..] if first == "--experiment" && words.is_empty() => {
            return experiment::run(rest, kernel).map(|()| ExitCode::SUCCESS);
        }
        [] => kernel_suite(words)?,
        [only] if only == "--e2e" => end_to_end(words)?,
        [only] if only == "--service" => {
            service::job(workspace::build_nagaya(workspace::Build::Tested)?, words)?
        }
        [first, program, file] if first == "--service" && program == "--program" => {
            service::job(file.into(), words)?
        }
        _ => bail!(
            "unknown arguments '{}': use --kernel DIR first, --e2e or --service, and -- before words for the tests, or --experiment NAME",
            own.join(" ")
        ),
    };
    job.kernel = kernel;
    let mut sum = TestSum::default();
    let succeeded = visit(&job, &mut sum)?;
    Ok(sum.tell(succeeded))
}

/// All tests that depend on the version of cgroups: one more suite of `./dev test`, built and not
/// run yet.
pub struct GuestSuite(Vec<GuestJob>);

impl GuestSuite {
    pub fn build() -> Result<Self> {
        let mut cells = kernel_suite(Vec::new())?;
        // The rest runs outside of the guest, at ten times the speed.
        cells.environment.push("NAGAYA_ONLY_CELLS=1".into());
        // The same applies to tests that stop instances by ways that others have tried here, and
        // concern times.
        for decision in DECISIONS {
            cells.words.extend(["--skip".into(), decision.into()]);
        }
        // Reading and refusing rules is the same with every version of cgroups.
        let mut rules = vec!["rules::".to_owned()];
        let others = ["rule_", "rules_", "text_that", "syntax_error", "settings_come", "lane", "phases"];
        for other in others.into_iter().chain(["detector", "limiter"]) {
            rules.extend(["--skip".into(), other.into()]);
        }
        let service = service::job(workspace::build_nagaya(workspace::Build::Tested)?, Vec::new())?;
        // The longest first, so that both machines end together.
        let jobs = vec![cells, service, end_to_end(vec!["cells::".into()])?, end_to_end(rules)?];
        Ok(Self(jobs))
    }

    /// Returns whether its clock is its own, so that the load of this machine does not affect it.
    pub fn is_emulated(&self) -> Result<bool> {
        let Some(first) = self.0.first() else { return Ok(true) };
        let dir = tempfile::tempdir().context("making a directory")?;
        machine(first, dir.path())?.is_emulated()
    }

    /// Runs the suite. Returns whether it succeeded. Emulated machines have clocks of their own, so
    /// two of them run at once.
    pub fn run(&self, is_emulated: bool, sum: &mut TestSum) -> Result<bool> {
        let waiting = Mutex::new(self.0.iter());
        let work = || visit_all(|| waiting.lock().ok()?.next());
        let done = thread::scope(|scope| {
            let beside = is_emulated.then(|| scope.spawn(work));
            let here = work();
            let there = beside.map(|other| other.join().unwrap_or_else(|panic| resume_unwind(panic)));
            [Some(here), there]
        });
        let mut succeeded = true;
        for one in done.into_iter().flatten() {
            let (is_good, counted) = one?;
            succeeded &= is_good;
            sum.add(counted, "guest");
        }
        Ok(succeeded)
    }
}

/// Returns whether there is a guest for this machine's kind of CPU. That is counted.
pub fn is_possible(sum: &mut TestSum) -> bool {
    let is_possible = cfg!(target_arch = "x86_64");
    if !is_possible {
        sum.skip("guest", "its kernel package is for x86-64");
    }
    is_possible
}

fn kernel_suite(mut words: Vec<String>) -> Result<GuestJob> {
    // Those run on machines that mount it.
    words.extend(["--skip".into(), "on cgroup v1".into()]);
    // Six Pythons that start together take an emulated CPU longer than a test may hang; so do fifty
    // shells.
    for slow in ["many that are asked for at once", "fifty instances stop"] {
        words.extend(["--skip".into(), slow.into()]);
    }
    let program = built_test("kernel")?;
    Ok(tests(program, Vec::new(), Vec::new(), words))
}

/// Returns the end-to-end tests that concern cells, unless others are named.
fn end_to_end(mut words: Vec<String>) -> Result<GuestJob> {
    if words.is_empty() {
        words.push("cells::".into());
    }
    let beside = vec![("nagaya", workspace::build_nagaya(workspace::Build::Tested)?)];
    let program = built_test("e2e")?;
    Ok(tests(program, beside, vec![format!("NAGAYA_BIN={}/nagaya", root::TESTS)], words))
}

fn visit_all<'j>(mut next: impl FnMut() -> Option<&'j GuestJob>) -> Result<(bool, TestSum)> {
    let (mut succeeded, mut sum) = (true, TestSum::default());
    while let Some(job) = next() {
        succeeded &= visit(job, &mut sum)?;
    }
    Ok((succeeded, sum))
}

/// Boots, runs the job, counts. Returns whether the test program succeeded.
fn visit(job: &GuestJob, sum: &mut TestSum) -> Result<bool> {
    let dir = tempfile::tempdir().context("making a directory")?;
    let status = machine(job, dir.path())?.run(job.fitting.limit, |line| {
        println!("guest: {line}");
        sum.read(line);
    })?;
    Ok(status == 0)
}
