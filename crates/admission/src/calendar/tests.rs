//! A calendar under crowds, no-shows, jumps of the clock, shrinking capacity and restarts.

use proptest::prelude::*;

use super::*;
use crate::calendar::capacity::{BOOKED_MAX, SHOW_RATE_MIN};

const LANE: LaneName = LaneName(*b"lane of the shop");
const START: Moment = Moment(1_800_000_000_000_000);
const NEXT: TicketPolicy = TicketPolicy {
    window: Duration::from_secs(60),
    horizon: Duration::from_secs(3_600),
    tickets: 10_000,
    share: 0.8,
};

fn at(seconds: u64) -> Moment {
    Moment(START.0 + seconds * 1_000_000)
}

fn calendar(next: TicketPolicy) -> TicketCalendar {
    TicketCalendar::new(LANE, Some(next))
}

/// A promise to the client of this number, whose ticket has the same number.
fn reserve(
    calendar: &mut TicketCalendar,
    now: Moment,
    earliest: Moment,
    rate: f64,
    client: u64,
) -> Option<SlotPromise> {
    let promise = calendar.reserve(now, earliest, rate, ClientKey(client), Nonce(client.into()))?;
    calendar.listen(promise.ticket.nonce, true);
    Some(promise)
}

/// What must hold after every call.
fn check(calendar: &TicketCalendar) {
    let in_slots: u32 = calendar.slots.row().iter().map(|slot| slot.out).sum();
    let with_slot = calendar
        .holders
        .values()
        .filter(|holder| holder.slot.is_some_and(|slot| calendar.slots.get(slot).is_some()))
        .count();
    assert_eq!(in_slots as usize, with_slot, "tickets counted in slots and held");
    let outside: u32 = calendar.slots.row().iter().map(|slot| slot.outside).sum();
    // Another node's ticket may be good for longer than the slot it is counted in.
    let is_in_row =
        |nonce: &&Nonce| calendar.holders[*nonce].slot.is_some_and(|slot| calendar.slots.get(slot).is_some());
    assert_eq!(outside as usize, calendar.callable.values().filter(is_in_row).count(), "those outside");
    let called =
        calendar.holders.values().filter(|holder| matches!(holder.state, HolderState::Called(_))).count();
    assert_eq!(called, calendar.calls.len(), "those called and their places");
    let open = calendar.holders.values().filter(|holder| !holder.has_ended).count();
    assert_eq!(open, calendar.deadlines.len() + calendar.restored.len(), "deadlines");
    let late =
        calendar.holders.values().filter(|holder| holder.has_ended && holder.state != HolderState::InLine);
    assert_eq!(late.count(), calendar.late.len(), "late ones");
    assert!(calendar.callable.values().all(|nonce| calendar.holders[nonce].state == HolderState::Out));
    assert!(calendar.listening.iter().all(|(place, nonce)| calendar.callable.get(place) == Some(nonce)));
    assert!(calendar.clients.values().all(|nonce| calendar.holders.contains_key(nonce)));
    assert_eq!(calendar.spent.len(), calendar.spent_by_end.len());
    let adopted = calendar.holders.values().filter(|holder| holder.is_adopted);
    assert_eq!(adopted.count(), calendar.adopted, "other nodes' tickets");
    let good = || calendar.holders.values().filter(|holder| !holder.has_ended);
    let clients: HashSet<ClientKey> = good().map(|holder| holder.client).collect();
    assert_eq!(clients.len(), good().count(), "each client has one good ticket");
    let row = calendar.slots.row();
    assert!(row.iter().zip(row.iter().skip(1)).all(|(one, next)| one.ends == next.begins), "a gap");
}

fn sum(tally: &PromiseCounts) -> u64 {
    tally.kept + tally.broken + tally.late + tally.never_came
}

// === Promises and room ===

#[test]
fn those_who_are_due_come_slot_by_slot() {
    let mut calendar = calendar(NEXT);
    for client in 0..60 {
        // At this rate a slot has room for some thirty.
        assert!(reserve(&mut calendar, START, at(60), 0.5, client).is_some());
    }
    let first = calendar.slots.row().iter().find(|slot| slot.out > 0).expect("something is promised");
    let begins = first.begins;
    let ends = first.ends;
    let out = f64::from(first.out);
    assert!(out < 60.0);
    let middle = Moment((begins.0 + ends.0) / 2);
    let due = [START, begins, middle, ends, at(3_000)].map(|until| calendar.due(START, until));
    assert_eq!(due, [0.0, 0.0, out / 2.0, out, 60.0]);
    assert!(calendar.come(begins, Nonce(0)) && calendar.ran(begins, Nonce(0)).is_some());
    assert_eq!(calendar.due(begins, ends), out - 1.0);
    assert_eq!(
        calendar.due(middle, ends),
        (out - 1.0) / 2.0,
        "who has not come in half of the slot may never"
    );
    assert!(calendar.call(begins).is_some());
    assert_eq!(calendar.due(begins, ends), out, "with the one who was called, who is of a later slot");
    assert!(
        calendar.due(middle, ends) < (out - 1.0) / 2.0 + 0.01,
        "if he does not come soon, he is not expected"
    );
}

#[test]
fn a_slot_begins_when_wanted_first_and_has_its_length() {
    let mut calendar = calendar(NEXT);
    let promise = reserve(&mut calendar, START, at(30), 1.0, 1).expect("the calendar is empty");
    assert_eq!((promise.ticket.begins, promise.ticket.ends), (at(30), at(90)));
    assert_eq!((promise.ticket.lane, promise.ticket.nonce), (LANE, Nonce(1)));
    assert!(promise.is_new);
    assert_eq!((promise.ahead, calendar.promised()), (0, 1));
}

#[test]
fn a_slot_holds_its_share_and_then_the_next_one_is_promised() {
    let mut calendar = calendar(NEXT);
    // 1 a second x 60 s x 0.8.
    let begins: Vec<u64> = (0..100)
        .map(|client| reserve(&mut calendar, START, START, 1.0, client).expect("there is room"))
        .inspect(|promise| assert_eq!(u128::from(promise.ahead), promise.ticket.nonce.0))
        .map(|promise| (promise.ticket.begins.0 - START.0) / 1_000_000)
        .collect();
    assert_eq!(begins.iter().filter(|begins| **begins == 0).count(), 48);
    assert_eq!(begins.iter().filter(|begins| **begins == 60).count(), 48);
    assert_eq!(begins.iter().filter(|begins| **begins == 120).count(), 4);
}

