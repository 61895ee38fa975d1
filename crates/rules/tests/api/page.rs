//! The recipes of `docs/rules.md`, run from the very text of the page.

use std::path::Path;

use nagaya_records::cell::{CellScope, CpuQuota, Device, IoLimit, LimitSet};
use nagaya_rules::{LaneRun, NumberFact, RulePhase, Verdict};

use crate::world::{Field, World};

/// The Ruby of the section with this heading.
fn recipe(heading: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/rules.md");
    let page = std::fs::read_to_string(path).unwrap();
    let section = page.split("\n### ").find(|section| section.starts_with(heading));
    let section = section.unwrap_or_else(|| panic!("docs/rules.md has no section '{heading}'"));
    let (_, code) = section.split_once("```ruby\n").expect("the section has Ruby");
    code.split_once("```").expect("the Ruby ends").0.to_owned()
}

fn cpu(thousandths: u32) -> LimitSet {
    LimitSet { cpu: Some(CpuQuota::of_core(thousandths)), ..LimitSet::default() }
}

fn with_disk(limits: LimitSet, read: Option<u64>, write: Option<u64>) -> LimitSet {
    let io = IoLimit { read_bps: read, write_bps: write, ..IoLimit::of(Device::Root) };
    LimitSet { io: vec![io], ..limits }
}

const M: u64 = 1 << 20;

#[test]
fn one_script_is_slowed() {
    let rule = recipe("Slow one script");
    let verdict = World::get("http://a/cgi/cpu.cgi?n=5").decide(&rule);
    assert_eq!(verdict.confinement.limits, with_disk(cpu(100), None, Some(5 * M)));
    assert!(World::get("http://a/index.html").decide(&rule).is_silent());
}

#[test]
fn each_few_at_once_and_all_together_are_bounded() {
    let rule = recipe("20 % for each, 5 at once, 50 % for all");
    let verdict = World::get("http://a/report.cgi").decide(&rule);
    assert_eq!(verdict.confinement.limits, cpu(200));
    let [cell] = &verdict.confinement.named[..] else { panic!("{verdict:?}") };
    assert_eq!((cell.scope, cell.limits.as_ref()), (CellScope::Tenant, Some(&cpu(500))));
    assert_eq!(verdict.lane.unwrap().run, LaneRun::Fixed(5));
    assert!(World::get("http://a/index.html").decide(&rule).is_silent());
}

#[test]
fn a_busy_machine_slows_what_takes_long() {
    let rule = recipe("When the machine is busy");
    let mut world = World::get("http://a/");
    assert!(world.decide(&rule).is_silent());
    world.load = [1e6, 0.0, 0.0];
    let verdict = world.decide(&rule);
    assert_eq!(verdict.confinement.limits.cpu_shares, Some(256));
    let steps: Vec<_> =
        verdict.confinement.demotions.iter().map(|step| (step.after_cpu_us, step.limits.cpu)).collect();
    assert_eq!(steps, [(200_000, cpu(250).cpu), (2_000_000, cpu(50).cpu)]);
}

#[test]
fn method_and_user_make_a_difference() {
    let rule = recipe("By method and user");
    let get = World::get("http://a/").decide(&rule);
    assert_eq!(get.confinement.limits, with_disk(LimitSet::default(), Some(20 * M), None));
    let post = World::request("POST", "http://a/").decide(&rule);
    let limits = LimitSet { processes: Some(32), ..with_disk(LimitSet::default(), None, Some(2 * M)) };
    assert_eq!(post.confinement.limits, limits);
    // "editor:" in base64.
    let editor = World::request("POST", "http://a/").header("Authorization", "Basic ZWRpdG9yOg==");
    assert!(editor.decide(&rule).is_silent());
}

#[test]
fn each_host_has_its_own_settings() {
    let rule = recipe("Per host, from the store");
    let world = World::get("http://www.example.com/")
        .setting("www.example.com", &[(Some("cpu"), Field::Text("30%")), (Some("read"), Field::Text("10M"))])
        .setting("default", &[(Some("cpu"), Field::Text("50%"))]);
    assert_eq!(world.decide(&rule).confinement.limits, with_disk(cpu(300), Some(10 * M), None));
    let other = World { settings: world.settings, ..World::get("http://other.example.com/") };
    assert_eq!(other.decide(&rule).confinement.limits, cpu(500));
    assert!(World::get("http://a/").decide(&rule).is_silent());
}

#[test]
fn days_and_nights_differ() {
    let rule = recipe("By day and by night");
    let minute: i64 = World::get("http://a/").value("now.hour * 60 + now.min").parse().unwrap();
    let at = |hour: i64| {
        let seconds = 1_768_478_400 + (hour * 60 - minute) * 60;
        World::get("http://a/")
            .number(NumberFact::ArrivedUs, seconds * 1_000_000)
            .decide(&rule)
            .confinement
            .limits
            .clone()
    };
    assert_eq!(at(2), cpu(2000));
    assert_eq!(at(14), with_disk(cpu(500), Some(10 * M), Some(10 * M)));
}

#[test]
fn paying_visitor_is_faster() {
    let rule = recipe("Faster for who pays");
    let verdict = World::get("http://a/checkout/pay").decide(&rule);
    assert_eq!(verdict.confinement.boost.cpu, cpu(2000).cpu);
    assert_eq!(verdict.confinement.limits, LimitSet::default());
    assert!(World::get("http://a/").decide(&rule).is_silent());
}

#[test]
fn the_page_has_no_ruby_that_does_not_run() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/rules.md");
    let page = std::fs::read_to_string(path).unwrap();
    let blocks: Vec<_> =
        page.split("```ruby\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    assert!(blocks.len() >= 7, "{}", blocks.len());
    for block in blocks {
        World::request("POST", "http://www.example.com/cgi/cpu.cgi")
            .evaluate(RulePhase::AccessChecker, block, &mut Verdict::default())
            .unwrap_or_else(|fault| panic!("{fault}\n{block}"));
    }
}
