//! Applications of the field: small ones of our own on popular frameworks, and large ones from
//! Debian. Each has sessions and settings. So a test can show whether a wake keeps sessions and
//! does not restore old settings.
//!
//! Not here: the test (`experiment::instances::field`). Their sources are in `demo/field`.

mod php;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::mariadb::DatabaseAccount;
use super::{
    AppPage, ContentApp, MissingPackage, copy_files, copy_tree, give, need, random_word, run, secret,
};
use crate::workspace;

pub use php::{mediawiki, phpmyadmin, roundcube};

/// Text on the page of the small ones, from their files.
const NOTE: &str = "These notes rest when nobody reads them";

/// Placeholder for the new text of a setting.
pub const VALUE: &str = "{value}";

/// Placeholder for a token of the previous step.
pub const TOKEN: &str = "{token}";

/// An application, and its test requests.
#[derive(Debug, Clone)]
pub struct FieldApp {
    pub app: ContentApp,
    /// Steps that begin a session, in this order.
    pub login: Vec<FieldStep>,
    /// Shows that the session exists.
    pub session: AppPage,
    pub setting: FieldSetting,
}

/// One request of a session.
#[derive(Debug, Clone, Default)]
pub struct FieldStep {
    pub path: String,
    /// Posted form, with `TOKEN` and `VALUE` in it. `None` means a GET.
    pub form: Option<String>,
    /// The response has a token between these two texts, which the next steps send.
    pub token: Option<(&'static str, &'static str)>,
}

/// A setting that a page shows.
#[derive(Debug, Clone)]
pub struct FieldSetting {
    /// Its file, and the file's text with `VALUE` in it.
    pub file: PathBuf,
    pub text: String,
    /// Shows the value.
    pub path: &'static str,
    /// Steps that change it through the application in the session, if possible.
    pub inside: Vec<FieldStep>,
}

/// Makes one, in a directory of its own and for a uid. An application that needs a database gets
/// one.
pub type Create = fn(&Path, u32, &DatabaseAccount) -> Result<FieldApp>;

/// An application of the field.
#[derive(Debug, Clone, Copy)]
pub struct FieldKind {
    pub name: &'static str,
    pub create: Create,
}

/// Applications that are made quickly.
pub const LIGHT: [FieldKind; 3] = [
    FieldKind { name: "flask", create: |tree, uid, _| flask(tree, uid) },
    FieldKind { name: "express", create: |tree, uid, _| express(tree, uid) },
    FieldKind { name: "sinatra", create: |tree, uid, _| sinatra(tree, uid) },
];

/// Applications that need much: a compiler, a bundler, or hundreds of megabytes of files.
pub const HEAVY: [FieldKind; 5] = [
    FieldKind { name: "spring", create: |tree, uid, _| spring(tree, uid) },
    FieldKind { name: "phpmyadmin", create: phpmyadmin },
    FieldKind { name: "roundcube", create: |tree, uid, _| roundcube(tree, uid) },
    FieldKind { name: "mediawiki", create: |tree, uid, _| mediawiki(tree, uid) },
    FieldKind { name: "next", create: |tree, uid, _| next(tree, uid) },
];

impl FieldStep {
    fn get(path: &str) -> Self {
        Self { path: path.into(), ..Self::default() }
    }

    fn post(path: &str, form: &str) -> Self {
        Self { path: path.into(), form: Some(form.into()), ..Self::default() }
    }

    fn with_token(self, before: &'static str, after: &'static str) -> Self {
        Self { token: Some((before, after)), ..self }
    }
}

