//! Finds the site of a request: by host name, then by the longest path.
//!
//! Each thread remembers the routes of the hosts it serves; a change of any record invalidates
//! them. An unknown host leaves here before any memory is allocated for it. Not here: the table
//! itself (`records::table`).

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use foldhash::fast::RandomState;

use crate::admission::lanes::LaneSet;
use crate::admission::site_lane::SiteLane;
use crate::http::message::RequestHead;
use crate::http::path::{SitePath, matches_prefix};
use crate::http::refusal::Refusal;
use crate::options::CurrentOptions;
use crate::record_table::RecordTable;

/// Maximum number of hosts whose routes a thread remembers. Beyond it all are forgotten. That is
/// cheaper than an order of use, and a look-up costs a few microseconds.
const HOSTS_MAX: usize = 8192;

/// The routes of one host, longest path first.
type HostRoutes = Rc<[Rc<SiteLane>]>;

/// One thread's routes.
pub struct Router {
    table: Arc<RecordTable>,
    lanes: Arc<LaneSet>,
    options: Arc<CurrentOptions>,
    /// Generation of the records from which `known` was made.
    generation: Cell<u64>,
    known: RefCell<HashMap<Box<str>, HostRoutes, RandomState>>,
}

impl Router {
    pub fn new(table: Arc<RecordTable>, lanes: Arc<LaneSet>, options: Arc<CurrentOptions>) -> Self {
        Self { table, lanes, options, generation: Cell::new(0), known: RefCell::default() }
    }

    /// Returns the site of this request.
    pub fn find(&self, head: &RequestHead) -> Result<Rc<SiteLane>, Refusal> {
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

    fn routes(&self, host: &str) -> Option<HostRoutes> {
        let generation = self.table.generation();
        if self.generation.replace(generation) != generation {
            self.known.borrow_mut().clear();
        }
        if let Some(routes) = self.known.borrow().get(host) {
            return Some(Rc::clone(routes));
        }
        let found = self.table.routes(host);
        if found.is_empty() {
            return None;
        }
        let options = self.options.get();
        let routes: HostRoutes = found
            .into_iter()
            .map(|route| {
                let lane = self.lanes.of_site(&route.site, &route.tenant, &options);
                Rc::new(SiteLane::new(route.site, route.tenant, lane))
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
