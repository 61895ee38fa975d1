//! Experiments: nagaya and its peers on this machine, interleaved, with raw data, a plot and a
//! verdict.
//!
//! Not here: configuration of servers (`server`), load (`load`), results (`report`).

mod admission;
mod cell_cost;
mod cluster;
mod front;
mod h2;
pub mod harness;
mod instances;
mod isolation;
mod machines;
mod php;
mod proxy;
pub mod registry;
mod rule_cost;
mod sites_scale;
mod slow;
mod static_files;
