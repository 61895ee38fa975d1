//! Redmine, relocated: Debian's package, which `./dev setup apps` unpacks, looks for its instances beneath
//! `/usr/share/redmine`, which links to `/var` and `/etc`; a site needs it in one tree that its tenant owns. Rails with puma,
//! and SQLite.
//!
//! Not here: which server runs it.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};
use serde_json::json;

use super::{App, LOGIN, Page, copy_entries, give, need, random_word, run, secret};
use crate::workspace;

/// Where its files are, and where they believe to be.
const UNPACKED: &str = "/usr/local/lib/nagaya/redmine/usr/share/redmine";
const PACKAGE: &str = "/usr/share/redmine";

/// What Redmine writes to, in its instance's directory.
const OWN: [&str; 5] = ["config", "files", "log", "public", "tmp"];

const PUMA: &str = "/usr/bin/puma";
const BUNDLE: &str = "/usr/bin/bundle";

/// A Redmine of its own in `tree`, which then belongs to `uid`. Takes about half a minute: its tables are made by more
/// than two hundred migrations.
pub fn create(tree: &Path, uid: u32) -> Result<App> {
    need(&[UNPACKED, PUMA, BUNDLE])?;
    copy_entries(Path::new(UNPACKED), tree, &[])?;
    let instance = tree.join("instances/default");
    configure(tree, &instance)?;
    let bundle = |arguments: &[&str]| {
        let mut command = Command::new(BUNDLE);
        command.args(arguments).current_dir(tree);
        for (name, value) in environment() {
            command.env(name, value);
        }
        run(command
            .env("BUNDLE_SILENCE_ROOT_WARNING", "1")
            // Otherwise the migrations write down the tables they made, for programmers.
            .env("SCHEMA", "/dev/null")
            .env("REDMINE_LANG", "en")
            .env("ADMIN_PASSWORD", LOGIN.password))
    };
    // Nothing is to be installed; and `bundle install` of Ruby 3.1.7 does not see those of Debian's gems that have no directory.
    bundle(&["lock", "--local"])?;
    bundle(&["exec", "rake", "db:migrate"])?;
    bundle(&["exec", "rake", "redmine:load_default_data"])?;
    let first = workspace::root().join("demo/redmine/first.rb");
    bundle(&["exec", "rails", "runner", &first.to_string_lossy()])?;
    give(tree, uid)?;
    Ok(App {
        backend: json!({
            "kind": "app",
            "command": [PUMA, "-w", "0", "-t", "1:5", "-b", "unix://{socket}"],
            "directory": tree,
            "listen": "socket",
            "env": environment().into_iter().collect::<std::collections::BTreeMap<_, _>>(),
            "writable": [instance],
            "start_seconds": 60,
            "ready": {"path": "/login"},
            "warm_up": ["/", "/projects/instances/issues", "/issues/1", "/login"],
            "release": "1",
        }),
        files: None,
        page: Page { path: "/projects/instances/issues", text: "Wake without anybody noticing" },
        login: "/login",
    })
}

/// What Redmine and its tools are told by variables.
fn environment() -> [(&'static str, &'static str); 3] {
    // Bundler wants a home directory to look for settings in.
    [("RAILS_ENV", "production"), ("REDMINE_INSTANCE", "default"), ("HOME", "/tmp")]
}

/// The instance's own files, and the sources that name places of the package's.
fn configure(tree: &Path, instance: &Path) -> Result<()> {
    for name in OWN {
        let dir = instance.join(name);
        fs::create_dir_all(&dir).with_context(|| format!("creating {}", dir.display()))?;
    }
    // Rails would make it at its start.
    let assets = tree.join("public/plugin_assets");
    fs::create_dir_all(&assets).with_context(|| format!("creating {}", assets.display()))?;
    let write = |path: &Path, text: &str| {
        fs::write(path, text).with_context(|| format!("writing {}", path.display()))
    };
    let database = instance.join("redmine.sqlite");
    let text =
        format!("production:\n  adapter: sqlite3\n  database: {}\n  encoding: utf8\n", database.display());
    write(&instance.join("config/database.yml"), &text)?;
    secret(&instance.join("config/secret_key.txt"), &random_word()?)?;

    let gemfile = tree.join("Gemfile");
    let gems = fs::read_to_string(&gemfile).with_context(|| format!("reading {}", gemfile.display()))?;
    write(&gemfile, &gems.replace(PACKAGE, &tree.to_string_lossy()))?;
    write(&tree.join("Gemfile.local"), "gem \"puma\"\n")
}
