//! Tickets: what is promised to whom was turned away, as a value and as the signed text that a client carries.
//!
//! Not here: which slot is free (`calendar`), and who may come when (`machine`).

use crate::{LaneName, Moment, Nonce};

/// A promise of one slot of one lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Ticket {
    pub lane: LaneName,
    pub begins: Moment,
    pub ends: Moment,
    /// Which life of the lane's calendar it was given in.
    pub epoch: u32,
    pub nonce: Nonce,
}
