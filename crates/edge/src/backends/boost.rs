//! Raises limits of a site's instance while one request runs.
//!
//! A rule asks for the boost. The keeper says how much of it the site's record allows. The context
//! of the request keeps it until the body has ended. Not here: cgroups and bounds (`keeper`), cells
//! of single requests (`request_cell`).

use std::time::Duration;

use nagaya_keeper_api::client::{BoostGuard, KeeperClient};
use nagaya_keeper_api::protocol::InstanceId;
use tokio::time::timeout;

use crate::record::execution::ExecutionSlot;

/// Maximum time a request waits for it. Then it is sent without.
const BEFORE_SENDING: Duration = Duration::from_millis(100);

/// Asks for the boost of this instance that a rule wants for this request. Returns the guard that
/// keeps it. `None` if there is nothing to keep.
pub async fn begin(
    keeper: &KeeperClient,
    instance: InstanceId,
    execution: &ExecutionSlot,
) -> Option<BoostGuard> {
    let execution = execution.get().filter(|execution| !execution.confinement().boost.is_empty())?;
    let asked = keeper.boost_instance(instance, execution.confinement().boost);
    match timeout(BEFORE_SENDING, asked).await {
        Ok(Ok((guard, granted))) => {
            execution.set_raised(granted);
            Some(guard)
        }
        Ok(Err(error)) => {
            tracing::debug!(%error, "limits are not raised");
            None
        }
        Err(_) => {
            tracing::debug!("limits are not raised: the keeper did not send the new values");
            None
        }
    }
}
