//! The embedded store: the suite of all stores, and what may happen to a file.
//!
//! Not here: which changes are refused (`store::suite`).

use std::io::Cursor;

use proptest::prelude::*;

use super::*;
use crate::import::{ImportError, import};
use crate::suite::{self, text};

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

/// A closed store with some sites: its bytes and what it holds.
fn closed_store(sites: usize) -> (Vec<u8>, String) {
    let Temporary { store, directory } = temporary();
    import(&store, Cursor::new(lines(sites)), ChangeMode::Merge).unwrap();
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
    suite::run(&temporary, &|temporary| &temporary.store);
}

// === Older formats ===

/// A file as the program that knew only format 1 made it, with the records of the suite. `early`: before there were all tables.
fn format_1(path: &Path, early: bool) {
    let table = |name: &'static str| TableDefinition::<&str, &str>::new(name);
    let database = Builder::new().create(path).unwrap();
    let write = database.begin_write().unwrap();
    {
        let mut meta = write.open_table(TableDefinition::<&str, u64>::new("meta")).unwrap();
        for (key, number) in [("format", 1), ("revision", 1), ("next_uid", 1002)] {
            meta.insert(key, number).unwrap();
        }
        for (name, (key, json)) in [("tenants", suite::OLD_TENANT), ("sites", suite::OLD_SITE)] {
            write.open_table(table(name)).unwrap().insert(key, json).unwrap();
        }
        if !early {
            let (key, json) = suite::OLD_SETTING;
            write.open_table(table("settings")).unwrap().insert(key, json).unwrap();
            write.open_table(table("nodes")).unwrap();
            write.open_table(table("placements")).unwrap();
        }
        let hosts = TableDefinition::<(&str, &str), &str>::new("hosts");
        write.open_table(hosts).unwrap().insert(("one.test", "/"), "one").unwrap();
        write.open_table(TableDefinition::<u32, &str>::new("uids")).unwrap().insert(1001, "a").unwrap();
        let of_tenant = TableDefinition::<(&str, &str), ()>::new("sites_of_tenant");
        write.open_table(of_tenant).unwrap().insert(("a", "one"), ()).unwrap();
    }
    write.commit().unwrap();
}

fn old() -> Temporary {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store.redb");
    format_1(&path, false);
    Temporary { store: RedbStore::open(&path).unwrap(), directory }
}

fn format_of(path: &Path) -> u64 {
    number(&builder().open(path).unwrap(), "format").unwrap()
}

#[test]
fn a_store_of_format_1_passes_the_suite_of_older_stores() {
    suite::run_on_old(&old, &|temporary| &temporary.store);
}

#[test]
fn a_store_becomes_a_newer_one_once() {
    let Temporary { store, directory } = old();
    let path = directory.path().join("store.redb");
    let held = text(&store);
    let next_uid = store.next_uid().unwrap();
    assert_eq!(next_uid, 1002);
    drop(store);
    assert_eq!(format_of(&path), FORMAT);
    let store = RedbStore::open(&path).unwrap();
    assert_eq!((text(&store), store.revision().unwrap(), store.next_uid().unwrap()), (held, 1, next_uid));
}

#[test]
fn a_store_made_before_there_were_some_tables_takes_them() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store.redb");
    format_1(&path, true);
    let store = RedbStore::open(&path).unwrap();
    assert_eq!((store.counts().unwrap().sites, store.reached().unwrap()), (1, ReplicaPosition::default()));
    assert_eq!((store.nodes().unwrap(), store.rules().unwrap()), (vec![], vec![]));
    let setting = Setting { key: "k".into(), value: nagaya_records::SettingValue::Text("v".into()) };
    store.transaction(vec![RecordChange::PutSetting(setting.clone())], ChangeMode::Merge).unwrap();
    drop(store);
    assert_eq!(RedbStore::open(&path).unwrap().setting("k").unwrap(), Some(setting));
}

