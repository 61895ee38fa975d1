//! Runs the relocations of this node. The pure machine (`nagaya_placement::relocation`) decides the
//! steps for each site that needs a placement, and this module carries them out. It runs the
//! planner, checks promises, queries the store and answers requests.
//!
//! Not here: the order of steps and their bounds (the machine), the present nodes and the choice
//! among them (`node_chooser`), sites that move although nothing failed (`mover`), waking a site on
//! its new node (`nagaya_edge`).

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use std::time::{Duration, Instant};

use nagaya_placement::lease::MoveBlocked;
use nagaya_placement::relocation::{
    self, AskId, CommitOutcome, PlacedAt, PlacementRefusal, PlanResult, RelocationMachine, WaiterId,
};
use nagaya_records::feed::PlaceReply;
use nagaya_records::{NodeName, Placement, PlacementReason, SiteName};
use nagaya_store::etcd::{ClusterError, PlacementBasis, PlacementOutcome, SeenNode};
use tokio::sync::{Notify, oneshot};

use super::clock::{now, unix_ms};
use super::codes::answer_nowhere;
use super::events::{ClusterEvent, EventLog, SiteMove};
use super::lease_manager::TakeoverError;
use super::node_chooser::{ChosenNode, NodeChooser, next_placement};
use super::takeover_terms::{TakeoverTerms, round_up_ms};
use super::view::ClusterView;

type Effect = relocation::RelocationEffect<SiteName, NodeName>;

pub struct SiteRelocator {
    view: Rc<ClusterView>,
    chooser: Rc<NodeChooser>,
    terms: Rc<TakeoverTerms>,
    events: Rc<EventLog>,
    relocating: RunningSearches,
}

/// Sites that are being placed.
#[derive(Default)]
struct RunningSearches {
    machine: RefCell<RelocationMachine<SiteName, NodeName>>,
    sites: RefCell<HashMap<SiteName, SiteSearch>>,
    waiters: Cell<u64>,
    /// The next alarm may have become earlier.
    changed: Notify,
}

/// A commit for the store: `node` has the site instead of `from`.
#[derive(Clone)]
struct RelocationStep {
    site: SiteName,
    ask: AskId,
    node: NodeName,
    from: Option<NodeName>,
    /// The epoch of the placement that this follows.
    expect: Option<u64>,
}

/// Data of one relocation that the machine does not need.
struct SiteSearch {
    why: PlacementReason,
    /// Of several nodes that have it, the one that does not serve it. `None` means the first.
    lost: Option<NodeName>,
    waiters: HashMap<WaiterId, oneshot::Sender<PlaceReply>>,
    /// The latest seen or committed placement.
    newest: Option<Placement>,
    /// The node that this search reported as silent, which is over once it answers.
    accused: Option<NodeName>,
    /// Why that node was chosen, in words.
    reason: String,
    probe_us: u64,
    decide_us: u64,
    store_us: u64,
    /// Why the last step failed.
    failed: Option<PlaceReply>,
}

impl SiteRelocator {
    pub fn new(
        view: Rc<ClusterView>,
        chooser: Rc<NodeChooser>,
        terms: Rc<TakeoverTerms>,
        events: Rc<EventLog>,
    ) -> Self {
        Self { view, chooser, terms, events, relocating: RunningSearches::default() }
    }

