//! The facade by hand: one fact each. What holds at every step of a crowd is checked in `tests/simulation`.

use super::*;
use crate::{AdaptiveLimit, ClientKey, Nonce, RunLimit, TicketStatus};

const START: Moment = Moment(1_800_000_000_000_000);

fn at(ms: u64) -> Moment {
    Moment(START.0 + ms * 1_000)
}

fn bounds(run: u32) -> LaneLimits {
    let wait = Duration::from_secs(60);
    LaneLimits {
        run: RunLimit::Fixed(run),
        wait,
        wait_count: 100,
        wait_bytes: 1_000_000,
        next: None,
        weight: 100,
    }
}

fn ask() -> AdmissionRequest {
    AdmissionRequest {
        class: CostClass(1),
        client: ClientKey(1),
        bytes: 10,
        priority: 0,
        ticket: None,
        adopts: false,
        can_wait: true,
        nonce: None,
        passes: false,
        is_visiting: false,
    }
}

fn used(ms: u64) -> ServiceUse {
    ServiceUse { service: Duration::from_millis(ms), is_whole: true }
}

fn name(number: u8) -> LaneName {
    LaneName([number; 16])
}

fn runs(admission: &mut Admission, now: Moment, lane: LaneId) -> RequestKey {
    let offer = admission.offer(now, lane, ask());
    let Decision::Run(pass) = offer else { panic!("it runs at once: {offer:?}") };
    pass
}

fn waits(admission: &mut Admission, now: Moment, lane: LaneId) -> RequestKey {
    let offer = admission.offer(now, lane, ask());
    let Decision::Wait(pass, _) = offer else { panic!("it waits: {offer:?}") };
    pass
}

fn effects(admission: &mut Admission) -> Vec<AdmissionEffect> {
    admission.drain_effects().collect()
}

#[test]
fn a_permit_is_needed_in_the_lane_and_in_each_around_it() {
    let mut admission = Admission::new(START, bounds(2));
    let tenant = admission.lane(START, admission.root(), name(1), bounds(10));
    let site = admission.lane(START, tenant, name(2), bounds(10));
    let other = admission.lane(START, admission.root(), name(3), bounds(10));
    let first = runs(&mut admission, at(0), site);
    runs(&mut admission, at(0), tenant);
    let waiting = waits(&mut admission, at(1), other);
    let held_by = |admission: &Admission, lane| admission.explain(at(1), lane).map(|lane| lane.held_by);
    assert_eq!(held_by(&admission, other), Some("around"));
    assert_eq!(held_by(&admission, admission.root()), Some("own"));
    let running: Vec<u32> = [admission.root(), tenant, site]
        .map(|lane| admission.explain(at(1), lane).map_or(0, |lane| lane.running))
        .to_vec();
    assert_eq!(running, [2, 2, 1]);
    admission.release(at(20), first, used(20));
    assert_eq!(effects(&mut admission), [AdmissionEffect::Run(waiting)]);
}

#[test]
fn own_limits_and_limits_of_others_are_told_apart() {
    let mut admission = Admission::new(START, bounds(3));
    let root = admission.root();
    let tenants = [1, 2].map(|tenant| admission.lane(START, root, name(tenant), bounds(10)));
    let site = admission.lane(START, tenants[0], name(3), bounds(2));
    let crowds = |admission: &Admission| {
        let crowd = |lane| admission.crowds().find(|crowd| crowd.lane == lane).expect("it is a tenant's");
        tenants.map(crowd).map(|crowd| (crowd.running, crowd.waiting, crowd.holds_itself))
    };
    let running: Vec<RequestKey> = (0..2).map(|_| runs(&mut admission, at(0), site)).collect();
    assert_eq!(crowds(&admission), [(2, 0, false), (0, 0, false)]);
    waits(&mut admission, at(1), site);
    runs(&mut admission, at(1), tenants[1]);
    waits(&mut admission, at(1), tenants[1]);
    assert_eq!(crowds(&admission), [(2, 1, true), (1, 1, false)], "the second waits for the node's");
    admission.release(at(2), running[0], used(2));
    assert_eq!(crowds(&admission), [(1, 1, false), (2, 0, false)]);
}

