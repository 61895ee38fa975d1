//! `vm-idle`: the time of a busy machine's page beside idle machines: as the paper had them (nice 0
//! and a periodic tick), and as nagaya lets them rest (quiet and frozen).
//!
//! The page beside machines that rest as images is the measure: those have no process. An emulated
//! CPU cannot carry very many periodic ticks: 144 took a machine with two cores down. So that set
//! is left out where there are more than 20 machines for each core, and a key says so. So is a
//! number of machines that the memory does not hold. Not here: other levers (`levers`).

use std::time::Duration;

use anyhow::Result;
use nagaya_records::instance::Tier;
use serde_json::{Value, json};

use super::bare::{BareCrowd, BareTemplate, GuestTick};
use super::busy::{self, BusyWindow, OtherMachines};
use super::scheduler::NoAutogroup;
use super::{MachineCrowd, PageDatabases, backend, kernels, processors, program, site, start, tenant};
use crate::clients::ClientQuestion;
use crate::content::population::{SITES_PER_TENANT, UID_BASE};
use crate::experiment::harness::ExperimentSetting;
use crate::experiment::instances::AppHosting;
use crate::plot::Chart;
use crate::report::{Bound, Goal, Report};

/// Numbers of idle machines.
const COUNTS: [usize; 3] = [12, 40, 144];
const COUNTS_QUICK: [usize; 2] = [40, 144];

/// Machines with a periodic tick that one core carries.
const PERIODIC_PER_CORE: usize = 20;

const ROUNDS: usize = 5;
const ROUNDS_QUICK: usize = 2;

const WINDOW: Duration = Duration::from_secs(20);
const WINDOW_QUICK: Duration = Duration::from_secs(6);

/// The measure of all sets.
const ALONE: &str = "alone";
const DEFAULT: &str = "default";
const QUIET: &str = "quiet";
const FROZEN: &str = "frozen";

const SETS: [&str; 4] = [ALONE, DEFAULT, FROZEN, QUIET];

const GOALS: [Goal; 6] = [
    Goal { key: "p50_ratio_frozen_12", bound: Bound::AtMost(1.05), aim: 1.0 },
    Goal { key: "p50_ratio_frozen_40", bound: Bound::AtMost(1.05), aim: 1.0 },
    Goal { key: "p50_ratio_frozen_144", bound: Bound::AtMost(1.05), aim: 1.0 },
    Goal { key: "p50_ratio_quiet_12", bound: Bound::AtMost(1.15), aim: 1.0 },
    Goal { key: "p50_ratio_quiet_40", bound: Bound::AtMost(1.15), aim: 1.0 },
    Goal { key: "p50_ratio_quiet_144", bound: Bound::AtMost(1.15), aim: 1.0 },
];

pub fn run(setting: &ExperimentSetting) -> Result<()> {
    let mut report = Report::new("vm-idle");
    let _group = NoAutogroup::set();
    let counts = if setting.quick { &COUNTS_QUICK[..] } else { &COUNTS };
    let (rounds, window) = if setting.quick { (ROUNDS_QUICK, WINDOW_QUICK) } else { (ROUNDS, WINDOW) };
    let databases = PageDatabases::start(setting.dir())?;
    let mut records = busy::records(setting.dir(), &databases)?;
    let most = counts.iter().copied().max().unwrap_or(0);
    records.extend(idle_records(setting, most)?);
    let hosting = start(setting, "nagaya", &records, "", Vec::new())?;
    let template = BareTemplate::make(&setting.dir().join("bare"), &kernels()?, GuestTick::Periodic)?;
    report.note("rounds", json!(rounds));
    report.note("a window, s", json!(window.as_secs()));
    report.note("the busy page asks", json!(databases.names()[0]));
    report.note("alone", json!("the idle machines rest as images, so they have no process"));
    let question = busy::begin(&hosting, &databases)?;
    let mut idle = IdleMachines {
        hosting: &hosting,
        crowd: MachineCrowd { names: Vec::new() },
        template: &template,
        question: &question,
        window,
    };
    let mut measured = Vec::new();
    for count in counts {
        idle.crowd.names = (0..*count).map(name).collect();
        eprintln!("starting {count} machines");
        idle.crowd.fill(&hosting)?;
        if idle.crowd.names.len() < *count {
            report.set(format!("machines_{count}_left_out"), 1.0);
            break;
        }
        measured.push(*count);
        for round in 0..rounds {
            let mut order = sets(*count);
            let turns = round % order.len();
            order.rotate_left(turns);
            for set in order {
                idle.measure(&mut report, round, set)?;
            }
            eprintln!("{count} machines: round {} of {rounds} done", round + 1);
        }
        summarise(&mut report, *count)?;
    }
    let chart = chart(&report, &measured);
    report.write(&setting.out, &chart, &GOALS)
}

