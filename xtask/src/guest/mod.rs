//! `./dev guest`: test programs of this workspace in a small virtual machine, whose kernel has cgroup v2 with all
//! controllers, whatever the machine around it mounts.
//!
//! The guest is Debian's cloud kernel, this release's or another's, with the userland of the packages that are installed here. Not here: the tests,
//! what is counted in their output (`test`), and experiments that run there (`experiment`).

mod boot;
mod experiment;
mod initramfs;
mod kernel;
mod root;
mod service;

use std::fs;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};

use self::boot::{Instruction, Machine};
use crate::test::Sum;
use crate::workspace::PACKAGES;
use crate::{content, workspace};

/// What a guest has, by what it is started for.
struct Fitting {
    /// Of its root file system's image.
    name: &'static str,
    /// What is called there: shells and tools come with Debian's essential packages.
    packages: &'static [&'static str],
    /// Free space on its root file system, MiB.
    room: u64,
    /// Of its memory, MiB, this machine gives what is touched.
    memory: u32,
    /// Of its processor, if that is emulated.
    instruction: Instruction,
    /// Of the kernel, beyond those that each guest needs.
    modules: &'static [&'static str],
    /// The script that the guest's process 1 runs, once its root file system is there.
    script: &'static str,
    /// Longest run of one visit. An emulated processor needs about ten times as long as a real one, of which it may get a
    /// part.
    limit: Duration,
}

const FOR_TESTS: Fitting = Fitting {
    name: "root",
    packages: &[
        "php-cgi",
        "perl",
        "python3",
        "procps",
        "iproute2",
        "mount",
        "util-linux",
        "curl",
        "openssl",
        "zstd",
    ],
    room: 1024,
    memory: 1536,
    instruction: Instruction::TwoNanoseconds,
    modules: &["veth", "tun"],
    script: RUN,
    limit: Duration::from_secs(1800),
};

/// Runs the program as the guest's only one.
const RUN: &str = include_str!("run.sh");

/// Where `./dev setup` puts a CRIU that is new enough.
const CRIU: &str = "/usr/local/lib/nagaya/criu";

/// What runs in the guest: a program with its words, and what else it needs beside it.
struct Job {
    fitting: &'static Fitting,
    /// Where another package with a kernel is unpacked than this release's.
    kernel: Option<PathBuf>,
    program: PathBuf,
    /// Files and directories, copied beside it by this name.
    beside: Vec<(&'static str, PathBuf)>,
    environment: Vec<String>,
    words: Vec<String>,
}

/// `[--kernel DIR] [--e2e | --service [--program FILE]] [-- WORDS]`: the words go to the test program. Or
/// `[--kernel DIR] --experiment NAME [--quick] --out DIR`.
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
    let mut sum = Sum::default();
    let succeeded = visit(&job, &mut sum)?;
    Ok(sum.tell(succeeded))
}

/// Everything that depends on the version of cgroups: one more suite of `./dev test`, built and not run yet.
pub struct Suite(Vec<Job>);

impl Suite {
    pub fn build() -> Result<Self> {
        let mut cells = kernel_suite(Vec::new())?;
        // The rest has had its turn around the guest, at ten times the speed.
        cells.environment.push("NAGAYA_ONLY_CELLS=1".into());
        let mut jobs = vec![cells];
        jobs.push(end_to_end(vec!["cells::".into()])?);
        // How rules are read and refused is the same with every version of cgroups.
        let mut rules = vec!["rules::".to_owned()];
        for other in ["rule_", "rules_", "text_that", "syntax_error", "settings_come", "lane", "phases"] {
            rules.extend(["--skip".into(), other.into()]);
        }
        jobs.push(end_to_end(rules)?);
        jobs.push(service::job(workspace::build_nagaya(workspace::Build::Tested)?, Vec::new())?);
        Ok(Self(jobs))
    }

    /// Whether its clock is its own: then it does not matter to it what else this machine does.
    pub fn is_emulated(&self) -> Result<bool> {
        let Some(first) = self.0.first() else { return Ok(true) };
        let dir = tempfile::tempdir().context("making a directory")?;
        machine(first, dir.path())?.is_emulated()
    }

    /// Returns whether it succeeded. Emulated machines have clocks of their own, so two of them run at once: the longest job in one,
    /// all others in the other.
    pub fn run(&self, is_emulated: bool, sum: &mut Sum) -> Result<bool> {
        let alone = if is_emulated { 1 } else { self.0.len() };
        let (first, others) = self.0.split_at(alone.min(self.0.len()));
        let (first, others) = thread::scope(|scope| {
            let others = scope.spawn(|| visit_all(others));
            (visit_all(first), others.join().unwrap_or_else(|panic| resume_unwind(panic)))
        });
        let ((here, one), (there, other)) = (first?, others?);
        sum.add(one, "guest");
        sum.add(other, "guest");
        Ok(here & there)
    }
}