#[test]
fn an_unknown_wait_is_not_told_and_a_known_one_is() {
    let mut admission = Admission::new(START, bounds(1));
    let root = admission.root();
    let first = runs(&mut admission, at(0), root);
    let Decision::Wait(second, prediction) = admission.offer(at(1), root, ask()) else {
        panic!("it is full")
    };
    assert_eq!((prediction.ahead, prediction.wait, prediction.at_most), (0, None, None));
    admission.release(at(100), first, used(100));
    assert_eq!(effects(&mut admission), [AdmissionEffect::Run(second)]);
    assert_eq!(admission.prediction(at(100), second), None, "it does not wait any more");
    let third = waits(&mut admission, at(130), root);
    let wait = |admission: &Admission, now| admission.prediction(now, third).and_then(|told| told.wait);
    assert_eq!(wait(&admission, at(130)), Some(Duration::from_millis(70)));
    assert_eq!(wait(&admission, at(170)), Some(Duration::from_millis(30)));
}

#[test]
fn the_line_is_full_in_time_not_in_number() {
    let mut admission = Admission::new(START, LaneLimits { wait: Duration::from_millis(250), ..bounds(1) });
    let root = admission.root();
    let first = runs(&mut admission, at(0), root);
    admission.release(at(100), first, used(100));
    runs(&mut admission, at(100), root);
    for _ in 0..2 {
        waits(&mut admission, at(100), root);
    }
    let Decision::Refused(AdmissionRefusal::Full(prediction)) = admission.offer(at(100), root, ask()) else {
        panic!("three requests of 100 ms are more than 250 ms")
    };
    assert_eq!((prediction.ahead, prediction.wait), (2, Some(Duration::from_millis(300))));
    assert_eq!(admission.explain(at(100), root).map(|lane| lane.counts.refused), Some(1));
}

#[test]
fn passing_request_is_counted_and_not_held_back() {
    let mut admission = Admission::new(START, bounds(1));
    let root = admission.root();
    let first = runs(&mut admission, at(0), root);
    let second = waits(&mut admission, at(0), root);
    let Decision::Run(third) = admission.offer(at(0), root, AdmissionRequest { passes: true, ..ask() })
    else {
        panic!("it passes")
    };
    admission.release(at(10), first, used(10));
    assert_eq!(effects(&mut admission), [], "two ran, and one may");
    admission.release(at(10), third, used(10));
    assert_eq!(effects(&mut admission), [AdmissionEffect::Run(second)]);
}

#[test]
fn a_visitor_gets_the_next_permit_and_is_not_sent_away() {
    let mut admission = Admission::new(START, LaneLimits { wait_count: 1, ..bounds(1) });
    let root = admission.root();
    let first = runs(&mut admission, at(0), root);
    let newcomer = waits(&mut admission, at(0), root);
    assert!(matches!(admission.offer(at(0), root, ask()), Decision::Refused(_)), "the line is full");
    let visits = AdmissionRequest { is_visiting: true, ..ask() };
    let Decision::Wait(visitor, _) = admission.offer(at(1), root, visits) else {
        panic!("it is let in before")
    };
    admission.release(at(10), first, used(10));
    assert_eq!(effects(&mut admission), [AdmissionEffect::Run(visitor)]);
    admission.release(at(20), visitor, used(10));
    assert_eq!(effects(&mut admission), [AdmissionEffect::Run(newcomer)]);

    // Where nobody is to wait, too, and however many: up to a bound.
    admission.set(at(20), root, LaneLimits { wait: Duration::ZERO, wait_count: 0, ..bounds(1) });
    let waiting = (0..VISITORS_WAITING_MAX + 1)
        .filter(|_| matches!(admission.offer(at(30), root, visits), Decision::Wait(..)))
        .count();
    assert_eq!(waiting, VISITORS_WAITING_MAX as usize);
}

#[test]
fn a_bound_that_is_lowered_waits_for_who_runs() {
    let mut admission = Admission::new(START, bounds(3));
    let root = admission.root();
    let running: Vec<RequestKey> = (0..3).map(|_| runs(&mut admission, at(0), root)).collect();
    let next = waits(&mut admission, at(0), root);
    assert!(admission.set(at(1), root, bounds(1)));
    for pass in &running[..2] {
        admission.release(at(10), *pass, used(10));
        assert_eq!(effects(&mut admission), []);
    }
    admission.release(at(11), running[2], used(11));
    assert_eq!(effects(&mut admission), [AdmissionEffect::Run(next)]);
}

