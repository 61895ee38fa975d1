//! `wake-parallel`: many applications get requests at the same moment, each restored from its
//! image. It runs with the limit of wakes at once, and without.
//!
//! There is at most one wake of an instance, however many requests come. So many wakes are always
//! of many instances. Here each has its own files, database and image. At the end, 500 small
//! programs are all started at once. Not here: one at a time (`wake`).

use std::fs;

use anyhow::{Context as _, Result, ensure};
use nagaya_records::instance::Tier;
use serde_json::json;

use super::{AppHosting, HostedApp, journals, place, uid};
use crate::clients::{ClientAnswers, to_float};
use crate::content::{AppPage, ContentApp};
use crate::experiment::harness::ExperimentSetting;
use crate::plot::Chart;
use crate::report::{Bound, Goal, Report};

/// Applications requested at once.
const AT_ONCE: [usize; 5] = [1, 4, 8, 16, ALL];
const ALL: usize = 50;

/// Small programs that are all started at the same moment, each for the first time.
const CROWD: usize = 500;

/// The smallest program that responds. A thousand of these still take less memory than some single
/// applications.
const LITTLE: &str = r#"
use Socket;
socket(S, PF_UNIX, SOCK_STREAM, 0) or die;
bind(S, sockaddr_un($ENV{NAGAYA_SOCKET})) or die "bind: $!";
listen(S, 64) or die;
$SIG{PIPE} = 'IGNORE';
while (accept(C, S)) {
    sysread(C, my $asked, 65536);
    syswrite(C, "HTTP/1.1 200 OK\r\nContent-Length: 4\r\nConnection: close\r\n\r\nhere");
    close C;
}
"#;

/// The limit is one wake for each core, and then no relevant limit.
const VARIANTS: [(&str, &str); 2] = [(BOUND, "wakes_at_once = 0\n"), (NO_BOUND, "wakes_at_once = 1024\n")];

const BOUND: &str = "bound";
const NO_BOUND: &str = "no bound";

const GOALS: [Goal; 4] = [
    Goal { key: "errors_500", bound: Bound::AtMost(0.0), aim: 0.0 },
    Goal { key: "all_50_ms", bound: Bound::AtMost(1000.0), aim: 700.0 },
    Goal { key: "ratio_p50_bound_16", bound: Bound::AtMost(1.0), aim: 0.6 },
    Goal { key: "errors", bound: Bound::AtMost(0.0), aim: 0.0 },
];

pub fn run(setting: &ExperimentSetting) -> Result<()> {
    let mut report = Report::new("wake-parallel");
    eprintln!("preparing {ALL} applications");
    let apps = journals(setting.dir(), ALL)?;
    let mut hosting = AppHosting::start(setting, "nagaya", &apps, VARIANTS[0].1)?;
    let mut errors = first(&hosting, &apps)?;
    let mut errors_no_bound = 0;
    let rounds = if setting.quick { 3 } else { 9 };
    report.note("rounds", json!(rounds));
    report.note("CRIU", hosting.criu()?);
    for round in 0..rounds {
        let mut order = VARIANTS;
        order.rotate_left(round % VARIANTS.len());
        for (variant, tables) in order {
            hosting.reconfigure(tables)?;
            for count in AT_ONCE {
                let wrong = measure(&mut report, round, &hosting, &apps[..count], variant)?;
                *(if variant == BOUND { &mut errors } else { &mut errors_no_bound }) += wrong;
            }
        }
        eprintln!("round {} of {rounds} done", round + 1);
    }
    drop(hosting);
    crowd(setting, &mut report)?;
    summarise(&mut report)?;
    report.set("errors", to_float(errors));
    report.set("errors_no_bound", to_float(errors_no_bound));
    let chart = chart(&report);
    report.write(&setting.out, &chart, &GOALS)
}

/// Requests all of them at once, on a separate node, which takes no images of them.
fn crowd(setting: &ExperimentSetting, report: &mut Report) -> Result<()> {
    let tree = place(setting.dir(), "little");
    fs::create_dir_all(&tree).with_context(|| format!("creating {}", tree.display()))?;
    let file = tree.join("little.pl");
    fs::write(&file, LITTLE).with_context(|| format!("writing {}", file.display()))?;
    let backend =
        json!({"kind": "app", "command": ["/usr/bin/perl", file], "directory": tree, "start_seconds": 300});
    let page = AppPage { path: "/", text: "here" };
    let mut apps = Vec::with_capacity(CROWD);
    for index in 0..CROWD {
        let app = ContentApp { backend: backend.clone(), files: None, page, login: "/" };
        apps.push(HostedApp { name: format!("little-{index}"), uid: uid(index)?, app });
    }
    let hosting = AppHosting::start(setting, "crowd", &apps, "image_bytes = \"0B\"\n")?;
    let visits = hosting.visit_all(&apps)?;
    let times = visits.iter().map(|(visit, _)| visit.first_byte_ms).collect();
    let answers = ClientAnswers { times_ms: times, ..ClientAnswers::default() };
    for (key, part) in [("p50_ms_500", 0.5), ("all_500_ms", 1.0)] {
        report.set(key, answers.percentile_ms(part));
    }
    report.set("errors_500", to_float(wrong(&visits)));
    Ok(())
}

