//! `vm-levers`: what lowers the cost of idle machines (figures 6 to 12 of the paper): nice values,
//! the tick of their kernels, the scheduler's idle class, and standing still.
//!
//! It also tests why the load average rises with some of them: it is the number of tasks that run
//! or wait, and a lower priority only makes each wait longer. The paper's set with a tick of 100 Hz
//! is left out: it needs a kernel that is built with it, and Debian has none. Not here: nagaya's
//! own tiers (`idle`).

use std::time::Duration;

use anyhow::Result;
use serde_json::json;

use super::bare::{BareCrowd, BareLever, BareTemplate, GuestTick};
use super::busy::{self, BusyWindow, OtherMachines};
use super::scheduler::NoAutogroup;
use super::{PageDatabases, kernels, start};
use crate::clients::{ClientQuestion, to_float};
use crate::experiment::harness::ExperimentSetting;
use crate::plot::Chart;
use crate::report::{Bound, Goal, Report};

/// Numbers of idle machines.
const COUNTS: [usize; 2] = [12, 40];

const ROUNDS: usize = 5;
const ROUNDS_QUICK: usize = 2;

const WINDOW: Duration = Duration::from_secs(20);
const WINDOW_QUICK: Duration = Duration::from_secs(5);

/// Time for the ticks that machines missed while they stood still.
const CATCH_UP: Duration = Duration::from_millis(500);

/// Least predicted load at which the prediction is judged.
const JUDGED_FROM: f64 = 5.0;

/// Key of the largest error of a judged prediction, and of their number.
const WORST: &str = "load_error_worst";
const JUDGED: &str = "load_judged_sets";

/// The measure of all sets.
const FROZEN: &str = "frozen";

