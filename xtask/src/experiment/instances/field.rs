//! `wake-field`: applications of the field. Does a wake from an image take at most a third of a
//! start? Is a visitor still logged in after it? Does it show settings that were changed since the
//! image was taken?
//!
//! Each application is made twice: on a node that keeps images, and on one that keeps none. Starts
//! are measured on the second. Not here: all tiers (`wake`), how the applications are made
//! (`content::field`).

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use nagaya_records::instance::Tier;
use serde_json::{Value, json};

use super::session::{AppSession, text};
use super::{AppHosting, HostedApp, host, place, uid};
use crate::clients::to_float;
use crate::content::field::{FieldApp, FieldKind, HEAVY, LIGHT, TOKEN, VALUE};
use crate::content::mariadb::MariaDb;
use crate::content::population::UID_BASE;
use crate::content::{AppPage, MissingPackage};
use crate::experiment::harness::ExperimentSetting;
use crate::plot::Chart;
use crate::report::{Bound, Goal, Report};
use crate::server::instance;

/// Pause between a rest and a wake. The kernel's clean-up of the ended processes is not part of the
/// next wake.
const PAUSE: Duration = Duration::from_millis(30);

/// Wakes from an image in each round.
const WAKES: usize = 2;

/// MariaDB runs under a uid that no tenant has.
const MARIADB_UID: u32 = UID_BASE - 1;

/// Longest wake from an image, as a part of a start.
const PART_OF_COLD: f64 = 1.0 / 3.0;

const GOALS: [Goal; 13] = [
    part("flask_image_part_of_cold"),
    part("express_image_part_of_cold"),
    part("sinatra_image_part_of_cold"),
    part("spring_image_part_of_cold"),
    part("phpmyadmin_image_part_of_cold"),
    part("roundcube_image_part_of_cold"),
    part("mediawiki_image_part_of_cold"),
    part("next_image_part_of_cold"),
    none("not_from_image"),
    none("sessions_lost"),
    none("settings_back"),
    none("errors"),
    none("not_here"),
];

const fn part(key: &'static str) -> Goal {
    Goal { key, bound: Bound::AtMost(PART_OF_COLD), aim: 0.1 }
}

const fn none(key: &'static str) -> Goal {
    Goal { key, bound: Bound::AtMost(0.0), aim: 0.0 }
}

/// Failures, counted for each application and all together.
const FAULTS: [&str; 4] = ["not_from_image", "sessions_lost", "settings_back", "errors"];

/// An application on both nodes.
struct FieldTrial {
    name: &'static str,
    imaged: FieldApp,
    bare: FieldApp,
}

pub fn run(setting: &ExperimentSetting) -> Result<()> {
    let mut report = Report::new("wake-field");
    let mariadb = MariaDb::start(&setting.dir().join("mariadb"), MARIADB_UID)?;
    let trials = make_all(setting, &mariadb, &mut report)?;
    let hosted = |of: fn(&FieldTrial) -> &FieldApp| -> Result<Vec<HostedApp>> {
        let all = trials.iter().enumerate();
        all.map(|(index, trial)| {
            Ok(HostedApp { name: trial.name.into(), uid: uid(index)?, app: of(trial).app.clone() })
        })
        .collect()
    };
    let node = AppHosting::start(setting, "nagaya", &hosted(|trial| &trial.imaged)?, "")?;
    let bare =
        AppHosting::start(setting, "no-images", &hosted(|trial| &trial.bare)?, "image_bytes = \"0B\"\n")?;
    let rounds = if setting.quick { 3 } else { 9 };
    report.note("rounds", json!(rounds));
    let mut observer = FieldObserver { report: &mut report, node, bare };
    let mut took = vec![Duration::ZERO; trials.len()];
    for (trial, took) in trials.iter().zip(&mut took) {
        eprintln!("{}: the first starts", trial.name);
        let begun = Instant::now();
        observer.prepare(trial).with_context(|| trial.name)?;
        *took += begun.elapsed();
    }
    // Known since they rest as images.
    let criu = observer.node.criu()?;
    observer.report.note("CRIU", criu);
    for round in 0..rounds {
        for (trial, took) in trials.iter().zip(&mut took) {
            let begun = Instant::now();
            observer.measure_cold(round, trial).with_context(|| trial.name)?;
            observer.measure_image(round, trial).with_context(|| trial.name)?;
            observer.change_settings(round, trial).with_context(|| trial.name)?;
            *took += begun.elapsed();
        }
        eprintln!("round {} of {rounds} done", round + 1);
    }
    drop(observer);
    for (trial, took) in trials.iter().zip(took) {
        report.note(&format!("{} was asked for", trial.name), seconds(took));
    }
    let names: Vec<&str> = trials.iter().map(|trial| trial.name).collect();
    summarise(&mut report, &names)?;
    let chart = chart(&report, &names);
    report.write(&setting.out, &chart, &GOALS)
}

