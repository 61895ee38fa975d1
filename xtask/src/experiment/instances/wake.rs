//! `wake`: a visitor's wait for the first byte of a page from a database, for an application at
//! each tier. Requests go through the edge. The applications are Django on gunicorn, WordPress on
//! Apache and on php-fpm, Redmine on puma.
//!
//! Not here: many at once (`parallel`), the cost of rest (`rest_cost`).

use std::time::Duration;

use anyhow::{Context as _, Result};
use nagaya_records::instance::{Tier, WakeStage};
use serde_json::json;

use super::{AppHosting, HostedApp, place, swap, uid};
use crate::clients::to_float;
use crate::content::mariadb::MariaDb;
use crate::content::population::UID_BASE;
use crate::content::wordpress::{self, WordpressServer};
use crate::content::{ContentApp, django, redmine};
use crate::experiment::harness::ExperimentSetting;
use crate::huge_pages;
use crate::plot::Chart;
use crate::report::{Bound, Goal, Report};
use crate::server::instance::InstanceStatus;

/// Time after which a virtual machine's host may reclaim idle memory. An image that was not used
/// for this long is restored into pages that must be found again.
const IDLE: Duration = Duration::from_secs(4);

/// Pause between a rest and a hot wake. The kernel's clean-up of the ended processes is not part of
/// the next wake.
const PAUSE: Duration = Duration::from_millis(30);

/// Visits until a woken application is as fast as one that has run for a while. It copies, or reads
/// from swap, each page on its first use, and its garbage is collected.
const SETTLING: usize = 12;

/// MariaDB runs under a uid that no tenant has.
const MARIADB_UID: u32 = UID_BASE - 1;

/// The application's tier before the visit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WakeFrom {
    /// On a node that keeps no images.
    Cold,
    /// The first one after visits from other tiers. That is after `Cold`, which loads the machine
    /// with a start of the same application, or after the other applications.
    ImageFirst,
    Image,
    /// Into memory in pages of 64 KiB, as with `huge_pages`.
    Image64KiB,
    ImageIdle,
    Frozen,
    Reclaimed,
    Warm,
}

impl WakeFrom {
    const ALL: [Self; 8] = [
        Self::Cold,
        Self::ImageFirst,
        Self::Image,
        Self::Image64KiB,
        Self::ImageIdle,
        Self::Frozen,
        Self::Reclaimed,
        Self::Warm,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Cold => "cold",
            Self::ImageFirst => "image, first",
            Self::Image => "image",
            Self::Image64KiB => "image, pages of 64 KiB",
            Self::ImageIdle => "image after 4 s",
            Self::Frozen => "frozen",
            Self::Reclaimed => "reclaimed",
            Self::Warm => "warm",
        }
    }

    /// Returns the visits in each round. A tier that adds less than the variation of a page's own
    /// time is measured more often.
    fn times(self) -> usize {
        match self {
            Self::Frozen | Self::Reclaimed | Self::Warm => 4,
            Self::Image | Self::Image64KiB => 2,
            _ => 1,
        }
    }

    fn tier(self) -> Tier {
        match self {
            Self::Cold => Tier::Cold,
            Self::ImageFirst | Self::Image | Self::Image64KiB | Self::ImageIdle => Tier::Image,
            Self::Frozen => Tier::Frozen,
            Self::Reclaimed => Tier::Reclaimed,
            Self::Warm => Tier::Running,
        }
    }
}

const GOALS: [Goal; 9] = [
    Goal { key: "django_image_ms", bound: Bound::AtMost(50.0), aim: 25.0 },
    Goal { key: "wordpress_apache_image_ms", bound: Bound::AtMost(85.0), aim: 50.0 },
    Goal { key: "wordpress_fpm_image_ms", bound: Bound::AtMost(85.0), aim: 50.0 },
    Goal { key: "redmine_image_ms", bound: Bound::AtMost(95.0), aim: 50.0 },
    Goal { key: "django_frozen_added_ms", bound: Bound::AtMost(5.0), aim: 1.0 },
    Goal { key: "wordpress_apache_frozen_added_ms", bound: Bound::AtMost(5.0), aim: 1.0 },
    Goal { key: "wordpress_fpm_frozen_added_ms", bound: Bound::AtMost(5.0), aim: 1.0 },
    Goal { key: "redmine_frozen_added_ms", bound: Bound::AtMost(5.0), aim: 1.0 },
    Goal { key: "errors", bound: Bound::AtMost(0.0), aim: 0.0 },
];

