//! What `docs/rules-compatibility.md` promises, called method by method.

use std::fmt::Write as _;
use std::path::Path;

use crate::world::World;

/// Class, method, why it is missing if it is.
fn promises() -> Vec<(String, String, Option<String>)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/rules-compatibility.md");
    let page = std::fs::read_to_string(path).unwrap();
    let mut class = String::new();
    let mut promises = Vec::new();
    for line in page.lines() {
        if let Some(name) = line.strip_prefix("### ") {
            class = name.to_owned();
        } else if let Some((method, here)) = line.strip_prefix("| `").and_then(|row| row.split_once("` | ")) {
            let why = here.strip_prefix("no: ").map(|why| why.trim_end_matches(" |").to_owned());
            assert!(why.is_some() || here.starts_with("yes"), "{line}");
            promises.push((class.clone(), method.to_owned(), why));
        }
    }
    assert!(promises.len() > 350, "{}", promises.len());
    promises
}

/// On what a method is called.
fn receiver(class: &str, method: &str) -> String {
    match class {
        "Kernel" => "self".to_owned(),
        "Cache" if !method.starts_with('.') => "Cache.new(namespace: 'a')".to_owned(),
        _ if method.starts_with('.') => class.to_owned(),
        _ if class.starts_with("Cgroup::") => format!("{class}.new('a')"),
        _ => format!("{class}.new"),
    }
}

/// Runs the checks of each class in one rule; each check writes what is wrong.
fn complaints(checks: impl Iterator<Item = (String, String)>) -> Vec<String> {
    let mut rules: Vec<(String, String)> = Vec::new();
    for (class, check) in checks {
        match rules.last_mut().filter(|(last, _)| *last == class) {
            Some((_, rule)) => rule.push_str(&check),
            None => rules.push((class, check)),
        }
    }
    let world = World::get("http://www.example.com/");
    rules.iter().map(|(_, rule)| world.written(rule)).filter(|written| !written.is_empty()).collect()
}

#[test]
fn promised_methods_exist() {
    let here = promises().into_iter().filter(|(_, _, why)| why.is_none());
    let checks = here.map(|(class, method, _)| {
        let of = receiver(&class, &method);
        let name = method.trim_start_matches('.');
        let check = format!("Apache.echo '{class} {method}' unless ({of}).respond_to?(:\"{name}\", true)\n");
        (class, check)
    });
    assert_eq!(complaints(checks), [""; 0]);
}

#[test]
fn missing_methods_say_why() {
    let missing = promises().into_iter().filter_map(|(class, method, why)| Some((class, method, why?)));
    let checks = missing.map(|(class, method, why)| {
        let of = receiver(&class, &method);
        let name = method.trim_start_matches('.');
        let mut check = String::new();
        // A class whose outer class is missing says why that one is.
        let nested = class.matches("::").count() > 1;
        let said = if nested { "true".to_owned() } else { format!("e.message.include?({why:?})") };
        let _ = writeln!(
            check,
            "begin; ({of}).send(:\"{name}\", 1); Apache.echo '{class} {method} does not raise'
             rescue NotImplementedError => e; Apache.echo \"{class} {method}: #{{e.message}}\" unless {said}; end"
        );
        (class, check)
    });
    assert_eq!(complaints(checks), [""; 0]);
}

#[test]
fn method_unknown_upstream_is_undefined() {
    let world = World::get("http://www.example.com/");
    for rule in
        ["Apache::Request.new.brew", "Apache.brew", "Cgroup::CPU.new('a').brew", "Nginx::Request.new.brew"]
    {
        assert!(world.fault(rule).message.contains("undefined method"), "{}", world.fault(rule));
    }
    assert!(world.fault("Apache::Brew").message.contains("uninitialized constant"));
}
