//! The files that an image depends on: which ones an application reads, and whether they are as
//! they were.
//!
//! Not here: when that is asked (`instances::run`).

pub(crate) mod readings;
pub(crate) mod watched;
