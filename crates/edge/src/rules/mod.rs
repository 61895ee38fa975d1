//! The operator's rules in the life of a request: when they are asked, and what becomes of their verdict.
//!
//! A rule reads `facts` and leaves a verdict, which lives over all phases of its request; this module carries it out.
//! With no rule configured each step here is one look at a flag. In reading order: this file, `facts`, `apply` (headers,
//! paths, answers), `cells` and `load` (what rules ask about the node), `follow` (changed files). Not here: Ruby, budgets
//! and compiling (`nagaya_rules`), which limits then hold (`exchange`, `pace`, `keeper`).

mod apply;
mod cells;
mod facts;
mod follow;
mod load;
mod watch;

#[cfg(test)]
mod tests;

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::HeaderMap;
use nagaya_base::{Code, RequestId};
use nagaya_cmdb::cell::{Boost, CellChange, Confinement};
use nagaya_keeper::client::Keeper;
use nagaya_rules::{Engine, Level, Phase, Verdict};
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};

pub use self::cells::NamedCells;
pub use self::follow::follow;
pub use self::load::Load;

use self::apply::LeftOut;
use self::facts::RequestFacts;
use self::watch::Events;
use crate::access_log::AccessRecord;
use crate::account::Account;
use crate::admission::{Lane, Wish};
use crate::forward::Forwarding;
use crate::message::{Head, Request, Response};
use crate::node::Node;
use crate::programs::Variable;
use crate::refusal::Refusal;
use crate::route::Route;
use crate::shared::Shared;
use crate::turns::Turns;

/// Batches of changes to named cells that may wait for the keeper, per thread. Beyond it they are lost, which is said.
const CHANGES_WAITING_MAX: usize = 256;

/// Kinds of things left out that are remembered as having been told.
const TOLD_MAX: usize = 256;

const CODE_LEFT_OUT: Code = Code(429);
const CODE_CELLS: Code = Code(433);

/// One thread's rules.
pub struct Rules {
    shared: Arc<Shared>,
    /// It knows which applications rest.
    keeper: Rc<Keeper>,
    forwarding: Rc<Forwarding>,
    engine: RefCell<Engine>,
    /// What each request begins with.
    blank: Rc<Verdict>,
    /// Some file is configured. Looked at before anything else.
    any: Cell<bool>,
    /// Some file runs after the request, so what it may ask for has to be kept.
    logs: Cell<bool>,
    /// Name of this node.
    node: RefCell<Rc<str>>,
    changes: mpsc::Sender<Vec<CellChange>>,
    /// Taken by `follow`.
    to_keeper: Cell<Option<mpsc::Receiver<Vec<CellChange>>>>,
    /// The list of files has changed.
    other_files: Notify,
    /// What is told of the files; none before they are watched.
    events: RefCell<Option<Rc<Events>>>,
    turns: Rc<Turns>,
    /// The turn in which they were last asked for.
    looked: Cell<u64>,
}

/// What rules decided about one request so far.
pub struct Ruling {
    rules: Rc<Rules>,
    /// Shared with other requests of which the rules say the same.
    verdict: Rc<Verdict>,
    /// How many of its changes of cells are done.
    changed: usize,
    /// How many of `verdict.spoke` are in the account.
    accounted: usize,
    kept: Option<Box<Kept>>,
}

/// What rules that run after the request ask about.
struct Kept {
    head: Box<Head>,
    body_len: Option<u64>,
    route: Rc<Route>,
    /// Of the response.
    headers: HeaderMap,
}

/// What has been told already, in all threads.
#[derive(Debug, Default)]
pub struct Told(Mutex<BTreeSet<String>>);

impl Told {
    /// True the first time.
    fn first(&self, what: &str) -> bool {
        let mut told = self.0.lock();
        told.len() < TOLD_MAX && !told.contains(what) && told.insert(what.to_owned())
    }

    fn forget(&self) {
        self.0.lock().clear();
    }
}

