//! Running the relocations of this node: the pure machine (`nagaya_placement::relocation`) says what is to be done for each site that
//! needs a place, and here it is done. The planner is asked, promises are looked at, the store is asked, requests are answered.
//!
//! Not here: the order of things and their bounds (the machine), which nodes there are and which is chosen (`placing`), sites that
//! move although nothing failed (`moves`), waking it there (`nagaya_edge`).

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use std::time::{Duration, Instant};

use nagaya_cmdb::feed::Placed;
use nagaya_cmdb::store::etcd::{Basis, Claim, ClusterError, Seen};
use nagaya_cmdb::{NodeName, Placement, SiteName, Why};
use nagaya_placement::fence::Held;
use nagaya_placement::relocation::{self, AskId, At, Outcome, Plan, Refused, Relocations, Waiter};
use tokio::sync::{Notify, oneshot};

use super::asks::nowhere;
use super::authority::now;
use super::doubting::whole_ms;
use super::events::{Move, What};
use super::membership::{Membership, unix_ms};
use super::placing::Chosen;
use super::trust::NotNow;

type Effect = relocation::Effect<SiteName, NodeName>;

/// Sites that are looked for a place for.
#[derive(Default)]
pub struct Relocating {
    machine: RefCell<Relocations<SiteName, NodeName>>,
    sites: RefCell<HashMap<SiteName, Search>>,
    waiters: Cell<u64>,
    /// The next alarm may be an earlier one.
    changed: Notify,
}

/// What the store is to be asked: that `node` has the site instead of `from`.
#[derive(Clone)]
struct Step {
    site: SiteName,
    ask: AskId,
    node: NodeName,
    from: Option<NodeName>,
    /// The epoch of the placement that this follows.
    expect: Option<u64>,
}

/// What the machine need not know of one of them.
struct Search {
    why: Why,
    /// Of several nodes that have it, the one that does not serve it. None: the first.
    lost: Option<NodeName>,
    waiters: HashMap<Waiter, oneshot::Sender<Placed>>,
    /// The placement that was seen last, or committed.
    newest: Option<Placement>,
    /// The node that this search has said does not answer, which is over once it does.
    accused: Option<NodeName>,
    /// Why the node was chosen that was, in words.
    reason: String,
    probe_us: u64,
    decide_us: u64,
    store_us: u64,
    /// Why the last step led nowhere.
    failed: Option<Placed>,
}

