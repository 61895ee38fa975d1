//! Authority: until when this node may run what is placed on it, and what sees to it that nothing runs longer.
//!
//! Outside of a cluster there is none of it. In one, each placed tree of processes has a [`Guard`], from before its first
//! process to after its last. The warden, a process of its own (`sandbox::warden`), stops all of them when the time that
//! the supervisor gave has passed, and lets them go on when it gives more. What has moved away is stopped as soon as that
//! is read from the feed, before any longer authority that comes behind it takes effect. Not here: what an instance makes
//! of it (`instances`), how a tree is stopped (`cells`).

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::{Duration, Instant};

use nagaya_base::Code;
use nagaya_cmdb::{Change, NameError, NodeName, SiteName};
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::cells::{Brake, Leaf};
use crate::fault::Fault;
use crate::protocol::Failure;
use crate::sandbox::{self, Launcher, Ward, Warded};

/// A site's application is placed on another node, or on none.
pub const ELSEWHERE: Code = Code(360);
/// This node has no authority now.
pub const FENCED: Code = Code(361);
/// This node cannot stop what is placed on it.
pub const NO_WARDEN: Code = Code(362);
/// An instance was not given up.
pub const NOT_RELEASED: Code = Code(363);

/// How long the warden may take to answer. It does nothing that waits; only a machine that stands still is slower.
const ANSWER_MAX: Duration = Duration::from_secs(5);

/// Where this node stands. Copies are of the same.
#[derive(Debug, Clone)]
pub struct Authority {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    state: Mutex<State>,
    fenced: watch::Sender<bool>,
    /// The node is one of a cluster's.
    joined: watch::Sender<bool>,
    /// The warden was there and is not any more.
    ended: watch::Sender<bool>,
}

#[derive(Debug, Default)]
struct State {
    /// None: it is alone.
    node: Option<NodeName>,
    /// Its record was taken out of the cluster while this ran. Where sites are is not told to it rightly any more.
    is_removed: bool,
    until_ns: u64,
    /// None: alone, or there is none.
    warden: Option<Arc<OwnedFd>>,
    next: u64,
    guarded: HashMap<SiteName, Vec<u64>>,
    /// Registrations the warden has not answered.
    asked: HashMap<u64, SyncSender<Result<(), i32>>>,
    /// Sites that are elsewhere by a change that was read and not acted on, with the number of its commit.
    away: HashMap<SiteName, u64>,
    /// Commits that were read.
    commits: u64,
    /// How often all was stopped, and how long after its time the last was.
    fences: u64,
    last_fence: Option<(Duration, u32)>,
}

/// A tree of processes that is stopped in time, until this is dropped: when nothing of it is left.
#[derive(Debug)]
pub struct Guard {
    inner: Arc<Inner>,
    site: SiteName,
    number: u64,
}

impl Default for Authority {
    fn default() -> Self {
        let inner = Inner {
            state: Mutex::default(),
            fenced: watch::Sender::new(false),
            joined: watch::Sender::new(false),
            ended: watch::Sender::new(false),
        };
        Self { inner: Arc::new(inner) }
    }
}

impl Authority {
    // === From the feed ===

    /// The node is one of a cluster's: nothing placed runs before the first authority. For life.
    pub fn join(&self, node: Option<&str>) -> Result<(), NameError> {
        let mut state = self.inner.state.lock();
        if let (Some(node), None) = (node, &state.node) {
            state.node = Some(NodeName::new(node)?);
            self.inner.fenced.send_replace(true);
            self.inner.joined.send_replace(true);
        }
        Ok(())
    }

    /// It may run until then. Called for every frame, without waiting for anything.
    pub fn extend(&self, until_ns: u64) {
        let mut state = self.inner.state.lock();
        state.until_ns = state.until_ns.max(until_ns);
        state.tell(Ward::Until(until_ns), &[]);
    }

    /// Notes changes as they are read: what they move away is stopped before anything that was sent after them holds.
    pub fn note(&self, changes: &[Change]) {
        let mut state = self.inner.state.lock();
        let Some(node) = state.node.clone() else { return };
        let commit = state.commits;
        for change in changes {
            match change {
                Change::PutPlacement(placement) if placement.part(&node).is_some() => {
                    state.away.remove(&placement.site);
                }
                Change::PutPlacement(placement) => state.leave(&placement.site, commit),
                Change::DropPlacement(site) => state.leave(site, commit),
                Change::DropNode(name) if *name == node => state.is_removed = true,
                Change::PutNode(record) if record.name == node => state.is_removed = false,
                _ => {}
            }
        }
    }

    /// All changes until here were read. The number of this commit.
    pub fn commit_read(&self) -> u64 {
        let mut state = self.inner.state.lock();
        state.commits += 1;
        state.commits
    }

    /// All of this commit are acted on: the table says where sites are.
    pub fn commit_done(&self, number: u64) {
        self.inner.state.lock().away.retain(|_, commit| *commit >= number);
    }

    // === From the main loop ===

