//! The vocabulary of all nagaya crates: error codes, limits, units, dates, request ids and the
//! clock interface.
//!
//! Not here: anything that does I/O or needs another crate (std only). Names of tenants and sites,
//! and their records, are in `records`; counters and histograms in `telemetry`.

pub mod anchored_clock;
pub mod clock;
pub mod code;
pub mod date;
pub mod fuzz;
pub mod limits;
pub mod own_caller;
pub mod request_id;
pub mod units;

pub use anchored_clock::AnchoredClock;
pub use clock::{Clock, SystemClock};
pub use code::Code;
pub use own_caller::{CallerReach, OwnCaller};
pub use request_id::RequestId;
