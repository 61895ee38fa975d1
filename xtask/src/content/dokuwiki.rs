//! DokuWiki, relocated. Debian spreads it over `/usr/share`, `/var/lib` and `/etc`. A site needs it
//! in one tree that its tenant owns.
//!
//! Not here: the server that runs it.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};

use super::{copy_files, copy_tree, give, libraries, packages};
use crate::workspace;

/// Target of the packages' absolute paths inside the tree. Never served: see `DENIED`.
const LIBRARIES: &str = "debian";

/// Paths of a DokuWiki tree that a server must not serve: <https://www.dokuwiki.org/security>.
pub const DENIED: [&str; 9] =
    ["/data", "/conf", "/bin", "/inc", "/vendor", "/debian", "/sessions", "/.user.ini", "/.htaccess"];

/// Absolute paths in Debian's sources that must lead into the tree.
const MOVED: [(&str, &str); 4] = [
    ("/usr/share/php", "/debian/php"),
    ("/usr/share/javascript", "/debian/javascript"),
    ("/var/lib/dokuwiki", ""),
    ("/etc/dokuwiki", "/conf"),
];

/// Deepest level of directories that is searched; DokuWiki's own depth is 8.
const DEPTH_MAX: usize = 32;

/// Makes a wiki in `tree`, which then belongs to `uid`.
pub fn create(tree: &Path, uid: u32) -> Result<()> {
    let mut names = vec![String::from("dokuwiki")];
    names.extend(libraries("dokuwiki", &["php-", "libphp-", "libjs-"])?);
    let from = packages(&names)?;

    copy_tree(&from.join("usr/share/dokuwiki"), tree)?;
    for (link, source) in [
        ("lib/plugins", "var/lib/dokuwiki/lib/plugins"),
        ("lib/tpl", "var/lib/dokuwiki/lib/tpl"),
        ("data", "var/lib/dokuwiki/data"),
        ("conf", "etc/dokuwiki"),
    ] {
        remove_link(&tree.join(link))?;
        copy_tree(&from.join(source), &tree.join(link))?;
    }
    remove_link(&tree.join(".htaccess"))?;
    for name in ["acl.auth.php", "users.auth.php"] {
        remove_link(&tree.join("conf").join(name))?;
    }
    let libraries = tree.join(LIBRARIES);
    fs::create_dir_all(&libraries).with_context(|| format!("creating {}", libraries.display()))?;
    for name in fs::read_dir(from.join("usr/share")).context("reading the unpacked packages")?.flatten() {
        let name = name.file_name().to_string_lossy().into_owned();
        if name.starts_with("php") || name == "javascript" {
            copy_files(&from.join("usr/share").join(&name), &libraries.join(&name))?;
        }
    }
    for dir in [tree.to_path_buf(), libraries] {
        relocate(&dir, tree, DEPTH_MAX)?;
    }
    configure(tree)?;
    give(tree, uid)
}

/// Replaces the packages' absolute paths in PHP sources.
fn relocate(dir: &Path, tree: &Path, depth: usize) -> Result<()> {
    ensure!(depth > 0, "{} lies too deep", dir.display());
    for entry in fs::read_dir(dir).with_context(|| format!("reading {}", dir.display()))? {
        let path: PathBuf = entry.context("reading a directory")?.path();
        let meta = path.symlink_metadata().with_context(|| format!("looking at {}", path.display()))?;
        if meta.is_dir() {
            relocate(&path, tree, depth - 1)?;
        } else if meta.is_file() && path.extension().is_some_and(|ending| ending == "php") {
            let Ok(text) = fs::read_to_string(&path) else { continue };
            let mut moved = text.clone();
            for (old, new) in MOVED {
                moved = moved.replace(old, &format!("{}{new}", tree.display()));
            }
            if moved != text {
                fs::write(&path, moved).with_context(|| format!("writing {}", path.display()))?;
            }
        }
    }
    Ok(())
}

/// Writes the wiki's own settings and first page, from `demo/wiki`.
fn configure(tree: &Path) -> Result<()> {
    let own = workspace::root().join("demo/wiki");
    // Debian's list of farm paths is replaced by nothing: one tree is one wiki.
    let preload = tree.join("inc/preload.php");
    fs::write(&preload, "<?php\n").with_context(|| format!("writing {}", preload.display()))?;
    let files = [
        ("local.php", "conf/local.php"),
        ("acl.auth.php", "conf/acl.auth.php"),
        ("users.auth.php", "conf/users.auth.php"),
        ("start.txt", "data/pages/start.txt"),
    ];
    for (source, name) in files {
        let to = tree.join(name);
        fs::copy(own.join(source), &to).with_context(|| format!("writing {}", to.display()))?;
    }
    // Sessions are in the tree: they end with it, and no other site's PHP can read them.
    let sessions = tree.join("sessions");
    fs::create_dir_all(&sessions).with_context(|| format!("creating {}", sessions.display()))?;
    let ini = tree.join(".user.ini");
    let text = format!("session.save_path = \"{}\"\n", sessions.display());
    fs::write(&ini, text).with_context(|| format!("writing {}", ini.display()))
}

fn remove_link(path: &Path) -> Result<()> {
    match fs::symlink_metadata(path) {
        Ok(meta) if meta.is_symlink() => {
            fs::remove_file(path).with_context(|| format!("removing {}", path.display()))
        }
        Ok(meta) if meta.is_dir() => {
            fs::remove_dir_all(path).with_context(|| format!("removing {}", path.display()))
        }
        _ => Ok(()),
    }
}
