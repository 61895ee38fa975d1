//! What this machine offers to a node, and what is missing: facts gathered here and in `facts`, judged by the
//! table in `checks`.
//!
//! Not here: printing (`cli::doctor`), the protections of a running node (`supervisor::identity`).

mod checks;
mod facts;

pub use checks::{Check, State, checks};
pub use facts::gather;

/// Whether groups can be made in any cgroup hierarchy.
pub fn cgroup_is_usable() -> bool {
    let cgroups = facts::cgroups();
    cgroups.v2_writable || cgroups.v1.iter().any(|mount| mount.writable)
}

/// Whether the kernel opens files beneath a directory (Linux 5.6).
pub fn has_openat2() -> bool {
    facts::openat2()
}