#[test]
fn a_client_has_one_good_ticket_however_often_it_asks() {
    let mut calendar = calendar(NEXT);
    let first = reserve(&mut calendar, START, at(30), 1.0, 1).expect("there is room");
    for second in 0..89 {
        let again = calendar
            .reserve(at(second), at(500), 1.0, ClientKey(1), Nonce(1_000 + u128::from(second)))
            .expect("it has one");
        assert_eq!(again, SlotPromise { is_new: false, ..first });
    }
    assert_eq!(calendar.promised(), 1);
    // Its slot has ended: the late ticket makes way for a new one.
    let new = calendar.reserve(at(100), at(110), 1.0, ClientKey(1), Nonce(2)).expect("there is room");
    assert!(new.is_new);
    assert_eq!(calendar.show(at(100), &first.ticket), ShownTicket::Unknown);
    assert_eq!((calendar.promised(), calendar.tally().never_came), (1, 1));
    check(&calendar);
}

#[test]
fn nothing_is_promised_beyond_horizon_or_ticket_limit() {
    let mut calendar = calendar(TicketPolicy { tickets: 3_000, ..NEXT });
    let given =
        (0..5_000).filter(|client| reserve(&mut calendar, START, START, 1.0, *client).is_some()).count();
    // Slots begin in the 0th to the 60th minute.
    assert_eq!(given, 61 * 48);
    let mut calendar = TicketCalendar::new(LANE, Some(TicketPolicy { tickets: 100, ..NEXT }));
    let given =
        (0..5_000).filter(|client| reserve(&mut calendar, START, START, 1.0, *client).is_some()).count();
    assert_eq!(given, 100);
    assert_eq!(reserve(&mut calendar, START, at(3_601), 1.0, 9_000), None);
    assert_eq!(reserve(&mut TicketCalendar::new(LANE, None), START, START, 1.0, 1), None);
}

#[test]
fn a_rate_that_is_none_promises_nothing() {
    for rate in [0.0, -1.0, f64::NAN, f64::NEG_INFINITY, 1e-9] {
        assert_eq!(reserve(&mut calendar(NEXT), START, START, rate, 1), None, "{rate}");
    }
    assert!(reserve(&mut calendar(NEXT), START, START, f64::INFINITY, 1).is_some());
    for earliest in [Moment(0), Moment(u64::MAX)] {
        let promise = reserve(&mut calendar(NEXT), START, earliest, 1.0, 1);
        assert_eq!(promise.is_some(), earliest == Moment(0), "what is earliest in the past is now");
    }
}

#[test]
fn a_slow_lane_has_slots_long_enough_for_one() {
    let mut calendar = calendar(NEXT);
    // A report every five minutes, and four of five promised.
    let first = reserve(&mut calendar, START, START, 1.0 / 300.0, 1).expect("within the horizon").ticket;
    let second = reserve(&mut calendar, START, START, 1.0 / 300.0, 2).expect("within the horizon").ticket;
    assert_eq!(first.ends.0 - first.begins.0, 375_000_000);
    assert_eq!(second.begins, first.ends);
}

#[test]
fn a_tiny_window_with_a_far_horizon_keeps_the_row_short() {
    let next = TicketPolicy { window: Duration::ZERO, horizon: Duration::from_secs(86_400), ..NEXT };
    let mut calendar = calendar(next);
    assert!(reserve(&mut calendar, START, at(86_000), 1e6, 1).is_some());
    assert!(calendar.slots.row().len() <= SLOTS_MAX);
    check(&calendar);
}

#[test]
fn a_window_that_is_changed_keeps_the_promises_made_before() {
    let mut calendar = calendar(NEXT);
    let old = reserve(&mut calendar, START, at(30), 1.0, 1).expect("there is room").ticket;
    calendar.set(Some(TicketPolicy { window: Duration::from_secs(10), ..NEXT }));
    let new = reserve(&mut calendar, at(1), at(90), 1.0, 2).expect("there is room").ticket;
    assert_eq!((new.begins, new.ends), (at(90), at(100)));
    calendar.set(None);
    assert_eq!(reserve(&mut calendar, at(2), at(90), 1.0, 3), None);
    assert_eq!(calendar.show(at(89), &old), ShownTicket::Open { until: at(90) });
    assert_eq!(calendar.show(at(99), &new), ShownTicket::Open { until: at(100) });
    check(&calendar);
}

#[test]
fn a_promise_that_could_not_be_stored_is_none() {
    let mut calendar = calendar(NEXT);
    let ticket = reserve(&mut calendar, START, START, 1.0, 1).expect("there is room").ticket;
    assert_eq!(calendar.forget(START, Nonce(1)), Some(TicketRecord::Forgotten { nonce: Nonce(1) }));
    assert_eq!(calendar.forget(START, Nonce(1)), None);
    assert_eq!(calendar.show(START, &ticket), ShownTicket::Unknown);
    assert_eq!((calendar.promised(), calendar.tally()), (0, PromiseCounts::default()));
    assert!(reserve(&mut calendar, START, START, 1.0, 1).expect("there is room").is_new);
    check(&calendar);
}

// === Holders ===

#[test]
fn a_holder_in_time_runs_and_the_ticket_is_used_up() {
    let mut calendar = calendar(NEXT);
    let ticket = reserve(&mut calendar, START, at(30), 1.0, 1).expect("there is room").ticket;
    assert_eq!(calendar.show(at(30), &ticket), ShownTicket::Open { until: at(90) });
    assert_eq!(
        calendar.standing(at(40), Nonce(1)),
        TicketStatus::Open { for_another: Duration::from_secs(50) }
    );
    assert_eq!(calendar.ran(at(30), Nonce(1)), None, "it has not come");
    assert!(calendar.come(at(30), Nonce(1)));
    assert!(!calendar.come(at(30), Nonce(1)), "two requests with one ticket");
    assert_eq!(calendar.show(at(31), &ticket), ShownTicket::Used);
    let until = after(at(90), LATE_FOR);
    assert_eq!(calendar.ran(at(89), Nonce(1)), Some(TicketRecord::Spent { nonce: Nonce(1), until }));
    assert_eq!(calendar.show(at(89), &ticket), ShownTicket::Used);
    assert_eq!(calendar.standing(at(89), Nonce(1)), TicketStatus::Used);
    assert!(!calendar.come(at(89), Nonce(1)));
    assert_eq!(calendar.tally(), PromiseCounts { promised: 1, kept: 1, ..PromiseCounts::default() });
    // It is remembered as used until it is too old whatever it was.
    assert_eq!(calendar.show(Moment(until.0 - 1), &ticket), ShownTicket::Used);
    assert_eq!(calendar.show(until, &ticket), ShownTicket::Expired);
    assert_eq!(calendar.tick(until), None);
    check(&calendar);
}

