//! `./dev experiment --report`: makes `docs/measurements.md` and README's table of numbers from the
//! files of experiments.
//!
//! With `--from DIR`, results of experiments below DIR are taken into `docs/measurements` first.
//! Not here: how a result becomes a stored file (`stored`), and the form of the page (`page`) and
//! of README's table (`readme`).

mod page;
mod readme;
mod stored;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};

use self::stored::StoredRun;
use crate::workspace;

/// The generated page, and the directory of its sources: one file for each experiment.
const PAGE: &str = "docs/measurements.md";
const README: &str = "README.md";
const SOURCES: &str = "docs/measurements";

/// Directories that are searched one within the other: `DIR/static-new/static.json`.
const DEPTH_MAX: u32 = 3;

/// Runs `--report [--from DIR]`.
pub fn run(arguments: &[String]) -> Result<()> {
    let mut from = None;
    let mut words = arguments.iter();
    while let Some(word) = words.next() {
        match word.as_str() {
            "--report" => {}
            "--from" => from = Some(PathBuf::from(words.next().context("--from needs a directory")?)),
            other => bail!("unknown argument '{other}': use --report [--from DIR]"),
        }
    }
    if let Some(from) = from {
        take_results(&from, &workspace::root().join(SOURCES))?;
    }
    write_page()
}

/// Writes the page and README's table again from the stored files.
pub fn write_page() -> Result<()> {
    let runs = read_stored(&workspace::root().join(SOURCES))?;
    write_if_new(PAGE, page::render(&runs))?;
    let path = workspace::root().join(README);
    let readme = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    write_if_new(README, readme::renew(&readme, &runs)?)
}

fn write_if_new(name: &str, text: String) -> Result<()> {
    let path = workspace::root().join(name);
    let is_new = fs::read_to_string(&path).ok().is_none_or(|old| old != text);
    if is_new {
        fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
    }
    println!("{} {}", path.display(), if is_new { "was written" } else { "is up to date" });
    Ok(())
}

/// Reads all stored runs in `dir`, in the order of their names.
fn read_stored(dir: &Path) -> Result<Vec<StoredRun>> {
    let mut runs = BTreeMap::new();
    for path in list_json_files(dir, 1)? {
        let run = StoredRun::read(&path)?;
        runs.insert(run.experiment.clone(), run);
    }
    Ok(runs.into_values().collect())
}

/// Stores the newest result of each experiment beneath `from` in `to`, unless `to` has a newer one.
fn take_results(from: &Path, to: &Path) -> Result<()> {
    let mut newest: BTreeMap<String, StoredRun> = BTreeMap::new();
    for path in list_json_files(from, DEPTH_MAX)? {
        let Some(run) = StoredRun::from_result(&path)? else { continue };
        let is_newer = newest.get(&run.experiment).is_none_or(|other| other.date() < run.date());
        if is_newer {
            newest.insert(run.experiment.clone(), run);
        }
    }
    ensure!(!newest.is_empty(), "no result of an experiment (NAME.json) lies in {}", from.display());
    fs::create_dir_all(to).with_context(|| format!("creating {}", to.display()))?;
    for (name, run) in newest {
        let path = to.join(format!("{name}.json"));
        let stored = if path.exists() { Some(StoredRun::read(&path)?) } else { None };
        match stored {
            Some(stored) if stored.date() > run.date() => {
                println!("{name}: kept, the stored run of {} is newer", stored.date());
            }
            _ => {
                fs::write(&path, run.text()?).with_context(|| format!("writing {}", path.display()))?;
                println!("{name}: taken, the run of {}", run.date());
            }
        }
    }
    Ok(())
}

/// Lists the JSON files in `dir`, and in directories within it down to `depth`.
fn list_json_files(dir: &Path, depth: u32) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).with_context(|| format!("reading {}", dir.display()))? {
        let path = entry.with_context(|| format!("reading {}", dir.display()))?.path();
        if path.is_dir() && depth > 1 {
            found.extend(list_json_files(&path, depth - 1)?);
        } else if path.extension().is_some_and(|ending| ending == "json") {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_is_what_the_files_say() {
        let root = workspace::root();
        let stored = fs::read_to_string(root.join(PAGE)).unwrap();
        let runs = read_stored(&root.join(SOURCES)).unwrap();
        assert!(stored == page::render(&runs), "{PAGE} is out of step: run `./dev experiment --report`");
        let readme = fs::read_to_string(root.join(README)).unwrap();
        let renewed = readme::renew(&readme, &runs).unwrap();
        assert!(readme == renewed, "{README} has numbers of no stored run: run `./dev experiment --report`");
    }

    #[test]
    fn the_newest_result_is_taken_and_none_is_replaced_by_an_older() {
        let dir = tempfile::tempdir().unwrap();
        let from = dir.path().join("out");
        let to = dir.path().join("stored");
        write_result(&from.join("a"), "2026-01-02T00:00:00Z", 20.0);
        write_result(&from.join("b"), "2026-01-01T00:00:00Z", 10.0);
        // Other programs' files are no results.
        fs::write(from.join("package.json"), r#"{"name": "x"}"#).unwrap();
        take_results(&from, &to).unwrap();
        let taken = || StoredRun::read(&to.join("php.json")).unwrap();
        assert_eq!(taken().results["page_rps"], 20.0);

        write_result(&from.join("a"), "2025-12-31T00:00:00Z", 30.0);
        take_results(&from, &to).unwrap();
        assert_eq!(taken().results["page_rps"], 20.0);

        write_result(&from.join("a"), "2026-01-03T00:00:00Z", 40.0);
        take_results(&from, &to).unwrap();
        assert_eq!(taken().results["page_rps"], 40.0);
    }

    #[test]
    fn a_directory_without_results_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("package.json"), r#"{"name": "x"}"#).unwrap();
        let error = take_results(dir.path(), &dir.path().join("stored")).unwrap_err();
        assert!(error.to_string().contains("no result of an experiment"), "{error}");
    }

    fn write_result(dir: &Path, date: &str, rps: f64) {
        fs::create_dir_all(dir).unwrap();
        let text = serde_json::json!({
            "experiment": "php", "page_rps": rps, "setting": {}, "targets": {}, "machine": {"date": date},
        });
        fs::write(dir.join("php.json"), text.to_string()).unwrap();
        fs::write(dir.join("php.csv"), format!("round,case,variant,metric,value\n0,page,nagaya,rps,{rps}\n"))
            .unwrap();
    }
}