/// Returns the sets that this machine carries with so many idle machines.
fn sets(count: usize) -> Vec<&'static str> {
    let is_carried = count <= PERIODIC_PER_CORE * processors();
    SETS.into_iter().filter(|set| *set != DEFAULT || is_carried).collect()
}

fn name(index: usize) -> String {
    format!("idle-{index}")
}

fn idle_records(setting: &ExperimentSetting, count: usize) -> Result<Vec<Value>> {
    let mut records = Vec::new();
    for first in (0..count).step_by(SITES_PER_TENANT) {
        let number = first / SITES_PER_TENANT;
        // The first uid is the busy site's.
        let (owner, uid) = (format!("idler-{number}"), UID_BASE + 1 + u32::try_from(number)?);
        records.push(tenant(&owner, uid));
        let backend = backend(&program(setting.dir(), &owner, uid)?);
        let sites = first..count.min(first + SITES_PER_TENANT);
        records.extend(sites.map(|index| site(&name(index), &owner, &backend)));
    }
    Ok(records)
}

/// The idle machines of both kinds, and the client of the busy one.
struct IdleMachines<'a> {
    hosting: &'a AppHosting,
    crowd: MachineCrowd,
    template: &'a BareTemplate,
    question: &'a ClientQuestion,
    window: Duration,
}

impl IdleMachines<'_> {
    fn measure(&mut self, report: &mut Report, round: usize, set: &str) -> Result<()> {
        let tier = match set {
            QUIET => Tier::Quiet,
            FROZEN => Tier::Frozen,
            _ => Tier::Image,
        };
        self.crowd.rest(self.hosting, tier)?;
        let count = self.crowd.names.len();
        let bare = if set == DEFAULT { Some(BareCrowd::start(self.template, count)?) } else { None };
        let pids = match (&bare, tier) {
            (Some(bare), _) => bare.pids(),
            (None, Tier::Image) => Vec::new(),
            (None, _) => self.crowd.pids(self.hosting)?,
        };
        // Otherwise new images are still on their way to the disk.
        rustix::fs::sync();
        let figures = BusyWindow::measure(self.question, self.window, &OtherMachines::resting(pids))?;
        figures.report(report, round, &case(count), set);
        Ok(())
    }
}

fn case(count: usize) -> String {
    format!("beside {count}")
}

fn summarise(report: &mut Report, count: usize) -> Result<()> {
    let case = case(count);
    report.set(format!("p50_ms_{ALONE}_{count}"), report.median(&case, ALONE, "p50_ms")?);
    let sets = sets(count);
    for set in SETS {
        if !sets.contains(&set) {
            report.set(format!("{set}_{count}_left_out"), 1.0);
            continue;
        }
        if set != ALONE {
            report.set(format!("p50_ratio_{set}_{count}"), report.ratio(&case, set, ALONE, "p50_ms")?);
            report.set(format!("p95_ratio_{set}_{count}"), report.ratio(&case, set, ALONE, "p95_ms")?);
            report.set(format!("cpu_pct_{set}_{count}"), report.median(&case, set, "cpu_pct")?);
        }
        let switches = report.median(&case, set, "switches_per_s")?;
        report.set(format!("switches_per_s_{set}_{count}"), switches);
        report.set(format!("load_{set}_{count}"), report.median(&case, set, "load")?);
    }
    Ok(())
}

fn chart(report: &Report, counts: &[usize]) -> Chart {
    let panels = counts.iter().flat_map(|count| {
        let panel = |title: &str, unit: &str, metric: &str| {
            report.panel(&format!("{count} idle: {title}"), unit, &case(*count), metric, &SETS)
        };
        [panel("page, median", "milliseconds", "p50_ms"), panel("switches", "per second", "switches_per_s")]
    });
    Chart {
        title: "A busy machine's page beside idle machines".into(),
        subtitle: "through the edge, one client; median, whiskers: least and greatest round".into(),
        panels: panels.collect(),
    }
}
