//! The experiments of instances: wakes from each tier, the cost of resting instances, and the cost
//! of a sandbox. One checks that no fault reaches a visitor.
//!
//! Not here: the applications (`content`).

mod damon;
pub mod faults;
pub mod field;
pub mod parallel;
pub mod rest_cost;
pub mod sandbox_cost;
mod session;
pub mod wake;

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, ensure};
use nagaya_records::instance::Tier;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::content::population::UID_BASE;
use crate::content::{AppPage, ContentApp, copy_tree, django, give};
use crate::experiment::harness::ExperimentSetting;
use crate::http::{self, HttpVisit};
use crate::interrupt;
use crate::process::RunningProcess;
use crate::report::Report;
use crate::server::instance::{self, InstanceStatus};
use crate::server::nagaya::{NagayaNode, NagayaSettings};
use crate::swap::SwapSpace;

/// Settings of a node whose instances rest only on command.
pub(super) const RESTLESS: &str = "[instances]\nquiet_after = \"10d\"\nfrozen_after = \"11d\"\nreclaimed_after = \"12d\"\n\
     image_after = \"13d\"\ncold_after = \"14d\"\n";

/// A node's log line after it has reread its configuration.
const READ_AGAIN: &str = "the configuration was read again";

/// Longest wait for that.
const READ_MAX: Duration = Duration::from_secs(20);

/// A site of kind `app`, under the name of its application.
pub(super) struct HostedApp {
    pub(super) name: String,
    /// Uid of its tenant, whose files it uses.
    pub(super) uid: u32,
    pub(super) app: ContentApp,
}

/// A node with applications, each with its own tenant.
pub(super) struct AppHosting {
    pub(super) node: NagayaNode,
    pub(super) process: RunningProcess,
}

impl AppHosting {
    /// Starts a node. `tables` is the text that follows in the table `[instances]`.
    pub(super) fn start(
        setting: &ExperimentSetting,
        name: &str,
        apps: &[HostedApp],
        tables: &str,
    ) -> Result<Self> {
        let settings = NagayaSettings { tables: format!("{RESTLESS}{tables}"), ..NagayaSettings::default() };
        let mut records = Vec::new();
        for HostedApp { name, uid, app } in apps {
            records.push(json!({"tenant": {"name": name, "uid": uid, "gid": uid}}));
            records.extend(app.records(name, name, &host(name)));
        }
        Self::with_records(setting, name, settings, &records)
    }

    /// Starts a node with these records.
    pub(super) fn with_records(
        setting: &ExperimentSetting,
        name: &str,
        settings: NagayaSettings,
        records: &[Value],
    ) -> Result<Self> {
        let node = NagayaNode::create(&setting.program, setting.dir(), name, settings)?;
        let (path, mut writer) = node.records("sites.jsonl")?;
        for record in records {
            writeln!(writer, "{record}").context("writing records")?;
        }
        writer.flush().context("writing records")?;
        drop(writer);
        node.import(&path)?;
        let process = node.serve()?;
        Ok(Self { node, process })
    }

    /// Gets a page, as a visitor would. Returns true if it is the right one.
    pub(super) fn visit(&self, site: &str, page: AppPage) -> Result<(HttpVisit, bool)> {
        interrupt::check()?;
        let visit = http::visit(self.node.address, &host(site), page.path)?;
        let is_right = visit.status == 200 && String::from_utf8_lossy(&visit.body).contains(page.text);
        if !is_right {
            let said: String = String::from_utf8_lossy(&visit.body).chars().take(500).collect();
            eprintln!("{site}{}: {} {said}", page.path, visit.status);
        }
        Ok((visit, is_right))
    }

    /// Lets an unused instance rest, and waits until it does.
    pub(super) fn rest(&self, site: &str, to: Tier) -> Result<()> {
        let rests = instance::rest(&self.node, site, to)
            .with_context(|| format!("the node's log ends with:\n{}", self.process.log_end()))?;
        ensure!(rests.tier == to, "{site} has no image: {:?}", rests.note);
        Ok(())
    }

    pub(super) fn rest_all(&self, sites: &[&str], to: Tier) -> Result<()> {
        instance::rest_all(&self.node, sites, to)
            .with_context(|| format!("the node's log ends with:\n{}", self.process.log_end()))
    }

