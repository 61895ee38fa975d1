//! The test suite for every store, whatever its medium: one function, run on each implementation.
//!
//! Not here: cases of only one store, such as a damaged file (`redb::tests`).

use std::io::Cursor;

use super::import::{BAD_LINES_NAMED_MAX, ImportError, export, import};
use super::*;
use nagaya_records::feed::{self, FromSupervisor};
use nagaya_records::names::{RuleName, SiteName, TenantName};
use nagaya_records::record::{RecordChange, RuleRecord, Setting, Site, Tenant, TicketKeys};
use nagaya_records::table::RecordIndex;

/// Runs the suite. `fresh` gives an empty store each time, with its directory.
pub fn run<T>(fresh: &dyn Fn() -> T, store: &dyn Fn(&T) -> &dyn Store) {
    for case in [
        records_come_back_as_they_were,
        a_revision_counts_what_changed,
        references_must_hold,
        all_mistakes_of_a_list_are_told,
        two_sites_swap_hosts_and_two_tenants_swap_uids,
        a_tenant_goes_only_with_its_sites,
        a_home_in_use_stays,
        pages_show_each_record_once,
        a_uid_is_allocated_once,
        a_uid_that_a_tenant_gave_up_is_allocated_to_nobody,
        an_export_carries_which_uids_were_given_out,
        an_export_imports_as_it_was,
        a_replacing_import_is_the_whole_truth,
        a_bad_line_leaves_everything_as_it_was,
        the_first_bad_lines_are_named_and_the_rest_counted,
        a_snapshot_fills_a_table,
        limits_are_part_of_their_records,
        settings_are_records_too,
        settings_come_in_pages_and_lines,
        a_replacing_import_without_settings_drops_them,
        rules_are_records_too,
        rules_are_bounded,
        rules_come_in_lines,
        nodes_and_placements_are_not_for_transactions,
        keys_of_tickets_are_one_record_that_is_compared_and_set,
        a_long_transaction_leads_where_a_short_one_does,
    ] {
        case(store(&fresh()));
    }
}

