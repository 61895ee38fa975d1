//! The records of the cluster that is measured, and how its store is reached.

use anyhow::{Context as _, Result};
use nagaya_records::{NodeName, NodeRecord, Placement, PlacementReason, RecordChange, Site, SiteName};
use nagaya_store::etcd::{ClusterStore, EtcdOptions, RECORD_SECRET_LEN, RecordKeys};
use serde_json::json;
use tokio::runtime::{Builder, Runtime};

use crate::content::population::{SITES_PER_TENANT, SitePopulation};
use crate::lab::Lab;

/// Sites of the cluster that is loaded, followed and changed.
pub const SITES: usize = 100_000;

/// Members of the cluster that have records. Placements go from one to the next.
pub const MEMBERS: usize = 100;

/// Stores that follow one cluster at the same time.
pub const WATCHERS: usize = 100;

/// The lab's machine whose network the changing store uses; the following ones are with the
/// clients.
pub const WRITER: &str = "n1";

/// Returns a runtime for waits on a store. The stores' own threads do the work.
pub fn runtime() -> Result<Runtime> {
    Builder::new_current_thread().enable_all().build().context("starting a runtime")
}

pub fn options(lab: &Lab, cluster: &str) -> Result<EtcdOptions> {
    let endpoints = lab.endpoints()?;
    let read = |path: &std::path::PathBuf| {
        std::fs::read(path).with_context(|| format!("reading {}", path.display()))
    };
    let [ca, certificate, key] = &lab.store_access("n1");
    let identity = Some((read(certificate)?, read(key)?));
    let (ca, cluster) = (Some(read(ca)?), cluster.into());
    Ok(EtcdOptions { endpoints, cluster, ca, identity, login: None, insecure: false })
}

/// Returns keys that sign the records, as in every cluster.
pub fn record_keys() -> RecordKeys {
    RecordKeys { current: (1, [7; RECORD_SECRET_LEN]), older: Vec::new() }
}

/// Returns the site after its `turn`th change: its files have another directory.
pub fn changed_site(sites: &SitePopulation, index: usize, turn: usize) -> Result<RecordChange> {
    let site: Site = serde_json::from_value(json!({
        "name": format!("site-{index}"),
        "tenant": format!("tenant-{}", index / SITES_PER_TENANT),
        "hosts": [sites.host(index)],
        "backend": {"kind": "static", "root": sites.root(index).join(turn.to_string())},
    }))
    .context("a site's record")?;
    Ok(RecordChange::PutSite(Box::new(site)))
}

/// Returns where the site is under this epoch, and which node has it until then.
pub fn placement(index: usize, epoch: u64) -> Result<(Placement, NodeName)> {
    let at = |epoch: u64| member((index as u64 + epoch) % MEMBERS as u64);
    let placement = Placement {
        site: SiteName::new(&format!("site-{index}"))?,
        node: at(epoch)?,
        epoch,
        since_ms: 1_700_000_000_000,
        why: PlacementReason::Silent,
        wait_ms: 303,
        node_epoch: 0,
        copies: Vec::new(),
    };
    Ok((placement, at(epoch - 1)?))
}

pub fn member(number: u64) -> Result<NodeName> {
    Ok(NodeName::new(&format!("node-{number}"))?)
}

/// Makes all members of the cluster. They get no requests.
pub async fn join_all(store: &ClusterStore) -> Result<()> {
    for number in 0..MEMBERS as u64 {
        let record = NodeRecord {
            name: member(number)?,
            id: format!("{number:032x}"),
            peer: format!("192.0.2.{}:7443", number + 1),
            draining: false,
            cpus: 8,
            memory_bytes: 64 << 30,
            version: env!("CARGO_PKG_VERSION").into(),
            knows: 0,
            fence_ms: 300,
            heeds_marks: true,
        };
        store.join(record).await?;
    }
    Ok(())
}
