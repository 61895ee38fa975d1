//! `relocation`: one client requests a page 3,000 times. Midway the packets of the application's
//! node are silently dropped. The request that finds out has the application moved, and another
//! node responds. These are figures 3 to 5 of paper 001.
//!
//! WordPress's database is reached by its Unix socket, which all nodes see as they are one machine.
//! In a cluster of many machines it would be a network address. Not here: many sites at once
//! (`storm`).

use std::path::Path;
use std::time::{Duration, Instant};
use std::{fs, io};

use anyhow::{Context as _, Result, anyhow, ensure};
use serde_json::json;

use super::{SHORT_FENCE_MS, host, import, is_on, lab_with_fence, place_on, setting_note, until};
use crate::clients::to_float;
use crate::content::mariadb::MariaDb;
use crate::content::population::UID_BASE;
use crate::content::wordpress::{self, WordpressServer};
use crate::content::{ContentApp, django, redmine};
use crate::experiment::harness::ExperimentSetting;
use crate::http::{self, HttpVisit};
use crate::interrupt;
use crate::lab::{Lab, WireFault};
use crate::plot::{Chart, Curve, Curves};
use crate::report::{Bound, Goal, Report, median};
use crate::server::instance::InstanceStatus;

const NODES: usize = 3;

/// Uid of the database: no tenant's.
const MARIADB_UID: u32 = UID_BASE - 1;

/// Requests of one run; the packets are dropped during the middle one.
const REQUESTS: usize = 3_000;
const REQUESTS_QUICK: usize = 300;

/// Most further requests. Some applications respond so fast that dropping packets takes longer than
/// the second half.
const MORE_MAX: usize = 3_000;

/// One round is one request that finds out, so the short form has as many. Rounds without images
/// take longest and are fewer.
const ROUNDS: usize = 3;

/// With images at each node, and without any.
const VARIANTS: [(&str, &str); 2] = [(IMAGE, ""), (COLD, "[instances]\nimage_bytes = \"0B\"\n")];
const IMAGE: &str = "image";
const COLD: &str = "cold";

const DETECT: &str = "relocate-detect";

/// Stages of a response's route: `Server-Timing`, and the key in the result.
const STAGES: [(&str, &str); 6] = [
    (DETECT, "detect_ms"),
    ("relocate-decide", "decide_ms"),
    ("relocate-store", "store_ms"),
    ("fence", "fence_ms"),
    ("wake-restore", "restore_ms"),
    ("wake-boot", "boot_ms"),
];

const GOALS: [Goal; 4] = [
    Goal { key: "wordpress_peak_ms_image", bound: Bound::AtMost(250.0), aim: 150.0 },
    Goal { key: "redmine_peak_ms_image", bound: Bound::AtMost(250.0), aim: 150.0 },
    Goal { key: "django_peak_ms_image", bound: Bound::AtMost(250.0), aim: 150.0 },
    Goal { key: "errors", bound: Bound::AtMost(0.0), aim: 0.0 },
];

struct HostedSite {
    name: &'static str,
    uid: u32,
    app: ContentApp,
}

/// All of one run, in order.
struct RelocationSeries {
    app: &'static str,
    variant: &'static str,
    round: usize,
    asked: Vec<RelocationAnswer>,
    /// When the packets were dropped, milliseconds from the first request.
    cut_ms: f64,
}

struct RelocationAnswer {
    at_ms: f64,
    took_ms: f64,
    is_right: bool,
    /// Its `Server-Timing` fields.
    timings: Vec<String>,
}