/// Returns the chosen ones: by their names, or the light ones, or all.
fn choose(only: &[String], full: bool) -> Result<Vec<&'static FieldKind>> {
    let all = || LIGHT.iter().chain(&HEAVY);
    if only.is_empty() {
        return Ok(all().take(if full { usize::MAX } else { LIGHT.len() }).collect());
    }
    let find = |name: &String| {
        let names: Vec<&str> = all().map(|kind| kind.name).collect();
        let found = all().find(|kind| kind.name == name);
        found.with_context(|| format!("there is no application '{name}': use some of {}", names.join(", ")))
    };
    only.iter().map(find).collect()
}

/// Makes each application twice. One whose packages are missing is noted, and counts as missing.
fn make_all(setting: &ExperimentSetting, mariadb: &MariaDb, report: &mut Report) -> Result<Vec<FieldTrial>> {
    let (mut trials, mut missing) = (Vec::new(), 0);
    for kind in choose(&setting.only, setting.full)? {
        eprintln!("preparing {}", kind.name);
        let begun = Instant::now();
        match make(setting, mariadb, kind, trials.len()) {
            Ok(trial) => {
                report.note(&format!("{} was made in", kind.name), seconds(begun.elapsed()));
                trials.push(trial);
            }
            Err(error) if error.downcast_ref::<MissingPackage>().is_some() => {
                eprintln!("{} is not measured: {error:#}", kind.name);
                report.note(&format!("{} is not here", kind.name), json!(format!("{error:#}")));
                missing += 1;
            }
            Err(error) => return Err(error.context(format!("making {}", kind.name))),
        }
    }
    report.set("not_here", to_float(missing));
    ensure!(!trials.is_empty(), "none of the applications is here");
    Ok(trials)
}

fn seconds(took: Duration) -> Value {
    json!(format!("{:.1} s", took.as_secs_f64()))
}

fn make(
    setting: &ExperimentSetting,
    mariadb: &MariaDb,
    kind: &FieldKind,
    index: usize,
) -> Result<FieldTrial> {
    let uid = uid(index)?;
    let account = mariadb.database(kind.name)?;
    let create = |name: String| (kind.create)(&place(setting.dir(), &name), uid, &account);
    Ok(FieldTrial {
        name: kind.name,
        imaged: create(kind.name.into())?,
        bare: create(format!("{}-bare", kind.name))?,
    })
}

struct FieldObserver<'r> {
    report: &'r mut Report,
    node: AppHosting,
    bare: AppHosting,
}

