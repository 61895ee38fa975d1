//! `vm-wake`: a visitor's wait for the first byte of a page of Django in a machine, from each tier,
//! beside the same application without a machine.
//!
//! A wake has two halves: until the application runs again, and from then to its first byte. An
//! image is hot where the node has used it a moment ago; otherwise its files are not in the page
//! cache. Not here: other applications (`instances::wake`).

use std::fs::{self, File};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};
use nagaya_records::instance::Tier;
use rustix::fs::{Advice, fadvise};
use serde_json::json;

use super::{START_SECONDS, kernels, private_bytes, running_ms};
use crate::clients::to_float;
use crate::experiment::harness::ExperimentSetting;
use crate::experiment::instances::{AppHosting, HostedApp, journals};
use crate::plot::Chart;
use crate::report::{Bound, Goal, Report};

/// Memory of the guest: with 64 MB gunicorn thrashes.
const MEMORY: &str = "160M";

/// An emulated CPU may need longer for the first page than gunicorn lets a worker compute.
const WORKER_TIMEOUT: &str = "--timeout=300";

const ROUNDS: usize = 15;
const ROUNDS_QUICK: usize = 3;

/// Pause between a rest and a wake. The end of the processes is not part of the wake.
const PAUSE: Duration = Duration::from_millis(50);

/// Visits until a woken application is as fast as one that has run for a while.
const SETTLING: usize = 12;

/// The two applications.
const MACHINE: &str = "machine";
const CONTAINER: &str = "container";

/// The tier before the visit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WakeFrom {
    Frozen,
    Image,
    /// Its files are not in the page cache.
    ImageColdCache,
    /// On a node that keeps no images. A machine begins as a copy of its template.
    Cold,
}

impl WakeFrom {
    const ALL: [Self; 4] = [Self::Frozen, Self::Image, Self::ImageColdCache, Self::Cold];

    fn name(self) -> &'static str {
        match self {
            Self::Frozen => "frozen",
            Self::Image => "image",
            Self::ImageColdCache => "image_cold_cache",
            Self::Cold => "cold",
        }
    }

    fn tier(self) -> Tier {
        match self {
            Self::Frozen => Tier::Frozen,
            Self::Image | Self::ImageColdCache => Tier::Image,
            Self::Cold => Tier::Cold,
        }
    }

    /// Returns the visits in each round. A thaw adds less than the variation of a page's own time.
    fn times(self) -> usize {
        if self == Self::Frozen { 6 } else { 1 }
    }
}

const GOALS: [Goal; 4] = [
    Goal { key: "thaw_ms", bound: Bound::AtMost(5.0), aim: 1.0 },
    Goal { key: "thaw_running_ms", bound: Bound::AtMost(5.0), aim: 1.0 },
    Goal { key: "image_first_ms", bound: Bound::AtMost(250.0), aim: 150.0 },
    Goal { key: "errors", bound: Bound::AtMost(0.0), aim: 0.0 },
];

pub fn run(setting: &ExperimentSetting) -> Result<()> {
    let mut report = Report::new("vm-wake");
    let apps = apps(setting)?;
    let kernels = format!("kernels = \"{}\"\n", kernels()?.display());
    let node = AppHosting::start(setting, "nagaya", &apps, &kernels)?;
    let bare = AppHosting::start(setting, "no-images", &apps, &format!("{kernels}image_bytes = \"0B\"\n"))?;
    let rounds = if setting.quick { ROUNDS_QUICK } else { ROUNDS };
    report.note("rounds", json!(rounds));
    report.note("memory of the guest", json!(MEMORY));
    let mut visits = WakeVisits { report: &mut report, node: &node, bare: &bare, errors: 0 };
    for hosted in &apps {
        eprintln!("starting the {}", hosted.name);
        visits.prepare(hosted)?;
    }
    for round in 0..rounds {
        for hosted in &apps {
            let mut order = WakeFrom::ALL;
            order.rotate_left(round % WakeFrom::ALL.len());
            for from in order {
                for _ in 0..from.times() {
                    visits.measure(round, hosted, from)?;
                }
            }
            visits.memory(round, hosted)?;
        }
        eprintln!("round {} of {rounds} done", round + 1);
    }
    let errors = visits.errors;
    summarise(&mut report, MACHINE, "")?;
    summarise(&mut report, CONTAINER, "container_")?;
    report.set("errors", to_float(errors));
    let chart = chart(&report);
    report.write(&setting.out, &chart, &GOALS)
}

/// Returns the same application twice, the first one in a machine.
fn apps(setting: &ExperimentSetting) -> Result<Vec<HostedApp>> {
    let mut apps = journals(setting.dir(), 2)?;
    for (hosted, name) in apps.iter_mut().zip([MACHINE, CONTAINER]) {
        hosted.name = name.into();
        let backend = &mut hosted.app.backend;
        let command = backend["command"].as_array_mut().context("the command of an application")?;
        command.insert(1, json!(WORKER_TIMEOUT));
        hosted.app.backend["start_seconds"] = json!(START_SECONDS);
        hosted.app.backend["timeout_seconds"] = json!(START_SECONDS);
    }
    apps[0].app.backend["machine"] = json!({"kernel": "node", "memory": MEMORY, "vcpus": 1});
    Ok(apps)
}

struct WakeVisits<'a> {
    report: &'a mut Report,
    node: &'a AppHosting,
    /// It keeps no images.
    bare: &'a AppHosting,
    errors: usize,
}