#[test]
fn a_removed_lane_dismisses_who_waits_and_counts_who_runs() {
    let mut admission = Admission::new(START, bounds(1));
    let tenant = admission.lane(START, admission.root(), name(1), bounds(10));
    let site = admission.lane(START, tenant, name(2), bounds(10));
    let running = runs(&mut admission, at(0), site);
    let waiting = waits(&mut admission, at(0), site);
    admission.remove(at(1), tenant);
    assert_eq!(effects(&mut admission), [AdmissionEffect::Dismiss(waiting, AdmissionRefusal::NoLane)]);
    assert_eq!(admission.offer(at(2), site, ask()), Decision::Refused(AdmissionRefusal::NoLane));
    assert!(!admission.set(at(2), site, bounds(5)) && admission.explain(at(2), tenant).is_none());
    let again = admission.lane(at(2), admission.root(), name(1), bounds(10));
    assert_ne!(again, tenant);
    let other = waits(&mut admission, at(3), again);
    admission.cancel(at(4), waiting);
    admission.release(at(5), running, used(5));
    assert_eq!(effects(&mut admission), [AdmissionEffect::Run(other)]);
    assert_eq!(admission.lanes.len(), 2, "what is over is forgotten");
}

#[test]
fn lanes_nest_four_deep_and_no_deeper() {
    let mut admission = Admission::new(START, bounds(1));
    let mut lane = admission.root();
    for depth in 1..4 {
        let inner = admission.lane(START, lane, name(depth), bounds(1));
        assert_ne!(inner, lane);
        assert_eq!(admission.lane(START, lane, name(depth), bounds(1)), inner, "found by its name");
        lane = inner;
    }
    assert_eq!(admission.lane(START, lane, name(9), bounds(1)), lane);
}

#[test]
fn permits_are_lent_in_calm_and_recalled_when_somebody_waits() {
    let mut admission = Admission::new(START, bounds(10));
    let root = admission.root();
    let calm = admission.lane(START, root, name(1), bounds(100));
    let busy = admission.lane(START, root, name(2), bounds(100));
    assert_eq!(admission.lend(at(0), calm, 64), 5, "half of the node's");
    assert_eq!(admission.lend(at(0), calm, 64), 0);
    for _ in 0..5 {
        runs(&mut admission, at(0), busy);
    }
    assert_eq!(effects(&mut admission), []);
    let waiting = waits(&mut admission, at(1), busy);
    assert_eq!(effects(&mut admission), [AdmissionEffect::Recall(calm)]);
    let next = waits(&mut admission, at(1), busy);
    assert_eq!(effects(&mut admission), [], "asked once");
    admission.give_back(at(2), calm, 1);
    assert_eq!(effects(&mut admission), [AdmissionEffect::Run(waiting)]);
    admission.give_back(at(3), calm, 100);
    assert_eq!(effects(&mut admission), [AdmissionEffect::Run(next)]);
    assert_eq!(
        admission.explain(at(3), root).map(|root| root.running),
        Some(7),
        "no more come back than were lent"
    );
}

#[test]
fn where_there_was_a_line_nothing_is_lent_for_a_minute() {
    let mut admission = Admission::new(START, bounds(10));
    let root = admission.root();
    let lane = admission.lane(START, root, name(1), bounds(1));
    let other = admission.lane(START, root, name(2), bounds(10));
    let first = runs(&mut admission, at(0), lane);
    let second = waits(&mut admission, at(1), lane);
    admission.release(at(5_000), first, used(5_000));
    assert_eq!(effects(&mut admission), [AdmissionEffect::Run(second)]);
    admission.release(at(5_001), second, used(1));
    admission.set(at(5_001), lane, bounds(10));
    assert_eq!(admission.lend(at(64_999), lane, 4), 0, "who runs when the next line begins is to be known");
    assert_eq!(admission.lend(at(64_999), other, 4), 4);
    assert_eq!(admission.lend(at(65_000), lane, 1), 1);
}

