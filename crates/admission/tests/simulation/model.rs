//! The machine beside a plain model of it, which checks each answer and effect against what was agreed.
//!
//! The model knows who runs and who waits, in lists that are searched, and checks: no bound is passed; within a lane it is first
//! come, first served, by priority; nobody waits who could run; each pass ends once; nothing is left over.
//!
//! Not here: who comes when (`crowd`).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use nagaya_admission::{
    Admission, AdmissionEffect, AdmissionRefusal, AdmissionRequest, ClientKey, CostClass, Decision, LaneId,
    LaneLimits, LaneName, Moment, Nonce, PRIORITY_STEP, RequestKey, RunLimit, ServiceUse, Ticket,
    TicketPolicy, TicketRecord,
};

/// A lane that the model knows.
pub struct Known {
    pub id: LaneId,
    pub name: LaneName,
    pub around: Option<usize>,
    pub bounds: LaneLimits,
    pub is_gone: bool,
    running: u32,
    /// Of newcomers: by arrival less what priority is worth, then by number.
    line: BTreeSet<(i64, RequestKey)>,
    /// Of holders, who go first.
    holders: BTreeSet<RequestKey>,
    bytes: u64,
    lent: u32,
}

#[derive(Debug, Clone, Copy)]
struct Party {
    lane: usize,
    /// Place in line; `None`: it runs.
    order: Option<i64>,
    is_holder: bool,
    bytes: u64,
}

pub struct Model {
    pub admission: Admission,
    pub lanes: Vec<Known>,
    parties: HashMap<RequestKey, Party>,
    /// What would be on disk.
    pub stored: Vec<TicketRecord>,
    /// Passes that got their permit by an effect, since last asked.
    pub started: Vec<RequestKey>,
    pub dismissed: Vec<RequestKey>,
    pub called: Vec<(Nonce, Moment)>,
    /// Since when the places of those who were called are kept.
    places: HashMap<Nonce, Moment>,
    /// Lanes asked for what was lent to them.
    pub recalled: Vec<usize>,
    /// Answers, by kind.
    pub tally: BTreeMap<&'static str, u64>,
    calls: u64,
}

pub fn bounds(run: u32, wait_ms: u64, weight: u32) -> LaneLimits {
    LaneLimits {
        run: RunLimit::Fixed(run),
        wait: Duration::from_millis(wait_ms),
        wait_count: 1_000,
        wait_bytes: 1 << 20,
        next: None,
        weight,
    }
}

pub fn promising(run: u32, wait_ms: u64, window_ms: u64) -> LaneLimits {
    let next = TicketPolicy {
        window: Duration::from_millis(window_ms),
        horizon: Duration::from_secs(600),
        tickets: 5_000,
        share: 0.9,
    };
    LaneLimits { next: Some(next), ..bounds(run, wait_ms, 100) }
}

pub fn ask(class: u32, client: u64) -> AdmissionRequest {
    AdmissionRequest {
        class: CostClass(class),
        client: ClientKey(client),
        bytes: 100,
        priority: 0,
        ticket: None,
        adopts: false,
        can_wait: true,
        nonce: None,
        passes: false,
        is_visiting: false,
    }
}

pub fn used(service_us: u64) -> ServiceUse {
    ServiceUse { service: Duration::from_micros(service_us), is_whole: true }
}

impl Model {
    pub fn new(now: Moment, node: LaneLimits) -> Self {
        let admission = Admission::new(now, node.clone());
        let root = admission.root();
        let mut model = Self {
            admission,
            lanes: Vec::new(),
            parties: HashMap::new(),
            stored: Vec::new(),
            started: Vec::new(),
            dismissed: Vec::new(),
            called: Vec::new(),
            places: HashMap::new(),
            recalled: Vec::new(),
            tally: BTreeMap::new(),
            calls: 0,
        };
        model.know(root, LaneName([0; 16]), None, node);
        model
    }

    /// Makes a lane, or makes it again.
    pub fn lane(&mut self, now: Moment, around: usize, name: u8, bounds: LaneLimits) -> usize {
        let name = LaneName([name; 16]);
        let id = self.admission.lane(now, self.lanes[around].id, name, bounds.clone());
        let lane = self.know(id, name, Some(around), bounds);
        self.after(now, lane);
        lane
    }

