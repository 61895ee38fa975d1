//! The records of a node: tenants, sites, settings and rules, and their complete table that each
//! process holds in memory. So a request never queries the store.
//!
//! Not here: where records are kept (`store`), routing of requests (`edge::route`), processes
//! (`keeper`), the command line (`nagaya`). Nothing in this crate acts on its data.

pub mod cell;
pub mod check;
pub mod feed;
#[doc(hidden)]
pub mod fuzzing;
pub mod instance;
pub mod names;
mod punycode;
pub mod record;
pub mod table;

pub use check::RecordMistake;
pub use names::{HostPattern, NameError, NodeName, RuleName, SiteName, TenantName};
pub use record::{
    Backend, CellLimits, NodeRecord, Placement, PlacementReason, PlacementView, RecordChange, Replica,
    ReplicaRecord, RuleRecord, Setting, SettingValue, Site, Tenant, TicketKeys,
};
pub use table::{RecordIndex, SiteMatch, TableError};