    /// Returns where the site's application runs from now on. `seen` is the epoch that failed,
    /// because `lost` did not serve it (`None` means its first node). The request waited `probe_us`
    /// for it. It ends within `relocation::WAIT_LONGEST`.
    pub async fn place(
        self: &Rc<Self>,
        site: &SiteName,
        seen: Option<u64>,
        why: PlacementReason,
        lost: Option<NodeName>,
        probe_us: u64,
    ) -> PlaceReply {
        let known = match self.view.records().placement(site.as_str()) {
            Ok(known) => known,
            Err(error) => return answer_nowhere(error.to_string()),
        };
        if let (Some(known), Some(lost)) = (&known, &lost)
            && seen == Some(known.epoch)
            && known.part(lost).is_none()
        {
            return answer_nowhere(format!("'{lost}' does not have it, so it cannot be taken from there"));
        }
        let relocating = &self.relocating;
        let waiter = WaiterId(relocating.waiters.replace(relocating.waiters.get() + 1));
        let (tell, told) = oneshot::channel();
        {
            let mut sites = relocating.sites.borrow_mut();
            let search = sites.entry(site.clone()).or_insert_with(|| SiteSearch::new(why));
            search.waiters.insert(waiter, tell);
            if search.waiters.len() == 1 {
                search.probe_us = probe_us;
            }
            // Among requests that have seen the newest placement, the last one knows best.
            if known.as_ref().is_none_or(|known| seen >= Some(known.epoch)) {
                search.lost = lost;
            }
            if search
                .newest
                .as_ref()
                .is_none_or(|newest| known.as_ref().is_some_and(|known| known.epoch > newest.epoch))
            {
                search.newest.clone_from(&known);
            }
        }
        let known = known.map(|known| relocating.at(site, &known));
        let mut effects = Vec::new();
        relocating.machine.borrow_mut().add_waiter(now(), site.clone(), waiter, seen, known, &mut effects);
        self.carry_out(effects);
        told.await.unwrap_or_else(|_| answer_nowhere("the attempt to place it was given up"))
    }

