//! Paths that tenants can change, and the document roots that are opened by them.
//!
//! Invariant: a path of a tenant's is looked up with the tenant's own rights. Not here: who may
//! have what (`verbs`).

pub mod root_watch;
pub mod roots;
pub mod tenant_path;
