//! The configuration printed: the reference page, and the settings that hold now.
//!
//! Not here: the texts (`schema`).

use std::fmt::Write as _;

use super::schema::{Array, Key, LISTEN, RULES, SECTIONS};
use super::settings::Settings;
use super::value::Value;

const HEAD: &str = "# Configuration

<!-- Generated from crates/nagaya/src/config/schema.rs by `./dev docs`. Edits here are overwritten. -->

`nagaya.toml` (`/etc/nagaya/nagaya.toml`, or the file named by `--config`) holds the settings of one node. Every
key has a default, and no file at all is a valid one. Tenants and sites are not configured here but with
`nagaya tenant` and `nagaya site`; changes to them are live at once.

- `nagaya check-config` reports every mistake with its line and a hint, in this file and in the rule files it names.
- `nagaya config dump` prints the settings that hold, defaults included.
- `SIGHUP` (`systemctl reload nagaya`) reads the file again. With mistakes in it, the old settings stay.

Sizes are written like `\"64KiB\"` (B, KiB, MiB, GiB, TiB), durations like `\"250ms\"`, `\"10s\"`, `\"5m\"` (ms, s, m, h,
d), both in quotes.

A node that serves HTTP and HTTPS:

```toml
[[listen]]
address = \"0.0.0.0:80\"

[[listen]]
address = \"0.0.0.0:443\"
tls = true

[tls]
certificates = \"/etc/nagaya/certificates\"
```

A rule for requests, and receipts for clients on this machine:

```toml
[[rules]]
phase = \"access_checker\"
file = \"/etc/nagaya/rules/limits.rb\"

[receipts]
allow = [\"127.0.0.0/8\", \"::1\"]
```
";

/// `docs/configuration.md`.
pub fn reference() -> String {
    let mut out = HEAD.to_owned();
    let defaults = Settings::default();
    for section in SECTIONS {
        let title =
            if section.path.is_empty() { "Top of the file".into() } else { format!("`[{}]`", section.path) };
        if section.path == "rule_limits" {
            array(&mut out, &RULES);
        }
        table(&mut out, &title, section.doc, section.keys, &[], &defaults);
        if section.path.is_empty() {
            array(&mut out, &LISTEN);
        }
    }
    out
}

fn array<T>(out: &mut String, array: &Array<T>) {
    let title = format!("`[[{}]]`", array.path);
    table(out, &title, array.doc, array.keys, array.required, &(array.blank)());
}

/// `required`: keys that have no default.
fn table<T>(
    out: &mut String,
    title: &str,
    doc: &str,
    keys: &[Key<T>],
    required: &[(&str, &str)],
    defaults: &T,
) {
    let _ =
        write!(out, "\n## {title}\n\n{doc}\n\n| key | takes | default | since | |\n|---|---|---|---|---|\n");
    for key in keys {
        let range = key.kind.range();
        let takes =
            if range.is_empty() { key.kind.noun().into() } else { format!("{}: {range}", key.kind.noun()) };
        let default = match (key.get)(defaults) {
            _ if required.iter().any(|(name, _)| *name == key.name) => "required".to_owned(),
            Value::Unset => key.unset.to_owned(),
            value => format!("`{}`", key.kind.print(&value)),
        };
        let _ = writeln!(out, "| `{}` | {takes} | {default} | {} | {} |", key.name, key.since, key.doc);
    }
}

/// The settings that hold, as a file that says the same.
pub fn dump(settings: &Settings) -> String {
    let mut out = String::new();
    for section in SECTIONS {
        if !section.path.is_empty() {
            let _ = writeln!(out, "\n[{}]", section.path);
        }
        lines(&mut out, section.keys, settings);
    }
    entries(&mut out, &LISTEN, &settings.listen);
    entries(&mut out, &RULES, &settings.edge.rules);
    out
}

fn entries<T>(out: &mut String, array: &Array<T>, entries: &[T]) {
    for entry in entries {
        let _ = writeln!(out, "\n[[{}]]", array.path);
        lines(out, array.keys, entry);
    }
}

fn lines<T>(out: &mut String, keys: &[Key<T>], holder: &T) {
    for key in keys {
        let _ = match (key.get)(holder) {
            Value::Unset => writeln!(out, "# {} is not set: {}", key.name, key.unset),
            value => writeln!(out, "{} = {}", key.name, key.kind.print(&value)),
        };
    }
}
