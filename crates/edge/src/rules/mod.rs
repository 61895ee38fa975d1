//! Runs the operator's rules in the life of a request, and carries out their verdict.
//!
//! A rule reads `facts` and leaves a verdict, which holds for all phases of its request. This
//! module carries it out. With no rule configured each step here is one look at a flag. In reading
//! order: this file, `facts`, `apply` (headers, paths, answers), `cells` and `load` (what rules ask
//! about the node), `follow` (changed files). Not here: Ruby, budgets and compiling
//! (`nagaya_rules`), which limits then hold (`exchange`, `shaping`, `keeper`).

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::HeaderMap;
use nagaya_base::{Code, RequestId};
use nagaya_keeper_api::client::KeeperClient;
use nagaya_records::cell::{Boost, CellChange, Confinement};
use nagaya_rules::{Engine, LogLevel, RulePhase, Verdict};
use tokio::sync::{Notify, mpsc};

use crate::admission::admit::AdmissionHints;
use crate::admission::lanes::EdgeLane;
use crate::admission::site_lane::SiteLane;
use crate::backends::programs::script::ScriptVariable;
use crate::http::message::{Request, RequestHead, Response};
use crate::http::proxy_headers::ForwardingRules;
use crate::http::refusal::Refusal;
use crate::http::route::SiteRoute;
use crate::loop_ticks::LoopTicks;
use crate::record::access_record::AccessRecord;
use crate::rules::apply::LeftOut;
use crate::rules::facts::RequestFacts;
use crate::rules::shared_rules::SharedRules;
use crate::rules::watch::DirectoryEvents;

pub mod apply;
pub mod cells;
pub mod facts;
pub mod follow;
pub mod load;
pub mod shared_rules;
pub mod watch;

#[cfg(test)]
mod tests;

/// Maximum number of change batches for named cells that wait for the keeper, per thread. Beyond
/// it they are lost, which is logged.
const CHANGES_WAITING_MAX: usize = 256;

const CODE_LEFT_OUT: Code = Code(429);
const CODE_CELLS: Code = Code(433);

/// One thread's rules.
pub struct ThreadRules {
    shared: Arc<SharedRules>,
    /// Knows which applications rest.
    keeper: Rc<KeeperClient>,
    forwarding: Rc<ForwardingRules>,
    engine: RefCell<Engine>,
    /// The initial verdict of each request.
    blank: Rc<Verdict>,
    /// Some file is configured. Checked before anything else.
    any: Cell<bool>,
    /// Some file runs after the request, so the facts it may ask for must be kept.
    logs: Cell<bool>,
    /// Name of this node.
    node: RefCell<Rc<str>>,
    changes: mpsc::Sender<Vec<CellChange>>,
    /// Taken by `follow`.
    to_keeper: Cell<Option<mpsc::Receiver<Vec<CellChange>>>>,
    /// The list of files has changed.
    other_files: Notify,
    /// Events of the files. `None` before they are watched.
    events: RefCell<Option<Rc<DirectoryEvents>>>,
    turns: Rc<LoopTicks>,
    /// Turn of the event loop in which they were last checked.
    looked: Cell<u64>,
}

/// The result of the rules for one request so far.
pub struct AppliedVerdict {
    rules: Rc<ThreadRules>,
    /// Shared with other requests that have the same verdict.
    verdict: Rc<Verdict>,
    /// Number of its cell changes that are done.
    changed: usize,
    /// How many of `verdict.spoke` are in the context.
    accounted: usize,
    kept: Option<Box<KeptRequest>>,
}

/// Facts for rules that run after the request.
struct KeptRequest {
    head: Box<RequestHead>,
    body_len: Option<u64>,
    route: Rc<SiteLane>,
    /// Fields of the response.
    headers: HeaderMap,
}

impl ThreadRules {
    pub fn new(
        shared: &Arc<SharedRules>,
        keeper: Rc<KeeperClient>,
        forwarding: Rc<ForwardingRules>,
        turns: Rc<LoopTicks>,
    ) -> Rc<Self> {
        let (changes, to_keeper) = mpsc::channel(CHANGES_WAITING_MAX);
        let engine = Engine::new(Arc::clone(&shared.set));
        let rules = Self {
            blank: engine.blank(),
            engine: RefCell::new(engine),
            shared: Arc::clone(shared),
            keeper,
            forwarding,
            any: Cell::new(false),
            logs: Cell::new(false),
            node: RefCell::new("".into()),
            changes,
            to_keeper: Cell::new(Some(to_keeper)),
            other_files: Notify::new(),
            events: RefCell::default(),
            turns,
            looked: Cell::new(0),
        };
        rules.refresh();
        Rc::new(rules)
    }

