//! The shape of the code as a test: floors inside the large crates, small public faces, names that can be searched for, and
//! comments in plain words. Each bound may only shrink.
//!
//! Not here: lengths of files and functions, arrows between crates, documents (`tidy`).

mod modules;

use std::collections::{BTreeMap, BTreeSet};

use modules::{Crate, Import};
use nagaya_tests::sources::{SourceFile, fail_if, files, has_word, is_test, production_part, read, root};

/// Crates with rooms, from the top floor to the ground. A room may use only rooms further down in its list; what is not in
/// a list is on the ground and uses nothing above itself.
const FLOORS: &[(&str, &[&str])] = &[
    (
        "edge",
        &["server", "request", "rules", "backends", "admission", "shaping", "cluster", "record", "http"],
    ),
    ("keeper", &["server", "connection", "verbs", "instances", "context"]),
];

/// Imports between rooms that run upwards, as `crate: room -> room`. The list may only shrink.
const BACK_ARROWS: &[&str] = &[];

/// Most files of a crate that need each other in a circle.
const CIRCLES: &[(&str, usize)] = &[
    ("edge", 4),
    ("keeper", 8),
    ("keeper-api", 4),
    ("nagaya", 8),
    ("rules", 4),
    ("records", 4),
    ("store", 4),
    ("admission", 4),
    ("placement", 4),
];

/// Most names that a crate shows to others: public modules and re-exported names of its root.
const FACES: &[(&str, usize)] = &[("edge", 10), ("keeper", 20), ("rules", 35), ("admission", 60)];

/// Types of one name in one crate; names that are beyond it, for all crates together.
const TYPES_OF_A_NAME_MAX: usize = 2;
const SHARED_NAMES_MAX: usize = 0;

/// Columns of a line that holds a comment alone.
const COMMENT_WIDTH: usize = 100;
const WIDE_COMMENTS_MAX: usize = 0;

/// Letters of a test's name.
const TEST_NAME_LEN: usize = 60;
const LONG_TEST_NAMES_MAX: usize = 0;

/// Beginnings of sentences and words that comments do without, as they make the reader look for the noun.
const UNCLEAR_BEGINNINGS: &[&str] =
    &["What ", "Who ", "Whoever ", "That which ", "Of what ", "Of who ", "So long ", "To whom "];
const UNCLEAR_WORDS: &[&str] = &["whoever", "who asked", "anew", "is told", "are told", "so long as"];
const UNCLEAR_COMMENTS_MAX: usize = 0;

/// Crates whose production code is held to the bounds of names and comments.
const HELD: &[&str] = &["crates", "xtask/src"];

#[test]
fn rooms_use_only_rooms_below() {
    let mut found = BTreeSet::new();
    for (name, floors) in FLOORS {
        let floor_of = |module: &[String]| {
            let room = module.first().map_or("", String::as_str);
            floors.iter().position(|floor| *floor == room).unwrap_or(floors.len())
        };
        for Import { from, to } in Crate::read(&root().join("crates").join(name)).imports() {
            if !from.is_empty() && !to.is_empty() && floor_of(from) > floor_of(to) {
                let room = |module: &[String]| module.first().cloned().unwrap_or_default();
                found.insert(format!("{name}: {} -> {}", room(from), room(to)));
            }
        }
    }
    let allowed: BTreeSet<_> = BACK_ARROWS.iter().map(|arrow| (*arrow).to_owned()).collect();
    let added: Vec<_> = found.difference(&allowed).cloned().collect();
    fail_if(&added, "move the type that both use further down; arrows run down the floors");
    let gone: Vec<_> = allowed.difference(&found).cloned().collect();
    fail_if(&gone, "these arrows are gone: take them from BACK_ARROWS");
}

#[test]
fn files_need_each_other_in_small_circles() {
    for (name, most) in CIRCLES {
        let largest = Crate::read(&root().join("crates").join(name)).largest_circle();
        assert!(
            largest.len() <= *most,
            "{name}: {} files need each other, {most} may: {largest:?}",
            largest.len()
        );
    }
}

