//! Files that are written, replaced, gone.

use std::os::unix::fs::symlink;

use super::*;

fn text(source: SourceRead) -> Option<String> {
    match source {
        SourceRead::Text(text) => Some(String::from_utf8(text.into()).unwrap()),
        _ => None,
    }
}

#[test]
fn a_file_is_given_once_for_each_version() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.rb");
    let mut seen = None;
    assert!(matches!(read(&path, &mut seen), SourceRead::Unreadable(_)));
    for version in ["one", "two", "six", ""] {
        // Of the same length, and within one tick of the clock.
        fs::write(&path, version).unwrap();
        assert_eq!(text(read(&path, &mut seen)).as_deref(), Some(version));
        assert_eq!(read(&path, &mut seen), SourceRead::Same);
    }
    fs::remove_file(&path).unwrap();
    assert!(matches!(read(&path, &mut seen), SourceRead::Unreadable(_)));
    assert_eq!(seen, None);
}

#[test]
fn a_file_that_settled_is_not_read_again() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.rb");
    fs::write(&path, "old").unwrap();
    let mut seen = None;
    read(&path, &mut seen);
    // As if the file had been written long ago.
    let stamp = seen.as_mut().unwrap();
    assert!(stamp.unsettled.is_some());
    stamp.unsettled = None;
    assert_eq!(read(&path, &mut seen), SourceRead::Same);
    assert!(seen.unwrap().unsettled.is_none());
}

#[test]
fn another_file_by_the_same_name_is_another_version() {
    let directory = tempfile::tempdir().unwrap();
    let [path, other, link] = ["a", "b", "link"].map(|name| directory.path().join(name));
    fs::write(&path, "same").unwrap();
    fs::write(&other, "same").unwrap();
    symlink(&path, &link).unwrap();
    let mut seen = None;
    assert!(text(read(&link, &mut seen)).is_some());
    fs::remove_file(&link).unwrap();
    symlink(&other, &link).unwrap();
    assert!(text(read(&link, &mut seen)).is_some());
}

#[test]
fn path_that_is_no_rule_file_is_unreadable() {
    let directory = tempfile::tempdir().unwrap();
    let long = directory.path().join("long.rb");
    fs::write(&long, "#".repeat(SOURCE_LEN_MAX + 1)).unwrap();
    let fifo = directory.path().join("fifo");
    let made = std::process::Command::new("mkfifo").arg(&fifo).status().unwrap();
    assert!(made.success());
    for path in [directory.path(), &long, &fifo, &directory.path().join("nowhere/a.rb")] {
        assert!(matches!(read(path, &mut None), SourceRead::Unreadable(_)), "{}", path.display());
    }
    fs::write(&long, "#".repeat(SOURCE_LEN_MAX)).unwrap();
    assert!(text(read(&long, &mut None)).is_some());
}
