//! Tests of explanations: limits with who set them, and time with its reasons.

use std::sync::Arc;
use std::time::Duration;

use nagaya_base::Code;
use nagaya_records::cell::{CellName, CgroupController, CpuQuota, Demotion, IoLimit, RequestUsage};
use nagaya_records::instance::{WakeReport, WakeStage};
use nagaya_records::{Site, Tenant};
use smallvec::smallvec;

use super::*;
use crate::record::access_log::tests::record;

fn site(backend: &str) -> Arc<Site> {
    let text = format!(
        r#"{{"name":"wiki","tenant":"demo","hosts":["w"],"backend":{{"kind":"{backend}","root":"w"}},"limits":{{"read":"4M"}},
        "request_limits":{{"cpu":"50%","processes":"16"}},"demotions":[{{"after_cpu":"500ms","limits":{{"cpu":"5%"}}}}]}}"#
    );
    Arc::new(serde_json::from_str(&text).unwrap())
}

fn tenant() -> Arc<Tenant> {
    let text = r#"{"name":"demo","uid":1000,"gid":1000,"limits":{"memory":"1G"}}"#;
    Arc::new(serde_json::from_str(text).unwrap())
}

fn more(site: &Site) -> AccessDetails {
    let limits = LimitSet { cpu: Some(CpuQuota::of_core(125)), ..site.request_limits.limits() };
    let slow = IoLimit { write_bps: Some(1000), ..IoLimit::of(Device::Number { major: 8, minor: 0 }) };
    let named = NamedCell {
        name: CellName::parse("slow").unwrap(),
        scope: CellScope::Node,
        controllers: vec![CgroupController::Cpu, CgroupController::Blkio],
        limits: Some(LimitSet { io: vec![slow], ..LimitSet::default() }),
    };
    let demotions: Vec<Demotion> = site.demotions.iter().filter_map(|step| step.demotion()).collect();
    AccessDetails {
        cell: Some("demo/wiki/r3".into()),
        confinement: Some(Arc::new(Confinement {
            limits,
            named: vec![named],
            demotions,
            boost: Boost::default(),
        })),
        ruled_by: smallvec!["/etc/nagaya/rules/a.rb".into()],
        tenant: Some(tenant()),
        ..AccessDetails::default()
    }
}

#[test]
fn a_wake_is_a_stretch_of_time_with_its_stages() {
    let mut woke = record("/", None);
    let wake = WakeReport {
        from: Tier::Frozen,
        stages: vec![(WakeStage::Thaw, 200), (WakeStage::Connect, 40)],
        predicted_us: Some(90),
    };
    let woken = WakeWait { wake: Arc::new(wake), waited: Duration::from_micros(300) };
    woke.more = Some(Box::new(AccessDetails { woken: Some(woken), ..AccessDetails::default() }));
    woke.backend = Duration::from_micros(1_000);
    let told = tell(&woke, "n1");
    let stage = |stage: &str, us: u64| json!({ "stage": stage, "us": us });
    let stages = [stage("thaw", 200), stage("connect", 40), stage("first_byte", 1_000)];
    assert_eq!(told["wake"], json!({ "from": "frozen", "stages": stages, "predicted_us": 90 }));
    assert_eq!(
        told["spans"][0],
        json!({ "name": "waking", "us": 300, "why": "Its application was frozen." })
    );
    assert_eq!(told["spans"][2]["us"], 200, "what is left is sending: {}", told["spans"]);
}

#[test]
fn every_limit_says_who_set_it() {
    let site = site("cgi");
    let mut seen = record("/cpu.cgi?n=1", None);
    seen.more = Some(Box::new(more(&site)));
    seen.site = Some(site);
    let told = tell(&seen, "n1");
    let limit = |what: &str, value: &str, from: &str| json!({"what": what, "value": value, "from": from});
    let (rule, of_site) = ("rule /etc/nagaya/rules/a.rb", "the record of site wiki");
    assert_eq!(
        told["limits"],
        json!([
            limit("cpu", "12.5%", rule),
            limit("processes", "16", of_site),
            limit("cpu after 500ms of CPU time", "5%", of_site),
            limit("write from 8:0 of cell slow", "1000B/s", rule),
            limit("read of the site", "4MiB/s", of_site),
            limit("memory of the tenant", "1GiB", "the record of tenant demo"),
        ])
    );
    assert_eq!(told["named"], json!(["slow (cpu, blkio)"]));
    assert_eq!((&told["host"], &told["target"]), (&json!("www.example.org"), &json!("/cpu.cgi?n=1")));
    assert_eq!((&told["cell"], &told["tenant"]), (&json!("demo/wiki/r3"), &json!("demo")));
}

#[test]
fn receipt_names_limits_that_need_a_process_of_their_own() {
    let site = site("cgi");
    for (of, unheld) in [
        (UsageScope::Request, &["write from 8:0 of cell slow"][..]),
        (
            UsageScope::Instance,
            &["cpu", "processes", "cpu after 500ms of CPU time", "write from 8:0 of cell slow"][..],
        ),
    ] {
        let mut seen = record("/x", None);
        seen.more = Some(Box::new(AccessDetails { cell_of: Some(of), ..more(&site) }));
        seen.site = Some(Arc::clone(&site));
        let told = tell(&seen, "n1");
        let not = told["limits"].as_array().unwrap().iter().filter(|limit| limit["holds"] == false);
        assert_eq!(not.map(|limit| limit["what"].as_str().unwrap()).collect::<Vec<_>>(), unheld);
        assert_eq!(told["cell_of"], of.as_str());
    }
}

