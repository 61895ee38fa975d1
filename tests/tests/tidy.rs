//! House style as a test: what reviewers would otherwise have to say again and again. Each failure says what to do.
//!
//! Not here: what `rustfmt` and `clippy` check already (`./dev lint`), and whether the program works (`e2e_*`).

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use nagaya_tests::sources::{
    SourceFile, fail_if, files, has_word, is_test, production_part, read, root, stem,
};

/// Lines of one source file.
const FILE_LINES_MAX: usize = 999;
/// Lines of one function, from its signature to its closing brace.
const FUNCTION_LINES_MAX: usize = 70;

/// Functions that may be longer, as `path::name`. It stays empty: split the function instead.
const LONG_FUNCTIONS: &[&str] = &[];

/// The files that may hold `unsafe`, each fencing calls into the kernel or, for rules, into mruby.
const UNSAFE_FILES: &[&str] = &[
    "crates/keeper-api/src/sys.rs",
    "crates/keeper/src/sys.rs",
    "crates/keeper/src/sched_slice.rs",
    "crates/keeper/src/instances/run/rest/calls.rs",
    "crates/keeper/src/sandbox/kernel.rs",
    "crates/machine/src/clock.rs",
    "crates/volumes/src/file_handles.rs",
    "crates/rules/src/ffi.rs",
    "crates/nagaya/src/inherit.rs",
    "crates/nagaya/src/supervisor/priority.rs",
    "crates/edge/src/sys.rs",
];

/// Which of our crates each crate may use. They stand in order: a crate uses only crates above it.
const DEPENDENCIES: &[(&str, &[&str])] = &[
    ("base", &[]),
    ("telemetry", &["base"]),
    ("admission", &["base"]),
    ("placement", &[]),
    ("volumes", &[]),
    ("records", &["base"]),
    ("store", &["records", "base"]),
    ("keeper-api", &["records", "base"]),
    ("machine", &[]),
    ("keeper", &["machine", "keeper-api", "records", "telemetry", "base"]),
    ("rules", &["records", "base"]),
    ("edge", &["rules", "keeper-api", "records", "placement", "admission", "telemetry", "base"]),
    ("sendmail", &["base"]),
    (
        "nagaya",
        &[
            "sendmail",
            "edge",
            "rules",
            "keeper",
            "machine",
            "store",
            "records",
            "placement",
            "admission",
            "telemetry",
            "base",
        ],
    ),
    // Nothing ships with it, and nothing of what it drives knows of it.
    ("sim", &["placement", "volumes"]),
    // The developer's packages speak to the built program as its users do, and nothing ships with them.
    ("tests", &[]),
    // Two experiments measure one part alone, without a server around it.
    (
        "xtask",
        &[
            "admission",
            "edge",
            "rules",
            "keeper",
            "machine",
            "keeper-api",
            "store",
            "records",
            "telemetry",
            "base",
        ],
    ),
];

/// Crates that a crate uses in its tests alone.
const TEST_DEPENDENCIES: &[(&str, &str)] = &[
    // The edge's tests start a real keeper.
    ("edge", "keeper"),
];

