//! Large PHP applications on php-fpm, by FastCGI, from Debian's packages. `./dev setup field`
//! unpacks them where nothing else looks, and installs their libraries.
//!
//! Not here: WordPress and DokuWiki (`content`).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::{FieldApp, FieldSetting, FieldStep, TOKEN, VALUE, write};
use crate::content::mariadb::DatabaseAccount;
use crate::content::{AppPage, ContentApp, MissingPackage, give, need, random_word, run};
use crate::workspace;

/// Where the packages are unpacked.
const UNPACKED: &str = "/usr/local/lib/nagaya/field/usr/share";

const PHP: &str = "/usr/bin/php";

/// The directories of an application's files and of its data.
struct PhpTree {
    html: PathBuf,
    /// Directory of the files that PHP writes: sessions, caches, databases.
    own: PathBuf,
    config: PathBuf,
    scan: String,
    fpm: PathBuf,
}

/// Copies a package's files, and writes settings of PHP and of php-fpm.
fn lay_out(tree: &Path, package: &str) -> Result<PhpTree> {
    let from = Path::new(UNPACKED).join(package);
    need(&[&from.to_string_lossy(), PHP])
        .map_err(|missing| MissingPackage(missing.0.replace("apps", "field")))?;
    let (html, own, ini) = (tree.join("html"), tree.join("own"), tree.join("php"));
    copy_existing(&from, &html)?;
    for dir in [&own.join("sessions"), &own.join("tmp"), &ini] {
        fs::create_dir_all(dir).with_context(|| format!("creating {}", dir.display()))?;
    }
    let demo = workspace::root().join("demo/wordpress");
    let copy = |name: &str, to: &Path| {
        fs::copy(demo.join(name), to).with_context(|| format!("writing {}", to.display())).map(drop)
    };
    let config = tree.join("php-fpm.conf");
    copy("php-fpm.conf", &config)?;
    copy("site.ini", &ini.join("site.ini"))?;
    // Sessions must last; those in the sandbox's /tmp would end with its processes.
    let more = format!("session.save_path = \"{}\"\nmemory_limit = 256M\n", own.join("sessions").display());
    write(&ini.join("own.ini"), &more)?;
    let fpm = crate::server::phpfpm::program();
    let fpm = fpm.ok_or_else(|| {
        MissingPackage("php-fpm is missing: 'sudo ./dev setup experiment' installs it".into())
    })?;
    let version = fpm.trim_start_matches("php-fpm").to_owned();
    Ok(PhpTree {
        html,
        own,
        config,
        scan: format!("/etc/php/{version}/fpm/conf.d:{}", ini.display()),
        fpm: Path::new("/usr/sbin").join(fpm),
    })
}

/// Copies with links replaced by their targets, and without broken links.
fn copy_existing(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).with_context(|| format!("creating {}", to.display()))?;
    for entry in fs::read_dir(from).with_context(|| format!("reading {}", from.display()))?.flatten() {
        let (path, target) = (entry.path(), to.join(entry.file_name()));
        if path.is_dir() {
            copy_existing(&path, &target)?;
        } else if path.exists() {
            fs::copy(&path, &target).with_context(|| format!("copying {}", path.display()))?;
        }
    }
    Ok(())
}

impl PhpTree {
    fn backend(&self, tree: &Path, front: &str, warm_up: &[&str], more: &Value) -> Result<Value> {
        let mut backend = json!({
            "kind": "app",
            "command": [self.fpm, "--nodaemonize", "--force-stderr", "--fpm-config", self.config],
            "directory": tree,
            "protocol": "fastcgi",
            "files": {"root": self.html, "front_controller": front},
            "env": {"PHP_INI_SCAN_DIR": self.scan},
            "writable": [self.own],
            "ready": {"path": warm_up[0]},
            "warm_up": warm_up,
            "release": "1",
        });
        for (key, value) in more.as_object().context("an object")? {
            backend[key] = value.clone();
        }
        Ok(backend)
    }
}

