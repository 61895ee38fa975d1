//! The view of operators and the balancer on instances, and the actions that they can request.
//!
//! Not here: tables and words of the command line (`nagaya::cli`).

pub mod acts;
pub mod exec;
pub mod load;
pub mod show;
