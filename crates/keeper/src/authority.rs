//! The node's lease: the time until which this node may run the instances placed on it. Guards stop
//! them in time.
//!
//! Without a cluster there is no lease. In a cluster, each placed tree of processes has a
//! [`FreezeGuard`], from before its first process to after its last. The warden, a separate process
//! (`sandbox::warden`), freezes all of them when the lease from the supervisor ends. It thaws them
//! when the lease is extended. A site that has moved away is frozen as soon as that is read from
//! the feed. A longer lease behind it takes effect later. Not here: the effects on an instance
//! (`instances`), how a tree is frozen (`cells`).

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::{Duration, Instant};

use nagaya_base::Code;
use nagaya_keeper_api::codes;
use nagaya_keeper_api::protocol::FailureKind;
use nagaya_records::{NameError, NodeName, RecordChange, SiteName};
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::cells::{FreezeFile, KeptGuard, Leaf};
use crate::fault::Fault;
use crate::sandbox::{self, Launcher, WardenCommand, WardenReport};

/// This node has no lease now.
pub const FENCED: Code = Code(361);
/// This node cannot stop the instances placed on it.
pub const NO_WARDEN: Code = Code(362);
/// An instance was not handed over.
pub const NOT_RELEASED: Code = Code(363);

/// Maximum time for the warden to answer. It does nothing that waits. Only a frozen machine is
/// slower.
const ANSWER_MAX: Duration = Duration::from_secs(5);

/// State of this node's lease. Clones share it.
#[derive(Debug, Clone)]
pub struct PlacementLease {
    inner: Arc<LeaseShared>,
}

#[derive(Debug)]
struct LeaseShared {
    state: Mutex<LeaseState>,
    fenced: watch::Sender<bool>,
    /// The node belongs to a cluster.
    joined: watch::Sender<bool>,
    /// The warden has ended.
    ended: watch::Sender<bool>,
}

#[derive(Debug, Default)]
struct LeaseState {
    /// `None` without a cluster.
    node: Option<NodeName>,
    /// Its record was removed from the cluster while this ran. Placements it receives are no longer
    /// reliable.
    is_removed: bool,
    until_ns: u64,
    /// `None` without a cluster, or if there is none.
    warden: Option<Arc<OwnedFd>>,
    next: u64,
    guarded: HashMap<SiteName, Vec<u64>>,
    /// Registrations that the warden has not answered.
    asked: HashMap<u64, SyncSender<Result<(), i32>>>,
    /// Sites that a change has moved away, which was read and not applied yet, with the number of
    /// its commit.
    away: HashMap<SiteName, u64>,
    /// Number of commits that were read.
    commits: u64,
    /// Number of times that all was frozen, and how long after the lease's end the last time was.
    fences: u64,
    last_fence: Option<(Duration, u32)>,
}

/// A guarded tree of processes, which is frozen in time. Must be dropped only when nothing of the
/// tree is left.
#[derive(Debug)]
pub struct FreezeGuard {
    inner: Arc<LeaseShared>,
    site: SiteName,
    number: u64,
}

impl KeptGuard for FreezeGuard {}

impl Default for PlacementLease {
    fn default() -> Self {
        let inner = LeaseShared {
            state: Mutex::default(),
            fenced: watch::Sender::new(false),
            joined: watch::Sender::new(false),
            ended: watch::Sender::new(false),
        };
        Self { inner: Arc::new(inner) }
    }
}

impl PlacementLease {
    // === From the feed ===

    /// Joins the node to a cluster: nothing placed runs before the first lease. This holds for
    /// life.
    pub fn join(&self, node: Option<&str>) -> Result<(), NameError> {
        let mut state = self.inner.state.lock();
        if let (Some(node), None) = (node, &state.node) {
            state.node = Some(NodeName::new(node)?);
            self.inner.fenced.send_replace(true);
            self.inner.joined.send_replace(true);
        }
        Ok(())
    }

    /// Extends the lease to `until_ns`. Called for every frame, and never waits.
    pub fn extend(&self, until_ns: u64) {
        let mut state = self.inner.state.lock();
        state.until_ns = state.until_ns.max(until_ns);
        state.tell(WardenCommand::Until(until_ns), &[]);
    }