#[test]
fn a_holder_who_is_early_is_told_how_long_still() {
    let mut calendar = calendar(NEXT);
    reserve(&mut calendar, START, at(30), 1.0, 1);
    let promise = reserve(&mut calendar, START, at(30), 1.0, 2).expect("there is room");
    assert_eq!(
        calendar.show(at(29), &promise.ticket),
        ShownTicket::Early(SlotPromise { is_new: false, ..promise })
    );
    let begins_in = Duration::from_secs(20);
    assert_eq!(calendar.standing(at(10), Nonce(2)), TicketStatus::Later { begins_in, ahead: 1 });
}

#[test]
fn a_holder_who_leaves_the_line_may_come_again() {
    let mut calendar = calendar(NEXT);
    let ticket = reserve(&mut calendar, START, at(30), 1.0, 1).expect("there is room").ticket;
    assert!(calendar.come(at(40), Nonce(1)));
    calendar.reinstate_holder(at(41), Nonce(1));
    assert_eq!(calendar.show(at(42), &ticket), ShownTicket::Open { until: at(90) });
    assert!(calendar.come(at(43), Nonce(1)));
    assert!(calendar.ran(at(44), Nonce(1)).is_some());
    assert_eq!(calendar.tally().kept, 1);
    calendar.reinstate_holder(at(45), Nonce(1));
    assert_eq!(calendar.show(at(45), &ticket), ShownTicket::Used, "after it ran nothing brings it back");
    check(&calendar);
}

#[test]
fn a_late_holder_may_come_for_a_while_and_is_counted_as_late() {
    let mut calendar = calendar(NEXT);
    let ticket = reserve(&mut calendar, START, at(30), 1.0, 1).expect("there is room").ticket;
    calendar.tick(at(30));
    assert_eq!(calendar.show(at(90), &ticket), ShownTicket::Late);
    assert_eq!(calendar.standing(at(90), Nonce(1)), TicketStatus::Late);
    assert!(calendar.come(at(100), Nonce(1)));
    assert!(calendar.ran(at(101), Nonce(1)).is_some());
    assert_eq!(calendar.tally(), PromiseCounts { promised: 1, late: 1, ..PromiseCounts::default() });

    let ticket = reserve(&mut calendar, at(200), at(230), 1.0, 2).expect("there is room").ticket;
    calendar.tick(at(230));
    let over = after(ticket.ends, LATE_FOR);
    assert_eq!(calendar.show(Moment(over.0 - 1), &ticket), ShownTicket::Late);
    assert_eq!(calendar.show(over, &ticket), ShownTicket::Expired);
    assert!(!calendar.come(over, Nonce(2)));
    assert_eq!(
        calendar.tally(),
        PromiseCounts { promised: 2, late: 1, never_came: 1, ..PromiseCounts::default() }
    );
    check(&calendar);
}

#[test]
fn a_ticket_of_another_lane_or_another_slot_is_unknown() {
    let mut calendar = calendar(NEXT);
    let ticket = reserve(&mut calendar, START, at(30), 1.0, 1).expect("there is room").ticket;
    let foreign = Ticket { lane: LaneName([9; 16]), ..ticket };
    let shifted = Ticket { begins: START, ..ticket };
    for other in [foreign, shifted, Ticket { nonce: Nonce(2), ..ticket }] {
        assert_eq!(calendar.show(at(40), &other), ShownTicket::Unknown);
    }
}

// === Early calls ===

#[test]
fn earliest_promise_is_called_first_and_once() {
    let mut calendar = calendar(NEXT);
    let tickets: Vec<Ticket> = (0..60)
        .map(|client| reserve(&mut calendar, START, at(30), 1.0, client).expect("there is room").ticket)
        .collect();
    for client in 0..60 {
        let (nonce, until) = calendar.call(at(1)).expect("somebody is out");
        assert_eq!((nonce, until), (Nonce(client), after(at(1), CALL_FOR)));
    }
    assert_eq!((calendar.call(at(1)), calendar.called()), (None, 60));
    assert_eq!(calendar.show(at(2), &tickets[5]), ShownTicket::Open { until: after(at(1), CALL_FOR) });
    assert!(calendar.come(at(2), Nonce(5)) && calendar.ran(at(3), Nonce(5)).is_some());
    assert_eq!(calendar.called(), 59);
    // The places are kept no longer; the slots are.
    assert!(matches!(calendar.show(after(at(1), CALL_FOR), &tickets[6]), ShownTicket::Early(_)));
    assert_eq!((calendar.called(), calendar.call(at(12))), (0, None));
    assert_eq!(calendar.show(at(30), &tickets[6]), ShownTicket::Open { until: at(90) });
    assert_eq!(
        calendar.tally(),
        PromiseCounts { promised: 60, kept: 1, called_early: 60, ..PromiseCounts::default() }
    );
    check(&calendar);
}

#[test]
fn a_place_that_came_free_early_is_promised_again() {
    let mut calendar = calendar(NEXT);
    for client in 0..48 {
        reserve(&mut calendar, START, at(30), 1.0, client);
    }
    assert!(
        reserve(&mut calendar, START, at(30), 1.0, 48).is_some_and(|promise| promise.ticket.begins == at(90))
    );
    let (nonce, _) = calendar.call(at(1)).expect("somebody is out");
    assert!(calendar.come(at(2), nonce) && calendar.ran(at(2), nonce).is_some());
    let freed = reserve(&mut calendar, at(3), at(30), 1.0, 49).expect("there is room");
    assert_eq!((freed.ticket.begins, freed.ahead), (at(30), 47));
}

