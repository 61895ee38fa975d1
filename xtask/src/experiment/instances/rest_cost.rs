//! `rest-cost`: the cost of many instances at each tier, and their effect on a visitor of another
//! site.
//!
//! The other site is one more on their node. Its baseline is the same application on a separate
//! node, while the others are ended; a node keeps its images. If the kernel monitors memory use
//! (`damon`), pages without its interference are reported separately. That cost grows with the
//! mapped memory of all. Not here: the cost of a wake (`wake`).

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use nagaya_records::instance::Tier;
use serde_json::json;

use super::damon::{DamonProbe, ran_ns};
use super::{AppHosting, HostedApp, host, journals, swap};
use crate::clients::{self, ClientQuestion, SteadyLoad, to_float};
use crate::experiment::harness::ExperimentSetting;
use crate::interrupt;
use crate::plot::Chart;
use crate::report::{Bound, Goal, Report};
use crate::swap::SwapSpace;

/// Instances that rest.
const MANY: usize = 200;

/// Woken at once.
const AT_ONCE: usize = 4;

/// A visitor's pace is far below the site's capacity. So a page's time is its own and not a
/// queue's. The pace is the median page this many times, and at least this.
const PACE_PAGES: f64 = 4.0;
const PACE_LEAST: Duration = Duration::from_millis(10);

/// Pages of one window.
const PAGES: u32 = 2_000;
const PAGES_QUICK: u32 = 1_000;

/// Visits before a window: this site may have rested while the others woke.
const WARM_UP: usize = 50;

/// Time after which earlier actions on the instances are over.
const SETTLE: Duration = Duration::from_secs(1);

const ALONE: &str = "alone";

/// A pair in which the crowd is in neither half: this machine's noise.
const CONTROL: &str = "control";

/// Compressed memory counts, too, and belongs to no process.
const IN_SWAP: &str = "zram_mb_each";

const TIERS: [Tier; 5] = [Tier::Running, Tier::Quiet, Tier::Frozen, Tier::Reclaimed, Tier::Image];

const GOALS: [Goal; 10] = [
    Goal { key: "quiet_victim_p99_ratio", bound: Bound::AtMost(1.05), aim: 1.0 },
    Goal { key: "frozen_victim_p99_ratio", bound: Bound::AtMost(1.05), aim: 1.0 },
    Goal { key: "reclaimed_victim_p99_ratio", bound: Bound::AtMost(1.05), aim: 1.0 },
    Goal { key: "image_victim_p99_ratio", bound: Bound::AtMost(1.05), aim: 1.0 },
    Goal { key: "frozen_switches_per_s", bound: Bound::AtMost(0.0), aim: 0.0 },
    Goal { key: "frozen_wakeups_per_s", bound: Bound::AtMost(0.0), aim: 0.0 },
    Goal { key: "image_wakeups_per_s", bound: Bound::AtMost(0.0), aim: 0.0 },
    Goal { key: "image_pss_mb_each", bound: Bound::AtMost(0.0), aim: 0.0 },
    Goal { key: "image_cpu_pct", bound: Bound::AtMost(0.0), aim: 0.0 },
    Goal { key: "image_switches_per_s", bound: Bound::AtMost(0.0), aim: 0.0 },
];

