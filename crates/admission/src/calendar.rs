//! The calendar of one lane: which slots of the future are promised to whom, and what became of the promises.
//!
//! How it is used, by who decides who runs (`machine`):
//!
//! | when | call | what it says |
//! |---|---|---|
//! | somebody is turned away | [`Calendar::reserve`] | his slot; `None`: no room within the horizon |
//! | a ticket is shown | [`Calendar::show`] | whether its holder may come now |
//! | its request gets in line, or runs at once | [`Calendar::come`] | |
//! | it gets its permit | [`Calendar::ran`] | the record to store when it ends; the ticket is used up |
//! | it leaves the line without one | [`Calendar::left`] | the ticket is good again |
//! | its holder listens for a call | [`Calendar::listen`] | |
//! | capacity frees early | [`Calendar::call`] | who may come now; his place is kept for [`CALL_FOR`] |
//! | a promise could not be stored | [`Calendar::forget`] | the slot is free again |
//! | time passes | [`Calendar::tick`] | when to come again |
//! | after a restart, first of all | [`Calendar::restore`] | |
//! | another node's ticket is shown | [`Calendar::adopt`] | whether it has its slot here from now on |
//!
//! **Room.** A slot has room for `rate x length x share / show rate` tickets: the show rate is learned from slots that ended and
//! never taken below `SHOW_RATE_MIN`, and however many do not come, never more than `BOOKED_MAX` of the whole capacity
//! is promised (or `share`, if that is more): when all of them come once, they still all run. Where a slot would not have room
//! for one, slots are longer.
//!
//! **When capacity shrinks** nothing is taken back. Nothing more is promised before the slots in which those already
//! promised can have run at the new rate, and who came in time and did not run in time is counted as broken, at the end of his slot.
//!
//! **What is bounded.** Tickets whose slot has not ended: `Next::tickets`, at most [`TICKETS_MAX`]; at the bound nothing more is
//! promised, and nothing is dropped. Tickets whose slot has ended are good for [`LATE_FOR`] more, and of more than
//! `LATE_TICKETS_MAX` the oldest go. Used ones are remembered as long, `SPENT_MAX` of them: one that is forgotten earlier
//! is not taken for a good one, it is unknown, and its bearer a newcomer. So nothing that is dropped breaks a promise. Other nodes'
//! tickets: `ADOPTED_MAX`, beside those given here.
//!
//! Not here: how much may be promised (`room`), the row of slots (`slots`), what comes back after a restart (`restart`), what other
//! nodes have promised (`adopted`), who is
//! next in line (`machine`), signatures (`ticket`), storing (`edge`).

mod adopted;
mod restart;
mod room;
mod slots;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::Duration;

use self::room::{Backlog, Shows, slot_len};
use self::slots::{SLOTS_MAX, Slot, SlotNumber, Slots};
use crate::{ClientKey, LaneName, Moment, Next, Nonce, Promise, Record, Standing, Ticket};

/// So long after the end of its slot a ticket still goes before newcomers. After that nothing is known of it.
pub const LATE_FOR: Duration = Duration::from_secs(15 * 60);

/// So long the place of somebody who was called early is kept: time for a page to hear of it and to come.
pub const CALL_FOR: Duration = Duration::from_secs(10);

/// Of those who come when they are called, most do within this.
const CALL_HEARD: Duration = Duration::from_secs(1);

/// Tickets whose slot has not ended, whatever is configured. About 300 bytes each.
pub const TICKETS_MAX: u32 = 1 << 20;

/// Tickets whose slot has ended, and used ones, that are remembered.
const LATE_TICKETS_MAX: usize = 65_536;
const SPENT_MAX: usize = 65_536;

/// Places kept at once for those who were called.
const CALLS_MAX: usize = 1_024;

