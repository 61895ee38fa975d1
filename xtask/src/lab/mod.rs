//! A cluster on one machine, for people, experiments and tests: nodes and etcd members in networks
//! of their own. All of them can be cut off, slowed down, stopped, killed and started again.
//!
//! The state of a lab is in its directory and in the kernel, so that any later command finds it. It
//! is taken down by the value that made it, or by a guard process if this program dies. Not here:
//! the command line (`command`), the wire (`network`), processes (`machine`), programs of the
//! machines (`node`, `store`).

mod addresses;
mod command;
mod guard;
mod machine;
mod network;
mod node;
mod running;
mod store;

pub use self::command::run;
pub use self::network::WireFault;
pub use self::running::{Lab, LabPlan, PROBE};
