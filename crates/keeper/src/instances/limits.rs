//! Limits of single requests in an instance: cells of their own, and boosts.
//!
//! Not here: cells (`cells`), the connection of the edge that asks (`server`).

pub mod boost_ref;
pub mod connection_holder;
pub mod entering;
pub mod request_cells;
