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

use std::sync::Arc;

use nagaya_cmdb::cell::Limits;
use smallvec::SmallVec;

use self::bucket::Bucket;
use self::ledger::{Shared, Way};
use crate::account::Account;
use crate::message::{Request, RequestBody, Response, ResponseBody};
use crate::node::Node;
use crate::route::Route;

/// Holds an answer that the edge sends from a file, or passes on, to the `read` limits that concern the request.
pub fn apply(node: &Node, route: &Route, account: &Account, mut response: Response) -> Response {
    // A program's output is not what it read, and what it read the kernel has held back already.
    let is_of_program = || account.confined().is_some_and(|stay| stay.since().is_some());
    if response.body.is_empty() || !is_limited(route, account) || is_of_program() {
        return response;
    }
    let Some(mut flow) = flow(node, route, account, Way::Out) else { return response };
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
pub fn upload(node: &Node, route: &Route, account: &Account, request: &mut Request) {
    if request.body.is_empty() || !is_limited(route, account) {
        return;
    }
    if let Some(flow) = flow(node, route, account, Way::In) {
        let body = std::mem::replace(&mut request.body, RequestBody::empty());
        request.body = flow.hold(body);
    }
}

/// Some limit might concern the request. Most have none, and pay no more than this look.
fn is_limited(route: &Route, account: &Account) -> bool {
    account.confined().is_some() || !route.site.limits.is_empty() || !route.tenant.limits.is_empty()
}

fn flow(node: &Node, route: &Route, account: &Account, way: Way) -> Option<Flow> {
    let ledger = &node.shared.ledger;
    let tenant = &route.tenant.name;
    let mut buckets = SmallVec::new();
    if let Some(stay) = account.confined() {
        let confinement = stay.confinement();
        buckets.extend(ledger::rate(&confinement.limits, way).map(|rate| Arc::new(Bucket::new(rate))));
        buckets.extend(confinement.named.iter().filter_map(|named| ledger.named_bucket(named, tenant, way)));
    }
    let mut shared = |cell: fn(&Route) -> Shared, limits: Limits| {
        buckets.extend(ledger.bucket(cell(route), &limits, way));
    };
    if !route.site.limits.is_empty() {
        shared(|route| Shared::Site(route.site.name.clone()), route.site.limits.limits());
    }
    if !route.tenant.limits.is_empty() {
        shared(|route| Shared::Tenant(route.tenant.name.clone()), route.tenant.limits.limits());
    }
    if buckets.is_empty() {
        return None;
    }
    Flow::new(buckets, account.stay())
}