pub fn run(setting: &ExperimentSetting) -> Result<()> {
    let mut report = Report::new("relocation");
    let rounds_of = |variant| if setting.quick && variant == COLD { 1 } else { ROUNDS };
    let requests = if setting.quick { REQUESTS_QUICK } else { REQUESTS };
    report.note("rounds", json!({ IMAGE: rounds_of(IMAGE), COLD: rounds_of(COLD) }));
    report.note("requests", json!(requests));
    report.note(
        "client",
        json!("one, closed loop, a connection for each request, at a node that does not run the site"),
    );
    report.note("images", json!("in each node's page cache when the packets are dropped"));
    let mut all = Vec::new();
    for (variant, tables) in VARIANTS {
        let lab = lab_with_fence(setting, &format!("move-{variant}"), NODES, tables, SHORT_FENCE_MS)?;
        report.note(&format!("lab {variant}"), setting_note(&lab)?);
        let mariadb = MariaDb::start(&lab.shared().join("mariadb"), MARIADB_UID)?;
        let apps = apps(&lab, &mariadb)?;
        import(&lab, &records(&apps))?;
        let rounds = rounds_of(variant);
        for round in 0..rounds {
            for hosted in &apps {
                let home = format!("n{}", round % NODES + 1);
                if variant == IMAGE {
                    let how = spread_images(&lab, hosted, &home)?;
                    report.note(&format!("images of {}", hosted.name), json!(how));
                }
                place_on(&lab, hosted.name, &home)?;
                if variant == IMAGE {
                    read_images(&lab)?;
                }
                let series = one_run(&lab, hosted, variant, round, &home, requests)?;
                sample(&mut report, &series);
                all.push(series);
                rejoin(&lab, hosted, &home)?;
            }
            eprintln!("{variant}: round {} of {rounds} done", round + 1);
        }
    }
    summarise(&mut report, &all)?;
    write_series(setting, &all)?;
    let chart = chart(&report);
    report.write(&setting.out, &chart, &GOALS)
}

fn apps(lab: &Lab, mariadb: &MariaDb) -> Result<Vec<HostedSite>> {
    eprintln!("preparing Django, WordPress and Redmine");
    let dir = |name: &str| lab.shared().join(name);
    let account = mariadb.database("wordpress")?;
    let hosted = |name, uid, app| HostedSite { name, uid, app };
    Ok(vec![
        hosted("django", UID_BASE, django::create(&dir("django"), UID_BASE)?),
        hosted(
            "wordpress",
            UID_BASE + 1,
            wordpress::create(&dir("wordpress"), UID_BASE + 1, &account, WordpressServer::Apache)?,
        ),
        hosted("redmine", UID_BASE + 2, redmine::create(&dir("redmine"), UID_BASE + 2)?),
    ])
}

fn records(apps: &[HostedSite]) -> Vec<serde_json::Value> {
    apps.iter()
        .flat_map(|hosted| {
            let tenant = json!({"tenant": {"name": hosted.name, "uid": hosted.uid, "gid": hosted.uid}});
            let mut records = vec![tenant];
            // Without the files of a static site: only the page is requested.
            let app = ContentApp { files: None, ..hosted.app.clone() };
            records.extend(app.records(hosted.name, hosted.name, &host(hosted.name)));
            records
        })
        .collect()
}

