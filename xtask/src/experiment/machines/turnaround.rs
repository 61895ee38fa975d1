//! `vm-turnaround`: where a page of a machine spends its time (figures 13 and 14 of the paper):
//! before, in, between and after its questions to a database.
//!
//! Of many machines that run, some are asked in random order. Each request is made without and with
//! a boost. The measure is a machine beside which all others stand still. All machines belong to
//! one tenant, because a boost's shares count among the sites of one. Targets that the memory does
//! not hold are left out, and a key says so. Not here: the definition of the parts
//! (docs/receipts.md).

use anyhow::{Context as _, Result, ensure};
use nagaya_records::instance::Tier;
use serde_json::json;

use super::{MachineCrowd, PageDatabases, backend, program, shuffled, site, start, tenant};
use crate::clients::to_float;
use crate::content::population::UID_BASE;
use crate::experiment::harness::ExperimentSetting;
use crate::experiment::instances::{AppHosting, host};
use crate::http::{self, HttpVisit};
use crate::interrupt;
use crate::plot::Chart;
use crate::report::{Bound, Goal, Report, median};

/// Machines that run, and those of them that are asked.
const MACHINES: usize = 144;
const TARGETS: [usize; 4] = [1, 10, 40, 144];
const MACHINES_QUICK: usize = 20;
const TARGETS_QUICK: [usize; 3] = [1, 10, 20];

const ROUNDS: usize = 5;
const ROUNDS_QUICK: usize = 2;

/// Pages of each set in a round.
const PAGES: usize = 100;
const PAGES_QUICK: usize = 30;

/// Pages of each database at each target before the first set.
const WARM_UP: usize = 4;

/// The most that a boost may be, times the shares of a record, and the wanted shares.
const RAISE_MAX: u32 = 10;
const BOOST: &str = "boost cpu_shares: 10000 if request.path.start_with?(\"/boosted/\")\n";

/// Text on each page of a database.
const PAGE_TEXT: &str = "entries</h1>";

const ALONE: &str = "alone";
const OWNER: &str = "targets";

/// Parts of a page's time: their names here, and in `Server-Timing`.
const PARTS: [(&str, &str, &str); 4] = [
    ("before", "before_ms", "app-before"),
    ("db", "db_ms", "db"),
    ("between", "between_ms", "app-between"),
    ("after", "after_ms", "app-after"),
];

const SUM: &str = "parts_ms";
const WHOLE: &str = "whole_ms";
const PART_OF_WHOLE: &str = "parts_of_whole";
const ERRORS: &str = "errors";

const GOALS: [Goal; 9] = [
    Goal { key: "postgresql_after_ratio_boosted_1", bound: Bound::AtMost(1.1), aim: 1.0 },
    Goal { key: "postgresql_after_ratio_boosted_10", bound: Bound::AtMost(1.1), aim: 1.0 },
    Goal { key: "postgresql_after_ratio_boosted_40", bound: Bound::AtMost(1.1), aim: 1.0 },
    Goal { key: "postgresql_after_ratio_boosted_144", bound: Bound::AtMost(1.1), aim: 1.0 },
    Goal { key: "mariadb_after_ratio_boosted_1", bound: Bound::AtMost(1.1), aim: 1.0 },
    Goal { key: "mariadb_after_ratio_boosted_10", bound: Bound::AtMost(1.1), aim: 1.0 },
    Goal { key: "mariadb_after_ratio_boosted_40", bound: Bound::AtMost(1.1), aim: 1.0 },
    Goal { key: "mariadb_after_ratio_boosted_144", bound: Bound::AtMost(1.1), aim: 1.0 },
    Goal { key: PART_OF_WHOLE, bound: Bound::AtLeast(0.95), aim: 1.0 },
];

pub fn run(setting: &ExperimentSetting) -> Result<()> {
    let mut report = Report::new("vm-turnaround");
    let (machines, targets) =
        if setting.quick { (MACHINES_QUICK, &TARGETS_QUICK[..]) } else { (MACHINES, &TARGETS[..]) };
    let (rounds, pages) = if setting.quick { (ROUNDS_QUICK, PAGES_QUICK) } else { (ROUNDS, PAGES) };
    let databases = PageDatabases::start(setting.dir())?;
    let mut backend = backend(&program(setting.dir(), OWNER, UID_BASE)?);
    databases.join(&mut backend);
    // They rest as no image.
    backend["image_when"] = json!("rest");
    let mut records = vec![tenant(OWNER, UID_BASE)];
    records.extend((0..machines).map(|index| site(&name(index), OWNER, &backend)));
    let more = format!("[receipts]\nallow = [\"127.0.0.0/8\"]\n[balance]\nraise_max = {RAISE_MAX}\n");
    let rules = vec![("access_checker", BOOST.to_owned())];
    let hosting = start(setting, "nagaya", &records, &more, rules)?;
    report.note("pages of a set in a round", json!(pages));
    report.note("rounds", json!(rounds));

    eprintln!("starting {machines} machines");
    let mut all = MachineCrowd { names: (0..machines).map(name).collect() };
    all.fill(&hosting)?;
    let names = all.names;
    let machines = names.len();
    report.note("machines", json!(machines));
    let (targets, left_out): (Vec<usize>, Vec<usize>) = targets.iter().partition(|count| **count <= machines);
    let others = MachineCrowd { names: names[1..].to_vec() };
    let mut visits = PartVisits {
        report: &mut report,
        hosting: &hosting,
        names: &names,
        pages,
        errors: 0,
        fractions: Vec::new(),
    };
    for database in databases.names() {
        for index in 0..machines * WARM_UP {
            visits.get(index % machines, &path(database, false))?;
        }
    }
    for round in 0..rounds {
        others.rest(&hosting, Tier::Frozen)?;
        for database in databases.names() {
            visits.measure(round, database, ALONE, 1, false)?;
        }
        others.rest(&hosting, Tier::Running)?;
        for count in &targets {
            for is_boosted in [round % 2 == 0, round % 2 == 1] {
                for database in databases.names() {
                    visits.measure(round, database, &variant(*count, is_boosted), *count, is_boosted)?;
                }
            }
        }
        eprintln!("round {} of {rounds} done", round + 1);
    }
    let (errors, fractions) = (visits.errors, visits.fractions);
    for database in databases.names() {
        summarise(&mut report, database, &targets)?;
    }
    for count in left_out {
        report.set(format!("targets_{count}_left_out"), 1.0);
    }
    report.set(PART_OF_WHOLE, median(fractions).context("no page with its parts")?);
    report.set(ERRORS, to_float(errors));
    let chart = chart(&report, &databases.names(), &targets);
    report.write(&setting.out, &chart, &GOALS)
}