    /// Takes over the present shared settings.
    pub fn refresh(&self) {
        let set = &self.shared.set;
        self.any.set(RulePhase::ALL.into_iter().any(|phase| set.has(phase)));
        self.logs.set(set.has(RulePhase::LogTransaction));
        *self.node.borrow_mut() = self.shared.options.get().node.as_str().into();
        self.other_files.notify_one();
    }

    /// Reloads changed files. The task that follows them may not have run yet.
    fn see_changes(&self) {
        let turn = self.turns.now();
        if self.looked.replace(turn) == turn {
            return;
        }
        if self.events.borrow().as_ref().is_none_or(|events| events.wait()) {
            self.shared.set.refresh();
        }
    }

    /// Asks the rules of one phase. `took` is their time.
    fn ask(
        &self,
        phase: RulePhase,
        facts: &RequestFacts<'_>,
        verdict: &mut Rc<Verdict>,
        took: &mut Duration,
    ) -> Result<(), Refusal> {
        let mut engine = self.engine.borrow_mut();
        if engine.recall(phase, facts, verdict) {
            return Ok(());
        }
        let begun = Instant::now();
        let asked = engine.evaluate(phase, facts, verdict);
        *took += begun.elapsed();
        if !verdict.log.is_empty() {
            say(facts.head.id, Rc::make_mut(verdict));
        }
        // The client learns nothing about the operator's files. The error was logged.
        asked.map_err(|fault| Refusal::RuleBroken(fault.to_string()))
    }

    /// Sends changes of named cells to the keeper, without waiting for it.
    fn send(&self, mut changes: Vec<CellChange>) {
        self.shared.named.change(&mut changes);
        self.send_new(changes);
    }

    fn send_new(&self, changes: Vec<CellChange>) {
        if changes.is_empty() {
            return;
        }
        self.shared.ledger.note(&changes);
        if self.changes.try_send(changes).is_err() && self.shared.told.first("changes of cells are lost") {
            tracing::error!(
                code = %CODE_CELLS,
                "changes of named cells by rules are lost: {CHANGES_WAITING_MAX} wait for the keeper already"
            );
        }
    }

    fn tell(&self, left_out: LeftOut, id: RequestId, route: &SiteRoute) {
        for what in left_out.0 {
            if self.shared.told.first(&what) {
                let site = route.site.name.as_str();
                tracing::warn!(code = %CODE_LEFT_OUT, site, request = %id, "left out of a rule's verdict: {what}");
            }
        }
    }
}

/// Runs rules before the admission. They may answer the request, change it, or choose its lane,
/// its limits and its cells.
pub fn on_arrival(
    rules: &Rc<ThreadRules>,
    route: &Rc<SiteLane>,
    request: &mut Request,
    applied: &mut Option<Box<AppliedVerdict>>,
    record: &mut AccessRecord,
) -> Result<Option<Response>, Refusal> {
    if !rules.any.get() {
        return Ok(None);
    }
    rules.see_changes();
    let verdict = Rc::clone(&rules.blank);
    let applied = applied.insert(Box::new(AppliedVerdict {
        rules: Rc::clone(rules),
        verdict,
        changed: 0,
        accounted: 0,
        kept: None,
    }));
    let phases = [RulePhase::PostReadRequest, RulePhase::AccessChecker];
    let answer = run(&phases, route, request, applied, record);
    if rules.logs.get() {
        applied.keep(route, request);
    }
    answer
}

/// Returns whether rules run after the admission of requests (`on_admission`).
pub fn run_on_admission(rules: &ThreadRules) -> bool {
    rules.any.get() && rules.shared.set.has(RulePhase::Fixups)
}

/// Runs rules after the admission, just before the request runs.
pub fn on_admission(
    rules: &ThreadRules,
    route: &Rc<SiteLane>,
    request: &mut Request,
    applied: Option<&mut AppliedVerdict>,
    record: &mut AccessRecord,
) -> Result<Option<Response>, Refusal> {
    // It is missing only if rules were configured while the request waited.
    let Some(applied) = applied.filter(|_| run_on_admission(rules)) else { return Ok(None) };
    let answer = run(&[RulePhase::Fixups], route, request, applied, record);
    if rules.logs.get() {
        applied.keep(route, request);
    }
    answer
}

/// Runs these phases until one of them answers.
fn run(
    phases: &[RulePhase],
    route: &Rc<SiteLane>,
    request: &mut Request,
    applied: &mut AppliedVerdict,
    record: &mut AccessRecord,
) -> Result<Option<Response>, Refusal> {
    let mut took = Duration::ZERO;
    let mut ran = Ok(());
    for &phase in phases {
        if applied.rules.shared.set.has(phase) && ran.is_ok() && applied.verdict.answer.is_none() {
            ran = applied.run(phase, route, request, record, &mut took);
        }
    }
    record.ruled += took;
    for spoke in &applied.verdict.spoke[applied.accounted..] {
        record.add_rule(&spoke.file);
    }
    applied.accounted = applied.verdict.spoke.len();
    ran.and_then(|()| applied.verdict.answer.clone().map(apply::answer).transpose())
}