/// Waits until every node has the site's image. If they do not come by themselves, each node takes
/// one while it runs there.
fn spread_images(lab: &Lab, hosted: &HostedSite, home: &str) -> Result<&'static str> {
    /// From node to node, in the background.
    const COME_MAX: Duration = Duration::from_secs(20);
    place_on(lab, hosted.name, home)?;
    ensure!(visit(lab, hosted, home)?.1, "{} does not answer before anything happens", hosted.name);
    let lacks = |name: &String| -> Result<bool> {
        Ok(InstanceStatus::of_all(&lab.node(name)?)?
            .get(hosted.name)
            .is_none_or(|status| status.image_bytes.is_none()))
    };
    let begun = Instant::now();
    while begun.elapsed() < COME_MAX {
        interrupt::check()?;
        let lacking: Vec<bool> = lab.node_names().iter().map(lacks).collect::<Result<_>>()?;
        if !lacking.contains(&true) {
            return Ok("came from the node that took the first");
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    for name in lab.node_names() {
        if lacks(&name)? {
            place_on(lab, hosted.name, &name)?;
            ensure!(visit(lab, hosted, &name)?.1, "{} does not answer on {name}", hosted.name);
            until(&format!("{name} has an image of {}", hosted.name), || Ok(!lacks(&name)?))?;
        }
    }
    Ok("taken at each node")
}

/// Reads every image into the page cache, as on a host with spare memory. Otherwise the result
/// would be that of a disk. Some virtual machines return unused cache to their host within a
/// minute.
fn read_images(lab: &Lab) -> Result<()> {
    for name in lab.node_names() {
        read_all(&lab.node(&name)?.images())?;
    }
    Ok(())
}

fn read_all(dir: &Path) -> Result<()> {
    let entries = fs::read_dir(dir).with_context(|| format!("reading {}", dir.display()))?;
    for entry in entries {
        let path = entry.with_context(|| format!("reading {}", dir.display()))?.path();
        if path.is_dir() {
            read_all(&path)?;
        } else {
            let read = fs::File::open(&path).and_then(|mut file| io::copy(&mut file, &mut io::sink()));
            read.with_context(|| format!("reading {}", path.display()))?;
        }
    }
    Ok(())
}

fn visit(lab: &Lab, hosted: &HostedSite, edge: &str) -> Result<(HttpVisit, bool)> {
    let address = lab.address(edge)?;
    let page = hosted.app.page;
    let visit = lab.as_client(|| http::visit(address, &host(hosted.name), page.path))??;
    let is_right = visit.status == 200 && String::from_utf8_lossy(&visit.body).contains(page.text);
    Ok((visit, is_right))
}

/// Sends all requests of one client, one after the other, at an edge that survives.
fn one_run(
    lab: &Lab,
    hosted: &HostedSite,
    variant: &'static str,
    round: usize,
    home: &str,
    requests: usize,
) -> Result<RelocationSeries> {
    ensure!(is_on(lab, hosted.name, home)?, "{} is not on {home}", hosted.name);
    let edge = lab.node_names().into_iter().find(|name| name != home).context("a lab of one node")?;
    // Awake, with a connection between the nodes, as under steady load.
    for _ in 0..10 {
        ensure!(visit(lab, hosted, &edge)?.1, "{} does not answer by way of {edge}", hosted.name);
    }
    let (address, page, name) = (lab.address(&edge)?, hosted.app.page, host(hosted.name));
    let (tell, told) = std::sync::mpsc::channel();
    let begun = Instant::now();
    let since = || begun.elapsed().as_secs_f64() * 1e3;
    std::thread::scope(|scope| {
        let cutter = scope.spawn(move || -> Result<f64> {
            told.recv().context("no request was in the middle")?;
            lab.cut(home, WireFault::Silent)?;
            Ok(since())
        });
        let asked = lab.as_client(|| -> Result<Vec<RelocationAnswer>> {
            let mut all = Vec::with_capacity(requests);
            let mut has_moved = false;
            while all.len() < requests || !has_moved {
                interrupt::check()?;
                ensure!(
                    all.len() < requests + MORE_MAX,
                    "{} was not moved by any of its requests",
                    hosted.name
                );
                if all.len() == requests / 2 {
                    tell.send(()).context("telling that it is time")?;
                }
                let at_ms = since();
                let answer = http::visit(address, &name, page.path);
                let asked = judge(at_ms, since() - at_ms, answer, page.text);
                has_moved |= asked.has_moved();
                all.push(asked);
            }
            Ok(all)
        })??;
        let cut_ms = cutter.join().map_err(|_| anyhow!("cutting a wire panicked"))??;
        Ok(RelocationSeries { app: hosted.name, variant, round, asked, cut_ms })
    })
}

fn judge(at_ms: f64, took_ms: f64, answer: Result<HttpVisit>, text: &str) -> RelocationAnswer {
    match answer {
        Ok(visit) => {
            let is_right = visit.status == 200 && String::from_utf8_lossy(&visit.body).contains(text);
            if !is_right {
                let said: String = String::from_utf8_lossy(&visit.body).chars().take(300).collect();
                eprintln!("after {took_ms:.0} ms: {} {said}", visit.status);
            }
            RelocationAnswer { at_ms, took_ms, is_right, timings: timings(&visit) }
        }
        Err(error) => {
            eprintln!("after {took_ms:.0} ms: {error:#}");
            RelocationAnswer { at_ms, took_ms, is_right: false, timings: Vec::new() }
        }
    }
}

fn timings(visit: &HttpVisit) -> Vec<String> {
    visit.fields("server-timing").map(str::to_owned).collect()
}

/// Waits until the node is heard again, has given up its sites, and serves others' sites as any
/// node does.
fn rejoin(lab: &Lab, hosted: &HostedSite, home: &str) -> Result<()> {
    lab.heal(home)?;
    until(&format!("{home} answers again"), || {
        Ok(visit(lab, hosted, home).is_ok_and(|(_, is_right)| is_right))
    })
}

impl RelocationSeries {
    /// Returns the request that took the longest from the cut on.
    fn peak(&self) -> Option<&RelocationAnswer> {
        let after = self.asked.iter().filter(|asked| asked.at_ms + asked.took_ms >= self.cut_ms);
        after.max_by(|one, other| one.took_ms.total_cmp(&other.took_ms))
    }
}

fn sample(report: &mut Report, series: &RelocationSeries) {
    let (app, variant, round) = (series.app, series.variant, series.round);
    for asked in &series.asked {
        report.sample(round, app, variant, "request_ms", asked.took_ms);
    }
    let before = series.asked.iter().filter(|asked| asked.at_ms + asked.took_ms < series.cut_ms);
    if let Some(steady) = median(before.map(|asked| asked.took_ms).collect()) {
        report.sample(round, app, variant, "steady_ms", steady);
    }
    let errors = series.asked.iter().filter(|asked| !asked.is_right).count();
    report.sample(round, app, variant, "errors", to_float(errors));
    if let Some(peak) = series.peak() {
        report.sample(round, app, variant, "peak_ms", peak.took_ms);
    }
    // On a busy machine another request may have taken longer than the one that moved the site.
    let Some(mover) = series.asked.iter().find(|asked| asked.has_moved()) else { return };
    report.sample(round, app, variant, "mover_ms", mover.took_ms);
    report.note(
        &format!("{app}, {variant}, round {}: the request that moved it", round + 1),
        json!(mover.timings),
    );
    for (metric, key) in STAGES {
        if let Some(ms) = http::server_timing(&mover.timings, metric) {
            report.sample(round, app, variant, key, ms);
        }
    }
}

impl RelocationAnswer {
    /// Returns whether it found out that the node was gone.
    fn has_moved(&self) -> bool {
        http::server_timing(&self.timings, DETECT).is_some()
    }
}

fn summarise(report: &mut Report, all: &[RelocationSeries]) -> Result<()> {
    for app in ["wordpress", "redmine", "django"] {
        for (variant, _) in VARIANTS {
            let peak = report.median(app, variant, "peak_ms")?;
            report.set(format!("{app}_peak_ms_{variant}"), peak);
        }
        report.set(format!("{app}_steady_ms"), report.median(app, IMAGE, "steady_ms")?);
        report.set(format!("{app}_mover_ms"), report.median(app, IMAGE, "mover_ms")?);
        for (_, key) in STAGES {
            // Not every wake has every stage.
            if let Ok(ms) = report.median(app, IMAGE, key) {
                report.set(format!("{app}_{key}"), ms);
            }
        }
    }
    let wrong = all.iter().flat_map(|series| &series.asked).filter(|asked| !asked.is_right).count();
    report.set("errors", to_float(wrong));
    Ok(())
}

/// Writes every request of every run, as numbers and as curves.
fn write_series(setting: &ExperimentSetting, all: &[RelocationSeries]) -> Result<()> {
    fs::create_dir_all(&setting.out).with_context(|| format!("creating {}", setting.out.display()))?;
    let mut text = String::from("app,variant,round,number,at_ms,took_ms,right,cut_ms\n");
    for one in all {
        for (number, asked) in one.asked.iter().enumerate() {
            text.push_str(&format!(
                "{},{},{},{number},{:.3},{:.3},{},{:.3}\n",
                one.app, one.variant, one.round, asked.at_ms, asked.took_ms, asked.is_right, one.cut_ms
            ));
        }
    }
    let first = all.iter().filter(|one| one.round == 0);
    let curves = first.map(|one| Curve {
        title: format!("{}, {}", one.app, one.variant),
        unit: "milliseconds, by number of request".into(),
        values: one.asked.iter().map(|asked| asked.took_ms).collect(),
    });
    let svg = Curves {
        title: "A node falls silent".into(),
        subtitle: "each request of one client in the first round; packets are dropped midway".into(),
        curves: curves.collect(),
    }
    .svg();
    for (name, text) in [("relocation-series.csv", text), ("relocation-series.svg", svg)] {
        let path = setting.out.join(name);
        fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

fn chart(report: &Report) -> Chart {
    let variants = VARIANTS.map(|(variant, _)| variant);
    let panel = |app: &&str| report.panel(app, "milliseconds, longest request", app, "peak_ms", &variants);
    Chart {
        title: "A node falls silent: the request that finds out".into(),
        subtitle: "median of rounds, whiskers: least and greatest".into(),
        panels: ["wordpress", "redmine", "django"].iter().map(panel).collect(),
    }
}