/// Makes it with a login to MariaDB, whose user is the account's. With two servers to choose from,
/// the first page has their names.
pub fn phpmyadmin(tree: &Path, uid: u32, account: &DatabaseAccount) -> Result<FieldApp> {
    let php = lay_out(tree, "phpmyadmin")?;
    let file = php.html.join("config.inc.php");
    let text = format!(
        "<?php\n$cfg['blowfish_secret'] = '{}';\n$cfg['Servers'][1] = ['auth_type' => 'cookie', 'host' => 'localhost', \
         'socket' => '{}', 'verbose' => '{{value}}'];\n$cfg['Servers'][2] = ['verbose' => 'another'] + $cfg['Servers'][1];\n\
         $cfg['TempDir'] = '{}';\n$cfg['VersionCheck'] = false;\n\
         $cfg['PmaNoRelation_DisableWarning'] = true;\n$cfg['SendErrorReports'] = 'never';\n",
        random_word()?,
        account.socket.display(),
        php.own.join("tmp").display()
    );
    write(&file, &text.replace(VALUE, "first"))?;
    let vendor = php.html.join("libraries/vendor_config.php");
    let settings = fs::read_to_string(&vendor).with_context(|| format!("reading {}", vendor.display()))?;
    let moved = settings
        .replace("'/etc/phpmyadmin/", &format!("'{}/", php.html.display()))
        .replace("'/var/lib/phpmyadmin/", &format!("'{}/", php.own.display()));
    write(&vendor, &moved)?;
    give(tree, uid)?;
    let more = json!({"databases": [{"socket": account.socket}]});
    let backend = php.backend(tree, "index.php", &["/index.php"], &more)?;
    let form = format!(
        "route=/&pma_username={}&pma_password={}&server=1&token={TOKEN}",
        account.name, account.password
    );
    Ok(FieldApp {
        app: ContentApp {
            backend,
            files: None,
            page: AppPage { path: "/index.php", text: "Welcome to" },
            login: "/index.php",
        },
        login: vec![
            FieldStep::get("/index.php").with_token("name=\"token\" value=\"", "\""),
            FieldStep::post("/index.php?route=/", &form),
        ],
        session: AppPage { path: "/index.php?route=/", text: "route=/logout" },
        setting: FieldSetting { file, text, path: "/index.php", inside: Vec::new() },
    })
}

/// Password of the wiki's administrator: it requires ten characters.
const WIKI_PASSWORD: &str = "on-nagaya-wiki";