#[test]
fn only_who_would_hear_it_is_called() {
    let mut calendar = calendar(NEXT);
    for client in 0..3 {
        reserve(&mut calendar, START, at(30), 1.0, client);
    }
    calendar.listen(Nonce(0), false);
    calendar.listen(Nonce(99), true);
    check(&calendar);
    assert_eq!(calendar.call(at(1)).map(|(nonce, _)| nonce), Some(Nonce(1)));
    calendar.listen(Nonce(0), true);
    assert_eq!(calendar.call(at(1)).map(|(nonce, _)| nonce), Some(Nonce(0)));
    calendar.listen(Nonce(0), true);
    assert_eq!(calendar.call(at(1)).map(|(nonce, _)| nonce), Some(Nonce(2)), "each is called once");
    assert_eq!(calendar.call(at(1)), None);
}

#[test]
fn nobody_is_called_whose_slot_is_open() {
    let mut calendar = calendar(NEXT);
    reserve(&mut calendar, START, at(30), 1.0, 1);
    assert_eq!(calendar.call(at(30)), None);
    assert_eq!(calendar.call(at(29)), None, "time does not go back");
}

#[test]
fn places_kept_at_once_are_bounded() {
    let mut calendar = calendar(NEXT);
    for client in 0..2 * CALLS_MAX as u64 {
        reserve(&mut calendar, START, at(30), 1_000.0, client);
    }
    assert_eq!(std::iter::from_fn(|| calendar.call(at(1))).count(), CALLS_MAX);
    assert_eq!(std::iter::from_fn(|| calendar.call(at(12))).count(), CALLS_MAX);
}

// === No-shows ===

/// Full slots of which this part of the holders comes.
fn slots_with_shows(calendar: &mut TicketCalendar, slots: u64, part: f64) -> Moment {
    let mut now = START;
    let mut client = 0;
    for _ in 0..slots {
        let first = reserve(calendar, now, now, 1.0, client).expect("there is room").ticket;
        let mut nonces = vec![first.nonce];
        loop {
            client += 1;
            let ticket = reserve(calendar, now, now, 1.0, client).expect("there is room").ticket;
            if ticket.begins != first.begins {
                calendar.forget(now, ticket.nonce);
                break;
            }
            nonces.push(ticket.nonce);
        }
        calendar.tick(first.begins);
        let come = (nonces.len() as f64 * part).round() as usize;
        for nonce in &nonces[..come] {
            assert!(calendar.come(first.begins, *nonce) && calendar.ran(first.begins, *nonce).is_some());
        }
        now = first.ends;
        calendar.tick(now);
        check(calendar);
    }
    now
}

/// How many tickets of one slot are promised, at one request a second in a minute.
fn room(calendar: &mut TicketCalendar, now: Moment) -> usize {
    let first = reserve(calendar, now, now, 1.0, 1 << 32).expect("there is room").ticket;
    let others =
        (1 + (1 << 32)..).map(|client| reserve(calendar, now, now, 1.0, client).expect("there is room"));
    1 + others.take_while(|promise| promise.ticket.begins == first.begins).count()
}

#[test]
fn share_of_absent_holders_is_learned_and_raises_room() {
    let mut calendar = calendar(TicketPolicy { share: 0.5, ..NEXT });
    let now = slots_with_shows(&mut calendar, 40, 0.7);
    assert!((calendar.shows.rate() - 0.7).abs() < 0.03, "{}", calendar.shows.rate());
    let room = room(&mut calendar, now) as f64;
    assert!((room - 60.0 * 0.5 / calendar.shows.rate()).abs() <= 1.0, "{room}");
}

#[test]
fn overbooking_ends_at_its_bounds() {
    // Half of the holders is reckoned with, even if none comes.
    let mut low = calendar(TicketPolicy { share: 0.3, ..NEXT });
    let now = slots_with_shows(&mut low, 40, 0.0);
    assert_eq!(low.shows.rate(), SHOW_RATE_MIN);
    assert_eq!(room(&mut low, now), 36);
    // Should all come once, they can all run.
    let mut high = calendar(NEXT);
    let now = slots_with_shows(&mut high, 40, 0.0);
    assert_eq!(room(&mut high, now) as f64, 60.0 * BOOKED_MAX);
    // Where everything is promised anyway, nothing more is.
    let mut whole = calendar(TicketPolicy { share: 1.0, ..NEXT });
    let now = slots_with_shows(&mut whole, 40, 0.5);
    assert_eq!(room(&mut whole, now), 60);
}

#[test]
fn returning_holders_raise_the_learned_rate_again() {
    let mut calendar = calendar(TicketPolicy { share: 0.5, ..NEXT });
    let mut later = slots_with_shows(&mut calendar, 40, 0.5).0;
    let low = calendar.shows.rate();
    for client in 1 << 33..(1 << 33) + 2_000 {
        let nonce = Nonce(u128::from(client));
        let promise = calendar.reserve(Moment(later), Moment(later), 1.0, ClientKey(client), nonce);
        let ticket = promise.expect("there is room").ticket;
        later = ticket.begins.0;
        assert!(calendar.come(Moment(later), nonce) && calendar.ran(Moment(later), nonce).is_some());
        later = ticket.ends.0;
    }
    assert!(low < 0.55 && calendar.shows.rate() > 0.95, "{low} {}", calendar.shows.rate());
}

// === Jumps, shrinking, crowds ===

#[test]
fn a_clock_that_jumps_an_hour_loses_nobody_and_hides_nothing() {
    let mut calendar = calendar(NEXT);
    let tickets: Vec<Ticket> = (0..200)
        .map(|client| reserve(&mut calendar, START, at(30), 1.0, client).expect("there is room").ticket)
        .collect();
    calendar.come(at(1), Nonce(0));
    calendar.call(at(1));
    let now = at(600);
    calendar.tick(now);
    check(&calendar);
    assert_eq!(calendar.shows.rate(), 1.0, "who had no chance to come is no lesson");
    assert_eq!(calendar.tally().broken, 1, "the one in line");
    for ticket in &tickets[1..] {
        assert_eq!(calendar.show(now, ticket), ShownTicket::Late);
        assert!(calendar.come(now, ticket.nonce) && calendar.ran(now, ticket.nonce).is_some());
    }
    assert_eq!((calendar.tally().broken, calendar.tally().late), (200, 0));
    assert!(calendar.ran(now, Nonce(0)).is_some());
    assert_eq!(sum(&calendar.tally()), 200);
    let now = at(600 + 3_600);
    calendar.tick(now);
    assert!(reserve(&mut calendar, now, now, 1.0, 1_000).is_some(), "and life goes on");
    check(&calendar);
}

