//! Request cells: processes of an instance that are in the cell of the request they serve, from
//! when it begins until it has ended.
//!
//! A request with limits of its own gets a cell beside its instance's, and the process that serves
//! it is moved there and back. Before an instance rests, or an image of it is taken, all are back.
//! Not here: which process that is (`entering`), cells (`cells`), how a request is slowed down step
//! by step (`process`).

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nagaya_keeper_api::protocol::RequestCellId;
use nagaya_records::cell::{LimitSet, RequestUsage};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::sync::Mutex;
use tokio::task::{AbortHandle, spawn_local};
use tokio::time::sleep;

use crate::cells::{CellError, LOOK_AGAIN_MAX, Leaf};
use crate::context::KeeperContext;
use crate::fault::Fault;
use crate::instances::limits::connection_holder::{ConnectionHolder, HolderQuery};
use crate::process::{CellRequest, slow_down};
use crate::sandbox::timespec;

/// Time between two checks whether a moved process serves others by now.
const SHARED_LOOK: Duration = Duration::from_millis(100);

/// Maximum number of processes that a worker may have started before it is found.
const DESCENDANTS_MAX: usize = 64;

/// Maximum number of passes through a cell's process list to move all of it.
const ROUNDS_MAX: usize = 8;

/// The request cells of one run.
pub struct RequestCells {
    context: Rc<KeeperContext>,
    /// The cell of the instance.
    leaf: Arc<Leaf>,
    /// Held by the task that moves processes.
    turn: Mutex<()>,
    taken: RefCell<HashMap<RequestCellId, Rc<TakenCell>>>,
    /// Its processes serve several requests at once.
    is_shared: Cell<bool>,
    /// By requests that had cells and have ended.
    cpu_us: Cell<u64>,
}

struct TakenCell {
    pid: Pid,
    leaf: Arc<Leaf>,
    demoted: Rc<Cell<u8>>,
    /// Tasks that demote it, and check whether it still serves one request.
    tasks: RefCell<Vec<AbortHandle>>,
    /// `None` until it was left.
    back: Cell<Option<CellReturn>>,
    /// Its processes are back in the instance's cell.
    is_empty: Cell<bool>,
}

/// Of a request cell that was left.
#[derive(Clone, Copy)]
enum CellReturn {
    Used(RequestUsage),
    /// Before its request had ended.
    Early,
}

/// A request's use of its cell; when it is dropped the process goes back.
pub struct RequestCellRef {
    cells: Rc<RequestCells>,
    id: RequestCellId,
    is_left: bool,
}

impl RequestCellRef {
    pub fn new(cells: Rc<RequestCells>, id: RequestCellId) -> Self {
        Self { cells, id, is_left: false }
    }

    pub fn id(&self) -> RequestCellId {
        self.id
    }

    /// The request has ended: nothing limits its process any more, and it goes back. `None` if it
    /// is not known for the whole request what it used.
    pub fn leave(mut self) -> Option<RequestUsage> {
        self.end()
    }

    fn end(&mut self) -> Option<RequestUsage> {
        if std::mem::replace(&mut self.is_left, true) {
            return None;
        }
        let cell = self.cells.taken.borrow().get(&self.id).cloned()?;
        self.cells.count(&cell);
        let back = cell.back.get();
        let (cells, id) = (Rc::clone(&self.cells), self.id);
        spawn_local(async move {
            let _turn = cells.turn.lock().await;
            cells.put_back(&cell).await;
            cells.taken.borrow_mut().remove(&id);
        });
        match back {
            Some(CellReturn::Used(usage)) => Some(usage),
            Some(CellReturn::Early) | None => None,
        }
    }
}

impl Drop for RequestCellRef {
    fn drop(&mut self) {
        self.end();
    }
}

impl RequestCells {
    pub fn new(context: Rc<KeeperContext>, leaf: Arc<Leaf>) -> Rc<Self> {
        Rc::new(Self {
            context,
            leaf,
            turn: Mutex::new(()),
            taken: RefCell::default(),
            is_shared: Cell::new(false),
            cpu_us: Cell::new(0),
        })
    }

    /// The cell of the instance.
    pub fn own_leaf(&self) -> &Arc<Leaf> {
        &self.leaf
    }

