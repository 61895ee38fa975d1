//! gitweb over this repository: the CGI program of Debian's package `git`, and a clone that its
//! tenant may read.
//!
//! Not here: the server that runs it.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use super::{copy_files, give, run};
use crate::workspace;

/// Part of the package `git`; the package `gitweb` only configures web servers to use it.
const PROGRAM_DIR: &str = "/usr/share/gitweb";

/// Makes `tree/www` with the program, `tree/repositories/nagaya.git`, `tree/gitweb.conf`; all owned
/// by `uid`.
pub fn create(tree: &Path, uid: u32) -> Result<()> {
    ensure!(
        Path::new(PROGRAM_DIR).is_dir(),
        "{PROGRAM_DIR} is missing: it belongs to the package git ('sudo ./dev setup demo')"
    );
    copy_files(Path::new(PROGRAM_DIR), &tree.join("www"))?;
    let repositories = tree.join("repositories");
    fs::create_dir_all(&repositories).with_context(|| format!("creating {}", repositories.display()))?;

    // git refuses repositories of other users, unless a file that only this call sees allows them.
    let home = tempfile::tempdir().context("making a directory")?;
    fs::write(home.path().join(".gitconfig"), "[safe]\n\tdirectory = *\n")
        .context("writing git's settings")?;
    let clone = repositories.join("nagaya.git");
    run(Command::new("git")
        .args(["clone", "--quiet", "--bare", "--no-hardlinks"])
        .arg(workspace::root())
        .arg(&clone)
        .env("HOME", home.path()))?;
    let description = clone.join("description");
    fs::write(&description, "nagaya, a web hosting engine\n")
        .with_context(|| format!("writing {}", description.display()))?;

    let config =
        fs::read_to_string(workspace::root().join("demo/gitweb.conf")).context("reading gitweb.conf")?;
    let config = config.replace("@TREE@", &tree.to_string_lossy());
    let file = tree.join("gitweb.conf");
    fs::write(&file, config).with_context(|| format!("writing {}", file.display()))?;
    give(tree, uid)
}
