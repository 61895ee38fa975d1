//! The two stores themselves, with all sites. Loading uses the same code as `nagaya site import`.
//! Then come changes one after the other, and a node that follows.
//!
//! Not here: many following stores (`crowd`).

use std::io::{BufReader, BufWriter};
use std::time::{Duration, Instant};
use std::{fs::File, path::PathBuf};

use anyhow::{Context as _, Result, ensure};
use nagaya_store::etcd::{ClusterStore, PlacementOutcome, seed};
use nagaya_store::import::import;
use nagaya_store::{ChangeMode, RedbStore, Store};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use super::fixture::{SITES, WRITER, changed_site, join_all, options, placement, runtime};
use super::wire::{StoreFollower, arrivals, bytes_during, follow, idle, told};
use crate::clients::to_float;
use crate::content::population::SitePopulation;
use crate::experiment::harness::ExperimentSetting;
use crate::lab::Lab;
use crate::report::Report;

/// Changes whose bytes are counted.
const COUNTED: usize = 100;

/// Placements in flight at once, in the second case.
const AT_ONCE: usize = 64;

pub fn redb(
    report: &mut Report,
    setting: &ExperimentSetting,
    sites: &SitePopulation,
    round: usize,
) -> Result<()> {
    eprintln!("loading {SITES} sites into redb");
    let dir = tempfile::tempdir_in(setting.dir()).context("making a directory")?;
    let store = RedbStore::open(&dir.path().join("alone.redb"))?;
    report.sample(round, "load", "redb", "seconds", load(&store, &records(setting, sites)?)?);
    report.sample(round, "updates", "redb", "per_second", updates(&store, setting, sites)?);
    Ok(())
}

/// Measures three stores: one changes records, in a node's network. One follows from the beginning,
/// in the clients'. One comes when all is there.
pub fn etcd(
    report: &mut Report,
    setting: &ExperimentSetting,
    lab: &Lab,
    sites: &SitePopulation,
    round: usize,
) -> Result<()> {
    eprintln!("loading {SITES} sites into etcd");
    let options = options(lab, "scale")?;
    let records = records(setting, sites)?;
    let runtime = runtime()?;
    let dir = tempfile::tempdir_in(setting.dir()).context("making a directory")?;
    let empty = RedbStore::open(&dir.path().join("empty.redb"))?;
    let writer = lab.as_machine(WRITER, || -> Result<StoreFollower> {
        super::fixture::runtime()?.block_on(seed(&options, &super::fixture::record_keys(), &[], &empty))?;
        StoreFollower::open(&options, dir.path(), None)
    })??;
    let store = &*writer.store;
    let (tell, heard) = told();
    let reader = follow(lab, &options, dir.path(), Some(tell))?;
    runtime.block_on(reader.store.in_step(Duration::from_secs(60)))?;

    let begun = Instant::now();
    report.sample(round, "load", "etcd", "seconds", load(store, &records)?);
    reader.until_told(SITES)?;
    report.sample(round, "load", "node that follows", "seconds", begun.elapsed().as_secs_f64());
    runtime.block_on(join_all(store))?;
    runtime.block_on(reader.store.in_step(Duration::from_secs(60)))?;

    report.sample(round, "traffic", "idle", "bytes", idle(lab)?);
    let bytes = bytes_during(lab, || {
        for turn in 0..COUNTED {
            store.transaction(vec![changed_site(sites, turn, turn)?], ChangeMode::Merge)?;
            arrivals(&heard, turn as u64, 1)?;
        }
        Ok(())
    })?;
    report.sample(round, "traffic", "site", "bytes", bytes / to_float(COUNTED));
    let bytes = bytes_during(lab, || {
        for epoch in 1..=COUNTED as u64 {
            runtime.block_on(place(store, 0, epoch))?;
            arrivals(&heard, epoch, 1)?;
        }
        Ok(())
    })?;
    report.sample(round, "traffic", "placement", "bytes", bytes / to_float(COUNTED));

    report.sample(round, "updates", "etcd", "per_second", updates(store, setting, sites)?);
    for (variant, at_once) in [("one at a time", 1), ("64 at a time", AT_ONCE)] {
        let rate = placements(&runtime, &writer, setting, at_once)?;
        report.sample(round, "placements", variant, "per_second", rate);
    }
    drop(reader);
    let (bytes, seconds) = comes_later(lab, &options, dir.path().into())?;
    report.sample(round, "load", "node that comes later", "seconds", seconds);
    report.sample(round, "load", "node that comes later", "bytes_per_site", bytes / to_float(SITES));
    Ok(())
}