    /// Starts the warden, if the node is one of a cluster's and it does not run. Without it nothing that is placed starts.
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
                state.tell(Ward::Until(until_ns), &[]);
            }
        }
        let inner = Arc::clone(&self.inner);
        let listen = move || listen(&inner, &socket);
        std::thread::Builder::new().name("keeper-warden".into()).spawn(listen)?;
        Ok(())
    }

    /// The name of this node in its cluster. None: it is alone.
    pub fn node(&self) -> Option<NodeName> {
        self.inner.state.lock().node.clone()
    }

    /// Whether this node was taken out of its cluster: nothing is placed on it, whatever placements say.
    pub fn is_removed(&self) -> bool {
        self.inner.state.lock().is_removed
    }

    /// A number that changes whenever this site's processes are stopped, and is no number while they are.
    pub fn stops(&self, site: &SiteName) -> Option<u64> {
        let state = self.inner.state.lock();
        let runs = !*self.inner.fenced.borrow() && !state.away.contains_key(site);
        runs.then_some(state.fences)
    }

    /// Whether all that is placed here is stopped.
    pub fn fenced(&self) -> watch::Receiver<bool> {
        self.inner.fenced.subscribe()
    }

    /// Returns once the node is one of a cluster's.
    pub async fn until_joined(&self) {
        let mut joined = self.inner.joined.subscribe();
        // The sender is `self`'s own.
        let _ = joined.wait_for(|joined| *joined).await;
    }

    /// Returns once the warden has ended.
    pub async fn until_lost(&self) {
        let mut ended = self.inner.ended.subscribe();
        // The sender is `self`'s own.
        let _ = ended.wait_for(|ended| *ended).await;
    }

    /// Guards a tree that has no process yet. From its return on none of it runs without authority. Blocks.
    pub fn guard(&self, site: &SiteName, leaf: &Leaf) -> Result<Option<Guard>, Fault> {
        if self.inner.state.lock().node.is_none() {
            return Ok(None);
        }
        let cannot = |why: &dyn std::fmt::Display| {
            let message = format!(
                "the application of '{site}' is not started: it could not be stopped in time ({why})"
            );
            Fault::new(Failure::Busy, NO_WARDEN, message)
        };
        let Brake { version, own, all } = leaf.brake().map_err(|error| cannot(&error))?;
        let (sender, answer) = sync_channel(1);
        let number = {
            let mut state = self.inner.state.lock();
            if state.warden.is_none() {
                return Err(cannot(&"there is no warden; the log of nagaya's start says why"));
            }
            if state.away.contains_key(site) {
                let message = format!("the application of '{site}' has just been placed elsewhere");
                return Err(Fault::new(Failure::Busy, ELSEWHERE, message));
            }
            state.next += 1;
            let number = state.next;
            state.asked.insert(number, sender);
            state.guarded.entry(site.clone()).or_default().push(number);
            let fds: Vec<_> = [Some(&own), all.as_ref()].into_iter().flatten().map(AsFd::as_fd).collect();
            state.tell(Ward::Add { number, version }, &fds);
            number
        };
        let guard = Guard { inner: Arc::clone(&self.inner), site: site.clone(), number };
        let answered = answer.recv_timeout(ANSWER_MAX);
        self.inner.state.lock().asked.remove(&number);
        match answered {
            Ok(Ok(())) => Ok(Some(guard)),
            Ok(Err(errno)) => Err(cannot(&io::Error::from_raw_os_error(errno))),
            Err(_) => Err(cannot(&"the warden does not answer")),
        }
    }

    /// For `nagaya status`: null where it is alone.
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

impl State {
    fn tell(&mut self, ward: Ward, fds: &[std::os::fd::BorrowedFd<'_>]) {
        // A warden that has ended is noticed by who listens to it.
        if let Some(warden) = &self.warden
            && let Err(error) = sandbox::send(&**warden, &ward, fds)
        {
            tracing::warn!(%error, "{NO_WARDEN}: the warden is not told");
        }
    }

    /// The site is elsewhere: what runs of it is stopped for good.
    fn leave(&mut self, site: &SiteName, commit: u64) {
        self.away.insert(site.clone(), commit);
        for number in self.guarded.get(site).cloned().unwrap_or_default() {
            self.tell(Ward::Hold { number }, &[]);
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let mut state = self.inner.state.lock();
        state.tell(Ward::Remove { number: self.number }, &[]);
        if let Some(numbers) = state.guarded.get_mut(&self.site) {
            numbers.retain(|number| *number != self.number);
            if numbers.is_empty() {
                state.guarded.remove(&self.site);
            }
        }
    }
}

/// What the warden says, until it ends.
fn listen(inner: &Inner, socket: &OwnedFd) {
    let began = Instant::now();
    loop {
        let told = match sandbox::receive::<Warded>(socket) {
            Ok(Some((told, _))) => told,
            Ok(None) => break,
            Err(error) => {
                tracing::error!(%error, "{NO_WARDEN}: the warden cannot be understood");
                break;
            }
        };
        match told {
            Warded::Added { number } => inner.answer(number, Ok(())),
            Warded::Failed { number, errno } => {
                let error = io::Error::from_raw_os_error(errno);
                tracing::error!(%error, "{NO_WARDEN}: an instance could not be stopped in time");
                inner.answer(number, Err(errno));
            }
            Warded::Fenced { after_ns, count } => {
                let after = Duration::from_nanos(after_ns);
                tracing::warn!(
                    ?after,
                    instances = count,
                    "{FENCED}: the node has lost its authority; what is placed here stands still"
                );
                let mut state = inner.state.lock();
                state.fences += 1;
                state.last_fence = Some((after, count));
                drop(state);
                inner.fenced.send_replace(true);
            }
            Warded::Freed => {
                tracing::info!(after = ?began.elapsed(), "the node has authority; what is placed here may run");
                inner.fenced.send_replace(false);
            }
        }
    }
    // Whoever is guarded is not any more: nothing placed may go on.
    tracing::error!("{NO_WARDEN}: the warden has ended; the keeper ends, and starts anew with another");
    inner.state.lock().warden = None;
    inner.fenced.send_replace(true);
    inner.ended.send_replace(true);
}

impl Inner {
    fn answer(&self, number: u64, answer: Result<(), i32>) {
        let asked = self.state.lock().asked.remove(&number);
        if let Some(asked) = asked {
            // Who asked may have given up.
            let _ = asked.send(answer);
        }
    }
}
