//! Crowds that are turned away with tickets and come back: in time, early, late, twice, or never; through restarts.
//!
//! Each holder's fate is followed from outside and held against what the machine counts.
//!
//! Not here: slots alone (`calendar`), signed texts (`ticket`), browsers (`tests/`).

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::ops::Range;

use nagaya_admission::{
    AdmissionRefusal, Decision, Moment, Nonce, RequestKey, Ticket, TicketRecord, TicketStatus,
};

use crate::chance::Chance;
use crate::model::{Model, altered, ask, bounds, promising, used};
use crate::{times, with_seeds};

/// Microseconds of a request, on average, and permits of the lane: 100 in a second.
const SERVICE_US: f64 = 50_000.0;
const RUN: u32 = 5;
const WINDOW_MS: u64 = 5_000;
/// From `kill -9` to the start after it.
const AWAY_US: u64 = 3_000_000;
/// Percent of those who come in time, and run before their slot ends, where the process was there all the time.
const KEPT_LEAST: f64 = 99.95;

#[derive(Debug, Clone, Copy)]
enum Event {
    /// A new client.
    Arrive,
    /// A client shows his ticket.
    Show(u64),
    End(RequestKey, u64),
    Leave(RequestKey),
    Tick,
}

/// A client who holds a ticket.
#[derive(Debug, Clone, Copy)]
struct Client {
    ticket: Ticket,
    /// He shows it in his window, or when called.
    is_reliable: bool,
    came_in_time: bool,
    was_called: bool,
    /// He was in line or being served when the process ended.
    was_cut: bool,
}

struct Crowd {
    model: Model,
    lane: usize,
    chance: Chance,
    now: u64,
    begin: u64,
    events: BinaryHeap<Reverse<(u64, u64)>>,
    happenings: HashMap<u64, Event>,
    number: u64,
    clients: HashMap<u64, Client>,
    holders: HashMap<Nonce, u64>,
    /// Who waits: his client, if he came on a ticket.
    waiting: HashMap<RequestKey, Option<u64>>,
    /// Who runs on a ticket.
    served: HashMap<RequestKey, (u64, Client)>,
    /// Ran within their slots, or when called; came in time and ran later.
    kept: u64,
    broken: u64,
    late_us: Vec<u64>,
    /// Came in time and ran later, and the process was not there all the time from their slot's beginning to its end: how late.
    cut_late_us: Vec<u64>,
    /// When the process was away last.
    away: Range<u64>,
    promised: u64,
    called: u64,
    /// Holders outside who would come if they were called.
    eager: u64,
    /// Permits that were idle while there were some, in permit-microseconds, and all permits then.
    idle: f64,
    busy: f64,
    running: u32,
}

impl Crowd {
    fn new(seed: u64) -> Self {
        let begin = 1_700_000_000_000_000;
        let mut model = Model::new(Moment(begin), bounds(100, 5_000, 100));
        let lane = model.lane(Moment(begin), 0, 1, promising(RUN, 1_000, WINDOW_MS));
        Self {
            model,
            lane,
            chance: Chance::new(seed),
            now: begin,
            begin,
            events: BinaryHeap::new(),
            happenings: HashMap::new(),
            number: 0,
            clients: HashMap::new(),
            holders: HashMap::new(),
            waiting: HashMap::new(),
            served: HashMap::new(),
            kept: 0,
            broken: 0,
            late_us: Vec::new(),
            cut_late_us: Vec::new(),
            away: 0..0,
            promised: 0,
            called: 0,
            eager: 0,
            idle: 0.0,
            busy: 0.0,
            running: 0,
        }
    }

    fn plan(&mut self, at: u64, event: Event) {
        self.number += 1;
        self.events.push(Reverse((at, self.number)));
        self.happenings.insert(self.number, event);
    }

    /// At some time after `from`.
    fn plan_within(&mut self, from: u64, within: u64, event: Event) {
        let delay = self.chance.below(within);
        self.plan(from + delay, event);
    }

    /// Goes on to the next event.
    fn step(&mut self) -> Option<Event> {
        let Reverse((at, number)) = self.events.pop()?;
        let passed = (at - self.now) as f64;
        if self.eager > 0 {
            self.idle += passed * f64::from(RUN - self.running.min(RUN));
            self.busy += passed * f64::from(RUN);
        }
        self.now = at;
        self.happenings.remove(&number)
    }

