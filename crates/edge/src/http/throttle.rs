//! Bodies that are sent and taken no faster than a rate.

pub mod bucket;
pub mod flow;
