//! nagaya's own words, and `KVS`.

use std::time::Duration;

use nagaya_records::cell::{
    Boost, CellName, CellScope, CgroupController, CpuQuota, Demotion, Device, IoLimit, LimitSet, NamedCell,
    RequestUsage,
};
use nagaya_rules::{LaneRun, LogLevel, NumberFact, RuleLane, RulePhase, RuleResponse, TextFact, Verdict};

use crate::world::{Field, World};

fn world() -> World {
    World::get("http://www.example.com/cgi/a.cgi?x=1")
}

fn limits(rule: &str) -> LimitSet {
    world().decide(rule).confinement.limits.clone()
}

fn root(limit: impl FnOnce(&mut IoLimit)) -> LimitSet {
    let mut io = IoLimit::of(Device::Root);
    limit(&mut io);
    LimitSet { io: vec![io], ..LimitSet::default() }
}

#[test]
fn each_limit_is_read_with_its_unit() {
    let cpu = |thousandths| LimitSet { cpu: Some(CpuQuota::of_core(thousandths)), ..LimitSet::default() };
    assert_eq!(limits("limit cpu: \"20%\""), cpu(200));
    assert_eq!(limits("limit cpu: \"12.5%\""), cpu(125));
    assert_eq!(limits("limit \"cpu\" => \"150%\""), cpu(1500));
    assert_eq!(limits("limit cpu_shares: 512"), LimitSet { cpu_shares: Some(512), ..LimitSet::default() });
    assert_eq!(limits("limit read: \"5M\""), root(|io| io.read_bps = Some(5 << 20)));
    assert_eq!(
        limits("limit write: \"512K\", write_iops: 100"),
        root(|io| {
            io.write_bps = Some(512 << 10);
            io.write_iops = Some(100);
        })
    );
    assert_eq!(
        limits("limit read: 30000000, read_iops: \"7\""),
        root(|io| {
            io.read_bps = Some(30_000_000);
            io.read_iops = Some(7);
        })
    );
    assert_eq!(limits("limit processes: 64"), LimitSet { processes: Some(64), ..LimitSet::default() });
    assert_eq!(
        limits("limit cpus: \"0-1,3\""),
        LimitSet { cpus: Some("0-1,3".into()), ..LimitSet::default() }
    );
    let disk = Device::Number { major: 254, minor: 0 };
    let other = IoLimit { write_bps: Some(1 << 30), ..IoLimit::of(disk) };
    assert_eq!(limits("limit write: \"1G\", device: \"254:0\"").io, [other]);
}

#[test]
fn later_lines_add_to_earlier_ones_and_replace_what_they_name() {
    let both = limits("limit cpu: \"20%\", write: \"5M\"\nlimit cpu: \"10%\", processes: 3");
    let expected = LimitSet {
        cpu: Some(CpuQuota::of_core(100)),
        processes: Some(3),
        ..root(|io| io.write_bps = Some(5 << 20))
    };
    assert_eq!(both, expected);
}

#[test]
fn nothing_is_no_limit() {
    assert!(world().decide("limit cpu: nil\nlimit nil\nlimit KVS[\"absent\"]").is_silent());
}

