//! The modules of a crate as its sources name them: who imports whom, which types and tests they define, what they show.
//!
//! It reads text by `syn` and asks no compiler: paths inside macros are not seen. Not here: the bounds (`house`).

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use nagaya_tests::sources::is_test;
use syn::visit::{self, Visit};
use syn::{Item, UseTree, Visibility};

type Module = Vec<String>;

/// One file needs another one of its crate.
#[derive(Debug, Clone, Copy)]
pub struct Import<'a> {
    pub from: &'a [String],
    pub to: &'a [String],
}

/// The production files of a crate, without its root, and the imports between them.
#[derive(Debug)]
pub struct Crate {
    imports: BTreeSet<(Module, Module)>,
}

impl Crate {
    pub fn read(dir: &Path) -> Self {
        let mut files = BTreeMap::new();
        collect_files(&dir.join("src"), &mut Vec::new(), &mut files);
        assert!(files.len() > 3, "{}: almost no files", dir.display());
        let names: BTreeSet<Module> = files.keys().cloned().collect();
        let shown: BTreeMap<&Module, BTreeMap<String, Module>> =
            files.iter().map(|(module, file)| (module, re_exports(file, module, &names))).collect();
        let mut imports = BTreeSet::new();
        for (module, file) in &files {
            for path in absolute_paths(file, module, &names) {
                let to = follow(&path, &names, &shown, 0);
                if to != *module && !to.is_empty() && !module.is_empty() {
                    imports.insert((module.clone(), to));
                }
            }
        }
        Self { imports }
    }

    pub fn imports(&self) -> impl Iterator<Item = Import<'_>> {
        self.imports.iter().map(|(from, to)| Import { from, to })
    }

    /// The files of the largest set in which each needs each other.
    pub fn largest_circle(&self) -> Vec<String> {
        let mut needs: BTreeMap<&Module, BTreeSet<&Module>> = BTreeMap::new();
        for (from, to) in &self.imports {
            needs.entry(from).or_default().insert(to);
        }
        let mut best: Vec<&Module> = Vec::new();
        let mut seen: BTreeSet<&Module> = BTreeSet::new();
        for start in needs.keys() {
            if seen.contains(start) {
                continue;
            }
            let ahead = reachable(start, &needs);
            let circle: Vec<_> =
                ahead.iter().copied().filter(|other| reachable(other, &needs).contains(start)).collect();
            seen.extend(&circle);
            if circle.len() > best.len() {
                best = circle;
            }
        }
        best.iter().map(|module| module.join("/")).collect()
    }
}

fn reachable<'a>(
    start: &'a Module,
    needs: &BTreeMap<&'a Module, BTreeSet<&'a Module>>,
) -> BTreeSet<&'a Module> {
    let mut found = BTreeSet::new();
    let mut open = vec![start];
    while let Some(module) = open.pop() {
        for next in needs.get(module).into_iter().flatten() {
            if found.insert(*next) {
                open.push(next);
            }
        }
    }
    found
}

/// Names of the types that a file defines, those of inline modules too.
pub fn type_names(text: &str) -> Vec<String> {
    text.lines().filter_map(type_name).map(str::to_owned).collect()
}

fn type_name(line: &str) -> Option<&str> {
    let line = line.trim_start();
    let line = line.strip_prefix("pub ").unwrap_or(line);
    let line = match line.strip_prefix("pub(") {
        Some(rest) => rest.split_once(") ")?.1,
        None => line,
    };
    let line = line.strip_prefix("unsafe ").unwrap_or(line);
    let kinds = ["struct ", "enum ", "trait ", "union "];
    let name = kinds.iter().find_map(|kind| line.strip_prefix(kind))?;
    let end = name.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(name.len());
    name.starts_with(char::is_uppercase).then(|| &name[..end])
}

/// Names of functions that are tests: those below an attribute that ends in `test`, and those that suites list by `tests!`.
pub fn test_names(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let (mut is_next, mut is_listed) = (false, false);
    for line in text.lines().map(str::trim) {
        if is_listed {
            is_listed = !line.starts_with(']');
            found.extend(line.strip_suffix(',').map(str::to_owned));
        } else if line.ends_with("tests![") {
            is_listed = true;
        } else if line.starts_with("#[test]") || line.contains("::test") && line.starts_with("#[") {
            is_next = true;
        } else if is_next && let Some((_, name)) = line.split_once("fn ") {
            is_next = false;
            found.extend(name.split(['(', '<']).next().map(str::to_owned));
        }
    }
    found
}

/// Public modules and names of a crate's root, but for what is hidden from its documentation.
pub fn shown_names(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for item in parse(text).items {
        match item {
            Item::Mod(item) if is_public(&item.vis) && !is_hidden(&item.attrs) => {
                found.push(item.ident.to_string())
            }
            Item::Use(item) if is_public(&item.vis) && !is_hidden(&item.attrs) => {
                found.extend(leaves(&item.tree).into_iter().filter_map(|path| path.last().cloned()));
            }
            Item::Fn(item) if is_public(&item.vis) => found.push(item.sig.ident.to_string()),
            Item::Struct(item) if is_public(&item.vis) => found.push(item.ident.to_string()),
            Item::Enum(item) if is_public(&item.vis) => found.push(item.ident.to_string()),
            Item::Const(item) if is_public(&item.vis) => found.push(item.ident.to_string()),
            _ => {}
        }
    }
    found
}

fn is_public(visibility: &Visibility) -> bool {
    matches!(visibility, Visibility::Public(_))
}