    fn know(&mut self, id: LaneId, name: LaneName, around: Option<usize>, bounds: LaneLimits) -> usize {
        self.lanes.push(Known {
            id,
            name,
            around,
            bounds,
            is_gone: false,
            running: 0,
            line: BTreeSet::new(),
            holders: BTreeSet::new(),
            bytes: 0,
            lent: 0,
        });
        self.lanes.len() - 1
    }

    pub fn set(&mut self, now: Moment, lane: usize, bounds: LaneLimits) {
        self.lanes[lane].bounds = bounds.clone();
        assert_eq!(self.admission.set(now, self.lanes[lane].id, bounds), !self.lanes[lane].is_gone);
        self.after(now, lane);
    }

    pub fn remove(&mut self, now: Moment, lane: usize) {
        let gone: Vec<usize> = (0..self.lanes.len()).filter(|at| self.path(*at).contains(&lane)).collect();
        let mut waiting = BTreeSet::new();
        for at in gone {
            let known = &mut self.lanes[at];
            known.is_gone = true;
            known.bytes = 0;
            waiting.extend(std::mem::take(&mut known.line).into_iter().map(|(_, pass)| pass));
            waiting.extend(std::mem::take(&mut known.holders));
        }
        self.admission.remove(now, self.lanes[lane].id);
        self.after(now, lane);
        assert_eq!(waiting, self.dismissed.iter().copied().collect(), "who waited there is dismissed, once");
        for pass in &self.dismissed {
            self.parties.remove(pass);
        }
    }

    /// The lane and those around it.
    pub fn path(&self, lane: usize) -> Vec<usize> {
        std::iter::successors(Some(lane), |at| self.lanes[*at].around).collect()
    }

    fn run_of(&self, lane: usize) -> u32 {
        match self.lanes[lane].bounds.run {
            RunLimit::Fixed(run) => run,
            RunLimit::Auto { max, .. } => max,
        }
    }

    fn has_room(&self, lane: usize) -> bool {
        self.path(lane).iter().all(|at| self.lanes[*at].is_gone || self.lanes[*at].running < self.run_of(*at))
    }

    fn count(&mut self, name: &'static str) {
        *self.tally.entry(name).or_default() += 1;
    }

    /// The holder's page listens.
    pub fn listen(&mut self, now: Moment, nonce: Nonce) {
        self.admission.listen(now, nonce, true);
        self.after(now, 0);
    }

    pub fn offer(&mut self, now: Moment, lane: usize, ask: AdmissionRequest) -> Decision {
        let had_room = self.has_room(lane);
        let offer = self.admission.offer(now, self.lanes[lane].id, ask);
        match &offer {
            Decision::Run(pass) => {
                assert!(had_room || ask.passes, "no bound is passed");
                let is_empty = self.lanes[lane].line.is_empty() && self.lanes[lane].holders.is_empty();
                assert!(ask.passes || is_empty, "nobody in line is passed");
                self.begin(*pass, lane, None, false);
                self.count("run");
            }
            Decision::Wait(pass, prediction) => {
                assert!(!had_room && ask.can_wait && !self.lanes[lane].is_gone);
                let (order, is_holder) = self.place_of(now, &ask);
                let newcomers_ahead = || self.lanes[lane].holders.len() + self.ahead_of(lane, order);
                let ahead = (!is_holder).then(newcomers_ahead);
                assert!(
                    ahead.is_none_or(|ahead| ahead == prediction.ahead as usize),
                    "{ahead:?} {prediction:?}"
                );
                let has_ticket = ask.ticket.is_some();
                assert!(
                    has_ticket || prediction.wait <= Some(self.lanes[lane].bounds.wait),
                    "{prediction:?}"
                );
                let known = &mut self.lanes[lane];
                known.bytes += ask.bytes;
                assert!(has_ticket || known.bytes <= known.bounds.wait_bytes);
                let fits = known.line.len() + known.holders.len() < known.bounds.wait_count as usize;
                assert!(has_ticket || fits, "backstops hold");
                let party = Party { lane, order: Some(order), is_holder, bytes: ask.bytes };
                assert!(self.parties.insert(*pass, party).is_none(), "numbers are not used again");
                if is_holder {
                    known.holders.insert(*pass)
                } else {
                    known.line.insert((order, *pass))
                };
                self.count("wait");
            }
            Decision::Next(promise) => {
                assert!(
                    !had_room && promise.ticket.begins >= now && promise.ticket.ends > promise.ticket.begins
                );
                self.admission.listen(now, promise.ticket.nonce, true);
                self.count("next");
            }
            Decision::Early(promise) => {
                assert!(!had_room && promise.ticket.begins > now);
                self.count("early");
            }
            Decision::Refused(AdmissionRefusal::NoLane) => {
                assert!(self.lanes[lane].is_gone);
                self.count("no lane");
            }
            Decision::Refused(refused) => {
                assert!(
                    !had_room || matches!(refused, AdmissionRefusal::Replayed | AdmissionRefusal::Expired),
                    "{refused:?}"
                );
                let is_replay = matches!(refused, AdmissionRefusal::Replayed);
                self.count(if is_replay { "replayed" } else { "refused" });
            }
        }
        self.after(now, lane);
        offer
    }