#[test]
fn slips_are_errors_with_their_line() {
    for (rule, message) in [
        ("limit cpu_share: 5", "there is no limit 'cpu_share'; there are cpu, cpu_shares"),
        ("limit cpu: 20", "cpu: '20' is not a share of CPU time: write a percentage"),
        ("limit cpu: \"20\"", "like 50%"),
        ("limit cpu: \"-5%\"", "cpu: '-5%' is not a share"),
        ("limit cpu: 0.2", "cpu: it is a Float, and must be a String"),
        ("limit cpu: 1.0", "cpu: '1' is not a share"),
        ("limit read: \"5MB\"", "read: '5MB' is not a number of bytes per second"),
        ("limit read: \"-1\"", "read: '-1' is not"),
        ("limit read: -1", "read: -1 is below 0"),
        ("limit cpu_shares: 1", "a number from 2 to 10000"),
        ("limit processes: 0", "processes: '0' is out of range"),
        ("limit write: \"5M\", device: \"sda\"", "'sda' is not a device"),
        ("limit cpus: \"all\"", "cpus: 'all' is not a list"),
        ("limit memory: \"1G\"", "memory is a limit of cells and tenants"),
        ("limit read: :fast", "read: it is a Symbol, and must be a String"),
        ("limit", "limit takes words with amounts"),
        ("limit \"20%\"", "limit takes words with amounts"),
        ("cell \"a/b\", cpu: \"5%\"", "'a/b' is not the name of a cell"),
        ("cell \"a\", of: :world", "of: is :tenant or :node"),
        ("lane \"a\"", "run: is how many run at once"),
        ("lane \"a\", run: 0", "run: is how many run at once"),
        ("lane \"a\", ran: 5", "ran is no word here"),
        ("boost", "boost takes words with amounts"),
        ("boost 5", "boost takes words with amounts"),
        ("boost cpu: 2", "'2' is not a share of CPU time"),
        ("boost cpu: \"unlimited\"", "say how far"),
        ("boost cpu_shares: 1", "cpu_shares: it is a number from 2 to 10000"),
        ("boost cpu: \"200%\", write: \"5M\"", "there are cpu and cpu_shares, and no others"),
        ("boost memory: \"1G\"", "there are cpu and cpu_shares, and no others"),
        ("demote cpu: \"5%\"", "after: is missing"),
        ("demote after: \"500\", cpu: \"5%\"", "'500' is not a time"),
        ("demote after: 500, cpu: \"5%\"", "write a time such as"),
        ("demote after: \"1s\"", "no limit is named"),
        ("answer 42", "42: the status must be 200 to 599"),
        ("answer \"403\"", "must be an Integer"),
        ("redirect \"here\"", "does not begin with '/', http"),
        ("between \"22\"..\"6:00\"", "'22' is not a time of day"),
        ("between 22..6", "between takes times such as"),
        ("between \"22:00\"", "between takes a span"),
        ("KVS.get(5)", "must be a String"),
        ("log 5", "must be a String"),
    ] {
        let fault = world().fault(&format!("# a comment\n{rule}\n"));
        assert!(fault.message.contains(message), "{rule}: {fault}");
        assert_eq!(fault.line, Some(2), "{rule}: {fault}");
        assert!(fault.file.ends_with("rule.rb"), "{fault}");
    }
}

#[test]
fn a_cell_is_the_tenants_unless_it_says_otherwise() {
    let cell = |rule: &str| {
        let mut named = world().decide(rule).confinement.named.clone();
        assert_eq!(named.len(), 1, "{rule}");
        named.remove(0)
    };
    let expected = NamedCell {
        name: CellName::parse("batch").unwrap(),
        scope: CellScope::Tenant,
        controllers: CgroupController::ALL.to_vec(),
        limits: Some(LimitSet {
            cpu: Some(CpuQuota::of_core(500)),
            memory: Some(512 << 20),
            ..LimitSet::default()
        }),
    };
    assert_eq!(cell("cell \"batch\", cpu: \"50%\", memory: \"512M\""), expected);
    assert_eq!(cell("cell :batch, cpu: \"50%\", memory: \"512M\", of: :tenant"), expected);
    assert_eq!(cell("cell \"batch\", cpu: \"50%\", of: :node").scope, CellScope::Node);
    assert_eq!(cell("cell \"batch\"").limits, None);
}

#[test]
fn a_lane_lets_so_many_run() {
    let lane = |run| RuleLane { name: "reports".into(), run, wait: None, tickets: true };
    let verdict = world().decide("lane \"reports\", run: 5");
    assert_eq!(verdict.lane, Some(lane(LaneRun::Fixed(5))));
    for auto in ["\"auto\"", ":auto"] {
        let verdict = world().decide(&format!("lane \"reports\", run: {auto}"));
        assert_eq!(verdict.lane, Some(lane(LaneRun::Auto)));
    }
    let verdict = world().decide("lane \"reports\", run: 5, wait: \"90s\", tickets: false");
    let wait = Some(Duration::from_secs(90));
    assert_eq!(verdict.lane, Some(RuleLane { wait, tickets: false, ..lane(LaneRun::Fixed(5)) }));
    for (wrong, said) in [
        ("lane \"reports\"", "run: is how many"),
        ("lane \"reports\", run: 0", "run: is how many"),
        ("lane \"reports\", run: \"many\"", "run: is how many"),
        ("lane \"reports\", run: 5, wait: 10", "wait: write a time"),
        ("lane \"reports\", run: 5, ticket: true", "ticket is no word here"),
    ] {
        let fault = world().fault(wrong);
        assert!(fault.message.contains(said), "{wrong}: {}", fault.message);
    }
}

