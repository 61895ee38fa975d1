//! Redmine, relocated: Rails with puma, and SQLite. `./dev setup apps` unpacks Debian's package. It
//! expects its instances below `/usr/share/redmine`, which links to `/var` and `/etc`. A site needs
//! it in one tree that its tenant owns.
//!
//! Not here: the server that runs it.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};
use serde_json::json;

use super::{AppPage, ContentApp, LOGIN, copy_entries, give, need, random_word, run, secret};
use crate::workspace;

/// Where its files are, and where they expect to be.
const UNPACKED: &str = "/usr/local/lib/nagaya/redmine/usr/share/redmine";
const PACKAGE: &str = "/usr/share/redmine";

/// Entries that Redmine writes, in its instance's directory.
const OWN: [&str; 5] = ["config", "files", "log", "public", "tmp"];

const PUMA: &str = "/usr/bin/puma";
const BUNDLE: &str = "/usr/bin/bundle";

/// Makes a Redmine in `tree`, which then belongs to `uid`. Takes about half a minute: its tables
/// are made by more than two hundred migrations.
pub fn create(tree: &Path, uid: u32) -> Result<ContentApp> {
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
            // Otherwise the migrations write a description of their tables for programmers.
            .env("SCHEMA", "/dev/null")
            .env("REDMINE_LANG", "en")
            .env("ADMIN_PASSWORD", LOGIN.password))
    };
    // Nothing must be installed. `bundle install` of Ruby 3.1.7 does not see those of Debian's gems
    // that have no directory.
    bundle(&["lock", "--local"])?;
    bundle(&["exec", "rake", "db:migrate"])?;
    bundle(&["exec", "rake", "redmine:load_default_data"])?;
    let first = workspace::root().join("demo/redmine/first.rb");
    bundle(&["exec", "rails", "runner", &first.to_string_lossy()])?;
    give(tree, uid)?;
    Ok(ContentApp {
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
        page: AppPage { path: "/projects/instances/issues", text: "Wake without anybody noticing" },
        login: "/login",
    })
}

/// Returns the variables of Redmine and its tools.
fn environment() -> [(&'static str, &'static str); 3] {
    // Bundler needs a home directory to look for settings in.
    [("RAILS_ENV", "production"), ("REDMINE_INSTANCE", "default"), ("HOME", "/tmp")]
}

/// Writes the instance's own files, and the sources that name paths of the package.
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