#[test]
fn runs_on_lent_permits_teach_the_service_time() {
    let mut admission = Admission::new(START, bounds(10));
    let root = admission.root();
    for step in 0..10 {
        admission.learn(at(step), root, CostClass(1), used(80));
    }
    let failed = ServiceUse { is_whole: false, ..used(9_000) };
    admission.learn(at(11), root, CostClass(1), failed);
    let p50 = admission.explain(at(12), root).and_then(|root| root.service_p50).map(|p50| p50.as_millis());
    assert!(p50.is_some_and(|p50| (75..=85).contains(&p50)), "{p50:?}");
}

#[test]
fn an_adaptive_bound_sees_what_runs_inside() {
    let auto = LaneLimits { run: RunLimit::Auto { min: 2, max: 50 }, ..bounds(0) };
    let mut admission = Admission::new(START, auto);
    let root = admission.root();
    let site = admission.lane(START, root, name(1), bounds(100));
    let first = admission.explain(START, root).map_or(0, |root| root.run);
    assert_eq!(first, AdaptiveLimit::new(2, 50).run());
    // Service does not depend on how many run, so there is always more to be had.
    let mut ends = std::collections::VecDeque::new();
    for _ in 0..90 {
        if let Decision::Run(pass) = admission.offer(START, site, ask()) {
            ends.push_back((at(20), pass));
        }
    }
    assert_eq!(ends.len(), first as usize);
    let mut now = START;
    for _ in 0..5_000 {
        let (end, pass) = ends.pop_front().expect("somebody runs");
        now = end;
        admission.release(now, pass, used(20));
        admission.offer(now, site, ask());
        assert!(
            admission.tick(now).is_some_and(|next| next > now),
            "it looks at the clock while something runs"
        );
        for effect in admission.drain_effects() {
            let AdmissionEffect::Run(pass) = effect else { panic!("{effect:?}") };
            ends.push_back((later(now, Duration::from_millis(20)), pass));
        }
    }
    let found = admission.explain(now, root).map_or(0, |root| root.run);
    assert!(found >= 2 * first, "{found} after {first}");
    assert!(admission.set(now, root, bounds(3)));
    assert_eq!(admission.explain(now, root).map(|root| root.run), Some(3));
}

#[test]
fn a_ticket_of_a_lane_that_is_gone_says_nothing() {
    let next = crate::TicketPolicy {
        window: Duration::from_secs(5),
        horizon: Duration::from_secs(60),
        tickets: 10,
        share: 1.0,
    };
    let mut admission = Admission::new(START, bounds(10));
    let root = admission.root();
    let promising = LaneLimits { wait: Duration::from_millis(50), next: Some(next), ..bounds(1) };
    let lane = admission.lane(START, root, name(1), promising.clone());
    let first = runs(&mut admission, at(0), lane);
    admission.release(at(100), first, used(100));
    let running = runs(&mut admission, at(100), lane);
    let Decision::Next(promise) =
        admission.offer(at(100), lane, AdmissionRequest { nonce: Some(Nonce(7)), ..ask() })
    else {
        panic!("the line is full in time, and slots are given")
    };
    assert!(promise.is_new && promise.ticket.begins >= at(200), "after who runs: {promise:?}");
    let [AdmissionEffect::Store(record), AdmissionEffect::Store(paced)] = effects(&mut admission)[..] else {
        panic!("it is stored first, and by which pace")
    };
    assert!(matches!(paced, crate::TicketRecord::Paced { .. }), "{paced:?}");
    assert!(matches!(
        admission.standing(at(100), Nonce(7)),
        TicketStatus::Later { .. } | TicketStatus::Open { .. }
    ));
    assert_eq!(admission.lend(at(100), lane, 1), 0, "not while somebody holds a ticket");

    admission.remove(at(101), lane);
    assert_eq!(admission.standing(at(101), Nonce(7)), TicketStatus::Unknown);
    let lane = admission.lane(at(102), root, name(1), promising);
    assert_eq!(admission.standing(at(102), Nonce(7)), TicketStatus::Unknown);
    admission.restore(at(103), lane, record);
    assert_ne!(admission.standing(at(103), Nonce(7)), TicketStatus::Unknown, "unless it is told again");
    admission.release(at(110), running, used(10));
    let shows = AdmissionRequest { ticket: Some(promise.ticket), ..ask() };
    assert!(matches!(admission.offer(promise.ticket.begins, lane, shows), Decision::Run(_)));
    assert_eq!(
        admission.offer(promise.ticket.begins, lane, shows),
        Decision::Refused(AdmissionRefusal::Replayed)
    );
    let counts = admission.explain(promise.ticket.begins, lane).map(|lane| lane.counts);
    assert!(counts.is_some_and(|counts| (counts.kept, counts.refused) == (1, 1)), "{counts:?}");
}