/// A set: its name, and the machines that are not frozen in it, with their lever.
type LeverSet = (&'static str, Option<(GuestTick, BareLever)>);

const SETS: [LeverSet; 6] = [
    (FROZEN, None),
    ("nice0_250hz", Some((GuestTick::Periodic, BareLever::Nice0))),
    ("nice19_250hz", Some((GuestTick::Periodic, BareLever::Nice19))),
    ("nice19_tickless", Some((GuestTick::Tickless, BareLever::Nice19))),
    ("sched_idle_250hz", Some((GuestTick::Periodic, BareLever::SchedIdle))),
    ("sched_idle_tickless", Some((GuestTick::Tickless, BareLever::SchedIdle))),
];

const GOALS: [Goal; 1] = [Goal { key: WORST, bound: Bound::AtMost(0.2), aim: 0.1 }];

pub fn run(setting: &ExperimentSetting) -> Result<()> {
    let mut report = Report::new("vm-levers");
    let _group = NoAutogroup::set();
    let (rounds, window) = if setting.quick { (ROUNDS_QUICK, WINDOW_QUICK) } else { (ROUNDS, WINDOW) };
    let databases = PageDatabases::start(setting.dir())?;
    let records = busy::records(setting.dir(), &databases)?;
    let hosting = start(setting, "nagaya", &records, "", Vec::new())?;
    let make = |tick, name: &str| BareTemplate::make(&setting.dir().join(name), &kernels()?, tick);
    let templates = [make(GuestTick::Periodic, "periodic")?, make(GuestTick::Tickless, "tickless")?];
    report.note("rounds", json!(rounds));
    report.note("a window, s", json!(window.as_secs()));
    report.note("the busy page asks", json!(databases.names()[0]));
    report.note("nice19_100hz", json!("left out: Debian has no kernel with a tick of 100 Hz"));
    report.note("frozen", json!("stopped by SIGSTOP: these machines have no cell"));
    report.note(
        "load_predicted",
        json!("times of the idle machines, and the growth of those of all else here"),
    );
    let question = busy::begin(&hosting, &databases)?;
    for count in COUNTS {
        eprintln!("starting {count} machines of each kind");
        let crowds = LeverCrowds {
            periodic: BareCrowd::start(&templates[0], count)?,
            tickless: BareCrowd::start(&templates[1], count)?,
        };
        for round in 0..rounds {
            let mut order = SETS.to_vec();
            order.rotate_left(round % SETS.len());
            for (name, active) in order {
                let figures = crowds.measure(active, &question, window)?;
                figures.report(&mut report, round, &case(count), name);
            }
            eprintln!("{count} machines: round {} of {rounds} done", round + 1);
        }
    }
    summarise(&mut report)?;
    let chart = chart(&report);
    report.write(&setting.out, &chart, &GOALS)
}

/// Machines with both ticks. One kind stands still while the other is measured.
struct LeverCrowds {
    periodic: BareCrowd,
    tickless: BareCrowd,
}

impl LeverCrowds {
    fn of(&self, tick: GuestTick) -> &BareCrowd {
        match tick {
            GuestTick::Periodic => &self.periodic,
            GuestTick::Tickless => &self.tickless,
        }
    }

    fn measure(
        &self,
        active: Option<(GuestTick, BareLever)>,
        question: &ClientQuestion,
        window: Duration,
    ) -> Result<BusyWindow> {
        for crowd in [&self.periodic, &self.tickless] {
            crowd.stop()?;
        }
        let Some((tick, lever)) = active else {
            return BusyWindow::measure(question, window, &OtherMachines::resting(Vec::new()));
        };
        let crowd = self.of(tick);
        // Ticks that were missed come at once, and are not part of the window.
        crowd.apply(BareLever::Nice0)?;
        std::thread::sleep(CATCH_UP);
        crowd.stop()?;
        let begin = || crowd.apply(lever);
        let end = || crowd.stop();
        let others = OtherMachines { pids: crowd.pids(), begin: &begin, end: &end };
        BusyWindow::measure(question, window, &others)
    }
}

fn case(count: usize) -> String {
    format!("beside {count}")
}

fn summarise(report: &mut Report) -> Result<()> {
    let (mut worst, mut judged) = (0.0_f64, 0);
    for count in COUNTS {
        let case = case(count);
        for (name, _) in SETS {
            let key = |metric: &str| format!("{metric}_{name}_{count}");
            report.set(key("p50_ms"), report.median(&case, name, "p50_ms")?);
            report.set(key("switches_per_s"), report.median(&case, name, "switches_per_s")?);
            report.set(key("load"), report.median(&case, name, "load")?);
            if name == FROZEN {
                continue;
            }
            report.set(key("p50_ratio"), report.ratio(&case, name, FROZEN, "p50_ms")?);
            report.set(key("p95_ratio"), report.ratio(&case, name, FROZEN, "p95_ms")?);
            report.set(key("cpu_pct"), report.median(&case, name, "cpu_pct")?);
            let gain = report.difference(&case, name, FROZEN, "load")?;
            // The busy machine and the node wait more, too.
            let own = report.difference(&case, name, FROZEN, "load_own")?;
            let predicted = report.median(&case, name, "load_others")? + own;
            let starved = report.sum(&case, name, "starved");
            report.set(key("load_gain"), gain);
            report.set(key("load_predicted"), predicted);
            report.set(key("starved"), starved);
            if predicted > JUDGED_FROM && starved == 0.0 {
                let error = (gain / predicted - 1.0).abs();
                report.set(key("load_error"), error);
                worst = worst.max(error);
                judged += 1;
            }
        }
    }
    report.set(JUDGED, to_float(judged));
    if judged > 0 {
        report.set(WORST, worst);
    }
    Ok(())
}

fn chart(report: &Report) -> Chart {
    let names = SETS.map(|(name, _)| name);
    let panels = COUNTS.into_iter().flat_map(|count| {
        let panel = |title: &str, unit: &str, metric: &str| {
            report.panel(&format!("{count} idle: {title}"), unit, &case(count), metric, &names)
        };
        [
            panel("page, median", "milliseconds", "p50_ms"),
            panel("switches", "per second", "switches_per_s"),
            panel("run queue", "tasks", "load"),
        ]
    });
    Chart {
        title: "What lowers the cost of idle machines".into(),
        subtitle: "one client of a busy machine; median, whiskers: least and greatest round".into(),
        panels: panels.collect(),
    }
}