pub fn run(setting: &ExperimentSetting) -> Result<()> {
    let mut report = Report::new("rest-cost");
    // It ends after the nodes: its content is their instances'.
    let swap = swap(setting, &mut report);
    eprintln!("preparing {MANY} applications");
    let mut apps = journals(setting.dir(), MANY + 2)?;
    let lonely = apps.split_off(MANY + 1);
    let lonely_node = AppHosting::start(setting, "alone", &lonely, "")?;
    let node = AppHosting::start(setting, "beside", &apps, "")?;
    let [alone, beside] =
        [(&lonely_node, &lonely[0]), (&node, &apps[MANY])].map(|(node, hosted)| question(node, hosted));
    apps.truncate(MANY);
    let median_ms = clients::ask(&alone, 1, WARM_UP)?.percentile_ms(0.5);
    let every = PACE_LEAST.max(Duration::from_secs_f64(median_ms / 1e3 * PACE_PAGES));
    let mut crowd = SiteCrowd { hosting: node, apps, swap };
    crowd.wake()?;
    eprintln!("all of them have run");
    let pages = if setting.quick { PAGES_QUICK } else { PAGES };
    report.note("instances", json!(MANY));
    report.note("a page each, ms", json!(every.as_millis()));
    report.note("pages of a window", json!(pages));
    report.note("wake-ups are", json!(WokenApp::here().words()));
    let visitor = RestVisitor { alone, beside, every, window: every * pages, damon: DamonProbe::find() };
    report.note("the kernel looks at who uses which memory (DAMON)", json!(visitor.damon.is_there()));
    let has_swap = crowd.swap.is_some();
    let tiers: Vec<Tier> = TIERS.into_iter().filter(|tier| *tier != Tier::Reclaimed || has_swap).collect();

    let rounds = if setting.quick { 1 } else { 5 };
    let mut pairs = Pairs::new();
    for round in 0..rounds {
        crowd.hosting.process.stop();
        let control = pairs.entry(CONTROL).or_default();
        for half in [&mut control.beside, &mut control.alone] {
            half.join(measure(&mut report, round, ALONE, &visitor, None)?);
        }
        crowd.hosting.process = crowd.hosting.node.serve()?;
        for (turn, tier) in tiers.iter().enumerate() {
            let pair = pairs.entry(tier.as_str()).or_default();
            let alone_first = (round + turn) % 2 == 1;
            for alone in [alone_first, !alone_first] {
                if alone {
                    crowd.hosting.process.stop();
                    pair.alone.join(measure(&mut report, round, ALONE, &visitor, None)?);
                    crowd.hosting.process = crowd.hosting.node.serve()?;
                } else {
                    crowd.to(*tier)?;
                    pair.beside.join(measure(&mut report, round, tier.as_str(), &visitor, Some(&crowd))?);
                }
            }
        }
        eprintln!("round {} of {rounds} done", round + 1);
    }
    summarise(&mut report, &tiers, &pairs)?;
    let chart = chart(&report, &tiers);
    report.write(&setting.out, &chart, &GOALS)
}

/// A tier's pages, and those just before or after it without the crowd. They cover all rounds
/// together: one percent of one round's pages is only a handful.
#[derive(Default)]
struct ServerPair {
    beside: SteadyLoad,
    alone: SteadyLoad,
}

type Pairs = BTreeMap<&'static str, ServerPair>;

/// Visitor of the other site.
struct RestVisitor {
    alone: ClientQuestion,
    beside: ClientQuestion,
    every: Duration,
    window: Duration,
    damon: DamonProbe,
}

fn question(node: &AppHosting, hosted: &HostedApp) -> ClientQuestion {
    ClientQuestion { address: node.node.address, host: host(&hosted.name), path: hosted.app.page.path.into() }
}

/// The instances that rest.
struct SiteCrowd {
    hosting: AppHosting,
    apps: Vec<HostedApp>,
    /// It ends after the node, whose memory is in it.
    swap: Option<SwapSpace>,
}

impl SiteCrowd {
    /// Makes all of them run.
    fn wake(&self) -> Result<()> {
        for some in self.apps.chunks(AT_ONCE) {
            for (visit, is_right) in self.hosting.visit_all(some)? {
                ensure!(is_right, "a page came with status {}", visit.status);
            }
        }
        Ok(())
    }

    fn names(&self) -> Vec<&str> {
        self.apps.iter().map(|hosted| hosted.name.as_str()).collect()
    }

    /// Brings all of them to a tier, from any other.
    fn to(&self, tier: Tier) -> Result<()> {
        self.wake()?;
        if tier == Tier::Running { Ok(()) } else { self.hosting.rest_all(&self.names(), tier) }
    }

    /// Returns the pids of all their processes, and the bytes of their memory.
    fn processes(&self) -> Result<(Vec<u32>, f64)> {
        let (mut pids, mut bytes) = (Vec::new(), 0.0);
        for name in self.names() {
            interrupt::check()?;
            let status = self.hosting.status(name)?;
            bytes += status.memory_bytes.unwrap_or_default();
            pids.extend(status.pids);
        }
        Ok((pids, bytes))
    }
}