    /// Lets the machine see the passing of time, while this node is a member.
    pub async fn run(self: Rc<Self>) {
        loop {
            let next = self.relocating.machine.borrow().next_at();
            let alarm = async {
                match next {
                    Some(at) => tokio::time::sleep(at.since(now())).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = alarm => {
                    let mut effects = Vec::new();
                    self.relocating.machine.borrow_mut().tick(now(), &mut effects);
                    self.carry_out(effects);
                }
                () = self.relocating.changed.notified() => {}
            }
        }
    }

    fn carry_out(self: &Rc<Self>, effects: Vec<Effect>) {
        let mut left = VecDeque::from(effects);
        while let Some(effect) = left.pop_front() {
            let mut more = Vec::new();
            match effect {
                Effect::Plan { site, from } => {
                    let plan = self.plan(&site, from.as_ref());
                    self.relocating.machine.borrow_mut().note_plan(now(), &site, plan, &mut more);
                }
                Effect::AskStore { site, ask, node, from, expect } => {
                    let step = RelocationStep { site, ask, node, from, expect };
                    tokio::task::spawn_local(Rc::clone(self).commit(step));
                }
                Effect::Look { site, ask } => {
                    tokio::task::spawn_local(Rc::clone(self).read(site, ask));
                }
                Effect::Serve { waiter, site, epoch, .. } => {
                    self.relocating.answer(&site, waiter, |search| search.found(epoch));
                }
                Effect::Refuse { waiter, site, why } => {
                    self.relocating.answer(&site, waiter, |search| search.refused(why));
                }
            }
            left.extend(more);
        }
        self.relocating.changed.notify_one();
    }

    /// Notes that a member was heard from. Despite the finding against it, it may have been the
    /// only node for some sites.
    pub fn note_heard(self: &Rc<Self>, node: &NodeName) {
        let is_member = matches!(self.view.records().node(node.as_str()), Ok(Some(_)));
        self.terms.clear_mark(node);
        if is_member && self.chooser.clear(node) {
            self.events.note(ClusterEvent::Answers { node: node.clone() });
            self.reconsider();
        }
    }

    /// Plans sites again that no node could take for the moment.
    fn reconsider(self: &Rc<Self>) {
        let mut effects = Vec::new();
        self.relocating.machine.borrow_mut().reconsider(&mut effects);
        self.carry_out(effects);
    }

    /// Returns where the site should run. A reason for nowhere is kept for the waiting requests.
    fn plan(&self, site: &SiteName, from: Option<&NodeName>) -> PlanResult<NodeName> {
        let begun = Instant::now();
        let why = self.relocating.why(site);
        let mut is_first = false;
        self.relocating.note(site, |search| {
            is_first = search.accused.as_ref() != from;
            if is_first {
                if let Some(from) = from.filter(|from| self.chooser.find_suspicion(from).is_none())
                    && matches!(
                        why,
                        PlacementReason::Silent | PlacementReason::Refused | PlacementReason::Fenced
                    )
                {
                    self.events.note(ClusterEvent::Silent { node: from.clone(), why });
                }
                let is_over_once_heard = |from: &&NodeName| self.chooser.accuse(begun, from, why);
                search.accused = from.filter(is_over_once_heard).cloned();
            }
        });
        let accused = self.relocating.accused(site);
        let is_back = accused.as_ref().is_some_and(|accused| self.chooser.find_suspicion(accused).is_none());
        if is_back && !is_first {
            return PlanResult::Stay;
        }
        let chosen = match self.stand_in(site, from) {
            Some(node) => Ok(ChosenNode { node, reason: "it has the site already".into() }),
            None => self.chooser.choose(site, from, why),
        };
        self.relocating.note(site, |search| {
            search.decide_us = micros(begun);
            search.reason = chosen.as_ref().map(|chosen| chosen.reason.clone()).unwrap_or_default();
            search.failed = chosen.as_ref().err().map(|nobody| answer_nowhere(nobody.reason.clone()));
        });
        let may_be_back = |node| self.chooser.may_be_back(begun, node);
        match chosen {
            Ok(chosen) => PlanResult::Node(chosen.node),
            Err(_) if is_back => PlanResult::Stay,
            Err(nobody) if nobody.is_for_now || accused.as_ref().is_some_and(may_be_back) => {
                PlanResult::NotNow
            }
            Err(_) => PlanResult::Nowhere,
        }
    }

    /// Returns another node that has the site and is present as far as known. It only has to
    /// continue.
    fn stand_in(&self, site: &SiteName, from: Option<&NodeName>) -> Option<NodeName> {
        let rest = self.relocating.newest(site)?.without(from?, 0, PlacementReason::Silent)?;
        let known = self.view.known_nodes().ok()?;
        let is_there = |node: &NodeName| {
            let known = known.iter().find(|known| known.record.name == *node);
            known.is_some_and(|known| known.load.is_some()) && self.chooser.find_suspicion(node).is_none()
        };
        rest.parts().map(|part| part.node).find(|node| is_there(node)).cloned()
    }

    /// Returns the placement after epoch `expect` in which `node` has the site and `from` does not.
    /// `None` if another one is known, so that its other nodes are unknown.
    fn following(&self, step: &RelocationStep, wait: Duration) -> Option<Placement> {
        let RelocationStep { site, node, from, expect, .. } = step;
        let why = self.relocating.why(site);
        let newest = self.relocating.newest(site);
        if *expect != newest.as_ref().map(|newest| newest.epoch) {
            return None;
        }
        let wait_ms = round_up_ms(wait);
        match newest.zip(from.as_ref()).filter(|(newest, _)| !newest.copies.is_empty()) {
            Some((newest, from)) if newest.part(node).is_some() => newest.without(from, unix_ms(), why),
            Some((newest, from)) => newest.moved(from, node.clone(), unix_ms(), why, wait_ms),
            None => Some(next_placement(site, node.clone(), *expect, wait_ms, why)),
        }
    }

    /// Makes the store agree, if nothing forbids it.
    async fn commit(self: Rc<Self>, step: RelocationStep) {
        let begun = Instant::now();
        let RelocationStep { site, ask, from, .. } = step.clone();
        let taking = match &from {
            Some(from) => match self.terms.begin_takeover(from).await {
                Ok(taking) => Some(taking),
                Err(reason) => return self.not_sent(&site, ask, reason),
            },
            None => None,
        };
        let claimed = self.claim(&step).await;
        if let Some(taking) = taking {
            // After a void claim, it is unknown whether an earlier attempt is still on its way.
            let is_answered = matches!(
                &claimed,
                None | Some((
                    _,
                    Ok(PlacementOutcome::Won | PlacementOutcome::Lost(_) | PlacementOutcome::Otherwise)
                ))
            );
            self.terms.end_takeover(taking, is_answered);
        }
        let outcome = match claimed {
            None | Some((_, Ok(PlacementOutcome::Otherwise))) => CommitOutcome::NotDone,
            Some((placement, Ok(PlacementOutcome::Won))) => {
                let node = &placement.node;
                let epoch = placement.epoch;
                let why = placement.why.as_str();
                tracing::info!(%site, %node, epoch, why, "a site is placed");
                let wait = placement.part(&step.node).map_or(0, |part| part.wait_ms);
                self.relocating.seen(&site, Some(placement.clone()), begun);
                self.note_move(&step, &placement);
                CommitOutcome::Committed { at: now(), wait: Duration::from_millis(wait.into()) }
            }
            Some((_, Ok(PlacementOutcome::Lost(theirs)))) => {
                let conflict = theirs.as_ref().map(|theirs| self.relocating.at(&site, theirs));
                self.relocating.seen(&site, theirs, begun);
                CommitOutcome::Conflict(conflict)
            }
            Some((placement, Ok(PlacementOutcome::Void))) => {
                let reason = format!("site '{site}' or node '{}' is gone", placement.node);
                self.relocating.note(&site, |search| search.failed = Some(answer_nowhere(reason)));
                CommitOutcome::Void
            }
            Some((_, Err(error))) => {
                self.relocating.note(&site, |search| search.failed = Some(failed(&error)));
                CommitOutcome::Unknown
            }
        };
        let mut effects = Vec::new();
        self.relocating.machine.borrow_mut().note_outcome(now(), &site, ask, outcome, &mut effects);
        self.carry_out(effects);
    }

    /// Notes the move for later queries.
    fn note_move(&self, step: &RelocationStep, placement: &Placement) {
        let why = self.relocating.why(&step.site);
        self.relocating.note(&step.site, |search| {
            let SiteSearch { probe_us, decide_us, store_us, .. } = *search;
            let from = step.from.clone();
            let reason = search.reason.clone();
            let moved = SiteMove::new(placement, from, &step.node, why, reason);
            self.events.note(ClusterEvent::Moved(SiteMove { probe_us, decide_us, store_us, ..moved }));
        });
    }

    /// Claims the site. If a precondition fails, it is tried without it. The node may live, may
    /// have had the site only for a moment, or may have rewritten its record. `None` if nothing was
    /// sent, because the placement is not the one of the step.
    async fn claim(
        &self,
        step: &RelocationStep,
    ) -> Option<(Placement, Result<PlacementOutcome, ClusterError>)> {
        let Some(from) = &step.from else {
            return self.claim_on(step, (Duration::ZERO, PlacementBasis::default())).await;
        };
        let newest = self.relocating.newest(&step.site);
        let part = newest.as_ref().and_then(|newest| newest.part(from));
        let seen = match self.view.records().node(from.as_str()) {
            Ok(Some(record)) => Some(SeenNode::Member(Box::new(record))),
            _ => self.view.store.read_node(from).await.ok().flatten(),
        };
        let claimed = self.claim_on(step, self.terms.may_serve_on(from, part, seen)).await?;
        if !matches!(claimed.1, Ok(PlacementOutcome::Otherwise)) {
            return Some(claimed);
        }
        self.terms.clear_mark(from);
        let seen = self.view.store.read_node(from).await.ok().flatten();
        let claimed = self.claim_on(step, self.terms.may_serve_anyway(part, seen)).await?;
        if !matches!(claimed.1, Ok(PlacementOutcome::Otherwise)) {
            return Some(claimed);
        }
        // Its record changes all the time, so any content is accepted.
        self.claim_on(step, self.terms.may_serve_anyway(part, None)).await
    }

    async fn claim_on(
        &self,
        step: &RelocationStep,
        (wait, basis): (Duration, PlacementBasis),
    ) -> Option<(Placement, Result<PlacementOutcome, ClusterError>)> {
        let placement = self.following(step, wait)?;
        let claim = self.view.store.place_on(placement.clone(), step.expect, step.from.as_ref(), basis).await;
        Some((placement, claim))
    }

    fn not_sent(self: &Rc<Self>, site: &SiteName, ask: AskId, reason: TakeoverError) {
        self.relocating.note(site, |search| search.failed = Some(answer_nowhere(reason.to_string())));
        let mut effects = Vec::new();
        {
            let mut machine = self.relocating.machine.borrow_mut();
            match reason {
                TakeoverError::Promised(until) => {
                    machine.note_blocked(now(), site, ask, MoveBlocked::Promised(until))
                }
                TakeoverError::NotIntroduced => {
                    machine.note_blocked(now(), site, ask, MoveBlocked::NotIntroduced)
                }
                TakeoverError::NoStore => {
                    machine.note_outcome(now(), site, ask, CommitOutcome::NotDone, &mut effects)
                }
            }
        }
        self.carry_out(effects);
    }

    async fn read(self: Rc<Self>, site: SiteName, ask: AskId) {
        let begun = Instant::now();
        let found = self.view.store.placement_now(&site).await;
        let found = match found {
            Ok(placement) => {
                let found = placement.as_ref().map(|found| self.relocating.at(&site, found));
                self.relocating.seen(&site, placement, begun);
                Ok(found)
            }
            Err(error) => {
                self.relocating.note(&site, |search| search.failed = Some(failed(&error)));
                Err(())
            }
        };
        let mut effects = Vec::new();
        self.relocating.machine.borrow_mut().note_found(now(), &site, ask, found, &mut effects);
        self.carry_out(effects);
    }
}

impl RunningSearches {
    fn note(&self, site: &SiteName, note: impl FnOnce(&mut SiteSearch)) {
        if let Some(search) = self.sites.borrow_mut().get_mut(site) {
            note(search);
        }
    }