#[test]
fn an_interrupted_migration_leaves_the_store_as_it_was() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store.redb");
    format_1(&path, false);
    // The second of two steps fails.
    let spoil: migrate::Step = |write| {
        write.open_table(SITES)?.insert("one", "spoilt")?;
        write.delete_table(TENANTS)?;
        Ok(())
    };
    let fail: migrate::Step = |_| Err(redb::Error::Io(io::Error::other("no space")));
    let store = RedbStore { path: path.clone(), database: builder().open(&path).unwrap() };
    store.migrate(1, &[spoil, fail]).unwrap_err();
    // A node that dies just before the end leaves these bytes.
    let write = store.begin_write().unwrap();
    migrate::run(&write, 1, &[spoil]).unwrap();
    let killed = fs::read(&path).unwrap();
    write.abort().unwrap();
    drop(store);
    assert_eq!(format_of(&path), 1);
    let dead = directory.path().join("dead.redb");
    fs::write(&dead, killed).unwrap();
    for path in [path, dead] {
        let store = RedbStore::open(&path).unwrap();
        assert_eq!(store.site("one").unwrap().unwrap().tenant.as_str(), "a");
        assert!(store.tenant("a").unwrap().is_some());
        drop(store);
        assert_eq!(format_of(&path), FORMAT);
    }
}

/// Adds a digit to what the store has of its steps.
fn step<const N: u64>(write: &WriteTransaction) -> Fallible<()> {
    let mut meta = write.open_table(META)?;
    let before = meta.get("steps")?.map_or(0, |value| value.value());
    meta.insert("steps", before * 10 + N)?;
    Ok(())
}

#[test]
fn each_step_from_the_format_that_was_found_is_taken_in_order() {
    let Temporary { store, directory: _kept } = temporary();
    store.migrate(2, &[step::<1>, step::<2>, step::<3>]).unwrap();
    assert_eq!(number(&store.database, "steps").unwrap(), 23);
    assert_eq!(number(&store.database, "format").unwrap(), 4);
}

// === As a replica ===

fn put_node(name: &str) -> RecordChange {
    let json = format!(
        r#"{{"name":"{name}","id":"{name}","peer":"127.0.0.1:1","cpus":2,"memory_bytes":9,"version":"0.1.0"}}"#
    );
    RecordChange::PutNode(serde_json::from_str(&json).unwrap())
}