/// The calendar of one lane.
#[derive(Debug)]
pub struct Calendar {
    lane: LaneName,
    next: Option<Next>,
    epoch: u32,
    /// The time it was when it was last said.
    now: Moment,
    slots: Slots,
    holders: HashMap<Nonce, Holder>,
    /// The one good ticket of each client.
    clients: HashMap<ClientKey, Nonce>,
    /// Holders by the end of their slot, while it has not ended.
    deadlines: BTreeMap<Place, Nonce>,
    /// Those whose slot has ended, and who are not in line.
    late: BTreeMap<Place, Nonce>,
    /// Those who can be called early, by the beginning of their slot.
    callable: BTreeMap<Place, Nonce>,
    /// Of these, who would hear it.
    listening: BTreeMap<Place, Nonce>,
    /// Those who were called, by how long their place is kept.
    calls: BTreeMap<Place, Nonce>,
    /// How many of them were expected to come still, when one was called or came last.
    called_lately: (f64, Moment),
    spent: HashMap<Nonce, Moment>,
    spent_by_end: BTreeSet<(Moment, Nonce)>,
    /// Restored, and not put into slots yet. Some of them were called.
    restored: Vec<Nonce>,
    restored_calls: HashSet<Nonce>,
    /// Holders of other nodes' tickets.
    adopted: usize,
    /// How many holders there have been.
    number: u64,
    shows: Shows,
    backlog: Backlog,
    tally: Tally,
}

/// A moment, and a holder's number, so that no two are alike and the first promised goes first.
type Place = (Moment, u64);

#[derive(Debug, Clone)]
struct Holder {
    ticket: Ticket,
    client: ClientKey,
    number: u64,
    /// Where it is counted. `None`: not put there yet after a restart, or its slot had ended before that.
    slot: Option<SlotNumber>,
    /// Tickets that were out in the slot before it.
    rank: u32,
    state: State,
    has_come: bool,
    has_ended: bool,
    /// Nobody was here while its slot was open: the node was down, or the clock jumped.
    was_missed: bool,
    /// It has been counted as broken or late.
    is_counted: bool,
    /// Another node gave it. Of who comes with such a ticket nothing is learned about those given here.
    is_adopted: bool,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum State {
    Out,
    Called(Moment),
    InLine,
}

/// How a ticket that is shown stands.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Shown {
    /// Its slot has not begun, and it was not called.
    Early(Promise),
    /// It may come: so long it goes before newcomers as one that is in time.
    Open { until: Moment },
    /// Its slot has ended; it still goes before newcomers.
    Late,
    /// Its request waits, runs or has run.
    Used,
    /// It ended so long ago that nothing is known of it.
    Expired,
    /// It is of another lane, or of a lane of this name that was removed, or was used and forgotten. Whoever shows it is a newcomer.
    Unknown,
}

/// What has become of the promises, of those taken over too. Each ends as one of `kept`, `broken`, `late` and `never_came`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tally {
    /// New ones that were made.
    pub promised: u64,
    /// Other nodes' that were taken over.
    pub adopted: u64,
    /// The holder came and ran before his slot's end.
    pub kept: u64,
    /// The holder came before his slot's end and did not run before it; or came later, and nobody was here in his slot.
    pub broken: u64,
    /// The holder came after his slot's end.
    pub late: u64,
    /// The holder did not come, or came and left again before his turn.
    pub never_came: u64,
    /// Holders that were called before their slot.
    pub called_early: u64,
}

impl Calendar {
    /// An empty one. `None`: nothing is promised in this lane.
    pub fn new(lane: LaneName, next: Option<Next>) -> Self {
        Self {
            lane,
            next,
            epoch: 0,
            now: Moment(0),
            slots: Slots::default(),
            holders: HashMap::new(),
            clients: HashMap::new(),
            deadlines: BTreeMap::new(),
            late: BTreeMap::new(),
            callable: BTreeMap::new(),
            listening: BTreeMap::new(),
            calls: BTreeMap::new(),
            called_lately: (0.0, Moment(0)),
            spent: HashMap::new(),
            spent_by_end: BTreeSet::new(),
            restored: Vec::new(),
            restored_calls: HashSet::new(),
            adopted: 0,
            number: 0,
            shows: Shows::default(),
            backlog: Backlog::default(),
            tally: Tally::default(),
        }
    }

