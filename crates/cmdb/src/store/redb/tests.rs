//! The embedded store: the suite of all stores, and what may happen to a file.
//!
//! Not here: which changes are refused (`store::suite`).

use std::io::Cursor;

use proptest::prelude::*;

use super::*;
use crate::store::import::{ImportError, export, import};
use crate::store::suite;

/// A store and the directory it lives and dies with.
struct Temporary {
    store: RedbStore,
    directory: tempfile::TempDir,
}

fn temporary() -> Temporary {
    let directory = tempfile::tempdir().unwrap();
    let store = RedbStore::open(&directory.path().join("store.redb")).unwrap();
    Temporary { store, directory }
}

fn lines(sites: usize) -> String {
    let mut text = r#"{"tenant":{"name":"t","uid":9,"gid":9,"home":"/srv/t"}}"#.to_owned();
    for n in 0..sites {
        text.push_str(&format!(
            "\n{{\"site\":{{\"name\":\"s{n}\",\"tenant\":\"t\",\"hosts\":[\"s{n}.test\"],\"backend\":{{\"kind\":\"static\",\"root\":\"s{n}\"}}}}}}"
        ));
    }
    text
}

fn text(store: &dyn Store) -> String {
    let mut bytes = Vec::new();
    export(store, &mut bytes).unwrap();
    String::from_utf8(bytes).unwrap()
}

/// A closed store with some sites: its bytes and what it holds.
fn closed_store(sites: usize) -> (Vec<u8>, String) {
    let Temporary { store, directory } = temporary();
    import(&store, Cursor::new(lines(sites)), Mode::Merge).unwrap();
    let held = text(&store);
    drop(store);
    (fs::read(directory.path().join("store.redb")).unwrap(), held)
}

/// Opens these bytes as a store; a refusal must leave every one of them as it was.
fn open_bytes(bytes: &[u8]) -> Result<String, StoreError> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store.redb");
    fs::write(&path, bytes).unwrap();
    let opened = RedbStore::open(&path).map(|store| text(&store));
    if opened.is_err() {
        assert!(fs::read(&path).unwrap() == bytes, "a refused file was written to");
    }
    opened
}

#[test]
fn the_embedded_store_passes_the_suite() {
    suite::run(&temporary);
}

/// So that the suite's stores keep their directories.
impl Store for Temporary {
    fn revision(&self) -> Result<u64, StoreError> {
        self.store.revision()
    }
    fn counts(&self) -> Result<Counts, StoreError> {
        self.store.counts()
    }
    fn tenant(&self, name: &str) -> Result<Option<Tenant>, StoreError> {
        self.store.tenant(name)
    }
    fn site(&self, name: &str) -> Result<Option<Site>, StoreError> {
        self.store.site(name)
    }
    fn tenants(&self, after: Option<&str>, limit: usize) -> Result<Vec<Tenant>, StoreError> {
        self.store.tenants(after, limit)
    }
    fn sites(&self, select: &Select) -> Result<Vec<Site>, StoreError> {
        self.store.sites(select)
    }
    fn setting(&self, key: &str) -> Result<Option<Setting>, StoreError> {
        self.store.setting(key)
    }
    fn settings(&self, after: Option<&str>, limit: usize) -> Result<Vec<Setting>, StoreError> {
        self.store.settings(after, limit)
    }
    fn walk(&self, visit: &mut Visitor<'_>) -> Result<u64, StoreError> {
        self.store.walk(visit)
    }
    fn transaction(&self, changes: Vec<Change>, mode: Mode) -> Result<Committed, TransactionError> {
        self.store.transaction(changes, mode)
    }
    fn allocate_uid(&self, base: u32) -> Result<u32, StoreError> {
        self.store.allocate_uid(base)
    }
}

#[test]
fn a_store_made_before_there_were_settings_takes_them() {
    let (bytes, held) = closed_store(3);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store.redb");
    fs::write(&path, bytes).unwrap();
    let database = builder().open(&path).unwrap();
    let write = database.begin_write().unwrap();
    assert!(write.delete_table(SETTINGS).unwrap(), "this store had them");
    write.commit().unwrap();
    drop(database);
    let store = RedbStore::open(&path).unwrap();
    assert_eq!(text(&store), held);
    let setting = Setting { key: "k".into(), value: crate::SettingValue::Text("v".into()) };
    store.transaction(vec![Change::PutSetting(setting.clone())], Mode::Merge).unwrap();
    drop(store);
    assert_eq!(RedbStore::open(&path).unwrap().setting("k").unwrap(), Some(setting));
}

