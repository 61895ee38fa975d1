//! Changes to the files that CRIU has written, so that a wake reads less.
//!
//! Not here: the form of those files (`format`), when they are written (`criu`).

pub(crate) mod holes;
pub(crate) mod mapped;
pub(crate) mod memory;
pub(crate) mod shared;
