//! Fuzz targets for texts from which records and frames between processes are read.
//!
//! Not here: the fuzzer (`fuzz/`).

use std::fmt::Debug;

use nagaya_base::fuzz::{FuzzTarget, copy_seeds};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::check::{self, RecordFindings};
use crate::feed::{self, FromSupervisor, ToSupervisor};
use crate::names::{HostPattern, NameError, NodeName, RuleName, SiteName, TenantName};
use crate::record::{NodeRecord, Placement, RuleRecord, Setting, Site, Tenant, TicketKeys};

/// All fuzz targets.
pub const TARGETS: &[FuzzTarget] = &[
    FuzzTarget { name: "names", run: read_names, seeds: names },
    FuzzTarget { name: "records", run: read_records, seeds: records },
    FuzzTarget { name: "feed_frames", run: read_frames, seeds: frames },
];

// === Names ===

fn names() -> Vec<Vec<u8>> {
    copy_seeds(&[b"a.example", b"*.a.example", b"..", b"A", b"a/b", b"10.0.0.1", b"xn--a", b"-a", b"[::1]"])
}

/// An accepted name is the name of a file in one directory.
fn read_names(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    check_name(text, TenantName::new, TenantName::as_str);
    check_name(text, SiteName::new, SiteName::as_str);
    check_name(text, RuleName::new, RuleName::as_str);
    check_name(text, NodeName::new, NodeName::as_str);
    check_name(text, HostPattern::new, HostPattern::as_str);
}

fn check_name<T>(text: &str, new: fn(&str) -> Result<T, NameError>, show: fn(&T) -> &str) {
    let Ok(name) = new(text) else { return };
    let shown = show(&name);
    assert!(!shown.contains(['/', '\0', '\n', ' ']) && !matches!(shown, "" | "." | ".."), "{shown:?}");
    let again = new(shown).map(|again| show(&again) == shown);
    assert_eq!(again, Ok(true), "{shown} is its own name");
}

// === Records ===

/// One tenant as JSON.
pub const TENANT: &str = r#"{"name":"t","uid":231001,"gid":231001,"home":"/srv/t"}"#;
/// One site as JSON.
pub const SITE: &str = r#"{"name":"s","tenant":"t","hosts":["s.example","*.s.example"],"backend":{"kind":"static","root":"www"}}"#;
const APPLICATION: &str = r#"{"name":"a","tenant":"t","hosts":["a.example"],"path":"/x","backend":{"kind":"app","command":["/usr/bin/a","--port","$PORT"],"directory":"app","env":{"A":"b"},"outbound":"nat"}}"#;

fn records() -> Vec<Vec<u8>> {
    let more = [
        r#"{"key":"a.b","value":["x","y"]}"#,
        r#"{"name":"r","phase":"access","text":"p 1"}"#,
        r#"{"name":"s","tenant":"t","hosts":["s"],"backend":{"kind":"php","root":"www","front_controller":"index.php"},"limits":{"cpu":0.5,"memory":"64M"}}"#,
        r#"{"name":"s","tenant":"t","hosts":["s"],"backend":{"kind":"http","address":"127.0.0.1:8080"}}"#,
    ];
    [TENANT, SITE, APPLICATION].into_iter().chain(more).map(|text| text.as_bytes().to_vec()).collect()
}

/// A valid record is written out as the same record, and is checked.
fn read_records(bytes: &[u8]) {
    if let Some(tenant) = check_same::<Tenant>(bytes) {
        check::tenant(&tenant, &mut RecordFindings::of_tenant(&tenant.name, None));
    }
    if let Some(site) = check_same::<Site>(bytes) {
        check::site(&site, &mut RecordFindings::of_site(&site.name, None));
    }
    if let Some(setting) = check_same::<Setting>(bytes) {
        check::setting(&setting, &mut RecordFindings::of_setting(&setting.key, None));
    }
    if let Some(rule) = check_same::<RuleRecord>(bytes) {
        check::rule(&rule, &mut RecordFindings::of_rule(&rule.name, None));
    }
    check_same::<NodeRecord>(bytes);
    check_same::<Placement>(bytes);
    check_same::<TicketKeys>(bytes);
}

fn check_same<T: DeserializeOwned + Serialize + PartialEq + Debug>(bytes: &[u8]) -> Option<T> {
    let record: T = serde_json::from_slice(bytes).ok()?;
    let written = serde_json::to_vec(&record).expect("what was JSON is JSON again");
    assert_eq!(serde_json::from_slice::<T>(&written).expect("what we write we read"), record);
    Some(record)
}

// === Frames ===

fn frames() -> Vec<Vec<u8>> {
    let up = [ToSupervisor::Ready { revision: 7 }, ToSupervisor::Answer { tag: 1, text: "x".into() }]
        .map(|frame| feed::encode(&frame));
    let down = feed::encode(&FromSupervisor::Options(serde_json::json!({ "a": [1] })));
    let all = up.into_iter().chain([down]).map(Result::unwrap_or_default);
    all.chain([vec![255; 5], b"\x02\x00\x00\x00{}".to_vec()]).collect()
}

/// Reads frame after frame, as long as they are complete.
fn read_frames(bytes: &[u8]) {
    check_frames::<ToSupervisor>(bytes);
    check_frames::<FromSupervisor>(bytes);
}

fn check_frames<T: DeserializeOwned + Serialize + PartialEq + Debug>(mut bytes: &[u8]) {
    while let Ok(Some(frame)) = feed::read::<T>(&mut bytes) {
        let written = feed::encode(&frame).expect("what came in one frame fits in one");
        assert_eq!(feed::read::<T>(&mut &written[..]).ok().flatten(), Some(frame));
    }
}