/// Makes a wiki with its tables in SQLite and its caches in memory (APCu), as its manual
/// recommends.
pub fn mediawiki(tree: &Path, uid: u32) -> Result<FieldApp> {
    let php = lay_out(tree, "mediawiki")?;
    let data = php.own.join("data");
    // There are no extensions, but that directory is read anyway.
    let extensions = php.html.join("extensions");
    fs::create_dir_all(&extensions).with_context(|| format!("creating {}", extensions.display()))?;
    let script = php.html.join("maintenance/install.php");
    run(Command::new(PHP)
        .arg(&script)
        .args(["--dbtype", "sqlite", "--dbname", "wiki", "--dbpath"])
        .arg(&data)
        .args(["--server", "http://mediawiki.example", "--scriptpath", "", "--lang", "en"])
        .args(["--pass", WIKI_PASSWORD, "--with-extensions=", "first", "Admin"])
        .current_dir(&php.html))?;
    let file = php.html.join("LocalSettings.php");
    let made = fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
    let text = format!(
        "{}\n$wgSitename = '{{value}}';\n$wgMainCacheType = CACHE_ACCEL;\n$wgSessionCacheType = CACHE_DB;\n\
         $wgCacheDirectory = '{}';\n",
        made.replace("$wgSitename = \"first\";", ""),
        php.own.join("tmp").display()
    );
    write(&file, &text.replace(VALUE, "first"))?;
    give(tree, uid)?;
    let backend = php.backend(tree, "index.php", &["/index.php/Main_Page"], &json!({"start_seconds": 60}))?;
    let token = ("token\":\"", "+");
    let tokens = |kind: &str| {
        FieldStep::get(&format!("/api.php?action=query&meta=tokens&type={kind}&format=json"))
            .with_token(token.0, token.1)
    };
    let log_in = format!("lgname=Admin&lgpassword={WIKI_PASSWORD}&lgtoken={TOKEN}%2B%5C");
    let edit = format!("title=MediaWiki:Sitenotice&text={VALUE}&token={TOKEN}%2B%5C");
    Ok(FieldApp {
        app: ContentApp {
            backend,
            files: None,
            page: AppPage { path: "/index.php/Main_Page", text: "MediaWiki has been installed" },
            login: "/index.php/Special:UserLogin",
        },
        login: vec![tokens("login"), FieldStep::post("/api.php?action=login&format=json", &log_in)],
        session: AppPage {
            path: "/api.php?action=query&meta=userinfo&format=json",
            text: "\"name\":\"Admin\"",
        },
        setting: FieldSetting {
            file,
            text,
            path: "/index.php/Main_Page",
            inside: vec![tokens("csrf"), FieldStep::post("/api.php?action=edit&format=json", &edit)],
        },
    })
}

/// Makes a mail reader with its sessions in SQLite. There is no mail server: a session begins with
/// the login page, whose token is the session's.
pub fn roundcube(tree: &Path, uid: u32) -> Result<FieldApp> {
    let php = lay_out(tree, "roundcube")?;
    let initial = php.html.join("program/include/iniset.php");
    let text = fs::read_to_string(&initial).with_context(|| format!("reading {}", initial.display()))?;
    write(&initial, &text.replace("/var/lib/roundcube/", &format!("{}/", php.html.display())))?;
    let defaults = Path::new(UNPACKED).join("../../etc/roundcube");
    copy_existing(&defaults, &php.html.join("config"))?;
    let database = php.own.join("roundcube.sqlite");
    let tables = php.html.join("SQL/sqlite.initial.sql");
    let statements = fs::read_to_string(&tables).with_context(|| format!("reading {}", tables.display()))?;
    let make = "$d = new PDO('sqlite:' . $argv[1]); $d->setAttribute(PDO::ATTR_ERRMODE, PDO::ERRMODE_EXCEPTION); $d->exec($argv[2]);";
    run(Command::new(PHP).args(["-r", make]).arg(&database).arg(statements))?;
    let file = php.html.join("config/config.inc.php");
    let own = php.own.display();
    let text = format!(
        "<?php\n$config['db_dsnw'] = 'sqlite:///{}?mode=0640';\n$config['imap_host'] = 'localhost:143';\n\
         $config['product_name'] = '{{value}}';\n$config['des_key'] = '{}';\n$config['plugins'] = [];\n$config['skin'] = 'elastic';\n\
         $config['log_dir'] = '{own}/tmp/';\n$config['temp_dir'] = '{own}/tmp/';\n$config['enable_installer'] = false;\n",
        database.display(),
        &random_word()?[..24]
    );
    write(&file, &text.replace(VALUE, "first"))?;
    give(tree, uid)?;
    let backend = php.backend(tree, "index.php", &["/index.php"], &json!({}))?;
    Ok(FieldApp {
        app: ContentApp {
            backend,
            files: None,
            page: AppPage { path: "/index.php", text: "rcmlogin" },
            login: "/index.php",
        },
        login: vec![FieldStep::get("/index.php").with_token("name=\"_token\" value=\"", "\"")],
        session: AppPage { path: "/index.php", text: TOKEN },
        setting: FieldSetting { file, text, path: "/index.php", inside: Vec::new() },
    })
}
