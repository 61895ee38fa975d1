//! The methods of mod_mruby, ngx_mruby, mruby-cgroup and the stores between requests. Each is
//! supported here, or has the reason why not.
//!
//! One table serves two uses. A rule that calls a missing method gets the reason (`reason`), and
//! the documentation shows the whole table (`page`). Not here: the methods themselves (`apache`,
//! `cgroup`, `nginx`). A test calls each method that the table promises.

mod apache;
mod cgroup;
mod class;
mod nginx;
mod state;

pub use class::{MethodRow, MethodSupport, UpstreamClass};

/// The sources of the methods, in the order of the documentation.
pub const SOURCES: [(&str, &[UpstreamClass]); 6] = [
    ("mruby-cgroup", cgroup::CLASSES),
    ("mod_mruby 1.16", apache::CLASSES),
    ("ngx_mruby 2.7", nginx::CLASSES),
    ("mruby-userdata", state::USERDATA),
    ("mruby-localmemcache", state::CACHE),
    ("mruby-mutex", state::MUTEX),
];

/// Returns every method of the table: class, name, support.
pub fn methods() -> impl Iterator<Item = (&'static str, &'static str, MethodSupport)> {
    let classes = SOURCES.iter().flat_map(|(_, classes)| classes.iter());
    classes.flat_map(|class| {
        class.rows.iter().flat_map(|MethodRow(names, support)| {
            names.split_whitespace().map(|name| (class.name, name, *support))
        })
    })
}

/// Returns why a method or class of upstream is missing, if it is one. Names of class methods begin
/// with a dot. An empty name queries the class as a whole.
pub fn reason(class: &str, name: &str) -> Option<&'static str> {
    let missing = |support| match support {
        MethodSupport::Missing(why) => Some(why),
        MethodSupport::Same | MethodSupport::Differs(_) => None,
    };
    methods()
        .filter(|(of, method, _)| *of == class && (name.is_empty() || *method == name))
        .find_map(|(_, _, support)| missing(support))
}

/// Returns `docs/rules-compatibility.md`.
pub fn page() -> String {
    let mut page = String::from(INTRODUCTION);
    for (source, classes) in SOURCES {
        page.push_str(&format!("\n## {source}\n"));
        for class in classes {
            page.push_str(&format!("\n### {}\n\n| method | here |\n|---|---|\n", class.name));
            for MethodRow(names, support) in class.rows {
                let here = match support {
                    MethodSupport::Same => "yes".to_owned(),
                    MethodSupport::Differs(how) => format!("yes: {how}"),
                    MethodSupport::Missing(why) => format!("no: {why}"),
                };
                let lines = names.split_whitespace();
                page.extend(lines.map(|name| format!("| `{}` | {here} |\n", name)));
            }
        }
    }
    page
}

const INTRODUCTION: &str = "# Compatibility of rules

Files written for mod_mruby and ngx_mruby run here if they use what this page marks with *yes*. A method that is marked with
*no* raises a `NotImplementedError` with the same words, so that no rule half works unnoticed: the log names file and
line. [rules.md](rules.md) says which phases there are and what a rule can do.

Names that begin with a dot are called on the class, the others on its objects. The page is made from the program's own
table (`crates/rules/src/api/compatibility.rs`), and a test calls every method.

What upstream does wrong is not repeated here: a setter of `Cgroup` that frees its group when Ruby collects an older object;
`attach(pid)` that reads its argument as another type; groups that are never given back; `Cgroup::CPU.new(1)`, which ends the
process; `headers_out` of an absent field, likewise; a missing rule file that leaves a lock taken; a status kept in a
variable of the process, where requests of several threads read each other's.
";

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn each_method_stands_once() {
        let mut seen = BTreeSet::new();
        for (class, name, _) in methods() {
            assert!(seen.insert((class, name)), "{class} {name} stands twice");
        }
        assert!(seen.len() > 350, "{}", seen.len());
    }

    #[test]
    fn missing_method_has_its_reason() {
        assert_eq!(reason("Apache::Request", "hostname"), None);
        assert!(reason("Apache::Request", "run_handler").is_some());
        assert!(reason("Apache", ".sleep").is_some());
        assert!(reason("Apache::Filter", "").is_some());
    }

    #[test]
    fn the_page_is_what_the_table_says() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/rules-compatibility.md");
        if std::env::var_os("NAGAYA_WRITE_DOCS").is_some() {
            std::fs::write(path, page()).expect("the page can be written");
        }
        let stored = std::fs::read_to_string(path).unwrap_or_default();
        assert!(stored == page(), "docs/rules-compatibility.md is out of step: run `./dev docs`");
    }
}
