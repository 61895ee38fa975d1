//! `./dev guest --experiment NAME`: an experiment on Debian's own kernel, with nothing else on the
//! machine.
//!
//! If the guest's CPU is emulated, its clock follows its instructions. Then the load of the machine
//! around it, which dominates a tail of times, has no effect. Times are those of a slow CPU then;
//! ratios and counts can be compared. Not here: the experiments.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use super::boot::InstructionTime;
use super::job::{CRIU, GuestFitting, GuestJob, RUN};
use super::machine::machine;
use crate::experiment::registry::ExperimentArgs;
use crate::workspace;

/// Experiments whose servers and applications the guest has.
const THERE: [&str; 1] = ["rest-cost"];

/// Memory and room are for two hundred running Django applications, and their images. *reclaimed*
/// needs compressed memory.
const FOR_EXPERIMENTS: GuestFitting = GuestFitting {
    name: "experiments",
    packages: &[
        "curl",
        "gunicorn",
        "iproute2",
        "libjs-jquery",
        "mount",
        "procps",
        "python3",
        "python3-django",
        "sqlite3",
        "tzdata",
        "util-linux",
    ],
    room: 16_384,
    memory: 16_384,
    instruction: InstructionTime::Nanosecond,
    modules: &["lzo_rle", "zram"],
    script: RUN,
    limit: Duration::from_secs(4 * 3600),
};

/// Prefix of each line of a result on the console, followed by the file's name.
const RESULT: &str = "result ";

/// `NAME [--quick] [--program FILE] --out DIR`.
pub fn run(arguments: &[String], kernel: Option<PathBuf>) -> Result<()> {
    let asked = ExperimentArgs::read(arguments)?;
    let name = &asked.name;
    ensure!(THERE.contains(&name.as_str()), "in the guest there is no '{name}': use {}", THERE.join(", "));
    let words = [name.clone()].into_iter().chain(asked.quick.then(|| "--quick".into())).collect();
    let job = GuestJob { kernel, ..job(asked.program()?, words)? };
    let dir = tempfile::tempdir().context("making a directory")?;
    let mut results = GuestResults::default();
    let status = machine(&job, dir.path())?.run(job.fitting.limit, |line| {
        if !results.read(line) {
            println!("guest: {line}");
        }
    })?;
    results.write(&asked.out)?;
    ensure!(status == 0, "the experiment ended with status {status}");
    println!("results: {}", asked.out.display());
    Ok(())
}

fn job(nagaya: PathBuf, words: Vec<String>) -> Result<GuestJob> {
    let checkout = workspace::root();
    let criu = Path::new(CRIU);
    ensure!(criu.is_dir(), "there is no {CRIU}, which the guest is to get: './dev setup criu' makes it");
    Ok(GuestJob {
        fitting: &FOR_EXPERIMENTS,
        kernel: None,
        program: checkout.join("xtask/src/guest/experiment.sh"),
        beside: vec![
            ("nagaya", nagaya),
            ("xtask", std::env::current_exe().context("this program's file")?),
            ("demo", checkout.join("demo")),
            ("criu", criu.into()),
        ],
        environment: vec![format!("CHECKOUT={}", checkout.display())],
        words,
    })
}

/// Files, as lines from the console.
#[derive(Default)]
struct GuestResults(BTreeMap<String, String>);

impl GuestResults {
    /// Returns whether the line belongs to a file.
    fn read(&mut self, line: &str) -> bool {
        let Some((name, text)) = line.strip_prefix(RESULT).and_then(|rest| rest.split_once(' ')) else {
            return false;
        };
        let content = self.0.entry(name.into()).or_default();
        content.push_str(text);
        content.push('\n');
        true
    }

    /// Writes the files. The guest's programs name them, and none leaves the directory.
    fn write(&self, out: &Path) -> Result<()> {
        fs::create_dir_all(out).with_context(|| format!("creating {}", out.display()))?;
        for (name, content) in &self.0 {
            let path = out.join(Path::new(name).file_name().context("a result without a name")?);
            fs::write(&path, content).with_context(|| format!("writing {}", path.display()))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_results_become_files_and_others_stay_lines() {
        let mut results = GuestResults::default();
        let lines = ["round 1 of 3 done", "result a.csv x,y", "result b.json {", "result a.csv ", "result"];
        let read: Vec<bool> = lines.iter().map(|line| results.read(line)).collect();
        assert_eq!(read, [false, true, true, true, false]);
        let dir = tempfile::tempdir().unwrap();
        results.write(&dir.path().join("out")).unwrap();
        assert_eq!(fs::read_to_string(dir.path().join("out/a.csv")).unwrap(), "x,y\n\n");
        assert_eq!(fs::read_to_string(dir.path().join("out/b.json")).unwrap(), "{\n");
    }

    #[test]
    fn experiment_unknown_to_the_guest_is_refused_before_it_starts() {
        for arguments in [&["static", "--out", "x"][..], &[], &["rest-cost"], &["rest-cost", "--out"]] {
            let arguments: Vec<String> = arguments.iter().map(|word| (*word).into()).collect();
            assert!(run(&arguments, None).is_err(), "{arguments:?}");
        }
    }
}
