//! One site as requests meet it: its route, and the lane in which its requests wait.
//!
//! Not here: how the site of a request is found (`request::router`).

use std::ops::Deref;
use std::sync::Arc;

use nagaya_records::{Site, Tenant};

use crate::admission::lanes::EdgeLane;
use crate::http::route::SiteRoute;

/// A site with its lane. Whatever needs no lane gets its [`SiteRoute`].
#[derive(Debug)]
pub struct SiteLane {
    pub route: SiteRoute,
    /// Where its requests wait.
    pub lane: Arc<EdgeLane>,
}

impl SiteLane {
    pub fn new(site: Arc<Site>, tenant: Arc<Tenant>, lane: Arc<EdgeLane>) -> Self {
        Self { route: SiteRoute::new(site, tenant), lane }
    }
}

impl Deref for SiteLane {
    type Target = SiteRoute;

    fn deref(&self) -> &SiteRoute {
        &self.route
    }
}