    /// How it promises from now on. Promises that were made stay as they are.
    pub fn set(&mut self, next: Option<Next>) {
        self.next = next;
    }

    /// Tickets whose slots have not ended.
    pub fn promised(&self) -> u32 {
        count(self.deadlines.len() + self.restored.len())
    }

    /// What has become of the promises so far.
    pub fn tally(&self) -> Tally {
        self.tally
    }

    /// Places that are kept now for those who were called.
    pub fn called(&self) -> u32 {
        count(self.calls.len())
    }

    /// Holders who are expected to come between now and then: those who were called, of the open slot those who are still
    /// outside, fewer the longer it has been open, and those of later slots.
    pub fn due(&self, now: Moment, until: Moment) -> f64 {
        let open =
            self.slots.at(now).and_then(|slot| self.slots.get(slot)).map_or(0.0, |slot| {
                f64::from(slot.outside) * (slot.passed(until) - slot.passed(now)).max(0.0)
            });
        self.expected_called(now) + (open + self.due_later(now, until)) * self.shows.rate()
    }

    /// Of slots that begin between now and then, the tickets of who was not called; of the last one as large a part as will have
    /// passed of it.
    fn due_later(&self, now: Moment, until: Moment) -> f64 {
        let first =
            self.callable.range((now, u64::MAX)..).next().and_then(|((begins, _), _)| self.slots.at(*begins));
        let Some((first, slot)) = first.and_then(|first| Some((first, self.slots.get(first)?))) else {
            return 0.0;
        };
        let of_first = f64::from(slot.outside) * slot.passed(until);
        if until < slot.ends {
            return of_first;
        }
        let through_first = self.slots.out_before(first) + slot.out;
        let last = self.slots.at(until).and_then(|last| Some((last, self.slots.get(last)?)));
        let out = last.map_or(count(self.deadlines.len()).into(), |(last, slot)| {
            f64::from(self.slots.out_before(last)) + f64::from(slot.out) * slot.passed(until)
        });
        of_first + (out - f64::from(through_first)).max(0.0)
    }

    /// Of those who were called lately, so many are expected still.
    fn expected_called(&self, now: Moment) -> f64 {
        let (expected, at) = self.called_lately;
        expected * (-(now.0.saturating_sub(at.0) as f64) / micros(CALL_HEARD) as f64).exp()
    }

    /// A holder can be called no more: he was, or he came.
    fn call_no_more(&mut self, begins: Moment, number: u64, slot: Option<SlotNumber>) {
        self.listening.remove(&(begins, number));
        if self.callable.remove(&(begins, number)).is_some()
            && let Some(slot) = slot
        {
            self.slots.change(slot, |slot| slot.outside = slot.outside.saturating_sub(1));
        }
    }

    // === Promises ===

    /// Promises the first slot with room that begins at `earliest` or later, at this rate, in requests per second. Whoever has a
    /// good ticket gets the same again. `None`: there is no room within the horizon, all tickets are out, or nothing is promised here.
    pub fn reserve(
        &mut self,
        now: Moment,
        earliest: Moment,
        rate: f64,
        client: ClientKey,
        nonce: Nonce,
    ) -> Option<Promise> {
        self.settle(now);
        if let Some(promise) = self.promise_of(client) {
            return Some(promise);
        }
        let now = self.now;
        let next = self.next?;
        let is_full = self.deadlines.len() >= next.tickets.min(TICKETS_MAX) as usize;
        if is_full || self.holders.contains_key(&nonce) || self.spent.contains_key(&nonce) {
            return None;
        }
        let rate = self.shows.booked_rate(next.share, rate)?;
        let from = earliest.max(now).max(self.backlog.ends(now, rate, &self.slots));
        let slot = self.slot_with_room(now, from, rate, &next)?;
        let Slot { begins, ends, .. } = *self.slots.get(slot)?;
        self.drop_late_of(client);
        let ticket = Ticket { lane: self.lane, begins, ends, epoch: self.epoch, nonce };
        self.hold(ticket, client);
        self.put(nonce, slot);
        self.tally.promised += 1;
        Some(Promise { ticket, is_new: true, ahead: self.ahead(self.holders.get(&nonce)?) })
    }