#[test]
fn what_was_committed_is_there_after_reopening() {
    let (bytes, held) = closed_store(300);
    assert_eq!(open_bytes(&bytes).unwrap(), held);
}

#[test]
fn a_process_that_was_killed_loses_nothing_it_committed() {
    let Temporary { store, directory } = temporary();
    import(&store, Cursor::new(lines(300)), Mode::Merge).unwrap();
    let drop_one = Change::DropSite(SiteName::new("s7").unwrap());
    store.transaction(vec![drop_one], Mode::Merge).unwrap();
    // The file as it stands while the store is open is what a kill leaves.
    let left = fs::read(directory.path().join("store.redb")).unwrap();
    assert_eq!(open_bytes(&left).unwrap(), text(&store));
}

#[test]
fn a_second_process_is_told_that_the_store_is_open() {
    let Temporary { store: _open, directory } = temporary();
    let error = RedbStore::open(&directory.path().join("store.redb")).unwrap_err();
    assert!(matches!(error, StoreError::Locked { .. }), "{error}");
}

#[test]
fn a_newer_format_is_refused_and_left_alone() {
    let Temporary { store, directory } = temporary();
    let write = store.database.begin_write().unwrap();
    write.open_table(META).unwrap().insert("format", FORMAT + 1).unwrap();
    write.commit().unwrap();
    drop(store);
    let error = open_bytes(&fs::read(directory.path().join("store.redb")).unwrap()).unwrap_err();
    assert!(matches!(error, StoreError::Version { found: 2, known: 1, .. }), "{error}");
    assert_eq!(error.code().to_string(), "NGY0204");
}

#[test]
fn a_truncated_file_is_refused_wherever_it_ends() {
    let (bytes, _) = closed_store(2000);
    for tenths in 0..10 {
        for len in [bytes.len() * tenths / 10, bytes.len() * tenths / 10 / 4096 * 4096] {
            let error = open_bytes(&bytes[..len]).expect_err("it is not whole");
            assert!(matches!(error, StoreError::Damaged { .. }), "{len}: {error}");
        }
    }
}

#[test]
fn a_file_of_something_else_is_refused() {
    for bytes in [&b"# not a store\n"[..], &[0; 8192], &[0xff; 100_000]] {
        let error = open_bytes(bytes).unwrap_err();
        assert!(matches!(error, StoreError::Damaged { .. }), "{error}");
    }
}

#[test]
fn an_unreadable_place_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file").join("store.redb");
    fs::write(directory.path().join("file"), "").unwrap();
    let error = RedbStore::open(&path).unwrap_err();
    assert!(matches!(error, StoreError::Io { .. }), "{error}");
    assert!(error.to_string().contains("file"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn a_flipped_bit_is_refused_or_harmless(places in proptest::collection::vec(any::<(u32, u8)>(), 1..4)) {
        let (mut bytes, held) = closed_store(300);
        for (at, bit) in places {
            let at = at as usize % bytes.len();
            bytes[at] ^= 1 << (bit % 8);
        }
        match open_bytes(&bytes) {
            // It hit a page nobody uses, or a spare copy of the header.
            Ok(found) => prop_assert_eq!(found, held),
            Err(error) => prop_assert_ne!(error.code().0, 202, "{}", error),
        }
    }
}

#[test]
fn one_bad_line_in_a_hundred_thousand_changes_nothing() {
    let Temporary { store, directory: _kept } = temporary();
    let mut text_of_lines = lines(100_000);
    let at = text_of_lines.find("\"s70000.test\"").unwrap();
    text_of_lines.replace_range(at..at + 13, "\"s70001.test\"");
    let error = import(&store, Cursor::new(text_of_lines), Mode::Merge).unwrap_err();
    let ImportError::Refused { named, count: 1 } = &error else { panic!("{error}") };
    // Either of the two is the one too many; their lines are known.
    assert!(matches!(named[0].line, Some(70_002 | 70_003)), "{error}");
    assert!(named[0].message.contains("s70001.test"), "{error}");
    assert_eq!((text(&store).as_str(), store.revision().unwrap()), ("", 0));
}