pub fn run(setting: &ExperimentSetting) -> Result<()> {
    let mut report = Report::new("wake");
    // It ends after the nodes: its content is their instances'.
    let swap = swap(setting, &mut report);
    let mariadb = MariaDb::start(&setting.dir().join("mariadb"), MARIADB_UID)?;
    let apps = apps(setting, &mariadb)?;
    let node = AppHosting::start(setting, "nagaya", &apps, "")?;
    let bare = AppHosting::start(setting, "no-images", &apps, "image_bytes = \"0B\"\n")?;
    let rounds = if setting.quick { 5 } else { 15 };
    report.note("rounds", json!(rounds));
    report.note("CRIU", node.criu()?);

    let mut visits = WakeVisits { report: &mut report, errors: 0 };
    let mut froms = Vec::new();
    for hosted in &apps {
        froms.push(prepare(&mut visits, &node, &bare, hosted, swap.is_some())?);
    }
    for round in 0..rounds {
        for (hosted, froms) in apps.iter().zip(&froms) {
            let mut order = froms.clone();
            order.rotate_left(round % froms.len());
            for from in order {
                let hosting = if from == WakeFrom::Cold { &bare } else { &node };
                visits.make_ready(hosting, hosted, from)?;
                for _ in 0..from.times() {
                    visits.measure(round, hosting, hosted, from)?;
                }
            }
        }
        eprintln!("round {} of {rounds} done", round + 1);
    }
    let errors = visits.errors;
    for hosted in &apps {
        summarise(&mut report, &hosted.name)?;
    }
    report.set("errors", to_float(errors));
    let chart = chart(&report, &apps);
    report.write(&setting.out, &chart, &GOALS)
}

fn apps(setting: &ExperimentSetting, mariadb: &MariaDb) -> Result<Vec<HostedApp>> {
    eprintln!("preparing Django, WordPress and Redmine");
    let dir = |name: &str| place(setting.dir(), name);
    let (django_uid, apache_uid, redmine_uid, fpm_uid) = (uid(0)?, uid(1)?, uid(2)?, uid(3)?);
    let hosted = |name: &str, uid: u32, app: ContentApp| HostedApp { name: name.into(), uid, app };
    Ok(vec![
        hosted("django", django_uid, django::create(&dir("django"), django_uid)?),
        hosted(
            "wordpress_apache",
            apache_uid,
            wordpress::create(
                &dir("wordpress"),
                apache_uid,
                &mariadb.database("wordpress")?,
                WordpressServer::Apache,
            )?,
        ),
        hosted(
            "wordpress_fpm",
            fpm_uid,
            wordpress::create(
                &dir("wordpress-fpm"),
                fpm_uid,
                &mariadb.database("fpm")?,
                WordpressServer::PhpFpm,
            )?,
        ),
        hosted("redmine", redmine_uid, redmine::create(&dir("redmine"), redmine_uid)?),
    ])
}

/// Starts an application for the first time on both nodes, with its image taken on one. Returns the
/// tiers from which it can be woken.
fn prepare(
    visits: &mut WakeVisits<'_>,
    node: &AppHosting,
    bare: &AppHosting,
    hosted: &HostedApp,
    has_swap: bool,
) -> Result<Vec<WakeFrom>> {
    let name = &hosted.name;
    // Twice: work that only the first start does is not part of the others.
    for hosting in [bare, node] {
        visits.get(hosting, hosted)?;
        visits.get(hosting, hosted)?;
    }
    bare.rest(name, Tier::Cold)?;
    let status = node.status(name)?;
    visits.stages(0, hosted, "first start", &status);
    let mut froms = WakeFrom::ALL.to_vec();
    match status.image_bytes {
        Some(bytes) => visits.report.set(format!("{name}_image_mb"), bytes / 1e6),
        None => {
            let why = status.note.unwrap_or_else(|| "no image was taken, and nothing says why".into());
            eprintln!("{name} has no image: {why}");
            visits.report.note(&format!("{name} has no image"), json!(why));
            froms.retain(|from| from.tier() != Tier::Image);
        }
    }
    if !huge_pages::are_known() {
        visits.report.note("pages of 64 KiB", json!("not measured: this kernel has none"));
        froms.retain(|from| *from != WakeFrom::Image64KiB);
    }
    if !has_swap {
        froms.retain(|from| *from != WakeFrom::Reclaimed);
    }
    Ok(froms)
}

struct WakeVisits<'r> {
    report: &'r mut Report,
    errors: usize,
}