#[test]
fn a_request_goes_first_or_is_let_pass() {
    let verdict = world().decide("priority -5\nbypass");
    assert_eq!((verdict.priority, verdict.passes), (-5, true));
    assert!(world().fault("priority 101").message.contains("use -100 to 100"));
    assert!(world().fault("priority \"high\"").message.contains("a number of seconds"));
}

#[test]
fn demotions_are_steps_in_rising_order() {
    let verdict = world()
        .decide("demote after: \"2s\", cpu: \"5%\"\ndemote after: \"500ms\", cpu: \"10%\", write: \"1M\"");
    let cpu = |thousandths| Some(CpuQuota::of_core(thousandths));
    let early = LimitSet { cpu: cpu(100), ..root(|io| io.write_bps = Some(1 << 20)) };
    let late = LimitSet { cpu: cpu(50), ..LimitSet::default() };
    let steps = [
        Demotion { after_cpu_us: 500_000, limits: early },
        Demotion { after_cpu_us: 2_000_000, limits: late },
    ];
    assert_eq!(verdict.confinement.demotions, steps);
    let five = "5.times { |i| demote after: \"#{i + 1}s\", cpu: \"5%\" }";
    assert!(world().fault(five).message.contains("at most 4 demotions"));
}

#[test]
fn a_boost_is_apart_from_limits_and_the_last_word_counts() {
    let verdict = world().decide(
        "limit cpu: \"20%\"\nboost cpu: \"200%\", cpu_shares: 4096\nboost nil\nboost cpu: \"150%\"\nboost cpu: nil",
    );
    let cpu = |thousandths| Some(CpuQuota::of_core(thousandths));
    assert_eq!(verdict.confinement.boost, Boost { cpu: cpu(1_500), cpu_shares: Some(4096) });
    assert_eq!(verdict.confinement.limits.cpu, cpu(200));
    assert!(verdict.has(nagaya_rules::VerdictTopic::Boost));
    assert!(world().decide("boost nil").is_silent());
}

#[test]
fn an_answer_is_given_instead_of_the_sites() {
    let verdict = world().decide("answer 403, \"Not here.\\n\"");
    assert_eq!(
        verdict.answer,
        Some(RuleResponse { status: 403, body: b"Not here.\n".to_vec(), ..RuleResponse::default() })
    );
    assert_eq!(world().decide("answer 503").answer.unwrap().status, 503);
    let redirect = world().decide("redirect \"https://example.org/\", 308").answer.unwrap();
    assert_eq!((redirect.status, redirect.location.as_deref()), (308, Some("https://example.org/")));
    assert_eq!(world().decide("redirect \"/new\"").answer.unwrap().location.as_deref(), Some("/new"));
}

#[test]
fn a_request_is_read() {
    let lane = world().number(NumberFact::SiteRunning, 4).number(NumberFact::SiteWaiting, 9);
    let world = lane
        .number(NumberFact::SiteWaitMs, 1_500)
        .header("User-Agent", "curl")
        .number(NumberFact::ContentLength, 9);
    for (expression, value) in [
        ("request.host", "\"www.example.com\""),
        ("request.path", "\"/cgi/a.cgi\""),
        ("request.query", "\"x=1\""),
        ("request.method", "\"GET\""),
        ("request.scheme", "\"http\""),
        ("request.user", "nil"),
        ("request.address", "\"192.0.2.7\""),
        ("request.tenant + request.site", "\"demowiki\""),
        ("request.length", "9"),
        ("request.status", "nil"),
        ("request.cpu_ms", "nil"),
        ("request.elapsed_ms", "1"),
        ("request.header[\"user-agent\"]", "\"curl\""),
        ("request.header[\"absent\"]", "nil"),
        ("node.name", "\"n1\""),
        ("node.running", "17"),
        ("site.running", "4"),
        ("site.waiting", "9"),
        ("site.free", "0"),
        ("site.wait_ms", "1500"),
        ("node.cores > 0", "true"),
        ("node.load + node.load5 + node.load15", "0.0"),
    ] {
        assert_eq!(world.value(expression), value, "{expression}");
    }
}

#[test]
fn a_wait_that_is_not_known_is_no_number() {
    assert_eq!(world().value("site.wait_ms"), "nil");
}