/// Returns the lane that a rule chose, and its hints for the admission.
pub fn lane(
    rules: &ThreadRules,
    route: &SiteLane,
    applied: Option<&AppliedVerdict>,
    record: &mut AccessRecord,
) -> (Option<Arc<EdgeLane>>, AdmissionHints) {
    let Some(applied) = applied else { return (None, AdmissionHints::default()) };
    let verdict = &applied.verdict;
    let hints = AdmissionHints { priority: verdict.priority, passes: verdict.passes };
    let lane = verdict.lane.as_ref().map(|lane| {
        record.details().lane = Some(lane.name.clone());
        rules.shared.lanes.of_rule(&route.lane, lane)
    });
    (lane, hints)
}

/// Settles the cells and limits of the request: its site's, and over them its rules'. `None` if
/// nothing holds for it below its site's limits.
pub async fn confine(
    rules: &ThreadRules,
    route: &SiteRoute,
    applied: Option<&mut AppliedVerdict>,
    id: RequestId,
) -> Option<Arc<Confinement>> {
    let Some(applied) = applied else { return route.confinement.clone() };
    let verdict = Rc::clone(&applied.verdict);
    applied.changed = verdict.changes.len();
    change_cells(rules, route, &verdict).await;
    let ruled = of_backend(rules, route, id, &verdict.confinement);
    match &route.confinement {
        Some(site) => Some(Arc::new(overlaid(site, &ruled))),
        None if *ruled != Confinement::default() => Some(ruled),
        None => None,
    }
}

/// Returns the limits that are known when the body of a request begins to arrive. These are its
/// site's, overridden by those of the rules that have run by then.
pub fn arriving(route: &SiteRoute, applied: Option<&AppliedVerdict>) -> Option<Arc<Confinement>> {
    let ruled = applied.map(|applied| &applied.verdict.confinement);
    match (&route.confinement, ruled) {
        (Some(site), Some(ruled)) => Some(Arc::new(overlaid(site, ruled))),
        (None, Some(ruled)) if **ruled != Confinement::default() => Some(Arc::clone(ruled)),
        (site, _) => site.clone(),
    }
}

/// Adjusts limits to the backend. Only an application outlives its requests, and has limits that
/// could be raised for one.
fn of_backend(
    rules: &ThreadRules,
    route: &SiteRoute,
    id: RequestId,
    ruled: &Arc<Confinement>,
) -> Arc<Confinement> {
    let kind = route.site.backend.kind();
    if ruled.boost.is_empty() || kind == "app" {
        return Arc::clone(ruled);
    }
    let what = format!("a boost, which only applications can have, for a site of kind {kind}");
    rules.tell(LeftOut(vec![what]), id, route);
    Arc::new(Confinement { boost: Boost::default(), ..Confinement::clone(ruled) })
}

/// Carries out a verdict's changes of named cells, unless all were done for the present state of
/// the table.
async fn change_cells(rules: &ThreadRules, route: &SiteRoute, verdict: &Verdict) {
    let named = &verdict.confinement.named;
    if verdict.changes.is_empty() && named.is_empty() {
        return;
    }
    let cells = &rules.shared.named;
    let moment = cells.moment();
    if verdict.settled.get() == moment {
        cells.note_asked();
        return;
    }
    let mut changes = verdict.changes.clone();
    cells.change(&mut changes);
    let is_settled = changes.is_empty();
    let runs_program = matches!(route.site.backend.kind(), "cgi" | "php");
    if !is_settled && runs_program && !named.is_empty() {
        // The cells of the request must exist when it begins.
        rules.shared.ledger.note(&changes);
        Box::pin(follow::change_cells(rules, changes)).await;
    } else {
        rules.send_new(changes);
    }
    cells.attached(named);
    if is_settled && cells.moment() == moment {
        verdict.settled.set(moment);
    }
}

/// Returns the site's limits, overridden by the rule's. The rule's demotions replace the site's.
fn overlaid(site: &Confinement, rule: &Confinement) -> Confinement {
    let demotions = if rule.demotions.is_empty() { &site.demotions } else { &rule.demotions };
    Confinement {
        limits: site.limits.overlaid(&rule.limits),
        named: rule.named.clone(),
        demotions: demotions.clone(),
        boost: rule.boost,
    }
}

