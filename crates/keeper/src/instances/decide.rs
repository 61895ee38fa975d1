//! Decisions about an instance: pure state machines and figures, without a process or a clock of
//! their own.
//!
//! Invariant: nothing here does anything; it returns the actions to take. Not here: doing them
//! (`run`).

pub mod alarms;
pub mod boosts;
pub mod costs;
pub mod lifecycle;
pub mod policy;
pub mod stop_mode;
pub mod wake_priority;
pub mod wake_queue;
pub mod wake_timeline;
pub mod work_meter;
