//! The context of each experiment, and several servers that take turns under the same load.
//!
//! Not here: the list of experiments (`registry`), making load (`load`), writing results
//! (`report`).

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use tempfile::TempDir;

use crate::load::{LoadSettings, LoadTarget};
use crate::report::Report;
use crate::server::TestServer;
use crate::{http, load};

/// Connections of the main load.
pub const CONNECTIONS: u32 = 100;

/// Options from the command line, and a directory that lives as long as the experiment.
pub struct ExperimentSetting {
    pub quick: bool,
    /// Includes parts that take long to prepare.
    pub full: bool,
    /// Chosen parts by their names; empty means all.
    pub only: Vec<String>,
    pub out: PathBuf,
    pub dir: TempDir,
    pub program: PathBuf,
}

impl ExperimentSetting {
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub fn rounds(&self) -> usize {
        if self.quick { 5 } else { 9 }
    }

    pub fn load(&self) -> LoadSettings {
        LoadSettings {
            connections: CONNECTIONS,
            duration: Duration::from_secs(if self.quick { 2 } else { 8 }),
        }
    }
}

/// The same request sent to several servers, in turn within each round.
pub struct ExperimentCase<'s> {
    pub name: &'static str,
    pub target: LoadTarget,
    pub servers: Vec<(&'static str, &'s TestServer)>,
}

/// Measures all cases: every server once per case and round, in an order that rotates with the
/// round.
pub fn interleave(
    report: &mut Report,
    setting: &ExperimentSetting,
    load: &LoadSettings,
    cases: &[ExperimentCase<'_>],
) -> Result<()> {
    const WARM_UP: Duration = Duration::from_secs(1);
    report.note(
        "load",
        json!({
            "generator": "wrk, two threads, closed loop, keep-alive",
            "connections": load.connections,
            "seconds": load.duration.as_secs(),
            "rounds": setting.rounds(),
        }),
    );
    for case in cases {
        for (_, server) in &case.servers {
            check_answer(server, &case.target)?;
            load::run(server.address, &case.target, &LoadSettings { duration: WARM_UP, ..*load })?;
        }
    }
    for round in 0..setting.rounds() {
        for case in cases {
            let mut order = case.servers.clone();
            let turns = round % order.len();
            order.rotate_left(turns);
            for (variant, server) in order {
                let cpu = server.cpu_seconds();
                let outcome = load::run(server.address, &case.target, load)
                    .with_context(|| format!("{variant} doing {}", case.name))?;
                report.outcome(round, case.name, variant, &outcome, server.cpu_seconds() - cpu);
            }
        }
        eprintln!("round {} of {} done", round + 1, setting.rounds());
    }
    Ok(())
}

/// Checks that the first and the last host give a right response before the measurement.
fn check_answer(server: &TestServer, target: &LoadTarget) -> Result<()> {
    for host in target.hosts.iter().take(1).chain(target.hosts.last()) {
        let body = http::get_ok(server.address, host, &target.path)?;
        ensure!(
            target.body_bytes.contains(&(body.len() as u64)),
            "http://{host}{} at {}: {} bytes, where {:?} are right",
            target.path,
            server.address,
            body.len(),
            target.body_bytes
        );
    }
    Ok(())
}