/// Makes a small application. `routes` are those of the start of a session, of its page, and of the
/// change of settings.
fn small_app(
    tree: &Path,
    uid: u32,
    settings: (&str, &str),
    routes: [&'static str; 3],
    backend: Value,
) -> Result<FieldApp> {
    let [login, me, change] = routes;
    let (file, text) = (tree.join(settings.0), settings.1.to_owned());
    write(&file, &text.replace(VALUE, "first"))?;
    secret(&tree.join("secret-key"), &(random_word()? + &random_word()?))?;
    give(tree, uid)?;
    let mut whole = json!({
        "kind": "app",
        "directory": tree,
        "writable": [tree],
        "ready": {"path": "/"},
        "warm_up": ["/", me],
        "release": "1",
        // It writes the file itself, which therefore would not count.
        "image_watch": [settings.0],
    });
    for (key, value) in backend.as_object().context("an object")? {
        whole[key] = value.clone();
    }
    Ok(FieldApp {
        app: ContentApp { backend: whole, files: None, page: AppPage { path: "/", text: NOTE }, login },
        login: vec![FieldStep::post(login, "name=anna")],
        session: AppPage { path: me, text: "logged in as anna" },
        setting: FieldSetting {
            file,
            text,
            path: "/",
            inside: vec![FieldStep::post(change, "title={value}")],
        },
    })
}

const ROUTES: [&str; 3] = ["/login", "/me", "/settings"];
const JSON_SETTINGS: (&str, &str) = ("settings.json", "{\"title\": \"{value}\"}\n");

/// Makes it in Python, on gunicorn with one worker, with SQLite.
pub fn flask(tree: &Path, uid: u32) -> Result<FieldApp> {
    const PYTHON: &str = "/usr/bin/python3";
    const GUNICORN: &str = "/usr/bin/gunicorn";
    need(&[PYTHON, GUNICORN, "/usr/lib/python3/dist-packages/flask"]).map_err(of_experiment)?;
    copy_tree(&source("flask"), tree)?;
    let statements = "import sqlite3, sys\nd = sqlite3.connect('notes.sqlite')\n\
                      d.execute('CREATE TABLE notes (text)')\nd.execute('INSERT INTO notes VALUES (?)', sys.argv[1:])\nd.commit()\n";
    run(Command::new(PYTHON).args(["-c", statements, NOTE]).current_dir(tree))?;
    let backend = json!({
        "command": [GUNICORN, "-w", "1", "--worker-tmp-dir", "/tmp", "app:app"],
        "listen": "fd",
    });
    small_app(tree, uid, JSON_SETTINGS, ROUTES, backend)
}

/// Makes it in JavaScript, on Node. Its sessions are in memory, so its image is taken when it goes
/// to rest.
pub fn express(tree: &Path, uid: u32) -> Result<FieldApp> {
    let node = program("node")?;
    copy_files(&npm("express", &[])?, tree)?;
    write(&tree.join("notes.json"), &json!([NOTE]).to_string())?;
    let backend = json!({"command": [node, "server.js"], "image_when": "rest"});
    small_app(tree, uid, JSON_SETTINGS, ROUTES, backend)
}

/// Makes it in Ruby, on puma with one process.
pub fn sinatra(tree: &Path, uid: u32) -> Result<FieldApp> {
    const PUMA: &str = "/usr/bin/puma";
    need(&[PUMA, "/usr/share/doc/ruby-sinatra"]).map_err(of_experiment)?;
    copy_tree(&source("sinatra"), tree)?;
    write(&tree.join("notes.json"), &json!([NOTE]).to_string())?;
    let backend = json!({
        "command": [PUMA, "-w", "0", "-t", "1:5", "-e", "production", "-b", "unix://{socket}"],
        "env": {"HOME": "/tmp", "RACK_ENV": "production"},
    });
    small_app(tree, uid, JSON_SETTINGS, ROUTES, backend)
}

/// Makes it in Java, with Tomcat in it. Its sessions are in memory, so its image is taken when it
/// goes to rest.
pub fn spring(tree: &Path, uid: u32) -> Result<FieldApp> {
    let java = program("java")?;
    let built = build("spring", |dir| {
        let maven = program("mvn")?;
        run(Command::new(maven).args(["-q", "-B", "package"]).current_dir(dir))
    })?;
    fs::create_dir_all(tree).with_context(|| format!("creating {}", tree.display()))?;
    fs::copy(built.join("target/field.jar"), tree.join("field.jar")).context("copying the application")?;
    write(&tree.join("notes.txt"), NOTE)?;
    let backend = json!({
        // A file of statistics that others map is useless in a sandbox.
        "command": [java, "-XX:-UsePerfData", "-XX:+UseSerialGC", "-Xmx192m", "-jar", "field.jar", "--server.port={port}"],
        "listen": "port",
        "start_seconds": 120,
        "image_when": "rest",
    });
    small_app(tree, uid, ("application.properties", "field.title={value}\n"), ROUTES, backend)
}

/// Makes it in JavaScript with React pages on Node, bundled with its dependencies. Its sessions are
/// in memory, as in `express`.
pub fn next(tree: &Path, uid: u32) -> Result<FieldApp> {
    let node = program("node")?;
    let built = npm("next", &["npx", "--no-install", "next", "build"])?;
    copy_files(&built.join(".next/standalone"), tree)?;
    copy_files(&built.join(".next/static"), &tree.join(".next/static"))?;
    write(&tree.join("notes.json"), &json!([NOTE]).to_string())?;
    let backend = json!({
        "command": [node, "server.js"],
        "listen": "port",
        "env": {"HOSTNAME": "127.0.0.1", "NEXT_TELEMETRY_DISABLED": "1", "NODE_ENV": "production"},
        "start_seconds": 120,
        "image_when": "rest",
    });
    small_app(tree, uid, JSON_SETTINGS, ["/api/login", "/api/me", "/api/settings"], backend)
}

fn source(name: &str) -> PathBuf {
    workspace::root().join("demo/field").join(name)
}

/// Returns where a program is.
fn program(name: &str) -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|dir| dir.join(name)).find(|file| file.is_file());
    Ok(found.ok_or_else(|| {
        MissingPackage(format!("{name} is missing: 'sudo ./dev setup experiment field' installs it"))
    })?)
}