/// Files and directories of the keeper that open files by path, with the reason why no tenant can lead that path elsewhere. All other
/// paths are opened by `tenant_path.rs`.
const PATH_OPENERS: &[(&str, &str)] = &[
    ("crates/keeper/src/paths/tenant_path.rs", "it is the one place for paths that a tenant can change"),
    (
        "crates/keeper/src/paths/tenant_path/steps.rs",
        "its part: with the tenant's rights, name by name, without following a link",
    ),
    (
        "crates/keeper/src/machines.rs",
        "templates are root's, in a directory that only root enters; what nobody has made is opened without following a link",
    ),
    ("crates/keeper/src/bases.rs", "bases are root's, in a directory that only root enters"),
    ("crates/keeper/src/bases/layer.rs", "looks up in a base as if it were all there is; it is root's"),
    (
        "crates/keeper/src/cells/",
        "control groups, and what the kernel tells of processes and devices, are root's",
    ),
    ("crates/keeper/src/enclosure.rs", "namespaces of its own thread"),
    (
        "crates/keeper/src/enclosure/",
        "the keeper's own directories, and places of the node's that mounts go on",
    ),
    ("crates/keeper/src/context.rs", "makes the keeper's own directories"),
    ("crates/keeper/src/gate/scripts.rs", "only asks whether a script is there; its tenant opens it"),
    ("crates/keeper/src/huge_pages.rs", "a file of the kernel's"),
    ("crates/keeper/src/image/", "images are root's, in a directory that only root enters"),
    (
        "crates/keeper/src/instances/run/machine_state.rs",
        "what the kernel tells of processes, by their numbers",
    ),
    (
        "crates/keeper/src/instances/run/plain_address.rs",
        "a socket in a directory of the keeper's, without following a link",
    ),
    (
        "crates/keeper/src/instances/run/volatile_files.rs",
        "from directory to directory without following a link",
    ),
    (
        "crates/keeper/src/instances/limits/connection_holder.rs",
        "what the kernel tells of processes, by their numbers",
    ),
    ("crates/keeper/src/instances/run/lateness.rs", "what the kernel tells of processes, by their numbers"),
    ("crates/keeper/src/instances/run/pressure.rs", "files of the kernel's"),
    ("crates/keeper/src/instances/run/lateness.rs", "what the kernel tells of processes, by their numbers"),
    ("crates/keeper/src/instances/run/rest.rs", "what the kernel tells of processes, by their numbers"),
    (
        "crates/keeper/src/instances/run/rest/family.rs",
        "what the kernel tells of processes, by their numbers",
    ),
    (
        "crates/keeper/src/instances/run/rest/signs.rs",
        "descriptors of processes, as places only; judged by what was opened",
    ),
    (
        "crates/keeper/src/instances/limits/request_cells.rs",
        "what the kernel tells of processes, by their numbers",
    ),
    ("crates/keeper/src/instances/run/usage.rs", "what the kernel tells of processes, by their numbers"),
    (
        "crates/keeper/src/instances/run/sandbox_spec.rs",
        "the keeper's own directories and files, and the node's resolver",
    ),
    ("crates/keeper/src/log/", "logs are root's, in a directory that only root enters"),
    ("crates/keeper/src/mail/", "a file in the keeper's own directory, which only root writes"),
    ("crates/keeper/src/relay/names.rs", "the node's resolver"),
    ("crates/keeper/src/root_mounts/mount_list.rs", "a file of the kernel's"),
    ("crates/keeper/src/paths/roots.rs", "the operator's directory of certificates"),
    ("crates/keeper/src/sandbox/birth.rs", "the root of the sandbox it is in"),
    ("crates/keeper/src/sandbox/capture.rs", "the network that the thread is in"),
    ("crates/keeper/src/sandbox/cgroup.rs", "control groups are root's"),
    ("crates/keeper/src/sandbox/checkpoint.rs", "runs in an init, whose mounts are its sandbox' alone"),
    ("crates/keeper/src/sandbox/init.rs", "runs in an init, whose mounts are its sandbox' alone"),
    ("crates/keeper/src/sandbox/kernel.rs", "what the kernel tells of its own threads"),
    ("crates/keeper/src/sandbox/launcher.rs", "a device of the node's"),
    ("crates/keeper/src/sandbox/namespaces.rs", "namespaces of a process that it has made"),
    (
        "crates/keeper/src/sandbox/network.rs",
        "looks up in a sandbox as if it were all there is, or a path of the keeper's",
    ),
    ("crates/keeper/src/sandbox/program.rs", "runs in a sandbox, as its tenant"),
    ("crates/keeper/src/sandbox/rights.rs", "what the kernel tells of processes in its sandbox"),
    ("crates/keeper/src/sandbox/session.rs", "runs in an init, whose mounts are its sandbox' alone"),
    ("crates/keeper/src/sandbox/shm.rs", "runs in an init, whose mounts are its sandbox' alone"),
    ("crates/keeper/src/sandbox/terminal.rs", "looks up in a sandbox as if it were all there is"),
    ("crates/keeper/src/sandbox/trial.rs", "what the kernel tells of itself"),
    (
        "crates/keeper/src/sandbox/tree.rs",
        "beneath an open base without following a link, or the keeper's own paths",
    ),
    ("crates/keeper/src/sandbox/warden.rs", "what the kernel tells of itself"),
    ("crates/keeper/src/spawn.rs", "the keeper's own directory of sockets, and a device of the node's"),
    ("crates/keeper/src/spawn/php.rs", "the keeper's own directory of sockets"),
    ("crates/keeper/src/php_parent.rs", "the operator's `php-cgi`"),
    ("crates/keeper/src/sys.rs", "in a child that has the tenant's ids and no descriptor of anybody else's"),
];

