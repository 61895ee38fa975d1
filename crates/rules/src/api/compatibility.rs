//! What mod_mruby, ngx_mruby and mruby-cgroup offer, method by method: supported here, or why not.
//!
//! One table with two uses: a rule that calls what is missing is told why (`reason`), and the documentation shows all
//! of it (`page`). Not here: the methods themselves (`apache`, `cgroup`, `nginx`); a test calls each that the table
//! promises.

mod apache;
mod cgroup;
mod nginx;

/// A class or module as upstream names it.
pub struct Class {
    pub name: &'static str,
    pub rows: &'static [Row],
}

/// Methods that are alike, separated by spaces; those of the class itself begin with a dot.
pub struct Row(pub &'static str, pub Support);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Support {
    Same,
    /// How it differs from upstream.
    Differs(&'static str),
    /// Why it is not there, and what to do instead where there is something.
    Missing(&'static str),
}

/// Where the methods come from, in the order of the documentation.
pub const SOURCES: [(&str, &[Class]); 3] = [
    ("mruby-cgroup", cgroup::CLASSES),
    ("mod_mruby 1.16", apache::CLASSES),
    ("ngx_mruby 2.7", nginx::CLASSES),
];

/// Every method of the table: class, name, support.
pub fn methods() -> impl Iterator<Item = (&'static str, &'static str, Support)> {
    let classes = SOURCES.iter().flat_map(|(_, classes)| classes.iter());
    classes.flat_map(|class| {
        class
            .rows
            .iter()
            .flat_map(|Row(names, support)| names.split_whitespace().map(|name| (class.name, name, *support)))
    })
}

/// Why a method or class of upstream is missing, if it is one. Names of class methods begin with a dot; a class as a
/// whole is asked for with an empty name.
pub fn reason(class: &str, name: &str) -> Option<&'static str> {
    let missing = |support| match support {
        Support::Missing(why) => Some(why),
        Support::Same | Support::Differs(_) => None,
    };
    methods()
        .filter(|(of, method, _)| *of == class && (name.is_empty() || *method == name))
        .find_map(|(_, _, support)| missing(support))
}

/// `docs/rules-compatibility.md`.
pub fn page() -> String {
    let mut page = String::from(INTRODUCTION);
    for (source, classes) in SOURCES {
        page.push_str(&format!("\n## {source}\n"));
        for class in classes {
            page.push_str(&format!("\n### {}\n\n| method | here |\n|---|---|\n", class.name));
            for Row(names, support) in class.rows {
                let here = match support {
                    Support::Same => "yes".to_owned(),
                    Support::Differs(how) => format!("yes: {how}"),
                    Support::Missing(why) => format!("no: {why}"),
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
    fn what_is_missing_has_its_reason() {
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
