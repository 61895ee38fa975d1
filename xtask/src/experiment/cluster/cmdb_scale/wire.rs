//! Stores that follow a cluster from the lab's networks, what they were told and when, and the bytes on their wire.
//!
//! Not here: what is measured with them (`stores`, `crowd`).

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use nagaya_cmdb::store::etcd::{ClusterStore, EtcdOptions, RecordSigning};
use nagaya_cmdb::store::{RedbStore, Store as _};
use nagaya_cmdb::{Backend, Change};
use tempfile::TempDir;

use crate::interrupt;
use crate::lab::Lab;

/// Longest wait for a change to arrive. Loading 100,000 sites is one.
const ARRIVES_MAX: Duration = Duration::from_secs(600);

/// How long a wire is looked at while nothing changes.
const IDLE: Duration = Duration::from_secs(3);

/// A change that a store was told of.
#[derive(Debug, Clone, Copy)]
pub struct Told {
    /// The epoch of a placement, or the number of a site's change.
    pub turn: u64,
    pub at: Instant,
}

/// A node's store with its copy in a file of its own. Nothing else of a node is there.
pub struct Follower {
    pub store: Arc<ClusterStore>,
    sites: Arc<AtomicUsize>,
    _dir: TempDir,
}

impl Follower {
    /// With an empty copy. `tell`: gets each change of a site whose files lie in a numbered directory, and each placement.
    pub fn open(options: &EtcdOptions, dir: &Path, tell: Option<Sender<Told>>) -> Result<Self> {
        let dir = tempfile::tempdir_in(dir).context("making a directory for a copy")?;
        let copy = RedbStore::open(&dir.path().join("copy.redb"))?;
        let sites = Arc::new(AtomicUsize::new(0));
        let seen = Arc::clone(&sites);
        let on_change = move |changes: Vec<Change>, _| {
            let at = Instant::now();
            for change in changes {
                if matches!(change, Change::PutSite(_)) {
                    seen.fetch_add(1, Ordering::Relaxed);
                }
                if let (Some(tell), Some(turn)) = (&tell, turn_of(&change)) {
                    // Whoever listened has measured enough.
                    let _ = tell.send(Told { turn, at });
                }
            }
        };
        let signing = RecordSigning::Required(super::record_keys());
        let store = ClusterStore::open(options, signing, Arc::new(copy), Arc::new(on_change))?;
        Ok(Self { store, sites, _dir: dir })
    }

    /// Waits until it was told of so many sites.
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

fn turn_of(change: &Change) -> Option<u64> {
    match change {
        Change::PutPlacement(placement) => Some(placement.epoch),
        Change::PutSite(site) => match &site.backend {
            Backend::Static(files) => files.root.file_name()?.to_str()?.parse().ok(),
            _ => None,
        },
        _ => None,
    }
}

/// For a store that is to follow, in the clients' network.
pub fn follow(lab: &Lab, options: &EtcdOptions, dir: &Path, tell: Option<Sender<Told>>) -> Result<Follower> {
    lab.as_client(|| Follower::open(options, dir, tell))?
}

/// Waits until this turn has arrived so many times. Returns when each did.
pub fn arrivals(told: &Receiver<Told>, turn: u64, count: usize) -> Result<Vec<Instant>> {
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

pub fn told() -> (Sender<Told>, Receiver<Told>) {
    channel()
}

/// Bytes on the clients' wire a second while nothing changes: questions whether the watch is up to date, and their answers. Who hears
/// something asks nothing for half a second, so none of it goes between changes that follow each other.
pub fn idle(lab: &Lab) -> Result<f64> {
    let begun = Instant::now();
    let bytes = bytes_during(lab, || {
        std::thread::sleep(IDLE);
        interrupt::check()
    })?;
    Ok(bytes / begun.elapsed().as_secs_f64())
}

/// Bytes on the clients' wire, both ways, with all headers from Ethernet's on, while this is done.
pub fn bytes_during(lab: &Lab, work: impl FnOnce() -> Result<()>) -> Result<f64> {
    let read = || lab.as_client(bytes_here)?;
    let before = read()?;
    work()?;
    Ok(read()? - before)
}

/// Received and sent by the interface of this thread's network.
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
