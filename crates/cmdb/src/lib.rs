//! Who is hosted here: the records of tenants, sites, settings and rules, the store that keeps them, and the complete
//! in-memory copy each process watches, so that a request never asks the store.
//!
//! Not here: routing of requests (`edge::route`), processes (`keeper`), the command line (`nagaya`).
//! Nothing in this crate acts on what it knows.

pub mod cell;
pub mod check;
pub mod feed;
#[doc(hidden)]
pub mod fuzzing;
pub mod instance;
pub mod names;
mod punycode;
pub mod record;
pub mod store;
pub mod table;

pub use check::Mistake;
pub use names::{HostPattern, NameError, NodeName, RuleName, SiteName, TenantName};
pub use record::{
    Backend, CellLimits, Change, Copied, NodeRecord, Part, Placement, Rule, Setting, SettingValue, Site,
    Standing, Tenant, TicketKeys, Why,
};
pub use store::{RedbStore, Store, StoreError};
pub use table::{Route, Table, TableError};
