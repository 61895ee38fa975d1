//! A request's seat in an instance: where limits of its own hold while the application serves it.
//!
//! The keeper moves the process that serves the connection to a cell of the request's, and back when this is dropped. Where no
//! process serves it alone, the limits are the instance's, and that is remembered for its run. Requests without limits of
//! their own cost nothing here. Not here: which process it is (`keeper`), what goes over the connection (`upstream`,
//! `programs`), how long an instance is needed (`instances`).

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nagaya_cmdb::cell::{Confinement, Limits};
use nagaya_keeper::client::{Entered, Keeper, SeatGuard};
use nagaya_keeper::protocol::{InstanceId, Line};
use tokio::task::{AbortHandle, spawn_local};
use tokio::time::timeout;

use crate::instances::Hold;
use crate::programs::After;
use crate::refusal::Refusal;
use crate::stay::{CellOf, Due, Stay};
use crate::upstream::{Address, Connector, Socket};

/// How long a request waits for its process before it is sent: for most of that the kernel may take to move it. On a port a process
/// may accept a connection only once the request is there (TCP_DEFER_ACCEPT, as Apache); it is found then.
const BEFORE_SENDING: Duration = Duration::from_millis(100);
const BEFORE_SENDING_TO_PORT: Duration = Duration::from_millis(20);

/// So long the keeper may take to say what a request used.
const LEAVE_MAX: Duration = Duration::from_secs(2);

/// What a request with limits of its own needs to get a seat.
pub struct Seating {
    hold: Rc<Hold>,
    wanted: Option<Wanted>,
}

#[derive(Clone)]
struct Wanted {
    keeper: Rc<Keeper>,
    after: Rc<After>,
    stay: Rc<Stay>,
}

impl Seating {
    /// `stay`: None if no limit of its own holds for the request.
    pub fn new(hold: &Rc<Hold>, keeper: &Rc<Keeper>, after: &Rc<After>, stay: Option<&Rc<Stay>>) -> Self {
        let stay = stay.filter(|stay| is_limited(stay.confinement()));
        let wanted = stay.map(|stay| Wanted {
            keeper: Rc::clone(keeper),
            after: Rc::clone(after),
            stay: Rc::clone(stay),
        });
        Self { hold: Rc::clone(hold), wanted }
    }

    /// The request's stay, if it is to have a seat.
    pub fn stay(&self) -> Option<&Rc<Stay>> {
        self.wanted.as_ref().map(|wanted| &wanted.stay)
    }

    /// The seat of the request that is about to go over this connection.
    pub async fn of(&self, instance: InstanceId, socket: &Socket) -> Option<Seat> {
        let wanted = self.wanted.as_ref()?;
        if let Some(cell) = self.hold.shared_cell(instance) {
            wanted.stay.set_cell_of(&cell, CellOf::Instance);
            return None;
        }
        let line = line(socket)?;
        wanted.after.begin();
        let state = Rc::new(RefCell::new(State::Asked));
        let entering = {
            let (wanted, hold, state) = (wanted.clone(), Rc::clone(&self.hold), Rc::clone(&state));
            async move {
                let entered = wanted.keeper.enter_instance(instance, line, wanted.stay.confinement()).await;
                let Ok(entered) = entered.inspect_err(|error| tracing::debug!(%error, "no seat")) else {
                    return;
                };
                arrive(&wanted.stay, &hold, instance, entered, &mut state.borrow_mut());
            }
        };
        let mut entering = Box::pin(entering);
        let within = match socket {
            Socket::Unix(_) => BEFORE_SENDING,
            Socket::Tcp(_) => BEFORE_SENDING_TO_PORT,
        };
        let task = match timeout(within, &mut entering).await {
            Ok(()) => None,
            Err(_) => Some(spawn_local(entering).abort_handle()),
        };
        Some(Seat { state, task, wanted: wanted.clone() })
    }
}

impl Connector for Seating {
    async fn connect(&self, address: &Address) -> Result<Socket, Refusal> {
        self.hold.connect(address).await
    }

    async fn seat(&self, address: &Address, socket: &Socket) -> Option<Seat> {
        match address {
            Address::Instance(instance) => self.of(*instance, socket).await,
            Address::Tcp(_) | Address::Unix(_) => None,
        }
    }
}

/// Whether a cell of its own makes a difference to the request.
fn is_limited(confinement: &Arc<Confinement>) -> bool {
    confinement.limits != Limits::default() || !confinement.demotions.is_empty()
}

fn line(socket: &Socket) -> Option<Line> {
    match socket {
        Socket::Unix(stream) => {
            let inode = u32::try_from(rustix::fs::fstat(stream).ok()?.st_ino).ok()?;
            Some(Line::Unix { inode })
        }
        Socket::Tcp(stream) => Some(Line::Tcp { port: stream.local_addr().ok()?.port() }),
    }
}

fn arrive(stay: &Rc<Stay>, hold: &Hold, instance: InstanceId, entered: Entered, state: &mut State) {
    match entered {
        Entered::Seated { guard, cell } => {
            stay.set_cell_of(&cell, CellOf::Request);
            *state = State::Taken { guard, due: stay.begin() };
        }
        Entered::Unseated { cell, for_good } => {
            stay.set_cell_of(&cell, CellOf::Instance);
            if for_good {
                hold.set_shared(instance, cell);
            }
        }
    }
}

/// A request's seat, or its wish for one, until its answer has ended.
pub struct Seat {
    state: Rc<RefCell<State>>,
    /// What waits for the keeper's answer while the request is served.
    task: Option<AbortHandle>,
    wanted: Wanted,
}

enum State {
    /// No answer yet, or none that gave a seat.
    Asked,
    Taken {
        guard: SeatGuard,
        due: Due,
    },
    Left,
}

impl Seat {
    /// The request has ended. `then` is done when nothing limits its process any more: what comes over the same
    /// connection next is not to be held to its limits.
    pub fn leave(mut self, then: impl FnOnce() + 'static) {
        match self.take() {
            None => then(),
            Some((guard, due)) => {
                let keeper = Rc::clone(&self.wanted.keeper);
                self.wanted.after.run(async move {
                    leave(&keeper, guard, due).await;
                    then();
                });
            }
        }
    }

    fn take(&mut self) -> Option<(SeatGuard, Due)> {
        if let Some(task) = self.task.take() {
            task.abort();
        }
        match self.state.replace(State::Left) {
            State::Taken { guard, due } => Some((guard, due)),
            State::Asked | State::Left => None,
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        if let Some((guard, due)) = self.take() {
            let keeper = Rc::clone(&self.wanted.keeper);
            self.wanted.after.run(async move { leave(&keeper, guard, due).await });
        }
    }
}

async fn leave(keeper: &Keeper, guard: SeatGuard, due: Due) {
    if let Ok(Ok(usage)) = timeout(LEAVE_MAX, keeper.leave_seat(guard)).await {
        due.pay(usage);
    }
}
