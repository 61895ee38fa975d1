//! For whom a cell is made.
//!
//! Not here: where in the tree that is (`cell_path`).

use std::sync::Arc;

use nagaya_records::{Site, Tenant};

use super::device::DeviceNumber;

/// The tenant, site and device that a cell belongs to.
#[derive(Debug, Clone)]
pub struct CellParent {
    pub tenant: Arc<Tenant>,
    /// `None`: directly below the tenant, as a worker that has served nobody yet.
    pub site: Option<Arc<Site>>,
    /// `st_dev` of the site's files as major and minor number, for `Device::Root`. `None` if it was
    /// not read yet.
    pub device: Option<DeviceNumber>,
}
