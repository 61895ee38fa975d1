//! One site as requests meet it: its record, its tenant, and what holds for each of its requests.
//!
//! Not here: how it is found (`request::router`), its lane (`admission::site_lane`).

use std::net::IpAddr;
use std::sync::Arc;

use nagaya_base::OwnCaller;
use nagaya_records::cell::Confinement;
use nagaya_records::{Site, Tenant};

use crate::http::refusal::Refusal;

/// One site as requests see it.
#[derive(Debug)]
pub struct SiteRoute {
    pub site: Arc<Site>,
    pub tenant: Arc<Tenant>,
    /// Limits and cells of each of its requests, if its record names any. Those of rules override
    /// them.
    pub confinement: Option<Arc<Confinement>>,
}

impl SiteRoute {
    pub fn new(site: Arc<Site>, tenant: Arc<Tenant>) -> Self {
        let demotions = site.demotions.iter().filter_map(|step| step.demotion()).collect();
        let confinement =
            Confinement { limits: site.request_limits.limits(), demotions, ..Confinement::default() };
        let confinement = (confinement != Confinement::default()).then(|| Arc::new(confinement));
        Self { site, tenant, confinement }
    }

    /// Checks that the process connected from `peer` may request this site.
    ///
    /// # Errors
    /// Returns `UnknownHost` for a program of this node that may reach only the sites of another
    /// tenant.
    pub fn check_caller(&self, peer: IpAddr) -> Result<(), Refusal> {
        match OwnCaller::from_address(peer) {
            Some(caller) if !caller.may_ask(self.tenant.uid) => Err(Refusal::UnknownHost),
            _ => Ok(()),
        }
    }
}
