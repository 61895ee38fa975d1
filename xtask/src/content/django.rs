//! A journal with an admin: a Django project of our own on Debian's Django and gunicorn, with
//! SQLite.
//!
//! Not here: its sources (`demo/django`), the server that runs it.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use super::{AppPage, ContentApp, LOGIN, copy_tree, give, need, random_word, run, secret};
use crate::workspace;

/// Debian's Django belongs to Debian's Python; another one may come first in `PATH`.
const PYTHON: &str = "/usr/bin/python3";

const DJANGO: &str = "/usr/lib/python3/dist-packages/django";

const GUNICORN: &str = "/usr/bin/gunicorn";

const SECRET: &str = "DJANGO_SECRET_KEY";

/// Makes a journal in `tree`, which then belongs to `uid`. Takes about two seconds.
pub fn create(tree: &Path, uid: u32) -> Result<ContentApp> {
    need(&[PYTHON, GUNICORN, DJANGO])?;
    copy_tree(&workspace::root().join("demo/django"), tree)?;
    let key = random_word()?;
    secret(&tree.join("secret-key"), &key)?;
    let manage = |arguments: &[&str]| {
        run(Command::new(PYTHON)
            .arg("manage.py")
            .args(arguments)
            .current_dir(tree)
            .env(SECRET, &key)
            .env("DJANGO_SUPERUSER_PASSWORD", LOGIN.password))
    };
    manage(&["migrate", "-v0"])?;
    manage(&["loaddata", "-v0", "first"])?;
    manage(&["collectstatic", "--noinput", "-v0"])?;
    let email = "admin@journal.example";
    manage(&["createsuperuser", "-v0", "--noinput", "--username", LOGIN.name, "--email", email])?;
    let root = tree.join("static");
    ensure!(fs::exists(&root).context("looking for static files")?, "{} is missing", root.display());
    give(tree, uid)?;
    Ok(ContentApp {
        backend: json!({
            "kind": "app",
            "command": [GUNICORN, "-w", "1", "--worker-tmp-dir", "/tmp", "journal.wsgi"],
            "directory": tree,
            "listen": "fd",
            "secrets": {SECRET: tree.join("secret-key")},
            "ready": {"path": "/"},
            "warm_up": ["/", "/entry/1/", "/admin/login/"],
            "release": "1",
        }),
        files: Some(("/static", root)),
        page: AppPage { path: "/", text: "This journal rests when nobody reads it" },
        login: "/admin/login/",
    })
}
