//! `vm-density`: how many machines fit a node, all copies of one template: their own memory while
//! they are frozen, the time to restore one while the others rest, and a page of each in random
//! order.
//!
//! As many are started as fit 16 GiB, or the part of the machine's memory that may be used. The
//! application is small: the guest's memory is what it touches. Not here: what they cost others
//! (`idle`).

use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use nagaya_records::instance::Tier;
use serde_json::{Value, json};

use super::{
    GIB, MEMORY_FREE, MachineCrowd, PLAIN_PAGE, available, backend, private_bytes, program, running_ms,
    shuffled, site, start, tenant, visit_all,
};
use crate::clients::{ClientAnswers, to_float};
use crate::content::population::{SITES_PER_TENANT, UID_BASE};
use crate::experiment::harness::ExperimentSetting;
use crate::experiment::instances::AppHosting;
use crate::interrupt;
use crate::plot::Chart;
use crate::report::{Bound, Goal, Report};
use crate::server::instance::InstanceStatus;

/// Most machines.
const COUNT: usize = 1_000;
const COUNT_QUICK: usize = 100;

/// Memory for all of them, bytes.
const MEMORY_MAX: f64 = 16.0 * GIB;

/// Machines that run at the same time, before they are frozen again.
const BATCH: usize = 20;

/// Machines that also rest as images.
const IMAGED: usize = 40;
const IMAGED_QUICK: usize = 10;

const CASE: &str = "machines";

const GOALS: [Goal; 3] = [
    Goal { key: "frozen_private_mb_each", bound: Bound::AtMost(25.0), aim: 20.0 },
    Goal { key: "imaged_private_mb_each", bound: Bound::AtMost(0.0), aim: 0.0 },
    Goal { key: "errors", bound: Bound::AtMost(0.0), aim: 0.0 },
];

pub fn run(setting: &ExperimentSetting) -> Result<()> {
    let mut report = Report::new("vm-density");
    let (count, imaged) = if setting.quick { (COUNT_QUICK, IMAGED_QUICK) } else { (COUNT, IMAGED) };
    let records = records(setting, count)?;
    let hosting = start(setting, "nagaya", &records, "", Vec::new())?;
    report.note("machines at most", json!(count));
    report.note("memory of each guest", json!(super::MEMORY));
    let mut density = DensityRun { hosting: &hosting, report: &mut report, names: Vec::new(), errors: 0 };
    density.fill(count)?;
    density.memory(Tier::Frozen, "frozen")?;
    density.ask_all()?;
    density.memory(Tier::Frozen, "asked")?;
    density.restore(imaged)?;
    let (errors, machines) = (density.errors, density.names.len());
    report.set("machines", to_float(machines));
    for (key, variant, metric) in [
        ("frozen_private_mb_each", "frozen", "private_mb"),
        ("frozen_pss_mb_each", "frozen", "pss_mb"),
        ("asked_private_mb_each", "asked", "private_mb"),
        ("imaged_private_mb_each", "imaged", "private_mb"),
        ("node_mb_each", "started", "node_mb"),
        ("start_ms", "started", "first_ms"),
        ("thaw_first_ms", "asked", "first_ms"),
        ("thaw_p99_ms", "asked", "p99_ms"),
        ("restore_running_ms", "imaged", "running_ms"),
        ("restore_first_ms", "imaged", "first_ms"),
    ] {
        report.set(key, report.median(CASE, variant, metric)?);
    }
    report.set("errors", to_float(errors));
    let chart = chart(&report);
    report.write(&setting.out, &chart, &GOALS)
}

fn name(index: usize) -> String {
    format!("machine-{index}")
}

/// Returns the records of all sites. Their images are taken when they rest as one: most never do.
fn records(setting: &ExperimentSetting, count: usize) -> Result<Vec<Value>> {
    let mut records = Vec::new();
    for first in (0..count).step_by(SITES_PER_TENANT) {
        let number = first / SITES_PER_TENANT;
        let (owner, uid) = (format!("owner-{number}"), UID_BASE + u32::try_from(number)?);
        records.push(tenant(&owner, uid));
        let mut backend = backend(&program(setting.dir(), &owner, uid)?);
        backend["image_when"] = json!("rest");
        let sites = first..count.min(first + SITES_PER_TENANT);
        records.extend(sites.map(|index| site(&name(index), &owner, &backend)));
    }
    Ok(records)
}

struct DensityRun<'a> {
    hosting: &'a AppHosting,
    report: &'a mut Report,
    /// Those that were started.
    names: Vec<String>,
    errors: usize,
}