    fn happen(&mut self, event: Event) {
        let now = Moment(self.now);
        match event {
            Event::Arrive => self.arrive(),
            Event::Show(client) => self.show(client),
            Event::End(pass, service) => {
                self.running -= 1;
                self.served.remove(&pass);
                self.model.release(now, pass, used(service));
            }
            Event::Leave(pass) => {
                if let Some(client) = self.waiting.remove(&pass) {
                    self.model.cancel(now, pass);
                    // His line was cut: he comes again, and his ticket is still good.
                    if let Some(client) = client {
                        assert_ne!(self.standing(client), TicketStatus::Unknown);
                        self.plan(self.now + 100_000, Event::Show(client));
                    }
                }
            }
            Event::Tick => {
                let next = self.model.tick(now);
                assert!(next.is_none_or(|next| next > now), "what was due has been done");
                self.plan(self.now + 200_000, Event::Tick);
            }
        }
        self.react();
    }

    /// Who got a permit starts; who was called comes.
    fn react(&mut self) {
        for pass in std::mem::take(&mut self.model.started) {
            let client = self.waiting.remove(&pass).expect("who starts waited");
            self.start(pass, client);
        }
        for (nonce, until) in std::mem::take(&mut self.model.called) {
            self.called += 1;
            assert!(until.0 > self.now);
            let client = self.holders[&nonce];
            let holder = self.clients.get_mut(&client).expect("he holds a ticket");
            holder.was_called = true;
            if holder.is_reliable {
                let delay = 50_000 + self.chance.below(300_000);
                self.plan(self.now + delay, Event::Show(client));
            }
        }
    }

    fn start(&mut self, pass: RequestKey, client: Option<u64>) {
        if let Some((client, holder)) = client.and_then(|client| self.clients.remove_entry(&client)) {
            self.served.insert(pass, (client, holder));
            self.holders.remove(&holder.ticket.nonce);
            self.eager -= u64::from(holder.is_reliable);
            let late = self.now.saturating_sub(holder.ticket.ends.0);
            let was_away = holder.ticket.begins.0 < self.away.end && self.away.start < holder.ticket.ends.0;
            match (holder.came_in_time, late == 0) {
                (true, true) => self.kept += 1,
                (true, false) if was_away => self.cut_late_us.push(late),
                (true, false) => {
                    self.broken += 1;
                    self.late_us.push(late);
                }
                (false, _) => {}
            }
        }
        self.running += 1;
        let service = self.chance.lognormal(SERVICE_US * 0.95, 0.3) as u64;
        self.plan(self.now + service, Event::End(pass, service));
    }

    fn arrive(&mut self) {
        // 10 times what can be served, for half of the time; then two thirds of it.
        let second = (self.now - self.begin) / 1_000_000;
        let load = if second % 120 < 20 { 5.0 } else { 0.6 };
        let pause = self.chance.exponential(SERVICE_US / f64::from(RUN) / load);
        self.plan(self.now + 1 + pause as u64, Event::Arrive);
        let mut ask = ask(1, 1_000_000 + self.number);
        ask.nonce = Some(Nonce(u128::from(self.number) + 1));
        let client = ask.client.0;
        match self.model.offer(Moment(self.now), self.lane, ask) {
            Decision::Run(pass) => self.start(pass, None),
            Decision::Wait(pass, _) => {
                self.waiting.insert(pass, None);
                if self.chance.percent(5) {
                    self.plan_within(self.now, 500_000, Event::Leave(pass));
                }
            }
            Decision::Next(promise) => {
                assert!(promise.is_new);
                self.hold(client, promise.ticket);
            }
            Decision::Refused(AdmissionRefusal::NoSlot(_)) => {}
            other => panic!("a newcomer gets no such answer: {other:?}"),
        }
    }

    fn hold(&mut self, client: u64, ticket: Ticket) {
        self.promised += 1;
        let is_reliable = self.chance.percent(70);
        self.clients.insert(
            client,
            Client { ticket, is_reliable, came_in_time: false, was_called: false, was_cut: false },
        );
        self.holders.insert(ticket.nonce, client);
        self.eager += u64::from(is_reliable);
        let window = ticket.ends.0 - ticket.begins.0;
        if is_reliable {
            // Most come as soon as they may.
            let delay = self.chance.below(window / 3);
            self.plan(ticket.begins.0 + delay, Event::Show(client));
            if self.chance.percent(10) {
                self.plan_within(self.now, ticket.begins.0 - self.now + 1, Event::Show(client));
            }
        } else if self.chance.percent(20) {
            self.plan_within(ticket.ends.0 + 1, 60_000_000, Event::Show(client));
        }
    }