    /// All promises that are out, as they were stored, in the order of their slots.
    pub fn records(&self) -> Vec<Record> {
        let mut holders: Vec<&Holder> = self.holders.values().collect();
        holders.sort_unstable_by_key(|holder| (holder.ticket.begins, holder.ticket.nonce));
        let mut records = Vec::with_capacity(holders.len());
        for Holder { ticket, client, state, .. } in holders {
            records.push(Record::Promised { ticket: *ticket, client: *client });
            if matches!(state, State::Called(_)) {
                records.push(Record::Called { nonce: ticket.nonce });
            }
        }
        records
    }

    /// Takes back a promise that was not given to anybody, as it could not be stored.
    pub fn forget(&mut self, now: Moment, nonce: Nonce) -> Option<Record> {
        self.settle(now);
        let holder = self.remove(nonce)?;
        if let Some(slot) = holder.slot {
            let is_given_here = !holder.is_adopted;
            self.slots.change(slot, |slot| slot.given = slot.given.saturating_sub(is_given_here.into()));
        }
        let made = if holder.is_adopted { &mut self.tally.adopted } else { &mut self.tally.promised };
        *made = made.saturating_sub(1);
        Some(Record::Forgotten { nonce })
    }

    /// The holder of this ticket would hear a call, or would not any more. Only those who would are called.
    pub fn listen(&mut self, nonce: Nonce, would_hear: bool) {
        let Some(holder) = self.holders.get(&nonce) else { return };
        let place = (holder.ticket.begins, holder.number);
        if !would_hear {
            self.listening.remove(&place);
        } else if self.callable.contains_key(&place) {
            self.listening.insert(place, nonce);
        }
    }

    /// Who may come before his slot, as there is capacity now: the first, who has not been called before. His place is kept
    /// until the moment said. `None`: there is nobody.
    pub fn call(&mut self, now: Moment) -> Option<(Nonce, Moment)> {
        self.settle(now);
        let now = self.now;
        if self.calls.len() >= CALLS_MAX {
            return None;
        }
        let ((begins, number), nonce) =
            self.listening.range((now, u64::MAX)..).next().map(|(place, nonce)| (*place, *nonce))?;
        let slot = self.holders.get(&nonce)?.slot;
        let until = self.keep_place(nonce, (begins, number), slot)?;
        self.tally.called_early += 1;
        Some((nonce, until))
    }

    /// One who was called has his place from now on. Until when.
    fn keep_place(
        &mut self,
        nonce: Nonce,
        (begins, number): Place,
        slot: Option<SlotNumber>,
    ) -> Option<Moment> {
        let now = self.now;
        self.call_no_more(begins, number, slot);
        self.called_lately = (self.expected_called(now) + self.shows.rate(), now);
        let until = after(now, CALL_FOR);
        let holder = self.holders.get_mut(&nonce)?;
        holder.state = State::Called(until);
        self.calls.insert((until, number), nonce);
        Some(until)
    }

    // === Holders ===

    /// How a ticket stands that somebody shows. Its signature has been verified. Nothing changes by this alone.
    pub fn show(&mut self, now: Moment, ticket: &Ticket) -> Shown {
        self.settle(now);
        let now = self.now;
        let found = self.holders.get(&ticket.nonce).filter(|holder| holder.ticket == *ticket);
        let Some(holder) = found else {
            return match self.spent.contains_key(&ticket.nonce) {
                true => Shown::Used,
                false if after(ticket.ends, LATE_FOR) <= now => Shown::Expired,
                false => Shown::Unknown,
            };
        };
        match holder.state {
            State::InLine => Shown::Used,
            _ if holder.has_ended => Shown::Late,
            _ if holder.ticket.begins <= now => Shown::Open { until: holder.ticket.ends },
            State::Called(until) => Shown::Open { until },
            State::Out => Shown::Early(self.promise(holder)),
        }
    }

