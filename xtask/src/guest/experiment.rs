//! `./dev guest --experiment NAME`: an experiment on Debian's own kernel, with nothing else on the machine.
//!
//! Where the guest's processor is emulated its clock goes with its instructions: what the machine around it does, which a
//! tail of times is full of, is not in them. Times are those of a slow processor then; ratios and counts are what can be compared.
//! Not here: the experiments.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use super::boot::Instruction;
use super::{CRIU, Fitting, Job, RUN, machine};
use crate::experiment::Asked;
use crate::workspace;

/// Those whose servers and applications the guest has.
const THERE: [&str; 1] = ["rest-cost"];

/// Memory and room are for two hundred Django applications that run, and their images. Compressed memory is what *reclaimed* needs.
const FOR_EXPERIMENTS: Fitting = Fitting {
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
    instruction: Instruction::Nanosecond,
    modules: &["lzo_rle", "zram"],
    script: RUN,
    limit: Duration::from_secs(4 * 3600),
};

/// Before each line of a result on the console, then the file's name.
const RESULT: &str = "result ";

/// `NAME [--quick] [--program FILE] --out DIR`.
pub fn run(arguments: &[String], kernel: Option<PathBuf>) -> Result<()> {
    let asked = Asked::read(arguments)?;
    let name = &asked.name;
    ensure!(THERE.contains(&name.as_str()), "in the guest there is no '{name}': use {}", THERE.join(", "));
    let words = [name.clone()].into_iter().chain(asked.quick.then(|| "--quick".into())).collect();
    let job = Job { kernel, ..job(asked.program()?, words)? };
    let dir = tempfile::tempdir().context("making a directory")?;
    let mut results = Results::default();
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

fn job(nagaya: PathBuf, words: Vec<String>) -> Result<Job> {
    let checkout = workspace::root();
    let criu = Path::new(CRIU);
    ensure!(criu.is_dir(), "there is no {CRIU}, which the guest is to get: './dev setup criu' makes it");
    Ok(Job {
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

/// Files, as lines that came over the console.
#[derive(Default)]
struct Results(BTreeMap<String, String>);

impl Results {
    /// Whether the line is one of a file.
    fn read(&mut self, line: &str) -> bool {
        let Some((name, text)) = line.strip_prefix(RESULT).and_then(|rest| rest.split_once(' ')) else {
            return false;
        };
        let content = self.0.entry(name.into()).or_default();
        content.push_str(text);
        content.push('\n');
        true
    }

    /// The guest's programs name the files: none leaves the directory.
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
        let mut results = Results::default();
        let lines = ["round 1 of 3 done", "result a.csv x,y", "result b.json {", "result a.csv ", "result"];
        let read: Vec<bool> = lines.iter().map(|line| results.read(line)).collect();
        assert_eq!(read, [false, true, true, true, false]);
        let dir = tempfile::tempdir().unwrap();
        results.write(&dir.path().join("out")).unwrap();
        assert_eq!(fs::read_to_string(dir.path().join("out/a.csv")).unwrap(), "x,y\n\n");
        assert_eq!(fs::read_to_string(dir.path().join("out/b.json")).unwrap(), "{\n");
    }

    #[test]
    fn what_the_guest_has_not_is_refused_before_it_starts() {
        for arguments in [&["static", "--out", "x"][..], &[], &["rest-cost"], &["rest-cost", "--out"]] {
            let arguments: Vec<String> = arguments.iter().map(|word| (*word).into()).collect();
            assert!(run(&arguments, None).is_err(), "{arguments:?}");
        }
    }
}