    /// Where in line one stands who comes now, and whether before all newcomers.
    fn place_of(&self, now: Moment, ask: &AdmissionRequest) -> (i64, bool) {
        let step = i64::try_from(PRIORITY_STEP.as_micros()).expect("small");
        let order = |at: Moment| i64::try_from(at.0).expect("small") - i64::from(ask.priority) * step;
        match ask.ticket {
            Some(ticket) if ticket.begins > now => (order(self.places[&ticket.nonce]), false),
            Some(_) => (order(now), true),
            None => (order(now), false),
        }
    }

    fn ahead_of(&self, lane: usize, order: i64) -> usize {
        let line = &self.lanes[lane].line;
        // Nearly everybody gets in near the end.
        line.len() - line.range((order + 1, RequestKey(0))..).count()
    }

    pub fn release(&mut self, now: Moment, pass: RequestKey, used: ServiceUse) {
        let party = self.parties.remove(&pass).expect("it is released once");
        assert!(party.order.is_none(), "it ran");
        self.leave(party.lane);
        self.admission.release(now, pass, used);
        self.after(now, party.lane);
    }

    pub fn cancel(&mut self, now: Moment, pass: RequestKey) {
        let party = self.parties.remove(&pass).expect("it is cancelled once");
        match party.order {
            None => self.leave(party.lane),
            Some(order) => self.unline(pass, party, order),
        }
        self.admission.cancel(now, pass);
        self.after(now, party.lane);
    }

    pub fn tick(&mut self, now: Moment) -> Option<Moment> {
        let next = self.admission.tick(now);
        self.after(now, 0);
        next
    }

    pub fn lend(&mut self, now: Moment, lane: usize, count: u32) -> u32 {
        let lent = self.admission.lend(now, self.lanes[lane].id, count);
        assert!(lent <= count);
        self.lanes[lane].lent += lent;
        for at in self.path(lane) {
            self.lanes[at].running += lent;
            let known = &self.lanes[at];
            assert!(lent == 0 || known.running * 2 <= self.run_of(at), "half of each bound stays free");
            assert!(lent == 0 || known.line.is_empty(), "nothing is lent where somebody waits");
        }
        self.after(now, lane);
        lent
    }

    pub fn give_back(&mut self, now: Moment, lane: usize, count: u32) {
        assert!(self.lanes[lane].lent >= count);
        self.lanes[lane].lent -= count;
        for at in self.path(lane) {
            self.lanes[at].running -= count;
        }
        self.admission.give_back(now, self.lanes[lane].id, count);
        self.after(now, lane);
    }

    pub fn lent(&self, lane: usize) -> u32 {
        self.lanes[lane].lent
    }

    fn begin(&mut self, pass: RequestKey, lane: usize, order: Option<i64>, is_holder: bool) {
        for at in self.path(lane) {
            self.lanes[at].running += 1;
        }
        let was = self.parties.insert(pass, Party { lane, order: None, is_holder, bytes: 0 });
        assert_eq!(was.is_some(), order.is_some(), "a pass begins once");
    }

    fn leave(&mut self, lane: usize) {
        for at in self.path(lane) {
            self.lanes[at].running -= 1;
        }
    }

    fn unline(&mut self, pass: RequestKey, party: Party, order: i64) {
        let known = &mut self.lanes[party.lane];
        known.bytes -= party.bytes;
        let was =
            if party.is_holder { known.holders.remove(&pass) } else { known.line.remove(&(order, pass)) };
        assert!(was, "{pass:?} was in line");
    }