/// Starts all for the first time, some at once, and checks that each has an image.
fn first(hosting: &AppHosting, apps: &[HostedApp]) -> Result<usize> {
    let mut errors = 0;
    for some in apps.chunks(4) {
        errors += wrong(&hosting.visit_all(some)?);
    }
    for (site, status) in hosting.statuses()? {
        ensure!(status.image_bytes.is_some(), "{site} has no image: {:?}", status.note);
    }
    Ok(errors)
}

fn wrong(visits: &[(crate::http::HttpVisit, bool)]) -> usize {
    visits.iter().filter(|(_, is_right)| !is_right).count()
}

/// Visits each of these once at the same time. Returns how many failed.
fn measure(
    report: &mut Report,
    round: usize,
    hosting: &AppHosting,
    apps: &[HostedApp],
    variant: &str,
) -> Result<usize> {
    let names: Vec<&str> = apps.iter().map(|hosted| hosted.name.as_str()).collect();
    // Those whose restoration took too long without a limit have lost their images, and get new
    // ones.
    let all = hosting.statuses()?;
    for name in names.iter().filter(|name| all.get(**name).is_some_and(|status| status.image_bytes.is_none()))
    {
        hosting.node.run(&["instance", "image", name])?;
    }
    hosting.rest_all(&names, Tier::Image)?;
    let visits = hosting.visit_all(apps)?;
    let woken = hosting.statuses()?;
    let restored = |name: &&&str| {
        let status = woken.get(**name);
        status.is_some_and(|s| {
            s.image_bytes.is_some() && s.last_wake.as_ref().is_some_and(|w| w.from == Tier::Image)
        })
    };
    let count = names.iter().filter(restored).count();
    ensure!(
        variant == NO_BOUND || count == names.len(),
        "{count} of {} were restored\n{}",
        names.len(),
        hosting.process.log_end()
    );
    let times = visits.iter().map(|(visit, _)| visit.first_byte_ms).collect();
    let answers = ClientAnswers { times_ms: times, ..ClientAnswers::default() };
    let case = apps.len().to_string();
    report.sample(round, &case, variant, "restored", to_float(count));
    for (metric, part) in [("p50_ms", 0.5), ("p95_ms", 0.95), ("all_ms", 1.0)] {
        report.sample(round, &case, variant, metric, answers.percentile_ms(part));
    }
    Ok(wrong(&visits))
}

fn summarise(report: &mut Report) -> Result<()> {
    for count in AT_ONCE {
        for (variant, ending) in [(BOUND, ""), (NO_BOUND, "_no_bound")] {
            for metric in ["p50_ms", "p95_ms"] {
                let value = report.median(&count.to_string(), variant, metric)?;
                report.set(format!("{metric}_{count}{ending}"), value);
            }
        }
    }
    let all = ALL.to_string();
    report.set(format!("all_{ALL}_ms"), report.median(&all, BOUND, "all_ms")?);
    report.set(format!("all_{ALL}_ms_no_bound"), report.median(&all, NO_BOUND, "all_ms")?);
    for count in [16, ALL] {
        let ratio = report.ratio(&count.to_string(), BOUND, NO_BOUND, "p50_ms")?;
        report.set(format!("ratio_p50_bound_{count}"), ratio);
    }
    Ok(())
}

fn chart(report: &Report) -> Chart {
    let variants = VARIANTS.map(|(variant, _)| variant);
    let panels = AT_ONCE.iter().map(|count| {
        let title = format!("{count} at once, median");
        report.panel(&title, "milliseconds", &count.to_string(), "p50_ms", &variants)
    });
    let all = report.panel("50 at once, the last", "milliseconds", "50", "all_ms", &variants);
    Chart {
        title: "Django applications asked for at the same moment, all resting as images".into(),
        subtitle: "first byte through the edge; median of the rounds, whiskers: least and greatest".into(),
        panels: panels.chain([all]).collect(),
    }
}