#[test]
fn capacity_that_shrank_shows_as_broken_promises() {
    let mut calendar = calendar(NEXT);
    let mut slots: BTreeMap<Moment, Vec<Nonce>> = BTreeMap::new();
    for client in 0..480 {
        let ticket = reserve(&mut calendar, START, at(60), 1.0, client).expect("there is room").ticket;
        slots.entry(ticket.begins).or_default().push(ticket.nonce);
    }
    assert_eq!(slots.len(), 10);
    // Everybody comes at once; one runs each two seconds and a half instead of each second: 24 of 48 in a slot, the rest after it.
    let mut line: std::collections::VecDeque<Nonce> = std::collections::VecDeque::new();
    for second in 60..60 + 480 * 5 / 2 {
        let arrived = slots.get(&at(second)).into_iter().flatten();
        line.extend(arrived.filter(|nonce| calendar.come(at(second), **nonce)));
        if second * 2 % 5 < 2 {
            line.pop_front().into_iter().for_each(|nonce| assert!(calendar.ran(at(second), nonce).is_some()));
        }
        check(&calendar);
    }
    let tally = calendar.tally();
    assert_eq!((line.len(), sum(&tally)), (0, 480));
    // In the first slot 24 run in time. After it those of the slots before take all there is.
    assert_eq!((tally.kept, tally.broken), (24, 456));
}

#[test]
fn nothing_is_promised_before_what_was_promised_can_have_run() {
    let mut calendar = calendar(NEXT);
    for client in 0..480 {
        reserve(&mut calendar, START, at(60), 1.0, client);
    }
    // Ten slots of 48; at half the speed they last for twenty of 24.
    let promise = reserve(&mut calendar, at(1), at(60), 0.5, 1_000).expect("within the horizon");
    assert_eq!(promise.ticket.begins, at(60 + 20 * 60));
    // It was a short fit: the slots that are empty again are promised first.
    let promise = reserve(&mut calendar, at(2), at(60), 1.0, 1_001).expect("within the horizon");
    assert_eq!(promise.ticket.begins, at(60 + 10 * 60));
    check(&calendar);
}

#[test]
fn a_million_clients_take_bounded_memory_and_no_promise_is_lost() {
    let mut calendar = calendar(TicketPolicy { tickets: 5_000, ..NEXT });
    let mut tickets = Vec::new();
    for client in 0..1_000_000 {
        tickets.extend(reserve(&mut calendar, START, at(30), 10.0, client).map(|promise| promise.ticket));
    }
    assert_eq!(tickets.len(), 5_000);
    assert_eq!((calendar.holders.len(), calendar.clients.len()), (5_000, 5_000));
    for ticket in &tickets {
        calendar.tick(ticket.begins);
        assert_eq!(calendar.show(ticket.begins, ticket), ShownTicket::Open { until: ticket.ends });
        assert!(
            calendar.come(ticket.begins, ticket.nonce) && calendar.ran(ticket.begins, ticket.nonce).is_some()
        );
    }
    assert_eq!(calendar.tally(), PromiseCounts { promised: 5_000, kept: 5_000, ..PromiseCounts::default() });
}

#[test]
fn memory_of_spent_tickets_is_bounded() {
    let mut calendar = calendar(TicketPolicy { tickets: 200_000, ..NEXT });
    let promises =
        (0..200_000).map(|client| reserve(&mut calendar, START, at(1), 1e6, client).expect("room"));
    let tickets: Vec<Ticket> = promises.map(|promise| promise.ticket).collect();
    calendar.tick(at(1));
    for ticket in tickets.iter().take(100_000) {
        assert!(calendar.come(at(2), ticket.nonce) && calendar.ran(at(2), ticket.nonce).is_some());
    }
    calendar.tick(at(100));
    assert_eq!(calendar.spent.len(), SPENT_MAX);
    assert_eq!(calendar.late.len(), LATE_TICKETS_MAX);
    check(&calendar);
    // A used one that is forgotten is not good again.
    let forgotten = tickets.iter().take(100_000).filter(|ticket| !calendar.spent.contains_key(&ticket.nonce));
    let forgotten: Vec<Ticket> = forgotten.copied().collect();
    assert_eq!(forgotten.len(), 100_000 - SPENT_MAX);
    for ticket in forgotten {
        assert_eq!(calendar.show(at(101), &ticket), ShownTicket::Unknown);
        assert!(!calendar.come(at(101), ticket.nonce));
    }
    assert_eq!(calendar.tick(at(3_600)), None, "in the end nothing is left");
    assert_eq!((calendar.holders.len(), calendar.spent.len(), calendar.clients.len()), (0, 0, 0));
    assert_eq!(sum(&calendar.tally()), 200_000);
}

#[test]
fn time_that_changes_something_is_told() {
    let mut calendar = calendar(NEXT);
    assert_eq!(calendar.tick(START), None);
    reserve(&mut calendar, START, at(30), 1.0, 1);
    assert_eq!(calendar.tick(START), Some(at(30)));
    calendar.call(at(5));
    assert_eq!(calendar.tick(at(5)), Some(at(15)));
    assert_eq!(calendar.tick(at(15)), Some(at(30)));
    assert_eq!(calendar.tick(at(30)), Some(at(90)));
    let over = after(at(90), LATE_FOR);
    assert_eq!(calendar.tick(at(90)), Some(over));
    assert_eq!(calendar.tick(over), None);
}

// === Restarts ===

/// What the calendar has of each ticket, apart from what is only a figure for people.
fn standings(calendar: &TicketCalendar, now: Moment, nonces: &[Nonce]) -> Vec<(Nonce, TicketStatus)> {
    let of = |nonce: &Nonce| match calendar.standing(now, *nonce) {
        TicketStatus::Later { begins_in, .. } => TicketStatus::Later { begins_in, ahead: 0 },
        other => other,
    };
    nonces.iter().map(|nonce| (*nonce, of(nonce))).collect()
}

fn occupied(calendar: &TicketCalendar) -> Vec<(Moment, Moment, u32)> {
    let row = calendar.slots.row().iter().filter(|slot| slot.out > 0);
    row.map(|slot| (slot.begins, slot.ends, slot.out)).collect()
}

