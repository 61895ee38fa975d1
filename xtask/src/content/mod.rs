//! Real sites from Debian's packages, unpacked privately: nothing is installed, no web server is configured.
//!
//! Not here: who serves them (`demo`, `experiment`), programs that must be installed (`dev`).

pub mod dokuwiki;
pub mod gitweb;

use std::fs;
use std::os::unix::fs::{MetadataExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::workspace;

/// Unpacks packages, downloading those that were not yet, into one tree that is kept between runs.
pub fn packages(names: &[String]) -> Result<PathBuf> {
    let tree = workspace::cache_dir().join("packages");
    let done = workspace::cache_dir().join("unpacked");
    for dir in [&tree, &done] {
        fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))?;
    }
    let missing: Vec<&String> = names.iter().filter(|name| !done.join(name).exists()).collect();
    for name in &missing {
        unpack(name, &tree).with_context(|| format!("unpacking Debian's package {name}"))?;
        let mark = done.join(name);
        fs::write(&mark, "").with_context(|| format!("creating {}", mark.display()))?;
    }
    if !missing.is_empty() {
        // Whoever owns the checkout must be able to remove this without root.
        let owner = fs::metadata(workspace::root()).context("looking at the checkout")?;
        give(&workspace::cache_dir(), owner.uid())?;
    }
    Ok(tree)
}

fn unpack(name: &str, tree: &Path) -> Result<()> {
    eprintln!("downloading Debian's package {name} (unpacked to {}, not installed)", tree.display());
    let dir = tempfile::tempdir().context("making a directory")?;
    let download =
        || Command::new("apt-get").args(["download", "-qq", name]).current_dir(dir.path()).output();
    let mut output = download().context("running apt-get")?;
    if !output.status.success() {
        // Without package lists, or with old ones, the file is not found; a second failure is final.
        run(Command::new("apt-get").args(["update", "-qq"]))?;
        output = download().context("running apt-get")?;
    }
    ensure!(output.status.success(), "apt-get download: {}", String::from_utf8_lossy(&output.stderr));
    for entry in fs::read_dir(dir.path()).context("reading the download")?.flatten() {
        run(Command::new("dpkg").arg("-x").arg(entry.path()).arg(tree))?;
    }
    Ok(())
}

/// Packages that `name` depends on and whose own name begins with one of `prefixes`: libraries of PHP and
/// JavaScript differ between Debian's releases.
pub fn libraries(name: &str, prefixes: &[&str]) -> Result<Vec<String>> {
    let output =
        Command::new("apt-cache").args(["depends", "--no-recommends", "--no-suggests", name]).output();
    let output = output.context("running apt-cache")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let names = text.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
    Ok(names.filter(|name| prefixes.iter().any(|prefix| name.starts_with(prefix))).map(Into::into).collect())
}

/// Copies a directory's content into another, with links inside it kept.
pub fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).with_context(|| format!("creating {}", to.display()))?;
    run(Command::new("cp").args(["-R", "--no-dereference", "--no-target-directory"]).arg(from).arg(to))
}

/// Copies a directory's content into another, with links replaced by what they point to.
pub fn copy_files(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).with_context(|| format!("creating {}", to.display()))?;
    run(Command::new("cp").args(["-R", "--dereference", "--no-target-directory"]).arg(from).arg(to))
}

/// Gives everything beneath `dir` to `uid`.
pub fn give(dir: &Path, uid: u32) -> Result<()> {
    chown(dir, Some(uid), Some(uid)).with_context(|| format!("giving {} to uid {uid}", dir.display()))?;
    run(Command::new("chown").args(["-R", "--no-dereference", &format!("{uid}:{uid}")]).arg(dir))
}

/// Runs a command whose failure is an error with what it printed.
pub fn run(command: &mut Command) -> Result<()> {
    let what = format!("{command:?}");
    let output = command.output().with_context(|| format!("running {what}"))?;
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    ensure!(output.status.success(), "{what} failed: {text}");
    Ok(())
}
