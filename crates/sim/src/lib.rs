//! A simulated cluster: clocks that drift, a network that loses and delays, a store that goes away, nodes that stand still and die,
//! and on them the real liveness, fence, planner and relocation code of `nagaya-placement`.
//!
//! One seed decides all of it, so whatever went wrong once goes wrong again. What must never be is looked for by an observer who sees
//! all nodes at once and real time, as no node can.
//!
//! Not here: real time, threads, sockets, files. What a node does between the pure parts stands in `node.rs` and is written for the
//! simulation; the supervisor and the edge do the same with real sockets.

pub mod dice;
pub mod faults;
mod node;
pub mod observer;
mod store;
mod wire;
pub mod world;

pub use faults::Faults;
pub use observer::{Observer, Violation};
pub use world::{Flaws, Report, Shape, World};
