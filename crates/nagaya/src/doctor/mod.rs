//! What this machine offers to a node, and what is missing: facts (`facts`, `cgroups`, `rule_files`), judged by tables
//! (`checks`, `cells`, `instances`), and tenants whose ids or homes are not as they should be (`tenants`).
//!
//! Not here: printing (`cli::doctor`), the protections of a running node (`supervisor::identity`).

mod cells;
mod cgroups;
mod checks;
mod facts;
mod instances;
mod rule_files;
pub mod tenants;

pub use checks::{Check, State, checks};
pub use facts::{Asked, gather, try_sandbox};

/// Whether groups can be made in any cgroup hierarchy.
pub fn cgroup_is_usable() -> bool {
    cgroups::Cgroups::gather().is_usable()
}

/// Whether the kernel opens files beneath a directory (Linux 5.6).
pub fn has_openat2() -> bool {
    facts::openat2()
}
