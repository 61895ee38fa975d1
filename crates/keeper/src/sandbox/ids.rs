//! Ids of sandboxes' own root users on the node. Pure.

/// Bit that makes a tenant's id the id of its sandboxes' root user on the node. Such ids are beyond
/// those that distributions, container tools and systemd give out. So they own nothing and nobody
/// else runs under them.
pub const ROOT_ID_BIT: u32 = 1 << 31;

/// Returns the id on the node of the root of a sandbox whose tenant has this id.
pub fn root_id(id: u32) -> u32 {
    id | ROOT_ID_BIT
}
