//! `rest-cost`: what many instances cost at each tier, and what a visitor of another site notices of them.
//!
//! The other site is one more of their node, as its users have it. What its page takes alone is that of the same application
//! on a node of its own, while theirs is ended; a node keeps its images. Where the kernel looks at who uses which memory
//! (`damon`), pages during which it did not are told beside all: that costs the more the more is mapped, by whomever. Not
//! here: what coming back costs (`wake`).

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use nagaya_cmdb::instance::Tier;
use serde_json::json;

use super::damon::{Damon, ran_ns};
use super::{Hosted, Hosting, host, journals, swap};
use crate::clients::{self, Question, Steady, to_float};
use crate::experiment::Setting;
use crate::interrupt;
use crate::plot::Chart;
use crate::report::{Bound, Goal, Report};
use crate::swap::Swap;

/// Instances that rest.
const MANY: usize = 200;

/// Woken at once.
const AT_ONCE: usize = 4;

/// A visitor's pace is far below what the site could answer, so that a page's time is its own and not a queue's: the median page
/// this many times, and this at least.
const PACE_PAGES: f64 = 4.0;
const PACE_LEAST: Duration = Duration::from_millis(10);

/// Of one window.
const PAGES: u32 = 2_000;
const PAGES_QUICK: u32 = 1_000;

/// Visits before a window: while the others woke this site may have rested, too.
const WARM_UP: usize = 50;

/// What has just been done to the instances is over by then.
const SETTLE: Duration = Duration::from_secs(1);

const ALONE: &str = "alone";

/// A pair in which the crowd is in neither half: what this machine makes of nothing.
const CONTROL: &str = "control";

/// What is in compressed memory is held, too, and is no process's.
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

pub fn run(setting: &Setting) -> Result<()> {
    let mut report = Report::new("rest-cost");
    // It goes after the nodes: what is in it is their instances'.
    let swap = swap(setting, &mut report);
    eprintln!("preparing {MANY} applications");
    let mut apps = journals(setting.dir(), MANY + 2)?;
    let lonely = apps.split_off(MANY + 1);
    let lonely_node = Hosting::start(setting, "alone", &lonely, "")?;
    let node = Hosting::start(setting, "beside", &apps, "")?;
    let [alone, beside] =
        [(&lonely_node, &lonely[0]), (&node, &apps[MANY])].map(|(node, hosted)| question(node, hosted));
    apps.truncate(MANY);
    let median_ms = clients::ask(&alone, 1, WARM_UP)?.percentile_ms(0.5);
    let every = PACE_LEAST.max(Duration::from_secs_f64(median_ms / 1e3 * PACE_PAGES));
    let mut crowd = Crowd { hosting: node, apps, swap };
    crowd.wake()?;
    eprintln!("all of them have run");
    let pages = if setting.quick { PAGES_QUICK } else { PAGES };
    report.note("instances", json!(MANY));
    report.note("a page each, ms", json!(every.as_millis()));
    report.note("pages of a window", json!(pages));
    report.note("wake-ups are", json!(Woken::here().words()));
    let visitor = Visitor { alone, beside, every, window: every * pages, damon: Damon::find() };
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

/// A tier's pages, and those just before or after it without the crowd. Of all rounds together: the hundredth part of one
/// round's pages is a handful.
#[derive(Default)]
struct Pair {
    beside: Steady,
    alone: Steady,
}

type Pairs = BTreeMap<&'static str, Pair>;

/// Of the other site.
struct Visitor {
    alone: Question,
    beside: Question,
    every: Duration,
    window: Duration,
    damon: Damon,
}

fn question(node: &Hosting, hosted: &Hosted) -> Question {
    Question { address: node.node.address, host: host(&hosted.name), path: hosted.app.page.path.into() }
}

/// The instances that rest.
struct Crowd {
    hosting: Hosting,
    apps: Vec<Hosted>,
    /// After the node, whose memory is in it.
    swap: Option<Swap>,
}

impl Crowd {
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

    /// Has all of them at a tier, from wherever they are.
    fn to(&self, tier: Tier) -> Result<()> {
        self.wake()?;
        if tier == Tier::Running { Ok(()) } else { self.hosting.rest_all(&self.names(), tier) }
    }

    /// The numbers of all their processes, and the bytes of their memory.
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
    Visitor { alone, beside, every, window, damon }: &Visitor,
    crowd: Option<&Crowd>,
) -> Result<Steady> {
    let question = if crowd.is_some() { beside } else { alone };
    let (pids, bytes) = crowd.map_or_else(|| Ok((Vec::new(), 0.0)), Crowd::processes)?;
    // A new image's pages are on their way to the disk otherwise.
    rustix::fs::sync();
    std::thread::sleep(SETTLE);
    clients::ask(question, 1, WARM_UP)?;
    let (before, begun, damon_before) = (Turns::of(&pids), Instant::now(), damon.ran_ns());
    let seen = clients::ask_steadily_beside(question, *every, *window, || damon.ran_ns_at_rest())?;
    let (turns, seconds) = (Turns::of(&pids).since(&before), begun.elapsed().as_secs_f64());
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
        let in_swap = crowd.swap.as_ref().and_then(Swap::memory_bytes);
        if let Some(bytes) = in_swap.filter(|_| variant == Tier::Reclaimed.as_str()) {
            report.sample(round, "crowd", variant, IN_SWAP, bytes / 1e6 / to_float(crowd.apps.len()));
        }
    }
    Ok(seen)
}

/// What the scheduler counted for processes: CPU time, how often one was given a CPU and taken off it, and how often one that
/// waited was woken.
#[derive(Debug, Clone, Default)]
struct Turns {
    /// By thread.
    threads: BTreeMap<String, Spent>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Spent {
    cpu_seconds: f64,
    switches: f64,
    wakeups: f64,
}

/// Where wake-ups are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Woken {
    /// `nr_wakeups` in `/proc/PID/sched`, where the kernel has scheduler statistics.
    Counted,
    /// Each time a thread gives its CPU up to wait; it is woken once for each.
    Waits,
}

impl Woken {
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

impl Turns {
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

    fn since(&self, before: &Self) -> Spent {
        let mut spent = Spent::default();
        for (thread, now) in &self.threads {
            let before = before.threads.get(thread).copied().unwrap_or_default();
            spent.cpu_seconds += now.cpu_seconds - before.cpu_seconds;
            spent.switches += now.switches - before.switches;
            spent.wakeups += now.wakeups - before.wakeups;
        }
        spent
    }
}

/// What one thread has had, from proc(5).
fn turns(task: &Path) -> Option<Spent> {
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
    Some(Spent { cpu_seconds, switches: waits + preempted, wakeups })
}

/// How often this thread was woken, where the kernel counts that.
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

/// What the other site's visitor noticed.
fn ratios(report: &mut Report, tier: &str, Pair { beside, alone }: &Pair) {
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