/// Runs a store with an empty copy until it has reported all sites. Returns the bytes on its wire,
/// and the seconds.
fn comes_later(lab: &Lab, options: &nagaya_store::etcd::EtcdOptions, dir: PathBuf) -> Result<(f64, f64)> {
    let mut seconds = 0.0;
    let bytes = bytes_during(lab, || {
        let begun = Instant::now();
        let late = follow(lab, options, &dir, None)?;
        late.until_told(SITES)?;
        seconds = begun.elapsed().as_secs_f64();
        Ok(())
    })?;
    Ok((bytes, seconds))
}

/// Returns a file with the records of all sites, written once.
fn records(setting: &ExperimentSetting, sites: &SitePopulation) -> Result<PathBuf> {
    let path = setting.dir().join("scale.jsonl");
    if !path.exists() {
        let file = File::create(&path).with_context(|| format!("creating {}", path.display()))?;
        sites.write_records(BufWriter::new(file))?;
    }
    Ok(path)
}

/// Returns the seconds until all are stored.
fn load(store: &dyn Store, records: &PathBuf) -> Result<f64> {
    let file = File::open(records).with_context(|| format!("opening {}", records.display()))?;
    let begun = Instant::now();
    import(store, BufReader::new(file), ChangeMode::Merge)?;
    let seconds = begun.elapsed().as_secs_f64();
    ensure!(store.counts()?.sites == SITES as u64, "{} sites are there", store.counts()?.sites);
    Ok(seconds)
}

fn lasts(setting: &ExperimentSetting) -> Duration {
    Duration::from_secs(if setting.quick { 3 } else { 10 })
}

/// Returns the sites changed per second, one after the other, each durable before the next.
fn updates(store: &dyn Store, setting: &ExperimentSetting, sites: &SitePopulation) -> Result<f64> {
    let begun = Instant::now();
    let mut done = 0;
    while begun.elapsed() < lasts(setting) {
        // Spread over all, so that no page of a tree is the only one that is written.
        let index = done * 7_919 % SITES;
        store.transaction(vec![changed_site(sites, index, SITES + done)?], ChangeMode::Merge)?;
        done += 1;
    }
    Ok(to_float(done) / begun.elapsed().as_secs_f64())
}

/// Returns the placements written per second. Concurrent ones have different sites, which never
/// wait for each other.
fn placements(
    runtime: &Runtime,
    writer: &StoreFollower,
    setting: &ExperimentSetting,
    at_once: usize,
) -> Result<f64> {
    let begun = Instant::now();
    let end = begun + lasts(setting);
    // The byte count has moved the first one.
    let first = 1 + at_once;
    let done = runtime.block_on(async {
        let mut movers = JoinSet::new();
        for index in first..first + at_once {
            let store = writer.store.clone();
            movers.spawn(async move {
                let mut epoch = 0;
                while Instant::now() < end {
                    epoch += 1;
                    place(&store, index, epoch).await?;
                }
                Ok::<u64, anyhow::Error>(epoch)
            });
        }
        let mut done = 0;
        while let Some(moved) = movers.join_next().await {
            done += moved.context("a mover panicked")??;
        }
        Ok::<u64, anyhow::Error>(done)
    })?;
    Ok(done as f64 / begun.elapsed().as_secs_f64())
}

/// Moves the site to the next node, as after a failure of its node.
pub async fn place(store: &ClusterStore, index: usize, epoch: u64) -> Result<()> {
    let (placement, from) = placement(index, epoch)?;
    let (seen, from) = if epoch == 1 { (None, None) } else { (Some(epoch - 1), Some(&from)) };
    let claim = store.place(placement, seen, from).await?;
    ensure!(claim == PlacementOutcome::Won, "site-{index} was not placed: {claim:?}");
    Ok(())
}