    fn standing(&self, client: u64) -> TicketStatus {
        self.model.admission.standing(Moment(self.now), self.clients[&client].ticket.nonce)
    }

    fn show(&mut self, client: u64) {
        let Some(holder) = self.clients.get(&client).copied() else { return };
        let mut ask = ask(1, client);
        ask.ticket = Some(holder.ticket);
        ask.nonce = Some(Nonce(u128::from(self.number) << 64));
        let is_in_line = self.waiting.values().any(|waits| *waits == Some(client));
        let standing = self.standing(client);
        let offer = self.model.offer(Moment(self.now), self.lane, ask);
        if is_in_line {
            assert_eq!(
                (offer, standing),
                (Decision::Refused(AdmissionRefusal::Replayed), TicketStatus::Used)
            );
            return;
        }
        let is_late = self.now >= holder.ticket.ends.0;
        match offer {
            Decision::Run(pass) => {
                self.come(client, !is_late);
                self.start(pass, Some(client));
                let again = self.model.offer(Moment(self.now), self.lane, ask);
                assert_eq!(again, Decision::Refused(AdmissionRefusal::Replayed));
            }
            Decision::Wait(pass, _) => {
                assert!(matches!(standing, TicketStatus::Open { .. } | TicketStatus::Late), "{standing:?}");
                self.come(client, !is_late);
                self.waiting.insert(pass, Some(client));
                if self.chance.percent(3) {
                    self.plan_within(self.now, 20_000, Event::Leave(pass));
                }
            }
            Decision::Early(promise) => {
                assert_eq!(promise.ticket, holder.ticket);
                assert!(holder.ticket.begins.0 > self.now && matches!(standing, TicketStatus::Later { .. }));
                assert!(
                    !(holder.was_called && holder.was_cut),
                    "who was called, and cut off by a crash, is not sent away"
                );
            }
            other => panic!("a holder gets no such answer: {other:?}, {standing:?}"),
        }
    }

    fn come(&mut self, client: u64, is_in_time: bool) {
        let holder = self.clients.get_mut(&client).expect("he holds a ticket");
        holder.came_in_time |= is_in_time;
        holder.was_cut = false;
    }

    /// kill -9, and a start a little later.
    fn restart(&mut self) {
        let requests: Vec<u64> = self
            .happenings
            .iter()
            .filter(|(_, event)| matches!(event, Event::End(..) | Event::Leave(_)))
            .map(|(number, _)| *number)
            .collect();
        for number in requests {
            self.happenings.remove(&number);
        }
        self.away = self.now..self.now + AWAY_US;
        self.now = self.away.end;
        self.events.retain(|Reverse((_, number))| self.happenings.contains_key(number));
        let missed: Vec<u64> = self
            .events
            .iter()
            .filter(|Reverse((at, _))| *at < self.now)
            .map(|Reverse((_, number))| *number)
            .collect();
        self.events.retain(|Reverse((at, _))| *at >= self.now);
        for number in missed {
            let event = self.happenings.remove(&number).expect("it was to happen");
            self.plan(self.now + 1_000 + self.number % 50, event);
        }
        // Who was being served, and who waited in line, lost his connection, and comes again.
        let mut cut: Vec<u64> = self.waiting.drain().filter_map(|(_, client)| client).collect();
        for (_, (client, holder)) in self.served.drain() {
            // Whether he was served in time has been counted.
            self.clients.insert(client, Client { came_in_time: false, ..holder });
            self.holders.insert(holder.ticket.nonce, client);
            self.eager += u64::from(holder.is_reliable);
            cut.push(client);
        }
        cut.sort_unstable();
        for client in cut {
            self.clients.get_mut(&client).expect("he holds a ticket").was_cut = true;
            self.plan(self.now + 100_000, Event::Show(client));
        }
        self.running = 0;
        self.model.restart(Moment(self.now));
        // In an order that is the same in each run with this seed.
        let mut clients: Vec<u64> = self.clients.keys().copied().collect();
        clients.sort_unstable();
        for client in clients {
            assert_ne!(self.standing(client), TicketStatus::Unknown, "a restart loses no ticket");
            // Pages that listened do so again.
            self.model.listen(Moment(self.now), self.clients[&client].ticket.nonce);
        }
        // They hear it before anything else happens: who comes by himself was called as well.
        self.react();
    }
}