#[test]
fn slots_that_ended_during_a_restart_count_as_broken() {
    let mut calendar = calendar(NEXT);
    let ticket = reserve(&mut calendar, START, at(30), 1.0, 1).expect("there is room").ticket;
    let mut restored = TicketCalendar::new(LANE, Some(NEXT));
    restored.restore(at(200), TicketRecord::Promised { ticket, client: ClientKey(1) });
    assert_eq!(restored.show(at(200), &ticket), ShownTicket::Late);
    assert!(restored.come(at(200), Nonce(1)) && restored.ran(at(201), Nonce(1)).is_some());
    assert_eq!(restored.tally(), PromiseCounts { broken: 1, ..PromiseCounts::default() });
    check(&restored);
}

#[test]
fn called_holder_keeps_its_place_over_a_restart() {
    let mut calendar = calendar(NEXT);
    let ticket = reserve(&mut calendar, START, at(600), 1.0, 1).expect("there is room").ticket;
    let other = reserve(&mut calendar, START, at(600), 1.0, 2).expect("there is room").ticket;
    assert_eq!(calendar.call(START).map(|(nonce, _)| nonce), Some(Nonce(1)));
    let promised = |ticket: Ticket, client| TicketRecord::Promised { ticket, client: ClientKey(client) };
    let records = [promised(ticket, 1), TicketRecord::Called { nonce: Nonce(1) }, promised(other, 2)];
    for turn in 0..records.len() {
        let mut restored = TicketCalendar::new(LANE, Some(NEXT));
        (0..records.len()).for_each(|at_| restored.restore(at(30), records[(at_ + turn) % records.len()]));
        assert_eq!(restored.show(at(30), &ticket), ShownTicket::Open { until: after(at(30), CALL_FOR) });
        assert!(matches!(restored.show(at(30), &other), ShownTicket::Early(_)));
        assert_eq!(restored.called(), 1, "his place is kept");
        check(&restored);
        // He does not come, and his slot is what it was.
        restored.tick(after(at(30), CALL_FOR));
        assert!(matches!(restored.show(at(60), &ticket), ShownTicket::Early(_)));
        assert_eq!(restored.show(ticket.begins, &ticket), ShownTicket::Open { until: ticket.ends });
        check(&restored);
    }
}

#[test]
fn time_before_the_first_restored_slot_is_free_again() {
    let mut restored = TicketCalendar::new(LANE, Some(NEXT));
    let ticket = Ticket { lane: LANE, begins: at(630), ends: at(690), epoch: 0, nonce: Nonce(1) };
    restored.restore(START, TicketRecord::Promised { ticket, client: ClientKey(1) });
    let new = reserve(&mut restored, START, START, 1.0, 2).expect("there is room").ticket;
    assert_eq!((new.begins, new.ends), (at(30), at(90)));
    assert_eq!(occupied(&restored), [(at(30), at(90), 1), (at(630), at(690), 1)]);
}

#[test]
fn tickets_after_a_restart_are_of_another_epoch() {
    let mut calendar = calendar(NEXT);
    let ticket = reserve(&mut calendar, START, at(30), 1.0, 1).expect("there is room").ticket;
    let mut restored = TicketCalendar::new(LANE, Some(NEXT));
    restored.restore(at(1), TicketRecord::Promised { ticket, client: ClientKey(1) });
    let new = reserve(&mut restored, at(1), at(30), 1.0, 2).expect("there is room").ticket;
    assert_eq!((ticket.epoch, new.epoch), (0, 1));
    assert_eq!(new.begins, ticket.begins, "in the same slot");
}

#[test]
fn foreign_old_and_strange_records_are_passed_over() {
    let mut calendar = calendar(NEXT);
    let ticket = Ticket { lane: LANE, begins: at(30), ends: at(90), epoch: 0, nonce: Nonce(1) };
    let client = ClientKey(1);
    calendar.restore(
        START,
        TicketRecord::Promised { ticket: Ticket { lane: LaneName([0; 16]), ..ticket }, client },
    );
    calendar.restore(at(5_000), TicketRecord::Promised { ticket, client });
    calendar.restore(at(5_000), TicketRecord::Spent { nonce: Nonce(2), until: at(4_999) });
    calendar.restore(at(5_000), TicketRecord::Forgotten { nonce: Nonce(3) });
    assert_eq!((calendar.promised(), calendar.tick(at(5_000))), (0, None));
    let begins = Moment(u64::MAX);
    let ends = Moment(u64::MAX);
    calendar.restore(at(5_000), TicketRecord::Promised { ticket: Ticket { begins, ends, ..ticket }, client });
    let reversed = Ticket { begins: at(6_000), ends: at(5_500), nonce: Nonce(4), ..ticket };
    calendar.restore(at(5_000), TicketRecord::Promised { ticket: reversed, client: ClientKey(4) });
    assert_eq!((calendar.promised(), calendar.tick(at(5_000))), (0, None));
}

// === Other nodes' tickets ===

fn moved(begins: u64, ends: u64, number: u128) -> Ticket {
    Ticket { lane: LANE, begins: at(begins), ends: at(ends), epoch: 3, nonce: Nonce(1 << 100 | number) }
}

#[test]
fn another_nodes_ticket_has_its_slot_here_and_is_used_up_here() {
    let mut calendar = calendar(NEXT);
    let ticket = moved(100, 160, 1);
    assert!(calendar.adopt(at(30), ticket, ClientKey(1)));
    assert!(!calendar.adopt(at(30), ticket, ClientKey(2)), "it is known");
    let promise = SlotPromise { ticket, is_new: false, ahead: 0 };
    assert_eq!(calendar.show(at(30), &ticket), ShownTicket::Early(promise));
    assert_eq!(calendar.show(at(30), &Ticket { begins: at(20), ..ticket }), ShownTicket::Unknown);
    assert_eq!(calendar.show(at(100), &ticket), ShownTicket::Open { until: at(160) });
    assert!(calendar.come(at(110), ticket.nonce));
    assert_eq!(calendar.show(at(110), &ticket), ShownTicket::Used);
    assert!(calendar.ran(at(120), ticket.nonce).is_some());
    assert_eq!(calendar.show(at(120), &ticket), ShownTicket::Used);
    assert!(!calendar.adopt(at(120), ticket, ClientKey(1)), "it was used");
    assert_eq!(calendar.tally(), PromiseCounts { adopted: 1, kept: 1, ..PromiseCounts::default() });
    check(&calendar);
}