/// Whether there is a guest for this machine's kind of processor. That is counted.
pub fn is_possible(sum: &mut Sum) -> bool {
    let is_possible = cfg!(target_arch = "x86_64");
    if !is_possible {
        sum.skip("guest", "its kernel package is for x86-64");
    }
    is_possible
}

fn kernel_suite(mut words: Vec<String>) -> Result<Job> {
    // Those have their turn on machines that mount it.
    words.extend(["--skip".into(), "on cgroup v1".into()]);
    // Six Pythons that start together take an emulated processor longer than a test may hang; so do fifty shells.
    for slow in ["many that are asked for at once", "fifty instances stop"] {
        words.extend(["--skip".into(), slow.into()]);
    }
    let program = built_test("kernel")?;
    Ok(tests(program, Vec::new(), Vec::new(), words))
}

/// Those end-to-end tests that concern cells, unless other ones are named.
fn end_to_end(mut words: Vec<String>) -> Result<Job> {
    if words.is_empty() {
        words.push("cells::".into());
    }
    let beside = vec![("nagaya", workspace::build_nagaya(workspace::Build::Tested)?)];
    let program = built_test("e2e")?;
    Ok(tests(program, beside, vec![format!("NAGAYA_BIN={}/nagaya", root::TESTS)], words))
}

/// A test program's job. The console is a terminal, and what is read by a program has no colours. With one thread a test's name
/// and its result would be parted by what it prints.
fn tests(
    program: PathBuf,
    beside: Vec<(&'static str, PathBuf)>,
    environment: Vec<String>,
    words: Vec<String>,
) -> Job {
    let own = ["--color=never".into(), "--test-threads=2".into()];
    let words = own.into_iter().chain(words).collect();
    Job { fitting: &FOR_TESTS, kernel: None, program, beside, environment, words }
}

/// Builds a test program and says where it is.
fn built_test(name: &str) -> Result<PathBuf> {
    let output = workspace::cargo_as_builder()
        .args(["test", "--no-run", "--quiet", "--message-format=json", PACKAGES, "--test", name])
        .stderr(Stdio::inherit())
        .output()
        .context("running cargo test --no-run")?;
    ensure!(output.status.success(), "the test '{name}' does not build: {}", output.status);
    let messages = String::from_utf8(output.stdout).context("cargo's messages")?;
    let mut programs = messages.lines().filter_map(|line| {
        let message: serde_json::Value = serde_json::from_str(line).ok()?;
        let is_it = message["reason"] == "compiler-artifact" && message["target"]["name"] == name;
        is_it.then(|| message["executable"].as_str().map(PathBuf::from)).flatten()
    });
    programs.next_back().with_context(|| format!("cargo names no program of the test '{name}'"))
}

fn visit_all(jobs: &[Job]) -> Result<(bool, Sum)> {
    let (mut succeeded, mut sum) = (true, Sum::default());
    for job in jobs {
        succeeded &= visit(job, &mut sum)?;
    }
    Ok((succeeded, sum))
}

/// Boots, runs the job, counts. Returns whether the test program said that all is well.
fn visit(job: &Job, sum: &mut Sum) -> Result<bool> {
    let dir = tempfile::tempdir().context("making a directory")?;
    let status = machine(job, dir.path())?.run(job.fitting.limit, |line| {
        println!("guest: {line}");
        sum.read(line);
    })?;
    Ok(status == 0)
}

/// The machine for this job, whose files are in `dir`.
fn machine(job: &Job, dir: &Path) -> Result<Machine> {
    let kernel = kernel::obtain(job.kernel.as_deref(), job.fitting.modules)?;
    Ok(Machine {
        initramfs: initramfs::write(&kernel, dir)?,
        kernel: kernel.image,
        memory: job.fitting.memory,
        instruction: job.fitting.instruction,
        root: root::image(job.fitting)?,
        tests: tests_disk(job, dir)?,
    })
}

/// A disk with the program, what it needs beside it, and the words by which the guest starts it.
fn tests_disk(job: &Job, dir: &Path) -> Result<PathBuf> {
    let beside = dir.join("tests");
    fs::create_dir(&beside).context("making a directory")?;
    let copy = |from: &Path, name: &str| {
        if from.is_dir() {
            return content::copy_tree(from, &beside.join(name));
        }
        fs::copy(from, beside.join(name)).with_context(|| format!("copying {}", from.display())).map(drop)
    };
    copy(&job.program, "program")?;
    for (name, from) in &job.beside {
        copy(from, name)?;
    }
    let mut words = vec!["env".to_string()];
    words.extend(job.environment.iter().cloned());
    words.push(format!("{}/program", root::TESTS));
    words.extend(job.words.iter().cloned());
    ensure!(words.iter().all(|word| !word.contains('\n')), "a word for the program is more than one line");
    fs::write(beside.join("words"), words.join("\n") + "\n").context("writing the program's words")?;
    fs::write(beside.join("run"), job.fitting.script).context("writing the guest's script")?;
    let disk = dir.join("tests.ext4");
    root::make_disk(&beside, &disk, root::ROOM_NONE)?;
    Ok(disk)
}