    /// The holder is here, whenever that is, and is in line or runs at once. False: the ticket is not good.
    pub fn come(&mut self, now: Moment, nonce: Nonce) -> bool {
        self.settle(now);
        let Some(holder) = self.holders.get_mut(&nonce).filter(|holder| holder.state != State::InLine) else {
            return false;
        };
        let (begins, number, slot) = (holder.ticket.begins, holder.number, holder.slot);
        self.late.remove(&(holder.ticket.ends, number));
        let was = std::mem::replace(&mut holder.state, State::InLine);
        if holder.has_ended && !holder.is_counted {
            holder.is_counted = true;
            *(if holder.was_missed { &mut self.tally.broken } else { &mut self.tally.late }) += 1;
        }
        let is_first_time = !std::mem::replace(&mut holder.has_come, true) && !holder.is_adopted;
        if let Some(slot) = slot.filter(|_| is_first_time) {
            self.slots.change(slot, |slot| slot.came += 1);
        }
        if let State::Called(until) = was {
            self.calls.remove(&(until, number));
            self.called_lately = ((self.expected_called(now) - 1.0).max(0.0), now);
        }
        self.call_no_more(begins, number, slot);
        true
    }

    /// The holder who came has his permit: the ticket is used up. What is to be stored once his request has ended; `None`: he had
    /// not come.
    pub fn ran(&mut self, now: Moment, nonce: Nonce) -> Option<Record> {
        self.settle(now);
        self.holders.get(&nonce).filter(|holder| holder.state == State::InLine)?;
        let holder = self.remove(nonce)?;
        self.tally.kept += u64::from(!holder.has_ended);
        let until = after(holder.ticket.ends, LATE_FOR);
        self.remember_spent(nonce, until);
        Some(Record::Spent { nonce, until })
    }

    /// The holder who came left the line before his turn. His ticket is as good as it was: a lost connection costs nobody his place.
    pub fn left(&mut self, now: Moment, nonce: Nonce) {
        self.settle(now);
        let Some(holder) = self.holders.get_mut(&nonce).filter(|holder| holder.state == State::InLine) else {
            return;
        };
        holder.state = State::Out;
        if holder.has_ended {
            self.late.insert((holder.ticket.ends, holder.number), nonce);
        }
    }

    /// How the ticket with this number stands, for who waits outside.
    pub fn standing(&self, now: Moment, nonce: Nonce) -> Standing {
        let Some(holder) = self.holders.get(&nonce) else {
            return if self.spent.contains_key(&nonce) { Standing::Used } else { Standing::Unknown };
        };
        let Ticket { begins, ends, .. } = holder.ticket;
        match holder.state {
            State::InLine => Standing::Used,
            _ if ends <= now => Standing::Late,
            _ if begins <= now => Standing::Open { for_another: between(now, ends) },
            State::Called(until) if until > now => Standing::Open { for_another: between(now, until) },
            _ => Standing::Later { begins_in: between(now, begins), ahead: self.ahead(holder) },
        }
    }

    // === Time ===

    /// What time alone changes. Says when to come again; `None`: not before something is promised.
    pub fn tick(&mut self, now: Moment) -> Option<Moment> {
        self.settle(now);
        // Each slot's beginning too, so that it is known that somebody was here while it was open.
        let slot = self.slots.row().front().filter(|_| !self.deadlines.is_empty());
        let slot = slot.map(|slot| if slot.begins > now { slot.begins } else { slot.ends });
        let deadline = self.deadlines.keys().next().map(|(ends, _)| *ends);
        let call = self.calls.keys().next().map(|(until, _)| *until);
        let late = self.late.keys().next().map(|(ends, _)| after(*ends, LATE_FOR));
        let spent = self.spent_by_end.first().map(|(until, _)| *until);
        [slot, deadline, call, late, spent].into_iter().flatten().min()
    }

