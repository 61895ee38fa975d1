//! Decides which node runs a site, whether that node is alive, and whether it may serve.
//!
//! The modules are pure state machines, as in `nagaya-admission`. Every call carries the time.
//! Nothing here reads a clock, sends a datagram, queries the store or uses random numbers. A
//! decision is the result of the call, or an effect that the caller carries out. `nagaya-sim`
//! drives the same code through partitions, pauses and lost watches from a seed.
//!
//! Not here: the records (`nagaya-records`), the store, sockets and timers (`nagaya`,
//! `nagaya-edge`), starting and ending instances (`nagaya-keeper`).

pub mod balance;
pub mod lease;
pub mod liveness;
mod moment;
pub mod outlook;
pub mod planner;
pub mod relocation;
pub mod suspect_marks;

pub use moment::Moment;
