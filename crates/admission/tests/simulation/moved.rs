//! A site that moves: a crowd got its tickets on one node, and shows them on another one, which knows nothing of them, has newcomers of
//! its own, and is killed in the middle.
//!
//! Not here: one ticket alone (`machine`), slots alone (`calendar`), keys and signatures (`ticket`, `edge`).

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};

use nagaya_admission::{
    AdmissionRefusal, AdmissionRequest, Decision, LATE_FOR, Moment, Nonce, RequestKey, Ticket,
};

use crate::chance::Chance;
use crate::model::{Model, ask, bounds, promising, used};
use crate::with_seeds;

const BEGIN: u64 = 1_700_000_000_000_000;
const SECOND: u64 = 1_000_000;
/// Microseconds of a request, and permits: 100 in a second, here and there.
const SERVICE_US: u64 = 50_000;
const RUN: u32 = 5;
const WINDOW_MS: u64 = 5_000;
const TICKETS: usize = 3_000;
/// Newcomers of the node that the site has moved to, in a second: with the holders more than it can serve.
const NEWCOMERS: f64 = 40.0;

#[derive(Debug, Clone, Copy)]
enum Event {
    Newcomer,
    Show(usize),
    End(RequestKey),
    Leave(RequestKey),
    Tick,
}

/// What became of a holder on the new node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    InTime,
    /// Came in time, and ran after his slot.
    Broken,
    Late,
}

struct Move {
    model: Model,
    lane: usize,
    chance: Chance,
    now: u64,
    events: BinaryHeap<Reverse<(u64, u64)>>,
    happenings: HashMap<u64, Event>,
    number: u64,
    tickets: Vec<Ticket>,
    /// Who waits or is served, with the holder's number.
    passes: HashMap<RequestKey, Option<usize>>,
    came_in_time: HashMap<usize, bool>,
    fates: BTreeMap<usize, Fate>,
    told_early: u64,
    replayed: u64,
}

/// What the first node has promised to a crowd, in the order of the slots.
fn promised_elsewhere(chance: &mut Chance) -> Vec<Ticket> {
    let mut model = Model::new(Moment(BEGIN), bounds(100, 5_000, 100));
    let lane = model.lane(Moment(BEGIN), 0, 1, promising(RUN, 100, WINDOW_MS));
    let service = used(SERVICE_US);
    let mut running: Vec<RequestKey> = Vec::new();
    let mut tickets = Vec::new();
    let mut now = BEGIN;
    while tickets.len() < TICKETS {
        now += SERVICE_US;
        running.drain(..).for_each(|pass| model.release(Moment(now), pass, service));
        running.append(&mut model.started);
        for _ in 0..50 + chance.below(10) {
            let number = tickets.len() as u64 + 1;
            let mut asks = ask(1, number);
            asks.nonce = Some(Nonce(number.into()));
            match model.offer(Moment(now), lane, asks) {
                Decision::Run(pass) => running.push(pass),
                Decision::Next(promise) if promise.is_new => tickets.push(promise.ticket),
                Decision::Wait(..) | Decision::Refused(AdmissionRefusal::NoSlot(_)) => {}
                other => panic!("a newcomer gets no such answer: {other:?}"),
            }
        }
    }
    tickets
}

impl Move {
    fn new(seed: u64) -> Self {
        let mut chance = Chance::new(seed);
        let tickets = promised_elsewhere(&mut chance);
        let now = BEGIN + 3 * SECOND;
        let mut model = Model::new(Moment(now), bounds(100, 5_000, 100));
        let lane = model.lane(Moment(now), 0, 1, promising(RUN, 1_000, WINDOW_MS));
        let mut moved = Self {
            model,
            lane,
            chance,
            now,
            events: BinaryHeap::new(),
            happenings: HashMap::new(),
            number: 0,
            tickets,
            passes: HashMap::new(),
            came_in_time: HashMap::new(),
            fates: BTreeMap::new(),
            told_early: 0,
            replayed: 0,
        };
        moved.plan(now, Event::Newcomer);
        moved.plan(now, Event::Tick);
        for holder in 0..moved.tickets.len() {
            moved.plan_holder(holder);
        }
        moved
    }