/// Files that may take a tenant's rights on files for a moment, with the reason.
const TENANTS_RIGHTS: &[(&str, &str)] = &[
    ("crates/keeper/src/paths/tenant_path.rs", "it is the one place for paths that a tenant can change"),
    ("crates/keeper/src/instances/run/app_launch.rs", "what goes with an image, by `volatile_files.rs`"),
];

/// Calls that look something up by a path.
const PATH_CALLS: &[&str] = &[
    "File::open(",
    "File::create(",
    "File::options(",
    "OpenOptions::new(",
    "fs::read(",
    "fs::read_to_string(",
    "fs::read_dir(",
    "fs::read_link(",
    "fs::write(",
    "fs::copy(",
    "fs::metadata(",
    "fs::symlink_metadata(",
    "fs::canonicalize(",
    "fs::create_dir",
    "fs::rename(",
    "fs::hard_link(",
    "fs::set_permissions(",
    "fs::open(",
    "openat(",
    "openat2(",
    "fs::stat(",
    "fs::lstat(",
    "statat(",
    "chdir(",
    "canonicalize(",
    ".metadata(",
    ".exists()",
    ".is_dir()",
    ".is_file()",
];

/// Files whose tests may sleep, with why waiting for a condition would not do.
const SLEEPING_TESTS: &[(&str, &str)] = &[
    ("crates/store/src/etcd/tests/rig.rs", "polls a condition of another process until its deadline"),
    ("tests/src/wait.rs", "polls a condition of another process until its deadline"),
    ("tests/src/backend.rs", "plays a server that is slow on purpose"),
    ("tests/tests/e2e/turnaround.rs", "plays a database that is slow on purpose"),
    ("crates/edge/src/backends/programs/testing.rs", "polls a condition of a process until its deadline"),
    ("crates/edge/src/backends/programs/php/tests.rs", "plays a client that sends slowly on purpose"),
];

// === The rules ===

#[test]
fn each_source_file_begins_by_saying_what_it_is() {
    check(sources(), "begin the file with `//!`: what it is, what it is not, and where that lives", |file| {
        (!file.text.starts_with("//! ")).then(|| file.path.clone()).into_iter().collect()
    });
}

#[test]
fn no_source_file_is_too_long() {
    check(sources(), "split the file by what changes together", |file| {
        let lines = file.text.lines().count();
        (lines > FILE_LINES_MAX).then(|| format!("{}: {lines} lines", file.path)).into_iter().collect()
    });
}

#[test]
fn no_function_is_too_long() {
    check(sources(), "split the function; the list LONG_FUNCTIONS only ever gets shorter", |file| {
        functions(&file.text)
            .into_iter()
            .filter(|(_, lines)| *lines > FUNCTION_LINES_MAX)
            .map(|(name, lines)| (format!("{}::{name}", file.path), lines))
            .filter(|(name, _)| !LONG_FUNCTIONS.contains(&name.as_str()))
            .map(|(name, lines)| format!("{name}: {lines} lines"))
            .collect()
    });
}

#[test]
fn unsafe_code_is_where_it_is_listed() {
    check(sources(), "use a safe wrapper of rustix or nix, or move it to a file of UNSAFE_FILES", |file| {
        if UNSAFE_FILES.contains(&file.path.as_str()) {
            return Vec::new();
        }
        let marks = [concat!("allow(unsafe", "_code"), concat!("unsafe", " {"), concat!("unsafe", " fn")];
        lines_with(file, |line| marks.iter().any(|mark| code_of(line).contains(mark)))
    });
}

#[test]
fn tenants_paths_are_opened_in_one_place() {
    let calls = |line: &str| PATH_CALLS.iter().any(|call| has_word(code_of(line), call));
    check_places("crates/keeper/src/", PATH_OPENERS, calls);
}

