//! The right to run: lanes, permits and tickets. Also the responses for those who do not get it at
//! once.
//!
//! In reading order: `admit` (the step of a request), `gate` (what it needs), `permit`, `lanes`,
//! `tickets`, `visits`, `guests`, `deferral` (responses with a ticket), `page`, `events`,
//! `cpu_yield`.

pub mod admit;
pub mod buffered_body;
pub mod cpu_yield;
pub mod deferral;
pub mod events;
pub mod explain;
pub mod exposition;
pub mod gate;
pub mod guests;
pub mod lanes;
pub mod lent_permits;
pub mod origins;
pub mod page;
pub mod permit;
pub mod pressure;
pub mod site_lane;
pub mod store;
pub mod tickets;
pub mod visits;
