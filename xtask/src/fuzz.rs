//! `./dev fuzz`: parsers of outside input, given to libFuzzer for seconds or for hours.
//!
//! The stable compiler gives coverage. `fuzz/rustc.sh` adds it to our own crates, and dependencies
//! are those of other builds. Found inputs are kept in `.dev/fuzz/TARGET`, and failing ones in
//! `.dev/fuzz/failed`. Not here: the targets (`fuzzing` in each crate), their inputs as tests
//! (`fuzz/`).

use std::collections::VecDeque;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Output};
use std::sync::Mutex;
use std::thread;

use anyhow::{Context as _, Result, bail, ensure};

use crate::workspace::{self, PACKAGES};

/// Seconds for which each target runs with `--quick`, and by default.
const QUICK_SECONDS: u32 = 3;
const LONG_SECONDS: u32 = 3600;

/// Longest input, bytes. A longer one takes other paths only where a limit ends it.
const INPUT_LEN_MAX: u32 = 8192;

/// Longest time for one input, seconds, and most memory of one target, MiB: above them it has
/// failed.
const INPUT_SECONDS_MAX: u32 = 20;
const MEMORY_MIB_MAX: u32 = 2048;

/// Lines of a failed target's output that are shown.
const WORDS_MAX: usize = 40;

struct FuzzArgs {
    /// Chosen targets; empty means all.
    targets: Vec<String>,
    seconds: u32,
    is_quick: bool,
}

pub fn run(arguments: &[String]) -> Result<ExitCode> {
    if let [only] = arguments
        && only == "--list"
    {
        return list(&build(true)?);
    }
    let asked = read_arguments(arguments)?;
    let program = build(asked.is_quick)?;
    let known = targets_of(&program)?;
    let unknown = asked.targets.iter().find(|name| !known.contains(name));
    if let Some(unknown) = unknown {
        bail!("'{unknown}' is no fuzz target: './dev fuzz --list' shows all");
    }
    let targets = if asked.targets.is_empty() { known } else { asked.targets };
    fuzz_all(&program, targets, asked.seconds)
}

fn read_arguments(arguments: &[String]) -> Result<FuzzArgs> {
    let mut asked = FuzzArgs { targets: Vec::new(), seconds: LONG_SECONDS, is_quick: false };
    let mut words = arguments.iter();
    while let Some(word) = words.next() {
        match word.as_str() {
            "--quick" => (asked.is_quick, asked.seconds) = (true, QUICK_SECONDS),
            "--seconds" => {
                let seconds = words.next().and_then(|text| text.parse().ok()).filter(|seconds| *seconds > 0);
                asked.seconds = seconds.context("--seconds needs a number of seconds, at least 1")?;
            }
            option if option.starts_with('-') => {
                bail!("unknown argument '{option}': use --list, --quick, --seconds N or names of targets")
            }
            name => asked.targets.push(name.to_owned()),
        }
    }
    Ok(asked)
}

/// Builds all targets as one program. `is_quick` uses the dependencies of `cargo build`, which are
/// not optimised.
fn build(is_quick: bool) -> Result<PathBuf> {
    let profile = if is_quick { "dev" } else { "fuzz" };
    let status = workspace::cargo_as_builder_with(&[(
        "RUSTC_WORKSPACE_WRAPPER",
        workspace::root().join("fuzz/rustc.sh").display().to_string(),
    )])
    .args(["build", "--quiet", "--profile", profile, PACKAGES])
    .args(["--features", "nagaya-fuzz/libfuzzer", "--bin", "nagaya-fuzz"])
    .status()
    .context("running cargo build")?;
    ensure!(status.success(), "the fuzz targets do not build: {status}");
    Ok(workspace::target_dir().join(if is_quick { "debug" } else { "fuzz" }).join("nagaya-fuzz"))
}

fn targets_of(program: &Path) -> Result<Vec<String>> {
    let output = Command::new(program).arg("list").output().context("asking for the fuzz targets")?;
    ensure!(output.status.success(), "the fuzz targets cannot be listed: {}", output.status);
    Ok(String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect())
}

