//! Seats: processes of an instance that are in the cell of the request they serve, from when it begins until it has ended.
//!
//! A request with limits of its own gets a cell beside its instance's, and the process that serves it is moved there and
//! back. Only a process that serves nothing else meanwhile is (`holder`); where there is none, the limits are the
//! instance's. Before an instance rests, or an image of it is taken, all are back. Not here: who asks (`server`), cells
//! (`cells`), how a request is slowed down step by step (`process`).

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nagaya_cmdb::cell::{Confinement, Limits, Usage};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::sync::{Mutex, oneshot};
use tokio::task::{AbortHandle, spawn_local};
use tokio::time::{Instant, sleep};

use super::holder::{Holder, Look};
use super::start::Body;
use super::{Instances, parts, unix_diag};
use crate::cells::codes::NO_DIAG;
use crate::cells::{CellError, LOOK_AGAIN_MAX, Leaf};
use crate::confinement;
use crate::engine::Engine;
use crate::fault::{self, Fault};
use crate::process::{Request, slow_down};
use crate::protocol::{Failure, InstanceId, Line, SeatId};
use crate::sandbox::timespec;

/// First and longest pause between two looks whether a connection was accepted.
const LOOK_FIRST: Duration = Duration::from_micros(100);
const LOOK_MAX: Duration = Duration::from_millis(20);

/// How long that is looked for: a request that waits so long for a process is the instance's.
pub const ACCEPT_MAX: Duration = Duration::from_secs(60);

/// Looks at a connection that several processes hold, each pause twice as long as the one before: 3 s in all. One that is handed over
/// has one holder soon, and so has one whose holder starts a program, but the program may wait for a processor first.
const SEVERAL_MAX: u32 = 15;

/// Time between two looks whether a process that was moved serves others by now.
const SHARED_LOOK: Duration = Duration::from_millis(100);

/// Processes that a worker has started already when it is found, at most.
const DESCENDANTS_MAX: usize = 64;

/// Times the list of who is in a cell is gone through to move all of it.
const ROUNDS_MAX: usize = 8;

/// The seats of one run.
#[derive(Default)]
pub struct Seats {
    /// Held by who moves processes.
    turn: Mutex<()>,
    taken: RefCell<HashMap<SeatId, Rc<Seat>>>,
    /// Its processes serve several requests at once.
    is_shared: Cell<bool>,
    /// By requests that had seats and have ended.
    cpu_us: Cell<u64>,
}

struct Seat {
    pid: Pid,
    leaf: Arc<Leaf>,
    demoted: Rc<Cell<u8>>,
    /// Slowing it down, and looking whether it still serves one request.
    tasks: RefCell<Vec<AbortHandle>>,
    /// It was left. None: not yet.
    back: Cell<Option<Back>>,
    /// Its processes are where the instance is again.
    is_empty: Cell<bool>,
}

/// Of a seat that was left.
#[derive(Clone, Copy)]
enum Back {
    Used(Usage),
    /// Before its request had ended.
    Early,
}

/// Where a request's limits hold.
pub enum Placed {
    Seated {
        lease: SeatLease,
        cell: String,
    },
    /// In the instance's cell, with all its other requests.
    Unseated {
        cell: String,
        for_good: bool,
    },
}

/// A request's use of its seat; when it is dropped the process goes back.
pub struct SeatLease {
    engine: Rc<Engine>,
    body: Rc<Body>,
    id: SeatId,
    is_left: bool,
}

impl SeatLease {
    pub fn id(&self) -> SeatId {
        self.id
    }

    /// The request has ended: nothing limits its process any more, and it goes back. None: what it used is not known for the
    /// whole of it.
    pub fn leave(mut self) -> Option<Usage> {
        self.end()
    }

    fn end(&mut self) -> Option<Usage> {
        if std::mem::replace(&mut self.is_left, true) {
            return None;
        }
        let seat = self.body.seats.taken.borrow().get(&self.id).cloned()?;
        self.body.seats.count(&seat);
        let back = seat.back.get();
        let (engine, body, id) = (Rc::clone(&self.engine), Rc::clone(&self.body), self.id);
        spawn_local(async move {
            let _turn = body.seats.turn.lock().await;
            body.seats.put_back(&engine, &body, &seat).await;
            body.seats.taken.borrow_mut().remove(&id);
        });
        match back {
            Some(Back::Used(usage)) => Some(usage),
            Some(Back::Early) | None => None,
        }
    }
}

