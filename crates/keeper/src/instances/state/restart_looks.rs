//! Tenants whose restart files are just looked at.
//!
//! Not here: the looks (`restarts`).

use std::cell::RefCell;
use std::collections::HashSet;

use nagaya_records::TenantName;

#[derive(Default)]
pub struct RestartLooks(RefCell<HashSet<TenantName>>);

impl RestartLooks {
    pub fn is_under_way(&self, tenant: &TenantName) -> bool {
        self.0.borrow().contains(tenant)
    }

    pub fn begin(&self, tenant: TenantName) {
        self.0.borrow_mut().insert(tenant);
    }

    pub fn end(&self, tenant: &TenantName) {
        self.0.borrow_mut().remove(tenant);
    }
}