#[test]
fn words_work_inside_methods_and_blocks() {
    let rule = "def slow; limit cpu: \"5%\"; end\n[1].each { slow if request.host && node && now }";
    assert_eq!(limits(rule).cpu, Some(CpuQuota::of_core(50)));
}

#[test]
fn settings_are_texts_numbers_and_flat_objects() {
    let world = world().setting("plain", &[(None, Field::Text("20%"))]).setting("none", &[]).setting(
        "www.example.com",
        &[
            (Some("cpu"), Field::Text("30%")),
            (Some("processes"), Field::Int(8)),
            (Some("factor"), Field::Float(1.5)),
            (Some("paid"), Field::Bool(true)),
        ],
    );
    for (expression, value) in [
        ("KVS.get(\"plain\")", "\"20%\""),
        ("KVS[\"plain\"]", "\"20%\""),
        ("KVS[\"absent\"]", "nil"),
        ("KVS[nil]", "nil"),
        ("KVS[\"none\"]", "{}"),
        ("KVS.get(request.host)[\"cpu\"]", "\"30%\""),
        ("KVS.get(request.host, \"processes\")", "8"),
        ("KVS.get(request.host, :factor)", "1.5"),
        ("KVS.get(request.host, \"paid\")", "true"),
        ("KVS.get(request.host, \"absent\")", "nil"),
        ("KVS.get(\"plain\", \"cpu\")", "nil"),
        ("KVS.get(\"absent\", \"cpu\")", "nil"),
    ] {
        assert_eq!(world.value(expression), value, "{expression}");
    }
}

#[test]
fn the_time_is_when_the_request_arrived() {
    // 2026-01-15 12:00:00 UTC, and a day without a change of clocks anywhere.
    assert_eq!(world().value("now.to_i"), "1768478400");
    assert_eq!(world().value("now.year"), "2026");
    let minute: i64 = world().value("now.hour * 60 + now.min").parse().unwrap();
    let at = |hour: i64| {
        let seconds = 1_768_478_400 + (hour * 60 - minute) * 60;
        world().number(NumberFact::ArrivedUs, seconds * 1_000_000)
    };
    for (hour, night, office) in
        [(23, true, false), (3, true, false), (6, false, false), (9, false, true), (22, true, false)]
    {
        assert_eq!(at(hour).value("between \"22:00\"..\"06:00\""), night.to_string(), "{hour}");
        assert_eq!(at(hour).value("between \"9:00\"..\"17:30\""), office.to_string(), "{hour}");
    }
}

#[test]
fn when_the_request_has_ended_it_is_too_late_to_limit_it() {
    let mut world = world().number(NumberFact::Status, 200);
    world.usage = Some(RequestUsage { cpu_us: 12_345, ..RequestUsage::default() });
    let verdict =
        world.decide_in(RulePhase::LogTransaction, "log \"#{request.status} after #{request.cpu_ms} ms\"");
    assert_eq!(verdict.log, [(LogLevel::Notice, "200 after 12 ms".to_owned())]);
    for rule in [
        "limit cpu: \"5%\"",
        "cell \"a\"",
        "lane \"a\", run: 1",
        "demote after: \"1s\", cpu: \"5%\"",
        "boost cpu: \"200%\"",
        "answer 403",
    ] {
        let fault = world.evaluate(RulePhase::LogTransaction, rule, &mut Verdict::default()).unwrap_err();
        assert!(fault.message.contains("comes too late"), "{fault}");
    }
}

#[test]
fn a_host_that_is_not_named_has_no_settings() {
    let mut world = world();
    world.texts.retain(|(text, _)| *text != TextFact::Hostname);
    assert!(world.decide("limit KVS[request.host]").is_silent());
}

#[test]
fn a_crawler_need_not_wake_a_site_that_rests() {
    let rule = "answer 503 if site_rests? and request.user_agent =~ /bot/";
    let asked_by = |agent: &str, rests| World { rests, ..world().header("User-Agent", agent) };
    let status = |world: World| world.decide(rule).answer.map(|answer| answer.status);
    assert_eq!(status(asked_by("a bot", true)), Some(503));
    assert_eq!(status(asked_by("a bot", false)), None);
    assert_eq!(status(asked_by("curl", true)), None);
    assert_eq!(status(World { rests: true, ..world() }), None, "one that does not say what it is");
    assert!(world().fault("site_rests? 1").message.contains("wrong number of arguments"));
}