#[test]
fn tenants_rights_are_taken_in_one_place() {
    let takes = |line: &str| has_word(code_of(line), concat!("as_tenant", "("));
    check_places("crates/keeper/src/", TENANTS_RIGHTS, takes);
}

#[test]
fn input_cannot_panic_the_program() {
    let production =
        sources().into_iter().filter(|file| file.path.starts_with("crates/") && !is_test(&file.path));
    check(production, "return an error, or say with `expect(\"...\")` why it cannot happen", |file| {
        let production = SourceFile { path: file.path.clone(), text: production_part(&file.text).to_owned() };
        lines_with(&production, |line| code_of(line).contains(concat!(".unwrap", "()")))
    });
}

#[test]
fn nothing_is_left_to_do() {
    let marks = [
        concat!("TO", "DO"),
        concat!("FIX", "ME"),
        concat!("XX", "X"),
        concat!("to", "do!("),
        concat!("unimplemented", "!("),
        concat!("dbg", "!("),
    ];
    check(sources(), "do it now, or write an issue and remove the mark", |file| {
        lines_with(file, |line| marks.iter().any(|mark| has_word(line, mark)))
    });
}

#[test]
fn nothing_depends_on_one_machine() {
    // Some machines have the last: other software makes it as the home of `nobody`.
    let marks = [
        concat!("/wo", "rk/"),
        concat!("/tmp", "/n/"),
        concat!("/home", "/runner"),
        concat!("\"/nonexis", "tent"),
    ];
    check(texts(), "take the path from the environment, a setting or a temporary directory", |file| {
        lines_with(file, |line| marks.iter().any(|mark| has_word(line, mark)))
    });
}

#[test]
fn tests_wait_for_conditions_not_for_time() {
    check(
        sources(),
        "wait for the condition itself (`wait::until`); reasons stand in SLEEPING_TESTS",
        |file| {
            // With tokio's clock paused, a sleep moves the simulated time and takes none.
            let simulated = file.text.contains(concat!("start", "_paused"));
            if simulated || SLEEPING_TESTS.iter().any(|(path, _)| *path == file.path) {
                return Vec::new();
            }
            let production = if is_test(&file.path) { "" } else { production_part(&file.text) };
            let skipped = production.lines().count();
            lines_with(file, sleeps).into_iter().filter(|found| line_number(found) > skipped).collect()
        },
    );
}

#[test]
fn file_names_say_what_is_inside() {
    let vague = ["util", "utils", "helper", "helpers", "common", "misc", "manager"];
    check(sources(), "name the file after the one thing it is about", |file| {
        let stem = Path::new(&file.path).file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
        vague.contains(&stem).then(|| file.path.clone()).into_iter().collect()
    });
}

#[test]
fn crates_depend_downwards_only() {
    let mut wrong = Vec::new();
    for manifest in manifests() {
        let Some((name, allowed)) = DEPENDENCIES.iter().find(|(name, _)| *name == manifest.name) else {
            wrong.push(format!("{}: not in the list DEPENDENCIES", manifest.name));
            continue;
        };
        for used in &manifest.uses {
            if !allowed.contains(&used.as_str()) {
                wrong.push(format!("{name} -> {used}"));
            }
        }
    }
    for (at, (name, uses)) in DEPENDENCIES.iter().enumerate() {
        let above: Vec<_> = DEPENDENCIES[..at].iter().map(|(name, _)| *name).collect();
        wrong
            .extend(uses.iter().filter(|used| !above.contains(used)).map(|used| format!("{name} -> {used}")));
    }
    fail_if(&wrong, "a crate uses only crates below it; move the shared part down, or pass it in as a value");
}

#[test]
fn each_crate_takes_the_workspace_lints() {
    let wrong: Vec<_> = manifests().into_iter().filter(|m| !m.lints).map(|m| m.name).collect();
    fail_if(&wrong, "add `[lints]` with `workspace = true` to its Cargo.toml");
}

