//! A simulated cluster. Clocks drift, the network loses and delays, the store fails, nodes pause
//! and die. On it runs the real code of `nagaya-placement` for liveness, leases, planning and
//! relocation.
//!
//! One seed decides everything, so a failure can be repeated. An observer checks the invariants. It
//! sees all nodes at once and real time, as no node can.
//!
//! Not here: real time, threads, sockets, files. A node's work between the pure parts is in
//! `node.rs` and is written for the simulation. The supervisor and the edge do the same with real
//! sockets.

pub mod dice;
pub mod faults;
mod node;
pub mod observer;
mod store;
pub mod volumes;
mod wire;
pub mod world;

pub use faults::FaultKinds;
pub use observer::{SafetyViolation, WorldObserver};
pub use world::{PlantedFlaws, SimWorld, WorldReport, WorldShape};