    /// Most come within their slot; some before it as well, some after it, some never.
    fn plan_holder(&mut self, holder: usize) {
        let Ticket { begins, ends, .. } = self.tickets[holder];
        let kind = self.chance.below(100);
        if kind < 80 {
            let at = begins.0.max(self.now) + self.chance.below((ends.0 - begins.0) / 2);
            self.plan(at, Event::Show(holder));
        }
        if kind < 20 && begins.0 > self.now {
            let before = self.chance.below(begins.0 - self.now);
            self.plan(begins.0 - before, Event::Show(holder));
        }
        if (80..90).contains(&kind) {
            let after = self.chance.below(LATE_FOR.as_secs() * SECOND * 6 / 5);
            self.plan(ends.0.max(self.now) + after, Event::Show(holder));
        }
    }

    fn plan(&mut self, at: u64, event: Event) {
        self.number += 1;
        self.events.push(Reverse((at, self.number)));
        self.happenings.insert(self.number, event);
    }

    fn shows(&self, holder: usize) -> AdmissionRequest {
        let mut asks = ask(1, holder as u64 + 1);
        asks.ticket = Some(self.tickets[holder]);
        asks.adopts = true;
        asks
    }

    fn happen(&mut self, event: Event) {
        let now = Moment(self.now);
        match event {
            Event::Newcomer => {
                let pause = self.chance.exponential(1e6 / NEWCOMERS);
                self.plan(self.now + 1 + pause as u64, Event::Newcomer);
                let asks = ask(1, 1_000_000 + self.number);
                match self.model.offer(now, self.lane, asks) {
                    Decision::Run(pass) => self.start(pass, None),
                    Decision::Wait(pass, _) => drop(self.passes.insert(pass, None)),
                    Decision::Refused(AdmissionRefusal::Full(_)) => {}
                    other => panic!("a newcomer without a number gets no such answer: {other:?}"),
                }
            }
            Event::Show(holder) => self.show(holder),
            Event::End(pass) => {
                self.passes.remove(&pass);
                self.model.release(now, pass, used(SERVICE_US));
            }
            Event::Leave(pass) => {
                // He has his permit by now, or lost his connection with all others.
                let Some(holder) = self.passes.get(&pass).copied().flatten() else { return };
                if !self.fates.contains_key(&holder) {
                    self.passes.remove(&pass);
                    self.model.cancel(now, pass);
                    self.plan(self.now + 50_000, Event::Show(holder));
                }
            }
            Event::Tick => {
                self.model.tick(now);
                self.plan(self.now + 200_000, Event::Tick);
            }
        }
        for pass in std::mem::take(&mut self.model.started) {
            let holder = self.passes.remove(&pass).expect("who starts waited");
            self.start(pass, holder);
        }
    }

    fn start(&mut self, pass: RequestKey, holder: Option<usize>) {
        if let Some(holder) = holder {
            let has_ended = self.now >= self.tickets[holder].ends.0;
            let fate = match (self.came_in_time[&holder], has_ended) {
                (true, true) => Fate::Broken,
                (_, false) => Fate::InTime,
                (false, true) => Fate::Late,
            };
            assert_eq!(self.fates.insert(holder, fate), None, "a ticket is used once");
        }
        self.passes.insert(pass, holder);
        self.plan(self.now + SERVICE_US, Event::End(pass));
    }

