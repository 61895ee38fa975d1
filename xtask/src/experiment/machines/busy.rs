//! A busy machine: a site whose page asks a database, a client that asks for it without pause, and
//! counts of the scheduler meanwhile.
//!
//! Not here: the machines beside it (`bare`, `MachineCrowd`).

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::Value;

use super::scheduler::{ProcessTimes, RunQueueWatch, machine_switches};
use super::{PageDatabases, backend, program, site, tenant};
use crate::clients::{self, BackgroundLoad, ClientAnswers, ClientQuestion};
use crate::content::population::UID_BASE;
use crate::experiment::instances::{AppHosting, host};
use crate::process;
use crate::report::Report;

pub const BUSY: &str = "busy";

/// Pages before a window. QEMU translates the guest's code on its first runs.
const WARM_UP: usize = 10;

/// Pages before the first window.
const FIRST_WARM_UP: usize = 40;

/// Time after which earlier work is over.
const SETTLE: Duration = Duration::from_secs(1);

/// Returns the records of the busy site and its tenant.
pub fn records(dir: &Path, databases: &PageDatabases) -> Result<Vec<Value>> {
    let mut backend = backend(&program(dir, BUSY, UID_BASE)?);
    databases.join(&mut backend);
    Ok(vec![tenant(BUSY, UID_BASE), site(BUSY, BUSY, &backend)])
}

/// Starts the busy site, and returns the request for its page.
pub fn begin(hosting: &AppHosting, databases: &PageDatabases) -> Result<ClientQuestion> {
    let path = format!("/page/{}", databases.names()[0]);
    let question = ClientQuestion { address: hosting.node.address, host: host(BUSY), path };
    let answers = clients::ask(&question, 1, FIRST_WARM_UP)?;
    ensure!(answers.failed == 0, "the busy site's pages fail: {:?}", answers.why);
    Ok(question)
}

/// The machines beside the busy one.
pub struct OtherMachines<'a> {
    pub pids: Vec<u32>,
    /// Lets them run, and stand still again. The kernel counts a wait when it has ended, so those
    /// that wait must stand still before their times are read.
    pub begin: &'a dyn Fn() -> Result<()>,
    pub end: &'a dyn Fn() -> Result<()>,
}

impl OtherMachines<'_> {
    /// Returns machines that rest, or run by themselves.
    pub fn resting(pids: Vec<u32>) -> Self {
        Self { pids, begin: &|| Ok(()), end: &|| Ok(()) }
    }
}

/// Figures of one window.
pub struct BusyWindow {
    pub pages: ClientAnswers,
    /// Switches of the whole machine.
    pub switches_per_s: f64,
    /// CPU time of the others, percent of a core.
    pub cpu_pct: f64,
    /// Mean number of tasks of the machine that ran or waited, from the beginning of the others.
    pub load: f64,
    /// The part of it that the others are, and that of all else of the experiment. Both come from
    /// their times.
    pub load_others: f64,
    pub load_own: f64,
    /// Others that waited all the time.
    pub starved: f64,
}

impl BusyWindow {
    /// Asks for pages for this long, beside these machines.
    pub fn measure(
        question: &ClientQuestion,
        duration: Duration,
        others: &OtherMachines<'_>,
    ) -> Result<Self> {
        let own: Vec<u32> =
            process::tree(std::process::id()).into_iter().filter(|pid| !others.pids.contains(pid)).collect();
        let [before, own_before] = [&others.pids, &own].map(|pids| ProcessTimes::of(pids));
        let (begun, watch) = (Instant::now(), RunQueueWatch::start());
        (others.begin)()?;
        std::thread::sleep(SETTLE);
        clients::ask(question, 1, WARM_UP)?;
        let (switches, counted) = (machine_switches()?, Instant::now());
        let load = BackgroundLoad::start(question, 1);
        std::thread::sleep(duration);
        let switches_per_s = (machine_switches()? - switches) / counted.elapsed().as_secs_f64();
        let own_spent = ProcessTimes::of(&own).since(&own_before);
        let starved = ProcessTimes::of(&others.pids).since(&before).starved;
        let (pages, load, seconds) = (load.stop()?, watch.stop()?, begun.elapsed().as_secs_f64());
        (others.end)()?;
        let spent = ProcessTimes::of(&others.pids).since(&before);
        ensure!(pages.failed == 0, "{} pages failed: {:?}", pages.failed, pages.why);
        Ok(Self {
            pages,
            switches_per_s,
            cpu_pct: spent.run_seconds / seconds * 100.0,
            load,
            load_others: (spent.run_seconds + spent.wait_seconds) / seconds,
            load_own: (own_spent.run_seconds + own_spent.wait_seconds) / seconds,
            starved,
        })
    }

    /// Adds all of its numbers.
    pub fn report(&self, report: &mut Report, round: usize, case: &str, variant: &str) {
        let values = [
            ("p50_ms", self.pages.percentile_ms(0.5)),
            ("p95_ms", self.pages.percentile_ms(0.95)),
            ("switches_per_s", self.switches_per_s),
            ("cpu_pct", self.cpu_pct),
            ("load", self.load),
            ("load_others", self.load_others),
            ("load_own", self.load_own),
            ("starved", self.starved),
        ];
        for (metric, value) in values {
            report.sample(round, case, variant, metric, value);
        }
        let [(_, p50), (_, p95), (_, switches), ..] = values;
        eprintln!(
            "{case}, {variant}: half of {} pages within {p50:.1} ms, 19 of 20 within {p95:.1} ms; \
             {switches:.0} switches a second",
            self.pages.times_ms.len()
        );
    }
}
