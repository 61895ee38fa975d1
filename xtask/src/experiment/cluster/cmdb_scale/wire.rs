//! Stores that follow a cluster from the lab's networks: their changes with times, and the bytes on
//! their wire.
//!
//! Not here: the measurements (`stores`, `crowd`).

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use nagaya_records::{Backend, RecordChange};
use nagaya_store::etcd::{ClusterStore, EtcdOptions, RecordSigning};
use nagaya_store::{RedbStore, Store as _};
use tempfile::TempDir;

use crate::interrupt;
use crate::lab::Lab;

/// Longest wait for a change to arrive. Loading 100,000 sites is one.
const ARRIVES_MAX: Duration = Duration::from_secs(600);

/// How long an idle wire is measured.
const IDLE: Duration = Duration::from_secs(3);

/// A change that a store reported.
#[derive(Debug, Clone, Copy)]
pub struct ToldChanges {
    /// The epoch of a placement, or the number of a site's change.
    pub turn: u64,
    pub at: Instant,
}

/// A node's store with its copy in a file of its own. Nothing else of a node is there.
pub struct StoreFollower {
    pub store: Arc<ClusterStore>,
    sites: Arc<AtomicUsize>,
    _dir: TempDir,
}

impl StoreFollower {
    /// Opens one with an empty copy. `tell` gets each change of a site whose files are in a
    /// numbered directory, and each placement.
    pub fn open(options: &EtcdOptions, dir: &Path, tell: Option<Sender<ToldChanges>>) -> Result<Self> {
        let dir = tempfile::tempdir_in(dir).context("making a directory for a copy")?;
        let copy = RedbStore::open(&dir.path().join("copy.redb"))?;
        let sites = Arc::new(AtomicUsize::new(0));
        let seen = Arc::clone(&sites);
        let on_change = move |changes: Vec<RecordChange>, _| {
            let at = Instant::now();
            for change in changes {
                if matches!(change, RecordChange::PutSite(_)) {
                    seen.fetch_add(1, Ordering::Relaxed);
                }
                if let (Some(tell), Some(turn)) = (&tell, turn_of(&change)) {
                    // The receiver has measured enough.
                    let _ = tell.send(ToldChanges { turn, at });
                }
            }
        };
        let signing = RecordSigning::Required(super::fixture::record_keys());
        let store = ClusterStore::open(options, signing, Arc::new(copy), Arc::new(on_change))?;
        Ok(Self { store, sites, _dir: dir })
    }

    /// Waits until this many sites were reported.
    pub fn until_told(&self, sites: usize) -> Result<()> {
        let begun = Instant::now();
        while self.sites.load(Ordering::Relaxed) < sites {
            interrupt::check()?;
            ensure!(
                begun.elapsed() < ARRIVES_MAX,
                "{} of {sites} sites have come: {:?}",
                self.store.counts()?.sites,
                self.store.trouble()
            );
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }
}

fn turn_of(change: &RecordChange) -> Option<u64> {
    match change {
        RecordChange::PutPlacement(placement) => Some(placement.epoch),
        RecordChange::PutSite(site) => match &site.backend {
            Backend::Static(files) => files.root.file_name()?.to_str()?.parse().ok(),
            _ => None,
        },
        _ => None,
    }
}

/// Opens a following store, in the clients' network.
pub fn follow(
    lab: &Lab,
    options: &EtcdOptions,
    dir: &Path,
    tell: Option<Sender<ToldChanges>>,
) -> Result<StoreFollower> {
    lab.as_client(|| StoreFollower::open(options, dir, tell))?
}

/// Waits until this turn has arrived this many times. Returns when each did.
pub fn arrivals(told: &Receiver<ToldChanges>, turn: u64, count: usize) -> Result<Vec<Instant>> {
    let end = Instant::now() + ARRIVES_MAX;
    let mut arrived = Vec::new();
    while arrived.len() < count {
        let left = end.saturating_duration_since(Instant::now());
        let told = told.recv_timeout(left).context("a change did not arrive everywhere")?;
        if told.turn == turn {
            arrived.push(told.at);
        }
    }
    arrived.sort_unstable();
    Ok(arrived)
}

pub fn told() -> (Sender<ToldChanges>, Receiver<ToldChanges>) {
    channel()
}

/// Returns bytes per second on the clients' wire while nothing changes. They are checks whether the
/// watch is up to date, and their replies. A store that hears something checks nothing for half a
/// second, so no check comes between changes in a row.
pub fn idle(lab: &Lab) -> Result<f64> {
    let begun = Instant::now();
    let bytes = bytes_during(lab, || {
        std::thread::sleep(IDLE);
        interrupt::check()
    })?;
    Ok(bytes / begun.elapsed().as_secs_f64())
}

/// Returns bytes on the clients' wire, both ways, with all headers from Ethernet on, while this
/// work is done.
pub fn bytes_during(lab: &Lab, work: impl FnOnce() -> Result<()>) -> Result<f64> {
    let read = || lab.as_client(bytes_here)?;
    let before = read()?;
    work()?;
    Ok(read()? - before)
}

/// Returns the bytes received and sent by the interface of this thread's network.
pub fn bytes_here() -> Result<f64> {
    let text = fs::read_to_string("/proc/thread-self/net/dev").context("reading the interface's counters")?;
    let line = text.lines().find_map(|line| line.trim().strip_prefix("eth0:")).context("no eth0")?;
    let numbers: Vec<&str> = line.split_whitespace().collect();
    let number = |at: usize| {
        let text = numbers.get(at).context("too few counters")?;
        text.parse::<f64>().context("a counter")
    };
    Ok(number(0)? + number(8)?)
}