fn list(program: &Path) -> Result<ExitCode> {
    targets_of(program)?.iter().for_each(|name| println!("{name}"));
    Ok(ExitCode::SUCCESS)
}

/// Runs them all, as many at once as there are CPUs.
fn fuzz_all(program: &Path, targets: Vec<String>, seconds: u32) -> Result<ExitCode> {
    let count = targets.len();
    let (waiting, failed) = (Mutex::new(VecDeque::from(targets)), Mutex::new(Vec::new()));
    let at_once = thread::available_parallelism().map_or(1, usize::from).min(count);
    thread::scope(|scope| {
        let work = || -> Result<()> {
            loop {
                let next = waiting.lock().map_or(None, |mut waiting| waiting.pop_front());
                let Some(name) = next else { return Ok(()) };
                if !fuzz_one(program, &name, seconds)?
                    && let Ok(mut failed) = failed.lock()
                {
                    failed.push(name);
                }
            }
        };
        let workers: Vec<_> = (0..at_once).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| match worker.join() {
            Ok(done) => done,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })?;
    let failed = failed.into_inner().unwrap_or_default();
    if failed.is_empty() {
        println!("fuzz: {count} targets, {seconds} s each, none failed");
        return Ok(ExitCode::SUCCESS);
    }
    println!("fuzz: failed: {}", failed.join(", "));
    println!("fuzz: mend it, and put the input into fuzz/corpus/TARGET: './dev test' tries it from then on");
    Ok(ExitCode::FAILURE)
}

/// Returns false if the target failed.
fn fuzz_one(program: &Path, name: &str, seconds: u32) -> Result<bool> {
    let directory = workspace::cache_dir().join("fuzz");
    let (found, seeds, failed) =
        (directory.join(name), directory.join("seeds").join(name), directory.join("failed"));
    for directory in [&found, &seeds, &failed] {
        fs::create_dir_all(directory).with_context(|| format!("making {}", directory.display()))?;
    }
    let seeded = Command::new(program).arg("seed").arg(name).arg(&seeds).output().context("writing seeds")?;
    let words = String::from_utf8_lossy(&seeded.stderr);
    ensure!(seeded.status.success(), "the seeds of '{name}' cannot be written: {}: {words}", seeded.status);
    let output = Command::new(program)
        .env("NAGAYA_FUZZ_TARGET", name)
        .arg(format!("-max_total_time={seconds}"))
        .arg(format!("-max_len={INPUT_LEN_MAX}"))
        .arg(format!("-timeout={INPUT_SECONDS_MAX}"))
        .arg(format!("-rss_limit_mb={MEMORY_MIB_MAX}"))
        .arg(format!("-artifact_prefix={}/{name}-", failed.display()))
        .arg("-print_final_stats=1")
        .args([found, seeds])
        .output()
        .context("running a fuzz target")?;
    tell(name, &output);
    Ok(output.status.success())
}

/// Prints one line for a target that passed, its last output for one that failed.
fn tell(name: &str, output: &Output) {
    let words = String::from_utf8_lossy(&output.stderr);
    let lines: Vec<&str> = words.lines().collect();
    if !output.status.success() {
        let shown = &lines[lines.len().saturating_sub(WORDS_MAX)..];
        println!("fuzz: {name}: FAILED ({})\n{}", output.status, shown.join("\n"));
        return;
    }
    let progress: Vec<&str> = lines.iter().copied().filter(|line| line.contains(" cov: ")).collect();
    let coverage = |line: &&str| line.split(" cov: ").nth(1)?.split(' ').next()?.parse::<u64>().ok();
    let runs = lines.iter().find_map(|line| line.strip_prefix("stat::number_of_executed_units:"));
    println!(
        "fuzz: {name}: {} inputs, coverage {} -> {}",
        runs.map_or("?", str::trim),
        progress.iter().find_map(coverage).unwrap_or(0),
        progress.iter().rev().find_map(coverage).unwrap_or(0),
    );
}