#[test]
fn each_error_code_has_its_page_and_each_page_its_code() {
    let used = error_codes();
    assert!(used.len() > 20, "the scan for error codes finds almost none: {used:?}");
    let pages: BTreeMap<String, String> = files(&root().join("docs/errors"), &["md"])
        .into_iter()
        .map(|file| (stem(&file.path), file.text))
        .collect();
    let mut wrong = Vec::new();
    for (code, place) in &used {
        if !pages.contains_key(code) {
            wrong.push(format!("docs/errors/{code}.md is missing; {place} uses the code"));
        }
    }
    for (code, text) in &pages {
        if !used.contains_key(code) {
            wrong.push(format!("docs/errors/{code}.md: no source uses the code"));
        }
        if !text.starts_with(&format!("# {code}: ")) {
            wrong.push(format!("docs/errors/{code}.md does not begin with '# {code}: '"));
        }
        for part in ["What happened", "What to do"] {
            if !text.contains(part) {
                wrong.push(format!("docs/errors/{code}.md has no '{part}'"));
            }
        }
    }
    fail_if(&wrong, "write the page for who meets the error: What happened, What to do; 8 to 20 lines");
}

#[test]
fn the_drawings_show_the_steps_of_the_code() {
    let steps = |path: &str| {
        let text = read(&root().join(path));
        let line = text.lines().find(|line| line.contains("route -> ")).unwrap_or_default();
        line.trim_start_matches("//!").trim().to_owned()
    };
    let code = steps("crates/edge/src/request.rs");
    assert!(code.ends_with("release"), "the header of request.rs has no line 'route -> ... -> release'");
    for path in ["ARCHITECTURE.md", "docs/life-of-a-request.md"] {
        assert_eq!(steps(path), code, "{path}: draw the steps as the header of request.rs lists them");
    }
    let drawn = read(&root().join("docs/life-of-a-request.md"));
    for step in code.split(" -> ") {
        assert!(
            drawn.contains(&format!("**{step}**")),
            "docs/life-of-a-request.md does not explain **{step}**"
        );
    }
}

#[test]
fn links_between_documents_lead_somewhere() {
    check(documents(), "correct the link; links are relative to the document", |file| {
        let dir = root().join(&file.path).parent().map(Path::to_path_buf).unwrap_or_default();
        links(&file.text)
            .into_iter()
            .filter(|link| !link.contains("://") && !link.starts_with("mailto:") && !link.starts_with('#'))
            .filter(|link| !dir.join(link.split('#').next().unwrap_or_default()).exists())
            .map(|link| format!("{}: {link}", file.path))
            .collect()
    });
}

#[test]
fn files_named_in_the_architecture_exist() {
    let text = read(&root().join("ARCHITECTURE.md"));
    let wrong: Vec<_> = text
        .split('`')
        .skip(1)
        .step_by(2)
        .filter(|name| ["crates/", "tests/", "docs/", "xtask/"].iter().any(|dir| name.starts_with(dir)))
        .filter(|name| !name.contains(['*', '{', '<']) && !root().join(name).exists())
        .collect();
    fail_if(&wrong, "the code moved: say in ARCHITECTURE.md where it is now");
}

#[test]
fn tests_named_in_the_threat_model_exist() {
    let text = promises();
    let named = text.split('`').skip(1).step_by(2).filter_map(|name| name.split_once("::"));
    let named = named.filter(|(module, _)| !module.contains(' '));
    let wrong: Vec<_> = named
        .filter(|(module, test)| {
            let path = root().join(format!("tests/tests/e2e/{module}.rs"));
            let source = fs::read_to_string(path).unwrap_or_default();
            source.is_empty() || !(test.is_empty() || source.contains(&format!("fn {test}(")))
        })
        .map(|(module, test)| format!("{module}::{test}"))
        .collect();
    fail_if(
        &wrong,
        "docs/threat-model.md or SPECIFICATION.md promises a test; name the one that shows it now",
    );
}

#[test]
fn facts_named_in_the_threat_model_are_tested() {
    let tests = sources().into_iter().filter(|file| file.path.starts_with("crates/keeper/tests/"));
    let tests: String = tests.map(|file| file.text).collect();
    let text = promises();
    // `| ... | kernel `a fact`, `another`, e2e `module::test` |`: a fact has spaces, everything else there has none.
    let shown = text.lines().filter_map(|line| line.strip_suffix(" |")?.rsplit_once(" | "));
    let named = shown.flat_map(|(_, shown)| shown.split('`').skip(1).step_by(2));
    let wrong: Vec<_> = named
        .filter(|name| name.contains(' ') && !tests.contains(&format!("\"{name}\",")))
        .map(str::to_owned)
        .collect();
    fail_if(
        &wrong,
        "docs/threat-model.md or SPECIFICATION.md promises a test of the keeper's; name the one that shows it now",
    );
}

