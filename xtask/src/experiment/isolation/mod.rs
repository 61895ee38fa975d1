//! The experiments of per-request isolation: the cost of rules and cells, the accuracy of limits,
//! and the protection of others.
//!
//! Not here: the separate cost of one execution in a cell (`cell_cost`) and of one evaluation
//! (`rule_cost`).

pub mod accuracy;
pub mod io;
pub mod neighbour;
pub mod overhead;

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde_json::json;

use crate::clients::ClientQuestion;
use crate::content;
use crate::content::population::UID_BASE;
use crate::experiment::harness::ExperimentSetting;
use crate::server::nagaya::{NagayaNode, NagayaSettings};
use crate::server::{StartProbe, TestServer};

/// Requests of programs that the node lets run at once: more than any experiment sends.
const AT_ONCE_MAX: u32 = 64;

/// Counts to the number in its query: one shell, no other program, nothing but CPU time.
const COUNT: &str = "#!/bin/sh\nn=${QUERY_STRING#n=}\ni=0\nwhile [ \"$i\" -lt \"$n\" ]; do i=$((i + 1)); done\n\
     printf 'Content-Type: text/plain\\r\\n\\r\\ncounted to %s\\n' \"$i\"\n";

/// Writes a program into its own directory that belongs to the experiments' tenant.
fn program(dir: &Path, name: &str, text: &str) -> Result<PathBuf> {
    let root = dir.join("programs");
    fs::create_dir_all(&root).with_context(|| format!("creating {}", root.display()))?;
    let file = root.join(name);
    fs::write(&file, text).with_context(|| format!("writing {}", file.display()))?;
    fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).context("making a program executable")?;
    content::give(&root, UID_BASE)?;
    Ok(root)
}

/// Starts a node whose one tenant has a site with these programs for each host.
fn start(
    setting: &ExperimentSetting,
    root: &Path,
    hosts: &[&str],
    rules: &str,
    probe: &str,
) -> Result<TestServer> {
    let settings =
        NagayaSettings { rules: vec![("access_checker", rules.into())], ..NagayaSettings::default() };
    let node = NagayaNode::create(&setting.program, setting.dir(), "nagaya", settings)?;
    let (path, mut writer) = node.records("sites.jsonl")?;
    let mut line = |record: serde_json::Value| writeln!(writer, "{record}").context("writing records");
    line(
        json!({"tenant": {"name": "programs", "uid": UID_BASE, "gid": UID_BASE, "home": root, "max_concurrent": AT_ONCE_MAX}}),
    )?;
    for host in hosts {
        let name = host.split('.').next().unwrap_or(host);
        line(json!({"site": {
            "name": name,
            "tenant": "programs",
            "hosts": [host],
            "backend": {"kind": "cgi", "root": root},
        }}))?;
    }
    writer.flush().context("writing records")?;
    drop(writer);
    node.import(&path)?;
    node.start(&StartProbe { host: hosts[0].into(), path: probe.into() })
}

fn question(server: &TestServer, host: &str, path: String) -> ClientQuestion {
    ClientQuestion { address: server.address, host: host.into(), path }
}
