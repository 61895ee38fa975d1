//! Limits of one connection, and times, that edge and keeper must agree on.
//!
//! The keeper enforces them; the client keeps within them.

use std::time::Duration;

/// Maximum number of process trees leased to one connection.
pub const PROCESSES_PER_CONNECTION_MAX: usize = 4096;

/// Maximum number of uses of instances by one connection. An edge thread has one for each site it
/// serves.
pub const INSTANCE_USES_PER_CONNECTION_MAX: usize = 16_384;

/// Maximum number of request cells in instances for one connection, pending or held.
pub const SEATS_PER_CONNECTION_MAX: usize = 4096;

/// Maximum number of boosts for requests in instances by one connection.
pub const BOOSTS_PER_CONNECTION_MAX: usize = 4096;

/// Maximum number of tenants in each list of one message.
pub const TENANTS_MAX: usize = 64;

/// Time in which a program must begin to run. Otherwise it is ended: a tenant may have stopped it
/// on its way. It is long, because in a cell without CPU time all programs begin slowly.
pub const START_TIMEOUT: Duration = Duration::from_secs(300);

/// Time for which a tenant's CPU priority stays lowered unless the edge repeats it. So an edge that
/// has ended, or is lost, holds nobody back.
pub const GIVE_WAY_FOR: Duration = Duration::from_secs(3);

/// Maximum wait for an instance: for its turn, a failed restore and a start. Five hundred slow
/// instances that are requested at once on two cores need a quarter of an hour.
pub const WAKE_MAX: Duration = Duration::from_secs(900);

/// Maximum wait for that. A request that waits longer for a process runs in the instance's cell.
pub const ACCEPT_MAX: Duration = Duration::from_secs(60);
