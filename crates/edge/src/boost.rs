//! A request's boost: higher limits of its site's instance, for as long as the request runs.
//!
//! A rule asks for it, the keeper says how much of it the site's record allows, and the account of the request keeps it until the
//! body has ended. Not here: cgroups and bounds (`keeper`), cells of single requests (`seat`).

use std::rc::Rc;
use std::time::Duration;

use nagaya_keeper::protocol::InstanceId;
use tokio::time::timeout;

use crate::account::Account;
use crate::node::Node;

/// How long a request waits for it before it is sent without.
const BEFORE_SENDING: Duration = Duration::from_millis(100);

/// Asks for what a rule wants of this instance for this request. What an instance had for it that has ended goes.
pub async fn begin(node: &Node, instance: InstanceId, account: &mut Account) {
    account.set_boost(None);
    let Some(stay) = account.confined().filter(|stay| !stay.confinement().boost.is_empty()).map(Rc::clone)
    else {
        return;
    };
    let asked = node.keeper().boost_instance(instance, stay.confinement().boost);
    let boosted = match timeout(BEFORE_SENDING, asked).await {
        Ok(Ok((guard, granted))) => {
            stay.set_raised(granted);
            Some(guard)
        }
        Ok(Err(error)) => {
            tracing::debug!(%error, "limits are not raised");
            None
        }
        Err(_) => {
            tracing::debug!("limits are not raised: the keeper has not said how far");
            None
        }
    };
    account.set_boost(boosted);
}