    /// Notes changes as they are read: sites they move away are frozen before later frames take
    /// effect.
    pub fn note(&self, changes: &[RecordChange]) {
        let mut state = self.inner.state.lock();
        let Some(node) = state.node.clone() else { return };
        let commit = state.commits;
        for change in changes {
            match change {
                RecordChange::PutPlacement(placement) if placement.part(&node).is_some() => {
                    state.away.remove(&placement.site);
                }
                RecordChange::PutPlacement(placement) => state.leave(&placement.site, commit),
                RecordChange::DropPlacement(site) => state.leave(site, commit),
                RecordChange::DropNode(name) if *name == node => state.is_removed = true,
                RecordChange::PutNode(record) if record.name == node => state.is_removed = false,
                _ => {}
            }
        }
    }

    /// Notes that all changes until here were read. Returns the number of this commit.
    pub fn commit_read(&self) -> u64 {
        let mut state = self.inner.state.lock();
        state.commits += 1;
        state.commits
    }

    /// Notes that all changes of this commit are applied: the table has the placements of sites.
    pub fn commit_done(&self, number: u64) {
        self.inner.state.lock().away.retain(|_, commit| *commit >= number);
    }

    // === From the main loop ===

    /// Starts the warden, if the node belongs to a cluster and it does not run. Without it nothing
    /// that is placed starts.
    pub fn begin(&self, launcher: Option<&Launcher>) -> io::Result<()> {
        let is_needed = {
            let state = self.inner.state.lock();
            state.node.is_some() && state.warden.is_none()
        };
        if !is_needed {
            return Ok(());
        }
        let Some(launcher) = launcher else {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "it needs root"));
        };
        let socket = Arc::new(launcher.warden().map_err(io::Error::other)?);
        {
            let mut state = self.inner.state.lock();
            state.warden = Some(Arc::clone(&socket));
            if state.until_ns > 0 {
                let until_ns = state.until_ns;
                state.tell(WardenCommand::Until(until_ns), &[]);
            }
        }
        let inner = Arc::clone(&self.inner);
        let listen = move || listen(&inner, &socket);
        std::thread::Builder::new().name("keeper-warden".into()).spawn(listen)?;
        Ok(())
    }

    /// Returns the name of this node in its cluster. `None` without a cluster.
    pub fn node(&self) -> Option<NodeName> {
        self.inner.state.lock().node.clone()
    }

    /// Whether this node was removed from its cluster: then nothing is placed on it, whatever
    /// placements say.
    pub fn is_removed(&self) -> bool {
        self.inner.state.lock().is_removed
    }

    /// Returns a number that changes whenever this site's processes are frozen. `None` while they
    /// are.
    pub fn stops(&self, site: &SiteName) -> Option<u64> {
        let state = self.inner.state.lock();
        let runs = !*self.inner.fenced.borrow() && !state.away.contains_key(site);
        runs.then_some(state.fences)
    }

    /// Returns a receiver of whether all placed instances are frozen.
    pub fn fenced(&self) -> watch::Receiver<bool> {
        self.inner.fenced.subscribe()
    }

    /// Returns once the node belongs to a cluster.
    pub async fn wait_until_joined(&self) {
        let mut joined = self.inner.joined.subscribe();
        // The sender is `self`'s own.
        let _ = joined.wait_for(|joined| *joined).await;
    }

    /// Returns once the warden has ended.
    pub async fn wait_until_lost(&self) {
        let mut ended = self.inner.ended.subscribe();
        // The sender is `self`'s own.
        let _ = ended.wait_for(|ended| *ended).await;
    }

    /// Guards a tree that has no process yet. After this returns none of it runs without a lease.
    /// Blocks.
    pub fn guard(&self, site: &SiteName, leaf: &Leaf) -> Result<Option<FreezeGuard>, Fault> {
        if self.inner.state.lock().node.is_none() {
            return Ok(None);
        }
        let cannot = |why: &dyn std::fmt::Display| {
            let message = format!(
                "the application of '{site}' is not started: it could not be stopped in time ({why})"
            );
            Fault::new(FailureKind::Busy, NO_WARDEN, message)
        };
        let FreezeFile { version, own, all } = leaf.brake().map_err(|error| cannot(&error))?;
        let (sender, answer) = sync_channel(1);
        let number = {
            let mut state = self.inner.state.lock();
            if state.warden.is_none() {
                return Err(cannot(&"there is no warden; the log of nagaya's start says why"));
            }
            if state.away.contains_key(site) {
                let message = format!("the application of '{site}' has just been placed elsewhere");
                return Err(Fault::new(FailureKind::Busy, codes::ELSEWHERE, message));
            }
            state.next += 1;
            let number = state.next;
            state.asked.insert(number, sender);
            state.guarded.entry(site.clone()).or_default().push(number);
            let fds: Vec<_> = [Some(&own), all.as_ref()].into_iter().flatten().map(AsFd::as_fd).collect();
            state.tell(WardenCommand::Add { number, version }, &fds);
            number
        };
        let guard = FreezeGuard { inner: Arc::clone(&self.inner), site: site.clone(), number };
        let answered = answer.recv_timeout(ANSWER_MAX);
        self.inner.state.lock().asked.remove(&number);
        match answered {
            Ok(Ok(())) => Ok(Some(guard)),
            Ok(Err(errno)) => Err(cannot(&io::Error::from_raw_os_error(errno))),
            Err(_) => Err(cannot(&"the warden does not answer")),
        }
    }

    /// Describes the lease for `nagaya status`. Null without a cluster.
    pub fn status(&self) -> serde_json::Value {
        let state = self.inner.state.lock();
        let Some(node) = &state.node else { return serde_json::Value::Null };
        let last = state.last_fence.map(|(after, count)| {
            serde_json::json!({"after_us": u64::try_from(after.as_micros()).unwrap_or(u64::MAX), "instances": count})
        });
        serde_json::json!({
            "node": node.as_str(),
            "fenced": *self.inner.fenced.borrow(),
            "warden": state.warden.is_some(),
            "fences": state.fences,
            "last_fence": last,
        })
    }
}