    /// Whether its processes serve several requests at once: then none of them is moved.
    pub fn is_shared(&self) -> bool {
        self.is_shared.get()
    }

    pub fn set_shared(&self) {
        self.is_shared.set(true);
    }

    /// Returns all cells with processes of the run.
    pub fn leaves(&self) -> Vec<Arc<Leaf>> {
        let taken = self.taken.borrow();
        let own = taken.values().filter(|cell| !cell.is_empty.get()).map(|cell| Arc::clone(&cell.leaf));
        [Arc::clone(&self.leaf)].into_iter().chain(own).collect()
    }

    /// CPU time used by what had or has a cell: it is not in the instance's own cell.
    pub fn cpu_us(&self) -> u64 {
        let taken = self.taken.borrow();
        let now =
            taken.values().filter(|cell| cell.back.get().is_none()).map(|cell| cell.leaf.usage().cpu_us);
        now.fold(self.cpu_us.get(), u64::saturating_add)
    }

    /// Moves the process to a cell for this request. `None` if it no longer serves that request
    /// alone.
    pub async fn take(
        self: &Rc<Self>,
        id: RequestCellId,
        pid: Pid,
        look: &HolderQuery,
        request: &CellRequest,
    ) -> Result<Option<String>, Fault> {
        let _turn = self.turn.lock().await;
        // It serves another request by now, so that one has ended, whatever the edge reported.
        let before =
            self.taken.borrow().values().find(|cell| cell.pid == pid && !cell.is_empty.get()).cloned();
        if let Some(before) = before {
            self.put_back(&before).await;
        }
        let leaf = self.context.cells().leaf(&request.home, request.confinement())?;
        let (to, from, again) = (Arc::clone(&leaf), Arc::clone(&self.leaf), look.clone());
        let moved = self.context.on_worker(move || move_in(pid, &again, &to, &from)).await;
        if !matches!(moved, Ok(true)) {
            self.empty(&leaf).await;
            return moved.map(|_| None);
        }
        leaf.begin();
        let cell = Rc::new(TakenCell {
            pid,
            leaf: Arc::clone(&leaf),
            demoted: Rc::default(),
            tasks: RefCell::default(),
            back: Cell::new(None),
            is_empty: Cell::new(false),
        });
        let slower =
            slow_down(&self.context.metrics, Arc::clone(&leaf), request.confinement(), &cell.demoted);
        let looks = Rc::clone(self).watch_sharing(id, look.clone());
        cell.tasks.borrow_mut().extend(slower.into_iter().chain([spawn_local(looks).abort_handle()]));
        self.taken.borrow_mut().insert(id, cell);
        self.context.metrics.enters.inc();
        self.context.metrics.moves.inc();
        Ok(Some(leaf.name().to_owned()))
    }

    /// Moves all processes back to the instance's cell, as far as they can be moved.
    pub async fn return_all(&self) {
        let _turn = self.turn.lock().await;
        let all: Vec<_> = self.taken.borrow().values().filter(|cell| !cell.is_empty.get()).cloned().collect();
        for cell in all {
            self.put_back(&cell).await;
        }
    }

    /// Removes its limits, and records its use until now.
    fn count(&self, cell: &TakenCell) {
        if cell.back.get().is_none() {
            cell.lift_limits();
            let usage = RequestUsage { demoted: cell.demoted.get(), ..cell.leaf.usage() };
            cell.back.set(Some(CellReturn::Used(usage)));
            self.cpu_us.set(self.cpu_us.get().saturating_add(usage.cpu_us));
        }
    }

    /// Must be called with `turn` held.
    async fn put_back(&self, cell: &TakenCell) {
        self.count(cell);
        if !cell.is_empty.replace(true) {
            self.empty(&cell.leaf).await;
        }
    }

    /// Moves everything in the cell back, and returns the cell.
    async fn empty(&self, leaf: &Arc<Leaf>) {
        if leaf.release().unwrap_or(false) {
            return;
        }
        if move_out(&self.context, leaf, &self.leaf).await {
            return;
        }
        // It forks faster than it is moved, or is dying. Its limits are off, and the move is
        // repeated until it is gone.
        let (context, leaf, own) = (Rc::clone(&self.context), Arc::clone(leaf), Arc::clone(&self.leaf));
        spawn_local(async move {
            loop {
                sleep(LOOK_AGAIN_MAX).await;
                if move_out(&context, &leaf, &own).await {
                    return;
                }
            }
        });
    }

