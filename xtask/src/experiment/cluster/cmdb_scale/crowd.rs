//! 100 stores that follow one cluster, all in this program and in one network. It measures how long
//! a change takes to reach half of them and all, and its cost on their wire.
//!
//! They share this machine's cores with etcd, which 100 machines would not. Their cluster has few
//! sites, as their copies would not fit one machine otherwise. The cost of a change does not depend
//! on unchanged sites. Their copies are in memory, as there is one disk for all of them. Not here:
//! a store that follows with all sites (`stores`).

use std::path::{Path, PathBuf};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use nagaya_store::etcd::{EtcdOptions, seed};
use nagaya_store::import::import;
use nagaya_store::{ChangeMode, RedbStore, Store as _};

use super::fixture::{WATCHERS, WRITER, changed_site, join_all, options, runtime};
use super::stores::place;
use super::wire::{StoreFollower, ToldChanges, arrivals, bytes_during, idle, told};
use crate::content::population::SitePopulation;
use crate::experiment::harness::ExperimentSetting;
use crate::interrupt;
use crate::lab::Lab;
use crate::report::{Report, median};

/// Sites of their cluster.
pub const SITES: usize = 1_000;

/// Changes of each kind that are timed. Each has arrived everywhere before the next is made.
const CHANGES: u64 = 30;

/// Changes of each kind whose bytes are counted. They follow each other at once, so that nothing
/// else goes over the wire meanwhile.
const COUNTED: u64 = 100;

/// A directory for files in memory.
const IN_MEMORY: &str = "/dev/shm";

pub fn measure(report: &mut Report, setting: &ExperimentSetting, lab: &Lab, round: usize) -> Result<()> {
    let options = options(lab, "crowd")?;
    let sites = SitePopulation { documents: setting.dir().join("documents"), count: SITES };
    let memory = Path::new(IN_MEMORY);
    let place_of_copies: PathBuf = if memory.is_dir() { memory.into() } else { setting.dir().into() };
    let dir = tempfile::tempdir_in(place_of_copies).context("making a directory for copies")?;
    let runtime = runtime()?;
    let writer = lab.as_machine(WRITER, || found(&options, &sites, dir.path()))??;
    runtime.block_on(join_all(&writer.store))?;
    eprintln!("letting {WATCHERS} stores follow");
    let (tell, heard) = told();
    let crowd = lab.as_client(|| {
        let open = |_| {
            interrupt::check()?;
            StoreFollower::open(&options, dir.path(), Some(tell.clone()))
        };
        (0..WATCHERS).map(open).collect::<Result<Vec<_>>>()
    })??;
    for one in &crowd {
        one.until_told(SITES)?;
        runtime.block_on(one.store.in_step(Duration::from_secs(60)))?;
    }
    report.sample(round, "traffic to 100", "idle", "bytes", idle(lab)?);
    let change_site = |turn: u64| {
        let index = usize::try_from(turn).context("a turn")?;
        writer.store.transaction(vec![changed_site(&sites, index, index)?], ChangeMode::Merge)?;
        Ok(())
    };
    let change_placement = |turn| runtime.block_on(place(&writer.store, 0, turn));
    let changes: [(&str, &Change<'_>); 2] = [("site", &change_site), ("placement", &change_placement)];
    for (kind, change) in changes {
        time(report, round, kind, &heard, change)?;
        let bytes = bytes_during(lab, || {
            for turn in CHANGES + 1..=CHANGES + COUNTED {
                interrupt::check()?;
                change(turn)?;
            }
            arrivals(&heard, CHANGES + COUNTED, WATCHERS).map(drop)
        })?;
        report.sample(round, "traffic to 100", kind, "bytes", bytes / COUNTED as f64);
    }
    Ok(())
}

/// Makes one change, which has this number.
type Change<'c> = dyn Fn(u64) -> Result<()> + 'c;

/// Makes a cluster with these sites, and the store that changes them.
fn found(options: &EtcdOptions, sites: &SitePopulation, dir: &Path) -> Result<StoreFollower> {
    let from = RedbStore::open(&dir.join("from.redb"))?;
    let mut records = Vec::new();
    sites.write_records(&mut records)?;
    import(&from, &records[..], ChangeMode::Merge)?;
    runtime()?.block_on(seed(options, &super::fixture::record_keys(), &[], &from))?;
    let writer = StoreFollower::open(options, dir, None)?;
    writer.until_told(SITES)?;
    Ok(writer)
}

/// Times changes one after the other, each from its call until it has arrived everywhere.
fn time(
    report: &mut Report,
    round: usize,
    kind: &str,
    heard: &Receiver<ToldChanges>,
    change: &Change<'_>,
) -> Result<()> {
    let (mut half, mut all) = (Vec::new(), Vec::new());
    for turn in 1..=CHANGES {
        interrupt::check()?;
        let begun = Instant::now();
        change(turn)?;
        let arrived = arrivals(heard, turn, WATCHERS)?;
        let ms = |at: Instant| at.saturating_duration_since(begun).as_secs_f64() * 1e3;
        half.push(ms(arrived[WATCHERS / 2 - 1]));
        all.push(ms(arrived[WATCHERS - 1]));
    }
    let case = format!("{kind} to 100");
    for (variant, times) in [("half have it", half), ("all have it", all)] {
        let middle = median(times).context("nothing was changed")?;
        report.sample(round, &case, variant, "milliseconds", middle);
    }
    Ok(())
}