/// Records in format 1, each with its name. `old` of [`run_on_old`] puts them into a store.
pub const OLD_TENANT: (&str, &str) = ("a", r#"{"name":"a","uid":1001,"gid":1001,"home":"/srv/a"}"#);
pub const OLD_SITE: (&str, &str) =
    ("one", r#"{"name":"one","tenant":"a","hosts":["one.test"],"backend":{"kind":"static","root":"one"}}"#);
pub const OLD_SETTING: (&str, &str) = ("k", r#"{"key":"k","value":"v"}"#);

/// Runs the suite on old stores. `old` gives a store in format 1 with the records above as its
/// first change, opened by this program.
pub fn run_on_old<T>(old: &dyn Fn() -> T, store: &dyn Fn(&T) -> &dyn Store) {
    for case in [an_old_store_has_what_it_had, an_old_store_takes_what_is_new] {
        case(store(&old()));
    }
}

fn an_old_store_has_what_it_had(store: &dyn Store) {
    let tenant_json = OLD_TENANT.1;
    let site_json = OLD_SITE.1;
    let setting_json = OLD_SETTING.1;
    let lines =
        format!("{{\"tenant\":{tenant_json}}}\n{{\"site\":{site_json}}}\n{{\"setting\":{setting_json}}}\n");
    assert_eq!((text(store), store.revision().unwrap()), (lines, 1));
    assert_eq!(store.tenant("a").unwrap(), Some(tenant("a", 1001)));
    // The indexes hold as well.
    assert_eq!(refused(store, vec![put_site("x", "a", "one.test")]), ["site 'x' hosts"]);
    assert_eq!(refused(store, vec![put_tenant("c", 1001)]), ["tenant 'c' uid"]);
    assert_eq!(refused(store, vec![drop_tenant("a")]), ["tenant 'a' name"]);
}

fn an_old_store_takes_what_is_new(store: &dyn Store) {
    assert_eq!(store.rules().unwrap(), []);
    let done = commit(store, vec![rule("r", "1"), put_site("two", "a", "two.test")]);
    assert_eq!(done.revision, 2);
    assert_eq!(store.rule("r").unwrap().map(RecordChange::PutRule), Some(rule("r", "1")));
    assert_eq!(store.counts().unwrap(), RecordCounts { tenants: 1, sites: 2, settings: 1 });
}

fn tenant(name: &str, uid: u32) -> Tenant {
    serde_json::from_str(&format!(r#"{{"name":"{name}","uid":{uid},"gid":{uid},"home":"/srv/{name}"}}"#))
        .unwrap()
}

fn site(name: &str, tenant: &str, host: &str, path: &str) -> Site {
    let backend = format!(r#"{{"kind":"static","root":"{name}"}}"#);
    serde_json::from_str(&format!(
        r#"{{"name":"{name}","tenant":"{tenant}","hosts":["{host}"],"path":"{path}","backend":{backend}}}"#
    ))
    .unwrap()
}

fn put_tenant(name: &str, uid: u32) -> RecordChange {
    RecordChange::PutTenant(Box::new(tenant(name, uid)))
}

fn put_site(name: &str, tenant: &str, host: &str) -> RecordChange {
    RecordChange::PutSite(Box::new(site(name, tenant, host, "/")))
}

fn drop_tenant(name: &str) -> RecordChange {
    RecordChange::DropTenant(TenantName::new(name).unwrap())
}

fn drop_site(name: &str) -> RecordChange {
    RecordChange::DropSite(SiteName::new(name).unwrap())
}

fn commit(store: &dyn Store, changes: Vec<RecordChange>) -> CommittedChanges {
    store.transaction(changes, ChangeMode::Merge).unwrap()
}

/// Returns the mistakes of a refused list as `record field`, after a check that nothing changed.
fn refused(store: &dyn Store, changes: Vec<RecordChange>) -> Vec<String> {
    let before = text(store);
    let Err(TransactionError::Refused(mistakes)) = store.transaction(changes, ChangeMode::Merge) else {
        panic!("it should be refused");
    };
    assert_eq!(text(store), before);
    mistakes.iter().map(|mistake| format!("{} {}", mistake.record, mistake.field)).collect()
}

fn exported(store: &dyn Store) -> String {
    let mut bytes = Vec::new();
    export(store, &mut bytes).unwrap();
    String::from_utf8(bytes).unwrap()
}

/// Returns the exported records, without the line of allocated uids.
pub fn text(store: &dyn Store) -> String {
    let is_record = |line: &&str| !line.starts_with("{\"uids\"");
    exported(store).lines().filter(is_record).map(|line| format!("{line}\n")).collect()
}

fn two_tenants(store: &dyn Store) {
    commit(
        store,
        vec![
            put_tenant("a", 1001),
            put_tenant("b", 1002),
            put_site("one", "a", "one.test"),
            put_site("two", "b", "two.test"),
        ],
    );
}

fn records_come_back_as_they_were(store: &dyn Store) {
    two_tenants(store);
    assert_eq!(store.tenant("a").unwrap(), Some(tenant("a", 1001)));
    assert_eq!(store.site("two").unwrap(), Some(site("two", "b", "two.test", "/")));
    assert_eq!((store.tenant("c").unwrap(), store.site("a").unwrap()), (None, None));
    assert_eq!(store.counts().unwrap(), RecordCounts { tenants: 2, sites: 2, settings: 0 });
    let changed = Site { max_concurrent: Some(3), ..site("two", "a", "new.test", "/x") };
    commit(store, vec![RecordChange::PutSite(Box::new(changed.clone())), drop_site("one")]);
    assert_eq!((store.site("two").unwrap(), store.site("one").unwrap()), (Some(changed), None));
    // Their hosts are free again.
    commit(store, vec![put_site("three", "b", "two.test"), put_site("four", "b", "one.test")]);
}

fn a_revision_counts_what_changed(store: &dyn Store) {
    assert_eq!(store.revision().unwrap(), 0);
    let first = commit(store, vec![put_site("s", "a", "s.test"), put_tenant("a", 7)]);
    assert_eq!(first.changes, [put_tenant("a", 7), put_site("s", "a", "s.test")]);
    assert_eq!(first.revision, 1);
    let same = commit(store, vec![put_tenant("a", 7), put_site("s", "a", "s.test")]);
    assert_eq!(same, CommittedChanges { revision: 1, changes: vec![] });
    let gone = commit(store, vec![drop_tenant("a"), drop_site("s")]);
    assert_eq!(gone, CommittedChanges { revision: 2, changes: vec![drop_site("s"), drop_tenant("a")] });
    assert_eq!(store.revision().unwrap(), 2);
}

fn references_must_hold(store: &dyn Store) {
    two_tenants(store);
    assert_eq!(refused(store, vec![put_site("x", "c", "x.test")]), ["site 'x' tenant"]);
    assert_eq!(refused(store, vec![put_site("x", "b", "one.test")]), ["site 'x' hosts"]);
    assert_eq!(
        refused(store, vec![put_site("x", "a", "n.test"), put_site("y", "b", "n.test")]),
        ["site 'y' hosts"]
    );
    assert_eq!(refused(store, vec![put_tenant("c", 1001)]), ["tenant 'c' uid"]);
    assert_eq!(refused(store, vec![put_tenant("c", 5), put_tenant("d", 5)]), ["tenant 'd' uid"]);
    assert_eq!(refused(store, vec![drop_site("x"), drop_tenant("c")]), ["site 'x' name", "tenant 'c' name"]);
    commit(store, vec![RecordChange::PutSite(Box::new(site("x", "b", "one.test", "/blog")))]);
    let Err(TransactionError::Refused(mistakes)) = store.transaction(
        vec![RecordChange::PutSite(Box::new(site("y", "b", "one.test", "/blog")))],
        ChangeMode::Merge,
    ) else {
        panic!("x has it");
    };
    assert_eq!(mistakes[0].value, "one.test/blog");
    assert!(mistakes[0].hint.contains("site 'x'"), "{}", mistakes[0]);
}

fn all_mistakes_of_a_list_are_told(store: &dyn Store) {
    two_tenants(store);
    let mut bad = site("bad", "nobody", "one.test", "blog");
    bad.max_concurrent = Some(0);
    let mut long = site("long", "a", "long.test", "/");
    let env = (0..200).map(|n| (format!("V{n}"), "x".repeat(400))).collect();
    long.backend = nagaya_records::record::Backend::Cgi(nagaya_records::record::FileRoot {
        root: "r".into(),
        env,
        ..Default::default()
    });
    let changes =
        vec![RecordChange::PutSite(Box::new(bad)), put_tenant("z", 0), RecordChange::PutSite(Box::new(long))];
    assert_eq!(
        refused(store, changes),
        [
            "site 'bad' path",
            "site 'bad' max_concurrent",
            "site 'bad' tenant",
            "tenant 'z' uid",
            "tenant 'z' gid",
            "site 'long' record",
        ]
    );
}

fn two_sites_swap_hosts_and_two_tenants_swap_uids(store: &dyn Store) {
    two_tenants(store);
    let changes = vec![
        put_site("one", "a", "two.test"),
        put_site("two", "b", "one.test"),
        put_tenant("a", 1002),
        put_tenant("b", 1001),
    ];
    commit(store, changes);
    // The indexes followed: each is refused to the other again, and a third sees the new owner.
    assert_eq!(refused(store, vec![put_site("one", "a", "one.test")]), ["site 'one' hosts"]);
    assert_eq!(refused(store, vec![put_tenant("b", 1002)]), ["tenant 'b' uid"]);
    let at = SiteFilter { host: Some("ONE.test".into()), ..SiteFilter::default() };
    assert_eq!(store.sites(&at).unwrap(), [site("two", "b", "one.test", "/")]);
}

fn a_tenant_goes_only_with_its_sites(store: &dyn Store) {
    two_tenants(store);
    assert_eq!(refused(store, vec![drop_tenant("a")]), ["tenant 'a' name"]);
    assert_eq!(
        refused(store, vec![drop_tenant("a"), put_site("new", "a", "new.test"), drop_site("one")]),
        ["site 'new' tenant"]
    );
    commit(store, vec![drop_tenant("a"), put_site("one", "b", "one.test")]);
    assert_eq!(store.counts().unwrap(), RecordCounts { tenants: 1, sites: 2, settings: 0 });
}

fn a_home_in_use_stays(store: &dyn Store) {
    two_tenants(store);
    let homeless = Tenant { home: None, ..tenant("a", 1001) };
    assert_eq!(
        refused(store, vec![RecordChange::PutTenant(Box::new(homeless.clone()))]),
        ["tenant 'a' home"]
    );
    assert_eq!(
        refused(
            store,
            vec![RecordChange::PutTenant(Box::new(homeless.clone())), put_site("one", "a", "x.test")]
        ),
        ["site 'one' root"]
    );
    commit(store, vec![RecordChange::PutTenant(Box::new(homeless)), drop_site("one")]);
}

fn pages_show_each_record_once(store: &dyn Store) {
    let mut changes = vec![put_tenant("a", 1), put_tenant("b", 2)];
    for n in 0..25 {
        changes.push(put_site(&format!("s{n:02}"), if n % 2 == 0 { "a" } else { "b" }, &format!("{n}.test")));
    }
    commit(store, changes);
    for (tenant, expected) in [(None, 25), (Some("a"), 13), (Some("b"), 12), (Some("c"), 0)] {
        let mut select = SiteFilter { tenant: tenant.map(Into::into), limit: 7, ..SiteFilter::default() };
        let mut names: Vec<String> = Vec::new();
        loop {
            let page = store.sites(&select).unwrap();
            assert!(page.len() <= 7);
            names.extend(page.iter().map(|site| site.name.to_string()));
            let Some(last) = page.last() else { break };
            select.after = Some(last.name.to_string());
        }
        assert_eq!(names.len(), expected);
        assert!(names.is_sorted_by(|a, b| a < b), "{names:?}");
    }
    let tenants = store.tenants(Some("a"), 0).unwrap();
    assert_eq!(tenants, [tenant("b", 2)]);
}

fn a_uid_is_allocated_once(store: &dyn Store) {
    commit(store, vec![put_tenant("a", 5001)]);
    assert_eq!(store.allocate_uid(5000).unwrap(), 5000);
    assert_eq!(store.allocate_uid(5000).unwrap(), 5002);
    assert_eq!(store.allocate_uid(100).unwrap(), 5003);
    assert!(store.allocate_uid(0).unwrap() > 0);
    assert!(matches!(store.allocate_uid(u32::MAX), Err(StoreError::NoUid { .. })));
}

fn a_uid_that_a_tenant_gave_up_is_allocated_to_nobody(store: &dyn Store) {
    // Chosen by the operator, above all that were allocated.
    commit(store, vec![put_tenant("a", 5010), put_tenant("b", 5020)]);
    assert_eq!(store.allocate_uid(5000).unwrap(), 5000);
    commit(store, vec![drop_tenant("a")]);
    assert_eq!(store.allocate_uid(5000).unwrap(), 5011);
    // A tenant that changes its uid leaves files behind, too.
    commit(store, vec![put_tenant("b", 4000)]);
    assert_eq!(store.allocate_uid(5000).unwrap(), 5021);
    store.raise_next_uid(5010).unwrap();
    assert_eq!(store.next_uid().unwrap(), 5022, "it never falls");
    // There must be some left after it.
    commit(store, vec![put_tenant("c", UID_KEPT_MAX + 1)]);
    commit(store, vec![drop_tenant("c")]);
    assert_eq!(store.next_uid().unwrap(), 5022);
}

fn an_export_carries_which_uids_were_given_out(store: &dyn Store) {
    commit(store, vec![put_tenant("a", 5001)]);
    commit(store, vec![drop_tenant("a")]);
    assert_eq!(exported(store), "{\"uids\":{\"next\":5002}}\n");
    let import = |text: &str| import(store, Cursor::new(text.to_owned()), ChangeMode::Merge);
    import("{\"uids\":{\"next\":6000}}\n").unwrap();
    assert_eq!(store.allocate_uid(5000).unwrap(), 6000);
    import("{\"uids\":{\"next\":5002}}\n").unwrap();
    assert_eq!(store.allocate_uid(5000).unwrap(), 6001, "an older export takes nothing back");
    let refused = import("{\"uids\":{\"next\":4294967295}}\n").unwrap_err();
    assert!(refused.to_string().contains("line 1: uids: next: '4294967295' is too large"), "{refused}");
    assert_eq!(store.next_uid().unwrap(), 6002);
}

fn an_export_imports_as_it_was(store: &dyn Store) {
    two_tenants(store);
    let exported = text(store);
    let lines: Vec<&str> = exported.lines().collect();
    assert!(lines[0].starts_with(r#"{"tenant":{"name":"a""#) && lines[3].starts_with(r#"{"site":"#));
    commit(store, vec![drop_site("one"), drop_site("two"), drop_tenant("a"), drop_tenant("b")]);
    assert_eq!(text(store), "");
    // Sites may come before their tenants, between blank lines.
    let backwards: Vec<&str> = lines.iter().rev().copied().collect();
    let done = import(store, Cursor::new(backwards.join("\n\n")), ChangeMode::Merge).unwrap();
    assert_eq!(done.changes.len(), 4);
    assert_eq!(text(store), exported);
}

fn a_replacing_import_is_the_whole_truth(store: &dyn Store) {
    two_tenants(store);
    let lines = r#"{"tenant":{"name":"b","uid":1002,"gid":1002,"home":"/srv/b"}}
        {"site":{"name":"new","tenant":"b","hosts":["one.test"],"backend":{"kind":"static","root":"w"}}}"#;
    let done = import(store, lines.as_bytes(), ChangeMode::Replace).unwrap();
    let one = TenantName::new("a").unwrap();
    assert_eq!(done.changes.last(), Some(&RecordChange::DropTenant(one)));
    assert_eq!(done.changes.len(), 4, "{:?}", done.changes);
    assert_eq!(store.counts().unwrap(), RecordCounts { tenants: 1, sites: 1, settings: 0 });
    let orphan = r#"{"site":{"name":"x","tenant":"b","hosts":["x"],"backend":{"kind":"static","root":"w"}}}"#;
    let error = import(store, orphan.as_bytes(), ChangeMode::Replace).unwrap_err();
    assert!(error.to_string().contains("line 1: site 'x': tenant: 'b' does not exist"), "{error}");
}

fn many_lines(count: usize) -> Vec<String> {
    let mut lines = vec![r#"{"tenant":{"name":"t","uid":9,"gid":9,"home":"/srv/t"}}"#.to_owned()];
    lines.extend((0..count).map(|n| {
        format!(
            r#"{{"site":{{"name":"s{n}","tenant":"t","hosts":["s{n}.test"],"backend":{{"kind":"static","root":"s{n}"}}}}}}"#
        )
    }));
    lines
}

fn a_bad_line_leaves_everything_as_it_was(store: &dyn Store) {
    two_tenants(store);
    let before = text(store);
    for bad in [
        r#"{"site":{"name":"x"}}"#.to_owned(),
        "{".into(),
        "\u{0}".into(),
        format!(r#"{{"site":"{}"}}"#, "x".repeat(import::LINE_LEN_MAX)),
        many_lines(6)[6].replace("s5.test", "one.test"),
        many_lines(6)[6].replace("\"t\"", "\"nobody\""),
        many_lines(6)[6].clone(),
        r#"{"tenant":{"name":"u","gid":3}}"#.into(),
    ] {
        let mut lines = many_lines(2000);
        lines[999] = bad;
        let error = import(store, Cursor::new(lines.join("\n")), ChangeMode::Merge).unwrap_err();
        let ImportError::Refused { named, count: 1 } = &error else { panic!("{error}") };
        assert_eq!(named[0].line, Some(1000), "{error}");
        assert_eq!(text(store), before);
    }
    assert_eq!(store.revision().unwrap(), 1);
}

fn the_first_bad_lines_are_named_and_the_rest_counted(store: &dyn Store) {
    let mut lines = many_lines(100);
    for line in lines.iter_mut().skip(1).step_by(2) {
        *line = line.replace("\"root\":\"", "\"root\":\"../");
    }
    let error = import(store, Cursor::new(lines.join("\n")), ChangeMode::Merge).unwrap_err();
    let ImportError::Refused { named, count } = &error else { panic!("{error}") };
    assert_eq!((named.len(), *count), (BAD_LINES_NAMED_MAX, 50));
    assert_eq!((named[0].line, named[1].line), (Some(2), Some(4)));
    assert!(error.to_string().ends_with("and 30 more"), "{error}");
}

fn a_snapshot_fills_a_table(store: &dyn Store) {
    let lines = many_lines(nagaya_records::feed::BATCH_MAX + 100);
    import(store, Cursor::new(lines.join("\n")), ChangeMode::Merge).unwrap();
    let mut wire = Vec::new();
    let mut frames = 0;
    let revision = snapshot_frames(store, &mut |frame| {
        frames += 1;
        wire.extend_from_slice(frame);
        Ok(())
    })
    .unwrap();
    assert_eq!((revision, frames), (store.revision().unwrap(), 2));
    let mut table = RecordIndex::new();
    let mut wire = wire.as_slice();
    while let Some(frame) = feed::read::<FromSupervisor>(&mut wire).unwrap() {
        let FromSupervisor::Apply(changes) = frame else { panic!("{frame:?}") };
        changes.into_iter().for_each(|change| table.apply(change).unwrap());
    }
    assert_eq!(table.site_count(), lines.len() - 1);
    assert_eq!(table.site("s7").as_deref(), store.site("s7").unwrap().as_ref());
}

fn limits_are_part_of_their_records(store: &dyn Store) {
    let limits = serde_json::from_str(r#"{"cpu":"50%","devices":{"8:0":{"read":"30M"}}}"#).unwrap();
    let limited = Tenant { limits, ..tenant("a", 1001) };
    commit(store, vec![RecordChange::PutTenant(Box::new(limited.clone()))]);
    assert_eq!(store.tenant("a").unwrap(), Some(limited.clone()));
    let exported = text(store);
    import(store, exported.as_bytes(), ChangeMode::Replace).unwrap();
    assert_eq!((text(store), store.revision().unwrap()), (exported, 1));
    let mut bad = limited;
    bad.limits.cpu_shares = Some(1);
    bad.limits.cpu = Some(nagaya_records::record::WrittenAmount::new("half"));
    assert_eq!(
        refused(store, vec![RecordChange::PutTenant(Box::new(bad))]),
        ["tenant 'a' limits.cpu", "tenant 'a' limits.cpu_shares"]
    );
}

fn setting(key: &str, value: &str) -> RecordChange {
    RecordChange::PutSetting(Setting {
        key: key.into(),
        value: nagaya_records::SettingValue::Text(value.into()),
    })
}

fn drop_setting(key: &str) -> RecordChange {
    RecordChange::DropSetting(key.into())
}

fn settings_are_records_too(store: &dyn Store) {
    let first = commit(store, vec![setting("b", "2"), setting("a", "1"), put_tenant("t", 9)]);
    assert_eq!(first.changes, [put_tenant("t", 9), setting("a", "1"), setting("b", "2")]);
    assert_eq!(store.counts().unwrap(), RecordCounts { tenants: 1, sites: 0, settings: 2 });
    assert_eq!(store.setting("a").unwrap().map(RecordChange::PutSetting), Some(setting("a", "1")));
    assert_eq!(store.setting("c").unwrap(), None);
    let same = commit(store, vec![setting("a", "1")]);
    assert_eq!(same, CommittedChanges { revision: 1, changes: vec![] });
    let next = commit(store, vec![setting("a", "x"), drop_setting("b")]);
    assert_eq!(next.changes, [setting("a", "x"), drop_setting("b")]);
    assert_eq!(refused(store, vec![drop_setting("b")]), ["setting 'b' key"]);
    let long = "x".repeat(nagaya_records::record::VALUE_LEN_MAX + 1);
    assert_eq!(
        refused(store, vec![setting("", "v"), setting("a\nb", "v"), setting("c", &long)]),
        ["setting '' key", "setting 'a\\nb' key", "setting 'c' value"]
    );
}

fn settings_come_in_pages_and_lines(store: &dyn Store) {
    let keys: Vec<String> = (0..25).map(|n| format!("key {n:02} \"ü\"")).collect();
    commit(store, keys.iter().map(|key| setting(key, "v")).collect());
    let mut seen: Vec<String> = Vec::new();
    loop {
        let page = store.settings(seen.last().map(String::as_str), 7).unwrap();
        assert!(page.len() <= 7);
        if page.is_empty() {
            break;
        }
        seen.extend(page.iter().map(|setting| setting.key.to_string()));
    }
    assert_eq!(seen, keys);
    let exported = text(store);
    assert!(exported.starts_with(r#"{"setting":{"key":"key 00 \"ü\"","value":"v"}}"#), "{exported}");
    commit(store, keys.iter().map(|key| drop_setting(key)).collect());
    assert_eq!(text(store), "");
    import(store, exported.as_bytes(), ChangeMode::Merge).unwrap();
    assert_eq!(text(store), exported);
    let mut table = RecordIndex::new();
    snapshot_frames(store, &mut |frame| {
        let FromSupervisor::Apply(changes) = feed::read(&mut &*frame)?.unwrap() else {
            panic!("only records")
        };
        changes.into_iter().for_each(|change| table.apply(change).unwrap());
        Ok(())
    })
    .unwrap();
    assert_eq!(table.setting_count(), 25);
    let twice = format!("{exported}{exported}");
    let error = import(store, twice.as_bytes(), ChangeMode::Merge).unwrap_err();
    assert!(error.to_string().contains("already stands in line 1"), "{error}");
}

fn a_replacing_import_without_settings_drops_them(store: &dyn Store) {
    commit(store, vec![setting("a", "1"), setting("b", "2"), put_tenant("t", 9)]);
    let lines = r#"{"setting":{"key":"b","value":{"cpu":50,"on":true}}}"#;
    let done = import(store, lines.as_bytes(), ChangeMode::Replace).unwrap();
    assert_eq!(done.changes.len(), 3, "{:?}", done.changes);
    assert_eq!(text(store), format!("{lines}\n"));
}

fn rule(name: &str, text: &str) -> RecordChange {
    RecordChange::PutRule(RuleRecord { name: RuleName::new(name).unwrap(), text: text.into() })
}

fn drop_rule(name: &str) -> RecordChange {
    RecordChange::DropRule(RuleName::new(name).unwrap())
}

fn rules_are_records_too(store: &dyn Store) {
    let first = commit(store, vec![rule("b", "2\n"), rule("a", "1 \"\u{fc}\"\n"), setting("k", "v")]);
    assert_eq!(first.changes, [setting("k", "v"), rule("a", "1 \"\u{fc}\"\n"), rule("b", "2\n")]);
    assert_eq!(store.rule("b").unwrap().map(RecordChange::PutRule), Some(rule("b", "2\n")));
    assert_eq!(store.rule("c").unwrap(), None);
    let all: Vec<RecordChange> = store.rules().unwrap().into_iter().map(RecordChange::PutRule).collect();
    assert_eq!(all, first.changes[1..]);
    assert_eq!(commit(store, vec![rule("b", "2\n")]).changes, []);
    let next = commit(store, vec![rule("a", ""), drop_rule("b")]);
    assert_eq!(next.changes, [rule("a", ""), drop_rule("b")]);
    assert_eq!(refused(store, vec![drop_rule("b")]), ["rule 'b' name"]);
}

fn rules_are_bounded(store: &dyn Store) {
    let longest = "x".repeat(nagaya_records::record::RULE_TEXT_LEN_MAX);
    commit(store, vec![rule("longest", &longest)]);
    assert_eq!(refused(store, vec![rule("a", &format!("{longest}x"))]), ["rule 'a' text"]);
    // Its JSON is twice as long.
    assert_eq!(refused(store, vec![rule("a", &longest.replace('x', "\n"))]), ["rule 'a' record"]);
    let most = usize::try_from(nagaya_records::record::RULES_MAX).unwrap();
    commit(store, (1..most).map(|n| rule(&format!("r{n}"), "")).collect());
    assert_eq!(refused(store, vec![rule("more", "")]), ["rule 'more' name"]);
    commit(store, vec![rule("more", ""), drop_rule("r1")]);
    assert_eq!(store.rules().unwrap().len(), most);
}

fn rules_come_in_lines(store: &dyn Store) {
    commit(store, vec![rule("a", "1\n2\n"), rule("b", ""), setting("k", "v")]);
    let exported = text(store);
    assert!(exported.ends_with("{\"rule\":{\"name\":\"b\",\"text\":\"\"}}\n"), "{exported}");
    let without: String =
        exported.lines().filter(|line| !line.contains("\"b\"")).collect::<Vec<_>>().join("\n");
    let done = import(store, without.as_bytes(), ChangeMode::Replace).unwrap();
    assert_eq!(done.changes, [drop_rule("b")]);
    import(store, exported.as_bytes(), ChangeMode::Merge).unwrap();
    assert_eq!(text(store), exported);
    // The compiler of rules checks each and gets its line.
    let checks = import::RecordChecks {
        tenant: &|_, _| {},
        rule: &|rule| (rule.name.as_str() == "b").then(|| "store:b:7: no".to_owned()),
    };
    let ImportError::Refused { named, count: 1 } =
        import::read_batch(exported.as_bytes(), &checks).unwrap_err()
    else {
        panic!("one is refused");
    };
    assert_eq!((named[0].line, named[0].message.as_str()), (Some(3), "store:b:7: no"));
    // Processes have rules as files, and so get none.
    snapshot_frames(store, &mut |frame| {
        let FromSupervisor::Apply(changes) = feed::read(&mut &*frame)?.unwrap() else {
            panic!("only records")
        };
        assert_eq!(changes, [setting("k", "v")]);
        Ok(())
    })
    .unwrap();
}

fn nodes_and_placements_are_not_for_transactions(store: &dyn Store) {
    two_tenants(store);
    let placement = r#"{"site":"one","node":"n","epoch":1,"since_ms":1,"why":"first"}"#;
    let placement = RecordChange::PutPlacement(serde_json::from_str(placement).unwrap());
    let node = r#"{"name":"n","id":"0","peer":"127.0.0.1:1","cpus":1,"memory_bytes":1,"version":"0"}"#;
    let node = RecordChange::PutNode(serde_json::from_str(node).unwrap());
    let drops = [
        RecordChange::DropNode(nagaya_records::NodeName::new("n").unwrap()),
        RecordChange::DropPlacement(SiteName::new("one").unwrap()),
    ];
    for change in [placement, node].into_iter().chain(drops) {
        assert_eq!(refused(store, vec![change]), ["a node or placement kind"]);
    }
    assert_eq!((store.nodes().unwrap(), store.node("n").unwrap()), (vec![], None));
    assert_eq!((store.placements(None, 0).unwrap(), store.placement("one").unwrap()), (vec![], None));
}

fn ticket_keys(ids: &[u32]) -> TicketKeys {
    let key = |id: &u32| {
        let secret = nagaya_records::record::TicketSecret([u8::try_from(*id).unwrap(); 32]);
        nagaya_records::record::TicketKey { id: *id, secret, made_ms: 1, ended_ms: None }
    };
    TicketKeys { signs: ids[0], keys: ids.iter().map(key).collect() }
}

fn keys_of_tickets_are_one_record_that_is_compared_and_set(store: &dyn Store) {
    two_tenants(store);
    let first = ticket_keys(&[7]);
    let second = ticket_keys(&[7, 8]);
    for change in [RecordChange::PutTicketKeys(first.clone()), RecordChange::DropTicketKeys] {
        assert_eq!(refused(store, vec![change]), ["a node or placement kind"]);
    }
    let exported = text(store);
    assert_eq!(store.ticket_keys().unwrap(), None);
    assert_eq!(store.put_ticket_keys(second.clone(), Some(&first)).unwrap(), None, "none stand there");
    let done = store.put_ticket_keys(first.clone(), None).unwrap().unwrap();
    assert_eq!(
        done,
        CommittedChanges { revision: 2, changes: vec![RecordChange::PutTicketKeys(first.clone())] }
    );
    assert_eq!(store.put_ticket_keys(second.clone(), None).unwrap(), None, "others stand there");
    assert_eq!(store.ticket_keys().unwrap(), Some(first.clone()));
    let again = store.put_ticket_keys(first.clone(), Some(&first)).unwrap().unwrap();
    assert_eq!(again, CommittedChanges { revision: 2, changes: vec![] });
    store.put_ticket_keys(second.clone(), Some(&first)).unwrap().unwrap();
    assert_eq!(store.put_ticket_keys(second.clone(), Some(&first)).unwrap(), None);
    // No export shows them, no import deletes them, and a follower of the store knows them.
    assert_eq!(text(store), exported);
    import(store, exported.as_bytes(), ChangeMode::Replace).unwrap();
    assert_eq!(store.ticket_keys().unwrap(), Some(second.clone()));
    let mut table = RecordIndex::new();
    snapshot_frames(store, &mut |frame| {
        let FromSupervisor::Apply(changes) = feed::read(&mut &*frame)?.unwrap() else {
            panic!("only records")
        };
        changes.into_iter().for_each(|change| table.apply(change).unwrap());
        Ok(())
    })
    .unwrap();
    assert_eq!(table.ticket_keys(), Some(&second));
}

/// Three hundred sites in a ring each take the host of the next. Meanwhile their tenant goes and
/// another takes its uid.
fn a_long_transaction_leads_where_a_short_one_does(store: &dyn Store) {
    const SITES: usize = 300;
    let ring = |tenant: &str, turn: usize| -> Vec<RecordChange> {
        (0..SITES)
            .map(|n| put_site(&format!("s{n}"), tenant, &format!("h{}.test", (n + turn) % SITES)))
            .collect()
    };
    let mut changes = ring("old", 0);
    changes.push(put_tenant("old", 9));
    changes.extend((0..SITES).map(|n| setting(&format!("k{n}"), "v")));
    assert_eq!(commit(store, changes).changes.len(), 2 * SITES + 1);
    let mut changes = vec![put_tenant("new", 9), drop_tenant("old")];
    changes.extend(ring("new", 1));
    changes.extend((0..SITES).map(|n| drop_setting(&format!("k{n}"))));
    assert_eq!(commit(store, changes).changes.len(), 2 * SITES + 2);
    assert_eq!(store.counts().unwrap(), RecordCounts { tenants: 1, sites: SITES as u64, settings: 0 });
    assert_eq!(store.site("s7").unwrap(), Some(site("s7", "new", "h8.test", "/")));
    assert_eq!(refused(store, vec![put_site("other", "new", "h0.test")]), ["site 'other' hosts"]);
}