#[test]
fn the_line_goes_before_a_slot_as_far_as_there_is_time() {
    let next = crate::TicketPolicy {
        window: Duration::from_secs(5),
        horizon: Duration::from_secs(60),
        tickets: 10,
        share: 1.0,
    };
    let mut admission = Admission::new(START, bounds(10));
    let root = admission.root();
    let lane = admission.lane(START, root, name(1), LaneLimits { next: Some(next), ..bounds(1) });
    let first = runs(&mut admission, at(0), lane);
    admission.release(at(100), first, used(100));
    let _running = runs(&mut admission, at(100), lane);
    for _ in 0..3 {
        waits(&mut admission, at(100), lane);
    }
    let full = LaneLimits { next: Some(next), wait_count: 3, ..bounds(1) };
    admission.set(at(100), lane, full);
    let offer = admission.offer(at(100), lane, AdmissionRequest { nonce: Some(Nonce(7)), ..ask() });
    let Decision::Next(promise) = offer else { panic!("there is no place in line: {offer:?}") };
    assert_eq!(promise.ahead, 3);
    // Of those in line one has time to run before the slot begins; for the others the holder goes first.
    let soon = Moment(promise.ticket.begins.0 - 50_000);
    let begins_in = Duration::from_millis(50);
    assert_eq!(admission.standing(soon, Nonce(7)), TicketStatus::Later { begins_in, ahead: 1 });
}

#[test]
fn a_ticket_is_spent_for_good_when_its_request_has_ended() {
    let promising = promising();
    let mut admission = Admission::new(START, bounds(10));
    let lane = admission.lane(START, admission.root(), name(1), promising.clone());
    let first = runs(&mut admission, at(0), lane);
    admission.release(at(1_000), first, used(1_000));
    let first = runs(&mut admission, at(1_000), lane);
    effects(&mut admission);
    let Decision::Next(promise) = admission.offer(
        at(1_000),
        lane,
        AdmissionRequest { nonce: Some(Nonce(7)), client: ClientKey(7), ..ask() },
    ) else {
        panic!("a second is more than 50 ms")
    };
    let stored = effects(&mut admission);
    let ticket = promise.ticket;
    let shows = AdmissionRequest { ticket: Some(ticket), client: ClientKey(7), ..ask() };
    admission.release(at(2_000), first, used(1_000));
    let Decision::Run(pass) = admission.offer(ticket.begins, lane, shows) else {
        panic!("its slot has begun")
    };
    assert_eq!(admission.offer(ticket.begins, lane, shows), Decision::Refused(AdmissionRefusal::Replayed));
    assert_eq!(effects(&mut admission), [], "nothing says yet that it was used");
    // The process is killed: with what it has stored, the ticket is as good as it was.
    let mut restarted = Admission::new(ticket.begins, bounds(10));
    let again = restarted.lane(ticket.begins, restarted.root(), name(1), promising);
    for effect in stored {
        let AdmissionEffect::Store(record) = effect else { continue };
        restarted.restore(ticket.begins, again, record);
    }
    assert!(matches!(restarted.offer(ticket.begins, again, shows), Decision::Run(_)));
    // It is not: the request ends, and that is stored.
    admission.release(ticket.ends, pass, used(1_000));
    let spent = effects(&mut admission);
    assert!(
        matches!(spent[..], [AdmissionEffect::Store(crate::TicketRecord::Spent { nonce: Nonce(7), .. })]),
        "{spent:?}"
    );
}

/// One at a time, hardly a line, and tickets for slots of ten seconds.
fn promising() -> LaneLimits {
    let next = crate::TicketPolicy {
        window: Duration::from_secs(10),
        horizon: Duration::from_secs(600),
        tickets: 10,
        share: 1.0,
    };
    LaneLimits { wait: Duration::from_millis(50), next: Some(next), ..bounds(1) }
}

