//! Finding the process that serves a request of an instance, and moving it to a cell of the
//! request's own.
//!
//! Only a process that serves nothing else meanwhile is moved (`connection_holder`); where there is
//! none, the limits are the instance's. Not here: who asks (`server`), moving processes
//! (`request_cells`).

use std::rc::Rc;
use std::time::Duration;

use nagaya_keeper_api::limits::ACCEPT_MAX;
use nagaya_keeper_api::protocol::{ConnectionId, FailureKind, InstanceId};
use nagaya_records::cell::Confinement;
use tokio::sync::oneshot;
use tokio::task::spawn_local;
use tokio::time::{Instant, sleep};

use crate::cells::codes::NO_DIAG;
use crate::confinement;
use crate::context::KeeperContext;
use crate::fault::{self, Fault};
use crate::instances::limits::connection_holder::{ConnectionHolder, HolderQuery, unix_diag};
use crate::instances::limits::request_cells::{RequestCellRef, RequestCells};
use crate::instances::state::instance::parts;
use crate::instances::state::shared::NodeInstances;

/// First and longest pause between two checks whether a connection was accepted.
const LOOK_FIRST: Duration = Duration::from_micros(100);
const LOOK_MAX: Duration = Duration::from_millis(20);

/// Number of checks of a connection that several processes hold. Each pause is twice as long as the
/// one before: 3 s in all. A connection that is handed over soon has one holder. So has one whose
/// holder starts a program, but the program may wait for a CPU first.
const SEVERAL_MAX: u32 = 15;

/// Cell in which a request's limits hold.
pub enum EnterOutcome {
    OwnCell {
        cell_ref: RequestCellRef,
        cell: String,
    },
    /// The instance's cell, with all its other requests.
    Shared {
        cell: String,
        for_good: bool,
    },
}

/// Gives the request on this connection a cell of its own, if its serving process can be
/// determined. Waits until a process has accepted the connection.
pub async fn enter_cell(
    instances: &Rc<NodeInstances>,
    id: InstanceId,
    line: ConnectionId,
    asked: Confinement,
) -> Result<EnterOutcome, Fault> {
    confinement::check(&asked)?;
    let (key, run) = parts(id);
    let gone = || Fault::new(FailureKind::NotFound, fault::UNKNOWN, format!("instance {} has ended", id.0));
    let instance = instances.table.get(key).ok_or_else(gone)?;
    let processes = instance.processes_of(run).ok_or_else(gone)?;
    let cells = Rc::clone(&processes.request_cells);
    let shared = |for_good| EnterOutcome::Shared { cell: processes.leaf().name().to_owned(), for_good };
    let sandboxed = processes.port().and_then(|port| HolderQuery::new(line, port));
    let Some(look) = sandboxed.filter(|_| !cells.is_shared()) else { return Ok(shared(true)) };
    if matches!(line, ConnectionId::Unix { .. }) && !has_unix_diag(instances).await? {
        return Ok(shared(true));
    }
    let pid = match find_holder(&instances.context, &cells, &look).await? {
        ConnectionHolder::One(pid) => pid,
        ConnectionHolder::Shared => {
            cells.set_shared();
            return Ok(shared(true));
        }
        ConnectionHolder::Nobody | ConnectionHolder::Several => return Ok(shared(false)),
    };
    // Others share a named cell, and the freeze at the end of a lease may not reach it.
    let asked = Confinement { named: Vec::new(), ..asked };
    let request = instances.context.request(&instance.site(), &instance.tenant(), asked).await?;
    let id = instances.limits.take_cell_id();
    let (tell, told) = oneshot::channel();
    // A task of its own: moved processes need care even if the caller leaves.
    spawn_local(async move {
        let entered = cells.take(id, pid, &look, &request).await;
        let cell_ref = RequestCellRef::new(cells, id);
        let _ = tell.send(entered.map(|cell| cell.map(|cell| (cell_ref, cell))));
    });
    let broken =
        |_| Fault::new(FailureKind::Broken, fault::PROTOCOL, "moving a process failed inside the keeper");
    Ok(match told.await.map_err(broken)?? {
        Some((cell_ref, cell)) => EnterOutcome::OwnCell { cell_ref, cell },
        None => shared(false),
    })
}

/// Whether the process that serves a Unix connection can be determined. If not, this is logged
/// once.
async fn has_unix_diag(instances: &NodeInstances) -> Result<bool, Fault> {
    if let Some(known) = instances.limits.unix_diag.get() {
        return Ok(known);
    }
    let asked = instances.context.on_worker(|| Ok(unix_diag())).await?;
    let is_first = instances.limits.unix_diag.replace(Some(asked.is_ok())).is_none();
    if let Err(why) = &asked
        && is_first
    {
        tracing::warn!(
            "{NO_DIAG}: limits of single requests to applications that listen on a Unix socket are those of the application: {why}"
        );
    }
    Ok(asked.is_ok())
}

/// Returns once a process has accepted the connection, within a time limit.
async fn find_holder(
    context: &KeeperContext,
    cells: &RequestCells,
    look: &HolderQuery,
) -> Result<ConnectionHolder, Fault> {
    let (until, mut pause, mut several) = (Instant::now() + ACCEPT_MAX, LOOK_FIRST, 0);
    loop {
        let (look, leaves) = (look.clone(), cells.leaves());
        let looked = context.on_worker(move || Ok(look.holder(&leaves))).await?;
        match looked {
            Ok(ConnectionHolder::Several) if several < SEVERAL_MAX => {
                sleep(LOOK_FIRST * (1 << several)).await;
                several += 1;
                continue;
            }
            Ok(ConnectionHolder::Nobody) if Instant::now() < until => {}
            Ok(holder) => return Ok(holder),
            Err(error) => {
                // It was closed, or this kernel reports nothing: the request continues without a
                // cell.
                tracing::debug!(%error, cell = cells.own_leaf().name(), "it cannot be known who serves a connection");
                return Ok(ConnectionHolder::Several);
            }
        }
        sleep(pause).await;
        pause = (pause * 2).min(LOOK_MAX);
    }
}