fn simulate(seed: u64, restarts: bool) {
    let mut crowd = Crowd::new(seed);
    crowd.plan(crowd.begin, Event::Arrive);
    crowd.plan(crowd.begin, Event::Tick);
    let end = crowd.begin + 480_000_000 * times();
    let mut next_restart = if restarts { crowd.begin + 50_000_000 } else { u64::MAX };
    while crowd.now < end {
        let event = crowd.step().expect("arrivals never end");
        crowd.happen(event);
        if crowd.now > next_restart {
            crowd.restart();
            next_restart = crowd.now + 97_000_000;
        }
    }
    let kept = crowd.kept as f64 / (crowd.kept + crowd.broken) as f64 * 100.0;
    let idle = crowd.idle / crowd.busy * 100.0;
    let most_ms = |late_us: &[u64]| late_us.iter().max().unwrap_or(&0) / 1_000;
    println!(
        "{} promised, {} called early; of those who came in time {kept:.3} % ran in time ({} late, by at most {} ms; in slots cut short {}, by at most {} ms); {idle:.2} % idle while tickets were out",
        crowd.promised,
        crowd.called,
        crowd.broken,
        most_ms(&crowd.late_us),
        crowd.cut_late_us.len(),
        most_ms(&crowd.cut_late_us),
    );
    assert!(crowd.promised > 1_000 && crowd.called > 500 && crowd.kept > 1_000);
    assert!(kept >= KEPT_LEAST, "{kept}");
    // Nobody runs while the process is away. Whose slot ended meanwhile goes after those whose slot is open then, and the rest of
    // each slot is room for few.
    assert!(crowd.cut_late_us.iter().all(|late| *late <= AWAY_US + 2 * WINDOW_MS * 1_000));
    let explained = crowd.model.admission.explain(Moment(crowd.now), crowd.model.lanes[crowd.lane].id);
    let explained = explained.expect("the lane is there");
    let counts = explained.counts;
    println!("{:?}", explained.calibration);
    println!("{counts:?}");
    assert!(
        restarts || (counts.promised == crowd.promised && counts.called_early == crowd.called),
        "{counts:?}"
    );
    assert!(idle <= 5.0, "{idle}");
}

#[test]
fn promises_are_kept() {
    with_seeds([11], |seed| simulate(seed, false));
}

#[test]
fn promises_are_kept_through_restarts() {
    // 11: one who came early and found room was cut off. 101: one who was called by the restart came by himself.
    // 656: slots end while the process is away.
    with_seeds([11, 12, 101, 656], |seed| simulate(seed, true));
}

#[test]
fn an_altered_ticket_makes_nobody_a_holder() {
    let now = Moment(1_700_000_000_000_000);
    let mut model = Model::new(now, bounds(100, 5_000, 100));
    let lane = model.lane(now, 0, 1, promising(1, 100, WINDOW_MS));
    let Decision::Run(first) = model.offer(now, lane, ask(1, 1)) else { panic!("there is room") };
    let later = Moment(now.0 + 200_000);
    model.release(later, first, used(200_000));
    let Decision::Run(_) = model.offer(later, lane, ask(1, 1)) else { panic!("there is room") };
    let with_nonce = |client: u64| {
        let mut ask = ask(1, client);
        ask.nonce = Some(Nonce(u128::from(client)));
        ask
    };
    let Decision::Next(promise) = model.offer(later, lane, with_nonce(2)) else {
        panic!("a wait of 200 ms is too long")
    };
    assert!(promise.is_new);
    let mut shows = ask(1, 3);
    shows.ticket = Some(altered(promise.ticket));
    let offer = model.offer(later, lane, shows);
    assert!(matches!(offer, Decision::Refused(AdmissionRefusal::Full(_))), "{offer:?}");
    // The same client asks again: the same ticket.
    let Decision::Next(again) = model.offer(later, lane, with_nonce(2)) else { panic!("it is still full") };
    assert_eq!((again.ticket, again.is_new), (promise.ticket, false));
    let promised = model.stored.iter().filter(|record| matches!(record, TicketRecord::Promised { .. }));
    assert_eq!(promised.count(), 1);
    // What could not be stored was not promised.
    model.admission.forget(later, promise.ticket.nonce);
    assert_eq!(model.admission.standing(later, promise.ticket.nonce), TicketStatus::Unknown);
}