#[test]
fn called_client_is_let_in_after_a_restart() {
    let promising = promising();
    let mut admission = Admission::new(START, bounds(10));
    let lane = admission.lane(START, admission.root(), name(1), promising.clone());
    let first = runs(&mut admission, at(0), lane);
    admission.release(at(1_000), first, used(1_000));
    runs(&mut admission, at(1_000), lane);
    let asks = AdmissionRequest { nonce: Some(Nonce(7)), client: ClientKey(7), ..ask() };
    let Decision::Next(promise) = admission.offer(at(1_000), lane, asks) else {
        panic!("a second is more than 50 ms")
    };
    let ticket = promise.ticket;
    let client = ClientKey(7);
    assert!(ticket.begins > at(1_600));
    for is_called in [false, true] {
        let mut restarted = Admission::new(at(1_500), bounds(10));
        let again = restarted.lane(at(1_500), restarted.root(), name(1), promising.clone());
        restarted.restore(at(1_500), again, crate::TicketRecord::Promised { ticket, client });
        if is_called {
            restarted.restore(at(1_500), again, crate::TicketRecord::Called { nonce: Nonce(7) });
        }
        runs(&mut restarted, at(1_600), again);
        let offer =
            restarted.offer(at(1_600), again, AdmissionRequest { ticket: Some(ticket), client, ..ask() });
        assert_eq!(matches!(offer, Decision::Early(_)), !is_called, "{offer:?}");
    }
}

#[test]
fn after_a_restart_slots_are_given_before_anything_has_ended() {
    let promising = promising();
    let mut admission = Admission::new(START, bounds(10));
    let lane = admission.lane(START, admission.root(), name(1), promising.clone());
    let first = runs(&mut admission, at(0), lane);
    admission.release(at(1_000), first, used(1_000));
    runs(&mut admission, at(1_000), lane);
    let asks =
        |nonce| AdmissionRequest { nonce: Some(Nonce(nonce)), client: ClientKey(nonce as u64), ..ask() };
    assert!(matches!(admission.offer(at(1_000), lane, asks(7)), Decision::Next(_)));
    assert!(matches!(admission.offer(at(1_000), lane, asks(8)), Decision::Next(_)));
    let mut now = at(1_000);
    while let Some(due) = admission.tick(now).filter(|due| *due < at(15_000)) {
        now = due;
    }
    let stored: Vec<crate::TicketRecord> = effects(&mut admission)
        .into_iter()
        .filter_map(|effect| if let AdmissionEffect::Store(record) = effect { Some(record) } else { None })
        .collect();
    let paced = crate::TicketRecord::Paced { lane: name(1), service_us: 1_000_000 };
    assert_eq!(stored.iter().filter(|record| **record == paced).count(), 1, "{stored:?}");
    let again = admission.promises();
    assert!(again.len() == 3 && again.iter().all(|record| stored.contains(record)), "{again:?}");

    let mut restarted = Admission::new(now, bounds(10));
    let lane = restarted.lane(now, restarted.root(), name(1), promising);
    runs(&mut restarted, now, lane);
    let Decision::Wait(waiting, prediction) = restarted.offer(now, lane, asks(9)) else {
        panic!("no rate is known")
    };
    assert_eq!((prediction.wait, prediction.guess), (None, None));
    restarted.cancel(now, waiting);
    for record in again {
        restarted.restore(now, lane, record);
    }
    let offer = restarted.offer(now, lane, asks(9));
    assert!(matches!(offer, Decision::Next(promise) if promise.is_new), "{offer:?}");
    let told = restarted.explain(now, lane).map(|lane| lane.wait);
    assert_eq!(told, Some(None), "to decide by, not to tell");
}

// === Another node's tickets ===

fn moved(begins: Moment, ends: Moment, number: u128) -> crate::Ticket {
    crate::Ticket { lane: name(1), begins, ends, epoch: 0, nonce: Nonce(number) }
}

/// Shown by a client of this number.
fn shows(ticket: crate::Ticket, client: u64) -> AdmissionRequest {
    AdmissionRequest { ticket: Some(ticket), client: ClientKey(client), adopts: true, ..ask() }
}