impl Rules {
    pub fn new(
        shared: &Arc<Shared>,
        keeper: Rc<Keeper>,
        forwarding: Rc<Forwarding>,
        turns: Rc<Turns>,
    ) -> Rc<Self> {
        let (changes, to_keeper) = mpsc::channel(CHANGES_WAITING_MAX);
        let engine = Engine::new(Arc::clone(&shared.rules));
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

    /// Takes the shared settings as they are now.
    pub fn refresh(&self) {
        let set = &self.shared.rules;
        self.any.set(Phase::ALL.into_iter().any(|phase| set.has(phase)));
        self.logs.set(set.has(Phase::LogTransaction));
        *self.node.borrow_mut() = self.shared.options().node.as_str().into();
        self.other_files.notify_one();
    }

    /// Takes files that have changed until now. The task that follows them may not have had its turn yet.
    fn see_changes(&self) {
        let turn = self.turns.now();
        if self.looked.replace(turn) == turn {
            return;
        }
        if self.events.borrow().as_ref().is_none_or(|events| events.wait()) {
            self.shared.rules.refresh();
        }
    }

    /// Asks the rules of one phase. `took` is how long they ran.
    fn ask(
        &self,
        phase: Phase,
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
        // The client is told nothing of the operator's files; the log has been.
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

    fn tell(&self, left_out: LeftOut, id: RequestId, route: &Route) {
        for what in left_out.0 {
            if self.shared.told.first(&what) {
                let site = route.site.name.as_str();
                tracing::warn!(code = %CODE_LEFT_OUT, site, request = %id, "left out of a rule's verdict: {what}");
            }
        }
    }
}

/// Before the request is admitted: the rules may answer it, change it, or choose its lane, its limits and its cells.
pub fn on_arrival(
    node: &Node,
    route: &Rc<Route>,
    request: &mut Request,
    account: &mut Account,
) -> Result<Option<Response>, Refusal> {
    if !node.rules.any.get() {
        return Ok(None);
    }
    node.rules.see_changes();
    let verdict = Rc::clone(&node.rules.blank);
    let rules = Rc::clone(&node.rules);
    account.set_ruling(Box::new(Ruling { rules, verdict, changed: 0, accounted: 0, kept: None }));
    let phases = [Phase::PostReadRequest, Phase::AccessChecker];
    let answer = run(&phases, route, request, account);
    if node.rules.logs.get() {
        keep(route, request, account);
    }
    answer
}

/// Once it is admitted, just before it runs.
pub fn on_admission(
    node: &Node,
    route: &Rc<Route>,
    request: &mut Request,
    account: &mut Account,
) -> Result<Option<Response>, Refusal> {
    if !node.rules.any.get() || !node.shared.rules.has(Phase::Fixups) {
        return Ok(None);
    }
    let answer = run(&[Phase::Fixups], route, request, account);
    if node.rules.logs.get() {
        keep(route, request, account);
    }
    answer
}

/// Runs these phases until one of them answers.
fn run(
    phases: &[Phase],
    route: &Rc<Route>,
    request: &mut Request,
    account: &mut Account,
) -> Result<Option<Response>, Refusal> {
    // There is none only where rules were configured while the request waited.
    let Some(mut ruling) = account.take_ruling() else { return Ok(None) };
    let (mut took, mut ran) = (Duration::ZERO, Ok(()));
    for &phase in phases {
        if ruling.rules.shared.rules.has(phase) && ran.is_ok() && ruling.verdict.answer.is_none() {
            ran = ruling.run(phase, route, request, account.record(), &mut took);
        }
    }
    if !took.is_zero() {
        account.ruled(took);
    }
    for spoke in &ruling.verdict.spoke[ruling.accounted..] {
        account.ruled_by(&spoke.file);
    }
    ruling.accounted = ruling.verdict.spoke.len();
    let answer = ran.and_then(|()| ruling.verdict.answer.clone().map(apply::answer).transpose());
    account.set_ruling(ruling);
    answer
}

fn keep(route: &Rc<Route>, request: &Request, account: &mut Account) {
    if let Some(ruling) = account.ruling_mut() {
        ruling.kept = Some(Box::new(Kept {
            head: request.head.clone(),
            body_len: request.body.len(),
            route: Rc::clone(route),
            headers: HeaderMap::new(),
        }));
    }
}

/// The lane a rule chose, and what it said about the request's turn.
pub fn lane(node: &Node, route: &Route, account: &mut Account) -> (Option<Arc<Lane>>, Wish) {
    let Some(verdict) = account.ruling().map(|ruling| Rc::clone(&ruling.verdict)) else {
        return (None, Wish::default());
    };
    let wish = Wish { priority: verdict.priority, passes: verdict.passes };
    let lane = verdict.lane.as_ref().map(|lane| {
        account.in_lane(&lane.name);
        node.shared.lanes.of_rule(&route.lane, lane)
    });
    (lane, wish)
}

/// Settles in which cells and under which limits the request runs: its site's, and over them its rules'.
pub async fn confine(node: &Node, route: &Route, account: &mut Account) {
    let Some(ruling) = account.ruling_mut() else {
        if let Some(site) = &route.confinement {
            account.confine(Arc::clone(site));
        }
        return;
    };
    let verdict = Rc::clone(&ruling.verdict);
    ruling.changed = verdict.changes.len();
    change_cells(node, route, &verdict).await;
    let ruled = &of_backend(node, route, account.id(), &verdict.confinement);
    match &route.confinement {
        Some(site) => account.confine(Arc::new(overlaid(site, ruled))),
        None if **ruled != Confinement::default() => account.confine(Arc::clone(ruled)),
        None => {}
    }
}

/// The limits that are known when the body of a request begins to arrive: its site's, and over them those of the rules that
/// have run by then.
pub fn arriving(route: &Route, account: &Account) -> Option<Arc<Confinement>> {
    let ruled = account.ruling().map(|ruling| &ruling.verdict.confinement);
    match (&route.confinement, ruled) {
        (Some(site), Some(ruled)) => Some(Arc::new(overlaid(site, ruled))),
        (None, Some(ruled)) if **ruled != Confinement::default() => Some(Arc::clone(ruled)),
        (site, _) => site.clone(),
    }
}

/// Only an application runs beyond its requests, and has limits that could be raised for one.
fn of_backend(node: &Node, route: &Route, id: RequestId, ruled: &Arc<Confinement>) -> Arc<Confinement> {
    let kind = route.site.backend.kind();
    if ruled.boost.is_empty() || kind == "app" {
        return Arc::clone(ruled);
    }
    let what = format!("a boost, which only applications can have, for a site of kind {kind}");
    node.rules.tell(LeftOut(vec![what]), id, route);
    Arc::new(Confinement { boost: Boost::default(), ..Confinement::clone(ruled) })
}

/// Carries out what a verdict wants of named cells, unless all of it was so already when the table of cells was as it is.
async fn change_cells(node: &Node, route: &Route, verdict: &Verdict) {
    let named = &verdict.confinement.named;
    if verdict.changes.is_empty() && named.is_empty() {
        return;
    }
    let cells = &node.shared.named;
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
        // What it is to run in is to be there when it begins.
        node.shared.ledger.note(&changes);
        Box::pin(follow::change_cells(node, changes)).await;
    } else {
        node.rules.send_new(changes);
    }
    cells.attached(named);
    if is_settled && cells.moment() == moment {
        verdict.settled.set(moment);
    }
}

/// A rule's limits are laid over the site's; its steps of slowing down replace the site's.
fn overlaid(site: &Confinement, rule: &Confinement) -> Confinement {
    let demotions = if rule.demotions.is_empty() { &site.demotions } else { &rule.demotions };
    Confinement {
        limits: site.limits.overlaid(&rule.limits),
        named: rule.named.clone(),
        demotions: demotions.clone(),
        boost: rule.boost,
    }
}

/// What the rules set for the request's programs. A variable that is not a rule's to set is left out.
pub fn variables(account: &Account) -> Vec<Variable> {
    let Some(ruling) = account.ruling() else { return Vec::new() };
    let verdict = &ruling.verdict;
    let mut left_out = LeftOut::default();
    let mut variables = apply::variables(&verdict.env, &mut left_out);
    if let Some(route) = account.route() {
        ruling.rules.tell(left_out, account.id(), route);
    }
    if let Some(user) = &verdict.rewrites.user
        && verdict.env("REMOTE_USER").is_none()
    {
        variables.push(("REMOTE_USER".into(), Some(user.clone())));
    }
    variables
}

/// Changes the response as the rules want it.
pub fn on_response(response: &mut Response, account: &mut Account) {
    let Some(mut ruling) = account.take_ruling() else { return };
    let verdict = &ruling.verdict;
    let rewrites = &verdict.rewrites;
    if !verdict.headers_out.is_empty() || rewrites.content_type.is_some() || rewrites.status.is_some() {
        let mut left_out = LeftOut::default();
        apply::response(&verdict.headers_out, rewrites, response, &mut left_out);
        if let Some(route) = account.route() {
            ruling.rules.tell(left_out, account.id(), route);
        }
    }
    if let Some(kept) = &mut ruling.kept {
        kept.headers = HeaderMap::clone(&response.headers);
    }
    account.set_ruling(ruling);
}

impl Ruling {
    fn run(
        &mut self,
        phase: Phase,
        route: &Route,
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

    /// Changes the request as the rules want it.
    fn change(&mut self, route: &Route, head: &mut Head) {
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

    /// Asks the rules that run after the request, when everything is known of it, and sends on what is left to do.
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
            // Nothing can be refused any more, and a rule that failed has been logged.
            let mut took = Duration::ZERO;
            let _ = self.rules.ask(Phase::LogTransaction, &facts, &mut self.verdict, &mut took);
        }
        // Those of a request that was answered or refused before it ran, too.
        if let Some(changes) = self.verdict.changes.get(self.changed..).filter(|left| !left.is_empty()) {
            self.rules.send(changes.to_vec());
        }
    }
}

/// Writes what rules logged to the log of the node.
fn say(id: RequestId, verdict: &mut Verdict) {
    for (level, text) in verdict.log.drain(..) {
        match level {
            Level::Error => tracing::error!(request = %id, "rule: {text}"),
            Level::Warning => tracing::warn!(request = %id, "rule: {text}"),
            Level::Notice | Level::Info => tracing::info!(request = %id, "rule: {text}"),
            Level::Debug => tracing::debug!(request = %id, "rule: {text}"),
        }
    }
    let left_out = std::mem::take(&mut verdict.log_left_out);
    if left_out > 0 {
        tracing::warn!(request = %id, "rule: {left_out} more lines of one request are left out");
    }
}
