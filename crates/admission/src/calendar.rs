//! Keeps the calendar of one lane: which future slots are promised to whom, and how each promise
//! ended.
//!
//! `machine` decides which request runs, and uses the calendar as follows:
//!
//! - Somebody is turned away: [`TicketCalendar::reserve`] returns a slot. `None`: no room within
//!   the horizon.
//! - A ticket is shown: [`TicketCalendar::show`] returns whether its holder may come now.
//! - Its request gets in line, or runs at once: [`TicketCalendar::come`].
//! - It gets its permit: [`TicketCalendar::ran`] returns the record to store when it ends. The
//!   ticket is used up.
//! - It leaves the line without one: [`TicketCalendar::reinstate_holder`]. The ticket is good
//!   again.
//! - Its holder listens for a call: [`TicketCalendar::listen`].
//! - Capacity frees early: [`TicketCalendar::call`] returns the holder who may come now. The place
//!   is kept for [`CALL_FOR`].
//! - A promise could not be stored: [`TicketCalendar::forget`]. The slot is free again.
//! - Time passes: [`TicketCalendar::tick`] returns when to come again.
//! - After a restart, first of all: [`TicketCalendar::restore`].
//! - Another node's ticket is shown: [`TicketCalendar::adopt`] returns whether it has its slot here
//!   from now on.
//!
//! **Capacity.** A slot has capacity for `rate x length x share / show rate` tickets. The show rate
//! is learned from slots that ended. It is never taken below `SHOW_RATE_MIN`. At most `BOOKED_MAX`
//! of the whole capacity is promised (or `share`, if that is more). So even if all holders come
//! once, all of them still run. Where a slot would have no capacity for one ticket, slots are
//! longer.
//!
//! **When capacity shrinks** no promise is taken back. New promises begin after the slots in which
//! all earlier ones can have run at the new rate. A holder that came in time and did not run in
//! time counts as broken when its slot ends.
//!
//! **Bounds.** Tickets whose slot has not ended are at most `TicketPolicy::tickets`, which is at
//! most [`TICKETS_MAX`]. At the bound nothing more is promised, and nothing is dropped. Tickets
//! whose slot has ended are good for [`LATE_FOR`] more. Of more than `LATE_TICKETS_MAX` of them,
//! the oldest go. Used tickets are remembered for the same time, at most `SPENT_MAX` of them. One
//! that is forgotten earlier is not taken for a good one. It is unknown, and its bearer is a
//! newcomer. So nothing that is dropped breaks a promise. Other nodes' tickets are at most
//! `ADOPTED_MAX`, beside those given here.
//!
//! Not here: how much may be promised (`capacity`), the row of slots (`slots`), the state after a
//! restart (`restart`), the promises of other nodes (`adopted`), the next in line (`machine`),
//! signatures (`ticket`), storing (`edge`).

mod adopted;
mod restart;
mod slots;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::Duration;

use self::slots::{CalendarSlot, SLOTS_MAX, SlotNumber, SlotTree};
use crate::calendar::capacity::{ShowRate, SlotBacklog, slot_len};
use crate::{
    ClientKey, LaneName, Moment, Nonce, SlotPromise, Ticket, TicketPolicy, TicketRecord, TicketStatus,
};

/// Time after the end of its slot during which a ticket still goes before newcomers. After that,
/// nothing is known of the ticket.
pub const LATE_FOR: Duration = Duration::from_secs(15 * 60);

/// Time for which the position of a holder that was called early is kept. A page needs it to learn
/// of the call and to come.
pub const CALL_FOR: Duration = Duration::from_secs(10);

/// Time within which most of the called holders that come do come.
const CALL_HEARD: Duration = Duration::from_secs(1);

/// Upper limit of tickets whose slot has not ended, whatever is configured. About 300 bytes each.
pub const TICKETS_MAX: u32 = 1 << 20;

/// Tickets that are remembered after their slot ended, and used tickets that are remembered.
const LATE_TICKETS_MAX: usize = 65_536;
const SPENT_MAX: usize = 65_536;

/// Positions kept at once for called holders.
const CALLS_MAX: usize = 1_024;