/// Returns the variables that rules set for the request's programs. Variables that a rule must
/// not set are left out.
pub fn variables(applied: Option<&AppliedVerdict>, route: &SiteRoute, id: RequestId) -> Vec<ScriptVariable> {
    let Some(applied) = applied else { return Vec::new() };
    let verdict = &applied.verdict;
    let mut left_out = LeftOut::default();
    let mut variables = apply::variables(&verdict.env, &mut left_out);
    applied.rules.tell(left_out, id, route);
    if let Some(user) = &verdict.rewrites.user
        && verdict.env("REMOTE_USER").is_none()
    {
        variables.push(("REMOTE_USER".into(), Some(user.clone())));
    }
    variables
}

/// Changes the response as the rules want it. `route` is `None` for a request of no site.
pub fn on_response(
    response: &mut Response,
    applied: Option<&mut AppliedVerdict>,
    route: Option<&SiteRoute>,
    id: RequestId,
) {
    let Some(applied) = applied else { return };
    let verdict = &applied.verdict;
    let rewrites = &verdict.rewrites;
    if !verdict.headers_out.is_empty() || rewrites.content_type.is_some() || rewrites.status.is_some() {
        let mut left_out = LeftOut::default();
        apply::response(&verdict.headers_out, rewrites, response, &mut left_out);
        if let Some(route) = route {
            applied.rules.tell(left_out, id, route);
        }
    }
    if let Some(kept) = &mut applied.kept {
        kept.headers = HeaderMap::clone(&response.headers);
    }
}

impl AppliedVerdict {
    /// Keeps what rules ask about that run after the request.
    fn keep(&mut self, route: &Rc<SiteLane>, request: &Request) {
        self.kept = Some(Box::new(KeptRequest {
            head: request.head.clone(),
            body_len: request.body.len(),
            route: Rc::clone(route),
            headers: HeaderMap::new(),
        }));
    }

    fn run(
        &mut self,
        phase: RulePhase,
        route: &SiteLane,
        request: &mut Request,
        record: &AccessRecord,
        took: &mut Duration,
    ) -> Result<(), Refusal> {
        let node = self.rules.node.borrow();
        let facts = RequestFacts {
            shared: &self.rules.shared,
            keeper: &self.rules.keeper,
            node: &node,
            head: &request.head,
            forwarding: &self.rules.forwarding,
            body_len: request.body.len(),
            route,
            record,
            response: None,
        };
        let asked = self.rules.ask(phase, &facts, &mut self.verdict, took);
        drop(node);
        self.change(route, &mut request.head);
        asked
    }

    /// Changes the request as the rules set it.
    fn change(&mut self, route: &SiteRoute, head: &mut RequestHead) {
        let rewrites = &self.verdict.rewrites;
        let is_moved = rewrites.path.is_some()
            || rewrites.query.is_some()
            || rewrites.filename.is_some()
            || rewrites.document_root.is_some();
        if self.verdict.headers_in.is_empty() && !is_moved {
            return;
        }
        let verdict = Rc::make_mut(&mut self.verdict);
        let rewrites = &mut verdict.rewrites;
        let mut left_out = LeftOut::default();
        apply::headers_in(&std::mem::take(&mut verdict.headers_in), &mut head.headers, &mut left_out);
        apply::rewrite(rewrites, head, route, &mut left_out);
        self.rules.tell(left_out, head.id, route);
    }

    /// Runs the rules after the request, when all its facts are known. Sends the remaining
    /// changes.
    pub fn close(mut self, record: &AccessRecord) {
        if let Some(kept) = self.kept.take() {
            let facts = RequestFacts {
                shared: &self.rules.shared,
                keeper: &self.rules.keeper,
                node: &self.rules.node.borrow(),
                head: &kept.head,
                forwarding: &self.rules.forwarding,
                body_len: kept.body_len,
                route: &kept.route,
                record,
                response: Some(&kept.headers),
            };
            // The request can no longer be refused, and a failed rule has been logged.
            let mut took = Duration::ZERO;
            let _ = self.rules.ask(RulePhase::LogTransaction, &facts, &mut self.verdict, &mut took);
        }
        // Includes changes of a request that was answered or refused before it ran.
        if let Some(changes) = self.verdict.changes.get(self.changed..).filter(|left| !left.is_empty()) {
            self.rules.send(changes.to_vec());
        }
    }
}

/// Writes the log lines of rules to the log of the node.
fn say(id: RequestId, verdict: &mut Verdict) {
    for (level, text) in verdict.log.drain(..) {
        match level {
            LogLevel::Error => tracing::error!(request = %id, "rule: {text}"),
            LogLevel::Warning => tracing::warn!(request = %id, "rule: {text}"),
            LogLevel::Notice | LogLevel::Info => tracing::info!(request = %id, "rule: {text}"),
            LogLevel::Debug => tracing::debug!(request = %id, "rule: {text}"),
        }
    }
    let left_out = std::mem::take(&mut verdict.log_left_out);
    if left_out > 0 {
        tracing::warn!(request = %id, "rule: {left_out} more lines of one request are left out");
    }
}