#[test]
fn a_boost_says_what_it_came_to() {
    let asked = Boost { cpu: Some(CpuQuota::of_core(4_000)), cpu_shares: Some(2048) };
    let cpu = |thousandths| Some(CpuQuota::of_core(thousandths));
    let seen = |raised: Boost| {
        let mut seen = record("/x", None);
        let confinement = Some(Arc::new(Confinement { boost: asked, ..Confinement::default() }));
        let ruled_by = smallvec!["a.rb".into()];
        seen.more =
            Some(Box::new(AccessDetails { confinement, ruled_by, raised, ..AccessDetails::default() }));
        tell(&seen, "n1")["limits"].clone()
    };
    let limit = |what: &str, value: &str| json!({ "what": format!("{what} of the site, raised"), "value": value, "from": "rule a.rb" });
    let with = |mut limit: Value, more: Value| {
        limit.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        limit
    };
    assert_eq!(seen(asked), json!([limit("cpu", "400%"), limit("cpu_shares", "2048")]));
    let note = "was not raised: the site has no such limit, or may have no more";
    assert_eq!(
        seen(Boost { cpu: cpu(2_000), cpu_shares: None }),
        json!([
            with(limit("cpu", "200%"), json!({ "note": "400% was asked for" })),
            with(limit("cpu_shares", "2048"), json!({ "holds": false, "note": note })),
        ])
    );
}

fn named<'a>(told: &'a Value, name: &str) -> &'a Value {
    told["spans"].as_array().unwrap().iter().find(|span| span["name"] == name).unwrap_or(&Value::Null)
}

#[test]
fn each_wait_has_its_reason_and_together_they_are_all_the_time() {
    let site = site("cgi");
    let mut seen = record("/x", None);
    let usage = RequestUsage { cpu_us: 70_000, throttled_us: 600_000, demoted: 1, ..RequestUsage::default() };
    seen.more =
        Some(Box::new(AccessDetails { used: ProgramUsage::Known(usage), paced_us: 50_000, ..more(&site) }));
    seen.site = Some(site);
    (seen.queued, seen.backend) = (Duration::from_millis(200), Duration::from_millis(700));
    (seen.ruled, seen.took) = (Duration::from_micros(9), Duration::from_secs(1));
    let told = tell(&seen, "n1");
    for (name, us, why) in [
        ("in line", 200_000, "limit of running requests"),
        ("throttled", 600_000, "its CPU quota of 12.5% was used up"),
        ("program", 100_000, "70000 us of CPU time"),
        ("held back", 50_000, "paid for what it used"),
    ] {
        let span = named(&told, name);
        assert_eq!(span["us"], us, "{told}");
        assert!(span["why"].as_str().unwrap().contains(why), "{span}");
    }
    let all: u64 = told["spans"].as_array().unwrap().iter().map(|span| span["us"].as_u64().unwrap()).sum();
    assert_eq!(all, 1_000_000);
    assert_eq!(told["usage"]["throttled_us"], 600_000);
}

#[test]
fn a_paced_file_names_the_limits_that_slowed_it() {
    let site = site("static");
    let mut seen = record("/big", None);
    seen.more = Some(Box::new(AccessDetails { paced_us: 900, ..more(&site) }));
    seen.site = Some(site);
    let told = tell(&seen, "n1");
    let why = named(&told, "held back")["why"].as_str().unwrap();
    assert!(why.contains("read limit 4MiB/s of the site"), "{why}");
    assert!(why.contains("write limit 1000B/s of cell slow"), "{why}");
}

#[test]
fn unknown_usage_is_not_made_up() {
    let site = site("php");
    let mut seen = record("/x", None);
    seen.more = Some(Box::new(AccessDetails { used: ProgramUsage::Unknown, ..AccessDetails::default() }));
    seen.site = Some(site);
    (seen.refusal, seen.code) = (Some("backend_timeout"), Some(Code(417)));
    seen.backend = Duration::from_millis(1);
    let told = tell(&seen, "n1");
    assert_eq!(told["usage"]["cpu_us"], Value::Null);
    assert_eq!(told["usage"]["read_bytes"], Value::Null);
    assert_eq!(told["refusal"], json!({"reason": "backend_timeout", "code": "NGY0417", "detail": null}));
    seen.more.as_mut().unwrap().fault = Some("two values of Content-Length".into());
    assert_eq!(tell(&seen, "n1")["refusal"]["detail"], "two values of Content-Length");
    assert!(named(&told, "program")["why"].as_str().unwrap().contains("not known"), "{told}");
}

#[test]
fn only_a_request_that_is_kept_is_told_of() {
    let receipts = ReceiptRings::default();
    receipts.for_thread().push(Box::new(record("/x", None)), 8);
    let explain = |id: &str| explain(&receipts, "localhost", id, |_, _| LimitSet::default());
    let told: Value = serde_json::from_str(&explain(&format!("{:032x}", 0xabc))).unwrap();
    assert_eq!((&told["id"], &told["node"]), (&json!(format!("{:032x}", 0xabc)), &json!("localhost")));
    for id in ["", "abc", "nonsense", &format!("{:032x}", 1), "+0000000000000000000000000000abc"] {
        assert_eq!(explain(id), "null", "{id}");
    }
}