#[test]
fn a_client_has_one_good_ticket_whichever_node_gave_it() {
    let mut calendar = calendar(NEXT);
    let own = reserve(&mut calendar, START, at(30), 1.0, 1).expect("there is room");
    assert!(!calendar.adopt(START, moved(0, 60, 1), ClientKey(1)), "it has one");
    assert!(matches!(calendar.show(START, &own.ticket), ShownTicket::Early(_)));
    // Its own has ended, and makes way as it does for a new one.
    assert!(calendar.adopt(at(100), moved(120, 180, 2), ClientKey(1)));
    assert!(!calendar.adopt(at(100), moved(120, 180, 3), ClientKey(1)));
    let again = reserve(&mut calendar, at(100), at(500), 1.0, 1).expect("it has one");
    assert_eq!((again.ticket, again.is_new), (moved(120, 180, 2), false));
    check(&calendar);
}

#[test]
fn a_moved_late_ticket_is_late_here_and_an_old_one_unknown() {
    let mut calendar = calendar(NEXT);
    let late = moved(500, 560, 1);
    let over = moved(0, 60, 2);
    assert!(calendar.adopt(at(1_000), late, ClientKey(1)));
    assert_eq!(calendar.show(at(1_000), &late), ShownTicket::Late);
    assert!(!calendar.adopt(at(1_000), over, ClientKey(2)));
    assert_eq!(calendar.show(at(1_000), &over), ShownTicket::Expired);
    for strange in [
        Ticket { lane: LaneName([0; 16]), ..moved(990, 1_100, 3) },
        Ticket { begins: at(1_100), ..moved(0, 1_050, 4) },
        Ticket { begins: Moment(u64::MAX - 1), ends: Moment(u64::MAX), ..moved(0, 0, 5) },
    ] {
        assert!(!calendar.adopt(at(1_000), strange, ClientKey(3)), "{strange:?}");
    }
    assert!(calendar.come(at(1_000), late.nonce) && calendar.ran(at(1_001), late.nonce).is_some());
    assert_eq!(calendar.tally(), PromiseCounts { adopted: 1, late: 1, ..PromiseCounts::default() });
    check(&calendar);
}

#[test]
fn other_nodes_tickets_take_room_and_teach_nothing() {
    let mut calendar = calendar(NEXT);
    for number in 0..40 {
        assert!(calendar.adopt(START, moved(60, 120, number), ClientKey(1_000 + number as u64)));
    }
    let begins: Vec<Moment> = (0..20)
        .map(|client| {
            reserve(&mut calendar, START, at(60), 1.0, client).expect("there is room").ticket.begins
        })
        .collect();
    assert_eq!(begins.iter().filter(|begins| **begins == at(60)).count(), 8, "48 in all");
    assert!(begins.iter().all(|begins| *begins <= at(120)));
    // Nobody comes.
    let mut alone = self::calendar(NEXT);
    for client in 0..20 {
        assert!(reserve(&mut alone, START, at(if client < 8 { 60 } else { 120 }), 1.0, client).is_some());
    }
    for second in 0..200 {
        calendar.tick(at(second));
        alone.tick(at(second));
    }
    assert_eq!(calendar.shows.rate(), alone.shows.rate());
    assert!(alone.shows.rate() < 1.0);
    check(&calendar);
}

#[test]
fn a_slow_lane_still_promises_before_a_ticket_it_took_over() {
    let mut calendar = calendar(NEXT);
    // One in 125 s.
    assert!(calendar.adopt(START, moved(2_000, 2_125, 1), ClientKey(1)));
    let own = reserve(&mut calendar, START, START, 0.01, 2).expect("there is room").ticket;
    assert!(own.begins < at(125), "{own:?}");
}

#[test]
fn other_nodes_tickets_are_bounded() {
    let mut calendar = calendar(NEXT);
    let most = adopted::ADOPTED_MAX as u64;
    let adopt = |calendar: &mut TicketCalendar, now, number: u64, begins| {
        calendar.adopt(now, moved(begins, begins + 60, number.into()), ClientKey(number))
    };
    assert!((0..most).all(|number| adopt(&mut calendar, START, number, 60)));
    assert!(!adopt(&mut calendar, START, most, 60));
    check(&calendar);
    let over = after(at(120), LATE_FOR);
    calendar.tick(over);
    assert!(adopt(&mut calendar, over, most, 2_000), "the others have ended");
    assert_eq!(sum(&calendar.tally()), most);
    check(&calendar);
}

#[derive(Debug, Clone)]
enum Step {
    Reserve {
        client: u64,
        earliest: u64,
        rate: f64,
    },
    Come(u64),
    Run(u64),
    Leave(u64),
    Forget(u64),
    /// Another node's ticket, whose slot begins so many seconds after 20 minutes ago.
    Adopt {
        client: u64,
        begins: u64,
        seconds: u64,
    },
    Call,
    Pass {
        seconds: u64,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let client = 0..60u64;
    prop_oneof![
        6 => (client.clone(), 0..300u64, 0.05..2.0f64)
            .prop_map(|(client, earliest, rate)| Step::Reserve { client, earliest, rate }),
        4 => client.clone().prop_map(Step::Come),
        3 => client.clone().prop_map(Step::Run),
        1 => client.clone().prop_map(Step::Leave),
        1 => client.prop_map(Step::Forget),
        1 => Just(Step::Call),
        2 => (0..90u64).prop_map(|seconds| Step::Pass { seconds }),
    ]
}

/// Also of those whose other tickets come from elsewhere.
fn step_with_moved() -> impl Strategy<Value = Step> {
    let adopt = (0..60u64, 0..1_800u64, 1..90u64).prop_map(|(client, begins, seconds)| Step::Adopt {
        client,
        begins,
        seconds,
    });
    prop_oneof![4 => step(), 1 => adopt]
}

/// A calendar that is lived in, with what was stored of it.
struct Life {
    calendar: TicketCalendar,
    now: Moment,
    records: Vec<TicketRecord>,
    tickets: Vec<Ticket>,
}

impl Life {
    fn new() -> Self {
        let next =
            TicketPolicy { window: Duration::from_secs(20), horizon: Duration::from_secs(600), ..NEXT };
        Self { calendar: calendar(next), now: START, records: Vec::new(), tickets: Vec::new() }
    }

