//! The sources of the workspace as text, for the tests of how they are written (`tidy`, `house`).
//!
//! Not here: the rules themselves.

use std::fs;
use std::path::{Path, PathBuf};

/// One text file of the checkout.
pub struct SourceFile {
    /// Relative to the checkout, for messages and lists.
    pub path: String,
    pub text: String,
}

/// The checkout.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the package lies in the workspace").to_path_buf()
}

/// The text of a file that must be there.
pub fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Fails with the advice and all places that are wrong.
#[track_caller]
pub fn fail_if<T: AsRef<str>>(wrong: &[T], advice: &str) {
    let list: String = wrong.iter().map(|place| format!("\n  {}", place.as_ref())).collect();
    assert!(wrong.is_empty(), "{advice}:{list}\n");
}

/// The files below `dir` with one of these endings, without what cargo built and npm installed.
pub fn files(dir: &Path, endings: &[&str]) -> Vec<SourceFile> {
    let mut found = Vec::new();
    let mut open = vec![dir.to_path_buf()];
    while let Some(dir) = open.pop() {
        let entries = fs::read_dir(&dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
        for entry in entries {
            let path = entry.expect("a directory entry").path();
            let ending = path.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
            if path.is_dir() && !path.ends_with("target") && !path.ends_with("node_modules") {
                open.push(path);
            } else if endings.contains(&ending) {
                let relative = path.strip_prefix(root()).expect("it lies in the checkout");
                found.push(SourceFile { path: relative.to_string_lossy().into_owned(), text: read(&path) });
            }
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    found
}

/// The name of a file or directory without its ending.
pub fn stem(path: &str) -> String {
    Path::new(path).file_stem().expect("it has a name").to_string_lossy().into_owned()
}

/// Whether a file holds nothing but tests.
pub fn is_test(path: &str) -> bool {
    let name = stem(path);
    path.starts_with("tests/")
        || path.contains("/tests/")
        || path.contains("/fuzz/")
        || path.contains("/benches/")
        || name == "tests"
        || name == "testing"
        || name == "suite"
        || name.ends_with("_tests")
}

/// The text without the tests at its end.
pub fn production_part(text: &str) -> &str {
    let begins = ["#[cfg(test)]\nmod tests {", "#[cfg(test)]\npub mod tests {"];
    &text[..begins.iter().filter_map(|begin| text.find(begin)).min().unwrap_or(text.len())]
}

/// Whether `mark` stands in the line with no letter, digit or underscore in front of it or, if it ends in
/// one, behind it.
pub fn has_word(line: &str, mark: &str) -> bool {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(mark).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        let after = line[at + mark.len()..].chars().next();
        let open_end = !mark.ends_with(is_word);
        !before.is_some_and(is_word) && (open_end || !after.is_some_and(is_word))
    })
}