fn of_experiment(missing: MissingPackage) -> MissingPackage {
    MissingPackage(missing.0.replace("setup apps", "setup experiment"))
}

/// Returns a directory with an application's sources in which `make` was completed; kept until the
/// sources change.
fn build(name: &str, make: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    const MARK: &str = ".built-from";
    let dir = workspace::cache_dir().join("field").join(name);
    let sources = fingerprint(&source(name))?;
    if fs::read_to_string(dir.join(MARK)).is_ok_and(|built| built == sources) {
        return Ok(dir);
    }
    eprintln!("building {name} in {}", dir.display());
    if dir.exists() {
        fs::remove_dir_all(&dir).with_context(|| format!("removing {}", dir.display()))?;
    }
    copy_tree(&source(name), &dir)?;
    make(&dir).with_context(|| format!("building {name}"))?;
    write(&dir.join(MARK), &sources)?;
    Ok(dir)
}

/// Returns a digest of all files' names and texts.
fn fingerprint(dir: &Path) -> Result<String> {
    let mut text = String::new();
    let entries = fs::read_dir(dir).with_context(|| format!("reading {}", dir.display()))?;
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    for path in paths {
        if path.is_dir() {
            text.push_str(&fingerprint(&path)?);
        } else {
            let source = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
            text.push_str(&format!("{}\n{source}\n", path.display()));
        }
    }
    Ok(text)
}

/// Installs exactly the packages of the lock file, by their checksums, without running any of them.
/// Then runs a command.
fn npm(name: &str, then: &[&str]) -> Result<PathBuf> {
    build(name, |dir| {
        let npm = program("npm")?;
        let install = ["ci", "--ignore-scripts", "--no-audit", "--no-fund"];
        run(Command::new(npm).args(install).current_dir(dir))?;
        let Some((first, rest)) = then.split_first() else { return Ok(()) };
        run(Command::new(program(first)?).args(rest).env("NEXT_TELEMETRY_DISABLED", "1").current_dir(dir))
    })
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("writing {}", path.display()))
}
