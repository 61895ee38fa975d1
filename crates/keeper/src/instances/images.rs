//! Images as instances use them: opened, kept within limits, and sent from node to node.
//!
//! Not here: the bytes of an image (`image`), when one is taken or used (`decide::lifecycle`).

pub mod collection;
pub mod keeping;
pub mod transfer;
