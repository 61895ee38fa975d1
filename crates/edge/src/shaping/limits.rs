//! Holds bodies to the rates of limits that no program's cell can enforce.
//!
//! The kernel enforces the limits of a program's cell on its reads and writes. This module
//! enforces `read` limits on files and answers that the edge sends. It enforces `write` limits on
//! uploads of clients. The limits are the request's own, and those it shares with others (its
//! site's, its tenant's, a named cell's).
//!
//! In reading order: this file (which limits hold), `throttle::flow` (one body), `bucket` (one
//! rate), `shared_buckets` (rates that requests share), `quota_debt` (CPU quotas of programs too
//! short for the kernel), `alarm` (its clock). Not here: limits of programs (`keeper`).

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use nagaya_records::cell::{Confinement, LimitSet};
use nagaya_records::{Backend, Site, Tenant};
use smallvec::SmallVec;

use crate::http::message::{Request, RequestBody, Response, ResponseBody};
use crate::http::route::SiteRoute;
use crate::http::throttle::bucket::RateBucket;
use crate::http::throttle::flow::{BodyPacer, PacedTime};
use crate::record::execution::ExecutionSlot;
use crate::shaping::shared_buckets;
use crate::shaping::shared_buckets::{BodyDirection, SharedBuckets, SharedCell};

/// One thread's means to hold bodies to their rates.
pub struct Shaper {
    ledger: Arc<SharedBuckets>,
    plans: BucketPlanCache,
}

impl Shaper {
    pub fn new(ledger: Arc<SharedBuckets>) -> Self {
        Self { ledger, plans: BucketPlanCache::default() }
    }

    /// Holds an answer that the edge sends from a file, or passes on, to the `read` limits of the
    /// request.
    pub fn apply(&self, route: &SiteRoute, execution: &ExecutionSlot, mut response: Response) -> Response {
        // A program's output is not its input, and the kernel has limited that already. An
        // application's answer is passed on, wherever its processes are.
        let is_app = matches!(route.site.backend, Backend::App(_));
        let is_of_program =
            || !is_app && execution.get().is_some_and(|execution| execution.since().is_some());
        if response.body.is_empty() || !is_limited(route, execution) || is_of_program() {
            return response;
        }
        let confinement = execution.get().map(|execution| execution.confinement());
        let Some(mut flow) = self.flow(route, execution, confinement, BodyDirection::Out) else {
            return response;
        };
        // A small body that may go at once is sent as without a limit, with its head.
        let may_go = match &response.body {
            ResponseBody::Bytes(bytes) => {
                bytes.len() as u64 <= flow.slice() && flow.try_take(bytes.len() as u64)
            }
            _ => false,
        };
        if !may_go {
            response.flow = Some(Box::new(flow));
        }
        response
    }

    /// Holds the client's body to the `write` limits of the request.
    pub fn upload(
        &self,
        route: &SiteRoute,
        execution: &ExecutionSlot,
        confinement: Option<&Arc<Confinement>>,
        request: &mut Request,
    ) {
        let is_limited = confinement.is_some() || is_limited(route, execution);
        if request.body.is_empty() || !is_limited {
            return;
        }
        if let Some(flow) = self.flow(route, execution, confinement, BodyDirection::In) {
            let body = std::mem::replace(&mut request.body, RequestBody::empty());
            request.body = flow.hold(body);
        }
    }

    fn flow(
        &self,
        route: &SiteRoute,
        execution: &ExecutionSlot,
        confinement: Option<&Arc<Confinement>>,
        way: BodyDirection,
    ) -> Option<BodyPacer> {
        let mut buckets = self.plans.find(&self.ledger, route, confinement, way);
        // The request's own bucket is nobody else's, so it is no part of the plan.
        let own = confinement.and_then(|confinement| shared_buckets::rate(&confinement.limits, way));
        buckets.extend(own.map(|rate| Arc::new(RateBucket::new(rate))));
        if buckets.is_empty() {
            return None;
        }
        let execution: Rc<dyn PacedTime> = execution.get_or_make();
        BodyPacer::new(buckets, execution)
    }
}

/// Returns whether some limit might concern the request. Most have none, and cost only this
/// check.
fn is_limited(route: &SiteRoute, execution: &ExecutionSlot) -> bool {
    execution.get().is_some() || !route.site.limits.is_empty() || !route.tenant.limits.is_empty()
}

/// Buckets of shared cells.
type BucketList = SmallVec<[Arc<RateBucket>; 2]>;

/// Plans of the requests that a thread met last, because most requests repeat one of them.
#[derive(Default)]
struct BucketPlanCache(RefCell<SmallVec<[BucketPlan; PLANS_MAX]>>);

/// Maximum number of plans. Beyond it the oldest one is replaced.
const PLANS_MAX: usize = 8;

/// The shared buckets that requests of one site under one confinement are charged to.
struct BucketPlan {
    site: Arc<Site>,
    tenant: Arc<Tenant>,
    confinement: Option<Arc<Confinement>>,
    way: BodyDirection,
    /// Value of `SharedBuckets::buckets` at that time.
    counted: u64,
    buckets: BucketList,
}

impl BucketPlanCache {
    fn find(
        &self,
        ledger: &SharedBuckets,
        route: &SiteRoute,
        confinement: Option<&Arc<Confinement>>,
        way: BodyDirection,
    ) -> BucketList {
        let counted = ledger.buckets();
        // A confinement with its own rates sets them each time, because others may have changed
        // them since.
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
        plans.push(BucketPlan {
            site: Arc::clone(&route.site),
            tenant: Arc::clone(&route.tenant),
            confinement: confinement.cloned(),
            way,
            // Read before the look-up, so that a bucket made meanwhile causes another look-up.
            counted,
            buckets: buckets.clone(),
        });
        buckets
    }
}

fn shared_buckets(
    ledger: &SharedBuckets,
    route: &SiteRoute,
    confinement: Option<&Arc<Confinement>>,
    way: BodyDirection,
) -> BucketList {
    let tenant = &route.tenant.name;
    let named = confinement.iter().flat_map(|confinement| &confinement.named);
    let mut buckets: BucketList = named.filter_map(|named| ledger.named_bucket(named, tenant, way)).collect();
    let mut shared = |cell: fn(&SiteRoute) -> SharedCell, limits: LimitSet| {
        buckets.extend(ledger.bucket(cell(route), &limits, way));
    };
    if !route.site.limits.is_empty() {
        shared(|route| SharedCell::Site(route.site.name.clone()), route.site.limits.limits());
    }
    if !route.tenant.limits.is_empty() {
        shared(|route| SharedCell::Tenant(route.tenant.name.clone()), route.tenant.limits.limits());
    }
    buckets
}
