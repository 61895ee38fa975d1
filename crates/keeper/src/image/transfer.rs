//! Images from node to node: orders, sealed streams, and both ends of the pipes.
//!
//! Not here: the archive inside (`format`), the way between the nodes (`edge`).

pub(crate) mod incoming;
pub(crate) mod order;
pub(crate) mod outgoing;
pub(crate) mod sealed;
