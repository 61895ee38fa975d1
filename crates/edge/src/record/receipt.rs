//! Makes receipts, which say what a request used and waited for.
//!
//! Not here: the context while the request runs (`request::context`), the log's lines
//! (`access_log`), sums (`metrics`).

pub mod disclose;
pub mod explain;
pub mod figures;
pub mod ring;
