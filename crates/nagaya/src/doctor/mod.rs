//! Diagnosis of this machine for a node. Facts (`facts`, `cgroups`, `rule_files`) are judged by
//! tables (`checks`, `cells`, `instances`). Tenants with wrong ids or homes are in `tenants`.
//!
//! Not here: printing (`cli::doctor`), the protections of a running node (`identity`).

mod cells;
mod cgroups;
mod checks;
mod facts;
mod instances;
mod rule_files;
pub mod tenants;

pub use checks::{CheckState, DoctorCheck, checks};
pub use facts::{FactSources, gather, try_sandbox};

/// Returns whether groups can be made in any cgroup hierarchy.
pub fn cgroup_is_usable() -> bool {
    cgroups::CgroupFacts::gather().is_usable()
}

/// Returns whether the kernel opens files strictly below a directory (Linux 5.6).
pub fn has_openat2() -> bool {
    facts::openat2()
}