/// The calendar of one lane.
#[derive(Debug)]
pub struct TicketCalendar {
    lane: LaneName,
    next: Option<TicketPolicy>,
    epoch: u32,
    /// Time of the last call.
    now: Moment,
    slots: SlotTree,
    holders: HashMap<Nonce, TicketHolder>,
    /// The one valid ticket of each client.
    clients: HashMap<ClientKey, Nonce>,
    /// Holders by the end of their slot, while it has not ended.
    deadlines: BTreeMap<Place, Nonce>,
    /// Holders whose slot has ended and that are not in the queue.
    late: BTreeMap<Place, Nonce>,
    /// Holders that can be called early, by the beginning of their slot.
    callable: BTreeMap<Place, Nonce>,
    /// Those of `callable` that would receive a call.
    listening: BTreeMap<Place, Nonce>,
    /// Holders that were called, by the end of their kept position.
    calls: BTreeMap<Place, Nonce>,
    /// How many of them were still expected when one was last called or came, and that moment.
    called_lately: (f64, Moment),
    spent: HashMap<Nonce, Moment>,
    spent_by_end: BTreeSet<(Moment, Nonce)>,
    /// Restored tickets that have no slot yet. Some of them were called.
    restored: Vec<Nonce>,
    restored_calls: HashSet<Nonce>,
    /// Holders of other nodes' tickets.
    adopted: usize,
    /// Number of holders so far.
    number: u64,
    shows: ShowRate,
    backlog: SlotBacklog,
    tally: PromiseCounts,
}

/// A moment and a holder's number. No two are equal, and the first promised goes first.
type Place = (Moment, u64);

#[derive(Debug, Clone)]
struct TicketHolder {
    ticket: Ticket,
    client: ClientKey,
    number: u64,
    /// Slot in which it is counted. `None` if it has none yet after a restart, or if its slot had
    /// ended before that.
    slot: Option<SlotNumber>,
    /// Tickets that were out in the slot before it.
    rank: u32,
    state: HolderState,
    has_come: bool,
    has_ended: bool,
    /// The node was down, or the clock jumped, during the whole slot.
    was_missed: bool,
    /// It has been counted as broken or late.
    is_counted: bool,
    /// Another node gave it. Its arrival teaches nothing about tickets given here.
    is_adopted: bool,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum HolderState {
    Out,
    Called(Moment),
    InLine,
}

/// Status of a ticket that is shown.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ShownTicket {
    /// Its slot has not begun, and it was not called.
    Early(SlotPromise),
    /// It may come. Until this moment it goes before newcomers as one in time.
    Open { until: Moment },
    /// Its slot has ended; it still goes before newcomers.
    Late,
    /// Its request waits, runs or has run.
    Used,
    /// It ended too long ago: nothing is known of it.
    Expired,
    /// It belongs to another lane or to a removed lane of this name, or it was used and forgotten.
    /// Its bearer is a newcomer.
    Unknown,
}

/// Counts of how promises ended, adopted ones included. Each ends as `kept`, `broken`, `late` or
/// `never_came`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PromiseCounts {
    /// New promises made.
    pub promised: u64,
    /// Promises of other nodes that were adopted.
    pub adopted: u64,
    /// The holder came and ran before its slot's end.
    pub kept: u64,
    /// The holder came before its slot's end and did not run before it. Or it came later because
    /// the node was down during its slot.
    pub broken: u64,
    /// The holder came after its slot's end.
    pub late: u64,
    /// The holder did not come, or left the queue before its turn.
    pub never_came: u64,
    /// Holders that were called before their slot.
    pub called_early: u64,
}

impl TicketCalendar {
    /// Creates an empty calendar. With `None`, nothing is promised in this lane.
    pub fn new(lane: LaneName, next: Option<TicketPolicy>) -> Self {
        Self {
            lane,
            next,
            epoch: 0,
            now: Moment(0),
            slots: SlotTree::default(),
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
            shows: ShowRate::default(),
            backlog: SlotBacklog::default(),
            tally: PromiseCounts::default(),
        }
    }

    /// Sets the policy of future promises. Existing promises stay as they are.
    pub fn set(&mut self, next: Option<TicketPolicy>) {
        self.next = next;
    }

    /// Returns the number of tickets whose slots have not ended.
    pub fn promised(&self) -> u32 {
        count(self.deadlines.len() + self.restored.len())
    }

    /// Returns how the promises ended so far.
    pub fn tally(&self) -> PromiseCounts {
        self.tally
    }

    /// Returns how many positions are kept now for called holders.
    pub fn called(&self) -> u32 {
        count(self.calls.len())
    }

    /// Returns how many holders are expected to come between now and `until`. It counts called
    /// holders, holders of the open slot that have not come, and those of later slots. The open
    /// slot counts for less the longer it has been open.
    pub fn due(&self, now: Moment, until: Moment) -> f64 {
        let open =
            self.slots.at(now).and_then(|slot| self.slots.get(slot)).map_or(0.0, |slot| {
                f64::from(slot.outside) * (slot.passed(until) - slot.passed(now)).max(0.0)
            });
        self.expected_called(now) + (open + self.due_later(now, until)) * self.shows.rate()
    }