impl FieldObserver<'_> {
    fn count(&mut self, round: usize, trial: &FieldTrial, fault: &'static str, is_one: bool) {
        self.report.sample(round, trial.name, "image", fault, f64::from(u8::from(is_one)));
    }

    /// Starts both, twice: work that only a first start does is not part of the others.
    fn prepare(&mut self, trial: &FieldTrial) -> Result<()> {
        for _ in 0..2 {
            for (hosting, app, to) in
                [(&self.bare, &trial.bare, Tier::Cold), (&self.node, &trial.imaged, Tier::Image)]
            {
                hosting.visit(trial.name, app.app.page)?;
                instance::rest(&hosting.node, trial.name, to)
                    .with_context(|| format!("the node's log ends with:\n{}", hosting.process.log_end()))?;
            }
        }
        Ok(())
    }

    fn measure_cold(&mut self, round: usize, trial: &FieldTrial) -> Result<()> {
        let bare = &self.bare;
        instance::rest(&bare.node, trial.name, Tier::Cold)?;
        std::thread::sleep(PAUSE);
        let (visit, is_right) = bare.visit(trial.name, trial.bare.app.page)?;
        self.report.sample(round, trial.name, "cold", "first_byte_ms", visit.first_byte_ms);
        self.count(round, trial, "errors", !is_right);
        Ok(())
    }

    /// Measures wakes with a session that began before.
    fn measure_image(&mut self, round: usize, trial: &FieldTrial) -> Result<()> {
        let mut session = self.begin_session(round, trial)?;
        for _ in 0..WAKES {
            self.rest(trial)?;
            std::thread::sleep(PAUSE);
            let (visit, is_right) = self.node.visit(trial.name, trial.imaged.app.page)?;
            self.count(round, trial, "errors", !is_right);
            if self.note_wake(round, trial)? {
                self.report.sample(round, trial.name, "image", "first_byte_ms", visit.first_byte_ms);
            }
            let is_there = shows(&mut session, trial.imaged.session)?;
            self.count(round, trial, "sessions_lost", !is_there);
            let (warm, _) = self.node.visit(trial.name, trial.imaged.app.page)?;
            self.report.sample(round, trial.name, "warm", "first_byte_ms", warm.first_byte_ms);
        }
        Ok(())
    }

    /// Changes a setting through the application, which rests then, and in its file while it rests.
    fn change_settings(&mut self, round: usize, trial: &FieldTrial) -> Result<()> {
        let setting = &trial.imaged.setting;
        if !setting.inside.is_empty() {
            let value = format!("inside-{round}");
            let mut session = self.begin_session(round, trial)?;
            let is_done = session.follow(&setting.inside, &value)? && self.shows_setting(trial, &value)?;
            self.count(round, trial, "errors", !is_done);
            self.rest(trial)?;
            let is_shown = self.shows_setting(trial, &value)?;
            self.count(round, trial, "settings_back", !is_shown);
            let is_there = shows(&mut session, trial.imaged.session)?;
            self.count(round, trial, "sessions_lost", !is_there);
        }
        self.rest(trial)?;
        let value = format!("file-{round}");
        fs::write(&setting.file, setting.text.replace(VALUE, &value))
            .with_context(|| format!("writing {}", setting.file.display()))?;
        let is_shown = self.shows_setting(trial, &value)?;
        self.count(round, trial, "settings_back", !is_shown);
        // The next image is of the present state.
        self.rest(trial)
    }

    /// Logs in, and checks that this shows.
    fn begin_session(&mut self, round: usize, trial: &FieldTrial) -> Result<AppSession> {
        let mut session = AppSession::new(self.node.node.address, &host(trial.name));
        let began = session.follow(&trial.imaged.login, "")? && shows(&mut session, trial.imaged.session)?;
        self.count(round, trial, "errors", !began);
        Ok(session)
    }

    fn shows_setting(&self, trial: &FieldTrial, value: &str) -> Result<bool> {
        let mut visitor = AppSession::new(self.node.node.address, &host(trial.name));
        let (status, text, _) = visitor.send(trial.imaged.setting.path, None)?;
        let is_shown = status == 200 && text.contains(value);
        if !is_shown {
            eprintln!("{}: '{value}' is not shown ({status})", trial.name);
        }
        Ok(is_shown)
    }

    fn rest(&self, trial: &FieldTrial) -> Result<()> {
        instance::rest(&self.node.node, trial.name, Tier::Image)
            .with_context(|| format!("the node's log ends with:\n{}", self.node.process.log_end()))
            .map(drop)
    }

    /// Returns whether the last wake was from an image; notes the reason if it was not.
    fn note_wake(&mut self, round: usize, trial: &FieldTrial) -> Result<bool> {
        let status = self.node.status(trial.name)?;
        let from = status.last_wake.as_ref().map(|wake| wake.from);
        let is_image = from == Some(Tier::Image);
        self.count(round, trial, "not_from_image", !is_image);
        if is_image {
            if let Some(bytes) = status.image_bytes {
                self.report.sample(round, trial.name, "image", "image_mb", bytes / 1e6);
            }
        } else {
            let shown = self.node.node.run(&["instance", "show", trial.name, "--json"])?;
            let shown: serde_json::Value = serde_json::from_str(&shown).context("reading what is shown")?;
            let why = json!({"woke from": from.map(Tier::as_str), "note": shown["note"], "image_end": shown["image_end"]});
            eprintln!("{} did not wake from an image: {why}", trial.name);
            self.report.note(&format!("{} did not wake from an image", trial.name), why);
        }
        Ok(is_image)
    }
}

