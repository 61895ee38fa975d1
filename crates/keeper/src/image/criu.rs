//! CRIU: finding it, what it knows of the kernel, its two commands, and its log.
//!
//! Not here: the files that it writes (`format`, `rewrite`).

pub(crate) mod checkpoint;
pub(crate) mod facts;
pub(crate) mod log;
pub(crate) mod program;