fn name(index: usize) -> String {
    format!("target-{index}")
}

/// Returns a path. The rule raises one kind of them.
fn path(database: &str, is_boosted: bool) -> String {
    format!("/{}/{database}", word(is_boosted))
}

fn word(is_boosted: bool) -> &'static str {
    if is_boosted { "boosted" } else { "plain" }
}

fn variant(count: usize, is_boosted: bool) -> String {
    format!("{}_{count}", word(is_boosted))
}

struct PartVisits<'a> {
    report: &'a mut Report,
    hosting: &'a AppHosting,
    names: &'a [String],
    pages: usize,
    errors: usize,
    /// The sum of the parts by the time in the application, of each page.
    fractions: Vec<f64>,
}

impl PartVisits<'_> {
    /// Gets one page. `None` if it is wrong.
    fn get(&mut self, index: usize, path: &str) -> Result<Option<HttpVisit>> {
        interrupt::check()?;
        let host = host(&self.names[index]);
        let visit = http::visit(self.hosting.node.address, &host, path)?;
        let is_right = visit.status == 200 && String::from_utf8_lossy(&visit.body).contains(PAGE_TEXT);
        if is_right {
            return Ok(Some(visit));
        }
        eprintln!("{host}{path}: {} {}", visit.status, String::from_utf8_lossy(&visit.body));
        self.errors += 1;
        Ok(None)
    }

    /// Asks so many targets in random order, and keeps the medians of the parts.
    fn measure(
        &mut self,
        round: usize,
        database: &str,
        variant: &str,
        count: usize,
        is_boosted: bool,
    ) -> Result<()> {
        let path = path(database, is_boosted);
        let mut values: [Vec<f64>; 6] = Default::default();
        let order = shuffled(count, round);
        for index in order.iter().cycle().take(self.pages.max(count)) {
            let Some(visit) = self.get(*index, &path)? else { continue };
            let time = |metric: &str| http::server_timing(visit.fields("server-timing"), metric);
            let parts = PARTS.map(|(_, _, metric)| time(metric));
            // Without a `between` there was one question.
            let Some(after) = parts[3] else { continue };
            let sum = parts.iter().flatten().sum::<f64>();
            let total = time("total").context("a receipt without its total")?;
            let outside: f64 = ["queue", "rules", "wake"].iter().filter_map(|metric| time(metric)).sum();
            let parts = [parts[0], parts[1], parts[2], Some(after)].map(Option::unwrap_or_default);
            for (all, value) in values.iter_mut().zip([parts[0], parts[1], parts[2], parts[3], sum, total]) {
                all.push(value);
            }
            self.fractions.push(sum / (total - outside));
        }
        ensure!(!values[0].is_empty(), "no receipt of {variant} has its parts");
        let metrics = PARTS.map(|(_, metric, _)| metric).into_iter().chain([SUM, WHOLE]);
        for (metric, values) in metrics.zip(values) {
            let middle = median(values).context("a set without pages")?;
            self.report.sample(round, database, variant, metric, middle);
        }
        Ok(())
    }
}

fn summarise(report: &mut Report, database: &str, targets: &[usize]) -> Result<()> {
    let variants = targets.iter().flat_map(|count| [false, true].map(|boosted| variant(*count, boosted)));
    let variants: Vec<String> = [ALONE.to_owned()].into_iter().chain(variants).collect();
    for variant in variants {
        for (part, metric) in PARTS.map(|(part, metric, _)| (part, metric)).into_iter().chain([("sum", SUM)])
        {
            report.set(format!("{database}_{part}_ms_{variant}"), report.median(database, &variant, metric)?);
            if variant != ALONE && part != "between" {
                let ratio = report.ratio(database, &variant, ALONE, metric)?;
                report.set(format!("{database}_{part}_ratio_{variant}"), ratio);
            }
        }
    }
    Ok(())
}

fn chart(report: &Report, databases: &[&str], targets: &[usize]) -> Chart {
    let all = targets.iter().flat_map(|count| [false, true].map(|boosted| variant(*count, boosted)));
    let all: Vec<String> = [ALONE.to_owned()].into_iter().chain(all).collect();
    let variants: Vec<&str> = all.iter().map(String::as_str).collect();
    let panels = databases.iter().flat_map(|database| {
        PARTS.map(|(part, metric, _)| {
            report.panel(&format!("{database}: {part}"), "milliseconds", database, metric, &variants)
        })
    });
    Chart {
        title: "Where a page of a machine spends its time".into(),
        subtitle: "by the number of machines that are asked; median, whiskers: least and greatest round"
            .into(),
        panels: panels.collect(),
    }
}
