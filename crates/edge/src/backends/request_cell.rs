//! Gives a request to an application a cell of its own, where its own limits hold.
//!
//! The keeper moves the process that serves the connection to the request's cell, and back when
//! the guard is dropped. If the process also serves others, the limits are the instance's. That
//! is remembered for its run. Requests without limits of their own cost nothing here. Not here:
//! finding the process (`keeper`), the data on the connection (`upstream`, `programs`), how long
//! an instance is needed (`instances`).

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nagaya_keeper_api::client::{EnterResult, KeeperClient};
use nagaya_keeper_api::protocol::{ConnectionId, InstanceId};
use nagaya_records::cell::{Confinement, LimitSet};
use tokio::task::spawn_local;
use tokio::time::timeout;

use crate::backends::cell_lease::{LaneSetState, RequestCell, WantedCell};
use crate::backends::instances::InstanceRef;
use crate::backends::programs::after::BackgroundJobs;
use crate::backends::upstream::pool::{Connector, UpstreamAddress, UpstreamSocket};
use crate::http::refusal::Refusal;
use crate::record::access_record::UsageScope;
use crate::record::execution::CellExecution;

/// Maximum time a request waits for its process before it is sent. The kernel may take most of it
/// to move the process. On a port a process may accept a connection only after the request
/// arrived (TCP_DEFER_ACCEPT, as Apache). It is found then.
const BEFORE_SENDING: Duration = Duration::from_millis(100);
const BEFORE_SENDING_TO_PORT: Duration = Duration::from_millis(20);

/// Gets a request cell for a request with limits of its own.
pub struct CellConnector {
    hold: Rc<InstanceRef>,
    wanted: Option<WantedCell>,
}

impl CellConnector {
    /// `stay` is `None` if the request has no limits of its own.
    pub fn new(
        hold: &Rc<InstanceRef>,
        keeper: &Rc<KeeperClient>,
        after: &Rc<BackgroundJobs>,
        execution: Option<&Rc<CellExecution>>,
    ) -> Self {
        let execution = execution.filter(|execution| is_limited(execution.confinement()));
        let wanted = execution.map(|execution| WantedCell {
            keeper: Rc::clone(keeper),
            after: Rc::clone(after),
            execution: Rc::clone(execution),
        });
        Self { hold: Rc::clone(hold), wanted }
    }

    /// The request's execution, if it is to have a seat.
    pub fn execution(&self) -> Option<&Rc<CellExecution>> {
        self.wanted.as_ref().map(|wanted| &wanted.execution)
    }

    /// Returns the cell of the request that is about to use this connection.
    pub async fn of(&self, instance: InstanceId, socket: &UpstreamSocket) -> Option<RequestCell> {
        let wanted = self.wanted.as_ref()?;
        if let Some(cell) = self.hold.shared_cell(instance) {
            wanted.execution.set_cell_of(&cell, UsageScope::Instance);
            return None;
        }
        let line = line(socket)?;
        wanted.after.begin();
        let state = Rc::new(RefCell::new(LaneSetState::Asked));
        let entering = {
            let (wanted, hold, state) = (wanted.clone(), Rc::clone(&self.hold), Rc::clone(&state));
            async move {
                let entered =
                    wanted.keeper.enter_instance(instance, line, wanted.execution.confinement()).await;
                let Ok(entered) = entered.inspect_err(|error| tracing::debug!(%error, "no seat")) else {
                    return;
                };
                arrive(&wanted.execution, &hold, instance, entered, &mut state.borrow_mut());
            }
        };
        let mut entering = Box::pin(entering);
        let within = match socket {
            UpstreamSocket::Unix(_) => BEFORE_SENDING,
            UpstreamSocket::Tcp(_) => BEFORE_SENDING_TO_PORT,
        };
        let task = match timeout(within, &mut entering).await {
            Ok(()) => None,
            Err(_) => Some(spawn_local(entering).abort_handle()),
        };
        Some(RequestCell { state, task, wanted: wanted.clone() })
    }
}

impl Connector for CellConnector {
    async fn connect(&self, address: &UpstreamAddress) -> Result<UpstreamSocket, Refusal> {
        self.hold.connect(address).await
    }

    async fn seat(&self, address: &UpstreamAddress, socket: &UpstreamSocket) -> Option<RequestCell> {
        match address {
            UpstreamAddress::Instance(instance) => self.of(*instance, socket).await,
            UpstreamAddress::Tcp(_) | UpstreamAddress::Unix(_) => None,
        }
    }
}

/// Returns whether a cell of its own makes a difference to the request.
fn is_limited(confinement: &Arc<Confinement>) -> bool {
    confinement.limits != LimitSet::default() || !confinement.demotions.is_empty()
}

fn line(socket: &UpstreamSocket) -> Option<ConnectionId> {
    match socket {
        UpstreamSocket::Unix(stream) => {
            let inode = u32::try_from(rustix::fs::fstat(stream).ok()?.st_ino).ok()?;
            Some(ConnectionId::Unix { inode })
        }
        UpstreamSocket::Tcp(stream) => Some(ConnectionId::Tcp { port: stream.local_addr().ok()?.port() }),
    }
}

fn arrive(
    execution: &Rc<CellExecution>,
    hold: &InstanceRef,
    instance: InstanceId,
    entered: EnterResult,
    state: &mut LaneSetState,
) {
    match entered {
        EnterResult::Seated { guard, cell } => {
            execution.set_cell_of(&cell, UsageScope::Request);
            *state = LaneSetState::Taken { guard, due: execution.begin() };
        }
        EnterResult::Unseated { cell, for_good } => {
            execution.set_cell_of(&cell, UsageScope::Instance);
            if for_good {
                hold.set_shared(instance, cell);
            }
        }
    }
}
