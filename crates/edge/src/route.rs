//! Which site a request is for: by host name, then by the longest path.
//!
//! Each thread remembers the routes of the hosts it serves; a change of any record makes it look again. A host
//! nobody has leaves here before anything is allocated for it. Not here: the table itself (`cmdb::table`).

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use foldhash::fast::RandomState;
use nagaya_cmdb::cell::Confinement;
use nagaya_cmdb::{Site, Tenant};

use crate::admission::Lane;
use crate::message::Head;
use crate::path::{SitePath, matches_prefix};
use crate::refusal::Refusal;
use crate::shared::Shared;

/// Hosts whose routes a thread remembers. Beyond it all are forgotten: cheaper than an order of use, and a
/// look-up costs a few microseconds.
const HOSTS_MAX: usize = 8192;

/// One site as requests meet it.
#[derive(Debug)]
pub struct Route {
    pub site: Arc<Site>,
    pub tenant: Arc<Tenant>,
    /// Where its requests stand in line.
    pub lane: Arc<Lane>,
    /// What holds for each of its requests, where its record says anything; rules lay theirs over it.
    pub confinement: Option<Arc<Confinement>>,
}

impl Route {
    pub fn new(site: Arc<Site>, tenant: Arc<Tenant>, lane: Arc<Lane>) -> Self {
        let demotions = site.demotions.iter().filter_map(|step| step.demotion()).collect();
        let confinement =
            Confinement { limits: site.request_limits.limits(), demotions, ..Confinement::default() };
        let confinement = (confinement != Confinement::default()).then(|| Arc::new(confinement));
        Self { site, tenant, lane, confinement }
    }
}

/// The routes of one host, longest path first.
type Routes = Rc<[Rc<Route>]>;

pub struct Router {
    shared: Arc<Shared>,
    /// Generation of the records that `known` was made from.
    generation: Cell<u64>,
    known: RefCell<HashMap<Box<str>, Routes, RandomState>>,
}

impl Router {
    pub fn new(shared: Arc<Shared>) -> Self {
        Self { shared, generation: Cell::new(0), known: RefCell::default() }
    }

    /// The site for this request.
    pub fn find(&self, head: &Head) -> Result<Rc<Route>, Refusal> {
        let routes = self.routes(&head.host).ok_or(Refusal::UnknownHost)?;
        if let [only] = &*routes
            && only.site.path == "/"
        {
            return Ok(Rc::clone(only));
        }
        let path = SitePath::parse(&head.path)?;
        routes
            .iter()
            .find(|route| matches_prefix(path.as_str(), &route.site.path))
            .cloned()
            .ok_or(Refusal::NotFound)
    }

    fn routes(&self, host: &str) -> Option<Routes> {
        let generation = self.shared.generation();
        if self.generation.replace(generation) != generation {
            self.known.borrow_mut().clear();
        }
        if let Some(routes) = self.known.borrow().get(host) {
            return Some(Rc::clone(routes));
        }
        let found = self.shared.routes(host);
        if found.is_empty() {
            return None;
        }
        let options = self.shared.options();
        let routes: Routes = found
            .into_iter()
            .map(|route| {
                let lane = self.shared.lanes.of_site(&route.site, &route.tenant, &options);
                Rc::new(Route::new(route.site, route.tenant, lane))
            })
            .collect();
        let mut known = self.known.borrow_mut();
        if known.len() >= HOSTS_MAX {
            known.clear();
        }
        known.insert(host.into(), Rc::clone(&routes));
        Some(routes)
    }
}