    fn why(&self, site: &SiteName) -> PlacementReason {
        self.sites.borrow().get(site).map_or(PlacementReason::First, |search| search.why)
    }

    fn accused(&self, site: &SiteName) -> Option<NodeName> {
        self.sites.borrow().get(site)?.accused.clone()
    }

    fn newest(&self, site: &SiteName) -> Option<Placement> {
        self.sites.borrow().get(site)?.newest.clone()
    }

    /// Returns the part of a placement that concerns the search: the others stay as they are.
    fn at(&self, site: &SiteName, placement: &Placement) -> PlacedAt<NodeName> {
        let lost = self.sites.borrow().get(site).and_then(|search| search.lost.clone());
        let lost = lost.filter(|lost| placement.part(lost).is_some());
        PlacedAt { node: lost.unwrap_or_else(|| placement.node.clone()), epoch: placement.epoch }
    }

    /// Notes a placement that the store reported or accepted.
    fn seen(&self, site: &SiteName, placement: Option<Placement>, begun: Instant) {
        self.note(site, |search| {
            search.newest = placement;
            search.store_us = micros(begun);
        });
    }

    fn answer(&self, site: &SiteName, waiter: WaiterId, answer: impl FnOnce(&SiteSearch) -> PlaceReply) {
        let mut sites = self.sites.borrow_mut();
        let Some(search) = sites.get_mut(site) else { return };
        if let Some(tell) = search.waiters.remove(&waiter) {
            // The request may have left.
            let _ = tell.send(answer(search));
        }
        if search.waiters.is_empty() {
            sites.remove(site);
        }
    }
}

impl SiteSearch {
    fn new(why: PlacementReason) -> Self {
        Self {
            why,
            lost: None,
            waiters: HashMap::new(),
            newest: None,
            accused: None,
            reason: String::new(),
            probe_us: 0,
            decide_us: 0,
            store_us: 0,
            failed: None,
        }
    }

    fn found(&self, epoch: u64) -> PlaceReply {
        let newest = self.newest.clone().filter(|newest| newest.epoch == epoch);
        let decide_us = self.decide_us;
        let store_us = self.store_us;
        newest.map_or_else(
            || answer_nowhere("it was placed anew while it was looked for"),
            |placement| PlaceReply::At { placement, decide_us, store_us },
        )
    }

    fn refused(&self, why: PlacementRefusal) -> PlaceReply {
        if why == PlacementRefusal::TooMany {
            return answer_nowhere("too many requests look for a place at once");
        }
        let text = match why {
            PlacementRefusal::StoreSilent => "the cluster's store does not answer",
            _ => "no place was found in time",
        };
        self.failed.clone().unwrap_or_else(|| answer_nowhere(text))
    }
}

fn failed(error: &ClusterError) -> PlaceReply {
    PlaceReply::Nowhere { code: error.code().to_string(), reason: error.to_string() }
}

fn micros(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}