impl Drop for SeatLease {
    fn drop(&mut self) {
        self.end();
    }
}

impl Instances {
    /// Gives the request that goes over this connection of the edge's a cell of its own, if the process that serves it can be
    /// known. Waits until one has accepted the connection.
    pub async fn enter(
        &self,
        engine: &Rc<Engine>,
        id: InstanceId,
        line: Line,
        asked: Confinement,
    ) -> Result<Placed, Fault> {
        confinement::check(&asked)?;
        let (key, run) = parts(id);
        let gone = || Fault::new(Failure::NotFound, fault::UNKNOWN, format!("instance {} has ended", id.0));
        let instance = self.all.borrow().get(&key).cloned().ok_or_else(gone)?;
        let body = instance.body_of(run).ok_or_else(gone)?;
        let unseated = |for_good| Placed::Unseated { cell: body.leaf().name().to_owned(), for_good };
        let sandboxed = body.port().and_then(|port| Look::new(line, port));
        let Some(look) = sandboxed.filter(|_| !body.seats.is_shared.get()) else { return Ok(unseated(true)) };
        if matches!(line, Line::Unix { .. }) && !self.has_unix_diag(engine).await? {
            return Ok(unseated(true));
        }
        let pid = match until_held(engine, &body, &look).await? {
            Holder::One(pid) => pid,
            Holder::Shared => {
                body.seats.is_shared.set(true);
                return Ok(unseated(true));
            }
            Holder::Nobody | Holder::Several => return Ok(unseated(false)),
        };
        // A named cell is shared with others, and may be where nothing stops it when this node loses its authority.
        let asked = Confinement { named: Vec::new(), ..asked };
        let request = engine.request(&instance.site(), &instance.tenant(), asked).await?;
        let id = SeatId(self.next_seat.replace(self.next_seat.get() + 1));
        let (tell, told) = oneshot::channel();
        let (engine, of) = (Rc::clone(engine), Rc::clone(&body));
        // A task of its own: what has been moved must be looked after even if who asked leaves.
        spawn_local(async move {
            let seated = of.seats.take(&engine, &of, id, pid, &look, &request).await;
            let lease = SeatLease { engine: Rc::clone(&engine), body: Rc::clone(&of), id, is_left: false };
            let _ = tell.send(seated.map(|cell| cell.map(|cell| (lease, cell))));
        });
        let broken =
            |_| Fault::new(Failure::Broken, fault::PROTOCOL, "moving a process failed inside the keeper");
        Ok(match told.await.map_err(broken)?? {
            Some((lease, cell)) => Placed::Seated { lease, cell },
            None => unseated(false),
        })
    }
}

impl Instances {
    /// Whether it can be known who serves a connection over a Unix socket. If not, it is said once.
    async fn has_unix_diag(&self, engine: &Engine) -> Result<bool, Fault> {
        if let Some(known) = self.unix_diag.get() {
            return Ok(known);
        }
        let asked = engine.on_worker(|| Ok(unix_diag())).await?;
        let is_first = self.unix_diag.replace(Some(asked.is_ok())).is_none();
        if let Err(why) = &asked
            && is_first
        {
            tracing::warn!(
                "{NO_DIAG}: limits of single requests to applications that listen on a Unix socket are those of the application: {why}"
            );
        }
        Ok(asked.is_ok())
    }
}

/// Returns once somebody has accepted the connection, within a bound.
async fn until_held(engine: &Rc<Engine>, body: &Rc<Body>, look: &Look) -> Result<Holder, Fault> {
    let (until, mut pause, mut several) = (Instant::now() + ACCEPT_MAX, LOOK_FIRST, 0);
    loop {
        let (look, leaves) = (look.clone(), body.seats.leaves(body));
        let looked = engine.on_worker(move || Ok(look.holder(&leaves))).await?;
        match looked {
            Ok(Holder::Several) if several < SEVERAL_MAX => {
                sleep(LOOK_FIRST * (1 << several)).await;
                several += 1;
                continue;
            }
            Ok(Holder::Nobody) if Instant::now() < until => {}
            Ok(holder) => return Ok(holder),
            Err(error) => {
                // It was closed, or this kernel tells nothing: the request goes on without.
                tracing::debug!(%error, cell = body.leaf().name(), "it cannot be known who serves a connection");
                return Ok(Holder::Several);
            }
        }
        sleep(pause).await;
        pause = (pause * 2).min(LOOK_MAX);
    }
}