/// A package that compiles C needs the package `cc` or `cmake`.
#[test]
fn packages_with_c_are_listed_with_their_version() {
    let list = read(&root().join("docs/bundled-c.md"));
    let lock = read(&root().join("Cargo.lock"));
    let value = |package: &str, key: &str| {
        let line = package.lines().find_map(|line| line.strip_prefix(&format!("{key} = \"")));
        line.map(|rest| rest.trim_end_matches('"').to_owned()).unwrap_or_default()
    };
    let builds_c = |package: &&str| ["\n \"cc\"", "\n \"cmake\""].iter().any(|tool| package.contains(tool));
    let packages = lock.split("[[package]]").filter(builds_c).filter(|package| package.contains("source = "));
    let rows: Vec<_> = packages
        .map(|package| format!("| `{}` | {} |", value(package, "name"), value(package, "version")))
        .collect();
    assert!(rows.iter().any(|row| row.contains("ring")), "Cargo.lock is read wrongly: {rows:?}");
    let missing: Vec<_> = rows.into_iter().filter(|row| !list.contains(row.as_str())).collect();
    fail_if(&missing, "look for advisories of the C in this version, then correct docs/bundled-c.md");
}

#[test]
fn the_program_is_shipped_without_lines_of_debugging() {
    let text = read(&root().join("Cargo.toml"));
    let release = text.split("[profile.release]").nth(1).expect("a profile");
    let release = release.split("\n[").next().unwrap_or_default();
    assert!(release.contains("\nstrip = \"debuginfo\""), "they are four fifths of the file:{release}");
}

#[test]
fn the_changelog_is_open_for_the_next_change() {
    let text = read(&root().join("CHANGELOG.md"));
    let open = text.lines().any(|line| line.starts_with("## ") && line.contains("Unreleased"));
    assert!(open, "CHANGELOG.md: add a section '## Unreleased' and note there what users can notice");
}

/// Only the listed files and directories have such lines, and each has one.
fn check_places(beneath: &str, listed: &[(&str, &str)], wanted: impl Fn(&str) -> bool) {
    let is_listed =
        |path: &str, place: &str| path == place || (place.ends_with('/') && path.starts_with(place));
    let production =
        sources().into_iter().filter(|file| file.path.starts_with(beneath) && !is_test(&file.path));
    let mut found = Vec::new();
    for file in production {
        let production = SourceFile { path: file.path.clone(), text: production_part(&file.text).to_owned() };
        found.extend(lines_with(&production, &wanted));
    }
    let path_of = |line: &str| line.split(':').next().unwrap_or_default().to_owned();
    let is_known = |line: &&String| !listed.iter().any(|(place, _)| is_listed(&path_of(line), place));
    let wrong: Vec<&String> = found.iter().filter(is_known).collect();
    fail_if(
        &wrong,
        "open what a tenant can change by `tenant_path`; other paths stand in a list, with the reason",
    );
    let is_stale = |place: &&str| !found.iter().any(|line| is_listed(&path_of(line), place));
    let stale: Vec<&str> = listed.iter().map(|(place, _)| *place).filter(is_stale).collect();
    fail_if(&stale, "nothing is opened there any more: remove the entry");
}

// === How the rules read the sources ===

struct Manifest {
    /// Its directory's name.
    name: String,
    /// Our own crates among its dependencies, without `nagaya-`.
    uses: BTreeSet<String>,
    lints: bool,
}

/// The pages that name a test for each of their promises.
fn promises() -> String {
    ["docs/threat-model.md", "SPECIFICATION.md"].map(|path| read(&root().join(path))).concat()
}

fn check(
    files: impl IntoIterator<Item = SourceFile>,
    advice: &str,
    rule: impl Fn(&SourceFile) -> Vec<String>,
) {
    let wrong: Vec<_> = files.into_iter().flat_map(|file| rule(&file)).collect();
    fail_if(&wrong, advice);
}