/// Returns whether a page shows that its visitor is known.
fn shows(session: &mut AppSession, page: AppPage) -> Result<bool> {
    let wanted = page.text.replace(TOKEN, &session.token);
    let (status, body, first) = session.send(page.path, None)?;
    let is_there = status == 200 && body.contains(&wanted);
    if !is_there {
        let said: String = text(&first).chars().take(300).collect();
        eprintln!("no session at {}: {} {said}", page.path, first.status);
    }
    Ok(is_there)
}

fn summarise(report: &mut Report, names: &[&str]) -> Result<()> {
    for name in names {
        for variant in ["cold", "warm"] {
            report.set(format!("{name}_{variant}_ms"), report.median(name, variant, "first_byte_ms")?);
        }
        // One that never woke from an image has no such time: `not_from_image` says so.
        if let Ok(ms) = report.median(name, "image", "first_byte_ms") {
            report.set(format!("{name}_image_ms"), ms);
            let part = report.ratio(name, "image", "cold", "first_byte_ms")?;
            report.set(format!("{name}_image_part_of_cold"), part);
        }
        if let Ok(mb) = report.median(name, "image", "image_mb") {
            report.set(format!("{name}_image_mb"), mb);
        }
    }
    for fault in FAULTS {
        for name in names {
            let times = report.sum(name, "image", fault);
            if times > 0.0 {
                report.set(format!("{name}_{fault}"), times);
            }
        }
        let all = names.iter().map(|name| report.sum(name, "image", fault)).sum();
        report.set(fault, all);
    }
    Ok(())
}

fn chart(report: &Report, names: &[&str]) -> Chart {
    let panel =
        |name: &&str| report.panel(name, "milliseconds", name, "first_byte_ms", &["cold", "image", "warm"]);
    Chart {
        title: "First byte of applications of the field".into(),
        subtitle: "started, woken from an image, and running; median, whiskers: least and greatest round"
            .into(),
        panels: names.iter().map(panel).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn applications_are_chosen_by_name() {
        let names = |only: &[&str], full| -> Result<Vec<&str>> {
            let only: Vec<String> = only.iter().map(|name| (*name).into()).collect();
            Ok(choose(&only, full)?.iter().map(|kind| kind.name).collect())
        };
        assert_eq!(names(&[], false).unwrap(), ["flask", "express", "sinatra"]);
        assert_eq!(names(&[], true).unwrap().len(), LIGHT.len() + HEAVY.len());
        assert_eq!(names(&["spring", "flask"], false).unwrap(), ["spring", "flask"]);
        let unknown = names(&["wordpress"], true).unwrap_err().to_string();
        assert!(unknown.contains("'wordpress'") && unknown.contains("mediawiki"), "{unknown}");
    }

    fn judge(image_ms: Option<f64>, fault: Option<&'static str>) -> String {
        let mut report = Report::new("wake-field");
        report.set("not_here", 0.0);
        for name in ["flask", "express"] {
            report.sample(0, name, "cold", "first_byte_ms", 300.0);
            report.sample(0, name, "warm", "first_byte_ms", 3.0);
            if let Some(ms) = image_ms {
                report.sample(0, name, "image", "first_byte_ms", ms);
            }
            for known in FAULTS {
                report.sample(0, name, "image", known, 0.0);
            }
        }
        if let Some(fault) = fault {
            report.sample(0, "express", "image", fault, 1.0);
        }
        summarise(&mut report, &["flask", "express"]).unwrap();
        report.table(&GOALS)
    }

    #[test]
    fn a_slow_wake_is_missed() {
        assert!(!judge(Some(99.0), None).contains("MISSED"));
        assert_eq!(judge(Some(101.0), None).matches("MISSED").count(), 2);
    }

    #[test]
    fn each_fault_is_missed() {
        for fault in FAULTS {
            let table = judge(Some(50.0), Some(fault));
            assert_eq!(table.matches("MISSED").count(), 1, "{table}");
            assert!(table.contains(&format!("express_{fault}")), "{table}");
        }
        let never = judge(None, Some("not_from_image"));
        assert_eq!(never.matches("MISSED").count(), 1, "{never}");
        assert!(!never.contains("part_of_cold"), "{never}");
    }
}