impl Seats {
    /// All cells in which processes of the run are.
    pub fn leaves(&self, body: &Body) -> Vec<Arc<Leaf>> {
        let taken = self.taken.borrow();
        let own = taken.values().filter(|seat| !seat.is_empty.get()).map(|seat| Arc::clone(&seat.leaf));
        [Arc::clone(body.leaf())].into_iter().chain(own).collect()
    }

    /// CPU time used by what had or has a seat: it is not in the instance's own cell.
    pub fn cpu_us(&self) -> u64 {
        let taken = self.taken.borrow();
        let now =
            taken.values().filter(|seat| seat.back.get().is_none()).map(|seat| seat.leaf.usage().cpu_us);
        now.fold(self.cpu_us.get(), u64::saturating_add)
    }

    /// Moves the process to a cell for this request. None: it does not serve that alone any more.
    async fn take(
        &self,
        engine: &Rc<Engine>,
        body: &Rc<Body>,
        id: SeatId,
        pid: Pid,
        look: &Look,
        request: &Request,
    ) -> Result<Option<String>, Fault> {
        let _turn = self.turn.lock().await;
        // It serves another request by now, so that one has ended, whatever the edge has said.
        let before =
            self.taken.borrow().values().find(|seat| seat.pid == pid && !seat.is_empty.get()).cloned();
        if let Some(before) = before {
            self.put_back(engine, body, &before).await;
        }
        let leaf = engine.cells().leaf(&request.home, request.confinement())?;
        let (to, from, again) = (Arc::clone(&leaf), Arc::clone(body.leaf()), look.clone());
        let moved = engine.on_worker(move || move_in(pid, &again, &to, &from)).await;
        if !matches!(moved, Ok(true)) {
            self.empty(engine, body, &leaf).await;
            return moved.map(|_| None);
        }
        leaf.begin();
        let seat = Rc::new(Seat {
            pid,
            leaf: Arc::clone(&leaf),
            demoted: Rc::default(),
            tasks: RefCell::default(),
            back: Cell::new(None),
            is_empty: Cell::new(false),
        });
        let slower = slow_down(&engine.metrics, Arc::clone(&leaf), request.confinement(), &seat.demoted);
        let looks = Rc::clone(body).watch_seat(Rc::clone(engine), id, look.clone());
        seat.tasks.borrow_mut().extend(slower.into_iter().chain([spawn_local(looks).abort_handle()]));
        self.taken.borrow_mut().insert(id, seat);
        engine.metrics.enters.inc();
        engine.metrics.moves.inc();
        Ok(Some(leaf.name().to_owned()))
    }

    /// All processes are where the instance is when this returns, as far as they can be moved.
    pub async fn vacate(&self, engine: &Rc<Engine>, body: &Rc<Body>) {
        let _turn = self.turn.lock().await;
        let all: Vec<_> = self.taken.borrow().values().filter(|seat| !seat.is_empty.get()).cloned().collect();
        for seat in all {
            self.put_back(engine, body, &seat).await;
        }
    }

    /// Takes its limits away, and notes what was used until now.
    fn count(&self, seat: &Seat) {
        if seat.back.get().is_none() {
            seat.let_loose();
            let usage = Usage { demoted: seat.demoted.get(), ..seat.leaf.usage() };
            seat.back.set(Some(Back::Used(usage)));
            self.cpu_us.set(self.cpu_us.get().saturating_add(usage.cpu_us));
        }
    }

    /// With the turn.
    async fn put_back(&self, engine: &Rc<Engine>, body: &Rc<Body>, seat: &Seat) {
        self.count(seat);
        if !seat.is_empty.replace(true) {
            self.empty(engine, body, &seat.leaf).await;
        }
    }