impl DensityRun<'_> {
    /// Starts and freezes machines, as long as they fit.
    fn fill(&mut self, count: usize) -> Result<()> {
        let before = available()?;
        let begun = Instant::now();
        while self.names.len() < count {
            let left = available()?;
            let each = (before - left) / to_float(self.names.len().max(1));
            let batch = each * to_float(BATCH);
            if before - left + batch > MEMORY_MAX || left - batch < MEMORY_FREE {
                break;
            }
            let first = self.names.len();
            let some: Vec<String> = (first..count.min(first + BATCH)).map(name).collect();
            let times = self.visit(&some)?;
            let middle = times.percentile_ms(0.5);
            self.freeze(&some)?;
            self.names.extend(some);
            self.report.sample(first, CASE, "started", "first_ms", middle);
            eprintln!(
                "{} machines after {:.0} s, {:.1} MB each",
                self.names.len(),
                begun.elapsed().as_secs_f64(),
                (before - available()?) / 1e6 / to_float(self.names.len())
            );
        }
        ensure!(!self.names.is_empty(), "no machine fits the memory that is free");
        let each = (before - available()?) / 1e6 / to_float(self.names.len());
        self.report.sample(0, CASE, "started", "node_mb", each);
        Ok(())
    }

    /// Gets a page of each, a few at a time.
    fn visit(&mut self, names: &[String]) -> Result<ClientAnswers> {
        let mut answers = ClientAnswers::default();
        for some in names.chunks(super::AT_ONCE) {
            for (visit, is_right) in visit_all(self.hosting, some)? {
                self.errors += usize::from(!is_right);
                answers.times_ms.push(visit.first_byte_ms);
            }
        }
        Ok(answers)
    }

    fn freeze(&self, names: &[String]) -> Result<()> {
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        self.hosting.rest_all(&names, Tier::Frozen)
    }

    /// Records the memory of each machine at its tier.
    fn memory(&mut self, tier: Tier, variant: &str) -> Result<()> {
        for (index, name) in self.names.iter().enumerate() {
            interrupt::check()?;
            let status = InstanceStatus::of(&self.hosting.node, name)?;
            ensure!(status.tier == tier, "{name} rests at {} and not at {tier}", status.tier);
            let private = private_bytes(&status.pids);
            self.report.sample(index, CASE, variant, "private_mb", private / 1e6);
            let pss = status.memory_bytes.context("the memory of a machine")?;
            self.report.sample(index, CASE, variant, "pss_mb", pss / 1e6);
        }
        Ok(())
    }

    /// Asks all machines in random order, one after another. They are frozen before and after.
    fn ask_all(&mut self) -> Result<()> {
        let order = shuffled(self.names.len(), 1);
        let mut answers = ClientAnswers::default();
        for some in order.chunks(BATCH) {
            let some: Vec<String> = some.iter().map(|index| self.names[*index].clone()).collect();
            for name in &some {
                let (visit, is_right) = self.hosting.visit(name, PLAIN_PAGE)?;
                self.errors += usize::from(!is_right);
                answers.times_ms.push(visit.first_byte_ms);
            }
            self.freeze(&some)?;
        }
        self.report.sample(0, CASE, "asked", "first_ms", answers.percentile_ms(0.5));
        self.report.sample(0, CASE, "asked", "p99_ms", answers.percentile_ms(0.99));
        eprintln!("all were asked: half of them answered within {:.1} ms", answers.percentile_ms(0.5));
        Ok(())
    }

    /// Lets some rest as images, and restores one after another while all others rest.
    fn restore(&mut self, count: usize) -> Result<()> {
        let some: Vec<String> = self.names.iter().take(count).cloned().collect();
        MachineCrowd { names: some.clone() }.rest(self.hosting, Tier::Image)?;
        rustix::fs::sync();
        for (index, name) in some.iter().enumerate() {
            let pids = self.hosting.status(name)?.pids;
            self.report.sample(index, CASE, "imaged", "private_mb", private_bytes(&pids) / 1e6);
            let (visit, is_right) = self.hosting.visit(name, PLAIN_PAGE)?;
            self.errors += usize::from(!is_right);
            let status = self.hosting.status(name)?;
            self.hosting.ensure_woken_from(name, &status, Tier::Image)?;
            self.report.sample(index, CASE, "imaged", "first_ms", visit.first_byte_ms);
            self.report.sample(index, CASE, "imaged", "running_ms", running_ms(&status));
            self.freeze(&some[index..=index])?;
        }
        Ok(())
    }
}

fn chart(report: &Report) -> Chart {
    let panel = |title: &str, unit: &str, metric: &str, variants: &[&str]| {
        report.panel(title, unit, CASE, metric, variants)
    };
    Chart {
        title: "Many machines of one template on a node".into(),
        subtitle:
            "while they are frozen, after a page of each, and as images; median, whiskers: least and most"
                .into(),
        panels: vec![
            panel("own memory of each", "MB", "private_mb", &["frozen", "asked", "imaged"]),
            panel("first byte", "milliseconds", "first_ms", &["started", "asked", "imaged"]),
        ],
    }
}