    fn nonce(&self, client: u64) -> Nonce {
        self.calendar.clients.get(&ClientKey(client)).copied().unwrap_or(Nonce(u128::MAX))
    }

    fn take(&mut self, step: &Step) {
        let now = self.now;
        match *step {
            Step::Reserve { client, earliest, rate } => {
                let nonce = Nonce(self.tickets.len() as u128);
                let wanted = Moment(now.0 + earliest * 1_000_000);
                let had = self.calendar.clients.contains_key(&ClientKey(client));
                let promise = self.calendar.reserve(now, wanted, rate, ClientKey(client), nonce);
                let Some(promise) = promise else { return };
                assert!(promise.is_new || had);
                self.calendar.listen(nonce, client % 3 > 0);
                if promise.is_new {
                    self.promised(promise.ticket, client, wanted, rate);
                }
            }
            Step::Come(client) => drop(self.calendar.come(now, self.nonce(client))),
            Step::Run(client) => self.records.extend(self.calendar.ran(now, self.nonce(client))),
            Step::Leave(client) => self.calendar.reinstate_holder(now, self.nonce(client)),
            Step::Forget(client) => self.records.extend(self.calendar.forget(now, self.nonce(client))),
            Step::Adopt { client, begins, seconds } => self.adopt(client, begins, seconds),
            Step::Call => drop(self.calendar.call(now)),
            Step::Pass { seconds } => {
                self.now = Moment(now.0 + seconds * 1_000_000);
                self.calendar.tick(self.now);
            }
        }
        check(&self.calendar);
    }

    fn adopt(&mut self, client: u64, begins: u64, seconds: u64) {
        let begins = Moment(self.now.0 - 1_200_000_000 + begins * 1_000_000);
        let ends = Moment(begins.0 + seconds * 1_000_000);
        let nonce = Nonce(1 << 100 | self.tickets.len() as u128);
        let ticket = Ticket { lane: LANE, begins, ends, epoch: 0, nonce };
        let has_one = self.calendar.promise_of(ClientKey(client)).is_some();
        let is_over = after(ends, LATE_FOR) <= self.now;
        let took = self.calendar.adopt(self.now, ticket, ClientKey(client));
        assert_eq!(took, !has_one && !is_over);
        if took {
            let shown = self.calendar.show(self.now, &ticket);
            let is_late = ends <= self.now;
            let is_early = begins > self.now;
            assert_eq!(
                (shown == ShownTicket::Late, matches!(shown, ShownTicket::Early(_))),
                (is_late, is_early)
            );
            self.tickets.push(ticket);
        }
    }

    fn promised(&mut self, ticket: Ticket, client: u64, wanted: Moment, rate: f64) {
        assert!(ticket.begins >= wanted && ticket.ends > ticket.begins);
        let slot = self.calendar.slots.at(ticket.begins).and_then(|slot| self.calendar.slots.get(slot));
        let slot = slot.expect("it was promised just now");
        assert_eq!((slot.begins, slot.ends), (ticket.begins, ticket.ends));
        let seconds = (slot.ends.0 - slot.begins.0) as f64 / 1e6;
        // The arithmetic here is another one than the calendar's, so the last digits differ.
        assert!(f64::from(slot.out) <= rate * seconds * BOOKED_MAX + 1e-6, "{slot:?} at {rate} a second");
        self.tickets.push(ticket);
        self.records.push(TicketRecord::Promised { ticket, client: ClientKey(client) });
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn a_calendar_never_promises_more_than_there_is_room(
        steps in prop::collection::vec(step_with_moved(), 1..300),
    ) {
        let mut life = Life::new();
        let mut taken_back = 0;
        let made = |life: &Life| life.calendar.tally().promised + life.calendar.tally().adopted;
        for step in &steps {
            let before = made(&life);
            life.take(step);
            taken_back += before.saturating_sub(made(&life));
        }
        let nonces: Vec<Nonce> = life.calendar.holders.keys().copied().collect();
        let end = Moment(life.now.0 + 7_200_000_000);
        life.calendar.tick(end);
        for nonce in nonces {
            // Who is in line that long runs in the end.
            life.calendar.ran(end, nonce);
        }
        check(&life.calendar);
        let tally = life.calendar.tally();
        let made = made(&life);
        prop_assert!(life.calendar.slots.row().iter().all(|slot| slot.out + slot.outside == 0));
        prop_assert!(life.calendar.holders.is_empty() && life.calendar.clients.is_empty());
        // A promise that is taken back after its slot has ended may have been counted already.
        prop_assert!(sum(&tally) >= made && sum(&tally) <= made + taken_back);
    }

    #[test]
    fn a_calendar_restored_is_the_same(
        steps in prop::collection::vec(step(), 1..300),
        order in any::<prop::sample::Index>(),
    ) {
        let mut life = Life::new();
        steps.iter().for_each(|step| life.take(step));
        // Nobody is in line after a restart, and nobody is called.
        let now = Moment(life.now.0 + 1);
        let everybody: Vec<Nonce> = life.tickets.iter().map(|ticket| ticket.nonce).collect();
        for nonce in &everybody {
            life.calendar.reinstate_holder(now, *nonce);
        }
        life.calendar.tick(after(now, CALL_FOR));
        let now = after(now, CALL_FOR);
        let mut records = life.records.clone();
        let cut = order.index(records.len().max(1));
        // In another order, but what takes back comes after what it takes back: the store has only what is left.
        records.sort_by_key(|record| matches!(record, TicketRecord::Forgotten { .. }));
        let promised = records.iter().filter(|record| !matches!(record, TicketRecord::Forgotten { .. })).count();
        records[..promised].rotate_left(cut.min(promised));
        let mut restored = TicketCalendar::new(LANE, life.calendar.next);
        records.iter().for_each(|record| restored.restore(now, *record));
        restored.tick(now);
        check(&restored);
        let kept: Vec<Nonce> = everybody
            .into_iter()
            .filter(|nonce| life.calendar.standing(now, *nonce) != TicketStatus::Unknown)
            .collect();
        prop_assert_eq!(standings(&restored, now, &kept), standings(&life.calendar, now, &kept));
        prop_assert_eq!(occupied(&restored), occupied(&life.calendar));
    }
}