/// All Rust sources of the workspace.
fn sources() -> Vec<SourceFile> {
    let found: Vec<_> =
        ["crates", "tests", "xtask"].iter().flat_map(|dir| files(&root().join(dir), &["rs"])).collect();
    assert!(found.len() > 40, "the scan for sources finds almost none");
    found
}

fn documents() -> Vec<SourceFile> {
    let mut found = files(&root().join("docs"), &["md"]);
    found.extend(top_level(|name| name.ends_with(".md")));
    found
}

fn texts() -> Vec<SourceFile> {
    let mut found = sources();
    found.extend(documents());
    found.extend(
        ["crates", "tests", "xtask"].iter().flat_map(|dir| files(&root().join(dir), &["toml", "sh", "mjs"])),
    );
    found.extend(top_level(|name| name.ends_with(".toml") || name == "dev"));
    found
}

fn top_level(wanted: impl Fn(&str) -> bool) -> Vec<SourceFile> {
    let entries = fs::read_dir(root()).expect("the checkout can be listed");
    let names = entries.map(|entry| entry.expect("the checkout can be listed").file_name());
    let names = names.filter_map(|name| name.into_string().ok()).filter(|name| wanted(name));
    names.map(|name| SourceFile { text: read(&root().join(&name)), path: name }).collect()
}

/// Whether the line sleeps itself; programs that tests write may do as they like.
fn sleeps(line: &str) -> bool {
    let line = code_of(line);
    let call = concat!("sleep", "(");
    line.match_indices(call)
        .any(|(at, _)| line[..at].ends_with("::") && line[..at].matches('"').count().is_multiple_of(2))
}

/// The line without its comment.
fn code_of(line: &str) -> &str {
    match line.find("//") {
        Some(at) if !line[..at].contains('"') => &line[..at],
        _ => line,
    }
}

/// `path:line: text` of each line that is wanted.
fn lines_with(file: &SourceFile, wanted: impl Fn(&str) -> bool) -> Vec<String> {
    let lines = file.text.lines().enumerate().filter(|(_, line)| wanted(line));
    lines.map(|(at, line)| format!("{}:{}: {}", file.path, at + 1, line.trim())).collect()
}

fn line_number(found: &str) -> usize {
    found.split(':').nth(1).and_then(|number| number.parse().ok()).expect("a place as `lines_with` prints it")
}

/// Names and lengths of the functions of a formatted file: `rustfmt` puts a function's closing brace below the
/// beginning of its signature.
fn functions(text: &str) -> Vec<(String, usize)> {
    let lines: Vec<_> = text.lines().collect();
    let mut found = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let Some(name) = function_name(line) else { continue };
        let indent = &line[..line.len() - line.trim_start().len()];
        let same_indent =
            |line: &&str| line.starts_with(indent) && !line[indent.len()..].starts_with([' ', '\t']);
        let is_end = |line: &&str| {
            let rest = line.get(indent.len()..).unwrap_or_default();
            same_indent(line) && rest.ends_with(['}', ';'])
        };
        let length = lines[at..].iter().position(is_end).map_or(1, |end| end + 1);
        found.push((name.to_owned(), length));
    }
    found
}

fn function_name(line: &str) -> Option<&str> {
    let mut words = line.trim_start();
    loop {
        if let Some(rest) = words.strip_prefix("fn ") {
            let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_')?;
            return Some(&rest[..end]);
        }
        let (word, rest) = words.split_once(' ')?;
        let qualifier = ["pub", "const", "async", "unsafe", "extern", "\"C\""].contains(&word);
        if !qualifier && !word.starts_with("pub(") {
            return None;
        }
        words = rest;
    }
}

/// Targets of `[text](target)`.
fn links(text: &str) -> Vec<&str> {
    let parts = text.split("](").skip(1);
    parts
        .filter_map(|part| part.split_once(')'))
        .map(|(link, _)| link)
        .filter(|link| !link.contains(' '))
        .collect()
}

