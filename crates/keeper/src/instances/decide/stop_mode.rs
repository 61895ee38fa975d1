//! How the end of a run is wanted. Pure.
//!
//! Not here: ending it (`driver`), letting its requests finish (`draining`).

use crate::instances::decide::lifecycle::OpId;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopMode {
    /// It gets `SIGTERM` and the time that its record gives.
    Graceful,
    /// It is killed at once.
    Kill,
    /// It serves its present users first, and ends gracefully then.
    Drain,
}

/// The end that is wanted of a run, and the operation that waits for it. `None` while it is to go
/// on.
pub type EndRequest = Option<(OpId, StopMode)>;
