//! Real nodes with all sites: one alone, the same during its move into a cluster, and one that
//! joins. Their memory is measured after they were started from their stores and serve. The
//! allocator's state after an import says nothing.
//!
//! Not here: the stores without a node around them (`stores`).

use std::fs;
use std::io::BufWriter;
use std::os::unix::fs::PermissionsExt as _;
use std::time::Instant;

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::super::until;
use super::wire::bytes_here;
use crate::content::population::{HELLO, SitePopulation};
use crate::http;
use crate::lab::Lab;
use crate::report::Report;

const CLUSTER: &str = "nodes";

/// The requested page.
const PAGE: &str = "hello.txt";

pub fn measure(report: &mut Report, lab: &Lab, sites: &SitePopulation, round: usize) -> Result<()> {
    eprintln!("starting nodes with all sites");
    // The last in order of name has a page, so a node which serves it has all of them.
    let root = sites.root(sites.count - 1);
    fs::create_dir_all(&root).with_context(|| format!("creating {}", root.display()))?;
    fs::write(root.join(PAGE), HELLO).context("writing a page")?;
    for dir in [sites.documents(), &root] {
        fs::set_permissions(dir, fs::Permissions::from_mode(0o755)).context("opening the documents")?;
    }
    let first = lab.node("n1")?;
    let (path, writer) = first.records("sites.jsonl")?;
    sites.write_records(BufWriter::new(writer))?;
    first.import(&path)?;
    memory(report, lab, sites, round, ("n1", "redb"))?;

    let begun = Instant::now();
    lab.found("n1", CLUSTER)?;
    report.sample(round, "node", "moves into the cluster", "seconds", begun.elapsed().as_secs_f64());
    let wire = || lab.as_machine("n2", bytes_here)?;
    let (begun, before) = (Instant::now(), wire()?);
    lab.join("n2", "n1")?;
    report.sample(round, "node", "joins", "seconds", begun.elapsed().as_secs_f64());
    report.sample(round, "node", "joins", "bytes", wire()? - before);
    memory(report, lab, sites, round, ("n2", "etcd"))
}

/// Restarts the node and measures its processes once it serves the last site.
fn memory(
    report: &mut Report,
    lab: &Lab,
    sites: &SitePopulation,
    round: usize,
    (name, store): (&str, &str),
) -> Result<()> {
    lab.kill(name)?;
    lab.start(name)?;
    let (node, address) = (lab.node(name)?, lab.address(name)?);
    let (host, path) = (sites.host(sites.count - 1), format!("/{PAGE}"));
    until(&format!("{name} serves the last site"), || {
        let answer = lab.as_client(|| http::get(address, &host, &path))?;
        Ok(answer.is_ok_and(|(status, body)| status == 200 && body == HELLO.as_bytes()))
    })?;
    let status: Value =
        serde_json::from_str(&node.run(&["status", "--json"])?).context("reading a status")?;
    let processes = status["processes"].as_array().context("a status without processes")?;
    let mut sum = 0.0;
    for process in processes {
        let name = process["name"].as_str().context("a process without a name")?;
        let bytes = process["rss_bytes"].as_f64().with_context(|| format!("no memory of {name}"))?;
        let mib = bytes / f64::from(1 << 20);
        report.sample(round, "memory", &format!("{store}: {name}"), "mib", mib);
        sum += mib;
    }
    report.sample(round, "memory", store, "mib", sum);
    Ok(())
}
