//! WordPress, on Apache with PHP in it or on php-fpm, and its tables in MariaDB. Sources and PHP's
//! module are from Debian's packages, which are unpacked and not installed. So no system Apache
//! runs after the next boot.
//!
//! Not here: the database server (`mariadb`), the node that runs it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

use super::mariadb::DatabaseAccount;
use super::{AppPage, ContentApp, LOGIN, copy_entries, give, libraries, need, packages, run, secret};
use crate::workspace;

const APACHE: &str = "/usr/sbin/apache2";

/// php-fpm has its version in its name.
const PHP_FPM: (&str, &str) = ("/usr/sbin", "php-fpm");

/// Makes its tables; a module of Apache serves its pages.
const PHP: &str = "/usr/bin/php";

/// The server that runs its scripts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WordpressServer {
    /// Speaks HTTP, and serves its files, too.
    Apache,
    /// Speaks FastCGI.
    PhpFpm,
}

/// Makes a WordPress in `tree`, which then belongs to `uid`, with its tables in the account's
/// database. Takes about two seconds once the packages are there.
pub fn create(
    tree: &Path,
    uid: u32,
    account: &DatabaseAccount,
    server: WordpressServer,
) -> Result<ContentApp> {
    need(&[PHP])?;
    let mut names = vec!["wordpress".to_owned(), "wordpress-theme-twentytwentythree".into()];
    names.extend(libraries("wordpress", &["libjs-", "php-getid3"])?);
    if server == WordpressServer::Apache {
        need(&[APACHE])?;
        names.extend(libraries("libapache2-mod-php", &["libapache2-mod-php"])?);
    }
    let from = packages(&names)?;

    let html = tree.join("html");
    // Its `.htaccess` leads to /etc.
    copy_entries(&from.join("usr/share/wordpress"), &html, &[".htaccess"])?;
    let own = workspace::root().join("demo/wordpress");
    let copy = |name: &str, to: PathBuf| {
        fs::copy(own.join(name), &to).with_context(|| format!("writing {}", to.display())).map(drop)
    };
    copy("wp-config.php", html.join("wp-config.php"))?;
    database(tree, account)?;
    let ini = tree.join("php");
    fs::create_dir_all(&ini).with_context(|| format!("creating {}", ini.display()))?;
    copy("site.ini", ini.join("site.ini"))?;
    run(Command::new(PHP)
        .arg(own.join("install.php"))
        .arg(&html)
        .env("ADMIN_PASSWORD", LOGIN.password)
        .current_dir(tree))?;
    let mut backend = json!({
        "kind": "app",
        "directory": tree,
        "writable": [html.join("wp-content")],
        "databases": [{"socket": account.socket}],
        "ready": {"path": "/wp-login.php"},
        "warm_up": ["/", "/?p=1", "/wp-login.php"],
        "release": "1",
    });
    let more = match server {
        WordpressServer::Apache => on_apache(&from, tree, &ini)?,
        WordpressServer::PhpFpm => {
            copy("php-fpm.conf", tree.join("php-fpm.conf"))?;
            on_php_fpm(tree, &ini)?
        }
    };
    for (key, value) in more.as_object().context("an object")? {
        backend[key] = value.clone();
    }
    give(tree, uid)?;
    let page = AppPage { path: "/", text: "A weblog that rests" };
    Ok(ContentApp { backend, files: None, page, login: "/wp-login.php" })
}

fn on_apache(from: &Path, tree: &Path, ini: &Path) -> Result<Value> {
    let version = apache(from, tree)?;
    // PHP extensions as set up for CGI; Apache's own set belongs to a package that is not
    // installed.
    let scanned = format!("/etc/php/{version}/cgi/conf.d:{}", ini.display());
    let config = tree.join("apache/apache.conf");
    Ok(json!({
        "command": [APACHE, "-DFOREGROUND", "-f", config],
        "listen": "port",
        "env": {"PHP_INI_SCAN_DIR": scanned},
    }))
}

fn on_php_fpm(tree: &Path, ini: &Path) -> Result<Value> {
    let (dir, prefix) = PHP_FPM;
    let names = fs::read_dir(dir).with_context(|| format!("reading {dir}"))?;
    let found = names.flatten().find_map(|entry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        let version = name.strip_prefix(prefix)?.to_owned();
        Some((entry.path(), version))
    });
    let Some((program, version)) = found else {
        need(&[&format!("{dir}/{prefix}")])?;
        bail!("{dir}/{prefix} has no version in its name");
    };
    let scanned = format!("/etc/php/{version}/fpm/conf.d:{}", ini.display());
    Ok(json!({
        "command": [program, "--nodaemonize", "--force-stderr", "--fpm-config", tree.join("php-fpm.conf")],
        "protocol": "fastcgi",
        "files": {"root": tree.join("html"), "front_controller": "index.php"},
        "env": {"PHP_INI_SCAN_DIR": scanned},
    }))
}

/// Writes the secret settings of its database.
fn database(tree: &Path, account: &DatabaseAccount) -> Result<()> {
    let (socket, name) = (account.socket.display(), &account.name);
    let text = format!(
        "<?php\ndefine('DB_NAME', '{name}');\ndefine('DB_USER', '{name}');\n\
         define('DB_PASSWORD', '{}');\ndefine('DB_HOST', 'localhost:{socket}');\n",
        account.password
    );
    secret(&tree.join("database.php"), &text)
}

/// Writes Apache's configuration with PHP's module. Returns the version of PHP, such as `8.2`.
fn apache(from: &Path, tree: &Path) -> Result<String> {
    let dir = tree.join("apache");
    fs::create_dir_all(&dir).with_context(|| format!("creating {}", dir.display()))?;
    let modules = from.join("usr/lib/apache2/modules");
    let names = fs::read_dir(&modules).with_context(|| format!("reading {}", modules.display()))?;
    let module = names.flatten().find_map(|entry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        let version = name.strip_prefix("libphp")?.strip_suffix(".so")?.to_owned();
        Some((entry.path(), version))
    });
    let (module, version) = module.with_context(|| format!("no libphp*.so in {}", modules.display()))?;
    fs::copy(&module, dir.join("libphp.so")).with_context(|| format!("copying {}", module.display()))?;
    let config = fs::read_to_string(workspace::root().join("demo/wordpress/apache.conf"));
    let config = config.context("reading apache.conf")?.replace("@TREE@", &tree.to_string_lossy());
    let file = dir.join("apache.conf");
    fs::write(&file, config).with_context(|| format!("writing {}", file.display()))?;
    Ok(version)
}