impl WakeVisits<'_> {
    /// Visits once; returns milliseconds to the first and to the last byte.
    fn get(&mut self, hosting: &AppHosting, hosted: &HostedApp) -> Result<(f64, f64)> {
        let (visit, is_right) = hosting.visit(&hosted.name, hosted.app.page)?;
        self.errors += usize::from(!is_right);
        Ok((visit.first_byte_ms, visit.whole_ms))
    }

    /// Prepares the tier. The cost of an earlier wake must not mix with that of this tier. A hot
    /// image is one that was used a moment ago.
    fn make_ready(&mut self, hosting: &AppHosting, hosted: &HostedApp, from: WakeFrom) -> Result<()> {
        match from {
            WakeFrom::Image | WakeFrom::Image64KiB => {
                hosting.rest(&hosted.name, Tier::Image)?;
                self.get(hosting, hosted)?;
            }
            WakeFrom::Frozen | WakeFrom::Reclaimed | WakeFrom::Warm => {
                for _ in 0..SETTLING {
                    self.get(hosting, hosted)?;
                }
            }
            WakeFrom::Cold | WakeFrom::ImageFirst | WakeFrom::ImageIdle => {}
        }
        Ok(())
    }

    fn measure(
        &mut self,
        round: usize,
        hosting: &AppHosting,
        hosted: &HostedApp,
        from: WakeFrom,
    ) -> Result<()> {
        let name = &hosted.name;
        if from == WakeFrom::Warm {
            self.get(hosting, hosted)?;
        } else {
            if hosting.status(name)?.tier < from.tier() {
                self.get(hosting, hosted)?;
            }
            hosting.rest(name, from.tier())?;
        }
        match from {
            WakeFrom::Image | WakeFrom::Image64KiB | WakeFrom::ImageFirst => std::thread::sleep(PAUSE),
            WakeFrom::ImageIdle => std::thread::sleep(IDLE),
            WakeFrom::Cold | WakeFrom::Frozen | WakeFrom::Reclaimed | WakeFrom::Warm => {}
        }
        if huge_pages::are_known() {
            huge_pages::set(from == WakeFrom::Image64KiB)?;
        }
        let (first, whole) = self.get(hosting, hosted)?;
        // In the same state, a moment later: the time of a visit without a wake.
        let (warm, _) = self.get(hosting, hosted)?;
        let variant = from.name();
        self.report.sample(round, name, variant, "first_byte_ms", first);
        self.report.sample(round, name, variant, "whole_ms", whole);
        self.report.sample(round, name, variant, "added_ms", first - warm);
        let status = hosting.status(name)?;
        if from == WakeFrom::Warm {
            let bytes = status.memory_bytes.context("the memory of a running instance")?;
            self.report.sample(round, name, variant, "pss_mb", bytes / 1e6);
        } else {
            hosting.ensure_woken_from(name, &status, from.tier())?;
            self.stages(round, hosted, variant, &status);
        }
        Ok(())
    }

    /// Records the stages of the last wake.
    fn stages(&mut self, round: usize, hosted: &HostedApp, variant: &str, status: &InstanceStatus) {
        let stages = status.last_wake.iter().flat_map(|wake| &wake.stages);
        for (stage, us) in stages {
            #[expect(clippy::cast_precision_loss, reason = "microseconds of a wake stay far below 2^53")]
            let ms = *us as f64 / 1e3;
            self.report.sample(round, &hosted.name, variant, stage_metric(*stage), ms);
        }
    }
}

fn stage_metric(stage: WakeStage) -> &'static str {
    match stage {
        WakeStage::Decide => "decide_ms",
        WakeStage::Queue => "queue_ms",
        WakeStage::Thaw => "thaw_ms",
        WakeStage::Sandbox => "sandbox_ms",
        WakeStage::Restore => "restore_ms",
        WakeStage::Boot => "boot_ms",
        WakeStage::Ready => "ready_ms",
        WakeStage::Image => "taking_image_ms",
        WakeStage::Connect => "connect_ms",
    }
}

fn summarise(report: &mut Report, name: &str) -> Result<()> {
    for (key, from, metric) in [
        ("cold_ms", WakeFrom::Cold, "first_byte_ms"),
        ("image_ms", WakeFrom::Image, "first_byte_ms"),
        ("image_first_ms", WakeFrom::ImageFirst, "first_byte_ms"),
        ("image_64k_ms", WakeFrom::Image64KiB, "first_byte_ms"),
        ("image_idle_ms", WakeFrom::ImageIdle, "first_byte_ms"),
        ("image_restore_ms", WakeFrom::Image, "restore_ms"),
        ("frozen_added_ms", WakeFrom::Frozen, "added_ms"),
        ("trimmed_added_ms", WakeFrom::Reclaimed, "added_ms"),
        ("warm_ms", WakeFrom::Warm, "first_byte_ms"),
        ("pss_mb", WakeFrom::Warm, "pss_mb"),
    ] {
        let optional = matches!(from.tier(), Tier::Image | Tier::Reclaimed);
        match report.median(name, from.name(), metric) {
            Err(_) if optional => {}
            median => report.set(format!("{name}_{key}"), median?),
        }
    }
    Ok(())
}

fn chart(report: &Report, apps: &[HostedApp]) -> Chart {
    let all = WakeFrom::ALL.map(WakeFrom::name);
    let woken: Vec<&str> = all.iter().copied().filter(|name| *name != "cold").collect();
    let panels = apps.iter().flat_map(|hosted| {
        let panel = |what: &str, variants: &[&str]| {
            let title = format!("{}, {what}", hosted.name.replace('_', " on "));
            report.panel(&title, "milliseconds", &hosted.name, "first_byte_ms", variants)
        };
        [panel("from all", &all), panel("without a start", &woken)]
    });
    Chart {
        title: "First byte of a page whose application rests".into(),
        subtitle: "through the edge, on a new connection; median, whiskers: least and greatest round".into(),
        panels: panels.collect(),
    }
}
