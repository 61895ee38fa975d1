//! A request's cell in an instance while the request has it, and what gives it back.
//!
//! Not here: how a request gets one (`request_cell`).

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use nagaya_keeper_api::client::{KeeperClient, RequestCellGuard};
use tokio::task::AbortHandle;
use tokio::time::timeout;

use crate::backends::programs::after::BackgroundJobs;
use crate::record::execution::{CellExecution, PendingUsage};

/// Maximum time until the keeper reports the usage of a request.
pub const LEAVE_MAX: Duration = Duration::from_secs(2);

#[derive(Clone)]
pub struct WantedCell {
    pub keeper: Rc<KeeperClient>,
    pub after: Rc<BackgroundJobs>,
    pub execution: Rc<CellExecution>,
}

/// A request's cell, or its wish for one, until its answer has ended.
pub struct RequestCell {
    pub state: Rc<RefCell<LaneSetState>>,
    /// Waits for the keeper's answer while the request is served.
    pub task: Option<AbortHandle>,
    pub wanted: WantedCell,
}

pub enum LaneSetState {
    /// No answer yet, or none that gave a cell.
    Asked,
    Taken {
        guard: RequestCellGuard,
        due: PendingUsage,
    },
    Left,
}

impl RequestCell {
    /// Ends the request's use of its cell. `then` runs when its process is free of the request's
    /// limits. The next request on the same connection must not be held to them.
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

    fn take(&mut self) -> Option<(RequestCellGuard, PendingUsage)> {
        if let Some(task) = self.task.take() {
            task.abort();
        }
        match self.state.replace(LaneSetState::Left) {
            LaneSetState::Taken { guard, due } => Some((guard, due)),
            LaneSetState::Asked | LaneSetState::Left => None,
        }
    }
}

impl Drop for RequestCell {
    fn drop(&mut self) {
        if let Some((guard, due)) = self.take() {
            let keeper = Rc::clone(&self.wanted.keeper);
            self.wanted.after.run(async move { leave(&keeper, guard, due).await });
        }
    }
}

pub async fn leave(keeper: &KeeperClient, guard: RequestCellGuard, due: PendingUsage) {
    if let Ok(Ok(usage)) = timeout(LEAVE_MAX, keeper.leave_seat(guard)).await {
        due.report(usage);
    }
}