    fn show(&mut self, holder: usize) {
        let ticket = self.tickets[holder];
        let is_used = self.fates.contains_key(&holder) || self.passes.values().any(|of| *of == Some(holder));
        let is_over = self.now >= ticket.ends.0 + LATE_FOR.as_secs() * SECOND;
        let asks = self.shows(holder);
        let offer = self.model.offer(Moment(self.now), self.lane, asks);
        if is_over && !is_used {
            assert_eq!(offer, Decision::Refused(AdmissionRefusal::Expired));
            return;
        }
        if is_used {
            // Of what is over it is not known any more that it was used.
            let refused = [AdmissionRefusal::Replayed, AdmissionRefusal::Expired].map(Decision::Refused);
            assert!(refused.contains(&offer), "{offer:?}");
            self.replayed += 1;
            return;
        }
        let is_late = self.now >= ticket.ends.0;
        match offer {
            Decision::Run(pass) => {
                *self.came_in_time.entry(holder).or_default() |= !is_late;
                self.start(pass, Some(holder));
            }
            Decision::Wait(pass, _) => {
                assert!(ticket.begins.0 <= self.now, "nobody listens, so nobody is called");
                *self.came_in_time.entry(holder).or_default() |= !is_late;
                self.passes.insert(pass, Some(holder));
                if self.chance.percent(5) {
                    let delay = self.chance.below(20_000);
                    self.plan(self.now + delay, Event::Leave(pass));
                }
            }
            Decision::Early(promise) => {
                assert_eq!((promise.ticket, promise.is_new), (ticket, false));
                assert!(ticket.begins.0 > self.now);
                self.told_early += 1;
            }
            other => panic!("a holder gets no such answer: {other:?}"),
        }
        if self.chance.percent(10) {
            let delay = self.chance.below(60 * SECOND);
            self.plan(self.now + delay, Event::Show(holder));
        }
    }

    /// kill -9, and a start at once. Who was being served or waited comes again; what was cut off is not used up.
    fn restart(&mut self) {
        self.happenings.retain(|_, event| !matches!(event, Event::End(_) | Event::Leave(_)));
        self.events.retain(|Reverse((_, number))| self.happenings.contains_key(number));
        let mut cut: Vec<usize> = self.passes.drain().filter_map(|(_, holder)| holder).collect();
        cut.sort_unstable();
        self.model.restart(Moment(self.now));
        for holder in cut {
            self.fates.remove(&holder);
            self.plan(self.now + 1_000, Event::Show(holder));
        }
    }
}

fn simulate(seed: u64) {
    let mut moved = Move::new(seed);
    let last = moved.tickets.iter().map(|ticket| ticket.ends.0).max().expect("there are some");
    let end = last + LATE_FOR.as_secs() * SECOND * 3;
    let mut restart_at = (moved.now + last) / 2;
    let mut before_restart = 0;
    while moved.now < end {
        let Reverse((at, number)) = moved.events.pop().expect("newcomers never end");
        moved.now = at;
        let event = moved.happenings.remove(&number).expect("it was planned");
        moved.happen(event);
        if moved.now > restart_at {
            restart_at = u64::MAX;
            let counts = moved.model.admission.explain(Moment(moved.now), moved.model.lanes[moved.lane].id);
            before_restart = counts.expect("the lane is there").counts.adopted;
            moved.restart();
        }
    }
    let count = |fate: Fate| moved.fates.values().filter(|one| **one == fate).count();
    let kept = count(Fate::InTime);
    let broken = count(Fate::Broken);
    let late = count(Fate::Late);
    println!(
        "{kept} of {TICKETS} ran in time, {broken} came in time and ran after it, {late} were late; {} were told how long still, {} replayed",
        moved.told_early, moved.replayed
    );
    // As much was promised there as can be done here, and newcomers come after it.
    assert!(kept > TICKETS * 7 / 10 && broken * 200 <= kept, "{kept} kept, {broken} broken");
    assert!(late > 50 && moved.told_early > 100 && moved.replayed > 50 && before_restart > 100);
    let explained = moved.model.admission.explain(Moment(moved.now), moved.model.lanes[moved.lane].id);
    let explained = explained.expect("the lane is there");
    assert_eq!((explained.promised, explained.counts.promised), (0, 0), "every ticket has ended");
    assert!(moved.model.admission.promises().iter().all(|record| record.over_at().is_none()));
}

#[test]
fn promises_of_another_node_are_kept() {
    with_seeds([21, 22, 23], simulate);
}
