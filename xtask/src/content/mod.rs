//! Real sites from Debian's packages, most of them unpacked privately: no web server is configured.
//!
//! Not here: the servers (`demo`, `experiment`), programs that must be installed (`dev`).

pub mod django;
pub mod dokuwiki;
pub mod field;
pub mod gitweb;
pub mod mariadb;
pub mod population;
pub mod postgresql;
pub mod redmine;
pub mod wordpress;

use std::fmt;
use std::fs::{self, File};
use std::io::Read as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use crate::workspace;

/// An application that listens by itself, ready to be a site.
#[derive(Debug, Clone)]
pub struct ContentApp {
    /// `backend` of its site's record.
    pub backend: Value,
    /// Files that a static site at this path can serve, so that they wake nothing.
    pub files: Option<(&'static str, PathBuf)>,
    pub page: AppPage,
    /// Page for a login as `LOGIN`.
    pub login: &'static str,
}

/// A page made from the application's database.
#[derive(Debug, Clone, Copy)]
pub struct AppPage {
    pub path: &'static str,
    /// Text on the page, from the database.
    pub text: &'static str,
}

/// Login for all the applications. They live for one demo or experiment on the loopback interface,
/// so the password is no secret.
pub const LOGIN: AppLogin = AppLogin { name: "admin", password: "on-nagaya" };

#[derive(Debug, Clone, Copy)]
pub struct AppLogin {
    pub name: &'static str,
    pub password: &'static str,
}

impl ContentApp {
    /// Returns the records of its sites: itself and its files.
    pub fn records(&self, name: &str, tenant: &str, host: &str) -> Vec<Value> {
        let mut all =
            vec![json!({"site": {"name": name, "tenant": tenant, "hosts": [host], "backend": self.backend}})];
        if let Some((path, root)) = &self.files {
            all.push(json!({"site": {
                "name": format!("{name}-files"),
                "tenant": tenant,
                "hosts": [host],
                "path": path,
                "backend": {"kind": "static", "root": root},
            }}));
        }
        all
    }
}

/// A file or package of Debian is missing on this machine: no fault of the application made from
/// it.
#[derive(Debug)]
pub struct MissingPackage(String);

impl std::error::Error for MissingPackage {}

impl fmt::Display for MissingPackage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Fails with `MissingPackage` if a program or a directory of a package does not exist.
pub fn need(paths: &[&str]) -> Result<(), MissingPackage> {
    match paths.iter().find(|path| !Path::new(path).exists()) {
        None => Ok(()),
        Some(path) => Err(MissingPackage(format!("{path} is missing: 'sudo ./dev setup apps' installs it"))),
    }
}

/// Returns the tree of unpacked packages.
pub fn package_dir() -> PathBuf {
    workspace::cache_dir().join("packages")
}

/// Unpacks packages, downloading missing ones, into one tree that is kept between runs.
pub fn packages(names: &[String]) -> Result<PathBuf> {
    let tree = package_dir();
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
        // The owner of the checkout must be able to remove this without root.
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
        // Without package lists, or with old ones, the file is not found; a second failure is
        // final.
        let updated = Command::new("apt-get").args(["update", "-qq"]).status().context("running apt-get")?;
        if !updated.success() {
            return Err(MissingPackage("apt-get cannot reach its servers".into()).into());
        }
        output = download().context("running apt-get")?;
    }
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(MissingPackage(format!("apt-get cannot download it: {}", said.trim())).into());
    }
    for entry in fs::read_dir(dir.path()).context("reading the download")?.flatten() {
        run(Command::new("dpkg").arg("-x").arg(entry.path()).arg(tree))?;
    }
    Ok(())
}

/// Returns dependencies of `name` whose own name begins with one of `prefixes`. Libraries of PHP
/// and JavaScript differ between Debian's releases.
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

/// Copies a directory's content into another, with links replaced by their targets.
pub fn copy_files(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).with_context(|| format!("creating {}", to.display()))?;
    run(Command::new("cp").args(["-R", "--dereference", "--no-target-directory"]).arg(from).arg(to))
}

/// Copies a directory's content into another, except the named entries, and with links replaced by
/// their targets.
pub fn copy_entries(from: &Path, to: &Path, without: &[&str]) -> Result<()> {
    fs::create_dir_all(to).with_context(|| format!("creating {}", to.display()))?;
    let entries = fs::read_dir(from).with_context(|| format!("reading {}", from.display()))?.flatten();
    let wanted = entries.filter(|entry| !without.iter().any(|name| entry.file_name() == *name));
    run(Command::new("cp")
        .args(["-R", "--dereference", "--target-directory"])
        .arg(to)
        .args(wanted.map(|entry| entry.path())))
}

/// Gives everything below `dir` to `uid`.
pub fn give(dir: &Path, uid: u32) -> Result<()> {
    chown(dir, Some(uid), Some(uid)).with_context(|| format!("giving {} to uid {uid}", dir.display()))?;
    run(Command::new("chown").args(["-R", "--no-dereference", &format!("{uid}:{uid}")]).arg(dir))
}

/// Returns 32 hexadecimal digits that nobody can guess.
fn random_word() -> Result<String> {
    let mut bytes = [0; 16];
    File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes)).context("/dev/urandom")?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Writes a file that only its owner may read.
fn secret(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("writing {}", path.display()))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o400))
        .with_context(|| format!("closing {}", path.display()))
}

/// Runs a command. Its failure is an error with its output.
pub fn run(command: &mut Command) -> Result<()> {
    let what = format!("{command:?}");
    let output = command.output().with_context(|| format!("running {what}"))?;
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    ensure!(output.status.success(), "{what} failed: {text}");
    Ok(())
}