impl Membership {
    /// Where the site's application runs from now on. `seen`: the epoch that did not do, because `lost` did not serve it (None: the
    /// first of those that have it), for which the request waited for `probe_us`. It ends within `relocation::WAIT_LONGEST`.
    pub async fn place(
        self: &Rc<Self>,
        site: &SiteName,
        seen: Option<u64>,
        why: Why,
        lost: Option<NodeName>,
        probe_us: u64,
    ) -> Placed {
        let known = match self.records().placement(site.as_str()) {
            Ok(known) => known,
            Err(error) => return nowhere(error.to_string()),
        };
        if let (Some(known), Some(lost)) = (&known, &lost)
            && seen == Some(known.epoch)
            && known.part(lost).is_none()
        {
            return nowhere(format!("'{lost}' does not have it, so it cannot be taken from there"));
        }
        let relocating = &self.relocating;
        let waiter = Waiter(relocating.waiters.replace(relocating.waiters.get() + 1));
        let (tell, told) = oneshot::channel();
        {
            let mut sites = relocating.sites.borrow_mut();
            let search = sites.entry(site.clone()).or_insert_with(|| Search::new(why));
            search.waiters.insert(waiter, tell);
            if search.waiters.len() == 1 {
                search.probe_us = probe_us;
            }
            // Of those who have seen the newest, who comes last knows best.
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
        relocating.machine.borrow_mut().need(now(), site.clone(), waiter, seen, known, &mut effects);
        self.carry_out(effects);
        told.await.unwrap_or_else(|_| nowhere("the attempt to place it was given up"))
    }

    /// Has the machine see that time passes, for as long as this node is a member.
    pub(super) async fn find_places(self: Rc<Self>) {
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
                    self.relocating.machine.borrow_mut().planned(now(), &site, plan, &mut more);
                }
                Effect::AskStore { site, ask, node, from, expect } => {
                    let step = Step { site, ask, node, from, expect };
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

    /// Sites that no node could take for the moment are planned anew.
    pub(super) fn reconsider(self: &Rc<Self>) {
        let mut effects = Vec::new();
        self.relocating.machine.borrow_mut().reconsider(&mut effects);
        self.carry_out(effects);
    }

    /// Where the site is to run. Why nowhere is kept for those who wait.
    fn plan(&self, site: &SiteName, from: Option<&NodeName>) -> Plan<NodeName> {
        let begun = Instant::now();
        let why = self.relocating.why(site);
        let mut is_first = false;
        self.relocating.note(site, |search| {
            is_first = search.accused.as_ref() != from;
            if is_first {
                if let Some(from) = from.filter(|from| self.suspected(from).is_none())
                    && matches!(why, Why::Silent | Why::Refused | Why::Fenced)
                {
                    self.note(What::Silent { node: from.clone(), why });
                }
                let is_over_once_heard =
                    |from: &&NodeName| self.suspects.borrow_mut().accuse(begun, from, why);
                search.accused = from.filter(is_over_once_heard).cloned();
            }
        });
        let accused = self.relocating.accused(site);
        let is_back = accused.as_ref().is_some_and(|accused| self.suspected(accused).is_none());
        if is_back && !is_first {
            return Plan::Stay;
        }
        let chosen = match self.stand_in(site, from) {
            Some(node) => Ok(Chosen { node, reason: "it has the site already".into() }),
            None => self.choose(site, from, why),
        };
        self.relocating.note(site, |search| {
            search.decide_us = micros(begun);
            search.reason = chosen.as_ref().map(|chosen| chosen.reason.clone()).unwrap_or_default();
            search.failed = chosen.as_ref().err().map(|nobody| nowhere(nobody.reason.clone()));
        });
        let may_be_back = |node| self.suspects.borrow().may_be_back(begun, node);
        match chosen {
            Ok(chosen) => Plan::Node(chosen.node),
            Err(_) if is_back => Plan::Stay,
            Err(nobody) if nobody.is_for_now || accused.as_ref().is_some_and(may_be_back) => Plan::NotNow,
            Err(_) => Plan::Nowhere,
        }
    }

    /// Of the other nodes that have the site, too, one that is there as far as is known. It has to do nothing but go on.
    fn stand_in(&self, site: &SiteName, from: Option<&NodeName>) -> Option<NodeName> {
        let rest = self.relocating.newest(site)?.without(from?, 0, Why::Silent)?;
        let known = self.known_nodes().ok()?;
        let is_there = |node: &NodeName| {
            let known = known.iter().find(|known| known.record.name == *node);
            known.is_some_and(|known| known.load.is_some()) && self.suspected(node).is_none()
        };
        rest.parts().map(|part| part.node).find(|node| is_there(node)).cloned()
    }

    /// The placement in which `node` has the site and `from` does not, after that of epoch `expect`. None: that is not the one that
    /// is known, so nothing is said of who else has it.
    fn following(&self, step: &Step, wait: Duration) -> Option<Placement> {
        let Step { site, node, from, expect, .. } = step;
        let why = self.relocating.why(site);
        let newest = self.relocating.newest(site);
        if *expect != newest.as_ref().map(|newest| newest.epoch) {
            return None;
        }
        let wait_ms = whole_ms(wait);
        match newest.zip(from.as_ref()).filter(|(newest, _)| !newest.copies.is_empty()) {
            Some((newest, from)) if newest.part(node).is_some() => newest.without(from, unix_ms(), why),
            Some((newest, from)) => newest.moved(from, node.clone(), unix_ms(), why, wait_ms),
            None => Some(self.next(site, node.clone(), *expect, wait_ms, why)),
        }
    }

    /// Has the store agree, if nothing forbids it.
    async fn commit(self: Rc<Self>, step: Step) {
        let begun = Instant::now();
        let Step { site, ask, from, .. } = step.clone();
        let taking = match &from {
            Some(from) => match self.may_take(from).await {
                Ok(taking) => Some(taking),
                Err(reason) => return self.not_sent(&site, ask, reason),
            },
            None => None,
        };
        let claimed = self.claim(&step).await;
        if let Some(taking) = taking {
            // Of a claim that is void it is not known whether an earlier attempt at it lies somewhere.
            let is_answered =
                matches!(&claimed, None | Some((_, Ok(Claim::Won | Claim::Lost(_) | Claim::Otherwise))));
            self.trust.borrow_mut().ended(now(), taking, is_answered);
        }
        let outcome = match claimed {
            None | Some((_, Ok(Claim::Otherwise))) => Outcome::NotDone,
            Some((placement, Ok(Claim::Won))) => {
                let (node, epoch, why) = (&placement.node, placement.epoch, placement.why.as_str());
                tracing::info!(%site, %node, epoch, why, "a site is placed");
                let wait = placement.part(&step.node).map_or(0, |part| part.wait_ms);
                self.relocating.seen(&site, Some(placement.clone()), begun);
                self.note_move(&step, &placement);
                Outcome::Committed { at: now(), wait: Duration::from_millis(wait.into()) }
            }
            Some((_, Ok(Claim::Lost(theirs)))) => {
                let conflict = theirs.as_ref().map(|theirs| self.relocating.at(&site, theirs));
                self.relocating.seen(&site, theirs, begun);
                Outcome::Conflict(conflict)
            }
            Some((placement, Ok(Claim::Void))) => {
                let reason = format!("site '{site}' or node '{}' is gone", placement.node);
                self.relocating.note(&site, |search| search.failed = Some(nowhere(reason)));
                Outcome::Void
            }
            Some((_, Err(error))) => {
                self.relocating.note(&site, |search| search.failed = Some(failed(&error)));
                Outcome::Unknown
            }
        };
        let mut effects = Vec::new();
        self.relocating.machine.borrow_mut().stored(now(), &site, ask, outcome, &mut effects);
        self.carry_out(effects);
    }

    /// For who asks later.
    fn note_move(&self, step: &Step, placement: &Placement) {
        let why = self.relocating.why(&step.site);
        self.relocating.note(&step.site, |search| {
            let Search { probe_us, decide_us, store_us, .. } = *search;
            let (from, reason) = (step.from.clone(), search.reason.clone());
            let moved = Move::new(placement, from, &step.node, why, reason);
            self.note(What::Moved(Move { probe_us, decide_us, store_us, ..moved }));
        });
    }

    /// One that counts on what is not so is tried without it: the node lives, or has the site since a moment only, or its record was
    /// written anew. None: nothing was asked, because the placement is not the one that the step is about.
    async fn claim(&self, step: &Step) -> Option<(Placement, Result<Claim, ClusterError>)> {
        let Some(from) = &step.from else {
            return self.claim_on(step, (Duration::ZERO, Basis::default())).await;
        };
        let newest = self.relocating.newest(&step.site);
        let part = newest.as_ref().and_then(|newest| newest.part(from));
        let seen = match self.records().node(from.as_str()) {
            Ok(Some(record)) => Some(Seen::Member(Box::new(record))),
            _ => self.store.seen(from).await.ok().flatten(),
        };
        let claimed = self.claim_on(step, self.may_serve_on(from, part, seen)).await?;
        if !matches!(claimed.1, Ok(Claim::Otherwise)) {
            return Some(claimed);
        }
        self.doubts.borrow_mut().forget(from);
        let seen = self.store.seen(from).await.ok().flatten();
        let claimed = self.claim_on(step, self.may_serve_anyway(part, seen)).await?;
        if !matches!(claimed.1, Ok(Claim::Otherwise)) {
            return Some(claimed);
        }
        // Its record changes all the time: whatever it says by now.
        self.claim_on(step, self.may_serve_anyway(part, None)).await
    }

    async fn claim_on(
        &self,
        step: &Step,
        (wait, basis): (Duration, Basis),
    ) -> Option<(Placement, Result<Claim, ClusterError>)> {
        let placement = self.following(step, wait)?;
        let claim = self.store.place_on(placement.clone(), step.expect, step.from.as_ref(), basis).await;
        Some((placement, claim))
    }

    fn not_sent(self: &Rc<Self>, site: &SiteName, ask: AskId, reason: NotNow) {
        self.relocating.note(site, |search| search.failed = Some(nowhere(reason.to_string())));
        let mut effects = Vec::new();
        {
            let mut machine = self.relocating.machine.borrow_mut();
            match reason {
                NotNow::Promised(until) => machine.held(now(), site, ask, Held::Promised(until)),
                NotNow::NotIntroduced => machine.held(now(), site, ask, Held::NotIntroduced),
                NotNow::NoStore => machine.stored(now(), site, ask, Outcome::NotDone, &mut effects),
            }
        }
        self.carry_out(effects);
    }

    async fn read(self: Rc<Self>, site: SiteName, ask: AskId) {
        let begun = Instant::now();
        let found = self.store.placement_now(&site).await;
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
        self.relocating.machine.borrow_mut().looked(now(), &site, ask, found, &mut effects);
        self.carry_out(effects);
    }
}

impl Relocating {
    fn note(&self, site: &SiteName, note: impl FnOnce(&mut Search)) {
        if let Some(search) = self.sites.borrow_mut().get_mut(site) {
            note(search);
        }
    }

    fn why(&self, site: &SiteName) -> Why {
        self.sites.borrow().get(site).map_or(Why::First, |search| search.why)
    }

    fn accused(&self, site: &SiteName) -> Option<NodeName> {
        self.sites.borrow().get(site)?.accused.clone()
    }

    fn newest(&self, site: &SiteName) -> Option<Placement> {
        self.sites.borrow().get(site)?.newest.clone()
    }

    /// The part of a placement that the search is about: the others stay as they are.
    fn at(&self, site: &SiteName, placement: &Placement) -> At<NodeName> {
        let lost = self.sites.borrow().get(site).and_then(|search| search.lost.clone());
        let lost = lost.filter(|lost| placement.part(lost).is_some());
        At { node: lost.unwrap_or_else(|| placement.node.clone()), epoch: placement.epoch }
    }

    /// The store has said so, or agreed to it.
    fn seen(&self, site: &SiteName, placement: Option<Placement>, begun: Instant) {
        self.note(site, |search| {
            search.newest = placement;
            search.store_us = micros(begun);
        });
    }

    fn answer(&self, site: &SiteName, waiter: Waiter, answer: impl FnOnce(&Search) -> Placed) {
        let mut sites = self.sites.borrow_mut();
        let Some(search) = sites.get_mut(site) else { return };
        if let Some(tell) = search.waiters.remove(&waiter) {
            // Whoever asked may have left.
            let _ = tell.send(answer(search));
        }
        if search.waiters.is_empty() {
            sites.remove(site);
        }
    }
}

impl Search {
    fn new(why: Why) -> Self {
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

    fn found(&self, epoch: u64) -> Placed {
        let newest = self.newest.clone().filter(|newest| newest.epoch == epoch);
        let (decide_us, store_us) = (self.decide_us, self.store_us);
        newest.map_or_else(
            || nowhere("it was placed anew while it was looked for"),
            |placement| Placed::At { placement, decide_us, store_us },
        )
    }

    fn refused(&self, why: Refused) -> Placed {
        if why == Refused::TooMany {
            return nowhere("too many requests look for a place at once");
        }
        let text = match why {
            Refused::StoreSilent => "the cluster's store does not answer",
            _ => "no place was found in time",
        };
        self.failed.clone().unwrap_or_else(|| nowhere(text))
    }
}

fn failed(error: &ClusterError) -> Placed {
    Placed::Nowhere { code: error.code().to_string(), reason: error.to_string() }
}

fn micros(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}