    /// Everything that has happened up to now by time alone.
    fn settle(&mut self, now: Moment) {
        let before = self.now;
        self.now = now.max(before);
        self.put_restored();
        let now = self.now;
        while let Some(nonce) = pop_until(&mut self.calls, now) {
            if let Some(holder) = self.holders.get_mut(&nonce) {
                holder.state = State::Out;
            }
        }
        while let Some(nonce) = pop_until(&mut self.deadlines, now) {
            self.end(nonce, before);
        }
        while let Some(slot) = self.slots.pop_ended(now) {
            // In one that nobody was here in, nobody could come.
            if slot.is_whole && slot.begins <= before {
                self.shows.learn(slot.came, slot.given);
            }
        }
        let long_ago = Moment(now.0.saturating_sub(micros(LATE_FOR)));
        while let Some(nonce) = pop_until(&mut self.late, long_ago) {
            self.drop_late(nonce);
        }
        while let Some((until, nonce)) = self.spent_by_end.first().copied().filter(|(until, _)| *until <= now)
        {
            self.spent_by_end.remove(&(until, nonce));
            self.spent.remove(&nonce);
        }
    }

    /// A slot's end has passed for this holder.
    fn end(&mut self, nonce: Nonce, before: Moment) {
        if let Some(Holder { ticket, number, slot, .. }) = self.holders.get(&nonce) {
            self.call_no_more(ticket.begins, *number, *slot);
        }
        let Some(holder) = self.holders.get_mut(&nonce) else { return };
        holder.has_ended = true;
        holder.was_missed = before < holder.ticket.begins;
        if holder.state == State::InLine {
            holder.is_counted = true;
            self.tally.broken += 1;
            return;
        }
        if let State::Called(until) = std::mem::replace(&mut holder.state, State::Out) {
            self.calls.remove(&(until, holder.number));
        }
        self.late.insert((holder.ticket.ends, holder.number), nonce);
        if self.late.len() > LATE_TICKETS_MAX
            && let Some((_, oldest)) = self.late.pop_first()
        {
            self.drop_late(oldest);
        }
    }

    // === Slots ===

    fn slot_with_room(&mut self, now: Moment, from: Moment, rate: f64, next: &Next) -> Option<SlotNumber> {
        let last = after(now, next.horizon);
        if let Some(found) = self.slots.first_with_room(from, rate) {
            return Some(found).filter(|slot| self.slots.get(*slot).is_some_and(|slot| slot.begins <= last));
        }
        let len = slot_len(next, rate)?;
        let first = match self.slots.row().back() {
            Some(back) => back.ends,
            // A slot begins exactly where one is wanted first, and those before it count back from there to now.
            None => Moment(from.0 - (from.0 - now.0) / len * len),
        };
        let fillers = from.0.saturating_sub(first.0).div_ceil(len);
        let begins = first.0.saturating_add(fillers.saturating_mul(len));
        if begins > last.0 || self.slots.row().len() as u64 + fillers >= SLOTS_MAX as u64 {
            return None;
        }
        (0..=fillers)
            .map(|at| first.0 + at * len)
            .map(|at| self.slots.push(Moment(at), Moment(at + len)))
            .last()?
    }

    /// Counts a holder in a slot.
    fn put(&mut self, nonce: Nonce, slot: SlotNumber) {
        let Some(holder) = self.holders.get_mut(&nonce) else { return };
        holder.rank = self.slots.get(slot).map_or(0, |slot| slot.out);
        holder.slot = Some(slot);
        let is_given_here = !holder.is_adopted;
        self.slots.change(slot, |slot| {
            slot.out += 1;
            slot.given += u32::from(is_given_here);
        });
        self.deadlines.insert((holder.ticket.ends, holder.number), nonce);
        if holder.ticket.begins > self.now {
            self.callable.insert((holder.ticket.begins, holder.number), nonce);
            self.slots.change(slot, |slot| slot.outside += 1);
        }
    }

    // === Who holds what ===

