//! Prints the configuration: the reference page, and the present settings.
//!
//! Not here: the texts (`schema`).

use std::fmt::Write as _;

use super::schema::{ArrayRow, KeyRow, LISTEN, RULES, SECTIONS};
use super::settings::NodeSettings;
use super::value::ConfigValue;

const HEAD: &str = "# Configuration

<!-- Generated from crates/nagaya/src/config/schema.rs by `./dev docs`. Edits here are overwritten. -->

`nagaya.toml` (`/etc/nagaya/nagaya.toml`, or the file named by `--config`) holds the settings of one node. Every
key has a default, so a node needs no file. Tenants and sites are not configured here but with
`nagaya tenant` and `nagaya site`; changes to them are live at once.

- `nagaya check-config` reports every mistake with its line and a hint, in this file and in the rule files it names.
- `nagaya config dump` prints the settings in effect, defaults included.
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

/// Returns `docs/configuration.md`.
pub fn reference() -> String {
    let mut out = HEAD.to_owned();
    let defaults = NodeSettings::default();
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

fn array<T>(out: &mut String, array: &ArrayRow<T>) {
    let title = format!("`[[{}]]`", array.path);
    table(out, &title, array.doc, array.keys, array.required, &(array.blank)());
}

/// Writes one table. `required` are the keys that have no default.
fn table<T>(
    out: &mut String,
    title: &str,
    doc: &str,
    keys: &[KeyRow<T>],
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
            ConfigValue::Unset => key.unset.to_owned(),
            value => format!("`{}`", key.kind.print(&value)),
        };
        let _ = writeln!(out, "| `{}` | {takes} | {default} | {} | {} |", key.name, key.since, key.doc);
    }
}

/// Returns the present settings as an equivalent file.
pub fn dump(settings: &NodeSettings) -> String {
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

fn entries<T>(out: &mut String, array: &ArrayRow<T>, entries: &[T]) {
    for entry in entries {
        let _ = writeln!(out, "\n[[{}]]", array.path);
        lines(out, array.keys, entry);
    }
}

fn lines<T>(out: &mut String, keys: &[KeyRow<T>], holder: &T) {
    for key in keys {
        let _ = match (key.get)(holder) {
            ConfigValue::Unset => writeln!(out, "# {} is not set: {}", key.name, key.unset),
            value => writeln!(out, "{} = {}", key.name, key.kind.print(&value)),
        };
    }
}
