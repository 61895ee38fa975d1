//! Bytes at the rate that limits allow: bodies that no program's cell can hold back.
//!
//! The kernel holds what a program reads and writes to its cell's limits. A file the edge sends itself and an answer it passes
//! on are held to `read` limits here, and what a client uploads to `write` limits: by the request's own limits, and by
//! those it shares with others (its site's, its tenant's, a named cell's).
//!
//! In reading order: this file (which limits hold), `flow` (one body), `bucket` (one rate), `ledger` (what requests
//! share), `settle` (CPU quotas of programs too short for the kernel), `alarm` (its clock). Not here: limits of programs
//! (`keeper`).

mod alarm;
mod bucket;
mod flow;
mod ledger;
mod settle;

pub use flow::{Flow, Slow};
pub use ledger::Ledger;
pub use settle::Debt;

use std::cell::RefCell;
use std::sync::Arc;

use nagaya_cmdb::cell::{Confinement, Limits};
use nagaya_cmdb::{Backend, Site, Tenant};
use smallvec::SmallVec;

use self::bucket::Bucket;
use self::ledger::{Shared, Way};
use crate::account::Account;
use crate::message::{Request, RequestBody, Response, ResponseBody};
use crate::node::Node;
use crate::route::Route;

/// Holds an answer that the edge sends from a file, or passes on, to the `read` limits that concern the request.
pub fn apply(node: &Node, route: &Route, account: &Account, mut response: Response) -> Response {
    // A program's output is not what it read, and what it read the kernel has held back already. An application's answer is
    // passed on, wherever its processes are.
    let is_app = matches!(route.site.backend, Backend::App(_));
    let is_of_program = || !is_app && account.confined().is_some_and(|stay| stay.since().is_some());
    if response.body.is_empty() || !is_limited(route, account) || is_of_program() {
        return response;
    }
    let confinement = account.confined().map(|stay| stay.confinement());
    let Some(mut flow) = flow(node, route, account, confinement, Way::Out) else { return response };
    // What is small and may go at once goes as if there were no limit, with its head.
    let may_go = match &response.body {
        ResponseBody::Bytes(bytes) => bytes.len() as u64 <= flow.slice() && flow.try_take(bytes.len() as u64),
        _ => false,
    };
    if !may_go {
        response.flow = Some(Box::new(flow));
    }
    response
}

/// Holds what the client sends to the `write` limits that concern the request.
pub fn upload(
    node: &Node,
    route: &Route,
    account: &Account,
    confinement: Option<&Arc<Confinement>>,
    request: &mut Request,
) {
    let is_limited = confinement.is_some() || is_limited(route, account);
    if request.body.is_empty() || !is_limited {
        return;
    }
    if let Some(flow) = flow(node, route, account, confinement, Way::In) {
        let body = std::mem::replace(&mut request.body, RequestBody::empty());
        request.body = flow.hold(body);
    }
}

/// Some limit might concern the request. Most have none, and pay no more than this look.
fn is_limited(route: &Route, account: &Account) -> bool {
    account.confined().is_some() || !route.site.limits.is_empty() || !route.tenant.limits.is_empty()
}

fn flow(
    node: &Node,
    route: &Route,
    account: &Account,
    confinement: Option<&Arc<Confinement>>,
    way: Way,
) -> Option<Flow> {
    let mut buckets = node.plans.find(&node.shared.ledger, route, confinement, way);
    // The request's own: nobody else's, so no part of the plan.
    let own = confinement.and_then(|confinement| ledger::rate(&confinement.limits, way));
    buckets.extend(own.map(|rate| Arc::new(Bucket::new(rate))));
    if buckets.is_empty() {
        return None;
    }
    Flow::new(buckets, account.stay())
}

/// Buckets of shared cells.
type Buckets = SmallVec<[Arc<Bucket>; 2]>;

/// What a thread found out about the requests it met last: most are like one before them.
#[derive(Default)]
pub struct Plans(RefCell<SmallVec<[Plan; PLANS_MAX]>>);

/// Beyond it the one that was made first is made again.
const PLANS_MAX: usize = 8;

/// Which shared buckets requests of one site under one confinement are charged to.
struct Plan {
    site: Arc<Site>,
    tenant: Arc<Tenant>,
    confinement: Option<Arc<Confinement>>,
    way: Way,
    /// What `Ledger::buckets` was.
    counted: u64,
    buckets: Buckets,
}

impl Plans {
    fn find(
        &self,
        ledger: &Ledger,
        route: &Route,
        confinement: Option<&Arc<Confinement>>,
        way: Way,
    ) -> Buckets {
        let counted = ledger.buckets();
        // One that says the rate itself sets it each time: others may have set another one since.
        let sets_rates = confinement.iter().flat_map(|all| &all.named).any(|named| named.limits.is_some());
        if sets_rates {
            return shared_buckets(ledger, route, confinement, way);
        }
        let same = |a: &Option<Arc<Confinement>>| match (a, confinement) {
            (Some(a), Some(b)) => Arc::ptr_eq(a, b),
            (None, None) => true,
            _ => false,
        };
        let mut plans = self.0.borrow_mut();
        let found = plans.iter().position(|plan| {
            plan.way == way
                && Arc::ptr_eq(&plan.site, &route.site)
                && Arc::ptr_eq(&plan.tenant, &route.tenant)
                && same(&plan.confinement)
        });
        if let Some(at) = found {
            if plans[at].counted == counted {
                return plans[at].buckets.clone();
            }
            plans.swap_remove(at);
        }
        let buckets = shared_buckets(ledger, route, confinement, way);
        if plans.len() >= PLANS_MAX {
            plans.remove(0);
        }
        plans.push(Plan {
            site: Arc::clone(&route.site),
            tenant: Arc::clone(&route.tenant),
            confinement: confinement.cloned(),
            way,
            // From before the look: what was made meanwhile, here or elsewhere, makes the next look another one.
            counted,
            buckets: buckets.clone(),
        });
        buckets
    }
}

fn shared_buckets(
    ledger: &Ledger,
    route: &Route,
    confinement: Option<&Arc<Confinement>>,
    way: Way,
) -> Buckets {
    let tenant = &route.tenant.name;
    let named = confinement.iter().flat_map(|confinement| &confinement.named);
    let mut buckets: Buckets = named.filter_map(|named| ledger.named_bucket(named, tenant, way)).collect();
    let mut shared = |cell: fn(&Route) -> Shared, limits: Limits| {
        buckets.extend(ledger.bucket(cell(route), &limits, way));
    };
    if !route.site.limits.is_empty() {
        shared(|route| Shared::Site(route.site.name.clone()), route.site.limits.limits());
    }
    if !route.tenant.limits.is_empty() {
        shared(|route| Shared::Tenant(route.tenant.name.clone()), route.tenant.limits.limits());
    }
    buckets
}
