//! The vocabulary every nagaya crate shares: error codes, limits, units, dates, request ids and the clock seam.
//!
//! Not here: anything that does I/O or needs another crate (std only). Names of tenants and sites, and
//! their records, live in `cmdb`; counters and histograms in `telemetry`.

pub mod clock;
pub mod code;
pub mod date;
pub mod fuzz;
pub mod limits;
pub mod reckoning;
pub mod request_id;
pub mod units;

pub use clock::{Clock, SystemClock};
pub use code::Code;
pub use reckoning::Reckoning;
pub use request_id::RequestId;
