//! Which node runs a site, whether that node is there, and whether it may.
//!
//! Pure state machines, as in `nagaya-admission`: every call says what time it is, nothing here reads a clock, sends a datagram,
//! asks the store or rolls dice. What they decide comes back as the answer of the call or as effects, which the caller carries
//! out. `nagaya-sim` drives the same code through partitions, pauses and lost watches from a seed.
//!
//! Not here: the records (`nagaya-cmdb`), the store, sockets and timers (`nagaya`, `nagaya-edge`), starting and ending
//! instances (`nagaya-keeper`).

pub mod balance;
pub mod doubt;
pub mod fence;
pub mod liveness;
mod moment;
pub mod outlook;
pub mod planner;
pub mod relocation;

pub use moment::Moment;