impl LeaseState {
    fn tell(&mut self, ward: WardenCommand, fds: &[std::os::fd::BorrowedFd<'_>]) {
        // The listening thread notices a warden that has ended.
        if let Some(warden) = &self.warden
            && let Err(error) = sandbox::send(&**warden, &ward, fds)
        {
            tracing::warn!(%error, "{NO_WARDEN}: the warden cannot be reached");
        }
    }

    /// Freezes a site's processes for good: it is placed elsewhere.
    fn leave(&mut self, site: &SiteName, commit: u64) {
        self.away.insert(site.clone(), commit);
        for number in self.guarded.get(site).cloned().unwrap_or_default() {
            self.tell(WardenCommand::Hold { number }, &[]);
        }
    }
}

impl Drop for FreezeGuard {
    fn drop(&mut self) {
        let mut state = self.inner.state.lock();
        state.tell(WardenCommand::Remove { number: self.number }, &[]);
        if let Some(numbers) = state.guarded.get_mut(&self.site) {
            numbers.retain(|number| *number != self.number);
            if numbers.is_empty() {
                state.guarded.remove(&self.site);
            }
        }
    }
}

/// Handles the warden's messages, until it ends.
fn listen(inner: &LeaseShared, socket: &OwnedFd) {
    let began = Instant::now();
    loop {
        let told = match sandbox::receive::<WardenReport>(socket) {
            Ok(Some((told, _))) => told,
            Ok(None) => break,
            Err(error) => {
                tracing::error!(%error, "{NO_WARDEN}: the warden cannot be understood");
                break;
            }
        };
        match told {
            WardenReport::Added { number } => inner.answer(number, Ok(())),
            WardenReport::Failed { number, errno } => {
                let error = io::Error::from_raw_os_error(errno);
                tracing::error!(%error, "{NO_WARDEN}: an instance could not be stopped in time");
                inner.answer(number, Err(errno));
            }
            WardenReport::Fenced { after_ns, count } => {
                let after = Duration::from_nanos(after_ns);
                tracing::warn!(
                    ?after,
                    instances = count,
                    "{FENCED}: the node has lost its lease; its placed applications are frozen"
                );
                let mut state = inner.state.lock();
                state.fences += 1;
                state.last_fence = Some((after, count));
                drop(state);
                inner.fenced.send_replace(true);
            }
            WardenReport::Freed => {
                tracing::info!(after = ?began.elapsed(), "the node has a lease; its placed applications may run");
                inner.fenced.send_replace(false);
            }
        }
    }
    // No tree is guarded any more: nothing placed may continue.
    tracing::error!("{NO_WARDEN}: the warden has ended; the keeper ends, and starts again with a new one");
    inner.state.lock().warden = None;
    inner.fenced.send_replace(true);
    inner.ended.send_replace(true);
}

impl LeaseShared {
    fn answer(&self, number: u64, answer: Result<(), i32>) {
        let asked = self.state.lock().asked.remove(&number);
        if let Some(asked) = asked {
            // The caller may have given up.
            let _ = asked.send(answer);
        }
    }
}