fn measure(
    report: &mut Report,
    round: usize,
    variant: &str,
    RestVisitor { alone, beside, every, window, damon }: &RestVisitor,
    crowd: Option<&SiteCrowd>,
) -> Result<SteadyLoad> {
    let question = if crowd.is_some() { beside } else { alone };
    let (pids, bytes) = crowd.map_or_else(|| Ok((Vec::new(), 0.0)), SiteCrowd::processes)?;
    // Otherwise a new image's pages are still on their way to the disk.
    rustix::fs::sync();
    std::thread::sleep(SETTLE);
    clients::ask(question, 1, WARM_UP)?;
    let (before, begun, damon_before) = (VisitTurns::of(&pids), Instant::now(), damon.ran_ns());
    let seen = clients::ask_steadily_beside(question, *every, *window, || damon.ran_ns_at_rest())?;
    let (turns, seconds) = (VisitTurns::of(&pids).since(&before), begun.elapsed().as_secs_f64());
    let looked = Duration::from_nanos(damon.ran_ns().saturating_sub(damon_before)).as_secs_f64();
    report.sample(round, "kernel", variant, "damon_cpu_pct", looked / seconds * 100.0);
    let pages = &seen.all;
    ensure!(pages.failed == 0, "{} pages failed ({variant}): {:?}", pages.failed, pages.why);
    let [p50_ms, p99_ms] = [0.5, 0.99].map(|part| pages.percentile_ms(part));
    eprintln!("{variant}: half of the pages within {p50_ms:.2} ms, 99 of 100 within {p99_ms:.2} ms");
    report.sample(round, "victim", variant, "p50_ms", p50_ms);
    report.sample(round, "victim", variant, "p99_ms", p99_ms);
    report.sample(round, "victim", variant, "p99_without_damon_ms", seen.undisturbed.percentile_ms(0.99));
    if let Some(crowd) = crowd {
        let each = bytes / 1e6 / to_float(crowd.apps.len());
        report.sample(round, "crowd", variant, "pss_mb_each", each);
        report.sample(round, "crowd", variant, "cpu_pct", turns.cpu_seconds / seconds * 100.0);
        report.sample(round, "crowd", variant, "switches_per_s", turns.switches / seconds);
        report.sample(round, "crowd", variant, "wakeups_per_s", turns.wakeups / seconds);
        let in_swap = crowd.swap.as_ref().and_then(SwapSpace::memory_bytes);
        if let Some(bytes) = in_swap.filter(|_| variant == Tier::Reclaimed.as_str()) {
            report.sample(round, "crowd", variant, IN_SWAP, bytes / 1e6 / to_float(crowd.apps.len()));
        }
    }
    Ok(seen)
}

/// Scheduler counts of processes: CPU time, how often one got a CPU and lost it, and how often a
/// waiting one was woken.
#[derive(Debug, Clone, Default)]
struct VisitTurns {
    /// By thread.
    threads: BTreeMap<String, SpentMemory>,
}

#[derive(Debug, Clone, Copy, Default)]
struct SpentMemory {
    cpu_seconds: f64,
    switches: f64,
    wakeups: f64,
}

/// Source of the wake-up counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WokenApp {
    /// `nr_wakeups` in `/proc/PID/sched`, if the kernel has scheduler statistics.
    Counted,
    /// Each time a thread gives up its CPU to wait; it is woken once for each.
    Waits,
}

impl WokenApp {
    fn here() -> Self {
        if wakeups(Path::new("/proc/self")).is_some() { Self::Counted } else { Self::Waits }
    }

    fn words(self) -> &'static str {
        match self {
            Self::Counted => "counted by the scheduler (nr_wakeups)",
            Self::Waits => {
                "voluntary switches: this kernel counts no wake-ups, and each wait that ended had one"
            }
        }
    }
}

impl VisitTurns {
    fn of(pids: &[u32]) -> Self {
        let mut threads = BTreeMap::new();
        for pid in pids {
            let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
            for task in tasks {
                // A thread may end between listing and reading.
                if let Some(turns) = turns(&task.path()) {
                    threads.insert(task.path().to_string_lossy().into_owned(), turns);
                }
            }
        }
        Self { threads }
    }