    /// Moves everything in the cell back, and gives the cell back.
    async fn empty(&self, engine: &Rc<Engine>, body: &Rc<Body>, leaf: &Arc<Leaf>) {
        if leaf.release().unwrap_or(false) {
            return;
        }
        if move_out(engine, body, leaf).await {
            return;
        }
        // It forks faster than it is moved, or is dying: its limits are off, and it is tried again until it is gone.
        let (engine, body, leaf) = (Rc::clone(engine), Rc::clone(body), Arc::clone(leaf));
        spawn_local(async move {
            loop {
                sleep(LOOK_AGAIN_MAX).await;
                if move_out(&engine, &body, &leaf).await {
                    return;
                }
            }
        });
    }
}

/// True once nothing is in the cell and it was given back.
async fn move_out(engine: &Rc<Engine>, body: &Rc<Body>, leaf: &Arc<Leaf>) -> bool {
    let (from, to) = (Arc::clone(leaf), Arc::clone(body.leaf()));
    let moved = engine.on_worker(move || Ok(move_all(&from, &to))).await;
    match moved {
        Ok(Ok(is_empty)) => is_empty,
        Ok(Err(error)) => {
            tracing::debug!(%error, cell = leaf.name(), "not all processes are back yet");
            false
        }
        Err(_) => false,
    }
}

impl Seat {
    /// From now on nothing limits what is in it, but what limits the whole instance.
    fn let_loose(&self) {
        self.tasks.take().iter().for_each(AbortHandle::abort);
        self.leaf.set(&Limits::default());
    }
}

impl Body {
    /// Looks again and again whether the process serves others too. Then it is put back, and no other is moved.
    async fn watch_seat(self: Rc<Self>, engine: Rc<Engine>, id: SeatId, look: Look) {
        loop {
            sleep(SHARED_LOOK).await;
            let (again, leaves) = (look.clone(), self.seats.leaves(&self));
            let looked = engine.on_worker(move || Ok(again.holder(&leaves))).await;
            if !matches!(looked, Ok(Ok(Holder::Shared))) {
                continue;
            }
            self.seats.is_shared.set(true);
            let (body, engine) = (Rc::clone(&self), Rc::clone(&engine));
            // This task ends with the seat's limits.
            spawn_local(async move {
                let _turn = body.seats.turn.lock().await;
                let seat = body.seats.taken.borrow().get(&id).cloned();
                if let Some(seat) = seat.filter(|seat| !seat.is_empty.get()) {
                    body.seats.put_back(&engine, &body, &seat).await;
                    seat.back.set(Some(Back::Early));
                }
            });
            return;
        }
    }
}

/// Moves a process to a cell of its own, if it still serves this connection and nothing else. Blocks.
fn move_in(pid: Pid, look: &Look, to: &Leaf, from: &Arc<Leaf>) -> Result<bool, Fault> {
    let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else { return Ok(false) };
    // Only now the number means this process: it is looked for once more where it was found.
    if !matches!(look.holder(std::slice::from_ref(from)), Ok(Holder::One(found)) if found == pid) {
        return Ok(false);
    }
    let moved = to.adopt_whole(pid, from);
    if has_ended(&process).unwrap_or(true) {
        return Ok(false);
    }
    moved.map_err(|error: CellError| {
        // What is in both is back where it was, or gone.
        let _ = from.adopt_whole(pid, to);
        Fault::from(error)
    })?;
    // What it has started for this request before it was found.
    for child in descendants(pid) {
        let _ = to.adopt_whole(child, from);
    }
    Ok(true)
}

/// Processes that this one has started and that still run, and those that they have.
fn descendants(pid: Pid) -> Vec<Pid> {
    let mut all = vec![pid];
    let mut at = 0;
    while let Some(next) = all.get(at).filter(|_| all.len() <= DESCENDANTS_MAX) {
        let number = next.as_raw_nonzero();
        // Who has ended meanwhile has no children.
        let text = fs::read_to_string(format!("/proc/{number}/task/{number}/children")).unwrap_or_default();
        all.extend(text.split_ascii_whitespace().filter_map(|pid| Pid::from_raw(pid.parse().ok()?)));
        at += 1;
    }
    all.split_off(1)
}

/// True once nothing is left in `from` and it was given back. Blocks.
fn move_all(from: &Leaf, to: &Leaf) -> io::Result<bool> {
    for _ in 0..ROUNDS_MAX {
        for pid in from.pids()? {
            // Who has ended meanwhile need not be moved; what cannot be is still there in the next round.
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