fn is_hidden(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        matches!(&attribute.meta, syn::Meta::List(list) if list.path.is_ident("doc") && list.tokens.to_string() == "hidden")
    })
}

fn parse(text: &str) -> syn::File {
    syn::parse_file(text).expect("what compiles can be parsed")
}

fn collect_files(dir: &Path, at: &mut Module, into: &mut BTreeMap<Module, syn::File>) {
    let entries = fs::read_dir(dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
    for entry in entries {
        let path = entry.expect("a directory entry").path();
        let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default().to_owned();
        if is_test(&stem) || stem == "fuzzing" {
            continue;
        }
        if path.is_dir() {
            at.push(stem);
            collect_files(&path, at, into);
            at.pop();
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            let mut module = at.clone();
            if !matches!(stem.as_str(), "mod" | "lib" | "main") {
                module.push(stem);
            }
            let text = fs::read_to_string(&path).expect("a source file");
            into.insert(module, parse(&text));
        }
    }
}

/// Every path of a file that leads into its crate, from the crate's root.
fn absolute_paths(file: &syn::File, module: &[String], names: &BTreeSet<Module>) -> Vec<Module> {
    struct Paths<'a> {
        module: &'a [String],
        names: &'a BTreeSet<Module>,
        aliases: BTreeMap<String, Module>,
        found: Vec<Module>,
    }
    impl<'a> Visit<'a> for Paths<'_> {
        fn visit_item_mod(&mut self, item: &'a syn::ItemMod) {
            let is_tests = item.attrs.iter().any(|attribute| attribute.path().is_ident("cfg"));
            if !is_tests {
                visit::visit_item_mod(self, item);
            }
        }

        fn visit_path(&mut self, path: &'a syn::Path) {
            let path_names: Module = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
            if path_names.len() > 1 {
                let alias = self.aliases.get(&path_names[0]);
                let absolute = match alias {
                    Some(module) => Some([&module[..], &path_names[1..]].concat()),
                    None => resolve(&path_names, self.module, self.names),
                };
                self.found.extend(absolute);
            }
            visit::visit_path(self, path);
        }
    }
    let mut paths = Paths { module, names, aliases: BTreeMap::new(), found: Vec::new() };
    for item in &file.items {
        let Item::Use(item) = item else { continue };
        for leaf in leaves(&item.tree) {
            let Some(absolute) = resolve(&leaf, module, names) else { continue };
            if names.contains(&absolute) {
                // A module's name alone needs nothing of it yet; its use does.
                paths.aliases.insert(leaf.last().cloned().unwrap_or_default(), absolute);
            } else {
                paths.found.push(absolute);
            }
        }
    }
    paths.visit_file(file);
    paths.found
}

fn leaves(tree: &UseTree) -> Vec<Module> {
    fn walk(tree: &UseTree, before: &mut Module, into: &mut Vec<Module>) {
        match tree {
            UseTree::Path(path) => {
                before.push(path.ident.to_string());
                walk(&path.tree, before, into);
                before.pop();
            }
            UseTree::Name(name) if name.ident == "self" => into.push(before.clone()),
            UseTree::Name(name) => into.push([&before[..], &[name.ident.to_string()]].concat()),
            UseTree::Rename(name) => into.push([&before[..], &[name.ident.to_string()]].concat()),
            UseTree::Glob(_) => into.push([&before[..], &["*".to_owned()]].concat()),
            UseTree::Group(group) => group.items.iter().for_each(|tree| walk(tree, before, into)),
        }
    }
    let mut into = Vec::new();
    walk(tree, &mut Vec::new(), &mut into);
    into
}

/// The path from the crate's root; `None` if it leads out of the crate.
fn resolve(path: &[String], module: &[String], names: &BTreeSet<Module>) -> Option<Module> {
    let ups = path.iter().take_while(|name| *name == "super").count();
    if ups > 0 {
        let base = module.get(..module.len().checked_sub(ups)?)?;
        return Some([base, &path[ups..]].concat());
    }
    match path.first()?.as_str() {
        "crate" => Some(path[1..].to_vec()),
        "self" => Some([module, &path[1..]].concat()),
        child => {
            let base = [module, &[child.to_owned()]].concat();
            names.contains(&base).then(|| [module, path].concat())
        }
    }
}

/// Names that a module shows again, with the place where they are from.
fn re_exports(file: &syn::File, module: &[String], names: &BTreeSet<Module>) -> BTreeMap<String, Module> {
    let mut found = BTreeMap::new();
    for item in &file.items {
        let Item::Use(item) = item else { continue };
        if matches!(item.vis, Visibility::Inherited) {
            continue;
        }
        for leaf in leaves(&item.tree) {
            if let (Some(absolute), Some(name)) = (resolve(&leaf, module, names), leaf.last()) {
                found.insert(name.clone(), absolute);
            }
        }
    }
    found
}

/// The file in which a path ends, through names that modules show again.
fn follow(
    path: &[String],
    names: &BTreeSet<Module>,
    shown: &BTreeMap<&Module, BTreeMap<String, Module>>,
    depth: usize,
) -> Module {
    let length = (0..=path.len()).rev().find(|length| names.contains(&path[..*length])).unwrap_or(0);
    let module = path[..length].to_vec();
    let next = path.get(length).and_then(|name| shown.get(&module)?.get(name));
    match next {
        Some(again) if depth < 6 && again[..] != path[..] => {
            follow(&[&again[..], &path[length + 1..]].concat(), names, shown, depth + 1)
        }
        _ => module,
    }
}