    pub(super) fn status(&self, site: &str) -> Result<InstanceStatus> {
        InstanceStatus::of(&self.node, site)
    }

    /// Checks that a site's last wake was from this tier.
    pub(super) fn ensure_woken_from(&self, site: &str, status: &InstanceStatus, tier: Tier) -> Result<()> {
        let woken = status.last_wake.as_ref().map(|wake| wake.from);
        ensure!(
            woken == Some(tier),
            "{site} rested at {tier} and woke from {woken:?}: {:?}\n{}",
            status.note,
            self.process.log_end()
        );
        Ok(())
    }

    /// Returns the version of the CRIU that makes its images.
    fn criu(&self) -> Result<Value> {
        let status = self.node.run(&["status", "--json"])?;
        let status: Value = serde_json::from_str(&status).context("reading the status")?;
        Ok(status["keeper"]["instances"]["images"]["criu"].clone())
    }

    fn statuses(&self) -> Result<BTreeMap<String, InstanceStatus>> {
        InstanceStatus::of_all(&self.node)
    }

    /// Makes the node reread its configuration with another table `[instances]`.
    fn reconfigure(&mut self, tables: &str) -> Result<()> {
        let file = self.node.config_file();
        let text = fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
        let (before, _) = text.split_once(RESTLESS).context("a configuration without its instances")?;
        fs::write(&file, format!("{before}{RESTLESS}{tables}"))
            .with_context(|| format!("writing {}", file.display()))?;
        let log = self.process.log_path().to_path_buf();
        let times = || fs::read_to_string(&log).map_or(0, |text| text.matches(READ_AGAIN).count());
        let before = times();
        self.process.signal(Signal::HUP);
        self.process.wait_until(READ_MAX, || times() > before)
    }

    /// Gets a page of each of these at the same moment.
    fn visit_all(&self, apps: &[HostedApp]) -> Result<Vec<(HttpVisit, bool)>> {
        let start = Barrier::new(apps.len());
        std::thread::scope(|scope| {
            let visitors: Vec<_> = apps
                .iter()
                .map(|hosted| {
                    scope.spawn(|| {
                        start.wait();
                        self.visit(&hosted.name, hosted.app.page)
                    })
                })
                .collect();
            visitors.into_iter().map(|one| one.join().map_err(|_| anyhow!("a visitor panicked"))?).collect()
        })
    }
}

pub(super) fn host(site: &str) -> String {
    format!("{}.example", site.replace('_', "-"))
}

pub(super) fn uid(index: usize) -> Result<u32> {
    Ok(UID_BASE + u32::try_from(index).context("number of applications")?)
}

/// Provides swap while the value lives. Notes where, or why it cannot.
fn swap(setting: &ExperimentSetting, report: &mut Report) -> Option<SwapSpace> {
    match SwapSpace::get(setting.dir()) {
        Ok(swap) => {
            report.note("swap", json!(swap.kind()));
            Some(swap)
        }
        Err(why) => {
            let why = format!("not measured: there is no swap, and none can be made: {why:#}");
            eprintln!("reclaimed: {why}");
            report.note("reclaimed", json!(why));
            None
        }
    }
}

/// Returns a directory for one application's files.
pub(super) fn place(dir: &Path, name: &str) -> PathBuf {
    dir.join("apps").join(name)
}

/// Makes this many Django journals, each with its own files and database.
pub(super) fn journals(dir: &Path, count: usize) -> Result<Vec<HostedApp>> {
    let first = place(dir, "journal-0");
    let app = django::create(&first, uid(0)?)?;
    let mut all = vec![HostedApp { name: "journal-0".into(), uid: uid(0)?, app }];
    for index in 1..count {
        interrupt::check()?;
        let name = format!("journal-{index}");
        let tree = place(dir, &name);
        copy_tree(&first, &tree)?;
        let uid = uid(index)?;
        give(&tree, uid)?;
        let mut app = all[0].app.clone();
        let moved = app.backend.to_string().replace(&*first.to_string_lossy(), &tree.to_string_lossy());
        app.backend = serde_json::from_str(&moved).context("moving a record")?;
        app.files = None;
        all.push(HostedApp { name, uid, app });
    }
    all[0].app.files = None;
    Ok(all)
}
