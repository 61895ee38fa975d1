//! The form of an image: its header, its archive, and the lists of CRIU that nagaya reads and
//! writes.
//!
//! Invariant: pure; a list that is not understood to its last byte is an error. Not here:
//! directories of images (`store`).

pub(crate) mod archive;
pub(crate) mod digest;
pub(crate) mod file_list;
pub(crate) mod header;
pub(crate) mod mappings;
pub(crate) mod memory_plan;
pub(crate) mod pagemap;
