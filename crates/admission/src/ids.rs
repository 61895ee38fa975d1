//! Moments, and what names a client, a lane, a ticket and a request.

/// A moment: microseconds since the Unix epoch on the node's own clock. The caller makes sure that
/// it never goes back, whatever the wall clock does.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, serde::Serialize, serde::Deserialize,
)]
pub struct Moment(pub u64);

/// Identifies a client for the limit on hoarded tickets: a keyed hash of its address, made by the
/// caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct ClientKey(pub u64);

/// A lane's name across restarts: a hash of its tenant, site and name, made by the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct LaneName(pub [u8; 16]);

/// A ticket's own random number, from the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct Nonce(pub u128);

/// A lane in this process. A removed lane is never mistaken for another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LaneId {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

/// A request that waits or runs. It keeps its number from the offer to the release; numbers are
/// never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestKey(pub u64);

/// Kind of a request, for learning service times: a hash of whatever the caller thinks determines
/// its cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CostClass(pub u32);
