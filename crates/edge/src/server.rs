//! The process: its threads, their sockets, and all that they share. Only this room knows every
//! part of the edge.
//!
//! In reading order: `process`, `thread`, `connection`, `node` (one thread's parts), `shared` (all
//! threads' parts).

pub mod connection;
pub mod node;
pub mod process;
pub mod shared;
pub mod thread;