impl<'a> WakeVisits<'a> {
    fn hosting(&self, from: WakeFrom) -> &'a AppHosting {
        if from == WakeFrom::Cold { self.bare } else { self.node }
    }

    /// Visits once; returns milliseconds to the first byte.
    fn get(&mut self, hosting: &AppHosting, hosted: &HostedApp) -> Result<f64> {
        let (visit, is_right) = hosting.visit(&hosted.name, hosted.app.page)?;
        self.errors += usize::from(!is_right);
        Ok(visit.first_byte_ms)
    }

    /// Starts it on both nodes. Work that only the first start does is not part of the others.
    fn prepare(&mut self, hosted: &HostedApp) -> Result<()> {
        self.get(self.bare, hosted)?;
        self.bare.rest(&hosted.name, Tier::Cold)?;
        self.get(self.node, hosted)?;
        let status = self.node.status(&hosted.name)?;
        let bytes = status.image_bytes.with_context(|| format!("{} has no image", hosted.name))?;
        self.report.sample(0, &hosted.name, "image", "image_mb", bytes / 1e6);
        Ok(())
    }

    /// Brings it to the tier.
    fn make_ready(&mut self, hosted: &HostedApp, from: WakeFrom) -> Result<()> {
        let hosting = self.hosting(from);
        let name = &hosted.name;
        if from == WakeFrom::Image {
            // A hot image is one that was used a moment ago.
            hosting.rest(name, Tier::Image)?;
        }
        if from == WakeFrom::Frozen {
            for _ in 0..SETTLING {
                self.get(hosting, hosted)?;
            }
        }
        if hosting.status(name)?.tier < Tier::Running {
            self.get(hosting, hosted)?;
        }
        hosting.rest(name, from.tier())?;
        if from == WakeFrom::ImageColdCache {
            rustix::fs::sync();
            forget(&hosting.node.images())?;
        }
        std::thread::sleep(PAUSE);
        Ok(())
    }

    fn measure(&mut self, round: usize, hosted: &HostedApp, from: WakeFrom) -> Result<()> {
        let (name, hosting) = (&hosted.name, self.hosting(from));
        self.make_ready(hosted, from)?;
        let first = self.get(hosting, hosted)?;
        let status = hosting.status(name)?;
        // In the same state, a moment later: the time of a visit without a wake.
        let warm = self.get(hosting, hosted)?;
        hosting.ensure_woken_from(name, &status, from.tier())?;
        let variant = from.name();
        eprintln!(
            "{name}, {variant}: runs after {:.1} ms, first byte after {first:.1} ms",
            running_ms(&status)
        );
        self.report.sample(round, name, variant, "running_ms", running_ms(&status));
        self.report.sample(round, name, variant, "first_ms", first);
        self.report.sample(round, name, variant, "added_ms", first - warm);
        self.report.sample(round, name, variant, "warm_ms", warm);
        if from == WakeFrom::Cold {
            hosting.rest(name, Tier::Cold)?;
        }
        Ok(())
    }

    /// Records its memory after a few pages.
    fn memory(&mut self, round: usize, hosted: &HostedApp) -> Result<()> {
        for _ in 0..SETTLING {
            self.get(self.node, hosted)?;
        }
        let status = self.node.status(&hosted.name)?;
        let bytes = status.memory_bytes.context("the memory of a running instance")?;
        self.report.sample(round, &hosted.name, "running", "pss_mb", bytes / 1e6);
        let private = private_bytes(&status.pids);
        self.report.sample(round, &hosted.name, "running", "private_mb", private / 1e6);
        Ok(())
    }
}

/// Takes all files below a directory out of the page cache.
fn forget(dir: &Path) -> Result<()> {
    for entry in fs::read_dir(dir).with_context(|| format!("reading {}", dir.display()))?.flatten() {
        let path = entry.path();
        if path.is_dir() && !path.is_symlink() {
            forget(&path)?;
        } else if path.is_file() {
            let file = File::open(&path).with_context(|| format!("opening {}", path.display()))?;
            fadvise(&file, 0, None, Advice::DontNeed).context("forgetting a file")?;
        }
    }
    Ok(())
}

fn summarise(report: &mut Report, name: &str, prefix: &str) -> Result<()> {
    for (key, from, metric) in [
        ("thaw_ms", "frozen", "added_ms"),
        ("thaw_running_ms", "frozen", "running_ms"),
        ("thaw_first_ms", "frozen", "first_ms"),
        ("image_running_ms", "image", "running_ms"),
        ("image_first_ms", "image", "first_ms"),
        ("image_cold_cache_running_ms", "image_cold_cache", "running_ms"),
        ("image_cold_cache_ms", "image_cold_cache", "first_ms"),
        ("cold_running_ms", "cold", "running_ms"),
        ("cold_first_ms", "cold", "first_ms"),
        ("warm_ms", "frozen", "warm_ms"),
        ("image_mb", "image", "image_mb"),
        ("pss_mb", "running", "pss_mb"),
        ("private_mb", "running", "private_mb"),
    ] {
        report.set(format!("{prefix}{key}"), report.median(name, from, metric)?);
    }
    Ok(())
}

fn chart(report: &Report) -> Chart {
    let all = WakeFrom::ALL.map(WakeFrom::name);
    let panels = [MACHINE, CONTAINER].into_iter().flat_map(|name| {
        let panel = |what: &str, metric: &str| {
            report.panel(&format!("{name}: {what}"), "milliseconds", name, metric, &all)
        };
        [panel("first byte", "first_ms"), panel("until it runs", "running_ms")]
    });
    Chart {
        title: "First byte of a page of Django that rests, in a machine and without".into(),
        subtitle: "through the edge, on a new connection; median, whiskers: least and greatest round".into(),
        panels: panels.collect(),
    }
}