    /// Returns the tickets of uncalled holders in slots that begin between now and `until`. The
    /// last slot counts in the proportion that will have passed.
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

    /// Returns how many of the recently called holders are still expected.
    fn expected_called(&self, now: Moment) -> f64 {
        let (expected, at) = self.called_lately;
        expected * (-(now.0.saturating_sub(at.0) as f64) / micros(CALL_HEARD) as f64).exp()
    }

    /// Notes that a holder can no longer be called: it was called, or it came.
    fn call_no_more(&mut self, begins: Moment, number: u64, slot: Option<SlotNumber>) {
        self.listening.remove(&(begins, number));
        if self.callable.remove(&(begins, number)).is_some()
            && let Some(slot) = slot
        {
            self.slots.change(slot, |slot| slot.outside = slot.outside.saturating_sub(1));
        }
    }

    // === Promises ===

    /// Promises the first slot with capacity that begins at `earliest` or later. The rate is in
    /// requests per second. A client with a valid ticket gets the same one again. `None` if there
    /// is no capacity within the horizon, all tickets are out, or nothing is promised here.
    pub fn reserve(
        &mut self,
        now: Moment,
        earliest: Moment,
        rate: f64,
        client: ClientKey,
        nonce: Nonce,
    ) -> Option<SlotPromise> {
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
        let CalendarSlot { begins, ends, .. } = *self.slots.get(slot)?;
        self.drop_late_of(client);
        let ticket = Ticket { lane: self.lane, begins, ends, epoch: self.epoch, nonce };
        self.hold(ticket, client);
        self.put(nonce, slot);
        self.tally.promised += 1;
        Some(SlotPromise { ticket, is_new: true, ahead: self.ahead(self.holders.get(&nonce)?) })
    }

    /// Returns all open promises as they were stored, in the order of their slots.
    pub fn records(&self) -> Vec<TicketRecord> {
        let mut holders: Vec<&TicketHolder> = self.holders.values().collect();
        holders.sort_unstable_by_key(|holder| (holder.ticket.begins, holder.ticket.nonce));
        let mut records = Vec::with_capacity(holders.len());
        for TicketHolder { ticket, client, state, .. } in holders {
            records.push(TicketRecord::Promised { ticket: *ticket, client: *client });
            if matches!(state, HolderState::Called(_)) {
                records.push(TicketRecord::Called { nonce: ticket.nonce });
            }
        }
        records
    }

    /// Takes back a promise that could not be stored and was not given to anybody.
    pub fn forget(&mut self, now: Moment, nonce: Nonce) -> Option<TicketRecord> {
        self.settle(now);
        let holder = self.remove(nonce)?;
        if let Some(slot) = holder.slot {
            let is_given_here = !holder.is_adopted;
            self.slots.change(slot, |slot| slot.given = slot.given.saturating_sub(is_given_here.into()));
        }
        let made = if holder.is_adopted { &mut self.tally.adopted } else { &mut self.tally.promised };
        *made = made.saturating_sub(1);
        Some(TicketRecord::Forgotten { nonce })
    }

    /// Notes whether the holder of this ticket would receive a call. Only those that would are
    /// called.
    pub fn listen(&mut self, nonce: Nonce, would_hear: bool) {
        let Some(holder) = self.holders.get(&nonce) else { return };
        let place = (holder.ticket.begins, holder.number);
        if !would_hear {
            self.listening.remove(&place);
        } else if self.callable.contains_key(&place) {
            self.listening.insert(place, nonce);
        }
    }

    /// Calls the first holder that was not called before, because there is capacity now. Its
    /// position is kept until the returned moment. `None` if there is no such holder.
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

