//! State of instances: of one, of all on the node, and the state that they share.
//!
//! It holds state and starts nothing. Not here: the decisions (`decide`), the actions (`run`).

pub mod command_count;
pub mod deadlines;
pub mod drain_slot;
pub mod events;
pub mod instance;
pub mod limit_state;
pub mod node_images;
pub mod placement_state;
pub mod published;
pub mod restart_looks;
pub mod shared;
pub mod table;
pub mod transfer_slots;
pub mod wake_stats;