#[test]
fn crates_show_few_names() {
    for (name, most) in FACES {
        let shown = modules::shown_names(&read(&root().join("crates").join(name).join("src/lib.rs")));
        assert!(shown.len() <= *most, "{name} shows {} names, {most} may: {shown:?}", shown.len());
    }
}

#[test]
fn a_type_is_found_by_its_name() {
    let mut count: BTreeMap<(String, String), usize> = BTreeMap::new();
    for file in production_files() {
        for name in modules::type_names(&file.text) {
            *count.entry((crate_of(&file.path), name)).or_default() += 1;
        }
    }
    let shared: Vec<_> = count.iter().filter(|(_, count)| **count > TYPES_OF_A_NAME_MAX).collect();
    check_ratchet(shared.len(), SHARED_NAMES_MAX, "names that more than two types of a crate have", &shared);
}

#[test]
fn comments_fit_into_their_width() {
    let wide = comment_lines(|line| line.chars().count() > COMMENT_WIDTH);
    check_ratchet(wide.len(), WIDE_COMMENTS_MAX, "comments wider than a hundred columns", &wide);
}

#[test]
fn names_of_tests_are_short() {
    let mut long = Vec::new();
    for dir in ["crates", "tests", "xtask"] {
        for file in files(&root().join(dir), &["rs"]) {
            let names = modules::test_names(&file.text).into_iter().filter(|name| name.len() > TEST_NAME_LEN);
            long.extend(names.map(|name| format!("{}: {name}", file.path)));
        }
    }
    check_ratchet(long.len(), LONG_TEST_NAMES_MAX, "names of tests longer than 60 letters", &long);
}

#[test]
fn comments_begin_with_their_subject() {
    let unclear = comment_lines(|line| {
        let text = line.trim_start().trim_start_matches(['/', '!']).trim_start();
        let begins = UNCLEAR_BEGINNINGS.iter().any(|begin| {
            text.starts_with(begin)
                || text.contains(&format!(". {begin}"))
                || text.contains(&format!(": {begin}"))
        });
        begins || UNCLEAR_WORDS.iter().any(|word| has_word(text, word))
    });
    check_ratchet(
        unclear.len(),
        UNCLEAR_COMMENTS_MAX,
        "comments without a subject or with banned words",
        &unclear,
    );
}

// === What is read ===

/// Files without tests and fuzz targets, cut where their inline tests begin.
fn production_files() -> Vec<SourceFile> {
    let mut found: Vec<_> = HELD.iter().flat_map(|dir| files(&root().join(dir), &["rs"])).collect();
    found.retain(|file| !is_test(&file.path) && !file.path.contains("/fuzzing"));
    for file in &mut found {
        file.text.truncate(production_part(&file.text).len());
    }
    assert!(found.len() > 300, "the scan finds almost none");
    found
}

fn crate_of(path: &str) -> String {
    let mut parts = path.split('/');
    match (parts.next(), parts.next()) {
        (Some("crates"), Some(name)) => name.to_owned(),
        (first, _) => first.unwrap_or_default().to_owned(),
    }
}

/// `path:line: text` of each line of production code that is a comment alone and is wanted.
fn comment_lines(wanted: impl Fn(&str) -> bool) -> Vec<String> {
    let mut found = Vec::new();
    for file in production_files() {
        let lines = file.text.lines().enumerate();
        let comments = lines.filter(|(_, line)| line.trim_start().starts_with("//") && wanted(line));
        found.extend(comments.map(|(at, line)| format!("{}:{}: {}", file.path, at + 1, line.trim())));
    }
    found
}

// === How it is judged ===

/// Fails if there are more than the bound, and if there are fewer, so that the bound follows.
#[track_caller]
fn check_ratchet(found: usize, bound: usize, of: &str, list: &[impl std::fmt::Debug]) {
    let shown: Vec<_> = list.iter().take(40).map(|place| format!("\n  {place:?}")).collect();
    assert!(found <= bound, "{found} {of}, {bound} may be:{}", shown.concat());
    assert!(found == bound, "{found} {of}: fewer than the bound of {bound}, lower it");
}