    fn since(&self, before: &Self) -> SpentMemory {
        let mut spent = SpentMemory::default();
        for (thread, now) in &self.threads {
            let before = before.threads.get(thread).copied().unwrap_or_default();
            spent.cpu_seconds += now.cpu_seconds - before.cpu_seconds;
            spent.switches += now.switches - before.switches;
            spent.wakeups += now.wakeups - before.wakeups;
        }
        spent
    }
}

/// Returns the counts of one thread, from proc(5).
fn turns(task: &Path) -> Option<SpentMemory> {
    let cpu_seconds = Duration::from_nanos(ran_ns(task)?).as_secs_f64();
    let status = fs::read_to_string(task.join("status")).ok()?;
    let counted = |name: &str| -> Option<f64> {
        status
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix("_ctxt_switches:"))?
            .trim()
            .parse()
            .ok()
    };
    let (waits, preempted) = (counted("voluntary")?, counted("nonvoluntary")?);
    let wakeups = wakeups(task).unwrap_or(waits);
    Some(SpentMemory { cpu_seconds, switches: waits + preempted, wakeups })
}

/// Returns how often this thread was woken, if the kernel counts that.
fn wakeups(task: &Path) -> Option<f64> {
    let sched = fs::read_to_string(task.join("sched")).ok()?;
    let line = sched.lines().find_map(|line| {
        line.strip_prefix("nr_wakeups ").or(line.strip_prefix("se.statistics.nr_wakeups "))
    })?;
    line.split_once(':')?.1.trim().parse().ok()
}

fn summarise(report: &mut Report, tiers: &[Tier], pairs: &Pairs) -> Result<()> {
    for metric in ["p50_ms", "p99_ms", "p99_without_damon_ms"] {
        report.set(format!("{ALONE}_{metric}"), report.median("victim", ALONE, metric)?);
    }
    report.set("alone_damon_cpu_pct", report.median("kernel", ALONE, "damon_cpu_pct")?);
    ratios(report, CONTROL, &pairs[CONTROL]);
    for tier in tiers {
        for metric in ["pss_mb_each", "cpu_pct", "switches_per_s", "wakeups_per_s"] {
            report.set(format!("{tier}_{metric}"), report.median("crowd", tier.as_str(), metric)?);
        }
        if let Ok(each) = report.median("crowd", tier.as_str(), IN_SWAP) {
            report.set(format!("{tier}_{IN_SWAP}"), each);
        }
        report.set(format!("{tier}_damon_cpu_pct"), report.median("kernel", tier.as_str(), "damon_cpu_pct")?);
        ratios(report, tier.as_str(), &pairs[tier.as_str()]);
    }
    Ok(())
}

/// Sets the ratios for the other site's visitor.
fn ratios(report: &mut Report, tier: &str, ServerPair { beside, alone }: &ServerPair) {
    for (key, part, beside, alone) in [
        ("victim_p50_ratio", 0.5, &beside.all, &alone.all),
        ("victim_p99_ratio", 0.99, &beside.all, &alone.all),
        ("victim_p99_ratio_without_damon", 0.99, &beside.undisturbed, &alone.undisturbed),
    ] {
        report.set(format!("{tier}_{key}"), beside.percentile_ms(part) / alone.percentile_ms(part));
    }
}

fn chart(report: &Report, tiers: &[Tier]) -> Chart {
    let tiers: Vec<&str> = tiers.iter().map(|tier| tier.as_str()).collect();
    let with_alone: Vec<&str> = tiers.iter().copied().chain([ALONE]).collect();
    let crowd = |title: &str, unit: &str, metric: &str| report.panel(title, unit, "crowd", metric, &tiers);
    Chart {
        title: "What many Django applications cost while they rest".into(),
        subtitle: "and a page of another site beside them; median, whiskers: least and greatest round".into(),
        panels: vec![
            crowd("Memory of each", "MB", "pss_mb_each"),
            crowd("CPU time of all", "percent of a core", "cpu_pct"),
            crowd("Switches of all", "per second", "switches_per_s"),
            crowd("Wake-ups of all", "per second", "wakeups_per_s"),
            report.panel("Page, median", "milliseconds", "victim", "p50_ms", &with_alone),
            report.panel("Page, 99th percentile", "milliseconds", "victim", "p99_ms", &with_alone),
        ],
    }
}