    /// Checks repeatedly whether the process serves others, too. Then it is put back, and no other
    /// is moved.
    async fn watch_sharing(self: Rc<Self>, id: RequestCellId, look: HolderQuery) {
        loop {
            sleep(SHARED_LOOK).await;
            let (again, leaves) = (look.clone(), self.leaves());
            let looked = self.context.on_worker(move || Ok(again.holder(&leaves))).await;
            if !matches!(looked, Ok(Ok(ConnectionHolder::Shared))) {
                continue;
            }
            self.set_shared();
            let cells = Rc::clone(&self);
            // This task ends with the cell's limits.
            spawn_local(async move {
                let _turn = cells.turn.lock().await;
                let cell = cells.taken.borrow().get(&id).cloned();
                if let Some(cell) = cell.filter(|cell| !cell.is_empty.get()) {
                    cells.put_back(&cell).await;
                    cell.back.set(Some(CellReturn::Early));
                }
            });
            return;
        }
    }
}

/// Returns true once the cell is empty and was returned.
async fn move_out(context: &KeeperContext, leaf: &Arc<Leaf>, own: &Arc<Leaf>) -> bool {
    let (from, to) = (Arc::clone(leaf), Arc::clone(own));
    let moved = context.on_worker(move || Ok(move_all(&from, &to))).await;
    match moved {
        Ok(Ok(is_empty)) => is_empty,
        Ok(Err(error)) => {
            tracing::debug!(%error, cell = leaf.name(), "not all processes are back yet");
            false
        }
        Err(_) => false,
    }
}

impl TakenCell {
    /// Removes all limits of it except those of the whole instance.
    fn lift_limits(&self) {
        self.tasks.take().iter().for_each(AbortHandle::abort);
        self.leaf.set(&LimitSet::default());
    }
}

/// Moves a process to a cell of its own, if it still serves this connection and nothing else.
/// Blocks.
fn move_in(pid: Pid, look: &HolderQuery, to: &Leaf, from: &Arc<Leaf>) -> Result<bool, Fault> {
    let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else { return Ok(false) };
    // Only now the number certainly means this process, so it is looked up again where it was
    // found.
    if !matches!(look.holder(std::slice::from_ref(from)), Ok(ConnectionHolder::One(found)) if found == pid) {
        return Ok(false);
    }
    let moved = to.adopt_whole(pid, from);
    if has_ended(&process).unwrap_or(true) {
        return Ok(false);
    }
    moved.map_err(|error: CellError| {
        // A process in both is back where it was, or gone.
        let _ = from.adopt_whole(pid, to);
        Fault::from(error)
    })?;
    // Processes that it started for this request before it was found.
    for child in descendants(pid) {
        let _ = to.adopt_whole(child, from);
    }
    Ok(true)
}

/// Returns the live descendants of this process.
fn descendants(pid: Pid) -> Vec<Pid> {
    let mut all = vec![pid];
    let mut at = 0;
    while let Some(next) = all.get(at).filter(|_| all.len() <= DESCENDANTS_MAX) {
        let number = next.as_raw_nonzero();
        // A process that has ended meanwhile has no children.
        let text = fs::read_to_string(format!("/proc/{number}/task/{number}/children")).unwrap_or_default();
        all.extend(text.split_ascii_whitespace().filter_map(|pid| Pid::from_raw(pid.parse().ok()?)));
        at += 1;
    }
    all.split_off(1)
}

/// Returns true once nothing is left in `from` and it was returned. Blocks.
fn move_all(from: &Leaf, to: &Leaf) -> io::Result<bool> {
    for _ in 0..ROUNDS_MAX {
        for pid in from.pids()? {
            // A process that has ended meanwhile need not be moved. One that cannot be moved is
            // still there in the next round.
            let _ = to.adopt_whole(pid, from);
        }
        if from.release()? {
            return Ok(true);
        }
    }
    Ok(false)
}

fn has_ended(process: &OwnedFd) -> io::Result<bool> {
    Ok(poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&timespec(Duration::ZERO)))? > 0)
}