    fn hold(&mut self, ticket: Ticket, client: ClientKey) {
        self.number += 1;
        let holder = Holder {
            ticket,
            client,
            number: self.number,
            slot: None,
            rank: 0,
            state: State::Out,
            has_come: false,
            has_ended: false,
            was_missed: false,
            is_counted: false,
            is_adopted: false,
        };
        self.clients.insert(client, ticket.nonce);
        self.holders.insert(ticket.nonce, holder);
    }

    /// Takes a holder out of everything.
    fn remove(&mut self, nonce: Nonce) -> Option<Holder> {
        let holder = self.holders.remove(&nonce)?;
        self.adopted -= usize::from(holder.is_adopted);
        if let State::Called(until) = holder.state {
            self.calls.remove(&(until, holder.number));
        }
        self.call_no_more(holder.ticket.begins, holder.number, holder.slot);
        self.deadlines.remove(&(holder.ticket.ends, holder.number));
        self.late.remove(&(holder.ticket.ends, holder.number));
        if self.clients.get(&holder.client) == Some(&nonce) {
            self.clients.remove(&holder.client);
        }
        if let Some(slot) = holder.slot {
            self.slots.change(slot, |slot| slot.out = slot.out.saturating_sub(1));
        }
        Some(holder)
    }

    fn drop_late(&mut self, nonce: Nonce) {
        let dropped = self.remove(nonce);
        self.tally.never_came += u64::from(dropped.is_some_and(|holder| !holder.is_counted));
    }

    /// A client's late ticket makes way for a new one: nobody has two.
    fn drop_late_of(&mut self, client: ClientKey) {
        let nonce = self.clients.get(&client).copied();
        let is_late = |nonce: &Nonce| {
            self.holders.get(nonce).is_some_and(|holder| holder.has_ended && holder.state != State::InLine)
        };
        if let Some(nonce) = nonce.filter(is_late) {
            self.drop_late(nonce);
        }
    }

    /// The promise a client has, while its slot has not ended.
    fn promise_of(&self, client: ClientKey) -> Option<Promise> {
        let holder = self.holders.get(self.clients.get(&client)?)?;
        (!holder.has_ended).then(|| self.promise(holder))
    }

    fn promise(&self, holder: &Holder) -> Promise {
        Promise { ticket: holder.ticket, is_new: false, ahead: self.ahead(holder) }
    }

    fn ends_of(&self, nonce: Nonce) -> Option<Moment> {
        self.holders.get(&nonce).map(|holder| holder.ticket.ends)
    }

    /// Tickets before this one: never fewer than there are. Within its own slot it is not told which of those before it have run.
    fn ahead(&self, holder: &Holder) -> u32 {
        let Some(slot) = holder.slot else { return 0 };
        let others = self.slots.get(slot).map_or(0, |slot| slot.out.saturating_sub(1));
        self.slots.out_before(slot) + holder.rank.min(others)
    }

    fn remember_spent(&mut self, nonce: Nonce, until: Moment) {
        if self.spent.insert(nonce, until).is_none() {
            self.spent_by_end.insert((until, nonce));
        }
        if self.spent.len() > SPENT_MAX
            && let Some((_, first)) = self.spent_by_end.pop_first()
        {
            self.spent.remove(&first);
        }
    }
}

impl Record {
    /// From when on it need not be kept: nothing would be done differently for it. `None`: it only says something of another one.
    pub fn over_at(&self) -> Option<Moment> {
        match self {
            Self::Promised { ticket, .. } => Some(after(ticket.ends, LATE_FOR)),
            Self::Spent { until, .. } => Some(*until),
            Self::Called { .. } | Self::Forgotten { .. } | Self::Paced { .. } => None,
        }
    }
}

/// Takes out the first, if its moment has come.
fn pop_until(places: &mut BTreeMap<Place, Nonce>, now: Moment) -> Option<Nonce> {
    let first = places.first_entry().filter(|first| first.key().0 <= now)?;
    Some(first.remove())
}

fn after(moment: Moment, duration: Duration) -> Moment {
    Moment(moment.0.saturating_add(micros(duration)))
}

fn between(from: Moment, to: Moment) -> Duration {
    Duration::from_micros(to.0.saturating_sub(from.0))
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

fn count(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
