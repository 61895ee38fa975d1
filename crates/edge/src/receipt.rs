//! Receipts: what a request used and waited for, for those who ask afterwards.
//!
//! Not here: the account while the request runs (`account`), the log's lines (`access_log`), sums (`metrics`).

mod disclose;
mod explain;
mod figures;
mod meter;
mod ring;

pub use disclose::{Disclosure, RECEIPT, gather, tell_hop, tell_moves, tell_queued};
pub use explain::explain;
pub use figures::Figures;
pub use meter::{Covers, metered, now, spent, spent_on_answer};
pub use ring::{Ring, Rings};