    /// Keeps the position of a called holder from now on. Returns until when.
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
        holder.state = HolderState::Called(until);
        self.calls.insert((until, number), nonce);
        Some(until)
    }

    // === Holders ===

    /// Returns the status of a shown ticket. Its signature has been verified. Nothing changes.
    pub fn show(&mut self, now: Moment, ticket: &Ticket) -> ShownTicket {
        self.settle(now);
        let now = self.now;
        let found = self.holders.get(&ticket.nonce).filter(|holder| holder.ticket == *ticket);
        let Some(holder) = found else {
            return match self.spent.contains_key(&ticket.nonce) {
                true => ShownTicket::Used,
                false if after(ticket.ends, LATE_FOR) <= now => ShownTicket::Expired,
                false => ShownTicket::Unknown,
            };
        };
        match holder.state {
            HolderState::InLine => ShownTicket::Used,
            _ if holder.has_ended => ShownTicket::Late,
            _ if holder.ticket.begins <= now => ShownTicket::Open { until: holder.ticket.ends },
            HolderState::Called(until) => ShownTicket::Open { until },
            HolderState::Out => ShownTicket::Early(self.promise(holder)),
        }
    }

    /// Notes that the holder is in the queue or runs at once, at whatever time. Returns false if
    /// the ticket is not valid.
    pub fn come(&mut self, now: Moment, nonce: Nonce) -> bool {
        self.settle(now);
        let Some(holder) = self.holders.get_mut(&nonce).filter(|holder| holder.state != HolderState::InLine)
        else {
            return false;
        };
        let begins = holder.ticket.begins;
        let number = holder.number;
        let slot = holder.slot;
        self.late.remove(&(holder.ticket.ends, number));
        let was = std::mem::replace(&mut holder.state, HolderState::InLine);
        if holder.has_ended && !holder.is_counted {
            holder.is_counted = true;
            *(if holder.was_missed { &mut self.tally.broken } else { &mut self.tally.late }) += 1;
        }
        let is_first_time = !std::mem::replace(&mut holder.has_come, true) && !holder.is_adopted;
        if let Some(slot) = slot.filter(|_| is_first_time) {
            self.slots.change(slot, |slot| slot.came += 1);
        }
        if let HolderState::Called(until) = was {
            self.calls.remove(&(until, number));
            self.called_lately = ((self.expected_called(now) - 1.0).max(0.0), now);
        }
        self.call_no_more(begins, number, slot);
        true
    }

    /// Notes that the holder has its permit: the ticket is used up. Returns the record to store
    /// once its request has ended. `None` if the holder had not come.
    pub fn ran(&mut self, now: Moment, nonce: Nonce) -> Option<TicketRecord> {
        self.settle(now);
        self.holders.get(&nonce).filter(|holder| holder.state == HolderState::InLine)?;
        let holder = self.remove(nonce)?;
        self.tally.kept += u64::from(!holder.has_ended);
        let until = after(holder.ticket.ends, LATE_FOR);
        self.remember_spent(nonce, until);
        Some(TicketRecord::Spent { nonce, until })
    }

    /// Notes that the holder left the queue before its turn. Its ticket is valid again: a lost
    /// connection costs nobody a position.
    pub fn reinstate_holder(&mut self, now: Moment, nonce: Nonce) {
        self.settle(now);
        let Some(holder) = self.holders.get_mut(&nonce).filter(|holder| holder.state == HolderState::InLine)
        else {
            return;
        };
        holder.state = HolderState::Out;
        if holder.has_ended {
            self.late.insert((holder.ticket.ends, holder.number), nonce);
        }
    }

    /// Returns the status of the ticket with this number, for its waiting holder.
    pub fn standing(&self, now: Moment, nonce: Nonce) -> TicketStatus {
        let Some(holder) = self.holders.get(&nonce) else {
            return if self.spent.contains_key(&nonce) { TicketStatus::Used } else { TicketStatus::Unknown };
        };
        let Ticket { begins, ends, .. } = holder.ticket;
        match holder.state {
            HolderState::InLine => TicketStatus::Used,
            _ if ends <= now => TicketStatus::Late,
            _ if begins <= now => TicketStatus::Open { for_another: between(now, ends) },
            HolderState::Called(until) if until > now => {
                TicketStatus::Open { for_another: between(now, until) }
            }
            _ => TicketStatus::Later { begins_in: between(now, begins), ahead: self.ahead(holder) },
        }
    }

    // === Time ===

    /// Applies changes that come from time alone. Returns when to call again; `None` if nothing
    /// happens before the next promise.
    pub fn tick(&mut self, now: Moment) -> Option<Moment> {
        self.settle(now);
        // The beginning of each slot counts, too, to show that the node was up while it was open.
        let slot = self.slots.row().front().filter(|_| !self.deadlines.is_empty());
        let slot = slot.map(|slot| if slot.begins > now { slot.begins } else { slot.ends });
        let deadline = self.deadlines.keys().next().map(|(ends, _)| *ends);
        let call = self.calls.keys().next().map(|(until, _)| *until);
        let late = self.late.keys().next().map(|(ends, _)| after(*ends, LATE_FOR));
        let spent = self.spent_by_end.first().map(|(until, _)| *until);
        [slot, deadline, call, late, spent].into_iter().flatten().min()
    }

    /// Applies everything that time alone has caused up to now.
    fn settle(&mut self, now: Moment) {
        let before = self.now;
        self.now = now.max(before);
        self.put_restored();
        let now = self.now;
        while let Some(nonce) = pop_until(&mut self.calls, now) {
            if let Some(holder) = self.holders.get_mut(&nonce) {
                holder.state = HolderState::Out;
            }
        }
        while let Some(nonce) = pop_until(&mut self.deadlines, now) {
            self.end(nonce, before);
        }
        while let Some(slot) = self.slots.pop_ended(now) {
            // In a slot during which the node was down, no holder could come.
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

    /// Handles the end of a holder's slot.
    fn end(&mut self, nonce: Nonce, before: Moment) {
        if let Some(TicketHolder { ticket, number, slot, .. }) = self.holders.get(&nonce) {
            self.call_no_more(ticket.begins, *number, *slot);
        }
        let Some(holder) = self.holders.get_mut(&nonce) else { return };
        holder.has_ended = true;
        holder.was_missed = before < holder.ticket.begins;
        if holder.state == HolderState::InLine {
            holder.is_counted = true;
            self.tally.broken += 1;
            return;
        }
        if let HolderState::Called(until) = std::mem::replace(&mut holder.state, HolderState::Out) {
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

    fn slot_with_room(
        &mut self,
        now: Moment,
        from: Moment,
        rate: f64,
        next: &TicketPolicy,
    ) -> Option<SlotNumber> {
        let last = after(now, next.horizon);
        if let Some(found) = self.slots.first_with_room(from, rate) {
            return Some(found).filter(|slot| self.slots.get(*slot).is_some_and(|slot| slot.begins <= last));
        }
        let len = slot_len(next, rate)?;
        let first = match self.slots.row().back() {
            Some(back) => back.ends,
            // A slot begins exactly where one is wanted first. Earlier slots are laid back from
            // there to now.
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
        let holder = TicketHolder {
            ticket,
            client,
            number: self.number,
            slot: None,
            rank: 0,
            state: HolderState::Out,
            has_come: false,
            has_ended: false,
            was_missed: false,
            is_counted: false,
            is_adopted: false,
        };
        self.clients.insert(client, ticket.nonce);
        self.holders.insert(ticket.nonce, holder);
    }

    /// Removes a holder from all tables.
    fn remove(&mut self, nonce: Nonce) -> Option<TicketHolder> {
        let holder = self.holders.remove(&nonce)?;
        self.adopted -= usize::from(holder.is_adopted);
        if let HolderState::Called(until) = holder.state {
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

    /// Drops a client's late ticket in favour of a new one: no client has two.
    fn drop_late_of(&mut self, client: ClientKey) {
        let nonce = self.clients.get(&client).copied();
        let is_late = |nonce: &Nonce| {
            self.holders
                .get(nonce)
                .is_some_and(|holder| holder.has_ended && holder.state != HolderState::InLine)
        };
        if let Some(nonce) = nonce.filter(is_late) {
            self.drop_late(nonce);
        }
    }

    /// Returns the promise of a client while its slot has not ended.
    fn promise_of(&self, client: ClientKey) -> Option<SlotPromise> {
        let holder = self.holders.get(self.clients.get(&client)?)?;
        (!holder.has_ended).then(|| self.promise(holder))
    }

    fn promise(&self, holder: &TicketHolder) -> SlotPromise {
        SlotPromise { ticket: holder.ticket, is_new: false, ahead: self.ahead(holder) }
    }

    fn ends_of(&self, nonce: Nonce) -> Option<Moment> {
        self.holders.get(&nonce).map(|holder| holder.ticket.ends)
    }

    /// Returns the number of tickets before this one, never fewer than there are. Within its own
    /// slot, tickets before it count even if they have run.
    fn ahead(&self, holder: &TicketHolder) -> u32 {
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

impl TicketRecord {
    /// Returns when it need not be kept any longer because it changes nothing. `None` if it only
    /// refers to another record.
    pub fn over_at(&self) -> Option<Moment> {
        match self {
            Self::Promised { ticket, .. } => Some(after(ticket.ends, LATE_FOR)),
            Self::Spent { until, .. } => Some(*until),
            Self::Called { .. } | Self::Forgotten { .. } | Self::Paced { .. } => None,
        }
    }
}

/// Removes and returns the first if its moment has come.
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

mod capacity;
#[cfg(test)]
mod tests;