#[test]
fn a_moved_ticket_goes_before_newcomers_once_across_restarts() {
    let mut admission = Admission::new(START, bounds(10));
    let promising = LaneLimits { next: promising().next, ..bounds(1) };
    let lane = admission.lane(START, admission.root(), name(1), promising.clone());
    let running = runs(&mut admission, at(0), lane);
    let newcomer = waits(&mut admission, at(1), lane);
    let shows = shows(moved(at(0), at(10_000), 7), 7);
    let unknown = admission.offer(at(2), lane, AdmissionRequest { adopts: false, ..shows });
    let Decision::Wait(unknown, told) = unknown else {
        panic!("one of this node's would be known: {unknown:?}")
    };
    assert_eq!(told.ahead, 1);
    admission.cancel(at(2), unknown);
    effects(&mut admission);
    let Decision::Wait(holder, told) = admission.offer(at(3), lane, shows) else {
        panic!("there is no room")
    };
    assert_eq!(told.ahead, 0);
    let mut stored = effects(&mut admission);
    let promised =
        crate::TicketRecord::Promised { ticket: moved(at(0), at(10_000), 7), client: ClientKey(7) };
    assert_eq!(stored, [AdmissionEffect::Store(promised)]);
    assert_eq!(admission.offer(at(4), lane, shows), Decision::Refused(AdmissionRefusal::Replayed));
    admission.release(at(100), running, used(100));
    assert_eq!(effects(&mut admission), [AdmissionEffect::Run(holder)]);
    admission.release(at(200), holder, used(100));
    stored.extend(effects(&mut admission));
    assert!(stored.contains(&AdmissionEffect::Run(newcomer)));
    assert_eq!(admission.offer(at(201), lane, shows), Decision::Refused(AdmissionRefusal::Replayed));
    let counts = admission.explain(at(201), lane).map(|lane| (lane.counts.adopted, lane.counts.kept));
    assert_eq!((counts, admission.promises().len()), (Some((1, 1)), 0));

    let mut restarted = Admission::new(at(300), bounds(10));
    let lane = restarted.lane(at(300), restarted.root(), name(1), promising);
    for effect in stored {
        if let AdmissionEffect::Store(record) = effect {
            restarted.restore(at(300), lane, record);
        }
    }
    assert_eq!(restarted.offer(at(301), lane, shows), Decision::Refused(AdmissionRefusal::Replayed));
}

#[test]
fn another_nodes_ticket_is_early_late_or_over_as_it_says_itself() {
    let mut admission = Admission::new(START, bounds(10));
    let lane =
        admission.lane(START, admission.root(), name(1), LaneLimits { next: promising().next, ..bounds(1) });
    let now = at(2_000_000);
    runs(&mut admission, now, lane);
    waits(&mut admission, now, lane);
    let early = moved(at(2_030_000), at(2_040_000), 1);
    let Decision::Early(promise) = admission.offer(now, lane, shows(early, 1)) else {
        panic!("its slot is to come")
    };
    assert_eq!((promise.ticket, promise.is_new), (early, false));
    let standing = admission.standing(now, early.nonce);
    let is_told = |begins_in| begins_in == Duration::from_secs(30);
    assert!(matches!(standing, TicketStatus::Later { begins_in, .. } if is_told(begins_in)), "{standing:?}");
    // Its client has no second one meanwhile, wherever that is from.
    let other = admission.offer(now, lane, shows(moved(at(1_990_000), at(2_010_000), 2), 1));
    assert!(matches!(other, Decision::Wait(_, told) if told.ahead == 1), "{other:?}");
    let late = admission.offer(now, lane, shows(moved(at(1_900_000), at(1_990_000), 3), 3));
    assert!(matches!(late, Decision::Wait(_, told) if told.ahead == 0), "{late:?}");
    let over = admission.offer(now, lane, shows(moved(at(0), at(10_000), 4), 4));
    assert_eq!(over, Decision::Refused(AdmissionRefusal::Expired));
    // What was promised is kept also where nothing is promised any more.
    let silent = admission.lane(now, admission.root(), name(2), bounds(1));
    runs(&mut admission, now, silent);
    waits(&mut admission, now, silent);
    let open = crate::Ticket { lane: name(2), ..moved(at(1_990_000), at(2_010_000), 5) };
    let open = admission.offer(now, silent, shows(open, 5));
    assert!(matches!(open, Decision::Wait(_, told) if told.ahead == 0), "{open:?}");
}