fn manifests() -> Vec<Manifest> {
    let mut found = Vec::new();
    for file in ["crates", "tests", "xtask"].iter().flat_map(|dir| files(&root().join(dir), &["toml"])) {
        let Some(dir) = file.path.strip_suffix("/Cargo.toml") else { continue };
        let table: toml::Table =
            toml::from_str(&file.text).unwrap_or_else(|error| panic!("{}: {error}", file.path));
        // A package outside the workspace, e.g. of fuzz targets, builds on the crate that it lies in.
        if table.contains_key("workspace") {
            continue;
        }
        let sections = ["dependencies", "build-dependencies", "dev-dependencies"];
        let names =
            sections.iter().filter_map(|section| table.get(*section)?.as_table()).flat_map(|t| t.keys());
        let uses = names.filter_map(|name| name.strip_prefix("nagaya-")).map(str::to_owned);
        let name = dir.rsplit('/').next().unwrap_or(dir).to_owned();
        let is_known = |used: &String| TEST_DEPENDENCIES.contains(&(name.as_str(), used.as_str()));
        let uses = uses.filter(|used| !is_known(used)).collect();
        let lints =
            table.get("lints").and_then(|lints| lints.get("workspace")).and_then(toml::Value::as_bool);
        found.push(Manifest { name, uses, lints: lints == Some(true) });
    }
    assert!(found.len() >= DEPENDENCIES.len(), "a crate of DEPENDENCIES is gone");
    found
}

/// Every code that production sources use, in the spellings `Code(301)`, `"NGY0301"` and the rows of the refusal
/// table, with one place that uses it.
fn error_codes() -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for file in sources() {
        if !file.path.starts_with("crates/") || is_test(&file.path) || file.path == "crates/base/src/code.rs"
        {
            continue;
        }
        let text = production_part(&file.text);
        let mut marks = vec!["Code(", "\"NGY"];
        if file.path == "crates/edge/src/http/refusal.rs" {
            marks.extend([", ", "valid status code\"), "]);
        }
        for number in marks.iter().flat_map(|mark| numbers_behind(text, mark)) {
            found.entry(format!("NGY{number:04}")).or_insert_with(|| file.path.clone());
        }
    }
    found
}

/// Numbers of three or four digits right behind `mark`, if a closing mark follows.
fn numbers_behind(text: &str, mark: &str) -> Vec<u16> {
    text.match_indices(mark)
        .filter_map(|(at, _)| {
            let tail = &text[at + mark.len()..];
            let end = tail.find(|c: char| !c.is_ascii_digit())?;
            let closed = tail[end..].starts_with([')', '"']) || tail[end..].starts_with(", \"");
            ((3..=4).contains(&end) && closed).then(|| tail[..end].parse().ok()).flatten()
        })
        .collect()
}

// === The scanners themselves ===

#[test]
fn function_lengths_count_from_signature_to_brace() {
    let text = "fn short() {}\n\npub(crate) async fn long(\n    a: u8,\n) -> u8 {\n    {\n    }\n    a\n}\n\n\
                trait T {\n    fn declared(&self);\n    fn given(&self) {\n        body();\n    }\n}\n";
    let expected = [("short", 1), ("long", 7), ("declared", 1), ("given", 3)].map(|(n, l)| (n.to_owned(), l));
    assert_eq!(functions(text), expected);
}

#[test]
fn marks_are_found_as_words_only() {
    let mark = concat!("TO", "DO");
    assert!(has_word(&format!("// {mark}: later"), mark));
    assert!(!has_word(&format!("let {mark}S = 1;"), mark));
    assert!(has_word("call(\"/opt/x\")", "/opt/"));
    assert!(!has_word("\"/srv/opt/x\"", "/opt/"));
}

#[test]
fn only_sleeps_of_the_test_itself_are_found() {
    let call = concat!("sleep", "(1)");
    assert!(sleeps(&format!("    std::thread::{call};")));
    assert!(!sleeps(&format!("    file(\"<?php {call}; thread::{call};\");")));
    assert!(!sleeps(&format!("    u{call};")));
}

#[test]
fn codes_are_found_in_all_spellings() {
    assert_eq!(numbers_behind("a => Code(301), b => Code(n)", "Code("), [301]);
    assert_eq!(numbers_behind("warn!(code = \"NGY0422\", x)", "\"NGY"), [422]);
    assert_eq!(numbers_behind("row(StatusCode::NOT_FOUND, 402, \"x\", Client)", ", "), [402]);
}