fn put_placement(site: &str, node: &str, epoch: u64) -> RecordChange {
    let json = format!(r#"{{"site":"{site}","node":"{node}","epoch":{epoch},"since_ms":1,"why":"first"}}"#);
    RecordChange::PutPlacement(serde_json::from_str(&json).unwrap())
}

fn records(sites: usize) -> Vec<RecordChange> {
    let batch = lines(sites);
    batch
        .lines()
        .map(|line| {
            let line: serde_json::Value = serde_json::from_str(line).unwrap();
            match line.get("tenant") {
                Some(tenant) => RecordChange::PutTenant(serde_json::from_value(tenant.clone()).unwrap()),
                None => RecordChange::PutSite(serde_json::from_value(line["site"].clone()).unwrap()),
            }
        })
        .collect()
}

fn replicate(store: &RedbStore, changes: Vec<RecordChange>, revision: u64) -> ReplicateResult {
    store.replicate(changes, ReplicaPosition { revision, count: revision / 10 }, false).unwrap()
}

#[test]
fn a_replica_tells_only_what_differs_and_remembers_where_it_is() {
    let Temporary { store, directory: _kept } = temporary();
    let mut changes = vec![put_placement("s1", "a", 1), put_node("a")];
    changes.extend(records(3));
    let told = replicate(&store, changes.clone(), 70);
    assert_eq!((told.committed.revision, told.committed.changes.len()), (1, 6));
    assert_eq!(told.committed.changes[0], put_node("a"), "a placement comes after its node");
    assert_eq!(store.reached().unwrap(), ReplicaPosition { revision: 70, count: 7 });
    // The same again, dropping what is not there, and one that differs.
    changes.extend([
        RecordChange::DropNode(nagaya_records::NodeName::new("b").unwrap()),
        put_placement("s1", "a", 2),
    ]);
    let told = replicate(&store, changes, 80);
    assert_eq!(told.committed, CommittedChanges { revision: 2, changes: vec![put_placement("s1", "a", 2)] });
    assert_eq!(store.placement("s1").unwrap().unwrap().epoch, 2);
    assert_eq!(store.nodes().unwrap().len(), 1);
    let drops = vec![
        RecordChange::DropPlacement(SiteName::new("s1").unwrap()),
        RecordChange::DropNode(nagaya_records::NodeName::new("a").unwrap()),
    ];
    assert_eq!(replicate(&store, drops.clone(), 90).committed.changes, drops);
    assert_eq!((store.nodes().unwrap(), store.placement("s1").unwrap()), (vec![], None));
}

#[test]
fn an_invalid_record_stays_out_of_a_replica_with_dependents() {
    let Temporary { store, directory: _kept } = temporary();
    let mut changes = records(2);
    let RecordChange::PutTenant(tenant) = &mut changes[0] else { panic!("the tenant is first") };
    tenant.uid = 0;
    changes.push(put_node("a"));
    let told = replicate(&store, changes, 5);
    assert_eq!(told.committed.changes, [put_node("a")]);
    assert_eq!(told.left_out.len(), 3, "{:?}", told.left_out);
    assert!(told.left_out[0].contains("uid"), "{:?}", told.left_out);
    // A tenant that still has sites is not dropped from under them.
    replicate(&store, records(2), 6);
    let told = replicate(&store, vec![RecordChange::DropTenant(TenantName::new("t").unwrap())], 7);
    assert_eq!((told.committed.changes.len(), told.left_out.len()), (0, 1));
}

#[test]
fn a_replicas_snapshot_has_nodes_and_an_export_has_not() {
    let Temporary { store, directory: _kept } = temporary();
    replicate(&store, records(2), 5);
    let exported = text(&store);
    replicate(&store, vec![put_node("a"), put_placement("s1", "a", 4)], 6);
    assert_eq!(text(&store), exported);
    let mut table = nagaya_records::RecordIndex::new();
    crate::snapshot_frames(&store, &mut |mut frame| {
        let Some(nagaya_records::feed::FromSupervisor::Apply(changes)) =
            nagaya_records::feed::read(&mut frame)?
        else {
            panic!("only records")
        };
        changes.into_iter().for_each(|change| table.apply(change).unwrap());
        Ok(())
    })
    .unwrap();
    assert_eq!(table.placement("s1"), store.placement("s1").unwrap());
    assert_eq!(table.node("a").as_deref(), store.node("a").unwrap().as_ref());
    let done = import(&store, exported.as_bytes(), ChangeMode::Replace).unwrap();
    assert!(done.changes.is_empty() && store.node("a").unwrap().is_some(), "{:?}", done.changes);
}

#[test]
fn a_killed_replica_is_as_at_the_last_disk_sync() {
    let Temporary { store, directory } = temporary();
    store.replicate(records(300), ReplicaPosition { revision: 5, count: 1 }, true).unwrap();
    let held = text(&store);
    let reached = store.reached().unwrap();
    for n in 0..50 {
        replicate(&store, vec![put_placement(&format!("s{n}"), "a", 1)], 6 + n);
    }
    let left = fs::read(directory.path().join("store.redb")).unwrap();
    let other = tempfile::tempdir().unwrap();
    let path = other.path().join("store.redb");
    fs::write(&path, left).unwrap();
    let found = RedbStore::open(&path).unwrap();
    assert_eq!((text(&found), found.reached().unwrap()), (held, reached));
    assert_eq!(found.placement("s1").unwrap(), None);
}

#[test]
fn committed_records_are_there_after_reopening() {
    let (bytes, held) = closed_store(300);
    assert_eq!(open_bytes(&bytes).unwrap(), held);
}

#[test]
fn a_process_that_was_killed_loses_nothing_it_committed() {
    let Temporary { store, directory } = temporary();
    import(&store, Cursor::new(lines(300)), ChangeMode::Merge).unwrap();
    let drop_one = RecordChange::DropSite(SiteName::new("s7").unwrap());
    store.transaction(vec![drop_one], ChangeMode::Merge).unwrap();
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
    assert!(matches!(error, StoreError::Version { found: 3, known: 2, .. }), "{error}");
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
    let error = import(&store, Cursor::new(text_of_lines), ChangeMode::Merge).unwrap_err();
    let ImportError::Refused { named, count: 1 } = &error else { panic!("{error}") };
    // Either of the two is the one too many; their lines are known.
    assert!(matches!(named[0].line, Some(70_002 | 70_003)), "{error}");
    assert!(named[0].message.contains("s70001.test"), "{error}");
    assert_eq!((text(&store).as_str(), store.revision().unwrap()), ("", 0));
}