    /// Carries out the effects, each of them checked, and looks whether somebody waits who could run.
    fn after(&mut self, now: Moment, lane: usize) {
        self.dismissed.clear();
        let effects: Vec<AdmissionEffect> = self.admission.drain_effects().collect();
        for effect in effects {
            match effect {
                AdmissionEffect::Run(pass) => self.began(pass),
                AdmissionEffect::Dismiss(pass, refused) => {
                    assert_eq!(refused, AdmissionRefusal::NoLane);
                    self.dismissed.push(pass);
                }
                AdmissionEffect::Recall(id) => {
                    let lane = self.lanes.iter().position(|lane| lane.id == id).expect("a known lane");
                    self.recalled.push(lane);
                }
                AdmissionEffect::Store(record) => self.stored.push(record),
                AdmissionEffect::Call { nonce, until } => {
                    self.called.push((nonce, until));
                    self.places.insert(nonce, now);
                }
            }
        }
        self.calls += 1;
        if self.calls.is_multiple_of(64) {
            self.check_all(now);
        } else {
            self.check_idle(lane);
        }
    }

    fn began(&mut self, pass: RequestKey) {
        let party = *self.parties.get(&pass).expect("who begins waited");
        let order = party.order.expect("who begins did not run yet");
        let known = &self.lanes[party.lane];
        if party.is_holder {
            assert!(known.holders.contains(&pass));
        } else {
            assert!(known.holders.is_empty(), "holders go before newcomers");
            assert_eq!(known.line.first(), Some(&(order, pass)), "first come, first served");
        }
        assert!(self.has_room(party.lane), "no bound is passed");
        self.unline(pass, party, order);
        self.begin(pass, party.lane, Some(order), party.is_holder);
        self.started.push(pass);
    }

    fn check_idle(&self, lane: usize) {
        let known = &self.lanes[lane];
        let waits = !known.line.is_empty() || !known.holders.is_empty();
        assert!(!waits || !self.has_room(lane), "nobody waits who could run");
    }

    /// What the machine says of its lanes is what the model knows.
    fn check_all(&self, now: Moment) {
        for (at, lane) in self.lanes.iter().enumerate() {
            self.check_idle(at);
            let explained = self.admission.explain(now, lane.id);
            assert_eq!(explained.is_none(), lane.is_gone);
            let Some(explained) = explained else { continue };
            assert_eq!(explained.running, lane.running);
            assert_eq!(explained.waiting as usize, lane.line.len() + lane.holders.len());
            assert_eq!(explained.waiting_bytes, lane.bytes);
            assert_eq!(explained.queued_since.is_some(), explained.waiting > 0);
        }
    }

    /// Nothing runs, waits or is lent any more.
    pub fn check_empty(&self, now: Moment) {
        assert!(self.parties.is_empty());
        for lane in &self.lanes {
            assert_eq!((lane.running, lane.lent, lane.bytes), (0, 0, 0));
        }
        self.check_all(now);
    }

    /// The process is killed and starts again, with what was stored, and nothing else.
    pub fn restart(&mut self, now: Moment) {
        self.admission = Admission::new(now, self.lanes[0].bounds.clone());
        self.parties.clear();
        // Who was called and has not come is awaited once more, from now on.
        self.places.values_mut().for_each(|since| *since = now);
        self.lanes[0].id = self.admission.root();
        for at in 0..self.lanes.len() {
            let known = &mut self.lanes[at];
            known.running = 0;
            known.lent = 0;
            known.bytes = 0;
            known.line.clear();
            known.holders.clear();
            if let Some(around) = self.lanes[at].around.filter(|_| !self.lanes[at].is_gone) {
                let name = self.lanes[at].name;
                let bounds = self.lanes[at].bounds.clone();
                self.lanes[at].id = self.admission.lane(now, self.lanes[around].id, name, bounds);
                for record in &self.stored {
                    self.admission.restore(now, self.lanes[at].id, *record);
                }
            }
        }
        self.after(now, 0);
    }
}

/// A ticket that nobody signed, as if a client had changed his.
pub fn altered(ticket: Ticket) -> Ticket {
    Ticket { begins: Moment(ticket.begins.0 - 1), ..ticket }
}
